"""The interval of keys that a query sees is the mask, bit for bit."""

import pytest
import torch
from dense_mask import visible_keys

from kernels.attention_mask import DocumentCounts, make_attention_mask

CPU = torch.device("cpu")


@pytest.mark.slow(every=11)
@pytest.mark.parametrize(
    "query, s_q, key, s_k", [(0, 23, 0, 23), (20, 3, 0, 23), (12, 6, 6, 6), (0, 1, 0, 1)]
)
@pytest.mark.parametrize("window", [None, 1, 5, 100])
@pytest.mark.parametrize("documents", [False, True])
def test_the_interval_is_the_mask(query, s_q, key, s_k, window, documents):
    docs = (torch.rand(2, 30) < 0.2).cumsum(1) if documents else None
    queries, keys = torch.arange(query, query + s_q), torch.arange(key, key + s_k)
    apart = queries[:, None] - keys
    want = ((apart >= 0) & (apart < (window or 99)))[None, None]
    if documents:
        want = want & (docs[:, None, queries, None] == docs[:, None, None, keys])
    mask = make_attention_mask(query, s_q, key, s_k, window, docs, CPU)
    assert torch.equal(mask.dense_mask, want.expand(mask.dense_mask.shape))
    if mask.first_key is not None:  # from the keys' side
        places = queries[None, :, None]
        seen = (places >= keys) & (places < mask.query_end[:, None, :])
        assert torch.equal(mask.dense_mask[:, 0], seen.expand_as(mask.dense_mask[:, 0]))
        assert (mask.first_key.diff(dim=1) >= 0).all() and (mask.query_end.diff(dim=1) >= 0).all()


def test_what_is_said_of_the_whole():
    assert (
        make_attention_mask(0, 9, 0, 9, None, None, CPU).is_causal
        and make_attention_mask(0, 9, 0, 9, 9, None, CPU).is_causal
    )
    assert (
        not make_attention_mask(0, 9, 0, 9, 4, None, CPU).is_causal
        and not make_attention_mask(4, 5, 0, 9, None, None, CPU).is_causal
    )
    assert make_attention_mask(4, 5, 0, 9, 4, None, CPU).window == 4
    assert make_attention_mask(0, 9, 0, 9, 4, torch.zeros(1, 9), CPU).window is None


def test_the_mask_of_bits_says_the_same():
    docs, place = (torch.rand(2, 30) < 0.2).cumsum(1), torch.arange(30)
    assert torch.equal(
        make_attention_mask(0, 30, 0, 30, 7, docs, CPU).dense_mask, visible_keys(place, place, 7, docs, docs)
    )


@pytest.mark.slow(every=3)
@pytest.mark.parametrize("window", [None, 4, 9, 40])
@pytest.mark.parametrize("documents", [False, True])
def test_a_part_of_a_mask_is_that_part(window, documents):
    """As ring attention takes the chunks of a rank from the mask of the full sequence."""
    docs = (torch.rand(2, 32) < 0.2).cumsum(1) if documents else None
    whole = make_attention_mask(0, 32, 0, 32, window, docs, CPU)
    for query, key in ((0, 0), (24, 0), (24, 16), (8, 8), (16, 8)):
        part = whole.part(query, 8, key, 8)
        want = whole.dense_mask[:, :, query : query + 8, key : key + 8]
        assert torch.equal(part.dense_mask, want)
        alone = make_attention_mask(query, 8, key, 8, window, docs, CPU)
        assert torch.equal(*torch.broadcast_tensors(part.dense_mask, alone.dense_mask))
        assert part.window is None or query == key


# ---- chunks ------------------------------------------------------------------------------------------------

def by_the_definition(s, window, docs, chunk):
    """bool [b, s, s]: which query sees which key. Chunks count from the start of a document."""
    docs = torch.zeros(1, s) if docs is None else docs
    first = torch.tensor([[row.index(x) for x in row] for row in docs.tolist()])  # of its document
    place = torch.arange(s)
    number = (place - first) // chunk
    apart = place[:, None] - place
    see = (apart >= 0) & (apart < (window or s))
    return see & (docs[:, :, None] == docs[:, None]) & (number[:, :, None] == number[:, None])


@pytest.mark.parametrize("chunk", [1, 4, 7, 100])
@pytest.mark.parametrize("window", [None, 3])
@pytest.mark.parametrize("documents", [False, True])
def test_chunks(chunk, window, documents):
    """Of full sequences, after a cache, and of two parts of a ring."""
    docs = (torch.rand(2, 30) < 0.15).cumsum(1) if documents else None
    want = by_the_definition(30, window, docs, chunk)
    for query, s_q, key, s_k in ((0, 30, 0, 30), (22, 8, 0, 30), (29, 1, 0, 30), (12, 6, 6, 6), (4, 4, 4, 4)):
        mask = make_attention_mask(query, s_q, key, s_k, window, docs, CPU, chunk=chunk)
        true = want[:, query : query + s_q, key : key + s_k]
        assert torch.equal(mask.dense_mask[:, 0].expand_as(true), true)
        whole = make_attention_mask(0, 30, 0, 30, window, docs, CPU, chunk=chunk)
        part = whole.part(query, s_q, key, s_k)
        assert torch.equal(part.dense_mask[:, 0].expand_as(true), true) and part.chunk is None
        if mask.first_key is not None:  # from the keys' side
            queries, keys = torch.arange(query, query + s_q)[None, :, None], torch.arange(key, key + s_k)
            seen = (queries >= keys) & (queries < mask.query_end[:, None, :])
            assert torch.equal(seen.expand_as(true), true)
            assert (mask.first_key.diff(dim=1) >= 0).all() and (mask.query_end.diff(dim=1) >= 0).all()


def test_what_is_said_of_chunks():
    def of(s, window=None, docs=None, chunk=4, counts=None):
        return make_attention_mask(0, s, 0, s, window, docs, CPU, counts, chunk)

    assert of(8).chunk == 4 and of(8).window is None
    assert of(4).is_causal and of(8, chunk=8).is_causal  # one chunk
    assert of(9).chunk is None and of(8, window=3).chunk is None and of(8, window=3).window is None
    assert of(8, window=3, chunk=8).window == 3
    docs = torch.tensor([[0, 0, 0, 1, 1, 1, 1, 1]])
    counts = DocumentCounts(2, 5)
    assert of(8, docs=docs, counts=counts).packed is None  # the host cannot count the pieces
    assert of(8, docs=docs, counts=counts, chunk=5).packed is not None and of(8, docs=docs).chunk is None


@pytest.mark.parametrize("packed", [False, True])
def test_chunks_are_those_of_transformers(packed):
    """Whose positions restart where a document does, too."""
    transformers = pytest.importorskip("transformers", reason="transformers is not installed")
    lengths = [11, 3, 16] if packed else [30]
    docs = torch.arange(len(lengths)).repeat_interleave(torch.tensor(lengths))[None]
    config = transformers.Llama4TextConfig(attention_chunk_size=4, num_hidden_layers=1)
    config._attn_implementation = "eager"
    theirs = transformers.masking_utils.create_chunked_causal_mask(
        config,
        inputs_embeds=torch.zeros(1, 30, 8),
        attention_mask=None,
        cache=None,
        position_ids=torch.cat([torch.arange(length) for length in lengths])[None],
    )
    ours = make_attention_mask(0, 30, 0, 30, None, docs if packed else None, CPU, chunk=4)
    assert torch.equal(ours.dense_mask, theirs == 0)
