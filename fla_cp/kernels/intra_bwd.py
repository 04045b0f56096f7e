"""Gradients of everything local to a chunk, from the two scans' results, in two launches.

With y = T^T dv_new (scan.py), the inverse needs no products of its own: dv = beta y and
dAkk = -tril(y v_new^T), next to dAqk = tril(do v_new^T).

1. `scores_bwd_kernel`, a program per (chunk, head): dAqk, dAkk, dv, v's share of dbeta, and what
   the backward of the q/k norm needs of whole rows: q dq = do o, since o is linear in q; and
   k dk = y (2 v_new - beta v), since k enters as k_i v_new_i^T and as a row of (I + Akk) v_new =
   beta (v - kin S).
2. `intra_bwd_kernel`, a program per (chunk, head, key tile): row and column factors of the scores
   get their gradients level by level as in intra.py. gc enters as exp(+gc_i) beside row factors
   and exp(-gc_j) beside column factors, so its gradient is elementwise: row * drow - col * dcol.
   Summed back along the chunk, a pair (i, j) adds to dg between j and i and must vanish before j:
   row and col are therefore those that the products saw, rounded alike. (With q and k in fp32
   instead, dg was off by 1.9% and ddt_bias by 5 to 9%: docs/log.md.)

Each phase is a branch, always taken: left in one block with the next, sums that are read late are
also formed late, and their terms are kept and spilled meanwhile.

The gradients of the scores go through memory (`dscores`, two [C, C] tiles a chunk), since
transposing a product's result into another product is miscompiled on Hopper by Triton 3.4 to 3.7.0.
"""

import triton
import triton.language as tl

from .gate import LOG2E
from .intra import again, load_gate, load_steps
from .sums import AFTER, FROM_HERE, PAIR, UP_TO
from .tiles import (
    decay_exp,
    dot,
    load_block,
    load_rows,
    pair_mask,
    parts,
    store_block,
    store_rows,
    sum_steps,
)


@triton.jit
def load_scores(ptr, i):
    """The [BT, BT] tile at ptr."""
    BT: tl.constexpr = i.shape[0]
    return tl.load(ptr + i[:, None] * BT + i[None, :])


@triton.jit
def masked(x, mask):
    return tl.where(mask, x, tl.zeros_like(x))


@triton.jit
def scores_bwd_kernel(
    v,
    rows,
    do,
    o,
    v_new,
    y,
    dv,
    dbeta,
    dscores,
    of_rows,
    chunk_start,
    chunk_rows,
    v_t,
    v_h,
    do_t,
    do_h,
    HV: tl.constexpr,
    V: tl.constexpr,
    BT: tl.constexpr,
    BV: tl.constexpr,
    PLANES: tl.constexpr,
    NORM: tl.constexpr,
    REMOVES: tl.constexpr,
    PRECISION: tl.constexpr,
):
    """dscores [NC, HV, 2, C, C], below the diagonal: dAqk, and dAkk of the rows k before beta.
    of_rows [NC, HV, 3, C], fp32: the diagonal of dAqk; and q dq and k dk of each row,
    summed over channels. dbeta [1 + key tiles, T, HV]: plane 0, before the sigmoid's slope."""
    i_c, i_hv = tl.program_id(0).to(tl.int64), tl.program_id(1).to(tl.int64)
    o_i = tl.arange(0, BT)
    m_i = o_i < tl.load(chunk_rows + i_c)
    start = tl.load(chunk_start + i_c).to(tl.int64)
    i_ch = i_c * HV + i_hv
    v += i_hv * v_h + start * v_t
    do += i_hv * do_h + start * do_t
    o += (start * HV + i_hv) * V
    dv += (start * HV + i_hv) * V
    dscores += i_ch * 2 * BT * BT
    operand = v_new.dtype.element_ty
    b_beta = tl.load(rows + i_ch * PLANES * BT + o_i)
    b_ds = tl.zeros([BT, BT], tl.float32)
    b_da = tl.zeros([BT, BT], tl.float32)
    b_dbeta = tl.zeros_like(b_beta)
    b_nq = tl.zeros_like(b_beta)
    b_nk = tl.zeros_like(b_beta)
    for i_v in range((V + BV - 1) // BV):
        o_v = i_v * BV + tl.arange(0, BV)
        b_do = load_rows(do, o_i, do_t, m_i, o_v, V).to(operand)
        b_vn = load_block(v_new + i_ch * BT * V, o_i, o_v, BT, V)
        b_y = load_block(y + i_ch * BT * V, o_i, o_v, BT, V)
        b_ds = dot(b_do, tl.trans(b_vn), PRECISION, acc=b_ds)
        if REMOVES:
            b_da = dot(b_y, tl.trans(b_vn), PRECISION, acc=b_da)
        b_v = load_rows(v, o_i, v_t, m_i, o_v, V).to(tl.float32)
        b_y = b_y.to(tl.float32)
        b_dbeta += tl.sum(b_v * b_y, axis=1)
        if NORM:
            b_o = load_rows(o, o_i, HV * V, m_i, o_v, V).to(tl.float32)
            b_nq += tl.sum(b_do.to(tl.float32) * b_o, axis=1)
            b_nk += tl.sum(b_vn.to(tl.float32) * b_y, axis=1)
        store_rows(dv, b_y * b_beta[:, None], o_i, HV * V, m_i, o_v, V)
    below = o_i[:, None] > o_i[None, :]
    b_diagonal = tl.sum(tl.where(o_i[:, None] == o_i[None, :], b_ds, 0.0), axis=1)
    tl.store(of_rows + i_ch * 3 * BT + o_i, b_diagonal)
    store_block(dscores, tl.where(below, b_ds, 0.0), o_i, o_i, BT, BT)
    if REMOVES:
        b_da = tl.where(below, -b_da, 0.0)
        store_block(dscores + BT * BT, b_da, o_i, o_i, BT, BT)
    tl.store(dbeta + (start + o_i) * HV + i_hv, b_dbeta, mask=m_i)
    if NORM:
        tl.store(of_rows + (i_ch * 3 + 1) * BT + o_i, b_nq)
        tl.store(of_rows + (i_ch * 3 + 2) * BT + o_i, 2.0 * b_nk - b_beta * b_dbeta)


@triton.jit
def whole(gc, UNIT: tl.constexpr):
    """gc in whole powers of two."""
    return tl.floor(gc / UNIT + 0.5)


@triton.jit
def shifted(x, n, rows):
    """x * 2^n in the rows, n [1, BK] from 0 down to -240: by two factors, as 2^n may underflow."""
    near, far = tl.exp2(tl.maximum(n, -120.0)), tl.exp2(tl.minimum(n + 120.0, 0.0))
    return tl.where(rows, x * near * far, x)


@triton.jit
def safe_bwd_kernel(
    q,
    k,
    g,
    A_log,
    dt_bias,
    sums,
    decay,
    anchors,
    rows,
    of_rows,
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
    do_t,
    do_h,
    scale,
    bound,
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
    REMOVES: tl.constexpr,
    EXP2: tl.constexpr,
    PRECISION: tl.constexpr,
    NS: tl.constexpr,
):
    """As `intra_bwd_kernel`, with a safe gate."""
    tiles: tl.constexpr = (K + BK - 1) // BK
    i_k = tl.program_id(0) % tiles  # fastest, so that the tiles of a chunk share what they load
    i_c, i_hv = (tl.program_id(0) // tiles).to(tl.int64), tl.program_id(1).to(tl.int64)
    i_h = i_hv // G
    n_rows = tl.load(chunk_rows + i_c)
    i = tl.arange(0, BT)
    m_i = i < n_rows
    start = tl.load(chunk_start + i_c).to(tl.int64)
    i_ch = i_c * HV + i_hv
    operand = v_new.dtype.element_ty
    o_k = i_k * BK + tl.arange(0, BK)
    m_k = o_k < K
    UNIT: tl.constexpr = 1.0 if EXP2 else 1.0 / LOG2E

    g += i_hv * g_h + start * g_t
    b_g = load_steps(g, A_log, dt_bias, i_hv, i, g_t, m_i, o_k, bound, K, GATE, EXP2)
    b_gc = sum_steps(sums, UP_TO, i, parts(b_g, operand), PRECISION)
    anchor = anchors + i_ch * 3 * K + o_k
    n0 = whole(tl.load(anchor, mask=m_k, other=0.0), UNIT)[None, :]
    n1 = whole(tl.load(anchor + K, mask=m_k, other=0.0), UNIT)[None, :]
    first = (i < BT // 2)[:, None]
    d = b_gc - tl.where(first, n0, n1) * UNIT

    # row factors q and beta k
    b_dq = tl.zeros([BT, BK], tl.float32)
    b_dr = tl.zeros([BT, BK], tl.float32)
    for i_v in tl.range((V + BV - 1) // BV, num_stages=NS):
        o_v = i_v * BV + tl.arange(0, BV)
        b_h = tl.trans(load_block(h + i_ch * K * V, o_k, o_v, K, V))
        b_do = load_rows(do + i_hv * do_h + start * do_t, i, do_t, m_i, o_v, V).to(operand)
        b_dq = dot(b_do, b_h, PRECISION, acc=b_dq)
        if REMOVES:
            b_y = load_block(y + i_ch * BT * V, i, o_v, BT, V)
            b_dr = dot(b_y, b_h, PRECISION, acc=b_dr)
    b_ds = load_scores(dscores + i_ch * 2 * BT * BT, i)
    b_da = load_scores(dscores + i_ch * 2 * BT * BT + BT * BT, i)
    row = rows + i_ch * 3 * BT + i
    b_k = load_rows(k + i_h * k_h + start * k_t, i, k_t, m_i, o_k, K).to(tl.float32)
    b_k *= tl.load(row + 2 * BT)[:, None]
    e = tl.where(first, tl.exp2(n0), tl.exp2(n1))
    b_dq *= e
    b_dr *= -e
    b_y = b_k * decay_exp(-d, EXP2)
    near, far = b_y.to(operand), shifted(b_y, n1 - n0, first).to(operand)
    b_c = dot(b_ds, near, PRECISION, acc=b_dq)
    b_dq = dot(b_ds, far, PRECISION, acc=b_dq)
    b_dq = tl.where(first, b_c, b_dq)
    f = decay_exp(d, EXP2)
    b_q = load_rows(q + i_h * q_h + start * q_t, i, q_t, m_i, o_k, K).to(tl.float32)
    b_q *= tl.load(row + BT)[:, None]
    b_dgc = (b_q * f).to(operand).to(tl.float32) * b_dq
    of_row = of_rows + i_ch * 3 * BT + i
    b_dq = b_dq * f + tl.load(of_row)[:, None] * b_k  # and the diagonal
    if NORM:
        b_dq -= b_q * (tl.load(of_row + BT) / (scale * scale))[:, None]
    out = (start * HV + i_hv) * K
    store_rows(dq + out, b_dq * tl.load(row + BT)[:, None], i, HV * K, m_i, o_k, K)
    if REMOVES:
        b_c = dot(b_da, near, PRECISION, acc=b_dr)
        b_dr = dot(b_da, far, PRECISION, acc=b_dr)
        b_dr = tl.where(first, b_c, b_dr)
        b_beta = tl.load(row)[:, None]
        b_dgc += (b_beta * (b_k * f)).to(operand).to(tl.float32) * b_dr
        b_dr *= f
        share = dbeta + ((i_k + 1).to(tl.int64) * tokens + start) * HV + i_hv
        tl.store(share + i * HV, tl.sum(b_k * b_dr, axis=1), mask=m_i)
        b_dr *= b_beta

    # column factor k
    tl.debug_barrier()
    i = again(i, n_rows, BT, 1)
    m_i = i < n_rows
    i_ch += n_rows // (BT + 1)
    start += n_rows // (BT + 1)
    first = (i < BT // 2)[:, None]
    d += n_rows // (BT + 1)
    b_dl = tl.zeros([BK], tl.float32)
    b_dc = tl.zeros([BT, BK], tl.float32)
    for i_v in tl.range((V + BV - 1) // BV, num_stages=NS):
        o_v = i_v * BV + tl.arange(0, BV)
        b_h = load_block(h + i_ch * K * V, o_k, o_v, K, V)
        b_dh = load_block(dh + i_ch * K * V, o_k, o_v, K, V)
        b_dc = dot(
            load_block(v_new + i_ch * BT * V, i, o_v, BT, V), tl.trans(b_dh), PRECISION, acc=b_dc
        )
        b_dl += tl.sum(b_h.to(tl.float32) * b_dh.to(tl.float32), axis=1)
    b_dl *= tl.load(decay + i_ch * K + o_k, mask=m_k, other=0.0)
    row = rows + i_ch * 3 * BT + i
    anchor = anchors + i_ch * 3 * K + o_k
    n0 = whole(tl.load(anchor, mask=m_k, other=0.0), UNIT)[None, :]
    n1 = whole(tl.load(anchor + K, mask=m_k, other=0.0), UNIT)[None, :]
    end = tl.load(anchor + 2 * K, mask=m_k, other=0.0)[None, :]
    b_dc *= tl.where(first, decay_exp(end - n0 * UNIT, EXP2), decay_exp(end - n1 * UNIT, EXP2))
    f = decay_exp(d, EXP2)
    second = (i >= BT // 2)[:, None]
    if False:
        b_q = load_rows(q + i_h * q_h + start * q_t, i, q_t, m_i, o_k, K).to(tl.float32)
        b_q *= tl.load(row + BT)[:, None]
        b_k = load_rows(k + i_h * k_h + start * k_t, i, k_t, m_i, o_k, K).to(tl.float32)
        b_k *= tl.load(row + 2 * BT)[:, None]
    b_x = b_q * f
    of_row = of_rows + i_ch * 3 * BT + i
    b_dr += tl.load(of_row)[:, None] * b_q
    b_ds = tl.trans(b_ds)
    near = (b_k * decay_exp(-d, EXP2)).to(operand).to(tl.float32)
    b_dl += tl.sum(near * b_dc, axis=0)
    b_c = dot(b_ds, shifted(b_x, n1 - n0, second).to(operand), PRECISION, acc=b_dc)
    b_dc = dot(b_ds, b_x.to(operand), PRECISION, acc=b_dc)
    if REMOVES:
        b_x = tl.load(row)[:, None] * (b_k * f)
        b_da = tl.trans(b_da)
        b_c = dot(b_da, shifted(b_x, n1 - n0, second).to(operand), PRECISION, acc=b_c)
        b_dc = dot(b_da, b_x.to(operand), PRECISION, acc=b_dc)
    b_dc = tl.where(first, b_c, b_dc)
    b_dgc -= near * b_dc
    b_dk = b_dr + b_dc * decay_exp(-d, EXP2)
    if NORM:
        b_dk -= b_k * tl.load(of_row + 2 * BT)[:, None]
    out = (start * HV + i_hv) * K
    store_rows(dk + out, b_dk * tl.load(row + 2 * BT)[:, None], i, HV * K, m_i, o_k, K)

    tl.debug_barrier()
    i = again(i, n_rows, BT, 2)
    m_i = i < n_rows
    b_dg = b_dl[None, :] + sum_steps(sums, FROM_HERE, i, parts(b_dgc, operand), PRECISION)
    b_dg = tl.where(m_i[:, None], b_dg, 0.0)
    raw, rate = load_gate(g, A_log, dt_bias, i_hv, i, g_t, m_i, o_k, bound, K)
    b_draw = b_dg * SLOPE(raw, rate, bound)
    store_rows(dg + out, b_draw, i, HV * K, m_i, o_k, K)
    if dA_log is not None:
        if RATE_SCALES_RAW:
            b_dA = tl.sum(b_draw * raw)
        else:
            b_dA = tl.sum(b_dg * GATE(raw, rate, bound))
        tl.store(dA_log + (i_c * tiles + i_k) * HV + i_hv, b_dA)
    if ddt_bias is not None:
        tl.store(ddt_bias + i_ch * K + o_k, tl.sum(b_draw, axis=0), mask=o_k < K)


@triton.jit
def intra_bwd_kernel(
    q,
    k,
    g,
    A_log,
    dt_bias,
    sums,
    decay,
    anchors,
    rows,
    of_rows,
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
    do_t,
    do_h,
    scale,
    bound,
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
    SAFE: tl.constexpr,
    REMOVES: tl.constexpr,
    EXP2: tl.constexpr,
    PRECISION: tl.constexpr,
    NS: tl.constexpr,
):
    """Without REMOVES (GLA) k has no row factor. dq, dk: [T, HV, K] per value head, of the rows as
    given. dA_log [NC, key tiles, HV] and
    ddt_bias [NC, HV, K]: one partial sum a program, or None. dbeta: plane 1 + tile.
    RATE_SCALES_RAW: g depends on rate * raw (else rate is a factor of g)."""
    tiles: tl.constexpr = (K + BK - 1) // BK
    i_k = tl.program_id(0) % tiles  # fastest, so that the tiles of a chunk share what they load
    i_c, i_hv = (tl.program_id(0) // tiles).to(tl.int64), tl.program_id(1).to(tl.int64)
    i_h = i_hv // G
    n_rows = tl.load(chunk_rows + i_c)
    i = tl.arange(0, BT)
    m_i = i < n_rows
    start = tl.load(chunk_start + i_c).to(tl.int64)
    i_ch = i_c * HV + i_hv
    q += i_h * q_h + start * q_t
    k += i_h * k_h + start * k_t
    g += i_hv * g_h + start * g_t
    do += i_hv * do_h + start * do_t
    v_new += i_ch * BT * V
    y += i_ch * BT * V
    h += i_ch * K * V
    dh += i_ch * K * V
    dscores += i_ch * 2 * BT * BT
    rows += i_ch * 3 * BT
    of_rows += i_ch * 3 * BT
    operand = v_new.dtype.element_ty
    o_k = i_k * BK + tl.arange(0, BK)

    b_g = load_steps(g, A_log, dt_bias, i_hv, i, g_t, m_i, o_k, bound, K, GATE, EXP2)
    steps = parts(b_g, operand)
    if SAFE:  # differences to the anchors: |gc| is at most 64 * 5 / ln 2
        b_gc = sum_steps(sums, UP_TO, i, steps, PRECISION)
        anchors += i_ch * 3 * K + o_k

    # column factor k
    b_dc = tl.zeros([BT, BK], tl.float32)
    b_dgc = tl.zeros([BT, BK], tl.float32)
    b_dl = tl.zeros([BK], tl.float32)
    if n_rows > 0:
        for i_v in tl.range((V + BV - 1) // BV, num_stages=NS):
            o_v = i_v * BV + tl.arange(0, BV)
            b_h = load_block(h, o_k, o_v, K, V)
            b_dh = load_block(dh, o_k, o_v, K, V)
            b_dl += tl.sum(b_h.to(tl.float32) * b_dh.to(tl.float32), axis=1)
            b_dc = dot(load_block(v_new, i, o_v, BT, V), tl.trans(b_dh), PRECISION, acc=b_dc)
        if SAFE:
            d = tl.load(anchors + 2 * K, mask=o_k < K, other=0.0)[None, :] - b_gc
        else:
            d = sum_steps(sums, AFTER, i, steps, PRECISION)
        b_dc *= decay_exp(d, EXP2)
        b_k = load_rows(k, i, k_t, m_i, o_k, K).to(tl.float32) * tl.load(rows + 2 * BT + i)[:, None]
        b_dl *= tl.load(decay + i_ch * K + o_k, mask=o_k < K, other=0.0)
        b_dl += tl.sum(b_k * b_dc, axis=0)
        b_q = load_rows(q, i, q_t, m_i, o_k, K).to(tl.float32) * tl.load(rows + BT + i)[:, None]
        # with the factors as the products saw them, so that pairs of rows and columns cancel in dgc
        b_dgc -= b_k * b_dc
        b_beta = tl.load(rows + i)[:, None]
        if SAFE:
            b_dst = tl.trans(load_scores(dscores, i))
            b_dat = tl.trans(load_scores(dscores + BT * BT, i))
            first = b_gc - tl.load(anchors, mask=o_k < K, other=0.0)[None, :]
            d = b_gc - tl.load(anchors + K, mask=o_k < K, other=0.0)[None, :]
            d = tl.where((i < BT // 2)[:, None], first, d)
            f = decay_exp(first, EXP2)
            b_c1 = dot(b_dst, (b_q * f).to(operand), PRECISION)
            if REMOVES:
                b_c1 = dot(b_dat, (b_beta * (b_k * f)).to(operand), PRECISION, acc=b_c1)
            f = decay_exp(d, EXP2)
            b_c = dot(b_dst, (b_q * f).to(operand), PRECISION)
            if REMOVES:
                b_c = dot(b_dat, (b_beta * (b_k * f)).to(operand), PRECISION, acc=b_c)
            b_c = tl.where((i < BT // 2)[:, None], b_c1, b_c)
            f = decay_exp(-d, EXP2)
            b_dc += f * b_c
            b_dgc -= (b_k * f).to(operand).to(tl.float32) * b_c
        else:
            for level in range(6):
                f = decay_exp(sum_steps(sums, PAIR + level, i, steps, PRECISION), EXP2)
                mask = pair_mask(i, 32 >> level)
                b_ds = masked(load_scores(dscores, i), mask)
                b_c = dot(tl.trans(b_ds), (b_q * f).to(operand), PRECISION)
                if REMOVES:
                    b_da = masked(load_scores(dscores + BT * BT, i), mask)
                    b_row = (b_beta * (b_k * f)).to(operand)
                    b_c = dot(tl.trans(b_da), b_row, PRECISION, acc=b_c)
                b_dc += f * b_c
                b_dgc -= (b_k * f).to(operand).to(tl.float32) * b_c

    # row factors q and beta k
    tl.debug_barrier()
    i = again(i, n_rows, BT, 1)
    m_i = i < n_rows
    b_dq = tl.zeros([BT, BK], tl.float32)
    b_dr = tl.zeros([BT, BK], tl.float32)
    if n_rows <= BT:
        for i_v in tl.range((V + BV - 1) // BV, num_stages=NS):
            o_v = i_v * BV + tl.arange(0, BV)
            b_h = tl.trans(load_block(h, o_k, o_v, K, V))
            b_do = load_rows(do, i, do_t, m_i, o_v, V).to(operand)
            b_dq = dot(b_do, b_h, PRECISION, acc=b_dq)
            if REMOVES:
                b_dr = dot(load_block(y, i, o_v, BT, V), b_h, PRECISION, acc=b_dr)
        e = decay_exp(b_gc if SAFE else sum_steps(sums, UP_TO, i, steps, PRECISION), EXP2)
        b_dq *= e
        b_k = load_rows(k, i, k_t, m_i, o_k, K).to(tl.float32) * tl.load(rows + 2 * BT + i)[:, None]
        b_q = load_rows(q, i, q_t, m_i, o_k, K).to(tl.float32) * tl.load(rows + BT + i)[:, None]
        b_dgc += b_q * b_dq
        if REMOVES:
            b_dr *= -e
            b_beta = tl.load(rows + i)[:, None]
            b_dgc += b_beta * (b_k * b_dr)
        if SAFE:
            b_ds = load_scores(dscores, i)
            b_da = load_scores(dscores + BT * BT, i)
            first = b_gc - tl.load(anchors, mask=o_k < K, other=0.0)[None, :]
            d = b_gc - tl.load(anchors + K, mask=o_k < K, other=0.0)[None, :]
            d = tl.where((i < BT // 2)[:, None], first, d)
            col = b_k * decay_exp(-d, EXP2)
            upper = masked(col, (i < BT // 2)[:, None]).to(operand)
            lower = masked(col, (i >= BT // 2)[:, None]).to(operand)
            f = decay_exp(d, EXP2)
            b_r = dot(b_ds, lower, PRECISION)
            b_dq += f * b_r
            b_dgc += (b_q * f).to(operand).to(tl.float32) * b_r
            if REMOVES:
                b_r = dot(b_da, lower, PRECISION)
                b_dr += f * b_r
                b_dgc += (b_beta * (b_k * f)).to(operand).to(tl.float32) * b_r
            f = decay_exp(first, EXP2)
            b_r = dot(b_ds, upper, PRECISION)
            b_dq += f * b_r
            b_dgc += (b_q * f).to(operand).to(tl.float32) * b_r
            if REMOVES:
                b_r = dot(b_da, upper, PRECISION)
                b_dr += f * b_r
                b_dgc += (b_beta * (b_k * f)).to(operand).to(tl.float32) * b_r
        else:
            for level in range(6):
                f = decay_exp(sum_steps(sums, PAIR + level, i, steps, PRECISION), EXP2)
                mask = pair_mask(i, 32 >> level)
                b_kf = (b_k * f).to(operand)
                b_r = dot(masked(load_scores(dscores, i), mask), b_kf, PRECISION)
                b_dq += f * b_r
                b_dgc += (b_q * f).to(operand).to(tl.float32) * b_r
                if REMOVES:
                    b_da = masked(load_scores(dscores + BT * BT, i), mask)
                    b_r = dot(b_da, b_kf, PRECISION)
                    b_dr += f * b_r
                    b_dgc += (b_beta * (b_k * f)).to(operand).to(tl.float32) * b_r

    tl.debug_barrier()
    i = again(i, n_rows, BT, 2)
    m_i = i < n_rows
    b_q = load_rows(q, i, q_t, m_i, o_k, K).to(tl.float32) * tl.load(rows + BT + i)[:, None]
    b_k = load_rows(k, i, k_t, m_i, o_k, K).to(tl.float32) * tl.load(rows + 2 * BT + i)[:, None]
    # the diagonal's row and column cancel in the gate's gradient
    diagonal = tl.load(of_rows + i)[:, None]
    b_dq += diagonal * b_k
    b_dc += diagonal * b_q
    b_dk = b_dc
    if REMOVES:
        dbeta += (i_k + 1).to(tl.int64) * tokens * HV + start * HV + i_hv
        tl.store(dbeta + i * HV, tl.sum(b_k * b_dr, axis=1), mask=m_i)
        b_dk += b_dr * tl.load(rows + i)[:, None]
    if NORM:
        b_dq -= b_q * (tl.load(of_rows + BT + i) / (scale * scale))[:, None]
        b_dk -= b_k * tl.load(of_rows + 2 * BT + i)[:, None]
    out = (start * HV + i_hv) * K
    store_rows(dq + out, b_dq * tl.load(rows + BT + i)[:, None], i, HV * K, m_i, o_k, K)
    store_rows(dk + out, b_dk * tl.load(rows + 2 * BT + i)[:, None], i, HV * K, m_i, o_k, K)
    b_dg = b_dl[None, :] + sum_steps(sums, FROM_HERE, i, parts(b_dgc, operand), PRECISION)
    b_dg = tl.where(m_i[:, None], b_dg, 0.0)
    raw, rate = load_gate(g, A_log, dt_bias, i_hv, i, g_t, m_i, o_k, bound, K)
    b_draw = b_dg * SLOPE(raw, rate, bound)
    store_rows(dg + out, b_draw, i, HV * K, m_i, o_k, K)
    if dA_log is not None:
        if RATE_SCALES_RAW:
            b_dA = tl.sum(b_draw * raw)
        else:
            b_dA = tl.sum(b_dg * GATE(raw, rate, bound))
        tl.store(dA_log + (i_c * tiles + i_k) * HV + i_hv, b_dA)
    if ddt_bias is not None:
        tl.store(ddt_bias + i_ch * K + o_k, tl.sum(b_draw, axis=0), mask=o_k < K)
