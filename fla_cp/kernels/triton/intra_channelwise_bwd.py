"""Gradients of everything local to a chunk, from the two scans' results, in two launches and one
of beta; long because a kernel is its list of arguments.

With y = T^T dv_new (scan.py), the inverse needs no products of its own: dv = beta y and
dAkk = -tril(y v_new^T), next to dAqk = tril(do v_new^T).

1. `scores_bwd_kernel`, a program per (chunk, head): dAqk, dAkk, dv, v's share of dbeta, and what
   the backward of the q/k norm needs of whole rows: q dq = do o, since o is linear in q; and
   k dk = y (2 v_new - beta v), since k enters as k_i v_new_i^T and as a row of (I + Akk) v_new =
   beta (v - kin S).
2. `intra_bwd_kernel`, a program per (chunk, head, key tile): row and column factors of the scores
   get their gradients level by level as in intra.py (with a safe gate: safe_bwd.py). gc enters as
   exp(+gc_i) beside row factors and exp(-gc_j) beside column factors, so its gradient is
   elementwise: row * drow - col * dcol. A level's rows are second and its columns first blocks of
   pairs, so each row of the chunk is one or the other, and mirrored scores give both gradients in
   one product; levels 2 to 5 are products of four blocks of 16, each within a warp.
   Summed back along the chunk, a pair (i, j) adds to dg between j and i and must vanish before j:
   row and col are therefore those that the products saw, rounded alike. (With q and k in fp32
   instead, dg was off by 1.9% and ddt_bias by 5 to 9%: docs/log.md.)

The gradients of the scores go through memory (`dscores`, two [C, C] tiles a chunk), since
transposing a product's result into another product is miscompiled on Hopper by Triton 3.4 to 3.7.0.
"""

import triton
import triton.language as tl

from fla_cp.kernels.triton.device.blocks import (
    apply_sums,
    decay_exp,
    dot,
    load_block,
    load_rows,
    parts,
    store_block,
    store_rows,
    sum_steps,
)
from fla_cp.kernels.triton.device.decay_sums import AFTER, FROM_HERE, PAIR, UP_TO
from fla_cp.kernels.triton.device.gates import sigmoid
from fla_cp.kernels.triton.intra_channelwise import blocks_of_16, load_gate, load_steps, opaque


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
def load_scaled(x, rows, plane, i, x_t, m_i, o_k, K: tl.constexpr):
    """Rows of q or k in fp32, each times its factor in that plane of rows."""
    factors = rows + plane * i.shape[0]
    return load_rows(x, i, x_t, m_i, o_k, K).to(tl.float32) * tl.load(factors + i)[:, None]


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
    MIRRORED: tl.constexpr,
    PRECISION: tl.constexpr,
):
    """dscores [NC, HV, 2, C, C], below the diagonal: dAqk, and dAkk of the rows k before beta;
    MIRRORED: above it, too.
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
    # in a pipeline loads would serve sums as well as products: see `overwritten` in tests/aot.py
    for i_v in tl.range((V + BV - 1) // BV, num_stages=1):
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
    b_ds = tl.where(below, b_ds, 0.0)
    if MIRRORED:
        b_ds += tl.trans(b_ds)
    store_block(dscores, b_ds, o_i, o_i, BT, BT)
    if REMOVES:
        b_da = tl.where(below, -b_da, 0.0)
        if MIRRORED:
            b_da += tl.trans(b_da)
        store_block(dscores + BT * BT, b_da, o_i, o_i, BT, BT)
    tl.store(dbeta + (start + o_i) * HV + i_hv, b_dbeta, mask=m_i)
    if NORM:
        tl.store(of_rows + (i_ch * 3 + 1) * BT + o_i, b_nq)
        tl.store(of_rows + (i_ch * 3 + 2) * BT + o_i, 2.0 * b_nk - b_beta * b_dbeta)


@triton.jit
def store_gate_grads(
    b_dgc,
    g,
    A_log,
    dt_bias,
    sums,
    dg,
    dA_log,
    ddt_bias,
    i_hv,
    i,
    g_t,
    m_i,
    o_k,
    bound,
    dg_t,
    K: tl.constexpr,
    GATE: tl.constexpr,
    SLOPE: tl.constexpr,
    RATE_SCALES_RAW: tl.constexpr,
    PRECISION: tl.constexpr,
    operand: tl.constexpr,
):
    """From the gradients of gc [BT, BK]: those of g, and this chunk's shares of dA_log (one number)
    and ddt_bias [BK]. RATE_SCALES_RAW: g depends on rate * raw (else rate is a factor of g)."""
    b_dg = sum_steps(sums, FROM_HERE, i, parts(b_dgc, operand), PRECISION)
    b_dg = tl.where(m_i[:, None], b_dg, 0.0)
    raw, rate = load_gate(g, A_log, dt_bias, i_hv, i, g_t, m_i, o_k, bound, K)
    b_draw = b_dg * SLOPE(raw, rate, bound)
    store_rows(dg, b_draw, i, dg_t, m_i, o_k, K)
    if dA_log is not None:
        if RATE_SCALES_RAW:
            b_dA = tl.sum(b_draw * raw)
        else:
            b_dA = tl.sum(b_dg * GATE(raw, rate, bound))
        tl.store(dA_log, b_dA)
    if ddt_bias is not None:
        tl.store(ddt_bias + o_k, tl.sum(b_draw, axis=0), mask=o_k < K)


@triton.jit
def intra_bwd_kernel(
    q,
    k,
    g,
    A_log,
    dt_bias,
    sums,
    decay,
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
    """Without REMOVES (GLA) k has no row factor. dq, dk: [T, HV, K] per value head, of the rows as
    given. dA_log [NC, key tiles, HV] and ddt_bias [NC, HV, K]: one partial sum a program, or
    None. dbeta: plane 1 + tile."""
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
    do += i_hv * do_h + start * do_t
    v_new += i_ch * BT * V
    y += i_ch * BT * V
    h += i_ch * K * V
    dh += i_ch * K * V
    dscores += i_ch * 2 * BT * BT
    operand = v_new.dtype.element_ty
    LEAN: tl.constexpr = REMOVES and operand == tl.float32
    o_k = i_k * BK + tl.arange(0, BK)

    b_g = load_steps(
        g + i_hv * g_h + start * g_t, A_log, dt_bias, i_hv, i, g_t, m_i, o_k, bound, K, GATE, EXP2
    )
    b_dq = tl.zeros([BT, BK], tl.float32)
    b_dr = tl.zeros([BT, BK], tl.float32)
    b_dc = tl.zeros([BT, BK], tl.float32)
    b_dl = tl.zeros([BK], tl.float32)
    for i_v in tl.range((V + BV - 1) // BV, num_stages=NS):
        o_v = i_v * BV + tl.arange(0, BV)
        b_h = load_block(h, o_k, o_v, K, V)
        b_dh = load_block(dh, o_k, o_v, K, V)
        b_do = load_rows(do, i, do_t, m_i, o_v, V).to(operand)
        b_dq = dot(b_do, tl.trans(b_h), PRECISION, acc=b_dq)
        if REMOVES:
            b_dr = dot(load_block(y, i, o_v, BT, V), tl.trans(b_h), PRECISION, acc=b_dr)
        b_dc = dot(load_block(v_new, i, o_v, BT, V), tl.trans(b_dh), PRECISION, acc=b_dc)
        b_dl += tl.sum(b_h.to(tl.float32) * b_dh.to(tl.float32), axis=1)
    steps = parts(b_g, operand)
    b_k = load_scaled(k, rows, i_ch * 3 + 2, i, k_t, m_i, o_k, K)
    b_q = load_scaled(q, rows, i_ch * 3 + 1, i, q_t, m_i, o_k, K)
    b_beta = tl.load(rows + i_ch * 3 * BT + i)[:, None]
    e = decay_exp(sum_steps(sums, UP_TO, i, steps, PRECISION), EXP2)
    b_dq *= e
    b_dr *= -e
    b_dc *= decay_exp(sum_steps(sums, AFTER, i, steps, PRECISION), EXP2)
    b_dl *= tl.load(decay + i_ch * K + o_k, mask=o_k < K, other=0.0)
    b_dl += tl.sum(b_k * b_dc, axis=0)
    b_dgc = b_q * b_dq - b_k * b_dc
    if REMOVES:
        b_dgc += b_beta * (b_k * b_dr)
    b_dgc += tl.where((i == BT - 1)[:, None], b_dl[None, :], 0.0)  # held no longer, for registers

    # row factors q and beta k, column factor k; first the levels within blocks of 16
    x_q, x_k, x_beta = blocks_of_16(b_q), blocks_of_16(b_k), blocks_of_16(b_beta)
    x_dq, x_dr = blocks_of_16(b_dq), blocks_of_16(b_dr)
    x_dc, x_dgc = blocks_of_16(b_dc), blocks_of_16(b_dgc)
    x_steps = parts(blocks_of_16(b_g), operand)
    j = tl.arange(0, 16)
    # in fp32, for registers: q, k and beta are loaded again at each level, and the compiler cannot
    # tell that the loops run, so that it keeps nothing that they form for what follows them
    blocks_end, levels_end = 6, 2
    if LEAN:
        blocks_end, levels_end = opaque(6, n_rows, BT, 1000), opaque(2, n_rows, BT, 2000)
    for level in tl.range(2, blocks_end, num_stages=1, disable_licm=True):
        n = 5 - level
        r = opaque(j, n_rows + level, BT, 1000)
        at = (r[:, None] * BT + r[None, :])[None]
        at += tl.arange(0, BT // 16)[:, None, None] * (16 * BT + 16)
        E = tl.load(sums + (PAIR + level) * BT * BT + at)
        f = decay_exp(apply_sums(E, x_steps, PRECISION), EXP2)
        if LEAN:
            o = opaque(i, n_rows + level, BT, 1000)
            x_q = blocks_of_16(load_scaled(q, rows, i_ch * 3 + 1, o, q_t, o < n_rows, o_k, K))
            x_k = blocks_of_16(load_scaled(k, rows, i_ch * 3 + 2, o, k_t, o < n_rows, o_k, K))
            x_beta = blocks_of_16(tl.load(rows + i_ch * 3 * BT + o)[:, None])
        x_dq, x_dr, x_dc, x_dgc = level_grads(
            x_dq,
            x_dr,
            x_dc,
            x_dgc,
            f,
            x_q,
            x_k,
            x_beta,
            dscores,
            at,
            ((r[:, None] ^ r[None, :]) >> n == 1)[None],
            ((r >> n) & 1 == 1)[None, :, None],
            n_rows,
            BT,
            REMOVES,
            PRECISION,
        )
    b_dq, b_dr, b_dc, b_dgc = as_rows(x_dq), as_rows(x_dr), as_rows(x_dc), as_rows(x_dgc)
    for top in tl.range(0, levels_end, num_stages=1, disable_licm=True):
        o = opaque(i, n_rows + top, BT, 1000)
        inner, outer = o // 32 + top * (o // 16 - o // 32), o // 32 * top
        f = decay_exp(sum_steps(sums, PAIR + top, o, steps, PRECISION), EXP2)
        if LEAN:
            b_q = load_scaled(q, rows, i_ch * 3 + 1, o, q_t, o < n_rows, o_k, K)
            b_k = load_scaled(k, rows, i_ch * 3 + 2, o, k_t, o < n_rows, o_k, K)
            b_beta = tl.load(rows + i_ch * 3 * BT + o)[:, None]
        b_dq, b_dr, b_dc, b_dgc = level_grads(
            b_dq,
            b_dr,
            b_dc,
            b_dgc,
            f,
            b_q,
            b_k,
            b_beta,
            dscores,
            o[:, None] * BT + o[None, :],
            (outer[:, None] == outer[None, :]) & (inner[:, None] != inner[None, :]),
            (inner % 2 == 1)[:, None],
            n_rows,
            BT,
            REMOVES,
            PRECISION,
        )
    tl.debug_barrier()
    n_rows = tl.load(chunk_rows + i_c)
    i, i_k = opaque(i, n_rows, BT, 1), opaque(i_k, n_rows, BT, 1)
    i_c, i_hv = opaque(i_c, n_rows, BT, 1), opaque(i_hv, n_rows, BT, 1)
    i_ch = i_c * HV + i_hv
    start = tl.load(chunk_start + i_c).to(tl.int64)
    m_i = i < n_rows
    o_k = i_k * BK + tl.arange(0, BK)
    if LEAN:
        b_q = load_scaled(q, rows, i_ch * 3 + 1, i, q_t, m_i, o_k, K)
        b_k = load_scaled(k, rows, i_ch * 3 + 2, i, k_t, m_i, o_k, K)
        b_beta = tl.load(rows + i_ch * 3 * BT + i)[:, None]
    # the diagonal's row and column cancel in the gate's gradient
    diagonal = tl.load(of_rows + i_ch * 3 * BT + i)[:, None]
    b_dq += diagonal * b_k
    b_dc += diagonal * b_q
    if NORM:
        b_dq -= b_q * (tl.load(of_rows + (i_ch * 3 + 1) * BT + i) / (scale * scale))[:, None]
    out = (start * HV + i_hv) * K
    store_rows(
        dq + out, b_dq * tl.load(rows + (i_ch * 3 + 1) * BT + i)[:, None], i, HV * K, m_i, o_k, K
    )
    if REMOVES:
        dbeta += (i_k + 1).to(tl.int64) * tokens * HV + start * HV + i_hv
        tl.store(dbeta + i * HV, tl.sum(b_k * b_dr, axis=1), mask=m_i)
        b_dc += b_dr * b_beta
    if NORM:
        b_dc -= b_k * tl.load(of_rows + (i_ch * 3 + 2) * BT + i)[:, None]
    store_rows(
        dk + out, b_dc * tl.load(rows + (i_ch * 3 + 2) * BT + i)[:, None], i, HV * K, m_i, o_k, K
    )

    tl.debug_barrier()
    n_rows = tl.load(chunk_rows + i_c)
    i, i_k = opaque(i, n_rows, BT, 2), opaque(i_k, n_rows, BT, 2)
    i_c, i_hv = opaque(i_c, n_rows, BT, 2), opaque(i_hv, n_rows, BT, 2)
    i_ch = i_c * HV + i_hv
    start = tl.load(chunk_start + i_c).to(tl.int64)
    out = (start * HV + i_hv) * K
    m_i = i < n_rows
    o_k = i_k * BK + tl.arange(0, BK)
    store_gate_grads(
        b_dgc,
        g + i_hv * g_h + start * g_t,
        A_log,
        dt_bias,
        sums,
        dg + out,
        None if dA_log is None else dA_log + (i_c * tiles + i_k) * HV + i_hv,
        None if ddt_bias is None else ddt_bias + i_ch * K,
        i_hv,
        i,
        g_t,
        m_i,
        o_k,
        bound,
        HV * K,
        K,
        GATE,
        SLOPE,
        RATE_SCALES_RAW,
        PRECISION,
        operand,
    )


@triton.jit
def beta_bwd_kernel(
    beta,
    shares,
    dbeta,
    n,
    beta_t,
    beta_factor,
    HV: tl.constexpr,
    SHARES: tl.constexpr,
    BETA_SIGMOID: tl.constexpr,
    B: tl.constexpr,
):
    """dbeta [T, HV], n elements, from the sum of SHARES of it [SHARES, T, HV], fp32."""
    i = tl.program_id(0).to(tl.int64) * B + tl.arange(0, B)
    m = i < n
    shares += i
    b_db = tl.zeros([B], tl.float32)
    for _ in range(SHARES):
        b_db += tl.load(shares, mask=m, other=0.0)
        shares += n
    if BETA_SIGMOID:
        b_beta = tl.load(beta + i // HV * beta_t + i % HV, mask=m, other=0.0)
        b_beta = sigmoid(b_beta.to(tl.float32))
        b_db *= beta_factor * b_beta * (1 - b_beta)
    tl.store(dbeta + i, b_db.to(dbeta.dtype.element_ty), mask=m)
