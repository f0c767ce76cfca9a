"""scripts.verify: a proof in parts is the whole proof, a part that does not exist is refused, and a layout that dies is one that failed."""
import os

import pytest

from config import ConfigError
from scripts import verify
from scripts.verify import main, part_of


@pytest.mark.parametrize("n", [1, 2, 4, 7, 10])
def test_parts_are_the_whole_in_its_order(n):
    cells = [{"cell": i} for i in range(10)]
    parts = [part_of(cells, f"{k}/{n}") for k in range(1, n + 1)]
    assert sum(parts, []) == cells and max(map(len, parts)) - min(map(len, parts)) <= 1


@pytest.mark.parametrize("part", ["0/4", "5/4", "2", "2/0", "-1/4", "a/b", "1/4/2", "1/11", "1/2 ", ""])
def test_parts_that_do_not_exist_are_refused(part):
    with pytest.raises(ConfigError, match="^--part: ") as e:
        part_of([{}] * 10, part)
    assert "K/N" in str(e.value) and "\n" not in str(e.value)


def test_a_part_runs_its_own_cells_and_says_which(capsys):
    def said(*part: str) -> list[str]:
        assert main(["llama3-tiny", "--world", "1", "--layouts", "5", "--only", "mb1", *part]) == 0
        return capsys.readouterr().out.splitlines()

    def cells(lines: list[str]) -> list[str]:
        return [line for line in lines if line.startswith("ok ")]

    one, two = said("--part", "1/2"), said("--part", "2/2")
    assert len(cells(one)) == 2 and cells(one) + cells(two) == cells(said())
    assert two[0].startswith("llama3-tiny: part 2/2: 3 cells of") and two[-1].startswith("part 2/2: 3 of 3 layouts train like one process")


def test_a_layout_that_dies_does_not_hide_the_others(monkeypatch, capfd):
    calls, prove = [], verify.prove

    def first_dies(pool, *args):
        calls.append(pool)
        return prove(pool, *args) if len(calls) > 1 else pool.run(os.fspath)  # which takes no World

    monkeypatch.setattr(verify, "prove", first_dies)
    assert main(["llama3-tiny", "--world", "2", "--layouts", "2", "--only", "mb1", "zero1"]) == 1
    told = capfd.readouterr()
    lines = [line for line in told.out.splitlines() if line.startswith(("ok ", "WRONG "))]
    assert lines[0].startswith("WRONG") and "died: TypeError" in lines[0] and lines[1].startswith("ok") and "Traceback" in told.err
    assert calls[0] is not calls[1] and told.out.splitlines()[-1].startswith("1 of 2 layouts")
