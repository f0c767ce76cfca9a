"""The scripts for SLURM beside train.sbatch, with stand-ins for srun and scontrol: what a job runs, that a
signal reaches the run, and that an unfinished one goes back into the queue."""
import csv
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from small_jobs import SMALL

ROOT = Path(__file__).parents[3]
SCRIPTS = ROOT / "scripts" / "scaling"
SRUN = '#!/bin/bash\nwhile [[ $1 = -* ]]; do shift; done\nSLURM_NODEID=0 exec "$@"\n'
SCONTROL = """#!/bin/bash
echo "scontrol $*" >> "$CALLS"
case "$1 $2" in
    "show hostnames") echo 127.0.0.1 ;;
    "show node") echo "NodeName=$3 Arch=x86_64 NodeHostName=host9" ;;
    "show job") echo "JobId=1 ExcNodeList=(null)" ;;
esac
"""
# In the place of python: notes its words; ends with $CODE, at once or when USR1 comes. $KEPT: what its runs
# have kept then, and what becomes of them.
PYTHON = """#!/bin/bash
case "$*" in *" --kept") cat "$CALLS.kept"; exit ;; esac
[ -z "$KEPT" ] || echo "$KEPT" > "$CALLS.kept"
[ -z "$WAIT" ] || trap 'echo caught >> "$CALLS"; exit "$CODE"' USR1
echo "python $*" >> "$CALLS"
while [ -n "$WAIT" ]; do sleep 0.02; done
exit "$CODE"
"""


def submit(tmp_path, script, *args, python=None, code=0, wait=False, kept="", **more):
    """-> exit code, calls, output. more: of the environment."""
    for name, text in (("srun", SRUN), ("scontrol", SCONTROL), ("python", PYTHON)):
        (tmp_path / name).write_text(text)
        (tmp_path / name).chmod(0o755)
    calls = tmp_path / "calls"
    calls.write_text("")
    (tmp_path / "calls.kept").write_text("40 - -\n")
    env = {
        **os.environ,
        "PATH": f"{tmp_path}:{os.environ['PATH']}",
        "PYTHON": python or str(tmp_path / "python"),
        "CALLS": str(calls),
        "CODE": str(code),
        "WAIT": "1" if wait else "",
        "KEPT": kept,
        "SLURM_SUBMIT_DIR": str(ROOT),
        "SLURM_JOB_NODELIST": "node7",
        "SLURM_JOB_ID": "40321",
        "SLURM_ARRAY_TASK_ID": "2",
        "SLURM_NNODES": "1",
        "SLURM_GPUS_ON_NODE": "2",
        **more,
    }
    command = ["bash", str(SCRIPTS / script), *args]
    job = subprocess.Popen(command, env=env, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    if wait:
        deadline = time.monotonic() + 60
        while "python" not in calls.read_text() and time.monotonic() < deadline:
            time.sleep(0.02)
        job.send_signal(signal.SIGUSR1)
    out, _ = job.communicate(timeout=120)
    return job.returncode, calls.read_text(), out


@pytest.mark.parametrize("script,command,place", [
    ("ladder.sbatch", "ladder", "--rung 2"),
    ("sweep.sbatch", "sweep", "--only 2"),
])
def test_a_job_of_an_array_runs_its_own_part(tmp_path, script, command, place):
    rc, calls, _ = submit(tmp_path, script, "runs/x", "llama3-8b", "--train.seq_len", "64")
    assert rc == 0
    assert calls == (f"python -m scripts.scaling {command} --out runs/x --recipe llama3-8b {place} --ranks 2 "
                     "--train.seq_len 64\n")


@pytest.mark.parametrize("asked", ["1", "h100:1"])
def test_a_job_that_has_a_node_alone_takes_the_gpus_that_it_asked_for(tmp_path, monkeypatch, asked):
    """SLURM_GPUS_ON_NODE are all of the node's then."""
    monkeypatch.setenv("SLURM_GPUS_PER_NODE", asked)
    _, calls, _ = submit(tmp_path, "sweep.sbatch", "runs/x", "llama3-8b")
    assert "--ranks 1" in calls


@pytest.mark.slow(every=2)
@pytest.mark.parametrize("script", ["ladder.sbatch", "sweep.sbatch"])
@pytest.mark.parametrize("code", [75, 2])
def test_the_signal_reaches_the_run_and_an_unfinished_one_is_requeued(tmp_path, script, code):
    rc, calls, _ = submit(tmp_path, script, "runs/x", "quickstart", code=code, wait=True, kept="60 - -")
    assert rc == code and "caught" in calls
    assert ("scontrol requeue 40321" in calls) == (code == 75), "a mistake of the user's stays down"


@pytest.mark.parametrize("code, kept, is_requeued", [
    (75, "40 1 -", False),  # no newer checkpoint: it would come back for ever
    (75, "60 1 -", True),
    (76, "60 1 -", True),  # a hang, as in train.sbatch
    (75, "60 0 -", False),  # a person's empty STOP file
    (77, "60 0 -", False),
])
def test_only_while_its_runs_advance(tmp_path, code, kept, is_requeued):
    rc, calls, out = submit(tmp_path, "ladder.sbatch", "runs/x", "llama3-8b", code=code, kept=kept)
    assert rc == code and ("scontrol requeue" in calls) == is_requeued
    assert ("no new checkpoint" in out) == kept.startswith("40 1")


def test_a_job_of_an_array_is_requeued_alone_and_without_a_bad_node(tmp_path):
    """The last job of an array has the number of all."""
    words = {"code": 80, "kept": "60 1 host9", "SLURM_ARRAY_JOB_ID": "40321"}
    rc, calls, out = submit(tmp_path, "sweep.sbatch", "runs/x", "llama3-8b", **words)
    assert rc == 80 and "scontrol requeue 40321_2\n" in calls
    assert calls.endswith("scontrol update JobId=40321_2 ExcNodeList=127.0.0.1\n"), out
    _, calls, _ = submit(tmp_path, "sweep.sbatch", "runs/x", "llama3-8b", **words | {"kept": "60 1 -"})
    assert "scontrol requeue 40321_2\n" in calls and "update" not in calls


@pytest.mark.parametrize("script", ["ladder.sbatch", "sweep.sbatch", "systems.sbatch"])
def test_what_comes_first_is_named(tmp_path, script):
    rc, calls, out = submit(tmp_path, script)
    assert rc != 0 and "the folder of the runs comes first" in out and "python" not in calls


@pytest.mark.slow
def test_systems_starts_its_ranks_through_srun(tmp_path):
    """With the real program: two ranks, started as on a node of a cluster, and its forecast."""
    folder = tmp_path / "runs"
    rc, calls, out = submit(
        tmp_path, "systems.sbatch", str(folder), "quickstart", "h100-ib", "2,4", "--layout", "",
        "--mode", "weak", "--steps", "5", *SMALL, python=sys.executable,
    )
    assert rc == 0, out
    assert "scontrol show hostnames node7" in calls
    with open(folder / "systems.csv", newline="") as file:
        (row,) = csv.DictReader(file)
    assert row["ranks"] == "2" and row["global_batch"] == "4" and float(row["forecast_ms"]) > 0
    assert (folder / "weak-dp-2" / "summary.json").exists()


@pytest.mark.parametrize("script, words", [
    ("ladder.sbatch", ["out", "llama3-8b"]),
    ("sweep.sbatch", ["out", "llama3-8b"]),
    ("systems.sbatch", ["out", "llama3-8b", "h100-ib", "2,4"]),
])
def test_what_the_cluster_needs_comes_from_one_file(tmp_path, monkeypatch, script, words):
    file = f'export PYTHON={tmp_path}/python; echo "modules loaded" >> "$CALLS"\n'
    (tmp_path / "cluster.sh").write_text(file)
    monkeypatch.setenv("BEVATRON_ENVIRONMENT", str(tmp_path / "cluster.sh"))
    code, calls, out = submit(tmp_path, script, *words, python="none")
    assert code == 0 and calls.startswith("modules loaded\npython -m scripts.scaling "), out


def test_every_job_has_the_cores_of_its_node():
    """One task a node gets one core, unless the job says otherwise."""
    every = [*SCRIPTS.glob("*.sbatch"), *SCRIPTS.parent.joinpath("slurm").glob("*.sbatch")]
    assert len(every) == 6
    for script in every:
        lines = script.read_text().splitlines()
        assert "#SBATCH --exclusive" in lines, script.name
