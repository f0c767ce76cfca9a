"""train.py --dry-run, as a user types it."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("triton", reason="no Triton for this platform")

ROOT = Path(__file__).resolve().parents[2]
SIZE = (
    "--model.vocab 64 --model.layers 4 --model.hidden 16 --model.heads 2 --model.kv_heads none "
    "--model.ffn 16 --train.seq_len 8 --train.micro_batch 1 --train.global_batch 8"
).split()


def dry_run(*words: str) -> subprocess.CompletedProcess:
    return subprocess.run(
        [sys.executable, "train.py", "llama3-tiny", "--dry-run", *SIZE, *words],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=200,
    )


def test_it_says_what_each_place_computes_holds_and_exchanges(tmp_path):
    done = dry_run(
        *"--world 8 --parallel.pp 2 --parallel.tp 2 --parallel.zero 1".split(),
        *("--json", str(tmp_path / "f.json"), "--picture", str(tmp_path / "f.png")),
    )
    assert done.returncode == 0, done.stderr
    assert "llama3-tiny on 8 ranks (dp2 tp2 pp2) of h100-ib (NVIDIA H100 80GB HBM3)" in done.stdout
    assert "the exchanges of a pipeline meet, under the rules of nccl" in done.stdout
    assert (tmp_path / "f.png").stat().st_size > 5000
    tree = json.loads((tmp_path / "f.json").read_text())
    first, last = tree["roles"]
    assert (first["rank"], last["rank"]) == (0, 4) and tree["findings"] == []
    assert first["flops"] > 0 and last["flops"] > 0
    for role in tree["roles"]:
        assert role["peak"] == sum(held["nbytes"] for held in role["held"]) > role["state"] > 0
        assert max(point[1] for point in role["curve"]) == role["peak"]
        assert not role["unknown"] and not role["waits"]


@pytest.mark.slow(every=4)
@pytest.mark.parametrize("words, named", [
    ("", "--world"),
    ("--world 0", "--world"),
    ("--world 3 --parallel.tp 2", "parallel"),
    ("--world 2 --cluster nowhere", "nowhere"),
    ("--world 2 --model.vocab none", "model.vocab"),
    ("--world 2 --picture x.jpg", "--picture"),
    ("--world 2 --optim.name muon", "optim.name"),
])
def test_what_cannot_be_is_refused_in_one_line(words, named):
    done = dry_run(*words.split())
    assert done.returncode == 2 and done.stdout == ""
    assert named in done.stderr and len(done.stderr.strip().splitlines()) == 1


@pytest.mark.slow
def test_of_a_run_with_phases_the_first_is_said_to_be_recorded():
    done = dry_run("--world", "1", "--train.phases", '[{"after_steps": 3, "optim.lr": 1e-4}]')
    assert done.returncode == 0 and "recorded: the first of 2 phases" in done.stdout


@pytest.mark.slow
def test_a_job_that_is_too_large_is_said_to_be_so():
    done = dry_run(*"--world 1 --model.hidden 32768 --model.ffn 65536".split())
    assert done.returncode == 1 and "at its peak: too much" in done.stdout
