"""One thread a process: the tests share two cores, and a single thread makes every result bitwise
repeatable.
"""

import runtime  # noqa: F401  before torch (see there)

import contextlib
import functools
import gc
import os
import pathlib
import re
import signal
import sys

import pytest
import torch

# ignored under nohup and in the background of a shell, which every process of a test would inherit
signal.signal(signal.SIGHUP, signal.SIG_DFL)
signal.signal(signal.SIGINT, signal.default_int_handler)

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

import footprint_file
import footprints
import selection
import zygote

if sys.platform == "linux":
    zygote.ForkingPopen.install()

from config import ConfigError, provenance
from durable.pool import WorkerPool

torch.set_num_threads(1)
DETERMINISM = torch.get_deterministic_debug_mode()

HERE = pathlib.Path(__file__).parent
collect_ignore: list[str] = []
if not (HERE.parent / "lab").is_dir():  # a clone without it: leave out what imports it, directly or not
    missing = {"lab"}
    tests = {path: path.read_text() for path in HERE.rglob("test_*.py")}
    for _ in range(3):
        imported = re.compile(rf"^(from|import) ({'|'.join(sorted(missing))})\b", re.MULTILINE)
        missing |= {path.stem for path, text in tests.items() if imported.search(text)}
    collect_ignore += [str(path.relative_to(HERE)) for path in tests if path.stem in missing]


def pytest_addoption(parser):
    group = parser.getgroup("bevatron", "which tests run (tests/selection.py)")
    group.addoption("--all", action="store_true", help="every test, not the core alone")
    group.addoption("--part", metavar="K/M", help="with --all: the K-th of M parts of about the same length")
    group.addoption(
        "--changed",
        nargs="?",
        const="",
        metavar="COMMIT",
        help="the core, and each test that runs what has changed since COMMIT (that of tests/footprints.xz)",
    )
    group.addoption(
        "--minutes",
        type=float,
        help="with --changed: how long that may take, without the core; with --without-core, what has not "
        "begun by then is skipped",
    )
    group.addoption("--without-core", action="store_true", help="with --changed: only what the core has not")
    group.addoption("--record", metavar="FOLDER", help="note which test runs what (tests/footprints.py)")
    group.addoption(
        "--memory-share",
        type=float,
        metavar="F",
        help="the share of the GPU's memory that this process may take, where several run beside each other",
    )


def pytest_configure(config):
    limit_memory(config.getoption("memory_share"))
    if (minutes := config.getoption("minutes")) and config.getoption("without_core"):
        config.pluginmanager.register(selection.Deadline(minutes))
    if folder := config.getoption("record"):
        worker = os.environ.get("PYTEST_XDIST_WORKER", "alone")
        if worker != "alone" or not config.getoption("numprocesses", None):
            config.pluginmanager.register(footprints.Recorder(pathlib.Path(folder).resolve() / worker))


def limit_memory(share: float | None) -> None:
    """Raises UsageError for what is not a share."""
    if share is not None and not 0 < share <= 1:
        raise pytest.UsageError(f"--memory-share {share:g}: give a share of the GPU, above 0 up to 1")
    if share is not None and torch.cuda.is_available():
        torch.cuda.set_per_process_memory_fraction(share)


def pytest_collection_modifyitems(config, items):
    if config.args_source is not pytest.Config.ArgsSource.TESTPATHS:
        return  # what is named
    known = footprint_file.NOTHING
    if footprint_file.FOOTPRINTS.exists():
        known = footprint_file.read_footprints()
    known = selection.with_siblings(known, [item.nodeid for item in items])
    try:
        chosen, note = choose(config, items, known)
    except (selection.SelectionError, ConfigError) as error:
        raise pytest.UsageError(str(error)) from None
    config.hook.pytest_deselected(items=[item for item in items if item.nodeid not in chosen])
    items[:] = [item for item in items if item.nodeid in chosen]
    # the longest files first: no process is alone with one at the end
    files = selection.longest_first([item.nodeid for item in items], known)
    items.sort(key=lambda item: files.index(item.nodeid.partition("::")[0]))
    (config.workeroutput if hasattr(config, "workeroutput") else config.__dict__)["selection_note"] = note


def choose(config, items, known) -> tuple[set[str], str]:
    """The node ids that this run takes, and a line that says so."""
    names = [item.nodeid for item in items]
    if config.getoption("all"):
        part = config.getoption("part") or "1/1"
        return selection.part_of(names, part, known), f"--all: part {part}"

    marks = {item.nodeid: item.get_closest_marker("slow") for item in items}
    core = selection.core_of({name: mark and mark.kwargs for name, mark in marks.items()})
    commit = config.getoption("changed")
    if commit is None:
        return core, f"the core; {len(names) - len(core)} slow tests are left to --all"

    if not (commit := commit or known.commit):
        raise selection.SelectionError("--changed: tests/footprints.xz is not there; name a commit")
    changed = selection.changes_since(commit)
    more = selection.in_order(selection.tests_of_changes(names, changed, known))
    more = [name for name in more if name not in core]
    chosen = selection.that_fit(more, config.getoption("minutes"), known)
    left = f"; {len(more) - len(chosen)} more have no time" if len(chosen) < len(more) else ""
    note = f"{len(chosen)} slow tests run what has changed since {commit[:7]}{left}"
    return set(chosen) | (set() if config.getoption("without_core") else core), note


@pytest.hookimpl(optionalhook=True)
def pytest_testnodedown(node):
    """Every worker of pytest-xdist chooses the same tests."""
    node.config.selection_note = getattr(node, "workeroutput", {}).get("selection_note", "")


def pytest_terminal_summary(terminalreporter, config):
    if note := getattr(config, "selection_note", ""):
        terminalreporter.write_line(note)


@pytest.fixture(scope="session")
def ranks():
    """ranks(n): a warm pool of n gloo ranks, one for the whole run of tests (durable/pool.py)."""
    pools = {}

    def pool(n: int) -> WorkerPool:
        if (
            n not in pools or pools[n].closed
        ):  # a rank that failed closes its pool: the next test gets another
            # shorter where a mutant may lose a rank (lab/proof/mutate)
            pools[n] = WorkerPool(n, float(os.environ.get("BEVATRON_POOL_TIMEOUT_S", 60)))
        return pools[n]

    yield pool
    for p in pools.values():
        p.close()


@pytest.fixture(scope="session")
def transformers():
    """The library that texts, weights and scores are compared with."""
    return pytest.importorskip("transformers", reason="transformers is not installed: nothing is compared")


@pytest.fixture(scope="session")
def prefix(tmp_path_factory):
    """The corpus of ranks.py, for tests that read it and no more."""
    from ranks import corpus

    return corpus(tmp_path_factory.mktemp("corpus"))


@pytest.fixture(autouse=True)
def process_settings():
    """Each test begins and ends with the determinism and the threads of a new process, whatever train.main
    has set in a test, or in a fixture of a module before it. A run's collection of garbage looks at what the
    test has made, not at all that was ever imported.
    """
    reset_process()
    gc.freeze()
    yield
    reset_process()


@pytest.fixture(autouse=True)
def quick_runs(request):
    """Half of the time of a run of two steps goes into its picture and into git. Runs of this process, and of
    ranks that it forks, draw no loss.png and read the code once for all. A test of either asks for the
    fixture `whole_runs`; programs that a test starts leave nothing out.
    """
    train = sys.modules.get("train")
    if train is None or "whole_runs" in request.fixturenames:
        yield
        return
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("runtime.closing.loss_png", lambda *_: None)
        patch.setattr("runtime.setup.read_code", code_of_this_process)
        yield


@functools.cache
def code_of_this_process():
    return provenance.read_code()


@pytest.fixture
def whole_runs():
    """See quick_runs."""


def reset_process() -> None:
    if torch.get_deterministic_debug_mode() != DETERMINISM:
        torch.set_deterministic_debug_mode(DETERMINISM)
    if torch.get_num_threads() != 1:
        torch.set_num_threads(1)


@pytest.fixture
def real_starts(monkeypatch):
    """Programs that the test starts are processes of their own, not forks of the zygote (tests/zygote.py)."""
    monkeypatch.setattr(zygote.ForkingPopen, "is_on", False)
