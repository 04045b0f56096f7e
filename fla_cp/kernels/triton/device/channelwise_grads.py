"""Gradients that both backward kernels with one decay a channel form alike."""

import triton
import triton.language as tl

from fla_cp.kernels.triton.device.blocks import dot, load_rows, parts, store_rows, sum_steps
from fla_cp.kernels.triton.device.bundles import rows_from
from fla_cp.kernels.triton.device.channelwise_decay import load_gate
from fla_cp.kernels.triton.device.decay_sums import FROM_HERE
from fla_cp.kernels.triton.device.gates import gate_slope, rate_slope
from fla_cp.kernels.triton.device.opaque import opaque


@triton.jit
def load_scores(ptr, i):
    """The [BT, BT] tile at ptr."""
    BT: tl.constexpr = i.shape[0]
    return tl.load(ptr + i[:, None] * BT + i[None, :])


@triton.jit
def masked(x, mask):
    return tl.where(mask, x, tl.zeros_like(x))


@triton.jit
def as_rows(x):
    """[BT / 16, 16, BK] as [BT, BK]."""
    return tl.reshape(x, [x.shape[0] * 16, x.shape[2]])


@triton.jit
def load_scaled(x, rows, plane, i, m_i, o_k, K: tl.constexpr):
    """Rows of q or k in fp32, each times its factor in that plane of the chunk's rows."""
    factors = tl.load(rows + plane * i.shape[0] + i)
    return load_rows(x, i, m_i, o_k, K).to(tl.float32) * factors[:, None]


@triton.jit
def load_pairs(ptr, at, pairs):
    """Scores at offsets [BT, BT] or [BT / 16, 16, 16], zero but for pairs. Those of [BT, BT] are
    whole blocks of 16, so what is masked is not even loaded."""
    if len(at.shape) == 2:
        return tl.load(ptr + at, mask=pairs, other=0.0)
    else:
        return masked(tl.load(ptr + at), pairs)


@triton.jit
def level_grads(
    b_dq,
    b_dr,
    b_dc,
    b_dgc,
    f,
    b_q,
    b_k,
    b_beta,
    dscores,
    at,
    pairs,
    second,
    n_rows,
    BT: tl.constexpr,
    REMOVES: tl.constexpr,
    PRECISION: tl.constexpr,
):
    """Gradients with one level's pairs added; f: each row's factor. At a level a row is either row
    or column of the scores, which are mirrored: one product with row factors in second blocks and
    column factors in first blocks gives the gradients of both."""
    operand: tl.constexpr = dscores.dtype.element_ty
    f_row = tl.where(second, f, 0.0)
    b_x = (tl.where(second, b_q, b_k) * f).to(operand)
    b_r = dot(load_pairs(dscores, at, pairs), b_x, PRECISION)
    b_dq += f_row * b_r
    b_t = b_x.to(tl.float32) * b_r
    if REMOVES:
        if operand == tl.float32:  # for registers: not loaded earlier, no addresses kept
            dscores = opaque(dscores, n_rows, BT, 2000)
            tl.debug_barrier()
        b_x = (tl.where(second, b_beta, 1.0) * (b_k * f)).to(operand)
        b_c = dot(load_pairs(dscores + BT * BT, at, pairs), b_x, PRECISION)
        b_dr += f_row * b_c
        b_t += b_x.to(tl.float32) * b_c
        b_r += b_c
    b_dc += (f - f_row) * b_r
    b_dgc += tl.where(second, 1.0, -1.0) * b_t
    return b_dq, b_dr, b_dc, b_dgc


@triton.jit
def store_gate_grads(
    b_dgc, gate, sums, out, i_c, i_hv, i_k, start, i, m_i, S: tl.constexpr, O: tl.constexpr
):
    """From the gradients of gc [BT, BK]: those of g, and this program's shares of dA_log (one
    number) and ddt_bias [BK], where `out` has them."""
    tiles: tl.constexpr = (S.K + S.BK - 1) // S.BK
    i_ch = i_c * S.HV + i_hv
    o_k = i_k * S.BK + tl.arange(0, S.BK)
    b_dg = sum_steps(sums, FROM_HERE, i, parts(b_dgc, sums.dtype.element_ty), S.PRECISION)
    b_dg = tl.where(m_i[:, None], b_dg, 0.0)
    raw, rate = load_gate(gate, rows_from(gate.g, start, i_hv), i_hv, i, m_i, o_k, S)
    b_draw = b_dg * gate_slope(raw, rate, gate.bound, O.GATE)
    store_rows(out.dg + (start * S.HV + i_hv) * S.K, b_draw, i, S.HV * S.K, m_i, o_k, S.K)
    if out.dA_log is not None:
        b_dA = tl.sum(rate_slope(raw, rate, gate.bound, b_dg, b_draw, O.GATE))
        tl.store(out.dA_log + (i_c * tiles + i_k) * S.HV + i_hv, b_dA)
    if out.ddt_bias is not None:
        to = out.ddt_bias + i_ch * S.K + o_k
        tl.store(to, tl.sum(b_draw, axis=0), mask=o_k < S.K)
