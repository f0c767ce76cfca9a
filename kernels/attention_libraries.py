"""Attention by libraries: flash-attn (arXiv 2205.14135, 2307.08691, 2407.08608), cuDNN for packed documents
(kernels/attention_cudnn.py), torch's copy of version 2 of flash-attn, and torch's flex_attention
(kernels/attention_flex.py).

One table lists what each library supports. Before a library is used for a kind of call, one small call of
that kind, forward and backward, is compared with the reference: versions differ in what they accept. The host
waits for this once for each kind. A library that fails is reported once on stderr, and the next one is tried.

Packed documents, chunks, and windows in torch use variable-length functions: all tokens of the microbatch are
concatenated, and `ends` marks where each document or chunk ends. flex_attention takes the mask itself.
"""
import functools
import importlib
import inspect
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from kernels import attention_cudnn
from kernels.attention_mask import (
    AttentionMask,
    DocumentCounts,
    MaskLike,
    PackedDocuments,
    make_attention_mask,
)
from kernels.attention_scores import PLAIN_SCORES, ScoreForm, join_sinks
from kernels.triton_ import print_once

DEVICES = ("cuda",)  # where libraries run; the tests add "cpu", for test libraries
DTYPES = (torch.bfloat16, torch.float16)
MAX_HEAD_DIM = 256
TORCH_HEAD_DIMS = (32, 64, 96, 128, 192, 256)  # torch's kernels are compiled for these
FLEX_MIN_HEAD_DIM = 16
FLEX_MIN_LENGTH = 1024  # queries of a sequence: with fewer, compiling flex_attention costs more than it saves
# In the backward, these libraries pad each document to 128 queries in their fp32 buffers. With a shorter mean
# document that would more than double them.
MIN_MEAN_DOCUMENT = 128  # tokens

Function = Callable[..., Tensor | tuple[Tensor, ...]]


class Request(NamedTuple):
    """Options of a call besides its tensors. packed is None for whole sequences. with_lse also returns the
    logsumexp of the scores, with gradients. mask, with all of its limits, is for libraries that take any."""
    packed: PackedDocuments | None
    window: int | None
    form: ScoreForm = PLAIN_SCORES
    with_lse: bool = False
    mask: AttentionMask | None = None

    def options(self, scale_name: str) -> dict[str, object]:
        """Return the scale as the argument of this name, unless it is the library's default."""
        return {} if self.form.scale is None else {scale_name: self.form.scale}


def multiple_of_8(d: int, e: int) -> bool:
    """Whether head dims (keys: d, values: e) are equal, and supported by every version of flash-attn."""
    return d == e and d <= MAX_HEAD_DIM and d % 8 == 0


def multiple_of_8_or_latent(d: int, e: int) -> bool:
    """Whether multiple_of_8 holds, or head dims are those of latent attention (keys: 192, values: 128)."""
    return multiple_of_8(d, e) or (d, e) == (192, 128)


def torch_head_dims(d: int, e: int) -> bool:
    return d == e and d in TORCH_HEAD_DIMS


def flex_head_dims(d: int, e: int) -> bool:
    return min(d, e) >= FLEX_MIN_HEAD_DIM and max(d, e) <= MAX_HEAD_DIM


@dataclass(frozen=True)
class Library:
    """Features of a library: DTYPES, grouped queries, causal attention over sequences of equal lengths.

    name is for messages. chips are major compute capabilities. head_dims accepts those of keys and values.
    function takes whole sequences, with or without a window; None if there is none. packed_function takes
    packed documents, with or without a window. windows and softcap: it supports these. lse: it returns the
    logsumexp, and its backward takes the gradient of it. any_mask: it takes each AttentionMask as it is,
    whole sequences included. deterministic: it can be asked for bitwise reproducible results. fits: whether
    it takes such documents with this total number of tokens. why_not: why the installed version cannot be
    used at all; None if it can.
    """
    name: str
    module: str
    chips: tuple[int, ...]
    head_dims: Callable[[int, int], bool]
    function: str | None
    packed_function: str | None
    call: Callable[[Function, Tensor, Tensor, Tensor, Request], tuple[Tensor, Tensor | None]]
    windows: bool = True
    softcap: bool = False
    lse: bool = False
    any_mask: bool = False
    deterministic: bool = True
    fits: Callable[[DocumentCounts, int], bool] = lambda documents, tokens: True
    why_not: Callable[[], str | None] = lambda: None


def call_flash_attn(
    function: Function, q: Tensor, k: Tensor, v: Tensor, request: Request
) -> tuple[Tensor, Tensor | None]:
    """q, k, v [b, s, heads, d], or packed [tokens, heads, d] -> out, and on request lse [b, s, heads], or
    [tokens, heads]. All versions align the last query with the last key, and do not count the query itself in
    a window."""
    options = request.options("softmax_scale")
    if request.window is not None:
        options["window_size"] = (request.window - 1, 0)
    if request.form.softcap is not None:
        options["softcap"] = request.form.softcap
    if request.with_lse:
        options["return_lse"] = True  # for version 4; the others have no gradient of it
    packed = request.packed
    if packed is not None:
        options |= {
            "cu_seqlens_q": packed.ends,
            "cu_seqlens_k": packed.ends,
            "max_seqlen_q": packed.longest,
            "max_seqlen_k": packed.longest,
        }
    deterministic = torch.are_deterministic_algorithms_enabled()
    out = function(q, k, v, causal=True, deterministic=deterministic, **options)
    if not isinstance(out, tuple):  # versions differ in further results
        return out, None
    return out[0], out[1].transpose(-1, -2) if request.with_lse else None


def call_torch(
    function: Function, q: Tensor, k: Tensor, v: Tensor, request: Request
) -> tuple[Tensor, Tensor | None]:
    """Like call_flash_attn, always packed. Deterministic if torch is asked to be."""
    packed = request.packed
    assert packed is not None  # the table has no function for whole sequences
    left = -1 if request.window is None else request.window - 1
    options = request.options("scale") | {"window_size": (left, 0)}
    if "enable_gqa" in inspect.signature(function).parameters:  # earlier versions support groups implicitly
        options["enable_gqa"] = q.shape[1] != k.shape[1]
    out = function(q, k, v, packed.ends, packed.ends, packed.longest, packed.longest, **options)
    assert isinstance(out, Tensor)  # no auxiliary output is requested
    return out, None


def call_cudnn_frontend(
    function: Function, q: Tensor, k: Tensor, v: Tensor, request: Request
) -> tuple[Tensor, Tensor | None]:
    """Like call_flash_attn, always packed and without a window."""
    assert request.packed is not None and request.window is None  # guaranteed by the table
    packed = attention_cudnn.for_few_plans(request.packed)
    out = function(
        q, k, v,
        is_causal=True,
        cu_seqlens_q=packed.ends,
        cu_seqlens_kv=packed.ends,
        max_seqlen_q=packed.longest,
        max_seqlen_kv=packed.longest,
        return_lse=True,  # needed by its backward
        **request.options("scale"),
    )
    return out[0], None


def call_cudnn_in_torch(
    function: Function, q: Tensor, k: Tensor, v: Tensor, request: Request
) -> tuple[Tensor, Tensor | None]:
    """Like call_flash_attn, always packed and without a window."""
    assert request.packed is not None and request.window is None  # guaranteed by the table
    out = function(q, k, v, request.packed, **request.options("scale"))
    assert isinstance(out, Tensor)
    return out, None


def call_flex(
    function: Function, q: Tensor, k: Tensor, v: Tensor, request: Request
) -> tuple[Tensor, Tensor | None]:
    """Like call_flash_attn, never packed."""
    return function(q, k, v, request.mask, request.form, request.with_lse)


FLEX = Library(
    name="torch.nn.attention.flex_attention",
    module="kernels.attention_flex",
    chips=(8, 9, 10, 12),
    head_dims=flex_head_dims,
    function="masked_attention",
    packed_function=None,
    call=call_flex,
    softcap=True,
    lse=True,
    any_mask=True,
)

# In order of preference: versions 3 and 4 of flash-attn, cuDNN, version 2 of flash-attn, torch's copy of it,
# and flex_attention for what these leave
LIBRARIES = (
    Library(
        name="flash_attn_interface",
        module="flash_attn_interface",
        chips=(9,),
        head_dims=multiple_of_8_or_latent,
        function="flash_attn_func",
        packed_function="flash_attn_varlen_func",
        call=call_flash_attn,
        softcap=True,
    ),
    Library(
        name="flash_attn.cute",
        module="flash_attn.cute",
        chips=(9, 10),
        head_dims=multiple_of_8_or_latent,
        function="flash_attn_func",
        packed_function="flash_attn_varlen_func",
        call=call_flash_attn,
        softcap=True,
        lse=True,
    ),
    Library(
        name="cuDNN (nvidia-cudnn-frontend)",
        module="cudnn",
        chips=(9, 10),
        head_dims=attention_cudnn.head_dims,
        function=None,  # SDPA covers it
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
        function=None,  # SDPA covers it
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
        softcap=True,
    ),
    Library(
        name="torch.nn.attention.varlen",
        module="torch.nn.attention.varlen",
        chips=(8, 9, 10, 12),
        head_dims=torch_head_dims,
        function=None,  # SDPA covers it
        packed_function="varlen_attn",
        call=call_torch,
    ),
    FLEX,
)


@functools.cache
def installed_function(module: str, name: str) -> Function | None:
    try:
        return getattr(importlib.import_module(module), name)
    except (ImportError, AttributeError, OSError):  # OSError: a shared library fails to load
        return None


def compute_capability(device: torch.device) -> int:
    """Return the major compute capability; Hopper's for a device without one."""
    return torch.cuda.get_device_capability(device)[0] if device.type == "cuda" else 9


@dataclass(frozen=True)
class Choice:
    """A library for one kind of call, and how to express the call for it."""
    library: Library
    function: Function
    is_packed: bool


def choose_library(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    mask: MaskLike,
    form: ScoreForm = PLAIN_SCORES,
    has_sinks: bool = False,
) -> Choice | None:
    """Return the preferred installed library that supports the call, or None. See `attention`."""
    return next(usable_libraries(q, k, v, mask, form, has_sinks), None)


def usable_libraries(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    mask: MaskLike,
    form: ScoreForm = PLAIN_SCORES,
    has_sinks: bool = False,
) -> Iterator[Choice]:
    """Yield all such libraries in order of preference. Each is tried when requested."""
    if isinstance(mask, Tensor) or (mask is None and q.shape[1] != k.shape[1]):
        return
    if q.device.type not in DEVICES or q.dtype not in DTYPES:
        return
    is_plain = mask is None and form.softcap is None and not has_sinks
    kind = classify_call(q, mask)
    head_dims = q.shape[-1], v.shape[-1]
    groups = k.shape[2] < q.shape[2]
    deterministic = torch.are_deterministic_algorithms_enabled()
    for library in LIBRARIES:
        if compute_capability(q.device) not in library.chips or not library.head_dims(*head_dims):
            continue
        if deterministic and not library.deterministic:
            continue
        if (form.softcap is not None and not library.softcap) or (has_sinks and not library.lse):
            continue
        if library.any_mask:
            if is_plain or q.shape[1] < FLEX_MIN_LENGTH:  # SDPA covers what is plain
                continue
            is_packed, has_window = False, True
        elif kind is None or not takes(library, kind, q.shape[0] * q.shape[1]):
            continue
        else:
            is_packed = kind.documents is not None or (library.function is None and kind.window)
            has_window = kind.window
        name = library.packed_function if is_packed else library.function
        function = None if name is None else installed_function(library.module, name)
        if function is None:
            continue
        choice = Choice(library, function, is_packed)
        trial = get_trial(has_window, form, has_sinks)
        if passes_trial(choice, q.device, q.dtype, head_dims, groups, trial, deterministic):
            yield choice


@dataclass(frozen=True)
class CallKind:
    documents: DocumentCounts | None  # or chunks; None for whole sequences
    window: bool


def takes(library: Library, kind: CallKind, tokens: int) -> bool:
    """Whether a library that takes documents and windows by its arguments supports such a call."""
    if kind.window and not library.windows:
        return False
    return kind.documents is None or library.fits(kind.documents, tokens)


def classify_call(q: Tensor, mask: AttentionMask | None) -> CallKind | None:
    """Classify the call that a mask requires. None if only a library that takes any mask takes it."""
    if mask is None:
        return CallKind(documents=None, window=False)
    tokens = q.shape[0] * q.shape[1]
    documents = None if mask.packed is None else DocumentCounts(mask.packed.number, mask.packed.longest)
    if mask.chunk is not None:
        documents = DocumentCounts(tokens // mask.chunk, mask.chunk)
    has_window = (mask if mask.packed is None else mask.packed).window is not None
    if documents is not None:
        return CallKind(documents, has_window) if tokens / documents.number >= MIN_MEAN_DOCUMENT else None
    return CallKind(documents=None, window=True) if has_window else None


def library_attention(
    choice: Choice,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    mask: AttentionMask | None,
    form: ScoreForm = PLAIN_SCORES,
    sinks: Tensor | None = None,
) -> Tensor:
    """q [b, s_q, h, d], k [b, s_k, g, d], v [b, s_k, g, e] -> [b, s_q, h, e], by choose_library's choice."""
    request = Request(None, None if mask is None else mask.window, form, sinks is not None, mask)
    if not choice.is_packed:
        return with_sinks(*choice.library.call(choice.function, q, k, v, request), sinks)

    assert mask is not None  # packed tokens have a mask
    packed = mask.packed
    if packed is None:
        packed = equal_documents(q.shape[0] * q.shape[1], mask.chunk or q.shape[1], mask.window, q.device)
    q_tokens, k_tokens, v_tokens = (x.flatten(0, 1) for x in (q, k, v))
    request = request._replace(packed=packed, window=packed.window)
    results = choice.library.call(choice.function, q_tokens, k_tokens, v_tokens, request)
    return with_sinks(*results, sinks).unflatten(0, q.shape[:2])


def with_sinks(out: Tensor, lse: Tensor | None, sinks: Tensor | None) -> Tensor:
    """Add the sinks of the call to a library's result."""
    if sinks is None:
        return out
    assert lse is not None  # guaranteed by the table
    return join_sinks(out, lse, sinks)


def equal_documents(tokens: int, length: int, window: int | None, device: torch.device) -> PackedDocuments:
    """Describe documents of `length` tokens each: whole sequences, or their chunks."""
    ends = torch.arange(0, tokens + 1, length, dtype=torch.int32, device=device)
    return PackedDocuments(ends, number=tokens // length, longest=length, window=window)


# ---- trial -------------------------------------------------------------------------------------------------

TRIAL_LENGTHS = (150, 1, 105)  # tokens of the documents
TRIAL_WINDOW = 40
TRIAL_SCALE = 0.2
TRIAL_SOFTCAP = 1.5  # bends most scores
TRIAL_SINK = 4.0  # close to the logsumexp of the other scores
TRIAL_ERROR = 0.02  # relative, of bf16


class Trial(NamedTuple):
    window: int | None
    form: ScoreForm
    has_sinks: bool


def get_trial(window: bool, form: ScoreForm, has_sinks: bool) -> Trial:
    """Return the shared trial of all calls with these options."""
    scale = None if form.scale is None else TRIAL_SCALE
    softcap = None if form.softcap is None else TRIAL_SOFTCAP
    return Trial(TRIAL_WINDOW if window else None, ScoreForm(scale, softcap), has_sinks)


@functools.cache
def passes_trial(
    choice: Choice,
    device: torch.device,
    dtype: torch.dtype,
    head_dims: tuple[int, int],
    groups: bool,
    trial: Trial,
    deterministic: bool,
) -> bool:
    """Whether the library computes such a call correctly, forward and backward. If not, report why."""
    why = obstacle(choice, device, dtype, head_dims, groups, trial)
    if why is not None:
        asked = {
            "documents": choice.is_packed or choice.library.any_mask,
            "a window": trial.window is not None,
            "a scale": trial.form.scale is not None,
            "a soft cap": trial.form.softcap is not None,
            "sinks": trial.has_sinks,
        }
        listed = "".join(f", {what}" for what, is_requested in asked.items() if is_requested)
        print_once(f"attention: {choice.library.name} is installed but not used for head dims "
                   f"{head_dims[0]} and {head_dims[1]}{listed}: {why}")
    return why is None


def obstacle(
    choice: Choice,
    device: torch.device,
    dtype: torch.dtype,
    head_dims: tuple[int, int],
    groups: bool,
    trial: Trial,
) -> str | None:
    """Return why the library cannot be used; None if it can."""
    why = choice.library.why_not()
    if why is not None:
        return why
    d, e = head_dims
    tokens = sum(TRIAL_LENGTHS)
    lengths = TRIAL_LENGTHS if choice.is_packed or choice.library.any_mask else (tokens,)
    stream = torch.Generator().manual_seed(0)
    inputs = [torch.randn(tokens, heads, dim, generator=stream) for heads, dim in ((4, d), (2, d), (2, e))]
    if not groups:
        inputs = [x[:, :2] for x in inputs]
    grad = torch.randn(tokens, inputs[0].shape[1], e, generator=stream).to(device, dtype)
    inputs = [x.to(device, dtype) for x in inputs]
    sinks = torch.full(inputs[0].shape[1:2], TRIAL_SINK, device=device) if trial.has_sinks else None

    def run(attend: Callable[[Tensor, Tensor, Tensor], Tensor]) -> list[Tensor]:
        with torch.enable_grad():
            if d == e:  # adjacent in memory, like the merged projection's
                merged = torch.cat(inputs, 1).requires_grad_()
                parts = merged.split([x.shape[1] for x in inputs], 1)
            else:
                parts = tuple(x.clone().requires_grad_() for x in inputs)
            out = attend(*parts)
            return [out.detach(), *torch.autograd.grad(out, parts, grad.to(out.dtype))]

    def attend_by_library(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        request = Request(None, trial.window, trial.form, trial.has_sinks)
        if choice.library.any_mask:
            docs = torch.arange(len(lengths)).repeat_interleave(torch.tensor(lengths)).to(device)
            mask = make_attention_mask(0, tokens, 0, tokens, trial.window, docs[None], device)
            request = request._replace(mask=mask)
        if not choice.is_packed:
            results = choice.library.call(choice.function, q[None], k[None], v[None], request)
            return with_sinks(*results, sinks)[0]
        ends = torch.zeros(len(lengths) + 1, dtype=torch.int32)
        ends[1:] = torch.tensor(lengths).cumsum(0)
        packed = PackedDocuments(ends.to(device), len(lengths), max(lengths), trial.window)
        results = choice.library.call(choice.function, q, k, v, request._replace(packed=packed))
        return with_sinks(*results, sinks)

    def attend_by_definition(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return packed_reference(q.float(), k.float(), v.float(), lengths, trial)

    try:
        found = run(attend_by_library)
    except Exception as error:  # libraries raise their own classes
        return (str(error) or type(error).__name__).splitlines()[0]
    for got, want in zip(found, run(attend_by_definition)):
        error = (got.float() - want.float()).norm() / want.float().norm()
        if not error < TRIAL_ERROR:  # fails for NaN too
            return f"a wrong result, by {error:.2g}"
    return None


def packed_reference(
    q: Tensor, k: Tensor, v: Tensor, lengths: tuple[int, ...], trial: Trial
) -> Tensor:
    """Reference causal attention within documents. q, k, v [tokens, heads, d] -> [tokens, h, e]."""
    window, form = trial.window, trial.form
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
        scores = form.capped(torch.einsum("qhd,khd->hqk", q_part, keys) / form.divisor(q.shape[-1]))
        scores = scores.masked_fill(~visible, float("-inf"))
        sink = TRIAL_SINK if trial.has_sinks else float("-inf")
        probs = torch.nn.functional.pad(scores, (0, 1), value=sink).softmax(-1)[..., :-1]
        parts.append(torch.einsum("hqk,khe->qhe", probs, values))
    return torch.cat(parts)
