"""RoPE whose pairs are neighbouring channels, in attention: by the formula, with norms of q and k."""

import pytest
import torch

from build import build_run
from config import AttentionConfig, RopeConfig
from config.tree import with_values
from model.context import forward_context
from parallel.topology.mesh import Mesh
from proof.verify.tiny_config import tiny_config

S = 11


@torch.no_grad()
def by_the_formula(attn, mixer, x):
    """x [s, hidden]: pairs of neighbours turn as complex numbers, head by head."""
    qkv = x @ attn.qkv.weight.t()
    heads = qkv.view(S, -1, mixer.head_dim).unbind(1)
    q, k, v = heads[: mixer.heads], heads[mixer.heads : -mixer.kv_heads], heads[-mixer.kv_heads :]
    angle = torch.arange(S, dtype=torch.float64)[:, None] * mixer.rope.base ** -(
        torch.arange(0, mixer.head_dim, 2, dtype=torch.float64) / mixer.head_dim
    )

    def norm(t, weight):
        return t / (t.square().mean(-1, keepdim=True) + attn.eps).sqrt() * weight

    def turned(t):
        pairs = torch.view_as_complex(t.unflatten(-1, (-1, 2)).contiguous())
        return torch.view_as_real(pairs * torch.polar(torch.ones_like(angle), angle)).flatten(-2)

    out = []
    for number, query in enumerate(q):
        group = number * mixer.kv_heads // mixer.heads
        key = k[group]
        if mixer.qk_norm:
            query, key = norm(query, attn.q_norm), norm(key, attn.k_norm)
        scores = turned(query) @ turned(key).t() / mixer.head_dim**0.5
        hidden = torch.ones_like(scores).triu(1).bool()
        out.append(scores.masked_fill(hidden, float("-inf")).softmax(-1) @ v[group])
    return torch.cat(out, -1) @ attn.out.weight.t()


@pytest.mark.parametrize("qk_norm", [None, "head"])
def test_neighbours_turn_together(qk_norm):
    rope = RopeConfig(base=50.0, pairs=True)
    mixer = AttentionConfig(heads=4, kv_heads=2, head_dim=8, qk_norm=qk_norm, rope=rope)
    cfg = with_values(tiny_config("llama3-tiny"), {"model.layers": 1, "model.mixer": mixer})
    run = build_run(cfg, Mesh.single(), torch.device("cpu"), None, 1)
    attn = run.stages[0].blocks[0].attn
    for p in attn.parameters():
        p.data.mul_(10).add_(0 if p.dim() > 1 else torch.linspace(-0.5, 0.5, len(p)))
    x = torch.randn(1, S, 32, dtype=torch.float64)
    got = attn(x, forward_context(run.cfg, torch.arange(S)[None], None))
    torch.testing.assert_close(got[0], by_the_formula(attn, mixer, x[0]), rtol=1e-9, atol=1e-11)
