"""Tokenizers: sentencepiece models, Hugging Face's tokenizer.json, raw bytes. All three have the same
interface.

    tokenizer = load_tokenizer("bytes" | "x.model" | "tokenizer.json" | a folder that holds one of them)
    tokenizer.encode(text)           ids
    tokenizer.encode_batch(texts)    one array of ids for each text
    tokenizer.decode(ids)            text
    tokenizer.save(folder)
    tokenizer.name, .vocab, .bos
    tokenizer.eod                    the id that ends a document
    tokenizer.fingerprint            sha256 of all that decides the ids

Special tokens that a text spells ("</s>", "<|endoftext|>") are encoded as plain text: a page that quotes one
must not end a document.
"""
import hashlib
import io
import json
import pathlib
import re
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
import sentencepiece

from config import ConfigError, Tree

if TYPE_CHECKING:  # imported only where a tokenizer.json is used
    import tokenizers

MAX_LINE_BYTES = 65536  # of sentencepiece's trainer, which drops longer lines silently: see split_long_line
FILE_NAMES = ("tokenizer.json", "tokenizer.model", "tokenizer.bytes")  # the first that a folder holds is read
CONFIG_NAMES = ("tokenizer_config.json", "config.json")  # name a tokenizer.json's special ids; the later wins
CHAT_TEMPLATE = "chat_template.jinja"  # writes conversations (chat.py); kept beside a tokenizer.json
EOD_NAMES = ("<|endoftext|>", "</s>", "<|end_of_text|>", "<eos>")  # of a tokenizer.json without such a file
BYTE_PIECES = 256
MIN_PIECES = BYTE_PIECES + 5  # of a BPE: the bytes, newline, unk, bos, eos, and one character


@dataclass(frozen=True)
class ByteTokenizer:
    """UTF-8 bytes are the ids 0..255; 256 ends a document."""
    name: str = "bytes"
    vocab: int = 257
    eod: int = 256
    bos: int | None = None
    fingerprint: str = hashlib.sha256(b"bytes, eod 256").hexdigest()

    def encode(self, text: str) -> list[int]:
        return list(text.encode("utf-8"))

    def encode_batch(self, texts: list[str]) -> list[np.ndarray]:  # each uint8 [tokens]
        return [np.frombuffer(text.encode("utf-8"), np.uint8) for text in texts]

    def decode(self, ids: Iterable[int]) -> str:
        text_bytes = bytes(token_id for token_id in ids if token_id < 256)
        return text_bytes.decode("utf-8", errors="replace")

    def save(self, folder: pathlib.Path | str) -> None:
        pathlib.Path(folder, "tokenizer.bytes").write_bytes(b"")


@dataclass(frozen=True)
class SentencePieceTokenizer:
    """A sentencepiece model."""
    name: str
    model: bytes  # content of the .model file
    processor: sentencepiece.SentencePieceProcessor
    vocab: int
    eod: int
    bos: int | None
    fingerprint: str

    def encode(self, text: str) -> list[int]:
        return self.processor.encode(text)

    def encode_batch(self, texts: list[str]) -> list[np.ndarray]:  # each int32 [tokens]
        if hasattr(self.processor, "encode_as_numpy"):  # sentencepiece >= 0.2.2: without a Python list of ids
            return self.processor.encode(texts, out_type="numpy", num_threads=1)
        return [np.array(ids, np.int32) for ids in self.processor.encode(texts, num_threads=1)]

    def decode(self, ids: Iterable[int]) -> str:
        return self.processor.decode([int(token_id) for token_id in ids])

    def save(self, folder: pathlib.Path | str) -> None:
        pathlib.Path(folder, "tokenizer.model").write_bytes(self.model)


@dataclass(frozen=True)
class JsonTokenizer:
    """A tokenizer.json of Hugging Face's tokenizers."""
    name: str
    files: dict[str, bytes]  # tokenizer.json, and those of CONFIG_NAMES and CHAT_TEMPLATE beside it
    processor: "tokenizers.Tokenizer"
    vocab: int
    eod: int
    bos: int | None
    fingerprint: str

    def encode(self, text: str) -> list[int]:
        return self.processor.encode(text, add_special_tokens=False).ids

    def encode_batch(self, texts: list[str]) -> list[np.ndarray]:  # each int32 [tokens]
        encodings = self.processor.encode_batch_fast(texts, add_special_tokens=False)
        return [np.array(encoding.ids, np.int32) for encoding in encodings]

    def decode(self, ids: Iterable[int]) -> str:
        return self.processor.decode([int(token_id) for token_id in ids], skip_special_tokens=True)

    def save(self, folder: pathlib.Path | str) -> None:
        for name, content in self.files.items():
            pathlib.Path(folder, name).write_bytes(content)


Tokenizer = ByteTokenizer | SentencePieceTokenizer | JsonTokenizer


def token_id(tok: Tokenizer, name: str) -> int | None:
    """The id of the token of this name; None if there is none."""
    if isinstance(tok, ByteTokenizer):
        return None
    if isinstance(tok, JsonTokenizer):
        return tok.processor.token_to_id(name)
    found = tok.processor.piece_to_id(name)
    return None if found == tok.processor.unk_id() else found


# ---- loading -----------------------------------------------------------------------------------------------

def load_tokenizer(spec: pathlib.Path | str) -> Tokenizer:
    """Loads "bytes", a .model, a tokenizer.json, or a folder that holds one. Raises ConfigError naming the
    file."""
    if str(spec) == "bytes":
        return ByteTokenizer()

    path = pathlib.Path(spec)
    if path.is_dir():
        found = [path / name for name in FILE_NAMES if (path / name).exists()]
        if not found:
            raise ConfigError(f"{path}: holds no tokenizer.json, tokenizer.model or tokenizer.bytes")
        path = found[0]
    try:
        content = path.read_bytes()
    except OSError as error:
        hint = "give bytes, a .model, a tokenizer.json or a folder of one"
        if bpe_pieces(spec):
            hint = "bpe-N is for data.path stdlib and for prepare_data"
        raise ConfigError(f"tokenizer {spec}: {error.strerror}; {hint}") from None

    if path.name == "tokenizer.bytes":
        return ByteTokenizer()
    return load_json(path, content) if path.suffix == ".json" else load_sentencepiece(path, content)


def load_sentencepiece(path: pathlib.Path, content: bytes) -> SentencePieceTokenizer:
    """Loads the content of a .model. `path` is for messages. Raises ConfigError if it is none, or has no end
    of sentence."""
    try:
        processor = sentencepiece.SentencePieceProcessor(model_proto=content)
        vocab = processor.vocab_size()
        if not vocab:
            raise ValueError("it is empty")
    except Exception as error:  # RuntimeError, ValueError or a class of the library: the version decides
        message = f"{path}: not a sentencepiece model ({first_line(error)}); restore it, or use bpe-N"
        raise ConfigError(message) from None
    if processor.eos_id() < 0:
        raise ConfigError(f"{path}: has no end-of-sentence piece to end documents with; "
                          "train it with eos_id set")

    is_ours = processor.piece_to_id("\n") != processor.unk_id()  # train_bpe makes a piece for the newline
    return SentencePieceTokenizer(
        name=f"bpe-{vocab}" if is_ours else f"sentencepiece-{vocab}",
        model=content,
        processor=processor,
        vocab=vocab,
        eod=processor.eos_id(),
        bos=processor.bos_id() if processor.bos_id() >= 0 else None,
        fingerprint=hashlib.sha256(content).hexdigest(),
    )


def load_json(path: pathlib.Path, content: bytes) -> JsonTokenizer:
    """Loads the content of a tokenizer.json, and the files beside `path` that name its special ids. Raises
    ConfigError if one of them cannot be read, or if no end-of-document token is found."""
    import tokenizers  # only where a tokenizer.json is used

    try:
        processor = tokenizers.Tokenizer.from_str(content.decode("utf-8"))
    except Exception as error:
        raise ConfigError(f"{path}: not a tokenizer.json ({first_line(error)})") from None
    processor.encode_special_tokens = True  # special tokens that a text spells are plain text
    processor.no_padding()
    processor.no_truncation()  # some files of the hub truncate to 512 tokens silently

    # special ids
    config_files = read_files(path.parent, CONFIG_NAMES)
    settings = merged_settings(path.parent, config_files)
    eod = special_id(processor, settings, "eos")
    if eod is None:
        known = [processor.token_to_id(name) for name in EOD_NAMES]
        eod = next((token_id for token_id in known if token_id is not None), None)
    if eod is None:
        raise ConfigError(f"{path}: no end-of-document token; "
                          "put tokenizer_config.json with eos_token beside it")

    size_of_model = int(settings.get("vocab_size") or 0)
    vocab = max(processor.get_vocab_size(with_added_tokens=True), size_of_model, eod + 1)
    # config.json holds much that does not change the ids, so it is not part of the fingerprint
    decides_ids = json.dumps([hashlib.sha256(content).hexdigest(), eod])
    return JsonTokenizer(
        name=f"json-{vocab}",
        files={"tokenizer.json": content, **config_files, **read_files(path.parent, [CHAT_TEMPLATE])},
        processor=processor,
        vocab=vocab,
        eod=eod,
        bos=special_id(processor, settings, "bos"),
        fingerprint=hashlib.sha256(decides_ids.encode()).hexdigest(),
    )


def read_files(folder: pathlib.Path, names: Iterable[str]) -> dict[str, bytes]:
    """The content of those of `names` that `folder` holds."""
    paths = [folder / name for name in names]
    return {path.name: path.read_bytes() for path in paths if path.exists()}


def merged_settings(folder: pathlib.Path, config_files: dict[str, bytes]) -> Tree:
    """The settings of all config files; the later file wins. Raises ConfigError naming a file that is not
    JSON."""
    settings: Tree = {}
    for name, content in config_files.items():
        try:
            settings.update(json.loads(content))
        except ValueError as error:
            raise ConfigError(f"{folder / name}: not JSON ({first_line(error)})") from None
    return settings


def special_id(processor: "tokenizers.Tokenizer", settings: Tree, kind: str) -> int | None:
    """The id of a special token, kind "eos" or "bos"; None if the settings do not name it."""
    token_id = settings.get(f"{kind}_token_id")
    if isinstance(token_id, list):  # Llama 3.1 lists several; the first one ends a document
        token_id = token_id[0] if token_id else None
    if isinstance(token_id, int):
        return token_id

    token = settings.get(f"{kind}_token")
    if isinstance(token, dict):
        token = token.get("content")
    return processor.token_to_id(token) if isinstance(token, str) else None


def first_line(error: Exception) -> str:
    """The first line of an error's message, at most 200 characters; the name of its class if it has none."""
    lines = str(error).strip().splitlines()
    return (lines or [type(error).__name__])[0][:200]


# ---- training ----------------------------------------------------------------------------------------------

def bpe_pieces(spec: pathlib.Path | str) -> int | None:
    """ "bpe-1024" -> 1024; None for any other tokenizer."""
    match = re.fullmatch(r"bpe-(\d+)", str(spec))
    return int(match[1]) if match else None


def train_bpe(
    texts: Iterable[str],
    pieces: int,
    out: pathlib.Path | str | None = None,
    sentinels: Sequence[str] = (),
) -> SentencePieceTokenizer:
    """Trains a sentencepiece BPE of `pieces` ids whose decoding gives the text back exactly: no
    normalization; spaces, digits and newlines are kept; unknown characters become bytes. Writes it to `out`,
    a .model path, if that is given. sentinels: special tokens, which no text spells.
    Raises ConfigError if the text is too short for so many pieces, or has more characters than pieces."""
    model = io.BytesIO()
    num_lines = 0

    def lines() -> Iterator[str]:
        nonlocal num_lines
        for text in texts:
            for line in text.split("\n"):
                for part in split_long_line(line):
                    num_lines += 1
                    yield part

    try:
        sentencepiece.SentencePieceTrainer.train(
            sentence_iterator=lines(),
            model_writer=model,
            model_type="bpe",
            vocab_size=pieces,
            normalization_rule_name="identity",
            remove_extra_whitespaces=False,
            byte_fallback=True,
            split_digits=True,
            allow_whitespace_only_pieces=True,
            add_dummy_prefix=False,
            user_defined_symbols=["\n"],
            control_symbols=list(sentinels),
            max_sentence_length=MAX_LINE_BYTES,
            unk_id=0,
            bos_id=1,
            eos_id=2,
            pad_id=-1,
            num_threads=1,
            minloglevel=3,
        )
    except Exception as error:
        reason = training_error(error, pieces, has_text=num_lines > 0)
        raise ConfigError(f"tokenizer bpe-{pieces}: {reason}") from None

    if out is not None:
        pathlib.Path(out).write_bytes(model.getvalue())
    return load_sentencepiece(pathlib.Path("tokenizer.model"), model.getvalue())


def training_error(error: Exception, pieces: int, has_text: bool) -> str:
    """What to tell the user of an error of sentencepiece's trainer."""
    most = re.search(r"value <= (\d+)", str(error))
    least = re.search(r"required_chars\. \d+ vs (\d+)", str(error))
    if not has_text:
        return "there is no text to train on"
    if most:
        return f"the text has enough for {most[1]} pieces only; ask for bpe-{most[1]} or give more text"
    if least or pieces < MIN_PIECES:
        needed = least[1] if least else MIN_PIECES
        return f"{BYTE_PIECES} bytes, newline, specials and the text's characters need at least {needed}"
    return first_line(error)


def split_long_line(line: str) -> list[str]:
    """Splits a line into parts of at most MAX_LINE_BYTES bytes, between characters; NUL becomes a space. An
    empty line gives none."""
    step = MAX_LINE_BYTES // 4  # a character has at most 4 bytes
    parts = [line[begin:begin + step] for begin in range(0, len(line), step)]
    return [part.replace("\0", " ") for part in parts]
