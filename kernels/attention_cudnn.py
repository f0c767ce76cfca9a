"""cuDNN's attention over packed documents: NVIDIA's package nvidia-cudnn-frontend, or torch's binding of it.

cuDNN takes all tokens concatenated with the ends of the documents, grouped queries, and q, k and v that are
adjacent in memory. It takes no window here, and is not asked for determinism: torch cannot request it, and on
Hopper cuDNN before 9.25 needs memory quadratic in the total number of tokens for it
(github.com/NVIDIA/cudnn-frontend/pull/398).

A plan depends on sizes, not on values: the number of documents, a bound on the longest, the shape and strides
of q, k and v. It is built at the first call, in some tens to hundreds of milliseconds, and cached. So the
bound is rounded up to a power of two, and so is the number of documents, by adding empty ones. cuDNN before
9.25 returns NaN for these (github.com/NVIDIA/cudnn-frontend/issues/943): there each number has its own plan.

torch has the operation, too. Before torch 2.14 it does not cache the plan, so that every call costs as much
as the first (github.com/pytorch/pytorch/pull/191576). Its backward confused the head dim with the bound, and
wrote past a buffer (github.com/pytorch/pytorch/pull/186142): an illegal access, after which the process has
lost its GPU. No trial survives that, so versions without the first fix, the later of the two, are detected by
the operation's signature and not tried.
"""
import torch
from torch import Tensor

from kernels.attention_mask import DocumentCounts, PackedDocuments
from kernels.triton_ import power_of_2

MIN_CUDNN = 91800  # torch's own cuDNN path for documents requires it
CUDNN_WITH_EMPTY_DOCUMENTS = 92500
SHORTEST_BOUND = 256  # tokens: torch refuses bounds up to 128
MAX_HEAD_DIM = 128  # above it, cuDNN only has backwards for some chips and head dims
MAX_PADDING = 8  # through torch, the backward pads its fp32 dq to at most this many times the tokens


def head_dims(d: int, e: int) -> bool:
    """Whether cuDNN takes these head dims (keys: d, values: e) on Hopper and Blackwell."""
    return d % 8 == e % 8 == 0 and max(d, e) <= MAX_HEAD_DIM


def for_few_plans(packed: PackedDocuments) -> PackedDocuments:
    """Return the same documents, with the number and the bound rounded so that plans are shared."""
    ends, number = packed.ends, packed.number
    takes_empty_documents = (torch.backends.cudnn.version() or 0) >= CUDNN_WITH_EMPTY_DOCUMENTS
    if takes_empty_documents and number < power_of_2(number):
        number = power_of_2(number)
        ends = torch.cat((ends, ends[-1:].expand(number - packed.number)))
    longest = max(power_of_2(packed.longest), SHORTEST_BOUND)
    return PackedDocuments(ends, number, longest, packed.window)


def padding_fits_torch(documents: DocumentCounts, tokens: int) -> bool:
    """Whether the dq buffer of torch's backward is small enough. tokens counts all documents."""
    planned = power_of_2(documents.number) * max(power_of_2(documents.longest), SHORTEST_BOUND)
    return planned <= MAX_PADDING * tokens


def has_kept_plans() -> bool:
    """Whether torch's operation caches its plans, recognized by its `block_table` argument."""
    signature = torch.ops.aten._cudnn_attention_forward.default._schema
    return "block_table" in {argument.name for argument in signature.arguments}


def why_not_in_torch() -> str | None:
    """Return why torch's operation cannot be used at all; None if it can."""
    if torch.version.hip:
        return "ROCm has no cuDNN"
    if not has_kept_plans():
        return (f"torch {torch.__version__} makes a plan at every call, and its backward may write past "
                "a buffer; torch 2.14 and the package nvidia-cudnn-frontend do not")
    version = torch.backends.cudnn.version() or 0
    return f"it needs cuDNN {MIN_CUDNN}, and this is {version}" if version < MIN_CUDNN else None


def torch_attention(
    q: Tensor, k: Tensor, v: Tensor, packed: PackedDocuments, scale: float | None = None
) -> Tensor:
    """Causal attention within documents, by torch's operation.

    q [tokens, h, d], k [tokens, g, d], v [tokens, g, e] -> [tokens, h, e].
    A document has equally many queries and keys, so it does not matter that this operation aligns the first
    query with the first key.
    """
    packed = for_few_plans(packed)
    results = torch.ops.aten._cudnn_attention_forward(
        q, k, v,
        attn_bias=None,
        cum_seq_q=packed.ends,
        cum_seq_k=packed.ends,
        max_q=packed.longest,
        max_k=packed.longest,
        compute_log_sumexp=True,
        is_causal=True,
        scale=scale,
    )
    return results[0]
