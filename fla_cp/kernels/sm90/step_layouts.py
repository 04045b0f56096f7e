"""Sizes of the kernel in step_layers.py, and the layouts of its tensors.

The functions take what they need of `LayersShape`, or all of it as S. A layout with "n in a thread"
gives each thread n elements that are next to each other.
"""

from typing import NamedTuple

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from fla_cp.kernels.triton.device.bundles import constants

VECTOR = gl.constexpr(gl.SwizzledSharedLayout(1, 1, 1, [0]))
"""The layout of a vector in shared memory."""


@constants
class LayersShape(NamedTuple):
    """What the kernel is compiled for.

    C: hidden size. N: rows of the projections, of which the first D are q, k and v. H, K, V: heads
    and their channels. F: inner size of SwiGLU. RANK: rank of low-rank decays and gates. DECAY,
    GATE, BETA: their first columns among the N (BETA is -1 if there is none). P: programs. SPLIT:
    programs that share a head. ROWS, COLUMNS: a tile of a weight. SLOTS: buffers of the ring.
    WARPS: warps of a program. HEAD: whether there is one decay a head. LOW_GATE: whether the gate
    has a low rank. BIAS: whether that gate has a bias. REMOVES: whether k removes what it reads.
    KIND: the function of the decay, as `DeltaRule.gate`. SILU: whether the gate's activation is
    SiLU rather than a sigmoid.
    """

    C: int
    N: int
    D: int
    H: int
    K: int
    V: int
    F: int
    RANK: int
    DECAY: int
    GATE: int
    BETA: int
    P: int
    SPLIT: int
    ROWS: int
    COLUMNS: int
    SLOTS: int
    WARPS: int
    HEAD: bool
    LOW_GATE: bool
    BIAS: bool
    REMOVES: bool
    KIND: str
    SILU: bool


@gluon.constexpr_function
def power(n):
    """The least power of two that is not below n."""
    return 1 << (n - 1).bit_length()


@gluon.constexpr_function
def max_of(a, b):
    return max(a, b)


@gluon.constexpr_function
def padded(n, S):
    """Columns of a row of n in shared memory."""
    return max(power(n), S.COLUMNS)


@gluon.constexpr_function
def over(a, b):
    """a / b, rounded up."""
    return -(-a // b)


@gluon.constexpr_function
def flat(n, warps):
    """Neighbouring n elements a thread."""
    return gl.BlockedLayout([n], [32], [warps], [0])


@gluon.constexpr_function
def lanes(columns):
    """Threads of a warp next to each other in a row of a tile, with eight numbers each."""
    return min(32, columns // 8)


@gluon.constexpr_function
def rows_together(rows, warps):
    """Neighbouring rows of a tile in a thread."""
    return min(4, rows // warps)


@gluon.constexpr_function
def rows_of_warps(n, rows, columns, warps):
    """Rows of a tile, each of one warp, n neighbours in a row in a thread."""
    threads = [32 // lanes(columns), lanes(columns)]
    return gl.BlockedLayout([rows_together(rows, warps), n], threads, [warps, 1], [1, 0])


@gluon.constexpr_function
def tile_layout(S):
    """Words of a tile, each of two numbers."""
    return rows_of_warps(4, S.ROWS, S.COLUMNS, S.WARPS)


@gluon.constexpr_function
def sums_layout(S):
    """Two sums for each row and thread of a tile."""
    return rows_of_warps(2, S.ROWS, S.COLUMNS, S.WARPS)


@gluon.constexpr_function
def rows_layout(n, S):
    """Rows of a tile, n neighbours in a thread: those that a warp has, if they are as many."""
    if rows_together(S.ROWS, S.WARPS) < n:
        return flat(n, S.WARPS)
    return gl.SliceLayout(1, rows_of_warps(2, S.ROWS, S.COLUMNS, S.WARPS))


@gluon.constexpr_function
def held(n, warps):
    """Elements of a thread, of n in a layout of vectors of two."""
    return max(2, n // (32 * warps))


@gluon.constexpr_function
def matrix(columns, n, warps):
    """Rows of a matrix, n neighbouring elements a thread."""
    lanes = max(1, min(32, columns // n))
    return gl.BlockedLayout([1, n], [32 // lanes, lanes], [warps, 1], [1, 0])


@gluon.constexpr_function
def columns_of_warps(columns, n, warps):
    """Columns of a matrix, some of each warp, n neighbouring elements a thread."""
    lanes = max(1, min(32, columns // (n * warps)))
    return gl.BlockedLayout([1, n], [32 // lanes, lanes], [1, warps], [1, 0])


@gluon.constexpr_function
def pairs_of_a_thread(columns, n, warps):
    """The same with two neighbouring rows a thread."""
    lanes = max(1, min(32, columns // n))
    return gl.BlockedLayout([2, n], [32 // lanes, lanes], [warps, 1], [1, 0])


@gluon.constexpr_function
def fours(n, warps):
    """Rows of a matrix, each of four threads, n neighbouring elements in two rows a thread."""
    return gl.BlockedLayout([2, n], [8, 4], [warps, 1], [1, 0])


@gluon.constexpr_function
def of_each_warp(n, warps):
    """n elements, all of them in each warp."""
    return gl.BlockedLayout([max(1, n // 32)], [32], [warps], [0])


@gluon.constexpr_function
def held_matrix(rows, columns, n, warps):
    """Elements of a thread, of a tensor in the layout `matrix`."""
    lanes = max(1, min(32, columns // n))
    return max(1, rows // (32 // lanes * warps)) * max(n, columns // lanes)
