"""One corpus for all runs, and the table that they end in."""

import ours
import pytest

COLUMNS = ("loss", "norm", "rate", "valid", "router", "noise", "weights", "moments")


def pytest_configure(config):
    config.oracle_rows = []


@pytest.fixture(scope="session")
def place(tmp_path_factory):
    """(folder of the runs, their corpus)."""
    home = tmp_path_factory.mktemp("oracle")
    return home, ours.write_corpus(home)


@pytest.fixture
def place_without_ties(tmp_path):
    """As `place`, of a corpus in which no token follows itself: no two choices of an expert are equal."""
    return tmp_path, ours.write_corpus(tmp_path, repeats=False)


@pytest.fixture
def note(pytestconfig):
    """note(row): holds the row to the bound and keeps it for the table."""
    from compare import BOUND

    def keep(row) -> None:
        pytestconfig.oracle_rows.append(row)
        wrong = {what: error for what, error in row.errors.items() if not error <= BOUND}
        assert not wrong, f"{row.name} is another training than the reference: {wrong}"

    return keep


def pytest_terminal_summary(terminalreporter, config):
    """The largest relative errors of every run."""
    rows = config.oracle_rows
    if not rows:
        return
    wide = max(len(row.name) for row in rows)
    terminalreporter.write_line("\nlargest relative errors of 20 steps of train.main beside the reference")
    terminalreporter.write_line(f"{'':{wide}}  " + "  ".join(f"{c:>7}" for c in COLUMNS))
    for row in rows:
        cells = "  ".join(f"{row.errors[c]:7.0e}" if c in row.errors else f"{'-':>7}" for c in COLUMNS)
        terminalreporter.write_line(f"{row.name:{wide}}  {cells}")
