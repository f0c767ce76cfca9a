"""Watch the forward passes of a step from outside: nothing stays in the model between such steps.

Only the forward is watched, not the part that recomputation repeats.
"""
import contextlib
from collections.abc import Iterable, Iterator
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from config import ModelConfig, layer_model, modules_ahead
from kernels.attention_mask import make_attention_mask
from kernels.attention_scores import ScoreForm
from kernels.largest_score import largest_scores
from model.attention import AttentionCore
from model.block import TransformerBlock
from model.context import ForwardContext
from model.transformer import PipelineStage
from parallel.context import zigzag
from parallel.topology.mesh import Mesh
from parallel.wire import comm


class ForwardWatch:
    """is_on: whether a stage runs its forward, inside of `watching`."""

    def __init__(self, stages: Iterable[PipelineStage]) -> None:
        self.stages = list(stages)
        self.is_on = False

    @contextlib.contextmanager
    def watching(self) -> Iterator[None]:
        with contextlib.ExitStack() as undo:
            for stage in self.stages:
                undo.callback(stage.register_forward_pre_hook(partial(self.turn, True)).remove)
                undo.callback(stage.register_forward_hook(partial(self.turn, False)).remove)
            yield

    def turn(self, is_on: bool, *_: Any) -> None:
        self.is_on = is_on


class LargestScores:
    """The largest attention score of each head, of all tokens and microbatches that a step sees.

    of_heads: [layers, heads], so far on this rank. -inf for heads that are on other ranks or that a layer
    lacks, and in layers whose mixer keeps a state. Computes the products of queries and keys once more, and
    under cp gathers the keys.
    """

    def __init__(
        self,
        model: ModelConfig,
        stages: Iterable[PipelineStage],
        mesh: Mesh,
        device: torch.device,
        dtype: torch.dtype,
    ) -> None:
        self.mesh = mesh
        self.forward = ForwardWatch(stages)
        modules = [module for stage in self.forward.stages for module in stage.modules()]
        self.cores: list[tuple[TransformerBlock, AttentionCore]] = []
        for module in modules:
            if isinstance(module, TransformerBlock):
                core = getattr(module.mixer, "core", None)
                if isinstance(core, AttentionCore):
                    self.cores.append((module, core))
        heads = [query_heads(layer_model(model, i)) for i in range(model.layers + modules_ahead(model))]
        self.of_heads = torch.empty(len(heads), max(1, *heads), dtype=dtype, device=device)
        self.start()

    def start(self) -> None:
        """Reset the scores."""
        self.of_heads.fill_(float("-inf"))

    @contextlib.contextmanager
    def watching(self) -> Iterator[None]:
        """Watch the forward passes inside."""
        with self.forward.watching(), contextlib.ExitStack() as undo:
            for block, core in self.cores:
                attend = partial(self.attend, block.layer, core, block.mixer.core)
                replace_until(undo, block.mixer, "core", attend)
            yield

    def attend(
        self,
        layer: int,
        core: AttentionCore,
        function: Any,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        context: ForwardContext,
        sinks: Tensor | None = None,
    ) -> Tensor:
        """Attend by `function`, which is the core or watches it, too. Look at the scores."""
        if self.forward.is_on:
            heads = q.shape[2]
            first = self.mesh.tp.index * heads
            known = self.of_heads[layer, first:first + heads]
            scores = scores_of_heads(core, q.detach(), k.detach(), context)
            known.copy_(torch.maximum(known, scores.to(known.dtype)))
        return function(q, k, v, context, sinks)

    def over_ranks(self, group: comm.Group) -> Tensor:
        """Return the scores [layers, heads] of all ranks of the group. NaN if one is NaN."""
        return comm.all_gather(self.of_heads[None], group).amax(0)


def query_heads(model: ModelConfig) -> int:
    """Return the number of query heads of a layer, 0 if its mixer keeps a state."""
    return model.mixer.heads if model.mixer.has_softmax else 0


def scores_of_heads(core: AttentionCore, q: Tensor, k: Tensor, context: ForwardContext) -> Tensor:
    """Return for each head [h] the largest score of this rank's queries q [b, s/cp, h, d] with the keys
    k [b, s/cp, g, d] that they see, of all cp ranks: the keys are gathered.
    """
    is_sharded = context.sequence_is_sharded and core.cp.size > 1
    if is_sharded:
        k = zigzag.unshard_sequence(comm.all_gather(k[None], core.cp))
    s = k.shape[1]
    mask = make_attention_mask(
        0, s, 0, s, core.view.window, context.documents, q.device, chunk=core.view.chunk
    )
    form = ScoreForm(core.scale, core.softcap)
    if not is_sharded:
        return largest_scores(q, k, mask, form)
    size = s // (2 * core.cp.size)
    largest: list[Tensor] = []
    for chunk, queries in zip(zigzag.chunks_of_rank(core.cp.index, core.cp.size), q.chunk(2, 1)):
        start = chunk * size
        part = mask.part(start, size, 0, start + size)
        largest.append(largest_scores(queries, k[:, :start + size], part, form))
    return torch.maximum(*largest)


def replace_until(undo: contextlib.ExitStack, owner: nn.Module, name: str, value: object) -> None:
    """Set an attribute of a module until the stack is closed."""
    is_own = name in vars(owner)
    before = getattr(owner, name)
    setattr(owner, name, value)
    undo.callback(partial(setattr, owner, name, before) if is_own else partial(delattr, owner, name))
