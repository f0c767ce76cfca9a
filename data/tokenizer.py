"""Tokenizers with one interface: sentencepiece models, Hugging Face's tokenizer.json, raw bytes.

    tokenizer = load_tokenizer("bytes" | "x.model" | "tokenizer.json" | a folder that holds one of them)
    tokenizer.encode(text)           ids
    tokenizer.encode_batch(texts)    one array of ids for each text
    tokenizer.decode(ids)            text
    tokenizer.save(folder)
    tokenizer.contract               the meaning of its ids (contract.py)
    tokenizer.name, .vocab, .bos, .eod, .fingerprint: from the contract

Control tokens spelled in a text ("</s>", "<|endoftext|>", "<think>") are encoded as plain text, whether or
not their file flags them as special: a page that quotes one must not end a document or start a turn.
"""
import hashlib
import io
import itertools
import json
import pathlib
import re
import shlex
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING

import numpy as np
import sentencepiece

from config import ConfigError
from data import contract
from data.contract import SpecialToken, TokenizerContract, Vocabulary
from data.tokenizer_files import OWN_FILES, read_files, without_ids, write_files

if TYPE_CHECKING:  # imported only for a tokenizer.json
    import tokenizers

MAX_LINE_BYTES = 65536  # sentencepiece's trainer silently drops longer lines: see split_long_line
OTHER_TOKENIZERS = {  # {first bytes of a file: its type}
    re.compile(rb"[A-Za-z0-9+/]+={0,2} \d+\r?\n"): "tiktoken's list of tokens",
    re.compile(rb"\d+ b?['\"].*['\"] \d+\r?\n"): "RWKV's list of tokens",
    re.compile(rb"\{\s*\"config\":\s*\{\s*\"pattern\":"): "Mistral's tekken.json",
    re.compile(rb"\x1f\x8b"): "a compressed file",
    re.compile(rb"#version: \d"): "a list of merges",
    re.compile(rb"\{\s*\"(\\.|[^\"\\])*\"\s*:\s*\d"): "a vocabulary without its merges",
    re.compile(rb"\[PAD\]\r?\n"): "a list of words, as of WordPiece",
}
HUB_NAME = re.compile(r"([\w-]+/)?[\w-]+(\.\d[\w-]*)*")  # not a path, and without a file extension
CONTROL, USER_DEFINED = 3, 4  # piece types in sentencepiece_model.proto
BY_LENGTH = 2  # protobuf wire type of length-delimited fields
PIECES, PIECE_TYPE = 1 << 3 | BY_LENGTH, 3 << 3  # tags of fields in a model and in a piece
BYTE_PIECES = 256
MIN_PIECES = BYTE_PIECES + 5  # for a BPE: the bytes, newline, unk, bos, eos, and one character
BYTES_CONTRACT = TokenizerContract(
    name="bytes",
    fingerprint=hashlib.sha256(b"bytes, eod 256").hexdigest(),
    vocab=257,
    end=SpecialToken(256, "<|endoftext|>", ("bytes",)),
    control=frozenset([256]),
)


class Contracted:
    """Shortcuts to the most used parts of a tokenizer's contract."""
    contract: TokenizerContract

    @property
    def name(self) -> str:
        return self.contract.name

    @property
    def vocab(self) -> int:
        """Upper bound of the ids, exclusive."""
        return self.contract.vocab

    @property
    def eod(self) -> int:
        """The end-of-document id."""
        return self.contract.end.id

    @property
    def bos(self) -> int | None:
        return self.contract.start.id if self.contract.start else None

    @property
    def fingerprint(self) -> str:
        """sha256 of everything that determines the ids."""
        return self.contract.fingerprint


@dataclass(frozen=True)
class ByteTokenizer(Contracted):
    """UTF-8 bytes are ids 0..255; 256 ends a document. `files` are those next to a tokenizer.bytes."""
    contract: TokenizerContract = BYTES_CONTRACT
    files: dict[str, bytes] = field(default_factory=dict)

    def encode(self, text: str) -> list[int]:
        return list(text.encode("utf-8"))

    def encode_batch(self, texts: list[str]) -> list[np.ndarray]:  # each uint8 [tokens]
        return [np.frombuffer(text.encode("utf-8"), np.uint8) for text in texts]

    def decode(self, ids: Iterable[int]) -> str:
        text_bytes = bytes(token_id for token_id in ids if token_id < 256)
        return text_bytes.decode("utf-8", errors="replace")

    def save(self, folder: pathlib.Path | str) -> None:
        write_files(folder, {"tokenizer.bytes": b"", **self.files})


@dataclass(frozen=True)
class SentencePieceTokenizer(Contracted):
    """A sentencepiece model. `files` are those next to it that name special tokens or hold templates."""
    contract: TokenizerContract
    model: bytes  # content of the .model
    processor: sentencepiece.SentencePieceProcessor
    files: dict[str, bytes] = field(default_factory=dict)

    def encode(self, text: str) -> list[int]:
        return self.processor.encode(text)

    def encode_batch(self, texts: list[str]) -> list[np.ndarray]:  # each int32 [tokens]
        if hasattr(self.processor, "encode_as_numpy"):  # sentencepiece >= 0.2.2: avoids a Python list of ids
            return self.processor.encode(texts, out_type="numpy", num_threads=1)
        return [np.array(ids, np.int32) for ids in self.processor.encode(texts, num_threads=1)]

    def decode(self, ids: Iterable[int]) -> str:
        return self.processor.decode([int(token_id) for token_id in ids])

    def save(self, folder: pathlib.Path | str) -> None:
        write_files(folder, {"tokenizer.model": self.model, **self.files})


@dataclass(frozen=True)
class JsonTokenizer(Contracted):
    """A tokenizer.json of Hugging Face's tokenizers.

    files: tokenizer.json, and those that read_files finds next to it. hidden: ids skipped in decoding, as in
    transformers for ids flagged as special. words: matches control tokens that are also words of the
    vocabulary, where text is cut; None if there are none.
    """
    contract: TokenizerContract
    files: dict[str, bytes]
    processor: "tokenizers.Tokenizer"
    hidden: frozenset[int]
    words: re.Pattern[str] | None = None

    def encode(self, text: str) -> list[int]:
        return self.encode_batch([text])[0].tolist()

    def encode_batch(self, texts: list[str]) -> list[np.ndarray]:  # each int32 [tokens]
        if self.words is not None:
            return [self._encode_cut(text, self.words) for text in texts]
        encodings = self.processor.encode_batch_fast(texts, add_special_tokens=False)
        return [np.array(encoding.ids, np.int32) for encoding in encodings]

    def _encode_cut(self, text: str, words: re.Pattern[str]) -> np.ndarray:
        """Encode the parts of a text, cut after the first character of each control token."""
        cuts = [0, *(match.start() + 1 for match in words.finditer(text)), len(text)]
        parts = [text[first:stop] for first, stop in itertools.pairwise(cuts)]
        encodings = self.processor.encode_batch_fast(parts, add_special_tokens=False)
        return np.concatenate([np.array(encoding.ids, np.int32) for encoding in encodings])

    def decode(self, ids: Iterable[int]) -> str:
        shown = [int(token_id) for token_id in ids if int(token_id) not in self.hidden]
        return self.processor.decode(shown, skip_special_tokens=False)

    def save(self, folder: pathlib.Path | str) -> None:
        write_files(folder, self.files)


Tokenizer = ByteTokenizer | SentencePieceTokenizer | JsonTokenizer


def continuation(tok: Tokenizer, before: Sequence[int], ids: Sequence[int]) -> str:
    """Decode ids that continue others. Decoded alone they would lose their leading space, if the tokenizer
    prepends one to a text and drops it again.
    """
    head = tok.decode(before)
    whole = tok.decode([*before, *ids])
    if whole.startswith(head):
        return whole.removeprefix(head)
    return tok.decode(ids)  # `before` ends inside a character


def token_id(tok: Tokenizer, name: str) -> int | None:
    """Return the id of the token with this name, or None."""
    if isinstance(tok, ByteTokenizer):
        return None
    if isinstance(tok, JsonTokenizer):
        return tok.processor.token_to_id(name)
    return piece_id(tok.processor, name)


def piece_id(processor: sentencepiece.SentencePieceProcessor, name: str) -> int | None:
    found = processor.piece_to_id(name)
    is_known = found != processor.unk_id() or processor.id_to_piece(found) == name
    return found if is_known else None


# ---- loading -----------------------------------------------------------------------------------------------

def load_tokenizer(spec: pathlib.Path | str, eod: str | None = None) -> Tokenizer:
    """Load "bytes", a .model, a tokenizer.json, or a folder that holds one. `eod` is the text or id of the
    end-of-document token, which defaults to the one in the files. Raises ConfigError naming the file."""
    path = pathlib.Path(spec)
    if path.is_dir():
        found = [path / name for name in OWN_FILES if (path / name).exists()]
        if not found:
            raise ConfigError(f"{path}: holds no tokenizer.json, tokenizer.model or tokenizer.bytes"
                              f"{json_hint(path)}")
        path = found[0]
    if str(spec) == "bytes" or path.name == "tokenizer.bytes":
        if eod not in (None, str(BYTES_CONTRACT.end.id), BYTES_CONTRACT.end.text):
            raise ConfigError(f"--eod: the tokenizer bytes ends documents with {BYTES_CONTRACT.end}, not "
                              f"with {eod}; leave it out")
        return ByteTokenizer(files=without_ids(read_files(path.parent)) if path.is_file() else {})
    try:
        content = path.read_bytes()
    except OSError as error:
        raise ConfigError(f"tokenizer {spec}: {error.strerror}; {tokenizer_hint(str(spec))}") from None

    for pattern, kind in OTHER_TOKENIZERS.items():
        if pattern.match(content):
            raise ConfigError(f"{path}: is {kind}, which is not supported; give a tokenizer.json with the "
                              "same ids: that of the model at the hub, or what transformers' AutoTokenizer "
                              "saves")
    beside = read_files(path.parent)
    load = load_json if path.suffix == ".json" else load_sentencepiece
    return load(path, content, beside, eod)


def tokenizer_hint(spec: str) -> str:
    """Suggest what to use instead of a missing tokenizer."""
    if bpe_pieces(spec):
        return "bpe-N is for data.path stdlib and for prepare_data"
    if spec.startswith("bpe"):
        return "write the number of ids, as in bpe-32000"
    hint = "give bytes, a .model, a tokenizer.json or a folder of one"
    if not HUB_NAME.fullmatch(spec):
        return hint
    name = spec.rpartition("/")[2]
    code = (f'from transformers import AutoTokenizer as A; A.from_pretrained("{spec}")'
            f'.save_pretrained("{name}")')
    return f"{hint}; that of a model at the hub is such a folder after python -c {shlex.quote(code)}"


def json_hint(folder: pathlib.Path) -> str:
    """Suggest how to get a tokenizer.json for a folder with a vocabulary and merges, or "" if it has none."""
    files = [folder / "vocab.json", folder / "merges.txt"]
    if not all(file.exists() for file in files):
        return ""
    if any((folder / name).exists() for name in contract.SETTINGS):  # they name its special tokens
        code = (f"from transformers import AutoTokenizer as A; A.from_pretrained({str(folder)!r})"
                f".save_pretrained({str(folder)!r})")
    else:
        code = (f"from tokenizers import ByteLevelBPETokenizer as B; B.from_file({str(files[0])!r}, "
                f"{str(files[1])!r}).save({str(folder / 'tokenizer.json')!r})")
    return f", but vocab.json and merges.txt; make one with python -c {shlex.quote(code)}"


def load_sentencepiece(path: pathlib.Path, content: bytes, beside: dict[str, bytes],
                       eod: str | None = None) -> SentencePieceTokenizer:
    """Load the content of a .model; `path` is for messages. `beside` are the files that may also name its
    special tokens. Raises ConfigError if it is not a model, lacks an end of sentence, or contradicts a
    file."""
    try:
        processor = sentencepiece.SentencePieceProcessor(model_proto=content)
        vocab = processor.vocab_size()
        if not vocab:
            raise ValueError("it is empty")
    except Exception as error:  # RuntimeError, ValueError or a library class, depending on the version
        reason = "" if "INTERNAL" in str(error) else f" ({first_line(error)})"  # quotes the library's source
        raise ConfigError(f"{path}: not a sentencepiece model{reason}; give one, a tokenizer.json or a "
                          "folder that holds one of them, or use bpe-N") from None
    if processor.eos_id() < 0:
        raise ConfigError(f"{path}: has no end-of-sentence piece to end documents with; "
                          "train it with eos_id set")

    # special ids
    vocabulary = Vocabulary(
        path=path,
        size=vocab,
        get_id=lambda name: piece_id(processor, name),
        get_text=lambda number: processor.id_to_piece(number) if 0 <= number < vocab else None,
    )
    settings = contract.read_settings(path.parent, beside)
    end = contract.end_token(vocabulary, settings, processor.eos_id(), eod)
    processor = sentencepiece.SentencePieceProcessor(model_proto=without_marks(content, processor))
    bos = processor.bos_id()
    pad = processor.pad_id()

    files = without_ids(beside)
    has_newline = processor.piece_to_id("\n") != processor.unk_id()
    is_ours = has_newline and processor.get_score(vocab - 1).is_integer()  # ranks, like BPE scores
    return SentencePieceTokenizer(
        contract=TokenizerContract(
            name=f"bpe-{vocab}" if is_ours else f"sentencepiece-{vocab}",
            fingerprint=hashlib.sha256(content).hexdigest(),
            vocab=vocab,
            end=end,
            start=vocabulary.token(bos, [path.name]) if bos >= 0 else None,
            pad=vocabulary.token(pad, [path.name]) if pad >= 0 else None,
            unknown=processor.unk_id(),
            control=frozenset(number for number in range(vocab) if processor.is_control(number)),
        ),
        model=content,
        processor=processor,
        files=files if eod is None else contract.set_end_token(files, end),
    )


def without_marks(content: bytes, processor: sentencepiece.SentencePieceProcessor) -> bytes:
    """Turn markup pieces of a .model into control pieces, which text never produces. Gemma's <start_of_turn>
    is a user-defined symbol, which would be matched in any text."""
    changed = bytearray(content)
    for number, end in enumerate(piece_ends(content)):
        # the type of a piece comes last in its message
        is_symbol = content[end - 2:end] == bytes([PIECE_TYPE, USER_DEFINED])
        if is_symbol and contract.is_markup(processor.id_to_piece(number)):
            changed[end - 1] = CONTROL
    return bytes(changed)


def piece_ends(content: bytes) -> Iterator[int]:
    """Yield where each piece of a .model ends: the messages of field 1, in the order of their ids."""
    place = 0
    while place < len(content):
        field_and_kind = content[place]
        number, place = read_varint(content, place + 1)
        if field_and_kind & 7 == BY_LENGTH:  # otherwise the number is the value itself
            place += number
        if field_and_kind == PIECES:
            yield place


def read_varint(content: bytes, place: int) -> tuple[int, int]:
    """Read a protobuf varint. Return it, and the position after it."""
    number = shift = 0
    while True:
        number |= (content[place] & 127) << shift
        place, shift = place + 1, shift + 7
        if content[place - 1] < 128:
            return number, place


def load_json(path: pathlib.Path, content: bytes, beside: dict[str, bytes],
              eod: str | None = None) -> JsonTokenizer:
    """Load the content of a tokenizer.json; `path` is for messages. `beside` are the files that name its
    special tokens. Raises ConfigError if one of them cannot be read, or if they disagree on the
    end-of-document token."""
    import tokenizers  # only for a tokenizer.json

    try:
        processor = tokenizers.Tokenizer.from_str(content.decode("utf-8"))
    except Exception as error:
        raise ConfigError(f"{path}: not a tokenizer.json ({first_line(error)})") from None
    dropout = getattr(processor.model, "dropout", None)
    if dropout:
        raise ConfigError(f"{path}: its model has dropout {dropout}, with which the same text has other "
                          "tokens each time, drawn at random; set it to null")
    processor.no_padding()
    processor.no_truncation()  # some files on the hub silently truncate to 512 tokens

    # special ids
    ids = processor.get_vocab(with_added_tokens=True).values()
    vocabulary = Vocabulary(
        path=path,
        size=max(ids, default=-1) + 1,  # some files skip ids, so there are fewer
        get_id=processor.token_to_id,
        get_text=lambda number: processor.id_to_token(number) if number >= 0 else None,
    )
    settings = contract.read_settings(path.parent, beside)
    end = contract.end_token(vocabulary, settings, None, eod)
    added = processor.get_added_tokens_decoder()
    named = [contract.first_named(kind, settings, vocabulary) for kind in ("bos", "pad")]
    # an id that is a plain word here comes from another model's config.json
    start, pad = (token if token and token.id in added else None for token in named)

    # ids that text never produces
    hidden = frozenset({number for number, token in added.items() if token.special} | {end.id})
    marked = {number for number, token in added.items() if contract.is_markup(token.content)}
    control = hidden | marked | {token.id for token in (end, start, pad) if token}
    processor.add_special_tokens([added[number] for number in sorted(control & added.keys())])
    processor.encode_special_tokens = True  # encode spelled ones as plain text

    # config.json holds much that does not affect the ids, so it is left out of the fingerprint
    decides_ids = json.dumps([hashlib.sha256(content).hexdigest(), end.id])
    files = {"tokenizer.json": content, **beside}
    tok = JsonTokenizer(
        contract=TokenizerContract(
            name=f"json-{vocabulary.size}",
            fingerprint=hashlib.sha256(decides_ids.encode()).hexdigest(),
            vocab=vocabulary.size,
            end=end,
            start=start,
            pad=pad,
            unknown=unknown_id(processor, content),
            control=control,
            model_vocab=settings.get("config.json", {}).get("vocab_size"),
        ),
        files=files if eod is None else contract.set_end_token(files, end),
        processor=processor,
        hidden=hidden,
    )
    probed = {number: processor.id_to_token(number) for number in control - {tok.contract.unknown}}
    words = contract.spelled_tokens(probed, tok.encode_batch)
    contract.check_words(path if eod is None else "--eod", set(words) - added.keys(), probed)
    if words:
        tok = replace(tok, words=re.compile("|".join(re.escape(probed[number]) for number in words)))
    return tok


def unknown_id(processor: "tokenizers.Tokenizer", content: bytes) -> int | None:
    """Return the id for unknown text in a tokenizer.json, or None if it names none."""
    if hasattr(processor.model, "unk_token"):
        name = processor.model.unk_token
        return processor.token_to_id(name) if name else None
    return json.loads(content)["model"].get("unk_id")  # Unigram


def first_line(error: Exception) -> str:
    """Return the first line of an error's message, up to 200 characters, or its class name if empty."""
    lines = str(error).strip().splitlines()
    return (lines or [type(error).__name__])[0][:200]


# ---- training ----------------------------------------------------------------------------------------------

def bpe_pieces(spec: pathlib.Path | str) -> int | None:
    """Parse "bpe-1024" into 1024. Return None for any other tokenizer."""
    match = re.fullmatch(r"bpe-(\d+)", str(spec))
    return int(match[1]) if match else None


def train_bpe(
    texts: Iterable[str],
    pieces: int,
    out: pathlib.Path | str | None = None,
    sentinels: Sequence[str] = (),
) -> SentencePieceTokenizer:
    """Train a sentencepiece BPE of `pieces` ids that decodes exactly: no normalization, spaces, digits and
    newlines are kept, unknown characters become bytes. Write it to `out`, a .model path, if given.
    `sentinels` are special tokens, never spelled by text. Raises ConfigError if the text is too short for
    that many pieces, or has more characters than pieces, and whatever reading `texts` raises."""
    model = io.BytesIO()
    num_lines = 0

    failed: list[Exception] = []  # to read the texts, which sentencepiece would not pass on

    def lines() -> Iterator[str]:
        nonlocal num_lines
        try:
            for text in texts:
                for line in text.split("\n"):
                    for part in split_long_line(line):
                        num_lines += 1
                        yield part
        except Exception as error:
            failed.append(error)

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
        if not failed:
            reason = training_error(error, pieces, has_text=num_lines > 0)
            raise ConfigError(f"tokenizer bpe-{pieces}: {reason}") from None
    if failed:
        raise failed[0]

    if out is not None:
        pathlib.Path(out).write_bytes(model.getvalue())
    return load_sentencepiece(pathlib.Path("tokenizer.model"), model.getvalue(), beside={})


def training_error(error: Exception, pieces: int, has_text: bool) -> str:
    """Explain why sentencepiece's trainer failed."""
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
    """Split a line between characters into parts of at most MAX_LINE_BYTES bytes; NUL becomes a space. An
    empty line has no parts."""
    step = MAX_LINE_BYTES // 4  # a character has at most 4 bytes
    parts = [line[begin:begin + step] for begin in range(0, len(line), step)]
    return [part.replace("\0", " ") for part in parts]
