"""The largest attention score of each head: fused kernels of attention never return the scores.

On a GPU torch's flex_attention computes the scores of longer sequences once more, without storing them. A
small call is compared with the definition before its first use.
"""
import functools

import torch
from torch import Tensor

from kernels import attention_libraries
from kernels.attention_libraries import FLEX
from kernels.attention_mask import AttentionMask, make_attention_mask
from kernels.attention_scores import ScoreForm
from kernels.grad import accumulation_dtype
from kernels.linear import library_adds_in_fp32, multiply_into_fp32
from kernels.triton_ import print_once

CHUNK_SCORES = {"cpu": 1 << 20}  # scores computed together: 4 MiB in fp32, which stay in cache
DEFAULT_CHUNK_SCORES = 1 << 24  # the same on other devices: 64 MiB in fp32
TRIAL_LENGTHS = (150, 1, 105)  # tokens of the documents
TRIAL_ERROR = 0.01  # relative


@torch.no_grad()
def largest_scores(q: Tensor, k: Tensor, mask: AttentionMask, form: ScoreForm) -> Tensor:
    """Return for each head [h] the largest score of a query and a key that it sees, in fp32 or better.

    q [b, s_q, h, d], k [b, s_k, g, d], h a multiple of g. The score is what the softmax gets, as `form` has
    it; sinks do not count. NaN if a score is NaN, -inf if no query sees a key.
    """
    if takes_flex(q, k):
        return largest_by_flex(q, k, mask, form)
    return largest_in_chunks(q, k, mask, form)


# ---- flex_attention ----------------------------------------------------------------------------------------

def takes_flex(q: Tensor, k: Tensor) -> bool:
    """Whether flex_attention computes the scores of such tensors, and its trial call was right."""
    d = q.shape[-1]
    return (
        q.device.type in attention_libraries.DEVICES
        and q.dtype in attention_libraries.DTYPES
        and q.shape[1] >= attention_libraries.FLEX_MIN_LENGTH
        and attention_libraries.compute_capability(q.device) in FLEX.chips
        and FLEX.head_dims(d, d)
        and passes_trial(q.device, q.dtype, d, k.shape[2] < q.shape[2])
    )


def largest_by_flex(q: Tensor, k: Tensor, mask: AttentionMask, form: ScoreForm) -> Tensor:
    """Return largest_scores by flex_attention, of 16-bit products that are added in fp32."""
    from kernels import attention_flex  # imported only where it is used

    return attention_flex.largest_scores_by_query(q, k, mask, form).amax((0, 2))


@functools.cache
def passes_trial(device: torch.device, dtype: torch.dtype, head_dim: int, groups: bool) -> bool:
    """Whether flex_attention is right about documents of random tokens. If not, report why."""
    tokens = sum(TRIAL_LENGTHS)
    stream = torch.Generator().manual_seed(0)
    q, k = (torch.randn(1, tokens, heads, head_dim, generator=stream).to(device, dtype)
            for heads in (4, 2 if groups else 4))
    documents = torch.arange(len(TRIAL_LENGTHS)).repeat_interleave(torch.tensor(TRIAL_LENGTHS))
    mask = make_attention_mask(0, tokens, 0, tokens, None, documents[None].to(device), device)

    want = largest_in_chunks(q, k, mask, ScoreForm())
    try:
        found = largest_by_flex(q, k, mask, ScoreForm())
        error = ((found - want) / want).abs().max().item()
        why = None if error < TRIAL_ERROR else f"a wrong result, by {error:.2g}"  # NaN, too
    except Exception as error:  # torch's compiler raises its own classes
        why = (str(error) or type(error).__name__).splitlines()[0]
    if why is not None:
        print_once(f"largest attention scores: flex_attention is not used for head dim {head_dim}: {why}; "
                   "slower products in their place")
    return why is None


# ---- the definition ----------------------------------------------------------------------------------------

def largest_in_chunks(q: Tensor, k: Tensor, mask: AttentionMask, form: ScoreForm) -> Tensor:
    """Return largest_scores from the scores of some queries at a time."""
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
