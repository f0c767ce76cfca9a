"""loss.png: a run at a glance, drawn from metrics.jsonl. matplotlib is imported here alone, and only when called."""
import os
import re
from pathlib import Path

import numpy as np

from config import read_yaml
from runtime.console import short
from runtime.lines import read

RAW, SMOOTH, VALID, RATE, INK = "#b9c7e0", "#2a5caa", "#d9822b", "#4f8f63", "#333333"
POINTS = 2000  # more than a picture of this size can show; longer runs are thinned


def loss_png(run_dir: Path, params: str = "") -> Path | None:
    """Draws run_dir/loss.png: train loss raw and smoothed, validation, learning rate. Replaced atomically.

    params: the size of the model as text for the title ("0.89M"). Returns the file, None where there is nothing to
    draw. Raises OSError.
    """
    run_dir = Path(run_dir)
    train, valid = read(run_dir)
    train = [r for r in train if r["loss"] is not None]
    valid = [r for r in valid if r["val_loss"] is not None]
    if not train:
        return None
    from matplotlib.backends.backend_agg import FigureCanvasAgg  # no pyplot: it has global state and asks for displays
    from matplotlib.figure import Figure

    step, loss, rate = (np.array([r[k] for r in train], float) for k in ("step", "loss", "lr"))
    keep = np.unique(np.linspace(0, len(step) - 1, POINTS).astype(int))
    smooth = smoothed(loss, keep)
    figure = Figure(figsize=(9, 5.4), dpi=130, facecolor="white", layout="constrained")
    FigureCanvasAgg(figure)
    main, low = figure.subplots(2, 1, sharex=True, height_ratios=[4, 1])
    main.plot(step[keep], loss[keep], color=RAW, lw=0.9, label="train, each step")
    main.plot(step[keep], smooth, color=SMOOTH, lw=1.8, label=f"train, smoothed  {smooth[-1]:.3f}")
    if valid:
        at, val = [r["step"] for r in valid], [r["val_loss"] for r in valid]
        main.plot(at, val, "o-", color=VALID, lw=1, ms=4.5, mec="white", mew=0.7, label=f"validation  {val[-1]:.3f}")
    main.set_ylabel("loss (nats per token)")
    main.set_ylim(*window(loss, smooth, [r["val_loss"] for r in valid]))
    main.legend(frameon=False, loc="upper right")
    main.set_title(title(run_dir, params, train[-1]), loc="left", fontsize=11, color=INK)
    low.plot(step[keep], rate[keep], color=RATE, lw=1.4)
    low.fill_between(step[keep], rate[keep], color=RATE, alpha=0.12, lw=0)
    low.set_ylabel("learning rate")
    low.set_ylim(0)
    low.ticklabel_format(axis="y", style="sci", scilimits=(0, 0))
    low.set_xlabel("step")
    low.set_xlim(0, max(step[-1], 1))
    for axes in (main, low):
        axes.spines[["top", "right"]].set_visible(False)
        axes.grid(color="#e6e6e6", lw=0.6)
        axes.set_axisbelow(True)
    out = run_dir / "loss.png"
    temp = out.with_name("loss.png.tmp")
    figure.savefig(temp, format="png")
    os.replace(temp, out)
    return out


def title(run_dir: Path, params: str, last: dict) -> str:
    """quickstart · llama-mini · 0.89M parameters · 800 steps, 1.64M tokens"""
    config = run_dir / "config.yaml"
    preset = read_yaml(config).get("model", {}).get("preset", "") if config.exists() else ""
    words = [run_dir.resolve().name, preset, f"{params} parameters" if params else "",
             f"{last['step']:,} steps, {short(last['tokens'])} tokens"]
    # matplotlib takes $...$ for a formula
    return re.sub(r"\$", r"\\$", " · ".join(w for w in words if w))


def smoothed(x: np.ndarray, at: np.ndarray) -> np.ndarray:
    """The median of x around each index of `at`, over a window that widens with the index up to a twenty-fifth of all.

    Centred, so it does not lag behind a steep start as a running mean does; a median, so a spike stays a spike.
    """
    half = np.minimum(at // 10, len(x) // 50)
    return np.array([np.median(x[max(0, i - h):i + h + 1]) for i, h in zip(at, half)])


def window(loss: np.ndarray, smooth: np.ndarray, valid: list[float]) -> tuple[float, float]:
    """What the vertical axis shows: everything but the rarest spikes, which would flatten the rest."""
    top = max([np.quantile(loss, 0.998), loss[0], *valid])
    low = min([smooth.min(), np.quantile(loss, 0.002), *valid])
    pad = 0.05 * (top - low) or 0.1
    return low - pad, top + pad
