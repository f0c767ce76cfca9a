"""Copies of the heads of a token, for Triton kernels."""
from kernels.tiles import inside_matrix, tile_offsets
from kernels.triton_ import tl, triton


@triton.jit
def copy_heads(
    X, Y, heads, x_stride, y_stride,
    WIDTH: tl.constexpr,
    HEADS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Copy the first WIDTH channels of the heads of one token of X to Y. HEADS at a time."""
    channels = tl.arange(0, BLOCK)
    for first in range(0, heads, HEADS):
        head = first + tl.arange(0, HEADS)
        inside = inside_matrix(head, channels, heads, WIDTH)
        values = tl.load(X + tile_offsets(head, channels, x_stride), inside)
        tl.store(Y + tile_offsets(head, channels, y_stride), values, inside)
