"""Files of kinds that are often met: read, or refused by what they are with the way out."""

import bz2
import gzip
import json
import lzma
import shlex
import subprocess
import sys

import pytest
from test_contract import make_folder
from test_prepare import ROOT, jsonl, read_back, texts

from config import ConfigError
from data import documents, prepare, tokenizer
from data.conversation import parse_json
from scripts.prepare_data import main


@pytest.mark.parametrize("end, pack", [(".bz2", bz2.compress), (".xz", lzma.compress)])
def test_bz2_and_xz_are_read(tmp_path, end, pack):
    raw = jsonl(texts(60))
    folder = tmp_path / "in"
    folder.mkdir()
    (folder / f"a.jsonl{end}").write_bytes(pack(raw[:999]) + pack(raw[999:]))  # two streams
    (folder / f"b.txt{end}").write_bytes(pack(b"a document"))
    prepare.prepare_corpus([str(folder)], "bytes", tmp_path / "o")
    assert read_back(tmp_path / "o") == [*texts(60), "a document"]
    for content in (b"not so packed", pack(raw)[:-20]):
        (tmp_path / f"c.jsonl{end}").write_bytes(content)
        with pytest.raises(ConfigError, match=f"c.jsonl{end}: cannot be read to the end: "):
            prepare.prepare_corpus([str(tmp_path / f"c.jsonl{end}")], "bytes", tmp_path / "p")


@pytest.mark.parametrize("name", ["x.csv", "x.tsv", "x.csv.gz", "x.zip", "x.tar", "x.pdf", "x.arrow",
                                  "x.xlsx", "x.odt", "x.warc.gz", "x.wet.gz", "x.jsonl.lz4", "x.lzma"])
def test_files_that_hold_no_text_or_many_are_refused(tmp_path, name):
    """A table was one document, of all its rows."""
    (tmp_path / name).write_text("text,n\none,1\n")
    with pytest.raises(ConfigError, match=rf"{name}: .*(jsonl|parquet|unpack|text|compress it as)"):
        prepare.prepare_corpus([str(tmp_path / name)], "bytes", tmp_path / "o")


@pytest.mark.parametrize("name, pack", [("A.JSONL", bytes), ("a.Jsonl.GZ", gzip.compress), ("B.TXT", bytes)])
def test_the_suffix_of_a_name_may_be_in_capitals(tmp_path, name, pack):
    """It was one text document, and not read in a folder."""
    folder = tmp_path / "in"
    folder.mkdir()
    content = b"a document" if name == "B.TXT" else jsonl(texts(9))
    (folder / name).write_bytes(pack(content))
    for given in (folder, folder / name):
        prepare.prepare_corpus([str(given)], "bytes", tmp_path / "o")
        assert read_back(tmp_path / "o") == (["a document"] if name == "B.TXT" else texts(9))


@pytest.mark.parametrize("name", ["x.html", "X.HTM", "x.xml.gz", "x.ipynb"])
def test_markup_is_text_only_where_that_is_said(tmp_path, name, capsys):
    """All of its tags were one document."""
    path = tmp_path / "in" / name
    path.parent.mkdir()
    path.write_bytes(gzip.compress(b"<p>a") if name.endswith(".gz") else b"<p>a")
    words = ["--tokenizer", "bytes", "--out", str(tmp_path / "o"), "--input"]
    for given in (path, f"{path.parent}/*"):
        assert main([*words, str(given)]) == 2
        (line,) = capsys.readouterr().err.splitlines()
        assert line.startswith(f"error: {path}: ") and "text:FILE" in line
        assert [*tmp_path.iterdir()] == [path.parent]
    for given in (path, f"{path.parent}/*", path.parent):
        assert main([*words, f"text:{given}"]) == 0
        assert read_back(tmp_path / "o") == ["<p>a"]


@pytest.mark.parametrize("name, pack", [("part-00000", bytes), ("x.jsonlines.gz", gzip.compress),
                                        ("x.txt", bytes)])
def test_records_in_a_file_without_the_suffix_are_refused_unless_text_is_said(tmp_path, name, pack):
    """Its records were one document, with their braces."""
    path = tmp_path / name
    path.write_bytes(pack(jsonl(texts(9))))
    with pytest.raises(ConfigError, match=rf"{name}: has a JSON object on each line.*\.jsonl.*text:FILE"):
        prepare.prepare_corpus([str(path)], "bytes", tmp_path / "o")
    prepare.prepare_corpus([f"text:{path}"], "bytes", tmp_path / "o")
    assert read_back(tmp_path / "o") == [jsonl(texts(9)).decode()]
    for content in (b'{"a": 1}\nis an object of JSON.\n', b"1\n2\n3\n", b"{}\n"):
        path.write_bytes(pack(content))
        prepare.prepare_corpus([str(path)], "bytes", tmp_path / "p")
        assert read_back(tmp_path / "p") == [content.decode()]


def test_the_files_of_a_folder_that_are_not_read_are_named(tmp_path):
    folder = tmp_path / "in"
    (folder / "more").mkdir(parents=True)
    for name in ("a.txt", "b.csv", "more/c.csv", "d.html", "README"):
        (folder / name).write_text("x")
    told = []
    prepare.prepare_corpus([str(folder)], "bytes", tmp_path / "o", say=told.append)
    assert told == [f"{folder}: 4 files are not read: 2 .csv, 1 .html, 1 without an end"]
    prepare.prepare_corpus([str(folder / "a.txt")], "bytes", tmp_path / "p", say=told.append)
    assert len(told) == 1


@pytest.mark.parametrize("content", ["text".encode("utf-16-le"), b"SQLite format 3\0", b"a\nb\0"],
                         ids=["utf-16", "binary", "line 2"])
def test_a_text_file_with_nul_is_refused(tmp_path, content):
    (tmp_path / "x.txt").write_bytes(content)
    line = 1 + content.split(b"\0")[0].count(b"\n")
    with pytest.raises(documents.BadDocument, match=rf"x.txt:{line}: a NUL byte, which text does not have"):
        prepare.prepare_corpus([str(tmp_path / "x.txt")], "bytes", tmp_path / "o")


@pytest.mark.parametrize("line, told", [
    ('{"text": "first", "text": "second"}', "'text' twice"),
    ('{"text": "a", "meta": {"n": 1, "n": 2}}', "'n' twice"),
    ('[{"text": "a"}, {"text": "b"}]', "a list of JSON: write one object on each line"),
    ("[", "a list of JSON: write one object on each line"),
    ("{", "write one object on each line"),
], ids=["text", "inside", "list", "begun", "object"])
def test_records_that_would_lose_something_are_refused(tmp_path, line, told):
    (tmp_path / "x.jsonl").write_text(f'{{"text": "good"}}\n{line}\n')
    with pytest.raises(documents.BadDocument, match=f"x.jsonl:2: .*{told}"):
        prepare.prepare_corpus([str(tmp_path / "x.jsonl")], "bytes", tmp_path / "o")


def test_the_same_key_with_the_same_value_loses_nothing(tmp_path):
    (tmp_path / "x.jsonl").write_text('{"text": "a", "n": [1], "text": "a", "n": [1]}\n')
    prepare.prepare_corpus([str(tmp_path / "x.jsonl")], "bytes", tmp_path / "o")
    assert read_back(tmp_path / "o") == ["a"]


def test_a_record_needs_no_decoder_of_its_own(monkeypatch):
    """Making one took as long as reading a short record."""
    monkeypatch.setattr(json, "JSONDecoder", None)
    assert parse_json('{"text": "a"}') == {"text": "a"}


@pytest.mark.parametrize("key, value", [
    ("tools", '[{"name": "f", "name": "g"}]'),
    ("messages", '[{"role": "user", "content": "a", "content": "b"}, {"role": "assistant", "content": "c"}]'),
])
def test_json_in_a_string_of_a_conversation_is_read_the_same_way(tmp_path, key, value):
    messages = [{"role": "user", "content": "a"}, {"role": "assistant", "content": "c"}]
    record = {"messages": messages, key: value}
    (tmp_path / "x.jsonl").write_text(json.dumps(record))
    with pytest.raises(documents.BadDocument, match="x.jsonl:1: .*twice"):
        prepare.prepare_corpus([str(tmp_path / "x.jsonl")], "bytes", tmp_path / "o", key=None, is_chat=True)


@pytest.mark.parametrize("spec, told", [
    ("gpt2", """python -c 'from transformers import AutoTokenizer as A; A.from_pretrained("gpt2").save"""),
    ("meta-llama/Llama-3.2-1B", """save_pretrained("Llama-3.2-1B")'"""),
    ("bpe", "bpe-32000"),
    ("bpe-32k", "bpe-32000"),
    ("missing/tokenizer.json", "give bytes, a .model, a tokenizer.json or a folder of one"),
])
def test_a_tokenizer_that_is_not_there_is_refused_with_what_makes_one(tmp_path, monkeypatch, spec, told):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ConfigError) as error:
        tokenizer.load_tokenizer(spec)
    assert told in str(error.value) and "\n" not in str(error.value)


TIKTOKEN = b"IQ== 0\nIg== 1\nIw== 2\n"
RWKV = b"1 '\\x00' 1\n2 '\\x01' 1\n3 b'\\xe0' 1\n"


@pytest.mark.parametrize("name, content, told", [
    ("tokenizer.model", TIKTOKEN, "tiktoken"),
    ("o200k.tiktoken", TIKTOKEN, "tiktoken"),
    ("tekken.json", b'{\n "config": {\n  "pattern": "\\\\p{L}+", "num_vocab_tokens": 4}}', "tekken.json"),
    ("tokenizer.model", b"\x1f\x8b\x08\0", "a compressed file"),
    ("rwkv_vocab_v20230424.txt", RWKV, "RWKV"),
    ("tokenizer.model", RWKV, "RWKV"),
])
def test_the_files_of_other_tokenizers_are_refused_by_name(tmp_path, name, content, told):
    (tmp_path / name).write_bytes(content)
    with pytest.raises(ConfigError, match=f"{name}: .*{told}.*tokenizer.json") as error:
        tokenizer.load_tokenizer(tmp_path / name)
    assert "restore" not in str(error.value)  # nothing is damaged


def test_a_vocabulary_and_merges_are_refused_with_a_command_that_joins_them(tmp_path):
    home = make_folder(tmp_path / "t", {})
    spec = json.loads((home / "tokenizer.json").read_text())
    vocab = spec["model"]["vocab"] | {"</s>": 256, "ab": 257}
    (home / "vocab.json").write_text(json.dumps(vocab))
    (home / "merges.txt").write_text("#version: 0.2\na b\n")
    (home / "tokenizer.json").unlink()
    with pytest.raises(ConfigError, match="vocab.json and merges.txt") as error:
        tokenizer.load_tokenizer(home)
    command = shlex.split(str(error.value).partition("make one with ")[2])
    assert command[:2] == ["python", "-c"]
    subprocess.run([sys.executable, *command[1:]], cwd=ROOT, check=True)
    tok = tokenizer.load_tokenizer(home)
    assert tok.encode("ab") == [257] and tok.eod == 256


def test_a_reader_that_closes_its_pipe_is_not_an_error(tmp_path):
    """prepare_data ... | head -1"""
    (tmp_path / "a.jsonl").write_bytes(jsonl(texts(9)))
    command = f"{shlex.quote(sys.executable)} -m scripts.prepare_data --input {tmp_path}/a.jsonl " \
              f"--tokenizer bytes --out {tmp_path}/o | true; exit ${{PIPESTATUS[0]}}"
    done = subprocess.run(["bash", "-c", command], cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0 and done.stderr == "", done
