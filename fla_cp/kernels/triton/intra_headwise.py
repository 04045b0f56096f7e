"""Local to a chunk with one decay a head; long because a kernel is its list of arguments.

The decay of a pair of tokens is one number and multiplies their score. No exponent is above zero
for any gate, so there is one path.

Backward in three kernels: the scores' gradients, weighted with decays, norms and scale (W); dq,
with W k, and dk, with W^T q, by a program per chunk, key tile and head; and the gate's. Of groups
dq and dk have a kernel each, in which a program goes through the value heads of its group and sums
over them in registers: sums of both beside the products would spill. The gate's gradient is, per
row, the sum over channels of row factors times their gradients less column factors times theirs, as
the products saw the factors: the inputs as they are, with norms and scale in W, so that their
gradients come out as they are.
"""

import triton
import triton.language as tl

from fla_cp.kernels.triton.device.blocks import (
    decay_exp,
    dot,
    load_block,
    load_part,
    load_rows,
    row_sums,
    store_block,
    store_rows,
    store_square,
)
from fla_cp.kernels.triton.device.gates import LOG2E, sigmoid
from fla_cp.kernels.triton.intra_channelwise import opaque, row_products, unit_lower_inverse


@triton.jit
def load_head_gate(
    g, A_log, dt_bias, i_h, o_i, g_t, m_i, bound, GATE: tl.constexpr, EXP2: tl.constexpr
):
    """raw = g + dt_bias [BT], rate = exp(A_log), and the log decay in the unit of gc, zero beyond
    the chunk. Below -256 its exponential is zero whatever it multiplies; sums of what is less would
    lose the digits of the rest."""
    raw = tl.load(g + o_i * g_t, mask=m_i, other=0.0).to(tl.float32)
    rate = 1.0
    if dt_bias is not None:
        raw += tl.load(dt_bias + i_h).to(tl.float32)
    if A_log is not None:
        rate = tl.exp(tl.load(A_log + i_h).to(tl.float32))
    b_g = tl.where(m_i, GATE(raw, rate, bound), 0.0)
    if EXP2:
        b_g *= LOG2E
    return raw, rate, tl.maximum(b_g, -256.0)


@triton.jit
def running_sums(g, operand: tl.constexpr, BEFORE: tl.constexpr = False):
    """Sums of the log decays up to each row, with it or BEFORE it, as addends [BT]. For fp32
    there are two, that a difference of two sums does not cancel: sums of multiples of 1/1024,
    which fp32 adds without rounding, and those of what is left."""
    if operand == tl.float32:
        high = tl.floor(g * 1024.0) / 1024.0
        low = g - high
        if BEFORE:
            return (tl.cumsum(high, axis=0) - high, tl.cumsum(low, axis=0) - low)
        return (tl.cumsum(high, axis=0), tl.cumsum(low, axis=0))
    else:
        s = tl.cumsum(g, axis=0)
        if BEFORE:
            s -= g
        return (s,)


@triton.jit
def total_of(sums):
    s = sums[0]
    for n in tl.static_range(1, len(sums)):
        s += sums[n]
    return s


@triton.jit
def decay_of(sums, EXP2: tl.constexpr):
    """exp(sums) [BT]."""
    return decay_exp(total_of(sums), EXP2)


@triton.jit
def last_of(x, i):
    """The last element: a sum of its own would round otherwise than the running one."""
    return tl.sum(tl.where(i == i.shape[0] - 1, x, 0.0), axis=0)


@triton.jit
def decay_to_end(sums, i, EXP2: tl.constexpr):
    """exp(last - sums) [BT]."""
    s = last_of(sums[0], i) - sums[0]
    for n in tl.static_range(1, len(sums)):
        s += last_of(sums[n], i) - sums[n]
    return decay_exp(s, EXP2)


@triton.jit
def decays(row, col, i, EXP2: tl.constexpr):
    """exp(row_i - col_j) [BT, BT] for i > j, zero elsewhere."""
    keep = i[:, None] > i[None, :]
    x = row[0][:, None] - col[0][None, :]
    for n in tl.static_range(1, len(row)):
        x += row[n][:, None] - col[n][None, :]
    return tl.where(keep, decay_exp(tl.where(keep, x, 0.0), EXP2), 0.0)


@triton.jit
def head_rows_kernel(
    g,
    beta,
    A_log,
    dt_bias,
    rows,
    chunk_start,
    chunk_rows,
    g_t,
    beta_t,
    bound,
    beta_factor,
    HV: tl.constexpr,
    BT: tl.constexpr,
    BH: tl.constexpr,
    GATE: tl.constexpr,
    BETA_SIGMOID: tl.constexpr,
    EXP2: tl.constexpr,
    REMOVAL: tl.constexpr,
):
    """Of the planes of rows [NC, HV, 9, C] those that need neither q nor k: beta, and gc up to each
    row and up to the one before. A program has BH heads of a chunk."""
    i_c = tl.program_id(0).to(tl.int64)
    i = tl.arange(0, BT)[:, None]
    m_i = i < tl.load(chunk_rows + i_c)
    start = tl.load(chunk_start + i_c).to(tl.int64)
    o_h = tl.minimum(tl.program_id(1) * BH + tl.arange(0, BH), HV - 1)  # the last one repeatedly
    to = rows + ((i_c * HV + o_h) * 9 * BT)[None, :] + i
    p_g = g + o_h[None, :] + start * g_t
    _raw, _rate, b_g = load_head_gate(p_g, A_log, dt_bias, o_h, i, g_t, m_i, bound, GATE, EXP2)
    (gc,) = running_sums(b_g, tl.bfloat16)
    tl.store(to + 7 * BT, gc)
    if REMOVAL == "p":
        (before,) = running_sums(b_g, tl.bfloat16, True)
        tl.store(to + 8 * BT, before)
    else:
        tl.store(to + 8 * BT, gc)
    b_beta = tl.where(m_i, 1.0, tl.zeros_like(b_g))
    if beta is not None:
        at = beta + o_h[None, :] + (start + i) * beta_t
        b_beta = tl.load(at, mask=m_i, other=0.0).to(tl.float32)
    if BETA_SIGMOID:
        b_beta = tl.where(m_i, beta_factor * sigmoid(b_beta), 0.0)
    tl.store(to, b_beta)


@triton.jit
def intra_head_kernel(
    q,
    k,
    p,
    g,
    beta,
    A_log,
    dt_bias,
    T,
    Aqk,
    decay,
    rows,
    chunk_start,
    chunk_rows,
    first,
    q_t,
    q_h,
    k_t,
    k_h,
    p_t,
    p_h,
    g_t,
    beta_t,
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
    EXP2: tl.constexpr,
    REMOVAL: tl.constexpr,
    EPS: tl.constexpr,
    TERMS: tl.constexpr,
    PRECISION: tl.constexpr,
    NS: tl.constexpr,
):
    """T and Aqk (no T where nothing is removed); decay [NC, HV, K], the same number K
    times; rows [NC, HV, 9, C], fp32: beta; what q, k and r (k or p, which reads the state) are
    multiplied by; and by what in the scans (scan.py): q, r, and k where it writes; gc, up to each
    row and up to the one before. Of chunks from the first."""
    i_c, i_hv = (first + tl.program_id(0)).to(tl.int64), tl.program_id(1).to(tl.int64)
    i_h = i_hv // G
    i = tl.arange(0, BT)
    m_i = i < tl.load(chunk_rows + i_c)
    start = tl.load(chunk_start + i_c).to(tl.int64)
    q += i_h * q_h + start * q_t
    k += i_h * k_h + start * k_t
    g += i_hv + start * g_t
    i_ch = i_c * HV + i_hv
    operand = T.dtype.element_ty

    b_beta = tl.where(m_i, 1.0, 0.0)
    if beta is not None:
        beta += i_hv + start * beta_t
        b_beta = tl.load(beta + i * beta_t, mask=m_i, other=0.0).to(tl.float32)
    if BETA_SIGMOID:
        b_beta = tl.where(m_i, beta_factor * sigmoid(b_beta), 0.0)
    if REMOVAL == "p":
        p += i_h * p_h + start * p_t

    _raw, _rate, b_g = load_head_gate(g, A_log, dt_bias, i_hv, i, g_t, m_i, bound, GATE, EXP2)

    # Scores of the inputs as they are: the norms and decays multiply them afterwards. What the loop
    # loads is for products alone: see `overwritten` in tests/aot.py. Those of fp32 are waited for.
    diagonal = tl.zeros_like(b_beta)
    qq, kk, pp = diagonal, diagonal, diagonal
    if operand != tl.float32:
        diagonal, qq, kk = row_products(q, k, i, q_t, k_t, m_i, K, BK, NORM)
    b_qk = tl.zeros([BT, BT], tl.float32)
    b_kk = tl.zeros([BT, BT], tl.float32)
    for i_k in tl.range((K + BK - 1) // BK, num_stages=NS):
        o_k = i_k * BK + tl.arange(0, BK)
        b_q = load_rows(q, i, q_t, m_i, o_k, K)
        b_k = load_rows(k, i, k_t, m_i, o_k, K)
        if operand == tl.float32:
            diagonal += tl.sum(b_q * b_k, axis=1)
            if NORM:
                qq += tl.sum(b_q * b_q, axis=1)
                kk += tl.sum(b_k * b_k, axis=1)
        b_qk = dot(b_q, tl.trans(b_k), PRECISION, acc=b_qk)
        b_r = b_k
        if REMOVAL == "p":
            if operand == tl.float32:  # for registers: p not loaded before this product
                tl.debug_barrier()
            b_r = load_rows(p, i, p_t, m_i, o_k, K)
            if NORM and operand == tl.float32:
                pp += tl.sum(b_r * b_r, axis=1)
        if REMOVAL != "none":
            b_kk = dot(b_r, tl.trans(b_k), PRECISION, acc=b_kk)
    q_scale = tl.zeros_like(b_beta) + scale
    k_scale = tl.zeros_like(b_beta) + 1.0
    r_scale = k_scale
    if NORM:
        q_scale *= tl.rsqrt(qq + EPS)
        k_scale *= tl.rsqrt(kk + EPS)
        r_scale = k_scale
        if REMOVAL == "p":
            if operand != tl.float32:
                _, pp, _ = row_products(p, p, i, p_t, p_t, m_i, K, BK, NORM)
            r_scale = tl.rsqrt(pp + EPS)

    gc = running_sums(b_g, operand)
    before = running_sums(b_g, operand, True) if REMOVAL == "p" else gc
    e = decay_of(gc, EXP2)
    rows += i_ch * 9 * BT + i
    tl.store(rows, b_beta)
    tl.store(rows + BT, q_scale)
    tl.store(rows + 2 * BT, k_scale)
    tl.store(rows + 3 * BT, r_scale)
    tl.store(rows + 4 * BT, q_scale * e)
    tl.store(rows + 5 * BT, r_scale * decay_of(before, EXP2))
    tl.store(rows + 6 * BT, k_scale * decay_to_end(gc, i, EXP2))
    tl.store(rows + 7 * BT, total_of(gc))
    tl.store(rows + 8 * BT, total_of(before))
    whole = last_of(e, i)
    for i_k in range((K + BK - 1) // BK):
        o_k = i_k * BK + tl.arange(0, BK)
        tl.store(decay + i_ch * K + o_k, tl.zeros([BK], tl.float32) + whole, mask=o_k < K)
    scales = q_scale[:, None] * k_scale[None, :]
    b_qk *= scales * decays(gc, gc, i, EXP2)
    b_qk += tl.where(i[:, None] == i[None, :], (diagonal * q_scale * k_scale)[:, None], 0.0)
    store_square(Aqk, i_ch, b_qk, i, TERMS)
    if REMOVAL != "none":
        b_kk *= (b_beta * r_scale)[:, None] * k_scale[None, :]
        b_kk *= decays(before, gc, i, EXP2)
        same = (i // 16)[:, None] == (i // 16)[None, :]
        b_16 = tl.reshape(tl.where(same, b_kk, 0.0), [BT // 16, 16, BT // 16, 16])
        b_T = unit_lower_inverse(b_kk, tl.sum(b_16, axis=2), BT, TERMS, PRECISION)
        store_square(T, i_ch, b_T, i, TERMS)


@triton.jit
def scores_head_bwd_kernel(
    v,
    g,
    A_log,
    dt_bias,
    rows,
    do,
    o,
    v_new,
    y,
    dv,
    shares,
    weights,
    of_rows,
    chunk_start,
    chunk_rows,
    v_t,
    v_h,
    g_t,
    do_t,
    do_h,
    bound,
    HV: tl.constexpr,
    V: tl.constexpr,
    BT: tl.constexpr,
    BV: tl.constexpr,
    GATE: tl.constexpr,
    NORM: tl.constexpr,
    EXP2: tl.constexpr,
    QNORM: tl.constexpr,
    REMOVAL: tl.constexpr,
    PRECISION: tl.constexpr,
):
    """weights [NC, HV, 2, C, C], below the diagonal: what the inputs k are weighted with in the
    gradients of q and of beta r. of_rows [NC, HV, 3, C], fp32: the diagonal's weight of k; with
    QNORM q dq and with NORM k dk of each row, summed over channels, as `scores_bwd_kernel` says
    (with p those of k alone). shares [.., T, HV]: in plane 0 v's share of dbeta, before the
    sigmoid's slope."""
    i_c, i_hv = tl.program_id(0).to(tl.int64), tl.program_id(1).to(tl.int64)
    i = tl.arange(0, BT)
    m_i = i < tl.load(chunk_rows + i_c)
    start = tl.load(chunk_start + i_c).to(tl.int64)
    i_ch = i_c * HV + i_hv
    v += i_hv * v_h + start * v_t
    do += i_hv * do_h + start * do_t
    o += (start * HV + i_hv) * V
    dv += (start * HV + i_hv) * V
    rows += i_ch * 9 * BT + i
    of_rows += i_ch * 3 * BT + i
    weights += i_ch * 2 * BT * BT
    operand = v_new.dtype.element_ty
    b_beta = tl.load(rows)
    b_ds = tl.zeros([BT, BT], tl.float32)
    b_da = tl.zeros([BT, BT], tl.float32)
    b_vy = tl.zeros_like(b_beta)
    b_nq = tl.zeros_like(b_beta)
    b_nk = tl.zeros_like(b_beta)
    # a pipeline would load for sums as well as for products, see `overwritten` in tests/aot.py;
    # those of fp32 are waited for
    STAGES: tl.constexpr = None if operand == tl.float32 else 1
    for i_v in tl.range((V + BV - 1) // BV, num_stages=STAGES):
        o_v = i_v * BV + tl.arange(0, BV)
        b_do = load_rows(do, i, do_t, m_i, o_v, V).to(operand)
        b_vn = load_block(v_new + i_ch * BT * V, i, o_v, BT, V)
        b_y = load_block(y + i_ch * BT * V, i, o_v, BT, V)
        b_ds = dot(b_do, tl.trans(b_vn), PRECISION, acc=b_ds)
        if REMOVAL != "none":
            b_da = dot(b_y, tl.trans(b_vn), PRECISION, acc=b_da)
        b_v = load_rows(v, i, v_t, m_i, o_v, V).to(tl.float32)
        b_y = b_y.to(tl.float32)
        b_vy += tl.sum(b_v * b_y, axis=1)
        if QNORM:
            b_o = load_rows(o, i, HV * V, m_i, o_v, V).to(tl.float32)
            b_nq += tl.sum(b_do.to(tl.float32) * b_o, axis=1)
        if NORM:
            b_nk += tl.sum(b_vn.to(tl.float32) * b_y, axis=1)
        store_rows(dv, b_y * b_beta[:, None], i, HV * V, m_i, o_v, V)
    p_g = g + i_hv + start * g_t
    _raw, _rate, b_g = load_head_gate(p_g, A_log, dt_bias, i_hv, i, g_t, m_i, bound, GATE, EXP2)
    gc = running_sums(b_g, operand)
    q_scale, k_scale = tl.load(rows + BT), tl.load(rows + 2 * BT)
    diagonal = tl.sum(tl.where(i[:, None] == i[None, :], b_ds, 0.0), axis=1)
    tl.store(of_rows, diagonal * q_scale * k_scale)
    b_ds *= decays(gc, gc, i, EXP2)
    store_block(weights, b_ds * q_scale[:, None] * k_scale[None, :], i, i, BT, BT)
    if REMOVAL != "none":
        before = running_sums(b_g, operand, True) if REMOVAL == "p" else gc
        b_da *= decays(before, gc, i, EXP2)
        b_da *= -tl.load(rows + 3 * BT)[:, None] * k_scale[None, :]
        store_block(weights + BT * BT, b_da, i, i, BT, BT)
        tl.store(shares + (start + i) * HV + i_hv, b_vy, mask=m_i)
    if QNORM:
        tl.store(of_rows + BT, b_nq)
    if NORM:
        if REMOVAL != "p":
            b_nk = 2.0 * b_nk - b_beta * b_vy
        tl.store(of_rows + 2 * BT, b_nk)


@triton.jit
def dqk_head_kernel(
    q,
    k,
    decay,
    rows,
    of_rows,
    weights,
    do,
    h,
    dh,
    v_new,
    y,
    dq,
    dk,
    dgc,
    shares,
    chunk_start,
    chunk_rows,
    tokens,
    q_t,
    q_h,
    k_t,
    k_h,
    do_t,
    do_h,
    scale,
    H: tl.constexpr,
    K: tl.constexpr,
    V: tl.constexpr,
    BT: tl.constexpr,
    BK: tl.constexpr,
    BV: tl.constexpr,
    NORM: tl.constexpr,
    REMOVAL: tl.constexpr,
    PRECISION: tl.constexpr,
    NS: tl.constexpr,
):
    """dq and dk [T, H, K] of one key tile and head, without groups and p. In plane 1 + tile of
    shares the tile's part of dbeta; in dgc [key tiles, NC, H, C], fp32, that in the gradient of gc,
    what comes from the chunk's end in the last row."""
    tiles: tl.constexpr = (K + BK - 1) // BK
    i_k = tl.program_id(0) % tiles  # fastest, so that the tiles of a chunk share what they load
    i_c, i_h = (tl.program_id(0) // tiles).to(tl.int64), tl.program_id(1).to(tl.int64)
    n_rows = tl.load(chunk_rows + i_c)
    start = tl.load(chunk_start + i_c).to(tl.int64)
    chunks = (tl.num_programs(0) // tiles).to(tl.int64)
    operand = h.dtype.element_ty
    k0 = i_k * BK
    o_kt, o_vt = tl.arange(0, BK), tl.arange(0, BV)
    o_k = k0 + o_kt
    q += i_h * q_h + start * q_t
    k += i_h * k_h + start * k_t
    do += i_h * do_h + start * do_t
    i = tl.arange(0, BT)
    m_i = i < n_rows
    i_ch = i_c * H + i_h
    row = rows + i_ch * 9 * BT + i
    of_row = of_rows + i_ch * 3 * BT + i
    place = (i_k * chunks * H + i_ch) * BT + i

    # all loads at once: to wait for memory again costs more than registers do, which fp32 lacks
    b_k = load_rows(k, i, k_t, m_i, o_k, K)
    b_q = load_rows(q, i, q_t, m_i, o_k, K)
    b_w = load_block(weights + i_ch * 2 * BT * BT, i, i, BT, BT)
    if REMOVAL != "none" and operand != tl.float32:
        b_a = load_block(weights + (i_ch * 2 + 1) * BT * BT, i, i, BT, BT)
        b_beta = tl.load(row)
        b_rb = (b_beta[:, None] * b_k.to(tl.float32)).to(operand)
    b_diagonal = tl.load(of_row)
    # a number of each 32 bytes that later phases wait for, for the cache's sake
    if NS > 1:
        near = tl.arange(0, 64) * 8
        touched = tl.load(rows + i_ch * 9 * BT + near, mask=near < 7 * BT, other=0.0)
        touched += tl.load(of_rows + i_ch * 3 * BT + near, mask=near < 3 * BT, other=0.0)
    b_dq = tl.zeros([BT, BK], tl.float32)
    b_dr = tl.zeros([BT, BK], tl.float32)
    b_c = tl.zeros([BT, BK], tl.float32)
    b_dl = tl.zeros([BK], tl.float32)
    for i_v in tl.range((V + BV - 1) // BV, num_stages=NS):
        v0 = i_v * BV
        b_h = load_part(h + i_ch * K * V, k0, v0, o_kt, o_vt, K, V)
        b_dh = load_part(dh + i_ch * K * V, k0, v0, o_kt, o_vt, K, V)
        b_do = load_rows(do, i, do_t, m_i, v0 + o_vt, V).to(operand)
        b_dq = dot(b_do, tl.trans(b_h), PRECISION, acc=b_dq)
        if REMOVAL != "none":
            b_y = load_part(y + i_ch * BT * V, 0, v0, tl.arange(0, BT), o_vt, BT, V)
            b_dr = dot(b_y, tl.trans(b_h), PRECISION, acc=b_dr)
        b_vn = load_part(v_new + i_ch * BT * V, 0, v0, tl.arange(0, BT), o_vt, BT, V)
        b_c = dot(b_vn, tl.trans(b_dh), PRECISION, acc=b_c)
        if operand == tl.float32:
            b_dl += tl.sum(b_h * b_dh, axis=1)
    if operand != tl.float32:
        b_dl = row_sums(h + i_ch * K * V, dh + i_ch * K * V, k0, o_kt, o_vt, K, V)
    if NS > 1:  # a use for them, as far as the compiler can tell: n_rows is never more
        tl.store(rows + near, touched, mask=near * 0 + n_rows > BT)

    # row factor q
    b_dq *= tl.load(row + 4 * BT)[:, None]
    b_dq = dot(b_w, b_k, PRECISION, acc=b_dq)
    b_dgc = tl.sum(b_q.to(tl.float32) * b_dq, axis=1)
    # the diagonal's row and column cancel in the gate's gradient
    b_dq += b_diagonal[:, None] * b_k.to(tl.float32)
    if NORM:
        if tiles > 1:
            b_n = tl.load(of_row + BT)
        else:
            b_n = tl.sum(b_q.to(tl.float32) * b_dq, axis=1)
        rstd = tl.load(row + BT) / scale
        b_dq -= b_q.to(tl.float32) * (b_n * rstd * rstd)[:, None]
    store_rows(dq + (start * H + i_h) * K, b_dq, i, H * K, m_i, o_k, K)

    # column factor k in the states
    b_c *= tl.load(row + 6 * BT)[:, None]
    # by itself, for it cancels what the last row gets of it
    b_end = -tl.sum(b_k.to(tl.float32) * b_c, axis=1)
    last = tl.sum(b_dl, axis=0) * tl.load(decay + i_ch * K) - tl.sum(b_end, axis=0)
    b_dgc += b_end + tl.where(i == BT - 1, last, 0.0)
    b_dk = b_c + b_diagonal[:, None] * b_q.to(tl.float32)

    # row factor beta k
    b_c = tl.zeros([BT, BK], tl.float32)
    if REMOVAL != "none":
        if operand == tl.float32:
            b_a = load_block(weights + (i_ch * 2 + 1) * BT * BT, i, i, BT, BT)
            b_beta = tl.load(row)
            b_rb = (b_beta[:, None] * b_k.to(tl.float32)).to(operand)
        b_dr *= -tl.load(row + 5 * BT)[:, None]
        # in the states k as it is, beside the scores beta k as the product sees it
        b_db = tl.sum(b_k.to(tl.float32) * b_dr, axis=1)
        b_shift = b_beta * b_db - tl.sum(b_rb.to(tl.float32) * b_dr, axis=1)
        b_dr = dot(b_a, b_k, PRECISION, acc=b_dr)
        b_shift += tl.sum(b_rb.to(tl.float32) * b_dr, axis=1)
        b_db = tl.sum(b_k.to(tl.float32) * b_dr, axis=1)
        b_dgc += b_shift
        plane = (1 + i_k).to(tl.int64) * tokens * H
        tl.store(shares + plane + (start + i) * H + i_h, b_db, mask=m_i)
        b_dk += b_dr * b_beta[:, None]
        b_c = dot(tl.trans(b_a), b_rb, PRECISION)

    # column factor k in the scores
    b_c = dot(tl.trans(b_w), b_q, PRECISION, acc=b_c)
    b_dgc -= tl.sum(b_k.to(tl.float32) * b_c, axis=1)
    tl.store(dgc + place, b_dgc)
    b_dk += b_c
    if NORM:
        rstd = tl.load(row + 2 * BT)
        b_dk -= b_k.to(tl.float32) * (tl.load(of_row + 2 * BT) * rstd * rstd)[:, None]
    store_rows(dk + (start * H + i_h) * K, b_dk, i, H * K, m_i, o_k, K)


@triton.jit
def dq_head_kernel(
    q,
    k,
    rows,
    of_rows,
    weights,
    do,
    h,
    dq,
    dgc,
    chunk_start,
    chunk_rows,
    q_t,
    q_h,
    k_t,
    k_h,
    do_t,
    do_h,
    scale,
    H: tl.constexpr,
    G: tl.constexpr,
    K: tl.constexpr,
    V: tl.constexpr,
    BT: tl.constexpr,
    BK: tl.constexpr,
    BV: tl.constexpr,
    NORM: tl.constexpr,
    PRECISION: tl.constexpr,
    NS: tl.constexpr,
):
    """dq [T, H, K] of one key tile and key head: a program goes through the value heads of its
    group. dgc [key tiles, NC, HV, C], fp32: the part of q in the gradient of gc."""
    tiles: tl.constexpr = (K + BK - 1) // BK
    HV: tl.constexpr = H * G
    i_k = tl.program_id(0) % tiles
    i_c, i_h = (tl.program_id(0) // tiles).to(tl.int64), tl.program_id(1).to(tl.int64)
    n_rows = tl.load(chunk_rows + i_c)
    start = tl.load(chunk_start + i_c).to(tl.int64)
    chunks = (tl.num_programs(0) // tiles).to(tl.int64)
    operand = h.dtype.element_ty
    k0 = i_k * BK
    o_t, o_kt, o_vt = tl.arange(0, BT), tl.arange(0, BK), tl.arange(0, BV)
    o_k = k0 + o_kt
    q += i_h * q_h + start * q_t
    k += i_h * k_h + start * k_t
    b_norm = tl.zeros([BT], tl.float32)  # q dq summed over channels
    b_dq = tl.zeros([BT, BK], tl.float32)
    for j in tl.range(G, num_stages=1):
        i = opaque(tl.arange(0, BT), n_rows + j, BT, G)
        m_i = i < n_rows
        i_hv = i_h * G + j
        i_ch = i_c * HV + i_hv
        row = rows + i_ch * 9 * BT + i
        of_row = of_rows + i_ch * 3 * BT + i
        b_w = load_block(weights + i_ch * 2 * BT * BT, o_t, o_t, BT, BT)
        e_q, b_diagonal = tl.load(row + 4 * BT), tl.load(of_row)
        if NORM and tiles > 1:
            b_norm += tl.load(of_row + BT)
        b_c = tl.zeros([BT, BK], tl.float32)
        for i_v in tl.range((V + BV - 1) // BV, num_stages=NS):
            v0 = i_v * BV
            b_h = load_part(h + i_ch * K * V, k0, v0, o_kt, o_vt, K, V)
            p_do = do + i_hv * do_h + start * do_t
            b_do = load_rows(p_do, i, do_t, m_i, v0 + o_vt, V).to(operand)
            b_c = dot(b_do, tl.trans(b_h), PRECISION, acc=b_c)
        b_c *= e_q[:, None]
        b_k = load_rows(k, i, k_t, m_i, o_k, K)
        # before the product: else Triton sums below in the layout of the load and moves fp32 there
        b_q = load_rows(q, i, q_t, m_i, o_k, K).to(tl.float32)
        b_c = dot(b_w, b_k, PRECISION, acc=b_c)
        tl.store(dgc + (i_k * chunks * HV + i_ch) * BT + i, tl.sum(b_q * b_c, axis=1))
        # the diagonal's row and column cancel in the gate's gradient
        b_c += b_diagonal[:, None] * b_k.to(tl.float32)
        b_dq = b_c if G == 1 else b_dq + b_c
        if j == G - 1:
            if G > 1:  # loaded again, not kept beside the products
                tl.debug_barrier()
                i = opaque(i, n_rows, BT, 1)
                m_i = i < n_rows
                b_q = load_rows(q, i, q_t, m_i, o_k, K).to(tl.float32)
            if NORM:
                if tiles == 1:
                    b_norm = tl.sum(b_q * b_dq, axis=1)
                rstd = tl.load(row + BT) / scale
                b_dq -= b_q * (b_norm * rstd * rstd)[:, None]
            store_rows(dq + (start * H + i_h) * K, b_dq, i, H * K, m_i, o_k, K)


@triton.jit
def dk_head_kernel(
    q,
    k,
    p,
    decay,
    rows,
    of_rows,
    weights,
    h,
    dh,
    v_new,
    y,
    dk,
    dp,
    dgc,
    shift,
    shares,
    chunk_start,
    chunk_rows,
    tokens,
    q_t,
    q_h,
    k_t,
    k_h,
    p_t,
    p_h,
    H: tl.constexpr,
    G: tl.constexpr,
    K: tl.constexpr,
    V: tl.constexpr,
    BT: tl.constexpr,
    BK: tl.constexpr,
    BV: tl.constexpr,
    NORM: tl.constexpr,
    REMOVAL: tl.constexpr,
    PRECISION: tl.constexpr,
    NS: tl.constexpr,
):
    """dk and dp as `dq_head_kernel` does dq. Per value head and key tile: in plane 1 + tile of
    shares the tile's part of dbeta; in dgc that of k and p in the gradient of gc, what comes from
    the chunk's end in the last row; with p in shift, like dgc, what its rows give to the sums up to
    the token before.

    Of groups, each phase is a branch, always taken, or follows one, and loads k again: left in one
    block with the next, sums over the group would be added late and their terms kept meanwhile. A
    single head has registers to spare."""
    tiles: tl.constexpr = (K + BK - 1) // BK
    HV: tl.constexpr = H * G
    i_k = tl.program_id(0) % tiles
    i_c, i_h = (tl.program_id(0) // tiles).to(tl.int64), tl.program_id(1).to(tl.int64)
    n_rows = tl.load(chunk_rows + i_c)
    start = tl.load(chunk_start + i_c).to(tl.int64)
    chunks = (tl.num_programs(0) // tiles).to(tl.int64)
    operand = h.dtype.element_ty
    k0 = i_k * BK
    o_t, o_kt, o_vt = tl.arange(0, BT), tl.arange(0, BK), tl.arange(0, BV)
    o_k = k0 + o_kt
    q += i_h * q_h + start * q_t
    k += i_h * k_h + start * k_t
    r, r_t = k, k_t
    if REMOVAL == "p":
        r, r_t = p + i_h * p_h + start * p_t, p_t
    b_nk = tl.zeros([BT], tl.float32)  # k dk and p dp summed over channels
    b_np = tl.zeros([BT], tl.float32)
    b_dk = tl.zeros([BT, BK], tl.float32)
    b_dp = tl.zeros([BT, BK], tl.float32)
    for j in tl.range(G, num_stages=1):
        i = opaque(tl.arange(0, BT), n_rows + j, BT, G)
        m_i = i < n_rows
        i_hv = i_h * G + j
        i_ch = i_c * HV + i_hv
        row = rows + i_ch * 9 * BT + i
        of_row = of_rows + i_ch * 3 * BT + i
        place = (i_k * chunks * HV + i_ch) * BT + i
        b_dgc = tl.zeros([BT], tl.float32)
        b_shift = tl.zeros([BT], tl.float32)
        b_dr = tl.zeros([BT, BK], tl.float32)
        b_c = tl.zeros([BT, BK], tl.float32)
        b_k = load_rows(k, i, k_t, m_i, o_k, K)
        if G == 1 or n_rows > 0:  # column factor k and row factor beta r in the states
            e_k, end = tl.load(row + 6 * BT), tl.load(decay + i_ch * K)
            for i_v in tl.range((V + BV - 1) // BV, num_stages=NS):
                v0 = i_v * BV
                b_dh = load_part(dh + i_ch * K * V, k0, v0, o_kt, o_vt, K, V)
                b_vn = load_part(v_new + i_ch * BT * V, 0, v0, o_t, o_vt, BT, V)
                b_c = dot(b_vn, tl.trans(b_dh), PRECISION, acc=b_c)
            b_dl = row_sums(h + i_ch * K * V, dh + i_ch * K * V, k0, o_kt, o_vt, K, V)
            b_c *= e_k[:, None]
            # by itself, for it cancels what the last row gets of it
            b_dgc = -tl.sum(b_k.to(tl.float32) * b_c, axis=1)
            last = tl.sum(b_dl, axis=0) * end - tl.sum(b_dgc, axis=0)
            b_dgc += tl.where(i == BT - 1, last, 0.0)
            b_dk = b_c if G == 1 else b_dk + b_c
            b_c = tl.zeros([BT, BK], tl.float32)
            if REMOVAL != "none":
                e_r = tl.load(row + 5 * BT)
                for i_v in tl.range((V + BV - 1) // BV, num_stages=NS):
                    v0 = i_v * BV
                    b_h = load_part(h + i_ch * K * V, k0, v0, o_kt, o_vt, K, V)
                    b_y = load_part(y + i_ch * BT * V, 0, v0, o_t, o_vt, BT, V)
                    b_dr = dot(b_y, tl.trans(b_h), PRECISION, acc=b_dr)
                b_dr *= -e_r[:, None]
        if REMOVAL != "none" and (G == 1 or n_rows <= BT):  # beta r in the scores
            if G > 1:
                tl.debug_barrier()
                i = opaque(i, n_rows, BT, 1)
                m_i = i < n_rows
                row = rows + i_ch * 9 * BT + i
                b_k = load_rows(k, i, k_t, m_i, o_k, K)
            if operand == tl.float32:  # before beta r is loaded, for registers
                b_w = load_block(weights + (i_ch * 2 + 1) * BT * BT, o_t, o_t, BT, BT)
                b_x = dot(b_w, b_k, PRECISION)
                tl.debug_barrier()
            b_beta = tl.load(row)
            b_r = load_rows(r, i, r_t, m_i, o_k, K)
            b_rb = (b_beta[:, None] * b_r.to(tl.float32)).to(operand)
            if operand != tl.float32:
                b_w = load_block(weights + (i_ch * 2 + 1) * BT * BT, o_t, o_t, BT, BT)
            b_db = tl.sum(b_r.to(tl.float32) * b_dr, axis=1)
            b_shift = b_beta * b_db
            if operand != tl.float32:
                b_x = dot(b_w, b_k, PRECISION)
            b_shift += tl.sum(b_rb.to(tl.float32) * b_x, axis=1)
            b_db += tl.sum(b_r.to(tl.float32) * b_x, axis=1)
            b_dgc += b_shift
            plane = (1 + i_k).to(tl.int64) * tokens * HV
            tl.store(shares + plane + (start + i) * HV + i_hv, b_db, mask=m_i)
            b_dr = b_beta[:, None] * (b_dr + b_x)
            if REMOVAL == "k":
                b_dk += b_dr
            else:
                b_dp = b_dr if G == 1 else b_dp + b_dr
            b_c = dot(tl.trans(b_w), b_rb, PRECISION)
        if G > 1:
            tl.debug_barrier()
            i = opaque(i, n_rows, BT, 2)
            m_i = i < n_rows
            row = rows + i_ch * 9 * BT + i
            of_row = of_rows + i_ch * 3 * BT + i
            place = (i_k * chunks * HV + i_ch) * BT + i
            b_k = load_rows(k, i, k_t, m_i, o_k, K)
        # q in the scores
        b_w = load_block(weights + i_ch * 2 * BT * BT, o_t, o_t, BT, BT)
        b_q = load_rows(q, i, q_t, m_i, o_k, K)
        b_c = dot(tl.trans(b_w), b_q, PRECISION, acc=b_c)
        b_dgc -= tl.sum(b_k.to(tl.float32) * b_c, axis=1)
        tl.store(dgc + place, b_dgc)
        b_dk += b_c
        b_dk += tl.load(of_row)[:, None] * b_q.to(tl.float32)
        if NORM:
            b_nk += tl.load(of_row + 2 * BT)
        if j == G - 1:
            if NORM:
                rstd = tl.load(row + 2 * BT)
                b_dk -= b_k.to(tl.float32) * (b_nk * rstd * rstd)[:, None]
            store_rows(dk + (start * H + i_h) * K, b_dk, i, H * K, m_i, o_k, K)
        if REMOVAL == "p":
            tl.store(shift + place, b_shift)
            if NORM:
                b_vy = tl.load(shares + (start + i) * HV + i_hv, mask=m_i, other=0.0)
                b_np += tl.load(of_row + 2 * BT) - tl.load(row) * b_vy
            if j == G - 1:
                if NORM:
                    rstd = tl.load(row + 3 * BT)
                    b_r = load_rows(r, i, r_t, m_i, o_k, K)
                    b_dp -= b_r.to(tl.float32) * (b_np * rstd * rstd)[:, None]
                store_rows(dp + (start * H + i_h) * K, b_dp, i, H * K, m_i, o_k, K)


@triton.jit
def head_gate_bwd_kernel(
    g,
    A_log,
    dt_bias,
    dgc,
    shift,
    beta,
    shares,
    dg,
    dA_log,
    ddt_bias,
    dbeta,
    chunk_start,
    chunk_rows,
    tokens,
    g_t,
    beta_t,
    bound,
    beta_factor,
    HV: tl.constexpr,
    BT: tl.constexpr,
    SHARES: tl.constexpr,
    TILES: tl.constexpr,
    GATE: tl.constexpr,
    SLOPE: tl.constexpr,
    RATE_SCALES_RAW: tl.constexpr,
    BETA_SIGMOID: tl.constexpr,
):
    """dg [T, HV] from the SHARES of dgc and those of key tiles of shift, dbeta [T, HV] from v's
    share and those of key tiles; dA_log, ddt_bias [NC, HV]: partial sums."""
    i_c, i_hv = tl.program_id(0).to(tl.int64), tl.program_id(1).to(tl.int64)
    i = tl.arange(0, BT)
    m_i = i < tl.load(chunk_rows + i_c)
    start = tl.load(chunk_start + i_c).to(tl.int64)
    i_ch = i_c * HV + i_hv
    chunks = tl.num_programs(0).to(tl.int64)
    b_dgc = tl.zeros([BT], tl.float32)
    for n in range(SHARES):
        b_dgc += tl.load(dgc + (n * chunks * HV + i_ch) * BT + i)
    b_dg = tl.cumsum(b_dgc, axis=0, reverse=True)
    if shift is not None:
        for n in range(TILES):
            b_dg -= tl.load(shift + (n * chunks * HV + i_ch) * BT + i)
    b_dg = tl.where(m_i, b_dg, 0.0)
    g += i_hv + start * g_t
    raw, rate, _ = load_head_gate(g, A_log, dt_bias, i_hv, i, g_t, m_i, bound, GATE, False)
    b_draw = b_dg * SLOPE(raw, rate, bound)
    p = dg + (start + i) * HV + i_hv
    tl.store(p, b_draw.to(dg.dtype.element_ty), mask=m_i)
    if dA_log is not None:
        if RATE_SCALES_RAW:
            b_dA = tl.sum(b_draw * raw, axis=0)
        else:
            b_dA = tl.sum(b_dg * GATE(raw, rate, bound), axis=0)
        tl.store(dA_log + i_ch, b_dA)
    if ddt_bias is not None:
        tl.store(ddt_bias + i_ch, tl.sum(b_draw, axis=0))
    if beta is not None:
        at = (start + i) * HV + i_hv
        b_db = tl.zeros([BT], tl.float32)
        for n in range(1 + TILES):
            b_db += tl.load(shares + n * (HV * tokens.to(tl.int64)) + at, mask=m_i, other=0.0)
        if BETA_SIGMOID:
            b_beta = tl.load(beta + (start + i) * beta_t + i_hv, mask=m_i, other=0.0)
            b_beta = sigmoid(b_beta.to(tl.float32))
            b_db *= beta_factor * b_beta * (1 - b_beta)
        tl.store(dbeta + at, b_db.to(dbeta.dtype.element_ty), mask=m_i)
