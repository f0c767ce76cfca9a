"""What `scripts.plan --tokens` says of a whole run: its numbers, and the lines that show them.

Each number that is assumed stands in the line that follows from it. Beside a number that follows from the
step's time stands its range, where published runs say one of the step's (plan/efficiency.py).
"""

import argparse
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import NamedTuple

from config import Config, ConfigError, ParallelConfig
from plan.cost import Cluster
from plan.count import parameters
from plan.efficiency import CLASSES, class_of
from plan.job import job_of_rank
from plan.memory import kept_bytes
from plan.whole_run import (
    GPU_HOURS_BETWEEN_FAILURES,
    HOUR,
    Reliability,
    WholeRun,
    batch_costs,
    whole_run,
)

HOST_COPY = 20e9  # bytes/s from a GPU into the memory of its host, while all GPUs of a node copy
STORAGE_OF_NODE = 2e9  # bytes/s into shared storage, where --storage does not say it
BATCH_TOO_LARGE = 2.0  # times the noise scale, from where more tokens buy few steps


@dataclass(frozen=True)
class LossLaw:
    """loss(parameters, tokens) -> nats a token, and the ends of its interval of 95 %. largest_size,
    most_tokens: of the runs that it was fitted to."""

    loss: Callable[[float, float], tuple[float, float, float]]
    largest_size: float
    most_tokens: float


def add_arguments(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("the whole run of the best layout")
    add = group.add_argument
    add("--tokens", type=float, metavar="N", help="of the run, as 1.5e12")
    add("--price", type=float, metavar="USD", help="of a GPU-hour")
    add("--pue", type=float, default=1.1, help="watts of the building for each watt of its GPUs")
    add(
        "--mtbf",
        type=float,
        metavar="H",
        default=round(GPU_HOURS_BETWEEN_FAILURES, -2),
        help="GPU-hours between two failures; by default those of Llama 3 (arXiv 2407.21783)",
    )
    add("--restart", type=float, metavar="S", default=600.0, help="seconds until training goes on again")
    add("--storage", type=float, metavar="GB/S", help="that all ranks write together (2 a node)")
    add("--law", metavar="CSV", help="finished runs, for the loss: a table that scripts.scaling fit takes")
    add("--noise-scale", type=float, metavar="N", help="tokens that log.noise_scale has measured")


@dataclass(frozen=True)
class RunQuestion:
    """What is asked of a run. price: dollars of a GPU-hour; law, noise_scale: None where not given."""

    tokens: float
    price: float | None
    pue: float
    reliability: Reliability
    law: LossLaw | None
    noise_scale: float | None


def check_asked(args: argparse.Namespace) -> None:
    """Raises ConfigError if something is given of a run that is not asked for."""
    given = [name for name in ("price", "storage", "law", "noise_scale") if getattr(args, name) is not None]
    if args.tokens is None and given:
        raise ConfigError(f"--{given[0].replace('_', '-')}: is of a whole run; give its --tokens, as 1.5e12")
    if args.tokens is not None and (args.gpus is None or len(set(args.gpus)) > 1):
        raise ConfigError("--tokens: is of a run on one number of GPUs, as --gpus 64")


def question_of(
    args: argparse.Namespace, cfg: Config, gpus: int, hardware: Cluster, law: LossLaw | None
) -> RunQuestion:
    """Raises ConfigError for a number that means nothing."""
    for name in ("tokens", "price", "pue", "mtbf", "storage", "noise_scale"):
        value = getattr(args, name)
        if value is not None and not value > 0:
            raise ConfigError(f"--{name.replace('_', '-')}: {value:g} must be above 0")
    if args.restart < 0:
        raise ConfigError(f"--restart: {args.restart:g} must not be below 0")
    nbytes = checkpoint_bytes(cfg)
    nodes = -(-gpus // hardware.node)
    rate = args.storage * 1e9 if args.storage else nodes * STORAGE_OF_NODE
    writing = nbytes / rate
    blocking = nbytes / gpus / HOST_COPY if cfg.checkpoint.async_save else writing
    reliability = Reliability(args.mtbf, restart=args.restart, blocking=blocking, writing=writing)
    return RunQuestion(args.tokens, args.price, args.pue, reliability, law, args.noise_scale)


def checkpoint_bytes(cfg: Config) -> int:
    """Of all ranks together, as one process would hold them."""
    one_process = replace(cfg, parallel=ParallelConfig(), train=replace(cfg.train, phases=None))
    return kept_bytes(job_of_rank(one_process, 1, rank=0, advise=False))


class RunForecast(NamedTuple):
    """likely: the run with the step as forecast. ends: those with the shortest and the longest step that 80 %
    of published runs on such chips let expect; None where none are judged."""

    likely: WholeRun
    ends: tuple[WholeRun, WholeRun] | None


def run_of(question: RunQuestion, cfg: Config, step: float, gpus: int, hardware: Cluster) -> RunForecast:
    """step: seconds. Each of its runs saves where it loses least."""

    def run(step: float) -> WholeRun:
        tokens_of_step = cfg.train.global_batch * cfg.train.seq_len
        return whole_run(question.tokens, tokens_of_step, step, gpus, question.reliability)

    fitted = CLASSES.get(class_of(hardware.gpu))
    if fitted is None:
        return RunForecast(run(step), None)
    low, high = fitted.range
    return RunForecast(run(step), (run(low * step), run(high * step)))


def costs_of(run: WholeRun, question: RunQuestion, hardware: Cluster) -> dict[str, float | None]:
    """What follows from the step's time; None: what it is counted by is not known."""
    return {
        "days": run.days,
        "gpu_hours": run.gpu_hours,
        "failures": run.failures,
        "mwh": run.megawatt_hours(hardware.watts, question.pue) if hardware.watts else None,
        "dollars": run.gpu_hours * question.price if question.price else None,
    }


def numbers_of(forecast: RunForecast, question: RunQuestion, cfg: Config, hardware: Cluster) -> dict:
    """For --json. X_interval: (least, most) of X by the range of the step."""
    run = forecast.likely
    numbers: dict = {
        "tokens": question.tokens,
        "steps": run.steps,
        "ettr": run.ettr,
        "checkpoint_every": run.every,
        "checkpoint_bytes": checkpoint_bytes(cfg),
    }
    numbers |= costs_of(run, question, hardware)
    if forecast.ends is not None:
        least, most = (costs_of(end, question, hardware) for end in forecast.ends)
        intervals = {f"{name}_interval": (least[name], most[name]) for name in least}
        numbers |= {name: ends for name, ends in intervals.items() if None not in ends}
    if question.law:
        loss, low, high = question.law.loss(parameters(cfg.model)["total"], question.tokens)
        numbers |= {"loss": loss, "loss_interval": (low, high)}
    if question.noise_scale:
        steps, tokens = batch_costs(cfg.train.global_batch * cfg.train.seq_len, question.noise_scale)
        numbers |= {"times_fewest_steps": steps, "times_fewest_tokens": tokens}
    return numbers


def lines_of(
    forecast: RunForecast, question: RunQuestion, cfg: Config, hardware: Cluster
) -> dict[str, str]:
    """The run in words: {what: a line of it}."""
    run = forecast.likely
    told = numbers_of(forecast, question, cfg, hardware)
    reliability = question.reliability
    mean = reliability.between_failures(run.gpus) / HOUR
    how = "in the background" if cfg.checkpoint.async_save else "while training waits"
    lines = {
        "run": f"{question.tokens / 1e9:,.4g}B tokens · {run.steps:,} steps"
        f" · {ranged(told, 'days', ',.1f', ' days')} · {ranged(told, 'gpu_hours', ',.0f', ' GPU-hours')}",
        "failures": f"{ranged(told, 'failures', ',.1f', ' expected')}, one in {mean:,.1f} hours (a GPU: one in"
        f" {reliability.gpu_hours:,.0f}) · {reliability.restart:,.0f} s to be back · ETTR {run.ettr:.1%}",
        "saves": f"--checkpoint.every {run.every} loses least: {told['checkpoint_bytes'] / 1e9:,.0f} GB,"
        f" written in {reliability.writing:,.0f} s {how}",
    }

    # what is known only if it is given
    costs: list[str] = []
    if question.price:
        costs.append(f"${ranged(told, 'dollars', ',.0f')} at ${question.price:g} a GPU-hour")
    if hardware.watts:
        costs.append(f"{ranged(told, 'mwh', ',.0f', ' MWh')} of GPUs at {hardware.watts:g} W, PUE {question.pue:g}")
    if costs:
        lines["costs"] = " · ".join(costs)
    if question.law:
        lines["loss"] = loss_line(told, question, cfg)
    if question.noise_scale:
        batch = cfg.train.global_batch * cfg.train.seq_len
        lines["batch"] = (
            f"{batch / question.noise_scale:.2g} of the noise scale:"
            f" {told['times_fewest_tokens']:.3g} times the fewest tokens,"
            f" {told['times_fewest_steps']:.3g} times the fewest steps; {advice(batch, question.noise_scale)}"
        )
    return lines


def ranged(told: dict, name: str, spec: str, unit: str = "") -> str:
    """A number of the report and its range: 12.3 days (11.4 to 14.9). spec: of format."""
    text = f"{told[name]:{spec}}{unit}"
    if f"{name}_interval" not in told:
        return text
    least, most = told[f"{name}_interval"]
    return f"{text} ({least:{spec}} to {most:{spec}})"


def loss_line(told: dict, question: RunQuestion, cfg: Config) -> str:
    """The loss, and how far the law is stretched."""
    assert question.law is not None
    low, high = told["loss_interval"]
    times_size = parameters(cfg.model)["total"] / question.law.largest_size
    times_tokens = question.tokens / question.law.most_tokens
    return (
        f"{told['loss']:.3f} ({low:.3f} to {high:.3f}, 95 %) by the law of --law; this run has"
        f" {ratio(times_size)} times the parameters and {ratio(times_tokens)} times the tokens of its largest"
    )


def ratio(x: float) -> str:
    return f"{x:,.0f}" if x >= 10 else f"{x:.2g}"


def advice(batch: float, noise_scale: float) -> str:
    """What a batch of so many tokens buys (arXiv 1812.06162)."""
    if batch > BATCH_TOO_LARGE * noise_scale:
        return "a smaller one takes fewer tokens to the same loss"
    if batch < noise_scale / BATCH_TOO_LARGE:
        return "a larger one takes fewer steps, for few tokens more"
    return "near the balance of both"
