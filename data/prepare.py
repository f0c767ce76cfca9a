"""Text -> PREFIX.bin/.idx: in parallel, resumable, in bounded memory, the same bytes for any number of workers.

The inputs are cut into units (documents.plan). Each becomes a shard in PREFIX.parts/, written beside and put in place
by renames, its .json last: a shard with a .json is finished for good. When all are, one merge writes PREFIX.* beside
and publishes it, the .idx last. So a kill at any moment costs the unfinished units, and starting again gives what one
run would have given. Each worker has a pipe to the parent: a dead parent ends it, a dead worker is named.
"""
import fcntl
import hashlib
import json
import multiprocessing
import multiprocessing.connection
import os
import pathlib
import shutil
import signal
import sys
import time
import uuid
from dataclasses import dataclass

import numpy as np

from config import ConfigError
from data import documents
from data import tokenizer as tokenizers
from data.documents import Bad, Piece
from data.indexed import Indexed, Writer, dtype_of, naming, sync

BATCH = 1 << 20  # characters encoded in one call
TRAIN_ON = 64 << 20  # characters of text a bpe-N is trained on, taken from evenly spaced units
SHOWN = 5  # bad records kept by name in each shard
POINTS = tuple(f"prepare.{p}" for p in (
    "planned", "mid_shard", "pre_shard_commit", "mid_shard_commit", "post_shard", "mid_merge", "pre_publish",
    "published.tokenizer", "published.bin", "published.crc", "published.json", "published.idx"))  # where tests kill it


@dataclass(frozen=True)
class Job:
    """What decides the bytes of a shard, and where it goes."""
    parts: str  # folder of the shards
    key: str  # field of the text in jsonl, parquet, hf
    append_eod: bool
    skip_bad: bool


def run(inputs: list[str], tokenizer: str, out, key: str = "text", workers: int = 1, append_eod: bool = True,
        skip_bad: bool = False, source: str | None = None, unit: int = documents.UNIT,
        say=lambda text: None, progress=lambda done, whole: None, at=lambda point: None) -> dict:
    """Makes OUT.bin, .idx, .json, .crc and OUT.tokenizer/; returns the report. `at` hears of every named crash point.
    Raises ConfigError (Bad: naming file:line), OSError with a file name when the disk fails."""
    clock = time.monotonic()
    out = pathlib.Path(out)
    units = documents.plan(inputs, unit)
    if not units:
        raise ConfigError(f"--input {' '.join(inputs)}: holds nothing to read")
    job = Job(f"{out}.parts", key, append_eod, skip_bad)
    mark = plan_digest(job, inputs, tokenizer, units)
    os.makedirs(job.parts, exist_ok=True)
    with open(f"{job.parts}/lock", "w") as lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)  # the kernel takes it back from the dead
        except OSError:
            raise ConfigError(f"{job.parts}: another process works on this --out; wait, or choose another") from None
        if not same_plan(job, mark):
            say("inputs or settings differ from the unfinished run's: starting over")
        tok = ready_tokenizer(job, tokenizer, units, say)
        at("prepare.planned")
        todo = [i for i in range(len(units)) if not finished(job, i)]
        if len(todo) < len(units):
            say(f"going on: {len(units) - len(todo)} of {len(units)} shards are finished")
        progress(0, sum(size_of(units[i]) for i in todo))
        if min(workers, len(todo)) > 1:
            in_parallel(job, units, todo, min(workers, len(todo)), progress)
        else:
            in_turn(job, units, todo, tok, progress, at)
        report = merge(job, units, tok, out, source, at)
        shutil.rmtree(job.parts)
    return {"out": str(out), **report, "tokenizer": tok.name, "fingerprint": tok.fingerprint, "vocab": tok.vocab,
            "dtype": np.dtype(dtype_of(tok.vocab)).name, "input_bytes": sum(map(size_of, units)), "workers": workers,
            "seconds": time.monotonic() - clock, "shards": len(units), "shards_kept": len(units) - len(todo)}


def size_of(unit: list[Piece]) -> int:
    return sum(piece.size for piece in unit)


# ---- the unfinished run ----------------------------------------------------------------------------------------------

def plan_digest(job: Job, inputs, tokenizer: str, units) -> str:
    """sha256 of all that decides the shards. Not of skip_bad: a shard without bad records is the same either way."""
    tok = tokenizer if tokenizers.bpe_pieces(tokenizer) else tokenizers.load(tokenizer).fingerprint
    paths = sorted({p.path for u in units for p in u if p.kind != "hf"})
    stats = [(p, s.st_size, s.st_mtime_ns) for p in paths for s in [os.stat(p)]]
    cuts = [[(p.path, p.start, p.stop) for p in u] for u in units]
    return hashlib.sha256(json.dumps([tok, job.key, job.append_eod, inputs, stats, cuts]).encode()).hexdigest()


def same_plan(job: Job, mark: str) -> bool:
    """Keeps the shards of a run with the same digest; clears those of another and answers False."""
    path = pathlib.Path(job.parts, "plan")
    old = path.read_text() if path.exists() else None
    if old == mark:
        return True
    for name in os.listdir(job.parts):
        if name != "lock":
            stale = os.path.join(job.parts, name)
            shutil.rmtree(stale) if os.path.isdir(stale) else os.unlink(stale)
    write_beside(path, mark.encode())
    return old is None


def ready_tokenizer(job: Job, spec: str, units, say):
    """The tokenizer, kept in the parts so that workers and a later run load the very same one."""
    folder = pathlib.Path(job.parts, "tokenizer")
    if not folder.exists():
        wanted = tokenizers.bpe_pieces(spec)
        tok = train(units, job, wanted, say) if wanted else tokenizers.load(spec)
        beside = folder.with_name("tokenizer.tmp")
        with naming(beside):
            shutil.rmtree(beside, ignore_errors=True)
            beside.mkdir()
            tok.save(beside)
            os.rename(beside, folder)
    return tokenizers.load(folder)


def train(units, job: Job, wanted: int, say):
    clock = time.monotonic()
    stride = max(1, sum(map(size_of, units)) // TRAIN_ON)

    def texts():
        left = TRAIN_ON
        for piece in (p for u in units[::stride] for p in u):
            for record in documents.read(piece, job.key):
                if left <= 0:
                    return
                if record.text:
                    left -= len(record.text)
                    yield record.text

    tok = tokenizers.train_bpe(texts(), wanted)
    say(f"tokenizer {tok.name} (trained, {time.monotonic() - clock:.1f} s)")
    return tok


# ---- shards ----------------------------------------------------------------------------------------------------------

def shard_path(job: Job, i: int, end: str) -> str:
    return f"{job.parts}/{i:06d}{end}"


def finished(job: Job, i: int) -> bool:
    """Made whole, and not by leaving out bad records that this run wants to hear of."""
    try:
        meta = shard_meta(job, i)
        whole = all(os.path.getsize(shard_path(job, i, end)) == size for end, size in meta["sizes"].items())
    except (OSError, ValueError, KeyError):
        return False
    return whole and (job.skip_bad or not meta["bad"])


def shard_meta(job: Job, i: int) -> dict:
    return json.loads(pathlib.Path(shard_path(job, i, ".json")).read_bytes())


def make_shard(job: Job, i: int, unit: list[Piece], tok, report=lambda done: None, at=lambda point: None) -> None:
    """Tokens and lengths of one unit. Raises Bad at its first bad record unless they are to be skipped."""
    count = {"documents": 0, "tokens": 0, "text_bytes": 0, "empty": 0, "bad": 0, "shown": []}
    end = [np.array([tok.eod])] if job.append_eod else []
    dtype = dtype_of(tok.vocab)
    beside = {e: f"{shard_path(job, i, e)}.tmp" for e in (".bin", ".len")}

    def flush(texts):
        if not texts:
            return
        encoded = tok.batch(texts)
        ids = np.concatenate([part for doc in encoded for part in (doc, *end)], dtype=dtype, casting="unsafe")
        with naming(beside[".bin"]):
            tokens_file.write(ids)
        with naming(beside[".len"]):
            lengths_file.write(np.array([len(doc) + len(end) for doc in encoded], "<i4"))
        at("prepare.mid_shard")
        count["documents"] += len(texts)
        count["tokens"] += len(ids)
        count["text_bytes"] += sum(len(t.encode("utf-8")) for t in texts)

    with naming(beside[".bin"]), open(beside[".bin"], "wb") as tokens_file, open(beside[".len"], "wb") as lengths_file:
        texts, held, before = [], 0, 0
        for n, piece in enumerate(unit):
            for record in documents.read(piece, job.key):
                if record.text is None:
                    if not job.skip_bad:
                        where = documents.place(piece, record.line)
                        raise Bad(f"{where}: {record.why}; mend it, or leave such records out with --skip-bad")
                    count["bad"] += 1
                    if len(count["shown"]) < SHOWN:
                        count["shown"].append([n, record.line, record.why])
                elif not record.text:
                    count["empty"] += 1
                else:
                    texts.append(record.text)
                    held += len(record.text)
                if held >= BATCH:
                    flush(texts)
                    report(before + record.done)
                    texts, held = [], 0
            before += piece.size
        flush(texts)
        sync(tokens_file)
        sync(lengths_file)
        count["sizes"] = {".bin": tokens_file.tell(), ".len": lengths_file.tell()}
    at("prepare.pre_shard_commit")
    for e, path in beside.items():
        os.replace(path, shard_path(job, i, e))
    at("prepare.mid_shard_commit")
    write_beside(shard_path(job, i, ".json"), json.dumps(count).encode())
    report(before)
    at("prepare.post_shard")


def write_beside(path, content: bytes) -> None:
    with naming(path):
        with open(f"{path}.tmp", "wb") as f:
            f.write(content)
            sync(f)
        os.replace(f"{path}.tmp", path)


def in_turn(job: Job, units, todo, tok, progress, at) -> None:
    before, whole = 0, sum(size_of(units[i]) for i in todo)
    for i in todo:
        make_shard(job, i, units[i], tok, lambda done, before=before: progress(before + done, whole), at)
        before += size_of(units[i])


def in_parallel(job: Job, units, todo, workers, progress) -> None:
    """Hands out units in order. When one fails, those before it still end: the first fault of the input is told."""
    ctx = multiprocessing.get_context("spawn")  # a fork would copy the locks that other threads hold
    pipes, left = {}, list(todo)
    done, whole = {}, sum(size_of(units[i]) for i in todo)
    failed, fault = len(units), None
    try:
        for _ in range(workers):
            ours, theirs = ctx.Pipe()
            process = ctx.Process(target=serve, args=(theirs, job), daemon=True)
            process.start()
            theirs.close()
            pipes[ours] = process
        busy = {}  # pipe -> unit
        while True:
            for pipe in pipes:
                if pipe not in busy and left and left[0] < failed:
                    busy[pipe] = left.pop(0)
                    pipe.send((busy[pipe], units[busy[pipe]]))
            if not any(i < failed for i in busy.values()):
                break
            for pipe in multiprocessing.connection.wait(list(busy)):
                kind, value = pipe.recv()
                if kind == "progress":
                    done[busy[pipe]] = value
                    progress(sum(done.values()), whole)
                    continue
                i = busy.pop(pipe)
                if kind == "fault" and i < failed:
                    failed, fault = i, value
        if fault:
            raise fault
    except (EOFError, ConnectionError):
        pipes[pipe].join(5)
        raise ConfigError(f"{job.parts}: a worker died (exit code {pipes[pipe].exitcode}); the same command goes on, "
                          "with fewer --workers if memory ran out") from None
    finally:
        for pipe, process in pipes.items():
            process.terminate()
            process.join()
            pipe.close()


def serve(pipe, job: Job) -> None:
    """A worker. Ends when the parent's end of the pipe does."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # ^C reaches the whole group; the parent ends us
    tok = tokenizers.load(pathlib.Path(job.parts, "tokenizer"))
    try:
        while True:
            i, unit = pipe.recv()
            try:
                make_shard(job, i, unit, tok, lambda done: pipe.send(("progress", done)))
                pipe.send(("done", None))
            except ConnectionError:
                raise
            except (ConfigError, OSError) as e:
                pipe.send(("fault", e))
    except (EOFError, ConnectionError):
        return


# ---- merge -----------------------------------------------------------------------------------------------------------

def merge(job: Job, units, tok, out: pathlib.Path, source: str | None, at) -> dict:
    """All shards, in order, into OUT.*; the counts of the report."""
    total = {"documents": 0, "tokens": 0, "text_bytes": 0, "empty": 0, "bad": 0}
    shown = []
    for i, unit in enumerate(units):
        meta = shard_meta(job, i)
        for k in total:
            total[k] += meta[k]
        room = SHOWN - len(shown)
        shown += [f"{documents.place(unit[n], line)}: {why}" for n, line, why in meta["shown"][:room]]
    if not total["documents"]:
        shutil.rmtree(job.parts)
        raise ConfigError(f"{units[0][0].path}: the input has no documents, but {total['empty']} empty and "
                          f"{total['bad']} bad records{f', the first {shown[0]}' if shown else ''}")
    with Writer(out, tok.vocab) as w:
        for i in range(len(units)):
            with open(shard_path(job, i, ".bin"), "rb") as tokens, open(shard_path(job, i, ".len"), "rb") as lengths:
                while len(ids := np.fromfile(tokens, w.dtype, 1 << 20)):
                    w.extend(ids, [])
                while len(some := np.fromfile(lengths, "<i4", 1 << 18)):
                    w.extend(ids, some)  # the ids have come to their end
            at("prepare.mid_merge")
        w.finish(tok, total["text_bytes"], source, at)
    return {**total, "bad_records": shown}


# ---- the standard library, on the spot -------------------------------------------------------------------------------

def stdlib(cache, spec: str | None) -> tuple[pathlib.Path, str]:
    """(prefix, "made in 2.4 s" | "cached") of Python's own library, made under `cache` where it is not there yet.
    Two that start together make it once: the second waits. Raises ConfigError; OSError when the disk fails."""
    spec = spec or "bpe-1024"
    cache = pathlib.Path(cache)
    version = f"{sys.version_info[0]}.{sys.version_info[1]}"
    label = spec if tokenizers.bpe_pieces(spec) or spec == "bytes" else tokenizers.load(spec).fingerprint[:12]
    content = hashlib.sha256()
    for path in documents.stdlib():
        content.update(hashlib.sha256(pathlib.Path(path).read_bytes()).digest())
    home = cache / f"stdlib-{version}-{label}-{content.hexdigest()[:12]}"
    if (home / "text.idx").exists():
        return home / "text", "cached"
    cache.mkdir(parents=True, exist_ok=True)
    with open(cache / "lock", "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if (home / "text.idx").exists():
            return home / "text", "cached"
        for old in cache.glob("*.tmp-*"):  # of runs that were killed: nobody else is here
            shutil.rmtree(old, ignore_errors=True)
        beside = home.with_name(f"{home.name}.tmp-{uuid.uuid4().hex[:8]}")
        clock = time.monotonic()
        try:
            run(["stdlib"], spec, beside / "text", skip_bad=True, source=f"python stdlib {version}")
            os.replace(beside, home)
        finally:
            shutil.rmtree(beside, ignore_errors=True)
    return home / "text", f"made in {time.monotonic() - clock:.1f} s"


def sample(out, characters: int = 200) -> str:
    """The beginning of the first document, decoded: what a user looks at to believe the rest."""
    data = Indexed(out)
    ids = data.read(0, min(data.start(1), 4 * characters))
    return tokenizers.load(f"{out}.tokenizer").decode(ids.tolist())[:characters]
