"""A kernel at the sizes of training: what the tests marked `gpu` share.

    pytest -m gpu tests/kernels                             on a GPU as compiled, at full size
    pytest -m gpu tests/kernels/test_norm.py --memory-share 0.11      one of eight processes of a GPU

Without a GPU the same tests run in Triton's interpreter, at tiny sizes (TINY). Both sides of a comparison
read the same numbers in bf16. The definitions are torch's own operations and autograd, in fp32 without TF32
or better, and no kernel of ours runs in them. While ours runs, torch.empty gives NaN, so that what a kernel
leaves unwritten is seen. Ours runs twice, and must give the same bits. The mark names the kernels that must
be launched, so that no reference is compared with itself.

The error of a result is ||ours - definition|| / ||definition||, and its bound follows from the arithmetic:

    roundings * u       a value that is rounded to a dtype changes by at most its unit roundoff u of itself;
                        sums of such values with random signs keep that ratio
    terms * 2^-24       a sum of this many terms in fp32: with random signs a partial sum is as large as the
                        last one, and tensor cores may cut where others round
    2^-20               the GPU's approximate functions (exp2, rsqrt, division), of some ulp each
"""

import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field

import pytest
import torch
import triton_kernels
from torch import Tensor
from torch.utils import deterministic

from kernels import triton_

Named = dict[str, Tensor]
FP32, BF16 = torch.float32, torch.bfloat16
FUNCTIONS = 2.0**-20
FP32_TERM = 2.0**-24
START = 1.0  # of a buffer for a weight's gradient
TINY = {
    "seq": 20,
    "hidden": 64,
    "ffn": 32,
    "heads": 2,
    "kv": 1,
    "vocab": 96,
    "rows": 24,
    "experts": 8,
    "top_k": 2,
    "expert_ffn": 16,
    "params": 1500,
}


@dataclass(frozen=True)
class Training:
    """Sizes of a part of a training step, such that eight processes fit a GPU of 80 GB beside each other.

    kv: key/value heads; rows: of logits at a time; params: of one AdamW launch. kernels: that `check` must
    launch, as "norm.forward_kernel". report: takes the name and the value of what a check has found.
    """

    device: torch.device
    kernels: frozenset[str]
    report: Callable[[str, object], None]
    batch: int = 2
    seq: int = 4096
    hidden: int = 2048
    ffn: int = 5632
    heads: int = 16
    kv: int = 4
    head_dim: int = 128  # also where the rest is tiny: it decides what attention launches
    vocab: int = 32768
    rows: int = 4096
    experts: int = 64
    top_k: int = 8
    expert_ffn: int = 768
    params: int = 1 << 24

    @property
    def tokens(self) -> int:
        return self.batch * self.seq

    @property
    def inner(self) -> int:
        """Channels of all heads: several blocks of fp8 scales, also where the rest is tiny."""
        return self.heads * self.head_dim

    def randn(self, *sizes: int) -> Tensor:
        return torch.randn(sizes, device=self.device, dtype=BF16)

    def check(
        self,
        ours: Callable[[], Named],
        definition: Callable[[], Named],
        bounds: dict[str, float],
        *,
        is_ours: bool = True,
    ) -> None:
        """Asserts that each result of ours that has a bound is within it of the definition's.

        is_ours: else a library's kernels run, and only their result is checked. Skips on a chip that cannot
        have the kernel, as its fallback says.
        """
        ran = Ran()
        with observed(ran), poisoned() if is_ours else nullcontext():
            got = ours()
            again = ours() if is_ours else got
        for line in ran.fallbacks:
            if "needs sm_89" in line:
                pytest.skip(line)
        assert not ran.fallbacks, f"the kernel did not run: {ran.fallbacks[0]}"
        if self.device.type == "cpu":
            assert ran.launched == self.kernels, f"launched: {sorted(ran.launched)}"
        assert ran.launched or not is_ours, "no kernel was launched"

        for name in bounds:
            assert torch.equal(bits(got[name]), bits(again[name])), f"{name}: two runs differ"
        del again
        with references():
            want = definition()
        errors = {name: relative_error(got[name], want[name]) for name in bounds}
        del got, want  # the traceback of a failure would hold them while other tests run
        worst = max(errors, key=lambda name: distance(errors[name], bounds[name]))
        for name, value in {"result": worst, "error": errors[worst], "bound": bounds[worst]}.items():
            self.report(name, value)
        assert errors[worst] <= bounds[worst], f"{worst}: error {errors[worst]}, bound {bounds[worst]}"

    def check_function(
        self,
        ours: Callable[..., Tensor | tuple[Tensor, ...]],
        definition: Callable[..., Tensor | tuple[Tensor, ...]],
        tensors: Named,
        dys: tuple[Tensor, ...],
        bounds: dict[str, float],
        *,
        weights: tuple[str, ...] = (),
        is_ours: bool = True,
    ) -> None:
        """Forward and backward of two functions of the same tensors; see results_of."""
        self.check(
            lambda: results_of(ours, tensors, dys, weights),
            lambda: results_of(definition, wide(tensors), tuple(wide(dict(enumerate(dys))).values())),
            bounds,
            is_ours=is_ours,
        )


def results_of(
    function: Callable[..., Tensor | tuple[Tensor, ...]],
    tensors: Named,
    dys: tuple[Tensor, ...],
    weights: tuple[str, ...] = (),
) -> Named:
    """The outputs y, y1, ... of function(*tensors), and the gradients dNAME of the tensors for dys.

    weights: names of tensors that have an fp32 buffer for their gradient, as in training, filled with START.
    """
    leaves = {name: tensor.detach().requires_grad_() for name, tensor in tensors.items()}
    for name in weights:
        leaves[name].main_grad = torch.full_like(tensors[name], START, dtype=FP32)
        leaves[name].grad_is_written = True
    output = function(*leaves.values())
    outputs = output if isinstance(output, tuple) else (output,)
    torch.autograd.backward(outputs, dys)

    results = {f"y{number or ''}": y.detach() for number, y in enumerate(outputs)}
    for name, leaf in leaves.items():
        grad = leaf.main_grad.sub_(START) if name in weights else leaf.grad
        if grad is not None:
            results[f"d{name}"] = grad
    return results


def wide(tensors: dict) -> dict:
    """The same numbers in fp32."""
    return {name: tensor.float() for name, tensor in tensors.items()}


def bound(roundings: int, terms: int = 0, dtype: torch.dtype = BF16) -> float:
    """The largest error of a result; see the text above."""
    return roundings * torch.finfo(dtype).eps / 2 + terms * FP32_TERM + FUNCTIONS


def relative_error(got: Tensor, want: Tensor) -> float:
    """||got - want|| / ||want||, in fp32 or better; not finite if one of the two is not."""
    assert got.shape == want.shape, f"{tuple(got.shape)} instead of {tuple(want.shape)}"
    dtype = torch.promote_types(want.dtype, FP32) if want.is_floating_point() else torch.float64
    want = want.to(dtype)
    return float((got.to(dtype) - want).norm() / want.norm().clamp(min=torch.finfo(FP32).tiny))


def distance(error: float, bound: float) -> float:
    """How near to its bound an error is; NaN is the farthest beyond."""
    return float("inf") if error != error else error / max(bound, 1e-30)


def bits(x: Tensor) -> Tensor:
    """The bits of x: those of two NaN are equal."""
    return x.contiguous().view(-1).view(torch.uint8)


# ---- while ours runs ---------------------------------------------------------------------------------------


@dataclass
class Ran:
    """The kernels that were launched, and the lines that say that one was not."""

    launched: set[str] = field(default_factory=set)
    fallbacks: list[str] = field(default_factory=list)


class ObservedKernel:
    """A kernel that notes its launches."""

    def __init__(self, kernel, name: str, launched: set[str]):
        self.kernel, self.name, self.launched = kernel, name, launched

    def __getitem__(self, grid: tuple[int, ...]) -> Callable:
        self.launched.add(self.name)
        return self.kernel[grid]

    def __getattr__(self, name: str):
        return getattr(self.kernel, name)


@contextmanager
def observed(ran: Ran) -> Iterator[None]:
    """Within it launches and fallbacks are noted in `ran`."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(triton_, "print_once", ran.fallbacks.append)
        for place in triton_kernels.places():
            name = place.full_name.removeprefix("kernels.")
            kernel = ObservedKernel(getattr(place.module, place.name), name, ran.launched)
            patch.setattr(place.module, place.name, kernel)
        yield


@contextmanager
def references() -> Iterator[None]:
    """Within it no kernel of ours runs."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(triton_, "DEVICES", ())
        yield


@contextmanager
def poisoned() -> Iterator[None]:
    """Within it torch.empty and its kin are filled with NaN (integers: with the largest)."""
    fills = deterministic.fill_uninitialized_memory
    deterministic.fill_uninitialized_memory = True
    torch.use_deterministic_algorithms(True, warn_only=True)
    try:
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", "(?s).*determinis")  # of torch's own operations beside ours
            yield
    finally:
        torch.use_deterministic_algorithms(False)
        deterministic.fill_uninitialized_memory = fills
