"""Attention by libraries: flash-attn (arXiv 2205.14135, 2307.08691, 2407.08608), cuDNN for packed documents
(kernels/attention_cudnn.py), and torch's copy of version 2 of flash-attn.

One table says what each library supports. Before a library is used for a kind of call, one small call of
that kind, forward and backward, is compared with the definition: versions differ in what they accept. The
host waits for this once for each kind. A library that fails is named once on stderr, and the next one is
tried.

Packed documents, and windows in torch, go to functions of variable length: all tokens of the microbatch
follow each other, and `ends` says where each document ends.
"""
import functools
import importlib
import inspect
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from kernels import attention_cudnn
from kernels.attention_mask import AttentionMask, MaskLike, PackedDocuments
from kernels.triton_ import print_once

DEVICES = ("cuda",)  # where libraries run; the tests add "cpu", for libraries of their own
DTYPES = (torch.bfloat16, torch.float16)
MAX_HEAD_DIM = 256
TORCH_HEAD_DIMS = (32, 64, 96, 128, 192, 256)  # what torch has compiled its kernels for
# In the backward, these libraries pad each document to 128 queries in what they keep in fp32. Where documents
# are shorter on average that would more than double it.
MIN_MEAN_DOCUMENT = 128  # tokens

Function = Callable[..., Tensor | tuple[Tensor, ...]]


def multiple_of_8(d: int, e: int) -> bool:
    """Whether head dims (of keys: d, of values: e) are equal, and what every version of flash-attn takes."""
    return d == e and d <= MAX_HEAD_DIM and d % 8 == 0


def multiple_of_8_or_latent(d: int, e: int) -> bool:
    """The same, or as latent attention has them: 192 for keys and 128 for values."""
    return multiple_of_8(d, e) or (d, e) == (192, 128)


def torch_head_dims(d: int, e: int) -> bool:
    return d == e and d in TORCH_HEAD_DIMS


@dataclass(frozen=True)
class Library:
    """What a library supports: DTYPES, grouped queries, causal attention over sequences of equal lengths.

    name: for people. chips: major compute capabilities. head_dims: which of keys and values. function: of
    whole sequences, with or without a window; None: it has none. packed_function: of packed documents, with
    or without a window. windows: whether it has them. deterministic: whether on request it gives the same
    bits every time. fits: whether it takes documents like these, of so many tokens together. why_not: why
    the installed version cannot be used, whatever the call; None: it can.
    """
    name: str
    module: str
    chips: tuple[int, ...]
    head_dims: Callable[[int, int], bool]
    function: str | None
    packed_function: str
    call: Callable[[Function, Tensor, Tensor, Tensor, PackedDocuments | None, int | None], Tensor]
    windows: bool = True
    deterministic: bool = True
    fits: Callable[[PackedDocuments, int], bool] = lambda packed, tokens: True
    why_not: Callable[[], str | None] = lambda: None


def call_flash_attn(
    function: Function, q: Tensor, k: Tensor, v: Tensor, packed: PackedDocuments | None, window: int | None
) -> Tensor:
    """q, k, v [b, s, heads, d], or packed [tokens, heads, d]. All versions align the last query with the last
    key, and count a window without the query itself."""
    options: dict[str, object] = {} if window is None else {"window_size": (window - 1, 0)}
    if packed is not None:
        options |= {
            "cu_seqlens_q": packed.ends,
            "cu_seqlens_k": packed.ends,
            "max_seqlen_q": packed.longest,
            "max_seqlen_k": packed.longest,
        }
    deterministic = torch.are_deterministic_algorithms_enabled()
    out = function(q, k, v, causal=True, deterministic=deterministic, **options)
    return out[0] if isinstance(out, tuple) else out  # versions differ in what they return besides


def call_torch(
    function: Function, q: Tensor, k: Tensor, v: Tensor, packed: PackedDocuments | None, window: int | None
) -> Tensor:
    """As call_flash_attn, always packed. Deterministic where torch is asked to be."""
    assert packed is not None  # the table has no function of whole sequences
    left = -1 if window is None else window - 1
    options: dict[str, object] = {"window_size": (left, 0)}
    if "enable_gqa" in inspect.signature(function).parameters:  # earlier versions take groups unasked
        options["enable_gqa"] = q.shape[1] != k.shape[1]
    out = function(q, k, v, packed.ends, packed.ends, packed.longest, packed.longest, **options)
    assert isinstance(out, Tensor)  # no auxiliary output is asked for
    return out


def call_cudnn_frontend(
    function: Function, q: Tensor, k: Tensor, v: Tensor, packed: PackedDocuments | None, window: int | None
) -> Tensor:
    """As call_flash_attn, always packed and without a window."""
    assert packed is not None and window is None  # as the table says
    packed = attention_cudnn.for_few_plans(packed)
    out = function(
        q, k, v,
        is_causal=True,
        cu_seqlens_q=packed.ends,
        cu_seqlens_kv=packed.ends,
        max_seqlen_q=packed.longest,
        max_seqlen_kv=packed.longest,
        return_lse=True,  # its backward needs it
    )
    return out[0]


def call_cudnn_in_torch(
    function: Function, q: Tensor, k: Tensor, v: Tensor, packed: PackedDocuments | None, window: int | None
) -> Tensor:
    """As call_flash_attn, always packed and without a window."""
    assert packed is not None and window is None  # as the table says
    out = function(q, k, v, packed)
    assert isinstance(out, Tensor)
    return out


# The preferred one first: versions 3 and 4 of flash-attn, cuDNN, version 2 of flash-attn, torch's copy of it
LIBRARIES = (
    Library(
        name="flash_attn_interface",
        module="flash_attn_interface",
        chips=(9,),
        head_dims=multiple_of_8_or_latent,
        function="flash_attn_func",
        packed_function="flash_attn_varlen_func",
        call=call_flash_attn,
    ),
    Library(
        name="flash_attn.cute",
        module="flash_attn.cute",
        chips=(9, 10),
        head_dims=multiple_of_8_or_latent,
        function="flash_attn_func",
        packed_function="flash_attn_varlen_func",
        call=call_flash_attn,
    ),
    Library(
        name="cuDNN (nvidia-cudnn-frontend)",
        module="cudnn",
        chips=(9, 10),
        head_dims=attention_cudnn.head_dims,
        function=None,  # SDPA has it
        packed_function="sdpa_torch",
        call=call_cudnn_frontend,
        windows=False,
        deterministic=False,
    ),
    Library(
        name="cuDNN (torch)",
        module="kernels.attention_cudnn",
        chips=(9, 10),
        head_dims=attention_cudnn.head_dims,
        function=None,  # SDPA has it
        packed_function="torch_attention",
        call=call_cudnn_in_torch,
        windows=False,
        deterministic=False,
        fits=attention_cudnn.padding_fits_torch,
        why_not=attention_cudnn.why_not_in_torch,
    ),
    Library(
        name="flash_attn",
        module="flash_attn",
        chips=(8, 9, 10, 12),
        head_dims=multiple_of_8,
        function="flash_attn_func",
        packed_function="flash_attn_varlen_func",
        call=call_flash_attn,
    ),
    Library(
        name="torch.nn.attention.varlen",
        module="torch.nn.attention.varlen",
        chips=(8, 9, 10, 12),
        head_dims=torch_head_dims,
        function=None,  # SDPA has it
        packed_function="varlen_attn",
        call=call_torch,
    ),
)


@functools.cache
def installed_function(module: str, name: str) -> Function | None:
    try:
        return getattr(importlib.import_module(module), name)
    except (ImportError, AttributeError, OSError):  # OSError: a shared library that does not load
        return None


def compute_capability(device: torch.device) -> int:
    """The major one; of a device without one, Hopper's."""
    return torch.cuda.get_device_capability(device)[0] if device.type == "cuda" else 9


@dataclass(frozen=True)
class Choice:
    """A library for one kind of call, and how the call is put to it."""
    library: Library
    function: Function
    is_packed: bool


def choose_library(q: Tensor, k: Tensor, v: Tensor, mask: MaskLike) -> Choice | None:
    """The preferred library that supports the call and is installed. None: there is none. As for `attention`.
    """
    return next(usable_libraries(q, k, v, mask), None)


def usable_libraries(q: Tensor, k: Tensor, v: Tensor, mask: MaskLike) -> Iterator[Choice]:
    """All such libraries, the preferred one first. Each is tried when it is asked for."""
    kind = kind_of_call(q, k, mask)
    if kind is None or q.device.type not in DEVICES or q.dtype not in DTYPES:
        return
    head_dims = q.shape[-1], v.shape[-1]
    groups = k.shape[2] < q.shape[2]
    deterministic = torch.are_deterministic_algorithms_enabled()
    for library in LIBRARIES:
        if compute_capability(q.device) not in library.chips or not library.head_dims(*head_dims):
            continue
        if (kind.window and not library.windows) or (deterministic and not library.deterministic):
            continue
        if kind.packed is not None and not library.fits(kind.packed, q.shape[0] * q.shape[1]):
            continue
        is_packed = kind.packed is not None or (library.function is None and kind.window)
        name = library.packed_function if is_packed else library.function
        function = None if name is None else installed_function(library.module, name)
        if function is None:
            continue
        choice = Choice(library, function, is_packed)
        if passes_trial(choice, q.device, q.dtype, head_dims, groups, kind.window, deterministic):
            yield choice


@dataclass(frozen=True)
class CallKind:
    packed: PackedDocuments | None  # None: whole sequences
    window: bool


def kind_of_call(q: Tensor, k: Tensor, mask: MaskLike) -> CallKind | None:
    """What a mask asks of a library. None: no library takes it."""
    if mask is None:
        return CallKind(packed=None, window=False) if q.shape[1] == k.shape[1] else None
    if isinstance(mask, Tensor):
        return None
    if mask.packed is not None:
        mean_document = q.shape[0] * q.shape[1] / mask.packed.number
        has_window = mask.packed.window is not None
        return CallKind(mask.packed, has_window) if mean_document >= MIN_MEAN_DOCUMENT else None
    if mask.window is None:
        return None
    return CallKind(packed=None, window=True)


def library_attention(choice: Choice, q: Tensor, k: Tensor, v: Tensor, mask: AttentionMask | None) -> Tensor:
    """q [b, s_q, h, d], k [b, s_k, g, d], v [b, s_k, g, e] -> [b, s_q, h, e], by choose_library's choice."""
    window = None if mask is None else mask.window
    if not choice.is_packed:
        return choice.library.call(choice.function, q, k, v, None, window)

    assert mask is not None  # what is packed has a mask
    packed = mask.packed
    if packed is None:
        packed = whole_sequences(q.shape[0], q.shape[1], window, q.device)
    q_tokens, k_tokens, v_tokens = (x.flatten(0, 1) for x in (q, k, v))
    out = choice.library.call(choice.function, q_tokens, k_tokens, v_tokens, packed, packed.window)
    return out.unflatten(0, q.shape[:2])


def whole_sequences(b: int, s: int, window: int | None, device: torch.device) -> PackedDocuments:
    """b sequences of s tokens, as documents."""
    ends = torch.arange(0, b * s + 1, s, dtype=torch.int32, device=device)
    return PackedDocuments(ends, number=b, longest=s, window=window)


# ---- the trial ---------------------------------------------------------------------------------------------

TRIAL_LENGTHS = (150, 1, 105)  # tokens of the documents
TRIAL_WINDOW = 40
TRIAL_ERROR = 0.02  # relative, of bf16


@functools.cache
def passes_trial(
    choice: Choice,
    device: torch.device,
    dtype: torch.dtype,
    head_dims: tuple[int, int],
    groups: bool,
    window: bool,
    deterministic: bool,
) -> bool:
    """Whether the library computes such a call right, forward and backward. If not, a line says why."""
    why = obstacle(choice, device, dtype, head_dims, groups, TRIAL_WINDOW if window else None)
    if why is not None:
        with_documents = ", documents" if choice.is_packed else ""
        with_window = ", a window" if window else ""
        print_once(f"attention: {choice.library.name} is installed but not used for head dims "
                   f"{head_dims[0]} and {head_dims[1]}{with_documents}{with_window}: {why}")
    return why is None


def obstacle(
    choice: Choice,
    device: torch.device,
    dtype: torch.dtype,
    head_dims: tuple[int, int],
    groups: bool,
    window: int | None,
) -> str | None:
    """Why the library cannot be used; None if it can."""
    why = choice.library.why_not()
    if why is not None:
        return why
    d, e = head_dims
    tokens = sum(TRIAL_LENGTHS)
    lengths = TRIAL_LENGTHS if choice.is_packed else (tokens,)
    stream = torch.Generator().manual_seed(0)
    inputs = [torch.randn(tokens, heads, dim, generator=stream) for heads, dim in ((4, d), (2, d), (2, e))]
    if not groups:
        inputs = [x[:, :2] for x in inputs]
    grad = torch.randn(tokens, inputs[0].shape[1], e, generator=stream).to(device, dtype)
    inputs = [x.to(device, dtype) for x in inputs]

    def run(attend: Callable[[Tensor, Tensor, Tensor], Tensor]) -> list[Tensor]:
        with torch.enable_grad():
            if d == e:  # beside each other in memory, as the merged projection leaves them
                merged = torch.cat(inputs, 1).requires_grad_()
                parts = merged.split([x.shape[1] for x in inputs], 1)
            else:
                parts = tuple(x.clone().requires_grad_() for x in inputs)
            out = attend(*parts)
            return [out.detach(), *torch.autograd.grad(out, parts, grad.to(out.dtype))]

    def attend_by_library(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        if not choice.is_packed:
            return choice.library.call(choice.function, q[None], k[None], v[None], None, window)[0]
        ends = torch.zeros(len(lengths) + 1, dtype=torch.int32)
        ends[1:] = torch.tensor(lengths).cumsum(0)
        packed = PackedDocuments(ends.to(device), number=len(lengths), longest=max(lengths), window=window)
        return choice.library.call(choice.function, q, k, v, packed, window)

    def attend_by_definition(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return packed_reference(q.float(), k.float(), v.float(), lengths, window)

    try:
        found = run(attend_by_library)
    except Exception as error:  # libraries have classes of their own
        return (str(error) or type(error).__name__).splitlines()[0]
    for got, want in zip(found, run(attend_by_definition)):
        error = (got.float() - want.float()).norm() / want.float().norm()
        if not error < TRIAL_ERROR:  # a NaN is no success
            return f"a wrong result, by {error:.2g}"
    return None


def packed_reference(
    q: Tensor, k: Tensor, v: Tensor, lengths: tuple[int, ...], window: int | None
) -> Tensor:
    """Causal attention within documents by the definition. q, k, v [tokens, heads, d] -> [tokens, h, e]."""
    heads_per_group = q.shape[1] // k.shape[1]
    parts: list[Tensor] = []
    for q_part, k_part, v_part in zip(q.split(lengths), k.split(lengths), v.split(lengths)):
        length = len(q_part)
        distance = torch.arange(length, device=q.device)[:, None] - torch.arange(length, device=q.device)
        visible = distance >= 0
        if window is not None:
            visible = visible & (distance < window)
        keys = k_part.repeat_interleave(heads_per_group, 1)  # [length, h, d]
        values = v_part.repeat_interleave(heads_per_group, 1)  # [length, h, e]
        scores = torch.einsum("qhd,khd->hqk", q_part, keys) / q.shape[-1] ** 0.5
        probs = scores.masked_fill(~visible, float("-inf")).softmax(-1)
        parts.append(torch.einsum("hqk,khe->qhe", probs, values))
    return torch.cat(parts)
