"""A real run of train.main in a process of its own, and all that it left behind, read by hand.

Nothing of checkpoint/ or runtime/ reads here: a checkpoint is safetensors and index.json, the losses are
metrics.jsonl, the corpus is a .bin and an .idx. The watch of train.train tells the weights before the first
step and every batch that a step took; `Corpus.start` then checks each batch against the corpus.
"""

import json
import os
import pathlib
import sys
import traceback
from dataclasses import dataclass

import matplotlib.backends.backend_agg  # noqa: F401  what a run imports late is warm here
import matplotlib.figure  # noqa: F401
import numpy as np
import torch
from ranks import write_documents
from safetensors import safe_open
from torch import Tensor

import train
from parallel.sharding.views import get_boxes
from runtime import closing
from runtime.experts import ExpertLoadMap
from runtime.failure import fail_cleanly

VOCAB, EOD = 257, 256  # the byte tokenizer's
SPLIT = 80  # percent of the documents that train; the others validate
PLAIN = (
    "--model.dropout",
    "0",
    "--train.dtype",
    "fp64",
    "--train.threads",
    "1",
    "--log.every",
    "1",
    "--checkpoint.every",
    "none",
    "--eval.sample",
    "0",
    "--data.tokenizer",
    "bytes",
    "--data.split",
    f"{SPLIT},{100 - SPLIT}",
)


# ---- the corpus --------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Corpus:
    """stream [n]: every token in order; begins: the first token of each document."""

    prefix: str
    stream: np.ndarray
    begins: np.ndarray

    def bounds(self, split: str) -> tuple[int, int]:
        """First token of a split and the token behind it: whole documents, their number rounded half up."""
        first = int(self.begins[int(len(self.begins) * SPLIT / 100 + 0.5)])
        return (0, first) if split == "train" else (first, len(self.stream))

    def pieces(self, start: int, seq: int, docs: bool) -> list[np.ndarray]:
        """The seq + 1 tokens from `start`, cut at documents where docs holds: each piece alone predicts its
        own next tokens."""
        window = self.stream[start : start + seq + 1].astype(np.int64)
        inside = self.begins[(self.begins > start) & (self.begins < start + seq + 1)] - start
        return np.split(window, inside) if docs else [window]

    def start(self, batch: dict, row: int, docs: bool, split: str) -> int:
        """Where the sample of a batch's row lies in the stream. Fails unless tokens, targets, positions and
        documents are what the corpus has there."""
        tokens = batch["tokens"][row].numpy()
        seq, (first, end) = len(tokens), self.bounds(split)
        windows = np.lib.stride_tricks.sliding_window_view(self.stream[first : end - 1], seq)
        found = np.flatnonzero((windows == tokens).all(1))
        assert len(found) == 1, f"{len(found)} places of the {split} split hold the sample {tokens}"
        start = first + int(found[0])

        pieces = self.pieces(start, seq, docs)
        ends = np.cumsum([len(p) for p in pieces])[:-1] - 1  # the last token of a document has no target
        targets = self.stream[start + 1 : start + seq + 1].astype(np.int64)
        targets[ends] = -100
        np.testing.assert_array_equal(batch["targets"][row].numpy(), targets)
        places = np.concatenate([np.arange(len(p)) for p in pieces])[:-1]
        np.testing.assert_array_equal(batch["positions"][row].numpy(), places)
        if docs:
            number = np.concatenate([np.full(len(p), i) for i, p in enumerate(pieces)])[:-1]
            np.testing.assert_array_equal(batch["documents"][row].numpy(), number)
        else:
            assert batch["documents"] is None
        return start


def write_corpus(folder: pathlib.Path, repeats: bool = True) -> Corpus:
    """Ninety documents of 1 to 30 random letters and an end-of-document id, some of them empty.

    repeats: whether a token may be followed by itself. A sequence that begins so has the same hidden states
    at both, and with them the same probabilities of its experts but for rounding errors.
    """
    rng, documents = np.random.default_rng(7), []
    for i in range(90):
        is_empty = repeats and i % 11 == 5
        letters = rng.integers(97, 123, 0 if is_empty else rng.integers(1, 31))
        if not repeats:
            is_new = np.diff(letters, prepend=0) != 0
            letters = letters[is_new]
        documents.append(letters)
    return read_corpus(write_documents(folder / "text", documents))


def read_corpus(prefix: str) -> Corpus:
    """Megatron's .bin and .idx with numpy: a head of 34 bytes, then the documents' lengths as int32."""
    stream = np.fromfile(f"{prefix}.bin", "<u2")
    head = pathlib.Path(f"{prefix}.idx").read_bytes()
    count = int(np.frombuffer(head, "<u8", 1, 18)[0])
    lengths = np.frombuffer(head, "<i4", count, 34)
    begins = np.cumsum(lengths) - lengths
    np.testing.assert_array_equal(begins, np.flatnonzero(np.r_[True, stream[:-1] == EOD]))
    return Corpus(prefix, stream, begins)


def check_order(starts: list[int], seq: int, bounds: tuple[int, int]) -> None:
    """Every epoch visits each window of the split once, on a grid of seq tokens that begins anywhere in what
    is left over."""
    first, end = bounds
    count = (end - first - 1) // seq
    for at in range(0, len(starts), count):
        epoch = np.array(starts[at : at + count]) - first
        assert len({int(s) % seq for s in epoch}) == 1, "windows of an epoch do not share a grid"
        assert len(set(epoch.tolist())) == len(epoch), "an epoch has a window twice"
        assert epoch.min() >= 0 and epoch.max() + seq < end - first


# ---- the run -----------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Run:
    """first: {key: weights before the first step}; steps: of each step its microbatches as dicts; valid: the
    batches of a validation; rows: metrics.jsonl; last: {key: tensor} of the checkpoint, moments under
    KEY@MOMENT."""

    first: dict[str, Tensor]
    steps: list[list[dict]]
    valid: list[dict]
    rows: list[dict]
    last: dict[str, Tensor]

    def of(self, what: str) -> list[float]:
        return [row[what] for row in self.rows if what in row]


def run(home: pathlib.Path, name: str, corpus: Corpus, args: list[str]) -> Run:
    """train.py NAME ARGS in a forked child, from the command line's arguments to the exit code."""
    preset, *rest = args
    everything = [
        preset,
        *PLAIN,
        "--data.path",
        corpus.prefix,
        "--log.dir",
        str(home),
        "--log.name",
        name,
        *rest,
    ]
    log = home / f"{name}.log"
    pid = os.fork()
    if pid == 0:
        child(home / f"{name}.seen", log, everything)
    status = os.waitpid(pid, 0)[1]
    assert os.waitstatus_to_exitcode(status) == 0, f"{' '.join(everything)}\n{log.read_text()[-3000:]}"
    seen = torch.load(home / f"{name}.seen", weights_only=True)
    rows = [json.loads(line) for line in (home / name / "metrics.jsonl").read_text().splitlines()]
    (folder,) = (home / name / "checkpoints").glob("step_*")
    return Run(**seen, rows=rows, last=stored(folder))


def child(seen_file: pathlib.Path, log: pathlib.Path, args: list[str]) -> None:
    code, seen = 99, {"first": {}, "steps": [], "valid": []}

    def look(point: str, step: int | None = None, **what) -> None:
        if point == "run.built":
            run, valid = what["run"], what["valid"]
            seen["first"] = {
                box.key: part.clone() for b in run.buckets for box, part in get_boxes(b, b.weights.master)
            }
            seen["valid"] = [plain(b) for i in range(run.cfg.eval.batches) for b in valid.microbatches(i)]
        if point == "step.read":
            seen["steps"].append([plain(b) for b in what["batches"]])

    try:
        out = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
        os.dup2(out, 1), os.dup2(out, 2)
        sys.stdout, sys.stderr = open(1, "w", closefd=False), open(2, "w", closefd=False)
        closing.loss_png = ExpertLoadMap.draw = lambda *rest: (
            None
        )  # a second of every run, and no part of the proof
        inner = train.train
        train.train = lambda *rest, **more: inner(*rest, **more, observe=look)
        code = fail_cleanly(train.main, args)
        torch.save(seen, seen_file)
    except BaseException:
        traceback.print_exc()
    finally:
        sys.stdout.flush(), sys.stderr.flush()
        os._exit(code)


def plain(batch) -> dict:
    """A copy of what the model is given of a microbatch."""
    names = ("tokens", "targets", "positions", "documents", "sequence_ids")
    return {name: None if getattr(batch, name) is None else getattr(batch, name).clone() for name in names}


def stored(folder: pathlib.Path) -> dict[str, Tensor]:
    """Every tensor of a checkpoint: index.json says where each piece lies in which tensor."""
    whole: dict[str, Tensor] = {}
    for piece in json.loads((folder / "index.json").read_text())["pieces"]:
        with safe_open(folder / piece["file"], "pt") as f:
            value = f.get_tensor(piece["name"])
        out = whole.setdefault(piece["key"], torch.full(piece["shape"], float("nan"), dtype=value.dtype))
        out[tuple(slice(a, a + n) for a, n in zip(piece["start"], piece["size"]))] = value
    assert not any(t.isnan().any() for t in whole.values())
    return whole
