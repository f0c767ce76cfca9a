"""A scale, a soft cap, sinks and chunks against a dense formula and against the models that have them: values
and the gradients of q, k, v and sinks, in every implementation.
"""

import math
import types

import pytest
import torch
from dense_mask import dense_attention

from kernels import attention as kernel
from kernels import partial_attention as parts
from kernels.attention import BLOCK, attention
from kernels.attention_mask import make_attention_mask
from kernels.attention_scores import ScoreForm
from kernels.largest_score import largest_scores
from kernels.partial_attention import attention_part, merge_partial, partial_backward

CPU = torch.device("cpu")
FORMS = {
    "scale": {"scale": 0.3},
    "soft cap": {"softcap": 1.5},
    "sinks": {"sinks": True},
    "all": {"scale": 0.6, "softcap": 2.0, "sinks": True},
}
# first query, queries, first key, keys, window, documents, chunk
MASKS = {
    "causal": (0, 37, 0, 37, None, False, None),
    "window": (0, 37, 0, 37, 9, False, None),
    "documents": (0, 37, 0, 37, None, True, None),
    "chunks": (0, 37, 0, 37, None, False, 10),
    "all": (0, 37, 0, 37, 9, True, 10),
    "blocks": (0, BLOCK + 9, 0, BLOCK + 9, None, True, 50),
    "cache": (30, 7, 0, 37, None, False, None),
    "chunks of a cache": (30, 7, 0, 37, None, False, 10),
}


def draw(name, d=6, e=4, dtype=torch.float64, device=CPU, sizes=(2, 6, 3)):
    """(q, k, v, sinks), the gradient of the output, the mask."""
    query, s_q, key, s_k, window, documents, chunk = MASKS[name]
    b, h, g = sizes
    shapes = ((b, s_q, h, d), (b, s_k, g, d), (b, s_k, g, e), (h,))
    leaves = [torch.randn(*shape, device=device).to(dtype).requires_grad_() for shape in shapes]
    docs = (torch.rand(b, query + s_q) < 0.1).cumsum(1).to(device) if documents else None
    mask = make_attention_mask(query, s_q, key, s_k, window, docs, device, chunk=chunk)
    return leaves, torch.randn(b, s_q, h, e, device=device).to(dtype), mask


def with_gradients(function, leaves, form, dy):
    """The output and the gradients of q, k, v and, if they take part, of the sinks."""
    q, k, v, sinks = leaves
    has_sinks = form.get("sinks", False)
    out = function(q, k, v, **{**form, "sinks": sinks if has_sinks else None})
    return out, *torch.autograd.grad(out, leaves if has_sinks else leaves[:3], dy)


@pytest.mark.slow(every=2)
@pytest.mark.parametrize("kind", ["auto", "reference"])
@pytest.mark.parametrize("name", MASKS)
@pytest.mark.parametrize("form", FORMS)
def test_the_definition(name, form, kind):
    leaves, dy, mask = draw(name)
    got = with_gradients(lambda *qkv, **f: attention(*qkv, mask, kind, **f), leaves, FORMS[form], dy)
    want = with_gradients(
        lambda *qkv, **f: dense_attention(*qkv, mask.dense_mask, **f), leaves, FORMS[form], dy
    )
    for a, c in zip(got, want):
        torch.testing.assert_close(a, c, rtol=1e-10, atol=1e-10)


@pytest.mark.parametrize("form", FORMS)
def test_kept_or_made_again(form, monkeypatch):
    """Beyond 16 d tokens the probabilities are not kept."""
    leaves, dy, mask = draw("blocks")
    kept = with_gradients(lambda *qkv, **f: attention(*qkv, mask, **f), leaves, FORMS[form], dy)
    monkeypatch.setattr(kernel, "KEEP_PROBABILITIES", 1)
    again = with_gradients(lambda *qkv, **f: attention(*qkv, mask, **f), leaves, FORMS[form], dy)
    assert all(torch.equal(a, c) for a, c in zip(kept, again))


def test_sdpa_has_the_scale_alone(capfd):
    leaves, dy, mask = draw("cache")
    got, want = (
        with_gradients(lambda q, k, v, **f: attention(q, k, v, mask, kind, **f), leaves, {"scale": 0.3}, dy)
        for kind in ("sdpa", "reference")
    )
    torch.testing.assert_close(got, want, rtol=1e-10, atol=1e-10)
    assert capfd.readouterr().err == ""
    attention(*leaves[:3], mask, "sdpa", softcap=1.0, sinks=leaves[3])
    assert "sdpa: not for float64 on cpu, head dims 6 and 4, with this mask, with a soft cap, with sinks" in (
        capfd.readouterr().err
    )


def test_bf16_rounds_as_plain_attention_does():
    """As many roundings as without them, but for one of the output, by the sinks."""
    errors = {}
    for form in ({}, FORMS["all"]):
        leaves, dy, mask = draw("blocks", d=32, e=32, dtype=torch.bfloat16)
        exact = [x.detach().double().requires_grad_() for x in leaves]
        got = with_gradients(lambda *qkv, **f: attention(*qkv, mask, **f), leaves, form, dy)
        want = with_gradients(
            lambda *qkv, **f: dense_attention(*qkv, mask.dense_mask, **f), exact, form, dy.double()
        )
        assert {x.dtype for x in got} == {torch.bfloat16}
        errors[bool(form)] = [float(((a.double() - c).norm() / c.norm()).detach()) for a, c in zip(got, want)]
    plain = max(errors[False])
    assert max(errors[True]) < 2 * plain < 0.01, errors


@pytest.mark.parametrize("form", [{"scale": 0.0}, {"scale": -1.0}, {"softcap": 0.0}, {"softcap": math.nan}])
def test_numbers_that_are_not_above_0(form):
    leaves, _, mask = draw("causal")
    with pytest.raises(ValueError, match=rf"attention: {next(iter(form))} is .* must be above 0"):
        attention(*leaves[:3], mask, **form)


def test_a_query_without_a_key():
    """All of its attention is the sink's."""
    leaves, dy, _ = draw("causal")
    mask = torch.rand(2, 1, 37, 37) < 0.3
    mask[0, 0, 5] = False
    out, lse = attention_part(*(x.detach() for x in leaves[:3]), mask)
    lse.requires_grad_()
    out = kernel.join_sinks(out, lse, leaves[3])
    assert (out[0, 5] == 0).all()
    assert all(x.isfinite().all() for x in torch.autograd.grad(out, (lse, leaves[3]), dy))


# ---- models that have them ---------------------------------------------------------------------------------

# {model of transformers: (form, mask)}
MODELS = {
    "gemma2": ({"scale": 0.25, "softcap": 2.0}, "window"),
    "gpt_oss": ({"scale": 6**-0.5, "sinks": True}, "window"),
    "llama4": ({"scale": 6**-0.5}, "chunks"),
}


@pytest.mark.parametrize("model", MODELS)
def test_models_of_transformers(model):
    """The function of its eager attention, with our mask; test_attention_mask.py compares masks."""
    theirs = pytest.importorskip(f"transformers.models.{model}.modeling_{model}")
    form, name = MODELS[model]
    leaves, dy, mask = draw(name, dtype=torch.float32)  # gemma2's softmax is in fp32

    def by_transformers(q, k, v, scale, softcap=None, sinks=None):
        module = types.SimpleNamespace(num_key_value_groups=2, training=False, sinks=sinks)
        hidden = torch.zeros(mask.dense_mask.shape).masked_fill(~mask.dense_mask, -torch.inf)
        options = {} if softcap is None else {"softcap": softcap}
        q, k, v = (x.transpose(1, 2) for x in (q, k, v))
        return theirs.eager_attention_forward(module, q, k, v, hidden, scaling=scale, **options)[0]

    got = with_gradients(lambda *qkv, **f: attention(*qkv, mask, **f), leaves, form, dy)
    want = with_gradients(by_transformers, leaves, form, dy)
    for a, c in zip(got, want):
        torch.testing.assert_close(a, c, rtol=1e-5, atol=1e-5)


# ---- parts -------------------------------------------------------------------------------------------------

@pytest.mark.parametrize("form", FORMS)
def test_parts_make_the_whole(form):
    """Merged, with the sinks joined once at the end."""
    leaves, dy, mask = draw("causal")
    score_form = ScoreForm(FORMS[form].get("scale"), FORMS[form].get("softcap"))
    q, k, v, sinks = (x.detach() for x in leaves)
    keys = [slice(0, 20), slice(20, 37)]
    out, lse = torch.zeros_like(dy), dy.new_full(dy.shape[:3], -torch.inf)
    for at in keys:
        part = attention_part(q, k[:, at], v[:, at], mask.dense_mask[..., at], form=score_form)
        merge_partial(out, lse, *part)
    joined = kernel.join_sinks(out, lse, sinks) if FORMS[form].get("sinks") else out
    want = with_gradients(
        lambda *qkv, **f: dense_attention(*qkv, mask.dense_mask, **f), leaves, FORMS[form], dy
    )
    torch.testing.assert_close(joined, want[0], rtol=1e-10, atol=1e-10)


# ---- Triton ------------------------------------------------------------------------------------------------

TRITON_MASKS = ("window", "documents", "chunks", "all", "cache", "chunks of a cache")


@pytest.mark.slow(every=5)
@pytest.mark.parametrize("name", TRITON_MASKS)
@pytest.mark.parametrize("dtype, bound", [(torch.float32, 2e-5), (torch.bfloat16, 0.01)])
@pytest.mark.parametrize("form", ["scale", "soft cap", "all"])
def test_triton(small_blocks, name, dtype, bound, form):
    """Blocks of 16 and 32."""
    (q, k, v, sinks), dy, mask = draw(name, d=24, e=16, dtype=dtype, device=small_blocks, sizes=(1, 4, 2))
    leaves = [q, k, v, sinks.detach().float().requires_grad_()]
    exact = [x.detach().double().requires_grad_() for x in leaves]
    got = with_gradients(lambda *qkv, **f: attention(*qkv, mask, "triton", **f), leaves, FORMS[form], dy)
    want = with_gradients(
        lambda *qkv, **f: dense_attention(*qkv, mask.dense_mask, **f), exact, FORMS[form], dy.double()
    )
    for a, c in zip(got, want):
        assert (a.double() - c).norm() <= bound * c.norm(), (form, name)


@pytest.mark.slow(every=2)
@pytest.mark.parametrize("softcap", [1.5, 50.0])
def test_triton_parts(small_blocks, softcap):
    """The logsumexp of the forward, and gradients added to what is there, as a ring does it."""
    form = ScoreForm(softcap=softcap, scale=0.5)
    (q, k, v, _), dy, mask = draw("all", d=16, e=16, dtype=torch.float32, device=small_blocks)
    q, k, v = (x.detach() for x in (q, k, v))
    exact = [x.double() for x in (q, k, v)]
    out, lse = parts.partial_reference(*exact, mask.dense_mask, form)
    got, got_lse = attention_part(q, k, v, mask, form=form)
    torch.testing.assert_close((got.double(), got_lse.double()), (out, lse), rtol=2e-5, atol=2e-5)
    delta = (dy * out).sum(-1)
    want = parts.partial_backward_reference(dy.double(), *exact, mask.dense_mask, lse, delta, form)
    into = tuple(torch.ones_like(x) for x in (q, k, v))
    partial_backward(dy, q, k, v, mask, got_lse, delta.float(), into, add=True, form=form)
    for a, c in zip(into, want):
        torch.testing.assert_close(a.double() - 1, c, rtol=1e-4, atol=1e-4)


def test_what_triton_runs_where_no_library_has_it(small_blocks, capfd):
    """Of plain causal attention in 16 bits, SDPA would be the choice."""
    (q, k, v, sinks), _, mask = draw("causal", d=16, e=16, dtype=torch.bfloat16, device=small_blocks)
    if small_blocks.type == "cuda":
        pytest.skip("a library may be installed")
    for form, what in (({"softcap": 1.5}, "a soft cap"), ({"sinks": sinks}, "sinks")):
        out = attention(q, k, v, mask, **form)
        assert torch.equal(out, attention(q, k, v, mask, "triton", **form))
        assert f"no installed library takes {what} in this call" in capfd.readouterr().err


@pytest.mark.parametrize("chunk", [1, 100, 1 << 24])
@pytest.mark.parametrize("form", ["scale", "soft cap"])
@pytest.mark.parametrize("name", MASKS)
def test_the_largest_score_of_a_head_is_that_of_all_its_scores(monkeypatch, name, form, chunk):
    """Of those that the mask shows, in chunks of one query, of some and of all."""
    monkeypatch.setattr("kernels.largest_score.CHUNK_SCORES", {"cpu": chunk})
    (q, k, _, _), _, mask = draw(name)
    scores = torch.einsum("bqhd,bkhd->bhqk", q, k.repeat_interleave(2, 2)).detach()
    scores = scores * FORMS[form].get("scale", 6**-0.5)
    if form == "soft cap":
        scores = 1.5 * torch.tanh(scores / 1.5)
    expected = scores.masked_fill(~mask.dense_mask, -math.inf).amax((0, 2, 3))
    found = largest_scores(q, k, mask, ScoreForm(**FORMS[form]))
    torch.testing.assert_close(found, expected, rtol=1e-12, atol=0)
    q.data[1, 3, 2, 0] = math.nan
    assert largest_scores(q, k, mask, ScoreForm(**FORMS[form])).isnan().nonzero().flatten().tolist() == [2]
