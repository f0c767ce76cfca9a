"""Overrides of a proof: config keys on its command line, which modify the model under proof.

They are written and parsed as for train.py, and set after the recipe is shrunk to its tiny twin. A key is
refused if the cells vary it (CELL_WORDS), or if the proof has to set it itself (NEEDED). Keys of a bundle
(lattice.BUNDLES) are allowed: all cells then use the given value.
"""
from dataclasses import dataclass

from config import OPTIMIZERS, Config, ConfigError, OptimConfig, Tree
from config.axes import AXES
from config.reading import build_tree, dotted_overrides, get_phases, merge, resolve, unused
from config.reading.phases import phases_text
from config.tree import plain_data, value_at

# {key that the cells vary: the words of --only that choose its values}
CELL_WORDS = {
    **{f"parallel.{axis.key}": f"{axis.word}2, {axis.word}4 or {axis.word}8" for axis in AXES},
    "parallel.sp": "sp or no-sp",
    "parallel.async_tp": "async-tp or no-async-tp",
    "parallel.ep_chunks": "ep-chunks2 or ep-chunks3",
    "parallel.ep_bound": "ep-bound1.25, ep-bound8.0 or no-ep-bound1.25",
    "parallel.compress_tokens": "tokens-fp8 or no-tokens-fp8",
    "parallel.schedule": "gpipe, 1f1b, interleaved, zb-h1, zb-v or dualpipe-v",
    "parallel.vpp": "vpp4 or no-vpp4",
    "parallel.cp_kind": "cp-ring or cp-ulysses",
    "parallel.zero": "zero0, zero1, zero2 or zero3",
    "parallel.reduce": "reduce-ring, reduce-hierarchy or reduce-server",
    "parallel.compress": "powersgd or no-powersgd",
    "parallel.powersgd_rank": "powersgd or no-powersgd",
    "parallel.recompute": "selective, full or mixed",
    "parallel.recompute_stages": "mixed or no-mixed",
    "parallel.stages": "uneven or no-uneven",
    "parallel.offload": "offload or no-offload",
    "parallel.bucket_mb": "wide or no-wide",
    "train.micro_batch": "mb1 or mb2",
    "train.ramp": "ramp or no-ramp",
    "train.fp8": "tensorwise, rowwise, blockwise, mxfp8, nvfp4 or no-fp8",
    "train.seq_len": "wide or no-wide",
    "model.context": "wide or no-wide",
    "model.mlp.capacity": "capacity, padded, no-capacity or no-padded",
    "model.mlp.capacity.factor": "capacity, padded, no-capacity or no-padded",
    "model.mlp.capacity.pad": "padded or no-padded",
    "model.mup": "mup or no-mup",
    "model.mup.base": "mup or no-mup",
    "model.mup.head_dim": "mup or no-mup",
    "optim.name": " or ".join(name for name in OPTIMIZERS if name != OptimConfig.name),
    "optim.states": "adamw-bf16, adamw-8bit, no-adamw-bf16 or no-adamw-8bit",
    "optim.orthogonalize": "muon-polar or normuon-polar",
    "optim.qk_clip": "qk-clip or no-qk-clip",
    "model.vocab_multiple": "vocab128 or no-vocab128",
    "train.ema": "ema or no-ema",
    "data.doc_mask": "docs or no-docs",
    "data.pack": "best-fit or no-best-fit",
    "data.valid": "own-valid or no-own-valid",
    "checkpoint.async_save": "async or no-async",
    "distill.teacher": "distill or no-distill",
}

RUN_FOLDER = "the proof writes and reads its own run folder"

# {key or section: why the proof has to set it itself}
NEEDED = {
    "model.preset": "the proof trains the recipe NAME; give another NAME",
    "model.layers": "each cell has as many layers as its stages need",
    "model.vocab": "the proof's data have the ids of the byte tokenizer",
    "train.steps": "the proof runs a few steps of a run of fixed length",
    "train.tokens": "the proof runs a few steps of a run of fixed length",
    "train.flops": "the proof runs a few steps of a run of fixed length",
    "train.global_batch": "each cell has as many sequences as its microbatches need",
    "train.dtype": "layouts are proved in fp64; --precision proves the other dtypes",
    "train.device": "the proof runs on the CPU",
    "train.cuda_graphs": "the proof runs on the CPU",
    "train.threads": "the proof runs each rank in one thread",
    "train.max_minutes": "the proof stops and resumes at fixed steps",
    **dict.fromkeys(("data.path", "data.tokenizer", "data.eod", "data.dtype", "data.cache"),
                    "the proof writes its own data"),
    "eval.every": "the proof evaluates after fixed steps",
    **dict.fromkeys(("checkpoint.every", "checkpoint.keep", "checkpoint.resume", "checkpoint.init_from",
                     "checkpoint.init_changes", "checkpoint.branch"),
                    "the proof saves and resumes after fixed steps"),
    "log": RUN_FOLDER,
    "profile": RUN_FOLDER,
}


@dataclass(frozen=True)
class Overrides:
    """The keys that a proof sets in its tiny config: ((section.key, value as text), ...), possibly none."""
    settings: tuple[tuple[str, str], ...] = ()

    def __str__(self) -> str:
        """`model.mlp.activation=gelu model.mixer.qk_norm=head`"""
        return " ".join(f"{key}={value}" for key, value in self.settings)

    def title(self, name: str) -> str:
        """Return the name of a recipe or cell, followed by the overrides."""
        return f"{name} {self}" if self.settings else name

    def keys(self) -> list[str]:
        return [key for key, _ in self.settings]

    def apply(self, cfg: Config) -> Config:
        """Return the config with the keys set.

        Raises ConfigError, as train.py does, if a key is unknown or a value has the wrong type.
        """
        if not self.settings:
            return cfg
        changed: Tree = {}
        for path, value in self.settings:
            if path == "train.phases":
                value = phases_text(value)
            changed[path] = value
        return build_tree(Config, merge(plain_data(cfg), changed))


# ---- the command line --------------------------------------------------------------------------------------

def split_overrides(argv: list[str]) -> tuple[list[str], list[str]]:
    """Split the arguments into (those of the command itself, those of its overrides).

    An override is `--section.key VALUE` or `--section.key=VALUE`.
    """
    own: list[str] = []
    settings: list[str] = []
    rest = list(argv)
    while rest:
        word = rest.pop(0)
        name, equals_sign, _ = word.partition("=")
        if not (name.startswith("--") and "." in name):
            own.append(word)
            continue
        settings.append(word)
        if not equals_sign and rest and not rest[0].startswith("--"):
            settings.append(rest.pop(0))
    return own, settings


def read_overrides(words: list[str], name: str) -> Overrides:
    """Parse the overrides of the recipe `name` on a command line.

    Raises ConfigError, as train.py does, if the recipe has no such key, or a value is missing or of the wrong
    type.
    """
    overrides = Overrides(tuple(dotted_overrides(words).items()))
    overrides.apply(resolve(name, None, []))
    return overrides


# ---- refusals ----------------------------------------------------------------------------------------------

def check_free(overrides: Overrides) -> None:
    """Raise ConfigError for the first key that the cells vary, or that the proof sets itself."""
    for path in overrides.keys():
        if path in CELL_WORDS:
            raise ConfigError(f"{path}: the cells vary it; choose among them with --only {CELL_WORDS[path]}")
        reason = NEEDED.get(path) or NEEDED.get(path.partition(".")[0])
        if reason:
            raise ConfigError(f"{path}: {reason}; leave it out")


def check_phases(cfg: Config, steps: int) -> None:
    """Raise ConfigError if a phase of train.phases starts after the `steps` steps of a proof."""
    for phase in get_phases(cfg).all:
        if phase.steps_before >= steps:
            raise ConfigError(
                f"train.phases: the proof makes {steps} steps, and phase {phase.number} begins after "
                f"{phase.steps_before}; give it phases that begin after step 1 to {steps - 1}, as "
                "configs/phases/proof.yaml"
            )


def check_only_model(overrides: Overrides, option: str) -> None:
    """Raise ConfigError for the first key outside `model`; `option` chooses all others itself."""
    for path in overrides.keys():
        if not path.startswith("model."):
            raise ConfigError(f"{path}: {option} sets every key but those of the model; leave it out")


def check_reached(overrides: Overrides, cfgs: list[Config], world: int, program: str) -> None:
    """Raise ConfigError if an override does not reach the trained configs, or changes nothing there.

    `cfgs` are all configs that `program` trains on `world` ranks.
    """
    if not overrides.settings:
        return
    for cfg in cfgs:
        kept = overrides.apply(cfg)
        for path in overrides.keys():
            if value_at(cfg, path) != value_at(kept, path):
                raise ConfigError(f"{path}: {program} sets it to {value_at(cfg, path)}; leave it out")
    for path in overrides.keys():
        rows = [unused_row(cfg, path, world) for cfg in cfgs]
        row = rows[0] if rows and None not in rows else None
        if row is not None:
            raise ConfigError(f"{path}: does nothing: it {row.why}; {row.remedy}")


def unused_row(cfg: Config, path: str, world: int) -> unused.UnusedKeys | None:
    """Return why train.py calls the key unused in this config, or None if it has an effect."""
    return next((row for key, _, row in unused.find_unused(cfg, world) if key == path), None)
