"""What each rank reads and writes of a checkpoint, in real runs of train.py."""

import json

import pytest
from ranks import MODEL, corpus, job

from checkpoint import folder, state


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
