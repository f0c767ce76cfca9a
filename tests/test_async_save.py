"""checkpoint.async_save on many ranks: the writers' exchanges never meet the step's, a killed writer costs
nothing that was committed, and an error of one writer ends the job at the next step, on every rank with the
same code.
"""


import pytest
import run_folder
from ranks import MODEL, corpus, job
from test_resume import leftovers

from checkpoint.disk import store

STEPS = 8
LAYOUTS = {
    "tp2": (2, ("--parallel.tp", "2")),
    "pp2 dp2 zero3": (4, ("--parallel.pp", "2", "--parallel.zero", "3")),
}


@pytest.fixture(scope="module")
def args(tmp_path_factory):
    home = tmp_path_factory.mktemp("async")
    return [
        "llama3-tiny", *MODEL, "--data.path", corpus(home), "--train.steps", str(STEPS),
        "--checkpoint.every", "2", "--optim.decay", "constant",
    ]


def run(folder, args, layout, sync=False, **how):
    world, words = LAYOUTS[layout]
    more = () if sync else ("--checkpoint.async_save", "true")
    return job(folder, world, [*args, *words, *more, "--log.dir", str(folder), "--log.name", "run"], **how)


def weights(folder) -> dict[str, str]:
    index = store.read_index(store.newest_checkpoint(folder / "run" / "checkpoints", []))
    assert index["step"] == STEPS
    return {f"{piece['start']}{piece['checksum']}": piece["key"] for piece in index["pieces"]}


def losses(folder) -> dict[int, float]:
    return run_folder.losses(folder / "run")


@pytest.fixture(scope="module")
def clean(tmp_path_factory, args):
    """{layout: (weights, losses)} of runs that saved in the step."""
    done = {}

    def of(layout):
        if layout not in done:
            folder = tmp_path_factory.mktemp("clean")
            assert not any(run(folder, args, layout, sync=True).codes)
            done[layout] = weights(folder), losses(folder)
        return done[layout]

    return of


@pytest.mark.slow
@pytest.mark.parametrize("layout", LAYOUTS)
def test_training_continues_while_the_writers_agree(tmp_path, args, clean, layout):
    fault = "ckpt.pre_rename:rank=0:act=sleep=0.4; ckpt.pre_write:rank=1:act=sleep=0.5"
    end = run(tmp_path, args, layout, fault=fault)
    assert not any(end.codes), end.logs
    assert (weights(tmp_path), losses(tmp_path)) == clean(layout)
    log = end.logs[0].splitlines()
    commits = [i for i, line in enumerate(log) if line.startswith("fault ckpt.pre_rename")]
    steps = {int(line.split("/")[0]): i for i, line in enumerate(log) if line.split("/")[0].strip().isdigit()}
    # the step after a save ran before its commit
    assert any(steps[2 * n + 3] < commit for n, commit in enumerate(commits[:3])), log


@pytest.mark.slow
@pytest.mark.parametrize(
    "layout, point, rank",
    [
        ("tp2", "pre_write", 1), ("tp2", "mid_shard", 0), ("tp2", "mid_shard", 1),
        ("tp2", "post_shard", 1), ("tp2", "pre_index", 0), ("tp2", "pre_rename", 0),
        ("tp2", "post_rename", 0), ("tp2", "mid_latest", 0),
        ("pp2 dp2 zero3", "mid_shard", 3), ("pp2 dp2 zero3", "pre_rename", 0),
    ],
)
def test_a_killed_writer_costs_nothing_that_was_committed(tmp_path, args, clean, layout, point, rank):
    end = run(tmp_path, args, layout, fault=f"ckpt.{point}:rank={rank}:act=SIGKILL")
    assert end.codes[rank] == -9 and all(code for code in end.codes) and end.seconds < 30, end.logs
    assert not any(run(tmp_path, args, layout).codes)
    assert (weights(tmp_path), losses(tmp_path)) == clean(layout)
    assert not leftovers(tmp_path / "run")


@pytest.mark.slow
@pytest.mark.parametrize("rank, excused", [(0, 0), (1, 0), (1, 1)])
def test_an_error_of_one_writer_ends_the_job_on_every_rank(tmp_path, args, rank, excused):
    """The first, or where one is excused the second."""
    failed_saves = ("--checkpoint.failed_saves", str(excused))
    args = [*args, "--train.steps", "300", "--checkpoint.every", "60", *failed_saves]
    end = run(tmp_path, args, "tp2", fault=f"ckpt.mid_shard:rank={rank}:act=ENOSPC")
    assert end.codes == [82, 82], end.logs
    assert end.errors() and all("ENOSPC" in line for line in end.errors())
    first, after = 60 * (1 + excused), 60 * (2 + excused)
    assert first <= max(losses(tmp_path)) < after  # not with the next save
    assert end.logs[0].count("warning: a checkpoint was not saved") == excused
