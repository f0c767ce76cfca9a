"""summary.json says of a run what its metrics say."""
import statistics
import subprocess
import sys
from pathlib import Path

import pytest
import run_folder

from config.reading import resolve
from plan.count import flops_per_token, parameters
from runtime.summary import summarize_metrics

ROOT = Path(__file__).parents[2]


def train(folder, *argv):
    command = [sys.executable, "train.py", "llama3-tiny", "--log.dir", str(folder), "--log.name", "r"]
    command += ["--train.steps", "6", "--eval.every", "3", "--eval.batches", "1", "--eval.sample", "0", *argv]
    return subprocess.run(command, cwd=ROOT, timeout=240, capture_output=True, text=True)


@pytest.mark.slow
def test_a_run_and_its_resumed_end_are_summed_up(tmp_path):
    done = train(tmp_path, "--train.max_minutes", "0.0001")
    assert done.returncode == 75, done.stderr
    summary = run_folder.summary(tmp_path / "r")
    assert summary["finished"] is False and "train.max_minutes" in summary["reason"]
    assert summary["step"] < 6

    assert train(tmp_path).returncode == 0
    summary = run_folder.summary(tmp_path / "r")
    lines = run_folder.rows(tmp_path / "r")
    steps = [line for line in lines if "loss" in line]
    losses = {line["step"]: line["val_loss"] for line in lines if "val_loss" in line}

    assert summary["finished"] is True and summary["reason"] is None
    assert summary["step"] == 6 == steps[-1]["step"]
    assert summary["train_loss"] == steps[-1]["loss"]
    assert summary["tokens"] == steps[-1]["tokens"]
    assert summary["validation"]["val_loss"] == losses[6]
    assert summary["best_validation"]["val_loss"] == min(losses.values())
    assert summary["tokens_per_s"] == statistics.median(line["tokens_per_s"] for line in steps[1:])
    assert abs(summary["minutes_in_steps"] - sum(line["step_ms"] for line in steps) / 60_000) < 1e-12

    cfg = resolve(None, str(tmp_path / "r" / "config.yaml"), [])
    assert summary["parameters"] == parameters(cfg.model)["total"]
    assert summary["flops"] == summary["tokens"] * flops_per_token(cfg.model, cfg.train.seq_len)


def test_a_run_without_metrics_has_a_summary(tmp_path):
    summary = summarize_metrics(tmp_path)
    assert summary["step"] == 0 and summary["validation"] is None and summary["mfu"] is None
