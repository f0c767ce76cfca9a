"""The step model with measured rates against measured steps: where is the largest gap?

Rates that were not measured keep their assumed middle value. Measured ones are points of size and rate; a
launch gets the rate at its size (plan/record/rates.py: interpolated).

A profiler provides the duration of each kernel of a measured step. Library kernels are classified by their
names, ours by their function; if two of ours share a name, the one in the modelled step counts.
"""

import re
from collections import defaultdict
from collections.abc import Iterable, Mapping
from dataclasses import replace
from statistics import mean

from plan.record.rates import ASSUMED, LaunchRates, Rate, Work, host_seconds, seconds
from plan.record.work import KERNELS

LEVEL = "middle"
HOST = "host: "
OTHER = "other"
BETWEEN = "between kernels"
COMPONENTS = {  # {part of a launch: component of a step}; others: OTHER
    "products": "products",
    "weight gradients": "products",
    "attention forward": "attention forward",
    "attention backward": "attention backward",
    "elementwise": "elementwise",
    "elementwise forward": "elementwise",
    "elementwise backward": "elementwise",
    "cross entropy": "cross entropy",
    "embedding": "embedding",
    "router": "router",
    "permute": "permute",
    "quantization": "quantization",
    "optimizer": "optimizer",
}
ATTENTION = re.compile(r"fmha|flash|sdpa|attention")
BACKWARD = re.compile(r"bwd|backward|bprop|dgrad")
PRODUCT = re.compile(r"gemm|nvjet|cutlass|xmma|cublas|splitk|::(mm|addmm|bmm|_grouped_mm|_scaled_mm)")


def measured_rates(rows: Iterable[Mapping]) -> LaunchRates:
    """Return the rates in rows of lab/benchmarks/rates.py."""
    points: dict[str, dict[float, list[float]]] = defaultdict(lambda: defaultdict(list))
    rates = ASSUMED
    for row in rows:
        if row["state"] != "ok" or not row.get("rate"):
            continue
        name, value = row["rate"], row["value"]
        alone = Rate(value, value, value, value, "measured")
        if name == "shortest":
            rates = replace(rates, shortest=alone)
        elif name.startswith(HOST):
            rates = replace(rates, host={**rates.host, name.removeprefix(HOST): alone})
        else:
            points[name][row["work"]].append(value)
    means = {
        name: tuple(sorted((size, mean(values)) for size, values in sizes.items()))
        for name, sizes in points.items()
    }
    return replace(rates, points=means)


def modelled_components(row: Mapping, rates: LaunchRates) -> dict[str, float]:
    """Return {component: ms} of a row of report_modelled (lab/benchmarks/first_jobs.py)."""
    times: dict[str, float] = defaultdict(float)
    for *work, count in row["works"]:
        one = Work(*work)
        times[COMPONENTS.get(one.part, OTHER)] += 1e3 * count * seconds(one, LEVEL, rates)
    waiting = 1e-3 * row["host_reads"] * getattr(rates.host_read, LEVEL)
    between = max(0.0, 1e3 * host_seconds(row["host"], LEVEL, rates) - sum(times.values()))
    return {**times, BETWEEN: waiting + between}


def measured_components(row: Mapping, kernels: Iterable[str]) -> dict[str, float]:
    """Return {component: ms} of a measured step. `row` has the ms of its kernels.

    `kernels` are the names in the modelled step.
    """
    known = {}
    for full in (*KERNELS, *kernels):  # those of the modelled step come last and take precedence
        if full in KERNELS:
            known[full.partition(".")[2]] = COMPONENTS.get(KERNELS[full].part, OTHER)
    times: dict[str, float] = defaultdict(float)
    for name, ms in row["kernels"].items():
        times[get_component(name, known)] += ms
    return {**times, BETWEEN: max(0.0, row["ms"] - sum(times.values()))}


def get_component(name: str, known: Mapping[str, str]) -> str:
    """Return the component of a kernel. `known` maps functions of our kernels to components."""
    if name in known:
        return known[name]
    lower = name.lower()
    if ATTENTION.search(lower):
        return "attention backward" if BACKWARD.search(lower) else "attention forward"
    return "products" if PRODUCT.search(lower) else OTHER


def compare(modelled: Mapping, measured: Mapping, rates: LaunchRates) -> dict:
    """Compare a scenario modelled and measured: ms and MFU of both, and components by decreasing gap.

    ratio: FLOPs a second, modelled over measured, so steps with different numbers of layers are comparable.
    """
    expected = modelled_components(modelled, rates)
    ms = sum(expected.values())
    flops_per_s = modelled["model_flops"] / (1e-3 * ms)
    peak = modelled["peak_flops"]
    found = {}
    if measured.get("kernels") and measured["shape"]["layers"] == modelled["layers"]:
        found = measured_components(measured, (work[1] for work in modelled["works"]))
    names = sorted({*expected, *found}, key=lambda name: expected.get(name, 0.0) - found.get(name, 0.0))
    return {
        "modelled ms": ms,
        "modelled MFU": flops_per_s / peak if peak else None,
        "measured ms": measured["ms"],
        "measured MFU": measured["MFU"],
        "ratio": flops_per_s / (1e12 * measured["TFLOP/s"]),
        "components": [
            (name, expected.get(name, 0.0), found[name] if name in found else 0.0) for name in names
        ] if found else [],
    }  # fmt: skip
