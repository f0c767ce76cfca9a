"""torch's flex_attention sees what the mask says, with the scores that the call asks for.

On a CPU torch refuses its backward. Without that check its own definition runs, which reads the mask function
and the modification of scores, not the blocks, which another test covers.
"""

import sys
from functools import partial

import pytest
import torch
import torch.nn.attention.flex_attention as of_torch
from dense_mask import dense_attention

from kernels import attention_flex, largest_score
from kernels import attention_libraries as libraries
from kernels.attention import attention
from kernels.attention_mask import DocumentCounts, make_attention_mask
from kernels.attention_scores import ScoreForm

CPU = torch.device("cpu")
LENGTHS = [[3, 150, 1, 146], [299, 1]]  # of documents, on both sides of the limits of blocks
DOCUMENTS = torch.stack([torch.arange(len(row)).repeat_interleave(torch.tensor(row)) for row in LENGTHS])
MASKS = {
    "causal": {},
    "window": {"window": 130},
    "documents": {"docs": DOCUMENTS},
    "documents and a window": {"docs": DOCUMENTS, "window": 20},
    "chunks": {"chunk": 64},
    "documents and chunks": {"docs": DOCUMENTS, "chunk": 70},
}
SCORES = {
    "plain": {},
    "scale": {"scale": 0.3},
    "soft cap": {"softcap": 2.0},
    "sinks": {"sinks": True},
    "all": {"scale": 0.3, "softcap": 2.0, "sinks": True},
}


def with_largest_scores(*args, real=of_torch._apply_kernel_options):
    """torch's check of a call, which refuses largest scores on a CPU, though its definition has them."""
    *tensors, aux = args
    options = real(*tensors, None if aux is None else aux._replace(max_scores=False))
    return options | {"OUTPUT_MAX": aux is not None and aux.max_scores}


@pytest.fixture
def flex_on_a_cpu(monkeypatch):
    """No other library is installed, and libraries run on a CPU."""
    monkeypatch.setattr(of_torch, "_validate_device", lambda *_: None)
    monkeypatch.setattr(of_torch, "_apply_kernel_options", with_largest_scores)
    monkeypatch.setattr(of_torch, "_FLEX_ATTENTION_DISABLE_COMPILE_DEBUG", True)
    monkeypatch.setattr(libraries, "DEVICES", ("cpu",))
    monkeypatch.setattr(libraries, "FLEX_MIN_LENGTH", 300)
    for library in libraries.LIBRARIES:
        if library.module != attention_flex.__name__:
            monkeypatch.setitem(sys.modules, library.module, None)
    caches = (libraries.installed_function, libraries.passes_trial, largest_score.passes_trial)
    for cache in caches:
        cache.cache_clear()
    yield
    for cache in caches:
        cache.cache_clear()


def make_mask(s, window=None, docs=None, chunk=None, query_start=0, counts=None):
    return make_attention_mask(query_start, s - query_start, 0, s, window, docs, CPU, counts, chunk)


@pytest.mark.parametrize("form", SCORES)
@pytest.mark.parametrize("masked", MASKS)
def test_flex_attention_is_the_definition(flex_on_a_cpu, masked, form):
    """In fp64, with grouped queries and values of another dim; the gradients of q, k, v and sinks, too."""
    s, mask = 300, make_mask(300, **MASKS[masked])
    shapes = ((2, s, 4, 32), (2, s, 2, 32), (2, s, 2, 24), (4,))
    leaves = [torch.randn(shape, dtype=torch.float64, requires_grad=True) for shape in shapes]
    options = dict(SCORES[form])
    sinks = leaves[3] if options.pop("sinks", False) else None
    given = None if mask.is_causal else mask
    out, lse = attention_flex.masked_attention(
        *leaves[:3], given, ScoreForm(**options), with_lse=sinks is not None)
    out = libraries.with_sinks(out, lse, sinks)
    want = dense_attention(*leaves[:3], mask.dense_mask, **options, sinks=sinks)

    dy = torch.randn_like(want)
    asked = leaves[:3] if sinks is None else leaves
    for got, true in zip(
        (out, *torch.autograd.grad(out, asked, dy)), (want, *torch.autograd.grad(want, asked, dy))
    ):
        torch.testing.assert_close(got, true, rtol=0, atol=1e-11)


@pytest.mark.parametrize("query_start", [0, 44])
@pytest.mark.parametrize("masked", MASKS)
def test_blocks_are_those_of_the_mask(masked, query_start):
    """A block that is not listed has no pair, and one that is listed as full has all."""
    s, size = 300, attention_flex.BLOCK
    mask = make_mask(s, **MASKS[masked], query_start=query_start)
    blocks = attention_flex.make_block_mask(mask)

    # pairs of each block, with the last blocks filled up: seen [b, blocks of queries, of keys, pairs]
    visible = mask.dense_mask[:, 0]
    rows, columns = (-(-n // size) * size for n in visible.shape[1:])
    padded = torch.zeros(len(visible), rows, columns, dtype=torch.bool)
    padded[:, :visible.shape[1], :visible.shape[2]] = visible
    seen = padded.unflatten(2, (-1, size)).unflatten(1, (-1, size)).transpose(2, 3).flatten(3)

    partial = listed(blocks.kv_num_blocks, blocks.kv_indices)
    full = listed(blocks.full_kv_num_blocks, blocks.full_kv_indices)
    assert not (partial & full).any()
    assert torch.equal(partial | full, seen.any(-1))
    assert torch.equal(full, seen.all(-1))


def listed(counts, indices):
    """int32 [b, 1, n], [b, 1, n, m] -> bool [b, n, m]: the blocks that a row lists."""
    chosen = torch.zeros(indices.shape, dtype=torch.bool)
    first = torch.arange(indices.shape[-1]) < counts[..., None]
    return chosen.scatter(-1, indices.long(), first)[:, 0]


def test_flex_attention_takes_what_no_other_library_does(flex_on_a_cpu, monkeypatch, capsys):
    """Short documents, and documents that the host cannot count: not plain causal attention, SDPA's."""
    q, k, v = (torch.randn(2, 300, heads, 32).bfloat16() for heads in (4, 2, 2))

    def chosen(mask, form=ScoreForm(), has_sinks=False):
        choice = libraries.choose_library(q, k, v, mask, form, has_sinks)
        return choice and choice.library.module

    flex = attention_flex.__name__
    assert chosen(make_mask(300, docs=DOCUMENTS)) == flex
    assert chosen(make_mask(300, docs=DOCUMENTS, counts=DocumentCounts(6, 299))) == flex
    assert chosen(None, ScoreForm(softcap=2.0)) == chosen(None, has_sinks=True) == flex
    assert chosen(None) is None is chosen(make_mask(300, docs=DOCUMENTS).dense_mask)
    monkeypatch.setattr(libraries, "FLEX_MIN_LENGTH", 301)
    assert chosen(make_mask(300, docs=DOCUMENTS)) is None
    assert not capsys.readouterr().err

    monkeypatch.setattr(libraries, "FLEX_MIN_LENGTH", 300)
    mask = make_mask(300, docs=DOCUMENTS, window=20)
    sinks = torch.randn(4)
    out = attention(q, k, v, mask, "flash", softcap=2.0, sinks=sinks)
    want = dense_attention(q.double(), k.double(), v.double(), mask.dense_mask, None, 2.0, sinks.double())
    assert (out.double() - want).norm() < 0.01 * want.norm()


@pytest.mark.parametrize("wrong", ["mask", "soft cap", "logsumexp"])
def test_a_flex_attention_that_is_wrong_is_not_used(flex_on_a_cpu, monkeypatch, capsys, wrong):
    real = attention_flex.flex_attention

    def broken(q, k, v, **options):
        if wrong == "mask":
            options["block_mask"] = attention_flex.causal_blocks(q.shape[2], q.device)
        if wrong == "soft cap":
            options["score_mod"] = None
        if wrong == "logsumexp":
            out, aux = real(q, k, v, **options)
            return out, aux._replace(lse=aux.lse.detach())
        return real(q, k, v, **options)

    monkeypatch.setattr(attention_flex, "flex_attention", broken)
    q = torch.randn(2, 300, 2, 32).bfloat16()
    form = ScoreForm(softcap=2.0 if wrong == "soft cap" else None)
    mask = make_mask(300, docs=DOCUMENTS)
    assert libraries.choose_library(q, q, q, mask, form, has_sinks=wrong == "logsumexp") is None
    assert "flex_attention is installed but not used" in capsys.readouterr().err


def test_all_layers_share_the_blocks_of_a_mask():
    mask = make_mask(300, docs=DOCUMENTS)
    assert attention_flex.block_mask(mask) is attention_flex.block_mask(mask)
    assert attention_flex.block_mask(make_mask(300, docs=DOCUMENTS)) is not attention_flex.block_mask(mask)


# ---- the largest scores ------------------------------------------------------------------------------------

@pytest.mark.parametrize("heads", [(4, 2), (2, 2)], ids=["grouped", "not grouped"])
@pytest.mark.parametrize("form", ["plain", "scale", "soft cap"])
@pytest.mark.parametrize("masked", MASKS)
def test_largest_scores_are_those_of_the_definition(flex_on_a_cpu, monkeypatch, masked, form, heads):
    monkeypatch.setattr(libraries, "DTYPES", (torch.float64,))
    s, mask, options = 300, make_mask(300, **MASKS[masked]), SCORES[form]
    q, k = (torch.randn(2, s, number, 32, dtype=torch.float64) for number in heads)
    assert largest_score.takes_flex(q, k)
    found = largest_score.largest_scores(q, k, mask, ScoreForm(**options))

    scores = torch.einsum("bqhd,bkhd->bhqk", q, k.repeat_interleave(heads[0] // heads[1], 2))
    scores = scores * options.get("scale", 32**-0.5)
    if "softcap" in options:
        scores = options["softcap"] * torch.tanh(scores / options["softcap"])
    want = scores.masked_fill(~mask.dense_mask, float("-inf")).amax((0, 2, 3))
    torch.testing.assert_close(found, want, rtol=1e-12, atol=0)


def test_a_score_that_is_not_a_number_is_seen(flex_on_a_cpu, monkeypatch):
    monkeypatch.setattr(libraries, "DTYPES", (torch.float32,))
    q, k = torch.randn(1, 300, 2, 32), torch.randn(1, 300, 2, 32)
    q[0, 70, 1, 3] = float("nan")
    found = largest_score.largest_scores(q, k, make_mask(300), ScoreForm())
    assert found.isnan().tolist() == [False, True]


def all_pairs(real, *args, **options):
    s_q, s_k = (x.shape[2] for x in args[:2])
    everything = make_attention_mask(s_k - 1, s_q, 0, s_k, None, None, CPU)
    return real(*args, **options | {"block_mask": attention_flex.make_block_mask(everything)})


def without_scale(real, *args, **options):
    return real(*args, **options | {"scale": 1.0})


def of_smallest(real, *args, **options):
    out, aux = real(*args, **options)
    return out, aux._replace(max_scores=-aux.max_scores)


def not_compiled(real, *args, **options):
    raise RuntimeError("no template fits")


@pytest.mark.parametrize("broken, reason", [
    (all_pairs, "a wrong result"),
    (without_scale, "a wrong result"),
    (of_smallest, "a wrong result"),
    (not_compiled, "no template fits"),
])
def test_a_flex_attention_that_is_wrong_gives_no_scores(flex_on_a_cpu, monkeypatch, capsys, broken, reason):
    real = attention_flex.flex_attention
    monkeypatch.setattr(attention_flex, "flex_attention", partial(broken, real))
    q, k = (torch.randn(1, 300, heads, 32).bfloat16() for heads in (4, 2))
    assert not largest_score.takes_flex(q, k)
    found = largest_score.largest_scores(q, k, make_mask(300), ScoreForm())
    assert torch.equal(found, largest_score.largest_in_chunks(q, k, make_mask(300), ScoreForm()))
    line = capsys.readouterr().err
    assert "flex_attention is not used for head dim 32" in line and reason in line


@pytest.mark.parametrize("length, dtype, head_dim", [
    (299, torch.bfloat16, 32), (300, torch.float32, 32), (300, torch.bfloat16, 8),
])
def test_short_sequences_other_dtypes_and_small_heads_are_left_to_products(
    flex_on_a_cpu, length, dtype, head_dim
):
    q = torch.randn(1, length, 2, head_dim).to(dtype)
    assert not largest_score.takes_flex(q, q)
