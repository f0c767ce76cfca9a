"""A checksum of the bits of a tensor, computed on its device."""
import torch
from torch import Tensor

WORD = 8  # bytes that are added as one integer
COLUMNS = 64  # words with factors of their own, so that a number that moves changes the sum too


def checksum(x: Tensor) -> Tensor:
    """A sum of the bits of x as 64-bit integers, with overflow: int64 scalar on the device of x.

    A change of one number always changes it, since each word is multiplied by an odd factor. It reads x once,
    and copies it only where its bytes are no whole words.
    """
    data = x.detach().reshape(-1).view(torch.uint8)
    is_aligned = data.numel() % WORD == 0 and data.storage_offset() % WORD == 0
    if not is_aligned:
        data = torch.cat([data, data.new_zeros(-data.numel() % WORD)])
    words = data.view(torch.int64)
    factors = torch.arange(COLUMNS, device=x.device) * 2 + 1
    whole_rows = len(words) // COLUMNS * COLUMNS
    sums = words[:whole_rows].view(-1, COLUMNS).sum(0)
    rest = words[whole_rows:]
    return (sums * factors).sum() + (rest * factors[:len(rest)]).sum()
