import errno
import subprocess
import sys
import time

import pytest

from config import ConfigError
from runtime.faults import Fault, FaultInjector, InjectedFault, parse


def test_text_is_read_in_full():
    assert parse("a.b:rank=1:step=6:act=SIGKILL; c:act=sleep=0.5 ;") == [
        Fault("a.b", "SIGKILL", rank=1, step=6),
        Fault("c", "sleep", seconds=0.5),
    ]
    assert parse("") == []


@pytest.mark.parametrize(
    "text",
    [
        "a",
        "a:step=2",
        ":act=raise",
        "a:act=boom",
        "a:act=sleep",
        "a:act=sleep=x",
        "a:act=raise=3",
        "a:act=",
        "a:step=x:act=raise",
        "a:step=1:step=2:act=raise",
        "a:node=1:act=raise",
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


def test_a_point_without_a_step_belongs_to_the_last_step_named():
    at = FaultInjector(parse("save:step=6:act=nan"))
    seen = []
    for step in (5, 6, 7):
        at("step.begin", step)
        seen.append(at("save"))
    assert seen == [None, "nan", None]


def test_acts():
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
        "from runtime.faults import *; FaultInjector(parse('a:step=2:act=SIGKILL'))('a', 2); print('alive')"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    assert done.returncode == -9 and "alive" not in done.stdout
    assert "fault a: rank 0 step 2 act SIGKILL" in done.stderr
