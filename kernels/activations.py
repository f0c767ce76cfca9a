"""MLP activations, by model.mlp.activation: SwiGLU and GELU (kernels/swiglu.py), and rarer ones in plain
torch.

    geglu            gelu(gate) up                        arXiv 2002.05202, with the tanh form of GELU
    clamped_swiglu   gate sigmoid(1.702 gate) (up + 1)    gpt-oss: gate at most 7, up within -7 .. 7
    limited swiglu   silu(gate) up                        Step 3.7: silu(gate) at most a limit, up within it
    gelu_erf         x Phi(x)                             arXiv 1606.08415, by erf
    relu2            relu(x)^2                            arXiv 2109.08668
    xielu            a x^2 + x / 2 above 0, else          arXiv 2411.13010; it learns a and b
                     b (exp(x) - 1 - x) + x / 2

Gated ones read [gate | up]. Arithmetic is in fp32 or better, and only the input is saved for the backward.
train.compile turns each into one kernel for the forward and one for the backward.
"""
from collections.abc import Callable
from functools import cache, partial
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from kernels.grad import accumulation_dtype
from kernels.jit import jit
from kernels.swiglu import (
    SavedInput,
    gelu,
    gelu_backward,
    gelu_forward,
    split_gate_up,
    swiglu,
    weighted_swiglu,
)

CLAMP = 7.0  # used by gpt-oss
SLOPE = 1.702  # of its sigmoid
XIELU_SLOPE = 0.5  # slope of xielu at 0, and the lower bound of its b
XIELU_EDGE = -1e-6  # from here up to 0, exp is evaluated at this number


class Definition(NamedTuple):
    """forward(x) and backward(dy, x), which returns the gradient of x; both in the dtype of x."""
    forward: Callable[[Tensor], Tensor]
    backward: Callable[[Tensor, Tensor], Tensor]


class Activation(NamedTuple):
    """function(x [..., f or 2f], compiled) -> [..., f].

    weighted(x [m, f or 2f], weight [m]) -> [m, f] multiplies each row by its weight, a router's probability.
    Without it, experts cannot use the activation.

    is_gated: x is [gate | up], twice as wide.

    learned lists the names and roles (parallel/sharding/spec.py) of further arguments of function, each [1]
    in fp32 or better.
    """
    function: Callable[..., Tensor]
    weighted: Callable[[Tensor, Tensor], Tensor] | None
    is_gated: bool
    learned: tuple[str, ...] = ()


# ---- definitions -------------------------------------------------------------------------------------------

def geglu_forward(gate_up: Tensor) -> Tensor:
    gate, up = split_gate_up(gate_up)
    return (F.gelu(gate, approximate="tanh") * up).to(gate_up.dtype)


def geglu_backward(dy: Tensor, gate_up: Tensor) -> Tensor:
    gate, up = split_gate_up(gate_up)
    dy = dy.to(gate.dtype)
    dgate = torch.ops.aten.gelu_backward(dy * up, gate, approximate="tanh")
    dup = F.gelu(gate, approximate="tanh").mul_(dy)
    return torch.cat((dgate, dup), -1).to(gate_up.dtype)


def clamped_swiglu_forward(gate_up: Tensor) -> Tensor:
    gate, up = split_gate_up(gate_up)
    gate = gate.clamp(max=CLAMP)
    up = up.clamp(-CLAMP, CLAMP)
    return (gate * torch.sigmoid(SLOPE * gate) * (up + 1)).to(gate_up.dtype)


def clamped_swiglu_backward(dy: Tensor, gate_up: Tensor) -> Tensor:
    gate, up = split_gate_up(gate_up)
    gate_moves = gate <= CLAMP  # at the bound itself the gradient is nonzero, like clamp's
    up_moves = up.abs() <= CLAMP
    gate = gate.clamp(max=CLAMP)
    up = up.clamp(-CLAMP, CLAMP)
    dy = dy.to(gate.dtype)

    sigmoid = torch.sigmoid(SLOPE * gate)
    slope = sigmoid + SLOPE * gate * sigmoid * (1 - sigmoid)  # of gate sigmoid(SLOPE gate)
    dgate = (dy * (up + 1) * slope).mul_(gate_moves)
    dup = (dy * gate * sigmoid).mul_(up_moves)
    return torch.cat((dgate, dup), -1).to(gate_up.dtype)


@cache  # compile each limit only once
def limited_swiglu(limit: float) -> Definition:
    """SwiGLU with clamped factors: the SiLU output from above, `up` on both sides."""
    def forward(gate_up: Tensor) -> Tensor:
        gate, up = split_gate_up(gate_up)
        return (F.silu(gate).clamp(max=limit) * up.clamp(-limit, limit)).to(gate_up.dtype)

    def backward(dy: Tensor, gate_up: Tensor) -> Tensor:
        gate, up = split_gate_up(gate_up)
        dy = dy.to(gate.dtype)
        activated = F.silu(gate)
        gate_moves = activated <= limit  # at the bound itself the gradient is nonzero, like clamp's
        up_moves = up.abs() <= limit
        dgate = torch.ops.aten.silu_backward(dy * up.clamp(-limit, limit), gate).mul_(gate_moves)
        dup = (dy * activated.clamp(max=limit)).mul_(up_moves)
        return torch.cat((dgate, dup), -1).to(gate_up.dtype)

    return Definition(forward, backward)


def relu2_forward(x: Tensor) -> Tensor:
    return x.to(accumulation_dtype(x.dtype)).relu().square().to(x.dtype)


def relu2_backward(dy: Tensor, x: Tensor) -> Tensor:
    values = x.to(accumulation_dtype(x.dtype))
    return (2 * dy.to(values.dtype) * values.relu()).to(x.dtype)


def xielu_forward(x: Tensor, above: Tensor, below: Tensor) -> Tensor:
    """above and below [1] are a and b."""
    values = x.to(accumulation_dtype(x.dtype))
    bent = torch.where(values > 0, above * values.square(), below * xielu_bend(values))
    return (bent + XIELU_SLOPE * values).to(x.dtype)


def xielu_bend(values: Tensor) -> Tensor:
    """Return the factor of b in xielu for values at or below 0."""
    return torch.expm1(values.clamp(max=XIELU_EDGE)) - values


def xielu_backward(dy: Tensor, x: Tensor, above: Tensor, below: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    values = x.to(accumulation_dtype(x.dtype))
    dy = dy.to(values.dtype)
    is_above = values > 0
    rise = torch.where(values < XIELU_EDGE, values.exp(), 0) - 1  # of xielu_bend
    dx = dy * (torch.where(is_above, 2 * above * values, below * rise) + XIELU_SLOPE)
    dabove = torch.where(is_above, dy * values.square(), 0).sum()
    dbelow = torch.where(is_above, 0, dy * xielu_bend(values)).sum()
    return dx.to(x.dtype), dabove.view(1), dbelow.view(1)


# ---- autograd ----------------------------------------------------------------------------------------------

def activate(x: Tensor, compiled: bool = False, *, definition: Definition) -> Tensor:
    return SavedInput.apply(x, jit(definition.forward, compiled), jit(definition.backward, compiled))


def activate_weighted(x: Tensor, weight: Tensor, *, definition: Definition) -> Tensor:
    """Never compiled, because the number of rows changes with each call."""
    return _Weighted.apply(x, weight, definition)


class _Weighted(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x: Tensor, weight: Tensor, definition: Definition) -> Tensor:
        ctx.save_for_backward(x, weight)
        ctx.definition = definition
        values = definition.forward(x.to(accumulation_dtype(x.dtype)))
        return (values * weight[:, None]).to(x.dtype)

    @staticmethod
    def backward(ctx, dy: Tensor) -> tuple[Tensor, Tensor, None]:
        x, weight = ctx.saved_tensors
        values = x.to(accumulation_dtype(x.dtype))
        dy = dy.to(values.dtype)
        dweight = torch.linalg.vecdot(dy, ctx.definition.forward(values))
        dx = ctx.definition.backward(dy * weight[:, None].to(dy.dtype), values)
        return dx.to(x.dtype), dweight.to(weight.dtype), None


def xielu(x: Tensor, alpha_p: Tensor, alpha_n: Tensor, compiled: bool = False) -> Tensor:
    """a and b are softplus(alpha_p) and softplus(alpha_n) + XIELU_SLOPE, which makes it monotonic."""
    return _XIELU.apply(x, F.softplus(alpha_p), F.softplus(alpha_n) + XIELU_SLOPE, compiled)


class _XIELU(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x: Tensor, above: Tensor, below: Tensor, compiled: bool) -> Tensor:
        ctx.save_for_backward(x, above, below)
        ctx.compiled = compiled
        return jit(xielu_forward, compiled)(x, above, below)

    @staticmethod
    def backward(ctx, dy: Tensor) -> tuple[Tensor, Tensor, Tensor, None]:
        return *jit(xielu_backward, ctx.compiled)(dy, *ctx.saved_tensors), None


def defined(definition: Definition, is_gated: bool) -> Activation:
    return Activation(
        partial(activate, definition=definition), partial(activate_weighted, definition=definition), is_gated
    )


ACTIVATIONS = {  # by model.mlp.activation
    "swiglu": Activation(swiglu, weighted_swiglu, is_gated=True),
    "geglu": defined(Definition(geglu_forward, geglu_backward), is_gated=True),
    "clamped_swiglu": defined(Definition(clamped_swiglu_forward, clamped_swiglu_backward), is_gated=True),
    "gelu": Activation(
        gelu,
        partial(activate_weighted, definition=Definition(gelu_forward, gelu_backward)),
        is_gated=False,
    ),
    "gelu_erf": defined(Definition(F.gelu, torch.ops.aten.gelu_backward), is_gated=False),
    "relu2": defined(Definition(relu2_forward, relu2_backward), is_gated=False),
    "xielu": Activation(xielu, None, is_gated=False, learned=("alpha_p", "alpha_n")),
}


def get_activation(name: str, limit: float | None) -> Activation:
    """Look up an activation; name and limit are model.mlp.activation and limit."""
    return ACTIVATIONS[name] if limit is None else defined(limited_swiglu(limit), is_gated=True)
