"""Cross entropy and the divergence from a teacher in one, against the formula on whole logits."""

import math

import pytest
import torch
import torch.nn.functional as F
from test_cross_entropy import assert_same

from kernels import cross_entropy
from kernels.cross_entropy import IGNORE_INDEX
from kernels.distillation import Mix, TeacherHead, linear_distillation

ROWS, SCALE, VOCAB = 11, 0.3, 10
MIXES = [Mix(0.5, 1.0), Mix(0.7, 2.5), Mix(1.0, 0.5)]


def alone(own):
    return own[None]


def case(columns=13, dtype=torch.float64):
    """hidden and weight of the model, what makes the teacher's logits, targets: two of them do not count."""
    hidden = torch.randn(ROWS, 6, dtype=dtype, requires_grad=True)
    weight = torch.randn(columns, 6, dtype=dtype, requires_grad=True)
    teacher = TeacherHead(torch.randn(ROWS, 8, dtype=dtype), torch.randn(columns, 8, dtype=dtype), None)
    targets = torch.randint(0, VOCAB, (ROWS,))
    targets[2:4] = IGNORE_INDEX
    return hidden, weight, teacher, targets


def capped(logits, cap):
    return logits if cap is None else cap * torch.tanh(logits / cap)


def definition(hidden, weight, teacher, targets, mix, cap=None):
    """torch's cross entropy and KL divergence, in fp32 or better."""
    wide = torch.promote_types(hidden.dtype, torch.float32)
    logits = capped((hidden @ weight.t())[:, :VOCAB].to(wide), cap)
    theirs = capped((teacher.hidden @ teacher.weight.t())[:, :VOCAB].to(wide), teacher.cap)
    loss = F.cross_entropy(logits, targets, ignore_index=IGNORE_INDEX, reduction="sum")
    log_q, log_p = ((x / mix.temperature).log_softmax(-1) for x in (logits, theirs))
    each = F.kl_div(log_q, log_p, reduction="none", log_target=True).sum(-1)
    divergence = each[targets != IGNORE_INDEX].sum()
    return SCALE * ((1 - mix.share) * loss + mix.share * mix.temperature**2 * divergence)


@pytest.mark.parametrize("chunk", [None, 1, 4, 64])
@pytest.mark.parametrize("mix", MIXES, ids=str)
def test_loss_and_gradients_are_those_of_whole_logits(monkeypatch, chunk, mix):
    monkeypatch.setattr("kernels.distillation.SOFTMAX_ELEMENTS", 3 * 13)  # three rows at a time
    hidden, weight, teacher, targets = case()
    got = linear_distillation(
        hidden, weight, targets, SCALE, VOCAB, teacher=teacher, mix=mix, gather=alone, chunk=chunk)
    assert_same(got, definition(hidden, weight, teacher, targets, mix), (hidden, weight))


@pytest.mark.parametrize("caps", [(1.5, None), (None, 1.5), (2.0, 1.5)])
def test_each_model_bounds_its_own_logits(caps):
    hidden, weight, teacher, targets = case()
    teacher = teacher._replace(cap=caps[1])
    got = linear_distillation(
        hidden, weight, targets, SCALE, VOCAB, teacher=teacher, mix=MIXES[1], gather=alone, cap=caps[0])
    assert_same(got, definition(hidden, weight, teacher, targets, MIXES[1], caps[0]), (hidden, weight))


@pytest.mark.parametrize("dtype, bound", [(torch.float32, 1e-5), (torch.bfloat16, 0.02)])
def test_low_precision_sums_in_fp32(dtype, bound):
    hidden, weight, teacher, targets = case(dtype=dtype)
    got = linear_distillation(
        hidden, weight, targets, SCALE, VOCAB, teacher=teacher, mix=MIXES[1], gather=alone)
    assert got.dtype == torch.float32
    want = definition(hidden, weight, teacher, targets, MIXES[1])
    assert_same(got, want, (hidden, weight), rtol=bound, atol=bound)


def test_a_teacher_with_the_same_logits_leaves_the_cross_entropy():
    """And with the whole weight on it, nothing."""
    hidden, weight, _, targets = case()
    same = TeacherHead(hidden.detach(), weight.detach(), None)
    whole = definition(hidden, weight, same, targets, Mix(0.0, 1.0))
    for mix in (Mix(0.4, 2.0), Mix(1.0, 2.0)):
        got = linear_distillation(
            hidden, weight, targets, SCALE, VOCAB, teacher=same, mix=mix, gather=alone)
        found = torch.autograd.grad(got, hidden)[0]
        torch.testing.assert_close(got, (1 - mix.share) * whole)
        torch.testing.assert_close(
            found, (1 - mix.share) * torch.autograd.grad(whole, hidden, retain_graph=True)[0])


@pytest.mark.parametrize("columns", [14, 21])
def test_parts_of_the_vocabulary_are_the_whole(columns):
    """Parts of two ranks, and of three whose last is all padding. Each is computed after all have said their
    statistics."""
    hidden, weight, teacher, targets = case(columns)
    mix, starts = MIXES[1], range(0, columns, 7)
    want = linear_distillation(
        hidden, weight, targets, SCALE, VOCAB, teacher=teacher, mix=mix, gather=alone)
    dh, dw = torch.autograd.grad(want, (hidden, weight))

    def part(start, gather):
        of_teacher = teacher._replace(weight=teacher.weight[start : start + 7])
        own = weight[start : start + 7]
        loss = linear_distillation(
            hidden, own, targets, SCALE, VOCAB, teacher=of_teacher, mix=mix, start=start, gather=gather)
        return loss, *torch.autograd.grad(loss, (hidden, own))

    said = []
    for start in starts:
        part(start, lambda own: said.append(own) or own[None])
    losses, hiddens, weights = zip(*(part(start, lambda own: torch.stack(said)) for start in starts))
    for loss in losses:
        torch.testing.assert_close(loss, want)
    torch.testing.assert_close(sum(hiddens), dh)
    torch.testing.assert_close(torch.cat(weights), dw)


def test_fewer_rows_fit_beside_the_teachers(monkeypatch):
    """Two models' logits exist at a time: a chunk has half of the rows of the cross entropy's."""
    hidden, weight, teacher, targets = case()
    monkeypatch.setattr("kernels.distillation.chunk_bytes", lambda device: 8 * 13 * 8)  # 8 rows
    rows = []
    product = torch.mm

    def mm(x, y, **out):
        if not out:
            rows.append(len(x))
        return product(x, y, **out)

    monkeypatch.setattr(torch, "mm", mm)
    linear_distillation(hidden, weight, targets, SCALE, VOCAB, teacher=teacher, mix=MIXES[0], gather=alone)
    assert max(rows) == 4 == math.ceil(ROWS / 3)
    assert cross_entropy.chunk_bytes(hidden.device) == cross_entropy.CHUNK_BYTES
