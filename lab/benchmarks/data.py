"""The data path: the rate of the loader, the time to open 1e9 tokens, tokenizing against sentencepiece."""

import argparse
import resource
import struct
import tempfile
import time
from dataclasses import replace
from pathlib import Path

import numpy as np

from config.reading import resolve
from data import documents, prepare
from data import tokenizer as tokenizers
from data.loader import open_loader
from lab.benchmarks.shape import show

CPU_STEP_RATE = 2000.0  # tokens/s that a two-thread CPU step of the race consumes at most
BILLION = 10**9


def main(args: argparse.Namespace) -> int:
    rows = [*measure_loader(), measure_opening(), *measure_tokenizing()]
    title = "one loader thread; wall seconds, CPU seconds of the whole process tree for tokenizing"
    show(rows, args.json, data=title)
    return 0


def make_row(what: str, figure: str, beside: str) -> dict[str, str]:
    return {"what": what, "figure": figure, "beside": beside}


def measure_loader() -> list[dict]:
    """Return the tokens a second of microbatches(step), without the prefetch thread."""
    rows = []
    for seq, batch, masked in ((512, 4, False), (128, 16, False), (128, 16, True)):
        options = ["--train.seq_len", str(seq)]
        options += ["--train.micro_batch", str(batch)]
        options += ["--train.global_batch", str(batch)]
        options += ["--data.prefetch", "0"]
        options += ["--data.doc_mask", str(masked).lower()]
        loader = open_loader(resolve("llama3-tiny", None, options), "train", 0, 1)

        num_steps = 200
        started = time.perf_counter()
        for step in range(num_steps):
            loader.microbatches(step)
        rate = num_steps * seq * batch / (time.perf_counter() - started)

        name = f"loader {batch} x {seq}" + (" doc_mask" if masked else "")
        beside = f"{rate / CPU_STEP_RATE:.0f} x a CPU step at {CPU_STEP_RATE:.0f} tokens/s"
        rows.append(make_row(name, f"{rate / 1e6:.2f}M tokens/s", beside))
    return rows


def measure_opening() -> dict:
    """Return the seconds and memory to open a sparse .bin of 1e9 tokens in 1e6 documents and its order."""
    with tempfile.TemporaryDirectory() as folder:
        prefix = Path(folder) / "big"
        write_sparse_dataset(prefix, num_documents=10**6)
        options = ["--model.vocab", "1024", "--data.prefetch", "0"]
        cfg = resolve("llama3-tiny", None, options)
        cfg = replace(cfg, data=replace(cfg.data, path=str(prefix)))

        peak_before = peak_kib()
        started = time.perf_counter()
        loader = open_loader(cfg, "train", 0, 1)
        loader.sample_ids(10**5)
        seconds = time.perf_counter() - started
        grown_mib = (peak_kib() - peak_before) / 1024
    return make_row(
        "open 1e9 tokens and order them", f"{seconds:.2f} s", f"{grown_mib:.0f} MiB of new peak memory"
    )


def write_sparse_dataset(prefix: Path, num_documents: int) -> None:
    """Write PREFIX.bin and PREFIX.idx (data/indexed.py): 1e9 tokens of 2 bytes, documents of equal length."""
    length = BILLION // num_documents
    header = struct.pack("<9sQBQQ", b"MMIDIDX\0\0", 1, 8, num_documents, num_documents + 1)
    lengths = np.full(num_documents, length, "<i4")
    offsets = np.arange(num_documents, dtype="<i8") * 2 * length
    document_starts = np.arange(num_documents + 1, dtype="<i8")

    with open(f"{prefix}.bin", "wb") as file:
        file.truncate(2 * BILLION)
    with open(f"{prefix}.idx", "wb") as file:
        file.write(header)
        for array in (lengths, offsets, document_starts):
            file.write(array.tobytes())


def measure_tokenizing() -> list[dict]:
    """Return the rate of scripts.prepare_data with 1 and 2 workers, and of sentencepiece's own encode.

    All read the same texts.
    """
    with tempfile.TemporaryDirectory() as folder:
        texts = [Path(path).read_text(errors="ignore") for path in documents.stdlib_files()]
        tokenizer = tokenizers.train_bpe(texts[:100], 1024)
        tokenizer.save(folder)

        source = Path(folder) / "text"
        source.mkdir()
        for index in range(0, len(texts), 8):
            (source / f"{index}.txt").write_text("\n".join(texts[index : index + 8]))
        megabytes = sum(file.stat().st_size for file in source.iterdir()) / 1e6

        started = time.process_time()
        for file in source.iterdir():
            tokenizer.processor.encode(file.read_text(), num_threads=1)
        base_rate = megabytes / (time.process_time() - started)
        rows = [make_row("sentencepiece alone", f"{base_rate:.2f} MB/s", "1.00 a CPU-second")]

        for workers in (1, 2):
            wall_start = time.perf_counter()
            cpu_start = cpu_seconds()
            output = Path(folder) / f"out{workers}"
            prepare.prepare_corpus([str(source / "*.txt")], folder, output, workers=workers)
            wall = time.perf_counter() - wall_start
            cpu = cpu_seconds() - cpu_start

            name = f"prepare_data, {workers} worker" + ("s" if workers > 1 else "")
            beside = f"{megabytes / cpu / base_rate:.2f} a CPU-second"
            rows.append(make_row(name, f"{megabytes / wall:.2f} MB/s", beside))
    return rows


def peak_kib() -> int:
    """Return the peak resident memory of this process so far, in KiB."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss


def cpu_seconds() -> float:
    """Return the CPU seconds of this process and of its finished children."""
    usages = [resource.getrusage(who) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)]
    return sum(usage.ru_utime + usage.ru_stime for usage in usages)
