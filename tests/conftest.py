"""One thread a process: the tests share two cores, and a single thread makes every result bitwise
repeatable.
"""

import runtime  # noqa: F401  before torch (see there)

import contextlib
import functools
import os
import pathlib
import re
import signal

import pytest
import torch

# under nohup it is ignored, and every process of a test would inherit that
signal.signal(signal.SIGHUP, signal.SIG_DFL)

if (
    not torch.cuda.is_available()
):  # kernels run through Triton's interpreter, which decides when it is first imported
    os.environ["TRITON_INTERPRET"] = "1"
    with contextlib.suppress(
        ImportError
    ):  # no wheel for this platform: the tests that need it skip themselves
        import interpreter  # noqa: F401

# under these names pytest compares two long lists that differ line by line: hours, for lists of tensors
for name in ("CI", "BUILD_NUMBER"):
    os.environ.pop(name, None)

# full lines, whatever the width of the terminal that starts the tests
os.environ.pop("COLUMNS", None)

import draw

from runtime.pool import WorkerPool

torch.set_num_threads(1)


def pytest_addoption(parser):
    parser.addoption(
        "--all",
        action="store_true",
        help="every case of long tables and every slow test, not this commit's draw (tests/draw.py)",
    )
    parser.addoption(
        "--memory-share",
        type=float,
        metavar="F",
        help="the share of the GPU's memory that this process may take, where several run beside each other",
    )


def pytest_configure(config):
    share = config.getoption("memory_share")
    if share is None:
        return
    if not 0 < share <= 1:
        raise pytest.UsageError(f"--memory-share {share:g}: give a share of the GPU, above 0 up to 1")
    if torch.cuda.is_available():
        torch.cuda.set_per_process_memory_fraction(share)


def pytest_collection_modifyitems(config, items):
    if config.getoption("all") or config.args_source is not pytest.Config.ArgsSource.TESTPATHS:
        return  # all were asked for, or some by name
    files = {item.nodeid: item.path.relative_to(config.rootpath).as_posix() for item in items}
    left = draw.leave_out(files, draw.commit_seed())
    config.hook.pytest_deselected(items=[item for item in items if item.nodeid in left])
    items[:] = [item for item in items if item.nodeid not in left]
    if hasattr(config, "workeroutput"):
        config.workeroutput["left out"] = len(left)
    else:
        config.left_out = len(left)


@pytest.hookimpl(optionalhook=True)
def pytest_testnodedown(node):
    """Every worker of pytest-xdist draws the same cases."""
    node.config.left_out = getattr(node, "workeroutput", {}).get("left out", 0)


def pytest_terminal_summary(terminalreporter, config):
    if left_out := getattr(config, "left_out", 0):
        terminalreporter.write_line(
            f"{left_out} slow tests and cases of long tables were left out by this commit's draw; "
            "--all runs them"
        )


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config, log):
    """`--numprocesses 2` (scripts/test.sh): one process runs the files that ask for `ranks`, so that there is
    one pool of them; the other runs the rest, file by file.
    """
    from xdist.scheduler import LoadScopeScheduling

    class PoolAndFiles(LoadScopeScheduling):
        def _split_scope(self, nodeid: str) -> str:
            file = nodeid.partition("::")[0]
            return "ranks" if asks_for_ranks(config.rootpath / file) else file

    return PoolAndFiles(config, log)


@functools.cache
def asks_for_ranks(file: pathlib.Path) -> bool:
    """Whether a function in it has the fixture `ranks` as an argument."""
    return re.search(r"^def \w+\([^)]*\branks\b", file.read_text(), re.MULTILINE) is not None


@pytest.fixture(scope="session")
def ranks():
    """ranks(n): a warm pool of n gloo ranks, one for the whole run of tests (runtime/pool.py)."""
    pools = {}

    def pool(n: int) -> WorkerPool:
        if (
            n not in pools or pools[n].closed
        ):  # a rank that failed closes its pool: the next test gets another
            # shorter where a mutant may lose a rank (proof/mutate)
            pools[n] = WorkerPool(n, float(os.environ.get("BEVATRON_POOL_TIMEOUT_S", 60)))
        return pools[n]

    yield pool
    for p in pools.values():
        p.close()
