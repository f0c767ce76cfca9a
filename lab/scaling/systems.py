"""How a job scales over ranks and layouts, measured against the planner's forecast.

    strong   the same global batch on more ranks
    weak     a global batch that grows with the ranks

Each cell - a mode, a layout, a number of ranks - is a short run of train.py. Efficiency is the tokens a
second a rank, relative to the fastest cell with the fewest ranks in the same mode.
"""
import csv
import json
import math
import statistics
from dataclasses import asdict, dataclass, replace
from pathlib import Path

from config import Config, ConfigError
from config.manifest import keep_manifest
from config.reading import resolve, unused
from config.terminal import table_lines
from lab.scaling.settings import to_arguments
from plan.cost import Cluster, Efficiency, forecast
from plan.count import flops_per_token
from plan.job import make_rank_job
from plan.search import make_job
from runtime.lines import read_metrics

MODES = ("strong", "weak")
SYSTEMS_FILE = "systems.json"  # in the folder of all cells
CELL_FILE = "cell.json"  # in the folder of a cell, once it has run
WARM_UP = 2  # steps of a run that are not counted: they compile, connect and allocate
MIN_STEPS = 5
TEXT_COLUMNS = ("mode", "layout")  # of the table; the others are numbers
FIRST_TO_GO = ("its MFU", "MFU", "forecast: ms", "batch", "its efficiency")  # in a narrow terminal


@dataclass(frozen=True)
class ScalingLayout:
    """settings: [key, value] pairs of parallel.* (others work too), for any number of ranks."""
    name: str
    settings: tuple[tuple[str, str], ...]


@dataclass(frozen=True)
class Systems:
    """modes: of MODES. ranks: numbers of processes. steps: of each run."""
    recipe: str
    modes: tuple[str, ...]
    layouts: tuple[ScalingLayout, ...]
    ranks: tuple[int, ...]
    steps: int
    settings: tuple[tuple[str, str], ...] = ()


@dataclass(frozen=True)
class Hardware:
    """The hardware of the forecast, and the peak that MFU is relative to."""
    cluster: Cluster
    efficiency: Efficiency


@dataclass(frozen=True)
class ScalingCell:
    """forecast_s: the planner's seconds a step, None without a cluster.

    flops: a step, over all ranks. peak_flops: of a rank, None without a cluster.
    """
    name: str
    mode: str
    layout: str
    ranks: int
    global_batch: int
    tokens: int
    flops: float
    forecast_s: float | None
    peak_flops: float | None


@dataclass(frozen=True)
class MeasuredCell:
    """A cell that has run. step_s: the median. spread: (largest - smallest) / median of the counted steps."""
    cell: ScalingCell
    step_s: float
    spread: float
    memory_gib: float | None

    @property
    def tokens_per_s(self) -> float:
        return self.cell.tokens / self.step_s

    @property
    def mfu(self) -> float | None:
        peak = self.cell.peak_flops
        return self.cell.flops / (self.step_s * self.cell.ranks * peak) if peak else None


# ---- runs --------------------------------------------------------------------------------------------------


def parse_layout(text: str) -> ScalingLayout:
    """Parse "tp 2, zero 1" or "--parallel.tp 2 --parallel.zero 1"; "" is pure data parallelism.

    Raises ConfigError.
    """
    words = text.replace(",", " ").replace("--", " ").replace("=", " ").split()
    if len(words) % 2:
        raise ConfigError(f"--layout: {text!r} is not a list of keys with values, such as 'tp 2, zero 1'")
    settings: list[tuple[str, str]] = []
    for key, value in zip(words[::2], words[1::2]):
        settings.append((key if "." in key else f"parallel.{key}", value))
    name = "-".join(key.rpartition(".")[2] + value for key, value in settings)
    return ScalingLayout(name or "dp", tuple(settings))


def check_systems(systems: Systems) -> None:
    """Raise ConfigError for what cannot run at all; impossible cells are reported later."""
    if not systems.ranks or min(systems.ranks) < 1 or len(set(systems.ranks)) != len(systems.ranks):
        raise ConfigError("--ranks: different numbers of processes, all at least 1, such as 1,2,4")
    if systems.steps < MIN_STEPS:
        raise ConfigError(f"--steps: {systems.steps}; at least {MIN_STEPS}, of which the first {WARM_UP} "
                          "are not counted")
    names = [layout.name for layout in systems.layouts]
    if len(set(names)) != len(names):
        raise ConfigError(f"--layout: the same layout twice ({', '.join(names)})")


def keep_systems(systems: Systems, folder: Path, cluster: str | None) -> None:
    """Write the description of the folder and create it. Modes, layouts and ranks may be added later.

    `cluster` is that of the forecast. Raises ConfigError if the folder belongs to another measurement.
    """
    layouts: list[str] = []
    for layout in systems.layouts:
        words = ", ".join(f"{key} {value}" for key, value in layout.settings)
        layouts.append(f"{layout.name}: {words}")
    tree = {
        "recipe": systems.recipe,
        "steps": systems.steps,
        "cluster": cluster,
        "settings": dict(systems.settings),
        "fewest ranks": min(systems.ranks),  # the base of a weak batch
        "modes": list(systems.modes),
        "layouts": layouts,
        "ranks": list(systems.ranks),
    }
    keep_manifest(
        folder / SYSTEMS_FILE,
        tree,
        what="measurement",
        may_grow=("modes", "layouts", "ranks"),
        has_results=any(folder.glob(f"*/{CELL_FILE}")),
    )


def config_of_recipe(systems: Systems, more: tuple[tuple[str, str], ...] = ()) -> Config:
    """Return the recipe with the settings of all cells, and more. Raises ConfigError."""
    return resolve(systems.recipe, None, to_arguments(systems.settings + more))


def config_of_cell(systems: Systems, mode: str, layout: ScalingLayout, ranks: int) -> Config:
    """Return the config of a cell. Raises ConfigError if train.py would reject it."""
    cfg = config_of_recipe(systems, layout.settings)
    if mode == "weak":
        grown, rest = divmod(cfg.train.global_batch * ranks, min(systems.ranks))
        if rest:
            raise ConfigError(f"train.global_batch: {cfg.train.global_batch} for {min(systems.ranks)} ranks "
                              f"does not grow to {ranks} ranks in whole sequences; set a multiple")
        cfg = replace(cfg, train=replace(cfg.train, global_batch=grown))
    make_rank_job(cfg, ranks, rank=0)
    unused.check_unused(cfg, ranks)
    return cfg


def cell_name(mode: str, layout: ScalingLayout, ranks: int) -> str:
    return f"{mode}-{layout.name}-{ranks}"


def make_cell(
    systems: Systems, mode: str, layout: ScalingLayout, ranks: int, hardware: Hardware | None
) -> ScalingCell:
    """Return a cell. Raises ConfigError if the layout does not fit this number of ranks."""
    cfg = config_of_cell(systems, mode, layout, ranks)
    tokens = cfg.train.global_batch * cfg.train.seq_len
    return ScalingCell(
        name=cell_name(mode, layout, ranks),
        mode=mode,
        layout=layout.name,
        ranks=ranks,
        global_batch=cfg.train.global_batch,
        tokens=tokens,
        flops=tokens * flops_per_token(cfg.model, cfg.train.seq_len),
        forecast_s=forecast_step_seconds(cfg, ranks, hardware) if hardware else None,
        peak_flops=get_peak_flops(cfg, hardware) if hardware else None,
    )


def forecast_step_seconds(cfg: Config, ranks: int, hardware: Hardware) -> float:
    """Return the forecast seconds of a step."""
    job, microbatches = make_job(cfg, ranks)
    return forecast(job, microbatches, hardware.cluster, hardware.efficiency).step


def get_peak_flops(cfg: Config, hardware: Hardware) -> float:
    """Return the FLOP/s of a rank, those of bf16 also for a run in fp8, as everywhere."""
    dtype = "bf16" if cfg.train.dtype == "fp8" else cfg.train.dtype
    return hardware.cluster.flops[dtype]


def cell_arguments(systems: Systems, cell: ScalingCell, layout: ScalingLayout, folder: Path) -> list[str]:
    """Return train.py's arguments for a cell in this folder: no evaluation, no sample, one checkpoint."""
    settings = dict(systems.settings + layout.settings) | {
        "log.dir": str(folder),
        "log.name": cell.name,
        "train.steps": str(systems.steps),
        "train.global_batch": str(cell.global_batch),
        "eval.every": "none",
        "eval.batches": "1",
        "eval.sample": "0",
        "checkpoint.every": "none",
    }
    return [systems.recipe, *to_arguments(settings.items())]


# ---- results -----------------------------------------------------------------------------------------------


def write_cell(cell: ScalingCell, folder: Path) -> None:
    """Write a cell's file after a successful run; without it, a folder's timings are not read."""
    own = folder / cell.name
    own.mkdir(parents=True, exist_ok=True)
    (own / CELL_FILE).write_text(json.dumps(asdict(cell), indent=1) + "\n")


def read_cell(path: Path) -> ScalingCell:
    """Read a cell. Raises ConfigError."""
    try:
        return ScalingCell(**json.loads(path.read_text()))
    except (OSError, ValueError, TypeError) as error:
        raise ConfigError(f"{path}: does not say what was measured ({error}); remove its folder") from error


def read_cells(folder: Path) -> list[MeasuredCell]:
    """Return all cells of a folder that have run, by mode, layout and ranks. Raises ConfigError."""
    measured: list[MeasuredCell] = []
    for path in folder.glob(f"*/{CELL_FILE}"):
        cell = read_cell(path)
        steps, _ = read_metrics(path.parent)
        counted = [row["step_ms"] / 1e3 for row in steps[WARM_UP:] if row["step_ms"] is not None]
        if not counted:
            continue
        step_s = statistics.median(counted)
        spread = (max(counted) - min(counted)) / step_s
        measured.append(MeasuredCell(cell, step_s, spread, steps[-1].get("mem_gib")))
    return sorted(measured, key=lambda each: (each.cell.mode, each.cell.layout, each.cell.ranks))


def efficiencies(measured: list[MeasuredCell]) -> dict[str, tuple[float, float | None]]:
    """Return {cell: (its measured efficiency, the planner's)}, relative to the fastest cell with the fewest
    ranks in the same mode.
    """
    result: dict[str, tuple[float, float | None]] = {}
    for mode in MODES:
        own = [each for each in measured if each.cell.mode == mode]
        if not own:
            continue
        fewest = min(each.cell.ranks for each in own)
        base = max((each for each in own if each.cell.ranks == fewest), key=lambda each: each.tokens_per_s)
        for each in own:
            by_rank = each.tokens_per_s / each.cell.ranks
            measured_share = by_rank / (base.tokens_per_s / fewest)
            planned = None
            if each.cell.forecast_s and base.cell.forecast_s:
                ours = each.cell.tokens / (each.cell.forecast_s * each.cell.ranks)
                theirs = base.cell.tokens / (base.cell.forecast_s * fewest)
                planned = ours / theirs
            result[each.cell.name] = measured_share, planned
    return result


def table_rows(measured: list[MeasuredCell]) -> list[dict[str, str | int | float | None]]:
    """Return one row a cell in plain numbers, for the table and the CSV."""
    share_of = efficiencies(measured)
    rows: list[dict[str, str | int | float | None]] = []
    for each in measured:
        efficiency, planned = share_of[each.cell.name]
        cell = each.cell
        planned_mfu = None
        if cell.forecast_s and cell.peak_flops:
            planned_mfu = cell.flops / (cell.forecast_s * cell.ranks * cell.peak_flops)
        rows.append({
            "mode": cell.mode,
            "layout": cell.layout,
            "ranks": cell.ranks,
            "global_batch": cell.global_batch,
            "step_ms": 1e3 * each.step_s,
            "spread": each.spread,
            "tokens_per_s": each.tokens_per_s,
            "efficiency": efficiency,
            "mfu": each.mfu,
            "memory_gib": each.memory_gib,
            "forecast_ms": None if cell.forecast_s is None else 1e3 * cell.forecast_s,
            "forecast_efficiency": planned,
            "forecast_mfu": planned_mfu,
        })
    return rows


def systems_lines(measured: list[MeasuredCell], width: int | None = None) -> list[str]:
    """Return the lines of the table for a terminal of this width, with "-" for unknown values."""
    shown: list[dict[str, str]] = []
    for row in table_rows(measured):
        shown.append({
            "mode": str(row["mode"]),
            "layout": str(row["layout"]),
            "ranks": str(row["ranks"]),
            "batch": str(row["global_batch"]),
            "step ms": number_text(row["step_ms"], ",.1f"),
            "tokens/s": number_text(row["tokens_per_s"], ",.0f"),
            "efficiency": percent(row["efficiency"]),
            "MFU": percent(row["mfu"]),
            "forecast: ms": number_text(row["forecast_ms"], ",.1f"),
            "its efficiency": percent(row["forecast_efficiency"]),
            "its MFU": percent(row["forecast_mfu"]),
        })
    return table_lines(
        shown, to_left=TEXT_COLUMNS, first_to_go=FIRST_TO_GO, width=width, whole_in="systems.csv"
    )


def number_text(value: object, form: str) -> str:
    return format(value, form) if isinstance(value, (int, float)) else "-"


def percent(share: object) -> str:
    return f"{share:.0%}" if isinstance(share, float) and math.isfinite(share) else "-"


def write_table(measured: list[MeasuredCell], path: Path) -> None:
    """Write the rows of at least one cell as a CSV; unknown values are empty."""
    rows = table_rows(measured)
    with open(path, "w", newline="") as file:
        writer = csv.DictWriter(file, list(rows[0]))
        writer.writeheader()
        writer.writerows(rows)
