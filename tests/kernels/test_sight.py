"""The interval of keys that a query sees is the mask, bit for bit."""
import pytest
import torch

from kernels.attention import mask
from kernels.sight import sight

CPU = torch.device("cpu")


@pytest.mark.parametrize("query, s_q, key, s_k", [(0, 23, 0, 23), (20, 3, 0, 23), (12, 6, 6, 6), (0, 1, 0, 1)])
@pytest.mark.parametrize("window", [None, 1, 5, 100])
@pytest.mark.parametrize("documents", [False, True])
def test_the_interval_is_the_mask(query, s_q, key, s_k, window, documents):
    docs = (torch.rand(2, 30) < 0.2).cumsum(1) if documents else None
    queries, keys = torch.arange(query, query + s_q), torch.arange(key, key + s_k)
    apart = queries[:, None] - keys
    want = ((apart >= 0) & (apart < (window or 99)))[None, None]
    if documents:
        want = want & (docs[:, None, queries, None] == docs[:, None, None, keys])
    see = sight(query, s_q, key, s_k, window, docs, CPU)
    assert torch.equal(see.dense, want.expand(see.dense.shape))
    if see.first is not None:  # from the keys' side
        places = queries[None, :, None]
        seen = (places >= keys) & (places < see.last[:, None, :])
        assert torch.equal(see.dense[:, 0], seen.expand_as(see.dense[:, 0]))
        assert (see.first.diff(dim=1) >= 0).all() and (see.last.diff(dim=1) >= 0).all()


def test_what_is_said_of_the_whole():
    assert sight(0, 9, 0, 9, None, None, CPU).plain and sight(0, 9, 0, 9, 9, None, CPU).plain
    assert not sight(0, 9, 0, 9, 4, None, CPU).plain and not sight(4, 5, 0, 9, None, None, CPU).plain
    assert sight(4, 5, 0, 9, 4, None, CPU).window == 4
    assert sight(0, 9, 0, 9, 4, torch.zeros(1, 9), CPU).window is None


def test_the_mask_of_bits_says_the_same():
    docs, place = (torch.rand(2, 30) < 0.2).cumsum(1), torch.arange(30)
    assert torch.equal(sight(0, 30, 0, 30, 7, docs, CPU).dense, mask(place, place, 7, docs, docs))
