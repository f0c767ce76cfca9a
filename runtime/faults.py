"""Fault injection: named points in the code where the tests kill, stop or disturb a run.

    FAULT="ckpt.pre_index:rank=0:step=6:act=SIGKILL; step.backward:step=9:act=sleep=0.5"

Without FAULT the points do nothing. Random kills find little, enumerated points find much: 90 random kills of
a bad checkpoint writer found no bug, 22 points found 8.

Actions: SIGKILL, SIGSTOP, SIGTERM, SIGUSR1, SIGHUP (sent to this process), raise, ENOSPC (an OSError),
ENOMEM (a MemoryError), sleep=SECONDS, nan, spike and bitflip. The last three are only returned: the caller
corrupts its own number. A fault without rank or step applies to every rank or step.
"""
import errno
import os
import signal
import sys
import time
from collections.abc import Collection
from dataclasses import dataclass
from typing import Protocol

import torch

from config import ConfigError
from parallel.sharding.bucket import Bucket

ACTIONS = ("SIGKILL", "SIGSTOP", "SIGTERM", "SIGUSR1", "SIGHUP", "raise", "ENOSPC", "ENOMEM", "sleep=SECONDS",
           "nan", "spike", "bitflip")
ACTION_NAMES = tuple(action.partition("=")[0] for action in ACTIONS)
KEYS = ("rank", "step", "act")
SPIKE_FACTOR = 1e4  # of the gradients, in an injected spike


class InjectedFault(RuntimeError):
    """The error that act=raise raises."""


class FaultHook(Protocol):
    """What the code calls at each fault point: a FaultInjector, or an observer in its place."""

    def __call__(self, point: str, step: int | None = None, /, **seen: object) -> str | None:
        """Returns None or the action: "nan", "spike" and "bitflip" ask the caller to corrupt its own number.

        seen: objects that an observer may look at, by name.
        """


@dataclass(frozen=True)
class Fault:
    """One fault of FAULT. rank, step: None for every one."""

    point: str
    action: str
    seconds: float = 0.0  # of sleep
    rank: int | None = None
    step: int | None = None


def parse(text: str) -> list[Fault]:
    """The faults in the value of FAULT. Raises ConfigError that quotes the wrong part."""
    parts = [part.strip() for part in text.split(";")]
    return [parse_one(part) for part in parts if part]


def parse_one(text: str) -> Fault:
    """POINT[:rank=N][:step=N]:act=ACT -> Fault. Raises ConfigError."""
    point, *settings = text.split(":")
    values: dict[str, str] = {}
    for setting in settings:
        key, _, value = setting.partition("=")
        if key not in KEYS or key in values:
            raise ConfigError(f"FAULT: {setting!r} in {text!r} is not rank=N, step=N or act=ACT (each once)")
        values[key] = value

    action, _, seconds = values.pop("act", "").partition("=")
    has_seconds = bool(seconds)
    if not point or action not in ACTION_NAMES or has_seconds != (action == "sleep"):
        raise ConfigError(f"FAULT: {text!r} must be POINT[:rank=N][:step=N]:act=ACT with ACT one of "
                          f"{', '.join(ACTIONS)}")
    try:
        numbers = {key: int(value) for key, value in values.items()}
        return Fault(point, action, float(seconds or 0), **numbers)
    except ValueError:
        raise ConfigError(f"FAULT: a number in {text!r} does not read as one") from None


class FaultInjector:
    """Called as injector(point, step) at each fault point.

    A call without a step belongs to the last step that was given.
    known: all names of fault points. Raises ConfigError if a fault names another point.
    """

    def __init__(self, faults: list[Fault], rank: int = 0, known: Collection[str] = ()) -> None:
        for fault in faults:
            if known and fault.point not in known:
                raise ConfigError(f"FAULT: no point {fault.point!r}; there are {', '.join(sorted(known))}")
        self.armed = [fault for fault in faults if fault.rank in (None, rank)]
        self.rank = rank
        self.step: int | None = None

    def __call__(self, point: str, step: int | None = None, **seen: object) -> str | None:
        """Returns None, or the action that happened here: one that does not end the process.

        May raise or never return. seen: for observers (FaultHook); not used here.
        """
        if not self.armed:
            return None
        at_step = self.step if step is None else step  # a save in the background is of an earlier one
        self.step = at_step
        hits = [fault for fault in self.armed if fault.point == point and fault.step in (None, at_step)]
        for fault in hits:
            self.fire(fault, at_step)
        return hits[-1].action if hits else None

    def fire(self, fault: Fault, step: int | None) -> None:
        """Does what the fault says: raise, ENOSPC and ENOMEM raise InjectedFault, OSError and MemoryError."""
        message = f"fault {fault.point}: rank {self.rank} step {step} act {fault.action}"
        print(message, file=sys.stderr, flush=True)
        if fault.action.startswith("SIG"):
            os.kill(os.getpid(), getattr(signal, fault.action))
        elif fault.action == "sleep":
            time.sleep(fault.seconds)
        elif fault.action == "raise":
            raise InjectedFault(f"injected at {fault.point}, step {step}")
        elif fault.action == "ENOSPC":
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), fault.point)
        elif fault.action == "ENOMEM":
            raise MemoryError(f"injected at {fault.point}, step {step}")


def disturb_grads(buckets: list[Bucket], fault: str | None) -> None:
    """Does what an injected fault asks for: one number is NaN, or all are SPIKE_FACTOR times as large.

    bitflip: of the largest number of the first bucket, the first bit of the mantissa.
    """
    grads = buckets[0].grads.local
    if fault == "nan":
        grads[0] = float("nan")
    elif fault == "spike":
        for bucket in buckets:
            bucket.grads.local.mul_(SPIKE_FACTOR)
    elif fault == "bitflip":
        place = int(grads.abs().argmax())
        first_bit = {torch.float64: 51, torch.float32: 22, torch.bfloat16: 6, torch.float16: 9}[grads.dtype]
        words = {8: torch.int64, 4: torch.int32, 2: torch.int16}[grads.itemsize]
        grads[place:place + 1].view(words).bitwise_xor_(1 << first_bit)
