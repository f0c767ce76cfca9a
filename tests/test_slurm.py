"""scripts/slurm/train.sbatch with stand-ins for srun, scontrol and torchrun: what is requeued and what stays
down; and every recipe of scripts/recipes against the rules at its own world size.
"""

import json
import os
import pathlib
import re
import signal
import subprocess
import sys
import time

import pytest

import config
from model.schedules import plan_pipeline

ROOT = pathlib.Path(__file__).parent.parent
SCRIPT = ROOT / "scripts" / "slurm" / "train.sbatch"
RECIPES = sorted((ROOT / "scripts" / "recipes").glob("*.sh"))
SRUN = '#!/bin/bash\necho "srun $1" >> "$CALLS"\nshift\nSLURM_NODEID=1 exec "$@"\n'
SCONTROL = (
    '#!/bin/bash\necho "scontrol $*" >> "$CALLS"\n[ "$1" = show ] && printf "node7\\nnode8\\n" || true\n'
)
# stands in for torchrun alone: waits for a STOP file where told to, leaves a checkpoint and an exit reason,
# exits 1 as torchrun does
PYTHON = """#!/bin/bash
case "$*" in *torch.distributed.run*) ;; *) exec "$REAL" "$@" ;; esac
echo "torchrun $*" >> "$CALLS"
while [ -n "$WAIT" ] && [ ! -e "$RUN/STOP" ]; do sleep 0.02; done
[ -z "$WAIT" ] || echo "STOP says $(cat "$RUN/STOP")" >> "$CALLS"
rm -f "$RUN/STOP"
[ -z "$STEP" ] || mkdir -p "$RUN/checkpoints/step_$STEP"
[ -z "$CODE" ] || echo "{\\"code\\": $CODE$AGAIN}" > "$RUN/exit_reason$OF.json"
[ "$CODE" = 0 ] || exit 1
"""


def submit(
    tmp_path,
    code="",
    step="",
    wait="",
    args=("llama3-tiny", "--log.name", "r"),
    usr1=False,
    again=None,
    of="",
):
    """-> exit code, the calls that were made. code, again: what exit_reason.json says; of: .rankN where it is
    not rank 0's."""
    for name, text in (("srun", SRUN), ("scontrol", SCONTROL), ("python", PYTHON)):
        (tmp_path / name).write_text(text)
        (tmp_path / name).chmod(0o755)
    calls = tmp_path / "calls"
    calls.write_text("")
    env = {
        **os.environ,
        "PATH": f"{tmp_path}:{os.environ['PATH']}",
        "PYTHON": str(tmp_path / "python"),
        "REAL": sys.executable,
        "CALLS": str(calls),
        "RUN": str(tmp_path / "r"),
        "CODE": code,
        "STEP": step,
        "OF": of,
        "AGAIN": "" if again is None else f', "requeue": {json.dumps(again)}',
        "WAIT": wait,
        "SLURM_SUBMIT_DIR": str(ROOT),
        "SLURM_JOB_NODELIST": "node[7-8]",
        "SLURM_JOB_ID": "40123",
        "SLURM_NNODES": "2",
        "SLURM_GPUS_ON_NODE": "4",
    }
    job = subprocess.Popen(
        ["bash", str(SCRIPT), *args, "--log.dir", str(tmp_path)],
        env=env,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )
    if usr1:
        deadline = time.monotonic() + 60
        while "torchrun" not in calls.read_text() and time.monotonic() < deadline:
            time.sleep(0.02)
        for _ in range(2):  # SLURM may send it twice
            job.send_signal(signal.SIGUSR1)
    out, _ = job.communicate(timeout=60)
    return job.returncode, calls.read_text(), out


def test_the_time_limit_stops_saves_and_requeues(tmp_path):
    rc, calls, out = submit(tmp_path, code="75", step="00000005", wait="1", usr1=True)
    assert rc == 0 and "scontrol requeue 40123" in calls, out
    assert "STOP says requeue\n" in calls
    assert "srun --kill-on-bad-exit=1" in calls
    for word in (
        "--nnodes=2",
        "--node-rank=1",
        "--nproc-per-node=4",
        "--master-addr=node7",
        "--master-port=20123",
        "--max-restarts=0",
        "--signals-to-handle=SIGTERM,SIGINT,SIGUSR1",
        "train.py llama3-tiny --log.name r",
    ):
        assert word in calls, word
    assert (tmp_path / "r" / "REQUEUE").exists() and not (tmp_path / "r" / "STOP").exists()


def test_only_while_steps_advance(tmp_path):
    assert "requeue" in submit(tmp_path, code="76", step="00000008")[1]
    rc, calls, out = submit(tmp_path, code="76", step="00000008")  # the same newest step as when it started
    assert rc == 76 and "requeue" not in calls and "no new checkpoint" in out
    assert "requeue" in submit(tmp_path, code="82", step="00000010")[1]  # (and 08, 09 are no octal numbers)
    assert submit(tmp_path, code="75")[0] == 75


@pytest.mark.parametrize("code", ["2", "77", "79", "81", "1"])
def test_what_a_restart_cannot_mend_stays_down(tmp_path, code):
    rc, calls, _ = submit(tmp_path, code=code, step="00000005")
    assert rc == int(code) and "requeue" not in calls


def test_a_stop_by_hand_ends_the_job_for_good(tmp_path):
    rc, calls, out = submit(tmp_path, code="75", step="00000005", again=False)
    assert rc == 75 and "scontrol requeue" not in calls and "for good" in out


def test_a_lost_peer_is_requeued_while_steps_advance_and_told_by_any_rank(tmp_path):
    """Rank 0 is the one that died: the others say so."""
    rc, calls, _ = submit(tmp_path, code="1", step="00000005", again=True, of=".rank3")
    assert rc == 0 and "scontrol requeue" in calls
    rc, calls, _ = submit(tmp_path, code="1", step="00000005", again=True, of=".rank3")
    assert rc == 1 and "scontrol requeue" not in calls
    rc, calls, _ = submit(
        tmp_path, code="1", step="00000008", again=False, of=".rank3"
    )  # an error of the code
    assert rc == 1 and "scontrol requeue" not in calls


def test_a_reason_that_is_no_json_is_passed_over(tmp_path):
    rc, calls, out = submit(tmp_path, code="x", step="00000005")
    assert rc == 1 and "scontrol requeue" not in calls and "Traceback" not in out


def test_the_end_and_the_unknown(tmp_path):
    (tmp_path / "r").mkdir()
    (tmp_path / "r" / "exit_reason.json").write_text(
        json.dumps({"code": 75})
    )  # of an earlier run: not this one's truth
    assert submit(tmp_path, step="00000005")[0] == 1
    rc, calls, _ = submit(tmp_path, code="0", step="00000009")
    assert rc == 0 and "requeue" not in calls


def test_a_mistake_never_starts_the_ranks(tmp_path):
    rc, calls, out = submit(tmp_path, args=("llama3-tiny", "--parallel.tpp", "2"))
    assert rc == 2 and not calls and "did you mean parallel.tp?" in out


def test_a_recipe_with_more_arguments(tmp_path):
    _, calls, _ = submit(
        tmp_path, code="0", args=("scripts/recipes/llama3-8b.sh", "--log.name", "r", "--data.path", "a b")
    )
    assert "train.py llama3-8b " in calls and "--data.path a b" in calls and "--words" not in calls


@pytest.mark.parametrize("file", RECIPES, ids=lambda f: f.stem)
def test_a_recipe_is_legal_at_its_size(file):
    text = file.read_text()
    world = int(re.search(r"^WORLD=(\d+)$", text, re.MULTILINE)[1])
    out = subprocess.run(["bash", str(file), "--words"], capture_output=True, text=True, check=True).stdout
    plan_pipeline(config.resolve(*config.split_argv(out.splitlines())), world)
    assert f"on {world:,} GPUs" in text and f"--nodes {world // 8} " in text
    assert "arXiv" in text or "our choice" in text


def test_shell_is_sound():
    for file in (SCRIPT, *RECIPES):
        subprocess.run(["bash", "-n", str(file)], check=True)
