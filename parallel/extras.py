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

    def take_lines(self) -> list[str]:
        """Return lines for the log about the step that was computed, each once."""
        return []


class Extras(tuple[Extra, ...]):
    """All that a run has, in the order of the calls."""

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

    def take_lines(self) -> list[str]:
        return [line for extra in self for line in extra.take_lines()]


class GradientHook(Extra):
    """Call look() when the gradients are summed: for those that record or test a step."""

    def __init__(self, look: Callable[[], object]) -> None:
        self.look = look

    def gradients_ready(self, run: Any, step: int) -> None:
        self.look()
