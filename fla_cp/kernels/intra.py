"""Everything local to a chunk, in one pass over q, k, g and beta.

Per (chunk, value head): gate, norm, cumulative sum, Aqk, Akk and T = (I + Akk)^-1. Writes, in the
operands' dtype and chunk by chunk, qg = scale q exp(gc), kin = k exp(gc), kg = k exp(gc_C - gc),
T, Aqk (with scale), and in fp32 decay = exp(gc_C) and the activated beta.

Scores. For pairs of neighbouring S-blocks (S = 32, 16, ...) all rows of second blocks meet all
columns of first blocks in one [64, K] x [K, 64] product, with the last row of the first block as
reference; what lies outside the pairs is masked away afterwards. Every exponent is at most zero,
for any gate. With a safe gate the recursion ends at blocks of 16, whose middle row is the
reference: 8 steps of -5 / ln 2 stay below 2^58.
"""

import triton
import triton.language as tl

from .gate import sigmoid
from .tiles import (
    LOG2E,
    after,
    block_mask,
    decay_exp,
    dot,
    from_middle,
    load_rows,
    pair_mask,
    parts,
    store_block,
    sum_rows,
    unhoisted,
    up_to,
    within_pair,
)


@triton.jit
def unit_lower_inverse(A, BT: tl.constexpr, PRECISION: tl.constexpr):
    """(I + A)^-1 for strictly lower A: inverses of S-blocks are joined to inverses of 2S-blocks.

    [[P, 0], [C, Q]]^-1 = [[P^-1, 0], [-Q^-1 C P^-1, Q^-1]], for all pairs at once.
    """
    i = tl.arange(0, BT)
    X = tl.where(i[:, None] == i[None, :], 1.0, 0.0) - tl.where(pair_mask(i, 1), A, 0.0)
    for level in tl.static_range(5):
        C = tl.where(pair_mask(i, 2 << level), A, 0.0)
        X -= dot(X, dot(C, X, PRECISION), PRECISION)
    return X


@triton.jit
def load_gate(g, A_log, dt_bias, i_h, o_r, stride_r, m_r, o_k, bound, K: tl.constexpr):
    """raw = g + dt_bias [BT, BK] and rate = exp(A_log), fp32."""
    raw = load_rows(g, o_r, stride_r, m_r, o_k, K).to(tl.float32)
    rate = 1.0
    if dt_bias is not None:
        raw += tl.load(dt_bias + i_h * K + o_k, mask=o_k < K, other=0.0)[None, :]
    if A_log is not None:
        rate = tl.exp(tl.load(A_log + i_h).to(tl.float32))
    return raw, rate


@triton.jit
def row_rstd(x, o_r, stride_r, m_r, K: tl.constexpr, BK: tl.constexpr, EPS: tl.constexpr):
    """1 / sqrt(sum of squares + EPS) of each row."""
    total = tl.zeros_like(o_r).to(tl.float32)
    for i_k in range((K + BK - 1) // BK):
        b_x = load_rows(x, o_r, stride_r, m_r, i_k * BK + tl.arange(0, BK), K).to(tl.float32)
        total += tl.sum(b_x * b_x, axis=1)
    return tl.rsqrt(total + EPS)


@triton.jit(do_not_specialize=["k_blocks"])
def intra_kernel(
    q,
    k,
    g,
    beta,
    A_log,
    dt_bias,
    qg,
    kin,
    kg,
    T,
    Aqk,
    decay,
    beta_out,
    chunk_start,
    chunk_rows,
    q_t,
    q_h,
    k_t,
    k_h,
    g_t,
    g_h,
    beta_t,
    k_blocks,
    scale,
    bound,
    beta_factor,
    HV: tl.constexpr,
    G: tl.constexpr,
    K: tl.constexpr,
    BT: tl.constexpr,
    BK: tl.constexpr,
    GATE: tl.constexpr,
    NORM: tl.constexpr,
    BETA_SIGMOID: tl.constexpr,
    SAFE: tl.constexpr,
    EXP2: tl.constexpr,
    SCORES: tl.constexpr,
    EPS: tl.constexpr,
    PRECISION: tl.constexpr,
    INVERSE: tl.constexpr,
):
    i_c, i_hv = tl.program_id(0).to(tl.int64), tl.program_id(1).to(tl.int64)
    i_h = i_hv // G
    o_i = tl.arange(0, BT)
    m_i = o_i < tl.load(chunk_rows + i_c)
    start = tl.load(chunk_start + i_c).to(tl.int64)
    q += i_h * q_h + start * q_t
    k += i_h * k_h + start * k_t
    g += i_hv * g_h + start * g_t
    beta += i_hv + start * beta_t
    i_ch = i_c * HV + i_hv
    operand = kin.dtype.element_ty

    b_beta = tl.load(beta + o_i * beta_t, mask=m_i, other=0.0).to(tl.float32)
    if BETA_SIGMOID:
        b_beta = tl.where(m_i, beta_factor * sigmoid(b_beta), 0.0)
    tl.store(beta_out + i_ch * BT + o_i, b_beta)
    q_scale = tl.zeros_like(b_beta) + scale
    k_scale = tl.zeros_like(b_beta) + 1.0
    if NORM:
        q_scale *= row_rstd(q, o_i, q_t, m_i, K, BK, EPS)
        k_scale *= row_rstd(k, o_i, k_t, m_i, K, BK, EPS)

    b_qk = tl.zeros([BT, BT], tl.float32)
    b_kk = tl.zeros([BT, BT], tl.float32)
    diagonal = tl.zeros_like(b_beta)
    for i_k in range((K + BK - 1) // BK):
        o_k = i_k * BK + tl.arange(0, BK)
        i = unhoisted(o_i, i_k, k_blocks)
        raw, rate = load_gate(g, A_log, dt_bias, i_hv, o_i, g_t, m_i, o_k, bound, K)
        b_g = tl.where(m_i[:, None], GATE(raw, rate, bound), 0.0)
        if EXP2:
            b_g *= LOG2E
        steps = parts(b_g, operand)
        last = tl.sum(b_g, axis=0)
        b_q = load_rows(q, o_i, q_t, m_i, o_k, K).to(tl.float32) * q_scale[:, None]
        b_k = load_rows(k, o_i, k_t, m_i, o_k, K).to(tl.float32) * k_scale[:, None]
        e = decay_exp(sum_rows(up_to(i), steps, PRECISION), EXP2)
        store_block(qg + i_ch * BT * K, b_q * e, o_i, o_k, BT, K)
        store_block(kin + i_ch * BT * K, b_k * e, o_i, o_k, BT, K)
        to_end = decay_exp(sum_rows(after(i), steps, PRECISION), EXP2)
        store_block(kg + i_ch * BT * K, b_k * to_end, o_i, o_k, BT, K)
        tl.store(decay + i_ch * K + o_k, decay_exp(last, EXP2), mask=o_k < K)
        if SCORES:
            for level in range(2 if SAFE else 6):
                S = 32 >> level
                f = decay_exp(sum_rows(within_pair(i, S), steps, PRECISION), EXP2)
                b_kf = (b_k * f).to(operand)
                col = tl.trans(b_kf)
                mask = pair_mask(i, S)
                b_qk += tl.where(mask, dot((b_q * f).to(operand), col, PRECISION), 0.0)
                b_kk += tl.where(mask, dot(b_kf, col, PRECISION), 0.0)
            if SAFE:
                diff = sum_rows(from_middle(i, 16), steps, PRECISION)
                f = decay_exp(diff, EXP2)
                col = tl.trans((b_k * decay_exp(-diff, EXP2)).to(operand))
                mask = block_mask(i, 16)
                b_qk += tl.where(mask, dot((b_q * f).to(operand), col, PRECISION), 0.0)
                b_kk += tl.where(mask, dot((b_k * f).to(operand), col, PRECISION), 0.0)
            diagonal += tl.sum(b_q * b_k, axis=1)
    if SCORES:
        on = o_i[:, None] == o_i[None, :]
        b_qk += tl.where(on, diagonal[:, None], 0.0)
        o_j = tl.arange(0, BT)
        store_block(Aqk + i_ch * BT * BT, b_qk, o_i, o_j, BT, BT)
        b_kk = tl.where(o_i[:, None] > o_i[None, :], b_kk * b_beta[:, None], 0.0)
        b_T = unit_lower_inverse(b_kk, BT, INVERSE)
        store_block(T + i_ch * BT * BT, b_T, o_i, o_j, BT, BT)
