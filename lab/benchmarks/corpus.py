"""A corpus of random letters, for runs whose text does not matter."""

from pathlib import Path

import numpy as np

from data.indexed import IndexedDatasetWriter
from data.tokenizer import load_tokenizer

LETTERS = (97, 123)  # a to z, as bytes
DOCUMENT_LETTERS = (10, 60)  # letters of a document: at least, and fewer than


def write_corpus(home: Path, documents: int) -> str:
    """A prefix (data.path) of documents of random letters, one token a letter."""
    tokenizer, stream = load_tokenizer("bytes"), np.random.default_rng(0)
    with IndexedDatasetWriter(home / "text", tokenizer.vocab) as writer:
        for _ in range(documents):
            letters = stream.integers(*LETTERS, stream.integers(*DOCUMENT_LETTERS))
            writer.add([*letters, tokenizer.eod])
        writer.finish(tokenizer, 1)
    return str(home / "text")
