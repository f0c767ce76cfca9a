"""The size of initial weights."""
import math

from config import ModelConfig


def residual_std(model: ModelConfig) -> float:
    """Of matrices whose output is added to the residual stream, of which a block has two (GPT-2): the
    variance of the sum does not grow with depth."""
    return model.init_std / math.sqrt(2 * model.layers)
