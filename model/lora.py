"""LoRA (arXiv 2106.09685): a linear layer adds s B A x to its output, and A [rank, n] and B [m, rank] alone
train.

    y = W x + s B A x        s = alpha / rank, or with model.lora.scale rslora (arXiv 2312.03732)
                             alpha / sqrt(rank)

B begins at 0, so the model computes what it did without adapters. A begins as in the reference implementation
(kaiming_uniform_ with a = sqrt(5)): uniform within 1 / sqrt(n). W keeps its own layer, and is frozen, as is
all else that no group of optim.groups names (model/sharding.py).

add_adapters gives the chosen layers of a block their adapters, and each adds its adapter's output to its own.
Under tensor parallelism an adapter exchanges `rank` features of a token, before B:

    column    A is whole on each tp rank and sees the rank's tokens; B has the rank's outputs
    row       A has the rank's inputs, and sums over tp; B is whole, and writes the rank's tokens

Whole matrices have a part of their gradient on each tp rank under sequence parallelism, where tp ranks have
different tokens outside of the region. The latents of MLA have adapters of the first kind that exchange
nothing: their layers are wholly outside of a region or inside of it.

With model.lora.dropout A reads x with elements dropped, in training. Projections that are one product (q, k,
v; gate, up) share a mask, as in the reference implementation (loralib's MergedLinear).
"""
from collections.abc import Callable, Iterator
from dataclasses import replace
from fnmatch import fnmatchcase
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from config import Config, LoraConfig, ModelConfig, comma_separated, kv_heads, layer_models
from config.rule import Rule
from kernels.linear import linear
from kernels.rounding import salt
from model.attention import AttentionConfig
from model.describe import all_parameters
from model.mla import MultiLatentAttention
from parallel.rng import DropoutRng, dropout
from parallel.sharding.boxes import Box
from parallel.sharding.spec import ADAPTER_ROLES, ParameterSpec, ShardedParameter, parameter
from parallel.tensor.layers import ColumnLinear, RowLinear, column_shard, partial_over_tp
from parallel.tensor.regions import enter_region, leave_region
from parallel.topology.mesh import Mesh
from parallel.wire.comm import Group

A, B = ".lora_a.weight", ".lora_b.weight"  # suffixes of names in checkpoints: layers.3.attn.q.lora_a.weight
ALL = "*"  # of model.lora.targets


def add_adapters(block: nn.Module, cfg: Config, mesh: Mesh) -> "InputDropout | None":
    """Give the linear layers of a block that model.lora.targets names their adapters.

    Returns their dropout, whose generators each pass sets, if there is one.
    """
    lora, sp = cfg.model.lora, cfg.parallel.sp
    assert lora is not None
    drop = InputDropout(lora.dropout) if lora.dropout else None
    for layer in list(block.modules()):
        if isinstance(layer, ColumnLinear):
            region = {"region": (mesh.tp, sp), "a_partial_over": partial_over_tp(sp)}
            layer.adapter = column_adapter(layer.weight, lora, drop=drop, **region)
        elif isinstance(layer, RowLinear):
            (box,) = layer.weight.spec.boxes
            if is_target(lora, adapter_key(box, "")):
                layer.adapter = RowAdapter(box, lora, mesh.tp, sp=sp, drop=drop)
        elif isinstance(layer, MultiLatentAttention):
            add_to_latents(layer, lora, drop)
    return drop


def column_adapter(weight: ShardedParameter, lora: LoraConfig, **region: Any) -> "ColumnAdapter | None":
    """Return the adapter of a layer with this weight, or None if none of its projections is a target."""
    chosen = [is_target(lora, adapter_key(box, "")) for box in weight.spec.boxes]
    return ColumnAdapter(weight, chosen, lora, **region) if any(chosen) else None


def add_to_latents(attention: MultiLatentAttention, lora: LoraConfig, drop: "InputDropout | None") -> None:
    """Give the projections to and from the latents their adapters.

    Those to the latents see a tp rank's tokens, as their weight does. Those from the latents are inside of a
    region: each tp rank has some of the outputs, and so a part of the gradient of A.
    """
    attention.down_adapter = column_adapter(
        attention.down, lora, region=None, a_partial_over=attention.down.spec.partial_over, drop=drop)
    inside = {"region": None, "a_partial_over": ("tp",), "drop": drop, "is_inside": True}
    attention.kv_up_adapter = column_adapter(attention.kv_up, lora, **inside)
    if attention.q_rank:
        attention.q_up_adapter = column_adapter(attention.q_up, lora, **inside)


class InputDropout:
    """Dropout of what the adapters of a block read (model.lora.dropout).

    outside, inside: the generators of the pass that the block runs, of a tp rank's tokens outside of a region
    and of all tokens inside of one; None in evaluation.
    """

    def __init__(self, rate: float) -> None:
        self.rate = rate
        self.outside: DropoutRng | None = None
        self.inside: DropoutRng | None = None

    def start_pass(self, outside: DropoutRng | None, inside: DropoutRng | None) -> None:
        self.outside, self.inside = outside, inside

    def of(self, a: Box, is_inside: bool) -> Callable[[Tensor], Tensor]:
        """Return the function that drops elements of what the matrix A with this box reads."""
        return partial(self.drop, site=salt(0, 0, a.key), first=a.start[1], is_inside=is_inside)

    def drop(self, x: Tensor, *, site: int, first: int, is_inside: bool) -> Tensor:
        return dropout(x, self.rate, self.inside if is_inside else self.outside, site, first)


def adapter_key(box: Box, suffix: str) -> str:
    """Return the name of a projection, layers.3.attn.q, from the box of its weight, and the suffix."""
    return box.key.removesuffix(".weight") + suffix


def is_target(lora: LoraConfig, name: str) -> bool:
    """Return whether a projection, such as layers.3.attn.q, has an adapter."""
    return any(matches(name, pattern) for pattern in comma_separated(lora.targets))


def matches(name: str, pattern: str) -> bool:
    """Return whether a pattern names a projection: by its whole name, or by what follows the layer."""
    within_layer = name.split(".", 2)[2]
    return fnmatchcase(name, pattern) or fnmatchcase(within_layer, pattern)


def adapter_scale(lora: LoraConfig) -> float:
    """Return s, the factor of B A x."""
    return lora.alpha / (lora.rank if lora.scale == "lora" else lora.rank**0.5)


class ColumnAdapter(nn.Module):
    """x [b, s, n] (sp: [b, s/tp, n]) -> [b, s, m/tp], m: the outputs of all projections of the layer.

    weight: that of the layer. Those of its projections that are not `chosen` get zeros. The matrices A of the
    others are one product. region: (tp, sp), entered before B; None for a layer without one, or inside of one
    (is_inside). a_partial_over: ParameterSpec.partial_over of A. drop: the dropout of x.
    """

    def __init__(
        self,
        weight: ShardedParameter,
        chosen: list[bool],
        lora: LoraConfig,
        *,
        region: tuple[Group, bool] | None,
        a_partial_over: tuple[str, ...],
        drop: InputDropout | None = None,
        is_inside: bool = False,
    ) -> None:
        super().__init__()
        self.region = region
        self.rank = lora.rank
        self.scale = adapter_scale(lora)
        adapted = [box for box, is_chosen in zip(weight.spec.boxes, chosen) if is_chosen]
        a = [Box.whole(adapter_key(box, A), (lora.rank, box.shape[1])) for box in adapted]
        self.a = parameter(ParameterSpec(tuple(a), "lora_a", partial_over=a_partial_over))
        self.drop = None if drop is None else drop.of(a[0], is_inside)
        self.b = nn.ParameterList()  # of each projection that has one
        for box in adapted:
            shape, start, size = (box.shape[0], lora.rank), (box.start[0], 0), (box.size[0], lora.rank)
            b = Box(adapter_key(box, B), shape, start, size)
            self.b.append(parameter(ParameterSpec((b,), "lora_b", partial_over=weight.spec.partial_over)))
        self.chosen = chosen
        self.features = [box.size[0] for box in weight.spec.boxes]

    def forward(self, x: Tensor) -> Tensor:
        x = x if self.drop is None else self.drop(x)
        low = linear(x, self.a) * self.scale  # [b, s, adapters rank] (sp: [b, s/tp, ...])
        if self.region is not None:
            low = enter_region(low, *self.region)  # [b, s, ...]
        parts = iter(zip(low.split(self.rank, -1), self.b))
        outputs: list[Tensor] = []
        for is_chosen, features in zip(self.chosen, self.features):
            outputs.append(linear(*next(parts)) if is_chosen else low.new_zeros(*low.shape[:-1], features))
        return outputs[0] if len(outputs) == 1 else torch.cat(outputs, -1)

    def delta(self) -> Tensor:
        """Return s B A [m/tp, n], for a layer of one projection."""
        return self.scale * self.b[0] @ self.a


class RowAdapter(nn.Module):
    """x [b, s, n/tp] -> [b, s, m] (sp: [b, s/tp, m]), summed over tp."""

    def __init__(
        self, box: Box, lora: LoraConfig, tp: Group, *, sp: bool, drop: InputDropout | None = None
    ) -> None:
        """box: of the layer's weight. drop: the dropout of x."""
        super().__init__()
        self.tp, self.sp = tp, sp
        self.scale = adapter_scale(lora)
        outputs, inputs = box.shape
        a = column_shard(adapter_key(box, A), (lora.rank, inputs), tp)
        b = Box.whole(adapter_key(box, B), (outputs, lora.rank))
        self.a = parameter(ParameterSpec((a,), "lora_a"))
        self.drop = None if drop is None else drop.of(a, is_inside=True)
        self.b = parameter(ParameterSpec((b,), "lora_b", partial_over=partial_over_tp(sp)))

    def forward(self, x: Tensor) -> Tensor:
        x = x if self.drop is None else self.drop(x)
        low = leave_region(linear(x, self.a), self.tp, self.sp)  # [b, s, rank] (sp: [b, s/tp, rank])
        return linear(low * self.scale, self.b)


# ---- what is refused ---------------------------------------------------------------------------------------


def lora_rules(cfg: Config) -> Iterator[Rule]:
    """Check model.lora: each target is a projection that takes an adapter, under this layout and with the
    other keys."""
    lora = cfg.model.lora
    assert lora is not None
    patterns = comma_separated(lora.targets)
    yield Rule(bool(patterns), "model.lora.targets: names no projection; write it as attn.q,attn.v, or *")
    adapted = adapted_names(cfg.model, lora.targets)
    takers = sorted({name.split(".", 2)[2] for name in adapted_names(cfg.model, ALL)})
    for pattern in patterns:
        yield Rule(
            any(matches(name, pattern) for name in adapted),
            f"model.lora.targets: {pattern} names no part that takes an adapter (routed experts, routers and "
            f"the small projections of stateful mixers take none); these do: {', '.join(takers)}")

    is_shared = any(
        isinstance(like.mixer, AttentionConfig) and kv_heads(like) < cfg.parallel.tp
        for like in layer_models(cfg.model).values()
    )
    has_qkv = any(name.endswith((".attn.q", ".attn.k", ".attn.v")) for name in adapted)
    yield Rule(
        not (is_shared and has_qkv),
        f"model.lora.targets: tp ranks that share key heads (parallel.tp={cfg.parallel.tp}) have no adapters "
        "of attn.q, attn.k and attn.v; use parallel.tp up to model.mixer.kv_heads, or leave them out")
    yield Rule(
        cfg.model.mup is None,
        "model.lora: the rates of adapters under muP have not been derived; leave model.mup out")
    yield Rule(
        not cfg.train.unproven,
        "model.lora: train.unproven leaves inputs of linear layers in 8 bits, which adapters cannot read; "
        "leave it out")
    yield Rule(
        not cfg.log.noise_scale,
        "log.noise_scale: measures hidden matrices, which model.lora freezes; leave it out")


def adapted_names(model: ModelConfig, targets: str) -> list[str]:
    """Return the projections that have adapters with these targets: layers.0.attn.q, ..."""
    assert model.lora is not None
    with_targets = replace(model, lora=replace(model.lora, targets=targets))
    keys = [key for spec, keys in all_parameters(with_targets) if spec.role in ADAPTER_ROLES for key in keys]
    return [key.removesuffix(A) for key in keys if key.endswith(A)]
