"""Validation: the token-weighted mean loss of a fixed list of batches."""
import math

import torch

from parallel import comm


@torch.no_grad()
def mean_loss(stage, batches: list, mesh) -> float:
    """Mean loss in nats a counted token. stage(batch, scale) -> scale * summed loss; the sum and the count are global."""
    total = torch.zeros(2, dtype=torch.float64)
    for batch in batches:
        total += torch.stack([stage(batch, 1.0).double(), batch.counted().double()]).cpu()
    total = comm.sum_(total, mesh.loss)
    return float(total[0] / total[1])


def report(loss: float, bytes_per_token: float) -> dict[str, float]:
    """{'val_loss' nats a token, 'val_ppl', 'val_bpb' bits a byte of text}."""
    return {"val_loss": loss, "val_ppl": math.exp(min(loss, 700.0)), "val_bpb": loss / math.log(2) / bytes_per_token}
