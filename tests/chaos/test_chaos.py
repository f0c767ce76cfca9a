"""scripts.bench chaos: a small draw, other rounds for every commit; and a planted bug, which a draw must see."""

import os
import random
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from benchmarks.chaos import damage, evidence
from benchmarks.chaos.command import chosen_faults
from benchmarks.chaos.incidents import FAULTS, SAVE_POINTS, STEP_POINTS, Situation
from benchmarks.chaos.layouts import LAYOUTS, SAVES, STEPS
from benchmarks.chaos.rounds import draw_rounds, fits
from checkpoint import store
from proof.mutate.checkout import checkout_files
from runtime.faults import parse
from tests_draw import commit_seed
from train import FAULT_POINTS

ROOT = Path(__file__).parents[2]
LIMIT_S = 580.0


def chaos(*words, root=ROOT):
    command = [sys.executable, "-m", "scripts.bench", "chaos", *words]
    return subprocess.run(command, cwd=root, capture_output=True, text=True, timeout=LIMIT_S)


# ---- real runs ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("layout", ["one-async", "tp2-async"])
def test_a_small_draw_is_survived(layout):
    done = chaos("--rounds", "2", "--seed", str(commit_seed()), "--layouts", layout)
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout.splitlines()[-1].startswith("ok: 2 rounds, ")


# (file, what is there, what the bug makes of it, faults that meet it)
PLANTED = {
    "the folder has its final name before its files are written": (
        "checkpoint/store.py",
        '    temp = pending.temp\n    prefix = f"rank_',
        "    os.rename(pending.final, pending.temp) if pending.final.exists() else None\n"
        '    pending.final.mkdir(); temp = pending.final; os.symlink(temp, pending.temp)\n    prefix = f"rank_',
        "in a save",
    ),
    "a resumed run leaves out a step": (
        "train.py",
        "    for step in range(session.start_step + 1, run.last_step + 1):",
        "    for step in range(session.start_step + 1 + (session.start_step == 5), run.last_step + 1):",
        "SIGTERM twice,newest checkpoint",
    ),
}
