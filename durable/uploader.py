"""Upload checkpoints to checkpoint.mirror in one thread of rank 0, for which training waits only at the end.

- A request during an upload is served after it, once, with whatever is newest then.
- A failed upload is logged in one line, and retried with the next checkpoint. After
  checkpoint.mirror_failures consecutive failures the run ends with the exit code of failed storage (82); all
  its checkpoints are in the run folder, and the next launch uploads the newest.
- The end of the run waits for the last upload.
"""
import functools
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from checkpoint.disk_saves import Uploads
from checkpoint.state import run_on_first_rank
from config import Config
from data.remote import RemoteError, get_reason
from durable import mirror
from parallel.extras import Extra
from parallel.wire.comm import Group
from runtime.metrics import MetricsLogger

FINAL_TRIES = 3  # uploads at the end of a run before it ends with an error
FINAL_WAIT = 2.0  # seconds between them


class CheckpointUploader(Uploads):
    """Run `update`, which uploads what the store lacks. Do nothing without it: on all ranks but the first.

    `may_fail` limits consecutive failures; None means no limit.
    """

    def __init__(
        self, url: str, folder: Path, update: Callable[[], None] | None, may_fail: int | None = None
    ) -> None:
        self.url = url
        self.folder = folder
        self.update = update
        self.may_fail = may_fail
        self.failures = 0  # consecutive
        self.reason = ""  # of the last one
        self.given_up = False
        self.lines: list[str] = []  # not yet returned
        self.changed = threading.Condition()  # guards all mutable state
        self.wanted = False
        self.busy = False
        self.thread: threading.Thread | None = None

    def request(self) -> None:
        """Wake the thread to upload what is committed now. Returns immediately."""
        if self.update is None:
            return
        with self.changed:
            self.wanted = True
            if self.thread is None:
                # a daemon: a failing run does not wait for the store
                self.thread = threading.Thread(target=self.run, name="uploader", daemon=True)
                self.thread.start()
            self.changed.notify_all()

    def run(self) -> None:
        """Run the thread: one upload per request, or for several pending ones."""
        while True:
            with self.changed:
                self.busy = False
                self.changed.notify_all()
                self.changed.wait_for(lambda: self.wanted)
                self.wanted = False
                self.busy = True
            self.upload()

    def upload(self) -> None:
        """Upload once. Never raises."""
        assert self.update is not None
        try:
            self.update()
        except Exception as error:
            with self.changed:
                self.failures += 1
                self.reason = str(error) if isinstance(error, RemoteError) else get_reason(error)
                of = "" if self.may_fail is None else f" of {self.may_fail}"
                self.lines.append(
                    f"warning: upload to {self.url} failed ({self.failures}{of} in a row): {self.reason}; "
                    "it will be retried with the next checkpoint"
                )
                if self.may_fail is not None and self.failures >= self.may_fail:
                    self.given_up = True
        else:
            with self.changed:
                if self.failures:
                    self.lines.append(f"upload to {self.url} works again, after {self.failures} that failed")
                self.failures = 0

    def pop_lines(self) -> list[str]:
        """Return the events since the last call, as lines for the log."""
        if not self.lines:
            return []
        with self.changed:
            lines, self.lines = self.lines, []
        return lines

    def has_failed(self) -> bool:
        """Return whether the limit of consecutive failures was reached, so that the run must end."""
        return self.given_up

    def check(self) -> None:
        """Raise RemoteError if has_failed()."""
        if self.has_failed():
            raise self.error(f"{self.may_fail} uploads in a row have failed")

    def error(self, what: str) -> RemoteError:
        return RemoteError(f"{self.url}: {what} ({self.reason or 'no answer'}); {self.folder} has every "
                           "checkpoint, and the same command resumes and uploads the newest")

    def finish(self, timeout_s: float) -> None:
        """Upload what is committed now and wait for it, with up to FINAL_TRIES attempts.

        Raises RemoteError if the store does not have it after that, or after timeout_s.
        """
        if self.update is None:
            return
        deadline = time.monotonic() + timeout_s
        for number in range(FINAL_TRIES):
            if number:
                time.sleep(FINAL_WAIT)
            self.request()
            with self.changed:
                left = deadline - time.monotonic()
                is_done = self.changed.wait_for(lambda: not self.wanted and not self.busy, left)
                if is_done and not self.failures:
                    return
            if not is_done:
                raise self.error(f"the last upload is not done after {timeout_s:g} s (checkpoint.timeout_s)")
        raise self.error("the last upload has failed")


class UploadReports(Extra):
    """Log upload events, and wait for the last upload at the end of the run."""

    def __init__(self, uploads: CheckpointUploader, log: MetricsLogger) -> None:
        self.uploads = uploads
        self.log = log

    def after_step(self, run: Any, step: int) -> None:
        for line in self.uploads.pop_lines():
            self.log.log_line(line)

    def at_end(self, run: Any) -> None:
        """Wait for the last upload. Raises RemoteError. Collective."""
        finish_uploads(self.uploads, run.mesh.world, run.cfg.checkpoint.timeout_s)
        self.after_step(run, 0)


def finish_uploads(uploads: CheckpointUploader, everyone: Group, timeout_s: float) -> None:
    """Wait until checkpoint.mirror has the newest checkpoint. Collective. Raises RemoteError."""
    run_on_first_rank(lambda: uploads.finish(timeout_s), everyone, 2 * timeout_s)


def open_uploader(cfg: Config, folder: Path, is_first_rank: bool) -> CheckpointUploader:
    """Return this rank's uploader: on the first rank with checkpoint.mirror, otherwise one without a store.

    `folder` is the run folder. Sends nothing.
    """
    run = mirror.open_mirror(cfg) if is_first_rank else None
    if run is None:
        return CheckpointUploader("", folder, None)
    update = functools.partial(mirror.update, run, folder, cfg.checkpoint.keep)
    return CheckpointUploader(run.url, folder, update, cfg.checkpoint.mirror_failures)
