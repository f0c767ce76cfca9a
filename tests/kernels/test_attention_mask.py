"""The interval of keys that a query sees is the mask, bit for bit."""

import pytest
import torch
from dense_mask import visible_keys

from kernels.attention_mask import make_attention_mask

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
