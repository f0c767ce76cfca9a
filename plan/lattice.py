"""The lattice of layouts that scripts.verify proves: every legal way to lay a job over its ranks, and a covering set of cells.

A layout says where things are (LAYOUT); a switch says how a step is run there (SWITCHES). `layouts` enumerates every layout
and asks the same rules as train.py whether it is legal. `cover` gives each layout at least one cell, a choice of switches,
so that every pair of values that is legal anywhere stands in some cell (pairwise covering arrays: Cohen et al., AETG, 1997).
`product` is all of them.
"""
import itertools
import math
import random
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace

from config import Config, ConfigError
from parallel.schedule import SCHEDULES

Values = dict[str, object]
Check = Callable[[Config], object]  # raises ConfigError with the reason
DEGREES = ("tp", "pp", "cp", "dp_rep", "ep", "etp")  # their values are the divisors of the world
LAYOUT = {"sp": (False, True), "schedule": ("gpipe", "1f1b", "interleaved", "zb-h1", "zb-v", "dualpipe-v"), "vpp": (None, 4),
          "cp_kind": ("ring", "ulysses"), "zero": (0, 1, 2, 3)}
SWITCHES = {"reduce": ("collective", "ring", "hierarchy", "server", "powersgd"), "micro_batch": (1, 2),
            "recompute": ("none", "selective", "full", "mixed"), "ramp": (False, True), "stages": (None, "uneven"),
            "offload": ("none", "both"), "doc_mask": (False, True), "capacity": (None, 1.0, "padded"),
            "name": ("adamw", "muon", "lamb", "lars", "lion", "sgd", "adamw-bf16"), "mup_base": (None, 16),
            "fp8": (None, "tensorwise", "rowwise", "blockwise"), "async_save": (False, True), "geometry": ("small", "wide")}
SECTION = {"micro_batch": "train", "global_batch": "train", "ramp": "train", "fp8": "train", "layers": "model",
           "doc_mask": "data", "capacity": "model", "pad": "model", "mup_base": "model", "mup_head_dim": "model",
           "name": "optim", "states": "optim", "async_save": "checkpoint", "seq_len": "train", "context": "model",
           "window": "model"}  # else parallel
# A second geometry: longer than a block of attention's queries, no power of two, a window over many chunks of
# the ring, buckets larger than a layer (those of the first are smaller than its largest parameter). 240 is cut
# evenly over cp and tp up to 8
WIDE = {"seq_len": 240, "context": 240, "bucket_mb": 64.0}
WIDE_WINDOW = 150
ROUNDS = ("interleaved", "zb-v", "dualpipe-v")  # their warm-up, steady state and cool-down need two microbatches a rank
CANDIDATES = 12  # choices of switches that `cover` weighs for each layout
LIGHT, TURNED = 1000, 1 / 3  # how many choices of switches come first, and the share of switches that each turns

IDLE: tuple[tuple[str, Callable[[Values, int], bool]], ...] = (  # (why a cell would only repeat another, when)
    ("parallel.sp: does nothing at tp 1", lambda v, world: v["sp"] and v["tp"] == 1),
    ("parallel.schedule: all are the same at pp 1", lambda v, world: v["schedule"] != "1f1b" and v["pp"] == 1),
    ("parallel.vpp: is free for interleaved alone", lambda v, world: v["vpp"] is not None and v["schedule"] != "interleaved"),
    ("parallel.cp_kind: does nothing at cp 1", lambda v, world: v["cp_kind"] != "ring" and v["cp"] == 1),
    ("parallel.stages: every cut is the same", lambda v, world: v["stages"] and v["pp"] == 1),
    ("parallel.recompute_stages: one stage has one mode", lambda v, world: v["recompute"] == "mixed" and v["pp"] == 1),
    ("parallel.reduce: all are the same where nobody shares a parameter",
     lambda v, world: v["reduce"] != "collective" and v["tp"] * v["pp"] == world))


@dataclass(frozen=True)
class Lattice:
    """layouts: the legal ones, as values of LAYOUT and DEGREES; refused: {reason: how many}, idle ones included."""
    cfg: Config
    world: int
    check: Check
    layouts: list[Values]
    refused: dict[str, int]

    def config(self, values: Values) -> Config:
        """The job of a cell: no more layers and sequences than its stages and microbatches need, since a proof pays for each."""
        sections: dict[str, Values] = {}
        values, n = dict(values), values["pp"] * (SCHEDULES[values["schedule"]].chunks or values["vpp"] or 2)
        dp = self.world // (values["tp"] * values["cp"] * values["pp"])
        m = self.cfg.model
        # one layer more than stages, so that the stages differ; two more where fp8 keeps the first and the last
        # layer in 16 bits, or where not every layer of a mixture has experts
        spare = 2 if values["fp8"] or m.first_dense or m.moe_every > 1 else 1
        values["layers"] = min(m.layers, n + spare)
        wide = values.pop("geometry", "small") == "wide"
        pp = values["pp"]
        microbatches = 2 * pp if values["schedule"] in ROUNDS else pp + 1
        if values["ramp"]:  # its first step takes half of the microbatches
            microbatches += microbatches % 2
        values["global_batch"] = min(self.cfg.train.global_batch, dp * values["micro_batch"] * microbatches)
        if wide:
            values |= WIDE | ({"window": WIDE_WINDOW} if self.cfg.model.window else {})
        half = values["global_batch"] // 2
        values["ramp"] = f"{half},{half},{half}" if values["ramp"] else None
        if values["stages"] == "uneven":
            values["stages"] = ",".join(map(str, [values["layers"] - n + 1, *[1] * (n - 1)]))
        if values["recompute"] == "mixed":
            values |= {"recompute": "none", "recompute_stages": ",".join((["full", "selective"] * n)[:n])}
        if values["reduce"] == "powersgd":  # of full rank, which loses nothing
            values |= {"reduce": "collective", "compress": "powersgd", "powersgd_rank": 1 << 20}
        if values["capacity"] == "padded":
            values |= {"capacity": 1.0, "pad": True}
        if values["name"] == "adamw-bf16":  # its states in bf16, the arithmetic in fp64: rounding is a function of names and places
            values |= {"name": "adamw", "states": "bf16"}
        if values["mup_base"]:
            values["mup_head_dim"] = 2
        for key, value in values.items():
            sections.setdefault(SECTION.get(key, "parallel"), {})[key] = value
        return replace(self.cfg, **{s: replace(getattr(self.cfg, s), **keys) for s, keys in sections.items()})

    def legal(self, values: Values) -> bool:
        if idle(values, self.world):
            return False
        try:
            cfg = self.config(values)
            provable(cfg)
            self.check(cfg)
        except ConfigError:
            return False
        return True


def provable(cfg: Config) -> None:
    """Raises ConfigError for what may be trained and is no function of the global batch alone."""
    m = cfg.model
    if m.experts and m.aux_loss and m.aux_kind == "micro":
        raise ConfigError("model.aux_kind: micro balances the load of a micro-batch, which depends on train.micro_batch and the layout; "
                          "sequence and global do not")
    p = cfg.parallel
    if p.compress in ("int8", "fp8") or p.compress_weights != "none":
        raise ConfigError("parallel.compress, parallel.compress_weights: 8 bits lose the rest; "
                          "tests/parallel/test_compress.py holds them against their bounds")
    if cfg.optim.name == "lion" and p.compress == "powersgd":
        raise ConfigError("optim.name: lion takes the sign of a gradient, and where that is zero PowerSGD's factors leave their rounding errors")
    if cfg.optim.name == "lion" and m.positions != "rope" and (m.bias or m.qkv_bias):
        raise ConfigError("optim.name: lion takes the sign of a gradient, and that of a k bias without RoPE is noise around zero")


def idle(values: Values, world: int) -> str | None:
    return next((why for why, when in IDLE if when(values, world)), None)


def choices(axes: dict[str, tuple]) -> Iterator[Values]:
    return (dict(zip(axes, values)) for values in itertools.product(*axes.values()))


def switches(stream: random.Random) -> Iterator[Values]:
    """Every choice of switches once, without listing them all, in an order that the stream decides.

    First come random ones that turn a third of the switches each: what is cheap to run and easy to read, and
    still holds every pair of values somewhere. Then all others, in a walk in steps that have no divisor in
    common with their number."""
    seen: set[tuple] = set()

    def is_new(chosen: Values) -> bool:
        size = len(seen)
        seen.add(tuple(chosen.values()))
        return len(seen) > size

    for _ in range(LIGHT):
        chosen = {}
        for key, (first, *others) in SWITCHES.items():
            chosen[key] = stream.choice(others) if others and stream.random() < TURNED else first
        if is_new(chosen):
            yield chosen

    n = math.prod(map(len, SWITCHES.values()))
    steps = iter(lambda: stream.randrange(n // 3 + 1, n + 1), None)
    first, step = stream.randrange(n), next(s for s in steps if math.gcd(s, n) == 1)
    for i in range(n):
        at, chosen = (first + i * step) % n, {}
        for key, values in SWITCHES.items():
            at, digit = divmod(at, len(values))
            chosen[key] = values[digit]
        if is_new(chosen):
            yield chosen


def layouts(cfg: Config, world: int, check: Check) -> Lattice:
    """Every layout of `world` ranks that check(config) lets pass with the first value of each switch."""
    provable(cfg)
    degrees = tuple(d for d in range(1, world + 1) if world % d == 0)
    first = {key: values[0] for key, values in SWITCHES.items()}
    found = Lattice(cfg, world, check, [], {})
    for values in choices({key: degrees if cfg.model.experts or key not in ("ep", "etp") else (1,) for key in DEGREES} | LAYOUT):
        if world % (values["tp"] * values["pp"] * values["cp"] * values["dp_rep"]):
            continue
        why = idle(values | first, world)
        if why is None:
            try:
                check(found.config(values | first))
                found.layouts.append(values)
                continue
            except ConfigError as e:
                why = str(e)
        found.refused[why] = found.refused.get(why, 0) + 1
    return found


def product(found: Lattice, wanted: Callable[[Values], bool] = lambda values: True) -> Iterator[Values]:
    """Every legal cell: each layout with each choice of switches."""
    every = list(choices(SWITCHES))
    return (layout | switch for layout in found.layouts for switch in every if wanted(layout | switch) and found.legal(layout | switch))


def draw(found: Lattice, n: int, seed: int, wanted: Callable[[Values], bool] = lambda values: True) -> list[Values]:
    """At most n wanted cells: one of each layout before a second of any, each with a legal choice of switches."""
    stream = random.Random(seed)

    def of(layout: Values) -> Iterator[Values]:
        return (v for s in switches(stream) if wanted(v := layout | s) and found.legal(v))

    rows = [of(layout) for layout in stream.sample(found.layouts, len(found.layouts))]
    cells: list[Values] = []
    while rows and len(cells) < n:
        rows = [row for row in rows if len(cells) < n and (cell := next(row, None)) is not None and not cells.append(cell)]
    return cells


def pairs(values: Values) -> set[tuple]:
    """What a choice of switches adds to the layouts: pairs of (axis, value) of which at least one is a switch's."""
    items = list(values.items())
    return {(a, b) for a, b in itertools.combinations(items, 2) if b[0] in SWITCHES or a[0] in SWITCHES}


def cover(found: Lattice, seed: int = 0) -> list[Values]:
    """Each layout at least once; every legal pair of values at least once."""
    stream, first, cells = random.Random(seed), {key: values[0] for key, values in SWITCHES.items()}, []
    seen: set[tuple] = set()
    for layout in found.layouts:
        candidates = [layout | s for s in itertools.islice(switches(stream), CANDIDATES)]
        ranked = sorted(candidates, key=lambda c: -len(pairs(c) - seen)) + [layout | first]
        cells.append(next(c for c in ranked if found.legal(c)))
        seen |= pairs(cells[-1])
    single = [(key, value) for key, values in SWITCHES.items() for value in values]
    axes = dict.fromkeys(item for layout in found.layouts for item in layout.items())
    for a, b in ((a, b) for a in (*axes, *single) for b in single if a[0] != b[0] and not {(a, b), (b, a)} & seen):
        likely = (layout | first | dict((a, b)) for layout in found.layouts if a[0] in SWITCHES or layout[a[0]] == a[1])
        if cell := next((v for v in likely if found.legal(v)), None):  # what the greedy pass left out
            cells.append(cell)
            seen |= pairs(cell)
    return cells
