"""The backward of what is local to a chunk with one decay a head: scores, gate, beta, launches."""

import functools
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from fla_cp.kernels.backend import ChunkStates
from fla_cp.kernels.torch.intra import Inputs
from fla_cp.kernels.triton.device import planes
from fla_cp.kernels.triton.device.blocks import store_block
from fla_cp.kernels.triton.device.bundles import Grads, beta, gate, rule_options, shape
from fla_cp.kernels.triton.device.gates import gate_slope, rate_slope, sigmoid
from fla_cp.kernels.triton.device.headwise_decay import decays, load_head_gate, running_sums
from fla_cp.kernels.triton.device.score_grads import score_grads
from fla_cp.kernels.triton.generations import choose, kernels_of
from fla_cp.kernels.triton.intra_headwise import heads_of_a_program
from fla_cp.kernels.triton.intra_headwise_bwd_products import (
    dk_head_kernel,
    dq_head_kernel,
    dqk_head_kernel,
)
from fla_cp.kernels.triton.launch import cdiv, launch
from fla_cp.kernels.triton.operands import (
    ALIGNED,
    DENSE,
    Chunks,
    ScanGrads,
    empty_shares,
    saved,
    tables,
)
from fla_cp.kernels.triton.rate_grads import rate_grads
from fla_cp.kernels.triton.scan_bwd import scan_bwd_tile
from fla_cp.kernels.triton.tile_table import WHOLE, in_chunks_of
from fla_cp.partition.packing import Packing


@triton.jit
def scores_head_bwd_kernel(
    x, gate, out, chunks, S: tl.constexpr, R: tl.constexpr, QNORM: tl.constexpr
):
    """x: `Saved`; gate: `Gate`; out: `Grads`; chunks: `ChunkTable`. Below the diagonal out.scores
    is what multiplies the inputs k in the gradients of q and of beta r. out.row_grads: the
    diagonal's factor of k; with QNORM q dq and with NORM k dk of each row, summed over channels, as
    `scores_bwd_kernel` forms them (with p those of k alone)."""
    i_c, i_hv = tl.program_id(0).to(tl.int64), tl.program_id(1).to(tl.int64)
    i = tl.arange(0, S.BT)
    m_i = i < tl.load(chunks.rows + i_c)
    start = tl.load(chunks.start + i_c).to(tl.int64)
    i_ch = i_c * S.HV + i_hv
    rows = x.rows + i_ch * planes.HEADWISE_PLANES * S.BT + i
    row_grads = out.row_grads + i_ch * planes.GRAD_PLANES * S.BT + i
    weights = out.scores + i_ch * 2 * S.BT * S.BT
    operand = x.v_new.dtype.element_ty
    b_beta = tl.load(rows)
    STAGES: tl.constexpr = None if operand == tl.float32 else 1
    b_ds, b_da, b_vy, b_nq, b_nk = score_grads(
        x, out, start, i_hv, i_ch, i, m_i, b_beta, S, QNORM, R.NORM, STAGES
    )
    _raw, _rate, b_g = load_head_gate(gate, start, i_hv, i, m_i, R.GATE, R.EXP2)
    gc = running_sums(b_g, operand)
    q_scale, k_scale = tl.load(rows + planes.Q_SCALE * S.BT), tl.load(rows + planes.K_SCALE * S.BT)
    diagonal = tl.sum(tl.where(i[:, None] == i[None, :], b_ds, 0.0), axis=1)
    tl.store(row_grads, diagonal * q_scale * k_scale)
    b_ds *= decays(gc, gc, i, R.EXP2)
    store_block(weights, b_ds * q_scale[:, None] * k_scale[None, :], i, i, S.BT, S.BT)
    if S.REMOVAL != "none":
        before = running_sums(b_g, operand, True) if S.REMOVAL == "p" else gc
        b_da *= decays(before, gc, i, R.EXP2)
        b_da *= -tl.load(rows + planes.R_SCALE * S.BT)[:, None] * k_scale[None, :]
        store_block(weights + S.BT * S.BT, b_da, i, i, S.BT, S.BT)
        tl.store(out.shares + (start + i) * S.HV + i_hv, b_vy, mask=m_i)
    if QNORM:
        tl.store(row_grads + planes.Q_DQ * S.BT, b_nq)
    if R.NORM:
        if S.REMOVAL != "p":
            b_nk = 2.0 * b_nk - b_beta * b_vy
        tl.store(row_grads + planes.K_DK * S.BT, b_nk)


@triton.jit
def head_gate_bwd_kernel(
    gate,
    beta,
    out,
    chunks,
    tokens,
    S: tl.constexpr,
    R: tl.constexpr,
    SHARES: tl.constexpr,
    TILES: tl.constexpr,
    BH: tl.constexpr,
):
    """gate: `Gate`; beta: `Beta`; out: `Grads`; chunks: `ChunkTable`. Forms dg from the SHARES of
    dgc and the TILES of shift, and dbeta from v's share and those of the key tiles. A program has
    BH heads of a chunk, because neighbouring heads are neighbours in the memory of g and beta."""
    i_c = tl.program_id(0).to(tl.int64)
    i = tl.arange(0, S.BT)[:, None]
    m_i = i < tl.load(chunks.rows + i_c)
    start = tl.load(chunks.start + i_c).to(tl.int64)
    o_h = tl.program_id(1) * BH + tl.arange(0, BH)
    i_hv = o_h[None, :]
    i_ch = i_c * S.HV + i_hv
    NC = tl.num_programs(0).to(tl.int64)
    b_dgc = tl.zeros([S.BT, BH], tl.float32)
    for n in range(SHARES):
        b_dgc += tl.load(out.dgc + (n * NC * S.HV + i_ch) * S.BT + i)
    b_dg = tl.cumsum(b_dgc, axis=0, reverse=True)
    if out.shift is not None:
        for n in range(TILES):
            b_dg -= tl.load(out.shift + (n * NC * S.HV + i_ch) * S.BT + i)
    b_dg = tl.where(m_i, b_dg, 0.0)
    raw, rate, _ = load_head_gate(gate, start, i_hv, i, m_i, R.GATE, False)
    b_draw = b_dg * gate_slope(raw, rate, gate.bound, R.GATE)
    at = (start + i) * S.HV + i_hv
    tl.store(out.dg + at, b_draw.to(out.dg.dtype.element_ty), mask=m_i)
    if out.dA_log is not None:
        b_dA = rate_slope(raw, rate, gate.bound, b_dg, b_draw, R.GATE)
        tl.store(out.dA_log + i_c * S.HV + o_h, tl.sum(b_dA, axis=0))
    if out.ddt_bias is not None:
        tl.store(out.ddt_bias + i_c * S.HV + o_h, tl.sum(b_draw, axis=0))
    if beta.ptr is not None:
        b_db = tl.zeros([S.BT, BH], tl.float32)
        for n in range(1 + TILES):
            b_db += tl.load(out.shares + n * (S.HV * tokens.to(tl.int64)) + at, mask=m_i, other=0.0)
        if R.BETA_SIGMOID:
            p_beta = beta.ptr + (start + i) * beta.row + i_hv
            b_beta = sigmoid(tl.load(p_beta, mask=m_i, other=0.0).to(tl.float32))
            b_db *= beta.factor * b_beta * (1 - b_beta)
        tl.store(out.dbeta + at, b_db.to(out.dbeta.dtype.element_ty), mask=m_i)


def stages(c: Chunks) -> tuple[str, str, str]:
    """The stages that form the gradients of the scores, of q, and of k and p."""
    groups, own = c.v.shape[1] > c.qg.shape[1], c.rule.removal == "p"
    q_stage, k_stage = ("dq_head", "dk_head") if groups or own else ("dqk_head", "dqk_head")
    return "scores_bwd_head", q_stage, k_stage + "_two" * (own and groups)


def by_one_kernel(packing: Packing, c: Chunks, do: Tensor, concurrent: bool) -> bool:
    """Whether one kernel of a generation's folder runs all these stages, and one of the same folder
    the reverse scan, which then writes dv. concurrent: as for `launch_scan_bwd`."""
    H, (HV, V) = c.qg.shape[1], c.v.shape[1:]
    if not c.rule.per_head or (c.rule.removal == "p" and H < HV):
        return False
    folder = choose(packing, c, do, c.v)
    if folder == "triton":
        return False
    options: dict[str, Any] = {"ends": False, "concurrent": concurrent}
    scan = scan_bwd_tile(packing, c, do, "everything", (), **options)
    shape = c.decay.shape[2], V, c.Aqk.dtype
    local = (c.tuning.tile(name, *shape, 0, folder) for name in stages(c))
    return all(t.folder == folder for t in (scan, *local))


def intra_headwise_bwd(
    packing: Packing, x: Inputs, c: Chunks, states: ChunkStates, grads: ScanGrads
) -> Inputs:
    """The gradients of the inputs, with one decay a head."""
    rule, table, dtype = c.rule, tables(packing, x.q.device), x.q.dtype
    (NC, HV, K), H, V, C = c.decay.shape, x.q.shape[1], x.v.shape[2], packing.chunk
    groups = HV > H or x.p is not None  # with p one kernel takes smaller tiles and is slower
    whole = grads.dv is not None
    ts = tq = tk = WHOLE
    if not whole:
        ts, tq, tk = (in_chunks_of(C, n, c.tuning.tile(n, K, V, dtype)) for n in stages(c))
    q_tiles, tiles = cdiv(K, tq.BK), cdiv(K, tk.BK)
    parts = q_tiles + tiles if groups and not whole else tiles
    single = functools.partial(torch.empty, dtype=torch.float32, device=x.q.device)
    dq, dk, dg = (torch.empty_like(z, memory_format=DENSE) for z in (x.q, x.k, x.g))
    dv = torch.empty_like(x.v, memory_format=DENSE) if grads.dv is None else grads.dv
    out = Grads(
        dq=dq,
        dk=dk,
        dp=None if x.p is None else torch.empty_like(dk),
        dv=dv,
        dg=dg,
        dbeta=None if x.beta is None else torch.empty_like(x.beta, memory_format=DENSE),
        dA_log=None if x.A_log is None else single(NC, HV),
        ddt_bias=None if x.dt_bias is None else single(NC, HV),
        shares=None if x.beta is None else empty_shares(1 + tiles, x),
        scores=None if whole else x.q.new_empty(NC, HV, 2, C, C),
        row_grads=None if whole else single(NC, HV, 3, C),
        dgc=single(parts, NC, HV, C),
        shift=None if x.p is None else single(tiles, NC, HV, C),
    )
    shape_of = functools.partial(shape, rule, dtype, H, HV, K, V, chunk=C)
    R, log_decay, where = rule_options(rule, dtype), gate(rule, x), table.chunks
    tokens = ALIGNED if out.shares is None else out.shares.shape[1]
    if NC and whole:
        programs = c.tuning.sm_count(x.q.device) or 1
        run = kernels_of(choose(packing, c, grads.do, x.v)).intra_headwise_bwd.head_bwd
        run(table, x, c, states, grads, out, programs)
    elif NC:
        x_saved, qnorm = saved(x, c, states, grads), rule.qk_l2norm and q_tiles > 1
        given = x_saved, log_decay, out, where, shape_of(ts), R, qnorm
        launch(scores_head_bwd_kernel, (NC, HV), *given, num_warps=ts.warps)
        q_options, k_options = (
            {"S": shape_of(t), "R": R, "num_warps": t.warps, "maxnreg": t.registers}
            for t in (tq, tk)
        )
        grid, q_grid = (NC * tiles, H), (NC * q_tiles, H)
        if groups:
            k_out = out._replace(dgc=out.dgc[q_tiles:])
            launch(dq_head_kernel, q_grid, x_saved, out, where, rule.scale, **q_options)
            launch(dk_head_kernel, grid, x_saved, k_out, where, tokens, **k_options)
        else:
            launch(dqk_head_kernel, grid, x_saved, out, where, tokens, rule.scale, **k_options)
    if NC:
        BH = heads_of_a_program(HV)
        sums_of = out, where, tokens, shape_of(tk), R, parts, tiles, BH
        launch(head_gate_bwd_kernel, (NC, HV // BH), log_decay, beta(rule, x), *sums_of)
    dA_log, ddt_bias = rate_grads(out.dA_log, x.A_log, out.ddt_bias, x.dt_bias)
    return Inputs(dq, dk, dv, dg, out.dbeta, dA_log, ddt_bias, out.dp)
