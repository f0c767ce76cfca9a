"""RMSNorm of the heads of queries and keys with rotary positions: both ways, against formulas in fp64."""

import pytest
import torch
from training import bound, results_of, wide
from turns import gradients_of, tables_of, tables_of_training, turned

from kernels import rope
from kernels.norm import rms_norm
from kernels.unproven.head_norm import split_normalize_and_rotate

EPS = 1e-3  # large enough to matter
POSITIONS = torch.tensor([[0, 1, 2, 3, 4], [0, 1, 0, 1, 2]])  # the second sequence has two documents
YARN = (4.0, 1.0, 32.0, 64, "yarn")


def definition(qkv, q_weight, k_weight, turns, heads, kv, eps=EPS):
    """Complex numbers, one for each pair of channels, and a norm written out."""
    def one(x, weight):
        return turned(x / (x.pow(2).mean(-1, keepdim=True) + eps).sqrt() * weight, turns, pairs=False)

    q, k, v = qkv.split((heads, kv, kv), 2)
    return one(q, q_weight), one(k, k_weight), v


def tables(s, d, dtype, device, scaling=()):
    """cos, sin, turns."""
    scale = rope.yarn_mscale(scaling[0], 1.0) if scaling else 1.0
    return tables_of(POSITIONS[:, :s], rope.frequencies(d, 100.0, *scaling), dtype, device, scale)


def inputs(heads, kv, d, s, dtype, device):
    """The projection, which is 0 in one head, and both weights."""
    qkv = torch.randn(2, s, heads + 2 * kv, d, device=device)
    qkv[1, 0, 0] = 0
    weights = [1 + 0.5 * torch.randn(d, device=device) for _ in "qk"]
    return [x.to(dtype).requires_grad_() for x in (qkv, *weights)]


@pytest.mark.slow(every=24)
@pytest.mark.parametrize(
    "dtype, bound", [(torch.float32, 2e-6), (torch.bfloat16, 6e-3), (torch.float16, 8e-4)]
)
@pytest.mark.parametrize("memory", ["side by side", "apart", "head by head", "transposed"])
@pytest.mark.parametrize(
    "heads, kv, d, s, scaling",
    [(3, 1, 6, 5, ()), (4, 4, 16, 5, YARN), (24, 8, 128, 2, ()), (1, 1, 2, 1, ())],
)
def test_against_the_formula(interpreted, dtype, bound, memory, heads, kv, d, s, scaling):
    qkv, q_weight, k_weight = leaves = inputs(heads, kv, d, s, dtype, interpreted)
    cos, sin, turns = tables(s, d, dtype, interpreted, scaling)
    got = split_normalize_and_rotate(qkv, q_weight, k_weight, cos, sin, heads=heads, kv=kv, eps=EPS)
    assert "SplitNormRope" in type(got[0].grad_fn).__name__ and got[2].data_ptr() == qkv[0, 0, -kv].data_ptr()
    exact = [x.detach().double().requires_grad_() for x in leaves]
    want = definition(*exact, turns, heads, kv)

    dy = torch.randn(qkv.shape, device=interpreted).to(dtype)
    sizes = (heads, kv, kv)
    should = torch.autograd.grad(want, exact, [x.double() for x in dy.split(sizes, 2)])
    grads = torch.autograd.grad(got, leaves, gradients_of(memory, dy, sizes))
    for a, b in zip((*got, *grads), (*want, *should)):
        assert a.dtype == dtype and a.shape == b.shape
        assert (a.double() - b).norm() <= bound * b.norm().clamp_min(1e-3)


def test_without_a_kernel_it_is_a_norm_and_a_rotation():
    """Bit for bit, and for every dtype of a CPU."""
    for dtype in (torch.float64, torch.bfloat16):
        qkv, q_weight, k_weight = leaves = inputs(3, 2, 8, 5, dtype, torch.device("cpu"))
        cos, sin, turns = tables(5, 8, dtype, torch.device("cpu"))
        got = split_normalize_and_rotate(qkv, q_weight, k_weight, cos, sin, heads=3, kv=2, eps=EPS)
        q, k, v = qkv.split((3, 2, 2), 2)
        q, k = rms_norm(q, q_weight, EPS), rms_norm(k, k_weight, EPS)
        want = rope.apply_rope(q, cos, sin), rope.apply_rope(k, cos, sin), v
        dy = [torch.randn_like(x) for x in want]
        for a, b in zip(
            (*got, *torch.autograd.grad(got, leaves, dy)), (*want, *torch.autograd.grad(want, leaves, dy))
        ):
            assert torch.equal(a, b)
        if dtype == torch.float64:
            exact = definition(*leaves, turns, 3, 2)
            torch.testing.assert_close(got, exact, rtol=1e-12, atol=1e-12)


@pytest.mark.slow
def test_a_projection_with_channels_apart_is_copied(interpreted):
    qkv, q_weight, k_weight = inputs(2, 1, 4, 5, torch.float32, interpreted)
    strided = qkv.detach().transpose(2, 3).contiguous().transpose(2, 3).requires_grad_()
    cos, sin, _ = tables(5, 4, torch.float32, interpreted)
    settings = {"heads": 2, "kv": 1, "eps": EPS}
    results = []
    for x in (qkv, strided):
        out = split_normalize_and_rotate(x, q_weight, k_weight, cos, sin, **settings)
        results.append((*out, *torch.autograd.grad(sum(y.square().sum() for y in out), x)))
    for a, b in zip(*results):
        torch.testing.assert_close(a, b, rtol=0, atol=0)


@pytest.mark.slow
def test_weight_gradients_go_to_the_buffers_and_are_the_same_every_time(interpreted, given):
    qkv, q_weight, k_weight = inputs(3, 1, 8, 5, torch.bfloat16, interpreted)
    cos, sin, _ = tables(5, 8, torch.bfloat16, interpreted)
    settings = {"heads": 3, "kv": 1, "eps": EPS}

    def loss(*weights):
        out = split_normalize_and_rotate(qkv, *weights, cos, sin, **settings)
        return sum((y.float() * (i + 1)).square().sum() for i, y in enumerate(out))

    plain = torch.autograd.grad(loss(q_weight, k_weight), (q_weight, k_weight))
    buffers = []
    for _ in range(2):
        weights = given(q_weight, 1.0), given(k_weight, 2.0, is_written=False)
        loss(*weights).backward()
        assert all(w.grad is None and w.grad_is_written for w in weights)
        buffers.append([w.main_grad for w in weights])
    torch.testing.assert_close(buffers[0][0], 1 + plain[0].float(), rtol=0.01, atol=0.01)
    torch.testing.assert_close(buffers[0][1], plain[1].float(), rtol=0.01, atol=0.01)
    for a, b in zip(*buffers):
        assert torch.equal(a, b)


def test_the_projection_may_not_change_before_the_backward(interpreted):
    leaf, q_weight, k_weight = inputs(2, 1, 4, 5, torch.float32, interpreted)
    qkv = leaf * 1
    cos, sin, _ = tables(5, 4, torch.float32, interpreted)
    q, k, v = split_normalize_and_rotate(qkv, q_weight, k_weight, cos, sin, heads=2, kv=1, eps=EPS)
    with torch.no_grad():
        qkv.mul_(2)
    with pytest.raises(RuntimeError, match="inplace"):
        (q.sum() + k.sum() + v.sum()).backward()


@pytest.mark.slow
def test_it_is_that_of_transformers(interpreted):
    """Qwen3's own norm and rotation of heads, and their gradients by autograd."""
    theirs = pytest.importorskip(
        "transformers.models.qwen3.modeling_qwen3", reason="transformers has no Qwen3 to compare with"
    )
    heads, kv, d, s = 4, 2, 32, 5
    qkv, q_weight, k_weight = leaves = inputs(heads, kv, d, s, torch.float32, interpreted)
    cos, sin, _ = tables(s, d, torch.float32, interpreted)
    got = split_normalize_and_rotate(qkv, q_weight, k_weight, cos, sin, heads=heads, kv=kv, eps=EPS)

    exact = [x.detach().double().requires_grad_() for x in leaves]
    wide_cos, wide_sin = (torch.cat((x, x), -1).squeeze(2).double() for x in (cos, sin))
    q, k, v = exact[0].split((heads, kv, kv), 2)
    norms = []
    for weight in exact[1:]:
        norm = theirs.Qwen3RMSNorm(d, EPS).to(interpreted)
        del norm.weight
        norm.weight = weight
        norms.append(norm)
    q, k = norms[0](q).transpose(1, 2), norms[1](k).transpose(1, 2)
    q, k = (x.transpose(1, 2) for x in theirs.apply_rotary_pos_emb(q, k, wide_cos, wide_sin))
    want = q, k, v

    dy = [torch.randn_like(x) for x in got]
    should = torch.autograd.grad(want, exact, [x.double() for x in dy])
    for a, b in zip((*got, *torch.autograd.grad(got, leaves, dy)), (*want, *should)):
        assert (a.double() - b).norm() <= 5e-6 * b.norm()


@pytest.mark.gpu("unproven.head_norm.head_norm_kernel", "unproven.head_norm.head_norm_backward_kernel")
@pytest.mark.slow(every=2)
@pytest.mark.parametrize("memory", ["side by side", "apart"])
def test_at_training_sizes(training, memory):
    heads, kv, d = training.heads, training.kv, training.head_dim
    sizes, eps = (heads, kv, kv), 0.1  # large enough to matter in bf16
    cos, sin, turns = tables_of_training(training, d, 5e5)
    tensors = {"qkv": training.randn(training.batch, training.seq, sum(sizes), d)}
    tensors |= {f"{name}_weight": 1 + 0.1 * training.randn(d) for name in "qk"}
    weights = "q_weight", "k_weight"
    dy = training.randn(*tensors["qkv"].shape)

    def ours(qkv, q_weight, k_weight):
        return split_normalize_and_rotate(qkv, q_weight, k_weight, cos, sin, heads=heads, kv=kv, eps=eps)

    def exact(qkv, q_weight, k_weight):
        return definition(qkv, q_weight.double(), k_weight.double(), turns, heads, kv, eps)

    rows = training.tokens * heads
    training.check(
        lambda: results_of(ours, tensors, gradients_of(memory, dy, sizes), weights),  # written over, in place
        lambda: results_of(exact, wide(tensors), gradients_of("side by side", dy.float(), sizes)),
        {"y": bound(1), "y1": bound(1), "y2": 0.0, "dqkv": bound(1)}
        | {f"d{name}": bound(0, rows) for name in weights},
    )
