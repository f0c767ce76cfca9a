"""The profiler's trace: the steps asked for, and no others."""

import json

import pytest
import torch

from config import ConfigError, profiled_steps
from runtime.profile import ProfilerTrace


@pytest.mark.slow(every=2)
@pytest.mark.parametrize(
    "steps,ran,traced", [("2:3", 5, 2), ("4", 5, 1), ("4:9", 5, 2), ("7:9", 5, 0)]
)
def test_traces_the_steps_asked_for(tmp_path, steps, ran, traced):
    trace = ProfilerTrace(steps, tmp_path, 0)
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
