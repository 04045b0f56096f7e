"""Local to a chunk with one decay a head; long because a kernel is its list of arguments.

The decay of a pair of tokens is one number and multiplies their score. No exponent is above zero
for any gate, so there is one path.

Backward, from `dscores` of intra_bwd.py (gradients of the decayed scores): with W = dscores *
decay, q and k get W k and W^T q. The gate's gradient is, per row, the sum over channels of row
factors times their gradients less column factors times theirs, as the products saw the factors:
the inputs as they are, with norms and scale in W, so that their gradients come out as they are.
"""

import triton
import triton.language as tl

from .gate import LOG2E, sigmoid
from .intra import unit_lower_inverse
from .intra_bwd import load_scores
from .tiles import decay_exp, dot, load_block, load_rows, store_block, store_rows


@triton.jit
def load_head_gate(
    g, A_log, dt_bias, i_h, o_i, g_t, m_i, bound, GATE: tl.constexpr, EXP2: tl.constexpr
):
    """raw = g + dt_bias [BT], rate = exp(A_log), and the log decay in the unit of gc, zero beyond
    the chunk."""
    raw = tl.load(g + o_i * g_t, mask=m_i, other=0.0).to(tl.float32)
    rate = 1.0
    if dt_bias is not None:
        raw += tl.load(dt_bias + i_h).to(tl.float32)
    if A_log is not None:
        rate = tl.exp(tl.load(A_log + i_h).to(tl.float32))
    b_g = tl.where(m_i, GATE(raw, rate, bound), 0.0)
    if EXP2:
        b_g *= LOG2E
    return raw, rate, b_g


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
def decay_of(sums, EXP2: tl.constexpr):
    """exp(sums) [BT]."""
    s = sums[0]
    for n in tl.static_range(1, len(sums)):
        s += sums[n]
    return decay_exp(s, EXP2)


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
def decays(row, col, i, EXP2: tl.constexpr, TRANSPOSED: tl.constexpr = False):
    """exp(row_i - col_j) [BT, BT] for i > j, zero elsewhere; TRANSPOSED: i along columns."""
    if TRANSPOSED:
        keep = i[None, :] > i[:, None]
        x = row[0][None, :] - col[0][:, None]
    else:
        keep = i[:, None] > i[None, :]
        x = row[0][:, None] - col[0][None, :]
    for n in tl.static_range(1, len(row)):
        if TRANSPOSED:
            x += row[n][None, :] - col[n][:, None]
        else:
            x += row[n][:, None] - col[n][None, :]
    return tl.where(keep, decay_exp(tl.where(keep, x, 0.0), EXP2), 0.0)


@triton.jit
def weights(ptr, row, col, row_scale, col_scale, i, EXP2: tl.constexpr, TRANSPOSED: tl.constexpr):
    """What the inputs' rows are weighted with [BT, BT], from the gradients of the decayed scores at
    ptr; alike in both orientations, bit for bit."""
    b_d = load_scores(ptr, i)
    if TRANSPOSED:  # where it is loaded: see intra_bwd.py
        b_d = tl.trans(b_d).to(tl.float32) * decays(row, col, i, EXP2, True)
        return b_d * row_scale[None, :] * col_scale[:, None]
    else:
        b_d = b_d.to(tl.float32) * decays(row, col, i, EXP2)
        return b_d * row_scale[:, None] * col_scale[None, :]


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
    SCORES: tl.constexpr,
    REMOVAL: tl.constexpr,
    EPS: tl.constexpr,
    PRECISION: tl.constexpr,
    NS: tl.constexpr,
):
    """T and Aqk with SCORES (no T where nothing is removed); decay [NC, HV, K], the same number K
    times; rows [NC, HV, 7, C], fp32: beta; what q, k and r (k or p, which reads the state) are
    multiplied by; and by what in the scans (scan.py): q, r, and k where it writes."""
    i_c, i_hv = tl.program_id(0).to(tl.int64), tl.program_id(1).to(tl.int64)
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

    # scores of the inputs as they are: the norms and decays multiply them afterwards
    q_norm = tl.zeros_like(b_beta) + EPS
    k_norm = tl.zeros_like(b_beta) + EPS
    p_norm = tl.zeros_like(b_beta) + EPS
    if SCORES:
        b_qk = tl.zeros([BT, BT], tl.float32)
        b_kk = tl.zeros([BT, BT], tl.float32)
        diagonal = tl.zeros_like(b_beta)
    if SCORES or NORM:
        for i_k in tl.range((K + BK - 1) // BK, num_stages=NS):
            o_k = i_k * BK + tl.arange(0, BK)
            b_q = load_rows(q, i, q_t, m_i, o_k, K)
            b_k = load_rows(k, i, k_t, m_i, o_k, K)
            if NORM:
                q_norm += tl.sum(b_q.to(tl.float32) * b_q.to(tl.float32), axis=1)
                k_norm += tl.sum(b_k.to(tl.float32) * b_k.to(tl.float32), axis=1)
            b_r = b_k
            if REMOVAL == "p":
                b_r = load_rows(p, i, p_t, m_i, o_k, K)
                if NORM:
                    p_norm += tl.sum(b_r.to(tl.float32) * b_r.to(tl.float32), axis=1)
            if SCORES:
                diagonal += tl.sum(b_q.to(tl.float32) * b_k.to(tl.float32), axis=1)
                b_qk = dot(b_q, tl.trans(b_k), PRECISION, acc=b_qk)
                if REMOVAL != "none":
                    b_kk = dot(b_r, tl.trans(b_k), PRECISION, acc=b_kk)
    q_scale = tl.zeros_like(b_beta) + scale
    k_scale = tl.zeros_like(b_beta) + 1.0
    r_scale = k_scale
    if NORM:
        q_scale *= tl.rsqrt(q_norm)
        k_scale *= tl.rsqrt(k_norm)
        r_scale = k_scale
        if REMOVAL == "p":
            r_scale = tl.rsqrt(p_norm)

    _raw, _rate, b_g = load_head_gate(g, A_log, dt_bias, i_hv, i, g_t, m_i, bound, GATE, EXP2)
    gc = running_sums(b_g, operand)
    before = running_sums(b_g, operand, True) if REMOVAL == "p" else gc
    e = decay_of(gc, EXP2)
    rows += i_ch * 7 * BT + i
    tl.store(rows, b_beta)
    tl.store(rows + BT, q_scale)
    tl.store(rows + 2 * BT, k_scale)
    tl.store(rows + 3 * BT, r_scale)
    tl.store(rows + 4 * BT, q_scale * e)
    tl.store(rows + 5 * BT, r_scale * decay_of(before, EXP2))
    tl.store(rows + 6 * BT, k_scale * decay_to_end(gc, i, EXP2))
    whole = last_of(e, i)
    for i_k in range((K + BK - 1) // BK):
        o_k = i_k * BK + tl.arange(0, BK)
        tl.store(decay + i_ch * K + o_k, tl.zeros([BK], tl.float32) + whole, mask=o_k < K)
    if SCORES:
        scales = q_scale[:, None] * k_scale[None, :]
        b_qk *= scales * decays(gc, gc, i, EXP2)
        b_qk += tl.where(i[:, None] == i[None, :], (diagonal * q_scale * k_scale)[:, None], 0.0)
        store_block(Aqk + i_ch * BT * BT, b_qk, i, i, BT, BT)
        if REMOVAL != "none":
            b_kk *= (b_beta * r_scale)[:, None] * k_scale[None, :]
            b_kk *= decays(before, gc, i, EXP2)
            same = (i // 16)[:, None] == (i // 16)[None, :]
            b_16 = tl.reshape(tl.where(same, b_kk, 0.0), [BT // 16, 16, BT // 16, 16])
            b_T = unit_lower_inverse(b_kk, tl.sum(b_16, axis=2), BT, PRECISION)
            store_block(T + i_ch * BT * BT, b_T, i, i, BT, BT)


@triton.jit
def intra_head_bwd_kernel(
    q,
    k,
    p,
    g,
    A_log,
    dt_bias,
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
    dp,
    dgc,
    shift,
    dbeta,
    chunk_start,
    chunk_rows,
    tokens,
    q_t,
    q_h,
    k_t,
    k_h,
    p_t,
    p_h,
    g_t,
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
    NORM: tl.constexpr,
    EXP2: tl.constexpr,
    REMOVAL: tl.constexpr,
    PRECISION: tl.constexpr,
    NS: tl.constexpr,
):
    """As `intra_bwd_kernel` for one key tile; dgc [key tiles, NC, HV, C], fp32: its share of the
    gradient of gc, what comes from the chunk's end in the last row. With p, also dp, and in shift
    (like dgc) what its rows give to the sums up to the token before."""
    tiles: tl.constexpr = (K + BK - 1) // BK
    i_k = tl.program_id(0) % tiles
    i_c, i_hv = (tl.program_id(0) // tiles).to(tl.int64), tl.program_id(1).to(tl.int64)
    i_h = i_hv // G
    i = tl.arange(0, BT)
    m_i = i < tl.load(chunk_rows + i_c)
    start = tl.load(chunk_start + i_c).to(tl.int64)
    i_ch = i_c * HV + i_hv
    chunks = (tl.num_programs(0) // tiles).to(tl.int64)
    q += i_h * q_h + start * q_t
    k += i_h * k_h + start * k_t
    r, r_t = k, k_t
    if REMOVAL == "p":
        r, r_t = p + i_h * p_h + start * p_t, p_t
    g += i_hv + start * g_t
    do += i_hv * do_h + start * do_t
    v_new += i_ch * BT * V
    y += i_ch * BT * V
    h += i_ch * K * V
    dh += i_ch * K * V
    dq += (start * HV + i_hv) * K
    dk += (start * HV + i_hv) * K
    dscores += i_ch * 2 * BT * BT
    rows += i_ch * 7 * BT + i
    of_rows += i_ch * 3 * BT + i
    operand = v_new.dtype.element_ty
    o_k = i_k * BK + tl.arange(0, BK)

    _raw, _rate, b_g = load_head_gate(g, A_log, dt_bias, i_hv, i, g_t, m_i, bound, GATE, EXP2)
    gc = running_sums(b_g, operand)
    before = running_sums(b_g, operand, True) if REMOVAL == "p" else gc
    b_beta = tl.load(rows)[:, None]
    q_scale, k_scale, r_scale = tl.load(rows + BT), tl.load(rows + 2 * BT), tl.load(rows + 3 * BT)

    # column factor k
    b_dc = tl.zeros([BT, BK], tl.float32)
    b_dl = tl.zeros([BK], tl.float32)
    for i_v in tl.range((V + BV - 1) // BV, num_stages=NS):
        o_v = i_v * BV + tl.arange(0, BV)
        b_h = load_block(h, o_k, o_v, K, V)
        b_dh = load_block(dh, o_k, o_v, K, V)
        b_dl += tl.sum(b_h.to(tl.float32) * b_dh.to(tl.float32), axis=1)
        b_dc = dot(load_block(v_new, i, o_v, BT, V), tl.trans(b_dh), PRECISION, acc=b_dc)
    b_dc *= tl.load(rows + 6 * BT)[:, None]
    b_dl *= tl.load(decay + i_ch * K + o_k, mask=o_k < K, other=0.0)
    b_k = load_rows(k, i, k_t, m_i, o_k, K)
    b_dgc = -tl.sum(b_k.to(tl.float32) * b_dc, axis=1)
    last = tl.sum(b_dl, axis=0) - tl.sum(b_dgc, axis=0)
    b_w = weights(dscores, gc, gc, q_scale, k_scale, i, EXP2, True).to(operand)
    b_c = dot(b_w, load_rows(q, i, q_t, m_i, o_k, K), PRECISION)
    if REMOVAL != "none":
        b_w = weights(dscores + BT * BT, before, gc, r_scale, k_scale, i, EXP2, True).to(operand)
        b_rb = (b_beta * load_rows(r, i, r_t, m_i, o_k, K).to(tl.float32)).to(operand)
        b_c = dot(b_w, b_rb, PRECISION, acc=b_c)
    b_dc += b_c
    b_dgc -= tl.sum(b_k.to(tl.float32) * b_c, axis=1)

    # row factors q and beta r
    tl.debug_barrier()
    b_dq = tl.zeros([BT, BK], tl.float32)
    b_dr = tl.zeros([BT, BK], tl.float32)
    for i_v in tl.range((V + BV - 1) // BV, num_stages=NS):
        o_v = i_v * BV + tl.arange(0, BV)
        b_h = tl.trans(load_block(h, o_k, o_v, K, V))
        b_do = load_rows(do, i, do_t, m_i, o_v, V).to(operand)
        b_dq = dot(b_do, b_h, PRECISION, acc=b_dq)
        if REMOVAL != "none":
            b_dr = dot(load_block(y, i, o_v, BT, V), b_h, PRECISION, acc=b_dr)
    b_dq *= tl.load(rows + 4 * BT)[:, None]
    b_k = load_rows(k, i, k_t, m_i, o_k, K)
    b_w = weights(dscores, gc, gc, q_scale, k_scale, i, EXP2, False).to(operand)
    b_dq = dot(b_w, b_k, PRECISION, acc=b_dq)
    b_q = load_rows(q, i, q_t, m_i, o_k, K).to(tl.float32)
    b_dgc += tl.sum(b_q * b_dq, axis=1)
    if REMOVAL != "none":
        b_dr *= -tl.load(rows + 5 * BT)[:, None]
        b_r = load_rows(r, i, r_t, m_i, o_k, K).to(tl.float32)
        b_shift = tl.sum(b_beta * b_r * b_dr, axis=1)
        b_w = weights(dscores + BT * BT, before, gc, r_scale, k_scale, i, EXP2, False).to(operand)
        b_c = dot(b_w, b_k, PRECISION)
        b_dr += b_c
        b_shift += tl.sum((b_beta * b_r).to(operand).to(tl.float32) * b_c, axis=1)
        b_dgc += b_shift

    # the diagonal's row and column cancel in the gate's gradient
    b_k = b_k.to(tl.float32)
    diagonal = (tl.load(of_rows) * q_scale * k_scale)[:, None]
    b_dq += diagonal * b_k
    b_dc += diagonal * b_q
    dbeta += start * HV + i_hv
    b_nk = tl.load(of_rows + 2 * BT)  # sum over channels of k dk, and with p of p dp too
    if REMOVAL == "p":
        b_vy = tl.load(rows) * tl.load(dbeta + i * HV, mask=m_i, other=0.0)
    b_dp = b_beta * b_dr
    if REMOVAL == "k":
        b_dc += b_dp
    if NORM:
        b_dq -= b_q * (tl.load(of_rows + BT) * (q_scale / scale) * (q_scale / scale))[:, None]
        if REMOVAL == "p":
            b_dp -= b_r * ((b_nk - b_vy) * 0.5 * r_scale * r_scale)[:, None]
            b_nk = (b_nk + b_vy) * 0.5
        b_dc -= b_k * (b_nk * k_scale * k_scale)[:, None]
    store_rows(dq, b_dq, i, HV * K, m_i, o_k, K)
    store_rows(dk, b_dc, i, HV * K, m_i, o_k, K)
    place = (i_k * chunks * HV + i_ch) * BT + i
    if REMOVAL == "p":
        dp += (start * HV + i_hv) * K
        store_rows(dp, b_dp, i, HV * K, m_i, o_k, K)
        tl.store(shift + place, b_shift)
    if REMOVAL != "none":
        plane = (i_k + 1).to(tl.int64) * tokens * HV
        tl.store(dbeta + plane + i * HV, tl.sum(b_r * b_dr, axis=1), mask=m_i)
    b_dgc += tl.where(i == BT - 1, last, 0.0)
    tl.store(dgc + place, b_dgc)


@triton.jit
def head_gate_bwd_kernel(
    g,
    A_log,
    dt_bias,
    dgc,
    shift,
    dg,
    dA_log,
    ddt_bias,
    chunk_start,
    chunk_rows,
    g_t,
    bound,
    HV: tl.constexpr,
    BT: tl.constexpr,
    TILES: tl.constexpr,
    GATE: tl.constexpr,
    SLOPE: tl.constexpr,
    RATE_SCALES_RAW: tl.constexpr,
):
    """dg [T, HV] from the key tiles' shares of dgc and of shift; dA_log, ddt_bias [NC, HV]: partial
    sums."""
    i_c, i_hv = tl.program_id(0).to(tl.int64), tl.program_id(1).to(tl.int64)
    i = tl.arange(0, BT)
    m_i = i < tl.load(chunk_rows + i_c)
    start = tl.load(chunk_start + i_c).to(tl.int64)
    i_ch = i_c * HV + i_hv
    chunks = tl.num_programs(0).to(tl.int64)
    b_dgc = tl.zeros([BT], tl.float32)
    for n in range(TILES):
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
