"""The backward of scores and values of a chunk, and of beta, with one decay a channel."""

import torch
import triton
import triton.language as tl
from torch import Tensor

from fla_cp.kernels.triton.device import planes
from fla_cp.kernels.triton.device.blocks import store_block
from fla_cp.kernels.triton.device.gates import away_from_zero, sigmoid
from fla_cp.kernels.triton.device.score_grads import score_grads
from fla_cp.kernels.triton.launch import cdiv, launch
from fla_cp.rule import DeltaRule


@triton.jit
def scores_bwd_kernel(x, out, chunks, S: tl.constexpr, R: tl.constexpr):
    """x: `Saved`; out: `Grads`; chunks: `ChunkTable`. Below the diagonal out.scores is dAqk, and
    dAkk of the rows k before beta; for the path of any gate it is mirrored above the diagonal."""
    i_c, i_hv = tl.program_id(0).to(tl.int64), tl.program_id(1).to(tl.int64)
    o_i = tl.arange(0, S.BT)
    m_i = o_i < tl.load(chunks.rows + i_c)
    start = tl.load(chunks.start + i_c).to(tl.int64)
    i_ch = i_c * S.HV + i_hv
    dscores = out.scores + i_ch * 2 * S.BT * S.BT
    row_grads = out.row_grads + i_ch * planes.GRAD_PLANES * S.BT
    b_beta = tl.load(x.rows + i_ch * planes.CHANNELWISE_PLANES * S.BT + o_i)
    b_ds, b_da, b_dbeta, b_nq, b_nk = score_grads(
        x, out, start, i_hv, i_ch, o_i, m_i, b_beta, S, R.NORM, R.NORM, 1
    )
    below = o_i[:, None] > o_i[None, :]
    b_diagonal = tl.sum(tl.where(o_i[:, None] == o_i[None, :], b_ds, 0.0), axis=1)
    tl.store(row_grads + o_i, b_diagonal)
    b_ds = tl.where(below, b_ds, 0.0)
    if not R.SAFE:
        mirrored = 1.0
        if R.BY_CHUNK:
            mirrored = tl.load(x.steep + i_ch).to(tl.float32)
        b_ds += tl.trans(b_ds) * mirrored
    store_block(dscores, b_ds, o_i, o_i, S.BT, S.BT)
    if S.REMOVAL != "none":
        b_da = tl.where(below, -b_da, 0.0)
        if not R.SAFE:
            b_da += tl.trans(b_da) * mirrored
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
    TIMES_BETA: tl.constexpr,
    B: tl.constexpr,
):
    """dbeta [T, HV], n elements, from the sum of SHARES of it [SHARES, T, HV], fp32. TIMES_BETA:
    the shares are those of beta dbeta."""
    i = tl.program_id(0).to(tl.int64) * B + tl.arange(0, B)
    m = i < n
    shares += i
    b_db = tl.zeros([B], tl.float32)
    for _ in range(SHARES):
        b_db += tl.load(shares, mask=m, other=0.0)
        shares += n
    if BETA_SIGMOID or TIMES_BETA:
        b_beta = tl.load(beta + i // HV * beta_t + i % HV, mask=m, other=0.0).to(tl.float32)
    if BETA_SIGMOID:
        b_sigmoid = sigmoid(b_beta)
        b_beta = beta_factor * b_sigmoid
        b_db *= b_beta * (1 - b_sigmoid)
    if TIMES_BETA:
        b_db /= away_from_zero(b_beta, m)
    tl.store(dbeta + i, b_db.to(dbeta.dtype.element_ty), mask=m)


def beta_bwd(rule: DeltaRule, beta: Tensor, shares: Tensor, *, times_beta: bool) -> Tensor:
    """dbeta [T, HV], from the sum of `shares` [*, T', HV], see `empty_shares`: the rows after the
    first T have no meaning. times_beta: the shares are those of beta dbeta."""
    T, rows = len(beta), shares.shape[1]
    if rows > T:  # so that the kernel may read all rows
        beta = torch.nn.functional.pad(beta, (0, 0, 0, rows - T))
    dbeta = torch.empty(beta.shape, dtype=beta.dtype, device=beta.device)
    n = dbeta.numel()
    if n:
        given, sigmoid = (beta.stride(0), rule.beta_factor or 1.0), rule.beta_factor is not None
        options = {"HV": beta.shape[1], "SHARES": len(shares), "BETA_SIGMOID": sigmoid}
        options |= {"TIMES_BETA": times_beta, "B": 1024}
        launch(beta_bwd_kernel, (cdiv(n, 1024),), beta, shares, dbeta, n, *given, **options)
    return dbeta[:T]
