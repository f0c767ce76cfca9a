import math
import sys

import pytest

from runtime.lines import MetricsFile
from runtime.plot import loss_png, smoothed, title


def write(folder, n=300, nan=()):
    file = MetricsFile(folder, 0)
    file.add(
        [
            {
                "step": s,
                "loss": math.nan if s in nan else 3 + 4 * math.exp(-s / 50),
                "lr": 1e-3,
                "tokens": 16 * s,
            }
            for s in range(1, n + 1)
        ]
    )
    file.add([{"step": n, "val_loss": 3.2, "val_ppl": 24.5, "val_bpb": 1.7}])
    file.close()


def test_losses_are_drawn_without_a_display(tmp_path):
    write(tmp_path, nan=(5, 6))
    out = loss_png(tmp_path, "0.89M")
    data = out.read_bytes()
    assert out == tmp_path / "loss.png" and data.startswith(b"\x89PNG") and len(data) > 20_000
    assert sorted(p.name for p in tmp_path.iterdir()) == ["loss.png", "metrics.jsonl"]
    assert "matplotlib.pyplot" not in sys.modules  # no display, no global state


@pytest.mark.parametrize("n", [1, 2])
def test_a_run_of_a_step_is_drawn(tmp_path, n):
    write(tmp_path, n)
    assert loss_png(tmp_path).exists()


def test_without_a_finite_loss_nothing_is_drawn(tmp_path):
    assert loss_png(tmp_path) is None
    write(tmp_path, 2, nan=(1, 2))
    assert loss_png(tmp_path) is None and not (tmp_path / "loss.png").exists()


def test_the_title_names_run_model_and_length(tmp_path):
    run = tmp_path / "a$b"
    run.mkdir()
    (run / "config.yaml").write_text("model: {preset: llama-mini}\n")
    text = title(run, "0.89M", {"step": 800, "tokens": 1_638_400})
    assert text == "a\\$b · llama-mini · 0.89M parameters · 800 steps, 1.64M tokens"


def test_smoothing_keeps_up_and_shrugs_off_spikes():
    import numpy as np

    x = np.linspace(10, 0, 1000)
    at = np.arange(1000)
    assert np.abs(smoothed(x, at) - x).max() < 0.11  # no lag: half of the last window
    spiked = x.copy()
    spiked[500] = 1e6
    assert np.abs(smoothed(spiked, at) - smoothed(x, at)).max() < 0.02
