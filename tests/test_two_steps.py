"""Two steps of each kind of layout are those of one process: losses, gradients by name, norms and weights.

The short form of scripts.verify, for the core of the tests: train_step alone, on random tokens, and the first
checkpoint of a run. What a run reads, validates, saves and resumes is proved in tests/test_invariance.py.
"""

import functools

import program
import pytest
import torch
from random_tokens import RandomTokens
from steps import watched
from torch import Tensor

from build import build_run
from checkpoint.trained import load_run
from config import Config
from config.reading.tiny import NUM_STEPS, tiny_config
from config.tree import with_values
from lab.proof import lattice
from lab.proof.verify.cells import chosen
from lab.proof.verify.trial import BOUND, FLOOR, get_slices, single_process, small_blocks, strict_mode
from model.sharding import parallel_dims
from parallel.sharding.boxes import Box
from parallel.sharding.views import get_boxes
from parallel.topology.mesh import Mesh
from parallel.wire.world import World
from train import train_step

CELLS = (
    ("llama3-tiny", 2, "tp2 sp zero0 mb1"),
    ("llama3-tiny", 2, "tp2 no-sp zero1 mb1 selective docs"),
    ("llama3-tiny", 2, "dp2 zero2 mb2 docs"),
    ("llama3-tiny", 2, "dp2 zero1 muon"),
    ("llama3-tiny", 2, "dp2 zero1 mb1 ema"),
    ("llama3-tiny", 2, "tp2 zero0 muon"),
    ("llama3-tiny", 2, "dp2 zero1 lamb"),
    ("llama3-tiny", 2, "tp2 zero0 lars"),
    ("llama3-tiny", 2, "dp2 zero3 adamw-bf16"),
    ("llama3-tiny", 2, "tp2 zero0 adamw-bf16"),
    ("llama3-tiny", 2, "tp2 zero0 mup"),
    ("llama3-tiny", 2, "dp2 zero3 tensorwise"),
    ("llama3-tiny", 2, "tp2 zero0 rowwise"),
    ("llama3-tiny", 2, "cp2 zero0 blockwise"),
    ("llama3-tiny", 2, "cp2 zero0 mb1 cp-ring docs"),
    ("llama3-tiny", 4, "pp2 tp2 sp zero3 zb-v mb2"),
    ("llama3-tiny", 4, "cp2 tp2 sp zero1 mb1 cp-ring offload"),
    ("llama3-tiny", 4, "rep2 dp2 zero1 mb1"),
    ("gpt2-tiny", 2, "tp2 no-sp zero0 mb1"),
    ("gpt2-tiny", 2, "tp2 sp zero0 mb1"),
    ("gpt2-tiny", 4, "pp2 dp2 zero2 interleaved mb1"),
    ("qwen3-tiny", 2, "tp2 no-sp zero0 mb1 no-ramp"),
    ("qwen3-tiny", 4, "cp2 tp2 zero3 mb1 cp-ulysses full"),
    ("llama3.2-tiny", 2, "pp2 1f1b zero0 mb1"),
    ("llama3.2-tiny", 4, "pp2 dp2 zero3 dualpipe-v mb1"),
    ("mistral-tiny", 4, "cp4 zero0 mb1 cp-ring"),
    ("mistral-tiny", 4, "pp2 cp2 zero0 zb-h1 mb1 cp-ring"),
    ("deepseek-v3-tiny", 2, "cp2 zero1 mb1 docs no-tokens-fp8"),
    ("deepseek-v3-tiny", 4, "pp2 tp2 sp zero2 zb-h1 mb1 no-tokens-fp8"),
    ("deepseek-v2-lite-tiny", 2, "cp2 zero1 mb1 cp-ring docs no-tokens-fp8"),
    ("deepseek-v2-lite-tiny", 2, "tp2 no-sp zero0 mb1 no-tokens-fp8"),
    ("olmoe-tiny", 2, "tp2 no-sp zero0 mb1 no-tokens-fp8"),
    ("qwen2-moe-tiny", 4, "cp2 tp2 ep2 etp2 sp zero3 mb1 padded no-tokens-fp8"),
    ("mixtral-tiny", 2, "dp2 ep2 zero0 mb1 no-tokens-fp8"),
    ("mixtral-tiny", 2, "dp2 no-ep2 zero1 mb1 rowwise no-tokens-fp8"),
    ("mixtral-tiny", 4, "dp2 tp2 ep4 no-sp zero1 mb1 no-tokens-fp8"),
    ("mixtral-tiny", 2, "dp2 ep2 zero1 mb1 ep-bound1.25 no-tokens-fp8"),
    ("qwen2-moe-tiny", 4, "dp2 tp2 ep2 etp2 sp zero1 mb1 ep-bound8.0 no-tokens-fp8"),
    ("dots1-tiny", 4, "pp2 dp2 ep2 zero2 zb-v mb1 no-tokens-fp8"),
    ("gpt-oss-tiny", 4, "dp2 tp2 ep2 etp2 sp zero1 mb1 padded no-tokens-fp8"),
    ("llama4-tiny", 4, "cp2 tp2 ep2 ep-chunks2 zero3 mb1 no-tokens-fp8"),
    ("qwen3-moe-tiny", 4, "pp2 tp2 etp2 sp zero0 dualpipe-v mb1 no-tokens-fp8"),
    ("shared-keys-tiny", 4, "pp2 tp2 sp zero1 zb-h1 mb1 uneven full"),
)
STEPS = 2

Part = tuple[str, Box | None, Tensor]  # name, what of the whole tensor it is (None: all), values


@functools.cache
def found(name: str, world: int) -> lattice.Lattice:
    return lattice.find_layouts(tiny_config(name, world), world)


def trained(world: World, cfg: Config) -> list[Part]:
    """A rank's numbers after each step, and its gradients.

    In strict mode: gloo forgives what NCCL does not, a result that is used before it has arrived.
    """
    mesh = Mesh.bind(parallel_dims(cfg, world.size), world)
    parts: list[Part] = []
    with small_blocks(cfg.train.seq_len), strict_mode(world, True):
        run = build_run(cfg, mesh, torch.device("cpu"), None, NUM_STEPS)
        batches = RandomTokens(cfg, mesh.dp.index, mesh.dp.size)
        for step in range(1, STEPS + 1):

            def note_gradients(step: int = step) -> None:
                for bucket in (bucket for bucket in run.buckets if bucket.trains):
                    for box, part in get_boxes(bucket, bucket.grads.local):
                        parts.append((f"step {step}: gradient of {box.key}", box, part.clone()))

            loss, norm, *_ = train_step(watched(run, note_gradients), step, batches.microbatches(step - 1))
            parts.append((f"step {step}: loss", None, loss))
            parts.append((f"step {step}: norm", None, norm))
            for box, part in run.routers.boxes():
                parts.append((f"step {step}: {box.key}", box, part.clone()))
        for bucket in run.buckets:
            bucket.weights.wait_unshard()
    for bucket in run.buckets:
        for box, part in get_boxes(bucket, bucket.weights.master):
            parts.append((f"weights of {box.key}", box, part.clone()))
    if run.ema is not None:
        for bucket, average in zip(run.ema.buckets, run.ema.averages):
            for box, part in get_boxes(bucket, average):
                parts.append((f"average of {box.key}", box, part.clone()))
    return parts


def deviations(parts: list[Part], alone: dict[str, Tensor]) -> list[str]:
    """The names of parts further than BOUND from one process, relative to the largest element of theirs."""
    wrong = []
    for name, box, values in parts:
        whole = alone[name]
        expected = whole if box is None else whole[get_slices(box)]
        allowed = BOUND * max(float(whole.abs().max()), FLOOR)
        if values.numel() and not float((values - expected).abs().max()) <= allowed:
            wrong.append(name)
    return wrong


@pytest.mark.parametrize("name, world, words", CELLS, ids=[f"{name} {words}" for name, _, words in CELLS])
def test_two_steps_are_those_of_one_process(ranks, name, world, words):
    layouts = found(name, world)
    wanted = {*words.split(), "no-frozen", "no-lora", "no-distill"}  # all parameters train, alone
    check_two_steps(ranks(world), layouts.config(chosen(layouts, "1", wanted, 0)[0]))


@pytest.mark.parametrize("sp", [True, False])
def test_two_steps_of_ranks_that_share_key_heads(ranks, sp):
    values = {"model.mixer.kv_heads": 2, "parallel.tp": 4, "parallel.sp": sp}
    cfg = with_values(tiny_config("llama3-tiny", 4), values)
    check_two_steps(ranks(4), cfg)


def check_two_steps(workers, cfg: Config) -> None:
    alone = {what: values for what, _, values in trained(World(), single_process(cfg))}
    assert all(values.isfinite().all() for values in alone.values())
    found_by_rank = workers.run(trained, cfg)
    for parts in found_by_rank:
        assert not deviations(parts, alone)
    assert {what for parts in found_by_rank for what, _, _ in parts} == alone.keys()


def trains_strictly(world: World, cfg: Config, folder: str) -> int:
    """A whole run, in strict mode: updated weights are NaN until their all-gather is awaited."""
    with strict_mode(world, True):
        return program.trained(world, cfg, folder, lambda *_, **__: None)


def test_a_checkpoint_has_the_updated_weights(ranks, tmp_path):
    """That of the first step: the second has not waited for them yet."""
    prefix = program.corpus(tmp_path)
    cfg = program.settings(prefix, "--checkpoint.every", "1", parallel={"zero": 1})
    assert trains_strictly(World(), single_process(cfg), str(tmp_path / "one")) == 0
    assert ranks(2).run(trains_strictly, cfg, str(tmp_path / "two")) == [0, 0]

    alone, divided = (
        load_run(str(tmp_path / name / "checkpoints" / "step_00000001"), torch.device("cpu")).stage
        for name in ("one", "two")
    )
    wanted = dict(alone.named_parameters())
    for name, weight in divided.named_parameters():
        torch.testing.assert_close(weight, wanted.pop(name), rtol=BOUND, atol=BOUND)
    assert not wanted
