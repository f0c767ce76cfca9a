"""Draw a pipeline's timeline, simulated or measured: as text for a terminal, or as a picture with matplotlib,
which is only imported when needed.

Later chunks of a rank have a lighter shade in the picture, and lower case in the text. Overlapping ops share
their row.
"""
import textwrap
from collections.abc import Iterator
from itertools import groupby
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

from config.plots import GRID, INK, new_figure, save_figure, set_title
from plan.simulate import Span, Timeline

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

Colour = tuple[float, float, float]  # red, green, blue, from 0 to 1

COLOURS = {"F": "#2f6db3", "B": "#d9742b", "I": "#c2497a", "W": "#2e9384"}
NAMES = {"F": "forward", "B": "backward", "I": "input gradient", "W": "weight gradient"}
EMPTY = "#f1f1f1"
FIRST_RANK: Colour = (0.13, 0.17, 0.35)  # for the memory curves
LAST_RANK: Colour = (0.75, 0.68, 0.80)
ROW_HEIGHT = 0.86  # relative to the distance between two ranks
LEGEND_STYLE = {"frameon": False, "fontsize": 8, "labelcolor": INK}

MAX_NUMBERS = 6000  # maximum ops with a drawn microbatch number; nobody reads more
MIN_NUMBER_SIZE = 4  # points; smaller numbers are omitted
DIGIT_WIDTH = 0.62  # relative to the font size
POINTS_OF_INCH = 72
TITLE_PAD = 24  # points above the rows, for the legend
TITLE_LETTERS_OF_INCH = 10  # per line of a title, which is 1 to 1.5 inches narrower than the picture


class Lane(NamedTuple):
    """A span's part of its row, which spans that start together share."""
    span: Span
    index: int
    lanes: int


def assign_lanes(spans: list[Span]) -> Iterator[Lane]:
    """Yield the spans with their lanes, in order."""
    for _, group in groupby(spans, lambda span: span.start):
        together = list(group)
        for index, span in enumerate(together):
            yield Lane(span, index, len(together))


def chunks_of(spans: list[Span]) -> dict[int, int]:
    """Return {stage: its index among the chunks of the rank}."""
    stages = sorted({span.op.stage for span in spans})
    return {stage: chunk for chunk, stage in enumerate(stages)}


# ---- text --------------------------------------------------------------------------------------------------


class TextScale(NamedTuple):
    """start: the time of column 0. unit: the time of `cell` columns."""
    start: float
    unit: float
    cell: int

    def column(self, time: float) -> int:
        return round((time - self.start) / self.unit * self.cell)


def text(timeline: Timeline, width: int) -> list[str]:
    """Return one line for each rank, at most `width` characters long.

    `F3` starts a forward of microbatch 3, `-` continues it, `.` is idle. Numbers that do not fit are omitted;
    a line that still does not fit ends in `>`.
    """
    labels = [f"rank {rank} " for rank in range(len(timeline.ranks))]
    margin = max(map(len, labels))
    available = max(width - margin - 2, 8)
    scale = text_scale(timeline, available)

    lines: list[str] = []
    for label, spans in zip(labels, timeline.ranks):
        row = text_row(spans, scale, scale.column(timeline.start + timeline.makespan))
        ending = "|" if len(row) <= available else ">"
        lines.append(f"{label.rjust(margin)}|{row[:available]}{ending}")
    return lines


def text_scale(timeline: Timeline, available: int) -> TextScale:
    """Return the widest cells with which all ops fit into `available` columns, up to the longest label."""
    durations: list[float] = []
    longest_number = 0
    for spans in timeline.ranks:
        for span, _, lanes in assign_lanes(spans):
            longest_number = max(longest_number, len(str(span.op.microbatch)))
            if span.end > span.start:
                durations.append((span.end - span.start) / lanes)
    durations.sort()

    # a measured op may be tiny: it must not stretch the line
    unit = max(durations[0], durations[len(durations) // 2] / 4)
    widest = longest_number + 2  # a letter, the number and a blank
    units = timeline.makespan / unit
    cell = widest
    while cell > 1 and units * cell > available:
        cell -= 1
    return TextScale(timeline.start, unit, cell)


def text_row(spans: list[Span], scale: TextScale, columns: int) -> str:
    chunk_of_stage = chunks_of(spans)
    row = ["."] * columns
    for span, index, lanes in assign_lanes(spans):
        duration = (span.end - span.start) / lanes
        first = scale.column(span.start + index * duration)
        last = scale.column(span.start + (index + 1) * duration)
        word = text_of_op(span, last - first)
        row[first:last] = word.lower() if chunk_of_stage[span.op.stage] else word
    return "".join(row)


def text_of_op(span: Span, columns: int) -> str:
    """Return exactly `columns` characters, with a blank at the end if it fits."""
    number = str(span.op.microbatch)
    word = span.op.kind if columns else ""
    if len(number) < columns:
        word += number
    has_blank = len(word) < columns
    return word.ljust(columns - has_blank, "-").ljust(columns)


# ---- picture -----------------------------------------------------------------------------------------------


def draw(timelines: list[tuple[str, Timeline]], out: Path, unit: str) -> Path:
    """Draw [(title, timeline)] with one time axis: a row for each rank, and its activations below.

    `unit` labels the time axis. The format is out's suffix (png, svg, pdf); out is replaced atomically.
    Raises OSError.
    """
    save_figure(make_figure(timelines, unit), out)
    return out


def make_figure(timelines: list[tuple[str, Timeline]], unit: str) -> "Figure":
    """Make the picture of `draw`."""
    heights: list[float] = []
    most_ops = 0
    for _, timeline in timelines:
        heights += [min(0.42 * len(timeline.ranks), 24.0), 1.1]
        most_ops = max(most_ops, *map(len, timeline.ranks))
    width = min(max(9.0, 0.24 * most_ops + 2.5), 36.0)
    figure = new_figure(width, sum(heights) + 1.1 * len(timelines) + 0.9)
    grid = figure.subplots(len(heights), 1, sharex=True, height_ratios=heights, squeeze=False)
    axes = grid[:, 0]

    for (title, timeline), rows, held in zip(timelines, axes[::2], axes[1::2]):
        draw_rows(rows, textwrap.fill(title, int(TITLE_LETTERS_OF_INCH * width)), timeline)
        draw_memory(held, timeline)
        rows.spines[:].set_visible(False)
        held.spines[["top", "right", "left"]].set_visible(False)
    for one in axes:
        one.tick_params(length=0, labelcolor=INK, labelsize=9)
    span = float(max(timeline.makespan for _, timeline in timelines))
    axes[-1].set_xlim(0, span)
    axes[-1].set_xlabel(f"time in {unit}", color=INK)

    figure.canvas.draw()  # computes the layout, which determines what fits into a rectangle
    for (_, timeline), rows in zip(timelines, axes[::2]):
        inches = rows.get_window_extent().width / figure.dpi
        draw_numbers(rows, timeline, inches * POINTS_OF_INCH / span)
    return figure


class Rectangle(NamedTuple):
    """A span in the picture. x, width: time. y, height: in ranks; the row of rank r is centered on y = r."""
    span: Span
    colour: Colour
    x: float
    y: float
    width: float
    height: float

    @property
    def corners(self) -> list[tuple[float, float]]:
        right = self.x + self.width
        top = self.y + self.height
        return [
            (self.x, self.y),
            (right, self.y),
            (right, top),
            (self.x, top),
        ]


def get_rectangles(timeline: Timeline) -> Iterator[Rectangle]:
    for rank, spans in enumerate(timeline.ranks):
        chunk_of_stage = chunks_of(spans)
        for span, index, lanes in assign_lanes(spans):
            height = ROW_HEIGHT / lanes
            yield Rectangle(
                span,
                shade(span.op.kind, chunk_of_stage[span.op.stage], len(chunk_of_stage)),
                x=float(span.start - timeline.start),
                y=rank - ROW_HEIGHT / 2 + index * height,
                width=float(span.end - span.start),
                height=height,
            )


def shade(kind: str, chunk: int, chunks: int) -> Colour:
    """Return the color of a kind, lighter for later chunks."""
    white = 0.5 * chunk / (chunks - 1) if chunks > 1 else 0.0
    red, green, blue = bytes.fromhex(COLOURS[kind].removeprefix("#"))
    return lighter(red, white), lighter(green, white), lighter(blue, white)


def lighter(value: int, white: float) -> float:
    """Mix a channel `value` (0 to 255) with white, from 0 (unchanged) to 1."""
    share = value / 255
    return share + (1 - share) * white


def draw_rows(axes: "Axes", title: str, timeline: Timeline) -> None:
    """Draw the ops of each rank."""
    from matplotlib.collections import PolyCollection

    ranks = range(len(timeline.ranks))
    makespan = float(timeline.makespan)
    axes.barh(ranks, makespan, height=ROW_HEIGHT, color=EMPTY, lw=0)  # uncovered parts are idle
    rectangles = list(get_rectangles(timeline))
    axes.add_collection(PolyCollection(
        [rectangle.corners for rectangle in rectangles],
        facecolors=[rectangle.colour for rectangle in rectangles],
        edgecolors="white",
        linewidths=0.6,
    ))
    axes.set_ylim(len(ranks) - 0.5, -0.5)
    axes.set_yticks(ranks, [f"rank {rank}" for rank in ranks])
    set_title(axes, title, TITLE_PAD)
    draw_legend(axes, timeline)


def draw_legend(axes: "Axes", timeline: Timeline) -> None:
    """Draw a legend of the kinds of ops that occur."""
    from matplotlib.patches import Patch

    present = {span.op.kind for spans in timeline.ranks for span in spans}
    entries: list[Patch] = []
    for kind, colour in COLOURS.items():
        if kind in present:
            entries.append(Patch(color=colour, label=f"{kind}  {NAMES[kind]}"))
    entries.append(Patch(color=EMPTY, label="idle"))
    if any(len(chunks_of(spans)) > 1 for spans in timeline.ranks):
        entries.append(Patch(alpha=0, label="lighter: later chunk"))
    axes.legend(
        handles=entries,
        loc="lower right",
        bbox_to_anchor=(1, 1),
        ncols=len(entries),
        handlelength=1,
        borderaxespad=0.3,
        columnspacing=1.4,
        **LEGEND_STYLE,
    )


def draw_numbers(axes: "Axes", timeline: Timeline, points: float) -> None:
    """Draw microbatch numbers in rectangles with enough space. `points` is the size of a unit of time."""
    if sum(map(len, timeline.ranks)) > MAX_NUMBERS:
        return
    for rectangle in get_rectangles(timeline):
        number = str(rectangle.span.op.microbatch)
        fits_width = 0.85 * rectangle.width * points / (DIGIT_WIDTH * len(number))
        size = min(8.5 if rectangle.height > 0.5 else 6.5, fits_width)
        if size >= MIN_NUMBER_SIZE:
            axes.text(
                rectangle.x + rectangle.width / 2,
                rectangle.y + rectangle.height / 2,
                number,
                size=size,
                color="white" if sum(rectangle.colour) < 1.9 else INK,
                ha="center",
                va="center_baseline",
            )


def draw_memory(axes: "Axes", timeline: Timeline) -> None:
    """Draw the activations of each rank over time, in microbatches of its whole share (a chunk counts
    1/v)."""
    last = len(timeline.ranks) - 1
    for rank, spans in enumerate(timeline.ranks):
        chunks = len(chunks_of(spans))
        curve = [(timeline.start, 0), *timeline.memory(rank)]
        axes.step(
            [float(time - timeline.start) for time, _ in curve],
            [held / chunks for _, held in curve],
            where="post",
            lw=1.3,
            color=colour_of_rank(rank / len(timeline.ranks)),
            label=f"rank {rank}" if rank in (0, last) else None,
        )
    axes.set_ylim(0)
    axes.locator_params(axis="y", integer=True, nbins=5)
    axes.set_ylabel("microbatches\nheld", color=INK, fontsize=9)
    axes.legend(loc="lower right", bbox_to_anchor=(1, 0.94), ncols=2, **LEGEND_STYLE)
    axes.grid(axis="y", color=GRID, lw=0.6)
    axes.set_axisbelow(True)


def colour_of_rank(position: float) -> Colour:
    """Return the color at a position from 0, the first rank, to 1."""
    red, green, blue = (first + (last - first) * position for first, last in zip(FIRST_RANK, LAST_RANK))
    return red, green, blue
