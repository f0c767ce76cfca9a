"""The config: the tree of config/schema.py, read from recipes, files and the command line.

Precedence: command line > --config file > recipe > defaults of config/schema.py. All of them go through
`build_tree`, so an unknown key or a value of the wrong type is the same one-line error, wherever it comes
from: `error: parallel.tpp: no such key; did you mean parallel.tp?` (exit code 2). config/rules.py holds the
rules that involve several keys.
"""
import dataclasses
import difflib
import functools
import json
import math
import pathlib
import pickle
import types
import typing
from collections.abc import Callable, Mapping
from typing import Any, Literal, TypeVar

import yaml

from config.phases import phases_of, phases_text, where_stated
from config.schema import Config, ModelConfig
from config.strict import ConfigError, Tree, read_yaml

Section = TypeVar("Section")  # a dataclass of config/schema.py
CONFIG_FOLDER = pathlib.Path(__file__).parent.parent / "configs"
TRUE_WORDS = ("true", "on", "yes", "1")
FALSE_WORDS = ("false", "off", "no", "0")
HORIZONS = ("steps", "tokens", "flops")  # keys of train.* that set the length of a run

# Keys of model.* that have no effect after training.
TRAINING_ONLY_KEYS = (
    "aux_loss", "aux_kind", "z_loss", "jitter", "capacity", "drop", "pad", "router_bias_rate",
)


# ---- plain data -> dataclasses ---------------------------------------------------------------------------

def build_tree(cls: type[Section], data: Mapping[str, Any], prefix: str = "") -> Section:
    """A dataclass of config/schema.py from nested plain data.

    prefix: dotted path of the dataclass, with a dot at its end; "" for the whole config.
    Raises ConfigError, which names the dotted key, if a key is unknown or a value has the wrong type.
    """
    hints = typing.get_type_hints(cls)
    if not isinstance(data, dict):
        raise ConfigError(f"{prefix.rstrip('.') or 'config'}: expected keys and values, got {data!r}")
    for key in data:
        if key not in hints:
            raise ConfigError(f"{prefix}{key}: no such key" + nearest_key(cls, prefix, str(key)))
    return cls(**{key: parse_value(hints[key], value, prefix + key) for key, value in data.items()})


def sections() -> dict[str, type[Any]]:
    """{name: its dataclass} of each section of the config."""
    return typing.get_type_hints(Config)


def nearest_key(cls: type[Any], prefix: str, key: str) -> str:
    """The end of an error about an unknown key: the key that was probably meant, or the keys that exist."""
    meant = synonyms()
    foreign = meant.get(prefix + key) or meant.get(key.rsplit(".")[-1])
    if foreign:
        return f"; did you mean {foreign}?"

    names = [field.name for field in dataclasses.fields(cls)]
    near = difflib.get_close_matches(key, names, 1, 0.5)
    if near:
        return f"; did you mean {prefix}{near[0]}?"

    every: list[str] = []
    for section_name, section in sections().items():
        every += [f"{section_name}.{field.name}" for field in dataclasses.fields(section)]
    same_name = [path for path in every if path.split(".")[1] == key]
    candidates = same_name or difflib.get_close_matches(prefix + key, every, 1, 0.6)
    if candidates:
        return f"; did you mean {candidates[0]}?"
    return f"; {prefix.rstrip('.') or 'the top level'} has {', '.join(names)}"


def parse_value(hint: Any, value: Any, path: str) -> Any:
    """The value as its type hint requires it.

    Raises ConfigError, which names `path` (the dotted key), if the value has another type.
    """
    if isinstance(hint, type) and dataclasses.is_dataclass(hint):
        return build_tree(hint, {} if value is None else value, path + ".")

    if typing.get_origin(hint) in (typing.Union, types.UnionType):
        if value is None or value in ("none", "None"):
            return None
        member = next(member for member in typing.get_args(hint) if member is not type(None))
        return parse_value(member, value, path)

    if typing.get_origin(hint) is Literal:
        return parse_choice(typing.get_args(hint), value, path)
    if hint not in PARSERS:
        raise TypeError(f"{path}: config type {hint}")
    return PARSERS[hint](value, path)


def parse_choice(choices: tuple[Any, ...], value: Any, path: str) -> Any:
    """The choice that the value names; the text "2" of a command line names the integer 2."""
    value = next((choice for choice in choices if str(choice) == str(value)), value)
    if value not in choices:
        raise ConfigError(f"{path}: {value!r} is not one of {', '.join(map(str, choices))}")
    return value


def parse_text(value: Any, path: str) -> str:
    if value is None or isinstance(value, (dict, list)):
        raise ConfigError(f"{path}: expected text, got {value!r}")
    return str(value)


def parse_integer(value: Any, path: str) -> int:
    number = finite_number(value)
    if number is None or number != int(number):
        raise ConfigError(f"{path}: expected a whole number, got {value!r}")
    return value if isinstance(value, int) else int(number)


def parse_float(value: Any, path: str) -> float:
    number = finite_number(value)
    if number is None:
        raise ConfigError(f"{path}: expected a finite number, got {value!r}")
    return number


def finite_number(value: Any) -> float | None:
    """The value as a float; None if it is not a finite number. Text is accepted: YAML reads 3e-4 as text."""
    if isinstance(value, bool):
        return None
    try:
        number = float(value)
    except (ValueError, TypeError, OverflowError):
        return None
    return number if math.isfinite(number) else None


def parse_boolean(value: Any, path: str) -> bool:
    if isinstance(value, bool):
        return value
    word = str(value).lower()
    if word not in TRUE_WORDS + FALSE_WORDS:
        raise ConfigError(f"{path}: expected true or false, got {value!r}")
    return word in TRUE_WORDS


PARSERS: dict[type, Callable[[Any, str], Any]] = {
    str: parse_text,
    int: parse_integer,
    float: parse_float,
    bool: parse_boolean,
}


def flatten_tree(tree: Tree) -> Tree:
    """Returns a tree without inner ones: {"a": {"b": 1}, "c": 2} -> {"a.b": 1, "c": 2}."""
    flat: Tree = {}
    for name, value in tree.items():
        if isinstance(value, dict):
            flat |= {f"{name}.{key}": inner for key, inner in flatten_tree(value).items()}
        else:
            flat[name] = value
    return flat


def merge(base: Tree, over: Tree) -> Tree:
    """Both trees in one; for a key that both have, the value of `over`.

    If `over` sets one of train.steps, train.tokens and train.flops, the other two of `base` are dropped.
    """
    merged = dict(base)
    for key, value in over.items():
        below = merged.get(key)
        if not (isinstance(value, dict) and isinstance(below, dict)):
            merged[key] = value
            continue
        if key == "train" and any(value.get(horizon) is not None for horizon in HORIZONS):
            below = {name: kept for name, kept in below.items() if name not in HORIZONS}
        merged[key] = merge(below, value)
    return merged


# ---- files and recipes -----------------------------------------------------------------------------------

@functools.lru_cache(maxsize=64)
def parse_yaml_cached(path: pathlib.Path, mtime_ns: int) -> bytes:
    """A file of configs/ as it was at that time, pickled: each caller gets a tree that it may change."""
    return pickle.dumps(read_yaml(path))


def shipped_configs(path: pathlib.Path) -> Tree:
    """read_yaml of a file of configs/, parsed once: models.yaml takes longer than the rest of --list."""
    return pickle.loads(parse_yaml_cached(path, path.stat().st_mtime_ns))


def synonyms() -> dict[str, str]:
    """{word of another framework: our setting}, from configs/synonyms.yaml."""
    meant: dict[str, str] = {}
    for setting, words in shipped_configs(CONFIG_FOLDER / "synonyms.yaml").items():
        for word in words:
            meant[word] = setting
    return meant


def presets() -> dict[str, Tree]:
    """The models of configs/models.yaml."""
    return shipped_configs(CONFIG_FOLDER / "models.yaml")


def recipes() -> list[str]:
    """Every NAME that train.py accepts: the files of configs/runs that name a model, then other presets."""
    files = (CONFIG_FOLDER / "runs").glob("*.yaml")
    runs = sorted(path.stem for path in files if "model" in shipped_configs(path))
    return runs + [name for name in presets() if name not in runs]


def recipe(name: str) -> Tree:
    """configs/runs/NAME.yaml; or the preset NAME, with the run settings that its key `recipe` names.

    Raises ConfigError if there is neither.
    """
    path = CONFIG_FOLDER / "runs" / f"{name}.yaml"
    if name in recipes() and path.exists():
        return shipped_configs(path)

    preset = presets().get(name)
    if preset is None:
        near = difflib.get_close_matches(name, recipes(), 3)
        hint = f"; did you mean {' or '.join(near)}?" if near else "; see --list"
        raise ConfigError(f"{name}: no such recipe{hint}")
    run_settings = CONFIG_FOLDER / "runs" / f"{preset.get('recipe', 'pretrain')}.yaml"
    return merge(shipped_configs(run_settings), {"model": {"preset": name}})


# ---- command line ----------------------------------------------------------------------------------------

def stated_keys(file: str | None, argv: list[str]) -> set[str]:
    """The keys (section.key) that a config file and a command line state. Raises ConfigError."""
    trees = [dotted_overrides(argv), read_yaml(file) if file else {}]
    return {key for tree in trees for key in flatten_tree(tree)}


def dotted_overrides(argv: list[str]) -> Tree:
    """['--parallel.tp', '2', '--train.steps=9'] -> {'parallel': {'tp': '2'}, 'train': {'steps': '9'}}.

    A dash in a key counts as an underscore.
    Raises ConfigError if a word is not a setting or a value is missing.
    """
    tree: Tree = {}
    rest = list(argv)
    while rest:
        word = rest.pop(0)
        if not word.startswith("--"):
            raise ConfigError(f"{word}: unexpected; a setting is written --section.field VALUE")
        path, equals_sign, value = word[2:].partition("=")
        path = path.replace("-", "_")

        if not equals_sign:
            next_is_setting = bool(rest) and rest[0].startswith("--") and "." in rest[0]
            if not rest or next_is_setting:
                raise ConfigError(f"{path}: needs a value")
            value = rest.pop(0)

        section, dot, key = path.partition(".")
        if not dot or "." in key:
            raise ConfigError(f"{path}: no such key" + nearest_key(Config, "", path))
        tree.setdefault(section, {})[key] = value
    return tree


def split_argv(argv: list[str]) -> tuple[str | None, str | None, list[str]]:
    """The arguments of train.py -> (NAME, the --config file, all other arguments).

    Raises ConfigError if --config has no file.
    """
    rest = list(argv)
    name = None
    if rest and not rest[0].startswith("-"):
        name = rest.pop(0)

    file = None
    if "--config" in rest:
        index = rest.index("--config")
        if index + 1 == len(rest):
            raise ConfigError("--config: needs a file")
        file = rest[index + 1]
        del rest[index:index + 2]
    return name, file, rest


def resolve(name: str | None, file: str | None, argv: list[str]) -> Config:
    """The config of a command line: recipe, then file, then overrides, on top of the model's preset.

    Without a recipe and a file: the recipe quickstart. Raises ConfigError.
    """
    overrides = dotted_overrides(argv)
    if not name and not file:
        layers = [recipe("quickstart")]
    else:
        layers = [recipe(name)] if name else []
    if file:
        layers.append(read_yaml(file))
    layers.append(overrides)

    tree: Tree = {}
    for layer in layers:
        tree = merge(tree, layer)
    return from_tree(tree, name)


def preset_values(preset: object) -> Tree:
    """The model keys of an entry of configs/models.yaml; of None, none. Raises ConfigError."""
    if preset is None:
        return {}
    known = presets()
    if not isinstance(preset, str) or preset not in known:
        near = difflib.get_close_matches(str(preset), known, 1)
        hint = f"; did you mean {near[0]}?" if near else "; see --list"
        raise ConfigError(f"model.preset: no such preset {preset!r}{hint}")
    return {key: value for key, value in known[preset].items() if key != "recipe"}


def from_tree(tree: Tree, name: str | None = None) -> Config:
    """The config of a tree, with the values of its preset below it. name: default of log.name.

    Raises ConfigError if the preset or a key does not exist, or a value has the wrong type.
    """
    model = tree.get("model")
    preset = model.get("preset", ModelConfig.preset) if isinstance(model, dict) else ModelConfig.preset
    if preset == "none":
        preset = None
    tree = merge({"model": preset_values(preset)}, tree)
    tree = merge({"log": {"name": name or preset}}, tree)

    train = tree.get("train")
    if not isinstance(train, dict) or train.get("phases") is None:
        return build_tree(Config, tree)
    given = train["phases"]
    text = phases_text(given, parse_phase_key)
    cfg = build_tree(Config, {**tree, "train": {**train, "phases": text}})
    phases_of(cfg, where_stated(given))  # raises if they are not in order
    return cfg


def parse_phase_key(path: str, value: Any, name: str) -> Any:
    """The typed value of a key that a phase states, as section.key. name: its name in messages.

    Raises ConfigError if there is no such key, or the value has the wrong type.
    """
    section, _, key = path.partition(".")
    section_type = sections().get(section)
    hints = typing.get_type_hints(section_type) if section_type else {}
    if section_type is None or key not in hints:
        missing = nearest_key(section_type or Config, f"{section}." if section_type else "", key or path)
        raise ConfigError(f"{name}: no such key{missing}")
    return parse_value(hints[key], value, name)


def dump(cfg: Config) -> str:
    """The config as YAML; reading it back gives the same config."""
    tree = dataclasses.asdict(cfg)
    if cfg.train.phases is not None:
        tree["train"]["phases"] = json.loads(cfg.train.phases)  # a list is easier to read
    return yaml.safe_dump(tree, sort_keys=False, default_flow_style=False, width=120)
