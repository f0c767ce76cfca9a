"""Prepend a start token (BOS) to each document as it is read.

Prepared files contain none, so that one file serves models with and without it. A file whose documents
already begin with the token is read unchanged. Start tokens are never predicted: as targets they do not
count.

    with_starts    wraps an index into the index that a run reads
"""
import bisect
import hashlib

import numpy as np

from config import ConfigError
from data.chat import TemplateChat, chat_format
from data.contract import FileContract
from data.indexed import IndexedDataset
from data.loss_mask import LossMask
from data.prompts import start_token
from data.tokenizer import Tokenizer

PROBED_DOCUMENTS = 16  # whose first token is checked
PROBED_TOKENS = 1 << 16  # searched for documents in a file without an index


class StartedDocuments:
    """An IndexedDataset with the token `start` before each document, with the same interface.

    Document d begins at its token in the file, plus d. `files` is the IndexedDataset.
    """

    def __init__(self, index: IndexedDataset, start: int) -> None:
        self.files = index
        self._start = start
        self.documents = index.documents
        self.tokens = index.tokens + index.documents
        identity = f"{index.identity} start {start}"
        self.identity = hashlib.sha256(identity.encode()).hexdigest()

    @property
    def meta(self) -> dict:
        return self.files.meta

    @property
    def loss_mask(self) -> LossMask | None:
        return self.files.loss_mask

    @property
    def probed(self) -> tuple[int, int] | None:
        return self.files.probed

    @property
    def contract(self) -> FileContract:
        return self.files.contract

    def check_unchanged(self) -> None:
        self.files.check_unchanged()

    # ---- positions
    # ---------------------------------------------------------------------------------------------

    def document_start(self, number: int) -> int:
        """Return the first token of a document, or the end of the stream if `number` = documents."""
        return self.files.document_start(number) + number

    def document_at(self, token: int) -> int:
        """Return the document that contains a token."""
        return self._starts_before(token + 1) - 1

    def document_starts(self, first: int, stop: int) -> np.ndarray:  # int64, rising
        """Return the tokens strictly between `first` and `stop` that begin a document."""
        numbers = np.arange(self._starts_before(first + 1), self._starts_before(stop))
        return self.files.document_firsts(numbers) + numbers

    def split_point(self, part: int, whole: int) -> int:
        """Like IndexedDataset.split_point, at the same document."""
        return self.document_start((2 * self.documents * part + whole) // (2 * whole))

    def _starts_before(self, token: int) -> int:
        """Count the documents that begin before a token."""
        return bisect.bisect_left(range(self.documents), token, key=self.document_start)

    # ---- reading -------------------------------------------------------------------------------------------

    def read(self, first: int, stop: int) -> np.ndarray:  # int64 [stop - first]
        """Read the ids of the tokens [first, stop). Raises like IndexedDataset.read."""
        before, places = self._starts_in(first, stop)
        ids = self.files.read(first - before, stop - before - len(places))
        return np.insert(ids.astype(np.int64), places, self._start)

    def counted(self, first: int, stop: int) -> np.ndarray:  # bool [stop - first]
        """Return whether the loss counts each of the tokens [first, stop). Start tokens never count."""
        before, places = self._starts_in(first, stop)
        begin, end = first - before, stop - before - len(places)
        counted = self.files.counted(begin, end)
        counted = np.ones(end - begin, bool) if counted is None else counted
        return np.insert(counted, places, False)

    def _starts_in(self, first: int, stop: int) -> tuple[int, np.ndarray]:
        """Return how many start tokens precede `first`, and for each one in [first, stop) the index of the
        file token that it precedes, within the range."""
        before = self._starts_before(first)
        numbers = np.arange(before, self._starts_before(stop))
        return before, self.files.document_firsts(numbers) - (first - before)


Index = IndexedDataset | StartedDocuments


def with_starts(index: IndexedDataset, tok: Tokenizer | None, wanted: bool | None, name: str) -> Index:
    """Return the index with the start tokens that a run reads. `wanted` is data.bos; `name` is from
    data.path.

    Conversations rendered by a chat template stay unchanged. Raises ConfigError if the documents contradict
    data.bos or the tokenizer, or if they cannot be found.
    """
    if tok is None:
        if wanted:
            raise ConfigError(f"data.bos: {name} does not say which tokenizer made it; name it in "
                              "data.tokenizer, or leave data.bos out")
        return index
    if index.loss_mask is not None and isinstance(chat_format(tok), TemplateChat):
        return index

    start = start_token(tok, wanted)
    known = start or tok.contract.start
    if known is None or (start is None and wanted is None):
        return index
    firsts = first_ids(index)
    num_begun = int((firsts == known.id).sum())
    ends_alike = known.id == tok.eod  # then the previous document's end token also comes first
    if start is None:
        if num_begun and not ends_alike:
            raise ConfigError(f"data.bos: false, but documents of {name} begin with {known}; leave it out, "
                              "or prepare the data again")
        return index
    if 0 < num_begun < len(firsts) and not ends_alike:
        raise ConfigError(f"data.bos: some documents of {name} begin with the start token {start}, and "
                          "others do not; prepare the data again")
    if num_begun == len(firsts) or (index.documents == 0 and ends_alike):
        return index
    if index.documents == 0:
        raise ConfigError(f"data.bos: {name} has no .idx that names its documents, so that the start token "
                          f"{start} cannot be put before each; data.bos false reads it without")
    return StartedDocuments(index, start.id)


def underlying_files(index: Index) -> IndexedDataset:
    """Return the underlying files of an index."""
    return index.files if isinstance(index, StartedDocuments) else index


def first_ids(index: IndexedDataset) -> np.ndarray:  # [at most PROBED_DOCUMENTS]
    """Return the first tokens of some nonempty documents: evenly spaced, or the first without an index."""
    if index.documents:
        numbers = np.linspace(0, index.documents - 1, min(index.documents, PROBED_DOCUMENTS)).round()
        places = index.document_firsts(numbers.astype(int))
    else:
        starts = index.document_starts(0, min(index.tokens, PROBED_TOKENS))
        places = np.array([0, *starts[:PROBED_DOCUMENTS - 1]])
    return index.peek(places[places < index.tokens])
