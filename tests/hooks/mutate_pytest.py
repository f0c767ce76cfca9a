"""A pytest plugin that runs chosen tests in a given order."""

import json
import os
from pathlib import Path


def pytest_configure(config):
    if "BEVATRON_CHOSEN" in os.environ:
        config.pluginmanager.register(Chosen(Path(os.environ["BEVATRON_CHOSEN"])))


class Chosen:
    """Keep the tests listed in a JSON file, in that order, and write the last one started to NAME.last."""

    def __init__(self, file: Path) -> None:
        self.place = {name: at for at, name in enumerate(json.loads(file.read_text()))}
        self.last = file.with_suffix(".last")

    def pytest_collection_modifyitems(self, items):
        items[:] = sorted((i for i in items if i.nodeid in self.place), key=lambda i: self.place[i.nodeid])

    def pytest_runtest_logstart(self, nodeid, location):
        self.last.write_text(nodeid)
