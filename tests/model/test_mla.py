"""Latent attention against its definition, its small cache against no cache, DeepSeek's order of the rotary
channels.
"""

from dataclasses import replace

import pytest
import torch
from small_runs import check_beside, compute_weights, mixer_weights

from build import build_run
from config.reading.tiny import tiny_config
from config.tree import with_values
from kernels import rope
from model.context import GenerationCache, forward_context
from model.generate import generate
from model.mlp import MLPConfig
from parallel.topology.mesh import Mesh

TWINS = ("deepseek-v2-lite-tiny", "deepseek-v3-tiny")  # without and with a latent of the queries
ROPE = pytest.mark.parametrize("mixer", [{}, {"rope": None}], ids=("rope", "without positions"))


def made(name, **mixer):
    cfg = tiny_config(name)
    cfg = replace(cfg, model=replace(cfg.model, layers=2, mlp=MLPConfig(width=48), blocks=(), pattern=None))
    cfg = with_values(cfg, {f"model.mixer.{key}": value for key, value in mixer.items()})
    return build_run(cfg, Mesh.single(), torch.device("cpu"), None, 1)


def attention_of(run):
    """The first block's attention, with weights large enough that the softmax is far from flat."""
    mla = run.stages[0].blocks[0].mixer
    for p in mla.parameters():
        p.data.mul_(10 if p.dim() > 1 else 1).add_(0 if p.dim() > 1 else torch.linspace(-0.5, 0.5, len(p)))
    return mla


@torch.no_grad()
def definition(mla, m, x, freq, grow):
    """Term by term, head by head, on one sequence [s, d]; pairs of neighbours turn as complex numbers."""

    def norm(t, w):
        return t / (t.square().mean(-1, keepdim=True) + m.norm_eps).sqrt() * w

    def turned(t):
        angle = torch.arange(len(t), dtype=torch.float64)[:, None] * freq
        pairs = torch.view_as_complex(t.unflatten(-1, (-1, 2)).contiguous())
        return torch.view_as_real(pairs * torch.polar(torch.ones_like(angle), angle)).flatten(-2)

    down = x @ mla.down.t()
    latent, key = down[:, -(m.kv_rank + m.rope_dim) :].split((m.kv_rank, m.rope_dim), -1)
    q = norm(down[:, : m.q_rank], mla.q_norm) @ mla.q_up.t() if m.q_rank else x @ mla.q.weight.t()
    kv, heads = norm(latent, mla.kv_norm) @ mla.kv_up.t(), []
    for qh, kvh in zip(q.chunk(m.heads, -1), kv.chunk(m.heads, -1)):
        kh, vh = kvh.split((m.nope_dim, m.v_dim), -1)
        scores = qh[:, : m.nope_dim] @ kh.t() + turned(qh[:, m.nope_dim :]) @ turned(key).t()
        scores = scores * grow**2 / (m.nope_dim + m.rope_dim) ** 0.5
        later = torch.ones_like(scores).triu(1).bool()
        heads.append(scores.masked_fill(later, float("-inf")).softmax(-1) @ vh)
    return torch.cat(heads, -1) @ mla.out.weight.t()


@pytest.mark.parametrize("name", TWINS)
def test_latent_attention_is_its_definition(name):
    run = made(name, **{"rope.scaling.mscale": 0.7, "rope.scaling.mscale_all": 0.7, "norm_eps": 0.05})
    m, mla, x = run.cfg.model.mixer, attention_of(run), torch.randn(1, 11, 32, dtype=torch.float64)
    got = mla(x, forward_context(run.cfg, torch.arange(11)[None], None))
    scaling = m.rope.scaling
    limits = scaling.low_freq, scaling.high_freq
    freq = rope.frequencies(m.rope_dim, m.rope.base, scaling.factor, *limits, scaling.original, "yarn")
    want = definition(mla, m, x[0], freq, 1 + 0.07 * torch.tensor(scaling.factor).log().item())
    torch.testing.assert_close(got[0], want, rtol=1e-7, atol=1e-9)


THEIR_NAMES = {
    "q": "q_proj", "q_a": "q_a_proj", "q_norm": "q_a_layernorm", "q_b": "q_b_proj", "o": "o_proj",
    "kv_a": "kv_a_proj_with_mqa", "kv_norm": "kv_a_layernorm", "kv_b": "kv_b_proj",
}  # fmt: skip


@pytest.mark.parametrize("name", TWINS)
def test_without_positions_it_is_that_of_kimi_linear(name):
    from transformers.models.kimi_linear.configuration_kimi_linear import KimiLinearConfig
    from transformers.models.kimi_linear.modeling_kimi_linear import KimiLinearAttention

    run = made(name, rope=None)
    attention_of(run)
    m = run.cfg.model.mixer
    theirs = KimiLinearAttention(KimiLinearConfig(
        hidden_size=32, num_attention_heads=m.heads, num_key_value_heads=m.heads, q_lora_rank=m.q_rank,
        kv_lora_rank=m.kv_rank, qk_nope_head_dim=m.nope_dim, qk_rope_head_dim=m.rope_dim, v_head_dim=m.v_dim,
        num_hidden_layers=1, attn_implementation="eager",
    ), 0).double()
    names = [key.removesuffix(".weight") for key in mixer_weights(compute_weights(run))]
    mask = torch.full((11, 11), float("-inf"), dtype=torch.float64).triu(1)
    check_beside(
        run,
        theirs,
        lambda of: {f"{name}.weight": of(getattr(theirs, THEIR_NAMES[name]).weight) for name in names},
        call=lambda x: theirs(x, mask)[0],
        seq=11,
        bound=1e-5,
    )


@pytest.mark.parametrize("name", TWINS)
def test_the_input_is_kept_once(name):
    """All projections of the input read one tensor, which a mixture's other bytes would hide."""
    run, x = made(name), torch.randn(1, 11, 32, dtype=torch.float64, requires_grad=True)
    mla, kept = attention_of(run), {}  # {storage: a tensor there with the values of the input}

    def note(tensor):
        if tensor.numel() == x.numel() and torch.equal(tensor.reshape(x.shape), x):
            kept[tensor.untyped_storage().data_ptr()] = tensor
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(note, lambda tensor: tensor):
        mla(x, forward_context(run.cfg, torch.arange(11)[None], None))
    assert list(kept) == [x.untyped_storage().data_ptr()]


@pytest.mark.parametrize("name", TWINS)
def test_neighbours_as_pairs_are_halves_of_reordered_weights(name):
    pairs, plain = made(name), made(name, **{"rope.pairs": False})
    m, x = pairs.cfg.model.mixer, torch.randn(2, 9, 32, dtype=torch.float64)
    a, b = attention_of(pairs), attention_of(plain)
    order = rope.pairs_to_halves(torch.arange(m.rope_dim))

    def reorder(rows, first):
        """The rows' order with the rotary ones, which begin at `first`, as halves."""
        return torch.cat((rows[:first], rows[first:][order]))

    q, width = (b.q_up if m.q_rank else b.q.weight).data, m.nope_dim + m.rope_dim
    heads = [reorder(torch.arange(h * width, (h + 1) * width), m.nope_dim) for h in range(m.heads)]
    q.copy_(q[torch.cat(heads)])
    b.down.data.copy_(b.down[reorder(torch.arange(len(b.down)), len(b.down) - m.rope_dim)])
    ctx = forward_context(pairs.cfg, torch.arange(9).expand(2, -1), None)
    torch.testing.assert_close(a(x, ctx), b(x, ctx), rtol=1e-12, atol=1e-12)
    b.down.data.copy_(a.down)
    assert (a(x, ctx) - b(x, ctx)).abs().max() > 1e-3


@ROPE
@pytest.mark.parametrize("name", TWINS)
@torch.no_grad()
def test_the_cache_holds_the_latent_and_changes_nothing(name, mixer):
    run = made(name, **mixer)
    for stage in run.stages.values():
        for p in stage.parameters():
            p.data.mul_(5 if p.dim() > 1 else 1)
    m, ids, cache = run.cfg.model, torch.randint(125, (1, 20)), GenerationCache()
    place = torch.arange(20)[None]
    cuts = (0, 7, 8, 9, 13, 14, 20)  # a prompt, single tokens, several at once
    for first, last in zip(cuts, cuts[1:]):
        got = run.logits(ids[:, first:last], place[:, first:last], cache, last - first - 1)
        want = run.logits(ids, place, None, last - 1)
        torch.testing.assert_close(got, want, rtol=1e-10, atol=1e-10)
    widths = {"keys": m.mixer.kv_rank, "values": m.mixer.rope_dim}
    want = {(layer, name): (1, 20, width) for layer in range(m.layers) for name, width in widths.items()}
    assert {place: tuple(t.shape) for place, t in cache.kept.items()} == want


@ROPE
@pytest.mark.parametrize("name", TWINS)
def test_generation_with_the_cache_is_generation_without(name, mixer):
    run = made(name, **mixer)
    words = [list(generate(run.logits, [5, 7, 11], 12, temperature=1.0, seed=3, multiple=n)) for n in (1, 2)]
    assert words[0] == words[1] and len(words[0]) == 12


@pytest.mark.parametrize("kind", ["reference", "sdpa", "auto"])
def test_every_kernel_takes_values_of_another_width(kind):
    a, b = made(TWINS[0]), made(TWINS[0], kernel=kind)
    x = torch.randn(2, 9, 32, dtype=torch.float64)
    ctx = forward_context(a.cfg, torch.arange(9).expand(2, -1), None)
    torch.testing.assert_close(attention_of(a)(x, ctx), attention_of(b)(x, ctx))
