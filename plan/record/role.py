"""Record one rank of a job without running the job: the program's actual build_run and train_step.

Tensors have no storage (plan/record/launches.py), and the wire answers at once (plan/record/wire.py).
Assumptions replace values: every target counts, experts get equal shares of the tokens, and with
data.doc_mask each sequence is one document.
"""

import contextlib
import functools
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple
from unittest import mock

import torch
from torch import Tensor

from config import Config, ParallelConfig
from config.reading.schedules import get_schedule
from kernels.attention_mask import DocumentCounts
from parallel.expert import dispatch
from parallel.extras import GradientHook
from parallel.microbatch import Microbatch
from parallel.pipeline.executor import GradientAccumulation, Pipeline
from parallel.pipeline.schedule import Op, Schedule
from parallel.topology.dims import ParallelDims
from parallel.topology.mesh import Mesh
from parallel.wire.comm import Activity, Ledger
from plan.record.events import Event
from plan.record.launches import (
    META,
    Chip,
    Launch,
    Recorder,
    simulated_cpu,
    simulated_gpu,
    without_initial_weights,
)
from plan.record.memory import Change, Holder
from plan.record.splice import Splicer, Unlike, get_name
from plan.record.wire import AskingWire, RecordingWire, Said

STEP = 2  # the recorded step: the first one makes what later ones reuse
HORIZON = 1000  # steps of the run: learning-rate schedules do not affect the cost of a step


class Program(NamedTuple):
    """The program to record. build(mesh, device) -> a run, whose schedule may have few microbatches;
    step(run, number, microbatches, grads_ready): runs a step and calls grads_ready() when the gradients are
    summed."""

    build: Callable[[Mesh, torch.device], Any]
    step: Callable[[Any, int, list[Microbatch], Callable[[], None]], object]


def training_program(
    cfg: Config, build_run: Callable[..., Any], train_step: Callable[..., object]
) -> Program:
    """Return the program of a config, given build.py's build_run and train.py's train_step, which plan/ does
    not import."""

    def build(mesh: Mesh, device: torch.device) -> Any:
        run = build_run(cfg, mesh, device, None, HORIZON)
        if not cfg.train.cuda_graphs:  # graphs are captured for one number of microbatches
            short = shortest_schedule(cfg.parallel, max(run.schedules))
            run.schedules.setdefault(short.microbatches, short.with_transfers[mesh.pp.index])
        return run

    def step(run: Any, number: int, microbatches: list[Microbatch], grads_ready: Callable[[], None]) -> None:
        train_step(run.with_extras(GradientHook(grads_ready)), number, microbatches)

    return Program(build, step)


def shortest_schedule(parallel: ParallelConfig, microbatches: int) -> Schedule:
    """Return the schedule with the fewest microbatches allowed instead of `microbatches`."""
    for number in range(1, microbatches):
        try:
            return get_schedule(parallel.schedule, parallel.pp, number, parallel.vpp)
        except ValueError:  # interleaved needs a multiple of the ranks
            continue
    return get_schedule(parallel.schedule, parallel.pp, microbatches, parallel.vpp)


@dataclass(frozen=True)
class RoleRecord:
    """A step of one rank.

    state: bytes between two steps: weights, gradients, optimizer, and anything else that stays. peak: maximum
    bytes alive in the step; at_peak: what holds them; curve: over time. host: those that offloading keeps in
    host memory.
    events: exchanges in order. ledger: their calls and bytes. host_reads: callers that read a value of the
    device.
    seconds: spent recording.
    """

    rank: int
    launches: list[Launch]
    events: list[Event]
    ledger: Ledger
    state: int
    peak: int
    at_peak: Counter[Holder]
    begun_with: list[Change]
    changes: list[Change]
    host: int
    host_reads: list[tuple[str, str]]
    seconds: float


def record_role(
    cfg: Config,
    dims: ParallelDims,
    rank: int,
    chip: Chip | None,
    program: Program,
    *,
    answers: Mapping[int, object] | None = None,
    traces_all: bool = False,
) -> RoleRecord:
    """Record step STEP of rank `rank`. The code takes the paths of the chip, or of a CPU if it is None.

    `answers` come from collect_answers; None means that every rank says the same as this one. `traces_all`
    also traces microbatches that are like others (plan/record/splice.py), which gives the same record.
    """
    record = functools.partial(recorded_role, cfg, dims, rank, chip, program=program, answers=answers)
    try:
        return record(traces_all=traces_all)
    except Unlike:
        return record(traces_all=True)


def recorded_role(
    cfg: Config,
    dims: ParallelDims,
    rank: int,
    chip: Chip | None,
    *,
    program: Program,
    answers: Mapping[int, object] | None,
    traces_all: bool,
) -> RoleRecord:
    """Try record_role once. Raises Unlike."""
    recorder = Recorder()
    wire = RecordingWire(recorder.now, recorder.events, answers or {})
    mesh = Mesh.without_processes(dims, rank, Activity(wire=wire))
    claimed = simulated_cpu(recorder) if chip is None else simulated_gpu(chip, recorder)
    with claimed as device, without_initial_weights(), noted_reads(recorder):
        batches = functools.partial(assumed_batch, cfg, dims, device)
        splicer = None if traces_all else Splicer(recorder, wire, mesh.ledger)
        return record_steps(program, recorder, mesh, device, batches, splicer=splicer)


def collect_answers(
    dims: ParallelDims, ranks: Iterable[int], chip: Chip | None, program: Program
) -> dict[int, object]:
    """Return {rank: plain data that it sends to others when the run is built}, by building each of them."""
    result: dict[int, object] = {}
    for rank in ranks:
        recorder = Recorder()
        recorder.is_build = True
        mesh = Mesh.without_processes(dims, rank, Activity(wire=AskingWire(recorder.now, recorder.events)))
        claimed = simulated_cpu(recorder) if chip is None else simulated_gpu(chip, recorder)
        with claimed as device, without_initial_weights(), recorder.recording(), META:
            try:
                program.build(mesh, device)
            except Said as said:
                result[rank] = said.data
    return result


def record_steps(
    program: Program,
    recorder: Recorder,
    mesh: Mesh,
    device: torch.device,
    batches: Callable[[int], list[Microbatch]],
    splicer: Splicer | None = None,
) -> RoleRecord:
    """Build a run and record its step STEP. batches(step) returns this rank's microbatches of a step.

    The recorder may execute what it records; then this is a run of a real job, without a splicer. `splicer`
    traces few microbatches of the step, and may raise Unlike.
    """
    assert splicer is None or not recorder.executes
    began = time.perf_counter()
    recorder.is_build = True
    is_recorded_alone = not recorder.executes
    with recorder.recording(), named_ops(recorder):
        with META if is_recorded_alone else torch.device(device):
            run = program.build(mesh, device)
        recorder.is_build = False
        memory = recorder.memory
        for step in range(1, STEP + 1):
            recorder.clear()
            microbatches = batches(step)
            if step < STEP and is_recorded_alone:  # few microbatches suffice to make what later steps reuse
                microbatches = microbatches[: min(run.schedules)]
            recorder.clear()
            mesh.ledger.clear()
            state = memory.now
            memory.begin()
            few = splicer.tracing_few() if splicer is not None and step == STEP else contextlib.nullcontext()
            with few:
                program.step(run, step, microbatches, recorder.begin_optimizer)
    memory = recorder.memory
    return RoleRecord(
        mesh.rank,
        launches=recorder.launches,
        events=list(recorder.events),
        ledger=Counter(mesh.ledger),
        state=state,
        peak=memory.peak,
        at_peak=memory.holders_of_peak().copy(),
        begun_with=memory.begun_with,
        changes=list(memory.changes),
        host=recorder.host_memory.peak,
        host_reads=recorder.host_reads,
        seconds=time.perf_counter() - began,
    )


@contextlib.contextmanager
def noted_reads(recorder: Recorder) -> Iterator[None]:
    """Note when the host reads a router's counts: they are made up, without asking for a value."""
    real = dispatch.with_values

    def with_values(counts: Tensor, num_choices: int, num_experts: int) -> Tensor:
        if counts.is_meta:
            recorder.add_host_read(("parallel/expert/dispatch.py", "with_values"))
        return real(counts, num_choices, num_experts)

    with mock.patch.object(dispatch, "with_values", with_values):
        yield


@contextlib.contextmanager
def named_ops(recorder: Recorder) -> Iterator[None]:
    """Let the recorder note which op of the pipeline runs."""

    def noting(real: Callable[..., Any]) -> Callable[..., Any]:
        def run(pipeline: Pipeline, op: Op, *args: Any) -> Any:
            with recorder.op(get_name(op)):
                return real(pipeline, op, *args)

        return run

    with contextlib.ExitStack() as stack:
        for kind in (Pipeline, GradientAccumulation):
            for name in kind.OP_METHODS:
                stack.enter_context(mock.patch.object(kind, name, noting(getattr(kind, name))))
        yield


def assumed_batch(cfg: Config, dims: ParallelDims, device: torch.device, step: int) -> list[Microbatch]:
    """Return a rank's microbatches in a full step."""
    train = cfg.train
    count = train.global_batch // (dims.dp_replicate * dims.dp_shard) // train.micro_batch
    lengths = (train.seq_len,) if cfg.data.doc_mask else ()
    return [microbatch(cfg, device, step, lengths) for _ in range(count)]


def microbatch(cfg: Config, device: torch.device, step: int, lengths: Sequence[int]) -> Microbatch:
    """Return a microbatch without values, as passed from the loader to the step.

    lengths: tokens of each document in a sequence, known to the host; () without data.doc_mask.
    """
    b, s = cfg.train.micro_batch, cfg.train.seq_len
    tokens = torch.zeros(b, s, dtype=torch.int64, device=device)
    positions = torch.arange(s, device=device).expand(b, -1).contiguous()
    documents = counts = None
    if lengths:
        documents = torch.zeros(b, s, dtype=torch.int32, device=device)
        counts = DocumentCounts(b * len(lengths), max(lengths))
    return Microbatch(
        tokens,
        targets=tokens.clone(),
        positions=positions,
        documents=documents,
        sequence_ids=torch.arange(b, device=device),
        step=step,
        document_counts=counts,
        step_targets=torch.ones((), dtype=torch.int64, device=device),
    )
