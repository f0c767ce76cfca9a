"""Launch code of the Triton attention kernels: launch configs per chip, and the variant of the backward."""
import math
from typing import NamedTuple

import torch
from torch import Tensor

from kernels.attention_backward import (
    add_parts_kernel,
    backward_kernel,
    delta_kernel,
    dkv_kernel,
    dq_kernel,
    starts_kernel,
)
from kernels.attention_blocks import padded
from kernels.attention_forward import forward_kernel, merge_kernel
from kernels.attention_mask import AttentionMask, MaskLike
from kernels.attention_scores import PLAIN_SCORES, ScoreForm
from kernels.linear import ALIGNED
from kernels.triton_ import (
    TensorDescriptor,
    by_channel,
    ceil_div,
    chip_name,
    kernel_is_available,
    num_processors,
    shared_bytes,
)

MAX_HEAD_DIM = 256
MAX_OFFSET = 2**31  # elements: the kernels count tokens times strides in int32
DELTA_ROWS = 64  # queries per program that computes delta, or merges two parts
STARTS_ROWS = 256  # queries per program that prepares STARTS: a multiple of every BLOCK_M
MOST_PARTS = 8  # of dq, in fp32 each
WORTH_A_PART = 0.9  # splitting dq further must shorten the backward at least to this fraction

# {chip (kernels/triton_.py): {padded head dim: (BLOCK_M queries, BLOCK_N keys, warps, pipeline stages)}}
# The largest that tests/kernels/aot.py compiles without spills, with loads through the copy engine (chips 9
# and 10) or without. Blackwell has dedicated accumulator memory, and needs one stage.
# SMALL replaces the entries of chip 8 if a program can use less than ENOUGH_SHARED bytes of shared memory
# (99 KiB on sm_86, 89 and 120; 163 KiB on sm_80 and 87).
# CAPPED + chip replaces the entries of that chip if there is a soft cap, whose slope takes registers.
BlockEntries = dict[int, tuple[int, int, int, int] | None]
BlockTable = dict[int, BlockEntries]
SMALL = 86
CAPPED = 1000
ENOUGH_SHARED = 160 << 10
FORWARD_BLOCKS: BlockTable = {
    8: {64: (128, 128, 8, 3), 128: (128, 64, 8, 3), 256: (64, 32, 8, 2)},
    9: {64: (128, 128, 8, 3), 128: (128, 128, 8, 2), 256: (128, 32, 8, 2)},
    10: {64: (128, 128, 8, 3), 128: (128, 128, 8, 2), 256: (128, 32, 8, 2)},
}
# Chips whose forward computes scores one block ahead, when loading through the copy engine. MMAs run
# asynchronously there, and registers hold two blocks of scores.
SCORES_AHEAD = (9,)
# Five products if this table has an entry, otherwise seven. They read and write 8 bytes of dq for each
# channel, query and block of keys, so they need blocks of 128 keys: half of that would exceed the memory
# bandwidth while the tensor cores multiply. Such blocks fit the registers of chips 9 and 10 up to head dim
# 64. Without the copy engine (chip 8, fp32, strides that it cannot read) seven products are used as well.
BACKWARD_BLOCKS: BlockTable = {
    8: {},
    9: {64: (32, 128, 8, 2)},
    10: {64: (64, 128, 4, 1)},
    CAPPED + 10: {64: None},
}
DQ_BLOCKS: BlockTable = {
    8: {64: (128, 64, 8, 3), 128: (128, 32, 8, 3), 256: (64, 32, 8, 2)},
    SMALL: {256: (64, 32, 8, 1)},
    9: {64: (128, 128, 8, 2), 128: (128, 64, 8, 3), 256: (64, 64, 8, 2)},
    10: {64: (128, 64, 8, 3), 128: (128, 64, 8, 2), 256: (64, 32, 8, 2)},
    CAPPED + 9: {64: (128, 64, 8, 3), 256: (64, 32, 8, 2)},
}
DKV_BLOCKS: BlockTable = {
    8: {64: (32, 128, 8, 2), 128: (32, 64, 8, 2), 256: (16, 64, 8, 1)},
    9: {64: (64, 128, 8, 2), 128: (32, 128, 8, 3), 256: (32, 64, 8, 2)},
    10: {64: (64, 128, 8, 1), 128: (64, 128, 8, 1), 256: (16, 64, 8, 1)},
    CAPPED + 9: {256: (16, 64, 8, 2)},
}
FP32_BLOCKS = (32, 32, 4, 1)  # four bytes per element, and no tensor cores: for parity, not for speed


def triton_supports_part(q: Tensor, k: Tensor, v: Tensor, mask: MaskLike) -> bool:
    """Whether the Triton kernels support the call; on a GPU, report once on stderr why not."""
    largest_dim = max(q.shape[-1], v.shape[-1])
    largest_offset = max(x.stride(1) * x.shape[1] for x in (q, k, v))
    why = None
    if largest_dim > MAX_HEAD_DIM:
        why = f"head dim {largest_dim} is above {MAX_HEAD_DIM}"
    elif isinstance(mask, Tensor):
        why = "a dense mask"
    elif largest_offset >= MAX_OFFSET:
        why = "offsets above 2^31"
    if q.numel() == 0 or k.numel() == 0:
        return False
    return kernel_is_available("attention", q, k, v, why=why)


# ---- launch arguments --------------------------------------------------------------------------------------

class Blocks(NamedTuple):
    queries: int
    keys: int
    warps: int
    stages: int


def blocks_of(
    table: BlockTable, q: Tensor, v: Tensor, form: ScoreForm = PLAIN_SCORES
) -> Blocks | None:
    """Return the table's entry for these tensors, or None if it has none."""
    if q.dtype == torch.float32:
        return None if table is BACKWARD_BLOCKS else Blocks(*FP32_BLOCKS)
    largest_dim = padded(max(64, q.shape[-1], v.shape[-1]))
    is_capped = form.softcap is not None
    entry = entries_of(table, chip_name(q.device), shared_bytes(q.device), is_capped).get(largest_dim)
    return None if entry is None else Blocks(*entry)


def entries_of(table: BlockTable, chip: int, shared: int, is_capped: bool = False) -> BlockEntries:
    """Return {padded head dim: entry} for a chip whose programs can use `shared` bytes of shared memory."""
    of_cap = table.get(CAPPED + chip, {}) if is_capped else {}
    of_shared = table.get(SMALL, {}) if shared < ENOUGH_SHARED else {}
    return table[chip] | of_cap | of_shared


def launch_meta(blocks: Blocks, q: Tensor, v: Tensor, mask: AttentionMask | None, form: ScoreForm,
                tma: bool) -> dict[str, int | float | bool | None]:
    """Return the constexpr arguments and launch options of the forward and backward kernels."""
    return {
        "CAUSAL": mask is not None,
        "BOUNDED": mask is not None and mask.first_key is not None,
        "SOFTCAP": form.softcap,
        "TMA": tma,
        "BLOCK_M": blocks.queries,
        "BLOCK_N": blocks.keys,
        "HEAD_DIM": q.shape[-1],
        "VALUE_DIM": v.shape[-1],
        "num_warps": blocks.warps,
        "num_stages": blocks.stages,
    }


class MaskBounds(NamedTuple):
    """The mask bounds that the kernels read. Strides are over the batch."""
    first_key: Tensor
    query_end: Tensor
    first_key_stride: int
    query_end_stride: int
    query_start: int
    key_start: int

    @property
    def offset(self) -> int:
        """Return the position of query row 0 among the keys."""
        return self.query_start - self.key_start


def mask_bounds(mask: AttentionMask | None, q: Tensor) -> MaskBounds:
    """Return the bounds of a mask. q is a placeholder for tensors that no kernel reads."""
    bounds = MaskBounds(
        first_key=q,
        query_end=q,
        first_key_stride=0,
        query_end_stride=0,
        query_start=0,
        key_start=0,
    )
    if mask is None:
        return bounds
    bounds = bounds._replace(query_start=mask.query_start, key_start=mask.key_start)
    if mask.first_key is None or mask.query_end is None:
        return bounds
    return bounds._replace(
        first_key=mask.first_key,
        query_end=mask.query_end,
        first_key_stride=mask.first_key.stride(0) if len(mask.first_key) > 1 else 0,
        query_end_stride=mask.query_end.stride(0) if len(mask.query_end) > 1 else 0,
    )


def call_numbers(q: Tensor, k: Tensor, bounds: MaskBounds, form: ScoreForm) -> dict[str, int | float]:
    """Return the scalar arguments that the forward and backward kernels share."""
    return {
        "s_q": q.shape[1],
        "s_k": k.shape[1],
        "heads_per_group": q.shape[2] // k.shape[2],
        "offset": bounds.offset,
        "scale": math.log2(math.e) / form.divisor(q.shape[-1]),  # of scores in base 2
    }


def strides_of(*tensors: Tensor) -> list[tuple[int, ...]]:
    """Return batch, token and head strides of each tensor."""
    return [x.stride()[:3] for x in tensors]


def copy_engine_reads(*tensors: Tensor) -> bool:
    """Whether the copy engine (TMA, from Hopper on) can read and write blocks of all these tensors."""
    if chip_name(tensors[0].device) < 9 or tensors[0].dtype == torch.float32:
        return False
    for x in tensors:
        offsets = [x.data_ptr(), *(stride * x.itemsize for stride in x.stride()[:3])]
        if x.stride(-1) != 1 or any(offset % ALIGNED for offset in offsets):
            return False
    return True


def descriptor(x: Tensor, rows: int) -> object:
    """Describe x [b, s, heads, channels] to the copy engine, in blocks of `rows` tokens of one head."""
    return TensorDescriptor.from_tensor(x.transpose(1, 2), [1, 1, rows, padded(x.shape[-1])])


def descriptors(
    blocks: Blocks, queries: list[Tensor], keys: list[Tensor]
) -> tuple[list[object], list[object]]:
    """Describe tensors that are read in blocks of queries, and in blocks of keys."""
    return [descriptor(x, blocks.queries) for x in queries], [descriptor(x, blocks.keys) for x in keys]


# ---- the launches ------------------------------------------------------------------------------------------

def launch_forward(
    q: Tensor, k: Tensor, v: Tensor, mask: AttentionMask | None, dtype: torch.dtype, form: ScoreForm
) -> tuple[Tensor, Tensor]:
    """Run attention_part (kernels/partial_attention.py) as a Triton kernel."""
    q, k, v = (by_channel(x) for x in (q, k, v))
    b, s_q, h, _ = q.shape
    out = q.new_empty(b, s_q, h, v.shape[-1], dtype=dtype)
    lse = q.new_empty(b, h, s_q, dtype=torch.float32)

    bounds = mask_bounds(mask, q)
    blocks = blocks_of(FORWARD_BLOCKS, q, v, form)
    assert blocks is not None  # this table has all head dims
    inputs: list[object] = [q, k, v]
    tma = copy_engine_reads(q, k, v)
    if tma:
        of_queries, of_keys = descriptors(blocks, [q], [k, v])
        inputs = [*of_queries, *of_keys]
    grid = ceil_div(s_q, blocks.queries), b * h
    forward_kernel[grid](
        *inputs, bounds.first_key, out, lse, *strides_of(q, k, v, out), bounds.first_key_stride,
        heads=h,
        key_start=bounds.key_start,
        AHEAD=tma and chip_name(q.device) in SCORES_AHEAD,
        **call_numbers(q, k, bounds, form),
        **launch_meta(blocks, q, v, mask, form, tma),
    )
    return out, lse.transpose(1, 2)


def launch_merge(out: Tensor, lse: Tensor, other: Tensor, other_lse: Tensor) -> None:
    """Run merge_partial (kernels/partial_attention.py) as a Triton kernel."""
    b, s_q, h, e = out.shape
    merge_kernel[ceil_div(s_q, DELTA_ROWS), b * h](
        out, lse, other, other_lse, *strides_of(out, lse, other, other_lse), s_q, h,
        BLOCK_M=DELTA_ROWS,
        VALUE_DIM=e,
        num_warps=4,
    )


def output_dot_grad(out: Tensor, dout: Tensor) -> Tensor:
    """delta = <out, dout> over the channels. out, dout [b, s, h, e] -> [b, s, h], stored head by head."""
    out, dout = by_channel(out), by_channel(dout)
    b, s, h, e = out.shape
    delta = out.new_empty(b, h, s, dtype=torch.float32)
    grid = ceil_div(s, DELTA_ROWS), b * h
    delta_kernel[grid](
        out, dout, delta, out.stride()[:3], dout.stride()[:3], s, h,
        BLOCK_M=DELTA_ROWS,
        VALUE_DIM=e,
        num_warps=4,
    )
    return delta.transpose(1, 2)


def launch_starts(lse: Tensor, delta: Tensor, root: float) -> Tensor:
    """lse, delta [b, s, h] -> [2, b, h, s rounded up to a multiple of STARTS_ROWS]: see starts_kernel."""
    b, s, h = lse.shape
    blocks = ceil_div(s, STARTS_ROWS)
    starts = lse.new_empty(2, b, h, blocks * STARTS_ROWS)
    starts_kernel[blocks, b * h](
        lse, delta, starts, lse.stride(), delta.stride(), s, blocks * STARTS_ROWS, h,
        numbers=starts[0].numel(),
        root=root,
        BLOCK_M=STARTS_ROWS,
        num_warps=4,
    )
    return starts


def launch_backward(
    dout: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    mask: AttentionMask | None,
    lse: Tensor,
    delta: Tensor,
    into: tuple[Tensor, Tensor, Tensor] | None,
    add: bool,
    form: ScoreForm,
) -> tuple[Tensor, Tensor, Tensor]:
    """Run partial_backward (kernels/partial_attention.py) as Triton kernels."""
    dout, q, k, v = (by_channel(x) for x in (dout.to(q.dtype), q, k, v))
    root = form.divisor(q.shape[-1]) if form.softcap is None else math.log2(math.e)
    starts = launch_starts(lse, delta, root)
    grads = into
    if grads is None:
        dq, dk, dv = (x.new_empty(x.shape, dtype=torch.float32) for x in (q, k, v))
        grads = dq, dk, dv
    has_five = blocks_of(BACKWARD_BLOCKS, q, v, form) is not None
    if has_five and copy_engine_reads(q, k, v, dout, *grads[1:]):
        launch_five_products(dout, q, k, v, mask, starts, grads, add, form)
    else:
        launch_seven_products(dout, q, k, v, mask, starts, grads, add, form)
    return grads


def launch_five_products(
    dout: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    mask: AttentionMask | None,
    starts: Tensor,
    grads: tuple[Tensor, Tensor, Tensor],
    add: bool,
    form: ScoreForm,
) -> None:
    """Write dq, dk and dv, or accumulate into them. starts comes from launch_starts."""
    b, s_q, h, d = q.shape
    _, s_k, g, _ = k.shape
    dq, dk, dv = grads
    blocks = blocks_of(BACKWARD_BLOCKS, q, v, form)
    assert blocks is not None  # checked by the caller
    bounds = mask_bounds(mask, q)

    # dk, dv, and the parts of dq
    query_blocks = ceil_div(s_q, blocks.queries)
    parts = number_of_parts(b * g, ceil_div(s_k, blocks.keys), num_processors(q.device))
    dq_parts = q.new_zeros(
        parts, b, h, query_blocks, padded(d), blocks.queries,
        dtype=torch.float32,
    )
    (q_blocks, dout_blocks), key_blocks = descriptors(blocks, [q, dout], [k, v, dk, dv])
    numbers = call_numbers(q, k, bounds, form)
    backward_kernel[parts, g, b](
        q_blocks, *key_blocks[:2], bounds.query_end, dout_blocks, *starts,
        dq_parts, *key_blocks[2:], *strides_of(q, k, v, dout, dk, dv),
        bounds.query_end_stride,
        padded_s_q=starts.shape[-1],
        groups=g,
        query_start=bounds.query_start,
        ADD=add,
        **numbers,
        **launch_meta(blocks, q, v, mask, form, tma=True),
    )

    # dq
    add_parts_kernel[query_blocks, b * h](
        dq_parts, dq, dq.stride()[:3], parts, dq_parts[0].numel(), s_q, h,
        factor=1 / form.divisor(d),
        ADD=add,
        BLOCK_M=blocks.queries,
        HEAD_DIM=d,
        num_warps=4,
    )


def number_of_parts(programs: int, key_blocks: int, processors: int) -> int:
    """Return how many programs split the keys of one head, each with a private part of dq: the fewest that
    keep the processors busy.

    programs is their number with one part each. A processor runs one at a time, and a program with 1 / n of
    the keys takes 1 / n of the time.
    """
    def time(parts: int) -> float:
        return ceil_div(programs * parts, processors) / parts

    best = 1
    for parts in range(2, min(MOST_PARTS, key_blocks) + 1):
        if time(parts) < WORTH_A_PART * time(best):
            best = parts
    return best


def launch_seven_products(
    dout: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    mask: AttentionMask | None,
    starts: Tensor,
    grads: tuple[Tensor, Tensor, Tensor],
    add: bool,
    form: ScoreForm,
) -> None:
    """Write dq, dk and dv, or accumulate into them. starts comes from launch_starts."""
    b, s_q, h, _ = q.shape
    _, s_k, g, _ = k.shape
    dq, dk, dv = grads
    bounds = mask_bounds(mask, q)
    tma = copy_engine_reads(q, k, v, dout)
    numbers = call_numbers(q, k, bounds, form) | {"padded_s_q": starts.shape[-1]}
    strides = strides_of(q, k, v, dout)

    # dq
    blocks = blocks_of(DQ_BLOCKS, q, v, form)
    assert blocks is not None  # this table has all head dims
    q_in, k_in, v_in, dout_in = tensors_or_descriptors(blocks, q, k, v, dout, tma)
    dq_kernel[ceil_div(s_q, blocks.queries), b * h](
        q_in, k_in, v_in, bounds.first_key, dout_in, *starts, dq,
        *strides, dq.stride()[:3], bounds.first_key_stride,
        heads=h,
        key_start=bounds.key_start,
        ADD=add,
        **numbers,
        **launch_meta(blocks, q, v, mask, form, tma),
    )

    # dk, dv
    blocks = blocks_of(DKV_BLOCKS, q, v, form)
    assert blocks is not None  # this table has all head dims
    q_in, k_in, v_in, dout_in = tensors_or_descriptors(blocks, q, k, v, dout, tma)
    dkv_kernel[ceil_div(s_k, blocks.keys), g, b](
        q_in, k_in, v_in, bounds.query_end, dout_in, *starts, dk, dv,
        *strides, dk.stride()[:3], dv.stride()[:3],
        bounds.query_end_stride,
        groups=g,
        query_start=bounds.query_start,
        ADD=add,
        **numbers,
        **launch_meta(blocks, q, v, mask, form, tma),
    )


def tensors_or_descriptors(
    blocks: Blocks, q: Tensor, k: Tensor, v: Tensor, dout: Tensor, tma: bool
) -> tuple[object, object, object, object]:
    """Return q, k, v and dout in the form that a kernel takes."""
    if not tma:
        return q, k, v, dout
    (q_blocks, dout_blocks), (k_blocks, v_blocks) = descriptors(blocks, [q, dout], [k, v])
    return q_blocks, k_blocks, v_blocks, dout_blocks
