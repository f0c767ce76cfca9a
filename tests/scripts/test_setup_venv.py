"""scripts/setup_venv.sh with stand-ins for the interpreters and for pip: which Python is taken, and where
torch comes from.
"""

import os
import pathlib
import shutil
import subprocess

import pytest

ROOT = pathlib.Path(__file__).parent.parent.parent
CPU_INDEX = "https://download.pytorch.org/whl/cpu"
# an interpreter of this version; `-m venv` puts one into .venv whose pip says what it was asked
PYTHON = """#!/bin/bash
case "$*" in
    *version_info*) [[ " 3.10 3.11 3.12 3.13 3.14 " == *" VERSION "* ]] || exit 1 ;;
    --version) echo "Python VERSION.0" ;;
    "-m venv .venv") mkdir -p .venv/bin && cp "$0" .venv/bin/python && echo "made by VERSION" >> "$CALLS" ;;
    "-m pip show"*) exit $((1 - HAS_TORCH)) ;;
    # more than a pipe holds: a reader that leaves early is seen
    "-m pip config list") for _ in {1..9000}; do echo "$PIP_CONFIG" || exit 1; done ;;
    *--index-url*) echo "$*" >> "$CALLS"; exit "$INDEX_FAILS" ;;
    "-m pip install"*) echo "$*" >> "$CALLS" ;;
esac
"""


def set_up(
    folder, versions=("3.11",), named="", has_torch=0, pip_config="", index_fails=0, nvidia=False, **more
):
    """(exit code, output, what was asked of pip): in a folder with the script and the requirements."""
    programs = folder / "programs"
    programs.mkdir(exist_ok=True)
    (folder / "scripts").mkdir(exist_ok=True)
    for name in ("scripts/setup_venv.sh", "requirements.txt", "requirements-test.txt"):
        shutil.copy(ROOT / name, folder / name)
    for version in versions:
        write(programs / f"python{version}", PYTHON.replace("VERSION", version.removesuffix("-named")))
    if nvidia:
        write(programs / "nvidia-smi", "#!/bin/bash\n")
    for program in ("cat", "cmp", "cp", "mkdir", "grep", "uname", "bash"):
        link = programs / program
        if not link.exists():
            link.symlink_to(shutil.which(program) or program)
    calls = folder / "calls"
    calls.write_text("")
    environment = {
        "PATH": str(programs), "CALLS": str(calls), "HAS_TORCH": str(has_torch), "PIP_CONFIG": pip_config,
        "INDEX_FAILS": str(index_fails), **more,
    }
    if named:
        environment["BEVATRON_PYTHON"] = named
    sourced = ". scripts/setup_venv.sh requirements.txt requirements-test.txt; echo ready"
    command = ["bash", "-euo", "pipefail", "-c", sourced]  # as quickstart.sh and test.sh do it
    done = subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True)
    return done.returncode, done.stdout + done.stderr, calls.read_text().splitlines()


def write(path, text):
    path.write_text(text)
    path.chmod(0o755)


@pytest.mark.slow(every=2)
@pytest.mark.parametrize(
    "versions, named, taken",
    [
        (("3.10",), "", "3.10"),
        (("3.13",), "", "3.13"),
        (("3.14",), "", "3.14"),
        (("3.14", "3.11", "3.13"), "", "3.11"),
        (("3.11", "3.14"), "python3.14", "3.14"),
        (("3.9", "3.12"), "python3.9", "3.12"),
    ],
    ids=str,
)
def test_the_best_python_is_taken(tmp_path, versions, named, taken):
    code, output, calls = set_up(tmp_path, versions, named)
    assert code == 0 and output.endswith("ready\n") and f"with Python {taken}.0" in output, output
    assert calls[0] == f"made by {taken}"


@pytest.mark.parametrize("versions", [(), ("3.9",), ("3.15",)], ids=str)
def test_without_a_python_it_says_which_it_needs(tmp_path, versions):
    code, output, calls = set_up(tmp_path, versions)
    assert code == 2 and not calls
    assert output == "error: Python 3.10 to 3.14 is needed; install one, or name it in BEVATRON_PYTHON\n"


@pytest.mark.skipif(os.path.exists("/dev/kfd"), reason="an AMD GPU is here")
def test_torch_comes_without_cuda_where_there_is_no_gpu(tmp_path):
    code, output, (_, torch, rest) = set_up(tmp_path)
    (wanted,) = (line for line in (ROOT / "requirements.txt").read_text().splitlines() if line[:5] == "torch")
    assert code == 0 and f"--index-url {CPU_INDEX} {wanted}" in torch
    assert rest.endswith("-r requirements.txt -r requirements-test.txt") and "index" not in rest
    assert output.count("no GPU here") == 1
    assert set_up(tmp_path)[1:] == ("ready\n", [])  # once


@pytest.mark.skipif(os.path.exists("/dev/kfd"), reason="an AMD GPU is here")
def test_an_index_that_does_not_answer_is_one_line(tmp_path):
    code, output, (_, torch, rest) = set_up(tmp_path, index_fails=1)
    assert code == 0 and CPU_INDEX in torch and "-r requirements.txt" in rest
    assert output.count("that index does not answer: torch comes from PyPI") == 1


@pytest.mark.slow(every=2)
@pytest.mark.parametrize(
    "how",
    [
        {"nvidia": True},
        {"has_torch": 1},
        {"pip_config": "global.index-url='https://mirror.example/simple'"},
        {"pip_config": ":env:.find-links='/wheels'"},
        {"pip_config": "install.no-index='true'"},
        {"BEVATRON_TORCH": "default"},
    ],
    ids=str,
)
def test_torch_comes_from_where_pip_is_told(tmp_path, how):
    code, output, calls = set_up(tmp_path, **how)
    assert code == 0 and len(calls) == 2 and CPU_INDEX not in "".join(calls) and "CUDA" not in output
