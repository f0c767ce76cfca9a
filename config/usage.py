"""The text of train.py --help: every key of config/schema.py with its type, its meaning and its value.

All of it is read from config/schema.py: the comment of a key is its meaning, and its annotation is the type
that config.parse_value parses. So the help cannot disagree with the parser.
"""
import inspect
import re
import shlex
import shutil
import textwrap
import types
import typing
from typing import Any, Literal

from config import Config, ConfigError, sections

USAGE = """usage: python train.py [NAME] [--config FILE] [--section.key VALUE ...]
       python train.py [NAME] --help [SECTION | WORD]   some keys only
       python train.py --list                           every recipe (NAME)
       python train.py NAME --dry-run --world N         a step without its ranks
"""
LEFT = 34  # width of the left column: a key and its type
MIN_RIGHT = 20  # smallest width of the right column: meaning and values
TYPE_NAMES = {int: "INT", float: "NUMBER", str: "TEXT", bool: "true|false"}


def key_meanings(section: type) -> dict[str, str]:
    """{key: its whole comment} of one dataclass of config/schema.py, in the order of the file.

    The comment starts beside the key and continues on the lines below it, up to the next key or empty line.
    """
    meanings: dict[str, str] = {}
    key = ""
    for line in inspect.getsource(section).splitlines():
        code, _, comment = line.partition("  # ")
        if not line.strip():
            key = ""
        elif found := re.match(r"    (\w+): ", code):
            key = found[1]
            meanings[key] = comment.strip()
        elif key and (continued := re.match(r"\s+#\s*(.*)", line)):
            meanings[key] += " " + continued[1].strip()
    return meanings


def type_name(hint: Any) -> str:
    """A type as the help writes it: INT, NUMBER, TEXT, true|false, a|b|c, INT|none."""
    if typing.get_origin(hint) in (typing.Union, types.UnionType):
        members = typing.get_args(hint)
        return "|".join("none" if member is type(None) else type_name(member) for member in members)
    if typing.get_origin(hint) is Literal:
        return "|".join(map(str, typing.get_args(hint)))
    return TYPE_NAMES[hint]


def written_value(value: object) -> str:
    """A value as the command line takes it."""
    if value is None or isinstance(value, bool):
        return str(value).lower()
    return shlex.quote(value) if isinstance(value, str) else str(value)


def help_entry(path: str, hint: Any, meaning: str, values: tuple[object, object], width: int) -> str:
    """`--section.key TYPE   meaning (default: ...; here: ...)`, wrapped to `width` columns.

    values: the default, and the value in this config.
    """
    default, here = map(written_value, values)
    shown_values = f"default: {default}"
    if here != default:
        shown_values += f"; here: {here}"
    right_width = max(MIN_RIGHT, width - LEFT)
    right = textwrap.wrap(f"{meaning} ({shown_values})", right_width, break_long_words=False,
                          break_on_hyphens=False)

    left = f"  --{path} {type_name(hint)}"
    indent = " " * LEFT
    continued = [indent + line for line in right[1:]]
    if len(left) < LEFT:
        return "\n".join([left.ljust(LEFT) + right[0], *continued])
    return "\n".join([left, indent + right[0], *continued])


def help_text(cfg: Config, word: str = "", width: int | None = None) -> str:
    """The help text.

    word: a section, or a part of a key's name or meaning; "": all keys. width: columns; None: those of the
    terminal. Raises ConfigError if no key matches.
    """
    width = width or shutil.get_terminal_size((110, 24)).columns
    word = word.lower().lstrip("-").replace("-", "_")
    section_names = list(sections())

    parts: list[str] = []
    for section in section_names:
        lines = section_lines(cfg, section, word, width)
        if lines:
            parts += ["", f"{section}:", *lines]
    if not parts:
        raise ConfigError(f"--help: no key speaks of {word!r}; the sections are {', '.join(section_names)}")
    return USAGE + "\n".join(parts)


def section_lines(cfg: Config, section: str, word: str, width: int) -> list[str]:
    """The help entries of the keys of one section that match `word`."""
    section_types = sections()
    section_type = section_types[section]
    hints = typing.get_type_hints(section_type)
    defaults = section_type()
    here = getattr(cfg, section)

    lines: list[str] = []
    for key, meaning in key_meanings(section_type).items():
        searched = f"{section}.{key} {meaning}".lower().replace("-", "_")
        matches = word in ("", section) or (word not in section_types and word in searched)
        if matches:
            values = getattr(defaults, key), getattr(here, key)
            lines.append(help_entry(f"{section}.{key}", hints[key], meaning, values, width))
    return lines
