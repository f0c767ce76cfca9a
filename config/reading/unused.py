"""Refuse or note keys that are set but have no effect in this config.

A key counts as set if its value is neither the default of config/schema.py nor that of the model's preset,
which may set keys of a feature that the user turns off. Most such keys are mistakes, and are refused in one
line. Keys that scripts leave set while they vary something else (sizes, optimizers, data) are noted in one
line, and the run continues.

rules.py covers keys that contradict each other. A key without a row is read by every run
(tests/config/test_unused.py lists those), or rules.py refuses it where it has no effect.

train.py calls check_unused, and scripts.plan does for what it does not search; programs that build configs
for a proof or a search (lab/proof/verify, plan/search.py) do not.
"""
import shlex
from collections.abc import Callable, Iterator
from dataclasses import dataclass

from config import (
    FP8_SIDES,
    OPTIMIZERS,
    Config,
    ConfigError,
    ModelConfig,
    as_number,
    comma_separated,
    compression_block,
    fp8_recipe,
)
from config.optimizers import optimizers_that, to_text
from config.reading.loading import dotted_overrides, presets
from config.reading.parse import build_tree, defaults
from config.reading.phases import get_phases
from config.reading.sizes import sizes_at_width
from config.tree import has_path, value_at
from model.router import mixture


@dataclass(frozen=True)
class UnusedKeys:
    """Keys of one section that have no effect under the same condition."""
    section: str
    keys: str  # names without their section, separated by spaces
    when: Callable[[Config, int], bool]  # (config, number of ranks) -> the keys have no effect
    why: str  # the reason, after "KEY does nothing: it"
    remedy: str  # how to correct the config
    note: str = ""  # why the keys are only noted, not refused; "" refuses them
    applies_to_default: bool = False  # the row applies to default values too


def recompute_modes(cfg: Config) -> list[str]:
    """Return the recompute modes that some stage has."""
    return comma_separated(cfg.parallel.recompute_stages) or [cfg.parallel.recompute]


def no_shared_parameters(cfg: Config, world: int) -> bool:
    """Return whether no two ranks hold the same parameters."""
    return world == cfg.parallel.tp * cfg.parallel.pp


def sequences_exceed_context(cfg: Config) -> bool:
    """Return whether sequences are longer than model.context, with positions that allow it."""
    return cfg.model.positions is None and cfg.model.context < cfg.train.seq_len


def gives_to_valid_alone(split: str) -> bool:
    """Return whether data.split gives something to the validation split, and nothing to the test split."""
    shares = [share.strip() for share in split.split(",")]
    return len(shares) == 2 and shares[1] != "0"


def has_made_data(path: str) -> bool:
    """Return whether a path of data.* names data that is made or downloaded at launch."""
    return "stdlib" in path.split() or "://" in path


def has_sources(path: str) -> bool:
    """Return whether a path of data.* is a blend of several sources, i.e. begins with a weight
    (data/blend.py)."""
    if not path.split() or as_number(path.split()[0]) is None:
        return False
    try:
        return len(shlex.split(path)) > 2
    except ValueError:  # data/blend.py reports what is wrong with it
        return True


def optimizer_rows() -> Iterator[UnusedKeys]:
    """Yield a row for each key that only some optimizers read (config/optimizers.py)."""
    published = ("beta1", "beta2", "eps")
    for key in sorted({key for spec in OPTIMIZERS.values() for key in spec.keys}):
        readers = optimizers_that(lambda spec, key=key: key in spec.keys)
        yield UnusedKeys(
            section="optim",
            keys=key,
            when=lambda cfg, _, key=key: key not in OPTIMIZERS[cfg.optim.name].keys,
            why=f"belongs to {to_text(readers)}, and optim.name is another",
            remedy="leave it out",
            note="one recipe, many optimizers: published recipes set it" if key in published else "",
        )


ONE_STAGE = ("gpipe", "1f1b", "zb-h1")  # schedules with one stage per rank
ONE_SCRIPT = "a job script describes its run, whether a trial run is logged or not"
MANY_SIZES = "one script, many sizes"  # scaling runs keep the key set while the degrees go down to 1

TABLE = (
    # ---- the model
    UnusedKeys(
        section="model",
        keys="context",
        when=lambda cfg, _: sequences_exceed_context(cfg),
        why="is below train.seq_len, and rotary positions continue beyond it (an export would claim less)",
        remedy="raise it to train.seq_len, or shorten that",
        applies_to_default=True,
    ),
    UnusedKeys(
        section="model",
        keys="mixer.kernel",
        when=lambda cfg, _: cfg.parallel.cp > 1 and cfg.parallel.cp_kind == "ring",
        why="selects a kernel, and ring context parallelism has its own",
        remedy="set parallel.cp_kind ulysses, or leave it out",
    ),
    # ---- the step
    UnusedKeys(
        section="train",
        keys="fp8_keep fp8_block",
        when=lambda cfg, _: fp8_recipe(cfg.train) is None,
        why="belongs to fp8, and train.dtype is not fp8",
        remedy="set train.dtype fp8, or leave it out",
    ),
    UnusedKeys(
        section="train",
        keys="fp8_block",
        when=lambda cfg, _: fp8_recipe(cfg.train) not in FP8_SIDES,
        why=f"is the block of train.fp8 {' or '.join(FP8_SIDES)}, which is not selected",
        remedy="set that, or leave it out",
        note="one script, every granularity of scales",
    ),
    UnusedKeys(
        section="train",
        keys="unproven",
        when=lambda cfg, _: cfg.train.device in ("cpu", "mps"),
        why="is about Triton kernels, and train.device has none",
        remedy="set train.device cuda, or leave it out",
    ),
    UnusedKeys(
        section="train",
        keys="loss_scale loss_scale_window",
        when=lambda cfg, _: cfg.train.dtype != "fp16",
        why="scales the loss of fp16, and train.dtype is another",
        remedy="set train.dtype fp16, or leave it out",
    ),
    UnusedKeys(
        section="optim",
        keys="min_lr",
        when=lambda cfg, _: cfg.optim.decay == "constant",
        why="is the end of a decay, and optim.decay is constant",
        remedy="select another decay, or leave it out",
    ),
    UnusedKeys(
        section="optim",
        keys="decay_fraction",
        when=lambda cfg, _: cfg.optim.decay != "wsd",
        why="is the decaying fraction of wsd, and optim.decay is another",
        remedy="select wsd, or leave it out",
    ),
    UnusedKeys(
        section="optim",
        keys="base_batch",
        when=lambda cfg, _: cfg.optim.lr_rule is None,
        why="is the batch of optim.lr_rule, which is none",
        remedy="set that to linear or sqrt, or leave it out",
    ),
    UnusedKeys(
        section="optim",
        keys="spike_window",
        when=lambda cfg, _: cfg.optim.spike_sigma is None,
        why="sets the window of optim.spike_sigma, which is none",
        remedy="set that, or leave it out",
    ),
    UnusedKeys(
        section="optim",
        keys="spike_rewinds",
        when=lambda cfg, _: cfg.optim.spike_rewind is None,
        why="limits optim.spike_rewind, which is none",
        remedy="set that, or leave it out",
    ),
    *optimizer_rows(),
    # ---- the layout
    UnusedKeys(
        section="parallel",
        keys="sp async_tp",
        when=lambda cfg, _: cfg.parallel.tp == 1,
        why="has nothing to shard at parallel.tp 1",
        remedy="leave it out",
        note=MANY_SIZES,
    ),
    UnusedKeys(
        section="parallel",
        keys="ep_chunks",
        when=lambda cfg, _: mixture(cfg.model) is not None and cfg.parallel.ep * cfg.parallel.etp == 1,
        why="has no exchange to divide: every rank has all experts at parallel.ep 1",
        remedy="leave it out",
        note=MANY_SIZES,
    ),
    UnusedKeys(
        section="parallel",
        keys="ep_bound",
        when=lambda cfg, _: mixture(cfg.model) is not None and cfg.parallel.ep * cfg.parallel.etp == 1,
        why="has no exchange to bound: every rank has all experts at parallel.ep 1",
        remedy="leave it out",
        note=MANY_SIZES,
    ),
    UnusedKeys(
        section="parallel",
        keys="compress_tokens",
        when=lambda cfg, _: mixture(cfg.model) is not None and cfg.parallel.ep * cfg.parallel.etp == 1,
        why="has no exchange to compress: every rank has all experts at parallel.ep 1",
        remedy="leave it out",
        note=MANY_SIZES,
    ),
    UnusedKeys(
        section="parallel",
        keys="schedule vpp",
        when=lambda cfg, _: cfg.parallel.pp == 1,
        why="has nothing to overlap at parallel.pp 1",
        remedy="leave it out",
        note=MANY_SIZES,
    ),
    UnusedKeys(
        section="parallel",
        keys="cp_kind",
        when=lambda cfg, _: cfg.parallel.cp == 1,
        why="has nothing to share at parallel.cp 1",
        remedy="leave it out",
        note=MANY_SIZES,
    ),
    UnusedKeys(
        section="parallel",
        keys="zero reduce compress compress_weights",
        when=no_shared_parameters,
        why="has nothing to share: no two ranks share a parameter",
        remedy="leave it out",
        note=MANY_SIZES,
    ),
    UnusedKeys(
        section="checkpoint",
        keys="check_replicas",
        when=lambda _, world: world == 1,
        why="compares this rank with others, and there are none",
        remedy="leave it out",
        note=MANY_SIZES,
    ),
    UnusedKeys(
        section="parallel",
        keys="timeout_s",
        when=lambda _, world: world == 1,
        why="is a timeout for other ranks, and there are none",
        remedy="leave it out",
        note=MANY_SIZES,
    ),
    UnusedKeys(
        section="parallel",
        keys="stages",
        when=lambda cfg, _: cfg.parallel.pp == 1 and cfg.parallel.schedule in ONE_STAGE,
        why="divides the layers into stages, and parallel.pp 1 has one stage",
        remedy="raise parallel.pp, or leave it out",
    ),
    UnusedKeys(
        section="parallel",
        keys="recompute",
        when=lambda cfg, _: cfg.parallel.recompute_stages is not None,
        why="is replaced by parallel.recompute_stages",
        remedy="set one of them",
    ),
    UnusedKeys(
        section="parallel",
        keys="recompute_parts",
        when=lambda cfg, _: "selective" not in recompute_modes(cfg),
        why="belongs to parallel.recompute selective, which no stage has",
        remedy="set that, or leave this out",
    ),
    UnusedKeys(
        section="parallel",
        keys="node",
        when=lambda cfg, _: cfg.parallel.reduce != "hierarchy",
        why="is read by parallel.reduce hierarchy only",
        remedy="set that, or leave this out",
    ),
    UnusedKeys(
        section="parallel",
        keys="compress_block",
        when=lambda cfg, _: compression_block(cfg.parallel) is None,
        why="is the block of int8 and fp8, and nothing is compressed by them",
        remedy="set parallel.compress or compress_weights, or leave it out",
    ),
    UnusedKeys(
        section="parallel",
        keys="powersgd_rank",
        when=lambda cfg, _: cfg.parallel.compress != "powersgd",
        why="belongs to parallel.compress powersgd, which is not selected",
        remedy="set that, or leave this out",
    ),
    # ---- data, evaluation, logging
    UnusedKeys(
        section="data",
        keys="span",
        when=lambda cfg, _: cfg.data.pack == "best_fit",
        why="keeps neighbouring tokens together, and data.pack best_fit places documents",
        remedy="leave it out",
    ),
    UnusedKeys(
        section="data",
        keys="split",
        when=lambda cfg, _: cfg.data.valid is not None and gives_to_valid_alone(cfg.data.split),
        why="gives a share of data.path to validation, and data.valid is separate validation data",
        remedy="leave it out",
    ),
    UnusedKeys(
        section="data",
        keys="fim_spm_rate fim_split fim_tokens fim_valid",
        when=lambda cfg, _: cfg.data.fim_rate == 0,
        why="belongs to fill-in-the-middle, and data.fim_rate is 0",
        remedy="set that, or leave this out",
    ),
    UnusedKeys(
        section="data",
        keys="cache",
        when=lambda cfg, _: not has_made_data(cfg.data.path) and not has_made_data(cfg.data.valid or ""),
        why="is the folder of data that is made or downloaded when the run starts, and data.path names files",
        remedy="leave it out",
        note="the job script of a site sets it once for all data",
    ),
    UnusedKeys(
        section="checkpoint",
        keys="mirror_failures",
        when=lambda cfg, _: cfg.checkpoint.mirror is None,
        why="counts uploads to checkpoint.mirror, which is none",
        remedy="set that, or leave this out",
    ),
    UnusedKeys(
        section="checkpoint",
        keys="init_changes",
        when=lambda cfg, _: cfg.checkpoint.init_from is None,
        why="states what differs from checkpoint.init_from, which is none",
        remedy="set that, or leave this out",
    ),
    UnusedKeys(
        section="checkpoint",
        keys="replicas memory_dir",
        when=lambda cfg, _: cfg.checkpoint.memory_every is None,
        why="belongs to checkpoints in memory, and checkpoint.memory_every is none",
        remedy="set that, or leave this out",
    ),
    UnusedKeys(
        section="distill",
        keys="weight temperature",
        when=lambda cfg, _: cfg.distill.teacher is None,
        why="belongs to distill.teacher, which is none",
        remedy="set that, or leave this out",
    ),
    UnusedKeys(
        section="eval",
        keys="source_batches",
        when=lambda cfg, _: not has_sources(cfg.data.valid or cfg.data.path),
        why="validates the sources of a blend, and the validation data is a single source",
        remedy="leave it out",
        note="one script, blends and single sources",
    ),
    UnusedKeys(
        section="eval",
        keys="prompt temperature",
        when=lambda cfg, _: cfg.eval.sample == 0,
        why="belongs to the sampled text, and eval.sample is 0",
        remedy="set eval.sample, or leave it out",
    ),
    UnusedKeys(
        section="eval",
        keys="special",
        when=lambda cfg, _: cfg.eval.tasks is None and (cfg.eval.prompt is None or cfg.eval.sample == 0),
        why="is about texts of eval.prompt and eval.tasks, and there are none",
        remedy="set one of them, or leave this out",
    ),
    UnusedKeys(
        section="eval",
        keys="tasks_every tasks_limit",
        when=lambda cfg, _: cfg.eval.tasks is None,
        why="belongs to the tasks of a validation, and eval.tasks is none",
        remedy="set eval.tasks, or leave it out",
    ),
    UnusedKeys(
        section="log",
        keys="project group tags notes",
        when=lambda cfg, _: (cfg.log.wandb, cfg.log.comet, cfg.log.mlflow) == ("off", "off", None),
        why="belongs to W&B, MLflow and Comet, and none is on",
        remedy="set log.wandb, log.mlflow or log.comet, or leave it out",
        note=ONE_SCRIPT,
    ),
    UnusedKeys(
        section="log",
        keys="entity",
        when=lambda cfg, _: (cfg.log.wandb, cfg.log.comet) == ("off", "off"),
        why="belongs to W&B and Comet, and both are off",
        remedy="set log.wandb or log.comet, or leave it out",
        note=ONE_SCRIPT,
    ),
    UnusedKeys(
        section="log",
        keys="slow_window",
        when=lambda cfg, world: world == 1,
        why="compares ranks, and there is one",
        remedy="start more ranks, or leave it out",
        note=MANY_SIZES,
    ),
    UnusedKeys(
        section="log",
        keys="noise_scale",
        when=lambda cfg, _: cfg.train.global_batch == cfg.train.micro_batch,
        why="compares two batch sizes, and a step is one microbatch",
        remedy="lower train.micro_batch",
    ),
)


def check_unused(cfg: Config, world: int = 1, but: tuple[str, ...] = ()) -> str:
    """Return one line that names the unused keys that are tolerated, or "".

    `but` lists prefixes of keys to skip because they are not decided yet. Raises ConfigError for the first
    key that is not tolerated.
    """
    notes: list[str] = []
    for path, value, row in find_unused(cfg, world):
        if path.startswith(but):
            continue
        if not row.note:
            raise ConfigError(f"{path}: {value} does nothing: it {row.why}; {row.remedy}")
        notes.append(f"{path} {value} {row.why}")
    return "note: " + "; ".join(notes) if notes else ""


def kept_sizes(cfg: Config, argv: list[str]) -> str:
    """Return one line naming the sizes that do not scale with a width set only on the command line, and the
    settings that would scale them, or "".

    `argv` is as returned by split_argv.
    """
    given = dotted_overrides(argv)
    preset = preset_model(cfg)
    if "model.hidden" not in given or cfg.model.preset is None or cfg.model.hidden == preset.hidden:
        return ""
    heads = cfg.model.mixer.heads if "model.mixer.heads" in given else None
    follow: dict[str, int] = {}
    for key, size in sizes_at_width(preset, cfg.model.hidden, heads).items():
        if f"model.{key}" not in given and has_path(cfg.model, key) and value_at(cfg.model, key) != size:
            follow[key] = size
    kept = {key: value_at(cfg.model, key) for key in follow}
    words = [f"model.{key} {size}" for key, size in kept.items() if size is not None]
    if not words:
        return ""
    if cfg.model.mup is None and "optim.lr" not in given:
        words.append(f"optim.lr {cfg.optim.lr:g}")
        if not OPTIMIZERS[cfg.optim.name].why_no_mup:
            follow["mup.base"] = preset.hidden
    added = " ".join(f"--model.{key} {size}" for key, size in follow.items())
    return (f"note: model.hidden {cfg.model.hidden} is another width than that of {cfg.model.preset}, whose "
            f"sizes stay: {', '.join(words)}; to keep its proportions, add  {added}")


def preset_model(cfg: Config) -> ModelConfig:
    """Return the model of the config's preset, or of the defaults if there is none."""
    preset = presets().get(cfg.model.preset or "", {})
    return build_tree(ModelConfig, {key: value for key, value in preset.items() if key != "recipe"})


def find_unused(cfg: Config, world: int) -> Iterator[tuple[str, str, UnusedKeys]]:
    """Yield (section.key, value as text, first row that explains it) for every set key without effect.

    For a run with phases, yields keys that have no effect in any of them.
    """
    cfgs = [phase.cfg for phase in get_phases(cfg).all]
    preset = preset_model(cfg)
    seen: set[str] = set()
    for row in TABLE:
        if not all(row.when(each, world) for each in cfgs):
            continue
        for key in row.keys.split():
            path = f"{row.section}.{key}"
            if path in seen or not (row.applies_to_default or is_set(cfg, row.section, key, preset)):
                continue
            seen.add(path)
            value = value_at(cfg, path)
            yield path, str(value).lower() if isinstance(value, bool) else str(value), row


def is_set(cfg: Config, section: str, key: str, preset: ModelConfig) -> bool:
    """Return whether the key's value comes neither from config/schema.py nor from the preset."""
    value = value_at(cfg, f"{section}.{key}")
    not_set = [value_at(defaults(), f"{section}.{key}")]
    if section == "model" and has_path(preset, key):
        not_set.append(value_at(preset, key))
    return value not in not_set
