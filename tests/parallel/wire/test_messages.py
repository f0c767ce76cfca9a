"""What ranks tell each other comes back equal, types included; what a stranger says is one line, and nothing
that it names is imported, called or allocated.
"""

import math
import os
import pathlib
import random
import struct
import subprocess
import sys

import pytest
import torch

import config
from checkpoint.disk.files import IntegrityError, StorageError
from checkpoint.disk.folder import NewerFormat, StoredPiece
from checkpoint.hf.rules import FamilyError
from config.provenance import CODE_FOLDERS
from config.reading import resolve
from parallel.sharding.boxes import Box
from parallel.wire import comm, messages
from parallel.wire.comm import Group, PeerError

TEXTS = ("", "a", "\n\r\x1b[31m", "\ud800", "\ud83d\ude00 as two", "é", '{"tuple": []}', "\0", "x" * 9000)


def value(rnd: random.Random, depth: int):
    """A value of every type that may be sent."""
    if depth == 0:
        return rnd.choice((
            None,
            True,
            False,
            rnd.randint(-(2**70), 2**70),
            rnd.choice((0.0, -0.0, math.inf, -math.inf, 5e-324, rnd.gauss(0, 1e9))),
            rnd.choice(TEXTS),
            rnd.randbytes(rnd.randint(0, 9)),
            pathlib.Path("/a") / rnd.choice(("b", "é", "c d")),
        ))
    several = [value(rnd, rnd.randint(0, depth - 1)) for _ in range(rnd.randint(0, 4))]
    hashable = [value(rnd, 0) for _ in range(rnd.randint(0, 4))]
    box = Box(rnd.choice(TEXTS), *(tuple(rnd.randint(0, 2**40) for _ in range(2)) for _ in range(3)))
    return rnd.choice((
        several,
        tuple(several),
        set(hashable),
        frozenset(hashable),
        dict(zip(hashable, several)),
        box,
        StoredPiece(box, "F32", "f", "n", rnd.choice(TEXTS)),
    ))


def alike(a, b) -> bool:
    """Equal, of the same types at every depth, floats bit for bit, dicts in the same order."""
    if type(a) is not type(b):
        return False
    if type(a) in (list, tuple):
        return len(a) == len(b) and all(map(alike, a, b))
    if type(a) is dict:
        return alike(list(a.items()), list(b.items()))
    if type(a) is float:
        return struct.pack("d", a) == struct.pack("d", b)
    return a == b


def test_everything_comes_back_equal():
    for seed in range(2000):
        sent = value(random.Random(seed), seed % 5)
        assert alike(messages.decode(messages.encode(sent)), sent), sent
    assert math.isnan(messages.decode(messages.encode(math.nan)))
    cfg = resolve("llama3-tiny", None, [])
    assert messages.decode(messages.encode(cfg)) == cfg


ERRORS = [
    StorageError(pathlib.Path("/disk/x"), 1234, "No space left"),
    IntegrityError("file: wrong"),
    NewerFormat("later"),
    PeerError("no answer", 76),
    config.ConfigError("parallel.tp: 3"),
    FamilyError("a", "b"),
    KeyError("k"),
    FileNotFoundError(2, "No such file", "/x"),
    torch.OutOfMemoryError("CUDA out of memory"),
]


@pytest.mark.parametrize("error", ERRORS, ids=lambda error: type(error).__name__)
def test_errors_come_back_as_they_were(error):
    found = messages.decode(messages.encode(error))
    assert type(found) is type(error) and str(found) == str(error) and found.args == error.args
    assert vars(found) == vars(error) and getattr(found, "exit_code", 0) == getattr(error, "exit_code", 0)


def test_an_error_that_is_known_nowhere_is_the_nearest_that_is():
    class OfALibrary(ValueError):
        def __init__(self):
            super().__init__(object(), "why")
            self.tensor = torch.ones(3)
            self.line = 7

    found = messages.decode(messages.encode(OfALibrary()))
    assert type(found) is ValueError and "why" in str(found) and vars(found) == {"line": 7}
    with pytest.raises(UnicodeDecodeError) as caught:
        b"\xff".decode()
    found = messages.decode(messages.encode(caught.value))
    assert type(found) is ValueError and str(found) == str(caught.value)


@pytest.mark.parametrize(
    "wrong",
    [torch.ones(2), object(), range(3), {1: [print]}, Box],
    ids=["a tensor", "an object", "a range", "a function", "a class"],
)
def test_what_is_not_plain_is_not_sent(wrong):
    with pytest.raises(TypeError, match="cannot be sent to another rank"):
        messages.encode(wrong)


HOSTILE = {
    "nothing": b"",
    "garbage": b"\x80\x04\x95",
    "a pickle": b"cos\nsystem\n(S'touch CANARY'\ntR.",
    "half": messages.encode([1, 2, "x"])[:-2],
    "two values": b"1 2",
    "brackets": b"[" * 100_000,
    "tags in tags": b'{"tuple":' * 50_000,
    "digits": b"1" * 5000,
    "a tag that is none": b'{"eval":"1"}',
    "two tags": b'{"set":[],"tuple":[]}',
    "no tag": b"{}",
    "a function": b'{"class":["os:system",["touch CANARY"]]}',
    "another library's class": b'{"class":["subprocess:Popen",["touch CANARY"]]}',
    "what a module of ours imports": b'{"class":["checkpoint.disk.store:Path",["x"]]}',
    "a class that is not frozen": b'{"class":["parallel.wire.comm:Activity",[0,0,0,0,0,0,0]]}',
    "a module that is not loaded": b'{"class":["runtime.canary:Box",[1]]}',
    "a name with dots": b'{"class":["parallel.sharding.boxes:Box.whole",[1]]}',
    "too few fields": b'{"class":["parallel.sharding.boxes:Box",["w"]]}',
    "a class of a number": b'{"class":[7,[]]}',
    "unhashable": b'{"set":[[]]}',
    "a path of a number": b'{"path":7}',
    "a path with a zero in a dict": b'{"dict":[[1]]}',
    "no base64": b'{"bytes":"***"}',
    "not an error": b'{"error":[["SystemExit"],"",[],[]]}',
    "a class as an error": b'{"error":[["parallel.sharding.boxes:Box"],"",[],[]]}',
    "an error that ends with 0": b'{"error":[["ValueError"],"",[],[["exit_code",0]]]}',
    "an error with a method": b'{"error":[["ValueError"],"",[],[["with_traceback",1]]]}',
}


@pytest.mark.parametrize("message", HOSTILE.values(), ids=HOSTILE.keys())
def test_hostile_messages_are_one_line(tmp_path, monkeypatch, message):
    monkeypatch.chdir(tmp_path)
    before = set(sys.modules)
    refusal = r"^rank 3 sent [\d,]+ bytes that are not a message"
    with pytest.raises(messages.MessageError, match=refusal) as caught:
        messages.decode(message, "rank 3")
    assert "\n" not in str(caught.value) and "\x1b" not in str(caught.value) and len(str(caught.value)) < 400
    assert set(sys.modules) == before and os.listdir() == []


@pytest.mark.slow
def test_random_damage_is_a_value_or_one_line():
    rnd = random.Random(0)
    for seed in range(3000):
        message = bytearray(messages.encode(value(random.Random(seed), 3)))
        for _ in range(rnd.randint(1, 3)):
            message[rnd.randrange(len(message))] = rnd.randrange(256)
        try:
            messages.decode(bytes(message))
        except messages.MessageError as error:
            assert "\n" not in str(error)


def test_no_constructor_is_called(monkeypatch):
    def called(*args):
        raise AssertionError("called")

    sent = messages.encode([Box.whole("w", (2,)), StorageError("p", 1, "why")])
    monkeypatch.setattr(Box, "__init__", called)
    monkeypatch.setattr(StorageError, "__init__", called)
    box, error = messages.decode(sent)
    assert (box.key, box.size, str(error)) == ("w", (2,), "p: cannot read or write 1 bytes: why")


def test_no_pickle_is_left_between_ranks():
    """torch's own exchanges of objects unpickle what a peer sends."""
    root = pathlib.Path(messages.__file__).parents[2]
    listed = subprocess.run(["git", "ls-files", "*.py"], cwd=root, capture_output=True, text=True, check=True)
    for name in listed.stdout.split():
        if not name.startswith("tests/") and (root / name).exists():  # lab/ may be gone
            text = (root / name).read_text()
            assert "_object_list(" not in text and "dist.all_gather_object" not in text, name
            assert "dist.gather_object" not in text, name


def test_messages_may_name_what_the_code_folders_hold():
    assert messages.PACKAGES == (*CODE_FOLDERS, "build", "train")


# ---- between ranks -----------------------------------------------------------------------------------------


def told(world) -> list:
    """What the exchanges of objects give this rank; the last rank sends most."""
    group = world.all_ranks()
    own = {"rank": world.rank, "box": Box.whole("w", (world.rank,)), "long": b"x" * 5000 * world.rank}
    return [
        comm.all_gather_objects(own, group),
        comm.gather_objects(own, group),
        comm.broadcast_object(own, group, source=group.size - 1),
        dict(group.ledger),
    ]


@pytest.mark.parametrize("size", [1, 2, 3])
def test_ranks_tell_each_other(ranks, size):
    own = [
        {"rank": rank, "box": Box.whole("w", (rank,)), "long": b"x" * 5000 * rank} for rank in range(size)
    ]
    for rank, found in enumerate(ranks(size).run(told)):
        assert found == [own, own if rank == 0 else [], own[-1], {}], rank


RECEIVERS = {
    "all_gather_objects": lambda group: comm.all_gather_objects("x", group),
    "gather_objects": lambda group: comm.gather_objects("x", group),
    "broadcast_object": lambda group: comm.broadcast_object("x", group, source=1),
}


def announces(world, length: int, verb: str) -> str:
    """The refusal of rank 0 when the last rank announces so many bytes."""
    group = world.all_ranks()
    if world.rank > 0:
        announced = torch.tensor([length])
        if verb == "broadcast_object":
            comm.broadcast(announced, group, source=1)
        else:
            comm.all_gather(announced, group)
        return ""
    with pytest.raises(messages.MessageError) as caught:
        RECEIVERS[verb](group)
    return str(caught.value)


@pytest.mark.parametrize("verb", RECEIVERS)
@pytest.mark.parametrize("length", [-1, 0, 1 << 62])
def test_sizes_are_compared_before_they_are_allocated(ranks, length, verb):
    found, _ = ranks(2).run(announces, length, verb)
    assert found == f"rank 1 announces a message of {length:,} bytes; the limit is {256 << 20:,}"


def long_bytes(world, own: bytes, most: int, announced=None):
    """(what broadcast_bytes of the last rank's bytes gives, or its refusal; how many exchanges they took)."""
    group = world.all_ranks()
    old, messages.MAX_BYTES = messages.MAX_BYTES, most
    group.activity.past.clear()
    try:
        if announced is not None and world.rank > 0:
            return comm.broadcast_object(announced, group, source=1), 0
        found = comm.broadcast_bytes(own if world.rank > 0 else b"", group, source=1)
    except messages.MessageError as error:
        found = str(error)
    finally:
        messages.MAX_BYTES = old
    return found, sum(exchange.verb == "broadcast_bytes" for exchange in group.activity.past)


def test_bytes_that_are_longer_than_a_message(ranks):
    own = random.Random(0).randbytes(2500)
    assert ranks(2).run(long_bytes, own, 1000) == [(own, 3)] * 2
    assert ranks(2).run(long_bytes, b"", 1000) == [(b"", 0)] * 2
    for length in (-1, 1 << 62, "many"):
        found, _ = ranks(2).run(long_bytes, own, 1000, length)[0]
        assert found == f"rank 1 announces {length!r} bytes; the limit is {4 << 30:,}"


def test_the_sum_of_many_messages_is_bounded():
    group = Group("job", tuple(range(100)))
    lengths = [messages.MAX_BYTES] * 100
    with pytest.raises(messages.MessageError, match="messages of 100 ranks take 26,843,545,600 bytes"):
        comm.check_lengths(lengths, group)
    lengths[1:] = [1] * 99  # each is received as long as the longest
    with pytest.raises(messages.MessageError, match="messages of 100 ranks"):
        comm.check_lengths(lengths, group)
    assert comm.check_lengths([1] * 100, group) == [1] * 100


def test_a_message_that_is_none_names_its_rank(ranks):
    assert ranks(2).run(sends_garbage) == ["rank 1 sent 3 bytes that are not a message"] * 2


def sends_garbage(world) -> str | None:
    group = world.all_ranks()
    if world.rank == 1:
        messages.encode = lambda x: b"\x80\x04\x95"
    try:
        comm.all_gather_objects("x", group)
    except messages.MessageError as error:
        return str(error).partition(":")[0]
    finally:
        if world.rank == 1:
            messages.encode = ENCODE
    return None


ENCODE = messages.encode
