"""Fault injection: named points in the code where the tests kill, stop or disturb a run.

    FAULT="ckpt.pre_index:rank=0:step=6:act=SIGKILL; step.backward:step=9:act=sleep=0.5"

Without FAULT the points do nothing. Enumerated points find far more than random kills: 90 random kills of a
buggy checkpoint writer found no bug, 22 points found 8.

Actions: SIGKILL, SIGSTOP, SIGTERM, SIGUSR1, SIGHUP (sent to this process), raise, ENOSPC (an OSError),
ENOMEM (a MemoryError), sleep=SECONDS, nan, spike and bitflip. The last three are only returned; the caller
then corrupts its data. A fault without rank or step applies to every rank or step. With times=N it fires only
the first N times that a rank reaches the point: step.compute:rank=1:step=4:times=1:act=bitflip disturbs the
first computation of a step but not its rerun (train.rerun_every).
"""
import errno
import os
import signal
import time
from collections import Counter
from collections.abc import Callable, Collection
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor

from config import ConfigError
from parallel.extras import FaultHook, Gradients, StepExtra
from parallel.microbatch import Microbatch
from parallel.sharding.bucket import Bucket
from parallel.sharding.gradients import BucketGrads
from runtime.processes import print_error

ACTIONS = ("SIGKILL", "SIGSTOP", "SIGTERM", "SIGUSR1", "SIGHUP", "raise", "ENOSPC", "ENOMEM", "sleep=SECONDS",
           "nan", "spike", "bitflip")
ACTION_NAMES = tuple(action.partition("=")[0] for action in ACTIONS)
KEYS = ("rank", "step", "times", "act")
SPIKE_FACTOR = 1e4  # multiplies the gradients in an injected spike


class InjectedFault(RuntimeError):
    """Raised by act=raise."""


@dataclass(frozen=True)
class Fault:
    """One fault of FAULT. rank and step may be None for all; times is a limit, or None for no limit."""

    point: str
    action: str
    seconds: float = 0.0  # duration of sleep
    rank: int | None = None
    step: int | None = None
    times: int | None = None


def parse(text: str) -> list[Fault]:
    """Parse the value of FAULT. Raises ConfigError, which quotes the invalid part."""
    parts = [part.strip() for part in text.split(";")]
    return [parse_one(part) for part in parts if part]


def parse_one(text: str) -> Fault:
    """Parse POINT[:rank=N][:step=N][:times=N]:act=ACT. Raises ConfigError."""
    point, *settings = text.split(":")
    values: dict[str, str] = {}
    for setting in settings:
        key, _, value = setting.partition("=")
        if key not in KEYS or key in values:
            raise ConfigError(
                f"FAULT: {setting!r} in {text!r} is not rank=N, step=N, times=N or act=ACT (each once)"
            )
        values[key] = value

    action, _, seconds = values.pop("act", "").partition("=")
    has_seconds = bool(seconds)
    if not point or action not in ACTION_NAMES or has_seconds != (action == "sleep"):
        raise ConfigError(f"FAULT: {text!r} must be POINT[:rank=N][:step=N][:times=N]:act=ACT with ACT one "
                          f"of {', '.join(ACTIONS)}")
    try:
        numbers = {key: int(value) for key, value in values.items()}
        return Fault(point, action, float(seconds or 0), **numbers)
    except ValueError:
        raise ConfigError(f"FAULT: a number in {text!r} is not valid") from None


class FaultInjector:
    """Fire faults; called as injector(point, step) at each fault point.

    The step defaults to that of the previous call. known: the names of all fault points; raises ConfigError
    if a fault names an unknown one.
    """

    def __init__(self, faults: list[Fault], rank: int = 0, known: Collection[str] = ()) -> None:
        for fault in faults:
            if known and fault.point not in known:
                raise ConfigError(f"FAULT: no point {fault.point!r}; there are {', '.join(sorted(known))}")
        self.armed = [fault for fault in faults if fault.rank in (None, rank)]
        self.rank = rank
        self.step: int | None = None
        self.fired: Counter[Fault] = Counter()

    def __call__(self, point: str, step: int | None = None, **seen: object) -> str | None:
        """Return the action that fired, or None. Some actions raise or never return.

        seen: for observers (FaultHook); not used here.
        """
        if not self.armed:
            return None
        at_step = self.step if step is None else step  # a background save is of an earlier step
        self.step = at_step
        here = [fault for fault in self.armed if fault.point == point and fault.step in (None, at_step)]
        hits = [fault for fault in here if fault.times is None or self.fired[fault] < fault.times]
        for fault in hits:
            self.fired[fault] += 1
            self.fire(fault, at_step)
        return hits[-1].action if hits else None

    def fire(self, fault: Fault, step: int | None) -> None:
        """Perform the action: raise, ENOSPC and ENOMEM raise InjectedFault, OSError and MemoryError."""
        message = f"fault {fault.point}: rank {self.rank} step {step} act {fault.action}"
        print_error(message)
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


class Faults(StepExtra):
    """The fault points of the loop. observe: the injector, or an observer, which may also return actions."""

    def __init__(self, observe: FaultHook) -> None:
        self.observe = observe
        self.has_read = False  # whether the read point has fired, so that a recomputed step skips it
        self.seen: dict[str, Tensor] = {}  # loss, norm and verdict of the step

    def on_resume(self, run: Any, step: int) -> None:
        if run.loader is not None:
            run.loader.before_read = partial(self.observe, "step.load")

    def before_step(self, run: Any, step: int) -> None:
        self.has_read = False
        self.observe("step.begin", step)

    def before_gradients(self, run: Any, step: int, batches: list[Microbatch]) -> None:
        if not self.has_read:
            self.observe("step.read", step, batches=batches)
        self.has_read = True
        disturb_next_sums(run.buckets, fault=self.observe("step.compute", step))

    def gradients_ready(self, run: Any, step: int) -> None:
        disturb_grads(run.buckets, fault=self.observe("step.backward", step))

    def judge(
        self, run: Any, step: int, gradients: Gradients, *, good: Tensor, again: Callable[[], Gradients]
    ) -> Tensor:
        self.seen = {"loss": gradients.loss, "norm": gradients.norm, "ok": good}
        return good

    def after_step(self, run: Any, step: int) -> None:
        self.observe("step.end", step, **self.seen)

    def evaluated(self, run: Any, step: int, *, loss: float | None, ids: list[int]) -> None:
        self.observe("eval.end", step, loss=loss, ids=ids)


def disturb_grads(buckets: list[Bucket], fault: str | None) -> None:
    """Apply an injected fault to the reduced gradients that this rank owns."""
    for bucket in disturbed(buckets, fault):
        disturb(bucket.grads.local, fault)


def disturb_next_sums(buckets: list[Bucket], fault: str | None) -> None:
    """Apply an injected fault to this rank's own gradients, before they are next reduced."""
    def disturb_once(grads: BucketGrads) -> Callable[[Tensor], None]:
        def before_sum(flat: Tensor) -> None:
            grads.before_sum.remove(before_sum)
            disturb(flat, fault)
        return before_sum

    for bucket in disturbed(buckets, fault):
        bucket.grads.before_sum.insert(0, disturb_once(bucket.grads))


def disturbed(buckets: list[Bucket], fault: str | None) -> list[Bucket]:
    """Return the buckets that a fault disturbs: all for a spike, the first for a NaN or a flipped bit."""
    buckets = [bucket for bucket in buckets if bucket.trains]
    return {"nan": buckets[:1], "bitflip": buckets[:1], "spike": buckets}.get(fault or "", [])


def disturb(grads: Tensor, fault: str | None) -> None:
    """Corrupt flat gradients in place.

    Sets one element to NaN, scales all by SPIKE_FACTOR, or flips the first mantissa bit of the largest.
    """
    if fault == "nan":
        grads[0] = float("nan")
    elif fault == "spike":
        grads.mul_(SPIKE_FACTOR)
    elif fault == "bitflip":
        place = int(grads.abs().argmax())
        first_bit = {torch.float64: 51, torch.float32: 22, torch.bfloat16: 6, torch.float16: 9}[grads.dtype]
        words = {8: torch.int64, 4: torch.int32, 2: torch.int16}[grads.itemsize]
        grads[place:place + 1].view(words).bitwise_xor_(1 << first_bit)
