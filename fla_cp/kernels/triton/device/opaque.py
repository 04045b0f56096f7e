"""Workarounds for compilers that keep too much in registers.

A chunk's kernel has more addresses and masks than registers. Triton and ptxas (Triton 3.6 and 3.7,
ptxas 12.9) compute such values once, at the start, and keep them in registers over all phases of
the kernel, so that it spills. The functions below hide from the compiler that a value is the same
as before. What depends on it is then computed again where it is used. `python -m tests.aot` is the
test of each: without it the kernels that call it spill."""

import triton
import triton.language as tl


@triton.jit
def opaque(i, n_rows, BT: tl.constexpr, phase: tl.constexpr):
    """i, because n_rows <= BT, in a form in which the compiler cannot recognise i. Phases of a
    kernel pass different numbers, so that two phases do not share a value either."""
    return i + n_rows // (BT + phase) * BT


@triton.jit
def opaque_by(i, n):
    """i, because n >= 0, in a form in which the compiler cannot recognise i; n is from `reload`."""
    return i + tl.minimum(n, 0).to(i.dtype)


@triton.jit
def prefetch_lines(ptr, count, LINES: tl.constexpr):
    """Loads one number of each 32 bytes of `count` numbers at ptr, so that all of them are in the
    cache when a later phase reads them; the numbers themselves would take more registers. LINES: at
    least count / 8, a power of two. The result must go to `keep_loads`."""
    at = tl.arange(0, LINES) * 8
    return tl.load(ptr + at, mask=at < count, other=0.0)


@triton.jit
def keep_loads(ptr, x, n_rows, BT: tl.constexpr):
    """Stores nothing, as n_rows <= BT, but the compiler cannot tell and keeps the loads of x."""
    at = tl.arange(0, x.shape[0]) * 8
    tl.store(ptr + at, x, mask=at * 0 + n_rows > BT)


@triton.jit
def reload(ptr):
    """The number at ptr, loaded behind a barrier. The compiler takes it for another number than the
    one loaded before, and keeps no addresses that it made of that one."""
    tl.debug_barrier()
    return tl.load(ptr).to(tl.int64)
