"""Match tokens of two tokenizers by their text, to find embedding rows that keep their meaning.

Tokens with text match if their bytes are equal, across kinds of tokenizers: "▁the" in sentencepiece and
"Ġthe" in byte-level BPE. Control tokens match by name, or failing that, by role: end of document, start of
document, padding.
"""
import numpy as np

from data.lengths import token_texts
from data.tokenizer import Tokenizer

NONE = -1
FEW = 0.05  # of the ids that both have


def ids_by_text(there: Tokenizer, here: Tokenizer) -> np.ndarray:  # int64 [vocab of here]
    """Map each id of `here` to the id of `there` with the same meaning, or NONE.

    If several ids have the same text, such as a byte and a letter in sentencepiece, take the last: the
    letter, which is used to encode texts.
    """
    of_text = {meaning: token_id for token_id, meaning in enumerate(meanings(there)) if meaning is not None}
    same = [of_text.get(meaning, NONE) if meaning is not None else NONE for meaning in meanings(here)]
    found = np.array(same, np.int64)
    for own, other in (  # one token may have several roles: end of document takes precedence
        (here.contract.end, there.contract.end),
        (here.contract.start, there.contract.start),
        (here.contract.pad, there.contract.pad),
    ):
        if own is not None and other is not None and found[own.id] == NONE:
            found[own.id] = other.id
    return found


def another_text(there: Tokenizer, here: Tokenizer) -> tuple[int, str, str] | None:
    """Return (an id, its text there, its text here) if the two differ. Return None if at most FEW of the ids
    differ, since files spell white space in several ways."""
    compared = [(token_id, theirs[1], ours[1])
                for token_id, (theirs, ours) in enumerate(zip(meanings(there), meanings(here)))
                if theirs and ours and theirs[1] and ours[1]]
    others = [each for each in compared if each[1] != each[2]]
    if len(others) <= FEW * len(compared):
        return None
    token_id, *texts = others[0]
    first, second = (text.decode(errors="backslashreplace") for text in texts)
    return token_id, first, second


def meanings(tok: Tokenizer) -> list[tuple[str, bytes] | None]:
    """Return the meaning of each id: ("text", its bytes), ("control", its name), or None without either."""
    found = token_texts(tok)
    of_ids: list[tuple[str, bytes] | None] = []
    for token_id, (text, name) in enumerate(zip(found.texts, found.names)):
        if token_id in tok.contract.control:
            of_ids.append(("control", name.encode()))
        else:
            of_ids.append(("text", text) if text else None)
    return of_ids
