"""Gradients of q, k and p of a chunk with one decay a head: the products with states and scores."""

import triton
import triton.language as tl

from fla_cp.kernels.triton.device import planes
from fla_cp.kernels.triton.device.blocks import (
    dot,
    load_part,
    load_rows,
    row_sums,
    rows_from,
    store_rows,
)
from fla_cp.kernels.triton.device.opaque import keep_loads, opaque, prefetch_lines
from fla_cp.kernels.triton.device.score_grads import load_scores


@triton.jit
def norm_bwd(b_d, b_x, b_n, rstd):
    """The gradient of rows before their normalisation, from the one after (b_d), whose sum with the
    rows x over channels is b_n; rstd: 1 / |x|."""
    return b_d - b_x.to(tl.float32) * (b_n * rstd * rstd)[:, None]


@triton.jit
def dqk_head_kernel(x, out, chunks, tokens, scale, S: tl.constexpr, R: tl.constexpr):
    """x: `Saved`; out: `Grads`; chunks: `ChunkTable`. dq and dk of one key tile and
    head, without groups and p."""
    H: tl.constexpr = S.HV // S.G
    tiles: tl.constexpr = (S.K + S.BK - 1) // S.BK
    i_k = tl.program_id(0) % tiles  # fastest, so that the tiles of a chunk share what they load
    i_c, i_h = (tl.program_id(0) // tiles).to(tl.int64), tl.program_id(1).to(tl.int64)
    n_rows = tl.load(chunks.rows + i_c)
    start = tl.load(chunks.start + i_c).to(tl.int64)
    NC = (tl.num_programs(0) // tiles).to(tl.int64)
    operand = x.h.dtype.element_ty
    k0 = i_k * S.BK
    o_kt, o_vt = tl.arange(0, S.BK), tl.arange(0, S.BV)
    o_k = k0 + o_kt
    q = rows_from(x.q, start, i_h)
    k = rows_from(x.k, start, i_h)
    do = rows_from(x.do, start, i_h)
    i = tl.arange(0, S.BT)
    m_i = i < n_rows
    i_ch = i_c * H + i_h
    row = x.rows + i_ch * planes.HEADWISE_PLANES * S.BT + i
    row_grad = out.row_grads + i_ch * planes.GRAD_PLANES * S.BT + i
    place = (i_k * NC * H + i_ch) * S.BT + i

    # All loads come first: to wait for memory again costs more than registers do, which fp32 lacks.
    b_k = load_rows(k, i, m_i, o_k, S.K)
    b_q = load_rows(q, i, m_i, o_k, S.K)
    b_w = load_scores(out, i_ch, 0, i, S)
    if S.REMOVAL != "none" and operand != tl.float32:
        b_a = load_scores(out, i_ch, 1, i, S)
        b_beta = tl.load(row)
        b_rb = (b_beta[:, None] * b_k.to(tl.float32)).to(operand)
    b_diagonal = tl.load(row_grad)
    if S.NS > 1:
        rows = x.rows + i_ch * planes.HEADWISE_PLANES * S.BT
        prefetched = prefetch_lines(rows, 7 * S.BT, 64)
        row_grads = out.row_grads + i_ch * planes.GRAD_PLANES * S.BT
        prefetched += prefetch_lines(row_grads, 3 * S.BT, 64)
    b_dq = tl.zeros([S.BT, S.BK], tl.float32)
    b_dr = tl.zeros([S.BT, S.BK], tl.float32)
    b_c = tl.zeros([S.BT, S.BK], tl.float32)
    b_dl = tl.zeros([S.BK], tl.float32)
    for i_v in tl.range((S.V + S.BV - 1) // S.BV, num_stages=S.NS):
        v0 = i_v * S.BV
        b_h = load_part(x.h + i_ch * S.K * S.V, k0, v0, o_kt, o_vt, S.K, S.V)
        b_dh = load_part(x.dh + i_ch * S.K * S.V, k0, v0, o_kt, o_vt, S.K, S.V)
        b_do = load_rows(do, i, m_i, v0 + o_vt, S.V).to(operand)
        b_dq = dot(b_do, tl.trans(b_h), S.PRECISION, acc=b_dq)
        if S.REMOVAL != "none":
            b_y = load_part(x.y + i_ch * S.BT * S.V, 0, v0, tl.arange(0, S.BT), o_vt, S.BT, S.V)
            b_dr = dot(b_y, tl.trans(b_h), S.PRECISION, acc=b_dr)
        b_vn = load_part(x.v_new + i_ch * S.BT * S.V, 0, v0, tl.arange(0, S.BT), o_vt, S.BT, S.V)
        b_c = dot(b_vn, tl.trans(b_dh), S.PRECISION, acc=b_c)
        if operand == tl.float32:
            b_dl += tl.sum(b_h * b_dh, axis=1)
    if operand != tl.float32:
        b_dl = row_sums(x.h + i_ch * S.K * S.V, x.dh + i_ch * S.K * S.V, k0, o_kt, o_vt, S.K, S.V)
    if S.NS > 1:
        keep_loads(x.rows, prefetched, n_rows, S.BT)

    # row factor q
    b_dq *= tl.load(row + planes.Q_FACTOR * S.BT)[:, None]
    b_dq = dot(b_w, b_k, S.PRECISION, acc=b_dq)
    b_dgc = tl.sum(b_q.to(tl.float32) * b_dq, axis=1)
    # the diagonal's row and column cancel in the gate's gradient
    b_dq += b_diagonal[:, None] * b_k.to(tl.float32)
    if R.NORM:
        if tiles > 1:
            b_n = tl.load(row_grad + planes.Q_DQ * S.BT)
        else:
            b_n = tl.sum(b_q.to(tl.float32) * b_dq, axis=1)
        b_dq = norm_bwd(b_dq, b_q, b_n, tl.load(row + planes.Q_SCALE * S.BT) / scale)
    store_rows(out.dq + (start * H + i_h) * S.K, b_dq, i, H * S.K, m_i, o_k, S.K)

    # column factor k in the states
    b_c *= tl.load(row + planes.K_FACTOR * S.BT)[:, None]
    # summed by itself, because it cancels with its share in the last row
    b_end = -tl.sum(b_k.to(tl.float32) * b_c, axis=1)
    last = tl.sum(b_dl, axis=0) * tl.load(x.decay + i_ch * S.K) - tl.sum(b_end, axis=0)
    b_dgc += b_end + tl.where(i == S.BT - 1, last, 0.0)
    b_dk = b_c + b_diagonal[:, None] * b_q.to(tl.float32)

    # row factor beta k
    b_c = tl.zeros([S.BT, S.BK], tl.float32)
    if S.REMOVAL != "none":
        if operand == tl.float32:
            b_a = load_scores(out, i_ch, 1, i, S)
            b_beta = tl.load(row)
            b_rb = (b_beta[:, None] * b_k.to(tl.float32)).to(operand)
        b_dr *= -tl.load(row + planes.R_FACTOR * S.BT)[:, None]
        # the states use k in fp32, the scores beta k as the product reads it
        b_db = tl.sum(b_k.to(tl.float32) * b_dr, axis=1)
        b_shift = b_beta * b_db - tl.sum(b_rb.to(tl.float32) * b_dr, axis=1)
        b_dr = dot(b_a, b_k, S.PRECISION, acc=b_dr)
        b_shift += tl.sum(b_rb.to(tl.float32) * b_dr, axis=1)
        b_db = tl.sum(b_k.to(tl.float32) * b_dr, axis=1)
        b_dgc += b_shift
        plane = (1 + i_k).to(tl.int64) * tokens * H
        tl.store(out.shares + plane + (start + i) * H + i_h, b_db, mask=m_i)
        b_dk += b_dr * b_beta[:, None]
        b_c = dot(tl.trans(b_a), b_rb, S.PRECISION)

    # column factor k in the scores
    b_c = dot(tl.trans(b_w), b_q, S.PRECISION, acc=b_c)
    b_dgc -= tl.sum(b_k.to(tl.float32) * b_c, axis=1)
    tl.store(out.dgc + place, b_dgc)
    b_dk += b_c
    if R.NORM:
        b_n = tl.load(row_grad + planes.K_DK * S.BT)
        b_dk = norm_bwd(b_dk, b_k, b_n, tl.load(row + planes.K_SCALE * S.BT))
    store_rows(out.dk + (start * H + i_h) * S.K, b_dk, i, H * S.K, m_i, o_k, S.K)


@triton.jit
def dq_head_kernel(x, out, chunks, scale, S: tl.constexpr, R: tl.constexpr):
    """dq of one key tile and key head, with groups: a program goes through the value heads of its
    group. out.dgc: q's part."""
    H: tl.constexpr = S.HV // S.G
    tiles: tl.constexpr = (S.K + S.BK - 1) // S.BK
    i_k = tl.program_id(0) % tiles
    i_c, i_h = (tl.program_id(0) // tiles).to(tl.int64), tl.program_id(1).to(tl.int64)
    n_rows = tl.load(chunks.rows + i_c)
    start = tl.load(chunks.start + i_c).to(tl.int64)
    NC = (tl.num_programs(0) // tiles).to(tl.int64)
    operand = x.h.dtype.element_ty
    k0 = i_k * S.BK
    o_t, o_kt, o_vt = tl.arange(0, S.BT), tl.arange(0, S.BK), tl.arange(0, S.BV)
    o_k = k0 + o_kt
    q = rows_from(x.q, start, i_h)
    k = rows_from(x.k, start, i_h)
    b_norm = tl.zeros([S.BT], tl.float32)  # q dq summed over channels
    b_dq = tl.zeros([S.BT, S.BK], tl.float32)
    for j in tl.range(S.G, num_stages=1):
        i = opaque(tl.arange(0, S.BT), n_rows + j, S.BT, S.G)
        m_i = i < n_rows
        i_hv = i_h * S.G + j
        i_ch = i_c * S.HV + i_hv
        row = x.rows + i_ch * planes.HEADWISE_PLANES * S.BT + i
        row_grad = out.row_grads + i_ch * planes.GRAD_PLANES * S.BT + i
        b_w = load_scores(out, i_ch, 0, o_t, S)
        e_q, b_diagonal = tl.load(row + planes.Q_FACTOR * S.BT), tl.load(row_grad)
        if R.NORM and tiles > 1:
            b_norm += tl.load(row_grad + planes.Q_DQ * S.BT)
        b_c = tl.zeros([S.BT, S.BK], tl.float32)
        for i_v in tl.range((S.V + S.BV - 1) // S.BV, num_stages=S.NS):
            v0 = i_v * S.BV
            b_h = load_part(x.h + i_ch * S.K * S.V, k0, v0, o_kt, o_vt, S.K, S.V)
            do = rows_from(x.do, start, i_hv)
            b_do = load_rows(do, i, m_i, v0 + o_vt, S.V).to(operand)
            b_c = dot(b_do, tl.trans(b_h), S.PRECISION, acc=b_c)
        b_c *= e_q[:, None]
        b_k = load_rows(k, i, m_i, o_k, S.K)
        # loaded before the product: else Triton sums in the layout of the load and moves fp32 there
        b_q = load_rows(q, i, m_i, o_k, S.K).to(tl.float32)
        b_c = dot(b_w, b_k, S.PRECISION, acc=b_c)
        tl.store(out.dgc + (i_k * NC * S.HV + i_ch) * S.BT + i, tl.sum(b_q * b_c, axis=1))
        # the diagonal's row and column cancel in the gate's gradient
        b_c += b_diagonal[:, None] * b_k.to(tl.float32)
        b_dq = b_c if S.G == 1 else b_dq + b_c
        if j == S.G - 1:
            if S.G > 1:  # loaded again rather than kept during the products
                tl.debug_barrier()
                i = opaque(i, n_rows, S.BT, 1)
                m_i = i < n_rows
                b_q = load_rows(q, i, m_i, o_k, S.K).to(tl.float32)
            if R.NORM:
                if tiles == 1:
                    b_norm = tl.sum(b_q * b_dq, axis=1)
                b_dq = norm_bwd(b_dq, b_q, b_norm, tl.load(row + planes.Q_SCALE * S.BT) / scale)
            store_rows(out.dq + (start * H + i_h) * S.K, b_dq, i, H * S.K, m_i, o_k, S.K)


@triton.jit
def dk_head_kernel(x, out, chunks, tokens, S: tl.constexpr, R: tl.constexpr):
    """dk and dp, as `dq_head_kernel` forms dq. out.dgc: the part of k and p.

    With groups, each phase is a branch that is always taken, or follows one, and loads k again. If
    it shared a block with the next phase, the compiler would add the sums over the group late and
    keep their terms until then. A single head has registers to spare."""
    H: tl.constexpr = S.HV // S.G
    tiles: tl.constexpr = (S.K + S.BK - 1) // S.BK
    i_k = tl.program_id(0) % tiles
    i_c, i_h = (tl.program_id(0) // tiles).to(tl.int64), tl.program_id(1).to(tl.int64)
    n_rows = tl.load(chunks.rows + i_c)
    start = tl.load(chunks.start + i_c).to(tl.int64)
    NC = (tl.num_programs(0) // tiles).to(tl.int64)
    operand = x.h.dtype.element_ty
    k0 = i_k * S.BK
    o_t, o_kt, o_vt = tl.arange(0, S.BT), tl.arange(0, S.BK), tl.arange(0, S.BV)
    o_k = k0 + o_kt
    q = rows_from(x.q, start, i_h)
    k = rows_from(x.k, start, i_h)
    r = k
    if S.REMOVAL == "p":
        r = rows_from(x.p, start, i_h)
    b_nk = tl.zeros([S.BT], tl.float32)  # k dk and p dp summed over channels
    b_np = tl.zeros([S.BT], tl.float32)
    b_dk = tl.zeros([S.BT, S.BK], tl.float32)
    b_dp = tl.zeros([S.BT, S.BK], tl.float32)
    for j in tl.range(S.G, num_stages=1):
        i = opaque(tl.arange(0, S.BT), n_rows + j, S.BT, S.G)
        m_i = i < n_rows
        i_hv = i_h * S.G + j
        i_ch = i_c * S.HV + i_hv
        row = x.rows + i_ch * planes.HEADWISE_PLANES * S.BT + i
        row_grad = out.row_grads + i_ch * planes.GRAD_PLANES * S.BT + i
        place = (i_k * NC * S.HV + i_ch) * S.BT + i
        b_dgc = tl.zeros([S.BT], tl.float32)
        b_shift = tl.zeros([S.BT], tl.float32)
        b_dr = tl.zeros([S.BT, S.BK], tl.float32)
        b_c = tl.zeros([S.BT, S.BK], tl.float32)
        b_k = load_rows(k, i, m_i, o_k, S.K)
        if S.G == 1 or n_rows > 0:  # column factor k and row factor beta r in the states
            e_k, end = tl.load(row + planes.K_FACTOR * S.BT), tl.load(x.decay + i_ch * S.K)
            for i_v in tl.range((S.V + S.BV - 1) // S.BV, num_stages=S.NS):
                v0 = i_v * S.BV
                b_dh = load_part(x.dh + i_ch * S.K * S.V, k0, v0, o_kt, o_vt, S.K, S.V)
                b_vn = load_part(x.v_new + i_ch * S.BT * S.V, 0, v0, o_t, o_vt, S.BT, S.V)
                b_c = dot(b_vn, tl.trans(b_dh), S.PRECISION, acc=b_c)
            b_dl = row_sums(
                x.h + i_ch * S.K * S.V, x.dh + i_ch * S.K * S.V, k0, o_kt, o_vt, S.K, S.V
            )
            b_c *= e_k[:, None]
            # summed by itself, because it cancels with its share in the last row
            b_dgc = -tl.sum(b_k.to(tl.float32) * b_c, axis=1)
            last = tl.sum(b_dl, axis=0) * end - tl.sum(b_dgc, axis=0)
            b_dgc += tl.where(i == S.BT - 1, last, 0.0)
            b_dk = b_c if S.G == 1 else b_dk + b_c
            b_c = tl.zeros([S.BT, S.BK], tl.float32)
            if S.REMOVAL != "none":
                e_r = tl.load(row + planes.R_FACTOR * S.BT)
                for i_v in tl.range((S.V + S.BV - 1) // S.BV, num_stages=S.NS):
                    v0 = i_v * S.BV
                    b_h = load_part(x.h + i_ch * S.K * S.V, k0, v0, o_kt, o_vt, S.K, S.V)
                    b_y = load_part(x.y + i_ch * S.BT * S.V, 0, v0, o_t, o_vt, S.BT, S.V)
                    b_dr = dot(b_y, tl.trans(b_h), S.PRECISION, acc=b_dr)
                b_dr *= -e_r[:, None]
        if S.REMOVAL != "none" and (S.G == 1 or n_rows <= S.BT):  # beta r in the scores
            if S.G > 1:
                tl.debug_barrier()
                i = opaque(i, n_rows, S.BT, 1)
                m_i = i < n_rows
                row = x.rows + i_ch * planes.HEADWISE_PLANES * S.BT + i
                b_k = load_rows(k, i, m_i, o_k, S.K)
            if operand == tl.float32:  # before beta r is loaded, to free registers
                b_w = load_scores(out, i_ch, 1, o_t, S)
                b_x = dot(b_w, b_k, S.PRECISION)
                tl.debug_barrier()
            b_beta = tl.load(row)
            b_r = load_rows(r, i, m_i, o_k, S.K)
            b_rb = (b_beta[:, None] * b_r.to(tl.float32)).to(operand)
            if operand != tl.float32:
                b_w = load_scores(out, i_ch, 1, o_t, S)
            b_db = tl.sum(b_r.to(tl.float32) * b_dr, axis=1)
            b_shift = b_beta * b_db
            if operand != tl.float32:
                b_x = dot(b_w, b_k, S.PRECISION)
            b_shift += tl.sum(b_rb.to(tl.float32) * b_x, axis=1)
            b_db += tl.sum(b_r.to(tl.float32) * b_x, axis=1)
            b_dgc += b_shift
            plane = (1 + i_k).to(tl.int64) * tokens * S.HV
            tl.store(out.shares + plane + (start + i) * S.HV + i_hv, b_db, mask=m_i)
            b_dr = b_beta[:, None] * (b_dr + b_x)
            if S.REMOVAL == "k":
                b_dk += b_dr
            else:
                b_dp = b_dr if S.G == 1 else b_dp + b_dr
            b_c = dot(tl.trans(b_w), b_rb, S.PRECISION)
        if S.G > 1:
            tl.debug_barrier()
            i = opaque(i, n_rows, S.BT, 2)
            m_i = i < n_rows
            row = x.rows + i_ch * planes.HEADWISE_PLANES * S.BT + i
            row_grad = out.row_grads + i_ch * planes.GRAD_PLANES * S.BT + i
            place = (i_k * NC * S.HV + i_ch) * S.BT + i
            b_k = load_rows(k, i, m_i, o_k, S.K)
        # q in the scores
        b_w = load_scores(out, i_ch, 0, o_t, S)
        b_q = load_rows(q, i, m_i, o_k, S.K)
        b_c = dot(tl.trans(b_w), b_q, S.PRECISION, acc=b_c)
        b_dgc -= tl.sum(b_k.to(tl.float32) * b_c, axis=1)
        tl.store(out.dgc + place, b_dgc)
        b_dk += b_c
        b_dk += tl.load(row_grad)[:, None] * b_q.to(tl.float32)
        if R.NORM:
            b_nk += tl.load(row_grad + planes.K_DK * S.BT)
        if j == S.G - 1:
            if R.NORM:
                b_dk = norm_bwd(b_dk, b_k, b_nk, tl.load(row + planes.K_SCALE * S.BT))
            store_rows(out.dk + (start * H + i_h) * S.K, b_dk, i, H * S.K, m_i, o_k, S.K)
        if S.REMOVAL == "p":
            tl.store(out.shift + place, b_shift)
            if R.NORM:
                b_vy = tl.load(out.shares + (start + i) * S.HV + i_hv, mask=m_i, other=0.0)
                b_np += tl.load(row_grad + planes.K_DK * S.BT) - tl.load(row) * b_vy
            if j == S.G - 1:
                if R.NORM:
                    b_r = load_rows(r, i, m_i, o_k, S.K)
                    b_dp = norm_bwd(b_dp, b_r, b_np, tl.load(row + planes.R_SCALE * S.BT))
                store_rows(out.dp + (start * H + i_h) * S.K, b_dp, i, H * S.K, m_i, o_k, S.K)
