"""The fastest layouts of a job on a cluster.

    python -m scripts.plan NAME --gpus 1024 --cluster h100-ib [--top 10] [--section.key VALUE ...]
    python -m scripts.plan NAME --gpus 4:8 --cluster h100-ib [--section.key VALUE ...]

Searches tp, cp, pp, ep, ZeRO, replicas, schedules, virtual stages, micro-batch and recompute for the layouts
with the shortest step among those that fit into memory. Keys set on the command line (--parallel.tp 8) are
not searched. Layouts within 2 % of each other are grouped above a rule, the simplest of them first.

With --tokens: the whole run of the best layout: days, GPU-hours, MWh, failures, their cost and how often to
save; with --price dollars, and with --law the loss, by a law fitted to your own runs. Assumptions are printed
next to what follows from them, with the effect of the step time's range in brackets.

Without --gpus: with --tokens and --days the fewest GPUs on which the run takes at most D days, and with
--tokens, --budget and --price those on which it ends soonest for at most USD. It tries 1, 2, 4 and so on
below a node, and 1, 2, 3, 4, 6, 8, 12 and so on whole nodes, up to --most-gpus; stderr says which are priced.
With --gpus and one of these limits, but without --tokens: the most tokens within the limit. The forecast
itself must keep the limit, not the whole of its range.

Several recipes, such as llama3-8b,qwen3-4b, are compared by the tokens that a limit allows each on --gpus N.

With --what-if links=0.5, slow-rank=1.2 or jitter=0.05: the step of the best layout under this change, and
whether another would be faster then.

With --sbatch FILE: a SLURM batch file that runs the best layout (scripts/slurm/train.sbatch).

With --gpus MIN:MAX: the layout that an elastic job (scripts.launch --nproc MIN:MAX) uses on each number of
GPUs, or that it has none there, for example because the fullest of fewer GPUs would run out of memory.

With --measured RUN: a run of train.py on such GPUs rescales all times.

Bytes are those that our code exchanges (plan/bytes.py: exact) and holds (plan/memory.py: within some percent,
which layouts leave free where possible). Times come from a model of the chip and its links (plan/cost.py)
fitted to published measurements: --published shows forecasts next to measurements, both those of the fit and
others.
"""
import argparse
import functools
import itertools
import json
import os
import shlex
import sys
import time
from collections.abc import Callable
from dataclasses import asdict, replace
from pathlib import Path
from typing import NamedTuple

from config import Config, ConfigError
from config.command_line import CommandParser
from config.reading import dotted_overrides, get_phases, resolve, stated_keys, unused
from config.site import SITE_VARIABLE, read_site
from config.terminal import hanging_lines, output_width, table_lines, wrapped
from config.values import Values
from plan import batch_file, elastic, run_limits, run_report
from plan.auto import TOP, check_dtype, fixed_values, gpu_count, layout_text, longest_phase, no_layout_text
from plan.auto import arguments as arguments_of_layout
from plan.cost import Cluster, cluster
from plan.count import flops_per_token, parameters
from plan.efficiency import CLASSES, StepRange
from plan.gpu_choice import choose_gpus
from plan.job import check_routing
from plan.laws import CHINCHILLA, fit_law
from plan.measured import CostRates, get_rates
from plan.near_ties import NEAR, difference, near_groups
from plan.points import check_enough, read_points
from plan.run_report import RunQuestion
from plan.search import (
    MARGIN,
    TRANSIENT_BYTES,
    PricedLayout,
    SearchResult,
    Target,
    price,
)
from plan.search_processes import best_layouts, search_on_cores
from plan.what_if import WhatIf, cluster_under, parse_what_if
from runtime.failure import fail_cleanly

GIB = 2**30
MIN_SHOWN_SHARE = 0.005  # of a step: shorter exposed communication is not listed
TEXT_COLUMNS = ("layout", "exposed")  # of the table; the others are numbers, which are right-aligned
SEARCHED = ("parallel.", "train.micro_batch", "data.", "eval.", "log.")  # a layout or a run sets these
ELASTIC_TEXT = ("layout", "why")  # the same for --gpus MIN:MAX
LABEL_WIDTH = 9  # columns

BOOTSTRAPS = 200  # fits of the law to resampled runs, for the interval of a loss
RECIPES_FIRST_TO_GO = ("layout", "MFU", "step s")
FIRST_TO_GO = ("GB inside", "GB between", "tokens/s/GPU", "exposed", "bubble")  # in a narrow terminal


def arguments() -> argparse.ArgumentParser:
    parser = CommandParser(
        prog="python -m scripts.plan",
        description=__doc__,
    )
    add = parser.add_argument
    add("name", nargs="?", help="recipe; several, with commas: what a limit gives each")
    add("--gpus", type=parse_span, metavar="N|MIN:MAX", help="of the job; MIN:MAX: of an elastic one")
    add("--cluster", help="a cluster of configs/clusters.yaml")
    add("--top", type=int, default=TOP, help="layouts in the table")
    add("--json", action="store_true", help="print one JSON object for each layout, the fastest first")
    add("--sbatch", type=Path, metavar="FILE", help="write a batch file of SLURM that runs the best layout")
    add("--site", metavar="FILE",
        help="--sbatch: the site file; none: BEVATRON_SITE, or configs/site.yaml")
    add("--what-if", action="append", default=[], metavar="K=V", dest="what_if",
        help="the best layout with links=0.5, slow-rank=1.2 or jitter=0.05, and whether it stays the best "
        "(can be given more than once)")
    add("--measured", type=Path, metavar="RUN", help="a run of train.py on this cluster: forecasts are in "
        "proportion to its step")
    add("--published", action="store_true", help="instead: show forecasts beside published measurements")
    add("--fit", action="store_true", help="with --published: fit the constants now")
    run_report.add_arguments(parser)
    return parser


class RequestedJob(NamedTuple):
    """A job to plan.

    note: about its phase, or "". numbers: candidate numbers of GPUs, ascending.
    fixed: keys that are not searched. question: about the whole run, if there is one.
    """

    name: str
    cfg: Config
    note: str
    numbers: list[int]
    fixed: Values
    question: RunQuestion | None


def main(argv: list[str]) -> int:
    args, rest = arguments().parse_known_args(argv)
    if args.published:
        print_published(args.fit)
        return 0

    # the question
    check_arguments(args)
    what_ifs = {text: parse_what_if(text) for text in args.what_if}
    if args.gpus is not None and args.gpus[0] < args.gpus[1]:
        return print_elastic(args, rest)
    hardware = cluster(args.cluster)
    if args.sbatch:
        batch_file.node_shape(args.gpus[1] if args.gpus else hardware.node, hardware.node)
        batch_file.check_writable(args.sbatch)
        read_site(args.site or os.environ.get(SITE_VARIABLE))  # refuses a mistake before the search
    jobs = requested_jobs(args, rest, hardware)
    rates = get_rates(hardware, args.measured)
    if len(jobs) > 1:
        return print_recipes(args, jobs, hardware, rates)
    (job,) = jobs

    # the layouts, on the given or best number of GPUs
    started = time.perf_counter()
    search_on = searcher(job, hardware, rates, args.top)
    gpus, choice = job.numbers[0], None
    if args.gpus is None:
        assert job.question is not None  # check_arguments
        choice = choose_gpus(
            job.numbers,
            lambda gpus: search_on(gpus)[0],
            question=job.question,
            cfg=job.cfg,
            hardware=hardware,
            say=to_stderr,
        )
        gpus = choice.gpus
    result, target = search_on(gpus)
    seconds = time.perf_counter() - started
    if not result.found:
        raise ConfigError(f"--gpus: {no_layout_text(job.cfg, target, job.fixed, result, job.name)}")

    # as JSON
    reports = make_reports(result.found, args.top, gpus, hardware)
    best = near_groups(result.found)[0][0]
    lines_of_run: dict[str, str] = {}
    if choice is not None:
        reports[0]["priced"] = choice.priced
        lines_of_run["gpus"] = choice.text
    if job.question is not None:
        run = run_report.forecast_run(job.question, best.cfg, best.forecast.step, gpus, rates.range)
        reports[0]["run"] = run_report.get_numbers(run, job.question, best.cfg, hardware)
        lines_of_run |= run_report.describe_lines(run, job.question, best.cfg, hardware)
    if what_ifs:
        reports[0]["what_if"] = [
            answer(what_if, job.cfg, target, job.fixed, best) | {"what": text, "assumed": assumed}
            for text, (what_if, assumed) in what_ifs.items()
        ]
    words = f"{args.name} {settings(rest, reports[0]['arguments'].split())}"
    if args.sbatch:
        reports[0]["sbatch"] = write_batch(args, hardware, reports[0], words)
    if args.json:
        print("\n".join(map(json.dumps, reports)))
        return 0

    # as text
    width = output_width()
    for text in (headline(job.cfg, args, gpus), job.note, rates.note):
        if text:
            print("\n".join(wrapped(text, width)))
    counts = result.counts
    print(f"{counts['priced']:,} layouts priced, {counts['too large']:,} too large ({seconds:.0f} s)\n")
    print_reports(reports, lines_of_run, rates.range, width)
    if not target.leaves_margin:
        print("\n".join(labelled("margin", no_margin_text(best), width)))
    print()
    if args.sbatch:
        shape = batch_file.node_shape(gpus, hardware.node)
        nodes = "1 node" if shape.nodes == 1 else f"{shape.nodes} nodes"
        text = f"sbatch {args.sbatch} · {nodes} of {gpu_count(shape.gpus)}"
        print("\n".join(labelled("batch", text, width)))
    print(f"best     train.py {words}")
    return 0


def print_reports(
    reports: list[dict], lines_of_run: dict[str, str], step_range: StepRange | None, width: int | None
) -> None:
    """Print the table and the text on its best layout, in blocks separated by blank lines."""
    best = reports[0]
    print("\n".join(table(reports, width)))
    if reports[1:]:
        print("\n".join(labelled("second", reports[1]["against_first"]["text"], width)))
    print("\n".join(["", *memory_lines(best)]))
    if step_range is not None:
        print("\n".join(["", *labelled("step", range_text(best["step_s"], step_range), width)]))
    if "what_if" in best:
        print("\n".join(["", *what_if_lines(best, width)]))
    if lines_of_run:
        print()
    for what, text in lines_of_run.items():
        print("\n".join(labelled(what, text, width)))


def print_recipes(args: argparse.Namespace, jobs: list[RequestedJob], hardware: Cluster,
                  rates: CostRates) -> int:
    """Print what the limit buys for each of several recipes, by loss if a law is given, else largest first.
    Returns 2 if none has a layout.
    """
    reports: list[dict] = []
    for job in jobs:
        result, _ = searcher(job, hardware, rates, args.top)(job.numbers[0])
        if not result.found:
            to_stderr(f"{job.name}: no layout fits on {gpu_count(job.numbers[0])} of {args.cluster}")
            continue
        assert job.question is not None  # check_arguments
        best = near_groups(result.found)[0][0]
        try:
            run = run_report.forecast_run(job.question, best.cfg, best.forecast.step, job.numbers[0],
                                          rates.range)
        except ConfigError as error:
            to_stderr(f"{job.name}: {error}")
            continue
        numbers = run_report.get_numbers(run, job.question, best.cfg, hardware)
        size = parameters(best.cfg.model)["total"]
        reports.append({"name": job.name, "parameters": size} | report(best, job.numbers[0], hardware)
                       | {"run": numbers})
    reports.sort(key=lambda each: each["run"].get("loss", -each["parameters"]))
    if args.json:
        print("\n".join(map(json.dumps, reports)))
    elif reports:
        rows = list(map(recipe_row, reports))
        print("\n".join(table_lines(rows, to_left=("recipe", "layout"), first_to_go=RECIPES_FIRST_TO_GO,
                                    width=output_width(), whole_in="--json")))
    return 0 if reports else 2


def recipe_row(numbers: dict) -> dict[str, str]:
    """Return {column: text} for one recipe."""
    run = numbers["run"]
    row = {
        "recipe": numbers["name"],
        "parameters": f"{numbers['parameters'] / 1e9:,.2f}B",
        "layout": numbers["layout"],
        "step s": f"{numbers['step_s']:.3f}",
        "MFU": f"{numbers['mfu']:.1%}",
        "tokens": run_report.tokens_text(run),
        "a parameter": run_report.ratio(run["tokens"] / numbers["parameters"]),
    }
    if "loss" in run:
        low, high = run["loss_interval"]
        row["loss (95 %)"] = f"{run['loss']:.3f} ({low:.3f} to {high:.3f})"
    return row


def check_arguments(args: argparse.Namespace) -> None:
    """Raise ConfigError if arguments are missing, contradict each other, or are out of range."""
    is_open = run_report.is_requested(args) or args.most_gpus is not None
    if not args.name or not args.cluster or (args.gpus is None and not is_open):
        raise ConfigError("plan: needs NAME, --gpus N and --cluster C, "
                          "such as llama3-8b --gpus 64 --cluster h100-ib")
    run_report.check_requested(args)
    batch_file.check_site(args.site, args.sbatch)
    if "," in args.name and (args.gpus is None or args.tokens is not None
                             or not run_report.is_requested(args)):
        raise ConfigError(f"{args.name}: several recipes are compared by the tokens that --days D, or "
                          "--budget USD --price P, gives each on --gpus N; give these, and no --tokens")
    for option in ("sbatch", "what_if"):
        if "," in args.name and getattr(args, option):
            raise ConfigError(f"--{option.replace('_', '-')}: is of one recipe, not of {args.name}")
    if args.most_gpus is not None and args.most_gpus < 1:
        raise ConfigError("--most-gpus: must be at least 1")
    if args.top < 1:
        raise ConfigError("--top: must be at least 1")
    if args.gpus is None:
        return
    least, most = args.gpus
    if least < 1:
        raise ConfigError("--gpus: must be at least 1")
    if least > most:
        raise ConfigError(f"--gpus: MIN:MAX, such as {most}:{least}")
    for option in ("sbatch", "what_if", "measured"):
        if least < most and getattr(args, option):
            named = option.replace("_", "-")
            raise ConfigError(f"--{named}: is of a job on one number of GPUs, such as --gpus 64")


def make_reports(found: list[PricedLayout], top: int, gpus: int, hardware: Cluster) -> list[dict]:
    """Return the reports of the layouts to show, in groups of near ties, with their differences from the
    first.
    """
    groups = near_groups(found)
    first = groups[0][0]
    reports: list[dict] = []
    for number, group in enumerate(groups, start=1):
        for layout in group:
            numbers = {"group": number} | report(layout, gpus, hardware)
            if reports:
                against_first = difference(layout, first)
                numbers["against_first"] = asdict(against_first) | {"text": str(against_first)}
            reports.append(numbers)
    return reports[:top]


def labelled(what: str, text: str, width: int | None) -> list[str]:
    """Return the labelled text, in lines of at most `width` columns."""
    return hanging_lines(f"{what:<{LABEL_WIDTH}}", text, width)


def write_batch(args: argparse.Namespace, hardware: Cluster, best: dict, words: str) -> dict:
    """Write the file of --sbatch and return its entry for --json. `best` is the report of the layout."""
    shape = batch_file.node_shape(best["gpus"], hardware.node)
    title = (f"{args.name} on {gpu_count(best['gpus'])} of {args.cluster}: {best['layout']}, "
             f"forecast to take {best['step_s']:.3f} s a step (scripts.plan).")
    site = read_site(args.site or os.environ.get(SITE_VARIABLE))
    text = batch_file.batch_text(
        shape, title=title, file=args.sbatch, name=args.name, words=words, site=site
    )
    batch_file.write_batch_file(args.sbatch, text)
    return {"file": str(args.sbatch), **shape._asdict()}


def answer(question: WhatIf, cfg: Config, target: Target, fixed: dict[str, object],
           best: PricedLayout) -> dict:
    """Return the step of the best layout under the question, and the best layout then, which is another one
    only if it is faster by more than the error of forecasts.
    """
    changed = replace(target, cluster=cluster_under(target.cluster, question), what_if=question)
    stays = price(best.cfg, changed, SearchResult())
    assert stays is not None  # its bytes are the same
    found = search_on_cores(cfg, changed, fixed, 1, near=NEAR).found
    is_best = stays.forecast.step <= (1 + NEAR) * found[0].forecast.step
    then = stays if is_best else near_groups(found)[0][0]
    return {
        "step_s": stays.forecast.step,
        "is_best": is_best,
        "best_layout": layout_text(then.cfg, target.world),
        "best_step_s": then.forecast.step,
        "best_arguments": arguments_of_layout(then.cfg),
    }


def what_if_lines(best: dict, width: int | None) -> list[str]:
    """Return a table of the answers with their assumptions."""
    now = best["step_s"]
    rows = [{"what if": "now", "step s": f"{now:.3f}", "longer": "", "best then": best["layout"]}]
    for each in best["what_if"]:
        then = f"{each['best_layout']}: {each['best_step_s']:.3f} s"
        rows.append({
            "what if": each["what"],
            "step s": f"{each['step_s']:.3f}",
            "longer": f"{each['step_s'] / now - 1:+.1%}",
            "best then": "the same" if each["is_best"] else then,
        })
    lines = table_lines(rows, to_left=("what if", "best then"), width=width)
    for each in best["what_if"]:
        lines += labelled("assumed", f"{each['what']}: {each['assumed']}", width)
    return lines


def fitted_law(table: Path) -> run_report.LossLaw:
    """Return the law of arXiv 2203.15556, fitted to the runs of a table. Raises ConfigError."""
    points = read_points(table)
    check_enough(points)
    fit = fit_law(CHINCHILLA, points, BOOTSTRAPS)

    def loss(size: float, tokens: float) -> tuple[float, float, float]:
        return fit.loss(size, tokens), *fit.loss_interval(size, tokens)

    return run_report.LossLaw(loss, points.parameters.max(), points.tokens.max())


def settings(given: list[str], of_layout: list[str]) -> str:
    """Return the settings of a command line and of a layout, each key once."""
    words: dict[str, str] = {}
    for argv in (given, of_layout):
        words |= {f"--{path}": value for path, value in dotted_overrides(argv).items()}
    return " ".join(f"{key} {shlex.quote(value)}" for key, value in words.items())


def parse_span(text: str) -> tuple[int, int]:
    """Parse 8 to (8, 8), and 4:8 to (4, 8). Raises ArgumentTypeError."""
    least, _, most = text.rpartition(":")
    try:
        return int(least or most), int(most)
    except ValueError:
        raise argparse.ArgumentTypeError(f"expected N or MIN:MAX, such as 64 or 4:8, got {text!r}") from None


def print_elastic(args: argparse.Namespace, rest: list[str]) -> int:
    """Print the layout of an elastic job for each number of GPUs. Returns 2 if there is none for any."""
    cfg = resolve(args.name, None, [*rest, "--parallel.elastic", "true"])
    unused.check_unused(cfg, args.gpus[1], but=SEARCHED)
    hardware = cluster(args.cluster)
    check_plannable(cfg, hardware)
    device = elastic.RankDevice(hardware.gpu, hardware.memory)
    least, most = args.gpus
    reports = [elastic_report(cfg, world, device) for world in range(most, least - 1, -1)]
    if args.json:
        print("\n".join(map(json.dumps, reports)))
    else:
        print("\n".join(table_lines([elastic_row(each) for each in reports], to_left=ELASTIC_TEXT)))
    return 0 if any("layout" in each for each in reports) else 2


def elastic_report(cfg: Config, world: int, device: elastic.RankDevice) -> dict:
    """Return the report of an elastic job on `world` GPUs: its layout and bytes, or why it has none."""
    try:
        layout = elastic.layout_for(cfg, world, device)
    except ConfigError as error:
        return {"gpus": world, "refused": str(error)}
    return {
        "gpus": world,
        "layout": layout_text(layout.cfg, world),
        "memory": elastic.memory_of_fullest_rank(layout.cfg, world, device),
        "given_memory": layout.too_large or None,
        "by_planner": layout.by_planner,
        "changed": layout.changed,
    }


def elastic_row(numbers: dict) -> dict[str, str]:
    """Return {column: text} for one number of GPUs."""
    row = {"GPUs": str(numbers["gpus"]), "layout": "none", "GiB": "-", "why": numbers.get("refused", "")}
    if "layout" not in numbers:
        return row
    row |= {"layout": numbers["layout"], "GiB": f"{numbers['memory'] / GIB:.0f}"}
    given = numbers["given_memory"]
    if given:
        row["why"] = f"the given settings would take {given / GIB:.0f} GiB"
    elif numbers["by_planner"]:
        row["why"] = "the given degrees do not divide"
    return row


def print_published(fit: bool) -> None:
    """Print forecasts next to published measurements, with `fit` using constants fitted to them now."""
    from plan import published  # the search itself needs no scipy.stats

    rows = published.rows()
    constants = {one: fitted.efficiency for one, fitted in CLASSES.items()}
    if fit:
        constants = published.fit_classes(rows)
        for one, efficiency in constants.items():
            print(f"{one}: {efficiency}")
    print("\n".join(published.table(rows, constants)))

    print("\nclass: measured / forecast of 80 % of its judged rows")
    for one, efficiency in constants.items():
        low, high = published.judged_range([row for row in rows if (row.of, row.use) == (one, "judge")],
                                           efficiency)
        print(f"{one}: {low:.2f} to {high:.2f}")
    judged = [row for row in rows if row.use == "judge"]
    low, high, pairs = published.paired_range(judged, constants)
    print(f"in proportion to another run of the model and source: {low:.2f} to {high:.2f} ({pairs} pairs)")
    layouts = [row for row in rows if (row.group, row.use) == (published.LAYOUTS, "judge")]
    before, after = (published.rank_correlation(layouts, each) for each in ({}, constants))
    print(f"\nrank correlation within {published.LAYOUTS}, judged: {before:.2f} shared, {after:.2f} classes")


# ---- the search ------------------------------------------------------------------------------------------

def check_plannable(cfg: Config, hardware: Cluster) -> None:
    """Raise ConfigError if the vocabulary or the routing is unknown, or the cluster has no figures for the
    dtype.
    """
    if cfg.model.vocab is None:
        raise ConfigError("model.vocab: is the tokenizer's, which a plan does not read; set it")
    check_dtype(cfg, hardware)
    check_routing(cfg)


def requested_jobs(args: argparse.Namespace, rest: list[str], hardware: Cluster) -> list[RequestedJob]:
    """Return the job of each recipe. Raises ConfigError if one cannot be planned."""
    numbers = numbers_to_try(args, hardware)
    law = fitted_law(Path(args.law)) if args.law else None
    jobs: list[RequestedJob] = []
    for name in args.name.split(","):
        whole = resolve(name, None, rest)
        unused.check_unused(whole, numbers[-1], but=SEARCHED)  # as in train.py
        cfg, note = phase_to_plan(whole)
        check_plannable(cfg, hardware)
        question = None
        if run_report.is_requested(args):
            question = run_report.make_question(args, cfg, hardware, law)
        fixed = fixed_values(cfg, stated_keys(None, rest))
        jobs.append(RequestedJob(name, cfg, note, numbers, fixed, question))
    return jobs


def searcher(
    job: RequestedJob, hardware: Cluster, rates: CostRates, top: int
) -> Callable[[int], tuple[SearchResult, Target]]:
    """Return a cached search for the layouts of a job on a number of GPUs. Reads the sizes of its teacher, if
    it has one."""
    teacher = None
    if job.cfg.distill.teacher is not None:
        from checkpoint.teacher import read_model
        from config.reading.teacher import check_vocab

        teacher = read_model(job.cfg)
        check_vocab(job.cfg, teacher, job.cfg.distill.teacher)

    @functools.cache
    def search_on(gpus: int) -> tuple[SearchResult, Target]:
        target = Target(gpus, hardware, rates.efficiency, teacher=teacher)
        return best_layouts(job.cfg, target, job.fixed, top, near=NEAR)

    return search_on


def numbers_to_try(args: argparse.Namespace, hardware: Cluster) -> list[int]:
    """Return the candidate numbers of GPUs: that of --gpus, or those to choose from."""
    if args.gpus is not None:
        return [args.gpus[1]]
    return run_limits.candidate_gpu_counts(hardware.node, args.most_gpus or run_report.MAX_GPUS)


def to_stderr(text: str) -> None:
    print(text, file=sys.stderr)


def phase_to_plan(cfg: Config) -> tuple[Config, str]:
    """Return the config of the phase with the longest sequences, and a line about it, for train.phases."""
    longest, phases = longest_phase(cfg), get_phases(cfg).all
    if len(phases) == 1:
        return longest.cfg, ""
    return longest.cfg, (f"phase {longest.number} of {len(phases)}, which has the longest sequences "
                         f"({longest.cfg.train.seq_len:,} tokens); after step {longest.steps_before:,}")


# ---- the report ------------------------------------------------------------------------------------------

def report(layout: PricedLayout, world: int, hardware: Cluster) -> dict:
    """Return a layout in plain numbers: seconds, bytes, shares of the step, MFU of bf16 peak (fp8 too)."""
    forecast, train = layout.forecast, layout.cfg.train
    step = forecast.step
    tokens = train.global_batch * train.seq_len
    flops = tokens * flops_per_token(layout.cfg.model, train.seq_len, groups=layout.cfg.optim.groups)
    peak_flops = hardware.flops["bf16" if train.dtype == "fp8" else train.dtype]
    return {
        "gpus": world,
        "layout": layout_text(layout.cfg, world),
        "step_s": step,
        "tokens_per_s_per_gpu": tokens / step / world,
        "mfu": flops / (step * world * peak_flops),
        "memory": layout.held.total,
        "state": layout.held.state,
        "activations": layout.held.activations,
        "communicators": layout.held.communicators,
        "reserved": layout.held.reserved,
        "sent_inside": forecast.sent[0],
        "sent_between": forecast.sent[1],
        "microbatches": layout.microbatches,
        "compute": forecast.compute / step,
        "bubble": forecast.bubble / step,
        "optimizer": forecast.optimizer / step,
        "exposed": {group: seconds / step for group, seconds in forecast.exposed.items()},
        "arguments": arguments_of_layout(layout.cfg),
    }


def headline(cfg: Config, args: argparse.Namespace, gpus: int) -> str:
    """Return the job in one line."""
    counted, train = parameters(cfg.model), cfg.train
    total = counted["total"] / 1e9
    active = counted["active"] / 1e9
    tokens = train.global_batch * train.seq_len
    return (f"{args.name}: {total:.1f}B parameters ({active:.1f}B per token)"
            f" · {train.global_batch:,} x {train.seq_len:,} = {tokens / 1e6:.1f}M tokens per step"
            f" · {train.dtype} · {gpu_count(gpus)} of {args.cluster}")


def table(reports: list[dict], width: int | None) -> list[str]:
    """Return the reports as lines of aligned columns, with a rule after each group of near ties. If they are
    too wide, a line lists the dropped columns.
    """
    rows = [table_row(each) for each in reports]
    lines = table_lines(
        rows, to_left=TEXT_COLUMNS, first_to_go=FIRST_TO_GO, width=width, whole_in="--json"
    )
    head, *lines = lines
    across = max(map(len, [head, *lines[:len(rows)]]))
    sizes = [len(list(group)) for _, group in itertools.groupby(reports, key=lambda each: each["group"])]
    ruled = [head]
    for size, following in zip(sizes, [*sizes[1:], 1]):
        ruled += lines[:size]
        del lines[:size]
        if max(size, following) > 1:
            ruled.append(near_rule(size).ljust(across, "-"))
    return ruled + lines


def near_rule(size: int) -> str:
    """Return the text of the rule below a group of this size."""
    return f"-- within {NEAR * 100:g} % of each other, the simplest first " if size > 1 else ""


def range_text(step: float, known: StepRange) -> str:
    """Return what published runs imply for a forecast of `step` seconds."""
    low, high, runs = known
    return (f"of {runs} 80 % took {low:.2f} to {high:.2f} times the forecast: {low * step:.3f} to "
            f"{high * step:.3f} s")


def no_margin_text(best: PricedLayout) -> str:
    """Return a warning that the best layout fits, but by less than the planner's own error."""
    return (f"no layout leaves {MARGIN:.0%} of its tensors free ({best.held.margin / GIB:.1f} GiB), by which "
            "the count of activations can be short; choose settings that hold less, or try this one with "
            "a dry run")


def memory_lines(numbers: dict) -> list[str]:
    """Return the memory of the fullest rank of one layout, part by part."""
    parts = {
        "weights, gradients, optimizer": numbers["state"],
        "activations": numbers["activations"],
        "communicators of NCCL": numbers["communicators"],
        "CUDA and its libraries": numbers["reserved"],
        "temporary tensors": TRANSIENT_BYTES,
    }
    lines: list[str] = []
    for what, nbytes in parts.items():
        title = "" if lines else "memory of the best, GiB"
        lines.append(f"{title:<25}{what:<30}{nbytes / GIB:>6.1f}")
    return lines


def table_row(numbers: dict) -> dict[str, str]:
    """Return {column: text} for one report."""
    longest_first = sorted(numbers["exposed"].items(), key=lambda item: -item[1])
    exposed = [f"{group} {share:.0%}" for group, share in longest_first if share >= MIN_SHOWN_SHARE]
    return {
        "layout": numbers["layout"],
        "step s": f"{numbers['step_s']:.3f}",
        "tokens/s/GPU": f"{numbers['tokens_per_s_per_gpu']:,.0f}",
        "MFU": f"{numbers['mfu']:.1%}",
        "GiB": f"{numbers['memory'] / GIB:.0f}",
        "bubble": f"{numbers['bubble']:.0%}",
        "GB inside": f"{numbers['sent_inside'] / 1e9:.1f}",
        "GB between": f"{numbers['sent_between'] / 1e9:.1f}",
        "exposed": ", ".join(exposed) or "-",
    }


if __name__ == "__main__":
    sys.exit(fail_cleanly(main, sys.argv[1:]))
