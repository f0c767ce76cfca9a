"""State of all routers besides their weights, and its update after a step.

Across steps: biases and loads, which checkpoints store. Within a step: statistics of the expert choices,
which are summed over all ranks after the optimizer (one all-reduce per step) and reported as metrics.
"""
import torch
from torch import Tensor

from config import Config, modules_ahead
from model.router import ROUTER_STATS, Router, has_experts, mixture
from model.transformer import PipelineStage
from parallel.sharding.boxes import Box
from parallel.topology.mesh import Mesh
from parallel.wire import comm


class RouterStates:
    """Router states of this rank's stages. All ranks agree on them after update_after_step.

    stats [mixture layers, E + len(ROUTER_STATS)] covers all tokens of the last step; it is None before the
    first.
    """

    def __init__(self, cfg: Config, mesh: Mesh, stages: list[PipelineStage], device: torch.device) -> None:
        model = cfg.model
        self.model = model
        self.mesh = mesh
        all_layers = range(model.layers + modules_ahead(model))
        self.layers = [layer for layer in all_layers if has_experts(model, layer)]  # of the full model
        self.local_routers: list[Router] = []
        for stage in stages:
            self.local_routers += stage.routers()
        for router in self.local_routers:
            router.move_states_to(device)
        self.stats: Tensor | None = None

    def start_step(self) -> None:
        """Reset this rank's statistics."""
        for router in self.local_routers:
            router.stats.zero_()

    @torch.no_grad()
    def update_after_step(self, is_good: Tensor, loss_scale: Tensor) -> None:
        """Sum the statistics over all ranks after the optimizer, and rebalance each router.

        Where the bool scalar is_good is False, the step was skipped and no bias or load changes. The router
        losses contain the step's loss_scale.
        """
        if not self.layers:
            return
        num_experts = mixture(self.model).experts

        # sum the statistics of all layers in one exchange
        shape = (len(self.layers), num_experts + len(ROUTER_STATS))
        stats = torch.zeros(shape, dtype=torch.float64, device=is_good.device)
        for router in self.local_routers:
            stats[self.layers.index(router.layer)] = router.stats
        self.stats = comm.all_reduce_sum(stats, self.mesh.world)
        for name in ("aux_loss", "z_loss"):
            self.stats[:, num_experts + ROUTER_STATS.index(name)] /= loss_scale

        for router in self.local_routers:
            counts = self.stats[self.layers.index(router.layer), :num_experts]
            router.balance(counts, is_good)

    def boxes(self, each_once: bool = False, weights: bool = False) -> list[tuple[Box, Tensor]]:
        """Return [(box, tensor)] of what a checkpoint stores.

        With `each_once`, only one of the ranks that hold the same tensors returns them. With `weights`, only
        what the model's output depends on is returned.
        """
        if each_once and (self.mesh.dp_cp.index or self.mesh.tp.index):
            return []
        results: list[tuple[Box, Tensor]] = []
        for router in self.local_routers:
            for box, value in router.boxes():
                if not weights or value is router.bias:
                    results.append((box, value))
        return results
