"""Command-line options whose errors are one line that names the option and the way out."""

import argparse
import contextlib
import re
import sys
from collections.abc import Iterator
from typing import Any, NoReturn

from config.strict import ConfigError
from config.terminal import ParagraphHelp

# argparse's messages and their replacements; the first match wins
REWORDED = (
    (r"argument (.+?): invalid int value: (.+)", r"\1: expected a whole number, got \2"),
    (r"argument (.+?): invalid float value: (.+)", r"\1: expected a number, got \2"),
    (r"the following arguments are required: (.+)", r"\1: missing; see {prog} --help for the options"),
    (r"(unrecognized arguments: .+)", r"\1; see {prog} --help for the options"),
    (r"argument (.+)", r"\1"),
)


class CommandParser(argparse.ArgumentParser):
    """A parser that raises ConfigError, and prints its description as written. Options have one spelling."""

    def __init__(self, *args: Any, **keywords: Any) -> None:
        super().__init__(*args, **{"formatter_class": ParagraphHelp, "allow_abbrev": False, **keywords})

    def error(self, message: str) -> NoReturn:
        raise ConfigError(reworded(message, self.prog))


def reworded(message: str, prog: str) -> str:
    """Reword an argparse error so that it begins with the option. `prog` is the command's name."""
    for pattern, said in REWORDED:
        match = re.fullmatch(pattern, message, re.DOTALL)
        if match is not None:
            return match.expand(said).replace("{prog}", prog)
    return message


@contextlib.contextmanager
def needs_lab() -> Iterator[None]:
    """Import a command from lab/ inside. A clone without lab/ exits with one line and code 2."""
    try:
        yield
    except ModuleNotFoundError as error:
        if (error.name or "").split(".")[0] != "lab":
            raise
        line = "error: lab/: this command needs it, and this clone does not have it; git checkout -- lab"
        print(line, file=sys.stderr)
        sys.exit(2)
