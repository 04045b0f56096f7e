"""The gradients of everything local to a chunk on the path of a safe gate; see
intra_channelwise_bwd.py.

|gc_i - gc_m| is at most 16 * 5 / ln 2 = 116 for the middle row m of row i's half, 32 rows of a
chunk of 64; a shorter chunk is all first half. Therefore one row factor x = q exp(gc_i - n) and one
column factor y = k exp(n - gc_j) serve all products, where n is gc_m rounded to a whole power of
two: n0 in the first half of the rows and n1 in the second. A factor with another reference differs
by a power of two, which is exact in bf16: exp(n1 - n0) for pairs of a row in the second half and a
column in the first, exp(n) x for the states that enter, and exp(gc_C - n) y for the states that
leave. All gradients of a factor are summed in one accumulator and multiplied by it once. What a
pair adds to the gradient of gc at its row it subtracts at its column, with the same factors."""

import triton
import triton.language as tl

from fla_cp.kernels.triton.device import planes
from fla_cp.kernels.triton.device.blocks import (
    decay_exp,
    dot,
    load_rows,
    parts,
    row_sums,
    store_rows,
    sum_steps,
)
from fla_cp.kernels.triton.device.channelwise_decay import before, load_steps, shifted, whole
from fla_cp.kernels.triton.device.channelwise_grads import (
    load_scores,
    open_chunk,
    state_products,
    store_gate_grads,
)
from fla_cp.kernels.triton.device.decay_sums import UP_TO
from fla_cp.kernels.triton.device.gates import LOG2E
from fla_cp.kernels.triton.device.opaque import keep_loads, opaque, prefetch_lines


@triton.jit
def safe_bwd_kernel(x, gate, sums, out, chunks, tokens, scale, S: tl.constexpr, R: tl.constexpr):
    """Takes the arguments of `intra_bwd_kernel`."""
    tiles: tl.constexpr = (S.K + S.BK - 1) // S.BK
    i_k = tl.program_id(0) % tiles  # fastest, so that the tiles of a chunk share what they load
    i_c, i_hv = (tl.program_id(0) // tiles).to(tl.int64), tl.program_id(1).to(tl.int64)
    here = open_chunk(x, out, chunks, i_c, i_hv, S, planes.CHANNELWISE_PLANES)
    i = tl.arange(0, S.BT)
    m_i = i < here.n_rows
    REMOVES: tl.constexpr = S.REMOVAL != "none"
    OWN: tl.constexpr = S.REMOVAL == "p"
    operand = x.v_new.dtype.element_ty
    o_k = i_k * S.BK + tl.arange(0, S.BK)
    m_k = o_k < S.K
    ANCHORS: tl.constexpr = S.BT // 16
    first_anchor = x.anchors + here.i_ch * ANCHORS * S.K
    anchors = first_anchor + o_k

    UNIT: tl.constexpr = 1.0 if R.EXP2 else 1.0 / LOG2E

    # Nearly all loads come first: to wait for memory again costs more than registers do.
    b_g = load_steps(gate, here.start, i_hv, i, m_i, o_k, S, R)
    b_k = load_rows(here.k, i, m_i, o_k, S.K)
    b_q = load_rows(here.q, i, m_i, o_k, S.K)
    b_ds = load_scores(here.scores, i)
    if S.NS > 1:  # tiles with NS of 1 have no registers to spare
        prefetched = prefetch_lines(here.rows, 3 * S.BT, 32)
        prefetched += prefetch_lines(here.row_grads, 3 * S.BT, 32)
        near = tl.arange(0, 32) * 8
        place = near // S.BK * S.K + i_k * S.BK + near % S.BK
        m_n = (near < ANCHORS * S.BK) & (i_k * S.BK + near % S.BK < S.K)
        prefetched += tl.load(first_anchor + place, mask=m_n, other=0.0)
    b_dl = row_sums(here.h, here.dh, i_k * S.BK, tl.arange(0, S.BK), tl.arange(0, 32), S.K, S.V)
    b_dq, b_dr, b_dc, _ = state_products(here, i, m_i, o_k, S, False)
    if S.NS > 1:
        keep_loads(here.rows, prefetched, here.n_rows, S.BT)
    b_gc = sum_steps(sums, UP_TO, i, parts(b_g, operand), S.PRECISION)
    n0 = whole(tl.load(anchors, mask=m_k, other=0.0), UNIT)[None, :]
    n1 = n0
    if S.BT > 32:
        n1 = whole(tl.load(anchors + 2 * S.K, mask=m_k, other=0.0), UNIT)[None, :]
    end = tl.load(anchors + (ANCHORS - 1) * S.K, mask=m_k, other=0.0)[None, :]
    first = (i < 32)[:, None]
    d = b_gc - tl.where(first, n0, n1) * UNIT
    e = tl.where(first, tl.exp2(n0), tl.exp2(n1))
    b_dq *= e
    b_dr *= -e
    b_dc *= tl.where(first, decay_exp(end - n0 * UNIT, R.EXP2), decay_exp(end - n1 * UNIT, R.EXP2))
    b_k = b_k.to(tl.float32) * tl.load(here.rows + planes.K_SCALE * S.BT + i)[:, None]
    shift = n1 - n0

    second = (i >= 32)[:, None]
    b_y = b_k * decay_exp(-d, R.EXP2)
    near, far = b_y.to(operand), shifted(b_y, shift, first).to(operand)
    last = tl.load(anchors + (ANCHORS - 1) * S.K, mask=m_k, other=0.0)
    last = decay_exp(last, R.EXP2)
    b_dl = b_dl * last + tl.sum(near.to(tl.float32) * b_dc, axis=0)

    # row factor q
    b_r = dot(b_ds, near, S.PRECISION, acc=b_dq)
    b_dq = dot(b_ds, far, S.PRECISION, acc=b_dq)
    b_dq = tl.where(first, b_r, b_dq)
    b_q = b_q.to(tl.float32) * tl.load(here.rows + planes.Q_SCALE * S.BT + i)[:, None]
    f = decay_exp(d, R.EXP2)
    b_x = b_q * f
    row = b_x.to(operand)
    b_dgc = row.to(tl.float32) * b_dq + tl.where((i == S.BT - 1)[:, None], b_dl[None, :], 0.0)
    b_dq = b_dq * f + tl.load(here.row_grads + i)[:, None] * b_k  # and the diagonal
    if R.NORM:
        b_dq -= b_q * (tl.load(here.row_grads + planes.Q_DQ * S.BT + i) / (scale * scale))[:, None]
    at = (here.start * S.HV + i_hv) * S.K
    if S.NS > 1:
        at = (here.start * S.HV + opaque(i_hv, here.n_rows, S.BT, 3)) * S.K
    b_dq *= tl.load(here.rows + planes.Q_SCALE * S.BT + i)[:, None]
    store_rows(out.dq + at, b_dq, i, S.HV * S.K, m_i, o_k, S.K)
    b_dk = tl.load(here.row_grads + i)[:, None] * b_q
    b_ds = tl.trans(b_ds)
    b_c = dot(b_ds, shifted(b_x, shift, second).to(operand), S.PRECISION, acc=b_dc)
    b_dc = dot(b_ds, row, S.PRECISION, acc=b_dc)

    b_shift = None
    # row factor beta k, or beta p; the compiler cannot tell that d is the same, so it forms
    # exponentials again
    d += here.n_rows // (S.BT + 1)
    f = decay_exp(d, R.EXP2)
    if REMOVES:
        tl.debug_barrier()  # loads after it are not moved up, which frees registers
        i, at = opaque(i, here.n_rows, S.BT, 2), opaque(at, here.n_rows, S.BT, 2)
        if S.NS == 1:
            o_k = opaque(o_k, here.n_rows, S.BT, 2)
            i_k, i_c = opaque(i_k, here.n_rows, S.BT, 2), opaque(i_c, here.n_rows, S.BT, 2)
            i_hv = opaque(i_hv, here.n_rows, S.BT, 2)
        m_i = i < here.n_rows
        b_da = load_scores(here.scores + S.BT * S.BT, i)
        b_r = dot(b_da, near, S.PRECISION, acc=b_dr)
        b_dr = dot(b_da, far, S.PRECISION, acc=b_dr)
        b_dr = tl.where(first, b_r, b_dr)
        b_beta = tl.load(here.rows + i)[:, None]
        b_p = b_k
        if OWN:
            b_p = load_rows(here.p, i, m_i, o_k, S.K).to(tl.float32)
            b_g = load_steps(gate, here.start, i_hv, i, m_i, o_k, S, R)
            f = decay_exp(before(d, parts(b_g, operand)), R.EXP2)
        b_x = b_beta * (b_p * f)
        row = b_x.to(operand)
        b_dgc += row.to(tl.float32) * b_dr
        if OWN:
            b_shift = row.to(tl.float32) * b_dr
        b_dr *= f
        share = out.shares + (i_k + 1).to(tl.int64) * tokens * S.HV + here.start * S.HV + i_hv
        tl.store(share + i * S.HV, tl.sum(b_p * b_dr, axis=1), mask=m_i)
        if OWN:
            store_rows(out.dp + at, b_dr * b_beta, i, S.HV * S.K, m_i, o_k, S.K)
        else:
            b_dk += b_dr * b_beta
        b_da = tl.trans(b_da)
        b_c = dot(b_da, shifted(b_x, shift, second).to(operand), S.PRECISION, acc=b_c)
        b_dc = dot(b_da, row, S.PRECISION, acc=b_dc)

    # column factor k
    b_dc = tl.where(first, b_c, b_dc)
    b_dgc -= (b_k * decay_exp(-d, R.EXP2)).to(operand).to(tl.float32) * b_dc
    b_dk += b_dc * decay_exp(-d, R.EXP2)
    if R.NORM:
        b_dk -= b_k * tl.load(here.row_grads + planes.K_DK * S.BT + i)[:, None]
    b_dk *= tl.load(here.rows + planes.K_SCALE * S.BT + i)[:, None]
    store_rows(out.dk + at, b_dk, i, S.HV * S.K, m_i, o_k, S.K)
    store_gate_grads(b_dgc, b_shift, x, gate, sums, out, chunks, i_c, i_hv, i_k, S, R, 1)
