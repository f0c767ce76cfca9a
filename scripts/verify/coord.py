"""The coordinate check of muP (arXiv 2203.03466, appendix D.1): does training move every activation as far at every width?

A recipe's model is trained for a few steps at widths that double, once in the standard parametrization and once with
model.mup_base at the smallest width. Everything that may grow grows with the width (heads, not head_dim); depth, vocabulary,
batch and rate stay. What is measured is the mean |coordinate| of each kind of activation on one batch, and that of its change
since the start. What is judged are the exponents of their growth with the width, fitted in logarithms: under muP no change
may grow or vanish and no size may grow; and without it the logits must be seen to grow, or the check could see nothing.
"""
import json
import os
from dataclasses import asdict, dataclass, replace
from math import isfinite, log2
from pathlib import Path

import torch
from torch import Tensor

import config
import rules
from build import build
from config import Config, ConfigError, kv_heads
from data.batch import Batch
from kernels.linear import linear
from parallel.mesh import Mesh
from runtime.guard import Guard
from train import train_step

WIDTHS, HEAD_DIM, LAYERS, VOCAB = (64, 128, 256, 512, 1024), 16, 2, 32
MIXTURE = WIDTHS[:4]  # of a mixture, whose experts all learn
STEPS, BATCH, SEQ, RATE = 5, 8, 32, 2e-3
BOUND = 0.25  # of muP's exponents: changes within +-BOUND, sizes below BOUND
FADES = {"router": -0.5}  # changes that may fall so fast: its first weights see less of every update, as width^-1/2, and few experts even little out
GROWS = 0.5  # the exponent of the logits' change without muP is above this
COLOURS = ("#7a7a7a", "#2f6db3", "#d9742b", "#2e9384", "#c2497a", "#8a6bb8")


def widened(cfg: Config, width: int, mup: bool, base: int) -> Config:
    """The recipe at this width: fp32, one process, tiny in every direction that is not the width."""
    m = cfg.model
    heads, times = width // HEAD_DIM, width / m.hidden
    group = min(m.heads // kv_heads(m), base // HEAD_DIM)
    grown = {key: None if getattr(m, key) is None else max(1, round(getattr(m, key) * times)) for key in ("ffn", "moe_ffn", "kv_rank", "q_rank")}
    small = {"layers": max(LAYERS, m.first_dense + m.moe_every) if m.experts else LAYERS, "hidden": width, "heads": heads,
             "vocab": VOCAB, "vocab_multiple": 32, "context": SEQ,
             "kv_heads": None if m.kv_heads is None else heads // group, "head_dim": None if m.kv_rank else HEAD_DIM,
             "nope_dim": HEAD_DIM // 2, "rope_dim": HEAD_DIM // 2, "v_dim": HEAD_DIM, "dropout": 0.0, "mtp": 0, "jitter": 0.0,
             "capacity": None, "pad": False, "rope_original": SEQ, "mup_base": base if mup else None, "mup_head_dim": None}
    return replace(cfg, model=replace(m, **grown, **small), parallel=config.Parallel(), data=config.Data(),
                   train=replace(cfg.train, steps=STEPS, tokens=None, flops=None, dtype="fp32", seq_len=SEQ, micro_batch=BATCH,
                                 global_batch=BATCH, device="cpu"),
                   optim=replace(cfg.optim, lr=RATE, min_lr=None, warmup=0, decay="constant"))


def batch(seed: int, step: int) -> Batch:
    """Tokens that can be learned: each follows from the one before, but for a coin."""
    stream = torch.Generator().manual_seed(1000 * seed + step)
    ids = torch.randint(VOCAB, (BATCH, SEQ + 1), generator=stream)
    coins = torch.randint(2, ids.shape, generator=stream)
    for i in range(SEQ):
        ids[:, i + 1] = (5 * ids[:, i] + 7 + coins[:, i]) % VOCAB
    positions = torch.arange(SEQ).expand(BATCH, SEQ)
    return Batch(ids[:, :-1], ids[:, 1:].contiguous(), positions, None, torch.arange(BATCH), step)


@torch.no_grad()
def activations(stage, probe: Batch) -> dict[str, Tensor]:
    """{kind: every value of it on the probe}; attention and MLP of all blocks."""
    seen: dict[str, list[Tensor]] = {}

    def keep(kind: str):
        def hook(module, args, out) -> None:
            value = linear(args[0], module.weight) if kind == "router" else out[0] if isinstance(out, tuple) else out
            seen.setdefault(kind, []).append(value.flatten())
        return hook
    places = [(stage.embed, "embedding")]
    for block in stage.blocks:
        places += [(block.attn, "attention"), (block.mlp, "mlp"), (block, "residual")] + ([(block.mlp.router, "router")] if block.moe else [])
    hooks = [module.register_forward_hook(keep(kind)) for module, kind in places]
    logits = stage.logits(probe.tokens, probe.positions)
    for hook in hooks:
        hook.remove()
    return {kind: torch.cat(values) for kind, values in seen.items()} | {"logits": logits.flatten()}


def measure(cfg: Config) -> dict[str, tuple[float, float]]:
    """{kind: (mean |coordinate|, mean |its change|)} after STEPS steps."""
    run = build(cfg, Mesh.single(), torch.device("cpu"), None, STEPS)
    probe, guard = batch(cfg.train.seed, 0), Guard()
    first = activations(run.stages[0], probe)
    for step in range(1, STEPS + 1):
        train_step(run, step, [batch(cfg.train.seed, step)], guard, lambda *where: None)
    last = activations(run.stages[0], probe)
    return {kind: (float(last[kind].abs().mean()), float((last[kind] - first[kind]).abs().mean())) for kind in last}


def exponent(widths: tuple[int, ...], values: list[float]) -> float:
    """a of the line log v = a log width + b that lies nearest; NaN where a value is none to take the logarithm of."""
    if not all(isfinite(v) and v > 0 for v in values):
        return float("nan")
    x, y = [log2(w) for w in widths], [log2(v) for v in values]
    mx, my = sum(x) / len(x), sum(y) / len(y)
    return sum((a - mx) * (b - my) for a, b in zip(x, y)) / sum((a - mx) ** 2 for a in x)


@dataclass(frozen=True)
class Row:
    """A kind of activation, by width: what: "size" or "change"."""
    kind: str
    what: str
    values: list[float]
    exponent: float

    @property
    def wrong(self) -> str | None:
        """What muP does not allow. A NaN is never allowed."""
        low = FADES.get(self.kind, -BOUND) if self.what == "change" else float("-inf")
        return None if low <= self.exponent <= BOUND else f"{self.what} of {self.kind} goes as width^{self.exponent:+.2f}"


def rows(cfg: Config, widths: tuple[int, ...], mup: bool) -> list[Row]:
    """The recipe measured at every width. Raises ConfigError where it cannot be trained so."""
    cells = [widened(cfg, width, mup, widths[0]) for width in widths]
    for cell in cells:
        rules.validate(cell)
    seen = [measure(cell) for cell in cells]
    return [Row(kind, what, values := [s[kind][i] for s in seen], exponent(widths, values))
            for i, what in enumerate(("size", "change")) for kind in seen[0]]


def verdict(standard: list[Row], mup: list[Row]) -> list[str]:
    """What is wrong; nothing: muP holds."""
    grows = next(r.exponent for r in standard if (r.kind, r.what) == ("logits", "change"))
    blind = [] if grows >= GROWS else [
        f"without muP the change of logits goes as width^{grows:+.2f}, not faster than {GROWS}: this check sees nothing"]
    return [f"muP: {r.wrong}, beyond {BOUND}" for r in mup if r.wrong] + blind


def table(title: str, widths: tuple[int, ...], found: list[Row]) -> list[str]:
    lines = [f"{title:<22}" + "".join(f"{w:>9}" for w in widths) + "   exponent"]
    return lines + [f"  {r.what:<7} {r.kind:<12}" + "".join(f"{v:>9.4f}" for v in r.values) + f"      {r.exponent:+.2f}" for r in found]


def check(name: str, as_json: bool = False, out: Path | None = None) -> int:
    """The command: prints, draws; 0 where muP holds, 1 where not. Raises ConfigError."""
    cfg = config.resolve(name, None, [])
    if out is not None and out.suffix != ".png":
        raise ConfigError(f"--out: {out} must end in .png")
    widths = MIXTURE if cfg.model.experts else WIDTHS
    both = {title: rows(cfg, widths, mup) for title, mup in (("standard", False), ("muP", True))}
    wrong = verdict(both["standard"], both["muP"])
    if as_json:
        print(json.dumps({"name": name, "widths": widths, "steps": STEPS, "rate": RATE, "bound": BOUND, "ok": not wrong, "wrong": wrong,
                          **{title: [asdict(r) for r in found] for title, found in both.items()}}))
    else:
        print(f"{name}: {STEPS} steps of {cfg.optim.name}, rate {RATE:g}, fp32, head_dim {HEAD_DIM}; "
              f"mean |coordinate| and its mean |change| after step {STEPS}")
        for title, found in both.items():
            print("\n".join(["", *table(f"{title} (mup_base {widths[0]})" if title == "muP" else title, widths, found)]))
        print("\n" + ("\n".join(wrong) or f"muP holds: no exponent beyond {BOUND}"))
    if out is not None:
        try:
            out.parent.mkdir(parents=True, exist_ok=True)
            draw(out, name, widths, both)
        except OSError as e:
            raise ConfigError(f"--out: {out}: {e.strerror}") from None
    return 1 if wrong else 0


def draw(out: Path, name: str, widths: tuple[int, ...], both: dict[str, list[Row]]) -> None:
    """The changes by width, one panel each. Raises OSError."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg  # no pyplot: it has global state and asks for displays
    from matplotlib.figure import Figure

    figure = Figure(figsize=(9, 4.2), dpi=130, facecolor="white", layout="constrained")
    FigureCanvasAgg(figure)
    for axes, (title, found) in zip(figure.subplots(1, 2, sharey=True), both.items()):
        for row, colour in zip((r for r in found if r.what == "change"), COLOURS):
            axes.plot(widths, row.values, "o-", color=colour, lw=1.6, ms=4, label=f"{row.kind}  {row.exponent:+.2f}")
        axes.set_xscale("log", base=2)
        axes.set_yscale("log")
        axes.set_xticks(widths, [str(w) for w in widths])
        axes.set_xlabel("width")
        axes.set_title(title, loc="left", fontsize=11, color="#333333")
        axes.legend(frameon=False, fontsize=8, title="exponent", title_fontsize=8)
        axes.spines[["top", "right"]].set_visible(False)
        axes.grid(color="#e6e6e6", lw=0.6)
        axes.set_axisbelow(True)
    figure.axes[0].set_ylabel(f"mean |change| after step {STEPS}")
    figure.suptitle(f"{name}: how far training moves each activation", x=0.01, ha="left", fontsize=11, color="#333333")
    temp = out.with_name(f".{out.name}.{os.getpid()}.tmp")
    figure.savefig(temp, format="png")
    os.replace(temp, out)
