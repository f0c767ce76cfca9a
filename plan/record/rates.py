"""Time of a launch: rates, assumed or measured, and scaled to another GPU by its data sheet.

A launch takes

    max(bytes / bandwidth, FLOPs / rate, launches * shortest)

(for a weight gradient, its FLOPs plus the bytes of its fp32 result). The rates are those of an H100, H200 or
B200, as low, middle and high values with their sources. `get_rates` scales them to another GPU by the ratio
of the data sheets, an assumption that has not been measured. lab/benchmarks/measured.py derives rates from
measurements.
"""

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from typing import NamedTuple

import numpy

from plan.record.launches import Launch
from plan.record.work import JudgedLaunch

TERA = 1e12


# ---- assumed rates -----------------------------------------------------------------------------------------


class Rate(NamedTuple):
    """low, middle, high: expected values; perfect: the best reported by anyone. source: the reason."""

    low: float
    middle: float
    high: float
    perfect: float
    source: str


LEVELS = ("low", "middle", "high")
OWN = "expected from its instructions (tests/kernels/aot.txt); never run"

# TFLOP/s of products, on Hopper with 132 processors.
RATES = {
    "library": Rate(640, 690, 720, 788, "cuBLAS bf16, large shapes, at the clock that 700 W allow"),
    "own": Rate(500, 570, 620, 788, "weight gradients of kernels/linear.py: " + OWN),
    "own grouped": Rate(480, 560, 620, 788, "kernels/grouped_gemm.py, two programs a processor: " + OWN),
    "own grouped, weights": Rate(440, 490, 540, 788, "its weight gradients: " + OWN),
    "own gathered": Rate(450, 525, 580, 788, "the same, where threads copy single rows instead of TMA"),
    "own gathered, weights": Rate(410, 460, 505, 788, "its weight gradients, likewise"),
    "library grouped": Rate(520, 600, 660, 788, "torch._grouped_mm (CUTLASS)"),
    "library fp8": Rate(1200, 1350, 1450, 1576, "torch._scaled_mm with fast sums"),
    "library fp8, exact sums": Rate(950, 1060, 1150, 1576, "torch._scaled_mm without fast sums"),
    "own fp8": Rate(800, 865, 920, 1576, "kernels/fp8_gemm.py: " + OWN),
    # two more operations of fp32 an element of the result and 32 columns, at 29.6e12 a second: not hidden
    # behind the products (low, middle), or half of them (high)
    "own fp8, every 32": Rate(440, 480, 620, 1576, "the same with scales every 32 columns (mxfp8): " + OWN),
    "fp32": Rate(20, 30, 40, 788, "fp32 on CUDA cores, narrow outputs; perfect: in bf16"),
    "cudnn": Rate(500, 560, 600, 600, "cuDNN's attention, causal, head dim 128; of documents too"),
    "cudnn backward": Rate(400, 450, 490, 520, "cuDNN's, five products counted"),
    "flash 2": Rate(330, 350, 380, 600, "FlashAttention 2 in torch, written for sm_80"),
    "flash 2 backward": Rate(210, 230, 260, 520, "the same, five products counted"),
    "own attention": Rate(220, 270, 320, 600, "kernels/attention_triton.py, all blocks masked: a guess"),
    "own attention backward": Rate(140, 180, 220, 520, "the same, seven products of which five are counted"),
}
BANDWIDTH = Rate(3.3, 3.65, 3.95, 4.3, "TB/s of a kernel that only moves; the data sheet says 4.8")
BANDWIDTH_H100 = Rate(2.6, 2.8, 3.0, 3.08,
    "measured: 2.6 to 2.9 by Triton's casts (github.com/pytorch/ao/issues/4054), 3.0 by softmax "
    "(github.com/Dao-AILab/quack, media/2025-07-10-membound-sol.md); the data sheet says 3.35; perfect: 92 % "
    "of it, as pytorch/ao takes for reachable",
)  # fmt: skip
SHORTEST = Rate(3.0, 2.5, 2.0, 0.0, "microseconds from one launch to the next on the GPU")
HOST_READ = Rate(250, 150, 80, 0, "microseconds that the GPU idles when the host waits for a value of it")
HOST = {  # microseconds of host time
    "triton": Rate(25, 18, 12, 0, "a Triton kernel, with the Python around it"),
    "operation": Rate(12, 9, 6, 0, "an operation of torch that starts a kernel, autograd included"),
    "view": Rate(2, 1.5, 1, 0, "one that starts none"),
}

# TFLOP/s of products on Blackwell with 148 processors, whose data sheet says 2250 in bf16 and 4500 in fp8.
# What others measured has its source, what nobody has is called a guess.
BLACKWELL = {
    "library": Rate(1420, 1550, 1680, 1745,
        "cuBLAS bf16: squares from 3072 to 8192 at 1410 to 1510 (github.com/pytorch/ao/pull/2427), one at "
        "1680 (pull/3675); perfect: the best shape of github.com/stas00/ml-engineering"),
    "own": Rate(650, 850, 1100, 1745, "kernels/linear.py: a guess, half of the library; never run"),
    "own grouped": Rate(650, 850, 1100, 1745, "kernels/grouped_gemm.py: the same guess; never run"),
    "own grouped, weights": Rate(600, 750, 950, 1745, "its weight gradients: a guess; never run"),
    "own gathered": Rate(550, 750, 1000, 1745, "the same, where threads copy single rows: a guess"),
    "own gathered, weights": Rate(500, 650, 850, 1745, "its weight gradients, likewise"),
    "library grouped": Rate(1050, 1300, 1450, 1745, "torch._grouped_mm: a guess; the code does not take it"),
    "library fp8": Rate(2400, 2850, 3200, 3430,
        "cuBLAS: 2380 for a layer in fp8 with its casts (github.com/NVIDIA/TransformerEngine/issues/1747), "
        "2850 for MXFP8 at 8192 (github.com/triton-lang/triton/pull/9044); perfect: ml-engineering"),
    "library fp8, exact sums": Rate(2400, 2850, 3200, 3430,
        "the same: fast sums are a mode of Hopper (github.com/NVIDIA/cutile-python/commit/0d172bf)"),
    "own fp8": Rate(900, 1200, 1600, 3430, "kernels/fp8_gemm.py: a guess; never run"),
    "own fp8, every 32": Rate(490, 540, 690, 3430, "as on Hopper, by the fp32 rates of the data sheets"),
    "fp32": Rate(22, 34, 45, 1745, "as on Hopper, by the fp32 rates of the data sheets; perfect: in bf16"),
    "cudnn": Rate(1100, 1240, 1400, 1613,
        "cuDNN 9.13: 1.3 times slower than FlashAttention-4's 1613, the best (arXiv 2603.05451)"),
    "cudnn backward": Rate(850, 950, 1080, 1290, "a guess: 0.77 to 0.8 of the forward, as on Hopper"),
    "flash 2": Rate(330, 350, 380, 1613,
        "FlashAttention 2 in torch: 350 to 360, as on Hopper (github.com/meta-pytorch/tritonbench/pull/171)"),
    "flash 2 backward": Rate(210, 250, 310, 1290,
        "240 to 330 at head dim 64, not causal (github.com/Dao-AILab/flash-attention/issues/1589)"),
    "own attention": Rate(220, 320, 420, 1613, "kernels/attention_triton.py: a guess"),
    "own attention backward": Rate(140, 200, 280, 1290, "the same, seven products of which five are counted"),
}  # fmt: skip
BANDWIDTH_B200 = Rate(5.7, 6.2, 6.6, 6.72,
    "measured: 5.9 by a cast to MXFP8 (github.com/pytorch/ao/issues/4053), 6.55 to 6.72 by sums of large "
    "vectors (github.com/NVIDIA/cccl/pull/7391); the data sheet says 7.7 (8 for a GB200)",
)  # fmt: skip

NO_FASTER = ("own fp8, every 32",)  # products in 8 bits that count as those in 16: they are no faster

Points = tuple[tuple[float, float], ...]


# Values beyond a single GPU; only the middle ones are used.
HOST_EXCHANGE = Rate(40, 25, 15, 0, "microseconds of the host to post an exchange through torch.distributed")
HOST_LINK = Rate(40, 48, 54, 0, "GB/s of a copy to or from pinned memory of the host, PCIe of generation 5")


class Sheet(NamedTuple):
    """Data-sheet values of a GPU: FLOP/s without sparsity, memory bandwidth in bytes/s. 0 if unsupported."""

    gpu: str
    bf16: float
    fp8: float
    fp32: float
    hbm: float


@dataclass(frozen=True)
class LaunchRates:
    """Limits of a launch. Products by name, in TFLOP/s; the rest as in the tables above.

    points: measurements ((FLOPs or bytes of a launch, TFLOP/s or TB/s), ...) in ascending order, which
    override the tables. Keys: the name of a product's rate, the same with ", weights" for weight gradients, a
    memory-bound kernel, or "memory" for all other kernels.
    """

    products: Mapping[str, Rate]
    bandwidth: Rate = BANDWIDTH
    shortest: Rate = SHORTEST
    host_read: Rate = HOST_READ
    host: Mapping[str, Rate] = field(default_factory=lambda: HOST)
    points: Mapping[str, Points] = field(default_factory=dict)

    def computing(self, work: "Work", level: str) -> float:
        """Return the seconds for the FLOPs, plus the exposed tile epilogues of a weight gradient."""
        if not work.rate:
            return 0.0
        weights = f"{work.rate}, weights"
        is_weights = work.part == "weight gradients"
        points = self.points.get(weights if is_weights and weights in self.points else work.rate)
        if points:  # measurements include the epilogues
            return work.flops / (TERA * interpolated(points, work.flops))
        ends = work.ends / (TERA * getattr(self.bandwidth, level)) if is_weights else 0.0
        return work.flops / (TERA * getattr(self.products[work.rate], level)) + ends

    def moving(self, work: "Work", level: str) -> float:
        """Return the seconds for the bytes."""
        points = self.points.get(work.kernel) or self.points.get("memory")
        rate = interpolated(points, work.nbytes) if points else getattr(self.bandwidth, level)
        return work.nbytes / (TERA * rate)


ASSUMED = LaunchRates(RATES)  # of an H200
ASSUMED_RATES = {  # by GPU of configs/clusters.yaml; launches and the host take as long on each
    "h100": replace(ASSUMED, bandwidth=BANDWIDTH_H100),
    "h200": ASSUMED,
    "b200": LaunchRates(BLACKWELL, bandwidth=BANDWIDTH_B200),
}
SHEETS = {
    "h100": Sheet("h100", bf16=989e12, fp8=1979e12, fp32=67e12, hbm=3350e9),
    "h200": Sheet("h200", bf16=989e12, fp8=1979e12, fp32=67e12, hbm=4800e9),
    "b200": Sheet("b200", bf16=2250e12, fp8=4500e12, fp32=75e12, hbm=7700e9),
}
KIN = {"h800": "h100", "gb200": "b200"}  # {GPU: the one with assumed rates that it resembles}; others: h200


def assumed_of(gpu: str) -> Sheet:
    """Return the data sheet of the GPU whose rates are assumed of this one, too, or scaled to it."""
    return SHEETS[gpu if gpu in SHEETS else KIN.get(gpu, "h200")]


def get_rates(sheet: Sheet) -> LaunchRates:
    """Return the rates assumed of a GPU, else those of its kin, scaled by the ratio of the data sheets.

    The time of a launch beside its bytes and FLOPs is unchanged.
    """
    known = assumed_of(sheet.gpu)
    rates = ASSUMED_RATES[known.gpu]

    def scaled(rate: Rate, ratio: float) -> Rate:
        low, middle, high, perfect, source = rate
        return Rate(ratio * low, ratio * middle, ratio * high, ratio * perfect, source)

    products = {}
    for name, rate in rates.products.items():
        of_fp32 = name in ("fp32", "own fp8, every 32")
        unit = "fp32" if of_fp32 else "fp8" if "fp8" in name else "bf16"
        products[name] = scaled(rate, getattr(sheet, unit) / getattr(known, unit))
    return replace(rates, products=products, bandwidth=scaled(rates.bandwidth, sheet.hbm / known.hbm))


def ratios(sheet: Sheet) -> str:
    """Describe the factors on a GPU's rates, or return "" for one that rates are assumed of.

    products x 0.32, memory x 0.42
    """
    known = assumed_of(sheet.gpu)
    found = {"products": sheet.bf16 / known.bf16, "memory": sheet.hbm / known.hbm}
    return ", ".join(f"{name} x {ratio:.2f}" for name, ratio in found.items() if ratio != 1)


def interpolated(points: Points, size: float) -> float:
    """Return the rate at a size: linear in log(size) between points, constant beyond them."""
    sizes, rates = zip(*points)
    return float(numpy.interp(math.log(max(size, 1.0)), [math.log(one) for one in sizes], rates))


# ---- the time of a launch ----------------------------------------------------------------------------------


class Work(NamedTuple):
    """Cost of a launch. launches: number of kernels. ends: bytes of its result that it reads and writes.
    """

    part: str
    kernel: str
    rate: str | None
    flops: float
    nbytes: float
    launches: int
    ends: int

    @staticmethod
    def of(judged: JudgedLaunch) -> "Work":
        launch = judged.launch
        ends = launch.updated + launch.written
        return Work(
            judged.part, launch.kernel, judged.rate, judged.flops, judged.nbytes, launch.launches, ends
        )


def seconds(work: Work, level: str, rates: LaunchRates = ASSUMED) -> float:
    """Return the seconds on the GPU, with the rates of a level."""
    shortest = 1e-6 * getattr(rates.shortest, level) * work.launches
    return max(shortest, rates.moving(work, level), rates.computing(work, level))


def host_counts(launches: Iterable[Launch]) -> dict[str, int]:
    """Return {kind of HOST: count}."""
    counts = dict.fromkeys(HOST, 0)
    for launch in launches:
        counts[host_kind(launch)] += 1
    return counts


def host_kind(launch: Launch) -> str:
    """Return the key in HOST."""
    return "triton" if launch.is_triton else "operation" if launch.launches else "view"


def host_seconds(counts: Mapping[str, int], level: str, rates: LaunchRates = ASSUMED) -> float:
    return sum(1e-6 * getattr(rates.host[kind], level) * count for kind, count in counts.items())
