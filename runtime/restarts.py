"""Whether a job that has ended may start again by itself, and what it left in its run folder to judge by.

scripts/launch.py and scripts/slurm/train.sbatch ask here, so both believe the same words. Needs no torch.

    python -m runtime.restarts RUN     prints the newest step that was kept, the job's exit code, 1 where
                                       another start may succeed, and the hosts whose devices compute wrongly,
                                       as a,b; code and start are - where no rank left a reason, and hosts
                                       where there are none
"""
import contextlib
import json
import re
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

LOST = (1, 76, 80)  # codes of a job that lost a rank: its connection, a hang, replicas that differ
REQUEUED = (75, 76, 80, 82)  # where an older exit reason says nothing of another start
MAX_IDLE_RESTARTS = 3  # restarts in a row without a newer checkpoint
FIRST_STEP = -1  # before the first checkpoint
MEMORY_RECORD = "memory.json"  # which checkpoints in memory count (checkpoint/memory.py)
HOST = re.compile(r"[A-Za-z0-9._-]+")  # a name
CHECKPOINT = re.compile(r"step_(\d{8,})")  # a committed one (checkpoint/disk/store.py)


@dataclass(frozen=True)
class ExitReason:
    """The reason that a rank has left for the end of the job. requeue: whether another start may succeed."""

    code: int
    requeue: bool


class Kept(NamedTuple):
    """The newest steps that the starts of a run have kept. newest: on the disk or in the memory of nodes."""

    on_disk: int
    newest: int


def newest_step(run: Path) -> int:
    """The step of the newest committed checkpoint; FIRST_STEP before there is one."""
    names = [path.name for path in (run / "checkpoints").glob("step_*") if path.is_dir()]
    found = [CHECKPOINT.fullmatch(name) for name in names]
    return max((int(match[1]) for match in found if match), default=FIRST_STEP)


def progress(run: Path) -> Kept:
    """The newest steps that the starts of the run have kept until now."""
    on_disk = newest_step(run)
    steps = [on_disk]
    with contextlib.suppress(OSError, ValueError, KeyError, TypeError):
        record = json.loads((run / MEMORY_RECORD).read_text())
        steps += [int(generation["step"]) for generation in record["generations"]]
    return Kept(on_disk, max(steps))


def read_reason(run: Path) -> ExitReason | None:
    """The job's exit reason, or that of the first rank that left one; None without any.

    exit_reason.json is that of rank 0, or of the rank that failed first.
    """
    for file in sorted(run.glob("exit_reason*.json")):  # exit_reason.json is the first
        with contextlib.suppress(OSError, ValueError, KeyError, TypeError, AttributeError):
            fields = json.loads(file.read_text())
            code = int(fields["code"])
            return ExitReason(code, bool(fields.get("requeue", code in REQUEUED)))
    return None


def wrong_devices(run: Path) -> list[dict[str, Any]]:
    """The reasons of the ranks that found before the first step that their device computes wrongly
    (runtime/probes.py)."""
    found: list[dict[str, Any]] = []
    for file in run.glob("exit_reason*.json"):
        with contextlib.suppress(OSError, ValueError, AttributeError):
            fields = json.loads(file.read_text())
            if fields.get("wrong_device") is True:
                found.append(fields)
    return found


def ranks_with_wrong_devices(run: Path) -> set[int]:
    """See wrong_devices."""
    ranks = {fields.get("rank") for fields in wrong_devices(run)}
    return {rank for rank in ranks if isinstance(rank, int)}


def hosts_with_wrong_devices(run: Path) -> set[str]:
    """See wrong_devices."""
    hosts = {str(fields.get("host")) for fields in wrong_devices(run)}
    return {host for host in hosts if HOST.fullmatch(host)}


def remove_reasons(run: Path) -> None:
    """Removes those of an earlier start, which would be taken for the next one's."""
    for file in run.glob("exit_reason*.json"):
        with contextlib.suppress(OSError):
            file.unlink()


class RestartCount:
    """Counts restarts that bring no newer checkpoint. best: the newest ones when the count begins."""

    def __init__(self, best: Kept) -> None:
        self.best = best
        self.num_idle = 0

    def allows_restart(self, kept: Kept) -> bool:
        """Whether to start again. kept: the newest checkpoints now, after a start has failed.

        Progress is another one on the disk: a newer one, or an older one of a run that has gone back
        (optim.spike_rewind). One in memory is progress if no start since then has had a newer one: what is in
        memory is lost with nodes, and the same steps could come again and again.
        """
        if kept.on_disk != self.best.on_disk:
            self.num_idle = 0
            self.best = kept
        elif kept.newest > self.best.newest:
            self.num_idle = 0
            self.best = kept
        self.num_idle += 1
        return self.num_idle <= MAX_IDLE_RESTARTS


def words_of_hosts(hosts: set[str]) -> str:
    """a,b; - without any."""
    return ",".join(sorted(hosts)) or "-"


def main(argv: Sequence[str]) -> int:
    run = Path(argv[0])
    reason = read_reason(run)
    told = "- -" if reason is None else f"{reason.code} {int(reason.requeue)}"
    print(progress(run).newest, told, words_of_hosts(hosts_with_wrong_devices(run)))
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
