"""Hooks around the training step, one object per optional feature.

An optional feature subclasses Extra and overrides the hooks it needs: the moments of the loop. Inside the
step only a StepExtra is called. train.py calls the hooks by name, in the order of the methods below. A run
holds its features in a tuple, Extras, which forwards each hook to all of them in order. build.py builds the
tuple from the config (extras_of_step, extras_of_loop): a feature that is not configured is neither in the
tuple nor imported.

This file lives in the lowest package that uses tensors, so that optim/, checkpoint/ and runtime/ can each
define their own hooks.
"""
from collections.abc import Callable, Iterable
from functools import partial
from typing import Any, NamedTuple, Protocol

from torch import Tensor

from parallel.microbatch import Microbatch


class Gradients(NamedTuple):
    """Results of forward and backward; the summed gradients themselves are in the buckets.

    loss, norm: scalars on the device, with the loss scale divided out. targets: the number of targets that
    count in the loss over all ranks, on the device. batches: this rank's microbatches before they are
    sharded over cp.
    """
    loss: Tensor
    norm: Tensor
    targets: Tensor
    batches: list[Microbatch]


class StepResult(NamedTuple):
    """Scalars on the device.

    loss: the mean over the counted targets, 0 if there are none. is_good: bool, False if the step was
    skipped. num_targets: the counted targets over all ranks.
    """
    loss: Tensor
    grad_norm: Tensor
    is_good: Tensor
    num_targets: Tensor


class Extra:
    """Base class whose hooks do nothing. `run` is the runtime.run.TrainingRun of the current phase."""

    def on_resume(self, run: Any, step: int) -> None:
        """Called before step `step` + 1 when a phase begins: at launch, resume, or a phase boundary."""

    def before_step(self, run: Any, step: int) -> None:
        """Called first in each step."""

    def after_step(self, run: Any, step: int) -> int | None:
        """Called after the step is handed to the log, which may still hold its numbers on the device.

        Return the step the run was rewound to, or None to continue.
        """

    def evaluated(self, run: Any, step: int, *, loss: float | None, ids: list[int]) -> None:
        """Called after an evaluation. `ids` are the tokens of the generated sample."""

    def may_save(self, run: Any, step: int) -> bool:
        """Return False to skip a save that is due. The final save of a phase is never skipped."""
        return True

    def before_save(self, run: Any, step: int) -> None:
        """Called before a save to disk or memory, after the log is flushed. May raise to prevent the save."""

    def after_save(self, run: Any, step: int, saved: bool) -> bool:
        """Called after the saves to disk, if any was due. Save or compare here what those did not; return
        whether the step is saved or compared by now, which the next extra gets as `saved`."""
        return saved

    def at_end(self, run: Any) -> None:
        """Called once at the end of the run, after the final save and the summary."""

    def close(self) -> None:
        """Called when the extra is no longer used, also after an exception: for the extras of the loop when
        the loop exits, for those of the step when their phase does."""


class StepExtra(Extra):
    """An extra that is also called inside the step."""

    def before_gradients(self, run: Any, step: int, batches: list[Microbatch]) -> None:
        """Called before the forward, and again each time the step is recomputed."""

    def around_gradients(self, run: Any, step: int, compute: Callable[[], Tensor]) -> Tensor:
        """Called around forward, backward and the reduction of the gradients. Return the loss of `compute`,
        which does all of it, and may be called twice: the gradients are then those of the last call."""
        return compute()

    def gradients_ready(self, run: Any, step: int) -> None:
        """Called after the gradients are reduced, before their norm; again for each recomputation."""

    def judge(
        self, run: Any, step: int, gradients: Gradients, *, good: Tensor, again: Callable[[], Gradients]
    ) -> Tensor:
        """Return whether to apply the step, as a bool scalar on the device.

        `good` is the verdict of the extras called before this one. `again` recomputes the gradients.
        """
        return good

    def weights_updated(self, run: Any, step: int, good: Tensor) -> None:
        """Called after the optimizer, before the all-gather. `good`: whether the update was applied."""

    def pop_lines(self) -> list[str]:
        """Return new log lines about the step just computed; each line is returned once."""
        return []


class Extras(tuple[Extra, ...]):
    """The extras of a run, in call order. in_step: those that are called inside the step."""

    def __init__(self, _: Iterable[Extra] = ()) -> None:
        self.in_step = [extra for extra in self if isinstance(extra, StepExtra)]

    # ---- in the loop ---------------------------------------------------------------------------------------

    def on_resume(self, run: Any, step: int) -> None:
        for extra in self:
            extra.on_resume(run, step)

    def before_step(self, run: Any, step: int) -> None:
        for extra in self:
            extra.before_step(run, step)

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

    def after_save(self, run: Any, step: int, saved: bool) -> bool:
        for extra in self:
            saved = extra.after_save(run, step, saved)
        return saved

    def at_end(self, run: Any) -> None:
        for extra in self:
            extra.at_end(run)

    def close(self) -> None:
        for extra in self:
            extra.close()

    # ---- in the step ---------------------------------------------------------------------------------------

    def before_gradients(self, run: Any, step: int, batches: list[Microbatch]) -> None:
        for extra in self.in_step:
            extra.before_gradients(run, step, batches)

    def around_gradients(self, run: Any, step: int, compute: Callable[[], Tensor]) -> Tensor:
        for extra in self.in_step:
            compute = partial(extra.around_gradients, run, step, compute)
        return compute()

    def gradients_ready(self, run: Any, step: int) -> None:
        for extra in self.in_step:
            extra.gradients_ready(run, step)

    def judge(
        self, run: Any, step: int, gradients: Gradients, *, good: Tensor, again: Callable[[], Gradients]
    ) -> Tensor:
        for extra in self.in_step:
            good = extra.judge(run, step, gradients, good=good, again=again)
        return good

    def weights_updated(self, run: Any, step: int, good: Tensor) -> None:
        for extra in self.in_step:
            extra.weights_updated(run, step, good)

    def pop_lines(self) -> list[str]:
        return [line for extra in self.in_step for line in extra.pop_lines()]


class GradientHook(StepExtra):
    """Call look() once the gradients are reduced, to record or test a step."""

    def __init__(self, look: Callable[[], object]) -> None:
        self.look = look

    def gradients_ready(self, run: Any, step: int) -> None:
        self.look()


# ---- fault points ------------------------------------------------------------------------------------------


class FaultHook(Protocol):
    """The hook called at each named point of a run where a fault is injected (durable/faults.py) or a proof
    looks on: a FaultInjector, an observer, or no_fault."""

    def __call__(self, point: str, step: int | None = None, /, **seen: object) -> str | None:
        """Return None or the action; "nan", "spike" and "bitflip" ask the caller to corrupt its data.

        seen: named objects for observers.
        """


def no_fault(point: str, step: int | None = None, /, **seen: object) -> str | None:
    """Do nothing: the fault hook of a run without faults."""
