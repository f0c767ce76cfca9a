"""Text from a run.

    python -m scripts.generate RUN --prompt "def " --max-new-tokens 100

RUN is a run folder, or one of its checkpoint folders.
"""
import argparse
import json
import sys
import time

import torch

from build import TrainedModel, load_run
from checkpoint.state import TRAINED, WEIGHTS
from config import ConfigError
from config.terminal import ParagraphHelp
from model.generate import generate
from runtime.failure import fail_cleanly


def arguments() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m scripts.generate",
        description=__doc__,
        formatter_class=ParagraphHelp,
    )
    add = parser.add_argument
    add("run", help="run folder or checkpoint folder")
    add("--weights", choices=WEIGHTS, default=TRAINED, help="ema: their moving average (train.ema)")
    add("--tokenizer", metavar="SPEC",
        help="bytes, a .model, a tokenizer.json or a folder; none: that of the run, if it has one")
    add("--eod", metavar="TOKEN_OR_ID",
        help="--tokenizer: the token that ends documents; none: what the tokenizer's files name")
    add("--prompt", default="", help="start of the text; empty: a new document")
    add("--max-new-tokens", type=int, default=100)
    add("--temperature", type=float, default=0.8, help="0: always the most likely token")
    add("--top-k", type=int, help="sample from the k most likely tokens")
    add("--top-p", type=float, help="sample from the smallest set of tokens with this probability")
    add("--seed", type=int, default=0)
    add("--samples", type=int, default=1)
    add("--json", action="store_true", help="print one JSON object for each sample")
    return parser


def check_ranges(args: argparse.Namespace) -> None:
    """Raises ConfigError if an option is out of range."""
    in_range = {
        "max-new-tokens": args.max_new_tokens > 0,
        "temperature": args.temperature >= 0,
        "samples": args.samples > 0,
        "top-k": args.top_k is None or args.top_k > 0,
        "top-p": args.top_p is None or 0 < args.top_p <= 1,
    }
    for name, is_in_range in in_range.items():
        if not is_in_range:
            raise ConfigError(f"--{name}: out of range; see --help")


def main(argv: list[str]) -> int:
    args = arguments().parse_args(argv)
    check_ranges(args)
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    run = load_run(args.run, device, weights=args.weights, tokenizer_spec=args.tokenizer, eod=args.eod)
    prompt = run.tokenizer.encode(args.prompt) or [run.tokenizer.eod]

    for sample in range(args.samples):
        started = time.perf_counter()
        ids = sample_ids(run, prompt, args, seed=args.seed + sample, device=device)
        seconds = time.perf_counter() - started

        text = args.prompt + run.tokenizer.decode(ids)
        if args.json:
            print(json.dumps({
                "text": text,
                "prompt_tokens": len(prompt),
                "new_tokens": len(ids),
                "tokens_per_s": len(ids) / seconds,
            }))
        else:
            print(text if args.samples == 1 else f"--- sample {sample}\n{text}")
    return 0


def sample_ids(
    run: TrainedModel, prompt: list[int], args: argparse.Namespace, *, seed: int, device: torch.device
) -> list[int]:
    """The new token ids of one sample."""
    model = run.cfg.model
    return list(generate(
        run.logits,
        prompt,
        args.max_new_tokens,
        temperature=args.temperature,
        top_k=args.top_k,
        top_p=args.top_p,
        eod=run.tokenizer.eod,
        seed=seed,
        limit=model.context if model.positions == "learned" else None,
        vocab=run.tokenizer.vocab,
        device=device,
    ))


if __name__ == "__main__":
    sys.exit(fail_cleanly(main, sys.argv[1:]))
