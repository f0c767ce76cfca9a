"""Exchanges of ranks: those of every schedule meet, and every planted fault is named."""

import functools

import pytest
import torch

from config.reading import resolve
from model.sharding import parallel_dims
from parallel.wire.lanes import PostedExchange, Wait
from plan.record.check import TRANSPORTS, check
from plan.record.launches import CHIPS
from plan.record.role import record_role
from scripts.dry_run import make_program

SIZE = (
    "--model.vocab 64 --model.layers 8 --model.hidden 16 --model.mixer.heads 2 --model.mixer.kv_heads none "
    "--model.mlp.width 16 --train.seq_len 8 --train.micro_batch 1 --train.global_batch 8 "
    "--model.vocab_multiple 32"
).split()
LANE = ("", (0, 1))


def posted(number: int, verb: str, peer: int | None = None, **changes) -> PostedExchange:
    exchange = PostedExchange(
        number,
        batch=number,
        lane=LANE,
        group="pp",
        verb=verb,
        nbytes=64,
        dtype=torch.float32,
        peer=peer,
        time=0,
    )
    return exchange._replace(**changes)


def in_order(*exchanges: PostedExchange) -> list:
    """A rank that waits for each before it posts the next."""
    return [event for one in exchanges for event in (one, Wait(one.number, 0))]


@functools.cache
def recorded(words: str) -> dict[int, list]:
    cfg = resolve("llama3-tiny", None, [*SIZE, *words.split()])
    dims = parallel_dims(cfg, cfg.parallel.pp * cfg.parallel.tp)
    ranks = dims.group(0, "pp")
    return {rank: record_role(cfg, dims, rank, CHIPS["h100"], make_program(cfg)).events for rank in ranks}


@pytest.mark.slow(core=["--parallel.pp 2"])
@pytest.mark.parametrize("words", [
    "--parallel.pp 2",
    "--parallel.pp 2 --parallel.schedule gpipe",
    "--parallel.pp 4 --parallel.schedule interleaved",
    "--parallel.pp 4 --parallel.schedule zb-h1",
    "--parallel.pp 4 --parallel.schedule zb-v",
    "--parallel.pp 4 --parallel.schedule dualpipe-v",
    "--parallel.pp 2 --parallel.tp 2 --model.tied true --parallel.zero 1",
])
def test_the_exchanges_of_every_schedule_meet(words):
    events = recorded(words)
    assert all(any(getattr(event, "verb", "") == "send" for event in own) for own in events.values())
    for transport in TRANSPORTS:
        assert check(events, transport) == []


def test_what_a_program_posts_in_another_order_hangs():
    """Two neighbours that both receive before they send."""
    first = in_order(posted(0, "receive", 1), posted(1, "send", 1))
    second = in_order(posted(0, "receive", 0), posted(1, "send", 0))
    for transport in TRANSPORTS:
        assert check({0: first, 1: second}, transport) == [
            "rank 0 waits forever: receive of 64 bytes from rank 1 in group pp in ranks 0, 1",
            "rank 1 waits forever: receive of 64 bytes from rank 0 in group pp in ranks 0, 1",
        ]


def test_sends_that_meet_hang():
    """Over gloo too: its send ends with its receive, however small (tests/parallel/wire/test_lanes.py)."""
    events = {
        0: in_order(posted(0, "send", 1), posted(1, "receive", 1)),
        1: in_order(posted(0, "send", 0), posted(1, "receive", 0)),
    }
    for transport in TRANSPORTS:
        assert len(check(events, transport)) == 2
    together = {rank: [one._replace(batch=0) for one in own if isinstance(one, PostedExchange)]
                for rank, own in events.items()}
    assert check(together, "nccl") == []  # NCCL runs what is posted together beside each other


def test_what_stands_behind_another_exchange_of_its_lane_is_named():
    events = {
        0: [posted(0, "receive", 1), posted(1, "send", 1), Wait(1, 0)],
        1: in_order(posted(0, "receive", 0), posted(1, "send", 0)),
    }
    assert check(events, "gloo") == []
    assert check(events, "nccl")[0] == (
        "rank 0 waits forever: send of 64 bytes to rank 1 in group pp in ranks 0, 1, "
        "behind receive of 64 bytes from rank 1 in group pp"
    )
    apart = {rank: [one._replace(lane=("backward", (0, 1))) if getattr(one, "verb", "") == "receive" and
                    rank == 0 or getattr(one, "verb", "") == "send" and rank == 1 else one for one in own]
             for rank, own in events.items()}
    assert check(apart, "nccl") == []  # over a communicator of its own


@pytest.mark.parametrize("transport", TRANSPORTS)
def test_collectives_that_differ_are_named(transport):
    own = in_order(posted(0, "all_reduce"), posted(1, "all_gather"))
    assert check({0: own, 1: own}, transport) == []
    other = in_order(posted(0, "all_gather"), posted(1, "all_reduce"))
    (finding,) = check({0: own, 1: other}, transport)
    assert finding == (
        "ranks 0, 1: rank 0 runs all_reduce of 64 bytes in group pp, where rank 1 runs all_gather of 64 "
        "bytes in group pp"
    )
    for changes in ({"nbytes": 128}, {"dtype": torch.bfloat16}):
        wrong = in_order(posted(0, "all_reduce", **changes), posted(1, "all_gather"))
        assert len(check({0: own, 1: wrong}, transport)) == 1
    sizes = {rank: in_order(posted(0, "all_to_all", nbytes=64 * rank)) for rank in (0, 1)}
    assert check(sizes, transport) == []  # each rank has its own


@pytest.mark.parametrize("transport", TRANSPORTS)
def test_an_exchange_that_is_left_out_is_found(transport):
    events = recorded("--parallel.pp 2")
    own = events[1]
    for at, event in enumerate(own):
        if not isinstance(event, PostedExchange):
            continue
        without = [one for one in own if getattr(one, "number", None) != event.number]
        assert check({0: events[0], 1: without}, transport), event


def test_messages_of_other_sizes_are_found():
    events = {0: in_order(posted(0, "send", 1)), 1: in_order(posted(0, "receive", 0, nbytes=32))}
    for transport in TRANSPORTS:
        (finding,) = check(events, transport)
        assert "64 bytes" in finding and "32 bytes" in finding
