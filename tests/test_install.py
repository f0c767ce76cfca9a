"""`pip install .`: one package in the environment, which trains from any folder and leaves other packages of
the names of ours alone.
"""

import json
import os
import pathlib
import shutil
import subprocess
import sys
import textwrap
import zipfile

import numpy as np
import pytest

import config.version
from config.provenance import checkout_files

ROOT = pathlib.Path(__file__).parent.parent
TINY = (
    "--model.layers 1 --model.hidden 32 --model.mixer.heads 4 --model.mixer.kv_heads 2 --model.mlp.width 48 "
    "--train.steps 2 --train.seq_len 16 --train.micro_batch 1 --train.global_batch 4 --train.threads 1 "
    "--eval.batches 1 --eval.every none --eval.sample 0 --data.path corpus --log.name tiny"
).split()
PIP = (sys.executable, "-m", "pip", "--disable-pip-version-check", "-q")


@pytest.fixture(scope="module")
def wheel(tmp_path_factory):
    """Built from a copy: setuptools leaves its folders in the one it builds from."""
    source, out = tmp_path_factory.mktemp("source"), tmp_path_factory.mktemp("wheel")
    for name in checkout_files(ROOT):
        (source / name).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(ROOT / name, source / name)
    build = [*PIP, "wheel", "--no-build-isolation", "--no-deps", "--no-index", "-w", str(out), str(source)]
    subprocess.run(build, check=True, capture_output=True, text=True)
    (file,) = out.glob("*.whl")
    return file


@pytest.fixture(scope="module")
def place(wheel, tmp_path_factory):
    """site-packages, with Bevatron and another package `data`."""
    place = tmp_path_factory.mktemp("site-packages")
    install = [*PIP, "install", "--no-deps", "--no-index", "--no-compile", "--target", str(place), str(wheel)]
    subprocess.run(install, check=True, capture_output=True, text=True)
    found = {path.name for path in place.iterdir()}
    assert found - {"bin"} == {"bevatron", f"bevatron-{config.version.VERSION}.dist-info"}
    (place / "data").mkdir()
    (place / "data" / "__init__.py").write_text("WHOSE = 'of the environment'\n")
    return place


@pytest.fixture
def elsewhere(tmp_path):
    """A folder of the user's that has packages of our names too."""
    for name in ("data", "config"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "__init__.py").write_text("raise ImportError('this is not of Bevatron')\n")
    letters = np.random.default_rng(0).integers(97, 123, (60, 40))
    documents = [json.dumps({"text": "".join(map(chr, row))}) for row in letters]
    (tmp_path / "text.jsonl").write_text("\n".join(documents) + "\n")
    return tmp_path


def run(place, folder, *words, expect=0):
    """stdout and stderr of the interpreter with these words."""
    environment = {**os.environ, "PYTHONPATH": str(place)}
    done = subprocess.run(
        [sys.executable, *words], cwd=folder, env=environment, capture_output=True, text=True, timeout=300
    )
    assert done.returncode == expect, done.stdout + done.stderr
    return done.stdout, done.stderr


@pytest.mark.slow
def test_the_wheel_has_everything_that_runs_and_nothing_else(wheel):
    names = set(zipfile.ZipFile(wheel).namelist())
    folders = ("config", "kernels", "parallel", "model", "data", "optim", "checkpoint", "durable", "runtime",
               "plan", "lab", "scripts")
    for path in checkout_files(ROOT):
        is_code = path.endswith(".py") and path.startswith(tuple(f"{folder}/" for folder in folders))
        is_at_root = path in ("train.py", "start.py", "phases.py", "services.py", "build.py")
        of_a_checkout = ("lab/proof/mutate/", "lab/benchmarks/")
        is_wanted = is_at_root or (is_code and not path.startswith(of_a_checkout))
        if is_wanted or path.startswith("configs/"):
            assert f"bevatron/{path}" in names, path
    unwanted = ("bevatron/tests", "bevatron/lab/proof/mutate", "bevatron/lab/benchmarks", "tests")
    assert not {name for name in names if name.startswith(unwanted)}


def test_the_requirements_of_the_wheel_are_those_of_the_files(wheel):
    with zipfile.ZipFile(wheel) as file:
        (name,) = (name for name in file.namelist() if name.endswith("/METADATA"))
        text = file.read(name).decode()
    lines = [line for line in text.splitlines() if line.startswith("Requires-Dist: ")]
    required = (ROOT / "requirements.txt").read_text().splitlines()
    plain = [line for line in required if line and not line.startswith("#")]
    assert len([line for line in lines if "extra ==" not in line]) == len(plain)
    assert f"\nVersion: {config.version.VERSION}\n" in text and "\nRequires-Python: >=3.10\n" in text
    for extra in ("test", "gpu", "eval", "stores"):
        assert any(f'extra == "{extra}"' in line for line in lines)


@pytest.mark.slow
def test_it_trains_in_a_folder_with_packages_of_our_names(place, elsewhere):
    prepare_data(place, elsewhere)
    out, _ = run(place, elsewhere, "-m", "bevatron", "train", "llama3-tiny", *TINY)
    assert out.startswith(f"Bevatron {config.version.VERSION} · torch ") and "2/2" in out
    assert (elsewhere / "runs" / "tiny" / "summary.json").exists()
    out, _ = run(place, elsewhere, "-m", "bevatron", "evaluate", "runs/tiny")
    assert "loss" in out


def prepare_data(place, folder):
    """Its workers are new interpreters."""
    words = "prepare_data --input text.jsonl --tokenizer bytes --out corpus --workers 2".split()
    run(place, folder, "-m", "bevatron", *words)


@pytest.mark.slow
def test_ranks_and_workers_find_it_too(place, elsewhere):
    if not (ROOT / "lab").is_dir():
        pytest.skip("this clone has no lab/, and bevatron verify is one of the commands")
    prepare_data(place, elsewhere)
    _, err = run(place, elsewhere, "-m", "bevatron", "launch", "--nproc", "2", "--", "llama3-tiny", *TINY)
    assert "launch: 2 ranks ended with code 0" in err
    if sys.version_info >= (3, 11):  # 3.10 has no PYTHONSAFEPATH: bevatron/__main__.py says what follows
        words = "verify llama3-tiny --world 2 --layouts 1".split()
        out, _ = run(place, elsewhere, "-m", "bevatron", *words)
        assert "1 of 1" in out or "layout" in out, out


def test_its_import_changes_nothing_and_a_name_that_is_taken_is_refused(place, tmp_path):
    program = """
        import sys
        path, modules = list(sys.path), set(sys.modules)
        import bevatron
        assert sys.path == path
        assert not {"data", "config", "torch", "model"} & (set(sys.modules) - modules)
        import data
        assert data.WHOSE == "of the environment"
        try:
            bevatron.use()
        except ImportError as error:
            assert sys.path == path
            print(error)
    """
    out, _ = run(place, tmp_path, "-c", textwrap.dedent(program))
    assert out.startswith("data is already imported from ") and "separate process" in out


def test_a_notebook_can_use_the_modules(place, tmp_path):
    program = """
        import bevatron
        bevatron.use()
        bevatron.use()
        import sys
        assert sys.path.count(str(bevatron.FOLDER)) == 1
        import config.reading, data
        print(config.reading.resolve("llama3-tiny", None, []).model.preset, config.__file__, data.__file__)
        print(bevatron.__version__)
    """
    out, _ = run(place, tmp_path, "-c", textwrap.dedent(program))
    assert out.splitlines()[0].split() == [
        "llama3-tiny", str(place / "bevatron" / "config" / "__init__.py"),
        str(place / "bevatron" / "data" / "__init__.py"),
    ]
    assert out.splitlines()[1] == config.version.VERSION


def test_the_command_in_a_clone_is_that_of_the_clone(tmp_path):
    out, _ = run(ROOT, tmp_path, "-m", "bevatron", "train", "--list")
    assert "llama3-tiny" in out


@pytest.mark.slow(every=2)
@pytest.mark.parametrize("words, code, text", [
    ([], 0, "prepare_data"),
    (["--help"], 0, "bevatron COMMAND"),
    (["--version"], 0, f"Bevatron {config.version.VERSION}"),
    (["trian"], 2, "error: trian: no such command; there are train, "),
    (["train", "lama3-tiny"], 2, "error: lama3-tiny: no such recipe"),
    (["plan", "--help"], 0, "--gpus"),
])
def test_the_installed_command_answers(place, tmp_path, words, code, text):
    out, err = run(place, tmp_path, "-m", "bevatron", *words, expect=code)
    assert text in out + err
