"""Tiles for kernels in Triton's interpreter, whose time grows with the size of a tile."""

SMALL_TILES = (  # (module of kernels/, its table, tile)
    ("linear", "TILE", {"M": 16, "N": 32, "K": 16, "GROUP": 2}),
    ("grouped_gemm", "TILE", {"M": 16, "N": 32, "K": 16}),
    ("grouped_gemm", "WGRAD", {"M": 16, "N": 32, "K": 16}),
    ("fp8_gemm", "TILE", {"M": 16, "N": 32, "GROUP": 2}),
    ("fp8_gemm", "EACH", {"M": 16, "N": 16, "GROUP": 2}),
    ("fp8_grouped", "TILE", {"M": 16, "N": 32}),
    ("fp8_grouped", "EXACT", {"M": 16, "N": 32}),
    ("fp8_grouped", "EACH", {"M": 16, "N": 16}),
)
