"""The text of train.py --help: keys with their types, meanings and values.

--help alone shows the keys that most runs set, those of MOST_SET; with a section, a word or `all` it shows
all that match.

Everything is read from the classes that define the keys: the comment of a key is its meaning, and its
annotation is the type that parse_value parses. So the help cannot disagree with the parser.
"""
import dataclasses
import inspect
import re
import shlex
import shutil
import textwrap
import typing
from collections.abc import Iterator
from typing import Any, Literal, NamedTuple

from config import Config, ConfigError
from config.reading.kinds import every_path, members_of, part_types
from config.reading.parse import defaults, sections
from config.tree import field_types, get_kind, has_path

USAGE = """usage: python train.py [NAME] [--config FILE] [--section.key VALUE ...]
       python train.py [NAME] --help               the keys that most runs set
       python train.py [NAME] --help SECTION|WORD  those that match; "all": all
       python train.py --list                      every recipe (NAME)
       python train.py NAME --dry-run --world N    a step without its ranks
       python train.py NAME --depth N              the recipe at another size
"""
ALL = "all"
MOST_SET = {  # {section: keys that --help shows without a word, those of absent parts included}
    "train": "steps tokens seq_len micro_batch global_batch phases seed dtype fp8 ema max_minutes compile "
    "device",
    "data": "path tokenizer split valid doc_mask",
    "model": "preset layers hidden vocab context blocks pattern tied mtp lora dropout mup norm.kind "
    "mixer.kind mixer.heads mixer.kv_heads mixer.head_dim mixer.window mixer.qk_norm mixer.rope.base "
    "mixer.kv_rank mixer.q_rank mixer.kernel "
    "mlp.kind mlp.width mlp.activation mlp.experts mlp.top_k mlp.shared.experts",
    "optim": "name lr min_lr warmup decay beta1 beta2 weight_decay groups clip states",
    "parallel": "tp sp pp vpp schedule cp ep zero recompute offload auto",
    "distill": "",
    "eval": "every batches sample tasks",
    "checkpoint": "every keep resume init_from branch async_save",
    "log": "dir name every wandb tensorboard",
    "profile": "steps",
}
READ_FIRST = ("train", "data", "model", "optim", "parallel")  # sections that a run sets; the others follow
LEFT = 34  # width of the left column: key and type
MIN_RIGHT = 20  # minimum width of the right column: meaning and values
TYPE_NAMES = {int: "INT", float: "NUMBER", str: "TEXT", bool: "true|false"}


def key_meanings(section: type) -> dict[str, str]:
    """Return {key: whole comment} of a dataclass, in source order.

    The comment starts next to the key and continues on the lines below it, up to the next key or empty line.
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
    """Format a type for the help: INT, NUMBER, TEXT, true|false, a|b|c, INT|none."""
    members = members_of(hint)
    if len(members) > 1:
        return "|".join("none" if member is type(None) else type_name(member) for member in members)
    if typing.get_origin(hint) is Literal:
        return "|".join(map(str, typing.get_args(hint)))
    if dataclasses.is_dataclass(hint):
        return get_kind(hint) or "KEYS"
    if typing.get_origin(hint) is tuple:
        return "NUMBERS" if float in typing.get_args(hint) else "KINDS"
    return TYPE_NAMES[hint]


def written_value(value: object) -> str:
    """Format a value as the command line accepts it."""
    if value is None or isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, tuple):
        return ", ".join(getattr(part, "name", str(part)) for part in value) or "none"
    if dataclasses.is_dataclass(value):
        return str(get_kind(type(value)) or "on")
    return shlex.quote(value) if isinstance(value, str) else str(value)


class ShownKey(NamedTuple):
    """A key, or a part that may be none.

    `type` is formatted by type_name, `value` is that in this config. `of` names the part that has the key, if
    this config has another one.
    """
    path: str
    type: str
    meaning: str
    default: object
    value: object
    of: str = ""


def help_entry(key: ShownKey, width: int) -> str:
    """Format `--section.key TYPE   meaning (default: ...; here: ...)`, wrapped to `width` columns."""
    default, here = map(written_value, (key.default, key.value))
    shown_values = "no default" if key.default is dataclasses.MISSING else f"default: {default}"
    if key.of:
        shown_values += f"; of {key.of}"
    elif here != default:
        shown_values += f"; here: {here}"
    right_width = max(MIN_RIGHT, width - LEFT)
    right = textwrap.wrap(f"{key.meaning} ({shown_values})", right_width, break_long_words=False,
                          break_on_hyphens=False)

    left = f"  --{key.path} {key.type}"
    indent = " " * LEFT
    continued = [indent + line for line in right[1:]]
    if len(left) < LEFT:
        return "\n".join([left.ljust(LEFT) + right[0], *continued])
    return "\n".join([left, indent + right[0], *continued])


def help_text(cfg: Config, word: str = "", width: int | None = None) -> str:
    """Return the help text.

    `word` selects a section, or a part of a key's name or meaning; ALL selects all keys, "" those of
    MOST_SET. `width` defaults to the terminal's columns. Raises ConfigError if no key matches.
    """
    width = width or shutil.get_terminal_size((110, 24)).columns
    word = word.lower().lstrip("-").replace("-", "_")
    section_names = list(dict.fromkeys((*READ_FIRST, *sections())))

    parts: list[str] = []
    for section in section_names:
        lines = section_lines(cfg, section, word, width)
        if lines:
            parts += ["", f"{section}:", *lines]
    if not parts:
        raise ConfigError(f"--help: no key mentions {word!r}; the sections are {', '.join(section_names)}")
    return USAGE + "\n".join(parts)


def section_lines(cfg: Config, section: str, word: str, width: int) -> list[str]:
    """Return the help entries of one section's keys that match `word`."""
    keys = list(shown_keys(getattr(cfg, section), getattr(defaults(), section), f"{section}."))
    if word == ALL:
        return [help_entry(key, width) for key in keys]
    if not word:
        most_set = {f"{section}.{name}" for name in MOST_SET[section].split()}
        shown = [help_entry(key, width) for key in keys if key.path in most_set]
        others = len(keys) - len(shown)
        return [*shown, f"  and {others} more: --help {section}"] if others else shown
    if word not in sections():
        keys += absent_keys(cfg, section)

    lines: list[str] = []
    for key in keys:
        searched = f"{key.path} {key.meaning}".lower().replace("-", "_")
        beginnings = [key.path[:end] for end, letter in enumerate(key.path) if letter == "."]
        matches = word in beginnings or (word not in sections() and word in searched)
        if matches:
            lines.append(help_entry(key, width))
    return lines


def shown_keys(node: Any, usual: Any, prefix: str) -> Iterator[ShownKey]:
    """Yield the keys below a node of the config in source order, or the part itself if it is none.

    `usual` is the same node in a default config, or None if absent or of another kind.
    """
    hints = field_types(type(node))
    for name, meaning in key_meanings(type(node)).items():
        value = getattr(node, name)
        default = get_default(type(node), name) if usual is None else getattr(usual, name)
        if dataclasses.is_dataclass(value):
            same_kind = default if type(default) is type(value) else None
            kinds = part_types(hints[name])
            if len(kinds) > 1:
                names = "|".join(str(get_kind(part)) for part in kinds)
                yield ShownKey(f"{prefix}{name}.kind", names, meaning, default, value)
            yield from shown_keys(value, same_kind, f"{prefix}{name}.")
        elif name != "kind" or get_kind(type(node)) is None:
            yield ShownKey(prefix + name, type_name(hints[name]), meaning, default, value)


def absent_keys(cfg: Config, section: str) -> Iterator[ShownKey]:
    """Yield the keys of a section that this config lacks: those of other kinds of parts, and of parts that
    are none."""
    for path, (part, name) in every_path(Config).items():
        if not path.startswith(f"{section}.") or has_path(cfg, path) or name == "kind":
            continue
        where = path.rpartition(".")[0]
        of = f"{where} {get_kind(part)}" if get_kind(part) else where
        default = get_default(part, name)
        yield ShownKey(path, type_name(field_types(part)[name]), key_meanings(part)[name], default, None, of)


def get_default(part: type, name: str) -> object:
    """Return the default of a field, or MISSING."""
    return next(field.default for field in dataclasses.fields(part) if field.name == name)
