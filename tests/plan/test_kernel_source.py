"""Which tensors a kernel reads and writes, found in its source: planted kernels with all that such a walk can
lose its way in.
"""

import pytest

pytest.importorskip("triton", reason="no Triton for this platform")

import triton
import triton.language as tl

from plan.record.kernel_source import bind_arguments, fixed_numbers, tensors_used

POINTERS = ("X", "Y", "Z")


@triton.jit
def moved(POINTER, offset):
    return POINTER + offset


@triton.jit
def copied(SOURCE, TARGET, offset):
    tl.store(moved(TARGET, offset), tl.load(moved(SOURCE, offset)))


@triton.jit
def in_one_line(X, Y, Z):
    source, target = X + 1, Y + 2
    tl.store(target, tl.load(source))


@triton.jit
def by_a_switch(X, Y, Z, FROM_Z: tl.constexpr):
    if FROM_Z:
        value = tl.load(Z)
    else:
        value = tl.load(X)
    tl.store(Y, value)


@triton.jit
def through_helpers(X, Y, Z):
    copied(X, TARGET=Y, offset=3)


@triton.jit
def in_a_loop(X, Y, Z, n):
    pointer = X
    for _ in range(0, n):
        tl.store(Y, tl.load(pointer))
        pointer = Z


@triton.jit
def by_values(X, Y, Z):
    place = tl.load(X)
    tl.store(Y + place, place.to(Z.dtype.element_ty))


@triton.jit
def at_run_time(X, Y, Z, n):
    if n > 3:
        pointer = X
    else:
        pointer = Z
    tl.store(Y, tl.load(pointer))


@triton.jit
def with_descriptors(X, Y, Z):
    Y.store([0, 0], X.load([0, 0]))
    tl.atomic_add(Z, 1)


@pytest.mark.slow(every=3)
@pytest.mark.parametrize("kernel, arguments, read, written", [
    (in_one_line, {}, "X", "Y"),
    (by_a_switch, {"FROM_Z": True}, "Z", "Y"),
    (by_a_switch, {"FROM_Z": False}, "X", "Y"),
    (through_helpers, {}, "X", "Y"),
    (in_a_loop, {"n": 4}, "XZ", "Y"),
    (by_values, {}, "X", "Y"),
    (at_run_time, {"n": 4}, "XZ", "Y"),
    (with_descriptors, {}, "XZ", "YZ"),
])
def test_what_a_kernel_reads_and_writes(kernel, arguments, read, written):
    bound = bind_arguments(kernel, (1, 2, 3), arguments | {"num_warps": 4})
    use = tensors_used(kernel, fixed_numbers(kernel, bound), POINTERS)
    assert (use.read, use.written) == (set(read), set(written))
