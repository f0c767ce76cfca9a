"""Validation: the token-weighted mean loss of a fixed list of batches."""
import math
from collections.abc import Callable

from torch import Tensor

from parallel import comm
from parallel.comm import Group


def mean_loss(summed: Callable[[list], Tensor], batches: list, group: Group) -> float:
    """Mean loss in nats a counted token. summed(batches) -> their summed loss over all ranks; group: the ranks whose
    batches differ."""
    count = comm.sum_(sum(b.counted() for b in batches), group)
    return float(summed(batches).double() / count)


def report(loss: float, bytes_per_token: float) -> dict[str, float]:
    """{'val_loss' nats a token, 'val_ppl', 'val_bpb' bits a byte of text}."""
    return {"val_loss": loss, "val_ppl": math.exp(min(loss, 700.0)), "val_bpb": loss / math.log(2) / bytes_per_token}
