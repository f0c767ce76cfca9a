"""The proof of the edge: from a user's wild files to the loss, beside a path that shares nothing with ours.

That path reads the records in a few lines, has the ids of transformers' tokenizer, and the logits of
transformers' model, made from the exported folder. Equal must be the bytes of the text, the ids, the targets,
the loss and the bits per byte, for the tokenizers that families have.
"""

import codecs
import gzip
import json
import math
import random

import numpy as np
import pytest
import run_folder
import torch
from ranks import MODEL
from tokenizer_families import FAMILIES, make_tokenizer

import train
from data.indexed import IndexedDataset
from scripts import convert, prepare_data

CORE = ["llama2", "llama3", "qwen3"]
SEQ_LEN = 16  # of ranks.MODEL
BATCH = 4  # its global batch
WILD = (
    "plain text, in one line",
    "\ta tab,  two blanks   three, and blanks at the end   \n\n\n",
    "\r\nlines of\r\nWindows\r\n and of old\rMacs",
    "naïve café, “quotes” — dashes … Ω≈ç√∫ e\u0301 \u00a0 \u200b zero width",
    "日本語のテキスト。漢字かな交じり文 한국어 中文",
    "👩‍👩‍👧‍👦 🇩🇪 👍🏽 \U0001f9ea",
    "שלום עולם مرحبا بالعالم",
    "a page that quotes {control} and {control}{control}, and goes on",
    "NUL \x00, escape \x1b[31m, delete \x7f, \ufeff a mark of byte order",
    "x" * 200,
    "0123456789" * 9,
    "\\n is no line end, \"quotes\" and \\ stay, &amp; is no ampersand, {{ braces }} % $HOME",
    " ",
)
ALPHABET = [*map(chr, range(32, 127)), *"\n\t\r\0\x1béßñ—“”日本語한國אبΩ🇩🇪👍\u0301\u200d\ufeff\U0010ffff"]


def documents_of(name: str, seed: int) -> list[str]:
    """Wild documents by hand, and drawn ones."""
    rng = random.Random(seed)
    family = FAMILIES[name]
    texts = [text.replace("{control}", rng.choice(family.special)) for text in WILD]
    for _ in range(20):
        texts.append("".join(rng.choices(ALPHABET, k=rng.randrange(1, 90))))
    rng.shuffle(texts)
    return texts


def write_records(folder, texts: list[str]) -> list[str]:
    """Files of the kinds that users have, one after the other: their paths, in the order of the texts."""
    third = len(texts) // 3
    with open(folder / "a.jsonl", "wb") as file:  # as an editor of Windows saves it, with empty lines
        file.write(codecs.BOM_UTF8)
        for text in texts[:third]:
            file.write(json.dumps({"n": 1, "text": text}, ensure_ascii=False).encode() + b"\r\n\r\n")
    with gzip.open(folder / "b.jsonl.gz", "wt") as file:  # every letter as an escape
        for text in texts[third:2 * third]:
            file.write(json.dumps({"text": text, "meta": {"text": "another"}}) + "\n")
    with open(folder / "c.jsonl", "wb") as file:  # without an end of the last line
        file.write(b"\n".join(json.dumps({"text": text}).encode() for text in texts[2 * third:]))
    return [str(folder / name) for name in ("a.jsonl", "b.jsonl.gz", "c.jsonl")]


def read_records(paths: list[str]) -> list[str]:
    """The texts, read in the plainest way."""
    texts = []
    for path in paths:
        with gzip.open(path, "rt") if path.endswith(".gz") else open(path, encoding="utf-8-sig") as file:
            texts += [json.loads(line)["text"] for line in file.read().split("\n") if line.strip()]
    return texts


def their_ids(tokenizer, text: str) -> list[int]:
    """Text makes no control token."""
    return tokenizer(text, add_special_tokens=False, split_special_tokens=True).input_ids


def first_bytes(tokenizer, text: str) -> int:
    """Bytes of the text's first token: none, where that is the space which a tokenizer puts before a text."""
    return len(text.encode()) - len(tokenizer.decode(their_ids(tokenizer, text)[1:]).encode())


def whole_windows(tokenizer, texts: list[str], extra: int) -> list[str]:
    """The texts, and one more, as long as windows of SEQ_LEN need to fill whole batches. extra: tokens that
    a document has beside those of its text."""
    total = sum(len(their_ids(tokenizer, text)) + extra for text in texts)
    for letters in range(1, 400):
        own = len(their_ids(tokenizer, "q" * letters)) + extra
        if (total + own - 1) % (SEQ_LEN * BATCH) == 0:
            return [*texts, "q" * letters]
    raise AssertionError("no such text")


@pytest.mark.slow(core=[f"{name}-0" for name in CORE])
@pytest.mark.parametrize("seed", [0, 1])
@pytest.mark.parametrize("name", FAMILIES)
def test_wild_files_have_the_loss_of_transformers(transformers, tmp_path, capsys, name, seed):
    family = FAMILIES[name]
    home = make_tokenizer(name, tmp_path / "tok")
    theirs = transformers.AutoTokenizer.from_pretrained(home)
    start = [theirs.bos_token_id] if family.puts_start else []
    end = theirs.convert_tokens_to_ids(family.eos)
    texts = ["plain begin", *documents_of(name, seed)]
    paths = write_records(tmp_path, whole_windows(theirs, texts, len(start) + 1))

    # the files
    words = ["--tokenizer", home, "--out", tmp_path / "data", "--workers", 1, "--json"]
    assert prepare_data.main([*map(str, words), "--input", *paths]) == 0
    report = json.loads(capsys.readouterr().out.splitlines()[-1])
    texts = read_records(paths)
    ids = [their_ids(theirs, text) for text in texts]
    assert report["text_bytes"] == sum(len(text.encode()) for text in texts)
    assert report["lost_bytes"] == report["unknown_tokens"] == report["bad"] == report["empty"] == 0
    index = IndexedDataset(tmp_path / "data")
    stored = index.read(0, index.tokens).tolist()
    assert stored == [token for document in ids for token in (*document, end)]

    # the run, which validates on all of it
    data = ["--data.path", tmp_path / "data", "--data.valid", tmp_path / "data"]
    stream = np.array([token for document in ids for token in (*start, *document, end)])
    windows = (len(stream) - 1) // SEQ_LEN
    settings = [*data, "--log.dir", tmp_path, "--log.name", "run", "--train.steps", 1, "--optim.lr", 1e-6]
    settings += ["--train.dtype", "fp64", "--model.init_std", 0.3, "--eval.batches", windows // BATCH]
    assert train.main(["llama3-tiny", *MODEL, *map(str, settings)]) == 0
    (validation,) = [row for row in run_folder.validations(tmp_path / "run") if row.get("step") == 1]

    # its loss
    assert convert.main(["to-hf", str(tmp_path / "run"), str(tmp_path / "hf")]) == 0
    model = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "hf").double()
    places = np.arange(windows)[:, None] * SEQ_LEN + np.arange(SEQ_LEN + 1)
    tokens = torch.from_numpy(stream[places])
    with torch.no_grad():
        logits = model(tokens[:, :-1]).logits.log_softmax(-1)
    nats = -logits.gather(-1, tokens[:, 1:, None])[..., 0]
    counted = tokens[:, 1:] != start[0] if start else torch.ones_like(nats, dtype=torch.bool)
    assert int(counted.sum()) == len(stream) - 1 - max(0, len(texts) - 1) * len(start)
    loss = float(nats[counted].mean())
    assert validation["val_loss"] == pytest.approx(loss, rel=1e-6)

    # and its bits per byte: all of the text, but for a first token that nothing predicts
    num_bytes = sum(len(text.encode()) for text in texts) - (0 if start else first_bytes(theirs, texts[0]))
    bits = float(nats[counted].sum()) / math.log(2) / num_bytes
    assert validation["val_bpb"] == pytest.approx(bits, rel=1e-6)
