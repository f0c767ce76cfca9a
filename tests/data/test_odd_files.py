"""Files of kinds that are often met: read, or refused by what they are with the way out."""

import bz2
import json
import lzma
import shlex
import subprocess
import sys

import pytest
from test_contract import make_folder
from test_prepare import ROOT, jsonl, read_back, texts

from config import ConfigError
from data import prepare, tokenizer


@pytest.mark.parametrize("end, pack", [(".bz2", bz2.compress), (".xz", lzma.compress)])
def test_bz2_and_xz(tmp_path, end, pack):
    raw = jsonl(texts(60))
    folder = tmp_path / "in"
    folder.mkdir()
    (folder / f"a.jsonl{end}").write_bytes(pack(raw[:999]) + pack(raw[999:]))  # two streams
    (folder / f"b.txt{end}").write_bytes(pack(b"a document"))
    prepare.prepare_corpus([str(folder)], "bytes", tmp_path / "o")
    assert read_back(tmp_path / "o") == [*texts(60), "a document"]
    for content in (b"not so packed", pack(raw)[:-20]):
        (tmp_path / f"c.jsonl{end}").write_bytes(content)
        with pytest.raises(ConfigError, match=f"c.jsonl{end}: cannot be read to its end: "):
            prepare.prepare_corpus([str(tmp_path / f"c.jsonl{end}")], "bytes", tmp_path / "p")


@pytest.mark.parametrize("name", ["x.csv", "x.tsv", "x.csv.gz", "x.zip", "x.tar", "x.pdf", "x.arrow"])
def test_files_that_hold_no_text_or_many(tmp_path, name):
    """A table was one document, of all its rows."""
    (tmp_path / name).write_text("text,n\none,1\n")
    with pytest.raises(ConfigError, match=rf"{name}: .*(jsonl|parquet|unpack|text)"):
        prepare.prepare_corpus([str(tmp_path / name)], "bytes", tmp_path / "o")


TIKTOKEN = b"IQ== 0\nIg== 1\nIw== 2\n"
RWKV = b"1 '\\x00' 1\n2 '\\x01' 1\n3 b'\\xe0' 1\n"


@pytest.mark.parametrize(
    "name, content, told",
    [
        ("tokenizer.model", TIKTOKEN, "tiktoken"),
        ("o200k.tiktoken", TIKTOKEN, "tiktoken"),
        ("tekken.json", b'{\n "config": {\n  "pattern": "\\\\p{L}+", "num_vocab_tokens": 4}}', "tekken.json"),
        ("tokenizer.model", b"\x1f\x8b\x08\0", "a compressed file"),
        ("rwkv_vocab_v20230424.txt", RWKV, "RWKV"),
        ("tokenizer.model", RWKV, "RWKV"),
    ],
)
def test_lists_of_other_tokenizers(tmp_path, name, content, told):
    (tmp_path / name).write_bytes(content)
    with pytest.raises(ConfigError, match=f"{name}: .*{told}.*tokenizer.json") as error:
        tokenizer.load_tokenizer(tmp_path / name)
    assert "restore" not in str(error.value)  # nothing is damaged


def test_a_vocabulary_and_merges(tmp_path):
    """The line of Python that is told makes a tokenizer.json with the same ids."""
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


def test_a_reader_that_closes_its_pipe(tmp_path):
    """prepare_data ... | head -1"""
    (tmp_path / "a.jsonl").write_bytes(jsonl(texts(9)))
    command = f"{shlex.quote(sys.executable)} -m scripts.prepare_data --input {tmp_path}/a.jsonl " \
              f"--tokenizer bytes --out {tmp_path}/o | true; exit ${{PIPESTATUS[0]}}"
    done = subprocess.run(["bash", "-c", command], cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0 and done.stderr == "", done
