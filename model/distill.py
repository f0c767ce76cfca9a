"""Distillation while training (arXiv 1503.02531): the loss also follows the probabilities of a teacher.

    loss = (1 - w) CE + w T^2 KL(softmax(teacher's logits / T), softmax(logits / T))

w is distill.weight, T distill.temperature; both terms are the mean over the counted tokens. CE and KL are
summed and logged beside the loss (Pipeline.loss_terms). Validation and multi-token prediction keep the cross
entropy.

The teacher is a whole model on each rank that has the output head. There it is laid out as the model is: tp
ranks share its matrices and its vocabulary, sequences are sharded over cp, experts over ep, and ZeRO-3 shards
its weights. It only computes: no gradient, no masters, no dropout, no router losses. It runs when the loss of
a microbatch needs it, from the same tokens, so nothing of it is kept between two microbatches.
"""
from collections.abc import Sequence

import torch
from torch import Tensor

from config import DistillConfig
from kernels.distillation import Mix, TeacherHead, linear_distillation
from model.head import OutputHead
from model.transformer import PipelineStage
from parallel.microbatch import Microbatch
from parallel.sharding.bucket import Bucket
from parallel.sharding.zero import ZeroHooks
from parallel.wire import comm


class Teacher:
    """The teacher of one output head. stage: the whole model, whose weights are in `buckets`; hooks: theirs.
    terms [2]: CE and KL of each microbatch are added here.

    Not a module: nothing of it is a parameter of the model.
    """

    def __init__(
        self,
        distill: DistillConfig,
        stage: PipelineStage,
        hooks: ZeroHooks,
        buckets: Sequence[Bucket],
        terms: Tensor,
    ) -> None:
        self.mix = Mix(distill.weight, distill.temperature)
        self.stage = stage
        self.hooks = hooks
        self.terms = terms
        for bucket in buckets:
            bucket.num_users = 1  # no backward: a tied table is free after each of its two uses

    def loss(
        self, head: OutputHead, microbatch: Microbatch, h: Tensor, targets: Tensor, scale: Tensor | float
    ) -> Tensor:
        """Return scale * the summed loss of the counted tokens, a scalar. The arguments are those of
        head.cross_entropy."""
        own_head = self.stage.head
        assert own_head is not None
        last = len(self.hooks.parts) - 1  # the head, if its weights are exchanged
        with torch.no_grad():
            context = self.stage.context_of(microbatch, 1.0)
            x, residual = self.stage.run_blocks(microbatch.tokens, microbatch.positions, context)
            if last >= 0:
                self.hooks.begin_forward(last)
            states = own_head.projection_input(own_head.norm.add_and_norm(x, residual)[0])
        h = head.projection_input(h)  # [b, s/cp, d]
        loss = linear_distillation(
            h.flatten(0, 1),
            head.weight,
            targets.flatten(),
            scale,
            head.vocab,
            teacher=TeacherHead(states.flatten(0, 1), own_head.weight, own_head.logit_cap),
            mix=self.mix,
            start=head.tp.index * head.weight.shape[0],
            gather=lambda own: comm.all_gather(own[None], head.tp),
            cap=head.logit_cap,
            terms=self.terms,
        )
        if last >= 0:
            with torch.no_grad():
                self.hooks.end_forward(last, x, states)
        return loss
