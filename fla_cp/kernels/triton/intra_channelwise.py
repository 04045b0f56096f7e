"""Everything local to a chunk, in one pass over q, k, g and beta.

Per (chunk, value head): gate, norm, cumulative sum, Aqk, Akk and T = (I + Akk)^-1. Writes, in the
operands' dtype and chunk by chunk, qg = scale q exp(gc), kin = k exp(gc), kg = k exp(gc_C - gc),
T, Aqk (with scale), and in fp32 decay = exp(gc_C), the activated beta and what the rows are
multiplied by; with a safe gate also gc of rows 15, 47 and 63 for the backward (anchors).

Scores. With a safe gate, columns refer to the middle row m of their half of the chunk: k_j
exp(gc_m - gc_j), whose exponent stays below 16 * 5 / ln 2 = 116 and so in the range of bf16. Rows
refer once to the middle of the first half and once to that of their own, and each of the two
products has the columns of one half. With any gate, the chunk is halved again and again: for pairs
of neighbouring S-blocks (S = 32, 16, .., 1) all rows of second blocks meet all columns of first
blocks in one [64, K] x [K, 64] product, with the last row of the first block as reference; every
exponent is at most zero, and what lies outside the pairs is masked away.
"""

import triton
import triton.language as tl
from torch import Tensor

from fla_cp.kernels.torch.intra import Inputs
from fla_cp.kernels.triton.device.blocks import (
    apply_sums,
    decay_exp,
    dot,
    load_rows,
    load_sums,
    pair_mask,
    parts,
    rounded_off,
    row_products,
    store_block,
    store_square,
    sum_steps,
    unit_rows,
)
from fla_cp.kernels.triton.device.channelwise_decay import blocks_of_16, load_steps
from fla_cp.kernels.triton.device.decay_sums import AFTER, FIRST, MIDDLE, PAIR, UP_TO, sums
from fla_cp.kernels.triton.device.gates import sigmoid
from fla_cp.kernels.triton.device.inverse import unit_lower_inverse
from fla_cp.kernels.triton.device.opaque import opaque
from fla_cp.kernels.triton.device.planes import CHANNELWISE_PLANES, K_SCALE, Q_SCALE
from fla_cp.kernels.triton.launch import cdiv, launch
from fla_cp.kernels.triton.operands import Chunks, Tables, gate_options, stage_name, tables
from fla_cp.kernels.triton.tile_table import TUNING, Tuning
from fla_cp.partition.packing import Packing
from fla_cp.rule import CHUNK, NORM_EPS, DeltaRule


@triton.jit(do_not_specialize=["k_blocks"])
def intra_kernel(
    q,
    k,
    g,
    beta,
    A_log,
    dt_bias,
    sums,
    qg,
    k_decayed,
    kg,
    T,
    Aqk,
    decay,
    anchors,
    rows,
    chunk_start,
    chunk_rows,
    q_t,
    q_h,
    k_t,
    k_h,
    g_t,
    g_h,
    beta_t,
    k_blocks,
    scale,
    bound,
    beta_factor,
    HV: tl.constexpr,
    G: tl.constexpr,
    K: tl.constexpr,
    BT: tl.constexpr,
    BK: tl.constexpr,
    GATE: tl.constexpr,
    NORM: tl.constexpr,
    BETA_SIGMOID: tl.constexpr,
    SAFE: tl.constexpr,
    EXP2: tl.constexpr,
    REMOVES: tl.constexpr,
    EPS: tl.constexpr,
    TERMS: tl.constexpr,
    PRECISION: tl.constexpr,
    NS: tl.constexpr,
):
    """rows [NC, HV, 3, C], fp32: activated beta, and what q and k are multiplied by. Without
    REMOVES (GLA) neither kin nor T is written."""
    i_c, i_hv = tl.program_id(0).to(tl.int64), tl.program_id(1).to(tl.int64)
    i_h = i_hv // G
    o_i = tl.arange(0, BT)
    n_rows = tl.load(chunk_rows + i_c)
    m_i = o_i < n_rows
    start = tl.load(chunk_start + i_c).to(tl.int64)
    q += i_h * q_h + start * q_t
    k += i_h * k_h + start * k_t
    g += i_hv * g_h + start * g_t
    i_ch = i_c * HV + i_hv
    operand = k_decayed.dtype.element_ty

    b_beta = tl.where(m_i, 1.0, 0.0)
    if beta is not None:
        beta += i_hv + start * beta_t
        b_beta = tl.load(beta + o_i * beta_t, mask=m_i, other=0.0).to(tl.float32)
    if BETA_SIGMOID:
        b_beta = tl.where(m_i, beta_factor * sigmoid(b_beta), 0.0)
    q_scale = tl.zeros_like(b_beta) + scale
    k_scale = tl.zeros_like(b_beta) + 1.0
    diagonal, qq, kk = row_products(q, k, o_i, q_t, k_t, m_i, K, BK, NORM)
    if NORM:
        q_scale *= tl.rsqrt(qq + EPS)
        k_scale *= tl.rsqrt(kk + EPS)
    diagonal *= q_scale * k_scale  # in its place until the end, not in registers
    p_diagonal = Aqk + (i_ch * (TERMS * BT) + o_i) * BT + o_i
    tl.store(p_diagonal, diagonal.to(operand))
    if TERMS > 1:
        tl.store(p_diagonal + BT * BT, rounded_off(diagonal, operand))
    row = rows + i_ch * CHANNELWISE_PLANES * BT + o_i
    tl.store(row, b_beta)
    tl.store(row + Q_SCALE * BT, q_scale)
    tl.store(row + K_SCALE * BT, k_scale)

    b_qk = tl.zeros([BT, BT], tl.float32)
    b_kk = tl.zeros([BT, BT], tl.float32)
    b_16 = tl.zeros([BT // 16, 16, 16], tl.float32)
    if SAFE:
        e_upto = load_sums(sums, UP_TO, o_i)
        e_after = load_sums(sums, AFTER, o_i)
        e_middle = load_sums(sums, MIDDLE, o_i)
        e_first = load_sums(sums, FIRST, o_i)
    for i_k in tl.range((K + BK - 1) // BK, num_stages=NS):
        o_k = i_k * BK + tl.arange(0, BK)
        b_g = load_steps(g, A_log, dt_bias, i_hv, o_i, g_t, m_i, o_k, bound, K, GATE, EXP2)
        steps = parts(b_g, operand)
        b_q = load_rows(q, o_i, q_t, m_i, o_k, K).to(tl.float32) * q_scale[:, None]
        b_k = load_rows(k, o_i, k_t, m_i, o_k, K).to(tl.float32) * k_scale[:, None]
        d = apply_sums(e_upto if SAFE else load_sums(sums, UP_TO, o_i), steps, PRECISION)
        # no addresses kept from tile to tile
        r, c = opaque(o_i, n_rows + i_k, BT, 1000), opaque(o_k, n_rows + i_k, BT, 1000)
        ch = opaque(i_ch, n_rows + i_k, BT, 1000)
        last = tl.broadcast_to(c[None, :], [BT, BK])
        if SAFE:
            place = (ch * 3 + r // 32 + r // (BT - 1))[:, None] * K + last
            at = ((r % 32 == 15) | (r == BT - 1))[:, None] & (c < K)[None, :]
            tl.store(anchors + place, d, mask=at)
        e = decay_exp(d, EXP2)
        store_block(qg + ch * BT * K, b_q * e, r, c, BT, K)
        if REMOVES:
            store_block(k_decayed + ch * BT * K, b_k * e, r, c, BT, K)
        at = (r == BT - 1)[:, None] & (c < K)[None, :]
        tl.store(decay + ch * K + last, e, mask=at)
        d = apply_sums(e_after if SAFE else load_sums(sums, AFTER, o_i), steps, PRECISION)
        e = decay_exp(d, EXP2)
        store_block(kg + ch * BT * K, b_k * e, r, c, BT, K)
        if SAFE:
            d = apply_sums(e_middle, steps, PRECISION)
            col = b_k * decay_exp(-d, EXP2)
            f = decay_exp(d, EXP2)
            b_kf = (b_k * f).to(operand)
            if REMOVES:
                near = tl.permute(blocks_of_16(col.to(operand)), (0, 2, 1))
                b_16 = dot(blocks_of_16(b_kf), near, PRECISION, acc=b_16)
            half = tl.trans(tl.where((o_i >= BT // 2)[:, None], col, 0.0).to(operand))
            b_qk = dot((b_q * f).to(operand), half, PRECISION, acc=b_qk)
            if REMOVES:
                b_kk = dot(b_kf, half, PRECISION, acc=b_kk)
            half = tl.trans(tl.where((o_i < BT // 2)[:, None], col, 0.0).to(operand))
            f = decay_exp(apply_sums(e_first, steps, PRECISION), EXP2)
            b_qk = dot((b_q * f).to(operand), half, PRECISION, acc=b_qk)
            if REMOVES:
                b_kk = dot((b_k * f).to(operand), half, PRECISION, acc=b_kk)
        else:
            for level in tl.range(0, 6, disable_licm=True):
                f = decay_exp(sum_steps(sums, PAIR + level, o_i, steps, PRECISION), EXP2)
                b_kf = (b_k * f).to(operand)
                mask = pair_mask(o_i, 5 - level)
                b_qf = (b_q * f).to(operand)
                b_qk += tl.where(mask, dot(b_qf, tl.trans(b_kf), PRECISION), 0.0)
                if REMOVES:
                    b_kk += tl.where(mask, dot(b_kf, tl.trans(b_kf), PRECISION), 0.0)
    tl.debug_barrier()
    i_ch = opaque(i_ch, n_rows, BT, 1)
    if SAFE:
        o_i = opaque(o_i, n_rows, BT, 1)
    b_beta = tl.load(rows + i_ch * CHANNELWISE_PLANES * BT + o_i)
    p_diagonal = Aqk + (i_ch * (TERMS * BT) + o_i) * BT + o_i
    diagonal = tl.load(p_diagonal).to(tl.float32)
    if TERMS > 1:
        diagonal += tl.load(p_diagonal + BT * BT).to(tl.float32)
    below = o_i[:, None] > o_i[None, :]
    b_qk = tl.where(below, b_qk, 0.0)
    b_qk = tl.where(o_i[:, None] == o_i[None, :], diagonal[:, None], b_qk)
    store_square(Aqk, i_ch, b_qk, o_i, TERMS)
    if REMOVES:
        b_kk = tl.where(below, b_kk, 0.0) * b_beta[:, None]
        if SAFE:
            b_16 *= tl.reshape(b_beta, [BT // 16, 16])[:, :, None]
        else:
            same = (o_i // 16)[:, None] == (o_i // 16)[None, :]
            b_16 = tl.reshape(tl.where(same, b_kk, 0.0), [BT // 16, 16, BT // 16, 16])
            b_16 = tl.sum(b_16, axis=2)
        b_T = unit_lower_inverse(b_kk, b_16, BT, TERMS, PRECISION)
        store_square(T, i_ch, b_T, o_i, TERMS)


@triton.jit
def gated_kernel(
    q,
    k,
    g,
    A_log,
    dt_bias,
    sums,
    qg,
    k_decayed,
    kg,
    anchors,
    rows,
    chunk_start,
    chunk_rows,
    q_t,
    q_h,
    k_t,
    k_h,
    g_t,
    g_h,
    bound,
    HV: tl.constexpr,
    G: tl.constexpr,
    K: tl.constexpr,
    BT: tl.constexpr,
    BK: tl.constexpr,
    GATE: tl.constexpr,
    SAFE: tl.constexpr,
    EXP2: tl.constexpr,
    REMOVES: tl.constexpr,
    PRECISION: tl.constexpr,
):
    """qg, kin and kg again, from the rows and anchors that `intra_kernel` wrote; a program per
    (chunk, key tile, head)."""
    tiles: tl.constexpr = (K + BK - 1) // BK
    i_c, i_hv = (tl.program_id(0) // tiles).to(tl.int64), tl.program_id(1).to(tl.int64)
    i_h = i_hv // G
    o_i = tl.arange(0, BT)
    o_k = tl.program_id(0) % tiles * BK + tl.arange(0, BK)
    m_i = o_i < tl.load(chunk_rows + i_c)
    start = tl.load(chunk_start + i_c).to(tl.int64)
    i_ch = i_c * HV + i_hv
    g += i_hv * g_h + start * g_t
    row = rows + i_ch * CHANNELWISE_PLANES * BT + o_i
    b_g = load_steps(g, A_log, dt_bias, i_hv, o_i, g_t, m_i, o_k, bound, K, GATE, EXP2)
    b_q = load_rows(q + i_h * q_h + start * q_t, o_i, q_t, m_i, o_k, K).to(tl.float32)
    b_k = load_rows(k + i_h * k_h + start * k_t, o_i, k_t, m_i, o_k, K).to(tl.float32)
    b_q *= tl.load(row + Q_SCALE * BT)[:, None]
    b_k *= tl.load(row + K_SCALE * BT)[:, None]
    steps = parts(b_g, kg.dtype.element_ty)
    d = sum_steps(sums, UP_TO, o_i, steps, PRECISION)
    e = decay_exp(d, EXP2)
    store_block(qg + i_ch * BT * K, b_q * e, o_i, o_k, BT, K)
    if REMOVES:
        store_block(k_decayed + i_ch * BT * K, b_k * e, o_i, o_k, BT, K)
    if SAFE:
        d = tl.load(anchors + (i_ch * 3 + 2) * K + o_k, mask=o_k < K, other=0.0)[None, :] - d
    else:
        d = sum_steps(sums, AFTER, o_i, steps, PRECISION)
    store_block(kg + i_ch * BT * K, b_k * decay_exp(d, EXP2), o_i, o_k, BT, K)


def intra_channelwise(rule: DeltaRule, table: Tables, c: Chunks, x: Inputs) -> None:
    """A decay a channel."""
    NC, (H, K), HV = len(table.chunk_start), x.q.shape[1:], x.v.shape[1]
    t = c.tuning.tile(stage_name("intra", rule, x.q.dtype), K, x.v.shape[2], x.q.dtype)
    launch(
        intra_kernel,
        (NC, HV),
        x.q,
        x.k,
        x.g,
        x.beta,
        x.A_log,
        x.dt_bias,
        sums(x.q.dtype, x.q.device),
        c.qg,
        c.k_decayed,
        c.kg,
        c.T,
        c.Aqk,
        c.decay,
        c.anchors,
        c.rows,
        table.chunk_start,
        table.chunk_rows,
        *x.q.stride()[:2],
        *x.k.stride()[:2],
        *x.g.stride()[:2],
        0 if x.beta is None else x.beta.stride(0),
        cdiv(K, t.BK),
        rule.scale,
        rule.lower_bound or 0.0,
        rule.beta_factor or 1.0,
        HV=HV,
        G=HV // H,
        K=K,
        BT=CHUNK,
        BK=t.BK,
        BETA_SIGMOID=rule.beta_factor is not None,
        EPS=NORM_EPS,
        num_warps=t.warps,
        NS=t.stages,
        maxnreg=t.registers,
        TERMS=c.terms,
        **gate_options(rule, x.q.dtype),
    )


def empty_gated(rule: DeltaRule, NC: int, x: Inputs) -> tuple[Tensor, Tensor, Tensor]:
    """Memory for qg, kin and kg."""
    shape = (NC, x.v.shape[1], CHUNK, x.q.shape[2])
    k_decayed = (0,) if rule.removal == "none" else shape
    return x.q.new_empty(shape), x.q.new_empty(k_decayed), x.q.new_empty(shape)


def gated_operands(
    rule: DeltaRule,
    packing: Packing,
    x: Inputs,
    rows: Tensor,
    anchors: Tensor,
    tuning: Tuning = TUNING,
) -> tuple[Tensor, Tensor, Tensor]:
    """qg, kin and kg of the forward, formed again; with a decay a channel."""
    x = Inputs(*(None if t is None else unit_rows(t) for t in x))  # type: ignore[arg-type]
    table = tables(packing, x.q.device)
    NC, (H, K), (HV, V) = len(table.chunk_start), x.q.shape[1:], x.v.shape[1:]
    t = tuning.tile("gated", K, V, x.q.dtype)
    qg, k_decayed, kg = empty_gated(rule, NC, x)
    options = gate_options(rule, x.q.dtype)
    del options["NORM"]
    if NC:
        launch(
            gated_kernel,
            (NC * cdiv(K, t.BK), HV),
            x.q,
            x.k,
            x.g,
            x.A_log,
            x.dt_bias,
            sums(x.q.dtype, x.q.device),
            qg,
            k_decayed,
            kg,
            anchors,
            rows,
            table.chunk_start,
            table.chunk_rows,
            *x.q.stride()[:2],
            *x.k.stride()[:2],
            *x.g.stride()[:2],
            rule.lower_bound or 0.0,
            HV=HV,
            G=HV // H,
            K=K,
            BT=CHUNK,
            BK=t.BK,
            num_warps=t.warps,
            **options,
        )
    return qg, k_decayed, kg
