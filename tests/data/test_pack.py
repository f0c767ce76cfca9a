"""data/pack.py: positions, documents and targets at boundaries."""

import numpy as np

from data.pack import pack_windows


def test_windows_without_boundaries_count_every_target():
    b = pack_windows([np.arange(5, dtype="<u2"), np.arange(10, 15, dtype="<u2")], None)
    assert b.tokens.tolist() == [[0, 1, 2, 3], [10, 11, 12, 13]]
    assert b.targets.tolist() == [[1, 2, 3, 4], [11, 12, 13, 14]]
    assert b.positions.tolist() == [[0, 1, 2, 3]] * 2
    assert b.documents is None


def test_a_token_is_a_target_where_its_predecessor_is_of_its_document():
    """Every token that has a predecessor in its own document is a target exactly once."""
    rng = np.random.default_rng(0)
    for _ in range(100):
        s = int(rng.integers(1, 30))
        starts = np.unique(rng.integers(1, s + 1, rng.integers(0, s + 1)))
        b = pack_windows([np.arange(s + 1)], [starts])
        docs = np.searchsorted(starts, np.arange(s + 1), side="right")
        assert b.documents[0].tolist() == docs[:-1].tolist()
        assert b.targets[0].tolist() == [t if docs[t] == docs[t - 1] else -100 for t in range(1, s + 1)]
        firsts = np.concatenate([[0], starts])[docs[:-1]]
        assert b.positions[0].tolist() == (np.arange(s) - firsts).tolist()


def test_one_window_with_boundaries_leaves_its_tokens_alone():
    """With a single row, a slice of it is contiguous: targets that were a view of the tokens' memory would
    write -100 into them.
    """
    b = pack_windows([np.arange(9)], [np.array([3, 6])])
    assert b.tokens.tolist() == [[0, 1, 2, 3, 4, 5, 6, 7]]
    assert b.targets.tolist() == [[1, 2, -100, 4, 5, -100, 7, 8]]
    before = b.tokens.clone()
    b.targets.fill_(-1)
    assert b.tokens.equal(before)
