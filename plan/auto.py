"""The planner's best layout of a job, for `parallel.auto` and for the recommendation of scripts.plan.

Stated settings are fixed. A run with several phases (train.phases) has one layout, that of the phase with the
longest sequences. If no layout fits, the error names the nearest settings and numbers of GPUs with which one
does.
"""
import math
from collections.abc import Collection
from dataclasses import replace
from typing import NamedTuple

from config import Config, ConfigError
from config.axes import AXES, axis_degrees, ranks_of_layout
from config.reading import Phase, defaults, get_phases
from config.reading.schedules import plan_pipeline
from config.tree import value_at, with_values
from config.values import Values
from plan import elastic, run_report
from plan.cost import Cluster, cluster
from plan.efficiency import get_efficiency
from plan.job import RankDevice, check_routing, make_rank_job
from plan.near_ties import NEAR, near_groups
from plan.search import LAYOUT_KEYS, SearchResult, Target, price, search
from plan.search_processes import best_layouts

KEY = "parallel.auto"
TOP = 10  # layouts considered when looking for the simplest of equally fast ones
GIB = 2**30

# if nothing fits: settings that need less memory, the cheapest first, and multiples of the GPUs
SMALLER = (
    {"optim.states": "bf16"},
    {"parallel.offload": "optimizer"},
    {"parallel.offload": "both", "optim.states": "bf16"},
)
HOLDS_LEAST = {"train.micro_batch": 1, "parallel.recompute": "full"}
MAX_SAVED = 4.0  # factor: such settings save less than this
MORE_GPUS = (2, 4, 8, 16, 32, 64, 128, 256)


class AutoLayout(NamedTuple):
    """The layout as {section.key: value} of every searched key, and one line of text that describes it with
    its forecast step time."""

    values: Values
    text: str


# ---- what is searched --------------------------------------------------------------------------------------


def fixed_values(cfg: Config, stated: Collection[str]) -> Values:
    """Return {section.key: value} of the searched keys that are stated."""
    fixed = {key: value_at(cfg, key) for key in LAYOUT_KEYS if key in stated}
    if cfg.parallel.recompute_stages is not None:  # which replaces it
        fixed["parallel.recompute"] = cfg.parallel.recompute
    return fixed


def check_dtype(cfg: Config, hardware: Cluster) -> None:
    """Raise ConfigError if the cluster has no figures for the dtype."""
    dtype = cfg.train.dtype
    if dtype not in hardware.flops:
        raise ConfigError(
            f"train.dtype: configs/clusters.yaml has no {dtype} for {hardware.name}; "
            f"it has {', '.join(hardware.flops)}"
        )


def longest_phase(cfg: Config, after: int = 0) -> Phase:
    """Return the phase with the longest sequences, among those not over after `after` steps.

    A layout that fits it fits the others, if their microbatches have at most as many tokens.
    """
    return max(get_phases(cfg).from_step(after), key=lambda phase: phase.cfg.train.seq_len)


# ---- where none fits ---------------------------------------------------------------------------------------


def no_layout_text(cfg: Config, target: Target, fixed: Values, result: SearchResult, name: str) -> str:
    """Say that no layout of the job `name` fits, why, and what would help."""
    counts, memory = result.counts, target.cluster.memory
    return (
        f"no layout of {name} on {gpu_count(target.world)} of {memory / GIB:.0f} GiB fits "
        f"({counts['too large']} are too large, {counts['refused']} against the rules); "
        f"{what_would_fit(cfg, target, fixed, result.smallest)}"
    )


def what_would_fit(cfg: Config, target: Target, fixed: Values, smallest: float) -> str:
    """Say how much memory is missing, and the smallest changes to the settings or the number of GPUs that
    help.

    `smallest` is a lower bound in bytes for the smallest layout, infinite if no layout is too large.
    """

    def fits(cfg: Config, target: Target) -> bool:
        return bool(search(cfg, target, HOLDS_LEAST | fixed, top=1, is_any_enough=True).found)

    if math.isinf(smallest):
        try:
            make_rank_job(with_values(cfg, HOLDS_LEAST | fixed), target.world, 0, advise=False)
        except ConfigError as refusal:
            return f"{refusal}; set fewer keys of the layout"
        return "set fewer keys of the layout"
    times = smallest / target.cluster.memory
    ways: list[str] = []
    for keys in SMALLER if times < MAX_SAVED else ():
        if fits(with_values(cfg, keys), target):
            ways.append(" ".join(f"--{key} {value}" for key, value in keys.items()))
    state = run_report.checkpoint_bytes(cfg) / (target.cluster.memory * target.world)
    for factor in [factor for factor in MORE_GPUS if factor >= state][:3]:
        more = replace(target, world=factor * target.world)
        if fits(cfg, more):
            ways.append(gpu_count(more.world))
            break
    needs = f"the smallest needs at least {smallest / GIB:.0f} GiB"
    return f"{needs}; it fits with {', or '.join(ways)}" if ways else f"{needs}; use many more"


# ---- the layout of a run -----------------------------------------------------------------------------------


def get_machine(cfg: Config, device: RankDevice) -> Cluster:
    """Return the cluster that parallel.auto names, with the memory of this machine's GPU.

    Raises ConfigError if the name is unknown, or if the cluster has another GPU.
    """
    assert cfg.parallel.auto is not None
    hardware = cluster(cfg.parallel.auto, asker=KEY)
    check_dtype(cfg, hardware)
    check_routing(cfg)
    if not device.gpu:
        return hardware
    if hardware.gpu not in device.gpu.lower():
        raise ConfigError(
            f"{KEY}: {hardware.name} has GPUs named {hardware.gpu}, and this machine a {device.gpu}; "
            "name another cluster, or describe this one in configs/clusters.yaml"
        )
    return replace(hardware, memory=device.memory)


def best_layout(
    cfg: Config, world: int, device: RankDevice, stated: Collection[str], after: int = 0
) -> AutoLayout:
    """Return the best layout of a run on `world` ranks, for the phases not over after `after` steps.

    `stated` keys (section.key) are fixed. Raises ConfigError if no layout fits.
    """
    hardware = check_requested(cfg, device, after)
    heaviest = elastic.with_any_vocab(longest_phase(cfg, after).cfg)
    target = Target(world, hardware, get_efficiency(hardware))
    fixed = fixed_values(cfg, stated)
    result, _ = best_layouts(heaviest, target, fixed, TOP, near=NEAR)
    if not result.found:
        raise ConfigError(f"{KEY}: {no_layout_text(heaviest, target, fixed, result, 'this run')}")
    ranked = [found for group in near_groups(result.found) for found in group]
    values_of = [{key: value_at(found.cfg, key) for key in LAYOUT_KEYS} for found in ranked]
    for found, values in zip(ranked, values_of):
        if elastic.fits(with_values(cfg, values), world, after):
            best = f"the planner's best for {ranks_text(world)} of {hardware.name}"
            return AutoLayout(values, described(found.cfg, world, best, found.forecast.step))
    try:
        plan_pipeline(with_values(cfg, values_of[0]), world, advise=False, after=after)
    except ConfigError as error:
        why = str(error)
    else:
        raise AssertionError("a layout was refused, and is not")
    raise ConfigError(
        f"{KEY}: none of the {len(ranked)} best layouts suits the whole run ({why}); "
        f"set keys of the layout, or --{KEY} none"
    )


def layout_as_saved(
    cfg: Config, world: int, device: RankDevice, saved: Config, after: int
) -> AutoLayout:
    """Return the layout of the saved config `saved`, without a search."""
    hardware = get_machine(cfg, device)
    values = {key: value_at(saved, key) for key in LAYOUT_KEYS}
    heaviest = elastic.with_any_vocab(with_values(longest_phase(cfg, after).cfg, values))
    found = price(heaviest, Target(world, hardware, get_efficiency(hardware)), SearchResult())
    begun = f"as this run has begun on {ranks_text(world)} of {hardware.name}"
    return AutoLayout(values, described(heaviest, world, begun, found.forecast.step if found else None))


def layout_of_run(
    cfg: Config,
    world: int,
    device: RankDevice,
    stated: Collection[str],
    *,
    after: int = 0,
    saved: tuple[Config, int] | None = None,
) -> AutoLayout:
    """Return the layout of a run: the saved one, unless other keys are stated now; else the best.

    `stated` keys (section.key) are fixed. `after` steps are done. `saved` is the run's saved config and its
    number of ranks. Raises ConfigError if no layout fits, or if the run had another number of ranks.
    """
    if saved is None or saved[0].parallel.auto != cfg.parallel.auto:
        return best_layout(cfg, world, device, stated, after)
    old, ranks = saved
    if ranks == world:
        check_requested(cfg, device, after)
        fixed = fixed_values(cfg, stated)
        if all(value_at(old, key) == value for key, value in fixed.items()):
            return layout_as_saved(cfg, world, device, old, after)
        return best_layout(cfg, world, device, stated, after)
    best = best_layout(cfg, world, device, stated, after)
    raise ConfigError(
        f"{KEY}: this run has the best layout for {ranks_text(ranks)}, and there "
        f"{'is' if world == 1 else 'are'} {world}: start {ranks}, or continue in that for "
        f"{ranks_text(world)}, with --{KEY} none {arguments(with_values(cfg, best.values))}"
    )


def check_requested(cfg: Config, device: RankDevice, after: int) -> Cluster:
    """Return the cluster to search for. Raises ConfigError if other keys choose the layout, too, or if it
    would leave no room for a teacher."""
    if cfg.parallel.elastic:
        raise ConfigError(
            f"{KEY}: takes a layout for one number of ranks, and parallel.elastic one for each start; "
            "leave one of them out"
        )
    if cfg.distill.teacher is not None:
        raise ConfigError(
            f"{KEY}: does not count distill.teacher, and python -m scripts.plan does; set the layout that it "
            "finds, and leave this out"
        )
    hardware = get_machine(cfg, device)
    for phase in get_phases(cfg).from_step(after):
        for key in phase.changes:
            if key in LAYOUT_KEYS:
                raise ConfigError(
                    f"{KEY}: takes one layout for the whole run, and phase {phase.number} states {key} "
                    f"(train.phases); leave it out there, or set --{KEY} none"
                )
    return hardware


# ---- in words ----------------------------------------------------------------------------------------------


def gpu_count(number: int) -> str:
    """Format as 1 GPU, 1,024 GPUs."""
    return "1 GPU" if number == 1 else f"{number:,} GPUs"


def ranks_text(world: int) -> str:
    return f"{world} rank{'s' if world > 1 else ''}"


def described(cfg: Config, world: int, why: str, step: float | None) -> str:
    """Describe the layout, with its forecast step time in seconds unless `step` is None."""
    forecast = "no forecast" if step is None else f"forecast {step:.3g} s a step"
    return f"{layout_text(cfg, world)}, {why}, {forecast} ({arguments(cfg)})"


def layout_text(cfg: Config, world: int) -> str:
    """Format as "tp8 pp16 dp8 zero1 interleaved vpp4 mb1 selective"."""
    parallel, degrees = cfg.parallel, axis_degrees(cfg.parallel)
    named = {axis.word: degrees[axis.key] for axis in AXES} | {"dp": world // ranks_of_layout(degrees)}
    words = [f"{name}{degree}" for name, degree in named.items() if degree > 1]
    if parallel.ep_chunks > 1:
        words.append(f"ep-chunks{parallel.ep_chunks}")
    words.append(f"zero{parallel.zero}")
    if parallel.pp > 1:
        words.append(parallel.schedule)
    if parallel.vpp:
        words.append(f"vpp{parallel.vpp}")
    words.append(f"mb{cfg.train.micro_batch}")
    if parallel.recompute != "none":
        words.append(parallel.recompute)
    return " ".join(words)


def arguments(cfg: Config) -> str:
    """Return the arguments of train.py that select this layout."""
    usual = defaults()
    words: list[str] = []
    for path in LAYOUT_KEYS:
        value = value_at(cfg, path)
        is_default = path.startswith("parallel.") and value == value_at(usual, path)
        if value is not None and not is_default:
            words.append(f"--{path} {str(value).lower()}")
    return " ".join(words)
