"""The gradients of scores and values of a chunk, without decays and scales of the scores."""

import triton
import triton.language as tl

from fla_cp.kernels.triton.device.blocks import dot, load_block, load_rows, rows_from, store_rows
from fla_cp.kernels.triton.device.bundles import Rows


@triton.jit
def load_scores(out, i_ch, n, i, S: tl.constexpr):
    """Tile n of out.scores of a chunk: 0 of Aqk, 1 of Akk."""
    return load_block(out.scores + (i_ch * 2 + n) * S.BT * S.BT, i, i, S.BT, S.BT)


@triton.jit
def score_grads(
    x,
    out,
    start,
    i_hv,
    i_ch,
    i,
    m_i,
    b_beta,
    S: tl.constexpr,
    QNORM: tl.constexpr,
    KNORM: tl.constexpr,
    STAGES: tl.constexpr,
):
    """do v_new^T and y v_new^T [BT, BT] (the second only where the rule removes something). Then,
    for each row and summed over values, v y; with QNORM do o; with KNORM v_new y. Stores dv = beta
    y.

    STAGES is 1 in half precision: only products may read what a pipelined loop loads (`overwritten`
    in tests/aot/). Products of fp32 are waited for."""
    v, do = rows_from(x.v, start, i_hv), rows_from(x.do, start, i_hv)
    at = (start * S.HV + i_hv) * S.V
    b_ds = tl.zeros([S.BT, S.BT], tl.float32)
    b_da = tl.zeros([S.BT, S.BT], tl.float32)
    b_vy = tl.zeros_like(b_beta)
    b_nq = tl.zeros_like(b_beta)
    b_nk = tl.zeros_like(b_beta)
    for i_v in tl.range((S.V + S.BV - 1) // S.BV, num_stages=STAGES):
        o_v = i_v * S.BV + tl.arange(0, S.BV)
        b_do = load_rows(do, i, m_i, o_v, S.V).to(x.v_new.dtype.element_ty)
        b_vn = load_block(x.v_new + i_ch * S.BT * S.V, i, o_v, S.BT, S.V)
        b_y = load_block(x.y + i_ch * S.BT * S.V, i, o_v, S.BT, S.V)
        b_ds = dot(b_do, tl.trans(b_vn), S.PRECISION, acc=b_ds)
        if S.REMOVAL != "none":
            b_da = dot(b_y, tl.trans(b_vn), S.PRECISION, acc=b_da)
        b_v = load_rows(v, i, m_i, o_v, S.V).to(tl.float32)
        b_y = b_y.to(tl.float32)
        b_vy += tl.sum(b_v * b_y, axis=1)
        if QNORM:
            b_o = load_rows(Rows(x.o + at, S.HV * S.V, 0), i, m_i, o_v, S.V).to(tl.float32)
            b_nq += tl.sum(b_do.to(tl.float32) * b_o, axis=1)
        if KNORM:
            b_nk += tl.sum(b_vn.to(tl.float32) * b_y, axis=1)
        store_rows(out.dv + at, b_y * b_beta[:, None], i, S.HV * S.V, m_i, o_v, S.V)
    return b_ds, b_da, b_vy, b_nq, b_nk
