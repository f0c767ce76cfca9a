"""The config, a tree of the knobs in keys.py: read from recipes, files and the command line.

Precedence: command line > --config file > recipe > the defaults of keys.py. All four go through `build`, so a typo or a
value of the wrong type is the same one-line error wherever it was made: `error: parallel.tpp: no such key; did you mean
parallel.tp?` (exit code 2). rules.py holds every rule that spans keys.
"""
import dataclasses
import difflib
import functools
import hashlib
import math
import pathlib
import pickle
import types
import typing
from typing import Literal

import yaml

from keys import (LARGEST_SCALE, Checkpoint, Config, Data, Eval, Log, Model, Optim, Parallel, Profile, Train, attention_weights,
                  batch_size, batch_sizes, divisors, fp8_recipe, head_dim, in_fp8, is_moe, kv_heads, moe_ffn, mup_scores, mup_width,
                  numbers, of_stage, padded_vocab, remakes, scale_block, sequences, span, steps_of, value_dim, words)
#   all that a reader of a config needs comes from here
from strict import ConfigError, read_yaml

HERE = pathlib.Path(__file__).parent / "configs"
CODE = (".", "kernels", "parallel", "model", "data", "optim", "checkpoint", "runtime", "plan")


# ---- plain data -> dataclasses ---------------------------------------------------------------------------------------

def build(cls, data: dict, at: str = ""):
    """A dataclass from nested plain data. Raises ConfigError naming the dotted key."""
    hints = typing.get_type_hints(cls)
    if not isinstance(data, dict):
        raise ConfigError(f"{at.rstrip('.') or 'config'}: expected keys and values, got {data!r}")
    unknown = [k for k in data if k not in hints]
    if unknown:
        raise ConfigError(f"{at}{unknown[0]}: no such key" + nearest(cls, at, str(unknown[0])))
    return cls(**{k: convert(hints[k], v, at + k) for k, v in data.items()})


def nearest(cls, at: str, key: str) -> str:
    names = [f.name for f in dataclasses.fields(cls)]
    near = difflib.get_close_matches(key, names, 1, 0.5)
    if near:
        return f"; did you mean {at}{near[0]}?"
    every = [f"{s.name}.{f.name}" for s in dataclasses.fields(Config) for f in dataclasses.fields(s.default_factory)]
    other = [d for d in every if d.split(".")[1] == key] or difflib.get_close_matches(at + key, every, 1, 0.6)
    return f"; did you mean {other[0]}?" if other else f"; {at.rstrip('.') or 'the top level'} has {', '.join(names)}"


def convert(kind, value, at: str):
    if dataclasses.is_dataclass(kind):
        return build(kind, {} if value is None else value, at + ".")
    if typing.get_origin(kind) in (typing.Union, types.UnionType):
        if value is None or value in ("none", "None"):
            return None
        return convert(next(a for a in typing.get_args(kind) if a is not type(None)), value, at)
    if typing.get_origin(kind) is Literal:
        value = next((a for a in typing.get_args(kind) if str(a) == str(value)), value)  # "2" on the command line is 2
        if value not in typing.get_args(kind):
            raise ConfigError(f"{at}: {value!r} is not one of {', '.join(map(str, typing.get_args(kind)))}")
        return value
    if kind is str:
        if value is None or isinstance(value, (dict, list)):
            raise ConfigError(f"{at}: expected text, got {value!r}")
        return str(value)
    if kind in (int, float):
        try:  # YAML reads 3e-4 as text; 1e9 is a fair way to write an int
            if isinstance(value, bool):
                raise ValueError
            number = float(value)
            if not math.isfinite(number) or (kind is int and number != int(number)):
                raise ValueError
            return int(value) if kind is int and isinstance(value, int) else kind(number)
        except (ValueError, TypeError, OverflowError):
            raise ConfigError(f"{at}: expected {'a whole' if kind is int else 'a finite'} number, got {value!r}") from None
    if kind is bool:
        if isinstance(value, bool):
            return value
        if str(value).lower() in ("true", "on", "yes", "1", "false", "off", "no", "0"):
            return str(value).lower() in ("true", "on", "yes", "1")
        raise ConfigError(f"{at}: expected true or false, got {value!r}")
    raise TypeError(f"{at}: config type {kind}")


HORIZONS = ("steps", "tokens", "flops")
LEARNING = ("aux_loss", "aux_kind", "z_loss", "jitter", "capacity", "drop", "pad", "router_bias_rate")  # of model.*: do nothing after training


def merge(base: dict, over: dict) -> dict:
    """Later wins, key by key. A layer that sets one horizon (steps, tokens, flops) takes back the other two."""
    out = dict(base)
    for key, value in over.items():
        if isinstance(value, dict) and isinstance(out.get(key), dict):
            low = out[key]
            if key == "train" and any(value.get(h) is not None for h in HORIZONS):
                low = {k: v for k, v in low.items() if k not in HORIZONS}
            out[key] = merge(low, value)
        else:
            out[key] = value
    return out


# ---- files, recipes, command line ------------------------------------------------------------------------------------

@functools.lru_cache(maxsize=64)
def parsed(path: pathlib.Path, mtime_ns: int) -> bytes:
    """A file of configs/ as it was at that time, pickled: each caller gets a tree of its own, which it may change."""
    return pickle.dumps(read_yaml(path))


def shipped(path: pathlib.Path) -> dict:
    """read_yaml of a file of configs/, parsed once (models.yaml takes longer than all else that --list does)."""
    return pickle.loads(parsed(path, path.stat().st_mtime_ns))


def presets() -> dict[str, dict]:
    return shipped(HERE / "models.yaml")


def recipes() -> list[str]:
    """Every NAME that train.py takes: the files of configs/runs that name a model, and every preset."""
    runs = sorted(p.stem for p in (HERE / "runs").glob("*.yaml") if "model" in shipped(p))
    return runs + [n for n in presets() if n not in runs]


def recipe(name: str) -> dict:
    """configs/runs/NAME.yaml, or the preset NAME with the run settings that its `recipe` names."""
    path = HERE / "runs" / f"{name}.yaml"
    if name in recipes() and path.exists():
        return shipped(path)
    entry = presets().get(name)
    if entry is None:
        near = difflib.get_close_matches(name, recipes(), 3)
        raise ConfigError(f"{name}: no such recipe" + (f"; did you mean {' or '.join(near)}?" if near else "; see --list"))
    return merge(shipped(HERE / "runs" / f"{entry.get('recipe', 'pretrain')}.yaml"), {"model": {"preset": name}})


def dotted(argv: list[str]) -> dict:
    """['--parallel.tp', '2', '--train.steps=9'] -> nested plain data. Both spellings, and - for _, are accepted."""
    tree: dict = {}
    rest = list(argv)
    while rest:
        word = rest.pop(0)
        if not word.startswith("--"):
            raise ConfigError(f"{word}: unexpected; a setting is written --section.field VALUE")
        path, eq, value = word[2:].partition("=")
        path = path.replace("-", "_")
        if not eq:
            if not rest or (rest[0].startswith("--") and "." in rest[0]):
                raise ConfigError(f"{path}: needs a value")
            value = rest.pop(0)
        section, dot, key = path.partition(".")
        if not dot or "." in key:
            raise ConfigError(f"{path}: no such key" + nearest(Config, "", path))
        tree.setdefault(section, {})[key] = value
    return tree


def split_argv(argv: list[str]) -> tuple[str | None, str | None, list[str]]:
    """train.py's arguments -> NAME, the --config file, the rest."""
    rest, file = list(argv), None
    name = rest.pop(0) if rest and not rest[0].startswith("-") else None
    if "--config" in rest:
        at = rest.index("--config")
        if at + 1 == len(rest):
            raise ConfigError("--config: needs a file")
        file = rest[at + 1]
        del rest[at:at + 2]
    return name, file, rest


def code_hash() -> str:
    """sha256 of every Python file of this checkout."""
    root, digest = HERE.parent, hashlib.sha256()
    for path in sorted(p for folder in CODE for p in (root / folder).glob("*.py")):
        digest.update(path.read_bytes())
    return digest.hexdigest()


def resolve(name: str | None, file: str | None, argv: list[str]) -> Config:
    """The whole chain: recipe <- file <- command line, presets filled in below them. Raises ConfigError."""
    over = dotted(argv)
    layers = ([recipe(name)] if name else []) + ([read_yaml(file)] if file else []) + [over]
    if not name and not file:
        layers.insert(0, recipe("quickstart"))
    tree: dict = {}
    for layer in layers:
        tree = merge(tree, layer)
    return from_tree(tree, name)


def from_tree(tree: dict, name: str | None = None) -> Config:
    preset = (tree.get("model") or {}).get("preset", Model.preset)
    known = presets()
    if preset not in known:
        near = difflib.get_close_matches(str(preset), known, 1)
        raise ConfigError(f"model.preset: no such preset {preset!r}" + (f"; did you mean {near[0]}?" if near else "; see --list"))
    base = {k: v for k, v in known[preset].items() if k != "recipe"}
    tree = merge({"model": base}, tree)
    tree = merge({"log": {"name": name or preset}}, tree)
    return build(Config, tree)


def dump(cfg: Config) -> str:
    """YAML that reads back to the same tree."""
    return yaml.safe_dump(dataclasses.asdict(cfg), sort_keys=False, default_flow_style=False, width=120)
