"""Fill-in-the-middle: split parts of documents in three, and move the middle to the end.

    PSM    <prefix> PREFIX <suffix> SUFFIX <middle> MIDDLE
    SPM    <prefix> <suffix> SUFFIX <middle> PREFIX MIDDLE

Source: arXiv 2207.14255, at the context level: the part of a document in a sequence is split, not the
document before packing. SPM uses the order of Megatron-LM and StarCoder. A token that begins or ends a
document (bos, eod) stays in place.

The two cuts are uniform over positions between characters, or between tokens (data.fim_split). After a cut
between characters, each of the three texts is tokenized again. Parts with special tokens, and parts that
begin or end inside a character, are cut between tokens.

Sentinels take slots. Tokens that no longer fit are dropped from the end of the sequence before the cuts are
made, so every middle is complete. All decisions depend only on (seed, sample, part).
"""
import itertools
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np

from config import ConfigError, DataConfig
from data.lengths import token_byte_lengths
from data.sampler import derive_seed, mix_bits
from data.tokenizer import Tokenizer, token_id
from data.window import Part, Window, fill_slots

# for tokenizers that have such tokens: prefix, middle, suffix
SENTINELS = (
    ("<fim_prefix>", "<fim_middle>", "<fim_suffix>"),  # StarCoder; prepare_data --fim
    ("<|fim_prefix|>", "<|fim_middle|>", "<|fim_suffix|>"),  # Qwen2.5-Coder, CodeGemma
    ("<fim-prefix>", "<fim-middle>", "<fim-suffix>"),  # SantaCoder
    ("<｜fim▁begin｜>", "<｜fim▁end｜>", "<｜fim▁hole｜>"),  # DeepSeek-Coder
    ("▁<PRE>", "▁<MID>", "▁<SUF>"),  # Code Llama
)
# a tokenizer must reproduce this text, wherever it is cut
PROBE = "def Add(a, b):\n    return a + b  # größer 漢字 🙂\n"
REPLACEMENT = "\ufffd"  # decoders write it for part of a character
DRAWS = 4  # per part: is it cut, in which order, and at which two positions?
PURPOSE = 3  # separates these draws from the sampler's (sampler.py)


@dataclass(frozen=True)
class FillInTheMiddle:
    """Rearranges the documents of windows. Made by open_fim.

    rate, spm_rate: the fraction of parts that are cut, and the fraction of those in SPM order.
    by_character: cut between characters instead of tokens.
    prefix, middle, suffix: sentinel ids. start: the id that begins a document and stays in place, or None if
    documents begin with their text.
    """
    tokenizer: Tokenizer
    rate: float
    spm_rate: float
    by_character: bool
    prefix: int
    middle: int
    suffix: int
    start: int | None

    @property
    def identity(self) -> list[Any]:
        """Everything that determines how a window is rearranged, for a fingerprint."""
        sentinels = [self.prefix, self.middle, self.suffix]
        return ["fim", self.rate, self.spm_rate, self.by_character, sentinels]

    def rearrange_window(self, window: Window, seed: int) -> Window:
        """Rearrange the parts of a window. `seed` is specific to the sample."""
        bounds = [0, *(start for start in window.starts.tolist() if start < window.filled), window.filled]
        slots = len(window.tokens)
        free = slots
        parts: list[Part] = []
        for number, (first, stop) in enumerate(itertools.pairwise(bounds)):
            ids = self.rearrange(window.tokens[first:stop], free, derive_seed(seed, number, PURPOSE))
            counted = np.ones(len(ids), bool)
            counted[:1] = window.counted is None or window.counted[first]
            parts.append(Part(ids, counted))
            free -= len(ids)
            if free == 0:
                break
        return fill_slots(parts, slots, self.tokenizer.eod)

    def rearrange(self, ids: np.ndarray, room: int, seed: int) -> np.ndarray:  # [n] -> int64 [at most room]
        """Return the tokens of one part that fit, rearranged or unchanged."""
        is_cut, is_spm, *cuts = uniform_draws(seed)
        ids = ids.astype(np.int64)
        begin = int(ids[0] == self.start)
        end = len(ids) - int(ids[-1] == self.tokenizer.eod)
        if is_cut >= self.rate or end <= begin:
            return ids[:room]

        kept = len(ids)
        while kept > begin:
            prefix, middle, suffix = self._cut(ids[begin:min(kept, end)], cuts)
            if is_spm < self.spm_rate:
                parts = [[self.prefix, self.suffix], suffix, [self.middle], prefix, middle]
            else:
                parts = [[self.prefix], prefix, [self.suffix], suffix, [self.middle], middle]
            found = np.concatenate([ids[:begin], *parts, ids[end:kept]]).astype(np.int64)
            if len(found) <= room:
                return found
            kept -= len(found) - room
        return ids[:room]

    def _cut(self, ids: np.ndarray, cuts: list[float]) -> list[np.ndarray]:
        """Split tokens into prefix, middle and suffix.
        `cuts` are two positions, as fractions of the length."""
        text = self._text(ids) if self.by_character else None
        content = ids if text is None else text
        first, second = sorted(int(cut * (len(content) + 1)) for cut in cuts)
        if text is None:
            return [ids[:first], ids[first:second], ids[second:]]
        return self.tokenizer.encode_batch([text[:first], text[first:second], text[second:]])

    def _text(self, ids: np.ndarray) -> str | None:
        """Decode the tokens, or return None if the text would lose any."""
        if self._is_special[ids].any():
            return None
        text = self.tokenizer.decode(ids.tolist())
        return None if REPLACEMENT in text else text

    @cached_property
    def _is_special(self) -> np.ndarray:  # bool [vocab]
        """Whether each id has no text."""
        return token_byte_lengths(self.tokenizer)[0] == 0


def uniform_draws(seed: int) -> list[float]:
    """Return DRAWS numbers in [0, 1)."""
    bits = mix_bits(np.uint64(seed) ^ np.arange(DRAWS, dtype=np.uint64))
    return ((bits >> np.uint64(11)) * 2.0**-53).tolist()  # the 53 bits of a double


# ---- opening -----------------------------------------------------------------------------------------------

def open_fim(
    data: DataConfig, tok: Tokenizer, vocab: int | None, start: int | None = None
) -> FillInTheMiddle:
    """Set up fill-in-the-middle from data.fim_*. `vocab` is the model's, if set. `start` is the id that
    readers put before documents, if it differs from the one in the tokenizer's files.

    Raises ConfigError if the tokenizer has no sentinels, or cannot tokenize the parts of a text.
    """
    ids = sentinel_ids(data.fim_tokens, tok)
    if vocab is not None and max(ids) >= vocab:
        raise ConfigError(f"model.vocab: {vocab} leaves out the sentinels of data.fim_rate, ids "
                          f"{', '.join(map(str, ids))}; raise it above {max(ids)}")
    by_character = data.fim_split == "character"
    if by_character and not round_trips_parts(tok):
        raise ConfigError(f"data.fim_split: the tokenizer {tok.name} does not round-trip text that is cut "
                          "between characters (it prepends spaces, or changes the text); use token")
    prefix, middle, suffix = ids
    return FillInTheMiddle(
        tok,
        rate=data.fim_rate,
        spm_rate=data.fim_spm_rate,
        by_character=by_character,
        prefix=prefix,
        middle=middle,
        suffix=suffix,
        start=tok.bos if start is None else start,
    )


def sentinel_ids(names: str | None, tok: Tokenizer) -> list[int]:
    """Return the ids of prefix, middle and suffix. `names` is "PREFIX,MIDDLE,SUFFIX"; None picks the first of
    SENTINELS that the tokenizer has. Raises ConfigError."""
    if names is None:
        for family in SENTINELS:
            known = [token_id(tok, name) for name in family]
            ids = [each for each in known if each is not None]
            if len(ids) == len(family):
                return ids
        raise ConfigError(f"data.fim_rate: the tokenizer {tok.name} has no sentinels such as "
                          f"{', '.join(SENTINELS[0])}; name special tokens that it has in data.fim_tokens, "
                          "or prepare the data again: with --tokenizer bpe-N --fim, or with a tokenizer.json "
                          "to which they were added")

    wanted = names.split(",")
    if len(wanted) != len(SENTINELS[0]) or len(set(wanted)) != len(wanted):
        raise ConfigError(f"data.fim_tokens: {names!r} are not three tokens; write PREFIX,MIDDLE,SUFFIX, as "
                          f"{','.join(SENTINELS[0])}")
    ids = []
    for name in wanted:
        found = token_id(tok, name)
        if found is None:
            raise ConfigError(f"data.fim_tokens: the tokenizer {tok.name} has no token {name!r}; name "
                              "others, or prepare the data again with a tokenizer.json to which it was added")
        ids.append(found)
    return ids


def round_trips_parts(tok: Tokenizer) -> bool:
    """Return whether the tokens of two halves of a text, concatenated, decode to the text."""
    places = range(len(PROBE) + 1)
    lefts = tok.encode_batch([PROBE[:place] for place in places])
    rights = tok.encode_batch([PROBE[place:] for place in places])
    return all(tok.decode([*left, *right]) == PROBE for left, right in zip(lefts, rights))
