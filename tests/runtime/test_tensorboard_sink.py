"""TensorBoard's event files, read back by TensorBoard; failures of the writer; the picture during a run."""
import shutil
import sys
import time

import pytest
from waiting import wait_until

import config
import train
from config import ConfigError, LogConfig
from runtime.lines import read_metrics
from runtime.plot import LivePicture, loss_png
from runtime.sinks import check_reports
from runtime.tensorboard_sink import TensorboardSink

SMALL = (
    "--model.preset llama-mini --model.layers 1 --model.hidden 32 --model.mixer.heads 2 "
    "--model.mixer.kv_heads 2 --model.mlp.width 64 --data.tokenizer bytes --train.seq_len 32 "
    "--train.global_batch 4 --train.micro_batch 4 --eval.batches 1 --eval.sample 8 --log.tensorboard true"
).split() + ["--eval.prompt", "def "]


def read(folder):
    """Everything in the event files: {name: [(step, value)]}, {name: text}, names of pictures."""
    event_accumulator = pytest.importorskip("tensorboard.backend.event_processing.event_accumulator")
    events = event_accumulator.EventAccumulator(str(folder), size_guidance={"tensors": 0, "scalars": 0})
    events.Reload()
    tags = events.Tags()
    scalars = {name: [(e.step, e.value) for e in events.Scalars(name)] for name in tags["scalars"]}
    texts = {
        name.removesuffix("/text_summary"): events.Tensors(name)[-1].tensor_proto.string_val[0].decode()
        for name in tags["tensors"]
    }
    return scalars, texts, tags["images"]


def run(tmp_path, *more):
    argv = ["quickstart", "--log.dir", str(tmp_path), "--log.name", "r", *SMALL, *more]
    return train.main(argv)


def test_a_run_and_its_resume(tmp_path, capsys, whole_runs):
    """The curves are those of metrics.jsonl, each step once, over tokens and FLOPs; with text and picture."""
    pytest.importorskip("tensorboard")
    assert run(tmp_path, "--train.steps", "4", "--checkpoint.every", "2", "--eval.every", "2") == 0
    assert f"tensorboard --logdir {tmp_path}" in capsys.readouterr().out
    shutil.rmtree(tmp_path / "r/checkpoints/step_00000004")  # it goes back to step 2
    assert run(tmp_path, "--train.steps", "6", "--checkpoint.every", "2", "--eval.every", "2") == 0

    scalars, texts, pictures = read(tmp_path / "r" / "tensorboard")
    rows, validations = read_metrics(tmp_path / "r")
    assert [step for step, _ in scalars["train/loss"]] == [1, 2, 3, 4, 5, 6]
    for (_, seen), row in zip(scalars["train/loss"], rows):
        assert seen == pytest.approx(row["loss"], rel=1e-6)
    assert dict(scalars["val/loss"])[6] == pytest.approx(validations[-1]["val_loss"], rel=1e-6)
    assert dict(scalars["tokens"])[6] == 6 * 4 * 32
    assert dict(scalars["flops"])[6] == pytest.approx(2 * dict(scalars["flops"])[3])
    assert "| train.steps | 6 |" in texts["config"] and "| parameters |" in texts["run"]
    assert "| provenance.code.commit |" in texts["run"]
    assert texts["sample"].startswith("    def ") and texts["end"].startswith("finished: ")
    assert pictures == ["loss"]


def test_without_the_package_nothing_starts(tmp_path, monkeypatch):
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(ConfigError, match="log.tensorboard: needs the package tensorboard"):
        check_reports(LogConfig(tensorboard=True))
    with pytest.raises(ConfigError, match="log.tensorboard"):
        run(tmp_path, "--train.steps", "1")
    assert not (tmp_path / "r").exists()


def test_a_writer_that_fails_says_so_once(tmp_path):
    pytest.importorskip("tensorboard")
    sink = TensorboardSink(tmp_path, {"train": {"steps": 3}}, 0)

    class Broken:
        def add_scalar(self, *_):
            raise OSError("disk full")

    sink.writer = Broken()
    sink.put(1, {"train/loss": 1.0})
    sink.put(2, {"train/loss": 1.0})
    sink.text(2, "sample", "x")
    sink.close(0, "")
    assert sink.warning().startswith("TensorBoard: OSError: disk full; training continues without it")
    assert sink.warning() is None


def test_a_folder_that_cannot_be_made(tmp_path):
    pytest.importorskip("tensorboard")
    (tmp_path / "tensorboard").write_text("a file")
    sink = TensorboardSink(tmp_path, {}, 0)
    sink.put(1, {"train/loss": 1.0})
    assert "training continues without it" in sink.warning()


# ---- loss.png during the run -------------------------------------------------------------------------------


def a_run(folder):
    line = '{{"step": {0}, "loss": {1}, "lr": 0.1, "tokens": {0}}}\n'
    (folder / "metrics.jsonl").write_text("".join(line.format(step, 3 / step) for step in range(1, 20)))


def test_the_picture_is_drawn_beside_the_run(tmp_path):
    a_run(tmp_path)
    picture = LivePicture(tmp_path, "0.89M", seconds=0.0)
    picture.draw_soon()
    first = picture.process
    picture.draw_soon()
    assert picture.process is first or first.poll() is not None, "one at a time"
    assert wait_until(lambda: first.poll() is not None) and first.returncode == 0
    assert (tmp_path / "loss.png").read_bytes() == loss_png(tmp_path, "0.89M").read_bytes()


def test_not_too_often_and_ended_at_the_end(tmp_path, monkeypatch):
    picture = LivePicture(tmp_path, "", seconds=1000.0)
    picture.draw_soon()
    assert picture.process is None, "a short run is drawn at its end alone"

    slow = LivePicture(tmp_path, "", seconds=0.0)
    slow.words = [sys.executable, "-c", "import time; time.sleep(100)"]
    slow.draw_soon()
    began = time.monotonic()
    slow.stop()
    assert slow.process.poll() is not None and time.monotonic() - began < 10

    gone = LivePicture(tmp_path, "", seconds=0.0)
    gone.words = ["/no/such/program"]
    gone.draw_soon()
    gone.stop()
    assert gone.process is None


def test_the_key_has_a_default_that_writes_nothing():
    assert config.LogConfig().tensorboard is False
