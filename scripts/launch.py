"""Starts the ranks of train.py on this node, and ends as they end.

    python -m scripts.launch --nproc 8 -- NAME [--section.field VALUE ...]
    python -m scripts.launch --nproc 8 --nnodes 2 --node-rank 0 --rdzv node0:29500 -- NAME ...

It does what torchrun does for this program, and shows what the ranks say and nothing else:
- A mistake in the config is one line, before a rank is started.
- The exit code is that of the ranks (docs/training.md has them), where torchrun makes 1 of each.
- SIGTERM, SIGINT, SIGUSR1 and SIGHUP are passed on to the ranks, which save and end with code 75. Under
  `nohup` SIGHUP stays ignored.
- Ranks that have not ended 30 s after the first failure are killed. All of them die with this process.

The ranks of one node meet at 127.0.0.1, at a free port. Those of several nodes meet at --rdzv, a host and
port of node 0, and each node has its --node-rank. Whoever reaches that port can disturb the job, as with
torchrun: it belongs into a network of your own. What ranks tell each other about failures there is sealed
with BEVATRON_STORE_SECRET, so that nobody else can say how the job ended: any word, the same on all nodes.
On one node the launcher makes it up.
"""
import argparse
import contextlib
import ctypes
import os
import secrets
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import config
from config import ConfigError
from config.exit_codes import FINISHED, MEANINGS, STOPPED_EARLY
from config.terminal import ParagraphHelp
from runtime.stop import SIGNALS, is_under_nohup

TRAIN_FILE = Path(__file__).resolve().parent.parent / "train.py"
FAILURE_SECONDS = 30.0  # from the first failure until the ranks that are left are killed
LINGER_SECONDS = 30.0  # how long node 0 keeps the store for the ranks of other nodes, after its own ended
POLL_SECONDS = 0.05
PR_SET_PDEATHSIG = 1  # prctl: send this signal when the parent dies


@dataclass(frozen=True)
class Node:
    """The part of a job that this process starts. host, port: where all ranks meet."""

    nproc: int
    nnodes: int
    node_rank: int
    host: str
    port: int
    secret: str = ""  # of the words in the store; "": that of the environment, if there is one

    def environment(self, local_rank: int) -> dict[str, str]:
        """Of a rank: that of this process, with torchrun's variables, which runtime/setup.py reads."""
        found = dict(os.environ)
        found.update(
            RANK=str(self.node_rank * self.nproc + local_rank),
            WORLD_SIZE=str(self.nnodes * self.nproc),
            LOCAL_RANK=str(local_rank),
            LOCAL_WORLD_SIZE=str(self.nproc),
            MASTER_ADDR=self.host,
            MASTER_PORT=str(self.port),
            TORCHELASTIC_USE_AGENT_STORE="True",  # the store is the launcher's, not rank 0's
            TORCHELASTIC_RUN_ID="launch",  # a rank with this variable dies with its parent
            TORCHELASTIC_RESTART_COUNT="0",
        )
        if self.secret:
            found.setdefault("BEVATRON_STORE_SECRET", self.secret)
        if self.nnodes == 1 and os.path.exists("/sys/class/net/lo"):
            found.setdefault("GLOO_SOCKET_IFNAME", "lo")  # gloo's sockets are not open to the network either
        return found


@dataclass(frozen=True)
class RankEnd:
    """How a rank ended. code: as subprocess has it, minus the signal that ended it."""

    rank: int
    code: int


# ---- where the ranks meet ----------------------------------------------------------------------------------


def listen(options: argparse.Namespace) -> tuple[Node, socket.socket | None]:
    """This node, and on node 0 the socket of the store, which listens already: ranks may start before it.

    Raises ConfigError if --rdzv is missing, or is no address that can be listened at.
    """
    if options.nnodes == 1:
        listener = socket.create_server(("127.0.0.1", 0))
        port = listener.getsockname()[1]
        return Node(options.nproc, 1, 0, "127.0.0.1", port, secrets.token_hex(16)), listener

    host, colon, port = (options.rdzv or "").rpartition(":")
    if not (host and colon and port.isdigit() and 0 < int(port) < 65536):
        raise ConfigError("--rdzv: jobs of several nodes need a host and a free port of node 0, such as "
                          f"node0:29500; got {options.rdzv}")
    if not 0 <= options.node_rank < options.nnodes:
        raise ConfigError(f"--node-rank: {options.node_rank} is not one of 0 to {options.nnodes - 1}")
    node = Node(options.nproc, options.nnodes, options.node_rank, host.strip("[]"), int(port))
    if node.node_rank > 0:
        return node, None
    try:
        return node, create_listener(node.host, node.port)
    except OSError as error:
        reason = os.strerror(error.errno or 0)  # error.strerror repeats the address
        raise ConfigError(f"--rdzv: cannot listen at {options.rdzv} ({reason}); it must be an "
                          "address of node 0 with a port that nothing uses") from None


def create_listener(host: str, port: int) -> socket.socket:
    """Listens at an address; behind a name at all addresses of this host, since names may mean loopback."""
    for family in (socket.AF_INET, socket.AF_INET6):
        if is_address(family, host):
            return socket.create_server((host, port), family=family, backlog=4096)
    if socket.has_dualstack_ipv6():
        return socket.create_server(("", port), family=socket.AF_INET6, dualstack_ipv6=True, backlog=4096)
    return socket.create_server(("", port), backlog=4096)


def is_address(family: socket.AddressFamily, text: str) -> bool:
    """Whether the text is an address in numbers, not a name."""
    try:
        socket.inet_pton(family, text)
    except OSError:
        return False
    return True


# ---- the ranks ---------------------------------------------------------------------------------------------


def check_words(argv: list[str]) -> None:
    """Raises ConfigError for a mistake in the words of train.py.

    Those of a branch are left to the ranks: the settings that it goes on with are in a checkpoint.
    """
    name, file, overrides = config.split_argv(argv)
    if config.dotted_overrides(overrides).get("checkpoint", {}).get("branch") in (None, "none"):
        config.resolve(name, file, overrides)


def run_ranks(node: Node, listener: socket.socket | None, command: list[str]) -> list[RankEnd]:
    """Runs the command as every rank of this node. Returns how they ended, in that order."""
    processes: dict[int, subprocess.Popen[bytes]] = {}

    received: list[int] = []

    def pass_on(number: int, _: Any) -> None:
        received.append(number)
        for process in processes.values():
            process.send_signal(number)  # does nothing to one that has ended

    wanted = [number for number in SIGNALS if not is_under_nohup(number)]
    previous = {number: signal.signal(number, pass_on) for number in wanted}
    die_with_launcher = dying_with(os.getpid())
    try:
        for local_rank in range(node.nproc):
            # a session of its own: Ctrl-C comes once, from here
            process = subprocess.Popen(
                command,
                env=node.environment(local_rank),
                stdin=subprocess.DEVNULL,
                start_new_session=True,
                preexec_fn=die_with_launcher,
            )
            processes[node.node_rank * node.nproc + local_rank] = process
            for number in received:  # while it was being started
                process.send_signal(number)
        store = None if listener is None else host_store(node, listener)
        ends = wait_for_ranks(processes)
        linger(node, store)
        return ends
    finally:
        kill(processes)
        for number, handler in previous.items():
            signal.signal(number, handler)


def dying_with(launcher: int) -> Callable[[], None] | None:
    """What a rank does before it becomes train.py, which asks for the same when it has been loaded: dies with
    the launcher, whenever that is. None where the kernel cannot do it (macOS).
    """
    prctl = getattr(ctypes.CDLL(None), "prctl", None)
    if prctl is None:
        return None

    def ask_for_death() -> None:
        prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
        if os.getppid() != launcher:  # it died before the call
            os.kill(os.getpid(), signal.SIGKILL)

    return ask_for_death


def host_store(node: Node, listener: socket.socket) -> Any:
    """The store where ranks meet. Imports torch here, while the ranks do."""
    from parallel.wire.world import launcher_store

    return launcher_store(node.host, node.port, listener)


def wait_for_ranks(processes: dict[int, subprocess.Popen[bytes]]) -> list[RankEnd]:
    """Waits until all have ended. After a failure they end by themselves, or are killed."""
    ends: list[RankEnd] = []
    deadline: float | None = None
    while len(ends) < len(processes):
        ended = {end.rank for end in ends}
        for rank, process in processes.items():
            code = process.poll()
            if rank in ended or code is None:
                continue
            ends.append(RankEnd(rank, code))
            if code not in (FINISHED, STOPPED_EARLY) and deadline is None:
                deadline = time.monotonic() + FAILURE_SECONDS
        if deadline is not None and time.monotonic() > deadline:
            kill(processes)
            deadline = None
        time.sleep(POLL_SECONDS)
    return ends


def kill(processes: dict[int, subprocess.Popen[bytes]]) -> None:
    """Kills the ranks that still run, with the processes that they have started."""
    for process in processes.values():
        if process.poll() is None:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()


def linger(node: Node, store: Any) -> None:
    """Node 0 keeps the store until the other nodes have told it there that their ranks ended too."""
    if node.nnodes == 1:
        return
    from parallel.wire.world import launcher_store

    with contextlib.suppress(RuntimeError):  # the other side is gone
        if store is None:
            launcher_store(node.host, node.port).add("nodes_ended", 1)
            return
        deadline = time.monotonic() + LINGER_SECONDS
        while store.add("nodes_ended", 0) < node.nnodes - 1 and time.monotonic() < deadline:
            time.sleep(POLL_SECONDS)


# ---- the end -----------------------------------------------------------------------------------------------


def exit_code(ends: list[RankEnd]) -> int:
    """Of the job: of the first rank that failed and could say why; else 128 + the signal that ended one."""
    failures = [end.code for end in ends if end.code not in (FINISHED, STOPPED_EARLY)]
    said = [code for code in failures if code > 0]
    if said:
        return said[0]
    if failures:
        return 128 - failures[0]
    return max(end.code for end in ends)


def closing_line(ends: list[RankEnd], seconds: float) -> str:
    """launch: 8 ranks ended with code 75 after 3m20s: stopped early, everything is saved; ..."""
    code = exit_code(ends)
    minutes, rest = divmod(round(seconds), 60)
    duration = f"{minutes}m{rest:02d}s" if minutes else f"{rest}s"
    plural = "s" if len(ends) > 1 else ""
    line = f"launch: {len(ends)} rank{plural} ended with code {code} after {duration}"
    if code in MEANINGS:
        line += f": {MEANINGS[code]}"
    signalled = sorted((end for end in ends if end.code < 0), key=lambda end: end.rank)
    for end in signalled[:4]:
        line += f"; rank {end.rank} was ended by {signal.Signals(-end.code).name}"
    if len(signalled) > 4:
        line += f", and {len(signalled) - 4} more by a signal"
    return line


# ---- the command -------------------------------------------------------------------------------------------


def positive(text: str) -> int:
    value = int(text)
    if value < 1:
        raise argparse.ArgumentTypeError("at least 1")
    return value


def arguments() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m scripts.launch",
        description=__doc__,
        formatter_class=ParagraphHelp,
    )
    parser.add_argument("--nproc", type=positive, required=True, help="ranks of this node: one a GPU")
    parser.add_argument("--nnodes", type=positive, default=1, help="nodes of the job, all with --nproc ranks")
    parser.add_argument("--node-rank", type=int, default=0, help="which of them this is, from 0")
    parser.add_argument("--rdzv", metavar="HOST:PORT", help="where several nodes meet: on node 0")
    parser.add_argument("words", nargs="*", help="after --: what follows `python train.py`")
    return parser


def main(argv: list[str]) -> int:
    options = arguments().parse_args(argv)
    command = [sys.executable, str(TRAIN_FILE), *options.words]
    if {"--help", "-h", "--list"} & set(options.words):
        return subprocess.call(command)
    try:
        check_words([word for word in options.words if word != "--traceback"])
        node, listener = listen(options)
    except ConfigError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2

    started = time.monotonic()
    ends = run_ranks(node, listener, command)
    if node.node_rank == 0 or any(end.code < 0 for end in ends):  # once, and where a rank was lost
        print(closing_line(ends, time.monotonic() - started), file=sys.stderr, flush=True)
    return exit_code(ends)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
