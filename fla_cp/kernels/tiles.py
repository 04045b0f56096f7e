"""Index and arithmetic helpers that several kernels share."""

import triton
import triton.language as tl

LOG2E = tl.constexpr(1.4426950408889634)


@triton.jit
def load_rows(ptr, o_r, stride_r, m_r, o_c, C: tl.constexpr):
    """[rows, cols] of a matrix with unit column stride, zero outside."""
    return tl.load(
        ptr + o_r[:, None] * stride_r + o_c[None, :],
        mask=m_r[:, None] & (o_c < C)[None, :],
        other=0.0,
    )


@triton.jit
def store_rows(ptr, x, o_r, stride_r, m_r, o_c, C: tl.constexpr):
    tl.store(
        ptr + o_r[:, None] * stride_r + o_c[None, :],
        x.to(ptr.dtype.element_ty),
        mask=m_r[:, None] & (o_c < C)[None, :],
    )


@triton.jit
def load_block(ptr, o_r, o_c, R: tl.constexpr, C: tl.constexpr):
    """A dense [R, C] block, zero beyond its edges."""
    return tl.load(
        ptr + o_r[:, None] * C + o_c[None, :],
        mask=(o_r < R)[:, None] & (o_c < C)[None, :],
        other=0.0,
    )


@triton.jit
def store_block(ptr, x, o_r, o_c, R: tl.constexpr, C: tl.constexpr):
    tl.store(
        ptr + o_r[:, None] * C + o_c[None, :],
        x.to(ptr.dtype.element_ty),
        mask=(o_r < R)[:, None] & (o_c < C)[None, :],
    )


@triton.jit
def decay_exp(x, EXP2: tl.constexpr):
    """Decay factor of a difference of gc, in log2 units with EXP2, else natural."""
    if EXP2:
        return tl.exp2(x)
    else:
        return tl.exp(x)


@triton.jit
def dot(a, b, PRECISION: tl.constexpr, acc=None):
    """Matrix product summed in fp32; fp32 operands at PRECISION ("ieee", "tf32x3" or "tf32")."""
    return tl.dot(a, b, acc=acc, input_precision=PRECISION)


@triton.jit
def parts(x, operand: tl.constexpr):
    """x as a sum of bf16 tiles whose products with small integers are exact; x itself for fp32."""
    if operand == tl.float32:
        return (x,)
    else:
        high = x.to(tl.bfloat16)
        return (high, (x - high.to(tl.float32)).to(tl.bfloat16))


@triton.jit
def sum_rows(E, x, PRECISION: tl.constexpr):
    """[BT, BK]: sum_t E[i, t] x[t] for E of -1, 0 and 1; x as `parts` gives it."""
    acc = tl.dot(E.to(x[0].dtype), x[0], input_precision=PRECISION)
    for i in tl.static_range(1, len(x)):
        acc = tl.dot(E.to(x[0].dtype), x[i], acc=acc)
    return acc


@triton.jit
def up_to(i):
    """E of the inclusive sum from the chunk's start, for rows i = 0, 1, .."""
    return i[:, None] >= i[None, :]


@triton.jit
def after(i):
    """E of the exclusive sum up to the chunk's end."""
    return i[:, None] < i[None, :]


@triton.jit
def from_here(i):
    """E of the inclusive sum up to the chunk's end."""
    return i[:, None] <= i[None, :]


@triton.jit
def within_pair(i, S):
    """E of the log decay between each row and the last row r of its pair's first S-block.

    Row i of a second block: the steps r < t <= i. Row j of a first block: j < t <= r. Both sums
    are at most zero.
    """
    same = (i // S)[:, None] == (i // S)[None, :]
    second = (i // S) % 2 == 1
    return same & ((i[:, None] >= i[None, :]) == second[:, None])


@triton.jit
def from_middle(i, S):
    """E of the log decay from the middle row of each S-block to each row, negative before it."""
    middle = (i // S) * S + (S // 2 - 1)
    forth = (i[None, :] > middle[:, None]) & (i[None, :] <= i[:, None])
    back = (i[None, :] <= middle[:, None]) & (i[None, :] > i[:, None])
    return forth.to(tl.float32) - back.to(tl.float32)


@triton.jit
def pair_mask(i, S, TRANSPOSED: tl.constexpr = False):
    """[BT, BT]: rows in the second and columns in the first block of the same pair of S-blocks."""
    same = (i // (2 * S))[:, None] == (i // (2 * S))[None, :]
    second = i % (2 * S) >= S
    first = i % (2 * S) < S
    if TRANSPOSED:
        return same & first[:, None] & second[None, :]
    else:
        return same & second[:, None] & first[None, :]


@triton.jit
def block_mask(i, S, TRANSPOSED: tl.constexpr = False):
    """[BT, BT]: j < i (transposed: j > i) inside the same block of S rows."""
    same = (i // S)[:, None] == (i // S)[None, :]
    if TRANSPOSED:
        return same & (i[:, None] < i[None, :])
    else:
        return same & (i[:, None] > i[None, :])


@triton.jit
def unhoisted(i, step, steps):
    """i, in a form that the compiler cannot move out of a loop over `step` of `steps`.

    The 0/1 matrices that are built from i would otherwise be formed once before the loop and
    kept in registers, which then spill: 2.2 kB a thread in intra_bwd (docs/log.md).
    """
    return i + step // steps
