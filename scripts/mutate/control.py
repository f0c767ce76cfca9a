"""The same commands without a mutant: only where they pass does a failure beside them mean anything.

Each control runs once for one text of the checkout and is kept in .cache/mutate/controls.json. A test that
fails now and then is found here when it fails in its control, and no sooner.
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
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from config import ConfigError
from scripts.mutate import cover
from scripts.mutate.checkout import group_ends
from scripts.mutate.cover import environment, pytest_command

START_S = 60.0  # that a run may take beside its tests before it counts as hung
SLOWER = 5.0  # a busy machine
WELL_WITHIN = 0.5  # of a limit: a control that takes longer could have hung as well
LARGEST_FILE = 1 << 30
NO_TESTS = 5  # pytest's exit code
VERDICT = ("ok", "WRONG", "Traceback")  # how the lines begin in which verify says what it found, or died


@dataclass(frozen=True)
class Ran:
    """code: the exit code, None for a run that was stopped after its limit; log: what it printed."""

    code: int | None
    seconds: float
    log: str


@dataclass(frozen=True)
class Proof:
    """A run of scripts.verify: a recipe, a world, the words of a layout."""

    name: str
    world: int
    words: str

    def __str__(self) -> str:
        return f"{self.name} --world {self.world} --only {self.words}"


def ends(command: list[str], cwd: Path, limit_s: float, log: Path, **env: str) -> Ran:
    """Run a command; what it leaves running is ended."""
    begun = time.perf_counter()
    with open(log, "wb") as out:
        process = subprocess.Popen(
            command,
            cwd=cwd,
            env=environment(**env),
            start_new_session=True,
            stdin=subprocess.DEVNULL,
            stdout=out,
            stderr=subprocess.STDOUT,
            preexec_fn=lambda: resource.setrlimit(resource.RLIMIT_FSIZE, (LARGEST_FILE, LARGEST_FILE)),
        )
        try:
            code = process.wait(limit_s)
        except subprocess.TimeoutExpired:
            code = None
        finally:
            group_ends(process)
    return Ran(code, time.perf_counter() - begun, log.read_text(errors="replace"))


# ---- one run, with a mutant in the checkout or without -----------------------------------------------------


@contextlib.contextmanager
def sandbox(base: Path) -> Iterator[Path]:
    """A temporary folder with a copy of base's checkout in its `checkout`."""
    with tempfile.TemporaryDirectory(prefix="mutant-", dir=base, ignore_cleanup_errors=True) as name:
        shutil.copytree(base / "checkout", Path(name) / "checkout")
        yield Path(name)


def run_tests(folder: Path, tests: list[str], limit_s: float) -> tuple[Ran, str]:
    """The tests in this order, up to the first that fails -> the run, and the test that began last ("" where
    none did: an import failed)."""
    order = folder / "chosen.json"
    last = order.with_suffix(".last")
    last.unlink(missing_ok=True)
    order.write_text(json.dumps(tests))
    files = list(dict.fromkeys(name.split("::")[0] for name in tests))
    files = [file for file in files if (folder / "checkout" / file).exists()]
    ran = ends(
        pytest_command(folder, "-x", *files),
        folder / "checkout",
        limit_s,
        folder / "log",
        BEVATRON_CHOSEN=str(order),
    )
    return ran, last.read_text() if last.exists() else ""


def run_proof(folder: Path, p: Proof, limit_s: float) -> Ran:
    command = [sys.executable, "-m", "scripts.verify", p.name, "--world", str(p.world)]
    command += ["--layouts", "1", "--only", *p.words.split()]
    return ends(command, folder / "checkout", limit_s, folder / "log")


def judged(ran: Ran) -> bool:
    """Did verify say of a layout whether it is right, or die on the way? An error exit (a job that is
    refused, words that no layout has) is no verdict."""
    return ran.code in (0, 1) and any(line.startswith(VERDICT) for line in ran.log.splitlines())


def complaint(ran: Ran) -> str:
    """The last line that a run printed."""
    return next((line for line in reversed(ran.log.splitlines()) if line.strip()), "it printed nothing")


# ---- controls ----------------------------------------------------------------------------------------------


def digest(root: Path) -> str:
    """Of the names and texts of a checkout's files."""
    state = hashlib.sha256()
    for path in sorted(root.rglob("*")):
        if path.is_file() and path.suffix != ".pyc":
            state.update(f"{path.relative_to(root)}\0".encode() + path.read_bytes() + b"\0")
    return state.hexdigest()[:16]


class Controls:
    """What passes in the checkout of `base` (checkout.copied) as it stands.

    kept: {test or proof: seconds, None where it did not pass}."""

    def __init__(self, base: Path, file: Path | None = None) -> None:
        self.base, self.file = base, file or cover.KEPT / "controls.json"
        self.of = digest(base / "checkout")
        every = json.loads(self.file.read_text()) if self.file.exists() else {}
        self.kept: dict[str, float | None] = every.get(self.of, {})

    def passes(self, test: str, limit_s: float, anew: bool = False) -> bool:
        """A test by its name, or a file of tests: that it can be imported. anew: whatever was kept, and well
        within the limit: for a mutant that hung."""
        if anew or test not in self.kept:
            with sandbox(self.base) as folder:
                ran, began = run_tests(folder, [test], limit_s)
            passed = ran.code == NO_TESTS if "::" not in test else ran.code == 0 and began == test
            self.keep(test, ran, passed)
        seconds = self.kept[test]
        return seconds is not None and (not anew or seconds <= WELL_WITHIN * limit_s)

    def limit_s(self, p: Proof, anew: bool = False) -> float:
        """How long a proof may take. Raises ConfigError where the unmutated checkout does not pass it, or
        (anew, for a mutant that hung) is nearly as slow."""
        name = str(p)
        most_s = START_S + SLOWER * (self.kept.get(name) or START_S)
        if anew or name not in self.kept:
            with sandbox(self.base) as folder:
                ran = run_proof(folder, p, most_s)
            self.keep(name, ran, judged(ran) and ran.code == 0)
            why = complaint(ran)
        else:
            why = f"as {self.file.name} tells"
        seconds = self.kept[name]
        if seconds is None:
            raise ConfigError(f"scripts.verify {name}: fails without a mutant: {why}; put it right")
        if anew and seconds > WELL_WITHIN * most_s:
            raise ConfigError(f"scripts.verify {name}: takes {seconds:.0f} s without a mutant too")
        return START_S + SLOWER * seconds

    def keep(self, name: str, ran: Ran, passed: bool) -> None:
        self.kept[name] = round(ran.seconds, 1) if passed else None
        self.file.parent.mkdir(parents=True, exist_ok=True)
        every = json.loads(self.file.read_text()) if self.file.exists() else {}
        every.setdefault(self.of, {})[name] = self.kept[name]  # others may have written since
        half = self.file.with_suffix(f".{os.getpid()}")
        half.write_text(json.dumps(every))
        half.replace(self.file)
