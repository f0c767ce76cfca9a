"""Purpose, FLOPs and limiting rate of each launch, with a row for each kernel.

A new Triton kernel needs a row in KERNELS; tests/lab/benchmarks/test_step_model.py fails until it has one. A
torch operation either has a row in OPERATIONS, or is small, or is assigned by the file that called it
(FILES). Anything not in the tables goes to the part `unknown`, under its name.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass

import torch

from kernels.fp8 import MX_SIDE
from plan.record.launches import OUTSIDE, Launch, RecordedTensor

# Parts of a step, in the order of the tables.
PARTS = (
    "products",  # of forwards and input gradients, in the compute dtype or fp8
    "weight gradients",
    "attention forward",
    "attention backward",
    "elementwise forward",
    "elementwise backward",
    "cross entropy",
    "embedding",
    "router",
    "permute",
    "quantization",
    "optimizer",
    "gradients",  # zeroing, accumulation, norm
    "copies",
    "small",  # operations on few numbers, which take the time of a launch
    "rest",
    "unknown",
)
FORWARD, BACKWARD = "attention forward", "attention backward"
FIVE_OF_SEVEN = 5 / 7  # products of attention's backward, if the probabilities are computed once
SMALL_BYTES = 1 << 16
HALF = (torch.bfloat16, torch.float16)
FP8 = (torch.float8_e4m3fn, torch.float8_e5m2, torch.float4_e2m1fn_x2)


@dataclass(frozen=True)
class Facts:
    """Facts not in a launch. keys_seen: mean number of keys that a query attends to, over all layers."""

    keys_seen: float


Flops = Callable[[Launch, Facts], float]


@dataclass(frozen=True)
class KernelRow:
    """part: one of PARTS; "elementwise" stands for both of its phases.

    rate: of RATES in plan/record/rates.py, for the FLOPs. nbytes: unless each tensor counts once. needed: the
    fraction of it in a perfect step; 0 if a neighboring kernel could do it on the way.
    """

    part: str
    rate: str | None = None
    flops: Flops | None = None
    nbytes: Callable[[Launch], float] | None = None
    needed: float = 1.0


@dataclass(frozen=True)
class JudgedLaunch:
    """A launch with its assigned cost."""

    launch: Launch
    part: str
    rate: str | None
    flops: float
    nbytes: float
    needed: float


# ---- FLOPs -------------------------------------------------------------------------------------------------


def of_sizes(*names: str) -> Flops:
    """Return 2 m n k from three arguments of the kernel."""
    return lambda launch, facts: 2.0 * math.prod(launch.arguments[name] for name in names)


def of_rows(rows: str, *names: str) -> Flops:
    """Return 2 m n k, where m is the number of rows of a tensor."""
    return lambda launch, facts: 2.0 * launch.arguments[rows].shape[0] * math.prod(
        launch.arguments[name] for name in names
    )


def of_pair(first: str, second: str) -> Flops:
    """Return the FLOPs of a product over the rows of two tensors: [t, m] and [t, n]."""

    def flops(launch: Launch, facts: Facts) -> float:
        rows, m = launch.arguments[first].shape
        n = launch.arguments[second].shape[-1]
        return 2.0 * rows * m * n

    return flops


def of_attention(head_dims: int, value_dims: int) -> Flops:
    """Return the FLOPs of `head_dims` products over the channels of a query head, and `value_dims` over a
    value head's.

    The forward has one of each; the five of the backward are three and two, and kernels that compute the
    probabilities twice have seven.
    """

    def flops(launch: Launch, facts: Facts) -> float:
        if launch.is_triton:
            q, v = (launch.arguments[name].shape for name in ("Q", "V"))
            queries = math.prod(q[:3])  # [b, s, h, d]
            keys = keys_of_kernel(launch, facts)
        else:
            q, v = query_and_value(launch)
            queries = math.prod(q[:-1])  # [b, h, s, d] or [b s, h, d]
            keys = facts.keys_seen
        return 2.0 * queries * keys * (head_dims * q[-1] + value_dims * v[-1])

    return flops


def keys_of_kernel(launch: Launch, facts: Facts) -> float:
    """Return the mean number of keys visible to a query of the launch, in a whole sequence or the part on
    another rank (parallel/context/ring.py). Bounds of a window or of documents are unknown here: then use the
    mean over the whole sequence as a limit.
    """
    arguments = launch.arguments
    queries, keys = arguments["s_q"], arguments["s_k"]
    if not arguments["CAUSAL"]:
        return float(keys)
    first = arguments["offset"] + 1  # keys visible to query 0
    seen = sum(min(max(first + row, 0), keys) for row in range(queries)) / queries
    return min(seen, facts.keys_seen) if arguments["BOUNDED"] else seen


def query_and_value(launch: Launch) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Return the shapes of an operation's queries and values; a backward has the output's gradient first."""
    tensors = launch.arguments["in"]
    first = 1 if "backward" in launch.kernel else 0
    return tensors[first].shape, tensors[first + 2].shape


def of_operands(first: int) -> Flops:
    """Return 2 x elements of the result x the summed dim. first: index of the first operand."""

    def flops(launch: Launch, facts: Facts) -> float:
        a = launch.arguments["in"][first].shape
        out = launch.arguments["out"][0].shape
        is_grouped_over_rows = len(a) == 2 and len(out) == 3  # [m, t] [t, n] -> [e, m, n]: t is divided
        elements = math.prod(out[1:]) if is_grouped_over_rows else math.prod(out)
        return 2.0 * elements * a[-1]

    return flops


# ---- bytes of kernels that only touch some rows of a tensor ------------------------------------------------


def gathered_bytes(launch: Launch) -> float:
    """permute.sum_kernel: read as many rows as there are slots."""
    rows, slots = launch.arguments["ROWS"], launch.arguments["SLOTS"]
    return launch.nbytes - rows.nbytes + math.prod(slots.shape) * row_bytes(rows)


def product_bytes(launch: Launch) -> float:
    """grouped_gemm.grouped_kernel: each row of the product reads one row of X, which may serve several."""
    x, y = launch.arguments["X"], launch.arguments["Y"]
    if not launch.arguments["GATHER"]:
        return launch.nbytes
    return launch.nbytes - x.nbytes + y.shape[0] * row_bytes(x)


def gathered_wgrad_bytes(launch: Launch) -> float:
    """grouped_gemm.gathered_wgrad_kernel: the same, for X or for DY."""
    gathered = launch.arguments["DY" if launch.arguments["GATHER_DY"] else "X"]
    num_rows = launch.arguments["SOURCE"].shape[0]
    return launch.nbytes - gathered.nbytes + num_rows * row_bytes(gathered)


def added_rows_bytes(launch: Launch) -> float:
    """embedding.add_rows_kernel: read and write at most the gradient rows of the ids."""
    into, ids = launch.arguments["INTO"], launch.arguments["IDS"]
    touched = min(into.shape[0], math.prod(ids.shape))
    return launch.nbytes - 2 * into.nbytes + 2 * touched * row_bytes(into)


def row_bytes(matrix: RecordedTensor) -> float:
    """Return the bytes of one row of a matrix [rows, columns]."""
    return matrix.nbytes / matrix.shape[0]


# ---- Triton kernels ----------------------------------------------------------------------------------------

KERNELS = {
    # products
    "linear.wgrad_kernel": KernelRow("weight gradients", "own", of_sizes("t", "m", "n")),
    "grouped_gemm.grouped_kernel": KernelRow(
        "products", "own grouped", of_rows("Y", "inner", "outer"), nbytes=product_bytes
    ),
    "grouped_gemm.grouped_wgrad_kernel": KernelRow(
        "weight gradients", "own grouped, weights", of_pair("DY", "X")
    ),
    "grouped_gemm.gathered_wgrad_kernel": KernelRow(
        "weight gradients", "own gathered, weights", of_rows("SOURCE", "o", "n"), nbytes=gathered_wgrad_bytes
    ),
    "fp8_gemm.scaled_kernel": KernelRow("products", "own fp8", of_sizes("m", "n", "k")),
    "fp8_grouped.scaled_grouped_kernel": KernelRow("products", "own fp8", of_rows("A", "inner", "outer")),
    # attention
    "attention_triton.forward_kernel": KernelRow(FORWARD, "own attention", of_attention(1, 1)),
    "attention_triton.dq_kernel": KernelRow(
        BACKWARD, "own attention backward", of_attention(2, 1), needed=FIVE_OF_SEVEN
    ),
    "attention_triton.dkv_kernel": KernelRow(
        BACKWARD, "own attention backward", of_attention(2, 2), needed=FIVE_OF_SEVEN
    ),
    # MoE
    "router.router_kernel": KernelRow("router"),
    "router.statistics_kernel": KernelRow("router"),
    "router.router_backward_kernel": KernelRow("router"),
    "expert_order.count_kernel": KernelRow("router"),
    "expert_order.place_kernel": KernelRow("router"),
    "grouped_gemm.row_tiles_kernel": KernelRow("router"),
    # memory-bound
    "norm.forward_kernel": KernelRow("elementwise"),
    "norm.backward_kernel": KernelRow("elementwise"),
    "rope.rope_kernel": KernelRow("elementwise"),
    "swiglu.swiglu_kernel": KernelRow("elementwise"),
    "swiglu.swiglu_backward_kernel": KernelRow("elementwise"),
    "swiglu.weighted_backward_kernel": KernelRow("elementwise"),
    "swiglu.gelu_kernel": KernelRow("elementwise"),
    "swiglu.gelu_backward_kernel": KernelRow("elementwise"),
    "cross_entropy.softmax_kernel": KernelRow("cross entropy"),
    "embedding.add_rows_kernel": KernelRow("embedding", nbytes=added_rows_bytes),
    "permute.sum_kernel": KernelRow("permute", nbytes=gathered_bytes),
    "fp8.cast_kernel": KernelRow("quantization", needed=0.0),
    "fp8.largest_kernel": KernelRow("quantization", needed=0.0),
    "fp8.maxima_kernel": KernelRow("quantization", needed=0.0),
    "adam.adamw_kernel": KernelRow("optimizer"),
    # kernels/unproven/
    "unproven.head_norm.head_norm_kernel": KernelRow("elementwise"),
    "unproven.head_norm.head_norm_backward_kernel": KernelRow("elementwise"),
    "unproven.latent_heads.rotate_heads_kernel": KernelRow("elementwise"),
    "unproven.latent_heads.latent_keys_kernel": KernelRow("elementwise"),
    "unproven.latent_heads.latent_keys_backward_kernel": KernelRow("elementwise"),
    "unproven.fp8_norm.deferred_kernel": KernelRow("elementwise"),
    "unproven.fp8_formula.formula_cast_kernel": KernelRow("quantization"),  # needed: also the activation
    "unproven.fp8_formula.formula_maxima_kernel": KernelRow("quantization", needed=0.0),
    "unproven.fp8_rope.rope_cast_kernel": KernelRow("quantization"),  # needed: it also rotates gradients back
    "unproven.fp8_rope.rope_maxima_kernel": KernelRow("quantization", needed=0.0),
}


# ---- torch operations --------------------------------------------------------------------------------------

OPERATIONS = {
    "aten.mm": KernelRow("products", "library", of_operands(0)),
    "aten.addmm": KernelRow("products", "library", of_operands(1)),
    "aten.addmm_": KernelRow("products", "library", of_operands(1)),
    "aten.bmm": KernelRow("products", "library", of_operands(0)),
    "aten.baddbmm": KernelRow("products", "library", of_operands(1)),
    "aten._scaled_mm": KernelRow("products", "library fp8", of_operands(0)),
    "aten._grouped_mm": KernelRow("products", "library grouped", of_operands(0)),
    "aten._scaled_grouped_mm": KernelRow("products", "library fp8", of_operands(0)),
    "aten._scaled_dot_product_cudnn_attention": KernelRow(FORWARD, "cudnn", of_attention(1, 1)),
    "aten._scaled_dot_product_cudnn_attention_backward": KernelRow(
        BACKWARD, "cudnn backward", of_attention(3, 2)
    ),
    "aten._cudnn_attention_forward": KernelRow(FORWARD, "cudnn", of_attention(1, 1)),
    "aten._cudnn_attention_backward": KernelRow(BACKWARD, "cudnn backward", of_attention(3, 2)),
    "aten._scaled_dot_product_flash_attention": KernelRow(FORWARD, "flash 2", of_attention(1, 1)),
    "aten._scaled_dot_product_flash_attention_backward": KernelRow(
        BACKWARD, "flash 2 backward", of_attention(3, 2)
    ),
    "aten._scaled_dot_product_flash_attention_for_cpu": KernelRow(FORWARD, "flash 2", of_attention(1, 1)),
    "aten._scaled_dot_product_flash_attention_for_cpu_backward": KernelRow(
        BACKWARD, "flash 2 backward", of_attention(3, 2)
    ),
    "aten._scaled_dot_product_efficient_attention": KernelRow(FORWARD, "flash 2", of_attention(1, 1)),
    "aten._scaled_dot_product_efficient_attention_backward": KernelRow(
        BACKWARD, "flash 2 backward", of_attention(3, 2)
    ),
    "torch_attn._varlen_attn": KernelRow(FORWARD, "flash 2", of_attention(1, 1)),
    "torch_attn._varlen_attn_backward": KernelRow(BACKWARD, "flash 2 backward", of_attention(3, 2)),
}
COPIES = ("aten.copy_", "aten._to_copy", "aten.clone", "aten.cat", "aten.constant_pad_nd")

# The part of an operation by the calling file; the longest matching path prefix counts.
FILES = {
    "kernels/": "elementwise",
    "kernels/attention": "elementwise",
    "kernels/cross_entropy.py": "cross entropy",
    "kernels/embedding.py": "embedding",
    "kernels/fp8": "quantization",
    "kernels/nvfp4": "quantization",
    "kernels/unproven/nvfp4": "quantization",
    "kernels/unproven/fp8": "quantization",
    "kernels/grad.py": "gradients",
    "kernels/grouped_gemm.py": "permute",
    "kernels/permute.py": "permute",
    "kernels/router.py": "router",
    "kernels/linear.py": "gradients",  # other than products: accumulation of a gradient
    "kernels/adam.py": "optimizer",
    "kernels/rounding.py": "optimizer",
    "kernels/newton_schulz.py": "optimizer",
    "model/": "elementwise",
    "model/router": "router",
    "model/moe.py": "router",
    "parallel/expert/": "permute",
    "parallel/sharding/": "gradients",
    "parallel/tensor/": "elementwise",
    "parallel/pipeline/": "rest",
    "parallel/": "rest",
    "optim/": "optimizer",
    "optim/clip.py": "gradients",
    "optim/noise.py": "gradients",
    "runtime/": "rest",
    "train.py": "rest",
    OUTSIDE[0]: "elementwise",  # autograd adds the gradients of tensors used twice
}
ROUTER_FILES = ("model/router.py", "kernels/router.py")
NVFP4_FILES = ("kernels/nvfp4_linear.py", "kernels/unproven/nvfp4_gemm.py")
LOOKUPS = ("aten.index", "aten.embedding")  # every other operation could be fused into a neighboring kernel
NOT_NEEDED = ("gradients", "copies", "small", "rest", "quantization", "unknown")  # absent in a perfect step


def judge(launch: Launch, facts: Facts) -> JudgedLaunch:
    """Assign a purpose and a cost to the launch, by the tables above."""
    row = KERNELS.get(launch.kernel) if launch.is_triton else OPERATIONS.get(launch.kernel)
    nbytes = launch.nbytes
    if row is None:
        part = "unknown" if launch.is_triton else part_of_operation(launch)
        needed = 1.0 if launch.kernel in LOOKUPS and part not in NOT_NEEDED else 0.0
        return JudgedLaunch(launch, with_phase(part, launch.phase), None, 0.0, nbytes, needed)

    if row.nbytes is not None:
        nbytes = row.nbytes(launch)
    flops = row.flops(launch, facts) if row.flops else 0.0
    part, rate = row.part, row.rate
    if part == "products":
        part, rate = part_of_product(launch, rate)
    return JudgedLaunch(launch, with_phase(part, launch.phase), rate, flops, nbytes, row.needed)


def with_phase(part: str, phase: str) -> str:
    if part != "elementwise":
        return part
    return "elementwise backward" if phase == "backward" else "elementwise forward"


def part_of_operation(launch: Launch) -> str:
    if launch.nbytes <= SMALL_BYTES:
        return "small"
    if not launch.kernel.startswith("aten."):  # from another library: only a row can say what it computes
        return "unknown"
    matching = [start for start in FILES if launch.file.startswith(start)]
    if not matching:
        return "unknown"
    part = FILES[max(matching, key=len)]
    is_copy = launch.kernel in COPIES and part == "elementwise"
    return "copies" if is_copy else part


def part_of_product(launch: Launch, rate: str | None) -> tuple[str, str | None]:
    """Return (part, rate): a low-precision product with an fp32 result is a weight gradient."""
    arguments = launch.arguments
    if launch.is_triton and arguments.get("GATHER"):
        return "products", "own gathered"
    if launch.is_triton:
        if rate == "own fp8" and arguments["BY_STEP"] and arguments["K"] == MX_SIDE:
            rate = "own fp8, every 32"
        return ("weight gradients" if arguments["Y"].dtype == torch.float32 else "products"), rate

    first = 1 if "addmm" in launch.kernel or launch.kernel == "aten.baddbmm" else 0
    dtype = arguments["in"][first].dtype
    out = arguments["out"][0].dtype
    if dtype not in (*HALF, *FP8):  # among all products, only a router's are in fp32
        return "router", "fp32"
    if launch.file in ROUTER_FILES:
        return "router", rate
    if launch.file in NVFP4_FILES:  # any of its three products; two elements a byte at twice the rate of fp8
        return "products", "library fp8" if dtype in FP8 else rate
    if dtype in FP8:
        is_mx = any(tensor.dtype == torch.float8_e8m0fnu for tensor in arguments["in"])  # by its scales
        has_fast_sum = is_mx or bool(arguments["numbers"].get("use_fast_accum"))
        rate = "library fp8" if has_fast_sum else "library fp8, exact sums"
    return ("weight gradients" if out == torch.float32 else "products"), rate
