"""Train a language model: one step, and the loop around it.

    python train.py [NAME] [--config FILE] [--section.field VALUE ...]   NAME: a recipe; without: quickstart
    python -m scripts.launch --nproc 8 -- NAME --parallel.tp 2 --parallel.pp 2 --parallel.zero 1
    python train.py --list                                               every recipe with its size and shape
    python train.py NAME --help [SECTION | WORD | all]                   keys: type, meaning, default
    python train.py NAME --dry-run --world N                             a step of N ranks, without them

One step and the loop around it, top to bottom. Optional features are not here: each is an Extra in its own
file, called by the hooks of parallel/extras.py. build.py lists them (extras_of_step, extras_of_loop).
"""
import contextlib
import gc
import sys
import time
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

import runtime  # before torch, which reads the settings of OpenMP and glibc that it makes
from config.reading import split_argv, stated_keys
import torch
from checkpoint import branch, state
from checkpoint.disk import store
from checkpoint.run_folder import refuse_links
from config import Config, Tree, is_due, is_permanent_step
from config.exit_codes import FINISHED
from config.reading.run_name import with_own_folder
from data.validation import encode_for_phases
from durable.advice import advised_on_memory
from durable.peers import PeerWatch
from durable.spares import process_words
from model.router import mixture
from optim.clip import clip_factor, grad_norm
from optim.guard import all_finite
from parallel.context.zigzag import shard_batch
from parallel.extras import Extras, FaultHook, Gradients, StepResult
from parallel.microbatch import Microbatch
from parallel.sharding.bucket import finish_grad_reductions, start_param_gathers, wait_param_gathers
from parallel.topology.mesh import Mesh
from parallel.wire import comm
from parallel.wire.world import World, join_job
from phases import build_next_phase
from runtime import failure, setup
from runtime.closing import close_run, report_end, summarize_run, summarized_failure
from runtime.command import shows
from runtime.evaluate import Evaluation, evaluate, open_evaluation
from runtime.garbage import collected_between_steps
from runtime.goodput import GoodputClock, recorded_start
from runtime.run import TrainingRun
from services import Services, log_header, open_services
from start import (
    begin_run,
    check_same_everywhere,
    choose_config,
    end_finished_run,
    fault_hook,
    note_other_name,
    run_folder,
)
from torch import Tensor

if TYPE_CHECKING:  # a run without them loads neither
    from checkpoint.disk.lease import Lease
    from data.task_scores import EncodedTasks


# ---- one step ----------------------------------------------------------------------------------------------


def train_step(run: TrainingRun, step: int, microbatches: list[Microbatch]) -> StepResult:
    """Run optimizer step number `step` (from 1) on this rank's microbatches, without waiting for the device
    (steps that may be recomputed wait: durable/rerun.py, model/bounded_rows.py).

    The update is skipped if the step is not finite, if it is a spike, or if no target of the batch counts.
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
    if run.routers.layers:
        run.routers.update_after_step(is_good, run.scaler.scale)
    if run.scaler.dynamic:  # fp16
        run.scaler.adapt(is_finite, has_targets)
    return StepResult(gradients.loss, gradients.norm, is_good, gradients.targets)


def compute_gradients(run: TrainingRun, step: int, microbatches: list[Microbatch]) -> Gradients:
    """Run forward and backward and reduce the gradients over ranks. A step may call it more than once."""
    scale = run.scaler.scale  # 1 except in fp16
    run.extras.before_gradients(run, step, microbatches)
    local_microbatches = shard_microbatches(run, microbatches)
    num_targets = count_targets(local_microbatches, run.mesh)
    token_scale = scale / num_targets.clamp(min=1)  # sums over microbatches and ranks are then the mean
    compute = partial(forward_backward, run, local_microbatches, token_scale)
    loss = run.extras.around_gradients(run, step, compute) / scale
    run.extras.gradients_ready(run, step)
    has_experts = mixture(run.cfg.model) is not None
    norm = grad_norm(run.buckets, run.mesh, has_experts=has_experts) / scale
    return Gradients(loss, norm, num_targets, microbatches)


def shard_microbatches(run: TrainingRun, microbatches: list[Microbatch]) -> list[Microbatch]:
    """Return this rank's tokens of its sequences: [b, s] -> [b, s/cp], without communication."""
    if run.cfg.model.mtp is not None:
        depth = run.cfg.model.mtp.modules
        microbatches = [batch.with_tokens_ahead(depth) for batch in microbatches]
    if run.mesh.cp.size > 1:
        microbatches = [shard_batch(batch, run.mesh.cp) for batch in microbatches]
    return microbatches


def count_targets(microbatches: list[Microbatch], mesh: Mesh) -> Tensor:
    """Return the counted targets of the step over all ranks, an int64 scalar: one all-reduce over dp_cp.

    They are known before the first forward, so the mean loss is exact under document masks and packing. The
    loader has summed them while the last step ran, if they come from it.
    """
    if microbatches[0].step_targets is not None:
        return microbatches[0].step_targets
    num_targets = torch.stack([batch.num_counted() for batch in microbatches]).sum()
    return comm.all_reduce_sum(num_targets, mesh.dp_cp)


def forward_backward(run: TrainingRun, microbatches: list[Microbatch], token_scale: Tensor) -> Tensor:
    """Compute the gradients of the step, summed over ranks: the backward starts their reductions.

    Returns the loss times token_scale, summed over all tokens.
    """
    for bucket in run.buckets:
        bucket.grads.start_step()
    if run.routers.layers:
        run.routers.start_step()
    pipeline = run.recording or run.pipeline
    loss = pipeline.run(run.schedules[len(microbatches)], microbatches, token_scale)
    finish_grad_reductions(run.buckets, run.mesh)
    return loss


# ---- the loop ----------------------------------------------------------------------------------------------

@dataclass(frozen=True)
class Session:
    """One phase of the run (train.phases).

    run: with the extras of the loop. step_extras: those that were built with the run, and end with the phase.
    start_step: the number of steps done before the phase.
    """
    services: Services
    run: TrainingRun
    step_extras: Extras
    evaluation: Evaluation
    start_step: int

    def evaluate(self, step: int) -> None:
        log, goodput = self.services.log, self.services.goodput
        evaluate(self.evaluation, self.run, step, log=log, goodput=goodput)


class LoopEnd(NamedTuple):
    """How the loop ended.

    step: the last one done. reason: why it stopped before the end of the phase, or None. requeue: whether
    the job should be requeued.
    """
    step: int
    reason: str | None
    requeue: bool


def train_loop(session: Session) -> LoopEnd:
    """Run the steps of one phase, until its end or until a rank is asked to stop."""
    services, run = session.services, session.run
    cfg, extras = run.cfg, run.extras
    step = session.start_step
    reason, requeue = None, False
    with contextlib.closing(session.step_extras):
        while step < run.phase_end and not reason:
            step += 1
            services.world.activity.step = step
            extras.before_step(run, step)
            run_one_step(session, step)
            back_to = extras.after_step(run, step)
            if back_to is not None:
                step = back_to
                continue
            reason, requeue = agree_to_stop(session)
            run_ends = step == run.steps
            loop_ends = bool(reason) or step == run.phase_end

            # evaluate before saving, so that the last checkpoint is complete; a run that was asked to stop
            # leaves this to its next start
            is_evaluated = not reason and (run_ends or is_due(cfg.eval.every, step))
            if is_evaluated:
                session.evaluate(step)
            is_due_now = is_due(cfg.checkpoint.every, step) or is_permanent_step(cfg.checkpoint, step)
            is_saved = loop_ends or (is_due_now and extras.may_save(run, step))
            if is_saved:
                services.saving.save(run, step, is_final=loop_ends)
            extras.after_save(run, step, is_saved)
            if run_ends and not is_evaluated:  # asked to stop in the last step
                session.evaluate(step)
        wait_param_gathers(run.buckets)  # what is still in flight may not arrive in memory that is freed
    return LoopEnd(step, reason, requeue)


def run_one_step(session: Session, step: int) -> None:
    """Read, train and log one step."""
    services, run = session.services, session.run
    clock = services.world.activity.clock

    # read
    started = time.perf_counter()
    microbatches = run.data.microbatches(run.spikes.data_step(step))
    data_seconds = time.perf_counter() - started

    # train
    clock.collect()  # discard exchanges since the last step
    result = train_step(run, step, microbatches)
    for line in run.extras.pop_lines():
        services.log.log_line(line)

    # log
    skipped = services.log.log_step(
        step,
        result,
        learning_rate=run.learning_rate(step),
        data_seconds=data_seconds,
        seconds=time.perf_counter() - started,
        router_stats=run.routers.stats,
        loss_terms=run.pipeline.loss_terms,
        noise_scale_parts=run.noise_scale.latest if run.noise_scale else None,
        inside=run.inside.latest if run.inside else None,
        comm=clock.collect(),
    )
    services.guard.count_skipped(skipped)


# The vote of each rank; the largest wins.
NO_STOP, STOP_AND_REQUEUE, STOP_FOR_GOOD, SAVE_FAILED = range(4)


def agree_to_stop(session: Session) -> tuple[str | None, bool]:
    """Return (why to stop, or None; whether to requeue), the same on all ranks: one all-reduce on the host.

    All ranks stop at the same step if any of them was asked to. Raises on all ranks if background saves or
    uploads failed too often on any; after an excused failure a request to stop is honoured one step later.
    """
    stop, saving = session.services.stop, session.services.saving
    reason = stop.reason_to_stop()
    own_answer = NO_STOP
    if saving.has_failed():
        own_answer = SAVE_FAILED
    elif reason is not None:
        own_answer = STOP_AND_REQUEUE if stop.requeue else STOP_FOR_GOOD

    world = session.run.mesh.world
    answer = int(comm.all_reduce_max(torch.tensor(own_answer, dtype=torch.int32), world))
    if answer == SAVE_FAILED:
        saving.raise_failure(world)
    if answer in (SAVE_FAILED, NO_STOP):
        return None, False
    return reason or "stop requested on another rank", answer != STOP_FOR_GOOD


# ---- a run -------------------------------------------------------------------------------------------------


def train(
    cfg: Config,
    env: setup.LaunchEnv,
    world: World,
    folder: Path,
    launch: setup.LaunchInfo = setup.LaunchInfo(),
    lease: "Lease | None" = None,
    observe: FaultHook | None = None,
) -> int:
    """Train to the last step and return the exit code. Refuses before the first step what can be refused.

    lease: on the run folder. observe(point, step, **seen) replaces the fault injector at each of
    start.FAULT_POINTS; lab/proof/verify observes the loop with it.
    """
    observe = observe or fault_hook(env)
    goodput = GoodputClock(folder if env.rank == 0 else None, env.world, launch.seconds_before)
    with recorded_start(goodput):
        begun = begin_run(
            cfg, env, world, folder, observe=observe, done=launch.steps_done, stated=launch.stated
        )
        if begun.is_finished:
            why = end_finished_run(begun, env, folder)
            goodput.forget()
            launch.report_exit(FINISHED, why, False)
            return FINISHED
        start, eval_pending = begun.start, begun.eval_pending
        tasks = encode_for_phases(begun.tasks, begun.run.data.prompts, begun.run.phases_ahead)
        evaluation = open_evaluation(begun.run, begun.valid_data, tasks)
        services = open_services(begun, env, world, folder, goodput=goodput, observe=observe, lease=lease)
        session = open_session(services, begun.run, evaluation, start.step)
        with (
            services.log,
            summarized_failure(lambda reason: summarize_run(session.run, services.log, goodput, reason)),
            launch.failure_scope(),
            contextlib.closing(Extras(services.extras)),
            advised_on_memory(services.cfg, world),
        ):
            log_header(services, begun, tasks, launch.about_layout)
            del begun, evaluation  # the session owns them until its phase ends
            if start.step == 0 or eval_pending:
                session.evaluate(start.step)
            with collected_between_steps():
                end = train_loop(session)
                while end.reason is None and end.step < session.run.steps:  # the phase is over and saved
                    with contextlib.suppress(Exception):  # a summary, in case the next phase fails to begin
                        ended = f"ended as the phase after step {end.step:,} began"
                        summarize_run(session.run, services.log, goodput, ended)
                    provenance = session.run.provenance
                    session.run.data.close()
                    del session  # free its memory before the next phase allocates
                    session = begin_phase(services, end.step, start, provenance=provenance, tasks=tasks)
                    end = train_loop(session)
            session.run.data.close()
            reason = end.reason if end.step < session.run.steps else None
            hint, saved = session.evaluation.prompt.hint, services.saving.list_saved
            close_run(session.run, services.log, goodput, reason=reason, prompt_hint=hint, list_saved=saved)
        code = report_end(end.step, reason, end.requeue, launch.report_exit)
        goodput.end(code)
        return code


def open_session(services: Services, run: TrainingRun, evaluation: Evaluation, step: int) -> Session:
    """Open the phase that begins after `step`, with its extras."""
    step_extras = run.extras
    run = run.with_extras(*services.extras)
    run.extras.on_resume(run, step)
    return Session(services, run, step_extras, evaluation, step)


def begin_phase(
    services: Services, step: int, start: state.StartingPoint, *, provenance: Tree,
    tasks: "dict[int, EncodedTasks]",
) -> Session:
    """Build the phase that begins after `step`, which is saved (build_next_phase). Collective."""
    gc.collect()  # hooks and buckets form cycles
    run, valid_data = build_next_phase(services, step, start, provenance)
    return open_session(services, run, open_evaluation(run, valid_data, tasks), step)


# ---- the command -------------------------------------------------------------------------------------------

def main(argv: list[str]) -> int:
    if shows(argv, Path(__file__).parent):
        return 0
    words = argv
    name, file, argv = split_argv(words)
    rank, size = setup.rank_and_world()[:2]
    with PeerWatch(rank, size, setup.restart_count(), setup.store_secret()) as peers:
        usual = branch.resolve(name, file, argv)
        cfg = with_own_folder(usual, file, argv)
        folder = run_folder(cfg)
        stated = stated_keys(file, argv)
        cfg, env, steps_done, about_layout = choose_config(cfg, folder, peers, argv=argv, stated=stated)
        if rank == 0 and cfg.log.name != usual.log.name:
            note_other_name(usual.log.name, cfg.log.name)

        # rank 0 locks the folder: one run at a time
        with store.run_lock(folder) if rank == 0 else contextlib.nullcontext() as lease:
            if rank == 0:
                refuse_links(folder)
                setup.remove_exit_reasons(folder)
            timeout_s = cfg.parallel.timeout_s
            world = join_job(
                env.device, rank, env.world, timeout_s, store=peers.store, activity=peers.activity
            )
            peers.folder = folder
            if env.device.type == "cuda":
                peers.start_device_watch()
            check_same_everywhere(cfg, world)
            if rank == 0:
                env = replace(env, provenance=setup.start_provenance(env, words))
            launch = setup.LaunchInfo(
                stated=stated,
                steps_done=steps_done,
                about_layout=about_layout,
                seconds_before=setup.seconds_since_start(),
                failure_scope=peers.failure_scope,
                report_exit=peers.report_exit,
            )
            return train(cfg, env, world, folder, launch, lease)


if __name__ == "__main__":
    failure.exit_process(failure.fail_cleanly(main, process_words(sys.argv[1:])))
