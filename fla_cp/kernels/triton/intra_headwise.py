"""Local to a chunk with one decay a head; long because a kernel is its list of arguments.

The decay of a pair of tokens is one number and multiplies their score. No exponent is above zero
for any gate, so there is one path.

Backward in three kernels: the scores' gradients, weighted with decays, norms and scale (W); dq,
with W k, and dk, with W^T q, by a program per chunk, key tile and head; and the gate's. Of groups
dq and dk have a kernel each, in which a program goes through the value heads of its group and sums
over them in registers: sums of both beside the products would spill. The gate's gradient is, per
row, the sum over channels of row factors times their gradients less column factors times theirs, as
the products saw the factors: the inputs as they are, with norms and scale in W, so that their
gradients come out as they are.
"""

import functools
from collections.abc import Callable

import triton
import triton.language as tl

from fla_cp.kernels.sm90 import eligible
from fla_cp.kernels.torch.intra import Inputs
from fla_cp.kernels.triton import tile_table
from fla_cp.kernels.triton.device.blocks import dot, load_rows, row_products, store_square
from fla_cp.kernels.triton.device.gates import GATES, sigmoid
from fla_cp.kernels.triton.device.headwise_decay import (
    decay_of,
    decay_to_end,
    decays,
    last_of,
    load_head_gate,
    running_sums,
    total_of,
)
from fla_cp.kernels.triton.device.inverse import unit_lower_inverse
from fla_cp.kernels.triton.device.planes import (
    GC,
    GC_BEFORE,
    HEADWISE_PLANES,
    K_FACTOR,
    K_SCALE,
    Q_FACTOR,
    Q_SCALE,
    R_FACTOR,
    R_SCALE,
)
from fla_cp.kernels.triton.launch import cdiv, launch
from fla_cp.kernels.triton.operands import Chunks, precision, tables
from fla_cp.partition.packing import Packing
from fla_cp.rule import CHUNK, NORM_EPS, DeltaRule


@triton.jit
def head_rows_kernel(
    g,
    beta,
    A_log,
    dt_bias,
    rows,
    chunk_start,
    chunk_rows,
    g_t,
    beta_t,
    bound,
    beta_factor,
    HV: tl.constexpr,
    BT: tl.constexpr,
    BH: tl.constexpr,
    GATE: tl.constexpr,
    BETA_SIGMOID: tl.constexpr,
    EXP2: tl.constexpr,
    REMOVAL: tl.constexpr,
):
    """Of the planes of rows [NC, HV, 9, C] those that need neither q nor k: beta, and gc up to each
    row and up to the one before. A program has BH heads of a chunk."""
    i_c = tl.program_id(0).to(tl.int64)
    i = tl.arange(0, BT)[:, None]
    m_i = i < tl.load(chunk_rows + i_c)
    start = tl.load(chunk_start + i_c).to(tl.int64)
    o_h = tl.minimum(tl.program_id(1) * BH + tl.arange(0, BH), HV - 1)  # the last one repeatedly
    to = rows + ((i_c * HV + o_h) * HEADWISE_PLANES * BT)[None, :] + i
    p_g = g + o_h[None, :] + start * g_t
    _raw, _rate, b_g = load_head_gate(p_g, A_log, dt_bias, o_h, i, g_t, m_i, bound, GATE, EXP2)
    (gc,) = running_sums(b_g, tl.bfloat16)
    tl.store(to + GC * BT, gc)
    if REMOVAL == "p":
        (before,) = running_sums(b_g, tl.bfloat16, True)
        tl.store(to + GC_BEFORE * BT, before)
    else:
        tl.store(to + GC_BEFORE * BT, gc)
    b_beta = tl.where(m_i, 1.0, tl.zeros_like(b_g))
    if beta is not None:
        at = beta + o_h[None, :] + (start + i) * beta_t
        b_beta = tl.load(at, mask=m_i, other=0.0).to(tl.float32)
    if BETA_SIGMOID:
        b_beta = tl.where(m_i, beta_factor * sigmoid(b_beta), 0.0)
    tl.store(to, b_beta)


@triton.jit
def intra_head_kernel(
    q,
    k,
    p,
    g,
    beta,
    A_log,
    dt_bias,
    T,
    Aqk,
    decay,
    rows,
    chunk_start,
    chunk_rows,
    first,
    q_t,
    q_h,
    k_t,
    k_h,
    p_t,
    p_h,
    g_t,
    beta_t,
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
    EXP2: tl.constexpr,
    REMOVAL: tl.constexpr,
    EPS: tl.constexpr,
    TERMS: tl.constexpr,
    PRECISION: tl.constexpr,
    NS: tl.constexpr,
):
    """T and Aqk (no T where nothing is removed); decay [NC, HV, K], the same number K
    times; rows [NC, HV, 9, C], fp32: beta; what q, k and r (k or p, which reads the state) are
    multiplied by; and by what in the scans (scan.py): q, r, and k where it writes; gc, up to each
    row and up to the one before. Of chunks from the first."""
    i_c, i_hv = (first + tl.program_id(0)).to(tl.int64), tl.program_id(1).to(tl.int64)
    i_h = i_hv // G
    i = tl.arange(0, BT)
    m_i = i < tl.load(chunk_rows + i_c)
    start = tl.load(chunk_start + i_c).to(tl.int64)
    q += i_h * q_h + start * q_t
    k += i_h * k_h + start * k_t
    g += i_hv + start * g_t
    i_ch = i_c * HV + i_hv
    operand = T.dtype.element_ty

    b_beta = tl.where(m_i, 1.0, 0.0)
    if beta is not None:
        beta += i_hv + start * beta_t
        b_beta = tl.load(beta + i * beta_t, mask=m_i, other=0.0).to(tl.float32)
    if BETA_SIGMOID:
        b_beta = tl.where(m_i, beta_factor * sigmoid(b_beta), 0.0)
    if REMOVAL == "p":
        p += i_h * p_h + start * p_t

    _raw, _rate, b_g = load_head_gate(g, A_log, dt_bias, i_hv, i, g_t, m_i, bound, GATE, EXP2)

    # Scores of the inputs as they are: the norms and decays multiply them afterwards. What the loop
    # loads is for products alone: see `overwritten` in tests/aot/. Those of fp32 are waited for.
    diagonal = tl.zeros_like(b_beta)
    qq, kk, pp = diagonal, diagonal, diagonal
    if operand != tl.float32:
        diagonal, qq, kk = row_products(q, k, i, q_t, k_t, m_i, K, BK, NORM)
    b_qk = tl.zeros([BT, BT], tl.float32)
    b_kk = tl.zeros([BT, BT], tl.float32)
    for i_k in tl.range((K + BK - 1) // BK, num_stages=NS):
        o_k = i_k * BK + tl.arange(0, BK)
        b_q = load_rows(q, i, q_t, m_i, o_k, K)
        b_k = load_rows(k, i, k_t, m_i, o_k, K)
        if operand == tl.float32:
            diagonal += tl.sum(b_q * b_k, axis=1)
            if NORM:
                qq += tl.sum(b_q * b_q, axis=1)
                kk += tl.sum(b_k * b_k, axis=1)
        b_qk = dot(b_q, tl.trans(b_k), PRECISION, acc=b_qk)
        b_r = b_k
        if REMOVAL == "p":
            if operand == tl.float32:  # for registers: p not loaded before this product
                tl.debug_barrier()
            b_r = load_rows(p, i, p_t, m_i, o_k, K)
            if NORM and operand == tl.float32:
                pp += tl.sum(b_r * b_r, axis=1)
        if REMOVAL != "none":
            b_kk = dot(b_r, tl.trans(b_k), PRECISION, acc=b_kk)
    q_scale = tl.zeros_like(b_beta) + scale
    k_scale = tl.zeros_like(b_beta) + 1.0
    r_scale = k_scale
    if NORM:
        q_scale *= tl.rsqrt(qq + EPS)
        k_scale *= tl.rsqrt(kk + EPS)
        r_scale = k_scale
        if REMOVAL == "p":
            if operand != tl.float32:
                _, pp, _ = row_products(p, p, i, p_t, p_t, m_i, K, BK, NORM)
            r_scale = tl.rsqrt(pp + EPS)

    gc = running_sums(b_g, operand)
    before = running_sums(b_g, operand, True) if REMOVAL == "p" else gc
    e = decay_of(gc, EXP2)
    rows += i_ch * HEADWISE_PLANES * BT + i
    tl.store(rows, b_beta)
    tl.store(rows + Q_SCALE * BT, q_scale)
    tl.store(rows + K_SCALE * BT, k_scale)
    tl.store(rows + R_SCALE * BT, r_scale)
    tl.store(rows + Q_FACTOR * BT, q_scale * e)
    tl.store(rows + R_FACTOR * BT, r_scale * decay_of(before, EXP2))
    tl.store(rows + K_FACTOR * BT, k_scale * decay_to_end(gc, i, EXP2))
    tl.store(rows + GC * BT, total_of(gc))
    tl.store(rows + GC_BEFORE * BT, total_of(before))
    whole = last_of(e, i)
    for i_k in range((K + BK - 1) // BK):
        o_k = i_k * BK + tl.arange(0, BK)
        tl.store(decay + i_ch * K + o_k, tl.zeros([BK], tl.float32) + whole, mask=o_k < K)
    scales = q_scale[:, None] * k_scale[None, :]
    b_qk *= scales * decays(gc, gc, i, EXP2)
    b_qk += tl.where(i[:, None] == i[None, :], (diagonal * q_scale * k_scale)[:, None], 0.0)
    store_square(Aqk, i_ch, b_qk, i, TERMS)
    if REMOVAL != "none":
        b_kk *= (b_beta * r_scale)[:, None] * k_scale[None, :]
        b_kk *= decays(before, gc, i, EXP2)
        same = (i // 16)[:, None] == (i // 16)[None, :]
        b_16 = tl.reshape(tl.where(same, b_kk, 0.0), [BT // 16, 16, BT // 16, 16])
        b_T = unit_lower_inverse(b_kk, tl.sum(b_16, axis=2), BT, TERMS, PRECISION)
        store_square(T, i_ch, b_T, i, TERMS)


def intra_headwise(
    rule: DeltaRule, packing: Packing, c: Chunks, x: Inputs
) -> Callable[[int, int], None]:
    """One decay a head. Returns a call that forms the chunks from a first to before another."""
    table = tables(packing, x.q.device)
    NC, (H, K), (HV, V) = len(table.chunk_start), x.q.shape[1:], x.v.shape[1:]
    whole = eligible.supports(c) and eligible.pays(packing, c)
    whole = whole and eligible.sm90_intra.reads(x)
    t = c.tuning.tile("intra_head", K, V, x.q.dtype, 0, whole)
    if c.terms > 1:
        t = t._replace(registers=None)  # would spill
    p_strides = (0, 0) if x.p is None else x.p.stride()[:2]
    strides = x.g.stride(0), 0 if x.beta is None else x.beta.stride(0)
    bounds = rule.lower_bound or 0.0, rule.beta_factor or 1.0
    given = x.A_log, x.dt_bias
    shared = {
        "HV": HV,
        "BT": CHUNK,
        "GATE": GATES[rule.gate][0],
        "BETA_SIGMOID": rule.beta_factor is not None,
        "EXP2": rule.use_exp2,
        "REMOVAL": rule.removal,
    }
    where = table.chunk_start, table.chunk_rows
    if t.hopper:
        BH = min(32, tile_table.power_of_two(HV))
        grid = NC, cdiv(HV, BH)
        some = x.g, x.beta, *given, c.rows, *where, *strides, *bounds
        launch(head_rows_kernel, grid, *some, BH=BH, **shared)
        return functools.partial(eligible.sm90_intra.intra_head, rule, table, x, c)

    def form(first: int, stop: int) -> None:
        launch(
            intra_head_kernel,
            (stop - first, HV),
            x.q,
            x.k,
            x.p,
            x.g,
            x.beta,
            *given,
            c.T,
            c.Aqk,
            c.decay,
            c.rows,
            *where,
            first,
            *x.q.stride()[:2],
            *x.k.stride()[:2],
            *p_strides,
            *strides,
            rule.scale,
            *bounds,
            G=HV // H,
            K=K,
            BK=t.BK,
            NORM=rule.qk_l2norm,
            EPS=NORM_EPS,
            TERMS=c.terms,
            PRECISION=precision(x.q.dtype),
            NS=t.stages,
            num_warps=t.warps,
            maxnreg=t.registers,
            **shared,
        )

    return form
