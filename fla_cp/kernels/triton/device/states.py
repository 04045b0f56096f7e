"""States and operands of the scans: loads, stores and products."""

import triton
import triton.language as tl

from fla_cp.kernels.triton.device.blocks import dot, load_block, load_rows


@triton.jit
def load_state(ptr, o_k, o_v, s_k, s_v, K: tl.constexpr, V: tl.constexpr):
    """[BK, BV] of the state at ptr, [K, V] by strides: of either layout outside."""
    m = (o_k < K)[:, None] & (o_v < V)[None, :]
    return tl.load(ptr + o_k[:, None] * s_k + o_v[None, :] * s_v, mask=m, other=0.0)


@triton.jit
def store_state(ptr, x, o_k, o_v, s_k, s_v, K: tl.constexpr, V: tl.constexpr):
    m = (o_k < K)[:, None] & (o_v < V)[None, :]
    tl.store(ptr + o_k[:, None] * s_k + o_v[None, :] * s_v, x.to(ptr.dtype.element_ty), mask=m)


@triton.jit
def load_operand(
    ptr, i_ch, i_h, t, x_t, x_h, o_i, o_k, m_r, K: tl.constexpr, G: tl.constexpr, HEAD: tl.constexpr
):
    """[BT, BK] of a chunk: of the input [T, H, K] with HEAD, else of [NC, HV, C, K]."""
    BT: tl.constexpr = o_i.shape[0]
    if HEAD:
        return load_rows(ptr + (i_h // G) * x_h + t * x_t, o_i, x_t, m_r, o_k, K)
    else:
        return load_block(ptr + i_ch * BT * K, o_i, o_k, BT, K)


@triton.jit
def times(a, x, FLIP: tl.constexpr, PRECISION: tl.constexpr, acc=None):
    """a @ x; with FLIP x^T -> (a @ x)^T, so that x stays in registers and is stored nowhere."""
    if FLIP:
        return dot(x, tl.trans(a), PRECISION, acc=acc)
    else:
        return dot(a, x, PRECISION, acc=acc)


@triton.jit
def of_rows(x, FLIP: tl.constexpr):
    """A number for each row of a product of `times`."""
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
