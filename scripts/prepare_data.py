"""Tokenizes text for training: writes PREFIX.bin and PREFIX.idx in Megatron's format.

    python -m scripts.prepare_data --input docs/*.jsonl.zst --tokenizer bpe-32000 --out runs/data/docs
    python train.py --data.path runs/data/docs

    python -m scripts.prepare_data --chat --input chats.jsonl --tokenizer T --out runs/data/chats --show 2
    python -m scripts.prepare_data --out runs/data/chats --show 2

print conversations with what the loss counts in color, or in ⟦ ⟧.

Exit codes: 0 done, 2 a mistake in the input or the command (one line), 82 the disk fails (one line with the
path), 130 interrupted. After any of them, and after a kill, the same command continues where it stopped.
"""
import argparse
import contextlib
import json
import os
import pathlib
import shlex
import sys
from collections.abc import Iterator

from config import ConfigError, DataConfig, provenance, usable_cores
from config.command_line import CommandParser
from config.terminal import hanging_lines, output_width
from data import prepare
from data.chat import FIXED_DATE, parsed_date
from data.documents import COMPRESSED, KINDS
from data.indexed import rounded_share
from data.progress import Progress
from data.show import shown_documents

USER_MISTAKE = 2
OUT_OF_MEMORY = 81
STORAGE = 82
INTERRUPTED = 130  # Ctrl-C, as a shell reports it
LABEL_WIDTH = 10  # of the labels of the report


def arguments() -> argparse.ArgumentParser:
    assert __doc__
    description, epilog = __doc__.split("\n\n", 1)
    parser = CommandParser(
        prog="python -m scripts.prepare_data",
        description=description,
        epilog=epilog,
    )
    add = parser.add_argument
    add("--input", nargs="+", metavar="FILE",
        help=f"files, folders or globs of {' '.join(KINDS)} (also {', '.join(COMPRESSED)}; text: one "
             "document a file), text:FILES (text, whatever their names end in), hf:NAME[:CONFIG][:SPLIT] "
             "(Hugging Face, streamed), or stdlib (Python's own source)")
    add("--tokenizer", metavar="T",
        help="bpe-N (trained on the input), bytes, a sentencepiece .model, tokenizer.json, or their folder")
    add("--out", required=True, metavar="PREFIX",
        help="PREFIX.bin and PREFIX.idx are written; unfinished work is kept in PREFIX.parts/")
    add("--chat", action="store_true",
        help="each record is a conversation (OpenAI, ShareGPT, prompt and completion, Alpaca), written "
             "with the tokenizer's chat template; the loss counts what the assistant says")
    add("--date", metavar="YYYY-MM-DD",
        help="with --chat: today's date for templates that write it (default: theirs, or " + FIXED_DATE + ")")
    add("--seq-len", type=int, metavar="N",
        help="with --chat: train.seq_len, which conversations are to fit (default: no limit)")
    add("--long", choices=prepare.LONG,
        help="with --seq-len: longer conversations are bad records (default), cut before a user's message "
             "where they can be, or cut anywhere in training")
    add("--drop-reasoning", action="store_true",
        help="with --chat: a template may leave reasoning out (many keep that of the last turn alone); "
             "otherwise such a conversation is bad")
    add("--fim", action="store_true",
        help="a tokenizer bpe-N gets the sentinels of fill-in-the-middle (data.fim_rate)")
    add("--jsonl-key", "--text-key", metavar="KEY",
        help="field or column that holds the text (default: text) or the messages (default: by the form); "
             "a.b is field b of the object under a")
    add("--workers", type=int, default=usable_cores(), metavar="N",
        help="processes (default: one for each core); the result does not depend on it")
    add("--append-eod", action=argparse.BooleanOptionalAction, default=True,
        help="end each document with the end-of-document token (default: on)")
    add("--eod", metavar="TOKEN_OR_ID",
        help="the token that ends documents, by its text or id (default: what the tokenizer's files name)")
    add("--max-lost", type=float, default=prepare.MAX_LOST, metavar="PERCENT",
        help="refuse a tokenizer that loses more of the text's bytes (default: 1)")
    add("--skip-bad", action="store_true",
        help="leave out and count invalid UTF-8 and broken records; otherwise the first one ends the run")
    add("--show", type=int, metavar="N",
        help="print the first N documents with what the loss counts marked; without --input, those of --out")
    add("--json", action="store_true", help="print the report as one line of JSON on stdout")
    return parser


def parse(argv: list[str]) -> tuple[argparse.Namespace, bool]:
    """Return (the options, whether to only show existing data). Raises ConfigError."""
    parser = arguments()
    args = parser.parse_args(argv)
    args.out = str(pathlib.Path(args.out))  # drops a trailing slash
    missing = [f"--{name}" for name in ("input", "tokenizer") if getattr(args, name) is None]
    is_shown_alone = args.show is not None and len(missing) == 2
    if missing and not is_shown_alone:
        parser.error(f"the following arguments are required: {', '.join(missing)}")
    return args, is_shown_alone


def main(argv: list[str] | None = None) -> int:
    argv = sys.argv[1:] if argv is None else argv
    try:
        args, is_shown_alone = parse(argv)
    except ConfigError as error:
        print(f"error: {error}", file=sys.stderr)
        return USER_MISTAKE
    progress = Progress(sys.stderr)
    try:
        if args.date is not None:
            parsed_date(args.date)
        if args.show is not None and args.json:
            raise ConfigError("--show: prints text, and --json one line of JSON; leave one of them out")
        if args.show is not None and args.show < 1:
            raise ConfigError(f"--show: {args.show} must be at least 1")
        if is_shown_alone:
            with until_closed_pipe():
                show(args.out, args.show)
            return 0
        if args.workers < 1:
            raise ConfigError(f"--workers: {args.workers} must be at least 1")
        if not 0 <= args.max_lost <= 100:
            raise ConfigError(f"--max-lost: {args.max_lost:g} is not a percentage from 0 to 100")
        if args.chat and not args.append_eod:
            raise ConfigError("--no-append-eod: the format of a conversation says how it ends; leave it out")
        chat_options = {"--date": args.date, "--drop-reasoning": args.drop_reasoning or None,
                        "--seq-len": args.seq_len, "--long": args.long}
        given = [option for option, value in chat_options.items() if value is not None]
        if given and not args.chat:
            raise ConfigError(f"{given[0]}: is for conversations; add --chat, or leave it out")
        if args.long and args.seq_len is None:
            raise ConfigError(f"--long {args.long}: says what becomes of longer ones; add --seq-len N")
        if args.seq_len is not None and args.seq_len < 2:
            raise ConfigError(f"--seq-len: {args.seq_len} must be at least 2")
        report = prepare.prepare_corpus(
            args.input,
            args.tokenizer,
            args.out,
            key=args.jsonl_key or (None if args.chat else "text"),
            workers=args.workers,
            append_eod=args.append_eod,
            skip_bad=args.skip_bad,
            is_chat=args.chat,
            has_fim=args.fim,
            eod=args.eod,
            max_lost=args.max_lost,
            date=args.date,
            drops_reasoning=args.drop_reasoning,
            seq_len=args.seq_len,
            long=args.long or ("anywhere" if args.seq_len is None else "refuse"),
            made=provenance.of_script("scripts.prepare_data", argv),
            say=progress.say,
            progress=progress.show,
        )
        report["sample"] = prepare.sample_text(args.out)
    except ConfigError as error:
        progress.say(f"error: {error}")
        return USER_MISTAKE
    except OSError as error:
        progress.say(f"error: {error.filename or args.out}: {error.strerror}; free space or repair the disk, "
                     "then the same command continues")
        return STORAGE
    except MemoryError:
        progress.say("error: out of memory: a document, or what one line of a compressed file unpacks to, "
                     "does not fit; split it, or use fewer --workers")
        return OUT_OF_MEMORY
    except KeyboardInterrupt:
        progress.say(f"interrupted; the same command continues from {args.out}.parts")
        return INTERRUPTED

    progress.end()
    for record in report["bad_records"]:
        progress.say(f"left out {record}")
    with until_closed_pipe():
        if args.show is not None:
            show(args.out, args.show)
        print(json.dumps(report) if args.json else summary(report, run_of_tokenizer(args.tokenizer)))
    return 0


@contextlib.contextmanager
def until_closed_pipe() -> Iterator[None]:
    """Print until the reader of a pipe, such as `| head`, closes it."""
    try:
        yield
        sys.stdout.flush()
    except BrokenPipeError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # for Python's output at exit


def show(out: str, count: int) -> None:
    """Print the first documents of OUT. Raises ConfigError if it cannot be read."""
    begin, end = ("\x1b[32m", "\x1b[0m") if sys.stdout.isatty() else ("⟦", "⟧")
    for document in shown_documents(out, count):
        print(f"document {document.number} of {document.documents:,}: {document.tokens:,} tokens, "
              f"{document.counted:,} count")
        marked = [f"{begin}{part.text}{end}" if part.is_counted else part.text for part in document.parts]
        print("".join(marked))
        print()


def run_of_tokenizer(spec: str) -> pathlib.Path | None:
    """Return the run of a tokenizer RUN/tokenizer, whose model the data is most likely for."""
    folder = pathlib.Path(spec)
    is_run = folder.name == "tokenizer" and (folder.parent / "config.yaml").exists()
    return folder.parent if is_run else None


def summary(report: dict, run: pathlib.Path | None = None) -> str:
    """Return the report as lines of text. For `run` see run_of_tokenizer."""
    text_bytes, tokens = report["text_bytes"], report["tokens"]
    left_out = ""
    for key, name in (("bad", "bad records"), ("empty", "empty documents")):
        if report[key]:
            left_out += f"{', ' if left_out else '; '}{report[key]:,} {name} left out"
    parts = {
        "data": f"{report['documents']:,} documents, {text_bytes / 1e6:,.1f} MB, {tokens:,} tokens "
                f"({text_bytes / tokens:.2f} bytes per token){left_out}",
        **report["contract"],
        "lost": f"{report['lost_bytes']:,} bytes of the text "
                f"({100 * report['lost_bytes'] / text_bytes:.3g} %), "
                f"{report['unknown_tokens']:,} unknown tokens",
    }
    if report["chat"]:
        style = f"the template of {report['template']}" if report["template"] else "the plain format"
        told = f", told the date {report['date']}" if report["date"] else ""
        parts["chat"] = (f"{style}{told}; the loss counts {report['counted']:,} tokens "
                         f"({100 * report['counted'] / tokens:.1f} %)")
        parts["length"] = length_text(report)
    notes = [f"{note} ({count:,} records)" for note, count in report["notes"].items()]
    if report["documents"] == 1:
        notes.append("one document leaves none for validation: give several, or make VALID of other text")
    if notes:
        parts["notes"] = "; ".join(notes)
    parts["speed"] = speed_text(report)
    parts["sample"] = repr(report["sample"])
    parts["saved"] = f"{report['out']}.bin, .idx"

    width = output_width()
    lines: list[str] = []
    for label, text in parts.items():
        lines += hanging_lines(f"{label:<{LABEL_WIDTH}}", text, width)
    next_step = "python train.py"
    if run is not None:
        words = ["--config", str(run / "config.yaml"), "--log.name", pathlib.Path(report["out"]).name]
        next_step += f" {shlex.join([*words, '--checkpoint.init_from', str(run)])}"
    next_step += f" --data.path {shlex.quote(report['out'])}"
    next_step += split_of_few(report["documents"])
    if report["chat"]:
        next_step += " --data.pack best_fit --data.doc_mask true"
        next_step += f" --train.seq_len {report['seq_len']}" if report["seq_len"] else ""
    return "\n".join([*lines, f"{'next':<{LABEL_WIDTH}}{next_step}"])


def split_of_few(documents: int) -> str:
    """Return arguments that keep documents for validation, if the default of data.split keeps none."""
    train, valid = map(int, DataConfig().split.split(","))
    if rounded_share(documents, train, train + valid) < documents:
        return ""
    return " --data.valid VALID" if documents == 1 else f" --data.split {documents - 1},1"


def length_text(report: dict) -> str:
    """Describe the length of conversations, and what happens to those longer than a sequence."""
    longest = f"the longest has {report['longest']:,} tokens"
    if report["seq_len"] is None:
        holding = max(2, report["longest"] - 1)
        return (f"{longest}: train.seq_len {holding} holds it whole; a shorter one cuts, and an answer whose "
                "question is cut away does not count")
    fates = {"refuse": "left out", "turns": "cut before a user's message", "anywhere": "cut in training"}
    return f"{longest}; {report['long']:,} did not fit a sequence of {report['seq_len']:,}" + (
        f": {fates[report['long_are']]}" if report["long"] else "")


def speed_text(report: dict) -> str:
    """Return this start's rate of tokenizing, without training the tokenizer or earlier work."""
    whole = f"{report['seconds']:.1f} s in all"
    if not report["tokenized_bytes"]:
        return f"nothing was left to tokenize; {whole}"
    seconds = max(report["tokenizing_seconds"], 1e-9)
    speed = report["tokenized_bytes"] / 1e6 / seconds
    return f"{speed:.1f} MB/s, {seconds:.1f} s with {report['workers']} workers; {whole}"


if __name__ == "__main__":
    sys.exit(main())
