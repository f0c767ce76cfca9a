"""One trial: train.py's loop under a layout, stopped and resumed, compared with one uninterrupted process.

Everything that a run reads, computes and writes is compared:

- for each step: the tokens of each batch, the loss, the gradients by name and their norm, whether it is good,
  and the router counts;
- the validation loss, the sampled ids and the logits that they were drawn from;
- from the run folder: metrics.jsonl (loss, norm, learning rate, tokens, target counts, validation) and the
  checkpoints (parameters and moments by name, and the step and tokens of the run).
"""
import contextlib
import hashlib
import json
import math
import shutil
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from torch import Tensor

import config
from checkpoint.disk import store
from config import Config, ConfigError, TrainConfig
from config.exit_codes import STOPPED_EARLY
from config.reading import get_phases
from config.reading.tiny import SAVED
from data.loader import BatchLoader
from durable.pool import WorkerPool
from kernels import cross_entropy, partial_attention
from lab.proof.lattice import TRUNK_STEPS
from lab.proof.rounded_rows import rounded_rows
from lab.proof.verify.loop import run_loop
from lab.proof.verify.tiny_config import (
    LAST,
    SKIPPED,
    get_trunk,
    has_trunk,
    placed,
    write_corpora,
)
from parallel.microbatch import Microbatch
from parallel.sharding.boxes import Box
from parallel.sharding.powersgd import BASIS_MARK, ERROR_SUFFIX
from parallel.sharding.spec import ROLES
from parallel.sharding.views import get_boxes
from parallel.wire.lanes import LaneLog, PostedExchange, Wait
from parallel.wire.strict import StrictMode
from parallel.wire.world import World
from plan.record.check import check
from runtime.run import TrainingRun

BOUND = 1e-9  # allowed relative error

# Tensors whose largest element is smaller are compared as if it were FLOOR. Smaller values are noise: a
# gradient that is zero in exact arithmetic (a k bias without RoPE), and what Adam makes of it.
FLOOR = 1e-7

MAX_REFERENCES = 200  # reference files to keep, some megabytes each

# fp8 recipes whose scales depend on all tokens of a microbatch
FP8_BY_MICROBATCH = ("tensorwise", "rowwise", "nvfp4")
FP8_OF_TENSOR = ("tensorwise", "nvfp4")  # those with a scale of the whole tensor

# suffixes of metrics.jsonl keys that depend on the machine, not on the training
MACHINE_SUFFIXES = ("_ms", "_s", "_gpu", "mem_gib", "mfu")

# metrics.jsonl keys that are estimated from the microbatch sizes (log.noise_scale)
OF_MICROBATCHES = ("noise_scale", "noise_s", "noise_g2")

# block sizes of the loss and of ring attention in a layout: small, so that short sequences have several
SMALL_CHUNK_BYTES = 32768
SMALL_TILE = 16


class Deviation(NamedTuple):
    """How far one value is from that of one process.

    error: relative to the largest element of its tensor. what: the value's name.
    step: where it occurred; n + 0.5 is after step n and before step n + 1.
    """

    error: float
    step: float
    what: str

    @property
    def is_wrong(self) -> bool:
        """Whether the error is beyond BOUND, or NaN."""
        return not self.error <= BOUND

    @property
    def severity(self) -> tuple[bool, float]:
        """The sort key of deviations: their error, with NaN as the worst."""
        return math.isnan(self.error), self.error

    def as_json(self) -> dict[str, object]:
        """Return the fields as JSON, with a non-finite error as None."""
        row: dict[str, object] = self._asdict()
        if not math.isfinite(self.error):
            row["error"] = None
        return row


# ---- what a run computes -----------------------------------------------------------------------------------

def poison_gradients(run: TrainingRun) -> None:
    """Set all gradients to NaN."""
    for bucket in run.buckets:
        for grads in (bucket.grads.full, bucket.grads.local):
            if grads is not None:
                grads.fill_(math.nan)


class TrialObserver:
    """Observes train.train (`observe`): records the values of a run, or compares them with a reference.

    Without `reference`, values are collected in `recorded`, {name: tensor}. With it, `deviations` says how
    far off each value is.

    It also interferes with the run. It makes the gradient of step SKIPPED non-finite and, with
    optim.spike_sigma, turns that of step LAST into a spike, only once if the run then rewinds
    (optim.spike_rewind). It requests a stop in step `stop_step`. With a reference, it also puts NaN wherever
    a step could read gradients that it has not written itself.
    """

    run: TrainingRun  # set by run_built
    data: BatchLoader  # set by run_built

    def __init__(self, folder: Path, reference: dict[str, Tensor] | None) -> None:
        self.folder = folder
        self.reference = reference
        self.recorded: dict[str, Tensor] = {}
        self.deviations: list[Deviation] = []
        self.names: set[str] = set()  # names of all values recorded or compared
        self.stop_step = LAST
        self.begun_steps: list[int] = []
        self.logits_of_sample: list[Tensor] = []  # [vocab] per token of the current sample

    def __call__(self, point: str, step: int | None = None, **shown: Any) -> str | None:
        """Handle one of train.train's FAULT_POINTS. Returns "nan", "spike" or None."""
        methods = {
            "run.built": self.run_built,
            "step.begin": self.step_begin,
            "step.read": self.batches_read,
            "step.backward": self.grads_ready,
            "step.end": self.step_end,
            "eval.end": self.evaluation_end,
        }
        method = methods.get(point)
        return method(step, **shown) if method else None

    # ---- one value ----

    def compare_close(
        self, what: str, value: Tensor, step: float, box: Box | None = None, floor: float = FLOOR
    ) -> None:
        """Check that a floating-point tensor, or this rank's box of it, is within BOUND of the reference."""
        value = value.detach()
        self.names.add(what)
        part = ... if box is None else get_slices(box)

        if self.reference is None:
            shape = value.shape if box is None else box.shape
            whole = self.recorded.setdefault(what, torch.zeros(shape, dtype=torch.float64))
            whole[part] = value
            return

        if what not in self.reference:
            error = math.inf
            what = f"{what}, which one process does not have"
        elif value.numel() == 0:
            error = 0.0
        else:
            expected = self.reference[what]
            largest = max(float(expected.abs().max()), floor)
            error = float((value - expected[part]).abs().max()) / largest
        self.deviations.append(Deviation(error, step, what))

    def compare_equal(self, what: str, value: Tensor, step: float, rows: Tensor | None = None) -> None:
        """Check that an integer tensor, or this rank's rows of it, equals the reference."""
        self.names.add(what)
        if self.reference is None:
            self.recorded[what] = value.contiguous()
            return

        expected = self.reference.get(what)
        if expected is not None and rows is not None:
            expected = expected[rows]
        is_equal = (
            expected is not None and expected.shape == value.shape and bool((expected == value).all())
        )
        self.deviations.append(Deviation(0.0 if is_equal else math.inf, step, what))

    # ---- the points of the loop ----

    def run_built(self, step: int, run: TrainingRun, data: BatchLoader, valid: BatchLoader) -> None:
        self.run = run
        self.data = data
        # torch.empty returns NaN: ZeRO-2 and 3 allocate gradients during a step
        options = torch.utils.deterministic
        is_poisoned = self.reference is not None
        options.fill_uninitialized_memory = is_poisoned  # pyright: ignore[reportAttributeAccessIssue]
        if self.reference is None:
            check_initial_weights(run)

    def named(self, step: int) -> str:
        """ "step 4", or "step 4, again" after a rewind past it."""
        return f"step {step}" + ", again" * (self.begun_steps.count(step) - 1)

    def step_begin(self, step: int) -> None:
        self.begun_steps.append(step)
        if self.reference is not None:
            poison_gradients(self.run)
        if step == self.stop_step and self.run.mesh.rank == 0:
            (self.folder / "STOP").write_text("requeue\n")

    def batches_read(self, step: int, batches: list[Microbatch]) -> None:
        ids = torch.tensor(self.data.sample_ids(self.run.spikes.data_step(step)))
        self.compare_equal(f"{self.named(step)} ids of its samples", ids, step)

        # this rank's rows of the global batch
        rows = torch.cat([batch.sequence_ids for batch in batches if batch.sequence_ids is not None])
        for field in ("tokens", "targets", "positions", "documents"):
            values = [getattr(batch, field) for batch in batches]
            if values[0] is not None:
                self.compare_equal(f"{self.named(step)} {field}", torch.cat(values), step, rows)

    def grads_ready(self, step: int) -> str | None:
        for bucket in (bucket for bucket in self.run.buckets if bucket.trains):
            for box, part in get_boxes(bucket, bucket.grads.local):
                self.compare_close(f"{self.named(step)} gradient of {box.key}", part, step, box)
        optim = self.run.cfg.optim
        is_again = optim.spike_rewind is not None and self.begun_steps.count(step) > 1
        has_spike = step == LAST and optim.spike_sigma is not None and not is_again
        return "nan" if step == SKIPPED else "spike" if has_spike else None

    def step_end(self, step: int, loss: Tensor, norm: Tensor, ok: Tensor) -> None:
        name = self.named(step)
        self.compare_close(f"{name} loss", loss, step)
        self.compare_equal(f"{name} is good", ok, step)
        if step != SKIPPED:
            self.compare_close(f"{name} gradient norm", norm, step)
        routers = self.run.routers
        if routers.stats is not None:
            self.compare_close(f"{name} counts and losses of the routers", routers.stats, step)
        for box, part in routers.boxes():
            self.compare_close(f"{name} {box.key}", part, step, box)

    def evaluation_end(self, step: int, loss: float | None, ids: list[int]) -> None:
        self.compare_metric(f"validation loss after step {step}", loss, step + 0.5)
        logits = {
            f"logits of sampled token {index} after step {step}": of_token
            for index, of_token in enumerate(self.logits_of_sample)
        }
        what = f"sampled ids after step {step}"
        if has_one_scale_for_padding(self.run.cfg):
            self.names.update((what, *logits))
        else:
            self.compare_equal(what, torch.tensor(ids), step + 0.5)
            for name, of_token in logits.items():
                self.compare_close(name, of_token, step + 0.5)
        self.logits_of_sample.clear()

    def logits_computed(self, logits: Tensor) -> None:
        """Record the logits of each sampled token; called before evaluation_end."""
        self.logits_of_sample.append(logits)

    # ---- after the run ----

    def compare_begun_steps(self) -> None:
        """Compare the started steps, on each rank after the last start: a fresh start repeats steps."""
        self.compare_equal("steps that were begun, in order", torch.tensor(self.begun_steps), LAST + 1)

    def compare_files(self) -> None:
        """Compare metrics.jsonl and the checkpoints, on one rank after the run."""
        rows = [json.loads(line) for line in (self.folder / "metrics.jsonl").read_text().splitlines()]
        steps = torch.tensor([row["step"] for row in rows])
        self.compare_equal("steps in metrics.jsonl", steps, LAST + 1)
        for row in rows:
            for key, value in row.items():
                what = f"{key} of step {row['step']} in metrics.jsonl"
                if key.endswith(MACHINE_SUFFIXES) or key in OF_MICROBATCHES:
                    continue
                if key.startswith("tasks/") and has_one_scale_for_rows(self.run.cfg):
                    self.names.add(what)
                else:
                    self.compare_metric(what, value, LAST + 1)
        self.compare_inside()
        for step in (SAVED, LAST):
            self.compare_checkpoint(self.folder / "checkpoints" / f"step_{step:08d}", step)

    def compare_inside(self) -> None:
        """Compare inside.jsonl, if there is one (log.inside_every)."""
        file = self.folder / "inside.jsonl"
        if not file.exists():
            return
        for row in map(json.loads, file.read_text().splitlines()):
            for key, value in row.items():
                layers = value if isinstance(value, list) else [value]
                for layer, number in enumerate(layers):
                    what = f"{key} of layer {layer} of step {row['step']} in inside.jsonl"
                    self.compare_metric(what, number, LAST + 1)

    def compare_metric(self, what: str, value: float | list[float] | None, step: float) -> None:
        """Compare a number, a list of numbers, or null."""
        is_null = value is None
        self.compare_equal(f"{what} is null", torch.tensor(is_null), step)
        if not is_null:
            self.compare_close(what, torch.tensor(value, dtype=torch.float64), step)

    def compare_checkpoint(self, path: Path, step: int) -> None:
        """Compare every whole tensor of a checkpoint in fp64, and the step and tokens of the run."""
        shapes = {row["key"]: row["shape"] for row in store.read_index(path)["pieces"]}
        wanted: list[tuple[Box, Tensor]] = []
        for key, shape in shapes.items():
            wanted.append((Box.whole(key, tuple(shape)), torch.zeros(shape, dtype=torch.float64)))
        store.load(path, wanted, allow_cast=True)

        for box, value in wanted:
            if box.key.endswith(ERROR_SUFFIX) or BASIS_MARK in box.key:
                continue  # PowerSGD's own state, which one process lacks
            is_square = box.key.endswith("_v")  # a mean of squared gradients
            self.compare_close(
                f"{box.key} in the checkpoint of step {step}",
                value,
                step + 0.5,
                floor=FLOOR**2 if is_square else FLOOR,
            )
        meta = store.read_meta(path)
        progress = torch.tensor([meta["step"], meta["tokens"]])
        self.compare_equal(f"step and tokens of the checkpoint of step {step}", progress, step + 0.5)


def has_one_scale_for_padding(cfg: Config) -> bool:
    """Return whether generation pads the sequence, and fp8 shares one scale between padding and text.

    The logits then depend on the padding, which one process does not have.
    """
    return cfg.train.fp8 in FP8_OF_TENSOR and cfg.parallel.sp


def has_one_scale_for_rows(cfg: Config) -> bool:
    """Return whether fp8 shares one scale between all rows of a batch. The scores of a task's answers then
    depend on which others a rank scores in the same batch.
    """
    return cfg.train.fp8 in FP8_OF_TENSOR


def get_slices(box: Box) -> tuple[slice, ...]:
    """Return the slices of the whole tensor that the box covers."""
    return tuple(slice(start, start + size) for start, size in zip(box.start, box.size))


def check_initial_weights(run: TrainingRun) -> None:
    """Raise ConfigError if two matrices start identical, since a proof could not detect a swap of the two.
    Those that start at 0 (B of adapters) differ only after a step."""
    seen: dict[tuple, str] = {}  # {(shape, sum): key}
    for bucket in run.buckets:
        zeros = [slot.param.spec for slot in bucket.slots if ROLES[slot.param.spec.role].init == "zeros"]
        of_zeros = {box.key for spec in zeros for box in spec.boxes}
        for box, part in get_boxes(bucket, bucket.weights.master):
            if part.dim() <= 1 or box.key in of_zeros:
                continue
            twin = seen.setdefault((part.shape, float(part.double().sum())), box.key)
            if twin != box.key:
                raise ConfigError(
                    f"{box.key} starts with the same weights as {twin}; "
                    "initial weights must depend on the name"
                )


@contextlib.contextmanager
def small_blocks(seq_len: int) -> Iterator[None]:
    """Use small blocks for the loss and ring attention if sequences have more than 32 tokens.

    Shapes that a laptop can prove then have several blocks. The reference run uses the usual block sizes.
    """
    usual = (cross_entropy.CHUNK_BYTES, partial_attention.TILE)
    if seq_len > 32:
        cross_entropy.CHUNK_BYTES = SMALL_CHUNK_BYTES
        partial_attention.TILE = SMALL_TILE
    try:
        yield
    finally:
        cross_entropy.CHUNK_BYTES, partial_attention.TILE = usual


# ---- one layout --------------------------------------------------------------------------------------------

def prove(
    pool: WorkerPool, cfg: Config, home: Path, *, is_strict: bool = False, on_lanes: bool = False
) -> tuple[Deviation, Deviation]:
    """Train under the layout of cfg on the ranks of the pool, and compare with one process.

    `home` is the folder for data, reference values and runs; see make_references for what is kept there.
    `is_strict` checks every started exchange and copy (parallel/wire/strict.py). `on_lanes` checks that the
    exchanges complete in NCCL's order too (parallel/wire/lanes.py).

    Returns (first, worst): `worst` is the largest deviation, `first` the largest in the first step with a
    deviation beyond BOUND, or `worst` if there is no such step.
    """
    (reference,) = make_references(pool, [cfg], home)
    check_trained(reference, has_spike=cfg.optim.spike_sigma is not None)
    try:
        begun_cfg = begun(cfg, home, "layout")
        results = pool.run(run_layout, begun_cfg, home, reference, is_strict, on_lanes)
    finally:
        for name in ("layout", "store"):
            shutil.rmtree(home / name, ignore_errors=True)

    deviations = [deviation for of_rank in results for deviation in of_rank.deviations]
    deviations += find_blocked_lanes([of_rank.exchanges for of_rank in results])
    compared = set().union(*(of_rank.names for of_rank in results))
    with safe_open(reference, "pt") as file:
        missing = [what for what in file.keys() if what not in compared]
    deviations += [Deviation(math.inf, LAST + 1, f"{what}, which no rank has") for what in missing]

    worst = max(deviations, key=lambda deviation: deviation.severity)
    wrong = [deviation for deviation in deviations if deviation.is_wrong]
    if not wrong:
        return worst, worst
    first_step = min(deviation.step for deviation in wrong)
    of_first_step = [deviation for deviation in wrong if deviation.step == first_step]
    return max(of_first_step, key=lambda deviation: deviation.severity), worst


def check_trained(reference: Path, has_spike: bool = False) -> None:
    """Raise ConfigError if one process skips a step other than SKIPPED, as some settings make it: its layouts
    would skip it too, and nothing would be proved of that step. With has_spike it must also skip LAST.
    """
    planned = [SKIPPED, LAST] if has_spike else [SKIPPED]
    with safe_open(reference, "pt") as file:
        made = file.get_tensor("steps that were begun, in order").unique().tolist()
        skipped = [step for step in made if not file.get_tensor(f"step {step} is good")]
    if skipped != planned:
        steps = ", ".join(map(str, skipped))
        wanted = " and ".join(map(str, planned))
        raise ConfigError(
            f"the proof skips step {wanted} alone, and with these settings one process skips {steps}: the "
            "others would prove nothing; choose values with which they train"
        )


class RankResult(NamedTuple):
    """What a rank has found.

    deviations: the worst of each step. names: of all compared values. exchanges: what the rank posted and
    awaited in each of its runs, if that is logged.
    """

    deviations: list[Deviation]
    names: set[str]
    exchanges: list[list[PostedExchange | Wait]]


def run_layout(
    world: World, cfg: Config, home: Path, reference: Path, is_strict: bool, on_lanes: bool
) -> RankResult:
    """Train LAST steps in the run folder of cfg on every rank, with a stop and a resume after SAVED."""
    folder = run_folder(cfg, home)
    observer = TrialObserver(folder, load_file(reference))
    exchanges: list[list[PostedExchange | Wait]] = []
    with small_blocks(cfg.train.seq_len):
        for stop_step in (SAVED, LAST):
            observer.stop_step = stop_step
            if stop_step == LAST and cfg.checkpoint.mirror is not None and world.rank == 0:
                shutil.rmtree(folder / "checkpoints")  # a new machine has none
                (folder / "metrics.jsonl").unlink()
            with strict_mode(world, is_strict), logged_lanes(world, exchanges, on_lanes):
                code = run_loop(world, cfg, folder, observer, observer.logits_computed)
            error = 0.0 if code == STOPPED_EARLY else math.inf
            observer.deviations.append(Deviation(error, stop_step, f"exit code {code}"))
    observer.compare_begun_steps()
    if world.rank == 0:
        observer.compare_files()

    worst: dict[float, Deviation] = {}
    for deviation in observer.deviations:
        known = worst.get(deviation.step, deviation)
        worst[deviation.step] = max(deviation, known, key=lambda one: one.severity)
    return RankResult(list(worst.values()), observer.names, exchanges)


def find_blocked_lanes(exchanges: list[list[list[PostedExchange | Wait]]]) -> list[Deviation]:
    """Return what would block or not match if the ranks' exchanges ran as NCCL runs them.

    exchanges: of each rank, in each run.
    """
    found: list[Deviation] = []
    for of_ranks in zip(*exchanges):
        for line in check(dict(enumerate(of_ranks)), "nccl"):
            found.append(Deviation(math.inf, 0, f"on NCCL's lanes: {line}"))
    return found


@contextlib.contextmanager
def logged_lanes(
    world: World, exchanges: list[list[PostedExchange | Wait]], on_lanes: bool
) -> Iterator[None]:
    """Append what a run inside posts and awaits to `exchanges`."""
    log = LaneLog() if on_lanes else None
    world.activity.lanes = log
    try:
        yield
    finally:
        world.activity.lanes = None
    if log is not None:
        exchanges.append(log.events)


@contextlib.contextmanager
def strict_mode(world: World, is_strict: bool) -> Iterator[None]:
    """Raise StrictError if a run inside misuses an exchange, or if one is still in flight at the end."""
    strict = StrictMode() if is_strict else None
    world.activity.strict = strict
    try:
        yield
    finally:
        world.activity.strict = None
    if strict is not None:
        strict.check_all_awaited()


def run_folder(cfg: Config, home: Path) -> Path:
    """Return the run folder of a job that tiny_config.placed put into `home`."""
    assert cfg.log.name is not None
    return home / cfg.log.name


# ---- one process -------------------------------------------------------------------------------------------

def make_references(pool: WorkerPool, cfgs: list[Config], home: Path) -> list[Path]:
    """Return the reference files of the jobs, running those that `home` does not have yet in one process.

    The ranks of the pool share the jobs to run. `home` keeps the data and the newest MAX_REFERENCES
    references of other jobs. Layouts that differ only in what one process ignores share a reference.
    """
    if not (home / "long.idx").exists():
        write_corpora(home)
    names = [name_of_reference(cfg) for cfg in cfgs]
    references = [home / f"{name}.safetensors" for name in names]
    jobs: dict[Path, tuple[Config, str]] = {}
    for cfg, name, reference in zip(cfgs, names, references):
        if not reference.exists():
            jobs[reference] = single_process(cfg), name
    if not jobs:
        return references

    others = set(home.glob("*.safetensors")) - set(references)
    by_age = sorted(others, key=lambda path: path.stat().st_mtime)
    for old in by_age[:-MAX_REFERENCES]:
        old.unlink()
        shutil.rmtree(home / f"{old.stem}-trunk", ignore_errors=True)
    pool.run(run_references, [(cfg, name, reference) for reference, (cfg, name) in jobs.items()], home)
    for _, name in jobs.values():
        shutil.rmtree(home / name)
    return references


def name_of_reference(cfg: Config) -> str:
    """Return the file name of a job's single-process reference, which equal jobs share."""
    return hashlib.sha256(repr(single_process(cfg)).encode()).hexdigest()


def begun(cfg: Config, home: Path, name: str) -> Config:
    """Return the job in `home`. If it starts from another run's checkpoint (`has_trunk`), use the one of one
    process, which was made for its reference.
    """
    run = home / f"{name_of_reference(cfg)}-trunk"
    return placed(cfg, home, name, store.checkpoint_folder(run / "checkpoints", TRUNK_STEPS))


def run_references(world: World, jobs: list[tuple[Config, str, Path]], home: Path) -> None:
    """Run this rank's share of the jobs, and save the values of each in the job's file."""
    for cfg, name, reference in jobs[world.rank::world.size]:
        if has_trunk(cfg):
            shutil.rmtree(home / f"{name}-trunk", ignore_errors=True)  # of a reference that failed
            run_trunk(placed(get_trunk(cfg), home, f"{name}-trunk"), home)
        save_file(reference_values(begun(cfg, home, name), home), reference)


def run_trunk(cfg: Config, home: Path) -> None:
    """Train TRUNK_STEPS in one process, and save."""
    folder = run_folder(cfg, home)

    def stop(point: str, step: int | None = None, **shown: Any) -> None:
        if point == "step.begin" and step == TRUNK_STEPS:
            (folder / "STOP").write_text("requeue\n")

    with rounded_rows(cfg):
        run_loop(World(), cfg, folder, stop)


def reference_values(cfg: Config, home: Path) -> dict[str, Tensor]:
    """Return {name: value} from one process that trains LAST steps of a `single_process` job."""
    observer = TrialObserver(run_folder(cfg, home), None)
    with rounded_rows(cfg):
        run_loop(World(), cfg, observer.folder, observer, observer.logits_computed)
    observer.compare_begun_steps()
    observer.compare_files()
    return observer.recorded


def single_process(cfg: Config) -> Config:
    """Return the job for one process: the whole batch in one microbatch, no parallelism, only synchronous
    saves to disk.

    See largest_micro_batch. With parallel.compress_tokens it rounds what would travel (rounded_rows). No step
    is computed twice, and the noise scale is not measured.
    """
    return replace(
        cfg,
        parallel=config.ParallelConfig(compress_tokens=cfg.parallel.compress_tokens),
        train=replace(
            cfg.train,
            micro_batch=largest_micro_batch(cfg.train),
            phases=phases_without_layout(cfg),
            rerun_every=None,
            rerun_suspects=False,
        ),
        checkpoint=replace(cfg.checkpoint, async_save=False, mirror=None, memory_every=None, replicas=0),
        log=replace(cfg.log, noise_scale=False),
    )


def largest_micro_batch(train: TrainConfig) -> int:
    """Return the whole batch in sequences, or under a ramp its first and smallest one.

    fp8 recipes whose scales depend on the microbatch keep the microbatches of the layout.
    """
    return train.micro_batch if train.fp8 in FP8_BY_MICROBATCH else config.global_batch_at(train, 0)


def phases_without_layout(cfg: Config) -> str | None:
    """Return train.phases without the keys that only divide the work; see largest_micro_batch."""
    if cfg.train.phases is None:
        return None
    rows: list[dict[str, Any]] = []
    for row, phase in zip(json.loads(cfg.train.phases), get_phases(cfg).all[1:]):
        kept = {key: value for key, value in row.items() if not key.startswith("parallel.")}
        rows.append({**kept, "train.micro_batch": largest_micro_batch(phase.cfg.train)})
    return json.dumps(rows)
