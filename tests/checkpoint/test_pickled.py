"""Files of torch.save: the tree and every tensor, without running a pickle, against what was saved; hostile
files are refused in one line, and nothing of them runs.
"""

import argparse
import collections
import enum
import functools
import io
import os
import pickle
import random
import signal
import subprocess
import zipfile
from pathlib import PurePosixPath

import numpy as np
import pytest
import torch
from test_named_tensors import DTYPES, bits, some

from checkpoint.disk.tensors_by_name import read_stored
from checkpoint.systems import pickled
from checkpoint.systems.pickled import (
    Foreign,
    GlobalName,
    interpret,
    open_torch_file,
    read_tree,
)
from config import ConfigError
from parallel.sharding.boxes import Box

PROTOCOLS = range(2, pickle.HIGHEST_PROTOCOL + 1)


def saved(path, what, **more):
    torch.save(what, path, **more)
    return path


def whole(stored):
    return read_stored(stored, Box.whole("", stored.shape))


# ---- what torch.save writes --------------------------------------------------------------------------------


@pytest.mark.parametrize("protocol", PROTOCOLS)
def test_tensors_of_all_dtypes_shapes_and_strides_come_back(tmp_path, protocol):
    base = some((6, 8), torch.float32)
    tensors = {str(dtype).replace("torch.", ""): some((3, 4), dtype) for dtype in DTYPES}
    tensors |= {
        "scalar": torch.tensor(3.0), "empty": torch.empty(0, 4), "view": base[2:5, 1:7:2],
        "transposed": base.t(), "expanded": base[:1].expand(5, 8), "shared": base,
        "parameter": torch.nn.Parameter(base[1]), "meta.dotted": torch.arange(3),
    }
    file = saved(tmp_path / "x.pt", tensors, pickle_protocol=protocol)
    source = open_torch_file(file)
    assert list(source.tensors) == list(tensors)
    for name, tensor in tensors.items():
        info = source.tensors[name]
        assert (info.shape, info.dtype) == (tuple(tensor.shape), tensor.dtype), name
        assert torch.equal(bits(source.read(name)), bits(tensor.detach())), name
    assert torch.equal(source.read("transposed", (slice(2, 7), slice(1, 4))), base.t()[2:7, 1:4])
    # one storage: both read the same bytes of the file
    assert whole(read_tree(file)["shared"]).shape == (6, 8)
    assert read_tree(file)["shared"].start == read_tree(file)["transposed"].start


class Color(enum.Enum):
    RED = 1


class Named(collections.OrderedDict):
    pass


class Tagged(torch.Tensor):
    pass


@pytest.mark.parametrize("protocol", PROTOCOLS)
def test_plain_values_come_back_and_objects_stay_foreign(tmp_path, protocol):
    state = collections.OrderedDict(w=torch.arange(4.0))
    state._metadata = {"": {"version": 1}}
    plain = {
        "none": None, "yes": True, "number": -(2**70), "real": 0.1, "text": "ü\n", "bytes": b"\0\xff",
        "list": [1, [2, (3, ())]], 5: {"a": 1}, (0, 1): 2,
        "size": torch.Size([2, 3]), "dtype": torch.bfloat16,
        "default": collections.defaultdict(list, a=[1]), "count": collections.Counter("aab"),
        "deque": collections.deque([1, 2], 5), "set": {1, 2}, "frozen": frozenset("ab"), "state": state,
        "again": [plain_list := [1], plain_list],
    }
    foreign = {
        "args": argparse.Namespace(num_layers=4, color=Color.RED, path=PurePosixPath("a/b")),
        "device": torch.device("cpu"), "strided": torch.strided, "np": np.float64(2.5),
        "part": functools.partial(int, base=2), "signal": signal.SIGTERM, "gelu": torch.nn.functional.relu,
        "named": Named(a=1), "numpy": np.arange(3), "generator": np.random.get_state(),
        "random": random.getstate(),
    }
    tree = read_tree(saved(tmp_path / "x.pt", plain | foreign, pickle_protocol=protocol))
    assert list(tree) == [*plain, *foreign]
    for key in plain.keys() - {"state", "deque"}:
        assert tree[key] == plain[key], key
    assert tree["deque"] == [1, 2] and tree["again"][0] is tree["again"][1]
    assert torch.equal(whole(tree["state"]["w"]), torch.arange(4.0))

    args = tree["args"]
    assert isinstance(args, Foreign) and args.name == "argparse.Namespace" and args.state["num_layers"] == 4
    assert args.state["color"].name.endswith("test_pickled.Color") and args.state["color"].args == (1,)
    assert args.state["path"].name.endswith("PurePosixPath") and args.state["path"].args == ("a", "b")
    assert tree["device"].name == "torch.device" and tree["device"].args == ("cpu",)
    assert tree["gelu"] == GlobalName("torch.nn.functional", "relu")
    assert "SIGTERM" in str(tree["signal"]) or tree["signal"].name == "signal.Signals"
    assert tree["named"].entries == {"a": 1}
    assert repr(tree["part"]) == "<functools.partial>"


def test_an_enum_of_some_versions_of_python_is_a_name():
    """As builtins.getattr of the class and a name: a name, and nothing is got."""
    data = b"\x80\x02c__builtin__\ngetattr\ncmegatron.core.enums\nModelType\nX\x07\x00\x00\x00encoder\x86R."
    assert interpret(data, "x") == GlobalName("megatron.core.enums", "ModelType.encoder")


def test_tensors_with_attributes_are_read_and_of_other_classes_foreign(tmp_path):
    attributed = torch.arange(3.0)
    attributed.tensor_model_parallel = True
    parameter = torch.nn.Parameter(torch.arange(2.0))
    parameter.shared = 1
    tagged = torch.arange(2).as_subclass(Tagged)
    tensors = {"a": attributed, "p": parameter, "t": tagged, "state": {0: [attributed]}}
    file = saved(tmp_path / "x.pt", tensors)
    assert list(open_torch_file(file).tensors) == ["a", "p", "state.0.0"]
    tree = read_tree(file)
    assert torch.equal(whole(tree["a"]), attributed) and torch.equal(whole(tree["p"]), parameter.detach())
    assert isinstance(tree["t"], Foreign) and tree["t"].name.endswith("test_pickled.Tagged")


def test_only_the_box_is_read(tmp_path, monkeypatch, read_sizes):
    """A few rows of a storage of 64 MB: their bytes, and no more."""
    file = saved(tmp_path / "x.pt", {"w": torch.arange(1 << 24, dtype=torch.int32).view(1 << 12, 1 << 12)})
    preads = []
    pread = os.pread
    monkeypatch.setattr(os, "pread", lambda fd, size, at: preads.append(size) or pread(fd, size, at))
    read = open_torch_file(file).read("w", (slice(4000, 4002), slice(0, 1 << 12)))
    assert read[1, -1] == 4002 * (1 << 12) - 1
    assert sum(read_sizes) == 2 * 4 * (1 << 12) and sum(preads) < 2000


# ---- hostile files -----------------------------------------------------------------------------------------


class Reduced:
    """Its pickle calls a function."""

    def __init__(self, function, *args):
        self.reduced = function, args

    def __reduce__(self):
        return self.reduced


def zipped(path, data, **records):
    """A zip file as torch.save lays it out, with this pickle."""
    with zipfile.ZipFile(path, "w") as file:
        file.writestr("archive/data.pkl", data)
        file.writestr("archive/byteorder", "little")
        for name, record in records.items():
            file.writestr(f"archive/{name}", record)
    return path


def refusal(act):
    with pytest.raises(ConfigError) as caught:
        act()
    line = str(caught.value)
    assert "\n" not in line and len(line) < 400
    return line


def evil(mark):
    """{what the line names: an object whose pickle, where it is run, makes the file `mark`}"""
    touch = f"touch {mark}"
    write = f"open({str(mark)!r}, 'w')"
    return {
        "posix.system": Reduced(os.system, touch),
        "builtins.eval": Reduced(eval, write),
        "builtins.exec": Reduced(exec, write),
        "io.open": Reduced(open, str(mark), "w"),
        "subprocess.call": Reduced(subprocess.call, ["touch", str(mark)]),
    }


@pytest.mark.parametrize("protocol", PROTOCOLS)
@pytest.mark.parametrize("words", evil("x"))
def test_what_an_attack_asks_for_is_named_and_does_not_run(tmp_path, words, protocol):
    mark = tmp_path / "ran"
    data = pickle.dumps({"model": {"w": evil(mark)[words]}}, protocol=protocol)
    path = zipped(tmp_path / "evil.pt", data)
    line = refusal(lambda: read_tree(path))
    assert line.startswith(f"{path}: its pickle asks ") and words in line and not mark.exists(), line
    pickle.loads(data)  # the file is what it claims to be: where it is run, it acts
    assert mark.exists()


def raw(*parts):
    return b"\x80\x04" + b"".join(parts) + b"."


def text(value):
    return b"\x8c" + bytes([len(value)]) + value.encode()


def named(module, name):
    return text(module) + text(name) + b"\x93"


STORAGE = b"(" + text("storage") + named("torch", "FloatStorage") + text("0") + text("cpu") + b"K\x04tQ"
GETATTR = named("builtins", "getattr")
REBUILD = named("torch._utils", "_rebuild_tensor_v2")


def tensor(size=b"K\x04\x85", stride=b"K\x01\x85", offset=b"K\x00", storage=STORAGE):
    return raw(REBUILD, b"(", storage, offset, size, stride, b"\x89)tR")


def bomb(levels, width):
    """Lists of lists: levels * width instructions for width ** levels values."""
    data = b"]\x940"
    for level in range(levels):
        data += b"]\x94(" + (b"h" + bytes([level])) * width + b"e0"
    return raw(data + b"h" + bytes([levels]))


@pytest.mark.parametrize("data, words", [
    (bomb(10, 100), "expands to more than 20,000,000 values"),
    (raw(b"]\x94h\x00a"), "has a container that holds itself"),
    (raw(b"]" * 200, b"a" * 199), "has containers that are nested more than 100 deep"),
    (raw(b"}(", b"(" * 30, b"N" + b"t" * 30, b"Nu"), "has a key of type tuple"),
    (raw(b"}(]Nu"), "has a key of type list"),
    (raw(b"}\x8a\xff" + b"\xff" * 254 + b"\x7fNs"), "has a key of type int"),
    (raw(b"\x8f(]\x90"), "has a key of type list"),
    (b"\x80\x02(S'echo'\nios\nsystem\n.", "has the instruction STRING"),
    (b"\x80\x02(X\x01\x00\x00\x00xios\nsystem\n.", "has the instruction INST"),
    (raw(b"(", named("os", "system"), text("x"), b"o"), "asks for os.system"),
    (raw(named("subprocess", "Popen"), b")R"), "asks for subprocess.Popen"),
    (raw(named("os", "system\nerror: fine")), "asks for os.system\\nerror: fine"),
    (raw(b"\x82\x01"), "has the instruction EXT1"),
    (raw(text("x"), b"\x81"), "damaged, or not a pickle"),
    (raw(text("x"), b")\x81"), "makes an object of something it does not name"),
    (raw(text("x"), b")R"), "asks to call something it does not name"),
    (raw(named("torch", "load"), b")R"), "asks to call torch.load"),
    (raw(named("torch.serialization", "os.system"), b")R"), "asks to call torch.serialization.os.system"),
    (raw(GETATTR, named("torch", "os"), text("system"), b"\x86R)R"), "asks to call torch.os.system"),
    (raw(GETATTR, b"]", text("system"), b"\x86R"), "asks for builtins.getattr(a list, ...)"),
    (raw(GETATTR, named("builtins", "int"), text("x"), b"\x86R"), "builtins.getattr(builtins.int, ...)"),
    (raw(named("_codecs", "encode"), text("x"), text("idna"), b"\x86R"), "asks to encode by idna"),
    (raw(named("numpy", "load"), b")R"), "asks to call numpy.load"),
    (raw(b"K\x01]b"), "sets the state of a value of type int"),
    (raw(b"K\x01K\x02a"), "appends to a value of type int"),
    (raw(b"]K\x02K\x03s"), "sets items of a value of type list"),
    (raw(b"N", b"\x93"), "damaged, or not a pickle"),
    (raw(b"NN", b"\x93"), "names a global by something other than text"),
    (raw(b"h\x07"), "damaged, or not a pickle"),
    (raw(b"NN"), "damaged, or not a pickle"),
    (raw(), "damaged, or not a pickle"),
    (b"", "damaged, or not a pickle"),
    (b"\x80\x04N", "damaged, or not a pickle"),
    (raw(b"\x8b\xff\xff\xff\x7fx"), "damaged, or not a pickle"),
    (raw(b"\x8e" + b"\xff" * 8), "damaged, or not a pickle"),
    (raw(text("x"), b"Q"), "names a storage in a way that torch.save does not"),
    (tensor(size=b"K\x05\x85"), "has a tensor of shape (5,) that ends beyond its 16 bytes"),
    (tensor(offset=b"K\x01"), "that ends beyond its 16 bytes"),
    (tensor(stride=b"K\x02\x85"), "that ends beyond its 16 bytes"),
    (tensor(offset=b"J\xff\xff\xff\xff"), "has a tensor whose numbers are not whole"),
    (tensor(size=b"\x88\x85"), "has a tensor whose numbers are not whole"),
    (tensor(stride=b")"), "has a tensor of 1 dims with 0 strides"),
    (tensor(storage=b"N"), "damaged, or not a pickle"),
    (tensor(storage=STORAGE.replace(b"K\x04", b"K\x05")), "has 20 bytes in the storage data/0 of 16"),
    (tensor(storage=STORAGE.replace(b"\x010", b"\x019")), "names the storage data/9, which is missing"),
    (tensor(storage=STORAGE.replace(b"Float", b"Quant")), "has a storage of torch.QuantStorage"),
])
def test_a_pickle_that_torch_save_does_not_write_is_refused(tmp_path, data, words):
    path = zipped(tmp_path / "x.pt", data, **{"data/0": bytes(16)})
    line = refusal(lambda: read_tree(path))
    assert line.startswith(f"{path}: ") and words in line, line


def test_the_same_pickle_without_a_fault_is_read(tmp_path):
    numbers = torch.arange(4.0)
    path = zipped(tmp_path / "x.pt", tensor(), **{"data/0": numbers.numpy().tobytes()})
    assert torch.equal(whole(read_tree(path)), numbers)


def test_a_memo_without_end_is_bounded(tmp_path, monkeypatch):
    """An index of the memo takes no memory, and instructions are counted."""
    assert interpret(raw(b"Nr\xff\xff\xff\xffj\xff\xff\xff\xff0"), "x") is None
    monkeypatch.setattr(pickled, "MAX_INSTRUCTIONS", 1000)
    line = refusal(lambda: read_tree(zipped(tmp_path / "x.pt", raw(b"N", b"\x94" * 10_000))))
    assert line.startswith(f"{tmp_path}/x.pt: its pickle has more than 1,000 instructions")
    monkeypatch.setattr(pickled, "MAX_BYTES", 1000)
    line = refusal(lambda: read_tree(zipped(tmp_path / "x.pt", raw(b"N", b"\x94" * 10_000))))
    assert "its pickle has 10,004 bytes, more than 1,000" in line


def test_random_damage_is_refused_or_read(tmp_path):
    """Whatever a flipped byte does, it is a ConfigError or a tree."""
    file = saved(tmp_path / "x.pt", {"w": torch.ones(3), "args": argparse.Namespace(a=[1, {"b": (2, "c")}])})
    good = file.read_bytes()
    numbers = random.Random(0)
    refusals = 0
    for _ in range(1500):
        data = bytearray(good)
        for _ in range(numbers.randint(1, 3)):
            data[numbers.randrange(len(data))] = numbers.randrange(256)
        file.write_bytes(data)
        try:
            open_torch_file(file)
        except ConfigError as error:
            refusals += 1
            assert str(error).startswith(f"{file}: ")
    assert refusals > 100
    for size in range(0, len(good), 7):
        file.write_bytes(good[:size])
        assert refusal(lambda: open_torch_file(file)).startswith(f"{file}: truncated, or not a file")


def test_files_that_are_not_of_torch_save_are_named(tmp_path):
    file = tmp_path / "x.pt"
    assert refusal(lambda: read_tree(file)) == f"{file}: cannot be read: No such file or directory"
    saved(file, {"w": torch.ones(2)}, _use_new_zipfile_serialization=False)
    assert "of PyTorch 1.6 or later" in refusal(lambda: read_tree(file))
    with zipfile.ZipFile(file, "w", zipfile.ZIP_DEFLATED) as made:
        made.writestr("archive/data.pkl", b"N" * 100)
    assert "archive/data.pkl is compressed or encrypted" in refusal(lambda: read_tree(file))
    zipped(file, raw(b"N"), **{"constants.pkl": b""})
    assert "a TorchScript program" in refusal(lambda: read_tree(file))
    with zipfile.ZipFile(file, "w") as made:
        made.writestr("data.txt", "")
    assert "without exactly one data.pkl" in refusal(lambda: read_tree(file))
    with zipfile.ZipFile(file, "w") as made:
        made.writestr("archive/data.pkl", raw(b"N"))
        made.writestr("archive/byteorder", "big")
    assert "with a different byte order" in refusal(lambda: read_tree(file))
    with zipfile.ZipFile(file, "w") as made, pytest.warns(UserWarning, match="Duplicate"):
        made.writestr("archive/data.pkl", raw(b"N"))
        made.writestr("archive/data.pkl", raw(b"N"))
    assert "archive/data.pkl is in it twice" in refusal(lambda: read_tree(file))
    saved(file, torch.ones(2, dtype=torch.complex64).conj())
    assert "has a tensor whose numbers are conjugated or negated" in refusal(lambda: read_tree(file))
    saved(file, {"a": {"b.c": torch.ones(1)}, "a.b": {"c": torch.ones(1)}})
    assert refusal(lambda: open_torch_file(file)) == f"{file}: two tensors are named a.b.c"


def test_a_window_of_a_file_reads_and_seeks_as_a_file(tmp_path):
    path = tmp_path / "x"
    path.write_bytes(b"0123456789")
    with open(path, "rb") as file:
        window = io.BufferedReader(pickled.FileWindow(file.fileno(), 2, 5))
        assert window.read() == b"23456" and window.seek(-2, os.SEEK_END) == 3 and window.read(9) == b"56"
        assert window.seek(9) == 9 and window.read() == b""


def test_nothing_of_a_file_is_imported(tmp_path, monkeypatch):
    """Modules that a file names are not loaded."""
    (tmp_path / "loud.py").write_text("raise SystemExit")
    monkeypatch.syspath_prepend(tmp_path)
    data = raw(named("loud", "Class"), b")\x81}", text("a"), named("loud", "function"), b"sb")
    tree = read_tree(zipped(tmp_path / "x.pt", data))
    assert tree.name == "loud.Class" and tree.state == {"a": GlobalName("loud", "function")}
    with pytest.raises(SystemExit):
        pickle.loads(data)
