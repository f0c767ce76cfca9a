"""python -m scripts.plan: the table, its numbers as JSON, what it says of bad input."""

import json
import re
import shlex
import subprocess
from dataclasses import replace

import pytest

from config import ConfigError
from config.reading import dump, resolve, unused
from config.reading.schedules import plan_pipeline
from config.reading.suggestions import check_rules
from config.tree import with_values
from plan import elastic
from plan.cost import cluster
from plan.count import parameters
from plan.efficiency import CLASSES, MEASURED_RANGE, OURS, Class, get_efficiency
from plan.near_ties import NEAR, near_groups
from plan.run_report import checkpoint_bytes
from plan.search import Target, search
from plan.what_if import WhatIf
from plan.whole_run import Reliability, whole_run
from runtime.failure import fail_cleanly
from scripts import plan

SMALL = (
    "llama3-8b --gpus 16 --cluster h100-ib --train.seq_len 4096 --train.global_batch 64 "
    "--train.micro_batch 1 --parallel.cp 1 --parallel.dp_rep 1"
).split()


@pytest.mark.slow
def test_the_best_layouts_and_how_to_run_them(capsys):
    assert plan.main([*SMALL, "--top", "3"]) == 0
    said = capsys.readouterr().out.splitlines()
    assert "8.0B parameters" in said[0] and "16 GPUs of h100-ib" in said[0]
    assert said[3].split()[:2] == ["layout", "step"] and len(said[4:7]) == 3
    words = said[-1].removeprefix("best     train.py ").split()
    cfg = resolve(words[0], None, words[1:])
    check_rules(cfg, 16)
    assert cfg.train.global_batch == 64 and plan.layout_text(cfg, 16) == re.split(" {2,}", said[4])[0]


def test_each_setting_is_said_once(capsys):
    argv = ["llama3-8b", "--gpus", "8", "--cluster", "h100-ib", "--top", "1", "--parallel.tp=8"]
    assert plan.main([*argv, "--parallel.sp", "true", "--data.path", "0.5 a 0.5 b"]) == 0
    command = capsys.readouterr().out.splitlines()[-1]
    words = shlex.split(command)
    keys = [word for word in words if word.startswith("--")]
    assert len(set(keys)) == len(keys) and "=" not in command
    assert words[words.index("--parallel.tp") + 1] == "8"
    assert words[words.index("--data.path") + 1] == "0.5 a 0.5 b"


ONE_NODE = ["qwen3-0.6b", "--gpus", "8", "--cluster", "h100-ib", "--parallel.tp", "1", "--parallel.cp", "1"]
ONE_NODE += ["--parallel.pp", "1", "--parallel.dp_rep", "1"]


def found_by(argv, capsys) -> list[dict]:
    """The objects that --json prints."""
    assert plan.main([*argv, "--json"]) == 0
    return [json.loads(line) for line in capsys.readouterr().out.splitlines()]


def test_what_published_runs_say_of_the_step_stands_beside_it(capsys):
    """For chips that have a class, and not for others."""
    argv = ["qwen3-0.6b", "--gpus", "8", "--top", "1", "--parallel.tp=8", "--cluster"]
    assert plan.main([*argv, "h100-ib"]) == 0
    said = capsys.readouterr().out
    fitted = CLASSES[Class("hopper", OURS)]
    step = float(re.search(r"^tp8 \S+ mb\d+\S*(?: \S+)*? {2,}([\d.]+)", said, re.M)[1])
    line = next(line for line in said.splitlines() if "published runs" in line)
    rows, _, *numbers = map(float, re.findall(r"\d+\.?\d*", line))
    assert rows == fitted.rows and numbers[:2] == list(fitted.range)
    assert numbers[2:] == pytest.approx([share * step for share in fitted.range], abs=2e-3)
    assert plan.main([*argv, "l4-pcie"]) == 0
    assert "published" not in capsys.readouterr().out


@pytest.mark.slow
def test_forecasts_beside_published_measurements(capsys):
    assert plan.main(["--published"]) == 0
    said = capsys.readouterr().out
    judged = next(line for line in said.splitlines() if line.startswith("| all, judge"))
    rows, *shares = map(float, re.findall(r"\d+\.?\d*", judged))
    assert rows == 98 and shares[2] < shares[0] / 2 and shares[3] < 0.75 * shares[1]
    for one, fitted in CLASSES.items():
        assert f"{one}: {fitted.range[0]:.2f} to {fitted.range[1]:.2f}\n" in said
    before, after = map(float, re.search(r"judged: ([\d.]+) shared, ([\d.]+) classes", said).groups())
    assert min(before, after) > 0.75


def on_hopper(monkeypatch, **constants):
    """Gives the class of these clusters other constants than those that were fitted."""
    hopper = Class("hopper", "megatron")
    fitted = CLASSES[hopper]
    efficiency = replace(fitted.efficiency, **constants)
    monkeypatch.setitem(CLASSES, hopper, fitted._replace(efficiency=efficiency))


def test_of_layouts_that_are_equally_fast_the_simplest_comes_first(capsys, monkeypatch):
    """With every exchange hidden, ZeRO 1, 2 and 3 take the same time: 1 is recommended, though 3 holds less.
    And what is faster still stands before what is simpler.
    """
    on_hopper(monkeypatch, hidden=1.0)
    found = found_by([*ONE_NODE, "--train.micro_batch", "4", "--top", "9"], capsys)
    equal = [each for each in found if each["step_s"] == pytest.approx(found[0]["step_s"], rel=1e-4)]
    layouts = [each["layout"] for each in equal]
    assert layouts[:3] == ["dp8 zero1 mb4", "dp8 zero2 mb4", "dp8 zero3 mb4"]
    assert equal[0]["memory"] > equal[2]["memory"]
    groups = [[each["step_s"] for each in found if each["group"] == number] for number in (1, 2)]
    assert max(groups[0]) <= 1.02 * min(groups[0]) < min(groups[1])


def test_the_best_does_not_depend_on_how_many_are_shown(capsys, monkeypatch):
    """It is not the fastest here, which only the longer table shows: ZeRO-1 has no room for two sequences."""
    on_hopper(monkeypatch, op=0.0, hidden=0.97)
    argv = ["llama3-8b", "--gpus", "64", "--cluster", "h100-ib", "--parallel.tp", "1", "--parallel.cp", "1"]
    argv += ["--parallel.pp", "1", "--parallel.dp_rep", "1"]
    first, *others = found_by([*argv, "--top", "3"], capsys)
    (alone,) = found_by([*argv, "--top", "1"], capsys)
    assert alone == first
    assert min(each["step_s"] for each in others) < 0.999 * first["step_s"]


def test_near_ties_stand_above_a_rule_and_the_second_is_explained(capsys, monkeypatch):
    monkeypatch.setenv("COLUMNS", "80")
    on_hopper(monkeypatch, hidden=1.0)
    argv = [*ONE_NODE, "--train.micro_batch", "4", "--top", "5"]
    numbers = found_by(argv, capsys)
    assert plan.main(argv) == 0
    lines = capsys.readouterr().out.splitlines()
    assert max(map(len, lines[:-1])) <= 80
    head = next(index for index, line in enumerate(lines) if line.startswith("layout"))
    size = sum(each["group"] == 1 for each in numbers)
    assert 1 < size < 5
    assert lines[head + 1 + size].startswith("-- within 2 % of each other, the simplest first --")
    assert all(line.startswith("dp8 ") for line in lines[head + 1:head + 1 + size])
    (second,) = [line for line in lines if line.startswith("second ")]
    assert second.split(None, 1)[1].startswith("parallel.zero 2 (first: 1) · as fast · ")

    # what the line is made of
    told = numbers[1]["against_first"]
    assert told["keys"] == {"parallel.zero": [2, 1]}
    assert told["memory"] == numbers[1]["memory"] - numbers[0]["memory"]
    slower = numbers[-1]["against_first"]
    assert sum(slower["parts"].values()) == pytest.approx(slower["seconds"], abs=1e-9)
    assert slower["seconds"] == pytest.approx(numbers[-1]["step_s"] - numbers[0]["step_s"])


@pytest.mark.slow
def test_a_table_of_80_columns_says_what_is_left_out(capsys, monkeypatch):
    monkeypatch.setenv("COLUMNS", "80")
    assert plan.main([*SMALL, "--top", "3"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert max(map(len, lines[:-1])) <= 80  # the last line is a command
    head = next(line for line in lines if line.startswith("layout"))
    assert {"layout", "step", "MFU", "GiB"} <= set(head.split())
    note = next(line for line in lines if line.startswith("too narrow for: GB inside"))
    assert "--json has all" in note
    monkeypatch.delenv("COLUMNS")
    assert plan.main([*SMALL, "--top", "3"]) == 0
    out = capsys.readouterr().out
    assert "GB between" in out and "too narrow" not in out


def test_async_tensor_parallelism_sends_as_much_and_waits_less(capsys):
    """Parts travel beside the products of all linear layers, not of gradients of weights alone."""
    def best(is_async: str) -> dict:
        argv = ["llama3-8b", "--gpus", "8", "--cluster", "h100-ib", "--top", "1", "--json"]
        argv += ["--parallel.tp", "8", "--parallel.sp", "true", "--parallel.async_tp", is_async]
        assert plan.main(argv) == 0
        return json.loads(capsys.readouterr().out)

    without, with_async = best("false"), best("true")
    assert with_async["sent_inside"] == pytest.approx(without["sent_inside"], rel=1e-9)
    waited = [found["exposed"]["tp"] * found["step_s"] for found in (without, with_async)]
    assert waited[1] < waited[0] / 2
    assert with_async["step_s"] < without["step_s"]


@pytest.mark.slow
def test_chunks_of_experts_are_offered_where_they_are_faster(capsys):
    """Without shared experts, exchanges in chunks travel beside the products; and a number that is set
    stays."""
    def best(*keys: str) -> dict:
        argv = ["qwen3-30b-a3b", "--gpus", "32", "--cluster", "h100-ib", "--top", "1", "--json", *keys]
        argv += ["--parallel.ep", "8", "--parallel.pp", "1", "--parallel.tp", "1", "--parallel.cp", "1"]
        argv += ["--train.seq_len", "4096", "--train.global_batch", "512", "--parallel.zero", "1"]
        assert plan.main(argv) == 0
        return json.loads(capsys.readouterr().out)

    whole, found = best("--parallel.ep_chunks", "1"), best()
    assert "ep_chunks" not in whole["arguments"] and "--parallel.ep_chunks" in found["arguments"]
    assert found["sent_inside"] == pytest.approx(whole["sent_inside"], rel=1e-9)
    assert found["exposed"]["ep_etp"] * found["step_s"] < 0.6 * whole["exposed"]["ep_etp"] * whole["step_s"]
    assert found["step_s"] < 0.95 * whole["step_s"]


@pytest.mark.slow
def test_json_has_the_parts_of_a_step(capsys):
    assert plan.main([*SMALL, "--top", "2", "--json"]) == 0
    found = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    assert len(found) == 2 and found[0]["step_s"] <= found[1]["step_s"] * 1.02
    for x in found:
        assert 0 < x["mfu"] < 1 and x["memory"] < 79.1 * 2**30 and x["sent_inside"] + x["sent_between"] > 0
        whole = x["compute"] + x["bubble"] + x["optimizer"] + sum(x["exposed"].values())
        assert whole == pytest.approx(1, abs=1e-6)


@pytest.mark.parametrize(
    "words, said",
    [
        ("llama3-8b --gpus 16 --cluster h101-ib",
         "--cluster: no such cluster 'h101-ib'; configs/clusters.yaml has v100-ib"),
        ("llama3-8b --gpus 0 --cluster h100-ib", "--gpus: must be at least 1"),
        ("llama3-8b --gpus 8:4 --cluster h100-ib", "--gpus: MIN:MAX, such as 4:8"),
        ("llama3-8b --gpus 16", "plan: needs NAME, --gpus N and --cluster C"),
        ("llama3-9b --gpus 16 --cluster h100-ib", "llama3-9b: no such recipe"),
        ("llama-mini --gpus 8 --cluster h100-ib", "model.vocab: is the tokenizer's"),
        ("llama3-8b --gpus 8 --cluster v100-ib",
         "train.dtype: configs/clusters.yaml has no bf16 for v100-ib"),
        ("llama3-8b --gpus 8 --cluster a100-ib --train.dtype fp8",
         "train.dtype: configs/clusters.yaml has no fp8 for a100-ib"),
        ("llama3-8b --gpus 8 --cluster h100-ib --parallel.stages 40",
         "--gpus: no layout of llama3-8b on 8 GPUs of 79 GiB fits (0 are too large, 0 against the rules); "
         "parallel.stages: 40 makes 40 layers, model.layers is 32"),
        ("llama3-8b --gpus 7 --cluster h100-ib --parallel.tp 2",
         "--gpus: no layout of llama3-8b on 7 GPUs of 79 GiB fits (0 are too large, 0 against the rules); "
         "parallel.tp*pp*cp*dp_rep = 2*1*1*1 = 2 does not divide the world size 7"),
        ("mixtral-8x7b --gpus 8 --cluster h100-ib --model.mlp.capacity.factor 0.5",
         "model.mlp.capacity.factor: 0.5 is below 1, and experts drop tokens even of equal shares"),
        ("llama3-8b --gpus 16 --cluster h100-ib --parallel.tpp 2", "parallel.tpp: no such key"),
        # a whole run
        ("{one_layout} --price 2", "--price: is of a whole run; give its --tokens"),
        ("{one_layout} --tokens -1", "--tokens: -1 must be above 0"),
        ("{one_layout} --tokens nan", "--tokens: nan must be above 0"),
        ("{one_layout} --tokens 1e12 --gpus 4:8", "--tokens: is of a run on one number of GPUs"),
        ("{one_layout} --tokens 1e12 --law nowhere.csv", "nowhere.csv: cannot be read as a table"),
        ("{one_layout} --tokens 1e12 --restart -1", "--restart: -1 must not be below 0"),
        # a batch file
        ("{two_nodes} --sbatch new --gpus 12",
         "--sbatch: 12 GPUs do not fill their nodes of 8; use --gpus 8 or 16"),
        ("{two_nodes} --sbatch new --gpus 8:16", "--sbatch: is of a job on one number of GPUs"),
        ("{two_nodes} --sbatch nowhere/job.sbatch", "--sbatch: nowhere: no such folder"),
        # what if
        ("{one_layout} --gpus 4:8 --what-if links=0.5", "--what-if: is of a job on one number of GPUs"),
    ],
)
def test_a_question_that_cannot_be_answered_is_refused_by_its_option(words, said, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    places = {"one_layout": shlex.join(ONE_LAYOUT), "two_nodes": shlex.join(TWO_NODES)}
    with pytest.raises(ConfigError, match="^" + re.escape(said)):
        plan.main(shlex.split(words.format(**places)))
    assert not list(tmp_path.iterdir())


def test_what_would_fit_is_said_and_fits(capsys):
    """8B on one H100: masters and moments in 16 bits, or another GPU."""
    argv = ["llama3-8b", "--cluster", "h100-ib", "--train.seq_len", "2048", "--train.global_batch", "16"]
    argv += ["--parallel.recompute", "full", "--train.micro_batch", "1"]
    with pytest.raises(ConfigError) as error:
        plan.main([*argv, "--gpus", "1"])
    said = str(error.value)
    assert "the smallest needs at least" in said and "--parallel.offload optimizer" in said
    for words in (["--gpus", "1", "--optim.states", "bf16"], ["--gpus", "2"]):
        assert " ".join(words[-2:]).removeprefix("--gpus ") in said
        assert plan.main([*argv, *words, "--top", "1"]) == 0


def test_what_train_refuses_is_refused_and_nothing_else(capsys):
    """A key that has an effect in some phase has one."""
    job = [*SMALL, "--top", "1"]
    longer = ["--train.seq_len", "8192"]
    with pytest.raises(ConfigError, match="^model.context: "):
        plan.main(["llama2-7b", *job[1:], *longer])
    phases = json.dumps([{"after_steps": 10, "optim.decay": "linear"}])
    given = ["--optim.decay", "constant", "--optim.min_lr", "1e-5"]
    with pytest.raises(ConfigError, match="^optim.min_lr: 1e-05 does nothing"):
        plan.main([*job, *given])
    assert plan.main([*job, *given, "--train.phases", phases, "--train.steps", "20"]) == 0


@pytest.mark.slow
def test_an_elastic_job_on_each_number_of_gpus(capsys):
    """As train.py chooses: as given where that fits, and lighter on fewer GPUs, which hold more each."""
    of_run = ["--parallel.zero", "3", "--train.seq_len", "8192", "--train.global_batch", "48"]
    words = ["llama3-8b", "--gpus", "2:4", "--cluster", "h100-ib", *of_run]
    assert plan.main([*words, "--json"]) == 0
    reports = list(map(json.loads, capsys.readouterr().out.splitlines()))
    assert [each["gpus"] for each in reports] == [4, 3, 2]
    memory = cluster("h100-ib").memory
    cfg = resolve("llama3-8b", None, [*of_run, "--parallel.elastic", "true"])
    for each in reports:
        layout = elastic.layout_for(cfg, each["gpus"], elastic.RankDevice("NVIDIA H100 80GB HBM3", memory))
        assert (each["changed"], each["given_memory"] or 0) == (layout.changed, layout.too_large)
        assert each["memory"] <= memory and not each["by_planner"]
    assert not reports[0]["changed"] and reports[0]["given_memory"] is None
    assert all(each["given_memory"] > memory for each in reports[1:])

    assert plan.main(words) == 0
    table = capsys.readouterr().out.splitlines()
    assert table[0].split() == ["GPUs", "layout", "GiB", "why"] and len(table) == 4
    assert table[1].split()[:3] == ["4", "dp4", "zero3"] and "GiB" not in table[1]
    assert "full" in table[3] and "the given settings would take" in table[3]


def test_an_elastic_job_that_no_number_of_gpus_can_hold(capsys):
    words = ["llama3-70b", "--gpus", "1:2", "--cluster", "h100-ib", "--train.seq_len", "2048"]
    assert plan.main([*words, "--train.global_batch", "8"]) == 2
    table = capsys.readouterr().out.splitlines()
    assert len(table) == 3 and all("none" in line and " fits into the 79.1 GiB" in line for line in table[1:])


# ---- the whole run -----------------------------------------------------------------------------------------

ONE_LAYOUT = ["qwen3-0.6b", "--gpus", "8", "--cluster", "h100-ib", "--top", "1", "--parallel.tp", "1"]
ONE_LAYOUT += ["--parallel.cp", "1", "--parallel.pp", "1", "--parallel.dp_rep", "1", "--parallel.zero", "1"]
ONE_LAYOUT += ["--train.micro_batch", "4", "--train.seq_len", "4096", "--train.global_batch", "256"]


def test_a_whole_run_by_hand(capsys, tmp_path, monkeypatch):
    """Days and hours from the step's time; a run of Chinchilla's law beside its own numbers."""
    monkeypatch.setattr(plan, "BOOTSTRAPS", 8)
    table = tmp_path / "runs.csv"
    rows = ["run,parameters,tokens,flops,loss"]
    for size in (1e6, 3e6, 1e7, 3e7):
        for tokens in (1e8, 3e8, 1e9):
            loss = 1.7 + 400 / size**0.34 + 410 / tokens**0.28
            rows.append(f"{size:g}-{tokens:g},{size},{tokens},{6 * size * tokens},{loss}")
    table.write_text("\n".join(rows) + "\n")
    argv = [*ONE_LAYOUT, "--tokens", "1e12", "--price", "2", "--law", str(table), "--noise-scale", "1048576"]
    argv += ["--mtbf", "1e9", "--pue", "1", "--checkpoint.async_save", "true"]
    assert plan.main([*argv, "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    run = found["run"]
    assert run["steps"] == 953_675  # of 2**20 tokens
    assert run["days"] == pytest.approx(run["steps"] * found["step_s"] / 86_400, rel=2e-3)
    assert run["gpu_hours"] == pytest.approx(8 * 24 * run["days"])
    assert run["dollars"] == pytest.approx(2 * run["gpu_hours"])
    assert run["mwh"] == pytest.approx(700e-6 * run["gpu_hours"])
    assert run["times_fewest_tokens"] == run["times_fewest_steps"] == 2.0
    size = parameters(resolve("qwen3-0.6b", None, []).model)["total"]
    assert run["loss"] == pytest.approx(1.7 + 400 / size**0.34 + 410 / 1e12**0.28, rel=1e-3)
    assert run["loss_interval"][0] <= run["loss"] * 1.001 and run["loss"] <= run["loss_interval"][1] * 1.001

    assert plan.main(argv) == 0
    lines = capsys.readouterr().out.splitlines()
    said = {line.split()[0]: line for line in lines if line}
    assert f"{run['steps']:,} steps" in said["run"] and f"${run['dollars']:,.0f}" in said["costs"]
    assert f"--checkpoint.every {run['checkpoint_every']} " in said["saves"]
    assert "times the parameters" in said["loss"] and "ETTR" in said["failures"]


def test_a_measured_step_sets_the_proportion(capsys, tmp_path):
    (found,) = found_by(ONE_LAYOUT, capsys)
    cfg = resolve("qwen3-0.6b", None, [*ONE_LAYOUT[7:], *found["arguments"].split()])
    speed = cfg.train.global_batch * cfg.train.seq_len / (1.25 * found["step_s"])
    (tmp_path / "config.yaml").write_text(dump(cfg))
    (tmp_path / "summary.json").write_text(json.dumps({"world": 8, "tokens_per_s": speed}))

    argv = [*ONE_LAYOUT, "--measured", str(tmp_path), "--tokens", "1e9"]
    (measured,) = found_by(argv, capsys)
    assert measured["step_s"] == pytest.approx(1.25 * found["step_s"], rel=1e-6)
    assert measured["layout"] == found["layout"]
    assert plan.main(argv) == 0
    said = " ".join(capsys.readouterr().out.split())
    assert f"a step of {tmp_path.name} took {1.25 * found['step_s']:.3f} s, 1.25 times the forecast" in said
    assert f"80 % took {MEASURED_RANGE.low} to {MEASURED_RANGE.high} times the forecast" in said
    low, high = (share * measured["run"]["days"] for share in MEASURED_RANGE[:2])
    assert measured["run"]["days_interval"] == pytest.approx((low, high), rel=0.02)


def test_a_layout_that_leaves_no_margin_is_said_to(capsys, monkeypatch):
    argv = [*ONE_LAYOUT, "--parallel.recompute", "none"]
    (found,) = found_by(argv, capsys)
    hardware = replace(cluster("h100-ib"), memory=found["memory"])
    monkeypatch.setattr(plan, "cluster", lambda name: hardware)
    assert plan.main(argv) == 0
    assert "margin   no layout leaves 2% of its tensors free" in capsys.readouterr().out
    roomy = replace(hardware, memory=1.03 * found["memory"])
    monkeypatch.setattr(plan, "cluster", lambda name: roomy)
    assert plan.main(argv) == 0
    assert "margin " not in capsys.readouterr().out


def test_numbers_of_a_run_have_the_range_of_the_step(capsys):
    """As runs with the step at its ends have them: a run that saves once does not take less in proportion. On
    chips without judged rows none has one."""
    argv = [*ONE_LAYOUT, "--tokens", "1e8", "--price", "2", "--mtbf", "20", "--restart", "300"]
    (found,) = found_by(argv, capsys)
    step, run = found["step_s"], found["run"]
    cfg = resolve("qwen3-0.6b", None, [])
    writing = checkpoint_bytes(cfg) / 2e9
    reliability = Reliability(20.0, restart=300.0, blocking=writing, writing=writing)
    for end, share in enumerate(CLASSES[Class("hopper", OURS)].range):
        by_hand = whole_run(1e8, 256 * 4096, share * step, 8, reliability)
        assert run["days_interval"][end] == pytest.approx(by_hand.days)
        assert run["gpu_hours_interval"][end] == pytest.approx(by_hand.gpu_hours)
        assert run["failures_interval"][end] == pytest.approx(by_hand.failures)
        assert run["dollars_interval"][end] == pytest.approx(2 * by_hand.gpu_hours)
        assert run["mwh_interval"][end] == pytest.approx(1.1 * 700e-6 * by_hand.gpu_hours)
        assert by_hand.days != pytest.approx(share * run["days"], rel=1e-3)

    argv = [*ONE_LAYOUT, "--tokens", "1e12", "--price", "2"]
    (run,) = (each["run"] for each in found_by(argv, capsys))
    assert plan.main(argv) == 0
    said = {line.split()[0]: line for line in capsys.readouterr().out.splitlines() if line}
    days = "{:,.1f} to {:,.1f}".format(*run["days_interval"])
    dollars = "{:,.0f} to {:,.0f}".format(*run["dollars_interval"])
    assert f"{run['days']:,.1f} days ({days})" in said["run"]
    assert f"${run['dollars']:,.0f} ({dollars}) at" in said["costs"] and " MWh (" in said["costs"]
    assert " expected (" in said["failures"]

    unjudged = [word.replace("h100-ib", "rtx4090-pcie") for word in argv]
    (found,) = found_by([*unjudged, "--train.micro_batch", "1"], capsys)
    assert "days" in found["run"] and not [name for name in found["run"] if name.endswith("_interval")]


def test_one_gpu_is_one_everywhere(capsys, tmp_path):
    """In the headline, the batch file and the refusal."""
    file = tmp_path / "job.sbatch"
    argv = ["qwen3-0.6b", "--cluster", "rtx4090-pcie", "--top", "1", "--train.seq_len", "2048", "--gpus", "1"]
    argv += ["--train.global_batch", "16", "--train.micro_batch", "1", "--sbatch", str(file)]
    assert plan.main(argv) == 0
    said = capsys.readouterr().out + file.read_text()
    assert "1 GPU of rtx4090-pcie" in said and "1 node of 1 GPU\n" in said and "1 GPUs" not in said
    with pytest.raises(ConfigError, match="^--gpus: no layout of llama3-8b on 1 GPU of ") as error:
        plan.main(["llama3-8b", *argv[1:-2]])
    assert "1 GPUs" not in str(error.value)


def test_a_workstation_card_can_be_planned_for(capsys):
    argv = ["qwen3-0.6b", "--gpus", "1", "--cluster", "rtx4090-pcie", "--top", "1", "--json"]
    argv += ["--train.seq_len", "2048", "--train.global_batch", "16"]
    assert plan.main(argv) == 0
    assert json.loads(capsys.readouterr().out)["memory"] < 23.6 * 2**30


# ---- the batch file ----------------------------------------------------------------------------------------

TWO_NODES = ["llama3-8b", "--gpus", "16", "--cluster", "h100-ib", "--parallel.tp", "1", "--parallel.cp", "1"]
TWO_NODES += ["--parallel.dp_rep", "1", "--train.micro_batch", "1", "--train.global_batch", "64"]
TWO_NODES += ["--train.seq_len", "4096", "--data.path", "0.5 a 0.5 b", "--top", "2"]


def words_of_batch(text: str) -> list[str]:
    """train.py's in a batch file."""
    (line,) = [line for line in text.splitlines() if line.startswith("exec ")]
    words = shlex.split(line, comments=True)
    assert words[:3] == ["exec", "bash", "scripts/slurm/train.sbatch"] and words[-1] == "$@"
    return words[3:-1]


def test_the_batch_file_runs_the_printed_command(capsys, tmp_path):
    file = tmp_path / "job.sbatch"
    assert plan.main([*TWO_NODES, "--sbatch", str(file)]) == 0
    *_, batch, command = capsys.readouterr().out.splitlines()
    assert batch.split(None, 1) == ["batch", f"sbatch {file} · 2 nodes of 8 GPUs"]
    text = file.read_text()
    subprocess.run(["bash", "-n", str(file)], check=True)
    assert {"#SBATCH --nodes=2", "#SBATCH --gpus-per-node=8", "#SBATCH --requeue"} <= set(text.splitlines())
    words = words_of_batch(text)
    assert words == shlex.split(command.removeprefix("best     train.py "))

    # as train.py checks them on 16 ranks
    cfg = resolve(words[0], None, words[1:])
    plan_pipeline(cfg, 16)
    unused.check_unused(cfg, 16)
    assert cfg.data.path == "0.5 a 0.5 b"


def test_a_batch_file_is_not_written_over(capsys, tmp_path):
    file = tmp_path / "job.sbatch"
    file.write_text("mine")
    assert fail_cleanly(plan.main, [*TWO_NODES, "--sbatch", str(file)]) == 2
    said = capsys.readouterr().err
    assert said == f"error: --sbatch: {file} exists; give another name, or remove it\n"
    assert file.read_text() == "mine"


def test_fewer_gpus_than_a_node_has_and_json(capsys, tmp_path):
    file = tmp_path / "job.sbatch"
    (found,) = found_by([*ONE_LAYOUT, "--gpus", "4", "--sbatch", str(file)], capsys)
    assert found["sbatch"] == {"file": str(file), "nodes": 1, "gpus": 4}
    assert "#SBATCH --gpus-per-node=4" in file.read_text()


# ---- what if -----------------------------------------------------------------------------------------------


def test_what_if_says_the_step_then_and_what_is_best(capsys, monkeypatch):
    monkeypatch.setenv("COLUMNS", "80")
    asked = ["links=0.5", "slow-rank=1.2", "jitter=0.05"]
    argv = [*ONE_NODE, "--train.micro_batch", "4", "--top", "1"]
    argv += [word for what in asked for word in ("--what-if", what)]
    (found,) = found_by(argv, capsys)
    answers = {each["what"]: each for each in found["what_if"]}
    assert list(answers) == asked
    assert all(each["step_s"] > found["step_s"] for each in answers.values())
    assert answers["slow-rank=1.2"]["step_s"] == pytest.approx(1.2 * found["step_s"], rel=0.01)
    assert all(each["best_step_s"] <= 1.02 * each["step_s"] for each in answers.values())

    assert plan.main(argv) == 0
    lines = capsys.readouterr().out.splitlines()
    assert max(map(len, lines[:-1])) <= 80
    said = {line.split()[0]: line.split() for line in lines if line}
    for what, each in answers.items():
        assert said[what][1] == f"{each['step_s']:.3f}"
    assert "sigma sqrt(2 ln n)" in " ".join(" ".join(lines).split())


def test_under_jitter_a_layout_whose_ranks_wait_less_often_is_best(capsys):
    """ZeRO 3 waits at each op; ZeRO 1, which is chosen where it is free, once a step."""
    argv = [*ONE_NODE, "--train.micro_batch", "4", "--top", "1", "--what-if", "jitter=0.2"]
    (fixed,) = found_by([*argv, "--parallel.zero", "3"], capsys)
    (free,) = found_by(argv, capsys)
    assert free["what_if"][0]["step_s"] < 0.95 * fixed["what_if"][0]["step_s"]


def test_a_layout_that_is_as_fast_as_the_best_stays_the_best():
    """Every near tie, not only the simplest one, which a search finds first."""
    hardware = cluster("h100-ib")
    fixed = {"parallel.cp": 1, "parallel.pp": 1}
    sizes = ["--train.global_batch", "64", "--train.seq_len", "4096"]
    cfg = with_values(resolve("qwen3-0.6b", None, sizes), fixed)
    target = Target(8, hardware, get_efficiency(hardware))
    first, *others = near_groups(search(cfg, target, fixed, 10_000, near=NEAR).found)[0]
    assert others
    for layout in (first, *others):
        assert plan.answer(WhatIf(), cfg, target, fixed, layout)["is_best"], layout.cfg
