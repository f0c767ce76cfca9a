"""A branch of a run: what it has of its source, what it records, and what is refused."""

import hashlib
import json
import shutil

import pytest
import run_folder
from ranks import corpus
from test_resume import ARGS, run, story, weights

import config
from checkpoint import branch
from checkpoint.disk import folder, store
from config import ConfigError
from config.reading import from_tree, get_phases


@pytest.fixture(scope="module")
def home(tmp_path_factory):
    home = tmp_path_factory.mktemp("branch")
    (home / "a").mkdir(), (home / "b").mkdir()
    a, corpus_b = corpus(home / "a"), corpus(home / "b")
    assert corpus_b
    extra = ("--data.path", a, "--data.tokenizer", "bytes", "--checkpoint.keep_every", "3")
    assert run(home, "source", extra=extra) == 0, (home / "source.log").read_text()
    return home


def branched(home, name: str, *argv: str, at: str = "@6", fault: str = "") -> int:
    """train.py --checkpoint.branch: no other word of the command line is the source's."""
    return run(home, name, fault, ("--checkpoint.branch", f"{home / 'source'}{at}", *argv), args=())


def steps(folder) -> list[dict]:
    return run_folder.steps(folder)


@pytest.mark.slow
def test_a_branch_that_changes_nothing_is_its_source(home):
    assert branched(home, "same") == 0, (home / "same.log").read_text()
    source = [dict(row) for row in story(home / "source") if "loss" in dict(row)]
    found = steps(home / "same")
    assert [row["step"] for row in found] == [7, 8, 9]
    for row, expected in zip(found, source[6:]):
        for key in ("loss", "grad_norm", "lr", "tokens"):
            assert row[key] == expected[key]
    assert weights(home / "same") == weights(home / "source")
    summary = run_folder.summary(home / "same")
    assert summary["branch"] == f"{home / 'source'}@6"
    meta = store.read_meta(store.newest_checkpoint(home / "same" / "checkpoints", []))
    assert meta["config"]["checkpoint"]["branch"] == f"{home / 'source'}@6"


@pytest.mark.slow
def test_a_killed_branch_with_other_data_and_rates_continues(home):
    b = str(home / "b" / "text")
    data = ("--data.path", f"0.5 {b} 0.5 {home / 'a' / 'text'}", "--train.seq_len", "32")
    words = (*data, "--optim.decay", "linear", "--optim.lr", "1e-4", "--train.steps", "12")
    assert branched(home, "whole", *words) == 0, (home / "whole.log").read_text()
    assert branched(home, "killed", *words, fault="step.end:step=10:act=SIGKILL") == -9
    assert branched(home, "killed", *words) == 0, (home / "killed.log").read_text()
    whole, killed = steps(home / "whole"), steps(home / "killed")
    assert [row["step"] for row in whole] == list(range(7, 13))
    assert [row["loss"] for row in whole] == [row["loss"] for row in killed]
    assert [row["tokens"] for row in whole] == [6 * 64 + 128 * n for n in range(1, 7)]
    assert [row["lr"] for row in whole] == pytest.approx([1e-5 + 9e-5 * (6 - n) / 6 for n in range(1, 7)])
    cfg = from_tree(config.read_yaml(home / "whole" / "config.yaml"))
    assert [phase.steps_before for phase in get_phases(cfg).all] == [0, 6]
    again = run(home, "whole", extra=("--config", str(home / "whole" / "config.yaml")), args=())
    assert again == 0 and "already at step 12 of 12" in (home / "whole.log").read_text()


@pytest.mark.slow(every=3)
@pytest.mark.parametrize(
    "words, at, line",
    [
        (("--model.hidden", "64"), "@6", "model.hidden: "),
        (("--train.seed", "5"), "@6", "train.seed: "),
        (("--optim.name", "lion"), "@6", "optim.name: "),
        ((), "@7", "has no checkpoint at step 7; it has 3, 6, 9"),
        ((), "@x", "is not RUN or RUN@STEP"),
        ((), "", "already at step 9 of 9"),
        (("--checkpoint.init_from", "x"), "@6", "checkpoint.branch: says what the run begins with"),
        (("--train.seq_len", "24"), "@6", ""),
    ],
)
def test_a_branch_that_cannot_be_is_refused_by_its_key(home, words, at, line):
    code = branched(home, "refused", *words, at=at)
    told = (home / "refused.log").read_text().splitlines()[-1]
    if not line:  # a longer length that the old one does not divide begins a new epoch
        assert code == 0, told
        return
    assert code == 2 and told.startswith("error: ") and line in told, told


def test_a_source_that_says_it_is_huge_is_refused_before_memory_is_taken(home):
    """meta.json of anybody, under matching checksums: 1e6 wide, beside tensors that are 32 wide."""
    path = home / "huge" / "checkpoints" / "step_00000006"
    shutil.copytree(home / "source" / "checkpoints" / "step_00000006", path)
    meta, index = (json.loads((path / name).read_text()) for name in ("meta.json", "index.json"))
    model = meta["config"]["model"]
    model["hidden"] = model["mlp"]["width"] = 1_000_000
    text = json.dumps(meta).encode()
    (path / "meta.json").write_bytes(text)
    index["files"]["meta.json"] = {"bytes": len(text), "sha256": hashlib.sha256(text).hexdigest()}
    sealed = json.dumps(index).encode()
    (path / "index.json").write_bytes(sealed)
    (path / "index.sha256").write_bytes(folder.seal_index(sealed))

    assert run(home, "of-huge", extra=("--checkpoint.branch", f"{home / 'huge'}@6"), args=()) == 2
    told = (home / "of-huge.log").read_text().splitlines()[-1]
    assert "step_00000006: the config says" in told and "they belong to different models" in told, told


def test_a_branch_takes_no_recipe(home):
    with pytest.raises(ConfigError, match="leave the recipe out"):
        branch.resolve("llama3-tiny", None, ["--checkpoint.branch", str(home / "source")])


def test_a_run_that_has_begun_does_not_begin_at_another_checkpoint(home):
    """It went on from its own without a line, and said afterwards that it had begun at the other."""
    data = ("--data.path", str(home / "a" / "text"), "--data.tokenizer", "bytes")
    compute_weights = ("--checkpoint.init_from", str(home / "source"), *data)
    assert branched(home, "begun", "--train.steps", "8") == 0, (home / "begun.log").read_text()
    tuned = run(home, "tuned", extra=(*compute_weights, "--train.steps", "3"))
    assert tuned == 0, (home / "tuned.log").read_text()
    for name, key, value, words, args in (
        ("begun", "checkpoint.branch", f"{home / 'source'}@3", ("--train.steps", "9"), ()),
        ("tuned", "checkpoint.init_from", str(home / "begun"), (*data, "--train.steps", "4"), ARGS),
        ("tuned", "checkpoint.resume", str(home / "begun"), (*data, "--train.steps", "4"), ARGS),
    ):
        kept = (home / name / "config.yaml").read_bytes()
        assert run(home, name, extra=(f"--{key}", value, *words), args=args) == 2
        *_, line = (home / f"{name}.log").read_text().splitlines()
        assert line.startswith(f"error: {key}: the run continues from ") and "which began with" in line, line
        assert (home / name / "config.yaml").read_bytes() == kept


def test_a_source_may_be_named_by_another_path(home, monkeypatch):
    """The same one, seen from another folder, or by a link."""
    assert branched(home, "named", "--train.steps", "7") == 0, (home / "named.log").read_text()
    monkeypatch.chdir(home / "a")
    for steps_asked, where in (("8", "../source@6"), ("9", "../b/../source")):
        words = ("--checkpoint.branch", where, "--train.steps", steps_asked)
        again = run(home, "named", extra=words, args=())
        assert again == 0, (home / "named.log").read_text()
    assert [row["step"] for row in steps(home / "named")] == [7, 8, 9]


def test_an_older_checkpoint_of_its_own_is_not_passed_over_in_silence(home, monkeypatch):
    """The newest was taken, whatever checkpoint.resume named."""
    own = shutil.copytree(home / "source", home / "back") / "checkpoints"
    data = ("--data.path", str(home / "a" / "text"), "--data.tokenizer", "bytes")
    words = (*data, "--checkpoint.keep_every", "3", "--train.steps")
    assert run(home, "back", extra=(*words, "12", "--checkpoint.resume", str(own / "step_00000003"))) == 2
    *_, line = (home / "back.log").read_text().splitlines()
    assert line.startswith("error: checkpoint.resume: the run continues from ") and "step_00000009" in line
    monkeypatch.chdir(home)
    for last, named in (("12", "back/checkpoints/step_00000009"), ("13", str(home / "back"))):
        again = run(home, "back", extra=(*words, last, "--checkpoint.resume", named))
        assert again == 0, (home / "back.log").read_text()
    assert [row["step"] for row in steps(home / "back")] == [*range(1, 14)]


def test_a_branch_without_a_step_continues_where_it_has_begun(home):
    """Whatever its source has saved since."""
    source = home / "moving"
    shutil.copytree(home / "source", source)
    shutil.rmtree(source / "checkpoints" / "step_00000009")
    words = ("--checkpoint.branch", str(source), "--optim.lr", "5e-4")
    assert run(home, "open", extra=(*words, "--train.steps", "8"), args=()) == 0
    shutil.copytree(home / "source/checkpoints/step_00000009", source / "checkpoints/step_00000009")
    again = run(home, "open", extra=(*words, "--train.steps", "9"), args=())
    assert again == 0, (home / "open.log").read_text()
    assert [row["step"] for row in steps(home / "open")] == [7, 8, 9]
    assert f"branch: {source}@6" in (home / "open" / "config.yaml").read_text()


def test_a_branch_has_no_rows_of_a_run_that_failed_in_its_folder(home):
    data = ("--data.path", str(home / "a" / "text"), "--data.tokenizer", "bytes")
    words = (*data, "--checkpoint.every", "none", "--eval.every", "2")
    assert run(home, "twice", "step.end:step=8:act=SIGKILL", words) == -9
    assert [row["step"] for row in steps(home / "twice")]
    assert branched(home, "twice", "--optim.lr", "5e-4") == 0, (home / "twice.log").read_text()
    assert [row["step"] for row in steps(home / "twice")] == [7, 8, 9]
    rows = (home / "twice" / "metrics.jsonl").read_text().splitlines()
    assert min(json.loads(row)["step"] for row in rows) >= 6
