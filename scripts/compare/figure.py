"""Figures for a paper: one panel of a fixed width in inches, with a font of a given size, as PDF, SVG or PNG.

Groups of several seeds are means with their bands, as the page shows them at first; other runs are single
lines. The legend is below the panel, where it hides no curve, and adds its height to the figure.
"""
import difflib
import textwrap
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from config import ConfigError
from config.numbers import short_number
from config.plots import font_names, new_figure, save_figure, set_open_frame, text_style
from plan.points import Array
from scripts.compare.groups import SeedStudy
from scripts.compare.runs import (
    HIDDEN_SHARE,
    Run,
    choose_looks,
    draw_means,
    draw_single_runs,
    loss_limits,
)

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

FORMATS = (".pdf", ".svg", ".png")
X_AXES: dict[str, Callable[[Run], Array]] = {
    "tokens": lambda run: run.tokens,
    "steps": lambda run: run.steps,
    "FLOPs": lambda run: run.flops,
}
PANEL_RATIO = 0.62  # height of the panel over the width of the figure
DESIGN_SIZE = 10.0  # points of text at which lines are as wide as on the page
LETTER_WIDTH = 0.55  # of an average letter, over the font size
LINE_HEIGHT = 1.5  # of the legend, over the font size
HANDLE_LETTERS = 6  # what the line of an entry and the gaps around it take
PNG_DPI = 300


@dataclass(frozen=True)
class FigureStyle:
    """width: of the figure, in inches. font: a name, or None for matplotlib's. size: of all text, in points.
    x: a key of X_AXES. log_x, log_y: whether an axis is logarithmic."""
    width: float
    font: str | None
    size: float
    x: str
    log_x: bool
    log_y: bool


def check_style(path: Path, style: FigureStyle) -> None:
    """Raise ConfigError, naming the option, if the figure cannot be drawn."""
    if path.suffix not in FORMATS:
        raise ConfigError(f"--figure: {path} ends in none of {', '.join(FORMATS)}")
    if not 1 <= style.width <= 40:
        raise ConfigError(f"--width: {style.width:g} inches; from 1 to 40, such as 3.25 for a column")
    if not 3 <= style.size <= 40:
        raise ConfigError(f"--font-size: {style.size:g} points; from 3 to 40")
    if style.font is not None and style.font not in font_names():
        near = difflib.get_close_matches(style.font, font_names(), 3)
        hint = f"did you mean {' or '.join(near)}?" if near else "serif, sans-serif and monospace are there"
        raise ConfigError(f"--font: matplotlib finds no {style.font}; {hint}")


def write_figure(runs: list[Run], study: SeedStudy | None, path: Path, style: FigureStyle) -> None:
    """Draw the losses and replace the file. Raises OSError."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with text_style(style.font, style.size):
        save_figure(draw_figure(runs, study, style), path)


def draw_figure(runs: list[Run], study: SeedStudy | None, style: FigureStyle) -> "Figure":
    """Draw the losses of the runs over style.x."""
    figure = new_figure(style.width, PANEL_RATIO * style.width, dpi=PNG_DPI)
    axes = figure.subplots()

    # curves
    scale = style.size / DESIGN_SIZE
    looks = choose_looks(runs, study)
    in_a_mean = looks.in_a_mean
    alone = [run for run in runs if run.name not in in_a_mean]
    draw_means(axes, style.x, X_AXES[style.x], looks, scale=scale)
    draw_single_runs(axes, X_AXES[style.x], alone, looks, scale=scale)

    # axes; a logarithmic one shows the first steps, which take much of it
    limits = loss_limits(runs, 0.0 if style.log_x else HIDDEN_SHARE)
    if limits is not None:
        axes.set_ylim(max(limits[0], limits[1] / 1e6) if style.log_y else limits[0], limits[1])
    axes.set_xlabel(style.x)
    axes.set_ylabel("loss (nats per token)")
    set_open_frame(axes)
    set_scale(axes, "x", style.log_x)
    set_scale(axes, "y", style.log_y)
    add_legend(figure, axes, style)
    return figure


def set_scale(axes: "Axes", which: str, is_log: bool) -> None:
    """Set a linear or logarithmic axis whose ticks are numbers such as 1.5M, however short its range is."""
    from matplotlib.ticker import FuncFormatter, LogLocator, MaxNLocator, NullLocator

    axis: Any = getattr(axes, f"{which}axis")
    ticks: Any = MaxNLocator(5)
    if is_log:
        getattr(axes, f"set_{which}scale")("log")
        low, high = getattr(axes, f"get_{which}lim")()
        if high >= 10 * low:
            ticks = LogLocator(subs=(1, 2, 5) if high < 100 * low else (1,), numticks=8)
        axis.set_minor_locator(NullLocator())
    axis.set_major_locator(ticks)
    axis.set_major_formatter(FuncFormatter(lambda value, _: tick_text(value)))


def tick_text(value: float) -> str:
    """Return the text of a tick: 2.5, 1.5M, 2e+18."""
    if abs(value) < 1000 or abs(value) >= 1e15:
        return f"{value:.4g}"
    text = short_number(value)  # 10.0K
    return f"{float(text[:-1]):g}{text[-1]}"  # 10K


def add_legend(figure: "Figure", axes: "Axes", style: FigureStyle) -> None:
    """Add the legend below the panel, in at most three columns, and add its height to the figure."""
    # columns that fit, and names that fit into them
    handles, names = axes.get_legend_handles_labels()
    letters = style.width * 72 / (LETTER_WIDTH * style.size)  # in a line of the figure
    columns = max(1, min(len(names), 3, int(letters / (max(map(len, names)) + HANDLE_LETTERS))))
    longest = int(letters / columns) - HANDLE_LETTERS
    wrapped = ["\n".join(textwrap.wrap(name, longest, break_on_hyphens=False)) for name in names]

    lines = sum(name.count("\n") + 1 for name in wrapped)
    rows = -(-lines // columns)
    figure.set_figheight(PANEL_RATIO * style.width + LINE_HEIGHT * rows * style.size / 72)
    figure.legend(
        handles,
        wrapped,
        loc="outside lower center",
        ncols=columns,
        frameon=False,
        fontsize=style.size,
        handlelength=2.2,
        columnspacing=1.2,
        labelspacing=0.3,
        borderpad=0.1,
    )
