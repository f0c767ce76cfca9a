"""One start of a run: real processes, the fault, and how they ended.

Every process of a start inherits a unique marker in its environment, so that leftovers are found regardless
of their parent.
"""

import contextlib
import os
import signal
import subprocess
import sys
import time
import uuid
from dataclasses import dataclass
from pathlib import Path

from lab.benchmarks.chaos.incidents import Incident
from lab.benchmarks.chaos.layouts import RunLayout

ROOT = Path(__file__).parents[3]
MARK = "BEVATRON_CHAOS"
POLL_S = 0.05
FIRED = "fault "  # prefix of the line that durable/faults.py prints
WAKE_AFTER_S = 1.0  # how long ranks and launchers stay stopped before they are continued
ORPHAN_GRACE_S = 8.0  # time limit for the children of a killed launcher to exit
QUIET_TIMEOUT_S = 60.0  # parallel.timeout_s of starts without a hang


@dataclass(frozen=True)
class Ended:
    """How a start ended.

    code: as a shell reports it. fired: faults that happened. orphans: leftover processes, now killed.
    """

    code: int
    seconds: float
    output: str
    fired: int
    orphans: int
    is_late: bool


def hang_timeout_s() -> float:
    """Return parallel.timeout_s for a start with a hanging rank: short, but enough for a busy machine."""
    return 5 + 2 * os.getloadavg()[0] / (os.cpu_count() or 1)


def build_command(layout: RunLayout, arguments: list[str]) -> list[str]:
    """Return the command with which a user launches a run."""
    if layout.world == 1:
        return [sys.executable, "train.py", *arguments]
    nproc = layout.nproc or str(layout.world)
    launcher = [sys.executable, "-m", "scripts.launch", "--nproc", nproc, "--"]
    return [*launcher, *arguments]


def processes_with(mark: str) -> dict[int, int | None]:
    """Return {process: its rank, or None} of the processes with the marker in their environment."""
    result: dict[int, int | None] = {}
    for folder in Path("/proc").iterdir():
        if not folder.name.isdigit():
            continue
        with contextlib.suppress(OSError):
            words = (folder / "environ").read_bytes().split(b"\0")
            if f"{MARK}={mark}".encode() in words:
                ranks = [int(word[5:]) for word in words if word.startswith(b"RANK=")]
                result[int(folder.name)] = ranks[0] if ranks else None
    return result


def get_state(pid: int) -> str:
    """Return R, S, T (stopped), Z (zombie), or "" if there is no such process."""
    with contextlib.suppress(OSError):
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    return ""


def send(number: int, pids: list[int]) -> None:
    for pid in pids:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, number)


class RunningStart:
    """The processes of one start. `folder` is the run folder; its parent has the log."""

    def __init__(self, layout: RunLayout, incident: Incident, folder: Path, arguments: list[str],
                 limit_s: float) -> None:
        self.incident = incident
        self.folder = folder
        self.limit_s = limit_s
        self.mark = uuid.uuid4().hex
        self.log = folder.parent / f"{folder.name}.log"
        timeout_s = hang_timeout_s() if incident.is_hang else QUIET_TIMEOUT_S
        timeout = ("--parallel.timeout_s", f"{timeout_s:.1f}")
        environment = {**os.environ, MARK: self.mark, "FAULT": incident.fault, "OMP_NUM_THREADS": "1"}
        with open(self.log, "wb") as log:
            self.process = subprocess.Popen(
                build_command(layout, [*arguments, *timeout, *incident.more]),
                cwd=ROOT, env=environment, stdin=subprocess.DEVNULL, stdout=log, stderr=subprocess.STDOUT,
            )
        self.started = time.monotonic()
        self.has_acted = False
        self.woken_at = float("inf")

    def run(self) -> Ended:
        """Disturb the processes as the incident says, and wait for them to end."""
        is_late = False
        try:
            while self.process.poll() is None:
                self.disturb()
                is_late = time.monotonic() - self.started > self.limit_s
                if is_late:
                    break
                time.sleep(POLL_S)
            seconds = time.monotonic() - self.started
            orphans = {} if is_late else self.left_over()
        finally:
            send(signal.SIGKILL, [*processes_with(self.mark), self.process.pid])
            self.process.wait()
        code = self.process.returncode
        output = self.log.read_text(errors="replace")
        return Ended(
            code=code if code >= 0 else 128 - code,
            seconds=seconds,
            output=output,
            fired=self.fired(),
            orphans=len(orphans),
            is_late=is_late,
        )

    def fired(self) -> int:
        """Return how many faults have fired."""
        lines = self.log.read_text(errors="replace").splitlines()
        return sum(line.startswith(FIRED) for line in lines)

    def disturb(self) -> None:
        """Send the signal or write the STOP file when it is time, and continue stopped processes."""
        incident, now = self.incident, time.monotonic()
        if not self.has_acted and self.is_time(now):
            self.has_acted = True
            self.woken_at = now + WAKE_AFTER_S
            if incident.send is not None:
                name, target = incident.send
                send(getattr(signal, name), self.find_pids(target))
            if incident.stop_file is not None:
                (self.folder / "STOP").write_text(incident.stop_file)
        if incident.wakes and now >= self.woken_at:
            stopped = [pid for pid in processes_with(self.mark) if get_state(pid) == "T"]
            send(signal.SIGCONT, stopped)
            self.woken_at = now + WAKE_AFTER_S

    def is_time(self, now: float) -> bool:
        if self.incident.at_s is not None:
            return now - self.started >= self.incident.at_s
        return bool(self.incident.fault) and self.fired() > 0

    def find_pids(self, target: int | str) -> list[int]:
        """Return a rank's process, all ranks' or the launcher's. Without a launcher these are the same."""
        if target == "launcher":
            return [self.process.pid]
        ranks = {pid: rank for pid, rank in processes_with(self.mark).items() if rank is not None}
        if not ranks:
            return [self.process.pid]
        return [pid for pid, rank in ranks.items() if target in ("all", rank)]

    def left_over(self) -> dict[int, int | None]:
        """Return processes of this start that keep running after the first one has ended."""
        deadline = time.monotonic() + ORPHAN_GRACE_S
        while (left := processes_with(self.mark)) and time.monotonic() < deadline:
            time.sleep(POLL_S)
        return left
