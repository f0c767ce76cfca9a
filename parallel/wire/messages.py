"""Plain data as bytes, for messages between ranks at start-up and around checkpoints. No pickle.

A message is JSON. Types that JSON lacks are objects with a single tag (TAGS): bytes, paths, tuples, sets,
dicts, frozen dataclasses of this project, and errors. So a message round-trips, including types.

The reader trusts no input. It imports nothing, and runs no code that a message names: a class is looked up
among those already loaded, in a package of this project, and it must be a frozen dataclass or an error. Its
fields are set without calling it. A malformed message raises a MessageError of one line; the allowed length
is checked before memory is allocated (parallel/wire/comm.py).
"""
import base64
import dataclasses
import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

MAX_BYTES = 256 << 20  # for one message
MAX_TOTAL_BYTES = 4 << 30  # for all messages that a rank receives at once
MAX_SHOWN = 100  # characters of a peer's data in an error message
PACKAGES = (  # classes allowed in messages: config.provenance.CODE_FOLDERS and the programs above them
    "config", "kernels", "parallel", "model", "data", "optim", "checkpoint", "durable", "runtime", "plan",
    "build", "train",
)
BUILTIN_ERRORS = {error.__name__: error for error in (
    ArithmeticError, AssertionError, AttributeError, BlockingIOError, BrokenPipeError, ConnectionError,
    EOFError, Exception, FileExistsError, FileNotFoundError, FloatingPointError, ImportError, IndexError,
    InterruptedError, IsADirectoryError, KeyError, LookupError, MemoryError, ModuleNotFoundError,
    NotADirectoryError, NotImplementedError, OSError, OverflowError, PermissionError, RecursionError,
    RuntimeError, TimeoutError, TypeError, ValueError, ZeroDivisionError,
)}
TORCH_ERRORS = {"torch:OutOfMemoryError": torch.OutOfMemoryError}
EXIT_CODES = range(1, 256)  # allowed for an error


class MessageError(RuntimeError):
    """Data from a peer is not a valid message. Exit code 1."""
    exit_code = 1


# ---- writing -----------------------------------------------------------------------------------------------

def encode(value: object) -> bytes:
    """Encode a value. Raises TypeError for anything but plain data; errors can always be encoded."""
    text = json.dumps(to_json(value), ensure_ascii=False, separators=(",", ":"))
    return text.encode("utf-8", "surrogatepass")


def to_json(value: Any) -> Any:
    """Convert the value to JSON types. Raises TypeError."""
    kind = type(value)
    if value is None or kind in (bool, int, float, str):
        return value
    if kind is list:
        return [to_json(item) for item in value]
    if kind in TAG_BY_TYPE:
        tag = TAG_BY_TYPE[kind]
        return {tag: TAGS[tag].write(value)}
    if isinstance(value, Path):
        return {"path": str(value)}
    if isinstance(value, Exception):
        return {"error": error_to_json(value)}
    if is_plain_class(kind):
        fields = [to_json(getattr(value, field.name)) for field in dataclasses.fields(value)]
        return {"class": [get_name(kind), fields]}
    raise TypeError(f"{kind.__name__} cannot be sent to another rank: it is not plain data")


def items_to_json(values: Any) -> list[Any]:
    return [to_json(value) for value in values]


def pairs_to_json(values: dict[Any, Any]) -> list[Any]:
    return [[to_json(key), to_json(value)] for key, value in values.items()]


def bytes_to_json(value: bytes) -> str:
    return base64.b64encode(value).decode("ascii")


def error_to_json(error: Exception) -> list[Any]:
    """Return [names of its classes, most derived first, its text, its arguments, its attributes].

    Anything that is not plain data is dropped: of the arguments, all but the text.
    """
    names = [get_name(kind) for kind in type(error).__mro__ if issubclass(kind, Exception)]
    arguments: tuple[object, ...] = error.args
    if isinstance(error, OSError) and error.filename is not None:
        arguments = (*error.args[:2], error.filename)
    try:
        told = items_to_json(arguments)
    except (TypeError, RecursionError):
        told = [str(error)]
    attributes: list[Any] = []
    for name, value in vars(error).items():
        try:
            attributes.append([name, to_json(value)])
        except (TypeError, RecursionError):
            continue
    return [names, str(error), told, attributes]


def get_name(kind: type) -> str:
    """Return MODULE:CLASS, or just the name of a builtin class."""
    return kind.__name__ if kind.__module__ == "builtins" else f"{kind.__module__}:{kind.__qualname__}"


# ---- reading -----------------------------------------------------------------------------------------------

def decode(message: bytes, sender: str = "a peer") -> Any:
    """Decode a message. `sender` is for error messages. Raises MessageError."""
    try:
        text = message.decode("utf-8", "surrogatepass")
        return from_json(json.loads(text))
    except (ValueError, TypeError, KeyError, AttributeError, RecursionError, OverflowError) as error:
        why = " ".join(str(error).split())[:MAX_SHOWN]
        raise MessageError(f"{sender} sent {len(message):,} bytes that are not a message: {why}") from None


def from_json(value: Any) -> Any:
    """Invert to_json. Raises ValueError, TypeError or KeyError."""
    if type(value) is list:
        return [from_json(item) for item in value]
    if type(value) is not dict:
        return value
    (tag, content), = value.items()
    return TAGS[tag].read(content)


def decode_items(content: Any) -> list[Any]:
    if type(content) is not list:
        raise ValueError("a list was expected")
    return [from_json(item) for item in content]


def decode_dict(content: Any) -> dict[Any, Any]:
    return {from_json(key): from_json(value) for key, value in content}


def get_text(content: Any) -> str:
    if type(content) is not str:
        raise ValueError("a text was expected")
    return content


def get_bytes(content: Any) -> bytes:
    return base64.b64decode(get_text(content), validate=True)


def decode_instance(content: Any) -> Any:
    """Create a frozen dataclass with these fields, without calling its constructor."""
    name, values = content
    kind = loaded_class(get_text(name))
    if kind is None or not is_plain_class(kind):
        raise ValueError(f"{name[:MAX_SHOWN]!r} is not a frozen dataclass of this project")
    fields = dataclasses.fields(kind)
    values = decode_items(values)
    if len(values) != len(fields):
        raise ValueError(f"{name[:MAX_SHOWN]!r} has {len(fields)} fields, not {len(values)}")
    instance = object.__new__(kind)
    for field, value in zip(fields, values):
        object.__setattr__(instance, field.name, value)
    return instance


def decode_error(content: Any) -> Exception:
    """Create the error, as the first of its classes known here, without calling any project constructor."""
    names, text, arguments, attributes = content
    kinds = [kind for kind in map(error_class, decode_items(names)) if kind is not None]
    if not kinds:
        raise ValueError(f"{str(names)[:MAX_SHOWN]} are not known errors")
    is_same_class = error_class(names[0]) is kinds[0]
    told = decode_items(arguments) if is_same_class else [get_text(text)]
    error = kinds[0].__new__(kinds[0], *told)
    for name, value in attributes:
        value = from_json(value)
        if hasattr(Exception, get_text(name)) or (name == "exit_code" and value not in EXIT_CODES):
            raise ValueError(f"an error with {name[:MAX_SHOWN]!r} of {str(value)[:MAX_SHOWN]!r}")
        vars(error)[name] = value
    return error


def error_class(name: Any) -> type[Exception] | None:
    """Return the class of an error if it is known here, else None."""
    known = BUILTIN_ERRORS.get(name) or TORCH_ERRORS.get(name)
    if known is not None:
        return known
    kind = loaded_class(get_text(name))
    return kind if kind is not None and issubclass(kind, Exception) else None


def loaded_class(name: str) -> type | None:
    """Return the class MODULE:CLASS of this project if its module is loaded, else None. Imports nothing."""
    module_name, _, class_name = name.partition(":")
    if module_name.partition(".")[0] not in PACKAGES or module_name not in sys.modules:
        return None
    kind = vars(sys.modules[module_name]).get(class_name)
    return kind if isinstance(kind, type) and get_name(kind) == name else None


def is_plain_class(kind: type) -> bool:
    """Whether it is a frozen dataclass of this project, at the top level of its module."""
    is_ours = kind.__module__.partition(".")[0] in PACKAGES and "." not in kind.__qualname__
    parameters = vars(kind).get("__dataclass_params__")  # set for a dataclass
    return is_ours and parameters is not None and parameters.frozen


# ---- tags --------------------------------------------------------------------------------------------------

@dataclasses.dataclass(frozen=True)
class Tag:
    """JSON writer and reader of a type."""
    write: Callable[[Any], Any]
    read: Callable[[Any], Any]


TAGS = {
    "bytes": Tag(bytes_to_json, get_bytes),
    "tuple": Tag(items_to_json, lambda content: tuple(decode_items(content))),
    "set": Tag(items_to_json, lambda content: set(decode_items(content))),
    "frozenset": Tag(items_to_json, lambda content: frozenset(decode_items(content))),
    "dict": Tag(pairs_to_json, decode_dict),
    "path": Tag(str, lambda content: Path(get_text(content))),
    "class": Tag(to_json, decode_instance),
    "error": Tag(to_json, decode_error),
}
TAG_BY_TYPE: dict[type, str] = {
    bytes: "bytes", tuple: "tuple", set: "set", frozenset: "frozenset", dict: "dict"
}
