"""Everything local to a chunk, in one pass over q, k, g and beta.

Per (chunk, value head): gate, norm, cumulative sum, Aqk, Akk and T = (I + Akk)^-1. Writes, in the
operands' dtype and chunk by chunk, qg = scale q exp(gc), kin = k exp(gc), kg = k exp(gc_C - gc),
T, Aqk (with scale), and in fp32 decay = exp(gc_C), the activated beta and what the rows are
multiplied by; with a safe gate also gc of rows 15, 47 and 63 for the backward (anchors).

Scores. With a safe gate, columns refer to the middle row m of their half of the chunk: k_j
exp(gc_m - gc_j), whose exponent stays below 16 * 5 / ln 2 = 116 and so in the range of bf16. Rows
refer once to the middle of the first half and once to that of their own, and each of the two
products has the columns of one half. With any gate, the chunk is halved again and again: for pairs
of neighbouring S-blocks (S = 32, 16, .., 1) all rows of second blocks meet all columns of first
blocks in one [64, K] x [K, 64] product, with the last row of the first block as reference; every
exponent is at most zero, and what lies outside the pairs is masked away.
"""

import triton
import triton.language as tl

from fla_cp.kernels.triton.device.blocks import (
    apply_sums,
    decay_exp,
    divides,
    dot,
    load_rows,
    load_sums,
    pair_mask,
    parts,
    rounded_off,
    store_block,
    store_square,
    sum_steps,
)
from fla_cp.kernels.triton.device.decay_sums import AFTER, FIRST, MIDDLE, PAIR, UP_TO
from fla_cp.kernels.triton.device.gates import LOG2E, sigmoid


@triton.jit
def nearest(x, TERMS: tl.constexpr):
    """x in fp32; where two terms are kept, as the nearest number of TF32's eleven bits, since
    products drop the others: they would err three times as much, all in one direction."""
    if TERMS > 1:
        bits = tl.cast(x, tl.int32, bitcast=True)
        return tl.cast((bits + 0x1000) & -0x2000, tl.float32, bitcast=True)
    else:
        return x


@triton.jit
def unit_lower_inverse(A, D, BT: tl.constexpr, TERMS: tl.constexpr, PRECISION: tl.constexpr):
    """(I + A)^-1 of strictly lower A [BT, BT] with D [BT / 16, 16, 16], its diagonal blocks.

    [[P, 0], [C, Q]]^-1 = [[P^-1, 0], [-Q^-1 C P^-1, Q^-1]]: inverses of S-blocks are joined to
    inverses of 2S-blocks, all pairs at once; up to 16 in D.
    """
    j = tl.arange(0, 16)
    X = tl.where((j[:, None] == j[None, :])[None], 1.0, 0.0)
    X -= tl.where(pair_mask(j, 0)[None], D, 0.0)
    for level in tl.static_range(3):
        C = nearest(tl.where(pair_mask(j, 1 + level)[None], D, 0.0), TERMS)
        N = nearest(X, TERMS)
        X -= dot(N, nearest(dot(C, N, PRECISION), TERMS), PRECISION)
    i = tl.arange(0, BT)
    X = tl.broadcast_to(X[:, :, None, :], [BT // 16, 16, BT // 16, 16])
    X = tl.where((i // 16)[:, None] == (i // 16)[None, :], tl.reshape(X, [BT, BT]), 0.0)
    for level in tl.static_range(2):
        C = nearest(tl.where(pair_mask(i, 4 + level), A, 0.0), TERMS)
        N = nearest(X, TERMS)
        X -= dot(N, nearest(dot(C, N, PRECISION), TERMS), PRECISION)
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
    """Log decay of each token [BT, BK] in the unit of gc, zero beyond the chunk and K."""
    raw, rate = load_gate(g, A_log, dt_bias, i_hv, o_i, g_t, m_i, o_k, bound, K)
    b_g = tl.where(m_i[:, None], GATE(raw, rate, bound), 0.0)
    if not divides(o_k.shape[0], K):
        b_g = tl.where((o_k < K)[None, :], b_g, 0.0)
    if EXP2:
        b_g *= LOG2E
    return b_g


@triton.jit
def row_products(q, k, o_r, q_t, k_t, m_r, K: tl.constexpr, BK: tl.constexpr, NORM: tl.constexpr):
    """Of each row, summed over channels: q k, and with NORM q q and k k."""
    b_qk = tl.zeros([o_r.shape[0], BK], tl.float32)
    b_qq, b_kk = b_qk, b_qk
    for i_k in tl.static_range((K + BK - 1) // BK):
        o_k = i_k * BK + tl.arange(0, BK)
        b_q = load_rows(q, o_r, q_t, m_r, o_k, K).to(tl.float32)
        b_k = load_rows(k, o_r, k_t, m_r, o_k, K).to(tl.float32)
        b_qk += b_q * b_k
        if NORM:
            b_qq += b_q * b_q
            b_kk += b_k * b_k
    return tl.sum(b_qk, axis=1), tl.sum(b_qq, axis=1), tl.sum(b_kk, axis=1)


@triton.jit
def blocks_of_16(x):
    """[BT, BK] as [BT / 16, 16, BK]."""
    return tl.reshape(x, [x.shape[0] // 16, 16, x.shape[1]])


@triton.jit
def opaque(i, n_rows, BT: tl.constexpr, phase: tl.constexpr):
    """i, since n_rows <= BT, in a form that the compiler cannot tell to be i: what it forms of i
    (addresses, masks) is then formed again in each phase instead of kept in registers."""
    return i + n_rows // (BT + phase) * BT


@triton.jit(do_not_specialize=["k_blocks"])
def intra_kernel(
    q,
    k,
    g,
    beta,
    A_log,
    dt_bias,
    sums,
    qg,
    k_decayed,
    kg,
    T,
    Aqk,
    decay,
    anchors,
    rows,
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
    REMOVES: tl.constexpr,
    EPS: tl.constexpr,
    TERMS: tl.constexpr,
    PRECISION: tl.constexpr,
    NS: tl.constexpr,
):
    """rows [NC, HV, 3, C], fp32: activated beta, and what q and k are multiplied by. Without
    REMOVES (GLA) neither kin nor T is written."""
    i_c, i_hv = tl.program_id(0).to(tl.int64), tl.program_id(1).to(tl.int64)
    i_h = i_hv // G
    o_i = tl.arange(0, BT)
    n_rows = tl.load(chunk_rows + i_c)
    m_i = o_i < n_rows
    start = tl.load(chunk_start + i_c).to(tl.int64)
    q += i_h * q_h + start * q_t
    k += i_h * k_h + start * k_t
    g += i_hv * g_h + start * g_t
    i_ch = i_c * HV + i_hv
    operand = k_decayed.dtype.element_ty

    b_beta = tl.where(m_i, 1.0, 0.0)
    if beta is not None:
        beta += i_hv + start * beta_t
        b_beta = tl.load(beta + o_i * beta_t, mask=m_i, other=0.0).to(tl.float32)
    if BETA_SIGMOID:
        b_beta = tl.where(m_i, beta_factor * sigmoid(b_beta), 0.0)
    q_scale = tl.zeros_like(b_beta) + scale
    k_scale = tl.zeros_like(b_beta) + 1.0
    diagonal, qq, kk = row_products(q, k, o_i, q_t, k_t, m_i, K, BK, NORM)
    if NORM:
        q_scale *= tl.rsqrt(qq + EPS)
        k_scale *= tl.rsqrt(kk + EPS)
    diagonal *= q_scale * k_scale  # in its place until the end, not in registers
    p_diagonal = Aqk + (i_ch * (TERMS * BT) + o_i) * BT + o_i
    tl.store(p_diagonal, diagonal.to(operand))
    if TERMS > 1:
        tl.store(p_diagonal + BT * BT, rounded_off(diagonal, operand))
    row = rows + i_ch * 3 * BT + o_i
    tl.store(row, b_beta)
    tl.store(row + BT, q_scale)
    tl.store(row + 2 * BT, k_scale)

    b_qk = tl.zeros([BT, BT], tl.float32)
    b_kk = tl.zeros([BT, BT], tl.float32)
    b_16 = tl.zeros([BT // 16, 16, 16], tl.float32)
    if SAFE:
        e_upto = load_sums(sums, UP_TO, o_i)
        e_after = load_sums(sums, AFTER, o_i)
        e_middle = load_sums(sums, MIDDLE, o_i)
        e_first = load_sums(sums, FIRST, o_i)
    for i_k in tl.range((K + BK - 1) // BK, num_stages=NS):
        o_k = i_k * BK + tl.arange(0, BK)
        b_g = load_steps(g, A_log, dt_bias, i_hv, o_i, g_t, m_i, o_k, bound, K, GATE, EXP2)
        steps = parts(b_g, operand)
        b_q = load_rows(q, o_i, q_t, m_i, o_k, K).to(tl.float32) * q_scale[:, None]
        b_k = load_rows(k, o_i, k_t, m_i, o_k, K).to(tl.float32) * k_scale[:, None]
        d = apply_sums(e_upto if SAFE else load_sums(sums, UP_TO, o_i), steps, PRECISION)
        # no addresses kept from tile to tile
        r, c = opaque(o_i, n_rows + i_k, BT, 1000), opaque(o_k, n_rows + i_k, BT, 1000)
        ch = opaque(i_ch, n_rows + i_k, BT, 1000)
        last = tl.broadcast_to(c[None, :], [BT, BK])
        if SAFE:
            place = (ch * 3 + r // 32 + r // (BT - 1))[:, None] * K + last
            at = ((r % 32 == 15) | (r == BT - 1))[:, None] & (c < K)[None, :]
            tl.store(anchors + place, d, mask=at)
        e = decay_exp(d, EXP2)
        store_block(qg + ch * BT * K, b_q * e, r, c, BT, K)
        if REMOVES:
            store_block(k_decayed + ch * BT * K, b_k * e, r, c, BT, K)
        at = (r == BT - 1)[:, None] & (c < K)[None, :]
        tl.store(decay + ch * K + last, e, mask=at)
        d = apply_sums(e_after if SAFE else load_sums(sums, AFTER, o_i), steps, PRECISION)
        e = decay_exp(d, EXP2)
        store_block(kg + ch * BT * K, b_k * e, r, c, BT, K)
        if SAFE:
            d = apply_sums(e_middle, steps, PRECISION)
            col = b_k * decay_exp(-d, EXP2)
            f = decay_exp(d, EXP2)
            b_kf = (b_k * f).to(operand)
            if REMOVES:
                near = tl.permute(blocks_of_16(col.to(operand)), (0, 2, 1))
                b_16 = dot(blocks_of_16(b_kf), near, PRECISION, acc=b_16)
            half = tl.trans(tl.where((o_i >= BT // 2)[:, None], col, 0.0).to(operand))
            b_qk = dot((b_q * f).to(operand), half, PRECISION, acc=b_qk)
            if REMOVES:
                b_kk = dot(b_kf, half, PRECISION, acc=b_kk)
            half = tl.trans(tl.where((o_i < BT // 2)[:, None], col, 0.0).to(operand))
            f = decay_exp(apply_sums(e_first, steps, PRECISION), EXP2)
            b_qk = dot((b_q * f).to(operand), half, PRECISION, acc=b_qk)
            if REMOVES:
                b_kk = dot((b_k * f).to(operand), half, PRECISION, acc=b_kk)
        else:
            for level in tl.range(0, 6, disable_licm=True):
                f = decay_exp(sum_steps(sums, PAIR + level, o_i, steps, PRECISION), EXP2)
                b_kf = (b_k * f).to(operand)
                mask = pair_mask(o_i, 5 - level)
                b_qf = (b_q * f).to(operand)
                b_qk += tl.where(mask, dot(b_qf, tl.trans(b_kf), PRECISION), 0.0)
                if REMOVES:
                    b_kk += tl.where(mask, dot(b_kf, tl.trans(b_kf), PRECISION), 0.0)
    tl.debug_barrier()
    i_ch = opaque(i_ch, n_rows, BT, 1)
    if SAFE:
        o_i = opaque(o_i, n_rows, BT, 1)
    b_beta = tl.load(rows + i_ch * 3 * BT + o_i)
    p_diagonal = Aqk + (i_ch * (TERMS * BT) + o_i) * BT + o_i
    diagonal = tl.load(p_diagonal).to(tl.float32)
    if TERMS > 1:
        diagonal += tl.load(p_diagonal + BT * BT).to(tl.float32)
    below = o_i[:, None] > o_i[None, :]
    b_qk = tl.where(below, b_qk, 0.0)
    b_qk = tl.where(o_i[:, None] == o_i[None, :], diagonal[:, None], b_qk)
    store_square(Aqk, i_ch, b_qk, o_i, TERMS)
    if REMOVES:
        b_kk = tl.where(below, b_kk, 0.0) * b_beta[:, None]
        if SAFE:
            b_16 *= tl.reshape(b_beta, [BT // 16, 16])[:, :, None]
        else:
            same = (o_i // 16)[:, None] == (o_i // 16)[None, :]
            b_16 = tl.reshape(tl.where(same, b_kk, 0.0), [BT // 16, 16, BT // 16, 16])
            b_16 = tl.sum(b_16, axis=2)
        b_T = unit_lower_inverse(b_kk, b_16, BT, TERMS, PRECISION)
        store_square(T, i_ch, b_T, o_i, TERMS)


@triton.jit
def gated_kernel(
    q,
    k,
    g,
    A_log,
    dt_bias,
    sums,
    qg,
    k_decayed,
    kg,
    anchors,
    rows,
    chunk_start,
    chunk_rows,
    q_t,
    q_h,
    k_t,
    k_h,
    g_t,
    g_h,
    bound,
    HV: tl.constexpr,
    G: tl.constexpr,
    K: tl.constexpr,
    BT: tl.constexpr,
    BK: tl.constexpr,
    GATE: tl.constexpr,
    SAFE: tl.constexpr,
    EXP2: tl.constexpr,
    REMOVES: tl.constexpr,
    PRECISION: tl.constexpr,
):
    """qg, kin and kg again, from the rows and anchors that `intra_kernel` wrote; a program per
    (chunk, key tile, head)."""
    tiles: tl.constexpr = (K + BK - 1) // BK
    i_c, i_hv = (tl.program_id(0) // tiles).to(tl.int64), tl.program_id(1).to(tl.int64)
    i_h = i_hv // G
    o_i = tl.arange(0, BT)
    o_k = tl.program_id(0) % tiles * BK + tl.arange(0, BK)
    m_i = o_i < tl.load(chunk_rows + i_c)
    start = tl.load(chunk_start + i_c).to(tl.int64)
    i_ch = i_c * HV + i_hv
    g += i_hv * g_h + start * g_t
    row = rows + i_ch * 3 * BT + o_i
    b_g = load_steps(g, A_log, dt_bias, i_hv, o_i, g_t, m_i, o_k, bound, K, GATE, EXP2)
    b_q = load_rows(q + i_h * q_h + start * q_t, o_i, q_t, m_i, o_k, K).to(tl.float32)
    b_k = load_rows(k + i_h * k_h + start * k_t, o_i, k_t, m_i, o_k, K).to(tl.float32)
    b_q *= tl.load(row + BT)[:, None]
    b_k *= tl.load(row + 2 * BT)[:, None]
    steps = parts(b_g, kg.dtype.element_ty)
    d = sum_steps(sums, UP_TO, o_i, steps, PRECISION)
    e = decay_exp(d, EXP2)
    store_block(qg + i_ch * BT * K, b_q * e, o_i, o_k, BT, K)
    if REMOVES:
        store_block(k_decayed + i_ch * BT * K, b_k * e, o_i, o_k, BT, K)
    if SAFE:
        d = tl.load(anchors + (i_ch * 3 + 2) * K + o_k, mask=o_k < K, other=0.0)[None, :] - d
    else:
        d = sum_steps(sums, AFTER, o_i, steps, PRECISION)
    store_block(kg + i_ch * BT * K, b_k * decay_exp(d, EXP2), o_i, o_k, BT, K)
