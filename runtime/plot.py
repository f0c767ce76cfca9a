"""Plot loss.png from metrics.jsonl. Imports matplotlib only when it plots.

    python -m runtime.plot RUN [PARAMETERS]     plot a run that is still training
"""
import os
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np

from config import read_yaml
from config.numbers import short_number
from config.plots import INK, new_figure, plain_text, save_figure, set_open_frame, set_title
from runtime.lines import Rows, read_metrics

RAW, SMOOTH, VALID, RATE = "#b9c7e0", "#2a5caa", "#d9822b", "#4f8f63"  # colours
MAX_POINTS = 2000  # more than a plot of this size can show
PICTURE_SECONDS = 60.0  # minimum time between plots during training
ROOT = Path(__file__).parent.parent


class LivePicture:
    """Plot loss.png during training, in a separate process that no step waits for.

    params: the number of parameters as text. seconds: minimum time between plots and before the first.
    """

    def __init__(self, run_dir: Path, params: str, seconds: float = PICTURE_SECONDS) -> None:
        self.words = [sys.executable, "-m", "runtime.plot", str(Path(run_dir).resolve()), params]
        self.seconds = seconds
        self.last_start = time.monotonic()
        self.process: subprocess.Popen[bytes] | None = None

    def draw_soon(self) -> None:
        """Start a plot if the previous one is done and long enough ago. A failed one is retried then."""
        now = time.monotonic()
        is_drawing = self.process is not None and self.process.poll() is None
        if is_drawing or now - self.last_start < self.seconds:
            return
        self.last_start = now
        try:
            self.process = subprocess.Popen(
                self.words,
                cwd=ROOT,
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                stderr=subprocess.DEVNULL,
            )
        except OSError:  # out of processes or memory; the final plot will report it
            self.process = None

    def stop(self) -> None:
        """Stop a plot in progress. loss.png is then either complete or unchanged."""
        if self.process is not None and self.process.poll() is None:
            self.process.kill()
            self.process.wait()


def loss_png(run_dir: Path, params: str = "") -> Path | None:
    """Plot run_dir/loss.png: training loss, raw and smoothed, validation loss and learning rate.

    params: the number of parameters as text for the title ("0.89M").
    Replaces the file atomically. Returns its path, or None if there is nothing to plot. Raises OSError.
    """
    run_dir = Path(run_dir)
    train, valid = read_metrics(run_dir)
    last = train[-1] if train else None
    train = [row for row in train if row["loss"] is not None]
    valid = [row for row in valid if row["val_loss"] is not None]
    if last is None or not train:
        return None
    figure = new_figure(9, 5.4, layout=None)
    figure.subplots_adjust(left=0.085, right=0.985, top=0.93, bottom=0.095, hspace=0.12)
    loss_axes, rate_axes = figure.subplots(2, 1, sharex=True, height_ratios=[4, 1])

    steps = column(train, "step")
    shown = np.unique(np.linspace(0, len(steps) - 1, MAX_POINTS).astype(int))
    draw_losses(loss_axes, train, valid, shown)
    set_title(loss_axes, title(run_dir, params, last))
    draw_rate(rate_axes, steps[shown], column(train, "lr")[shown])
    for axes in (loss_axes, rate_axes):
        draw_phases(axes, train)
        set_open_frame(axes)
    rate_axes.set_xlim(0, max(steps[-1], 1))

    out = run_dir / "loss.png"
    save_figure(figure, out)
    return out


def column(rows: Rows, name: str) -> np.ndarray:
    return np.array([row[name] for row in rows], float)


def draw_losses(axes: Any, train: Rows, valid: Rows, shown: np.ndarray) -> None:
    """Plot the training loss of the rows `shown` (indices), raw and smoothed, and the validation loss."""
    steps = column(train, "step")[shown]
    losses = column(train, "loss")
    smooth = smoothed(losses, shown)
    axes.plot(steps, losses[shown], color=RAW, lw=0.9, label="train, each step")
    axes.plot(steps, smooth, color=SMOOTH, lw=1.8, label=f"train, smoothed  {smooth[-1]:.3f}")
    valid_losses = [row["val_loss"] for row in valid]
    if valid:
        valid_steps = [row["step"] for row in valid]
        axes.plot(valid_steps, valid_losses, "o-", color=VALID, lw=1, ms=4.5, mec="white", mew=0.7,
                  label=f"validation  {valid_losses[-1]:.3f}")
    axes.set_ylabel("loss (nats per token)")
    axes.set_ylim(*plot_window(losses, smooth, valid_losses))
    axes.legend(frameon=False, loc="upper right")


def draw_rate(axes: Any, steps: np.ndarray, rates: np.ndarray) -> None:
    """Plot the learning rate."""
    axes.plot(steps, rates, color=RATE, lw=1.4)
    axes.fill_between(steps, rates, color=RATE, alpha=0.12, lw=0)
    axes.set_ylabel("learning rate")
    axes.set_ylim(0)
    axes.ticklabel_format(axis="y", style="sci", scilimits=(0, 0))
    axes.set_xlabel("step")


def draw_phases(axes: Any, train: Rows) -> None:
    """Mark where each phase begins (train.phases) by a line with its number."""
    for before, row in zip(train, train[1:]):
        if row.get("phase") == before.get("phase"):
            continue
        axes.axvline(row["step"], color=INK, lw=0.8, ls=":")
        place = {"xy": (row["step"], 1), "xycoords": ("data", "axes fraction"), "va": "top"}
        axes.annotate(f" phase {row['phase']}", **place, fontsize=8, color=INK)


def title(run_dir: Path, params: str, last: dict[str, Any]) -> str:
    """Return "quickstart · llama-mini · 0.89M parameters · 800 steps, 1.64M tokens".

    last: the row of the last step.
    """
    config = run_dir / "config.yaml"
    preset = ""
    if config.exists():
        preset = read_yaml(config).get("model", {}).get("preset", "")
    parts = [
        run_dir.resolve().name,
        preset,
        f"{params} parameters" if params else "",
        f"{last['step']:,} steps, {short_number(last['tokens'])} tokens",
    ]
    return plain_text(" · ".join(part for part in parts if part))


def smoothed(values: np.ndarray, indices: np.ndarray) -> np.ndarray:
    """Return the median of the values around each index.

    The window widens with the index, up to a twenty-fifth of all values. It is centred, so unlike a running
    mean it does not lag behind a steep start. A median does not smear spikes.
    """
    half_widths = np.minimum(indices // 10, len(values) // 50)
    medians: list[Any] = []
    for index, half in zip(indices, half_widths):
        window = values[max(0, index - half):index + half + 1]
        medians.append(np.median(window))
    return np.array(medians)


def plot_window(loss: np.ndarray, smooth: np.ndarray, valid: list[float]) -> tuple[float, float]:
    """Return (lower, upper) limits of the loss axis, excluding rare spikes that would flatten the rest."""
    upper = max([np.quantile(loss, 0.998), loss[0], *valid])
    lower = min([smooth.min(), np.quantile(loss, 0.002), *valid])
    margin = 0.05 * (upper - lower) or 0.1
    return lower - margin, upper + margin


def main(argv: list[str]) -> None:
    """Plot at low process priority, so that training comes first."""
    os.nice(10)
    loss_png(Path(argv[0]), argv[1] if len(argv) > 1 else "")


if __name__ == "__main__":
    main(sys.argv[1:])
