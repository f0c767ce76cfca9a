"""Documents with a start token (BOS), put in front of each as it is read.

Prepared files hold none, so that one file serves models with and without. A file whose documents begin with
the token already is read as it is. Nothing predicts a start token: as a target it does not count.

    with_starts    an index -> the index that a run reads
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

PROBED_DOCUMENTS = 16  # whose first token is looked at
PROBED_TOKENS = 1 << 16  # of a file without an index, in which they are looked for


class StartedDocuments:
    """An IndexedDataset to whose documents the token `start` is added, with the same interface.

    Document d begins at its token in the file, plus d. files: the IndexedDataset.
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

    # ---- places --------------------------------------------------------------------------------------------

    def document_start(self, number: int) -> int:
        """First token of a document; for `number` = documents: the end of the stream."""
        return self.files.document_start(number) + number

    def document_at(self, token: int) -> int:
        """Return the document that holds a token."""
        return self._starts_before(token + 1) - 1

    def document_starts(self, first: int, stop: int) -> np.ndarray:  # int64, rising
        """Return the tokens strictly between `first` and `stop` that begin a document."""
        numbers = np.arange(self._starts_before(first + 1), self._starts_before(stop))
        return self.files.document_firsts(numbers) + numbers

    def split_point(self, part: int, whole: int) -> int:
        """As of IndexedDataset: of the same document."""
        return self.document_start((2 * self.documents * part + whole) // (2 * whole))

    def _starts_before(self, token: int) -> int:
        """Return the number of documents that begin before a token."""
        return bisect.bisect_left(range(self.documents), token, key=self.document_start)

    # ---- reading -------------------------------------------------------------------------------------------

    def read(self, first: int, stop: int) -> np.ndarray:  # int64 [stop - first]
        """Return the ids of the tokens [first, stop). Raises as IndexedDataset.read does."""
        before, places = self._starts_in(first, stop)
        ids = self.files.read(first - before, stop - before - len(places))
        return np.insert(ids.astype(np.int64), places, self._start)

    def counted(self, first: int, stop: int) -> np.ndarray:  # bool [stop - first]
        """Does the loss count each of the tokens [first, stop) as a target? No start token."""
        before, places = self._starts_in(first, stop)
        begin, end = first - before, stop - before - len(places)
        counted = self.files.counted(begin, end)
        counted = np.ones(end - begin, bool) if counted is None else counted
        return np.insert(counted, places, False)

    def _starts_in(self, first: int, stop: int) -> tuple[int, np.ndarray]:
        """Return how many start tokens stand before `first`, and for each of those in [first, stop) the place
        among the file's tokens in the range before which it stands."""
        before = self._starts_before(first)
        numbers = np.arange(before, self._starts_before(stop))
        return before, self.files.document_firsts(numbers) - (first - before)


Index = IndexedDataset | StartedDocuments


def with_starts(index: IndexedDataset, tok: Tokenizer | None, wanted: bool | None, name: str) -> Index:
    """Return the index with the start tokens that a run reads. wanted: data.bos. name: as in data.path.

    Conversations that a chat template has written stay as they are. Raises ConfigError where the documents
    contradict data.bos or the tokenizer, and where they cannot be found.
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
    ends_alike = known.id == tok.eod  # then the end of the document before stands in front, too
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


def files_of(index: Index) -> IndexedDataset:
    """Return the files that an index reads, as they are."""
    return index.files if isinstance(index, StartedDocuments) else index


def first_ids(index: IndexedDataset) -> np.ndarray:  # [at most PROBED_DOCUMENTS]
    """Return the first token of some documents that have one: evenly spaced, or of a file without an index
    the first ones."""
    if index.documents:
        numbers = np.linspace(0, index.documents - 1, min(index.documents, PROBED_DOCUMENTS)).round()
        places = index.document_firsts(numbers.astype(int))
    else:
        starts = index.document_starts(0, min(index.tokens, PROBED_TOKENS))
        places = np.array([0, *starts[:PROBED_DOCUMENTS - 1]])
    return index.peek(places[places < index.tokens])
