"""One trial: train.py's loop under a layout, stopped and resumed, beside one process that ran through.

Compared is all that a run sees, computes and leaves: each token of each batch, loss, gradients by name, norm
and verdict of each step, what routers count, the validation loss and the sampled ids; and, read back from
the run folder, metrics.jsonl (loss, norm, rate, tokens, validation) and the checkpoints (parameters and
moments by name, and where the run stands).
"""
import contextlib
import hashlib
import json
import math
import shutil
from dataclasses import replace
from pathlib import Path
from typing import NamedTuple

import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from torch import Tensor

import config
from checkpoint import store
from config import Config, ConfigError
from kernels import cross_entropy, partial_attention
from parallel.boxes import Box
from parallel.comm import World
from parallel.powersgd import BASIS, ERROR
from runtime.pool import Pool
from scripts.verify.loop import run_loop
from scripts.verify.subject import LAST, SAVED, SKIPPED, placed, write_corpora

BOUND = 1e-9
KEPT = 200  # truths of some megabytes
BY_MICROBATCH = ("tensorwise", "rowwise")  # fp8 whose scales span the tokens of a microbatch, and no fewer
# smaller is noise: a gradient that is zero in exact arithmetic (a k bias without RoPE), and what Adam makes
# of it
FLOOR = 1e-7
# endings of what metrics.jsonl tells of the machine, not of the training
CLOCKS = ("_ms", "_s", "_gpu", "mem_gib", "mfu")
STOPPED = 75  # train.py's exit code for "stopped early, everything saved"


class Off(NamedTuple):
    """How far one value is from one process's, relative to the largest of its tensor.

    step: where it was seen; half a step more is after it."""
    error: float
    step: float
    what: str

    @property
    def bad(self) -> bool:
        return not self.error <= BOUND

    @property
    def rank(self) -> tuple[bool, float]:
        return self.error != self.error, self.error  # NaN is the worst of all

    def as_json(self) -> dict:
        return self._asdict() | ({} if math.isfinite(self.error) else {"error": None})


class Witness:
    """Looks on at train.train as its `watch`. Without truth it keeps what it sees in `made`, {which value:
    tensor}; with truth it compares, and keeps in `seen` how far off each value is.

    Two things it does itself: it spoils the gradient of step SKIPPED, and it asks the run to stop in step
    `until`."""

    def __init__(self, folder: Path, truth: dict[str, Tensor] | None) -> None:
        self.folder, self.truth = folder, truth
        self.made: dict[str, Tensor] = {}
        self.seen: list[Off] = []
        self.names: set[str] = set()  # of all that was compared
        self.until = LAST
        self.steps: list[int] = []  # that were begun
        self.run = self.data = None

    def __call__(self, point: str, step: int | None = None, **shown) -> str | None:
        look = {
            "run.built": self.built,
            "step.begin": self.begin,
            "step.read": self.read,
            "step.backward": self.backward,
            "step.end": self.end,
            "eval.end": self.evaluated,
        }.get(point)
        return look(step, **shown) if look else None

    # ---- holding one value ---------------------------------------------------------------------------------

    def near(self, what: str, value: Tensor, step: float, box: Box | None = None, floor: float = FLOOR):
        """A floating-point value, or the part of it that `box` says: within BOUND of one process's."""
        value = value.detach()
        self.names.add(what)
        place = ... if box is None else tuple(slice(a, a + n) for a, n in zip(box.start, box.size))
        if self.truth is None:
            shape = value.shape if box is None else box.shape
            self.made.setdefault(what, torch.zeros(shape, dtype=torch.float64))[place] = value
        elif what not in self.truth:
            self.seen.append(Off(math.inf, step, f"{what}, which one process does not have"))
        else:
            whole = self.truth[what]
            size = max(float(whole.abs().max()), floor) if whole.numel() else 1.0
            error = float((value - whole[place]).abs().max()) / size if value.numel() else 0.0
            self.seen.append(Off(error, step, what))

    def same(self, what: str, value: Tensor, step: float, rows: Tensor | None = None) -> None:
        """Whole numbers, or rows of them: equal to one process's."""
        self.names.add(what)
        if self.truth is None:
            self.made[what] = value.contiguous()
            return
        true = self.truth.get(what)
        true = true[rows] if true is not None and rows is not None else true
        equal = true is not None and true.shape == value.shape and bool((true == value).all())
        self.seen.append(Off(0.0 if equal else math.inf, step, what))

    # ---- what the loop shows -------------------------------------------------------------------------------

    def built(self, step: int, run, data, valid) -> None:
        self.run = run
        if self.truth is None:
            check_initial_weights(run)
        self.data = data

    def begin(self, step: int) -> None:
        self.steps.append(step)
        if step == self.until and self.run.mesh.rank == 0:
            (self.folder / "STOP").write_text("requeue\n")

    def read(self, step: int, batches: list) -> None:
        rows = torch.cat([b.rows for b in batches])
        self.same(f"step {step} ids of its samples", torch.tensor(self.data.ids(step - 1)), step)
        for field in ("tokens", "targets", "positions", "docs"):
            values = [getattr(b, field) for b in batches]
            if values[0] is not None:
                self.same(f"step {step} {field}", torch.cat(values), step, rows)

    def backward(self, step: int) -> str | None:
        for bucket in self.run.buckets:
            for box, part in bucket.boxes(bucket.shard):
                self.near(f"step {step} gradient of {box.key}", part, step, box)
        return "nan" if step == SKIPPED else None

    def end(self, step: int, loss: Tensor, norm: Tensor, ok: Tensor) -> None:
        self.near(f"step {step} loss", loss, step)
        self.same(f"step {step} is good", ok, step)
        if step != SKIPPED:
            self.near(f"step {step} gradient norm", norm, step)
        routers = self.run.routers
        if routers.told is not None:
            self.near(f"step {step} counts and losses of the routers", routers.told, step)
        for box, part in routers.boxes():
            self.near(f"step {step} {box.key}", part, step, box)

    def evaluated(self, step: int, loss: float, ids: list[int]) -> None:
        self.near(f"validation loss after step {step}", torch.tensor(loss, dtype=torch.float64), step + 0.5)
        self.same(f"sampled ids after step {step}", torch.tensor(ids), step + 0.5)

    def ended(self) -> None:
        """After the last start: a resume that begins anew makes the same steps, but more of them."""
        self.same("steps that were begun, in order", torch.tensor(self.steps), LAST + 1)

    # ---- what it leaves in the run folder ------------------------------------------------------------------

    def left(self) -> None:
        """metrics.jsonl and the checkpoints; for one rank to call, when the run has ended."""
        rows = [json.loads(line) for line in (self.folder / "metrics.jsonl").read_text().splitlines()]
        self.same("steps in metrics.jsonl", torch.tensor([row["step"] for row in rows]), LAST + 1)
        for row in rows:
            for key, value in row.items():
                if not key.endswith(CLOCKS):
                    self.written(f"{key} of step {row['step']} in metrics.jsonl", value, LAST + 1)
        for step in (SAVED, LAST):
            self.checkpoint(self.folder / "checkpoints" / f"step_{step:08d}", step)

    def written(self, what: str, value, step: float) -> None:
        """A number, a list of them, or null."""
        missing = value is None
        self.same(f"{what} is null", torch.tensor(missing), step)
        if not missing:
            self.near(what, torch.tensor(value, dtype=torch.float64), step)

    def checkpoint(self, path: Path, step: int) -> None:
        """Every tensor of a checkpoint, whole and in fp64, and where the run stands."""
        shapes = {row["key"]: row["shape"] for row in store.index(path)["pieces"]}
        wants = [(Box.whole(key, tuple(shape)), torch.zeros(shape, dtype=torch.float64))
                 for key, shape in shapes.items()]
        store.load(path, wants, allow_cast=True)
        for box, value in wants:
            if not box.key.endswith(ERROR) and BASIS not in box.key:  # PowerSGD's own: one process has none
                floor = FLOOR ** 2 if box.key.endswith("_v") else FLOOR  # of squares of gradients
                self.near(f"{box.key} in the checkpoint of step {step}", value, step + 0.5, floor=floor)
        meta = store.meta(path)
        stands = torch.tensor([meta["step"], meta["tokens"]])
        self.same(f"step and tokens of the checkpoint of step {step}", stands, step + 0.5)


def check_initial_weights(run) -> None:
    """Raises ConfigError where a run is no oracle: two matrices that start identical."""
    seen: dict[tuple, str] = {}
    for box, part in (pair for b in run.buckets for pair in b.boxes(b.master)):
        if part.dim() > 1:
            twin = seen.setdefault((part.shape, float(part.double().sum())), box.key)
            if twin != box.key:
                raise ConfigError(f"{box.key} starts with the same weights as {twin}; "
                                  "initial weights must depend on the name")


@contextlib.contextmanager
def small_blocks(tokens: int):
    """Loss and ring attention in blocks of few rows: shapes that a laptop proves then cross their bounds. One
    process keeps whole ones."""
    old = cross_entropy.CHUNK, partial_attention.TILE
    cross_entropy.CHUNK, partial_attention.TILE = (32768, 16) if tokens > 32 else old
    try:
        yield
    finally:
        cross_entropy.CHUNK, partial_attention.TILE = old


# ---- one layout --------------------------------------------------------------------------------------------

def run_layout(world: World, cfg: Config, home: Path, truth: Path) -> tuple[list[Off], set[str]]:
    """On every rank: train LAST steps in the run folder of cfg, stopped and started again after SAVED.

    Returns how far off this rank's values are, the worst of each step, and the names of all that was
    compared."""
    folder = home / cfg.log.name
    witness = Witness(folder, load_file(truth))
    with small_blocks(cfg.train.seq_len):
        for witness.until in (SAVED, LAST):
            code = run_loop(world, cfg, folder, witness)
            witness.seen.append(Off(0.0 if code == STOPPED else math.inf, witness.until, f"exit code {code}"))
    witness.ended()
    if world.rank == 0:
        witness.left()
    worst: dict[float, Off] = {}
    for off in witness.seen:
        worst[off.step] = max(off, worst.get(off.step, off), key=lambda one: one.rank)
    return list(worst.values()), witness.names


def run_alone(world: World, jobs: list[tuple[Config, Path]], home: Path) -> None:
    """On every rank of a pool: its share of the jobs, each as one process that runs through, and what that
    saw in the job's file."""
    for cfg, truth in jobs[world.rank::world.size]:
        save_file(seen_alone(cfg, home), truth)


def seen_alone(cfg: Config, home: Path) -> dict[str, Tensor]:
    """{which value: tensor} of one process that trains LAST steps of a plain job (see `plain`)."""
    witness = Witness(home / cfg.log.name, None)
    run_loop(World(), cfg, witness.folder, witness)
    witness.ended()
    witness.left()
    return witness.made


def plain(cfg: Config) -> Config:
    """The same job in one process: the whole batch at once (under a ramp, its first batch), nothing split,
    nothing summed up later, every save waited for. (Scales in fp8 that span a microbatch are a function of
    it: the same microbatches then.)"""
    whole = cfg.train.micro_batch if cfg.train.fp8 in BY_MICROBATCH else config.batch_size(cfg.train, 0)
    return replace(cfg, parallel=config.Parallel(), train=replace(cfg.train, micro_batch=whole),
                   checkpoint=replace(cfg.checkpoint, async_save=False))


def make_truths(pool: Pool, cfgs: list[Config], home: Path) -> list[Path]:
    """The file of what one process sees in each job, made where `home` does not keep it yet.

    The ranks of the pool share the jobs that are left to run. Data, and truths for other layouts of the same
    job (the last KEPT that were made), are kept in `home`."""
    if not (home / "long.idx").exists():
        write_corpora(home)
    names = [hashlib.sha256(repr(plain(cfg)).encode()).hexdigest() for cfg in cfgs]
    truths = [home / f"{name}.safetensors" for name in names]
    jobs = {truth: placed(plain(cfg), home, name)
            for cfg, name, truth in zip(cfgs, names, truths) if not truth.exists()}
    if jobs:
        kept = sorted(set(home.glob("*.safetensors")) - set(truths), key=lambda path: path.stat().st_mtime)
        for old in kept[:-KEPT]:
            old.unlink()
        pool.run(run_alone, [(cfg, truth) for truth, cfg in jobs.items()], home)
        for cfg in jobs.values():
            shutil.rmtree(home / cfg.log.name)
    return truths


def prove(pool: Pool, cfg: Config, home: Path) -> tuple[Off, Off]:
    """(what is wrong in the first step that has anything wrong, else what is farthest off; what is farthest
    off). See make_truths for what is kept in `home`."""
    truth, = make_truths(pool, [cfg], home)
    try:
        found = pool.run(run_layout, placed(cfg, home, "layout"), home, truth)
    finally:
        shutil.rmtree(home / "layout", ignore_errors=True)
    seen = [off for offs, _ in found for off in offs]
    compared = set().union(*(names for _, names in found))
    with safe_open(truth, "pt") as file:
        left = [what for what in file.keys() if what not in compared]
    seen += [Off(math.inf, LAST + 1, f"{what}, which no rank has") for what in left]
    worst = max(seen, key=lambda off: off.rank)
    bad = (off for off in seen if off.bad)
    return min(bad, key=lambda off: (off.step, *(-x for x in off.rank)), default=worst), worst
