"""Rotary positions as complex numbers in fp64, and gradients as attention leaves them in memory."""

import torch

from kernels import rope


def tables_of(positions, frequencies, dtype, device, scale=1.0):
    cos, sin = rope.cos_sin_tables(positions, frequencies, dtype, scale)
    angles = positions[..., None, None] * frequencies
    turns = torch.polar(torch.full_like(angles, scale), angles)
    return cos.to(device), sin.to(device), turns.to(device)


def tables_of_training(training, rope_dim, theta):
    """Every sequence begins at position 0."""
    positions = torch.arange(training.seq).expand(training.batch, -1)
    return tables_of(positions, rope.frequencies(rope_dim, theta), torch.bfloat16, training.device)


def turned(x, turns, pairs):
    """Channels stay where they are."""
    if pairs:
        return torch.view_as_real(torch.view_as_complex(x.unflatten(-1, (-1, 2))) * turns).flatten(-2)
    left, right = x.chunk(2, -1)
    y = torch.complex(left, right) * turns
    return torch.cat((y.real, y.imag), -1)


def gradients_of(memory, dy, heads):
    """The gradients of q, k and v as some attention leaves them in memory."""
    parts = dy.clone().split(heads, 2)
    if memory == "apart":
        return [x.clone() for x in parts]
    if memory == "head by head":
        return [x.transpose(1, 2).contiguous().transpose(1, 2) for x in parts]
    if memory == "transposed":
        return [x.transpose(1, 3).contiguous().transpose(1, 3) for x in parts]
    return parts
