"""Steps that are computed again: what is sound passes and trains as it would without, the rank that computed
wrongly once is named and the run continues from its last checkpoint, and what repeats is skipped as usual.
"""

import json
import socket

import pytest
import run_folder
import torch
from program import settings, trained
from ranks import MODEL, job

import train
from checkpoint.disk import store
from config import ConfigError
from config.reading import resolve
from config.reading.suggestions import check_rules
from model.block import TransformerBlock
from parallel.wire.comm import Group
from parallel.wire.record import NumbersRecord, different
from parallel.wire.world import World

STEPS = 4
BAD = 3  # the step that is disturbed
EVERY = ("--train.rerun_every", "1")
SUSPECTS = ("--train.rerun_suspects", "true")
MOE = (
    "--model.mlp experts --model.mlp.experts 4 --model.mlp.top_k 2 --model.mlp.router.bias_rate 0.001 "
    "--model.mlp.router.aux.weight 0.01"
)
LAYOUTS = {  # (ranks, words)
    "alone": (1, "--train.micro_batch 2"),
    "fp16": (1, "--train.dtype fp16"),
    "dp2 zero0": (2, "--parallel.zero 0"),
    "dp2 zero1": (2, "--parallel.zero 1 --train.dtype bf16 --optim.states bf16"),
    "dp2 zero2": (2, "--parallel.zero 2 --log.noise_scale true"),
    "dp2 zero3": (2, "--parallel.zero 3 --model.tied true --eval.every 2"),
    "fp8": (
        2, "--parallel.zero 1 --train.dtype fp8 --train.fp8_keep 0 --model.hidden 64 --model.mlp.width 64"
    ),
    "int8": (2, "--parallel.zero 0 --parallel.compress int8"),
    "powersgd": (2, "--parallel.zero 0 --parallel.compress powersgd --parallel.powersgd_rank 2"),
    "ring": (2, "--parallel.zero 1 --parallel.reduce ring"),
    "tp2": (2, "--parallel.tp 2 --parallel.sp true --parallel.async_tp true"),
    "cp2": (2, "--parallel.cp 2 --parallel.zero 1"),
    "pp2": (2, "--parallel.pp 2 --model.tied true"),
    "zb": (2, "--parallel.pp 2 --parallel.schedule zb-h1"),
    "ep2": (2, f"{MOE} --model.mlp.router.aux.over global --model.mlp.router.jitter 0.1 --parallel.ep 2 "
    f"--parallel.zero 1"),
    "bound": (2, f"{MOE} --parallel.ep 2 --parallel.ep_bound 8 --parallel.zero 1"),
    "drops": (2, f"{MOE} --model.mlp.capacity.factor 1 --parallel.ep 2 --parallel.ep_chunks 2"),
}
CLEAN = ("tp2", "pp2", "dp2 zero1", "ep2")


@pytest.fixture
def trains(tmp_path, prefix):
    """trains(name, layout, *more, fault, before) -> what job() gives."""

    def run(name, layout, *more, fault="", before=lambda rank: None):
        world, words = LAYOUTS[layout]
        args = ["llama3-tiny", *MODEL, "--data.path", prefix, "--train.steps", str(STEPS)]
        args += ["--model.dropout", "0.1", "--checkpoint.every", "1", "--checkpoint.keep", "9"]
        args += ["--log.dir", str(tmp_path), "--log.name", name, *words.split(), *more]
        return job(tmp_path / name, world, args, fault=fault, before=before)

    return run


def rows(folder):
    lines = (folder / "metrics.jsonl").read_text().splitlines()
    names = ("step", "loss", "grad_norm", "skipped", "noise_scale", "val_loss", "expert_load_max")
    return [tuple(row.get(name) for name in names) for row in map(json.loads, lines)]


def saved(folder):
    """{step: {(key, start): sha256}} of the checkpoints."""
    found = {}
    for step, path in store.committed_checkpoints(folder / "checkpoints"):
        pieces = store.read_index(path)["pieces"]
        found[step] = {(piece["key"], str(piece["start"])): piece["checksum"] for piece in pieces}
    return found


# ---- sound ranks, and what repeats -------------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.parametrize("layout", list(LAYOUTS))
def test_a_run_is_what_it_is_without(tmp_path, trains, layout):
    """Steps without a fault, and one whose fault repeats: a NaN that each run of the step has."""
    world = LAYOUTS[layout][0]
    fault = f"step.compute:rank={world - 1}:step={BAD}:act=nan"
    without = trains("without", layout, fault=fault)
    end = trains("again", layout, *EVERY, *SUSPECTS, fault=fault)
    assert without.codes == end.codes == [0] * world, (without.logs, end.logs)
    assert rows(tmp_path / "again") == rows(tmp_path / "without")
    assert [row[0] for row in rows(tmp_path / "again") if row[3]] == [BAD]
    assert saved(tmp_path / "again") == saved(tmp_path / "without")
    assert list(saved(tmp_path / "again")) == [4, 3, 2, 1]

    told = [line for line in end.logs[0].splitlines() if "recomputed" in line]
    assert len(told) == 1 and f"step {BAD} is not finite or a spike" in told[0]
    assert end.logs[-1].count("fault step.compute") == 2  # each run had the fault
    assert without.logs[-1].count("fault step.compute") == 1


@pytest.mark.slow
def test_a_spike_that_repeats_is_skipped(tmp_path, trains):
    spikes = ("--optim.spike_sigma", "50", "--optim.spike_window", "2")
    end = trains("r", "dp2 zero0", *SUSPECTS, *spikes, fault=f"step.compute:step={BAD}:act=spike")
    assert end.codes == [0, 0], end.logs
    assert f"step {BAD} is not finite or a spike, and was recomputed" in end.logs[0]
    assert [row[0] for row in rows(tmp_path / "r") if row[3]] == [BAD]


def test_routers_count_each_token_once(tmp_path, prefix):
    """In each layer: the tokens of the step times the experts that each chooses, of the last run alone."""
    cfg = settings(prefix, *MOE.split(), *EVERY)
    made, counts = [], []

    def watch(point, step=None, **shown):
        if point == "run.built":
            made.append(shown["run"])
        if point == "step.end":
            counts.append(made[0].routers.stats[:, :cfg.model.mlp.experts].sum(1).tolist())

    assert trained(World(), cfg, str(tmp_path / "run"), watch) == 0
    assert counts == [[4 * 16 * 2] * 2] * 2  # two layers, two steps


def test_a_step_that_fails_leaves_no_record(tmp_path, prefix):
    """Else what ranks send after the failure would be recorded too."""
    world, seen = World(), []

    def watch(point, step=None, **_):
        if point == "step.backward":
            seen.append(world.activity.record)
            raise KeyError

    with pytest.raises(KeyError):
        trained(world, settings(prefix, *EVERY), str(tmp_path / "run"), watch)
    assert seen[0] is not None and world.activity.record is None


# ---- a rank that computes wrongly once ---------------------------------------------------------------------


def check_named(end, tmp_path, rank, *told):
    """All ranks end with 80, that rank alone is named, and nothing of the step is saved."""
    world = len(end.codes)
    assert end.codes == [80] * world, end.logs
    begins = f"step {BAD}, recomputed from the same state, gave different numbers: "
    assert end.errors() and all(begins in line for line in end.errors()), end.errors()
    texts = [line.partition(begins)[2] for line in end.errors()]
    assert len(set(texts)) == 1, texts
    assert texts[0].startswith(f"rank {rank} on {socket.gethostname()} computed wrongly, first in ")
    assert texts[0].count(" computed wrongly") == 1
    for words in (*told, "nothing of the step is applied or saved"):
        assert words in texts[0], texts
    assert list(saved(tmp_path / "r")) == [2, 1]
    reason = run_folder.exit_reason(tmp_path / "r")
    assert (reason["code"], reason["requeue"]) == (80, True)


@pytest.mark.slow
@pytest.mark.parametrize("layout", [name for name in LAYOUTS if LAYOUTS[name][0] == 2])
def test_a_gradient_that_is_wrong_once(tmp_path, trains, layout):
    fault = f"step.compute:rank=1:step={BAD}:times=1:act=bitflip"
    end = trains("r", layout, *EVERY, fault=fault)
    check_named(end, tmp_path, 1, "first in the gradient of ", "so the first was wrong")

    if layout in CLEAN:  # another start continues as if nothing had happened
        assert trains("r", layout, *EVERY).codes == [0, 0]
        assert trains("clean", layout).codes == [0, 0]
        assert rows(tmp_path / "r") == rows(tmp_path / "clean")
        assert saved(tmp_path / "r") == saved(tmp_path / "clean")


def wrong_block(rank, runs):
    """before(rank) of a job: on that rank the first block adds 1 to a number, in these runs of step BAD (the
    first is 1), a larger one each time.
    """

    def before(own_rank):
        if own_rank != rank:
            return
        forward, compute, one_step = TransformerBlock.forward, train.forward_backward, train.run_one_step
        now = {"step": 0, "run": 0, "is_done": True}

        def run_one_step(session, step):
            now.update(step=step, run=0)
            one_step(session, step)

        def forward_backward(*args):
            now["run"] += 1
            now["is_done"] = not (now["step"] == BAD and now["run"] in runs)
            return compute(*args)

        def wrong_forward(block, *args):
            y = forward(block, *args)
            if now["is_done"]:
                return y
            now["is_done"] = True
            first = y[0].clone()
            first[0, 0, 0] += now["run"]
            return (first, *y[1:])

        train.run_one_step, train.forward_backward = run_one_step, forward_backward
        TransformerBlock.forward = wrong_forward

    return before


@pytest.mark.slow
@pytest.mark.parametrize("layout, rank, first", [
    ("tp2", 0, "the input of "),
    ("tp2", 1, "the input of "),
    ("pp2", 0, "the input of send to rank 1 in group pp "),
    ("pp2", 1, "the input of send to rank 0 in group pp "),
    ("zb", 0, "the input of send to rank 1 in group pp "),
    ("cp2", 1, "the input of "),
    ("ep2", 0, "the input of "),
    ("dp2 zero1", 1, "the gradient of "),
])
def test_the_rank_is_told_from_those_that_got_its_numbers(tmp_path, trains, layout, rank, first):
    """A wrong activation reaches the other rank, whose numbers differ too."""
    end = trains("r", layout, *EVERY, before=wrong_block(rank, {1}))
    check_named(end, tmp_path, rank, f"first in {first}", "so the first was wrong")


@pytest.mark.slow
@pytest.mark.parametrize("runs, told", [
    ({2}, "a third run is like the first, so the second was wrong"),
    ({1, 2, 3}, "a third run is like neither"),
])
def test_a_third_run_tells_which_of_two_was_wrong(tmp_path, trains, runs, told):
    check_named(trains("r", "pp2", *EVERY, before=wrong_block(1, runs)), tmp_path, 1, told)


def test_one_process_is_named_too(tmp_path, trains):
    fault = f"step.compute:step={BAD}:times=1:act=bitflip"
    check_named(trains("r", "alone", *EVERY, fault=fault), tmp_path, 0, "first in the gradient of ")


@pytest.mark.slow
@pytest.mark.parametrize("action", ["nan", "spike"])
@pytest.mark.parametrize("point, first", [
    ("step.compute", "the gradient of "),
    ("step.backward", ", summed"),  # in the memory that the sum was written to
])
def test_a_suspect_step_is_cleared(tmp_path, trains, action, point, first):
    """Without rerun_every: the step is looked at because it would be skipped."""
    spikes = ("--optim.spike_sigma", "50", "--optim.spike_window", "2")
    fault = f"{point}:rank=1:step={BAD}:times=1:act={action}"
    end = trains("r", "dp2 zero1", *SUSPECTS, *spikes, fault=fault)
    check_named(end, tmp_path, 1, first, "so the first was wrong")


@pytest.mark.slow
def test_a_link_that_changes_what_it_carries(tmp_path, trains):
    def before(rank):
        if rank != 1:
            return
        note, compute, one_step = Group.record_received, train.forward_backward, train.run_one_step
        now = {"step": 0, "run": 0}

        def run_one_step(session, step):
            now.update(step=step, run=0)
            one_step(session, step)

        def forward_backward(*args):
            now["run"] += 1
            return compute(*args)

        def record_received(group, verb, x):
            if (now["step"], now["run"]) == (BAD, 1) and group.name == "pp" and verb.startswith("receive"):
                x.view(-1)[0] += 1
            note(group, verb, x)

        train.run_one_step, train.forward_backward = run_one_step, forward_backward
        Group.record_received = record_received

    end = trains("r", "pp2", *EVERY, before=before)
    assert end.codes == [80, 80], end.logs
    told = end.errors()[0]
    assert f"rank 1 on {socket.gethostname()} received different numbers, though all sent the same: " in told
    assert "first in the result of receive from rank 0 in group pp " in told


@pytest.mark.slow
def test_only_every_nth_step_is_run_again(tmp_path, trains):
    """A fault in another step is not seen: that is what the key costs less for."""
    fault = f"step.compute:rank=1:step={BAD}:times=1:act=bitflip"
    end = trains("r", "dp2 zero0", "--train.rerun_every", "2", fault=fault)
    assert end.codes == [0, 0], end.logs
    assert end.logs[1].count("fault step.compute") == 1


# ---- the record --------------------------------------------------------------------------------------------


def get_part_record(*values):
    record = NumbersRecord()
    for number, value in enumerate(values):
        add = record.add_received if number % 2 else record.add_own
        add(f"number {number}", torch.tensor([value, 2.0]))
    return record, record.digests(torch.device("cpu"))


def test_the_first_entry_that_differs():
    record, digests = get_part_record(1.0, 2.0, float("nan"))
    assert different(record, digests, get_part_record(1.0, 2.0, float("nan"))[1]) == []
    (found,) = different(record, digests, get_part_record(1.0, 2.5, float("nan"))[1])
    assert found.what == "number 1" and not found.is_own
    assert [entry.what for entry in different(record, digests, get_part_record(0.0, 2.0, 0.0)[1])] == [
        "number 0", "number 2",
    ]
    assert get_part_record(0.0)[1] != get_part_record(-0.0)[1]  # bits, not values
    assert [entry.what for entry in different(record, digests, get_part_record(1.0, 2.0)[1])] == ["number 2"]
    assert NumbersRecord().digests(torch.device("cpu")) == []


# ---- keys --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("words, key", [
    ("--train.rerun_every 0", "train.rerun_every"),
    ("--train.rerun_every 1.5", "train.rerun_every"),
    ("--train.rerun_every 2 --train.deterministic false", "train.rerun_every"),
    ("--train.rerun_suspects true --train.deterministic false", "train.rerun_suspects"),
    ("--train.rerun_suspects true --train.cuda_graphs true --train.device cuda", "train.rerun_suspects"),
    ("--train.rerun_every 2 --train.device mps", "train.rerun_every"),
])
def test_keys_of_reruns_that_cannot_be_are_refused(words, key):
    with pytest.raises(ConfigError, match=f"^{key}: "):
        check_rules(resolve("llama3-tiny", None, words.split()))
