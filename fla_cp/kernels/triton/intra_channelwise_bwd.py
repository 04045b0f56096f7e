"""Gradients of everything local to a chunk, from the two scans' results, in two launches and one
of beta; long because a kernel is its list of arguments.

With y = T^T dv_new (scan.py), the inverse needs no products of its own: dv = beta y and
dAkk = -tril(y v_new^T), next to dAqk = tril(do v_new^T).

1. `scores_bwd_kernel`, a program per (chunk, head): dAqk, dAkk, dv, v's share of dbeta, and what
   the backward of the q/k norm needs of whole rows: q dq = do o, since o is linear in q; and
   k dk = y (2 v_new - beta v), since k enters as k_i v_new_i^T and as a row of (I + Akk) v_new =
   beta (v - kin S).
2. `intra_bwd_kernel`, a program per (chunk, head, key tile): row and column factors of the scores
   get their gradients level by level as in intra.py (with a safe gate: safe_bwd.py). gc enters as
   exp(+gc_i) beside row factors and exp(-gc_j) beside column factors, so its gradient is
   elementwise: row * drow - col * dcol. A level's rows are second and its columns first blocks of
   pairs, so each row of the chunk is one or the other, and mirrored scores give both gradients in
   one product; levels 2 to 5 are products of four blocks of 16, each within a warp.
   Summed back along the chunk, a pair (i, j) adds to dg between j and i and must vanish before j:
   row and col are therefore those that the products saw, rounded alike. (With q and k in fp32
   instead, dg was off by 1.9% and ddt_bias by 5 to 9%: docs/log.md.)

The gradients of the scores go through memory (`dscores`, two [C, C] tiles a chunk), since
transposing a product's result into another product is miscompiled on Hopper by Triton 3.4 to 3.7.0.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from fla_cp.kernels.torch.intra import Inputs
from fla_cp.kernels.triton.device.blocks import (
    apply_sums,
    decay_exp,
    dot,
    load_block,
    load_rows,
    parts,
    store_rows,
    sum_steps,
)
from fla_cp.kernels.triton.device.channelwise_decay import blocks_of_16, load_steps
from fla_cp.kernels.triton.device.channelwise_grads import (
    as_rows,
    level_grads,
    load_scaled,
    store_gate_grads,
)
from fla_cp.kernels.triton.device.decay_sums import AFTER, PAIR, UP_TO, sums
from fla_cp.kernels.triton.device.gates import GATES
from fla_cp.kernels.triton.device.opaque import opaque
from fla_cp.kernels.triton.device.planes import CHANNELWISE_PLANES, GRAD_PLANES
from fla_cp.kernels.triton.intra_channelwise_bwd_safe import safe_bwd_kernel
from fla_cp.kernels.triton.intra_channelwise_bwd_scores import beta_bwd, scores_bwd_kernel
from fla_cp.kernels.triton.launch import cdiv, launch
from fla_cp.kernels.triton.operands import (
    Chunks,
    ScanGrads,
    gate_options,
    planes,
    precision,
    stage_name,
    summed_over_chunks,
    tables,
)
from fla_cp.partition.packing import Packing
from fla_cp.rule import CHUNK, DeltaRule


@triton.jit
def intra_bwd_kernel(
    q,
    k,
    g,
    A_log,
    dt_bias,
    sums,
    decay,
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
    """Without REMOVES (GLA) k has no row factor. dq, dk: [T, HV, K] per value head, of the rows as
    given. dA_log [NC, key tiles, HV] and ddt_bias [NC, HV, K]: one partial sum a program, or
    None. dbeta: plane 1 + tile."""
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
    operand = v_new.dtype.element_ty
    LEAN: tl.constexpr = REMOVES and operand == tl.float32
    o_k = i_k * BK + tl.arange(0, BK)

    b_g = load_steps(
        g + i_hv * g_h + start * g_t, A_log, dt_bias, i_hv, i, g_t, m_i, o_k, bound, K, GATE, EXP2
    )
    b_dq = tl.zeros([BT, BK], tl.float32)
    b_dr = tl.zeros([BT, BK], tl.float32)
    b_dc = tl.zeros([BT, BK], tl.float32)
    b_dl = tl.zeros([BK], tl.float32)
    for i_v in tl.range((V + BV - 1) // BV, num_stages=NS):
        o_v = i_v * BV + tl.arange(0, BV)
        b_h = load_block(h, o_k, o_v, K, V)
        b_dh = load_block(dh, o_k, o_v, K, V)
        b_do = load_rows(do, i, do_t, m_i, o_v, V).to(operand)
        b_dq = dot(b_do, tl.trans(b_h), PRECISION, acc=b_dq)
        if REMOVES:
            b_dr = dot(load_block(y, i, o_v, BT, V), tl.trans(b_h), PRECISION, acc=b_dr)
        b_dc = dot(load_block(v_new, i, o_v, BT, V), tl.trans(b_dh), PRECISION, acc=b_dc)
        b_dl += tl.sum(b_h.to(tl.float32) * b_dh.to(tl.float32), axis=1)
    steps = parts(b_g, operand)
    b_k = load_scaled(k, rows, i_ch * 3 + 2, i, k_t, m_i, o_k, K)
    b_q = load_scaled(q, rows, i_ch * 3 + 1, i, q_t, m_i, o_k, K)
    b_beta = tl.load(rows + i_ch * CHANNELWISE_PLANES * BT + i)[:, None]
    e = decay_exp(sum_steps(sums, UP_TO, i, steps, PRECISION), EXP2)
    b_dq *= e
    b_dr *= -e
    b_dc *= decay_exp(sum_steps(sums, AFTER, i, steps, PRECISION), EXP2)
    b_dl *= tl.load(decay + i_ch * K + o_k, mask=o_k < K, other=0.0)
    b_dl += tl.sum(b_k * b_dc, axis=0)
    b_dgc = b_q * b_dq - b_k * b_dc
    if REMOVES:
        b_dgc += b_beta * (b_k * b_dr)
    b_dgc += tl.where((i == BT - 1)[:, None], b_dl[None, :], 0.0)  # held no longer, for registers

    # row factors q and beta k, column factor k; first the levels within blocks of 16
    x_q, x_k, x_beta = blocks_of_16(b_q), blocks_of_16(b_k), blocks_of_16(b_beta)
    x_dq, x_dr = blocks_of_16(b_dq), blocks_of_16(b_dr)
    x_dc, x_dgc = blocks_of_16(b_dc), blocks_of_16(b_dgc)
    x_steps = parts(blocks_of_16(b_g), operand)
    j = tl.arange(0, 16)
    # in fp32, for registers: q, k and beta are loaded again at each level, and the compiler cannot
    # tell that the loops run, so that it keeps nothing that they form for what follows them
    blocks_end, levels_end = 6, 2
    if LEAN:
        blocks_end, levels_end = opaque(6, n_rows, BT, 1000), opaque(2, n_rows, BT, 2000)
    for level in tl.range(2, blocks_end, num_stages=1, disable_licm=True):
        n = 5 - level
        r = opaque(j, n_rows + level, BT, 1000)
        at = (r[:, None] * BT + r[None, :])[None]
        at += tl.arange(0, BT // 16)[:, None, None] * (16 * BT + 16)
        E = tl.load(sums + (PAIR + level) * BT * BT + at)
        f = decay_exp(apply_sums(E, x_steps, PRECISION), EXP2)
        if LEAN:
            o = opaque(i, n_rows + level, BT, 1000)
            x_q = blocks_of_16(load_scaled(q, rows, i_ch * 3 + 1, o, q_t, o < n_rows, o_k, K))
            x_k = blocks_of_16(load_scaled(k, rows, i_ch * 3 + 2, o, k_t, o < n_rows, o_k, K))
            x_beta = blocks_of_16(tl.load(rows + i_ch * CHANNELWISE_PLANES * BT + o)[:, None])
        x_dq, x_dr, x_dc, x_dgc = level_grads(
            x_dq,
            x_dr,
            x_dc,
            x_dgc,
            f,
            x_q,
            x_k,
            x_beta,
            dscores,
            at,
            ((r[:, None] ^ r[None, :]) >> n == 1)[None],
            ((r >> n) & 1 == 1)[None, :, None],
            n_rows,
            BT,
            REMOVES,
            PRECISION,
        )
    b_dq, b_dr, b_dc, b_dgc = as_rows(x_dq), as_rows(x_dr), as_rows(x_dc), as_rows(x_dgc)
    for top in tl.range(0, levels_end, num_stages=1, disable_licm=True):
        o = opaque(i, n_rows + top, BT, 1000)
        inner, outer = o // 32 + top * (o // 16 - o // 32), o // 32 * top
        f = decay_exp(sum_steps(sums, PAIR + top, o, steps, PRECISION), EXP2)
        if LEAN:
            b_q = load_scaled(q, rows, i_ch * 3 + 1, o, q_t, o < n_rows, o_k, K)
            b_k = load_scaled(k, rows, i_ch * 3 + 2, o, k_t, o < n_rows, o_k, K)
            b_beta = tl.load(rows + i_ch * CHANNELWISE_PLANES * BT + o)[:, None]
        b_dq, b_dr, b_dc, b_dgc = level_grads(
            b_dq,
            b_dr,
            b_dc,
            b_dgc,
            f,
            b_q,
            b_k,
            b_beta,
            dscores,
            o[:, None] * BT + o[None, :],
            (outer[:, None] == outer[None, :]) & (inner[:, None] != inner[None, :]),
            (inner % 2 == 1)[:, None],
            n_rows,
            BT,
            REMOVES,
            PRECISION,
        )
    tl.debug_barrier()
    n_rows = tl.load(chunk_rows + i_c)
    i, i_k = opaque(i, n_rows, BT, 1), opaque(i_k, n_rows, BT, 1)
    i_c, i_hv = opaque(i_c, n_rows, BT, 1), opaque(i_hv, n_rows, BT, 1)
    i_ch = i_c * HV + i_hv
    start = tl.load(chunk_start + i_c).to(tl.int64)
    m_i = i < n_rows
    o_k = i_k * BK + tl.arange(0, BK)
    if LEAN:
        b_q = load_scaled(q, rows, i_ch * 3 + 1, i, q_t, m_i, o_k, K)
        b_k = load_scaled(k, rows, i_ch * 3 + 2, i, k_t, m_i, o_k, K)
        b_beta = tl.load(rows + i_ch * CHANNELWISE_PLANES * BT + i)[:, None]
    # the diagonal's row and column cancel in the gate's gradient
    diagonal = tl.load(row_grads + i_ch * GRAD_PLANES * BT + i)[:, None]
    b_dq += diagonal * b_k
    b_dc += diagonal * b_q
    if NORM:
        b_dq -= b_q * (tl.load(row_grads + (i_ch * 3 + 1) * BT + i) / (scale * scale))[:, None]
    out = (start * HV + i_hv) * K
    store_rows(
        dq + out, b_dq * tl.load(rows + (i_ch * 3 + 1) * BT + i)[:, None], i, HV * K, m_i, o_k, K
    )
    if REMOVES:
        dbeta += (i_k + 1).to(tl.int64) * tokens * HV + start * HV + i_hv
        tl.store(dbeta + i * HV, tl.sum(b_k * b_dr, axis=1), mask=m_i)
        b_dc += b_dr * b_beta
    if NORM:
        b_dc -= b_k * tl.load(row_grads + (i_ch * 3 + 2) * BT + i)[:, None]
    store_rows(
        dk + out, b_dc * tl.load(rows + (i_ch * 3 + 2) * BT + i)[:, None], i, HV * K, m_i, o_k, K
    )

    tl.debug_barrier()
    n_rows = tl.load(chunk_rows + i_c)
    i, i_k = opaque(i, n_rows, BT, 2), opaque(i_k, n_rows, BT, 2)
    i_c, i_hv = opaque(i_c, n_rows, BT, 2), opaque(i_hv, n_rows, BT, 2)
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


def intra_channelwise_bwd(
    rule: DeltaRule,
    packing: Packing,
    x: Inputs,
    c: Chunks,
    h: Tensor,
    v_new: Tensor,
    grads: ScanGrads,
) -> Inputs:
    """One decay a channel."""
    table, do = tables(packing, x.q.device), grads.do
    NC, (H, K), (HV, V) = len(table.chunk_start), x.q.shape[1:], x.v.shape[1:]
    t, ts = (
        c.tuning.tile(name, K, V, x.q.dtype)
        for name in (stage_name("intra_bwd", rule, x.q.dtype), "scores_bwd")
    )
    device, tokens = x.q.device, len(x.q)
    per_head = torch.float32 if HV > H else x.q.dtype
    tiles = cdiv(K, t.BK)
    dq, dk = (torch.empty(tokens, HV, K, dtype=per_head, device=device) for _ in range(2))
    dv = torch.empty(tokens, HV, V, dtype=x.v.dtype, device=device)
    dg = torch.empty(x.g.shape, dtype=x.g.dtype, device=device)
    dbeta = torch.empty(1 + tiles, tokens, HV, dtype=torch.float32, device=device)
    dA_log = (
        None if x.A_log is None else torch.empty(NC * tiles, HV, dtype=torch.float32, device=device)
    )
    ddt_bias = (
        None if x.dt_bias is None else torch.empty(NC, HV, K, dtype=torch.float32, device=device)
    )
    dscores = torch.empty(NC, HV, 2, CHUNK, CHUNK, dtype=x.q.dtype, device=device)
    row_grads = torch.empty(NC, HV, 3, CHUNK, dtype=torch.float32, device=device)
    if NC:
        options = gate_options(rule, x.q.dtype)
        safe_gate = options.pop("SAFE")
        launch(
            scores_bwd_kernel,
            (NC, HV),
            x.v,
            c.rows,
            do,
            c.o,
            v_new,
            grads.y,
            dv,
            dbeta,
            dscores,
            row_grads,
            table.chunk_start,
            table.chunk_rows,
            *x.v.stride()[:2],
            *do.stride()[:2],
            HV=HV,
            V=V,
            BT=CHUNK,
            BV=ts.BV,
            PLANES=planes(rule),
            NORM=rule.qk_l2norm,
            REMOVES=rule.removal != "none",
            MIRRORED=not safe_gate,
            PRECISION=precision(x.q.dtype),
            num_warps=ts.warps,
        )
        kernel = safe_bwd_kernel if safe_gate else intra_bwd_kernel
        launch(
            kernel,
            (NC * tiles, HV),
            x.q,
            x.k,
            x.g,
            x.A_log,
            x.dt_bias,
            sums(x.q.dtype, x.q.device),
            c.anchors if safe_gate else c.decay,
            c.rows,
            row_grads,
            do,
            h,
            grads.dh,
            v_new,
            grads.y,
            dscores,
            dq,
            dk,
            dg,
            dbeta,
            dA_log,
            ddt_bias,
            table.chunk_start,
            table.chunk_rows,
            tokens,
            *x.q.stride()[:2],
            *x.k.stride()[:2],
            *x.g.stride()[:2],
            *do.stride()[:2],
            rule.scale,
            rule.lower_bound or 0.0,
            HV=HV,
            G=HV // H,
            K=K,
            V=V,
            BT=CHUNK,
            BK=t.BK,
            BV=t.BV,
            SLOPE=GATES[rule.gate][1],
            RATE_SCALES_RAW=rule.gate == "sigmoid",
            num_warps=t.warps,
            NS=t.stages,
            maxnreg=t.registers,
            **options,
        )
    if HV > H:

        def of_keys(d: Tensor) -> Tensor:
            return d.unflatten(1, (H, HV // H)).sum(2).to(x.q.dtype)

        dq, dk = of_keys(dq), of_keys(dk)
    return Inputs(
        dq,
        dk,
        dv,
        dg,
        None if x.beta is None else beta_bwd(rule, x.beta, dbeta),
        summed_over_chunks(dA_log, x.A_log),
        summed_over_chunks(ddt_bias, x.dt_bias),
    )
