"""Choose the number of GPUs for a run within days or dollars, and explain the choice (`scripts.plan`)."""

from collections.abc import Callable, Sequence
from typing import NamedTuple

from config import Config, ConfigError
from plan.auto import gpu_count
from plan.cost import Cluster
from plan.count import flops_per_token
from plan.near_ties import near_groups
from plan.run_limits import PricedRun, fewest_gpus, least_gpu_hours, soonest_gpus
from plan.run_report import RunQuestion, forecast_run
from plan.search import SearchResult


class GpuChoice(NamedTuple):
    """The chosen number of GPUs, the reason, and for --json all numbers that were priced."""

    gpus: int
    text: str
    priced: list[dict]


def choose_gpus(
    numbers: Sequence[int],
    search_on: Callable[[int], SearchResult],
    *,
    question: RunQuestion,
    cfg: Config,
    hardware: Cluster,
    say: Callable[[str], None],
) -> GpuChoice:
    """Choose the number of GPUs by the limit of a run: the fewest within its days, the soonest end within its
    budget.

    `numbers` are the candidates, ascending. `search_on` caches the search for layouts on some GPUs. `say`
    receives a line for each priced number. Raises ConfigError if none is within the limit.
    """
    assert question.tokens is not None
    priced: dict[int, PricedRun] = {}

    def price_run(gpus: int) -> PricedRun:
        if gpus not in priced:
            priced[gpus] = run_on(gpus, search_on(gpus), question, hardware)
            say(f"priced   {priced_text(priced[gpus], question)}")
        return priced[gpus]

    # numbers that even the peak rate rules out
    flops = question.tokens * flops_per_token(cfg.model, cfg.train.seq_len, groups=cfg.optim.groups)
    at_peak = least_gpu_hours(flops, hardware.flops[cfg.train.dtype])
    possible = [number for number in numbers if at_peak <= question.gpu_hours(number)]

    # price actual layouts
    chosen = None
    if possible and question.days is not None:
        chosen = fewest_gpus(possible, price_run, question.days)
    elif possible:
        chosen = soonest_gpus(possible, price_run, question.gpu_hours(1))
    runs = [priced[number] for number in sorted(priced)]
    if chosen is None:
        raise ConfigError(none_text(question, runs, numbers[-1], at_peak))

    # compare with the next one, which is not within the limit, or no sooner
    index = numbers.index(chosen.gpus) + (-1 if question.days is not None else 1)
    beside = priced.get(numbers[index]) if 0 <= index < len(numbers) else None
    text = f"{gpu_count(chosen.gpus)}, {why_text(question)} by the forecast"
    if beside is not None:
        text += f" ({priced_text(beside, question)})"
    return GpuChoice(chosen.gpus, text, [get_numbers(each, question) for each in runs])


def run_on(gpus: int, result: SearchResult, question: RunQuestion, hardware: Cluster) -> PricedRun:
    """Return the run with the best layout found on these GPUs."""
    if not result.found:
        is_too_large = result.counts["too large"] > 0
        return PricedRun(gpus, None, result.smallest / hardware.memory if is_too_large else 1.0)
    best = near_groups(result.found)[0][0]
    forecast = forecast_run(question, best.cfg, best.forecast.step, gpus, step_range=None)
    return PricedRun(gpus, forecast.likely)


# ---- in words ----------------------------------------------------------------------------------------------


def why_text(question: RunQuestion) -> str:
    if question.days is not None:
        return f"the fewest within {question.limit}"
    return f"the soonest within {question.limit}"


def priced_text(priced: PricedRun, question: RunQuestion) -> str:
    """Format as 48 GPUs: 36.1 days, $91,234."""
    if priced.run is None:
        return f"{gpu_count(priced.gpus)}: no layout fits"
    dollars = f", ${priced.gpu_hours * question.price:,.0f}" if question.price else ""
    return f"{gpu_count(priced.gpus)}: {priced.days:,.1f} days{dollars}"


def get_numbers(priced: PricedRun, question: RunQuestion) -> dict:
    """Return the numbers for --json, without days if no layout fits."""
    if priced.run is None:
        return {"gpus": priced.gpus}
    numbers = {"gpus": priced.gpus, "days": priced.days, "gpu_hours": priced.gpu_hours}
    if question.price:
        numbers["dollars"] = priced.gpu_hours * question.price
    return numbers


def none_text(question: RunQuestion, runs: Sequence[PricedRun], most: int, at_peak: float) -> str:
    """Say that no number of GPUs is within the limit, and what comes closest. `at_peak` is GPU-hours."""
    option, way = "--days", "raise --days or --most-gpus"
    if question.days is None:
        option, way = "--budget", "raise --budget"
    start = f"{option}: no number of GPUs up to {most:,} keeps this run within {question.limit}"
    with_layout = [run for run in runs if run.run is not None]
    if with_layout:
        nearest = min(with_layout, key=lambda run: run.days if question.days is not None else run.gpu_hours)
        return f"{start} (the nearest is {priced_text(nearest, question)}); {way}"
    if runs:
        tried = ", ".join(f"{run.gpus:,}" for run in runs)
        return f"{start}: no layout fits on {tried}; --gpus {runs[-1].gpus} says why"
    return f"{start}: it takes {at_peak:,.0f} GPU-hours at the peak of the chip, and more as it is; {way}"
