"""Workarounds for what the compiler does to a kernel, each with what it is against.

A chunk's kernel has more addresses and masks than registers. Triton and ptxas (Triton 3.6 and 3.7,
ptxas 12.9) compute such values once, at the start, and keep them in registers over all phases of
the kernel, so that it spills. The functions below hide from the compiler that a value is the same
as before: what is made of it is then computed again where it is used. `python -m tests.aot` shows
each of them: without it the kernels that call it spill.
"""

import triton
import triton.language as tl


@triton.jit
def opaque(i, n_rows, BT: tl.constexpr, phase: tl.constexpr):
    """i, because n_rows <= BT, in a form that the compiler cannot tell to be i. `phase` differs
    from phase to phase, so that two of them do not share a value either."""
    return i + n_rows // (BT + phase) * BT


@triton.jit
def opaque_by(i, n):
    """i, because n >= 0, in a form that the compiler cannot tell to be i; n is from `reload`."""
    return i + tl.minimum(n, 0).to(i.dtype)


@triton.jit
def reload(ptr):
    """A number, loaded behind a barrier. To the compiler it is another number than the one loaded
    before, so that addresses made of that one are not kept in registers until here."""
    tl.debug_barrier()
    return tl.load(ptr).to(tl.int64)
