"""The cut of a sequence over cp: every token once, balanced work, and who sees whom, all against the
definition.
"""

from dataclasses import replace

import pytest
import torch

import config
from config.reading import resolve
from config.reading.schedules import plan_pipeline
from kernels.attention_mask import make_attention_mask as interval
from parallel.context.zigzag import (
    chunk_mask,
    shard_batch,
    shard_sequence,
    token_positions,
    unshard_sequence,
    visible_chunk_pairs,
)
from parallel.microbatch import Microbatch
from parallel.wire.comm import Group

SIZES = [(n, c) for n in (1, 2, 3, 4) for c in (1, 2, 5)]


@pytest.mark.parametrize("n,c", SIZES)
def test_every_place_once_and_rising(n, c):
    mine = [token_positions(2 * n * c, r, n) for r in range(n)]
    assert torch.cat(mine).sort().values.tolist() == list(range(2 * n * c))
    for r, p in enumerate(mine):
        assert (p.diff() > 0).all() and p[0] == r * c and p[-1] == (2 * n - r) * c - 1


@pytest.mark.parametrize("window", [None, 1, 2, 3, 4, 7, 100])
@pytest.mark.parametrize("n,c", SIZES)
@pytest.mark.parametrize("packed", [False, True])
def test_meetings_are_the_mask(n, c, window, packed):
    """What all ranks' meetings show, put together, is the mask of one process; nothing wholly hidden is
    met.
    """
    s = 2 * n * c
    docs = (
        (torch.rand(2, s, generator=torch.Generator().manual_seed(s)) < 0.3).cumsum(1, dtype=torch.int32)
        if packed
        else None
    )
    apart = torch.arange(s)[:, None] - torch.arange(s)
    true = ((apart >= 0) & (apart < (window or s)))[None, None].repeat(2, 1, 1, 1)
    if packed:
        true &= docs[:, None, :, None] == docs[:, None, None, :]
    seen = torch.zeros_like(true)
    for r in range(n):
        for source in range(n):
            met = visible_chunk_pairs(r, source, n, c, window)
            for i, m in enumerate(met):
                rows, keys = (
                    token_positions(s, rank, n)[half * c : (half + 1) * c]
                    for rank, half in ((r, m.query_half), (source, m.key_half))
                )
                see = chunk_mask(m, c, window, docs, torch.device("cpu"))
                part = torch.ones(2, 1, c, c, dtype=torch.bool) if see is None else see.expand(2, 1, c, c)
                assert packed or part.any(), "met in vain"
                assert (m.query_chunk == m.key_chunk) == (source == r and i < 2), "a chunk meets itself first"
                seen[:, :, rows[:, None], keys] |= part
    assert torch.equal(seen, true)


@pytest.mark.parametrize("n", [2, 3, 4, 8])
def test_work_is_balanced(n):
    """In every step of the ring, every rank has the work of two chunk pairs (half a pair on the diagonal)."""
    for r in range(n):
        for step in range(n):
            met = visible_chunk_pairs(r, (r - step) % n, n, 4, None)
            assert sum(0.5 if m.query_chunk == m.key_chunk else 1 for m in met) == 2


@pytest.mark.parametrize("n,c", SIZES)
def test_join_and_split(n, c):
    whole = torch.arange(3 * 2 * n * c * 2).view(3, 2 * n * c, 2)
    parts = shard_sequence(whole, n)
    assert all(torch.equal(parts[r], whole[:, token_positions(2 * n * c, r, n)]) for r in range(n))
    assert torch.equal(unshard_sequence(parts), whole)


def test_cut_of_a_batch():
    t = torch.arange(16).view(2, 8)
    whole = Microbatch(t, t + 100, t + 200, t.int(), torch.arange(2), 5)
    assert shard_batch(whole, Group("cp")) is whole
    part = shard_batch(whole, Group("cp", (0, 1), 1))
    assert part.sequence_positions.tolist() == [2, 3, 4, 5]
    for name in ("tokens", "targets", "positions"):
        assert torch.equal(getattr(part, name), getattr(whole, name)[:, 2:6])
    assert part.documents is whole.documents and part.sequence_ids is whole.sequence_ids and part.step == 5


@pytest.mark.parametrize(
    "over,match",
    [
        (
            {"seq_len": 36, "cp": 4},
            r"^train\.seq_len: 36 is not a multiple of 8, as parallel\.cp=4 requires; "
            r"try train\.seq_len .*32",
        ),
        ({"seq_len": 6, "cp": 4}, r"try train\.seq_len 8, 16$"),
        (
            {"seq_len": 36, "cp": 2, "tp": 4, "sp": True},
            r"^train\.seq_len: 36 is not a multiple of 8, .*sp over tp=4 require; try train\.seq_len .*32",
        ),
        (
            {"cp": 4, "tp": 2, "cp_kind": "ulysses"},
            r"^parallel\.cp_kind: ulysses .* = 2\*4 does not divide model\.mixer\.kv_heads=4; "
            r"use ring, or another degree; try parallel\.cp 2$",
        ),
        ({"cp": 3}, r"^parallel\.tp\*pp\*cp\*dp_rep = 1\*1\*3\*1 = 3 does not divide the world size 8"),
    ],
)
def test_what_cannot_be_cut_is_one_clear_line(over, match):
    cfg = resolve("llama3-tiny", None, [])
    seq, layout = over.get("seq_len", cfg.train.seq_len), {k: v for k, v in over.items() if k != "seq_len"}
    bad = replace(cfg, train=replace(cfg.train, seq_len=seq), parallel=replace(cfg.parallel, **layout))
    with pytest.raises(config.ConfigError, match=match) as e:
        plan_pipeline(bad, 8)
    assert "\n" not in str(e.value)


@pytest.mark.parametrize("n", [1, 2, 3])
@pytest.mark.parametrize("window", [None, 1, 5, 9])
@pytest.mark.parametrize("documents", [False, True])
def test_the_interval_that_a_gpu_reads_is_the_mask(n, window, documents):
    c, cpu = 4, torch.device("cpu")
    docs = (torch.rand(2, 2 * n * c) < 0.2).cumsum(1) if documents else None
    for index in range(n):
        for source in range(n):
            for m in visible_chunk_pairs(index, source, n, c, window):
                see = chunk_mask(m, c, window, docs, cpu)
                whole = interval(m.query_chunk * c, c, m.key_chunk * c, c, window, docs, cpu).dense_mask
                assert torch.equal(whole, torch.ones_like(whole) if see is None else see.expand_as(whole))
