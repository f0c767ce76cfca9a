"""Model the time of a training step on one GPU, and of its parts, without a GPU.

    python -m scripts.bench model                       every scenario
    python -m scripts.bench model dense moe             two of them
    python -m scripts.bench model --json > FILE         results for a later comparison
    python -m scripts.bench model --chips --page lab/docs/step-model.md --before FILE
                                                        write the tables to the page

Nothing is timed. The launches are those of the real train_step (plan/record/launches.py). The purpose and the
FLOPs of each come from plan/record/work.py, and its duration from plan/record/rates.py, at low, middle and
high rates. Launches follow each other without gaps, so the GPU time is their sum. The host time to launch
them is computed separately, and the step time is the larger of the two.

The model ignores how a kernel's rate depends on its shape, what stays in the L2 cache between launches, and
the GPU's clock under load. lab/benchmarks/measured.py supplies measured rates.
"""

import runtime  # noqa: F401  before torch: OpenMP and malloc settings
import json
import lzma
import math
import sys
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import NamedTuple

import torch

from config.reading import build_tree, merge
from lab.benchmarks.card import fit_layers
from lab.benchmarks.shape import Shape
from build import build_run
from config import Config, ConfigError, ModelConfig
from config.provenance import commit_id
from model.flops import keys_of_layers
from parallel.microbatch import Microbatch
from parallel.topology.mesh import Mesh
from plan.count import flops_per_token, parameters
from plan.job import peak_flops_of_gpu
from plan.record.launches import CHIPS, Chip, Recorder, simulated_gpu, without_initial_weights
from plan.record.rates import (
    ASSUMED,
    ASSUMED_RATES,
    HOST,
    HOST_READ,
    LEVELS,
    SHORTEST,
    TERA,
    LaunchRates,
    Work,
    host_counts,
    host_seconds,
    seconds,
)
from plan.record.role import RoleRecord, microbatch, record_steps, training_program
from plan.record.work import PARTS, Facts, JudgedLaunch, judge
from train import train_step

GIGA = 1e9
SIDE = 128  # block size of blockwise scales (train.fp8_block)


# ---- scenarios ---------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Scenario:
    """A model from lab/benchmarks/shape.py with additional config keys.

    documents: number of equal documents per sequence; by default those of the shape, or one. cudnn: whether
    cuDNN handles packed documents (torch 2.14, or nvidia-cudnn-frontend).
    """

    shape: str
    model: Mapping[str, object] = field(default_factory=dict)
    train: Mapping[str, object] = field(default_factory=dict)
    optim: Mapping[str, object] = field(default_factory=dict)
    documents: int | None = None
    cudnn: bool = False


def fp8(recipe: str) -> dict[str, object]:
    return {"dtype": "fp8", "fp8": recipe}


BF16_STATES = {"states": "bf16"}
UNPROVEN = {"unproven": True}
LATENT = {"mixer": {"kind": "latent", "kv_rank": 512, "nope_dim": 128, "rope_dim": 64, "v_dim": 128}}
SCENARIOS = {
    "dense": Scenario("dense"),
    "dense-128k": Scenario("dense-128k"),
    "8b": Scenario("8b"),
    "8b+states": Scenario("8b", optim=BF16_STATES),
    "8b+tensorwise": Scenario("8b", train=fp8("tensorwise")),
    "moe": Scenario("moe"),
    "moe+states": Scenario("moe", optim=BF16_STATES),
    "packed": Scenario("packed"),
    "packed-uneven": Scenario("packed-uneven"),
    "packed+cudnn": Scenario("packed", cudnn=True),
    "packed-uneven+cudnn": Scenario("packed-uneven", cudnn=True),
    "dense+documents": Scenario("dense", documents=4),
    "dense+qk_norm": Scenario("dense", {"mixer": {"qk_norm": "head"}}),
    "dense+mla": Scenario("dense", LATENT),
    "dense+tensorwise": Scenario("dense", train=fp8("tensorwise")),
    "dense+rowwise": Scenario("dense", train=fp8("rowwise")),
    "dense+blockwise": Scenario("dense", train=fp8("blockwise")),
    "dense+mxfp8": Scenario("dense", train=fp8("mxfp8")),
    "moe+tensorwise": Scenario("moe", train=fp8("tensorwise")),
    # what kernels/unproven/ would gain
    "dense+qk_norm+unproven": Scenario("dense", {"mixer": {"qk_norm": "head"}}, train=UNPROVEN),
    "dense+mla+unproven": Scenario("dense", LATENT, train=UNPROVEN),
    "dense+tensorwise+unproven": Scenario("dense", train=fp8("tensorwise") | UNPROVEN),
    "dense+mxfp8+unproven": Scenario("dense", train=fp8("mxfp8") | UNPROVEN),
}


def get_shape(scenario: Scenario, chip: Chip, tiny: bool) -> Shape:
    """Return the model's shape with as many layers as fit in memory."""
    shape = fit_layers(Shape.gpu_models(tiny)[scenario.shape], chip.memory_bytes)
    assert shape is not None, f"{scenario.shape} fits {chip.name}"
    return shape


def build_config(scenario: Scenario, shape: Shape, layers: int | None = None) -> Config:
    """Return the config that a user of the GPU would write. layers: overrides the number of layers."""
    model = merge(shape.model_keys(), scenario.model, ModelConfig)
    if layers is not None:
        model["layers"] = layers
    train = {
        "seq_len": shape.seq,
        "micro_batch": shape.batch,
        "global_batch": shape.batch,
        "dtype": "bf16",
        "steps": 1000,
        "device": "cuda",
        **scenario.train,
    }
    if shape.hidden % SIDE:  # a tiny model
        train["fp8_block"] = 32
    tree = {
        "model": model,
        "train": train,
        "data": {"doc_mask": bool(document_lengths(scenario, shape))},
        "optim": {"lr": 3e-4, "warmup": 0, "decay": "constant", **scenario.optim},
    }
    return build_tree(Config, tree)


def document_lengths(scenario: Scenario, shape: Shape) -> tuple[int, ...]:
    """Return the lengths of the documents of a sequence, or () if attention covers the whole sequence."""
    count = scenario.documents
    return shape.documents if count is None else (shape.seq // count,) * count


# ---- recording ---------------------------------------------------------------------------------------------


def record(cfg: Config, chip: Chip, lengths: Sequence[int] = (), cudnn: bool = False) -> RoleRecord:
    """Record a step on one GPU. lengths: see microbatch. cudnn: see Scenario."""
    recorder = Recorder()
    with simulated_gpu(chip, recorder, cudnn) as device, without_initial_weights():
        return record_step(cfg, recorder, device, lengths)


def record_step(
    cfg: Config, recorder: Recorder, device: torch.device, lengths: Sequence[int] = ()
) -> RoleRecord:
    """Record the second step, since the first includes one-time work."""
    program = training_program(cfg, build_run, train_step)

    def batches(step: int) -> list[Microbatch]:
        return [microbatch(cfg, device, step - 1, lengths)]

    return record_steps(program, recorder, Mesh.single(), device, batches)


# ---- times -------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class LaunchGroup:
    """The launches of one kernel for one part of the step, from one function."""

    part: str
    kernel: str
    place: str
    launches: int
    nbytes: float
    flops: float
    ms: tuple[float, float, float]
    perfect_ms: float

    @property
    def lost_ms(self) -> float:
        return self.ms[1] - self.perfect_ms


@dataclass(frozen=True)
class ModelledStep:
    """A modelled step, with times at low, middle and high rates: ms on the GPU, host_ms on the host.

    layer_launches: (forward, backward, optimizer) launches per additional layer. host_reads: the places that
    wait for a value from the GPU; ms includes the time that the GPU idles there.
    """

    name: str
    parameters: int
    layers: int
    tokens: int
    model_flops: float
    peak_flops: float
    layer_launches: tuple[int, int, int]
    host_reads: tuple[str, ...]
    host_ms: tuple[float, float, float]
    groups: tuple[LaunchGroup, ...]

    @cached_property
    def ms(self) -> tuple[float, float, float]:
        return add_levels([*(group.ms for group in self.groups), self.waiting_ms])

    @property
    def waiting_ms(self) -> tuple[float, float, float]:
        low, middle, high = (1e-3 * len(self.host_reads) * getattr(HOST_READ, level) for level in LEVELS)
        return low, middle, high

    @cached_property
    def step_ms(self) -> tuple[float, ...]:
        return tuple(max(gpu, host) for gpu, host in zip(self.ms, self.host_ms))

    @property
    def mfu(self) -> tuple[float, ...]:
        return tuple(100 * self.model_flops / (1e-3 * ms) / self.peak_flops for ms in self.step_ms)

    @property
    def launches(self) -> int:
        return sum(group.launches for group in self.groups)

    @property
    def nbytes(self) -> float:
        return sum(group.nbytes for group in self.groups)

    @property
    def flops(self) -> float:
        return sum(group.flops for group in self.groups)

    @property
    def perfect_ms(self) -> float:
        return sum(group.perfect_ms for group in self.groups)

    def of_part(self, part: str) -> list[LaunchGroup]:
        return [group for group in self.groups if group.part == part]


def add_levels(times: Iterable[Sequence[float]]) -> tuple[float, float, float]:
    low, middle, high = (sum(column) for column in zip(*times, (0.0, 0.0, 0.0)))
    return low, middle, high


def perfect_seconds(work: JudgedLaunch, rates: LaunchRates) -> float:
    """Return the time at the best rates in a step without launches that could be fused into others."""
    rate = rates.products[work.rate].perfect if work.rate else math.inf
    return work.needed * max(work.nbytes / (TERA * rates.bandwidth.perfect), work.flops / (TERA * rate))


def grouped(works: Iterable[JudgedLaunch], rates: LaunchRates) -> tuple[LaunchGroup, ...]:
    members: dict[tuple[str, str, str], list[JudgedLaunch]] = defaultdict(list)
    for work in works:
        if work.launch.launches:
            members[work.part, work.launch.kernel, f"{work.launch.file}: {work.launch.function}"].append(work)
    groups = []
    for (part, kernel, place), some in members.items():
        low, middle, high = (
            1e3 * sum(seconds(Work.of(work), level, rates) for work in some) for level in LEVELS
        )
        groups.append(
            LaunchGroup(
                part,
                kernel,
                place,
                launches=sum(work.launch.launches for work in some),
                nbytes=sum(work.nbytes for work in some),
                flops=sum(work.flops for work in some),
                ms=(low, middle, high),
                perfect_ms=1e3 * sum(perfect_seconds(work, rates) for work in some),
            )
        )
    return tuple(groups)


RATES_BY_NAME = {CHIPS[gpu].name: rates for gpu, rates in ASSUMED_RATES.items()}


class RecordedStep(NamedTuple):
    """The judged launches of a scenario, and the places that wait for a value from the GPU."""

    cfg: Config
    documents: tuple[int, ...]
    works: list[JudgedLaunch]
    host: dict[str, int]
    host_reads: list[tuple[str, str]]


def recorded_step(name: str, chip: Chip, shape: Shape) -> RecordedStep:
    """Record a scenario at a shape and judge its launches."""
    scenario = SCENARIOS[name]
    cfg = build_config(scenario, shape)
    documents = document_lengths(scenario, shape)
    facts = Facts(keys_of_layers(cfg.model, documents or (shape.seq,)))
    step = record(cfg, chip, documents, scenario.cudnn)
    works = [judge(launch, facts) for launch in step.launches]
    return RecordedStep(cfg, documents, works, host_counts(step.launches), step.host_reads)


def model_step(
    name: str, chip: Chip, tiny: bool = False, rates: LaunchRates | None = None
) -> ModelledStep:
    """Record and model a scenario. rates: those assumed of the chip unless given."""
    scenario = SCENARIOS[name]
    shape = get_shape(scenario, chip, tiny)
    recorded = recorded_step(name, chip, shape)
    by_layer = launches_of_a_layer(scenario, shape, chip)
    return priced_step(name, chip, shape, recorded, by_layer, rates)


def priced_step(
    name: str,
    chip: Chip,
    shape: Shape,
    recorded: RecordedStep,
    layer_launches: tuple[int, int, int] = (0, 0, 0),
    rates: LaunchRates | None = None,
) -> ModelledStep:
    """Give the launches of a recorded step their times on a chip."""
    rates = rates or RATES_BY_NAME[chip.name]
    model = recorded.cfg.model
    per_token = flops_per_token(model, shape.seq, recorded.documents)
    peak = peak_flops_of_gpu(chip.name, "bf16")
    assert peak is not None, f"{chip.name} is in configs/clusters.yaml"
    low, middle, high = (1e3 * host_seconds(recorded.host, level, rates) for level in LEVELS)
    return ModelledStep(
        name=name,
        parameters=parameters(model)["total"],
        layers=shape.layers,
        tokens=shape.tokens,
        model_flops=per_token * shape.tokens,
        peak_flops=peak,
        layer_launches=layer_launches,
        host_reads=tuple(f"{file}: {function}" for file, function in recorded.host_reads),
        host_ms=(low, middle, high),
        groups=grouped(recorded.works, rates),
    )


def steps_of_chips(name: str, tiny: bool = False) -> dict[str, ModelledStep]:
    """Model a scenario on each GPU of ASSUMED_RATES, with as many layers as fit the smallest.

    GPUs that answer the code alike have the same launches, which are recorded once.
    """
    smallest = min((CHIPS[gpu] for gpu in ASSUMED_RATES), key=lambda chip: chip.memory_bytes)
    shape = get_shape(SCENARIOS[name], smallest, tiny)
    recorded: dict[tuple, RecordedStep] = {}
    steps = {}
    for gpu in ASSUMED_RATES:
        chip = CHIPS[gpu]
        kind = chip.capability, chip.processors
        if kind not in recorded:
            recorded[kind] = recorded_step(name, chip, shape)
        steps[gpu] = priced_step(name, chip, shape, recorded[kind])
    return steps


def launches_of_a_layer(scenario: Scenario, shape: Shape, chip: Chip) -> tuple[int, int, int]:
    """Return (forward, backward, optimizer) launches per layer: those of five layers minus those of four."""
    documents = document_lengths(scenario, shape)
    counts = []
    for layers in (4, 5):
        step = record(build_config(scenario, shape, layers), chip, documents, scenario.cudnn)
        counted = dict.fromkeys(("forward", "backward", "optimizer"), 0)
        for launch in step.launches:
            counted[launch.phase] += launch.launches
        counts.append(counted)
    fewer, more = counts
    forward, backward, optimizer = (more[phase] - fewer[phase] for phase in fewer)
    return forward, backward, optimizer


# ---- results as data ---------------------------------------------------------------------------------------


def summary(step: ModelledStep) -> dict:
    """Return the results for a later comparison: `--json` prints them, `--before` reads them."""
    parts = {}
    for part in PARTS:
        groups = step.of_part(part)
        if groups:
            parts[part] = {
                "launches": sum(group.launches for group in groups),
                "gigabytes": round(sum(group.nbytes for group in groups) / GIGA, 2),
                "teraflops": round(sum(group.flops for group in groups) / TERA, 2),
                "ms": [round(ms, 2) for ms in add_levels(group.ms for group in groups)],
            }
    return {
        "layers": step.layers,
        "tokens": step.tokens,
        "launches": step.launches,
        "layer_launches": list(step.layer_launches),
        "ms": [round(ms, 1) for ms in step.step_ms],
        "mfu": [round(percent, 1) for percent in step.mfu],
        "host_ms": [round(ms, 1) for ms in step.host_ms],
        "perfect_ms": round(step.perfect_ms, 1),
        "parts": parts,
    }


# ---- tables ------------------------------------------------------------------------------------------------


def markdown(header: Sequence[str], rows: Iterable[Sequence[object]]) -> str:
    lines = ["| " + " | ".join(header) + " |", "|---" * len(header) + "|"]
    lines += ["| " + " | ".join(str(cell) for cell in row) + " |" for row in rows]
    return "\n".join(lines)


def three(values: Iterable[float], digits: int = 0) -> str:
    """Format as low / **middle** / high."""
    low, middle, high = (f"{value:.{digits}f}" for value in values)
    return f"{low} / **{middle}** / {high}"


def steps_table(steps: Sequence[ModelledStep]) -> str:
    header = (
        "scenario", "layers", "parameters, B", "model TFLOP", "run TFLOP", "GB moved", "launches",
        "a layer: forward, backward, optimizer", "ms", "host ms", "perfect ms", "MFU, %",
    )  # fmt: skip
    rows = []
    for step in steps:
        forward, backward, optimizer = step.layer_launches
        rows.append((
            step.name,
            step.layers,
            f"{step.parameters / 1e9:.2f}",
            f"{step.model_flops / TERA:.1f}",
            f"{step.flops / TERA:.1f}",
            f"{step.nbytes / GIGA:.0f}",
            step.launches,
            f"{forward}, {backward}, {optimizer}",
            three(step.step_ms),
            three(step.host_ms),
            f"{step.perfect_ms:.0f}",
            three(step.mfu, 1),
        ))  # fmt: skip
    return markdown(header, rows)


def parts_table(steps: Sequence[ModelledStep]) -> str:
    """Tabulate milliseconds at the middle rates: a row per part, a column per scenario."""
    rows = []
    for part in PARTS:
        times = [sum(group.ms[1] for group in step.of_part(part)) for step in steps]
        if any(times):
            rows.append((part, *(f"{ms:.1f}" if ms else "" for ms in times)))
    if any(step.host_reads for step in steps):
        rows.append(("waiting for the host", *(f"{step.waiting_ms[1]:.1f}" for step in steps)))
    rows.append(("**together**", *(f"**{step.ms[1]:.0f}**" for step in steps)))
    return markdown(("part", *(step.name for step in steps)), rows)


def part_of_step_table(step: ModelledStep, others: Mapping[str, Mapping]) -> str:
    """Tabulate the parts of one scenario. others: {commit: its summary there}."""
    summaries = {**others, "now": summary(step)}
    header = ["part"]
    for commit in summaries:
        header += [f"launches, {commit}", f"GB, {commit}", f"ms, {commit}"]
    rows = []
    for part in PARTS:
        if any(part in one["parts"] for one in summaries.values()):
            rows.append([part])
            for one in summaries.values():
                rows[-1] += part_cells(one["parts"].get(part))

    together = ["**together**"]
    for one in summaries.values():
        moved = sum(part["gigabytes"] for part in one["parts"].values())
        together += [str(one["launches"]), f"{moved:.0f}", three(one["ms"])]
    used = ["MFU, %"]
    for one in summaries.values():
        used += ["", "", three(one["mfu"], 1)]
    return markdown(header, [*rows, together, used])


def part_cells(part: Mapping | None) -> list[str]:
    if part is None:
        return ["", "", ""]
    return [str(part["launches"]), f"{part['gigabytes']:.1f}", three(part["ms"], 1)]


def losses_table(step: ModelledStep, count: int = 10) -> str:
    """Tabulate the largest losses compared with the perfect step."""
    largest = sorted(step.groups, key=lambda group: -group.lost_ms)[:count]
    rows = [
        (
            group.kernel,
            group.place,
            group.part,
            group.launches,
            f"{group.ms[1]:.1f}",
            f"{group.perfect_ms:.1f}",
            f"{group.lost_ms:.1f}",
        )
        for group in largest
    ]
    header = ("kernel", "started by", "part", "launches", "ms", "perfect ms", "lost ms")
    return markdown(header, rows)


def chips_table(rows: Iterable[Mapping[str, ModelledStep]]) -> str:
    """Tabulate scenarios on the GPUs of ASSUMED_RATES: ms, and MFU by each GPU's own bf16 peak."""
    header = ["scenario", "layers"]
    for gpu in ASSUMED_RATES:
        header += [f"{gpu.upper()}: ms", f"{gpu.upper()}: MFU, %"]
    cells = []
    for steps in rows:
        first = next(iter(steps.values()))
        cells.append([first.name, first.layers])
        for step in steps.values():
            cells[-1] += [three(step.step_ms), three(step.mfu, 1)]
    return markdown(header, cells)


def rates_table(rates: LaunchRates, beside: LaunchRates | None = None) -> str:
    """Tabulate the rates of a GPU. beside: those of another, whose equal rates are left out."""
    rows = [(name, "TFLOP/s", *rate) for name, rate in rates.products.items()
            if beside is None or rate != beside.products[name]]  # fmt: skip
    rows.append(("memory", "TB/s", *rates.bandwidth))
    if beside is None:
        rows.append(("shortest kernel", "us", *SHORTEST))
        rows.append(("host reads a value", "us", *HOST_READ))
        rows += [(f"host: {name}", "us", *rate[:3], "", rate.source) for name, rate in HOST.items()]
    return markdown(("what", "unit", *LEVELS, "perfect", "from"), rows)


def rates_tables() -> list[str]:
    """Return the rates of an H200, and those of the other GPUs that differ from them."""
    parts = ["### The rates that are assumed", rates_table(ASSUMED)]
    for gpu, rates in ASSUMED_RATES.items():
        if rates is not ASSUMED:
            parts += [f"### The rates of {gpu.upper()} that are others", rates_table(rates, ASSUMED)]
    return parts


def unknown_lines(steps: Iterable[ModelledStep]) -> list[str]:
    """List the launches that plan/record/work.py does not know."""
    lines = []
    for step in steps:
        for group in step.of_part("unknown"):
            lines.append(f"{step.name}: {group.kernel} ({group.place}) has no row in plan/record/work.py")
    return lines


def host_read_lines(steps: Iterable[ModelledStep]) -> list[str]:
    lines = []
    for step in steps:
        for place in sorted(set(step.host_reads)):
            times = step.host_reads.count(place)
            lines.append(f"{step.name}: the host waits for the GPU {times} times ({place})")
    return lines


# ---- the page and the command ------------------------------------------------------------------------------

BEGIN, END = "<!-- written by: ", "<!-- end of what is written -->"


def page_text(
    steps: Sequence[ModelledStep],
    command: str,
    before: Sequence[Mapping],
    on_chips: Sequence[Mapping[str, ModelledStep]] = (),
) -> str:
    """Return all tables as shown in lab/docs/step-model.md.

    on_chips: {GPU: the step there} of each scenario.
    """
    parts = [f"{BEGIN}{command} -->", f"Commit {commit_id()}; torch {torch.__version__}."]
    parts += ["### Steps", steps_table(steps)]
    parts += ["### Where the time goes: ms at the middle rates", parts_table(steps)]
    notes = [*unknown_lines(steps), *host_read_lines(steps)]
    parts += ["\n".join(f"- {line}" for line in notes)] if notes else []
    parts += ["### On three GPUs", chips_table(on_chips)] if on_chips else []
    for step in steps:
        others = {one["commit"]: one["steps"][step.name] for one in before if step.name in one["steps"]}
        if others:
            parts.append(f"### {step.name}: before, and now")
            parts.append(part_of_step_table(step, others))
    for step in steps:
        parts += [f"### {step.name}: the ten largest losses against the perfect step", losses_table(step)]
    parts += [*rates_tables(), END]
    return "\n\n".join(parts) + "\n"


def write_page(page: Path, text: str) -> None:
    """Replace the text between the two marks of the page. Raises ConfigError if they are missing."""
    old = page.read_text()
    start, end = old.find(BEGIN), old.find(END)
    if start < 0 or end < start:
        raise ConfigError(f"--page {page}: has no lines '{BEGIN}... -->' and '{END}' to write between")
    page.write_text(old[:start] + text.rstrip("\n") + old[end + len(END) :])


def read_summary(file: Path) -> dict:
    """Read the output of --json, plain or compressed by xz."""
    data = file.read_bytes()
    return json.loads(lzma.decompress(data) if file.suffix == ".xz" else data)


def main(argv: list[str]) -> int:
    """Run the command and return the exit code. argv: the arguments after `model`."""
    from lab.benchmarks.command import make_parser

    args = make_parser().parse_args(["model", *argv])
    names = args.scenarios or list(SCENARIOS)
    for name in names:
        if name not in SCENARIOS:
            raise ConfigError(f"{name}: no such scenario; there are {', '.join(SCENARIOS)}")
    before = [read_summary(Path(file)) for file in args.before]

    steps, on_chips = [], []
    for name in names:
        print(f"{name} ...", file=sys.stderr, flush=True)
        steps.append(model_step(name, CHIPS[args.gpu], args.tiny))
        if args.chips:
            on_chips.append(steps_of_chips(name, args.tiny))
    if args.json:
        print(json.dumps({"commit": commit_id(), "steps": {step.name: summary(step) for step in steps}}))
        return 0
    text = page_text(steps, " ".join(["python -m scripts.bench model", *argv]), before, on_chips)
    if args.page:
        write_page(Path(args.page), text)
    else:
        print(text)
    return 0


if __name__ == "__main__":
    from runtime.failure import fail_cleanly

    sys.exit(fail_cleanly(main, sys.argv[1:]))
