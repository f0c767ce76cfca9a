"""Runs that differ in a setting get folders that differ, though nobody names them; a run that can resume, and
one that is asked for again, keep their own.
"""

import json
import pathlib
import subprocess
import sys

import pytest
import run_folder
from ranks import MODEL, corpus

from config.reading import dump, resolve, split_argv
from config.reading.run_name import with_own_folder

ROOT = pathlib.Path(__file__).parents[2]


@pytest.mark.slow
def test_a_sweep_by_a_plain_shell_loop_makes_three_runs(tmp_path):
    settings = [*MODEL, "--data.path", corpus(tmp_path), "--train.steps", "2"]
    settings += ["--log.dir", str(tmp_path / "runs")]
    train = f'{sys.executable} train.py llama2-tiny "$@"'
    loop = f"for lr in 2e-3 1e-3 5e-3 1e-3; do {train} --optim.lr $lr || exit; done"
    done = subprocess.run(
        ["bash", "-c", loop, "loop", *settings], cwd=ROOT, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout.count("\ndone in ") == 3
    fourth = "llama2-tiny+optim.lr=0.001: already at step 2 of 2: the run is already finished"
    assert fourth in done.stdout

    rates = {"": 2e-3, "+optim.lr=0.001": 1e-3, "+optim.lr=0.005": 5e-3}
    expected = {f"llama2-tiny{suffix}": rate for suffix, rate in rates.items()}
    losses = set()
    assert {path.name for path in (tmp_path / "runs").iterdir()} == {*expected}
    for name, rate in expected.items():
        folder = tmp_path / "runs" / name
        cfg = resolve(None, str(folder / "config.yaml"), [])
        assert (cfg.optim.lr, cfg.log.name) == (rate, name)
        losses.add(run_folder.steps(folder)[-1]["loss"])
    assert len(losses) == 3


@pytest.fixture
def get_name(tmp_path):
    """get_name(words): the run folder that a command gets beside a run of llama2-tiny with 9 steps."""
    folder = tmp_path / "llama2-tiny"
    folder.mkdir()
    base = ["llama2-tiny", "--train.steps", "9", "--log.dir", str(tmp_path)]
    trained = resolve(*split_argv([*base, "--model.vocab", "257"]))  # the data decided it
    (folder / "config.yaml").write_text(dump(trained))

    def of(*words, finished=True, last_exit=0):
        starts = [{"exit_code": 0}, {"exit_code": last_exit}]
        (folder / "starts.jsonl").write_text("".join(json.dumps(start) + "\n" for start in starts))
        (folder / "summary.json").write_text(json.dumps({"finished": finished}))
        name, file, argv = split_argv([*base, *words])
        return with_own_folder(resolve(name, file, argv), file, argv).log.name

    of.config_file = str(folder / "config.yaml")
    return of


@pytest.mark.slow(every=3)
@pytest.mark.parametrize("words, suffix", [
    ((), ""),
    (("--optim.lr", "5e-3"), "+optim.lr=0.005"),
    (("--train.seed", "7", "--model.dropout", "0.1"), "+model.dropout=0.1+train.seed=7"),
    (("--checkpoint.init_from", "a b/c"), "+checkpoint.init_from=a_b_c"),
    (("--checkpoint.resume", "b/step_00000002"), "+checkpoint.resume=b_step_00000002"),
    (("--checkpoint.resume", "none"), ""),
    (("--log.every", "1", "--train.max_minutes", "3", "--data.prefetch", "4"), ""),  # idle
    (("--train.steps", "12", "--optim.lr", "5e-3"), ""),  # continued
    (("--train.steps", "8"), ""),  # train.py refuses it by name
])
def test_the_name_follows_from_the_settings(get_name, words, suffix):
    assert get_name(*words) == f"llama2-tiny{suffix}"


def test_a_run_that_is_not_finished_or_is_named_keeps_its_folder(get_name):
    changed = ("--optim.lr", "5e-3")
    assert get_name(*changed, finished=False) == "llama2-tiny"
    assert get_name(*changed, last_exit=None) == "llama2-tiny"  # killed on the way to a later horizon
    assert get_name(*changed, "--log.name", "llama2-tiny") == "llama2-tiny"
    assert get_name(*changed, "--config", get_name.config_file) == "llama2-tiny"


@pytest.mark.slow(every=2)
@pytest.mark.parametrize("text", ["", "[]", "{", '{"finished": 1}'])
def test_a_folder_that_cannot_be_read_is_left_to_train(get_name, tmp_path, text):
    get_name()
    (tmp_path / "llama2-tiny" / "config.yaml").write_text(text)
    assert get_name("--optim.lr", "5e-3") == "llama2-tiny"
