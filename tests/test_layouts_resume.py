"""Any checkpoint at any layout: saved under one layout and loaded under another, every weight and moment is
the same bit for bit on every rank that holds it, and the next losses are those of the run that never changed.

One end-to-end run goes through torchrun and the real data; the pairs run on the warm pool.
"""

import dataclasses
import json
import os
import pathlib
import subprocess
import sys
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from random_tokens import RandomTokens
from ranks import MODEL, corpus

from build import build_run
from checkpoint import state
from checkpoint.disk import store
from checkpoint.disk.saver import CheckpointSaver
from config.reading.tiny import tiny_config
from model.sharding import parallel_dims
from parallel.topology.mesh import Mesh
from parallel.wire.pool import WorkerPool
from parallel.wire.world import World
from train import train_step

ROOT = pathlib.Path(__file__).parent.parent
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


def config_of(layout: str, dtype: str = "fp64", name: str = "llama3.2-tiny"):
    """A model with tied embeddings, grouped heads, dropout and a vocabulary of 125 ids that is padded to 128;
    or a mixture.
    """
    cfg = tiny_config(name)
    return dataclasses.replace(
        cfg,
        model=dataclasses.replace(cfg.model, layers=4),
        train=dataclasses.replace(cfg.train, dtype=dtype),
        parallel=dataclasses.replace(cfg.parallel, **(LAYOUTS | MIXTURES)[layout][1]),
    )


def begin(world: World, cfg):
    mesh = Mesh.bind(parallel_dims(cfg, world.size), world)
    run = build_run(
        cfg,
        mesh,
        torch.device("cpu"),
        SimpleNamespace(
            tokenizer=SimpleNamespace(fingerprint="t"), fingerprint="d", is_chat=False, has_start=False
        ),
        cfg.train.steps,
    )
    return run, RandomTokens(cfg, mesh.dp.index, mesh.dp.size)


def steps(run, data, first: int, last: int) -> list[float]:
    return [
        train_step(run, s, data.microbatches(s - 1))[0].item()
        for s in range(first, last + 1)
    ]


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
    wrong = [
        b.key
        for b, x in pieces
        if x.tobytes() != truth[b.key][tuple(slice(a, a + n) for a, n in zip(b.start, b.size))].tobytes()
    ]
    return wrong, sum(x.size for _, x in pieces), steps(run, data, SAVED + 1, STEPS)


@pytest.fixture(scope="module")
def pools():
    pools = {n: WorkerPool(n) for n in (2, 4)}
    yield pools
    for pool in pools.values():
        pool.close()


def on(pools, layout: str, f, *args) -> list:
    world = (LAYOUTS | MIXTURES)[layout][0]
    return [f(World(), *args)] if world == 1 else pools[world].run(f, *args)


@pytest.mark.slow
@pytest.mark.parametrize("dtype", ["fp64", "bf16"])
def test_every_layout_continues_every_other(pools, tmp_path, dtype):
    sources = LAYOUTS if dtype == "fp64" else ["tp2 sp", "rep2 dp2 zero2"]
    for source in sources:
        root = tmp_path / source
        results = on(pools, source, save, config_of(source, dtype), root)
        truth: dict[str, np.ndarray] = {}
        for box, part in (piece for pieces, _ in results for piece in pieces):
            whole = truth.setdefault(box.key, np.full(box.shape, np.nan))
            whole[tuple(slice(a, a + n) for a, n in zip(box.start, box.size))] = part
        truth = {k: x.astype(np.float64 if dtype == "fp64" else np.float32) for k, x in truth.items()}
        assert not any(np.isnan(x).any() for x in truth.values()) and sum("@" in k for k in truth) == 2 * sum(
            "@" not in k for k in truth
        )
        ((_, path),) = store.committed_checkpoints(root)
        for target in (t for t in LAYOUTS if dtype == "fp64" or t in ("one", "tp2 sp dp2 zero3")):
            for (wrong, compared, losses), rank in zip(
                on(pools, target, load, config_of(target, dtype), path, truth), range(4)
            ):
                assert not wrong and compared, f"{source} -> {target}: rank {rank} holds another {wrong[0]}"
                if dtype == "fp64":
                    np.testing.assert_allclose(
                        losses, results[0][1], rtol=BOUND, atol=0, err_msg=f"{source} -> {target}"
                    )


@pytest.mark.slow
@pytest.mark.parametrize("name", ["dots1-tiny", "qwen3-moe-tiny"])
def test_mixtures_with_what_their_routers_keep(pools, tmp_path, name):
    """Experts by their own names, biases and loads: from one way of sharing out the experts to another."""
    for source in MIXTURES:
        results = on(pools, source, save, config_of(source, name=name), tmp_path / source)
        truth: dict[str, np.ndarray] = {}
        for box, part in (piece for pieces, _ in results for piece in pieces):
            whole = truth.setdefault(box.key, np.full(box.shape, np.nan))
            assert np.isnan(
                whole[tuple(slice(a, a + n) for a, n in zip(box.start, box.size))]
            ).all()  # nobody else brings it
            whole[tuple(slice(a, a + n) for a, n in zip(box.start, box.size))] = part
        kept = [k for k in truth if ".router." in k and "weight" not in k]
        assert any(truth[k].std() > 0 for k in kept) and not any(np.isnan(x).any() for x in truth.values())
        ((_, path),) = store.committed_checkpoints(tmp_path / source)
        for target in MIXTURES:
            for wrong, compared, losses in on(pools, target, load, config_of(target, name=name), path, truth):
                assert not wrong and compared, f"{source} -> {target}: {wrong[0]}"
                np.testing.assert_allclose(
                    losses, results[0][1], rtol=BOUND, atol=0, err_msg=f"{source} -> {target}"
                )


def losses(folder: pathlib.Path) -> dict[int, float]:
    rows = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    return {r["step"]: r["loss"] for r in rows if "loss" in r}


def command(ranks: int, args: list[str]) -> None:
    torchrun = [
        sys.executable,
        "-m",
        "torch.distributed.run",
        "--standalone",
        "--nproc-per-node",
        str(ranks),
        "train.py",
    ]
    words = [sys.executable, "train.py"] if ranks == 1 else torchrun
    done = subprocess.run(
        [*words, *args],
        cwd=ROOT,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert done.returncode == 0, done.stdout + done.stderr


@pytest.mark.slow
def test_torchrun_and_resumes_under_other_layouts_follow_one_process(tmp_path):
    args = [
        "llama3-tiny",
        *MODEL,
        "--data.path",
        corpus(tmp_path),
        "--train.dtype",
        "fp64",
        "--log.dir",
        str(tmp_path),
        "--model.dropout",
        "0.1",
        "--train.steps",
        "6",
        "--optim.decay",
        "constant",
        "--checkpoint.every",
        "2",
    ]
    command(1, [*args, "--log.name", "one"])
    one, many = losses(tmp_path / "one"), ["--log.name", "many"]
    # each start has a horizon of its own: a run that stops early is an error to torchrun
    command(
        4,
        [
            *args,
            *many,
            "--train.steps",
            "2",
            "--parallel.tp",
            "2",
            "--parallel.sp",
            "true",
            "--parallel.pp",
            "2",
            "--parallel.zero",
            "1",
        ],
    )
    command(4, [*args, *many, "--train.steps", "4", "--parallel.tp", "2", "--parallel.zero", "3"])
    command(1, [*args, *many])
    assert list(losses(tmp_path / "many")) == list(one) == [1, 2, 3, 4, 5, 6]
    np.testing.assert_allclose(
        list(losses(tmp_path / "many").values()), list(one.values()), rtol=BOUND, atol=0
    )
