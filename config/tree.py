"""The tree of a config: dotted key paths, kinds of parts, value ranges.

A field of a frozen dataclass is a key, a part, or one of several kinds of parts. Each kind has a key `kind`;
the first kind is the default. A part that may be none is then absent, along with its keys. The range of a key
is in its type: `heads: Count = 4`.
"""
import dataclasses
import functools
import typing
from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import dataclass
from typing import Annotated, Any, TypeVar

from config.pattern import BlockVariant

Node = TypeVar("Node")  # a dataclass of the tree


# ---- ranges ------------------------------------------------------------------------------------------------

@dataclass(frozen=True)
class Range:
    """An interval for a value. `message` ends the message that begins with "KEY: VALUE"."""
    message: str
    holds: Callable[[Any], bool]


ABOVE_ZERO = Range("must be above 0", lambda value: value > 0)
NOT_NEGATIVE = Range("must not be negative", lambda value: value >= 0)
AT_LEAST_ONE = Range("must be at least 1", lambda value: value >= 1)
BELOW_ONE = Range("must lie in [0, 1)", lambda value: 0 <= value < 1)
SHARE = Range("must lie in [0, 1]", lambda value: 0 <= value <= 1)
PORTION = Range("must lie in (0, 1]", lambda value: 0 < value <= 1)
EACH_ABOVE_ZERO = Range("each must be above 0", lambda values: min(values) > 0)

Count = Annotated[int, ABOVE_ZERO]
CountOrZero = Annotated[int, NOT_NEGATIVE]
Positive = Annotated[float, ABOVE_ZERO]
NotNegative = Annotated[float, NOT_NEGATIVE]
AtLeastOne = Annotated[float, AT_LEAST_ONE]
BelowOne = Annotated[float, BELOW_ONE]
Share = Annotated[float, SHARE]
Portion = Annotated[float, PORTION]
Positives = Annotated[tuple[float, ...], EACH_ABOVE_ZERO]


# ---- types -------------------------------------------------------------------------------------------------

@functools.cache
def field_types(cls: type) -> dict[str, Any]:
    """Return {field: type} of a dataclass, without ranges."""
    return typing.get_type_hints(cls)


@functools.cache
def get_ranges(cls: type) -> dict[str, Range]:
    """Return {field: range} of the fields that have one. A message names none where that would do."""
    result: dict[str, Range] = {}
    for name, hint in typing.get_type_hints(cls, include_extras=True).items():
        for member in (hint, *typing.get_args(hint)):
            if typing.get_origin(member) is Annotated:
                range_ = member.__metadata__[0]
                may_be_none = type(None) in typing.get_args(hint)
                if may_be_none:
                    range_ = dataclasses.replace(range_, message=f"{range_.message}, or none")
                result[name] = range_
    return result


@functools.cache
def get_kind(part: type) -> str | None:
    """Return the name of a kind of part, or None if the part has only one kind."""
    names = typing.get_args(field_types(part).get("kind"))
    return names[0] if len(names) == 1 else None


def field_names(cls: type) -> list[str]:
    return [field.name for field in dataclasses.fields(cls)]


# ---- values ------------------------------------------------------------------------------------------------

def leaves(node: Any, prefix: str = "") -> Iterator[tuple[str, Any]]:
    """Yield (path, value) of every key in this tree, in field order. A part that is none counts as a key."""
    for field in dataclasses.fields(node):
        value = getattr(node, field.name)
        if dataclasses.is_dataclass(value):
            yield from leaves(value, f"{prefix}{field.name}.")
        else:
            yield prefix + field.name, value


def ranged_values(node: Any, prefix: str = "") -> Iterator[tuple[str, Any, Range]]:
    """Yield (path, value, range) of every key in this tree whose type has a range."""
    ranges = get_ranges(type(node))
    for name in field_names(type(node)):
        value = getattr(node, name)
        if dataclasses.is_dataclass(value):
            yield from ranged_values(value, f"{prefix}{name}.")
        elif name in ranges:
            yield prefix + name, value, ranges[name]


def is_below(path: str, parts: Collection[str]) -> bool:
    """Return whether a path is one of `parts`, or a key inside one."""
    return any(path == part or path.startswith(f"{part}.") for part in parts)


def value_at(node: Any, path: str) -> Any:
    """Return the key or part at a path. model.blocks.NAME gives what that kind of block states. Raises
    AttributeError if the path does not exist."""
    name, dot, rest = path.partition(".")
    if isinstance(node, tuple):
        return stated_value(node, name, rest)
    value = getattr(node, name)
    return value_at(value, rest) if dot else value


def stated_value(kinds: tuple[Any, ...], name: str, path: str) -> Any:
    """Return what the named kind of block states at a path. Raises AttributeError."""
    changes = {changed: value for kind in kinds if kind.name == name for changed, value in kind.changes}
    for changed, value in changes.items():
        if path == changed:
            return value
        if path.startswith(f"{changed}."):
            return value_at(value, path.removeprefix(f"{changed}."))
    raise AttributeError(f"{name}: it does not state {path}")


def plain_data(value: Any) -> Any:
    """Return a part or a whole config as nested keys and values, and other values unchanged.

    Kinds of blocks become {name: {path: value}}, several numbers a list.
    """
    if isinstance(value, tuple):
        if not all(isinstance(kind, BlockVariant) for kind in value):
            return list(value)
        return {kind.name: {path: plain_data(part) for path, part in kind.changes} for kind in value}
    if not dataclasses.is_dataclass(value):
        return value
    return {name: plain_data(getattr(value, name)) for name in field_names(type(value))}


def has_path(node: Any, path: str) -> bool:
    """Return whether the tree has this key or part."""
    try:
        value_at(node, path)
    except AttributeError:
        return False
    return True


def with_values(node: Node, values: Mapping[str, Any]) -> Node:
    """Return the tree with the given {path: value} of keys and parts replaced.

    A part of another kind must be passed as a whole. Raises TypeError for a key that the tree does not have.
    """
    changed: dict[str, Any] = {}
    below: dict[str, dict[str, Any]] = {}
    for path, value in values.items():
        name, dot, rest = path.partition(".")
        if dot:
            below.setdefault(name, {})[rest] = value
        else:
            changed[name] = value
    for name, inner in below.items():
        part = changed.get(name, getattr(node, name))
        if not dataclasses.is_dataclass(part):
            raise TypeError(f"{name} is {part}, and has no {', '.join(inner)}")
        changed[name] = with_values(part, inner)
    kind = get_kind(type(node))
    if kind is not None and changed.get("kind", kind) != kind:
        raise TypeError(f"kind: {kind} does not become {changed['kind']} key by key")
    return dataclasses.replace(node, **changed)


def differing_leaves(left: Any, right: Any, prefix: str = "") -> dict[str, tuple[Any, Any]]:
    """Return {path: (value of left, value of right)} where two trees of the same type differ.

    For parts of different kinds, returns the key `kind`; for a part that only one tree has, its path and the
    part.
    """
    result: dict[str, tuple[Any, Any]] = {}
    for name in field_names(type(left)):
        values = getattr(left, name), getattr(right, name)
        if values[0] == values[1]:
            continue
        path = prefix + name
        types_ = [type(value) if dataclasses.is_dataclass(value) else None for value in values]
        if types_[0] is None or types_[1] is None:
            result[path] = values
        elif types_[0] is not types_[1]:
            result[f"{path}.kind"] = get_kind(types_[0]), get_kind(types_[1])
        else:
            result |= differing_leaves(*values, f"{path}.")
    return result
