"""Gradients of q, k and p of a chunk with one decay a head: the products with states and scores."""

import triton
import triton.language as tl

from fla_cp.kernels.triton.device.blocks import (
    dot,
    load_block,
    load_part,
    load_rows,
    row_sums,
    store_rows,
)
from fla_cp.kernels.triton.device.opaque import opaque
from fla_cp.kernels.triton.device.planes import (
    GRAD_PLANES,
    HEADWISE_PLANES,
    K_DK,
    K_FACTOR,
    K_SCALE,
    Q_DQ,
    Q_FACTOR,
    Q_SCALE,
    R_FACTOR,
    R_SCALE,
)


@triton.jit
def dqk_head_kernel(
    q,
    k,
    decay,
    rows,
    row_grads,
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
    row = rows + i_ch * HEADWISE_PLANES * BT + i
    row_grad = row_grads + i_ch * GRAD_PLANES * BT + i
    place = (i_k * chunks * H + i_ch) * BT + i

    # all loads at once: to wait for memory again costs more than registers do, which fp32 lacks
    b_k = load_rows(k, i, k_t, m_i, o_k, K)
    b_q = load_rows(q, i, q_t, m_i, o_k, K)
    b_w = load_block(weights + i_ch * 2 * BT * BT, i, i, BT, BT)
    if REMOVAL != "none" and operand != tl.float32:
        b_a = load_block(weights + (i_ch * 2 + 1) * BT * BT, i, i, BT, BT)
        b_beta = tl.load(row)
        b_rb = (b_beta[:, None] * b_k.to(tl.float32)).to(operand)
    b_diagonal = tl.load(row_grad)
    # a number of each 32 bytes that later phases wait for, for the cache's sake
    if NS > 1:
        near = tl.arange(0, 64) * 8
        touched = tl.load(rows + i_ch * HEADWISE_PLANES * BT + near, mask=near < 7 * BT, other=0.0)
        touched += tl.load(
            row_grads + i_ch * GRAD_PLANES * BT + near, mask=near < 3 * BT, other=0.0
        )
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
    b_dq *= tl.load(row + Q_FACTOR * BT)[:, None]
    b_dq = dot(b_w, b_k, PRECISION, acc=b_dq)
    b_dgc = tl.sum(b_q.to(tl.float32) * b_dq, axis=1)
    # the diagonal's row and column cancel in the gate's gradient
    b_dq += b_diagonal[:, None] * b_k.to(tl.float32)
    if NORM:
        if tiles > 1:
            b_n = tl.load(row_grad + Q_DQ * BT)
        else:
            b_n = tl.sum(b_q.to(tl.float32) * b_dq, axis=1)
        rstd = tl.load(row + Q_SCALE * BT) / scale
        b_dq -= b_q.to(tl.float32) * (b_n * rstd * rstd)[:, None]
    store_rows(dq + (start * H + i_h) * K, b_dq, i, H * K, m_i, o_k, K)

    # column factor k in the states
    b_c *= tl.load(row + K_FACTOR * BT)[:, None]
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
        b_dr *= -tl.load(row + R_FACTOR * BT)[:, None]
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
        rstd = tl.load(row + K_SCALE * BT)
        b_dk -= b_k.to(tl.float32) * (tl.load(row_grad + K_DK * BT) * rstd * rstd)[:, None]
    store_rows(dk + (start * H + i_h) * K, b_dk, i, H * K, m_i, o_k, K)


@triton.jit
def dq_head_kernel(
    q,
    k,
    rows,
    row_grads,
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
        row = rows + i_ch * HEADWISE_PLANES * BT + i
        row_grad = row_grads + i_ch * GRAD_PLANES * BT + i
        b_w = load_block(weights + i_ch * 2 * BT * BT, o_t, o_t, BT, BT)
        e_q, b_diagonal = tl.load(row + Q_FACTOR * BT), tl.load(row_grad)
        if NORM and tiles > 1:
            b_norm += tl.load(row_grad + Q_DQ * BT)
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
                rstd = tl.load(row + Q_SCALE * BT) / scale
                b_dq -= b_q * (b_norm * rstd * rstd)[:, None]
            store_rows(dq + (start * H + i_h) * K, b_dq, i, H * K, m_i, o_k, K)


@triton.jit
def dk_head_kernel(
    q,
    k,
    p,
    decay,
    rows,
    row_grads,
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
        row = rows + i_ch * HEADWISE_PLANES * BT + i
        row_grad = row_grads + i_ch * GRAD_PLANES * BT + i
        place = (i_k * chunks * HV + i_ch) * BT + i
        b_dgc = tl.zeros([BT], tl.float32)
        b_shift = tl.zeros([BT], tl.float32)
        b_dr = tl.zeros([BT, BK], tl.float32)
        b_c = tl.zeros([BT, BK], tl.float32)
        b_k = load_rows(k, i, k_t, m_i, o_k, K)
        if G == 1 or n_rows > 0:  # column factor k and row factor beta r in the states
            e_k, end = tl.load(row + K_FACTOR * BT), tl.load(decay + i_ch * K)
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
                e_r = tl.load(row + R_FACTOR * BT)
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
                row = rows + i_ch * HEADWISE_PLANES * BT + i
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
            row = rows + i_ch * HEADWISE_PLANES * BT + i
            row_grad = row_grads + i_ch * GRAD_PLANES * BT + i
            place = (i_k * chunks * HV + i_ch) * BT + i
            b_k = load_rows(k, i, k_t, m_i, o_k, K)
        # q in the scores
        b_w = load_block(weights + i_ch * 2 * BT * BT, o_t, o_t, BT, BT)
        b_q = load_rows(q, i, q_t, m_i, o_k, K)
        b_c = dot(tl.trans(b_w), b_q, PRECISION, acc=b_c)
        b_dgc -= tl.sum(b_k.to(tl.float32) * b_c, axis=1)
        tl.store(dgc + place, b_dgc)
        b_dk += b_c
        b_dk += tl.load(row_grad)[:, None] * b_q.to(tl.float32)
        if NORM:
            b_nk += tl.load(row_grad + K_DK * BT)
        if j == G - 1:
            if NORM:
                rstd = tl.load(row + K_SCALE * BT)
                b_dk -= b_k.to(tl.float32) * (b_nk * rstd * rstd)[:, None]
            store_rows(dk + (start * H + i_h) * K, b_dk, i, H * K, m_i, o_k, K)
        if REMOVAL == "p":
            tl.store(shift + place, b_shift)
            if NORM:
                b_vy = tl.load(shares + (start + i) * HV + i_hv, mask=m_i, other=0.0)
                b_np += tl.load(row_grad + K_DK * BT) - tl.load(row) * b_vy
            if j == G - 1:
                if NORM:
                    rstd = tl.load(row + R_SCALE * BT)
                    b_r = load_rows(r, i, r_t, m_i, o_k, K)
                    b_dp -= b_r.to(tl.float32) * (b_np * rstd * rstd)[:, None]
                store_rows(dp + (start * H + i_h) * K, b_dp, i, H * K, m_i, o_k, K)
