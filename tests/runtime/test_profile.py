"""Recordings of steps: those asked for, and no others."""

import json

import pytest
import torch

import train
from config import ConfigError, profiled_steps
from runtime import failure
from runtime.profile import MemorySnapshot, ProfilerTrace


@pytest.mark.slow(every=2)
@pytest.mark.parametrize(
    "steps,ran,traced", [("2:3", 5, 2), ("4", 5, 1), ("4:9", 5, 2), ("7:9", 5, 0)]
)
def test_traces_the_steps_asked_for(tmp_path, steps, ran, traced):
    trace = ProfilerTrace(profiled_steps(steps), tmp_path / "trace-rank0.json")
    for step in range(1, ran + 1):
        trace.before_gradients(None, step, [])
        torch.ones(8, 8) @ torch.ones(8, 8)
        trace.after_step(None, step)
    trace.close()
    file = tmp_path / "trace-rank0.json"
    events = json.loads(file.read_text())["traceEvents"] if file.exists() else []
    assert sum(e.get("name") == "aten::mm" for e in events) == traced


@pytest.mark.slow(every=2)
@pytest.mark.parametrize("text", ["0:2", "3:2", "x", ":2", "1.5", ""])
def test_a_wrong_range_is_one_line(text):
    with pytest.raises(ConfigError, match="^profile.steps: "):
        profiled_steps(text)


@pytest.mark.parametrize("ran, written", [(1, []), (2, [2]), (5, [3])])
def test_a_memory_snapshot_is_written_after_its_last_step_or_when_the_run_ends(
    tmp_path, monkeypatch, ran, written
):
    """An error in a step ends the run: extras are closed, with what memory held then."""
    recorded, dumped = [], []
    memory = torch.cuda.memory
    monkeypatch.setattr(memory, "_record_memory_history", lambda **options: recorded.append(options))
    monkeypatch.setattr(memory, "_dump_snapshot", lambda path: dumped.append((path, step)))
    snapshot = MemorySnapshot(profiled_steps("2:3", "memory"), tmp_path / "memory-rank0.pickle")
    for step in range(1, ran + 1):
        snapshot.before_gradients(None, step, [])
        if step < ran or ran > 2:  # the second step runs out of memory
            snapshot.after_step(None, step)
    snapshot.close()
    assert dumped == [(str(tmp_path / "memory-rank0.pickle"), step) for step in written]
    assert [options.get("enabled", "all") for options in recorded] == ["all", None] * len(written)


def test_a_memory_snapshot_that_cannot_be_made_is_refused(tmp_path, capsys):
    argv = ["llama3-tiny", "--log.dir", str(tmp_path), "--log.name", "r", "--train.device", "cpu"]
    assert failure.fail_cleanly(train.main, [*argv, "--profile.memory", "2:3"]) == 2
    assert capsys.readouterr().err.startswith("error: profile.memory: needs a GPU, and torch finds none here")
    assert not (tmp_path / "r" / "metrics.jsonl").exists()
    with pytest.raises(ConfigError, match="^profile.memory: '3:2' must be FIRST:LAST"):
        profiled_steps("3:2", "memory")
