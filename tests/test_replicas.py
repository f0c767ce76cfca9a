"""A number that one rank alone holds differently is found at the next comparison and before a checkpoint is
saved, and is named with its rank, its parameter and its element. Sound ranks pass.
"""

import struct

import pytest
import run_folder
import torch
from ranks import MODEL, corpus, job

import train
from checkpoint import state
from checkpoint.disk import store
from checkpoint.replicas import compare_replicas
from parallel.sharding.replicas import ReplicaMismatch
from parallel.wire import comm
from parallel.wire.checksum import checksum

MOE = ("--model.mlp", "experts", "--model.mlp.experts", "4", "--model.mlp.top_k", "2")
OUT = "layers.0.attn.o.weight"  # the output projection of the first block's attention
FIRST_NORM = "layers.0.attn_norm.weight"


@pytest.fixture(scope="module")
def args(tmp_path_factory):
    return ["llama3-tiny", *MODEL, "--data.path", corpus(tmp_path_factory.mktemp("replicas"))]


def run(tmp_path, args, world=2, **how):
    return job(tmp_path, world, [*args, "--log.dir", str(tmp_path), "--log.name", "run"], **how)


def flip(session, key, moment=None, weights=False):
    """Changes one mantissa bit of the first element that this rank owns of a parameter. weights: of what
    products read, in the compute dtype; else of a moment or an average; else of the masters.

    Returns whether this rank has the parameter: a stage of a pipeline has some of them.
    """
    run = session.run
    for number, bucket in enumerate(run.buckets):
        for slot in bucket.slots:
            if key not in [box.key for box in slot.param.spec.boxes]:
                continue
            start = max(slot.offset - bucket.shard_start, 0)
            end = min(slot.offset + slot.numel, bucket.shard_end) - bucket.shard_start
            if weights:
                bucket.weights.wait_gather()
                flat, start, end = bucket.weights.full, slot.offset, slot.offset + slot.numel
            elif moment is None:
                flat = bucket.weights.master
            else:
                flat = state.get_moments(run)[moment][number]
            if start < end:
                words = flat[start:start + 1].view({2: torch.int16, 4: torch.int32}[flat.itemsize])
                words ^= 1 << (2 if flat.itemsize == 2 else 10)
                return True
    return False


def after_step(step, act):
    """before(rank) of a job: each rank calls act(session, rank) after this step."""

    def before(rank):
        one_step = train.run_one_step

        def then_act(session, at):
            one_step(session, at)
            if at == step:
                act(session, rank)

        train.run_one_step = then_act

    return before


def planted(flips):
    """before(rank) of a job: after step 2 each fault of `flips` is planted and mended again, and what the
    comparison says is printed. flips: {name: (rank, arguments of flip)}.
    """

    def plant_each(session, own_rank):
        compare_replicas(session.run)  # all are sound
        for name, (rank, arguments) in flips.items():
            if own_rank == rank:
                assert flip(session, **arguments), name
            told = "nothing"
            try:
                compare_replicas(session.run)
            except ReplicaMismatch as error:
                told = str(error)
            print(f"planted {name}: {told}")
            if own_rank == rank:
                flip(session, **arguments)
        compare_replicas(session.run)

    return after_step(2, plant_each)


def told_of(end, name):
    """The text of each rank about a planted fault."""
    lines = [[line for line in log.splitlines() if line.startswith(f"planted {name}: ")] for log in end.logs]
    return [line[0].partition(": ")[2] for line in lines]


WHAT = {
    "weight": {"key": OUT},
    "norm": {"key": FIRST_NORM},
    "table": {"key": "embed.weight"},
    "first moment": {"key": OUT, "moment": "adam_m"},
    "second moment": {"key": "embed.weight", "moment": "adam_v"},
    "average": {"key": FIRST_NORM, "moment": "ema"},
}


@pytest.mark.slow(core=["3"])
@pytest.mark.parametrize("world", [2, 3])
def test_a_flipped_bit_of_a_replica_is_named(tmp_path, args, world):
    """ZeRO 0: every number has a copy on every rank. Two of three ranks are a majority; one of two is not."""
    flips = {f"{what} on {rank}": (rank, how) for what, how in WHAT.items() for rank in range(world)}
    layout = ("--parallel.zero", "0", "--train.ema", "0.9", "--train.steps", "2", "--train.global_batch", "6")
    end = run(tmp_path, [*args, *layout], world=world, before=planted(flips))
    assert end.codes == [0] * world, end.logs
    for name, (rank, how) in flips.items():
        key = how["key"] + (f"@{how['moment']}" if "moment" in how else "")
        texts = told_of(end, name)
        assert len(texts) == world and len(set(texts)) == 1, texts
        assert texts[0].startswith("replicas differ at step 2: ")
        assert texts[0].count(" (element 0: ") == 1  # one difference alone
        if world == 2:
            assert f": {key} is not the same on the ranks of group dp_cp (" in texts[0]
            values = [float(text.rsplit(" ", 1)[1]) for text in texts[0].split(" on rank ")[:2]]
            assert values[0] != values[1]
        else:
            assert f": {key} of rank {rank} is not that of the others in group " in texts[0]


LAYOUTS = {
    "tp2": (
        ("--parallel.tp", "2"),
        2,
        {"norm": (1, {"key": FIRST_NORM}), "norm's moment": (0, {"key": FIRST_NORM, "moment": "adam_v"})},
    ),
    "tp2 sp dp2 zero1 of bf16": (
        ("--parallel.tp", "2", "--parallel.sp", "true", "--parallel.zero", "1", "--train.dtype", "bf16"),
        4,
        {
            "norm": (3, {"key": FIRST_NORM}),  # the second shard has the norms
            "weight of products": (2, {"key": OUT, "weights": True}),
            "norm of products": (3, {"key": "norm.weight", "weights": True}),
        },
    ),
    "tied table, pp2 dp2 zero2": (
        ("--parallel.pp", "2", "--model.tied", "true", "--parallel.zero", "2"),
        4,
        {"first end": (0, {"key": "embed.weight"}), "last end": (2, {"key": "embed.weight"})},
    ),
    "hsdp, zero3": (
        ("--parallel.dp_rep", "2", "--parallel.zero", "3"),
        4,
        {"table": (2, {"key": "embed.weight"}), "moment": (0, {"key": "embed.weight", "moment": "adam_m"})},
    ),
    "experts": (
        (*MOE, "--parallel.ep", "2", "--parallel.zero", "0"),
        4,
        {
            "expert": (3, {"key": "layers.1.mlp.experts.2.down.weight"}),
            "router": (1, {"key": "layers.1.mlp.router.weight"}),
        },
    ),
    "cp2": (("--parallel.cp", "2", "--parallel.zero", "0"), 2, {"weight": (1, {"key": OUT})}),
}


@pytest.mark.slow
@pytest.mark.parametrize("name", list(LAYOUTS))
def test_a_flipped_bit_is_named_under_other_layouts(tmp_path, args, name):
    layout, world, flips = LAYOUTS[name]
    end = run(tmp_path, [*args, *layout, "--train.steps", "2"], world=world, before=planted(flips))
    assert end.codes == [0] * world, end.logs
    for what, (rank, how) in flips.items():
        key = how["key"] + (f"@{how['moment']}" if "moment" in how else "")
        texts = told_of(end, what)
        assert key in texts[rank] and "replicas differ at step 2: " in texts[rank], texts
        others = [other for other, text in enumerate(texts) if other != rank and key in text]
        assert others, texts  # who has the other copy says so too


# ---- sound ranks -------------------------------------------------------------------------------------------

# every way in which numbers that ranks hold alike are made: sums in other orders and in fewer bits, products
# that each rank repeats, rounding by chance, averages, and updates that ranks share
SOUND = [
    "--parallel.tp 2 --parallel.sp true --parallel.zero 0",
    "--parallel.tp 4 --model.mixer.kv_heads 2 --train.global_batch 2",
    "--parallel.tp 2 --parallel.pp 2 --train.ema 0.9",
    "--parallel.tp 2 --parallel.cp 2 --model.positions learned --model.mixer.rope none "
    "--model.mixer.bias all --model.mlp.bias true --model.norm.kind layernorm",
    "--parallel.pp 2 --model.tied true --parallel.zero 1 --train.dtype bf16 --optim.states bf16",
    "--parallel.pp 2 --model.tied true --parallel.tp 2 --model.mtp.modules 1",
    "--parallel.dp_rep 2 --parallel.zero 3 --train.dtype bf16",
    "--parallel.zero 0 --optim.name muon --parallel.reduce hierarchy --parallel.node 2",
    "--parallel.zero 0 --optim.name muon --parallel.tp 2",
    "--parallel.zero 0 --optim.name normuon --parallel.tp 2",
    "--parallel.zero 0 --optim.name dion --parallel.tp 2",
    "--parallel.zero 0 --optim.states 8bit --parallel.tp 2",
    "--parallel.zero 0 --parallel.compress int8 --parallel.tp 2",
    "--parallel.zero 0 --parallel.compress powersgd --parallel.powersgd_rank 2 --checkpoint.async_save true",
    "--parallel.zero 2 --train.dtype bf16 --parallel.compress_weights fp8 --checkpoint.async_save true",
    "--parallel.zero 1 --train.dtype fp8 --train.fp8_keep 0 --parallel.tp 2 --model.hidden 64 "
    "--model.mlp.width 64",
    "--parallel.zero 1 --parallel.offload optimizer --train.dtype fp16 --parallel.tp 2",
    "--model.mlp experts --model.mlp.experts 4 --model.mlp.top_k 2 --parallel.ep 2 --parallel.tp 2 "
    "--model.mlp.router.bias_rate 0.001",
    "--model.mlp experts --model.mlp.experts 4 --model.mlp.top_k 2 --parallel.ep 2 --parallel.zero 1 "
    "--optim.name muon",
    "--model.mlp experts --model.mlp.experts 4 --model.mlp.top_k 2 --parallel.dp_rep 2 "
    "--parallel.zero 3 --train.dtype bf16",
    "--parallel.pp 2 --parallel.schedule zb-h1 --parallel.zero 2 --model.dropout 0.1",
    "--parallel.zero 1 --parallel.reduce ring --parallel.cp 2",
    "--parallel.zero 0 --parallel.reduce server",
]


@pytest.mark.slow
@pytest.mark.parametrize("layout", SOUND)
def test_sound_ranks_pass_after_every_step(tmp_path, args, layout):
    more = ("--train.steps", "4", "--checkpoint.every", "3", "--checkpoint.check_replicas", "1")
    end = run(tmp_path, [*args, *more, *layout.split()], world=4)
    assert end.codes == [0, 0, 0, 0], end.logs
    assert run_folder.saved_steps(tmp_path / "run") == [4, 3]


# ---- in a run ----------------------------------------------------------------------------------------------


def flips_at(step, rank, **arguments):
    """before(rank) of a job: one bit changes on one rank after this step, and stays so."""
    return after_step(step, lambda session, own_rank: own_rank == rank and flip(session, **arguments))


@pytest.mark.slow
def test_nothing_is_saved_once_replicas_differ(tmp_path, args):
    more = ("--parallel.zero", "0", "--train.steps", "6", "--checkpoint.every", "2")
    end = run(tmp_path, [*args, *more], before=flips_at(3, 1, key=OUT))
    assert end.codes == [80, 80], end.logs
    assert any("replicas differ at step 4: " in line and OUT in line for line in end.errors())
    assert run_folder.saved_steps(tmp_path / "run") == [2]
    reason = run_folder.exit_reason(tmp_path / "run")
    assert (reason["code"], reason["requeue"]) == (80, True)


@pytest.mark.slow
def test_a_run_compares_between_its_saves(tmp_path, args):
    more = ("--parallel.tp", "2", "--train.steps", "6", "--checkpoint.check_replicas", "2")
    end = run(tmp_path, [*args, *more], before=flips_at(3, 0, key=FIRST_NORM))
    assert end.codes == [80, 80], end.logs
    assert any("replicas differ at step 4: " in line and FIRST_NORM in line for line in end.errors())
    assert not store.committed_checkpoints(tmp_path / "run" / "checkpoints")


@pytest.mark.slow(core=["cp2"])
@pytest.mark.parametrize("layout", [("--parallel.cp", "2"), ()], ids=["cp2", "dp2"])
def test_a_nan_in_one_rank_s_reduced_gradient_is_found(tmp_path, args, layout):
    more = ("--parallel.zero", "0", "--train.steps", "3")
    end = run(tmp_path, [*args, *layout, *more], fault="step.backward:rank=1:step=3:act=nan")
    assert end.codes == [80, 80], end.logs


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
def test_the_checksum_is_that_computed_by_hand(dtype, size):
    whole = torch.randn(size + 3, generator=torch.Generator().manual_seed(size)).to(dtype)
    for x in (whole[:size], whole[3:]):
        assert int(checksum(x)) == by_hand(x)


def test_the_checksum_sees_every_single_bit():
    x = torch.randn(300, generator=torch.Generator().manual_seed(1))
    sound = int(checksum(x))
    for position in range(0, 300, 7):
        for bit in range(32):
            changed = x.clone()
            changed.view(torch.int32)[position] ^= -(2**31) if bit == 31 else 1 << bit
            assert int(checksum(changed)) != sound
    assert int(checksum(x.flip(0))) != sound


# ---- exchanges ---------------------------------------------------------------------------------------------


def swapped(session):
    """The same two exchanges on all ranks, but the last has them in another order: gloo sums bytes as they
    come.
    """
    group = session.run.mesh.tp
    exchanges = [torch.ones(8), torch.ones(4, dtype=torch.int64)]
    for x in exchanges if group.index == 0 else exchanges[::-1]:
        comm.all_reduce_sum(x, group)


def with_two_dtypes(session):
    group = session.run.mesh.tp
    comm.all_reduce_sum(torch.ones(8, dtype=(torch.bfloat16, torch.float16)[group.index]), group)


def started_with_two_dtypes(session):
    group = session.run.mesh.tp
    x = torch.ones(8, dtype=(torch.float32, torch.int32)[group.index])
    comm.start_all_gather(x, group, x.new_zeros(16)).wait()


@pytest.mark.slow
@pytest.mark.parametrize("exchange, told", [
    (swapped, "the same ones on rank 0 and on rank 1, in another order"),
    (with_two_dtypes, "all_reduce of 16 bytes in torch.bfloat16: 1 on rank 0, 0 on rank 1; "
                      "all_reduce of 16 bytes in torch.float16: 0 on rank 0, 1 on rank 1"),
    (started_with_two_dtypes, "all_gather of 64 bytes in torch.float32: 1 on rank 0, 0 on rank 1; "
                              "all_gather of 64 bytes in torch.int32: 0 on rank 0, 1 on rank 1"),
])
def test_exchanges_that_do_not_match_are_named_and_nothing_is_saved(tmp_path, args, exchange, told):
    more = ("--parallel.tp", "2", "--train.steps", "3")
    end = run(tmp_path, [*args, *more], before=after_step(2, lambda session, _: exchange(session)))
    assert end.codes == [1, 1], end.logs
    (line, *_) = [line for line in end.errors() if told in line] or pytest.fail(f"{end.errors()}")
    assert "ranks of group tp (ranks 0, 1) run different exchanges by step 2: " in line
    assert not store.committed_checkpoints(tmp_path / "run" / "checkpoints")


def test_a_difference_of_long_ago_has_no_step_any_more():
    logs = [comm.CollectiveLog(), comm.CollectiveLog()]
    for step in range(1, comm.NUM_MARKS + 9):
        for rank, log in enumerate(logs):
            log.add(("all_reduce", 8 * (1 + rank) if step == 2 else 8, torch.int64), step)
    assert logs[0].digest != logs[1].digest
    told = comm.difference(*logs, (4, 6))
    assert told == (
        " by step 9: all_reduce of 16 bytes in torch.int64: 0 on rank 4, 1 on rank 6; "
        "all_reduce of 8 bytes in torch.int64: 264 on rank 4, 263 on rank 6"
    )
