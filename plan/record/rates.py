"""Time of a launch: rates, assumed or measured, and scaled to another GPU by its data sheet.

A launch takes

    max(bytes / bandwidth, FLOPs / rate, launches * shortest)

(for a weight gradient, its FLOPs plus the bytes of its fp32 result). The rates are those of one H200, as low,
middle and high values with their sources. `get_rates` scales them to another GPU by the ratio of the data
sheets, an assumption that has not been measured. lab/benchmarks/measured.py derives rates from measurements.
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
SHORTEST = Rate(3.0, 2.5, 2.0, 0.0, "microseconds from one launch to the next on the GPU")
HOST_READ = Rate(250, 150, 80, 0, "microseconds that the GPU idles when the host waits for a value of it")
HOST = {  # microseconds of host time
    "triton": Rate(25, 18, 12, 0, "a Triton kernel, with the Python around it"),
    "operation": Rate(12, 9, 6, 0, "an operation of torch that starts a kernel, autograd included"),
    "view": Rate(2, 1.5, 1, 0, "one that starts none"),
}

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


ASSUMED = LaunchRates(RATES)
ASSUMED_OF = Sheet("h200", bf16=989e12, fp8=1979e12, fp32=67e12, hbm=4800e9)


def get_rates(sheet: Sheet) -> LaunchRates:
    """Scale ASSUMED to another GPU by the ratio of the data sheets. Launch overhead is unchanged."""

    def scaled(rate: Rate, ratio: float) -> Rate:
        low, middle, high, perfect, source = rate
        return Rate(ratio * low, ratio * middle, ratio * high, ratio * perfect, source)

    products = {}
    for name, rate in RATES.items():
        of_fp32 = name in ("fp32", "own fp8, every 32")
        unit = "fp32" if of_fp32 else "fp8" if "fp8" in name else "bf16"
        products[name] = scaled(rate, getattr(sheet, unit) / getattr(ASSUMED_OF, unit))
    return replace(ASSUMED, products=products, bandwidth=scaled(BANDWIDTH, sheet.hbm / ASSUMED_OF.hbm))


def ratios(sheet: Sheet) -> str:
    """Describe the factors on a GPU's rates, or return "" for the GPU that they are assumed for.

    products x 0.32, memory x 0.42
    """
    found = {"products": sheet.bf16 / ASSUMED_OF.bf16, "memory": sheet.hbm / ASSUMED_OF.hbm}
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
