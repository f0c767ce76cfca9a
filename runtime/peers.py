"""How a job of many ranks ends: together, at once, with the cause first and one line a rank.

Whoever fails first says so in the job's store; a thread of every rank waits for that word, since the main
thread may sit in an exchange that nothing interrupts (gloo comes back after the whole timeout, nccl never).
Each rank then says where it is; the one that was first says what happened (its error, or which peer it waited
for and what that one does), every rank writes its exit_reason.rankN.json with the cause's exit code, and all
leave. exit_reason.json, the job's, is rank 0's or that of the rank which failed first. A stopped process is
ended by a sibling on its host.

    first     who failed: {rank, host, code, again, line, text}, or {} once a rank has finished in peace
    here/R    {host, pid} of rank R      at/R, answers    where rank R is, and how many have said it
    verdict   the cause in one line      written, over    how many have written their reason; all have
"""
import contextlib
import json
import os
import signal
import socket
import sys
import threading
import time
from datetime import timedelta
from pathlib import Path

from parallel import comm
from runtime import setup
from runtime.failure import again, code_of, explain, one_line

ANSWER = 1.5  # seconds in which a living rank says where it is
LEAVE = 3.0  # seconds in which all write their reason; then the main thread has as long to come out by itself
FOREVER = timedelta(days=3650)


class Peers:
    """`with Peers(rank, size) as peers:` around all a rank does. A failure inside it ends every rank and is printed here
    (error.said: its exit code); a process alone passes its errors on. folder: where exit_reason.json goes, once known."""

    def __init__(self, rank: int, size: int, attempt: str = "0") -> None:
        self.rank, self.size, self.now = rank, size, comm.Now()
        self.host, self.folder = socket.gethostname(), None
        self.code: int | None = None  # of this rank's end, once it is decided
        self.lock = threading.Lock()
        self.store = None
        if size > 1:
            self.store = comm.meet(rank, size, attempt=attempt)
            self.put(self.store, f"here/{rank}", {"host": self.host, "pid": os.getpid(), "parent": os.getppid()})
            self.watcher = threading.Thread(target=self.watch, args=(self.store.clone(),), daemon=True, name="peers")
            self.watcher.start()

    def __enter__(self) -> "Peers":
        return self

    def __exit__(self, kind, error, trace) -> None:
        if error is not None:
            self.fail(error)
            if self.store is not None:
                return  # taking groups down whose ranks are gone can abort: failure.leave ends this process
        elif self.store is not None:
            with contextlib.suppress(Exception):  # the rank that keeps the store may have left already
                self.store.compare_set("first", "", "{}")
                self.watcher.join(LEAVE)
        comm.leave()

    @contextlib.contextmanager
    def told(self):
        """Tells the others of an error inside before anything else does its clearing up (metrics, W&B, files)."""
        try:
            yield
        except BaseException as error:
            self.fail(error)
            raise

    def reason(self, code: int, text: str, again: bool, job: bool = False) -> None:
        """Writes this rank's exit reason; as the job's too where `job` says so."""
        if self.folder is None:
            return
        setup.exit_reason(Path(self.folder), self.rank, code, text, again)
        if job and self.rank:
            setup.exit_reason(Path(self.folder), self.rank, code, text, again, job=True)

    # ---- the main thread ---------------------------------------------------------------------------------------------

    def fail(self, error: BaseException) -> None:
        """Ends the job for `error`, once. Sets error.said where it has been printed."""
        if self.store is None:
            if self.code is None:
                self.code = code_of(error)
                self.reason(self.code, explain(error, self.rank), again(error))
            return
        if self.code is None:
            mine = {"rank": self.rank, "host": self.host, "code": code_of(error), "again": again(error),
                    "line": one_line(error), "text": str(error)}
            try:
                first = json.loads(self.store.compare_set("first", "", json.dumps(mine)))
                if first in ({}, mine):
                    self.lead(error, mine, alone=first == {})
                else:
                    self.follow(self.store, first, error)
                    self.wait(self.store, "over")
            except (RuntimeError, OSError):  # the store is gone with the rank or launcher that kept it
                self.end(code_of(error), explain(error, self.rank), again(error))
        error.said = self.code

    def lead(self, error: BaseException, mine: dict, alone: bool) -> None:
        """The first to fail: find the cause, say it, and hold the door until all have written theirs. Its
        reason is the job's, for rank 0 may be the one that is gone; alone: the others finished in peace, and
        the job with them."""
        with self.lock:
            if self.code is not None:
                return
            self.code = mine["code"]
        lost = isinstance(error, comm.PeerError)
        silent = []
        if lost:
            found, silent = self.inquest(error)
            mine["line"] += found
        text = explain(error, self.rank) + (found if lost else "")
        print(text, file=sys.stderr, flush=True)  # first, so that the cause stands above what follows from it
        self.put(self.store, "verdict", {"line": mine["line"], "silent": silent})
        self.reason(mine["code"], text, mine["again"], job=not alone)
        self.finish(silent, mine["code"])
        deadline = time.monotonic() + LEAVE
        while self.store.add("written", 0) < min(self.store.add("answers", 0), self.size - 1) and time.monotonic() < deadline:
            time.sleep(0.02)
        self.store.set("over", "1")

    def inquest(self, error: comm.PeerError) -> tuple[str, list[int]]:
        """What the others do, in words, and the ranks that do not say."""
        deadline = time.monotonic() + ANSWER
        while self.store.add("answers", 0) < self.size - 1 and time.monotonic() < deadline:
            time.sleep(0.02)
        others = [r for r in range(self.size) if r != self.rank]
        silent = [r for r in others if not self.store.check([f"at/{r}"])]
        if silent:
            names = ", ".join(f"rank {r} on {self.get(self.store, f'here/{r}')['host']}" if self.store.check([f"here/{r}"])
                              else f"rank {r} (never started)" for r in silent[:8])
            more = f" and {len(silent) - 8} more" if len(silent) > 8 else ""
            state = "is stopped or cut off" if error.exit_code == 76 else "is gone"
            return f"; {names}{more} gives no sign of life: it {state}", silent
        at = {r: self.get(self.store, f"at/{r}") for r in others}
        idle = [r for r in others if not at[r]["inside"]]
        group = self.now.exchange[1].ranks if self.now.exchange else ()
        apart = idle or [r for r in others if r in group and at[r]["text"] != str(self.now)]
        return "".join(f"; rank {r} on {at[r]['host']} is in {at[r]['text']} for {at[r]['seconds']:.1f} s{at[r]['where']}" for r in apart[:4]), []

    # ---- the watcher's thread ----------------------------------------------------------------------------------------

    def watch(self, store) -> None:
        """Waits for the first word of a failure; then this rank ends, whatever its main thread is waiting for."""
        try:
            store.wait(["first"], FOREVER)
            first = self.get(store, "first")
            if not first or first["rank"] == self.rank:
                return
            self.follow(store, first)
        except (RuntimeError, OSError) as error:
            self.end(1, f"error: rank {self.rank} on {self.host}: in {self.now}: the launcher, or rank 0, that kept the job's store is gone "
                        f"({one_line(error)[:80]})", again=True)
        self.wait(store, "over")
        time.sleep(LEAVE)  # the main thread comes out by itself as soon as its peers are gone, and closes its files
        os._exit(self.code)

    # ---- both --------------------------------------------------------------------------------------------------------

    def follow(self, store, first: dict, error: BaseException | None = None) -> None:
        """Another rank failed first: say where this one is, hear the cause, write it down."""
        with self.lock:
            if self.code is not None:
                return
            frame = sys._current_frames()[threading.main_thread().ident]
            inside = self.now.exchange is not None
            where = "" if inside else f", at {Path(frame.f_code.co_filename).name}:{frame.f_lineno}"
            here, seconds = str(self.now), time.monotonic() - self.now.since
            self.put(store, f"at/{self.rank}", {"host": self.host, "inside": inside, "text": here, "seconds": seconds, "where": where})
            store.add("answers", 1)
            self.wait(store, "verdict")
            verdict = self.get(store, "verdict") if store.check(["verdict"]) else {"line": first["line"], "silent": []}
            same = error is not None and str(error) == first["text"] and not isinstance(error, comm.PeerError)
            quiet = first["code"] == 2 or same  # a mistake of the user's, and what all ranks found together, is said once
            cause = f"rank {first['rank']} on {first['host']}: {verdict['line']}"
            text = f"error: rank {self.rank} on {self.host}: stopped in {here}, because of {cause}"
            self.end(first["code"], text, first["again"], quiet)
        store.add("written", 1)
        self.finish(verdict["silent"], first["code"])

    def end(self, code: int, text: str, again: bool, quiet: bool = False) -> None:
        self.code, text = code, setup.redact(text)
        if not quiet:
            print(text, file=sys.stderr, flush=True)
        self.reason(code, text, again)

    def finish(self, silent: list[int], code: int) -> None:
        """End siblings on this host that hang and cannot hear: else the launcher waits half a minute for them."""
        for rank in silent if code == 76 else []:
            with contextlib.suppress(OSError, RuntimeError, ValueError, IndexError):
                there = self.get(self.store.clone(), f"here/{rank}")
                stat = Path(f"/proc/{there['pid']}/stat").read_text().rpartition(")")[2].split()
                if there["host"] == self.host and int(stat[1]) == there["parent"] == os.getppid():  # no stranger with its number
                    os.kill(there["pid"], signal.SIGKILL)

    def wait(self, store, key: str) -> None:
        with contextlib.suppress(RuntimeError, OSError):
            store.wait([key], timedelta(seconds=ANSWER + LEAVE))

    def put(self, store, key: str, value: dict) -> None:
        store.set(key, json.dumps(value))

    def get(self, store, key: str) -> dict:
        return json.loads(store.get(key))
