"""Gradients of everything local to a chunk where the gate is safe; see intra_bwd.py.

With |gc_i - gc_m| at most 16 * 5 / ln 2 = 116 to the middle row m of row i's half, one row factor
x = q exp(gc_i - n) and one column factor y = k exp(n - gc_j) serve all: n is gc_m rounded to a
whole power of two, n0 in the first half of the rows and n1 in the second. What refers to another n
differs by a power of two, which is exact in bf16: pairs of a row in the second half and a column in
the first, exp(n1 - n0); states entering, exp(n) x; states leaving, exp(gc_C - n) y. So all
gradients of a factor are summed in one accumulator and multiplied by it once, and what a pair adds
to the gradient of gc at its row it takes off at its column, with the same factors.
"""

import triton
import triton.language as tl

from fla_cp.kernels.triton.device.blocks import (
    decay_exp,
    dot,
    load_block,
    load_rows,
    parts,
    row_sums,
    store_rows,
    sum_steps,
)
from fla_cp.kernels.triton.device.channelwise_decay import load_steps, shifted, whole
from fla_cp.kernels.triton.device.channelwise_grads import load_scores, store_gate_grads
from fla_cp.kernels.triton.device.decay_sums import UP_TO
from fla_cp.kernels.triton.device.gates import LOG2E
from fla_cp.kernels.triton.device.opaque import opaque
from fla_cp.kernels.triton.device.planes import (
    CHANNELWISE_PLANES,
    GRAD_PLANES,
    K_DK,
    K_SCALE,
    Q_DQ,
    Q_SCALE,
)


@triton.jit
def safe_bwd_kernel(
    q,
    k,
    g,
    A_log,
    dt_bias,
    sums,
    anchors,
    rows,
    row_grads,
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
    """Arguments as of `intra_bwd_kernel`. anchors [NC, HV, 3, K]: gc of rows 15, 47 and 63."""
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
    rows += i_ch * CHANNELWISE_PLANES * BT
    row_grads += i_ch * GRAD_PLANES * BT
    operand = v_new.dtype.element_ty
    o_k = i_k * BK + tl.arange(0, BK)
    m_k = o_k < K
    first_anchor = anchors + i_ch * 3 * K
    anchors += i_ch * 3 * K + o_k

    UNIT: tl.constexpr = 1.0 if EXP2 else 1.0 / LOG2E

    # nearly all loads at once: to wait for memory again costs more than registers do
    b_g = load_steps(
        g + i_hv * g_h + start * g_t, A_log, dt_bias, i_hv, i, g_t, m_i, o_k, bound, K, GATE, EXP2
    )
    b_k = load_rows(k, i, k_t, m_i, o_k, K)
    b_q = load_rows(q, i, q_t, m_i, o_k, K)
    b_ds = load_scores(dscores, i)
    # A number of each 32 bytes that later phases wait for, for the cache's sake: early, in fewer
    # registers than what is there. NS of 1: tiles with no register to spare.
    if NS > 1:
        near = tl.arange(0, 32) * 8
        m_n = near < 3 * BT
        touched = tl.load(rows + near, mask=m_n, other=0.0)
        touched += tl.load(row_grads + near, mask=m_n, other=0.0)
        place = near // BK * K + i_k * BK + near % BK
        m_n = (near < 3 * BK) & (i_k * BK + near % BK < K)
        touched += tl.load(first_anchor + place, mask=m_n, other=0.0)
    b_dl = row_sums(h, dh, i_k * BK, tl.arange(0, BK), tl.arange(0, 32), K, V)
    b_dq = tl.zeros([BT, BK], tl.float32)
    b_dr = tl.zeros([BT, BK], tl.float32)
    b_dc = tl.zeros([BT, BK], tl.float32)
    for i_v in tl.range((V + BV - 1) // BV, num_stages=NS):
        o_v = i_v * BV + tl.arange(0, BV)
        b_h = load_block(h, o_k, o_v, K, V)
        b_dh = load_block(dh, o_k, o_v, K, V)
        b_do = load_rows(do, i, do_t, m_i, o_v, V).to(operand)
        b_dq = dot(b_do, tl.trans(b_h), PRECISION, acc=b_dq)
        if REMOVES:
            b_dr = dot(load_block(y, i, o_v, BT, V), tl.trans(b_h), PRECISION, acc=b_dr)
        b_dc = dot(load_block(v_new, i, o_v, BT, V), tl.trans(b_dh), PRECISION, acc=b_dc)
    if NS > 1:  # a use for them, as far as the compiler can tell: n_rows is never more
        tl.store(rows + near, touched, mask=near * 0 + n_rows > BT)
    b_gc = sum_steps(sums, UP_TO, i, parts(b_g, operand), PRECISION)
    n0 = whole(tl.load(anchors, mask=m_k, other=0.0), UNIT)[None, :]
    n1 = whole(tl.load(anchors + K, mask=m_k, other=0.0), UNIT)[None, :]
    end = tl.load(anchors + 2 * K, mask=m_k, other=0.0)[None, :]
    first = (i < BT // 2)[:, None]
    d = b_gc - tl.where(first, n0, n1) * UNIT
    e = tl.where(first, tl.exp2(n0), tl.exp2(n1))
    b_dq *= e
    b_dr *= -e
    b_dc *= tl.where(first, decay_exp(end - n0 * UNIT, EXP2), decay_exp(end - n1 * UNIT, EXP2))
    b_k = b_k.to(tl.float32) * tl.load(rows + K_SCALE * BT + i)[:, None]
    shift = n1 - n0

    second = (i >= BT // 2)[:, None]
    b_y = b_k * decay_exp(-d, EXP2)
    near, far = b_y.to(operand), shifted(b_y, shift, first).to(operand)
    last = decay_exp(tl.load(anchors + 2 * K, mask=m_k, other=0.0), EXP2)
    b_dl = b_dl * last + tl.sum(near.to(tl.float32) * b_dc, axis=0)

    # row factor q
    b_r = dot(b_ds, near, PRECISION, acc=b_dq)
    b_dq = dot(b_ds, far, PRECISION, acc=b_dq)
    b_dq = tl.where(first, b_r, b_dq)
    b_q = b_q.to(tl.float32) * tl.load(rows + Q_SCALE * BT + i)[:, None]
    f = decay_exp(d, EXP2)
    b_x = b_q * f
    row = b_x.to(operand)
    b_dgc = row.to(tl.float32) * b_dq + tl.where((i == BT - 1)[:, None], b_dl[None, :], 0.0)
    b_dq = b_dq * f + tl.load(row_grads + i)[:, None] * b_k  # and the diagonal
    if NORM:
        b_dq -= b_q * (tl.load(row_grads + Q_DQ * BT + i) / (scale * scale))[:, None]
    out = (start * HV + i_hv) * K
    store_rows(dq + out, b_dq * tl.load(rows + Q_SCALE * BT + i)[:, None], i, HV * K, m_i, o_k, K)
    b_dk = tl.load(row_grads + i)[:, None] * b_q
    b_ds = tl.trans(b_ds)
    b_c = dot(b_ds, shifted(b_x, shift, second).to(operand), PRECISION, acc=b_dc)
    b_dc = dot(b_ds, row, PRECISION, acc=b_dc)

    # row factor beta k; exponentials are formed again, of a d that the compiler cannot tell to be d
    d += n_rows // (BT + 1)
    f = decay_exp(d, EXP2)
    if REMOVES:
        tl.debug_barrier()  # not loaded earlier, for registers
        i, out = opaque(i, n_rows, BT, 2), opaque(out, n_rows, BT, 2)
        if NS == 1:
            o_k = opaque(o_k, n_rows, BT, 2)
        m_i = i < n_rows
        b_da = load_scores(dscores + BT * BT, i)
        b_r = dot(b_da, near, PRECISION, acc=b_dr)
        b_dr = dot(b_da, far, PRECISION, acc=b_dr)
        b_dr = tl.where(first, b_r, b_dr)
        b_beta = tl.load(rows + i)[:, None]
        b_x = b_beta * (b_k * f)
        row = b_x.to(operand)
        b_dgc += row.to(tl.float32) * b_dr
        b_dr *= f
        dbeta += (i_k + 1).to(tl.int64) * tokens * HV + start * HV + i_hv
        tl.store(dbeta + i * HV, tl.sum(b_k * b_dr, axis=1), mask=m_i)
        b_dk += b_dr * b_beta
        b_da = tl.trans(b_da)
        b_c = dot(b_da, shifted(b_x, shift, second).to(operand), PRECISION, acc=b_c)
        b_dc = dot(b_da, row, PRECISION, acc=b_dc)

    # column factor k
    b_dc = tl.where(first, b_c, b_dc)
    b_dgc -= (b_k * decay_exp(-d, EXP2)).to(operand).to(tl.float32) * b_dc
    b_dk += b_dc * decay_exp(-d, EXP2)
    if NORM:
        b_dk -= b_k * tl.load(row_grads + K_DK * BT + i)[:, None]
    store_rows(dk + out, b_dk * tl.load(rows + K_SCALE * BT + i)[:, None], i, HV * K, m_i, o_k, K)

    tl.debug_barrier()
    n_rows = tl.load(chunk_rows + i_c)
    i, i_k = opaque(i, n_rows, BT, 1), opaque(i_k, n_rows, BT, 1)
    i_c, i_hv = opaque(i_c, n_rows, BT, 1), opaque(i_hv, n_rows, BT, 1)
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
