"""End of a run: plots, summary.json and the closing lines."""
import contextlib
import shlex
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

from config.exit_codes import FINISHED, STOPPED_EARLY
from config.numbers import parameter_count
from plan.count import flops_per_token, parameters
from runtime import failure
from runtime.goodput import GoodputClock
from runtime.lines import skipped_seconds
from runtime.metrics import MetricsLogger
from runtime.plot import loss_png
from runtime.run import TrainingRun
from runtime.summary import summarize_metrics, write_summary

ReportExit = Callable[[int, str, bool], object]  # (exit code, reason, whether to requeue)


def report_end(step: int, reason: str | None, requeue: bool, report_exit: ReportExit) -> int:
    """Report how the loop ended, and return the exit code.

    reason: why the run stopped early, or None if it reached the horizon.
    """
    if reason is None:
        report_exit(FINISHED, "finished", False)
        return FINISHED
    wish = "requeue" if requeue else "do not requeue"
    text = f"stopped early at step {step:,}, everything is saved: {reason}; {wish}"
    report_exit(STOPPED_EARLY, text, requeue)
    return STOPPED_EARLY


def draw_pictures(run: TrainingRun, log: MetricsLogger) -> None:
    """Plot the loss, the expert load and the statistics of layers for the run folder and the sinks."""
    folder = log.run_dir
    if log.picture:
        log.picture.stop()
    size = parameter_count(parameters(run.cfg.model)["total"])
    log.send_picture("loss", loss_png(folder, size))
    if log.experts:
        log.send_picture("experts", log.experts.draw(log.name))
    if log.inside:
        from runtime.inside import inside_png

        log.send_picture("inside", inside_png(folder, log.name))


def close_run(
    run: TrainingRun,
    log: MetricsLogger,
    goodput: GoodputClock,
    *,
    reason: str | None,
    prompt_hint: str,
    list_saved: Callable[[], Sequence[tuple[int, Path]]],
) -> None:
    """Draw the plots, write summary.json and print the closing lines. Collective.

    reason: why the run stopped before its horizon, or None. prompt_hint: arguments for scripts.generate.
    list_saved: lists the checkpoints on disk, newest first.
    """
    if run.mesh.rank == 0:
        try:
            draw_pictures(run, log)
            summarize_run(run, log, goodput, reason)
            for step, path in list_saved()[:1]:
                log.send_checkpoint(step, path)
        except Exception as error:  # a failed plot must not fail a finished run
            log.log_line(f"warning: a picture or the summary was not written: {error}")
    run.extras.at_end(run)
    close_log(log, reason, prompt_hint)


def close_log(log: MetricsLogger, reason: str | None, prompt_hint: str) -> None:
    """Print the closing lines. reason: why the run stopped before its horizon, or None."""
    run_words = shlex.quote(str(log.run_dir))
    hints = [
        f"python -m scripts.generate {run_words} {prompt_hint}",
        f"python -m scripts.evaluate {run_words}",
        "python train.py --list",
    ]
    log.close(reason, code=FINISHED if reason is None else STOPPED_EARLY, hints=hints)


@contextlib.contextmanager
def summarized_failure(summarize: Callable[[str], object]) -> Iterator[None]:
    """Call summarize(reason) after a failure inside, so that it has a summary.json, too."""
    try:
        yield
    except BaseException as error:
        with contextlib.suppress(Exception):  # do not hide the failure itself
            summarize(failure.one_line(error))
        raise


def summarize_run(
    run: TrainingRun, log: MetricsLogger, goodput: GoodputClock, reason: str | None
) -> None:
    """Write summary.json on the first rank. reason: why the run stopped before its horizon, or None."""
    if run.mesh.rank != 0:
        return
    folder = log.run_dir
    log.flush()
    counts = parameters(run.cfg.model)
    summary = summarize_metrics(folder)
    write_summary(
        folder,
        name=run.cfg.log.name,
        branch=run.cfg.checkpoint.branch,
        finished=reason is None,
        reason=reason,
        parameters=counts["total"],
        active_parameters=counts["active"],
        world=run.mesh.world.size,
        flops=flops_so_far(run, summary["step"]),
        **summary,
        goodput=goodput.report(skipped_seconds(folder)).to_summary(),
        provenance=run.provenance,
    )


def flops_so_far(run: TrainingRun, steps: int) -> float:
    """Return the model FLOPs of the first `steps` steps.

    In earlier phases attention counts over whole sequences.
    """
    total = 0.0
    for phase in run.phases.all:
        last = run.phases.last_step(phase, steps)
        if last <= phase.steps_before:
            continue
        tokens = phase.tokens_seen(last) - phase.tokens_before
        is_present = phase == run.phase
        of_token = flops_per_token(phase.cfg.model, phase.cfg.train.seq_len, groups=phase.cfg.optim.groups)
        total += tokens * (trained_flops_per_token(run) if is_present else of_token)
    return total


def trained_flops_per_token(run: TrainingRun) -> float:
    """Return model FLOPs per token, forward and backward. Attention within documents costs less."""
    lengths = tuple(run.data.document_lengths) if run.cfg.data.doc_mask else ()
    return flops_per_token(run.cfg.model, run.cfg.train.seq_len, lengths, run.cfg.optim.groups)
