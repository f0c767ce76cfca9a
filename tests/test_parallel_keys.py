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


def on_each_rank(right: Callable[[Seen, Seen], bool]):
    """right(b, a): of what one rank showed before, and after. It must hold on every rank."""
    wrapped = lambda before, after: all(map(right, before, after))
    wrapped.__doc__ = right.__doc__
    return wrapped


def split(axis: str):
    return on_each_rank(lambda b, a: b.groups[axis] == 1 and a.groups[axis] == 2)


@on_each_rank
def halves_the_matrices(b, a) -> bool:
    """All but the norms' vectors is matrices. A rank reads twice as many sequences."""
    return 0.5 <= a.state["weights"] / b.state["weights"] < 0.52 and (list(b.ops), list(a.ops)) == ([2], [4])


@on_each_rank
def parts_are_sent(b, a) -> bool:
    """Each of two ranks sends its half of what the collectives of the linear layers held: six of a block's
    eight (not the sums of gradients of column layers' inputs)."""
    calls = nbytes = 0
    for verb in ("all_gather", "reduce_scatter"):
        calls += sent(b, "tp", verb)[0] - sent(a, "tp", verb)[0]
        nbytes += sent(b, "tp", verb)[1] - sent(a, "tp", verb)[1]
    scatters = sent(b, "tp", "reduce_scatter")[0] - sent(a, "tp", "reduce_scatter")[0]
    return 0 < calls == 3 * scatters and sent(a, "tp", "send") == (calls, nbytes // 2)


def sequence_parallel(before, after) -> bool:
    """An all-reduce becomes a reduce-scatter and an all-gather; what lies between tp regions is kept once,
    not on both ranks."""
    reduces = sent(before[0], "tp", "all_reduce")[0]
    return (
        sent(after[0], "tp", "all_reduce")[0] < 0.1 * reduces
        and sent(after[0], "tp", "reduce_scatter")[0] > 0.4 * reduces
        and sent(before[0], "tp", "reduce_scatter")[0] == 0
        and all(a.kept < 0.9 * b.kept for b, a in zip(before, after))
    )


def pipeline(before, after) -> bool:
    """Each block is on one rank; 4 microbatches of 16 x 32 numbers go down, and as many gradients up."""
    blocks = [sum(seen.layers.values(), []) for seen in after]
    each_once = sum(blocks, []) == [0, 1, 2, 3] and all(blocks)
    return each_once and all(sent(a, "pp", "send") == (4, 4 * 16 * 32 * 8) for a in after)


def computes(seen: Seen) -> list[str]:
    """The ops without the transfers; the number of the stage, which kind, the number of the microbatch."""
    return [op for ops in seen.ops.values() for op in ops if op.strip("0123456789") in COMPUTE_KINDS]


def gpipe(before, after) -> bool:
    """All forwards, then all backwards."""
    orders = [[f"{rank}{kind}{i}" for kind in "FB" for i in range(4)] for rank in range(len(after))]
    return list(map(computes, after)) == orders


def zero_bubble(before, after) -> bool:
    """No backward is whole: each microbatch has an I, and a W after it."""
    each = {f"{kind}{i}" for kind in "FIW" for i in range(4)}
    for rank, ops in enumerate(map(computes, after)):
        if any(ops.index(f"{rank}I{i}") > ops.index(f"{rank}W{i}") for i in range(4)):
            return False
    return all({op[1:] for op in computes(seen)} == each for seen in after)


def stages(*of_ranks: list[int]):
    """The numbers of the stages that each rank has. A vee: the first rank has the first and the last."""
    return lambda before, after: [list(a.layers) for a in after] == list(of_ranks)


def cut_by_hand(before, after) -> bool:
    return [a.layers for a in after] == [{0: [0]}, {1: [1, 2, 3]}]


@on_each_rank
def passes_keys_and_values_on(b, a) -> bool:
    """Keys and values of half a sequence go to the neighbour: with 2 key heads of 8 numbers each, 8
    tokens. Every rank reads every sequence."""
    nbytes = 4 * 4 * 8 * 2 * 2 * 8 * 8  # sequences, layers, tokens, k and v, heads, channels, bytes
    return a.groups["dp"] == 1 and sent(a, "cp", "send")[1] >= nbytes


@on_each_rank
def ulysses(b, a) -> bool:
    """Two all-to-alls a layer and microbatch and direction at least, instead of sends."""
    is_without_sends = sent(b, "cp", "all_to_all")[0] == sent(a, "cp", "send")[0] == 0
    return is_without_sends and sent(a, "cp", "all_to_all")[0] >= 2 * 2 * 4 * 4


@on_each_rank
def expert_parallel(b, a) -> bool:
    """Tokens travel; each rank holds half of the experts, whose gradients then meet no other rank's."""
    reduces, experts = sent(b, "expert_dp", "all_reduce")
    return (
        (a.groups["ep_etp"], a.groups["expert_dp"], b.groups["expert_dp"]) == (2, 1, 2)
        and sent(a, "ep_etp", "all_to_all")[0] > 0 == sent(b, "ep_etp", "all_to_all")[0]
        and sent(a, "expert_dp", "all_reduce")[0] == 0 < reduces
        and a.state["weights"] == b.state["weights"] - experts // 2
    )


@on_each_rank
def sends_every_token_to_both(b, a) -> bool:
    """Each rank has half of every expert: two copies of top_k = 2 rows."""
    # microbatches, tokens, experts a token, ranks, hidden, bytes: one way of one layer
    nbytes = 2 * 16 * 2 * 2 * 32 * 8
    return sent(a, "ep_etp", "all_to_all")[1] >= 4 * 4 * nbytes


@on_each_rank
def rows_in_chunks(b, a) -> bool:
    """The same bytes; of seven exchanges of a layer and microbatch, the four of rows are three each."""
    calls, nbytes = sent(b, "ep_etp", "all_to_all")
    return sent(a, "ep_etp", "all_to_all") == (calls // 7 * (3 + 4 * 3), nbytes)


@on_each_rank
def rows_up_to_the_bound(b, a) -> bool:
    """Twice the mean is all that a router can send to one of two ranks: twice the rows, the same counts, and
    a step asks once whether there were more."""
    calls, nbytes = sent(b, "ep_etp", "all_to_all")
    counts = calls // 7 * 4 * 8
    asked = sent(a, "world", "all_reduce")[0] - sent(b, "world", "all_reduce")[0]
    return (
        sent(a, "ep_etp", "all_to_all") == (calls, 2 * nbytes - counts)
        and sent(a, "world", "all_reduce")[1] == sent(b, "world", "all_reduce")[1] + 8 * asked
        and asked > 0 and a.kept > b.kept
    )


@on_each_rank
def replicas(b, a) -> bool:
    """Two shard groups of two ranks instead of one of four: twice the shard (but for padding), and one more
    sum of it."""
    return (
        (b.groups["fsdp"], a.groups["fsdp"]) == (4, 2)
        and a.state["moments"] == pytest.approx(2 * b.state["moments"], rel=0.02)
        and sent(a, "dp_replicate", "all_reduce")[0] == a.buckets
    )


def shards(*which: str):
    """These parts of the state are halved, the others whole."""
    parts = {part: 2 if part in which else 1 for part in ("weights", "gradients", "moments")}
    return on_each_rank(lambda b, a: all(a.state[part] * n == b.state[part] for part, n in parts.items()))


def scattered(times: int, gathers: int):
    """Instead of all-reduces: reduce-scatters of the same bytes, `times` a step; all-gathers of weights."""

    @on_each_rank
    def right(b, a) -> bool:
        n = gradients(b)
        return (
            sent(a, "fsdp", "reduce_scatter") == (times * a.buckets, times * n)
            and sent(a, "dp_cp", "all_reduce")[0] == 2
            and sent(a, "fsdp", "all_gather")[1] >= gathers * n
        )

    return right


def both(*rights):
    return lambda before, after: all(right(before, after) for right in rights)


@on_each_rank
def smaller_buckets(b, a) -> bool:
    """More sums of the same gradients. Of a block, q|k|v has 64 x 32 numbers of 8 bytes, o 32 x 32,
    gate|up 96 x 32, down 32 x 48, and the norms 64: in buckets of 2621 numbers these are q|k|v, o + down,
    gate|up, norms, or the like. Table and head have one each, and the last norm."""
    return (b.buckets, a.buckets) == (6, 4 * 4 + 3) and gradients(a) == gradients(b)


@on_each_rank
def by_ring(b, a) -> bool:
    """2 (N-1)/N n bytes by sends: n of two ranks."""
    return sent(a, "dp_cp", "send")[1] == gradients(b) and sent(a, "dp_cp", "all_reduce")[0] == 2


def by_server(before, after) -> bool:
    """n from each of four ranks but rank 0, which sends n to each of the others."""
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


@on_each_rank
def close(b, a) -> bool:
    """Lossy: not the same values, but near. values: validation, loss, norm, loss, norm."""
    return 0 < abs(b.values[3] - a.values[3]) < 0.02


@on_each_rank
def same_before_the_update(b, a) -> bool:
    return b.values[:2] == pytest.approx(a.values[:2], rel=1e-12)


def eight_bits(before, after) -> bool:
    """An element of 8 bytes travels as one, with a scale of 4 bytes for 256 of them: an all-to-all and an
    all-gather instead of an all-reduce."""
    n = gradients(before[0]) // 8
    coded = [sent(a, "dp_cp", "all_to_all")[1] for a in after]
    gathered = [sent(a, "dp_cp", "all_gather")[1] for a in after]
    return all(n * (1 + 4 / 256) <= nbytes < 1.3 * n for nbytes in coded) and max(gathered) < 1.3 * n


def reduces_less(share: float):
    """Less than this share of the bytes."""
    nbytes = lambda seen: sent(seen, "dp_cp", "all_reduce")[1]
    return on_each_rank(lambda b, a: 0 < nbytes(a) < share * nbytes(b))


@on_each_rank
def eight_bit_weights(b, a) -> bool:
    """The gathered bytes shrink to an eighth; the masters are then another tensor than the weights, and
    exact."""
    gathers_less = sent(a, "fsdp", "all_gather")[1] < 0.17 * sent(b, "fsdp", "all_gather")[1]
    return gathers_less and b.state["masters"] == 0 < a.state["masters"]


@on_each_rank
def eight_bit_rows(b, a) -> bool:
    """Of the four exchanges of rows of 32 channels, each of 8 bytes, two have 32 bytes and a scale of 8. 4
    microbatches, 2 on each rank, of 16 tokens with 2 experts; 4 layers."""
    saved = 2 * 4 * (2 * 16 * 2) * (32 * 8 - 40)
    (calls, nbytes), (calls_after, nbytes_after) = (sent(seen, "ep_etp", "all_to_all") for seen in (b, a))
    return calls == calls_after and nbytes - nbytes_after == saved


@on_each_rank
def smaller_blocks(b, a) -> bool:
    """Four times as many scales; less padding (a parameter begins with a block)."""
    scales = [sent(seen, "dp_cp", "all_to_all")[1] / (seen.state["gradients"] / 8) - 1 for seen in (b, a)]
    return scales == pytest.approx([4 / 256, 4 / 64])


def keeps(share: float):
    """For the backward, less than this share of the bytes."""
    return on_each_rank(lambda b, a: a.kept < share * b.kept)


def first_stage_keeps_less(before, after) -> bool:
    return after[0].kept < 0.5 * before[0].kept and after[1].kept == before[1].kept


@on_each_rank
def state_in_host_memory(b, a) -> bool:
    """Masters and moments; in fp64 the masters were the weights themselves."""
    return (
        b.state["host"] == b.state["masters"] == 0
        and a.state["masters"] == b.state["weights"]
        and a.state["host"] == a.state["masters"] + b.state["moments"]
    )


REGROUPED = {"groups", "wire", "state", "kept", "ops"}
# Blocks are on other ranks, which hold and send other things.
MOVED = {"ops", "layers", "buckets", "wire", "peers", "state", "kept"}
PP = {"pp": 2}
ONE_CHUNK = {**PP, "schedule": "interleaved", "vpp": 1, "stages": None}
LOSSY = {"wire", "state", "values"}
INT8 = both(eight_bits, same_before_the_update, close)
LOW_RANK = both(reduces_less(0.6), same_before_the_update, close)
CASES = [
    Case("tp", 2, REGROUPED, both(split("tp"), halves_the_matrices)),
    Case("sp", True, {"wire", "kept"}, sequence_parallel, {"tp": 2}),
    Case("async_tp", True, {"wire", "peers"}, parts_are_sent, {"tp": 2, "sp": True}),
    Case("pp", 2, {*REGROUPED, "layers", "buckets", "peers"}, both(split("pp"), pipeline)),
    Case("vpp", 2, MOVED, stages([0, 2], [1, 3]), ONE_CHUNK),
    Case("schedule", "gpipe", {"ops"}, gpipe, PP),
    Case("schedule", "zb-h1", {"ops"}, zero_bubble, PP),
    Case("schedule", "zb-v", MOVED - {"buckets"}, stages([0, 3], [1, 2]), PP),
    Case("schedule", "dualpipe-v", MOVED - {"buckets"}, stages([0, 3], [1, 2]), PP),
    Case("schedule", "interleaved", MOVED, stages([0, 2], [1, 3]), PP),
    Case("stages", "1,3", {"layers", "buckets", "state", "kept"}, cut_by_hand, {"pp": 2, "stages": "2,2"}),
    Case("cp", 2, {*REGROUPED, "peers"} - {"state"}, both(split("cp"), passes_keys_and_values_on)),
    Case("cp_kind", "ulysses", {"wire", "peers", "kept"}, ulysses, {"cp": 2}),
    Case("ep", 2, {"groups", "wire", "state", "kept"}, expert_parallel, model=EXPERTS, name="mixtral-tiny"),
    Case(
        "etp", 2, {"groups", "wire", "state", "kept"}, both(expert_parallel, sends_every_token_to_both),
        model=EXPERTS, name="mixtral-tiny",
    ),
    Case("ep_chunks", 3, {"wire", "kept"}, rows_in_chunks, {"ep": 2}, model=EXPERTS, name="mixtral-tiny"),
    Case("ep_bound", 8.0, {"wire", "kept"}, rows_up_to_the_bound, {"ep": 2}, model=EXPERTS,
         name="mixtral-tiny"),
    Case(
        "dp_rep", 2, {"groups", "wire", "state"}, both(split("dp_replicate"), replicas), {"zero": 1}, world=4
    ),
    Case("zero", 1, {"wire", "state"}, both(shards("moments"), scattered(1, 1))),
    Case("zero", 2, {"wire", "state"}, both(shards("moments", "gradients"), scattered(2, 1))),
    Case("zero", 3, {"wire", "state"}, both(shards("moments", "gradients", "weights"), scattered(2, 2))),
    Case("bucket_mb", 0.02, {"wire", "buckets"}, smaller_buckets),
    Case("reduce", "ring", {"wire", "peers"}, by_ring),
    Case("reduce", "server", {"wire", "peers"}, by_server, world=4),
    Case("reduce", "hierarchy", {"wire", "peers"}, by_ring),
    Case("node", 2, {"wire", "peers"}, by_nodes, {"reduce": "hierarchy"}, world=4),
    Case("compress", "int8", LOSSY, INT8),
    Case("compress", "fp8", LOSSY, INT8),
    Case("compress", "powersgd", LOSSY - {"state"}, LOW_RANK),
    Case("compress_weights", "int8", LOSSY, both(eight_bit_weights, close), {"zero": 1}),
    Case("compress_weights", "fp8", LOSSY, both(eight_bit_weights, close), {"zero": 1}),
    Case("compress_tokens", "fp8", {"wire", "values"}, both(eight_bit_rows, close), {"ep": 2},
         model=EXPERTS, name="mixtral-tiny"),
    Case("compress_block", 64, LOSSY, both(smaller_blocks, close), {"compress": "int8"}),
    Case("powersgd_rank", 2, LOSSY - {"state"}, both(reduces_less(1), close), {"compress": "powersgd"}),
    Case("recompute", "selective", {"kept"}, keeps(0.97)),
    Case("recompute", "full", {"kept"}, keeps(0.35)),
    Case("recompute_parts", "core,norm,act", {"kept"}, keeps(0.97), {"recompute": "selective"}),
    Case("recompute_stages", "full,none", {"kept"}, first_stage_keeps_less, PP),
    Case("offload", "optimizer", {"state"}, state_in_host_memory),
    Case("offload", "activations", {"kept"}, keeps(1)),
    Case("offload", "both", {"state", "kept"}, both(state_in_host_memory, keeps(1))),
]
# below, plan/test_elastic.py and test_auto_layout.py: there is no run to look at yet
ELSEWHERE = {"timeout_s", "elastic", "auto"}


def test_every_key_has_a_case():
    assert {case.key for case in CASES} | ELSEWHERE == {
        field.name for field in dataclasses.fields(ParallelConfig)
    }


def test_every_choice_of_a_key_has_a_case():
    """Each choice of a key with named choices that is not the default."""
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
        "llama3-tiny", *MODEL, "--data.path", corpus(tmp_path), "--train.steps", "1",
        "--log.dir", str(tmp_path), "--parallel.pp", "2", "--checkpoint.async_save", "true",
        "--parallel.timeout_s", "77",
    ]
    end = job(tmp_path / "job", 2, args, before=noted)
    assert set(end.codes) == {0}, end.logs
    for log in end.logs:
        lines = [line.split()[1:] for line in log.splitlines() if line.startswith("limit ")]
        assert {name for name, _ in lines} == {"init_process_group", "new_group"}, log
        assert len(lines) >= 3 and {same for _, same in lines} == {"True"}, lines
