"""Every key of `model` does what it says, and nothing else.

Each case builds a model without and with the key, gives both the same weights (as far as tensors have the
same shape), and looks at all that a key could change (Seen). The case names what it changes, and how; what
it does not name must be equal.
"""

import dataclasses
import typing
import zlib
from collections.abc import Callable
from typing import Literal
from unittest import mock

import pytest
import torch

import config
import train
from build import build_run
from config.reading import flatten_tree, from_tree, presets, unused
from config.reading.kinds import every_path, members_of, part_types
from config.schema import ModelConfig
from config.tree import field_types, leaves, value_at
from kernels import attention
from model import moe
from parallel.microbatch import Microbatch
from parallel.sharding.views import get_boxes
from parallel.topology.mesh import Mesh

CPU = torch.device("cpu")
SIZE = {"layers": 2, "hidden": 32, "mixer.heads": 4, "mlp.width": 48, "vocab": 100, "context": 64}
TRAIN = {"steps": 9, "seq_len": 16, "micro_batch": 2, "global_batch": 4, "dtype": "fp64"}


@dataclasses.dataclass(frozen=True)
class Seen:
    """shapes, start, rates: of every tensor, by key: its shape, initial values, factor of the learning
    rate; logits: in evaluation; kernels: that attention called there; loss: of a training step of two
    microbatches; gradients: by key; told: what routers told of it; rows: of each expert in each mixture
    layer and microbatch; router: what routers keep for the next.
    """

    shapes: dict[str, tuple[int, ...]]
    start: dict[str, torch.Tensor]
    rates: dict[str, float]
    logits: torch.Tensor
    kernels: set[str]
    loss: torch.Tensor
    gradients: dict[str, torch.Tensor]
    told: torch.Tensor | None
    rows: list[list[int]]
    router: dict[str, torch.Tensor]


def fill(key: str, x: torch.Tensor) -> None:
    """Numbers that depend on the key alone: a longer tensor begins like a shorter one. Weights of norms
    lie around 1."""
    stream = torch.Generator().manual_seed(zlib.crc32(key.encode()))
    x.copy_(0.3 * torch.randn(1 << 14, generator=stream, dtype=torch.float64)[: x.numel()].view(x.shape))
    if key.endswith("norm.weight"):
        x += 1


def batches() -> list[Microbatch]:
    stream = torch.Generator().manual_seed(4)
    ids = torch.randint(100, (4, 17), generator=stream)
    place = torch.arange(16).expand(2, 16)
    return [
        Microbatch(ids[cut, :-1], ids[cut, 1:].clone(), place, sequence_ids=torch.arange(4)[cut])
        for cut in (slice(0, 2), slice(2, 4))
    ]


def called(names: set[str]):
    """Notes which of the kernels of attention run."""
    stack, inner = [], {"attention_reference": "reference", "sdpa": "sdpa", "probabilities": "blocks"}
    for function, kind in inner.items():

        def noted(*args, real=getattr(attention, function), kind=kind):
            names.add(kind)
            return real(*args)

        stack.append(mock.patch.object(attention, function, noted))
    return stack


def sized(model: dict) -> dict:
    """The model in SIZE; a convolution has no heads, and a part that is none has no keys."""
    lacks = set()
    if model.get("mixer.kind") in ("short_conv", "none"):
        lacks.add("mixer.heads")
    if model.get("mlp.kind") == "none":
        lacks.add("mlp.width")
    return {key: value for key, value in SIZE.items() if key not in lacks} | model


def look(model: dict) -> Seen:
    preset = model.get("preset", "llama2-tiny")
    cfg = from_tree({"model": {"preset": preset, **sized(model)}, "train": TRAIN, "log": {"name": "keys"}})
    run = build_run(cfg, Mesh.single(), CPU, None, 9)
    start = {box.key: x.clone() for b in run.buckets for box, x in get_boxes(b, b.weights.master)}
    rates = {
        box.key: slot.param.spec.lr_factor
        for b in run.buckets
        for slot in b.slots
        for box in slot.param.spec.boxes
    }
    for b in run.buckets:
        for box, x in get_boxes(b, b.weights.master):
            fill(box.key, x)
    first, names, rows, real = batches(), set(), [], moe.plan_dispatch

    def plan(*args, **keywords):
        made = real(*args, **keywords)
        rows.append(list(made.chunks[0].rows_per_expert))
        return made

    patches = called(names)
    for patch in patches:
        patch.start()
    with torch.no_grad():
        logits = run.stages[0].logits(first[0].tokens, first[0].positions)
    for patch in patches:
        patch.stop()
    with mock.patch.object(moe, "plan_dispatch", plan):
        own = train.shard_microbatches(run, first)
        tokens = train.count_targets(own, run.mesh)
        loss = train.forward_backward(run, own, run.scaler.scale / tokens) / run.scaler.scale
    assert int(tokens) == 64
    run.routers.update_after_step(torch.tensor(True), run.scaler.scale)
    trained = [b for b in run.buckets if b.trains]
    gradients = {box.key: x.clone() for b in trained for box, x in get_boxes(b, b.grads.local)}
    return Seen(
        {k: tuple(x.shape) for k, x in start.items()}, start, rates, logits, names, loss, gradients,
        run.routers.stats, rows, {box.key: x.clone() for box, x in run.routers.boxes()},
    )


def same(a, b) -> bool:
    """Tensors to 1e-11; of dicts of tensors, those with the same key and shape."""
    if isinstance(a, torch.Tensor) and isinstance(b, torch.Tensor):
        return a.shape == b.shape and torch.allclose(a, b, rtol=1e-11, atol=1e-14)
    if isinstance(a, dict) and all(isinstance(x, torch.Tensor) for x in a.values()):
        return all(same(a[key], b[key]) for key in a if key in b and a[key].shape == b[key].shape)
    if isinstance(a, dict) and all(isinstance(x, float) for x in a.values()):
        return all(a[key] == b[key] for key in a if key in b)
    return a is b if a is None or b is None else a == b


@dataclasses.dataclass(frozen=True)
class Case:
    """key: is set to `to` beside `base`, a part that may be none as a whole. also: what it needs. changes:
    fields of Seen. right(before, after): how."""

    key: str
    to: object
    changes: set[str]
    right: Callable[[Seen, Seen], bool] = lambda before, after: True
    base: dict = dataclasses.field(default_factory=dict)
    also: dict = dataclasses.field(default_factory=dict)

    def changed(self, base: dict) -> dict:
        """The model with the key."""
        return {**base, **self.also, self.key: self.to}

    def __str__(self) -> str:
        return f"{self.key}={self.to}-{'-'.join(f'{k}={v}' for k, v in self.base.items())}"


def added(*parts: str, gone: tuple[str, ...] = ()):
    """Exactly the tensors that have one of these in their key are new, exactly those with one of `gone`
    are no more."""

    def right(before: Seen, after: Seen) -> bool:
        new, old = after.shapes.keys() - before.shapes.keys(), before.shapes.keys() - after.shapes.keys()
        ok = all(any(part in key for part in parts) for key in new) and all(
            any(part in key for key in new) for part in parts
        )
        return (
            ok
            and all(any(g in key for g in gone) for key in old)
            and all(any(g in key for key in old) for g in gone)
        )

    return right


def shaped(**shapes: tuple[int, ...]):
    """The tensors whose keys end so have these shapes, and no other tensor has another one than before."""
    want = {f".{key.replace('_to_', '.')}.weight": shape for key, shape in shapes.items()}

    def right(before: Seen, after: Seen) -> bool:
        for key, shape in after.shapes.items():
            if shape != next(
                (s for end, s in want.items() if f".{key}".endswith(end)), before.shapes.get(key)
            ):
                return False
        return after.shapes.keys() == before.shapes.keys()

    return right


def std_times(factor: float):
    """All that was drawn is this many times as large, bit for bit the same numbers otherwise."""

    def right(before: Seen, after: Seen) -> bool:
        drawn = [k for k, x in before.start.items() if x.dim() == 2]
        return bool(drawn) and all(
            torch.allclose(after.start[k], before.start[k] * factor, rtol=1e-6) for k in drawn
        )

    return right


def states_of_mamba(features: int):
    """The projections and convolutions of B and C have this many features."""

    def right(before: Seen, after: Seen) -> bool:
        ends = [f"layers.1.attn.{name}" for name in ("B", "C")]
        return all(
            after.shapes[f"{end}.weight"] == (features, 32)
            and after.shapes[f"{end}_conv.weight"] == (features, 4)
            for end in ends
        )

    return right


def sinks_learn(before: Seen, after: Seen) -> bool:
    """A score for each head, each with a gradient."""
    return added("attn.sinks")(before, after) and bool(after.gradients["layers.0.attn.sinks"].all())


def xielu_learns(before: Seen, after: Seen) -> bool:
    """Two numbers a layer, whose softplus begins as 0.8 and 0.3, each with a gradient."""
    begins = {"layers.1.mlp.alpha_p": 0.8, "layers.1.mlp.alpha_n": 0.3}
    return added("mlp.alpha_p", "mlp.alpha_n", gone=("mlp.gate",))(before, after) and all(
        same(torch.nn.functional.softplus(after.start[key].double()).float(), torch.tensor([value]))
        and bool(after.gradients[key].all())
        for key, value in begins.items()
    )


def grown_keys(features: int):
    """Projections and convolutions of queries and keys have this many features."""
    projections = {f"attn_to_{name}": (features, 32) for name in "qk"}
    return shaped(**projections, **{f"attn_to_{name}_conv": (features, 4) for name in "qk"})


def deeper(before: Seen, after: Seen) -> bool:
    """One more block; output projections start smaller by sqrt(2/3)."""
    o = "layers.0.attn.o.weight"
    return added("layers.2.")(before, after) and torch.allclose(
        after.start[o], before.start[o] * (2 / 3) ** 0.5, rtol=1e-6
    )


def more_ids(before: Seen, after: Seen) -> bool:
    """The logits of the first 100 ids are the same, and there are 20 more."""
    return after.logits.shape[-1] == 120 and torch.allclose(
        after.logits[..., :100], before.logits, rtol=1e-12
    )


def further(before: Seen, after: Seen) -> bool:
    """A module behind the last block, which adds to the gradients of all that it reads."""
    return added("layers.2.")(before, after) and all(
        not same(before.gradients[k], after.gradients[k])
        for k in ("embed.weight", "head.weight", "layers.0.attn.q.weight")
    )


def twice_the_module(before: Seen, after: Seen) -> bool:
    """The gradients that only the module's loss has are doubled."""
    keys = [k for k in before.gradients if k.startswith("layers.2.")]
    return bool(keys) and all(
        torch.allclose(after.gradients[k], 2 * before.gradients[k], rtol=1e-9) for k in keys
    )


def far_tokens_alone(before: Seen, after: Seen) -> bool:
    """The first 4 tokens see all that they saw."""
    changed = (before.logits - after.logits).abs().amax((0, 2)) > 1e-9
    return changed.tolist() == [False] * 4 + [True] * 12


def mup(before: Seen, after: Seen) -> bool:
    """Twice as wide as the base: hidden matrices learn half as fast and start 2^-1/2 times as large,
    logits are half."""
    q, table = "layers.0.attn.q.weight", "embed.weight"
    return (
        after.rates[q] == 0.5
        and after.rates[table] == 1.0
        and torch.allclose(after.start[q], before.start[q] / 2**0.5, rtol=1e-6)
        and torch.equal(after.start[table], before.start[table])
        and torch.allclose(after.logits, before.logits / 2, rtol=1e-9)
    )


def narrower_base(before: Seen, after: Seen) -> bool:
    """Half the base: hidden matrices learn half as fast, logits are half."""
    q = "layers.0.attn.q.weight"
    return (before.rates[q], after.rates[q]) == (0.5, 0.25) and torch.allclose(
        after.logits, before.logits / 2, rtol=1e-9
    )


def instead(of: str, kind: str):
    return lambda before, after: before.kernels == {of} and after.kernels == {kind}


def fewer_choices(before: Seen, after: Seen) -> bool:
    """64 tokens in two layers go to one expert each, not to two."""
    return sum(map(sum, before.rows)) == 2 * 2 * 64 and sum(map(sum, after.rows)) == 2 * 64


def one_group(before: Seen, after: Seen) -> bool:
    """With 4 experts in 2 groups, a token takes both of one group: the groups' experts have equal counts."""
    return all(a == b and c == d for a, b, c, d in after.rows) and not all(
        a == b and c == d for a, b, c, d in before.rows
    )


def bias_moved(rate: float):
    """Against the load: up where an expert had less than its share."""

    def right(before: Seen, after: Seen) -> bool:
        for i, counts in enumerate(after.told[:, :4]):
            bias = after.router[f"layers.{i}.mlp.router.bias"]
            if not torch.allclose(bias, rate * torch.sign(32 - counts), atol=1e-12):
                return False
        return bool(bias.any())

    return right


def loss_told(column: int, coefficient: float, low: float):
    """told[column] of each layer: the mean over tokens, at least `low` times its coefficient; nothing
    before."""

    def right(before: Seen, after: Seen) -> bool:
        return bool(
            (before.told[:, column] == 0).all() and (after.told[:, column] >= 0.999 * low * coefficient).all()
        )

    return right


def bounded(logits: torch.Tensor, cap: float) -> torch.Tensor:
    return cap * torch.tanh(logits / cap)


def first_is_dense(before: Seen, after: Seen) -> bool:
    """The first layer has an MLP instead of experts."""
    gone = ("layers.0.mlp.router", "layers.0.mlp.experts")
    return added(*(f"layers.0.{name}" for name in EVERY_LAYER), gone=gone)(before, after)


def dropped(before: Seen, after: Seen) -> bool:
    """No expert takes more than its fair share of a sequence, 16 * 2 / 4 = 8; what is left out is told."""
    rows = [n for counts in after.rows for n in counts]
    return (
        max(rows) <= 2 * 8
        and sum(rows) + float(after.told[:, 4].sum()) == 2 * 2 * 64
        and float(after.told[:, 4].sum()) > 0
    )


def filled_up(before: Seen, after: Seen) -> bool:
    """Every expert has room for 8 rows a sequence, and every microbatch has two: whatever the routing, 16."""
    return all(counts == [16] * 4 for counts in after.rows) and not all(
        counts == [16] * 4 for counts in before.rows
    )


VALUES = {"logits", "loss", "gradients"}
NEW = {"shapes", *VALUES}
ROUTED = {"told", "rows"}
SCALED = {"kind": "llama3", "factor": 4.0, "original": 16}
ROPE = {f"mixer.rope.scaling.{key}": value for key, value in SCALED.items()}
YARN = {**ROPE, "mixer.rope.scaling.kind": "yarn"}
BY_PAIR = {"mixer.rope.scaling.short": [1.0, 1.1, 1.3, 2.0], "mixer.rope.scaling.long": [1.0, 2.0, 4.0, 8.0]}
LONGROPE = {**ROPE, "mixer.rope.scaling.kind": "longrope", **BY_PAIR}
SHORTER = {"mixer.rope.scaling.original": 8}  # than the sequences
EVERY_FOUR = {"mixer.growth.every": 4}
GROWTH = {"mixer.growth.rate": 0.1, **EVERY_FOUR}
RAMP = {  # begins and ends within channels
    "mixer.rope.base": 10.0, "mixer.rope.scaling.low_freq": 0.5, "mixer.rope.scaling.high_freq": 2.0,
}
LATENT_SIZES = {"mixer.kv_rank": 12, "mixer.nope_dim": 8, "mixer.rope_dim": 4, "mixer.v_dim": 6}
LATENT = {"mixer.kind": "latent", **LATENT_SIZES}
DELTA_SIZES = {"mixer.key_heads": 2, "mixer.key_dim": 6, "mixer.v_dim": 8}
MAMBA = {"mixer.kind": "mamba", "mixer.heads": 4, "mixer.dim": 8, "mixer.state": 6}
DELTA = {"mixer.kind": "delta", "mixer.heads": 4, **DELTA_SIZES}
LEARNED = {"positions": "learned", "mixer.rope": None}
MIXTURE = {"mlp.kind": "experts", "mlp.experts": 4, "mlp.top_k": 2, "mlp.width": 16}
SHARED = {**MIXTURE, "mlp.shared.experts": 1}
UNBALANCED = {**MIXTURE, "mlp.router.aux.weight": 0.0}
BALANCED = {**MIXTURE, "mlp.router.aux.weight": 0.1}
FULL = {**MIXTURE, "mlp.capacity.factor": 1.0}
WITH_DENSE = {
    **MIXTURE, "blocks": {"dense": {"mlp": {"kind": "mlp", "width": 88}}}, "pattern": "block, block",
}
TRAINED = {"loss", "gradients"}
FIRST_LOCAL = {"blocks": {"local": {"mixer.window": 4}}, "pattern": "local, block..."}
EVERY_LAYER = ("mlp.gate", "mlp.up", "mlp.down")
CASES = [
    Case("layers", 3, {*NEW, "start"}, deeper),
    Case(
        "hidden",
        64,
        NEW - {"gradients"},
        lambda before, after: all(64 in shape for shape in after.shapes.values()),
    ),  # no tensor keeps its shape: there are no gradients to compare
    Case("mixer.heads", 2, VALUES),
    Case("mixer.kv_heads", 2, NEW, shaped(attn_to_k=(16, 32), attn_to_v=(16, 32))),
    Case(
        "mixer.head_dim", 16, NEW,
        shaped(attn_to_q=(64, 32), attn_to_k=(64, 32), attn_to_v=(64, 32), attn_to_o=(32, 64)),
    ),
    Case("mlp.width", 64, NEW, shaped(mlp_to_gate=(64, 32), mlp_to_up=(64, 32), mlp_to_down=(32, 64))),
    Case("vocab", 120, VALUES, more_ids),
    Case("vocab_multiple", 50, {"shapes"}, shaped(embed=(100, 32), head=(100, 32))),
    Case("context", 128, {"shapes"}, shaped(positions=(128, 32)), LEARNED),
    Case("norm.kind", "layernorm", NEW, added("attn_norm.bias", "mlp_norm.bias", "norm.bias")),
    Case("norm.eps", 1e-2, VALUES),
    Case("norm.weight", False, NEW, added(gone=("norm.weight",))),
    Case("norm.bias", False, NEW, added(gone=("norm.bias",)), {"norm.kind": "layernorm"}),
    Case(
        "norm.place", "after", NEW, added("norm_after.weight", gone=("attn_norm.weight", "mlp_norm.weight")),
    ),
    Case("norm.place", "around", NEW, added("attn_norm_after.weight", "mlp_norm_after.weight")),
    Case("residual", "parallel", NEW, added(gone=("mlp_norm.weight",))),
    Case("residual", "parallel_norms", VALUES),
    Case("residual_scale", 0.5, VALUES),
    Case("embed_scale", 3.0, VALUES),
    Case("embed_norm", True, NEW, added("embed_norm.weight")),
    Case("logit_scale", 0.5, VALUES, lambda before, after: same(after.logits, 0.5 * before.logits)),
    Case("logit_cap", 0.5, VALUES, lambda before, after: same(after.logits, bounded(before.logits, 0.5))),
    Case("mlp.activation", "gelu", NEW, added(gone=("mlp.gate",))),
    Case("mlp.activation", "gelu_erf", NEW, added(gone=("mlp.gate",))),
    Case("mlp.activation", "relu2", NEW, added(gone=("mlp.gate",))),
    Case("mlp.activation", "xielu", NEW, xielu_learns),
    Case("mlp.activation", "geglu", VALUES),
    Case("mlp.activation", "clamped_swiglu", VALUES),
    Case("mlp.limit", 1e-3, VALUES),
    Case("positions", "learned", NEW, added("positions.weight")),
    Case("mixer.rope", None, VALUES),
    Case("mixer.rope.base", 500.0, VALUES),
    Case("mixer.rope.scaling", SCALED, VALUES),
    Case("mixer.rope.scaling.factor", 8.0, VALUES, base=ROPE),
    Case("mixer.rope.scaling.kind", "yarn", VALUES, base=ROPE),
    Case("mixer.rope.scaling.low_freq", 2.0, VALUES, base=ROPE),
    Case("mixer.rope.scaling.high_freq", 6.0, VALUES, base=ROPE),
    Case("mixer.rope.scaling.original", 32, VALUES, base=ROPE),
    Case("mixer.rope.scaling.mscale", 0.5, VALUES, base=YARN),
    Case("mixer.rope.scaling.truncate", False, VALUES, base={**YARN, **RAMP}, also=RAMP),
    Case(
        "mixer.rope.scaling.kind", "linear", VALUES,
        base={"mixer.rope.scaling.kind": "llama3", "mixer.rope.scaling.factor": 4.0},
    ),
    Case("mixer.rope.scaling.kind", "longrope", VALUES, base=ROPE, also=BY_PAIR),
    Case("mixer.rope.scaling.short", [1.0, 1.5, 2.0, 3.0], VALUES, base=LONGROPE),
    Case("mixer.rope.scaling.original", 8, VALUES, base=LONGROPE),
    Case("mixer.rope.scaling.factor", 2.0, VALUES, base=LONGROPE),
    Case("mixer.rope.scaling.long", [1.0, 3.0, 5.0, 8.0], VALUES, base={**LONGROPE, **SHORTER}, also=SHORTER),
    Case("mixer.rope.scaling.mscale_all", 1.0, VALUES, base={**YARN, **LATENT}),
    Case("mixer.rope.share", 0.5, VALUES),
    Case("mixer.rope.pairs", True, VALUES),
    Case("mixer.rope.pairs", True, VALUES, base=LATENT),
    Case("tied", True, NEW, added(gone=("head.weight",))),
    Case("mixer.bias", "all", NEW, added("attn.q.bias", "attn.k.bias", "attn.v.bias", "attn.o.bias")),
    Case("mixer.bias", "qkv", NEW, added("attn.q.bias", "attn.k.bias", "attn.v.bias")),
    Case("mlp.bias", True, NEW, added("mlp.gate.bias", "mlp.up.bias", "mlp.down.bias")),
    Case("mixer.qk_norm", "head", NEW, added("attn.q_norm.weight", "attn.k_norm.weight")),
    Case(
        "mixer.qk_norm", "whole", NEW, shaped(attn_to_q_norm=(32,), attn_to_k_norm=(32,)),
        {"mixer.qk_norm": "head"},
    ),
    Case(
        "mixer.qk_norm", "unweighted", NEW, added(gone=("attn.q_norm.weight", "attn.k_norm.weight")),
        {"mixer.qk_norm": "after_rope"},
    ),
    Case("mixer.qk_norm", "after_rope", VALUES, base={"mixer.qk_norm": "head"}),
    Case("mixer.gate", {"kind": "channel"}, NEW, added("attn.gate.weight")),
    Case("mixer.gate.kind", "head", NEW, shaped(attn_to_gate=(4, 32)), {"mixer.gate.kind": "channel"}),
    Case("mixer.gate.by", "softplus", VALUES, base={"mixer.gate.kind": "channel"}),
    Case("mixer.growth", {"every": 4}, VALUES),
    Case("mixer.growth.rate", 0.5, VALUES, base=GROWTH, also=EVERY_FOUR),
    Case("mixer.growth.every", 8, VALUES, base=GROWTH),
    Case("mixer.growth.first", 1, VALUES, base=GROWTH, also=EVERY_FOUR),
    Case("mixer.growth.rate", 0.5, VALUES, base={**LATENT, **GROWTH}, also=EVERY_FOUR),
    Case(
        "mixer.kind", "latent", {*NEW, "kernels"},
        added("attn.kv_a", "attn.kv_b", "attn.kv_norm", gone=("attn.k.", "attn.v.")), also=LATENT_SIZES,
    ),
    Case(
        "mixer.kv_rank", 16, NEW, shaped(attn_to_kv_a=(20, 32), attn_to_kv_b=(56, 16), attn_to_kv_norm=(16,)),
        LATENT,
    ),
    Case("mixer.q_rank", 20, NEW, added("attn.q_a", "attn.q_b", "attn.q_norm", gone=("attn.q.",)), LATENT),
    Case("mixer.nope_dim", 12, NEW, shaped(attn_to_q=(64, 32), attn_to_kv_b=(72, 12)), LATENT),
    Case("mixer.rope_dim", 8, NEW, shaped(attn_to_q=(64, 32), attn_to_kv_a=(20, 32)), LATENT),
    Case("mixer.value_dim", 12, {*NEW, "kernels"}, shaped(attn_to_v=(48, 32), attn_to_o=(32, 48))),
    Case("mixer.value_scale", 0.5, VALUES),
    Case("mixer.v_dim", 10, NEW, shaped(attn_to_kv_b=(72, 12), attn_to_o=(32, 40)), LATENT),
    Case("mixer.norm_eps", 0.1, VALUES, base=LATENT),
    Case(
        "mixer.kind",
        "delta",
        {*NEW, "kernels"},
        added(
            *(f"attn.{name}" for name in ("z", "b.", "a.", "q_conv", "k_conv", "v_conv")),
            *("attn.A_log", "attn.dt_bias", "attn.norm.weight"),
        ),
        also={"mixer.heads": 4, **DELTA_SIZES},
    ),
    Case("mixer.key_heads", 4, NEW, grown_keys(24), DELTA),
    Case("mixer.key_dim", 10, NEW, grown_keys(20), DELTA),
    Case(
        "mixer.conv",
        3,
        NEW,
        lambda _, after: after.shapes["layers.0.attn.q_conv.weight"] == (12, 3),
        DELTA,
    ),
    Case("mixer.negative_eigenvalues", True, VALUES, base=DELTA),
    Case("mixer.norm_eps", 0.1, VALUES, base=DELTA),
    Case(
        "mixer.kind",
        "kimi",
        {*NEW, "kernels"},
        added(
            *(f"attn.{name}" for name in ("f_a", "f_b", "g_a", "g_b", "b.", "q_conv", "k_conv", "v_conv")),
            *("attn.A_log", "attn.dt_bias", "attn.norm.weight"),
        ),
        also={"mixer.heads": 4, "mixer.dim": 8},
    ),
    Case(
        "mixer.dim",
        10,
        NEW,
        lambda _, after: after.shapes["layers.0.attn.f_b.weight"] == (40, 10),
        {"mixer.kind": "kimi", "mixer.heads": 4, "mixer.dim": 8},
    ),
    Case(
        "mixer.kind",
        "mamba",
        {*NEW, "kernels"},
        added(
            *(f"attn.{name}" for name in ("z", "x.", "B.", "C.", "dt.", "x_conv", "B_conv", "C_conv")),
            *("attn.A_log", "attn.dt_bias", "attn.D", "attn.norm.weight"),
            gone=("attn.q.", "attn.k.", "attn.v."),
        ),
        also={"mixer.heads": 4, "mixer.dim": 8, "mixer.state": 6},
    ),
    Case("mixer.groups", 2, NEW, states_of_mamba(12), MAMBA),
    Case("mixer.dt_min", 1.0, VALUES, base=MAMBA),
    Case("mixer.kind", "none", {*NEW, "kernels"}, added(gone=("attn",))),
    Case("mlp.kind", "none", NEW, added(gone=("mlp",))),
    Case("mixer.state", 8, NEW, states_of_mamba(8), MAMBA),
    Case(
        "mixer.kind", "short_conv", {*NEW, "kernels"},
        added("attn.B.", "attn.C.", "attn.x.", "attn.conv", gone=("attn.q.", "attn.k.", "attn.v.")),
    ),
    Case("mtp", {"modules": 1}, {"shapes", "gradients"}, further),
    Case("mtp.modules", 2, {"shapes", "gradients"}, added("layers.3."), {"mtp.modules": 1}),
    Case("mtp.weight", 0.6, {"gradients"}, twice_the_module, {"mtp.modules": 1}),
    Case("blocks", {"local": {"mixer.window": 2}}, VALUES, base=FIRST_LOCAL),
    Case("pattern", "block, local...", VALUES, base=FIRST_LOCAL),
    Case("mixer.window", 4, {*VALUES, "kernels"}, far_tokens_alone),
    Case("mixer.chunk", 4, {*VALUES, "kernels"}, far_tokens_alone),
    Case("mixer.scale", 0.5, VALUES),
    Case("mixer.softcap", 2.0, {*VALUES, "kernels"}),
    Case("mixer.sinks", True, {*NEW, "kernels"}, sinks_learn),
    Case("dropout", 0.2, TRAINED),
    Case("init_std", 0.05, {"start"}, std_times(2.5)),
    Case("lora", {"rank": 2}, {"shapes", "logits", "loss"}, added("attn.q.lora_", "attn.v.lora_")),
    Case(
        "lora.rank",
        4,
        {"shapes", "logits", "loss"},
        lambda _, after: after.shapes["layers.1.attn.q.lora_a.weight"] == (4, 32),
        {"lora.rank": 2},
    ),
    Case("lora.alpha", 5.0, VALUES, base={"lora.rank": 2}),
    Case("lora.scale", "rslora", VALUES, base={"lora.rank": 2}),
    Case("lora.dropout", 0.3, TRAINED, base={"lora.rank": 2}),
    Case("lora.targets", "attn.q", NEW, added(gone=("attn.v.lora_",)), {"lora.rank": 2}),
    Case("mup", {"base": 16}, {*VALUES, "start", "rates"}, mup),
    Case("mup.base", 8, {*VALUES, "start", "rates"}, narrower_base, {"mup.base": 16}),
    Case("mup.head_dim", 4, VALUES, base={"mup.base": 16}),
    Case("mixer.kernel", "reference", {"kernels"}, instead("sdpa", "reference")),
    Case(
        "mixer.kernel", "sdpa", {"kernels"}, instead("reference", "sdpa"), {"mixer.kernel": "reference"},
    ),
    Case(
        "mlp.kind", "experts", {*NEW, *ROUTED},
        added("mlp.router.weight", *(f"mlp.experts.{e}." for e in range(8)), gone=EVERY_LAYER),
    ),
    Case(
        "mlp.experts",
        2,
        {*NEW, *ROUTED},
        lambda before, after: not any(".mlp.experts.2." in name for name in after.shapes),
        MIXTURE,
    ),
    Case("mlp.top_k", 1, {*VALUES, *ROUTED}, fewer_choices, MIXTURE),
    Case(
        "mlp.width",
        24,
        {*NEW, *ROUTED},
        lambda before, after: after.shapes["layers.1.mlp.experts.3.down.weight"] == (32, 24),
        MIXTURE,
    ),
    Case(
        "mlp.shared", {"experts": 2}, {*NEW, *ROUTED},
        added("mlp.shared.gate", "mlp.shared.up", "mlp.shared.down"), MIXTURE,
    ),
    Case(
        "mlp.shared.experts",
        2,
        {*NEW, *ROUTED},
        lambda before, after: after.shapes["layers.1.mlp.shared.down.weight"] == (32, 32),
        SHARED,
    ),
    Case("mlp.shared.gate", True, {*NEW, *ROUTED}, added("mlp.shared_gate.weight"), SHARED),
    Case("mlp.shared.limit", 1e-3, {*VALUES, *ROUTED}, base=SHARED),
    Case("mlp.limit", 1e-3, {*VALUES, *ROUTED}, base=MIXTURE),
    Case("pattern", "dense, block", {*NEW, *ROUTED}, first_is_dense, WITH_DENSE),
    Case("mlp.router.scores", "sigmoid", {*VALUES, *ROUTED}, base=MIXTURE),
    Case("mlp.router.renorm", False, {*VALUES, *ROUTED}, base=MIXTURE),
    Case("mlp.router.groups", 2, {*VALUES, *ROUTED}, one_group, MIXTURE),
    Case(
        "mlp.router.group_top_k",
        2,
        {*VALUES, *ROUTED},
        lambda before, after: one_group(after, before),
        {**MIXTURE, "mlp.router.groups": 2},
    ),
    Case("mlp.router.scale", 2.5, {*VALUES, *ROUTED}, base=MIXTURE),
    Case("mlp.router.weighs", "input", {*VALUES, *ROUTED}, base=MIXTURE),
    Case("mlp.router.logit_bias", True, {*NEW, *ROUTED}, added("mlp.router.logit_bias"), MIXTURE),
    Case(
        "mlp.bias", True, {*NEW, *ROUTED},
        added(*(f"mlp.experts.{e}.{part}.bias" for e in range(4) for part in ("gate", "up", "down"))),
        MIXTURE,
    ),
    Case("mlp.router.bias_rate", 1e-3, {"router"}, bias_moved(1e-3), MIXTURE),
    Case("mlp.router.bias_rate", 1e-2, {"router"}, bias_moved(1e-2), {**MIXTURE, "mlp.router.bias_rate": 0}),
    Case("mlp.router.jitter", 0.1, {*TRAINED, *ROUTED}, base=MIXTURE),
    Case("mlp.router.aux", {"weight": 0.1}, {"gradients", "told"}, loss_told(6, 0.1, 0.9), MIXTURE),
    Case("mlp.router.aux.weight", 0.1, {"gradients", "told"}, loss_told(6, 0.1, 0.9), UNBALANCED),
    Case("mlp.router.aux.over", "global", {"gradients", "told", "router"}, base=BALANCED),
    Case("mlp.router.aux.over", "micro", {"gradients", "told"}, base=BALANCED),
    Case("mlp.router.z_loss", 0.1, {"gradients", "told"}, loss_told(7, 0.1, 0.5), MIXTURE),
    Case("mlp.capacity", {"factor": 1.0}, {*TRAINED, *ROUTED}, dropped, MIXTURE),
    Case("mlp.capacity.factor", 1.0, {*TRAINED, *ROUTED}, dropped, {**MIXTURE, "mlp.capacity.factor": 4.0}),
    Case("mlp.capacity.drop", "position", {*TRAINED, *ROUTED}, dropped, FULL),
    Case("mlp.capacity.pad", True, {"rows"}, filled_up, FULL),
]
ELSEWHERE = {
    "preset": "below: it says where the others start from",
    "mixer.keys_of": "tests/model/test_shared_keys.py: it needs kinds of layers",
}
PATTERNS = ("pattern", "lora.targets")
NEEDS_A_GPU = {("mixer.kernel", "flash"), ("mixer.kernel", "triton")}  # tests/kernels/test_attention.py


def choices(cls: type, prefix: str = "") -> set[tuple[str, str]]:
    """(path, word) of every word that a key may have."""
    found: set[tuple[str, str]] = set()
    for name, hint in field_types(cls).items():
        for member in members_of(hint) if name != "blocks" else ():
            words = typing.get_args(member) if typing.get_origin(member) is Literal else ()
            found |= {(prefix + name, word) for word in words}
        for part in part_types(hint):
            found |= choices(part, f"{prefix}{name}.")
    return found


def test_no_key_and_no_choice_is_forgotten():
    paths = every_path(ModelConfig)
    assert {case.key for case in CASES} | ELSEWHERE.keys() == paths.keys()
    defaults = {(path, getattr(owner, name, None)) for path, (owner, name) in paths.items()}
    tried = {(case.key, case.to) for case in CASES if isinstance(case.to, str) and case.key not in PATTERNS}
    assert tried | NEEDS_A_GPU == choices(ModelConfig) - defaults


def once(look):
    """The function look(model), which looks at the same settings once."""
    known = {}

    def get(model: dict):
        key = str(sorted(model.items()))
        if key not in known:
            known[key] = look(model)
        return known[key]

    return get


@pytest.fixture(scope="module")
def seen():
    return once(look)


@pytest.mark.slow(every=4, core=["mixer.qk_norm=whole-mixer.qk_norm=head"])
@pytest.mark.parametrize("case", CASES, ids=str)
def test_it_does_what_it_says_and_nothing_else(seen, case):
    before, after = seen(case.base), seen(case.changed(case.base))
    changed = {
        f.name for f in dataclasses.fields(Seen) if not same(getattr(before, f.name), getattr(after, f.name))
    }
    if before.router.keys() != after.router.keys():
        changed.add("router")
    assert changed == case.changes, changed ^ case.changes
    assert case.right(before, after)


# Other kinds of models than the one that CASES start from. A key that one of their modules does not read
# must be refused there, or named as one without effect.
OTHER_KINDS = {
    "latent attention": {**LATENT, "mixer.q_rank": 20},
    "mixture": SHARED,
    "learned positions": {
        **LEARNED, "norm.kind": "layernorm", "mlp.activation": "gelu", "mlp.bias": True, "mixer.bias": "all",
    },
}


@pytest.mark.slow(every=14)
@pytest.mark.parametrize("kind", OTHER_KINDS)
@pytest.mark.parametrize("case", CASES, ids=str)
def test_it_acts_in_every_kind_of_model_or_is_refused(seen, case, kind):
    base = {**OTHER_KINDS[kind], **case.base}
    keyed = case.changed(base)
    if keyed == base:
        return  # it is what this kind is made of
    try:
        before, after = seen(base), seen(keyed)
    except config.ConfigError:
        return
    tree = {"model": {"preset": "llama2-tiny", **sized(keyed)}, "train": TRAIN, "log": {"name": "keys"}}
    without_effect = {path for path, _, _ in unused.find_unused(from_tree(tree), 1)}
    if f"model.{case.key}" in without_effect:
        return
    fields = [field.name for field in dataclasses.fields(Seen)]
    is_new = before.router.keys() != after.router.keys()
    assert is_new or any(not same(getattr(before, name), getattr(after, name)) for name in fields), (
        f"model.{case.key}={case.to} does nothing beside {base}: refuse it in config/reading/rules.py, "
        "or name it in config/reading/unused.py"
    )


@pytest.mark.parametrize("name", ["gpt2-tiny", "deepseek-v3-tiny"])
def test_a_preset_is_what_models_yaml_has(name):
    entry = {key: value for key, value in presets()[name].items() if key != "recipe"}
    model = from_tree({"model": {"preset": name}}).model
    has = {path: None if value == "none" else value for path, value in flatten_tree(entry).items()}
    blocks = {path: has.pop(path) for path in list(has) if path.startswith("blocks.")}
    for path, value in leaves(model):
        if path == "blocks":
            assert all(value_at(model, each) == value for each, value in blocks.items())
            continue
        part, _, key = path.rpartition(".")
        default = getattr(type(value_at(model, part) if part else model), key, None)
        assert value == {"preset": name, **has}.get(path, default), path
    assert len(entry) > 5 and has.keys() <= {path for path, _ in leaves(model)}
    over = from_tree({"model": {"preset": name, "layers": 7}}).model
    assert over.layers == 7 and over.hidden == entry["hidden"]
