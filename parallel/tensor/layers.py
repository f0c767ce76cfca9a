"""Layers whose weights are divided over mesh.tp (arXiv 1909.08053).

A column layer may hold several projections (q, k, v; gate, up) as one matrix product. Each is divided on its
own, so the stored tensors keep their separate names. Under sequence parallelism (arXiv 2205.05198) the
activations between a row layer and the next column layer are divided along the sequence, over the same group:
what they pass through there (norms, dropout, residuals) is neither repeated nor stored twice, and as many
bytes are sent as without.
"""
from dataclasses import replace
from functools import partial

import torch
from torch import Tensor, nn

from kernels.cross_entropy import Merge
from kernels.embedding import embedding
from kernels.fp8_linear import RECIPES, Fp8Scaling, own_maxima, scaled_linear
from kernels.fp8_weight import WeightsTogether
from kernels.grad import accumulate_summed_grad, accumulation_dtype
from kernels.linear import linear, linear_of_several, linear_out_of_region
from parallel.sharding.boxes import Box
from parallel.sharding.spec import ParameterSpec, ShardedParameter, parameter
from parallel.tensor.regions import TensorParallelRegion, leave_region
from parallel.topology.mesh import Mesh
from parallel.wire import comm
from parallel.wire.comm import Group

Fp8Recipe = tuple[str, int]  # the recipe, and the side of a block (model/precision.py)


def row_shard(key: str, shape: tuple[int, ...], group: Group) -> Box:
    """This rank's part of a global tensor of this shape, divided along dim 0."""
    rows = shape[0] // group.size
    first_row = group.index * rows
    inner_start = (0,) * (len(shape) - 1)
    return Box(key, shape, start=(first_row, *inner_start), size=(rows, *shape[1:]))


def column_shard(key: str, shape: tuple[int, int], group: Group) -> Box:
    """This rank's part of a matrix of this global shape, divided along dim 1."""
    columns = shape[1] // group.size
    first_column = group.index * columns
    return Box(key, shape, start=(0, first_column), size=(shape[0], columns))


def partial_over_tp(is_partial: bool) -> tuple[str, ...]:
    """ParameterSpec.partial_over where the gradient on a tp rank is, or is not, only a part of the sum."""
    return ("tp",) if is_partial else ()


def replicated_vector(key: str, size: int, role: str, is_partial: bool) -> ShardedParameter:
    """A vector [size] that every tp rank holds in full. is_partial: each has a part of its gradient."""
    box = Box.whole(key, (size,))
    return parameter(ParameterSpec((box,), role, partial_over=partial_over_tp(is_partial)))


def fp8_scaling(recipe: Fp8Recipe | None, mesh: Mesh, divides_outputs: bool) -> Fp8Scaling | None:
    """How a layer scales its operands in 8 bits; None without a recipe.

    divides_outputs: tp divides the weight's outputs, else its inputs. The largest elements of what a scale
    spans are exchanged over tp and over cp, so that the scales of a microbatch are the same under every
    layout.
    """
    if recipe is None:
        return None
    over_tp = partial(comm.all_reduce_max_float, group=mesh.tp) if mesh.tp.size > 1 else None
    over_cp = partial(comm.all_reduce_max_float, group=mesh.cp) if mesh.cp.size > 1 else None
    all_parts = None
    if over_tp is not None and over_cp is not None:
        all_parts = partial(comm.all_reduce_max_float, group=mesh.tp_cp)
    if divides_outputs:
        return Fp8Scaling(*recipe, outs=over_tp, ins=None, tokens=over_cp, all_parts=all_parts)
    return Fp8Scaling(*recipe, outs=None, ins=over_tp, tokens=over_cp, all_parts=all_parts)


def exchange_weight_maxima_together(module: nn.Module, group: Group) -> None:
    """The layers within a module exchange the largest elements of all their weights over tp in one message.

    group: tp.
    """
    if group.size == 1:
        return
    together = WeightsTogether(partial(comm.all_reduce_max_float, group=group))
    for layer in module.modules():
        if not isinstance(layer, (ColumnLinear, RowLinear)):
            continue
        if layer.scaling is None or layer.scaling.recipe == "blockwise":
            continue
        kind = RECIPES[layer.scaling.recipe].weight_kind
        divides_outputs = isinstance(layer, ColumnLinear)
        together.add(layer.weight, partial(own_maxima, layer.weight, kind, divides_outputs))
        layer.scaling = replace(layer.scaling, together=together)


def tensor_parallel_region(group: Group, *, sp: bool, async_tp: bool) -> TensorParallelRegion | None:
    """The region of a layer whose weight is divided over tp; None in a group of one rank."""
    return TensorParallelRegion(group, sp, is_async=async_tp) if group.size > 1 else None


class ColumnLinear(nn.Module):
    """x [b, s, n] (sp: [b, s/tp, n]) -> [b, s, sum(outputs)/tp]: the output features are divided over tp.

    outputs: {key: features} of the projections that it holds, each divided on its own.
    Under sp it gathers its input over tp; it sums the gradient of its input (regions.py). async_tp: its
    product runs while the parts of the sequence travel (overlap.py).
    """

    def __init__(
        self,
        mesh: Mesh,
        outputs: dict[str, int],
        n: int,
        *,
        std: float,
        bias: bool,
        sp: bool,
        async_tp: bool,
        fp8: Fp8Recipe | None = None,
    ) -> None:
        super().__init__()
        self.region = tensor_parallel_region(mesh.tp, sp=sp, async_tp=async_tp)
        self.scaling = fp8_scaling(fp8, mesh, divides_outputs=True)

        weights = [row_shard(f"{key}.weight", (m, n), mesh.tp) for key, m in outputs.items()]
        self.weight = parameter(ParameterSpec(tuple(weights), "hidden", std))
        self.bias = None
        if bias:
            biases = [row_shard(f"{key}.bias", (m,), mesh.tp) for key, m in outputs.items()]
            self.bias = parameter(ParameterSpec(tuple(biases), "bias"))

    def forward(self, x: Tensor) -> Tensor:
        if self.scaling is not None:
            return scaled_linear(x, self.weight, self.bias, self.region, self.scaling)
        return linear(x, self.weight, self.bias, self.region)


class SharedHeadsLinear(nn.Module):
    """The merged projection q|k|v where there are fewer key and value heads than tp ranks.

    x [b, s, n] (sp: [b, s/tp, n]) -> [b, s, heads * head_dim / tp + head_dim + v_dim]. Queries are divided
    over tp. Every rank holds all weights of keys and values, computes the one head that its queries see, and
    has a part of their gradients.
    """

    def __init__(
        self,
        mesh: Mesh,
        key: str,
        n: int,
        *,
        heads: int,
        kv_heads: int,
        head_dim: int,
        v_dim: int,
        std: float,
        bias: bool,
        sp: bool,
    ) -> None:
        super().__init__()
        queries = {f"{key}.q": heads * head_dim}
        self.q = ColumnLinear(mesh, queries, n, std=std, bias=bias, sp=sp, async_tp=False)
        head = mesh.tp.index * kv_heads // mesh.tp.size  # that this rank's queries see
        all_queries = slice(0, heads * head_dim // mesh.tp.size)
        of_head = [slice(head * dim, (head + 1) * dim) for dim in (head_dim, v_dim)]
        self.rows = [all_queries, *of_head]

        k_features, v_features = kv_heads * head_dim, kv_heads * v_dim
        self.k = shared_weight(f"{key}.k.weight", (k_features, n), std)
        self.v = shared_weight(f"{key}.v.weight", (v_features, n), std)
        self.k_bias = None
        self.v_bias = None
        if bias:
            self.k_bias = replicated_vector(f"{key}.k.bias", k_features, "bias", is_partial=True)
            self.v_bias = replicated_vector(f"{key}.v.bias", v_features, "bias", is_partial=True)

    def forward(self, x: Tensor) -> Tensor:
        weights: list[Tensor] = [self.q.weight, self.k, self.v]
        biases: list[Tensor | None] = [self.q.bias, self.k_bias, self.v_bias]
        return linear_of_several(x, weights, biases, self.rows, self.q.region)


def shared_weight(key: str, shape: tuple[int, int], std: float) -> ShardedParameter:
    """A hidden matrix that every tp rank holds in full, and of whose gradient each has a part."""
    return parameter(ParameterSpec((Box.whole(key, shape),), "hidden", std, partial_over=("tp",)))


class RowLinear(nn.Module):
    """x [b, s, n/tp] -> [b, s, m] (sp: [b, s/tp, m]): the input features are divided over tp.

    The partial products are summed over tp: an all-reduce, or under sp a reduce-scatter. async_tp: see
    ColumnLinear.
    """

    def __init__(
        self,
        mesh: Mesh,
        key: str,
        n: int,
        m: int,
        *,
        std: float,
        bias: bool,
        sp: bool,
        async_tp: bool,
        fp8: Fp8Recipe | None = None,
    ) -> None:
        super().__init__()
        self.tp = mesh.tp
        self.sp = sp
        self.region = tensor_parallel_region(mesh.tp, sp=sp, async_tp=async_tp)
        self.scaling = fp8_scaling(fp8, mesh, divides_outputs=False)
        weight = column_shard(f"{key}.weight", (m, n), mesh.tp)
        self.weight = parameter(ParameterSpec((weight,), "hidden", std))
        self.bias = replicated_vector(f"{key}.bias", m, "bias", is_partial=sp) if bias else None

    def forward(self, x: Tensor) -> Tensor:
        if self.region is None:
            return self.multiply(x, self.bias)
        if self.region.is_async:
            y = linear_out_of_region(x, self.weight, self.region)
        else:
            y = leave_region(self.multiply(x, bias=None), self.tp, self.sp)
        return y if self.bias is None else _AddBias.apply(y, self.bias)  # once, after the sum

    def multiply(self, x: Tensor, bias: Tensor | None) -> Tensor:
        """x [b, s, n/tp] -> what this rank adds to the sum [b, s, m]."""
        if self.scaling is None:
            return linear(x, self.weight, bias)
        return scaled_linear(x, self.weight, bias, None, self.scaling)


class _AddBias(torch.autograd.Function):
    @staticmethod
    def forward(ctx, y: Tensor, bias: Tensor) -> Tensor:
        ctx.bias = bias
        return y + bias

    @staticmethod
    def backward(ctx, dy: Tensor) -> tuple[Tensor | None, ...]:
        dbias = dy.reshape(-1, dy.shape[-1]).sum(0, dtype=accumulation_dtype(dy.dtype))
        return dy, accumulate_summed_grad(ctx.bias, dbias)


# ---- norm, embedding and loss over divided features --------------------------------------------------------


def tensor_parallel_rms_norm(x: Tensor, weight: Tensor, eps: float, group: Group) -> Tensor:
    """RMSNorm over features that are divided over the group. x [..., n/tp], weight [n/tp] -> [..., n/tp].

    One number per row is summed over the group, in the forward and in the backward.
    """
    return _TensorParallelRMSNorm.apply(x, weight, eps, group)


class _TensorParallelRMSNorm(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x: Tensor, weight: Tensor, eps: float, group: Group) -> Tensor:
        values = x.to(accumulation_dtype(x.dtype))
        n = x.shape[-1] * group.size
        local_squares = values.square().sum(-1, keepdim=True)  # [..., 1]
        squares = comm.all_reduce_sum(local_squares, group)
        scale = torch.rsqrt(squares / n + eps)

        ctx.save_for_backward(x, scale)
        ctx.weight = weight
        ctx.group = group
        ctx.n = n
        y = values * scale * weight.to(values.dtype)
        return y.to(x.dtype)

    @staticmethod
    def backward(ctx, dy: Tensor) -> tuple[Tensor | None, ...]:
        x, scale = ctx.saved_tensors
        grad = dy.to(scale.dtype)
        normalized = x.to(scale.dtype) * scale
        scaled_grad = grad * ctx.weight.to(scale.dtype)

        # the mean over all features of what each adds to the gradient of the scale
        slope = comm.all_reduce_sum((scaled_grad * normalized).sum(-1, keepdim=True), ctx.group)
        slope = slope / ctx.n  # [..., 1]
        dx = (scaled_grad - normalized * slope) * scale

        dweight = (grad * normalized).flatten(0, -2).sum(0)
        return dx.to(x.dtype), accumulate_summed_grad(ctx.weight, dweight), None, None


def vocab_embedding(ids: Tensor, table: Tensor, group: Group, sequence: bool) -> Tensor:
    """ids [b, s] -> [b, s, d] (sequence: [b, s/tp, d]) from a table [rows/tp, d].

    The rows of the table are divided over the group. One all-reduce (sequence: reduce-scatter) of [b, s, d].
    """
    if group.size == 1:
        return embedding(ids, table)
    rows = table.shape[0]
    local_ids = ids - group.index * rows
    is_local = (local_ids >= 0) & (local_ids < rows)
    x = embedding(local_ids.clamp(0, rows - 1), table)
    local_x = x * is_local[..., None]
    return leave_region(local_x, group, sequence)


def merge_vocab_statistics(group: Group) -> Merge | None:
    """For linear_cross_entropy: combines the statistics of a vocabulary that is divided over the group.

    One all-gather of two numbers per row. None if the group has one rank.
    """
    def merge(lse: Tensor, picked: Tensor) -> tuple[Tensor, Tensor]:
        """lse [rows]: logsumexp of this rank's logits; picked [rows]: the target's logit, or 0."""
        own = torch.stack((lse, picked))  # [2, rows]
        parts = comm.all_gather(own[None], group)  # [tp, 2, rows]
        full_lse = parts[:, 0].logsumexp(0)
        full_picked = parts[:, 1].sum(0)
        return full_lse, full_picked

    return merge if group.size > 1 else None
