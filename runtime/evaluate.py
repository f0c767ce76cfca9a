"""Validation: the token-weighted mean loss of a fixed list of batches, also in bits a byte of their text."""
import math
from collections.abc import Callable

import torch
from torch import Tensor

from parallel import comm
from parallel.comm import Group


def mean_loss(summed: Callable[[list], Tensor], batches: list, group: Group,
              text_bytes: Callable[[object], Tensor]) -> tuple[float, float]:
    """(mean loss in nats a counted token, bytes of text a counted token; nan without a tokenizer).

    summed(batches) -> their summed loss over all ranks; group: the ranks whose batches differ;
    text_bytes(batch) -> a float64 scalar, of its counted targets."""
    counted = torch.stack([sum(b.counted() for b in batches).double(), sum(text_bytes(b) for b in batches)])
    tokens, size = comm.sum_(counted, group).unbind()  # whole numbers below 2^53: exact
    return float(summed(batches).double() / tokens), float(size / tokens)


def report(loss: float, bytes_per_token: float) -> dict[str, float]:
    """{'val_loss' nats a token, 'val_ppl', 'val_bpb' bits a byte of the text that was predicted}.

    Loss and bytes are of the same tokens: under data.doc_mask the first of each document, which nothing
    predicts, is in neither."""
    bits = loss / math.log(2)
    return {"val_loss": loss, "val_ppl": math.exp(min(loss, 700.0)),
            "val_bpb": bits / bytes_per_token if bytes_per_token else math.inf}
