"""How fast is it? Always compared with something else, in one run.

    python -m scripts.bench step [--dtype bf16] [--ranks 2 --split tp]
                                 [--peers transformers,litgpt,nanogpt,picotron]
        full training steps, raced against peers
    python -m scripts.bench step --shape mixture --peers transformers,transformers+grouped --ours eager
        the same for a mixture
    python -m scripts.bench step --device cuda [--minutes 9] [--table FILE]
        the large models on one GPU, each contestant with a time limit
    python -m scripts.bench first [--minutes 9] [--after FILE] [--out FOLDER]
        first contact with a GPU: rates, steps, right or wrong, modelled against measured
    python -m scripts.bench kernels [--dtype bf16]
        each kernel on the CPU, against plain torch operations
    python -m scripts.bench model [SCENARIO ...] [--gpu h200] [--chips] [--page FILE]
        the time of a large model's step on a GPU, modelled launch by launch; needs no GPU
    torchrun --standalone --nproc-per-node 2 -m scripts.bench machine [--out FILE]
        products, memory and links of this machine, for the planner's forecast
    python -m scripts.bench words [--ranks 8,16,32,64]
        traffic between ranks through the job's store, at a start, an end, a failure and a hang
    python -m scripts.bench watching [--ranks 2] [--steps 40]
        overhead of fault detection on a step: comparing replicas and times, leases, threads, probes
    python -m scripts.bench checkpoint [--parameters 5e7] [--out FOLDER]
        saves and loads, against a plain copy, the raw disk, and torch.distributed.checkpoint
    python -m scripts.bench data
        the loader, opening 1e9 tokens, tokenizing
    python -m scripts.bench chaos --rounds N [--seed S] [--layouts one,tp2-async] [--only K]
        does it survive? Random seeded faults in real runs of train.py

Columns
  wall x, cpu x   the baseline's time over this one's, above 1 is faster: medians over the rounds, each round
                  against the baseline's steps of the same round. CPU-seconds repeat to a few percent on a
                  busy machine; wall time does not.
  floor           the step's matrix products alone (shapes and dtype of our step, nothing between them), raced
                  as a peer.
  class           A: bf16 compute, fp32 master weights, gradients and moments. B: everything in bf16.
                  fp32: everything in fp32.
  peak            peak resident memory of the process.
"""

import argparse
import importlib
import subprocess
import sys

import runtime  # noqa: F401  before torch: OpenMP and malloc settings

from lab.benchmarks import card, checkpoint, data, kernels, machine, race, shape, watching, words
from lab.benchmarks.chaos import command as chaos
from config.command_line import CommandParser

COMMANDS = {
    "step": race.main,
    "kernels": kernels.main,
    "checkpoint": checkpoint.main,
    "data": data.main,
    "machine": machine.main,
    "words": words.main,
    "watching": watching.main,
    "chaos": chaos.main,
}


def main(argv: list[str]) -> int:
    """Return the exit code."""
    args = make_parser().parse_args(argv)
    if args.command == "model":  # a new process: Triton must be imported before the kernels
        return subprocess.run([sys.executable, "-m", "lab.benchmarks.step_model", *argv[1:]]).returncode
    if args.command == "first":  # the environment must be prepared: scripts/bench.py
        return importlib.import_module("lab.benchmarks.first").main(args)
    if args.command == "step" and (args.device == "cuda" or args.tiny):
        return card.main(args)
    return COMMANDS[args.command](args)


def make_parser() -> argparse.ArgumentParser:
    parser = CommandParser(
        "python -m scripts.bench", description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    commands = parser.add_subparsers(dest="command", required=True)

    step = commands.add_parser(
        "step", help="full training steps (forward, backward, clip, AdamW), raced against peers"
    )
    add_step_options(step)
    add_gpu_step_options(step)

    kernel = commands.add_parser(
        "kernels", help="each kernel, eager and compiled, beside the plain torch operations"
    )
    kernel.add_argument("--dtype", choices=("fp32", "bf16"), default="bf16")
    kernel.add_argument("--only", default="", help="kernels whose name contains this")
    add_first_options(commands.add_parser("first", help="a first meeting with a GPU"))

    model = commands.add_parser(
        "model", help="the modelled time of a step on a GPU, part by part, from the launches of the real step"
    )
    add_model_options(model)

    ranks = commands.add_parser("machine", help="what this machine can do; started on all its ranks")
    ranks.add_argument("--out", default="runs/machine.json")
    ranks.add_argument("--dtype", choices=machine.DTYPES, default="bf16")
    ranks.add_argument("--threads", type=int, default=1, help="of a rank")

    words.add_words_options(
        commands.add_parser("words", help="traffic of the ranks on the job's store, counted")
    )

    watching.add_watching_options(
        commands.add_parser("watching", help="what it costs a step to watch for faults, in a real run")
    )

    chaos.add_chaos_options(commands.add_parser("chaos", help=chaos.HELP))

    loader = commands.add_parser("data", help="loader, opening a data set of 1e9 tokens, tokenizing")

    saves = commands.add_parser("checkpoint", help="saves and loads, beside the disk and DCP")
    saves.add_argument("--parameters", type=float, default=5e7, help="of the model; 12 bytes of state each")
    saves.add_argument("--rounds", type=int, default=checkpoint.ROUNDS)
    saves.add_argument(
        "--out", default="runs/bench/checkpoint", help="a folder on the disk to be measured; it is removed"
    )
    saves.add_argument("--memory", default="/dev/shm", help="a folder in memory")

    for command in (step, kernel, loader, saves):
        command.add_argument("--threads", type=int, default=2)
    for command in (step, kernel, loader, model, saves):
        command.add_argument("--json", action="store_true", help="print one JSON object instead of the table")
    return parser


def add_model_options(model: argparse.ArgumentParser) -> None:
    model.add_argument(
        "scenarios", nargs="*", metavar="SCENARIO", help="of lab/benchmarks/step_model.py; none: all of them"
    )
    model.add_argument("--gpu", choices=("h100", "h200", "b200"), default="h200")
    model.add_argument(
        "--chips", action="store_true", help="also a table of all GPUs, with layers that fit each of them"
    )
    model.add_argument("--tiny", action="store_true", help="tiny models of the same kinds")
    model.add_argument("--page", default="", help="the Markdown file whose tables are replaced")
    model.add_argument(
        "--before",
        nargs="*",
        default=[],
        metavar="FILE",
        help="what --json printed at other commits, also packed by xz",
    )


def add_step_options(step: argparse.ArgumentParser) -> None:
    step.add_argument("--dtype", choices=("fp32", "bf16"), default="bf16")
    step.add_argument(
        "--peers",
        help="comma-separated; one that is not installed is reported as such; "
        f"default {race.PEERS}, and on a GPU the plan of card.py",
    )
    step.add_argument(
        "--ours", default="eager,compile", help="of eager, compile: ours without and with train.compile"
    )
    step.add_argument("--rounds", type=int, default=5)
    step.add_argument("--steps", type=int, default=1, help="steps of each peer in a round")
    step.add_argument("--warm", type=int, default=2, help="steps before the clock starts")
    step.add_argument(
        "--ranks", type=int, default=1, help="processes over gloo for each contestant, --threads each"
    )
    step.add_argument(
        "--split",
        choices=("dp", "tp"),
        default="dp",
        help="how the ranks divide the work: each its own batch, or each a part of every layer",
    )
    step.add_argument(
        "--shape", choices=("race", "quickstart", "mixture"), default="race", help=shape.HELP
    )


def add_gpu_step_options(step: argparse.ArgumentParser) -> None:
    step.add_argument("--device", choices=("cpu", "cuda"), default="cpu", help=card.HELP)
    step.add_argument(
        "--tiny",
        action="store_true",
        help="a rehearsal of --device cuda: the same plan at tiny sizes, on a CPU with --device cpu",
    )
    step.add_argument("--minutes", type=float, default=9.0, help="of --device cuda: deadline")
    step.add_argument(
        "--only", default="", help="of --device cuda: models of lab/benchmarks/shape.py"
    )
    step.add_argument(
        "--site",
        default="",
        help="of --device cuda: a folder with the peers' packages, for their processes alone",
    )
    step.add_argument(
        "--out",
        default="runs/bench/step.jsonl",
        help="of --device cuda: each result is appended here as soon as it is measured",
    )
    step.add_argument(
        "--table", default="", help="of --device cuda: the file of the Markdown table, which is printed too"
    )


def add_first_options(first: argparse.ArgumentParser) -> None:
    first.add_argument("--device", choices=("cpu", "cuda"), default="cuda")
    first.add_argument("--tiny", action="store_true", help="a rehearsal at tiny sizes, for --device cpu")
    first.add_argument("--minutes", type=float, default=9.0, help="deadline")
    first.add_argument(
        "--after", default="", metavar="FILE",
        help="first.jsonl or first.tar.gz of an earlier call, to resume"
    )
    first.add_argument("--site", default="", help="a folder with packages of peers and attention libraries")
    first.add_argument("--out", default="runs/bench/first", help="the folder of results")
    first.add_argument("--only", default="", help="sections, or SECTION/JOB, separated by commas")
    first.add_argument("--jobs", type=int, default=0, help="processes beside each other; 0: by the GPU")
    first.add_argument(
        "--start", choices=("fork", "spawn"), default="fork", help="how jobs start; spawn: each imports all"
    )
    first.add_argument("--plan", action="store_true", help="prints the order, times and layers, and ends")
    first.add_argument("--card-gb", type=float, default=0.0, help="of --plan: the memory of another GPU, GiB")
    first.add_argument("--tests", default="tests/kernels", help="the folder of the tests marked gpu")
