"""Attention with every form that a config gives it, against the formula, head by head in fp64, with the
gradient of its input; and its cache of keys and values against the full pass."""

import math

import pytest
import torch

from build import build_run
from config.reading.tiny import tiny_config
from config.tree import with_values
from kernels import rope
from model.attention import AttentionConfig, ChannelGate, HeadGate
from model.context import GenerationCache, forward_context
from model.rope import GrowthConfig, Llama3Scaling, LongRopeScaling, RopeConfig
from parallel.topology.mesh import Mesh

S, D = 13, 8
PLAIN = {"heads": 4, "kv_heads": 2, "head_dim": D}
LONGROPE = LongRopeScaling(factor=4.0, original=4, short=(1.0, 1.5), long=(1.0, 3.0))
WITHIN = LongRopeScaling(factor=1.0, original=S, short=(1.0, 1.1, 1.3, 2.0), long=(9.0,) * 4)
FORMS = {
    "plain": {},
    "no rope": {"rope": None},
    "base": {"rope": RopeConfig(base=50.0)},
    "scaling": {"rope": RopeConfig(base=50.0, scaling=Llama3Scaling(factor=4.0, original=8))},
    "longrope": {"rope": RopeConfig(base=50.0, share=0.5, scaling=LONGROPE)},
    "longrope within": {"rope": RopeConfig(base=50.0, scaling=WITHIN)},
    "share": {"rope": RopeConfig(base=50.0, share=0.5)},
    "pairs": {"rope": RopeConfig(base=50.0, pairs=True)},
    "pairs of a share": {"rope": RopeConfig(base=50.0, pairs=True, share=0.75), "qk_norm": "head"},
    "normed pairs": {"rope": RopeConfig(base=50.0, pairs=True), "qk_norm": "head"},
    "norm of heads": {"qk_norm": "head"},
    "norm of all": {"qk_norm": "whole"},
    "window": {"window": 4},
    "chunk": {"chunk": 5},
    "chunk and window": {"chunk": 5, "window": 3},
    "scale": {"scale": 0.7},
    "softcap": {"softcap": 2.0},
    "sinks": {"sinks": True},
    "values": {
        "value_dim": 6, "value_scale": 0.7, "qk_norm": "head", "gate": ChannelGate(), "sinks": True,
        "bias": "qkv",
    },
    "values of whole norms": {
        "value_dim": 12, "rope": RopeConfig(base=50.0, share=0.5), "qk_norm": "whole",
    },
    "biased": {"bias": "all"},
    "norm after rope": {"qk_norm": "after_rope", "rope": RopeConfig(base=50.0, share=0.5)},
    "norm without weight": {"qk_norm": "unweighted"},
    "gate of channels": {"gate": ChannelGate()},
    "biased gate of heads": {"gate": HeadGate(), "bias": "all"},
    "softplus gate": {"gate": HeadGate(by="softplus")},
    "growth": {"growth": GrowthConfig(rate=0.7, every=3)},
    "growth from one": {"growth": GrowthConfig(rate=0.7, every=3, first=1), "rope": None},
    "all": {
        "scale": 0.7, "softcap": 2.0, "sinks": True, "chunk": 5, "qk_norm": "head", "gate": ChannelGate(),
        "growth": GrowthConfig(every=2),
        "rope": RopeConfig(base=50.0, share=0.5),
    },
}
DOCUMENTS = {"one document": None, "documents": [0] * 6 + [1] * 7}


def attention_of(form):
    mixer = AttentionConfig(**{**PLAIN, **form})
    cfg = with_values(tiny_config("llama3-tiny"), {"model.layers": 1, "model.mixer": mixer})
    run = build_run(cfg, Mesh.single(), torch.device("cpu"), None, 1)
    attn = run.stages[0].blocks[0].mixer
    for number, p in enumerate(attn.parameters()):
        numbers = torch.Generator().manual_seed(number)
        p.data.copy_(0.4 * torch.randn(p.shape, generator=numbers, dtype=torch.float64) + (p.dim() == 1))
    return run.cfg, attn, mixer


def linear(layer, x):
    bias = getattr(layer, "bias", None)
    return x @ layer.weight.t() + (0 if bias is None else bias)


def turned(x, settings, positions):
    """x [s, d], one head: the first channels, as pairs of neighbours or as pairs of both halves."""
    rotated = round(settings.share * D)
    scaling = settings.scaling
    limits, by_pair, multiplied = (), 1, 1
    if isinstance(scaling, LongRopeScaling):
        by_pair = torch.tensor(scaling.long if S > scaling.original else scaling.short, dtype=torch.float64)
        multiplied = (1 + math.log(scaling.factor, scaling.original)) ** 0.5
    elif scaling is not None:
        limits = (scaling.factor, scaling.low_freq, scaling.high_freq, scaling.original)
    angle = positions[:, None] * rope.frequencies(rotated, settings.base, *limits) / by_pair
    first, rest = x[:, :rotated], x[:, rotated:]
    if settings.pairs:
        pairs = first.unflatten(-1, (-1, 2))
    else:
        pairs = torch.stack(first.chunk(2, -1), -1)
    cos, sin = multiplied * angle.cos(), multiplied * angle.sin()
    left = pairs[..., 0] * cos - pairs[..., 1] * sin
    right = pairs[..., 0] * sin + pairs[..., 1] * cos
    return torch.cat((left, right, rest), -1)  # their order does not matter where q and k have the same


def visible(mixer, documents):
    """[s, s]: which query sees which key."""
    document = torch.zeros(S, dtype=torch.int64) if documents is None else torch.tensor(documents)
    positions = torch.tensor([int((document[:t] == document[t]).sum()) for t in range(S)])
    back = positions[:, None] - positions
    seen = (document[:, None] == document) & (back >= 0)
    if mixer.window:
        seen &= back < mixer.window
    if mixer.chunk:
        seen &= positions[:, None] // mixer.chunk == positions // mixer.chunk
    return seen, positions


def by_the_formula(attn, mixer, x, documents):
    """x [s, hidden]."""
    seen, positions = visible(mixer, documents)
    v_dim = mixer.value_dim or D
    q, k, v = linear(attn.qkv, x).split((4 * D, 2 * D, 2 * v_dim), -1)
    q, k, v = q.unflatten(-1, (4, D)), k.unflatten(-1, (2, D)), v.unflatten(-1, (2, v_dim))
    v = mixer.value_scale * v

    def norm(t, weight, dims):
        return t / (t.square().mean(dims, keepdim=True) + attn.eps).sqrt() * weight.view(-1, D)

    if mixer.qk_norm in ("head", "whole"):
        dims = -1 if mixer.qk_norm == "head" else (-2, -1)
        q, k = norm(q, attn.q_norm, dims), norm(k, attn.k_norm, dims)
    out = []
    for number in range(4):
        query, key = q[:, number], k[:, number // 2]
        if mixer.rope:
            query, key = turned(query, mixer.rope, positions), turned(key, mixer.rope, positions)
        if mixer.qk_norm == "after_rope":
            query, key = norm(query, attn.q_norm, -1), norm(key, attn.k_norm, -1)
        if mixer.qk_norm == "unweighted":
            query, key = norm(query, torch.ones(D), -1), norm(key, torch.ones(D), -1)
        if mixer.growth:
            group = (positions + mixer.growth.first) // mixer.growth.every
            query = query * (1 + mixer.growth.rate * torch.log(1 + group.double()))[:, None]
        scores = query @ key.t() * (mixer.scale or D**-0.5)
        if mixer.softcap:
            scores = mixer.softcap * torch.tanh(scores / mixer.softcap)
        weights = scores.exp() * seen
        total = weights.sum(-1, keepdim=True)
        if mixer.sinks:
            total = total + attn.sinks[number].exp()
        out.append(weights / total @ v[:, number // 2])
    out = torch.stack(out, 1)  # [s, h, d]
    if mixer.gate:
        gate = torch.exp(linear(attn.gate, x).view(S, 4, -1))
        out = out * (torch.log(1 + gate) if mixer.gate.by == "softplus" else gate / (1 + gate))
    out = out.flatten(1)
    return linear(attn.out, out)


@pytest.mark.parametrize("documents", DOCUMENTS.values(), ids=DOCUMENTS)
@pytest.mark.parametrize("form", FORMS.values(), ids=FORMS)
def test_it_is_the_formula(form, documents):
    cfg, attn, mixer = attention_of(form)
    x = torch.randn(1, S, 32, dtype=torch.float64, generator=torch.Generator().manual_seed(7))
    docs = None if documents is None else torch.tensor([documents])
    positions = visible(mixer, documents)[1][None]
    x.requires_grad_()
    got = attn(x, forward_context(cfg, positions, docs))
    want = by_the_formula(attn, mixer, x[0], documents)
    torch.testing.assert_close(got[0], want, rtol=1e-10, atol=1e-12)

    upstream = torch.randn(want.shape, dtype=torch.float64, generator=torch.Generator().manual_seed(8))
    (mine,) = torch.autograd.grad((got[0] * upstream).sum(), x, retain_graph=True)
    (theirs,) = torch.autograd.grad((want * upstream).sum(), x)
    torch.testing.assert_close(mine, theirs, rtol=1e-9, atol=1e-11)


@torch.no_grad()
@pytest.mark.parametrize("form", FORMS.values(), ids=FORMS)
def test_the_cache_changes_nothing(form):
    cfg, attn, _ = attention_of(form)
    x = torch.randn(1, S, 32, dtype=torch.float64, generator=torch.Generator().manual_seed(7))
    positions = torch.arange(S)[None]
    whole = attn(x, forward_context(cfg, positions, None))
    cache, parts = GenerationCache(), []
    for first, last in ((0, 6), (6, 7), (7, 11), (11, 12), (12, S)):
        context = forward_context(cfg, positions[:, first:last], None, cache=cache)
        parts.append(attn(x[:, first:last], context))
        cache.length = last
    torch.testing.assert_close(torch.cat(parts, 1), whole, rtol=1e-10, atol=1e-12)
