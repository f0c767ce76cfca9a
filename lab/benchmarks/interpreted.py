"""Triton's kernels in its interpreter: a rehearsal on a CPU of what a GPU does.

Tiles are as small as tensor cores allow, because the interpreter takes as long for a mostly empty tile.
"""

import importlib


def interpret_kernels() -> None:
    """Make the public functions of kernels/ run their Triton kernels on a CPU, in this process."""
    importlib.import_module("interpreter")  # in tests/; it fixes Triton's interpreter
    kernels = importlib.import_module("kernels.triton_")
    kernels.DEVICES = ("cpu",)
    for module, table, tile in importlib.import_module("small_tiles").SMALL_TILES:
        owner = importlib.import_module(f"kernels.{module}")
        setattr(owner, table, getattr(owner, table) | tile)
