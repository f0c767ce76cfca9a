"""Model sizes that scale with its width."""
import math
from fractions import Fraction

from config.schema import ModelConfig, divisors, head_dim
from config.tree import has_path, value_at
from model.attention import AttentionConfig

WIDTHS = ("mlp.width", "mixer.kv_rank", "mixer.q_rank")  # of model.*
MULTIPLE = 16  # of the widths


def round_to(number: Fraction, unit: int) -> int:
    """Return the nearest multiple of the unit, at least one unit."""
    return unit * max(1, round(number / unit))


def shared_heads_of_kinds(model: ModelConfig) -> int:
    """Return the least common multiple of the key heads of block kinds that keep the model's query heads."""
    changes = [dict(variant.changes) for variant in model.blocks]
    stated = (each.get("mixer.kv_heads") for each in changes if "mixer.heads" not in each)
    return math.lcm(*(heads for heads in stated if heads))


def sizes_at_width(model: ModelConfig, hidden: int, heads: int | None = None) -> dict[str, int]:
    """Return the keys of model.* that keep a model's proportions at another width, with the same head size.

    `heads` defaults to what the width asks for. Includes other keys only if the model states them; head_dim
    also if the heads do not divide the width.
    """
    mixer = model.mixer
    ratio = Fraction(hidden, model.hidden)
    sizes: dict[str, int] = {}
    if has_path(model, "mixer.heads"):
        heads = heads or round_to(mixer.heads * ratio, shared_heads_of_kinds(model))
        sizes["mixer.heads"] = heads
    if isinstance(mixer, AttentionConfig):
        if mixer.kv_heads is not None:
            most = max(1, round(Fraction(mixer.kv_heads * heads, mixer.heads)))
            of_kinds = (dict(variant.changes).get("mixer.heads", 0) for variant in model.blocks)
            shared = math.gcd(heads, *of_kinds)  # kinds of blocks keep theirs
            sizes["mixer.kv_heads"] = max(each for each in divisors(shared) if each <= most)
        if mixer.head_dim is not None or heads * head_dim(model) != hidden:
            sizes["mixer.head_dim"] = head_dim(model)
    of_kinds = tuple(
        f"blocks.{variant.name}.mlp.width" for variant in model.blocks
        if has_path(model, f"blocks.{variant.name}.mlp.width"))
    for key in (*WIDTHS, *of_kinds):
        if has_path(model, key) and value_at(model, key) is not None:
            sizes[key] = math.ceil(value_at(model, key) * ratio / MULTIPLE) * MULTIPLE
    return sizes
