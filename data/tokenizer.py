"""Tokenizers: sentencepiece, Hugging Face's tokenizer.json, raw bytes. One face for all three.

    t = load("bytes" | "x.model" | "tokenizer.json" | a folder that holds one of them)
    t.encode(text) -> ids      t.batch(texts) -> one array a text      t.decode(ids) -> text      t.save(folder)
    t.name, t.vocab, t.eod (ends a document), t.bos, t.fingerprint (sha256 of all that decides the ids)

Special tokens spelt in a text ("</s>", "<|endoftext|>") are read as plain text: a page that quotes one must not end a
document.
"""
import hashlib
import io
import json
import pathlib
import re
from dataclasses import dataclass
from typing import Any

import numpy as np
import sentencepiece

from config import ConfigError

LONGEST = 65536  # bytes in a line of sentencepiece's trainer; it drops longer ones without a word, so we cut them
EOD_NAMES = ("<|endoftext|>", "</s>", "<|end_of_text|>", "<eos>")  # where a tokenizer.json comes without a config


@dataclass(frozen=True)
class Bytes:
    """UTF-8 bytes are the ids 0..255; 256 ends a document."""
    name: str = "bytes"
    vocab: int = 257
    eod: int = 256
    bos: int | None = None
    fingerprint: str = hashlib.sha256(b"bytes, eod 256").hexdigest()

    def encode(self, text: str) -> list[int]:
        return list(text.encode("utf-8"))

    def batch(self, texts: list[str]) -> list[np.ndarray]:  # each uint8 [tokens]
        return [np.frombuffer(text.encode("utf-8"), np.uint8) for text in texts]

    def decode(self, ids) -> str:
        return bytes(i for i in ids if i < 256).decode("utf-8", errors="replace")

    def save(self, folder) -> None:
        pathlib.Path(folder, "tokenizer.bytes").write_bytes(b"")


@dataclass(frozen=True)
class SentencePiece:
    name: str
    model: bytes  # the .model file
    processor: Any
    vocab: int
    eod: int
    bos: int | None
    fingerprint: str

    def encode(self, text: str) -> list[int]:
        return self.processor.encode(text)

    def batch(self, texts: list[str]) -> list[np.ndarray]:  # each int32 [tokens]
        if hasattr(self.processor, "encode_as_numpy"):  # sentencepiece >= 0.2.2: no Python list on the way
            return self.processor.encode(texts, out_type="numpy", num_threads=1)
        return [np.array(ids, np.int32) for ids in self.processor.encode(texts, num_threads=1)]

    def decode(self, ids) -> str:
        return self.processor.decode([int(i) for i in ids])

    def save(self, folder) -> None:
        pathlib.Path(folder, "tokenizer.model").write_bytes(self.model)


@dataclass(frozen=True)
class Json:
    name: str
    files: dict[str, bytes]  # tokenizer.json, and the config files beside it that name the special ids
    processor: Any
    vocab: int
    eod: int
    bos: int | None
    fingerprint: str

    def encode(self, text: str) -> list[int]:
        return self.processor.encode(text, add_special_tokens=False).ids

    def batch(self, texts: list[str]) -> list[np.ndarray]:  # each int32 [tokens]
        return [np.array(e.ids, np.int32) for e in self.processor.encode_batch_fast(texts, add_special_tokens=False)]

    def decode(self, ids) -> str:
        return self.processor.decode([int(i) for i in ids], skip_special_tokens=True)

    def save(self, folder) -> None:
        for name, content in self.files.items():
            pathlib.Path(folder, name).write_bytes(content)


Tokenizer = Bytes | SentencePiece | Json


def load(spec) -> Tokenizer:
    """From "bytes", a .model, a tokenizer.json, or a folder that holds one. Raises ConfigError naming the file."""
    if str(spec) == "bytes":
        return Bytes()
    path = pathlib.Path(spec)
    if path.is_dir():
        found = [path / n for n in ("tokenizer.json", "tokenizer.model", "tokenizer.bytes") if (path / n).exists()]
        if not found:
            raise ConfigError(f"{path}: holds no tokenizer.json, tokenizer.model or tokenizer.bytes")
        path = found[0]
    try:
        content = path.read_bytes()
    except OSError as e:
        way = "bpe-N is for data.path stdlib and for prepare_data" if bpe_pieces(spec) else "give bytes, a .model, a " \
              "tokenizer.json or a folder of one"
        raise ConfigError(f"tokenizer {spec}: {e.strerror}; {way}") from None
    if path.name == "tokenizer.bytes":
        return Bytes()
    return from_json(path, content) if path.suffix == ".json" else from_model(path, content)


def from_model(path: pathlib.Path, content: bytes) -> SentencePiece:
    try:
        sp = sentencepiece.SentencePieceProcessor(model_proto=content)
        vocab = sp.vocab_size()
        if not vocab:
            raise ValueError("it is empty")
    except Exception as e:  # the library raises RuntimeError, ValueError and its own kinds, by version
        raise ConfigError(f"{path}: not a sentencepiece model ({first_line(e)}); restore it, or use bpe-N") from None
    if sp.eos_id() < 0:
        raise ConfigError(f"{path}: has no end-of-sentence piece to end documents with; train it with eos_id set")
    bos = sp.bos_id() if sp.bos_id() >= 0 else None
    kind = "sentencepiece" if sp.piece_to_id("\n") == sp.unk_id() else "bpe"  # a newline of its own: train_bpe made it
    return SentencePiece(f"{kind}-{vocab}", content, sp, vocab, sp.eos_id(), bos, hashlib.sha256(content).hexdigest())


def from_json(path: pathlib.Path, content: bytes) -> Json:
    import tokenizers  # only where a tokenizer.json is used

    try:
        tok = tokenizers.Tokenizer.from_str(content.decode("utf-8"))
    except Exception as e:
        raise ConfigError(f"{path}: not a tokenizer.json ({first_line(e)})") from None
    tok.encode_special_tokens = True  # text that spells a special token stays text
    tok.no_padding()
    tok.no_truncation()  # some hub files cut at 512 tokens, silently
    files, settings = {"tokenizer.json": content}, {}
    for name in ("tokenizer_config.json", "config.json"):  # the later one wins: the model's own ids
        beside = path.parent / name
        if beside.exists():
            files[name] = beside.read_bytes()
            try:
                settings.update(json.loads(files[name]))
            except ValueError as e:
                raise ConfigError(f"{beside}: not JSON ({first_line(e)})") from None

    def special(kind: str) -> int | None:
        i = settings.get(f"{kind}_token_id")
        if isinstance(i, list):  # Llama 3.1 lists several; the first ends a document
            i = i[0] if i else None
        if isinstance(i, int):
            return i
        token = settings.get(f"{kind}_token")
        token = token.get("content") if isinstance(token, dict) else token
        return tok.token_to_id(token) if isinstance(token, str) else None

    eod = special("eos")
    if eod is None:
        eod = next((i for i in map(tok.token_to_id, EOD_NAMES) if i is not None), None)
    if eod is None:
        raise ConfigError(f"{path}: no end-of-document token; put tokenizer_config.json with eos_token beside it")
    vocab = max(tok.get_vocab_size(with_added_tokens=True), int(settings.get("vocab_size") or 0), eod + 1)
    key = json.dumps([hashlib.sha256(content).hexdigest(), eod])  # config.json holds much that does not touch the ids
    return Json(f"json-{vocab}", files, tok, vocab, eod, special("bos"), hashlib.sha256(key.encode()).hexdigest())


def first_line(error: Exception) -> str:
    return (str(error).strip().splitlines() or [type(error).__name__])[0][:200]


# ---- training --------------------------------------------------------------------------------------------------------

def bpe_pieces(spec) -> int | None:
    """1024 of "bpe-1024"; none for any other tokenizer."""
    match = re.fullmatch(r"bpe-(\d+)", str(spec))
    return int(match[1]) if match else None


def train_bpe(texts, pieces: int, out=None) -> SentencePiece:
    """A sentencepiece BPE that gives code back as it was: no normalisation, spaces, digits and newlines kept, bytes for
    what it has not seen. `texts` are strings; `out` (a .model path) is written where given. Raises ConfigError."""
    model = io.BytesIO()
    seen = 0

    def lines():
        nonlocal seen
        for text in texts:
            for line in text.split("\n"):
                for piece in cut(line):
                    seen += 1
                    yield piece

    try:
        sentencepiece.SentencePieceTrainer.train(
            sentence_iterator=lines(), model_writer=model, model_type="bpe", vocab_size=pieces,
            normalization_rule_name="identity", remove_extra_whitespaces=False, byte_fallback=True, split_digits=True,
            allow_whitespace_only_pieces=True, add_dummy_prefix=False, user_defined_symbols=["\n"],
            max_sentence_length=LONGEST, unk_id=0, bos_id=1, eos_id=2, pad_id=-1, num_threads=1, minloglevel=3)
    except Exception as e:
        most, least = re.search(r"value <= (\d+)", str(e)), re.search(r"required_chars\. \d+ vs (\d+)", str(e))
        if not seen:
            why = "there is no text to train on"
        elif most:
            why = f"the text has enough for {most[1]} pieces only; ask for bpe-{most[1]} or give more text"
        elif least or pieces < 261:
            why = f"256 bytes, newline, specials and the text's characters need at least {least[1] if least else 261}"
        else:
            why = first_line(e)
        raise ConfigError(f"tokenizer bpe-{pieces}: {why}") from None
    if out is not None:
        pathlib.Path(out).write_bytes(model.getvalue())
    return from_model(pathlib.Path("tokenizer.model"), model.getvalue())


def cut(line: str):
    """A line in pieces of at most LONGEST bytes; characters stay whole. Empty lines and NULs teach nothing."""
    step = LONGEST // 4  # a character has at most 4 bytes
    return [piece for i in range(0, len(line), step) if (piece := line[i:i + step].replace("\0", " "))]
