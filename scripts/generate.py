"""Text from a run.

    python -m scripts.generate RUN --prompt "def " --max-new-tokens 100
    python -m scripts.generate RUN --chat "What is 2 + 2?"
    python -m scripts.generate RUN --chat
    torchrun --nproc-per-node 8 -m scripts.generate RUN --prompt "def "

RUN is a run folder, or one of its checkpoint folders. --chat formats messages with the tokenizer's chat
template, as in the run's training data, and prints only the answers. Without a message it reads one a line
from the terminal; Ctrl-D ends. Ranks of torchrun hold the model together, in any layout.
"""
import argparse
import json
import math
import sys
import time
from collections.abc import Collection, Iterable, Iterator
from typing import NamedTuple

from checkpoint.state import TRAINED, WEIGHTS, run_on_first_rank
from checkpoint.trained import TrainedModel, load_run
from config import ConfigError
from config.command_line import CommandParser
from config.reading.layout import RequestedLayout
from data.conversation import ASSISTANT, Message
from data.prompts import SYSTEM, USER
from data.tokenizer import continuation
from durable.script_job import add_layout_options, check_layout_options, script_job
from model.generate import generate
from model.rope import rope_switches
from runtime.failure import exit_process, fail_cleanly

FROM_TERMINAL = "-"
NEW_TOKENS, NEW_TOKENS_OF_ANSWER = 100, 500
OF_THE_FORMAT = ""  # an unknown part of a prompt that comes from its format, not its texts
MAX_SHOWN_NAMES = 5  # unknown parts that are listed


class Sample(NamedTuple):
    """New ids, and the time they took."""
    ids: list[int]
    seconds: float


def arguments() -> argparse.ArgumentParser:
    parser = CommandParser(
        prog="python -m scripts.generate",
        description=__doc__,
    )
    add = parser.add_argument
    add("run", help="run folder or checkpoint folder")
    add("--weights", choices=WEIGHTS, default=TRAINED, help="ema: their moving average (train.ema)")
    add("--tokenizer", metavar="SPEC",
        help="bytes, a .model, a tokenizer.json or a folder; none: that of the run, if it has one")
    add("--eod", metavar="TOKEN_OR_ID",
        help="--tokenizer: the token that ends documents; none: what the tokenizer's files name")
    add("--prompt", help="start of the text; none, or empty: a new document")
    add("--special", action="store_true",
        help="--prompt: parse control tokens that it spells, such as <|im_start|>")
    add("--chat", nargs="?", action="append", const=FROM_TERMINAL, metavar="MESSAGE",
        help="a message of the user, and its answer; several: one after the other; none, or -: from the "
             "terminal, a line each")
    add("--system", metavar="TEXT", help="--chat: the system message")
    add("--max-new-tokens", type=int,
        help=f"of a text, or of each answer; none: {NEW_TOKENS} or {NEW_TOKENS_OF_ANSWER}")
    add("--temperature", type=float, default=0.8, help="0: always the most likely token")
    add("--top-k", type=int, help="sample from the k most likely tokens")
    add("--top-p", type=float, help="sample from the smallest set of tokens with this probability")
    add("--seed", type=int, default=0, help="of the first sample; the next has the next number")
    add("--samples", type=int, default=1, help="texts of --prompt")
    add("--threads", type=int, metavar="N",
        help="CPU threads; none: OMP_NUM_THREADS, or as many as torch finds cores; under torchrun a "
             "share of the cores")
    add_layout_options(parser)
    add("--json", action="store_true", help="print one JSON object for each sample, or for each answer")
    return parser


def check_ranges(args: argparse.Namespace) -> None:
    """Raise ConfigError if an option is out of range."""
    in_range = {
        "max-new-tokens": args.max_new_tokens is None or args.max_new_tokens > 0,
        "temperature": args.temperature >= 0,
        "samples": args.samples > 0,
        "top-k": args.top_k is None or args.top_k > 0,
        "top-p": args.top_p is None or 0 < args.top_p <= 1,
    }
    for name, is_in_range in in_range.items():
        if not is_in_range:
            raise ConfigError(f"--{name}: out of range; see --help")


def check_together(args: argparse.Namespace) -> None:
    """Raise ConfigError for an option that has no effect with the others."""
    if args.chat:
        alone = {"prompt": args.prompt is not None, "special": args.special, "samples": args.samples > 1}
        reason = "cannot be used with --chat, whose messages are text"
    else:
        alone = {"system": args.system is not None}
        reason = "is for --chat"
    for name, is_given in alone.items():
        if is_given:
            raise ConfigError(f"--{name}: {reason}; leave it out")


def main(argv: list[str]) -> int:
    with script_job(argv) as job:
        args = arguments().parse_args(argv)
        check_ranges(args)
        check_together(args)
        check_layout_options(args)
        world = job.join(args.threads)
        run = load_run(
            args.run,
            world.device,
            weights=args.weights,
            tokenizer_spec=args.tokenizer,
            eod=args.eod,
            world=world,
            layout=RequestedLayout(args.tp, args.pp, job.ranks_on_node),
        )
        if args.chat:
            chat(run, args)
        else:
            continue_text(run, args)
    return 0


# ---- completing a text -------------------------------------------------------------------------------------

def continue_text(run: TrainedModel, args: argparse.Namespace) -> None:
    """Print samples that continue --prompt."""
    text = args.prompt or ""
    prompt = run.prompts.prompt(text, args.special)
    note_unknown(run, prompt, "--prompt", texts=[text])
    spelled = [] if args.special else run.prompts.spelled(text)
    if spelled:
        note(run, f"{spelled[0]} in --prompt is read as text; --special reads control tokens, --chat writes "
                  "them")
    elif run.is_chat and not args.special:
        note(run, "this run was trained on conversations; --chat prompts it in their format")

    for number in range(args.samples):
        sample = take_sample(run, prompt, args, stops=run.prompts.stops, seed=args.seed + number)
        written = text + continuation(run.tokenizer, prompt, sample.ids)
        if args.json:
            print_json(written, prompt, sample)
        else:
            print(written if args.samples == 1 else f"--- sample {number}\n{written}")


# ---- chatting ----------------------------------------------------------------------------------------------

def chat(run: TrainedModel, args: argparse.Namespace) -> None:
    """Print the answers to the messages of --chat."""
    prompts = run.prompts
    messages: list[Message] = [] if args.system is None else [{"role": SYSTEM, "content": args.system}]
    noted: set[str] = set()
    for number, question in enumerate(questions(args.chat, run)):
        messages.append({"role": USER, "content": question})
        prompt = prompts.chat(messages)
        texts = [message["content"] for message in messages if message["role"] != ASSISTANT]
        noted = note_unknown(run, prompt, "--chat", texts=texts, noted=noted)
        if len(prompt) >= run.cfg.model.context:
            raise ConfigError(f"--chat: the conversation has {len(prompt)} tokens, and the model's context "
                              f"is {run.cfg.model.context}; begin another")
        sample = take_sample(
            run,
            prompt,
            args,
            stops=prompts.turn_stops,
            seed=args.seed + number,
            stop_text=prompts.stop_text,
        )
        answer = run.tokenizer.decode(sample.ids)
        if prompts.stop_text is not None:
            answer = answer.partition(prompts.stop_text)[0].removesuffix("\n")
        messages.append({"role": ASSISTANT, "content": answer})
        if args.json:
            print_json(answer, prompt, sample)
        else:
            print(answer, flush=True)


def questions(words: Iterable[str], run: TrainedModel) -> Iterator[str]:
    """Yield the messages of the user, or with FROM_TERMINAL the lines of the terminal.

    With several ranks, the first reads and broadcasts them, however long that takes.
    """
    for word in words:
        if word != FROM_TERMINAL:
            yield word
            continue
        while True:
            line = run_on_first_rank(read_line, run.mesh.world, math.inf)
            if not line:
                break
            if line.strip():
                yield line.removesuffix("\n")


def read_line() -> str:
    """Return the next line of the terminal, or "" at its end."""
    if sys.stdin.isatty():
        print("> ", end="", file=sys.stderr, flush=True)
    return sys.stdin.readline()


# ---- sampling ----------------------------------------------------------------------------------------------

def take_sample(
    run: TrainedModel,
    prompt: list[int],
    args: argparse.Namespace,
    *,
    stops: Collection[int],
    seed: int,
    stop_text: str | None = None,
) -> Sample:
    """Sample a continuation of a prompt's ids, up to one of the ids `stops` or until it contains stop_text.

    Warns if it exceeds the model's context. Raises ConfigError for a prompt that is too long for learned
    positions.
    """
    started = time.perf_counter()
    model = run.cfg.model
    is_learned = model.positions == "learned"
    if is_learned and len(prompt) > model.context:
        raise ConfigError(f"--prompt: {len(prompt):,} tokens, and the model has {model.context:,} learned "
                          "positions; shorten it")
    ids: list[int] = []
    for token in generate(
        run.logits,
        prompt,
        args.max_new_tokens or (NEW_TOKENS_OF_ANSWER if args.chat else NEW_TOKENS),
        temperature=args.temperature,
        top_k=args.top_k,
        top_p=args.top_p,
        stops=stops,
        seed=seed,
        limit=model.context if is_learned else None,
        vocab=run.tokenizer.vocab,
        switches=rope_switches(model),
        device=run.device,
    ):
        ids.append(token)
        if stop_text is not None and stop_text in run.tokenizer.decode(ids):
            break
    length = len(prompt) + len(ids)
    is_first = seed == args.seed
    if is_first and is_learned and length > model.context:
        note(run, f"the text ends where the {model.context:,} learned positions of the model do")
    elif is_first and length > model.context:
        note(run, f"the text has {length:,} tokens, and the model's positions were made for "
                  f"{model.context:,} (model.context); what lies beyond may be worse")
    return Sample(ids, time.perf_counter() - started)


def print_json(text: str, prompt: list[int], sample: Sample) -> None:
    """Print the JSON object of --json."""
    print(json.dumps({
        "text": text,
        "prompt_tokens": len(prompt),
        "new_tokens": len(sample.ids),
        "tokens_per_s": len(sample.ids) / sample.seconds,
    }), flush=True)


def note_unknown(
    run: TrainedModel, prompt: list[int], option: str, *, texts: list[str], noted: Collection[str] = ()
) -> set[str]:
    """Report how much of a prompt the model cannot read, unless already reported.

    `texts` are those of the prompt. `noted` are the parts reported before. Returns all unknown parts.
    """
    count = run.prompts.count_unknown(prompt)
    unknown = {part: None for text in texts for part in run.prompts.unknown_texts(text)}  # an ordered set
    new = [part for part in unknown or [OF_THE_FORMAT] if count and part not in noted]
    if new:
        named = ", ".join(map(repr, filter(None, new[:MAX_SHOWN_NAMES])))
        note(run, f"{count:,} of the {len(prompt):,} tokens of {option} are unknown to the tokenizer "
                  f"{run.tokenizer.name}: the model does not see what they say{named and f' ({named})'}")
    return {*noted, *new}


def note(run: TrainedModel, text: str) -> None:
    """Print a line that is not part of the text."""
    if run.is_first_rank:
        print(f"note: {text}", file=sys.stderr)


if __name__ == "__main__":
    exit_process(fail_cleanly(main, sys.argv[1:]))
