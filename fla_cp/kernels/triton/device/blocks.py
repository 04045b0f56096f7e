"""Index and arithmetic helpers that several kernels share."""

import triton
import triton.language as tl
from torch import Tensor

from fla_cp.kernels.triton.device.bundles import Rows
from fla_cp.rule import NORM_EPS

EPS = tl.constexpr(NORM_EPS)


def unit_rows(x: Tensor) -> Tensor:
    """x, or a copy, with unit stride in its last dim."""
    return x if x.stride(-1) == 1 else x.contiguous()


@triton.jit
def rows_from(x, t, i_h):
    """x from token t on, of head i_h."""
    return Rows(x.ptr + i_h * x.head + t * x.row, x.row, x.head)


@triton.jit
def gate_rows(gate, t, i_h):
    """The rows of g from token t on, of head i_h."""
    return rows_from(Rows(gate.g, gate.row, gate.head), t, i_h)


@triton.constexpr_function
def divides(step, total):
    return total % step == 0


@triton.jit
def load_rows(x, o_r, m_r, o_c, C: tl.constexpr):
    """[rows, cols] of Rows x, zero outside."""
    p = x.ptr + o_r[:, None] * x.row + o_c[None, :]
    if divides(o_c.shape[0], C):
        return tl.load(p, mask=m_r[:, None], other=0.0)
    else:
        return tl.load(p, mask=m_r[:, None] & (o_c < C)[None, :], other=0.0)


@triton.jit
def store_rows(ptr, x, o_r, stride_r, m_r, o_c, C: tl.constexpr):
    p = ptr + o_r[:, None] * stride_r + o_c[None, :]
    if divides(o_c.shape[0], C):
        tl.store(p, x.to(ptr.dtype.element_ty), mask=m_r[:, None])
    else:
        tl.store(p, x.to(ptr.dtype.element_ty), mask=m_r[:, None] & (o_c < C)[None, :])


@triton.jit
def load_block(ptr, o_r, o_c, R: tl.constexpr, C: tl.constexpr):
    """A dense [R, C] block, zero beyond its edges."""
    p = ptr + o_r[:, None] * C + o_c[None, :]
    if divides(o_r.shape[0], R) and divides(o_c.shape[0], C):
        return tl.load(p)
    else:
        return tl.load(p, mask=(o_r < R)[:, None] & (o_c < C)[None, :], other=0.0)


@triton.jit
def load_part(ptr, r, c, o_r, o_c, R: tl.constexpr, C: tl.constexpr):
    """The block at row r and column c of a dense [R, C] one, zero beyond its edges; r and c go into
    the pointer, so that a thread's addresses differ by constants and one register pair holds all.
    """
    p = ptr + (r * C + c) + (o_r[:, None] * C + o_c[None, :])
    if divides(o_r.shape[0], R) and divides(o_c.shape[0], C):
        return tl.load(p)
    else:
        return tl.load(p, mask=(o_r < R - r)[:, None] & (o_c < C - c)[None, :], other=0.0)


@triton.jit
def row_sums(x, y, r, o_r, o_c, R: tl.constexpr, C: tl.constexpr):
    """x * y summed over the columns of dense [R, C] blocks, for the rows from r on. It loads x and
    y itself: only products may read what a pipelined loop loads for them (`overwritten` in
    tests/aot/)."""
    total = tl.zeros([o_r.shape[0]], tl.float32)
    for i_c in tl.static_range((C + o_c.shape[0] - 1) // o_c.shape[0]):
        b_x = load_part(x, r, i_c * o_c.shape[0], o_r, o_c, R, C).to(tl.float32)
        b_y = load_part(y, r, i_c * o_c.shape[0], o_r, o_c, R, C).to(tl.float32)
        total += tl.sum(b_x * b_y, axis=1)
    return total


@triton.jit
def store_block(ptr, x, o_r, o_c, R: tl.constexpr, C: tl.constexpr):
    p = ptr + o_r[:, None] * C + o_c[None, :]
    if divides(o_r.shape[0], R) and divides(o_c.shape[0], C):
        tl.store(p, x.to(ptr.dtype.element_ty))
    else:
        tl.store(p, x.to(ptr.dtype.element_ty), mask=(o_r < R)[:, None] & (o_c < C)[None, :])


@triton.jit
def rounded_off(x, operand: tl.constexpr):
    """The part of x that rounding to `operand` loses, as `operand`: the second of its two terms."""
    return (x - x.to(operand).to(tl.float32)).to(operand)


@triton.jit
def store_square(ptr, i_ch, x, i, TERMS: tl.constexpr):
    """Stores T or Aqk of a chunk, x [C, C] in fp32, as TERMS tiles that add up to it."""
    C: tl.constexpr = i.shape[0]
    store_block(ptr + i_ch * (TERMS * C * C), x, i, i, C, C)
    if TERMS > 1:
        low = rounded_off(x, ptr.dtype.element_ty)
        store_block(ptr + i_ch * (TERMS * C * C) + C * C, low, i, i, C, C)


@triton.jit
def decay_exp(x, EXP2: tl.constexpr):
    """The decay factor of a difference of gc, which is in log2 units with EXP2, else natural."""
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
def load_sums(sums, kind, i):
    """Table `kind` of decay_sums.py [BT, BT]."""
    BT: tl.constexpr = i.shape[0]
    return tl.load(sums + kind * BT * BT + i[:, None] * BT + i[None, :])


@triton.jit
def apply_sums(E, x, PRECISION: tl.constexpr):
    """[BT, BK]: E @ x, exact up to fp32 rounding; x as `parts` gives it."""
    acc = tl.dot(E, x[0], input_precision=PRECISION)
    for n in tl.static_range(1, len(x)):
        acc = tl.dot(E, x[n], acc=acc)
    return acc


@triton.jit
def sum_steps(sums, kind, i, x, PRECISION: tl.constexpr):
    return apply_sums(load_sums(sums, kind, i), x, PRECISION)


@triton.jit
def pair_mask(i, n):
    """[BT, BT]: rows in the second and columns in the first block of the same pair of blocks of
    2^n."""
    pair, second = i >> (n + 1), (i >> n) & 1
    row, column = tl.where(second == 1, pair, -1), tl.where(second == 0, pair, -2)
    return row[:, None] == column[None, :]


@triton.jit
def row_products(q, k, o_r, m_r, K: tl.constexpr, BK: tl.constexpr, NORM: tl.constexpr):
    """For each row the sum over channels of q k, and with NORM of q q and k k."""
    b_qk = tl.zeros([o_r.shape[0], BK], tl.float32)
    b_qq, b_kk = b_qk, b_qk
    for i_k in tl.static_range((K + BK - 1) // BK):
        o_k = i_k * BK + tl.arange(0, BK)
        b_q = load_rows(q, o_r, m_r, o_k, K).to(tl.float32)
        b_k = load_rows(k, o_r, m_r, o_k, K).to(tl.float32)
        b_qk += b_q * b_k
        if NORM:
            b_qq += b_q * b_q
            b_kk += b_k * b_k
    return tl.sum(b_qk, axis=1), tl.sum(b_qq, axis=1), tl.sum(b_kk, axis=1)
