"""data/tokenizer.py: text comes back as it was, files and settings travel, mistakes are one line."""

import json
import random

import pytest
import sentencepiece
from prepared_data import byte_level_bpe

from config import ConfigError
from data import tokenizer
from data.documents import stdlib_files

PROBES = [
    "def f(x):\n    return  x\n", "\n\n\n", "   leading", "trailing  ", "\t\ttabs\n", "1234567890",
    "日本語とemoji 🙂\n", "a\r\nb\r", "naïve café", "</s><s><unk>", "nul\0byte", "x" * 5000, "", "\ufeffbom",
    "e\u0301 combining",
]


@pytest.fixture(scope="module")
def bpe():
    return tokenizer.train_bpe((open(p, encoding="utf-8").read() for p in stdlib_files()[:40]), 600)


@pytest.fixture
def folder(tmp_path):
    """A byte-level tokenizer.json as the hub has them."""
    texts = ["some text to learn from, some more text"] * 5
    tok = byte_level_bpe(texts, 300, ["<|begin|>", "<|stop|>"])
    tok.enable_truncation(4)  # as some hub files do
    tok.save(str(tmp_path / "tokenizer.json"))
    (tmp_path / "tokenizer_config.json").write_text(
        json.dumps({"eos_token": {"content": "<|stop|>"}, "bos_token": "<|begin|>"})
    )
    return tmp_path


def check_round_trips(tok, probes):
    for text in probes:
        ids = tok.encode(text)
        assert tok.decode(ids) == text, tok.name
        assert tok.eod not in ids and all(0 <= i < tok.vocab for i in ids)
        assert tok.decode([*ids, tok.eod]) == text
    assert [ids.tolist() for ids in tok.encode_batch(probes)] == [tok.encode(text) for text in probes]


def check_saved(tok, folder):
    folder.mkdir()
    tok.save(folder)
    again = tokenizer.load_tokenizer(folder)
    assert (again.name, again.vocab, again.eod, again.bos, again.fingerprint) == (
        tok.name, tok.vocab, tok.eod, tok.bos, tok.fingerprint,
    )
    assert again.encode(PROBES[0]) == tok.encode(PROBES[0])


def test_text_comes_back_from_bytes(tmp_path):
    tok = tokenizer.load_tokenizer("bytes")
    assert (tok.vocab, tok.eod) == (257, 256)
    check_round_trips(tok, PROBES)
    check_saved(tok, tmp_path / "t")


def test_text_comes_back_from_a_trained_bpe(bpe, tmp_path):
    assert (bpe.name, bpe.vocab, bpe.eod, bpe.bos) == ("bpe-600", 600, 2, 1)
    check_round_trips(bpe, PROBES)
    check_saved(bpe, tmp_path / "t")
    assert len(bpe.encode("        return self")) < 8  # it did learn
    rng = random.Random(0)
    for _ in range(200):
        text = "".join(rng.choice(" \n\tab.(é語") for _ in range(rng.randrange(30)))
        assert bpe.decode(bpe.encode(text)) == text


@pytest.mark.parametrize("kind", ["unigram", "bpe"])
def test_a_model_of_another_program_is_not_called_ours(tmp_path, kind):
    """It has a piece for the newline, as ours has, or its pieces are of BPE, as ours are, and not both."""
    symbols = ["\n"] if kind == "unigram" else []
    text = open(stdlib_files()[0], encoding="utf-8").read().split("\n")
    sentencepiece.SentencePieceTrainer.train(
        sentence_iterator=iter(text), model_prefix=str(tmp_path / "t"), vocab_size=400, model_type=kind,
        byte_fallback=True, user_defined_symbols=symbols, minloglevel=2,
    )
    tok = tokenizer.load_tokenizer(tmp_path / "t.model")
    assert tok.name == f"sentencepiece-{tok.vocab}"


def test_training_is_repeatable(bpe):
    again = tokenizer.train_bpe([open(p, encoding="utf-8").read() for p in stdlib_files()[:40]], 600)
    assert again.fingerprint == bpe.fingerprint


def test_long_lines_are_learnt_from():
    """sentencepiece drops lines above its limit, and dies when that leaves nothing."""
    rng = random.Random(0)
    line = " ".join(rng.choice(["some", "words", "語語", "repeat"]) for _ in range(40_000))
    assert len(tokenizer.train_bpe([line], 285).encode("words repeat")) < 9
    assert all(len(piece.encode()) <= tokenizer.MAX_LINE_BYTES for piece in tokenizer.split_long_line(line))
    assert "".join(tokenizer.split_long_line(line)) == line


@pytest.mark.parametrize("texts,pieces,told", [
    ([], 300, "no text to train on"),
    (["", "\n\n"], 300, "no text"),
    (["ab"], 5000, "ask for bpe-"),
    (["abc"], 100, "at least 2"),
    (["abcdefghijk"], 262, "at least 271"),
])
def test_too_little_text_to_train_on_is_refused(texts, pieces, told):
    with pytest.raises(ConfigError, match=told) as e:
        tokenizer.train_bpe(texts, pieces)
    assert "\n" not in str(e.value)


@pytest.mark.parametrize("before", [0, 500])
def test_text_that_cannot_be_read_is_told_as_such(before):
    """Not as too little text, and nothing is trained on what came before."""
    def texts():
        yield from (f"text {number} of many" for number in range(before))
        raise ConfigError("a.parquet: no column 'text'")

    with pytest.raises(ConfigError, match="^a.parquet: no column 'text'$"):
        tokenizer.train_bpe(texts(), 290)


def test_text_comes_back_from_a_tokenizer_json(folder, tmp_path):
    tok = tokenizer.load_tokenizer(folder)
    assert tok.eod == 1 and tok.bos == 0 and tok.vocab == 279
    check_round_trips(tok, [*PROBES, "a page that quotes <|stop|> must not end a document"])
    check_saved(tok, tmp_path / "t")
    (folder / "config.json").write_text(
        json.dumps({"eos_token_id": [0, 1], "vocab_size": 320, "architectures": ["X"]})
    )
    listed = tokenizer.load_tokenizer(folder / "tokenizer.json")
    assert listed.eod == 1 and listed.vocab == 279  # both files have it; a model's rows are no ids
    assert listed.fingerprint == tok.fingerprint
    (folder / "tokenizer_config.json").unlink()
    alone = tokenizer.load_tokenizer(folder / "tokenizer.json")
    assert alone.eod == 0 and alone.fingerprint != tok.fingerprint  # the first of several


def test_a_tokenizer_json_without_an_end_is_refused(folder):
    (folder / "tokenizer_config.json").unlink()
    with pytest.raises(ConfigError, match="no end-of-document token; put tokenizer_config.json"):
        tokenizer.load_tokenizer(folder)


def test_a_tokenizer_json_that_draws_its_tokens_at_random_is_refused(folder):
    """BPE-dropout: the same text had other tokens at each preparation, in silence."""
    spec = json.loads((folder / "tokenizer.json").read_text())
    spec["model"]["dropout"] = 0.3
    (folder / "tokenizer.json").write_text(json.dumps(spec))
    with pytest.raises(ConfigError, match="tokenizer.json: .*dropout 0.3.*at random.*null"):
        tokenizer.load_tokenizer(folder)
    spec["model"]["dropout"] = 0.0
    (folder / "tokenizer.json").write_text(json.dumps(spec))
    assert tokenizer.load_tokenizer(folder).eod == 1


@pytest.mark.parametrize("name,content,told", [
    ("x.model", b"", "not a sentencepiece model"),
    ("x.model", b"garbage" * 99, "not a sentencepiece model"),
    ("x.pt", b"[CounterSpec]\nmethod=sentencepiece\n\xff", "model; give one, a tokenizer.json or a"),
    ("vocab.txt", b"[PAD]\n[unused0]\n[CLS]\n",
     "is a list of words, as of WordPiece, which is not supported"),
    ("vocab.bpe", "#version: 0.2\nĠ t\n".encode(), "is a list of merges, which is not supported"),
    ("encoder.json", b'{"!": 0, "\\"": 1}', "is a vocabulary without its merges, which is not supported"),
    ("tokenizer.json", b"{}", "not a tokenizer.json"),
    ("tokenizer.json", b"\xff", "not a tokenizer.json"),
    ("none.model", None, "No such file"),
    ("bpe-1024", None, "bpe-N is for data.path stdlib"),
])
def test_a_file_that_is_not_a_tokenizer_is_refused_by_what_it_is(tmp_path, name, content, told):
    if content is not None:
        (tmp_path / name).write_bytes(content)
    with pytest.raises(ConfigError, match=told) as e:
        tokenizer.load_tokenizer(tmp_path / name if "-" not in name else name)
    assert "\n" not in str(e.value) and name in str(e.value)


def test_an_empty_folder_is_refused(tmp_path):
    with pytest.raises(ConfigError, match="holds no tokenizer.json"):
        tokenizer.load_tokenizer(tmp_path)
