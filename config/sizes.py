"""Sizes of a model that follow its width."""
import math
from fractions import Fraction

from config.schema import ModelConfig, divisors, head_dim

WIDTHS = ("ffn", "moe_ffn", "kv_rank", "q_rank")  # of model.*
MULTIPLE = 16  # of these


def sizes_at_width(model: ModelConfig, hidden: int, heads: int | None = None) -> dict[str, int]:
    """Keys of model.* that keep a model's proportions at another width, with heads of as many channels.

    heads: None for as many as the width asks for. Of the other keys, those that the model states; head_dim
    also where the heads do not divide the width so.
    """
    ratio = Fraction(hidden, model.hidden)
    heads = heads or max(1, round(model.heads * ratio))
    sizes = {"heads": heads}
    if model.kv_heads is not None:
        most = max(1, round(Fraction(model.kv_heads * heads, model.heads)))
        sizes["kv_heads"] = max(each for each in divisors(heads) if each <= most)
    if model.head_dim is not None or not (model.kv_rank or heads * head_dim(model) == hidden):
        sizes["head_dim"] = head_dim(model)
    for key in WIDTHS:
        if getattr(model, key) is not None:
            sizes[key] = math.ceil(getattr(model, key) * ratio / MULTIPLE) * MULTIPLE
    return sizes
