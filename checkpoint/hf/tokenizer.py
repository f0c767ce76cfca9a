"""Write tokenizer.json for one of our tokenizers, so that AutoTokenizer returns exactly the same ids.

A sentencepiece BPE merges the two neighbours whose union has the best score, anywhere in the text. The
`tokenizers` package merges the pair that comes first in a list. If the list has a pair for every way to split
a piece, ordered by the score of the piece, both do the same, provided that the model neither normalises the
text nor adds a space in front.

Every other tokenizer is refused, and check_exact compares the ids on real lines before the file is used.
transformers' own converter ignores the model's settings: for the same .model file, LlamaTokenizer returns
different ids in different versions.
"""
import itertools
import json
import struct
import sysconfig
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import NamedTuple

from checkpoint.hf.families.table import FAMILIES
from config import Tree

SPACE = "▁"  # how a piece writes a space
PROBES = (
    "",
    " ",
    "  two  spaces  ",
    "\ttab",
    "trailing \n",
    "\n\n\n",
    "\r\n",
    "naïve café Ünïcödé",
    "漢字かな交じり文",
    "한국어",
    "👩‍👩‍👧 🏳️‍🌈",
    "a\u0301 \u00a0 \u3000 \u200b",
    "0123456789 3.14e-10",
    "<s>x</s><unk><0x0A>",
    f"{SPACE}literal{SPACE}{SPACE}",
    "<|endoftext|>",
    "\x00\x01\x7f",
    "Ａ ﬁ ½ Ⅷ",
)
ADDS_TOKENS = ("TemplateProcessing", "BertProcessing", "RobertaProcessing")  # post-processors
Encode = Callable[[str], list[int]]  # text -> ids


class ExportRefused(ValueError):
    """This tokenizer has no exact tokenizer.json. The message gives the reason."""


# ---- protobuf ----------------------------------------------------------------------------------------------

class Message(NamedTuple):
    """A protobuf message as {field number: value}. Keeps the last value of a repeated field."""
    numbers: dict[int, int]
    strings: dict[int, bytes]  # texts, messages, and fixed-width numbers


# protobuf wire types
VARINT = 0
LENGTH_DELIMITED = 2
FIXED_SIZES = {1: 8, 5: 4}  # {wire type: bytes}


def protobuf_fields(message: bytes) -> Iterator[tuple[int, int | bytes]]:
    """Yield (field number, value) of a protobuf message.

    Enough to read a .model file without the protobuf package.
    """
    offset = 0

    def varint() -> int:
        nonlocal offset
        value = 0
        shift = 0
        while True:
            byte = message[offset]
            offset += 1
            value |= (byte & 127) << shift
            shift += 7
            if byte < 128:  # the last byte
                return value

    while offset < len(message):
        number, wire_type = divmod(varint(), 8)
        if wire_type == VARINT:
            yield number, varint()
        else:
            size = varint() if wire_type == LENGTH_DELIMITED else FIXED_SIZES[wire_type]
            yield number, message[offset:offset + size]
            offset += size


def parse_message(message: bytes) -> Message:
    """Parse a protobuf message. The last value of a repeated field counts."""
    parsed = Message({}, {})
    for number, value in protobuf_fields(message):
        if isinstance(value, int):
            parsed.numbers[number] = value
        else:
            parsed.strings[number] = value
    return parsed


# ---- sentencepiece -----------------------------------------------------------------------------------------

# Types of pieces. These numbers, and the field numbers below, are from sentencepiece_model.proto.
NORMAL, UNKNOWN, CONTROL, USER, UNUSED, BYTE = range(1, 7)


class SentencePiece(NamedTuple):
    text: str
    score: float
    kind: int  # NORMAL, ...


class SentencePieceModel(NamedTuple):
    """The relevant parts of a .model file."""
    pieces: list[SentencePiece]
    trainer: Message
    normalizer: Message


def parse_sentencepiece(model: bytes) -> SentencePieceModel:
    """Parse a .model file."""
    pieces: list[SentencePiece] = []
    trainer: Message | None = None
    normalizer: Message | None = None
    for number, value in protobuf_fields(model):
        if not isinstance(value, bytes):
            continue
        if number == 1:
            pieces.append(parse_piece(value))
        elif number == 2 and trainer is None:
            trainer = parse_message(value)
        elif number == 3 and normalizer is None:
            normalizer = parse_message(value)
    empty = Message({}, {})
    return SentencePieceModel(pieces, trainer or empty, normalizer or empty)


def parse_piece(message: bytes) -> SentencePiece:
    piece = parse_message(message)
    score, = struct.unpack("<f", piece.strings.get(2, b"\0\0\0\0"))
    return SentencePiece(piece.strings[1].decode(), score, piece.numbers.get(3, NORMAL))


def puts_space_in_front(model: SentencePieceModel) -> bool:
    """Return whether texts are read as if they began with a space (add_dummy_prefix, which is the
    default)."""
    return bool(model.normalizer.numbers.get(3, 1))


def check_exportable(model: SentencePieceModel) -> None:
    """Raise ExportRefused if `tokenizers` cannot reproduce the ids of this model."""
    trainer = model.trainer.numbers
    normalizer = model.normalizer.numbers
    has_unused = any(piece.kind == UNUSED for piece in model.pieces)
    user_symbols = [piece.text for piece in model.pieces if piece.kind == USER]
    space_in_symbol = any(SPACE in text or " " in text for text in user_symbols)
    reasons = (  # (whether it applies, why the model is refused)
        (trainer.get(3, 1) != 2, "it is not a BPE model"),
        (model.normalizer.strings.get(2), "it normalises the text"),
        (puts_space_in_front(model) and user_symbols,
         "it puts a space in front of the text (add_dummy_prefix) and has symbols of the user's"),
        (normalizer.get(4, 1), "it drops repeated spaces"),
        (not normalizer.get(5, 1), "it keeps spaces as they are"),
        (trainer.get(24), "it puts spaces at the end of pieces"),
        (has_unused, "it has unused pieces"),
        (space_in_symbol, "a symbol of the user's has a space in it"),
    )
    for refused, why in reasons:
        if refused:
            raise ExportRefused(why)


def from_sentencepiece(data: bytes) -> Tree:
    """Return tokenizer.json for a .model file. Raises ExportRefused."""
    model = parse_sentencepiece(data)
    check_exportable(model)
    unknown = next(piece.text for piece in model.pieces if piece.kind == UNKNOWN)
    num_bytes = sum(piece.kind == BYTE for piece in model.pieces)
    added = [
        token(number, piece.text, special=piece.kind != USER)
        for number, piece in enumerate(model.pieces)
        if piece.kind in (UNKNOWN, CONTROL, USER)
    ]
    decoders = [
        {"type": "Replace", "pattern": {"String": SPACE}, "content": " "},
        {"type": "ByteFallback"},
        {"type": "Fuse"},
    ]
    normalizers = [{"type": "Replace", "pattern": {"String": " "}, "content": SPACE}]
    if puts_space_in_front(model):
        normalizers.insert(0, {"type": "Prepend", "prepend": SPACE})
        decoders.append({"type": "Strip", "content": " ", "start": 1, "stop": 0})
    return tokenizer_json(
        added_tokens=added,
        normalizer={"type": "Sequence", "normalizers": normalizers},
        pre_tokenizer=None,
        decoder={"type": "Sequence", "decoders": decoders},
        vocab={piece.text: number for number, piece in enumerate(model.pieces)},
        merges=list_merges(model.pieces),
        unknown=unknown,
        byte_fallback=num_bytes == 256,
    )


def list_merges(pieces: list[SentencePiece]) -> list[str]:
    """Return ["LEFT RIGHT"] for every way to split a piece into two pieces, best score of the piece first."""
    scores = {piece.text: piece.score for piece in pieces if piece.kind == NORMAL}
    merges: list[tuple[float, str]] = []
    for text, score in scores.items():
        for middle in range(1, len(text)):
            left = text[:middle]
            right = text[middle:]
            if left in scores and right in scores:
                merges.append((-score, f"{left} {right}"))
    merges.sort(key=lambda merge: merge[0])  # only by score: pairs with equal scores keep their order
    return [pair for _, pair in merges]


# ---- raw bytes ---------------------------------------------------------------------------------------------

def from_bytes(eod: int, name: str = "<|endoftext|>") -> Tree:
    """Return tokenizer.json for a tokenizer whose ids 0 to 255 are the bytes of UTF-8.

    It is a byte-level BPE without merges. `eod` and `name` are id and text of the end-of-document token.
    """
    # GPT-2's letters for bytes: the byte itself if printable, otherwise a letter from 256 on.
    shown = [byte for byte in range(256) if 33 <= byte <= 126 or 161 <= byte <= 172 or byte >= 174]
    hidden = [byte for byte in range(256) if byte not in shown]
    letters = {byte: chr(byte) for byte in shown}
    letters |= {byte: chr(256 + position) for position, byte in enumerate(hidden)}

    vocab = {letters[byte]: byte for byte in range(256)}
    vocab[name] = eod
    level = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": False, "use_regex": False}
    return tokenizer_json(
        added_tokens=[token(eod, name, special=True)],
        normalizer=None,
        pre_tokenizer=level,
        decoder=level,
        vocab=vocab,
        merges=[],
        unknown=None,
        byte_fallback=False,
    )


# ---- the files ---------------------------------------------------------------------------------------------

def token(number: int, text: str, special: bool) -> Tree:
    """Return an entry of added_tokens. `number` is its id."""
    return {
        "id": number,
        "content": text,
        "single_word": False,
        "lstrip": False,
        "rstrip": False,
        "normalized": False,
        "special": special,
    }


def tokenizer_json(
    *,
    added_tokens: list[Tree],
    normalizer: Tree | None,
    pre_tokenizer: Tree | None,
    decoder: Tree,
    vocab: dict[str, int],
    merges: list[str],
    unknown: str | None,
    byte_fallback: bool,
) -> Tree:
    """Return the content of tokenizer.json for a BPE."""
    model = {
        "type": "BPE",
        "dropout": None,
        "unk_token": unknown,
        "continuing_subword_prefix": None,
        "end_of_word_suffix": None,
        "fuse_unk": True,
        "byte_fallback": byte_fallback,
        "ignore_merges": False,
        "vocab": vocab,
        "merges": merges,
    }
    return {
        "version": "1.0",
        "truncation": None,
        "padding": None,
        "added_tokens": added_tokens,
        "normalizer": normalizer,
        "pre_tokenizer": pre_tokenizer,
        "post_processor": None,
        "decoder": decoder,
        "model": model,
    }


def with_start(post_processor: Tree | None, start: tuple[str, int] | None) -> Tree | None:
    """Return the post-processor with `start`, (text, id) or None, as the only token put before a text."""
    steps = [post_processor] if post_processor else []
    if post_processor and post_processor["type"] == "Sequence":
        steps = post_processor["processors"]
    template = {"type": "TemplateProcessing", "single": [part_of("A", 0)],
                "pair": [part_of("A", 0), part_of("B", 1)], "special_tokens": {}}
    others = [step for step in steps if step["type"] not in ADDS_TOKENS]
    template = next((step for step in steps if step["type"] == "TemplateProcessing"), template)

    made = {**template, "special_tokens": dict(template["special_tokens"])}
    for name in ("single", "pair"):
        parts = list(itertools.dropwhile(lambda part: "SpecialToken" in part, template[name]))
        if start:
            text, token_id = start
            parts.insert(0, {"SpecialToken": {"id": text, "type_id": 0}})
            made["special_tokens"][text] = {"id": text, "ids": [token_id], "tokens": [text]}
        made[name] = parts
    return {"type": "Sequence", "processors": [*others, made]}


def part_of(name: str, type_id: int) -> Tree:
    """Return the entry of a text in a post-processor's template."""
    return {"Sequence": {"id": name, "type_id": type_id}}


def tokenizer_config(model_type: str, bos: str | None, eos: str, unknown: str | None) -> Tree:
    """Return the content of tokenizer_config.json. `bos`, `eos` and `unknown` are texts of the special
    tokens."""
    config: Tree = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "bos_token": bos,
        "eos_token": eos,
        "unk_token": unknown,
        "split_special_tokens": True,  # "</s>" in a text stays text, as in our tokenizers
        "clean_up_tokenization_spaces": False,
        "model_max_length": 10**30,
        **FAMILIES[model_type].tokenizer_keys,
    }
    return {key: value for key, value in config.items() if value is not None}


# ---- the comparison ----------------------------------------------------------------------------------------

def sample_lines(count: int = 1000) -> list[str]:
    """Return texts to compare on: the probes, lines of the standard library's source, then one whole file."""
    texts = list(PROBES)
    files = sorted(Path(sysconfig.get_paths()["stdlib"]).glob("*.py"))
    for file in files:
        text = file.read_text(encoding="utf-8", errors="replace")
        texts += text.splitlines(keepends=True)[:100]
        if len(texts) >= count:
            return [*texts[:count], text]
    return texts


def first_difference(ours: Encode, theirs: Encode, without: Iterable[str] = ()) -> str | None:
    """Return the first sample line on which the ids differ, or None.

    Skips lines that contain one of `without`.
    """
    for text in sample_lines():
        if any(word in text for word in without):
            continue
        if list(ours(text)) != list(theirs(text)):
            return text
    return None


def load_encoder(text: str) -> Encode:
    """Load a tokenizer.json with the tokenizers package.

    Special tokens are treated as text.
    """
    import tokenizers  # imported only if a file is written

    tokenizer = tokenizers.Tokenizer.from_str(text)
    tokenizer.encode_special_tokens = True
    return lambda line: tokenizer.encode(line, add_special_tokens=False).ids


def check_exact(tokenizer: Tree, ours: Encode) -> str:
    """Return the text of tokenizer.json after comparing its ids with ours.

    Raises ExportRefused if an id differs.
    """
    text = json.dumps(tokenizer, ensure_ascii=False)
    line = first_difference(ours, load_encoder(text))
    if line is not None:
        raise ExportRefused(f"the ids differ on {line[:60]!r}")
    return text
