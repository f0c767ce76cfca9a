"""Scale of initial weights."""
import math

from config import ModelConfig


def residual_std(model: ModelConfig) -> float:
    """Return the std of the two matrices per block that write to the residual stream (GPT-2), so that its
    variance does not grow with depth."""
    return model.init_std / math.sqrt(2 * model.layers)
