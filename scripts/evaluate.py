"""Loss, perplexity and bits per byte of a run: python -m scripts.evaluate RUN [--data PREFIX] [--tasks arc_easy ...]

Without --data: the run's own validation split, each of its samples once. With it: all of PREFIX.bin, whose tokens must come
from the run's tokenizer (make it with python -m scripts.prepare_data --tokenizer RUN/tokenizer). With --tasks: those of
lm-evaluation-harness instead (pip install lm-eval).
"""
import argparse
import itertools
import json
import math
import sys
import time
from collections.abc import Iterator
from dataclasses import replace

import torch

from build import Trained, load_run
from config import Config, ConfigError
from data.batch import Batch
from data.loader import Data, open_data
from data.tokenizer import Tokenizer
from model.generate import generate
from runtime.evaluate import report
from runtime.failure import fail_cleanly
from runtime.tasks import Speaker, run_tasks


def main(argv: list[str]) -> int:
    p = argparse.ArgumentParser(prog="python -m scripts.evaluate", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    p.add_argument("run", help="run folder or checkpoint folder")
    p.add_argument("--data", help="prefix of a .bin/.idx pair, or a blend; none: the run's validation split")
    p.add_argument("--samples", type=int, help="stop after this many sequences; none: all, once")
    p.add_argument("--seq-len", type=int, help="tokens a sequence; none: as trained")
    p.add_argument("--micro-batch", type=int, help="sequences a forward pass; none: as trained")
    p.add_argument("--dtype", choices=("fp64", "fp32", "bf16"), help="none: as trained")
    p.add_argument("--tasks", nargs="+", help="tasks of lm-eval, e.g. arc_easy hellaswag")
    p.add_argument("--shots", type=int, help="--tasks: examples in a prompt; none: as the task says")
    p.add_argument("--limit", type=int, help="--tasks: documents of each task; none: all")
    p.add_argument("--task-folder", help="--tasks: a folder with task files of your own")
    p.add_argument("--json", action="store_true", help="one JSON object")
    a = p.parse_args(argv)
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    run = load_run(a.run, device, a.dtype)
    if a.tasks:
        return tasks(run, a, device)
    return losses(run, a, device)


def losses(run: Trained, a: argparse.Namespace, device: torch.device) -> int:
    """Loss, perplexity and bits per byte of what --data, --samples and --seq-len ask for."""
    # the data
    seq = a.seq_len or run.cfg.train.seq_len
    cfg = replace(run.cfg, train=replace(run.cfg.train, seq_len=seq))
    if a.data:
        cfg = replace(cfg, data=replace(cfg.data, path=a.data, split="0,1", tokenizer=None))
    size = a.micro_batch or run.cfg.train.micro_batch
    data = validation(cfg, size)
    check_tokenizer(data.tokenizer, run, a)
    samples = min(data.samples, a.samples or data.samples)

    # their loss
    begun = time.perf_counter()
    total = count = text = 0.0
    with torch.no_grad():
        for batch in itertools.chain(batches(data, 0, samples // size), left_over(cfg, samples, size)):
            batch = batch.to(device)
            total = total + run.stage(batch.tokens, batch, 1.0).double()
            count = count + batch.counted()
            text = text + data.text_bytes(batch)
    loss = float(total / count)
    seconds = time.perf_counter() - begun

    # what is printed; JSON has no word for NaN or infinity
    found = report(loss, float(text / count))
    name = a.data or f"{cfg.data.path} (valid)"
    if a.json:
        found = {key: value if math.isfinite(value) else None for key, value in found.items()}
        print(json.dumps({"run": str(run.path), "step": run.step, "data": name, "tokens": samples * seq, **found,
                          "seconds": seconds}))
    else:
        print(f"{run.path} on {name}: {samples * seq:,} tokens in {seconds:.1f} s\n"
              f"loss {found['val_loss']:.4f}   perplexity {found['val_ppl']:.2f}   "
              f"bits per byte {found['val_bpb']:.4f}")
    return 0


def validation(cfg: Config, size: int) -> Data:
    """The validation split, of which each step is one batch of `size` sequences."""
    return open_data(replace(cfg, train=replace(cfg.train, micro_batch=size, global_batch=size)), "valid", 0, 1)


def batches(data: Data, first: int, last: int) -> Iterator[Batch]:
    """The batches of steps first .. last - 1."""
    for step in range(first, last):
        yield from data.microbatches(step)


def left_over(cfg: Config, samples: int, size: int) -> Iterator[Batch]:
    """Of the first `samples` those that whole batches of `size` leave over, each as a batch of one."""
    whole = samples - samples % size
    if whole < samples:
        yield from batches(validation(cfg, 1), whole, samples)


def check_tokenizer(of_data: Tokenizer | None, run: Trained, a: argparse.Namespace) -> None:
    """Raises ConfigError where the data is known to be made with another tokenizer than the run's."""
    if of_data is None or of_data.fingerprint == run.tokenizer.fingerprint:
        return
    own = f"{run.path.parent.parent}/tokenizer"
    raise ConfigError(f"--data: {a.data or run.cfg.data.path} was made with the tokenizer {of_data.name}, {a.run} was "
                      f"trained with {run.tokenizer.name}; make it with "
                      f"python -m scripts.prepare_data --tokenizer {own}")


def tasks(run: Trained, a: argparse.Namespace, device: torch.device) -> int:
    """The harness's tasks, each with its metrics and their standard errors."""
    m, tok = run.cfg.model, run.tokenizer

    @torch.no_grad()
    def logits(tokens: torch.Tensor) -> torch.Tensor:
        return run.stage.logits(tokens.to(device), torch.arange(tokens.shape[1], device=device).expand_as(tokens))

    def write(ids: list[int], most: int):
        return generate(run.logits, ids, most, temperature=0, eod=tok.eod, device=device)

    speaker = Speaker(logits, write, tok.encode, tok.decode, tok.eod, m.context, a.micro_batch or run.cfg.train.micro_batch)
    found = run_tasks(a.tasks, speaker, a.shots, a.limit, a.task_folder)
    if a.json:
        print(json.dumps({"run": str(run.path), "step": run.step, "tasks": found}))
    else:
        print("\n".join(f"{task:<24} " + "   ".join(f"{k} {v:.4f}" for k, v in values.items()) for task, values in found.items()))
    return 0


if __name__ == "__main__":
    sys.exit(fail_cleanly(main, sys.argv[1:]))
