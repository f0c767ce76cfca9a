"""Train a language model: one step, and the loop around it.

    python train.py [NAME] [--config FILE] [--section.field VALUE ...]   NAME: a recipe; without: quickstart
    python -m scripts.launch --nproc 8 -- NAME --parallel.tp 2 --parallel.pp 2 --parallel.zero 1
    python train.py --list                                               every recipe with its size and shape
    python train.py NAME --help [SECTION | WORD]                         every key: type, meaning, default
    python train.py NAME --dry-run --world N                             a step of N ranks, without them
"""
import contextlib
import gc
import os
import shlex
import sys
import time
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, fields, replace
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import runtime  # before torch (see there)
import config.reading
from config.reading import from_tree, recipe, resolve, split_argv, stated_keys
import torch
from build import TrainingRun
from checkpoint import branch, memory, mirror, state, store
from checkpoint.memory import MemoryCheckpoints
from checkpoint.progress import steps_done
from checkpoint.saver import CheckpointSaver
from checkpoint.together import do_nothing
from checkpoint.uploader import CheckpointUploader, open_uploader
from config import CheckpointConfig, Config, ConfigError, Tree, is_due, is_permanent_step, modules_ahead
from config.reading import Phase, phases_of, unused, usage
from model.rope import rope_switches
from model.router import mixture
from config.exit_codes import FINISHED, STOPPED_EARLY
from config.reading.phases import change_text, named
from config.reading.run_name import with_own_folder
from config.terminal import output_width, wrapped
from data.loader import BatchLoader, check_paths
from data.prompts import Prompts
from data.task_files import ScoredTask
from data.task_scores import EncodedTasks, TaskReport, encode_tasks, score_tasks
from data.tokenizer import Tokenizer, continuation
from model.generate import generate
from model.precision import DTYPES
from config.reading.schedules import plan_pipeline
from optim.clip import clip_factor, grad_norm
from parallel.context.zigzag import shard_batch
from parallel.extras import Gradients, StepResult
from parallel.microbatch import Microbatch
from parallel.sharding.bucket import finish_grad_reductions, start_param_gathers, wait_param_gathers
from parallel.sharding.replicas import check_replicas
from parallel.topology.dims import GROUP_AXES
from parallel.topology.mesh import Mesh
from parallel.wire import comm
from parallel.wire.world import World, join_job
from plan.count import parameters, table
from runtime import failure, lines, setup
from runtime import folder as run_folders
from runtime.console import parameter_count
from runtime.evaluate import NO_LOSS, loss_report, mean_loss
from runtime.faults import FaultHook, Faults
from runtime.garbage import collect_after_step, collected_between_steps
from runtime.goodput import GoodputClock
from runtime.guard import NonFiniteGuard, SpikeRewinds, SpikesPersist, all_finite
from runtime.metrics import MetricsLogger
from runtime.peers import PeerWatch
from runtime.probes import probe
from runtime.plot import loss_png
from runtime.profile import ProfilerTrace
from runtime.slow import SlowRanks
from runtime.stop import StopRequest
from runtime.summary import summarize_metrics, write_summary
from start import (
    SamplePrompt,
    advised_on_memory,
    auto_layout,
    build_phase,
    check_data,
    check_same_everywhere,
    describe_passes,
    describe_phase,
    describe_targets,
    describe_template,
    describe_valid,
    elastic_layout,
    flops_so_far,
    is_evaluation_missing,
    keep_provenance,
    keep_tokenizer,
    open_memory,
    open_tasks,
    probe_run_folder,
    read_source_batches,
    read_valid_batches,
    refusal_in,
    run_folder,
    sample_prompt,
    start_run,
    trained_flops_per_token,
    warmup_notes,
    write_config,
)
from torch import Tensor

# Skipped steps in a row that end a run. In fp16 the loss scale must first come down: a halving a step.
SKIPPED_STEPS = 5
SKIPPED_STEPS_FP16 = 20


# ---- one step ----------------------------------------------------------------------------------------------


def train_step(run: TrainingRun, step: int, microbatches: list[Microbatch]) -> StepResult:
    """Optimizer step number `step` (from 1) over the microbatches of this rank. Never waits for the device,
    unless it may be computed again (runtime/rerun.py).

    A step is skipped if it is not finite, if it is a spike, or if no target of its batch counts.
    """
    compute = partial(compute_gradients, run, step, microbatches)
    gradients = compute()
    is_finite = all_finite(gradients.loss, gradients.norm)
    has_targets = gradients.targets > 0
    is_good = run.extras.judge(run, step, gradients, good=is_finite & has_targets, again=compute)
    grad_scale = clip_factor(gradients.norm, run.cfg.optim.clip) / run.scaler.scale
    run.optim.step(step, run.learning_rate(step), grad_scale, is_good)
    run.extras.weights_updated(run, step, is_good)
    start_param_gathers(run.buckets, is_good)  # the next step waits for them
    run.routers.update_after_step(is_good, run.scaler.scale)
    run.scaler.adapt(is_finite, has_targets)
    return StepResult(gradients.loss, gradients.norm, is_good, gradients.targets)


def compute_gradients(run: TrainingRun, step: int, microbatches: list[Microbatch]) -> Gradients:
    """Forward and backward, and the sums of the gradients over the ranks. May be called again for a step."""
    scale = run.scaler.scale  # 1 but in fp16
    run.extras.before_gradients(run, step, microbatches)
    local_microbatches = shard_microbatches(run, microbatches)
    num_targets = count_targets(local_microbatches, run.mesh)
    loss = forward_backward(run, local_microbatches, scale / num_targets.clamp(min=1)) / scale
    finish_grad_reductions(run.buckets, run.mesh)
    run.extras.gradients_ready(run, step)
    norm = grad_norm(run.buckets, run.mesh, mixture(run.cfg.model) is not None) / scale
    return Gradients(loss, norm, num_targets, microbatches)


def shard_microbatches(run: TrainingRun, microbatches: list[Microbatch]) -> list[Microbatch]:
    """This rank's tokens of its sequences: [b, s] -> [b, s/cp]. Sends nothing."""
    depth = modules_ahead(run.cfg.model)
    return [shard_batch(batch.with_tokens_ahead(depth), run.mesh.cp) for batch in microbatches]


def count_targets(microbatches: list[Microbatch], mesh: Mesh) -> Tensor:
    """The counted targets of the step over all ranks, int64 scalar. One all-reduce of a number over dp_cp.

    Counted before the first forward, so that the mean is exact under document masks and packing.
    """
    num_targets = torch.stack([batch.num_counted() for batch in microbatches]).sum()
    return comm.all_reduce_sum(num_targets, mesh.dp_cp)


def forward_backward(run: TrainingRun, microbatches: list[Microbatch], token_scale: Tensor) -> Tensor:
    """Computes the gradients of the step, and starts their sums over the ranks.

    Returns the loss, times token_scale, summed over all tokens.
    """
    for bucket in run.buckets:
        bucket.grads.start_step()
    run.routers.start_step()
    pipeline = run.recording or run.pipeline
    return pipeline.run(run.schedules[len(microbatches)], microbatches, token_scale)


# ---- a run -------------------------------------------------------------------------------------------------

# python -m scripts.dry_run, from any folder. Its first argument: that of the code.
DRY_RUN = (
    "import runpy, sys; sys.path[0] = sys.argv.pop(1); "
    "runpy.run_module('scripts.dry_run', run_name='__main__', alter_sys=True)"
)

# Where faults are injected and proofs look on (runtime/faults.py).
FAULT_POINTS = (
    *store.FAULT_POINTS,
    "run.built",
    "step.begin",
    "step.load",
    "step.read",
    "step.compute",
    "step.backward",
    "step.end",
    "step.logged",
    "eval.end",
)

FailureScope = Callable[[], AbstractContextManager[object]]
ReportExit = Callable[[int, str, bool], object]  # (exit code, reason, whether another start is wanted)


OF_A_PHASE = (  # the fields of a Session that each phase makes again
    "cfg", "run", "start_step", "train_data", "valid_data", "valid_batches", "source_batches", "prompt",
)


@dataclass(frozen=True)
class Session:
    """All that the loop works with, in one phase of the run. cfg: that of the phase."""
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
    prompt: SamplePrompt  # of the texts that the model writes
    tokenizer: Tokenizer
    tasks: dict[int, EncodedTasks]  # of each model.context that a phase has; {}: there are none
    log: MetricsLogger
    trace: ProfilerTrace
    saver: CheckpointSaver
    uploads: CheckpointUploader  # to checkpoint.mirror; does nothing on ranks but the first
    in_memory: MemoryCheckpoints | None  # of checkpoint.memory_every
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
        """{name: value} of the fields that outlive a phase."""
        names = [field.name for field in fields(self) if field.name not in OF_A_PHASE]
        return {name: getattr(self, name) for name in names}


class LoopEnd(NamedTuple):
    """How the loop ended.

    reason: why it ended before the horizon, or None if it did not. restart: whether another start is wanted.
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
    done: int = 0,
    stated: Collection[str] = (),
    about_layout: Sequence[str] = (),
) -> int:
    """Trains to the horizon; returns the exit code. Whatever can be refused is refused before the first step.

    failure_scope: a context for the loop, in which a failure is reported to the other ranks. check_lease:
    called before each step; raises if another run has taken the folder over. observe(point,
    step, **seen): called at each of FAULT_POINTS instead of the injector of faults, and may answer as it
    does; so proof/verify proves this loop. report_exit: called at the end. seconds_before: since this start
    began. done: steps of the run, as checkpoint/progress.py finds them; nothing is asked of phases before.
    stated: the keys of the command line and its file. about_layout: lines for the header.
    """
    observe = observe or setup.fault_injector(env, (*FAULT_POINTS, *memory.FAULT_POINTS))
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
            done=done,
            stated=stated,
            about_layout=about_layout,
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
    done: int,
    stated: Collection[str],
    about_layout: Sequence[str],
) -> int:
    """train(), with the clock of this start."""
    tasks = open_tasks(cfg)

    # data, model, and the checkpoint to continue from
    everyone, timeout_s = world.all_ranks(), cfg.checkpoint.timeout_s
    restored = state.first_rank_does(lambda: mirror.prepare(cfg, folder), everyone, timeout_s)
    cfg = check_data(cfg, world, done)
    in_memory = open_memory(cfg, env, world, folder)
    run, valid_data, start, notes = start_run(cfg, env, world, folder, in_memory)
    start_step = start.step
    notes = [*setup.launcher_notes(), *restored, *notes, *warmup_notes(run, stated, start_step)]
    observe("run.built", start_step, run=run, data=run.data, valid=valid_data)

    probe_run_folder(run, folder, in_memory)
    uploads = open_uploader(cfg, folder, is_first_rank=env.rank == 0)
    is_end = start_step == run.steps
    is_of_phase = run.phase.number == run.phases.of_step(start_step).number  # else it was left out
    owes_evaluation = is_of_phase and is_evaluation_missing(
        cfg, start_step, folder, world.all_ranks(), is_end=is_end
    )
    if start_step == run.steps and not owes_evaluation:
        run.data.close()
        finish_uploads(uploads, cfg, world)
        clear_memory(in_memory)
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
        in_memory=in_memory,
        check_lease=check_lease,
        goodput=goodput,
        observe=observe,
    )
    notes = [*notes, *keep_provenance(run, env, folder)]
    del run  # the session has it, for the length of a phase
    if session.tasks:
        notes = [*notes, f"{'tasks':<9}{session.tasks[session.cfg.model.context].describe()}"]
    targets = describe_targets(session.run, session.valid_data) if session.is_first_rank else None
    if targets:
        notes = [f"{'targets':<9}{targets}", *notes]
    passes = describe_passes(session.run) if session.is_first_rank else None
    if passes:
        notes = [f"{'epochs':<9}{passes}", *notes]
    template = describe_template(cfg, session.run.data) if session.is_first_rank else None
    if template:
        notes = [f"{'template':<9}{template}", *notes]
    if cfg.data.valid is not None:
        notes = [f"{'valid':<9}{describe_valid(session.run.data, session.valid_data)}", *notes]
    notes = [*about_layout, *notes]
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
        sizes = counts["total"], without_embedding
        session.log.header(sizes, session.train_data.describe(), notes, session.run.provenance)
        if start_step == 0 or owes_evaluation:
            evaluate(session, start_step)
        with collected_between_steps():
            end = train_loop(session)
            while end.reason is None and end.step < session.run.steps:  # a phase is over, and saved
                summarize_boundary(session, end.step)
                made, kept = session.run.provenance, session.kept()
                session.train_data.close()
                del session  # its memory is free before the next phase takes its own
                session = begin_phase(cfg, end.step, start, made, **kept)
                end = train_loop(session)
        session.train_data.close()
        clear_memory(session.in_memory)
        close_run(session, end)
    code = report_end(end, session.run, report_exit)
    goodput.end(code)
    return code


# ---- in the loop -------------------------------------------------------------------------------------------


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
        is_kept = not is_saved and is_due(cfg.checkpoint.memory_every, step) and not is_in_spikes
        if is_due(cfg.checkpoint.check_replicas, step) and not (is_saved or is_kept):  # a save compares, too
            compare_replicas(run)
        if is_saved or is_kept:
            # a run that must end for its skipped steps ends here, before it is saved
            session.guard.count_skipped(session.log.flush())
            rewinds.find(run.spikes, session.log.take_spikes())  # under spike_rewind all have been read above
        if is_saved:
            save_checkpoint(session, step, is_final=bool(ends_phase or reason))
        elif is_kept:
            save_in_memory(session, step)
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
    if session.in_memory is not None:
        session.in_memory.drop_after(step)
    state.first_rank_does(lambda: store.drop_after(folder, step), everyone, timeout_s)
    with store.storage_errors(session.folder / lines.NAME, 0):
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
    clock.collect()  # drops what happened between the steps
    with session.trace.around(step):
        loss, norm, is_good, num_targets = train_step(run, step, microbatches)
    for line in run.extras.take_lines():
        session.log.log_line(line)
    if step == session.start_step + 1 and session.is_first_rank:
        write_config(run.phases.whole, session.folder)  # it says what was trained: not before a step was
    observe("step.end", step, loss=loss, norm=norm, ok=is_good)

    # log
    skipped = session.log.log_step(
        step,
        loss=loss,
        grad_norm=norm,
        is_good=is_good,
        num_targets=num_targets,
        learning_rate=run.learning_rate(step),
        data_seconds=data_seconds,
        seconds=time.perf_counter() - started,
        router_stats=run.routers.stats,
        noise_scale_parts=run.noise_scale.latest if run.noise_scale else None,
        comm=clock.collect(),
    )
    session.guard.count_skipped(skipped)
    observe("step.logged", step)


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


def evaluate(session: Session, step: int) -> None:
    """Writes the validation loss, that of each source and of the average of the weights (train.ema), and a
    sample of text into the log."""
    with session.goodput.spending("validation"):
        log_evaluation(session, step)


def log_evaluation(session: Session, step: int) -> None:
    """evaluate(), on no clock."""
    run = session.run
    tokenizer = session.tokenizer

    def mean_loss_of(batches: list[Microbatch]) -> tuple[float | None, float]:
        return mean_loss(
            batches,
            summed_loss=run.pipeline.evaluate,
            text_bytes=session.valid_data.text_bytes,
            group=run.mesh.dp_cp,
        )

    loss, bytes_per_token = mean_loss_of(session.valid_batches)
    source_losses = {name: mean_loss_of(batches)[0] for name, batches in session.source_batches.items()}
    prompt = session.prompt
    ids = sample(run, tokenizer, prompt)
    answer = continuation(tokenizer, prompt.ids, ids)
    if prompt.stop_text is not None:
        answer = answer.partition(prompt.stop_text)[0]
    text = prompt.text + answer if ids else ""
    ema_loss = None
    if run.ema is not None:
        with run.ema.as_weights():
            ema_loss = mean_loss_of(session.valid_batches)[0]
    report = evaluate_tasks(session, step)
    session.log.log_evaluation(
        step,
        **(NO_LOSS if loss is None else loss_report(loss, bytes_per_token)),
        ema_loss=ema_loss,
        source_losses=source_losses,
        sample=text,
        tasks=report.flat() if report else None,
        task_lines=report.lines() if report else (),
    )
    session.observe("eval.end", step, loss=loss, ids=ids)


def sample(run: TrainingRun, tokenizer: Tokenizer, prompt: SamplePrompt) -> list[int]:
    """The ids of a text that the model writes now, after the prompt; none if eval.sample is 0."""
    options = run.cfg.eval
    model = run.cfg.model
    ids = generate(
        run.logits,
        prompt.ids,
        options.sample,
        temperature=options.temperature,
        stops=prompt.stops,
        device=run.device,
        limit=model.context if model.positions == "learned" else None,
        vocab=tokenizer.vocab,
        multiple=run.pipeline.hidden_shape.sequence_shards,
        switches=rope_switches(model),
    )
    return list(ids)


def evaluate_tasks(session: Session, step: int) -> TaskReport | None:
    """The scores of eval.tasks; None where none are due. At the end they are."""
    every = session.cfg.eval.tasks_every or 1
    if not session.tasks or (step % every and step != session.run.steps):
        return None
    return score_tasks(session.tasks[session.cfg.model.context], session.run.score)


def is_save_due(checkpoint: CheckpointConfig, step: int) -> bool:
    return is_due(checkpoint.every, step) or is_permanent_step(checkpoint, step)


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
        session.log.log_save(path, num_bytes, time.perf_counter() - started, linked_bytes=sum(saver.linked))


def save_in_memory(session: Session, step: int) -> None:
    """Keeps the state in the memory of this node and others (checkpoint/memory.py). Where its storage fails,
    that is a warning: the disk has the older state.

    Raises ReplicasDiffer before anything is written, as save_checkpoint does.
    """
    if session.in_memory is None:
        return
    run = session.run

    def fault_point(point: str) -> object:
        return session.observe(point, step)

    with session.goodput.spending("saving"):
        session.check_lease()
        session.train_data.check_unchanged()
        compare_replicas(run)
        try:
            pieces, meta = state.boxes_of_rank(run), state.describe_run(run, step)
            session.in_memory.save(
                step, pieces, meta, saving_step=session.saver.step_in_progress(), fault_point=fault_point
            )
        except store.StorageError as error:  # on all ranks
            session.log.log_line(f"warning: step {step:,} is not kept in memory: {failure.one_line(error)}")
            return
    session.goodput.saved(step)


def clear_memory(in_memory: MemoryCheckpoints | None) -> None:
    """Gives the memory of checkpoints back, once the run is saved on the disk. Collective."""
    if in_memory is not None:
        in_memory.clear()


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
        keep_tokenizer(session.cfg, session.run.data, folder / "tokenizer")
        write_config(session.run.phases.whole, folder)
    session.log.reopen()


# ---- after the loop ----------------------------------------------------------------------------------------


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
            for step, path in store.committed_checkpoints(folder / "checkpoints")[:1]:
                log.send_checkpoint(step, path)
        except Exception as error:  # a picture is not worth a finished run
            log.log_line(f"warning: a picture or the summary is missing: {error}")
    finish_uploads(session.uploads, session.cfg, session.world)
    show_uploads(session)

    run_words = shlex.quote(str(folder))
    hints = [
        f"python -m scripts.generate {run_words} {session.prompt.hint}",
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


def summarize_boundary(session: Session, step: int) -> None:
    """Writes summary.json between two phases, when there is soon no session that could."""
    if session.is_first_rank:
        with contextlib.suppress(Exception):  # the run goes on
            summarize_run(session, f"ended as the phase after step {step:,} began")


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
        provenance=session.run.provenance,
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


# ---- what a loop begins with -------------------------------------------------------------------------------


def begin_phase(
    cfg: Config, step: int, start: state.StartingPoint, made: Tree, **kept: Any
) -> Session:
    """The session of the phase after `step`, which is saved. Collective.

    cfg: of the whole run. start: what this process has begun with. made: what makes the phase before. kept:
    see Session.kept.
    """
    gc.collect()  # hooks and buckets refer to each other
    env, world, folder, log = (kept[name] for name in ("env", "world", "folder", "log"))
    phases = phases_of(cfg)
    before, phase = phases.of_step(step), phases.of_step(step + 1)
    run, valid_data = build_phase(cfg, env, world, phase.number)
    run = describe_phase(run, valid_data, made, step)
    if step == start.step:  # it has only validated: the step may be another run's, or in memory
        state.load_start(run, folder / "checkpoints", start)
    else:
        state.resume_after(run, folder / "checkpoints", step)
    kept["observe"]("run.built", step, run=run, data=run.data, valid=valid_data)
    kept["slow"].begin_phase(run.mesh.dims)
    log.begin_phase(phase, trained_flops_per_token(run), change_text(before, phase))
    targets = describe_targets(run, valid_data) if env.rank == 0 else None
    if targets:
        log.log_line(f"targets: {targets}")
    passes = describe_passes(run) if env.rank == 0 else None
    if passes:
        log.log_line(f"epochs: {passes}")
    for warning in keep_provenance(run, env, folder):
        log.log_line(warning)
    return Session(
        cfg=run.cfg,
        run=run.with_extras(Faults(kept["observe"])),
        start_step=step,
        train_data=run.data,
        valid_data=valid_data,
        valid_batches=read_valid_batches(run.cfg.eval.batches, valid_data, run.mesh),
        source_batches=read_source_batches(run.cfg, run.mesh, env.device),
        prompt=sample_prompt(run.cfg, valid_data),
        **kept,
    )


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
    in_memory: MemoryCheckpoints | None,
    check_lease: Callable[[], object],
    goodput: GoodputClock,
    observe: FaultHook,
) -> Session:
    """The session: all that the loop works with, beside the run. Collective under checkpoint.async_save."""
    cfg = run.cfg
    train_data = run.data
    tokenizer = train_data.required_tokenizer
    encoded = encode_for_phases(tasks, train_data.prompts, run.phases.all[run.phase.number - 1:])
    valid_batches = read_valid_batches(cfg.eval.batches, valid_data, run.mesh)
    source_batches = read_source_batches(cfg, run.mesh, env.device)
    prompt = sample_prompt(cfg, valid_data)
    if env.rank == 0:  # nothing is refused any more
        keep_tokenizer(cfg, train_data, folder / "tokenizer")
    stop = StopRequest(folder, cfg.train.max_minutes, watches_file=env.rank == 0)
    saver_group = world.separate_group("saver") if cfg.checkpoint.async_save else None
    saver = CheckpointSaver(cfg.checkpoint.async_save, saver_group, committed=uploads.request)

    flops = trained_flops_per_token(run)
    whole = run.phases.whole
    with store.storage_errors(folder / lines.NAME, 0):
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
        run=run.with_extras(Faults(observe)),
        start_step=start_step,
        train_data=train_data,
        valid_data=valid_data,
        valid_batches=valid_batches,
        source_batches=source_batches,
        prompt=prompt,
        tokenizer=tokenizer,
        tasks=encoded,
        log=log,
        trace=ProfilerTrace(cfg.profile.steps, folder, env.rank),
        saver=saver,
        uploads=uploads,
        in_memory=in_memory,
        stop=stop,
        guard=NonFiniteGuard(SKIPPED_STEPS_FP16 if run.scaler.dynamic else SKIPPED_STEPS),
        slow=SlowRanks(cfg.log.slow_window, run.mesh.dims, world.all_ranks(), env.host),
        check_lease=check_lease,
        goodput=goodput,
        observe=observe,
    )


def encode_for_phases(
    tasks: list[ScoredTask], prompts: Prompts, phases: Sequence[Phase]
) -> dict[int, EncodedTasks]:
    """{model.context: the tasks with at most so many tokens}, of these phases; {} without tasks.

    Raises ConfigError for an answer that does not fit into the context of a phase.
    """
    found: dict[int, EncodedTasks] = {}
    for phase in phases if tasks else ():
        context = phase.cfg.model.context
        if context not in found:
            with named(phase):
                special = phase.cfg.eval.special
                found[context] = encode_tasks("eval.tasks", tasks, prompts, context, special)
    return found


def report_nothing_to_do(
    run: TrainingRun, env: setup.LaunchEnv, folder: Path, report_exit: ReportExit
) -> int:
    """Reports that the run is at its horizon already, and returns the exit code."""
    text = f"already at step {run.steps:,} of {run.steps:,}"
    if env.rank == 0:
        print(f"{folder}: {text}: the run is already finished, nothing was left to do", flush=True)
    report_exit(0, f"finished: {text}", False)
    return 0


# ---- the command -------------------------------------------------------------------------------------------


def show_help(name: str | None, file: str | None, argv: list[str], option_index: int) -> None:
    """Prints the keys that match the word after --help, argv[option_index]; all without a word."""
    overrides = argv[:option_index]
    words = argv[option_index + 1:]
    cfg = resolve(name, file, overrides)
    print(usage.help_text(cfg, words[0] if words else ""))


def main(argv: list[str]) -> int:
    if "--list" in argv:
        recipes = {name: from_tree(recipe(name), name) for name in config.reading.recipes()}
        print(table(recipes, output_width()))
        return 0
    if "--dry-run" in argv:  # another program: it loads Triton before the kernels
        os.execv(sys.executable, [sys.executable, "-c", DRY_RUN, str(Path(__file__).parent), *argv])
    words = argv
    name, file, argv = split_argv(words)
    for index, word in enumerate(argv):
        if word in ("--help", "-h"):
            show_help(name, file, argv, index)
            return 0

    rank, size = setup.rank_and_world()[:2]
    with PeerWatch(rank, size, setup.restart_count(), setup.store_secret()) as peers:
        cfg = branch.resolve(name, file, argv)
        stated = stated_keys(file, argv)
        usual_name = cfg.log.name
        cfg = with_own_folder(cfg, file, argv)
        folder = run_folder(cfg)

        # refuse what cannot run, before anything starts
        with refusal_in(folder, rank):
            env = setup.read_environment(cfg)
            done = 0
            if cfg.train.phases is not None:
                done = peers.told_by_first("steps_done", lambda: steps_done(cfg, folder))
            cfg, about_layout = auto_layout(cfg, env, folder, done, stated, peers.told_by_first)
            cfg = elastic_layout(cfg, env, done)
            plan_pipeline(cfg, env.world, after=done)
            open_tasks(cfg)
            for phase in phases_of(cfg).from_step(done):
                with named(phase):
                    check_paths(phase.cfg)
            notes = [unused.check_unused(cfg, env.world), unused.kept_sizes(cfg, argv)]
        if cfg.log.name != usual_name:
            notes.append(f"{usual_name} is finished, with other settings: this run is {cfg.log.name} "
                         "(--log.name chooses another)")
        for note in filter(None, notes if env.rank == 0 else []):
            print("\n".join(wrapped(note, output_width())), flush=True)

        # one run at a time in the folder; rank 0 holds its lock
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
            if env.rank == 0:
                env = replace(env, provenance=setup.start_provenance(env, words))
            return train(
                cfg,
                env,
                world,
                folder,
                failure_scope=peers.failure_scope,
                check_lease=do_nothing if lease is None else lease.check,
                report_exit=peers.report_exit,
                seconds_before=setup.seconds_since_start(),
                done=done,
                stated=stated,
                about_layout=about_layout,
            )


if __name__ == "__main__":
    failure.exit_process(failure.fail_cleanly(main, setup.words_of_process(sys.argv[1:])))
