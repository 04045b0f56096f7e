"""Everything local to a chunk with one decay a head.

The decay of a pair of tokens is one number and multiplies their score. No exponent is above zero
for any gate, so there is one path.

The backward has three kernels. The first forms the gradients of the scores, weighted with decays,
norms and scale (W). The second forms dq, with W k, and dk, with W^T q, in a program per chunk, key
tile and head; with groups dq and dk have a kernel each, in which a program goes through the value
heads of its group and sums over them in registers, because both sums beside the products would
spill. The third forms the gradient of the gate: per row the sum over channels of row factors times
their gradients, less column factors times theirs. The factors are those that the products saw: the
inputs as given, with norms and scale in W."""

import functools
import math
from collections.abc import Callable

import triton
import triton.language as tl

from fla_cp.kernels.torch.intra import Inputs
from fla_cp.kernels.triton.device import planes
from fla_cp.kernels.triton.device.blocks import (
    EPS,
    dot,
    load_rows,
    row_products,
    rows_from,
    store_square,
)
from fla_cp.kernels.triton.device.bundles import beta, gate, rows, rule_options
from fla_cp.kernels.triton.device.gates import away_from_zero, load_beta
from fla_cp.kernels.triton.device.headwise_decay import (
    decay_of,
    decay_to_end,
    decays,
    last_of,
    load_head_gate,
    running_sums,
    total_of,
)
from fla_cp.kernels.triton.device.inverse import needs_nearest, unit_lower_inverse
from fla_cp.kernels.triton.generations import choose, kernels_of
from fla_cp.kernels.triton.launch import launch
from fla_cp.kernels.triton.operands import Chunks, tables
from fla_cp.partition.packing import Packing


@triton.jit
def head_rows_kernel(gate, beta, rows, chunks, S: tl.constexpr, R: tl.constexpr, BH: tl.constexpr):
    """Writes the planes of rows [NC, HV, 9, C] that need neither q nor k: beta, and gc up to each
    row and up to the row before. A program has BH heads of a chunk."""
    i_c = tl.program_id(0).to(tl.int64)
    i = tl.arange(0, S.BT)[:, None]
    m_i = i < tl.load(chunks.rows + i_c)
    start = tl.load(chunks.start + i_c).to(tl.int64)
    o_h = tl.program_id(1) * BH + tl.arange(0, BH)[None, :]
    to = rows + (i_c * S.HV + o_h) * planes.HEADWISE_PLANES * S.BT + i
    _raw, _rate, b_g = load_head_gate(gate, start, o_h, i, m_i, R.GATE, R.EXP2)
    (gc,) = running_sums(b_g, tl.bfloat16)
    tl.store(to + planes.GC * S.BT, gc)
    if S.REMOVAL == "p":
        (before,) = running_sums(b_g, tl.bfloat16, True)
        tl.store(to + planes.GC_BEFORE * S.BT, before)
    else:
        tl.store(to + planes.GC_BEFORE * S.BT, gc)
    b_beta = load_beta(beta, start, o_h, i, m_i, R.BETA_SIGMOID)
    tl.store(to, away_from_zero(b_beta, m_i) + tl.zeros_like(b_g))


@triton.jit
def intra_head_kernel(
    q, k, p, gate, beta, out, chunks, first, scale, S: tl.constexpr, R: tl.constexpr
):
    """q, k, p: `Rows`; gate: `Gate`; beta: `Beta`; out: `Formed`; chunks: `ChunkTable`. Writes, for
    the chunks from `first` on, Aqk, T where the rule removes something, decay [NC, HV, K], the same
    number K times, and all planes of rows."""
    i_c, i_hv = (first + tl.program_id(0)).to(tl.int64), tl.program_id(1).to(tl.int64)
    i_h = i_hv // S.G
    i = tl.arange(0, S.BT)
    m_i = i < tl.load(chunks.rows + i_c)
    start = tl.load(chunks.start + i_c).to(tl.int64)
    q = rows_from(q, start, i_h)
    k = rows_from(k, start, i_h)
    i_ch = i_c * S.HV + i_hv
    operand = out.Aqk.dtype.element_ty

    b_beta = away_from_zero(load_beta(beta, start, i_hv, i, m_i, R.BETA_SIGMOID), m_i)
    if S.REMOVAL == "p":
        p = rows_from(p, start, i_h)

    _raw, _rate, b_g = load_head_gate(gate, start, i_hv, i, m_i, R.GATE, R.EXP2)

    # These are the scores of the inputs as given; norms and decays multiply them afterwards. Only
    # products may read what the loop loads (`overwritten` in tests/aot/), except in fp32, whose
    # products are waited for.
    diagonal = tl.zeros_like(b_beta)
    qq, kk, pp = diagonal, diagonal, diagonal
    if operand != tl.float32:
        diagonal, qq, kk = row_products(q, k, i, m_i, S.K, S.BK, R.NORM)
    b_qk = tl.zeros([S.BT, S.BT], tl.float32)
    b_kk = tl.zeros([S.BT, S.BT], tl.float32)
    for i_k in tl.range((S.K + S.BK - 1) // S.BK, num_stages=S.NS):
        o_k = i_k * S.BK + tl.arange(0, S.BK)
        b_q = load_rows(q, i, m_i, o_k, S.K)
        b_k = load_rows(k, i, m_i, o_k, S.K)
        if operand == tl.float32:
            diagonal += tl.sum(b_q * b_k, axis=1)
            if R.NORM:
                qq += tl.sum(b_q * b_q, axis=1)
                kk += tl.sum(b_k * b_k, axis=1)
        b_qk = dot(b_q, tl.trans(b_k), S.PRECISION, acc=b_qk)
        b_r = b_k
        if S.REMOVAL == "p":
            if operand == tl.float32:  # p is not loaded before this product, to free registers
                tl.debug_barrier()
            b_r = load_rows(p, i, m_i, o_k, S.K)
            if R.NORM and operand == tl.float32:
                pp += tl.sum(b_r * b_r, axis=1)
        if S.REMOVAL != "none":
            b_kk = dot(b_r, tl.trans(b_k), S.PRECISION, acc=b_kk)
    q_scale = tl.zeros_like(b_beta) + scale
    k_scale = tl.zeros_like(b_beta) + 1.0
    r_scale = k_scale
    if R.NORM:
        q_scale *= tl.rsqrt(qq + EPS)
        k_scale *= tl.rsqrt(kk + EPS)
        r_scale = k_scale
        if S.REMOVAL == "p":
            if operand != tl.float32:
                _, pp, _ = row_products(p, p, i, m_i, S.K, S.BK, R.NORM)
            r_scale = tl.rsqrt(pp + EPS)

    gc = running_sums(b_g, operand)
    before = running_sums(b_g, operand, True) if S.REMOVAL == "p" else gc
    e = decay_of(gc, R.EXP2)
    rows = out.rows + i_ch * planes.HEADWISE_PLANES * S.BT + i
    tl.store(rows, b_beta)
    tl.store(rows + planes.Q_SCALE * S.BT, q_scale)
    tl.store(rows + planes.K_SCALE * S.BT, k_scale)
    tl.store(rows + planes.R_SCALE * S.BT, r_scale)
    tl.store(rows + planes.Q_FACTOR * S.BT, q_scale * e)
    tl.store(rows + planes.R_FACTOR * S.BT, r_scale * decay_of(before, R.EXP2))
    tl.store(rows + planes.K_FACTOR * S.BT, k_scale * decay_to_end(gc, i, R.EXP2))
    tl.store(rows + planes.GC * S.BT, total_of(gc))
    tl.store(rows + planes.GC_BEFORE * S.BT, total_of(before))
    whole = last_of(e, i)
    for i_k in range((S.K + S.BK - 1) // S.BK):
        o_k = i_k * S.BK + tl.arange(0, S.BK)
        tl.store(out.decay + i_ch * S.K + o_k, tl.zeros([S.BK], tl.float32) + whole, mask=o_k < S.K)
    scales = q_scale[:, None] * k_scale[None, :]
    b_qk *= scales * decays(gc, gc, i, R.EXP2)
    b_qk += tl.where(i[:, None] == i[None, :], (diagonal * q_scale * k_scale)[:, None], 0.0)
    store_square(out.Aqk, i_ch, b_qk, i, S.TERMS)
    if S.REMOVAL != "none":
        b_kk *= (b_beta * r_scale)[:, None] * k_scale[None, :]
        b_kk *= decays(before, gc, i, R.EXP2)
        same = (i // 16)[:, None] == (i // 16)[None, :]
        b_16 = tl.reshape(tl.where(same, b_kk, 0.0), [S.BT // 16, 16, S.BT // 16, 16])
        NEAREST: tl.constexpr = needs_nearest(S.TERMS, operand)
        b_T = unit_lower_inverse(b_kk, tl.sum(b_16, axis=2), S.BT, NEAREST, S.PRECISION)
        store_square(out.T, i_ch, b_T, i, S.TERMS)


HEADS = 16
"""The most heads of a program that handles one number a token and head. Neighbouring heads are
neighbours in memory, so that several of them are read at once."""


def heads_of_a_program(HV: int) -> int:
    """How many heads such a program has: a power of two that divides HV, so that no mask hides from
    the compiler that their addresses follow each other."""
    return math.gcd(HV, HEADS)


def intra_headwise(packing: Packing, x: Inputs, c: Chunks) -> Callable[[int, int], None]:
    """With one decay a head: returns a call (first, stop) that fills the chunks of c from `first`
    to before `stop`."""
    rule, table, dtype = c.rule, tables(packing, x.q.device), x.q.dtype
    (NC, HV, K), V = c.decay.shape, x.v.shape[2]
    folder = choose(packing, c)
    if folder != "triton" and not kernels_of(folder).intra_headwise.reads(x):
        folder = "triton"
    t = c.tuning.tile("intra_head", K, V, dtype, 0, folder)
    if c.terms > 1:
        t = t._replace(registers=None)  # would spill
    S, R = c.shape(t), rule_options(rule, dtype)
    given = gate(rule, x), beta(rule, x)
    if t.folder != "triton":
        BH = heads_of_a_program(HV)
        launch(head_rows_kernel, (NC, HV // BH), *given, c.rows, table.chunks, S, R, BH)
        return functools.partial(kernels_of(t.folder).intra_headwise.intra_head, table, x, c)
    qkp, out = (rows(x.q), rows(x.k), rows(x.p)), c.formed()
    compiled = {"S": S, "R": R, "num_warps": t.warps, "maxnreg": t.registers}

    def form(first: int, stop: int) -> None:
        rest = out, table.chunks, first, rule.scale
        launch(intra_head_kernel, (stop - first, HV), *qkp, *given, *rest, **compiled)

    return form
