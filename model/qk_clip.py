"""QK-clip (Kimi K2, arXiv 2507.20534, section 2.1): weights of queries and keys are scaled down after a step
in which attention scores grew too large (optim.qk_clip).

Let S be the largest score of a head in the forward of the step, over its whole batch: scaled, before the
softmax. If S exceeds tau, gamma = tau / S, else 1. After the optimizer the scores of the head are multiplied
by gamma, by way of the rows of its projections and their biases:

    grouped queries     k: sqrt(g), g the smallest gamma of the heads that read it; q: gamma / sqrt(g)
    latent attention    k and q without positions: sqrt(gamma); q with positions: gamma, since all heads share
                        the key with positions, which stays

Only masters change, and the weights in the compute dtype: neither moments nor gradients. It comes before the
gather of the weights (ZeRO) and the moving average of them (train.ema). A skipped step scales by 1.

Scores are the same under every layout, since the maximum has no order: of all microbatches and queries on a
rank, with the keys of all cp ranks, then over the ranks of a pipeline stage. Costs the products of queries
and keys once more in each step, under cp a gather of the keys of each layer, and one all-gather of a number
for each head. Masters in host memory wait for the device.
"""
from collections.abc import Callable, Iterable
from typing import Any, NamedTuple

import torch
from torch import Tensor

from config import Config, ModelConfig, head_shape, layer_model
from model.mla import LatentConfig
from model.transformer import PipelineStage
from model.watching import LargestScores
from parallel.extras import StepExtra
from parallel.sharding.boxes import Box
from parallel.sharding.bucket import Bucket
from parallel.sharding.views import get_boxes
from parallel.topology.mesh import Mesh

Factors = dict[str, Tensor]  # {projection: factor of each of its rows, of all heads}


class ClippedRows(NamedTuple):
    """Rows of a projection that this rank owns. master and local are views [box.size], and local is None
    where it is the master itself."""
    layer: int
    projection: str  # of Factors
    box: Box
    master: Tensor
    local: Tensor | None


class QKClip(StepExtra):
    """Scale the projections of heads whose largest score exceeds optim.qk_clip. Collective in every step."""

    def __init__(
        self,
        cfg: Config,
        stages: Iterable[PipelineStage],
        buckets: list[Bucket],
        mesh: Mesh,
        device: torch.device,
    ) -> None:
        assert cfg.optim.qk_clip is not None
        self.tau = cfg.optim.qk_clip
        self.model = cfg.model
        self.group = mesh.pipeline_stage
        dtype = torch.float32 if device.type == "mps" else torch.float64  # MPS has no fp64
        self.scores = LargestScores(cfg.model, stages, mesh, device, dtype)
        layers = [block.layer for block, _ in self.scores.cores]
        self.rows = clipped_rows(cfg.model, layers, buckets)

    def around_gradients(self, run: Any, step: int, compute: Callable[[], Tensor]) -> Tensor:
        self.scores.start()
        with self.scores.watching():
            return compute()

    @torch.no_grad()
    def weights_updated(self, run: Any, step: int, good: Tensor) -> None:
        scores = self.scores.over_ranks(self.group)  # [layers, heads]
        gammas = torch.where(good, self.tau / scores.clamp(min=self.tau), 1.0)
        factors: dict[int, Factors] = {}
        for layer, projection, box, master, local in self.rows:
            if layer not in factors:
                model = layer_model(self.model, layer)
                factors[layer] = factors_of_rows(model, gammas[layer, :model.mixer.heads])
            start, size = box.start[0], box.size[0]
            of_rows = factors[layer][projection][start:start + size].to(master)
            master.mul_(of_rows.view(size, *[1] * (master.dim() - 1)))
            if local is not None:
                local.copy_(master)


def clipped_rows(model: ModelConfig, layers: Iterable[int], buckets: list[Bucket]) -> list[ClippedRows]:
    """Return the rows of the clipped projections of these layers that this rank owns."""
    places: dict[str, tuple[int, str]] = {}  # {global name: layer, projection}
    for layer in layers:
        like = layer_model(model, layer)
        for name in factors_of_rows(like, torch.ones(like.mixer.heads)):
            for part in ("weight", "bias"):
                places[f"layers.{layer}.attn.{name}.{part}"] = layer, name

    found: list[ClippedRows] = []
    for bucket in buckets:
        weights = bucket.weights
        masters, locals_ = get_boxes(bucket, weights.master), get_boxes(bucket, weights.local)
        for (box, master), (_, local) in zip(masters, locals_):
            if box.key in places:
                copy = None if weights.local is weights.master else local
                found.append(ClippedRows(*places[box.key], box, master, copy))
    return found


# ---- the factors of a layer --------------------------------------------------------------------------------


def factors_of_rows(model: ModelConfig, gammas: Tensor) -> Factors:
    """Return the factors of a layer. gammas [h]: of its query heads."""
    of_kind = of_latent_heads if isinstance(model.mixer, LatentConfig) else of_grouped_heads
    return of_kind(model, gammas)


def of_grouped_heads(model: ModelConfig, gammas: Tensor) -> Factors:
    """A key head is read by h / g query heads, one after another."""
    shape = head_shape(model)
    groups = gammas.unflatten(0, (shape.kv_heads, -1))  # [g, h/g]
    of_keys = groups.amin(1, keepdim=True).sqrt()  # [g, 1]
    of_queries = groups / of_keys
    return {
        "q": of_queries.flatten().repeat_interleave(shape.head_dim),
        "k": of_keys.flatten().repeat_interleave(shape.head_dim),
    }


def of_latent_heads(model: ModelConfig, gammas: Tensor) -> Factors:
    """A head has rows without positions and rows with them (q), and rows of its key and its value (kv_b)."""
    mixer = model.mixer
    assert isinstance(mixer, LatentConfig)
    whole, half = gammas[:, None], gammas[:, None].sqrt()  # [h, 1]
    without_positions = half.expand(-1, mixer.nope_dim)
    queries = torch.cat((without_positions, whole.expand(-1, mixer.rope_dim)), 1)
    keys_and_values = torch.cat((without_positions, torch.ones_like(whole).expand(-1, mixer.v_dim)), 1)
    return {"q_b" if mixer.q_rank else "q": queries.flatten(), "kv_b": keys_and_values.flatten()}
