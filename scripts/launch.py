"""Starts the ranks of train.py on this node, and ends as they end.

    python -m scripts.launch --nproc 8 -- NAME [--section.field VALUE ...]
    python -m scripts.launch --nproc 8 --nnodes 2 --node-rank 0 --rdzv node0:29500 -- NAME ...
    python -m scripts.launch --nproc 4:8 -- NAME ...

It does what torchrun does for this program, and shows what the ranks say and nothing else:
- A mistake in the config is one line, before a rank is started.
- The exit code is that of the ranks (docs/training.md has them), where torchrun makes 1 of each.
- SIGTERM, SIGINT, SIGUSR1 and SIGHUP are passed on to the ranks, which save and end with code 75. Under
  `nohup` SIGHUP stays ignored. A second Ctrl-C kills them.
- Ranks that have not ended 30 s after the first failure are killed. All of them die with this process.

With --nproc MIN:MAX the job is elastic: after the loss of a rank it starts again by itself, from the newest
checkpoint, with the ranks that are left.
- A rank is lost that a signal has ended (SIGKILL, a crash, the kernel for want of memory), or that hung and
  was killed for it. Its place, a GPU, is left out as long as MIN ranks remain. After a hang that nobody was
  killed for, and where replicas differ, all places start again.
- A rank that finds before the first step that its device computes wrongly (code 80) is left out for good.
- The layout follows the number of ranks (parallel.elastic, which MIN:MAX sets): MAX or as many as it can use.
- Places that were left out are used again after --regrow minutes: the job saves and stops for it. Without
  --regrow they stay out until this command is given again.
- Processes wait with their imports done, as many as ranks, or --spares of them: the next start is sooner.
- Three restarts in a row that bring no newer checkpoint end the job, with the last exit code.

With parallel.elastic alone, and over several nodes, a start takes as many ranks as the layout can use.

The ranks of one node meet at 127.0.0.1, at a free port. Those of several nodes meet at --rdzv, a host and
port of node 0, and each node has its --node-rank. Whoever reaches that port can disturb the job, as with
torchrun: it belongs into a network of your own. What ranks tell each other about failures there is sealed
with BEVATRON_STORE_SECRET, so that nobody else can say how the job ended: any word, the same on all nodes.
On one node the launcher makes it up.
"""
import argparse
import contextlib
import os
import secrets
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Collection
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from config import Config, ConfigError
from config.command_line import CommandParser
from config.exit_codes import FINISHED, INTERRUPTED, MEANINGS, STOPPED_EARLY
from config.reading import dotted_overrides, resolve, split_argv
from parallel.wire.world import launcher_store
from runtime import restarts
from runtime.processes import catches, dying_with, print_error
from runtime.relay import SignalRelay
from runtime.spares import Spares

TRAIN_FILE = Path(__file__).resolve().parent.parent / "train.py"
FAILURE_SECONDS = 30.0  # from the first failure until the ranks that are left are killed
LINGER_SECONDS = 30.0  # how long node 0 keeps the store for the ranks of other nodes, after its own ended
POLL_SECONDS = 0.05


@dataclass(frozen=True)
class RankSpan:
    """The value of --nproc. least: None for exactly `most`, and no restart."""

    most: int
    least: int | None = None


@dataclass(frozen=True)
class Node:
    """The part of a job that this process starts. host, port: where all ranks meet."""

    nproc: int
    nnodes: int
    node_rank: int
    host: str
    port: int
    secret: str = ""  # of the words in the store; "": that of the environment, if there is one
    world: int | None = None  # ranks of the job, or None for nproc on each node
    places: tuple[int, ...] = ()  # the GPU of each rank of this node; (): the first ones
    restart: int = 0  # how often this process has started the job again

    @property
    def world_size(self) -> int:
        return self.nnodes * self.nproc if self.world is None else self.world

    def ranks(self) -> range:
        """Those of this node, which has none if the nodes before it have all that are used."""
        first = self.node_rank * self.nproc
        return range(first, max(first, min(first + self.nproc, self.world_size)))

    def nodes_with_ranks(self) -> int:
        return -(-self.world_size // self.nproc)

    def place(self, rank: int) -> int:
        """The GPU of a rank of this node."""
        local_rank = rank - self.node_rank * self.nproc
        return self.places[local_rank] if self.places else local_rank

    def environment(self, local_rank: int) -> dict[str, str]:
        """Of a rank: that of this process, with torchrun's variables, which runtime/setup.py reads."""
        found = dict(os.environ)
        found.update(
            RANK=str(self.node_rank * self.nproc + local_rank),
            WORLD_SIZE=str(self.world_size),
            LOCAL_RANK=str(local_rank),
            LOCAL_WORLD_SIZE=str(len(self.ranks())),
            MASTER_ADDR=self.host,
            MASTER_PORT=str(self.port),
            TORCHELASTIC_USE_AGENT_STORE="True",  # the store is the launcher's, not rank 0's
            TORCHELASTIC_RUN_ID="launch",  # a rank with this variable dies with its parent
            TORCHELASTIC_RESTART_COUNT=str(self.restart),
        )
        if self.places:
            found["CUDA_VISIBLE_DEVICES"] = visible_devices(self.places, found.get("CUDA_VISIBLE_DEVICES"))
        if self.secret:
            found.setdefault("BEVATRON_STORE_SECRET", self.secret)
        if self.nnodes == 1 and os.path.exists("/sys/class/net/lo"):
            found.setdefault("GLOO_SOCKET_IFNAME", "lo")  # gloo's sockets are not open to the network either
        return found


def visible_devices(places: tuple[int, ...], given: str | None) -> str:
    """CUDA_VISIBLE_DEVICES of ranks in these places. given: that of this process, whose GPUs are counted."""
    if given is None:
        return ",".join(map(str, places))
    names = given.split(",")
    return ",".join(names[place] for place in places if place < len(names))


@dataclass(frozen=True)
class RankEnd:
    """How a rank ended. code: as subprocess has it, minus the signal that ended it. killed: by the launcher,
    because it did not end after another's failure. stopped: by a signal that was passed on to it, before it
    could catch one; so it had nothing to save yet."""

    rank: int
    code: int
    killed: bool = field(default=False, compare=False)
    stopped: bool = field(default=False, compare=False)

    @property
    def is_lost(self) -> bool:
        """Whether something ended the rank that was not asked to."""
        return self.code < 0 and not self.killed and not self.stopped


@dataclass
class StartWatch:
    """The ways from here to the ranks of one start. relay: the signals to this process. spares: processes
    that become ranks sooner than new ones, if any. stop_after: seconds until the ranks are asked to save and
    stop, for a larger start; without it they never are. was_stopped: whether they were."""

    relay: SignalRelay
    spares: Spares | None = None
    stop_after: float | None = None
    was_stopped: bool = False


# ---- where the ranks meet ----------------------------------------------------------------------------------


def listen(options: argparse.Namespace) -> tuple[Node, socket.socket | None]:
    """This node, and on node 0 the socket of the store, which listens already: ranks may start before it.

    Raises ConfigError if --rdzv is missing, or is not an address that can be listened at.
    """
    nproc = options.nproc.most
    if options.nnodes == 1:
        listener = socket.create_server(("127.0.0.1", 0))
        port = listener.getsockname()[1]
        node = Node(
            nproc=nproc,
            nnodes=1,
            node_rank=0,
            host="127.0.0.1",
            port=port,
            secret=secrets.token_hex(16),
        )
        return node, listener

    host, colon, port = (options.rdzv or "").rpartition(":")
    if not (host and colon and port.isdigit() and 0 < int(port) < 65536):
        raise ConfigError("--rdzv: jobs of several nodes need a host and a free port of node 0, such as "
                          f"node0:29500; got {options.rdzv}")
    if not 0 <= options.node_rank < options.nnodes:
        raise ConfigError(f"--node-rank: {options.node_rank} is not one of 0 to {options.nnodes - 1}")
    node = Node(
        nproc=nproc,
        nnodes=options.nnodes,
        node_rank=options.node_rank,
        host=host.strip("[]"),
        port=int(port),
    )
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


def check_words(argv: list[str]) -> Config | None:
    """The config that the words of train.py mean. Raises ConfigError for a mistake in them.

    None for a branch, which is left to the ranks: the settings that it goes on with are in a checkpoint.
    """
    name, file, overrides = split_argv(argv)
    if dotted_overrides(overrides).get("checkpoint.branch") in (None, "none"):
        return resolve(name, file, overrides)
    return None


def run_ranks(
    node: Node, listener: socket.socket | None, command: list[str], watch: StartWatch
) -> list[RankEnd]:
    """Runs the command as every rank of this node. Returns how they ended, in that order."""
    processes: dict[int, subprocess.Popen[bytes]] = {}
    try:
        for local_rank, rank in enumerate(node.ranks()):
            processes[rank] = start_rank(command, node.environment(local_rank), watch.spares)
            watch.relay.add(processes[rank])
        store = None if listener is None else launcher_store(node.host, node.port, listener)
        ends = wait_for_ranks(processes, watch)
        linger(node, store, watch.relay)
        return ends
    finally:
        kill(processes)
        watch.relay.processes.clear()


def start_rank(
    command: list[str], environment: dict[str, str], spares: Spares | None
) -> subprocess.Popen[bytes]:
    """A process that runs the command: a spare where one waits, else a new one."""
    if spares is not None:
        changed = {name: value for name, value in environment.items() if os.environ.get(name) != value}
        process = spares.take(command[2:], changed)  # behind python and train.py
        if process is not None:
            return process
    return subprocess.Popen(
        command,
        env=environment,
        stdin=subprocess.DEVNULL,
        start_new_session=True,  # Ctrl-C comes once, from here
        preexec_fn=dying_with(os.getpid()),
    )


def wait_for_ranks(processes: dict[int, subprocess.Popen[bytes]], watch: StartWatch) -> list[RankEnd]:
    """Waits until all have ended. After a failure they end by themselves, or are killed."""
    relay = watch.relay
    ends: list[RankEnd] = []
    killed: set[int] = set()
    deadline: float | None = None
    has_answered = False  # a Ctrl-C
    are_training = False
    started = time.monotonic()
    while len(ends) < len(processes):
        # who has ended, and what follows for the others
        ended = {end.rank for end in ends}
        for rank, process in processes.items():
            code = process.poll()
            if rank in ended or code is None:
                continue
            ends.append(RankEnd(rank, code, killed=rank in killed, stopped=is_stop(code, relay)))
            if code not in (FINISHED, STOPPED_EARLY) and deadline is None:
                deadline = time.monotonic() + FAILURE_SECONDS

        # those that have had their time, or that a person does not want to wait for
        if relay.interrupted_at is not None and not has_answered:
            has_answered = True
            print_error("launch: SIGINT: the ranks save and end; a second Ctrl-C kills them")
        now = time.monotonic()
        if relay.is_impatient or (deadline is not None and now > deadline):
            killed |= {rank for rank, process in processes.items() if process.poll() is None}
            kill(processes)
            deadline = None

        # spares for the next start, when this one needs no core for its imports any more
        if watch.spares is not None and deadline is None and not ends:
            are_training = are_training or all(map(can_stop, processes.values()))
            if are_training:
                watch.spares.tend()

        # a larger start
        is_time_over = watch.stop_after is not None and now > started + watch.stop_after
        if is_time_over and not watch.was_stopped and not ends and all(map(can_stop, processes.values())):
            watch.was_stopped = True
            for process in processes.values():
                process.send_signal(signal.SIGUSR1)  # they save at the same step, and end
        time.sleep(POLL_SECONDS)
    return ends


def is_stop(code: int, relay: SignalRelay) -> bool:
    """Whether a rank ended at a signal from here that it did not catch yet. Of SIGINT Python may make 130."""
    return -code in relay.received or (code == INTERRUPTED and signal.SIGINT in relay.received)


def can_stop(process: subprocess.Popen[bytes]) -> bool:
    """Whether a rank has come so far that it saves and stops at a SIGUSR1, which would end it before.

    Where there is no /proc, nobody can tell: it is asked.
    """
    return catches(process.pid, signal.SIGUSR1) is not False


def kill(processes: dict[int, subprocess.Popen[bytes]]) -> None:
    """Kills the ranks that still run, with the processes that they have started."""
    for process in processes.values():
        if process.poll() is None:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()


def linger(node: Node, store: Any, relay: SignalRelay) -> None:
    """Node 0 keeps the store until the other nodes have told it there that their ranks ended too."""
    num_nodes = node.nodes_with_ranks()
    if num_nodes == 1 or not node.ranks():
        return

    with contextlib.suppress(RuntimeError):  # the other side is gone
        if store is None:
            launcher_store(node.host, node.port).add("nodes_ended", 1)
            return
        deadline = time.monotonic() + LINGER_SECONDS
        while store.add("nodes_ended", 0) < num_nodes - 1 and time.monotonic() < deadline:
            if relay.is_impatient:
                break
            time.sleep(POLL_SECONDS)


# ---- the end -----------------------------------------------------------------------------------------------


def exit_code(ends: list[RankEnd]) -> int:
    """Of the job: of the first rank that failed and could say why; else 128 + the signal that ended one.

    75 where ranks were stopped before they could save; the others may have lost the connection to them then.
    """
    was_stopped = any(end.stopped for end in ends)
    consequences = (FINISHED, STOPPED_EARLY, 1) if was_stopped else (FINISHED, STOPPED_EARLY)
    failures = [end.code for end in ends if not end.stopped and end.code not in consequences]
    said = [code for code in failures if code > 0]
    if said:
        return said[0]
    if was_stopped:
        return STOPPED_EARLY
    if failures:
        return 128 - failures[0]
    return max(end.code for end in ends)


def closing_line(ends: list[RankEnd], seconds: float, code: int) -> str:
    """launch: 8 ranks ended with code 75 after 3m20s: stopped early, everything is saved; ..."""
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


# ---- elastic jobs ------------------------------------------------------------------------------------------


def elastic_config(words: list[str]) -> tuple[Config, Path]:
    """The config of an elastic job, and its run folder, as the ranks will find them. Raises ConfigError."""
    from checkpoint import branch
    from config.reading.run_name import with_own_folder

    name, file, overrides = split_argv(words)
    given = dotted_overrides(overrides)
    if "checkpoint.branch" in given and not given.keys() >= {"log.name", "log.dir"}:
        raise ConfigError("checkpoint.branch: of an elastic job, give --log.name and --log.dir too")
    cfg = with_own_folder(branch.resolve(name, file, overrides), file, overrides)
    if cfg.log.name is None:
        raise ConfigError("log.name: none; give the run folder's name")
    return cfg, Path(cfg.log.dir) / cfg.log.name


def steps_done(cfg: Config) -> int:
    """The steps of the run, for those of its phases that are past. Raises ConfigError."""
    if cfg.train.phases is None:
        return 0
    from checkpoint import progress

    return progress.steps_done(cfg, Path(cfg.log.dir, str(cfg.log.name)))


def usable_ranks(cfg: Config, least: int, most: int) -> int:
    """How many of so many ranks the job can use. Raises ConfigError, with numbers that would do, for none."""
    from plan import elastic

    done = steps_done(cfg)
    found = elastic.most_ranks(cfg, least, most, done)
    if found is None:
        elastic.layout_for(cfg, most, elastic.RankDevice(), done)  # raises
        raise ConfigError(f"--nproc: no layout of this run has {least} to {most} ranks")
    return found


def choose_places(
    cfg: Config, span: RankSpan, left_out: set[int], wrong: Collection[int] = ()
) -> tuple[int, ...]:
    """The places of the next start: without those left out, as long as enough remain; else with them again.

    wrong: those whose devices compute wrongly, which are never used again. Raises ConfigError if no number of
    ranks in the span has a layout, or too few places are sound.
    """
    least = span.least or span.most
    sound = tuple(place for place in range(span.most) if place not in wrong)
    if len(sound) < least:
        raise ConfigError(f"--nproc: fewer than {least} places of this node compute as they should")
    remaining = tuple(place for place in sound if place not in left_out)
    if len(remaining) >= least:
        with contextlib.suppress(ConfigError):
            return remaining[: usable_ranks(cfg, least, len(remaining))]
    left_out.clear()
    return sound[: usable_ranks(cfg, least, len(sound))]


def may_restart(ends: list[RankEnd], reason: restarts.ExitReason | None) -> bool:
    """Whether the job has lost a rank, so that another start may succeed. reason: what its ranks left."""
    is_lost = any(end.is_lost for end in ends)
    code = exit_code(ends)
    if code in restarts.LOST:
        return is_lost if reason is None else reason.requeue
    return is_lost and code > 128  # none could say why


def run_elastic(
    options: argparse.Namespace,
    words: list[str],
    command: list[str],
    relay: SignalRelay,
    spares: Spares,
) -> int:
    """Starts the job, and again after the loss of a rank. Returns the exit code of the last start; 75 where a
    signal has come instead of the next one.

    Raises ConfigError before the first start.
    """
    from plan import elastic

    cfg, run = elastic_config(words)
    span = options.nproc
    left_out: set[int] = set()  # places of ranks that were lost
    wrong: set[int] = set()  # places whose devices compute wrongly
    places = choose_places(cfg, span, left_out)
    progress = restarts.RestartCount(restarts.progress(run))
    restart = 0
    has_run = False
    if len(places) < span.most:
        print_error(used_line(len(places), span.most))
    while True:
        # one start
        node, listener = listen(options)
        if relay.received:
            break
        node = replace(node, nproc=len(places), places=places, restart=restart)
        grows = bool(options.regrow) and can_grow(cfg, span, len(places), wrong)
        watch = StartWatch(relay, spares, 60 * options.regrow if grows else None)
        restarts.remove_reasons(run)
        started = time.monotonic()
        has_run = True
        ends = run_ranks(node, listener, command, watch)
        code = INTERRUPTED if relay.is_impatient else exit_code(ends)
        print_error(closing_line(ends, time.monotonic() - started, code))

        # whether another one follows
        reason = restarts.read_reason(run)
        if relay.is_impatient or any(end.stopped for end in ends):
            if code in (STOPPED_EARLY, INTERRUPTED):
                leave_reason(run, code, f"{relay.first_name()} received before the ranks could save")
            return code
        was_asked = watch.was_stopped and not relay.received and code == STOPPED_EARLY
        if was_asked and (reason is None or reason.requeue):  # a person's STOP came first otherwise
            left_out.clear()
        elif not may_restart(ends, reason):
            return code
        elif relay.received:
            break
        elif not progress.allows_restart(restarts.progress(run)):
            print_error(
                f"launch: {restarts.MAX_IDLE_RESTARTS} restarts in a row have brought no newer checkpoint: "
                "the job ends"
            )
            return code

        # with which ranks
        left_out |= {node.place(end.rank) for end in ends if end.is_lost}
        wrong |= {node.place(rank) for rank in restarts.ranks_with_wrong_devices(run)}
        before = places
        try:
            places = choose_places(cfg, span, left_out, wrong)
        except ConfigError as error:
            print_error(f"launch: no restart{without_places(left_out, wrong)}: {error}")
            return code
        restart += 1
        done = steps_done(cfg)
        change = f"{elastic.in_words(cfg, len(before), done)} -> {elastic.in_words(cfg, len(places), done)}"
        print_error(restart_line(restart, restarts.progress(run), change) + without_places(left_out, wrong))
    if has_run:
        leave_reason(run, STOPPED_EARLY, f"{relay.first_name()} received between two starts")
    return stop_without_ranks(relay, has_run)


def can_grow(cfg: Config, span: RankSpan, num_ranks: int, wrong: set[int]) -> bool:
    """Whether more ranks than these start where no place but the wrong ones is left out."""
    with contextlib.suppress(ConfigError):
        return len(choose_places(cfg, span, set(), wrong)) > num_ranks
    return False


def leave_reason(run: Path, code: int, text: str) -> None:
    """Writes exit_reason.json in place of ranks that could not, or had failed before the job was stopped.

    Another start is wanted, unless a person killed the ranks.
    """
    from runtime import setup

    setup.write_exit_reason(run, 0, code, text, requeue=code == STOPPED_EARLY)


def restart_line(restart: int, kept: restarts.Kept, change: str) -> str:
    """launch: restart 1, from step 40: 4 ranks (dp2 tp2) -> 2 ranks (tp2)

    What is in memory counts if a part of each rank is left there, which the ranks find out.
    """
    where = "the beginning" if kept.on_disk == restarts.FIRST_STEP else f"step {kept.on_disk:,}"
    if kept.newest > kept.on_disk:
        where = f"step {kept.newest:,} in memory, or else {where}"
    return f"launch: restart {restart}, from {where}: {change}"


def without_places(left_out: set[int], wrong: set[int]) -> str:
    """, without places 1, 3 of this node (of place 1 the device computes wrongly); "" with all places"""
    if not left_out | wrong:
        return ""
    text = f", without {named_places(left_out | wrong)} of this node"
    if wrong:
        text += f" (of {named_places(wrong)} the device computes wrongly)"
    return text


def named_places(places: set[int]) -> str:
    return f"place{'s' if len(places) > 1 else ''} {', '.join(map(str, sorted(places)))}"


def used_line(used: int, most: int) -> str:
    return f"launch: {used} of {most} ranks: as many as the layout can use"


def stop_without_ranks(relay: SignalRelay, has_run: bool = False) -> int:
    """Ends a job at a signal that came while no rank ran: there is nothing to save. Returns the exit code."""
    which, effect = ("next", "goes on") if has_run else ("first", "starts it")
    print_error(
        f"launch: {relay.first_name()} before the {which} start: the job ends with code {STOPPED_EARLY}; "
        f"the same command {effect}"
    )
    return STOPPED_EARLY


# ---- the command -------------------------------------------------------------------------------------------


def positive(text: str) -> int:
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"expected a whole number of at least 1, got {text!r}")
    return int(text)


def parse_span(text: str) -> RankSpan:
    """8, or 4:8."""
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
        help="ranks of this node: one a GPU; MIN:MAX: as many as there are, and restarts",
    )
    parser.add_argument(
        "--regrow",
        type=minutes,
        metavar="MINUTES",
        help="with MIN:MAX: save and start with all ranks again, so long after a start with fewer",
    )
    parser.add_argument(
        "--spares",
        type=int,
        metavar="N",
        help="with MIN:MAX: processes that wait with their imports done; without it as many as ranks",
    )
    parser.add_argument("--nnodes", type=positive, default=1, help="nodes of the job, all with --nproc ranks")
    parser.add_argument("--node-rank", type=int, default=0, help="which of them this is, from 0")
    parser.add_argument("--rdzv", metavar="HOST:PORT", help="where several nodes meet: on node 0")
    parser.add_argument("words", nargs="*", help="after --: what follows `python train.py`")
    return parser


def parse(argv: list[str]) -> argparse.Namespace:
    """The options. Raises ConfigError if the words of train.py are not behind --."""
    options, foreign = arguments().parse_known_args(argv)
    if foreign and "." not in foreign[0]:
        arguments().error(f"unrecognized arguments: {' '.join(foreign)}")
    if foreign:
        raise ConfigError(
            f"{foreign[0]}: no option of the launcher; what is for train.py comes after --, as in "
            f"python -m scripts.launch --nproc 8 -- NAME {foreign[0]}"
        )
    return options


def main(argv: list[str]) -> int:
    try:
        return launch(parse(argv))
    except ConfigError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2


def launch(options: argparse.Namespace) -> int:
    """The exit code of the ranks. Raises ConfigError before one is started."""
    command = [sys.executable, str(TRAIN_FILE), *options.words]
    if {"--help", "-h", "--list"} & set(options.words):
        return subprocess.call(command)
    words = [word for word in options.words if word != "--traceback"]
    check_elastic_options(options)
    cfg = check_words(words)
    with SignalRelay() as relay:
        if options.nproc.least is None:
            return run_once(options, cfg, command, relay)
        elastic_words = ["--parallel.elastic", "true"]
        wanted = options.nproc.most if options.spares is None else options.spares
        with Spares(command[:2], wanted) as spares:
            whole = [*command, *elastic_words]
            return run_elastic(options, [*words, *elastic_words], whole, relay, spares)


def run_once(options: argparse.Namespace, cfg: Config | None, command: list[str], relay: SignalRelay) -> int:
    """Starts the ranks of this node, and returns the exit code. cfg: None if the ranks are to read it.

    Raises ConfigError before that.
    """
    node, listener = listen(options)
    if cfg is not None and cfg.parallel.elastic:
        node = replace(node, world=usable_ranks(cfg, 1, node.world_size))
    if relay.received:
        return stop_without_ranks(relay)

    started = time.monotonic()
    if node.world is not None and node.node_rank == 0 and node.world < node.nnodes * node.nproc:
        print_error(used_line(node.world, node.nnodes * node.nproc))
    if not node.ranks():
        return FINISHED
    ends = run_ranks(node, listener, command, StartWatch(relay))
    code = INTERRUPTED if relay.is_impatient else exit_code(ends)
    if node.node_rank == 0 or any(end.code < 0 for end in ends):  # once, and where a rank was lost
        print_error(closing_line(ends, time.monotonic() - started, code))
    return code


def check_elastic_options(options: argparse.Namespace) -> None:
    """Raises ConfigError for options that do not go with --nproc MIN:MAX, or need it."""
    is_elastic = options.nproc.least is not None
    if is_elastic and options.nnodes > 1:
        raise ConfigError(
            "--nproc: MIN:MAX starts the ranks of one node again; of several nodes, let the scheduler "
            "requeue the job (scripts/slurm/train.sbatch) or torchrun restart it (--nnodes MIN:MAX "
            "--max-restarts N), with --parallel.elastic true"
        )
    if options.regrow is not None and not is_elastic:
        raise ConfigError(
            f"--regrow: goes with --nproc MIN:MAX, as 1:{options.nproc.most}; without it no place is left out"
        )
    if options.spares is not None and not is_elastic:
        raise ConfigError(
            f"--spares: goes with --nproc MIN:MAX, as 1:{options.nproc.most}; without it nothing starts again"
        )
    if options.spares is not None and not 0 <= options.spares <= options.nproc.most:
        raise ConfigError(f"--spares: at most one for each place, 0 to {options.nproc.most}")


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
