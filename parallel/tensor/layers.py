"""Layers whose weights are sharded over mesh.tp (arXiv 1909.08053).

A column layer may merge several projections (q, k, v; gate, up) into one GEMM. Each is sharded separately, so
the stored tensors keep their names. Under sequence parallelism (arXiv 2205.05198) the activations between a
row layer and the next column layer are sharded along the sequence over the same group: the computation there
(norms, dropout, residuals) is neither repeated nor its activations stored twice, and the communication volume
is unchanged.
"""
from dataclasses import replace
from functools import partial

import torch
from torch import Tensor, nn

from kernels.cross_entropy import Merge
from kernels.embedding import embedding
from kernels.fp8 import SHARED_KINDS
from kernels.fp8_linear import Fp8Scaling, own_maxima, scaled_linear
from kernels.fp8_weight import WeightsTogether
from kernels.grad import accumulate_summed_grad, accumulation_dtype
from kernels.linear import linear, linear_of_several, linear_out_of_region
from parallel.sharding.boxes import Box
from parallel.sharding.spec import ParameterSpec, ShardedParameter, parameter
from parallel.tensor.regions import TensorParallelRegion, leave_region
from parallel.topology.mesh import Mesh
from parallel.wire import comm
from parallel.wire.comm import Group

Fp8Recipe = tuple[str, int]  # (recipe, side of a block) (model/precision.py)


def row_shard(key: str, shape: tuple[int, ...], group: Group) -> Box:
    """Return this rank's shard of a global tensor of this shape along dim 0."""
    rows = shape[0] // group.size
    first_row = group.index * rows
    inner_start = (0,) * (len(shape) - 1)
    return Box(key, shape, start=(first_row, *inner_start), size=(rows, *shape[1:]))


def column_shard(key: str, shape: tuple[int, int], group: Group) -> Box:
    """Return this rank's shard of a matrix of this global shape along dim 1."""
    columns = shape[1] // group.size
    first_column = group.index * columns
    return Box(key, shape, start=(0, first_column), size=(shape[0], columns))


def partial_over_tp(is_partial: bool) -> tuple[str, ...]:
    """Return ParameterSpec.partial_over: whether a tp rank's gradient is only a part of the sum."""
    return ("tp",) if is_partial else ()


def replicated_vector(key: str, size: int, role: str, is_partial: bool) -> ShardedParameter:
    """Create a vector [size] replicated over tp. is_partial: each tp rank has a part of its gradient."""
    box = Box.whole(key, (size,))
    return parameter(ParameterSpec((box,), role, partial_over=partial_over_tp(is_partial)))


def fp8_scaling(recipe: Fp8Recipe | None, mesh: Mesh, divides_outputs: bool) -> Fp8Scaling | None:
    """Return how a layer scales its 8-bit operands, or None without a recipe.

    divides_outputs: tp shards the weight's outputs, otherwise its inputs. Maxima are exchanged over tp and
    cp, within the span of a scale, so that the scales of a microbatch are the same under every layout.
    """
    if recipe is None:
        return None
    over_tp = partial(comm.all_reduce_max_float, group=mesh.tp) if mesh.tp.size > 1 else None
    over_cp = partial(comm.all_reduce_max_float, group=mesh.cp) if mesh.cp.size > 1 else None
    all_parts = None
    if over_tp is not None and over_cp is not None:
        all_parts = partial(comm.all_reduce_max_float, group=mesh.tp_cp)
    scaling_class: type[Fp8Scaling] = Fp8Scaling
    if recipe[0] == "nvfp4":
        from kernels.nvfp4_linear import Nvfp4Scaling

        scaling_class = Nvfp4Scaling
    if divides_outputs:
        return scaling_class(*recipe, outs=over_tp, ins=None, tokens=over_cp, all_parts=all_parts)
    return scaling_class(*recipe, outs=None, ins=over_tp, tokens=over_cp, all_parts=all_parts)


def exchange_weight_maxima_together(module: nn.Module, group: Group) -> None:
    """Exchange the weight maxima of all layers of a module over tp in one message.

    group is tp.
    """
    if group.size == 1:
        return
    together = WeightsTogether(partial(comm.all_reduce_max_float, group=group))
    for layer in module.modules():
        if not isinstance(layer, (ColumnLinear, RowLinear)):
            continue
        if layer.scaling is None:
            continue
        kind = layer.scaling.weight_kind
        if kind not in SHARED_KINDS:
            continue
        divides_outputs = isinstance(layer, ColumnLinear)
        together.add(layer.weight, partial(own_maxima, layer.weight, kind, divides_outputs))
        layer.scaling = replace(layer.scaling, together=together)


def tensor_parallel_region(group: Group, *, sp: bool, async_tp: bool) -> TensorParallelRegion | None:
    """Return the region of a layer whose weight is sharded over tp; None in a group of one rank."""
    return TensorParallelRegion(group, sp, is_async=async_tp) if group.size > 1 else None


class ColumnLinear(nn.Module):
    """x [b, s, n] (sp: [b, s/tp, n]) -> [b, s, sum(outputs)/tp]: output features are sharded over tp.

    outputs is {key: features} of its projections, each sharded separately.
    Under sp it all-gathers its input over tp, and reduces the gradient of its input (regions.py). async_tp
    overlaps its GEMM with the transfers of sequence chunks (overlap.py).
    adapter: from x to what is added to the output (model/lora.py), if the layer has one.
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
        self.adapter: nn.Module | None = None

        weights = [row_shard(f"{key}.weight", (m, n), mesh.tp) for key, m in outputs.items()]
        self.weight = parameter(ParameterSpec(tuple(weights), "hidden", std))
        self.bias = None
        if bias:
            biases = [row_shard(f"{key}.bias", (m,), mesh.tp) for key, m in outputs.items()]
            self.bias = parameter(ParameterSpec(tuple(biases), "bias"))

    def forward(self, x: Tensor) -> Tensor:
        if self.scaling is None:
            y = linear(x, self.weight, self.bias, self.region)
        else:
            y = scaled_linear(x, self.weight, self.bias, self.region, self.scaling)
        return y if self.adapter is None else y + self.adapter(x)


class SharedHeadsLinear(nn.Module):
    """The merged projection q|k|v with fewer key and value heads than tp ranks.

    x [b, s, n] (sp: [b, s/tp, n]) -> [b, s, heads * head_dim / tp + head_dim + v_dim]. Queries are sharded
    over tp. Every rank holds all key and value weights, computes the one head that its queries see, and has a
    part of their gradients.
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
        head = mesh.tp.index * kv_heads // mesh.tp.size  # seen by this rank's queries
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
    """Create a hidden matrix that every tp rank holds in full, each with a part of its gradient."""
    return parameter(ParameterSpec((Box.whole(key, shape),), "hidden", std, partial_over=("tp",)))


class RowLinear(nn.Module):
    """x [b, s, n/tp] -> [b, s, m] (sp: [b, s/tp, m]): input features are sharded over tp.

    The partial outputs are summed over tp by an all-reduce, or under sp by a reduce-scatter. async_tp,
    adapter: see ColumnLinear.
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
        self.adapter: nn.Module | None = None
        weight = column_shard(f"{key}.weight", (m, n), mesh.tp)
        self.weight = parameter(ParameterSpec((weight,), "hidden", std))
        self.bias = replicated_vector(f"{key}.bias", m, "bias", is_partial=sp) if bias else None

    def forward(self, x: Tensor) -> Tensor:
        if self.region is None and self.scaling is None:
            y = linear(x, self.weight, self.bias)
        else:
            y = self.summed(x)
        return y if self.adapter is None else y + self.adapter(x)

    def summed(self, x: Tensor) -> Tensor:
        """Return the output over tp, or in 8 bits, without that of an adapter."""
        if self.region is None:
            return self.multiply(x, self.bias)
        if self.region.is_async:
            y = linear_out_of_region(x, self.weight, self.region)
        else:
            y = leave_region(self.multiply(x, bias=None), self.tp, self.sp)
        return y if self.bias is None else _AddBias.apply(y, self.bias)  # once, after the sum

    def multiply(self, x: Tensor, bias: Tensor | None) -> Tensor:
        """x [b, s, n/tp] -> this rank's term of the sum [b, s, m]."""
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


# ---- norm, embedding and loss over sharded features --------------------------------------------------------


def tensor_parallel_rms_norm(x: Tensor, weight: Tensor, eps: float, group: Group) -> Tensor:
    """RMSNorm over features sharded over the group. x [..., n/tp], weight [n/tp] -> [..., n/tp].

    All-reduces one number per row, in the forward and in the backward.
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

        # mean over all features of their contributions to the gradient of the scale
        slope = comm.all_reduce_sum((scaled_grad * normalized).sum(-1, keepdim=True), ctx.group)
        slope = slope / ctx.n  # [..., 1]
        dx = (scaled_grad - normalized * slope) * scale

        dweight = (grad * normalized).flatten(0, -2).sum(0)
        return dx.to(x.dtype), accumulate_summed_grad(ctx.weight, dweight), None, None


def vocab_embedding(ids: Tensor, table: Tensor, group: Group, sequence: bool) -> Tensor:
    """ids [b, s] -> [b, s, d] (sequence: [b, s/tp, d]) from a table [rows/tp, d].

    The rows of the table are sharded over the group. One all-reduce (sequence: reduce-scatter) of [b, s, d].
    """
    rows = table.shape[0]
    local_ids = ids - group.index * rows
    is_local = (local_ids >= 0) & (local_ids < rows)
    x = embedding(local_ids.clamp(0, rows - 1), table)
    local_x = x * is_local[..., None]
    return leave_region(local_x, group, sequence)


def merge_vocab_statistics(group: Group) -> Merge:
    """Return a function that merges the statistics of a sharded vocabulary, for linear_cross_entropy.

    One all-gather of two numbers per row.
    """
    def merge(lse: Tensor, picked: Tensor) -> tuple[Tensor, Tensor]:
        """lse [rows] is the logsumexp of this rank's logits, picked [rows] the target's logit, or 0."""
        own = torch.stack((lse, picked))  # [2, rows]
        parts = comm.all_gather(own[None], group)  # [tp, 2, rows]
        full_lse = parts[:, 0].logsumexp(0)
        full_picked = parts[:, 1].sum(0)
        return full_lse, full_picked

    return merge
