"""checkpoint.memory_every and replicas: train.py on ranks whose nodes are names, killed and started again.

What is compared is an uninterrupted run: losses and weights, bit for bit. A node is lost by removing its
folder in memory.
"""

import errno
import fnmatch
import hashlib
import itertools
import json
import os
import random
import shutil
import signal
import socket
import stat
from collections import Counter

import pytest
import run_folder
import test_spikes as spikes
import torch
from ranks import MODEL, job, write_documents
from run_folder import flip_bit
from waiting import wait_until

import train
from checkpoint import state
from checkpoint.disk import store
from checkpoint.disk.files import TORCH, raw_bytes
from durable import consolidate, copies, memory
from durable.memory import Nodes
from parallel.sharding.boxes import Box, from_rows, to_rows

MIXTURE = "--model.mlp experts --model.mlp.experts 4 --model.mlp.top_k 2 --model.mlp.router.bias_rate 0.001"
STEPS = 9
EVERY = ("--checkpoint.every", "6", "--checkpoint.memory_every", "2")  # memory: 2, 4 and 8
LAYOUTS = {
    "alone": (1, ()),
    "dp2 zero0": (2, ()),
    "dp2 zero1": (2, ("--parallel.zero", "1")),
    "dp4 zero0": (4, ()),
    "dp4 zero3": (4, ("--parallel.zero", "3")),
    "cp2": (2, ("--parallel.cp", "2")),
    "ep2": (2, ("--parallel.ep", "2", "--parallel.zero", "1")),
    "pp2": (2, ("--parallel.pp", "2")),
    "tp2 pp2": (4, ("--parallel.tp", "2", "--parallel.pp", "2")),
}


def to_arguments(layout, prefix, home, name):
    """(number of ranks, arguments of train.py)"""
    world, words = LAYOUTS[layout]
    args = ["llama3-tiny", *MODEL, "--data.path", prefix, "--train.steps", str(STEPS), *words]
    return world, [*args, "--model.dropout", "0.1", "--log.dir", str(home), "--log.name", name]


def on_nodes(world, nodes=2):
    """before(rank) of a job: the ranks lie on this many nodes, in order."""

    def before(rank):
        size = max(1, world // nodes)
        host = f"node{rank // size}"
        os.environ.update(LOCAL_RANK=str(rank % size), LOCAL_WORLD_SIZE=str(size))
        socket.gethostname = lambda: host

    return before


@pytest.fixture
def trains(tmp_path, prefix):
    """trains(layout, *more, fault, name, before) -> what job() gives. Memory is a folder of the test."""
    shm = tmp_path / "shm"
    shm.mkdir()

    def run(layout, *more, fault="", name="run", before=None, replicas="1", keeps=True):
        world, args = to_arguments(layout, prefix, tmp_path, name)
        if keeps:
            args += [*EVERY, "--checkpoint.memory_dir", str(shm), "--checkpoint.replicas", replicas, *more]
        else:  # then the keys of memory are refused, and memory.json tells where it is
            args += [*EVERY[:2], *more]
        return job(tmp_path / name, world, args, fault=fault, before=before or on_nodes(world))

    return run


@pytest.fixture(scope="module")
def clean(tmp_path_factory, prefix):
    """clean(layout) -> (losses, weights) of the run that nothing interrupts and that keeps none in memory."""
    done = {}

    def of(layout):
        if layout not in done:
            home = tmp_path_factory.mktemp("clean")
            end = job(home, *to_arguments(layout, prefix, home, "run"))
            assert not any(end.codes), end.logs
            done[layout] = losses(home / "run"), weights(home / "run")
        return done[layout]

    return of


def losses(folder):
    found = [(row["step"], row["loss"], row["grad_norm"]) for row in run_folder.steps(folder)]
    assert [step for step, *_ in found] == list(range(1, STEPS + 1))  # each once
    return found


def first_steps(tmp_path):
    """The first step of each start of the run."""
    return [start["first_step"] for start in run_folder.starts(tmp_path / "run")]


def weights(folder):
    path = store.newest_checkpoint(folder / "checkpoints", [])
    index = store.read_index(path)
    assert index["step"] == STEPS
    return Counter((piece["key"], tuple(piece["start"]), piece["checksum"]) for piece in index["pieces"])


def said(end, words):
    """The lines of rank 0's log with these words."""
    return [line for line in end.logs[0].splitlines() if words in line]


def node_folder(tmp_path, node):
    (found,) = (tmp_path / "shm").glob(f"bevatron-*/*/node{node}")
    return found


def killed(trains, layout, step, *more, point="step.backward", rank=1, **how):
    end = trains(layout, *more, fault=f"{point}:rank={rank}:step={step}:act=SIGKILL", **how)
    assert end.codes[rank] == -9 and all(end.codes), end.logs


def assert_like_clean(tmp_path, end, truth, name="run"):
    assert not any(end.codes), end.logs
    assert (losses(tmp_path / name), weights(tmp_path / name)) == truth
    assert list((tmp_path / "shm").iterdir()) == []  # the memory is given back
    assert not (tmp_path / name / "memory.json").exists()


@pytest.mark.slow
@pytest.mark.parametrize("layout", ["dp2 zero0", "dp2 zero1", "dp4 zero3", "tp2 pp2"])
def test_a_run_resumes_from_memory_after_a_killed_rank_and_a_lost_node(tmp_path, trains, clean, layout):
    """First a rank alone is lost, before there is anything on the disk; then a whole node, after a save."""
    killed(trains, layout, 6)
    assert not (tmp_path / "run" / "checkpoints").exists()
    killed(trains, layout, 9, rank=0)  # resumed at 4
    assert first_steps(tmp_path) == [1, 5]
    shutil.rmtree(node_folder(tmp_path, 1))
    end = trains(layout)
    (line,) = said(end, "resumed from")
    sent = "rank 1" if len(end.codes) == 2 else "ranks 2, 3"
    assert f"resumed from memory of node0, node1 ({sent}: sent by another node) at step 8" in line
    assert_like_clean(tmp_path, end, clean(layout))


@pytest.mark.slow
@pytest.mark.parametrize(
    "words",
    [f"{MIXTURE} --parallel.ep 2 --train.ema 0.9", "--parallel.compress powersgd --train.dtype bf16"],
    ids=["mixture", "powersgd"],
)
def test_memory_has_all_that_a_checkpoint_holds(tmp_path, trains, words):
    """Compared with a run that saves as often: PowerSGD sums its errors at each save."""
    more = words.split()
    assert not any(trains("dp2 zero0", *more, name="clean").codes)
    truth = losses(tmp_path / "clean"), weights(tmp_path / "clean")
    killed(trains, "dp2 zero0", 6, *more)
    shutil.rmtree(node_folder(tmp_path, 0))
    end = trains("dp2 zero0", *more)
    assert said(end, "(rank 0: sent by another node) at step 4"), end.logs
    assert_like_clean(tmp_path, end, truth)


LATER_LENGTH = '[{"after_steps": 3, "train.seq_len": 32, "model.mixer.rope.base": 2e5}]'


@pytest.mark.slow
@pytest.mark.parametrize(
    "layout, more",
    [
        ("dp2 zero1", ("--train.phases", LATER_LENGTH, "--checkpoint.async_save", "true")),
        # of three buckets and four replicas, rank 1 reads none: it must still know that there is an average
        ("dp4 zero0", ("--model.layers", "1", "--train.ema", "0.9", "--parallel.timeout_s", "20")),
    ],
    ids=["in a later phase beside saves in the background", "with a rank whose shard is empty"],
)
def test_a_resume_from_memory(tmp_path, trains, layout, more):
    assert not any(trains(layout, *more, name="clean").codes)
    truth = losses(tmp_path / "clean"), weights(tmp_path / "clean")
    killed(trains, layout, 6, *more)
    if layout == "dp4 zero0":
        assert not list((tmp_path / "shm").rglob("rank_00001/*.safetensors"))
        assert list((tmp_path / "shm").rglob("rank_00002/*.safetensors"))
    end = trains(layout, *more)
    assert said(end, "resumed from memory of node0, node1 at step 4"), end.logs
    assert_like_clean(tmp_path, end, truth)


BEGUN = "- after_steps: 3\n  parallel.zero: {}\n"
LATER = "- after_steps: {}\n  parallel.zero: 1\n"


@pytest.mark.slow(core=["of the next step"])
@pytest.mark.parametrize(
    "before, after, why",
    [
        (BEGUN.format(1), BEGUN.format(0), "parallel.zero 1, not 0"),
        (LATER.format(5), LATER.format(4), "parallel.zero 0, not 1"),
        (LATER.format(5), LATER.format(7), None),
    ],
    ids=["of the phase", "of the next step", "of a later phase"],
)
def test_the_layout_of_its_phase_decides_how_memory_is_used(tmp_path, trains, before, after, why):
    """The phase in which memory was written, and that in which the run continues."""
    phases = tmp_path / "phases.yaml"
    phases.write_text(before)
    more = ("--train.phases", str(phases))
    killed(trains, "dp2 zero0", 5, *more)
    phases.write_text(after)
    end = trains("dp2 zero0", *more)
    assert not any(end.codes), end.logs
    moved = said(end, "the checkpoint of step 4 in memory was written to ")
    assert [line.split("it was saved with ")[1] for line in moved] == ([why] if why else [])
    assert said(end, "at step 4")
    assert bool(said(end, "resumed from memory of node0, node1 at step 4")) == (why is None)
    assert losses(tmp_path / "run")


CHANGES = {  # of keys that change nothing of what a rank holds: (layout, both times, before, after)
    "recompute": ("dp2 zero1", "", "", "--parallel.recompute full"),
    "recompute_parts": (
        "dp2 zero1", "--parallel.recompute selective", "", "--parallel.recompute_parts core,norm,act"
    ),
    "recompute_stages": ("tp2 pp2", "", "", "--parallel.recompute_stages full,none"),
    "async_tp": ("tp2 pp2", "--parallel.sp true", "", "--parallel.async_tp true"),
    "cp_kind": ("cp2", "", "", "--parallel.cp_kind ulysses"),
    "ep_chunks": ("dp2 zero1", f"{MIXTURE} --parallel.ep 2", "", "--parallel.ep_chunks 2"),
    "ep_bound": ("dp2 zero1", f"{MIXTURE} --parallel.ep 2", "", "--parallel.ep_bound 1.25"),
    "compress_tokens": (
        "dp2 zero1", f"{MIXTURE} --parallel.ep 2", "", "--parallel.compress_tokens fp8"
    ),
    "offload": ("dp2 zero1", "--train.ema 0.9", "--parallel.offload both", "--parallel.offload none"),
    "timeout_s": ("dp2 zero0", "", "", "--parallel.timeout_s 200"),
    "elastic": ("dp2 zero0", "", "", "--parallel.elastic true"),
}


def test_each_key_that_changes_nothing_is_tried():
    assert sorted(CHANGES) == sorted(memory.NOT_LAYOUT)


def digest_of(run):
    """A digest of every byte of the state that this rank owns."""
    boxes = state.state_boxes(run.buckets, state.get_moments(run)) + run.routers.boxes()
    rows = [(str(box), hashlib.sha256(raw_bytes(tensor)).hexdigest()) for box, tensor in boxes]
    return hashlib.sha256(json.dumps(sorted(rows)).encode()).hexdigest()


@pytest.mark.slow
@pytest.mark.parametrize("key", CHANGES)
def test_a_key_that_changes_nothing_of_what_a_rank_holds(tmp_path, trains, key):
    """The newest state in memory stays of use, and each rank has of it bit for bit what was saved."""
    layout, both, first, then = CHANGES[key]
    world = LAYOUTS[layout][0]

    def noting(rank):
        on_nodes(world)(rank)
        describe, load = state.describe_run, state.load

        def described(run, step):
            (tmp_path / f"saved.{step}.{rank}").write_text(digest_of(run))
            return describe(run, step)

        def loaded(run, *more):
            notes = load(run, *more)
            (tmp_path / f"loaded.{rank}").write_text(digest_of(run))
            return notes

        state.describe_run, state.load = described, loaded

    killed(trains, layout, 9, *both.split(), *first.split(), before=noting)
    end = trains(layout, *both.split(), *then.split(), before=noting)
    assert not any(end.codes), end.logs
    assert said(end, "resumed from memory of node0, node1 at step 8"), end.logs
    for rank in range(world):
        saved, loaded = tmp_path / f"saved.8.{rank}", tmp_path / f"loaded.{rank}"
        assert saved.read_text() == loaded.read_text()


@pytest.mark.slow
def test_a_run_that_has_lost_both_nodes_resumes_from_the_disk(tmp_path, trains, clean):
    killed(trains, "dp2 zero1", 9)
    for node in (0, 1):
        shutil.rmtree(node_folder(tmp_path, node))
    end = trains("dp2 zero1")
    (line,) = said(end, "is not used")
    assert "step 8 in memory" in line and "no other node has a good copy" in line
    assert said(end, "step_00000006 at step 6")
    assert_like_clean(tmp_path, end, clean("dp2 zero1"))


@pytest.mark.slow
@pytest.mark.parametrize("point", memory.FAULT_POINTS)
def test_a_kill_in_a_save_leaves_the_generation_that_is_named(tmp_path, trains, clean, point):
    """The generation before counts, until the new one is named."""
    killed(trains, "dp2 zero1", 4, point=point, rank=0)
    end = trains("dp2 zero1")
    assert said(end, f"at step {4 if point == 'memory.post_commit' else 2}")
    assert_like_clean(tmp_path, end, clean("dp2 zero1"))


@pytest.mark.slow
def test_a_damaged_shard_is_replaced_by_its_copy_or_given_up(tmp_path, trains, clean):
    """In a rank's own shard: the copy is used. That is a sound one of another step: the generation before."""
    killed(trains, "dp2 zero1", 5)
    (own,) = node_folder(tmp_path, 1).glob("step_00000004-*/rank_00001/*.safetensors")
    (copy,) = node_folder(tmp_path, 0).glob("step_00000004-*/rank_00001/*.safetensors")
    assert own.read_bytes() == copy.read_bytes()
    flip_bit(own)
    killed(trains, "dp2 zero1", 5)
    assert own.read_bytes() == copy.read_bytes()  # it was sent again
    flip_bit(own)
    (older,) = node_folder(tmp_path, 0).glob("step_00000002-*/rank_00001")
    shutil.rmtree(copy.parent)
    shutil.copytree(older, copy.parent)
    end = trains("dp2 zero1")
    (line,) = said(end, "is not used")
    assert "step 4 in memory" in line and "is not the one that memory.json names" in line
    assert said(end, "at step 2")
    assert_like_clean(tmp_path, end, clean("dp2 zero1"))


@pytest.mark.slow
def test_damage_that_only_the_load_meets_is_given_up_by_all_ranks(tmp_path, trains, clean):
    """The shard was sound when it was looked for. It is given up by all ranks, and not tried again."""
    def before(rank):
        on_nodes(2)(rank)
        start_load = store.start_load

        def damaged(source, *args, **how):
            if rank == 1 and "step_00000008" in str(source.path):
                raise store.IntegrityError("a bad cell of memory")
            return start_load(source, *args, **how)

        store.start_load = damaged

    killed(trains, "dp2 zero1", 9)
    end = trains("dp2 zero1", before=before)
    (line,) = said(end, "step 8 in memory is not used: ")
    assert "a bad cell of memory" in line
    assert said(end, "step_00000006 at step 6")
    assert_like_clean(tmp_path, end, clean("dp2 zero1"))


# ---- another layout ----------------------------------------------------------------------------------------

EXACT = ("--train.dtype", "fp64")
MOVES = {  # what a node's loss, or its user, makes of a layout: (before, after, more words)
    "a node is lost": ("dp2 zero1", "alone", ""),
    "two of four ranks are lost": ("dp4 zero3", "dp2 zero1", "--train.ema 0.9"),
    "more ranks": ("dp2 zero0", "dp4 zero3", ""),
    "another zero": ("dp2 zero1", "dp2 zero0", ""),
    "no pipeline": ("tp2 pp2", "dp2 zero1", ""),
    "a pipeline": ("alone", "tp2 pp2", ""),
    "tied embeddings on two stages": ("pp2", "alone", "--model.tied true"),
    "experts": ("ep2", "dp2 zero0", MIXTURE),
    "sums of errors": ("dp2 zero0", "dp4 zero0", "--parallel.compress powersgd"),
    "rounded states": ("dp2 zero1", "tp2 pp2", "--optim.states bf16"),
    "moments in 8 bits": ("dp2 zero1", "tp2 pp2", "--optim.states 8bit"),
    "matrices of Muon": ("tp2 pp2", "dp4 zero0", "--optim.name muon"),
    "rows of NorMuon": ("tp2 pp2", "dp4 zero3", "--optim.name normuon"),
    "bases of Dion": ("tp2 pp2", "dp4 zero3", "--optim.name dion"),
}
INEXACT = {"sums of errors", "rounded states", "moments in 8 bits"}  # another layout sums, or rounds, others


def tensors_of(checkpoint):
    """{key: the whole tensor}."""
    index = store.quick_check(checkpoint)
    wants = {}
    for key, pieces in index.by_key().items():
        shape = pieces[0].box.shape
        wants[key] = Box.whole(key, shape), torch.empty(shape, dtype=TORCH[pieces[0].dtype])
    store.load(index, wants.values())
    return {key: tensor for key, (_, tensor) in wants.items()}


def assert_same_state(found, expected):
    assert found.keys() == expected.keys()
    for key, tensor in found.items():
        assert torch.equal(tensor, expected[key]), key


@pytest.mark.slow
@pytest.mark.parametrize("move", MOVES)
def test_another_layout_continues_from_memory(tmp_path, trains, move):
    """The shards that the nodes have become a checkpoint on the disk: bit for bit the one that the layout
    before would have saved there. So nothing is trained twice.
    """
    first, then, words = MOVES[move]
    world = LAYOUTS[first][0]
    replicas = "1" if world > 1 else "0"
    more = words.split() if "rounded" in move else (*EXACT, *words.split())
    end = trains(first, *more, "--checkpoint.every", "8", name="clean", replicas=replicas)
    assert not any(end.codes), end.logs
    killed(trains, first, 9, *more, rank=world - 1, replicas=replicas)
    if world > 1:
        shutil.rmtree(node_folder(tmp_path, 1))  # its shard has a copy
    keeps = LAYOUTS[then][0] > 1  # alone there is no other node
    end = trains(then, *more, keeps=keeps)
    assert not any(end.codes), end.logs
    (line,) = said(end, "the checkpoint of step 8 in memory was written to ")
    assert "step_00000008: it was saved with " in line
    assert said(end, "step_00000008 at step 8")
    saved, expected = (tmp_path / run / "checkpoints" / "step_00000008" for run in ("run", "clean"))
    assert_same_state(tensors_of(saved), tensors_of(expected))
    assert store.read_meta(saved)["tokens"] == store.read_meta(expected)["tokens"]
    for found, row in zip(losses(tmp_path / "run"), losses(tmp_path / "clean"), strict=True):
        assert found == pytest.approx(row, rel=1e-2 if move in INEXACT else 1e-9)
    assert list((tmp_path / "shm").iterdir()) == []
    assert not (tmp_path / "run" / memory.RECORD).exists()


def lose_a_shard(tmp_path):
    shutil.rmtree(node_folder(tmp_path, 1))
    shutil.rmtree(next(node_folder(tmp_path, 0).glob("step_00000008-*/rank_00001")))


def flip_every_copy(tmp_path):
    for node in (0, 1):
        (shard,) = node_folder(tmp_path, node).glob("step_00000008-*/rank_00001/*.safetensors")
        flip_bit(shard)


def forge_a_shard(tmp_path):
    """A sound shard of another step."""
    for node in (0, 1):
        (older,) = node_folder(tmp_path, node).glob("step_00000004-*/rank_00001")
        (newer,) = node_folder(tmp_path, node).glob("step_00000008-*/rank_00001")
        shutil.rmtree(newer)
        shutil.copytree(older, newer)


@pytest.mark.slow
@pytest.mark.parametrize("damage", [lose_a_shard, flip_every_copy, forge_a_shard])
def test_without_a_shard_another_layout_takes_the_disk(tmp_path, trains, damage):
    killed(trains, "dp2 zero1", 9)
    damage(tmp_path)
    end = trains("dp2 zero0")
    assert not any(end.codes), end.logs
    (line,) = said(end, "is not used: it was saved with parallel.zero 1, not 0, and no node has a good shard")
    assert line.endswith(" of rank 1")
    assert said(end, "step_00000006 at step 6")
    assert losses(tmp_path / "run")


@pytest.mark.slow
@pytest.mark.parametrize("node, rank", [(0, 1), (1, 1), (0, 0)])
def test_another_layout_takes_the_good_copy_of_a_shard(tmp_path, trains, node, rank):
    """That of rank 0 has the record of the whole run beside its tensors."""
    killed(trains, "dp2 zero1", 9)
    (shard,) = node_folder(tmp_path, node).glob(f"step_00000008-*/rank_{rank:05d}/*.safetensors")
    flip_bit(shard)
    end = trains("dp2 zero0")
    assert said(end, "step_00000008 at step 8"), end.logs
    assert losses(tmp_path / "run")


def disturbed_move(disturb):
    """before(rank): the checkpoint of step 8 on the disk is disturbed."""

    def before(rank):
        on_nodes(2)(rank)
        commit = store.commit

        def disturbed(pending, *more):
            if pending.final.name == "step_00000008" and "checkpoints" in pending.final.parts:
                disturb()
            return commit(pending, *more)

        store.commit = disturbed

    return before


@pytest.mark.slow
def test_another_layout_on_a_full_disk_takes_what_is_there(tmp_path, trains):
    def fill():
        raise store.StorageError(tmp_path, 8, "no space left (ENOSPC)")

    killed(trains, "dp2 zero1", 9)
    end = trains("dp2 zero0", before=disturbed_move(fill))
    assert not any(end.codes), end.logs
    (line,) = said(end, "is not used")
    assert "it was saved with parallel.zero 1, not 0, and " in line and "ENOSPC" in line
    assert said(end, "step_00000006 at step 6")
    assert losses(tmp_path / "run")


@pytest.mark.slow
def test_another_layout_without_memory_to_read_the_shards_takes_the_disk(tmp_path, trains):
    def before(rank):
        on_nodes(2)(rank)
        memory.available_bytes = lambda: 1000

    killed(trains, "dp2 zero1", 9)
    end = trains("dp2 zero0", before=before)
    (line,) = said(end, "is not used")
    assert "a rank can take 1,000 bytes of memory to read them" in line
    assert said(end, "step_00000006 at step 6")


@pytest.mark.slow
def test_killed_while_memory_is_written_to_the_disk(tmp_path, trains):
    """The next start does it again."""
    killed(trains, "dp2 zero1", 9)
    end = trains("dp2 zero0", before=disturbed_move(lambda: os.kill(os.getpid(), signal.SIGKILL)))
    assert end.codes[0] == -9, end.logs
    end = trains("dp2 zero0")
    assert said(end, "step_00000008 at step 8"), end.logs
    assert losses(tmp_path / "run")
    assert not list((tmp_path / "run" / "checkpoints").glob("*.tmp-*"))


@pytest.mark.slow
@pytest.mark.parametrize("layout, stays", [("dp2 zero1", True), ("dp2 zero0", False)], ids=["same", "other"])
def test_a_start_that_keeps_none_in_memory_any_more(tmp_path, trains, clean, layout, stays):
    """A newer checkpoint that an earlier start kept there is used; then the memory is free. Under another
    layout it is so from the first step on: what was there is on the disk.
    """
    killed(trains, "dp2 zero1", 9)
    node = node_folder(tmp_path, 0)
    killed(trains, layout, 9, keeps=False)
    assert node.exists() == stays
    assert (tmp_path / "run" / "memory.json").exists() == stays
    assert first_steps(tmp_path) == [1, 9]
    end = trains(layout, keeps=False)
    assert bool(said(end, "resumed from memory of node0, node1 at step 8")) == stays
    assert bool(said(end, "step_00000008 at step 8")) != stays
    if stays:
        assert_like_clean(tmp_path, end, clean(layout))
    assert list((tmp_path / "shm").iterdir()) == []


@pytest.mark.slow
def test_a_start_with_another_memory_dir(tmp_path, trains, clean):
    """The checkpoint in the old folder is used, and sent where it is missing; then that memory is free."""
    other = tmp_path / "other"
    other.mkdir()
    killed(trains, "dp2 zero1", 6)
    shutil.rmtree(node_folder(tmp_path, 1))
    killed(trains, "dp2 zero1", 9, "--checkpoint.memory_dir", str(other))
    assert first_steps(tmp_path) == [1, 5]
    record = json.loads((tmp_path / "run" / "memory.json").read_text())
    assert [(row["step"], row["memory_dir"]) for row in record["generations"]] == [
        (8, str(other)), (4, str(tmp_path / "shm"))
    ]
    end = trains("dp2 zero1", "--checkpoint.memory_dir", str(other))
    assert said(end, "resumed from memory of node0, node1 at step 8")
    assert_like_clean(tmp_path, end, clean("dp2 zero1"))
    assert list(other.iterdir()) == []


@pytest.mark.slow
def test_a_node_that_comes_back_with_another_history_is_not_believed(tmp_path, trains, clean):
    """Its memory is complete, and of a later step than the disk has."""
    killed(trains, "dp2 zero1", 9)
    for node in (0, 1):
        shutil.move(node_folder(tmp_path, node), tmp_path / f"away{node}")
    killed(trains, "dp2 zero1", 7)  # continues from step 6 of the disk
    for node in (0, 1):
        assert not list(node_folder(tmp_path, node).glob("step_00000008-*"))
        shutil.copytree(tmp_path / f"away{node}", node_folder(tmp_path, node), dirs_exist_ok=True)
    end = trains("dp2 zero1")
    assert said(end, "step_00000006 at step 6")
    assert_like_clean(tmp_path, end, clean("dp2 zero1"))


@pytest.mark.slow
def test_a_checkpoint_that_is_removed_by_hand_takes_what_came_after_it_along(tmp_path, trains, clean):
    killed(trains, "dp2 zero1", 9)
    shutil.rmtree(tmp_path / "run" / "checkpoints" / "step_00000006")
    end = trains("dp2 zero1")
    (line,) = said(end, "is not used")
    assert "the older checkpoint of step 6 was removed" in line
    assert said(end, "at step 4")
    assert_like_clean(tmp_path, end, clean("dp2 zero1"))


def slow_to_save(run, waits_in, commits=True):
    """before(rank) of two ranks: the save of step 6, in the background, waits until memory has step 8: before
    it has made its folder (waits_in "save"), or before its rename ("commit"). Then rank 1 is killed; with
    commits, after that save.
    """
    def before(rank):
        on_nodes(2)(rank)
        save, commit, run_one_step = store.save, store.commit, train.run_one_step

        def wait_for_memory():
            wait_until(lambda: commits and '"step": 8' in (run / memory.RECORD).read_text())

        def late_save(root, step, *more, **options):
            if step == 6 and waits_in == "save":
                wait_for_memory()
            return save(root, step, *more, **options)

        def late_commit(pending, *more):
            if pending.final == run / "checkpoints" / "step_00000006" and waits_in == "commit":
                wait_for_memory()
            return commit(pending, *more)

        def killed_at_last(session, step):
            if step == 7 and waits_in == "commit":
                wait_until(lambda: list((run / "checkpoints").glob("step_00000006.tmp-*")))
            if rank == 1 and step == STEPS:
                wait_until(lambda: not commits or store.read_latest(run / "checkpoints") == "step_00000006")
                os.kill(os.getpid(), signal.SIGKILL)
            run_one_step(session, step)

        store.save, store.commit, train.run_one_step = late_save, late_commit, killed_at_last

    return before


@pytest.mark.slow
@pytest.mark.parametrize(
    "waits_in, commits, resumed",
    [("commit", True, 4), ("save", True, 4), ("commit", False, 8)],
    ids=["removed", "begun late and removed", "killed"],
)
def test_memory_goes_with_the_save_beside_it(tmp_path, trains, clean, waits_in, commits, resumed):
    """A checkpoint that was being written when memory was, and was committed after that, is removed by hand:
    memory goes with it. Where that save was killed, memory is all the newer.
    """
    run = tmp_path / "run"
    before = slow_to_save(run, waits_in, commits)
    end = trains("dp2 zero1", "--checkpoint.async_save", "true", before=before)
    assert end.codes[1] == -9, end.logs
    steps = [row["step"] for row in json.loads((run / memory.RECORD).read_text())["generations"]]
    assert steps == [8, 4] and (run / "checkpoints" / "step_00000006").exists() == commits
    shutil.rmtree(run / "checkpoints" / "step_00000006", ignore_errors=True)
    end = trains("dp2 zero1")
    lines = said(end, "the older checkpoint of step 6 was removed")
    assert len(lines) == commits
    assert said(end, f"resumed from memory of node0, node1 at step {resumed}")
    assert_like_clean(tmp_path, end, clean("dp2 zero1"))


@pytest.mark.slow
@pytest.mark.parametrize("every", ["6", "3"], ids=["none is good", "an older one is good"])
@pytest.mark.parametrize("file", ["index.json", "*.safetensors"])
def test_a_damaged_checkpoint_on_the_disk_hides_none_in_memory(tmp_path, trains, clean, every, file):
    """Memory has step 4, the disk 6, and with it 3. What a rank alone reads of it is found last."""
    more = ("--checkpoint.every", every)
    killed(trains, "dp2 zero1", 7, *more)
    newest = tmp_path / "run" / "checkpoints" / "step_00000006"
    flip_bit(max(newest.glob(file)))
    killed(trains, "dp2 zero1", 6, "--checkpoint.memory_every", "1", point="step.begin")  # after step 5
    shutil.rmtree(newest)  # a damaged checkpoint does not count as one that came before
    end = trains("dp2 zero1", *more)
    assert said(end, "resumed from memory of node0, node1 at step 5")
    assert first_steps(tmp_path) == [1, 5, 6]
    assert_like_clean(tmp_path, end, clean("dp2 zero1"))


@pytest.mark.slow
def test_what_is_damaged_on_the_disk_is_named(tmp_path, trains):
    killed(trains, "dp2 zero1", 7)
    flip_bit(tmp_path / "run" / "checkpoints" / "step_00000006" / "index.json")
    end = trains("dp2 zero1")
    assert not any(end.codes), end.logs
    assert said(end, "index.json: does not match its checksum")
    assert said(end, "resumed from memory of node0, node1 at step 4")


@pytest.mark.slow
def test_other_data_is_refused_without_a_path_in_memory(tmp_path, trains):
    """A shard of one rank gives no weights to another run."""
    killed(trains, "dp2 zero1", 5)
    other = write_documents(tmp_path / "other", ([98] * size for size in range(40, 100)))
    end = trains("dp2 zero1", "--data.path", other)
    assert 2 in end.codes, end.logs
    assert "the data of the checkpoint of step 4 in memory has fingerprint" in end.errors()[0]
    assert "--log.name OTHER --checkpoint.init_from CHECKPOINT" in end.errors()[0]
    assert str(tmp_path / "shm") not in end.errors()[0]


def refusing_bytes(rank):
    """Rank 1 can write nothing of what it is sent."""
    on_nodes(2)(rank)
    if rank == 1:
        copies.write_all = full_disk


def full_disk(fd, data):
    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


@pytest.mark.slow
@pytest.mark.parametrize(
    "fault, before, failed",
    [("memory.mid_shard:rank=1:step=4:act=ENOSPC", None, [4]), ("", refusing_bytes, [2, 4, 8])],
    ids=["own", "copy"],
)
def test_a_full_memory_is_a_warning(tmp_path, trains, clean, fault, before, failed):
    end = trains("dp2 zero1", fault=fault, before=before)
    lines = said(end, "is not kept in memory")
    assert [int(line.split("step ")[1].split()[0]) for line in lines] == failed, end.logs
    assert all("ENOSPC" in line for line in lines)
    assert_like_clean(tmp_path, end, clean("dp2 zero1"))


@pytest.mark.slow
def test_a_folder_that_somebody_removes_is_made_again(tmp_path, trains, clean):
    """Before the second of three saves."""
    def before(rank):
        on_nodes(2)(rank)
        save = memory.MemoryCheckpoints.save

        def after_removal(self, step, *args, **how):
            if step == 4:
                shutil.rmtree(self.folder)
            return save(self, step, *args, **how)

        memory.MemoryCheckpoints.save = after_removal

    killed(trains, "dp2 zero1", 6, before=before)
    end = trains("dp2 zero1")
    assert said(end, "resumed from memory of node0, node1 at step 4"), end.logs
    assert_like_clean(tmp_path, end, clean("dp2 zero1"))


@pytest.mark.slow
def test_a_run_that_goes_back_forgets_what_came_after(tmp_path, trains):
    """Spikes in the steps 8 and 9, after memory has step 6: back to step 4 of the disk."""
    def before(rank):
        spikes.watched(tmp_path / "run", bad=(7, 8))(rank)
        on_nodes(2)(rank)
        drop = memory.MemoryCheckpoints.drop_after

        def noted(self, step):
            drop(self, step)
            kept = [generation.step for generation in self.committed]
            with open(tmp_path / f"dropped.{rank}", "a") as file:
                file.write(json.dumps([step, kept, len(os.listdir(self.folder))]) + "\n")

        memory.MemoryCheckpoints.drop_after = noted

    more = (*spikes.REWIND, "--checkpoint.every", "4", "--checkpoint.memory_every", "3")
    end = trains("dp2 zero1", *more, before=before)
    assert not any(end.codes) and said(end, "rewound to the checkpoint of step 4"), end.logs
    for rank in (0, 1):
        lines = (tmp_path / f"dropped.{rank}").read_text().splitlines()
        assert list(map(json.loads, lines)) == [[0, [], 0], [4, [3], 1], [-1, [], 0]]


def test_one_process_keeps_its_own_shard(tmp_path, trains, clean):
    """Also where it is what is left of an elastic job."""
    killed(trains, "alone", 6, rank=0, replicas="0")
    end = trains("alone", "--parallel.elastic", "true", replicas="1")
    assert said(end, "resumed from memory of node0 at step 4")
    assert said(end, "checkpoint.replicas: 1, and this start has 0 other nodes")
    assert_like_clean(tmp_path, end, clean("alone"))


@pytest.mark.slow
def test_stopped_runs_give_the_memory_back_and_crashed_ones_do_not(tmp_path, trains):
    end = trains("dp2 zero1", fault="step.begin:rank=1:step=5:act=SIGTERM")
    assert end.codes == [75, 75], end.logs
    assert list((tmp_path / "shm").iterdir()) == [] and not (tmp_path / "run" / memory.RECORD).exists()
    killed(trains, "dp2 zero1", 9)
    assert (tmp_path / "run" / memory.RECORD).exists()
    for node in (0, 1):
        folder = node_folder(tmp_path, node)
        assert stat.S_IMODE(folder.stat().st_mode) == 0o700
        steps = sorted(path.name[:13] for path in folder.iterdir())
        assert steps == ["step_00000008"]  # and no second one: the others were before the stop


# ---- what is refused before the first step -----------------------------------------------------------------


def one_node(rank):
    return on_nodes(2, nodes=1)(rank)


def little_memory(rank):
    on_nodes(2)(rank)
    memory.free_bytes = lambda folder: 1000


def read_by_others(shm):
    (shm / f"bevatron-{os.geteuid()}").mkdir(0o755)


def file_in_the_way(shm):
    (shm / f"bevatron-{os.geteuid()}").touch(0o700)


def left_by_others(shm):
    """Folders of containers that had other names."""
    for host in ("node8", "node9"):
        memory.make_private(shm / f"bevatron-{os.geteuid()}", [memory.get_run_key(shm.parent / "run"), host])


def led_elsewhere(shm):
    (shm / "elsewhere").mkdir(0o700)
    (shm / f"bevatron-{os.geteuid()}").symlink_to(shm / "elsewhere")


@pytest.mark.slow(every=2)
@pytest.mark.parametrize(
    "before, prepare, words",
    [
        (None, shutil.rmtree, "checkpoint.memory_dir: * is not a folder on this node; give one"),
        (None, read_by_others, "checkpoint.memory_dir: * is not private to this user (mode 700)"),
        (None, led_elsewhere, "checkpoint.memory_dir: * is not private to this user (mode 700)"),
        (None, file_in_the_way, "checkpoint.memory_dir: * is not private to this user (mode 700)"),
        (one_node, lambda shm: None, "checkpoint.replicas: 1 is the * has 0 other nodes; leave it out"),
        (little_memory, lambda shm: None, "checkpoint.memory_dir: * can take 1,000 bytes, and 2 *; enlarge"),
        (little_memory, left_by_others, "checkpoint.memory_dir: *, remove */node8, */node9; else enlarge it"),
    ],
    ids=["missing", "readable", "link", "file", "one node", "too small", "leftovers"],
)
def test_memory_that_cannot_be_had_is_one_line(tmp_path, trains, before, prepare, words):
    prepare(tmp_path / "shm")
    end = trains("dp2 zero1", before=before)
    assert end.codes == [2, 2], end.logs
    assert fnmatch.fnmatch(end.errors()[0], f"error: {words}*"), end.errors()
    assert not (tmp_path / "run" / "metrics.jsonl").exists()


# ---- the shards --------------------------------------------------------------------------------------------


def test_copies_lie_on_the_next_nodes_of_the_ring():
    nodes = Nodes(("a", "a", "b", "b", "c"))  # the last node has one rank
    assert [nodes.keepers(rank, 1) for rank in range(5)] == [[2], [3], [4], [4], [0]]
    assert [nodes.keepers(rank, 2) for rank in range(5)] == [[2, 4], [3, 4], [4, 0], [4, 1], [0, 2]]
    assert nodes.keepers(3, 0) == []


def test_shards_that_several_nodes_have_are_read_by_ranks_in_turn():
    assert memory.assign_readers([[0, 1], [0, 1]]) == {0: 0, 1: 1}
    assert memory.assign_readers([[0, 1], [1]]) == {0: 0, 1: 1}
    assert memory.assign_readers([[], [0], [2]]) == {0: 1, 2: 2}  # nobody has shard 1


@pytest.mark.parametrize("seed", range(40))
def test_what_shards_have_together_is_taken_once(seed):
    """Shards may overlap: each element is taken from a shard that has it."""
    draw = random.Random(seed)
    owner = {}
    shards = {shard: [] for shard in range(draw.randint(1, 4))}
    for key in "abc":
        shape = (draw.randint(1, 6), draw.randint(1, 5))
        for boxes in shards.values():
            for _ in range(draw.randint(0, 2)):
                start = tuple(draw.randrange(size) for size in shape)
                size = tuple(draw.randint(0, end - first) for first, end in zip(start, shape))
                boxes.append(Box(key, shape, start, size))
    once = consolidate.assign_boxes_once(shards)
    for shard, boxes in once.items():
        for box in boxes:
            for at in elements(box):
                assert at not in owner
                owner[at] = shard
                assert any(at in set(elements(other)) for other in shards[shard])
    assert set(owner) == {at for boxes in shards.values() for box in boxes for at in elements(box)}
    rows = json.loads(json.dumps(to_rows(once[0])))
    assert from_rows(rows) == once[0]


def elements(box):
    ranges = [range(first, first + size) for first, size in zip(box.start, box.size)]
    return [(box.key, *at) for at in itertools.product(*ranges)]


GONE = object()


def test_a_record_reads_back_or_says_why_not(tmp_path):
    kept = [memory.MemoryGeneration(step, "ab" * 16, 6, {"ranks": 2}, ("0f" * 32,) * 2) for step in (8, 4)]
    memory.write_record(tmp_path, "run-1", kept)
    assert memory.read_record(tmp_path, "run-1") == (kept, None)
    found, why = memory.read_record(tmp_path, "run-2")
    assert found == [] and "another run folder" in str(why)

    sound = json.loads((tmp_path / memory.RECORD).read_text())
    for change in (
        {"version": 2},
        {"version": GONE},
        {"key": GONE},
        {"generations": None},
        {"generations": [{**sound["generations"][0], "save_id": "../" * 11}]},
        {"generations": [{**sound["generations"][0], "step": "8"}]},
        {"generations": [{**sound["generations"][0], "indexes": ["x"]}]},
        {"generations": [{"step": 8}]},
        {"generations": [{**sound["generations"][0], "saving_step": "6"}]},
        {"generations": [{**sound["generations"][0], "memory_dir": "shm"}]},
    ):
        changed = {**sound, **change}
        (tmp_path / memory.RECORD).write_text(json.dumps({k: v for k, v in changed.items() if v is not GONE}))
        found, why = memory.read_record(tmp_path, "run-1")
        assert found == [] and "is damaged" in str(why), change

    (tmp_path / f"{memory.RECORD}.tmp").write_text("half of a rec")  # of a writer that was killed
    memory.write_record(tmp_path, "run-1", [])
    assert memory.read_record(tmp_path, "run-1") == ([], None)
    assert list(tmp_path.iterdir()) == []


def test_nothing_but_files_of_a_checkpoint_is_sent_or_taken(tmp_path):
    (tmp_path / "from").mkdir()
    (tmp_path / "from" / "index.json").write_text("{}")
    assert copies.build_manifest(tmp_path / "from") == {"index.json": 2}
    (tmp_path / "from" / "meta.json").symlink_to("/etc/passwd")
    with pytest.raises(store.IntegrityError, match=r"meta\.json: not a regular file"):
        copies.build_manifest(tmp_path / "from")
    forged = copies.IncomingFolder(copies.Delivery(0, 1, {"../../.profile": 1 << 60}, tmp_path / "to"))
    assert "not a file of a checkpoint" in str(forged.error) and not (tmp_path / "to").exists()


def test_a_file_that_is_gone_holds_up_nobody(tmp_path):
    """Its sender gives the error back, and continues with its exchanges."""
    sent = copies.OutgoingFolder(copies.Delivery(0, 1, {"index.json": 3, "meta.json": 2}, tmp_path))
    chunks = [sent.next_chunk() for _ in range(3)]
    assert [None if chunk is None else chunk.tolist() for chunk in chunks] == [[0, 0, 0], [0, 0], None]
    assert "index.json" in str(sent.error)


def test_the_record_is_on_disk_when_it_counts(tmp_path, monkeypatch):
    """The file before the rename that names it, then the folder."""
    calls = []
    fsync, replace = os.fsync, os.replace

    def noted(fd):
        calls.append(os.path.basename(os.readlink(f"/proc/self/fd/{fd}")))
        fsync(fd)

    def renamed(source, target):
        calls.append("rename")
        replace(source, target)

    monkeypatch.setattr(os, "fsync", noted)
    monkeypatch.setattr(os, "replace", renamed)
    memory.write_record(tmp_path, "run-1", [memory.MemoryGeneration(4, "ab" * 16, -1, {"ranks": 1})])
    assert calls == ["memory.json.tmp", "rename", tmp_path.name]
    calls.clear()
    memory.write_record(tmp_path, "run-1", [])
    assert calls == [tmp_path.name]


def test_a_folder_that_inherits_its_group_is_private(tmp_path):
    (tmp_path / "shm").mkdir()
    (tmp_path / "shm").chmod(0o2755)
    for _ in range(2):
        made = memory.make_private(tmp_path / "shm" / "bevatron-1", ["run", "node0"])
        assert stat.S_IMODE(made.stat().st_mode) & 0o777 == 0o700


def test_a_folder_that_cannot_be_made_is_named(tmp_path):
    name = "x" * 300
    with pytest.raises(store.StorageError) as told:
        memory.make_private(tmp_path / "bevatron-1", ["run", name])
    path = tmp_path / "bevatron-1" / "run" / name
    assert str(told.value) == f"{path}: cannot read or write: File name too long (ENAMETOOLONG)"
