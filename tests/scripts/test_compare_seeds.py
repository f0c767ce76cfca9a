"""Means over seeds: the statistics against numbers by hand, which runs are one group, and what is shown."""
import csv
import json
import math
import shutil
import subprocess

import pytest
from scipy import stats
from test_compare import BROWSER, make_run, page_parts

from runtime.failure import fail_cleanly
from scripts.compare import __main__ as command
from scripts.compare.groups import difference_rows, group_rows, notes, study_seeds
from scripts.compare.runs import draw_runs, page, read_run
from scripts.compare.seeds import mean_of_seeds, quantile, seed_difference


@pytest.mark.parametrize("freedom, t", [
    (1, 12.706), (2, 4.303), (3, 3.182), (4, 2.776), (9, 2.262), (30, 2.042), (120, 1.980),
])
def test_quantiles_are_those_of_the_table(freedom, t):
    """Two-sided 95 % (any table of Student's t)."""
    assert quantile(freedom) == pytest.approx(t, abs=6e-4)


def test_a_mean_has_the_interval_computed_by_hand():
    found = mean_of_seeds([2.0, 4.0, 6.0])
    assert (found.number, found.mean, found.deviation) == (3, 4.0, 2.0)  # (4 + 0 + 4) / (3 - 1) = 4
    assert found.half == pytest.approx(4.3027 * 2 / math.sqrt(3), rel=1e-4)
    two = mean_of_seeds([1.0, 3.0])
    assert two.half == pytest.approx(12.7062 * math.sqrt(2) / math.sqrt(2), rel=1e-4)
    one = mean_of_seeds([5.0])
    assert one.mean == 5.0 and math.isnan(one.half) and math.isnan(one.deviation)


def test_a_difference_has_welchs_interval():
    """Against the formula by hand, and scipy's own test."""
    one, other = [2.0, 4.0, 6.0], [9.0, 10.0, 11.0, 14.0]
    found = seed_difference(one, other)
    # variances 4 and 14/3; squared errors 4/3 and 7/6; freedom (5/2)^2 / ((4/3)^2/2 + (7/6)^2/3)
    assert found.mean == -7.0
    freedom = 6.25 / (16 / 18 + 49 / 108)
    assert found.half == pytest.approx(stats.t.ppf(0.975, freedom) * math.sqrt(2.5), rel=1e-9)
    theirs = stats.ttest_ind(one, other, equal_var=False).confidence_interval(0.95)
    assert (found.mean - found.half, found.mean + found.half) == pytest.approx((theirs.low, theirs.high))
    assert found.is_beyond_noise is True and seed_difference(one, [3.0, 6.0]).is_beyond_noise is False
    assert seed_difference(one, [9.0]).is_beyond_noise is None
    assert seed_difference([1.0, 1.0], [2.0, 2.0]).is_beyond_noise is True  # no noise at all


def make_grid(folder, seeds_of_rate, steps=3):
    """{learning rate: {seed: its last loss}} -> run folders; the validation loss is half a nat more."""
    return [
        make_run(folder / f"lr{rate}-s{seed}", [6.0] * (steps - 1) + [loss], optim__lr=rate, train__seed=seed)
        for rate, losses in seeds_of_rate.items() for seed, loss in losses.items()
    ]


GRID = {1e-3: {1: 2.0, 2: 4.0, 3: 6.0}, 2e-3: {1: 9.0, 2: 10.0, 3: 11.0, 4: 14.0}, 4e-3: {1: 5.0}}


def read_all(folders):
    return [read_run(folder) for folder in folders]


def test_runs_that_differ_in_the_seed_are_one(tmp_path):
    study = study_seeds(read_all(make_grid(tmp_path, GRID)))
    assert [len(group.runs) for group in study.groups] == [3, 4, 1] and not study.left_out
    first, second, third = group_rows(study)
    assert (first["setting"], first["seeds"]) == ("optim.lr=0.001", "3")
    assert (first["val loss"], first["val sd"], first["train loss"]) == ("4.5000", "2.0000", "4.0000")
    assert first["val 95 %"] == "-0.4683 to 9.4683"  # 4.5 and 4.3027 * 2 / sqrt(3) on each side
    assert third["val 95 %"] == "1 seed: none" and third["val sd"] == "n/a"
    above = {row["above optim.lr=0.001"]: row for row in difference_rows(study)}
    assert above["optim.lr=0.002"]["val loss"] == "+7.0000"
    assert above["optim.lr=0.002"]["more than noise"] == "yes"
    assert above["optim.lr=0.004"]["more than noise"] == "1 seed: unknown"


def test_what_the_command_shows(tmp_path, capsys, monkeypatch):
    """A table, a CSV and JSON with the same numbers; two seeds say how wide their interval is."""
    monkeypatch.setenv("COLUMNS", "200")
    two_of_each = {1e-3: {1: 1.0, 2: 3.0}, 2e-3: {1: 1.0, 2: 3.5}}
    folders = [str(folder) for folder in make_grid(tmp_path, two_of_each)]
    table = tmp_path / "out" / "means.csv"
    assert command.main([*folders, "--csv", str(table)]) == 0
    out = capsys.readouterr().out
    assert "2 seeds: the interval reaches 12.7 standard errors to each side; with 3 seeds 4.3, " in out
    assert "above optim.lr=0.001" in out and "95 % intervals of the mean by Student's t" in out

    assert command.main([*folders, "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    one, other = found["groups"]
    assert one["settings"] == {"optim.lr": 0.001} and one["seeds"] == [1, 2]
    assert one["runs"] == ["lr0.001-s1", "lr0.001-s2"]
    assert one["val_loss"]["mean"] == 2.5 and one["val_loss"]["sd"] == pytest.approx(math.sqrt(2))
    assert one["val_loss"]["high"] - 2.5 == pytest.approx(12.7062, abs=1e-3)
    (pair,) = found["pairs"]
    assert pair["val_loss"]["difference"] == -0.25 and pair["val_loss"]["more_than_noise"] is False

    rows = list(csv.DictReader(table.read_text().splitlines()))
    assert [row["optim.lr"] for row in rows] == ["0.001", "0.002"]
    for row, group in zip(rows, (one, other)):
        assert row["seeds"] == "2" and float(row["val_low"]) == group["val_loss"]["low"]
        assert float(row["train_tokens"]) == group["train_loss"]["tokens"] == 300


def test_a_single_seed_each_shows_no_means(tmp_path, capsys):
    folders = make_grid(tmp_path, {1e-3: {1: 1.0}, 2e-3: {1: 1.0}})
    assert command.main([str(folder) for folder in folders]) == 0
    assert "Student" not in capsys.readouterr().out
    assert "Means over seeds" not in page(read_all(folders))


def test_what_is_not_a_draw_of_the_same_does_not_count(tmp_path):
    """A run that failed or trains still, and one whose seed is there twice. Other code is another group."""
    make_grid(tmp_path, {1e-3: {1: 1.0, 2: 3.0}})
    keys = {"optim__lr": 1e-3}
    make_run(tmp_path / "again", [6.0, 6.0, 1.0], train__seed=1, **keys)
    make_run(tmp_path / "early", [6.0], train__seed=3, finished=None, **keys)
    make_run(tmp_path / "nan", [6.0, 6.0, None], train__seed=4, finished=False, **keys)
    make_run(tmp_path / "other", [6.0, 6.0, 2.0], train__seed=5, **keys, optim__beta2=0.9)
    study = study_seeds(read_all(sorted(tmp_path.iterdir(), key=lambda folder: folder.name != "lr0.001-s1")))
    sizes = {group.name: len(group.runs) for group in study.groups}
    assert sizes == {"optim.beta2=0.95": 2, "optim.beta2=0.9": 1}
    told = [line for line in notes(study) if line.startswith("not in the means")]
    assert [line.removeprefix("not in the means: ") for line in told] == [
        "nan: its loss is not finite", "early: not finished",
        "again: has the seed and the settings of lr0.001-s1, and counts once",
    ]
    assert study.places["val"] == 300


def test_runs_that_train_still_are_compared_where_all_have_been(tmp_path):
    for seed, losses in ((1, [5.0, 4.0, 3.0]), (2, [5.0, 2.0])):
        make_run(tmp_path / f"s{seed}", losses, train__seed=seed, finished=None)
    study = study_seeds(read_all(sorted(tmp_path.iterdir())))
    assert study.places == {"train": 200}  # their validations are at 300 and at 200 tokens
    assert study.groups[0].losses["train"] == [4.0, 2.0] and study.groups[0].name == "the same settings"


BROKEN = {
    "config.yaml": "model: [",
    "metrics.jsonl": '{"step": 1, "loss": "high", "tokens": []}\n',
    "summary.json": '{"tokens": 300, "step": 3}',
}


@pytest.mark.parametrize("file", BROKEN)
def test_a_run_that_cannot_be_read_is_named(tmp_path, capsys, file):
    folders = make_grid(tmp_path, {1e-3: {1: 1.0, 2: 3.0, 3: 2.0}})
    (folders[1] / file).write_text(BROKEN[file])
    assert fail_cleanly(command.main, [*map(str, folders), "--json"]) == 0
    out, err = capsys.readouterr()
    assert [row["run"] for row in json.loads(out)["numbers"]] == ["lr0.001-s1", "lr0.001-s3"]
    (line,) = err.splitlines()
    assert line.startswith(f"left out: {folders[1]}: ")


def test_the_pictures_have_a_mean_and_a_band(tmp_path, monkeypatch):
    from matplotlib.axes import Axes

    runs = read_all(make_grid(tmp_path, GRID))
    drawn = []
    monkeypatch.setattr(Axes, "fill_between", lambda axes, x, low, high, **look: drawn.append((low, high)))
    assert draw_runs(runs, study_seeds(runs)) and len(drawn) == 2
    (low, high), _ = drawn
    half = 4.3027 * 2 / math.sqrt(3)
    assert (low[-1], high[-1]) == pytest.approx((4 - half, 4 + half), rel=1e-4)

    text = page(runs)
    assert "<h2>Means over seeds</h2>" in text and "1 seed: none" in text
    data, _ = page_parts(text)
    mean = data["runs"][0]
    assert mean["name"] == "optim.lr=0.001: mean of 3 seeds" and mean["loss"] == [6.0, 6.0, 4.0]
    assert mean["low"][-1] == pytest.approx(4 - half, rel=1e-4) and mean["validation"]["loss"] == [4.5]
    assert data["hidden"] == [run.name for run in runs[:7]]  # not the one without a mean
    assert [run["name"] for run in data["runs"]][-1] == "lr0.004-s1"


SEEN = """
const look = () => ({bands: all(places.chart, "polygon").map(one => one.attributes.points),
  curves: all(places.chart, "path").length, reading: places.chart.children[3].textContent});
const seen = [look()];
all(places.chart, "button")[0].onclick();  // the first mean
all(places.chart, "button")[2].onclick();  // a run of it
seen.push(look());
console.log(JSON.stringify(seen));
"""


@pytest.mark.skipif(shutil.which("node") is None, reason="no Node.js, which runs the page's script")
def test_the_page_draws_means_and_hides_their_runs(tmp_path):
    data, script = page_parts(page(read_all(make_grid(tmp_path, GRID))))
    ran = subprocess.run(["node", "-e", BROWSER + script + SEEN, json.dumps(data)], capture_output=True,
                         text=True, timeout=60)
    assert ran.returncode == 0, ran.stderr
    first, then = json.loads(ran.stdout)
    assert first["curves"] == 3 and len(first["bands"]) == 2
    assert all(len(points.split()) == 6 for points in first["bands"])  # three points, there and back
    assert first["reading"] == ("at the end: optim.lr=0.001: mean of 3 seeds 4.0000 · lr0.004-s1 5.0000 · "
                                "optim.lr=0.002: mean of 4 seeds 11.0000")
    assert then["curves"] == 3 and len(then["bands"]) == 1 and "lr0.001-s1 2.0000" in then["reading"]
