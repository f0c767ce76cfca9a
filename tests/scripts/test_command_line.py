"""A mistake in a command's options is one line on stderr, exit code 2, whichever command it is."""

import contextlib
import io
import runpy
import subprocess
import sys
import warnings
from pathlib import Path

import pytest

from config import ConfigError
from config.command_line import CommandParser, needs_lab

ROOT = Path(__file__).parents[2]
SCRIPTS = {  # words of each, and what is said of them
    "average": ("", "RUN[@STEP]: missing; see python -m scripts.average --help for the options"),
    "bench": ("step --steps two", "--steps: expected a whole number, got 'two'"),
    "compare": ("a b --watch soon", "--watch: expected a whole number, got 'soon'"),
    "convert": ("to-hf a b --dtype fp64", "--dtype: invalid choice: 'fp64' (choose from"),
    "corpus": ("c4 --files few", "--files: expected a whole number, got 'few'"),
    "evaluate": ("a --data", "--data: expected one argument"),
    "generate": ("a --temperature hot", "--temperature: expected a number, got 'hot'"),
    "grid": ("llama3-tiny --log.name a --over seed 1", "--over: seed is not a key; write --over optim.lr"),
    "launch": ("--nproc two -- llama3-tiny", "expected a whole number of at least 1, got 'two'"),
    "mutate": ("--what",
               "unrecognized arguments: --what; see python -m scripts.mutate --help for the options"),
    "plan": ("llama3-8b --gpus many", "--gpus: expected N or MIN:MAX, such as 64 or 4:8, got 'many'"),
    "preflight": ("--disk-mb few", "--disk-mb: expected a whole number, got 'few'"),
    "prepare_data": ("--workers few", "--workers: expected a whole number, got 'few'"),
    "reproduce": ("", "RUN: missing; see python -m scripts.reproduce --help for the options"),
    "scaling": ("laddder", "command: invalid choice: 'laddder' (choose from"),
    "schedule": ("--pp two", "--pp: expected a whole number, got 'two'"),
    "scrub": ("", "RUN_OR_CHECKPOINT: missing; see python -m scripts.scrub --help for the options"),
    "submit": ("--nodes 2", "SCRIPT: missing; name what is submitted, such as scripts/slurm/train.sbatch"),
    "verify": ("llama3-tiny --world two", "--world: expected a whole number, got 'two'"),
}
def test_a_command_of_lab_in_a_clone_without_it_is_one_line(capsys):
    with pytest.raises(SystemExit) as end, needs_lab():
        raise ModuleNotFoundError("No module named 'lab'", name="lab.proof")
    assert end.value.code == 2 and capsys.readouterr().err.startswith("error: lab/: ")
    with pytest.raises(ModuleNotFoundError), needs_lab():
        raise ModuleNotFoundError("No module named 'yaml'", name="yaml")


OF_LAB = ("bench", "mutate", "scaling", "verify")


def test_each_script_has_a_mistake_here():
    names = {file.stem for file in (ROOT / "scripts").glob("*.py")} - {"__init__", "demo_tasks", "dry_run"}
    assert set(SCRIPTS) == names | {"compare", "scaling"}


@pytest.mark.parametrize("name", SCRIPTS)
def test_a_mistake_is_one_line(name, monkeypatch):
    """As `python -m scripts.NAME` runs it."""
    if name in OF_LAB and not (ROOT / "lab").is_dir():
        pytest.skip("this clone has no lab/")
    words, says = SCRIPTS[name]
    monkeypatch.setattr(sys, "argv", [name, *words.split()])
    said = io.StringIO()
    with contextlib.redirect_stderr(said), pytest.raises(SystemExit) as end, warnings.catch_warnings():
        warnings.simplefilter("ignore", RuntimeWarning)  # the module may be imported already
        runpy.run_module(f"scripts.{name}", run_name="__main__", alter_sys=True)
    (line,) = said.getvalue().splitlines()
    assert end.value.code == 2 and line.startswith("error: ") and says in line


@pytest.mark.parametrize(
    "words, says",
    [
        ("--world two", "--world: expected a whole number, got 'two'"),
        ("--world 2 --phase", "--phase: expected one argument"),
    ],
)
def test_a_mistake_of_a_dry_run_is_one_line(words, says):
    command = [sys.executable, "train.py", "llama3-tiny", "--dry-run", *words.split()]
    ended = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert (ended.returncode, ended.stdout, ended.stderr) == (2, "", f"error: {says}\n")


def test_a_command_of_a_command_says_it_too():
    parser = CommandParser(prog="p")
    commands = parser.add_subparsers(dest="command", required=True)
    commands.add_parser("go").add_argument("--far", type=float)
    with pytest.raises(ConfigError, match="^--far: expected a number, got 'x'$"):
        parser.parse_args(["go", "--far", "x"])
    with pytest.raises(ConfigError, match="^command: missing; see p --help for the options$"):
        parser.parse_args([])
