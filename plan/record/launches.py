"""Record every launch of a GPU's step without a GPU.

The real train_step runs on tensors without storage (torch's meta device). Inside `simulated_gpu` the tensors
report a GPU as their device, and torch.cuda answers for a Chip, so the code takes the same paths as on the
GPU. A `Recorder` keeps each Triton kernel and each torch operation that would be launched, with its reads and
writes. Nothing is computed. If the host asks for a value, the recorder makes it up (True) and keeps the
caller, because on a GPU the host would wait.

The same Recorder can record a run on real tensors. tests/lab/benchmarks/test_step_model.py compares both,
launch by launch.
"""

import contextlib
import functools
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from types import FrameType, FunctionType, SimpleNamespace
from typing import Any
from unittest import mock

import torch
from torch import Tensor, nn
from torch.autograd.graph import get_gradient_edge, saved_tensors_hooks
from torch.nn.attention import SDPBackend
from torch.nn.modules import module as modules
from torch.overrides import TorchFunctionMode, _get_current_function_mode_stack
from torch.utils._python_dispatch import TorchDispatchMode

from kernels import (
    attention,
    attention_cudnn,
    attention_libraries,
    grouped_library,
    largest_score,
    linear,
    triton_,
)
from kernels.attention_mask import AttentionMask
from kernels.attention_scores import ScoreForm
from kernels.linear import multiply_into_fp32
from kernels.partial_attention import attention_part
from parallel.sharding import spec
from plan.record.events import Event, HostRead, OpBegins, OpEnds
from plan.record.kernel_source import TensorUse, bind_arguments, fixed_numbers, plain_function, tensors_used
from plan.record.memory import Holder, LiveBytes
from plan.record.streams import COMPUTE, SimulatedEvent, SimulatedStream, stream_context

ROOT = Path(__file__).resolve().parents[2]
# are not the code that is recorded
OWN_FILES = ("plan/record/", "lab/", "tests/", "scripts/dry_run.py")
META = torch.device("meta")
HOST = torch.device("cpu")
OUTSIDE = ("outside", "")


@dataclass(frozen=True)
class Chip:
    """GPU properties that the code asks for."""

    name: str
    capability: tuple[int, int]
    processors: int
    memory_bytes: int


CHIPS = {  # by name in configs/clusters.yaml
    "a100": Chip("NVIDIA A100-SXM4-80GB", (8, 0), processors=108, memory_bytes=79 * 2**30),
    "a800": Chip("NVIDIA A800-SXM4-80GB", (8, 0), processors=108, memory_bytes=79 * 2**30),
    "h100": Chip("NVIDIA H100 80GB HBM3", (9, 0), processors=132, memory_bytes=79 * 2**30),
    "h800": Chip("NVIDIA H800", (9, 0), processors=132, memory_bytes=79 * 2**30),
    "h200": Chip("NVIDIA H200", (9, 0), processors=132, memory_bytes=140 * 2**30),
    "b200": Chip("NVIDIA B200", (10, 0), processors=148, memory_bytes=178 * 2**30),
    "gb200": Chip("NVIDIA GB200", (10, 0), processors=152, memory_bytes=184 * 2**30),
}
HOPPER = (9, 0)


# ---- a launch ----------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Launch:
    """One kernel, or one torch operation.

    kernel: "norm.forward_kernel", or "aten.mm" for an operation. phase: forward, backward or optimizer.
    file, function: our code that called it; in the backward of a torch operation, the caller of its forward.
    read, written, updated: bytes; updated: of tensors that are both read and written. launches: number of
    kernels; 0 is a view, which only costs host time. arguments: of a Triton kernel, with tensors as
    RecordedTensor; for an operation, its tensors under "in" and "out". stream: the stream that it runs on.
    """

    kernel: str
    phase: str
    file: str
    function: str
    read: int
    written: int
    updated: int
    launches: int
    is_triton: bool
    arguments: dict[str, Any] = field(repr=False)
    stream: str = COMPUTE

    @property
    def nbytes(self) -> int:
        return self.read + self.written


@dataclass(frozen=True)
class RecordedTensor:
    """A tensor of a launch."""

    shape: tuple[int, ...]
    dtype: torch.dtype
    nbytes: int  # of its elements; an expanded one counts once

    @staticmethod
    def of(x: Tensor) -> "RecordedTensor":
        return recorded_tensor(tuple(x.shape), x.stride(), x.dtype)


@functools.lru_cache(maxsize=1 << 16)
def recorded_tensor(shape: tuple[int, ...], strides: tuple[int, ...], dtype: torch.dtype) -> RecordedTensor:
    elements = 1
    for size, stride in zip(shape, strides):
        elements *= size if stride else min(size, 1)
    return RecordedTensor(shape, dtype, elements * dtype.itemsize)


def as_meta(value: Any) -> Any:
    """Replace a tensor, or the tensor of a descriptor, by a RecordedTensor."""
    base = getattr(value, "base", None) if isinstance(value, triton_.TensorDescriptor) else value
    return RecordedTensor.of(base) if isinstance(base, Tensor) else value


# ---- emulating the GPU -------------------------------------------------------------------------------------


class SimulatedDevice(TorchFunctionMode):
    """Makes RecordedTensor tensors report `device`, and redirects tensors created there to meta."""

    def __init__(self, device: torch.device, recorder: "Recorder") -> None:
        super().__init__()
        self.device = device
        self.recorder = recorder

    def __torch_function__(
        self, function: Callable[..., Any], types: Any, args: tuple = (), kwargs: dict | None = None
    ) -> Any:
        name = getattr(function, "__name__", "")
        is_meta = bool(args) and isinstance(args[0], Tensor) and args[0].is_meta
        if is_meta and name == "data_ptr":
            return fake_address(args[0].untyped_storage()) + args[0].storage_offset() * args[0].itemsize
        if name == "__get__":
            return self.attribute(function, args, is_meta)
        if is_meta and name in ("__bool__", "item"):
            self.recorder.add_host_read(find_caller(sys._getframe(1)))
            return True
        if function is torch.device:
            return function(*args, **(kwargs or {}))
        if function is Tensor.backward:
            return self.run_backward(*args, **(kwargs or {}))
        if function is torch.nn.functional.scaled_dot_product_attention:
            return library_attention(*args, **(kwargs or {}), is_on_gpu=self.device.type == "cuda")
        if is_meta and function is torch._scaled_mm and kwargs and kwargs.get("out") is not None:
            return scaled_product_into(*args, **kwargs)
        args = tuple(self.real(value) for value in args)
        kwargs = {key: self.real(value) for key, value in (kwargs or {}).items()}
        if is_meta and name == "is_pinned":
            return self.recorder.is_on_host(args[0])
        if is_meta and ("pin_memory" in kwargs or is_host(kwargs.get("device"))):
            return self.like_on_host(function, args, kwargs)
        result = function(*args, **kwargs)
        if function is torch.tensor and result.is_meta:  # created without an operation
            self.recorder.add_tensor(result)
        return result

    def run_backward(self, x: Tensor, gradient: Tensor | None = None, **options: Any) -> None:
        """Run a backward from the edge of x in the graph. From the tensor it would turn this mode off."""
        with self:
            gradient = torch.ones_like(x) if gradient is None else gradient
            torch.autograd.backward(get_gradient_edge(x), gradient, **options)

    def like_on_host(self, function: Callable[..., Any], args: tuple, kwargs: dict) -> Tensor:
        """Create a tensor like another, possibly in pinned host memory, also without storage."""
        is_pinned = kwargs.pop("pin_memory", False)
        on_host = self.device.type != "cpu" and (is_pinned or is_host(kwargs.get("device")))
        with self.recorder.making_on_host(on_host):
            return function(*args, **kwargs | {"device": META})

    def attribute(self, function: Callable[..., Any], args: tuple, is_meta: bool) -> Any:
        attribute = getattr(getattr(function, "__self__", None), "__name__", "")
        if is_meta and attribute == "device":
            return HOST if self.recorder.is_on_host(args[0]) else self.device
        if is_meta and attribute == "is_cuda":
            return self.device.type == "cuda"
        return function(*args)

    def real(self, value: Any) -> Any:
        """Replace the device by meta."""
        if self.device.type == "cpu":
            return META if isinstance(value, torch.device) and value == self.device else value
        if isinstance(value, str) and value.split(":")[0] == self.device.type:
            return META
        is_device = isinstance(value, torch.device) and value.type == self.device.type
        return META if is_device else value


def fake_address(storage: torch.UntypedStorage) -> int:
    """Return an address for a storage without memory, as far from all others as its bytes require."""
    return storage._cdata << 44


@contextlib.contextmanager
def simulated_addresses() -> Iterator[None]:
    """Give storages without memory distinct addresses, which code compares to identify tensors."""
    real_address = torch.UntypedStorage.data_ptr

    def address(storage: torch.UntypedStorage) -> int:
        return fake_address(storage) if storage.device == META else real_address(storage)

    with mock.patch.object(torch.UntypedStorage, "data_ptr", address):
        yield


@contextlib.contextmanager
def simulated_hooks(mode: SimulatedDevice) -> Iterator[None]:
    """Let a hook on a saved tensor see the claimed device. Inside an operation of torch the mode is off."""
    real_init = saved_tensors_hooks.__init__

    def init(
        self: saved_tensors_hooks, pack: Callable[[Tensor], Any], unpack: Callable[[Any], Tensor]
    ) -> None:
        def simulated_pack(x: Tensor) -> Any:
            is_on = mode in _get_current_function_mode_stack()
            with contextlib.nullcontext() if is_on else mode:
                return pack(x)

        real_init(self, simulated_pack, unpack)

    with mock.patch.object(saved_tensors_hooks, "__init__", init), mode:
        yield


def is_host(device: Any) -> bool:
    return device == "cpu" or device == HOST


@contextlib.contextmanager
def simulated_gpu(chip: Chip, recorder: "Recorder", cudnn: bool = False) -> Iterator[torch.device]:
    """Make torch behave like on a machine with the chip. Yields the device that tensors claim.

    `cudnn` says whether cuDNN supports packed documents there (kernels/attention_cudnn.py).
    """
    properties = SimpleNamespace(
        name=chip.name,
        major=chip.capability[0],
        minor=chip.capability[1],
        multi_processor_count=chip.processors,
        total_memory=chip.memory_bytes,
    )
    answers = {
        "get_device_capability": lambda *_: chip.capability,
        "get_device_properties": lambda *_: properties,
        "get_device_name": lambda *_: chip.name,
        "current_device": lambda: 0,
        "Stream": lambda *_, **__: SimulatedStream(recorder, "copies"),
        "current_stream": lambda *_: SimulatedStream(recorder, recorder.stream),
        "stream": stream_context,
        "Event": SimulatedEvent,
    }
    device = torch.device("cuda", 0)
    with contextlib.ExitStack() as stack:
        stack.enter_context(fresh_caches())
        stack.enter_context(simulated_addresses())
        for name, answer in answers.items():
            stack.enter_context(mock.patch.object(torch.cuda, name, answer))
        stack.enter_context(mock.patch.object(triton_, "TRITON_AVAILABLE", True))
        stack.enter_context(mock.patch.object(torch.Tensor, "record_stream", lambda *_: None))
        stack.enter_context(simulated_libraries())
        if cudnn:
            stack.enter_context(simulated_cudnn())
        stack.enter_context(simulated_hooks(SimulatedDevice(device, recorder)))
        yield device


@contextlib.contextmanager
def simulated_libraries() -> Iterator[None]:
    """Pretend that torch's libraries are installed and flash-attn is not, and that trial runs pass.

    A trial compares values, which meta tensors do not have. Calls of flex_attention, which torch compiles for
    real tensors alone, count as our Triton kernels: the same blocks, tensors and products.
    """
    real_function = attention_libraries.installed_function

    def installed_function(module: str, name: str) -> Callable[..., Any] | None:
        return real_function(module, name) if module.startswith("torch.") else None

    def largest_by_flex(q: Tensor, k: Tensor, mask: AttentionMask, form: ScoreForm) -> Tensor:
        columns = k[..., :attention_libraries.FLEX_MIN_HEAD_DIM]
        _, of_queries = attention_part(q, k, columns, mask, q.dtype, form)
        return of_queries.amax((0, 1))

    fused = dict.fromkeys(attention.FUSED_KERNELS, lambda call: True)
    fused[SDPBackend.CUDNN_ATTENTION] = lambda call: cudnn_takes(call.query.shape[-1], call.value.shape[-1])
    with (
        mock.patch.dict(attention.FUSED_KERNELS, fused),
        mock.patch.object(attention_libraries, "installed_function", installed_function),
        mock.patch.object(attention_libraries, "passes_trial", lambda *_: True),
        mock.patch.object(largest_score, "passes_trial", lambda *_: True),
        mock.patch.object(largest_score, "largest_by_flex", largest_by_flex),
        mock.patch.object(grouped_library, "obstacle_to_library", lambda *_: None),
        mock.patch.object(linear, "obstacle_to_library", lambda *_: None),
    ):
        yield


@contextlib.contextmanager
def simulated_cudnn() -> Iterator[None]:
    """Route packed documents to torch's cuDNN operation, as in torch 2.14 and later with cuDNN 9.25.

    Earlier versions of torch only support it for tensors with storage.
    """
    known_function = attention_libraries.installed_function

    def installed_function(module: str, name: str) -> Callable[..., Any] | None:
        is_cudnn = module == attention_cudnn.__name__
        return getattr(attention_cudnn, name) if is_cudnn else known_function(module, name)

    def forward(
        query: Tensor, key: Tensor, value: Tensor, attn_bias: None, cum_seq_q: Tensor, cum_seq_k: Tensor,
        max_q: int, max_k: int, *options: object, **more_options: object,
    ) -> tuple[object, ...]:  # fmt: skip
        tokens, heads, _ = query.shape
        out = query.new_empty(tokens, heads, value.shape[-1])
        lse = query.new_empty(heads, tokens, dtype=torch.float32)
        none = query.new_empty(0)
        return out, lse, cum_seq_q, cum_seq_k, max_q, max_k, none, none, none

    def backward(
        grad_out: Tensor, query: Tensor, key: Tensor, value: Tensor, *others: object, **options: object
    ) -> tuple[Tensor, ...]:
        return tuple(x.new_empty(x.shape) for x in (query, key, value))

    library = torch.library.Library("aten", "IMPL")
    for name, function in (("forward", forward), ("backward", backward)):
        operation = f"_cudnn_attention_{name}"
        if not torch._C._dispatch_has_kernel_for_dispatch_key(f"aten::{operation}", "Meta"):
            library.impl(operation, function, "Meta")
    version = attention_cudnn.CUDNN_WITH_EMPTY_DOCUMENTS
    try:
        with (
            mock.patch.object(attention_libraries, "installed_function", installed_function),
            mock.patch.object(torch.backends.cudnn, "version", lambda: version),
        ):
            yield
    finally:
        library._destroy()


@contextlib.contextmanager
def simulated_cpu(recorder: "Recorder") -> Iterator[torch.device]:
    """Make meta tensors report CPU index 0: without an index it is the host, where tensors have values."""
    device = torch.device("cpu", 0)
    recorder.counts_host = True
    mode = SimulatedDevice(device, recorder)
    with fresh_caches(), simulated_addresses(), simulated_hooks(mode):
        yield device


@contextlib.contextmanager
def fresh_caches() -> Iterator[None]:
    """Clear what kernel modules cache about a device, before and after."""

    def forget() -> None:
        loaded = [module for name, module in sys.modules.items() if name.startswith("kernels.")]
        for module in loaded:
            for value in vars(module).values():
                if hasattr(value, "cache_clear"):
                    value.cache_clear()

    forget()
    try:
        yield
    finally:
        forget()


@contextlib.contextmanager
def without_initial_weights() -> Iterator[None]:
    """Skip weight initialization: meta tensors have no values, and the host would take minutes."""
    with mock.patch.object(spec, "draw_normal", lambda *_, **__: None):
        yield


# ---- library attention -------------------------------------------------------------------------------------

def cudnn_takes(d: int, e: int) -> bool:
    """Head dims of latent attention need cuDNN 9.11, and Hopper or later."""
    return max(d, e) <= 128 or ((d, e) == (192, 128) and torch.cuda.get_device_capability() >= HOPPER)


# Head dims (of keys: d, of values: e) supported by each torch kernel; all require 16-bit operands and
# multiples of 8.
LIBRARY_HEAD_DIMS: dict[SDPBackend, Callable[[int, int], bool]] = {
    SDPBackend.CUDNN_ATTENTION: cudnn_takes,
    SDPBackend.FLASH_ATTENTION: lambda d, e: d == e <= 256,
    SDPBackend.EFFICIENT_ATTENTION: lambda d, e: True,
}


def library_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
    *,
    is_on_gpu: bool,
) -> Tensor:
    """Run the operation that scaled_dot_product_attention becomes: the first enabled kernel that supports the
    call (torch's sdp_utils.cpp). q, k, v [b, h or g, s, d].
    """
    aten = torch.ops.aten
    options = {"dropout_p": dropout_p, "is_causal": is_causal, "scale": scale}
    if not is_on_gpu and query.shape[-1] == value.shape[-1]:  # reads shared key heads as they are
        on_host = aten._scaled_dot_product_flash_attention_for_cpu
        return on_host(query, key, value, attn_mask=attn_mask, **options)[0]
    backend = library_backend(query, value, attn_mask) if is_on_gpu else SDPBackend.MATH
    if backend == SDPBackend.CUDNN_ATTENTION:
        return aten._scaled_dot_product_cudnn_attention(query, key, value, attn_mask, True, **options)[0]
    if enable_gqa:
        copies = query.shape[1] // key.shape[1]
        key, value = (x.repeat_interleave(copies, 1) for x in (key, value))
    if backend == SDPBackend.FLASH_ATTENTION:
        return aten._scaled_dot_product_flash_attention(query, key, value, **options)[0]
    if backend == SDPBackend.EFFICIENT_ATTENTION:
        return aten._scaled_dot_product_efficient_attention(query, key, value, attn_mask, True, **options)[0]
    return aten._scaled_dot_product_attention_math(query, key, value, attn_mask, **options)[0]


def library_backend(query: Tensor, value: Tensor, mask: Tensor | None) -> SDPBackend:
    """Return the first kernel in torch's order that is enabled and supports the call."""
    flags = torch.backends.cuda
    is_enabled = {
        # torch refuses it if results must be deterministic
        SDPBackend.CUDNN_ATTENTION: flags.cudnn_sdp_enabled()
        and not torch.are_deterministic_algorithms_enabled(),
        SDPBackend.FLASH_ATTENTION: flags.flash_sdp_enabled() and mask is None,
        SDPBackend.EFFICIENT_ATTENTION: flags.mem_efficient_sdp_enabled(),
    }
    d, e = query.shape[-1], value.shape[-1]
    is_supported = query.dtype in (torch.bfloat16, torch.float16) and d % 8 == e % 8 == 0
    for backend, takes in LIBRARY_HEAD_DIMS.items():
        if is_enabled[backend] and is_supported and takes(d, e):
            return backend
    return SDPBackend.MATH


def scaled_product_into(*args: Tensor, out: Tensor, **kwargs: Any) -> Tensor:
    """Emulate torch._scaled_mm(..., out=out): the form without `out` has the same reads and writes, and meta
    tensors only support that. Raises RuntimeError for another dtype or shape of `out`, as on a GPU.
    """
    product = torch._scaled_mm(*args, **kwargs)
    if (product.dtype, product.shape) != (out.dtype, out.shape):
        raise RuntimeError(f"{product.dtype} {product.shape} does not fit {out.dtype} {out.shape}")
    return out


# ---- the recorder ------------------------------------------------------------------------------------------

HELPERS = (multiply_into_fp32.__code__,)  # their launches are those of their caller, as a router's products
# Operations that launch several kernels on a GPU, approximately as in CUB, ATen and cuDNN; others launch one.
KERNELS_OF = {
    "aten.sort": 4,
    "aten.topk": 2,
    "aten.cumsum": 2,
    "aten.bincount": 3,
    "aten.nonzero": 3,
    "aten._scaled_dot_product_cudnn_attention_backward": 3,
    "aten._scaled_dot_product_flash_attention_backward": 3,
    # with the lengths and offsets of documents: pytorch pull request 191576 counts them
    "aten._cudnn_attention_forward": 8,
    "aten._cudnn_attention_backward": 13,
    "torch_attn._varlen_attn": 2,
    "torch_attn._varlen_attn_backward": 6,  # with sums over the query heads of a group
}
# Operations without kernels, other than views and operations without tensors.
NOTHING_STARTS = {
    "aten.empty",
    "aten.empty_like",
    "aten.empty_strided",
    "aten.new_empty",
    "aten.new_empty_strided",
    "aten.promote_types",
    "aten._unsafe_view",
    "aten.detach",
    "aten.lift_fresh",
    "aten.record_stream",
    "aten.resize_",
    "aten._local_scalar_dense",
}
FACTORIES = ("aten.new_", "aten.zeros_like", "aten.ones_like", "aten.full_like")  # do not read values
WRITE_ALL = {"aten.copy_", "aten.fill_", "aten.zero_", "aten.uniform_", "aten.normal_"}  # do not read it
GATHERS = {"aten.index", "aten.index_select", "aten.embedding", "aten.gather"}  # read as much as they return
SCATTERS = {"aten.index_add_", "aten.scatter_add_", "aten.index_put_", "aten.scatter_"}  # see scatter_bytes


class Recorder:
    """Collects launches in a `with recorder.recording():`.

    with_views: operations without kernels are also launches, which only cost host time. executes: kernels
    really run (in Triton's interpreter, or on a GPU). launches: in order. events: what happens between them.
    host_reads: our (file, function) that read a value of the device. stream: destination of new launches.
    memory: bytes of all device tensors; host_memory: bytes of tensors offloaded to the host; both survive
    clear().
    """

    def __init__(self, executes: bool = False, with_views: bool = True) -> None:
        self.executes = executes
        self.with_views = with_views
        self.memory = LiveBytes(clock=self.now)
        self.host_memory = LiveBytes(clock=self.now)
        self.events: list[Event] = []  # the same list throughout: the wire appends to it
        self.is_making_on_host = False
        self.counts_host = False  # the device is the host
        self.is_build = False
        self.modules: list[str] = []  # classes of the model parts whose forward is running, outermost first
        self.clear()

    def clear(self) -> None:
        """Drop everything recorded."""
        self.launches: list[Launch] = []
        self.events.clear()
        self.stream = COMPUTE
        self.is_optimizer = False
        self.callers: dict[int, tuple[str, str]] = {}  # caller of each operation, by its autograd number

    def now(self) -> int:
        """Return the number of launches so far."""
        return len(self.launches)

    @property
    def host_reads(self) -> list[tuple[str, str]]:
        return [event.place for event in self.events if isinstance(event, HostRead)]

    def add_host_read(self, place: tuple[str, str]) -> None:
        self.events.append(HostRead(place, self.now()))

    @contextlib.contextmanager
    def op(self, name: str) -> Iterator[None]:
        """Attribute everything inside to an op of the pipeline."""
        self.events.append(OpBegins(name, self.now()))
        yield
        self.events.append(OpEnds(self.now()))

    @contextlib.contextmanager
    def recording(self) -> Iterator["Recorder"]:
        real_launch = triton_.Launchable.__getitem__

        def launcher(kernel: Any, grid: Any) -> Callable[..., Any]:
            def launch(*args: Any, **kwargs: Any) -> Any:
                self.add_kernel(kernel, args, kwargs)
                if self.executes:
                    with without_recording():
                        return real_launch(kernel, grid)(*args, **kwargs)
                return None

            return launch

        with (
            mock.patch.object(triton_.Launchable, "__getitem__", launcher),
            Operations(self),
            noted_modules(self.modules),
        ):
            yield self

    def begin_optimizer(self) -> None:
        """Attribute all following launches to the optimizer."""
        self.is_optimizer = True
        self.events.append(OpBegins("optimizer", self.now()))

    @property
    def phase(self) -> str:
        if self.is_build:
            return "build"
        if self.is_optimizer:
            return "optimizer"
        return "backward" if in_backward() else "forward"

    def add_kernel(self, kernel: Any, args: tuple, kwargs: dict) -> None:
        function = plain_function(kernel)
        bound = {name: as_meta(value) for name, value in bind_arguments(kernel, args, kwargs).items()}
        pointers = tuple(name for name, value in bound.items() if isinstance(value, RecordedTensor))
        fixed = fixed_numbers(kernel, bound)

        use = get_tensor_use(function, pointers, tuple(fixed.items()))
        file, name = find_caller(sys._getframe(2))
        self.launches.append(
            Launch(
                kernel=f"{function.__module__.removeprefix('kernels.')}.{function.__name__}",
                phase=self.phase,
                file=file,
                function=name,
                read=sum(bound[name].nbytes for name in use.read),
                written=sum(bound[name].nbytes for name in use.written),
                updated=sum(bound[name].nbytes for name in use.read & use.written),
                launches=1,
                is_triton=True,
                arguments=bound | {key: value for key, value in kwargs.items() if key not in bound},
                stream=self.stream,
            )
        )

    def add_tensor(self, x: Tensor) -> None:
        """Count the bytes of a tensor with host numbers."""
        file, caller = find_caller(sys._getframe(2))
        self.memory.see([x], self.holder(f"{file}:{caller}"))

    def holder(self, place: str) -> Holder:
        """Return the holder that memory allocated now is attributed to."""
        return Holder(self.phase, place, self.modules[-1] if self.modules else "")

    def is_on_host(self, x: Tensor) -> bool:
        """Return whether a tensor without storage stands for one in host memory."""
        return self.host_memory.now > 0 and self.host_memory.has(x)

    @contextlib.contextmanager
    def making_on_host(self, is_on_host: bool) -> Iterator[None]:
        """Let tensors created inside stand for host tensors."""
        self.is_making_on_host = is_on_host
        try:
            yield
        finally:
            self.is_making_on_host = False

    def count_bytes(self, tensors: list[Tensor], holder: Holder) -> None:
        """Count the storages of tensors that an operation has returned."""
        if self.is_making_on_host:
            self.host_memory.see(tensors, holder)
        elif self.host_memory.now:
            self.memory.see([x for x in tensors if not self.host_memory.has(x)], holder)
        else:
            self.memory.see(tensors, holder)

    def add_operation(self, function: Any, args: tuple, kwargs: dict, result: Any) -> None:
        if function.is_view and not self.with_views:
            return
        name = get_name(function)
        inputs = tensors_in((args, kwargs))
        outputs = tensors_in(result)
        if not inputs and not outputs:
            return
        file, caller = self.origin()
        is_view = function.is_view or name in NOTHING_STARTS or not any(x.numel() for x in outputs)
        # not x.device, which reports the claimed device here
        is_on_host = not self.executes and not any(x.is_meta for x in (*inputs, *outputs))
        if self.counts_host or not is_on_host:
            self.count_bytes(outputs, self.holder(f"{file}:{caller}"))
        if is_on_host or (is_view and not self.with_views):
            return
        moved = (0, 0, 0) if is_view else operation_bytes(function, name, args, kwargs, outputs)
        read, written, updated = moved
        self.launches.append(
            Launch(
                kernel=name,
                phase=self.phase,
                file=file,
                function=caller,
                read=read,
                written=written,
                updated=updated,
                launches=0 if is_view else KERNELS_OF.get(name, 1),
                is_triton=False,
                arguments={
                    "in": [RecordedTensor.of(x) for x in inputs],
                    "out": [RecordedTensor.of(x) for x in outputs],
                    "numbers": named_numbers(function, args, kwargs),
                    "overload": str(function),
                },
                stream=self.stream,
            )
        )

    def origin(self) -> tuple[str, str]:
        """Return our (file, function) behind the current operation.

        The backward of torch's operations runs in C++: its node has the same number as the forward.
        """
        caller = find_caller(sys._getframe(3))
        number = torch._C._autograd._get_sequence_nr() if not in_backward() else None
        if number is not None:
            self.callers.setdefault(number - 1, caller)
        elif caller == OUTSIDE:
            node = torch._C._current_autograd_node()
            caller = self.callers.get(node._sequence_nr(), caller) if node is not None else caller
        return caller


@functools.lru_cache(maxsize=1 << 12)
def get_tensor_use(
    function: FunctionType, pointers: tuple[str, ...], fixed: tuple[tuple[str, Any], ...]
) -> TensorUse:
    """Return the reads and writes of a kernel launch; see tensors_used."""
    return tensors_used(function, dict(fixed), pointers)


@functools.cache
def get_name(function: Any) -> str:
    """Return a name such as aten.mm for any overload."""
    return str(function.overloadpacket)


def named_numbers(function: Any, args: tuple, kwargs: dict) -> dict[str, Any]:
    """Return an operation's non-tensor arguments by schema name; torch passes most of them unnamed."""
    names = [argument.name for argument, _ in get_arguments(function)]
    given = {**dict(zip(names, args)), **kwargs}
    return {name: value for name, value in given.items() if not tensors_in(value)}


@functools.cache
def get_arguments(function: Any) -> list[tuple[Any, bool]]:
    """Return the arguments in an operation's schema, and whether each is written."""
    arguments = function._schema.arguments
    return [(one, one.alias_info is not None and one.alias_info.is_write) for one in arguments]


# 16-bit products into fp32. On meta tensors they raise TypeError in torch 2.11 (pytorch issue 163880).
PRODUCTS_INTO = (torch.ops.aten.addmm.dtype_out, torch.ops.aten.mm.dtype_out)


def product_into(args: tuple, out: Tensor) -> Tensor:
    """Fill `out` of such a product on meta tensors. `args` are the operation's, with out_dtype last.

    Raises RuntimeError for another dtype or shape of `out`, as on a GPU.
    """
    *_, a, b, dtype = args
    if (out.dtype, out.shape) != (dtype, (a.shape[0], b.shape[1])):
        raise RuntimeError(f"{dtype} {(a.shape[0], b.shape[1])} does not fit {out.dtype} {out.shape}")
    return out


class Operations(TorchDispatchMode):
    """Passes torch operations to a recorder."""

    def __init__(self, recorder: Recorder) -> None:
        super().__init__()
        self.recorder = recorder

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        """Return False, so that torch does not wrap each operation to hide it from its compiler."""
        return False

    def __torch_dispatch__(
        self, function: Any, types: Any, args: tuple = (), kwargs: dict | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if function in PRODUCTS_INTO and kwargs["out"].is_meta:
            result = product_into(args, kwargs["out"])
        else:
            result = function(*args, **kwargs)
        with torch._C.DisableTorchFunction():  # hide the recorder's own queries
            self.recorder.add_operation(function, args, kwargs, result)
        return result


@contextlib.contextmanager
def without_recording() -> Iterator[None]:
    """Hide operations: those of Triton's interpreter are not launches."""
    from torch.utils._python_dispatch import _disable_current_modes

    with _disable_current_modes():
        yield


@contextlib.contextmanager
def noted_modules(running: list[str]) -> Iterator[None]:
    """Keep the classes of the model parts whose forward is running in `running`. Layers of torch and of
    parallel/ belong to the part that calls them."""

    def is_part(module: nn.Module) -> bool:
        return not type(module).__module__.startswith(("torch.", "parallel."))

    def begin(module: nn.Module, _: object) -> None:
        if is_part(module):
            running.append(type(module).__name__)

    def end(module: nn.Module, *_: object) -> None:
        if is_part(module):
            running.pop()

    hooks = (
        modules.register_module_forward_pre_hook(begin),
        modules.register_module_forward_hook(end, always_call=True),
    )
    try:
        yield
    finally:
        for hook in hooks:
            hook.remove()


def in_backward() -> bool:
    return torch._C._current_graph_task_id() != -1


def find_caller(frame: FrameType | None) -> tuple[str, str]:
    """Return (file, function) of the innermost frame in the recorded code, HELPERS left out.

    Return OUTSIDE if the backward of a torch operation comes first.
    """
    while frame is not None:
        path = frame.f_code.co_filename
        if path.endswith("torch/autograd/graph.py"):  # starts the backward, with none of our frames inside
            return OUTSIDE
        file = file_of_ours(path)
        if file is not None and frame.f_code not in HELPERS:
            return file, frame.f_code.co_name
        frame = frame.f_back
    return OUTSIDE


@functools.cache
def file_of_ours(path: str) -> str | None:
    """Return the path relative to the repository, or None for other code, including this recorder."""
    full = Path(path)
    if not full.is_relative_to(ROOT) or "site-packages" in path:
        return None
    relative = full.relative_to(ROOT).as_posix()
    return None if relative.startswith(OWN_FILES) else relative


def tensors_in(value: Any) -> list[Tensor]:
    """Return all tensors in nested lists, tuples and dicts."""
    if isinstance(value, Tensor):
        return [value]
    if isinstance(value, dict):
        value = value.values()
    elif not isinstance(value, (list, tuple)):
        return []
    results: list[Tensor] = []
    for part in value:
        if isinstance(part, Tensor):
            results.append(part)
        elif isinstance(part, (list, tuple, dict)):
            results += tensors_in(part)
    return results


# ---- bytes of an operation ---------------------------------------------------------------------------------


def operation_bytes(
    function: Any, name: str, args: tuple, kwargs: dict, outputs: list[Tensor]
) -> tuple[int, int, int]:
    """Return (bytes read, bytes written, bytes both read and written), each input and each result once.

    A result that is also an input, as in an in-place operation, counts as read, unless it is only
    overwritten.
    """
    reads, writes = [], []
    schema = get_arguments(function)
    values = {argument.name: value for (argument, _), value in zip(schema, args)} | kwargs
    for argument, is_written in schema:
        tensors = tensors_in(values.get(argument.name))
        if is_written:
            writes += tensors
        if name.startswith(FACTORIES):
            continue
        is_target_only = is_written and (argument.kwarg_only or name in WRITE_ALL)
        if not is_target_only:
            reads += tensors

    fresh = [x for x in outputs if all(x is not written for written in writes)]
    num_written = get_bytes(writes + fresh)
    if name in GATHERS:
        return num_written + get_bytes(reads[1:]), num_written, 0
    if name in SCATTERS:
        return scatter_bytes(name, reads)
    updated = [x for x in writes if any(x is read for read in reads)]
    return get_bytes(distinct(reads)), num_written, get_bytes(updated)


def get_bytes(tensors: list[Tensor]) -> int:
    return sum(RecordedTensor.of(x).nbytes for x in tensors)


def scatter_bytes(name: str, reads: list[Tensor]) -> tuple[int, int, int]:
    """Count writes to positions of the first tensor, which only touch those positions."""
    sources = [RecordedTensor.of(x).nbytes for x in reads[1:]]
    largest = max(sources, default=0)
    touched = min(largest, RecordedTensor.of(reads[0]).nbytes)
    adds = name in ("aten.index_add_", "aten.scatter_add_")
    return sum(sources) + (touched if adds else 0), touched, touched if adds else 0


def distinct(tensors: list[Tensor]) -> list[Tensor]:
    """Drop repeated tensor objects: x * x reads x once."""
    result: dict[int, Tensor] = {}
    for x in tensors:
        result.setdefault(id(x), x)
    return list(result.values())
