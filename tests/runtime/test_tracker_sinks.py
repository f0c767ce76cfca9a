"""What MLflow and Comet get from a run of train.py, by modules in their place, and who hears of a failure."""
import json
import shlex
import sys
import time
from pathlib import Path

import fake_wandb
import pytest
from ranks import MODEL, corpus

import train
from runtime import alert
from runtime.failure import fail_cleanly

TOP = """
import json, time
def tell(*words):
    with open({out!r}, "a") as file:
        file.write(json.dumps(words) + "\\n")
"""
MLFLOW = """
class Info: run_id = "run-7"
class Run: info = Info()
def start_run(**k):
    {start}
    tell("start_run", k)
    return Run()
def end_run(status): tell("end_run", status)
def __getattr__(name):
    if name.startswith("__"): raise AttributeError(name)
    return lambda *words, **k: tell(name, *words, k)
"""
COMET = """
class ExperimentConfig:
    def __init__(self, **k): self.k = k
class Experiment:
    def __getattr__(self, name):
        return lambda *words, **k: tell(name, *words, k)
def start(experiment_config, **k):
    {start}
    tell("start", k, experiment_config.k)
    return Experiment()
"""
ALERT = """
import json, sys
with open({out!r}, "a") as file:
    print(json.dumps(sys.argv[1:]), file=file)
print("no mail server", file=sys.stderr)
sys.exit({code})
"""


@pytest.fixture
def told(tmp_path, monkeypatch):
    """install(start=code) puts both modules on the path -> told(): the calls that they got."""
    def install(start="pass"):
        folder, out = tmp_path / "modules", tmp_path / "told"
        folder.mkdir()
        out.touch()
        for name, text in (("mlflow", MLFLOW), ("comet_ml", COMET)):
            (folder / f"{name}.py").write_text(TOP.format(out=str(out)) + text.format(start=start))
        monkeypatch.syspath_prepend(folder)
        monkeypatch.setenv("PYTHONPATH", str(folder))
        return lambda: [json.loads(line) for line in out.read_text().splitlines()]

    return install


def run(home: Path, *words: str, steps: int = 2) -> int:
    settings = ["llama3-tiny", *MODEL, "--data.path", corpus(home), "--log.dir", str(home), "--log.name", "r"]
    return fail_cleanly(train.main, [*settings, "--train.steps", str(steps), *words])


FACTS = (
    "--log.group", "sizes", "--log.tags", "tiny, first", "--log.notes", "as before", "--log.project", "p",
)


def test_mlflow_gets_a_run_and_goes_on_with_it(tmp_path, told, capsys):
    calls = told()
    words = ("--log.mlflow", str(tmp_path / "ml"), *FACTS, "--eval.every", "1", "--eval.sample", "4")
    assert run(tmp_path, *words) == 0
    assert f"mlflow {tmp_path}/ml" in capsys.readouterr().out
    said = calls()
    assert said[:2] == [["set_tracking_uri", f"file://{tmp_path}/ml", {}], ["set_experiment", "p", {}]]
    assert said[2] == ["start_run", {"run_name": "r", "description": "as before", "tags": {
        "tiny": "true", "first": "true", "group": "sizes"}}]
    params = [words[1] for words in said if words[0] == "log_params"]
    assert max(map(len, params)) <= 100
    assert {**params[0], **params[1]}["model.layers"] == "2"
    metrics = [(words[2]["step"], words[1]) for words in said if words[0] == "log_metrics"]
    rows = [json.loads(line) for line in (tmp_path / "r/metrics.jsonl").read_text().splitlines()]
    losses = {row["step"]: row["loss"] for row in rows if "loss" in row}
    sent = {step: values["train/loss"] for step, values in metrics if "train/loss" in values}
    assert sent == losses and any("val/loss" in values for _, values in metrics)
    assert any(words[0] == "log_text" and words[2].startswith("sample/step_0000000") for words in said)
    assert ["set_tag", "checkpoint", f"{tmp_path}/r/checkpoints/step_00000002", {}] in said
    assert said[-1] == ["end_run", "FINISHED"] and ["start_run", {"run_id": "run-7"}] not in said

    before = len(said)
    assert run(tmp_path, *words, steps=3) == 0
    said = calls()[before:]
    assert said[2] == ["start_run", {"run_id": "run-7"}] and "log_params" not in [words[0] for words in said]


@pytest.mark.parametrize("mode", ["offline", "online"])
def test_comet_gets_an_experiment_and_goes_on_with_it(tmp_path, told, mode):
    calls = told()
    words = ("--log.comet", mode, *FACTS, "--log.entity", "us")
    assert run(tmp_path, *words) == 0
    (name, given, config), *said = calls()
    key = given["experiment_key"]
    assert name == "start" and len(key) == 32 and key.isalnum()
    assert given == {"workspace": "us", "project_name": "p", "experiment_key": key, "mode": "get_or_create",
                     "online": mode == "online"}
    assert config == {"name": "r", "tags": ["tiny", "first", "sizes"], "log_code": False,
                      "offline_directory": f"{tmp_path}/r"}
    assert said[0][0] == "log_parameters" and said[0][1]["model.layers"] == 2
    assert ["log_other", "notes", "as before", {}] in said
    steps = [words[2]["step"] for words in said if words[0] == "log_metrics" and "train/loss" in words[1]]
    assert steps == [1, 2] and said[-1] == ["end", {}] and "add_tag" not in [words[0] for words in said]
    assert run(tmp_path, *words, steps=3) == 0
    assert [words[1]["experiment_key"] for words in calls() if words[0] == "start"] == [key, key]


def test_wandb_gets_entity_group_tags_and_notes(tmp_path, monkeypatch):
    calls = fake_wandb.install(tmp_path, monkeypatch)
    monkeypatch.setenv("WANDB_RUN_GROUP", "of-the-job")  # a variable of W&B counts more
    assert run(tmp_path, "--log.wandb", "offline", "--log.entity", "us", *FACTS) == 0
    (given,) = [words[1] for words in calls() if words[0] == "init"]
    expected = {"project": "p", "entity": "us", "group": "of-the-job", "tags": ["tiny", "first"]}
    assert given | expected | {"notes": "as before"} == given


@pytest.mark.parametrize("words, says", [
    (("--log.mlflow", "runs/ml"), "log.mlflow: needs the package mlflow (pip install mlflow)"),
    (("--log.comet", "offline"), "log.comet: needs the package comet_ml (pip install comet_ml)"),
    (("--log.tags", ", ,"), "log.tags: ', ,' has no tag; write them with commas, such as red,blue"),
    (("--log.alert_command", "no-such -x"), "log.alert_command: no-such: no such program; give the path"),
    (("--log.alert_command", "m 'a"), "log.alert_command: m 'a: No closing quotation; close the quotes"),
])
def test_what_is_not_there_is_refused_before_any_work(tmp_path, monkeypatch, capsys, words, says):
    monkeypatch.setitem(sys.modules, "mlflow", None)
    monkeypatch.setitem(sys.modules, "comet_ml", None)
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    assert run(tmp_path, *words) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith(f"error: {says}")
    assert not (tmp_path / "r" / "metrics.jsonl").exists()


@pytest.mark.parametrize("start", ["raise RuntimeError('bad day')", "raise SystemExit('bad day')"])
def test_a_tracker_that_fails_is_one_warning_each(tmp_path, told, capsys, start):
    told(start)
    assert run(tmp_path, "--log.mlflow", "http://localhost:1", "--log.comet", "online") == 0
    out = capsys.readouterr().out
    for name in ("MLflow", "Comet"):
        assert out.count(f"warning: {name}: ") == 1 and "bad day; training continues without it" in out


def alert_program(home: Path, code: int = 0) -> str:
    """A program that writes its arguments down; the part of log.alert_command before the message."""
    file = home / "alert.py"
    file.write_text(ALERT.format(out=str(home / "alerts"), code=code))
    return shlex.join([sys.executable, str(file), "--to", "me"])


def alerts(home: Path) -> list[list[str]]:
    file = home / "alerts"
    return [json.loads(line) for line in file.read_text().splitlines()] if file.exists() else []


def test_a_run_that_diverges_sends_one_message(tmp_path, told, monkeypatch):
    """By the trackers, and by the command, with the reason."""
    calls = told()
    monkeypatch.setenv("FAULT", "step.backward:act=nan")
    words = ("--log.mlflow", "http://localhost:1", "--log.comet", "offline", "--log.alert_command")
    assert run(tmp_path, *words, alert_program(tmp_path), steps=20) == 77
    ((*given, message),) = alerts(tmp_path)
    assert given == ["--to", "me"] and message.startswith("r: failed with code 77 after ")
    assert "NonFiniteLoss" in message and "\n" not in message
    said = calls()
    (tag,) = [words[2] for words in said if words[:2] == ["set_tag", "alert"]]
    (other,) = [words[2] for words in said if words[:2] == ["log_other", "alert"]]
    assert tag == other and tag.startswith("failed with code 77: ") and "NonFiniteLoss" in tag
    assert ["end_run", "FAILED"] in said and ["add_tag", "failed", {}] in said


def test_a_run_that_ends_well_or_is_stopped_sends_none(tmp_path):
    command = ("--log.alert_command", alert_program(tmp_path))
    assert run(tmp_path, *command) == 0
    (tmp_path / "r" / "STOP").touch()
    assert run(tmp_path, *command, steps=5) == 75
    assert alerts(tmp_path) == []


def test_spikes_that_do_not_end_send_one_message(tmp_path, monkeypatch):
    monkeypatch.setenv("FAULT", "; ".join(f"step.backward:step={step}:act=spike" for step in range(5, 20)))
    words = ("--optim.spike_sigma", "6", "--optim.spike_window", "8", "--log.alert_command")
    assert run(tmp_path, *words, alert_program(tmp_path), steps=30) == 77
    ((*_, message),) = alerts(tmp_path)
    assert message.startswith("r: failed with code 77 after ") and "spike" in message


def test_a_command_that_fails_is_one_warning(tmp_path, monkeypatch, capsys):
    monkeypatch.setenv("FAULT", "step.backward:act=nan")
    assert run(tmp_path, "--log.alert_command", alert_program(tmp_path, code=3), steps=20) == 77
    out = capsys.readouterr().out
    assert out.count("warning: log.alert_command: ") == 1 and "ended with code 3: no mail server" in out


def test_a_command_that_hangs_is_killed_with_what_it_started(tmp_path, monkeypatch):
    (tmp_path / "hang.sh").write_text('#!/bin/bash\nsleep 300 &\necho $! > "$1"\nwait\n')
    (tmp_path / "hang.sh").chmod(0o755)
    monkeypatch.setattr(alert, "ALERT_SECONDS", 2.0)
    said = alert.run_alert(f"{tmp_path}/hang.sh {tmp_path}/child", "failed")
    assert said == f"log.alert_command: {tmp_path}/hang.sh did not end within 2 s"
    child = int((tmp_path / "child").read_text())
    deadline = time.monotonic() + 30
    while alive(child) and time.monotonic() < deadline:
        time.sleep(0.05)
    assert not alive(child)


def alive(process: int) -> bool:
    """Whether the process is there, and not only waiting for its parent to notice that it has ended."""
    try:
        return Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except FileNotFoundError:
        return False
