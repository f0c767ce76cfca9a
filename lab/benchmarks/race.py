"""The race of training steps on a CPU.

Every contestant keeps its process for the whole race, and steps are run in rotating order.
"""

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
from dataclasses import asdict

from lab.benchmarks.shape import Shape, show

PEERS = "transformers,litgpt,nanogpt"
SHAPES = {"race": Shape.race, "quickstart": Shape.quickstart, "mixture": Shape.mixture}
OURS = {"eager": "ours", "compile": "ours+compile"}
COLUMNS = (
    "class",
    "wall s",
    "cpu s",
    "tokens/s",
    "GFLOP/s",
    "wall x",
    "cpu x",
    "peak MiB",
    "loss",
    "first s",
)


class Peer:
    """A running contestant with one or more ranks.

    problem: why it does not take part, or None. warm_up: the answer to the untimed steps.
    rounds: the answers to the timed steps.
    """

    def __init__(self, name: str, settings: dict, num_ranks: int, split: str, folder: str) -> None:
        self.name = name
        self.warm_up: dict = {}
        self.rounds: list[dict] = []
        self.processes = []
        for rank in range(num_ranks):
            ranks = {"rank": rank, "size": num_ranks, "split": split, "address": f"file://{folder}/{name}"}
            self.processes.append(start_rank(name, {**settings, "ranks": ranks}))

        answer = self.read()
        self.problem = answer.get("error")
        self.parameters = answer.get("parameters")

    def read(self) -> dict:
        """Read one combined answer of all ranks.

        A step takes as long as its slowest rank, and the total CPU time of all ranks.
        """
        answers = [read_answer(process) for process in self.processes]
        for answer in answers:
            if "error" in answer:
                return answer
        first = answers[0]
        if "wall" not in first:
            return first
        wall = [max(times) for times in zip(*(answer["wall"] for answer in answers))]
        cpu = [sum(times) for times in zip(*(answer["cpu"] for answer in answers))]
        return {**first, "wall": wall, "cpu": cpu}

    def steps(self, count: int) -> dict:
        """Run steps and return {wall: [s], cpu: [s], loss, peak: MiB}, or set `problem` if they fail."""
        for process in self.processes:
            assert process.stdin is not None
            process.stdin.write(f"{count}\n")
            process.stdin.flush()
        answer = self.read()
        self.problem = answer.get("error")
        return answer

    def stop(self) -> None:
        for process in self.processes:
            process.kill()
            process.wait()


def start_rank(name: str, settings: dict) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, "-m", "lab.benchmarks.peer", name, json.dumps(settings)],
        text=True,
        env={"OMP_WAIT_POLICY": "PASSIVE", **os.environ},  # the same for all
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
    )


def read_answer(process: subprocess.Popen[str]) -> dict:
    """Read the next answer of a rank, or {"error": its last line of stderr} if it has died."""
    assert process.stdout is not None
    assert process.stderr is not None
    line = process.stdout.readline()
    if line:
        return json.loads(line)
    errors = process.stderr.read().strip().splitlines()
    return {"error": errors[-1] if errors else "exited without output"}


def main(args: argparse.Namespace) -> int:
    """Race the contestants, print the table and return the exit code."""
    shape = SHAPES[args.shape]()
    settings = {"dtype": args.dtype, "threads": args.threads, "shape": asdict(shape)}
    peer_names = [name for name in (PEERS if args.peers is None else args.peers).split(",") if name]
    our_names = [OURS[kind] for kind in args.ours.split(",") if kind]

    with tempfile.TemporaryDirectory(prefix="bevatron-race-") as folder:
        names = [*peer_names, *our_names, "floor"]
        peers = [Peer(name, settings, args.ranks, args.split, folder) for name in names]
        try:
            racing = race(peers, args)
        finally:
            for peer in peers:
                peer.stop()
    if racing is None:
        return 1

    tokens = shape.tokens * (args.ranks if args.split == "dp" else 1)
    flops = shape.gemm_flops() * tokens / shape.tokens
    on_ranks = f"{args.ranks} ranks over gloo ({args.split} {args.ranks}), " if args.ranks > 1 else ""
    title = (
        f"{on_ranks}{args.dtype}, threads {args.threads}, {tokens} tokens, "
        f"{flops / 1e9:.0f} GFLOP of matrix products, {args.rounds} rounds of {args.steps}"
    )
    rows = [
        table_row(peer, baseline=racing[0], dtype=args.dtype, tokens=tokens, flops=flops) for peer in peers
    ]
    sizes = asdict(shape)
    sizes_text = ", ".join(f"{key} {value}" for key, value in sizes.items())
    show(rows, args.json, step=title, shape=sizes if args.json else sizes_text)
    return 0


def race(peers: list[Peer], args: argparse.Namespace) -> list[Peer] | None:
    """Run the warm-up and all rounds. Returns the peers that took part, None if one of them failed."""
    for peer in peers:
        if not peer.problem:
            peer.warm_up = peer.steps(args.warm)
    racing = [peer for peer in peers if not peer.problem]

    for round_number in range(args.rounds):
        first = round_number % len(racing)
        for peer in racing[first:] + racing[:first]:
            peer.rounds.append(peer.steps(args.steps))
            if peer.problem:
                print(f"error: {peer.name}: {peer.problem}", file=sys.stderr)
                return None
    return racing


def fastest_steps(rounds: list[dict], clock: str) -> list[float]:
    """Return the seconds of each round's fastest step. `clock` is "wall" or "cpu"."""
    return [min(answer[clock]) for answer in rounds]


def precision_class(name: str, dtype: str) -> str:
    """Return a contestant's class, as explained in lab/benchmarks/command.py."""
    if dtype == "fp32":
        return "fp32"
    if name == "floor":
        return ""
    return "A" if name.startswith("ours") else "B"


def table_row(peer: Peer, *, baseline: Peer, dtype: str, tokens: int, flops: float) -> dict:
    """Return a row of the table. `tokens` and `flops` are those of one step."""
    if peer.problem:
        return {"peer": peer.name, **dict.fromkeys(COLUMNS), "class": peer.problem}

    seconds = {}
    ratio = {}
    for clock in ("wall", "cpu"):
        own = fastest_steps(peer.rounds, clock)
        base = fastest_steps(baseline.rounds, clock)
        seconds[clock] = statistics.median(own)
        ratio[clock] = statistics.median(b / a for a, b in zip(own, base))
    last = peer.rounds[-1]
    return {
        "peer": peer.name,
        "class": precision_class(peer.name, dtype),
        "wall s": f"{seconds['wall']:.3f}",
        "cpu s": f"{seconds['cpu']:.3f}",
        "tokens/s": f"{tokens / seconds['wall']:.0f}",
        "GFLOP/s": f"{flops / seconds['wall'] / 1e9:.0f}",
        "wall x": f"{ratio['wall']:.2f}",
        "cpu x": f"{ratio['cpu']:.2f}",
        "peak MiB": last["peak"],
        "loss": f"{last['loss']:.3f}",
        "first s": f"{peer.warm_up['wall'][0]:.1f}",
    }
