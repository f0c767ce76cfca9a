"""muP coordinate check (arXiv 2203.03466, appendix D.1): do activations change equally at every width?

A recipe's model is trained for a few steps at doubling widths, once in the standard parametrization and once
with model.mup.base set to the smallest width. Everything that may scales with the width (number of heads and
what several heads share, MLPs, the ranks of latent attention); the size of a head and of its state, depth,
vocabulary, batch and learning rate are fixed. This applies to the mixers of all kinds of blocks. The model
keeps the first layers of the recipe, as many as it takes to have every kind of block (model.pattern), or one
layer of each kind if that is more than MAX_LAYERS.

On one batch the check measures the mean |coordinate| of each kind of activation and the mean |change| of its
coordinates since the start, and fits the exponents of their growth with the width in log space. Under muP no
change may grow or vanish, and no size may grow. Without muP the change of the logits must grow; otherwise the
check would be unable to detect anything.
"""
import json
from collections.abc import Callable
from dataclasses import asdict, dataclass, replace
from math import isfinite, log2
from pathlib import Path

import torch
from torch import Tensor, nn

import config
from build import build_run
from config import ChannelMixer, Config, ConfigError, MupConfig, NoPart, TokenMixer, layer_kinds
from config.pattern import BlockVariant, pattern_text
from config.plots import INK, new_figure, save_figure, set_open_frame, set_title
from config.reading import resolve
from config.reading.suggestions import check_rules
from config.tree import with_values
from kernels.linear import linear
from lab.proof.verify.overrides import Overrides, check_reached
from model.attention import Attention
from model.block import TransformerBlock
from model.delta import KimiDeltaAttention
from model.mla import MultiLatentAttention
from model.moe import MoE
from model.norm import add_residual
from model.recurrence import SplitProjection
from model.rope import with_fitting_longrope, with_original_context
from model.router import ExpertsConfig, Router, mixture, with_mlps
from model.transformer import PipelineStage
from parallel.microbatch import Microbatch
from parallel.topology.mesh import Mesh
from train import train_step

Hook = Callable[[nn.Module, tuple[Tensor, ...], Tensor | tuple[Tensor, ...]], None]

WIDTHS = (64, 128, 256, 512, 1024)
MIXTURE_WIDTHS = WIDTHS[:4]  # for MoE models, all of whose experts are trained
HEAD_DIM = 16
FIXED = {  # mixer sizes that do not depend on the width
    "head_dim": HEAD_DIM,
    "nope_dim": HEAD_DIM // 2,
    "rope_dim": HEAD_DIM // 2,
    "key_dim": HEAD_DIM,
    "v_dim": HEAD_DIM,
    "dim": HEAD_DIM,
    "state": HEAD_DIM,
}
RANKS = ("kv_rank", "q_rank")  # mixer sizes that scale with the width, in addition to the heads
LAYERS = 2  # at least
MAX_LAYERS = 8  # if more are needed, one of each kind of block
VOCAB = 32
STEPS = 8  # enough that the initial head weights, which see less of each update, matter little
BATCH = 8
SEQ_LEN = 32
LEARNING_RATE = 2e-3

BOUND = 0.25  # for the exponents under muP: changes within +-BOUND, sizes below BOUND
# The change of router logits may fall as fast as width^-0.5: the initial weights see less of each update, in
# proportion to width^-0.5, and few experts average little of that out. The same holds for the low-rank
# features of Kimi delta attention and for the gates that are linear in them.
LOWER_BOUNDS = {"router": -0.5, "low_rank": -0.5, "gates": -0.5}
STANDARD_GROWTH = 0.5  # minimum exponent of the logits' change without muP

COLOURS = (
    "#7a7a7a", "#2f6db3", "#d9742b", "#2e9384", "#c2497a", "#8a6bb8",
    "#a3862a", "#6f4e37", "#5fa8d3", "#9bbf5a", "#1f1f1f",
)


# ---- model and data ----------------------------------------------------------------------------------------

def widened(cfg: Config, width: int, mup: bool, base: int) -> Config:
    """Return the recipe at this width in fp32, for one process, and tiny in all other dimensions.

    base: the smallest width, used as model.mup.base if `mup`.
    """
    model = cfg.model

    def grown(size: int) -> int:
        return max(1, round(size * (width / model.hidden)))

    def widened_mixer(mixer: TokenMixer) -> TokenMixer:
        sizes = {name: size for name, size in FIXED.items() if hasattr(mixer, name)}
        sizes |= {name: grown(getattr(mixer, name)) for name in RANKS if getattr(mixer, name, None)}
        counts = mixer.heads_over_tp()
        for name, number in counts.items():
            heads_a_group = min(counts["heads"] // number, base // HEAD_DIM)
            sizes[name] = width // HEAD_DIM // heads_a_group
        return replace(with_original_context(mixer, SEQ_LEN), **sizes)

    def widened_mlp(mlp: ChannelMixer) -> ChannelMixer:
        if isinstance(mlp, NoPart):
            return mlp
        mlp = replace(mlp, width=grown(mlp.width))
        if not isinstance(mlp, ExpertsConfig):
            return mlp
        return replace(mlp, router=replace(mlp.router, jitter=0.0), capacity=None)

    def widened_variant(variant: BlockVariant) -> BlockVariant:
        mixer = with_values(model, dict(variant.changes)).mixer
        others = [change for change in variant.changes if change[0].partition(".")[0] != "mixer"]
        return replace(variant, changes=(*others, ("mixer", widened_mixer(mixer))))

    kinds = layer_kinds(model)  # of each layer
    kinds = kinds[:max(LAYERS, *(kinds.index(kind) + 1 for kind in kinds))]
    if len(kinds) > MAX_LAYERS:
        kinds = tuple(dict.fromkeys(kinds))
    blocks = tuple(widened_variant(variant) for variant in model.blocks)
    widened_model = with_fitting_longrope(replace(
        with_mlps(replace(model, blocks=blocks), widened_mlp),
        hidden=width,
        mixer=widened_mixer(model.mixer),
        layers=len(kinds),
        pattern=pattern_text(kinds),
        vocab=VOCAB,
        vocab_multiple=32,
        context=SEQ_LEN,
        dropout=0.0,
        mtp=None,
        mup=MupConfig(base=base) if mup else None,
    ))
    train = replace(
        cfg.train,
        steps=STEPS,
        tokens=None,
        flops=None,
        dtype="fp32",
        seq_len=SEQ_LEN,
        micro_batch=BATCH,
        global_batch=BATCH,
        device="cpu",
    )
    return replace(
        cfg,
        model=widened_model,
        parallel=config.ParallelConfig(),
        data=config.DataConfig(),
        train=train,
        optim=replace(cfg.optim, lr=LEARNING_RATE, min_lr=None, warmup=0, decay="constant"),
    )


def batch(seed: int, step: int) -> Microbatch:
    """Return a batch of learnable tokens: each is a function of the previous one and a coin flip."""
    stream = torch.Generator().manual_seed(1000 * seed + step)
    ids = torch.randint(VOCAB, (BATCH, SEQ_LEN + 1), generator=stream)  # [b, s + 1]
    coins = torch.randint(2, ids.shape, generator=stream)
    for i in range(SEQ_LEN):
        ids[:, i + 1] = (5 * ids[:, i] + 7 + coins[:, i]) % VOCAB
    return Microbatch(
        tokens=ids[:, :-1],
        targets=ids[:, 1:].contiguous(),
        positions=torch.arange(SEQ_LEN).expand(BATCH, SEQ_LEN),
        sequence_ids=torch.arange(BATCH),
        step=step,
    )


# ---- measurement -------------------------------------------------------------------------------------------

@torch.no_grad()
def activations(stage: PipelineStage, probe: Microbatch) -> dict[str, Tensor]:
    """Return {kind of activation: its flat values on the probe, over all blocks}."""
    seen: dict[str, list[Tensor]] = {}

    def keep(kind: str) -> Hook:
        def hook(module: nn.Module, args: tuple[Tensor, ...], out: Tensor | tuple[Tensor, ...]) -> None:
            for name, value in values_at(module, kind, args[0], out).items():
                seen.setdefault(name, []).append(value.flatten())

        return hook

    assert stage.embedding is not None  # the stage is a whole model
    modules: list[tuple[nn.Module, str]] = [(stage.embedding, "embedding")]
    for block in stage.blocks:
        assert isinstance(block, TransformerBlock)
        modules.append((block, "residual"))
        if block.mixer is not None:
            has_softmax = isinstance(block.mixer, (Attention, MultiLatentAttention))
            modules.append((block.mixer, "attention" if has_softmax else "state"))
            modules += [(part, "") for part in block.mixer.modules() if isinstance(part, SplitProjection)]
        if block.mlp is not None:
            modules.append((block.mlp, "mlp"))
        if isinstance(block.mlp, MoE):
            modules.append((block.mlp.router, "router"))

    hooks = [module.register_forward_hook(keep(kind)) for module, kind in modules]
    logits = stage.logits(probe.tokens, probe.positions)
    for hook in hooks:
        hook.remove()
    found = {kind: torch.cat(values) for kind, values in seen.items()}
    return found | {"logits": logits.flatten()}


def values_at(
    module: nn.Module, kind: str, x: Tensor, out: Tensor | tuple[Tensor, ...]
) -> dict[str, Tensor]:
    """Return {kind of activation: its values} at a module with input x.

    The projections of stateful mixers are measured separately, since the norms and gates after them hide
    their size.
    """
    if isinstance(module, Router):
        return {kind: linear(x, module.weight)}
    if isinstance(module, TransformerBlock):
        return {kind: add_residual(*out[:2])}
    if isinstance(module, SplitProjection):
        return dict(zip(("features", "numbers"), out))
    found = {kind: out[0] if isinstance(out, tuple) else out}
    if isinstance(module, KimiDeltaAttention):
        found["low_rank"] = linear(x, module.gates_down)
        forget, gate = found["low_rank"].chunk(2, -1)
        gates = linear(forget, module.forget_up), linear(gate, module.output_up)
        found["gates"] = torch.cat(gates, -1)
    return found


def measure(cfg: Config) -> dict[str, tuple[float, float]]:
    """Train for STEPS steps and return {kind: (mean |coordinate|, mean |change|)}."""
    run = build_run(cfg, Mesh.single(), torch.device("cpu"), data=None, steps=STEPS)
    probe = batch(cfg.train.seed, 0)
    before = activations(run.stages[0], probe)
    for step in range(1, STEPS + 1):
        train_step(run, step, [batch(cfg.train.seed, step)])
    after = activations(run.stages[0], probe)

    measured: dict[str, tuple[float, float]] = {}
    for kind, values in after.items():
        change = values - before[kind]
        measured[kind] = (float(values.abs().mean()), float(change.abs().mean()))
    return measured


def exponent(widths: tuple[int, ...], values: list[float]) -> float:
    """Return the least-squares slope of log v = slope log width + offset; NaN if a value has no logarithm."""
    if not all(isfinite(value) and value > 0 for value in values):
        return float("nan")
    x = [log2(width) for width in widths]
    y = [log2(value) for value in values]
    mean_x = sum(x) / len(x)
    mean_y = sum(y) / len(y)
    covariance = sum((x_i - mean_x) * (y_i - mean_y) for x_i, y_i in zip(x, y))
    return covariance / sum((x_i - mean_x) ** 2 for x_i in x)


# ---- verdict -----------------------------------------------------------------------------------------------

@dataclass(frozen=True)
class Row:
    """Values of one kind of activation by width. what: "size" or "change"."""

    kind: str
    what: str
    values: list[float]
    exponent: float

    @property
    def wrong(self) -> str | None:
        """The violation of muP, or None. NaN is always a violation."""
        lowest = LOWER_BOUNDS.get(self.kind, -BOUND) if self.what == "change" else float("-inf")
        if lowest <= self.exponent <= BOUND:
            return None
        return f"{self.what} of {self.kind} goes as width^{self.exponent:+.2f}"


def rows(cfg: Config, widths: tuple[int, ...], mup: bool) -> list[Row]:
    """Return the sizes, then the changes, of every kind of activation.

    Raises ConfigError if the recipe cannot be trained at one of the widths.
    """
    cells = [widened(cfg, width, mup, widths[0]) for width in widths]
    for cell in cells:
        check_rules(cell)
    measured = [measure(cell) for cell in cells]

    results: list[Row] = []
    for i, what in enumerate(("size", "change")):
        for kind in measured[0]:
            values = [of_width[kind][i] for of_width in measured]
            results.append(Row(kind, what, values, exponent(widths, values)))
    return results


def verdict(standard: list[Row], mup: list[Row]) -> list[str]:
    """Return the violations, or an empty list if muP holds."""
    wrong = [f"muP: {row.wrong}, beyond {BOUND}" for row in mup if row.wrong]
    growth = next(row.exponent for row in standard if (row.kind, row.what) == ("logits", "change"))
    if not growth >= STANDARD_GROWTH:
        wrong.append(
            f"without muP the change of logits goes as width^{growth:+.2f}, not faster than "
            f"{STANDARD_GROWTH}: this check sees nothing"
        )
    return wrong


# ---- the command -------------------------------------------------------------------------------------------

def check(
    name: str, as_json: bool = False, out: Path | None = None, *, overrides: Overrides = Overrides()
) -> int:
    """Run the command: print a table and plot it to `out`. overrides: model keys to set.

    Returns 0 if muP holds, otherwise 1. Raises ConfigError if the recipe, an override or `out` is unusable.
    """
    cfg = overrides.apply(resolve(name, None, []))
    if out is not None and out.suffix != ".png":
        raise ConfigError(f"--out: {out} must end in .png")

    widths = MIXTURE_WIDTHS if mixture(cfg.model) else WIDTHS
    cells = [widened(cfg, width, mup, widths[0]) for width in widths for mup in (False, True)]
    check_reached(overrides, cells, 1, "--coord")
    found = {"standard": rows(cfg, widths, False), "muP": rows(cfg, widths, True)}
    wrong = verdict(found["standard"], found["muP"])
    title = overrides.title(name)
    if as_json:
        print_json(title, cells[0], widths, found, wrong=wrong)
    else:
        print_tables(title, cells[0], widths, found, wrong=wrong)

    if out is not None:
        try:
            out.parent.mkdir(parents=True, exist_ok=True)
            draw(out, title, widths, found)
        except OSError as error:
            raise ConfigError(f"--out: {out}: {error.strerror}") from None
    return 1 if wrong else 0


def print_json(
    name: str, cfg: Config, widths: tuple[int, ...], found: dict[str, list[Row]], *, wrong: list[str]
) -> None:
    summary = {
        "name": name,
        "layers": cfg.model.layers,
        "pattern": cfg.model.pattern,
        "widths": widths,
        "steps": STEPS,
        "rate": LEARNING_RATE,
        "bound": BOUND,
        "ok": not wrong,
        "wrong": wrong,
    }
    for title, of_title in found.items():
        summary[title] = [asdict(row) for row in of_title]
    print(json.dumps(summary))


def print_tables(
    name: str, cfg: Config, widths: tuple[int, ...], found: dict[str, list[Row]], *, wrong: list[str]
) -> None:
    pattern = f" ({cfg.model.pattern})" if cfg.model.pattern else ""
    print(
        f"{name}: {cfg.model.layers} layers{pattern}, {STEPS} steps of {cfg.optim.name}, rate "
        f"{LEARNING_RATE:g}, fp32, head_dim {HEAD_DIM}; mean |coordinate| and its mean |change| after step "
        f"{STEPS}"
    )
    for title, of_title in found.items():
        full_title = f"{title} (mup_base {widths[0]})" if title == "muP" else title
        print("\n".join(["", *table(full_title, widths, of_title)]))
    print("\n" + ("\n".join(wrong) or f"muP holds: no exponent beyond {BOUND}"))


def table(title: str, widths: tuple[int, ...], found: list[Row]) -> list[str]:
    """Format the rows as lines of text below a line with the title and the widths."""
    lines = [f"{title:<22}" + "".join(f"{width:>9}" for width in widths) + "   exponent"]
    for row in found:
        values = "".join(f"{value:>9.4f}" for value in row.values)
        lines.append(f"  {row.what:<7} {row.kind:<12}{values}      {row.exponent:+.2f}")
    return lines


def draw(out: Path, name: str, widths: tuple[int, ...], found: dict[str, list[Row]]) -> None:
    """Plot the changes by width, one panel per parametrization. Raises OSError if `out` cannot be written."""
    figure = new_figure(9, 4.2)
    for axes, (title, of_title) in zip(figure.subplots(1, 2, sharey=True), found.items()):
        changes = [row for row in of_title if row.what == "change"]
        for row, colour in zip(changes, COLOURS):
            label = f"{row.kind}  {row.exponent:+.2f}"
            axes.plot(widths, row.values, "o-", color=colour, lw=1.6, ms=4, label=label)
        axes.set_xscale("log", base=2)
        axes.set_yscale("log")
        axes.set_xticks(widths, [str(width) for width in widths])
        axes.set_xlabel("width")
        set_title(axes, title)
        axes.legend(frameon=False, fontsize=8, title="exponent", title_fontsize=8)
        set_open_frame(axes)
    figure.axes[0].set_ylabel(f"mean |change| after step {STEPS}")
    title = f"{name}: how far training moves each activation"
    figure.suptitle(title, x=0.01, ha="left", fontsize=11, color=INK)
    save_figure(figure, out)
