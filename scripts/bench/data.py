"""The data path: what the loader feeds, how long 1e9 tokens take to open, tokenizing beside sentencepiece alone."""
import resource
import struct
import tempfile
import time
from dataclasses import replace
from pathlib import Path

import numpy as np

import config
from data import documents, prepare
from data import tokenizer as tokenizers
from data.loader import open_data
from scripts.bench.shape import show

CPU_STEP = 2000.0  # tokens/s that a two-thread CPU step of the race consumes, at most; the loader is judged against it
BILLION = 10**9


def main(args) -> int:
    rows = [*loader(), opening(), *tokenizing()]
    show(rows, args.json, data="one loader thread; wall seconds, CPU seconds of the whole process tree for tokenizing")
    return 0


def loader() -> list[dict]:
    """Tokens a second of microbatches(step), without the prefetch thread."""
    out = []
    for seq, batch, masked in ((512, 4, False), (128, 16, False), (128, 16, True)):
        cfg = config.resolve("llama3-tiny", None, ["--train.seq_len", str(seq), "--train.micro_batch", str(batch), "--train.global_batch",
                                                   str(batch), "--data.prefetch", "0", "--data.doc_mask", str(masked).lower()])
        data = open_data(cfg, "train", 0, 1)
        steps = range(200)
        begun = time.perf_counter()
        for step in steps:
            data.microbatches(step)
        rate = len(steps) * seq * batch / (time.perf_counter() - begun)
        out.append({"what": f"loader {batch} x {seq}" + (" doc_mask" if masked else ""), "figure": f"{rate / 1e6:.2f}M tokens/s",
                    "beside": f"{rate / CPU_STEP:.0f} x a CPU step at {CPU_STEP:.0f} tokens/s"})
    return out


def opening() -> dict:
    """A sparse .bin of 1e9 tokens in 1e6 documents: seconds to open it with its sample order, memory that it takes."""
    n, tokens = 10**6, BILLION // 10**6
    with tempfile.TemporaryDirectory() as folder:
        prefix = Path(folder) / "big"
        with open(f"{prefix}.bin", "wb") as f:
            f.truncate(2 * BILLION)
        with open(f"{prefix}.idx", "wb") as f:
            f.write(struct.pack("<9sQBQQ", b"MMIDIDX\0\0", 1, 8, n, n + 1) + np.full(n, tokens, "<i4").tobytes())
            f.write((np.arange(n, dtype="<i8") * 2 * tokens).tobytes() + np.arange(n + 1, dtype="<i8").tobytes())
        cfg = config.resolve("llama3-tiny", None, ["--model.vocab", "1024", "--data.prefetch", "0"])
        cfg = replace(cfg, data=replace(cfg.data, path=str(prefix)))
        before, begun = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss, time.perf_counter()
        data = open_data(cfg, "train", 0, 1)
        data.ids(10**5)
        seconds = time.perf_counter() - begun
        grown = (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) / 1024
    return {"what": "open 1e9 tokens and order them", "figure": f"{seconds:.2f} s", "beside": f"{grown:.0f} MiB of new peak memory"}


def tokenizing() -> list[dict]:
    """scripts.prepare_data's rate with 1 and 2 workers, beside sentencepiece's own encode over the same texts."""
    with tempfile.TemporaryDirectory() as folder:
        texts = [Path(path).read_text(errors="ignore") for path in documents.stdlib()]
        tok = tokenizers.train_bpe(texts[:100], 1024)
        tok.save(folder)
        source = Path(folder) / "text"
        source.mkdir()
        for i in range(0, len(texts), 8):
            (source / f"{i}.txt").write_text("\n".join(texts[i:i + 8]))
        size = sum(f.stat().st_size for f in source.iterdir()) / 1e6
        begun = time.process_time()
        for f in source.iterdir():
            tok.processor.encode(f.read_text(), num_threads=1)
        alone = size / (time.process_time() - begun)
        out = [{"what": "sentencepiece alone", "figure": f"{alone:.2f} MB/s", "beside": "1.00 a CPU-second"}]
        for workers in (1, 2):
            wall, cpu = time.perf_counter(), children()
            prepare.run([str(source / "*.txt")], folder, Path(folder) / f"out{workers}", workers=workers)
            wall, cpu = time.perf_counter() - wall, children() - cpu
            out.append({"what": f"prepare_data, {workers} worker{'s' * (workers > 1)}", "figure": f"{size / wall:.2f} MB/s",
                        "beside": f"{size / cpu / alone:.2f} a CPU-second"})
    return out


def children() -> float:
    """CPU seconds of this process and of its children that have ended."""
    return sum(u.ru_utime + u.ru_stime for u in map(resource.getrusage, (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)))
