"""inside.jsonl and inside.png (log.inside_every): what a run leaves of its layers, also after kills, rewinds
and steps that were skipped.
"""

import json
import math
from types import SimpleNamespace

import fake_wandb
import pytest
import run_folder
import torch
from ranks import MODEL, corpus, job

import train
from config.tree import with_values
from model.inside import statistics_of
from parallel.extras import StepResult
from runtime.inside import inside_png, read_inside, sink_name
from runtime.metrics import MetricsLogger
from runtime.setup import LaunchEnv


@pytest.fixture(scope="module")
def prefix(tmp_path_factory):
    return corpus(tmp_path_factory.mktemp("inside"))


def arguments(prefix, folder, name, *more):
    args = ["llama3-tiny", *MODEL, "--data.path", prefix, "--train.steps", "8", "--checkpoint.every", "2"]
    return [*args, "--log.dir", str(folder), "--log.name", name, *more]


def lines(folder):
    return run_folder.read_lines(folder / "inside.jsonl")


def numbers(row, name):
    """All numbers of a statistic, of every kind and layer."""
    found = [value for key, value in row.items() if key.partition("/")[0] == name]
    return [x for value in found for x in (value if isinstance(value, list) else [value])]


# what runs beside it, or in its way
BESIDE = (
    "--train.ema 0.9 --parallel.recompute full --train.rerun_every 3 --train.rerun_suspects true "
    "--optim.spike_sigma 50 --log.noise_scale true"
).split()


def test_a_run_is_what_it_is_without_and_steps_that_were_skipped_have_no_update(tmp_path, prefix):
    fault = "step.compute:rank=0:step=5:act=nan"
    for name, more in (("with", ["--log.inside_every", "1"]), ("without", [])):
        end = job(tmp_path / name, 1, arguments(prefix, tmp_path, name, *BESIDE, *more), fault=fault)
        assert end.codes == [0], end.logs
    same = ("step", "loss", "grad_norm", "skipped", "noise_scale", "val_loss")
    kept = [[[row.get(key) for key in same] for row in run_folder.rows(tmp_path / name)]
            for name in ("with", "without")]
    assert kept[0] == kept[1] and not (tmp_path / "without" / "inside.jsonl").exists()

    rows = lines(tmp_path / "with")
    assert [row["step"] for row in rows] == list(range(1, 9))
    for row in rows:
        is_skipped = row["step"] == 5
        assert all((x == 0) == is_skipped for x in numbers(row, "update_norm")), row["step"]
        assert all((x == 0) == is_skipped for x in numbers(row, "update_ratio"))
        assert min(numbers(row, "weight_norm")) > 0 and min(numbers(row, "block_rms")) > 0
    before, after, later = (numbers(row, "weight_norm") for row in rows[4:7])
    assert before == after != later


@pytest.mark.parametrize("every", [1, 2, 3])
def test_a_run_that_is_killed_and_resumed_has_each_step_once(tmp_path, prefix, every):
    words = ["--log.inside_every", str(every)]
    assert job(tmp_path / "w", 1, arguments(prefix, tmp_path, "whole", *words)).codes == [0]
    args = arguments(prefix, tmp_path, "killed", *words)
    assert job(tmp_path / "k", 1, args, fault="step.begin:step=8:act=SIGKILL").codes == [-9]
    with open(tmp_path / "killed" / "inside.jsonl", "a") as file:
        file.write('{"step": 8, "block_rm')
    assert job(tmp_path / "k", 1, args).codes == [0]
    assert lines(tmp_path / "killed") == lines(tmp_path / "whole")
    assert [row["step"] for row in lines(tmp_path / "whole")] == list(range(every, 9, every))


def test_the_sinks_have_what_the_file_has(tmp_path, prefix, monkeypatch):
    events = pytest.importorskip("tensorboard.backend.event_processing.event_accumulator")
    told = fake_wandb.install(tmp_path, monkeypatch)
    words = "--log.inside_every 4 --log.tensorboard true --log.wandb offline --log.every 3".split()
    assert job(tmp_path / "j", 1, arguments(prefix, tmp_path, "run", *words)).codes == [0]
    wanted = {}
    for row in lines(tmp_path / "run"):
        for key, value in row.items():
            name, _, kind = key.partition("/")
            for layer, number in enumerate(value if isinstance(value, list) else [value]):
                of_layer = f"/layer_{layer:02}" if isinstance(value, list) else ""
                if key != "step" and number is not None:
                    tag = f"inside/{name}{of_layer}" + f"/{kind}" * bool(kind)
                    wanted.setdefault(tag, {})[row["step"]] = number
    for tag in ("grad_norm/layer_01/attn.q", "block_rms/layer_00", "weight_rms/head"):
        assert f"inside/{tag}" in wanted
    assert all(list(of_steps) == [4, 8] for of_steps in wanted.values())

    logged = [words[2] for words in told() if words[0] == "log" and "train/loss" in words[2]]
    found = {}
    for values in logged:
        for tag, number in values.items():
            if tag.startswith("inside/"):
                found.setdefault(tag, {})[values["step"]] = number
    assert found == wanted

    seen = events.EventAccumulator(str(tmp_path / "run" / "tensorboard"), size_guidance={"scalars": 0})
    seen.Reload()
    assert {tag for tag in seen.Tags()["scalars"] if tag.startswith("inside/")} == set(wanted)
    for tag, of_steps in wanted.items():
        assert {event.step: event.value for event in seen.Scalars(tag)} == pytest.approx(of_steps)
    assert "inside" in seen.Tags()["images"]


def logger(tmp_path, cfg, start_step=0):
    cfg = with_values(cfg, {"log.inside_every": 2, "model.vocab": 64})
    log = MetricsLogger(tmp_path, cfg, LaunchEnv(), steps=20, flops_per_token=1.0, start_step=start_step)
    return log, cfg


def feed(log, cfg, steps, value=float):
    names = statistics_of(cfg.model)
    for step in steps:
        one = torch.ones(())
        result = StepResult(one, one, one > 0, 16 * one)
        vector = torch.full((len(names),), value(step), dtype=torch.float64) if step % 2 == 0 else None
        log.log_step(step, result, learning_rate=0.1, seconds=1.0, data_seconds=0.0, inside=vector)


def test_steps_that_are_trained_again_are_there_once(tmp_path, cfg):
    log, cfg = logger(tmp_path, cfg)
    feed(log, cfg, range(1, 10))
    log.rewind(5)
    feed(log, cfg, range(6, 10), lambda step: 10.0 * step)
    log.close()
    found = [(row["step"], row["block_rms"][0], row["grad_norm/embedding"]) for row in lines(tmp_path)]
    assert found == [(2, 2, 2), (4, 4, 4), (6, 60, 60), (8, 80, 80)]
    log, cfg = logger(tmp_path, cfg, start_step=4)
    log.close()
    assert [row["step"] for row in lines(tmp_path)] == [2, 4]


def test_what_is_not_finite_is_null_and_in_no_sink(tmp_path, cfg):
    log, cfg = logger(tmp_path, cfg)
    seen = []
    log.sinks = [SimpleNamespace(put=lambda step, values: seen.append(values), warning=lambda: None)]
    feed(log, cfg, range(1, 5), lambda step: math.nan if step == 2 else math.inf)
    log.flush()
    for row in lines(tmp_path):
        assert set(numbers(row, "grad_norm")) == set(numbers(row, "largest_logit")) == {None}
        json.dumps(row, allow_nan=False)
    assert seen and not [name for values in seen for name in values if name.startswith("inside")]


def test_a_full_disk_costs_the_lines_alone(tmp_path, cfg, capsys):
    log, cfg = logger(tmp_path, cfg)

    def full(block):
        raise OSError(28, "No space left on device")

    log.inside.file.append = full
    feed(log, cfg, range(1, 9))
    log.close()
    assert not lines(tmp_path) and len(run_folder.rows(tmp_path)) == 8
    assert capsys.readouterr().out.count("inside.jsonl: No space left on device") == 1


# ---- the picture -------------------------------------------------------------------------------------------


def test_a_run_draws_its_layers(tmp_path, prefix, whole_runs):
    words = "--model.mlp experts --model.mlp.experts 4 --model.mlp.width 16 --log.inside_every 1".split()
    assert train.main(arguments(prefix, tmp_path, "run", *words)) == 0
    picture = tmp_path / "run" / "inside.png"
    assert picture.read_bytes().startswith(b"\x89PNG") and picture.stat().st_size > 30_000


def test_the_picture_reads_what_is_whole(tmp_path):
    assert inside_png(tmp_path) is None
    row = {"grad_norm/attn.q": [3.0, None], "grad_norm/mlp.up": [4.0, 2.0], "grad_norm/head": 7.0}
    text = [json.dumps({"step": step, **row}) for step in range(1, 2001)]
    text[3] = '{"step": 4, "grad_norm/head": "seven"}'
    (tmp_path / "inside.jsonl").write_text("\n".join([*text, "torn"]))
    rows = read_inside(tmp_path, 100)
    assert len(rows) == 100 and (rows[0]["step"], rows[-1]["step"]) == (1, 2000)
    assert len(read_inside(tmp_path, 5000)) == 1999
    assert inside_png(tmp_path, "run $1$").read_bytes().startswith(b"\x89PNG")


def test_a_map_has_the_norm_of_a_layers_parameters_together():
    from runtime.inside import heat_map

    rows = [
        {"step": 1, "update_norm/a": [3.0, None], "update_norm/b": [4.0, 2.0], "update_norm/head": 7.0,
         "weight_norm/a": [6.0, None], "weight_norm/b": [8.0, 0.0], "weight_norm/head": None},
    ]
    labels, values = heat_map(rows, "update_norm")
    assert labels == ["0", "1", "head"] and values[:, 0].tolist() == [5, 2, 7]
    ratio = heat_map(rows, "update_ratio")[1][:, 0].tolist()
    assert ratio[:2] == [0.5, math.inf] and math.isnan(ratio[2])
    assert heat_map(rows, "dead_units") is None and heat_map([], "grad_norm") is None


# ---- bad input ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("value", ["0", "-1", "1.5", "often"])
def test_a_bad_interval_is_refused_in_a_line(tmp_path, prefix, value):
    end = job(tmp_path / "j", 1, arguments(prefix, tmp_path, "run", "--log.inside_every", value))
    assert end.codes == [2] and len(end.errors()) == 1 and "log.inside_every" in end.errors()[0]
    assert not (tmp_path / "run").exists()


def test_names_have_as_many_digits_as_the_last_layer(cfg):
    names = statistics_of(with_values(cfg.model, {"layers": 101, "vocab": 64}))
    shown = [sink_name(name, 101) for name in names]
    assert len(set(shown)) == len(shown) and "inside/mlp_rms/layer_007" in shown
