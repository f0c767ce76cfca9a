"""Generation under a layout writes what one process writes, with several stages on a rank as well, and a
prompt is read causally.
"""

from dataclasses import replace

import pytest
import torch

from build import build_run
from config.reading.tiny import tiny_config
from model.context import GenerationCache
from model.generate import generate, sample_token
from model.rope import rope_switches
from model.sharding import parallel_dims
from parallel.topology.mesh import Mesh
from parallel.wire.world import World

PROMPT, NEW = [5, 7, 11, 13, 2], 6
SEVERAL = (("interleaved", 2), ("interleaved", 4), ("zb-v", None), ("dualpipe-v", None))  # stages of one rank


def written(world, cfg) -> tuple[list[int], list[float]]:
    """The ids that a run writes after a prompt, and the logits after the prompt's first three tokens, read
    with and without more.
    """
    mesh = Mesh.bind(parallel_dims(cfg, world.size), world)
    run = build_run(cfg, mesh, torch.device("cpu"), None, cfg.train.steps)
    for bucket in run.buckets:  # far from uniform, so that ids depend on what was read
        bucket.weights.full.mul_(4) if bucket.weights.full is not None else None
    multiple = run.pipeline.hidden_shape.sequence_shards
    ids = list(generate(run.logits, PROMPT, NEW, temperature=0.0, multiple=multiple))
    places = torch.arange(len(PROMPT))[None]
    part = run.logits(torch.tensor([PROMPT[:3]]), places[:, :3], GenerationCache(), 2)
    # the same place, with tokens behind it
    whole = run.logits(torch.tensor([PROMPT]), places, GenerationCache(), 2)
    return ids, float((part - whole).abs().max())


@pytest.mark.slow(every=2, core=["deepseek-v2-lite-tiny"])
@pytest.mark.parametrize("name", ["llama3-tiny", "deepseek-v2-lite-tiny"])
def test_several_stages_on_a_rank(ranks, name):
    cfg = tiny_config(name, 2)
    cfg = replace(cfg, model=replace(cfg.model, dropout=0.0))
    alone, _ = written(World(), cfg)
    for schedule, vpp in SEVERAL:
        there = replace(cfg, parallel=replace(cfg.parallel, pp=2, schedule=schedule, vpp=vpp))
        for ids, ahead in ranks(2).run(written, there):
            assert ids == alone, schedule
            assert ahead < 1e-12, f"{schedule}: a token of the prompt sees the ones behind it"


def test_a_text_that_grows_beyond_the_original_context_is_read_again():
    """LongRoPE turns all of its tokens otherwise: with the keys of before, other ids would follow."""
    cfg = tiny_config("phi4-mini-tiny")
    run = build_run(cfg, Mesh.single(), torch.device("cpu"), None, 1)
    for bucket in run.buckets:
        bucket.weights.full.mul_(6)
    whole, again, kept = (
        list(generate(run.logits, PROMPT, 30, temperature=0.0, multiple=multiple, switches=switches))
        for multiple, switches in ((2, ()), (1, tuple(rope_switches(cfg.model))), (1, ()))
    )
    assert again == whole != kept


def test_ids_that_the_tokenizer_does_not_have_are_never_taken():
    """A table may be longer than the tokenizer: model.vocab, as published models round it up."""
    likelier = torch.arange(50.0)  # the last ids most of all
    for temperature in (0.0, 1.0):
        ids = list(generate(lambda *_: likelier, [1], 20, temperature=temperature, vocab=40))
        assert len(ids) == 20 and max(ids) == 39


def sampled(**how) -> list[int]:
    """64 ids that a model draws to which every of 50 tokens is as likely."""
    return list(generate(lambda *_: torch.zeros(50), [1], 64, temperature=1.0, **how))


def test_a_sample_is_a_function_of_its_seed_which_is_0_unless_given():
    assert sampled() == sampled(seed=0) != sampled(seed=1)
    stream = torch.Generator().manual_seed(0)
    assert sampled() == [int(torch.multinomial(torch.ones(50) / 50, 1, generator=stream)) for _ in range(64)]


@pytest.mark.parametrize("multiple", [2, 3, 4, 5])
def test_a_cut_sequence_is_read_whole_and_filled_up_to_what_the_ranks_divide(multiple):
    read = []

    def logits_of(tokens, positions, cache, at):
        read.append((tokens[0].tolist(), positions[0].tolist(), at))
        assert cache is None
        return torch.eye(50)[tokens[0, at] + 1]

    assert list(generate(logits_of, [7, 8], 5, temperature=0.0, multiple=multiple)) == [9, 10, 11, 12, 13]
    for n, (tokens, positions, at) in enumerate(read, 2):
        fill = next(k for k in range(multiple) if (n + k) % multiple == 0)
        assert tokens == [*range(7, 7 + n), *[0] * fill] and positions == [*range(n + fill)] and at == n - 1


@pytest.mark.parametrize("limit, multiple", [(5, 2), (5, 3), (6, 4), (7, 1)])
def test_padding_has_positions_that_a_table_of_learned_ones_holds(limit, multiple):
    """A table of `limit` positions, which the ranks need not divide: the last tokens read are all of them."""
    table = torch.zeros(limit, 3)
    num_read = []

    def logits_of(tokens, positions, cache, at):
        assert table[positions].shape[1] == tokens.shape[1]
        num_read.append(int(positions[0, at]) + 1)
        return torch.eye(50)[tokens[0, at] + 1]

    written = list(generate(logits_of, [7, 8], 50, temperature=0.0, multiple=multiple, limit=limit))
    assert num_read == [*range(2, limit + 1)]
    assert written == [9 + n for n in range(limit - 1)]


KEPT = [
    ({}, (0, 1, 2, 3)),
    ({"top_k": 2}, (1, 3)),
    ({"top_k": 4}, (0, 1, 2, 3)),
    ({"top_p": 0.79}, (1, 3)),
    ({"top_p": 0.81}, (0, 1, 3)),
    ({"top_p": 0.4}, (3,)),
    ({"top_k": 3, "top_p": 0.9}, (0, 1, 3)),
]


@pytest.mark.parametrize("how, kept", KEPT)
@pytest.mark.parametrize("temperature", [0.5, 1.0, 2.0])
def test_a_token_is_chosen_as_often_as_its_probability_says(how, kept, temperature):
    """p^(1 / temperature), of the k likeliest, of the smallest set with that much (arXiv 1904.09751)."""
    given = torch.tensor([0.15, 0.3, 0.05, 0.5], dtype=torch.float64) ** temperature
    p = torch.tensor([0.15, 0.3, 0.05, 0.5], dtype=torch.float64)[list(kept)]
    stream, n = torch.Generator().manual_seed(5), 600
    options = {"top_k": None, "top_p": None, "generator": stream} | how
    took = [sample_token(given.log(), temperature=temperature, **options) for _ in range(n)]
    assert set(took) == set(kept)
    for token, want in zip(kept, (p / p.sum()).tolist()):
        assert abs(took.count(token) / n - want) <= 5 * (want * (1 - want) / n) ** 0.5
    assert sample_token(given.log(), temperature=0.0, **options | {"top_k": None, "top_p": None}) == 3
