"""scripts.evaluate: the loss of a checkpoint over a data set, beside torch's cross entropy over the same
windows.
"""

import json
import math
import re

import pytest
import run_folder
import torch
from ranks import MODEL, corpus
from torch.nn.functional import cross_entropy

import train
from checkpoint.trained import load_run
from config import ConfigError
from data import tokenizer
from data.indexed import IndexedDatasetWriter
from scripts.evaluate import main

SEQ = 16


@pytest.fixture(scope="module")
def home(tmp_path_factory):
    home = tmp_path_factory.mktemp("evaluate")
    words = [
        *MODEL, "--train.steps", "4", "--optim.lr", "0.01", "--train.dtype", "fp64",
        "--data.path", corpus(home),
    ]
    assert train.main(["llama2-tiny", *words, "--log.dir", str(home), "--log.name", "run"]) == 0
    return home


def told(capsys, *words: str) -> dict:
    assert main([*words, "--json"]) == 0
    return json.loads(capsys.readouterr().out)


@pytest.fixture(scope="module")
def other(home):
    """A data set of 33 windows and no token more: a path, and the windows [33, SEQ + 1]."""
    tok = tokenizer.load_tokenizer("bytes")
    stream = torch.randint(97, 123, (33 * SEQ + 1,), generator=torch.Generator().manual_seed(3))
    stream[40::41] = tok.eod
    with IndexedDatasetWriter(home / "other", tok.vocab) as out:
        out.add(stream.tolist())
        out.finish(tok, 1)
    return str(home / "other"), torch.stack([stream[i * SEQ : (i + 1) * SEQ + 1] for i in range(33)])


def by_hand(home, rows: torch.Tensor) -> tuple[float, float]:
    """(mean loss, bits a byte): under the byte tokenizer a token is a byte, and the end of a document
    none.
    """
    run = load_run(str(home / "run"), torch.device("cpu"))
    with torch.no_grad():
        places = torch.arange(SEQ).expand(len(rows), SEQ)
        logits = run.stage.logits(rows[:, :-1], places)[..., : run.cfg.model.vocab]
    loss = float(cross_entropy(logits.flatten(0, 1), rows[:, 1:].flatten()))
    text = int((rows[:, 1:] != run.tokenizer.eod).sum())
    return loss, loss * rows[:, 1:].numel() / math.log(2) / text


def letters(folder):
    """A tokenizer of whole words, of three tokens."""
    tokenizers = pytest.importorskip("tokenizers")
    words = tokenizers.Tokenizer(tokenizers.models.WordLevel({"a": 0, "<unk>": 1, "<eos>": 2}, "<unk>"))
    words.add_special_tokens(["<eos>"])
    words.save(str(folder / "tokenizer.json"))
    (folder / "tokenizer_config.json").write_text(json.dumps({"eos_token": "<eos>"}))
    return tokenizer.load_tokenizer(folder)


@pytest.mark.slow
@pytest.mark.parametrize("micro", ["1", "4", "7"])
def test_all_of_a_data_set_once(home, other, capsys, micro):
    """Also where the micro-batch does not divide it."""
    path, rows = other
    found = told(capsys, str(home / "run"), "--data", path, "--micro-batch", micro)
    loss, bits = by_hand(home, rows)
    assert found["tokens"] == rows[:, 1:].numel() and found["step"] == 4
    assert found["val_loss"] == pytest.approx(loss, rel=1e-12)
    assert found["val_ppl"] == pytest.approx(math.exp(loss), rel=1e-12)
    assert found["val_bpb"] == pytest.approx(bits, rel=1e-9)


@pytest.mark.slow
def test_fewer_samples_longer_ones_and_another_dtype(home, capsys):
    run, data = str(home / "run"), ("--data", str(home / "text"))
    part = told(capsys, run, *data, "--samples", "5", "--micro-batch", "2")
    assert part["tokens"] == 5 * SEQ
    assert part["val_loss"] == pytest.approx(
        told(capsys, run, *data, "--samples", "5")["val_loss"], rel=1e-12
    )
    whole = told(capsys, run, *data)
    assert told(capsys, run, *data, "--samples", "100000")["tokens"] == whole["tokens"]
    longer = told(capsys, run, *data, "--seq-len", "32")
    assert longer["tokens"] % 32 == 0 and longer["val_loss"] != whole["val_loss"]
    single = told(capsys, run, *data, "--dtype", "fp32")["val_loss"]
    assert single != whole["val_loss"] and single == pytest.approx(whole["val_loss"], rel=1e-5)


def test_threads_are_those_that_are_asked_for(home, other, monkeypatch, capsys):
    asked = []
    monkeypatch.setattr(torch, "set_num_threads", asked.append)
    words = [str(home / "run"), "--data", other[0], "--samples", "1"]
    told(capsys, *words)
    told(capsys, *words, "--threads", "3")
    assert asked == [3]
    with pytest.raises(ConfigError, match="^--threads: 0; at least 1$"):
        main([*words, "--threads", "0"])


def test_the_run_s_own_split_gives_the_run_s_own_loss(home, capsys):
    """The last validation in metrics.jsonl reads eval.batches of it; here they are the same first samples."""
    rows = run_folder.rows(home / "run")
    last = [row for row in rows if "val_loss" in row][-1]
    found = told(capsys, str(home / "run"), "--samples", "4")
    assert last["step"] == 4 and found["data"].endswith("(valid)")
    assert found["val_loss"] == pytest.approx(last["val_loss"], rel=1e-12)
    assert main([str(home / "run")]) == 0
    assert "bits per byte" in capsys.readouterr().out


def test_data_of_another_tokenizer_is_refused(home, tmp_path, capsys):
    """By its fingerprint; data that names no tokenizer is taken."""
    for name, tok in (("none", None), ("bpe", letters(tmp_path))):
        with IndexedDatasetWriter(tmp_path / name, 257) as out:
            out.add([97, 98, 99, 256] * 20)
            out.finish(tok, 1)
    unnamed = told(capsys, str(home / "run"), "--data", str(tmp_path / "none"))
    assert unnamed["val_loss"] > 0 and unnamed["val_bpb"] is None  # nobody knows what text a token stands for
    labels = [tokenizer.load_tokenizer(spec).contract.label for spec in (tmp_path / "bpe.tokenizer", "bytes")]
    told_both = re.escape(labels[0]) + ".* trained with " + re.escape(labels[1])
    wanted = rf"^--data: .*bpe was made with the tokenizer {told_both}; .*prepare_data --tokenizer"
    with pytest.raises(ConfigError, match=wanted):
        main([str(home / "run"), "--data", str(tmp_path / "bpe")])


def test_data_of_a_larger_tokenizer_is_refused_by_its_name(home, tmp_path):
    """An evaluation cannot change model.vocab: the error names the other tokenizer, not the first odd id."""
    tok = tokenizer.train_bpe(["some words to learn " * 9], 280, tmp_path / "x.model")
    with IndexedDatasetWriter(tmp_path / "large", tok.vocab) as out:
        out.add([270, 271, tok.eod] * 20)
        out.finish(tok, 1)
    wanted = rf"257 is smaller than the 280 ids of {re.escape(tok.contract.label)}"
    with pytest.raises(ConfigError, match=wanted):
        main([str(home / "run"), "--data", str(tmp_path / "large")])


@pytest.mark.parametrize("positions", ["learned", "rotary"])
def test_sequences_beyond_the_context_are_refused_or_noted(home, capsys, positions):
    """Learned positions end there; rotary ones continue, with a note that they are not trained."""
    words = [*MODEL, "--train.steps", "1", "--data.path", str(home / "text"), "--log.dir", str(home)]
    words += ["--model.context", str(SEQ), "--log.name", positions]
    if positions == "learned":
        words += ["--model.positions", "learned", "--model.mixer.rope", "none"]
    assert train.main(["llama2-tiny", *words]) == 0
    capsys.readouterr()
    run = [str(home / positions), "--seq-len", str(2 * SEQ), "--json"]
    if positions == "learned":
        with pytest.raises(ConfigError, match="^--seq-len: 32 is longer than the 16 learned positions"):
            main(run)
        return
    assert main(run) == 0
    end = capsys.readouterr()
    assert json.loads(end.out)["tokens"] % (2 * SEQ) == 0
    assert "--seq-len: 32 is beyond model.context 16" in end.err


def test_a_length_that_does_not_divide_what_stays_together_in_training(home, tmp_path, capsys):
    """data.span is of the order of samples, which an evaluation does not have: as every branch has one."""
    words = [*MODEL, "--train.steps", "1", "--data.path", corpus(tmp_path), "--data.span", "32"]
    assert train.main(["llama2-tiny", *words, "--log.dir", str(tmp_path), "--log.name", "run"]) == 0
    capsys.readouterr()
    assert told(capsys, str(tmp_path / "run"), "--seq-len", "24")["val_loss"] > 0
