"""Steps, runs and validations without a counted target: conversations whose answers lie outside of what is
read. Runs start from a file of conversations, and what they say is counted by hand from its mask.

An answer whose question is cut away does not count. Where sequences are short, the assistant speaks first.
"""

import json
import re
from pathlib import Path

import numpy as np
import pytest
import run_folder
import torch
from ranks import MODEL, corpus, job, write_documents
from run_folder import steps, validations
from safetensors.torch import load_file

from checkpoint.disk import store
from scripts import prepare_data

SEQ_LEN = 16  # of ranks.MODEL


def conversations(folder, *turns: str | int, count: int = 40, name: str = "chat") -> str:
    """A prefix of `count` conversations, with the byte tokenizer. turns: an answer, or the number of random
    letters of a question."""
    return prepared(folder, [turns] * count, name)


def prepared(folder, chats: list[tuple[str | int, ...]], name: str = "chat") -> str:
    """A prefix of conversations, each given by its turns."""
    rng = np.random.default_rng(0)
    source = folder / f"{name}.jsonl"
    with open(source, "w") as file:
        for turns in chats:
            messages = [
                {"role": "assistant", "content": turn} if isinstance(turn, str) else
                {"role": "user", "content": "".join(map(chr, rng.integers(97, 123, turn)))}
                for turn in turns
            ]
            file.write(json.dumps({"messages": messages}) + "\n")
    words = ["--input", str(source), "--tokenizer", "bytes", "--out", str(folder / name), "--chat"]
    assert prepare_data.main(words) == 0
    return str(folder / name)


def bits(prefix: str) -> np.ndarray:
    """Which tokens count, from the file itself: bool [tokens]."""
    tokens = json.loads(open(f"{prefix}.json").read())["tokens"]
    return np.unpackbits(np.fromfile(f"{prefix}.mask", np.uint8), bitorder="little")[:tokens].astype(bool)


def run(home, prefix, *words, name="r", world=1):
    args = ["llama3-tiny", *MODEL, "--data.path", prefix, "--train.dtype", "fp64", "--data.split", "75,25",
            "--log.dir", str(home), "--log.name", name, *words]
    return job(home / f"job-{name}", world, args)


def targets_line(end) -> str:
    """The line of the header that says which targets count."""
    (line,) = [line for line in end.logs[0].splitlines() if line.startswith("targets")]
    return line


@pytest.fixture(scope="module")
def mostly_questions(tmp_path_factory):
    """One sequence of six has a target: about half of the steps of four sequences have none."""
    return conversations(tmp_path_factory.mktemp("data"), "yes", 14)


# ---- before the first step ---------------------------------------------------------------------------------


def test_the_header_says_what_counts(tmp_path):
    """All 35 sequences of the training part are looked at, and counted here by hand. The second answer of a
    conversation that is cut counts if the first one, or a part of it, stands before its question."""
    prefix = conversations(tmp_path, 28, "yes", 10, "yes", count=36)
    is_counted = bits(prefix)
    seq_len, length = 64, len(is_counted) // 36
    train = is_counted[:27 * length]
    number, left_over = divmod(len(train) - 1, seq_len)
    assert (number, left_over) == (35, 0), "windows would begin at a random token"
    begin = np.arange(number)[:, None] * seq_len
    place = begin + 1 + np.arange(seq_len)
    begins_before = place // length * length < begin
    end_of_first = len("user: \nassistant: yes\n") + 28
    is_second = place % length >= end_of_first
    sees_first = begin < place // length * length + end_of_first
    targets = train[place] & (~begins_before | is_second & sees_first)
    assert targets.sum() < train[place].sum()
    cut = (targets & begins_before).sum() / targets.sum()

    end = run(tmp_path, prefix, "--train.steps", "1", "--train.global_batch", "35",
              "--train.micro_batch", "35", "--train.seq_len", "64")
    assert end.codes == [0], end.logs
    line = targets_line(end)
    empty = (targets.sum(1) == 0).mean()
    shares = [100 * targets.mean(), 100 * empty, 100 * cut]
    assert [float(share) for share in re.findall(r"([\d.]+) %", line)] == [round(x, 1) for x in shares]
    assert "looked at" not in line
    (row,) = steps(tmp_path / "r")
    assert row["targets"] == targets.sum()  # those that are trained


def test_the_header_counts_what_a_mask_of_documents_leaves_out(tmp_path):
    """The first token of a document does not count under data.doc_mask."""
    prefix = corpus(tmp_path)
    lines = {}
    for mask in ("true", "false"):
        end = run(tmp_path, prefix, "--train.steps", "1", "--data.doc_mask", mask, name=mask)
        assert end.codes == [0], end.logs
        lines[mask] = [line for line in end.logs[0].splitlines() if line.startswith("targets")]
    assert lines["false"] == []
    (share,) = re.findall(r"([\d.]+) % of targets count", lines["true"][0])
    assert 95 < float(share) < 99  # documents have 35 tokens on average


def test_whole_conversations_are_not_cut(tmp_path):
    prefix = conversations(tmp_path, 10, "yes")
    end = run(tmp_path, prefix, "--train.steps", "1", "--train.seq_len", "64", "--data.pack", "best_fit",
              "--data.doc_mask", "true")
    assert end.codes == [0], end.logs
    line = targets_line(end)
    assert "0.0 % of sequences have none" in line and "cut" not in line
    assert "looked at" not in line  # the four sequences that the run reads


def test_a_large_file_is_sampled(tmp_path):
    prefix = conversations(tmp_path, "yes", 14, count=800)
    place = np.flatnonzero(bits(prefix))
    is_whole = place // 37 * 37 >= (place - 1) // SEQ_LEN * SEQ_LEN
    share = is_whole.sum() / len(bits(prefix))
    end = run(tmp_path, prefix, "--train.steps", "8", "--train.global_batch", "128",
              "--train.micro_batch", "64")
    line = targets_line(end)
    assert re.search(r"\(512 of 1,024 sequences looked at\)", line), line
    assert float(re.search(r"([\d.]+) %", line)[1]) == pytest.approx(100 * share, rel=0.3)


@pytest.mark.parametrize("words, fix_hint", [
    (["--train.steps", "2"], "raise train.seq_len: a conversation has 4,0"),
    (["--train.steps", "2", "--data.pack", "best_fit", "--data.doc_mask", "true"], "raise train.seq_len"),
])
def test_a_run_without_any_target_is_refused(tmp_path, words, fix_hint):
    """Eight sequences of questions, whose answers the run never reaches."""
    prefix = conversations(tmp_path, 4000, "a", count=8)
    end = run(tmp_path, prefix, *words)
    assert end.codes == [2]
    (line,) = end.errors()
    assert "none of the 8 sequences" in line and "data.path" in line and fix_hint in line, line
    assert not (tmp_path / "r" / "metrics.jsonl").exists()


def test_documents_of_one_token_are_refused(tmp_path):
    ends = write_documents(tmp_path / "ends", [[]] * 200)
    end = run(tmp_path, ends, "--train.steps", "2", "--data.doc_mask", "true")
    assert end.codes == [2]
    assert "data.doc_mask" in end.errors()[0] and "none of the" in end.errors()[0]


# ---- a step without a target -------------------------------------------------------------------------------


def tensors_of(folder):
    """{name of a file and a tensor: tensor} of a checkpoint."""
    return {
        f"{file.name} {name}": tensor
        for file in sorted(folder.glob("*.safetensors")) for name, tensor in load_file(file).items()
    }


def test_a_step_without_a_target_changes_nothing(tmp_path, mostly_questions):
    """Weights, moments and average are those of the checkpoint before; the rate moves on; no loss is told."""
    words = ["--train.steps", "8", "--checkpoint.every", "1", "--checkpoint.keep", "20",
             "--train.ema", "0.9", "--optim.weight_decay", "0.5"]
    end = run(tmp_path, mostly_questions, *words)
    assert end.codes == [0], end.logs
    rows = steps(tmp_path / "r")
    empty = [row["step"] for row in rows if row["targets"] == 0]
    assert 2 <= len(empty) <= 6 and len(rows) == 8

    folders = dict(store.committed_checkpoints(tmp_path / "r" / "checkpoints"))
    for row in rows:
        is_empty = row["step"] in empty
        assert row["skipped"] == is_empty and "nonfinite" not in row
        assert (row["loss"] is None, row["grad_norm"] is None) == (is_empty, is_empty)
        if row["step"] == 1:
            continue
        before, after = (tensors_of(folders[step]) for step in (row["step"] - 1, row["step"]))
        same = [torch.equal(before[name], after[name]) for name in after]
        assert before.keys() == after.keys() and any("ema" in name for name in after)
        assert all(same) if is_empty else not any(same)

    # the rate is that of a run in which every step trains
    assert run(tmp_path, corpus(tmp_path), *words, name="full").codes == [0]
    full = steps(tmp_path / "full")
    assert [row["lr"] for row in rows] == [row["lr"] for row in full]
    assert {row["targets"] for row in full} == {4 * SEQ_LEN}

    # what the run says
    summary = run_folder.summary(tmp_path / "r")
    losses = [row["loss"] for row in rows if row["loss"] is not None]
    assert summary["steps_without_targets"] == len(empty) and summary["finished"]
    assert summary["train_loss"] == losses[-1]
    log = end.logs[0]
    assert f"{len(empty)} of 8 steps had no target" in log
    assert f"loss {losses[0]:.2f} -> {losses[-1]:.2f}" in log
    shown = {int(line.split("/")[0]): line.split() for line in log.splitlines()
             if re.match(r" *\d+/8 ", line)}
    assert all((shown[row["step"]][1:3] == ["-", "-"]) == (row["step"] in empty) for row in rows)


LAYOUTS = {
    "zero1": "--parallel.zero 1", "zero3": "--parallel.zero 3",
    "pp2": "--parallel.pp 2 --train.micro_batch 2", "cp2": "--parallel.cp 2", "tp2": "--parallel.tp 2",
}


@pytest.mark.slow
@pytest.mark.parametrize("layout", LAYOUTS)
def test_every_layout_skips_the_same_steps(tmp_path, mostly_questions, layout):
    """fp64, with an average of the weights, reruns of suspect steps and a window of spikes."""
    words = ["--train.steps", "8", "--train.ema", "0.9", "--train.rerun_suspects", "true",
             "--optim.spike_sigma", "50", "--optim.spike_window", "2"]
    assert run(tmp_path, mostly_questions, *words, name="one").codes == [0]
    end = run(tmp_path, mostly_questions, *words, *LAYOUTS[layout].split(), name="two", world=2)
    assert end.codes == [0, 0], end.logs
    want, found = steps(tmp_path / "one"), steps(tmp_path / "two")
    for name in ("targets", "skipped", "spike", "lr"):
        assert [row[name] for row in found] == [row[name] for row in want], name
    assert sum(row["skipped"] for row in want) >= 2 and not any(row["spike"] for row in want)
    for name in ("loss", "grad_norm"):
        numbers = [[np.nan if row[name] is None else row[name] for row in rows] for rows in (found, want)]
        np.testing.assert_allclose(*numbers, rtol=1e-9)
    assert "computed again" not in end.logs[0]
    averages = [[row["val/ema/loss"] for row in validations(tmp_path / name)] for name in ("one", "two")]
    np.testing.assert_allclose(*averages, rtol=1e-9)


def test_more_steps_in_a_row_than_may_fail(tmp_path):
    """They do not count as failures, however many they are; in fp16 the loss scale stays, too."""
    prefix = conversations(tmp_path, "y", 150)
    words = ["--train.steps", "40", "--train.dtype", "fp16", "--train.loss_scale", "256",
             "--train.loss_scale_window", "3", "--checkpoint.every", "1", "--checkpoint.keep", "100",
             "--train.global_batch", "1"]
    end = run(tmp_path, prefix, *words)
    assert end.codes == [0], end.logs
    rows = steps(tmp_path / "r")
    has_targets = "".join("x" if row["targets"] else "-" for row in rows)
    assert "-" * 21 in has_targets and "x" in has_targets, has_targets  # train.SKIPPED_STEPS_FP16 is 20
    assert not any("nonfinite" in row for row in rows)

    folders = sorted(store.committed_checkpoints(tmp_path / "r" / "checkpoints"))
    scales = [store.read_meta(folder)["loss_scale"] for _, folder in folders]
    for row, before, after in zip(rows[1:], scales, scales[1:]):
        assert (before == after) == (row["targets"] == 0)


# ---- a validation without a target -------------------------------------------------------------------------


def test_a_validation_without_a_target_has_no_loss(tmp_path):
    """The valid part is one long question at its start."""
    prefix = prepared(tmp_path, [("aaa", 14)] * 300 + [(4000, "a")] * 100)
    end = run(tmp_path, prefix, "--train.steps", "60", "--eval.every", "30", "--train.ema", "0.9",
              "--train.global_batch", "1")
    assert end.codes == [0], end.logs
    assert len(validations(tmp_path / "r")) >= 2
    for row in validations(tmp_path / "r"):
        assert [row[name] for name in ("val_loss", "val_ppl", "val_bpb", "val/ema/loss")] == [None] * 4
        assert "nonfinite" not in row
    assert "nan" not in end.logs[0] and "no target" in end.logs[0]
    line = targets_line(end)
    assert re.search(r"; none of a validation \(\d+ sequences looked at\), which has no loss", line), line
    assert run_folder.summary(tmp_path / "r")["validation"] is None


# ---- who reads it ------------------------------------------------------------------------------------------


def test_a_missing_loss_is_not_a_divergence(tmp_path, mostly_questions, capsys):
    """A run whose last steps have no target, and whose validation has none, beside one that has diverged."""
    from scripts.compare import __main__ as compare

    assert run(tmp_path, mostly_questions, "--train.steps", "8").codes == [0]
    file = tmp_path / "r" / "metrics.jsonl"
    rows = [json.loads(line) for line in file.read_text().splitlines()]
    last = max(row["step"] for row in rows)
    rows = [row | {"loss": None, "grad_norm": None, "targets": 0, "skipped": 1}
            if row["step"] == last and "loss" in row else row for row in rows]
    rows = [row | dict.fromkeys(("val_loss", "val_ppl", "val_bpb")) if "val_loss" in row else row
            for row in rows]
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    assert compare.main([str(tmp_path / "r"), "--json"]) == 0
    (told,) = json.loads(capsys.readouterr().out)["runs"]
    assert "diverged" not in told.values() and told["val loss"] == "none"
    assert told["train loss"] not in ("none", "n/a")


def test_a_missing_validation_loss_ends_no_experiment_in_silence(tmp_path):
    """As the files of runs tell it: a ladder and a sweep name the run, a loss that is not finite is kept."""
    if not (Path(__file__).parents[1] / "lab").is_dir():
        pytest.skip("this clone has no lab/")
    from config import ConfigError
    from lab.scaling.experiment import final_loss
    from lab.scaling.sweep import SweepRun, read_curve

    step = {"step": 4, "loss": 3.0, "tokens": 256, "targets": 64}
    without = {"step": 4, "val_loss": None, "val_ppl": None, "val_bpb": None}
    for name, row in (("none", without), ("diverged", without | {"nonfinite": True})):
        (tmp_path / name).mkdir()
        (tmp_path / name / "metrics.jsonl").write_text(json.dumps(step) + "\n" + json.dumps(row) + "\n")
    assert np.isnan(final_loss(tmp_path / "diverged", 4))
    with pytest.raises(ConfigError, match="none: no target of its validation counts"):
        final_loss(tmp_path / "none", 4)
    with pytest.raises(ConfigError, match="none: no target of its validation counts"):
        read_curve(SweepRun("none", rate=1.0, batch=4, batch_tokens=64, steps=4), tmp_path)


def test_no_sink_and_no_picture_has_a_loss_of_such_a_step(tmp_path, mostly_questions, whole_runs):
    accumulator = pytest.importorskip("tensorboard.backend.event_processing.event_accumulator")
    end = run(tmp_path, mostly_questions, "--train.steps", "8", "--log.tensorboard", "true")
    assert end.codes == [0], end.logs
    rows = steps(tmp_path / "r")
    events = accumulator.EventAccumulator(str(tmp_path / "r" / "tensorboard"))
    events.Reload()
    losses = {event.step: event.value for event in events.Scalars("train/loss")}
    assert losses == pytest.approx({row["step"]: row["loss"] for row in rows if row["targets"]}, rel=1e-6)
    assert len(losses) < 8 and len(events.Scalars("train/targets")) == 8
    assert (tmp_path / "r" / "loss.png").exists()
