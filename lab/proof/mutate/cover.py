"""Which tests run a function? tests/footprints.xz records what each test ran at a given commit."""

import os
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

from lab.proof.mutate.checkout import ROOT

sys.path.append(str(ROOT / "tests"))  # the tests that are run, and what is known of them
import footprint_file  # noqa: E402, F401
from footprint_file import REST, Footprints, functions_of  # noqa: E402

HOOKS = ROOT / "tests" / "hooks"
CACHE = ROOT / ".cache" / "mutate"


@dataclass(frozen=True)
class CoverageMap:
    """Which tests can reach a mutant. `core` are those among the tests of `bash scripts/test.sh`."""

    footprints: Footprints
    core: frozenset[str]

    def tests_of_line(self, file: str, text: str, line: int) -> list[tuple[float, str]]:
        """Return [(seconds, name)] of the tests that run the function at a line, sorted.

        `text` is the current content of `file`. For code outside functions, these are the tests that run any
        function of the file.
        """
        name = function_at(text, line)
        mask = 0
        for at, (column_file, column) in enumerate(self.footprints.columns):
            if column_file == file and name in (REST, column):
                mask |= 1 << at
        found = []
        for test, (seconds, outcome, footprint) in self.footprints.tests.items():
            if outcome == "passed" and footprint & mask:
                found.append((seconds, test))
        return sorted(found)


def function_at(text: str, line: int) -> str:
    """Return the name of the function at a line, or REST outside functions."""
    for function in functions_of(text):
        if function.first <= line <= function.last:
            return function.name
    return REST


def core_tests() -> frozenset[str]:
    """Return the tests of `bash scripts/test.sh`. Raises RuntimeError if pytest cannot collect them."""
    command = [sys.executable, "-m", "pytest", "--collect-only", "-o", "addopts=-q"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    names = [line for line in done.stdout.splitlines() if "::" in line]
    if done.returncode != 0 or not names:
        raise RuntimeError(f"pytest collects no tests: {done.stdout[-500:]}{done.stderr[-500:]}")
    return frozenset(names)


# ---- running the tests of a mutant -------------------------------------------------------------------------


def child_environment(**more: str) -> dict[str, str]:
    """Return the environment for a run of tests or of scripts.verify.

    One thread, no bytecode files, the hooks on the path, and a short timeout for ranks lost to a mutant.
    """
    return {
        **os.environ,
        "OMP_NUM_THREADS": "1",
        "BEVATRON_POOL_TIMEOUT_S": "20",
        "PYTHONDONTWRITEBYTECODE": "1",
        "PYTHONPATH": str(HOOKS),
        **more,
    }


def pytest_arguments(folder: Path, *arguments: str) -> list[str]:
    """Return the arguments of pytest with the hooks' plugin. Temporary files go into `folder`."""
    words = ["-q", "-p", "no:cacheprovider", "-p", "mutate_pytest", "-o", "addopts=", "--tb", "line"]
    return [*words, "--basetemp", str(folder / "tmp"), *arguments]
