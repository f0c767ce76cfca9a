"""The fastest layouts of a job: python -m scripts.plan NAME --gpus 1024 --cluster h100-ib [--top 10] [--section.key VALUE ...]

Searches tp, cp, pp, ep, ZeRO, replicas, schedules, stages a rank, micro-batch and recompute for the layouts whose step is shortest among
those that fit into memory. What you set on the command line (--parallel.tp 8) stays so. Bytes are those that our code exchanges
and holds (plan/bytes.py, plan/memory.py: exact, and to some percent); times are a model of the chip and its links (plan/cost.py), fitted to
published measurements: --published shows it beside them, those that it was fitted to and those that it was not.
"""
import argparse
import json
import sys
import time

import config
from build import plan_pipeline
from config import Config, ConfigError
from model.split import layers_of
from parallel.schedule import Schedule
from plan import published
from plan.cost import Efficiency, cluster
from plan.count import flops_per_token, parameters
from plan.search import Found, axes, search
from runtime.failure import fail_cleanly


def make(cfg: Config, world: int) -> tuple[Schedule, list[tuple[int, int]]]:
    """A job's schedule and cuts, as train.py makes them; raises ConfigError where it would."""
    schedule = plan_pipeline(cfg, world, advise=False)
    return schedule, layers_of(cfg, schedule.n_stages)


def words(cfg: Config, world: int) -> str:
    """tp8 sp pp16 dp8 zero1 interleaved vpp4 mb1 selective"""
    p = cfg.parallel
    dp = world // (p.tp * p.pp * p.cp * p.dp_rep)
    degrees = [f"{k}{n}" for k, n in (("tp", p.tp), ("cp", p.cp), ("pp", p.pp), ("ep", p.ep), ("rep", p.dp_rep), ("dp", dp)) if n > 1]
    return " ".join(degrees + [f"zero{p.zero}"] + ([p.schedule] if p.pp > 1 else []) + [f"vpp{p.vpp}"] * bool(p.vpp)
                    + [f"mb{cfg.train.micro_batch}"] + [p.recompute] * (p.recompute != "none"))


def keys(cfg: Config) -> str:
    """train.py's arguments."""
    p = cfg.parallel
    given = {"tp": p.tp, "sp": str(p.sp).lower(), "cp": p.cp, "pp": p.pp, "ep": p.ep, "dp_rep": p.dp_rep, "zero": p.zero,
             "schedule": p.schedule, "vpp": p.vpp, "recompute": p.recompute}
    usual = config.Parallel()
    words = [f"--parallel.{k} {v}" for k, v in given.items() if v is not None and str(v) != str(getattr(usual, k)).lower()]
    return " ".join([*words, f"--train.micro_batch {cfg.train.micro_batch}"])


def report(x: Found, world: int, peak: float) -> dict:
    """Of one layout, as plain numbers: seconds, bytes, shares."""
    f, t, m = x.forecast, x.cfg.train, x.cfg.model
    tokens = t.global_batch * t.seq_len
    return {"layout": words(x.cfg, world), "step_s": f.step, "tokens_per_s_per_gpu": tokens / f.step / world,
            "mfu": tokens * flops_per_token(m, t.seq_len) / (f.step * world * peak), "memory": x.memory, "state": x.state,
            "activations": x.activations, "sent_inside": f.sent[0], "sent_between": f.sent[1], "microbatches": x.microbatches,
            "compute": f.compute / f.step, "bubble": f.bubble / f.step, "optimizer": f.optimizer / f.step,
            "exposed": {g: s / f.step for g, s in f.exposed.items()}, "arguments": keys(x.cfg)}


def row(r: dict) -> list[str]:
    shown = ", ".join(f"{g} {s:.0%}" for g, s in sorted(r["exposed"].items(), key=lambda i: -i[1]) if s >= 0.005)
    return [r["layout"], f"{r['step_s']:.3f}", f"{r['tokens_per_s_per_gpu']:,.0f}", f"{r['mfu']:.1%}", f"{r['memory'] / 1e9:.0f}",
            f"{r['bubble']:.0%}", f"{r['sent_inside'] / 1e9:.1f}", f"{r['sent_between'] / 1e9:.1f}", shown or "-"]


def main(argv: list[str]) -> int:
    p = argparse.ArgumentParser(prog="python -m scripts.plan", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    p.add_argument("name", nargs="?", help="recipe")
    p.add_argument("--gpus", type=int)
    p.add_argument("--cluster", help="of configs/clusters.yaml")
    p.add_argument("--top", type=int, default=10)
    p.add_argument("--json", action="store_true", help="one JSON object a layout, the fastest first")
    p.add_argument("--published", action="store_true", help="instead: forecasts beside published measurements")
    p.add_argument("--fit", action="store_true", help="of --published: with constants that are fitted now")
    a, rest = p.parse_known_args(argv)
    if a.published:
        every = published.rows(make)
        e = published.fit(every, Efficiency()) if a.fit else Efficiency()
        print("\n".join([str(e), *published.table(every, e)]))
        return 0
    if not a.name or a.gpus is None or not a.cluster:
        raise ConfigError("plan: needs NAME, --gpus N and --cluster C, as llama3-8b --gpus 64 --cluster h100-ib")
    if a.gpus < 1 or a.top < 1:
        raise ConfigError(f"--{'gpus' if a.gpus < 1 else 'top'}: must be at least 1")
    cfg, c = config.resolve(a.name, None, rest), cluster(a.cluster)
    if cfg.model.vocab is None:
        raise ConfigError("model.vocab: is the tokenizer's, which a plan does not see; set it")
    if cfg.train.dtype not in c.flops:
        raise ConfigError(f"train.dtype: configs/clusters.yaml has no {cfg.train.dtype} for {a.cluster}; it has {', '.join(c.flops)}")
    given = {f"{section}.{key}" for section, part in config.dotted(rest).items() for key in part}
    core, more = axes(cfg, a.gpus, c)
    fixed = {path: getattr(getattr(cfg, path.split(".")[0]), path.split(".")[1]) for path in given if path in (*core, *more, "parallel.sp")}
    begun = time.perf_counter()
    found, counts = search(cfg, a.gpus, c, Efficiency(), make, fixed, a.top)
    if not found:
        raise ConfigError(f"--gpus: no layout of {a.name} on {a.gpus} GPUs of {c.memory / 1e9:.0f} GB fits ({counts['too large']} are too large, "
                          f"{counts['refused']} against the rules); take more, or set fewer keys")
    reports = [report(x, a.gpus, c.flops["bf16" if cfg.train.dtype == "fp8" else cfg.train.dtype]) for x in found]
    if a.json:
        print("\n".join(map(json.dumps, reports)))
        return 0
    n, t = parameters(cfg.model), cfg.train
    print(f"{a.name}: {n['total'] / 1e9:.1f}B parameters ({n['active'] / 1e9:.1f}B a token) · {t.global_batch:,} x {t.seq_len:,} = "
          f"{t.global_batch * t.seq_len / 1e6:.1f}M tokens a step · {t.dtype} · {a.gpus:,} GPUs of {a.cluster}")
    print(f"{counts['priced']:,} layouts priced, {counts['too large']:,} too large ({time.perf_counter() - begun:.0f} s)\n")
    rows = [["layout", "step s", "tokens/s/GPU", "MFU", "GB", "bubble", "GB inside", "GB between", "exposed"], *(row(r) for r in reports)]
    widths = [max(map(len, column)) for column in zip(*rows)]
    print("\n".join("  ".join(x.ljust(w) if i in (0, 8) else x.rjust(w) for i, (x, w) in enumerate(zip(r, widths))).rstrip() for r in rows))
    print(f"\nbest     train.py {a.name} {' '.join(rest)}{' ' if rest else ''}{reports[0]['arguments']}")
    return 0


if __name__ == "__main__":
    sys.exit(fail_cleanly(main, sys.argv[1:]))
