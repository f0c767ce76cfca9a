"""Ranks of train.py forked from the warm test process, started and ended as torchrun does it: the store is
the launcher's, and the first rank that fails gets the others a SIGTERM. A job of four ranks starts in a
second, torchrun takes eight.
"""

import contextlib
import math
import os
import pathlib
import signal
import sys
import time
import traceback
from dataclasses import dataclass

import matplotlib.backends.backend_agg  # noqa: F401  what a run imports late is warm here
import matplotlib.figure  # noqa: F401
import numpy as np
import torch.distributed as dist

import train
from data import tokenizer
from data.indexed import IndexedDatasetWriter
from runtime import setup
from runtime.failure import fail_cleanly

GRACE = 0.3  # seconds from the first failure to the SIGTERM: torchrun polls its ranks, too

SIZES = (
    "--model.layers 2 --model.hidden 32 --model.mixer.heads 4 --model.mlp.width 48 --train.seq_len 16 "
    "--train.micro_batch 1 --train.global_batch 4 --train.threads 1 --eval.every none --eval.batches 1 "
    "--eval.sample 0 --log.every 1 --optim.warmup 2"
).split()
MODEL = (*SIZES, "--model.mixer.kv_heads", "2")
EOD = 256  # ends documents of the byte tokenizer


def write_documents(prefix, documents, tok=None) -> str:
    """Write a data set of documents of ids, to which it adds their end. Returns the prefix.

    tok: bytes, if none is given.
    """
    tok = tok or tokenizer.load_tokenizer("bytes")
    with IndexedDatasetWriter(prefix, tok.vocab) as writer:
        for ids in documents:
            writer.add([*ids, tok.eod])
        writer.finish(tok, 1)
    return str(prefix)


def corpus(folder: pathlib.Path) -> str:
    """A prefix of 60 documents of random letters with the byte tokenizer (257 ids: the padded vocabulary is
    longer).
    """
    rng = np.random.default_rng(0)
    return write_documents(folder / "text", (rng.integers(97, 123, rng.integers(10, 60)) for _ in range(60)))


@dataclass(frozen=True)
class End:
    """How a job ended: exit codes (minus the signal that killed a rank), what each rank printed, seconds
    between the first end and the last.
    """

    codes: list[int]
    logs: list[str]
    seconds: float

    def errors(self) -> list[str]:
        return [line for log in self.logs for line in log.splitlines() if line.startswith("error:")]


def job(
    home: pathlib.Path,
    world: int,
    args,
    fault: str = "",
    rank_args=None,
    limit: float = 240.0,  # seconds; a loaded machine takes a minute
    before=lambda rank: None,
    meanwhile=lambda pids: None,
    main=train.main,
) -> End:
    """Run train.py on `world` ranks, or the `main` of a script. rank_args: {rank: more arguments}; before:
    called in each rank; meanwhile: in the launcher, with the ranks' process ids.
    """
    home.mkdir(parents=True, exist_ok=True)
    logs = [home / f"rank{rank}.log" for rank in range(world)]
    for log in logs:  # a rank can be killed before it opens its own
        log.touch()
    keeper, port = keep_store()
    began, first, failed, pids = time.monotonic(), None, None, {}
    for rank in range(world):
        pid = os.fork()
        if pid == 0:
            words = [*args, *(rank_args or {}).get(rank, ())]
            child(home, rank, world, port, words, fault=fault, before=before, main=main)
        pids[rank] = pid
    meanwhile(pids)
    codes: dict[int, int] = {}
    try:
        while len(codes) < world and time.monotonic() < began + limit:
            for rank in [r for r in pids if r not in codes]:
                pid, status = os.waitpid(pids[rank], os.WNOHANG)
                if pid:
                    codes[rank] = os.waitstatus_to_exitcode(status)
                    first = first or time.monotonic()
                    failed = failed or (time.monotonic() if codes[rank] else None)
            if failed is not None and time.monotonic() > failed + GRACE:
                failed = math.inf
                for other in [p for r, p in pids.items() if r not in codes]:
                    os.kill(other, signal.SIGTERM)
            time.sleep(0.01)
        seconds = time.monotonic() - (first or began)
    finally:
        for pid in [*(pids[r] for r in pids if r not in codes), keeper]:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
            os.waitpid(pid, 0)
    return End([codes.get(r, 999) for r in range(world)], [log.read_text() for log in logs], seconds)


def keep_store() -> tuple[int, int]:
    """(process, port) of the launcher's store. In a process of its own: ranks forked from the server's would
    inherit the sockets of those that came first, and its event loop would hear of sockets that it has closed.
    """
    (told, tell), parent = os.pipe(), os.getpid()
    pid = os.fork()
    if pid == 0:
        store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
        os.write(tell, str(store.port).encode())
        while os.getppid() == parent:
            time.sleep(1)
        os._exit(0)
    os.close(tell)
    port = int(os.read(told, 16))
    os.close(told)
    return pid, port


def child(
    home: pathlib.Path, rank: int, world: int, port: int, args: list[str], *, fault: str, before, main
) -> None:
    code = 99
    try:
        os.environ.update(
            RANK=str(rank), WORLD_SIZE=str(world), LOCAL_RANK=str(rank), LOCAL_WORLD_SIZE=str(world),
            MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port), TORCHELASTIC_USE_AGENT_STORE="True", FAULT=fault,
        )
        out = os.open(home / f"rank{rank}.log", os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
        os.dup2(out, 1), os.dup2(out, 2)
        sys.stdout, sys.stderr = open(1, "w", closefd=False), open(2, "w", closefd=False)
        setup.spare_threads = lambda *_: 1  # OpenMP's other threads, which this process had, are not forked
        before(rank)
        code = fail_cleanly(main, args)
    except BaseException:
        traceback.print_exc()
    finally:
        sys.stdout.flush(), sys.stderr.flush()
        os._exit(code)
