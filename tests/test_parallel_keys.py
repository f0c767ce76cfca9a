"""Every key of `parallel` does what it says, and nothing else.

Each case trains twice through train.train on the same ranks, without and with the key. What a rank did and
held is read off (tests/program.py: Seen): the case names all that the key changes, and says how; whatever
it does not name must be equal. The values (losses, gradient norms) are equal to 1e-9 in fp64, whatever the
key, except where it is lossy by definition.
"""

import dataclasses
import typing
from collections.abc import Callable
from datetime import timedelta

import pytest
import torch.distributed as dist
from program import Seen, corpus, look, settings
from ranks import MODEL, job

from config.schema import ParallelConfig
from parallel.pipeline.schedule import COMPUTE_KINDS

FOUR = ("--model.layers", "4", "--model.dropout", "0.1")
EXPERTS = (*FOUR, "--model.mlp", "experts", "--model.mlp.width", "16", "--model.mlp.experts", "4")


@dataclasses.dataclass(frozen=True)
class Case:
    """key: is set to `to` beside `base`. changes: fields of Seen. right(before, after): how, from those of
    every rank."""

    key: str
    to: object
    changes: set[str]
    right: Callable[[list[Seen], list[Seen]], bool]
    base: dict = dataclasses.field(default_factory=dict)
    world: int = 2
    model: tuple[str, ...] = FOUR
    name: str = "llama3-tiny"

    def __str__(self) -> str:
        return f"{self.key}={self.to}-{'-'.join(f'{k}={v}' for k, v in self.base.items())}"


def sent(seen: Seen, group: str, verb: str) -> tuple[int, int]:
    """(calls, bytes) of one kind of exchange; the scalars of a step (token counts, loss, norm) have 8
    bytes each."""
    return seen.wire.get((group, verb), (0, 0))


def gradients(seen: Seen) -> int:
    """Bytes of the buckets' gradients that are summed in a step: without the two scalars, the count of
    tokens and the loss."""
    calls, n = sent(seen, "dp_cp", "all_reduce")
    assert calls == seen.buckets + 2
    return n - 16


def split(axis: str):
    return lambda before, after: all(
        b.groups[axis] == 1 and a.groups[axis] == 2 for b, a in zip(before, after)
    )


def tensor_parallel(before, after) -> bool:
    """The matrices of a rank are half as large; all but the norms' vectors is matrices. It reads twice as
    many sequences."""
    return (
        split("tp")(before, after)
        and all(0.5 <= a.state["weights"] / b.state["weights"] < 0.52 for b, a in zip(before, after))
        and all(list(b.ops) == [2] and list(a.ops) == [4] for b, a in zip(before, after))
    )


def parts_are_sent(before: list[Seen], after: list[Seen]) -> bool:
    """Of two ranks, each sends its half of what the collectives of the linear layers held: six of a block's
    eight (not the sums of gradients of column layers' inputs)."""
    for b, a in zip(before, after):
        calls = nbytes = 0
        for verb in ("all_gather", "reduce_scatter"):
            calls_before, bytes_before = sent(b, "tp", verb)
            calls_after, bytes_after = sent(a, "tp", verb)
            calls += calls_before - calls_after
            nbytes += bytes_before - bytes_after
        scatters = sent(b, "tp", "reduce_scatter")[0] - sent(a, "tp", "reduce_scatter")[0]
        if calls != 3 * scatters or sent(a, "tp", "send") != (calls, nbytes // 2) or not calls:
            return False
    return True


def sequence_parallel(before, after) -> bool:
    """An all-reduce becomes a reduce-scatter and an all-gather; what lies between tp regions is kept once,
    not on both ranks."""
    was, now = sent(before[0], "tp", "all_reduce"), sent(after[0], "tp", "all_reduce")
    return (
        now[0] < 0.1 * was[0]
        and sent(after[0], "tp", "reduce_scatter")[0] > 0.4 * was[0]
        and sent(before[0], "tp", "reduce_scatter")[0] == 0
        and all(a.kept < 0.9 * b.kept for b, a in zip(before, after))
    )


def pipeline(before, after) -> bool:
    """Each block is on one rank; 4 microbatches of 16 x 32 numbers go down, and as many gradients up."""
    blocks = [sum(seen.layers.values(), []) for seen in after]
    return (
        split("pp")(before, after)
        and sum(blocks, []) == [0, 1, 2, 3]
        and all(blocks)
        and all(sent(a, "pp", "send") == (4, 4 * 16 * 32 * 8) for a in after)
    )


def computes(seen: Seen) -> list[str]:
    """The ops without the transfers; the number of the stage, which kind, the number of the microbatch."""
    return [op for ops in seen.ops.values() for op in ops if op.strip("0123456789") in COMPUTE_KINDS]


def gpipe(before, after) -> bool:
    """All forwards, then all backwards."""
    return all(
        computes(a) == [f"{r}F{i}" for i in range(4)] + [f"{r}B{i}" for i in range(4)]
        for r, a in enumerate(after)
    )


def zero_bubble(before, after) -> bool:
    """No backward is whole: each microbatch has an I, and a W after it."""
    each = {f"{kind}{i}" for kind in "FIW" for i in range(4)}
    ordered = all(
        ops.index(f"{r}I{i}") < ops.index(f"{r}W{i}")
        for r, ops in enumerate(map(computes, after))
        for i in range(4)
    )
    return ordered and all({op[1:] for op in computes(seen)} == each for seen in after)


def vee(before, after) -> bool:
    """The first rank has the first and the last stage, the second those between."""
    return [list(a.layers) for a in after] == [[0, 3], [1, 2]]


def interleaved(before, after) -> bool:
    return [list(a.layers) for a in after] == [[0, 2], [1, 3]]


def cut_by_hand(before, after) -> bool:
    return [a.layers for a in after] == [{0: [0]}, {1: [1, 2, 3]}]


def context_parallel(before, after) -> bool:
    """Keys and values of half a sequence go to the neighbour: with 2 key heads of 8 numbers each, 8
    tokens. Every rank reads every sequence."""
    tokens = 4 * 4 * 8 * 2 * 2 * 8 * 8  # sequences, layers, tokens, k and v, heads, channels, bytes
    return (
        split("cp")(before, after)
        and all(a.groups["dp"] == 1 for a in after)
        and all(sent(a, "cp", "send")[1] >= tokens for a in after)
    )


def ulysses(before, after) -> bool:
    """Two all-to-alls a layer and microbatch and direction at least, in the place of sends."""
    return all(
        sent(b, "cp", "all_to_all")[0] == 0
        and sent(a, "cp", "send")[0] == 0
        and sent(a, "cp", "all_to_all")[0] >= 2 * 2 * 4 * 4
        for b, a in zip(before, after)
    )


def expert_parallel(before, after) -> bool:
    """Tokens travel; each rank holds half of the experts, whose gradients then meet no other rank's."""
    experts = sent(before[0], "expert_dp", "all_reduce")[1]
    return (
        all(
            a.groups["ep_etp"] == 2 and a.groups["expert_dp"] == 1 and b.groups["expert_dp"] == 2
            for b, a in zip(before, after)
        )
        and all(
            sent(a, "ep_etp", "all_to_all")[0] > 0 == sent(b, "ep_etp", "all_to_all")[0]
            for b, a in zip(before, after)
        )
        and all(
            sent(a, "expert_dp", "all_reduce")[0] == 0 < sent(b, "expert_dp", "all_reduce")[0]
            for b, a in zip(before, after)
        )
        and all(a.state["weights"] == b.state["weights"] - experts // 2 for b, a in zip(before, after))
    )


def expert_tensor_parallel(before, after) -> bool:
    """As above; and every token goes to both ranks, since each has half of every expert: two copies of
    top_k = 2 rows."""
    rows = (
        2 * 16 * 2 * 2 * 32 * 8
    )  # microbatches, tokens, experts a token, ranks, hidden, bytes: one way of one layer
    return expert_parallel(before, after) and all(
        sent(a, "ep_etp", "all_to_all")[1] >= 4 * 4 * rows for a in after
    )


def rows_in_chunks(before: list[Seen], after: list[Seen]) -> bool:
    """The same bytes; of seven exchanges of a layer and microbatch, the four of rows are three each."""
    for b, a in zip(before, after):
        calls, nbytes = sent(b, "ep_etp", "all_to_all")
        if sent(a, "ep_etp", "all_to_all") != (calls // 7 * (3 + 4 * 3), nbytes):
            return False
    return True


def replicas(before, after) -> bool:
    """Two shard groups of two ranks in the place of one of four: twice the shard (but for padding), and
    one more sum of it."""
    return (
        split("dp_replicate")(before, after)
        and all(b.groups["fsdp"] == 4 and a.groups["fsdp"] == 2 for b, a in zip(before, after))
        and all(
            a.state["moments"] == pytest.approx(2 * b.state["moments"], rel=0.02)
            for b, a in zip(before, after)
        )
        and all(sent(a, "dp_replicate", "all_reduce")[0] == a.buckets for a in after)
    )


def shards(*which: str):
    """These parts of the state are halved, the others whole."""

    def right(before, after) -> bool:
        return all(
            a.state[part] * (2 if part in which else 1) == b.state[part]
            for b, a in zip(before, after)
            for part in ("weights", "gradients", "moments")
        )

    return right


def scattered(times: int, gathers: int):
    """In the place of all-reduces: reduce-scatters of the same bytes, `times` a step; all-gathers of the
    weights."""

    def right(before, after) -> bool:
        n = gradients(before[0])
        return all(
            sent(a, "fsdp", "reduce_scatter") == (times * a.buckets, times * n)
            and sent(a, "dp_cp", "all_reduce")[0] == 2
            and sent(a, "fsdp", "all_gather")[1] >= gathers * n
            for a in after
        )

    return right


def both(*rights):
    return lambda before, after: all(right(before, after) for right in rights)


def smaller_buckets(before, after) -> bool:
    """More sums of the same gradients. Of a block, q|k|v has 64 x 32 numbers of 8 bytes, o 32 x 32,
    gate|up 96 x 32, down 32 x 48, and the norms 64: in buckets of 2621 numbers these are q|k|v, o + down,
    gate|up, norms, or the like. Table and head have one each, and the last norm."""
    return all(b.buckets == 6 and a.buckets == 4 * 4 + 3 for b, a in zip(before, after)) and all(
        gradients(a) == gradients(b) for b, a in zip(before, after)
    )


def by_ring(before, after) -> bool:
    """2 (N-1)/N n bytes by sends: n of two ranks."""
    return all(
        sent(a, "dp_cp", "send")[1] == gradients(b) and sent(a, "dp_cp", "all_reduce")[0] == 2
        for b, a in zip(before, after)
    )


def by_server(before, after) -> bool:
    """Of four ranks: n from each but rank 0, which sends n to each of the others."""
    n = gradients(before[0])
    return [a.peers for a in after] == [{1: n, 2: n, 3: n}, {0: n}, {0: n}, {0: n}]


def by_nodes(before, after) -> bool:
    """Four ranks on two nodes: inside 2 (k-1)/k n, between them 2 (N/k-1)/(N/k) n/k, with k = 2. On one
    node: rank 0 sends all of 2 (N-1)/N n to its neighbour."""
    n = sum(before[0].peers.values()) * 4 // (2 * 3)
    return (
        before[0].peers == {1: 2 * 3 * n // 4}
        and after[0].peers == {1: 2 * n // 2, 2: 2 * (n // 2) // 2}
        and sent(before[0], "dp_cp", "send")[0] == 6 * before[0].buckets
        and sent(after[0], "dp_cp", "send")[0] == 4 * after[0].buckets
    )


def close(before, after, limit: float = 0.02) -> bool:
    """Lossy: not the same values, but near. values: validation, loss, norm, loss, norm."""
    return all(0 < abs(b.values[3] - a.values[3]) < limit for b, a in zip(before, after))


def eight_bits(before, after) -> bool:
    """An element of 8 bytes travels as one, with a scale of 4 bytes for 256 of them: an all-to-all and an
    all-gather in the place of an all-reduce. The forward before the first update is the same."""
    n = gradients(before[0]) // 8
    coded = [sent(a, "dp_cp", "all_to_all")[1] for a in after]
    return (
        all(n * (1 + 4 / 256) <= c < 1.3 * n for c in coded)
        and all(sent(a, "dp_cp", "all_gather")[1] < 1.3 * n for a in after)
        and all(b.values[:2] == pytest.approx(a.values[:2], rel=1e-12) for b, a in zip(before, after))
        and close(before, after)
    )


def low_rank(before, after) -> bool:
    return (
        all(
            0 < sent(a, "dp_cp", "all_reduce")[1] < 0.6 * sent(b, "dp_cp", "all_reduce")[1]
            for b, a in zip(before, after)
        )
        and all(b.values[:2] == pytest.approx(a.values[:2], rel=1e-12) for b, a in zip(before, after))
        and close(before, after)
    )


def lower_rank(before, after) -> bool:
    return all(
        sent(a, "dp_cp", "all_reduce")[1] < sent(b, "dp_cp", "all_reduce")[1] for b, a in zip(before, after)
    ) and close(before, after)


def eight_bit_weights(before, after) -> bool:
    """What is gathered shrinks to an eighth; the masters are then another tensor than the weights, and
    exact."""
    return (
        all(
            sent(a, "fsdp", "all_gather")[1] < 0.17 * sent(b, "fsdp", "all_gather")[1]
            for b, a in zip(before, after)
        )
        and all(b.state["masters"] == 0 < a.state["masters"] for b, a in zip(before, after))
        and close(before, after)
    )


def smaller_blocks(before, after) -> bool:
    """Four times as many scales; less padding (a parameter begins with a block)."""

    def wire(seen: Seen) -> int:
        return sent(seen, "dp_cp", "all_to_all")[1]

    def scales(seen: Seen, block: int) -> float:
        return wire(seen) / (seen.state["gradients"] / 8) - 1

    return all(
        scales(b, 256) == pytest.approx(4 / 256) and scales(a, 64) == pytest.approx(4 / 64)
        for b, a in zip(before, after)
    ) and close(before, after)


def keeps_less(before, after) -> bool:
    return all(a.kept < 0.97 * b.kept for b, a in zip(before, after))


def keeps_the_inputs_of_blocks(before, after) -> bool:
    """Of a block, its input: less than a third of all."""
    return all(a.kept < 0.35 * b.kept for b, a in zip(before, after))


def first_stage_keeps_less(before, after) -> bool:
    return after[0].kept < 0.5 * before[0].kept and after[1].kept == before[1].kept


def state_in_host_memory(before, after) -> bool:
    """Masters and moments; in fp64 the masters were the weights themselves."""
    return all(
        b.state["host"] == b.state["masters"] == 0
        and a.state["masters"] == b.state["weights"]
        and a.state["host"] == a.state["masters"] + b.state["moments"]
        for b, a in zip(before, after)
    )


def saved_in_host_memory(before, after) -> bool:
    """Nothing of 8192 bytes or more stays in the graph: of a small model, most is below that."""
    return all(a.kept < b.kept for b, a in zip(before, after))


REGROUPED = {"groups", "wire", "state", "kept", "ops"}
# Blocks are on other ranks, which hold and send other things.
MOVED = {"ops", "layers", "buckets", "wire", "peers", "state", "kept"}
PP = {"pp": 2}
CASES = [
    Case("tp", 2, REGROUPED, tensor_parallel),
    Case("sp", True, {"wire", "kept"}, sequence_parallel, {"tp": 2}),
    Case("async_tp", True, {"wire", "peers"}, parts_are_sent, {"tp": 2, "sp": True}),
    Case("pp", 2, {*REGROUPED, "layers", "buckets", "peers"}, pipeline),
    Case("vpp", 2, MOVED, interleaved, {"pp": 2, "schedule": "interleaved", "vpp": 1, "stages": None}),
    Case("schedule", "gpipe", {"ops"}, gpipe, PP),
    Case("schedule", "zb-h1", {"ops"}, zero_bubble, PP),
    Case("schedule", "zb-v", MOVED - {"buckets"}, vee, PP),
    Case("schedule", "dualpipe-v", MOVED - {"buckets"}, vee, PP),
    Case("schedule", "interleaved", MOVED, interleaved, PP),
    Case("stages", "1,3", {"layers", "buckets", "state", "kept"}, cut_by_hand, {"pp": 2, "stages": "2,2"}),
    Case("cp", 2, {*REGROUPED, "peers"} - {"state"}, context_parallel),
    Case("cp_kind", "ulysses", {"wire", "peers", "kept"}, ulysses, {"cp": 2}),
    Case("ep", 2, {"groups", "wire", "state", "kept"}, expert_parallel, model=EXPERTS, name="mixtral-tiny"),
    Case(
        "etp",
        2,
        {"groups", "wire", "state", "kept"},
        expert_tensor_parallel,
        model=EXPERTS,
        name="mixtral-tiny",
    ),
    Case("ep_chunks", 3, {"wire", "kept"}, rows_in_chunks, {"ep": 2}, model=EXPERTS, name="mixtral-tiny"),
    Case("dp_rep", 2, {"groups", "wire", "state"}, replicas, {"zero": 1}, world=4),
    Case("zero", 1, {"wire", "state"}, both(shards("moments"), scattered(1, 1))),
    Case("zero", 2, {"wire", "state"}, both(shards("moments", "gradients"), scattered(2, 1))),
    Case("zero", 3, {"wire", "state"}, both(shards("moments", "gradients", "weights"), scattered(2, 2))),
    Case("bucket_mb", 0.02, {"wire", "buckets"}, smaller_buckets),
    Case("reduce", "ring", {"wire", "peers"}, by_ring),
    Case("reduce", "server", {"wire", "peers"}, by_server, world=4),
    Case("reduce", "hierarchy", {"wire", "peers"}, by_ring),
    Case("node", 2, {"wire", "peers"}, by_nodes, {"reduce": "hierarchy"}, world=4),
    Case("compress", "int8", {"wire", "state", "values"}, eight_bits),
    Case("compress", "fp8", {"wire", "state", "values"}, eight_bits),
    Case("compress", "powersgd", {"wire", "values"}, low_rank),
    Case("compress_weights", "int8", {"wire", "state", "values"}, eight_bit_weights, {"zero": 1}),
    Case("compress_weights", "fp8", {"wire", "state", "values"}, eight_bit_weights, {"zero": 1}),
    Case("compress_block", 64, {"wire", "state", "values"}, smaller_blocks, {"compress": "int8"}),
    Case("powersgd_rank", 2, {"wire", "values"}, lower_rank, {"compress": "powersgd"}),
    Case("recompute", "selective", {"kept"}, keeps_less),
    Case("recompute", "full", {"kept"}, keeps_the_inputs_of_blocks),
    Case("recompute_parts", "core,norm,act", {"kept"}, keeps_less, {"recompute": "selective"}),
    Case("recompute_stages", "full,none", {"kept"}, first_stage_keeps_less, PP),
    Case("offload", "optimizer", {"state"}, state_in_host_memory),
    Case("offload", "activations", {"kept"}, saved_in_host_memory),
    Case("offload", "both", {"state", "kept"}, both(state_in_host_memory, saved_in_host_memory)),
]
# below, plan/test_elastic.py and test_auto_layout.py: there is no run to look at yet
ELSEWHERE = {"timeout_s", "elastic", "auto"}


def test_no_key_is_forgotten():
    assert {case.key for case in CASES} | ELSEWHERE == {
        field.name for field in dataclasses.fields(ParallelConfig)
    }


def test_no_choice_is_forgotten():
    """Of a key with named choices, each that is not the default."""
    for key, kind in typing.get_type_hints(ParallelConfig).items():
        if typing.get_origin(kind) is typing.Literal:
            tried = {case.to for case in CASES if case.key == key}
            assert tried == set(typing.get_args(kind)) - {getattr(ParallelConfig, key)}, key


@pytest.fixture(scope="module")
def seen(ranks, tmp_path_factory):
    """seen(case, **parallel) -> what every rank shows; the same settings train once."""
    home, known = tmp_path_factory.mktemp("keys"), {}
    prefix = corpus(home)

    def get(case: Case, **parallel) -> list[Seen]:
        key = (case.world, case.model, case.name, *sorted(parallel.items(), key=str))
        if key not in known:
            cfg = settings(prefix, *case.model, name=case.name, parallel=parallel)
            known[key] = ranks(case.world).run(look, cfg, str(home / str(len(known))))
        return known[key]

    return get


@pytest.mark.slow(every=39)
@pytest.mark.parametrize("case", CASES, ids=str)
def test_it_does_what_it_says_and_nothing_else(seen, case):
    before, after = seen(case, **case.base), seen(case, **{**case.base, case.key: case.to})
    fields = {f.name for f in dataclasses.fields(Seen)}
    changed = {
        f for f in fields - {"values"} if [getattr(s, f) for s in before] != [getattr(s, f) for s in after]
    }
    if not all(a.values == pytest.approx(b.values, rel=1e-9) for b, a in zip(before, after)):
        changed.add("values")
    assert changed == case.changes, changed ^ case.changes
    assert case.right(before, after)


def noted(rank: int) -> None:
    """Prints the limits with which torch's process groups are made on this rank."""
    for name in ("init_process_group", "new_group"):

        def made(*args, inner=getattr(dist, name), name=name, **how):
            print("limit", name, how["timeout"] == timedelta(seconds=77))
            return inner(*args, **how)

        setattr(dist, name, made)


def test_timeout_s_reaches_every_process_group(tmp_path):
    """The job's own, those of the axes and the saver's, on every rank."""
    args = [
        "llama3-tiny",
        *MODEL,
        "--data.path",
        corpus(tmp_path),
        "--train.steps",
        "1",
        "--log.dir",
        str(tmp_path),
        "--parallel.pp",
        "2",
        "--checkpoint.async_save",
        "true",
        "--parallel.timeout_s",
        "77",
    ]
    end = job(tmp_path / "job", 2, args, before=noted)
    assert set(end.codes) == {0}, end.logs
    for log in end.logs:
        lines = [line.split()[1:] for line in log.splitlines() if line.startswith("limit ")]
        assert {name for name, _ in lines} == {"init_process_group", "new_group"}, log
        assert len(lines) >= 3 and {same for _, same in lines} == {"True"}, lines
