"""The default run folder: the recipe's, or a separate one if the recipe's holds a finished run.

So a loop over a setting makes one run per value:

    for lr in 2e-3 1e-3 5e-3; do python train.py llama2-tiny --train.steps 50 --optim.lr $lr; done

The first run is `llama2-tiny`, the second `llama2-tiny+optim.lr=0.001`. The name depends only on the settings
and the finished run, so the same command finds its run again. A run that is unfinished, or launched with
another horizon, keeps its folder to be continued there; so does every run with a --log.name.
"""
import dataclasses
import json
import re
from pathlib import Path

from config.exit_codes import FINISHED
from config.reading.earlier import current_tree
from config.reading.loading import from_tree, stated_keys
from config.reading.phases import LAYOUT, differing_keys, same_plan
from config.schema import Config
from config.strict import ConfigError, read_yaml

STARTS_FILE = "starts.jsonl"  # in a run folder: one line per launch (runtime/goodput.py)
HORIZON_KEYS = ("steps", "tokens", "flops")  # of train.*; exactly one is set
# may differ when a finished run is launched again: none changes its result
IDLE = (
    "log.",
    "profile.",
    "checkpoint.every",
    "checkpoint.keep",
    "checkpoint.keep_every",
    "checkpoint.keep_at",
    "checkpoint.keep_minutes",
    "checkpoint.failed_saves",
    "checkpoint.check_replicas",
    "checkpoint.mirror",
    "checkpoint.mirror_failures",
    "checkpoint.memory_every",
    "checkpoint.replicas",
    "checkpoint.memory_dir",
    "checkpoint.async_save",
    "checkpoint.timeout_s",
    "train.max_minutes",
    "train.rerun_every",
    "train.rerun_suspects",
    "train.threads",
    "parallel.timeout_s",
    "parallel.elastic",
    "parallel.auto",
    "data.path",
    "data.tokenizer",
    "data.cache",
    "data.prefetch",
)
OWN_CHECKPOINTS = ("auto", "none")  # values of checkpoint.resume; others name another run's checkpoint
# Under parallel.elastic these follow from the number of ranks (plan/elastic.py), under parallel.auto from the
# planner (plan/auto.py). They change results only by rounding.
ELASTIC_KEYS = (
    "parallel.tp",
    "parallel.sp",
    "parallel.cp",
    "parallel.pp",
    "parallel.ep",
    "parallel.ep_chunks",
    "parallel.dp_rep",
    "parallel.zero",
    "parallel.schedule",
    "parallel.vpp",
    "parallel.stages",
    "parallel.recompute",
    "parallel.recompute_stages",
    "train.micro_batch",
)
# lists with an entry per stage of the given pp, meaningless under another one
KEYS_OF_STAGES = ("parallel.stages", "parallel.recompute_stages")
MAX_NAME = 200  # characters; file systems take 255


def is_name_given(file: str | None, argv: list[str]) -> bool:
    """Return whether the command line or the config file names the run folder. Raises ConfigError."""
    return "log.name" in stated_keys(file, argv)


def with_own_folder(cfg: Config, file: str | None, argv: list[str]) -> Config:
    """Return the config, with a distinct log.name if its default folder holds a finished run with other
    settings.

    `argv` excludes the recipe and --config, as returned by split_argv. Reads two small files of the folder.
    """
    if cfg.log.name is None or is_name_given(file, argv):
        return cfg
    finished = finished_config(Path(cfg.log.dir) / cfg.log.name)
    if finished is None:
        return cfg
    old, new = finished.train, cfg.train
    if any(getattr(old, key) != getattr(new, key) for key in HORIZON_KEYS):
        return cfg
    changed = settings_that_differ(finished, cfg)
    suffix = "".join(f"+{key}={plain(value)}" for key, value in changed.items())
    name = cfg.log.name + suffix
    if not changed or len(name) > MAX_NAME:  # too long: train.py asks for a --log.name
        return cfg
    return dataclasses.replace(cfg, log=dataclasses.replace(cfg.log, name=name))


def finished_config(folder: Path) -> Config | None:
    """Return the config of a finished run, or None if it does not exist or is not finished.

    The summary remains if a later launch to another horizon was killed, so the last launch decides.
    """
    starts = folder / STARTS_FILE
    try:
        if json.loads((folder / "summary.json").read_text())["finished"] is not True:
            return None
        if starts.exists() and json.loads(starts.read_text().splitlines()[-1])["exit_code"] != FINISHED:
            return None
        return from_tree(current_tree(read_yaml(folder / "config.yaml")))
    except (OSError, ValueError, LookupError, TypeError, ConfigError):  # of another version, or damaged
        return None


def settings_that_differ(old: Config, new: Config) -> dict[str, object]:
    """Return {key: value of new}, without keys that do not affect results. A vocabulary decided by the
    data does not count."""
    result: dict[str, object] = {}
    for key, value in differing_keys(old, new).items():
        is_open = key == "model.vocab" and value is None
        if key == "train.phases" and same_plan(old, new, LAYOUT if new.parallel.elastic else ()):
            continue
        if not is_open and not is_idle(key, new):
            result[key] = value
    return result


def is_idle(key: str, cfg: Config) -> bool:
    """Return whether relaunching a finished run with this config may change the key."""
    if key == "checkpoint.resume":
        return cfg.checkpoint.resume in OWN_CHECKPOINTS
    is_chosen = cfg.parallel.elastic or cfg.parallel.auto is not None
    return (is_chosen and key in ELASTIC_KEYS) or key.startswith(IDLE)


def plain(value: object) -> str:
    """Format a value as a part of a folder name."""
    text = str(value).lower() if value is None or isinstance(value, bool) else str(value)
    return re.sub(r"[^\w.,-]+", "_", text)
