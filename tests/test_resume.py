"""Killed at any moment, started again: the same losses bit for bit, the same weights, every sample once.

Each crash point of the step and of the checkpoint writer is armed in turn with SIGKILL in a real run of
train.py (forked from this warm process, so a run costs a second). The run that follows must continue as if
nothing had happened.
"""

import os
import pathlib
import shutil
import sys
import traceback
from collections.abc import Sequence

import pytest
import run_folder
from ranks import corpus
from run_folder import exit_reason, flip_bit, saved_steps

import start
import train
from checkpoint.disk import store

STEPS = 9
ARGS = (
    "llama3-tiny --model.layers 1 --model.hidden 32 --model.mixer.heads 4 --model.mixer.kv_heads 2 "
    f"--model.mlp.width 48 --model.dropout 0.1 --train.steps {STEPS} --train.seq_len 16 "
    "--train.micro_batch 2 --train.global_batch 4 --train.threads 1 --checkpoint.every 3 "
    "--checkpoint.keep 2 --eval.every 4 --eval.batches 1 --eval.sample 3 --log.every 2 --optim.warmup 2"
).split()


@pytest.fixture(scope="module")
def home(tmp_path_factory):
    """A folder with the tokenized corpus in it, and in `clean` the run that was never killed."""
    home = tmp_path_factory.mktemp("resume")
    assert run(home, "clean") == 0
    return home


def run(home: pathlib.Path, name: str, fault: str = "", extra: tuple = (), args: Sequence = ARGS) -> int:
    """train.py in a child -> its exit code, or minus the signal that killed it."""
    pid = os.fork()
    if pid == 0:
        code = 99
        try:
            os.environ["FAULT"] = fault
            out = os.open(home / f"{name}.log", os.O_WRONLY | os.O_CREAT | os.O_APPEND)
            os.dup2(out, 1), os.dup2(out, 2)
            sys.stdout, sys.stderr = open(1, "w", closefd=False), open(2, "w", closefd=False)
            from runtime.failure import fail_cleanly

            place = ("--log.dir", str(home), "--log.name", name, "--data.cache", str(home / "data"))
            code = fail_cleanly(train.main, [*args, *place, *extra])
        except BaseException:
            traceback.print_exc()
        finally:
            os._exit(code)
    status = os.waitpid(pid, 0)[1]
    return -os.WTERMSIG(status) if os.WIFSIGNALED(status) else os.WEXITSTATUS(status)


def story(folder: pathlib.Path) -> list[tuple]:
    """The rows of a run without its clocks. Every step must be there once, in order."""

    def is_clock(key: str) -> bool:
        return key.endswith("_ms") or "per_" in key or key in ("mem_gib", "mfu")

    assert list(run_folder.losses(folder)) == list(range(1, STEPS + 1))
    rows = run_folder.rows(folder)
    return [tuple(sorted((key, row[key]) for key in row if not is_clock(key))) for row in rows]


def weights(folder: pathlib.Path) -> dict[str, str]:
    """{key: sha256} of every piece of the last checkpoint: weights and moments."""
    path = store.newest_checkpoint(folder / "checkpoints", [])
    index = store.read_index(path)
    assert index["step"] == STEPS
    return {p["key"]: p["checksum"] for p in index["pieces"]}


def lose_last_validation(folder: pathlib.Path) -> None:
    """As if the kill had come a moment before its line was written."""
    lines = (folder / "metrics.jsonl").read_text().splitlines(keepends=True)
    assert "val_loss" in lines[-1]
    (folder / "metrics.jsonl").write_text("".join(lines[:-1]))


def same_as_clean(home: pathlib.Path, name: str) -> None:
    assert story(home / name) == story(home / "clean")
    assert weights(home / name) == weights(home / "clean")
    assert not leftovers(home / name)


def check_killed(home: pathlib.Path, extra: tuple, step: int) -> None:
    """A run that is killed after a step, and started again, is the clean one."""
    assert run(home, f"killed{step}", f"step.end:step={step}:act=SIGKILL", extra) == -9
    assert run(home, f"killed{step}", extra=extra) == 0
    same_as_clean(home, f"killed{step}")


def leftovers(folder: pathlib.Path) -> list[str]:
    """The names that an interrupted save or purge left among the checkpoints."""
    names = [path.name for path in (folder / "checkpoints").iterdir()]
    return [name for name in names if ".tmp" in name or ".trash" in name]


@pytest.mark.slow(every=21)
@pytest.mark.parametrize("point", start.FAULT_POINTS)
def test_a_run_killed_at_any_point_continues_bit_for_bit(home, point):
    # step 6 is saved: the writer's points have an older checkpoint (3) to fall back on, and one to purge at 9
    step = {"run.built": 0, "eval.end": 8}.get(point, 9 if "purge" in point else 6)
    if point == "ckpt.mid_replace":  # reached only when a committed folder of that step is bad
        assert run(home, point, extra=()) == 0
        bad = home / point / "checkpoints" / "step_00000009"
        shard = next(bad.glob("*.safetensors"))
        shard.write_bytes(shard.read_bytes()[:-1])
        assert run(home, point, f"{point}:act=SIGKILL") == -9
    else:
        assert run(home, point, f"{point}:step={step}:act=SIGKILL") == -9
    assert run(home, point) == 0
    same_as_clean(home, point)
    shutil.rmtree(home / point)


@pytest.mark.slow
def test_a_run_killed_three_times_continues_bit_for_bit(home):
    assert run(home, "twice", "step.backward:step=1:act=SIGKILL") == -9
    assert run(home, "twice", "step.end:step=5:act=SIGKILL") == -9
    assert run(home, "twice", "ckpt.pre_rename:step=6:act=SIGKILL") == -9
    assert run(home, "twice") == 0
    same_as_clean(home, "twice")


@pytest.mark.slow
@pytest.mark.parametrize("act", ["SIGTERM", "SIGHUP"])
def test_a_signal_stops_at_a_step_boundary_and_saves(home, act):
    folder = home / act
    assert run(home, act, f"step.begin:step=4:act={act}") == 75
    assert saved_steps(folder)[0] == 4
    assert exit_reason(folder)["code"] == 75 and exit_reason(folder)["requeue"]
    # the validation of step 4 would come between the signal and the save: the next start makes it
    assert [row["step"] for row in run_folder.validations(folder)] == [0]
    assert run(home, act) == 0
    same_as_clean(home, act)


@pytest.mark.slow
def test_a_signal_in_the_last_step_saves_first(home):
    assert run(home, "last", "step.begin:step=9:act=SIGTERM; eval.end:step=9:act=SIGKILL") == -9
    assert saved_steps(home / "last")[0] == 9
    lose_last_validation(home / "last")
    assert run(home, "last") == 0
    same_as_clean(home, "last")
    assert exit_reason(home / "last")["code"] == 0


@pytest.mark.slow
def test_a_stop_file_and_a_time_limit(home):
    """An empty STOP file is a person's and ends the job for good; `requeue` is a scheduler's, and wants it
    started again."""
    folder = home / "stop"
    folder.mkdir()
    for put, again in (
        (lambda stop: stop.touch(), False),
        (lambda stop: stop.write_text("requeue\n"), True),
        (lambda stop: stop.mkdir(), False),
    ):
        put(folder / "STOP")
        assert run(home, "stop") == 75
        assert exit_reason(folder)["requeue"] is again and "STOP found" in exit_reason(folder)["reason"]
        told = (home / "stop.log").read_text().splitlines()
        assert any(line.startswith("stopped after") and "STOP found" in line for line in told)
        (home / "stop.log").unlink()
        assert not (folder / "STOP").exists()
    assert run(home, "stop", extra=("--train.max_minutes", "1e-9")) == 75
    assert exit_reason(folder)["requeue"] and saved_steps(folder)[0] == 4
    assert run(home, "stop") == 0
    same_as_clean(home, "stop")


def test_a_finished_run_started_again_says_so_and_changes_nothing(home, whole_runs):
    """It says so; with other settings, or fewer steps, it is refused, and nothing that tells of the run
    changes."""
    folder = shutil.copytree(home / "clean", home / "finished")
    tells = {name: (folder / name).read_bytes() for name in ("config.yaml", "metrics.jsonl", "loss.png")}
    for extra, code, words in (
        ((), 0, "already at step 9 of 9"),
        (("--train.max_minutes", "9", "--log.every", "1"), 0, "already at step 9 of 9"),
        (("--optim.lr", "5e-3"), 2, "optim.lr: "),
        (("--eval.batches", "2"), 2, "eval.batches: "),
        (("--checkpoint.init_from", str(home / "clean")), 2, "checkpoint.init_from: "),
        (("--train.steps", "8"), 2, "train.steps: "),
        (("--train.steps", "none", "--train.tokens", "576"), 2, "train.steps: "),
    ):
        (home / "finished.log").unlink(missing_ok=True)
        assert run(home, "finished", extra=extra) == code, (extra, (home / "finished.log").read_text())
        (line,) = (home / "finished.log").read_text().splitlines()
        assert words in line and exit_reason(folder)["code"] == code
        assert code == 0 or (line.startswith("error: ") and "raise train." in line and "--log.name" in line)
        assert {name: (folder / name).read_bytes() for name in tells} == tells
    assert run(home, "finished", "step.begin:step=10:act=SIGKILL", ("--train.steps", "10")) == -9
    assert (folder / "config.yaml").read_bytes() == tells["config.yaml"]  # no step was made
    assert run(home, "finished", extra=("--train.steps", "10")) == 0
    assert "steps: 10" in (folder / "config.yaml").read_text()


@pytest.mark.slow
def test_a_nan_gradient_is_skipped_and_too_many_end_the_run(home):
    assert run(home, "nan", "step.backward:step=5:act=nan") == 0
    assert [row["step"] for row in run_folder.steps(home / "nan") if row["skipped"]] == [5]
    assert run(home, "nans", "step.backward:act=nan") == 77
    assert exit_reason(home / "nans")["code"] == 77


@pytest.mark.slow
def test_saving_in_a_thread_gives_the_same_checkpoint(home):
    assert run(home, "async", extra=("--checkpoint.async_save", "true")) == 0
    assert story(home / "async") == story(home / "clean")
    assert weights(home / "async") == weights(home / "clean")
    assert run(home, "kill", "ckpt.pre_rename:act=SIGKILL", ("--checkpoint.async_save", "true")) == -9
    assert run(home, "kill") == 0
    same_as_clean(home, "kill")


@pytest.mark.slow
def test_a_run_whose_disk_is_full_ends_and_continues_from_the_save_before(home):
    none = ("--checkpoint.failed_saves", "0")
    assert run(home, "full", "ckpt.mid_shard:step=6:act=ENOSPC", none) == 82
    assert "error:" in (home / "full.log").read_text()
    assert saved_steps(home / "full")[0] == 3
    assert run(home, "full") == 0
    same_as_clean(home, "full")


@pytest.mark.slow
def test_a_save_that_fails_is_tried_again_at_the_next(home):
    """At step 6; those of 3 and 9 are there, and the weights are those of a run without a fault."""
    assert run(home, "excused", "ckpt.mid_shard:step=6:act=ENOSPC") == 0
    told = (home / "excused.log").read_text()
    assert told.count("warning: a checkpoint was not saved (1 of 2 consecutive failures allowed") == 1
    assert "ENOSPC" in told and "error:" not in told
    assert saved_steps(home / "excused") == [9, 3]
    same_as_clean(home, "excused")


@pytest.mark.slow
def test_a_save_that_fails_or_is_killed_leaves_no_mark_behind(home):
    """Step 6 would be permanent; it is saved again by a run that keeps none, and purged as the others."""

    def marks(name):
        return [path.name for path in (home / name / "checkpoints").glob("*.keep")]

    permanent = ("--checkpoint.keep_at", "6", "--checkpoint.keep", "1")
    assert run(home, "marked", "ckpt.mid_shard:step=6:act=ENOSPC", permanent) == 0
    assert marks("marked") == [] and saved_steps(home / "marked") == [9]
    assert run(home, "lost", "ckpt.mid_shard:step=6:act=SIGKILL", permanent) == -9
    assert marks("lost") == ["step_00000006.keep"]
    assert run(home, "lost", extra=("--checkpoint.keep", "1")) == 0
    assert marks("lost") == [] and saved_steps(home / "lost") == [9]
    same_as_clean(home, "lost")


@pytest.mark.slow
def test_saves_that_fail_again_and_again_end_the_run(home):
    how = ("--checkpoint.every", "1", "--checkpoint.failed_saves", "1")
    assert run(home, "failing", "ckpt.mid_shard:act=ENOSPC", how) == 82
    told = (home / "failing.log").read_text()
    assert told.count("warning: a checkpoint was not saved") == 1 and told.count("error:") == 1
    assert run_folder.rows(home / "failing")[-1]["step"] == 2


@pytest.mark.slow
def test_the_last_save_of_a_run_may_not_fail(home):
    assert run(home, "unsaved", "ckpt.mid_shard:step=9:act=ENOSPC") == 82
    assert run(home, "unsaved") == 0
    same_as_clean(home, "unsaved")


@pytest.mark.slow
def test_settings_that_would_spoil_the_run_are_refused(home):
    shutil.copytree(home / "clean", home / "drift")
    for extra, word in (
        (("--train.seed", "5"), "train.seed"),
        (("--train.global_batch", "8"), "train.global_batch"),
        (("--model.mlp.width", "64"), "model.mlp.width"),
        (("--data.tokenizer", "bytes"), "model.vocab"),
        (("--checkpoint.resume", "none"), "checkpoint.resume"),
    ):
        (home / "drift.log").unlink(missing_ok=True)
        assert run(home, "drift", extra=extra) == 2
        line = (home / "drift.log").read_text().splitlines()[-1]
        assert line.startswith("error: ") and word in line
    assert weights(home / "drift") == weights(home / "clean")


def test_every_refusal_is_told_by_exit_reason_json(home, tmp_path):
    """Before the folder is opened and after: what an earlier start left there would ask for another one. A
    folder where no run has been is not made, and that of a run at work not touched."""
    folder = home / "refused"

    def refused(name, *extra):
        (home / f"{name}.log").unlink(missing_ok=True)
        assert run(home, name, extra=extra) == 2, extra
        lines = (home / f"{name}.log").read_text().splitlines()
        assert [line.startswith("error: ") for line in lines].count(True) == 1
        return lines[-1]

    assert run(home, "refused", "step.begin:step=4:act=SIGTERM") == 75
    assert exit_reason(folder)["requeue"]
    before = ("--train.global_batch", "3")  # no multiple of the microbatch
    after = ("--data.path", corpus(tmp_path), "--data.tokenizer", "none")  # with another tokenizer
    for extra in (before, after, before):
        line = refused("refused", *extra)
        told = exit_reason(folder)
        assert (told["code"], told["requeue"], told["reason"]) == (2, False, line)
        for name in ("exit_reason.json", "exit_reason.rank1.json"):
            (folder / name).write_text('{"code": 75, "requeue": true}')
    refused("never", *before)
    assert not (home / "never").exists()

    with store.run_lock(folder):
        for extra in (before, ()):
            refused("refused", *extra)
            assert exit_reason(folder)["code"] == 75
    refused("refused", *before)
    assert exit_reason(folder)["code"] == 2 and not (folder / "exit_reason.rank1.json").exists()


@pytest.mark.slow
def test_flipped_checkpoint_falls_back_and_none_left_is_79(home):
    shutil.copytree(home / "clean", home / "rot")
    folders = [p for _, p in store.committed_checkpoints(home / "rot" / "checkpoints")]
    for i, folder in enumerate(folders):
        shard = next(folder.glob("*.safetensors"))
        flip_bit(shard)
        if i == 0:
            assert run(home, "rot") == 0  # goes back to step 6 and makes step 9 again
            same_as_clean(home, "rot")
            told = (home / "rot.log").read_text()
            assert f"checkpoint {folder.name} is rejected: " in told and "step_00000006 at step 6" in told
            flip_bit(shard)
    assert run(home, "rot") == 79
    assert "error: rank 0" in (home / "rot.log").read_text()


@pytest.mark.slow
def test_a_data_file_that_changes_under_the_run_ends_it_before_the_next_save(home, tmp_path, monkeypatch):
    """At step 5 the tokens are overwritten in place; step 3 is the last checkpoint, and with the old file
    the run continues from it.
    """
    prefix = corpus(tmp_path)
    old, step_of = pathlib.Path(f"{prefix}.bin").read_bytes(), train.train_step

    def other_tokens(run, step, *rest, **more):
        if step == 5:
            with open(f"{prefix}.bin", "r+b") as f:  # never shorter: it is mapped
                f.write(old[::-1])
        return step_of(run, step, *rest, **more)

    args = ("--data.path", prefix, "--data.tokenizer", "bytes")
    with monkeypatch.context() as patched:
        patched.setattr(train, "train_step", other_tokens)
        assert run(home, "swapped", extra=args) == 79
    assert "text.bin: written to while the run read it" in (home / "swapped.log").read_text()
    assert saved_steps(home / "swapped") == [3]
    pathlib.Path(f"{prefix}.bin").write_bytes(old)
    assert run(home, "swapped", extra=args) == 0
    story(home / "swapped")
