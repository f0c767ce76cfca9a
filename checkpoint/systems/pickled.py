"""Read torch.save files without executing anything in them.

A pickle is a program for a small machine, and some of its instructions import names and call them. The
machine here (pickletools.genops disassembles the file) never imports or calls what the file names. It knows
how to rebuild tensors, dtypes and plain containers (CALLS). Every other class becomes a Foreign, which has a
name and data but no behaviour: so Megatron-LM's args, an argparse.Namespace, can be read. Anything that only
an attack would ask for is refused in one line: a standard-library name outside STANDARD, a call of something
named like a function, a tree that contains itself or expands to more than MAX_VALUES values.

A tensor becomes a StoredTensor: its place in the file. read_tree returns the tree of a file, open_torch_file
its tensors by name, such as model.transformer.wte.weight of nanoGPT's ckpt.pt.

Sources: Lib/pickletools.py of CPython; torch/serialization.py (the layout of the zip file) and
torch/_utils.py (the functions that rebuild tensors).
"""
import io
import os
import pickletools
import struct
import sys
import zipfile
from _compat_pickle import IMPORT_MAPPING, NAME_MAPPING  # Python 2's names, which protocol 2 writes
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

import torch

from checkpoint.disk.files import DTYPES
from checkpoint.disk.tensors_by_name import (
    NamedTensors,
    StoredTensor,
    Table,
    named_tensors,
    one_line,
    open_regular,
)
from config import ConfigError

MAX_BYTES = 1 << 30  # per pickle; 100,000 tensors take some 30 MB
MAX_INSTRUCTIONS = 20_000_000  # per pickle: half a minute
MAX_VALUES = 20_000_000  # of a tree, counted once per path
MAX_DEPTH = 100  # nested containers
MAX_SHOWN = 80  # characters of a name in an error

Storages = dict[str, tuple[int, int]]  # {key in the zip file: (first byte, number of bytes)}


class Refused(Exception):
    """A request of a pickle that is refused. interpret converts it to a ConfigError."""


@dataclass(frozen=True)
class GlobalName:
    """A name that the file would import: module.name."""
    module: str
    name: str

    def __str__(self) -> str:
        return f"{self.module}.{self.name}"


@dataclass(eq=False)
class Foreign:
    """An object of an unknown class: its name and data, but no behaviour.

    `state` is the argument of its __setstate__, for most classes {attribute: value}. `entries` and `elements`
    are set if the class is also a dict or a list.
    """
    name: str  # module.name
    args: tuple[Any, ...] = ()
    state: Any = None
    entries: dict[Any, Any] = field(default_factory=dict)
    elements: list[Any] = field(default_factory=list)

    def __repr__(self) -> str:
        return f"<{self.name}>"


@dataclass(frozen=True)
class StoredStorage:
    """The data of one or more tensors in a file."""
    file: Path
    start: int  # byte
    num_bytes: int
    dtype: torch.dtype | None  # None: each tensor has its own


# ---- names -------------------------------------------------------------------------------------------------

DTYPE_NAMES = {str(dtype): dtype for dtype in (
    *DTYPES, torch.float8_e8m0fnu, torch.float8_e4m3fnuz, torch.float8_e5m2fnuz, torch.uint16, torch.uint32,
    torch.uint64, torch.complex64, torch.complex128,
)}
STORAGE_DTYPES = {
    "DoubleStorage": torch.float64,
    "FloatStorage": torch.float32,
    "HalfStorage": torch.float16,
    "BFloat16Storage": torch.bfloat16,
    "LongStorage": torch.int64,
    "IntStorage": torch.int32,
    "ShortStorage": torch.int16,
    "CharStorage": torch.int8,
    "ByteStorage": torch.uint8,
    "BoolStorage": torch.bool,
    "ComplexFloatStorage": torch.complex64,
    "ComplexDoubleStorage": torch.complex128,
    "UntypedStorage": None,
}
BUILTIN_TYPES = (
    "bool", "bytearray", "bytes", "complex", "dict", "float", "frozenset", "int", "list", "object", "range",
    "set", "slice", "str", "tuple",
)
STANDARD = {  # standard-library names that may occur in a file
    *(f"builtins.{name}" for name in BUILTIN_TYPES),
    *(f"collections.{name}" for name in ("OrderedDict", "defaultdict", "Counter", "deque")),
    *(f"datetime.{name}" for name in ("date", "datetime", "timedelta", "timezone")),
    *(f"{module}.{name}Path" for module in ("pathlib", "pathlib._local")
      for name in ("", "Posix", "PurePosix", "Windows", "PureWindows")),
    "_codecs.encode",
    "argparse.Namespace",
    "builtins.getattr",  # for a member of an Enum: called only by get_member, which looks nothing up
    "copyreg._reconstructor",
    "decimal.Decimal",
    "functools.partial",
    "signal.Signals",
    "types.SimpleNamespace",
    "uuid.UUID",
}
FOREIGN_CALLS = {  # named like functions, but inert here, like classes
    "builtins.bytearray", "builtins.complex", "builtins.range", "builtins.slice", "copyreg._reconstructor",
    "datetime.date", "datetime.datetime", "datetime.timedelta", "datetime.timezone", "functools.partial",
    *(f"numpy.{core}.{name}" for core in ("core", "_core")
      for name in ("multiarray._reconstruct", "multiarray.scalar", "numeric._frombuffer")),
    *(f"numpy.random._pickle.__{name}_ctor" for name in ("bit_generator", "generator", "randomstate")),
    "numpy.dtype", "numpy.ndarray",
    "torch.device", "torch.serialization._get_layout",
    *(f"torch._utils._rebuild_{name}" for name in (
        "device_tensor_from_cpu_tensor", "device_tensor_from_numpy", "meta_tensor_no_storage",
        "nested_tensor", "qtensor", "sparse_tensor", "wrapper_subclass",
    )),
}


def find_global(module: Any, name: Any) -> Any:
    """Resolve a name in the file. Raises Refused for a name that no checkpoint needs."""
    if type(module) is not str or type(name) is not str:
        raise Refused("names a global by something other than text")
    module, name = NAME_MAPPING.get((module, name), (IMPORT_MAPPING.get(module, module), name))
    found = GlobalName(module, name)
    if module == "torch" and str(found) in DTYPE_NAMES:
        return DTYPE_NAMES[str(found)]
    is_signal = module == "signal" and name.startswith("SIG")  # a member of signal.Signals, by its name
    if module.partition(".")[0] in sys.stdlib_module_names and str(found) not in STANDARD and not is_signal:
        raise Refused(f"asks for {shown(found)}")
    return found


def is_class_name(name: str) -> bool:
    """Return whether the last part of a name is spelled like a class: Namespace, _StorageInfo."""
    return name.rpartition(".")[2].lstrip("_")[:1].isupper()


def shown(value: Any) -> str:
    """Format a value of the file in one short line: text and names as they are, otherwise the type.

    The text of a container could exceed any memory.
    """
    text = str(value) if isinstance(value, (str, GlobalName)) else f"a {type(value).__name__}"
    return one_line(text, MAX_SHOWN)


# ---- rebuilding --------------------------------------------------------------------------------------------

def make_dict(pairs: Any = ()) -> dict[Any, Any]:
    """Build an OrderedDict or a Counter."""
    if isinstance(pairs, dict):
        return dict(pairs)
    return {checked_key(key): value for key, value in pairs}


def make_deque(elements: Any = (), _longest: Any = None) -> list[Any]:
    return list(elements)


def make_set(elements: Any = ()) -> frozenset[Any]:
    return frozenset(checked_key(element) for element in elements)


def make_bytes(text: str, encoding: str) -> bytes:
    """Decode bytes as written by protocol 2."""
    if type(text) is not str or encoding != "latin1":
        raise Refused(f"asks to encode by {shown(encoding)}")
    return text.encode("latin1")


def make_size(numbers: Any = ()) -> tuple[int, ...]:
    return whole_numbers(numbers)


def get_member(owner: Any, name: Any) -> GlobalName:
    """Return the member of an Enum, as some Python versions pickle it, as a name without looking it up."""
    if type(owner) is not GlobalName or owner.module in sys.stdlib_module_names or type(name) is not str:
        raise Refused(f"asks for builtins.getattr({shown(owner)}, ...)")
    return GlobalName(owner.module, f"{owner.name}.{name}")


def rebuild_tensor(
    storage: Any, offset: Any, size: Any, stride: Any, _grad: Any = False, _hooks: Any = (), flags: Any = None
) -> StoredTensor:
    return rebuild(storage, offset, size, stride, storage.dtype, flags)


def rebuild_tensor_v3(
    storage: Any, offset: Any, size: Any, stride: Any, _grad: Any, _hooks: Any, dtype: Any, flags: Any = None
) -> StoredTensor:
    return rebuild(storage, offset, size, stride, dtype, flags)


def rebuild(storage: Any, offset: Any, size: Any, stride: Any, dtype: Any, flags: Any) -> StoredTensor:
    """Locate a tensor in the file. Raises Refused unless it lies entirely in its storage."""
    if flags:
        raise Refused("has a tensor whose numbers are conjugated or negated when they are read")
    if type(storage) is not StoredStorage or type(dtype) is not torch.dtype:
        raise Refused("has a tensor of something other than numbers")
    shape, strides, (first,) = whole_numbers(size), whole_numbers(stride), whole_numbers((offset,))
    if len(shape) != len(strides):
        raise Refused(f"has a tensor of {len(shape)} dims with {len(strides)} strides")
    last = first + sum((extent - 1) * step for extent, step in zip(shape, strides))
    if 0 not in shape and (last + 1) * dtype.itemsize > storage.num_bytes:
        raise Refused(f"has a tensor of shape {shape} that ends beyond its {storage.num_bytes:,} bytes")
    return StoredTensor(storage.file, storage.start + first * dtype.itemsize, shape, strides, dtype)


def rebuild_parameter(data: Any, *_: Any) -> Any:
    return data


def rebuild_of_type(function: Any, kind: Any, args: Any, _state: Any) -> Any:
    """Rebuild a tensor with attributes, or return a Foreign for another tensor class."""
    if shown(kind) in ("torch.Tensor", "torch.nn.parameter.Parameter"):
        return call(function, args)
    return Foreign(shown(kind), (function, args))


def whole_numbers(numbers: Any) -> tuple[int, ...]:
    if type(numbers) not in (tuple, list) or any(type(n) is not int or not 0 <= n < 1 << 62 for n in numbers):
        raise Refused("has a tensor whose numbers are not whole")
    return tuple(numbers)


CALLS: dict[str, Callable[..., Any]] = {
    "_codecs.encode": make_bytes,
    "builtins.frozenset": make_set,
    "builtins.getattr": get_member,
    "builtins.set": make_set,
    "collections.Counter": make_dict,
    "collections.OrderedDict": make_dict,
    "collections.defaultdict": lambda *_: {},
    "collections.deque": make_deque,
    "torch.Size": make_size,
    "torch._tensor._rebuild_from_type_v2": rebuild_of_type,
    "torch._utils._rebuild_parameter": rebuild_parameter,
    "torch._utils._rebuild_parameter_with_state": rebuild_parameter,
    "torch._utils._rebuild_tensor": rebuild_tensor,
    "torch._utils._rebuild_tensor_v2": rebuild_tensor,
    "torch._utils._rebuild_tensor_v3": rebuild_tensor_v3,
}


def call(function: Any, args: Any) -> Any:
    """Return the result of a call in the file. Raises Refused for anything neither in CALLS nor a class."""
    if type(function) is not GlobalName or type(args) is not tuple:
        raise Refused("asks to call something it does not name")
    name = str(function)
    if name in CALLS:
        return CALLS[name](*args)
    if name in FOREIGN_CALLS or is_class_name(name):
        return Foreign(name, args)
    raise Refused(f"asks to call {shown(name)}")


def checked_key(key: Any) -> Any:
    """Return a dict key or set element. Raises Refused for one that may be slow to hash."""
    plain = (str, int, float, bool, bytes, type(None), Foreign, GlobalName, torch.dtype)
    parts = key if type(key) is tuple else (key,)
    if all(type(part) in plain and not (type(part) is int and abs(part) >= 1 << 64) for part in parts):
        return key
    raise Refused(f"has a key of type {type(key).__name__}")


# ---- the machine -------------------------------------------------------------------------------------------

@dataclass
class PickleMachine:
    """The machine's state. `stack` holds the values since the last mark, `below` those before it."""
    find_storage: Callable[[Any], StoredStorage]  # resolves a persistent id
    stack: list[Any] = field(default_factory=list)
    below: list[list[Any]] = field(default_factory=list)
    memo: dict[int, Any] = field(default_factory=dict)

    def since_mark(self) -> list[Any]:
        values, self.stack = self.stack, self.below.pop()
        return values

    def take(self, count: int) -> list[Any]:
        """Pop the last values, in order."""
        if len(self.stack) < count:
            raise IndexError("the stack is empty")
        values = self.stack[len(self.stack) - count:]
        del self.stack[len(self.stack) - count:]
        return values


def mark(machine: PickleMachine, _: Any) -> None:
    machine.below.append(machine.stack)
    machine.stack = []


def push_argument(machine: PickleMachine, argument: Any) -> None:
    machine.stack.append(argument)


def constant(make: Callable[[], Any]) -> Callable[[PickleMachine, Any], None]:
    return lambda machine, _: machine.stack.append(make())


def make_tuple(count: int) -> Callable[[PickleMachine, Any], None]:
    return lambda machine, _: machine.stack.append(tuple(machine.take(count)))


def put(machine: PickleMachine, index: int) -> None:
    machine.memo[index] = machine.stack[-1]


def append(machine: PickleMachine, values: list[Any]) -> None:
    target = machine.stack[-1]
    if type(target) not in (list, Foreign):
        raise Refused(f"appends to a value of type {type(target).__name__}")
    (target.elements if isinstance(target, Foreign) else target).extend(values)


def set_items(machine: PickleMachine, values: list[Any]) -> None:
    target = machine.stack[-1]
    if type(target) not in (dict, Foreign) or len(values) % 2:
        raise Refused(f"sets items of a value of type {type(target).__name__}")
    entries = target.entries if isinstance(target, Foreign) else target
    for key, value in zip(values[::2], values[1::2]):
        entries[checked_key(key)] = value


def add_items(machine: PickleMachine, _: Any) -> None:
    values = machine.since_mark()
    target = machine.stack[-1]
    if type(target) is not set:
        raise Refused(f"adds elements to a value of type {type(target).__name__}")
    target.update(checked_key(value) for value in values)


def global_text(machine: PickleMachine, argument: str) -> None:
    machine.stack.append(find_global(*argument.split(" ", 1)))  # genops yields "module name"


def new_object(machine: PickleMachine, named: int) -> None:
    """Create an object. `named` is 1 if keyword arguments are on the stack too."""
    kind, args, *_ = machine.take(2 + named)
    if type(kind) is not GlobalName or type(args) is not tuple:
        raise Refused("makes an object of something it does not name")
    machine.stack.append(CALLS[str(kind)](*args) if str(kind) in CALLS else Foreign(str(kind), args))


def build(machine: PickleMachine, _: Any) -> None:
    """Set the state of an object. Attributes of a dict (_metadata of a state dict) are dropped."""
    target, state = machine.take(2)
    if isinstance(target, Foreign):
        target.state = state
    elif type(target) is not dict:
        raise Refused(f"sets the state of a value of type {type(target).__name__}")
    machine.stack.append(target)


INSTRUCTIONS: dict[str, Callable[[PickleMachine, Any], None]] = {
    "PROTO": lambda machine, _: None,
    "FRAME": lambda machine, _: None,
    "STOP": lambda machine, _: None,
    "MARK": mark,
    "POP": lambda machine, _: machine.stack.pop() if machine.stack else machine.since_mark(),
    "POP_MARK": lambda machine, _: machine.since_mark(),
    "DUP": lambda machine, _: machine.stack.append(machine.stack[-1]),
    "NONE": constant(lambda: None),
    "NEWTRUE": constant(lambda: True),
    "NEWFALSE": constant(lambda: False),
    **dict.fromkeys(
        ("BININT", "BININT1", "BININT2", "LONG1", "LONG4", "BINFLOAT", "SHORT_BINUNICODE", "BINUNICODE",
         "BINUNICODE8", "SHORT_BINBYTES", "BINBYTES", "BINBYTES8", "BYTEARRAY8"),
        push_argument,
    ),
    "EMPTY_TUPLE": constant(tuple),
    "EMPTY_LIST": constant(list),
    "EMPTY_DICT": constant(dict),
    "EMPTY_SET": constant(set),
    "TUPLE1": make_tuple(1),
    "TUPLE2": make_tuple(2),
    "TUPLE3": make_tuple(3),
    "TUPLE": lambda machine, _: push_argument(machine, tuple(machine.since_mark())),
    "FROZENSET": lambda machine, _: push_argument(machine, make_set(machine.since_mark())),
    "APPEND": lambda machine, _: append(machine, machine.take(1)),
    "APPENDS": lambda machine, _: append(machine, machine.since_mark()),
    "SETITEM": lambda machine, _: set_items(machine, machine.take(2)),
    "SETITEMS": lambda machine, _: set_items(machine, machine.since_mark()),
    "ADDITEMS": add_items,
    "BINPUT": put,
    "LONG_BINPUT": put,
    "MEMOIZE": lambda machine, _: put(machine, len(machine.memo)),
    "BINGET": lambda machine, index: machine.stack.append(machine.memo[index]),
    "LONG_BINGET": lambda machine, index: machine.stack.append(machine.memo[index]),
    "GLOBAL": global_text,
    "STACK_GLOBAL": lambda machine, _: push_argument(machine, find_global(*machine.take(2))),
    "REDUCE": lambda machine, _: push_argument(machine, call(*machine.take(2))),
    "NEWOBJ": lambda machine, _: new_object(machine, 0),
    "NEWOBJ_EX": lambda machine, _: new_object(machine, 1),
    "BUILD": build,
    "BINPERSID": lambda machine, _: push_argument(machine, machine.find_storage(machine.stack.pop())),
}


DAMAGE = (ValueError, TypeError, KeyError, IndexError, AttributeError, OverflowError, struct.error)


def no_storage(_: Any) -> StoredStorage:
    raise Refused("names a storage, and there is none beside it")


def interpret(data: bytes, where: str, find_storage: Callable[[Any], StoredStorage] = no_storage) -> Any:
    """Return the tree of a pickle without executing it. `where` names the file in errors.

    Raises ConfigError in one line that says what the pickle asks for.
    """
    machine = PickleMachine(find_storage)
    try:
        for count, (opcode, argument, _) in enumerate(pickletools.genops(data)):
            if count >= MAX_INSTRUCTIONS:
                raise Refused(f"has more than {MAX_INSTRUCTIONS:,} instructions")
            if opcode.name not in INSTRUCTIONS:
                raise Refused(f"has the instruction {opcode.name}, which torch.save does not write")
            INSTRUCTIONS[opcode.name](machine, argument)
        (tree,) = machine.stack
        check_unfolded(tree)
    except Refused as refusal:
        raise ConfigError(
            f"{where}: its pickle {refusal}; it was not loaded, and nothing in it was run"
        ) from None
    except DAMAGE as error:
        why = shown(f"{type(error).__name__}: {error}")
        raise ConfigError(f"{where}: damaged, or not a pickle of torch.save ({why})") from None
    return tree


def check_unfolded(tree: Any) -> None:
    """Raise Refused for a tree that contains itself, is too deep, or has too many values over all paths."""
    counts: dict[int, int] = {}  # values in a container, by its id

    def count(value: Any, depth: int) -> int:
        if type(value) not in (dict, list, tuple):
            return 1
        known = counts.get(id(value))
        if known is not None:
            if not known:
                raise Refused("has a container that holds itself")
            return known
        if depth > MAX_DEPTH:
            raise Refused(f"has containers that are nested more than {MAX_DEPTH} deep")
        counts[id(value)] = 0
        children = value.values() if isinstance(value, dict) else value
        total = 1 + sum(count(child, depth + 1) for child in children)
        if total > MAX_VALUES:
            raise Refused(f"expands to more than {MAX_VALUES:,} values")
        counts[id(value)] = total
        return total

    count(tree, 0)


# ---- the zip file ------------------------------------------------------------------------------------------

class Record(NamedTuple):
    """An uncompressed member of the zip file."""
    start: int
    num_bytes: int


class FileWindow(io.RawIOBase):
    """A part of an open file, with the interface that zipfile expects."""

    def __init__(self, fd: int, start: int, size: int) -> None:
        self.fd = fd
        self.start = start
        self.size = size
        self.position = 0

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def seek(self, offset: int, whence: int = os.SEEK_SET) -> int:
        origin = {os.SEEK_SET: 0, os.SEEK_CUR: self.position, os.SEEK_END: self.size}[whence]
        if origin + offset < 0:
            raise ValueError("before the beginning of the file")
        self.position = origin + offset
        return self.position

    def tell(self) -> int:
        return self.position

    def readinto(self, buffer: Any) -> int:
        view = memoryview(buffer)[:max(0, self.size - self.position)]
        size = os.preadv(self.fd, [view], self.start + self.position) if view else 0
        self.position += size
        return size


LOCAL_HEADER = struct.Struct("<4s22xHH")  # signature, length of the name, length of the extra field


def zip_records(fd: int, where: str, start: int, size: int) -> dict[str, Record]:
    """Return {name: Record} of a zip file inside an open file.

    Raises ConfigError for a file that is damaged, compressed, or has a duplicate name.
    """
    try:
        entries = zipfile.ZipFile(FileWindow(fd, start, size)).infolist()
    except (zipfile.BadZipFile, NotImplementedError, ValueError, EOFError, struct.error) as error:
        hint = "truncated, or not a file that torch.save of PyTorch 1.6 or later wrote"
        raise ConfigError(f"{where}: {hint} ({shown(str(error))})") from None

    records: dict[str, Record] = {}
    for entry in entries:
        name = shown(entry.filename)
        if entry.compress_type != zipfile.ZIP_STORED or entry.flag_bits & 1:
            raise ConfigError(f"{where}: {name} is compressed or encrypted, which torch.save never does")
        if entry.filename in records:
            raise ConfigError(f"{where}: {name} is in it twice")
        header = os.pread(fd, LOCAL_HEADER.size, start + entry.header_offset)
        if len(header) < LOCAL_HEADER.size or not header.startswith(b"PK\3\4"):
            raise ConfigError(f"{where}: {name}: damaged zip file")
        _, name_bytes, extra_bytes = LOCAL_HEADER.unpack(header)
        first = entry.header_offset + LOCAL_HEADER.size + name_bytes + extra_bytes
        if first + entry.file_size > size:
            raise ConfigError(f"{where}: {name}: truncated")
        records[entry.filename] = Record(start + first, entry.file_size)
    return records


def tree_at(fd: int, path: Path, start: int, size: int, where: str) -> Any:
    """Return the tree of a torch.save file inside an open file.

    `where` names it in errors. Raises ConfigError.
    """
    records = zip_records(fd, where, start, size)
    pickles = [name for name in records if name.endswith("/data.pkl")]
    if len(pickles) != 1:
        raise ConfigError(f"{where}: a zip file without exactly one data.pkl: not written by torch.save")
    folder = pickles[0].removesuffix("data.pkl")
    if f"{folder}constants.pkl" in records:
        raise ConfigError(f"{where}: a TorchScript program, not weights")
    data, byte_order = records[pickles[0]], records.get(f"{folder}byteorder")
    if byte_order and os.pread(fd, byte_order.num_bytes, byte_order.start) != sys.byteorder.encode():
        raise ConfigError(f"{where}: written by a machine with a different byte order")
    if data.num_bytes > MAX_BYTES:
        raise ConfigError(f"{where}: its pickle has {data.num_bytes:,} bytes, more than {MAX_BYTES:,}")

    def find_storage(named: Any) -> StoredStorage:
        """Look up `named`: ("storage", class, key, device, number of elements)."""
        if type(named) is not tuple or len(named) != 5 or named[0] != "storage":
            raise Refused("names a storage in a way that torch.save does not")
        kind, key, count = named[1], named[2], whole_numbers(named[4:])[0]
        kind_name = kind.name if type(kind) is GlobalName and kind.module.startswith("torch") else ""
        if kind_name not in STORAGE_DTYPES:
            raise Refused(f"has a storage of {shown(kind)}")
        if type(key) is not str or f"{folder}data/{key}" not in records:
            raise Refused(f"names the storage data/{shown(key)}, which is missing")
        record = records[f"{folder}data/{key}"]
        dtype = STORAGE_DTYPES[kind_name]
        num_bytes = count * (dtype.itemsize if dtype else 1)
        if num_bytes > record.num_bytes:
            raise Refused(f"has {num_bytes:,} bytes in the storage data/{shown(key)} of {record.num_bytes:,}")
        return StoredStorage(path, record.start, num_bytes, dtype)

    return interpret(os.pread(fd, data.num_bytes, data.start), where, find_storage)


# ---- files -------------------------------------------------------------------------------------------------

def read_tree(path: Path) -> Any:
    """Return the object passed to torch.save, with StoredTensors for tensors and Foreigns for other objects.

    Raises ConfigError naming the file.
    """
    path = Path(path)
    with open_regular(path) as fd:
        return tree_at(fd, path, 0, os.fstat(fd).st_size, str(path))


def open_torch_file(path: Path) -> NamedTensors:
    """Open the tensors of a torch.save file, named by their paths in the tree, joined by dots.

    Raises ConfigError naming the file, also if two tensors have the same name.
    """
    return tensors_of_tree(path, read_tree(path))


def tensors_of_tree(path: Path, tree: Any) -> NamedTensors:
    """Return the tensors of a tree from read_tree, or of a part of it."""
    table: Table = {}
    for name, stored in leaves(tree):
        if name in table:
            raise ConfigError(f"{path}: two tensors are named {shown(name)}")
        table[name] = stored
    return named_tensors(Path(path), table)


def leaves(tree: Any, name: str = "") -> Iterator[tuple[str, StoredTensor]]:
    """Yield (dotted path, tensor) for each tensor of a tree."""
    if isinstance(tree, StoredTensor):
        yield name, tree
    elif isinstance(tree, (dict, list, tuple)):
        children = tree.items() if isinstance(tree, dict) else enumerate(tree)
        for key, value in children:
            yield from leaves(value, f"{name}.{key}" if name else str(key))
