"""Heads of multi-head latent attention (arXiv 2405.04434, section 2.1.3): channels without positions, then
rotated ones. All heads share the rotated part of the keys.

Channels 2i and 2i + 1 that rotate together (DeepSeek) become channels i and i + d/2, as in kernels/rope.py.
Scores are the same, since queries and keys have the same order.
"""
import torch
from torch import Tensor

from kernels.rope import apply_rope, pairs_to_halves


def rotate_heads(
    x: Tensor,
    cos: Tensor,
    sin: Tensor,
    *,
    nope_dim: int,
    pairs: bool,
    scale: float = 1.0,
    compiled: bool = False,
) -> Tensor:
    """Rotate the channels after the first nope_dim, and multiply all by `scale`.

    x [b, s, h, nope + rope], cos and sin [b, s, 1, rope/2] -> [b, s, h, nope + rope]. pairs: channels 2i and
    2i + 1 rotate together, else i and i + rope/2.
    """
    nope, rotated = x.split((nope_dim, x.shape[-1] - nope_dim), -1)
    if scale != 1:
        nope = nope * scale
        cos, sin = cos * scale, sin * scale
    rotated = rotate_channels(rotated, cos, sin, pairs, compiled)
    return torch.cat((nope, rotated), -1) if nope_dim else rotated


def keys_and_values(
    kv: Tensor,
    rope_key: Tensor,
    angles: tuple[Tensor, Tensor] | None,
    *,
    nope_dim: int,
    pairs: bool,
    compiled: bool = False,
) -> tuple[Tensor, Tensor]:
    """Return the keys of all heads, from their own channels and the shared rotated ones; and the values.

    kv [b, s, h, nope + v], rope_key [b, s, rope] -> k [b, s, h, nope + rope], v [b, s, h, v], a view of kv.
    angles are cos and sin [b, s, 1, rope/2], or None if rotate_heads has rotated the key. pairs: see there.
    """
    rope_key = rope_key[:, :, None]  # one head
    if angles is not None:
        rope_key = rotate_channels(rope_key, *angles, pairs, compiled)
    k_nope, v = kv.split((nope_dim, kv.shape[-1] - nope_dim), -1)
    k_rope = rope_key.expand(-1, -1, kv.shape[2], -1)
    return torch.cat((k_nope, k_rope), -1), v


def rotate_channels(x: Tensor, cos: Tensor, sin: Tensor, pairs: bool, compiled: bool) -> Tensor:
    """Rotate all channels of x [b, s, h, rope]: the result has channels i and i + rope/2 as pairs."""
    if pairs:
        x = pairs_to_halves(x)
    return apply_rope(x, cos, sin, compiled)
