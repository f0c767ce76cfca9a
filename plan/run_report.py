"""The report of `scripts.plan --tokens` on a whole run: its numbers, and the lines that show them.

Every assumed number is shown on the line that depends on it. Numbers derived from the step time have a range,
if published runs provide one for the step (plan/efficiency.py).
"""

import argparse
import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import NamedTuple

from config import Config, ConfigError, ParallelConfig
from plan.cost import Cluster
from plan.count import parameters
from plan.efficiency import SHARED, StepRange
from plan.job import make_rank_job
from plan.memory import kept_bytes
from plan.run_limits import most_steps
from plan.whole_run import (
    DAY,
    GPU_HOURS_BETWEEN_FAILURES,
    HOUR,
    Reliability,
    WholeRun,
    batch_costs,
    whole_run,
)

STORAGE_OF_NODE = 2e9  # bytes/s to shared storage, unless --storage is given
MAX_GPUS = 16_384  # tried if --gpus is not given
BATCH_TOO_LARGE = 2.0  # times the noise scale, above which more tokens save few steps


@dataclass(frozen=True)
class LossLaw:
    """loss(parameters, tokens) -> nats per token, with its 95 % interval. largest_size, most_tokens: of the
    runs that it was fitted to."""

    loss: Callable[[float, float], tuple[float, float, float]]
    largest_size: float
    most_tokens: float


def add_arguments(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("the whole run of the best layout")
    add = group.add_argument
    add("--tokens", type=float, metavar="N", help="of the run, such as 1.5e12")
    add("--days", type=float, metavar="D",
        help="that the run may take: without --gpus for the fewest GPUs, without --tokens for most tokens")
    add("--budget", type=float, metavar="USD",
        help="that the run may cost at --price: without --gpus for the soonest end, without --tokens for "
        "most tokens")
    add("--most-gpus", type=int, metavar="N",
        help=f"the largest number that is tried without --gpus ({MAX_GPUS})")
    add("--price", type=float, metavar="USD", help="of a GPU-hour")
    add("--pue", type=float, default=1.1, help="watts of the building for each watt of its GPUs")
    add(
        "--mtbf",
        type=float,
        metavar="H",
        default=round(GPU_HOURS_BETWEEN_FAILURES, -2),
        help="GPU-hours between two failures; by default those of Llama 3 (arXiv 2407.21783)",
    )
    add("--restart", type=float, metavar="S", default=600.0, help="seconds until training resumes")
    add("--storage", type=float, metavar="GB/S", help="that all ranks write together (2 a node)")
    add("--law", metavar="CSV", help="finished runs, for the loss: a table that scripts.scaling fit takes")
    add("--noise-scale", type=float, metavar="N", help="tokens that log.noise_scale has measured")


@dataclass(frozen=True)
class RunQuestion:
    """A question about a run. tokens, days and budget (dollars) are None if open or unlimited. price: dollars
    per GPU-hour; law, noise_scale: None if not given. mtbf: GPU-hours. storage: bytes/s, None for
    STORAGE_OF_NODE.
    checkpoint: bytes. node: GPUs per node."""

    tokens: float | None
    days: float | None
    budget: float | None
    price: float | None
    pue: float
    mtbf: float
    restart: float
    storage: float | None
    checkpoint: int
    saves_in_background: bool
    node: int
    law: LossLaw | None
    noise_scale: float | None

    def reliability(self, gpus: int) -> Reliability:
        rate = self.storage or -(-gpus // self.node) * STORAGE_OF_NODE
        writing = self.checkpoint / rate
        blocking = self.checkpoint / gpus / SHARED.host if self.saves_in_background else writing
        return Reliability(self.mtbf, restart=self.restart, blocking=blocking, writing=writing)

    @property
    def limit(self) -> str:
        """The limit in words, or ""."""
        if self.days is not None:
            return "1 day" if self.days == 1 else f"{self.days:g} days"
        return f"${self.budget:,.0f}" if self.budget is not None else ""

    def seconds(self, gpus: int) -> float:
        """Return the seconds that the limit allows a run on these GPUs."""
        if self.days is not None:
            return self.days * DAY
        assert self.budget is not None and self.price is not None
        return self.budget / self.price * HOUR / gpus

    def gpu_hours(self, gpus: int) -> float:
        """Return the GPU-hours allowed by the limit; a budget's do not depend on the number of GPUs."""
        return gpus * self.seconds(gpus) / HOUR


def is_requested(args: argparse.Namespace) -> bool:
    """Return whether the arguments ask about a whole run."""
    return any(value is not None for value in (args.tokens, args.days, args.budget))


def check_requested(args: argparse.Namespace) -> None:
    """Raise ConfigError if the arguments about the run contradict each other, or leave several unknowns."""
    limits = [name for name in ("days", "budget") if getattr(args, name) is not None]
    if len(limits) == 2:
        raise ConfigError("--days and --budget: a run has one limit; leave one of them out")
    limit = f"--{limits[0]}" if limits else ""
    has_gpus, has_tokens = args.gpus is not None, args.tokens is not None

    # unknowns to solve for
    if limit and has_gpus and has_tokens:
        raise ConfigError(f"{limit}: --gpus and --tokens decide it; leave out --gpus for their number, or "
                          "--tokens for how many fit")
    if limit and not has_gpus and not has_tokens:
        raise ConfigError(f"{limit}: give --tokens, such as 1.5e12, for the number of GPUs, or --gpus N for "
                          "how many tokens fit")
    if has_tokens and not has_gpus and not limit:
        raise ConfigError("--tokens: give --gpus N, or without it --days D or --budget USD --price P, for "
                          "their number")
    if args.budget is not None and args.price is None:
        raise ConfigError("--budget: needs --price, the dollars of a GPU-hour")

    # arguments of another question
    given = [name for name in ("price", "storage", "law", "noise_scale") if getattr(args, name) is not None]
    if not has_tokens and not limit and given:
        raise ConfigError(f"--{given[0].replace('_', '-')}: is of a whole run; give its --tokens, such as "
                          "1.5e12")
    if args.most_gpus is not None and (has_gpus or not limit):
        raise ConfigError("--most-gpus: is of a number of GPUs that is looked for; give --days or --budget "
                          "with --tokens, and no --gpus")
    for name in ("tokens", *limits):
        if getattr(args, name) is not None and has_gpus and len(set(args.gpus)) > 1:
            raise ConfigError(f"--{name}: is of a run on one number of GPUs, such as --gpus 64")


def make_question(args: argparse.Namespace, cfg: Config, hardware: Cluster,
                  law: LossLaw | None) -> RunQuestion:
    """Make the question from the arguments. Raises ConfigError for an invalid number."""
    for name in ("tokens", "days", "budget", "price", "pue", "mtbf", "storage", "noise_scale"):
        value = getattr(args, name)
        if value is not None and not 0 < value < math.inf:
            raise ConfigError(f"--{name.replace('_', '-')}: {value:g} must be above 0, and finite")
    if not 0 <= args.restart < math.inf:
        raise ConfigError(f"--restart: {args.restart:g} must not be below 0, and be finite")
    return RunQuestion(
        tokens=args.tokens,
        days=args.days,
        budget=args.budget,
        price=args.price,
        pue=args.pue,
        mtbf=args.mtbf,
        restart=args.restart,
        storage=args.storage * 1e9 if args.storage else None,
        checkpoint=checkpoint_bytes(cfg),
        saves_in_background=cfg.checkpoint.async_save,
        node=hardware.node,
        law=law,
        noise_scale=args.noise_scale,
    )


def checkpoint_bytes(cfg: Config) -> int:
    """Return the checkpoint size summed over all ranks, as one process would hold it."""
    one_process = replace(cfg, parallel=ParallelConfig(), train=replace(cfg.train, phases=None))
    return kept_bytes(make_rank_job(one_process, 1, rank=0, advise=False))


class RunForecast(NamedTuple):
    """likely: the run with the forecast step time. ends: the runs with the shortest and longest step time
    within the 80 % range of published runs on such chips, or None if none are judged. tokens: total. bought:
    if tokens are open, the fewest and the most that the ends allow."""

    likely: WholeRun
    ends: tuple[WholeRun, WholeRun] | None
    tokens: float
    bought: tuple[float, float] | None = None


def forecast_run(
    question: RunQuestion, cfg: Config, step: float, gpus: int, step_range: StepRange | None
) -> RunForecast:
    """Forecast the run from the seconds per step, with the checkpoint interval that loses least.

    Raises ConfigError if the limit is shorter than a step.
    """
    tokens_of_step = cfg.train.global_batch * cfg.train.seq_len
    reliability = question.reliability(gpus)

    def run(tokens: float, step: float) -> WholeRun:
        return whole_run(tokens, tokens_of_step, step, gpus, reliability)

    def most_tokens(step: float) -> int:
        seconds = question.seconds(gpus)
        return tokens_of_step * most_steps(seconds, lambda steps: run(steps * tokens_of_step, step))

    tokens = most_tokens(step) if question.tokens is None else question.tokens
    if not tokens:
        option = "days" if question.days is not None else "budget"
        raise ConfigError(f"--{option}: one step of {step:.3g} s is not within {question.limit}; raise it")
    if step_range is None:
        return RunForecast(run(tokens, step), None, tokens)
    low, high = step_range.low * step, step_range.high * step
    bought = (most_tokens(high), most_tokens(low)) if question.tokens is None else None
    return RunForecast(run(tokens, step), (run(tokens, low), run(tokens, high)), tokens, bought)


def get_costs(run: WholeRun, question: RunQuestion, hardware: Cluster) -> dict[str, float | None]:
    """Return the costs that follow from the step time, None for those with unknown prices."""
    return {
        "days": run.days,
        "gpu_hours": run.gpu_hours,
        "failures": run.failures,
        "mwh": run.megawatt_hours(hardware.watts, question.pue) if hardware.watts else None,
        "dollars": run.gpu_hours * question.price if question.price else None,
    }


def get_numbers(forecast: RunForecast, question: RunQuestion, cfg: Config, hardware: Cluster) -> dict:
    """Return the numbers for --json. X_interval is (least, most) of X over the range of the step time."""
    run = forecast.likely
    numbers: dict = {
        "tokens": forecast.tokens,
        "steps": run.steps,
        "ettr": run.ettr,
        "checkpoint_every": run.every,
        "checkpoint_bytes": question.checkpoint,
    }
    numbers |= get_costs(run, question, hardware)
    if forecast.ends is not None:
        least, most = (get_costs(end, question, hardware) for end in forecast.ends)
        intervals = {f"{name}_interval": (least[name], most[name]) for name in least}
        numbers |= {name: ends for name, ends in intervals.items() if None not in ends}
    if forecast.bought is not None:
        numbers["tokens_interval"] = forecast.bought
    if question.law:
        loss, low, high = question.law.loss(parameters(cfg.model)["total"], forecast.tokens)
        numbers |= {"loss": loss, "loss_interval": (low, high)}
    if question.noise_scale:
        steps, tokens = batch_costs(cfg.train.global_batch * cfg.train.seq_len, question.noise_scale)
        numbers |= {"times_fewest_steps": steps, "times_fewest_tokens": tokens}
    return numbers


def describe_lines(
    forecast: RunForecast, question: RunQuestion, cfg: Config, hardware: Cluster
) -> dict[str, str]:
    """Describe the run as {label: line}."""
    run = forecast.likely
    told = get_numbers(forecast, question, cfg, hardware)
    reliability = question.reliability(run.gpus)
    mean = reliability.between_failures(run.gpus) / HOUR
    how = "in the background" if cfg.checkpoint.async_save else "while training waits"
    lines = {
        "run": f"{billions(forecast.tokens)} tokens · {run.steps:,} steps"
        f" · {ranged(told, 'days', ',.1f', ' days')} · {ranged(told, 'gpu_hours', ',.0f', ' GPU-hours')}",
        "failures": f"{ranged(told, 'failures', ',.1f', ' expected')}, one in {mean:,.1f} hours (a GPU: one"
        f" in {reliability.gpu_hours:,.0f}) · {reliability.restart:,.0f} s to be back"
        f" · ETTR {run.ettr:.1%}",
        "saves": f"--checkpoint.every {run.every} loses least: {told['checkpoint_bytes'] / 1e9:,.0f} GB,"
        f" written in {reliability.writing:,.0f} s {how}",
    }
    if question.tokens is None:
        share = forecast.tokens / parameters(cfg.model)["total"]
        lines["tokens"] = (
            f"{tokens_text(told)}, the most within"
            f" {question.limit} by the forecast · {ratio(share)} a parameter"
        )

    # lines that depend on optional arguments
    costs: list[str] = []
    if question.price:
        costs.append(f"${ranged(told, 'dollars', ',.0f')} at ${question.price:g} a GPU-hour")
    if hardware.watts:
        costs.append(f"{ranged(told, 'mwh', ',.0f', ' MWh')} of GPUs at {hardware.watts:g} W, PUE"
                     f" {question.pue:g}")
    if costs:
        lines["costs"] = " · ".join(costs)
    if question.law:
        lines["loss"] = loss_line(told, question.law, cfg)
    if question.noise_scale:
        batch = cfg.train.global_batch * cfg.train.seq_len
        lines["batch"] = (
            f"{batch / question.noise_scale:.2g} of the noise scale:"
            f" {told['times_fewest_tokens']:.3g} times the fewest tokens,"
            f" {told['times_fewest_steps']:.3g} times the fewest steps; {advice(batch, question.noise_scale)}"
        )
    return lines


def ranged(told: dict, name: str, spec: str, unit: str = "") -> str:
    """Format a number of the report with its range: 12.3 days (11.4 to 14.9). `spec` is a format spec."""
    interval = told.get(f"{name}_interval")
    return f"{told[name]:{spec}}{unit}{in_brackets(interval, lambda end: format(end, spec))}"


def in_brackets(interval: tuple[float, float] | None, get_text: Callable[[float], str]) -> str:
    return "" if interval is None else f" ({get_text(interval[0])} to {get_text(interval[1])})"


def loss_line(told: dict, law: LossLaw, cfg: Config) -> str:
    """Format the loss, and how far the law is extrapolated."""
    low, high = told["loss_interval"]
    times_size = parameters(cfg.model)["total"] / law.largest_size
    times_tokens = told["tokens"] / law.most_tokens
    return (
        f"{told['loss']:.3f} ({low:.3f} to {high:.3f}, 95 %) by the law of --law; this run has"
        f" {ratio(times_size)} times the parameters and {ratio(times_tokens)} times the tokens of its largest"
    )


def tokens_text(told: dict) -> str:
    """Format the tokens of the report: 1,590B (1,026B to 2,524B)."""
    return billions(told["tokens"]) + in_brackets(told.get("tokens_interval"), billions)


def billions(tokens: float) -> str:
    return f"{tokens / 1e9:,.0f}B" if tokens >= 1e13 else f"{tokens / 1e9:,.4g}B"


def ratio(x: float) -> str:
    return f"{x:,.0f}" if x >= 10 else f"{x:.2g}"


def advice(batch: float, noise_scale: float) -> str:
    """Say what a batch of `batch` tokens costs or saves (arXiv 1812.06162)."""
    if batch > BATCH_TOO_LARGE * noise_scale:
        return "a smaller one takes fewer tokens to the same loss"
    if batch < noise_scale / BATCH_TOO_LARGE:
        return "a larger one takes fewer steps, for few tokens more"
    return "near the balance of both"
