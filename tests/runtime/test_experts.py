"""The load of experts: numbers of each step, and a picture whose data stays bounded and continues after a
resume.
"""

import dataclasses
import io
import json
import tracemalloc
import zipfile
from dataclasses import replace

import numpy as np
import pytest
import run_folder
import torch
from ranks import MODEL, corpus

import train
from config.pattern import BlockVariant
from config.reading import defaults
from model.mlp import MLPConfig
from model.router import ExpertsConfig
from parallel.extras import StepResult
from runtime import experts
from runtime.experts import ExpertLoadMap, flatten_row, router_metrics

FOUR = ExpertsConfig(experts=4, top_k=2)
M = replace(  # the first layer has an MLP
    defaults().model,
    layers=3,
    mlp=FOUR,
    blocks=(BlockVariant("dense", (("mlp", MLPConfig()),)),),
    pattern="dense, block...",
)


def told(*counts):
    """Two mixture layers with these counts; 3 choices dropped in each, entropy 0.5 a token, losses 0.1 and
    0.2.
    """
    return np.array([[*c, 3, 0.5 * sum(c) / 2, 0.1, 0.2] for c in counts], float)


def test_the_load_of_experts_is_told_by_its_definitions():
    n = router_metrics(told((4, 4, 4, 4), (8, 8, 0, 0)), FOUR)
    assert n == {
        "moe_load": [1.0, 2.0],
        "moe_entropy": [0.5, 0.5],
        "moe_dropped": 6 / 32,
        "aux_loss": pytest.approx(0.2),
        "z_loss": pytest.approx(0.4),
    }
    assert flatten_row({"loss": 1.0, "mfu": None, **n})["moe_load/1"] == 2.0
    assert "mfu" not in flatten_row({"mfu": None})
    broken = told((0, 0, 0, 0), (1, 1, 1, 1))
    broken[:, 5] = np.nan
    assert router_metrics(broken, FOUR)["moe_entropy"] == [None, None]
    assert json.dumps(router_metrics(broken, FOUR), allow_nan=False)


def test_the_map_is_bounded_and_loses_nothing(tmp_path, monkeypatch):
    monkeypatch.setattr(experts, "COLUMNS", 8)
    kept = ExpertLoadMap(tmp_path, M, 0)
    for step in range(1, 101):
        kept.add(step, np.full((2, 4), step))
    assert kept.every == 16 and kept.counts.shape == (7, 2, 4) and kept.counts[:, 0, 0].sum() == 5050
    assert kept.counts[0, 0, 0] == sum(range(1, 17))


def test_a_resumed_run_continues_its_picture(tmp_path):
    first = ExpertLoadMap(tmp_path, M, 0)
    for step in range(1, 11):
        first.add(step, np.ones((2, 4)))
    first.save()
    again = ExpertLoadMap(tmp_path, M, 6)  # its checkpoint is of step 6
    assert len(again.counts) == 6
    again.add(7, np.full((2, 4), 2))
    assert again.counts[:, 0, 0].tolist() == [1] * 6 + [2]
    assert len(ExpertLoadMap(tmp_path, M, 0).counts) == 0  # a new run
    other = dataclasses.replace(M, mlp=ExpertsConfig(experts=8))
    assert len(ExpertLoadMap(tmp_path, other, 6).counts) == 0  # another model's


def spoilt(good: bytes, how: str) -> bytes:
    """experts.npz as a power cut, a bad disk or a stranger leaves it."""
    if how == "bomb":  # 64 MB of zeros, 64 KB on disk
        out = io.BytesIO()
        with (
            zipfile.ZipFile(out, "w", zipfile.ZIP_DEFLATED) as z,
            z.open("counts.npy", "w", force_zip64=True) as f,
        ):
            f.write(bytes(1 << 26))
        return out.getvalue()
    if how in ("shape", "nan", "text dtype"):
        made = {
            "shape": np.zeros((3, 2), np.float32),
            "nan": np.full((3, 2, 4), np.nan, np.float32),
            "text dtype": np.full((3, 2, 4), "x"),
        }[how]
        np.savez_compressed(out := io.BytesIO(), counts=made, every=1)
        return out.getvalue()
    if how == "header":  # an array that says it has 2 ** 60 numbers
        np.lib.format.write_array_header_1_0(
            head := io.BytesIO(), {"descr": "<f4", "fortran_order": False, "shape": (1 << 58, 2, 4)}
        )
        with zipfile.ZipFile(out := io.BytesIO(), "w") as z:
            z.writestr("counts.npy", head.getvalue())
        return out.getvalue()
    return {"half": good[: len(good) // 2], "empty": b"", "text": b"not a zip\n" * 99, "one byte": b"P"}[how]


@pytest.mark.parametrize(
    "how", ["half", "empty", "text", "one byte", "bomb", "shape", "nan", "text dtype", "header"]
)
def test_a_damaged_file_starts_the_picture_again(tmp_path, how):
    first = ExpertLoadMap(tmp_path, M, 0)
    for step in range(1, 11):
        first.add(step, np.ones((2, 4)))
    first.save()
    first.file.write_bytes(spoilt(first.file.read_bytes(), how))
    peak = tracemalloc_peak(lambda: ExpertLoadMap(tmp_path, M, 6))
    again = ExpertLoadMap(tmp_path, M, 6)
    assert "experts.npz: damaged, the picture starts over" in again.trouble
    assert len(again.counts) == 0
    assert peak < 1 << 24
    again.add(7, np.full((2, 4), 2))
    again.save()
    kept = ExpertLoadMap(tmp_path, M, 7)
    assert kept.trouble is None and kept.counts[:, 0, 0].tolist() == [0] * 6 + [2]


def tracemalloc_peak(work) -> int:
    tracemalloc.start()
    try:
        work()
        return tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()


def test_any_flipped_bit_of_the_file_is_harmless(tmp_path):
    first = ExpertLoadMap(tmp_path, M, 0)
    first.add(1, np.ones((2, 4)))
    first.save()
    good = first.file.read_bytes()
    for place in range(0, 8 * len(good), 31):
        data = bytearray(good)
        data[place // 8] ^= 1 << place % 8
        first.file.write_bytes(data)
        again = ExpertLoadMap(tmp_path, M, 1)
        assert again.trouble or again.counts.tolist() in ([], [[[1.0] * 4] * 2]), place


def test_the_load_of_experts_is_drawn(tmp_path):
    kept = ExpertLoadMap(tmp_path, M, 0)
    assert kept.draw() is None
    for step in range(1, 30):
        kept.add(step, np.random.default_rng(step).integers(0, 9, (2, 4)) * (step > 3))
    assert kept.draw("run $1$").read_bytes().startswith(b"\x89PNG")


def test_metrics_have_the_load_of_experts(metrics, tmp_path, cfg):
    from runtime.metrics import MetricsLogger
    from runtime.setup import LaunchEnv

    cfg = dataclasses.replace(cfg, model=M)
    m = MetricsLogger(tmp_path, cfg, LaunchEnv(), steps=4, flops_per_token=1.0)
    for step in range(1, 5):
        one = torch.tensor(1.0)
        m.log_step(
            step, StepResult(one, one, one > 0, torch.tensor(16)), learning_rate=1.0, seconds=1.0,
            data_seconds=0.0, router_stats=torch.from_numpy(told((4, 4, 4, 4), (8, 8, 0, 0))),
        )
    m.flush()
    m.close()
    rows = run_folder.rows(tmp_path)
    assert len(rows) == 4 and all(r["moe_load"] == [1.0, 2.0] for r in rows)
    assert ExpertLoadMap(tmp_path, M, 4).counts[:, 1, 0].tolist() == [8] * 4


@pytest.mark.slow
def test_a_run_of_a_mixture_leaves_its_pictures_and_a_dense_one_has_no_experts(tmp_path, whole_runs):
    words = [*MODEL, "--train.steps", "2", "--data.path", corpus(tmp_path), "--log.dir", str(tmp_path)]
    mixture = ["--model.mlp.experts", "4", "--model.mlp.width", "16", "--log.name", "mixture"]
    assert train.main(["mixtral-tiny", *words, *mixture]) == 0
    assert train.main(["llama2-tiny", *words, "--log.name", "dense"]) == 0
    pictures = {
        name: sorted(path.name for path in (tmp_path / name).glob("*.png")) for name in ("mixture", "dense")
    }
    assert pictures == {"mixture": ["experts.png", "loss.png"], "dense": ["loss.png"]}
    for picture in tmp_path.glob("*/*.png"):
        assert picture.read_bytes().startswith(b"\x89PNG") and picture.stat().st_size > 10_000
