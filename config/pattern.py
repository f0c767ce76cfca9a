"""Kinds of blocks, and the pattern in which a model stacks them.

    blocks:
      local: {mixer.window: 512}
      full: {mixer.rope.base: 1e6}
    pattern: (5 local, full) x 3, local        # 19 layers

A kind states how it differs from the model's `mixer`, `mlp` and `norm`; `block` is the kind without changes.
A pattern lists kinds in layer order, each optionally with a count before it or `x` and a count after it;
parentheses group. A final `...` fills the remaining layers: `3 dense, block...`, `(5 local, full)...`.
"""
import difflib
import functools
import itertools
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from config.strict import ConfigError

PLAIN = "block"  # the kind without changes
BLOCK_PARTS = ("mixer", "mlp", "norm")  # parts of model.* that a kind of block may change
TOKEN = re.compile(r"\s*(?:(\d+)|(\.\.\.)|([A-Za-z][\w-]*)|([(),]))")
MAX_LAYERS = 100_000  # in one pattern
EXAMPLE = "(5 local, block)... or 3 dense, block..."


@dataclass(frozen=True)
class BlockVariant:
    """A kind of block. `changes` lists (path below the model, value or part) of what it changes."""
    name: str
    changes: tuple[tuple[str, Any], ...]


# ---- the pattern -------------------------------------------------------------------------------------------

@functools.lru_cache(maxsize=1 << 10)
def kinds_of_layers(pattern: str | None, names: tuple[str, ...], layers: int) -> tuple[str, ...]:
    """Return the kind of each layer. `names` are the kinds in model.blocks. Raises ConfigError."""
    if pattern is None:
        return (PLAIN,) * layers
    tokens = tokens_of(pattern)
    kinds, rest = read_list(pattern, tokens, names, layers)
    if rest:
        raise wrong(pattern, f"{rest[0]!r} is not expected there")
    if len(kinds) != layers:
        raise ConfigError(
            f"model.pattern: {pattern} makes {len(kinds)} layers, and model.layers is {layers}; set "
            f"model.layers {len(kinds)}, or end the pattern with ... to fill what is left")
    return tuple(kinds)


def wrong(pattern: str, why: str) -> ConfigError:
    return ConfigError(f"model.pattern: {pattern!r}: {why}; write it as {EXAMPLE}")


def tokens_of(pattern: str) -> list[str]:
    """Split a pattern into numbers, names, parentheses, commas and dots. Raises ConfigError."""
    tokens: list[str] = []
    place = 0
    text = pattern.rstrip()
    while place < len(text):
        found = TOKEN.match(text, place)
        if found is None:
            raise wrong(pattern, f"{text[place:].strip()[0]!r} is not a part of a pattern")
        tokens.append(found[0].strip())
        place = found.end()
    return tokens


def read_list(
    pattern: str, tokens: list[str], names: tuple[str, ...], layers: int
) -> tuple[list[str], list[str]]:
    """Return the kinds of a comma-separated list and the remaining tokens. A `...` fills it up to
    `layers`."""
    kinds: list[str] = []
    while True:
        unit, tokens = read_item(pattern, tokens, names, layers)
        if tokens[:1] == ["..."]:
            tokens = tokens[1:]
            if tokens:
                raise wrong(pattern, "... fills the remaining layers, so it must end the pattern")
            missing = layers - len(kinds)
            unit = (unit * -(-max(missing, 0) // len(unit)))[:max(missing, 0)]
        kinds += unit
        if len(kinds) > MAX_LAYERS:
            raise wrong(pattern, f"more than {MAX_LAYERS:,} layers")
        if tokens[:1] != [","]:
            return kinds, tokens
        tokens = tokens[1:]


def read_item(
    pattern: str, tokens: list[str], names: tuple[str, ...], layers: int
) -> tuple[list[str], list[str]]:
    """Return the kinds of `3 dense`, `dense x 3` or a group, and the remaining tokens."""
    count, tokens = read_count(pattern, tokens)
    if not tokens:
        raise wrong(pattern, "it ends where a kind of block is expected")
    first, tokens = tokens[0], tokens[1:]
    if first == "(":
        unit, tokens = read_list(pattern, tokens, names, layers)
        if tokens[:1] != [")"]:
            raise wrong(pattern, "a bracket is not closed")
        tokens = tokens[1:]
    elif first in ("...", ",", ")") or first.isdigit():
        raise wrong(pattern, f"{first!r} stands where a kind of block is expected")
    else:
        unit = [known_kind(first, names)]
    if tokens[:1] == ["x"]:
        more, tokens = read_count(pattern, tokens[1:])
        count *= more
    if count * len(unit) > MAX_LAYERS:
        raise wrong(pattern, f"more than {MAX_LAYERS:,} layers")
    return unit * count, tokens


def read_count(pattern: str, tokens: list[str]) -> tuple[int, list[str]]:
    if not tokens or not tokens[0].isdigit():
        return 1, tokens
    if not 0 < len(tokens[0]) <= 6 or int(tokens[0]) == 0:
        raise wrong(pattern, f"{tokens[0]} is not a number of layers")
    return int(tokens[0]), tokens[1:]


def known_kind(name: str, names: tuple[str, ...]) -> str:
    """Return the name if such a kind exists, else raise ConfigError."""
    every = (PLAIN, *names)
    if name in every:
        return name
    near = difflib.get_close_matches(name, every, 1)
    hint = f"did you mean {near[0]}?" if near else f"there are {', '.join(every)}"
    raise ConfigError(f"model.pattern: {name} is not a kind of model.blocks; {hint}")


def pattern_text(kinds: Sequence[str]) -> str | None:
    """Return a pattern of these layers that also extends to other depths, or None if all are `block`."""
    if set(kinds) <= {PLAIN}:
        return None
    # the shortest prefix and period such that at least two periods follow
    sizes = ((first, size) for first in range(len(kinds)) for size in range(1, (len(kinds) - first) // 2 + 1))
    for first, size in sorted(sizes, key=sum):
        rest = kinds[first:]
        if all(kind == rest[place % size] for place, kind in enumerate(rest)):
            before = f"{runs_text(kinds[:first])}, " if first else ""
            return before + (f"({runs_text(rest[:size])})..." if size > 1 else f"{rest[0]}...")
    return f"{runs_text(kinds)}..."


def with_dense_layers(
    blocks: Mapping[str, Mapping[str, Any]],
    kinds: Sequence[str],
    is_dense: Sequence[bool],
    dense: Callable[[str], Any],
) -> tuple[dict[str, dict[str, Any]], list[str]]:
    """Return the blocks and layer kinds of a model with experts after some layers get an MLP instead.

    `blocks` holds {kind: {path: value}} of the other kinds; `kinds` and `is_dense` describe each layer;
    `dense` maps a kind to its `mlp`. A kind that only has MLPs keeps its name. Otherwise its MLP layers form
    a new kind: `dense`, or its name with `-dense`.
    """
    mixtures = {kind for kind, is_mlp in zip(kinds, is_dense) if not is_mlp}
    found = {name: dict(changes) for name, changes in blocks.items()}
    layers: list[str] = []
    for kind, is_mlp in zip(kinds, is_dense):
        name = kind
        if is_mlp and (kind == PLAIN or kind in mixtures):
            name = "dense" if kind == PLAIN else f"{kind}-dense"
            while name in blocks:
                name = f"{name}-dense"
        if is_mlp:
            changes = blocks.get(kind, {})
            others = {path: value for path, value in changes.items() if not path.startswith("mlp")}
            found[name] = {**others, "mlp": dense(kind)}
        layers.append(name)
    return {name: changes for name, changes in found.items() if name in layers}, layers


def runs_text(kinds: Sequence[str]) -> str:
    """Run-length encode kinds: "5 local, block"."""
    runs = [(kind, len(list(run))) for kind, run in itertools.groupby(kinds)]
    return ", ".join(kind if count == 1 else f"{count} {kind}" for kind, count in runs)
