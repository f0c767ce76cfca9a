"""Packed documents and windows go to a library's function of variable length as it expects them: each library
is a stand-in here that computes by its own published conventions, one query at a time, on a CPU.
"""

import importlib
import inspect
import math
import sys
import types

import pytest
import torch
from dense_mask import visible_keys

from data.pack import pack_windows
from kernels import attention as kernel
from kernels import attention_libraries as libraries
from kernels.attention import attention, attention_reference
from kernels.attention_mask import DocumentCounts, document_ends, make_attention_mask

CPU = torch.device("cpu")


def by_definition(q, k, v, q_ends, k_ends, left, right, scale=None):
    """Variable length attention as flash-attn and torch document it: q [tokens, h, d]. Query i of a document
    of as many keys sees the keys i - left .. i + right; -1: no limit on that side.
    """
    assert q_ends.dtype == k_ends.dtype == torch.int32 and q_ends[0] == 0 and q_ends[-1] == len(q) == len(k)
    scale = scale or 1 / math.sqrt(q.shape[-1])
    group = q.shape[1] // k.shape[1]
    rows = []
    for start, end in zip(q_ends.tolist(), q_ends.tolist()[1:]):
        for i in range(start, end):
            low = start if left < 0 else max(start, i - left)
            high = end if right < 0 else min(end, i + right + 1)
            for head in range(q.shape[1]):
                scores = k[low:high, head // group].float() @ q[i, head].float() * scale
                rows.append(scores.softmax(0) @ v[low:high, head // group].float())
    return torch.stack(rows).view(len(q), q.shape[1], -1).to(q.dtype)


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
    monkeypatch.setattr(libraries, "compute_capability", lambda device: 8)
    assert chosen() == "flash_attn"
    monkeypatch.setattr(libraries, "compute_capability", lambda device: 7)
    assert chosen() is None


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
