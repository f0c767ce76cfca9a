"""train.py --help: every key of keys.py with its type, its meaning and its value, read from keys.py itself.

The comment of a key is its meaning, all lines of it; the type is the one that config.convert reads. So the
help cannot say anything that the parser does not take.
"""
import dataclasses
import inspect
import re
import shlex
import shutil
import textwrap
import types
import typing
from typing import Literal

from config import Config, ConfigError

USAGE = """usage: python train.py [NAME] [--config FILE] [--section.key VALUE ...]
       python train.py [NAME] --help [SECTION | WORD]   some keys alone
       python train.py --list                           every recipe (NAME)
"""
LEFT = 34  # columns of a key and its type, beside which the meaning stands


def meanings(section: type) -> dict[str, str]:
    """{key: its whole comment} of one dataclass of keys.py, in its order."""
    out, key = {}, ""
    for line in inspect.getsource(section).splitlines():
        code, _, said = line.partition("  # ")
        if found := re.match(r"    (\w+): ", code):
            key, out[found[1]] = found[1], said.strip()
        elif key and (more := re.match(r"\s+#\s*(.*)", line)):
            out[key] += " " + more[1].strip()
    return out


def kind(hint) -> str:
    """A type as it is written on the command line: INT, NUMBER, TEXT, true|false, a|b|c, INT|none."""
    if typing.get_origin(hint) in (typing.Union, types.UnionType):
        return "|".join("none" if one is type(None) else kind(one) for one in typing.get_args(hint))
    if typing.get_origin(hint) is Literal:
        return "|".join(map(str, typing.get_args(hint)))
    return {int: "INT", float: "NUMBER", str: "TEXT", bool: "true|false"}[hint]


def written(value) -> str:
    """A value as the command line takes it."""
    if value is None or isinstance(value, bool):
        return str(value).lower()
    return shlex.quote(value) if isinstance(value, str) else str(value)


def entry(path: str, hint, meaning: str, values: tuple, width: int) -> str:
    """`--section.key TYPE   meaning (default; here)`, wrapped to the width. values: (default, here)."""
    usual, here = map(written, values)
    told = f"{meaning} (default: {usual}{'' if here == usual else f'; here: {here}'})"
    left = f"  --{path} {kind(hint)}"
    beside = len(left) < LEFT
    room = max(20, width - LEFT)
    lines = textwrap.wrap(told, room, break_long_words=False, break_on_hyphens=False)
    first = [left.ljust(LEFT) + lines[0]] if beside else [left, " " * LEFT + lines[0]]
    return "\n".join(first + [" " * LEFT + line for line in lines[1:]])


def text(cfg: Config, word: str = "", width: int | None = None) -> str:
    """The help. word: a section, or a part of a key's name or meaning; "": all. Raises ConfigError."""
    width = width or shutil.get_terminal_size((110, 24)).columns
    word, parts = word.lower().lstrip("-").replace("-", "_"), []
    sections = [f.name for f in dataclasses.fields(Config)]
    for name in sections:
        cls = typing.get_type_hints(Config)[name]
        hints, usual, here = typing.get_type_hints(cls), cls(), getattr(cfg, name)
        chosen = {}
        for key, meaning in meanings(cls).items():
            told = f"{name}.{key} {meaning}".lower().replace("-", "_")
            if word in ("", name) or (word not in sections and word in told):
                chosen[key] = meaning
        lines = [entry(f"{name}.{key}", hints[key], meaning, (getattr(usual, key), getattr(here, key)), width)
                 for key, meaning in chosen.items()]
        parts += ["", f"{name}:", *lines] if lines else []
    if not parts:
        raise ConfigError(f"--help: no key speaks of {word!r}; the sections are {', '.join(sections)}")
    return USAGE + "\n".join(parts)
