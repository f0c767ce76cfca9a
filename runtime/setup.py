"""Set up a process: rank, device, threads and seeds. The only reader of environment variables.

Rank and world size come from torchrun's variables, which scripts/launch.py also sets, or from those of a bare
`srun`; otherwise this is the only process. The environment is never written to a file or a log, and `redact`
removes secrets from text before it is written.
"""
import contextlib
import faulthandler
import json
import os
import random
import signal
import socket
import sys
from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch

from config import Config, ConfigError, usable_cores
from config.provenance import Provenance, describe, read_code, typed
from model.router import mixture
from plan.job import peak_flops_of_gpu
from runtime.processes import die_with_parent, handles_signal, process_seconds
from runtime.sinks import check_reports, run_tags

# parts of the names of environment variables whose values are never written
SECRET_WORDS = ("KEY", "TOKEN", "SECRET", "PASSWORD", "PASSWD", "CREDENTIAL")
MIN_SECRET_LENGTH = 6  # shorter values would match ordinary words

WANDB_MODES = ("off", "offline", "online")  # most private first
WANDB_MODE_NAMES = {"disabled": "off", "dryrun": "offline", "run": "online"}  # W&B's names -> ours

# Defaults for unset variables that CUDA reads when it starts, which may be when GPUs are counted.
CUDA_ENVIRONMENT = {
    "CUDA_DEVICE_MAX_CONNECTIONS": "32",  # hardware queues for the streams of all groups
}
# Defaults for unset variables that torch reads when it connects ranks, on GPUs.
GPU_ENVIRONMENT = {
    "TORCH_NCCL_HIGH_PRIORITY": "1",  # so that a GEMM that fills the GPU does not delay collectives
    "TORCH_GLOO_LAZY_INIT": "1",  # connect only to the few ranks that host reductions need
}
BATCH_STEP_ID = 0xFFFFFFF0  # SLURM step ids from here on are not srun steps


@dataclass(frozen=True)
class WandbSettings:
    """W&B settings. `mode` is off, offline or online; `note` says why it differs from the config."""

    mode: str = "off"
    project: str | None = None
    entity: str | None = None
    id: str | None = None
    dir: str | None = None
    note: str | None = None
    group: str | None = None
    tags: tuple[str, ...] = ()
    notes: str | None = None


@dataclass(frozen=True)
class LaunchEnv:
    """The launch environment of this process. Contains no secrets."""

    rank: int = 0
    world: int = 1
    local_rank: int = 0
    local_world: int = 1
    device: torch.device = torch.device("cpu")
    threads: int = 1
    deterministic: bool = True  # whether only deterministic kernels are allowed
    host: str = ""
    color: bool = False  # whether the console may use colours
    wandb: WandbSettings = WandbSettings()
    provenance: Provenance | None = None  # of this launch; only on rank 0

    def __str__(self) -> str:
        """Format for the first line of the console: torch 2.13.0 · cpu x1 (2 threads)."""
        version = torch.__version__.partition("+")[0]
        if self.device.type == "cuda":
            return f"torch {version} · {torch.cuda.get_device_name(self.device)} x{self.world}"
        if self.device.type == "mps":
            return f"torch {version} · Apple GPU (mps)"
        plural = "s" if self.threads > 1 else ""
        return f"torch {version} · cpu x{self.world} ({self.threads} thread{plural})"


@dataclass(frozen=True)
class LaunchInfo:
    """How this launch came about and whom it tells, beyond its config.

    stated: keys given on the command line or in its file. steps_done: steps made by earlier launches
    (durable/progress.py); the data of finished phases is not opened. about_layout: lines for the header.
    seconds_before: since this process started. failure_scope: context of the loop that reports a failure to
    the other ranks. report_exit(code, reason, whether to requeue) is called at the end.
    """

    stated: Collection[str] = ()
    steps_done: int = 0
    about_layout: Sequence[str] = ()
    seconds_before: float = 0.0
    failure_scope: Callable[[], AbstractContextManager[object]] = contextlib.nullcontext
    report_exit: Callable[[int, str, bool], object] = lambda code, reason, requeue: None


def read_environment(cfg: Config) -> LaunchEnv:
    """Prepare this process and return its environment.

    Raises ConfigError if the environment or the device does not fit the config.
    """
    rank, world, local_rank, local_world = rank_and_world()
    die_with_launcher()

    # dump the stacks of all threads at a crash, and at kill -USR2, which has no other effect
    faulthandler.enable(2)
    faulthandler.register(signal.SIGUSR2, file=2)

    threads = cfg.train.threads or spare_threads(local_world)
    torch.set_num_threads(threads)  # overrides OMP_NUM_THREADS, which torchrun sets to 1
    torch.set_float32_matmul_precision("highest")  # no TF32: fp32 results must agree between layouts

    device = pick_device(cfg.train.device, local_rank)
    deterministic = is_deterministic(cfg, device)
    set_determinism(deterministic, cfg.train.compile)
    if cfg.train.cuda_graphs and device.type != "cuda":
        raise ConfigError("train.cuda_graphs: needs a GPU, and torch finds none here; leave it out")
    if cfg.train.unproven and device.type != "cuda":
        raise ConfigError("train.unproven: needs a GPU, and torch finds none here; leave it out")
    if cfg.profile.memory is not None and device.type != "cuda":
        raise ConfigError("profile.memory: needs a GPU, and torch finds none here; leave it out, or see "
                          "train.py --dry-run --memory FILE")
    check_reports(cfg.log)
    needs_hopper = cfg.train.cuda_graphs and mixture(cfg.model) is not None
    if needs_hopper and torch.cuda.get_device_capability(device)[0] < 9:
        raise ConfigError("train.cuda_graphs: with experts it needs Hopper or later, whose kernels "
                          "find the rows of experts without the host; leave it out")
    return LaunchEnv(
        rank=rank,
        world=world,
        local_rank=local_rank,
        local_world=local_world,
        device=device,
        threads=threads,
        deterministic=deterministic,
        host=socket.gethostname(),
        color=wants_color(),
        wandb=wandb_settings(cfg),
    )


def is_deterministic(cfg: Config, device: torch.device) -> bool:
    """Return train.deterministic; the default is True on a CPU, where it is free, and with step reruns."""
    if cfg.train.deterministic is None:
        return device.type == "cpu" or cfg.train.rerun_every is not None or cfg.train.rerun_suspects
    return cfg.train.deterministic


def set_determinism(deterministic: bool, compiles: bool) -> None:
    """With `deterministic`, make operations without a deterministic implementation raise.

    Call it before the first GEMM on a GPU. compiles: whether torch.compile is used.
    """
    if deterministic:
        os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")  # cuBLAS is deterministic only with it
        # do not fill every torch.empty; torch's stubs lack this property of the module
        options = torch.utils.deterministic
        options.fill_uninitialized_memory = False  # pyright: ignore[reportAttributeAccessIssue]
    if compiles:
        # also configures the compiler, whose import takes seconds
        torch.use_deterministic_algorithms(deterministic)
    else:
        torch.set_deterministic_debug_mode("error" if deterministic else "default")


# ---- the launcher ------------------------------------------------------------------------------------------

def rank_and_world() -> tuple[int, int, int, int]:
    """Return (rank, world size, local rank, local world size). Raises ConfigError if they contradict."""
    env = os.environ
    if "RANK" in env and "WORLD_SIZE" in env:
        rank = environment_number("RANK")
        world = environment_number("WORLD_SIZE")
        local_rank = environment_number("LOCAL_RANK", rank)
        local_world = environment_number("LOCAL_WORLD_SIZE", world)
    elif "SLURM_PROCID" in env and "SLURM_NTASKS" in env and not in_batch_script():
        rank = environment_number("SLURM_PROCID")
        # the size of the srun step, which may be smaller than the job
        world = environment_number("SLURM_STEP_NUM_TASKS", environment_number("SLURM_NTASKS"))
        nodes = environment_number("SLURM_STEP_NUM_NODES", environment_number("SLURM_NNODES", 1))
        local_rank = environment_number("SLURM_LOCALID", rank)
        local_world = max(-(-world // nodes), local_rank + 1)  # nodes may differ in their number of ranks
    else:
        return 0, 1, 0, 1
    if not (0 <= rank < world and 0 <= local_rank < local_world):
        raise ConfigError(
            f"rank {rank} of {world}, local rank {local_rank} of {local_world}: RANK, WORLD_SIZE, LOCAL_RANK "
            f"(or SLURM_*) are inconsistent; start with torchrun or srun, or unset them")
    return rank, world, local_rank, local_world


def die_with_launcher() -> None:
    """Make this process end with its launcher, if it has one. Otherwise it would keep its GPU and locks."""
    if "TORCHELASTIC_RUN_ID" in os.environ:
        die_with_parent()


def restart_count() -> str:
    """Return how often torchrun (--max-restarts) has restarted this job; its store survives restarts."""
    return os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")


def become_rank(environment: Mapping[str, str]) -> None:
    """Take the environment of a rank, whose time starts now. For a spare process (durable/spares.py)."""
    os.environ.update(environment)
    os.environ["BEVATRON_SPARE_SECONDS"] = str(process_seconds())


def environment_with_path(folder: Path) -> dict[str, str]:
    """Return this process's environment, for a program that imports from `folder` wherever it runs."""
    path = os.pathsep.join([str(folder), os.environ.get("PYTHONPATH", "")])
    return {**os.environ, "PYTHONPATH": path.rstrip(os.pathsep)}


def seconds_since_start() -> float:
    """Return the seconds since this process started or became a rank, or 0.0 if unknown."""
    return max(0.0, process_seconds() - float(os.environ.get("BEVATRON_SPARE_SECONDS", "0")))


def launcher_notes() -> list[str]:
    """Return a warning if torchrun does not handle SIGUSR1, which schedulers send before they stop a job.

    It would kill torchrun and the ranks before they can save. Returns [] otherwise, or without /proc.
    """
    # no launcher, or scripts.launch, which forwards the signal
    if os.environ.get("TORCHELASTIC_RUN_ID", "launch") == "launch":
        return []
    if handles_signal(os.getppid(), signal.SIGUSR1) is not False:
        return []
    return ["warning: SIGUSR1 would end this torchrun and its ranks before they can save; start it with "
            "--signals-to-handle SIGTERM,SIGINT,SIGUSR1, or use python -m scripts.launch"]


def store_secret() -> str:
    """Return the job's secret that authenticates values in its store (durable/peers.py), or ""."""
    return os.environ.get("BEVATRON_STORE_SECRET", "")


def in_batch_script() -> bool:
    """Return True in the body of an sbatch script, a single process that also has the job's SLURM_NTASKS."""
    return environment_number("SLURM_STEP_ID", 0) >= BATCH_STEP_ID


def environment_number(name: str, default: int | None = None) -> int:
    """Read an integer from the environment. Raises ConfigError if invalid, or unset without a default."""
    text = os.environ.get(name)
    if text is None and default is not None:
        return default
    try:
        return int(text or "")
    except ValueError:
        raise ConfigError(f"{name}={text!r} in the environment is not a whole number") from None


# ---- threads, device, seeds, faults ------------------------------------------------------------------------

def spare_threads(local_world: int = 1) -> int:
    """Return the CPU threads of a process: at most 4, and one core of more than 2 stays free.

    local_world: processes that share the cores. Two threads on a core that another process uses run ten times
    slower than one, so this counts the cores that the container may use, not those of the machine.
    """
    cores = usable_cores()
    try:
        quota, period = Path("/sys/fs/cgroup/cpu.max").read_text().split()
        cores = min(cores, max(1, int(quota) // int(period)))
    except (OSError, ValueError):  # no cgroup v2, or "max": no quota
        pass
    cores = max(1, cores // local_world)
    return min(4, cores - 1 if cores > 2 else cores)


def pick_device(kind: str, local_rank: int) -> torch.device:
    """Return the device of this rank. kind: train.device (auto, cpu, cuda, mps).

    Raises ConfigError if there is no GPU for this rank.
    """
    if kind == "mps":
        if not torch.backends.mps.is_available():
            raise ConfigError("train.device: mps, but torch finds no Apple GPU here; use --train.device cpu")
        return torch.device("mps")
    num_gpus = 0
    if kind != "cpu":
        set_defaults(CUDA_ENVIRONMENT)
        num_gpus = torch.cuda.device_count()
    if kind == "cuda" and not num_gpus:
        raise ConfigError("train.device: cuda, but torch finds no GPU here; use --train.device cpu")
    if kind == "cpu" or not num_gpus:
        return torch.device("cpu")
    if local_rank >= num_gpus:
        raise ConfigError(f"train.device: local rank {local_rank} has no GPU, this node has {num_gpus}; "
                          f"start at most {num_gpus} ranks per node")
    set_defaults(GPU_ENVIRONMENT)
    torch.cuda.set_device(local_rank)
    return torch.device("cuda", local_rank)


def set_defaults(variables: Mapping[str, str]) -> None:
    """Set environment variables that are unset."""
    for name, value in variables.items():
        os.environ.setdefault(name, value)


def peak_flops(device: torch.device, dtype: str) -> float | None:
    """Return the device's peak FLOP/s in `dtype` (a train.dtype) from its data sheet, or None if unknown."""
    if device.type != "cuda":
        return None
    return peak_flops_of_gpu(torch.cuda.get_device_name(device), dtype)


def seed_everything(cfg: Config) -> None:
    """Seed the global generators.

    Weights, sample order and dropout do not use them; they are functions of train.seed.
    """
    random.seed(cfg.train.seed)
    np.random.seed(cfg.train.seed % 2**32)
    torch.manual_seed(cfg.train.seed)


def named_faults() -> str:
    """Return the faults to inject, the variable FAULT, or "" (durable/faults.py)."""
    return os.environ.get("FAULT", "")


# ---- the console and W&B -----------------------------------------------------------------------------------

def wants_color() -> bool:
    """Return True on a terminal with colours, unless NO_COLOR is set (no-color.org)."""
    try:
        return sys.stdout.isatty() and not os.environ.get("NO_COLOR") and os.environ.get("TERM") != "dumb"
    except (AttributeError, ValueError):  # stdout is closed or replaced
        return False


def wandb_settings(cfg: Config) -> WandbSettings:
    """Return the W&B settings.

    The more private of log.wandb and WANDB_MODE wins. Without a key, online becomes offline.
    """
    env = os.environ
    mode = cfg.log.wandb
    note = None

    asked = env.get("WANDB_MODE", "")
    asked_mode = WANDB_MODE_NAMES.get(asked, asked)
    if asked_mode in WANDB_MODES and WANDB_MODES.index(asked_mode) < WANDB_MODES.index(mode):
        mode = asked_mode
        note = f"WANDB_MODE={asked}"

    if mode == "online" and not env.get("WANDB_API_KEY") and not has_netrc_key():
        mode = "offline"
        note = "no WANDB_API_KEY"

    return WandbSettings(
        mode=mode,
        project=env.get("WANDB_PROJECT") or cfg.log.project,
        entity=env.get("WANDB_ENTITY") or cfg.log.entity,
        id=env.get("WANDB_RUN_ID"),
        dir=env.get("WANDB_DIR"),
        note=note,
        group=env.get("WANDB_RUN_GROUP") or cfg.log.group,
        tags=run_tags(env.get("WANDB_TAGS") or cfg.log.tags),
        notes=env.get("WANDB_NOTES") or cfg.log.notes,
    )


def has_netrc_key() -> bool:
    """Return whether `wandb login` has stored a key on this machine. Checks the host's entry, not the key."""
    url = os.environ.get("WANDB_BASE_URL", "https://api.wandb.ai")
    host = url.partition("//")[2].partition("/")[0]
    file = Path(os.environ.get("NETRC") or Path.home() / ".netrc")
    try:
        return f"machine {host}" in file.read_text()
    except (OSError, UnicodeDecodeError):
        return False


# ---- provenance --------------------------------------------------------------------------------------------

def start_provenance(env: LaunchEnv, argv: Sequence[str]) -> Provenance:
    """Return the provenance of this launch of train.py with `argv`. Takes a few hundredths of a second."""
    command = typed(["python", "train.py", *map(redact, argv)])
    is_gpu = env.device.type == "cuda"
    hardware = {
        "device": torch.cuda.get_device_name(env.device) if is_gpu else env.device.type,
        "ranks": env.world,
        "ranks_of_node": env.local_world,
        "threads": env.threads,
    }
    if is_gpu:
        hardware["cuda"] = torch.version.cuda or torch.version.hip
    code = read_code()
    return Provenance(describe(command, code, hardware), code)


# ---- exit_reason.json --------------------------------------------------------------------------------------

def redact(text: str) -> str:
    """Replace the values of environment variables whose names suggest a secret by <NAME>."""
    for name, value in os.environ.items():
        is_secret = any(word in name.upper() for word in SECRET_WORDS)
        if is_secret and len(value) >= MIN_SECRET_LENGTH:
            text = text.replace(value, f"<{name}>")
    return text


def remove_exit_reasons(run_dir: Path) -> None:
    """Remove the exit reasons of an earlier launch, including partial ones, and what its ranks wrote after a
    hang.

    Call it under the run's lock, before a rank can fail.
    """
    for pattern in ("exit_reason*.json", "exit_reason*.json.*.tmp", "stacks.rank*.txt", "flight/rank_*"):
        for file in Path(run_dir).glob(pattern):
            with contextlib.suppress(OSError):
                file.unlink()


def write_exit_reason(run_dir: Path, rank: int, code: int, reason: str, *, requeue: bool = False,
                      of_job: bool = False, of_device: bool = False) -> bool:
    """Write exit_reason.json (rank 0) or exit_reason.rankN.json atomically.

    It records the exit code, because torchrun turns every failure into code 1.
    requeue: whether a restart may succeed. of_job: write exit_reason.json on any rank. of_device: this rank's
    device computes wrong results, so the next launch should exclude it.
    Returns False instead of raising OSError, since a full disk must not hide why the process ends.
    """
    file = Path(run_dir) / ("exit_reason.json" if rank == 0 or of_job else f"exit_reason.rank{rank}.json")
    temp = file.with_name(f"{file.name}.{os.getpid()}.tmp")
    record = {
        "code": code,
        "reason": redact(reason),
        "requeue": requeue,
        "rank": rank,
        "host": socket.gethostname(),
    }
    if of_device:
        record["wrong_device"] = True
    try:
        with open(temp, "w") as out:
            out.write(json.dumps(record) + "\n")
            out.flush()
            os.fsync(out.fileno())
        os.replace(temp, file)
        return True
    except OSError:
        with contextlib.suppress(OSError):
            temp.unlink(missing_ok=True)
        return False
