"""Header lines: which targets count, epochs per dataset, validation data, rates of another batch, and
shortened warmups."""
from collections.abc import Collection

from data.blend import source_names
from data.loader import BatchLoader
from optim.lr import batch_factor, get_rate_schedules, warmup_steps
from runtime.run import TrainingRun

WARMUP = "optim.warmup"


def describe_valid(data: BatchLoader, valid_data: BatchLoader) -> str:
    """Describe the datasets of data.valid and which of them are trained on."""
    trained = {dataset.index.identity for dataset in data.datasets}
    seen = [dataset.name for dataset in valid_data.datasets if dataset.index.identity in trained]
    note = f"   {' and '.join(seen)}: trained on, too, so its loss is not of unseen text" if seen else ""
    return f"{valid_data.describe_datasets()}{note}"


def describe_targets(run: TrainingRun, valid_data: BatchLoader) -> str | None:
    """Describe the share of targets that count in this phase and in the validation data, or return None if
    all count."""
    counts = run.data.count_targets(run.phase_end)
    parts = [counts.describe()] if counts else []
    validated = valid_data.sample_targets(run.cfg.eval.batches)
    if validated and not validated.targets:
        parts.append(f"none of a validation ({validated.looked_at:,} sequences looked at), which has no loss "
                     "then; raise eval.batches or train.seq_len")
    return "; ".join(parts) or None


def describe_passes(run: TrainingRun) -> str | None:
    """Describe the epochs of each dataset in a phase, or return None if none is repeated."""
    paths, epochs = zip(*run.data.passes(run.phase_end))
    if max(epochs) <= 1:
        return None
    return ", ".join(f"{count:.3g} of {name}" for name, count in zip(source_names(list(paths)), epochs))


def batch_rate_notes(run: TrainingRun, done: int) -> list[str]:
    """Return a line for each upcoming phase where optim.lr_rule changes the factor of the learning rates.

    done: completed steps.
    """
    results: list[str] = []
    before = 1.0
    for phase in run.phases.from_step(done):
        cfg, factor = phase.cfg, batch_factor(phase.cfg)
        if factor != before:
            place = "" if phase.number == 1 else f"phase {phase.number}: "
            root = "the root of " if cfg.optim.lr_rule == "sqrt" else ""
            results.append(f"{'rate':<9}{place}optim.lr {cfg.optim.lr:g} x {factor:.4g} = "
                           f"{cfg.optim.lr * factor:.4g}, by {root}train.global_batch / optim.base_batch = "
                           f"{cfg.train.global_batch}/{cfg.optim.base_batch}")
        before = factor
    return results


def warmup_notes(run: TrainingRun, stated: Collection[str], done: int) -> list[str]:
    """Return a line for each upcoming learning rate schedule whose stated warmup is too long.

    stated: keys (section.key) set on the command line or in its file; a recipe's own warmup is meant for long
    runs. done: completed steps.
    """
    results: list[str] = []
    beginning = [phase for phase in run.phases.all if phase.begins_schedule]
    for phase, schedule in zip(beginning, get_rate_schedules(run.phases, run.steps)):
        steps = schedule.end - schedule.first
        longest = warmup_steps(schedule.cfg, steps)
        is_stated = WARMUP in (stated if phase.number == 1 else phase.changes)
        if is_stated and schedule.last > done and longest < schedule.cfg.warmup:
            place = "" if phase.number == 1 else f"phase {phase.number}: "
            results.append(f"{'warmup':<9}{place}{WARMUP}: {schedule.cfg.warmup:,} steps are cut to "
                           f"{longest:,}, a tenth of the {steps:,} of the schedule")
    return results
