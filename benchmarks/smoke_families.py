"""The families of kernels that benchmarks/smoke_kernels.py checks: {name: inputs -> (check's name, check)}.

Inputs are made when a family comes to their check. A weight has the fp32 buffer that its gradient is added
to, as in training, filled with START.
"""

import math
from collections.abc import Callable, Iterator

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

from benchmarks.gpu_case import Inputs
from benchmarks.smoke_kernels import Check, Results, bound
from kernels import (
    adam,
    attention,
    cross_entropy,
    embedding,
    expert_order,
    fp8,
    fp8_formula,
    fp8_gemm,
    fp8_grouped,
    fp8_origin,
    grouped_gemm,
    head_norm,
    latent_heads,
    linear,
    newton_schulz,
    norm,
    partial_attention,
    permute,
    rope,
    router,
    swiglu,
)
from kernels.attention_libraries import library_attention, usable_libraries
from kernels.attention_mask import DocumentCounts, make_attention_mask
from kernels.rounding import ElementIndex

Checks = Iterator[tuple[str, Check]]
Named = dict[str, Tensor]
FP32, BF16 = torch.float32, torch.bfloat16
EPS = 1e-5
START = 1.0  # of a buffer for a weight's gradient


def results_of(
    function: Callable[..., Tensor | tuple[Tensor, ...]],
    tensors: Named,
    dys: tuple[Tensor, ...],
    weights: tuple[str, ...] = (),
) -> Results:
    """The outputs y, y1, ... of function(**tensors), and the gradients of the tensors for dys.

    weights: names of tensors that have a buffer for their gradient.
    """
    leaves = {name: tensor.detach().requires_grad_() for name, tensor in tensors.items()}
    buffers = {name: torch.full_like(tensors[name], START, dtype=FP32) for name in weights}
    for name, buffer in buffers.items():
        leaves[name].main_grad = buffer
        leaves[name].grad_is_written = True
    output = function(**leaves)
    outputs = output if isinstance(output, tuple) else (output,)
    torch.autograd.backward(outputs, dys)

    results = {f"y{number or ''}": y.detach() for number, y in enumerate(outputs)}
    for name, leaf in leaves.items():
        grad = buffers[name] - START if name in buffers else leaf.grad
        if grad is not None:
            results[f"d{name}"] = grad
    return results


def wide(tensors: Named) -> Named:
    """The same numbers in fp32."""
    return {name: tensor.float() for name, tensor in tensors.items()}


def check_of(
    ours: Callable[..., Tensor | tuple[Tensor, ...]],
    definition: Callable[..., Tensor | tuple[Tensor, ...]],
    tensors: Named,
    dys: tuple[Tensor, ...],
    bounds: dict[str, float],
    weights: tuple[str, ...] = (),
) -> Check:
    """Forward and backward of two functions of the same tensors."""
    wide_dys = tuple(dy.float() for dy in dys)
    return Check(
        ours=lambda: results_of(ours, tensors, dys, weights),
        definition=lambda: results_of(definition, wide(tensors), wide_dys),
        bounds=bounds,
    )


# ---- memory-bound kernels ----------------------------------------------------------------------------------


def norms(inputs: Inputs) -> Checks:
    """RMSNorm and LayerNorm, alone and after a residual, which is rounded once before the statistics."""
    hidden, tokens = inputs.size.hidden, inputs.size.tokens
    x, residual, dy, dtotal = (inputs.randn(tokens, hidden) for _ in range(4))
    scale = {"weight": 1 + 0.1 * inputs.randn(hidden)}
    shift = {"bias": 0.1 * inputs.randn(hidden)}
    one, two = bound(BF16, 1), bound(BF16, 2)
    summed, twice_summed = bound(BF16, 0, tokens), bound(BF16, 1, tokens)

    def rms(x: Tensor, weight: Tensor) -> Tensor:
        return F.rms_norm(x, (x.shape[-1],), weight, EPS)

    def layer(x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
        return F.layer_norm(x, (x.shape[-1],), weight, bias, EPS)

    check = check_of(
        lambda x, weight: norm.rms_norm(x, weight, EPS),
        rms,
        {"x": x, **scale},
        (dy,),
        {"y": one, "dx": one, "dweight": summed},
        ("weight",),
    )
    yield "rms_norm", check

    check = check_of(
        lambda x, residual, weight: norm.add_rms_norm(x, residual, weight, EPS),
        lambda x, residual, weight: (rms(x + residual, weight), x + residual),
        {"x": x, "residual": residual, **scale},
        (dy, dtotal),
        {"y": two, "y1": one, "dx": two, "dresidual": two, "dweight": twice_summed},
        ("weight",),
    )
    yield "rms_norm after a residual", check

    check = check_of(
        lambda x, weight, bias: norm.layer_norm(x, weight, bias, EPS),
        layer,
        {"x": x, **scale, **shift},
        (dy,),
        {"y": one, "dx": one, "dweight": summed, "dbias": summed},
        ("weight", "bias"),
    )
    yield "layer_norm", check

    check = check_of(
        lambda x, residual, weight, bias: norm.add_layer_norm(x, residual, weight, bias, EPS),
        lambda x, residual, weight, bias: (layer(x + residual, weight, bias), x + residual),
        {"x": x, "residual": residual, **scale, **shift},
        (dy, dtotal),
        {"y": two, "y1": one, "dx": two, "dresidual": two, "dweight": twice_summed, "dbias": summed},
        ("weight", "bias"),
    )
    yield "layer_norm after a residual", check

    size = inputs.size
    heads, dheads = (inputs.randn(size.batch, size.seq, size.heads, size.head_dim) for _ in range(2))
    check = check_of(
        lambda x, weight: norm.rms_norm(x, weight, EPS),
        rms,
        {"x": heads, "weight": 1 + 0.1 * inputs.randn(size.head_dim)},
        (dheads,),
        {"y": one, "dx": one, "dweight": bound(BF16, 0, tokens * size.heads)},
        ("weight",),
    )
    yield "rms_norm of heads", check


def ropes(inputs: Inputs) -> Checks:
    """The merged projection, split and rotated, and one tensor of heads."""
    size = inputs.size
    positions = torch.arange(size.seq, device=inputs.device).expand(size.batch, -1)
    frequencies = rope.frequencies(size.head_dim, 5e5).to(inputs.device)
    cos, sin = rope.cos_sin_tables(positions, frequencies, BF16)
    angles = positions[0][:, None, None] * frequencies  # [s, 1, d/2]
    turns = torch.polar(torch.ones_like(angles), angles)

    def rotated(x: Tensor) -> Tensor:
        """Each pair of channels as a complex number, turned by its angle at the position."""
        left, right = x.chunk(2, -1)
        turned = torch.complex(left.double(), right.double()) * turns
        return torch.cat((turned.real, turned.imag), -1).float()

    def split(qkv: Tensor) -> tuple[Tensor, ...]:
        q, k, v = qkv.split((size.heads, size.kv, size.kv), 2)
        return rotated(q), rotated(k), v

    one = bound(BF16, 1)
    heads = [size.heads, size.kv, size.kv]
    qkv = inputs.randn(size.batch, size.seq, sum(heads), size.head_dim)
    dq, dk, dv = (inputs.randn(size.batch, size.seq, n, size.head_dim) for n in heads)
    check = check_of(
        lambda qkv: rope.split_heads_and_apply_rope(qkv, cos, sin, size.heads, size.kv),
        split,
        {"qkv": qkv},
        (dq, dk, dv),
        {"y": one, "y1": one, "y2": 0.0, "dqkv": one},
    )
    yield "rope of a merged projection", check

    dqkv = inputs.randn(size.batch, size.seq, sum(heads), size.head_dim)
    wide_dqkv = tuple(dqkv.float().split(heads, 2))
    check = Check(
        ours=lambda: {"dqkv": rope.rope_backward(*dqkv.clone().split(heads, 2), cos, sin)},
        definition=lambda: results_of(split, {"qkv": qkv.float()}, wide_dqkv),
        bounds={"dqkv": one},
    )
    yield "rope, gradients side by side", check

    check = check_of(
        lambda x: rope.apply_rope(x, cos, sin), rotated, {"x": dq}, (dq,), {"y": one, "dx": one}
    )
    yield "rope of heads", check

    def normalized(qkv: Tensor, q_weight: Tensor, k_weight: Tensor) -> tuple[Tensor, ...]:
        q, k, v = qkv.split((size.heads, size.kv, size.kv), 2)
        width = (size.head_dim,)
        q = F.rms_norm(q, width, q_weight, EPS)
        k = F.rms_norm(k, width, k_weight, EPS)
        return rotated(q), rotated(k), v

    def normalized_by_us(qkv: Tensor, q_weight: Tensor, k_weight: Tensor) -> tuple[Tensor, ...]:
        return head_norm.split_normalize_and_rotate(
            qkv, q_weight, k_weight, cos, sin, heads=size.heads, kv=size.kv, eps=EPS
        )

    weights = {name: 1 + 0.1 * inputs.randn(size.head_dim) for name in ("q_weight", "k_weight")}
    terms = size.tokens * size.heads
    summed = {f"d{name}": bound(BF16, 0, terms) for name in weights}
    apart = dq, dk, dv
    together = inputs.randn(size.batch, size.seq, sum(heads), size.head_dim).split(heads, 2)
    for where, dys in (("apart", apart), ("side by side", together)):
        wide_dys = tuple(dy.float() for dy in dys)
        check = Check(
            ours=lambda dys=dys: results_of(
                normalized_by_us,
                {"qkv": qkv, **weights},
                side_by_side_copies(dys),
                ("q_weight", "k_weight"),
            ),
            definition=lambda dys=wide_dys: results_of(normalized, wide({"qkv": qkv, **weights}), dys),
            bounds={"y": one, "y1": one, "y2": 0.0, "dqkv": one, **summed},
        )
        yield f"head norm and rope, gradients {where}", check


def side_by_side_copies(parts: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
    """Copies, which a kernel may write over; parts of one tensor stay that."""
    if rope.side_by_side(*parts) is None:
        return tuple(part.clone() for part in parts)
    return torch.cat(parts, 2).split([part.shape[2] for part in parts], 2)


def latent_heads_of(inputs: Inputs) -> Checks:
    """Queries and keys of latent attention, in the sizes of DeepSeek; channels 2i and 2i + 1 are a pair."""
    size = inputs.size
    nope, turned, value, scale = size.head_dim, size.head_dim // 2, size.head_dim, 1.3
    positions = torch.arange(size.seq, device=inputs.device).expand(size.batch, -1)
    frequencies = rope.frequencies(turned, 1e4).to(inputs.device)
    cos, sin = rope.cos_sin_tables(positions, frequencies, BF16)
    angles = positions[0][:, None, None] * frequencies  # [s, 1, rope/2]
    turns = torch.polar(torch.ones_like(angles), angles)
    one = bound(BF16, 1)

    def rotated(x: Tensor) -> Tensor:
        pairs = torch.view_as_complex(x.double().unflatten(-1, (-1, 2)).contiguous())
        return torch.view_as_real(pairs * turns).flatten(-2).float()

    def queries(q: Tensor) -> Tensor:
        own, rest = q.split((nope, turned), -1)
        return torch.cat((own, rotated(rest)), -1)

    shape = size.batch, size.seq, size.heads
    for name, factor in (("", 1.0), (", scaled", scale)):
        check = check_of(
            lambda q, factor=factor: latent_heads.rotate_heads(
                q, cos, sin, nope_dim=nope, pairs=True, scale=factor
            ),
            lambda q, factor=factor: queries(q) * factor,
            {"q": inputs.randn(*shape, nope + turned)},
            (inputs.randn(*shape, nope + turned),),
            {"y": one, "dq": one},
        )
        yield f"latent queries{name}", check

    def keys(kv: Tensor, rope_key: Tensor) -> tuple[Tensor, Tensor]:
        own, values = kv.split((nope, value), -1)
        shared = rotated(rope_key[:, :, None]).expand(-1, -1, size.heads, -1)
        return torch.cat((own, shared), -1), values

    check = check_of(
        lambda kv, rope_key: latent_heads.keys_and_values(
            kv, rope_key, (cos, sin), nope_dim=nope, pairs=True
        ),
        keys,
        {"kv": inputs.randn(*shape, nope + value), "rope_key": inputs.randn(*shape[:2], turned)},
        (inputs.randn(*shape, nope + turned), inputs.randn(*shape, value)),
        {"y": one, "y1": 0.0, "dkv": one, "drope_key": one},
    )
    yield "latent keys", check


def activations(inputs: Inputs) -> Checks:
    size = inputs.size
    gate_up = inputs.randn(size.tokens, 2 * size.ffn)
    dy = inputs.randn(size.tokens, size.ffn)
    one = bound(BF16, 1)

    def gated(gate_up: Tensor) -> Tensor:
        gate, up = gate_up.chunk(2, -1)
        return F.silu(gate) * up

    check = check_of(swiglu.swiglu, gated, {"gate_up": gate_up}, (dy,), {"y": one, "dgate_up": one})
    yield "swiglu", check

    check = check_of(
        swiglu.weighted_swiglu,
        lambda gate_up, weight: gated(gate_up) * weight[:, None],
        {"gate_up": gate_up, "weight": torch.rand(size.tokens, device=inputs.device)},
        (dy,),
        {"y": one, "dgate_up": one, "dweight": bound(BF16, 0, size.ffn)},
    )
    yield "swiglu with a router's weight", check

    check = check_of(
        swiglu.gelu,
        lambda x: F.gelu(x, approximate="tanh"),
        {"x": gate_up},
        (gate_up,),
        {"y": one, "dx": one},
    )
    yield "gelu", check


def cross_entropies(inputs: Inputs) -> Checks:
    """Logits are rounded, their gradient, and each product of it. Chunks are not all of one size."""
    size = inputs.size
    for vocab, padding, rows in ((size.vocab, 0, size.rows), (4 * size.vocab - 16, 64, size.rows // 4)):
        hidden = inputs.randn(rows, size.hidden)
        weight = inputs.randn(vocab, size.hidden) / math.sqrt(size.hidden)  # logits of about 1
        targets = torch.randint(vocab - padding, (rows,), device=inputs.device)
        targets[:: rows // 4] = cross_entropy.IGNORE_INDEX
        last, scale, chunk = vocab - padding, 1 / rows, rows // 3

        def ours(hidden: Tensor, weight: Tensor) -> Tensor:
            return cross_entropy.linear_cross_entropy(hidden, weight, targets, scale, last, chunk=chunk)

        def definition(hidden: Tensor, weight: Tensor) -> Tensor:
            logits = hidden @ weight[:last].t()
            return F.cross_entropy(logits, targets, reduction="sum") * scale

        check = check_of(
            ours,
            definition,
            {"hidden": hidden, "weight": weight},
            (torch.ones((), device=inputs.device),),
            {"y": bound(BF16, 1), "dhidden": bound(BF16, 3), "dweight": bound(BF16, 2, rows)},
            ("weight",),
        )
        yield f"cross entropy, vocabulary {vocab:,}, of which {padding} are padding", check


def embeddings(inputs: Inputs) -> Checks:
    """The gradient of a table: frequent ids have many rows to add."""
    size = inputs.size
    frequent = torch.randint(3, (size.batch, size.seq), device=inputs.device)
    spread = torch.randint(size.vocab, (size.batch, size.seq), device=inputs.device)
    ids = torch.where(torch.rand(size.batch, size.seq, device=inputs.device) < 0.5, frequent, spread)
    check = check_of(
        lambda weight: embedding.embedding(ids, weight),
        lambda weight: F.embedding(ids, weight),
        {"weight": inputs.randn(size.vocab, size.hidden)},
        (inputs.randn(size.batch, size.seq, size.hidden),),
        {"y": 0.0, "dweight": bound(BF16, 0, size.tokens)},
        ("weight",),
    )
    yield "embedding", check


def optimizers(inputs: Inputs) -> Checks:
    """AdamW: a dozen operations in fp32, each rounded. States in bf16 go to one of the two neighbours."""
    n, device = inputs.size.params - 13, inputs.device
    param, grad, exp_avg = (torch.randn(n, device=device) for _ in range(3))
    exp_avg_sq = torch.rand(n, device=device)
    numbers = {"lr": 1e-2, "beta1": 0.9, "beta2": 0.95, "eps": 1e-8, "weight_decay": 0.1, "step": 7}
    scale = torch.full((), 0.5, device=device)
    is_good = torch.ones((), dtype=torch.bool, device=device)

    def updated(states: Named, **options: object) -> Results:
        states = {name: state.clone() for name, state in states.items()}
        adam.adamw(*states.values(), **numbers, grad_scale=scale, is_good=is_good, **options)
        return states

    def definition(states: Named) -> Results:
        """The update in fp64 (arXiv 1711.05101, algorithm 2)."""
        weight, g, m, v = (state.double() for state in states.values())
        g = g * 0.5
        m = 0.9 * m + 0.1 * g
        v = 0.95 * v + 0.05 * g * g
        step = (m / (1 - 0.9**7)) / ((v / (1 - 0.95**7)).sqrt() + 1e-8)
        weight = weight * (1 - 1e-2 * 0.1) - 1e-2 * step
        return {"param": weight, "exp_avg": m, "exp_avg_sq": v, "copy": weight}

    states = {"param": param, "grad": grad, "exp_avg": exp_avg, "exp_avg_sq": exp_avg_sq}
    fp32 = bound(FP32, 12)

    def with_copy() -> Results:
        copy = torch.empty(n, dtype=BF16, device=device)
        return {**updated(states, weight_copy=copy), "copy": copy}

    bounds = {"param": fp32, "exp_avg": fp32, "exp_avg_sq": fp32, "copy": bound(BF16, 1)}
    yield "adamw", Check(with_copy, lambda: definition(states), bounds)

    narrow = {name: state if name == "grad" else state.bfloat16() for name, state in states.items()}
    place = ElementIndex(salt=3, base=5, width=n, stride=n)
    two = bound(BF16, 2)  # up or down
    check = Check(
        lambda: updated(narrow, element_index=place),
        lambda: definition(narrow),
        {"param": two, "exp_avg": two, "exp_avg_sq": two},
    )
    yield "adamw, states in bf16", check


def permutations(inputs: Inputs) -> Checks:
    """Rows of a mixture by expert and back to their tokens; with slots that have no row, as after a drop."""
    size, device = inputs.size, inputs.device
    for drops in (False, True):
        num_slots = size.tokens * size.top_k
        num_rows = num_slots - num_slots // 10 if drops else num_slots
        order = torch.randperm(num_slots, device=device)[:num_rows]  # the slot of each row
        source = order // size.top_k
        slots = torch.full((num_slots,), -1, device=device)
        slots[order] = torch.arange(num_rows, device=device)
        slots = slots.view(size.tokens, size.top_k)

        def unpermuted(rows: Tensor) -> Tensor:
            zeros = torch.zeros(size.tokens, rows.shape[1], device=device)
            return zeros.index_add(0, source, rows)

        x, dx = (inputs.randn(size.tokens, size.hidden) for _ in range(2))
        rows, drows = (inputs.randn(num_rows, size.hidden) for _ in range(2))
        one = bound(BF16, 1)
        suffix = ", some without a row" if drops else ""
        check = check_of(
            lambda x: permute.permute(x, source, slots, not drops),
            lambda x: x[source],
            {"x": x},
            (drows,),
            {"y": 0.0, "dx": one},
        )
        yield f"permute{suffix}", check

        check = check_of(
            lambda rows: permute.unpermute(rows, source, slots, not drops),
            unpermuted,
            {"rows": rows},
            (dx,),
            {"y": one, "drows": 0.0},
        )
        yield f"unpermute{suffix}", check


# ---- matrix products ---------------------------------------------------------------------------------------


def linears(inputs: Inputs) -> Checks:
    """A linear layer as it runs here, and the weight gradient by each of the ways that a GPU has."""
    size = inputs.size
    x, dy = inputs.randn(size.tokens, size.hidden), inputs.randn(size.tokens, size.ffn)
    weight = inputs.randn(size.ffn, size.hidden)
    summed = bound(BF16, 0, size.tokens)
    check = check_of(
        linear.linear,
        F.linear,
        {"x": x, "weight": weight},
        (dy,),
        {"y": bound(BF16, 1, size.hidden), "dx": bound(BF16, 1, size.ffn), "dweight": summed},
        ("weight",),
    )
    yield "linear", check

    def definition() -> Results:
        return {"dweight": dy.float().t() @ x.float()}

    ways = {} if linear.skewed(dy, x) else {"weight gradient, own kernel": linear.launch_wgrad}
    if inputs.device.type == "cuda":
        ways["weight gradient, NVIDIA's library"] = linear.write_by_library
    for name, write in ways.items():

        def added(write=write) -> Results:
            into = torch.full((size.ffn, size.hidden), START, device=inputs.device)
            return {"dweight": write(into, dy, x, add=True) - START}

        def written(write=write) -> Results:
            into = torch.full((size.ffn, size.hidden), float("nan"), device=inputs.device)
            return {"dweight": write(into, dy, x, add=False)}

        for which, ours in (("", added), (", the first of a step", written)):
            yield name + which, Check(ours, definition, {"dweight": summed})


def symmetric_products(inputs: Inputs) -> Checks:
    """Of Muon's Newton-Schulz iteration: x x^T, and with a matrix that is added."""
    size = inputs.size
    x = inputs.randn(size.hidden, size.ffn)
    gram = (x @ x.t()) / size.ffn
    bounds = {"y": bound(BF16, 1, size.ffn)}

    def definition(scale: float, add: Tensor | None, beta: float) -> Results:
        product = scale * (x.float() @ x.float().t())
        return {"y": product if add is None else product + beta * add.float()}

    for name, args in {"x x^T": (1.0, None, 0.0), "c x x^T + b a": (0.5, gram, -2.0)}.items():
        check = Check(
            lambda args=args: {"y": newton_schulz.symmetric_product(x, *args)},
            lambda args=args: definition(*args),
            bounds,
        )
        yield f"symmetric product, {name}", check


def expert_counts(inputs: Inputs) -> list[int]:
    """Rows of each expert: of all sizes, the second has none."""
    size = inputs.size
    num_rows = size.tokens * size.top_k
    shares = torch.arange(1, size.experts + 1, dtype=torch.float64) ** 2
    shares[1] = 0
    counts = (shares / shares.sum() * num_rows).floor().to(torch.int64)
    counts[-1] += num_rows - int(counts.sum())
    return counts.tolist()


def expert_products(x: Tensor, weight: Tensor, counts: list[int]) -> Tensor:
    """x [m, n], weight [experts * o, n] -> [m, o]: one product after another."""
    experts = weight.view(len(counts), -1, x.shape[1])
    parts = [rows @ expert.t() for rows, expert in zip(x.split(counts), experts)]
    return torch.cat(parts)


def grouped_products(inputs: Inputs) -> Checks:
    """Products of a mixture, whose experts have unequal numbers of rows; the host knows them, or not."""
    size = inputs.size
    counts = expert_counts(inputs)
    gate_up = 2 * size.expert_ffn
    tensors = {
        "x": inputs.randn(sum(counts), size.hidden),
        "weight": inputs.randn(size.experts * gate_up, size.hidden),
    }
    dy = inputs.randn(sum(counts), gate_up)
    bounds = {
        "y": bound(BF16, 1, size.hidden),
        "dx": bound(BF16, 1, gate_up),
        "dweight": bound(BF16, 0, max(counts)),
    }
    on_device = torch.tensor(counts, device=inputs.device)
    for name, known in {"rows known": counts, "rows on the device": on_device}.items():
        check = check_of(
            lambda x, weight, known=known: grouped_gemm.grouped_linear(x, weight, known),
            lambda x, weight: expert_products(x, weight, counts),
            tensors,
            (dy,),
            bounds,
            ("weight",),
        )
        yield f"grouped products, {name}", check

    # rows of tokens, read where they lie and summed where they belong
    slots = torch.randperm(sum(counts), device=inputs.device).view(size.tokens, size.top_k)
    source = torch.empty(sum(counts), dtype=torch.int64, device=inputs.device)
    source[slots] = torch.arange(size.tokens, device=inputs.device)[:, None]
    order = permute.RowOrder(source, slots)
    check = check_of(
        lambda x, weight: grouped_gemm.grouped_linear(x, weight, on_device, gather=order),
        lambda x, weight: expert_products(x[source], weight, counts),
        tensors | {"x": inputs.randn(size.tokens, size.hidden)},
        (dy,),
        bounds | {"dx": bound(BF16, 2, gate_up)},
        ("weight",),
    )
    yield "grouped products, gathered rows", check
    check = check_of(
        lambda x, weight: grouped_gemm.grouped_linear(x, weight, on_device, combine=order),
        lambda x, weight: expert_products(x, weight, counts)[slots].sum(1),
        tensors,
        (inputs.randn(size.tokens, gate_up),),
        bounds | {"y": bound(BF16, 2, size.hidden)},
        ("weight",),
    )
    yield "grouped products, combined rows", check


# ---- the router of a mixture -------------------------------------------------------------------------------

AUX_LOSS, Z_LOSS = 0.3, 0.1  # large: their gradients count as much as those of the weights
LOSS_SCALE = 0.125
TWO_HALVES = 2.0**-16  # of a number in fp32 that a product reads as two in bf16


def routers(inputs: Inputs) -> Checks:
    """With the rules of Mixtral and of DeepSeek-V3: the choice and its sums, then the gradients."""
    experts, top_k = inputs.size.experts, inputs.size.top_k
    groups = min(8, experts // 2)
    limited = router.RoutingRule(top_k, sigmoid=True, groups=groups, top_groups=groups // 2, scale=2.5)
    for name, rule in {"softmax": router.RoutingRule(top_k), "sigmoid, groups": limited}.items():
        yield f"router, {name}", routing_choice(inputs, rule)
        yield f"router, {name}: gradients", routing_gradients(inputs, rule)


def routing_choice(inputs: Inputs, rule: router.RoutingRule) -> Check:
    """Which experts a token gets, with which weights; sums over the counted tokens, and the statistics.

    No two logits of a token are near each other, nor are two of its groups: rounding decides nothing.
    """
    size, device = inputs.size, inputs.device
    b, s, experts = size.batch, size.seq, size.experts
    shape = (b, s, rule.groups, experts // rule.groups)
    rank_of_group = torch.rand(shape[:3], device=device).argsort(-1)[..., None]
    rank_in_group = torch.rand(shape, device=device).argsort(-1)
    logits = (rank_of_group + 0.9 * rank_in_group / shape[-1] - 0.4 * rule.groups).flatten(-2)
    group = torch.arange(experts, device=device) // shape[-1]
    bias = 2.0 * (group % 3 == 1).double() if rule.sigmoid else None
    counted = torch.rand(b, s, device=device) < 0.8
    scale = torch.tensor(LOSS_SCALE, device=device)

    def ours() -> Results:
        choice = router.choose_experts(logits, rule, bias, counted)
        assert choice.sums is not None  # there are counted tokens
        losses = {"aux_loss": AUX_LOSS, "z_loss": Z_LOSS}
        stats, load = router.router_statistics(choice.sums, scale, **losses, counts=choice.sums.counts)
        assert load is not None  # it is taken from the counts
        results = {"index": choice.index, "weights": choice.weights, "stats": stats, "load": load}
        return results | choice.sums._asdict()

    def definition() -> Results:
        scores = logits.sigmoid() if rule.sigmoid else logits.softmax(-1)
        by_group = (scores if bias is None else scores + bias.float()).view(shape)
        if rule.groups > 1:
            score_of_group = by_group.sort(-1, descending=True).values[..., :2].sum(-1)
            rank = score_of_group.argsort(-1, descending=True).argsort(-1)
            by_group = by_group.masked_fill((rank >= rule.top_groups)[..., None], -math.inf)
        index = by_group.flatten(-2).argsort(-1, descending=True)[..., : rule.top_k]
        chosen = scores.gather(-1, index)

        shares = scores / scores.sum(-1, keepdim=True)
        hits = F.one_hot(index, experts).sum(2)  # [b, s, experts]
        sums = {
            "counts": (hits * counted[..., None]).sum(1).float(),
            "shares": (shares * counted[..., None]).sum(1),
            "squares": (logits.logsumexp(-1).square() * counted).sum(1),
            "entropy": -((shares * shares.log()).sum(-1) * counted).sum(1),
        }
        load = experts * sums["counts"] / sums["counts"].sum(-1, keepdim=True)
        balance = AUX_LOSS * LOSS_SCALE * (sums["shares"] * load).sum()
        z = Z_LOSS * LOSS_SCALE * sums["squares"].sum()
        figures = torch.stack((torch.zeros_like(z), sums["entropy"].sum(), balance, z))
        stats = torch.cat((sums["counts"].sum(0), figures))
        weights = rule.scale * chosen / chosen.sum(-1, keepdim=True)
        return {"index": index, "weights": weights, "stats": stats, "load": load} | sums

    few, many = bound(FP32, 8, experts), bound(FP32, 8, experts + b * s)
    exact = {"index": 0.0, "counts": 0.0}
    rounded = {"weights": few, "load": few, "stats": many, "shares": many, "squares": many, "entropy": many}
    return Check(ours, definition, exact | rounded)


def routing_gradients(inputs: Inputs, rule: router.RoutingRule) -> Check:
    """Logits, and the gradients of x and W. The choice is given: rounding of x W^T may not change it."""
    size, device = inputs.size, inputs.device
    b, s, experts = size.batch, size.seq, size.experts
    tensors = {
        "x": inputs.randn(b, s, size.hidden),
        "weight": inputs.randn(experts, size.hidden) / math.sqrt(size.hidden),
    }
    index = torch.rand(b, s, experts, device=device).argsort(-1)[..., : rule.top_k].contiguous()
    dweights = torch.randn(b, s, rule.top_k, device=device)
    load = torch.rand(b, experts, device=device) + 0.5
    counted = torch.rand(b, s, device=device) < 0.8
    scale = torch.tensor(LOSS_SCALE, device=device)
    losses = router.RouterLosses(counted, scale, load, AUX_LOSS, Z_LOSS)

    def ours() -> Results:
        logits = router.router_logits(**tensors)
        choice = router.RouterChoice(index, torch.zeros_like(dweights), None)

        def weights_of(x: Tensor, weight: Tensor) -> Tensor:
            return router.routed_weights(x, weight, logits, choice, rule, losses)

        return {"logits": logits} | results_of(weights_of, tensors, (dweights,), ("weight",))

    def definition() -> Results:
        x, weight = (tensor.float().requires_grad_() for tensor in tensors.values())
        logits = x @ weight.t()
        scores = logits.sigmoid() if rule.sigmoid else logits.softmax(-1)
        chosen = scores.gather(-1, index)
        shares = scores / scores.sum(-1, keepdim=True)
        total = (rule.scale * chosen / chosen.sum(-1, keepdim=True) * dweights).sum()
        factor = LOSS_SCALE * counted
        total = total + AUX_LOSS * (factor[..., None] * shares * load[:, None]).sum()
        total = total + Z_LOSS * (factor * logits.logsumexp(-1).square()).sum()
        dx, dweight = torch.autograd.grad(total, (x, weight))
        return {"logits": logits.detach(), "dx": dx, "dweight": dweight}

    bounds = {
        "logits": bound(FP32, 0, size.hidden),
        "dx": bound(BF16, 1, 2 * experts) + TWO_HALVES,
        "dweight": bound(BF16, 0, b * s) + TWO_HALVES,
    }
    return Check(ours, definition, bounds)


def expert_orders(inputs: Inputs) -> Checks:
    """Choices in the order of their experts, of which some are chosen more often: a stable sort's."""
    size, device = inputs.size, inputs.device
    appeal = torch.linspace(0, 0.5, size.experts, device=device)
    numbers = torch.rand(size.tokens, size.experts, device=device) + appeal
    index = numbers.argsort(-1)[:, : size.top_k].contiguous()

    def ours() -> Results:
        rows, choices, rows_per_expert = expert_order.order_by_expert(index, size.experts)
        found = {"tokens": rows.source, "slots": rows.slots, "choices": choices.source}
        return found | {"counts": rows_per_expert}

    def definition() -> Results:
        choices = index.flatten().sort(stable=True).indices
        found = {"tokens": choices // size.top_k, "slots": choices.argsort().view(index.shape)}
        return found | {"choices": choices, "counts": F.one_hot(index, size.experts).sum((0, 1))}

    yield "order of rows by expert", Check(
        ours, definition, dict.fromkeys(("tokens", "slots", "choices", "counts"), 0.0)
    )


# ---- fp8 ---------------------------------------------------------------------------------------------------
# u: 2^-4 of e4m3, 2^-3 of e5m2. Sums of products of 8-bit numbers keep 14 bits on Hopper (arXiv 2412.19437,
# 3.3.2): each step of 32 columns may cut 2^-13.

SUM_BITS = 2.0**-13
SUM_COLUMNS = 32


def fp8_casts(inputs: Inputs) -> Checks:
    """Each kind of scales, of a matrix and its transposed view, with the definition's bits."""
    x = inputs.randn(inputs.size.tokens, inputs.size.hidden)
    for kind in fp8.SCALE_KINDS:
        for dtype in (fp8.E4M3, fp8.E5M2):
            for view in ("", " transposed"):
                matrix = x.t() if view else x

                def ours(matrix=matrix, kind=kind, dtype=dtype) -> Results:
                    q, scale = fp8.quantize(matrix, kind, dtype)
                    return {"x": fp8.dequantize(q, scale, kind), "q": q.view(torch.uint8), "scale": scale}

                def definition(matrix=matrix, kind=kind, dtype=dtype) -> Results:
                    q, scale = fp8.quantize_reference(matrix, kind, dtype)
                    return {"x": matrix.float(), "q": q.view(torch.uint8), "scale": scale}

                bounds = {"x": bound(dtype, 1), "q": 0.0, "scale": 0.0}
                name = str(dtype).removeprefix("torch.float8_")
                yield f"fp8 {name}, a scale a {kind}{view}", Check(ours, definition, bounds)


def fp8_formulas(inputs: Inputs) -> Checks:
    """What an fp8 linear computes instead of reading it, with the bits of the result in memory: q and scales
    of both directions."""
    size = inputs.size
    gate_up, dy = inputs.randn(size.tokens, 2 * size.ffn), inputs.randn(size.tokens, size.ffn)
    x, weight = inputs.randn(size.tokens, size.hidden), 1 + 0.1 * inputs.randn(size.hidden)
    heads = (size.heads, size.kv, size.kv)
    parts = [inputs.randn(size.batch, size.seq, count, size.head_dim) for count in heads]
    positions = torch.arange(size.seq, device=inputs.device).expand(size.batch, -1)
    angles = rope.cos_sin_tables(positions, rope.frequencies(size.head_dim, 5e5).to(inputs.device), BF16)
    width = sum(heads) * size.head_dim
    shape = size.batch, size.seq, width

    cases: dict[str, tuple[Callable[[str], Tensor], Callable[[], Tensor]]] = {
        "norm": (
            lambda kind: norm.launch_unwritten(x, None, weight, None, EPS, kind)[0],
            lambda: norm.launch_forward(x, None, weight, None, EPS)[0],
        ),
        "swiglu": (
            lambda kind: unwritten_of("swiglu", (size.tokens, size.ffn), gate_up),
            lambda: swiglu.launch_swiglu(gate_up),
        ),
        "swiglu_backward": (
            lambda kind: unwritten_of("swiglu_backward", (size.tokens, 2 * size.ffn), gate_up, dy),
            lambda: swiglu.launch_swiglu_backward(dy, gate_up),
        ),
        "rope_backward": (
            lambda kind: rope.unwritten_gradient(*parts, *angles, shape),
            lambda: rope.rope_backward(*parts, *angles).view(shape),
        ),
    }
    for formula, (unwritten, written) in cases.items():
        for kind in ("tensor", "row"):

            def both_ways(result: Callable[[], Tensor], kind: str = kind) -> Results:
                origin = fp8_origin.origin_of(result())
                maxima = fp8_formula.maxima_of(origin, kind, both=True)
                pair = fp8_formula.quantize_origin_pair(origin, kind, fp8.E4M3, fp8.BLOCK_SIDE, maxima)
                return {
                    "q": pair.ahead.q.view(torch.uint8),
                    "scale": pair.ahead.scale,
                    "q_back": pair.back.q.view(torch.uint8),
                    "scale_back": pair.back.scale,
                }

            check = Check(
                ours=lambda f=unwritten, k=kind, both=both_ways: both(lambda: f(k)),
                definition=lambda f=written, both=both_ways: both(f),
                bounds=dict.fromkeys(("q", "scale", "q_back", "scale_back"), 0.0),
            )
            yield f"fp8 {formula}, a scale a {kind}", check


def unwritten_of(formula: str, shape: tuple[int, int], *operands: Tensor) -> Tensor:
    """The result of a formula, left to its reader."""
    origin = fp8_origin.Origin(formula, shape, operands)
    return fp8_origin.unwritten(origin, shape, like=operands[0])


def fp8_bound(columns: int, step: int) -> float:
    """Of a product with an output in bf16, whose tensor cores sum `step` columns before fp32 does."""
    return bound(BF16, 1, columns) + min(columns, step) / SUM_COLUMNS * SUM_BITS


def columns_of_sums(a: fp8_gemm.QuantizedMatrix) -> int:
    """Columns that the tensor cores sum before fp32 does, in a product with a as its left operand."""
    if a.kind == "group":
        return fp8_gemm.STEP
    return a.q.shape[1] if fp8_gemm.takes_fast_accumulation(a) else fp8_gemm.EXACT


def fp8_products(inputs: Inputs) -> Checks:
    """Products of quantized operands, beside those of the numbers that they stand for."""
    size = inputs.size
    x, weight = inputs.randn(size.tokens, size.hidden), inputs.randn(size.ffn, size.hidden)
    side = fp8.BLOCK_SIDE
    kinds = {"tensor": ("tensor", "tensor"), "row": ("row", "row"), "block": ("group", "block")}
    for name, (kind, weight_kind) in kinds.items():
        for dtype in (fp8.E4M3, fp8.E5M2):
            a = fp8_gemm.quantize_operand(x, kind, dtype, side)
            b = fp8_gemm.quantize_operand(weight, weight_kind, fp8.E4M3, side)

            def definition(a=a, b=b) -> Results:
                return {"y": a.dequantized() @ b.dequantized().t()}

            def added(a=a, b=b) -> Results:
                into = torch.full((size.tokens, size.ffn), START, device=inputs.device)
                return {"y": fp8_gemm.write_scaled_product(into, a, b, BF16, add=True) - START}

            check = Check(
                lambda a=a, b=b: {"y": fp8_gemm.scaled_product(a, b, BF16)},
                definition,
                {"y": fp8_bound(size.hidden, columns_of_sums(a))},
            )
            dtype_name = str(dtype).removeprefix("torch.float8_")
            yield f"fp8 product, {dtype_name}, a scale a {name}", check

            sums = min(size.hidden, columns_of_sums(a)) / SUM_COLUMNS * SUM_BITS
            check = Check(added, definition, {"y": bound(FP32, 4, size.hidden) + sums})
            yield f"fp8 product added to fp32, {dtype_name}, a scale a {name}", check


def fp8_grouped_products(inputs: Inputs) -> Checks:
    size = inputs.size
    counts = expert_counts(inputs)
    rows = grouped_gemm.row_tiles(counts, sum(counts), inputs.device)
    x = inputs.randn(sum(counts), size.hidden)
    weight = inputs.randn(size.experts, 2 * size.expert_ffn, size.hidden)
    for recipe, (kind, weight_kind, _) in fp8_grouped.RECIPES.items():
        a = fp8_gemm.quantize_operand(x, kind, fp8.E4M3, fp8.BLOCK_SIDE)
        stacked = weight.flatten(0, 1)
        b = fp8_grouped.quantized_experts(stacked, size.experts, weight_kind, fp8.BLOCK_SIDE).ahead

        def ours(a=a, b=b) -> Results:
            return {"y": fp8_grouped.grouped_product(a, b, rows, size.experts, BF16)}

        def definition(a=a, b=b) -> Results:
            by_expert = b.dequantized().view(size.experts, -1, size.hidden)
            return {"y": expert_products(a.dequantized(), by_expert, counts)}

        bounds = {"y": fp8_bound(size.hidden, columns_of_sums(a))}
        yield f"fp8 grouped product, {recipe}", Check(ours, definition, bounds)


# ---- attention ---------------------------------------------------------------------------------------------


def attention_checks(
    inputs: Inputs,
    name: str,
    *,
    kv: int,
    qk_dim: int,
    value_dim: int,
    window: int | None = None,
    documents: bool = False,
    kinds: tuple[str, ...] = ("triton",),
) -> Checks:
    """Attention by each of `kinds`. Probabilities, their gradients and outputs are rounded."""
    size, device = inputs.size, inputs.device
    b, s, h = size.batch, size.seq, size.heads
    q, k = inputs.randn(b, s, h, qk_dim), inputs.randn(b, s, kv, qk_dim)
    v, dy = inputs.randn(b, s, kv, value_dim), inputs.randn(b, s, h, value_dim)

    # the mask, and which keys a query sees by its definition
    docs = None
    places = torch.arange(s, device=device)
    sees = (places[:, None] >= places)[None].repeat(b, 1, 1)  # [b, s, s]
    if window is not None:
        sees &= places[:, None] - places < window
    if documents:
        starts = torch.rand(b, s, device=device) < 8 / s  # of about eight documents, which begin anywhere
        docs = starts.cumsum(1).to(torch.int32)
        sees &= docs[:, :, None] == docs[:, None]
    counts = None if docs is None else count_documents(docs)
    mask = make_attention_mask(0, s, 0, s, window, docs, device, counts)

    def definition() -> Results:
        """Sequence by sequence: all scores at once would not fit."""
        parts = []
        for row in range(b):
            here = slice(row, row + 1)
            one = {"q": q[here].float(), "k": k[here].float(), "v": v[here].float()}

            def sdpa(q: Tensor, k: Tensor, v: Tensor, row=row) -> Tensor:
                q, k, v = (x.transpose(1, 2) for x in (q, k, v))
                k, v = (x.repeat_interleave(h // kv, 1) for x in (k, v))
                with sdpa_kernel([SDPBackend.MATH]):
                    return F.scaled_dot_product_attention(q, k, v, sees[row]).transpose(1, 2)

            parts.append(results_of(sdpa, one, (dy[here].float(),)))
        return {key: torch.cat([part[key] for part in parts]) for key in parts[0]}

    two, three = bound(BF16, 2, s), bound(BF16, 3, s)
    bounds = {"y": two, "dq": three, "dk": three, "dv": three}
    for kind in kinds:
        check = Check(
            ours=lambda kind=kind: results_of(
                lambda q, k, v: attention.attention(q, k, v, mask, kind), {"q": q, "k": k, "v": v}, (dy,)
            ),
            definition=definition,
            bounds=bounds,
            is_ours=kind == "triton",
        )
        yield f"attention, {name}, {kind}", check

    # of several libraries for packed documents, auto would take the first alone
    if documents:
        for choice in usable_libraries(q, k, v, mask):
            check = Check(
                ours=lambda choice=choice: results_of(
                    lambda q, k, v: library_attention(choice, q, k, v, mask), {"q": q, "k": k, "v": v}, (dy,)
                ),
                definition=definition,
                bounds=bounds,
                is_ours=False,
            )
            yield f"attention, {name}, {choice.library.name}", check


def count_documents(docs: Tensor) -> DocumentCounts:
    """docs [b, s]: the document of each token."""
    lengths = [row.unique_consecutive(return_counts=True)[1] for row in docs]
    return DocumentCounts(sum(map(len, lengths)), int(torch.cat(lengths).max()))


def plain_attention(inputs: Inputs) -> Checks:
    size, d = inputs.size, inputs.size.head_dim
    kinds = ("triton", "auto") if inputs.device.type == "cuda" else ("triton",)
    yield from attention_checks(inputs, "causal", kv=size.heads, qk_dim=d, value_dim=d, kinds=kinds)


def grouped_attention(inputs: Inputs) -> Checks:
    size, d = inputs.size, inputs.size.head_dim
    kinds = ("triton", "auto") if inputs.device.type == "cuda" else ("triton",)
    yield from attention_checks(inputs, "grouped queries", kv=size.kv, qk_dim=d, value_dim=d, kinds=kinds)
    yield from attention_checks(inputs, "half the head dim", kv=size.kv, qk_dim=d // 2, value_dim=d // 2)


def masked_attention(inputs: Inputs) -> Checks:
    size, d = inputs.size, inputs.size.head_dim
    window = size.seq // 4 - 3
    yield from attention_checks(inputs, "window", kv=size.kv, qk_dim=d, value_dim=d, window=window)
    yield from attention_checks(inputs, "documents", kv=size.kv, qk_dim=d, value_dim=d, documents=True)


def latent_attention(inputs: Inputs) -> Checks:
    size, d = inputs.size, inputs.size.head_dim
    wide_dim = d + d // 2
    yield from attention_checks(inputs, "latent", kv=size.heads, qk_dim=wide_dim, value_dim=d)
    yield from attention_checks(inputs, "twice the head dim", kv=size.kv, qk_dim=2 * d, value_dim=2 * d)


def parts_of_attention(inputs: Inputs) -> Checks:
    """Attention over two parts of the keys, merged as a ring does it, and the logsumexp."""
    size, device = inputs.size, inputs.device
    b, s, h, d = size.batch, size.seq, size.heads, size.head_dim
    half = s // 2
    q = inputs.randn(b, half, h, d)  # the second half of the queries
    k, v = (inputs.randn(b, s, size.kv, d) for _ in range(2))

    def ours() -> Results:
        first = make_attention_mask(half, half, 0, half, None, None, device)
        second = make_attention_mask(half, half, half, half, None, None, device)
        out, lse = partial_attention.attention_part(q, k[:, :half], v[:, :half], first)
        other, other_lse = partial_attention.attention_part(q, k[:, half:], v[:, half:], second)
        lse = lse.contiguous()
        partial_attention.merge_partial(out, lse, other, other_lse)
        return {"y": out, "lse": lse}

    def definition() -> Results:
        places = torch.arange(s, device=device)
        sees = places[half:, None] >= places
        outs, sums = [], []
        for row in range(b):
            keys, values = (x[row].float().repeat_interleave(h // size.kv, 1) for x in (k, v))
            scores = torch.einsum("qhd,khd->hqk", q[row].float(), keys) / math.sqrt(d)
            scores = scores.masked_fill(~sees, -math.inf)
            outs.append(torch.einsum("hqk,khd->qhd", scores.softmax(-1), values))
            sums.append(scores.logsumexp(-1).t())
        return {"y": torch.stack(outs), "lse": torch.stack(sums)}

    yield (
        "attention in two parts, merged",
        Check(ours, definition, {"y": bound(BF16, 1, s), "lse": bound(FP32, 4, s)}),
    )


FAMILIES: dict[str, Callable[[Inputs], Checks]] = {
    "attention": plain_attention,
    "attention-grouped": grouped_attention,
    "attention-masked": masked_attention,
    "attention-latent": latent_attention,
    "attention-parts": parts_of_attention,
    "linear": linears,
    "router": routers,
    "expert-order": expert_orders,
    "grouped": grouped_products,
    "cross-entropy": cross_entropies,
    "norm": norms,
    "rope": ropes,
    "latent-heads": latent_heads_of,
    "activation": activations,
    "adamw": optimizers,
    "embedding": embeddings,
    "permute": permutations,
    "fp8-product": fp8_products,
    "fp8-grouped": fp8_grouped_products,
    "fp8-cast": fp8_casts,
    "fp8-formula": fp8_formulas,
    "symmetric": symmetric_products,
}
