"""Backward of the local stage with one decay a head: scores, gate, beta, launches."""

import torch
import triton
import triton.language as tl
from torch import Tensor

from fla_cp.kernels.sm90 import eligible
from fla_cp.kernels.torch.intra import Inputs
from fla_cp.kernels.triton.device.blocks import dot, load_block, load_rows, store_block, store_rows
from fla_cp.kernels.triton.device.gates import GATES, sigmoid
from fla_cp.kernels.triton.device.headwise_decay import decays, load_head_gate, running_sums
from fla_cp.kernels.triton.device.planes import (
    GRAD_PLANES,
    HEADWISE_PLANES,
    K_DK,
    K_SCALE,
    Q_DQ,
    Q_SCALE,
    R_SCALE,
)
from fla_cp.kernels.triton.intra_headwise_bwd_products import (
    dk_head_kernel,
    dq_head_kernel,
    dqk_head_kernel,
)
from fla_cp.kernels.triton.launch import cdiv, launch
from fla_cp.kernels.triton.operands import Chunks, ScanGrads, precision, summed_over_chunks, tables
from fla_cp.kernels.triton.tile_table import Tile
from fla_cp.partition.packing import Packing
from fla_cp.rule import CHUNK, DeltaRule


@triton.jit
def scores_head_bwd_kernel(
    v,
    g,
    A_log,
    dt_bias,
    rows,
    do,
    o,
    v_new,
    y,
    dv,
    shares,
    weights,
    row_grads,
    chunk_start,
    chunk_rows,
    v_t,
    v_h,
    g_t,
    do_t,
    do_h,
    bound,
    HV: tl.constexpr,
    V: tl.constexpr,
    BT: tl.constexpr,
    BV: tl.constexpr,
    GATE: tl.constexpr,
    NORM: tl.constexpr,
    EXP2: tl.constexpr,
    QNORM: tl.constexpr,
    REMOVAL: tl.constexpr,
    PRECISION: tl.constexpr,
):
    """weights [NC, HV, 2, C, C], below the diagonal: what the inputs k are weighted with in the
    gradients of q and of beta r. row_grads [NC, HV, 3, C], fp32: the diagonal's weight of k; with
    QNORM q dq and with NORM k dk of each row, summed over channels, as `scores_bwd_kernel` says
    (with p those of k alone). shares [.., T, HV]: in plane 0 v's share of dbeta, before the
    sigmoid's slope."""
    i_c, i_hv = tl.program_id(0).to(tl.int64), tl.program_id(1).to(tl.int64)
    i = tl.arange(0, BT)
    m_i = i < tl.load(chunk_rows + i_c)
    start = tl.load(chunk_start + i_c).to(tl.int64)
    i_ch = i_c * HV + i_hv
    v += i_hv * v_h + start * v_t
    do += i_hv * do_h + start * do_t
    o += (start * HV + i_hv) * V
    dv += (start * HV + i_hv) * V
    rows += i_ch * HEADWISE_PLANES * BT + i
    row_grads += i_ch * GRAD_PLANES * BT + i
    weights += i_ch * 2 * BT * BT
    operand = v_new.dtype.element_ty
    b_beta = tl.load(rows)
    b_ds = tl.zeros([BT, BT], tl.float32)
    b_da = tl.zeros([BT, BT], tl.float32)
    b_vy = tl.zeros_like(b_beta)
    b_nq = tl.zeros_like(b_beta)
    b_nk = tl.zeros_like(b_beta)
    # a pipeline would load for sums as well as for products, see `overwritten` in tests/aot/;
    # those of fp32 are waited for
    STAGES: tl.constexpr = None if operand == tl.float32 else 1
    for i_v in tl.range((V + BV - 1) // BV, num_stages=STAGES):
        o_v = i_v * BV + tl.arange(0, BV)
        b_do = load_rows(do, i, do_t, m_i, o_v, V).to(operand)
        b_vn = load_block(v_new + i_ch * BT * V, i, o_v, BT, V)
        b_y = load_block(y + i_ch * BT * V, i, o_v, BT, V)
        b_ds = dot(b_do, tl.trans(b_vn), PRECISION, acc=b_ds)
        if REMOVAL != "none":
            b_da = dot(b_y, tl.trans(b_vn), PRECISION, acc=b_da)
        b_v = load_rows(v, i, v_t, m_i, o_v, V).to(tl.float32)
        b_y = b_y.to(tl.float32)
        b_vy += tl.sum(b_v * b_y, axis=1)
        if QNORM:
            b_o = load_rows(o, i, HV * V, m_i, o_v, V).to(tl.float32)
            b_nq += tl.sum(b_do.to(tl.float32) * b_o, axis=1)
        if NORM:
            b_nk += tl.sum(b_vn.to(tl.float32) * b_y, axis=1)
        store_rows(dv, b_y * b_beta[:, None], i, HV * V, m_i, o_v, V)
    p_g = g + i_hv + start * g_t
    _raw, _rate, b_g = load_head_gate(p_g, A_log, dt_bias, i_hv, i, g_t, m_i, bound, GATE, EXP2)
    gc = running_sums(b_g, operand)
    q_scale, k_scale = tl.load(rows + Q_SCALE * BT), tl.load(rows + K_SCALE * BT)
    diagonal = tl.sum(tl.where(i[:, None] == i[None, :], b_ds, 0.0), axis=1)
    tl.store(row_grads, diagonal * q_scale * k_scale)
    b_ds *= decays(gc, gc, i, EXP2)
    store_block(weights, b_ds * q_scale[:, None] * k_scale[None, :], i, i, BT, BT)
    if REMOVAL != "none":
        before = running_sums(b_g, operand, True) if REMOVAL == "p" else gc
        b_da *= decays(before, gc, i, EXP2)
        b_da *= -tl.load(rows + R_SCALE * BT)[:, None] * k_scale[None, :]
        store_block(weights + BT * BT, b_da, i, i, BT, BT)
        tl.store(shares + (start + i) * HV + i_hv, b_vy, mask=m_i)
    if QNORM:
        tl.store(row_grads + Q_DQ * BT, b_nq)
    if NORM:
        if REMOVAL != "p":
            b_nk = 2.0 * b_nk - b_beta * b_vy
        tl.store(row_grads + K_DK * BT, b_nk)


@triton.jit
def head_gate_bwd_kernel(
    g,
    A_log,
    dt_bias,
    dgc,
    shift,
    beta,
    shares,
    dg,
    dA_log,
    ddt_bias,
    dbeta,
    chunk_start,
    chunk_rows,
    tokens,
    g_t,
    beta_t,
    bound,
    beta_factor,
    HV: tl.constexpr,
    BT: tl.constexpr,
    SHARES: tl.constexpr,
    TILES: tl.constexpr,
    GATE: tl.constexpr,
    SLOPE: tl.constexpr,
    RATE_SCALES_RAW: tl.constexpr,
    BETA_SIGMOID: tl.constexpr,
):
    """dg [T, HV] from the SHARES of dgc and those of key tiles of shift, dbeta [T, HV] from v's
    share and those of key tiles; dA_log, ddt_bias [NC, HV]: partial sums."""
    i_c, i_hv = tl.program_id(0).to(tl.int64), tl.program_id(1).to(tl.int64)
    i = tl.arange(0, BT)
    m_i = i < tl.load(chunk_rows + i_c)
    start = tl.load(chunk_start + i_c).to(tl.int64)
    i_ch = i_c * HV + i_hv
    chunks = tl.num_programs(0).to(tl.int64)
    b_dgc = tl.zeros([BT], tl.float32)
    for n in range(SHARES):
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
    if beta is not None:
        at = (start + i) * HV + i_hv
        b_db = tl.zeros([BT], tl.float32)
        for n in range(1 + TILES):
            b_db += tl.load(shares + n * (HV * tokens.to(tl.int64)) + at, mask=m_i, other=0.0)
        if BETA_SIGMOID:
            b_beta = tl.load(beta + (start + i) * beta_t + i_hv, mask=m_i, other=0.0)
            b_beta = sigmoid(b_beta.to(tl.float32))
            b_db *= beta_factor * b_beta * (1 - b_beta)
        tl.store(dbeta + at, b_db.to(dbeta.dtype.element_ty), mask=m_i)


def headwise_tiles(
    names: tuple[str, ...],
    packing: Packing,
    x: Inputs,
    c: Chunks,
    grads: ScanGrads,
    rows: tuple[Tensor, ...],
) -> tuple[Tile, ...]:
    """Of stages that one kernel in Gluon does together: all there, or none. rows: what it reads
    [T, H, K], none if it does not do this."""
    K, V = x.q.shape[2], x.v.shape[2]
    supports = bool(rows) and eligible.supports(c, *rows, x.v, grads.do)
    supports = supports and eligible.pays(packing, c)
    for whole in (supports, False):
        tiles = tuple(c.tuning.tile(name, K, V, x.q.dtype, 0, whole) for name in names)
        if all(t.hopper for t in tiles):
            break
    return tiles


def intra_headwise_bwd(
    rule: DeltaRule,
    packing: Packing,
    x: Inputs,
    c: Chunks,
    h: Tensor,
    v_new: Tensor,
    grads: ScanGrads,
) -> Inputs:
    """One decay a head."""
    table, do = tables(packing, x.q.device), grads.do
    NC, (tokens, H, K), (HV, V) = len(table.chunk_start), x.q.shape, x.v.shape[1:]
    groups = HV > H or x.p is not None  # with p one kernel takes smaller tiles and is slower
    q_stage, k_stage = ("dq_head", "dk_head") if groups else ("dqk_head", "dqk_head")
    k_stage += "_two" * (x.p is not None and HV > H)
    read = (x.q, x.k) if x.p is None else () if HV > H else (x.q, x.k, x.p)
    ts, tq, tk = headwise_tiles(("scores_bwd_head", q_stage, k_stage), packing, x, c, grads, read)
    whole = tk.hopper
    device, q_tiles, tiles = x.q.device, cdiv(K, tq.BK), cdiv(K, tk.BK)
    parts = q_tiles + tiles if groups and not whole else tiles
    dq, dk = (torch.empty(x.q.shape, dtype=x.q.dtype, device=device) for _ in range(2))
    dv = torch.empty(x.v.shape, dtype=x.v.dtype, device=device)
    dg = torch.empty(x.g.shape, dtype=x.g.dtype, device=device)
    dgc, dp, shift, dbeta, shares = (
        torch.empty(parts, NC, HV, CHUNK, dtype=torch.float32, device=device),
        *[None] * 4,
    )
    if x.p is not None:
        dp, shift = torch.empty_like(dk), torch.empty_like(dgc[:tiles])
    if x.beta is not None:
        dbeta = torch.empty(x.beta.shape, dtype=x.beta.dtype, device=device)
        shares = torch.empty(1 + tiles, tokens, HV, dtype=torch.float32, device=device)
    dA_log = None if x.A_log is None else torch.empty(NC, HV, dtype=torch.float32, device=device)
    ddt_bias = (
        None if x.dt_bias is None else torch.empty(NC, HV, dtype=torch.float32, device=device)
    )
    shape = {
        "H": H,
        "K": K,
        "V": V,
        "BT": CHUNK,
        "NORM": rule.qk_l2norm,
        "PRECISION": precision(x.q.dtype),
    }
    if not whole:
        weights = torch.empty(NC, HV, 2, CHUNK, CHUNK, dtype=x.q.dtype, device=device)
        row_grads = torch.empty(NC, HV, 3, CHUNK, dtype=torch.float32, device=device)
    if NC and whole:
        out = {"dq": dq, "dk": dk, "dp": dp, "dv": dv, "dgc": dgc, "shift": shift, "shares": shares}
        programs = c.tuning.sm_count(device) or 1
        eligible.sm90_intra_bwd.head_bwd(rule, table, x, c, h, v_new, grads, out, programs)
    elif NC:
        launch(
            scores_head_bwd_kernel,
            (NC, HV),
            x.v,
            x.g,
            x.A_log,
            x.dt_bias,
            c.rows,
            do,
            c.o,
            v_new,
            grads.y,
            dv,
            shares,
            weights,
            row_grads,
            table.chunk_start,
            table.chunk_rows,
            *x.v.stride()[:2],
            x.g.stride(0),
            *do.stride()[:2],
            rule.lower_bound or 0.0,
            HV=HV,
            V=V,
            BT=CHUNK,
            BV=ts.BV,
            GATE=GATES[rule.gate][0],
            NORM=rule.qk_l2norm,
            QNORM=rule.qk_l2norm and q_tiles > 1,
            EXP2=rule.use_exp2,
            REMOVAL=rule.removal,
            PRECISION=precision(x.q.dtype),
            num_warps=ts.warps,
        )
        if groups:
            launch(
                dq_head_kernel,
                (NC * q_tiles, H),
                x.q,
                x.k,
                c.rows,
                row_grads,
                weights,
                do,
                h,
                dq,
                dgc,
                table.chunk_start,
                table.chunk_rows,
                *x.q.stride()[:2],
                *x.k.stride()[:2],
                *do.stride()[:2],
                rule.scale,
                G=HV // H,
                BK=tq.BK,
                BV=tq.BV,
                NS=tq.stages,
                num_warps=tq.warps,
                maxnreg=tq.registers,
                **shape,
            )
            launch(
                dk_head_kernel,
                (NC * tiles, H),
                x.q,
                x.k,
                x.p,
                c.decay,
                c.rows,
                row_grads,
                weights,
                h,
                grads.dh,
                v_new,
                grads.y,
                dk,
                dp,
                dgc[q_tiles:],
                shift,
                shares,
                table.chunk_start,
                table.chunk_rows,
                tokens,
                *x.q.stride()[:2],
                *x.k.stride()[:2],
                *((0, 0) if x.p is None else x.p.stride()[:2]),
                G=HV // H,
                BK=tk.BK,
                BV=tk.BV,
                REMOVAL=rule.removal,
                NS=tk.stages,
                num_warps=tk.warps,
                maxnreg=tk.registers,
                **shape,
            )
        else:
            launch(
                dqk_head_kernel,
                (NC * tiles, H),
                x.q,
                x.k,
                c.decay,
                c.rows,
                row_grads,
                weights,
                do,
                h,
                grads.dh,
                v_new,
                grads.y,
                dq,
                dk,
                dgc,
                shares,
                table.chunk_start,
                table.chunk_rows,
                tokens,
                *x.q.stride()[:2],
                *x.k.stride()[:2],
                *do.stride()[:2],
                rule.scale,
                BK=tk.BK,
                BV=tk.BV,
                REMOVAL=rule.removal,
                NS=tk.stages,
                num_warps=tk.warps,
                maxnreg=tk.registers,
                **shape,
            )
    if NC:
        launch(
            head_gate_bwd_kernel,
            (NC, HV),
            x.g,
            x.A_log,
            x.dt_bias,
            dgc,
            shift,
            x.beta,
            shares,
            dg,
            dA_log,
            ddt_bias,
            dbeta,
            table.chunk_start,
            table.chunk_rows,
            tokens,
            x.g.stride(0),
            0 if x.beta is None else x.beta.stride(0),
            rule.lower_bound or 0.0,
            rule.beta_factor or 1.0,
            HV=HV,
            BT=CHUNK,
            SHARES=parts,
            TILES=tiles,
            GATE=GATES[rule.gate][0],
            SLOPE=GATES[rule.gate][1],
            RATE_SCALES_RAW=rule.gate == "sigmoid",
            BETA_SIGMOID=rule.beta_factor is not None,
            num_warps=1,
        )
    dA_log, ddt_bias = summed_over_chunks(dA_log, x.A_log), summed_over_chunks(ddt_bias, x.dt_bias)
    return Inputs(dq, dk, dv, dg, dbeta, dA_log, ddt_bias, dp)
