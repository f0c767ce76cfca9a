"""train.py as people start it, with evaluation and sampling at their defaults, under layouts that hold
several stages on a rank.
"""

import math

import pytest
import run_folder
from ranks import corpus, job

# the tiny twin as it is but for its length, its data and its console
ARGS = (
    "llama3-tiny --train.steps 4 --data.doc_mask true --train.micro_batch 1 --train.threads 1 "
    "--train.seq_len 24 --eval.batches 1 --checkpoint.every none"
).split()
SEVERAL = (
    ("--parallel.pp", "2", "--parallel.schedule", "zb-v"),
    ("--parallel.pp", "2", "--parallel.schedule", "dualpipe-v"),
    ("--parallel.pp", "2", "--parallel.schedule", "interleaved", "--parallel.tp", "2"),
)
ROUNDING = 2e-5  # of losses in fp32: 4 layers and 4 steps apart, some hundred roundings of 6e-8


def story(folder) -> dict[tuple[int, str], float]:
    rows = run_folder.rows(folder)
    return {
        (row["step"], key): row[key]
        for row in rows
        for key in ("loss", "grad_norm", "lr", "val_loss")
        if key in row
    }


@pytest.fixture(scope="module")
def alone(tmp_path_factory):
    """The folder with the data, the arguments, and what one process tells."""
    home = tmp_path_factory.mktemp("defaults")
    args = [*ARGS, "--data.path", corpus(home), "--log.dir", str(home)]
    end = job(home, 1, [*args, "--log.name", "alone"])
    assert end.codes == [0], end.logs
    return home, args, story(home / "alone")


@pytest.mark.slow
@pytest.mark.parametrize("layout", SEVERAL, ids=" ".join)
def test_it_trains_as_one_process_does(alone, layout):
    home, args, want = alone
    end = job(home, 4, [*args, "--log.name", layout[3], *layout])
    assert end.codes == [0] * 4, end.logs
    got = story(home / layout[3])
    assert got.keys() == want.keys() and len(want) > 12
    for key, value in want.items():
        assert math.isclose(got[key], value, rel_tol=ROUNDING), key
    assert "eval 4" in end.logs[0]  # a sample was drawn
