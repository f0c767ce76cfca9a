"""A checksum of a tensor's bits, computed on its device."""
import torch
from torch import Tensor

WORD = 8  # bytes that are summed as one integer
COLUMNS = 64  # words with distinct factors, so that moving a number changes the sum too


def checksum(x: Tensor) -> Tensor:
    """Sum the bits of x as 64-bit integers, with overflow: an int64 scalar on the device of x.

    Changing a single number always changes it, since each word is multiplied by an odd factor. x is read
    once, and copied only if its bytes do not form whole words.
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
