"""The race of training steps: every contestant resident in a process of its own, steps handed out in rotating order."""
import json
import os
import statistics
import subprocess
import sys
from dataclasses import asdict

from scripts.bench.shape import Shape, show


class Peer:
    """A running contestant. problem: why it does not take part, or None."""

    def __init__(self, name: str, settings: dict) -> None:
        self.name, self.rounds = name, []
        self.process = subprocess.Popen([sys.executable, "-m", "scripts.bench.peer", name, json.dumps(settings)], text=True,
                                        env={"OMP_WAIT_POLICY": "PASSIVE", **os.environ},  # the same for all
                                        stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE)
        hello = self.read()
        self.problem = hello.get("error")
        self.parameters = hello.get("parameters")

    def read(self) -> dict:
        line = self.process.stdout.readline()
        if line:
            return json.loads(line)
        return {"error": (self.process.stderr.read().strip().splitlines() or ["died without a word"])[-1]}

    def steps(self, n: int) -> dict:
        """Run n steps -> {wall: [s], cpu: [s], loss, peak: MiB}; remembers what went wrong."""
        self.process.stdin.write(f"{n}\n")
        self.process.stdin.flush()
        answer = self.read()
        self.problem = answer.get("error")
        return answer


def main(args) -> int:
    shape = {"race": Shape.race, "quickstart": Shape.quickstart}[args.shape]()
    settings = {"dtype": args.dtype, "threads": args.threads, "shape": asdict(shape)}
    mine = [{"eager": "ours", "compile": "ours+compile"}[kind] for kind in args.ours.split(",") if kind]
    peers = [Peer(name, settings) for name in [*(p for p in args.peers.split(",") if p), *mine, "floor"]]
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
            p.process.kill()
            p.process.wait()
    show([row(p, racing[0], shape, args.dtype) for p in peers], args.json, step=f"{args.dtype}, {args.threads} threads, "
         f"{shape.tokens} tokens, {shape.gemm_flops() / 1e9:.0f} GFLOP of matrix products, {args.rounds} rounds of {args.steps}",
         shape=asdict(shape) if args.json else ", ".join(f"{k} {v}" for k, v in asdict(shape).items()))
    return 0


def best(rounds: list[dict], clock: str) -> list[float]:
    """Each round's fastest step."""
    return [min(r[clock]) for r in rounds]


def row(p: Peer, base: Peer, shape: Shape, dtype: str) -> dict:
    blank = dict.fromkeys(("class", "wall s", "cpu s", "tokens/s", "GFLOP/s", "wall x", "cpu x", "peak MiB", "loss", "first s"))
    if p.problem:
        return {"peer": p.name, **blank, "class": p.problem}
    wall, cpu = (statistics.median(best(p.rounds, clock)) for clock in ("wall", "cpu"))
    ratio = {clock: statistics.median(b / a for a, b in zip(best(p.rounds, clock), best(base.rounds, clock)))
             for clock in ("wall", "cpu")}
    kind = "fp32" if dtype == "fp32" else "A" if p.name.startswith("ours") else "" if p.name == "floor" else "B"
    return {"peer": p.name, "class": kind, "wall s": f"{wall:.3f}", "cpu s": f"{cpu:.3f}", "tokens/s": f"{shape.tokens / wall:.0f}",
            "GFLOP/s": f"{shape.gemm_flops() / wall / 1e9:.0f}", "wall x": f"{ratio['wall']:.2f}", "cpu x": f"{ratio['cpu']:.2f}",
            "peak MiB": p.rounds[-1]["peak"], "loss": f"{p.rounds[-1]['loss']:.3f}", "first s": f"{p.first['wall'][0]:.1f}"}
