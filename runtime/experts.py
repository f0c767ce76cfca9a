"""Expert load of MoE models: a few numbers per step for metrics.jsonl, and a heat map, experts.png.

The data of the map is bounded: when its COLUMNS are full, neighbours are merged in pairs. It is kept in
experts.npz, so that the map of a resumed run shows all steps.
"""
import math
import os
import zipfile
from pathlib import Path
from typing import Any

import numpy as np

from config import ModelConfig, modules_ahead
from config.plots import INK, new_figure, plain_text, save_figure, set_title
from model.router import ExpertsConfig, has_experts, mixture

COLUMNS = 512  # maximum columns of the map
FURTHER_BYTES = 8192  # upper bound of what the file holds beside the counts: headers and a number
MAX_LAYER_LABELS = 24


# ---- the numbers of a step ---------------------------------------------------------------------------------

def router_metrics(stats: np.ndarray, experts: ExpertsConfig) -> dict[str, float | list[float | None] | None]:
    """Return the metrics.jsonl fields of one step from the statistics of all routers.

    stats [mixture layers, experts + 4]: number of choices per expert (top_k per token), then dropped choices,
    entropy (summed over tokens), load-balance loss and z loss.

    Per layer: moe_load, the maximum load over the mean load (1 if balanced), and moe_entropy of the scores in
    nats per token. Over all layers: moe_dropped, the fraction of dropped choices, aux_loss and z_loss.
    """
    counts = stats[:, :experts.experts]
    dropped, entropy, aux_loss, z_loss = stats[:, experts.experts:].T
    choices = np.maximum(counts.sum(1), 1.0)
    load = counts.max(1) * experts.experts / choices
    token_entropy = entropy * experts.top_k / choices
    return {
        "moe_load": [finite_or_none(value) for value in load],
        "moe_entropy": [finite_or_none(value) for value in token_entropy],
        "moe_dropped": finite_or_none(dropped.sum() / choices.sum()),
        "aux_loss": finite_or_none(aux_loss.sum()),
        "z_loss": finite_or_none(z_loss.sum()),
    }


def finite_or_none(value: np.floating) -> float | None:
    """Return a plain float, or None if it is not finite, which JSON cannot represent."""
    return float(value) if math.isfinite(value) else None


def flatten_row(row: dict[str, Any]) -> dict[str, Any]:
    """Flatten {"moe_load": [1.2, 1.3], "mfu": None} to {"moe_load/0": 1.2, "moe_load/1": 1.3}."""
    flat: dict[str, Any] = {}
    for name, value in row.items():
        if isinstance(value, list):
            flat |= {f"{name}/{i}": element for i, element in enumerate(value)}
        else:
            flat[name] = value
    return {name: value for name, value in flat.items() if value is not None}


# ---- experts.npz -------------------------------------------------------------------------------------------

def load_counts(file: Path, max_bytes: int) -> tuple[np.ndarray, int]:
    """Read experts.npz. Returns counts, float32 [columns, layers, experts], and the steps per column.

    Raises an error of numpy or zipfile if the file is damaged, ValueError if it exceeds `max_bytes`. Sizes
    are checked before anything is read.
    """
    with zipfile.ZipFile(file) as archive:
        size = sum(entry.file_size for entry in archive.infolist())
    if size > max_bytes + FURTHER_BYTES:
        raise ValueError(f"it says that it has {size:,} bytes, at most {max_bytes:,} are wanted")
    with np.load(file, allow_pickle=False) as arrays:
        counts, every = arrays["counts"], arrays["every"]
    if counts.dtype != np.float32 or counts.ndim != 3:
        raise ValueError("not the counts of experts")
    if every.dtype.kind != "i" or every.ndim or not 1 <= every < 1 << 48:
        raise ValueError("not the counts of experts")
    if not (np.isfinite(counts) & (counts >= 0)).all():
        raise ValueError("a count is negative or not finite")
    return counts, int(every)


class ExpertLoadMap:
    """The number of times each expert was chosen, over the course of training.

    counts [columns, layers, experts], each column summed over `every` steps.
    start_step: the step that the run resumes from; later columns are dropped, since their steps run again.
    """

    def __init__(self, run_dir: Path, model: ModelConfig, start_step: int) -> None:
        experts = mixture(model)
        if experts is None:
            raise ValueError("model.mlp: no layer has experts, and there is no load to draw")
        self.experts = experts.experts
        self.file = Path(run_dir) / "experts.npz"
        all_layers = range(model.layers + modules_ahead(model))
        self.layers = [layer for layer in all_layers if has_experts(model, layer)]
        self.every = 1
        self.counts = self.zero_columns(0)
        self.trouble: str | None = None  # why the file could not be read
        if start_step and self.file.exists():
            self.restore(start_step)

    def zero_columns(self, columns: int) -> np.ndarray:
        return np.zeros((columns, len(self.layers), self.experts), np.float32)

    def restore(self, start_step: int) -> None:
        """Load the counts from the file if it is intact and fits the shape of the model."""
        max_bytes = 4 * COLUMNS * len(self.layers) * self.experts
        try:
            counts, every = load_counts(self.file, max_bytes)
        except Exception as error:  # any error of zip or numpy: a damaged map must not end a run
            cause = f"{type(error).__name__}: {error}"
            self.trouble = f"{self.file}: damaged, the picture starts over ({cause})"
            return
        if counts.shape[1:] == self.counts.shape[1:]:
            columns_to_keep = -(-start_step // every)
            self.every = every
            self.counts = counts[:columns_to_keep]

    def add(self, step: int, counts: np.ndarray) -> None:
        """Add a step. counts [layers, experts]; step: 1, 2, ..."""
        column = (step - 1) // self.every
        while column >= COLUMNS:
            self.halve()
            column = (step - 1) // self.every
        missing = column + 1 - len(self.counts)
        if missing > 0:
            self.counts = np.concatenate((self.counts, self.zero_columns(missing)))
        self.counts[column] += np.nan_to_num(counts)

    def halve(self) -> None:
        """Merge pairs of columns; an odd last column stays as it is."""
        padding = self.zero_columns(len(self.counts) % 2)
        pairs = np.concatenate((self.counts, padding)).reshape(-1, 2, *self.counts.shape[1:])
        self.counts = pairs.sum(1)
        self.every *= 2

    def save(self) -> None:
        """Replace the file atomically. Raises OSError."""
        temp = self.file.with_suffix(".tmp")
        with open(temp, "wb") as out:
            np.savez_compressed(out, counts=self.counts, every=self.every)
            out.flush()
            os.fsync(out.fileno())  # a power cut must not leave an empty file under the final name
        os.replace(temp, self.file)

    def draw(self, title: str = "") -> Path | None:
        """Draw experts.png: a band per layer, a row per expert, coloured by load over the fair share.

        Returns the file, or None if there is nothing to draw. Raises OSError.
        """
        if not len(self.counts):
            return None
        from matplotlib.colors import LogNorm

        columns, layers, experts = self.counts.shape
        choices = np.maximum(self.counts.sum(2, keepdims=True), 1)
        load = self.counts * self.experts / choices  # [columns, layers, experts]
        rows = load.reshape(columns, -1).T  # [layers * experts, columns]

        # draw the map
        figure = new_figure(10, min(2 + 0.08 * layers * experts, 14))
        axes = figure.subplots()
        image = axes.imshow(
            rows.clip(0.1, 10), aspect="auto", interpolation="nearest", cmap="RdBu_r", norm=LogNorm(0.1, 10),
            extent=(0, columns * self.every, layers * experts, 0))
        for layer in range(1, layers):
            axes.axhline(layer * experts, color="white", lw=0.8)

        # label the axes
        labelled = range(0, layers, -(-layers // MAX_LAYER_LABELS))
        middles = [(row + 0.5) * experts for row in labelled]
        axes.set_yticks(middles, [f"layer {self.layers[row]}" for row in labelled])
        axes.set_xlabel("step", color=INK)
        heading = f"load of {self.experts} experts a layer" + (f" · {title}" if title else "")
        set_title(axes, plain_text(heading))
        axes.tick_params(length=0, labelcolor=INK, labelsize=9)
        axes.spines[:].set_visible(False)
        bar = figure.colorbar(image, ax=axes, ticks=[0.1, 0.3, 1, 3, 10], format="%g", shrink=0.8)
        bar.set_label("tokens over the fair share", color=INK)
        bar.outline.set_visible(False)

        out = self.file.with_name("experts.png")
        save_figure(figure, out)
        return out
