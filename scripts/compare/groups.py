"""Runs that differ in nothing but the seed are one group: its mean losses, and differences between groups.

Losses are compared at equal tokens: the training loss where the shortest run is, the validation loss at the
last validation that all have. Once a run is finished, only finished runs count, so that one that failed early
does not move the place of all.
"""
import csv
import io
import itertools
import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from config.numbers import short_number
from config.terminal import table_lines
from plan.points import Array
from scripts.compare.seeds import (
    SeedMean,
    mean_curve,
    mean_of_seeds,
    quantile,
    seed_difference,
)

if TYPE_CHECKING:
    from scripts.compare.runs import Run

SEED = "train.seed"
SAME_TOKENS = 0.01  # relative: validations of other batch sizes are near each other, not at the same token
LOSSES = {"val": "val loss", "train": "train loss"}
FIRST_TO_GO = ("train sd", "train 95 %", "train loss", "val sd")  # columns, in a narrow terminal
WHOLE = "the same settings"  # the name of an only group


@dataclass(frozen=True)
class SeedGroup:
    """Runs that differ in their seeds alone. settings: {what differs between groups: its value here}.

    losses: {one of LOSSES: [the loss of each run]}, without losses that are not known at the place.
    """
    name: str
    settings: dict[str, Any]
    runs: tuple["Run", ...]
    losses: dict[str, list[float]]

    def mean(self, loss: str) -> SeedMean | None:
        """Return the mean of a loss, or None if a run has none there, or one that is not finite."""
        values = self.losses.get(loss, [])
        return mean_of_seeds(values) if values and np.isfinite(values).all() else None


@dataclass(frozen=True)
class SeedStudy:
    """places: {one of LOSSES: the tokens at which it is compared}. left_out: a line for each run that is in
    no group."""
    groups: tuple[SeedGroup, ...]
    places: dict[str, float]
    left_out: tuple[str, ...]

    @property
    def has_repeats(self) -> bool:
        return any(len(group.runs) > 1 for group in self.groups)

    def lowest(self, loss: str) -> SeedGroup | None:
        """Return the group with the lowest mean."""
        means = [(group.mean(loss), group) for group in self.groups]
        known = [(mean.mean, group) for mean, group in means if mean is not None]
        return min(known, key=lambda each: each[0])[1] if known else None


# ---- which runs are one ------------------------------------------------------------------------------------


def study_seeds(runs: list["Run"]) -> SeedStudy:
    """Group the runs by everything but the seed: settings, code and data."""
    counted, left_out = choose_counted(runs)
    places: dict[str, float] = {}
    losses: dict[str, dict[str, float]] = {}
    if counted:
        places["train"] = min(float(run.tokens[-1]) for run in counted)
        losses["train"] = {run.name: run.loss_at(places["train"]) for run in counted}
        validated = common_validation(counted)
        if validated is not None:
            places["val"], losses["val"] = validated

    members: dict[str, list["Run"]] = {}
    know_origins = all(run.origins for run in counted)  # else no difference of theirs is known
    for run in counted:
        same = members.setdefault(identity(run, know_origins), [])
        twin = next((other for other in same if other.settings[SEED] == run.settings[SEED]), None)
        if twin is None:
            same.append(run)
        else:
            left_out.append(f"{run.name}: has the seed and the settings of {twin.name}, and counts once")
    differing = differing_settings([each[0] for each in members.values()], know_origins)
    groups: list[SeedGroup] = []
    for each in members.values():
        settings = {key: values[each[0].name] for key, values in differing.items()}
        groups.append(SeedGroup(
            name=", ".join(f"{key}={value}" for key, value in settings.items()) or WHOLE,
            settings=settings,
            runs=tuple(each),
            losses={loss: [of_run[run.name] for run in each] for loss, of_run in losses.items()},
        ))
    return SeedStudy(tuple(groups), places, tuple(left_out))


def choose_counted(runs: list["Run"]) -> tuple[list["Run"], list[str]]:
    """Return the runs whose losses count, and why each other one does not."""
    left_out = [f"{run.name}: its loss is not finite" for run in runs if run.has_diverged]
    sound = [run for run in runs if not run.has_diverged]
    finished = [run for run in sound if run.finished]
    if finished:
        left_out += [f"{run.name}: not finished" for run in sound if not run.finished]
    return finished or sound, left_out


def identity(run: "Run", know_origins: bool) -> str:
    """Return what runs of one group have in common, as a text."""
    settings = sorted((key, repr(value)) for key, value in run.settings.items() if key != SEED)
    origins = sorted((name, repr(which)) for name, (which, _) in run.origins.items())
    return repr((settings, origins if know_origins else []))


def differing_settings(runs: list["Run"], know_origins: bool) -> dict[str, dict[str, Any]]:
    """Return {code, data or setting: {run: its value}} for what differs, besides the seed."""
    described: dict[str, dict[str, Any]] = {}
    for run in runs:
        origins = {name: text for name, (_, text) in run.origins.items()} if know_origins else {}
        described[run.name] = {**origins, **run.settings}
    keys = dict.fromkeys(key for each in described.values() for key in each if key != SEED)
    values = {key: {name: each.get(key) for name, each in described.items()} for key in keys}
    return {key: of_run for key, of_run in values.items() if len(set(map(repr, of_run.values()))) > 1}


def common_validation(runs: list["Run"]) -> tuple[float, dict[str, float]] | None:
    """Return (tokens, {run: loss}) of the last validation that all have, None if there is none."""
    if not all(len(run.validation_tokens) for run in runs):
        return None
    place = min(float(run.validation_tokens[-1]) for run in runs)
    losses: dict[str, float] = {}
    for run in runs:
        nearest = int(np.abs(run.validation_tokens - place).argmin())
        if not math.isclose(run.validation_tokens[nearest], place, rel_tol=SAME_TOKENS):
            return None
        losses[run.name] = float(run.validation_loss[nearest])
    return place, losses


# ---- as text -----------------------------------------------------------------------------------------------


def group_rows(study: SeedStudy) -> list[dict[str, str]]:
    """Return a row for each group: {column: text}."""
    rows: list[dict[str, str]] = []
    for group in study.groups:
        row = {"setting": group.name, "seeds": str(len(group.runs))}
        for loss in shown_losses(study):
            mean = group.mean(loss)
            row[LOSSES[loss]] = "n/a" if mean is None else f"{mean.mean:.4f}"
            row[f"{loss} 95 %"] = interval_text(mean)
            row[f"{loss} sd"] = "n/a" if mean is None or mean.number == 1 else f"{mean.deviation:.4f}"
        rows.append(row)
    return rows


def shown_losses(study: SeedStudy) -> list[str]:
    return [loss for loss in LOSSES if loss in study.places]


def interval_text(mean: SeedMean | None) -> str:
    if mean is None:
        return "n/a"
    return "1 seed: none" if mean.number == 1 else span_text(mean.mean, mean.half)


def span_text(middle: float, half: float, sign: str = "") -> str:
    return f"{middle - half:{sign}.4f} to {middle + half:{sign}.4f}"


def difference_rows(study: SeedStudy) -> list[dict[str, str]]:
    """Return a row for each group against the one with the lowest loss: {column: text}."""
    rows: list[dict[str, str]] = []
    for loss in shown_losses(study)[:1]:
        lowest = study.lowest(loss)
        for group in study.groups:
            if lowest is None or group is lowest or group.mean(loss) is None:
                continue
            found = seed_difference(group.losses[loss], lowest.losses[loss])
            beyond = {True: "yes", False: "no", None: "1 seed: unknown"}[found.is_beyond_noise]
            has_interval = found.is_beyond_noise is not None
            rows.append({
                f"above {lowest.name}": group.name,
                LOSSES[loss]: f"{found.mean:+.4f}",
                "95 %": span_text(found.mean, found.half, "+") if has_interval else "none",
                "more than noise": beyond,
            })
    return rows


def notes(study: SeedStudy) -> list[str]:
    """Return the lines that say what the numbers are."""
    places = ", ".join(f"{LOSSES[loss]} at {short_number(study.places[loss])} tokens"
                       for loss in shown_losses(study))
    lines = [f"means over seeds: {places}; 95 % intervals of the mean by Student's t, of a "
             "difference by Welch's; sd: of one seed"]
    if any(len(group.runs) == 2 for group in study.groups):
        lines.append(f"2 seeds: the interval reaches {quantile(1):.1f} standard errors to each side; "
                     f"with 3 seeds {quantile(2):.1f}, with 5 {quantile(4):.1f}")
    if len(study.groups) > 2:
        lines.append("each difference is judged alone: about one in twenty passes for more than noise by "
                     "chance")
    return [*lines, *(f"not in the means: {line}" for line in study.left_out)]


def text_lines(study: SeedStudy, width: int | None) -> list[str]:
    """Return the tables of groups and of differences."""
    lines: list[str] = []
    for rows in (group_rows(study), difference_rows(study)):
        if rows:
            first = next(iter(rows[0]))
            lines += ["", *table_lines(rows, to_left=[first], first_to_go=FIRST_TO_GO, width=width,
                                       whole_in="--json")]
    return lines


# ---- for programs ------------------------------------------------------------------------------------------


def group_numbers(study: SeedStudy) -> dict[str, Any]:
    """Return the groups, every pair's difference, and what is left out, with null for missing values."""
    groups: list[dict[str, Any]] = []
    for group in study.groups:
        groups.append({
            "setting": group.name,
            "settings": group.settings,
            "runs": [run.name for run in group.runs],
            "seeds": [run.settings[SEED] for run in group.runs],
            **{f"{loss}_loss": mean_numbers(group.mean(loss), study.places.get(loss)) for loss in LOSSES},
        })
    pairs: list[dict[str, Any]] = []
    for one, other in itertools.combinations(study.groups, 2):
        pairs.append({
            "one": one.name,
            "other": other.name,
            **{f"{loss}_loss": pair_numbers(one, other, loss) for loss in LOSSES},
        })
    return {"groups": groups, "pairs": pairs, "not_in_the_means": list(study.left_out)}


def mean_numbers(mean: SeedMean | None, tokens: float | None) -> dict[str, float | None] | None:
    """Return a mean and its interval; a single seed has none."""
    if mean is None:
        return None
    has_interval = mean.number > 1
    return {
        "tokens": tokens,
        "mean": mean.mean,
        "sd": mean.deviation if has_interval else None,
        "low": mean.mean - mean.half if has_interval else None,
        "high": mean.mean + mean.half if has_interval else None,
    }


def pair_numbers(one: SeedGroup, other: SeedGroup, loss: str) -> dict[str, Any] | None:
    """Return the difference of a loss, one less other."""
    if one.mean(loss) is None or other.mean(loss) is None:
        return None
    found = seed_difference(one.losses[loss], other.losses[loss])
    has_interval = found.is_beyond_noise is not None
    return {
        "difference": found.mean,
        "low": found.mean - found.half if has_interval else None,
        "high": found.mean + found.half if has_interval else None,
        "more_than_noise": found.is_beyond_noise,
    }


def group_csv(study: SeedStudy) -> str:
    """Return a CSV with a row for each group; a missing number is empty."""
    columns = ("tokens", "mean", "sd", "low", "high")
    out = io.StringIO()
    writer = csv.writer(out, lineterminator="\n")
    keys = list(study.groups[0].settings) if study.groups else []
    measured = [f"{loss}_{column}" for loss in LOSSES for column in columns]
    writer.writerow(["setting", *keys, "seeds", *measured])
    for group in study.groups:
        numbers: list[Any] = []
        for loss in LOSSES:
            found = mean_numbers(group.mean(loss), study.places.get(loss)) or {}
            numbers += [found.get(column) for column in columns]
        writer.writerow([group.name, *group.settings.values(), len(group.runs), *numbers])
    return out.getvalue()


# ---- as a picture ------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class MeanCurve:
    """The mean loss of a group over the tokens that all of its runs have. x: {unit: [points]}.

    loss, half: [points], the mean and half the width of its interval. validation_x {unit: [n]} and
    validation_loss [n]: means of the validations that all of its runs have.
    """
    name: str
    x: dict[str, Array]
    loss: Array
    half: Array
    validation_x: dict[str, Array]
    validation_loss: Array


def mean_curve_of(group: SeedGroup, axes: dict[str, Callable[["Run"], Array]], most: int) -> MeanCurve:
    """Return the curve of a group with at most `most` points. axes: {unit: values [steps] of a run}."""
    first = group.runs[0]
    end = min(float(run.tokens[-1]) for run in group.runs)
    steps = int(np.searchsorted(first.tokens, end, side="right"))
    shown = np.unique(np.linspace(0, steps - 1, most).astype(int))
    tokens = first.tokens[shown]
    losses = [np.interp(tokens, run.tokens, run.smooth_loss, left=np.nan) for run in group.runs]
    loss, half = mean_curve(losses)
    number = min(len(run.validation_tokens) for run in group.runs)  # at the same steps, by the same settings
    at = first.validation_tokens[:number]
    return MeanCurve(
        name=f"{group.name}: mean of {len(group.runs)} seeds",
        x={unit: of_run(first)[shown] for unit, of_run in axes.items()},
        loss=loss,
        half=half,
        validation_x={unit: np.interp(at, first.tokens, of_run(first)) for unit, of_run in axes.items()},
        validation_loss=np.mean([run.validation_loss[:number] for run in group.runs], axis=0),
    )
