"""Every Triton kernel compiled for chips that are not here: registers, spills, shared memory, and the
instructions that count.

    programs    that fit a processor at the same time, by registers, shared memory and warps
    in flight   the most products of tensor cores that the kernel leaves under way when it waits for an
                earlier one (Hopper's wgmma.wait_group): 0, and loads of operands hide behind nothing

python tests/kernels/aot.py [80 86 90 100] [--only NAME] > tests/kernels/aot.txt     the committed table

ptxas and nvdisasm come with Triton's wheel, so this needs no GPU; it must not run under TRITON_INTERPRET. The
shapes are those of training (head dim 128, rows of 4096, everything a multiple of 16), the launch parameters
the kernels' own. Gradients of attention are in 16 bits, or (_ring) in fp32, as a ring adds them.
"""

import argparse
import pathlib
import re
import subprocess
import sys
import tempfile
from dataclasses import dataclass, field

sys.path.insert(0, str(pathlib.Path(__file__).parents[2]))

import torch
import triton  # before the kernels: it is what makes them import it
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from kernels import (
    adam,
    attention_triton,
    cross_entropy,
    embedding,
    expert_order,
    fp8,
    fp8_gemm,
    fp8_grouped,
    grouped_gemm,
    linear,
    norm,
    permute,
    rope,
    router,
    swiglu,
)
from kernels.unproven import fp8_formula, fp8_norm, fp8_rope, head_norm, latent_heads

BIN = pathlib.Path(triton.__file__).parent / "backends" / "nvidia" / "bin"
CHIPS = (80, 90, 100)
SMALL = (80, 86, 90, 100)  # attention's largest head dim: what fits a chip with less shared memory
TMA = (90, 100)  # kernels that read through the copy engine; an older chip takes the library's GEMMs
MMA = (
    r"\b(HGMMA|UTC[A-Z]*MMA|HMMA|QGMMA|QMMA)\b"  # tensor cores: Hopper's, Blackwell's, Ampere's; the fp8 ones
)


# Of a processor (CUDA C++ programming guide, technical specifications by compute capability).
REGISTERS = 1 << 16
REGISTER_UNIT = 256  # a warp gets registers in multiples of this
MOST_WARPS = {80: 64, 86: 48, 90: 64, 100: 64}
MOST_PROGRAMS = {80: 32, 86: 16, 90: 32, 100: 32}
SHARED_BYTES = {80: 164 << 10, 86: 100 << 10, 90: 228 << 10, 100: 228 << 10}
RESERVED_BYTES = 1 << 10  # of shared memory, for each program


@dataclass(frozen=True)
class Case:
    """A kernel and how it is launched. types: of arguments that are not what their names say: CAPS a pointer
    to bf16, anything else an int that 16 divides.
    """

    kernel: object
    meta: dict
    types: dict = field(default_factory=dict)
    kind: str = "memory"  # memory: 128-bit loads must be there; gemm: tensor cores
    chips: tuple = CHIPS


STATISTICS = {
    **{n: "*fp32" for n in ("SCALE", "MEAN", "DWEIGHT", "DBIAS", "OF_ROWS", "OF_COLUMNS")},
    "eps": "fp32",
}
OF_CAST = {"FLOOR": fp8.MIN_ABSOLUTE_MAXIMUM, "LARGEST": 448.0}
CAST = {
    **{n: "*fp32" for n in ("SCALE", "MAXIMA", "SCALE_BACK", "MAXIMA_BACK", "OF_ROWS", "OF_COLUMNS")},
    "Q": "*fp8e4nv",
    "Q_BACK": "*fp8e4nv",
}
GELU = {"CUBIC": swiglu.CUBIC, "SLOPE": swiglu.SLOPE, "BLOCK": swiglu.BLOCK, "num_warps": swiglu.WARPS}
STRIDES = ("i32", "i32", "i32")
ROPE = {
    "COS": "*fp32",
    "SIN": "*fp32",
    "table_strides": STRIDES[:2],
    "x_strides": STRIDES,
    "y_strides": STRIDES,
}
HEADS = {
    **{n: "*fp32" for n in ("COS", "SIN", "DWEIGHTS")},
    "eps": "fp32",
    "table_strides": STRIDES[:2],
    **{f"{n}_strides": STRIDES for n in ("x", "y", "dq", "dk", "dv", "dqkv")},
}
LATENT = {
    **HEADS,
    "scale": "fp32",
    **{f"{n}_strides": STRIDES for n in ("nope", "k", "dkv")},
    "key_strides": STRIDES[:2],
}
LATENT_META = latent_heads.launch_meta(16, 128, 64, pairs=True)
VALUES = {"VALUE": 128, "VALUE_BLOCK": 128}
FLASH = {
    **{f"{n}_strides": STRIDES for n in ("q", "k", "v", "out", "dout", "dq", "dk", "dv")},
    "scale": "fp32",
    **{n: "*fp32" for n in ("LSE", "DELTA")},
    **{n: "*i32" for n in ("FIRST_KEY", "QUERY_END")},
}
FLASH_KERNELS = {
    "forward": attention_triton.forward_kernel,
    "dq": attention_triton.dq_kernel,
    "dkv": attention_triton.dkv_kernel,
}


def flash(
    name: str,
    d: int,
    e: int,
    bounded: bool = False,
    chips: tuple = CHIPS,
    ring: bool = False,
    softcap: float | None = None,
) -> Case:
    """As kernels/attention_triton.py launches it. ring: gradients in fp32."""
    blocks = attention_triton.BLOCKS[name][attention_triton.padded(max(d, e))]
    return Case(
        FLASH_KERNELS[name],
        {
            "CAUSAL": True,
            "BOUNDED": bounded,
            "SOFTCAP": softcap,
            "BLOCK_M": blocks.queries,
            "BLOCK_N": blocks.keys,
            "HEAD_DIM": d,
            "VALUE_DIM": e,
            "num_warps": blocks.warps,
            "num_stages": blocks.stages,
        },
        FLASH | (dict.fromkeys(("DQ", "DK", "DV"), "*fp32") if ring else {}),
        "gemm",
        chips,
    )


ADAM = (
    {n: "*fp32" for n in ("PARAM", "GRAD", "EXP_AVG", "EXP_AVG_SQ", "GRAD_SCALE")}
    | {"IS_FINITE": "*i1"}
    | {
        n: "fp32"
        for n in (
            "one_minus_beta1",
            "one_minus_beta2",
            "bias_correction1",
            "bias_correction2",
            "lr",
            "shrink",
            "eps",
        )
    }
)
ADAM_BF16 = {**ADAM, **{n: "*bf16" for n in ("PARAM", "EXP_AVG", "EXP_AVG_SQ")}, "salt": "i64"}
ADAM_META = {"BLOCK": adam.GPU_BLOCK, "num_warps": adam.WARPS}
CE = {"TARGETS": "*i64", "SCALE": "*fp32", "LSE": "*fp32", "TARGET_LOGIT": "*fp32"}
CE_META = {
    "IGNORE": cross_entropy.IGNORE_INDEX,
    "BLOCK": cross_entropy.COLUMNS,
    "CAP": None,
    "num_warps": cross_entropy.WARPS,
}


EXPERT_ORDER = {
    "CHUNK": expert_order.CHUNK,
    "ROWS": expert_order.TILE // 64,
    "EXPERTS": 64,
    "num_warps": expert_order.WARPS,
}


def descriptors(**blocks) -> dict:
    return {name: f"tensordesc<bf16[{a},{b}]>" for name, (a, b) in blocks.items()}


def grouped(back: bool, gather: bool = False, scatter: bool = False) -> Case:
    m, n, k = (grouped_gemm.TILE[x] for x in "MNK")
    blocks = {"WEIGHT": (k, n) if back else (n, k)}
    if not gather:
        blocks["X"] = m, k
    return Case(
        grouped_gemm.grouped_kernel,
        {**grouped_gemm.TILE, "BACK": back, "GATHER": gather, "SCATTER": scatter},
        {"TILES": "*i32", "SOURCE": "*i64", **descriptors(**blocks)},
        "gemm",
        TMA,
    )


def gathered_wgrad(gather_dy: bool, add: bool) -> Case:
    tile = grouped_gemm.WGRAD
    blocks = {"X": (tile["K"], tile["N"])} if gather_dy else {"DY": (tile["K"], tile["M"])}
    return Case(
        grouped_gemm.gathered_wgrad_kernel,
        {**tile, "GATHER_DY": gather_dy, "ADD": add},
        {"OFFSETS": "*i32", "SOURCE": "*i64", "INTO": "*fp32", **descriptors(**blocks)},
        "gemm",
        TMA,
    )


def wgrad(kernel, tile: dict, add: bool) -> Case:
    return Case(
        kernel,
        {**tile, "ADD": add},
        {
            "OFFSETS": "*i32",
            "INTO": "*fp32",
            **descriptors(DY=(tile["K"], tile["M"]), X=(tile["K"], tile["N"])),
        },
        "gemm",
        TMA,
    )


def eight_bits(a: str, b: str, gradient: bool, grouped: bool) -> tuple[dict, dict]:
    """(launch parameters, types) of an fp8 product of A, with scales a row or a group, and B.

    gradient: A is one, in E5M2 unless its scales are those of groups.
    """
    size, side = 256, fp8.MX_SIDE if a == "mx" else fp8.BLOCK_SIDE
    dtype = fp8.E5M2 if gradient and a == "row" else fp8.E4M3
    scales = {
        "row": torch.empty(size, 1),
        "group": torch.empty(size // side, size).t(),
        "mx": torch.empty(size // side, size).t(),
        "block": torch.empty(size // side, size // side),
        "matrix": torch.empty(1, 1),
    }
    operands = [
        fp8_gemm.QuantizedMatrix(
            torch.empty(size, size, dtype=dtype), scales[kind], kind, size if kind == "matrix" else side
        )
        for kind, dtype in ((a, dtype), (b, fp8.E4M3))
    ]
    steps = fp8_gemm.steps_of(*operands)
    constants = {
        name: value for name, value in steps._asdict().items() if name.isupper() or value == 1
    }  # a stride of 1 is compiled in
    tile = fp8_grouped.get_tile(steps) if grouped else fp8_gemm.get_tile(steps)
    names = {fp8.E4M3: "fp8e4nv", fp8.E5M2: "fp8e5"}
    return (
        {**tile, **constants},
        {
            "A": f"tensordesc<{names[dtype]}[{tile['M']},{steps.K}]>",
            "B": f"tensordesc<fp8e4nv[{tile['N']},{steps.K}]>",
            "A_SCALE": "*fp32",
            "B_SCALE": "*fp32",
        },
    )


def scaled(a: str, b: str, add: bool) -> Case:
    """add: a weight gradient."""
    meta, types = eight_bits(a, b, gradient=add, grouped=False)
    return Case(
        fp8_gemm.scaled_kernel,
        {**meta, "ADD": add},
        {**types, **({"Y": "*fp32"} if add else {})},
        "gemm",
        TMA,
    )


def scaled_grouped(a: str, b: str, gradient: bool) -> Case:
    meta, types = eight_bits(a, b, gradient=gradient, grouped=True)
    return Case(
        fp8_grouped.scaled_grouped_kernel,
        meta,
        {**types, "TILES": "*i32"},
        "gemm",
        TMA,
    )


def cast(kind: str, rows: int, columns: int, *, ahead: bool = True, back: bool = False) -> Case:
    """x lies along its columns."""
    given = kind == "tensor" or (kind == "row" and back)
    meta = cast_meta(kind, rows, columns, ahead=ahead, back=back)
    return Case(fp8.cast_kernel, {**meta, "KIND": kind, "GIVEN": given, "x_column": 1}, CAST, chips=TMA)


def cast_meta(kind: str, rows: int, columns: int, ahead: bool = True, back: bool = True) -> dict:
    return {
        "AHEAD": ahead,
        "BACK": back,
        **OF_CAST,
        "ROWS": rows,
        "COLUMNS": columns,
        "PARTS": 1024 if kind == "tensor" else 1,
        "num_warps": fp8.cast_warps(rows, columns),
    }


def of_formula(kernel, formula: str, kind: str, **constants) -> Case:
    """A kernel of kernels/unproven/fp8_formula.py. Arguments that the formula has not are None."""
    norms = ("WEIGHT", "BIAS", "INVERSE", "MEAN")
    absent = {"swiglu": ("DY", *norms), "swiglu_backward": norms, "norm": ("DY", "BIAS", "MEAN")}[formula]
    halves = 2 if formula == "swiglu_backward" else 1
    meta = {**dict.fromkeys(absent), "FORMULA": formula, "HALVES": halves, "KIND": kind, **constants}
    return Case(kernel, meta, {**CAST, "INVERSE": "*fp32"}, chips=TMA)


def formula_cast(formula: str, kind: str) -> Case:
    tile = (fp8.BLOCK_SIDE, fp8.BLOCK_SIDE) if kind == "group" else fp8.PAIR
    return of_formula(fp8_formula.formula_cast_kernel, formula, kind, **cast_meta(kind, *tile))


def formula_maxima(formula: str, kind: str) -> Case:
    kernel = fp8_formula.formula_maxima_kernel
    return of_formula(kernel, formula, kind, ROWS=fp8.STRIP, COLUMNS=fp8.BLOCK_SIDE, num_warps=8)


def rope_gradient(kernel, kind: str, **constants) -> Case:
    """A kernel of kernels/unproven/fp8_rope.py, for heads of 128 channels."""
    meta = {"HALF": 64, "BLOCK": 64, "KIND": kind, "ROWS": fp8.PAIR[0], **constants}
    return Case(kernel, meta, {**CAST, **HEADS}, chips=TMA)


def rope_gradient_cast(kind: str) -> Case:
    return rope_gradient(
        fp8_rope.rope_cast_kernel,
        kind,
        AHEAD=True,
        BACK=True,
        **OF_CAST,
        HEADS=fp8_rope.HEADS,
        PARTS=1024 if kind == "tensor" else 1,
        num_warps=fp8_rope.CAST_WARPS,
    )


def normed(kernel, per_warp: int, width: int = 4096, residual: bool = True, **constants) -> Case:
    meta = {"HAS_RESIDUAL": residual, "LAYER": False, **norm.launch_meta(width, per_warp), **constants}
    return Case(kernel, meta, STATISTICS)


ROUTER = {
    **{n: "*fp32" for n in ("LOGITS", "WEIGHTS", "DWEIGHTS", "PARTIALS", "SCALE", "LOAD")},
    **{n: "fp32" for n in ("scale", "aux_loss", "z_loss")},
    "BIAS": "*fp64",
    "COUNTED": "*i1",
    "INDEX": "*i64",
    "GIVEN": "*i64",
}


def routed(experts: int, rule: router.RoutingRule) -> tuple[Case, Case]:
    """The router's forward and backward."""
    slots, groups = (router.power_of_2(n) for n in (experts // rule.groups, rule.groups))
    both = {
        "EXPERTS": experts,
        "TOP_K": rule.top_k,
        "SIGMOID": rule.sigmoid,
        "RENORM": rule.renorm,
        "EPSILON": router.EPSILON,
        "CHOICES": router.power_of_2(rule.top_k),
        "TOKENS": router.tokens_of_tile(slots * groups),
        "num_warps": router.WARPS,
    }
    forward = {
        "GROUPS": rule.groups,
        "TOP_GROUPS": rule.top_groups,
        "HAS_BIAS": rule.sigmoid,
        "HAS_SUMS": True,
        "HAS_GIVEN": False,
        "SMALLEST_SHARE": router.SMALLEST_SHARE,
        "SLOT_GROUPS": groups,
        "SLOTS": slots,
    }
    backward = {"HAS_AUX": True, "HAS_Z": True, "IN_TWO": True, "ALL": router.power_of_2(experts)}
    return (
        Case(router.router_kernel, both | forward, ROUTER),
        Case(router.router_backward_kernel, both | backward, ROUTER),
    )


ROUTERS = {
    "64": routed(64, router.RoutingRule(8)),
    "256_groups": routed(256, router.RoutingRule(8, sigmoid=True, groups=8, top_groups=4)),
}
COLUMNS = (
    "registers", "spills", "shared", "warps", "programs", "in flight", "wide loads", "atomics", "mma"
)
CASES = {
    **{f"router_{name}": forward for name, (forward, _) in ROUTERS.items()},
    **{f"router_backward_{name}": backward for name, (_, backward) in ROUTERS.items()},
    "router_statistics": Case(
        router.statistics_kernel,
        {"HAS_LOAD": False, "HAS_COUNTS": True, "HAS_Z": True, "BLOCK": 64, "num_warps": 1},
        {**ROUTER, **{name: "*fp32" for name in ("SUMS", "COUNTS", "NEW_LOAD")}, "STATS": "*fp64"},
    ),
    "rms_norm": normed(norm.forward_kernel, norm.FORWARD_PER_WARP),
    "rms_norm_backward": normed(norm.backward_kernel, norm.BACKWARD_PER_WARP),
    "rms_norm_backward_heads": normed(
        norm.backward_kernel, norm.BACKWARD_PER_WARP, width=128, residual=False
    ),
    "layer_norm": normed(norm.forward_kernel, norm.FORWARD_PER_WARP, LAYER=True),
    "layer_norm_backward": normed(norm.backward_kernel, norm.BACKWARD_PER_WARP, LAYER=True),
    "rope": Case(
        rope.rope_kernel, {"HALF": 64, "INVERSE": False, "HEADS": 32, "BLOCK": 64, "num_warps": 4}, ROPE
    ),
    "head_norm": Case(head_norm.head_norm_kernel, head_norm.launch_meta(32, 8, 128), HEADS),
    **{
        f"head_norm_backward{name}": Case(
            head_norm.head_norm_backward_kernel,
            {"IN_PLACE": in_place, **head_norm.launch_meta(32, 8, 128)},
            HEADS,
        )
        for name, in_place in (("", False), ("_in_place", True))
    },
    "latent_queries": Case(
        latent_heads.rotate_heads_kernel,
        {"ALL": False, "INVERSE": False, **latent_heads.launch_meta(16, 0, 64, pairs=True)},
        LATENT,
    ),
    "latent_queries_backward": Case(
        latent_heads.rotate_heads_kernel, {"ALL": True, "INVERSE": True, **LATENT_META}, LATENT
    ),
    "latent_keys": Case(latent_heads.latent_keys_kernel, {"TURN": True, **LATENT_META}, LATENT),
    "latent_keys_backward": Case(
        latent_heads.latent_keys_backward_kernel, {"TURN": True, **VALUES, **LATENT_META}, LATENT
    ),
    "swiglu": Case(
        swiglu.swiglu_kernel,
        {"WEIGHTED": True, "BLOCK": swiglu.BLOCK, "num_warps": swiglu.WARPS},
        {"WEIGHT": "*fp32"},
    ),
    "swiglu_weighted_backward": Case(
        swiglu.weighted_backward_kernel,
        {"BLOCK": swiglu.BLOCK, "num_warps": swiglu.WARPS},
        {"WEIGHT": "*fp32", "DWEIGHT": "*fp32"},
    ),
    "swiglu_backward": Case(
        swiglu.swiglu_backward_kernel, {"BLOCK": swiglu.BLOCK, "num_warps": swiglu.WARPS}
    ),
    "gelu": Case(swiglu.gelu_kernel, GELU),
    "gelu_backward": Case(swiglu.gelu_backward_kernel, GELU),
    "cross_entropy": Case(
        cross_entropy.softmax_kernel, {"STATISTICS": True, "GRADIENT": True, **CE_META}, CE
    ),
    "cross_entropy_merged": Case(
        cross_entropy.softmax_kernel, {"STATISTICS": False, "GRADIENT": True, **CE_META}, CE
    ),
    "adamw": Case(adam.adamw_kernel, {"COPY": True, "ROUND": False, "ROWS": False, **ADAM_META}, ADAM),
    "adamw_bf16": Case(
        adam.adamw_kernel, {"COPY": False, "ROUND": True, "ROWS": False, **ADAM_META}, ADAM_BF16
    ),
    "adamw_bf16_columns": Case(
        adam.adamw_kernel, {"COPY": False, "ROUND": True, "ROWS": True, **ADAM_META}, ADAM_BF16
    ),
    "permute": Case(
        permute.sum_kernel,
        {"HAS_EMPTY": False, "SLOTS_PER_TOKEN": 1, "TOKENS": 1, "BLOCK": 2048, "num_warps": 4},
        {"SLOTS": "*i64"},
    ),
    "unpermute": Case(
        permute.sum_kernel,
        {"HAS_EMPTY": True, "SLOTS_PER_TOKEN": 8, "TOKENS": 1, "BLOCK": 2048, "num_warps": 4},
        {"SLOTS": "*i64"},
    ),
    "expert_order_count": Case(expert_order.count_kernel, EXPERT_ORDER, {"INDEX": "*i64", "COUNTS": "*i32"}),
    "expert_order_place": Case(
        expert_order.place_kernel,
        EXPERT_ORDER,
        {"COUNTS": "*i32", **{name: "*i64" for name in ("INDEX", "TOKENS", "CHOICES", "PLACES", "TOTALS")}},
    ),
    "row_tiles": Case(
        grouped_gemm.row_tiles_kernel,
        {"M": grouped_gemm.TILE["M"], "EXPERTS": 64, "num_warps": 1},
        {"COUNTS": "*i64", "OFFSETS": "*i32", "TILES": "*i32"},
        chips=TMA,
    ),
    "embedding_gradient": Case(
        embedding.add_rows_kernel,
        {"ROWS": 8, "BLOCK": 1024, "num_warps": 8},
        {"IDS": "*i64", "ORDER": "*i64", "ENDS": "*i64", "INTO": "*fp32"},
    ),
    **{
        f"rms_norm_fp8_{kind}": normed(fp8_norm.deferred_kernel, norm.FORWARD_PER_WARP, KIND=kind)
        for kind in ("tensor", "row", "group")
    },
    **{
        f"fp8_{formula.replace('backward', 'back')}_{kind}": formula_cast(formula, kind)
        for formula in ("norm", "swiglu", "swiglu_backward")
        for kind in ("tensor", "row", "group")
    },
    **{
        f"fp8_{formula.replace('backward', 'back')}_maxima_{kind}": formula_maxima(formula, kind)
        for formula in ("swiglu", "swiglu_backward")
        for kind in ("tensor", "row")
    },
    **{f"fp8_rope_back_{kind}": rope_gradient_cast(kind) for kind in ("tensor", "row")},
    **{
        f"fp8_rope_back_maxima_{kind}": rope_gradient(fp8_rope.rope_maxima_kernel, kind, num_warps=8)
        for kind in ("tensor", "row")
    },
    "fp8_tensor": cast("tensor", 1, 4096),
    "fp8_tensor_pair": cast("tensor", *fp8.PAIR, back=True),
    "fp8_tensor_back": cast("tensor", *fp8.PAIR, ahead=False, back=True),
    "fp8_row": cast("row", 1, 4096),
    "fp8_row_pair": cast("row", *fp8.PAIR, back=True),
    "fp8_row_back": cast("row", *fp8.PAIR, ahead=False, back=True),
    "fp8_group": cast("group", 32, 128),
    "fp8_group_pair": cast("group", 128, 128, back=True),
    "fp8_group_back": cast("group", 128, 128, ahead=False, back=True),
    "fp8_block_pair": cast("block", 128, 128, back=True),
    "fp8_mx": cast("mx", 128, 32),
    "fp8_mx_pair": cast("mx", 32, 32, back=True),
    "fp8_maxima": Case(
        fp8.maxima_kernel,
        {"ROWS": fp8.STRIP, "COLUMNS": fp8.BLOCK_SIDE, "num_warps": 8},
        {"OF_ROWS": "*fp32", "OF_COLUMNS": "*fp32"},
    ),
    "fp8_largest": Case(fp8.largest_kernel, {"BLOCK": fp8.TILE, "num_warps": 8}, {"LARGEST": "*fp32"}),
    "scaled_block": scaled("group", "block", add=False),
    "scaled_group_add": scaled("group", "group", add=True),
    "scaled_mx": scaled("mx", "mx", add=False),
    "scaled_mx_add": scaled("mx", "mx", add=True),
    "scaled_row_add_e5m2": scaled("row", "row", add=True),
    "scaled_grouped_block": scaled_grouped("group", "block", gradient=False),
    "scaled_grouped_mx": scaled_grouped("mx", "mx", gradient=False),
    "scaled_grouped_row": scaled_grouped("row", "row", gradient=False),
    "scaled_grouped_row_e5m2": scaled_grouped("row", "row", gradient=True),
    "scaled_grouped_matrix": scaled_grouped("row", "matrix", gradient=False),
    "weight_gradient": wgrad(linear.wgrad_kernel, linear.TILE, True),
    "weight_gradient_first": wgrad(linear.wgrad_kernel, linear.TILE, False),
    "grouped": grouped(False),
    "grouped_dgrad": grouped(True),
    "grouped_gather": grouped(False, gather=True),
    "grouped_gather_dgrad": grouped(True, gather=True),
    "grouped_scatter": grouped(False, scatter=True),
    "grouped_scatter_dgrad": grouped(True, scatter=True),
    "grouped_wgrad": wgrad(grouped_gemm.grouped_wgrad_kernel, grouped_gemm.WGRAD, True),
    "grouped_wgrad_first": wgrad(grouped_gemm.grouped_wgrad_kernel, grouped_gemm.WGRAD, False),
    "grouped_wgrad_gather": gathered_wgrad(False, True),
    "grouped_wgrad_gather_first": gathered_wgrad(False, False),
    "grouped_wgrad_gather_dy": gathered_wgrad(True, True),
    "grouped_wgrad_gather_dy_first": gathered_wgrad(True, False),
    **{
        f"attention_{name}_{d}_{e}{'_window' * bounded}": flash(name, d, e, bounded, chips)
        for name in FLASH_KERNELS
        for d, e, bounded, chips in (
            (64, 64, False, CHIPS),
            (128, 128, False, CHIPS),
            (128, 128, True, SMALL),
            (192, 128, True, SMALL),
            (256, 256, False, SMALL),
        )
    },
    **{
        f"attention_{name}_128_128_ring": flash(name, 128, 128, bounded=True, ring=True)
        for name in ("dq", "dkv")
    },
    **{
        f"attention_{name}_{d}_{d}_softcap": flash(name, d, d, bounded=True, softcap=50.0)
        for name in FLASH_KERNELS
        for d in (64, 128, 256)
    },
}


def binary_of(case: Case, chip: int):
    """What Triton compiles a kernel into for a chip: `asm` has its PTX and its machine code."""
    names = case.kernel.arg_names
    meta = case.meta
    options = {k: meta[k] for k in ("num_warps", "num_stages") if k in meta}
    constants = {k: v for k, v in meta.items() if k not in options}
    types = {
        n: "constexpr" if n in constants else case.types.get(n, "*bf16" if n.isupper() else "i32")
        for n in names
    }
    aligned = {
        (i,): [["tt.divisibility", 16]]
        for i, n in enumerate(names)
        if types[n][0] == "*" or types[n] == "i32"
    }
    for i, n in enumerate(names):
        if isinstance(types[n], tuple):
            aligned.update({(i, j): [["tt.divisibility", 16]] for j, t in enumerate(types[n]) if t == "i32"})
    source = ASTSource(case.kernel, types, {(names.index(k),): v for k, v in constants.items()}, aligned)
    return triton.compile(source, target=GPUTarget("cuda", chip, 32), options=options)


def compiled(case: Case, chip: int) -> dict:
    """{registers, spilled bytes, shared bytes, tensor-core instructions, 128-bit loads} of one kernel on one
    chip.
    """
    binary = binary_of(case, chip)
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(binary.asm["cubin"])
        file.flush()
        usage, sass = (
            subprocess.run([BIN / tool, *how, file.name], capture_output=True, text=True, check=True).stdout
            for tool, how in (("cuobjdump", ["--dump-resource-usage"]), ("nvdisasm", ["-c"]))
        )
    found = re.findall(MMA, sass)
    left_in_flight = re.findall(r"wgmma\.wait_group\.sync\.aligned (\d+)", binary.asm["ptx"])
    registers = int(re.search(r"REG:(\d+)", usage)[1])
    shared = binary.metadata.shared
    warps = binary.metadata.num_warps
    return {
        "registers": registers,
        "spills": len(re.findall(r"\b(?:STL|LDL)\b", sass)),
        "shared": shared,
        "warps": warps,
        "programs": programs_of_processor(registers, shared, warps, chip),
        "in flight": max(map(int, left_in_flight)) if left_in_flight else "-",
        "mma": f"{len(found)} {found[0]}" if found else "-",
        "wide loads": len(re.findall(r"(?:LDG|LDGSTS)\.E(?:\.[A-Z0-9]+)*\.128|UTMALDG", sass)),
        "atomics": len(re.findall(r"\b(?:ATOM|ATOMG|RED)[A-Z]*\.E", sass)),
    }


def programs_of_processor(registers: int, shared: int, warps: int, chip: int) -> int:
    """How many programs fit a processor at the same time. registers: of a thread; shared: bytes."""
    of_warp = -(-registers * 32 // REGISTER_UNIT) * REGISTER_UNIT
    return min(
        REGISTERS // of_warp // warps,
        SHARED_BYTES[chip] // (shared + RESERVED_BYTES),
        MOST_WARPS[chip] // warps,
        MOST_PROGRAMS[chip],
    )


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("chips", nargs="*", type=int, default=SMALL)
    parser.add_argument("--only", default="", help="part of a kernel's name")
    parser.add_argument(
        "--part", type=int, nargs=2, default=(1, 1), metavar=("K", "M"), help="every M-th kernel"
    )
    args = parser.parse_args()
    part, parts = args.part
    assert hasattr(norm.forward_kernel, "cache_key"), "compiles, so it must not run under TRITON_INTERPRET"
    print(f"triton {triton.__version__}")
    print("kernel", "chip", *COLUMNS, sep="\t")
    for name, case in list(CASES.items())[part - 1 :: parts]:
        for chip in args.chips:
            if args.only in name and chip in case.chips:
                r = compiled(case, chip)
                print(name, f"sm_{chip}", *(r[column] for column in COLUMNS), sep="\t", flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
