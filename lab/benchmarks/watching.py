"""python -m scripts.bench watching: the overhead of fault detection on a step.

It launches a real run of train.py on several ranks with torchrun. Each rank adds up
- the seconds that its main thread spends in each check (the slowest rank counts, since checks include waiting
  for other ranks);
- the CPU-seconds that its monitoring threads use during the steps.

The run does the rarer checks more often than usual; the table scales their cost to the usual interval.
"""

import argparse
import contextlib
import functools
import json
import os
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, field
from pathlib import Path
from statistics import mean, median
from typing import Any
from unittest import mock

import runtime  # noqa: F401  before torch (see there)
import start
import train
from checkpoint import replicas
from checkpoint.disk.lease import Lease
from config import CheckpointConfig, ConfigError, LogConfig
from durable.slow import SlowRanks
from lab.benchmarks.corpus import write_corpus
from lab.benchmarks.markdown import markdown_table
from runtime.garbage import GarbageCollection

ROOT = Path(__file__).parents[2]
REPORT = "BEVATRON_WATCHING_REPORT"  # names the folder where each rank writes its RankCosts
AIM = 0.01  # fraction of a step
DOCUMENTS = 20_000
LIMIT_S = 900.0
SAMPLE_S = 0.2  # interval between readings of the thread clocks
OFTEN = 5  # steps between comparisons, and steps of a window, in this run
WATCHING_THREADS = ("peers", "device", "lease", "pauses", "parent")
HAS_THREAD_CLOCKS = hasattr(time, "pthread_getcpuclockid")  # not on macOS
MODEL = (
    "--model.layers", "4", "--model.hidden", "256", "--model.mixer.heads", "4", "--model.mixer.kv_heads", "4",
    "--model.mlp.width", "688",
)
RUN = (
    "--train.seq_len", "512", "--train.micro_batch", "4", "--train.threads", "1", "--parallel.zero", "0",
    "--eval.every", "none", "--eval.sample", "0", "--checkpoint.every", "none", "--log.every", "1",
    "--checkpoint.check_replicas", str(OFTEN), "--log.slow_window", str(OFTEN),
)


@dataclass(frozen=True)
class Watch:
    """A check that the main thread makes to detect a fault.

    every: steps between calls in a usual run; None if it runs once, before the first step.
    """

    what: str
    every: int | None


# {function of the program: what it checks}
WATCHES = {
    "compare_replicas": Watch("what replicas share is compared", CheckpointConfig().check_replicas),
    "SlowRanks.add": Watch("the times of ranks are compared", LogConfig().slow_window),
    "agree_to_stop": Watch("ranks agree to continue", 1),
    "Lease.check": Watch("the folder's lease is checked", 1),
    "probe_run_folder": Watch("the disk is probed", None),
    "probe": Watch("devices and links are probed", None),
}


@dataclass
class RankCosts:
    """The cost of the checks on one rank.

    calls: {check: seconds of each call}. threads: {name: CPU-seconds}. steps: seconds of
    each step with everything after it.
    """

    calls: dict[str, list[float]] = field(default_factory=lambda: {name: [] for name in WATCHES})
    threads: dict[str, float] = field(default_factory=dict)
    steps: list[float] = field(default_factory=list)
    seconds: float = 0.0  # duration of the thread readings


# ---- a rank ------------------------------------------------------------------------------------------------


def timed(report: RankCosts, name: str, work: Callable[..., Any]) -> Callable[..., Any]:
    """Wrap `work` to record its seconds."""

    @functools.wraps(work)
    def call(*arguments: Any, **options: Any) -> Any:
        begun = time.perf_counter()
        try:
            return work(*arguments, **options)
        finally:
            report.calls[name].append(time.perf_counter() - begun)

    return call


@contextlib.contextmanager
def watched(report: RankCosts) -> Iterator[None]:
    """Record what the program's checks cost inside."""

    def step_done(collection: GarbageCollection, run: object, step: int) -> None:
        now = time.perf_counter()
        report.steps.append(now - last_end[0])
        last_end[0] = now
        collect_after_step(collection, run, step)

    last_end = [time.perf_counter()]
    collect_after_step = GarbageCollection.after_step
    owners = {"SlowRanks": SlowRanks, "Lease": Lease}
    places = {"compare_replicas": replicas, "probe_run_folder": start, "probe": start}
    with contextlib.ExitStack() as stack:
        for name in WATCHES:
            owner, _, method = name.rpartition(".")
            place = owners.get(owner) or places.get(method, train)
            work = getattr(place, method)
            stack.enter_context(mock.patch.object(place, method, timed(report, name, work)))
        stack.enter_context(mock.patch.object(GarbageCollection, "after_step", step_done))
        yield


def read_threads(report: RankCosts, ended: threading.Event) -> None:
    """Record the CPU-seconds of the other threads by name, in a thread, until the run has ended."""
    if not HAS_THREAD_CLOCKS:
        return
    begun = time.monotonic()
    last: dict[int, tuple[str, float]] = {}
    while not ended.wait(SAMPLE_S):
        for thread in threading.enumerate():
            if thread.ident is not None and thread.name in WATCHING_THREADS:
                with contextlib.suppress(OSError):  # the thread has just ended
                    clock = time.pthread_getcpuclockid(thread.ident)
                    last[thread.ident] = thread.name, time.clock_gettime(clock)
    report.seconds = time.monotonic() - begun
    for name, seconds in last.values():
        report.threads[name] = report.threads.get(name, 0.0) + seconds


def run_rank(argv: list[str]) -> int:
    """Run train.py on this rank, write its RankCosts to a file and return the exit code."""
    report, ended = RankCosts(), threading.Event()
    reader = threading.Thread(target=read_threads, args=(report, ended), daemon=True, name="reader")
    reader.start()
    try:
        with watched(report):
            return train.main(argv)
    finally:
        ended.set()
        reader.join()
        file = Path(os.environ[REPORT]) / f"rank-{os.environ['RANK']}.json"
        file.write_text(json.dumps(asdict(report)))


# ---- all ranks ---------------------------------------------------------------------------------------------


def add_watching_options(watching: argparse.ArgumentParser) -> None:
    watching.add_argument("--ranks", type=int, default=2, help="processes on this machine, a thread each")
    watching.add_argument("--steps", type=int, default=40)
    watching.add_argument("--batch", type=int, default=8, help="sequences of 512 tokens of a rank in a step")


def main(args: argparse.Namespace) -> int:
    """Return the exit code. Raises ConfigError if the run fails."""
    if args.ranks < 2 or args.steps < 2 * OFTEN or args.batch < 4 or args.batch % 4:
        raise ConfigError(
            f"watching: two ranks or more, {2 * OFTEN} steps or more, a --batch of 4, 8, 12, ..."
        )
    with tempfile.TemporaryDirectory(prefix="bevatron-watching-") as temporary:
        home = Path(temporary)
        reports = run_all(home, args)
    rows, share = make_rows(reports)
    print(*markdown_table(rows), sep="\n")
    step_ms = 1000 * step_seconds(reports)
    print(f"\n{args.ranks} ranks, a step of {step_ms:,.0f} ms: all watches of a step take {share:.2%} of it "
          f"(aim: less than {AIM:.0%})")
    if not HAS_THREAD_CLOCKS:
        print("Without the watching threads: on this system no thread reads the CPU time of another.")
    return 0


def run_all(home: Path, args: argparse.Namespace) -> list[RankCosts]:
    """Return the reports of the ranks of one run. Raises ConfigError if it fails."""
    data = write_corpus(home, DOCUMENTS)
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
    command = [
        *torchrun, "--nproc-per-node", str(args.ranks), "-m", "lab.benchmarks.watching", "llama3-tiny",
        *MODEL, *RUN, "--train.steps", str(args.steps), "--train.global_batch", str(args.ranks * args.batch),
        "--data.path", data, "--log.dir", str(home), "--log.name", "run",
    ]
    environment = {**os.environ, REPORT: str(home), "OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=LIMIT_S
    )
    if done.returncode:
        raise ConfigError(f"watching: the run ends with {done.returncode}:\n{done.stdout}{done.stderr}")
    files = sorted(home.glob("rank-*.json"))
    return [RankCosts(**json.loads(file.read_text())) for file in files]


def step_seconds(reports: list[RankCosts]) -> float:
    """Return the median over steps and ranks, excluding the first steps, which set up connections."""
    return median(seconds for report in reports for seconds in report.steps[OFTEN:])


def make_rows(reports: list[RankCosts]) -> tuple[list[dict[str, str]], float]:
    """Return (the table, the fraction of a step that all recurring checks and threads take)."""
    step_s = step_seconds(reports)
    rows, total = [], 0.0
    for name, watch in WATCHES.items():
        row, share = make_watch_row(reports, name, watch, step_s)
        rows.append(row)
        total += share
    for name in WATCHING_THREADS:
        shares = [report.threads[name] / report.seconds for report in reports if name in report.threads]
        if shares:
            rows.append({
                "watch": f"thread `{name}`",
                "how often": "beside the steps",
                "each": f"{1000 * max(shares):.2f} ms of CPU a second",
                "share of a step": f"{max(shares):.3%}",
            })
            total += max(shares)
    return rows, total


def make_watch_row(
    reports: list[RankCosts], name: str, watch: Watch, step_s: float
) -> tuple[dict[str, str], float]:
    """Return (its row, its fraction of a step, 0 for checks before the first one)."""
    calls = [report.calls[name] for report in reports if report.calls[name]]
    if not calls:
        raise ConfigError(f"watching: no rank called {name}")
    if watch.every is None:
        seconds = max(sum(each) for each in calls)
        row = {"watch": watch.what, "how often": "before the first step", "each": f"{1000 * seconds:.1f} ms"}
        return row, 0.0
    if name == "SlowRanks.add":  # called every step: count all calls of a window
        seconds = max(OFTEN * mean(each) for each in calls)
    else:
        seconds = max(median(each) for each in calls)
    share = seconds / watch.every / step_s
    often = "each step" if watch.every == 1 else f"every {watch.every} steps"
    row = {
        "watch": watch.what,
        "how often": often,
        "each": f"{1000 * seconds:.2f} ms",
        "share of a step": f"{share:.3%}",
    }
    return row, share


if __name__ == "__main__":
    sys.exit(run_rank(sys.argv[1:]))
