import math
import statistics
import sys
import time
from unittest.mock import Mock

import pytest
import run_folder
import torch

from config.tree import with_values
from parallel.extras import StepResult
from runtime import metrics as module
from runtime.lines import read_metrics
from runtime.setup import LaunchEnv
from runtime.sinks import Sink

KEYS = [
    "step", "loss", "grad_norm", "lr", "tokens", "targets", "step_ms", "data_ms", "comm_exposed_ms",
    "comm_hidden_ms", "tokens_per_s", "tokens_per_s_per_gpu", "tflops_per_gpu", "mfu", "mem_gib", "skipped",
]


def log_step(m, step, loss=None, *, is_good=True, seconds=1.0, **more):
    """A step of 16 targets, whose gradient norm is its loss."""
    loss = torch.ones(()) if loss is None else loss
    result = StepResult(loss, loss, torch.tensor(is_good), torch.tensor(16))
    return m.log_step(step, result, learning_rate=1e-3, seconds=seconds, data_seconds=0.0, **more)


def test_one_line_a_step_with_exactly_these_keys(metrics, feed, tmp_path):
    m = metrics(env=LaunchEnv(world=2))
    feed(m, 1, 10)
    m.log_evaluation(10, val_loss=3.0, val_ppl=math.exp(3), val_bpb=1.5)
    m.close()
    *steps, last = run_folder.rows(tmp_path)
    assert [list(row) for row in steps] == [KEYS] * 10
    assert last == {"step": 10, "val_loss": 3.0, "val_ppl": math.exp(3), "val_bpb": 1.5}
    row = steps[2]
    assert row["loss"] == torch.tensor(6.7).item()  # the float32, bit for bit
    assert (row["step"], row["tokens"], row["step_ms"], row["data_ms"], row["skipped"]) == (
        3, 48, 500.0, 100.0, 0,
    )
    assert (row["tokens_per_s"], row["tokens_per_s_per_gpu"], row["mfu"]) == (32.0, 16.0, None)
    assert row["tflops_per_gpu"] == 16.0 * 100 / 1e12 and 0.01 < row["mem_gib"] < 100


def test_fp64_losses_read_back_bit_for_bit(metrics, tmp_path):
    m = metrics()
    log_step(m, 1, torch.tensor(1 / 3, dtype=torch.float64))
    assert run_folder.rows(tmp_path)[0]["loss"].hex() == (1 / 3).hex()


def test_numbers_are_brought_over_only_at_the_interval(metrics, feed, monkeypatch):
    m = metrics()
    seen = []
    real = torch.Tensor.tolist
    monkeypatch.setattr(torch.Tensor, "tolist", lambda self: seen.append(len(self)) or real(self))
    for name in ("item", "__float__", "__bool__"):
        monkeypatch.setattr(torch.Tensor, name, lambda self: pytest.fail("waited for the device in a step"))
    # first, every 4th, last
    assert feed(m, 1, 10) == [[0], [], [], [0, 0, 0], [], [], [], [0] * 4, [], [0, 0]]
    assert seen == [4, 12, 16, 8]  # four numbers a step, all at once


def test_buffers_may_be_used_again(metrics, tmp_path):
    m = metrics()
    loss = torch.zeros(())
    for step in range(1, 5):
        log_step(m, step, loss.fill_(step))
    assert [r["loss"] for r in run_folder.rows(tmp_path)] == [1, 2, 3, 4]


def test_flush_before_a_checkpoint_and_no_flag_is_lost(metrics, feed, tmp_path):
    m = metrics()
    flags = feed(m, 1, 6, loss=lambda s: math.nan if s in (3, 6) else 1.0)
    assert len(run_folder.rows(tmp_path)) == 4
    # brings in step 5 and 6, and keeps their flags for the guard
    m.log_evaluation(6, val_loss=1.0, val_ppl=2.0, val_bpb=1.0)
    assert [r["step"] for r in run_folder.rows(tmp_path)] == [1, 2, 3, 4, 5, 6, 6]
    assert sum(flags, []) + m.flush() == [0, 0, 1, 0, 0, 1] and m.flush() == []


def test_the_noise_scale_is_a_ratio_of_running_means_that_a_resume_continues(metrics, cfg, tmp_path):
    cfg = with_values(cfg, {"log.noise_scale": True})
    told = [(8.0, 2.0), None, (-4.0, 1.0), (math.nan, 1.0), (6.0, 3.0)]

    def feed(m, steps):
        for step in steps:
            pair = told[step - 1]
            parts = None if pair is None else torch.tensor(pair, dtype=torch.float64)
            log_step(m, step, is_good=step != 4, noise_scale_parts=parts)
        m.close()

    feed(module.MetricsLogger(tmp_path, cfg, LaunchEnv(), steps=5, flops_per_token=1.0), range(1, 6))
    rows = run_folder.rows(tmp_path)
    s, g = 0.95 * 8 - 0.05 * 4, 0.95 * 2 + 0.05
    want = [4.0, None, s / g, None, (0.95 * s + 0.3) / (0.95 * g + 0.15)]
    assert [r["noise_scale"] for r in rows] == pytest.approx(want)
    assert [r["noise_s"] for r in rows] == [8.0, None, -4.0, None, 6.0]
    resumed = module.MetricsLogger(tmp_path, cfg, LaunchEnv(), steps=5, flops_per_token=1.0, start_step=3)
    feed(resumed, range(4, 6))
    assert [r["noise_scale"] for r in run_folder.rows(tmp_path)] == [r["noise_scale"] for r in rows]


def test_nan_is_null_and_marked(metrics, feed, tmp_path, capsys):
    m = metrics()
    feed(m, 1, 4, loss=lambda s: math.nan if s == 4 else 1.0)
    row = run_folder.rows(tmp_path)[3]
    assert row["loss"] is None
    assert row["grad_norm"] is None
    assert row["skipped"] == 1
    assert row["nonfinite"] is True
    assert "nan" in capsys.readouterr().out.splitlines()[-1]


def test_a_killed_and_resumed_run_is_one_file(metrics, feed, tmp_path):
    feed(metrics(), 1, 8)  # killed after its save at step 6: no close
    m = metrics(start_step=6)
    feed(m, 7, 10)
    m.close()
    train = read_metrics(tmp_path)[0]
    assert [r["step"] for r in train] == list(range(1, 11)) and train[-1]["tokens"] == 160


def test_the_console_shows_a_run_from_header_to_end(metrics, feed, tmp_path, capsys):
    m = metrics()
    m.header((890_000, 760_000), "python stdlib 3.11", ["resumed from x at step 0"])
    feed(m, 1, 10)
    m.log_evaluation(10, val_loss=4.902, val_ppl=134.6, val_bpb=2.76, sample="def f():\n  pass")
    m.log_save(tmp_path / "step_00000010", 10_900_000, 0.1)
    m.close(hints=["python train.py --list"])
    out = capsys.readouterr().out.splitlines()
    assert out[0].startswith("Bevatron 0.1 · torch ")
    assert out[0].endswith(f"cpu x1 (1 thread) · run {tmp_path}")
    assert "0.89M params (0.76M without embeddings) · 4 layers · d 128" in out[1]
    assert "world 1 = dp 1 · tp 1" in out[2] and "2 seq x 8 tok x 1 accum = 16 tok/step" in out[3]
    assert "10 steps = 160 tokens" in out[3]
    assert out[4] == "data     python stdlib 3.11"
    assert "wandb off" in out[5]
    assert out[6] == "resumed from x at step 0"
    numbers = [line.split() for line in out[9:13]]
    assert [n[0] for n in numbers] == ["1/10", "4/10", "8/10", "10/10"]
    assert numbers[1] == [
        "4/10", "6.6000", "13.200", "1.0e-03", "32", "0.00", "n/a", numbers[1][7], "20%", "64", "3s",
    ]
    assert out[13] == " eval 10  val 4.902  ppl 134.6  bpb 2.76   | def f():\\n  pass"
    assert out[14].endswith("step_00000010 (10.9 MB, 0.1 s)")
    assert "loss 6.90 -> 6.00" in out[15]
    assert out[15].endswith("sample: def f():\\n  pass") and out[16] == "next     python train.py --list"


@pytest.mark.parametrize("deterministic, says", [(True, "repeats bit for bit;"), (False, "does not repeat")])
def test_the_header_says_which_kernels_a_gpu_runs(metrics, monkeypatch, capsys, deterministic, says):
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: "NVIDIA H100 80GB HBM3")
    monkeypatch.setattr(torch.cuda, "max_memory_allocated", lambda device: 0)
    monkeypatch.setattr(torch.cuda, "Event", lambda enable_timing: Mock())
    m = metrics(env=LaunchEnv(device=torch.device("cuda", 0), deterministic=deterministic))
    m.header((1, 1), "x")
    lines = capsys.readouterr().out.splitlines()
    assert [says in line for line in lines if line.startswith("kernels")] == [True]


def test_other_ranks_are_silent(metrics, feed, tmp_path, capsys):
    m = metrics(env=LaunchEnv(rank=1, world=2))
    m.header((1, 1), "x")
    assert sum(feed(m, 1, 10), []) == [0] * 10
    m.close()
    assert capsys.readouterr().out == "" and list(tmp_path.iterdir()) == []


def test_eta_is_not_fooled_by_one_slow_step(metrics):
    m = metrics(steps=100)
    for step in range(1, 11):
        log_step(m, step, seconds=60.0 if step == 5 else 0.5)
    m.flush()
    assert 44 < m.eta(10) < 46


def test_eta_counts_what_stands_between_steps(metrics, monkeypatch):
    """Half a second of step, and 3 s of evaluation every 4 steps: 1.25 s a step. What came before the first
    is past.
    """
    now = [0.0]
    monkeypatch.setattr(time, "perf_counter", lambda: now[0])
    m = metrics(steps=100)
    now[0] += 1000
    for step in range(1, 9):
        now[0] += 0.5 + (3 if step in (3, 7) else 0)
        log_step(m, step, seconds=0.5)
    assert m.eta(8) == pytest.approx(92 * 1.25)


def test_the_last_step_is_shown_wherever_the_run_stops(metrics, feed, capsys):
    m = metrics()
    feed(m, 1, 6)
    m.close("SIGTERM received", code=75)
    out = capsys.readouterr().out.splitlines()
    assert out[-2].split()[0] == "6/10"
    assert out[-1].startswith("stopped after 0s: SIGTERM received   loss 6.90 -> 6.40")


def test_eta_knows_the_time_limit(metrics, feed, cfg):
    m = metrics(steps=1000)
    m.cfg = with_values(cfg, {"train.max_minutes": 0.5})
    feed(m, 1, 4)
    assert 29 < m.eta(4) <= 30


def test_a_jumping_wall_clock_changes_nothing(metrics, feed, monkeypatch, capsys):
    m = metrics()
    monkeypatch.setattr(time, "time", lambda: -1e9)
    feed(m, 1, 10)
    m.close()
    assert "done in 0s" in capsys.readouterr().out


def test_a_full_disk_does_not_stop_training(metrics, feed, tmp_path, capsys, monkeypatch):
    m = metrics()
    real = module.MetricsFile.add.__globals__["os"].write

    def full(fd, data):
        if fd == m.file.fd:
            raise OSError(28, "No space left on device")
        return real(fd, data)

    monkeypatch.setattr("os.write", full)
    feed(m, 1, 10)
    m.close()
    out = capsys.readouterr().out
    assert out.count("warning: ") == 2 and "metrics.jsonl: No space left on device" in out
    assert "10 records dropped" in out


def test_fields_of_others_are_in_the_next_row_though_steps_are_read_together(metrics, feed, tmp_path):
    m = metrics()
    feed(m, 1, 1)
    m.add_fields(1, {"slow_rank": 1})
    feed(m, 2, 2)  # not read before step 4
    m.add_fields(2, {})
    feed(m, 3, 10)
    assert [row["step"] for row in run_folder.rows(tmp_path) if row.get("slow_rank") == 1] == [2]


def test_stdout_that_is_gone_does_not_stop_training(metrics, feed, monkeypatch, tmp_path):
    class Gone:
        def write(self, text):
            raise BrokenPipeError

    monkeypatch.setattr(sys, "stdout", Gone())
    m = metrics()
    feed(m, 1, 10)
    m.close()
    assert len(run_folder.rows(tmp_path)) == 10


def test_an_error_still_leaves_what_is_known(metrics, feed, tmp_path, capsys):
    with pytest.raises(ValueError), metrics() as m:
        feed(m, 1, 6)
        raise ValueError("boom")
    assert len(run_folder.rows(tmp_path)) == 6
    assert "stopped after 0s: ValueError: boom" in capsys.readouterr().out
    m.close()  # once is enough
    assert capsys.readouterr().out == ""


def test_a_damaged_file_is_told_at_the_end_and_never_raises(metrics, feed, tmp_path, capsys, cfg):
    """One bad byte after training must not turn a finished run into an error; nor may the noise scale stop on
    it at the start."""
    feed(metrics(), 1, 4)
    text = (tmp_path / "metrics.jsonl").read_bytes().replace(b'"step": 2, "loss": 6', b'"step": 2, "loss": x')
    (tmp_path / "metrics.jsonl").write_bytes(text)
    noisy = with_values(cfg, {"log.noise_scale": True})
    m = module.MetricsLogger(tmp_path, noisy, LaunchEnv(), steps=10, flops_per_token=100.0, start_step=4)
    m.close(hints=["what next"])
    out = capsys.readouterr().out
    assert out.count("1 damaged lines were left out (line 2)") == 1
    assert "loss 6.90 -> 6.60" in out
    assert "what next" in out


def test_closing_never_raises(metrics, feed, monkeypatch, capsys):
    m = metrics()
    feed(m, 1, 2)
    monkeypatch.setattr(m, "read_pending", lambda: 1 / 0)
    m.sinks.append(Sink())
    monkeypatch.setattr(m.sinks[0], "close", lambda code, line: 1 / 0)
    m.close("told to stop")
    out = capsys.readouterr().out
    assert out.count("was not reported in full: ZeroDivisionError") == 2
    assert "stopped after" in out
    assert "told to stop" in out


def test_on_a_gpu_the_devices_own_clock_counts(metrics, feed, tmp_path, monkeypatch):
    """The host runs ahead, so its seconds are those of the launches. A stand-in for the device: `now`, in
    ms.
    """

    class Event:
        now = 0.0

        def __init__(self, enable_timing):
            self.at = None

        def record(self):
            self.at = Event.now

        def elapsed_time(self, end):
            return end.at - self.at

    monkeypatch.setattr(torch.cuda, "Event", Event)
    monkeypatch.setattr(torch.cuda, "max_memory_allocated", lambda device: 2**31)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: "NVIDIA H100 80GB HBM3")
    m = metrics(env=LaunchEnv(device=torch.device("cuda", 0)))
    for step in (1, 2, 3, 4):
        Event.now += 250 + step
        feed(m, step, step)
        if step == 2:
            Event.now += 9000  # its time is nobody's step
            m.log_evaluation(2, val_loss=1.0, val_ppl=1.0, val_bpb=1.0)
        if step == 3:
            Event.now += 5000
            m.log_save(tmp_path, 1, 5.0)
    rows = read_metrics(tmp_path)[0]
    assert [r["step_ms"] for r in rows] == [251, 252, 253, 254] and rows[0]["mem_gib"] == 2.0
    assert rows[0]["mfu"] == 16 / 0.251 * 100 / 67e12  # fp32


def test_a_step_costs_microseconds(metrics, tmp_path):
    m = metrics(steps=10**6)
    m.cfg = with_values(m.cfg, {"log.every": 100})
    one, took = torch.ones(()), []
    for step in range(2, 1002):
        begun = time.perf_counter()
        m.log_step(step, StepResult(one, one, one, one), learning_rate=1e-3, seconds=1.0, data_seconds=0.0)
        took.append(time.perf_counter() - begun)
    print("median us", 1e6 * statistics.median(took), "mean us", 1e6 * statistics.mean(took))
    assert statistics.median(took) < 1e-3
