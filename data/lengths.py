"""Text bytes of each token id: the exact denominator of bits per byte, and the basis for finding what a
tokenizer loses.

Decoding a window of tokens does not give them: a window may begin or end inside a character, for which
decoders write a three-byte replacement character. So they are derived from the vocabulary:

    byte-level BPE                     one character of the token's name is one byte
    sentencepiece, its tokenizer.json  U+2581 is a space, <0x0A> is one byte
    control and unknown tokens         no text
    others (WordPiece, WordLevel)      each id is decoded alone, which is approximate

If a tokenizer changes text (lower case, NFKC, spaces) or has no token for it, only the remaining bytes count.
prepare_data counts the lost bytes and stores their number in PREFIX.json; if it is not small, bits per byte
are unknown.
"""
import json
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from config import Tree
from data.tokenizer import ByteTokenizer, JsonTokenizer, SentencePieceTokenizer, Tokenizer

SPACE_MARK = "\u2581"  # sentencepiece's mark for a space
BYTE_LEVEL_SPACE_MARK = "\u0120"  # byte-level BPE's
WHITE_SPACE = list(b" \t\n\v\f\r")
EXACT_SHARE = 1e-4  # lost bytes up to which bits per byte are reported: finer digits are not printed
# any tokenizer must reproduce this text: if it does not, data without a record may have lost as much
PROBE = "A b  c\n\td, é 漢字 и 🙂\n"


class TokenTexts(NamedTuple):
    """The text and the name of each id. `prefix` is the mark that the tokenizer puts before a text, or
    None."""
    texts: list[bytes]
    names: list[str]
    prefix: str | None


def token_byte_lengths(tok: Tokenizer) -> np.ndarray:  # int64 [2, vocab]
    """Return the UTF-8 bytes of each id inside a document, and as the first token of one. The two differ if
    the tokenizer puts a space before a text."""
    found = token_texts(tok)
    rows = found.texts, first_texts(found)
    return np.array([[len(text) for text in texts] for texts in rows], np.int64)


def first_texts(found: TokenTexts) -> list[bytes]:
    """Return the bytes of each id as the first token of a text: without the space that the tokenizer adds."""
    prefix = found.prefix
    if prefix is None:
        return found.texts
    return [text[1:] if name.startswith(prefix) else text for text, name in zip(found.texts, found.names)]


def token_texts(tok: Tokenizer, spells_control: bool = False) -> TokenTexts:
    """Return the bytes of each id inside a document. With `spells_control`, control tokens stand for their
    names, as in the text of a conversation; otherwise they have no text."""
    if isinstance(tok, ByteTokenizer):
        found = TokenTexts([bytes([token_id]) for token_id in range(256)] + [b""], [""] * tok.vocab, None)
    elif isinstance(tok, SentencePieceTokenizer):
        found = texts_of_model(tok)
    else:
        found = texts_of_json(tok)
    for token_id in tok.contract.control:
        found.texts[token_id] = found.names[token_id].encode() if spells_control else b""
    if tok.contract.unknown is not None:
        found.texts[tok.contract.unknown] = b""
    return found


def texts_of_model(tok: SentencePieceTokenizer) -> TokenTexts:
    model = tok.processor
    names = [model.id_to_piece(token_id) for token_id in range(tok.vocab)]
    texts: list[bytes] = []
    for token_id, name in enumerate(names):
        if model.is_unused(token_id):
            texts.append(b"")
        else:
            texts.append(sentencepiece_text(name))
    adds_space = model.encode("a", out_type=str)[0].startswith(SPACE_MARK)
    return TokenTexts(texts, names, SPACE_MARK if adds_space else None)


def texts_of_json(tok: JsonTokenizer) -> TokenTexts:
    spec = json.loads(tok.files["tokenizer.json"])
    decoders = steps_by_type(spec.get("decoder"))
    pre_tokenizers = steps_by_type(spec.get("pre_tokenizer"))
    # "" is the name of an unused id
    names = [tok.processor.id_to_token(token_id) or "" for token_id in range(tok.vocab)]

    prefix = None
    if "ByteLevel" in decoders:
        byte_of = byte_level_letters()
        texts = [bytes(byte_of[letter] for letter in name if letter in byte_of) for name in names]
        if pre_tokenizers.get("ByteLevel", {}).get("add_prefix_space"):
            prefix = BYTE_LEVEL_SPACE_MARK
    elif "ByteFallback" in decoders or "Metaspace" in decoders:
        texts = [sentencepiece_text(name) for name in names]
        first_names = tok.processor.encode("a", add_special_tokens=False).tokens[:1]
        if first_names and first_names[0].startswith(SPACE_MARK):
            prefix = SPACE_MARK
    else:
        texts = [tok.decode([token_id]).encode() for token_id in range(tok.vocab)]

    for token in spec.get("added_tokens") or ():
        if token["id"] < len(texts):
            texts[token["id"]] = token["content"].encode()
    return TokenTexts(texts, names, prefix)


def steps_by_type(part: Tree | None) -> dict[str, Tree]:
    """Return {type: settings} of a decoder or pre-tokenizer, or of each step of a Sequence."""
    if not part:
        return {}
    steps = part.get("decoders") or part.get("pretokenizers") or [part]
    return {step["type"]: step for step in steps}


def byte_level_letters() -> dict[str, int]:
    """Return {letter: byte} of GPT-2's alphabet: printable bytes are unchanged, others start at 256."""
    shown = {*range(33, 127), *range(161, 173), *range(174, 256)}
    hidden = [byte for byte in range(256) if byte not in shown]
    return {chr(byte): byte for byte in shown} | {chr(256 + place): byte for place, byte in enumerate(hidden)}


def sentencepiece_text(name: str) -> bytes:
    """Decode a sentencepiece name: <0x0A> is a byte, U+2581 a space."""
    if len(name) == 6 and name.startswith("<0x") and name.endswith(">"):
        return bytes([int(name[3:5], 16)])
    return name.replace(SPACE_MARK, " ").encode()


# ---- what is lost ------------------------------------------------------------------------------------------

@dataclass(frozen=True)
class ByteCheck:
    """Compares texts with the bytes of their tokens. Made by byte_check.

    content: the bytes of all ids, concatenated, first as inside a text and then as first tokens; None if a
    single id has no text, and a text must be decoded whole. starts, sizes: int32 [2 * vocab], where each
    id lies in it. keeps_space: white space counts; conversations lose it next to control tokens.
    """
    tok: Tokenizer
    content: np.ndarray | None
    starts: np.ndarray
    sizes: np.ndarray
    keeps_space: bool

    def lost(self, texts: list[bytes], pieces: list[np.ndarray]) -> int:
        """Return how many bytes of the texts, each encoded as one piece, their tokens lack."""
        if isinstance(self.tok, ByteTokenizer):
            return 0
        if self.content is None:
            there = [self._decoded(ids.tolist()).encode() for ids in pieces]
            return sum(self._missing(text, np.frombuffer(each, np.uint8)) for text, each in zip(texts, there))

        # all at once, which is enough if nothing is lost
        found, bounds = self._token_bytes(self.content, pieces)
        if np.array_equal(found, np.frombuffer(b"".join(texts), np.uint8)):
            return 0

        # text by text
        ends = np.cumsum([0, *map(len, pieces)]).tolist()
        return sum(self._missing(text, found[bounds[first]:bounds[end]])
                   for text, first, end in zip(texts, ends, ends[1:]))

    def characters(self, texts: list[bytes], pieces: list[np.ndarray]) -> list[np.ndarray | None]:
        """Return for each text the character span [begin, end) of each token, int64 [tokens, 2], or None if
        the bytes of the tokens are not the text, or a token has no bytes. A span covers each character that
        the token has a byte of.

        With the library's own offsets (has_plain_offsets) encoding takes 1.5 times as long.
        """
        if self.content is None:
            return [None] * len(texts)
        found, bounds = self._token_bytes(self.content, pieces)
        begun = np.concatenate([[0], np.cumsum((found & 0xc0) != 0x80)])  # characters before each byte
        begun = np.append(begun, begun[-1])
        places = np.stack([begun[bounds[:-1] + 1] - 1, begun[bounds[1:]]], axis=1)

        ends = np.cumsum([0, *map(len, pieces)]).tolist()
        result: list[np.ndarray | None] = []
        for text, first, end in zip(texts, ends, ends[1:]):
            token_bounds = bounds[first:end + 1]
            start, stop = token_bounds[0], token_bounds[-1]
            has_bytes = (np.diff(token_bounds) > 0).all()
            is_exact = has_bytes and found[start:stop].tobytes() == text
            result.append(places[first:end] - begun[start] if is_exact else None)
        return result

    def _token_bytes(self, content: np.ndarray, pieces: list[np.ndarray]) -> tuple[np.ndarray, np.ndarray]:
        """Return the bytes of all tokens, uint8 [n], and the bounds of each token, int64 [tokens + 1]."""
        rows = np.concatenate(pieces).astype(np.int64)
        ends = np.cumsum([len(ids) for ids in pieces])
        begins = np.concatenate([[0], ends[:-1]])
        rows[begins[begins < ends]] += self.tok.vocab
        sizes = self.sizes[rows]
        bounds = np.concatenate([[0], np.cumsum(sizes, dtype=np.int64)])
        # position of each byte in `content`: the start of its token, plus its offset
        places = np.repeat((self.starts[rows] - bounds[:-1]).astype(np.int32), sizes)
        places += np.arange(int(bounds[-1]), dtype=np.int32)
        return content[places], bounds

    def _decoded(self, ids: list[int]) -> str:
        """Decode ids, including the names of control tokens if conversations spell them."""
        if self.keeps_space or not isinstance(self.tok, JsonTokenizer):
            return self.tok.decode(ids)
        known = [token_id for token_id in ids if token_id != self.tok.contract.unknown]
        return self.tok.processor.decode(known, skip_special_tokens=False)

    def _missing(self, text: bytes, found: np.ndarray) -> int:
        """Return how many bytes of a text are not among `found`, uint8 [n], wherever they stand."""
        wanted = np.frombuffer(text, np.uint8)
        if np.array_equal(wanted, found):
            return 0
        missing = np.bincount(wanted, minlength=256) - np.bincount(found, minlength=256)
        if not self.keeps_space:
            missing[WHITE_SPACE] = 0
        return int(missing.clip(min=0).sum())


def byte_check(tok: Tokenizer, is_chat: bool = False) -> ByteCheck:
    """Make the byte check of a tokenizer. If `is_chat`, control tokens are spelled in the texts."""
    found = token_texts(tok, spells_control=is_chat)
    sizes, starts, content = np.zeros(0, np.int32), np.zeros(0, np.int32), None
    if has_own_texts(tok):
        rows = [*found.texts, *first_texts(found)]
        sizes = np.array([len(text) for text in rows], np.int32)
        starts = (np.cumsum(sizes) - sizes).astype(np.int32)
        content = np.frombuffer(b"".join(rows), np.uint8)
    return ByteCheck(tok, content, starts, sizes, keeps_space=not is_chat)


def has_own_texts(tok: Tokenizer) -> bool:
    """Return whether a text is the concatenation of its tokens' texts."""
    if not isinstance(tok, JsonTokenizer):
        return True
    decoders = steps_by_type(json.loads(tok.files["tokenizer.json"]).get("decoder"))
    return not decoders.keys().isdisjoint(("ByteLevel", "ByteFallback", "Metaspace"))


def has_plain_offsets(tok: JsonTokenizer) -> bool:
    """Return whether the library's offsets cover every character that a token has a byte of: not if it drops
    spaces at the ends, or puts a space before a text."""
    spec = json.loads(tok.files["tokenizer.json"])
    is_trimmed = '"trim_offsets": true' in json.dumps(spec.get("post_processor"))
    byte_level = steps_by_type(spec.get("pre_tokenizer")).get("ByteLevel", {})
    has_bytes = "ByteLevel" in steps_by_type(spec.get("decoder"))
    return has_bytes and not is_trimmed and not byte_level.get("add_prefix_space")


def is_exact(tok: Tokenizer, meta: Tree) -> bool:
    """Return whether the bytes of the tokens equal those of the text. If `meta` (PREFIX.json) does not say
    what was lost, try the tokenizer on a text."""
    lost = meta.get("lost_bytes")
    if lost is not None:
        return lost <= EXACT_SHARE * (meta["text_bytes"] or 0) and has_own_texts(tok)
    return has_own_texts(tok) and byte_check(tok).lost([PROBE.encode()], [np.array(tok.encode(PROBE))]) == 0
