"""Validation data of its own (data.valid): what a run validates on is what scripts.evaluate reads of the same
files, training has all of data.path, and what does not go together is refused before the first step.
"""

import contextlib
import io
import json
import re

import numpy as np
import pytest
import run_folder
from ranks import MODEL, job, write_documents
from run_folder import validations

from config import ConfigError
from data import tokenizer
from data.indexed import IndexedDatasetWriter
from scripts import evaluate, prepare_data
from scripts.compare.runs import doubts, read_run
from scripts.reproduce import check_inputs

SEQ_LEN = 16  # of ranks.MODEL
SEQUENCES = 8  # of each validation set; a validation reads all of them


@pytest.fixture(scope="module")
def files(tmp_path_factory):
    """{name: a prefix of random letters}: two sets for training, two for validation, of another alphabet."""
    folder, rng = tmp_path_factory.mktemp("data"), np.random.default_rng(0)
    letters = {"train": (97, 123), "other": (97, 105), "web": (97, 110), "code": (48, 58)}
    for name, alphabet in letters.items():
        # a window has a token more, and shares it with the next
        lengths = [SEQ_LEN] + [SEQ_LEN - 1] * ((SEQUENCES if name in ("web", "code") else 60) - 1)
        write_documents(folder / name, (rng.integers(*alphabet, length) for length in lengths))
    return {name: str(folder / name) for name in letters}


def run(home, *words, name="r", world=1):
    args = ["llama3-tiny", *MODEL, "--train.dtype", "fp64", "--train.steps", "2", "--eval.batches", "2",
            "--log.dir", str(home), "--log.name", name, *words]
    return job(home / f"job-{name}", world, args)


def evaluated(folder, *words) -> dict:
    """The report of scripts.evaluate on the run."""
    with contextlib.redirect_stdout(io.StringIO()) as out:
        assert evaluate.main([str(folder), "--dtype", "fp64", "--json", *words]) == 0
    return json.loads(out.getvalue())


# ---- what is read ------------------------------------------------------------------------------------------


@pytest.mark.slow(core=["1"])
@pytest.mark.parametrize("world", [1, 2])
def test_each_set_is_validated_and_all_of_the_path_is_trained(tmp_path, files, world):
    blend = f"0.5 {files['web']} 0.5 {files['code']}"
    end = run(tmp_path, "--data.path", files["train"], "--data.valid", blend, world=world)
    assert end.codes == [0] * world, end.logs
    last = validations(tmp_path / "r")[-1]
    for name in ("web", "code"):
        wanted = evaluated(tmp_path / "r", "--data", files[name])
        assert wanted["tokens"] == SEQUENCES * SEQ_LEN
        assert last[f"val/{name}/loss"] == pytest.approx(wanted["val_loss"], rel=1e-9)
    assert abs(last["val/web/loss"] - last["val/code/loss"]) > 1e-3

    # without --data, what the run names: half of each set in the first SEQUENCES
    whole = evaluated(tmp_path / "r", "--samples", str(SEQUENCES))
    assert whole["data"] == f"{blend} (valid)"
    assert last["val_loss"] == pytest.approx(whole["val_loss"], rel=1e-9)

    # 60 documents of SEQ_LEN tokens and one, with the end of the first
    tokens = 60 * SEQ_LEN + 1
    header = " ".join(end.logs[0].split())
    assert re.search(rf"/train: 60 documents,[^(]* {tokens} tokens \(train {tokens}\)", header), header
    (line,) = [line for line in end.logs[0].splitlines() if line.startswith("valid ")]
    assert "50 % " in line and "web: 8 documents" in line


def test_ranks_validate_on_parts_with_other_numbers_of_targets(tmp_path, files):
    """Documents of three of eight sequences have one letter, and half of the tokens there do not count under
    data.doc_mask. Two ranks cannot divide three evenly, and have the losses of one process.
    """
    lengths = [5 * SEQ_LEN] + 3 * SEQ_LEN // 2 * [1]
    documents = (np.random.default_rng(length).integers(97, 123, length) for length in lengths)
    uneven = write_documents(tmp_path / "uneven", documents)
    words = ["--data.path", files["train"], "--data.doc_mask", "true",
             "--data.valid", f"0.5 {uneven} 0.5 {files['code']}"]
    losses = {}
    for world in (1, 2):
        end = run(tmp_path, *words, name=f"{world}", world=world)
        assert end.codes == [0] * world, end.logs
        losses[world] = validations(tmp_path / f"{world}")[-1]
    for name in ("val_loss", "val/uneven/loss", "val/code/loss"):
        assert losses[2][name] == pytest.approx(losses[1][name], rel=1e-9)


@pytest.mark.slow
def test_validation_files_need_no_index(tmp_path, files):
    """train.bin and val.bin of nanoGPT, whose tokenizer is named."""
    for name in ("train", "web"):
        tokens = np.fromfile(f"{files[name]}.bin", np.uint16)
        tokens.tofile(tmp_path / f"{name}.bin")
    end = run(tmp_path, "--data.path", str(tmp_path / "train.bin"), "--data.valid", str(tmp_path / "web.bin"),
              "--data.tokenizer", "bytes", "--data.dtype", "uint16")
    assert end.codes == [0], end.logs
    wanted = evaluated(tmp_path / "r", "--data", files["web"])
    assert validations(tmp_path / "r")[-1]["val_loss"] == pytest.approx(wanted["val_loss"], rel=1e-9)


@pytest.mark.slow
def test_a_share_of_the_path_for_tests_stays_unread(tmp_path, files):
    end = run(tmp_path, "--data.path", files["train"], "--data.valid", files["web"],
              "--data.split", "70,20,10")
    assert end.codes == [0], end.logs
    train, test = re.search(r"\(train (\d+), test (\d+)\)", end.logs[0]).groups()
    assert int(test) == 6 * SEQ_LEN and int(train) == 54 * SEQ_LEN + 1


# ---- what is refused ---------------------------------------------------------------------------------------


def test_refusals_name_the_key_and_come_before_any_work(tmp_path, files):
    (tmp_path / "docs.txt").write_text("a page of text, and another one\n" * 400)
    words = ["--input", str(tmp_path / "docs.txt"), "--tokenizer", "bpe-280", "--out", str(tmp_path / "bpe")]
    assert prepare_data.main(words) == 0
    with IndexedDatasetWriter(tmp_path / "short", 257) as writer:
        writer.add([97] * 8)
        writer.finish(tokenizer.load_tokenizer("bytes"), 8)
    cases = {
        str(tmp_path / "bpe"): "was made with tokenizer bpe-280",
        str(tmp_path / "absent"): "absent.idx: No such file",
        str(tmp_path / "short"): "short has 8 tokens (1 documents), a sample is 17; name more data there",
        str(tmp_path / "docs.txt"): "then --data.valid runs/data/docs",
        f"0.5 {files['web']} {files['code']}": "is not a blend",
        "": "empty; name the data",
    }
    for number, (valid, message) in enumerate(cases.items()):
        end = run(tmp_path, "--data.path", files["train"], "--data.valid", valid, name=f"n{number}")
        assert end.codes == [2], (valid, end.logs)
        (error,) = end.errors()
        assert error.startswith("error: data.valid: ") and message in error, error
        assert not (tmp_path / f"n{number}/metrics.jsonl").exists()


def test_a_split_that_leaves_nothing_points_to_it(tmp_path, files):
    (error,) = run(tmp_path, "--data.path", files["train"], "--data.split", "1,0").errors()
    assert "data.split" in error and "name its data in data.valid" in error
    words = ["--data.path", files["train"], "--data.valid", files["web"]]
    assert run(tmp_path, *words, "--data.split", "1,0").codes == [0]
    (error,) = run(tmp_path, *words, "--data.split", "90,10", name="other").errors()
    assert "data.split: 90,10 does nothing" in error and "data.valid is separate validation data" in error


def test_a_resume_keeps_what_is_trained(tmp_path, files):
    words = ["--data.path", files["train"]]
    assert run(tmp_path, *words, "--data.valid", files["web"]).codes == [0]
    longer = run(tmp_path, *words, "--data.valid", files["code"], "--train.steps", "3")
    assert longer.codes == [0], longer.logs
    assert "resumed with a different data.valid" in longer.logs[0]
    wanted = evaluated(tmp_path / "r", "--data", files["code"])
    assert validations(tmp_path / "r")[-1]["val_loss"] == pytest.approx(wanted["val_loss"], rel=1e-9)
    without = run(tmp_path, *words, "--train.steps", "4")
    assert without.codes == [2] and without.errors()[0].startswith("error: data.valid: "), without.logs
    # nor at the boundary of a phase, which has data of its own
    phases = json.dumps([{"after_steps": 3, "optim.lr": 1e-4}])
    without = run(tmp_path, *words, "--train.steps", "4", "--train.phases", phases)
    assert without.codes == [2] and without.errors()[0].startswith("error: data.valid: "), without.logs


# ---- what is said of it ------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def two_mixtures(tmp_path_factory, files):
    """Runs of other training data, with the same validation data, and one with another."""
    home = tmp_path_factory.mktemp("runs")
    read = {"a": ("train", "web"), "b": ("other", "web"), "c": ("train", "code")}
    for name, (train, valid) in read.items():
        end = run(home, "--data.path", files[train], "--data.valid", files[valid], name=name)
        assert end.codes == [0], end.logs
    return {name: home / name for name in "abc"}


@pytest.mark.slow
def test_losses_on_the_same_validation_data_compare(two_mixtures):
    runs = {name: read_run(folder) for name, folder in two_mixtures.items()}
    others = "validation losses are of different tokens"
    assert not any(others in line for line in doubts([runs["a"], runs["b"]]))
    (line,) = [line for line in doubts([runs["a"], runs["c"]]) if others in line]
    assert "data.valid" in line


@pytest.mark.slow
def test_a_run_says_what_it_was_validated_with(two_mixtures, files):
    record = run_folder.summary(two_mixtures["a"])["provenance"]
    train, valid = record["inputs"]["data"]
    assert "split" not in train and valid["split"] == "valid" and valid["path"] == files["web"]
    assert check_inputs([record]) == []
    valid["identity"] = "0" * 64
    with pytest.raises(ConfigError, match="web"):
        check_inputs([record])
