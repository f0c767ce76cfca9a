"""The race of training steps: every contestant resident in a process of its own, steps handed out in rotating order."""
import json
import os
import statistics
import subprocess
import sys
import tempfile
from dataclasses import asdict

from scripts.bench.shape import Shape, show

PEERS = "transformers,litgpt,nanogpt"


class Peer:
    """A running contestant of one or more ranks. problem: why it does not take part, or None."""

    def __init__(self, name: str, settings: dict, ranks: int, split: str, folder: str) -> None:
        self.name, self.rounds = name, []
        meet = f"file://{folder}/{name}"
        self.ranks = [subprocess.Popen([sys.executable, "-m", "scripts.bench.peer", name, json.dumps({**settings, "job": job})], text=True,
                                       env={"OMP_WAIT_POLICY": "PASSIVE", **os.environ},  # the same for all
                                       stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE)
                      for job in ({"rank": r, "ranks": ranks, "split": split, "meet": meet} for r in range(ranks))]
        hello = self.read()
        self.problem = hello.get("error")
        self.parameters = hello.get("parameters")

    def read(self) -> dict:
        """One answer for all ranks: a step takes as long as its slowest rank, and what all of them compute."""
        every = []
        for process in self.ranks:
            line = process.stdout.readline()
            every.append(json.loads(line) if line else {"error": (process.stderr.read().strip().splitlines() or ["died without a word"])[-1]})
        wrong = next((answer for answer in every if "error" in answer), None)
        if wrong or "wall" not in every[0]:
            return wrong or every[0]
        return {**every[0], "wall": [max(t) for t in zip(*(e["wall"] for e in every))], "cpu": [sum(t) for t in zip(*(e["cpu"] for e in every))]}

    def steps(self, n: int) -> dict:
        """Run n steps -> {wall: [s], cpu: [s], loss, peak: MiB}; remembers what went wrong."""
        for process in self.ranks:
            process.stdin.write(f"{n}\n")
            process.stdin.flush()
        answer = self.read()
        self.problem = answer.get("error")
        return answer

    def stop(self) -> None:
        for process in self.ranks:
            process.kill()
            process.wait()


def main(args) -> int:
    shape = {"race": Shape.race, "quickstart": Shape.quickstart, "mixture": Shape.mixture}[args.shape]()
    settings = {"dtype": args.dtype, "threads": args.threads, "shape": asdict(shape)}
    theirs = [name for name in (PEERS if args.peers is None else args.peers).split(",") if name]
    mine = [{"eager": "ours", "compile": "ours+compile"}[kind] for kind in args.ours.split(",") if kind]
    folder = tempfile.TemporaryDirectory(prefix="bevatron-race-")
    peers = [Peer(name, settings, args.ranks, args.split, folder.name) for name in [*theirs, *mine, "floor"]]
    try:
        for p in peers:
            if not p.problem:
                p.first = p.steps(args.warm)
        racing = [p for p in peers if not p.problem]
        for r in range(args.rounds):
            for p in racing[r % len(racing):] + racing[:r % len(racing)]:
                p.rounds.append(p.steps(args.steps))
                if p.problem:
                    print(f"error: {p.name}: {p.problem}", file=sys.stderr)
                    return 1
    finally:
        for p in peers:
            p.stop()
        folder.cleanup()
    tokens = shape.tokens * (args.ranks if args.split == "dp" else 1)
    where = f"{args.ranks} ranks over gloo ({args.split} {args.ranks}), " if args.ranks > 1 else ""
    show([row(p, racing[0], shape, args.dtype, tokens) for p in peers], args.json, step=f"{where}{args.dtype}, threads {args.threads}, "
         f"{tokens} tokens, {shape.gemm_flops() * tokens / shape.tokens / 1e9:.0f} GFLOP of matrix products, {args.rounds} rounds of {args.steps}",
         shape=asdict(shape) if args.json else ", ".join(f"{k} {v}" for k, v in asdict(shape).items()))
    return 0


def best(rounds: list[dict], clock: str) -> list[float]:
    """Each round's fastest step."""
    return [min(r[clock]) for r in rounds]


def row(p: Peer, base: Peer, shape: Shape, dtype: str, tokens: int) -> dict:
    blank = dict.fromkeys(("class", "wall s", "cpu s", "tokens/s", "GFLOP/s", "wall x", "cpu x", "peak MiB", "loss", "first s"))
    if p.problem:
        return {"peer": p.name, **blank, "class": p.problem}
    wall, cpu = (statistics.median(best(p.rounds, clock)) for clock in ("wall", "cpu"))
    ratio = {clock: statistics.median(b / a for a, b in zip(best(p.rounds, clock), best(base.rounds, clock)))
             for clock in ("wall", "cpu")}
    kind = "fp32" if dtype == "fp32" else "A" if p.name.startswith("ours") else "" if p.name == "floor" else "B"
    return {"peer": p.name, "class": kind, "wall s": f"{wall:.3f}", "cpu s": f"{cpu:.3f}", "tokens/s": f"{tokens / wall:.0f}",
            "GFLOP/s": f"{shape.gemm_flops() * tokens / shape.tokens / wall / 1e9:.0f}", "wall x": f"{ratio['wall']:.2f}",
            "cpu x": f"{ratio['cpu']:.2f}", "peak MiB": p.rounds[-1]["peak"], "loss": f"{p.rounds[-1]['loss']:.3f}",
            "first s": f"{p.first['wall'][0]:.1f}"}
