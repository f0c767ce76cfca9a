"""The memory of a recorded step by its holders: parts of the model by name, weights, gradients, optimizer."""

import pytest
from tiny_records import get_part_record

from config.reading import resolve
from plan.record.launches import CHIPS
from plan.record.memory import Change, Holder, memory_curve
from plan.record.summary import MemoryTrace, memory_by_kind

WEIGHTS = Holder("build", "parallel/sharding/weights.py:__init__")
KEPT = Holder("forward", "kernels/linear.py:product", "MLP")
COMPUTED_AGAIN = Holder("backward", "kernels/linear.py:product", "MLP")
PASSING = Holder("backward", "kernels/linear.py:backward")


def test_each_stretch_of_the_step_shows_its_highest_point():
    begun_with = [Change(0, 1, 10, WEIGHTS)]
    changes = [Change(1, 2, 5, KEPT), Change(2, 3, 7, PASSING), Change(3, 3, -7, PASSING)]
    changes += [Change(4, 2, -5, KEPT), Change(5, 4, 2, COMPUTED_AGAIN)]
    found = memory_by_kind(MemoryTrace(begun_with, changes), most=2)
    assert found.times == [0, 2, 5]
    assert found.nbytes == {"weights": [10, 10, 10], "MLP": [0, 5, 2], "backward": [0, 7, 0]}


@pytest.mark.parametrize(
    "name, words, parts",
    [
        ("llama3-tiny", [], {"Attention", "MLP", "Embedding", "OutputHead"}),
        ("deepseek-v3-tiny", ["--parallel.recompute", "full"], {"MultiLatentAttention", "Experts", "Router"}),
    ],
)
def test_all_that_is_held_belongs_to_a_part_or_to_the_state(name, words, parts):
    cfg = resolve(name, None, ["--train.global_batch", "16", "--model.vocab", "512", *words])
    record = get_part_record(cfg, 1, 0, CHIPS["h100"])
    held = memory_by_kind(MemoryTrace(record.begun_with, record.changes), most=10**9)
    assert parts | {"weights", "gradients", "optimizer"} <= set(held.nbytes)
    points = memory_curve(record.begun_with, record.changes)
    assert [sum(column) for column in zip(*held.nbytes.values())] == [point.nbytes for point in points]
    assert max(point.nbytes for point in points) == record.peak
    assert sum(record.at_peak.values()) == record.peak
