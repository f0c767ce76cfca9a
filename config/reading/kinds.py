"""The kinds of parts that a model may have, and everything derived from the tree's types, such as all paths.

The first kind is the default of a part.
"""
import dataclasses
import types
import typing
from typing import Any

from config.schema import ChannelMixer, NoPart, NormConfig, TokenMixer
from config.tree import field_types, get_kind, leaves
from model.block import MIXERS, MLPS
from model.norm import NORMS

KINDS: dict[Any, tuple[type, ...]] = {
    TokenMixer: (*MIXERS, NoPart),
    ChannelMixer: (*MLPS, NoPart),
    NormConfig: NORMS,
}


def members_of(hint: Any) -> tuple[Any, ...]:
    """Return the types of a union, or the kinds of a part; any other type alone."""
    is_union = typing.get_origin(hint) in (typing.Union, types.UnionType)
    return typing.get_args(hint) if is_union else KINDS.get(hint, (hint,))


def part_types(hint: Any) -> tuple[type, ...]:
    """Return the dataclasses that a field may hold, or () for a plain key."""
    return tuple(member for member in members_of(hint) if dataclasses.is_dataclass(member))


def parts_at(cls: type, path: str) -> tuple[type, ...]:
    """Return the dataclasses that a config of this type may have at a path, or () for a plain key."""
    parts: tuple[type, ...] = (cls,)
    for name in path.split(".") if path else ():
        hints = [field_types(part)[name] for part in parts if name in field_types(part)]
        parts = tuple(dict.fromkeys(part for hint in hints for part in part_types(hint)))
    return parts


def every_path(cls: type, prefix: str = "") -> dict[str, tuple[type, str]]:
    """Return {path: (dataclass that has the key, its name)} for every key that some config may have, and
    every part that may be none. A path shared by several kinds of a part is listed once."""
    found: dict[str, tuple[type, str]] = {}
    for name, hint in field_types(cls).items():
        parts = part_types(hint)
        if not parts or type(None) in members_of(hint):
            found[prefix + name] = cls, name
        for part in parts:
            found = every_path(part, f"{prefix}{name}.") | found
    return found


def stated_leaves(node: Any, prefix: str = "") -> list[str]:
    """Return the paths of keys whose value differs from their field's default.

    Includes `kind` for a part that is not of the first kind, and all keys of a part that is none by default.
    """
    results: list[str] = []
    for field in dataclasses.fields(node):
        value, default = getattr(node, field.name), field.default
        path = prefix + field.name
        if not dataclasses.is_dataclass(value):
            results += [path] if value != default else []
            continue
        if default is None:
            results += [inner for inner, _ in leaves(value, f"{path}.")]
            continue
        kinds = [get_kind(part) for part in part_types(field_types(type(node))[field.name])]
        results += [f"{path}.kind"] if get_kind(type(value)) != kinds[0] else []
        results += stated_leaves(value, f"{path}.")
    return results
