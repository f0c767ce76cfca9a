"""ParameterSpec: what a parameter is and what it holds of which global tensors.

Initial values, ZeRO, clipping, optimizers, checkpoints and export all read it. Nothing else describes
parameters.
"""
import contextlib
import hashlib
import math
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from math import ceil, prod

import torch
from torch import Tensor, nn

from kernels.fp8_weight import QuantizedWeight
from kernels.grad import DeferredWeightGrads, LateWeightGrads
from parallel.sharding.boxes import Box

# Elements of a tensor that are drawn together. The initial weights depend on it.
INIT_BLOCK = 1 << 20
DRAWN_AHEAD = 32  # blocks that several threads draw before the first is stored: 128 MiB of host memory


@dataclass(frozen=True)
class Role:
    """What holds for all parameters of a role."""
    init: str  # normal, a key of DRAWS, ones or zeros
    has_decay: bool  # weight decay applies


ROLES = {
    "embedding": Role("normal", has_decay=True),  # the table of tokens; tied, the output head's as well
    "positions": Role("normal", has_decay=True),  # learned positions
    "hidden": Role("normal", has_decay=True),  # a matrix from hidden features to hidden features
    "narrowing": Role("normal", has_decay=True),  # to a few features, whose number stays as models widen
    "widening": Role("normal", has_decay=True),  # from such a few to hidden features
    "head": Role("normal", has_decay=True),  # from the hidden state to the vocabulary
    "router": Role("normal", has_decay=True),  # from the hidden state to the experts
    "gate": Role("normal", has_decay=True),  # from the hidden state to a few numbers
    "norm": Role("ones", has_decay=False),
    "bias": Role("zeros", has_decay=False),
    # of layers with a state
    "convolution": Role("normal", has_decay=False),  # a few weights for each channel
    "rate": Role("rate", has_decay=False),  # the logarithm of how fast a head forgets
    "skip": Role("ones", has_decay=False),  # what of its input a head adds to its output
    "step": Role("step", has_decay=False),  # a bias below the softplus whose result is the size of a step
    # of the activation xielu
    "alpha_p": Role("alpha_p", has_decay=False),  # how it bends above 0, below a softplus
    "alpha_n": Role("alpha_n", has_decay=False),  # and below 0
}


@dataclass(frozen=True)
class ParameterSpec:
    """What a parameter is.

    boxes: what the local tensor holds, stacked along dim 0. Usually one box; a merged projection of q, k and
    v has three.
    partial_over: names of mesh groups over which the gradient of each rank is only a part of the sum, beyond
    the data-parallel groups, over which it always is.
    is_expert: its ranks are those of the experts' own factorization (parallel/topology/dims.py: EXPERT_AXES),
    with data-parallel groups of their own.
    """
    boxes: tuple[Box, ...]
    role: str  # a key of ROLES
    std: float = 0.0  # standard deviation of normal initial values
    lr_factor: float = 1.0  # of the learning rate
    partial_over: tuple[str, ...] = ()
    is_expert: bool = False

    @property
    def shape(self) -> tuple[int, ...]:
        """Of the local tensor."""
        rows = sum(box.size[0] for box in self.boxes)
        return (rows, *self.boxes[0].size[1:])

    @property
    def numel(self) -> int:
        """Elements of the local tensor."""
        return prod(self.shape)

    @property
    def has_decay(self) -> bool:
        return ROLES[self.role].has_decay

    @property
    def is_hidden_matrix(self) -> bool:
        return self.role in ("hidden", "narrowing", "widening")

    @property
    def is_replicated_over_tp(self) -> bool:
        """Whether every tensor-parallel rank holds all of it. At tp 1 that is true of every parameter."""
        return all(box.size == box.shape for box in self.boxes)

    def with_mup(self, width_ratio: float, power: float) -> "ParameterSpec":
        """The spec in a model `width_ratio` times as wide as the one whose rates were tuned.

        muP (arXiv 2203.03466, table 8): tables and vectors stay, and so does a widening matrix, whose inputs
        stay as few. A hidden matrix starts width_ratio^-1/2 times as large and learns width_ratio^-power
        times as fast. A router, a gate or a narrowing matrix, which maps the hidden state to a fixed number
        of outputs, starts and learns 1 / width_ratio times (table 3: the same as a factor behind it).
        """
        if self.role == "hidden":
            std = self.std / width_ratio**0.5
            return replace(self, std=std, lr_factor=self.lr_factor / width_ratio**power)
        if self.role in ("router", "gate", "narrowing"):
            return replace(self, std=self.std / width_ratio, lr_factor=self.lr_factor / width_ratio)
        return self

    def split(self, local: Tensor) -> list[tuple[Box, Tensor]]:
        """[(box, its rows of the local tensor)]; the rows are views."""
        rows = [box.size[0] for box in self.boxes]
        return list(zip(self.boxes, local.split(rows)))


class ShardedParameter(nn.Parameter):
    """A parameter with its spec. All attributes that are set on a parameter are declared here."""

    spec: ParameterSpec  # set by `parameter`; build.py scales it for muP

    # [spec.shape], fp32 or fp64: a view of the bucket's gradients, into which kernels/grad.py writes.
    # None where the bucket holds no full gradients at the moment (gradients.py).
    main_grad: Tensor | None = None

    # Whether main_grad holds gradients of this step: the next one is added then, and else overwrites it.
    # Set by write_grad (kernels/grad.py), cleared by BucketGrads (gradients.py).
    grad_is_written: bool = False

    # Takes the weight gradients that a pipeline schedule computes later (parallel/pipeline/executor.py).
    # Set by build.py; None: each is computed at once.
    weight_grad_store: DeferredWeightGrads | None = None

    # Takes those that a layer computes beside an exchange of its backward. Set by the layer (model/moe.py).
    late_grads: LateWeightGrads | None = None

    # What is kept of it in 8 bits. Made by its bucket, which drops that when the values change (weights.py).
    quantized: QuantizedWeight


def parameter(spec: ParameterSpec) -> ShardedParameter:
    """A parameter without storage. Its bucket gives it a view [spec.shape] of a flat tensor (bucket.py)."""
    made = ShardedParameter(torch.empty(0))
    made.spec = spec
    return made


def sharded_parameters(module: nn.Module) -> Iterator[ShardedParameter]:
    """The parameters of a module, each once, in the order of nn.Module.parameters.

    Raises TypeError for one that was not made by `parameter`.
    """
    for found in module.parameters():
        if not isinstance(found, ShardedParameter):
            raise TypeError(
                f"a parameter of {type(module).__name__} was not made by parallel.sharding.spec.parameter"
            )
        yield found


# ---- initial values ----------------------------------------------------------------------------------------


Draw = Callable[[tuple[int, ...], torch.Generator], Tensor]  # (shape, generator) -> numbers


def draw_rate(shape: tuple[int, ...], generator: torch.Generator) -> Tensor:
    """The logarithm of uniform numbers from 1 to 16, as Mamba-2 begins (arXiv 2405.21060)."""
    return torch.empty(shape).uniform_(1, 16, generator=generator).log_()


def draw_step(shape: tuple[int, ...], generator: torch.Generator) -> Tensor:
    """Numbers whose softplus is log-uniform from 0.001 to 0.1, as Mamba begins (arXiv 2312.00752)."""
    step = torch.empty(shape).uniform_(math.log(1e-3), math.log(1e-1), generator=generator).exp_()
    return step + torch.log(-torch.expm1(-step))


def below_softplus(value: float) -> Draw:
    """Numbers whose softplus is this, as those of xielu begin (arXiv 2411.13010)."""
    return lambda shape, generator: torch.full(shape, math.log(math.expm1(value)))


DRAWS: dict[str, Draw] = {
    "rate": draw_rate,
    "step": draw_step,
    "alpha_p": below_softplus(0.8),
    "alpha_n": below_softplus(0.3),
}


@torch.no_grad()
def initialize(spec: ParameterSpec, local: Tensor, seed: int, needed: range | None = None) -> None:
    """Fills `local` [spec.shape] with initial values.

    They are a function of the seed, the key and the index in the global tensor alone, so every layout starts
    from the same weights. needed: of its elements, those whose values count (None: all); rows that have none
    of them are left as they are.
    """
    init = ROLES[spec.role].init
    if needed is None:
        needed = range(spec.numel)
    first = 0  # element of the box
    for box, part in spec.split(local):
        row_size = max(1, prod(box.size[1:]))
        first_row = max(0, (needed.start - first) // row_size)
        end_row = min(box.size[0], -((first - needed.stop) // row_size))  # rounded up
        first += part.numel()
        if end_row <= first_row:
            continue
        rows = part[first_row:end_row]
        if init == "normal":
            draw_normal(box.rows(first_row, end_row), rows, seed, spec.std)
        elif init in DRAWS:
            draw_numbers(box.rows(first_row, end_row), rows, seed, DRAWS[init])
        else:
            rows.fill_({"ones": 1.0, "zeros": 0.0}[init])


def draw_normal(box: Box, out: Tensor, seed: int, std: float) -> None:
    """Fills `out` [box.size] with normal numbers."""
    def normal(shape: tuple[int, ...], generator: torch.Generator) -> Tensor:
        return torch.randn(shape, generator=generator).mul_(std)

    draw_numbers(box, out, seed, normal)


def draw_numbers(box: Box, out: Tensor, seed: int, numbers: Draw) -> None:
    """Fills `out` [box.size] with random numbers.

    A global tensor is drawn in blocks of full rows, each from a generator of its own. A rank draws only the
    blocks that its box touches, as many at a time as it has threads.
    """
    row_size = prod(box.shape[1:])
    block_rows = max(1, INIT_BLOCK // row_size)
    first_block = box.start[0] // block_rows
    end_block = ceil((box.start[0] + box.size[0]) / block_rows)

    def draw(block: int) -> tuple[Box, Tensor] | None:
        """(what of the box is in this block, its values); None: nothing."""
        end_row = min((block + 1) * block_rows, box.shape[0])
        drawn = Box.whole(box.key, box.shape).rows(block * block_rows, end_row)
        mine = drawn.intersection(box)
        if mine is None:  # the box is empty
            return None
        digest = hashlib.sha256(f"{seed}/{box.key}/{block}".encode()).digest()
        generator = torch.Generator().manual_seed(int.from_bytes(digest[:8], "little") >> 1)
        values = numbers(drawn.size, generator)
        return mine, values[mine.slices_in(drawn)].to(out.dtype)

    threads = min(torch.get_num_threads(), end_block - first_block)
    with ThreadPoolExecutor(threads) if threads > 1 else contextlib.nullcontext() as pool:
        for first in range(first_block, end_block, DRAWN_AHEAD):
            blocks = range(first, min(first + DRAWN_AHEAD, end_block))
            for found in map(draw, blocks) if pool is None else pool.map(draw, blocks):
                if found is not None:
                    mine, values = found
                    out[mine.slices_in(box)] = values

