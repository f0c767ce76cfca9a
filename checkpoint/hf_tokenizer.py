"""tokenizer.json for a tokenizer of ours, so that AutoTokenizer gives the same ids; never one that is only nearly right.

A sentencepiece BPE merges the neighbours whose union has the best score, wherever in the text; `tokenizers` merges the
pair that stands first in a list. With one pair for every way to split a piece, ordered by the piece's score, both do the
same, as long as the model neither normalises nor adds a space in front. Everything else is refused, and `difference`
compares the ids on real lines before anyone sees the file. (transformers' own converter ignores these settings: one
version's LlamaTokenizer differs from the next one's on the same .model.)
"""
import json
import shutil
import struct
import sysconfig
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path

# what belongs to a tokenizer in a Hugging Face folder
CARRIED = ("tokenizer.json", "tokenizer.model", "tokenizer_config.json", "special_tokens_map.json",
           "added_tokens.json", "vocab.json", "merges.txt", "chat_template.jinja", "chat_template.json",
           "generation_config.json")
NORMAL, UNKNOWN, CONTROL, USER, UNUSED, BYTE = range(1, 7)  # kinds of sentencepiece pieces
SPACE = "▁"  # how a piece writes a space
PROBES = ("", " ", "  two  spaces  ", "\ttab", "trailing \n", "\n\n\n", "\r\n", "naïve café Ünïcödé", "漢字かな交じり文", "한국어",
          "👩‍👩‍👧 🏳️‍🌈", "a\u0301 \u00a0 \u3000 \u200b", "0123456789 3.14e-10",
          "<s>x</s><unk><0x0A>", f"{SPACE}literal{SPACE}{SPACE}",
          "<|endoftext|>", "\x00\x01\x7f", "Ａ ﬁ ½ Ⅷ")


def carry(source: Path, target: Path) -> None:
    """The files that belong to a tokenizer, where `source` is a folder that has them and `target` lacks
    them."""
    for name in CARRIED:
        if (source / name).is_file() and not (target / name).exists():
            shutil.copyfile(source / name, target / name)


class Refused(ValueError):
    """This tokenizer has no exact tokenizer.json; says why."""


# ---- sentencepiece ---------------------------------------------------------------------------------------------------

def fields(message: bytes) -> Iterator[tuple[int, int | bytes]]:
    """(field number, value) of a protobuf message: enough to read a .model without the protobuf package."""
    at = 0

    def varint() -> int:
        nonlocal at
        value = shift = 0
        while True:
            byte = message[at]
            at += 1
            value |= (byte & 127) << shift
            shift += 7
            if byte < 128:
                return value

    while at < len(message):
        number, wire = divmod(varint(), 8)
        if wire == 0:
            yield number, varint()
        else:
            size = varint() if wire == 2 else {1: 8, 5: 4}[wire]
            yield number, message[at:at + size]
            at += size


def from_sentencepiece(model: bytes) -> dict:
    """tokenizer.json of a .model file. Raises Refused."""
    top = list(fields(model))
    trainer, normalizer = (dict(fields(next((v for n, v in top if n == number), b""))) for number in (2, 3))
    pieces = []  # (text, score, kind); numbers from sentencepiece_model.proto
    for message in (dict(fields(v)) for n, v in top if n == 1):
        pieces.append((message[1].decode(), struct.unpack("<f", message.get(2, b"\0\0\0\0"))[0], message.get(3, NORMAL)))
    for wrong, why in ((trainer.get(3, 1) != 2, "it is not a BPE"), (normalizer.get(2), "it normalises the text"),
                       (normalizer.get(3, 1), "it puts a space in front of the text (add_dummy_prefix)"),
                       (normalizer.get(4, 1), "it drops repeated spaces"), (not normalizer.get(5, 1), "it keeps spaces as they are"),
                       (trainer.get(24), "it puts spaces at the end of pieces"),
                       (any(k == UNUSED for *_, k in pieces), "it has unused pieces"),
                       (any(k == USER and {SPACE, " "} & {*p} for p, _, k in pieces), "a symbol of the user's has a space in it")):
        if wrong:
            raise Refused(why)
    score = {p: s for p, s, kind in pieces if kind == NORMAL}
    merges = [(-score[p], p[:i], p[i:]) for p in score for i in range(1, len(p)) if p[:i] in score and p[i:] in score]
    unknown = next(p for p, _, kind in pieces if kind == UNKNOWN)
    bytes_ = sum(kind == BYTE for *_, kind in pieces) == 256
    added = [token(i, p, kind != USER) for i, (p, _, kind) in enumerate(pieces) if kind in (UNKNOWN, CONTROL, USER)]
    return tokenizer_json(
        added, {"type": "Replace", "pattern": {"String": " "}, "content": SPACE}, None,
        {"type": "Sequence", "decoders": [{"type": "Replace", "pattern": {"String": SPACE}, "content": " "},
                                          {"type": "ByteFallback"}, {"type": "Fuse"}]},
        {p: i for i, (p, *_) in enumerate(pieces)}, [f"{a} {b}" for _, a, b in sorted(merges, key=lambda m: m[0])], unknown, bytes_)


# ---- raw bytes -------------------------------------------------------------------------------------------------------

def from_bytes(eod: int, name: str = "<|endoftext|>") -> dict:
    """tokenizer.json of UTF-8 bytes as ids 0..255, and `eod`: a byte-level BPE without merges."""
    shown = [b for b in range(256) if 33 <= b <= 126 or 161 <= b <= 172 or b >= 174]  # GPT-2's letters for the bytes
    hidden = [b for b in range(256) if b not in shown]
    letters = {**{b: chr(b) for b in shown}, **{b: chr(256 + i) for i, b in enumerate(hidden)}}
    level = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": False, "use_regex": False}
    return tokenizer_json([token(eod, name, True)], None, level, level, {letters[b]: b for b in range(256)} | {name: eod}, [], None, False)


def token(i: int, text: str, special: bool) -> dict:
    return {"id": i, "content": text, "single_word": False, "lstrip": False, "rstrip": False, "normalized": False, "special": special}


def tokenizer_json(added, normalizer, split, decoder, vocab, merges, unknown, byte_fallback) -> dict:
    return {"version": "1.0", "truncation": None, "padding": None, "added_tokens": added, "normalizer": normalizer,
            "pre_tokenizer": split, "post_processor": None, "decoder": decoder,
            "model": {"type": "BPE", "dropout": None, "unk_token": unknown, "continuing_subword_prefix": None,
                      "end_of_word_suffix": None, "fuse_unk": True, "byte_fallback": byte_fallback, "ignore_merges": False,
                      "vocab": vocab, "merges": merges}}


def settings(kind: str, bos: str | None, eos: str, unknown: str | None) -> dict:
    """tokenizer_config.json for a model of family `kind`. split_special_tokens: a text that spells "</s>" stays text, as here."""
    out = {"tokenizer_class": "PreTrainedTokenizerFast", "bos_token": bos, "eos_token": eos, "unk_token": unknown,
           "split_special_tokens": True, "clean_up_tokenization_spaces": False, "model_max_length": 10**30}
    if kind == "qwen2":  # transformers 5 silently puts Qwen's own splitting in place of any tokenizer.json beside a qwen2 model
        out["auto_map"] = {"AutoTokenizer": [None, "tokenizer.PreTrainedTokenizerFast"]}  # unless it says that it has its own code
    return {k: v for k, v in out.items() if v is not None}


# ---- proof -----------------------------------------------------------------------------------------------------------

def lines(count: int = 1000) -> list[str]:
    """Text to compare on: the probes, then lines of the standard library's source, then one whole file."""
    out, files = list(PROBES), sorted(Path(sysconfig.get_paths()["stdlib"]).glob("*.py"))
    for file in files:
        text = file.read_text(encoding="utf-8", errors="replace")
        out += text.splitlines(keepends=True)[:100]
        if len(out) >= count:
            return [*out[:count], text]
    return out


def difference(ours: Callable[[str], list[int]], theirs: Callable[[str], list[int]], without: Iterable[str] = ()) -> str | None:
    """The first of `lines` on which the ids differ; None: they never do. Lines that hold one of `without` are left out."""
    return next((text for text in lines() if not any(w in text for w in without) and list(ours(text)) != list(theirs(text))), None)


def encoder(text: str) -> Callable[[str], list[int]]:
    """A tokenizer.json as the tokenizers package reads it, special tokens taken as text."""
    import tokenizers  # only where one is written

    made = tokenizers.Tokenizer.from_str(text)
    made.encode_special_tokens = True
    return lambda line: made.encode(line, add_special_tokens=False).ids


def exact(made: dict, ours: Callable[[str], list[int]]) -> str:
    """tokenizer.json as text, compared with `ours`. Raises Refused where an id differs."""
    text = json.dumps(made, ensure_ascii=False)
    where = difference(ours, encoder(text))
    if where is not None:
        raise Refused(f"the ids differ on {where[:60]!r}")
    return text
