"""ParameterSpec: the role of a parameter, and its part of the global tensors.

Initialization, ZeRO, clipping, optimizers, checkpoints and export all read it. Nothing else describes
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

# Elements of a tensor that are drawn together. The initial weights depend on this number.
INIT_BLOCK = 1 << 20
DRAWN_AHEAD = 32  # blocks that several threads draw before the first is stored: 128 MiB of host memory


@dataclass(frozen=True)
class Role:
    """Properties of all parameters with the same role."""
    init: str  # normal, a key of DRAWS, ones or zeros
    has_decay: bool  # weight decay applies


ROLES = {
    "embedding": Role("normal", has_decay=True),  # the token embedding; if tied, also the output head
    "positions": Role("normal", has_decay=True),  # learned positions
    "hidden": Role("normal", has_decay=True),  # a matrix from hidden features to hidden features
    "narrowing": Role("normal", has_decay=True),  # to a few features, a number independent of the width
    "widening": Role("normal", has_decay=True),  # from a few such features to hidden ones
    "head": Role("normal", has_decay=True),  # from the hidden state to the vocabulary
    "router": Role("normal", has_decay=True),  # from the hidden state to the experts
    "gate": Role("normal", has_decay=True),  # from the hidden state to a few features
    "norm": Role("ones", has_decay=False),
    "bias": Role("zeros", has_decay=False),
    # stateful layers
    "convolution": Role("normal", has_decay=False),  # a few weights for each channel
    "rate": Role("rate", has_decay=False),  # the logarithm of a head's decay rate
    "skip": Role("ones", has_decay=False),  # scales the input that a head adds to its output
    "step": Role("step", has_decay=False),  # a bias before the softplus that yields the step size
    # low-rank adapters (model/lora.py)
    "lora_a": Role("lora_a", has_decay=True),
    "lora_b": Role("zeros", has_decay=True),
    # the xielu activation
    "alpha_p": Role("alpha_p", has_decay=False),  # its curvature above 0, before a softplus
    "alpha_n": Role("alpha_n", has_decay=False),  # the same below 0
}


ADAPTER_ROLES = ("lora_a", "lora_b")


@dataclass(frozen=True)
class ParameterSpec:
    """Description of a parameter.

    boxes are the parts of global tensors that the local tensor holds, stacked along dim 0. Usually there is
    one box; a merged projection of q, k and v has three.
    partial_over names mesh groups over which each rank's gradient is only a part of the sum, in addition to
    the data-parallel groups, over which it always is.
    is_expert: its ranks are those of the expert factorization (parallel/topology/dims.py: EXPERT_AXES), with
    separate data-parallel groups.
    """
    boxes: tuple[Box, ...]
    role: str  # a key of ROLES
    std: float = 0.0  # standard deviation of normal initial values
    lr_factor: float = 1.0  # of muP, multiplies the learning rate
    group_lr_factor: float = 1.0  # of optim.groups, too; 0: the parameter is frozen
    group_weight_decay: float | None = None  # of optim.groups, instead of optim.weight_decay
    partial_over: tuple[str, ...] = ()
    is_expert: bool = False

    @property
    def shape(self) -> tuple[int, ...]:
        """Return the shape of the local tensor."""
        rows = sum(box.size[0] for box in self.boxes)
        return (rows, *self.boxes[0].size[1:])

    @property
    def numel(self) -> int:
        """Return the number of elements of the local tensor."""
        return prod(self.shape)

    @property
    def has_decay(self) -> bool:
        return ROLES[self.role].has_decay

    @property
    def is_frozen(self) -> bool:
        """Whether the optimizer leaves it as it is: it has no gradient, no moments and no master copy."""
        return self.group_lr_factor == 0

    @property
    def is_hidden_matrix(self) -> bool:
        return self.role in ("hidden", "narrowing", "widening")

    @property
    def is_replicated_over_tp(self) -> bool:
        """Whether every tp rank holds all of it. At tp 1 that is true of every parameter."""
        return all(box.size == box.shape for box in self.boxes)

    @property
    def is_at_both_ends(self) -> bool:
        """Whether the first and the last stage of the pipeline hold it: a tied table."""
        return "embedding_ends" in self.partial_over

    def is_first_end(self, stage: int) -> bool:
        """Whether the pipeline rank `stage` counts and saves it. A tied table belongs to the first one."""
        return stage == 0 or not self.is_at_both_ends

    def with_mup(self, width_ratio: float, power: float) -> "ParameterSpec":
        """Return the spec for a model `width_ratio` times as wide as the one whose rates were tuned.

        muP (arXiv 2203.03466, table 8): tables and vectors are unchanged, and so is a widening matrix, whose
        fan-in stays constant. A hidden matrix has width_ratio^-1/2 times the initial std and
        width_ratio^-power times the learning rate. A router, a gate or a narrowing matrix, which maps the
        hidden state to a fixed number of outputs, has 1 / width_ratio times both (table 3: equivalent to a
        factor after it).
        """
        if self.role == "hidden":
            std = self.std / width_ratio**0.5
            return replace(self, std=std, lr_factor=self.lr_factor / width_ratio**power)
        if self.role in ("router", "gate", "narrowing"):
            return replace(self, std=self.std / width_ratio, lr_factor=self.lr_factor / width_ratio)
        return self

    def split(self, local: Tensor) -> list[tuple[Box, Tensor]]:
        """Return [(box, its rows of the local tensor)], with the rows as views."""
        rows = [box.size[0] for box in self.boxes]
        return list(zip(self.boxes, local.split(rows)))


class ShardedParameter(nn.Parameter):
    """A parameter with its spec. Declares all attributes that are set on a parameter."""

    spec: ParameterSpec  # set by `parameter`; build.py scales it for muP

    # [spec.shape], fp32 or fp64: a view of the bucket's gradients, into which kernels/grad.py writes.
    # None while the bucket holds no full gradients (gradients.py).
    main_grad: Tensor | None = None

    # Whether main_grad holds gradients of this step: if so, the next one is added, else it overwrites them.
    # Set by write_grad (kernels/grad.py), cleared by BucketGrads (gradients.py).
    grad_is_written: bool = False

    # Collects weight gradients that a pipeline schedule computes later (parallel/pipeline/executor.py).
    # Set by build.py. With None, each is computed immediately.
    weight_grad_store: DeferredWeightGrads | None = None

    # Collects those that a layer overlaps with an exchange of its backward. Set by the layer (model/moe.py).
    late_grads: LateWeightGrads | None = None

    # Its cached 8-bit copies. Created by its bucket, which drops them when the values change (weights.py).
    quantized: QuantizedWeight


def parameter(spec: ParameterSpec) -> ShardedParameter:
    """Create a parameter without storage. Its bucket sets it to a view [spec.shape] of a flat tensor."""
    made = ShardedParameter(torch.empty(0))
    made.spec = spec
    return made


def sharded_parameters(module: nn.Module) -> Iterator[ShardedParameter]:
    """Yield the parameters of a module, each once, in the order of nn.Module.parameters.

    Raises TypeError for a parameter that was not created by `parameter`.
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
    """Draw the logarithm of uniform numbers from 1 to 16, as in Mamba-2 (arXiv 2405.21060)."""
    return torch.empty(shape).uniform_(1, 16, generator=generator).log_()


def draw_step(shape: tuple[int, ...], generator: torch.Generator) -> Tensor:
    """Draw numbers whose softplus is log-uniform from 0.001 to 0.1, as in Mamba (arXiv 2312.00752)."""
    step = torch.empty(shape).uniform_(math.log(1e-3), math.log(1e-1), generator=generator).exp_()
    return step + torch.log(-torch.expm1(-step))


def draw_within_fan_in(shape: tuple[int, ...], generator: torch.Generator) -> Tensor:
    """Draw uniform numbers within 1 / sqrt(n), for rows of n: torch's kaiming_uniform_ with a = sqrt(5)."""
    bound = shape[-1]**-0.5
    return torch.empty(shape).uniform_(-bound, bound, generator=generator)


def below_softplus(value: float) -> Draw:
    """Return a Draw of constants whose softplus is `value`, as in xielu (arXiv 2411.13010)."""
    return lambda shape, generator: torch.full(shape, math.log(math.expm1(value)))


DRAWS: dict[str, Draw] = {
    "lora_a": draw_within_fan_in,
    "rate": draw_rate,
    "step": draw_step,
    "alpha_p": below_softplus(0.8),
    "alpha_n": below_softplus(0.3),
}


@torch.no_grad()
def initialize(spec: ParameterSpec, local: Tensor, seed: int, needed: range | None = None) -> None:
    """Fill `local` [spec.shape] with initial values.

    They depend only on the seed, the key and the index in the global tensor, so every layout starts from the
    same weights. needed is the range of elements whose values matter (all by default); rows without any of
    them are left unchanged.
    """
    init = ROLES[spec.role].init
    if needed is None:
        needed = range(spec.numel)
    first = 0  # first element of the box
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
    """Fill `out` [box.size] with normal numbers."""
    def normal(shape: tuple[int, ...], generator: torch.Generator) -> Tensor:
        return torch.randn(shape, generator=generator).mul_(std)

    draw_numbers(box, out, seed, normal)


def draw_numbers(box: Box, out: Tensor, seed: int, numbers: Draw) -> None:
    """Fill `out` [box.size] with random numbers.

    A global tensor is drawn in blocks of full rows, each with a separate generator. A rank draws only the
    blocks that its box overlaps, one per thread at a time.
    """
    row_size = prod(box.shape[1:])
    block_rows = max(1, INIT_BLOCK // row_size)
    first_block = box.start[0] // block_rows
    end_block = ceil((box.start[0] + box.size[0]) / block_rows)

    def draw(block: int) -> tuple[Box, Tensor] | None:
        """Return (the part of the box in this block, its values), or None if it is empty."""
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

