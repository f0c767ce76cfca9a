"""Draw a pipeline's timeline, simulated or measured: as text for a terminal, or as a picture (matplotlib, which is
imported only when called).

A later chunk of a rank is a lighter shade in the picture and lower case in the text. Ops that overlap share their row.
"""
import os
from collections.abc import Iterator
from itertools import groupby
from pathlib import Path

from plan.simulate import Span, Timeline

COLOURS = {"F": "#2f6db3", "B": "#d9742b", "I": "#c2497a", "W": "#2e9384"}
NAMES = {"F": "forward", "B": "backward", "I": "input gradient", "W": "weight gradient"}
INK, EMPTY = "#333333", "#f1f1f1"
DARK, LIGHT = (0.13, 0.17, 0.35), (0.75, 0.68, 0.80)  # of the memory curves, from the first rank to the last
TEXTS = 6000  # numbers drawn at most; beyond that nobody reads them


def laid(spans: list[Span]) -> Iterator[tuple[Span, int, int]]:
    """(span, its lane, lanes): spans that start together share the row."""
    for _, together in groupby(spans, lambda s: s.start):
        lanes = list(together)
        yield from ((span, lane, len(lanes)) for lane, span in enumerate(lanes))


def chunks_of(spans: list[Span]) -> dict[int, int]:
    """stage -> which chunk of its rank it is."""
    return {stage: chunk for chunk, stage in enumerate(sorted({s.op.stage for s in spans}))}


# ---- text ------------------------------------------------------------------------------------------------------------

def text(timeline: Timeline, width: int) -> list[str]:
    """One line a rank, at most `width` characters: `F3` runs a forward of microbatch 3, `-` still runs it, `.` is idle.

    Numbers are left out where they do not fit; what still does not fit is cut and ends in `>`.
    """
    labels = [f"rank {r} " for r in range(len(timeline.ranks))]
    margin = max(map(len, labels))
    room = max(width - margin - 2, 8)
    times = sorted((s.end - s.start) / n for rank in timeline.ranks for s, _, n in laid(rank) if s.end > s.start)
    unit = max(times[0], times[len(times) // 2] / 4)  # a measured op may be tiny; it shall not stretch the line
    widest = max(len(str(s.op.mb)) for rank in timeline.ranks for s in rank) + 2  # letter, number and a blank
    cell = next((c for c in range(widest, 0, -1) if timeline.makespan / unit * c <= room), 1)

    def column(time) -> int:
        return round((time - timeline.start) / unit * cell)

    lines = []
    for label, rank in zip(labels, timeline.ranks):
        chunk = chunks_of(rank)
        line = ["."] * column(timeline.start + timeline.makespan)
        for span, lane, lanes in laid(rank):
            part = (span.end - span.start) / lanes
            a, b = column(span.start + lane * part), column(span.start + (lane + 1) * part)
            word = f"{span.op.kind}{span.op.mb}" if len(str(span.op.mb)) < b - a else span.op.kind * (b > a)
            word = word.ljust(b - a - (len(word) < b - a), "-").ljust(b - a)  # a blank at the end where there is room
            line[a:b] = word.lower() if chunk[span.op.stage] else word
        row = "".join(line)
        lines.append(label.rjust(margin) + "|" + (row + "|" if len(row) <= room else row[:room] + ">"))
    return lines


# ---- picture ---------------------------------------------------------------------------------------------------------

def draw(timelines: list[tuple[str, Timeline]], out: Path) -> Path:
    """One picture of [(title, timeline)], under one time axis: a row a rank, and below it the activations held.

    The format is out's suffix (png, svg, pdf); out is replaced atomically. Raises OSError.
    """
    from matplotlib.backends.backend_agg import FigureCanvasAgg  # no pyplot: it has global state and asks for displays
    from matplotlib.figure import Figure

    span = max(t.makespan for _, t in timelines)
    boxes = max(len(rank) for _, t in timelines for rank in t.ranks)
    wide = min(max(9.0, 0.24 * boxes + 2.5), 36.0)
    heights = [h for _, t in timelines for h in (min(0.42 * len(t.ranks), 24.0), 1.1)]
    size = (wide, sum(heights) + 0.75 * len(timelines) + 0.9)
    figure = Figure(figsize=size, dpi=130, facecolor="white", layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.subplots(len(heights), 1, sharex=True, height_ratios=heights, squeeze=False)[:, 0]
    for (title, timeline), rows, held in zip(timelines, axes[::2], axes[1::2]):
        gantt(rows, title, timeline)
        memory(held, timeline)
        rows.spines[:].set_visible(False)
        held.spines[["top", "right", "left"]].set_visible(False)
        for a in (rows, held):
            a.tick_params(length=0, labelcolor=INK, labelsize=9)
    axes[-1].set_xlim(0, float(span))
    axes[-1].set_xlabel("time", color=INK)
    figure.canvas.draw()  # settles the layout, so that what fits in a box is known
    for (_, timeline), rows in zip(timelines, axes[::2]):
        numbers(rows, timeline, rows.get_window_extent().width / figure.dpi * 72 / float(span))
    temp = out.with_name(f".{out.stem}.tmp{out.suffix}")
    figure.savefig(temp)
    os.replace(temp, out)
    return out


def shade(kind: str, chunk: int, chunks: int) -> tuple[float, float, float]:
    """The colour of a kind, the lighter the later the chunk."""
    white = 0.5 * chunk / (chunks - 1) if chunks > 1 else 0
    rgb = (int(COLOURS[kind][i:i + 2], 16) / 255 for i in (1, 3, 5))
    return tuple(c + (1 - c) * white for c in rgb)


def boxes_of(timeline: Timeline) -> Iterator[tuple[Span, tuple[float, float, float], float, float, float, float]]:
    """(span, colour, x, y, width, height) in units of time and ranks; rank r's row is y in [r - 0.43, r + 0.43]."""
    zero = timeline.start
    for r, rank in enumerate(timeline.ranks):
        chunk = chunks_of(rank)
        for span, lane, lanes in laid(rank):
            high = 0.86 / lanes
            colour = shade(span.op.kind, chunk[span.op.stage], len(chunk))
            yield span, colour, float(span.start - zero), r - 0.43 + lane * high, float(span.end - span.start), high


def gantt(axes, title: str, timeline: Timeline) -> None:
    from matplotlib.collections import PolyCollection
    from matplotlib.patches import Patch

    p = len(timeline.ranks)
    axes.barh(range(p), float(timeline.makespan), height=0.86, color=EMPTY, lw=0)  # what stays visible is idle
    corners, colours = [], []
    for _, colour, x, y, w, h in boxes_of(timeline):
        corners.append([(x, y), (x + w, y), (x + w, y + h), (x, y + h)])
        colours.append(colour)
    axes.add_collection(PolyCollection(corners, facecolors=colours, edgecolors="white", linewidths=0.6))
    axes.set_ylim(p - 0.5, -0.5)
    axes.set_yticks(range(p), [f"rank {r}" for r in range(p)])
    axes.set_title(title, loc="left", fontsize=11, color=INK)
    kinds = [k for k in COLOURS if any(s.op.kind == k for rank in timeline.ranks for s in rank)]
    legend = [Patch(color=COLOURS[k], label=f"{k}  {NAMES[k]}") for k in kinds] + [Patch(color=EMPTY, label="idle")]
    if any(len(chunks_of(rank)) > 1 for rank in timeline.ranks):
        legend.append(Patch(alpha=0, label="lighter: later chunk"))
    axes.legend(handles=legend, loc="lower right", bbox_to_anchor=(1, 1), ncols=len(legend), frameon=False, fontsize=8,
                labelcolor=INK, handlelength=1, borderaxespad=0.3, columnspacing=1.4)


def numbers(axes, timeline: Timeline, points: float) -> None:
    """Microbatch numbers into the boxes that have room; points: per unit of time."""
    if sum(map(len, timeline.ranks)) > TEXTS:
        return
    for span, colour, x, y, w, h in boxes_of(timeline):
        size = min(8.5 if h > 0.5 else 6.5, 0.85 * w * points / (0.62 * len(str(span.op.mb))))
        if size >= 4:
            ink = "white" if sum(colour) < 1.9 else INK
            axes.text(x + w / 2, y + h / 2, span.op.mb, size=size, color=ink, ha="center", va="center_baseline")


def memory(axes, timeline: Timeline) -> None:
    """Activations held by each rank over time, in microbatches of its whole share (a chunk counts 1/v)."""
    p = len(timeline.ranks)
    for r, rank in enumerate(timeline.ranks):
        v = len(chunks_of(rank))
        curve = [(timeline.start, 0), *timeline.memory(r)]
        colour = tuple(dark + (light - dark) * r / p for dark, light in zip(DARK, LIGHT))
        axes.step([float(t - timeline.start) for t, _ in curve], [held / v for _, held in curve], where="post", lw=1.3,
                  color=colour, label=f"rank {r}" if r in (0, p - 1) else None)
    axes.set_ylim(0)
    axes.yaxis.get_major_locator().set_params(integer=True, nbins=5)
    axes.set_ylabel("microbatches\nheld", color=INK, fontsize=9)
    axes.legend(loc="lower right", bbox_to_anchor=(1, 0.94), frameon=False, fontsize=8, labelcolor=INK, ncols=2)
    axes.grid(axis="y", color="#e6e6e6", lw=0.6)
    axes.set_axisbelow(True)
