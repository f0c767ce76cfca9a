"""The advice after an out-of-memory: true by the planner's count, and settings that train.py takes."""

import json
import pathlib
import re
import subprocess
import sys

import pytest
import torch
from ranks import MODEL, corpus, job

import config.reading
import phases
import train
from config.reading.schedules import plan_pipeline
from plan import advice
from plan.advice import GIB, find_savings, holdings, memory_advice
from plan.communicators import Gpu, communicator_bytes, reserved_bytes
from plan.search import TRANSIENT_BYTES, held_bytes, make_job
from runtime import evaluate

GPU = Gpu("h100")
BESIDE = reserved_bytes(GPU) + TRANSIENT_BYTES

JOBS = [
    ("llama3-8b", 8, 80),
    ("llama3-8b", 64, 40),
    ("llama3-70b", 64, 80),
    ("qwen3-30b-a3b", 16, 80),
    ("deepseek-v2-lite", 8, 80),
    ("deepseek-v3", 256, 80),
]


ROOT = pathlib.Path(__file__).parents[2]


def resolve(name: str, *settings: str) -> config.Config:
    return config.reading.resolve(name, None, ["--train.dtype", "bf16", *settings])


def named_settings(text: str) -> list[tuple[list[str], float]]:
    """[(words of a command line, GiB under them)] of an advice."""
    found = re.findall(r"((?:--[a-z_.]+ \S+ )+)\(([0-9.]+) GiB\)", text)
    return [(words.split(), float(gib)) for words, gib in found]


@pytest.mark.slow(every=6)
@pytest.mark.parametrize("name, world, gib", JOBS)
def test_a_setting_that_is_named_fits_when_it_is_typed(name, world, gib):
    cfg = resolve(name)
    text = memory_advice(cfg, world, gib * GIB, GPU)
    assert "\n" not in text
    named = named_settings(text)
    assert named, text
    usable = gib * GIB - BESIDE
    fitting, _, others = text.partition("; less with ")
    assert len(named_settings(fitting)) + len(named_settings(others)) == len(named)
    for words, stated in named:
        changed = resolve(name, *words)
        plan_pipeline(changed, world)  # train.py takes it
        total = holdings(changed, world, GPU).total
        assert total / GIB == pytest.approx(stated, abs=0.051)
        assert total < holdings(cfg, world, GPU).total
        assert (total <= usable) == ((words, stated) in named_settings(fitting))

        # scripts.plan counts the same, and takes it for a GPU of that size
        held = held_bytes(make_job(changed, world)[0], GPU)
        assert held.state + held.activations + held.communicators == total
        assert (held.total <= gib * GIB) == (total <= usable)
    first_total = holdings(resolve(name, *named[0][0]), world, GPU).total
    assert first_total + BESIDE <= gib * GIB


def test_the_largest_holding_comes_first():
    held = holdings(resolve("llama3-8b", "--train.micro_batch", "4"), 8, GPU)
    sizes = list(held.parts.values())
    assert sizes == sorted(sizes, reverse=True) and held.total == sum(sizes)
    assert memory_advice(resolve("llama3-8b"), 8, None).split(": ")[1].startswith("optimizer ")


def test_what_train_refuses_is_not_named():
    """Three heads are not divided by two, one layer not by two stages, and a dense model has no experts."""
    heads = ["--model.mixer.heads", "3", "--model.mixer.kv_heads", "3"]
    shape = [*heads, "--model.hidden", "48", "--model.vocab", "500"]
    cfg = resolve("llama3-tiny", *shape, "--model.layers", "1")
    keys = {key for saving in find_savings(cfg, 2, None) for key in saving.values}
    assert keys and not keys & {"parallel.tp", "parallel.pp", "parallel.ep"}


def test_a_job_that_no_setting_makes_smaller_is_told_so(monkeypatch):
    monkeypatch.setattr(advice, "cheaper_settings", lambda cfg, is_on_gpu: iter(()))
    assert "no single setting would reduce it" in memory_advice(resolve("llama3-8b"), 8, 80 * GIB)


def test_a_cpu_is_not_advised_to_use_memory_of_the_host():
    cfg = resolve("llama3-8b")
    keys = {key for saving in find_savings(cfg, 1, None) for key in saving.values}
    assert keys and "parallel.offload" not in keys
    assert "parallel.offload" in {key for saving in find_savings(cfg, 1, GPU) for key in saving.values}


def test_what_the_system_takes_of_a_gpu_counts():
    """A setting whose tensors alone would fit is not said to fit."""
    cfg = resolve("llama3-8b")
    least = min(find_savings(cfg, 8, GPU), key=lambda saving: saving.total)
    text = memory_advice(cfg, 8, least.total + BESIDE / 2, GPU)
    assert str(least) in text.partition("; less with ")[2]


def test_communicators_are_named_on_gpus_alone():
    """Where eight ranks exchange rows of experts, they are larger than most else."""
    cfg = resolve("qwen3-30b-a3b", "--parallel.ep", "8", "--parallel.zero", "1")
    job, _ = make_job(cfg, 8)
    nbytes = communicator_bytes(job, GPU)
    assert nbytes > 2.5 * GIB
    assert f"buffers of NCCL's communicators {nbytes / GIB:.1f} GiB" in memory_advice(cfg, 8, 80 * GIB, GPU)
    assert "NCCL" not in memory_advice(cfg, 8, None)
    assert holdings(cfg, 8, GPU).total == holdings(cfg, 8, None).total + nbytes


def test_a_job_that_fits_is_not_told_that_it_does_not():
    text = memory_advice(resolve("llama3-tiny", "--model.vocab", "500"), 1, 80 * GIB)
    assert "which fits: does another process use this GPU; it would fit with --" in text


OUT_OF_CUDA = torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB")
OUT_OF_HOST = RuntimeError("[enforce fail] DefaultCPUAllocator: can't allocate memory: you tried\n"
                           "Exception raised from alloc_cpu at a.cpp:1 (most recent call first):\nframe #0")


@pytest.mark.slow(every=2)
@pytest.mark.parametrize("module, where, error", [
    (phases, "build_run", OUT_OF_CUDA),
    (train, "forward_backward", OUT_OF_CUDA),
    (train, "finish_grad_reductions", OUT_OF_HOST),
    (evaluate, "mean_loss", MemoryError()),  # an evaluation
])
def test_a_rank_without_memory_ends_the_job_with_advice(tmp_path, module, where, error):
    def full(*args, **named):
        raise error

    def before(rank):
        if rank == 1:
            setattr(module, where, full)

    args = ["llama3-tiny", *MODEL, "--data.path", corpus(tmp_path), "--train.steps", "2"]
    end = job(tmp_path / "job", 2, [*args, "--log.dir", str(tmp_path), "--log.name", "r"], before=before)
    assert 81 in end.codes and set(end.codes) <= {81, -15}
    (line,) = [line for line in end.logs[1].splitlines() if line.startswith("error: ")]
    assert line.startswith("error: rank 1 on ")
    cause = (str(error) or type(error).__name__).splitlines()[0]  # without C++'s stack
    assert f"out of memory: {type(error).__name__}: {cause}; according to the planner" in line
    assert "the fullest rank holds " in line and "; less with --" in line
    reason = json.loads((tmp_path / "r" / "exit_reason.json").read_text())
    assert (reason["code"], reason["requeue"]) == (81, False)


def test_a_cpu_without_memory_in_the_middle_of_a_step(tmp_path):
    """For real: the process may not take more address space than it has after its first step. torch's error
    of it is a RuntimeError."""
    limited = (
        "import resource, sys, train\n"
        "from runtime.failure import fail_cleanly\n"
        "real = train.forward_backward\n"
        "def forward_backward(*args):\n"
        "    pages = int(open('/proc/self/statm').read().split()[0])\n"
        "    limit = pages * resource.getpagesize() + 2**24\n"
        "    resource.setrlimit(resource.RLIMIT_AS, (limit, limit))\n"
        "    return real(*args)\n"
        "train.forward_backward = forward_backward\n"
        "sys.exit(fail_cleanly(train.main, sys.argv[1:]))\n"
    )
    size = ["--train.micro_batch", "1024", "--train.global_batch", "1024"]
    args = ["llama3-tiny", *MODEL, "--data.path", corpus(tmp_path), "--train.steps", "2"]
    command = [sys.executable, "-c", limited, *args, *size]
    command += ["--log.dir", str(tmp_path), "--log.name", "r"]
    end = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=120)
    assert end.returncode == 81, end.stderr
    (line,) = end.stderr.splitlines()
    assert "out of memory: RuntimeError: " in line and "DefaultCPUAllocator" in line
    assert "frame #" not in line and "less with --" in line
