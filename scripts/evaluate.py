"""Loss, perplexity and bits per byte of a run.

    python -m scripts.evaluate RUN [--data PREFIX] [--tasks PATH | arc_easy ...]
    torchrun --nproc-per-node 8 -m scripts.evaluate RUN

Without --data: the validation split of the run, each sample once. With it: all of PREFIX.bin, which must be
tokenized with the run's tokenizer (python -m scripts.prepare_data --tokenizer RUN/tokenizer). The loss needs
no tokenizer; bits per byte and tasks do, and --tokenizer names it for a run without one, such as an imported
run.

With --tasks instead: files and folders as in eval.tasks, scored as in the training loop; and tasks of
lm-evaluation-harness by name (pip install lm-eval).

Ranks of torchrun hold the model together, in any layout.
"""
import argparse
import contextlib
import itertools
import json
import math
import os
import sys
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import torch

from checkpoint.state import TRAINED, WEIGHTS, run_on_first_rank
from checkpoint.trained import TrainedModel, load_run
from config import Config, ConfigError
from config.command_line import CommandParser
from config.reading.layout import RequestedLayout
from data.blend import parse_blend
from data.harness import EvaluationModel, run_tasks
from data.loader import BatchLoader, check_path, open_loader
from data.raw import is_raw_file
from data.task_files import ScoredTask, read_tasks
from data.task_scores import encode_tasks, score_tasks
from data.tokenizer import Tokenizer
from durable.script_job import add_layout_options, check_layout_options, script_job
from model.generate import generate
from model.rope import rope_switches
from parallel.microbatch import Microbatch
from runtime.evaluate import loss_report
from runtime.failure import exit_process, fail_cleanly

SECONDS_BETWEEN_LINES = 10.0  # interval of progress lines
BATCHES_PER_STAGE = 4  # in flight in a pipeline, so that it idles at most a fifth of the time


def arguments() -> argparse.ArgumentParser:
    parser = CommandParser(
        prog="python -m scripts.evaluate",
        description=__doc__,
    )
    add = parser.add_argument
    add("run", help="run folder or checkpoint folder")
    add("--weights", choices=WEIGHTS, default=TRAINED, help="ema: their moving average (train.ema)")
    add("--data", help="prefix of a .bin/.idx pair, or a blend; none: the run's validation split")
    add("--tokenizer", metavar="SPEC",
        help="bytes, a .model, a tokenizer.json or a folder; none: that of the run, if it has one")
    add("--eod", metavar="TOKEN_OR_ID",
        help="--tokenizer: the token that ends documents; none: what the tokenizer's files name")
    add("--samples", type=int, help="number of sequences; none: all, once")
    add("--seq-len", type=int, help="tokens in a sequence; none: as in training")
    add("--micro-batch", type=int, help="sequences in a forward pass; none: as in training")
    add("--dtype", choices=("fp64", "fp32", "bf16"), help="none: as in training")
    add("--tasks", nargs="+", help="files and folders (eval.tasks), or tasks of lm-eval, e.g. arc_easy")
    add("--shots", type=int, help="--tasks: examples in a prompt; none: the default of the task")
    add("--limit", type=int, help="--tasks: examples of each task; none: all")
    add("--task-folder", help="--tasks: a folder with your own task files")
    add("--special", action="store_true",
        help="--tasks: parse control tokens spelled in texts, as lm-eval does")
    add("--threads", type=int, metavar="N",
        help="CPU threads; none: OMP_NUM_THREADS, or as many as torch finds cores; under torchrun a "
             "share of the cores")
    add_layout_options(parser)
    add("--json", action="store_true", help="print one JSON object")
    return parser


def main(argv: list[str]) -> int:
    with script_job(argv) as job:
        args = arguments().parse_args(argv)
        check_layout_options(args)
        world = job.join(args.threads)
        tasks = file_tasks(args)
        run = load_run(
            args.run,
            world.device,
            args.dtype,
            args.weights,
            args.tokenizer,
            args.eod,
            world=world,
            layout=RequestedLayout(args.tp, args.pp, job.ranks_on_node),
        )
        if args.tasks:
            evaluate_tasks(run, args, tasks)
        else:
            evaluate_loss(run, args)
    return 0


# ---- loss ------------------------------------------------------------------------------------------------

def evaluate_loss(run: TrainedModel, args: argparse.Namespace) -> None:
    """Print loss, perplexity and bits per byte of the data that --data, --samples and --seq-len select.

    Raises ConfigError if the data was made with another tokenizer, or the model has too few positions.
    """
    # the data
    seq_len = args.seq_len or run.cfg.train.seq_len
    check_context(run, seq_len)
    # no span: the same sequences, however training was shuffled
    cfg = replace(
        run.cfg, train=replace(run.cfg.train, seq_len=seq_len), data=replace(run.cfg.data, span=None)
    )
    if args.data:
        made_with = args.tokenizer or (tokenizer_folder(run) if run.known_tokenizer else "TOKENIZER")
        for path in parse_blend(args.data, "--data")[1]:
            check_path(path, "--data", made_with)
        has_raw = any(map(is_raw_file, parse_blend(args.data, "--data")[1]))
        named = replace(
            cfg.data,
            path=args.data,
            valid=None,
            split="0,1",
            tokenizer=args.tokenizer,
            eod=args.eod,
            dtype=cfg.data.dtype if has_raw else None,
        )
        cfg = replace(cfg, data=named)
    elif not cfg.data.path and cfg.data.valid is None:
        raise ConfigError(f"--data: {args.run} was imported without data; give a prefix of "
                          ".bin/.idx")
    batch_size = args.micro_batch or run.cfg.train.micro_batch
    if run.mesh.world.size > 1:  # the first to open the data may write index files next to it
        run_on_first_rank(lambda: open_validation(cfg, batch_size).close(), run.mesh.world, math.inf)
    data = open_validation(cfg, batch_size)
    check_tokenizer(data.tokenizer, run, args)
    if args.data and data.tokenizer is None and run.known_tokenizer and run.prompts.start:
        raise ConfigError(f"--data: {args.data} does not say which tokenizer made it, and documents of "
                          f"{args.run} begin with {run.prompts.start}; name it with --tokenizer")
    for dataset in data.datasets:
        dataset.index.contract.check(run.known_tokenizer.contract if run.known_tokenizer else None)
    samples = min(data.samples, args.samples or data.samples)

    # the loss
    started = last_line = time.perf_counter()
    loss_sum = 0.0
    done = 0
    num_tokens = num_bytes = 0
    full_batches = batches(data, 0, samples // batch_size)
    all_batches = itertools.chain(full_batches, remaining_samples(cfg, samples, batch_size))
    at_once = 1 if run.mesh.pp.size == 1 else BATCHES_PER_STAGE * run.mesh.pp.size
    while group := [batch.to(run.device) for batch in itertools.islice(all_batches, at_once)]:
        loss_sum = loss_sum + run.pipeline.evaluate(group).double()
        for batch in group:
            num_tokens = num_tokens + batch.num_counted()
            num_bytes = num_bytes + data.text_bytes(batch)
            done += len(batch.tokens)
        if run.is_first_rank and time.perf_counter() > last_line + SECONDS_BETWEEN_LINES:
            last_line = time.perf_counter()
            mean = float(loss_sum) / max(int(num_tokens), 1)
            print(f"{done:,} of {samples:,} sequences, loss {mean:.4f}", file=sys.stderr)
    name = args.data or f"{cfg.data.valid or cfg.data.path} (valid)"
    if int(num_tokens) == 0:
        raise ConfigError(f"{name}: no token of these samples counts in the loss; raise --samples or "
                          "--seq-len")
    loss = float(loss_sum) / int(num_tokens)
    bytes_per_token = int(num_bytes) / int(num_tokens) if num_bytes >= 0 else math.nan
    seconds = time.perf_counter() - started

    # the report
    report = loss_report(loss, bytes_per_token)
    if args.json:
        # JSON cannot represent NaN or infinity
        finite = {key: value if math.isfinite(value) else None for key, value in report.items()}
        source = {"run": str(run.path), "step": run.step, "data": name, "tokens": samples * seq_len}
        print(json.dumps({**source, **finite, "seconds": seconds}))
    else:
        bits = "" if math.isnan(report["val_bpb"]) else f"   bits per byte {report['val_bpb']:.4f}"
        print(f"{run.path} on {name}: {samples * seq_len:,} tokens in {seconds:.1f} s\n"
              f"loss {report['val_loss']:.4f}   perplexity {report['val_ppl']:.2f}{bits}")


def check_context(run: TrainedModel, seq_len: int) -> None:
    """Warn if sequences are longer than model.context. Raises ConfigError if positions are learned."""
    model = run.cfg.model
    if seq_len <= model.context:
        return
    if model.positions == "learned":
        raise ConfigError(f"--seq-len: {seq_len} is longer than the {model.context} learned positions of the "
                          "model; lower it")
    note(run, f"--seq-len: {seq_len} is beyond model.context {model.context}, for which its positions were "
              "made")


def open_validation(cfg: Config, batch_size: int) -> BatchLoader:
    """Return the validation split; each of its steps is one batch of `batch_size` sequences."""
    train = replace(cfg.train, micro_batch=batch_size, global_batch=batch_size)
    return open_loader(replace(cfg, train=train), "valid", 0, 1)


def batches(data: BatchLoader, first: int, last: int) -> Iterator[Microbatch]:
    """Yield the batches of steps first .. last - 1."""
    for step in range(first, last):
        yield from data.microbatches(step)


def remaining_samples(cfg: Config, samples: int, batch_size: int) -> Iterator[Microbatch]:
    """Yield the last samples % batch_size of the first `samples` samples, each as a batch of one."""
    in_full_batches = samples - samples % batch_size
    if in_full_batches < samples:
        yield from batches(open_validation(cfg, 1), in_full_batches, samples)


def check_tokenizer(of_data: Tokenizer | None, run: TrainedModel, args: argparse.Namespace) -> None:
    """Raise ConfigError if the data names another tokenizer than the run."""
    if of_data is None or run.known_tokenizer is None or of_data.fingerprint == run.tokenizer.fingerprint:
        return
    path = args.data or run.cfg.data.valid or run.cfg.data.path
    raise ConfigError(f"--data: {path} was made with the tokenizer {of_data.contract.label}, {args.run} was "
                      f"trained with {run.tokenizer.contract.label}; make it again from its text with "
                      f"python -m scripts.prepare_data --tokenizer {tokenizer_folder(run)}")


def tokenizer_folder(run: TrainedModel) -> str:
    return f"{run.path.parent.parent}/tokenizer"


# ---- tasks -----------------------------------------------------------------------------------------------

def is_path(task: str) -> bool:
    """Return whether an argument of --tasks is a file or folder rather than a task of lm-eval."""
    return "/" in task or task.endswith(".jsonl") or Path(task).exists()


def file_tasks(args: argparse.Namespace) -> list[ScoredTask]:
    """Return the tasks in the files and folders of --tasks. Raises ConfigError."""
    if args.limit is not None and args.limit < 1:
        raise ConfigError(f"--limit: {args.limit} must be above 0")
    if args.shots is not None and args.shots < 0:
        raise ConfigError(f"--shots: {args.shots} must not be negative")
    paths = [task for task in args.tasks or [] if is_path(task)]
    return read_tasks("--tasks", ",".join(paths), args.limit, args.shots) if paths else []


def evaluate_tasks(run: TrainedModel, args: argparse.Namespace, tasks: list[ScoredTask]) -> None:
    """Print the metrics of the tasks, with standard errors for those of lm-eval.

    `tasks` are those of files and folders.
    """
    results: dict[str, dict[str, float]] = {}
    core = None
    if args.micro_batch:
        train = replace(run.cfg.train, micro_batch=args.micro_batch)
        run = replace(run, cfg=replace(run.cfg, train=train))
    if tasks:
        encoded = encode_tasks("--tasks", tasks, run.prompts, run.cfg.model.context, args.special)
        if encoded.lost:
            note(run, f"--tasks: of {len(encoded.rows):,} texts, {encoded.lost}")
        report = score_tasks(encoded, run.score)
        results, core = report.metrics, report.core
    names = [task for task in args.tasks if not is_path(task)]
    if names:
        model = evaluation_model(run, args)
        # lm-eval must not fork for its standard errors: a fork of a process with torch's threads can deadlock
        os.environ.setdefault("DISABLE_MULTIPROC", "1")
        with mute_other_ranks(run):
            results |= run_tasks(names, model, shots=args.shots, limit=args.limit, folder=args.task_folder)

    if args.json:
        of_core = {} if core is None else {"core": core}
        print(json.dumps({"run": str(run.path), "step": run.step, "tasks": results, **of_core}))
        return
    for task, metrics in results.items():
        values = "   ".join(f"{name} {value:.4f}" for name, value in metrics.items())
        print(f"{task:<24} {values}")
    if core is not None:
        print(f"{'CORE':<24} {core:.4f}")


def evaluation_model(run: TrainedModel, args: argparse.Namespace) -> EvaluationModel:
    """Return the run's functions for lm-eval. All ranks must call them in the same order."""
    prompts, tok = run.prompts, run.tokenizer
    bare = replace(prompts, start=None)

    def write(ids: list[int], max_new: int) -> Iterator[int]:
        return generate(run.logits, ids, max_new, temperature=0, stops=prompts.stops, vocab=tok.vocab,
                        switches=rope_switches(run.cfg.model), device=run.device)

    return EvaluationModel(
        score=run.score,
        write=write,
        encode=lambda text: prompts.document(text, args.special),
        encode_bare=lambda text: bare.document(text, args.special),
        decode=tok.decode,
        before_text=prompts.before_text,
        context=run.cfg.model.context,
    )


@contextlib.contextmanager
def mute_other_ranks(run: TrainedModel) -> Iterator[None]:
    """Let only the first rank print lm-eval's progress; it runs on every rank."""
    if run.is_first_rank:
        yield
        return
    with open(os.devnull, "w") as nowhere, contextlib.redirect_stderr(nowhere):
        yield


def note(run: TrainedModel, text: str) -> None:
    """Print a line apart from the results, on stderr."""
    if run.is_first_rank:
        print(text, file=sys.stderr)


if __name__ == "__main__":
    exit_process(fail_cleanly(main, sys.argv[1:]))
