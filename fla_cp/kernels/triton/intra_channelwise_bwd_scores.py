"""Backward of scores and values of a chunk, and of beta, with one decay a channel."""

import torch
import triton
import triton.language as tl
from torch import Tensor

from fla_cp.kernels.triton.device import planes
from fla_cp.kernels.triton.device.blocks import (
    dot,
    load_block,
    load_rows,
    rows_from,
    store_block,
    store_rows,
)
from fla_cp.kernels.triton.device.bundles import Rows
from fla_cp.kernels.triton.device.gates import sigmoid
from fla_cp.kernels.triton.launch import cdiv, launch
from fla_cp.rule import DeltaRule


@triton.jit
def scores_bwd_kernel(x, out, chunks, S: tl.constexpr, R: tl.constexpr):
    """x: `Saved`; out: `Grads`; chunks: `ChunkTable`. Of out.scores, below the
    diagonal: dAqk, and dAkk of the rows k before beta; without a safe gate mirrored above it."""
    i_c, i_hv = tl.program_id(0).to(tl.int64), tl.program_id(1).to(tl.int64)
    o_i = tl.arange(0, S.BT)
    m_i = o_i < tl.load(chunks.rows + i_c)
    start = tl.load(chunks.start + i_c).to(tl.int64)
    i_ch = i_c * S.HV + i_hv
    v, do = rows_from(x.v, start, i_hv), rows_from(x.do, start, i_hv)
    at = (start * S.HV + i_hv) * S.V
    dscores = out.scores + i_ch * 2 * S.BT * S.BT
    row_grads = out.row_grads + i_ch * planes.GRAD_PLANES * S.BT
    operand = x.v_new.dtype.element_ty
    b_beta = tl.load(x.rows + i_ch * planes.CHANNELWISE_PLANES * S.BT + o_i)
    b_ds = tl.zeros([S.BT, S.BT], tl.float32)
    b_da = tl.zeros([S.BT, S.BT], tl.float32)
    b_dbeta = tl.zeros_like(b_beta)
    b_nq = tl.zeros_like(b_beta)
    b_nk = tl.zeros_like(b_beta)
    # in a pipeline loads would serve sums as well as products: see `overwritten` in tests/aot/
    for i_v in tl.range((S.V + S.BV - 1) // S.BV, num_stages=1):
        o_v = i_v * S.BV + tl.arange(0, S.BV)
        b_do = load_rows(do, o_i, m_i, o_v, S.V).to(operand)
        b_vn = load_block(x.v_new + i_ch * S.BT * S.V, o_i, o_v, S.BT, S.V)
        b_y = load_block(x.y + i_ch * S.BT * S.V, o_i, o_v, S.BT, S.V)
        b_ds = dot(b_do, tl.trans(b_vn), S.PRECISION, acc=b_ds)
        if S.REMOVAL != "none":
            b_da = dot(b_y, tl.trans(b_vn), S.PRECISION, acc=b_da)
        b_v = load_rows(v, o_i, m_i, o_v, S.V).to(tl.float32)
        b_y = b_y.to(tl.float32)
        b_dbeta += tl.sum(b_v * b_y, axis=1)
        if R.NORM:
            b_o = load_rows(Rows(x.o + at, S.HV * S.V, 0), o_i, m_i, o_v, S.V).to(tl.float32)
            b_nq += tl.sum(b_do.to(tl.float32) * b_o, axis=1)
            b_nk += tl.sum(b_vn.to(tl.float32) * b_y, axis=1)
        store_rows(out.dv + at, b_y * b_beta[:, None], o_i, S.HV * S.V, m_i, o_v, S.V)
    below = o_i[:, None] > o_i[None, :]
    b_diagonal = tl.sum(tl.where(o_i[:, None] == o_i[None, :], b_ds, 0.0), axis=1)
    tl.store(row_grads + o_i, b_diagonal)
    b_ds = tl.where(below, b_ds, 0.0)
    if not R.SAFE:
        b_ds += tl.trans(b_ds)
    store_block(dscores, b_ds, o_i, o_i, S.BT, S.BT)
    if S.REMOVAL != "none":
        b_da = tl.where(below, -b_da, 0.0)
        if not R.SAFE:
            b_da += tl.trans(b_da)
        store_block(dscores + S.BT * S.BT, b_da, o_i, o_i, S.BT, S.BT)
    tl.store(out.shares + (start + o_i) * S.HV + i_hv, b_dbeta, mask=m_i)
    if R.NORM:
        tl.store(row_grads + planes.Q_DQ * S.BT + o_i, b_nq)
        tl.store(row_grads + planes.K_DK * S.BT + o_i, 2.0 * b_nk - b_beta * b_dbeta)


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
    n = dbeta.numel()
    if n:
        given, sigmoid = (beta.stride(0), rule.beta_factor or 1.0), rule.beta_factor is not None
        options = {"HV": beta.shape[1], "SHARES": len(shares), "BETA_SIGMOID": sigmoid, "B": 1024}
        launch(beta_bwd_kernel, (cdiv(n, 1024),), beta, shares, dbeta, n, *given, **options)
    return dbeta
