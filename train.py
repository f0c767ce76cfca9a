"""Train a language model: one step, and the loop around it.

    python train.py [NAME] [--config FILE] [--section.field VALUE ...]   NAME: a recipe; without: quickstart
    python -m scripts.launch --nproc 8 -- NAME --parallel.tp 2 --parallel.pp 2 --parallel.zero 1
    python train.py --list                                               every recipe with its size and shape
    python train.py NAME --help [SECTION | WORD]                         every key: type, meaning, default
"""
import contextlib
import gc
import shlex
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Any, NamedTuple

import runtime  # before torch (see there)
import config
import torch
from build import TrainingRun, build_run, check_size, total_steps, with_vocab
from checkpoint import branch, mirror, state, store
from checkpoint.hf_tokenizer import TOKENIZER_FILES, copy_tokenizer_files
from checkpoint.saver import CheckpointSaver
from checkpoint.together import do_nothing
from checkpoint.uploader import CheckpointUploader, open_uploader
from config import CheckpointConfig, Config, ConfigError, is_permanent_step, phases_of, unused, usage
from config.optimizers import EMA
from config.exit_codes import FINISHED, STOPPED_EARLY
from config.phases import change_text, named
from config.run_name import with_own_folder
from config.terminal import output_width, wrapped
from data.blend import parse_blend, source_names
from data.download import download_sources, local_path
from data.loader import BatchLoader, check_paths, open_loader
from data.task_files import ScoredTask, read_tasks
from data.task_scores import EncodedTasks, TaskReport, encode_tasks, score_tasks
from data.tokenizer import Tokenizer, load_tokenizer
from model.generate import generate
from model.precision import DTYPES
from model.schedules import plan_pipeline
from model.sharding import parallel_dims
from optim.clip import clip_factor, grad_norm
from parallel.context.zigzag import shard_batch
from parallel.microbatch import Microbatch
from parallel.sharding.bucket import (
    Bucket,
    finish_grad_reductions,
    start_param_gathers,
    wait_param_gathers,
)
from parallel.sharding.replicas import check_replicas
from parallel.topology.dims import GROUP_AXES
from parallel.topology.mesh import Mesh
from parallel.wire import comm
from parallel.wire.world import World, join_job
from plan.advice import memory_advice
from plan import elastic
from plan.communicators import Gpu
from plan.count import flops_per_token, parameters, table
from runtime import failure, lines, setup
from runtime import folder as run_folders
from runtime.console import parameter_count
from runtime.evaluate import loss_report, mean_loss
from runtime.faults import FaultHook
from runtime.garbage import collect_after_step, collected_between_steps
from runtime.goodput import GoodputClock
from runtime.guard import NonFiniteGuard, SpikeRewinds, SpikesPersist
from runtime.metrics import MetricsLogger
from runtime.peers import PeerWatch
from runtime.probes import probe
from runtime.processes import process_seconds
from runtime.plot import loss_png
from runtime.profile import ProfilerTrace
from runtime.slow import SlowRanks
from runtime.stop import StopRequest
from runtime.summary import summarize_metrics, write_summary
from torch import Tensor

# Skipped steps in a row that end a run. In fp16 the loss scale must first come down: a halving a step.
SKIPPED_STEPS = 5
SKIPPED_STEPS_FP16 = 20
SPIKE_FACTOR = 1e4  # of the gradients, in an injected spike


# ---- one step ----------------------------------------------------------------------------------------------


class StepResult(NamedTuple):
    """Scalars on the device.

    loss: the mean over counted tokens. is_good: a bool; False: the step was skipped.
    """
    loss: Tensor
    grad_norm: Tensor
    is_good: Tensor


def train_step(
    run: TrainingRun,
    step: int,
    microbatches: list[Microbatch],
    guard: NonFiniteGuard,
    grads_ready: Callable[[], None] = lambda: None,
) -> StepResult:
    """Optimizer step number `step` (from 1) over the microbatches of this rank. Never waits for the device.

    grads_ready: called when the gradients are summed over all ranks.
    """
    loss_scale = run.scaler.scale  # 1 but in fp16
    local_microbatches = shard_microbatches(run, microbatches)
    num_tokens = count_tokens(local_microbatches, run.mesh)
    loss = forward_backward(run, local_microbatches, loss_scale / num_tokens) / loss_scale
    finish_grad_reductions(run.buckets, run.mesh)
    grads_ready()

    norm = grad_norm(run.buckets, run.mesh, run.cfg.model.experts is not None) / loss_scale
    is_finite = guard.is_good_step(loss, norm)
    is_good = run.spikes.window.accept(loss, norm, is_finite)
    run.noise_scale.estimate(microbatches[0].num_counted(), len(microbatches), num_tokens, loss_scale)
    grad_scale = clip_factor(norm, run.cfg.optim.clip) / loss_scale
    run.optim.step(step, run.learning_rate(step), grad_scale, is_good)
    if run.ema is not None:
        run.ema.update(is_good)
    start_param_gathers(run.buckets, is_good)  # the next step waits for them
    update_scaler_and_routers(run, is_finite, is_good, loss_scale)
    return StepResult(loss, norm, is_good)


def shard_microbatches(run: TrainingRun, microbatches: list[Microbatch]) -> list[Microbatch]:
    """This rank's tokens of its sequences: [b, s] -> [b, s/cp]. Sends nothing."""
    depth = run.cfg.model.mtp
    return [shard_batch(batch.with_tokens_ahead(depth), run.mesh.cp) for batch in microbatches]


def count_tokens(microbatches: list[Microbatch], mesh: Mesh) -> Tensor:
    """The counted tokens of the step over all ranks, int64 scalar. One all-reduce of a number over dp_cp.

    Counted before the first forward, so that the mean is exact under document masks and packing. At least 1:
    a step in which no token counts has the loss 0 and no gradient.
    """
    num_tokens = torch.stack([batch.num_counted() for batch in microbatches]).sum()
    return comm.all_reduce_sum(num_tokens, mesh.dp_cp).clamp(min=1)


def forward_backward(run: TrainingRun, microbatches: list[Microbatch], token_scale: Tensor) -> Tensor:
    """Computes the gradients of the step, and starts their sums over the ranks.

    Returns the loss, times token_scale, summed over all tokens.
    """
    for bucket in run.buckets:
        bucket.grads.start_step()
        if run.recording is not None:
            bucket.weights.drop_quantized()  # what a recording repeats begins with quantizing them
    run.routers.start_step()
    ops = run.schedules[len(microbatches)]
    pipeline = run.pipeline if run.recording is None else run.recording
    return pipeline.run(ops, microbatches, token_scale)


def update_scaler_and_routers(
    run: TrainingRun, is_finite: Tensor, is_good: Tensor, loss_scale: Tensor
) -> None:
    """Adapts the loss scale and the biases of routers to the step.

    is_finite: else it overflowed. is_good: it was applied. loss_scale: what its loss was multiplied by.
    """
    run.scaler.adapt(is_finite)
    run.routers.update_after_step(is_good, loss_scale)


# ---- the loop ----------------------------------------------------------------------------------------------

# Where faults are injected and proofs look on (runtime/faults.py).
FAULT_POINTS = (
    *store.FAULT_POINTS,
    "run.built",
    "step.begin",
    "step.load",
    "step.read",
    "step.backward",
    "step.end",
    "step.logged",
    "eval.end",
)

FailureScope = Callable[[], AbstractContextManager[object]]
ReportExit = Callable[[int, str, bool], object]  # (exit code, reason, whether another start is wanted)


OF_A_PHASE = (  # the fields of a Session that each phase makes anew
    "cfg", "run", "start_step", "train_data", "valid_data", "valid_batches", "source_batches", "prompt",
)


@dataclass(frozen=True)
class Session:
    """What the loop works with, in one phase of the run. cfg: that of the phase."""
    cfg: Config
    env: setup.LaunchEnv
    world: World
    folder: Path
    run: TrainingRun
    start_step: int  # steps that are done before the loop: 0, or those of the checkpoint or the phase before
    train_data: BatchLoader
    valid_data: BatchLoader
    valid_batches: list[Microbatch]
    source_batches: dict[str, list[Microbatch]]  # of each source of a blend
    prompt: str  # of the texts that the model writes
    tokenizer: Tokenizer
    tasks: EncodedTasks | None
    log: MetricsLogger
    trace: ProfilerTrace
    saver: CheckpointSaver
    uploads: CheckpointUploader  # to checkpoint.mirror; does nothing on ranks but the first
    stop: StopRequest
    guard: NonFiniteGuard
    slow: SlowRanks
    check_lease: Callable[[], object]  # raises if another run has taken the folder over
    goodput: GoodputClock
    observe: FaultHook

    @property
    def is_first_rank(self) -> bool:
        return self.env.rank == 0

    def kept(self) -> dict[str, Any]:
        """What outlives a phase, by the names of the fields."""
        names = [field.name for field in fields(self) if field.name not in OF_A_PHASE]
        return {name: getattr(self, name) for name in names}


class LoopEnd(NamedTuple):
    """How the loop ended.

    reason: why before the horizon; None: it did not. restart: whether another start is wanted.
    """
    step: int
    reason: str | None
    restart: bool


def train(
    cfg: Config,
    env: setup.LaunchEnv,
    world: World,
    folder: Path,
    *,
    failure_scope: FailureScope = contextlib.nullcontext,
    check_lease: Callable[[], object] = do_nothing,
    observe: FaultHook | None = None,
    report_exit: ReportExit = lambda code, reason, restart: None,
    seconds_before: float = 0.0,
) -> int:
    """Trains to the horizon; returns the exit code. Whatever can be refused is refused before the first step.

    failure_scope: a context for the loop, in which a failure is reported to the other ranks. check_lease:
    called before each step; raises if another run has taken the folder over. observe(point,
    step, **seen): called at each of FAULT_POINTS instead of the injector of faults, and may answer as it
    does; so proof/verify proves this loop. report_exit: called at the end. seconds_before: since this start
    began.
    """
    observe = observe or setup.fault_injector(env, FAULT_POINTS)
    goodput = GoodputClock(folder if env.rank == 0 else None, env.world, seconds_before)
    with recorded_start(goodput):
        return run_training(
            cfg,
            env,
            world,
            folder,
            goodput=goodput,
            failure_scope=failure_scope,
            check_lease=check_lease,
            observe=observe,
            report_exit=report_exit,
        )


@contextlib.contextmanager
def recorded_start(goodput: GoodputClock) -> Iterator[None]:
    """Records the exit code of a failure inside. Forgets a start that is refused before its first step."""
    try:
        yield
    except ConfigError:
        if goodput.record.first_step is None:
            goodput.forget()
        else:
            goodput.end(failure.USER_MISTAKE)
        raise
    except BaseException as error:
        goodput.end(failure.code_of(error))
        raise


def run_training(
    cfg: Config,
    env: setup.LaunchEnv,
    world: World,
    folder: Path,
    *,
    goodput: GoodputClock,
    failure_scope: FailureScope,
    check_lease: Callable[[], object],
    observe: FaultHook,
    report_exit: ReportExit,
) -> int:
    """train(), with the clock of this start."""
    tasks = open_tasks(cfg)

    # data, model, and the checkpoint to continue from
    everyone, timeout_s = world.all_ranks(), cfg.checkpoint.timeout_s
    restored = state.first_rank_does(lambda: mirror.prepare(cfg, folder), everyone, timeout_s)
    cfg = check_data(cfg, world)
    run, valid_data, start_step, notes = start_run(cfg, env, world, folder)
    notes = [*setup.launcher_notes(), *restored, *notes]
    observe("run.built", start_step, run=run, data=run.data, valid=valid_data)

    probe_run_folder(run, folder)
    uploads = open_uploader(cfg, folder, is_first_rank=env.rank == 0)
    is_end = start_step == run.steps
    owes_evaluation = is_evaluation_missing(cfg, start_step, folder, world.all_ranks(), is_end=is_end)
    if start_step == run.steps and not owes_evaluation:
        run.data.close()
        finish_uploads(uploads, cfg, world)
        goodput.forget()
        return report_nothing_to_do(run, env, folder, report_exit)
    notes = [*notes, *probe(run.mesh, env.device, DTYPES[cfg.train.dtype], env.host)]

    session = make_session(
        run,
        env,
        world,
        folder,
        start_step=start_step,
        valid_data=valid_data,
        tasks=tasks,
        uploads=uploads,
        check_lease=check_lease,
        goodput=goodput,
        observe=observe,
    )
    del run  # the session has it, for the length of a phase
    if session.tasks:
        notes = [*notes, f"{'tasks':<9}{session.tasks.describe()}"]
    with (
        session.log,
        summarized_failure(lambda: session),
        failure_scope(),
        contextlib.closing(session.slow),
        contextlib.closing(session.trace),
        advised_on_memory(cfg, world),
    ):
        counts = parameters(cfg.model)
        without_embedding = counts["total"] - counts["embedding"]
        session.log.header((counts["total"], without_embedding), session.train_data.describe(), notes)
        if start_step == 0 or owes_evaluation:
            evaluate(session, start_step)
        with collected_between_steps():
            end = train_loop(session)
            while end.reason is None and end.step < session.run.steps:  # a phase is over, and saved
                whole, kept = session.run.phases.whole, session.kept()
                session.train_data.close()
                del session  # its memory is free before the next phase takes its own
                session = begin_phase(whole, end.step, **kept)
                end = train_loop(session)
        session.train_data.close()
        close_run(session, end)
    code = report_end(end, session.run, report_exit)
    goodput.end(code)
    return code


def train_loop(session: Session) -> LoopEnd:
    """Runs the steps of a phase, up to the horizon after the last, or until a rank is asked to stop."""
    cfg, run = session.cfg, session.run
    end = LoopEnd(session.start_step, reason=None, restart=False)
    rewinds = SpikeRewinds(cfg.optim)
    step = session.start_step
    while step < run.last_step:
        step += 1
        session.world.activity.step = step
        session.check_lease()
        with session.goodput.in_step(step):
            session.observe("step.begin", step)
            run_one_step(session, step)
        collect_after_step(step)
        session.log.log_slow(step, *session.slow.add(session.log.take_shares()))

        show_uploads(session)
        first_spike = rewinds.find(run.spikes, session.log.take_spikes())
        if first_spike is not None:
            step = rewind(session, first_spike)
            continue
        reason, restart = agree_to_stop(session)
        end = LoopEnd(step, reason, restart)
        is_last = step == run.steps

        # evaluated before it is saved: what is saved at the horizon is complete
        is_evaluated = reason is None and (is_last or is_due(cfg.eval.every, step))
        if is_evaluated:
            evaluate(session, step)
        ends_phase = step == run.last_step
        is_in_spikes = cfg.optim.spike_rewind is not None and bool(run.spikes.in_a_row)  # it may go back
        is_saved = bool(ends_phase or reason or (is_save_due(cfg.checkpoint, step) and not is_in_spikes))
        if is_due(cfg.checkpoint.check_replicas, step) and not is_saved:  # a save compares by itself
            compare_replicas(run)
        if is_saved:
            # a run that must end for its skipped steps ends here, before it is saved
            session.guard.count_skipped(session.log.flush())
            rewinds.find(run.spikes, session.log.take_spikes())  # under spike_rewind all have been read above
            save_checkpoint(session, step, is_final=bool(ends_phase or reason))
        if is_last and not is_evaluated:
            evaluate(session, step)
        if reason:  # there may be no time left to evaluate: the next start does it
            break
    return end


def rewind(session: Session, first_spike: int) -> int:
    """Goes back to the newest good checkpoint before a step, and leaves out the data of the last spikes.

    Returns the step of that checkpoint. Raises SpikesPersist if there is none; StorageError. Collective.
    """
    run, folder = session.run, session.folder / "checkpoints"
    everyone, timeout_s = run.mesh.world, session.cfg.checkpoint.timeout_s
    with excused_failure(session):
        session.saver.wait()
    wait_param_gathers(run.buckets)
    spikes, left_out = run.spikes.in_a_row, run.spikes.left_out_with_spikes()
    session.log.log_line(
        f"{len(spikes)} spikes in a row, steps {', '.join(f'{step:,}' for step in spikes)}: going back"
    )

    # the newest good checkpoint
    def list_steps() -> list[int]:
        return [step for step, _ in store.committed_checkpoints(folder) if step < first_spike]

    step = None
    for candidate in state.first_rank_does(list_steps, everyone, timeout_s):
        try:
            state.resume_after(run, folder, candidate)
        except store.IntegrityError as error:
            session.log.log_line(f"warning: {failure.one_line(error)}")
            continue
        step = candidate
        break
    if step is None:
        raise SpikesPersist(
            f"{len(spikes)} spikes in a row from step {first_spike:,} on (optim.spike_rewind), and no good "
            "checkpoint before them to go back to; lower checkpoint.every, or raise checkpoint.keep"
        )

    # what came after it is not there any more
    run.spikes.continue_without(left_out)
    state.first_rank_does(lambda: store.drop_after(folder, step), everyone, timeout_s)
    session.log.rewind(step)
    session.goodput.rewound(step)
    session.log.log_line(
        f"back at the checkpoint of step {step:,}; steps of the data that are left out from now on, from 0: "
        f"{', '.join(f'{number:,}' for number in left_out)}"
    )
    return step


def run_one_step(session: Session, step: int) -> None:
    """Reads, trains and logs one step."""
    run = session.run
    observe = session.observe
    clock = session.world.activity.clock

    # read
    started = time.perf_counter()
    observe("step.load", step)
    microbatches = session.train_data.microbatches(run.spikes.data_step(step))
    data_seconds = time.perf_counter() - started
    observe("step.read", step, batches=microbatches)

    # train
    def grads_ready() -> None:
        disturb_grads(run.buckets, fault=observe("step.backward", step))

    clock.collect()  # drops what happened between the steps
    with session.trace.around(step):
        loss, norm, is_good = train_step(run, step, microbatches, session.guard, grads_ready=grads_ready)
    if step == session.start_step + 1 and session.is_first_rank:
        write_config(run.phases.whole, session.folder)  # it says what was trained: not before a step was
    observe("step.end", step, loss=loss, norm=norm, ok=is_good)

    # log
    skipped = session.log.log_step(
        step,
        loss=loss,
        grad_norm=norm,
        is_good=is_good,
        learning_rate=run.learning_rate(step),
        data_seconds=data_seconds,
        seconds=time.perf_counter() - started,
        router_stats=run.routers.stats,
        noise_scale_parts=run.noise_scale.latest,
        comm=clock.collect(),
    )
    session.guard.count_skipped(skipped)
    observe("step.logged", step)


def disturb_grads(buckets: list[Bucket], fault: str | None) -> None:
    """Does what an injected fault asks for: one number is NaN, or all are SPIKE_FACTOR times as large.

    bitflip: of the largest number of the first bucket, the first bit of the mantissa.
    """
    grads = buckets[0].grads.local
    if fault == "nan":
        grads[0] = float("nan")
    elif fault == "spike":
        for bucket in buckets:
            bucket.grads.local.mul_(SPIKE_FACTOR)
    elif fault == "bitflip":
        place = int(grads.abs().argmax())
        first_bit = {torch.float64: 51, torch.float32: 22, torch.bfloat16: 6, torch.float16: 9}[grads.dtype]
        words = {8: torch.int64, 4: torch.int32, 2: torch.int16}[grads.itemsize]
        grads[place:place + 1].view(words).bitwise_xor_(1 << first_bit)


def evaluate(session: Session, step: int) -> None:
    """Writes the validation loss, that of each source and of the average of the weights (train.ema), and a
    sample of text into the log."""
    with session.goodput.spending("validation"):
        log_evaluation(session, step)


def log_evaluation(session: Session, step: int) -> None:
    """evaluate(), on no clock."""
    run = session.run
    tokenizer = session.tokenizer

    def mean_loss_of(batches: list[Microbatch]) -> tuple[float, float]:
        return mean_loss(
            batches,
            summed_loss=run.pipeline.evaluate,
            text_bytes=session.valid_data.text_bytes,
            group=run.mesh.dp_cp,
        )

    loss, bytes_per_token = mean_loss_of(session.valid_batches)
    source_losses = {name: mean_loss_of(batches)[0] for name, batches in session.source_batches.items()}
    ids = sample(run, tokenizer, session.prompt)
    text = session.prompt + tokenizer.decode(ids) if ids else ""
    ema_loss = None
    if run.ema is not None:
        with run.ema.as_weights():
            ema_loss = mean_loss_of(session.valid_batches)[0]
    report = evaluate_tasks(session, step)
    session.log.log_evaluation(
        step,
        **loss_report(loss, bytes_per_token),
        ema_loss=ema_loss,
        source_losses=source_losses,
        sample=text,
        tasks=report.flat() if report else None,
        task_lines=report.lines() if report else (),
    )
    session.observe("eval.end", step, loss=loss, ids=ids)


def evaluate_tasks(session: Session, step: int) -> TaskReport | None:
    """The scores of eval.tasks; None where none are due. At the end they are."""
    every = session.cfg.eval.tasks_every or 1
    if not session.tasks or (step % every and step != session.run.steps):
        return None
    return score_tasks(session.tasks, session.run.score)


def save_checkpoint(session: Session, step: int, is_final: bool) -> None:
    """Saves a checkpoint, in the background under checkpoint.async_save. Waits for the final one.

    Raises ReplicasDiffer before anything is written if ranks that must hold the same numbers do not, and
    StorageError where the final save fails, or more in a row than checkpoint.failed_saves.
    """
    with session.goodput.spending("saving"):
        write_checkpoint(session, step, is_final)
    session.goodput.saved(step)


def write_checkpoint(session: Session, step: int, is_final: bool) -> None:
    """save_checkpoint(), on no clock."""
    session.check_lease()
    saver = session.saver
    session.train_data.check_unchanged()
    if session.is_first_rank:
        restore_run_folder(session, step)
    started = time.perf_counter()
    compare_replicas(session.run)
    with excused_failure(session):  # of the save before, in the background
        saver.wait()

    def fault_point(point: str) -> object:
        return session.observe(point, step)  # of the save, which may end at a later one

    with excused_failure(session, is_final):
        state.save_run(session.run, saver, session.folder / "checkpoints", step, fault_point=fault_point)
        if saver.in_background and not is_final:
            return
        path = saver.wait_saved()
        num_bytes = sum(file.stat().st_size for file in path.iterdir())
        session.log.log_save(path, num_bytes, time.perf_counter() - started)


@contextlib.contextmanager
def excused_failure(session: Session, is_final: bool = False) -> Iterator[None]:
    """A save that fails inside for its storage is a warning: the next one tries again. All ranks do alike.

    Raises its StorageError if it is the final one, or if more in a row failed than checkpoint.failed_saves.
    """
    try:
        yield
    except store.StorageError as error:
        failed, excused = session.saver.num_failed, session.cfg.checkpoint.failed_saves
        if is_final or failed > excused:
            raise
        session.log.log_line(
            f"warning: a checkpoint was not saved ({failed} of {excused} in a row that may fail, "
            f"checkpoint.failed_saves): {failure.one_line(error)}"
        )


def compare_replicas(run: TrainingRun) -> None:
    """Waits for the updated weights. Raises ReplicasDiffer if ranks that hold the same numbers differ, and
    ExchangesDiffer if those of a group have not run the same collectives.
    """
    wait_param_gathers(run.buckets)
    comm.check_collectives([getattr(run.mesh, name) for name in GROUP_AXES])
    routers = [(box.key, tensor) for box, tensor in run.routers.boxes()]
    check_replicas(run.buckets, state.moments_of(run), run.mesh, routers)


def restore_run_folder(session: Session, step: int) -> None:
    """Where the run folder was removed meanwhile: warns, and writes again what a checkpoint is read with."""
    folder = session.folder
    if (folder / "config.yaml").exists():
        return
    session.log.log_line(
        f"warning: {folder} was removed or emptied before step {step:,}: config.yaml and tokenizer/ are "
        "written again; metrics and checkpoints until here are lost, and so is the lock against a second run"
    )
    with store.storage_errors(folder, 0):
        keep_tokenizer(session.cfg, session.tokenizer, folder / "tokenizer")
        write_config(session.run.phases.whole, folder)
    session.log.reopen()


def close_run(session: Session, end: LoopEnd) -> None:
    """Draws the pictures, writes summary.json and prints the closing lines."""
    folder = session.folder
    log = session.log
    reason = end.reason if end.step < session.run.steps else None
    if session.is_first_rank:
        try:
            if log.picture:
                log.picture.stop()
            size = parameter_count(parameters(session.cfg.model)["total"])
            log.send_picture("loss", loss_png(folder, size))
            if log.experts:
                log.send_picture("experts", log.experts.draw(session.cfg.log.name or folder.name))
            summarize_run(session, reason)
        except Exception as error:  # a picture is not worth a finished run
            log.log_line(f"warning: a picture or the summary is missing: {error}")
    finish_uploads(session.uploads, session.cfg, session.world)
    show_uploads(session)

    run_words = shlex.quote(str(folder))
    hints = [
        f"python -m scripts.generate {run_words} --prompt {shlex.quote(session.prompt)}",
        f"python -m scripts.evaluate {run_words}",
        "python train.py --list",
    ]
    log.close(reason, code=FINISHED if reason is None else STOPPED_EARLY, hints=hints)


def show_uploads(session: Session) -> None:
    """Prints what has happened to uploads since the last call."""
    for line in session.uploads.take_lines():
        session.log.log_line(line)


def finish_uploads(uploads: CheckpointUploader, cfg: Config, world: World) -> None:
    """Waits until checkpoint.mirror has the newest checkpoint. Collective. Raises RemoteError."""
    timeout_s = cfg.checkpoint.timeout_s
    state.first_rank_does(lambda: uploads.finish(timeout_s), world.all_ranks(), 2 * timeout_s)


@contextlib.contextmanager
def summarized_failure(session: Callable[[], Session]) -> Iterator[None]:
    """Writes summary.json after a failure inside, too. session: the present one."""
    try:
        yield
    except BaseException as error:
        with contextlib.suppress(Exception):  # the failure itself is what counts
            if session().is_first_rank:
                summarize_run(session(), failure.one_line(error))
        raise


def summarize_run(session: Session, reason: str | None) -> None:
    """Writes summary.json. reason: why the run stopped before its horizon, or None."""
    log = session.log
    log.flush()
    counts = parameters(session.cfg.model)
    summary = summarize_metrics(session.folder)
    write_summary(
        session.folder,
        name=session.cfg.log.name,
        branch=session.cfg.checkpoint.branch,
        finished=reason is None,
        reason=reason,
        parameters=counts["total"],
        active_parameters=counts["active"],
        world=session.world.size,
        flops=flops_so_far(session.run, summary["step"]),
        **summary,
        goodput=session.goodput.report(lines.skipped_seconds(session.folder)).to_summary(),
    )


def report_end(end: LoopEnd, run: TrainingRun, report_exit: ReportExit) -> int:
    """Reports how the loop ended, and returns the exit code."""
    if end.step == run.steps:
        report_exit(0, "finished", False)
        return 0
    wish = "start me again" if end.restart else "for good"
    reason = f"stopped early at step {end.step:,}, everything is saved: {end.reason}; {wish}"
    report_exit(STOPPED_EARLY, reason, end.restart)
    return STOPPED_EARLY


# ---- before the loop ---------------------------------------------------------------------------------------


@contextlib.contextmanager
def advised_on_memory(cfg: Config, world: World) -> Iterator[None]:
    """Raises OutOfMemory where memory runs out inside, with what the planner says of it."""
    try:
        yield
    except (MemoryError, RuntimeError) as error:
        if not failure.is_out_of_memory(error):
            raise
        is_on_gpu = world.device.type == "cuda"
        capacity = None
        gpu = Gpu()
        if is_on_gpu:
            properties = torch.cuda.get_device_properties(world.device)
            capacity = properties.total_memory
            gpu = Gpu(properties.name.lower())
        try:
            advice = memory_advice(cfg, world.size, capacity, gpu)
        except ConfigError as refusal:  # the planner takes fewer jobs than train.py
            advice = f"the planner has no advice ({refusal})"
        cause = failure.one_line(error).partition(" Exception raised from ")[0]  # the C++ stack
        raise failure.OutOfMemory(f"out of memory: {cause}; {advice}") from error


def connect(cfg: Config, world: World) -> Mesh:
    """The groups of this rank. Collective: every rank calls it."""
    return Mesh.bind(parallel_dims(cfg, world.size), world)


def check_data(cfg: Config, world: World) -> Config:
    """The config with the vocabulary of the data. Opens that of every phase once, on rank 0, which also makes
    what is made at the first opening. Data in a store is downloaded before. Collective.

    Raises ConfigError if the data of a phase cannot be read, or has another tokenizer.
    """
    everyone, timeout_s = world.all_ranks(), cfg.checkpoint.timeout_s
    copies = state.first_rank_does(lambda: download_sources(cfg), everyone, timeout_s)
    state.all_ranks_do(lambda: download_sources(cfg, copies), everyone, timeout_s)  # a copy on each node

    def open_once() -> int:
        tokenizer = None
        for phase in phases_of(cfg).all:
            with named(phase):
                check_source_names(phase.cfg)
                data = open_loader(cfg, "train", 0, 1, phase=phase.number)
                data.close()
                tokenizer = tokenizer or data.required_tokenizer
                if data.required_tokenizer.fingerprint != tokenizer.fingerprint:
                    raise ConfigError(
                        f"data.path: {phase.cfg.data.path} was made with another tokenizer than the data of "
                        "the first phase; prepare it with the same one"
                    )
                if phase.number > 1:
                    open_loader(cfg, "valid", 0, 1, phase=phase.number).close()
        assert tokenizer is not None  # there is a phase
        return tokenizer.vocab

    return with_vocab(cfg, state.first_rank_does(open_once, everyone, timeout_s))


def check_source_names(cfg: Config) -> None:
    """Raises ConfigError if the losses of a source and of the averaged weights would have one name."""
    paths = parse_blend(cfg.data.path)[1]
    is_validated_apart = len(paths) > 1 and cfg.eval.source_batches != 0
    if is_validated_apart and cfg.train.ema is not None and EMA in source_names(paths):
        raise ConfigError(f"data.path: a source named {EMA} would share val/{EMA}/loss with train.ema")


def open_data(
    cfg: Config, mesh: Mesh, device: torch.device, phase: int = 1
) -> tuple[BatchLoader, BatchLoader]:
    """This rank's part of the train and the valid split of a phase."""
    train_data = open_loader(cfg, "train", mesh.dp.index, mesh.dp.size, device=device, phase=phase)
    valid_data = open_loader(cfg, "valid", mesh.dp.index, mesh.dp.size, device=device, phase=phase)
    return train_data, valid_data


def build_phase(
    cfg: Config, env: setup.LaunchEnv, world: World, number: int
) -> tuple[TrainingRun, BatchLoader]:
    """The run of a phase with initial weights, and its valid split. Collective."""
    setup.seed_everything(cfg)
    phase = phases_of(cfg).all[number - 1]
    steps = total_steps(cfg, flops_per_token(cfg.model, cfg.train.seq_len))
    mesh = connect(phase.cfg, world)
    train_data, valid_data = open_data(cfg, mesh, env.device, number)
    with advised_on_memory(phase.cfg, world):
        run = build_run(cfg, mesh, env.device, data=train_data, steps=steps, phase=number)
    return run, valid_data


def start_run(
    cfg: Config, env: setup.LaunchEnv, world: World, folder: Path
) -> tuple[TrainingRun, BatchLoader, int, list[str]]:
    """The run of the phase that comes next, with what it continues.

    Returns (run, its valid split, steps done, notes for the log). Collective.
    """
    root = folder / "checkpoints"
    phases = phases_of(cfg)
    everyone = world.all_ranks()

    def phase_after(step: int) -> int:
        """Where an evaluation is missing, the phase before a boundary: it has its own validation."""
        return phases.of_step(step if is_evaluation_missing(cfg, step, folder, everyone) else step + 1).number

    start = state.newest_start(cfg, root, everyone)
    step = start.step
    if start.resumed is not None and cfg.checkpoint.branch:  # its model is as large as the source says
        check_size(cfg.model, start.resumed.pieces, str(start.resumed.path))
    while True:
        number = phase_after(step) if len(phases.all) > 1 else 1
        run, valid_data = build_phase(cfg, env, world, number)
        step, notes = state.resume(run, root, start)
        start = None
        if len(phases.all) == 1 or phase_after(step) == number:
            return run, valid_data, step, notes
        run.data.close()  # the newest checkpoint is damaged, and the one before it is of an earlier phase


def begin_phase(cfg: Config, step: int, **kept: Any) -> Session:
    """The session of the phase after `step`, which is saved. Collective.

    cfg: of the whole run. kept: see Session.kept.
    """
    gc.collect()  # hooks and buckets refer to each other
    env, world, folder, log = (kept[name] for name in ("env", "world", "folder", "log"))
    phases = phases_of(cfg)
    before, phase = phases.of_step(step), phases.of_step(step + 1)
    run, valid_data = build_phase(cfg, env, world, phase.number)
    state.resume_after(run, folder / "checkpoints", step)
    kept["observe"]("run.built", step, run=run, data=run.data, valid=valid_data)
    kept["slow"].begin_phase(run.mesh.dims)
    log.begin_phase(phase, trained_flops_per_token(run), change_text(before, phase))
    return Session(
        cfg=run.cfg,
        run=run,
        start_step=step,
        train_data=run.data,
        valid_data=valid_data,
        valid_batches=read_valid_batches(run.cfg.eval.batches, valid_data, run.mesh),
        source_batches=read_source_batches(run.cfg, run.mesh, env.device),
        prompt=sample_prompt(run.cfg, valid_data),
        **kept,
    )


def trained_flops_per_token(run: TrainingRun) -> float:
    """Model FLOPs, forward and backward: attention within documents alone is cheaper."""
    lengths = tuple(run.data.document_lengths) if run.cfg.data.doc_mask else ()
    return flops_per_token(run.cfg.model, run.cfg.train.seq_len, lengths)


def flops_so_far(run: TrainingRun, steps: int) -> float:
    """Model FLOPs of the first steps of a run; of earlier phases, with attention over whole sequences."""
    total = 0.0
    for phase in run.phases.all:
        last = run.phases.last_step(phase, steps)
        if last <= phase.steps_before:
            continue
        tokens = phase.tokens_seen(last) - phase.tokens_before
        is_present = phase == run.phase
        of_token = flops_per_token(phase.cfg.model, phase.cfg.train.seq_len)
        total += tokens * (trained_flops_per_token(run) if is_present else of_token)
    return total


def make_session(
    run: TrainingRun,
    env: setup.LaunchEnv,
    world: World,
    folder: Path,
    *,
    start_step: int,
    valid_data: BatchLoader,
    tasks: list[ScoredTask],
    uploads: CheckpointUploader,
    check_lease: Callable[[], object],
    goodput: GoodputClock,
    observe: FaultHook,
) -> Session:
    """What the loop works with, beside the run. Collective under checkpoint.async_save."""
    cfg = run.cfg
    train_data = run.data
    tokenizer = train_data.required_tokenizer
    encoded = encode_tasks("eval.tasks", tasks, tokenizer, cfg.model.context) if tasks else None
    if env.rank == 0:
        keep_tokenizer(cfg, tokenizer, folder / "tokenizer")
    stop = StopRequest(folder, cfg.train.max_minutes, watches_file=env.rank == 0)
    saver_group = world.separate_group("saver") if cfg.checkpoint.async_save else None
    saver = CheckpointSaver(cfg.checkpoint.async_save, saver_group, committed=uploads.request)
    valid_batches = read_valid_batches(cfg.eval.batches, valid_data, run.mesh)

    flops = trained_flops_per_token(run)
    whole = run.phases.whole
    log = MetricsLogger(
        folder,
        whole,
        env,
        steps=run.steps,
        flops_per_token=flops,
        start_step=start_step,
        goodput=goodput,
    )

    return Session(
        cfg=cfg,
        env=env,
        world=world,
        folder=folder,
        run=run,
        start_step=start_step,
        train_data=train_data,
        valid_data=valid_data,
        valid_batches=valid_batches,
        source_batches=read_source_batches(cfg, run.mesh, env.device),
        prompt=sample_prompt(cfg, valid_data),
        tokenizer=tokenizer,
        tasks=encoded,
        log=log,
        trace=ProfilerTrace(cfg.profile.steps, folder, env.rank),
        saver=saver,
        uploads=uploads,
        stop=stop,
        guard=NonFiniteGuard(SKIPPED_STEPS_FP16 if run.scaler.dynamic else SKIPPED_STEPS),
        slow=SlowRanks(cfg.log.slow_window, run.mesh.dims, world.all_ranks(), env.host),
        check_lease=check_lease,
        goodput=goodput,
        observe=observe,
    )


def read_source_batches(cfg: Config, mesh: Mesh, device: torch.device) -> dict[str, list[Microbatch]]:
    """{name of a source: its microbatches of every evaluation}; empty where data.path is no blend."""
    paths = parse_blend(cfg.data.path)[1]
    batches = cfg.eval.batches if cfg.eval.source_batches is None else cfg.eval.source_batches
    if len(paths) == 1 or batches == 0:
        return {}
    found: dict[str, list[Microbatch]] = {}
    for name, path in zip(source_names(paths), paths):
        alone = replace(cfg, data=replace(cfg.data, path=f"1 {shlex.quote(path)}"))
        data = open_loader(alone, "valid", mesh.dp.index, mesh.dp.size, device=device)
        found[name] = read_valid_batches(batches, data, mesh)
    return found


def sample_prompt(cfg: Config, valid_data: BatchLoader) -> str:
    """eval.prompt; without it the first words of the validation data, which suit any corpus."""
    return valid_data.opening_words() if cfg.eval.prompt is None else cfg.eval.prompt


def open_tasks(cfg: Config) -> list[ScoredTask]:
    """The tasks of eval.tasks. Raises ConfigError, which names the file and the line."""
    if cfg.eval.tasks is None:
        return []
    return read_tasks("eval.tasks", cfg.eval.tasks, cfg.eval.tasks_limit)


def read_valid_batches(batches: int, valid_data: BatchLoader, mesh: Mesh) -> list[Microbatch]:
    """The microbatches of every evaluation: this rank's tokens [b, s/cp], on the device."""
    found: list[Microbatch] = []
    for index in range(batches):
        for batch in valid_data.microbatches(index):
            found.append(shard_batch(batch, mesh.cp))
    return found


def probe_run_folder(run: TrainingRun, folder: Path) -> None:
    """Finds before the first step what would else end the run at its first save. Collective.

    Raises ConfigError if a rank sees another folder than rank 0; StorageError (82) if rank 0 cannot write
    there, or a checkpoint does not fit on the disk.
    """
    everyone, timeout_s = run.mesh.world, run.cfg.checkpoint.timeout_s
    with store.storage_errors(folder, 0):
        token = state.first_rank_does(lambda: run_folders.write_token(folder), everyone, timeout_s)
    try:
        state.all_ranks_do(lambda: run_folders.check_token(folder, token), everyone, timeout_s)
    finally:
        if everyone.index == 0:
            run_folders.remove_token(folder, token)
    state.check_space(run, folder / "checkpoints")


def is_evaluation_missing(
    cfg: Config, step: int, folder: Path, everyone: comm.Group, is_end: bool = False
) -> bool:
    """Whether an evaluation was due after this step, and left out because the run was asked to stop.

    is_end: the run ends with this step. Collective.
    """
    was_due = is_end or is_due(cfg.eval.every, step)
    if step == 0 or not was_due:
        return False
    return state.first_rank_does(lambda: step not in evaluated_steps(folder), everyone)


def evaluated_steps(folder: Path) -> set[int]:
    """The steps with a validation in metrics.jsonl."""
    _, validations = lines.read_metrics(folder)
    return {row["step"] for row in validations}


def report_nothing_to_do(
    run: TrainingRun, env: setup.LaunchEnv, folder: Path, report_exit: ReportExit
) -> int:
    """Reports that the run is at its horizon already, and returns the exit code."""
    text = f"already at step {run.steps:,} of {run.steps:,}"
    if env.rank == 0:
        print(f"{folder}: {text}: the run is already finished, nothing was left to do", flush=True)
    report_exit(0, f"finished: {text}", False)
    return 0


def keep_tokenizer(cfg: Config, tokenizer: Tokenizer, folder: Path) -> None:
    """Saves the run's tokenizer, with the files that belong to it (chat template, generation settings).

    They are looked for at data.tokenizer, beside the data, and in the run whose weights are taken.
    """
    folder.mkdir(parents=True, exist_ok=True)
    tokenizer.save(folder)
    for place in tokenizer_places(cfg):
        if not place.is_dir() or not any((place / name).is_file() for name in TOKENIZER_FILES):
            continue
        with contextlib.suppress(ConfigError, OSError):
            if load_tokenizer(place).fingerprint == tokenizer.fingerprint:  # else the files belong to another
                copy_tokenizer_files(place, folder)


def tokenizer_places(cfg: Config) -> list[Path]:
    """Folders that may hold the files of the run's tokenizer."""
    named = Path(cfg.data.tokenizer or "bytes")
    places = [named.parent if named.is_file() else named]
    for path in parse_blend(cfg.data.path)[1]:
        prefix = local_path(path, cfg.data.cache).removesuffix(".bin").removesuffix(".idx")
        places.append(Path(f"{prefix}.tokenizer"))
    for source in (cfg.checkpoint.resume, cfg.checkpoint.init_from, cfg.checkpoint.branch):
        if source not in (None, "auto", "none"):
            checkpoint = mirror.local_place(source.rpartition("@")[0] or source, state.downloads_of(cfg))
            for folder in (checkpoint, *list(checkpoint.parents)[:2]):
                places.append(folder / "tokenizer")
    return places


# ---- in the loop -------------------------------------------------------------------------------------------


def write_config(cfg: Config, folder: Path) -> None:
    """Writes config.yaml: a reader sees the old file or the new one."""
    temp = folder / "config.yaml.tmp"
    temp.write_text(config.dump(cfg))
    temp.replace(folder / "config.yaml")


def is_due(every: int | None, step: int) -> bool:
    return every is not None and step % every == 0


def is_save_due(checkpoint: CheckpointConfig, step: int) -> bool:
    return is_due(checkpoint.every, step) or is_permanent_step(checkpoint, step)


# What ranks tell each other; the largest counts.
NO_STOP, STOP_AND_RESTART, STOP_FOR_GOOD, SAVE_FAILED = range(4)


def agree_to_stop(session: Session) -> tuple[str | None, bool]:
    """(why to stop, or None; whether another start is wanted): the same on all ranks.

    A rank that was asked to stop stops all ranks at this step. Raises on every rank, at the same step, what a
    background save raised on any and is not excused, and what ends the run of uploads; a wish to stop is then
    heard at the next step. One all-reduce of a number over the world, on the host.
    """
    stop, saver = session.stop, session.saver
    reason = stop.reason_to_stop()
    own_answer = NO_STOP
    if saver.has_failed() or session.uploads.has_failed():
        own_answer = SAVE_FAILED
    elif reason is not None:
        own_answer = STOP_AND_RESTART if stop.requeue else STOP_FOR_GOOD

    world = session.run.mesh.world
    answer = int(comm.all_reduce_max(torch.tensor(own_answer, dtype=torch.int32), world))
    if answer == SAVE_FAILED:
        with excused_failure(session):
            saver.wait()
        state.first_rank_does(session.uploads.check, world)
        return None, False
    if answer == NO_STOP:
        return None, False
    return reason or "another rank was told to stop", answer != STOP_FOR_GOOD


def sample(run: TrainingRun, tokenizer: Tokenizer, prompt: str) -> list[int]:
    """The ids of a text that the model writes now, after the prompt; none if eval.sample is 0."""
    options = run.cfg.eval
    model = run.cfg.model
    ids = generate(
        run.logits,
        tokenizer.encode(prompt) or [tokenizer.eod],
        options.sample,
        temperature=options.temperature,
        eod=tokenizer.eod,
        device=run.device,
        limit=model.context if model.positions == "learned" else None,
        vocab=tokenizer.vocab,
        multiple=run.pipeline.hidden_shape.sequence_shards,
    )
    return list(ids)


# ---- the command -------------------------------------------------------------------------------------------


def check_same_everywhere(cfg: Config, world: World) -> None:
    """Raises ConfigError, which names the rank, if ranks have different configs, code or versions of torch.

    They would train different models, or wait for each other. Collective: gathers a few KiB from each rank.
    """
    own = {"torch": str(torch.__version__), "code": config.code_hash(), "config": config.dump(cfg)}
    all_ranks: list[dict[str, str]] = comm.all_gather_objects(own, world.all_ranks())
    for what in own:
        count = Counter(theirs[what] for theirs in all_ranks)
        usual = max(count, key=lambda value: (count[value], value == all_ranks[0][what]))
        for rank, theirs in enumerate(all_ranks):
            if theirs[what] == usual:
                continue
            usual_lines = usual.splitlines()
            other_lines = [line.strip() for line in theirs[what].splitlines() if line not in usual_lines]
            detail = ", ".join(other_lines) or "fewer keys"
            raise ConfigError(
                f"rank {rank} was started with another {what} than the others ({detail[:200]}); "
                "start every rank with the same command, from the same checkout"
            )


def elastic_layout(cfg: Config, env: setup.LaunchEnv) -> Config:
    """The config; under parallel.elastic with a layout for the ranks that there are. Raises ConfigError."""
    if not cfg.parallel.elastic:
        return cfg
    device = elastic.RankDevice()
    if env.device.type == "cuda":
        properties = torch.cuda.get_device_properties(env.device)
        device = elastic.RankDevice(properties.name, properties.total_memory)
    layout = elastic.layout_for(cfg, env.world, device)
    note = elastic.describe(layout, env.world)
    if note and env.rank == 0:
        print("\n".join(wrapped(note, output_width())), flush=True)
    return layout.cfg


def run_folder(cfg: Config) -> Path:
    """log.dir / log.name. Raises ConfigError without a name; a recipe gives its own."""
    if cfg.log.name is None:
        raise ConfigError("log.name: none; give the run folder's name")
    return Path(cfg.log.dir) / cfg.log.name


def show_help(name: str | None, file: str | None, argv: list[str], option_index: int) -> None:
    """Prints the keys that match the word after --help, argv[option_index]; all without a word."""
    overrides = argv[:option_index]
    words = argv[option_index + 1:]
    cfg = config.resolve(name, file, overrides)
    print(usage.help_text(cfg, words[0] if words else ""))


def main(argv: list[str]) -> int:
    if "--list" in argv:
        recipes = {name: config.from_tree(config.recipe(name), name) for name in config.recipes()}
        print(table(recipes, output_width()))
        return 0
    name, file, argv = config.split_argv(argv)
    for index, word in enumerate(argv):
        if word in ("--help", "-h"):
            show_help(name, file, argv, index)
            return 0

    rank, size = setup.rank_and_world()[:2]
    with PeerWatch(rank, size, setup.restart_count(), setup.store_secret()) as peers:
        # refuse what cannot run, before anything starts
        cfg = branch.resolve(name, file, argv)
        usual_name = cfg.log.name
        cfg = with_own_folder(cfg, file, argv)
        env = setup.read_environment(cfg)
        cfg = elastic_layout(cfg, env)
        plan_pipeline(cfg, env.world)
        open_tasks(cfg)
        for phase in phases_of(cfg).all:
            with named(phase):
                check_paths(phase.cfg)
        unused_keys = unused.check_unused(cfg, env.world)
        if unused_keys and env.rank == 0:
            print("\n".join(wrapped(unused_keys, output_width())), flush=True)
        if cfg.log.name != usual_name and env.rank == 0:
            note = (f"{usual_name} is finished, with other settings: this run is {cfg.log.name} "
                    "(--log.name chooses another)")
            print("\n".join(wrapped(note, output_width())), flush=True)

        # one run at a time in the folder; rank 0 holds its lock
        folder = run_folder(cfg)
        with store.run_lock(folder) if env.rank == 0 else contextlib.nullcontext() as lease:
            if env.rank == 0:
                run_folders.refuse_links(folder)
                setup.remove_exit_reasons(folder)
            world = join_job(
                env.device,
                env.rank,
                env.world,
                cfg.parallel.timeout_s,
                store=peers.store,
                activity=peers.activity,
            )
            peers.folder = folder
            if env.device.type == "cuda":
                peers.start_device_watch()
            check_same_everywhere(cfg, world)
            return train(
                cfg,
                env,
                world,
                folder,
                failure_scope=peers.failure_scope,
                check_lease=do_nothing if lease is None else lease.check,
                report_exit=peers.report_exit,
                seconds_before=process_seconds(),
            )


if __name__ == "__main__":
    failure.exit_process(failure.fail_cleanly(main, sys.argv[1:]))
