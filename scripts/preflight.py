"""Check the nodes of a job before an expensive run: sums, links, disk, clocks, GPUs.

    sbatch --nodes 16 --gpus-per-node 8 scripts/slurm/preflight.sbatch
    torchrun --nproc-per-node 8 -m scripts.preflight --folder runs

Prints a row for each node, a line for each problem and its remedy, and the bad nodes in the form of the key
`exclude` of the site file (configs/site.example.yaml).

- Each rank computes a product of matrices and a sum over all ranks whose results are known.
- Each rank sends a known message to the ranks 1, 2, 4, 8, ... places ahead. A node with faulty links is in
  more wrong pairs than the others.
- One rank of each node writes a file into --folder, reads it back, and looks at the free space. Every node
  must see the folder of the first.
- Clocks are read at the end of an exchange among all ranks; the median of several readings counts.
- GPUs: every rank has one if any has, and its memory is free.

Exit codes are those of train.py: 0, 2 for a wrong argument, 76 if a rank does not answer, 82 if only storage
fails, 80 for any other problem of a node.
"""
import argparse
import contextlib
import hashlib
import json
import os
import re
import shutil
import socket
import statistics
import sys
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from checkpoint.disk.files import drop_page_cache
from checkpoint.run_folder import check_token, remove_token, write_token
from config import ConfigError
from config.command_line import CommandParser
from config.terminal import output_width, table_lines
from durable import probes
from durable.script_job import ScriptJob, script_job
from parallel.wire import comm
from parallel.wire.comm import Group
from runtime.failure import REPLICAS_DIFFER, STORAGE_FAILED, exit_process, fail_cleanly
from runtime.setup import rank_and_world

MIB, GIB = 2**20, 2**30
SUMMED = 1 << 20  # elements of the vector that is summed
MESSAGE = 1 << 20  # bytes that two ranks exchange
CLOCK_READINGS = 5
ALL_NODES = "all nodes"
NO_GPU = "torch finds no GPU for a rank, and others have one; look at nvidia-smi, or leave the node out"
FREE_SHARE = 0.9  # of a GPU's memory; if less is free, another process holds the rest
FIRST_TO_GO = ("device", "read MB/s", "send GB/s")  # columns that a narrow terminal drops


class Problem(NamedTuple):
    """One thing that is wrong. kind: sum, link, device, gpu, disk or clock."""
    node: str
    kind: str
    text: str


@dataclass(frozen=True)
class NodeReport:
    """What one rank has measured. The disk's values are None on all but the first rank of a node.

    wrong_senders: ranks whose messages arrived wrong here. problems: [kind, text] of each.
    """
    node: str
    device: str
    gpu_free: float | None  # GiB
    clock: float  # seconds ahead of the first rank's
    send: float  # GB/s
    wrong_senders: list[int]
    problems: list[list[str]]
    write: float | None = None  # MB/s
    read: float | None = None
    disk_free: float | None = None  # GiB


def arguments() -> argparse.ArgumentParser:
    parser = CommandParser(prog="python -m scripts.preflight", description=__doc__)
    add = parser.add_argument
    add("--folder", type=Path, default=Path("runs"), help="where runs will be written (log.dir)")
    add("--disk-mb", type=int, default=256, metavar="MB", help="size of the file that each node writes")
    add("--min-mb-s", type=float, default=50.0, metavar="X", help="slowest write or read that is no problem")
    add("--min-free-gb", type=float, default=10.0, metavar="X", help="least free space that is no problem")
    add("--max-skew", type=float, default=1.0, metavar="SECONDS", help="by which clocks may differ")
    add("--json", action="store_true", help="print one JSON object")
    return parser


def main(argv: list[str]) -> int:
    with script_job(argv) as job:
        args = arguments().parse_args(argv)
        if args.disk_mb < 1:
            raise ConfigError(f"--disk-mb: {args.disk_mb}; at least 1")
        for key in ("min_mb_s", "min_free_gb", "max_skew"):
            bound = getattr(args, key)
            if not bound >= 0:  # nan is neither
                raise ConfigError(f"--{key.replace('_', '-')}: {bound:g}; a number of at least 0")

        # ranks with and without GPUs cannot join one job: if any has none, all meet on CPUs
        without_gpu = nodes_without_gpu(job)
        world = job.join(kind="cpu" if without_gpu else "auto")

        everyone = probes.uncounted(world.all_ranks())
        own = measure(args, everyone, world.device)
        reports = [NodeReport(**row) for row in comm.all_gather_objects(asdict(own), everyone)]
        missing = [Problem(node, "gpu", NO_GPU) for node in without_gpu]
        problems = [*missing, *find_problems(reports, args.max_skew)]
        print_report(reports, problems, args.json)

        # a launcher ends the others at the first code that is not 0
        sys.stdout.flush()
        comm.all_gather_objects(0, everyone)
        return exit_code(problems)


def exit_code(problems: Sequence[Problem]) -> int:
    """Return 0, STORAGE_FAILED if all problems are of disks, else REPLICAS_DIFFER."""
    if not problems:
        return 0
    return STORAGE_FAILED if all(problem.kind == "disk" for problem in problems) else REPLICAS_DIFFER


# ---- what a rank measures ----------------------------------------------------------------------------------


def node_name() -> str:
    """Return this node's name; under srun the one in SLURM, which --exclude takes."""
    return os.environ.get("SLURMD_NODENAME") or socket.gethostname()


def nodes_without_gpu(job: ScriptJob) -> list[str]:
    """Return the nodes with a rank that has no GPU while another rank has one. Collective.

    The ranks have not joined yet, so they exchange this over the job's store.
    """
    rank, size, local_rank, _ = rank_and_world()
    has_gpu = torch.cuda.device_count() > local_rank
    if size == 1 or job.peers.store is None:
        return []
    store = job.peers.store
    store.set(f"preflight/{rank}", json.dumps([node_name(), has_gpu]))
    if rank == 0:
        rows = [json.loads(store.get(f"preflight/{other}")) for other in range(size)]
        lacking = sorted({node for node, has_one in rows if not has_one})
        store.set("preflight/lacking", json.dumps(lacking if any(has_one for _, has_one in rows) else []))
    return json.loads(store.get("preflight/lacking"))


def measure(args: argparse.Namespace, everyone: Group, device: torch.device) -> NodeReport:
    """Run all checks of this rank. Collective."""
    node = node_name()
    problems: list[list[str]] = []

    # this device
    name, gpu_free = device.type, None
    if device.type == "cuda":
        name = torch.cuda.get_device_name(device)
        gpu_free = measure_gpu_memory(device, problems)
    try:
        size = probes.SIZES.get(device.type, probes.SMALL)
        probes.check_product(size, device, torch.float32, node)
    except probes.WrongDevice as error:
        problems.append(["device", str(error)])

    # exchanges with other ranks
    wrong = wrong_sums(everyone, device)
    if wrong:
        text = f"{wrong:,} of {SUMMED:,} sums over all ranks are wrong on rank {everyone.index}"
        problems.append(["sum", f"{text}; leave the node out, and have its devices checked"])
    wrong_senders, send = exchange_in_pairs(everyone, device)

    # storage and clock
    is_first_of_node = rank_and_world()[2] == 0
    disk = measure_disk(args, problems) if is_first_of_node else {}
    problems += check_folder(args.folder, everyone)
    return NodeReport(
        node=node,
        device=name,
        gpu_free=gpu_free,
        clock=read_clock(everyone),
        send=send,
        wrong_senders=wrong_senders,
        problems=problems,
        **disk,
    )


def measure_gpu_memory(device: torch.device, problems: list[list[str]]) -> float:
    """Return the free memory of a GPU in GiB, and add a problem if another process holds much of it."""
    free, total = torch.cuda.mem_get_info(device)
    if free < FREE_SHARE * total:
        text = f"{free / GIB:.1f} of {total / GIB:.1f} GiB of {device} are free"
        problems.append(["gpu", f"{text}; end the process that holds the rest (nvidia-smi)"])
    return free / GIB


def wrong_sums(everyone: Group, device: torch.device) -> int:
    """Return how many elements of a known sum over all ranks are wrong here. Collective."""
    position = torch.arange(SUMMED, dtype=torch.int64)
    size = everyone.size
    own = (position % 8191 + everyone.index).to(device)
    expected = (size * (position % 8191) + size * (size - 1) // 2).to(device)
    return int((comm.all_reduce_sum(own, everyone) != expected).sum())


def exchange_in_pairs(everyone: Group, device: torch.device) -> tuple[list[int], float]:
    """Exchange messages with the ranks 1, 2, 4, ... places away. Collective.

    Return the ranks whose messages arrived wrong here, and the rate of the fastest exchange in GB/s.
    """
    wrong: list[int] = []
    fastest, distance = 0.0, 1
    message = probes.make_message(everyone.index, MESSAGE).to(device)
    while distance < everyone.size:
        target = (everyone.index + distance) % everyone.size
        source = (everyone.index - distance) % everyone.size
        received = torch.empty_like(message)
        seconds = exchange((message, target), (received, source), everyone)
        fastest = max(fastest, MESSAGE / seconds / 1e9)
        if not torch.equal(received.cpu(), probes.make_message(source, MESSAGE)):
            wrong.append(source)
        distance *= 2
    return wrong, fastest


def exchange(send: tuple[Tensor, int], receive: tuple[Tensor, int], everyone: Group) -> float:
    """Send (message, target) and receive (buffer, source); return the time in seconds. Collective."""
    began = time.perf_counter()
    for transfer in comm.start_transfers([send], [receive], everyone):
        transfer.wait()
    comm.synchronize(send[0].device)
    return time.perf_counter() - began


def measure_disk(args: argparse.Namespace, problems: list[list[str]]) -> dict[str, float]:
    """Time a file in --folder and look at the free space. Return the disk's fields of NodeReport.

    Adds to `problems`. Without a file that can be written there are no fields.
    """
    folder = args.folder.absolute()
    path = folder / f".preflight-{node_name()}-{os.getpid()}"
    block = hashlib.sha256(str(path).encode()).digest() * (MIB // 32)

    def add_problem(text: str) -> None:
        problems.append(["disk", f"{folder}: {text}"])

    try:
        folder.mkdir(parents=True, exist_ok=True)
        write, read, is_same = time_file(path, block, args.disk_mb)
        free = shutil.disk_usage(folder).free
    except OSError as error:
        add_problem(f"{error.strerror}; make room, or give a folder that every node can write (--folder)")
        return {}
    finally:
        with contextlib.suppress(OSError):
            path.unlink()
    if not is_same:
        add_problem("a file reads back other bytes than were written; have the storage checked")
    for what, speed in (("writes", write), ("reads", read)):
        if speed < args.min_mb_s:
            least = f"less than {args.min_mb_s:g} (--min-mb-s)"
            add_problem(f"{what} {speed:.0f} MB/s, {least}; checkpoints would hold up the run")
    if free < args.min_free_gb * GIB:
        least = f"less than {args.min_free_gb:g} (--min-free-gb)"
        add_problem(f"{free / GIB:.1f} GiB free, {least}; make room, or give another --folder")
    return {"write": write, "read": read, "disk_free": free / GIB}


def time_file(path: Path, block: bytes, blocks: int) -> tuple[float, float, bool]:
    """Write blocks of a MiB and read them back: (write MB/s, read MB/s, whether they are the same).

    Raises OSError.
    """
    began = time.perf_counter()
    with open(path, "wb") as out:
        for _ in range(blocks):
            out.write(block)
        out.flush()
        os.fsync(out.fileno())
    drop_page_cache(path)  # read from the storage, not from this node's memory
    written = time.perf_counter()
    with open(path, "rb") as file:
        is_same = all(file.read(MIB) == block for _ in range(blocks))
    megabytes = blocks * MIB / 1e6
    return megabytes / (written - began), megabytes / (time.perf_counter() - written), is_same


def check_folder(folder: Path, everyone: Group) -> list[list[str]]:
    """Return a problem, or none, if this rank sees another folder than the first rank. Collective."""
    token = None
    if everyone.index == 0:
        with contextlib.suppress(OSError):  # measure_disk reports it
            token = write_token(folder)
    token = comm.broadcast_object(token, everyone)
    problems: list[list[str]] = []
    if token is not None:
        try:
            check_token(folder, token)
        except ConfigError:
            text = f"{folder.absolute()} is not the folder that the first node sees"
            problems.append(["disk", f"{text}; mount the same storage there, or give one that all share"])
        comm.all_gather_objects(0, everyone)  # until all have looked
        if everyone.index == 0:
            remove_token(folder, token)
    return problems


def read_clock(everyone: Group) -> float:
    """Return how far this clock is ahead of that of the first rank, in seconds. Collective."""
    leads: list[float] = []
    for _ in range(CLOCK_READINGS):
        comm.all_gather_objects(0, everyone)
        now = time.time()
        leads.append(now - comm.all_gather_objects(now, everyone)[0])
    return statistics.median(leads)


# ---- problems ----------------------------------------------------------------------------------------------


def find_problems(reports: Sequence[NodeReport], max_skew: float) -> list[Problem]:
    """Return the problems of all ranks. One that several ranks of a node have is named once.

    max_skew: seconds by which a clock may differ from the median.
    """
    problems = [Problem(report.node, kind, text) for report in reports for kind, text in report.problems]

    # a sum that is wrong on every node names none
    nodes = {report.node for report in reports}
    if len(nodes) > 1 and {problem.node for problem in problems if problem.kind == "sum"} == nodes:
        text = "a sum over all ranks is wrong; leave out whom the links name, or nodes by halves"
        others = [problem for problem in problems if problem.kind != "sum"]
        problems = [Problem(ALL_NODES, "sum", text), *others]

    # what the reports show together
    problems += wrong_links(reports)
    problems += wrong_clocks(reports, max_skew)

    # ranks of a node name one problem with different numbers; the first counts
    first: dict[tuple[str, str, str], Problem] = {}
    for problem in problems:
        first.setdefault((problem.node, problem.kind, re.sub(r"[\d.,]+", "", problem.text)), problem)
    return list(first.values())


def wrong_clocks(reports: Sequence[NodeReport], max_skew: float) -> list[Problem]:
    """Return a problem for each rank whose clock is more than max_skew seconds from the median."""
    usual = statistics.median_low(report.clock for report in reports)
    problems: list[Problem] = []
    for report in reports:
        skew = report.clock - usual
        if abs(skew) > max_skew:
            side = "ahead" if skew > 0 else "behind"
            text = f"its clock is {abs(skew):.1f} s {side}; start its time service (chronyd)"
            problems.append(Problem(report.node, "clock", text))
    return problems


def wrong_links(reports: Sequence[NodeReport]) -> list[Problem]:
    """Return a problem for each node that is in the most wrong pairs of sender and receiver."""
    pairs = {frozenset({report.node, reports[sender].node})
             for report in reports for sender in report.wrong_senders}
    counts = Counter(node for pair in pairs for node in pair)
    most = max(counts.values(), default=0)
    problems: list[Problem] = []
    for node in sorted(node for node, count in counts.items() if count == most):
        others = sorted({other for pair in pairs if node in pair for other in pair - {node}}) or ["itself"]
        text = f"messages between it and {', '.join(others)} arrive wrong"
        problems.append(Problem(node, "link", f"{text}; leave it out, and have its network checked"))
    return problems


# ---- the report --------------------------------------------------------------------------------------------


def print_report(reports: Sequence[NodeReport], problems: list[Problem], as_json: bool) -> None:
    """Print a row for each node, a line for each problem, and the nodes to exclude."""
    of_node: dict[str, list[NodeReport]] = {}
    for report in reports:
        of_node.setdefault(report.node, []).append(report)
    bad = [node for node in of_node if any(problem.node == node for problem in problems)]
    if as_json:
        rows: dict[str, Any] = {node: [asdict(rank) for rank in ranks] for node, ranks in of_node.items()}
        print(json.dumps({"nodes": rows, "problems": [p._asdict() for p in problems], "exclude": bad}))
        return
    table = [node_row(ranks, [p.kind for p in problems if p.node == node]) for node, ranks in of_node.items()]
    lines = table_lines(
        table,
        to_left=("node", "device", "wrong"),
        first_to_go=FIRST_TO_GO,
        width=output_width(),
        whole_in="--json",
    )
    print("\n".join(lines))
    for problem in problems:
        print(f"problem  {problem.node}: {problem.kind}: {problem.text}")
    if bad:
        print(f"exclude: [{', '.join(bad)}]")
    if not problems:
        print(f"good     {counted(len(of_node), 'node')}, {counted(len(reports), 'rank')}")


def counted(number: int, what: str) -> str:
    return f"{number} {what}{'s' * (number != 1)}"


def node_row(ranks: list[NodeReport], wrong: list[str]) -> dict[str, str]:
    """Return a row of the table. ranks: reports of one node. wrong: kinds of its problems."""
    gpu_free = [report.gpu_free for report in ranks if report.gpu_free is not None]
    return {
        "node": ranks[0].node,
        "ranks": str(len(ranks)),
        "device": ranks[0].device,
        "GPU GiB free": f"{min(gpu_free):.1f}" if gpu_free else "-",
        "send GB/s": f"{min(report.send for report in ranks):.2f}",
        "write MB/s": whole_number([report.write for report in ranks]),
        "read MB/s": whole_number([report.read for report in ranks]),
        "disk GiB free": whole_number([report.disk_free for report in ranks]),
        "clock s": f"{ranks[0].clock:+.3f}",
        "wrong": ", ".join(dict.fromkeys(wrong)) or "-",
    }


def whole_number(values: Sequence[float | None]) -> str:
    """Return the first value that is not None, or "-"."""
    return next((f"{value:.0f}" for value in values if value is not None), "-")


if __name__ == "__main__":
    exit_process(fail_cleanly(main, sys.argv[1:]))
