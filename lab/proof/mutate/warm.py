"""Runs pytest in forks of one process that has imported torch and pytest, but nothing of the checkout.

A mutant needs few tests, and importing torch would take longer than they do. The process reads one run a line
from stdin (JSON: the parameters of `become_pytest` and limit_s) and answers with its exit code, null for a
run that it had to kill. It exits when stdin closes.
"""

import contextlib
import gc
import importlib
import json
import os
import resource
import signal
import subprocess
import sys
import time
import types

PRELOADED = ("numpy", "pytest", "torch")
POLL_S = 0.01


class WarmPytest:
    """The caller's side. The process starts with the first run."""

    def __init__(self) -> None:
        self.process: subprocess.Popen | None = None

    def run(self, **run: object) -> int | None:
        """Return the exit code of a run (see above). Raises RuntimeError if the process has died."""
        if self.process is None:
            self.process = subprocess.Popen(
                [sys.executable, "-u", __file__],
                env={**os.environ, "OMP_NUM_THREADS": "1"},
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                text=True,
            )
        with contextlib.suppress(BrokenPipeError):
            print(json.dumps(run), file=self.process.stdin, flush=True)
        answer = self.process.stdout.readline()
        if not answer:
            raise RuntimeError("lab/proof/mutate/warm.py: the process that forks runs of pytest has died")
        return json.loads(answer)["code"]

    def close(self) -> None:
        if self.process is not None:
            self.process.stdin.close()
            self.process.stdout.close()
            self.process.wait()
            self.process = None


def become_pytest(
    arguments: list[str], folder: str, log: str, environment: dict[str, str], max_file_bytes: int
) -> int:
    """Turn a fork into `python -m pytest ARGUMENTS` in a folder, as the leader of its own session, and return
    the exit code.

    Output goes to the file `log`; `max_file_bytes` limits the size of any file that it writes.
    """
    os.setsid()
    resource.setrlimit(resource.RLIMIT_FSIZE, (max_file_bytes, max_file_bytes))
    os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
    output = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
    os.dup2(output, 1)
    os.dup2(output, 2)

    os.chdir(folder)
    os.environ.clear()
    os.environ.update(environment)
    sys.dont_write_bytecode = bool(environment.get("PYTHONDONTWRITEBYTECODE"))
    more = [entry for entry in environment.get("PYTHONPATH", "").split(os.pathsep) if entry]
    sys.path[:1] = [folder, *more]  # replaces the folder of this file
    sys.argv = ["pytest", *arguments]
    sys.modules["__main__"] = types.ModuleType("__main__")
    return sys.modules["pytest"].main(arguments)


def wait(pid: int, limit_s: float) -> int | None:
    """Wait for a run up to the limit, kill what is left of its session, and return its exit code."""
    deadline = time.monotonic() + limit_s
    while not (ended := os.waitpid(pid, os.WNOHANG))[0] and time.monotonic() < deadline:
        time.sleep(POLL_S)
    with contextlib.suppress(ProcessLookupError):
        os.killpg(pid, signal.SIGKILL)
    if ended[0]:
        return os.waitstatus_to_exitcode(ended[1])
    os.waitpid(pid, 0)
    return None


def serve() -> None:
    for name in PRELOADED:
        importlib.import_module(name)
    gc.freeze()
    for line in sys.stdin:
        run = json.loads(line)
        limit_s = run.pop("limit_s")
        pid = os.fork()
        if pid == 0:
            sys.exit(become_pytest(**run))
        print(json.dumps({"code": wait(pid, limit_s)}), flush=True)


if __name__ == "__main__":
    serve()
