"""Steps whose loss or gradient norm is far above what was usual are not applied (optim.spike_sigma).

As OLMo's SkipStepOptimizer (arXiv 2501.00656): a step is a spike if its loss or its gradient norm lies more
than spike_sigma standard deviations above the mean of the last spike_window steps that were applied. Nothing
is judged before half of the window is known.

After spike_rewind spikes in a row the run goes back, as PaLM did (arXiv 2204.02311, section 5.1): to the last
checkpoint before them, and the data of these steps is left out from then on. Which data a step reads stays a
pure function: of its number, and of the list of what was left out, which is in every later checkpoint.

Guarantees
- All ranks decide alike: a step is a spike if it is one on any rank. Loss and gradient norm are the same on
  all ranks but for their last bits, since NCCL may add in another order in another group. One all-reduce of a
  number a step, on the device; nothing waits for it.
- A step that is not finite does not enter the window.
"""
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from config import OptimConfig
from parallel.extras import Extra, Gradients
from parallel.wire import comm
from parallel.wire.comm import Group


class SpikeWindow:
    """The losses and gradient norms of the last steps that were applied, on the device.

    values: [2, window], a ring: the number n (from 0) of all applied steps is in column n % window.
    count: how many steps were applied, int64 scalar. everyone: all ranks.
    """

    def __init__(self, cfg: OptimConfig, device: torch.device, everyone: Group) -> None:
        self.everyone = everyone
        self.sigma = cfg.spike_sigma
        self.size = cfg.spike_window
        self.values = torch.zeros(2, self.size, dtype=torch.float32, device=device)
        self.count = torch.zeros((), dtype=torch.int64, device=device)
        self.columns = torch.arange(self.size, device=device)

    @torch.no_grad()
    def accept(self, loss: Tensor, norm: Tensor, is_finite: Tensor) -> Tensor:
        """Whether the step is to be applied, a bool scalar; it is in the window then. Collective.

        loss, norm, is_finite: scalars. Never waits for the device.
        """
        if self.sigma is None:
            return is_finite
        latest = torch.stack([number.detach().to(self.values) for number in (loss, norm)]).unsqueeze(1)
        known = self.columns < self.count
        number = self.count.clamp(max=self.size).to(self.values.dtype)
        mean = torch.where(known, self.values, 0.0).sum(1, keepdim=True) / number.clamp(min=1)
        squares = torch.where(known, self.values - mean, 0.0).square().sum(1, keepdim=True)
        deviation = (squares / (number - 1).clamp(min=1)).sqrt()
        is_above = (latest > mean + self.sigma * deviation).any() & (number >= max(2, self.size // 2))
        is_spike = comm.all_reduce_max(is_above.to(torch.int32), self.everyone) > 0
        is_good = is_finite & ~is_spike

        is_column = (self.columns == self.count % self.size) & is_good
        self.values = torch.where(is_column, latest, self.values)
        self.count = self.count + is_good
        return is_good

    def state(self) -> dict[str, Any]:
        """For meta.json: the values, the oldest first. Reads the device."""
        count = int(self.count)
        first = max(0, count - self.size)
        losses, norms = self.values[:, [step % self.size for step in range(first, count)]].tolist()
        return {"window": self.size, "count": count, "losses": losses, "grad_norms": norms}

    def load(self, state: dict[str, Any]) -> None:
        """Restores `state`, bit for bit; under another size of the window, its newest values."""
        newest = [values[-self.size:] for values in (state["losses"], state["grad_norms"])]
        number = len(newest[0])
        count = int(state["count"]) if state["window"] == self.size else number
        columns = [step % self.size for step in range(count - number, count)]
        self.values = torch.zeros_like(self.values)
        self.values[:, columns] = torch.tensor(newest, dtype=self.values.dtype, device=self.values.device)
        self.count = torch.full_like(self.count, count)


class SpikeState(Extra):
    """The window, and what was left out of the data: every checkpoint holds both, also of a run that judges
    no step (optim.spike_sigma).

    left_out: steps of the data (from 0) that no step of the run reads, ascending.
    in_a_row: the steps of the run (from 1) that were the last spikes, with none applied after them.
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
        """The step of the data that step number `step` (from 1) of the run reads, from 0."""
        position = step - 1
        for left_out in self.left_out:
            position += left_out <= position
        return position

    def count(self, step: int, is_spike: bool) -> None:
        """Tells whether a finite step was a spike. Steps come in order."""
        self.in_a_row = [*self.in_a_row, step] if is_spike else []

    def left_out_with_spikes(self) -> list[int]:
        """left_out, and the data that the last spikes in a row have read."""
        return sorted([*self.left_out, *(self.data_step(step) for step in self.in_a_row)])

    def continue_without(self, left_out: list[int]) -> None:
        """From now on these steps of the data are left out."""
        self.left_out = left_out
        self.in_a_row = []

    def state(self) -> dict[str, Any]:
        """For meta.json. Reads the device."""
        return {**self.window.state(), "left_out": self.left_out, "in_a_row": self.in_a_row}

    def load(self, state: dict[str, Any] | None) -> None:
        """Restores `state`; None: of a checkpoint that is older than this."""
        state = state or SpikeState(self.cfg, self.window.values.device, self.window.everyone).state()
        self.window.load(state)
        self.left_out = [int(step) for step in state["left_out"]]
        is_judging = self.cfg.spike_sigma is not None  # else no step would ever end the row
        self.in_a_row = [int(step) for step in state["in_a_row"]] if is_judging else []
