"""Validation: the mean loss of a fixed list of batches, per counted token and in bits per byte of text."""
import math
from collections.abc import Callable

import torch
from torch import Tensor

from parallel.microbatch import Microbatch
from parallel.wire import comm
from parallel.wire.comm import Group

MAX_EXPONENT = 700.0  # exp overflows a float soon after
NO_LOSS = {"val_loss": None, "val_ppl": None, "val_bpb": None}  # where no target counts


def mean_loss(
    batches: list[Microbatch],
    *,
    summed_loss: Callable[[list[Microbatch]], Tensor],
    text_bytes: Callable[[Microbatch], Tensor],
    group: Group,
) -> tuple[float | None, float]:
    """Returns (mean loss in nats per counted token, bytes of text per counted token).

    The first is None where no token counts, and the second nan there and without a tokenizer.

    summed_loss: batches -> their summed loss over all ranks.
    group: the ranks whose batches differ.
    text_bytes: a batch -> the bytes of its counted targets, an int64 scalar; below 0: not known.
    """
    own_tokens = torch.stack([batch.num_counted() for batch in batches]).sum()
    own_bytes = torch.stack([text_bytes(batch) for batch in batches]).sum()
    own_counts = torch.stack([own_tokens, own_bytes])
    loss_sum = float(summed_loss(batches))

    counts = comm.all_reduce_sum(own_counts, group)
    num_tokens, num_bytes = counts.tolist()
    if num_tokens == 0:
        return None, math.nan
    return loss_sum / num_tokens, num_bytes / num_tokens if num_bytes >= 0 else math.nan


def loss_report(loss: float, bytes_per_token: float) -> dict[str, float]:
    """Returns val_loss (nats per token), val_ppl (perplexity) and val_bpb (bits per byte of text).

    Loss and bytes are of the same tokens. Under data.doc_mask the first token of each document is in neither,
    because nothing predicts it.
    """
    bits = loss / math.log(2)
    return {
        "val_loss": loss,
        "val_ppl": math.exp(min(loss, MAX_EXPONENT)),
        "val_bpb": bits / bytes_per_token if bytes_per_token else math.inf,
    }
