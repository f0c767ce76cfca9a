"""One dial: `train.py NAME --depth N` is a recipe at another size.

The recipe is the reference, at which batch and rates were tuned. Another depth keeps its proportions: the
width grows with the depth, the length of the run with the parameters, the batch with the length, and the
rates with the batch. These are the rules of nanochat's dial (at 92d63d4), for any recipe.

- Tokens D: as many per parameter as in the recipe. Parameters that only look up a row (the embedding) and
  experts that a token does not choose do not count.
- Batch B: it grows with D^0.383 (arXiv 2505.13738), by a power of two.
- Learning rate: it grows with sqrt(B) (optim.lr_rule, arXiv 2205.10287), and follows muP's rule for the width
  (arXiv 2203.03466).
- Weight decay: it grows with sqrt(B) / D, so that B / (lr x decay x D) stays the same (arXiv 2405.13698).
"""
import math
from dataclasses import replace

from config.optimizers import OPTIMIZERS
from config.reading.loading import DEPTH_OPTION, from_layers
from config.reading.parse import HORIZONS, parse_key
from config.reading.rules import range_rules
from config.reading.sizes import sizes_at_width
from config.schema import Config, ModelConfig
from config.strict import ConfigError, Tree
from config.tree import has_path, is_below
from model.describe import all_parameters
from model.router import mixture

LOOKED_UP = ("embedding", "positions")  # roles of tables that give a token a row
BATCH_POWER = 0.383  # of the tokens of a run (arXiv 2505.13738)
WIDTH_UNIT = 64  # where the heads of a model do not divide its width


def settings_at_depth(layers: list[Tree], stated: Tree, depth: int) -> Tree:
    """Return the settings that a recipe and a file (layers) have at this depth, with those that are stated.

    Sizes, batch and length that are stated win, and what follows from them follows; train.steps and
    train.flops end the run, and batch and rates stay those of its whole length. Rates that are stated are
    those of the recipe's own depth. Raises ConfigError.
    """
    preset = {key: value for key, value in stated.items() if key == "model.preset"}
    recipe = from_layers([*layers, preset])
    check_can_turn(recipe, stated)

    # the model, and its size beside the recipe's
    hidden = stated.get("model.hidden") or width_at_depth(recipe.model, depth)
    hidden = parse_key("model.hidden", hidden, "model.hidden")
    sizes = {"model.layers": depth, "model.hidden": hidden}
    sizes |= {f"model.{key}": value for key, value in sizes_at_width(recipe.model, hidden).items()}
    unsized = {key: value for key, value in stated.items() if key not in sizes}
    reference = from_layers([*layers, unsized])
    turned = from_layers([*layers, beside(sizes, stated)])
    for rule in range_rules(turned, world=1):
        if not rule.holds:
            raise ConfigError(rule.message)
    growth = multiplied_parameters(turned.model) / multiplied_parameters(reference.model)

    settings = sizes | run_settings(recipe, turned, growth, stated)
    if not (recipe.model.mup or OPTIMIZERS[turned.optim.name].why_no_mup):
        settings["model.mup.base"] = recipe.model.hidden
    if any(f"train.{key}" in stated for key in HORIZONS):
        del settings["train.tokens"]
    return beside(settings, {key: value for key, value in stated.items() if key != "optim.weight_decay"})


def check_can_turn(recipe: Config, stated: Tree) -> None:
    """Raise ConfigError if the length of a recipe cannot grow with its size, and if layers are stated."""
    if "model.layers" in stated:
        raise ConfigError(f"{DEPTH_OPTION}: model.layers is stated, too; keep one")
    train, name = recipe.train, recipe.log.name
    leave_out = f"or leave {DEPTH_OPTION} out"
    for key in ("phases", "ramp"):
        if getattr(train, key) is not None:
            raise ConfigError(f"{DEPTH_OPTION}: train.{key} of {name} counts the steps of its own size; set "
                              f"it to none there, {leave_out}")
    if train.steps is None and train.tokens is None:
        raise ConfigError(f"{DEPTH_OPTION}: {name} has neither train.steps nor train.tokens, from which the "
                          f"length at another depth follows; set one there, {leave_out}")


def width_at_depth(model: ModelConfig, depth: int) -> int:
    """Return the width that keeps the ratio of width and depth, rounded up to whole heads."""
    heads = model.mixer.heads if has_path(model, "mixer.heads") else 0
    unit = model.hidden // heads if heads and model.hidden % heads == 0 else WIDTH_UNIT
    return math.ceil(model.hidden * depth / (model.layers * unit)) * unit


def multiplied_parameters(model: ModelConfig) -> float:
    """Return how many parameters multiply a token, multi-token prediction left out.

    A vocabulary that the data decides counts as 0 rows.
    """
    experts = mixture(model)
    used = experts.top_k / experts.experts if experts else 1.0
    tied_head = (model.vocab or 0) * model.hidden if model.tied else 0
    return tied_head + sum(
        spec.numel * (used if spec.is_expert else 1.0)
        for spec, _ in all_parameters(replace(model, mtp=None)) if spec.role not in LOOKED_UP
    )


def run_settings(recipe: Config, turned: Config, growth: float, stated: Tree) -> Tree:
    """Return length, batch and rates of a run.

    turned: the config at its size, with the settings that are stated. growth: of the parameters.
    """
    sequence_tokens = recipe.train.seq_len
    batch_tokens = recipe.train.global_batch * sequence_tokens
    tokens = recipe.train.tokens or recipe.train.steps * batch_tokens
    longer = growth
    if "train.tokens" in stated and turned.train.tokens is not None:
        longer = turned.train.tokens / tokens

    # sequences of a step, of this run and of the recipe, whose sequences may have another length
    base_batch = max(1, round(batch_tokens / turned.train.seq_len))
    batch = max(1, round(base_batch * 2.0 ** round(BATCH_POWER * math.log2(longer))))
    if "train.global_batch" in stated:
        batch = turned.train.global_batch
    settings: Tree = {
        "train.tokens": round(tokens * longer),
        "train.global_batch": batch,
        "train.micro_batch": min(batch, recipe.train.micro_batch),
    }
    if turned.optim.lr_rule is None:
        settings |= {"optim.lr_rule": "sqrt", "optim.base_batch": base_batch}
    decay = turned.optim.weight_decay * math.sqrt(batch / base_batch) / longer
    return settings | {"optim.weight_decay": float(f"{decay:.4g}")}


def beside(settings: Tree, stated: Tree) -> Tree:
    """Return the settings with those that are stated, which win: also a part as a whole (model.mlp none)."""
    return {key: value for key, value in settings.items() if not is_below(key, stated)} | stated
