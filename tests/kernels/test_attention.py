"""Blocked attention against the definition: values and gradients, every mask, odd shapes."""

import functools

import pytest
import torch
from dense_mask import visible_keys
from torch.nn.attention import SDPBackend
from training import bound, results_of

from kernels import attention as kernel
from kernels.attention import BLOCK, attention
from kernels.attention_libraries import LIBRARIES, library_attention, usable_libraries
from kernels.attention_mask import DocumentCounts, make_attention_mask
from kernels.partial_attention import partial_backward_reference, partial_reference

SHAPES = {  # b, s, heads, kv heads, d
    "one token": (1, 1, 1, 1, 2),
    "three kv heads": (2, 37, 6, 3, 6),
    "one block": (1, BLOCK, 2, 2, 16),
    "ragged blocks": (2, BLOCK + 3, 3, 1, 16),
    "recomputed": (1, 2 * BLOCK + 5, 2, 1, 4),  # longer than 16 d: the probabilities are not kept
}


def inputs(b, s, h, g, d, dtype=torch.float64, how="heads"):
    """q, k, v; from one merged projection, or lying head by head as kernels/rope.py leaves them."""
    if how == "merged":
        merged = torch.randn(b, s, h + 2 * g, d, dtype=dtype, requires_grad=True)
        return merged, merged.split((h, g, g), 2)
    merged = torch.randn(b, h + 2 * g, s, d, dtype=dtype, requires_grad=True)
    return merged, merged.transpose(1, 2).split((h, g, g), 2)


def masks(b, s):
    place = torch.arange(s)
    docs = (torch.rand(b, s) < 0.1).cumsum(1).int()
    yield "causal", None
    yield "window", visible_keys(place, place, max(1, s // 3))
    yield "documents", visible_keys(place, place, None, docs, docs)
    yield "both", visible_keys(place, place, 5, docs, docs)


@pytest.mark.parametrize("how", ["heads", "merged"])
@pytest.mark.parametrize("shape", SHAPES)
def test_blocks_are_the_definition(shape, how):
    b, s, *_ = SHAPES[shape]
    merged, qkv = inputs(*SHAPES[shape], how=how)
    for name, mask in masks(b, s):
        out, want = attention(*qkv, mask), attention(*qkv, mask, "reference")
        dy = torch.randn_like(out)
        grad, grad_want = (torch.autograd.grad(x, merged, dy, retain_graph=True)[0] for x in (out, want))
        torch.testing.assert_close(out, want, rtol=1e-12, atol=1e-12, msg=lambda m, name=name: f"{name}: {m}")
        torch.testing.assert_close(
            grad, grad_want, rtol=1e-11, atol=1e-11, msg=lambda m, name=name: f"{name}: {m}"
        )


def test_gradcheck():
    merged, _ = inputs(1, 5, 4, 2, 4)
    assert torch.autograd.gradcheck(lambda x: attention(*x.transpose(1, 2).split((4, 2, 2), 2), None), merged)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_rounding_is_no_worse_than_sdpas(dtype):
    _, qkv = inputs(2, 200, 4, 2, 32)
    exact = [t.detach().to(dtype).double().requires_grad_() for t in qkv]
    dy = torch.randn(2, 200, 4, 32).to(dtype)
    want = (attention(*exact, None, "reference"),)
    want += torch.autograd.grad(want[0], exact, dy.double())

    def error(kind):
        leaves = [t.detach().to(dtype).requires_grad_() for t in exact]
        got = (attention(*leaves, None, kind),)
        got += torch.autograd.grad(got[0], leaves, dy)
        return torch.stack([(a.double() - b).norm() / b.norm() for a, b in zip(got, want)])

    ours, sdpa = error("auto"), error("sdpa")
    assert ours.norm() <= 1.1 * sdpa.norm() and (ours <= 2 * sdpa).all(), (ours, sdpa)


def test_equal_twice():
    merged, qkv = inputs(2, 300, 4, 2, 8, torch.bfloat16)
    a, b = (torch.autograd.grad(attention(*qkv, None).sum(), merged, retain_graph=True)[0] for _ in range(2))
    assert torch.equal(a, b)


def test_kept_or_made_again_is_the_same_bits(monkeypatch):
    """s = 16 d keeps the probabilities."""
    merged, qkv = inputs(1, 64, 2, 2, 4, torch.bfloat16)
    kept = torch.autograd.grad(attention(*qkv, None).square().sum(), merged, retain_graph=True)[0]
    made = []
    probabilities = kernel.probabilities
    monkeypatch.setattr(kernel, "probabilities", lambda *a: made.append(1) or probabilities(*a))
    monkeypatch.setattr(kernel, "KEEP_PROBABILITIES", 1)
    again = torch.autograd.grad(attention(*qkv, None).square().sum(), merged, retain_graph=True)[0]
    assert len(made) == 2 and torch.equal(kept, again)


def test_one_query_over_a_cache():
    q, k, v = torch.randn(2, 1, 4, 8), torch.randn(2, 9, 2, 8), torch.randn(2, 9, 2, 8)
    mask = visible_keys(torch.tensor([8]), torch.arange(9), 4)
    torch.testing.assert_close(attention(q, k, v, mask), attention(q, k, v, mask, "reference"))


def test_mask_says_nothing_where_causality_says_all():
    place = torch.arange(6)
    assert visible_keys(place, place) is None and visible_keys(place, place, 6) is None
    assert visible_keys(place, place, 2)[0, 0].sum(1).tolist() == [1, 2, 2, 2, 2, 2]
    docs = torch.tensor([[0, 0, 1, 1, 1, 2]])
    assert visible_keys(place, place, None, docs, docs)[0, 0].sum(1).tolist() == [1, 2, 1, 2, 3, 1]


@pytest.mark.parametrize(
    "b,s,h,g,d,value", [(2, 37, 6, 3, 6, 4), (1, BLOCK + 3, 4, 1, 16, 24), (1, 2 * BLOCK + 5, 2, 2, 4, 3)]
)
@pytest.mark.parametrize("kind", ["auto", "sdpa"])
def test_values_of_another_width(b, s, h, g, d, value, kind):
    """As latent attention has them: keys are wider or narrower than values."""
    q, k, v = (
        torch.randn(b, s, n, w, dtype=torch.float64, requires_grad=True)
        for n, w in ((h, d), (g, d), (g, value))
    )
    for _, mask in masks(b, s):
        want, dy = kernel.attention_reference(q, k, v, mask), torch.randn(b, s, h, value, dtype=torch.float64)
        got = attention(q, k, v, mask, kind)
        torch.testing.assert_close(got, want, rtol=1e-10, atol=1e-10)
        for a, c in zip(torch.autograd.grad(got, (q, k, v), dy), torch.autograd.grad(want, (q, k, v), dy)):
            torch.testing.assert_close(a, c, rtol=1e-9, atol=1e-9)


def test_the_interval_form_gives_the_same(monkeypatch):
    """On a CPU an AttentionMask gives what its dense mask gives."""
    _, qkv = inputs(2, 30, 2, 1, 8)
    mask = make_attention_mask(0, 30, 0, 30, 7, None, torch.device("cpu"))
    place = torch.arange(30)
    for kind in ("auto", "sdpa", "reference"):
        assert torch.equal(attention(*qkv, mask, kind), attention(*qkv, visible_keys(place, place, 7), kind))


@pytest.mark.slow(core=["16-None-dtype0-1e-05"])
@pytest.mark.parametrize(
    "window, dtype, bound",
    [(None, torch.float32, 1e-5), (20, torch.bfloat16, 0.01), (20, torch.float16, 2e-3)],
)
@pytest.mark.parametrize("e", [16, 8])
def test_triton(small_blocks, window, dtype, bound, e):
    """The whole function."""
    q, k, v = (
        torch.randn(2, 41, n, d, device=small_blocks).to(dtype).requires_grad_()
        for n, d in ((4, 16), (2, 16), (2, e))
    )
    exact = [t.detach().double().requires_grad_() for t in (q, k, v)]
    mask = make_attention_mask(0, 41, 0, 41, window, None, small_blocks)
    out, want = attention(q, k, v, mask, "triton"), attention(*exact, mask, "reference")
    dy = torch.randn(2, 41, 4, e, device=small_blocks).to(dtype)
    grads = torch.autograd.grad(out, (q, k, v), dy)
    for a, c in zip((out, *grads), (want, *torch.autograd.grad(want, exact, dy.double()))):
        assert a.dtype == dtype and (a.double() - c).norm() <= bound * c.norm()


# ---- at the sizes of training ----

# {case: (training -> (key heads, head dim of keys, of values), the mask)}
TRAINING = {
    "causal": (lambda t: (t.heads, t.head_dim, t.head_dim), {}),
    "grouped queries": (lambda t: (t.kv, t.head_dim, t.head_dim), {}),
    "half the head dim": (lambda t: (t.kv, t.head_dim // 2, t.head_dim // 2), {}),
    "window": (lambda t: (t.kv, t.head_dim, t.head_dim), {"window": True}),
    "documents": (lambda t: (t.kv, t.head_dim, t.head_dim), {"documents": True}),
    "latent": (lambda t: (t.heads, t.head_dim * 3 // 2, t.head_dim), {}),
    "twice the head dim": (lambda t: (t.kv, 2 * t.head_dim, 2 * t.head_dim), {}),
}


def draw_training(training, kv, d, e, window=False, documents=False):
    """q, k, v and the gradient of the output; a mask of about eight documents, which begin anywhere."""
    b, s, h = training.batch, training.seq, training.heads
    q, k, v = training.randn(b, s, h, d), training.randn(b, s, kv, d), training.randn(b, s, kv, e)
    docs = counts = None
    if documents:
        docs = (torch.rand(b, s, device=training.device) < 8 / s).cumsum(1).int()
        lengths = [row.unique_consecutive(return_counts=True)[1] for row in docs]
        counts = DocumentCounts(sum(map(len, lengths)), int(torch.cat(lengths).max()))
    keys = s // 4 - 3 if window else None
    return q, k, v, training.randn(b, s, h, e), make_attention_mask(0, s, 0, s, keys, docs, q.device, counts)


def check_attention(training, q, k, v, dy, mask, function, is_ours):
    """Probabilities, their gradients and outputs are rounded. function(q, k, v, mask)."""
    def definition():
        """Some queries at a time: all scores at once would not fit."""
        exact, dense = [x.float() for x in (q, k, v)], mask.dense_mask
        out, lse = partial_reference(*exact, dense)
        delta = (dy * out).sum(-1)
        dq, dk, dv = partial_backward_reference(dy.float(), *exact, dense, lse, delta)
        return {"y": out, "dq": dq, "dk": dk, "dv": dv}

    two, three = bound(2, training.seq), bound(3, training.seq)
    training.check(
        lambda: results_of(lambda q, k, v: function(q, k, v, mask), {"q": q, "k": k, "v": v}, (dy,)),
        definition,
        {"y": two, "dq": three, "dk": three, "dv": three},
        is_ours=is_ours,
    )


@pytest.mark.slow(every=3)
@pytest.mark.gpu(
    "attention_triton.forward_kernel", "attention_triton.dq_kernel", "attention_triton.dkv_kernel"
)
@pytest.mark.parametrize("name", TRAINING)
def test_at_training_sizes(training, name):
    sizes, masked = TRAINING[name]
    drawn = draw_training(training, *sizes(training), **masked)
    check_attention(training, *drawn, lambda *qkv: attention(*qkv, "triton"), is_ours=True)


@pytest.mark.gpu
@pytest.mark.parametrize("name", ["causal", "grouped queries"])
def test_what_auto_picks_at_training_sizes(training, name):
    if training.device.type == "cpu":
        pytest.skip("on a CPU auto picks no library")
    drawn = draw_training(training, *TRAINING[name][0](training))
    check_attention(training, *drawn, attention, is_ours=False)


@pytest.mark.slow(every=2)
@pytest.mark.gpu
@pytest.mark.parametrize("library", [library.name for library in LIBRARIES])
def test_documents_of_a_library_at_training_sizes(training, library):
    check_documents_of_library(training, library)


def check_documents_of_library(training, library):
    """Of several, auto would take the first alone."""
    *tensors, dy, mask = draw_training(training, *TRAINING["documents"][0](training), documents=True)
    choices = {choice.library.name: choice for choice in usable_libraries(*tensors, mask)}
    if library not in choices:
        pytest.skip(f"{library}: not installed, or not for packed documents on this device")
    run = functools.partial(library_attention, choices[library])
    check_attention(training, *tensors, dy, mask, run, is_ours=False)


def test_a_kind_that_cannot_says_so_and_auto_picks(capfd):
    q, k, v = torch.randn(1, 3, 2, 4), torch.randn(1, 3, 1, 4), torch.randn(1, 3, 1, 4)
    for kind in ("triton", "flash", "flash"):
        assert torch.equal(attention(q, k, v, None, kind), attention(q, k, v, None))
    assert capfd.readouterr().err.splitlines() == [
        f"model.mixer.kernel={kind}: not for float32 on cpu, head dims 4 and 4, as installed here; auto picks"
        for kind in ("triton", "flash")
    ]


FUSED = ("CUDNN_ATTENTION", "FLASH_ATTENTION", "EFFICIENT_ATTENTION")


@pytest.mark.parametrize(
    "head_dim, dtype, with_mask, supported, says",
    [
        (48, torch.bfloat16, False, (), None),  # flash's own case: nothing is asked
        (30, torch.bfloat16, False, (), "no fused kernel for bfloat16, head dims 30 and 30; "),
        (48, torch.float32, False, (), "no fused kernel for float32, head dims 48 and 48; "),
        (48, torch.float32, False, ("EFFICIENT_ATTENTION",), None),
        (48, torch.bfloat16, True, (), "head dims 48 and 48, with a dense mask; "),
        (48, torch.bfloat16, True, ("CUDNN_ATTENTION",), None),
    ],
)
def test_attention_without_a_fused_kernel_is_said_once(
    monkeypatch, capsys, head_dim, dtype, with_mask, supported, says
):
    """On a GPU; torch's answers are stand-ins here."""
    kernel.triton_.print_once.cache_clear()
    for name in FUSED:
        answer = functools.partial(lambda answer, call: answer, name in supported)
        monkeypatch.setitem(kernel.FUSED_KERNELS, getattr(SDPBackend, name), answer)
    q, k = torch.zeros(2, 4, 1000, head_dim, dtype=dtype), torch.zeros(2, 2, 1000, head_dim, dtype=dtype)
    mask = torch.ones(1000, 1000, dtype=torch.bool) if with_mask else None
    for _ in range(2):
        kernel.report_missing_kernel(q, k, k, mask, kernel.PLAIN_KERNELS)
    text = capsys.readouterr().err  # bytes: 2 x 2 x 4 x 1000 x 1000 x 4
    if says is None:
        assert text == ""
    else:
        assert text.count("\n") == 1 and says in text
        assert text.endswith("scores and probabilities take 0.064 GB a layer\n")


def test_a_deterministic_run_does_not_count_on_a_kernel_that_adds_with_atomics(monkeypatch, capsys):
    kernel.triton_.print_once.cache_clear()
    for name in FUSED:
        answer = functools.partial(lambda answer, call: answer, name == "EFFICIENT_ATTENTION")
        monkeypatch.setitem(kernel.FUSED_KERNELS, getattr(SDPBackend, name), answer)
    q = torch.zeros(1, 1, 10, 8)
    kernel.report_missing_kernel(q, q, q, None, [SDPBackend.FLASH_ATTENTION, SDPBackend.MATH])
    assert "no fused kernel" in capsys.readouterr().err
