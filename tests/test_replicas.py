"""A number that one rank alone holds differently is found before a checkpoint is saved, and is named."""

import json
import pathlib
import struct

import pytest
import torch
from ranks import MODEL, corpus, job

import train
from checkpoint import store
from parallel.sharding.replicas import checksum

MOE = ("--model.experts", "4", "--model.top_k", "2")
OUT = "attn.o.weight"  # the output projection of attention
STEPS = ("--train.steps", "4", "--checkpoint.every", "2")


@pytest.fixture(scope="module")
def args(tmp_path_factory):
    return ["llama3-tiny", *MODEL, "--data.path", corpus(tmp_path_factory.mktemp("replicas")), *STEPS]


def run(tmp_path, args, world=2, **how):
    return job(tmp_path, world, [*args, "--log.dir", str(tmp_path), "--log.name", "run"], limit=240.0, **how)


def flips(rank, key, moment=None, weights=False):
    """before(rank) of a job: one bit of one number changes on one rank, a step before the save. Weights in
    the compute dtype change just before it: a step brings them up to the masters.
    """
    at = 4 if weights else 3

    def before(own_rank):
        one_step = train.run_one_step

        def changed(session, step):
            one_step(session, step)
            if step == at and own_rank == rank:
                flip(session.run, key, moment, weights)

        train.run_one_step = changed

    return before


def flip(run, key, moment, weights):
    for number, bucket in enumerate(run.buckets):
        for slot in bucket.slots:
            if key not in "".join(box.key for box in slot.param.spec.boxes):
                continue
            flat = bucket.weights.master if moment is None else run.optim.state()[moment][number]
            start = slot.offset - bucket.shard_start
            if weights:
                bucket.weights.wait_gather()
                flat, start = bucket.weights.full, slot.offset
            if 0 <= start < len(flat):
                words = flat[start:start + 1].view({2: torch.int16, 4: torch.int32}[flat.itemsize])
                words ^= 1 << (2 if flat.itemsize == 2 else 10)
                return
    raise AssertionError(f"no {key}")


CASES = {
    "dp2 weight": (("--parallel.zero", "0"), 2, flips(1, OUT), OUT),
    "dp2 moment": (("--parallel.zero", "0"), 2, flips(1, "norm.weight", "adam_m"), "norm.weight@adam_m"),
    "dp4 weight": (("--parallel.zero", "0"), 4, flips(2, "embed.weight"), "embed.weight of rank 2 is not"),
    "bf16 weights": (
        ("--parallel.zero", "1", "--train.dtype", "bf16"),
        2,
        flips(1, OUT, weights=True),
        OUT,
    ),
    "cp2 weight": (("--parallel.cp", "2", "--parallel.zero", "0"), 2, flips(1, OUT), OUT),
    "tp2 norm": (("--parallel.tp", "2"), 2, flips(1, "norm.weight"), "norm.weight"),
    "tp2 norm moment": (("--parallel.tp", "2"), 2, flips(0, "norm.weight", "adam_m"), "norm.weight@adam_m"),
    "ep2": ((*MOE, "--parallel.ep", "2", "--parallel.zero", "0"), 2, flips(1, OUT), OUT),
    "experts' replicas": ((*MOE, "--parallel.zero", "0"), 2, flips(1, "experts"), "experts"),
    "hsdp": (("--parallel.dp_rep", "2", "--parallel.zero", "2"), 4, flips(2, "embed"), "embed"),
}


@pytest.mark.parametrize("name", list(CASES))
def test_a_changed_bit_on_one_rank_is_found_and_named(tmp_path, args, name):
    layout, world, before, named = CASES[name]
    end = run(tmp_path, [*args, *layout], world=world, before=before)
    assert set(end.codes) == {80}, end.logs
    assert any("replicas differ, nothing is saved: " in line and named in line for line in end.errors())
    assert [step for step, _ in store.committed_checkpoints(tmp_path / "run" / "checkpoints")] == [2]
    reason = json.loads((tmp_path / "run" / "exit_reason.json").read_text())
    assert (reason["code"], reason["requeue"]) == (80, True)


@pytest.mark.parametrize("layout", [("--parallel.cp", "2"), ("--parallel.zero", "0")], ids=" ".join)
def test_a_nan_in_one_rank_s_reduced_gradient_is_found(tmp_path, args, layout):
    end = run(tmp_path, [*args, *layout, "--parallel.zero", "0"], fault="step.backward:rank=1:step=3:act=nan")
    assert end.codes == [80, 80], end.logs


CLEAN = [
    ("--parallel.tp", "2", "--parallel.sp", "true"),
    ("--parallel.tp", "2", "--parallel.pp", "2"),
    ("--parallel.pp", "2", "--model.tied", "true", "--parallel.zero", "1"),
    (*MOE, "--parallel.ep", "2", "--parallel.tp", "2"),
    ("--parallel.dp_rep", "2", "--parallel.zero", "3", "--train.dtype", "bf16"),
    ("--parallel.zero", "2", "--train.dtype", "bf16", "--optim.states", "bf16"),
]


@pytest.mark.parametrize("layout", CLEAN, ids=" ".join)
def test_sound_replicas_pass(tmp_path, args, layout):
    end = run(tmp_path, [*args, *layout], world=4)
    assert end.codes == [0, 0, 0, 0], end.logs


# ---- the checksum ------------------------------------------------------------------------------------------


def by_hand(x: torch.Tensor) -> int:
    """The same sum with Python's integers."""
    data = x.contiguous().view(torch.uint8).numpy().tobytes()
    data += bytes(-len(data) % 8)
    words = struct.unpack(f"<{len(data) // 8}q", data)
    total = sum(word * (2 * (position % 64) + 1) for position, word in enumerate(words)) % 2**64
    return total - 2**64 if total >= 2**63 else total


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
@pytest.mark.parametrize("size", [0, 1, 7, 128, 1000, 4099])
def test_the_checksum_by_hand(dtype, size):
    whole = torch.randn(size + 3, generator=torch.Generator().manual_seed(size)).to(dtype)
    for x in (whole[:size], whole[3:]):
        assert int(checksum(x)) == by_hand(x)


def test_every_single_bit_counts():
    x = torch.randn(300, generator=torch.Generator().manual_seed(1))
    sums = {int(checksum(x))}
    for position in range(0, 300, 7):
        for bit in range(32):
            changed = x.clone()
            changed.view(torch.int32)[position] ^= -(2**31) if bit == 31 else 1 << bit
            sums.add(int(checksum(changed)))
    assert len(sums) == 1 + 43 * 32
    assert int(checksum(x.flip(0))) not in sums


def test_the_page_tells_of_the_code():
    text = (pathlib.Path(__file__).parents[1] / "docs" / "training.md").read_text()
    assert "| 80 | ranks that must hold the same" in text
