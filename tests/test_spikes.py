"""Spikes of the loss or the gradient norm: which step is one, that it changes nothing, on no rank, and that
a run that goes back reads the data that it should.
"""

import contextlib
import hashlib
import json
import resource
import statistics

import fake_wandb
import pytest
import run_folder
import torch
from ranks import MODEL, job
from run_folder import steps

import train
from checkpoint import state
from checkpoint.disk import store
from config import ConfigError
from config.reading import resolve
from config.reading.suggestions import check_rules
from config.schema import OptimConfig
from data.loader import BatchLoader
from durable.rewind import PersistentSpikes, SpikeRewinds
from optim.spikes import SpikeState, SpikeWindow
from parallel.sharding.bucket import wait_param_gathers
from parallel.wire.comm import Group
from runtime.metrics import MetricsLogger

STEPS = 12
SPIKES = ("--optim.spike_sigma", "20", "--optim.spike_window", "6")
REWIND = (*SPIKES, "--optim.spike_rewind", "2")
LAYOUTS = {
    "alone": (1, ""),
    "tp2": (2, "--parallel.tp 2"),
    "dp2 zero1": (2, "--parallel.zero 1"),
    "pp2": (2, "--parallel.pp 2"),
}


def digest(run):
    """A digest of all that a step may change: weights, masters, moments."""
    wait_param_gathers(run.buckets)
    flats = [bucket.weights.master for bucket in run.buckets]
    flats += [b.weights.full for b in run.buckets if b.weights.full is not None]
    flats += [flat for moments in state.get_moments(run).values() for flat in moments]
    found = hashlib.sha256()
    for flat in flats:
        found.update(flat.detach().contiguous().view(torch.uint8).numpy())
    return found.hexdigest()


def watched(folder, bad=(), follow=None):
    """before(rank) of a job: a line in ledger.RANK for each step.

    bad: steps of the data whose gradients are 1e4 times as large. follow: the steps of the data that the run
    is made to read, by its own steps.
    """

    def before(rank):
        one_step, read, finish = train.run_one_step, BatchLoader.microbatches, train.finish_grad_reductions
        current = {}

        def microbatches(loader, step):
            if loader.split != "train":
                return read(loader, step)
            if follow is not None:
                step = follow[step]
            current.update(step=step, samples=loader.sample_ids(step))
            return read(loader, step)

        def finish_grad_reductions(buckets, mesh):
            finish(buckets, mesh)
            if current["step"] in bad:
                for bucket in buckets:
                    bucket.grads.local.mul_(1e4)

        def run_one_step(session, step):
            old = digest(session.run)
            one_step(session, step)
            row = {"at": step, **current, "changed": digest(session.run) != old}
            with open(folder / f"ledger.{rank}", "a") as file:
                file.write(json.dumps(row) + "\n")

        train.run_one_step = run_one_step
        train.finish_grad_reductions = finish_grad_reductions
        BatchLoader.microbatches = microbatches

    return before


@pytest.fixture
def trains(tmp_path, prefix):
    """trains(name, layout, *more, fault, bad, follow, also) -> what job() gives.

    also: called in each rank, before it trains.
    """

    def run(name, layout, *more, fault="", bad=(), follow=None, also=lambda: None):
        world, words = LAYOUTS[layout]
        (tmp_path / name).mkdir(exist_ok=True)
        args = ["llama3-tiny", *MODEL, "--data.path", prefix, "--train.steps", str(STEPS), *words.split()]
        args += ["--log.dir", str(tmp_path), "--log.name", name, "--checkpoint.every", "4", *more]
        args += ["--model.dropout", "0.1", "--checkpoint.check_replicas", "1"]
        watch = watched(tmp_path / name, bad, follow)

        def before(rank):
            watch(rank)
            also()

        return job(tmp_path / name, world, args, fault=fault, before=before)

    return run


def ledger(folder, rank=0):
    return [json.loads(line) for line in (folder / f"ledger.{rank}").read_text().splitlines()]


def course(folder):
    """Step, loss, norm and flags of each step."""
    names = ("step", "loss", "grad_norm", "skipped", "spike")
    return [tuple(row.get(name) for name in names) for row in steps(folder)]


def saved(folder):
    """{key: sha256} of the last checkpoint, and its meta."""
    path = store.newest_checkpoint(folder / "checkpoints", [])
    index, meta = store.read_index(path), store.read_meta(path)
    return {piece["key"]: piece["checksum"] for piece in index["pieces"]}, meta


# ---- a step that is not applied ----------------------------------------------------------------------------


@pytest.mark.parametrize(
    "layout",
    [pytest.param(name, marks=() if name == "dp2 zero1" else pytest.mark.slow) for name in LAYOUTS],
)
def test_a_spike_changes_nothing_on_any_rank(tmp_path, trains, layout):
    """One rank alone has the large gradients; its part is in the norm of all."""
    world = LAYOUTS[layout][0]
    end = trains("r", layout, *SPIKES, fault=f"step.backward:rank={world - 1}:step=7:act=spike")
    assert end.codes == [0] * world, end.logs
    assert "spike at step 7: loss " in end.logs[0] and "not applied" in end.logs[0]
    assert [row["step"] for row in steps(tmp_path / "r") if row["spike"]] == [7]
    assert [row["step"] for row in steps(tmp_path / "r") if row["skipped"]] == [7]
    for rank in range(world):
        lines = ledger(tmp_path / "r", rank)
        assert [line["step"] for line in lines] == list(range(STEPS))  # the data moves on once
        assert [line["at"] for line in lines if not line["changed"]] == [7]
    assert len({sample for line in lines for sample in line["samples"]}) == 4 * STEPS

    # as a step that is not finite
    end = trains("nan", layout, fault=f"step.backward:rank={world - 1}:step=7:act=nan")
    assert end.codes == [0] * world, end.logs
    assert saved(tmp_path / "nan")[0] == saved(tmp_path / "r")[0]
    meta = saved(tmp_path / "r")[1]["spikes"]
    assert meta["count"] == STEPS - 1 and meta["in_a_row"] == meta["left_out"] == []
    losses = [row["loss"] for row in steps(tmp_path / "r") if not row["skipped"]]
    assert meta["losses"] == losses[-6:]


@pytest.mark.slow
@pytest.mark.parametrize("layout", ["alone", "pp2"])
def test_a_resume_in_the_middle_of_the_window(tmp_path, trains, layout):
    """Step 10 is judged by steps before the checkpoint of step 8: two after it would be too few."""
    world = LAYOUTS[layout][0]
    spike = "step.backward:step=10:act=spike"
    assert trains("whole", layout, *SPIKES, fault=spike).codes == [0] * world
    killed = trains("r", layout, *SPIKES, fault=f"{spike}; step.begin:step=10:act=SIGKILL")
    assert killed.codes == [-9] * world
    assert saved(tmp_path / "r")[1]["step"] == 8
    assert trains("r", layout, *SPIKES, fault=spike).codes == [0] * world
    assert course(tmp_path / "r") == course(tmp_path / "whole")
    assert [row["step"] for row in steps(tmp_path / "r") if row["spike"]] == [10]
    assert saved(tmp_path / "r")[0] == saved(tmp_path / "whole")[0]
    assert saved(tmp_path / "r")[1]["spikes"] == saved(tmp_path / "whole")[1]["spikes"]


@pytest.mark.slow
def test_as_many_spikes_as_the_window_end_the_run(tmp_path, trains):
    end = trains("r", "alone", *SPIKES, bad=range(4, 99))
    assert end.codes == [77] and "for 6 steps in a row" in end.errors()[0]
    assert saved(tmp_path / "r")[1]["spikes"]["in_a_row"] == [5, 6, 7, 8]
    end = trains("r", "alone", *SPIKES, bad=range(4, 99))  # it continues to count
    assert end.codes == [77] and [row["step"] for row in steps(tmp_path / "r")][-1] == 10


# ---- a run that goes back ----------------------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.parametrize("layout", list(LAYOUTS))
def test_a_run_goes_back_and_leaves_the_data_out(tmp_path, trains, layout):
    world, bad = LAYOUTS[layout][0], (6, 7)
    end = trains("r", layout, *REWIND, bad=bad)
    assert end.codes == [0] * world, end.logs
    assert "2 spikes in a row, steps 7, 8: rewinding" in end.logs[0]
    rewound = "rewound to the checkpoint of step 4; data steps skipped from now on"
    assert rewound in end.logs[0]
    follow = [0, 1, 2, 3, 4, 5, *range(8, 14)]
    for rank in range(world):
        lines = ledger(tmp_path / "r", rank)
        assert [line["at"] for line in lines] == [*range(1, 9), *range(5, 13)]
        assert [line["step"] for line in lines] == [*range(8), *follow[4:]]
        assert [line["at"] for line in lines if not line["changed"]] == [7, 8]
    assert [row["step"] for row in steps(tmp_path / "r")] == list(range(1, 13))
    assert not any(row["skipped"] for row in steps(tmp_path / "r"))
    assert saved(tmp_path / "r")[1]["spikes"]["left_out"] == [6, 7]
    report = run_folder.summary(tmp_path / "r")["goodput"]
    assert report["starts"] == 1 and report["lost_minutes"]["repeated_steps"] > 0

    # bit for bit a run that never read this data
    assert trains("clean", layout, follow=follow).codes == [0] * world
    assert saved(tmp_path / "clean")[0] == saved(tmp_path / "r")[0]

    if layout not in ("alone", "dp2 zero1"):
        return
    # killed on its way, before and after it goes back, and resumed
    assert trains("k", layout, *REWIND, bad=bad, fault="step.begin:step=8:act=SIGKILL").codes == [-9] * world
    assert trains("k", layout, *REWIND, bad=bad, fault="step.begin:step=10:act=SIGKILL").codes == [-9] * world
    assert saved(tmp_path / "k")[1]["step"] == 8
    assert trains("k", layout, *SPIKES, bad=bad).codes == [0] * world  # the list counts without the key, too
    assert saved(tmp_path / "k")[0] == saved(tmp_path / "r")[0]
    assert course(tmp_path / "k") == course(tmp_path / "r")


@pytest.mark.slow
def test_wandb_and_tensorboard_show_the_steps_that_were_trained_again(tmp_path, trains, monkeypatch):
    events = pytest.importorskip("tensorboard.backend.event_processing.event_accumulator")
    told = fake_wandb.install(tmp_path, monkeypatch)
    end = trains("r", "alone", *REWIND, "--log.wandb", "offline", "--log.tensorboard", "true", bad=(6, 7))
    assert end.codes == [0], end.logs
    losses = {row["step"]: row["loss"] for row in steps(tmp_path / "r")}

    # W&B keeps the steps that did not count too, and says that the run went back
    said = told()
    logged = [words[2] for words in said if words[0] == "log" and "train/loss" in words[2]]
    assert [values["step"] for values in logged] == [*range(1, 9), *range(5, 13)]
    assert {values["step"]: values["train/loss"] for values in logged} == losses  # the last ones
    assert not [words for words in said if words[0] == "dropped"]
    assert [words[1] for words in said if words[0] == "alert"][0].endswith("rewound to step 4")

    # TensorBoard shows each step once
    seen = events.EventAccumulator(str(tmp_path / "r" / "tensorboard"), size_guidance={"scalars": 0})
    seen.Reload()
    shown = [(event.step, event.value) for event in seen.Scalars("train/loss")]
    assert [step for step, _ in shown] == list(range(1, 13))
    assert dict(shown) == pytest.approx(losses)


@pytest.mark.slow
def test_saves_within_a_row_of_spikes_do_not_take_what_the_run_goes_back_to(tmp_path, trains):
    every = ("--checkpoint.every", "1", "--checkpoint.keep", "1")
    end = trains("r", "alone", *REWIND, *every, bad=(6, 7))
    assert end.codes == [0], end.logs
    assert "rewound to the checkpoint of step 6" in end.logs[0]
    assert saved(tmp_path / "r")[1]["spikes"]["left_out"] == [6, 7]


@pytest.mark.slow
def test_checkpoints_of_steps_that_are_trained_again_are_gone(tmp_path, trains):
    """A stop saves in the middle of the spikes; the next start goes back behind that checkpoint."""
    stop = "step.begin:step=7:act=SIGTERM"
    end = trains("r", "alone", *REWIND, "--checkpoint.keep_every", "7", bad=(6, 7), fault=stop)
    assert end.codes == [75], end.logs
    assert saved(tmp_path / "r")[1]["spikes"]["in_a_row"] == [7]
    end = trains("r", "alone", *REWIND, bad=(6, 7), fault="step.begin:step=6:act=SIGKILL")
    assert end.codes == [-9] and "rewinding" in end.logs[0]
    names = {path.name for path in (tmp_path / "r" / "checkpoints").iterdir()}
    assert names == {"step_00000004", "latest"}
    assert (tmp_path / "r" / "checkpoints" / "latest").read_text().strip() == "step_00000004"


@pytest.mark.slow
def test_a_damaged_checkpoint_is_passed_over(tmp_path, trains):
    """The one of step 8 cannot be read; the run goes back to that of step 4."""
    home = tmp_path / "r"
    assert trains("r", "alone", *REWIND, "--train.max_minutes", "1e-9").codes == [75]
    assert trains("r", "alone", *REWIND, bad=(9, 10), fault="step.begin:step=9:act=SIGKILL").codes == [-9]
    end = trains("r", "alone", *REWIND, bad=(9, 10), fault="step.begin:step=11:act=SIGKILL")
    assert end.codes == [-9]
    damaged = home / "checkpoints" / "step_00000008"

    shard = next(damaged.glob("*.safetensors"))
    shard.write_bytes(shard.read_bytes()[:-1])
    end = trains("r", "alone", *REWIND, bad=(9, 10))
    assert end.codes == [0], end.logs
    assert saved(home)[1]["spikes"]["left_out"] == [9, 10]


def test_a_run_that_goes_back_too_often_ends(tmp_path, trains):
    end = trains("r", "alone", *REWIND, "--optim.spike_rewinds", "2", bad=range(6, 99))
    assert end.codes == [77]
    assert "spikes at steps 7 to 8 again, after the run went back 2 times" in end.errors()[0]
    assert [line["step"] for line in ledger(tmp_path / "r")] == [*range(8), 4, 5, 8, 9, 4, 5, 10, 11]
    assert run_folder.saved_steps(tmp_path / "r") == [4]


@pytest.mark.slow
def test_a_run_without_a_checkpoint_to_go_back_to_ends(trains):
    end = trains("r", "alone", *REWIND, "--checkpoint.every", "none", bad=(6, 7))
    assert end.codes == [77] and "no good checkpoint precedes them" in end.errors()[0]


@contextlib.contextmanager
def full_disk():
    """No file may become longer than a byte."""
    old, most = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (1, most))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (old, most))


def is_full_when(name, damaged=None):
    """For `also`: the disk is full while this method of the logger runs.

    damaged: a run folder; before that, the line of step 2 in its metrics.jsonl is.
    """

    def patch():
        method = getattr(MetricsLogger, name)

        def on_a_full_disk(*args, **more):
            if damaged:
                path = damaged / "metrics.jsonl"
                lines = path.read_bytes().splitlines(keepends=True)
                assert b'"step": 2,' in lines[2]
                lines[2] = b"damaged\n"
                path.write_bytes(b"".join(lines))
                (damaged / "kept").write_bytes(path.read_bytes())
            with full_disk():
                return method(*args, **more)

        setattr(MetricsLogger, name, on_a_full_disk)

    return patch


@pytest.mark.slow
def test_a_run_that_goes_back_on_a_full_disk_has_each_step_once(tmp_path, trains):
    end = trains("r", "alone", *REWIND, bad=(6, 7), also=is_full_when("rewind"))
    assert end.codes == [0], end.logs
    assert "rewound to the checkpoint of step 4" in end.logs[0]
    assert [row["step"] for row in steps(tmp_path / "r")] == list(range(1, 13))


@pytest.mark.slow
@pytest.mark.parametrize("moment", ["rewind", "open_outputs"])
def test_lines_that_a_full_disk_keeps_end_the_run_and_none_is_lost(tmp_path, trains, moment):
    """A damaged line stands between good ones: the file must be rewritten, and cannot be. Where the run
    goes back, and at a resume."""
    home = tmp_path / "r"
    if moment == "open_outputs":
        killed = trains("r", "alone", *REWIND, bad=(6, 7), fault="step.begin:step=7:act=SIGKILL")
        assert killed.codes == [-9]

    end = trains("r", "alone", *REWIND, bad=(6, 7), also=is_full_when(moment, damaged=home))
    assert end.codes == [82], end.logs
    assert "metrics.jsonl" in end.errors()[0] and "(EFBIG)" in end.errors()[0]
    assert (home / "metrics.jsonl").read_bytes() == (home / "kept").read_bytes()
    assert trains("r", "alone", *REWIND, bad=(6, 7)).codes == [0]
    assert [row["step"] for row in steps(home)] == [1, *range(3, 13)]


# ---- the window --------------------------------------------------------------------------------------------


def window(size=6, sigma=3.0):
    return SpikeWindow(OptimConfig(spike_sigma=sigma, spike_window=size), torch.device("cpu"), Group("job"))


def accept(spikes, loss, norm=1.0, is_finite=True):
    loss, norm = torch.tensor([loss, norm], dtype=torch.float64)
    return bool(spikes.accept(loss, norm, torch.tensor(is_finite)))


def test_a_spike_is_what_the_window_says_by_hand():
    """Against Python's statistics, with a spike now and then."""
    spikes, applied = window(), []
    draws = torch.Generator().manual_seed(3)
    for step in range(60):
        loss, norm = (5 + torch.rand(2, generator=draws, dtype=torch.float64)).float().tolist()
        loss *= 1 + (step % 7 == 5)
        norm *= 1 + (step % 11 == 10)
        recent = applied[-6:]
        expected = True
        if len(recent) >= 3:
            limits = [statistics.mean(values) + 3 * statistics.stdev(values) for values in zip(*recent)]
            expected = loss <= limits[0] and norm <= limits[1]
        assert accept(spikes, loss, norm) == expected, step
        if expected:
            applied.append((loss, norm))
    assert 40 < len(applied) < 55
    assert spikes.state()["losses"] == [loss for loss, _ in applied[-6:]]
    assert spikes.state()["grad_norms"] == [norm for _, norm in applied[-6:]]


def test_what_is_not_finite_stays_out_of_the_window():
    spikes = window()
    for loss in (1.0, 1.1, 0.9, 1.0):
        assert accept(spikes, loss)
    assert not accept(spikes, float("nan"), is_finite=False)
    assert not accept(spikes, 1.0, float("inf"), is_finite=False)
    assert spikes.state()["losses"] == pytest.approx([1.0, 1.1, 0.9, 1.0]) and accept(spikes, 1.0)
    assert not accept(spikes, 2.0) and not accept(spikes, 1.0, 9.0)


def test_without_sigma_every_finite_step_is_applied():
    spikes = window(sigma=None)
    assert all(accept(spikes, loss) for loss in (1.0, 1.0, 1.0, 1.0, 1e9))
    assert not accept(spikes, 1.0, is_finite=False) and spikes.state()["count"] == 0


def test_a_window_continues_where_it_was():
    whole, values = window(), [1.0, 1.1, 0.9, 1.05, 0.95, 1.0, 1.2, 0.8, 1.3]
    for number, loss in enumerate(values):
        before = json.loads(json.dumps(whole.state()))
        resumed = window()
        resumed.load(before)
        assert torch.equal(resumed.values, whole.values) and resumed.count == whole.count
        accept(whole, loss, number * 1.0)
    for size in (3, 20):  # another size takes the newest
        other = window(size)
        other.load(whole.state())
        assert other.state()["losses"] == whole.state()["losses"][-size:]


def test_the_data_of_a_step():
    spikes = SpikeState(OptimConfig(), torch.device("cpu"), Group("job"))
    assert [spikes.data_step(step) for step in (1, 2, 9)] == [0, 1, 8]
    spikes.in_a_row = [3, 4]
    spikes.skip_data_steps(spikes.data_steps_to_skip())
    assert spikes.left_out == [2, 3] and spikes.in_a_row == []
    assert [spikes.data_step(step) for step in range(1, 6)] == [0, 1, 4, 5, 6]
    spikes.in_a_row = [2, 3]
    spikes.skip_data_steps(spikes.data_steps_to_skip())
    assert spikes.left_out == [1, 2, 3, 4]
    assert [spikes.data_step(step) for step in range(1, 4)] == [0, 5, 6]


def test_progress_resets_how_often_a_run_has_gone_back():
    cfg = OptimConfig(spike_sigma=6.0, spike_rewind=2, spike_rewinds=1)
    spikes, rewinds = SpikeState(cfg, torch.device("cpu"), Group("job")), SpikeRewinds(cfg)
    assert rewinds.find(spikes, [(5, True)]) is None
    assert rewinds.find(spikes, [(6, True)]) == 5
    spikes.in_a_row = []
    assert rewinds.find(spikes, [(6, False), (7, False), (8, True)]) is None  # beyond 6: progress
    assert rewinds.find(spikes, [(9, True)]) == 8
    spikes.in_a_row = []
    with pytest.raises(PersistentSpikes, match="went back 1 times"):
        rewinds.find(spikes, [(8, True), (9, True)])


# ---- keys --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("words", "key"), [
    ("--optim.spike_sigma 0", "optim.spike_sigma"),
    ("--optim.spike_sigma x", "optim.spike_sigma"),
    ("--optim.spike_sigma 6 --optim.spike_window 1", "optim.spike_window"),
    ("--optim.spike_rewind 2", "optim.spike_rewind"),
    ("--optim.spike_sigma 6 --optim.spike_rewind 0", "optim.spike_rewind"),
    ("--optim.spike_sigma 6 --optim.spike_window 4 --optim.spike_rewind 5", "optim.spike_rewind"),
    ("--optim.spike_sigma 6 --optim.spike_rewind 2 --optim.spike_rewinds 0", "optim.spike_rewinds"),
    ("--optim.spike_sigma 6 --optim.spike_rewind 2 --checkpoint.mirror file:///x", "optim.spike_rewind"),
    ("--optim.spike_sigma 6 --optim.spike_rewind 2 --train.global_batch 16 --train.ramp 8,8,99",
     "optim.spike_rewind"),
])
def test_keys_of_spikes_that_cannot_be_are_refused(words, key):
    with pytest.raises(ConfigError, match=f"^{key}: "):
        check_rules(resolve("llama3-tiny", None, ["--train.micro_batch", "8", *words.split()]))


def test_a_row_of_spikes_ends_where_nothing_is_judged():
    """Else one spike, long after a stretch without optim.spike_sigma, would go back before the row."""
    judging = OptimConfig(spike_sigma=6.0, spike_window=4, spike_rewind=3)
    spikes = SpikeState(judging, torch.device("cpu"), Group("job"))
    for step in (9, 10):
        spikes.count(step, True)
    plain = SpikeState(OptimConfig(spike_window=4), torch.device("cpu"), Group("job"))
    plain.load(spikes.state())
    later = SpikeState(judging, torch.device("cpu"), Group("job"))
    later.load(plain.state())
    assert SpikeRewinds(judging).find(later, [(500, True)]) is None
    assert later.in_a_row == [500]
