"""The manifest of an experiment: a file in its folder that describes it, so that results of other settings
are neither shown as its own nor mixed with them.
"""
import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from config.strict import ConfigError

NOT_SET = "not set"
Tree = Mapping[str, Any]


def keep_manifest(
    path: Path,
    tree: Tree,
    *,
    what: str,
    may_grow: tuple[str, ...],
    has_results: bool,
    option: str = "--out",
) -> None:
    """Write the description of an experiment, or check it against the existing one.

    `tree` is JSON {key: value}, where "settings" is {key of train.py: value}.
    `what` is the kind of experiment. Keys in `may_grow` are lists, which keep the values of earlier calls.
    `has_results` says that the folder has some; without the file, their origin is unknown.
    `option` chooses the folder.
    Raises ConfigError if the folder belongs to another experiment.
    """
    before: dict[str, Any] = {}
    if path.exists():
        before = read_manifest(path, what)
        changed = first_difference(before, tree, left_out=may_grow)
        if changed is not None:
            refuse_other(path, what, *changed, option=option)
    elif has_results:
        raise ConfigError(f"{option}: {path.parent} has results, and no {path.name} that says which {what}; "
                          "choose another folder")
    whole = dict(tree)
    for key in may_grow:
        earlier = before.get(key, [])
        whole[key] = [*earlier, *(value for value in tree[key] if value not in earlier)]
    if whole != before:
        path.parent.mkdir(parents=True, exist_ok=True)
        write_manifest(path, whole)


def read_manifest(path: Path, what: str) -> dict[str, Any]:
    """Read a manifest. Raises ConfigError."""
    try:
        tree = json.loads(path.read_text())
    except (OSError, ValueError) as error:
        raise ConfigError(f"{path}: does not say what the {what} in its folder is ({error}); choose another "
                          "folder") from error
    if not isinstance(tree, dict):
        raise ConfigError(f"{path}: does not say what the {what} in its folder is; choose another folder")
    return tree


def write_manifest(path: Path, tree: Tree) -> None:
    """Write it atomically, because the jobs of an array start together."""
    temp = path.with_name(f"{path.name}.{os.getpid()}")
    temp.write_text(json.dumps(tree, indent=1) + "\n")
    temp.replace(path)


def first_difference(old: Tree, new: Tree, left_out: tuple[str, ...] = ()) -> tuple[str, Any, Any] | None:
    """Return (key, old value, new value) of the first difference, with the inner key for "settings".

    A value that only one side has is NOT_SET on the other.
    """
    for key, value in new.items():
        before = old.get(key, NOT_SET)
        if key in left_out or before == value:
            continue
        if not isinstance(value, Mapping) or not isinstance(before, Mapping):
            return key, before, value
        inner = {name: NOT_SET for name in before} | dict(value)
        found = first_difference(before, inner)
        if found is not None:
            return found
    return None


def refuse_other(path: Path, what: str, key: str, old: Any, new: Any, option: str = "--out") -> None:
    """Raise ConfigError because the folder belongs to another experiment."""
    raise ConfigError(f"{option}: {path.parent} holds a {what} with {key} {old}, not {new}; its runs could "
                      "not be compared: set it back, or choose another folder")
