"""The train.py keys of scaling experiments, and parsing of their command lines."""
import argparse
import math
from collections.abc import Iterable

from config import ConfigError, usable_cores
from config.reading import dotted_overrides

# for a laptop: the source bytes of Python's standard library
LAPTOP_SETTINGS = {
    "data.tokenizer": "bytes",
    "model.vocab": "257",
    "train.seq_len": "128",
    "train.micro_batch": "16",
    "train.global_batch": "16",
    "train.max_minutes": "none",
    "optim.lr": "6e-3",
    "optim.warmup": "20",
    "eval.batches": "64",
    "train.threads": "1",  # per process; --jobs uses the other cores
}
# for a ladder on a laptop, where small models spend most of their time in attention: shorter sequences
LAPTOP_LADDER = {"train.seq_len": "64", "train.micro_batch": "32", "train.global_batch": "32"}
# the model that sweep and systems train on a laptop
LAPTOP_MODEL = {
    "model.layers": "4",
    "model.hidden": "64",
    "model.mixer.heads": "4",
    "model.mixer.kv_heads": "4",
    "model.mixer.head_dim": "16",
    "model.mlp.width": "176",
}


def parse_settings(
    recipe: str, rest: list[str], laptop: dict[str, str] = LAPTOP_SETTINGS
) -> tuple[tuple[str, str], ...]:
    """Parse --section.key VALUE arguments, with laptop settings as defaults for the laptop's recipe."""
    settings = dict(laptop) if recipe == "quickstart" else {}
    return tuple((settings | dotted_overrides(rest)).items())


def refuse_own_keys(settings: Iterable[tuple[str, str]], own: Iterable[str], what: str) -> None:
    """Raise ConfigError for settings that the experiment `what`, such as "a ladder", would override."""
    for key, _ in settings:
        if key in own:
            raise ConfigError(f"{key}: {what} sets it itself; leave it out")


def to_arguments(settings: Iterable[tuple[str, str]]) -> list[str]:
    """Return [key, value] pairs as train.py arguments."""
    words: list[str] = []
    for key, value in settings:
        words += [f"--{key}", value]
    return words


def parse_numbers(option: str, text: str) -> tuple[float, ...]:
    """Parse finite numbers separated by commas. Raises ConfigError."""
    try:
        numbers = tuple(float(word) for word in text.split(","))
    except ValueError as error:
        raise ConfigError(f"{option}: {text!r} is not a list of numbers, such as 1,2,4") from error
    if not all(map(math.isfinite, numbers)):
        raise ConfigError(f"{option}: {text!r} has a number that is not finite")
    return numbers


def parse_whole_numbers(option: str, text: str) -> tuple[int, ...]:
    """Parse whole numbers separated by commas. Raises ConfigError."""
    numbers = parse_numbers(option, text)
    if not all(number.is_integer() for number in numbers):
        raise ConfigError(f"{option}: {text!r} is not a list of whole numbers, such as 1,2,4")
    return tuple(int(number) for number in numbers)


def get_jobs(args: argparse.Namespace) -> int:
    """Return the concurrent runs: --jobs, or for the quickstart one a core. Raises ConfigError below 1."""
    if args.jobs is None:
        jobs = usable_cores() if args.recipe == "quickstart" else 1
    else:
        jobs = args.jobs
    for name, count in (("ranks", args.ranks), ("jobs", jobs)):
        if count < 1:
            raise ConfigError(f"--{name}: {count}; at least 1")
    return jobs


def say(text: str) -> None:
    """Print a line atomically, from any thread."""
    print(f"{text}\n", end="", flush=True)
