"""Gradients of everything local to a chunk, from the two scans' results, in three launches.

With y = T^T dv_new (scan.py), the inverse needs no products of its own: dv = beta y and
dAkk = -tril(y v_new^T), next to dAqk = tril(do v_new^T).

1. `scores_bwd_kernel`, a program per (chunk, head): dAqk, dAkk, dv and v's share of dbeta.
2. `intra_bwd_kernel`, a program per (chunk, head, key tile): row and column factors of the scores
   get their gradients level by level as in intra.py. gc enters as exp(+gc_i) beside row factors
   and exp(-gc_j) beside column factors, so its gradient is elementwise: row * drow - col * dcol.
3. `norm_bwd_kernel`, a program per (chunk, head): the norm of q and k needs whole rows.

The gradients of the scores go through memory (`dscores`, two [C, C] tiles a chunk): a level reads
the part that it needs, already masked, and its transpose by swapped strides. Held in registers they
would spill, and transposing a product's result into another product is miscompiled on Hopper by
Triton 3.4 to 3.7.0. Inputs are loaded again rather than held, for the same reason: a program that
also looped over key tiles spilled 3 kB a thread (docs/log.md).
"""

import triton
import triton.language as tl

from .gate import sigmoid
from .intra import load_gate, row_rstd
from .tiles import (
    LOG2E,
    after,
    block_mask,
    decay_exp,
    dot,
    from_here,
    from_middle,
    load_block,
    load_rows,
    pair_mask,
    parts,
    store_block,
    store_rows,
    sum_rows,
    up_to,
    within_pair,
)


@triton.jit
def load_scores(ptr, i, mask, TRANSPOSED: tl.constexpr):
    """The [BT, BT] tile at ptr, or its transpose, where `mask`; zero elsewhere."""
    BT: tl.constexpr = i.shape[0]
    if TRANSPOSED:
        return tl.load(ptr + i[:, None] + i[None, :] * BT, mask=mask, other=0.0)
    else:
        return tl.load(ptr + i[:, None] * BT + i[None, :], mask=mask, other=0.0)


@triton.jit
def load_beta(beta, o_i, stride, m_i, factor, SIGMOID: tl.constexpr):
    """Activated beta [BT], fp32, zero beyond the chunk."""
    b_beta = tl.load(beta + o_i * stride, mask=m_i, other=0.0).to(tl.float32)
    if SIGMOID:
        b_beta = tl.where(m_i, factor * sigmoid(b_beta), 0.0)
    return b_beta


@triton.jit
def load_steps(
    g,
    A_log,
    dt_bias,
    i_hv,
    o_i,
    g_t,
    m_i,
    o_k,
    bound,
    K: tl.constexpr,
    GATE: tl.constexpr,
    EXP2: tl.constexpr,
):
    """Log decay of each token [BT, BK] in the unit of gc, zero beyond the chunk."""
    raw, rate = load_gate(g, A_log, dt_bias, i_hv, o_i, g_t, m_i, o_k, bound, K)
    b_g = tl.where(m_i[:, None], GATE(raw, rate, bound), 0.0)
    if EXP2:
        b_g *= LOG2E
    return b_g


@triton.jit
def scores_bwd_kernel(
    v,
    beta,
    do,
    v_new,
    y,
    dv,
    dbeta,
    dscores,
    chunk_start,
    chunk_rows,
    v_t,
    v_h,
    beta_t,
    do_t,
    do_h,
    beta_factor,
    HV: tl.constexpr,
    V: tl.constexpr,
    BT: tl.constexpr,
    BV: tl.constexpr,
    BETA_SIGMOID: tl.constexpr,
    PRECISION: tl.constexpr,
):
    """dscores [NC, HV, 2, C, C]: of the rows q and beta k. dbeta [1 + key tiles, T, HV]: plane 0,
    before the sigmoid's slope."""
    i_c, i_hv = tl.program_id(0).to(tl.int64), tl.program_id(1).to(tl.int64)
    o_i = tl.arange(0, BT)
    m_i = o_i < tl.load(chunk_rows + i_c)
    start = tl.load(chunk_start + i_c).to(tl.int64)
    i_ch = i_c * HV + i_hv
    v += i_hv * v_h + start * v_t
    do += i_hv * do_h + start * do_t
    dv += (start * HV + i_hv) * V
    dscores += i_ch * 2 * BT * BT
    operand = v_new.dtype.element_ty
    beta += i_hv + start * beta_t
    b_beta = load_beta(beta, o_i, beta_t, m_i, beta_factor, BETA_SIGMOID)
    b_ds = tl.zeros([BT, BT], tl.float32)
    b_da = tl.zeros([BT, BT], tl.float32)
    b_dbeta = tl.zeros_like(b_beta)
    for i_v in range((V + BV - 1) // BV):
        o_v = i_v * BV + tl.arange(0, BV)
        b_do = load_rows(do, o_i, do_t, m_i, o_v, V).to(operand)
        b_vn = tl.trans(load_block(v_new + i_ch * BT * V, o_i, o_v, BT, V))
        b_y = load_block(y + i_ch * BT * V, o_i, o_v, BT, V)
        b_ds = dot(b_do, b_vn, PRECISION, acc=b_ds)
        b_da = dot(b_y, b_vn, PRECISION, acc=b_da)
        b_v = load_rows(v, o_i, v_t, m_i, o_v, V).to(tl.float32)
        b_dbeta += tl.sum(b_v * b_y.to(tl.float32), axis=1)
        store_rows(dv, b_y.to(tl.float32) * b_beta[:, None], o_i, HV * V, m_i, o_v, V)
    store_block(dscores, b_ds, o_i, o_i, BT, BT)
    store_block(dscores + BT * BT, -b_da, o_i, o_i, BT, BT)
    tl.store(dbeta + (start + o_i) * HV + i_hv, b_dbeta, mask=m_i)


@triton.jit
def intra_bwd_kernel(
    q,
    k,
    g,
    beta,
    A_log,
    dt_bias,
    do,
    h,
    dh,
    v_new,
    y,
    dscores,
    dq,
    dk,
    dg,
    dbeta,
    dA_log,
    ddt_bias,
    chunk_start,
    chunk_rows,
    tokens,
    q_t,
    q_h,
    k_t,
    k_h,
    g_t,
    g_h,
    beta_t,
    do_t,
    do_h,
    scale,
    bound,
    beta_factor,
    HV: tl.constexpr,
    G: tl.constexpr,
    K: tl.constexpr,
    V: tl.constexpr,
    BT: tl.constexpr,
    BK: tl.constexpr,
    BV: tl.constexpr,
    GATE: tl.constexpr,
    SLOPE: tl.constexpr,
    RATE_SCALES_RAW: tl.constexpr,
    NORM: tl.constexpr,
    BETA_SIGMOID: tl.constexpr,
    SAFE: tl.constexpr,
    EXP2: tl.constexpr,
    EPS: tl.constexpr,
    PRECISION: tl.constexpr,
):
    """dq, dk: [T, HV, K] per value head, of the normalised rows. dA_log [NC, key tiles, HV] and
    ddt_bias [NC, HV, K]: one partial sum a program, or None. dbeta: plane 1 + tile.
    RATE_SCALES_RAW: g depends on rate * raw (else rate is a factor of g)."""
    i_c, i_hv = tl.program_id(0).to(tl.int64), tl.program_id(1).to(tl.int64)
    i_k = tl.program_id(2)
    i_h = i_hv // G
    i = tl.arange(0, BT)
    m_i = i < tl.load(chunk_rows + i_c)
    start = tl.load(chunk_start + i_c).to(tl.int64)
    i_ch = i_c * HV + i_hv
    q += i_h * q_h + start * q_t
    k += i_h * k_h + start * k_t
    g += i_hv * g_h + start * g_t
    beta += i_hv + start * beta_t
    do += i_hv * do_h + start * do_t
    v_new += i_ch * BT * V
    y += i_ch * BT * V
    h += i_ch * K * V
    dh += i_ch * K * V
    dq += (start * HV + i_hv) * K
    dk += (start * HV + i_hv) * K
    dg += (start * HV + i_hv) * K
    dscores += i_ch * 2 * BT * BT
    operand = v_new.dtype.element_ty
    o_k = i_k * BK + tl.arange(0, BK)
    b_beta = load_beta(beta, i, beta_t, m_i, beta_factor, BETA_SIGMOID)
    q_rstd = tl.zeros_like(b_beta) + scale
    k_rstd = tl.zeros_like(b_beta) + 1.0
    if NORM:
        q_rstd *= row_rstd(q, i, q_t, m_i, K, BK, EPS)
        k_rstd *= row_rstd(k, i, k_t, m_i, K, BK, EPS)

    # column factor k
    b_g = load_steps(g, A_log, dt_bias, i_hv, i, g_t, m_i, o_k, bound, K, GATE, EXP2)
    last = tl.sum(b_g, axis=0)
    steps = parts(b_g, operand)
    b_dc = tl.zeros([BT, BK], tl.float32)
    b_dl = tl.zeros([BK], tl.float32)
    for i_v in range((V + BV - 1) // BV):
        o_v = i_v * BV + tl.arange(0, BV)
        b_h = load_block(h, o_k, o_v, K, V)
        b_dh = load_block(dh, o_k, o_v, K, V)
        b_dc = dot(load_block(v_new, i, o_v, BT, V), tl.trans(b_dh), PRECISION, acc=b_dc)
        b_dl += tl.sum(b_h.to(tl.float32) * b_dh.to(tl.float32), axis=1)
    b_dc *= decay_exp(sum_rows(after(i), steps, PRECISION), EXP2)
    b_k = load_rows(k, i, k_t, m_i, o_k, K).to(tl.float32) * k_rstd[:, None]
    b_dl = b_dl * decay_exp(last, EXP2) + tl.sum(b_k * b_dc, axis=0)
    b_q = load_rows(q, i, q_t, m_i, o_k, K).to(tl.float32) * q_rstd[:, None]
    for level in range(2 if SAFE else 6):
        S = 32 >> level
        f = decay_exp(sum_rows(within_pair(i, S), steps, PRECISION), EXP2)
        mask = pair_mask(i, S, TRANSPOSED=True)
        b_c = dot(load_scores(dscores, i, mask, True), (b_q * f).to(operand), PRECISION)
        b_r = (b_k * f * b_beta[:, None]).to(operand)
        b_dst = load_scores(dscores + BT * BT, i, mask, True)
        b_dc += f * dot(b_dst, b_r, PRECISION, acc=b_c)
    if SAFE:
        diff = sum_rows(from_middle(i, 16), steps, PRECISION)
        f = decay_exp(diff, EXP2)
        mask = block_mask(i, 16, TRANSPOSED=True)
        b_c = dot(load_scores(dscores, i, mask, True), (b_q * f).to(operand), PRECISION)
        b_r = (b_k * f * b_beta[:, None]).to(operand)
        b_dst = load_scores(dscores + BT * BT, i, mask, True)
        b_c = dot(b_dst, b_r, PRECISION, acc=b_c)
        b_dc += decay_exp(-diff, EXP2) * b_c

    # row factors q and beta k
    tl.debug_barrier()
    b_g = load_steps(g, A_log, dt_bias, i_hv, i, g_t, m_i, o_k, bound, K, GATE, EXP2)
    steps = parts(b_g, operand)
    b_dq = tl.zeros([BT, BK], tl.float32)
    b_dr = tl.zeros([BT, BK], tl.float32)
    for i_v in range((V + BV - 1) // BV):
        o_v = i_v * BV + tl.arange(0, BV)
        b_h = tl.trans(load_block(h, o_k, o_v, K, V))
        b_do = load_rows(do, i, do_t, m_i, o_v, V).to(operand)
        b_dq = dot(b_do, b_h, PRECISION, acc=b_dq)
        b_dr = dot(load_block(y, i, o_v, BT, V), b_h, PRECISION, acc=b_dr)
    e = decay_exp(sum_rows(up_to(i), steps, PRECISION), EXP2)
    b_dq *= e
    b_dr *= -e
    b_k = load_rows(k, i, k_t, m_i, o_k, K).to(tl.float32) * k_rstd[:, None]
    for level in range(2 if SAFE else 6):
        S = 32 >> level
        f = decay_exp(sum_rows(within_pair(i, S), steps, PRECISION), EXP2)
        mask = pair_mask(i, S)
        b_kf = (b_k * f).to(operand)
        b_dq += f * dot(load_scores(dscores, i, mask, False), b_kf, PRECISION)
        b_dr += f * dot(load_scores(dscores + BT * BT, i, mask, False), b_kf, PRECISION)
    if SAFE:
        diff = sum_rows(from_middle(i, 16), steps, PRECISION)
        f = decay_exp(diff, EXP2)
        mask = block_mask(i, 16)
        b_kf = (b_k * decay_exp(-diff, EXP2)).to(operand)
        b_dq += f * dot(load_scores(dscores, i, mask, False), b_kf, PRECISION)
        b_dr += f * dot(load_scores(dscores + BT * BT, i, mask, False), b_kf, PRECISION)

    tl.debug_barrier()
    # in fp32, so that row and column of the diagonal cancel exactly in the gate's gradient
    diagonal = tl.load(dscores + i * (BT + 1)).to(tl.float32)[:, None]
    b_q = load_rows(q, i, q_t, m_i, o_k, K).to(tl.float32) * q_rstd[:, None]
    b_dq += diagonal * b_k
    b_dc += diagonal * b_q
    b_dbeta = tl.sum(b_k * b_dr, axis=1)
    dbeta += (i_k + 1).to(tl.int64) * tokens * HV + start * HV + i_hv
    tl.store(dbeta + i * HV, b_dbeta, mask=m_i)
    b_dr *= b_beta[:, None]
    store_rows(dq, b_dq * scale, i, HV * K, m_i, o_k, K)
    store_rows(dk, b_dr + b_dc, i, HV * K, m_i, o_k, K)
    b_dgc = parts(b_q * b_dq + b_k * (b_dr - b_dc), operand)
    b_dg = b_dl[None, :] + sum_rows(from_here(i), b_dgc, PRECISION)
    b_dg = tl.where(m_i[:, None], b_dg, 0.0)
    raw, rate = load_gate(g, A_log, dt_bias, i_hv, i, g_t, m_i, o_k, bound, K)
    b_draw = b_dg * SLOPE(raw, rate, bound)
    store_rows(dg, b_draw, i, HV * K, m_i, o_k, K)
    if dA_log is not None:
        if RATE_SCALES_RAW:
            b_dA = tl.sum(b_draw * raw)
        else:
            b_dA = tl.sum(b_dg * GATE(raw, rate, bound))
        tl.store(dA_log + (i_c * tl.num_programs(2) + i_k) * HV + i_hv, b_dA)
    if ddt_bias is not None:
        tl.store(ddt_bias + i_ch * K + o_k, tl.sum(b_draw, axis=0), mask=o_k < K)


@triton.jit
def norm_bwd_kernel(
    x,
    dx,
    chunk_start,
    chunk_rows,
    x_t,
    x_h,
    HV: tl.constexpr,
    G: tl.constexpr,
    K: tl.constexpr,
    BT: tl.constexpr,
    BK: tl.constexpr,
    EPS: tl.constexpr,
):
    """Turns dx [T, HV, K] of normalised rows into that of the rows x [T, H, K], in place."""
    i_c, i_hv = tl.program_id(0).to(tl.int64), tl.program_id(1).to(tl.int64)
    o_i = tl.arange(0, BT)
    o_k = tl.arange(0, BK)
    m_i = o_i < tl.load(chunk_rows + i_c)
    start = tl.load(chunk_start + i_c).to(tl.int64)
    x += i_hv // G * x_h + start * x_t
    dx += (start * HV + i_hv) * K
    b_x = load_rows(x, o_i, x_t, m_i, o_k, K).to(tl.float32)
    b_dx = load_rows(dx, o_i, HV * K, m_i, o_k, K).to(tl.float32)
    rstd = tl.rsqrt(tl.sum(b_x * b_x, axis=1) + EPS)[:, None]
    b_x *= rstd
    b_dx = rstd * (b_dx - b_x * tl.sum(b_x * b_dx, axis=1)[:, None])
    store_rows(dx, b_dx, o_i, HV * K, m_i, o_k, K)
