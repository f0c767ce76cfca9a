"""Launches the ranks of train.py on this node, and exits as they do.

    python -m scripts.launch --nproc 8 -- NAME [--section.field VALUE ...]
    python -m scripts.launch --nproc 8 --nnodes 2 --node-rank 0 --rdzv node0:29500 -- NAME ...
    python -m scripts.launch --nproc 4:8 -- NAME ...

It replaces torchrun for this program, and prints the output of the ranks and nothing else:
- A mistake in the config is reported in one line, before any rank starts.
- The exit code is that of the ranks (docs/training.md lists them), where torchrun always returns 1.
- SIGTERM, SIGINT, SIGUSR1 and SIGHUP are passed on to the ranks, which save and end with code 75. Under
  `nohup` SIGHUP stays ignored. A second Ctrl-C kills them.
- Ranks still running 30 s after the first failure are killed. All of them die with this process.

With --nproc MIN:MAX the job is elastic: after losing a rank it restarts by itself, from the newest
checkpoint, with the remaining ranks.
- A rank is lost if a signal ended it (SIGKILL, a crash, the OOM killer), or if it hung and was killed for it.
  Its place, a GPU, is left out as long as MIN ranks remain. After a hang without a culprit, and if replicas
  differ, all places restart.
- A rank that finds before the first step that its device computes wrongly (code 80) is excluded permanently.
- The layout follows the number of ranks (parallel.elastic, which MIN:MAX sets): up to MAX, as many as it can
  use.
- Places that were left out return after --regrow minutes: the job saves and stops for it. Without --regrow
  they stay out until the job is launched again.
- Spare processes wait with their imports done, as many as ranks, or --spares of them, for a faster restart.
- Three restarts in a row without a newer checkpoint end the job, with the last exit code.

With parallel.elastic alone, and on several nodes, a job uses as many ranks as the layout can.

The ranks of one node meet at 127.0.0.1, at a free port. Those of several nodes meet at --rdzv, a host and
port of node 0, and each node needs its --node-rank. Anyone who can reach that port can disturb the job, as
with torchrun, so use a private network. Messages about failures between ranks are signed with
BEVATRON_STORE_SECRET, so that nobody else can report how the job ended: any word, the same on all nodes. On
one node the launcher generates it.
"""
import argparse
import contextlib
import sys

from config import ConfigError
from config.command_line import CommandParser
from durable.launcher import RankSpan, launch


def positive(text: str) -> int:
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"expected a whole number of at least 1, got {text!r}")
    return int(text)


def parse_span(text: str) -> RankSpan:
    """Parse 8, or 4:8."""
    least, colon, most = text.rpartition(":")
    span = RankSpan(positive(most), positive(least) if colon else None)
    if span.least is not None and span.least > span.most:
        raise argparse.ArgumentTypeError(f"expected MIN:MAX, as {span.most}:{span.least}, got {text!r}")
    return span


def minutes(text: str) -> float:
    with contextlib.suppress(ValueError):
        if 0 < float(text) < float("inf"):
            return float(text)
    raise argparse.ArgumentTypeError(f"expected a number of minutes above 0, got {text!r}")


def arguments() -> argparse.ArgumentParser:
    parser = CommandParser(
        prog="python -m scripts.launch",
        description=__doc__,
    )
    parser.add_argument(
        "--nproc",
        "--nproc-per-node",
        type=parse_span,
        required=True,
        metavar="N|MIN:MAX",
        help="ranks of this node: one per GPU; MIN:MAX: as many as there are, and restarts",
    )
    parser.add_argument(
        "--regrow",
        type=minutes,
        metavar="MINUTES",
        help="with MIN:MAX: this long after a start with fewer ranks, save and start again with all",
    )
    parser.add_argument(
        "--spares",
        type=int,
        metavar="N",
        help="with MIN:MAX: processes that wait with their imports done; without it as many as ranks",
    )
    parser.add_argument("--nnodes", type=positive, default=1, help="number of nodes, each with --nproc ranks")
    parser.add_argument("--node-rank", type=int, default=0, help="rank of this node, from 0")
    parser.add_argument("--rdzv", metavar="HOST:PORT", help="where several nodes meet: on node 0")
    parser.add_argument("words", nargs="*", help="after --: the arguments of train.py")
    return parser


def parse(argv: list[str]) -> argparse.Namespace:
    """Parse the options. Raises ConfigError if train.py's arguments do not follow --."""
    options, foreign = arguments().parse_known_args(argv)
    if foreign and "." not in foreign[0]:
        arguments().error(f"unrecognized arguments: {' '.join(foreign)}")
    if foreign:
        raise ConfigError(
            f"{foreign[0]}: no option of the launcher; arguments of train.py come after --, as in "
            f"python -m scripts.launch --nproc 8 -- NAME {foreign[0]}"
        )
    return options


def main(argv: list[str]) -> int:
    try:
        return launch(parse(argv))
    except ConfigError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
