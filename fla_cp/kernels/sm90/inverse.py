"""(I - N)^-1 of a strictly lower triangular N [64, 64], in Gluon for sm_90.

The algorithm is that of triton/device/inverse.py: inverses of small blocks are joined to inverses
of larger ones. Each of the four warps multiplies blocks of 16 rows and columns by itself, so that
no product has an operand that is mostly zero.

A lane holds the result of such a product in the registers that a left operand wants, and also in
those that the transpose of a right operand wants, if both count the inner dimension in the same
order (`in_order`). So the transpose of each inverse is formed as well, by products of its own, and
lanes never exchange registers.

Blocks are numbered by row and column. Warp w = 2 h + r works on

- the diagonal block (w, w);
- the block (2 h + 1, 2 h) that joins two of these; both warps of a half h form the same;
- the block (2 + h, r) of the square that joins both halves.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import mma_v2

from fla_cp.kernels.sm90.scan import rounded_off
from fla_cp.kernels.sm90.tma import barrier
from fla_cp.kernels.sm90.warp_blocks import (
    blocks,
    columns_of_blocks,
    for_masks,
    of_columns,
    on_diagonal,
    rows_of_blocks,
    warps,
)


@gluon.constexpr_function
def halves():
    """The layout of `blocks` with the warps as h and r: [2, 2, 16, 16]."""
    registers = [[0, 0, 0, 1], [0, 0, 8, 0], [0, 0, 0, 8]]
    lanes = [[0, 0, 0, 2], [0, 0, 0, 4], [0, 0, 1, 0], [0, 0, 2, 0], [0, 0, 4, 0]]
    return gl.DistributedLinearLayout(
        registers, lanes, [[0, 1, 0, 0], [1, 0, 0, 0]], [], [2, 2, 16, 16]
    )


@gluon.jit
def scratch(place):
    """Shared memory of 8 KiB as two times a block for each warp, [2, 2, 16, 16]. Lanes of a warp
    that read or write a block use different banks."""
    banks: gl.constexpr = gl.SwizzledSharedLayout(8, 2, 2, [3, 2, 1, 0])
    return place._reinterpret(gl.float32, [2, 2, 2, 16, 16], banks)


@gluon.jit
def by_half(x):
    """x [4, 16, 16] as [2, 2, 16, 16]."""
    return gl.convert_layout(gl.reshape(x, [2, 2, 16, 16]), halves())


@gluon.jit
def by_warp(x):
    """x [2, 2, 16, 16] as [4, 16, 16]."""
    return gl.convert_layout(gl.reshape(x, [4, 16, 16]), blocks())


@gluon.jit
def swapped(x):
    """x [4, 16, 16] as [2, 2, 16, 16], with r before h."""
    return gl.permute(by_half(x), [1, 0, 2, 3])


@gluon.jit
def for_each(place, n: gl.constexpr, dim: gl.constexpr):
    """Blocks place[n] (dim 0) or place[:, n] (dim 1) of place [2, 2, 16, 16] in shared memory, for
    each warp: that of its r, or that of its h."""
    x = place.slice(n, 1, dim).load(halves())
    x, _ = gl.broadcast(x, gl.full([2, 2, 16, 16], 0.0, gl.float32, halves()))
    return by_warp(x)


@gluon.jit
def nearest(x, TERMS: gl.constexpr):
    """As `nearest` of triton/device/inverse.py."""
    if TERMS > 1:
        bits = gl.cast(x, gl.int32, bitcast=True)
        return gl.cast((bits + 0x1000) & -0x2000, gl.float32, bitcast=True)
    else:
        return x


@gluon.jit
def pair(i, j, n: gl.constexpr):
    """Whether row i and column j are in the same pair of blocks of 2^n, the row in the second block
    and the column in the first: n is the highest bit in which they differ, and i has it."""
    return (((i ^ j) >> n) == 1) & (i > j)


@gluon.jit
def in_order(x):
    """x [4, 16, 16] with each 8 columns in the order 0, 2, 4, 6, 1, 3, 5, 7: a lane has columns
    2 t and 2 t + 1 of a result, and numbers t and t + 4 of an operand's inner dimension."""
    x = gl.permute(gl.reshape(x, [4, 16, 2, 4, 2]), [0, 1, 2, 4, 3])
    return gl.reshape(x, [4, 16, 16])


@gluon.jit
def plus_product(x, a, b_t, TERMS: gl.constexpr):
    """x + a @ b [4, 16, 16] in TF32, where b_t is the transpose of b. Both operands stay in the
    registers in which they are."""
    a, b_t = in_order(nearest(a, TERMS)), in_order(nearest(b_t, TERMS))
    a = gl.convert_layout(a, gl.DotOperandLayout(0, blocks(), 1))
    b = gl.convert_layout(gl.permute(b_t, [0, 2, 1]), gl.DotOperandLayout(1, blocks(), 1))
    return mma_v2(a, b, x, input_precision="tf32")


@gluon.jit
def store_two(a, b, place):
    """Stores a and b [2, 2, 16, 16] to place[0] and place[1], shared memory. Two stores would have
    a barrier between them, since the compiler cannot tell that they do not overlap."""
    x = gl.permute(gl.join(a, b), [4, 0, 1, 2, 3])
    banks: gl.constexpr = gl.SwizzledSharedLayout(8, 2, 2, [4, 3, 2, 1, 0])
    place._reinterpret(gl.float32, [2, 2, 2, 16, 16], banks).store(x)


@gluon.jit
def invert(x, places, none, TERMS: gl.constexpr):
    """The blocks of (I - N)^-1 on which each warp works, [4, 16, 16] each: the diagonal ones, those
    that join two of them, and those that join the halves. N: x [64, 64] below the diagonal;
    places: four of `scratch`."""
    s_pairs, s_far, s_columns, s_transposed = places
    zero = gl.full([4, 16, 16], 0.0, gl.float32, blocks())
    w = warps(none)
    first = w % 2 == 0

    # What other warps need goes through shared memory.
    b_0, b_1, b_2, b_3 = of_columns(x)
    store_two(swapped(b_0), swapped(b_1), s_far)
    s_pairs.index(0).store(by_half(gl.where(w < 2, b_0, b_2)))
    diagonal = on_diagonal((b_0, b_1, b_2, b_3), w)
    barrier()  # all blocks are there, and leave the registers

    # Inverses of blocks of 16, X, and their transposes, Y.
    i, j = for_masks(rows_of_blocks(), none), for_masks(columns_of_blocks(), none)
    one = gl.where(i == j, 1.0, zero)
    C = gl.where(pair(i, j, 0), diagonal, 0.0)
    X, Y = one + C, plus_product(one, one, C, TERMS)
    for level in gl.static_range(1, 4):
        C = gl.where(pair(i, j, level), diagonal, 0.0)
        P = plus_product(zero, Y, C, TERMS)  # (C X)^T
        X, Y = plus_product(X, X, P, TERMS), plus_product(Y, P, X, TERMS)

    # Joined to inverses of blocks of 32: X of a half's first warp, 0, R and X of its second one.
    s_pairs.index(1).store(by_half(gl.where(first, Y, X)))
    barrier()
    pairs = s_pairs.index(1)
    P = plus_product(zero, for_each(pairs, 0, 1), for_each(s_pairs.index(0), 1, 1), TERMS)
    X_1 = for_each(pairs, 1, 1)
    R, R_t = plus_product(zero, X_1, P, TERMS), plus_product(zero, P, X_1, TERMS)
    store_two(swapped(gl.where(first, X, R)), swapped(gl.where(first, 0.0, X)), s_columns)
    store_two(by_half(gl.where(first, Y, 0.0)), by_half(gl.where(first, R_t, Y)), s_transposed)
    barrier()

    # Joined to the whole inverse.
    P = zero
    for n in gl.static_range(2):
        transposed = for_each(s_transposed.index(n), 0, 0)
        P = plus_product(P, transposed, for_each(s_far.index(n), 1, 1), TERMS)
    s_pairs.index(0).store(by_half(P))
    barrier()
    Q = zero
    for n in gl.static_range(2):
        inverse = for_each(s_columns.index(n), 1, 1)
        Q = plus_product(Q, inverse, for_each(s_pairs.index(0), n, 0), TERMS)
    return X, R, Q


@gluon.constexpr_function
def in_fours():
    """As `blocks`, but a lane has four columns in succession instead of two times two."""
    registers, lanes = [[0, 0, 1], [0, 0, 2], [0, 8, 0]], [[0, 0, 8], [0, 0, 4]]
    lanes += [[0, 1, 0], [0, 2, 0], [0, 4, 0]]
    return gl.DistributedLinearLayout(registers, lanes, [[1, 0, 0], [2, 0, 0]], [], [4, 16, 16])


@gluon.jit
def store_blocks(x, to, none):
    """Stores the blocks of `invert` as a matrix [64, 64], with zeros above them."""
    X, R, Q = x
    half: gl.constexpr = to.dtype.element_ty
    fours: gl.constexpr = in_fours()
    w = none + gl.arange(0, 4, gl.SliceLayout(1, gl.SliceLayout(2, fours)))[:, None][:, :, None]
    i = gl.arange(0, 16, gl.SliceLayout(0, gl.SliceLayout(2, fours)))[None, :][:, :, None]
    j = gl.arange(0, 16, gl.SliceLayout(0, gl.SliceLayout(1, fours)))[None, :][:, None, :]
    zero = gl.full([4, 16, 16], 0.0, half, fours)
    DOWN: gl.constexpr = 16 * 64  # from a block to the one below it; 16 to the one beside it
    of_warp = to + (w * DOWN + i * 64 + j)
    of_square = to + ((w >> 1) * DOWN + (w & 1) * 16 + i * 64 + j)
    gl.store(of_warp + w * 16, gl.convert_layout(X.to(half), fours))
    R = gl.where(w % 2 == 0, zero, gl.convert_layout(R.to(half), fours))
    gl.store(of_warp + (w ^ 1) * 16, R)
    gl.store(of_square + 2 * DOWN, gl.convert_layout(Q.to(half), fours))
    gl.store(of_square + 2 * 16, zero)


@gluon.jit
def store_inverse(x, to, places, none, TERMS: gl.constexpr):
    """Stores (I - N)^-1 as TERMS tiles [64, 64] that add up to it. N: x [64, 64] below the
    diagonal; places: four times 8 KiB of shared memory, of which the first is a tile [64, 64]."""
    s_out, s_1, s_2, s_3 = places
    half: gl.constexpr = s_out.dtype
    X, R, Q = invert(x, (scratch(s_out), scratch(s_1), scratch(s_2), scratch(s_3)), none, TERMS)
    store_blocks((X, R, Q), to, none)
    if TERMS > 1:
        rest = rounded_off(X, half), rounded_off(R, half), rounded_off(Q, half)
        store_blocks(rest, to + 64 * 64, none)
