"""The output head: final norm, projection onto the vocabulary and cross entropy."""
from functools import partial
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn

from config import Config, mup_width_ratio, vocab_size
from kernels.cross_entropy import CHUNK_BYTES, IGNORE_INDEX, capped, linear_cross_entropy
from kernels.linear import linear
from model.context import LossInputs
from model.embedding import embedding_table, vocab_table
from model.mtp import MultiTokenPrediction
from model.norm import Norm
from parallel.sharding.spec import ShardedParameter
from parallel.tensor.layers import merge_vocab_statistics
from parallel.tensor.regions import enter_region
from parallel.topology.mesh import Mesh
from parallel.wire import comm

if TYPE_CHECKING:  # imported only with distill.teacher
    from model.distill import Teacher


class OutputHead(nn.Module):
    """Map the last block's hidden states to the loss of a microbatch, or to logits."""

    def __init__(self, cfg: Config, mesh: Mesh, table: ShardedParameter | None, ends_are_apart: bool) -> None:
        """`table` is the embedding's, if a stage of this rank has it. See embedding_table for
        `ends_are_apart`."""
        super().__init__()
        self.tp = mesh.tp
        self.sp = cfg.parallel.sp
        self.vocab = vocab_size(cfg.model)
        self.logit_scale = cfg.model.logit_scale / mup_width_ratio(cfg.model)
        self.logit_cap = cfg.model.logit_cap
        self.norm = Norm(cfg, "norm")
        self.merge = merge_vocab_statistics(self.tp) if self.tp.size > 1 else None
        self.has_teacher = cfg.distill.teacher is not None
        self.teacher: "Teacher | None" = None  # whose probabilities the loss follows (model/distill.py)
        if not cfg.model.tied:
            self.weight = vocab_table(cfg, mesh, "head.weight", role="head")
        elif table is not None:
            self.weight = table
        else:
            self.weight = embedding_table(cfg, mesh, ends_are_apart)

        self.mtp = None  # multi-token prediction: it reads the embedding's table too
        if cfg.model.mtp:
            if table is None:
                table = self.weight if cfg.model.tied else embedding_table(cfg, mesh, ends_are_apart)
            self.mtp = MultiTokenPrediction(cfg, mesh, table)

    def forward(self, x: Tensor, loss_inputs: LossInputs | None = None, *, residual: Tensor | None = None,
                position: int | None = None, targets: Tensor | None = None) -> Tensor:
        """Dispatch to `loss` given loss_inputs, `logits_at` given a position, `token_scores` given targets,
        else `logits`.

        Going through forward lets module hooks see all four.
        """
        if loss_inputs is not None:
            return self.loss(x, residual, loss_inputs)
        if targets is not None:
            return self.token_scores(x, targets)
        if position is not None:
            return self.logits_at(x, position)
        return self.logits(x)

    def loss(self, x: Tensor, residual: Tensor | None, inputs: LossInputs) -> Tensor:
        """Return scale * the summed loss of this rank's counted tokens, a scalar.

        x, residual [b, s/cp, d] (sp: [b, s/cp/tp, d]) come from the last block.
        Multi-token prediction contributes to the gradients, not to the value. In training the loss also
        follows a teacher (distill.teacher). Raises ValueError if it is not there.
        """
        h, _ = self.norm.add_and_norm(x, residual)
        targets, scale = inputs.microbatch.targets, inputs.scale
        loss_of = self.cross_entropy
        if self.has_teacher and torch.is_grad_enabled():
            if self.teacher is None:
                raise ValueError("distill.teacher: the output head was given no teacher")
            loss_of = partial(self.teacher.loss, self, inputs.microbatch)
        if self.mtp is None or not torch.is_grad_enabled():
            return loss_of(h, targets, scale)
        loss_ahead = self.mtp(h, inputs, self.cross_entropy)
        loss = loss_of(h, targets, scale)
        return loss + (loss_ahead - loss_ahead.detach())

    def logits(self, x: Tensor) -> Tensor:
        """Return logits [b, s, vocab] in fp32 or better, without vocabulary padding. Takes x [b, s, d]
        (sp: [b, s/tp, d]) of full sequences after the last block."""
        logits = linear(self.projection_input(self.norm(x)), self.weight)  # [b, s, padded vocab / tp]
        if self.tp.size > 1:
            shards = comm.all_gather(logits[None], self.tp)  # [tp, b, s, padded vocab / tp]
            logits = torch.cat(shards.unbind(0), -1)
        logits = logits[..., :self.vocab]
        return capped(logits.to(torch.promote_types(x.dtype, torch.float32)), self.logit_cap)

    def logits_at(self, x: Tensor, position: int) -> Tensor:
        """Return the logits [vocab] of one position of the first sequence, in fp32 or better. x as for
        `logits`."""
        if self.sp:  # sequence-sharded: gather first
            return self.logits(x)[0, position]
        return self.logits(x[:, position:position + 1])[0, 0]

    def token_scores(self, x: Tensor, targets: Tensor) -> Tensor:
        """Score the n counted targets: x as for `logits`, targets [b, s] -> [2, n] in fp32 or better, row by
        row.

        The first row is the log-probability in nats; the second is 1 if no token is likelier, else 0.

        Logits are computed only for the counted targets, one chunk at a time. Under tp each chunk takes one
        all-gather of three numbers per target.
        """
        h = self.projection_input(self.norm(x))  # [b, s, d]
        is_counted = targets != IGNORE_INDEX
        h = h[is_counted]  # [n, d]
        ids = targets[is_counted]
        columns = self.weight.shape[0]  # of this rank
        chunk = max(1, CHUNK_BYTES // (columns * h.element_size()))
        parts = [self.chunk_scores(*pair) for pair in zip(h.split(chunk), ids.split(chunk))]
        return torch.cat(parts, 1)

    def chunk_scores(self, h: Tensor, ids: Tensor) -> Tensor:
        """Score one chunk: h [n, d], ids [n] -> [2, n]. See token_scores."""
        columns = self.weight.shape[0]
        first = self.tp.index * columns  # first vocabulary row of this rank
        logits = linear(h, self.weight)  # [n, padded vocab / tp]
        logits = capped(logits.to(torch.promote_types(h.dtype, torch.float32)), self.logit_cap)
        logits[:, max(0, self.vocab - first):] = float("-inf")  # padding

        # statistics of this rank's columns, then of all columns
        local_ids = ids - first
        is_local = (local_ids >= 0) & (local_ids < columns)
        picked = logits.gather(1, local_ids.clamp(0, columns - 1)[:, None])[:, 0]
        own = torch.stack((logits.logsumexp(1), picked.masked_fill(~is_local, float("-inf")), logits.amax(1)))
        lse, picked, largest = comm.all_gather(own[None], self.tp).unbind(1)  # each [tp, n]
        lse = lse.logsumexp(0)
        picked = picked.amax(0)
        is_likeliest = picked >= largest.amax(0)
        return torch.stack((picked - lse, is_likeliest.to(lse.dtype)))

    def cross_entropy(self, h: Tensor, targets: Tensor, scale: Tensor | float) -> Tensor:
        """Return scale * the summed loss of the counted tokens, a scalar.

        Takes h [b, s/cp, d] (sp: [b, s/cp/tp, d]) after the norm, and targets [b, s/cp].
        """
        h = self.projection_input(h)
        first_row = self.tp.index * self.weight.shape[0]  # first vocabulary row of this rank
        return linear_cross_entropy(
            h.flatten(0, 1),
            self.weight,
            targets.flatten(),
            scale,
            self.vocab,
            start=first_row,
            merge=self.merge,
            cap=self.logit_cap,
        )

    def projection_input(self, h: Tensor) -> Tensor:
        """Return the input [b, s, d] of the projection from h [b, s, d] (sp: [b, s/tp, d]) after the norm.

        Logits are scaled by the model's logit_scale, and under muP divided by the width ratio (arXiv
        2203.03466, table 8).
        """
        if self.logit_scale != 1:
            h = h * self.logit_scale
        return enter_region(h, self.tp, self.sp) if self.tp.size > 1 else h
