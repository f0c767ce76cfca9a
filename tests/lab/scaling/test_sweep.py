"""Sweeps of rates and batches: the critical batch of losses by a known formula, and a real sweep."""
import csv
import json
import math
from dataclasses import replace

import numpy as np
import pytest
from small_jobs import settings_of

from config import ConfigError
from config.reading import resolve
from lab.scaling.command import main
from lab.scaling.sweep import (
    Sweep,
    SweepCurve,
    SweepRun,
    best_of_batch,
    best_rate,
    check_sweep,
    critical_batch,
    get_sweep_runs,
    keep_sweep,
    sweep_arguments,
    sweep_lines,
)

SMALL = (
    "--data.tokenizer bytes --model.vocab 257 --model.layers 1 --model.hidden 16 --model.mixer.heads 1 "
    "--model.mixer.kv_heads 1 --model.mixer.head_dim 16 --model.mlp.width 32 --train.seq_len 16 "
    "--train.micro_batch 2 --eval.batches 2 --optim.warmup 3"
).split()
SETTINGS = settings_of(SMALL)
SWEEP = Sweep("quickstart", (1e-3, 2e-3), (2, 4), 2000, SETTINGS)


def curve(batch_tokens, *, rate=1e-3, final=2.0, least_steps=100.0, least_tokens=50_000.0, noise=700.0):
    """A run whose loss falls so that it reaches 2 after least_steps + least_tokens / batch steps."""
    to_two = least_steps + least_tokens / batch_tokens
    steps = np.arange(1, round(2 * to_two) + 1)
    loss = 3 - steps / to_two
    tokens = steps * float(batch_tokens)
    run = SweepRun(f"b{batch_tokens}-{rate}", rate, batch_tokens // 10, batch_tokens, len(steps))
    parts = np.full(len(steps), noise * 0.25), np.full(len(steps), 0.25)
    return SweepCurve(run, tokens, loss, *parts, final)


@pytest.mark.parametrize("least_steps,least_tokens", [(100.0, 50_000.0), (1000.0, 20_000.0)])
def test_the_critical_batch_of_a_known_law(least_steps, least_tokens):
    batches = (100, 200, 400, 800, 1600)
    curves = [curve(size, least_steps=least_steps, least_tokens=least_tokens) for size in batches]
    found = critical_batch(curves, target=2.0)
    assert found.tokens == pytest.approx(least_tokens / least_steps, rel=1e-6)
    assert found.least_steps == pytest.approx(least_steps, rel=1e-6)
    # arXiv 1812.06162, equation 2.11, at every batch
    seen = found.steps * found.batches
    product = (found.steps / found.least_steps - 1) * (seen / found.least_tokens - 1)
    np.testing.assert_allclose(product, 1, rtol=1e-6)
    np.testing.assert_allclose(found.noise_scales, 700)
    text = "\n".join(sweep_lines(curves, found))
    assert f"critical batch {least_tokens / least_steps:,.0f} tokens" in text
    assert "noise scale 700 tokens" in text


def test_no_law_no_critical_batch():
    two = [curve(100), curve(200)]
    assert critical_batch(two) is None and "three batches or more" in "\n".join(sweep_lines(two, None))
    # larger batches that need more steps
    against = [curve(size, least_steps=size, least_tokens=1.0) for size in (100, 200, 400)]
    assert critical_batch(against, target=2.0) is None
    with pytest.raises(ConfigError, match=r"--target: b100-0.001 ends at 1.0000 and never reaches 0.5"):
        critical_batch([curve(size) for size in (100, 200, 400)], target=0.5)


def test_the_best_rate_is_the_vertex_of_a_parabola():
    def of(log_rate, vertex=math.log(3e-3)):
        return curve(100, rate=math.exp(log_rate), final=2 + 0.1 * (log_rate - vertex) ** 2)

    rates = [math.log(1e-3), math.log(2e-3), math.log(4e-3), math.log(8e-3)]
    curves = [of(rate) for rate in rates]
    assert best_rate(curves) == pytest.approx(3e-3)
    assert best_rate(curves[2:]) is None, "two runs have no vertex"
    assert best_rate([of(rate, vertex=math.log(1e-4)) for rate in rates]) is None, "the least is at the edge"
    lines = "\n".join(sweep_lines([of(rate, vertex=math.log(1e-4)) for rate in rates], None))
    assert "0.001 edge" in lines

    diverged = curve(100, rate=1e-2, final=math.nan)
    assert best_rate([*curves, diverged]) == pytest.approx(3e-3)
    assert best_of_batch([diverged, *curves])[100].run.rate == pytest.approx(4e-3)
    assert "diverged" in "\n".join(sweep_lines([diverged], None))


@pytest.mark.parametrize(
    "change,message",
    [
        ({"rates": (1e-3, 1e-3)}, "--rates: different learning rates"),
        ({"rates": (0.0,)}, "--rates: different learning rates above 0"),
        ({"batches": (0,)}, "--batches: different numbers of sequences"),
        ({"batches": (2, 3)}, r"--batches: 3 does not divide the 32 sequences .* try --eval.batches 3"),
        ({"settings": (*SETTINGS, ("train.ramp", "2,2,100"))}, "train.ramp: a sweep counts steps of one"),
        ({"settings": (*SETTINGS, ("optim.decay", "wsd"))}, "optim.decay: a sweep sets it itself"),
        ({"tokens": 600}, "--tokens: batch4-lr0.001 would have 9 steps of 64 tokens"),
    ],
)
def test_a_sweep_that_shows_nothing_is_refused(change, message, tmp_path):
    with pytest.raises(ConfigError, match=message):
        check_sweep(replace(SWEEP, **change), tmp_path, 1)


def test_each_run_has_its_rate_its_batch_and_the_same_tokens(tmp_path):
    runs = get_sweep_runs(SWEEP)
    assert len(runs) == 4 and len({run.name for run in runs}) == 4
    for run in runs:
        name, *argv = sweep_arguments(SWEEP, run, tmp_path, 1)
        cfg = resolve(name, None, argv)
        assert (cfg.optim.lr, cfg.train.global_batch) == (run.rate, run.batch)
        assert 0 <= SWEEP.tokens - cfg.train.steps * run.batch * 16 < run.batch * 16
        assert cfg.optim.decay == "constant" and cfg.log.noise_scale
        assert cfg.eval.batches * cfg.train.global_batch == 32, "all are validated on the same sequences"
        assert cfg.train.micro_batch == run.batch // 2, "two parts, for the noise between them"


def test_the_noise_scale_is_measured_where_it_can_be(tmp_path):
    """A batch of one has no parts; two ranks are two parts; who says false is heard."""
    def settings(batch, ranks, *more):
        run = SweepRun("r", 1e-3, batch, 16 * batch, 50)
        name, *argv = sweep_arguments(replace(SWEEP, settings=(*SETTINGS, *more)), run, tmp_path, ranks)
        cfg = resolve(name, None, argv)
        return cfg.train.micro_batch, cfg.log.noise_scale

    assert settings(1, 1) == (1, False)
    assert settings(2, 2) == (1, True)
    assert settings(6, 1) == (2, True), "not more than train.micro_batch"
    assert settings(8, 1, ("log.noise_scale", "false")) == (2, False)


def test_a_folder_holds_one_sweep(tmp_path):
    """Rates and batches may be added; with other settings old results would be shown as new ones."""
    keep_sweep(SWEEP, tmp_path)
    keep_sweep(replace(SWEEP, settings=tuple(reversed(SETTINGS))), tmp_path)
    keep_sweep(replace(SWEEP, rates=(2e-3, 4e-3), batches=(8,)), tmp_path)
    kept = json.loads((tmp_path / "sweep.json").read_text())
    assert kept["rates"] == [1e-3, 2e-3, 4e-3] and kept["batches"] == [2, 4, 8]
    for change, message in (
        ({"tokens": 3000}, "a sweep with tokens 2000, not 3000; its runs could not be compared"),
        ({"recipe": "llama3-tiny"}, "a sweep with recipe quickstart, not llama3-tiny"),
        ({"settings": (*SETTINGS, ("optim.beta2", "0.9"))}, "a sweep with optim.beta2 not set, not 0.9"),
        ({"settings": SETTINGS[1:]}, "a sweep with data.tokenizer bytes, not not set"),
    ):
        with pytest.raises(ConfigError, match=message):
            keep_sweep(replace(SWEEP, **change), tmp_path)
    (tmp_path / "sweep.json").write_text("{")
    with pytest.raises(ConfigError, match="sweep.json: does not say what the sweep in its folder is"):
        keep_sweep(SWEEP, tmp_path)
    (tmp_path / "sweep.json").unlink()
    (tmp_path / "batch4-lr0.001").mkdir()
    with pytest.raises(ConfigError, match="has results, and no sweep.json that says which sweep"):
        keep_sweep(SWEEP, tmp_path)


@pytest.mark.slow
def test_a_sweep_trains_once_and_writes_its_table(tmp_path, capsys):
    """By the command; again it runs nothing; other runs than the table's are not made."""
    argv = ["sweep", "--out", str(tmp_path), "--rates", "2e-3,1e-2", "--batches", "2,8", "--tokens", "3000",
            *SMALL]
    assert main(argv) == 0
    shown = capsys.readouterr().out
    with open(tmp_path / "sweep.csv", newline="") as file:
        rows = list(csv.DictReader(file))
    assert [row["run"] for row in rows] == [
        f"batch{batch}-lr{rate}" for batch in (8, 2) for rate in ("0.002", "0.01")
    ]
    assert len({row["loss"] for row in rows}) == 4, "four different runs"
    assert rows[0]["noise_scale"]
    assert (tmp_path / "rates.png").stat().st_size > 1000
    assert f"{float(rows[0]['loss']):.4f}" in shown

    # one run alone, as a job of an array
    capsys.readouterr()
    assert main([*argv, "--only", "1"]) == 0
    assert capsys.readouterr().out.startswith("batch8-lr0.01: 23 steps")
    with pytest.raises(ConfigError, match="--only: 4, and the runs are 0 to 3"):
        main([*argv, "--only", "4"])

    before = {path: path.stat().st_mtime_ns for path in tmp_path.glob("*/metrics.jsonl")}
    assert main(argv) == 0
    assert before == {path: path.stat().st_mtime_ns for path in tmp_path.glob("*/metrics.jsonl")}
    with pytest.raises(ConfigError, match="--rates: 'fast' is not a list of numbers"):
        main(["sweep", "--rates", "fast"])
    for option, text, message in (
        ("--rates", "1e-3,nan", "--rates: '1e-3,nan' has a number that is not finite"),
        ("--batches", "2,2.5", "--batches: '2,2.5' is not a list of whole numbers"),
        ("--tokens", "nan", "--tokens: nan; tokens of each run"),
    ):
        with pytest.raises(ConfigError, match=message):
            main(["sweep", "--out", str(tmp_path), option, text])

    # with other settings its results would be those of another sweep
    with pytest.raises(ConfigError, match="a sweep with model.mlp.width 32, not 48; its runs could not be"):
        main([*argv, "--model.mlp.width", "48"])
