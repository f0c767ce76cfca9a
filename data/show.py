"""Decode prepared documents with their loss mask, to inspect it before training."""
import pathlib
from collections.abc import Iterator
from typing import NamedTuple

import numpy as np

from config import ConfigError
from data import tokenizer as tokenizers
from data.indexed import IndexedDataset
from data.tokenizer import ByteTokenizer, JsonTokenizer, Tokenizer


class ShownPart(NamedTuple):
    """Consecutive tokens of a document that all count, or all do not."""
    text: str
    is_counted: bool


class ShownDocument(NamedTuple):
    """A document. `number` counts from 1, out of `documents`."""
    number: int
    documents: int
    tokens: int
    counted: int  # tokens that the loss counts
    parts: list[ShownPart]


def shown_documents(prefix: pathlib.Path | str, count: int) -> Iterator[ShownDocument]:
    """Yield the first documents of PREFIX. Raises ConfigError if it cannot be read."""
    if not pathlib.Path(f"{prefix}.idx").exists():
        raise ConfigError(f"{prefix}.idx: No such file; --show prints what was prepared as --out")
    dataset = IndexedDataset(prefix)
    tok = tokenizers.load_tokenizer(f"{prefix}.tokenizer")
    for number in range(min(count, dataset.documents)):
        first, stop = dataset.document_start(number), dataset.document_start(number + 1)
        ids = dataset.read(first, stop)
        counted = dataset.counted(first, stop)
        if counted is None:
            counted = np.ones(len(ids), bool)
        changes = np.flatnonzero(np.diff(counted)) + 1
        parts = [ShownPart(visible_text(tok, run.tolist()), bool(is_counted[0]))
                 for run, is_counted in zip(np.split(ids, changes), np.split(counted, changes)) if len(run)]
        yield ShownDocument(number + 1, dataset.documents, len(ids), int(counted.sum()), parts)


def visible_text(tok: Tokenizer, ids: list[int]) -> str:
    """Decode ids, with control tokens shown by name."""
    shown = ""
    waiting: list[int] = []
    for token_id in ids:
        if token_id not in tok.contract.control:
            waiting.append(token_id)
            continue
        shown += tok.decode(waiting) + control_name(tok, token_id)
        waiting = []
    return shown + tok.decode(waiting)


def control_name(tok: Tokenizer, token_id: int) -> str:
    """Return the name of a control token."""
    if isinstance(tok, ByteTokenizer):
        return tok.contract.end.text
    if isinstance(tok, JsonTokenizer):
        return tok.processor.id_to_token(token_id) or ""
    return tok.processor.id_to_piece(token_id)
