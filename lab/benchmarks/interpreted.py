"""Triton's kernels in its interpreter: a rehearsal on a CPU of what a GPU does.

Tiles are as small as tensor cores allow, because the interpreter takes as long for a mostly empty tile.
"""

import importlib

SMALL_TILES = (  # (module of kernels/, its table, tile)
    ("linear", "TILE", {"M": 16, "N": 32, "K": 16, "GROUP": 2}),
    ("grouped_gemm", "TILE", {"M": 16, "N": 32, "K": 16}),
    ("grouped_gemm", "WGRAD", {"M": 16, "N": 32, "K": 16}),
    ("newton_schulz", "TILE", {"M": 32, "K": 16}),
    ("fp8_gemm", "TILE", {"M": 16, "N": 32, "GROUP": 2}),
    ("fp8_gemm", "EACH", {"M": 16, "N": 16, "GROUP": 2}),
    ("fp8_grouped", "TILE", {"M": 16, "N": 32}),
    ("fp8_grouped", "EXACT", {"M": 16, "N": 32}),
    ("fp8_grouped", "EACH", {"M": 16, "N": 16}),
)


def interpret_kernels() -> None:
    """Make the public functions of kernels/ run their Triton kernels on a CPU, in this process."""
    importlib.import_module("interpreter")  # in tests/; it fixes Triton's interpreter
    kernels = importlib.import_module("kernels.triton_")
    kernels.DEVICES = ("cpu",)
    for module, table, tile in SMALL_TILES:
        owner = importlib.import_module(f"kernels.{module}")
        setattr(owner, table, getattr(owner, table) | tile)
