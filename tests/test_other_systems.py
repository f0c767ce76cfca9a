"""Systems that are not Linux, as far as a process can be made to believe in one (tests/other_system.py)."""

import json
import os
import pathlib
import re
import subprocess
import sys

import pytest
from other_system import LINUX_ONLY
from ranks import MODEL, corpus
from test_house import ROOMS

ROOT = pathlib.Path(__file__).parent.parent
SYSTEM = str(ROOT / "tests" / "other_system.py")
ASKED_FIRST = {  # a name of Linux alone, where hasattr or getattr comes before it
    "runtime/pool.py": {"SCHED_BATCH", "sched_setscheduler", "sched_param"},
}


def started(*words: str) -> subprocess.CompletedProcess:
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    command = [sys.executable, *words]
    return subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=300)


def settings(folder: pathlib.Path, steps: int) -> list[str]:
    places = ["--data.path", corpus(folder), "--log.dir", str(folder), "--log.name", "run"]
    return ["quickstart", *MODEL, *places, "--train.steps", str(steps), "--checkpoint.every", "1"]


def steps_of(folder: pathlib.Path) -> list[dict]:
    rows = [json.loads(line) for line in (folder / "run" / "metrics.jsonl").read_text().splitlines()]
    return [row for row in rows if "loss" in row]


def test_a_mac_trains_on_its_cpu_saves_and_resumes(tmp_path):
    """The same numbers as Linux, of which this is the same machine."""
    for steps in (2, 4):
        end = started(SYSTEM, "macos", "train.py", *settings(tmp_path, steps))
        assert end.returncode == 0, end.stderr
    resumed = steps_of(tmp_path)
    assert "resumed from" in end.stdout and [row["step"] for row in resumed] == [1, 2, 3, 4]
    assert all(row["mem_gib"] > 0 for row in resumed)

    here = tmp_path / "linux"
    here.mkdir()
    for steps in (2, 4):
        assert started("train.py", *settings(here, steps)).returncode == 0
    assert [row["loss"] for row in resumed] == [row["loss"] for row in steps_of(here)]

    run = str(tmp_path / "run")
    text = started(SYSTEM, "macos", "scripts.generate", run, "--prompt", "ab", "--max-new-tokens", "4")
    assert text.returncode == 0 and text.stdout.startswith("ab"), text.stderr


def test_ranks_on_a_mac(tmp_path):
    torchrun = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    words = [*settings(tmp_path, 2), "--parallel.tp", "2", "--checkpoint.async_save", "true"]
    end = started(*torchrun, SYSTEM, "macos", "train.py", *words)
    assert end.returncode == 0, end.stderr
    assert [row["step"] for row in steps_of(tmp_path)] == [1, 2]


@pytest.mark.parametrize("program", [
    "train.py",
    *sorted(f"scripts.{path.stem}" for path in (ROOT / "scripts").glob("[a-z]*.py")),
])
def test_windows_is_refused_in_one_line(program):
    end = started(SYSTEM, "windows", program, "--help")
    assert end.returncode == 2 and end.stdout == ""
    (line,) = end.stderr.splitlines()
    assert line.startswith("error: Windows ") and "WSL" in line


def test_names_of_linux_alone_are_asked_for_first():
    names = "|".join(name for names in LINUX_ONLY.values() for name in names.split())
    for path in sorted(ROOT.rglob("*.py")):
        where = path.relative_to(ROOT)
        if where.parts[0] in (*ROOMS, "train.py", "build.py"):
            found = set(re.findall(rf"\b(?:os|signal|socket|time)\.({names})\b", path.read_text()))
            assert found <= ASKED_FIRST.get(str(where), set()), f"{where}: {found}"
