"""Ranks that wait for the slowest of them: results, errors, and an end to the patience, the same on all."""

import threading
import time

import pytest
from sample import ranks

from checkpoint.disk.together import agree_on_outcome
from parallel.wire.comm import PeerError


def run(works, patience) -> list:
    """agree_on_outcome() on a thread a rank; each one's result or exception."""
    out, gathers = [None] * len(works), [each.gather for each in ranks(len(works))]

    def one(rank):
        try:
            out[rank] = agree_on_outcome(gathers[rank], works[rank], patience)
        except Exception as error:
            out[rank] = error

    threads = [threading.Thread(target=one, args=(rank,)) for rank in range(len(works))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(20)
    return out


def after(seconds: float, value):
    def work():
        time.sleep(seconds)
        if isinstance(value, Exception):
            raise value
        return value

    return work


@pytest.mark.parametrize("patience", [None, 30.0])
def test_everyone_gets_its_own_result_when_all_are_done(patience):
    assert run([after(0.0, "a"), after(0.3, "b"), after(0.1, "c")], patience) == ["a", "b", "c"]


@pytest.mark.parametrize("patience", [None, 30.0])
def test_the_first_error_is_raised_on_all(patience):
    first, last = ValueError("first"), OSError("last")
    assert run([after(0.0, "a"), after(0.2, first), after(0.0, last)], patience) == [first, first, first]


def test_patience_has_an_end_and_names_who_is_late():
    out = run([after(0.0, "a"), after(3.0, "b"), after(0.0, "c")], 0.3)
    assert all(isinstance(e, PeerError) and e.exit_code == 76 for e in out)
    assert {str(e) for e in out} == {
        "rank 1 did not finish reading or writing within 0.3 s (checkpoint.timeout_s)"
    }


def test_nobody_waits_long_after_the_slowest():
    begun = time.monotonic()
    assert run([after(0.0, 1), after(0.0, 2)], 30.0) == [1, 2]
    assert time.monotonic() - begun < 1.0


def test_one_meeting_is_never_as_long_as_the_work():
    """Each meeting is an exchange under parallel.timeout_s: none may wait for the work itself, nor do the
    ranks meet all the time.
    """
    gaps, meet = [], [each.gather for each in ranks(2)]

    def gather(x):
        begun = time.monotonic()
        every = meet[0](x)
        gaps.append(time.monotonic() - begun)
        return every

    out = []
    other = threading.Thread(target=lambda: out.append(agree_on_outcome(meet[1], after(2.5, "slow"), 30.0)))
    other.start()
    assert agree_on_outcome(gather, after(0.0, "fast"), 30.0) == "fast"
    other.join()
    assert out == ["slow"]
    assert max(gaps) < 1.5 and 3 < len(gaps) < 20
