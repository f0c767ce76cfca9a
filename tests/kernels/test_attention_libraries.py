"""Packed documents and windows go to a library's function of variable length as it expects them: each library
is a stand-in here that computes by its own published conventions, one query at a time, on a CPU.
"""

import importlib
import inspect
import math
import sys
import types
from dataclasses import replace

import pytest
import torch
from dense_mask import dense_attention, visible_keys
from test_attention import check_documents_of_library

from data.pack import pack_windows
from kernels import attention as kernel
from kernels import attention_cudnn, attention_flex
from kernels import attention_libraries as libraries
from kernels.attention import attention, attention_reference
from kernels.attention_mask import DocumentCounts, PackedDocuments, document_ends, make_attention_mask
from kernels.attention_scores import ScoreForm
from lab.benchmarks import rates
from lab.benchmarks.shape import Shape

CPU = torch.device("cpu")


def by_definition(q, k, v, q_ends, k_ends, left, right, scale=None):
    """Variable length attention as flash-attn and torch document it: q [tokens, h, d]. Query i of a document
    of as many keys sees the keys i - left .. i + right; -1: no limit on that side.
    """
    assert q_ends.dtype == k_ends.dtype == torch.int32 and q_ends[0] == 0 and q_ends[-1] == len(q) == len(k)
    scale = scale or 1 / math.sqrt(q.shape[-1])
    group = q.shape[1] // k.shape[1]
    dtype = q.dtype
    q, k, v = (x.float() for x in (q, k, v))
    rows = []
    for start, end in zip(q_ends.tolist(), q_ends.tolist()[1:]):  # empty ones have no query
        for i in range(start, end):
            low = start if left < 0 else max(start, i - left)
            high = end if right < 0 else min(end, i + right + 1)
            for head in range(q.shape[1]):
                scores = k[low:high, head // group] @ q[i, head] * scale
                rows.append(scores.softmax(0) @ v[low:high, head // group])
    return torch.stack(rows).view(len(q), q.shape[1], -1).to(dtype)


class Calls(list):
    """What the stand-ins were called with."""


def flash_stand_in(calls, head_dims=None, returns_tuple=False):
    def flash_attn_varlen_func(
        q, k, v, cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k,
        dropout_p=0.0, softmax_scale=None, causal=False, window_size=(-1, -1), deterministic=False,
    ):  # fmt: skip
        calls.append(("packed", q.shape, int(cu_seqlens_q.numel()), max_seqlen_q, window_size, deterministic))
        longest = int(cu_seqlens_q.diff().max())
        assert longest <= max_seqlen_q and max_seqlen_q == max_seqlen_k and causal
        left, right = window_size[0], 0  # causal limits the right side
        if head_dims and (q.shape[-1], v.shape[-1]) not in head_dims:
            raise RuntimeError("head dims that this version does not have")
        out = by_definition(q, k, v, cu_seqlens_q, cu_seqlens_k, left, right, softmax_scale)
        return (out, None) if returns_tuple else out

    def flash_attn_func(q, k, v, causal=False, window_size=(-1, -1), deterministic=False):
        calls.append(("whole", q.shape, 0, q.shape[1], window_size, deterministic))
        b, s = q.shape[:2]
        ends = torch.arange(0, b * s + 1, s, dtype=torch.int32)
        flat = (x.flatten(0, 1) for x in (q, k, v))
        return by_definition(*flat, ends, ends, window_size[0], 0).unflatten(0, (b, s))

    return types.SimpleNamespace(
        flash_attn_func=flash_attn_func, flash_attn_varlen_func=flash_attn_varlen_func
    )


def torch_stand_in(calls):
    """The signature of torch 2.13, whose own call on a CPU has no kernel."""

    def varlen_attn(
        query, key, value, cu_seq_q, cu_seq_k, max_q, max_k, *,
        return_aux=None, scale=None, window_size=(-1, -1), enable_gqa=False,
    ):  # fmt: skip
        calls.append(("packed", query.shape, int(cu_seq_q.numel()), max_q, window_size, None))
        assert enable_gqa == (query.shape[1] != key.shape[1])
        return by_definition(query, key, value, cu_seq_q, cu_seq_k, *window_size, scale)

    return types.SimpleNamespace(varlen_attn=varlen_attn)


class CudnnOperation:
    """torch's two operations of cuDNN on a CPU, by the conventions of torch 2.14 (cudnn/MHA.cpp): tokens one
    after the other, logsumexp [h, tokens], the first query of a document aligned with its first key.

    What is wrong with it is in `faults`.
    """

    def __init__(self, calls, faults=()):
        self.calls, self.faults = calls, faults
        self.library = torch.library.Library("aten", "IMPL")
        self.library.impl("_cudnn_attention_forward", self.forward, "CPU")
        self.library.impl("_cudnn_attention_backward", self.backward, "CPU")

    def check(self, q, k, v, q_ends, k_ends, max_q, max_k, is_causal):
        assert q_ends.dtype == k_ends.dtype == torch.int32
        assert q_ends[0] == 0 and q_ends[-1] == len(q) == len(k)
        assert is_causal and max_q == max_k > 128 and int(q_ends.diff().max()) <= max_q
        assert torch.equal(q_ends, k_ends)
        for x in (q, k, v):
            offsets = [x.data_ptr(), *(n * x.element_size() for n in x.stride()[:2])]
            assert x.dim() == 3 and x.stride(-1) == 1 and not any(offset % 16 for offset in offsets)

    def documents(self, q, k, ends):
        """(its tokens, scores [h, t, t] in fp64 with -inf for keys that a query does not see)."""
        group = q.shape[1] // k.shape[1]
        for start, end in zip(ends.tolist(), ends.tolist()[1:]):
            here = slice(start, end)
            keys = k[here].double().repeat_interleave(group, 1)
            scores = torch.einsum("qhd,khd->hqk", q[here].double(), keys) / math.sqrt(q.shape[-1])
            hidden = torch.ones(end - start, end - start, dtype=torch.bool).triu(1)
            if "sees all" in self.faults:
                hidden &= False
            yield here, scores.masked_fill(hidden, -math.inf)

    def forward(
        self, query, key, value, attn_bias, cum_seq_q, cum_seq_k, max_q, max_k, compute_log_sumexp,
        dropout_p=0.0, is_causal=False, return_debug_mask=False, *, scale=None,
    ):  # fmt: skip
        assert attn_bias is None and dropout_p == 0 and scale is None and compute_log_sumexp
        self.check(query, key, value, cum_seq_q, cum_seq_k, max_q, max_k, is_causal)
        self.calls.append(("cudnn", query.shape, cum_seq_q.numel(), max_q, None, None))
        if "wrong strides" in self.faults:  # as if each lay alone in memory
            query = query.as_strided(query.shape, (query.shape[1] * query.shape[2], query.shape[2], 1))
        group = query.shape[1] // key.shape[1]
        out = query.new_full((*query.shape[:2], value.shape[-1]), math.nan)
        lse = torch.full((query.shape[1], len(query)), math.nan)
        for here, scores in self.documents(query, key, cum_seq_q):
            values = value[here].double().repeat_interleave(group, 1)
            out[here] = torch.einsum("hqk,khe->qhe", scores.softmax(-1), values).to(out.dtype)
            lse[:, here] = scores.logsumexp(-1).float()
        if "mixed logsumexp" in self.faults:  # written by token, read by head
            lse = lse.T.reshape(lse.shape).contiguous()
        none = torch.empty(0)
        return out, lse, cum_seq_q, cum_seq_k, max_q, max_k, none, none, none

    def backward(
        self, grad_out, query, key, value, out, logsumexp, philox_seed, philox_offset, attn_bias,
        cum_seq_q, cum_seq_k, max_q, max_k, dropout_p, is_causal, *, scale=None,
    ):  # fmt: skip
        self.check(query, key, value, cum_seq_q, cum_seq_k, max_q, max_k, is_causal)
        assert logsumexp.shape == (query.shape[1], len(query)) and logsumexp.dtype == torch.float32
        assert grad_out.stride(-1) == 1 and grad_out.dtype == out.dtype == query.dtype
        g = key.shape[1]
        group = query.shape[1] // g
        grads = [x.new_full(x.shape, math.nan) for x in (query, key, value)]
        for here, scores in self.documents(query, key, cum_seq_q):
            keys, values = (x[here].double().repeat_interleave(group, 1) for x in (key, value))
            dy = grad_out[here].double()
            probs = torch.exp(scores - logsumexp[:, here, None])
            dprobs = torch.einsum("qhe,khe->hqk", dy, values)
            delta = (dy * out[here].double()).sum(-1).T[..., None]
            dscores = probs * (dprobs - delta) / math.sqrt(query.shape[-1])
            dk = torch.einsum("hqk,qhd->khd", dscores, query[here].double())
            dv = torch.einsum("hqk,qhe->khe", probs, dy)
            grads[0][here] = torch.einsum("hqk,khd->qhd", dscores, keys).to(query.dtype)
            for grad, x in zip(grads[1:], (dk, dv)):
                x = x.unflatten(1, (g, group))
                grad[here] = (x[:, :, 0] if "one query head" in self.faults else x.sum(2)).to(grad.dtype)
        return tuple(grads)


def frontend_stand_in(calls):
    """cudnn.sdpa_torch of nvidia-cudnn-frontend 1.32, whose backward needs the logsumexp to be asked for."""

    def sdpa_torch(
        query, key, value, *, scale=None, is_causal=False, causal_bottom_right=False, window_left=-1,
        window_right=-1, sinks=None, seq_len_q=None, seq_len_kv=None, cu_seqlens_q=None, cu_seqlens_kv=None,
        max_seqlen_q=0, max_seqlen_kv=0, return_lse=False,
    ):  # fmt: skip
        assert int(cu_seqlens_q.diff().max()) <= max_seqlen_q == max_seqlen_kv
        assert query.stride(-1) == key.stride(-1) == value.stride(-1) == 1
        calls.append(("frontend", query.shape, cu_seqlens_q.numel(), max_seqlen_q, None, None))
        if not return_lse and torch.is_grad_enabled():
            raise RuntimeError("autograd requires return_lse=True")
        right = 0 if is_causal else window_right
        out = by_definition(query, key, value, cu_seqlens_q, cu_seqlens_kv, window_left, right, scale)
        return (out, None) if return_lse else out

    return types.SimpleNamespace(sdpa_torch=sdpa_torch)


@pytest.fixture
def cudnn_operation(monkeypatch, calls):
    """Installs torch's operation as torch 2.14 has it, with faults."""
    installed = []

    def install_operation(*faults):
        monkeypatch.setattr(torch.backends.cudnn, "version", lambda: 92600)
        libraries.installed_function.cache_clear()
        libraries.passes_trial.cache_clear()
        monkeypatch.setitem(sys.modules, "kernels.attention_cudnn", attention_cudnn)
        table = tuple(
            replace(library, why_not=lambda: None) if library.name == "cuDNN (torch)" else library
            for library in libraries.LIBRARIES
        )
        monkeypatch.setattr(libraries, "LIBRARIES", table)
        while installed:
            installed.pop().library._destroy()
        installed.append(CudnnOperation(calls, faults))

    yield install_operation
    while installed:
        installed.pop().library._destroy()


@pytest.fixture
def calls(monkeypatch):
    """No library is installed, and those that a test installs run on a CPU."""
    monkeypatch.setattr(libraries, "DEVICES", ("cpu",))
    for library in libraries.LIBRARIES:
        monkeypatch.setitem(sys.modules, library.module, None)
    caches = (libraries.installed_function, libraries.passes_trial, kernel.triton_.print_once)
    for cache in caches:
        cache.cache_clear()
    yield Calls()
    for cache in caches:
        cache.cache_clear()


def install(monkeypatch, name, module):
    monkeypatch.setitem(sys.modules, name, module)


STAND_INS = {"flash_attn_interface": flash_stand_in, "torch.nn.attention.varlen": torch_stand_in}
# lengths of the documents of each sequence, of 160 tokens each
DOCUMENTS = {
    "one document": [[160], [160]],
    "an end at the end": [[100, 60], [160]],
    "documents of one token": [[1, 158, 1], [160]],
    "the longest is not the first": [[20, 140], [159, 1]],
}


def numbers(lengths):
    """[b, s]: the document of each token."""
    return torch.stack([torch.arange(len(row)).repeat_interleave(torch.tensor(row)) for row in lengths])


def counts(lengths):
    every = sum(lengths, [])
    return DocumentCounts(len(every), max(every))


@pytest.mark.slow
@pytest.mark.parametrize("name", STAND_INS)
@pytest.mark.parametrize("documents", DOCUMENTS)
@pytest.mark.parametrize("window", [None, 33])
@pytest.mark.parametrize("h, g", [(2, 2), (4, 2)])
def test_packed_documents(monkeypatch, calls, name, documents, window, h, g):
    monkeypatch.setattr(libraries, "MIN_MEAN_DOCUMENT", 16)
    install(monkeypatch, name, STAND_INS[name](calls))
    lengths = DOCUMENTS[documents]
    docs = numbers(lengths)
    b, s = docs.shape
    d = 32
    merged = torch.randn(b, s, h + 2 * g, d).bfloat16().requires_grad_()
    q, k, v = merged.split((h, g, g), 2)
    mask = make_attention_mask(0, s, 0, s, window, docs, CPU, counts(lengths))

    place = torch.arange(s)
    dense = visible_keys(place, place, window, docs, docs)
    exact = merged.detach().double().requires_grad_()
    want = attention_reference(*exact.split((h, g, g), 2), dense)
    out = attention(q, k, v, mask)
    assert calls[-1][0] == "packed" and calls[-1][1] == (b * s, h, d)
    assert calls[-1][2:4] == (counts(lengths).number + 1, counts(lengths).longest)
    assert out.shape == want.shape and out.dtype == torch.bfloat16
    dy = torch.randn_like(want)
    (grad,) = torch.autograd.grad(out, merged, dy.bfloat16())
    (grad_want,) = torch.autograd.grad(want, exact, dy)
    for got, true in ((out, want), (grad, grad_want)):
        assert (got.double() - true).norm() <= 0.01 * true.norm()


def test_a_window_is_counted_with_the_query(monkeypatch, calls):
    """Ours counts the query itself, theirs does not. Without documents torch takes it packed, too."""
    b, s = 2, 50
    q, k, v = (torch.randn(b, s, 2, 32).bfloat16() for _ in "qkv")
    place = torch.arange(s)
    mask = make_attention_mask(0, s, 0, s, 7, None, CPU)
    want = attention_reference(q, k, v, visible_keys(place, place, 7))
    for name, kind, size in (("torch.nn.attention.varlen", "packed", 6), ("flash_attn", "whole", 6)):
        install(monkeypatch, name, torch_stand_in(calls) if "torch" in name else flash_stand_in(calls))
        libraries.installed_function.cache_clear()
        assert (attention(q, k, v, mask).float() - want.float()).norm() <= 0.01 * want.float().norm()
        assert calls[-1][0] == kind and calls[-1][4] == (size, 0)


def test_latent_attention_goes_to_version_3(monkeypatch, calls):
    install(monkeypatch, "flash_attn_interface", flash_stand_in(calls, returns_tuple=True))
    q, k, v = (torch.randn(1, 150, 2, dim).bfloat16() for dim in (192, 192, 128))
    docs = numbers([[150]])
    mask = make_attention_mask(0, 150, 0, 150, None, docs, CPU, DocumentCounts(1, 150))
    choice = libraries.choose_library(q, k, v, mask)
    assert choice is not None and choice.library.module == "flash_attn_interface" and choice.is_packed
    assert attention(q, k, v, mask).shape == v.shape
    for d, e in ((192, 192), (192, 128), (256, 256), (64, 64)):
        assert libraries.multiple_of_8_or_latent(d, e)
    for d, e in ((192, 96), (128, 64), (264, 264), (60, 60)):
        assert not libraries.multiple_of_8_or_latent(d, e)


# ---- cuDNN -------------------------------------------------------------------------------------------------

LENGTHS = {
    "equal": [[160, 160], [320]],
    "uneven": [[3, 250, 67], [1, 319]],
    "many": [[64, 200, 30, 26], [80, 80, 160]],
}


@pytest.mark.slow(every=7)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("name", ["torch", "frontend"])
@pytest.mark.parametrize("lengths", LENGTHS)
@pytest.mark.parametrize("h, g, d, e", [(2, 2, 32, 32), (4, 2, 32, 32), (4, 1, 64, 64), (4, 2, 40, 24)])
def test_cudnn_of_packed_documents(monkeypatch, calls, cudnn_operation, name, lengths, h, g, d, e, dtype):
    """Values and all three gradients, in memory as a merged projection leaves q, k and v."""
    monkeypatch.setattr(libraries, "MIN_MEAN_DOCUMENT", 16)
    cudnn_operation()
    if name == "frontend":
        install(monkeypatch, "cudnn", frontend_stand_in(calls))
    lengths = LENGTHS[lengths]
    docs = numbers(lengths)
    b, s = docs.shape
    merged = torch.randn(b, s, h * d + g * d + g * e).to(dtype).requires_grad_()
    exact = merged.detach().double().requires_grad_()

    def parts(x):
        q, k, v = x.split((h * d, g * d, g * e), -1)
        return q.unflatten(-1, (h, d)), k.unflatten(-1, (g, d)), v.unflatten(-1, (g, e))

    number, longest = counts(lengths)
    mask = make_attention_mask(0, s, 0, s, None, docs, CPU, counts(lengths))
    place = torch.arange(s)
    want = attention_reference(*parts(exact), visible_keys(place, place, None, docs, docs))
    out = attention(*parts(merged), mask)

    # a bound and a number that other documents share: 512 tokens, and 4 or 8 documents
    planned = 2 ** math.ceil(math.log2(number))
    call = calls[-1]
    assert call[0] == {"torch": "cudnn"}.get(name, name)
    assert call[1:4] == ((b * s, h, d), planned + 1, 512 if longest > 256 else 256)
    assert out.shape == want.shape and out.dtype == dtype
    dy = torch.randn(b, h, s, e).transpose(1, 2)  # of other strides than the output
    (grad,) = torch.autograd.grad(out, merged, dy.to(dtype))
    (grad_want,) = torch.autograd.grad(want, exact, dy.to(dtype).double())
    for got, true in zip((out, *parts(grad)), (want, *parts(grad_want))):
        assert (got.double() - true).norm() <= 0.01 * true.norm()


@pytest.mark.parametrize("fault", ["sees all", "wrong strides", "mixed logsumexp", "one query head"])
def test_a_cudnn_that_is_wrong_is_not_used(calls, cudnn_operation, capsys, fault):
    """Faults that torch's releases had, or could have: the trial sees each."""
    q, k = (torch.randn(1, 320, heads, 32).bfloat16() for heads in (4, 2))
    mask = make_attention_mask(0, 320, 0, 320, None, numbers([[150, 170]]), CPU, DocumentCounts(2, 170))
    cudnn_operation()
    assert libraries.choose_library(q, k, k, mask).library.name == "cuDNN (torch)"
    cudnn_operation(fault)
    assert libraries.choose_library(q, k, k, mask) is None
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith("attention: cuDNN (torch) is installed but not used for head dims 32 and 32, doc")
    assert "a wrong result" in line


def test_a_torch_that_keeps_no_plan_is_not_even_tried(monkeypatch, calls, capsys):
    """Its backward may lose the process its GPU. Today's torch is one, and says so itself."""
    signature = torch.ops.aten._cudnn_attention_forward.default._schema
    version = tuple(int(x) for x in torch.__version__.split(".")[:2])
    assert ("block_table" in str(signature)) == (version >= (2, 14)), "the sign of a torch that can be used"
    monkeypatch.setitem(sys.modules, "kernels.attention_cudnn", attention_cudnn)
    monkeypatch.setattr(attention_cudnn, "torch_attention", lambda *_: pytest.fail("it was called"))
    q = torch.randn(1, 320, 2, 32).bfloat16()
    mask = make_attention_mask(0, 320, 0, 320, None, numbers([[150, 170]]), CPU, DocumentCounts(2, 170))
    assert libraries.choose_library(q, q, q, mask) is None
    line = capsys.readouterr().err
    assert "cuDNN (torch) is installed but not used" in line and len(line.splitlines()) == 1
    assert ("nvidia-cudnn-frontend" in line) == (version < (2, 14))


def test_rocm_and_an_old_cudnn_are_refused(monkeypatch):
    monkeypatch.setattr(attention_cudnn, "has_kept_plans", lambda: True)
    for version, hip, want in ((92600, None, None), (91700, None, "cuDNN 91800"), (300500, "7.1", "ROCm")):
        monkeypatch.setattr(torch.backends.cudnn, "version", lambda version=version: version)
        monkeypatch.setattr(torch.version, "hip", hip)
        why = attention_cudnn.why_not_in_torch()
        assert why is None if want is None else want in why


def test_what_is_not_given_to_cudnn(monkeypatch, calls, cudnn_operation, capsys):
    cudnn_operation()

    def chosen(lengths=((150, 170),), window=None, d=32, e=32, dtype=torch.bfloat16):
        s = sum(lengths[0])
        q, k, v = (torch.empty(len(lengths), s, 2, dim, dtype=dtype) for dim in (d, d, e))
        lengths = [list(row) for row in lengths]
        mask = make_attention_mask(0, s, 0, s, window, numbers(lengths), CPU, counts(lengths))
        choice = libraries.choose_library(q, k, v, mask)
        return choice and choice.library.name

    assert chosen() == chosen(dtype=torch.float16) == chosen(d=64, e=128) == "cuDNN (torch)"
    assert chosen(window=40) is None
    assert chosen(d=192, e=128) is None and chosen(d=256, e=256) is None and chosen(d=36, e=36) is None
    assert chosen(dtype=torch.float32) is None
    uneven = [[2048] + [128] * 16]
    assert chosen(uneven) is None, "32 times 2048 for 4096 tokens: torch's dq would be too large"
    assert not capsys.readouterr().err, "the table says so: nothing is tried, and nothing is said"
    install(monkeypatch, "cudnn", frontend_stand_in(calls))
    libraries.installed_function.cache_clear()
    assert chosen(uneven) == "cuDNN (nvidia-cudnn-frontend)", "its dq is counted in tokens"
    monkeypatch.setattr(torch, "are_deterministic_algorithms_enabled", lambda: True)
    assert chosen() is None, "nobody can ask torch's cuDNN for the same bits every time"
    monkeypatch.undo()


def test_a_card_runs_every_library(monkeypatch, calls, cudnn_operation, training):
    """The tests marked gpu compare each with the definition, and lab/benchmarks/rates.py times each."""
    monkeypatch.setattr(libraries, "MIN_MEAN_DOCUMENT", 1)
    monkeypatch.setattr(attention_cudnn, "MAX_PADDING", 64)
    cudnn_operation()
    install(monkeypatch, "kernels.attention_flex", attention_flex)  # imported with all kernels
    install(monkeypatch, "cudnn", frontend_stand_in(calls))
    install(monkeypatch, "flash_attn", flash_stand_in(calls))
    names = ["cuDNN (nvidia-cudnn-frontend)", "cuDNN (torch)", "flash_attn"]

    torch.manual_seed(1)
    small = replace(training, device=CPU, batch=1, seq=256, head_dim=32)
    for name in names:
        calls.clear()
        check_documents_of_library(small, name)
        of_their_trials = 4  # heads
        assert [call[1][1] for call in calls].count(small.heads) == 1 and small.heads < of_their_trials
    with pytest.raises(pytest.skip.Exception, match="not installed"):
        check_documents_of_library(small, "flash_attn_interface")

    lengths = (8, 64, 184)
    shape = Shape(1, hidden=64, heads=2, kv=1, ffn=1, vocab=1, seq=256, batch=1, documents=lengths)
    place = rates.RateInputs(CPU, shape, shape, shape, packed=shape)
    seen = sum(n * (n + 1) / 2 for n in lengths)
    for name in names:
        forward, backward = rates.cases_of_attention(place, shape, name)
        assert forward.work == 2 * 2 * seen * 64 and backward.work == 2.5 * forward.work
        calls.clear()
        assert [x.shape[2] for x in backward.make()()] == [2, 1, 1]
        assert [call[1][1] for call in calls].count(shape.heads) == 1, name
    with pytest.raises(rates.Absent):
        next(rates.cases_of_attention(place, shape, "flash_attn_interface")).make()


def test_empty_documents_only_for_a_cudnn_that_takes_them(monkeypatch):
    ends = torch.tensor([0, 5, 300, 301], dtype=torch.int32)
    packed = PackedDocuments(ends, number=3, longest=295, window=None)
    for version, want in ((92500, [0, 5, 300, 301, 301]), (92400, ends.tolist()), (None, ends.tolist())):
        monkeypatch.setattr(torch.backends.cudnn, "version", lambda version=version: version)
        planned = attention_cudnn.for_few_plans(packed)
        assert planned.ends.tolist() == want and planned.ends.dtype == torch.int32
        assert planned.number == len(want) - 1 and planned.longest == 512
    assert attention_cudnn.for_few_plans(packed._replace(longest=100)).longest == 256


@pytest.mark.parametrize("deterministic", [False, True])
def test_determinism_is_asked_for(monkeypatch, calls, deterministic):
    install(monkeypatch, "flash_attn", flash_stand_in(calls))
    q = torch.randn(1, 140, 2, 8).bfloat16()
    mask = make_attention_mask(0, 140, 0, 140, None, numbers([[140]]), CPU, DocumentCounts(1, 140))
    monkeypatch.setattr(torch, "are_deterministic_algorithms_enabled", lambda: deterministic)
    attention(q, q, q, mask)
    assert calls and {call[5] for call in calls} == {deterministic}


@pytest.mark.parametrize("documents, known", [
    ([[10] * 14], True),  # too short: their backward pads each to 128
    ([[70, 70]], False),  # nobody has counted them
])  # fmt: skip
def test_what_is_not_given_to_a_library(monkeypatch, calls, documents, known):
    install(monkeypatch, "flash_attn", flash_stand_in(calls))
    q = torch.randn(1, 140, 2, 8).bfloat16()
    mask = make_attention_mask(
        0, 140, 0, 140, None, numbers(documents), CPU, counts(documents) if known else None
    )
    assert libraries.choose_library(q, q, q, mask) is None and not calls
    part = make_attention_mask(70, 70, 0, 140, None, numbers([[70, 70]]), CPU, counts([[70, 70]]))
    assert part.packed is None  # new tokens after a cache


def test_a_library_that_computes_something_else_is_not_used(monkeypatch, calls, capsys):
    """The trial sees a window that is off by one, a scale, documents that see each other, and what raises."""
    good = flash_stand_in(calls)

    def wrong(change):
        def function(q, k, v, **options):
            return good.flash_attn_varlen_func(q, k, v, **(options | change(options)))
        return function

    faults = {
        "window": lambda o: {"window_size": (o["window_size"][0] + 3, 0)} if "window_size" in o else {},
        "scale": lambda o: {"softmax_scale": 0.5},
        "documents": lambda o: {
            name: torch.stack((o["cu_seqlens_q"][0], o["cu_seqlens_q"][-1]))
            for name in ("cu_seqlens_q", "cu_seqlens_k")
        } | {"max_seqlen_q": 999, "max_seqlen_k": 999},
        "an argument": lambda o: {"nobody_has_this": 1},
    }  # fmt: skip
    q = torch.randn(1, 300, 2, 32).bfloat16()
    mask = make_attention_mask(0, 300, 0, 300, 20, numbers([[140, 160]]), CPU, DocumentCounts(2, 160))
    for name, change in faults.items():
        libraries.installed_function.cache_clear()
        libraries.passes_trial.cache_clear()
        module = types.SimpleNamespace(
            flash_attn_func=good.flash_attn_func, flash_attn_varlen_func=wrong(change)
        )
        install(monkeypatch, "flash_attn", module)
        assert libraries.choose_library(q, q, q, mask) is None, name
    lines = capsys.readouterr().err.splitlines()
    start = "attention: flash_attn is installed but not used for head dims 32 and 32, documents, a window: "
    assert len(lines) == 4 and all(line.startswith(start) for line in lines)
    assert sum("a wrong result" in line for line in lines) == 3 and "nobody_has_this" in lines[3]


@pytest.mark.slow
def test_the_best_library_that_is_installed_is_found(monkeypatch, calls):
    q = torch.randn(1, 140, 2, 32).bfloat16()

    def chosen(mask=None):
        libraries.installed_function.cache_clear()
        choice = libraries.choose_library(q, q, q, mask)
        return choice and choice.library.module

    window = make_attention_mask(0, 140, 0, 140, 9, None, CPU)
    assert chosen() is None
    install(monkeypatch, "torch.nn.attention.varlen", torch_stand_in(calls))
    assert chosen() is None and chosen(window) == "torch.nn.attention.varlen"
    install(monkeypatch, "flash_attn", flash_stand_in(calls))
    assert chosen() == chosen(window) == "flash_attn"
    install(monkeypatch, "flash_attn_interface", flash_stand_in(calls))
    assert chosen() == "flash_attn_interface"
    documents = make_attention_mask(0, 140, 0, 140, None, numbers([[140]]), CPU, DocumentCounts(1, 140))
    install(monkeypatch, "cudnn", frontend_stand_in(calls))
    assert chosen(documents) == "flash_attn_interface" and chosen(window) == "flash_attn_interface"
    monkeypatch.setitem(sys.modules, "flash_attn_interface", None)
    assert chosen(documents) == "cudnn" and chosen(window) == chosen() == "flash_attn"
    monkeypatch.setattr(libraries, "compute_capability", lambda device: 8)
    assert chosen() == chosen(documents) == "flash_attn"
    monkeypatch.setattr(libraries, "compute_capability", lambda device: 7)
    assert chosen() is None


@pytest.mark.slow
def test_torchs_own_function_takes_what_it_is_given():
    """Its signature and shapes, on tensors without values: there is no kernel for a CPU."""
    module = pytest.importorskip("torch.nn.attention.varlen", reason="a torch without variable length")
    meta = torch.device("meta")
    q, k = (torch.empty(2, 64, h, 32, dtype=torch.bfloat16, device=meta) for h in (4, 2))
    mask = make_attention_mask(0, 64, 0, 64, 9, None, meta)
    library = next(x for x in libraries.LIBRARIES if x.module == "torch.nn.attention.varlen")
    choice = libraries.Choice(library, module.varlen_attn, is_packed=True)
    assert libraries.library_attention(choice, q, k, k, mask).shape == q.shape
    assert {"window_size", "scale"} <= set(inspect.signature(module.varlen_attn).parameters)
    assert importlib.import_module(library.module) is module


@pytest.mark.parametrize(
    "lengths", [[[5]], [[1, 1, 1, 1, 1]], [[2, 3], [4, 1]], [[5], [5], [5]], [[1, 4], [5]]]
)
def test_the_ends_of_documents(lengths):
    every = sum(lengths, [])
    want = torch.tensor([0, *every]).cumsum(0).int()
    docs = numbers(lengths)
    assert torch.equal(document_ends(docs, len(every)), want)
    assert torch.equal(document_ends(docs + 7, len(every)), want)  # whatever the numbers are


def test_the_loader_counts_documents():
    for starts in ([[2, 3], [4]], [[], []], [[5], [1]], [[1, 2, 3, 4], [6]]):
        windows = [torch.arange(7).numpy()] * 2
        batch = pack_windows(windows, [torch.tensor(x, dtype=torch.int64).numpy() for x in starts])
        ends = document_ends(batch.documents, batch.document_counts.number)
        assert ends[-1] == 12 and (ends.diff() > 0).all()
        assert int(ends.diff().max()) == batch.document_counts.longest
        begins = [6 * row + x for row in (0, 1) for x in starts[row] if x < 6]
        assert set(ends.tolist()) == {0, 6, 12, *begins}


# ---- a scale, a soft cap, sinks and chunks -----------------------------------------------------------------

def version_4_stand_in(calls, without=()):
    """The signatures of flash_attn.cute in August 2026: always (out, lse), whose gradient counts if lse was
    asked for. What is in `without` does nothing.
    """

    def flash_attn_varlen_func(
        q, k, v, cu_seqlens_q=None, cu_seqlens_k=None, max_seqlen_q=None, max_seqlen_k=None,
        softmax_scale=None, causal=False, window_size=(None, None), softcap=0.0, deterministic=False,
        return_lse=False,
    ):  # fmt: skip
        calls.append(("packed", cu_seqlens_q.tolist(), softmax_scale, softcap, return_lse))
        softmax_scale = None if "scale" in without else softmax_scale
        softcap = None if "softcap" in without else softcap or None
        docs = torch.searchsorted(cu_seqlens_q, torch.arange(len(q)), right=True)
        place = torch.arange(len(q))
        left = window_size[0]
        window = None if left is None or left < 0 else left + 1
        visible = visible_keys(place, place, window, docs[None], docs[None])
        exact = [x.float()[None] for x in (q, k, v)]
        out = dense_attention(*exact, visible, softmax_scale, softcap)[0].to(q.dtype)
        keys = exact[1].repeat_interleave(q.shape[1] // k.shape[1], 2)
        scores = torch.einsum("bqhd,bkhd->bhqk", exact[0], keys) * (softmax_scale or q.shape[-1] ** -0.5)
        if softcap is not None:
            scores = softcap * torch.tanh(scores / softcap)
        lse = scores.masked_fill(~visible, -torch.inf).logsumexp(-1)[0]  # [h, tokens]
        if "gradient of lse" in without:
            lse = lse.detach()
        return out, lse if return_lse else None

    def flash_attn_func(q, k, v, **options):
        b, s = q.shape[:2]
        ends = torch.arange(0, b * s + 1, s, dtype=torch.int32)
        flat = (x.flatten(0, 1) for x in (q, k, v))
        out, lse = flash_attn_varlen_func(*flat, ends, ends, s, s, **options)
        return out.unflatten(0, (b, s)), None if lse is None else lse.unflatten(1, (b, s)).transpose(0, 1)

    return types.SimpleNamespace(
        flash_attn_func=flash_attn_func, flash_attn_varlen_func=flash_attn_varlen_func
    )


SCORES = {
    "scale": {"scale": 0.3},
    "soft cap": {"softcap": 2.0},
    "sinks": {"sinks": True},
    "all": {"scale": 0.3, "softcap": 2.0, "sinks": True},
}


@pytest.mark.parametrize("form", SCORES)
@pytest.mark.parametrize("masked", ["causal", "documents", "chunks", "window"])
def test_scores_by_version_4(monkeypatch, calls, form, masked):
    """And the gradients of q, k, v and sinks. Chunks of whole sequences are documents of one length."""
    monkeypatch.setattr(libraries, "MIN_MEAN_DOCUMENT", 16)
    install(monkeypatch, "flash_attn.cute", version_4_stand_in(calls))
    b, s = 2, 64
    docs = numbers([[40, 24], [64]])
    mask = {
        "causal": make_attention_mask(0, s, 0, s, None, None, CPU),
        "documents": make_attention_mask(0, s, 0, s, None, docs, CPU, DocumentCounts(3, 64)),
        "chunks": make_attention_mask(0, s, 0, s, None, None, CPU, chunk=16),
        "window": make_attention_mask(0, s, 0, s, 9, None, CPU),
    }[masked]
    shapes = ((b, s, 4, 32), (b, s, 2, 32), (b, s, 2, 32), (4,))
    leaves = [torch.randn(shape).bfloat16().requires_grad_() for shape in shapes]
    exact = [x.detach().double().requires_grad_() for x in leaves]
    options = dict(SCORES[form])
    has_sinks = options.pop("sinks", False)
    out = attention(*leaves[:3], mask, sinks=leaves[3] if has_sinks else None, **options)
    ends = [[0, 64, 128], [0, 40, 64, 128], list(range(0, 129, 16)), [0, 64, 128]]
    want_ends = dict(zip(("causal", "documents", "chunks", "window"), ends))[masked]
    given = {"scale": None, "softcap": 0.0} | options
    assert calls[-1] == ("packed", want_ends, given["scale"], given["softcap"], has_sinks)

    want = dense_attention(
        *exact[:3], mask.dense_mask, **options, sinks=exact[3] if has_sinks else None
    )
    dy = torch.randn_like(want)
    count = 4 if has_sinks else 3
    grads = torch.autograd.grad(out, leaves[:count], dy.bfloat16())
    for got, true in zip((out, *grads), (want, *torch.autograd.grad(want, exact[:count], dy))):
        assert (got.double() - true).norm() <= 0.01 * true.norm()


def test_which_library_is_given_which_scores(monkeypatch, calls, capsys):
    """What a library lacks by the table is not tried; what it says and does not do, its trial finds."""
    x = torch.randn(1, 140, 2, 32).bfloat16()
    documents = make_attention_mask(0, 140, 0, 140, None, numbers([[140]]), CPU, DocumentCounts(1, 140))

    def chosen(mask=documents, sinks=False, **form):
        for cache in (libraries.installed_function, libraries.passes_trial, kernel.triton_.print_once):
            cache.cache_clear()
        choice = libraries.choose_library(x, x, x, mask, ScoreForm(**form), sinks)
        return choice and choice.library.module

    install(monkeypatch, "torch.nn.attention.varlen", torch_stand_in(calls))
    assert chosen(scale=0.3) == "torch.nn.attention.varlen"
    assert chosen(softcap=2.0) is chosen(sinks=True) is None
    install(monkeypatch, "cudnn", frontend_stand_in(calls))
    assert chosen(scale=0.3) == "cudnn" and chosen(softcap=2.0) is chosen(sinks=True) is None
    three = version_4_stand_in(calls)
    install(monkeypatch, "flash_attn_interface", three)  # it has a soft cap, but no gradient of lse
    assert chosen(softcap=2.0) == chosen(scale=0.3) == "flash_attn_interface" and chosen(sinks=True) is None
    assert not capsys.readouterr().err

    install(monkeypatch, "flash_attn.cute", version_4_stand_in(calls, without=("gradient of lse",)))
    assert chosen(sinks=True) is None and "documents, sinks: a wrong result" in capsys.readouterr().err
    monkeypatch.setitem(sys.modules, "flash_attn_interface", None)
    for without, form in (("scale", {"scale": 0.3}), ("softcap", {"softcap": 2.0})):
        install(monkeypatch, "flash_attn.cute", version_4_stand_in(calls, without=(without,)))
        assert chosen(**form) != "flash_attn.cute" and "a wrong result" in capsys.readouterr().err
    install(monkeypatch, "flash_attn", flash_stand_in(calls))  # a version without the argument
    assert chosen(softcap=2.0) is None and "unexpected keyword argument" in capsys.readouterr().err


def test_which_chunks_a_library_is_given(monkeypatch, calls):
    install(monkeypatch, "torch.nn.attention.varlen", torch_stand_in(calls))

    def chosen(s, chunk, window=None, docs=None):
        counts = None if docs is None else DocumentCounts(1, s)
        q = torch.randn(2, s, 2, 32).bfloat16()
        mask = make_attention_mask(0, s, 0, s, window, docs, CPU, counts, chunk)
        return libraries.choose_library(q, q, q, mask) is not None

    assert chosen(512, 128) and not chosen(512, 64)  # shorter on average than MIN_MEAN_DOCUMENT
    assert not chosen(512, 150)  # the last chunk of a sequence is shorter
    assert not chosen(512, 128, window=30) and chosen(512, 128, window=200)
    assert not chosen(512, 128, docs=torch.zeros(2, 512))  # nobody has counted the pieces
    assert chosen(512, 512, docs=torch.zeros(2, 512))
