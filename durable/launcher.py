"""Launch the ranks of this node, watch them, and restart an elastic job with those that remain.

scripts/launch.py is the command, and describes what users get.
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
from config.exit_codes import FINISHED, INTERRUPTED, MEANINGS, STOPPED_EARLY
from config.reading import dotted_overrides, resolve, split_argv
from durable import restarts
from durable.relay import SignalRelay
from durable.spares import Spares
from parallel.wire.world import launcher_store
from runtime.processes import death_signal_setter, handles_signal, print_error

TRAIN_FILE = Path(__file__).resolve().parent.parent / "train.py"
FAILURE_SECONDS = 30.0  # from the first failure until the remaining ranks are killed
STORE_GRACE_SECONDS = 30.0  # how long node 0 keeps the store for other nodes after its own ranks ended
POLL_SECONDS = 0.05


@dataclass(frozen=True)
class RankSpan:
    """The value of --nproc. `least` is None for exactly `most` ranks without restarts."""

    most: int
    least: int | None = None


@dataclass(frozen=True)
class Node:
    """The part of a job that this process launches. host, port: the rendezvous of all ranks."""

    nproc: int
    nnodes: int
    node_rank: int
    host: str
    port: int
    secret: str = ""  # signs messages in the store; "": use that of the environment, if any
    world: int | None = None  # ranks of the job, or None for nproc on each node
    places: tuple[int, ...] = ()  # the GPU of each rank of this node; (): the first ones
    restart: int = 0  # how often this process has restarted the job

    @property
    def world_size(self) -> int:
        return self.nnodes * self.nproc if self.world is None else self.world

    def ranks(self) -> range:
        """Return the ranks of this node, none if the nodes before it have all that are used."""
        first = self.node_rank * self.nproc
        return range(first, max(first, min(first + self.nproc, self.world_size)))

    def nodes_with_ranks(self) -> int:
        return -(-self.world_size // self.nproc)

    def place(self, rank: int) -> int:
        """Return the GPU of a rank of this node."""
        local_rank = rank - self.node_rank * self.nproc
        return self.places[local_rank] if self.places else local_rank

    def environment(self, local_rank: int) -> dict[str, str]:
        """Return a rank's environment: this process's plus torchrun's variables (see runtime/setup.py)."""
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
            found.setdefault("GLOO_SOCKET_IFNAME", "lo")  # keep gloo's sockets off the network
        return found


def visible_devices(places: tuple[int, ...], given: str | None) -> str:
    """Return CUDA_VISIBLE_DEVICES for ranks in these places, which index this process's own (`given`)."""
    if given is None:
        return ",".join(map(str, places))
    names = given.split(",")
    return ",".join(names[place] for place in places if place < len(names))


@dataclass(frozen=True)
class RankEnd:
    """How a rank ended.

    code: as in subprocess, negative for a signal.
    killed: by the launcher, because it did not exit after another rank's failure.
    stopped: by a forwarded signal, before it could catch one, and so with nothing to save yet.
    """

    rank: int
    code: int
    killed: bool = field(default=False, compare=False)
    stopped: bool = field(default=False, compare=False)

    @property
    def is_lost(self) -> bool:
        """Whether anything but a requested stop or kill ended the rank."""
        return self.code < 0 and not self.killed and not self.stopped


@dataclass
class StartWatch:
    """How this process controls the ranks of one start.

    relay: forwards signals to them. spares: processes that become ranks faster than new ones, if any.
    stop_after: seconds until the ranks are asked to save and stop, to restart with more ranks; or never.
    was_stopped: whether they were asked.
    """

    relay: SignalRelay
    spares: Spares | None = None
    stop_after: float | None = None
    was_stopped: bool = False


# ---- rendezvous --------------------------------------------------------------------------------------------


def listen(options: argparse.Namespace) -> tuple[Node, socket.socket | None]:
    """Return this node, and on node 0 the listening socket of the store, since other ranks may start first.

    Raises ConfigError if --rdzv is missing, or is not an address to listen on.
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
    """Listen on an address, or for a name on all addresses of this host: names may resolve to loopback."""
    for family in (socket.AF_INET, socket.AF_INET6):
        if is_address(family, host):
            return socket.create_server((host, port), family=family, backlog=4096)
    if socket.has_dualstack_ipv6():
        return socket.create_server(("", port), family=socket.AF_INET6, dualstack_ipv6=True, backlog=4096)
    return socket.create_server(("", port), backlog=4096)


def is_address(family: socket.AddressFamily, text: str) -> bool:
    """Return whether the text is a numeric address, not a name."""
    try:
        socket.inet_pton(family, text)
    except OSError:
        return False
    return True


# ---- the ranks ---------------------------------------------------------------------------------------------


def check_words(argv: list[str]) -> Config | None:
    """Return the config of train.py's arguments. Raises ConfigError for a mistake in them.

    Returns None for a branch, which only the ranks can check: its settings are in a checkpoint.
    """
    name, file, overrides = split_argv(argv)
    if dotted_overrides(overrides).get("checkpoint.branch") in (None, "none"):
        return resolve(name, file, overrides)
    return None


def run_ranks(
    node: Node, listener: socket.socket | None, command: list[str], watch: StartWatch
) -> list[RankEnd]:
    """Run the command as every rank of this node. Returns how they ended, in order of ending."""
    processes: dict[int, subprocess.Popen[bytes]] = {}
    try:
        for local_rank, rank in enumerate(node.ranks()):
            processes[rank] = start_rank(command, node.environment(local_rank), watch.spares)
            watch.relay.add(processes[rank])
        store = None if listener is None else launcher_store(node.host, node.port, listener)
        ends = wait_for_ranks(processes, watch)
        keep_store_alive(node, store, watch.relay)
        return ends
    finally:
        kill(processes)
        watch.relay.processes.clear()


def start_rank(
    command: list[str], environment: dict[str, str], spares: Spares | None
) -> subprocess.Popen[bytes]:
    """Launch a process that runs the command, using a spare if one is waiting."""
    if spares is not None:
        changed = {name: value for name, value in environment.items() if os.environ.get(name) != value}
        process = spares.take(command[2:], changed)  # skips python and train.py
        if process is not None:
            return process
    return subprocess.Popen(
        command,
        env=environment,
        stdin=subprocess.DEVNULL,
        start_new_session=True,  # Ctrl-C reaches it once, from here
        preexec_fn=death_signal_setter(os.getpid()),
    )


def wait_for_ranks(processes: dict[int, subprocess.Popen[bytes]], watch: StartWatch) -> list[RankEnd]:
    """Wait until all have ended. After a failure they exit by themselves, or are killed."""
    relay = watch.relay
    ends: list[RankEnd] = []
    killed: set[int] = set()
    deadline: float | None = None
    has_answered = False  # to a Ctrl-C
    are_training = False
    started = time.monotonic()
    while len(ends) < len(processes):
        # collect the ended ranks
        ended = {end.rank for end in ends}
        for rank, process in processes.items():
            code = process.poll()
            if rank in ended or code is None:
                continue
            ends.append(RankEnd(rank, code, killed=rank in killed, stopped=is_stop(code, relay)))
            if code not in (FINISHED, STOPPED_EARLY) and deadline is None:
                deadline = time.monotonic() + FAILURE_SECONDS

        # kill ranks after their time limit or a second Ctrl-C
        if relay.interrupted_at is not None and not has_answered:
            has_answered = True
            print_error("launch: SIGINT: the ranks save and end; a second Ctrl-C kills them")
        now = time.monotonic()
        if relay.is_impatient or (deadline is not None and now > deadline):
            killed |= {rank for rank, process in processes.items() if process.poll() is None}
            kill(processes)
            deadline = None

        # start spares once this start no longer needs the cores for its imports
        if watch.spares is not None and deadline is None and not ends:
            are_training = are_training or all(map(can_stop, processes.values()))
            if are_training:
                watch.spares.replace_missing()

        # stop for a restart with more ranks
        is_time_over = watch.stop_after is not None and now > started + watch.stop_after
        if is_time_over and not watch.was_stopped and not ends and all(map(can_stop, processes.values())):
            watch.was_stopped = True
            for process in processes.values():
                process.send_signal(signal.SIGUSR1)  # they save at the same step and exit
        time.sleep(POLL_SECONDS)
    return ends


def is_stop(code: int, relay: SignalRelay) -> bool:
    """Return whether a forwarded signal ended a rank that did not catch it yet. SIGINT may appear as 130."""
    return -code in relay.received or (code == INTERRUPTED and signal.SIGINT in relay.received)


def can_stop(process: subprocess.Popen[bytes]) -> bool:
    """Return whether a rank already handles SIGUSR1 by saving and stopping; before, the signal would kill it.

    Without /proc this is unknown, and assumed.
    """
    return handles_signal(process.pid, signal.SIGUSR1) is not False


def kill(processes: dict[int, subprocess.Popen[bytes]]) -> None:
    """Kill the ranks that still run, with their child processes."""
    for process in processes.values():
        if process.poll() is None:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()


def keep_store_alive(node: Node, store: Any, relay: SignalRelay) -> None:
    """Keep the store of node 0 alive until the other nodes have reported there that their ranks ended."""
    num_nodes = node.nodes_with_ranks()
    if num_nodes == 1 or not node.ranks():
        return

    with contextlib.suppress(RuntimeError):  # the other side is gone
        if store is None:
            launcher_store(node.host, node.port).add("nodes_ended", 1)
            return
        deadline = time.monotonic() + STORE_GRACE_SECONDS
        while store.add("nodes_ended", 0) < num_nodes - 1 and time.monotonic() < deadline:
            if relay.is_impatient:
                break
            time.sleep(POLL_SECONDS)


# ---- exit codes --------------------------------------------------------------------------------------------


def exit_code(ends: list[RankEnd]) -> int:
    """Return the job's exit code: that of the first rank with a failure code, else 128 + a rank's signal.

    75 if ranks were stopped before they could save; the others may have lost the connection to them.
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
    """Return an elastic job's config and run folder, as the ranks will resolve them. Raises ConfigError."""
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
    """Return the steps done so far, for a run with phases, else 0. Raises ConfigError."""
    if cfg.train.phases is None:
        return 0
    from durable import progress

    return progress.steps_done(cfg, Path(cfg.log.dir, str(cfg.log.name)))


def usable_ranks(cfg: Config, least: int, most: int) -> int:
    """Return how many ranks, from least to most, the job can use. Raises ConfigError if none, naming some."""
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
    """Return the places of the next start, without those left out as long as enough remain.

    Places in `wrong`, whose devices compute wrongly, are never used again. Raises ConfigError if no number of
    ranks in the span has a layout, or too few places are sound.
    """
    least = span.least or span.most
    sound = tuple(place for place in range(span.most) if place not in wrong)
    if len(sound) < least:
        raise ConfigError(f"--nproc: fewer than {least} places of this node compute correctly")
    remaining = tuple(place for place in sound if place not in left_out)
    if len(remaining) >= least:
        with contextlib.suppress(ConfigError):
            return remaining[: usable_ranks(cfg, least, len(remaining))]
    left_out.clear()
    return sound[: usable_ranks(cfg, least, len(sound))]


def may_restart(ends: list[RankEnd], reason: restarts.ExitReason | None) -> bool:
    """Return whether the job lost a rank and may succeed if restarted. `reason` was left by its ranks."""
    is_lost = any(end.is_lost for end in ends)
    code = exit_code(ends)
    if code in restarts.LOST:
        return is_lost if reason is None else reason.requeue
    return is_lost and code > 128  # no rank reported a cause


def run_elastic(
    options: argparse.Namespace,
    words: list[str],
    command: list[str],
    relay: SignalRelay,
    spares: Spares,
) -> int:
    """Run the job, restarting it when it loses a rank. Returns the exit code of the last start, or 75 if a
    signal arrived instead of the next one.

    Raises ConfigError before the first start.
    """
    from plan import elastic

    cfg, run = elastic_config(words)
    span = options.nproc
    left_out: set[int] = set()  # places of lost ranks
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

        # decide whether to restart
        reason = restarts.read_reason(run)
        if relay.is_impatient or any(end.stopped for end in ends):
            if code in (STOPPED_EARLY, INTERRUPTED):
                leave_reason(run, code, f"{relay.first_name()} received before the ranks could save")
            return code
        was_asked = watch.was_stopped and not relay.received and code == STOPPED_EARLY
        if was_asked and (reason is None or reason.requeue):  # otherwise the user's STOP came first
            left_out.clear()
        elif not may_restart(ends, reason):
            return code
        elif relay.received:
            break
        elif not progress.allows_restart(restarts.progress(run)):
            print_error(
                f"launch: {restarts.MAX_IDLE_RESTARTS} restarts in a row produced no newer checkpoint: "
                "the job ends"
            )
            return code

        # choose the ranks of the next start
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
        change = f"{elastic.to_text(cfg, len(before), done)} -> {elastic.to_text(cfg, len(places), done)}"
        print_error(restart_line(restart, restarts.progress(run), change) + without_places(left_out, wrong))
    if has_run:
        leave_reason(run, STOPPED_EARLY, f"{relay.first_name()} received between two starts")
    return stop_without_ranks(relay, has_run)


def can_grow(cfg: Config, span: RankSpan, num_ranks: int, wrong: set[int]) -> bool:
    """Return whether more ranks than these start once the left-out places are used again."""
    with contextlib.suppress(ConfigError):
        return len(choose_places(cfg, span, set(), wrong)) > num_ranks
    return False


def leave_reason(run: Path, code: int, text: str) -> None:
    """Write exit_reason.json for ranks that could not, or that had failed before the job was stopped.

    It asks for a requeue unless the user killed the ranks.
    """
    from runtime import setup

    setup.write_exit_reason(run, 0, code, text, requeue=code == STOPPED_EARLY)


def restart_line(restart: int, kept: restarts.Kept, change: str) -> str:
    """launch: restart 1, from step 40: 4 ranks (dp2 tp2) -> 2 ranks (tp2)

    Checkpoints in memory count if a part of each rank is left, which only the ranks can verify.
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
    """Return the exit code of a job stopped by a signal while no rank ran, so there is nothing to save."""
    which, effect = ("next", "resumes") if has_run else ("first", "starts it")
    print_error(
        f"launch: {relay.first_name()} before the {which} start: the job ends with code {STOPPED_EARLY}; "
        f"the same command {effect}"
    )
    return STOPPED_EARLY


# ---- the command -------------------------------------------------------------------------------------------


def launch(options: argparse.Namespace) -> int:
    """Run the job and return its exit code. Raises ConfigError before any rank starts."""
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
    """Launch the ranks of this node and return the exit code. `cfg` is None if only the ranks can resolve it.

    Raises ConfigError before the launch.
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
    if node.node_rank == 0 or any(end.code < 0 for end in ends):  # once, and on each node that lost a rank
        print_error(closing_line(ends, time.monotonic() - started, code))
    return code


def check_elastic_options(options: argparse.Namespace) -> None:
    """Raise ConfigError for options that conflict with --nproc MIN:MAX, or need it."""
    is_elastic = options.nproc.least is not None
    if is_elastic and options.nnodes > 1:
        raise ConfigError(
            "--nproc: MIN:MAX starts the ranks of one node again; of several nodes, let the scheduler "
            "requeue the job (scripts/slurm/train.sbatch) or torchrun restart it (--nnodes MIN:MAX "
            "--max-restarts N), with --parallel.elastic true"
        )
    if options.regrow is not None and not is_elastic:
        raise ConfigError(
            f"--regrow: goes with --nproc MIN:MAX, such as 1:{options.nproc.most}; without it no place is "
            "left out"
        )
    if options.spares is not None and not is_elastic:
        raise ConfigError(
            f"--spares: goes with --nproc MIN:MAX, such as 1:{options.nproc.most}; without it nothing starts "
            "again"
        )
    if options.spares is not None and not 0 <= options.spares <= options.nproc.most:
        raise ConfigError(f"--spares: at most one for each place, 0 to {options.nproc.most}")
