"""Start-up of one process: who am I, which device, how many threads, which seeds. The only reader of the environment.

Promises: nothing of the environment is ever dumped, and `redact` takes secrets out of text that is about to be written.
Sources: torchrun's variables, else those of a bare `srun`, else a world of one process.
"""
import contextlib
import ctypes
import faulthandler
import json
import os
import random
import signal
import socket
import sys
from collections.abc import Collection
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch

import config
from config import Config, ConfigError
from runtime.faults import Faults, parse

SECRET = ("KEY", "TOKEN", "SECRET", "PASSWORD", "PASSWD", "CREDENTIAL")  # names whose values are never written


@dataclass(frozen=True)
class Wandb:
    """Where W&B goes. `mode` is off, offline or online; `note` says why it is not what the config asked for."""

    mode: str = "off"
    project: str | None = None
    entity: str | None = None
    id: str | None = None
    dir: str | None = None
    note: str | None = None


@dataclass(frozen=True)
class Env:
    """What this process is. No secret is in it."""

    rank: int = 0
    world: int = 1
    local_rank: int = 0
    local_world: int = 1
    device: torch.device = torch.device("cpu")
    threads: int = 1
    host: str = ""
    color: bool = False  # may the console use colours
    wandb: Wandb = Wandb()

    def __str__(self) -> str:
        """The console's first line, after the name: torch 2.13.0 · cpu x1 (2 threads)"""
        kind = "cpu" if self.device.type == "cpu" else torch.cuda.get_device_name(self.device)
        threads = f" ({self.threads} thread{'s' * (self.threads > 1)})" if self.device.type == "cpu" else ""
        return f"torch {torch.__version__.partition('+')[0]} · {kind} x{self.world}{threads}"


def start(cfg: Config) -> Env:
    """Readies this process and says what it is. Raises ConfigError when environment or device do not fit the config."""
    rank, world, local_rank, local_world = place()
    if "TORCHELASTIC_RUN_ID" in os.environ:
        die_with_parent()
    faulthandler.enable(2)
    faulthandler.register(signal.SIGUSR2, file=2)  # kill -USR2 shows where every thread stands; nothing else happens
    threads = cfg.train.threads or spare_threads(local_world)
    torch.set_num_threads(threads)  # torchrun sets OMP_NUM_THREADS=1; this is the number that counts
    torch.set_float32_matmul_precision("highest")  # fp32 means fp32; TF32 would break every parity promise
    if cfg.train.deterministic:
        os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")  # cuBLAS is only deterministic with it
        torch.utils.deterministic.fill_uninitialized_memory = False  # else every torch.empty is written once more
    if cfg.train.compile:
        torch.use_deterministic_algorithms(cfg.train.deterministic)  # tells the compiler too, whose import takes seconds
    else:
        torch.set_deterministic_debug_mode("error" if cfg.train.deterministic else "default")
    device = pick_device(cfg.train.device, local_rank)
    if cfg.train.cuda_graphs and device.type != "cuda":
        raise ConfigError("train.cuda_graphs: needs a GPU, and torch finds none here; leave it out")
    return Env(rank, world, local_rank, local_world, device, threads,
               socket.gethostname(), wants_color(), wandb(cfg))


def place() -> tuple[int, int, int, int]:
    """rank, world, local rank, local world."""
    env = os.environ
    if "RANK" in env and "WORLD_SIZE" in env:
        rank, world = number("RANK"), number("WORLD_SIZE")
        local_rank, local_world = number("LOCAL_RANK", rank), number("LOCAL_WORLD_SIZE", world)
    elif "SLURM_PROCID" in env and "SLURM_NTASKS" in env and not in_batch_script():
        rank = number("SLURM_PROCID")
        world = number("SLURM_STEP_NUM_TASKS", number("SLURM_NTASKS"))  # of the step, which may be smaller than the job
        local_rank = number("SLURM_LOCALID", rank)
        local_world = max(-(-world // number("SLURM_STEP_NUM_NODES", number("SLURM_NNODES", 1))), local_rank + 1)
    else:
        return 0, 1, 0, 1
    if not (0 <= rank < world and 0 <= local_rank < local_world):
        raise ConfigError(f"rank {rank} of {world}, local rank {local_rank} of {local_world}: RANK, WORLD_SIZE, "
                          "LOCAL_RANK (or SLURM_*) do not fit together; start with torchrun or srun, or unset them")
    return rank, world, local_rank, local_world


def attempt() -> str:
    """Which start of torchrun's --max-restarts this is: the store outlives one, and what ranks said in it."""
    return os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")


def in_batch_script() -> bool:
    """True in the body of an sbatch script: it carries the job's SLURM_NTASKS but is one process, no step of srun."""
    return number("SLURM_STEP_ID", 0) >= 0xFFFFFFF0


def number(name: str, default: int | None = None) -> int:
    text = os.environ.get(name)
    if text is None and default is not None:
        return default
    try:
        return int(text)
    except (TypeError, ValueError):
        raise ConfigError(f"{name}={text!r} in the environment is not a whole number") from None


def spare_threads(local_world: int = 1) -> int:
    """CPU threads for one of `local_world` processes: at most 4, and one core left free where there are more than 2.

    Two threads on a core that a neighbour uses run ten times slower than one, so what a container may use counts, not
    what the machine has.
    """
    cores = len(os.sched_getaffinity(0))
    try:
        quota, period = Path("/sys/fs/cgroup/cpu.max").read_text().split()
        cores = min(cores, max(1, int(quota) // int(period)))
    except (OSError, ValueError):  # no cgroup v2, or "max": no quota
        pass
    cores = max(1, cores // local_world)
    return min(4, cores - 1 if cores > 2 else cores)


def pick_device(kind: str, local_rank: int) -> torch.device:
    count = torch.cuda.device_count() if kind != "cpu" else 0
    if kind == "cuda" and not count:
        raise ConfigError("train.device: cuda, but torch finds no GPU here; use --train.device cpu")
    if kind == "cpu" or not count:
        return torch.device("cpu")
    if local_rank >= count:
        raise ConfigError(f"train.device: local rank {local_rank} has no GPU, this node has {count}; "
                          f"start at most {count} ranks a node")
    torch.cuda.set_device(local_rank)
    return torch.device("cuda", local_rank)


def peak_flops(device: torch.device, dtype: str) -> float | None:
    """FLOP/s of the device in `dtype` (train.dtype's names) by its data sheet; None where that is not known."""
    return peak_of(torch.cuda.get_device_name(device), dtype) if device.type == "cuda" else None


def peak_of(name: str, dtype: str) -> float | None:
    """The same, by the device's name."""
    name = name.lower()
    gpus = config.read_yaml(config.HERE / "clusters.yaml")["gpus"]
    fits = [g for g in gpus if g in name]
    value = gpus[max(fits, key=len)].get(dtype) if fits else None
    return None if value is None else 1e12 * value


def seed(cfg: Config) -> None:
    """Seeds the three generators. Weights, sample order and dropout need none: they are functions of train.seed."""
    random.seed(cfg.train.seed)
    np.random.seed(cfg.train.seed % 2**32)
    torch.manual_seed(cfg.train.seed)


def faults(env: Env, known: Collection[str] = ()) -> Faults:
    """`at(point, step)` of runtime/faults.py, armed by FAULT. `known` are the points there are. Raises ConfigError."""
    return Faults(parse(os.environ.get("FAULT", "")), env.rank, known)


def die_with_parent() -> None:
    """A worker of a killed torchrun would live on with its GPUs and locks; the kernel ends it with the agent."""
    parent = os.getppid()
    ctypes.CDLL(None).prctl(1, signal.SIGKILL)  # PR_SET_PDEATHSIG
    if os.getppid() != parent:  # it died while we asked
        os.kill(os.getpid(), signal.SIGKILL)


def wants_color() -> bool:
    """On a terminal that can, and nobody said NO_COLOR (no-color.org)."""
    try:
        return sys.stdout.isatty() and not os.environ.get("NO_COLOR") and os.environ.get("TERM") != "dumb"
    except (AttributeError, ValueError):  # stdout closed or replaced
        return False


def wandb(cfg: Config) -> Wandb:
    """The W&B settings: of log.wandb and WANDB_MODE the one that sends less; offline without a key to send with."""
    order = ("off", "offline", "online")
    env = {k: os.environ.get(f"WANDB_{k}") for k in ("MODE", "PROJECT", "ENTITY", "RUN_ID", "DIR", "API_KEY")}
    wish = {"disabled": "off", "dryrun": "offline", "run": "online"}.get(env["MODE"], env["MODE"])
    mode, note = cfg.log.wandb, None
    if wish in order and order.index(wish) < order.index(mode):
        mode, note = wish, f"WANDB_MODE={env['MODE']}"
    if mode == "online" and not env["API_KEY"] and not netrc_key():
        mode, note = "offline", "no WANDB_API_KEY"
    return Wandb(mode, env["PROJECT"] or cfg.log.project, env["ENTITY"], env["RUN_ID"], env["DIR"], note)


def netrc_key() -> bool:
    """Did `wandb login` leave a key on this machine? (asked without reading the key)"""
    host = os.environ.get("WANDB_BASE_URL", "https://api.wandb.ai").partition("//")[2].partition("/")[0]
    file = Path(os.environ.get("NETRC") or Path.home() / ".netrc")
    try:
        return f"machine {host}" in file.read_text()
    except (OSError, UnicodeDecodeError):
        return False


def redact(text: str) -> str:
    """`text` without the values of environment variables whose names speak of secrets."""
    for name, value in os.environ.items():
        if len(value) >= 6 and any(word in name.upper() for word in SECRET):
            text = text.replace(value, f"<{name}>")
    return text


def forget_reasons(run_dir: Path) -> None:
    """Removes what an earlier start left: its reason is not this one's. Under the run's lock, before any rank
    can fail."""
    for file in Path(run_dir).glob("exit_reason*.json"):
        with contextlib.suppress(OSError):
            file.unlink()


def exit_reason(run_dir: Path, rank: int, code: int, reason: str, again: bool = False,
                job: bool = False) -> bool:
    """Writes exit_reason.json (rank 0) or exit_reason.rankN.json atomically, as torchrun turns every cause into code 1.

    again: would another start help? job: this rank's reason is the job's (exit_reason.json), whatever rank it
    is. The last words of a process: a full disk must not hide them, so it returns False instead of raising
    OSError.
    """
    file = Path(run_dir) / ("exit_reason.json" if rank == 0 or job else f"exit_reason.rank{rank}.json")
    temp = file.with_name(f"{file.name}.{os.getpid()}.tmp")
    words = {"code": code, "reason": redact(reason), "again": again, "rank": rank,
             "host": socket.gethostname()}
    try:
        with open(temp, "w") as f:
            f.write(json.dumps(words) + "\n")
            f.flush()
            os.fsync(f.fileno())
        os.replace(temp, file)
        return True
    except OSError:
        try:
            temp.unlink(missing_ok=True)
        except OSError:
            pass
        return False
