"""What a module costs, as data. Each module of the model says so beside its forward: `cost(work)`.

Everything that counts, plans or forecasts reads it: the FLOPs of MFU, the cut into pipeline stages, and what
plan/ says of bytes, memory and time. A composite is the sum of its children and of what it does itself. A
Cost is that of one microbatch on one rank. Arithmetic alone: no torch.
"""
from collections.abc import Iterable
from dataclasses import dataclass, field, replace
from functools import reduce
from operator import add
from typing import Literal

# What selective recompute can compute again (parallel.recompute_parts), and all else.
Part = Literal["core", "norm", "act", "rest"]
RECOMPUTABLE_PARTS: tuple[Part, ...] = ("core", "norm", "act")

# When an exchange takes place, and whether recomputation repeats it:
#   forward    in the forward; full recompute repeats it
#   output     in the forward; it sends a module's output. Full recompute repeats it only where a later
#              operation of the block keeps something for the backward
#   backward   in the backward
#   regather   in the backward, only if its `part` is recomputed
#   step       in the first forward of a step alone: it is of weights, which all its microbatches share
Phase = Literal["forward", "output", "backward", "regather", "step"]

# What runs beside an exchange: all products that hide its group's, late weight gradients alone, or nothing.
Beside = Literal["products", "late weight gradients", "nothing"]


@dataclass(frozen=True)
class Workload:
    """One microbatch on one rank.

    seq_len: of a full sequence; cp ranks share it. compute_bytes, accumulation_bytes: of an element of the
    compute dtype, and of the dtype of sums (fp32 or better). documents: lengths of the runs of tokens that
    attend to each other; none: full sequences. flash: attention keeps one number a query and head (a fused
    kernel, as on a GPU), not its probabilities.
    """
    micro_batch: int
    seq_len: int
    cp: int = 1
    compute_bytes: int = 2
    accumulation_bytes: int = 4
    documents: tuple[int, ...] = ()
    flash: bool = False

    @property
    def tokens(self) -> int:
        """Of this rank."""
        return self.micro_batch * self.seq_len // self.cp

    def keys_seen(self, window: int | None) -> float:
        """The mean number of keys that a query sees."""
        lengths = self.documents or (self.seq_len,)
        seen = sum(length * mean_keys(length, window) for length in lengths)
        return seen / sum(lengths)


def mean_keys(length: int, window: int | None) -> float:
    """The mean number of keys that a causal query sees in a sequence of `length` tokens."""
    width = min(window or length, length)
    growing = width * (width + 1) / 2
    return (growing + (length - width) * width) / length


# ---- what a cost is made of --------------------------------------------------------------------------------


@dataclass(frozen=True)
class MatrixProduct:
    """[rows, inner] by [inner, columns].

    rows: of all `count` products together; each has a weight of its own. fp8: the operands have 8 bits.
    scales: of each feature of an operand that is kept in 8 bits along the tokens. kept_weight_bytes: of all
    weights and their transposes in 8 bits, kept from the first forward of a step to its end.
    grads_in_forward: the forward computes both gradients too. shared_operands: elements of its input and its
    output's gradient that a split backward does not keep for it: another product has the same tensor, or it
    reads fewer rows, each several times. hides: the group whose exchange is under way at
    the same time. late_share: the share of the weight gradients that runs beside the exchanges of that group
    that nothing else runs beside (Exchange.beside), and not beside its others.
    """
    rows: int
    inner: int
    columns: int
    count: int = 1
    fp8: bool = False
    scales: int = 0
    kept_weight_bytes: int = 0
    grads_in_forward: bool = False
    shared_operands: int = 0
    hides: str | None = None
    late_share: float = 0.0

    @property
    def flops(self) -> int:
        """Of the forward's product alone."""
        return 2 * self.rows * self.inner * self.columns

    def times(self, n: int) -> "MatrixProduct":
        """n such products."""
        return replace(
            self,
            rows=n * self.rows,
            count=n * self.count,
            kept_weight_bytes=n * self.kept_weight_bytes,
            shared_operands=n * self.shared_operands,
        )

    @property
    def elements(self) -> int:
        """Elements of operands and result."""
        weights = self.count * self.inner * self.columns
        return self.rows * self.inner + weights + self.rows * self.columns


@dataclass(frozen=True)
class AttentionProducts:
    """FLOPs of the forward's two products with queries, keys and values. part: computed again with that part.
    hides: see MatrixProduct."""
    flops: float
    part: Part = "core"
    hides: str | None = None


@dataclass(frozen=True)
class MemoryTraffic:
    """Bytes that the forward reads and writes outside of matrix products. has_backward: the backward does
    too, twice as many."""
    nbytes: float
    part: Part = "rest"
    has_backward: bool = True


@dataclass(frozen=True)
class SavedTensor:
    """Bytes that the forward keeps for the backward. part: not kept where that part is recomputed."""
    nbytes: int
    part: Part = "rest"


@dataclass(frozen=True)
class Exchange:
    """`calls` exchanges of `nbytes` bytes each, as the ledger counts them (parallel/wire/comm.py: the larger
    side).

    group: of the mesh; in a group of one rank nothing is exchanged. part: see Phase. beside: which of the
    products that hide the group's exchanges run beside this one.
    """
    group: str
    verb: str
    nbytes: int
    calls: int = 1
    phase: Phase = "forward"
    part: Part = "rest"
    beside: Beside = "products"


# ---- a cost ------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Cost:
    """launches: blocks and output heads, each a sequence of kernels that the host starts. host_reads: times
    that the host waits for a result of the device. recomputed: what the backward computes again; its
    exchanges are among `exchanges`, in the backward."""
    products: tuple[MatrixProduct, ...] = ()
    attention: tuple[AttentionProducts, ...] = ()
    traffic: tuple[MemoryTraffic, ...] = ()
    saved: tuple[SavedTensor, ...] = ()
    exchanges: tuple[Exchange, ...] = ()
    launches: int = 0
    host_reads: int = 0
    recomputed: "Cost | None" = field(default=None, repr=False)

    def __add__(self, other: "Cost") -> "Cost":
        return Cost(
            products=self.products + other.products,
            attention=self.attention + other.attention,
            traffic=self.traffic + other.traffic,
            saved=self.saved + other.saved,
            exchanges=self.exchanges + other.exchanges,
            launches=self.launches + other.launches,
            host_reads=self.host_reads + other.host_reads,
            recomputed=add_optional(self.recomputed, other.recomputed),
        )

    def times(self, n: int) -> "Cost":
        """The cost of n such modules."""
        return Cost(
            products=tuple(one.times(n) for one in self.products),
            attention=tuple(replace(one, flops=n * one.flops) for one in self.attention),
            traffic=tuple(replace(one, nbytes=n * one.nbytes) for one in self.traffic),
            saved=tuple(replace(one, nbytes=n * one.nbytes) for one in self.saved),
            exchanges=tuple(replace(one, calls=n * one.calls) for one in self.exchanges),
            launches=n * self.launches,
            host_reads=n * self.host_reads,
            recomputed=None if self.recomputed is None else self.recomputed.times(n),
        )

    # ---- sums

    @property
    def flops(self) -> float:
        """Of the forward."""
        return sum(one.flops for one in self.products) + self.attention_flops

    @property
    def attention_flops(self) -> float:
        return sum(one.flops for one in self.attention)

    def saved_bytes(self, *parts: Part) -> int:
        """Of these parts; of all without one."""
        counted = parts or (*RECOMPUTABLE_PARTS, "rest")
        return sum(tensor.nbytes for tensor in self.saved if tensor.part in counted)

    # ---- exchanges of weights

    def join_step_exchanges(self) -> "Cost":
        """The cost where the exchanges of weights, once a step, are one for each group and verb."""
        others = tuple(one for one in self.exchanges if one.phase != "step")
        joined: dict[tuple[str, str], int] = {}
        for one in self.exchanges:
            if one.phase == "step":
                key = one.group, one.verb
                joined[key] = joined.get(key, 0) + one.calls * one.nbytes
        of_step = tuple(Exchange(*key, nbytes, phase="step") for key, nbytes in joined.items())
        return replace(self, exchanges=others + of_step)

    # ---- recomputation

    def as_inner(self) -> "Cost":
        """The cost of a module whose output is kept for the backward by what follows it in its block."""
        exchanges: list[Exchange] = []
        for one in self.exchanges:
            exchanges.append(replace(one, phase="forward") if one.phase == "output" else one)
        return replace(self, exchanges=tuple(exchanges))

    def beside(self, group: str, late_share: float = 0.0) -> "Cost":
        """The cost of products that run while the group's exchange is under way. late_share: see
        MatrixProduct."""
        products = [replace(one, hides=group, late_share=late_share) for one in self.products]
        return replace(self, products=tuple(products))

    def recompute_all(self, kept: SavedTensor) -> "Cost":
        """Full recompute: only `kept` is kept, and the backward runs the forward again."""
        exchanges: list[Exchange] = []
        for one in self.exchanges:
            if one.phase != "regather":
                exchanges.append(one)
            if one.phase == "forward":
                exchanges.append(replace(one, phase="backward"))
        again = replace(self, exchanges=())
        return replace(self, saved=(kept,), exchanges=tuple(exchanges), recomputed=again)

    def recompute_parts(self, parts: frozenset[Part]) -> "Cost":
        """Selective recompute: what belongs to these parts is not kept; the backward computes it again."""
        exchanges: list[Exchange] = []
        for one in self.exchanges:
            if one.phase != "regather":
                exchanges.append(one)
            elif one.part in parts:
                exchanges.append(replace(one, phase="backward"))
        again = Cost(
            attention=tuple(one for one in self.attention if one.part in parts),
            traffic=tuple(one for one in self.traffic if one.part in parts),
            saved=tuple(one for one in self.saved if one.part in parts),
        )
        saved = tuple(one for one in self.saved if one.part not in parts)
        return replace(self, saved=saved, exchanges=tuple(exchanges), recomputed=again if parts else None)


def add_optional(first: Cost | None, second: Cost | None) -> Cost | None:
    if first is None or second is None:
        return first or second
    return first + second


def total(costs: Iterable[Cost]) -> Cost:
    """The sum."""
    return reduce(add, costs, Cost())
