"""What both backward kernels with one decay a channel form alike."""

from typing import Any, NamedTuple

import triton
import triton.language as tl

from fla_cp.kernels.triton.device.blocks import (
    dot,
    gate_rows,
    load_block,
    load_rows,
    parts,
    rows_from,
    store_rows,
    sum_steps,
)
from fla_cp.kernels.triton.device.bundles import Rows
from fla_cp.kernels.triton.device.channelwise_decay import load_gate
from fla_cp.kernels.triton.device.decay_sums import FROM_HERE
from fla_cp.kernels.triton.device.gates import gate_slope, rate_slope
from fla_cp.kernels.triton.device.opaque import opaque
from fla_cp.kernels.triton.device.planes import GRAD_PLANES


class Here(NamedTuple):
    """A chunk and head: its first token, rows and number, and where each tensor of `Saved` and
    `Grads` holds what belongs to it. p: what reads the state, k if there is no p."""

    start: Any
    n_rows: Any
    i_ch: Any
    q: Rows
    k: Rows
    p: Rows
    do: Rows
    h: Any
    dh: Any
    v_new: Any
    y: Any
    rows: Any
    scores: Any
    row_grads: Any


@triton.jit
def open_chunk(x, out, chunks, i_c, i_hv, S: tl.constexpr, PLANES: tl.constexpr):
    """`Here` of chunk i_c and head i_hv."""
    n_rows = tl.load(chunks.rows + i_c)
    start = tl.load(chunks.start + i_c).to(tl.int64)
    i_h, i_ch = i_hv // S.G, i_c * S.HV + i_hv
    q, k = rows_from(x.q, start, i_h), rows_from(x.k, start, i_h)
    p = k
    if S.REMOVAL == "p":
        p = rows_from(x.p, start, i_h)
    do = rows_from(x.do, start, i_hv)
    h, dh = x.h + i_ch * S.K * S.V, x.dh + i_ch * S.K * S.V
    v_new, y = x.v_new + i_ch * S.BT * S.V, x.y + i_ch * S.BT * S.V
    rows, scores = x.rows + i_ch * PLANES * S.BT, out.scores + i_ch * 2 * S.BT * S.BT
    row_grads = out.row_grads + i_ch * GRAD_PLANES * S.BT
    return Here(start, n_rows, i_ch, q, k, p, do, h, dh, v_new, y, rows, scores, row_grads)


@triton.jit
def state_products(x, i, m_i, o_k, S: tl.constexpr, SUMS: tl.constexpr):
    """The states' part in the gradients of the row factors q and beta k and of the column factor k,
    [BT, BK] each; that of beta k is zero where the rule removes nothing. With SUMS also h dh summed
    over values [BK], for kernels whose loop is not pipelined (`row_sums`)."""
    b_dq = tl.zeros([S.BT, S.BK], tl.float32)
    b_dr = tl.zeros([S.BT, S.BK], tl.float32)
    b_dc = tl.zeros([S.BT, S.BK], tl.float32)
    b_dl = tl.zeros([S.BK], tl.float32)
    for i_v in tl.range((S.V + S.BV - 1) // S.BV, num_stages=S.NS):
        o_v = i_v * S.BV + tl.arange(0, S.BV)
        b_h = load_block(x.h, o_k, o_v, S.K, S.V)
        b_dh = load_block(x.dh, o_k, o_v, S.K, S.V)
        b_do = load_rows(x.do, i, m_i, o_v, S.V).to(x.v_new.dtype.element_ty)
        b_dq = dot(b_do, tl.trans(b_h), S.PRECISION, acc=b_dq)
        if S.REMOVAL != "none":
            b_y = load_block(x.y, i, o_v, S.BT, S.V)
            b_dr = dot(b_y, tl.trans(b_h), S.PRECISION, acc=b_dr)
        b_vn = load_block(x.v_new, i, o_v, S.BT, S.V)
        b_dc = dot(b_vn, tl.trans(b_dh), S.PRECISION, acc=b_dc)
        if SUMS:
            b_dl += tl.sum(b_h.to(tl.float32) * b_dh.to(tl.float32), axis=1)
    return b_dq, b_dr, b_dc, b_dl


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
    factors = rows + plane * i.shape[0]
    return load_rows(x, i, m_i, o_k, K).to(tl.float32) * tl.load(factors + i)[:, None]


@triton.jit
def load_pairs(ptr, at, pairs):
    """The scores at offsets [BT, BT] or [BT / 16, 16, 16], zero outside `pairs`. Pairs of [BT, BT]
    are whole blocks of 16, so what is masked is not even loaded."""
    if len(at.shape) == 2:
        return tl.load(ptr + at, mask=pairs, other=0.0)
    else:
        return masked(tl.load(ptr + at), pairs)


@triton.jit
def level_grads(grads, f, f_p, factors, dscores, at, pairs, second, n_rows, S: tl.constexpr):
    """The gradients of q, beta k, k and gc with one level's pairs added. f: each row's decay;
    factors: q, k, beta and what reads the state, whose decay is f_p. If that is p, in half
    precision there is a last gradient, that of the sums up to the row before; gc's contains it. At
    a level a row is either row or column of the scores, which are mirrored: one product with row
    factors in second blocks and column factors in first blocks gives the gradients of both."""
    b_dq, b_dr, b_dc, b_dgc = grads[0], grads[1], grads[2], grads[3]
    b_q, b_k, b_beta, b_p = factors
    operand: tl.constexpr = dscores.dtype.element_ty
    f_row = tl.where(second, f, 0.0)
    b_x = (tl.where(second, b_q, b_k) * f).to(operand)
    b_r = dot(load_pairs(dscores, at, pairs), b_x, S.PRECISION)
    b_dq += f_row * b_r
    b_t = b_x.to(tl.float32) * b_r
    if S.REMOVAL != "none":
        if operand == tl.float32:  # frees registers: nothing is loaded earlier, no address kept
            dscores = opaque(dscores, n_rows, S.BT, 2000)
            tl.debug_barrier()
        if S.REMOVAL == "p":
            b_x = tl.where(second, b_beta * (b_p * f_p), b_k * f).to(operand)
        else:
            b_x = (tl.where(second, b_beta, 1.0) * (b_k * f)).to(operand)
        b_c = dot(load_pairs(dscores + S.BT * S.BT, at, pairs), b_x, S.PRECISION)
        if S.REMOVAL == "p":
            b_dr += tl.where(second, f_p, 0.0) * b_c
        else:
            b_dr += f_row * b_c
        b_t += b_x.to(tl.float32) * b_c
        b_r += b_c
    b_dc += (f - f_row) * b_r
    b_dgc += tl.where(second, 1.0, -1.0) * b_t
    if len(grads) > 4:
        b_shift = grads[4] + tl.where(second, b_x.to(tl.float32) * b_c, 0.0)
        return b_dq, b_dr, b_dc, b_dgc, b_shift
    else:
        return b_dq, b_dr, b_dc, b_dgc


@triton.jit
def store_gate_grads(
    b_dgc,
    b_shift,
    x,
    gate,
    sums,
    out,
    chunks,
    i_c,
    i_hv,
    i_k,
    S: tl.constexpr,
    R: tl.constexpr,
    PHASE: tl.constexpr,
):
    """Stores, from the gradients of gc [BT, BK], those of g and this program's shares of dA_log
    (one number) and ddt_bias [BK]. b_shift: with p, what of a row's gradient of gc is that of the
    sum up to the row before, which does not contain its own g; else None. It is a kernel's last
    phase and forms all indices again (`opaque`)."""
    tiles: tl.constexpr = (S.K + S.BK - 1) // S.BK
    tl.debug_barrier()
    n_rows = tl.load(chunks.rows + i_c)
    i = opaque(tl.arange(0, S.BT), n_rows, S.BT, PHASE)
    i_k, i_c = opaque(i_k, n_rows, S.BT, PHASE), opaque(i_c, n_rows, S.BT, PHASE)
    i_hv = opaque(i_hv, n_rows, S.BT, PHASE)
    start = tl.load(chunks.start + i_c).to(tl.int64)
    m_i, o_k = i < n_rows, i_k * S.BK + tl.arange(0, S.BK)
    g = gate_rows(gate, start, i_hv)
    b_dg = sum_steps(sums, FROM_HERE, i, parts(b_dgc, x.v_new.dtype.element_ty), S.PRECISION)
    if b_shift is not None:
        b_dg -= b_shift
    b_dg = tl.where(m_i[:, None], b_dg, 0.0)
    raw, rate = load_gate(gate, g, i_hv, i, m_i, o_k, S)
    b_draw = b_dg * gate_slope(raw, rate, gate.bound, R.GATE)
    store_rows(out.dg + (start * S.HV + i_hv) * S.K, b_draw, i, S.HV * S.K, m_i, o_k, S.K)
    if out.dA_log is not None:
        b_dA = tl.sum(rate_slope(raw, rate, gate.bound, b_dg, b_draw, R.GATE))
        tl.store(out.dA_log + (i_c * tiles + i_k) * S.HV + i_hv, b_dA)
    if out.ddt_bias is not None:
        to = out.ddt_bias + (i_c * S.HV + i_hv) * S.K + o_k
        tl.store(to, tl.sum(b_draw, axis=0), mask=o_k < S.K)
