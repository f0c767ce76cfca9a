"""Bytes of text behind token ids: the bytes that were encoded, of every kind of tokenizer, wherever a window
is cut; and val_bpb of a run under data.doc_mask against a count by hand.
"""

import json
import math

import numpy as np
import pytest
import run_folder
import tokenizers
from prepared_data import byte_level_bpe, metrics
from ranks import MODEL, write_documents

import train
from config.reading import resolve
from data import tokenizer
from data.indexed import IndexedDataset
from data.lengths import byte_check, has_plain_offsets, token_byte_lengths
from data.loader import open_loader
from plan.count import flops_per_token
from runtime.evaluate import loss_report

TEXTS = (
    "def f(x):\n    return x  # \u00e4\u00f6\u00fc\n", "Ω and 中文 and 🙂🙂", " begins with a space", "x",
    "a\tb  c\u00a0d\n\n",
)
MORE = ["the quick brown fox jumps over the lazy dog", "def g(y):\n    return [y, y]", TEXTS[0]]


def trained(kind: str, folder):
    """A tokenizer of each kind, trained on a few lines; those of a tokenizer.json as published."""
    if kind == "bytes":
        return tokenizer.load_tokenizer("bytes")
    if kind == "bpe":
        return tokenizer.train_bpe(MORE * 3, 300)
    if kind == "gpt2":
        made = byte_level_bpe(MORE, 300, ["<|endoftext|>"])
    else:  # Llama 2's: a lower block for a space, one before the text, bytes for what it does not know
        made = tokenizers.Tokenizer(tokenizers.models.BPE(byte_fallback=True, unk_token="<unk>"))
        made.normalizer = tokenizers.normalizers.Sequence(
            [tokenizers.normalizers.Prepend("\u2581"), tokenizers.normalizers.Replace(" ", "\u2581")]
        )
        parts = [
            tokenizers.decoders.Replace("\u2581", " "), tokenizers.decoders.ByteFallback(),
            tokenizers.decoders.Fuse(), tokenizers.decoders.Strip(" ", 1, 0),
        ]
        made.decoder = tokenizers.decoders.Sequence(parts)
        trainer = tokenizers.trainers.BpeTrainer(
            vocab_size=300, special_tokens=["<|endoftext|>", "<unk>"], show_progress=False
        )
        made.train_from_iterator(["the quick brown fox", "def f x return"], trainer)
        spec = json.loads(made.to_str())  # the trainer knows no byte pieces
        for byte in range(256):
            spec["model"]["vocab"][f"<0x{byte:02X}>"] = len(spec["model"]["vocab"])
        made = tokenizers.Tokenizer.from_str(json.dumps(spec))
    made.save(str(folder / "tokenizer.json"))
    return tokenizer.load_tokenizer(folder / "tokenizer.json")


def test_the_characters_of_tokens_are_those_that_the_library_tells(tmp_path):
    """Whose parts of a letter have all of it; a text that is changed is left to the library."""
    tok = trained("gpt2", tmp_path)
    texts = [*TEXTS, "e\u0301 🙂👨\u200d👩", "", "\n \n"]
    check = byte_check(tok, is_chat=True)

    def compared(*texts):
        """(ours, the library's) for each text."""
        encodings = tok.processor.encode_batch(list(texts), add_special_tokens=False)
        pieces = [np.array(encoding.ids, np.int32) for encoding in encodings]
        found = check.characters([text.encode() for text in texts], pieces)
        return list(zip(found, [list(map(list, encoding.offsets)) for encoding in encodings]))

    for places, told in compared(*texts):
        assert places.tolist() == told
    (places, _), = compared("🙂")
    assert len(places) > len(set(map(tuple, places.tolist())))  # parts of a letter

    tok.processor.normalizer = tokenizers.normalizers.NFKC()
    kept, changed, last = compared(texts[0], "Ｘ", texts[3])
    assert changed[0] is None
    assert kept[0].tolist() == kept[1] and last[0].tolist() == last[1]


def test_offsets_that_leave_spaces_out_are_the_librarys(tmp_path):
    tok = trained("gpt2", tmp_path)
    assert has_plain_offsets(tok)
    spec = json.loads(tok.files["tokenizer.json"])
    trimmed = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": True}
    spec["post_processor"] = {"type": "Sequence", "processors": [trimmed]}
    (tmp_path / "tokenizer.json").write_text(json.dumps(spec))
    assert not has_plain_offsets(tokenizer.load_tokenizer(tmp_path / "tokenizer.json"))
    spec["post_processor"], spec["pre_tokenizer"]["add_prefix_space"] = None, True
    (tmp_path / "tokenizer.json").write_text(json.dumps(spec))
    assert not has_plain_offsets(tokenizer.load_tokenizer(tmp_path / "tokenizer.json"))
    (tmp_path / "llama").mkdir()
    assert not has_plain_offsets(trained("llama", tmp_path / "llama"))


@pytest.mark.slow(every=2)
@pytest.mark.parametrize("kind", ["bytes", "bpe", "gpt2", "llama"])
def test_lengths_sum_to_the_bytes_that_were_encoded(kind, tmp_path):
    tok = trained(kind, tmp_path)
    inside, first = token_byte_lengths(tok)
    assert inside.shape == (tok.vocab,) and inside[tok.eod] == 0 == first[tok.eod]
    for text in TEXTS:
        ids = tok.encode(text)
        assert first[ids[0]] + inside[ids[1:]].sum() == len(text.encode()), (text, ids)
    assert len(tok.encode(TEXTS[1])) > len(TEXTS[1])  # some tokens are parts of a character


@pytest.mark.parametrize("doc_mask", [False, True])
def test_val_bpb_is_the_loss_over_the_bytes_of_what_was_predicted(tmp_path, doc_mask):
    """By hand: every target of the validation batches, but under doc_mask the first token of a document.
    A byte is a token here and 256 the end of a document, so that the text is what lies below 256."""
    texts = [("ä" * (3 + 5 * i % 11) + "🙂 b")[:24] for i in range(80)]
    data = write_documents(tmp_path / "text", map(str.encode, texts))
    words = ["llama2-tiny", *MODEL, "--data.path", data, "--data.doc_mask", str(doc_mask).lower()]
    words += "--data.split 50,50 --train.steps 1 --eval.batches 3".split()
    words += ["--log.dir", str(tmp_path), "--log.name", "r"]
    assert train.main(words) == 0
    stream, starts = [], set()
    for text in texts:
        starts.add(len(stream))
        stream += [*text.encode(), 256]
    cfg = resolve("llama2-tiny", None, words[1:])
    index, valid = IndexedDataset(data, 257), open_loader(cfg, "valid", 0, 1)
    assert index.read(0, len(stream)).tolist() == stream
    tokens = size = 0
    for _, _, at in valid._locate_samples(0, 3 * 4):  # where the windows of the three batches of four begin
        targets = [i for i in range(at + 1, at + 17) if not (doc_mask and i in starts)]
        tokens, size = tokens + len(targets), size + sum(stream[i] < 256 for i in targets)
    found = run_folder.validations(tmp_path / "r")
    assert len(found) == 2 and 0 < size < tokens < 12 * 16 + (not doc_mask)
    for row in found:
        assert row["val_bpb"] == pytest.approx(row["val_loss"] / math.log(2) * tokens / size, rel=1e-12)


def test_a_loss_is_reported_in_perplexity_and_bits_per_byte():
    """Tokens without any byte, as control tokens alone, have no finite bits per byte."""
    expected = {"val_loss": math.log(2), "val_ppl": 2.0, "val_bpb": 0.25}
    assert loss_report(math.log(2), 4.0) == pytest.approx(expected)
    assert loss_report(1.0, 0.0)["val_bpb"] == math.inf
    assert math.isnan(loss_report(1.0, math.nan)["val_bpb"])


def test_mfu_counts_attention_within_documents(tmp_path):
    """By hand: the keys that each token of an epoch sees, at 6 x layers x heads x (q + v channels)."""
    data = write_documents(tmp_path / "text", (b"x" * (1 + 7 * i % 23) for i in range(90)))
    for window in ("none", "3"):
        words = ["llama2-tiny", *MODEL, "--data.path", data, "--log.dir", str(tmp_path)]
        words += "--data.doc_mask true --train.steps 1 --eval.batches 1 --model.vocab 257".split()
        words += ["--model.mixer.window", window, "--log.name", f"w{window}"]
        assert train.main(words) == 0
        cfg = resolve("llama2-tiny", None, words[1:])
        tflops, tokens_per_s = (
            metrics(tmp_path / f"w{window}", name)[0] for name in ("tflops_per_gpu", "tokens_per_s")
        )
        reader = open_loader(cfg, "train", 0, 1)
        keys = queries = 0
        for step in range(reader.samples // 4):
            for batch in reader.microbatches(step):
                for place in batch.positions[0].tolist():  # restarts with each document
                    keys, queries = keys + min(place + 1, cfg.model.mixer.window or 99), queries + 1
        reader.close()
        m = cfg.model
        attention = 6 * m.layers * m.mixer.heads * (8 + 8) * keys / queries
        matrices = 6 * (m.layers * (32 * 8 * 2 * (4 + 2) + 3 * 32 * 48) + 257 * 32)
        rate = tokens_per_s * (matrices + attention) / 1e12
        assert tflops == pytest.approx(rate, rel=2e-3)  # an epoch ends within a step
        whole = tokens_per_s * flops_per_token(m, 16) / 1e12
        assert window != "none" or whole > rate * 1.01


def test_a_byte_is_one_byte_and_the_end_of_a_document_none():
    inside, first = token_byte_lengths(tokenizer.load_tokenizer("bytes"))
    assert inside.tolist() == [1] * 256 + [0] and np.array_equal(inside, first)
