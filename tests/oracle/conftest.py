"""One corpus for all runs, and the table that they end in."""

import ours
import pytest

COLUMNS = ("loss", "norm", "rate", "valid", "router", "noise", "weights", "moments")
ROW = "largest relative errors"


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
def note(record_property):
    """note(row): holds the row to the bound and keeps it, in the test's report, for the table."""
    from compare import BOUND

    def keep(row) -> None:
        record_property(ROW, (row.name, row.errors))
        wrong = {what: error for what, error in row.errors.items() if not error <= BOUND}
        assert not wrong, f"{row.name} is another training than the reference: {wrong}"

    return keep


def pytest_terminal_summary(terminalreporter):
    """The largest relative errors of every run."""
    reports = [r for outcome in ("passed", "failed") for r in terminalreporter.getreports(outcome)]
    rows = dict(value for report in reports for key, value in report.user_properties if key == ROW)
    if not rows:
        return
    wide = max(map(len, rows))
    terminalreporter.write_line("\nlargest relative errors of 20 steps of train.main beside the reference")
    terminalreporter.write_line(f"{'':{wide}}  " + "  ".join(f"{c:>7}" for c in COLUMNS))
    for name, errors in rows.items():
        cells = "  ".join(f"{errors[c]:7.0e}" if c in errors else f"{'-':>7}" for c in COLUMNS)
        terminalreporter.write_line(f"{name:{wide}}  {cells}")
