"""How many bytes of text each token id stands for: what bits per byte divides by, exactly.

Decoding would not do: a validation window may begin and end within a character, of which decoders make a
replacement of three bytes. So the length comes from the vocabulary: of byte-level BPE (one character of a
token's name is one byte), of sentencepiece and its tokenizer.json (a lower block is a space, <0x0A> one
byte). Special tokens stand for no text. Any other kind (WordPiece) is decoded one id at a time, which is as
close as it comes. Where a tokenizer normalises text, the bytes are those of the normalised text.
"""
import json

import numpy as np

from data.tokenizer import Bytes, SentencePiece, Tokenizer

SPACE = "\u2581"


def lengths(tok: Tokenizer) -> np.ndarray:  # int64 [2, vocab]
    """UTF-8 bytes of each id: inside a document, and as its first token (some put a space before a text)."""
    if isinstance(tok, Bytes):
        inside = np.array([i < 256 for i in range(tok.vocab)], np.int64)
        return np.stack([inside, inside])
    sizes, names, prefix = from_model(tok) if isinstance(tok, SentencePiece) else from_json(tok)
    first = [n - (prefix is not None and name.startswith(prefix)) for n, name in zip(sizes, names)]
    return np.array([sizes, first], np.int64)


def from_model(tok: SentencePiece) -> tuple[list[int], list[str], str | None]:
    """(bytes, name of each id; what a text's first token gets before it)."""
    sp = tok.processor
    names = [sp.id_to_piece(i) for i in range(tok.vocab)]

    def size(i: int) -> int:
        if sp.is_control(i) or sp.is_unused(i):
            return 0
        if sp.is_unknown(i):
            return len(sp.decode([i]).encode())
        return 1 if sp.is_byte(i) else spelled(names[i])
    began = sp.encode("a", out_type=str)[0].startswith(SPACE)
    return [size(i) for i in range(tok.vocab)], names, SPACE if began else None


def from_json(tok: Tokenizer) -> tuple[list[int], list[str], str | None]:
    """As from_model, of a tokenizer.json."""
    spec = json.loads(tok.files["tokenizer.json"])
    added = {}
    for token in spec.get("added_tokens") or ():
        added[token["id"]] = 0 if token["special"] else len(token["content"].encode())
    decoders, splitters = steps(spec.get("decoder")), steps(spec.get("pre_tokenizer"))
    names = [tok.processor.id_to_token(i) or "" for i in range(tok.vocab)]  # a vocabulary may have holes
    if "ByteLevel" in decoders:
        sizes = [len(name) for name in names]
        spaced = splitters.get("ByteLevel", {}).get("add_prefix_space")
        prefix = "\u0120" if spaced else None  # its sign for a space
    elif {"ByteFallback", "Metaspace"} & decoders.keys():
        sizes = [1 if is_byte(name) else spelled(name) for name in names]
        began = tok.processor.encode("a", add_special_tokens=False).tokens[:1]
        prefix = SPACE if began and began[0].startswith(SPACE) else None
    else:
        sizes, prefix = [len(tok.decode([i]).encode()) for i in range(tok.vocab)], None
    return [added.get(i, n) for i, n in enumerate(sizes)], names, prefix


def steps(part: dict | None) -> dict[str, dict]:
    """{type: settings} of a decoder or pre-tokenizer, those of a Sequence one by one."""
    inner = (part or {}).get("decoders") or (part or {}).get("pretokenizers")
    return {one["type"]: one for one in inner or ([part] if part else [])}


def is_byte(name: str) -> bool:
    return len(name) == 6 and name.startswith("<0x") and name.endswith(">")


def spelled(name: str) -> int:
    return len(name.replace(SPACE, " ").encode())
