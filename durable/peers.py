"""Coordinate the failure of a multi-rank job: all ranks exit at once, the cause first, one line per rank.

The first rank to fail writes its failure to the job's store. On every rank a thread waits for that, because
the main thread may be inside a collective that cannot be interrupted (gloo returns after the whole timeout,
NCCL never). A hang on a GPU raises no error in the main thread, which runs ahead of the device or is blocked
in a full launch queue; another thread detects it (watch_device). Then:
- Each other rank writes what it is doing.
- The first rank writes the verdict: its error, or the peer that it waited for and what that peer is doing.
- Every rank writes its exit_reason.rankN.json with the exit code of the cause, and exits. The job's
  exit_reason.json comes from rank 0 or from the rank that failed first.
- A stopped process is killed by another rank on its host.
- After a hang, every rank that still runs writes stacks.rankN.txt: its last exchanges, the stacks of its
  threads, and where its own exchange failed; and flight/rank_N, torch's own record of its collectives.

The store is hosted by the launcher or by rank 0. If that host is stopped (not dead), an operation on the
store never returns, and torch has no timeout for it. So no rank waits for the store longer than
STORE_SECONDS; after that it exits on its own, with its own error.

Anyone who reaches the port can write to the store, so values are authenticated: if the launcher has given its
ranks a secret (scripts/launch.py, train.sbatch), each value carries an HMAC (RFC 2104) of it. A foreign value
can end the job, but never with success.

Keys of the store
    first_failure    the first Failure, or {} once a rank has finished without one
    process/R        the Process of rank R
    state/R          the RankState of rank R, written after the first failure
    num_states       number of ranks that have written their state
    verdict          {line, silent}: the cause in one line, and the ranks that did not write a state
    num_reasons      number of ranks that have written their exit reason
    steps_done       {found}: broadcast_from_first, for runs with phases
    auto_layout      {found}: broadcast_from_first, under parallel.auto
    all_reported     set once all have written their exit reason, or when time is up
"""
import contextlib
import dataclasses
import faulthandler
import hashlib
import hmac
import json
import os
import signal
import socket
import sys
import threading
import time
import traceback
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from types import FrameType, TracebackType
from typing import Any, TypeVar

from parallel.wire import comm
from parallel.wire.world import Store, flight_record, leave_job, open_store
from runtime import lines, setup
from runtime.failure import (
    HANG,
    USER_MISTAKE,
    explain,
    get_exit_code,
    mark_reported,
    one_line,
    should_requeue,
)
from runtime.processes import get_parent_pid, print_error

# {exit code: time for a running rank to write its state, even on a busy machine}. After a lost connection the
# state is only reported; after a hang, a rank that does not answer is killed.
ANSWER_SECONDS = {1: 1.5, HANG: 6.0}
VERDICT_SECONDS = 8.0  # for the first rank to write its verdict
REPORT_SECONDS = 8.0  # at most, for the others to write their reasons after that
STORE_SECONDS = VERDICT_SECONDS + REPORT_SECONDS + 2.0  # for all of it; then the store counts as lost
FLIGHT_SECONDS = 2.0  # for torch's flight recorder to be read, after a hang
LIVE_SECONDS = 6.0  # for a live store to answer at all
EXIT_SECONDS = 3.0  # for the main thread to exit on its own after that, closing its files
POLL_SECONDS = 0.02
KEYS_AT_ONCE = 1024  # values read from the store per request
DEVICE_POLL_SECONDS = 0.25  # between checks of what the GPU waits for
Result = TypeVar("Result")
# The store is gone with the rank or launcher that hosted it, or it has values that no rank wrote.
STORE_ERRORS = (RuntimeError, OSError, ValueError, TypeError, KeyError)
FOREVER = timedelta(days=3650)
MAX_SILENT = 8  # silent ranks named in a message
MAX_SUSPECTS = 4  # running ranks named in a message


class StoreTimeout(RuntimeError):
    """The job's store does not answer: its host is stopped or unreachable."""


@dataclass(frozen=True)
class Failure:
    """The first failure of a job, as published to the other ranks."""

    rank: int
    host: str
    code: int
    requeue: bool  # whether a requeue may succeed
    line: str  # the error in one line
    text: str  # the full text of the error


@dataclass(frozen=True)
class Process:
    """The process of a rank."""

    host: str
    pid: int
    parent: int


@dataclass(frozen=True)
class RankState:
    """The activity of a rank when another one fails."""

    host: str
    in_exchange: bool
    activity: str  # all_reduce of 4,096 bytes in group dp (ranks 0, 2) at step 7
    seconds: float  # time in this activity
    location: str  # ", at FILE:LINE"; empty inside an exchange


def clone(store: Store) -> Store:
    """Open another connection to the same store, for another thread."""
    return store.clone()  # pyright: ignore[reportAttributeAccessIssue]  torch's stubs leave it out


@dataclass(frozen=True)
class SignedStore:
    """Read and write authenticated JSON in the job's store.

    secret: the job's secret; if it is "", values are not sealed. attempt: the restart count; values of other
    attempts are foreign.
    """

    secret: str = ""
    attempt: str = "0"

    def write(self, store: Store, key: str, value: dict[str, Any]) -> None:
        store.set(key, self.sealed(key, value))

    def read(self, store: Store, key: str) -> dict[str, Any]:
        return self.opened(key, store.get(key))

    def sealed(self, key: str, value: dict[str, Any]) -> str:
        """Return the value as JSON, prefixed by its seal if there is a secret."""
        text = json.dumps(value)
        return f"{self.compute_seal(key, text)} {text}" if self.secret else text

    def opened(self, key: str, word: str | bytes) -> dict[str, Any]:
        """Verify and parse a value written under this key. Raises ValueError if it is foreign."""
        text = word.decode() if isinstance(word, bytes) else word
        if self.secret:
            seal, _, text = text.partition(" ")
            if not hmac.compare_digest(seal.encode(), self.compute_seal(key, text).encode()):
                raise ValueError(f"{key}: no rank of this job has written it")
        return json.loads(text)

    def compute_seal(self, key: str, text: str) -> str:
        message = f"{self.attempt}/{key} {text}"
        return hmac.new(self.secret.encode(), message.encode(), hashlib.sha256).hexdigest()


def as_failure(word: str | bytes, words: SignedStore) -> Failure | None:
    """Parse first_failure. Returns None if a rank had finished before anything failed.

    A value that no rank can have written, such as one with code 0, becomes a failure with code 1, so that it
    cannot make the job succeed.
    """
    try:
        fields = words.opened("first_failure", word)
        if fields == {}:
            return None
        failure = Failure(**fields)
        is_whole = all(type(fields[field.name]) is field.type for field in dataclasses.fields(Failure))
        if is_whole and 0 < failure.code < 256:
            return failure
    except (ValueError, TypeError, RecursionError):
        pass
    line = "the job's store holds an entry that no rank writes: another program uses its port"
    return Failure(rank=-1, host="an unknown host", code=1, requeue=False, line=line, text=line)


def read_verdict(store: Store, first: Failure, words: SignedStore) -> tuple[str, list[int]]:
    """Return (the cause in one line, silent ranks) from the verdict, or from `first` if there is none."""
    try:
        if store.check(["verdict"]):
            fields = words.read(store, "verdict")
            return str(fields["line"]), [int(rank) for rank in fields["silent"]]
    except (ValueError, TypeError, KeyError, RecursionError):  # not written by a rank
        pass
    return first.line, []


def within(seconds: float, work: Callable[[], Result]) -> Result:
    """Run work(), which waits for the store, in a thread. Raises StoreTimeout and abandons it on timeout."""
    results: list[Result] = []
    errors: list[BaseException] = []

    def run() -> None:
        try:
            results.append(work())
        except BaseException as error:
            errors.append(error)

    thread = threading.Thread(target=run, daemon=True, name="store")
    thread.start()
    thread.join(seconds)
    if errors:
        raise errors[0]
    if not results:
        raise StoreTimeout(f"the job's store did not answer for {seconds:g} s")
    return results[0]


def ranks_without_state(store: Store, ranks: Sequence[int]) -> list[int]:
    """Return the ranks that have not written a state, by bisection: a single query if all have."""
    if store.check([f"state/{rank}" for rank in ranks]):
        return []
    if len(ranks) == 1:
        return list(ranks)
    middle = len(ranks) // 2
    return [*ranks_without_state(store, ranks[:middle]), *ranks_without_state(store, ranks[middle:])]


def get_all(store: Store, keys: list[str]) -> list[bytes]:
    """Return the values of these keys, which must be set, KEYS_AT_ONCE per request."""
    values: list[bytes] = []
    for first in range(0, len(keys), KEYS_AT_ONCE):
        values += store.multi_get(keys[first:first + KEYS_AT_ONCE])
    return values


def wait_for_key(store: Store, key: str, seconds: float) -> None:
    """Wait until the key is set, the timeout expires, or the store is gone."""
    with contextlib.suppress(RuntimeError, OSError):
        within(seconds + 1.0, lambda: store.wait([key], timedelta(seconds=seconds)))


def main_frame() -> FrameType:
    """Return the current frame of the main thread. Raises RuntimeError if that thread was not started."""
    thread_id = threading.main_thread().ident
    if thread_id is None:
        raise RuntimeError("the main thread was not started")
    return sys._current_frames()[thread_id]


class PeerWatch:
    """Propagate failures to all ranks: `with PeerWatch(rank, size) as peers:` around everything a rank does.

    A failure inside ends every rank and is printed before it propagates (failure.reported_code). In a
    single-process job errors propagate unprinted.

    folder (attribute): the run folder, once it is known; exit reasons are written there.
    """

    def __init__(self, rank: int, size: int, restart_count: str = "0", secret: str = "") -> None:
        self.rank = rank
        self.size = size
        self.activity = comm.Activity()
        self.host = socket.gethostname()
        self.folder: Path | None = None
        self.has_wrong_device = False  # found by this rank
        self.code: int | None = None  # the exit code of this rank, once decided
        self.lock = threading.Lock()  # held to decide the code: by the main thread or the watcher
        self.told = threading.Event()  # the cause has been printed and written
        self.telling = threading.Lock()  # held to report the cause, also by a thread that the store delayed
        self.words = SignedStore(secret, restart_count)
        self.store: Store | None = None  # None in a single-process job
        if size > 1:
            self.store = open_store(rank, size, restart_count=restart_count)
            process = Process(self.host, os.getpid(), os.getppid())
            self.words.write(self.store, f"process/{rank}", dataclasses.asdict(process))
            watcher_store = clone(self.store)
            self.watcher = threading.Thread(
                target=self.watch, args=(watcher_store,), daemon=True, name="peers")
            self.watcher.start()

    def __enter__(self) -> "PeerWatch":
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None,
                 trace: TracebackType | None) -> None:
        if error is not None:
            self.fail(error)
            if self.store is not None:
                # skip leave_job, which can abort if ranks are gone; exit_process ends this process
                return
        elif self.store is not None:
            store = self.store
            finished = self.words.sealed("first_failure", {})
            with contextlib.suppress(Exception):  # the rank that hosts the store may have exited or hang
                within(EXIT_SECONDS, lambda: store.compare_set("first_failure", "", finished))
                self.watcher.join(EXIT_SECONDS)
        leave_job()

    @contextlib.contextmanager
    def failure_scope(self) -> Iterator[None]:
        """Report an error inside to the other ranks before any outer clean-up runs (metrics, W&B, files)."""
        try:
            yield
        except BaseException as error:
            self.fail(error)
            raise

    def report_exit(self, code: int, text: str, requeue: bool, of_job: bool = False) -> None:
        """Write this rank's exit reason; with of_job also the job's exit_reason.json."""
        if self.folder is None:
            return
        folder = Path(self.folder)
        if code == USER_MISTAKE and not (folder / lines.NAME).exists():  # rejected before any run here
            return
        found = self.has_wrong_device
        setup.write_exit_reason(folder, self.rank, code, text, requeue=requeue, of_device=found)
        if of_job and self.rank:
            setup.write_exit_reason(
                folder, self.rank, code, text, requeue=requeue, of_job=True, of_device=found
            )

    def broadcast_from_first(self, key: str, work: Callable[[], Result]) -> Result:
        """Broadcast work() of rank 0, plain JSON, through the store, before the ranks are connected."""
        if self.store is None or self.rank == 0:
            found = work()
            if self.store is not None:
                self.words.write(self.store, key, {"found": found})
            return found
        return self.words.read(self.store, key)["found"]

    # ---- the main thread -----------------------------------------------------------------------------------

    def fail(self, error: BaseException) -> None:
        """End the job because of `error`, once, and mark the error as reported if it was printed."""
        self.has_wrong_device = self.has_wrong_device or getattr(error, "is_of_device", False)
        if self.store is None:
            if self.code is None:
                self.code = get_exit_code(error)
                self.report_exit(self.code, explain(error, self.rank), should_requeue(error))
            return
        if self.code is None:
            self.fail_in_time(self.store, error)
        self.wait_for_report()
        mark_reported(error, self.decided_code())

    def wait_for_report(self) -> None:
        """If another thread ends this rank, wait until it has reported the cause before exiting."""
        self.told.wait(STORE_SECONDS)

    def fail_in_time(self, store: Store, error: BaseException) -> None:
        """Call fail_with_peers, or end this rank alone if the store is gone or does not answer."""
        try:
            # a live store answers at once; only then wait for the other ranks
            within(LIVE_SECONDS, lambda: store.check(["first_failure"]))
            within(STORE_SECONDS, lambda: self.fail_with_peers(store, error))
        except StoreTimeout as silence:
            self.end_without_store(error, silence)
        except STORE_ERRORS:
            self.report_failure(get_exit_code(error), explain(error, self.rank), should_requeue(error))

    def end_without_store(self, error: BaseException, silence: StoreTimeout) -> None:
        """End this rank alone if the host of the store hangs, within STORE_SECONDS whatever blocks.

        A lost connection then counts as a hang, too: that peer exited for the same reason a little earlier.
        """
        code = HANG if isinstance(error, comm.PeerError) else get_exit_code(error)
        timer = threading.Timer(STORE_SECONDS, os._exit, (code,))
        timer.daemon = True
        timer.start()
        keeper = "the launcher, or rank 0, that keeps it is stopped or unreachable"
        text = f"{explain(error, self.rank)}; {silence}: {keeper}"
        requeue = code == HANG or should_requeue(error)
        self.report_failure(code, text, requeue, of_job=True)  # rank 0 may be the one that hangs

    def fail_with_peers(self, store: Store, error: BaseException) -> None:
        mine = Failure(rank=self.rank, host=self.host, code=get_exit_code(error),
                       requeue=should_requeue(error),
                       line=one_line(error), text=str(error))
        word = self.words.sealed("first_failure", dataclasses.asdict(mine))
        first = as_failure(store.compare_set("first_failure", "", word), self.words)
        if first is None or first == mine:
            self.coordinate_failure(store, error, mine, others_finished=first is None)
        else:
            self.join_failure(store, first, error)
            wait_for_key(store, "all_reported", REPORT_SECONDS)

    def coordinate_failure(self, store: Store, error: BaseException, mine: Failure,
                           others_finished: bool) -> None:
        """Publish the cause on the rank that failed first, and wait until all have written their reasons.

        Its reason is also the job's, because rank 0 may be gone, unless the other ranks, and thus the job,
        have finished without a failure.
        """
        with self.lock:
            if self.code is not None:
                return
            self.code = mine.code

        # report the cause first, so that it is printed above its consequences
        peers_text, silent = "", []
        if isinstance(error, comm.PeerError):
            peers_text, silent = self.examine_peers(store, error)
        text = explain(error, self.rank) + peers_text
        self.report_failure(mine.code, text, mine.requeue, of_job=not others_finished)
        self.words.write(store, "verdict", {"line": mine.line + peers_text, "silent": silent})
        self.kill_hanging_siblings(store, silent, mine.code)

        # wait for the other ranks
        deadline = time.monotonic() + REPORT_SECONDS
        while time.monotonic() < deadline:
            num_states = min(store.add("num_states", 0), self.size - 1)
            if store.add("num_reasons", 0) >= num_states:
                break
            time.sleep(POLL_SECONDS)
        store.set("all_reported", "1")

    def examine_peers(self, store: Store, error: comm.PeerError) -> tuple[str, list[int]]:
        """Return (what the other ranks are doing, as text for the error; the ranks that do not answer)."""
        deadline = time.monotonic() + ANSWER_SECONDS[error.exit_code]
        while store.add("num_states", 0) < self.size - 1 and time.monotonic() < deadline:
            time.sleep(POLL_SECONDS)
        others = [rank for rank in range(self.size) if rank != self.rank]
        silent = ranks_without_state(store, others)
        if silent:
            is_hang = error.exit_code == HANG
            return self.silent_text(store, silent, is_hang), silent
        return self.suspects_text(store, others), []

    def read_process(self, store: Store, rank: int) -> Process:
        return Process(**self.words.read(store, f"process/{rank}"))

    def silent_text(self, store: Store, silent: list[int], is_hang: bool) -> str:
        names: list[str] = []
        for rank in silent[:MAX_SILENT]:
            has_started = store.check([f"process/{rank}"])
            names.append(f"rank {rank} on {self.read_process(store, rank).host}" if has_started
                         else f"rank {rank} (never started)")
        more = f" and {len(silent) - MAX_SILENT} more" if len(silent) > MAX_SILENT else ""
        state = "is stopped or unreachable" if is_hang else "is gone"
        return f"; {', '.join(names)}{more} does not respond: it {state}"

    def suspects_text(self, store: Store, others: list[int]) -> str:
        """Name the ranks that are not in an exchange.

        If all are in one, name the ranks of this rank's group that are in a different exchange.
        """
        keys = [f"state/{rank}" for rank in others]
        fields = [self.words.opened(key, word) for key, word in zip(keys, get_all(store, keys))]
        states = {rank: RankState(**values) for rank, values in zip(others, fields)}
        suspects = [rank for rank in others if not states[rank].in_exchange]
        own_exchange, _ = self.activity.current_exchange()
        if not suspects and own_exchange is not None:
            own_activity = str(own_exchange)
            members = [rank for rank in others if rank in own_exchange.group.ranks]
            suspects = [rank for rank in members if states[rank].activity != own_activity]
        text = ""
        for rank in suspects[:MAX_SUSPECTS]:
            state = states[rank]
            activity = f"{state.activity} for {state.seconds:.1f} s{state.location}"
            text += f"; rank {rank} on {state.host} is in {activity}"
        return text

    # ---- the watcher's thread ------------------------------------------------------------------------------

    def watch(self, store: Store) -> None:
        """Wait for the failure of another rank, then end this one even if its main thread is blocked."""
        try:
            store.wait(["first_failure"], FOREVER)
            first = as_failure(store.get("first_failure"), self.words)
            if first is None or first.rank == self.rank:
                return
            within(STORE_SECONDS, lambda: self.join_failure(store, first))
        except STORE_ERRORS as error:
            cause = one_line(error)[:80]
            text = (f"error: rank {self.rank} on {self.host}: in {self.activity}: the launcher, or rank 0, "
                    f"that kept the job's store is gone ({cause})")
            self.report_failure(1, text, requeue=True)
        wait_for_key(store, "all_reported", REPORT_SECONDS)
        # when its peers are gone, the main thread exits on its own and closes its files
        time.sleep(EXIT_SECONDS)
        os._exit(self.decided_code())

    # ---- the device's thread -------------------------------------------------------------------------------

    def start_device_watch(self) -> None:
        """Start a thread that ends the job if a GPU waits for a peer too long. Call it after joining."""
        if self.store is not None:
            arguments = (clone(self.store),)
            thread = threading.Thread(target=self.watch_device, args=arguments, daemon=True, name="device")
            thread.start()

    def watch_device(self, store: Store) -> None:
        """Wait until the GPU has been in one exchange for longer than the timeout, then end the job."""
        while True:
            time.sleep(DEVICE_POLL_SECONDS)
            waited = self.activity.device_waits.current()
            if waited is not None and waited[1] > self.activity.timeout_s:
                break
        if self.code is not None:  # the job is already ending
            return

        exchange, seconds = waited
        error = comm.PeerError(f"no answer for {seconds:.1f} s in {exchange}", HANG)
        self.fail_in_time(store, error)
        time.sleep(EXIT_SECONDS)  # a main thread that is not blocked exits on its own and closes its files
        os._exit(self.decided_code())

    # ---- both threads --------------------------------------------------------------------------------------

    def join_failure(self, store: Store, first: Failure, error: BaseException | None = None) -> None:
        """After another rank's failure, publish this rank's state, read the cause and end with it.

        error: this rank's own error, if any.
        """
        with self.lock:
            if self.code is not None:
                return
            state = self.describe_state()
            self.words.write(store, f"state/{self.rank}", dataclasses.asdict(state))
            store.add("num_states", 1)

            if first.rank >= 0:  # a foreign writer gives no verdict
                wait_for_key(store, "verdict", VERDICT_SECONDS)
            line, silent = read_verdict(store, first, self.words)
            cause = f"rank {first.rank} on {first.host}: {line}"
            text = f"error: rank {self.rank} on {self.host}: stopped in {state.activity}, because of {cause}"

            # print user errors, and errors that all ranks raise, only once
            is_own_error = error is not None and not isinstance(error, comm.PeerError)
            is_same_error = is_own_error and str(error) == first.text
            quiet = first.code == USER_MISTAKE or is_same_error
            self.report_failure(first.code, text, first.requeue, quiet=quiet)
            store.add("num_reasons", 1)
        self.kill_hanging_siblings(store, silent, first.code)

    def describe_state(self) -> RankState:
        frame = main_frame()
        exchange, seconds = self.activity.current_exchange()
        in_exchange = exchange is not None
        location = "" if in_exchange else f", at {Path(frame.f_code.co_filename).name}:{frame.f_lineno}"
        return RankState(host=self.host, in_exchange=in_exchange, activity=str(self.activity),
                         seconds=seconds, location=location)

    def decided_code(self) -> int:
        """Return this rank's exit code. Raises RuntimeError before lead, follow or end has decided it."""
        if self.code is None:
            raise RuntimeError("no exit code was decided")
        return self.code

    def report_failure(self, code: int, text: str, requeue: bool, of_job: bool = False,
                       quiet: bool = False) -> None:
        """Print the cause unless quiet, and write the exit reason and, after a hang, the stacks. Only once.

        This decides the exit code. Later calls, by a thread that the store delayed, do nothing.
        """
        with self.telling:
            if self.told.is_set():
                return
            self.code = code
            text = printable(setup.redact(text))
            if not quiet:
                print_error(text)
            self.report_exit(code, text, requeue, of_job)
            if code == HANG:
                self.write_stacks()
                # a library that hangs may hold the lock of the recorder
                writer = threading.Thread(target=self.write_flight_record, daemon=True)
                writer.start()
                writer.join(FLIGHT_SECONDS)
            self.told.set()

    def write_stacks(self) -> None:
        """Write stacks.rankN.txt to the run folder: the last exchanges and the stacks of all threads.

        If the main thread's exchange has failed, its stack no longer shows the place but the traceback of the
        error does. That is written after the stacks, so that one of the two always has it.
        """
        if self.folder is None:
            return
        with contextlib.suppress(OSError):
            with open(Path(self.folder) / f"stacks.rank{self.rank}.txt", "w") as file:
                file.write(f"rank {self.rank} on {self.host}, process {os.getpid()}: in {self.activity}\n")
                file.write("\nLast exchanges, the newest at the end:\n")
                now = time.monotonic()
                file.writelines(f"  {past.line(now)}\n" for past in list(self.activity.past))
                file.write("\n")
                file.flush()
                faulthandler.dump_traceback(file, all_threads=True)
                error = self.activity.error
                if error is not None:
                    where = "".join(traceback.format_exception(error, chain=False))
                    file.write(f"\nWhere its exchange failed:\n{setup.redact(where)}")

    def write_flight_record(self) -> None:
        """Write flight/rank_N to the run folder, which torchfrtrace reads."""
        record = None if self.folder is None else flight_record()
        if self.folder is None or record is None:
            return
        folder = Path(self.folder) / "flight"
        with contextlib.suppress(OSError):
            folder.mkdir(exist_ok=True)
            (folder / f"rank_{self.rank}").write_bytes(record)

    def kill_hanging_siblings(self, store: Store, silent: list[int], code: int) -> None:
        """After a hang, kill the silent ranks on this host; otherwise the launcher waits 30 s for them."""
        if code != HANG:
            return
        for rank in silent:
            with contextlib.suppress(OSError, RuntimeError, ValueError, IndexError):
                process = self.read_process(clone(store), rank)
                # the pid may have been reused
                is_sibling = get_parent_pid(process.pid) == process.parent == os.getppid()
                if process.host == self.host and is_sibling:
                    os.kill(process.pid, signal.SIGKILL)


def printable(text: str) -> str:
    """Replace terminal control characters by ?, such as escape codes in messages from other hosts."""
    return "".join(letter if letter.isprintable() or letter in "\n\t" else "?" for letter in text)
