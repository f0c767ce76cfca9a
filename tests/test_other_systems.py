"""Systems that are not Linux, as far as a process can be made to believe in one (tests/other_system.py)."""

import os
import pathlib
import re
import subprocess
import sys

import pytest
import run_folder
import torch
from other_system import LINUX_ONLY
from ranks import MODEL, corpus
from test_host_sync import step_once
from test_house import MODULES, ROOMS
from torch.utils._python_dispatch import TorchDispatchMode

from config import ConfigError
from config.provenance import checkout_files
from config.reading import resolve
from config.reading.schedules import plan_pipeline
from kernels import rope
from parallel.extras import StepResult
from parallel.microbatch import Microbatch
from parallel.wire.comm import Group
from runtime import evaluate, setup
from runtime.metrics import MetricsLogger
from runtime.setup import LaunchEnv

pytestmark = pytest.mark.usefixtures("real_starts")  # what is hidden is hidden from imports, too
ROOT = pathlib.Path(__file__).parent.parent
SYSTEM = str(ROOT / "tests" / "other_system.py")
ASKED_FIRST = {  # a name of Linux alone, where hasattr or getattr comes before it
    "lab/benchmarks/watching.py": {"pthread_getcpuclockid"},
    "checkpoint/disk/files.py": {"posix_fadvise", "POSIX_FADV_DONTNEED"},
    "runtime/processes.py": {"CLOCK_BOOTTIME"},  # after /proc, and an AttributeError is caught
    "durable/pool.py": {"SCHED_BATCH", "sched_setscheduler", "sched_param"},
}


def started(*words: str) -> subprocess.CompletedProcess:
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    command = [sys.executable, *words]
    return subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=300)


def settings(folder: pathlib.Path, steps: int) -> list[str]:
    places = ["--data.path", corpus(folder), "--log.dir", str(folder), "--log.name", "run"]
    return ["quickstart", *MODEL, *places, "--train.steps", str(steps), "--checkpoint.every", "1"]


def steps_of(folder: pathlib.Path) -> list[dict]:
    return run_folder.steps(folder / "run")


@pytest.mark.slow
def test_a_mac_trains_on_its_cpu_saves_and_resumes(tmp_path):
    """The numbers are those of Linux on this machine."""
    for steps in (2, 4):
        end = started(SYSTEM, "macos", "train.py", *settings(tmp_path, steps))
        assert end.returncode == 0, end.stderr
    resumed = steps_of(tmp_path)
    assert "resumed from" in end.stdout and [row["step"] for row in resumed] == [1, 2, 3, 4]
    assert all(row["mem_gib"] > 0 for row in resumed)

    here = tmp_path / "linux"
    here.mkdir()
    for steps in (2, 4):
        assert started("train.py", *settings(here, steps)).returncode == 0
    assert [row["loss"] for row in resumed] == [row["loss"] for row in steps_of(here)]

    run = str(tmp_path / "run")
    text = started(SYSTEM, "macos", "scripts.generate", run, "--prompt", "ab", "--max-new-tokens", "4")
    assert text.returncode == 0 and text.stdout.startswith("ab"), text.stderr


@pytest.mark.slow
def test_two_ranks_train_on_a_mac(tmp_path):
    torchrun = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    words = [*settings(tmp_path, 2), "--parallel.tp", "2", "--checkpoint.async_save", "true"]
    end = started(*torchrun, SYSTEM, "macos", "train.py", *words)
    assert end.returncode == 0, end.stderr
    assert [row["step"] for row in steps_of(tmp_path)] == [1, 2]


@pytest.mark.slow(every=3)
@pytest.mark.parametrize("program", [
    "train.py",
    *sorted(f"scripts.{path.stem}" for path in (ROOT / "scripts").glob("[a-z]*.py")),
])
def test_windows_is_refused_in_one_line(program):
    end = started(SYSTEM, "windows", program, "--help")
    assert end.returncode == 2 and end.stdout == ""
    (line,) = end.stderr.splitlines()
    assert line.startswith("error: Windows ") and "WSL" in line


def test_names_of_linux_alone_are_asked_for_first():
    names = "|".join(name for names in LINUX_ONLY.values() for name in names.split())
    for name in sorted(checkout_files(ROOT)):
        where = pathlib.Path(name)
        if where.suffix == ".py" and where.parts[0] in (*ROOMS, *MODULES):
            text = (ROOT / where).read_text()
            found = set(re.findall(rf"\b(?:os|signal|socket|time)\.({names})\b", text))
            assert found <= ASKED_FIRST.get(str(where), set()), f"{where}: {found}"


# ---- the GPU of a Mac --------------------------------------------------------------------------------------
# There is none here: the step runs on meta tensors, which take the paths of a device that is neither a CPU
# nor CUDA's. What Apple's GPUs lack most of all is fp64.


class NoDoubles(TorchDispatchMode):
    """Raises where an fp64 tensor is made or read."""

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        out = function(*args, **(kwargs or {}))
        for tensor in (*args, *(out if isinstance(out, (tuple, list)) else [out])):
            if isinstance(tensor, torch.Tensor):
                assert tensor.dtype not in (torch.float64, torch.complex128), f"{function} in fp64"
        return out


MPS_CASES = [
    "--train.dtype fp32",
    "--train.dtype bf16 --data.doc_mask true --model.dropout 0.1",
    "--train.dtype fp16 --parallel.recompute full --model.mixer.window 8",
    "--optim.name muon --train.dtype bf16",
    "--optim.name lamb",
    "--model.mtp.modules 1 --model.positions learned --model.mixer.rope none --model.norm.kind layernorm "
    "--model.mlp.activation gelu",
    "--model.mixer.kind latent --model.mixer.kv_rank 16 --model.mixer.rope.scaling.kind yarn "
    "--model.mixer.rope.scaling.factor 4",
    "--model.mixer.qk_norm head --log.noise_scale true --model.mup.base 16 --optim.states bf16",
]


@pytest.mark.slow(every=2)
@pytest.mark.parametrize("args", MPS_CASES)
def test_a_step_on_the_gpu_of_a_mac_has_no_fp64(monkeypatch, args):
    monkeypatch.setattr(rope, "WITHOUT_FP64", ("mps", "meta"))
    with NoDoubles():
        step_once(monkeypatch, *args.split())


def test_that_mode_sees_fp64(monkeypatch):
    with NoDoubles(), pytest.raises(AssertionError, match="in fp64"):  # RoPE's angles, elsewhere
        step_once(monkeypatch)


def test_rope_in_fp32_is_that_in_fp64(monkeypatch):
    positions = torch.arange(8192)[None]
    tables = []
    for devices in (("mps",), ("mps", "cpu")):
        monkeypatch.setattr(rope, "WITHOUT_FP64", devices)
        frequencies = rope.frequencies(64, 5e5, 8.0, device=torch.device("cpu"))
        assert frequencies.dtype == (torch.float64 if len(devices) == 1 else torch.float32)
        tables.append(torch.cat(rope.cos_sin_tables(positions, frequencies, torch.float32)))
    assert 0 < (tables[0] - tables[1]).abs().max() < 1e-3


class Event:
    """As torch.mps.Event."""

    now = 0.0

    def __init__(self, enable_timing=False):
        assert enable_timing

    def record(self):
        Event.now += 25.0
        self.place = Event.now

    def elapsed_time(self, end):
        return end.place - self.place


def test_what_the_gpu_of_a_mac_reports(monkeypatch, tmp_path, capsys):
    """Its own clock and memory; the numbers of a step without fp64."""
    monkeypatch.setattr(torch.mps, "Event", Event)
    monkeypatch.setattr(torch.mps, "driver_allocated_memory", lambda: 3 * 2**30)
    cfg = resolve("llama3-tiny", None, ["--train.steps", "3", "--log.every", "3"])
    env = LaunchEnv(device=torch.device("mps"))
    log = MetricsLogger(tmp_path, cfg, env, steps=3, flops_per_token=1.0)
    log.header((1, 1), "x")
    result = StepResult(torch.tensor(2.5), torch.tensor(0.5), torch.tensor(True), torch.tensor(16))
    with NoDoubles():
        for step in (1, 2, 3):
            log.log_step(step, result, learning_rate=0.1, data_seconds=0.0, seconds=9.0)
    log.close()
    rows = run_folder.rows(tmp_path)
    assert [(row["loss"], row["grad_norm"], row["skipped"], row["mem_gib"]) for row in rows] == 3 * [
        (2.5, 0.5, 0, 3.0)
    ]
    assert [row["step_ms"] for row in rows[1:]] == [25.0, 25.0]
    assert "Apple GPU (mps)" in capsys.readouterr().out


def test_an_evaluation_on_the_gpu_of_a_mac_has_no_fp64():
    targets = torch.tensor([[1, 2, -100]])
    batch = Microbatch(targets, targets, targets)
    options = {"text_bytes": lambda batch: torch.tensor(6), "group": Group("dp_cp")}
    with NoDoubles():
        found = evaluate.mean_loss([batch, batch], summed_loss=lambda _: torch.tensor(5.0), **options)
    assert found == (1.25, 3.0)


@pytest.mark.parametrize("args, says", [
    ("--train.dtype fp64", "train.dtype=fp64 (but fp32, bf16 and fp16)"),
    ("--train.dtype fp8", "train.dtype=fp8"),
    ("--model.mlp experts --model.mlp.experts 4", "model.mlp.kind experts"),
    ("--train.compile true", "train.compile"),
    ("--parallel.offload both", "parallel.offload=both"),
    ("--train.cuda_graphs true", "train.device=mps, which has no graphs"),
    ("--model.mixer.kernel triton", "train.device is mps"),
    ("--parallel.tp 2", "2 ranks"),
])
def test_what_the_gpu_of_a_mac_does_not_run_is_named(args, says):
    cfg = resolve("llama3-tiny", None, ["--train.device", "mps", *args.split()])
    with pytest.raises(ConfigError) as refusal:
        plan_pipeline(cfg, 2 if "tp" in args else 1)
    assert says in str(refusal.value) and "\n" not in str(refusal.value)


def test_the_gpu_of_a_mac_is_taken_when_asked_for(monkeypatch):
    with pytest.raises(ConfigError, match="--train.device cpu"):
        setup.pick_device("mps", 0)
    monkeypatch.setattr(torch.backends.mps, "is_available", lambda: True)
    assert setup.pick_device("mps", 0) == torch.device("mps")
    assert setup.pick_device("auto", 0) == torch.device("cpu")
    assert rope.angle_dtype(torch.device("mps")) == torch.float32
