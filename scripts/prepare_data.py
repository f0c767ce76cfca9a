"""Text -> the tokens that training reads: PREFIX.bin and PREFIX.idx, Megatron's format.

    python -m scripts.prepare_data --input docs/*.jsonl.zst --tokenizer bpe-32000 --out runs/data/docs
    python train.py --data.path runs/data/docs

Exit codes: 0 done, 2 a mistake in the input or the command (one line), 82 the disk fails (one line with the path),
130 interrupted. After any of them, and after a kill, the same command goes on where it stopped.
"""
import argparse
import json
import os
import shutil
import sys
import time

from config import ConfigError
from data import prepare
from data.documents import KINDS

STORAGE = 82


def arguments() -> argparse.ArgumentParser:
    head, rest = __doc__.split("\n\n", 1)
    p = argparse.ArgumentParser(prog="python -m scripts.prepare_data", description=head, epilog=rest,
                                formatter_class=argparse.RawDescriptionHelpFormatter)
    p.error = lambda text: p.exit(2, f"error: {text}; see --help\n")  # one line, as everywhere
    p.add_argument("--input", nargs="+", required=True, metavar="FILE",
                   help=f"files, folders or globs of {' '.join(KINDS)} (also .gz, .zst; text: one document a file), "
                        "hf:NAME[:CONFIG][:SPLIT] (Hugging Face, streamed), or stdlib (Python's own source)")
    p.add_argument("--tokenizer", required=True, metavar="T",
                   help="bpe-N (trained on the input), bytes, a sentencepiece .model, tokenizer.json, or their folder")
    p.add_argument("--out", required=True, metavar="PREFIX",
                   help="PREFIX.bin and PREFIX.idx are written; unfinished work is kept in PREFIX.parts/")
    p.add_argument("--jsonl-key", default="text", metavar="KEY",
                   help="field or column that holds the text (default: text)")
    p.add_argument("--workers", type=int, default=len(os.sched_getaffinity(0)), metavar="N",
                   help="processes (default: one a core); the result does not depend on it")
    p.add_argument("--append-eod", action=argparse.BooleanOptionalAction, default=True,
                   help="end each document with the end-of-document token (default: on)")
    p.add_argument("--skip-bad", action="store_true",
                   help="leave out and count invalid UTF-8 and broken records; otherwise the first one ends the run")
    p.add_argument("--json", action="store_true", help="print the report as one line of JSON on stdout")
    return p


def main(argv: list[str] | None = None) -> int:
    args = arguments().parse_args(argv)
    bar = Progress(sys.stderr)
    try:
        if args.workers < 1:
            raise ConfigError(f"--workers: {args.workers} must be at least 1")
        report = prepare.run(args.input, args.tokenizer, args.out, args.jsonl_key, args.workers, args.append_eod,
                             args.skip_bad, say=bar.say, progress=bar.show)
        report["sample"] = prepare.sample(args.out)
    except ConfigError as e:
        bar.say(f"error: {e}")
        return 2
    except OSError as e:
        bar.say(f"error: {e.filename or args.out}: {e.strerror}; make room or mend it, then the same command goes on")
        return STORAGE
    except KeyboardInterrupt:
        bar.say(f"interrupted; the same command goes on from {args.out}.parts")
        return 130
    bar.end()
    for line in report["bad_records"]:
        bar.say(f"left out {line}")
    print(json.dumps(report) if args.json else summary(report))
    return 0


def summary(r: dict) -> str:
    speed = r["text_bytes"] / 1e6 / r["seconds"]
    kinds = (("bad", "bad records"), ("empty", "empty documents"))
    left_out = ", ".join(f"{r[k]:,} {name} left out" for k, name in kinds if r[k])
    return (f"data      {r['documents']:,} documents, {r['text_bytes'] / 1e6:,.1f} MB, {r['tokens']:,} tokens "
            f"({r['text_bytes'] / r['tokens']:.2f} bytes a token){'; ' + left_out if left_out else ''}\n"
            f"tokenizer {r['tokenizer']} ({r['fingerprint'][:12]}), ids in {r['dtype']}\n"
            f"speed     {speed:.1f} MB/s, {r['seconds']:.1f} s, {r['workers']} workers\n"
            f"sample    {r['sample']!r}\n"
            f"saved     {r['out']}.bin, .idx\n"
            f"next      python train.py --data.path {r['out']}")


class Progress:
    """One line that is drawn over on a terminal; elsewhere a plain line every ten seconds."""

    def __init__(self, stream):
        self.stream, self.tty = stream, stream.isatty()
        self.start, self.last, self.open = time.monotonic(), 0.0, False

    def show(self, done: int, whole: int) -> None:
        now = time.monotonic()
        if done == 0:  # the work begins; before it a tokenizer may have been trained
            self.start = self.last = now
        if now - self.last < (0.1 if self.tty else 10) and not (self.tty and done >= whole):
            return
        self.last = now
        part, seconds = done / max(1, whole), max(1e-9, now - self.start)
        eta = seconds * (1 - part) / part if part else 0
        text = (f"prepare {part:4.0%}  {done / 1e6:,.1f} of {whole / 1e6:,.1f} MB  {done / 1e6 / seconds:.1f} MB/s  "
                f"eta {clock(eta)}")
        if self.tty:
            room = max(0, min(40, shutil.get_terminal_size().columns - len(text) - 4))
            text = f"\r{text}  {'█' * round(part * room):░<{room}}\x1b[K"
        print(text, end="" if self.tty else "\n", file=self.stream, flush=True)
        self.open = self.tty

    def say(self, text: str) -> None:
        self.end()
        print(text, file=self.stream, flush=True)

    def end(self) -> None:
        if self.open:
            print(file=self.stream, flush=True)
        self.open = False


def clock(seconds: float) -> str:
    m, s = divmod(int(seconds), 60)
    return f"{m // 60}h{m % 60:02d}m" if m >= 60 else f"{m}m{s:02d}s" if m else f"{s}s"


if __name__ == "__main__":
    sys.exit(main())
