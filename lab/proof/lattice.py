"""The lattice of layouts that scripts.verify proves: all legal layouts of a job, and cells that cover them.

A layout says where things are: the degrees of parallelism (DEGREES) and the keys of LAYOUT. A switch says how
a step runs, or what a run reads, evaluates, saves and starts from (SWITCHES, BUNDLES). A cell is a layout
with one value for every switch.

- `find_layouts` enumerates the layouts and applies train.py's own rules to keep the legal ones.
- `all_cells` yields every legal cell.
- `draw_cells` draws legal cells at random.
- `covering_cells` returns at least one cell for each layout, and covers every pair of values that is legal
  anywhere (pairwise covering arrays: Cohen et al., AETG, 1997).
"""
import itertools
import json
import math
import random
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, replace
from typing import Any

from config import OPTIMIZERS, Config, ConfigError, LoraConfig, MupConfig, layer_models
from config.axes import AXES, ranks_of_layout, ranks_of_microbatch
from config.optimizers import optimizers_that
from config.pattern import BlockVariant
from config.reading import get_phases
from config.reading.schedules import plan_pipeline
from config.reading.tiny import NUM_STEPS
from config.tree import has_path, with_values
from config.values import Values, combinations
from model.delta import DeltaConfig
from model.mamba import MambaConfig
from model.router import CapacityConfig, has_experts, mixture
from parallel.pipeline.schedule import SCHEDULES

# ---- the parts of a cell -----------------------------------------------------------------------------------

DEGREES = tuple(axis.key for axis in AXES)  # each ranges over the divisors of the world size
LAYOUT = {
    "sp": (False, True),
    "schedule": ("gpipe", "1f1b", "interleaved", "zb-h1", "zb-v", "dualpipe-v"),
    "vpp": (None, 4),
    "cp_kind": ("ring", "ulysses"),
    "zero": (0, 1, 2, 3),
}
MUP_BASE = 16
QK_CLIP = 0.01  # below the largest score of most heads in every step of a tiny model
WITH_BF16_STATES = {f"{name}-bf16": name for name in optimizers_that(lambda spec: spec.supports_bf16_states)}
WITH_8BIT_STATES = {f"{name}-8bit": name for name in optimizers_that(lambda spec: spec.implementation_8bit)}
WITH_POLAR_EXPRESS = {  # other values of "name": an optimizer that orthogonalizes by other polynomials
    f"{name}-polar": name for name in optimizers_that(lambda spec: "orthogonalize" in spec.keys)
}
SWITCHES = {  # the first value of each is the default
    "reduce": ("collective", "ring", "hierarchy", "server", "powersgd"),
    "micro_batch": (1, 2),
    "async_tp": (False, True),
    "ep_chunks": (1, 2, 3),
    "ep_bound": (None, 1.25, 8.0),  # rows are over the bound in some steps; in none
    "compress_tokens": ("none", "fp8"),  # one process rounds the same (lab/proof/rounded_rows.py)
    "recompute": ("none", "selective", "full", "mixed"),
    "ramp": (False, True),
    "stages": (None, "uneven"),
    "offload": ("none", "both"),
    "doc_mask": (False, True),
    "pack": ("stream", "best_fit"),
    "valid": (None, "long"),  # a corpus of lab/proof/verify/tiny_config.py
    "capacity": (None, 1.0, "padded"),
    "name": (*OPTIMIZERS, *WITH_BF16_STATES, *WITH_8BIT_STATES, *WITH_POLAR_EXPRESS),
    "mup": (None, MUP_BASE),
    "fp8": (None, "tensorwise", "rowwise", "blockwise", "mxfp8", "nvfp4"),
    "ema": (None, 0.9),
    "qk_clip": (None, QK_CLIP),
    "async_save": (False, True),
    "vocab_multiple": (32, 128),  # with 128, padding takes a quarter of the rows for 257 ids: whole shards
    "geometry": ("small", "wide"),
    # the words of BUNDLES: several keys in one switch
    "numbers": (None, "numbers", "frozen", "lora"),
    "source": (None, "fim", "raw"),
    "scores": (None, "tasks"),
    "saves": (None, "kept", "mirror"),
    "start": (None, "init", "resumed", "branch"),
    "guard": (None, "reruns", "spikes", "noise", "inside"),
    "teacher": (None, "distill"),
    "phases": (None, "phases"),
}
BUNDLE_SWITCHES = ("numbers", "source", "scores", "saves", "start", "guard", "teacher", "phases")

# Values of a switch that set several config keys.
EXPANDED_VALUES: dict[tuple[str, object], Values] = {
    # full rank, which loses nothing
    ("reduce", "powersgd"): {"reduce": "collective", "compress": "powersgd", "powersgd_rank": 1 << 20},
    ("capacity", None): {"model.mlp.capacity": None},
    ("capacity", 1.0): {"model.mlp.capacity": CapacityConfig(factor=1.0)},
    ("capacity", "padded"): {"model.mlp.capacity": CapacityConfig(factor=1.0, pad=True)},
    # states in bf16, arithmetic in fp64: the rounding depends on names and element indices only
    **{("name", word): {"name": name, "states": "bf16"} for word, name in WITH_BF16_STATES.items()},
    **{("name", word): {"name": name, "states": "8bit"} for word, name in WITH_8BIT_STATES.items()},
    **{
        ("name", word): {"name": name, "orthogonalize": "polar-express"}
        for word, name in WITH_POLAR_EXPRESS.items()
    },
    ("mup", MUP_BASE): {"mup": MupConfig(base=MUP_BASE, head_dim=2)},
}

TRUNK_STEPS = 1  # of the run whose checkpoint another starts from

# {word of a switch: its keys}. A key that the user overrides keeps that value in every cell.
# lab/proof/verify/tiny_config.py turns the names of data, stores and other runs into paths.
BUNDLES: dict[str, Values] = {
    "numbers": {
        "model.init_std": 0.05,
        "model.mixer.kernel": "reference",
        "model.mtp.weight": 0.7,
        "model.mixer.rope.scaling.low_freq": 0.5,
        "train.seed": 7,
        "train.fp8_keep": 0,
        "train.max_minutes": 1e6,
        "train.deterministic": True,
        "train.unproven": True,
        "optim.min_lr": 1e-5,
        "optim.decay_steps": 12,
        "optim.lr_rule": "sqrt",
        "optim.base_batch": 3,
        "optim.beta1": 0.8,
        "optim.beta2": 0.9,
        "optim.momentum": 0.8,
        "optim.rank_fraction": 0.5,
        "optim.weight_decay": 0.3,
        "optim.groups": "embedding: lr_factor 0.5, weight_decay 0.05; layers.1.*: lr_factor 2",
        "parallel.timeout_s": 200.0,
        "log.slow_window": 2,
    },
    "frozen": {"optim.groups": "embedding: lr_factor 0; layers.0.*: lr_factor 0; norm: lr_factor 0"},
    "lora": {
        "model.lora": LoraConfig(rank=2, alpha=6.0, scale="rslora", targets="*", dropout=0.2),
        "optim.groups": "norm: lr_factor 0.5",
    },
    "fim": {
        "data.fim_rate": 0.7,
        "data.fim_spm_rate": 0.4,
        "data.fim_split": "token",
        "data.fim_tokens": "<fim_prefix>,<fim_middle>,<fim_suffix>",
        "data.fim_valid": True,
        "data.bos": True,
        "eval.special": True,
    },
    "raw": {
        "data.tokenizer": "bytes",
        "data.eod": "256",
        "data.dtype": "int32",
        "data.span": 64,
        "data.prefetch": 0,
    },
    "tasks": {
        "eval.tasks": "tasks.jsonl",
        "eval.tasks_every": 3,
        "eval.tasks_limit": 2,
        "eval.batches": 2,
        "eval.source_batches": 1,
        "eval.sample": 5,
        "eval.temperature": 0.5,
    },
    "kept": {
        "checkpoint.keep": 1,
        "checkpoint.keep_every": 3,
        "checkpoint.keep_at": "1",
        "checkpoint.keep_minutes": 1e-6,
        "checkpoint.check_replicas": 1,
        "checkpoint.failed_saves": 0,
        "checkpoint.timeout_s": 600.0,
        "train.steps": None,
        "train.flops": 1e13,  # thousands of steps, so the rate does not decay
    },
    "mirror": {
        "checkpoint.mirror": "file:///store",
        "checkpoint.mirror_failures": 1,
        "checkpoint.memory_every": 2,
        "checkpoint.memory_dir": "memory",
        "checkpoint.replicas": 1,
    },
    "init": {"checkpoint.init_from": "trunk", "checkpoint.init_changes": "model.norm.eps"},
    "resumed": {"checkpoint.resume": "trunk"},
    "branch": {"checkpoint.branch": "trunk"},
    "reruns": {"train.rerun_every": 2, "train.rerun_suspects": True},
    "spikes": {
        "optim.spike_sigma": 50.0,
        "optim.spike_window": 2,
        "optim.spike_rewind": 1,
        "optim.spike_rewinds": 1,
    },
    "noise": {"log.noise_scale": True},
    "inside": {"log.inside_every": 1},
    "distill": {"distill.teacher": "trunk", "distill.weight": 0.7, "distill.temperature": 2.0},
}
PHASES = ("train.phases",)  # the value of "phases", built for each cell

# The config section of each key; keys not listed are in `parallel`.
SECTION = {
    "layers": "model",
    "context": "model",
    "mup": "model",
    "vocab_multiple": "model",
    "micro_batch": "train",
    "global_batch": "train",
    "seq_len": "train",
    "ramp": "train",
    "fp8": "train",
    "ema": "train",
    "doc_mask": "data",
    "pack": "data",
    "valid": "data",
    "name": "optim",
    "states": "optim",
    "orthogonalize": "optim",
    "qk_clip": "optim",
    "async_save": "checkpoint",
}

# The geometry "wide": sequences longer than an attention query block and not a power of two, a window that
# spans many chunks of the ring, and buckets larger than a layer (those of "small" are smaller than its
# largest parameter). 240 tokens divide evenly over cp and tp up to 8.
WIDE = {"seq_len": 240, "context": 240, "bucket_mb": 64.0}
WIDE_WINDOW = 150
SHORT = {"small": 16, "wide": 80}  # {geometry: sequence length in the second of train.phases}

# Warm-up, steady state and cool-down of these schedules need two microbatches per rank.
TWO_MICROBATCHES_PER_RANK = ("interleaved", "zb-v", "dualpipe-v")

CANDIDATES = 12  # switch settings that covering_cells compares for each layout
NUM_RANDOM = 1000  # random switch settings tried before the full walk
CHANGED_SHARE = 1 / 3  # fraction of the switches that a random setting changes

# (reason, predicate): cells that would only repeat another one
IDLE: tuple[tuple[str, Callable[[Values, int], bool]], ...] = (
    (
        "parallel.sp: does nothing at tp 1",
        lambda values, world: values["sp"] and values["tp"] == 1,
    ),
    (
        "parallel.async_tp: does nothing at tp 1",
        lambda values, world: values["async_tp"] and values["tp"] == 1,
    ),
    (
        "parallel.ep_chunks: does nothing at ep 1 and etp 1",
        lambda values, world: values["ep_chunks"] > 1 and values["ep"] * values["etp"] == 1,
    ),
    (
        "parallel.ep_bound: does nothing at ep 1 and etp 1",
        lambda values, world: values["ep_bound"] is not None and values["ep"] * values["etp"] == 1,
    ),
    (
        "parallel.compress_tokens: does nothing at ep 1 and etp 1",
        lambda values, world: values["compress_tokens"] != "none" and values["ep"] * values["etp"] == 1,
    ),
    (
        "parallel.schedule: all are the same at pp 1",
        lambda values, world: values["schedule"] != "1f1b" and values["pp"] == 1,
    ),
    (
        "parallel.vpp: is free for interleaved alone",
        lambda values, world: values["vpp"] is not None and values["schedule"] != "interleaved",
    ),
    (
        "parallel.cp_kind: does nothing at cp 1",
        lambda values, world: values["cp_kind"] != "ring" and values["cp"] == 1,
    ),
    (
        "parallel.stages: every cut is the same",
        lambda values, world: values["stages"] is not None and values["pp"] == 1,
    ),
    (
        "parallel.recompute_stages: one stage has one mode",
        lambda values, world: values["recompute"] == "mixed" and values["pp"] == 1,
    ),
    (
        "parallel.reduce: all are the same where nobody shares a parameter",
        lambda values, world: values["reduce"] != "collective" and values["tp"] * values["pp"] == world,
    ),
)


def idle(values: Values, world: int) -> str | None:
    """Return why the cell would only repeat another one, or None if it does not."""
    return next((why for why, is_idle in IDLE if is_idle(values, world)), None)


def default_switches() -> Values:
    """Return the first value of each switch."""
    return {key: values[0] for key, values in SWITCHES.items()}


# ---- the legal layouts -------------------------------------------------------------------------------------

@dataclass(frozen=True)
class Lattice:
    """The layouts of a job on `world` ranks.

    `layouts` are the legal ones, as values of DEGREES and LAYOUT. `refused` counts the illegal and idle ones
    by reason. `kept` are the overridden section.key names, which the wide geometry and BUNDLES leave as in
    cfg.
    """

    cfg: Config
    world: int
    layouts: list[Values]
    refused: dict[str, int]
    kept: frozenset[str] = frozenset()

    def config(self, values: Values) -> Config:
        """Return the config of a cell.

        It has only as many layers and sequences as its stages and microbatches need, since every proof pays
        for them.
        """
        chunks = SCHEDULES[values["schedule"]].chunks or values["vpp"] or 2  # stages per rank
        num_stages = values["pp"] * chunks
        num_layers = min(self.cfg.model.layers, num_stages + self._spare_layers(values))
        global_batch = self._global_batch(values)

        keys: Values = {}
        for key, value in values.items():
            keys |= EXPANDED_VALUES.get((key, value), {key: value})
        keys["layers"] = num_layers
        keys["global_batch"] = global_batch

        if keys.pop("geometry", "small") == "wide":
            keys |= WIDE
            if getattr(self.cfg.model.mixer, "window", None):
                keys["model.mixer.window"] = WIDE_WINDOW
            keys["model.blocks"] = tuple(
                variant if f"model.blocks.{variant.name}.mixer.window" in self.kept else wide_variant(variant)
                for variant in self.cfg.model.blocks
            )
        if values["ramp"]:
            half = global_batch // 2
            keys["ramp"] = f"{half},{half},{half}"
        else:
            keys["ramp"] = None
        if values["stages"] == "uneven":
            split_layers = [num_layers - num_stages + 1, *[1] * (num_stages - 1)]
            keys["stages"] = ",".join(map(str, split_layers))
        if values["recompute"] == "mixed":
            modes = ["full", "selective"] * num_stages
            keys["recompute"] = "none"
            keys["recompute_stages"] = ",".join(modes[:num_stages])

        for switch in BUNDLE_SWITCHES:
            keys |= BUNDLES.get(keys.pop(switch), {})
        if self.world == 1:
            keys.pop("checkpoint.replicas", None)  # needs other nodes
        seq_len = keys.get("seq_len", self.cfg.train.seq_len)
        if values["numbers"] == "numbers":
            tokens = float(NUM_STEPS * global_batch * seq_len)
            keys |= {"train.steps": None, "train.tokens": tokens, "train.flops": None}
        if values["phases"]:
            keys["train.phases"] = self._phases(values, global_batch, seq_len)

        changed: Values = {}
        for key, value in keys.items():
            path = key if "." in key else f"{SECTION.get(key, 'parallel')}.{key}"
            if key not in self.kept and has_path(self.cfg, path):  # BUNDLES may name a part the model lacks
                changed[path] = value
        return with_values(self.cfg, changed)

    def _spare_layers(self, values: Values) -> int:
        """Return how many layers to add beyond one per stage. With one more, the stages differ in size.

        Two more if fp8 keeps the first and the last layer in 16 bits, or if some layers of a MoE are dense.
        """
        model = self.cfg.model
        has_both = len({has_experts(model, layer) for layer in range(model.layers)}) > 1
        return 2 if values["fp8"] or has_both else 1

    def _global_batch(self, values: Values) -> int:
        """Return the sequences per step: enough for the warm-up and the steady state of the schedule."""
        pp = values["pp"]
        dp = self.world // ranks_of_microbatch(values)
        num_microbatches = 2 * pp if values["schedule"] in TWO_MICROBATCHES_PER_RANK else pp + 1
        if values["ramp"]:  # the first step of a ramp takes half of the microbatches
            num_microbatches += num_microbatches % 2
        return min(self.cfg.train.global_batch, dp * values["micro_batch"] * num_microbatches)

    def _phases(self, values: Values, global_batch: int, seq_len: int) -> str:
        """Return train.phases: first shorter sequences, another schedule and, if microbatches allow it,
        half the batch; then the original length and another RoPE.
        """
        second: Values = {
            "after_steps": 2,
            "train.seq_len": SHORT[values["geometry"]],
            "optim.lr": 2e-3,
            "optim.decay": "linear",
        }
        dp = self.world // ranks_of_microbatch(values)
        if global_batch % (2 * dp * values["micro_batch"]) == 0:
            second["train.global_batch"] = global_batch // 2
        third = {"after_steps": 3, "train.seq_len": seq_len}
        if getattr(self.cfg.model.mixer, "rope", None):
            third["model.mixer.rope.base"] = 3e4
        return json.dumps([second, third])

    def is_legal(self, values: Values) -> bool:
        """Return whether the cell can be proved: it is not idle, and train.py accepts it."""
        needs_experts = (
            values["capacity"] is not None
            or values["ep_chunks"] > 1
            or values["ep_bound"] is not None
            or values["compress_tokens"] != "none"
        )
        if idle(values, self.world) or (needs_experts and not has_path(self.cfg, "model.mlp.capacity")):
            return False  # cheap to check
        bundles = [values[switch] for switch in BUNDLE_SWITCHES if values[switch]]
        if any(self.kept.issuperset(BUNDLES.get(word, PHASES)) for word in bundles):
            return False  # a bundle has no effect here
        try:
            cfg = self.config(values)
            check_provable(cfg)
            plan_pipeline(cfg, self.world, advise=False)
        except ConfigError:
            return False
        return True


def check_provable(cfg: Config) -> None:
    """Raise ConfigError if a legal job still depends on more than the global batch, or cannot read the
    proof's data.
    """
    model = cfg.model
    if cfg.data.dtype and cfg.data.pack == "best_fit":
        raise ConfigError("data.pack: best_fit places whole documents, and a file without an index has none")
    if cfg.data.dtype and (cfg.data.fim_rate or cfg.data.bos):
        raise ConfigError("data.tokenizer: bytes has neither sentinels nor a start token")
    if cfg.checkpoint.branch and any(0 < phase.steps_before <= TRUNK_STEPS for phase in get_phases(cfg).all):
        raise ConfigError("train.phases: a phase begins where the branch does, or before")
    begins_ramp = cfg.checkpoint.branch and cfg.train.ramp
    if begins_ramp and cfg.train.phases and (cfg.data.span or 0) > cfg.train.seq_len:
        raise ConfigError(
            "train.ramp: begins with the branch, which then reads less of data.span before the length changes"
        )
    experts = mixture(model)
    aux = experts.router.aux if experts else None
    if aux and aux.weight and aux.over == "micro":
        raise ConfigError(
            "model.mlp.router.aux.over: micro balances the load of a micro-batch, which depends on "
            "train.micro_batch and the layout; sequence and global do not"
        )

    parallel = cfg.parallel
    if parallel.compress in ("int8", "fp8") or parallel.compress_weights != "none":
        raise ConfigError(
            "parallel.compress, parallel.compress_weights: 8 bits are not exact; "
            "tests/parallel/wire/test_compress.py checks their error bounds"
        )

    optimizer = cfg.optim.name
    if cfg.optim.states == "8bit":
        meets_noise = "optim.states: 8bit rounds moments beside the largest of a block"
    elif OPTIMIZERS[optimizer].takes_sign:
        meets_noise = f"optim.name: {optimizer} takes the sign of a gradient"
    else:
        return
    if parallel.compress == "powersgd":
        raise ConfigError(
            f"{meets_noise}, and where gradients are zero PowerSGD's factors leave their rounding errors"
        )
    mixers = {type(each.mixer) for each in layer_models(model).values()}
    if cfg.data.doc_mask and mixers & {MambaConfig, DeltaConfig}:
        raise ConfigError(
            f"{meets_noise}, and with data.doc_mask the sums of decays in such a mixer leave rounding errors "
            "where a document without targets has none"
        )
    if getattr(model.mixer, "bias", None) and model.mixer.rope is None:
        raise ConfigError(
            f"{meets_noise}, and the gradient of a k bias without RoPE is noise around zero"
        )


def wide_variant(variant: BlockVariant) -> BlockVariant:
    """Return the block variant with the window of the wide geometry, if it has a window."""
    changes = dict(variant.changes)
    if changes.get("mixer.window"):
        changes["mixer.window"] = WIDE_WINDOW
    return replace(variant, changes=tuple(changes.items()))


def find_layouts(cfg: Config, world: int, kept: Iterable[str] = ()) -> Lattice:
    """Return the layouts of `world` ranks that are legal with the first value of every switch.

    `kept` is as in Lattice. Raises ConfigError if no layout of the job can be proved (see `check_provable`).
    """
    check_provable(cfg)
    found = Lattice(cfg, world, layouts=[], refused={}, kept=frozenset(kept))
    divisors = tuple(degree for degree in range(1, world + 1) if world % degree == 0)
    degrees = dict.fromkeys(DEGREES, divisors)
    if not mixture(cfg.model):
        degrees |= {axis.key: (1,) for axis in AXES if axis.of_experts}

    for values in combinations(degrees | LAYOUT):
        if world % ranks_of_layout(values):
            continue
        why = refusal(found, values | default_switches())
        if why is None:
            found.layouts.append(values)
        else:
            found.refused[why] = found.refused.get(why, 0) + 1
    return found


def refusal(found: Lattice, values: Values) -> str | None:
    """Return why the cell is idle or illegal, or None if it is neither."""
    why = idle(values, found.world)
    if why is not None:
        return why
    try:
        plan_pipeline(found.config(values), found.world, advise=False)
    except ConfigError as error:
        return str(error)
    return None


# ---- switch settings ---------------------------------------------------------------------------------------

def switches(stream: random.Random) -> Iterator[Values]:
    """Yield every switch setting once, lazily, in an order that depends on `stream`.

    Random settings that change a third of the switches each come first: they are cheap to run and easy to
    read, and together they contain every pair of values. All others follow.
    """
    seen: set[tuple] = set()
    for chosen in itertools.chain(random_switches(stream), walk_switches(stream)):
        values = tuple(chosen.values())
        if values not in seen:
            seen.add(values)
            yield chosen


def random_switches(stream: random.Random) -> Iterator[Values]:
    """Yield NUM_RANDOM random switch settings, with possible repeats."""
    for _ in range(NUM_RANDOM):
        chosen = {}
        for key, (default, *others) in SWITCHES.items():
            is_changed = others and stream.random() < CHANGED_SHARE
            chosen[key] = stream.choice(others) if is_changed else default
        yield chosen


def walk_switches(stream: random.Random) -> Iterator[Values]:
    """Yield every switch setting once by walking their numbers with a random start and stride.

    The stride is coprime to the number of settings, so the walk visits all of them.
    """
    num_choices = math.prod(map(len, SWITCHES.values()))
    start = stream.randrange(num_choices)
    stride = stream.randrange(num_choices // 3 + 1, num_choices + 1)
    while math.gcd(stride, num_choices) != 1:
        stride = stream.randrange(num_choices // 3 + 1, num_choices + 1)

    for i in range(num_choices):
        number = (start + i * stride) % num_choices
        chosen = {}
        for key, values in SWITCHES.items():
            number, digit = divmod(number, len(values))
            chosen[key] = values[digit]
        yield chosen


# ---- choosing cells ----------------------------------------------------------------------------------------

def all_cells(found: Lattice, wanted: Callable[[Values], bool] = lambda values: True) -> Iterator[Values]:
    """Yield every legal cell that `wanted` accepts: each layout with each switch setting."""
    every_choice = list(combinations(SWITCHES))
    for layout in found.layouts:
        for chosen in every_choice:
            cell = layout | chosen
            if wanted(cell) and found.is_legal(cell):
                yield cell


def draw_cells(
    found: Lattice, n: int, seed: int, wanted: Callable[[Values], bool] = lambda values: True
) -> list[Values]:
    """Draw at most n legal cells that `wanted` accepts, one per layout before a second of any."""
    stream = random.Random(seed)

    def get_cells(layout: Values) -> Iterator[Values]:
        for chosen in switches(stream):
            cell = layout | chosen
            if wanted(cell) and found.is_legal(cell):
                yield cell

    sources = [get_cells(layout) for layout in stream.sample(found.layouts, len(found.layouts))]
    cells: list[Values] = []
    while sources and len(cells) < n:
        not_exhausted = []
        for source in sources:
            if len(cells) == n:
                break
            cell = next(source, None)
            if cell is not None:
                cells.append(cell)
                not_exhausted.append(source)
        sources = not_exhausted
    return cells


def pairs_with_switches(values: Values) -> set[tuple]:
    """Return the pairs of (key, value) in a cell that involve at least one switch."""
    items = itertools.combinations(values.items(), 2)
    return {(one, other) for one, other in items if one[0] in SWITCHES or other[0] in SWITCHES}


def covering_cells(found: Lattice, seed: int = 0) -> list[Values]:
    """Return legal cells that cover each layout and each legal pair of values at least once."""
    stream = random.Random(seed)
    defaults = default_switches()
    cells: list[Values] = []
    seen: set[tuple] = set()

    def add(layout: Values, wanted: Values, fallback: Values) -> None:
        """Add the legal candidate cell of a layout with the most new pairs.

        All candidates have the `wanted` values. `fallback` is a legal cell.
        """
        nonlocal seen
        chosen = itertools.islice(switches(stream), CANDIDATES)
        candidates = [layout | each | wanted for each in chosen]
        candidates.sort(key=lambda cell: -len(pairs_with_switches(cell) - seen))
        cells.append(next((cell for cell in candidates if found.is_legal(cell)), fallback))
        seen |= pairs_with_switches(cells[-1])

    for layout in found.layouts:
        add(layout, wanted={}, fallback=layout | defaults)

    # pairs that are still missing
    switch_items = [(key, value) for key, values in SWITCHES.items() for value in values]
    layout_items = dict.fromkeys(item for layout in found.layouts for item in layout.items())
    for one, other in itertools.product((*layout_items, *switch_items), switch_items):
        if one[0] == other[0] or {(one, other), (other, one)} & seen:
            continue
        cell = cell_with(found, one, other)
        if cell is not None:
            add(cell, wanted=dict((one, other)), fallback=cell)
    return cells


def cell_with(found: Lattice, one: tuple[str, Any], other: tuple[str, Any]) -> Values | None:
    """Return the first legal cell with both (key, value) items and every other switch at its default.

    `one` is an item of a layout or of a switch, `other` an item of a switch. Returns None if there is no such
    legal cell.
    """
    key, value = one
    for layout in found.layouts:
        if key not in SWITCHES and layout[key] != value:
            continue
        cell = layout | default_switches() | dict((one, other))
        if found.is_legal(cell):
            return cell
    return None
