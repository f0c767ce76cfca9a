"""Scores of tasks: the sigmoid of the loss is found again where it is known, and foretells the next size."""
import dataclasses
import json

import numpy as np
import pytest
from test_laws import by_chinchilla, made_up

from config import ConfigError
from lab.scaling.command import main
from lab.scaling.ladder import LadderRun
from lab.scaling.ladder_command import forecast
from lab.scaling.report import score_line
from lab.scaling.scores import fit_scores, forecast_score, is_centered
from plan.laws import CHINCHILLA, fit_law
from plan.points import write_points

STEEPNESS, MIDDLE = 0.7, 6.0


def score_of(loss):
    return 1 / (1 + np.exp(STEEPNESS * (loss - MIDDLE)))


def with_scores(points, noise=0.0, seed=0, name="tasks/core"):
    scores = score_of(points.loss) + noise * np.random.default_rng(seed).standard_normal(len(points))
    return dataclasses.replace(points, scores={name: scores, "tasks/core/acc": scores})


def test_a_known_sigmoid_is_found_again():
    (law,) = fit_scores(with_scores(made_up(by_chinchilla)), bootstraps=5)
    assert law.name == "tasks/core", "an accuracy that is not centered has another lower end"
    assert law.theta == pytest.approx([STEEPNESS, MIDDLE], rel=1e-5)
    assert law.noise == pytest.approx(0, abs=1e-6) and law.follows_loss


def test_centered_scores_alone_have_a_law():
    names = ["tasks/core", "tasks/piqa/centered", "tasks/piqa/acc", "tasks/piqa/bpb", "val_loss"]
    assert [is_centered(name) for name in names] == [True, True, False, False, False]


@pytest.mark.slow
def test_the_interval_of_the_next_size_holds_its_scores():
    """In 10 ladders whose losses and scores are noisy."""
    found = []
    for seed in range(10):
        points = with_scores(made_up(by_chinchilla, noise=0.005, seed=seed), 0.01, seed)
        following = made_up(by_chinchilla, sizes=(3e8,), noise=0.005, seed=900 + seed)
        following = with_scores(following, 0.01, 900 + seed)
        fit = fit_law(CHINCHILLA, points, bootstraps=40, seed=0)
        (law,) = fit_scores(points, bootstraps=40)
        scores = following.scores["tasks/core"]
        for size, tokens, score in zip(following.parameters, following.tokens, scores):
            _, (low, high) = forecast_score(law, fit, size, tokens)
            found.append(low <= score <= high)
    print(f"{np.mean(found):.1%} of {len(found)}")
    assert 0.85 <= np.mean(found) <= 1


def test_scores_of_a_table_are_printed_and_drawn(tmp_path, capsys):
    table = tmp_path / "points.csv"
    write_points(with_scores(made_up(by_chinchilla, noise=0.003), 0.005), table)
    assert main(["fit", "--points", str(table), "--out", str(tmp_path), "--bootstraps", "5"]) == 0
    shown = capsys.readouterr().out
    assert "tasks/core = 1 / (1 + exp(steepness (loss - middle)))" in shown
    assert "do not show" not in shown
    numbers = json.loads((tmp_path / "fit.json").read_text())["scores"]["tasks/core"]["numbers"]
    assert numbers["middle"] == pytest.approx(MIDDLE, abs=0.1)
    assert (tmp_path / "scores.png").stat().st_size > 1000


@pytest.mark.parametrize("mean", [0.0, -0.1])
def test_scores_of_guessing_are_said_not_to_follow_the_loss(tmp_path, capsys, mean):
    """Those below 0 have their best sigmoid far from all losses."""
    points = made_up(by_chinchilla, noise=0.003)
    guesses = mean + 0.01 * np.random.default_rng(1).standard_normal(len(points))
    table = tmp_path / "points.csv"
    write_points(dataclasses.replace(points, scores={"tasks/core": guesses}), table)
    assert main(["fit", "--points", str(table), "--out", str(tmp_path), "--bootstraps", "20"]) == 0
    assert "these points do not show that it follows the loss" in capsys.readouterr().out


def test_a_forecast_is_a_line_below_that_of_the_loss():
    points = with_scores(made_up(by_chinchilla))
    fit, laws = fit_law(CHINCHILLA, points, bootstraps=2), fit_scores(points, bootstraps=2)
    run = LadderRun("d9-b1", 9, 0, 10, int(1e9), 6e17, int(1e8), int(9e7), None, 0, 8)
    score = score_of(by_chinchilla(1e8, 1e9))
    (told,) = forecast(run, fit, laws, measured_scores={"tasks/core": score + 0.02}).scores
    assert score_line(told) == (
        f"  tasks/core: predicted {score:.3f} (95 %: {score:.3f} to {score:.3f}), "
        f"measured {score + 0.02:.3f}, missed by +0.020"
    )


def test_a_score_that_is_not_finite_is_named(tmp_path):
    points = made_up(by_chinchilla)
    scores = np.where(np.arange(len(points)) == 3, np.nan, 0.1)
    write_points(dataclasses.replace(points, scores={"tasks/core": scores}), tmp_path / "points.csv")
    with pytest.raises(ConfigError, match=f"{points.runs[3]} has tasks/core nan; leave the run out"):
        main(["fit", "--points", str(tmp_path / "points.csv")])
