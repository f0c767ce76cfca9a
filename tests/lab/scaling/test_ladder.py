"""A ladder's sizes, budgets and branches; one of its sizes is trained."""
import dataclasses
import json
import os
import signal
import sys
import threading
import time
from functools import partial
from pathlib import Path

import pytest

from config import ConfigError
from config.reading import resolve
from config.reading.schedules import plan_pipeline
from durable.programs import Programs
from lab.scaling import ladder_command
from lab.scaling.command import main
from lab.scaling.experiment import ladder_points, run_all
from lab.scaling.ladder import (
    Ladder,
    check_ladder,
    config_of_depth,
    get_runs,
    read_ladder,
    stable_part,
    train_arguments,
    warmup_line,
    write_ladder,
)
from optim.lr import learning_rate
from plan.count import flops_per_token, parameters
from runtime.lines import read_metrics

ROOT = Path(__file__).parents[3]
PUBLISHED = Path(__file__).parent / "data" / "chinchilla_figure_4.csv"
SETTINGS = (
    ("data.tokenizer", "bytes"),
    ("model.vocab", "257"),
    ("train.seq_len", "32"),
    ("train.global_batch", "4"),
    ("train.micro_batch", "4"),
    ("train.max_minutes", "none"),
    ("optim.warmup", "5"),
    ("eval.batches", "2"),
)
PHASES = '[{"after_steps": 10, "optim.lr": 1e-4}]'
LADDER = Ladder("quickstart", (1, 2, 3), 5e9, budgets=3, ratio=2, aspect=16, head_dim=16, settings=SETTINGS)


def build_config(run, folder="runs"):
    name, *argv = train_arguments(LADDER, run, folder)
    cfg = resolve(name, None, argv)
    plan_pipeline(cfg, 1)  # the rules hold
    return cfg


def test_the_advice_on_runs_that_are_too_short_can_be_followed(tmp_path, capsys):
    words = ["ladder", "--out", str(tmp_path / "ladder"), "--show", "--flops", "1e11"]
    with pytest.raises(ConfigError, match="fewer than 50 show no law; try --flops ") as refused:
        main(words)
    ways = str(refused.value).partition("; try ")[2].split(", or ")
    assert len(ways) == 2
    for way in ways:
        assert main([*words, *way.split()]) == 0, way


def test_what_array_jobs_ask_before_they_requeue(tmp_path, capsys):
    """They ask for the runs of their own part alone."""
    words = ["ladder", "--out", str(tmp_path), "--kept"]

    def told(*more):
        assert main([*words, *more]) == 0
        return capsys.readouterr().out.split()

    assert told("--rung", "1") == ["-4", "-", "-"]  # four runs without a checkpoint
    (tmp_path / "d3-b1/checkpoints/step_00000040").mkdir(parents=True)
    reason = {"code": 80, "requeue": True, "rank": 0, "host": "n7", "wrong_device": True}
    (tmp_path / "d3-b1/exit_reason.json").write_text(json.dumps(reason))
    assert told("--rung", "1") == ["37", "1", "n7"]
    assert told("--rung", "0") == ["-4", "-", "-"]
    (tmp_path / "d3-b2").mkdir()
    (tmp_path / "d3-b2/exit_reason.json").write_text(json.dumps({"code": 75, "requeue": False}))
    assert told("--rung", "1") == ["37", "0", "n7"]
    sweep = ["sweep", "--out", str(tmp_path), "--kept", "--only", "0"]
    assert main(sweep) == 0 and capsys.readouterr().out == "-1 - -\n"
    assert not (tmp_path / "ladder.json").exists() and not (tmp_path / "sweep.json").exists()


def test_all_sizes_have_the_same_budgets(tmp_path):
    """Counted again from the very config that train.py gets."""
    for run in get_runs(LADDER):
        cfg = build_config(run, tmp_path)
        tokens = cfg.train.steps * cfg.train.global_batch * cfg.train.seq_len
        flops = tokens * flops_per_token(cfg.model, cfg.train.seq_len)
        assert tokens == run.tokens and flops == run.flops
        counts = parameters(cfg.model)
        assert counts["total"] == run.parameters
        assert counts["total"] - counts["embedding"] == run.non_embedding_parameters < run.parameters
        # steps are a multiple of five, so a budget is met to half of that
        assert abs(flops / LADDER.all_flops()[run.budget] - 1) < 2.5 / (cfg.train.steps / 2**run.budget)


def test_a_branch_begins_where_its_decay_does(tmp_path):
    runs = {run.name: run for run in get_runs(LADDER)}
    branches = [run for run in runs.values() if run.trunk]
    assert len(branches) == 6
    for run in branches:
        trunk = runs[run.trunk]
        cfg, of_trunk = build_config(run, tmp_path), build_config(trunk, tmp_path)
        saved = of_trunk.checkpoint.every
        assert run.branch_step % saved == 0, "the trunk has saved there"
        assert trunk.steps // saved <= of_trunk.checkpoint.keep, "and has kept it"
        assert cfg.checkpoint.resume.endswith(f"{run.trunk}/checkpoints/step_{run.branch_step:08d}")
        for step in range(1, run.steps + 1):
            rate = learning_rate(cfg.optim, step, run.steps)
            if step <= run.branch_step:
                assert rate == learning_rate(of_trunk.optim, step, trunk.steps)
            else:
                assert rate < cfg.optim.lr
        assert rate == 0
        assert stable_part(run.steps) == run.branch_step


def test_the_family_grows_with_its_dial(tmp_path):
    models = [build_config(get_runs(LADDER, depth)[0], tmp_path).model for depth in LADDER.depths]
    assert [model.layers for model in models] == [1, 2, 3]
    assert [model.hidden for model in models] == [16, 32, 48]
    assert [model.mixer.heads * model.mixer.head_dim for model in models] == [16, 32, 48]
    assert [model.mlp.width for model in models] == [48, 96, 128]
    assert {model.mup.base for model in models} == {16}


@pytest.mark.parametrize(
    "change,message",
    [
        ({"depths": (2, 3)}, "--depths: 2 sizes, and a law needs three"),
        ({"depths": (2, 2, 3)}, "--depths: different numbers of layers"),
        ({"depths": (0, 2, 3)}, "--depths: different numbers of layers, all at least 1"),
        ({"budgets": 0}, "--budgets: at least 2"),
        ({"budgets": 1}, "--budgets: at least 2, from which the fit has a power law"),
        ({"flops": float("nan")}, "--flops: nan"),
        ({"head_dim": 0}, "--aspect, --head-dim: 16 and 0; both at least 1"),
        ({"settings": (*SETTINGS, ("optim.decay", "cosine"))}, "optim.decay: a ladder sets it itself"),
        ({"settings": (*SETTINGS, ("model.layers", "9"))}, "model.layers: a ladder sets it itself"),
        ({"settings": (*SETTINGS, ("train.ramp", "2,2,100"))}, "train.ramp: a ladder counts steps of"),
        ({"settings": (*SETTINGS, ("train.phases", PHASES))}, "train.phases: a ladder counts steps of"),
        (
            {"settings": (*SETTINGS, ("optim.warmup", "100"))},
            r"optim.warmup: \d+ steps in all runs of depth 3, of which d3-b1 has .*; set it to a tenth",
        ),
        ({"ratio": 1}, "--ratio of 2 or more"),
        ({"aspect": 24}, "--aspect: 24 is not a multiple of --head-dim 16"),
        ({"flops": 1e8}, "--flops: d1-b2 would have 30 steps in 2e.08 FLOPs"),
        ({"settings": ()}, "model.vocab: none"),
    ],
)
def test_a_ladder_that_shows_no_law_is_refused(change, message):
    with pytest.raises(ConfigError, match=message):
        check_ladder(dataclasses.replace(LADDER, **change))


def test_a_folder_holds_one_ladder(tmp_path):
    write_ladder(LADDER, tmp_path)
    write_ladder(LADDER, tmp_path)
    assert read_ladder(tmp_path) == LADDER
    with pytest.raises(ConfigError, match="a ladder with flops 5000000000.0, not 10000000000.0; its runs"):
        write_ladder(dataclasses.replace(LADDER, flops=1e10), tmp_path)
    with pytest.raises(ConfigError, match="no ladder was started here"):
        read_ladder(tmp_path / "elsewhere")


def test_larger_depths_may_be_added(tmp_path):
    """With the smallest muP's base would go, and with it the runs that are there."""
    settings = tuple(reversed(SETTINGS))
    write_ladder(LADDER, tmp_path)
    larger = dataclasses.replace(LADDER, depths=(1, 2, 3, 5), settings=settings)
    write_ladder(larger, tmp_path)
    assert read_ladder(tmp_path).depths == (1, 2, 3, 5)
    before = {run.name: run for run in get_runs(LADDER)}
    assert {run.name: run for run in get_runs(larger) if run.depth != 5} == before
    with pytest.raises(ConfigError, match="a ladder of 1,2,3,5, and 5 is left out"):
        write_ladder(LADDER, tmp_path)

    upper = tmp_path / "upper"
    write_ladder(dataclasses.replace(LADDER, depths=(2, 3, 4)), upper)
    with pytest.raises(ConfigError, match="a ladder of 2,3,4, and muP scales from the smallest"):
        write_ladder(dataclasses.replace(LADDER, depths=(1, 2, 3, 4)), upper)
    other = dataclasses.replace(LADDER, settings=(*SETTINGS[:-1], ("eval.batches", "3")))
    with pytest.raises(ConfigError, match="a ladder with eval.batches 2, not 3"):
        write_ladder(other, tmp_path)


def test_a_warmup_that_is_long_for_the_shortest_run_is_said():
    """It is that of the longest run, which gives it a tenth of its own steps."""
    longer = dataclasses.replace(LADDER, settings=(*SETTINGS, ("optim.warmup", "12")))
    check_ladder(longer)
    shortest = get_runs(longer, 3)[-1]
    line = warmup_line(longer, 3)
    assert line.startswith(f"{shortest.name}: 12 of its {shortest.steps} steps are warmup")
    assert line.endswith(f"alone it would have {shortest.steps // 10}")
    assert all(warmup_line(LADDER, depth) is None for depth in LADDER.depths)


def test_of_a_mixture_the_parameters_that_a_token_uses_are_counted():
    mixture = (*SETTINGS, ("model.mlp", "experts"), ("model.mlp.experts", "4"), ("model.mlp.top_k", "1"))
    ladder = dataclasses.replace(LADDER, settings=mixture)
    counts = parameters(config_of_depth(ladder, 2).model)
    run = get_runs(ladder, 2)[0]
    assert run.parameters == counts["active"] < counts["total"]
    assert run.non_embedding_parameters == counts["active"] - counts["embedding"]


def test_two_sizes_at_a_time_and_a_signal_that_stops_both(tmp_path):
    """Each process gets the signal and ends as train.py does; none is begun after it."""
    program = (
        "import signal, sys, time\n"
        "signal.signal(signal.SIGTERM, lambda *_: sys.exit(75))\n"
        "print('ready', flush=True)\n"
        "time.sleep(60)\n"
    )
    begun = []

    with Programs() as programs:
        def chain(name):
            begun.append(name)
            return programs.run([sys.executable, "-c", program], tmp_path / name)

        def stop():
            until = time.monotonic() + 60
            while time.monotonic() < until:
                outputs = [path.read_text() for path in tmp_path.iterdir()]
                if len(outputs) == 2 and all("ready" in text for text in outputs):
                    break
                time.sleep(0.02)
            os.kill(os.getpid(), signal.SIGTERM)

        threading.Thread(target=stop).start()
        began = time.monotonic()
        assert run_all([partial(chain, name) for name in ("a", "b", "c")], jobs=2) == 75
        assert time.monotonic() - began < 50
    assert sorted(begun) == ["a", "b"]
    assert signal.getsignal(signal.SIGTERM) is not programs.forward_signal, "the handlers are given back"


def test_the_first_failure_ends_the_ladder():
    assert run_all([lambda: 0, lambda: 77, lambda: 0], jobs=1) == 77
    assert run_all([lambda: 0, lambda: 0], jobs=4) == 0


@pytest.mark.slow
def test_one_size_trains_and_branches(tmp_path, capsys):
    """The command as an array job calls it: the trunk, then the branches from its checkpoints."""
    argv = ["ladder", "--out", str(tmp_path), "--depths", "1,2,3", "--rung", "0"]
    argv += ["--flops", "5e9", "--budgets", "2"]
    argv += ["--eval.tasks", str(ROOT / "configs" / "tasks" / "python.jsonl")]
    for key, value in SETTINGS:
        argv += [f"--{key}", value]
    assert main(argv) == 0

    ladder = read_ladder(tmp_path)
    trunk, branch = get_runs(ladder, 1)
    of_trunk, of_branch = (read_metrics(tmp_path / run.name)[0] for run in (trunk, branch))
    first = of_branch[0]
    assert first["step"] == branch.branch_step + 1
    at_branch = of_trunk[branch.branch_step]
    assert at_branch["step"] == first["step"]
    assert at_branch["loss"] == first["loss"], "the branch continues with the trunk's weights and data"
    assert len(of_trunk) == trunk.steps and of_branch[-1]["step"] == branch.steps
    assert of_branch[-1]["lr"] == 0 == of_trunk[-1]["lr"]

    # again: nothing is left to do
    capsys.readouterr()
    before = (tmp_path / branch.name / "metrics.jsonl").stat().st_mtime_ns
    assert main(argv) == 0
    assert (tmp_path / branch.name / "metrics.jsonl").stat().st_mtime_ns == before
    assert "d1-b1: validation loss" in capsys.readouterr().out

    # scores of the task at the end are part of a point, for a law of its own
    points = ladder_points(ladder, tmp_path, [1])
    last = json.loads((tmp_path / branch.name / "metrics.jsonl").read_text().splitlines()[-1])
    assert points.scores.keys() == {"tasks/python/centered"}
    assert points.scores["tasks/python/centered"][1] == last["tasks/python/centered"]

    # the other sizes are missing
    with pytest.raises(ConfigError, match="d2-b2: not done"):
        main(["fit", str(tmp_path)])

    # a loss that is null is one of a run that is done
    metrics = tmp_path / branch.name / "metrics.jsonl"
    *steps, last = metrics.read_text().splitlines()
    row = json.loads(last) | {"val_loss": None, "nonfinite": True}
    metrics.write_text("\n".join([*steps, json.dumps(row)]) + "\n")
    with pytest.raises(ConfigError, match="d1-b1: diverged: its validation loss is not finite"):
        main(["fit", str(tmp_path)])
    capsys.readouterr()
    assert main(argv) == 0
    assert "d1-b1: diverged" in capsys.readouterr().out


def write_points(folder, loss):
    """A table of nine runs with losses by a formula of parameters and tokens."""
    lines = ["run,parameters,tokens,flops,loss"]
    for size in (1e6, 4e6, 1.6e7):
        for tokens in (1e8, 4e8, 1.6e9):
            lines.append(f"r,{size},{tokens},{6 * size * tokens},{loss(size, tokens)}")
    (folder / "points.csv").write_text("\n".join(lines) + "\n")
    return folder / "points.csv"


@pytest.mark.slow
def test_a_fit_of_a_table_writes_what_it_prints(tmp_path, capsys):
    table = write_points(tmp_path, lambda size, tokens: 1.7 + 400 / size**0.34 + 1200 / tokens**0.31)
    out = tmp_path / "out"
    assert main(["fit", "--points", str(table), "--out", str(out), "--bootstraps", "20"]) == 0
    shown = capsys.readouterr().out
    assert "9 runs of 3 sizes" in shown and "alpha" in shown
    tree = json.loads((out / "fit.json").read_text())
    assert tree["laws"]["chinchilla"]["numbers"]["alpha"] == pytest.approx(0.34, rel=1e-3)
    assert tree["optima"]["parametric"]["exponent"] == pytest.approx(0.31 / 0.65, rel=1e-3)
    for name in ("contours.png", "fit.png", "points.csv"):
        assert (out / name).stat().st_size > 100
    with pytest.raises(ConfigError, match="needs the folder of a ladder, or --points CSV"):
        main(["fit"])
    with pytest.raises(ConfigError, match="--bootstraps: 0; at least 2"):
        main(["fit", "--points", str(table), "--bootstraps", "0"])


@pytest.mark.slow
def test_a_law_is_printed_where_an_approach_cannot_be_had(tmp_path, capsys):
    """Losses that rise with the size: no best size by the law, and it took the laws with it."""
    table = write_points(tmp_path, lambda size, tokens: 2 + size**0.1 / 10 + 1 / tokens**0.1)
    argv = ["fit", "--points", str(table), "--out", str(tmp_path), "--bootstraps", "5"]
    assert main(argv) == 0
    shown = capsys.readouterr().out
    assert "chinchilla: loss =" in shown and "kaplan: loss =" in shown
    assert "parametric: not available: alpha" in shown
    tree = json.loads((tmp_path / "fit.json").read_text())
    assert tree["optima"] == {} and tree["missing"]["parametric"].startswith("alpha")
    assert set(tree["laws"]) == {"chinchilla", "kaplan"}
    assert (tmp_path / "contours.png").stat().st_size > 1000


@pytest.mark.filterwarnings("error::UserWarning")
def test_a_table_of_many_sizes_is_drawn(tmp_path, monkeypatch, capsys):
    """62 sizes do not fit a legend: matplotlib warned, and the picture had no axes."""
    monkeypatch.setattr(ladder_command, "SECONDS_BETWEEN_LINES", 0.0)
    assert main(["fit", "--points", str(PUBLISHED), "--out", str(tmp_path), "--bootstraps", "5"]) == 0
    out, err = capsys.readouterr()
    assert "240 runs of 62 sizes" in out
    assert err.splitlines()[3] == "chinchilla: 3 of 5 fits to runs drawn again"  # a sign of life
