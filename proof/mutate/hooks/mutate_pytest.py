"""A plugin for pytest: says which test runs while lines are traced, or runs chosen tests in a given order."""

import json
import os
from pathlib import Path

import mutate_trace
import pytest


def pytest_configure(config):
    if "BEVATRON_TRACE" in os.environ:
        config.pluginmanager.register(Tracing(Path(os.environ["BEVATRON_TRACE"])))
    if "BEVATRON_CHOSEN" in os.environ:
        config.pluginmanager.register(Chosen(Path(os.environ["BEVATRON_CHOSEN"])))


class Tracing:
    """Writes the number of the running test to `hits`, and a line of `tests.jsonl` when it is over: [number,
    name, seconds, passed]."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.number, self.seconds, self.passed = folder, 0, 0.0, True

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_protocol(self, item, nextitem):
        self.number, self.seconds, self.passed = self.number + 1, 0.0, True
        if self.number >= mutate_trace.ROWS:
            raise pytest.UsageError(
                f"more than {mutate_trace.ROWS - 1} tests in one traced run; trace fewer files"
            )
        self.tell(self.number)
        done = yield
        with open(self.folder / "tests.jsonl", "a") as out:
            print(json.dumps([self.number, item.nodeid, round(self.seconds, 3), self.passed]), file=out)
        return done

    def pytest_runtest_logreport(self, report):
        self.seconds += report.duration
        self.passed &= report.outcome == "passed"

    def tell(self, number: int) -> None:
        with open(self.folder / "hits", "r+b") as hits:
            hits.write(number.to_bytes(mutate_trace.HEAD, "little"))


class Chosen:
    """Keeps the tests that the file names (a JSON list), in its order; beside it, in NAME.last, stands the
    test that began last."""

    def __init__(self, file: Path) -> None:
        self.place = {name: at for at, name in enumerate(json.loads(file.read_text()))}
        self.last = file.with_suffix(".last")

    def pytest_collection_modifyitems(self, items):
        items[:] = sorted((i for i in items if i.nodeid in self.place), key=lambda i: self.place[i.nodeid])

    def pytest_runtest_logstart(self, nodeid, location):
        self.last.write_text(nodeid)
