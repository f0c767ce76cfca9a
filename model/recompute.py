"""Activations made again in the backward instead of kept: nothing, the attention core (arXiv 2205.05198), or whole blocks
(arXiv 1604.06174).

What is made again is bitwise what it was: dropout is a function of its coordinates, so no generator's state is saved. The
exchanges inside run again too, in the same order on every rank of their group.
"""
from collections.abc import Callable

from torch import Tensor
from torch.utils.checkpoint import checkpoint


def again(function: Callable, *args) -> Tensor:
    """function(*args), of which only the arguments are kept for the backward."""
    return checkpoint(function, *args, use_reentrant=False, preserve_rng_state=False)
