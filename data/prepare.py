"""Text -> PREFIX.bin/.idx: parallel, resumable, in bounded memory, byte-identical for any number of workers.

    1. The inputs are split into work units (documents.plan_units).
    2. Each unit becomes a shard in PREFIX.parts/, written to temporary files and renamed into place, its
    .json
       last. A shard with a .json is finished.
    3. When all shards are finished, one merge writes PREFIX.* to temporary files and renames them into place,
       the .idx last.

So a kill at any moment only loses unfinished units, and rerunning the command gives the same result as an
uninterrupted run. Each worker has a pipe to the parent: a worker exits if its parent dies, and the parent
reports a worker that dies.
"""
import contextlib
import fcntl
import hashlib
import itertools
import json
import multiprocessing
import multiprocessing.connection
import os
import pathlib
import re
import shutil
import signal
import sys
import time
import uuid
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from multiprocessing.connection import Connection
from multiprocessing.process import BaseProcess
from typing import IO

import numpy as np

from config import ConfigError, Tree, provenance
from data import documents
from data import tokenizer as tokenizers
from data.chat import ChatFormat, EncodedChat, TemplateChat, chat_format, cut_at_turns
from data.contract import get_dtype
from data.documents import BadDocument, DocumentPiece, DocumentRecord, Filter
from data.fetched import copy_path, pieces_to_read
from data.fim import SENTINELS
from data.indexed import (
    FILE_ENDS,
    IndexedDataset,
    IndexedDatasetWriter,
    file_sha256,
    is_sidecar,
    naming_errors,
    sync_file,
)
from data.lengths import byte_check
from data.remote import RemoteError
from data.tokenizer import SentencePieceTokenizer, Tokenizer
from data.tokenizer_files import is_of_a_copy

Unit = list[DocumentPiece]  # the input of one shard
Pool = dict[Connection, BaseProcess]  # our end of each worker's pipe -> the worker
Say = Callable[[str], object]  # prints a line for the user
Progress = Callable[[int, int], object]  # called with (input bytes done, input bytes in total)
FaultPoint = Callable[[str], object]  # called with the name of each of FAULT_POINTS when it is reached

FOLDER_ENDS = (".parts", ".tokenizer")
STARTED = {"lock", "plan.tmp"}  # in PREFIX.parts before there is a plan
BATCH_CHARACTERS = 1 << 20  # per call of the tokenizer
TRAINING_CHARACTERS = 64 << 20  # text to train a bpe-N on, from evenly spaced units
SHARD_RECORD = re.compile(r"\d{6,}\.json")  # marks a shard as finished
NOT_HERE = ("hf", "url")  # kinds of pieces that are not files of this machine
LONG = ("refuse", "turns", "anywhere")  # what to do with a conversation longer than a sequence
SHARD_FORMAT = "with lost bytes, lengths and dropped documents"  # shards in another format are rebuilt
MAX_LOST = 1.0  # percent of the text bytes that tokens may lose
HASHED_BYTES = 1 << 30  # of input, hashed for PREFIX.json
SHOWN = 5  # bad documents named per shard and in the report
FAULT_POINTS = (  # where the tests kill the process
    "prepare.planned",
    "prepare.mid_shard", "prepare.pre_shard_commit", "prepare.mid_shard_commit", "prepare.post_shard",
    "prepare.mid_merge", "prepare.pre_publish",
    "prepare.published.tokenizer", "prepare.published.bin", "prepare.published.crc",
    "prepare.published.json", "prepare.published.idx",
)


@dataclass(frozen=True)
class TokenizeJob:
    """Everything that determines the bytes of the shards, and where they are written."""
    parts: str  # folder of the shards
    key: str | None  # field or column of the text, or of the messages (None: detect)
    append_eod: bool
    skip_bad: bool
    is_chat: bool = False  # documents are conversations (chat.py), and shards have masks
    has_fim: bool = False  # a tokenizer trained here gets the fill-in-the-middle sentinels (fim.py)
    eod: str | None = None  # text or id of the end-of-document token chosen by the user
    max_lost: float = MAX_LOST  # percent of the text bytes that tokens may lose
    date: str | None = None  # year-month-day passed to a chat template
    drops_reasoning: bool = False  # may a chat template drop reasoning?
    seq_len: int | None = None  # sequence length that conversations must fit, if known
    long: str = "anywhere"  # one of LONG, for those that do not fit
    keep: Filter | None = None  # of a corpus with scores
    fetched: str | None = None  # folder for the files of URLs while they are read

    def chat_format(self, tok: Tokenizer | None) -> ChatFormat | None:
        """Return the conversation format, or None if documents are plain text. Raises ConfigError."""
        return chat_format(tok, self.date, self.drops_reasoning) if self.is_chat else None


def prepare_corpus(
    inputs: list[str],
    tokenizer: str,
    out: pathlib.Path | str,
    *,
    key: str | None = "text",
    workers: int = 1,
    append_eod: bool = True,
    skip_bad: bool = False,
    is_chat: bool = False,
    has_fim: bool = False,
    eod: str | None = None,
    max_lost: float = MAX_LOST,
    date: str | None = None,
    drops_reasoning: bool = False,
    seq_len: int | None = None,
    long: str = "anywhere",
    source: str | None = None,
    made: Tree | None = None,
    unit_bytes: int = documents.UNIT_BYTES,
    units: list[Unit] | None = None,
    keep: Filter | None = None,
    limit_tokens: int | None = None,
    fetched: str | None = None,
    say: Say = lambda text: None,
    progress: Progress = lambda done, whole: None,
    fault_point: FaultPoint = lambda name: None,
) -> Tree:
    """Make OUT.bin, .idx, .json, .crc and OUT.tokenizer/, and for conversations OUT.mask. Return the report
    that scripts.prepare_data prints.

    `made` is the provenance (config/provenance.py) for OUT.json, which then also names the inputs.
    `units` are the work of files that are URLs, which are fetched below `fetched` while they are read.
    With `limit_tokens` the units after those that hold so many tokens are left out.

    Raises ConfigError, BadDocument (naming file:line) unless skip_bad is set, OSError with a file name if
    the disk fails, and RemoteError if the store of a URL does.
    """
    started = time.monotonic()
    out = pathlib.Path(out)
    if units is None:
        units = documents.plan_units(inputs, unit_bytes, earlier_output(out))
    if not units:
        raise ConfigError(f"--input {' '.join(inputs)}: holds nothing to read")
    check_out(out, units)
    for name in inputs:
        if unread := documents.unread_files(name, earlier_output(out)):
            say(unread)
    if has_fim and not tokenizers.bpe_pieces(tokenizer):
        raise ConfigError(f"--fim: gives sentinels to a tokenizer that is trained here, and {tokenizer} is "
                          "ready; use --tokenizer bpe-N, or leave it out and see data.fim_tokens")
    job = TokenizeJob(
        parts=f"{out}.parts",
        key=key,
        append_eod=append_eod,
        skip_bad=skip_bad,
        is_chat=is_chat,
        has_fim=has_fim,
        eod=eod,
        max_lost=max_lost,
        date=date,
        drops_reasoning=drops_reasoning,
        seq_len=seq_len,
        long=long,
        keep=keep,
        fetched=fetched,
    )
    digest = plan_digest(job, inputs, tokenizer, units)

    os.makedirs(job.parts, exist_ok=True)
    with locked_folder(job.parts):
        # resume an unfinished run
        num_dropped = drop_other_plan(job, digest)
        if num_dropped:
            say(f"starting over: {num_dropped} shards of an unfinished run have other inputs or "
                "settings")
        tok = ready_tokenizer(job, tokenizer, units, say)
        chat = job.chat_format(tok)
        told_date = getattr(chat, "date", None)
        if date is not None and told_date is None:
            raise ConfigError("--date: the format of the conversations asks for no date; leave it out")
        fault_point("prepare.planned")
        todo = [number for number in range(len(units)) if not shard_is_finished(job, number)]
        shards_kept = len(units) - len(todo)
        enough = TokenLimit(job, units, limit_tokens)
        if shards_kept:
            say(f"resuming: {shards_kept} of {len(units)} shards are finished")

        # make missing shards
        began_shards = time.monotonic()
        todo_bytes = sum(unit_size(units[number]) for number in todo)
        progress(0, todo_bytes)
        progress = enough.shown_to(progress, sum(map(unit_size, units)) - todo_bytes)
        num_workers = min(workers, len(todo))
        finished = watched_losses(job, units, len(todo))
        if num_workers > 1:
            run_in_workers(
                job, units, todo, workers=num_workers, enough=enough, progress=progress, finished=finished
            )
        else:
            run_in_process(
                job, units, todo, tok=tok, enough=enough, progress=progress, finished=finished,
                fault_point=fault_point,
            )

        shard_seconds = time.monotonic() - began_shards
        units = units[:enough.needed()]
        todo = [number for number in todo if number < len(units)]
        shard_bytes = sum(shard_counts(job, number)["text_bytes"] for number in todo)

        fetched_files: list[Tree] = []
        for number in range(len(units)):
            fetched_files += shard_counts(job, number)["fetched"]
        if made is not None:
            made = {**made, "inputs": fetched_files + input_files(units)}
        counts = merge_shards(job, units, tok, out=out, source=source, made=made, fault_point=fault_point)
        remove_parts(job)

    return {
        "out": str(out),
        **counts,
        "fetched": fetched_files,
        "chat": type(chat).__name__ if is_chat else None,
        "template": getattr(chat, "places", None),
        "date": told_date,
        "seq_len": seq_len,
        "long_are": long,
        "tokenizer": tok.name,
        "fingerprint": tok.fingerprint,
        "vocab": tok.vocab,
        "eod": tok.eod,
        "eod_text": tok.contract.end.text,
        "dtype": np.dtype(get_dtype(tok.vocab)).name,
        "contract": tok.contract.lines(),
        "input_bytes": sum(map(unit_size, units)),
        "workers": workers,
        "seconds": time.monotonic() - started,
        "tokenizing_seconds": shard_seconds,  # without training the tokenizer, and without the merge
        "tokenized_bytes": shard_bytes,  # of text, in that time
        "shards": len(units),
        "shards_kept": shards_kept,
    }


def earlier_output(out: pathlib.Path) -> list[str]:
    """Return the files and folders of OUT.* that an earlier run has made, if they look like documents."""
    parts, folder = [f"{out}{end}" for end in FOLDER_ENDS]
    has_plan = os.path.exists(f"{parts}/plan")
    has_sidecar = is_sidecar(f"{out}.json")
    found = [parts, f"{folder}.tmp"] if has_plan else []
    if has_sidecar:
        found.append(f"{out}.json")
    if (has_plan or has_sidecar) and os.path.isdir(folder) and not others_in(folder):
        found.append(folder)
    return found


def check_out(out: pathlib.Path, units: list[Unit]) -> None:
    """Raise ConfigError if OUT.* would replace or delete a file that no earlier run has made."""
    paths = {piece.path for unit in units for piece in unit if piece.kind not in NOT_HERE}
    replaced = first_replaced(out, sorted(paths))
    if replaced is not None:
        raise ConfigError(f"--out: {out} would replace the input {replaced}; choose another --out")
    fix_hint = "choose another --out, or move it"
    sidecar = f"{out}.json"
    if os.path.lexists(sidecar) and not is_sidecar(sidecar):
        raise ConfigError(f"{sidecar}: was not written by prepare_data, which would replace it; {fix_hint}")

    parts, folder = [f"{out}{end}" for end in FOLDER_ENDS]
    names = names_in(parts, fix_hint)
    ids = f"{out}.bin"
    is_started = "plan" in names or os.path.lexists(sidecar)
    if os.path.lexists(ids) and not os.path.lexists(f"{out}.idx") and not is_started:
        raise ConfigError(f"{ids}: was not written by prepare_data, which would replace it; {fix_hint}")
    if "plan" not in names and names - STARTED:
        raise ConfigError(f"{parts}: is not an unfinished run of prepare_data: it has no plan; {fix_hint}")
    names_in(folder, fix_hint)
    others = others_in(folder)
    if others and not is_sidecar(sidecar):
        raise ConfigError(f"{folder}: holds {others[0]}, which no copy of a tokenizer does, and prepare_data "
                          f"would replace it; {fix_hint}")


def names_in(folder: str, fix_hint: str) -> set[str]:
    """Return the names in a folder, if it exists. Raises ConfigError if it is a file."""
    if not os.path.lexists(folder):
        return set()
    if not os.path.isdir(folder):
        raise ConfigError(f"{folder}: is not the folder that prepare_data makes; {fix_hint}")
    return set(os.listdir(folder))


def others_in(folder: str) -> list[str]:
    """Return the paths of files in a folder that are not part of a tokenizer copy."""
    files = [path.relative_to(folder).as_posix() for path in pathlib.Path(folder).rglob("*")
             if not path.is_dir() or path.is_symlink()]
    return sorted(name for name in files if not is_of_a_copy(name))


def first_replaced(out: pathlib.Path | str, paths: list[str]) -> str | None:
    """Return the first of these files and folders that making OUT.* would replace or delete, or None."""
    files = {os.path.realpath(f"{out}{end}") for end in FILE_ENDS}
    folders = tuple(f"{os.path.realpath(f'{out}{end}')}/" for end in FOLDER_ENDS)
    for path in paths:
        real = os.path.realpath(path)
        if real in files or f"{real}/".startswith(folders):
            return path
    return None


@contextlib.contextmanager
def locked_folder(folder: str) -> Iterator[None]:
    """Hold the lock of PREFIX.parts. Raises ConfigError if another process holds it. The kernel releases the
    lock when a process dies."""
    with open(f"{folder}/lock", "w") as lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            message = f"{folder}: another process works on this --out; wait, or choose another"
            raise ConfigError(message) from None
        yield


def input_files(units: list[Unit]) -> list[Tree]:
    """Return path, size and sha256 of each input but URLs. The hash takes seconds, so it is left out beyond
    HASHED_BYTES in total, and for inputs that are not files."""
    results: list[Tree] = []
    bytes_left = HASHED_BYTES
    for path, kind in sorted({(piece.path, piece.kind) for unit in units for piece in unit}):
        if kind in NOT_HERE:
            results += [{"path": path}] if kind == "hf" else []
            continue
        size = os.path.getsize(path)
        bytes_left -= size
        results.append({
            "path": os.path.abspath(path),
            "bytes": size,
            "sha256": file_sha256(pathlib.Path(path)) if bytes_left >= 0 else None,
        })
    return results


def unit_size(unit: Unit) -> int:
    """Return the input bytes of a unit."""
    return sum(piece.size for piece in unit)


# ---- the unfinished run ------------------------------------------------------------------------------------

def plan_digest(job: TokenizeJob, inputs: list[str], tokenizer: str, units: list[Unit]) -> str:
    """Return the sha256 of everything that determines the shards. skip_bad is left out: a shard without bad
    documents does not depend on it."""
    is_trained_here = bool(tokenizers.bpe_pieces(tokenizer))
    known = None if is_trained_here else tokenizers.load_tokenizer(tokenizer, job.eod)
    tokenizer_digest = known.fingerprint if known else tokenizer
    # including the other tokenizer files, which are copied next to the shards
    files: dict[str, bytes] = getattr(known, "files", {})
    file_digests = {name: hashlib.sha256(content).hexdigest() for name, content in sorted(files.items())}

    paths: set[str] = set()
    ranges: list[list[tuple[str, int, int]]] = []
    for unit in units:
        paths.update(piece.path for piece in unit if piece.kind not in NOT_HERE)
        ranges.append([(piece.path, piece.start, piece.stop) for piece in unit])
    stamps: list[tuple[str, int, int]] = []
    for path in sorted(paths):
        status = os.stat(path)
        stamps.append((path, status.st_size, status.st_mtime_ns))

    parts = [SHARD_FORMAT, tokenizer_digest, file_digests, job.key, job.append_eod, inputs, stamps, ranges]
    if job.has_fim:
        parts.append("fim")
    if versions := [(piece.path, piece.size, piece.version) for unit in units for piece in unit
                    if piece.kind == "url"]:
        parts += [versions, vars(job.keep) if job.keep else None]
    if job.is_chat:
        parts += ["chat", job.date, job.drops_reasoning, job.seq_len, job.long]
    return hashlib.sha256(json.dumps(parts).encode()).hexdigest()


def drop_other_plan(job: TokenizeJob, digest: str) -> int:
    """Empty the folder if it belongs to a run with another digest.
    Return how many finished shards are lost."""
    path = pathlib.Path(job.parts, "plan")
    old_digest = path.read_text() if path.exists() else None
    if old_digest == digest:
        return 0
    num_finished = empty_parts(job)
    write_atomically(path, digest.encode())
    return num_finished


def empty_parts(job: TokenizeJob) -> int:
    """Empty the folder except for the lock and an empty plan, which marks it as ours after a kill. Return how
    many finished shards are lost."""
    write_atomically(os.path.join(job.parts, "plan"), b"")
    num_finished = 0
    for name in os.listdir(job.parts):
        if name in ("lock", "plan"):
            continue
        num_finished += SHARD_RECORD.fullmatch(name) is not None
        outdated = os.path.join(job.parts, name)
        if os.path.isdir(outdated):
            shutil.rmtree(outdated)
        else:
            os.unlink(outdated)
    return num_finished


def remove_parts(job: TokenizeJob) -> None:
    """Remove the folder, with the plan after the shards."""
    empty_parts(job)
    shutil.rmtree(job.parts)


def ready_tokenizer(job: TokenizeJob, spec: str, units: list[Unit], say: Say) -> Tokenizer:
    """Return the tokenizer, trained if `spec` is bpe-N. It is stored with the shards, so that workers and
    later runs load the same one."""
    folder = pathlib.Path(job.parts, "tokenizer")
    if not folder.exists():
        pieces = tokenizers.bpe_pieces(spec)
        if pieces:
            tok = train_tokenizer(units, job, pieces, say)
        else:
            tok = tokenizers.load_tokenizer(spec, job.eod)
        temporary = folder.with_name("tokenizer.tmp")
        with naming_errors(temporary):
            shutil.rmtree(temporary, ignore_errors=True)
            temporary.mkdir()
            tok.save(temporary)
            os.rename(temporary, folder)
    return tokenizers.load_tokenizer(folder, job.eod)


def train_tokenizer(units: list[Unit], job: TokenizeJob, pieces: int, say: Say) -> SentencePieceTokenizer:
    """Train a BPE of `pieces` ids on the text of evenly spaced units."""
    started = time.monotonic()
    chat = job.chat_format(None)
    sentinels = SENTINELS[0] if job.has_fim else ()
    tok = tokenizers.train_bpe(training_texts(units, job, chat), pieces, sentinels=sentinels)
    say(f"tokenizer {tok.name} (trained, {time.monotonic() - started:.1f} s)")
    return tok


def training_texts(
    units: list[Unit], job: TokenizeJob, chat: ChatFormat | None, characters: int | None = None
) -> Iterator[str]:
    """Yield documents of evenly spaced units, up to `characters`, TRAINING_CHARACTERS by default."""
    characters_left = TRAINING_CHARACTERS if characters is None else characters
    stride = max(1, sum(map(unit_size, units)) // max(1, characters_left))
    for piece in itertools.chain(*units[::stride]):
        for part in pieces_to_read(piece, job.fetched)[0]:
            for record in documents.read_piece(part, job.key, chat, job.keep):
                if characters_left <= 0:
                    return
                if record.text and record.is_kept:
                    characters_left -= len(record.text)
                    yield record.text


# ---- shards ------------------------------------------------------------------------------------------------

@dataclass
class ShardCounts:
    """The content of a shard's .json."""
    documents: int = 0
    tokens: int = 0
    text_bytes: int = 0
    lost_bytes: int = 0  # text bytes that the tokens lack
    unknown_tokens: int = 0  # for text without another token
    counted: int = 0  # tokens that the loss counts
    longest: int = 0  # tokens in a document
    long: int = 0  # conversations that do not fit in a sequence
    empty: int = 0  # documents without text, skipped
    dropped: int = 0  # by a Filter
    bad: int = 0  # documents that cannot be read, skipped
    # the first bad ones: piece of the unit, line, error
    shown: list[tuple[int, int, str]] = field(default_factory=list)
    notes: dict[str, int] = field(default_factory=dict)  # for conversations: how many have each note
    sizes: dict[str, int] = field(default_factory=dict)  # bytes of each file
    fetched: list[Tree] = field(default_factory=list)  # path, bytes and sha256 of the files of URLs


class ShardWriter:
    """Writes the tokens and document lengths of one shard to temporary files, and for conversations the loss
    mask, one byte per token; commit renames them into place."""

    def __init__(self, job: TokenizeJob, number: int, tok: Tokenizer, fault_point: FaultPoint) -> None:
        self.counts = ShardCounts()
        self._job = job
        self._number = number
        self._tok = tok
        self._fault_point = fault_point
        self._eod = [np.array([tok.eod])] if job.append_eod else []
        self._slots = sys.maxsize if job.seq_len is None else job.seq_len + 1  # per sequence
        self._dtype = get_dtype(tok.vocab)
        self._chat = job.chat_format(tok)
        has_template = isinstance(self._chat, TemplateChat)
        known = self._chat.check if has_template else None
        self._check = known or byte_check(tok, is_chat=has_template)
        ends = (".bin", ".len", ".mask") if job.is_chat else (".bin", ".len")
        self._temporary = {end: f"{shard_path(job, number, end)}.tmp" for end in ends}
        self._files: dict[str, IO[bytes]] = {}
        for end, path in self._temporary.items():
            with naming_errors(path):
                self._files[end] = open(path, "wb")

    def __enter__(self) -> "ShardWriter":
        return self

    def __exit__(self, *_: object) -> None:
        with contextlib.ExitStack() as stack:  # closes all of them, even if one fails
            for end, file in self._files.items():
                stack.enter_context(naming_errors(self._temporary[end]))
                stack.enter_context(file)

    def write(self, records: list[DocumentRecord]) -> list[tuple[int, str]]:
        """Encode and write some documents. Return (number, reason) for those that are too long."""
        if not records:
            return []
        too_long: list[tuple[int, str]] = []
        if self._chat is None:
            texts = [record.text or "" for record in records]
            pieces = self._tok.encode_batch(texts)
            documents_ids = self._with_eod(pieces)
        else:
            chats = [record.chat for record in records if record.chat is not None]
            encoded = self._chat.encode_batch(self._tok, chats)
            too_long = self._too_long(encoded)
            left_out = {number for number, _ in too_long}
            records = [record for number, record in enumerate(records) if number not in left_out]
            encoded = [chat for number, chat in enumerate(encoded) if number not in left_out]
            if not encoded:
                return too_long
            texts = [text for chat in encoded for text in chat.texts]
            pieces = [ids for chat in encoded for ids in chat.pieces]
            if self._job.long == "turns":
                encoded = [part for chat in encoded for part in cut_at_turns(chat, self._slots)]
            documents_ids = [chat.ids for chat in encoded]
            counted = np.concatenate([chat.counted for chat in encoded])
            self._append(".mask", counted.astype(np.uint8))
            self.counts.counted += int(counted.sum())
            for record in records:
                for note in dict.fromkeys(record.chat.notes if record.chat else ()):
                    self.counts.notes[note] = self.counts.notes.get(note, 0) + 1

        tokens = np.concatenate(documents_ids, dtype=self._dtype, casting="unsafe")
        self._append(".bin", tokens)
        self._append(".len", np.array([len(ids) for ids in documents_ids], "<i4"))
        self._fault_point("prepare.mid_shard")

        self.counts.documents += len(documents_ids)
        self.counts.tokens += len(tokens)
        self.counts.longest = max(self.counts.longest, *map(len, documents_ids))
        piece_texts = [text.encode("utf-8") for text in texts]
        self.counts.text_bytes += sum(map(len, piece_texts))
        self.counts.lost_bytes += self._check.lost(piece_texts, pieces)
        if self._tok.contract.unknown is not None:
            self.counts.unknown_tokens += int((tokens == self._tok.contract.unknown).sum())
        return too_long

    def _too_long(self, chats: list[EncodedChat]) -> list[tuple[int, str]]:
        """Count the conversations that do not fit. Return (number, reason) for those that the job refuses."""
        slots = self._slots
        long = [number for number, chat in enumerate(chats) if len(chat.ids) > slots]
        self.counts.long += len(long)
        if self._job.long != "refuse":
            return []
        return [(number, f"a conversation of {len(chats[number].ids):,} tokens, and --seq-len {slots - 1:,} "
                         f"holds {slots:,}; raise it, or cut with --long") for number in long]

    def _with_eod(self, encoded: list[np.ndarray]) -> list[np.ndarray]:
        return [np.concatenate([ids, *self._eod]) for ids in encoded]

    def _append(self, end: str, array: np.ndarray) -> None:
        with naming_errors(self._temporary[end]):
            self._files[end].write(array.data)

    def sync(self) -> None:
        """Wait until all files are stored on disk."""
        for end, file in self._files.items():
            with naming_errors(self._temporary[end]):
                sync_file(file)
        self.counts.sizes = {end: file.tell() for end, file in self._files.items()}

    def commit(self) -> None:
        """Rename the files into place, then write the .json, which marks the shard as finished."""
        self._fault_point("prepare.pre_shard_commit")
        for end in self._temporary:
            os.replace(self._temporary[end], shard_path(self._job, self._number, end))
        self._fault_point("prepare.mid_shard_commit")
        content = json.dumps(vars(self.counts)).encode()
        write_atomically(shard_path(self._job, self._number, ".json"), content)


def shard_path(job: TokenizeJob, number: int, end: str) -> str:
    return f"{job.parts}/{number:06d}{end}"


def shard_counts(job: TokenizeJob, number: int) -> Tree:
    """Read a shard's .json: the fields of ShardCounts."""
    return json.loads(pathlib.Path(shard_path(job, number, ".json")).read_bytes())


def shard_is_finished(job: TokenizeJob, number: int) -> bool:
    """Return whether the shard is complete, without bad documents unless job.skip_bad is set."""
    try:
        counts = shard_counts(job, number)
        for end, size in counts["sizes"].items():
            if os.path.getsize(shard_path(job, number, end)) != size:
                return False
        return bool(job.skip_bad or not counts["bad"])
    except (OSError, ValueError, KeyError):
        return False


def make_shard(job: TokenizeJob, number: int, unit: Unit, tok: Tokenizer, *,
               report: Callable[[int], object] = lambda done: None,
               fault_point: FaultPoint = lambda name: None) -> None:
    """Make shard `number` from its unit. Call `report` with the input bytes done so far.

    Raises BadDocument at the first bad document unless job.skip_bad is set.
    """
    chat = job.chat_format(tok)
    with ShardWriter(job, number, tok, fault_point) as writer:
        waiting: list[tuple[int, DocumentRecord]] = []  # with the number of their piece
        characters = 0  # in waiting
        bytes_before = 0  # of the pieces before this one

        def leave_out(piece_number: int, line: int, error: str) -> None:
            if not job.skip_bad:
                location = documents.piece_location(unit[piece_number], line)
                raise BadDocument(f"{location}: {error}; fix it, or skip such records with --skip-bad")
            writer.counts.bad += 1
            if len(writer.counts.shown) < SHOWN:
                writer.counts.shown.append((piece_number, line, error))

        def write_waiting() -> None:
            for place, error in writer.write([record for _, record in waiting]):
                piece_number, record = waiting[place]
                leave_out(piece_number, record.line, error)
            waiting.clear()

        for piece_number, piece in enumerate(unit):
            parts, digest = pieces_to_read(piece, job.fetched)
            if digest:
                writer.counts.fetched.append({"path": piece.path, "bytes": piece.size, "sha256": digest})
            records = (documents.read_piece(part, job.key, chat, job.keep) for part in parts)
            for record in itertools.chain.from_iterable(records):
                if record.text is None:
                    leave_out(piece_number, record.line, record.error)
                elif not record.is_kept:
                    writer.counts.dropped += 1
                elif not record.text:
                    writer.counts.empty += 1
                else:
                    waiting.append((piece_number, record))
                    characters += len(record.text)

                if characters >= BATCH_CHARACTERS:
                    write_waiting()
                    report(bytes_before + record.bytes_read)
                    characters = 0
            bytes_before += piece.size
        write_waiting()
        writer.sync()
    writer.commit()
    for piece in unit:
        if piece.kind == "url" and job.fetched is not None:
            copy_path(piece, job.fetched).unlink(missing_ok=True)
    report(bytes_before)
    fault_point("prepare.post_shard")


def write_atomically(path: pathlib.Path | str, content: bytes) -> None:
    """Replace a file atomically: at any moment it has either its old content or all of the new one."""
    temporary = f"{path}.tmp"
    with naming_errors(path):
        with open(temporary, "wb") as file:
            file.write(content)
            sync_file(file)
        os.replace(temporary, path)


class TokenLimit:
    """How many shards, from the first on, are needed for `limit` tokens: all without a limit."""

    def __init__(self, job: TokenizeJob, units: list[Unit], limit: int | None) -> None:
        self._job = job
        self._units = units
        self._limit = limit
        self._shards = 0  # finished ones before the first unfinished one
        self._bytes = 0  # of their input
        self._tokens = 0  # in these

    def needed(self) -> int:
        """Return their number, which is known once those before the last one are finished."""
        whole = len(self._units)
        if self._limit is None:
            return whole
        while self._tokens < self._limit and self._shards < whole:
            if not shard_is_finished(self._job, self._shards):
                return whole
            self._tokens += shard_counts(self._job, self._shards)["tokens"]
            self._bytes += unit_size(self._units[self._shards])
            self._shards += 1
        return self._shards

    def shown_to(self, progress: Progress, kept: int) -> Progress:
        """Return a callback that shows the input bytes which the tokens so far let expect, instead of those
        of all units. `kept` of them were read before."""
        def show(done: int, whole: int) -> object:
            if self._limit is not None and self._tokens:
                whole = min(whole, max(done, round(self._bytes * self._limit / self._tokens) - kept))
            return progress(done, whole)

        return show


# ---- in-process or in workers ------------------------------------------------------------------------------

def run_in_process(job: TokenizeJob, units: list[Unit], todo: list[int], *, tok: Tokenizer,
                   enough: TokenLimit, progress: Progress, finished: Callable[[int], None],
                   fault_point: FaultPoint) -> None:
    """Make the shards `todo` one after the other, and call `finished` with the number of each."""
    total = sum(unit_size(units[number]) for number in todo)
    bytes_before = 0  # of finished units
    for number in todo:
        if number >= enough.needed():
            return

        def report(done: int, before: int = bytes_before) -> None:
            progress(before + done, total)

        make_shard(job, number, units[number], tok, report=report, fault_point=fault_point)
        bytes_before += unit_size(units[number])
        finished(number)


def run_in_workers(job: TokenizeJob, units: list[Unit], todo: list[int], *, workers: int,
                   enough: TokenLimit, progress: Progress, finished: Callable[[int], None]) -> None:
    """Make the shards `todo` in worker processes, handed out in order. If a shard fails, the ones before it
    still finish, so the reported error is always that of the first bad unit in the input, whatever the
    workers' speed. Raises ConfigError if a worker dies."""
    pool: Pool = {}
    try:
        for _ in range(workers):
            pipe, process = start_worker(job)
            pool[pipe] = process
        distribute(job, units, todo, pool=pool, enough=enough, progress=progress, finished=finished)
    finally:
        for pipe, process in pool.items():
            process.terminate()
            process.join()
            pipe.close()


def start_worker(job: TokenizeJob) -> tuple[Connection, BaseProcess]:
    """Start a worker. Return our end of the pipe, and the process."""
    spawn = multiprocessing.get_context("spawn")  # a fork would copy locks held by other threads
    ours, theirs = spawn.Pipe()
    process = spawn.Process(target=worker_main, args=(theirs, job), daemon=True)
    process.start()
    theirs.close()  # only the worker holds it now, so our end closes if it dies
    return ours, process


def distribute(job: TokenizeJob, units: list[Unit], todo: list[int], *, pool: Pool,
               enough: TokenLimit, progress: Progress, finished: Callable[[int], None]) -> None:
    """Send the shards to the workers and handle their messages, until enough are done or one has failed."""
    total = sum(unit_size(units[number]) for number in todo)
    waiting = list(todo)
    running: dict[Connection, int] = {}  # pipe -> the shard its worker is making
    bytes_done: dict[int, int] = {}  # shard -> input bytes
    first_failed = len(units)
    fault: Exception | None = None

    while True:
        end = min(first_failed, enough.needed())  # shards from it on are not needed
        for pipe in pool:
            if pipe not in running and waiting and waiting[0] < end:
                number = waiting.pop(0)
                running[pipe] = number
                with reporting_death(job, pool[pipe]):
                    pipe.send((number, units[number]))
        if not any(number < end for number in running.values()):
            break

        for pipe in readable_pipes(list(running)):
            with reporting_death(job, pool[pipe]):
                kind, value = pipe.recv()
            if kind == "progress":
                bytes_done[running[pipe]] = value
                progress(sum(bytes_done.values()), total)
                continue
            number = running.pop(pipe)
            if kind == "done":
                finished(number)
            elif number < first_failed:
                first_failed = number
                fault = value
    if fault and first_failed < enough.needed():
        raise fault


@contextlib.contextmanager
def reporting_death(job: TokenizeJob, process: BaseProcess) -> Iterator[None]:
    """Raise ConfigError if the worker's pipe is closed."""
    try:
        yield
    except (EOFError, ConnectionError):
        process.join(5)
        raise ConfigError(f"{job.parts}: a worker died (exit code {process.exitcode}); run the same command "
                          "again to continue, with fewer --workers if memory ran out") from None


def readable_pipes(pipes: list[Connection]) -> list[Connection]:
    """Wait until a pipe is readable or closed. Return all such pipes, in order."""
    found = multiprocessing.connection.wait(pipes)
    return [pipe for pipe in pipes if pipe in found]


def worker_main(pipe: Connection, job: TokenizeJob) -> None:
    """Worker loop: receive (shard, unit), send ("progress", bytes), ("done", None) or ("fault", error). Exit
    when the parent closes its end of the pipe."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # ^C reaches the whole group; the parent stops its workers
    tok = tokenizers.load_tokenizer(pathlib.Path(job.parts, "tokenizer"))
    try:
        while True:
            number, unit = pipe.recv()
            try:
                make_shard(job, number, unit, tok, report=lambda done: pipe.send(("progress", done)))
                pipe.send(("done", None))
            except ConnectionError:
                raise
            except (ConfigError, OSError, MemoryError, RemoteError) as error:
                pipe.send(("fault", error))
    except (EOFError, ConnectionError):
        return


# ---- merge -------------------------------------------------------------------------------------------------

def merge_shards(job: TokenizeJob, units: list[Unit], tok: Tokenizer, *, out: pathlib.Path,
                 source: str | None, made: Tree | None, fault_point: FaultPoint) -> Tree:
    """Write all shards, in order, to OUT.*. Return the counts for the report. Raises ConfigError if no
    documents are left."""
    counts = total_counts(job, units)
    if not counts["documents"]:
        remove_parts(job)
        first_bad = f", the first {counts['bad_records'][0]}" if counts["bad_records"] else ""
        filtered = f", {counts['dropped']} filtered out" if counts["dropped"] else ""
        raise ConfigError(f"{units[0][0].path}: the input has no documents ({counts['empty']} empty"
                          f"{filtered}, {counts['bad']} bad{first_bad})")

    check_lost(job, counts, counts["text_bytes"])

    with IndexedDatasetWriter(out, tok.vocab, has_mask=job.is_chat) as writer:
        for number in range(len(units)):
            append_shard(job, number, writer)
            fault_point("prepare.mid_merge")
        writer.lost_bytes = counts["lost_bytes"]
        writer.unknown_tokens = counts["unknown_tokens"]
        writer.finish(tok, counts["text_bytes"], source, fault_point, made)
    return counts


def total_counts(job: TokenizeJob, units: list[Unit]) -> Tree:
    """Sum the counts of all shards. "bad_records" names the first SHOWN bad documents, and "notes" counts the
    conversations with each note."""
    names = ("documents", "tokens", "text_bytes", "lost_bytes", "unknown_tokens", "counted", "long", "empty",
             "dropped", "bad")
    total: Tree = dict.fromkeys(names, 0)
    longest = 0
    bad_records: list[str] = []
    notes: dict[str, int] = {}
    for number, unit in enumerate(units):
        counts = shard_counts(job, number)
        for key in total:
            total[key] += counts[key]
        longest = max(longest, counts["longest"])
        for note, records in counts["notes"].items():
            notes[note] = notes.get(note, 0) + records
        for piece_number, line, error in counts["shown"]:
            if len(bad_records) < SHOWN:
                bad_records.append(f"{documents.piece_location(unit[piece_number], line)}: {error}")
    return {**total, "bad_records": bad_records, "notes": notes, "longest": longest}


def check_lost(job: TokenizeJob, counts: Tree, text_bytes: int) -> None:
    """Raise ConfigError if the tokens have lost more than the allowed fraction of `text_bytes`.
    The shards are kept."""
    lost = counts["lost_bytes"]
    if 100 * lost > job.max_lost * text_bytes:
        share = f"{100 * lost / text_bytes:.3g} % of the text's bytes"
        unknown = f"{counts['unknown_tokens']:,} unknown tokens"
        raise ConfigError(f"--tokenizer: loses {lost:,} of {text_bytes:,} bytes ({share}; {unknown}), more "
                          f"than --max-lost {job.max_lost:g} %; use one that keeps all text, such as bpe-N, "
                          "or raise --max-lost")


def watched_losses(job: TokenizeJob, units: list[Unit], num_shards: int) -> Callable[[int], None]:
    """Return a callback for finished shards, which raises like check_lost as soon as none of the remaining
    shards can change the outcome: text is never longer than the plain files that contain it. `num_shards` are
    still to be made."""
    whole = 0
    for piece in itertools.chain(*units):
        if job.is_chat or not documents.is_plain(piece):
            return lambda number: None
        whole += piece.size
    so_far = {"lost_bytes": 0, "unknown_tokens": 0, "shards": 0}

    def finished(number: int) -> None:
        counts = {**shard_counts(job, number), "shards": 1}
        for key in so_far:
            so_far[key] += counts[key]
        if so_far["shards"] < num_shards:  # after the last shard, the text size is known
            check_lost(job, so_far, whole)

    return finished


def append_shard(job: TokenizeJob, number: int, writer: IndexedDatasetWriter) -> None:
    """Copy a shard to the writer: all tokens, then all lengths."""
    with contextlib.ExitStack() as stack:
        tokens_file = stack.enter_context(open(shard_path(job, number, ".bin"), "rb"))
        mask_file = stack.enter_context(open(shard_path(job, number, ".mask"), "rb")) if job.is_chat else None
        while len(ids := np.fromfile(tokens_file, writer.dtype, 1 << 20)):
            counted = None if mask_file is None else np.fromfile(mask_file, bool, len(ids))
            writer.extend(ids, [], counted)
    no_ids = np.empty(0, writer.dtype)
    with open(shard_path(job, number, ".len"), "rb") as lengths_file:
        while len(lengths := np.fromfile(lengths_file, "<i4", 1 << 18)):
            writer.extend(no_ids, lengths)


# ---- the stdlib corpus of a run ----------------------------------------------------------------------------

def prepare_stdlib(
    cache: pathlib.Path | str, spec: str | None, eod: str | None = None
) -> tuple[pathlib.Path, str]:
    """Make the corpus of Python's standard library under `cache` unless it exists. `spec` is the tokenizer,
    bpe-1024 by default, and `eod` the token that ends documents. Return its prefix, and "made in 2.4 s" or
    "cached".

    If two processes start together, one makes it while the other waits. Raises ConfigError, and OSError if
    the disk fails.
    """
    spec = spec or "bpe-1024"
    cache = pathlib.Path(cache)
    version = f"{sys.version_info[0]}.{sys.version_info[1]}"
    is_plain_name = spec == "bytes" or bool(tokenizers.bpe_pieces(spec))
    label = spec if is_plain_name else tokenizers.load_tokenizer(spec, eod).fingerprint[:12]
    home = cache / f"stdlib-{version}-{label}-{stdlib_digest()[:12]}"
    prefix = home / "text"

    if (home / "text.idx").exists():
        return prefix, "cached"
    cache.mkdir(parents=True, exist_ok=True)
    with open(cache / "lock", "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if (home / "text.idx").exists():
            return prefix, "cached"
        for leftover in cache.glob("*.tmp-*"):  # from killed runs: only the lock holder writes here
            shutil.rmtree(leftover, ignore_errors=True)

        temporary = home.with_name(f"{home.name}.tmp-{uuid.uuid4().hex[:8]}")
        started = time.monotonic()
        try:
            source = f"python stdlib {version}"
            made = provenance.of_process()
            prepare_corpus(
                ["stdlib"], spec, temporary / "text", skip_bad=True, eod=eod, source=source, made=made
            )
            os.replace(temporary, home)
        finally:
            shutil.rmtree(temporary, ignore_errors=True)
    return prefix, f"made in {time.monotonic() - started:.1f} s"


def stdlib_digest() -> str:
    """Return the sha256 of the content of the standard library."""
    content = hashlib.sha256()
    for path in documents.stdlib_files():
        content.update(hashlib.sha256(pathlib.Path(path).read_bytes()).digest())
    return content.hexdigest()


def sample_text(out: pathlib.Path | str, characters: int = 200) -> str:
    """Decode the beginning of the first document, to show that the corpus can be read back."""
    dataset = IndexedDataset(out)
    stop = min(dataset.document_start(1), 4 * characters)  # an id is at least a quarter of a character
    ids = dataset.read(0, stop).tolist()
    return tokenizers.load_tokenizer(f"{out}.tokenizer").decode(ids)[:characters]
