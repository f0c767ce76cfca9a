"""A ladder: models of one family from a single dial, the depth, each trained for the same budgets of FLOPs.

From depth n come n layers, a width of `aspect` n, heads of `head_dim` channels, each with keys and values of
its own, and an MLP of 8/3 of the width. The learning rate is the same for all: muP (arXiv 2203.03466) scales
it from the smallest width.

The schedule is warmup, stable, decay (arXiv 2404.06395): so one run serves all horizons of a size (arXiv
2405.18392). The longest budget is trained as a whole, and leaves a checkpoint where the decay of each shorter
budget begins; a run of a shorter budget resumes from it and decays. Budgets are `ratio` apart, so these steps
are multiples of the first.
"""
import json
import math
import os
from dataclasses import asdict, dataclass, replace
from pathlib import Path

import config
from config import Config, ConfigError
from config.suggestions import check_rules
from plan.count import flops_per_token, parameters
from scaling.settings import words_of

LADDER_FILE = "ladder.json"  # in the folder of a ladder
FFN_RATIO = 8 / 3  # inner width of the MLP over the width: three matrices hold what two of 4 would
FFN_MULTIPLE = 16
DECAY_FRACTION = 0.2  # of a run, at its end (arXiv 2405.18392 finds 10 to 20 % enough)
STEP_UNIT = round(1 / DECAY_FRACTION)  # steps of a run are a multiple: its decay begins at a whole step
LEAST_STEPS = 50  # of the shortest run


@dataclass(frozen=True)
class Ladder:
    """What a ladder is made of. flops: the first budget; budgets: how many; ratio: between one and the next.

    settings: [key, value] pairs of train.py that hold for all runs.
    """
    recipe: str
    depths: tuple[int, ...]
    flops: float
    budgets: int
    ratio: int = 2
    aspect: int = 32
    head_dim: int = 32
    settings: tuple[tuple[str, str], ...] = ()

    def all_flops(self) -> list[float]:
        return [self.flops * self.ratio**index for index in range(self.budgets)]


@dataclass(frozen=True)
class LadderRun:
    """One run of a ladder. flops: what it takes, close to the budget. trunk: the run whose checkpoint at step
    `branch_step` it continues; None: it starts from nothing. stable_steps: before the first decay of any
    budget; a trunk saves at its multiples."""
    name: str
    depth: int
    budget: int
    steps: int
    tokens: int
    flops: float
    parameters: int
    trunk: str | None
    branch_step: int
    stable_steps: int


def read_ladder(folder: Path) -> Ladder:
    """The ladder that was started in this folder. Raises ConfigError."""
    path = folder / LADDER_FILE
    try:
        tree = json.loads(path.read_text())
        settings = tuple((key, value) for key, value in tree.pop("settings"))
        return Ladder(**{**tree, "depths": tuple(tree["depths"]), "settings": settings})
    except (OSError, ValueError, TypeError, KeyError) as error:
        raise ConfigError(f"{path}: no ladder was started here ({error}); "
                          "start one with python -m scripts.scaling ladder") from error


def write_ladder(ladder: Ladder, folder: Path) -> None:
    """Keeps what the ladder is. Raises ConfigError if another one was started in the folder."""
    path = folder / LADDER_FILE
    if path.exists():
        before = read_ladder(folder)
        old, new = asdict(before), asdict(ladder)
        changed = [key for key in new if new[key] != old[key]]
        if changed:
            key = changed[0]
            raise ConfigError(f"--out: {folder} holds a ladder with {key} {old[key]}, not {new[key]}; its "
                              "runs could not be compared: set it back, or choose another folder")
        return
    folder.mkdir(parents=True, exist_ok=True)
    temp = path.with_name(f"{LADDER_FILE}.{os.getpid()}")  # the jobs of an array start together
    temp.write_text(json.dumps(asdict(ladder), indent=1) + "\n")
    temp.replace(path)


def check_ladder(ladder: Ladder) -> None:
    """Raises ConfigError for a ladder that cannot be run, or from which no law could be seen."""
    if len(set(ladder.depths)) != len(ladder.depths) or min(ladder.depths, default=0) < 1:
        raise ConfigError("--depths: different numbers of layers, all at least 1, as 2,3,4,5")
    if len(ladder.depths) < 3:
        raise ConfigError(f"--depths: {len(ladder.depths)} sizes, and a law needs three or more, as 2,3,4,5")
    if ladder.budgets < 1 or ladder.ratio < 2:
        raise ConfigError("--budgets: at least 1, with a --ratio of 2 or more between one and the next")
    if ladder.aspect % ladder.head_dim:
        raise ConfigError(f"--aspect: {ladder.aspect} is no multiple of --head-dim {ladder.head_dim}")
    for run in runs_of(ladder):
        check_rules(config_of_depth(ladder, run.depth))
        if run.steps < LEAST_STEPS:
            budget = ladder.all_flops()[run.budget]
            raise ConfigError(
                f"--flops: {run.name} would have {run.steps} steps in {budget:.3g} FLOPs, and fewer than "
                f"{LEAST_STEPS} show no law; raise --flops, or set a smaller train.global_batch"
            )


def config_of_depth(ladder: Ladder, depth: int) -> Config:
    """The recipe with the ladder's settings and the model of this depth."""
    cfg = config.resolve(ladder.recipe, None, words_of(ladder.settings))
    return replace(cfg, model=replace(cfg.model, **model_keys(ladder, depth)))


def model_keys(ladder: Ladder, depth: int) -> dict[str, int]:
    """Keys of model.* that follow from the depth."""
    hidden = ladder.aspect * depth
    heads = hidden // ladder.head_dim
    return {
        "layers": depth,
        "hidden": hidden,
        "heads": heads,
        "kv_heads": heads,
        "head_dim": ladder.head_dim,
        "ffn": math.ceil(FFN_RATIO * hidden / FFN_MULTIPLE) * FFN_MULTIPLE,
        "mup_base": ladder.aspect * min(ladder.depths),
    }


def runs_of(ladder: Ladder, depth: int | None = None) -> list[LadderRun]:
    """The runs in the order in which they can run: of each depth the trunk first. depth: of this alone."""
    found: list[LadderRun] = []
    for each in ladder.depths if depth is None else (depth,):
        found += runs_of_depth(ladder, each)
    return found


def runs_of_depth(ladder: Ladder, depth: int) -> list[LadderRun]:
    cfg = config_of_depth(ladder, depth)
    if cfg.model.vocab is None:
        raise ConfigError("model.vocab: none, and a ladder counts parameters before the tokenizer is read; "
                          "set it")
    of_token = flops_per_token(cfg.model, cfg.train.seq_len)
    step_tokens = cfg.train.global_batch * cfg.train.seq_len
    first_steps = max(1, round(ladder.flops / (of_token * step_tokens * STEP_UNIT))) * STEP_UNIT

    trunk_name = run_name(depth, ladder.budgets - 1)
    runs: list[LadderRun] = []
    for budget in reversed(range(ladder.budgets)):
        steps = first_steps * ladder.ratio**budget
        is_trunk = budget == ladder.budgets - 1
        runs.append(LadderRun(
            name=run_name(depth, budget),
            depth=depth,
            budget=budget,
            steps=steps,
            tokens=steps * step_tokens,
            flops=steps * step_tokens * of_token,
            parameters=parameters(cfg.model)["total"],
            trunk=None if is_trunk else trunk_name,
            branch_step=0 if is_trunk else stable_part(steps),
            stable_steps=stable_part(first_steps),
        ))
    return runs


def run_name(depth: int, budget: int) -> str:
    """Budgets are counted from 1 in names."""
    return f"d{depth}-b{budget + 1}"


def stable_part(steps: int) -> int:
    """The steps before the decay."""
    return steps - steps // STEP_UNIT


def train_arguments(ladder: Ladder, run: LadderRun, folder: Path) -> list[str]:
    """The arguments of train.py for a run of the ladder in this folder."""
    settings = dict(ladder.settings)
    for key, value in model_keys(ladder, run.depth).items():
        settings[f"model.{key}"] = str(value)
    settings |= {
        "log.dir": str(folder),
        "log.name": run.name,
        "train.steps": str(run.steps),
        "optim.decay": "wsd",
        "optim.decay_fraction": str(DECAY_FRACTION),
        "optim.min_lr": "0",
        "eval.every": "none",  # at the end alone
        "eval.sample": "0",
        "checkpoint.every": str(run.stable_steps),
        "checkpoint.keep": str(ladder.ratio**ladder.budgets),  # all
    }
    if run.trunk is not None:
        branch = folder / run.trunk / "checkpoints" / f"step_{run.branch_step:08d}"
        settings["checkpoint.resume"] = str(branch)
    return [ladder.recipe, *words_of(settings.items())]


def describe_ladder(ladder: Ladder) -> str:
    """A table of the sizes, and of the tokens that each budget gives them."""
    budgets = ladder.all_flops()
    lines = [f"{'depth':>5}{'width':>7}{'parameters':>12}  " + "".join(f"{flops:>12.2g}" for flops in budgets)
             + "  FLOPs"]
    for depth in ladder.depths:
        runs = sorted(runs_of_depth(ladder, depth), key=lambda run: run.budget)
        width = model_keys(ladder, depth)["hidden"]
        tokens = "".join(f"{run.tokens / 1e6:>11.2f}M" for run in runs)
        lines.append(f"{depth:>5}{width:>7}{runs[0].parameters:>12,}  {tokens}  tokens")
    return "\n".join(lines)
