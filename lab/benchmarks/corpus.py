"""A corpus of random letters, for runs in which the text does not matter."""

from pathlib import Path

import numpy as np

from data.indexed import IndexedDatasetWriter
from data.tokenizer import load_tokenizer

LETTERS = (97, 123)  # a to z, as bytes
DOCUMENT_LETTERS = (10, 60)  # length of a document: minimum, and exclusive maximum


def write_corpus(home: Path, documents: int) -> str:
    """Write documents of random letters, one token a letter, and return their prefix (data.path)."""
    tokenizer, stream = load_tokenizer("bytes"), np.random.default_rng(0)
    with IndexedDatasetWriter(home / "text", tokenizer.vocab) as writer:
        for _ in range(documents):
            letters = stream.integers(*LETTERS, stream.integers(*DOCUMENT_LETTERS))
            writer.add([*letters, tokenizer.eod])
        writer.finish(tokenizer, 1)
    return str(home / "text")
