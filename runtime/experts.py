"""What the experts of a mixture did: a few numbers a step for metrics.jsonl, and experts.png, their load over the training.

The picture's data is bounded: when its COLUMNS are full, two neighbours become one. It is kept in experts.npz, so that the
picture of a resumed run has all its steps.
"""
import io
import math
import os
import zipfile
from pathlib import Path

import numpy as np

from config import Model, is_moe

INK = "#333333"
COLUMNS = 512  # time steps of the picture


def numbers(told: np.ndarray, m: Model) -> dict:
    """told [mixture layers, experts + 4]: choices of each expert, choices dropped, entropy (a sum over tokens), load-balance and z
    loss -> what a step has in metrics.jsonl. A number a layer: moe_load, the fullest expert's over the mean one's (1: balance), and
    moe_entropy, of the scores in nats a token; over all layers: moe_dropped, the share of choices, aux_loss and z_loss."""
    counts, (dropped, entropy, aux, z) = told[:, :m.experts], told[:, m.experts:].T
    choices = np.maximum(counts.sum(1), 1.0)
    return {"moe_load": finite(counts.max(1) * m.experts / choices), "moe_entropy": finite(entropy * m.top_k / choices),
            "moe_dropped": finite(dropped.sum() / choices.sum()), "aux_loss": finite(aux.sum()), "z_loss": finite(z.sum())}


def finite(x):
    """Plain floats; None for what JSON cannot say."""
    if np.ndim(x):
        return [finite(v) for v in x]
    return float(x) if math.isfinite(x) else None


def flat(row: dict) -> dict:
    """{"moe_load": [1.2, 1.3]} -> {"moe_load/0": 1.2, "moe_load/1": 1.3}; without what is None."""
    pairs = [(k, v) if not isinstance(v, list) else (f"{k}/{i}", x) for k, v in row.items() for i, x in enumerate(v if isinstance(v, list) else [v])]
    return {k: v for k, v in pairs if v is not None}


def load(file: Path, most: int) -> tuple[np.ndarray, int]:
    """counts float32 [columns, layers, experts] and every of an experts.npz. Raises ValueError, or what
    zipfile raises, where it is damaged or larger than `most` bytes: sizes are compared before anything is
    read."""
    with zipfile.ZipFile(file) as kept:
        counts = array(kept, "counts.npy", most)
        every = array(kept, "every.npy", 8)
    if counts.dtype != np.float32 or counts.ndim != 3:
        raise ValueError("not the counts of experts")
    if every.dtype.kind != "i" or every.ndim or not 1 <= every < 1 << 48:
        raise ValueError("not the counts of experts")
    if not (np.isfinite(counts) & (counts >= 0)).all():
        raise ValueError("counts that are no counts")
    return counts, int(every)


def array(kept: zipfile.ZipFile, name: str, most: int) -> np.ndarray:
    """An array of numbers as numpy's .npy format has it, of at most `most` bytes. Raises ValueError."""
    size = kept.getinfo(name).file_size
    if size > most + 4096:  # its header
        raise ValueError(f"{name} says that it has {size:,} bytes, at most {most:,} are wanted")
    data = io.BytesIO(kept.read(name))
    if np.lib.format.read_magic(data) != (1, 0):
        raise ValueError(f"{name} has another version")
    shape, fortran, dtype = np.lib.format.read_array_header_1_0(data)
    if fortran or dtype.kind not in "fi":
        raise ValueError(f"{name} has {dtype} in another order")
    return np.frombuffer(data.getbuffer()[data.tell():], dtype).reshape(shape)


class LoadMap:
    """counts [columns, layers, experts]: choices of each expert, summed over `every` steps a column. start: the step gone on from."""

    def __init__(self, run_dir: Path, m: Model, start: int) -> None:
        self.m, self.file = m, Path(run_dir) / "experts.npz"
        self.layers = [i for i in range(m.layers + m.mtp) if is_moe(m, i)]
        self.every, self.counts = 1, np.zeros((0, len(self.layers), m.experts), np.float32)
        self.trouble: str | None = None  # why the file was not taken up
        if start and self.file.exists():
            try:
                counts, every = load(self.file, 4 * COLUMNS * self.counts.shape[1] * m.experts)
            except Exception as error:  # a picture is not worth a run, whatever zip and numpy say of the file
                why = f"{type(error).__name__}: {error}"
                self.trouble = f"{self.file}: damaged, the picture begins anew ({why})"
            else:
                if counts.shape[1:] == self.counts.shape[1:]:  # what came after the checkpoint comes again
                    self.every, self.counts = every, counts[:-(-start // every)]

    def add(self, step: int, counts: np.ndarray) -> None:
        """counts [layers, experts] of step 1, 2, ..."""
        at = (step - 1) // self.every
        while at >= COLUMNS:
            even = np.zeros((len(self.counts) % 2, *self.counts.shape[1:]), np.float32)
            self.counts = np.concatenate((self.counts, even)).reshape(-1, 2, *self.counts.shape[1:]).sum(1)
            self.every *= 2
            at = (step - 1) // self.every
        if at >= len(self.counts):
            self.counts = np.concatenate((self.counts, np.zeros((at + 1 - len(self.counts), *self.counts.shape[1:]), np.float32)))
        self.counts[at] += np.nan_to_num(counts)

    def save(self) -> None:
        """Replaces the file in one step. Raises OSError."""
        temp = self.file.with_suffix(".tmp")
        with open(temp, "wb") as f:
            np.savez_compressed(f, counts=self.counts, every=self.every)
            f.flush()
            os.fsync(f.fileno())  # else a power cut could leave an empty file under its name
        os.replace(temp, self.file)

    def png(self, title: str = "") -> Path | None:
        """experts.png: a band a layer, a row an expert, its load over the fair share by colour. None where there is nothing to draw."""
        if not len(self.counts):
            return None
        from matplotlib.backends.backend_agg import FigureCanvasAgg  # no pyplot: it has global state and asks for displays
        from matplotlib.colors import LogNorm
        from matplotlib.figure import Figure

        n, (columns, layers, experts) = self.m.experts, self.counts.shape
        load = self.counts * n / np.maximum(self.counts.sum(2, keepdims=True), 1)
        figure = Figure(figsize=(10, min(2 + 0.08 * layers * experts, 14)), dpi=130, facecolor="white", layout="constrained")
        FigureCanvasAgg(figure)
        axes = figure.subplots()
        image = axes.imshow(load.reshape(columns, -1).T.clip(0.1, 10), aspect="auto", interpolation="nearest", cmap="RdBu_r", norm=LogNorm(0.1, 10),
                            extent=(0, columns * self.every, layers * experts, 0))
        for i in range(1, layers):
            axes.axhline(i * experts, color="white", lw=0.8)
        shown = range(0, layers, -(-layers // 24))
        axes.set_yticks([(i + 0.5) * experts for i in shown], [f"layer {self.layers[i]}" for i in shown])
        axes.set_xlabel("step", color=INK)
        axes.set_title(f"load of {n} experts a layer{' · ' * bool(title)}{title}".replace("$", r"\$"), loc="left", fontsize=11, color=INK)
        axes.tick_params(length=0, labelcolor=INK, labelsize=9)
        axes.spines[:].set_visible(False)
        bar = figure.colorbar(image, ax=axes, ticks=[0.1, 0.3, 1, 3, 10], format="%g", shrink=0.8)
        bar.set_label("tokens over the fair share", color=INK)
        bar.outline.set_visible(False)
        out = self.file.with_name("experts.png")
        temp = out.with_name("experts.png.tmp")
        figure.savefig(temp, format="png")
        os.replace(temp, out)
        return out
