"""A job that loses ranks continues with those that are left: the launcher's MIN:MAX and parallel.elastic, in
real processes. What it trains is what it would have trained: the same losses to 1e-9 in float64.
"""

import contextlib
import json
import os
import pathlib
import re
import signal
import subprocess
import sys
from typing import NamedTuple

import numpy as np
import pytest
import run_folder
from ranks import MODEL, corpus, job
from run_folder import losses
from waiting import wait_until

from checkpoint.disk import store
from config.reading import resolve
from data.loader import BatchLoader
from plan import elastic

ROOT = pathlib.Path(__file__).parent.parent
BOUND = 1e-9  # relative, in fp64
STEPS = 6


@pytest.fixture(scope="module")
def words(tmp_path_factory):
    home = tmp_path_factory.mktemp("elastic")
    return [
        "llama3-tiny", *MODEL, *("--data.path", corpus(home)), *("--train.steps", str(STEPS)),
        *("--train.dtype", "fp64"), *("--checkpoint.every", "2"), *("--checkpoint.keep", "9"),
    ]


@pytest.fixture(scope="module")
def truth(words, tmp_path_factory):
    """Losses of the run that nothing interrupts, in its own layout."""
    home = tmp_path_factory.mktemp("truth")
    end = job(home, 4, [*words, "--parallel.tp", "2", *folder(home)], before=noting_samples(home))
    assert end.codes == [0, 0, 0, 0], end.logs
    return Truth(losses(home / "run"), samples(home))


class Truth(NamedTuple):
    losses: dict
    samples: list


def folder(home):
    return ["--log.dir", str(home), "--log.name", "run"]


def assert_same(home, truth):
    found = losses(home / "run")
    assert list(found) == list(range(1, STEPS + 1))
    np.testing.assert_allclose(list(found.values()), list(truth.losses.values()), rtol=BOUND, atol=0)


def open_launcher(home, nproc, words, fault="", options=()):
    return subprocess.Popen(
        [sys.executable, "-m", "scripts.launch", "--nproc", nproc, *options, "--", *words, *folder(home)],
        cwd=ROOT,
        env={**os.environ, "OMP_NUM_THREADS": "1", "FAULT": fault},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


def launch(home, nproc, words, fault="", options=()):
    """(exit code, stdout, lines on stderr) of the launcher."""
    with open_launcher(home, nproc, words, fault, options) as launcher:
        try:
            out, errors = launcher.communicate(timeout=300)
        finally:
            launcher.kill()
    return launcher.returncode, out, errors.splitlines()


def noting_samples(home):
    """Makes each rank write the sequences that it trains on: step, index in the global batch, tokens."""

    def before(rank):
        read = BatchLoader.microbatches

        def noted(self, step):
            batches = read(self, step)
            if self.split == "train":
                with open(home / "samples", "a") as file:
                    for batch in batches:
                        for number, tokens in zip(batch.sequence_ids.tolist(), batch.tokens.tolist()):
                            file.write(json.dumps([step + 1, number, tokens]) + "\n")
            return batches

        BatchLoader.microbatches = noted

    return before


def samples(home):
    """[[step, index, tokens]] of all steps, in order, each once: ranks of tp read the same."""
    return sorted(map(json.loads, set((home / "samples").read_text().splitlines())))


def restart_lines(errors):
    return [line for line in errors if line.startswith("launch: restart ")]


def test_a_killed_rank_halves_the_data_parallel_axis(tmp_path, words, truth):
    """In the backward of step 4: the checkpoint of step 2 counts."""
    fault = "step.backward:rank=3:step=4:act=SIGKILL"
    code, out, errors = launch(tmp_path, "2:4", [*words, "--parallel.tp", "2"], fault)
    assert code == 0, (out, errors)
    change = "4 ranks (dp2 tp2) -> 2 ranks (tp2), without place 3 of this node"
    assert restart_lines(errors) == [f"launch: restart 1, from step 2: {change}"]
    ends = [line for line in errors if re.match(r"launch: \d ranks ended", line)]
    assert "4 ranks ended with code 1 after" in ends[0] and "rank 3 was ended by SIGKILL" in ends[0]
    assert "2 ranks ended with code 0 after" in ends[1] and len(ends) == 2
    assert "saved on 4 ranks (dp2 tp2), continues on 2 ranks (tp2)" in " ".join(out.split())
    assert_same(tmp_path, truth)
    assert run_folder.exit_reason(tmp_path / "run")["code"] == 0


@pytest.mark.slow
def test_a_killed_rank_takes_no_step_along_that_is_in_memory(tmp_path, words, truth):
    """The disk has step 3, the memory of the node the parts of four ranks of step 5."""
    (tmp_path / "shm").mkdir()
    saves = ("--checkpoint.every", "3", "--checkpoint.memory_every", "1")
    more = ("--parallel.tp", "2", *saves, "--checkpoint.memory_dir", str(tmp_path / "shm"))
    code, out, errors = launch(tmp_path, "2:4", [*words, *more], "step.backward:rank=3:step=6:act=SIGKILL")
    assert code == 0, (out, errors)
    change = "4 ranks (dp2 tp2) -> 2 ranks (tp2)"
    assert restart_lines(errors) == [
        f"launch: restart 1, from step 5 in memory, or else step 3: {change}, without place 3 of this node"
    ]
    said = " ".join(out.split())
    assert "the checkpoint of step 5 in memory was written to" in said
    assert "step_00000005 at step 5" in said
    assert_same(tmp_path, truth)
    assert list((tmp_path / "shm").iterdir()) == []


@pytest.mark.slow
def test_a_frozen_rank_is_left_out_too(tmp_path, words, truth):
    seconds = str(5 + 2 * os.getloadavg()[0] / (os.cpu_count() or 1))
    more = ["--parallel.timeout_s", seconds, "--train.micro_batch", "2"]
    code, out, errors = launch(tmp_path, "1:2", [*words, *more], "step.begin:rank=1:step=5:act=SIGSTOP")
    assert code == 0, (out, errors)
    assert restart_lines(errors) == [
        "launch: restart 1, from step 4: 2 ranks (dp2) -> 1 rank, without place 1 of this node"
    ]
    assert any("2 ranks ended with code 76" in line for line in errors)
    assert_same(tmp_path, truth)


@pytest.mark.slow
def test_a_restart_in_the_same_layout_continues_bit_for_bit(tmp_path, words):
    """A place that no other can stand in for is used again. Killed when the checkpoint of step 2 is there."""
    code, out, errors = launch(tmp_path, "1:1", words, "ckpt.pre_latest:step=2:act=SIGKILL")
    assert code == 0, (out, errors)
    assert restart_lines(errors) == ["launch: restart 1, from step 2: 1 rank -> 1 rank"]
    whole = tmp_path / "whole"
    assert job(whole, 1, [*words, *folder(whole)]).codes == [0]
    assert losses(tmp_path / "run") == losses(whole / "run")


# train.py as ranks start it; in places 1 and 3 the device multiplies wrongly
WRONG_DEVICE = """
import os, runpy, sys
sys.path.insert(0, ".")
from durable import probes

places = os.environ["CUDA_VISIBLE_DEVICES"].split(",")
sound = probes.known_product

def flipped(n, device, dtype):
    left, right, expected = sound(n, device, dtype)
    left[3, 5] += 1
    return left, right, expected

if places[int(os.environ["LOCAL_RANK"])] in ("1", "3"):
    probes.known_product = flipped
runpy.run_path("train.py", run_name="__main__")
"""
WITH_ANOTHER_FILE = "import sys; from durable import launcher; from scripts import launch; " \
    "launcher.TRAIN_FILE = sys.argv[1]; sys.exit(launch.main(sys.argv[2:]))"


@pytest.mark.slow
def test_places_whose_devices_multiply_wrongly_are_left_out(tmp_path, words, truth):
    """Both ranks may say so at the first start, or one at each; two sound places are enough."""
    file = tmp_path / "wrong.py"
    file.write_text(WRONG_DEVICE)
    options = ["--nproc", "1:4", "--spares", "0", "--", *words, *folder(tmp_path)]
    done = subprocess.run(
        [sys.executable, "-c", WITH_ANOTHER_FILE, str(file), *options], cwd=ROOT,
        env={**os.environ, "OMP_NUM_THREADS": "1"}, capture_output=True, text=True, timeout=300,
    )
    errors = done.stderr.splitlines()
    assert done.returncode == 0, (done.stdout, errors)
    assert any("multiplies wrongly" in line for line in errors if line.startswith("error: rank "))
    first, *second = restart_lines(errors)
    assert first.startswith("launch: restart 1, from the beginning: 4 ranks (dp4) -> 2 ranks (dp2)")
    assert len(second) <= 1
    wrong = r"place(s 1, 3| 1) of this node \(of place\1 the device computes wrongly\)"
    assert re.search(f"2 ranks \\(dp2\\), without {wrong}$", [first, *second][-1])
    assert_same(tmp_path, truth)


# train.py as ranks start it, on devices of a given size
SMALL_DEVICE = """
import runpy, sys
sys.path.insert(0, ".")
from durable import start_layout
from plan.elastic import RankDevice

start_layout.rank_device = lambda device: RankDevice("NVIDIA A100", {memory})
runpy.run_path("train.py", run_name="__main__")
"""


@pytest.mark.slow
def test_fewer_ranks_take_a_layout_that_fits_or_are_refused(tmp_path, words, truth):
    """Under ZeRO-3 two ranks hold more each than four: here a byte more than there is. A refusal comes before
    the first step."""
    more = [*words, "--parallel.zero", "3"]
    cfg = resolve(more[0], None, [*more[1:], "--parallel.elastic", "true"])
    card = elastic.RankDevice("NVIDIA A100")
    of_two, of_four = (elastic.memory_of_fullest_rank(cfg, world, card) for world in (2, 4))
    assert of_four < of_two - 1

    def run(home, nproc, memory):
        file = home / "small.py"
        file.write_text(SMALL_DEVICE.format(memory=memory))
        done = subprocess.run(
            [sys.executable, "-c", WITH_ANOTHER_FILE, str(file)]
            + ["--nproc", nproc, "--spares", "0", "--", *more, *folder(home)],
            cwd=ROOT,
            env={**os.environ, "OMP_NUM_THREADS": "1", "FAULT": "step.begin:rank=3:step=4:act=SIGKILL"},
            capture_output=True,
            text=True,
            timeout=300,
        )
        return done.returncode, " ".join(done.stdout.split()), done.stderr.splitlines()

    code, out, errors = run(tmp_path, "2:4", of_two - 1)
    assert code == 0, (out, errors)
    assert re.search(r"elastic: 2 ranks \(dp2\), the given axes, with --.*, because the given settings", out)
    assert "would take 2.3 GiB of a GPU by the planner" in out and out.count("elastic: ") == 1
    assert_same(tmp_path, truth)

    none = tmp_path / "none"
    none.mkdir()
    code, out, errors = run(none, "1:1", of_two // 2)
    said = [line for line in errors if line.startswith("error: ")]
    assert code == 2 and len(said) == 1 and not (none / "run" / "metrics.jsonl").exists(), (out, errors)
    assert "no layout on 1 rank fits into the " in said[0] and "start more ranks" in said[0]


def children(launcher):
    """{process: its command line and environment} of the launcher's children."""
    found = {}
    for pid in pathlib.Path(f"/proc/{launcher.pid}/task/{launcher.pid}/children").read_text().split():
        with contextlib.suppress(OSError):
            parts = [pathlib.Path(f"/proc/{pid}/{part}").read_text() for part in ("cmdline", "environ")]
            found[int(pid)] = "\0".join(parts)
    return found


def newest_step(home):
    with contextlib.suppress(OSError, ValueError, IndexError):
        return run_folder.rows(home / "run")[-1]["step"]
    return 0


@pytest.mark.slow
def test_spares_become_the_ranks_of_the_next_start(real_starts, tmp_path, words):
    """One that waited before the loss, and a new process; and another waits after it."""
    more = [*words, "--train.steps", "100000", "--checkpoint.every", "50", "--checkpoint.keep", "2"]
    more += ["--log.every", "10"]

    def spares():
        return {pid for pid, words in children(launcher).items() if "\0--spare\0" in words}

    with open_launcher(tmp_path, "2:2", more, options=("--spares", "1")) as launcher:
        try:
            assert wait_until(lambda: len(spares()) == 1, 120)
            assert wait_until(lambda: newest_step(tmp_path) > 100, 120)
            waited = spares()
            ranks = {words.partition("\0RANK=")[2][:1]: pid for pid, words in children(launcher).items()}
            os.kill(ranks["1"], signal.SIGKILL)
            assert wait_until(lambda: set(children(launcher)) >= waited and len(spares() - waited) == 1, 120)
            assert ranks["0"] not in children(launcher)
            launcher.send_signal(signal.SIGTERM)
            out, errors = launcher.communicate(timeout=60)
        finally:
            launcher.kill()
    assert launcher.returncode == 75, (out, errors)
    assert len(restart_lines(errors.splitlines())) == 1 and "2 ranks (dp2) -> 2 ranks (dp2)" in errors
    assert min(losses(tmp_path / "run")) == 1  # and each step once
    assert len(run_folder.starts(tmp_path / "run")) == 2


@pytest.mark.slow
def test_the_key_alone_lets_any_launcher_start_fewer_or_more_ranks(tmp_path, words, truth):
    """As torchrun does with --nnodes MIN:MAX. Four ranks have no sequence for a micro-batch of 2 each."""
    args = [*words, "--parallel.elastic", "true", "--train.micro_batch", "2", *folder(tmp_path)]
    for world, last in ((2, 2), (4, 4), (1, STEPS)):
        stop = "" if last == STEPS else f"step.begin:rank=0:step={last}:act=SIGTERM"
        end = job(tmp_path, world, args, fault=stop, before=noting_samples(tmp_path))
        assert end.codes == [75 if stop else 0] * world, end.logs
        assert ("with --train.micro_batch 1" in end.logs[0]) == (world == 4)
    assert_same(tmp_path, truth)
    assert samples(tmp_path) == truth.samples and len(truth.samples) == 4 * STEPS

    # a layout that the world is too small for, and one that there is none for
    (step, path), *_ = store.committed_checkpoints(tmp_path / "run" / "checkpoints")
    assert (step, store.read_meta(path)["layout"]["world"]) == (STEPS, 1)
    end = job(tmp_path, 1, [*args, "--parallel.tp", "4", "--parallel.pp", "2"])
    assert end.codes == [0] and "nothing was left to do" in end.logs[0], end.logs
    end = job(tmp_path, 3, [*args, "--parallel.tp", "2", "--log.name", "other"])
    (line,) = end.errors()
    assert "does not divide the world size 3; " in line and "start 2, 4 ranks" in line and 2 in end.codes
