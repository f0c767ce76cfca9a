"""Skip steps whose loss or gradient norm spikes (optim.spike_sigma).

As in OLMo's SkipStepOptimizer (arXiv 2501.00656), a step is a spike if its loss or its gradient norm is more
than spike_sigma standard deviations above the mean of the last spike_window applied steps. No step is a spike
until half of the window is filled.

After spike_rewind consecutive spikes the run is rewound, as in PaLM (arXiv 2204.02311, section 5.1): it
resumes from the last checkpoint before them and skips the data of these steps. The data of a step remains a
pure function of the step number and the list of skipped data steps, which every later checkpoint stores.

Guarantees
- All ranks agree: a step is a spike if it is one on any rank. Loss and gradient norm may differ between ranks
  in the last bits, since NCCL's summation order may depend on the group. Costs one all-reduce of a number per
  step on the device, with no host sync.
- Non-finite steps do not enter the window.
"""
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from config import OptimConfig
from parallel.extras import Gradients, StepExtra
from parallel.wire import comm
from parallel.wire.comm import Group


class SpikeWindow:
    """Losses and gradient norms of the most recent applied steps, on the device.

    values: [2, window], a ring buffer with applied step n (from 0) in column n % window. count: number of
    applied steps, int64 scalar. everyone: the group of all ranks.
    """

    def __init__(self, cfg: OptimConfig, device: torch.device, everyone: Group) -> None:
        self.everyone = everyone
        self.sigma = cfg.spike_sigma
        self.size = cfg.spike_window
        self.values = torch.zeros(2, self.size, dtype=torch.float32, device=device)
        self.count = torch.zeros((), dtype=torch.int64, device=device)
        self.columns = torch.arange(self.size, device=device)

    @torch.no_grad()
    def accept(self, loss: Tensor, norm: Tensor, good: Tensor) -> Tensor:
        """Return whether to apply the step, as a bool scalar, and add it to the window if so. Collective.

        loss, norm, good: scalars. A step that is not good already stays out of the window. No host sync.
        """
        if self.sigma is None:
            return good
        latest = torch.stack([number.detach().to(self.values) for number in (loss, norm)]).unsqueeze(1)
        known = self.columns < self.count
        number = self.count.clamp(max=self.size).to(self.values.dtype)
        mean = torch.where(known, self.values, 0.0).sum(1, keepdim=True) / number.clamp(min=1)
        squares = torch.where(known, self.values - mean, 0.0).square().sum(1, keepdim=True)
        deviation = (squares / (number - 1).clamp(min=1)).sqrt()
        is_above = (latest > mean + self.sigma * deviation).any() & (number >= max(2, self.size // 2))
        is_spike = comm.all_reduce_max(is_above.to(torch.int32), self.everyone) > 0
        is_good = good & ~is_spike

        is_column = (self.columns == self.count % self.size) & is_good
        self.values = torch.where(is_column, latest, self.values)
        self.count = self.count + is_good
        return is_good

    def state(self) -> dict[str, Any]:
        """Return the window for meta.json, oldest step first. Syncs with the device."""
        count = int(self.count)
        first = max(0, count - self.size)
        losses, norms = self.values[:, [step % self.size for step in range(first, count)]].tolist()
        return {"window": self.size, "count": count, "losses": losses, "grad_norms": norms}

    def load(self, state: dict[str, Any]) -> None:
        """Restore `state` bit for bit, or its newest values if the window size has changed."""
        newest = [values[-self.size:] for values in (state["losses"], state["grad_norms"])]
        number = len(newest[0])
        count = int(state["count"]) if state["window"] == self.size else number
        columns = [step % self.size for step in range(count - number, count)]
        self.values = torch.zeros_like(self.values)
        self.values[:, columns] = torch.tensor(newest, dtype=self.values.dtype, device=self.values.device)
        self.count = torch.full_like(self.count, count)


class SpikeState(StepExtra):
    """Spike window and skipped data steps; every checkpoint stores both, even without optim.spike_sigma.

    left_out: data steps (from 0) that the run skips, ascending.
    in_a_row: the run's current streak of spikes, as step numbers (from 1).
    """

    def __init__(self, cfg: OptimConfig, device: torch.device, everyone: Group) -> None:
        self.cfg = cfg
        self.window = SpikeWindow(cfg, device, everyone)
        self.left_out: list[int] = []
        self.in_a_row: list[int] = []

    def judge(
        self, run: Any, step: int, gradients: Gradients, *, good: Tensor, again: Callable[[], Gradients]
    ) -> Tensor:
        return self.window.accept(gradients.loss, gradients.norm, good)

    def data_step(self, step: int) -> int:
        """Return the data step (from 0) that training step `step` (from 1) reads."""
        position = step - 1
        for left_out in self.left_out:
            position += left_out <= position
        return position

    def count(self, step: int, is_spike: bool) -> None:
        """Record whether a finite step was a spike. Call it in step order."""
        self.in_a_row = [*self.in_a_row, step] if is_spike else []

    def data_steps_to_skip(self) -> list[int]:
        """Return left_out plus the data steps of the current streak of spikes."""
        return sorted([*self.left_out, *(self.data_step(step) for step in self.in_a_row)])

    def skip_data_steps(self, left_out: list[int]) -> None:
        """Skip these data steps from now on, and end the streak."""
        self.left_out = left_out
        self.in_a_row = []

    def state(self) -> dict[str, Any]:
        """Return the state for meta.json. Syncs with the device."""
        return {**self.window.state(), "left_out": self.left_out, "in_a_row": self.in_a_row}

    def load(self, state: dict[str, Any] | None) -> None:
        """Restore `state`. It is None in checkpoints older than this feature; the state is then reset."""
        state = state or SpikeState(self.cfg, self.window.values.device, self.window.everyone).state()
        self.window.load(state)
        self.left_out = [int(step) for step in state["left_out"]]
        is_judging = self.cfg.spike_sigma is not None  # otherwise nothing would ever end the streak
        self.in_a_row = [int(step) for step in state["in_a_row"]] if is_judging else []
