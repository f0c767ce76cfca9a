"""Cross entropy together with the divergence from a teacher's probabilities (distillation, arXiv 1503.02531).

    loss of a token = (1 - w) (logsumexp(z) - z[target]) + w T^2 KL(softmax(t / T), softmax(z / T))

z are the model's logits, t the teacher's. The gradient of z is

    (1 - w) (softmax(z) - one-hot) + w T (softmax(z / T) - softmax(t / T))

As in kernels/cross_entropy.py, both models' logits exist for one chunk of rows at a time, and the gradient
replaces them. A chunk has half as many rows. Ranks that share the vocabulary exchange five numbers of each
row. There is no Triton kernel: torch's operations take a few rows at a time.
"""
from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor

from kernels.cross_entropy import (
    IGNORE_INDEX,
    SOFTMAX_ELEMENTS,
    capped,
    chunk_bytes,
    linear_cross_entropy,
)
from kernels.grad import accumulation_dtype

# [n, rows] of this rank's columns -> [ranks, n, rows] of all ranks that share the vocabulary
Gather = Callable[[Tensor], Tensor]

PADDING = -1e30  # logit of rows beyond the vocabulary: exp gives 0, and ranks that hold no others stay finite
GPU_ELEMENTS = 1 << 24  # logits that a GPU converts to fp32 at a time: its temporary tensors have 64 MiB each
MODELS = 2  # whose logits exist at a time


class TeacherHead(NamedTuple):
    """What makes the teacher's logits: hidden [t, d], weight [v, d] of the same rows of the vocabulary as the
    model's, and the bound of the logits, if it has one."""
    hidden: Tensor
    weight: Tensor
    cap: float | None


class Mix(NamedTuple):
    """share: w, of the divergence in the loss. temperature: T."""
    share: float
    temperature: float


def linear_distillation(
    hidden: Tensor,
    weight: Tensor,
    targets: Tensor,
    scale: Tensor | float,
    vocab: int,
    *,
    teacher: TeacherHead,
    mix: Mix,
    gather: Gather,
    start: int = 0,
    cap: float | None = None,
    chunk: int | None = None,
    terms: Tensor | None = None,
) -> Tensor:
    """scale * the summed loss of the counted tokens: a scalar, in fp32 or better.

    terms [2]: gets the summed cross entropy and divergence of the counted tokens added, without scale.
    The other arguments are those of linear_cross_entropy.
    """
    if not chunk:
        chunk = max(1, chunk_bytes(hidden.device) // (MODELS * weight.shape[0] * weight.element_size()))
    elements = SOFTMAX_ELEMENTS if hidden.device.type == "cpu" else GPU_ELEMENTS
    block = max(1, elements // weight.shape[0])

    def losses_of_rows(logits: Tensor, rows: slice) -> Tensor:
        teacher_logits = torch.mm(teacher.hidden[rows], teacher.weight.t())  # [r, v]
        blocks: list[Tensor] = []
        for parts in zip(logits.split(block), teacher_logits.split(block), targets[rows].split(block)):
            blocks.append(distillation_block(
                *parts,
                scale,
                mix,
                vocab=vocab,
                start=start,
                gather=gather,
                caps=(cap, teacher.cap),
            ))
        of_rows = torch.cat(blocks, 1)  # [2, r]
        if terms is not None:
            terms.add_(of_rows.sum(1))
        cross_entropy, divergence = of_rows
        return (1 - mix.share) * cross_entropy + mix.share * mix.temperature**2 * divergence

    return linear_cross_entropy(
        hidden, weight, targets, scale, vocab, start=start, chunk=chunk, losses_of_rows=losses_of_rows)


def distillation_block(
    logits: Tensor,
    teacher_logits: Tensor,
    targets: Tensor,
    scale: Tensor | float,
    mix: Mix,
    *,
    vocab: int,
    start: int,
    gather: Gather,
    caps: tuple[float | None, float | None],
) -> Tensor:
    """Return the cross entropy and the divergence of each row [2, r], 0 if it does not count. In plain
    torch.

    logits [r, v] become their gradient, times scale, 0 if the row does not count. teacher_logits [r, v] may
    be overwritten. caps: of the two models.
    """
    share, temperature = mix
    z = real_logits(logits, caps[0], vocab - start)
    slope = None if caps[0] is None else 1 - (z / caps[0]).square()  # of the capped logits
    soft = z / temperature
    soft_teacher = real_logits(teacher_logits, caps[1], vocab - start) / temperature

    counted = targets != IGNORE_INDEX
    column = targets - start
    is_here = counted & (column >= 0) & (column < z.shape[1])
    column = column.clamp(0, z.shape[1] - 1)[:, None]

    # statistics of this rank's columns
    teacher_probs = torch.softmax(soft_teacher, 1)
    own_teacher_lse = soft_teacher.logsumexp(1)
    own = torch.stack((
        z.logsumexp(1),
        z.gather(1, column)[:, 0].where(is_here, 0.0),
        soft.logsumexp(1),
        own_teacher_lse,
        (teacher_probs * (soft_teacher - soft)).sum(1),  # the teacher's mean difference of the logits
    ))  # [5, r]

    # of all columns
    lses, target_logits, soft_lses, teacher_lses, differences = gather(own).unbind(1)  # each [ranks, r]
    lse, soft_lse, teacher_lse = lses.logsumexp(0), soft_lses.logsumexp(0), teacher_lses.logsumexp(0)
    difference = (differences * (teacher_lses - teacher_lse).exp()).sum(0)
    divergence = difference - teacher_lse + soft_lse
    cross_entropy = lse - target_logits.sum(0)

    # the gradient
    probs = (z - lse[:, None]).exp_()
    probs.scatter_add_(1, column, -is_here.to(probs.dtype)[:, None])
    teacher_probs.mul_((own_teacher_lse - teacher_lse).exp_()[:, None])
    soft_probs = (soft - soft_lse[:, None]).exp_()
    grad = probs.mul_(1 - share).add_(soft_probs.sub_(teacher_probs), alpha=share * temperature)
    grad.mul_((counted * scale)[:, None])
    if slope is not None:
        grad.mul_(slope)
    logits.copy_(grad)
    return torch.stack((cross_entropy, divergence)).where(counted, 0.0)


def real_logits(logits: Tensor, cap: float | None, columns: int) -> Tensor:
    """Return logits [r, v] in fp32 or better, within the cap; from `columns` on they are padding."""
    values = capped(logits.to(accumulation_dtype(logits.dtype)), cap)
    if columns < values.shape[1]:
        values[:, max(0, columns):] = PADDING
    return values
