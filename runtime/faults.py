"""Named crash points in product code, no-ops unless armed: how the tests kill a run at every place that matters.

    FAULT="ckpt.pre_index:rank=0:step=6:act=SIGKILL; step.after_bwd:step=9:act=sleep=0.5"

Random kills find little, enumerated points find everything (90 random kills of a bad writer: 0 bugs; 22 points: 8).
Acts: SIGKILL, SIGSTOP, SIGTERM (sent to this process), raise, ENOSPC (an OSError), sleep=SECONDS, and nan and bitflip,
which are only handed back: the caller spoils its own number. Leaving out rank or step means every one.
"""
import errno
import os
import signal
import sys
import time
from collections.abc import Collection
from dataclasses import dataclass

from config import ConfigError

ACTS = ("SIGKILL", "SIGSTOP", "SIGTERM", "raise", "ENOSPC", "sleep=SECONDS", "nan", "bitflip")


class Injected(RuntimeError):
    """What act=raise raises."""


@dataclass(frozen=True)
class Fault:
    point: str
    act: str
    seconds: float = 0.0
    rank: int | None = None
    step: int | None = None


def parse(text: str) -> list[Fault]:
    """The faults that `text` arms. Raises ConfigError naming the part that is wrong."""
    return [parse_one(part.strip()) for part in text.split(";") if part.strip()]


def parse_one(text: str) -> Fault:
    point, *rest = text.split(":")
    found = {}
    for part in rest:
        key, _, value = part.partition("=")
        if key not in ("rank", "step", "act") or key in found:
            raise ConfigError(f"FAULT: {part!r} in {text!r} is not rank=N, step=N or act=ACT (each once)")
        found[key] = value
    act, _, seconds = found.get("act", "").partition("=")
    if not point or act not in [a.partition("=")[0] for a in ACTS] or bool(seconds) != (act == "sleep"):
        raise ConfigError(f"FAULT: {text!r} must be POINT[:rank=N][:step=N]:act=ACT with ACT one of {', '.join(ACTS)}")
    try:
        whole = {k: int(found[k]) for k in ("rank", "step") if k in found}
        return Fault(point, act, float(seconds or 0), **whole)
    except ValueError:
        raise ConfigError(f"FAULT: a number in {text!r} does not read as one") from None


class Faults:
    """`at(point, step)` as the code calls it. A call without a step belongs to the last step that was named."""

    def __init__(self, faults: list[Fault], rank: int = 0, known: Collection[str] = ()):
        for fault in faults:
            if known and fault.point not in known:
                raise ConfigError(f"FAULT: no point {fault.point!r}; there are {', '.join(sorted(known))}")
        self.armed = [f for f in faults if f.rank in (None, rank)]
        self.rank = rank
        self.step: int | None = None

    def __call__(self, point: str, step: int | None = None, **seen) -> str | None:
        """None, or the act (nan, bitflip, sleep, SIGTERM, SIGSTOP) that happened here. May raise, may never return. seen: what a
        watch of train.train is shown there."""
        if not self.armed:
            return None
        self.step = self.step if step is None else step
        hits = [f for f in self.armed if f.point == point and f.step in (None, self.step)]
        for fault in hits:
            self.fire(fault)
        return hits[-1].act if hits else None

    def fire(self, fault: Fault) -> None:
        print(f"fault {fault.point}: rank {self.rank} step {self.step} act {fault.act}", file=sys.stderr, flush=True)
        if fault.act.startswith("SIG"):
            os.kill(os.getpid(), getattr(signal, fault.act))
        elif fault.act == "sleep":
            time.sleep(fault.seconds)
        elif fault.act == "raise":
            raise Injected(f"injected at {fault.point}, step {self.step}")
        elif fault.act == "ENOSPC":
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), fault.point)
