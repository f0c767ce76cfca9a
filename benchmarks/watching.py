"""python -m scripts.bench watching: what it costs a step to watch for faults.

A real run of train.py on several ranks, started by torchrun, in which each rank adds up
- the seconds that its main thread spends in each watch (those of the slowest rank count: they contain the
  wait for the other ranks);
- the CPU-seconds that its watching threads use beside the steps.

In the run the rarer watches come more often than usual; the table has what they cost at their usual interval.
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
from benchmarks.corpus import write_corpus
from benchmarks.markdown import markdown_table
from checkpoint import replicas
from checkpoint.lease import Lease
from config import CheckpointConfig, ConfigError, LogConfig
from runtime.garbage import GarbageCollection
from runtime.slow import SlowRanks

ROOT = Path(__file__).parent.parent
REPORT = "BEVATRON_WATCHING_REPORT"  # names the folder where each rank writes its RankCosts
AIM = 0.01  # of a step
DOCUMENTS = 20_000
LIMIT_S = 900.0
SAMPLE_S = 0.2  # between two readings of the clocks of the threads
OFTEN = 5  # steps between two comparisons, and steps of a window, in this run
WATCHING_THREADS = ("peers", "device", "lease", "pauses", "parent")
HAS_THREAD_CLOCKS = hasattr(time, "pthread_getcpuclockid")  # macOS has none
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
    """Something that the main thread does to find a fault.

    every: steps between two calls in a usual run; None if it is called once, before the first step.
    """

    what: str
    every: int | None


# {a function of the program: what it watches}
WATCHES = {
    "compare_replicas": Watch("what replicas share is compared", CheckpointConfig().check_replicas),
    "SlowRanks.add": Watch("the times of ranks are compared", LogConfig().slow_window),
    "agree_to_stop": Watch("ranks agree to go on", 1),
    "Lease.check": Watch("the folder's lease is looked at", 1),
    "probe_run_folder": Watch("the disk is tried", None),
    "probe": Watch("devices and links are tried", None),
}


@dataclass
class RankCosts:
    """The costs of watches on one rank.

    calls: {watch: seconds of each call}. threads: {name: CPU-seconds}. steps: seconds of
    each step with all that follows it.
    """

    calls: dict[str, list[float]] = field(default_factory=lambda: {name: [] for name in WATCHES})
    threads: dict[str, float] = field(default_factory=dict)
    steps: list[float] = field(default_factory=list)
    seconds: float = 0.0  # in which the threads were read


# ---- a rank ------------------------------------------------------------------------------------------------


def timed(report: RankCosts, name: str, work: Callable[..., Any]) -> Callable[..., Any]:
    """`work`, whose seconds are written down."""

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
    """Within it the program writes down what its watches cost."""

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
    """A thread of its own: the CPU-seconds of the others, by name, until the run has ended."""
    if not HAS_THREAD_CLOCKS:
        return
    begun = time.monotonic()
    last: dict[int, tuple[str, float]] = {}
    while not ended.wait(SAMPLE_S):
        for thread in threading.enumerate():
            if thread.ident is not None and thread.name in WATCHING_THREADS:
                with contextlib.suppress(OSError):  # it has just ended
                    clock = time.pthread_getcpuclockid(thread.ident)
                    last[thread.ident] = thread.name, time.clock_gettime(clock)
    report.seconds = time.monotonic() - begun
    for name, seconds in last.values():
        report.threads[name] = report.threads.get(name, 0.0) + seconds


def run_rank(argv: list[str]) -> int:
    """train.py on this rank, and its RankCosts as a file. Returns the exit code."""
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
    """Returns the exit code. Raises ConfigError if the run fails."""
    if args.ranks < 2 or args.steps < 2 * OFTEN or args.batch < 4 or args.batch % 4:
        raise ConfigError(
            f"watching: two ranks or more, {2 * OFTEN} steps or more, a --batch of 4, 8, 12, ..."
        )
    with tempfile.TemporaryDirectory(prefix="bevatron-watching-") as temporary:
        home = Path(temporary)
        reports = run_all(home, args)
    rows, share = rows_of(reports)
    print(*markdown_table(rows), sep="\n")
    step_ms = 1000 * step_seconds(reports)
    print(f"\n{args.ranks} ranks, a step of {step_ms:,.0f} ms: all watches of a step take {share:.2%} of it "
          f"(aim: less than {AIM:.0%})")
    if not HAS_THREAD_CLOCKS:
        print("Without the watching threads: on this system no thread reads the CPU time of another.")
    return 0


def run_all(home: Path, args: argparse.Namespace) -> list[RankCosts]:
    """The reports of the ranks of one run. Raises ConfigError if it does not end well."""
    data = write_corpus(home, DOCUMENTS)
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
    command = [
        *torchrun, "--nproc-per-node", str(args.ranks), "-m", "benchmarks.watching", "llama3-tiny",
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
    """The median over steps and ranks; of the first steps none, which connect."""
    return median(seconds for report in reports for seconds in report.steps[OFTEN:])


def rows_of(reports: list[RankCosts]) -> tuple[list[dict[str, str]], float]:
    """(the table; the share of a step that all watches take which come in steps)."""
    step_s = step_seconds(reports)
    rows, total = [], 0.0
    for name, watch in WATCHES.items():
        row, share = row_of_watch(reports, name, watch, step_s)
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


def row_of_watch(
    reports: list[RankCosts], name: str, watch: Watch, step_s: float
) -> tuple[dict[str, str], float]:
    """(its row; its share of a step, 0 for what comes before the first)."""
    calls = [report.calls[name] for report in reports if report.calls[name]]
    if not calls:
        raise ConfigError(f"watching: no rank has called {name}")
    if watch.every is None:
        seconds = max(sum(each) for each in calls)
        row = {"watch": watch.what, "how often": "before the first step", "each": f"{1000 * seconds:.1f} ms"}
        return row, 0.0
    if name == "SlowRanks.add":  # called in each step: what all calls of a window take
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
