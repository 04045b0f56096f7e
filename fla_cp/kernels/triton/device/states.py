"""States and operands of the scans: loads, stores and products."""

import triton
import triton.language as tl

from fla_cp.kernels.triton.device.blocks import dot, load_block, load_rows, rows_from


@triton.jit
def load_state(x, at, o_k, o_v, S: tl.constexpr):
    """[BK, BV] of the state at `at`, [K, V] by the strides of x."""
    m = (o_k < S.K)[:, None] & (o_v < S.V)[None, :]
    return tl.load(at + o_k[:, None] * x.k + o_v[None, :] * x.v, mask=m, other=0.0)


@triton.jit
def store_state(x, at, b, o_k, o_v, S: tl.constexpr):
    m = (o_k < S.K)[:, None] & (o_v < S.V)[None, :]
    tl.store(at + o_k[:, None] * x.k + o_v[None, :] * x.v, b.to(at.dtype.element_ty), mask=m)


@triton.jit
def load_operand(x, i_ch, i_h, t, o_i, o_k, m_r, S: tl.constexpr):
    """[BT, BK] of a chunk: of the input [T, H, K] with one decay a head, else of [NC, HV, C, K]."""
    if S.HEAD:
        return load_rows(rows_from(x, t, i_h // S.G), o_i, m_r, o_k, S.K)
    else:
        return load_block(x.ptr + i_ch * S.BT * S.K, o_i, o_k, S.BT, S.K)


@triton.jit
def times(a, x, FLIP: tl.constexpr, PRECISION: tl.constexpr, acc=None):
    """a @ x; with FLIP x^T -> (a @ x)^T, so that x stays in registers and is stored nowhere."""
    if FLIP:
        return dot(x, tl.trans(a), PRECISION, acc=acc)
    else:
        return dot(a, x, PRECISION, acc=acc)


@triton.jit
def row_factors(x, FLIP: tl.constexpr):
    """x, one number for each row, broadcast as a factor of what `times` gives."""
    if FLIP:
        return x[None, :]
    else:
        return x[:, None]


@triton.jit
def flipped(x, FLIP: tl.constexpr):
    if FLIP:
        return tl.trans(x)
    else:
        return x
