"""Statistics of each layer (log.inside_every) in a run folder: inside.jsonl, and inside.png drawn from it.

A line is one recorded step:

    {"step": 10, "grad_norm/attn.q": [0.12, 0.11], "grad_norm/head": 0.4, "block_rms": [1.0, 1.1], ...}

A list has a number for each layer, and null where a layer has none or it is not finite; a number is of a part
outside of the layers. model/inside.py defines them. W&B and TensorBoard get each as a scalar, such as
inside/grad_norm/layer_00/attn.q. The file has each step once, as metrics.jsonl does (lines.py).
"""
import math
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from config import ModelConfig, modules_ahead
from config.plots import INK, new_figure, plain_text, save_figure, set_title
from model.inside import Statistic, statistics_of
from runtime.lines import INSIDE, LINE, MetricsFile, Rows, parse_numbers

if TYPE_CHECKING:
    from matplotlib.axes import Axes

COLUMNS = 512  # maximum steps in a picture
MAX_LAYER_LABELS = 12
PANEL_WIDTH, PANEL_HEIGHT = 5.2, 2.4  # inches

# {what a picture shows, in this order: (its title, whether it spans orders of magnitude)}
PANELS = {
    "grad_norm": ("gradient norm", True),
    "weight_norm": ("weight norm", True),
    "update_norm": ("update norm", True),
    "update_ratio": ("update norm / weight norm", True),
    "block_rms": ("rms of the block's output", True),
    "mixer_rms": ("rms of what the mixer gives", True),
    "mlp_rms": ("rms of what the MLP gives", True),
    "dead_units": ("share of dead units", False),
    "largest_logit": ("largest attention logit", False),
    "router_entropy": ("entropy of the router's mean (nats)", False),
    "expert_share": ("share of the most chosen expert", False),
}


class InsideLog:
    """Write the statistics of the recorded steps. start_step: the step that the run resumes from.

    Raises OSError if lines of steps that will be trained again cannot be removed.
    """

    def __init__(self, run_dir: Path, model: ModelConfig, start_step: int) -> None:
        self.names = statistics_of(model)
        self.num_layers = model.layers + modules_ahead(model)
        self.file = MetricsFile(run_dir, start_step, INSIDE)

    def add(self, step: int, values: list[float]) -> dict[str, float]:
        """Append a line. values: as LayerStatistics.latest. Returns the finite ones by their names in the
        sinks."""
        row: dict[str, Any] = {"step": step}
        shown: dict[str, float] = {}
        for name, value in zip(self.names, values, strict=True):
            known = value if math.isfinite(value) else None
            key = "/".join(filter(None, (name.name, name.kind)))
            if name.layer is None:
                row[key] = known
            else:
                row.setdefault(key, [None] * self.num_layers)[name.layer] = known
            if known is not None:
                shown[sink_name(name, self.num_layers)] = known
        self.file.add([row])
        return shown


def sink_name(name: Statistic, num_layers: int) -> str:
    """Return a name such as inside/grad_norm/layer_03/attn.q; layers have as many digits as the last one."""
    digits = max(2, len(str(num_layers - 1)))
    layer = "" if name.layer is None else f"layer_{name.layer:0{digits}}"
    return "/".join(filter(None, ("inside", name.name, layer, name.kind)))


def read_inside(run_dir: Path, max_rows: int = COLUMNS) -> Rows:
    """Return the rows of inside.jsonl, in order: at most max_rows of them, evenly spaced with the first and
    the last. Damaged lines are left out."""
    path = Path(run_dir) / INSIDE
    if not path.exists():
        return []
    with open(path, "rb") as file:
        count = sum(LINE.fullmatch(line) is not None for line in file)
    wanted = set(np.linspace(0, count - 1, min(count, max_rows)).astype(int).tolist())
    rows: Rows = []
    with open(path, "rb") as file:
        for index, line in enumerate(line for line in file if LINE.fullmatch(line)):
            row = parse_numbers(line) if index in wanted else None
            if row is not None:
                rows.append(row)
    return rows


# ---- the picture -------------------------------------------------------------------------------------------


def inside_png(run_dir: Path, title: str = "") -> Path | None:
    """Draw run_dir/inside.png: a heat map of layers over steps for each statistic.

    Norms of a layer are those of all its parameters together; the parts outside of the layers have rows of
    their own. Returns the file, or None if there is nothing to draw. Raises OSError.
    """
    rows = read_inside(run_dir)
    maps = {name: heat_map(rows, name) for name in PANELS}
    maps = {name: found for name, found in maps.items() if found is not None}
    if not maps:
        return None
    lines = -(-len(maps) // 2)
    figure = new_figure(2 * PANEL_WIDTH, lines * PANEL_HEIGHT + 0.4)
    heading = "inside the layers" + (f" · {title}" if title else "")
    figure.suptitle(plain_text(heading), x=0.01, ha="left", color=INK)
    grid = figure.subplots(lines, 2, squeeze=False).flatten()
    steps = np.array([row["step"] for row in rows])
    for axes, (name, (labels, values)) in zip(grid, maps.items()):
        draw_map(axes, steps, labels, values, *PANELS[name])
    for axes in grid[len(maps):]:
        axes.set_visible(False)
    for axes in grid[:len(maps)][-2:]:
        axes.set_xlabel("step", color=INK, fontsize=8)
    out = Path(run_dir) / "inside.png"
    save_figure(figure, out)
    return out


def heat_map(rows: Rows, name: str) -> tuple[list[str], np.ndarray] | None:
    """Return (labels of the lines, values [lines, steps]) of a statistic, or None if no row has it. NaN where
    there is no number."""
    if name == "update_ratio":
        updates, weights = heat_map(rows, "update_norm"), heat_map(rows, "weight_norm")
        if updates is None or weights is None:
            return None
        with np.errstate(divide="ignore", invalid="ignore"):
            return updates[0], updates[1] / weights[1]
    keys = [key for key in (rows[0] if rows else ()) if key.partition("/")[0] == name]
    if not keys:
        return None
    of_layers = [key for key in keys if isinstance(rows[0][key], list)]
    outside = [key for key in keys if key not in of_layers]
    numbers = {key: np.array([row.get(key) for row in rows], float) for key in keys}  # None: NaN
    labels: list[str] = []
    values: list[np.ndarray] = []
    if of_layers:
        stacked = np.stack([numbers[key] for key in of_layers])  # [kinds, steps, layers]
        has_none = np.isnan(stacked).all(0)
        merged = stacked[0] if len(stacked) == 1 else np.sqrt(np.nansum(stacked**2, 0))
        values += list(np.where(has_none, np.nan, merged).T)
        labels += [str(layer) for layer in range(len(values))]
    for key in outside:
        values.append(numbers[key])
        labels.append(key.partition("/")[2].removeprefix("outer_"))
    return labels, np.stack(values)


def draw_map(
    axes: "Axes", steps: np.ndarray, labels: list[str], values: np.ndarray, title: str, spans_orders: bool
) -> None:
    """Draw one heat map. values [lines, steps]."""
    from matplotlib.colors import LogNorm

    positive = values[np.isfinite(values) & (values > 0)]
    norm = None
    if spans_orders and positive.size:
        low, high = np.quantile(positive, (0.01, 0.99))
        norm = LogNorm(low, max(high, low * 1.01), clip=True)
        values = np.where(values > 0, values, np.nan)
    image = axes.imshow(values, aspect="auto", interpolation="nearest", cmap="viridis", norm=norm)
    axes.set_facecolor("#f2f2f2")  # where there is no number

    # a line of the picture for each layer, a column for each recorded step
    layers = sum(label.isdigit() for label in labels)
    apart = max(1, -(-layers // MAX_LAYER_LABELS))
    shown = [row for row in range(len(labels)) if row >= layers or row % apart == 0]
    axes.set_yticks(shown, [plain_text(labels[row]) for row in shown])
    columns = np.unique(np.linspace(0, len(steps) - 1, min(len(steps), 6)).astype(int))
    axes.set_xticks(columns, [f"{steps[column]:,}" for column in columns])
    if layers < len(labels) and layers:
        axes.axhline(layers - 0.5, color="white", lw=1.2)
    axes.set_ylabel("layer", color=INK, fontsize=8)
    set_title(axes, title)
    axes.tick_params(length=0, labelcolor=INK, labelsize=7)
    axes.spines[:].set_visible(False)
    scale = {} if norm is None else {"ticks": np.geomspace(norm.vmin, norm.vmax, 4), "format": "%.2g"}
    bar = axes.figure.colorbar(image, ax=axes, pad=0.02, **scale)
    bar.minorticks_off()
    bar.ax.tick_params(labelsize=7, labelcolor=INK)
    bar.outline.set_visible(False)
