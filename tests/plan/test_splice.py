"""A step that is recorded with few microbatches says all that the step does that is traced whole."""

import dataclasses
import itertools

import pytest
from tiny_records import MIXTURE, SIZE, get_part_record

from config.reading import resolve
from parallel.pipeline.executor import GradientAccumulation
from plan.record import splice
from plan.record.launches import CHIPS
from plan.record.memory import Change
from plan.record.role import RoleRecord

UNSHARDED = ["--parallel.zero", "0"]
SIZES = {
    "llama3-tiny": [*SIZE, *UNSHARDED],
    "mixtral-tiny": [*MIXTURE, *UNSHARDED],
    "deepseek-v3-tiny": ["--model.vocab", "288", "--train.seq_len", "32"],
}


def recorded(
    name: str, world: int, rank: int, words: str, chip: str | None = "h100", traces_all: bool = False
) -> RoleRecord:
    cfg = resolve(name, None, [*SIZES[name], "--train.micro_batch", "1", *words.split()])
    return get_part_record(cfg, world, rank, CHIPS[chip] if chip else None, traces_all=traces_all)


def launch_facts(record: RoleRecord) -> dict[str, object]:
    """Every field but the seconds. Storages are numbered in the order in which they are made, and numbers of
    launches are in words: a NaN is not equal to itself."""
    names = {one.name for one in dataclasses.fields(record)} - {"seconds"}
    facts = {name: getattr(record, name) for name in names}
    facts["launches"] = [repr(vars(launch)) for launch in record.launches]
    numbers = itertools.count()
    alive: dict[int, int] = {}

    def renumbered(change: Change) -> Change:
        if change.nbytes > 0:
            alive[change.storage] = next(numbers)
            return change._replace(storage=alive[change.storage])
        return change._replace(storage=alive.pop(change.storage))

    for name in ("begun_with", "changes"):
        facts[name] = [renumbered(change) for change in facts[name]]
    return facts


def share_copied(record: RoleRecord) -> float:
    """The share of launches that stand for more than one."""
    return 1 - len({id(launch) for launch in record.launches}) / len(record.launches)


def check_splice(name: str, world: int, rank: int, words: str, chip: str | None = "h100") -> float:
    """The spliced record is the whole one. Returns the share of it that was copied."""
    whole = recorded(name, world, rank, words, chip=chip, traces_all=True)
    spliced = recorded(name, world, rank, words, chip=chip)
    assert share_copied(whole) == 0
    found, wanted = launch_facts(spliced), launch_facts(whole)
    for key, value in wanted.items():
        assert found[key] == value, key
    return share_copied(spliced)


PP = "--parallel.pp 2 --train.global_batch 12"
NINE = "--train.global_batch 9"
OF_TWO = "--train.global_batch 24"  # of two data-parallel ranks
OF_FOUR = "--train.global_batch 40"
ZERO_1 = "--parallel.zero 1"
EP = "--parallel.ep 2"
DEEP = "--parallel.pp 4 --train.global_batch 24"
LAYOUTS = [  # recipe, ranks, the rank, and the least share that is copied
    ("llama3-tiny", 1, 0, "--train.global_batch 8", 0.3),
    ("llama3-tiny", 2, 1, "--parallel.zero 1 --parallel.recompute full --train.global_batch 24", 0.5),
    ("llama3-tiny", 2, 0, "--parallel.zero 2 --train.global_batch 24", 0.4),
    ("llama3-tiny", 2, 0, "--parallel.zero 3 --parallel.recompute selective --train.global_batch 24", 0.4),
    ("llama3-tiny", 2, 0, "--parallel.zero 3 --train.dtype fp8 --train.global_batch 24", 0.4),
    ("llama3-tiny", 2, 0, "--parallel.zero 1 --train.dtype fp8 --train.global_batch 24", 0.5),
    ("llama3-tiny", 2, 0, "--parallel.tp 2 --parallel.sp true --train.global_batch 9", 0.3),
    ("llama3-tiny", 2, 0, f"--parallel.tp 2 --parallel.sp true --parallel.async_tp true {NINE}", 0.3),
    ("llama3-tiny", 2, 0, "--parallel.cp 2 --train.global_batch 9", 0.3),
    ("llama3-tiny", 2, 0, "--parallel.cp 2 --parallel.cp_kind ulysses --train.global_batch 9", 0.3),
    ("llama3-tiny", 2, 0, "--parallel.compress int8 --train.global_batch 24", 0.5),
    ("llama3-tiny", 2, 0, "--parallel.offload both --model.hidden 128 --train.global_batch 24", 0.5),
    ("llama3-tiny", 2, 0, f"{PP} --parallel.offload both --model.hidden 128", 0.5),
    ("llama3-tiny", 2, 0, "--optim.name muon --parallel.zero 1 --train.global_batch 20", 0.3),
    ("llama3-tiny", 4, 3, f"--log.noise_scale true --parallel.dp_rep 2 {ZERO_1} {OF_FOUR}", 0.4),
    ("llama3-tiny", 1, 0, "--data.doc_mask true --model.tied true --train.global_batch 8", 0.3),
    ("llama3-tiny", 2, 0, f"{PP} --parallel.schedule gpipe --parallel.recompute full", 0.5),
    ("llama3-tiny", 2, 1, f"{PP} --parallel.schedule gpipe --train.dtype fp16", 0.5),
    ("llama3-tiny", 2, 0, f"{PP} --parallel.recompute full", 0.5),
    ("llama3-tiny", 2, 1, PP, 0.5),
    ("llama3-tiny", 4, 1, f"{DEEP} --parallel.recompute full", 0.6),
    ("llama3-tiny", 4, 0, f"{PP} --parallel.tp 2 --parallel.sp true --train.dtype bf16", 0.5),
    ("llama3-tiny", 4, 2, f"{PP} --parallel.zero 1 --train.global_batch 24", 0.5),
    ("llama3-tiny", 4, 0, f"{PP} --parallel.zero 2 --train.global_batch 24", 0.0),
    ("llama3-tiny", 4, 0, f"{PP} --parallel.zero 3 --train.global_batch 24", 0.2),
    ("llama3-tiny", 4, 2, f"{PP} --parallel.zero 3 --train.global_batch 24 --parallel.schedule gpipe", 0.4),
    ("llama3-tiny", 2, 0, f"{PP} --parallel.schedule interleaved", 0.5),
    ("llama3-tiny", 2, 1, f"{PP} --parallel.schedule interleaved --parallel.recompute selective", 0.3),
    ("llama3-tiny", 2, 0, f"{PP} --parallel.schedule zb-h1", 0.5),
    ("llama3-tiny", 2, 1, f"{PP} --parallel.schedule zb-h1 --parallel.recompute full", 0.4),
    ("llama3-tiny", 4, 2, f"{DEEP} --parallel.schedule zb-h1", 0.5),
    ("llama3-tiny", 2, 0, f"{PP} --parallel.schedule zb-v", 0.1),
    ("llama3-tiny", 2, 1, f"{PP} --parallel.schedule zb-v --parallel.recompute full", 0.4),
    ("llama3-tiny", 2, 0, "--parallel.pp 2 --train.global_batch 24 --parallel.schedule dualpipe-v", 0.3),
    ("llama3-tiny", 2, 1, f"{PP} --parallel.schedule dualpipe-v --model.tied true", 0.2),
    ("llama3-tiny", 4, 0, f"{PP} --parallel.zero 2 --train.global_batch 24 --parallel.schedule zb-h1", 0.0),
    ("llama3-tiny", 4, 2, f"{PP} --parallel.zero 3 {OF_TWO} --parallel.schedule dualpipe-v", 0.0),
    ("llama3-tiny", 2, 0, "--train.dtype fp8 --train.fp8 blockwise --train.fp8_keep 0 --train.fp8_block 32 "
     f"--model.hidden 64 --model.mlp.width 96 {PP}", 0.5),
    ("mixtral-tiny", 1, 0, "--train.global_batch 10", 0.4),
    ("mixtral-tiny", 2, 0, "--parallel.ep 2 --parallel.zero 1 --train.global_batch 24", 0.5),
    ("mixtral-tiny", 2, 1, f"{EP} --parallel.ep_chunks 2 --parallel.recompute full {OF_TWO}", 0.5),
    ("mixtral-tiny", 2, 0, "--parallel.ep 2 --parallel.zero 3 --train.global_batch 24", 0.3),
    ("mixtral-tiny", 4, 0, f"{PP} --parallel.ep 2 --parallel.zero 1 --train.global_batch 24", 0.5),
    ("mixtral-tiny", 4, 2, f"{PP} --parallel.ep 2 --train.global_batch 24 --parallel.schedule zb-v", 0.4),
    ("mixtral-tiny", 4, 0, "--parallel.tp 2 --parallel.sp true --parallel.ep 2 --train.global_batch 18", 0.3),
    ("deepseek-v3-tiny", 2, 1, f"{PP} --parallel.recompute full", 0.4),
]  # fmt: skip


def title(name: str, world: int, rank: int, words: str, least: float) -> str:
    """llama3-tiny 2 pp 2 global_batch 12"""
    words = words.replace("--parallel.", "").replace("--train.", "").replace("--", "")
    return f"{name} {world} {words}"


IDS = [title(*layout) for layout in LAYOUTS]
CORE = [
    "llama3-tiny 2 zero 3 recompute selective global_batch 24",
    "llama3-tiny 2 pp 2 global_batch 12 schedule zb-h1",
    "mixtral-tiny 2 ep 2 zero 1 global_batch 24",
]


@pytest.mark.slow(core=CORE)
@pytest.mark.parametrize("name, world, rank, words, least", LAYOUTS, ids=IDS)
def test_a_spliced_record_is_the_whole_one(name, world, rank, words, least):
    chip = None if "fp8_block 32" in words else "h100"
    assert check_splice(name, world, rank, words, chip=chip) >= least


def test_most_of_a_step_is_copied():
    """1F1B: five microbatches of 64 are traced."""
    record = recorded("llama3-tiny", 2, 0, "--parallel.pp 2 --train.global_batch 64")
    assert share_copied(record) > 0.9


def test_a_step_with_a_microbatch_unlike_others_is_traced_whole(monkeypatch):
    """An op that does more in each second microbatch."""
    real = GradientAccumulation.forward_from_tokens

    def forward(pipeline, op, microbatch, scale):
        if op.microbatch % 2:
            microbatch.tokens.clone()
        return real(pipeline, op, microbatch, scale)

    monkeypatch.setattr(GradientAccumulation, "forward_from_tokens", forward)
    words = "--train.global_batch 12"
    spliced = recorded("llama3-tiny", 1, 0, words)
    whole = recorded("llama3-tiny", 1, 0, words, traces_all=True)
    assert share_copied(spliced) == 0
    assert launch_facts(spliced) == launch_facts(whole)


def test_what_a_later_microbatch_releases_of_an_earlier_one_is_found(monkeypatch):
    """A forward that keeps a tensor until the second forward after it."""
    real = GradientAccumulation.forward_from_tokens
    kept = []

    def forward(pipeline, op, microbatch, scale):
        kept.append(microbatch.tokens.clone())
        if len(kept) > 2:
            kept.pop(0)
        return real(pipeline, op, microbatch, scale)

    monkeypatch.setattr(GradientAccumulation, "forward_from_tokens", forward)
    words = "--train.global_batch 12"
    facts = []
    for traces_all in (False, True):
        kept.clear()
        facts.append(launch_facts(recorded("llama3-tiny", 1, 0, words, traces_all=traces_all)))
    assert facts[0] == facts[1]


def test_ops_that_are_alike_have_one_key():
    """Two ops of each key are chosen, and of ops in another place both."""
    ops = [splice.Op(kind, 0, microbatch) for microbatch in range(9) for kind in "FB"]
    keys = splice.keys_of(ops, last_stage=0, is_sharded=False)
    assert len(set(keys[2:-2])) == 2 and len(set(keys)) == 6
    assert len(set(splice.keys_of(ops, last_stage=0, is_sharded=True))) == 8
