"""The output head: final norm, projection onto the vocabulary, cross entropy."""
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from config import Config, mup_width_ratio, vocab_size
from kernels.cross_entropy import CHUNK_BYTES, SOFTMAX_ELEMENTS, linear_cross_entropy
from kernels.linear import linear
from model.context import ForwardContext
from model.embedding import embedding_table, vocab_table
from model.mtp import MultiTokenPrediction
from model.norm import Norm
from parallel.cost import Cost, MatrixProduct, MemoryTraffic, SavedTensor, Workload
from parallel.microbatch import Microbatch
from parallel.sharding.spec import ShardedParameter
from parallel.tensor.layers import merge_exchanges, merge_vocab_statistics
from parallel.tensor.regions import enter_exchanges, enter_region
from parallel.topology.mesh import Mesh
from parallel.wire import comm


@dataclass(frozen=True)
class LossInputs:
    """What a loss needs beside the hidden states. scale: the loss is multiplied by it."""
    microbatch: Microbatch
    scale: Tensor | float
    context: ForwardContext


class OutputHead(nn.Module):
    """Hidden states after the last block -> the loss of a microbatch, or logits.

    mtp: the modules of multi-token prediction; set by the stage that makes them (model/transformer.py).
    """
    mtp: MultiTokenPrediction | None

    def __init__(self, cfg: Config, mesh: Mesh, table: ShardedParameter | None,
                 is_on_two_ranks: bool) -> None:
        """table: of the embedding, if it is on this rank; a tied head uses it. is_on_two_ranks: see
        embedding_table."""
        super().__init__()
        self.tp = mesh.tp
        self.sp = cfg.parallel.sp
        self.vocab = vocab_size(cfg.model)
        self.logit_scale = 1 / mup_width_ratio(cfg.model)  # muP
        self.norm = Norm(cfg, mesh, "norm")
        if not cfg.model.tied:
            self.weight = vocab_table(cfg, mesh, "head.weight", role="head")
        elif table is not None:
            self.weight = table
        else:
            self.weight = embedding_table(cfg, mesh, is_on_two_ranks)
        self.mtp = None

    def forward(self, x: Tensor, loss_inputs: LossInputs | None = None,
                position: int | None = None) -> Tensor:
        """x [b, s, d] (sp: [b, s/tp, d]) after the last block.

        With loss_inputs: the loss, a scalar. Else logits in fp32 or better: [b, s, vocab], or those of one
        position [vocab] of the first sequence.
        """
        if loss_inputs is not None:
            return self.loss(x, loss_inputs)
        if position is None:
            return self.logits(x)
        if self.sp:
            return self.logits(x)[0, position]
        return self.logits(x[:, position:position + 1])[0, 0]

    def loss(self, x: Tensor, inputs: LossInputs) -> Tensor:
        """scale * the sum of the counted tokens' losses. Further predictions add to the gradients, not to the
        value."""
        h = self.norm(x)
        microbatch, scale = inputs.microbatch, inputs.scale
        if self.mtp is None or not torch.is_grad_enabled():
            return self.cross_entropy(h, microbatch.targets, scale)
        ahead = self.mtp(h, microbatch, scale, inputs.context, self.cross_entropy)
        loss = self.cross_entropy(h, microbatch.targets, scale)
        return loss + (ahead - ahead.detach())

    def cross_entropy(self, h: Tensor, targets: Tensor, scale: Tensor | float) -> Tensor:
        """h [b, s, d] after the norm, targets [b, s] -> scale * the sum of the counted tokens' losses."""
        h = self.projection_input(h)
        first_row = self.tp.index * self.weight.shape[0]  # of the vocabulary, on this rank
        return linear_cross_entropy(
            h.flatten(0, 1),
            self.weight,
            targets.flatten(),
            scale,
            self.vocab,
            start=first_row,
            merge=merge_vocab_statistics(self.tp),
        )

    def logits(self, x: Tensor) -> Tensor:
        """x [b, s, d] -> [b, s, vocab] without the padding, in fp32 or better."""
        part = linear(self.projection_input(self.norm(x)), self.weight)  # [b, s, v/tp]
        if self.tp.size > 1:
            parts = comm.all_gather(part[None], self.tp)  # [tp, b, s, v/tp]
            part = torch.cat(parts.unbind(0), -1)
        logits = part[..., :self.vocab]
        return logits.to(torch.promote_types(x.dtype, torch.float32))

    def projection_input(self, h: Tensor) -> Tensor:
        """h [b, s, d] (sp: [b, s/tp, d]) after the norm -> [b, s, d], what the table is multiplied by."""
        if self.logit_scale != 1:
            h = h * self.logit_scale
        return enter_region(h, self.tp, self.sp)

    # ---- what it costs -------------------------------------------------------------------------------------

    def cost(self, work: Workload) -> Cost:
        loss = self.norm.cost(work) + self.cross_entropy_cost(work)
        if self.mtp is None:
            return loss
        return loss + self.mtp.cost(work, self.cross_entropy_cost(work))

    def cross_entropy_cost(self, work: Workload) -> Cost:
        """The forward computes both gradients, and keeps that of its input. Logits pass through memory four
        times: written, read and replaced by their gradient, read."""
        columns, hidden = self.weight.spec.shape
        input_bytes = work.tokens * hidden * work.compute_bytes
        logit_bytes = work.tokens * columns * work.compute_bytes
        merged = merge_exchanges(merged_rows(work, columns), self.tp, work)
        return Cost(
            products=(MatrixProduct(work.tokens, hidden, columns, grads_in_forward=True),),
            traffic=(MemoryTraffic(4 * logit_bytes, has_backward=False),),
            saved=(SavedTensor(input_bytes),),
            exchanges=enter_exchanges(input_bytes, self.sp) + merged,
            launches=1,
        )


def merged_rows(work: Workload, columns: int) -> list[int]:
    """Rows of each exchange in which ranks that share the vocabulary merge their statistics, on a CPU
    (kernels/cross_entropy.py). columns: of this rank."""
    most_rows = max(1, CHUNK_BYTES // (columns * work.compute_bytes))
    num_chunks = -(-work.tokens // most_rows)
    chunk = -(-work.tokens // num_chunks)
    block = max(1, SOFTMAX_ELEMENTS // columns)

    rows: list[int] = []
    for start in range(0, work.tokens, chunk):
        end = min(start + chunk, work.tokens)
        for first in range(start, end, block):
            rows.append(min(block, end - first))
    return rows
