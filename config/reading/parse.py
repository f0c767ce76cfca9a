"""Plain data -> the dataclasses of the config.

Recipes, files, the command line and saved configs all go through `build_tree`, so an unknown key or a value
of the wrong type is the same one-line error wherever it comes from: `error: parallel.tpp: no such key; did
you mean parallel.tp?` (exit code 2).
"""
import dataclasses
import difflib
import functools
import math
import pathlib
import pickle
import re
import typing
from collections.abc import Callable, Mapping
from typing import Any, Literal, TypeVar

from config.pattern import BLOCK_PARTS, PLAIN, BlockVariant
from config.reading.earlier import NEW_NAMES
from config.reading.kinds import every_path, members_of, part_types, parts_at
from config.schema import Config, ModelConfig
from config.strict import ConfigError, Tree, read_yaml
from config.tree import field_names, field_types, get_kind, plain_data

Section = TypeVar("Section")  # a dataclass of the tree
CONFIG_FOLDER = pathlib.Path(__file__).parent.parent.parent / "configs"
NONE = ("none", "None")
TRUE_WORDS = ("true", "on", "yes", "1")
FALSE_WORDS = ("false", "off", "no", "0")
HORIZONS = ("steps", "tokens", "flops")  # keys of train.* that set the length of a run


# ---- plain data -> dataclasses ---------------------------------------------------------------------------

def build_tree(cls: type[Section], data: Mapping[str, Any], prefix: str = "") -> Section:
    """Build a dataclass of the tree from nested plain data.

    `prefix` is the dotted path of the dataclass with a trailing dot, or "" for the whole config.
    Raises ConfigError, naming the dotted key, if a key is unknown or a value has the wrong type.
    """
    hints = field_types(cls)
    if not isinstance(data, dict):
        raise ConfigError(f"{prefix.rstrip('.') or 'config'}: expected keys and values, got {data!r}")
    data = nested(data, prefix)
    for key in data:
        if key not in hints:
            raise ConfigError(f"{prefix}{key}: no such key" + nearest_key(cls, prefix, str(key)))
    for field in dataclasses.fields(cls):
        is_needed = field.default is dataclasses.MISSING and field.default_factory is dataclasses.MISSING
        if is_needed and field.name not in data and part_types(hints[field.name]):
            data[field.name] = {}  # a part of the first kind
        elif is_needed and field.name not in data:
            part = get_kind(cls) or prefix.rstrip(".").rpartition(".")[2]
            raise ConfigError(f"{prefix}{field.name}: missing, and {part} has no default for it that fits "
                              "all models; set it")
    kinds = data.pop("blocks", None) if cls is ModelConfig else None
    node = cls(**{key: parse_value(hints[key], value, prefix + key) for key, value in data.items()})
    if not kinds:
        return node
    return dataclasses.replace(node, blocks=parse_blocks(node, kinds, f"{prefix}blocks"))


@functools.cache
def defaults() -> Config:
    """Return the config with the default of every key, without a preset."""
    return build_tree(Config, {})


def parse_blocks(model: ModelConfig, kinds: Any, path: str) -> tuple[BlockVariant, ...]:
    """Parse kinds of blocks {name: {mixer, mlp, norm}}, each of which changes parts of the model.

    Raises ConfigError.
    """
    if kinds in NONE:
        return ()
    if not isinstance(kinds, dict):
        raise ConfigError(
            f"{path}: expected kinds of blocks as {{NAME: {{mixer.window: 512}}}}, got {kinds!r}")
    return tuple(
        BlockVariant(name, parse_block(model, name, tree, f"{path}.{name}."))
        for name, tree in nested(kinds, f"{path}.").items()
    )


def parse_block(model: ModelConfig, name: str, tree: Any, prefix: str) -> tuple[tuple[str, Any], ...]:
    """Return the changes of one kind of block as (path, value). Raises ConfigError."""
    where = prefix.rstrip(".")
    if not re.fullmatch("[A-Za-z][A-Za-z0-9_-]*", name) or name in (PLAIN, "x"):
        raise ConfigError(f"{where}: {name!r} cannot be the name of a kind of block; choose another")
    if not isinstance(tree, dict):
        raise ConfigError(f"{where}: expected keys and values, got {tree!r}")
    changes: dict[str, Any] = {}
    for part, given in nested(tree, prefix).items():
        if part not in BLOCK_PARTS:
            raise ConfigError(f"{prefix}{part}: no such key; a kind of block has {', '.join(BLOCK_PARTS)}")
        own = getattr(model, part)
        merged = merge({part: plain_data(own)}, {part: given}, ModelConfig)[part]
        value = parse_value(field_types(ModelConfig)[part], merged, prefix + part)
        changes |= changes_to(own, value, part_tree(field_types(ModelConfig)[part], given), part)
    return tuple(changes.items())


def changes_to(own: Any, value: Any, stated: Any, path: str) -> dict[str, Any]:
    """Return {path: value} of what is stated for a part, or the whole part if its kind changes."""
    if type(own) is not type(value) or not dataclasses.is_dataclass(value) or not isinstance(stated, dict):
        return {path: value}
    changes: dict[str, Any] = {}
    for key, below in nested(stated).items():
        changes |= changes_to(getattr(own, key), getattr(value, key), below, f"{path}.{key}")
    return changes


def nested(tree: Mapping[str, Any], prefix: str = "") -> Tree:
    """Nest keys with dots: {"a.b": 1} -> {"a": {"b": 1}}.

    Raises ConfigError for a key that appears twice.
    """
    inner: Tree = {}
    for path, value in tree.items():
        name, dot, rest = str(path).partition(".")
        new = {rest: value} if dot else value
        if name not in inner:
            inner[name] = new
            continue
        # a kind may be given next to its keys: mixer: latent, mixer.heads: 8
        both = [{"kind": each} if isinstance(each, str) and each not in NONE else each
                for each in (inner[name], new)]
        if not all(isinstance(each, dict) for each in both) or both[0].keys() & both[1].keys():
            raise ConfigError(f"{prefix}{path}: is given twice; keep one")
        inner[name] = both[0] | both[1]
    return inner


def sections() -> dict[str, type[Any]]:
    """Return {section name: its dataclass}."""
    return field_types(Config)


def nearest_key(cls: type[Any], prefix: str, key: str) -> str:
    """Return the end of an error about an unknown key: the probable key, or the keys that exist."""
    others = every_path(Config)
    part = prefix.rstrip(".")
    owners = [get_kind(other) for other in parts_at(Config, part) if key in field_names(other)]
    if owners:
        return f" of {get_kind(cls)}; it belongs to {part}.kind {owners[0]}"
    new_name = NEW_NAMES.get(prefix + key) or NEW_NAMES.get(f"model.{key}")
    if new_name and new_name != prefix + key:
        return f"; it is {new_name} now"
    meant = synonyms()
    foreign = meant.get(prefix + key) or meant.get(key.rsplit(".")[-1])
    if foreign:
        return f"; did you mean {foreign}?"

    # the closest name in this part, below it, or anywhere
    names = field_names(cls)
    below = {path.rpartition(".")[2]: path for path in reversed(others) if path.startswith(prefix)}
    below |= {name: prefix + name for name in names}
    near = difflib.get_close_matches(key, below if prefix else names, 1, 0.5)
    if near:
        return f"; did you mean {below[near[0]]}?"
    same_name = [path for path in others if path.rpartition(".")[2] == key]
    candidates = same_name or difflib.get_close_matches(prefix + key, list(others), 1, 0.6)
    if candidates:
        return f"; did you mean {candidates[0]}?"
    return f"; {prefix.rstrip('.') or 'the top level'} has {', '.join(names)}"


def parse_value(hint: Any, value: Any, path: str) -> Any:
    """Convert a value to its type hint.

    Raises ConfigError, naming `path` (the dotted key), if the value has another type.
    """
    members = members_of(hint)
    if type(None) in members and (value is None or value in NONE):
        return None
    if part_types(hint):
        return parse_part(hint, value, path)
    if len(members) > 1:
        return parse_value(next(member for member in members if member is not type(None)), value, path)

    if typing.get_origin(hint) is Literal:
        return parse_choice(typing.get_args(hint), value, path)
    if hint not in PARSERS:
        raise TypeError(f"{path}: config type {hint}")
    return PARSERS[hint](value, path)


def parse_key(path: str, value: Any, name: str) -> Any:
    """Return the typed value of section.key. `name` is used in messages.

    Raises ConfigError if the key does not exist or the value has the wrong type.
    """
    found = every_path(Config).get(path)
    if found is None:
        section, _, key = path.partition(".")
        section_type = sections().get(section)
        missing = nearest_key(section_type or Config, f"{section}." if section_type else "", key or path)
        raise ConfigError(f"{name}: no such key{missing}")
    owner, key = found
    return parse_value(field_types(owner)[key], value, name)


def parse_part(hint: Any, value: Any, path: str) -> Any:
    """Parse a part from plain data: keys and values, or the name of a kind.

    A section may be empty.
    """
    is_empty_section = value is None and path in sections()
    data = part_tree(hint, {} if is_empty_section else value)
    if not isinstance(data, dict) and path in NEW_NAMES:
        raise ConfigError(f"{path}: now has its own keys; write {NEW_NAMES[path]} {data}")
    if not isinstance(data, dict):
        names = [kind for kind in map(get_kind, part_types(hint)) if kind]
        known = f", or one of {', '.join(names)}" if names else ""
        raise ConfigError(f"{path}: expected keys and values{known}, got {data!r}")
    return build_tree(part_type(hint, data, path), data, path + ".")


def part_tree(hint: Any, value: Any) -> Any:
    """Expand the name of a kind to keys and values: latent -> {"kind": "latent"}. Other values are
    unchanged."""
    is_kind = isinstance(value, str) and value in map(get_kind, part_types(hint))
    return {"kind": value} if is_kind else value


def part_type(hint: Any, data: Tree, path: str) -> type[Any]:
    """Return the dataclass for the kind of part in the data. Raises ConfigError."""
    kinds = {get_kind(part): part for part in part_types(hint)}
    if len(kinds) == 1:
        return next(iter(kinds.values()))
    default = None if type(None) in members_of(hint) else next(iter(kinds))
    kind = data.get("kind", default)
    if kind not in kinds:
        said = "missing" if kind is None else f"{kind!r}"
        raise ConfigError(f"{path}.kind: {said}; it is one of {', '.join(map(str, kinds))}")
    return kinds[kind]


def parse_choice(choices: tuple[Any, ...], value: Any, path: str) -> Any:
    """Return the choice that the value names; the text "2" from a command line names the integer 2."""
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
    """Return the value as a float, or None if it is not a finite number. Accepts text: YAML reads 3e-4 as
    text."""
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


def parse_floats(value: Any, path: str) -> tuple[float, ...]:
    """Parse a list of numbers, comma-separated on a command line."""
    parts = value.split(",") if isinstance(value, str) else value
    if not isinstance(parts, (list, tuple)) or not parts:
        raise ConfigError(f"{path}: expected numbers, such as 1.0, 1.5, 2.0, got {value!r}")
    return tuple(parse_float(part, path) for part in parts)


PARSERS: dict[Any, Callable[[Any, str], Any]] = {
    str: parse_text,
    int: parse_integer,
    float: parse_float,
    bool: parse_boolean,
    tuple[float, ...]: parse_floats,
}


def flatten_tree(tree: Tree) -> Tree:
    """Flatten nested trees: {"a": {"b": 1}, "c": 2} -> {"a.b": 1, "c": 2}."""
    flat: Tree = {}
    for name, value in tree.items():
        if isinstance(value, dict):
            flat |= {f"{name}.{key}": inner for key, inner in flatten_tree(value).items()}
        else:
            flat[name] = value
    return flat


def merge(base: Tree, over: Tree, cls: type[Any] | None = Config) -> Tree:
    """Merge two trees; `over` wins for keys that both have. `cls` is the dataclass they describe, or None if
    any.

    If `over` sets one of train.steps, train.tokens and train.flops, the other two are dropped from `base`. If
    it changes the kind of a part, only keys that both kinds have are kept from `base`.
    """
    hints = field_types(cls) if cls else {}
    merged = nested(base)
    for key, value in nested(over).items():
        hint = hints.get(key)
        value, below = part_tree(hint, value), part_tree(hint, merged.get(key))
        if not (isinstance(value, dict) and isinstance(below, dict)):
            merged[key] = value
            continue
        if key == "train" and any(value.get(horizon) is not None for horizon in HORIZONS):
            below = {name: kept for name, kept in below.items() if name not in HORIZONS}
        inner = None
        kinds = part_types(hint)
        if kinds:
            known = {get_kind(part): part for part in kinds}
            inner = known.get(value.get("kind", below.get("kind")), kinds[0])
        if inner and "kind" in value and value["kind"] != below.get("kind", get_kind(kinds[0])):
            below = {name: kept for name, kept in nested(below).items() if name in field_names(inner)}
        merged[key] = merge(below, value, inner)
    return merged


# ---- files of configs/ ------------------------------------------------------------------------------------

@functools.lru_cache(maxsize=64)
def parse_yaml_cached(path: pathlib.Path, mtime_ns: int) -> bytes:
    """Return a file of configs/, pickled, cached by mtime. Pickled because callers may modify their tree."""
    return pickle.dumps(read_yaml(path))


def shipped_configs(path: pathlib.Path) -> Tree:
    """Return read_yaml of a file of configs/, parsed once: models.yaml takes longer than the rest of
    --list."""
    return pickle.loads(parse_yaml_cached(path, path.stat().st_mtime_ns))


def synonyms() -> dict[str, str]:
    """Return {word of another framework: our setting} from configs/synonyms.yaml."""
    meant: dict[str, str] = {}
    for setting, words in shipped_configs(CONFIG_FOLDER / "synonyms.yaml").items():
        for word in words:
            meant[word] = setting
    return meant
