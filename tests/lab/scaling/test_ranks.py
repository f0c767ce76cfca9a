"""A run of a ladder on several ranks ends with the code of its ranks, in whatever folder it is started."""

import pytest
from ranks import MODEL, corpus

from durable.programs import Programs


@pytest.mark.slow
@pytest.mark.parametrize("ranks", [1, 2])
def test_the_code_is_that_of_train(ranks, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("PYTHONPATH", raising=False)
    output = tmp_path / "log"
    with Programs() as programs:
        check_codes(programs, ranks, output, tmp_path)


def check_codes(programs, ranks, output, tmp_path):
    assert programs.train(["lama3-tiny"], ranks, output) == 2
    assert output.read_text().startswith("error: lama3-tiny: no such recipe")
    words = ["llama3-tiny", *MODEL, "--data.path", corpus(tmp_path), "--log.dir", str(tmp_path)]
    assert programs.train([*words, "--train.steps", "4", "--train.max_minutes", "1e-6"], ranks, output) == 75
    assert programs.train([*words, "--train.steps", "4"], ranks, output) == 0
