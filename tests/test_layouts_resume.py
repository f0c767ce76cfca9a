"""Any checkpoint at any layout: saved under one layout and loaded under another, every weight and moment is
the same bit for bit on every rank that holds it, and the next losses are those of the run that never changed.

tests/test_elastic_runs.py and tests/test_lives.py do so with train.py and real data.
"""

import numpy as np
import pytest
from random_tokens import begin

from checkpoint import state
from checkpoint.disk import store
from checkpoint.disk.saver import CheckpointSaver
from config.reading.tiny import tiny_config
from config.tree import with_values
from durable.pool import WorkerPool
from parallel.sharding.boxes import Box
from parallel.wire.world import World
from train import train_step

BOUND = 1e-9  # relative, in fp64
LAYOUTS = {
    "one": (1, {}),
    "tp2 sp": (2, {"tp": 2, "sp": True}),
    "dp2 zero3 offload": (2, {"zero": 3, "offload": "both"}),
    "pp2 dp2 zero1": (4, {"pp": 2, "zero": 1}),
    "rep2 dp2 zero2": (4, {"dp_rep": 2, "zero": 2}),
    "tp2 sp dp2 zero3": (4, {"tp": 2, "sp": True, "zero": 3}),
    "tp2 pp2 v-shaped": (4, {"tp": 2, "pp": 2, "schedule": "zb-v"}),
}
MIXTURES = {
    "one": (1, {}),
    "tp2 ep2 etp2 sp zero1": (4, {"tp": 2, "sp": True, "ep": 2, "etp": 2, "zero": 1}),
    "rep2 ep2 zero3": (4, {"dp_rep": 2, "ep": 2, "zero": 3}),
}
SAVED, STEPS = 2, 4


def build_config(layout: str, dtype: str = "fp64", name: str = "llama3.2-tiny"):
    """A model with tied embeddings, grouped heads, dropout and a vocabulary of 125 ids that is padded to 128;
    or a mixture.
    """
    _, parallel = (LAYOUTS | MIXTURES)[layout]
    keys = {f"parallel.{key}": value for key, value in parallel.items()}
    return with_values(tiny_config(name), {"model.layers": 4, "train.dtype": dtype, **keys})


def get_slices(box: Box) -> tuple[slice, ...]:
    return tuple(slice(start, start + size) for start, size in zip(box.start, box.size))


def steps(run, data, first: int, last: int) -> list[float]:
    return [train_step(run, s, data.microbatches(s - 1))[0].item() for s in range(first, last + 1)]


def held(run, alone: bool):
    everything = state.state_boxes(run.buckets, run.optim.state()) + run.routers.boxes()
    boxes = state.boxes_to_save(run) if alone else everything
    return [(box, part.detach().numpy().copy()) for box, part in boxes]


def save(world: World, cfg, root) -> tuple[list, list[float]]:
    """Train, save, go on -> what this rank alone brings to the checkpoint, the losses after it."""
    run, data = begin(world, cfg)
    steps(run, data, 1, SAVED)
    saver = CheckpointSaver(False)
    state.save_run(run, saver, root, SAVED, fault_point=lambda point: None)
    saver.wait()
    pieces = held(run, alone=True)
    return pieces, steps(run, data, SAVED + 1, STEPS)


def load(world: World, cfg, path, truth: dict) -> tuple[list[str], int, list[float]]:
    """-> keys that differ from the truth in a bit, elements compared, the losses after it."""
    run, data = begin(world, cfg)
    for bucket in run.buckets:  # nothing of the fresh start may survive
        bucket.weights.master.fill_(7.0)
    for _, part in run.routers.boxes():
        part.fill_(7.0)
    state.load(run, store.quick_check(path))
    pieces = held(run, alone=False)
    wrong = [box.key for box, part in pieces if part.tobytes() != truth[box.key][get_slices(box)].tobytes()]
    return wrong, sum(part.size for _, part in pieces), steps(run, data, SAVED + 1, STEPS)


@pytest.fixture(scope="module")
def pools():
    pools = {n: WorkerPool(n) for n in (2, 4)}
    yield pools
    for pool in pools.values():
        pool.close()


def on(pools, layout: str, f, *args) -> list:
    world = (LAYOUTS | MIXTURES)[layout][0]
    return [f(World(), *args)] if world == 1 else pools[world].run(f, *args)


def tensors_of(results) -> dict[str, np.ndarray]:
    """{key: the whole tensor}, put together from what the ranks bring. No element is brought twice."""
    whole: dict[str, np.ndarray] = {}
    for box, part in (piece for pieces, _ in results for piece in pieces):
        place = whole.setdefault(box.key, np.full(box.shape, np.nan))[get_slices(box)]
        assert np.isnan(place).all(), box
        place[...] = part
    assert not any(np.isnan(x).any() for x in whole.values())
    return whole


def assert_continues(source: str, target: str, found, losses: list[float] | None) -> None:
    """found: what load() returned on each rank; losses: of the run that never changed."""
    for rank, (wrong, compared, own) in enumerate(found):
        assert not wrong and compared, f"{source} -> {target}: rank {rank} holds another {wrong[0]}"
        if losses is not None:
            np.testing.assert_allclose(own, losses, rtol=BOUND, atol=0, err_msg=f"{source} -> {target}")


@pytest.mark.slow
@pytest.mark.parametrize("dtype", ["fp64", "bf16"])
def test_every_layout_continues_every_other(pools, tmp_path, dtype):
    is_exact = dtype == "fp64"
    for source in LAYOUTS if is_exact else ["tp2 sp", "rep2 dp2 zero2"]:
        results = on(pools, source, save, build_config(source, dtype), tmp_path / source)
        truth = {k: x.astype(np.float64 if is_exact else np.float32) for k, x in tensors_of(results).items()}
        assert sum("@" in key for key in truth) == 2 * sum("@" not in key for key in truth)  # two moments
        ((_, path),) = store.committed_checkpoints(tmp_path / source)
        for target in LAYOUTS if is_exact else ["one", "tp2 sp dp2 zero3"]:
            found = on(pools, target, load, build_config(target, dtype), path, truth)
            assert_continues(source, target, found, results[0][1] if is_exact else None)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["dots1-tiny", "qwen3-moe-tiny"])
def test_mixtures_with_what_their_routers_keep(pools, tmp_path, name):
    """Experts by their own names, biases and loads: from one way of sharing out the experts to another."""
    for source in MIXTURES:
        results = on(pools, source, save, build_config(source, name=name), tmp_path / source)
        truth = tensors_of(results)
        assert any(truth[key].std() > 0 for key in truth if ".router." in key and "weight" not in key)
        ((_, path),) = store.committed_checkpoints(tmp_path / source)
        for target in MIXTURES:
            found = on(pools, target, load, build_config(target, name=name), path, truth)
            assert_continues(source, target, found, results[0][1])


@pytest.mark.slow
def test_dion_continues_under_another_layout_and_at_another_rank(pools, tmp_path):
    """Rows of its basis that a smaller rank did not read are there when a larger one does."""

    def config(layout: str, rank: float):
        return with_values(build_config(layout), {"optim.name": "dion", "optim.rank_fraction": rank})

    source = "tp2 pp2 v-shaped"
    results = on(pools, source, save, config(source, 0.25), tmp_path)
    truth, losses = tensors_of(results), results[0][1]
    ((_, path),) = store.committed_checkpoints(tmp_path)
    for target in ("one", "tp2 sp dp2 zero3"):
        assert_continues(source, target, on(pools, target, load, config(target, 0.25), path, truth), losses)
    targets = ("one", "rep2 dp2 zero2")
    alone, sharded = (on(pools, target, load, config(target, 1.0), path, truth) for target in targets)
    assert alone[0][2][0] == pytest.approx(losses[0], rel=BOUND)  # before its first update
    assert alone[0][2][1] != pytest.approx(losses[1], rel=1e-6)
    assert_continues(*targets, sharded, alone[0][2])
