"""Backward of scores and values of a chunk, and of beta, with one decay a channel."""

import torch
import triton
import triton.language as tl
from torch import Tensor

from fla_cp.kernels.triton.device.blocks import dot, load_block, load_rows, store_block, store_rows
from fla_cp.kernels.triton.device.gates import sigmoid
from fla_cp.kernels.triton.device.planes import GRAD_PLANES
from fla_cp.kernels.triton.launch import cdiv, launch
from fla_cp.rule import DeltaRule


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
    row_grads,
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
    row_grads [NC, HV, 3, C], fp32: the diagonal of dAqk; and q dq and k dk of each row,
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
    # in a pipeline loads would serve sums as well as products: see `overwritten` in tests/aot/
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
    tl.store(row_grads + i_ch * GRAD_PLANES * BT + o_i, b_diagonal)
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
        tl.store(row_grads + (i_ch * 3 + 1) * BT + o_i, b_nq)
        tl.store(row_grads + (i_ch * 3 + 2) * BT + o_i, 2.0 * b_nk - b_beta * b_dbeta)


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


def beta_bwd(rule: DeltaRule, beta: Tensor, shares: Tensor) -> Tensor:
    dbeta = torch.empty(beta.shape, dtype=beta.dtype, device=beta.device)
    if dbeta.numel():
        launch(
            beta_bwd_kernel,
            (cdiv(dbeta.numel(), 1024),),
            beta,
            shares,
            dbeta,
            dbeta.numel(),
            beta.stride(0),
            rule.beta_factor or 1.0,
            HV=beta.shape[1],
            SHARES=len(shares),
            BETA_SIGMOID=rule.beta_factor is not None,
            B=1024,
        )
    return dbeta
