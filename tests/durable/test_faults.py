import errno
import math
import subprocess
import sys
import time
from types import SimpleNamespace

import pytest
import torch

from config import ConfigError
from durable.faults import Fault, FaultInjector, InjectedFault, disturb_next_sums, parse


def test_text_is_read_in_full():
    assert parse("a.b:rank=1:step=6:act=SIGKILL; c:act=sleep=0.5 ;") == [
        Fault("a.b", "SIGKILL", rank=1, step=6), Fault("c", "sleep", seconds=0.5),
    ]
    assert parse("") == []


@pytest.mark.parametrize(
    "text",
    [
        "a", "a:step=2", ":act=raise", "a:act=boom", "a:act=sleep", "a:act=sleep=x", "a:act=raise=3",
        "a:act=", "a:step=x:act=raise", "a:step=1:step=2:act=raise", "a:node=1:act=raise",
        "a:times=x:act=raise",
    ],
)
def test_bad_text_is_the_users_mistake(text):
    with pytest.raises(ConfigError, match="FAULT"):
        parse(text)


def test_an_unknown_point_is_refused():
    FaultInjector(parse("a:act=nan"), known=("a", "b"))
    with pytest.raises(ConfigError, match="no point 'c'; there are a, b"):
        FaultInjector(parse("c:act=nan"), known=("a", "b"))


def test_fires_at_its_point_rank_and_step_only():
    at = FaultInjector(parse("a:rank=1:step=3:act=nan"), rank=1)
    assert [at("a", 2), at("b", 3), at("a", 3), at("a", 4)] == [None, None, "nan", None]
    assert FaultInjector(parse("a:rank=1:step=3:act=nan"), rank=0)("a", 3) is None


def test_a_fault_happens_as_often_as_it_says():
    at = FaultInjector(parse("a:step=3:times=2:act=nan; a:step=4:act=spike"))
    assert [at("a", step) for step in (2, 3, 3, 3, 4, 4)] == [None, "nan", "nan", None, "spike", "spike"]


class Sums:
    """A bucket's gradients: before the sum and after it they are two tensors."""

    def __init__(self):
        self.full, self.local, self.before_sum = torch.tensor([1.0, -3.0]), torch.tensor([2.0]), []

    def reduce(self):
        for look in tuple(self.before_sum):
            look(self.full)


@pytest.mark.parametrize("action, disturbed", [
    ("nan", ([math.nan, -3.0], [1.0, -3.0])),
    ("bitflip", ([1.0, -2.0], [1.0, -3.0])),
    ("spike", ([1e4, -3e4], [1e4, -3e4])),
    ("sleep", ([1.0, -3.0], [1.0, -3.0])),
    (None, ([1.0, -3.0], [1.0, -3.0])),
])
def test_the_next_sum_is_disturbed_and_no_other(action, disturbed):
    buckets = [SimpleNamespace(grads=Sums(), trains=True), SimpleNamespace(grads=Sums(), trains=True)]
    disturb_next_sums(buckets, action)
    for bucket, numbers in zip(buckets, disturbed):
        bucket.grads.reduce()
        assert torch.equal(bucket.grads.full.nan_to_num(7), torch.tensor(numbers).nan_to_num(7))
        bucket.grads.full.fill_(5)
        bucket.grads.reduce()  # of the next microbatch
        assert bucket.grads.full.tolist() == [5, 5] and bucket.grads.local.tolist() == [2]


def test_a_point_without_a_step_belongs_to_the_last_step_named():
    at = FaultInjector(parse("save:step=6:act=nan"))
    seen = []
    for step in (5, 6, 7):
        at("step.begin", step)
        seen.append(at("save"))
    assert seen == [None, "nan", None]


def test_a_fault_raises_or_sleeps():
    with pytest.raises(InjectedFault, match="injected at a, step 1"):
        FaultInjector(parse("a:act=raise"))("a", 1)
    with pytest.raises(OSError) as e:
        FaultInjector(parse("a:act=ENOSPC"))("a", 1)
    assert e.value.errno == errno.ENOSPC
    begun = time.monotonic()
    assert FaultInjector(parse("a:act=sleep=0.05"))("a") == "sleep"
    assert time.monotonic() - begun >= 0.05


def test_sigkill_is_real():
    code = (
        "from durable.faults import *; FaultInjector(parse('a:step=2:act=SIGKILL'))('a', 2); print('alive')"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    assert done.returncode == -9 and "alive" not in done.stdout
    assert "fault a: rank 0 step 2 act SIGKILL" in done.stderr
