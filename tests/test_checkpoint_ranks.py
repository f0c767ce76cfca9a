"""The part of a checkpoint that each rank reads and writes, in real runs of train.py."""

import json
import pathlib
import tracemalloc
import zlib
from collections import Counter
from dataclasses import replace

import pytest
import torch
from ranks import MODEL, corpus, job
from run_folder import flip_bit, losses

from checkpoint import state
from checkpoint.disk import folder, store
from checkpoint.disk.files import TORCH
from parallel.sharding import shares
from parallel.sharding.boxes import Box
from parallel.sharding.packing import equal_part, least_loaded
from parallel.sharding.powersgd import ERROR_SUFFIX
from parallel.wire import messages


@pytest.fixture(scope="module")
def args(tmp_path_factory):
    home = tmp_path_factory.mktemp("corpus")
    settings = ("--data.path", corpus(home), "--optim.decay", "constant", "--log.name", "r")
    return ["llama3-tiny", *MODEL, *settings]


def started(home, world, args, **how):
    end = job(home, world, [*args, "--log.dir", str(home)], **how)
    assert not any(end.codes), end.logs
    return end


def counts_reads(rank):
    """Prints a line for each time that index.json of a committed checkpoint is read from disk or parsed."""
    read_file, parse_index = folder.read_file, folder.parse_index

    def read(path):
        if path.name == "index.json" and ".tmp-" not in str(path):
            print("read the index")
        return read_file(path)

    def parse(path, text):
        if ".tmp-" not in str(path):
            print("parsed the index")
        return parse_index(path, text)

    folder.read_file, folder.parse_index, state.parse_index = read, parse, parse


PHASES = json.dumps([{"after_steps": 1, "optim.clip": 0.5}])


@pytest.mark.slow
@pytest.mark.parametrize("phases", [(), ("--train.phases", PHASES)], ids=["one phase", "two phases"])
def test_a_resume_reads_the_index_once_and_on_the_first_rank_alone(tmp_path, args, phases):
    layout = ("--parallel.tp", "2", "--train.ema", "0.9", "--checkpoint.keep", "9", *phases)
    started(tmp_path, 2, [*args, *layout, "--train.steps", "2"])
    end = started(tmp_path, 2, [*args, *layout, "--train.steps", "3"], before=counts_reads)
    assert "resumed from" in end.logs[0]
    assert [log.count("read the index") for log in end.logs] == [1, 0]
    assert [log.count("parsed the index") for log in end.logs] == [1, 1]


@pytest.mark.slow
def test_an_index_longer_than_a_message_is_sent_in_parts(tmp_path, args):
    """Saved in many small pieces; then no message may be longer than a part of the packed index."""

    def in_small_pieces(rank):
        store.PIECE_BYTES = 32

    def with_short_messages(rank):
        messages.MAX_BYTES = 30_000

    words = [*args, "--parallel.tp", "2"]
    started(tmp_path, 2, [*words, "--train.steps", "2"], before=in_small_pieces)
    path = store.newest_checkpoint(tmp_path / "r" / "checkpoints")
    assert len(zlib.compress(store.read_stored_index(path).text, store.PACK_LEVEL)) > 2 * 30_000
    end = started(tmp_path, 2, [*words, "--train.steps", "3"], before=with_short_messages)
    assert "resumed from" in end.logs[0]


def test_packed_data_is_never_larger_than_it_may_be(monkeypatch):
    """A few KiB that would unpack to more than the limit, or to another size than was announced."""
    bomb = zlib.compress(b"1" * 10_000_000)
    assert len(bomb) < 20_000
    monkeypatch.setattr(messages, "MAX_TOTAL_BYTES", 100_000)
    announced = state.PackedStart(pathlib.Path("c"), True, text_bytes=50_000, meta={}, notes=[])
    too_large = replace(announced, text_bytes=10_000_000)
    for unpack in (
        lambda: store.unpack(bomb),
        lambda: state.unpack_start(announced, bomb),
        lambda: state.unpack_start(too_large, bomb),
    ):
        tracemalloc.start()
        with pytest.raises(messages.MessageError, match="bytes"):
            unpack()
        peak = tracemalloc.get_traced_memory()[1]
        tracemalloc.stop()
        assert peak < 1_000_000
    with pytest.raises(messages.MessageError, match="2 bytes, but 50,000 were announced"):
        state.unpack_start(announced, zlib.compress(b"[]"))
    with pytest.raises(messages.MessageError, match="cut off|not packed"):
        store.unpack(store.pack([1, 2, 3])[:-3])


def written_bytes(home, world) -> list[int]:
    path = store.newest_checkpoint(home / "r" / "checkpoints")
    return [sum(f.stat().st_size for f in path.glob(f"rank_{rank:05d}_*")) for rank in range(world)]


def contents(home) -> dict:
    """{key: the whole tensor} of the checkpoint."""
    path = store.newest_checkpoint(home / "r" / "checkpoints")
    pieces = store.quick_check(path).pieces
    found = {piece.box.key: torch.zeros(piece.box.shape, dtype=TORCH[piece.dtype]) for piece in pieces}
    store.load(path, [(Box.whole(key, x.shape), x) for key, x in found.items()])
    return found


def of_any_size(rank):
    """The models of these tests are small: all replicas shall write and read them nevertheless."""
    shares.MIN_SHARE = 1


SHARED = {
    "dp4 zero0": (4, ()),
    "dp2 tp2 zero0": (4, ("--parallel.tp", "2")),
    "dp2 fsdp2": (4, ("--parallel.zero", "1", "--parallel.dp_rep", "2")),
}


@pytest.mark.slow
@pytest.mark.parametrize("layout", SHARED)
def test_what_ranks_hold_alike_is_written_by_all_of_them(tmp_path, args, layout):
    """Each within 1.3 of the mean; and the weights are those that one process saves."""
    world, words = SHARED[layout]
    wider = ("--model.hidden", "64", "--train.steps", "1", "--optim.lr", "1e-30")

    started(tmp_path, world, [*args, *wider, *words], before=of_any_size)
    sizes = written_bytes(tmp_path, world)
    assert max(sizes) < 1.3 * sum(sizes) / world, sizes
    started(tmp_path / "alone", 1, [*args, *wider])
    together, alone = contents(tmp_path), contents(tmp_path / "alone")
    assert together.keys() == alone.keys()
    masters = [key for key in alone if "@" not in key]
    assert masters and all(torch.equal(together[key], alone[key]) for key in masters)


def counts_bytes(rank):
    """Prints how many bytes of shards this rank hashes from a committed checkpoint, and of which tensor."""
    of_any_size(rank)
    check_bytes = folder.check_bytes

    def check(path, piece, *more):
        if ".tmp-" not in str(path):
            print(f"hashed {piece.num_bytes} bytes of {piece.box.key}")
        return check_bytes(path, piece, *more)

    folder.check_bytes = check


def hashed_bytes(log: str, suffix: str = "") -> int:
    """The bytes of tensors whose key has this."""
    lines = [line.split() for line in log.splitlines() if line.startswith("hashed ")]
    return sum(int(count) for _, count, *_, key in lines if suffix in key)


@pytest.mark.slow
def test_replicas_read_a_share_each_and_go_on_alike(tmp_path, args):
    """Four replicas: each hashes about a quarter; the run continues as one that was never interrupted."""
    started(tmp_path / "whole", 4, [*args, "--train.steps", "3"])
    started(tmp_path / "cut", 4, [*args, "--train.steps", "2"], before=of_any_size)
    more = ("--train.steps", "3", "--checkpoint.check_replicas", "1")
    end = started(tmp_path / "cut", 4, [*args, *more], before=counts_bytes)
    sizes = [hashed_bytes(log) for log in end.logs]
    state_bytes = sum(x.numel() * x.element_size() for x in contents(tmp_path / "cut").values())
    assert sum(sizes) < 1.5 * state_bytes and max(sizes) < 1.5 * sum(sizes) / 4, (sizes, state_bytes)
    assert losses(tmp_path / "cut" / "r") == losses(tmp_path / "whole" / "r")


POWERSGD = ("--parallel.compress", "powersgd", "--parallel.powersgd_rank", "1", "--model.hidden", "64")


@pytest.mark.slow
def test_errors_of_compression_are_written_and_read_in_shares(tmp_path, args):
    """Four replicas continue with the same sum: each reads within 1.3 of the mean, and everything once."""
    words = [*args, *POWERSGD]
    saves = ("--checkpoint.every", "2")  # where a run saves, it shares the errors evenly
    started(tmp_path / "whole", 4, [*words, *saves, "--train.steps", "3"], before=of_any_size)
    started(tmp_path / "cut", 4, [*words, "--train.steps", "2"], before=of_any_size)
    index = store.quick_check(store.newest_checkpoint(tmp_path / "cut" / "r" / "checkpoints"))
    errors = [piece for piece in index.pieces if ERROR_SUFFIX in piece.box.key]
    total = sum(piece.num_bytes for piece in errors)
    written = Counter()
    for piece in errors:
        written[piece.file[:10]] += piece.num_bytes
    assert len(written) == 4 and max(written.values()) < 1.3 * total / 4, written

    end = started(tmp_path / "cut", 4, [*words, "--train.steps", "3"], before=counts_bytes)
    sizes = [hashed_bytes(log, ERROR_SUFFIX) for log in end.logs]
    assert sum(sizes) < 1.3 * total and max(sizes) < 1.3 * sum(sizes) / 4, (sizes, total)
    assert losses(tmp_path / "cut" / "r") == losses(tmp_path / "whole" / "r")
    whole, cut = contents(tmp_path / "whole"), contents(tmp_path / "cut")
    assert whole.keys() == cut.keys() and all(torch.equal(cut[key], whole[key]) for key in whole)


@pytest.mark.slow
def test_no_rank_loads_before_all_have_verified(tmp_path, args):
    """One rank's share of the newest checkpoint is damaged: no tensor of any rank is filled from it."""
    started(tmp_path, 2, [*args, "--train.steps", "2", "--checkpoint.every", "1"])
    newest = store.newest_checkpoint(tmp_path / "r" / "checkpoints")
    flip_bit(newest / "rank_00001_shard_00000.safetensors")

    def tells_what_is_filled(rank):
        fill = store.StartedLoad.fill

        def told(started):
            print(f"filled from {started.path.name}")
            fill(started)

        store.StartedLoad.fill = told

    end = started(tmp_path, 2, [*args, "--train.steps", "3"], before=tells_what_is_filled)
    for log in end.logs:
        assert log.count("filled from step_00000001") == 1 and "filled from step_00000002" not in log
    assert "step_00000002 is rejected" in end.logs[0]


def test_equal_parts_cover_a_range_once():
    for size in (0, 1, 255, 256, 257, 5000):
        for parts in (1, 2, 3, 7):
            ranges = [equal_part(size, part, parts, 256) for part in range(parts)]
            assert [at for one in ranges for at in one] == list(range(size))
            assert max(map(len, ranges)) - min(map(len, ranges)) <= 256 or size < 256 * parts


def test_the_least_loaded_gets_the_next():
    assert least_loaded([5, 1, 1, 1, 9, 3], 2) == [0, 1, 1, 1, 1, 0]
    assert least_loaded([4, 4, 4], 1) == [0, 0, 0]
