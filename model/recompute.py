"""Activation checkpointing: activations that are computed again in the backward instead of stored (arXiv
1604.06174).

parallel.recompute: none, selective (the attention core and other cheap parts, arXiv 2205.05198), or full
(blocks).

What is computed again is bitwise what it was: dropout is a function of its coordinates, so no state of a
generator is stored. Exchanges inside run again too, in the same order on every rank of their group.
"""
from collections.abc import Callable
from typing import ParamSpec, TypeVar

from torch.utils.checkpoint import checkpoint

Arguments = ParamSpec("Arguments")
Result = TypeVar("Result")


def checkpoint_activations(function: Callable[Arguments, Result], *args: Arguments.args,
                           **kwargs: Arguments.kwargs) -> Result:
    """function(*args), of which only the arguments are stored for the backward."""
    return checkpoint(function, *args, use_reentrant=False, preserve_rng_state=False, **kwargs)
