"""Figures of a scaling experiment. matplotlib is imported only when one is drawn."""
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np

from config.plots import INK, new_figure, save_figure, set_open_frame, set_title, shades
from lab.scaling.optimum import Optimum, Parabola, envelope
from lab.scaling.scores import ScoreLaw, sigmoid
from lab.scaling.sweep import CriticalBatch, SweepCurve
from lab.scaling.systems import MODES, MeasuredCell, efficiencies
from plan.laws import Fit
from plan.points import SMOOTHING, Array, Points, smoothed

BEST = "#b3362b"
HOLLOW = {"marker": "o", "ms": 5, "mfc": "none"}  # for a forecast of a single point
WIDTH, HEIGHT = 7.2, 4.8  # of a panel, in inches
DPI = 140
CURVE_POINTS = 200
MAX_SHOWN_NAMES = 10  # maximum sizes in a legend; with more, only the smallest and the largest are named
MAX_DRAWN = 1500  # maximum points per training curve


@contextmanager
def figure(path: Path, title: str, x_label: str, y_label: str) -> Iterator[Any]:
    """Yield the axes of a figure that is written to `path` on exit."""
    with panels(path, [title], x_label, y_label) as every:
        yield every[0]


@contextmanager
def panels(path: Path, titles: list[str], x_label: str, y_label: str) -> Iterator[list[Any]]:
    """Yield the axes of a figure with one panel per title, side by side, written to `path` on exit."""
    drawing = new_figure(WIDTH * (1 + 0.7 * (len(titles) - 1)), HEIGHT, dpi=DPI)
    every = list(drawing.subplots(1, len(titles), squeeze=False, sharey=True)[0])
    for axes, title in zip(every, titles):
        set_title(axes, title)
        axes.set_xlabel(x_label)
        set_open_frame(axes)
    every[0].set_ylabel(y_label)
    yield every
    save_figure(drawing, path)


def draw_isoflop(points: Points, parabolas: list[Parabola], path: Path) -> None:
    """Plot losses over sizes at equal FLOPs, with the parabolas and their vertices."""
    with figure(path, "loss at equal FLOPs", "parameters", "validation loss (nats per token)") as axes:
        axes.set_xscale("log")
        log_sizes = np.log(points.parameters)
        sizes = np.exp(np.linspace(log_sizes.min() - 0.2, log_sizes.max() + 0.2, CURVE_POINTS))
        for parabola, colour in zip(parabolas, shades(len(parabolas))):
            near = np.abs(np.log(points.flops / parabola.flops)) < np.log(2) / 2
            axes.plot(points.parameters[near], points.loss[near], "o", color=colour, ms=5,
                      label=f"{parabola.flops:.2g} FLOPs")
            axes.plot(sizes, parabola(sizes), color=colour, lw=1.2)
            vertex = np.exp(parabola.log_size)
            axes.plot(vertex, parabola.least, "*", color=BEST, ms=11, mec="white", zorder=3)
        spread = np.ptp(points.loss)
        axes.set_ylim(points.loss.min() - 0.1 * spread, points.loss.max() + 0.1 * spread)
        axes.legend(frameon=False, fontsize=9)


def draw_envelope(curves: dict[float, tuple[Array, Array]], path: Path) -> None:
    """Plot training losses over FLOPs for all sizes, and their lower envelope."""
    smooth = {size: (flops, smoothed(flops, loss)) for size, (flops, loss) in curves.items()}
    title = f"training loss over FLOPs, mean over the last {SMOOTHING:.0%} before a point, with its envelope"
    with figure(path, title, "FLOPs", "training loss (nats per token)") as axes:
        axes.set_xscale("log")
        for (size, (flops, loss)), colour in zip(smooth.items(), shades(len(smooth))):
            shown = np.unique(np.geomspace(1, len(flops), MAX_DRAWN).astype(int)) - 1
            axes.plot(flops[shown], loss[shown], color=colour, lw=1.2, label=f"{size:,.0f} parameters")
        budgets, _, losses = envelope(smooth)
        axes.plot(budgets, losses, color=BEST, lw=2.2, label="least at each budget")
        late = np.concatenate([loss[len(loss) // 20:] for _, loss in smooth.values()])
        axes.set_ylim(0.97 * np.nanmin(late), 1.02 * np.nanmax(late))
        axes.legend(frameon=False, fontsize=9)


def draw_contours(points: Points, fit: Fit, optimum: Optimum | None, path: Path) -> None:
    """Plot contours of the predicted loss over FLOPs and sizes, the runs, and the optimal size per budget if
    the law has one."""
    title = f"loss = {fit.law.formula}"
    with figure(path, title, "FLOPs", "parameters") as axes:
        axes.set_xscale("log")
        axes.set_yscale("log")
        flops = np.geomspace(points.flops.min() / 2, points.flops.max() * 4, CURVE_POINTS)
        sizes = np.geomspace(points.parameters.min() / 2, points.parameters.max() * 2, CURVE_POINTS)
        tokens = flops[None, :] / (points.flops_factor * sizes[:, None])
        log_n = np.broadcast_to(np.log(sizes)[:, None], tokens.shape).ravel()
        predicted = np.exp(fit.law.log_loss(fit.theta, log_n, np.log(tokens).ravel())).reshape(tokens.shape)
        least, most = points.loss.min(), points.loss.max()
        levels = np.linspace(least - 0.3 * (most - least), most + 0.3 * (most - least), 14)
        lines = axes.contour(flops, sizes, predicted, levels=levels, cmap="viridis", linewidths=1)
        axes.clabel(lines, fontsize=8, fmt="%.2f")
        axes.plot(points.flops, points.parameters, "o", color=INK, ms=4, label="runs")
        if optimum is not None:
            best = np.array([optimum.parameters(budget) for budget in flops])
            exponent = optimum.parameters.exponent
            axes.plot(flops, best, color=BEST, lw=2, label=f"best size, ~ C^{exponent:.2f}")
        axes.set_ylim(sizes[0], sizes[-1])
        # place the legend above the axes, which the lines fill
        axes.legend(loc="lower right", bbox_to_anchor=(1, 1), ncols=2, frameon=False, fontsize=9)


def draw_fit(points: Points, fit: Fit, path: Path) -> None:
    """Plot measured losses against those predicted by the law."""
    title = "measured loss beside that of the law"
    with figure(path, title, "loss of the law", "measured loss (nats per token)") as axes:
        predicted = np.exp(fit.law.log_loss(fit.theta, np.log(points.parameters), np.log(points.tokens)))
        ends = [min(predicted.min(), points.loss.min()), max(predicted.max(), points.loss.max())]
        axes.plot(ends, ends, color=BEST, lw=1)
        sizes = points.sizes
        for size, colour in zip(sizes, shades(len(sizes))):
            own = points.parameters == size
            is_named = len(sizes) <= MAX_SHOWN_NAMES or size in (sizes[0], sizes[-1])
            label = f"{size:,.0f} parameters" if is_named else None
            axes.plot(predicted[own], points.loss[own], "o", color=colour, ms=5, label=label)
        axes.legend(frameon=False, fontsize=9)


def draw_scores(points: Points, laws: Sequence[ScoreLaw], path: Path) -> None:
    """Plot the scores of tasks over the loss, with their fitted curves."""
    title = "scores over the loss"
    with figure(path, title, "validation loss (nats per token)", "centered score") as axes:
        spread = np.ptp(points.loss)
        losses = np.linspace(points.loss.min() - 0.3 * spread, points.loss.max() + 0.1 * spread, CURVE_POINTS)
        for law, colour in zip(laws, shades(len(laws))):
            axes.plot(losses, sigmoid(law.theta, losses), color=colour, lw=1.2)
            axes.plot(points.loss, points.scores[law.name], "o", color=colour, ms=5, label=law.name)
        axes.legend(frameon=False, fontsize=9)


def draw_rates(curves: list[SweepCurve], path: Path) -> None:
    """Plot final losses over learning rates, one line per batch size, with the minima marked."""
    title = "loss over the learning rate, at equal tokens"
    with figure(path, title, "learning rate", "validation loss (nats per token)") as axes:
        axes.set_xscale("log")
        batches = sorted({curve.run.batch_tokens for curve in curves})
        for batch, colour in zip(batches, shades(len(batches))):
            own = [curve for curve in curves if curve.run.batch_tokens == batch]
            own = sorted((curve for curve in own if np.isfinite(curve.final_loss)), key=lambda c: c.run.rate)
            if not own:
                continue
            rates, losses = [curve.run.rate for curve in own], [curve.final_loss for curve in own]
            axes.plot(rates, losses, "o-", color=colour, lw=1.2, ms=5, label=f"batch of {batch:,} tokens")
            least = int(np.argmin(losses))
            axes.plot(rates[least], losses[least], "*", color=BEST, ms=11, mec="white", zorder=3)
        axes.legend(frameon=False, fontsize=9)


def draw_critical_batch(critical: CriticalBatch, path: Path) -> None:
    """Plot steps to the target over the batch size, with the fitted law, critical batch and noise scale."""
    title = f"steps to a training loss of {critical.target:.3f}"
    with figure(path, title, "tokens of a batch", "steps") as axes:
        axes.set_xscale("log")
        axes.set_yscale("log")
        ends = critical.batches.min() / 1.5, critical.batches.max() * 1.5
        batches = np.geomspace(*ends, CURVE_POINTS)
        axes.plot(batches, critical(batches), color=INK, lw=1.2, label="least steps + least tokens / batch")
        axes.plot(critical.batches, critical.steps, "o", color=INK, ms=5,
                  label="runs, best rate of each batch")
        axes.axvline(critical.tokens, color=BEST, lw=1.5,
                     label=f"critical batch {critical.tokens:,.0f} tokens")
        measured = critical.noise_scales[np.isfinite(critical.noise_scales)]
        if len(measured):
            middle = float(np.median(measured))
            axes.axvline(middle, color=BEST, lw=1.5, ls=":",
                         label=f"noise scale {middle:,.0f} tokens (median)")
        axes.legend(frameon=False, fontsize=9)


def draw_systems(measured: list[MeasuredCell], path: Path) -> None:
    """Plot efficiency over ranks, measured and planned (dashed), a panel per mode and a colour per layout."""
    modes = [mode for mode in MODES if any(each.cell.mode == mode for each in measured)]
    layouts = sorted({each.cell.layout for each in measured})
    colour_of = dict(zip(layouts, shades(len(layouts))))
    share_of = efficiencies(measured)
    with panels(path, [f"{mode} scaling" for mode in modes], "ranks", "efficiency") as every:
        for axes, mode in zip(every, modes):
            axes.set_xscale("log", base=2)
            for layout in layouts:
                of_mode = [each.cell for each in measured if each.cell.mode == mode]
                own = [cell for cell in of_mode if cell.layout == layout]
                if not own:
                    continue
                ranks = [cell.ranks for cell in own]
                axes.plot(ranks, [share_of[cell.name][0] for cell in own], "o-", color=colour_of[layout],
                          lw=1.4, ms=5, label=layout)
                planned = [(cell.ranks, share_of[cell.name][1]) for cell in own if share_of[cell.name][1]]
                if planned:
                    axes.plot(*zip(*planned), "--", color=colour_of[layout], lw=1.2, **HOLLOW)
            counts = sorted({each.cell.ranks for each in measured})
            axes.set_xticks(counts, [str(count) for count in counts])
            axes.set_ylim(bottom=0)
        every[0].plot([], [], "--", color=INK, lw=1.2, label="the planner's", **HOLLOW)
        every[0].legend(frameon=False, fontsize=9)
