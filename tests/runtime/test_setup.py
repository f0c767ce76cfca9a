import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import run_folder
import torch
from waiting import has_ended, wait_until

import start
from config import ConfigError
from config.tree import with_values
from parallel.extras import no_fault
from runtime import processes, setup
from runtime.setup import LaunchEnv


@pytest.fixture
def env(monkeypatch):
    """env(RANK=1, ...): an environment without launcher and W&B variables but these."""
    for name in list(os.environ):
        if name.startswith(("SLURM_", "TORCHELASTIC_", "WANDB_")) or name.endswith(("RANK", "WORLD_SIZE")):
            monkeypatch.delenv(name)
    monkeypatch.setenv("NETRC", "/nonexistent")
    return lambda **values: [monkeypatch.setenv(k, str(v)) for k, v in values.items()]


@pytest.fixture
def torch_state():
    """read_environment() changes the process; the tests after it must not feel that."""
    threads, exact = torch.get_num_threads(), torch.are_deterministic_algorithms_enabled()
    fill = torch.utils.deterministic.fill_uninitialized_memory
    yield
    torch.set_num_threads(threads)
    torch.use_deterministic_algorithms(exact)
    torch.utils.deterministic.fill_uninitialized_memory = fill
    os.environ.pop("CUBLAS_WORKSPACE_CONFIG", None)


def test_one_process_without_a_launcher(env):
    assert setup.rank_and_world() == (0, 1, 0, 1)


def test_ranks_are_those_of_torchrun(env):
    env(RANK=5, WORLD_SIZE=8, LOCAL_RANK=1, LOCAL_WORLD_SIZE=4, SLURM_PROCID=0, SLURM_NTASKS=2)
    assert setup.rank_and_world() == (5, 8, 1, 4)


def test_ranks_are_those_of_srun(env):
    env(SLURM_PROCID=5, SLURM_NTASKS=8, SLURM_LOCALID=1, SLURM_NNODES=2)
    assert setup.rank_and_world() == (5, 8, 1, 4)
    env(SLURM_STEP_NUM_TASKS=6)  # the step is smaller than the job
    assert setup.rank_and_world() == (5, 6, 1, 3)
    env(SLURM_LOCALID=4)  # nodes may hold different numbers
    assert setup.rank_and_world() == (5, 6, 4, 5)


def test_the_body_of_an_sbatch_script_is_one_process(env):
    env(SLURM_PROCID=0, SLURM_NTASKS=8, SLURM_LOCALID=0, SLURM_STEP_ID=4294967291)
    assert setup.rank_and_world() == (0, 1, 0, 1)


@pytest.mark.parametrize(
    "bad", [{"RANK": 8}, {"RANK": "x"}, {"WORLD_SIZE": ""}, {"LOCAL_RANK": 4}, {"RANK": -1}]
)
def test_a_bad_launcher_is_one_line(env, bad):
    env(**({"RANK": 0, "WORLD_SIZE": 8, "LOCAL_RANK": 0, "LOCAL_WORLD_SIZE": 4} | bad))
    with pytest.raises(ConfigError):
        setup.rank_and_world()


@pytest.mark.parametrize(
    "cores, ranks, threads", [(1, 1, 1), (2, 1, 2), (3, 1, 2), (4, 1, 3), (64, 1, 4), (8, 4, 2), (2, 8, 1)]
)
def test_threads_are_spared_by_cores_and_ranks(monkeypatch, cores, ranks, threads):
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: set(range(cores)))
    monkeypatch.setattr(setup.Path, "read_text", lambda self: "max 100000")
    assert setup.spare_threads(ranks) == threads


def test_a_containers_quota_counts(monkeypatch):
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: set(range(64)))
    monkeypatch.setattr(setup.Path, "read_text", lambda self: "200000 100000")
    assert setup.spare_threads() == 2


@pytest.mark.slow
def test_the_environment_of_a_start_is_read_once(env, cfg, torch_state):
    cfg = with_values(cfg, {"train.threads": 1, "train.device": "cpu"})
    e = setup.read_environment(cfg)
    assert (e.rank, e.world, e.device, e.threads) == (0, 1, torch.device("cpu"), 1)
    assert torch.get_num_threads() == 1 and torch.are_deterministic_algorithms_enabled()
    assert torch.get_float32_matmul_precision() == "highest"
    assert str(e).endswith("· cpu x1 (1 thread)")


VARIABLES = {**setup.CUDA_ENVIRONMENT, **setup.GPU_ENVIRONMENT}


@pytest.fixture
def unset(monkeypatch):
    """None of the variables that CUDA and torch read on GPUs is set, nor stays set."""
    for name in VARIABLES:
        monkeypatch.setenv(name, "")  # so that it is taken back
        monkeypatch.delenv(name)


@pytest.mark.parametrize("of_user", [{}, {"CUDA_DEVICE_MAX_CONNECTIONS": "1"}])
def test_cuda_and_nccl_are_prepared_before_the_first_call(unset, monkeypatch, of_user):
    """CUDA may start when GPUs are counted. What the user has set stays."""
    for name, value in of_user.items():
        monkeypatch.setenv(name, value)
    counted, chosen = {}, {}

    def count():
        counted.update(os.environ)
        return 8

    monkeypatch.setattr(torch.cuda, "device_count", count)
    monkeypatch.setattr(torch.cuda, "set_device", lambda index: chosen.update(os.environ, index=index))
    assert setup.pick_device("auto", 5) == torch.device("cuda", 5)
    wanted = {**VARIABLES, **of_user}
    assert {name: counted.get(name) for name in setup.CUDA_ENVIRONMENT}.items() <= wanted.items()
    assert (wanted | {"index": 5}).items() <= chosen.items()


def test_a_cpu_is_not_prepared_for_nccl(unset, monkeypatch):
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 0)
    assert setup.pick_device("auto", 0) == torch.device("cpu")
    assert not set(setup.GPU_ENVIRONMENT) & set(os.environ)


@pytest.mark.parametrize(
    "device, asked, deterministic",
    [("cpu", None, True), ("cpu", False, False), ("cuda", None, False), ("cuda", True, True)],
)
def test_a_gpu_runs_its_fastest_kernels_unless_asked(
    env, cfg, torch_state, monkeypatch, device, asked, deterministic
):
    """train.deterministic: the setting, the process and the description agree."""
    monkeypatch.setattr(setup, "pick_device", lambda kind, local_rank: torch.device(device))
    torch.use_deterministic_algorithms(not deterministic)
    cfg = with_values(cfg, {"train.threads": 1, "train.deterministic": asked})
    assert setup.read_environment(cfg).deterministic is deterministic
    assert torch.are_deterministic_algorithms_enabled() is deterministic
    assert ("CUBLAS_WORKSPACE_CONFIG" in os.environ) is deterministic


@pytest.mark.parametrize("key, value", [("train.rerun_every", 5), ("train.rerun_suspects", True)])
def test_a_gpu_that_computes_steps_again_repeats_itself(
    env, cfg, monkeypatch, torch_state, key, value
):
    monkeypatch.setattr(setup, "pick_device", lambda kind, local_rank: torch.device("cuda"))
    cfg = with_values(cfg, {"train.threads": 1, key: value})
    assert setup.read_environment(cfg).deterministic is True


def test_seed_is_the_same_twice(cfg):
    setup.seed_everything(cfg)
    a = torch.rand(3)
    setup.seed_everything(cfg)
    assert torch.equal(a, torch.rand(3))


def test_no_gpu_is_the_users_mistake(monkeypatch):
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 0)
    assert setup.pick_device("auto", 0) == torch.device("cpu")
    with pytest.raises(ConfigError, match="train.device: cuda"):
        setup.pick_device("cuda", 0)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    with pytest.raises(ConfigError, match="at most 2 ranks per node"):
        setup.pick_device("auto", 2)


@pytest.mark.slow(every=2)
@pytest.mark.parametrize(
    "name, dtype, tera",
    [
        ("NVIDIA H100 80GB HBM3", "bf16", 989),
        ("NVIDIA H100 PCIe", "bf16", 756),
        ("NVIDIA H200", "fp8", 1979),
        ("NVIDIA GB200", "bf16", 2500),
        ("NVIDIA L40S", "bf16", 362),
        ("NVIDIA A100-SXM4-80GB", "fp32", 19.5),
        ("NVIDIA A100-SXM4-80GB", "fp8", None),
        ("NVIDIA Tesla K80", "fp32", None),
        ("AMD Instinct MI250X", "bf16", 191.5),  # one of two dies
        ("AMD Instinct MI300X", "bf16", 1307),
    ],
)
def test_peak_flops(monkeypatch, name, dtype, tera):
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: name)
    assert setup.peak_flops(torch.device("cuda", 0), dtype) == (None if tera is None else tera * 1e12)
    assert setup.peak_flops(torch.device("cpu"), dtype) is None


def test_faults_come_from_the_environment(env, monkeypatch):
    assert start.fault_hook(LaunchEnv()) is no_fault
    monkeypatch.setenv("FAULT", "step.end:rank=2:act=nan")
    assert start.fault_hook(LaunchEnv(rank=2))("step.end", 1) == "nan"
    monkeypatch.setenv("FAULT", "step.middle:act=nan")
    with pytest.raises(ConfigError, match="no point 'step.middle'"):
        start.fault_hook(LaunchEnv())


@pytest.mark.parametrize(
    "wish, mode, key, got",
    [
        ("off", "online", "k" * 40, "off"),
        ("online", None, "k" * 40, "online"),
        ("online", None, None, "offline"),
        ("online", "offline", "k" * 40, "offline"),
        ("offline", "online", "k" * 40, "offline"),
        ("online", "disabled", None, "off"),
        ("offline", None, None, "offline"),
    ],
)
def test_wandb_mode_is_the_more_private_wish(env, cfg, wish, mode, key, got):
    env(**{k: v for k, v in {"WANDB_MODE": mode, "WANDB_API_KEY": key}.items() if v})
    w = setup.wandb_settings(with_values(cfg, {"log.wandb": wish}))
    assert w.mode == got and (w.note is not None) == (got != wish)


def test_variables_of_wandb_count(env, cfg, tmp_path, monkeypatch):
    env(WANDB_PROJECT="p", WANDB_ENTITY="e", WANDB_RUN_ID="i", WANDB_DIR="/d")
    on = with_values(cfg, {"log.wandb": "online"})
    assert setup.wandb_settings(on) == setup.WandbSettings("offline", "p", "e", "i", "/d", "no WANDB_API_KEY")
    (tmp_path / "netrc").write_text("machine api.wandb.ai\n  login user\n  password x\n")
    monkeypatch.setenv("NETRC", str(tmp_path / "netrc"))
    assert setup.wandb_settings(on).mode == "online"


def test_colors_are_for_terminals_that_want_them(monkeypatch):
    class Terminal:
        def isatty(self):
            return True

    monkeypatch.setattr(setup.sys, "stdout", Terminal())
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.delenv("NO_COLOR", raising=False)
    assert setup.wants_color()
    monkeypatch.setenv("NO_COLOR", "1")
    assert not setup.wants_color()
    monkeypatch.setenv("NO_COLOR", "")  # no-color.org: when not empty
    monkeypatch.setenv("TERM", "dumb")
    assert not setup.wants_color()


def test_exit_reason_is_atomic_and_keeps_secrets(tmp_path, monkeypatch):
    monkeypatch.setenv("MY_API_KEY", "canary-31415926")
    assert setup.write_exit_reason(tmp_path, 0, 75, "first")
    assert setup.write_exit_reason(tmp_path, 0, 1, "login with canary-31415926 failed")
    assert setup.write_exit_reason(tmp_path, 3, 77, "x")
    assert sorted(p.name for p in tmp_path.iterdir()) == ["exit_reason.json", "exit_reason.rank3.json"]
    words = run_folder.exit_reason(tmp_path)
    assert words["code"] == 1 and words["reason"] == "login with <MY_API_KEY> failed"
    assert words["rank"] == 0 and words["host"]
    assert setup.write_exit_reason(tmp_path / "gone", 0, 1, "x") is False


@pytest.mark.slow
def test_an_exit_reason_that_a_kill_left_half_written_is_removed(tmp_path):
    write = f"from runtime import setup; setup.write_exit_reason({str(tmp_path)!r}, 1, 1, 'x')"
    kill = "import os, signal; os.fsync = lambda file: os.kill(os.getpid(), signal.SIGKILL)"
    done = subprocess.run([sys.executable, "-c", f"{kill}; {write}"], cwd=Path(setup.__file__).parents[1])
    assert done.returncode == -signal.SIGKILL
    (left,) = tmp_path.iterdir()
    assert left.name.endswith(".tmp")
    setup.remove_exit_reasons(tmp_path)
    assert list(tmp_path.iterdir()) == []


def test_no_secret_in_the_env_object(env, cfg, monkeypatch):
    env(WANDB_API_KEY="canary-31415926", HF_TOKEN="canary-27182818")
    e = LaunchEnv(
        wandb=setup.wandb_settings(with_values(cfg, {"log.wandb": "online"}))
    )
    assert e.wandb.mode == "online" and "canary" not in repr(e)


@pytest.mark.parametrize("system", ["linux", "macos"])
def test_a_worker_dies_with_its_agent(monkeypatch, system):
    """SIGKILL to the parent ends the child too, within two seconds; on macOS without the kernel's help."""
    if system == "macos":
        monkeypatch.setattr(processes.ctypes, "CDLL", lambda name: object())
    read, write = os.pipe()
    agent = os.fork()
    if agent == 0:
        if os.fork() == 0:
            processes.die_with_parent()
            os.write(write, str(os.getpid()).encode())
            time.sleep(60)
        time.sleep(60)
        os._exit(0)
    worker = int(os.read(read, 20))
    os.kill(agent, signal.SIGKILL)
    os.waitpid(agent, 0)
    is_gone = wait_until(lambda: has_ended(worker), 2)
    if not is_gone:
        os.kill(worker, signal.SIGKILL)
    assert is_gone
