"""Layers that tensor parallelism splits (arXiv 1909.08053): column- and row-split linears over mesh.tp.

A column layer may hold several projections (q, k, v; gate, up) as one GEMM: each is split on its own, so the stored keys
stay the unfused canonical names. With sequence parallelism (arXiv 2205.05198) the activations between a row layer and the
next column layer are cut along the sequence over the same group: what they pass through (norms, dropout, residual adds)
is neither repeated nor kept twice, and the bytes on the wire stay those of tensor parallelism alone.
"""
from functools import partial

import torch
from torch import Tensor, nn

from kernels.embedding import embedding
from kernels.fp8_linear import Scaling, scaled_linear
from kernels.grad import give_sum, wide
from kernels.linear import linear, linears
from parallel import comm
from parallel.boxes import Box
from parallel.collectives import Region, leave
from parallel.comm import Group
from parallel.mesh import Mesh
from parallel.spec import Spec, parameter


def rows(key: str, shape: tuple[int, ...], group: Group) -> Box:
    """This rank's share of dim 0."""
    share = shape[0] // group.size
    return Box(key, shape, (group.index * share, *(0,) * (len(shape) - 1)), (share, *shape[1:]))


def columns(key: str, shape: tuple[int, int], group: Group) -> Box:
    """This rank's share of dim 1."""
    share = shape[1] // group.size
    return Box(key, shape, (0, group.index * share), (shape[0], share))


def replicated(key: str, shape: tuple[int, ...], init: str, sequence: bool) -> nn.Parameter:
    """A vector that every tp rank holds whole; on a sequence shard its gradient is partial."""
    return parameter(Spec((Box.whole(key, shape),), init, decay=False, partial=("tp",) if sequence else ()))


def scaling(fp8: tuple[str, int] | None, mesh: Mesh, outs: bool) -> Scaling | None:
    """fp8: recipe and side of a block (model/precision.py), or None. outs: tp cuts the weight's outputs, else its inputs. The
    largest elements of what a scale spans are exchanged over tp and over cp, so that a layout changes no scale of a microbatch."""
    if fp8 is None:
        return None
    tp, cp = (partial(comm.largest_, group=group) if group.size > 1 else None for group in (mesh.tp, mesh.cp))
    return Scaling(*fp8, outs=tp if outs else None, ins=None if outs else tp, tokens=cp)


class ColumnLinear(nn.Module):
    """[b, s, n] (sp: [b, s/tp, n]) -> [b, s, sum(outs)/tp]: output features split. outs: {key: features}."""

    def __init__(self, mesh: Mesh, outs: dict[str, int], n: int, std: float, bias: bool, sp: bool, fp8: tuple[str, int] | None = None) -> None:
        super().__init__()
        self.region, self.scaling = Region(mesh.tp, sp) if mesh.tp.size > 1 else None, scaling(fp8, mesh, True)
        self.weight = parameter(Spec(tuple(rows(f"{k}.weight", (m, n), mesh.tp) for k, m in outs.items()), "normal", std))
        self.bias = parameter(Spec(tuple(rows(f"{k}.bias", (m,), mesh.tp) for k, m in outs.items()), "zeros",
                                   decay=False)) if bias else None

    def forward(self, x: Tensor) -> Tensor:
        if self.scaling is not None:
            return scaled_linear(x, self.weight, self.bias, self.region, self.scaling)
        return linear(x, self.weight, self.bias, self.region)


class SharedHeads(nn.Module):
    """q|k|v where there are fewer key and value heads than ranks: [b, s, n] (sp: [b, s/tp, n]) -> [b, s, heads dim / tp + 2 dim].
    Queries are split; every rank holds the keys' and values' weights whole, computes the one head that its queries meet, and has
    a part of their gradients."""

    def __init__(self, mesh: Mesh, key: str, heads: int, kv: int, dim: int, n: int, std: float, bias: bool, sp: bool) -> None:
        super().__init__()
        self.q = ColumnLinear(mesh, {f"{key}.q": heads * dim}, n, std, bias, sp)
        head = mesh.tp.index * kv // mesh.tp.size
        self.rows = [slice(0, heads * dim // mesh.tp.size), *[slice(head * dim, (head + 1) * dim)] * 2]
        self.k, self.v = (parameter(Spec((Box.whole(f"{key}.{x}.weight", (kv * dim, n)),), "normal", std, partial=("tp",))) for x in "kv")
        self.k_bias, self.v_bias = (replicated(f"{key}.{x}.bias", (kv * dim,), "zeros", True) if bias else None for x in "kv")

    def forward(self, x: Tensor) -> Tensor:
        return linears(x, [self.q.weight, self.k, self.v], [self.q.bias, self.k_bias, self.v_bias], self.rows, self.q.region)


class RowLinear(nn.Module):
    """[b, s, n/tp] -> [b, s, m] (sp: [b, s/tp, m]): input features split, the partial products summed over tp."""

    def __init__(self, mesh: Mesh, key: str, n: int, m: int, std: float, bias: bool, sp: bool, fp8: tuple[str, int] | None = None) -> None:
        super().__init__()
        self.tp, self.sp, self.scaling = mesh.tp, sp, scaling(fp8, mesh, False)
        self.weight = parameter(Spec((columns(f"{key}.weight", (m, n), mesh.tp),), "normal", std))
        self.bias = replicated(f"{key}.bias", (m,), "zeros", sp) if bias else None

    def forward(self, x: Tensor) -> Tensor:
        bias = self.bias if self.tp.size == 1 else None
        y = linear(x, self.weight, bias) if self.scaling is None else scaled_linear(x, self.weight, bias, None, self.scaling)
        if self.tp.size == 1:
            return y
        y = leave(y, self.tp, self.sp)
        return y if self.bias is None else _AddBias.apply(y, self.bias)  # once, after the sum


def split_norm(x: Tensor, weight: Tensor, eps: float, group: Group) -> Tensor:
    """RMSNorm over features that are split over the group. x [..., n/tp], weight [n/tp] -> [..., n/tp]; a number a row is summed,
    forward and backward."""
    return _SplitNorm.apply(x, weight, eps, group)


class _SplitNorm(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, weight, eps, group):
        f = x.to(wide(x.dtype))
        n = x.shape[-1] * group.size
        scale = torch.rsqrt(comm.sum_(f.square().sum(-1, keepdim=True), group) / n + eps)
        ctx.save_for_backward(x, scale)
        ctx.weight, ctx.group, ctx.n = weight, group, n
        return (f * scale * weight.to(f.dtype)).to(x.dtype)

    @staticmethod
    def backward(ctx, dy):
        x, scale = ctx.saved_tensors
        g, hat = dy.to(scale.dtype), x.to(scale.dtype) * scale
        gw = g * ctx.weight.to(scale.dtype)
        slope = comm.sum_((gw * hat).sum(-1, keepdim=True), ctx.group) / ctx.n
        dw = give_sum(ctx.weight, (g * hat).flatten(0, -2).sum(0))
        return ((gw - hat * slope) * scale).to(x.dtype), dw, None, None


class _AddBias(torch.autograd.Function):
    @staticmethod
    def forward(ctx, y, bias):
        ctx.bias = bias
        return y + bias

    @staticmethod
    def backward(ctx, dy):
        return dy, give_sum(ctx.bias, dy.reshape(-1, dy.shape[-1]).sum(0, dtype=wide(dy.dtype)))


def vocab_embedding(ids: Tensor, weight: Tensor, group: Group, sequence: bool) -> Tensor:
    """ids [b, s] -> [b, s, d] (sequence: [b, s/tp, d]) from a table whose rows are split over the group."""
    if group.size == 1:
        return embedding(ids, weight)
    here = ids - group.index * weight.shape[0]
    mine = (here >= 0) & (here < weight.shape[0])
    x = embedding(here.clamp(0, weight.shape[0] - 1), weight)
    return leave(x * mine[..., None], group, sequence)


def merge_vocab(group: Group):
    """For linear_cross_entropy: combine the partial statistics of a vocabulary split over the group, in one exchange;
    None where it is whole."""
    def merge(lse: Tensor, picked: Tensor) -> tuple[Tensor, Tensor]:
        parts = comm.gather(torch.stack((lse, picked))[None], group)  # [tp, 2, rows]
        return parts[:, 0].logsumexp(0), parts[:, 1].sum(0)
    return merge if group.size > 1 else None
