"""Bytes of text that each token id stands for: the exact denominator of bits per byte.

Decoding a window of tokens does not give it: a window may begin or end inside a character, for which decoders
write a replacement character of three bytes. So the length comes from the vocabulary:

    byte-level BPE                     one character of the token's name is one byte
    sentencepiece, its tokenizer.json  U+2581 is a space, <0x0A> is one byte
    special tokens                     no text
    others (WordPiece)                 the id is decoded alone, which is approximate

Where a tokenizer normalizes text, the bytes are those of the normalized text.
"""
import json

import numpy as np

from config import Tree
from data.tokenizer import ByteTokenizer, JsonTokenizer, SentencePieceTokenizer, Tokenizer

SPACE_MARK = "\u2581"  # sentencepiece's sign for a space
BYTE_LEVEL_SPACE_MARK = "\u0120"  # that of byte-level BPE


def token_byte_lengths(tok: Tokenizer) -> np.ndarray:  # int64 [2, vocab]
    """UTF-8 bytes of each id inside a document, and as the first token of one. The two differ where the
    tokenizer puts a space before a text."""
    if isinstance(tok, ByteTokenizer):
        inside = np.array([token_id < 256 for token_id in range(tok.vocab)], np.int64)
        return np.stack([inside, inside])

    if isinstance(tok, SentencePieceTokenizer):
        sizes, names, prefix = lengths_of_model(tok)
    else:
        sizes, names, prefix = lengths_of_json(tok)
    first_sizes: list[int] = []
    for size, name in zip(sizes, names):
        has_prefix = prefix is not None and name.startswith(prefix)
        first_sizes.append(size - 1 if has_prefix else size)
    return np.array([sizes, first_sizes], np.int64)


def lengths_of_model(tok: SentencePieceTokenizer) -> tuple[list[int], list[str], str | None]:
    """Returns bytes and name of each id, and the mark that the tokenizer puts before a text (None: it puts
    none)."""
    model = tok.processor
    names = [model.id_to_piece(token_id) for token_id in range(tok.vocab)]
    sizes: list[int] = []
    for token_id, name in enumerate(names):
        if model.is_control(token_id) or model.is_unused(token_id):
            sizes.append(0)
        elif model.is_unknown(token_id):
            sizes.append(len(model.decode([token_id]).encode()))
        elif model.is_byte(token_id):
            sizes.append(1)
        else:
            sizes.append(text_size(name))

    adds_space = model.encode("a", out_type=str)[0].startswith(SPACE_MARK)
    return sizes, names, SPACE_MARK if adds_space else None


def lengths_of_json(tok: JsonTokenizer) -> tuple[list[int], list[str], str | None]:
    """As lengths_of_model, for a tokenizer.json."""
    spec = json.loads(tok.files["tokenizer.json"])
    decoders = steps_by_type(spec.get("decoder"))
    pre_tokenizers = steps_by_type(spec.get("pre_tokenizer"))
    # "" is the name of an id that is not used
    names = [tok.processor.id_to_token(token_id) or "" for token_id in range(tok.vocab)]

    prefix = None
    if "ByteLevel" in decoders:
        sizes = [len(name) for name in names]
        if pre_tokenizers.get("ByteLevel", {}).get("add_prefix_space"):
            prefix = BYTE_LEVEL_SPACE_MARK
    elif "ByteFallback" in decoders or "Metaspace" in decoders:
        sizes = [1 if is_byte(name) else text_size(name) for name in names]
        first_names = tok.processor.encode("a", add_special_tokens=False).tokens[:1]
        if first_names and first_names[0].startswith(SPACE_MARK):
            prefix = SPACE_MARK
    else:
        sizes = [len(tok.decode([token_id]).encode()) for token_id in range(tok.vocab)]

    for token in spec.get("added_tokens") or ():
        if token["id"] < len(sizes):
            sizes[token["id"]] = 0 if token["special"] else len(token["content"].encode())
    return sizes, names, prefix


def steps_by_type(part: Tree | None) -> dict[str, Tree]:
    """{type: settings} of a decoder or pre-tokenizer; of a Sequence, those of its steps."""
    if not part:
        return {}
    steps = part.get("decoders") or part.get("pretokenizers") or [part]
    return {step["type"]: step for step in steps}


def is_byte(name: str) -> bool:
    """Is this the name of a byte: <0x0A>?"""
    return len(name) == 6 and name.startswith("<0x") and name.endswith(">")


def text_size(name: str) -> int:
    """UTF-8 bytes of the text that a sentencepiece name spells."""
    return len(name.replace(SPACE_MARK, " ").encode())
