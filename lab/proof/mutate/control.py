"""Runs of commands in a sandbox, and their controls: the same commands without a mutant.

A failure counts only if the same command passes without the mutant. Each control runs once per content of
the checkout and is cached in .cache/mutate/controls.json. A flaky test is detected here only if it fails in
its control.
"""

import contextlib
import hashlib
import json
import os
import resource
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from config import ConfigError
from lab.proof.mutate import cover
from lab.proof.mutate.checkout import kill_session
from lab.proof.mutate.cover import child_environment, pytest_arguments
from lab.proof.mutate.warm import WarmPytest

START_S = 60.0  # seconds a run may take beyond its tests before it counts as hung
SLOWDOWN = 5.0  # on a busy machine
WELL_WITHIN = 0.5  # fraction of a time limit; a control that takes longer could also have hung
MAX_FILE_BYTES = 1 << 30
NO_TESTS = 5  # pytest's exit code
VERDICTS = ("ok", "WRONG", "Traceback")  # prefixes of the lines in which verify reports a result or crashes


@dataclass(frozen=True)
class CommandResult:
    """The exit `code` of a command, None if it hit its time limit, and its `output`."""

    code: int | None
    seconds: float
    output: str


@dataclass(frozen=True)
class VerifyRun:
    """A run of scripts.verify on layouts that have these `words`, separated by spaces; on any if "".

    `overrides` are words for the end of its command line.
    """

    recipe: str
    world: int
    words: str
    num_layouts: int = 1
    is_strict: bool = False
    on_lanes: bool = False
    overrides: tuple[str, ...] = ()

    def __str__(self) -> str:
        return f"{self.recipe} --world {self.world} --only {self.words}"


def run_command(command: Sequence[str], cwd: Path, limit_s: float, log: Path, **env: str) -> CommandResult:
    """Run a command with its output in the file `log`, and kill every process that it leaves running."""
    started = time.perf_counter()
    with open(log, "wb") as out:
        process = subprocess.Popen(
            command,
            cwd=cwd,
            env=child_environment(**env),
            start_new_session=True,
            stdin=subprocess.DEVNULL,
            stdout=out,
            stderr=subprocess.STDOUT,
            preexec_fn=limit_file_size,
        )
        try:
            code = process.wait(limit_s)
        except subprocess.TimeoutExpired:
            code = None
        finally:
            kill_session(process)
    seconds = time.perf_counter() - started
    return CommandResult(code, seconds, log.read_text(errors="replace"))


def limit_file_size() -> None:
    """Keep a mutant that writes endlessly from filling the disk."""
    resource.setrlimit(resource.RLIMIT_FSIZE, (MAX_FILE_BYTES, MAX_FILE_BYTES))


# ---- one run, with or without a mutant ---------------------------------------------------------------------


@contextlib.contextmanager
def sandbox(base: Path) -> Iterator[Path]:
    """Yield a temporary folder with a copy of base's checkout in its subfolder `checkout`."""
    with tempfile.TemporaryDirectory(prefix="mutant-", dir=base, ignore_cleanup_errors=True) as name:
        shutil.copytree(base / "checkout", Path(name) / "checkout")
        yield Path(name)


def run_tests(
    warm: WarmPytest, folder: Path, tests: Sequence[str], limit_s: float
) -> tuple[CommandResult, str]:
    """Run the tests of a sandbox in this order until one fails.

    Returns the result and the name of the last test that started, "" if none did (an import failed).
    """
    order = folder / "chosen.json"
    order.write_text(json.dumps(tests))
    last_started = order.with_suffix(".last")
    last_started.unlink(missing_ok=True)

    checkout = folder / "checkout"
    files = dict.fromkeys(name.split("::")[0] for name in tests)
    existing = [file for file in files if (checkout / file).exists()]
    log = folder / "log"
    started = time.perf_counter()
    code = warm.run(
        arguments=pytest_arguments(folder, "-x", *existing),
        folder=str(checkout),
        log=str(log),
        environment=child_environment(BEVATRON_CHOSEN=str(order)),
        max_file_bytes=MAX_FILE_BYTES,
        limit_s=limit_s,
    )
    result = CommandResult(code, time.perf_counter() - started, log.read_text(errors="replace"))
    return result, last_started.read_text() if last_started.exists() else ""


def run_verify(folder: Path, run: VerifyRun, limit_s: float) -> CommandResult:
    """Run scripts.verify in a sandbox."""
    command = [sys.executable, "-m", "scripts.verify", run.recipe, "--world", str(run.world)]
    command += ["--layouts", str(run.num_layouts)]
    if run.words:
        command += ["--only", *run.words.split()]
    if run.is_strict:
        command.append("--strict")
    if run.on_lanes:
        command.append("--lanes")
    command += run.overrides
    return run_command(command, folder / "checkout", limit_s, folder / "log")


def has_verdict(result: CommandResult) -> bool:
    """Return whether verify judged a layout right or wrong, or crashed while checking one.

    An error exit (a refused job, words that match no layout) gives no verdict.
    """
    if result.code not in (0, 1):
        return False
    return any(line.startswith(VERDICTS) for line in result.output.splitlines())


def last_output_line(result: CommandResult) -> str:
    lines = [line for line in result.output.splitlines() if line.strip()]
    return lines[-1] if lines else "it printed nothing"


# ---- controls ----------------------------------------------------------------------------------------------


def checkout_digest(root: Path) -> str:
    """Return a hash of the names and contents of a checkout's files, excluding bytecode."""
    state = hashlib.sha256()
    for path in sorted(root.rglob("*")):
        if path.is_file() and path.suffix != ".pyc":
            state.update(f"{path.relative_to(root)}\0".encode())
            state.update(path.read_bytes())
            state.update(b"\0")
    return state.hexdigest()[:16]


class Controls:
    """The commands that pass in the checkout of `base` (checkout.copy_checkout) without a mutant.

    `seconds` maps each test and run of verify to its duration, None if it failed. `warm` runs the tests;
    close() stops it.
    """

    def __init__(self, base: Path, file: Path | None = None) -> None:
        self.base = base
        self.warm = WarmPytest()
        self.file = file or cover.CACHE / "controls.json"
        self.digest = checkout_digest(base / "checkout")
        self.seconds: dict[str, float | None] = self.read_file().get(self.digest, {})

    def close(self) -> None:
        self.warm.close()

    def read_file(self) -> dict[str, dict[str, float | None]]:
        """Return {digest of a checkout: seconds}."""
        return json.loads(self.file.read_text()) if self.file.exists() else {}

    def passes(self, test: str, limit_s: float, repeat: bool = False) -> bool:
        """Return whether a test passes, or a test file can be imported.

        `repeat`, for a mutant that hung, runs a known control again and requires that it ends well within the
        limit.
        """
        if repeat or test not in self.seconds:
            with sandbox(self.base) as folder:
                result, last_started = run_tests(self.warm, folder, [test], limit_s)
            if "::" in test:
                passed = result.code == 0 and last_started == test
            else:
                passed = result.code == NO_TESTS
            self.record(test, result, passed)

        seconds = self.seconds[test]
        if seconds is None:
            return False
        return not repeat or seconds <= WELL_WITHIN * limit_s

    def limit_s(self, run: VerifyRun, repeat: bool = False) -> float:
        """Return the time limit of a run of verify, in seconds.

        `repeat`, for a mutant that hung, runs a known control again.
        Raises ConfigError if the run fails without a mutant, or (repeat) is nearly as slow.
        """
        name = str(run)
        control_limit_s = START_S + SLOWDOWN * (self.seconds.get(name) or START_S)
        if repeat or name not in self.seconds:
            with sandbox(self.base) as folder:
                result = run_verify(folder, run, control_limit_s)
            self.record(name, result, has_verdict(result) and result.code == 0)
            reason = last_output_line(result)
        else:
            reason = f"according to {self.file.name}"

        seconds = self.seconds[name]
        if seconds is None:
            raise ConfigError(f"scripts.verify {name}: fails without a mutant: {reason}; repair it first")
        if repeat and seconds > WELL_WITHIN * control_limit_s:
            raise ConfigError(f"scripts.verify {name}: takes {seconds:.0f} s without a mutant too")
        return START_S + SLOWDOWN * seconds

    def record(self, name: str, result: CommandResult, passed: bool) -> None:
        """Store the result of a control in memory and in the file."""
        self.seconds[name] = round(result.seconds, 1) if passed else None
        self.file.parent.mkdir(parents=True, exist_ok=True)
        content = self.read_file()  # another process may have written to it
        content.setdefault(self.digest, {})[name] = self.seconds[name]
        temporary = self.file.with_suffix(f".{os.getpid()}")
        temporary.write_text(json.dumps(content))
        temporary.replace(self.file)
