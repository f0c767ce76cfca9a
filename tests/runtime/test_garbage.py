"""Python's collector runs between steps alone, and a step leaves no tensor for it to find."""

import gc

import pytest
import torch
from program import corpus, settings, trained
from random_tokens import RandomTokens

from build import build_run
from lab.proof.verify.overrides import Overrides
from lab.proof.verify.tiny_config import tiny_config
from parallel.topology.mesh import Mesh
from parallel.wire.world import World
from runtime import garbage
from train import train_step

STEPS = 6


@pytest.fixture
def collections():
    """The generations that the collector has looked at, in order. It would start at every new object."""
    found = []
    gc.unfreeze()  # as in a new process

    def note(phase, info):
        if phase == "start":
            found.append(info["generation"])

    thresholds = gc.get_threshold()
    gc.set_threshold(1, 1, 1)
    gc.callbacks.append(note)
    yield found
    gc.callbacks.remove(note)
    gc.set_threshold(*thresholds)


@pytest.mark.slow
def test_the_collector_runs_after_the_same_steps_and_never_in_one(tmp_path, monkeypatch, collections):
    monkeypatch.setattr(garbage, "COLLECT_EVERY", 2)
    cfg = settings(corpus(tmp_path), "--train.steps", str(STEPS))
    seen = {}  # {(point, step): collections so far}

    def observe(point, step=0, **_):
        seen[point, step] = len(collections)

    assert trained(World(), cfg, tmp_path / "run", observe) == 0
    for step in range(1, STEPS + 1):
        assert seen["step.end", step] == seen["step.begin", step]
    between = [seen["step.begin", step + 1] - seen["step.end", step] for step in range(1, STEPS)]
    assert between == [0, 1, 0, 1, 0]
    assert gc.isenabled() and gc.get_freeze_count() == 0


def test_the_collector_works_again_after_a_run_that_failed():
    gc.unfreeze()  # as in a new process
    with pytest.raises(KeyError), garbage.collected_between_steps():
        assert not gc.isenabled() and gc.get_freeze_count() > 0
        raise KeyError
    assert gc.isenabled() and gc.get_freeze_count() == 0


@pytest.mark.slow
@pytest.mark.parametrize(
    "name, keys",
    [
        ("llama3-tiny", {}),
        ("llama3-tiny", {"parallel.recompute": "full", "parallel.offload": "both"}),
        ("llama3-tiny", {"parallel.recompute": "selective", "optim.name": "muon"}),
        ("mixtral-tiny", {}),
        ("deepseek-v3-tiny", {}),
    ],
    ids=str,
)
def test_a_step_leaves_no_tensor_in_a_cycle(name, keys):
    """It would be kept for COLLECT_EVERY steps: an activation in each would not fit."""
    cfg = tiny_config(name, overrides=Overrides(tuple((key, str(value)) for key, value in keys.items())))
    run = build_run(cfg, Mesh.single(), torch.device("cpu"), None, 20)
    tokens = RandomTokens(cfg, 0, 1)
    train_step(run, 1, tokens.microbatches(0))
    gc.collect()
    gc.disable()
    gc.set_debug(gc.DEBUG_SAVEALL)
    try:
        train_step(run, 2, tokens.microbatches(1))
        gc.collect()
        kept = [type(x).__name__ for x in gc.garbage if isinstance(x, torch.Tensor)]
    finally:
        gc.set_debug(0)
        gc.garbage.clear()
        gc.enable()
    assert not kept
