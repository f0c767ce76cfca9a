"""What each rank reads and writes of a checkpoint, in real runs of train.py."""

import json

import pytest
import torch
from ranks import MODEL, corpus, job

from checkpoint import folder, state, store
from checkpoint.files import TORCH
from parallel.sharding.boxes import Box
from parallel.sharding.packing import equal_part, least_loaded


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


@pytest.mark.parametrize("phases", [(), ("--train.phases", PHASES)], ids=["one phase", "two phases"])
def test_a_resume_reads_the_index_once_and_on_the_first_rank_alone(tmp_path, args, phases):
    layout = ("--parallel.tp", "2", "--train.ema", "0.9", *phases)
    started(tmp_path, 2, [*args, *layout, "--train.steps", "2"])
    end = started(tmp_path, 2, [*args, *layout, "--train.steps", "3"], before=counts_reads)
    assert "resumed from" in end.logs[0]
    assert [log.count("read the index") for log in end.logs] == [1, 0]
    assert [log.count("parsed the index") for log in end.logs] == [1, 1]


def written_bytes(home, world) -> list[int]:
    (path,) = (home / "r" / "checkpoints").glob("step_*[0-9]")
    store.verify(path)
    return [sum(f.stat().st_size for f in path.glob(f"rank_{rank:05d}_*")) for rank in range(world)]


def contents(home) -> dict:
    """{key: the whole tensor} of the checkpoint."""
    (path,) = (home / "r" / "checkpoints").glob("step_*[0-9]")
    pieces = store.quick_check(path).pieces
    found = {piece.box.key: torch.zeros(piece.box.shape, dtype=TORCH[piece.dtype]) for piece in pieces}
    store.load(path, [(Box.whole(key, x.shape), x) for key, x in found.items()])
    return found


SHARED = {
    "dp4 zero0": (4, ()),
    "dp2 tp2 zero0": (4, ("--parallel.tp", "2")),
    "dp2 fsdp2": (4, ("--parallel.zero", "1", "--parallel.dp_rep", "2")),
}


@pytest.mark.parametrize("layout", SHARED)
def test_what_ranks_hold_alike_is_written_by_all_of_them(tmp_path, args, layout):
    """Each within 1.3 of the mean; and the weights are those that one process saves."""
    world, words = SHARED[layout]
    wider = ("--model.hidden", "64", "--train.steps", "1", "--optim.lr", "1e-30")
    started(tmp_path, world, [*args, *wider, *words])
    sizes = written_bytes(tmp_path, world)
    assert max(sizes) < 1.3 * sum(sizes) / world, sizes
    started(tmp_path / "alone", 1, [*args, *wider])
    together, alone = contents(tmp_path), contents(tmp_path / "alone")
    assert together.keys() == alone.keys()
    masters = [key for key in alone if "@" not in key]
    assert masters and all(torch.equal(together[key], alone[key]) for key in masters)


def test_equal_parts_cover_a_range_once():
    for size in (0, 1, 255, 256, 257, 5000):
        for parts in (1, 2, 3, 7):
            ranges = [equal_part(size, part, parts, 256) for part in range(parts)]
            assert [at for one in ranges for at in one] == list(range(size))
            assert max(map(len, ranges)) - min(map(len, ranges)) <= 256 or size < 256 * parts


def test_the_least_loaded_gets_the_next():
    assert least_loaded([5, 1, 1, 1, 9, 3], 2) == [0, 1, 1, 1, 1, 0]
    assert least_loaded([4, 4, 4], 1) == [0, 0, 0]
