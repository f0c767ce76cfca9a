"""The largest attention score of each head: fused kernels never hold the scores."""
import torch
from torch import Tensor

from kernels.attention_mask import AttentionMask
from kernels.attention_scores import ScoreForm
from kernels.grad import accumulation_dtype
from kernels.linear import library_adds_in_fp32, multiply_into_fp32

CHUNK_SCORES = {"cpu": 1 << 20}  # scores computed together: 4 MiB in fp32, which stay in cache
DEFAULT_CHUNK_SCORES = 1 << 24  # the same on other devices: 64 MiB in fp32


@torch.no_grad()
def largest_scores(q: Tensor, k: Tensor, mask: AttentionMask, form: ScoreForm) -> Tensor:
    """Return for each head [h] the largest score of a query and a key that it sees, in fp32 or better.

    q [b, s_q, h, d], k [b, s_k, g, d], h a multiple of g. The score is what the softmax gets, as `form` has
    it; sinks do not count. NaN if a score is NaN, -inf if no query sees a key.
    """
    b, s_q, h, d = q.shape
    s_k, groups = k.shape[1:3]
    dtype = accumulation_dtype(q.dtype)
    largest = torch.full((h,), float("-inf"), dtype=dtype, device=q.device)
    if not library_adds_in_fp32(q.device, q.dtype):
        q, k = q.to(dtype), k.to(dtype)
    keys = k.permute(0, 2, 3, 1).flatten(0, 1)  # [b g, d, s_k]
    size = max(1, CHUNK_SCORES.get(q.device.type, DEFAULT_CHUNK_SCORES) // (b * h * s_k))  # queries
    for start in range(0, s_q, size):
        n = min(size, s_q - start)
        first = mask.query_start + start
        end = min(s_k, first + n - mask.key_start)  # later keys are not seen
        if end <= 0:
            continue
        queries = q[:, start:start + n].unflatten(2, (groups, -1)).permute(0, 2, 3, 1, 4)
        rows = queries.reshape(b * groups, -1, d)  # [b g, h/g n, d]
        products = multiply_into_fp32(rows, keys[..., :end]).view(b, h, n, end)
        visible = mask.part(first, n, mask.key_start, end).dense_mask  # [b or 1, 1, n, end]
        largest = torch.maximum(largest, products.masked_fill_(~visible, float("-inf")).amax((0, 2, 3)))
    return form.capped(largest / form.divisor(d))  # both keep the order of the products
