"""A ladder: models of one family set by a single dial, the depth, each trained for the same FLOP budgets.

Depth n means n layers, a width of `aspect` n, MHA with heads of `head_dim` channels, and an MLP of 8/3 of the
width. The learning rate is the same for all: muP (arXiv 2203.03466) transfers it from the smallest width.

The schedule is warmup, stable, decay (arXiv 2404.06395), so one run serves all horizons of a size (arXiv
2405.18392). The longest budget is trained in full, and leaves a checkpoint where the decay of each shorter
budget starts; the run of a shorter budget resumes from it and decays. Budgets are a factor of `ratio` apart,
so these steps are multiples of the first. All runs of a size thus share the warmup of its longest run, and
check_ladder ensures that it leaves the shortest one a stable phase.
"""
import json
import math
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from config import Config, ConfigError, ModelConfig
from config.manifest import first_difference, refuse_other, write_manifest
from config.reading import build_tree, defaults, merge, resolve
from config.reading.sizes import sizes_at_width
from config.reading.suggestions import check_rules
from config.tree import plain_data
from lab.scaling.settings import refuse_own_keys, to_arguments
from model.attention import AttentionConfig
from model.mlp import MLPConfig
from plan.count import flops_per_token, parameters

LADDER_FILE = "ladder.json"  # in the folder of a ladder
DECAY_FRACTION = 0.2  # of a run, at its end (arXiv 2405.18392 finds 10 to 20 % sufficient)
STEP_UNIT = round(1 / DECAY_FRACTION)  # steps of a run are a multiple: its decay starts at a whole step
MIN_STEPS = 50  # of the shortest run
TRIED_FACTORS = (2, 4, 8, 16, 32, 64, 128)  # for more FLOPs or smaller batches, if runs are too short
MIN_BUDGETS = 2  # a power law of the budget needs at least two
WARMUP_SHARE = 0.1  # of the shortest run: train.py's limit for a separate run
# keys that a ladder sets in every run, besides those that follow from the depth (model_keys)
OWN_KEYS = (
    "log.dir", "log.name", "train.steps", "train.tokens", "train.flops",
    "optim.decay", "optim.decay_fraction", "optim.min_lr", "eval.every", "eval.sample",
    "checkpoint.every", "checkpoint.keep", "checkpoint.resume",
)


@dataclass(frozen=True)
class Ladder:
    """The plan of a ladder: `budgets` FLOP budgets from `flops` on, each `ratio` times the previous one.

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
    """One run of a ladder.

    flops: its total, close to the budget.
    parameters: for a mixture, the active ones.
    non_embedding_parameters: these without embedding and head.
    trunk: the run whose checkpoint at step `branch_step` it resumes, or None if it starts from scratch.
    stable_steps: before the first decay of any budget; a trunk saves at its multiples.
    """
    name: str
    depth: int
    budget: int
    steps: int
    tokens: int
    flops: float
    parameters: int
    non_embedding_parameters: int
    trunk: str | None
    branch_step: int
    stable_steps: int


def read_ladder(folder: Path) -> Ladder:
    """Read the ladder of this folder. Raises ConfigError."""
    path = folder / LADDER_FILE
    try:
        tree = json.loads(path.read_text())
        settings = tuple((key, value) for key, value in tree.pop("settings"))
        return Ladder(**{**tree, "depths": tuple(tree["depths"]), "settings": settings})
    except (OSError, ValueError, TypeError, KeyError) as error:
        raise ConfigError(f"{path}: no ladder was started here ({error}); "
                          "start one with python -m scripts.scaling ladder") from error


def write_ladder(ladder: Ladder, folder: Path) -> None:
    """Write the plan of a ladder, to which depths may be added later.

    Raises ConfigError if the folder belongs to another ladder.
    """
    path = folder / LADDER_FILE
    if path.exists():
        before = read_ladder(folder)
        if ladder == before:
            return
        changed = first_difference(comparable_tree(before), comparable_tree(ladder), left_out=("depths",))
        if changed is not None:
            refuse_other(path, "ladder", *changed)
        check_added_depths(before, ladder, folder)
    folder.mkdir(parents=True, exist_ok=True)
    write_manifest(path, asdict(ladder))


def comparable_tree(ladder: Ladder) -> dict[str, Any]:
    """Return the ladder as a tree in which the order of settings does not matter."""
    return {**asdict(ladder), "settings": dict(ladder.settings)}


def check_added_depths(before: Ladder, ladder: Ladder, folder: Path) -> None:
    """Raise ConfigError unless all depths are still there, including the smallest, muP's base."""
    missing = sorted(set(before.depths) - set(ladder.depths))
    told = ",".join(map(str, before.depths))
    if missing:
        raise ConfigError(f"--depths: {folder} holds a ladder of {told}, and {missing[0]} is left out: "
                          "name all depths, to which others may be added, or choose another folder")
    if min(ladder.depths) < min(before.depths):
        raise ConfigError(f"--depths: {folder} holds a ladder of {told}, and muP scales from the smallest: "
                          f"add depths above {min(before.depths)}, or choose another folder")


def check_ladder(ladder: Ladder) -> None:
    """Raise ConfigError for a ladder that cannot be run, or that cannot reveal a law."""
    if not (math.isfinite(ladder.flops) and ladder.flops > 0):
        raise ConfigError(f"--flops: {ladder.flops}; FLOPs of the first budget, above 0, such as 6e11")
    if len(set(ladder.depths)) != len(ladder.depths) or min(ladder.depths, default=0) < 1:
        raise ConfigError("--depths: different numbers of layers, all at least 1, such as 2,3,4,5")
    if len(ladder.depths) < 3:
        raise ConfigError(f"--depths: {len(ladder.depths)} sizes, and a law needs three or more, such as "
                          "2,3,4,5")
    if ladder.budgets < MIN_BUDGETS or ladder.ratio < 2:
        raise ConfigError(f"--budgets: at least {MIN_BUDGETS}, from which the fit has a power law, with a "
                          "--ratio of 2 or more between one and the next")
    if ladder.aspect < 1 or ladder.head_dim < 1:
        raise ConfigError(f"--aspect, --head-dim: {ladder.aspect} and {ladder.head_dim}; both at least 1")
    if ladder.aspect % ladder.head_dim:
        raise ConfigError(f"--aspect: {ladder.aspect} is not a multiple of --head-dim {ladder.head_dim}")
    check_settings(ladder)
    for run in get_runs(ladder):
        check_rules(config_of_depth(ladder, run.depth))
        if run.steps < MIN_STEPS:
            budget = ladder.all_flops()[run.budget]
            raise ConfigError(
                f"--flops: {run.name} would have {run.steps} steps in {budget:.3g} FLOPs, and fewer than "
                f"{MIN_STEPS} show no law; {more_steps_hint(ladder)}"
            )
    check_warmup(ladder)


def more_steps_hint(ladder: Ladder) -> str:
    """Return options that make the runs of a ladder long enough; each has been checked."""
    settings = dict(ladder.settings)
    train = config_of_depth(ladder, min(ladder.depths)).train

    def with_batch(batch: int) -> Ladder:
        more = {"train.global_batch": str(batch), "train.micro_batch": str(min(batch, train.micro_batch))}
        return replace(ladder, settings=tuple((settings | more).items()))

    results: list[str] = []
    for times in TRIED_FACTORS:
        if is_long_enough(replace(ladder, flops=ladder.flops * times)):
            results.append(f"--flops {ladder.flops * times:.3g}")
            break
    for divisor in TRIED_FACTORS:
        batch = train.global_batch // divisor
        if batch and is_long_enough(with_batch(batch)):
            words = dict(with_batch(batch).settings)
            results.append(words_text(words, ("train.global_batch", "train.micro_batch")))
            break
    return f"try {', or '.join(results)}" if results else "raise --flops"


def words_text(settings: dict[str, str], keys: tuple[str, ...]) -> str:
    """Return these keys as command-line arguments."""
    return " ".join(to_arguments((key, settings[key]) for key in keys))


def is_long_enough(ladder: Ladder) -> bool:
    """Return whether all runs have at least MIN_STEPS, and a stable phase after the warmup."""
    if any(run.steps < MIN_STEPS for run in get_runs(ladder)):
        return False
    try:
        check_warmup(ladder)
        check_rules(config_of_depth(ladder, min(ladder.depths)))
    except ConfigError:
        return False
    return True


def check_settings(ladder: Ladder) -> None:
    """Raise ConfigError for keys of train.py that a ladder sets itself or does not support."""
    own = (*OWN_KEYS, *(f"model.{key}" for key in model_keys(ladder, min(ladder.depths))))
    refuse_own_keys(ladder.settings, own, "a ladder")
    train = resolve(ladder.recipe, None, to_arguments(ladder.settings)).train
    for key in ("ramp", "phases"):
        if getattr(train, key) is not None:
            raise ConfigError(f"train.{key}: a ladder counts steps of train.global_batch sequences, all with "
                              "the same settings; set it to none")


def get_warmup(ladder: Ladder, depth: int) -> int:
    """Return the warmup steps of every run of this size: those of its trunk, which the others resume."""
    trunk = get_depth_runs(ladder, depth)[0]
    # as in optim/lr.py
    return min(config_of_depth(ladder, depth).optim.warmup, trunk.steps // 10)


def check_warmup(ladder: Ladder) -> None:
    """Raise ConfigError if the warmup of a size's shortest run takes longer than its decay."""
    depth = min(ladder.depths, key=lambda each: get_depth_runs(ladder, each)[-1].steps)
    warmup, shortest = get_warmup(ladder, depth), get_depth_runs(ladder, depth)[-1]
    if warmup > DECAY_FRACTION * shortest.steps:
        raise ConfigError(
            f"optim.warmup: {warmup} steps in all runs of depth {depth}, of which {shortest.name} has "
            f"{shortest.steps} and decays from step {shortest.branch_step} on; set it to a tenth, "
            f"--optim.warmup {int(WARMUP_SHARE * shortest.steps)}, or raise --flops"
        )


def warmup_line(ladder: Ladder, depth: int) -> str | None:
    """Return by how much the warmup of a size's shortest run exceeds that of a separate run, None if it does
    not.
    """
    warmup, shortest = get_warmup(ladder, depth), get_depth_runs(ladder, depth)[-1]
    most = int(WARMUP_SHARE * shortest.steps)
    if warmup <= most:
        return None
    return (f"{shortest.name}: {warmup} of its {shortest.steps} steps are warmup, as in all runs of its "
            f"size; alone it would have {most}")


def config_of_depth(ladder: Ladder, depth: int) -> Config:
    """Return the recipe with the ladder's settings and the model of this depth."""
    cfg = resolve(ladder.recipe, None, to_arguments(ladder.settings))
    tree = merge(plain_data(cfg.model), model_keys(ladder, depth), ModelConfig)
    return replace(cfg, model=build_tree(ModelConfig, tree, "model."))


def model_keys(ladder: Ladder, depth: int) -> dict[str, int]:
    """Return the model.* keys that follow from the depth."""
    hidden = ladder.aspect * depth
    return {
        "layers": depth,
        "hidden": hidden,
        **sizes_at_width(family_model(ladder.head_dim), hidden),
        "mup.base": ladder.aspect * min(ladder.depths),
    }


def family_model(head_dim: int) -> ModelConfig:
    """Return a model with the proportions of all sizes. The MLP is 8/3 as wide as the hidden state, so that
    its three matrices have as many parameters as two of width 4.
    """
    mixer = AttentionConfig(heads=3, kv_heads=3, head_dim=head_dim)
    return replace(defaults().model, hidden=3 * head_dim, mixer=mixer, mlp=MLPConfig(width=8 * head_dim))


def get_runs(ladder: Ladder, depth: int | None = None) -> list[LadderRun]:
    """Return the runs of the ladder, or of one depth, in a valid order: each depth's trunk comes first."""
    results: list[LadderRun] = []
    for each in ladder.depths if depth is None else (depth,):
        results += get_depth_runs(ladder, each)
    return results


def get_depth_runs(ladder: Ladder, depth: int) -> list[LadderRun]:
    cfg = config_of_depth(ladder, depth)
    if cfg.model.vocab is None:
        raise ConfigError("model.vocab: none, and a ladder counts parameters before the tokenizer is read; "
                          "set it")
    counts = parameters(cfg.model)
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
            parameters=counts["active"],
            non_embedding_parameters=counts["active"] - counts["embedding"],
            trunk=None if is_trunk else trunk_name,
            branch_step=0 if is_trunk else stable_part(steps),
            stable_steps=stable_part(first_steps),
        ))
    return runs


def run_name(depth: int, budget: int) -> str:
    """Return a run's name, in which budgets are counted from 1."""
    return f"d{depth}-b{budget + 1}"


def stable_part(steps: int) -> int:
    """Return the steps before the decay."""
    return steps - steps // STEP_UNIT


def train_arguments(ladder: Ladder, run: LadderRun, folder: Path) -> list[str]:
    """Return the arguments of train.py for a run of the ladder in this folder."""
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
        "eval.every": "none",  # only at the end
        "eval.sample": "0",
        "checkpoint.every": str(run.stable_steps),
        "checkpoint.keep": str(ladder.ratio**ladder.budgets),  # all
    }
    if run.trunk is not None:
        branch = folder / run.trunk / "checkpoints" / f"step_{run.branch_step:08d}"
        settings["checkpoint.resume"] = str(branch)
    return [ladder.recipe, *to_arguments(settings.items())]


def describe_ladder(ladder: Ladder) -> str:
    """Return a table of the sizes and of the tokens for each budget."""
    budgets = ladder.all_flops()
    lines = [f"{'depth':>5}{'width':>7}{'parameters':>12}  " + "".join(f"{flops:>12.2g}" for flops in budgets)
             + "  FLOPs"]
    for depth in ladder.depths:
        runs = sorted(get_depth_runs(ladder, depth), key=lambda run: run.budget)
        width = model_keys(ladder, depth)["hidden"]
        tokens = "".join(f"{run.tokens / 1e6:>11.2f}M" for run in runs)
        lines.append(f"{depth:>5}{width:>7}{runs[0].parameters:>12,}  {tokens}  tokens")
    return "\n".join(lines)
