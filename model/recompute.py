"""Activation checkpointing (arXiv 1604.06174).

parallel.recompute is none, selective (the attention core and other cheap parts, arXiv 2205.05198) or full
(blocks).

Recomputed activations are bitwise identical: dropout is a function of its coordinates, so no generator state
is stored. Collectives inside run again too, in the same order on every rank of their group.
"""
from collections.abc import Callable
from typing import ParamSpec, TypeVar

from torch.utils.checkpoint import checkpoint

Arguments = ParamSpec("Arguments")
Result = TypeVar("Result")


def checkpoint_activations(function: Callable[Arguments, Result], *args: Arguments.args,
                           **kwargs: Arguments.kwargs) -> Result:
    """Run function(*args), storing only the arguments for the backward."""
    return checkpoint(function, *args, use_reentrant=False, preserve_rng_state=False, **kwargs)
