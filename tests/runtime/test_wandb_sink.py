"""The calls that W&B gets, and how a run bears its failures (fake_wandb.py)."""

import base64
import functools
import os
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import fake_wandb
import pytest
import run_folder
from ranks import MODEL, corpus
from waiting import has_ended, wait_until

import train
from config import LogConfig
from runtime.setup import WandbSettings
from runtime.tracker_sinks import WandbSink, open_trackers, stable_id

# A PNG of one white pixel.
DOT = base64.b64decode(
    "iVBORw0KGgoAAAANSUhEUgAAAAEAAAABCAAAAAA6fptVAAAACklEQVR4nGP6DwABBQECz6AuzQAAAABJRU5ErkJggg=="
)


@pytest.fixture
def fake(tmp_path, monkeypatch):
    """fake(top=, init=, log=, finish=, step=: see fake_wandb) -> told(): what wandb was told so far."""
    return functools.partial(fake_wandb.install, tmp_path, monkeypatch)


@pytest.fixture
def sink(tmp_path):
    made = []

    def make(mode="offline", **k):
        made.append(
            WandbSink(WandbSettings(mode, "proj"), tmp_path / "run", "name", {"train": {"steps": 3}}, **k)
        )
        return made[-1]

    yield make
    for s in made:
        if s.child:
            s.kill()


def test_off_starts_nothing(tmp_path):
    assert open_trackers(WandbSettings("off"), LogConfig(), tmp_path / "run", "name", {}, "") == []
    assert not (tmp_path / "run").exists()


def test_everything_arrives_in_order(fake, sink, tmp_path, capfd):
    told, s = fake(), sink()
    for step in range(500):
        s.put(step, {"train/loss": 1 / (step + 1)})
    s.close(code=75, closing_line="3 s: stop requested on another rank", wait=60)
    settings, start, *axes, alert, last = told()
    axes, logs = axes[:4], axes[4:]
    assert axes == [["axis", f"{names}/*", "tokens"] for names in ("train", "val", "tasks", "run")]
    assert alert == ["alert", "name: stopped early", "3 s: stop requested on another rank", "WARN"]
    assert settings[1] == {
        "console": "off",
        "silent": True,
        "save_code": False,
        "x_stats_pid": os.getpid(),
        "program": "train.py",
        "program_relpath": "train.py",
        "program_abspath": str(Path(__file__).parents[2] / "train.py"),
    }
    assert start[1] == {
        "project": "proj", "entity": None, "name": "name", "id": stable_id(tmp_path / "run"),
        "dir": str(tmp_path / "run"), "mode": "offline", "resume": "allow", "config": {"train": {"steps": 3}},
        "group": None, "tags": None, "notes": None,
    }
    assert logs == [["log", i, {"step": i, "train/loss": 1 / (i + 1)}] for i in range(500)]
    assert last == ["finish", 75]
    assert s.warning() is None and capfd.readouterr() == ("", "")


def test_facts_texts_and_pictures_arrive_as_wandb_takes_them(fake, sink, tmp_path):
    """As W&B takes them: text is escaped, a picture is named by its path."""
    told, s = fake(), sink()
    s.describe({"parameters": 5, "dp": 2})
    s.text(3, "sample", "def <b>f</b>():\n  pass")
    s.picture(4, "loss", tmp_path / "loss.png")
    s.close(code=77, closing_line="", wait=60)
    said = told()[6:]
    assert said == [
        ["config", {"run": {"parameters": 5, "dp": 2}}],
        ["log", 3, {"step": 3, "sample": ["html", "<pre>def &lt;b&gt;f&lt;/b&gt;():\n  pass</pre>"],
                    "samples": ["table", ["step", "text"], [[3, "def <b>f</b>():\n  pass"]]]}],
        ["log", 4, {"step": 4, "loss": ["image", str(tmp_path / "loss.png")]}],
        ["alert", "name: failed with code 77", "-", "ERROR"],
        ["finish", 77],
    ]


def test_texts_stand_in_one_table(fake, sink):
    """W&B shows one value of a name: the table has the texts of all steps, up to the newest hundred."""
    told, s = fake(), sink()
    for step in range(120):
        s.text(step, "sample", f"text {step}")
    s.close(wait=60)
    tables = [line[2]["samples"][2] for line in told() if line[0] == "log"]
    assert tables[2] == [[0, "text 0"], [1, "text 1"], [2, "text 2"]]
    assert tables[-1] == [[step, f"text {step}"] for step in range(20, 120)]


def test_a_run_sends_its_texts_and_its_best_validation(fake, tmp_path):
    """Over both starts, and the last values are what W&B's table of runs shows."""
    told = fake()
    words = ["llama3-tiny", *MODEL, "--data.path", corpus(tmp_path), "--log.dir", str(tmp_path)]
    words += ["--log.name", "r", "--log.wandb", "offline", "--eval.every", "1", "--optim.lr", "0.5"]
    for steps in ("2", "4"):
        assert train.main([*words, "--eval.sample", "4", "--train.steps", steps]) == 0
    losses = {row["step"]: row["val_loss"] for row in run_folder.validations(tmp_path / "r") if row["step"]}
    best = min(losses, key=losses.__getitem__)
    logs = [line[2] for line in told() if line[0] == "log"]
    (first, last) = [values for values in logs if "run/best_step" in values]
    assert (last["run/best_step"], last["run/best_val_loss"]) == (best, losses[best])
    assert [row[0] for row in [values for values in logs if "samples" in values][-1]["samples"][2]] == [3, 4]

    # what each start has left, named and not copied
    kept = [line[1:] for line in told() if line[0] == "artifact"]
    assert [(name, kind, metadata["step"]) for name, kind, metadata, *_ in kept] == [
        ("checkpoint-abc", "model", 2), ("checkpoint-abc", "model", 4)]
    reference, *files = kept[-1][3:]
    assert reference == [f"file://{tmp_path}/r/checkpoints/step_00000004", False]
    assert Path(reference[0].removeprefix("file://")).is_dir()
    assert files == [f"{tmp_path}/r/config.yaml", f"{tmp_path}/r/summary.json"]


def test_a_resumed_run_keeps_its_id(tmp_path):
    first = stable_id(tmp_path / "run")
    assert stable_id(tmp_path / "run") == first and first != stable_id(tmp_path / "other")


def test_a_copy_of_a_folder_has_its_own_id_while_the_first_is_there(tmp_path):
    """A folder from before the id was written down keeps its own. A link is the same folder."""
    run, copy = tmp_path / "run", tmp_path / "copy"
    first = stable_id(run)
    (run / "wandb_shift").write_text("3")
    (tmp_path / "link").symlink_to(run)
    assert stable_id(tmp_path / "link") == first
    shutil.copytree(run, copy)
    own = stable_id(copy)
    assert own != first == stable_id(run) and stable_id(copy) == own
    assert (run / "wandb_shift").exists() and not (copy / "wandb_shift").exists()

    shutil.copytree(run, tmp_path / "moved")
    shutil.rmtree(run)
    assert stable_id(tmp_path / "moved") == first
    (tmp_path / "old").mkdir()
    (tmp_path / "old" / "wandb_id").write_text("abcd1234\n")
    assert stable_id(tmp_path / "old") == "abcd1234"


def test_steps_that_are_logged_again_are_not_dropped(fake, sink):
    """A run that goes back, and one that is resumed behind what W&B has: W&B counts on, "step" is ours."""
    told, s = fake(step=7), sink()  # resumed online: steps up to 6 are there, and the run continues from 4
    for step in (5, 6):
        s.put(step, {"a": step})
    s.text(6, "sample", "x")
    s.rewind(4)
    s.put(5, {"a": 50})
    s.put(9, {"a": 90})
    s.put(5, {"run/goodput": 1.0})
    s.close(wait=60)
    said = told()
    assert [(words[1], words[2]["step"]) for words in said if words[0] == "log"] == [
        (7, 5), (8, 6), (8, 6), (9, 5), (13, 9), (14, 5),
    ]
    assert "dropped" not in [words[0] for words in said]
    assert ["alert", "name: rewound to step 4", "later steps are trained again", "WARN"] in said


def test_a_start_offline_counts_on_from_where_the_one_before_it_was(fake, sink, tmp_path):
    """W&B is not asked there, and drops what a run that once went back logs at smaller steps than before."""
    told, s = fake(step=0), sink()
    for step in (5, 6, 7):
        s.put(step, {"a": step})
    s.rewind(4)
    s.put(5, {"a": 50})  # at 8
    s.close(wait=60)
    steps = [words[1] for words in told() if words[0] == "log"]
    assert steps == [5, 6, 7, 8]

    s = sink()  # from the checkpoint of step 5
    s.put(6, {"a": 60})
    s.close(wait=60)
    assert [words[1] for words in told() if words[0] == "log"] == [*steps, 9]

    (shift,) = tmp_path.rglob("wandb_shift")
    shift.write_text("no number")
    s = sink()
    s.put(7, {"a": 70})
    s.close(wait=60)
    assert [words[1] for words in told() if words[0] == "log"][-1] == 7


@pytest.mark.parametrize(
    "where",
    [
        {"top": "raise ImportError('bad day')\n"},
        {"init": "raise RuntimeError('bad day')"},
        {"log": "raise RuntimeError('bad day')"},
        {"finish": "raise RuntimeError('bad day')"},
        {"init": "raise SystemExit('bad day')"},
        {"log": "os.kill(os.getpid(), 9)"},
    ],
)
def test_one_warning_when_it_raises(fake, sink, where):
    fake(**where)
    s = sink()
    s.put(1, {"a": 1})
    if "finish" not in where:
        assert wait_until(lambda: s.put(2, {"a": 1}) or s.trouble, 10)
        s.put(3, {})
        assert s.dropped >= 1
    s.close(wait=60)
    words = "ended with -9" if "kill" in str(where) else "bad day"
    assert words in s.warning() and s.warning() is None


def test_secrets_are_not_in_the_warning(fake, sink, monkeypatch):
    monkeypatch.setenv("WANDB_API_KEY", "canary-31415926")
    fake(init="raise ValueError('bad key ' + os.environ['WANDB_API_KEY'])")
    s = sink()
    s.close(wait=60)
    assert "bad key <WANDB_API_KEY>" in s.warning()


@pytest.mark.parametrize("where", ["init", "log", "finish"])
def test_a_wandb_that_never_answers_holds_up_nothing(fake, sink, where):
    """Nothing waits for it but the end, and the end not for long; no process is left."""
    fake(**{where: "time.sleep(1000)"})
    s = sink(max_buffered=10_000)
    slowest = 0.0
    for step in range(2000):
        begun = time.perf_counter()
        s.put(step, {"a": "x" * 100})
        slowest = max(slowest, time.perf_counter() - begun)
    assert slowest < 0.2  # a busy machine; it is some 10 us
    begun = time.monotonic()
    s.close(wait=0.3)
    assert 0.25 < time.monotonic() - begun < 2
    assert "no answer in 0.3 s" in s.warning() and s.warning() is None
    assert has_ended(s.child.pid) and (where == "finish" or s.dropped > 0)


@pytest.mark.slow
def test_a_killed_run_leaves_no_orphan(fake, tmp_path):
    """SIGKILL to the trainer while wandb hangs, before the child could look for it: it ends a few seconds
    later.
    """
    fake(init="time.sleep(1000)")
    code = (
        "import os, sys, time\n"
        "from runtime.tracker_sinks import WandbSink\n"
        "from runtime.setup import WandbSettings\n"
        f"s = WandbSink(WandbSettings('offline'), {str(tmp_path / 'run')!r}, 'n', {{}})\n"
        "print(s.child.pid, flush=True); time.sleep(60)"
    )
    env = os.environ | {"PYTHONPATH": f"{tmp_path}:{os.getcwd()}"}
    trainer = subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True, env=env)
    child = int(trainer.stdout.readline())
    os.kill(child, signal.SIGSTOP)
    trainer.send_signal(signal.SIGKILL)
    trainer.wait()
    os.kill(child, signal.SIGCONT)
    trainer.stdout.close()
    assert wait_until(lambda: has_ended(child), 15)


def test_a_killed_run_is_told_as_failed(fake, sink):
    told, s = fake(), sink()
    s.put(1, {"a": 1})
    s.child.stdin.close()  # what the kernel does for a killed trainer
    assert s.child.wait(10) == 0 and told()[-2:] == [["log", 1, {"step": 1, "a": 1}], ["finish", 1]]
    assert "alert" not in [words[0] for words in told()]


@pytest.mark.slow
def test_real_wandb_offline(sink, tmp_path):
    pytest.importorskip("wandb")
    s = sink()
    s.describe({"parameters": 31})
    for step in range(1, 4):
        s.put(step, {"train/loss": 3.0 / step, "tokens": 100 * step})
    s.rewind(1)
    s.put(2, {"train/loss": 1234.25, "tokens": 200})
    s.text(3, "sample", "def f(x):")
    picture = tmp_path / "dot.png"
    picture.write_bytes(DOT)
    s.picture(3, "dot", picture)
    (tmp_path / "step_00000003").mkdir()
    (tmp_path / "step_00000003/shard").write_bytes(b"weights")
    s.checkpoint(3, tmp_path / "step_00000003", [picture])
    s.close(wait=60)
    assert s.warning() is None
    (file,) = (tmp_path / "run").glob(f"wandb/offline-run-*/run-{stable_id(tmp_path / 'run')}.wandb")
    written = file.read_bytes()
    assert b"train/loss" in written and b"1234.25" in written and b"rewound to step 1" in written
    assert f"checkpoint-{stable_id(tmp_path / 'run')}".encode() in written
    assert f"file://{tmp_path}/step_00000003/shard".encode() in written
