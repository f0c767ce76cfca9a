"""A plugin for pytest: runs chosen tests in a given order."""

import json
import os
from pathlib import Path


def pytest_configure(config):
    if "BEVATRON_CHOSEN" in os.environ:
        config.pluginmanager.register(Chosen(Path(os.environ["BEVATRON_CHOSEN"])))


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
