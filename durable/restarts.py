"""Decide from the run folder whether a job that has ended should be restarted automatically.

scripts/launch.py and scripts/slurm/train.sbatch both use this, so they decide alike. Needs no torch.

    python -m durable.restarts RUN     prints the newest saved step, the job's exit code, 1 if a restart may
                                       succeed, and the hosts with faulty devices as a,b. Code and restart
                                       are - if no rank left a reason, and hosts is - if there are none.
"""
import contextlib
import json
import re
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

LOST = (1, 76, 80)  # exit codes of a job that lost a rank: connection, hang, differing replicas
REQUEUED = (75, 76, 80, 82)  # codes to requeue on if an older exit reason does not say
MAX_IDLE_RESTARTS = 3  # restarts in a row without a newer checkpoint
FIRST_STEP = -1  # before the first checkpoint
MEMORY_RECORD = "memory.json"  # records the valid in-memory checkpoints (durable/memory.py)
HOST = re.compile(r"[A-Za-z0-9._-]+")  # a valid host name
CHECKPOINT = re.compile(r"step_(\d{8,})")  # a committed checkpoint (checkpoint/disk/store.py)


@dataclass(frozen=True)
class ExitReason:
    """The exit reason that a rank has left. requeue: whether a restart may succeed."""

    code: int
    requeue: bool


class Kept(NamedTuple):
    """The newest saved steps of a run. newest: on disk or in the memory of nodes."""

    on_disk: int
    newest: int


def newest_step(run: Path) -> int:
    """Return the step of the newest committed checkpoint, or FIRST_STEP if there is none."""
    names = [path.name for path in (run / "checkpoints").glob("step_*") if path.is_dir()]
    found = [CHECKPOINT.fullmatch(name) for name in names]
    return max((int(match[1]) for match in found if match), default=FIRST_STEP)


def progress(run: Path) -> Kept:
    """Return the newest saved steps of the run so far."""
    on_disk = newest_step(run)
    steps = [on_disk]
    with contextlib.suppress(OSError, ValueError, KeyError, TypeError):
        record = json.loads((run / MEMORY_RECORD).read_text())
        steps += [int(generation["step"]) for generation in record["generations"]]
    return Kept(on_disk, max(steps))


def read_reason(run: Path) -> ExitReason | None:
    """Return the job's exit reason, or that of the lowest rank with one, or None.

    exit_reason.json was written by rank 0 or by the rank that failed first.
    """
    for file in sorted(run.glob("exit_reason*.json")):  # exit_reason.json sorts first
        with contextlib.suppress(OSError, ValueError, KeyError, TypeError, AttributeError):
            fields = json.loads(file.read_text())
            code = int(fields["code"])
            return ExitReason(code, bool(fields.get("requeue", code in REQUEUED)))
    return None


def wrong_devices(run: Path) -> list[dict[str, Any]]:
    """Return the exit reasons of the ranks whose device failed the probe before the first step
    (durable/probes.py)."""
    results: list[dict[str, Any]] = []
    for file in run.glob("exit_reason*.json"):
        with contextlib.suppress(OSError, ValueError, AttributeError):
            fields = json.loads(file.read_text())
            if fields.get("wrong_device") is True:
                results.append(fields)
    return results


def ranks_with_wrong_devices(run: Path) -> set[int]:
    """Return the ranks of wrong_devices."""
    ranks = {fields.get("rank") for fields in wrong_devices(run)}
    return {rank for rank in ranks if isinstance(rank, int)}


def hosts_with_wrong_devices(run: Path) -> set[str]:
    """Return the hosts of wrong_devices."""
    hosts = {str(fields.get("host")) for fields in wrong_devices(run)}
    return {host for host in hosts if HOST.fullmatch(host)}


def remove_reasons(run: Path) -> None:
    """Remove the exit reasons of an earlier launch, so that they are not taken for those of the next."""
    for file in run.glob("exit_reason*.json"):
        with contextlib.suppress(OSError):
            file.unlink()


class RestartCount:
    """Count restarts without progress. best: the newest checkpoints when counting starts."""

    def __init__(self, best: Kept) -> None:
        self.best = best
        self.num_idle = 0

    def allows_restart(self, kept: Kept) -> bool:
        """Return whether to restart. kept: the newest checkpoints now, after a launch has failed.

        A different newest checkpoint on disk is progress: a newer one, or an older one after a rewind
        (optim.spike_rewind). One in memory is progress only if it is newer than any since then: memory is
        lost with nodes, so the same steps could be saved again and again.
        """
        if kept.on_disk != self.best.on_disk:
            self.num_idle = 0
            self.best = kept
        elif kept.newest > self.best.newest:
            self.num_idle = 0
            self.best = kept
        self.num_idle += 1
        return self.num_idle <= MAX_IDLE_RESTARTS


def host_words(hosts: set[str]) -> str:
    """Format as a,b, or - if there are none."""
    return ",".join(sorted(hosts)) or "-"


def main(argv: Sequence[str]) -> int:
    run = Path(argv[0])
    reason = read_reason(run)
    told = "- -" if reason is None else f"{reason.code} {int(reason.requeue)}"
    print(progress(run).newest, told, host_words(hosts_with_wrong_devices(run)))
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
