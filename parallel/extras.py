"""What stands beside the plain step: one object for each thing that not every run has.

Such a thing is an Extra. It overrides the methods of the moments at which it touches a step; train.py calls
them by name, in the order in which a step comes to them. A run has a tuple of them, Extras, in which each
moment goes through all in order. build.py and train.py make the tuple from the config: what the config does
not ask for is not in it, and its file is not imported.

This file is in the lowest room that knows tensors, so that optim/, checkpoint/ and runtime/ can each keep
their own.
"""
from collections.abc import Callable
from typing import Any, NamedTuple

from torch import Tensor

from parallel.microbatch import Microbatch


class Gradients(NamedTuple):
    """What forward and backward give beside the summed gradients in the buckets: scalars on the device.

    loss, norm: of the step, without the loss scale. targets: those that count in the loss, of all ranks.
    batches: the microbatches of this rank, before context parallelism shards them.
    """
    loss: Tensor
    norm: Tensor
    targets: Tensor
    batches: list[Microbatch]


class StepResult(NamedTuple):
    """Scalars on the device.

    loss: the mean over the counted targets; 0 without any. is_good: a bool; False: the step was skipped.
    num_targets: the counted targets of all ranks.
    """
    loss: Tensor
    grad_norm: Tensor
    is_good: Tensor
    num_targets: Tensor


class Extra:
    """The moments of a step, at which nothing happens. run: the runtime.run.TrainingRun of the phase."""

    # ---- in the loop, before the step ----------------------------------------------------------------------

    def on_resume(self, run: Any, step: int) -> None:
        """A phase of the run begins behind `step`: at the first start, at a resume, at a boundary."""

    def before_step(self, run: Any, step: int) -> None:
        """The step begins."""

    def before_read(self, run: Any, step: int) -> None:
        """The batches are about to be read."""

    # ---- in the step ---------------------------------------------------------------------------------------

    def before_gradients(self, run: Any, step: int, batches: list[Microbatch]) -> None:
        """The batches are read, the forward comes next. Again each time the step is computed again."""

    def gradients_ready(self, run: Any, step: int) -> None:
        """The gradients are summed over all ranks, their norm is not known yet. Again like the one before."""

    def judge(
        self, run: Any, step: int, gradients: Gradients, *, good: Tensor, again: Callable[[], Gradients]
    ) -> Tensor:
        """Return whether to apply the step, a bool scalar on the device.

        good: what those before it say. again: computes the gradients of the step once more.
        """
        return good

    def weights_updated(self, run: Any, step: int, good: Tensor) -> None:
        """The optimizer is done, and no updated weight is sent yet. good: whether the step was applied."""

    # ---- in the loop, after the step -----------------------------------------------------------------------

    def step_computed(self, run: Any, step: int, result: StepResult) -> None:
        """The step is made, and not in the log yet."""

    def take_lines(self) -> list[str]:
        """Return lines for the log about the step that was computed, each once."""
        return []

    def step_logged(self, run: Any, step: int) -> None:
        """The log has the step, as a number on the device."""

    def after_step(self, run: Any, step: int) -> int | None:
        """The step is over. Return the step that the run has gone back to, or None if it goes on."""

    def evaluated(self, run: Any, step: int, *, loss: float | None, ids: list[int]) -> None:
        """The model was validated. ids: what it wrote."""

    def may_save(self, run: Any, step: int) -> bool:
        """Return whether a save that is due may be made. The last one of a phase is made in any case."""
        return True

    def before_save(self, run: Any, step: int) -> None:
        """The run is about to be saved, on the disk or in memory; all steps were read. May raise."""

    def step_done(self, run: Any, step: int, saved: bool) -> bool:
        """The step is saved if that was due. Return whether the run is saved, or was compared otherwise."""
        return saved

    def at_end(self, run: Any) -> None:
        """The last step is made and saved; the summary is written."""

    def close(self) -> None:
        """The loop is over, by whatever it ended."""


class Extras(tuple[Extra, ...]):
    """All that a run has, in the order of the calls."""

    def on_resume(self, run: Any, step: int) -> None:
        for extra in self:
            extra.on_resume(run, step)

    def before_step(self, run: Any, step: int) -> None:
        for extra in self:
            extra.before_step(run, step)

    def before_read(self, run: Any, step: int) -> None:
        for extra in self:
            extra.before_read(run, step)

    def before_gradients(self, run: Any, step: int, batches: list[Microbatch]) -> None:
        for extra in self:
            extra.before_gradients(run, step, batches)

    def gradients_ready(self, run: Any, step: int) -> None:
        for extra in self:
            extra.gradients_ready(run, step)

    def judge(
        self, run: Any, step: int, gradients: Gradients, *, good: Tensor, again: Callable[[], Gradients]
    ) -> Tensor:
        for extra in self:
            good = extra.judge(run, step, gradients, good=good, again=again)
        return good

    def weights_updated(self, run: Any, step: int, good: Tensor) -> None:
        for extra in self:
            extra.weights_updated(run, step, good)

    def step_computed(self, run: Any, step: int, result: StepResult) -> None:
        for extra in self:
            extra.step_computed(run, step, result)

    def take_lines(self) -> list[str]:
        return [line for extra in self for line in extra.take_lines()]

    def step_logged(self, run: Any, step: int) -> None:
        for extra in self:
            extra.step_logged(run, step)

    def after_step(self, run: Any, step: int) -> int | None:
        answers = [extra.after_step(run, step) for extra in self]
        return next((back_to for back_to in answers if back_to is not None), None)

    def evaluated(self, run: Any, step: int, *, loss: float | None, ids: list[int]) -> None:
        for extra in self:
            extra.evaluated(run, step, loss=loss, ids=ids)

    def may_save(self, run: Any, step: int) -> bool:
        return all([extra.may_save(run, step) for extra in self])

    def before_save(self, run: Any, step: int) -> None:
        for extra in self:
            extra.before_save(run, step)

    def step_done(self, run: Any, step: int, saved: bool) -> bool:
        for extra in self:
            saved = extra.step_done(run, step, saved)
        return saved

    def at_end(self, run: Any) -> None:
        for extra in self:
            extra.at_end(run)

    def close(self) -> None:
        for extra in self:
            extra.close()


class GradientHook(Extra):
    """Call look() when the gradients are summed: for those that record or test a step."""

    def __init__(self, look: Callable[[], object]) -> None:
        self.look = look

    def gradients_ready(self, run: Any, step: int) -> None:
        self.look()
