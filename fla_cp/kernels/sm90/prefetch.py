"""Prefetches into the L2 cache for programs that start later.

A program of a local stage waits for its inputs before it can compute anything, and few programs fit
on an SM to fill that time. So each program asks for the inputs of one that starts a little later,
which then come from the L2 cache in about a third of the memory's latency. Kernels that copy ahead
themselves gain nothing from it: those with one decay a head became slower.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

GRAIN = gl.constexpr(64)
"""Bytes between two addresses that are prefetched. Each of them brings in at least 32 bytes, and
with 128 a call is slower by 1% (one H200)."""


@gluon.jit
def to_l2(pointers):
    """Asks for what lies at a tensor of addresses."""
    gl.inline_asm_elementwise(
        "prefetch.global.L2 [$1]; mov.u32 $0, 0;",
        "=r,l",
        [pointers.to(gl.int64, bitcast=True)],
        dtype=gl.int32,
        is_pure=False,
        pack=1,
    )


@gluon.jit
def prefetch_tile(x, last, N: gl.constexpr, SIZE: gl.constexpr):
    """Prefetches N columns of SIZE bytes of the rows 0 to `last`, at most 63, of x (`Rows`)."""
    flat: gl.constexpr = gl.BlockedLayout([1], [32], [4], [0])
    grain: gl.constexpr = GRAIN // SIZE
    n = gl.arange(0, 64 * (N // grain), flat)
    i = gl.minimum(n // (N // grain), last)
    to_l2(x.ptr + (i * x.row + n % (N // grain) * grain))


@gluon.jit
def program_ahead(AHEAD: gl.constexpr):
    """The number of the program that starts AHEAD programs later, or of the last one."""
    return gl.minimum(gl.program_id(0) + AHEAD, gl.num_programs(0) - 1)


@gluon.jit
def rows_of_chunk(chunks, i_c):
    """The first token of a chunk, and the number of its last row; 0 if it has no rows, since empty
    chunks are at token 0."""
    return gl.load(chunks.start + i_c).to(gl.int64), gl.maximum(gl.load(chunks.rows + i_c), 1) - 1
