"""Blocks of 16 rows and columns that each of four warps multiplies by itself, in Gluon for sm_90.

A tensor [4, 16, 16] has one block for each warp. Warp w works on the rows from 16 w to 16 w + 15
of a chunk, which are those that it has of a product of all four warps, [64, 64].
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl


@gluon.constexpr_function
def blocks():
    """The layout of [4, 16, 16], a block for each warp, in which products give their results."""
    return gl.NVMMADistributedLayout([2, 0], [4, 1, 1], [1, 16, 8])


@gluon.jit
def rows_of_blocks():
    """The number of each row in its block, [1, 16, 1]."""
    r = gl.arange(0, 16, gl.SliceLayout(0, gl.SliceLayout(2, blocks())))
    return r[None, :][:, :, None]


@gluon.jit
def columns_of_blocks():
    """The number of each column in its block, [1, 1, 16]."""
    c = gl.arange(0, 16, gl.SliceLayout(0, gl.SliceLayout(1, blocks())))
    return c[None, :][:, None, :]


@gluon.jit
def warps(none):
    """The number of each block's warp, [4, 1, 1]."""
    w = gl.arange(0, 4, gl.SliceLayout(1, gl.SliceLayout(2, blocks())))
    return none + w[:, None][:, :, None]


@gluon.jit
def for_masks(x, none):
    """x + none for numbers x below 16. The compiler can still tell which are below 8, as these are
    in other registers. none: 0 in a form that the compiler cannot tell to be 0; otherwise it would
    keep masks in registers from one use to the next."""
    return ((x + none) & 7) | (x & 8)


@gluon.jit
def of_columns(x):
    """The blocks [4, 16, 16] of each 16 columns of x [64, 64], a product's result: the rows of a
    warp's blocks are those that it has of x."""
    x = gl.permute(gl.reshape(x, [4, 16, 2, 2, 16]), [0, 1, 4, 2, 3])
    even, odd = gl.split(x)
    b_0, b_2 = gl.split(even)
    b_1, b_3 = gl.split(odd)
    b_0, b_1 = gl.convert_layout(b_0, blocks()), gl.convert_layout(b_1, blocks())
    return b_0, b_1, gl.convert_layout(b_2, blocks()), gl.convert_layout(b_3, blocks())


@gluon.jit
def on_diagonal(b, w):
    """The blocks on the diagonal, of those of `of_columns`."""
    return gl.where(w < 2, gl.where(w == 0, b[0], b[1]), gl.where(w == 2, b[2], b[3]))


@gluon.jit
def diagonals(x, none):
    """The diagonals [4, 16] of blocks x [4, 16, 16]."""
    i, j = for_masks(rows_of_blocks(), none), for_masks(columns_of_blocks(), none)
    return gl.sum(gl.where(i == j, x, 0.0), 2)


@gluon.jit
def operands(place):
    """A tile of half precision [64, N] in shared memory as a left operand, [4, 16, N], and its
    transpose as a right one, [4, N, 16], in the same registers."""
    rows: gl.constexpr = gl.NVMMADistributedLayout([2, 0], [4, 1], [16, 8])
    x = place.load(gl.DotOperandLayout(0, rows, 2))
    x = gl.reshape(x, [4, 16, place.shape[1]])
    a = gl.convert_layout(x, gl.DotOperandLayout(0, blocks(), 2))
    return a, gl.convert_layout(gl.permute(x, [0, 2, 1]), gl.DotOperandLayout(1, blocks(), 2))
