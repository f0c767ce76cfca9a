"""Makes training data of public corpora: fetches, filters, mixes and tokenizes them.

    python -m scripts.corpus fineweb-edu-10bt --tokens 1B --train-tokenizer 32768 --out runs/data/edu
    python -m scripts.corpus fineweb-edu:0.7 dclm:0.3 --tokens 10B --tokenizer T --out runs/data/mix
    python train.py llama3-tiny --config runs/data/mix/data.yaml

OUT/NAME.bin and OUT/NAME.idx are Megatron's format, OUT/data.yaml the keys of a run, OUT/corpus.json the size
and sha256 of every file that was read.

Exit codes: 0 done, 2 a mistake, no network at the start, or a file that has changed (one line), 81 out of
memory, 82 the disk or the store fails, 130 interrupted. After any of them, and after a kill, the same command
continues where it stopped.
"""
import argparse
import itertools
import json
import math
import os
import pathlib
import re
import shlex
import shutil
import sys
from dataclasses import replace

import numpy as np
import yaml

from config import ConfigError, Tree, provenance, usable_cores
from config.command_line import CommandParser
from config.terminal import hanging_lines, output_width, table_lines
from data import prepare
from data import tokenizer as tokenizers
from data.contract import get_dtype
from data.corpora import (
    CORPORA,
    REVISIONS,
    TOKENIZER,
    Corpus,
    CorpusRecord,
    chosen_corpora,
    opened_record,
    read_corpora,
    with_digests,
)
from data.documents import Filter
from data.progress import Progress
from data.remote import RemoteError

USER_MISTAKE = 2
OUT_OF_MEMORY = 81
STORAGE = 82
INTERRUPTED = 130  # Ctrl-C, as a shell reports it
COUNT = re.compile(r"(\d+(?:\.\d+)?)([KMBT]?)", re.IGNORECASE)
UNITS = {"": 1, "K": 10**3, "M": 10**6, "B": 10**9, "T": 10**12}
BYTES_PER_TOKEN = 3  # of a compressed file; fineweb-edu-10bt has 2.9, the others fewer
COPIES = 2  # of the tokens: shards, and what they are merged into
LABEL_WIDTH = 10  # of the labels of the report


def arguments() -> argparse.ArgumentParser:
    assert __doc__
    description, epilog = __doc__.split("\n\n", 1)
    parser = CommandParser(prog="python -m scripts.corpus", description=description, epilog=epilog)
    add = parser.add_argument
    add("corpora", nargs="*", metavar="NAME[:WEIGHT]",
        help="corpora of configs/corpora.yaml; of several, the share of the tokens that each gives")
    add("--list", action="store_true", help="print the corpora: dataset, revision, tokens, license, paper")
    add("--out", metavar="OUT", help="folder for the data")
    add("--tokens", type=count, metavar="N",
        help="of all corpora together, such as 10B; whole files are read (default: all tokens)")
    add("--files", type=int, metavar="N", help="files of each corpus at most (default: as many as it takes)")
    add("--tokenizer", metavar="T",
        help="bytes, a sentencepiece .model, tokenizer.json, or their folder")
    add("--train-tokenizer", type=int, metavar="N",
        help="train a BPE of N ids on the mixture instead, kept in OUT/tokenizer")
    add("--min-score", type=float, metavar="X",
        help="leave out documents whose score is lower (default: none is left out)")
    add("--min-characters", type=int, default=0, metavar="N", help="leave out shorter documents (default: 0)")
    add("--jsonl-key", metavar="KEY", help="field or column of the text (default: that of the corpus)")
    add("--score-key", metavar="KEY", help="field or column of the score (default: that of the corpus)")
    add("--from", dest="base", metavar="BASE",
        help="a folder or URL with a copy, BASE/OWNER/DATASET/FILE (default: the Hugging Face hub)")
    add("--skip-bad", action="store_true",
        help="leave out and count broken records; otherwise the first one ends the run")
    add("--workers", type=int, default=usable_cores(), metavar="N",
        help="processes (default: one for each core); the result does not depend on it")
    add("--json", action="store_true", help="print the report as one line of JSON on stdout")
    return parser


def count(text: str) -> int:
    """Read a number such as 500M or 1.5T."""
    match = COUNT.fullmatch(text)
    if match is None:
        raise argparse.ArgumentTypeError(f"expected a number of tokens such as 500M or 10B, got {text!r}")
    return round(float(match[1]) * UNITS[match[2].upper()])


def main(argv: list[str] | None = None) -> int:
    argv = sys.argv[1:] if argv is None else argv
    progress = Progress(sys.stderr)
    try:
        args = arguments().parse_args(argv)
        if args.list:
            print("\n".join(list_corpora()))
            return 0
        check_options(args)
        report = make_data(args, provenance.of_script("scripts.corpus", argv), progress)
    except ConfigError as error:
        progress.say(f"error: {error}")
        return USER_MISTAKE
    except RemoteError as error:
        progress.say(f"error: {error}; the same command continues, also with --from")
        return STORAGE
    except OSError as error:
        progress.say(f"error: {error.filename or args.out}: {error.strerror}; free space or repair the disk, "
                     "then the same command continues")
        return STORAGE
    except MemoryError:
        progress.say("error: out of memory: use fewer --workers")
        return OUT_OF_MEMORY
    except KeyboardInterrupt:
        progress.say("interrupted; the same command continues")
        return INTERRUPTED
    progress.end()
    print(json.dumps(report) if args.json else summary(report))
    return 0


def list_corpora() -> list[str]:
    rows = [
        {"corpus": each.name, "dataset": each.repo, "revision": each.revision[:12],
         "tokens": f"{each.tokens / 1e9:,.0f}B", "score": "yes" if each.score else "",
         "license": each.license, "arXiv": each.source}
        for each in read_corpora().values()
    ]
    return table_lines(rows, to_left={"corpus", "dataset", "revision", "score", "license", "arXiv"})


def check_options(args: argparse.Namespace) -> None:
    """Raise ConfigError for options that are missing or go beyond their range."""
    if not args.corpora:
        raise ConfigError("NAME: missing; see --list for the corpora")
    if args.out is None:
        raise ConfigError("--out: missing; name the folder for the data")
    if (args.tokenizer is None) == (args.train_tokenizer is None):
        raise ConfigError("--tokenizer: give either a tokenizer, or --train-tokenizer N to train one")
    if args.tokenizer is not None and tokenizers.bpe_pieces(args.tokenizer):
        raise ConfigError(f"--tokenizer: {args.tokenizer} is trained here; write --train-tokenizer "
                          f"{tokenizers.bpe_pieces(args.tokenizer)}")
    for option in ("tokens", "files", "train_tokenizer", "workers"):
        value = getattr(args, option)
        if value is not None and value < 1:
            raise ConfigError(f"--{option.replace('_', '-')}: {value} must be at least 1")
    if args.min_score is not None and not math.isfinite(args.min_score):
        raise ConfigError(f"--min-score: {args.min_score} is not a finite number")
    if args.min_characters < 0:
        raise ConfigError(f"--min-characters: {args.min_characters} must be at least 0")


# ---- making ------------------------------------------------------------------------------------------------

def make_data(args: argparse.Namespace, made: Tree, progress: Progress) -> Tree:
    """Make OUT, or what is left of it. Return the report. Raises ConfigError, RemoteError and OSError."""
    known = read_corpora()
    weights = chosen_corpora(args.corpora, known)
    corpora = [
        replace(known[name], text=args.jsonl_key or known[name].text,
                score=args.score_key or known[name].score)
        for name in weights
    ]
    check_scores(args, corpora)
    given = None if args.tokenizer is None else tokenizers.load_tokenizer(args.tokenizer)
    request = {
        CORPORA: " ".join(f"{name}:{weight:g}" for name, weight in weights.items()),
        REVISIONS: " ".join(f"{each.repo}@{each.revision}" for each in corpora),
        "--tokens": args.tokens, "--files": args.files,
        "--tokenizer": f"bpe-{args.train_tokenizer}" if given is None else given.fingerprint,
        "--min-score": args.min_score, "--min-characters": args.min_characters,
        "--jsonl-key": args.jsonl_key, "--score-key": args.score_key,
    }
    out = pathlib.Path(args.out)
    record = opened_record(out, request, corpora, args.base, most=args.files)
    with prepare.locked_folder(str(out)):
        jobs = {each.name: corpus_job(args, each, out) for each in corpora}
        spec = args.tokenizer or trained_tokenizer(args, jobs, record, weights, progress=progress)
        check_disk(args, jobs, record, weights, vocab=tokenizers.load_tokenizer(spec).vocab)
        for corpus in corpora:
            name, prefix = corpus.name, out / corpus.name
            if name in record.reports and prefix.with_name(f"{name}.idx").exists():
                progress.say(f"{name}: finished before")
                continue
            limit = None if args.tokens is None else math.ceil(args.tokens * weights[name])
            record.reports[name] = make_corpus(jobs[name], corpus, record, spec, prefix, limit=limit,
                                               workers=args.workers, made=made, progress=progress)
            record.files[name] = with_digests(record.files[name], record.reports[name].pop("fetched"))
            record.write(out)
        shutil.rmtree(out / "downloads", ignore_errors=True)

    paths = [str(out / name) for name in weights]
    path = paths[0]
    if len(paths) > 1:
        path = " ".join(f"{weight:g} {shlex.quote(each)}" for weight, each in zip(weights.values(), paths))
    keys = yaml.safe_dump({"data": {"path": path}}, width=10**6)
    prepare.write_atomically(out / "data.yaml", keys.encode())
    return {
        "out": str(out),
        "config": str(out / "data.yaml"),
        "data.path": path,
        "corpora": {each.name: {**record.reports[each.name], "license": each.license} for each in corpora},
    }


def check_scores(args: argparse.Namespace, corpora: list[Corpus]) -> None:
    """Raise ConfigError if a filter needs a score that a corpus does not have."""
    without = [each.name for each in corpora if each.score is None]
    if args.min_score is not None and without:
        raise ConfigError(f"--min-score: {without[0]} has no score; leave it out, or name a column with "
                          "--score-key")
    if args.score_key is not None and args.min_score is None:
        raise ConfigError("--score-key: is for --min-score; add it, or leave this out")


def corpus_job(args: argparse.Namespace, corpus: Corpus, out: pathlib.Path) -> prepare.TokenizeJob:
    """Return how the files of a corpus are read."""
    score = None if args.min_score is None else corpus.score
    return prepare.TokenizeJob(
        parts=f"{out / corpus.name}.parts",
        key=corpus.text,
        append_eod=True,
        skip_bad=args.skip_bad,
        keep=Filter(score, args.min_score or 0.0, args.min_characters),
        fetched=str(out / "downloads"),
    )


def trained_tokenizer(
    args: argparse.Namespace, jobs: dict[str, prepare.TokenizeJob], record: CorpusRecord,
    weights: dict[str, float], *, progress: Progress,
) -> str:
    """Return OUT/tokenizer, after it was trained on as much of each corpus as its weight says."""
    folder = pathlib.Path(args.out, TOKENIZER)
    if not folder.exists():
        texts = itertools.chain.from_iterable(
            prepare.training_texts(
                [[file.piece()] for file in record.files[name]], job, None,
                round(prepare.TRAINING_CHARACTERS * weights[name]),
            )
            for name, job in jobs.items()
        )
        tok = tokenizers.train_bpe(texts, args.train_tokenizer)
        temporary = folder.with_name("tokenizer.tmp")
        shutil.rmtree(temporary, ignore_errors=True)
        temporary.mkdir()
        tok.save(temporary)
        os.rename(temporary, folder)
        progress.say(f"tokenizer {tok.name} trained")
    return str(folder)


def check_disk(
    args: argparse.Namespace, jobs: dict[str, prepare.TokenizeJob], record: CorpusRecord,
    weights: dict[str, float], *, vocab: int,
) -> None:
    """Raise ConfigError if corpora that are not begun do not fit on the disk of OUT, by a low estimate."""
    token_bytes = np.dtype(get_dtype(vocab)).itemsize
    needed = 0
    for name, files in record.files.items():
        if name in record.reports or os.path.exists(jobs[name].parts):
            continue
        tokens = sum(file.size for file in files) // BYTES_PER_TOKEN
        if args.tokens is not None:
            tokens = min(tokens, math.ceil(args.tokens * weights[name]))
        needed += COPIES * token_bytes * tokens
        needed += sum(sorted(file.size for file in files)[-args.workers:])
    free = shutil.disk_usage(args.out).free
    if needed > free:
        raise ConfigError(f"--out: {args.out} needs at least {needed / 1e9:,.1f} GB, and {free / 1e9:,.1f} "
                          "GB are free; free space, or give fewer --tokens or --files")


def make_corpus(
    job: prepare.TokenizeJob, corpus: Corpus, record: CorpusRecord, spec: str, prefix: pathlib.Path, *,
    limit: int | None, workers: int, made: Tree, progress: Progress,
) -> Tree:
    """Make PREFIX.* of the files of one corpus. Return its part of the report."""
    files = record.files[corpus.name]
    report = prepare.prepare_corpus(
        [],
        spec,
        prefix,
        key=job.key,
        workers=workers,
        skip_bad=job.skip_bad,
        source=f"{corpus.repo}@{corpus.revision}",
        made=made,
        units=[[file.piece()] for file in files],
        keep=job.keep,
        limit_tokens=limit,
        fetched=job.fetched,
        say=progress.say,
        progress=progress.show,
    )
    for bad in report["bad_records"]:
        progress.say(f"left out {bad}")
    if limit is not None and report["tokens"] < limit:
        progress.say(f"{corpus.name}: its {len(files):,} files hold {report['tokens']:,} of the {limit:,} "
                     "tokens that are asked for")
    names = ("documents", "tokens", "text_bytes", "dropped", "empty", "bad", "fetched")
    return {**{name: report[name] for name in names}, "files": report["shards"]}


# ---- report ------------------------------------------------------------------------------------------------

def summary(report: Tree) -> str:
    """Return the report as lines of text."""
    parts: dict[str, str] = {}
    for name, each in report["corpora"].items():
        left_out = "".join(
            f", {each[key]:,} {why}" for key, why in
            (("dropped", "filtered out"), ("empty", "empty"), ("bad", "broken and left out")) if each[key]
        )
        parts[name] = (f"{each['files']:,} files, {each['documents']:,} documents, {each['tokens']:,} tokens "
                       f"({each['text_bytes'] / each['tokens']:.2f} bytes per token){left_out}; "
                       f"license {each['license']}")
    parts["saved"] = f"{report['config']}: data.path {report['data.path']}"
    label_width = max(LABEL_WIDTH, *(len(name) + 2 for name in parts))
    lines: list[str] = []
    for label, text in parts.items():
        lines += hanging_lines(f"{label:<{label_width}}", text, output_width())
    next_step = f"python train.py --config {shlex.quote(report['config'])}"
    return "\n".join([*lines, f"{'next':<{label_width}}{next_step}"])


if __name__ == "__main__":
    sys.exit(main())
