"""Everything local to a chunk with one decay a channel, in one pass over q, k, g and beta.

For each (chunk, value head) the kernel forms the gate, the norms, the cumulative sums, Aqk, Akk and
T = (I + Akk)^-1. It writes, in the operands' dtype and chunk by chunk, qg = scale q exp(gc),
k_decayed = k exp(gc), kg = k exp(gc_C - gc), T and Aqk (with scale), and in fp32 decay = exp(gc_C),
the activated beta and the factors of the rows. The path of a safe gate also writes gc of rows 15,
31, 47 and 63 (anchors). Any gate takes this path too in bf16: the kernel is launched once for each
path. The first launch serves all chunks. The second finds those whose decays are too strong for the
first path, marks them (steep) and writes what belongs to them again.

Scores on the path of a safe gate: columns refer to the middle row m of their half of 32 rows,
k_j exp(gc_m - gc_j). The exponent stays below 16 * 5 / ln 2 = 116 and so within the range of bf16.
Rows refer once to the middle of the first half and once to that of their own half, and each of the
two products takes the columns of one half. A chunk of at most 32 rows is one half.

Scores on the path of any gate: the chunk is halved repeatedly. For pairs of neighbouring blocks of
S rows (S = 32, 16, .., 1), all rows of second blocks meet all columns of first blocks in one
[BT, K] x [K, BT] product, with the last row of the first block as reference. Every exponent is at
most zero, and what lies outside the pairs is masked away.

If p reads the state before the decay (DPLR), its rows take the place of k's in Akk and k_decayed,
with the sums of decays up to the row before."""

import functools
from collections.abc import Callable

import triton
import triton.language as tl
from torch import Tensor

from fla_cp.kernels.torch.intra import Inputs
from fla_cp.kernels.triton.device import planes
from fla_cp.kernels.triton.device.blocks import (
    EPS,
    apply_sums,
    decay_exp,
    dot,
    load_rows,
    load_sums,
    pair_mask,
    parts,
    rounded_off,
    row_products,
    rows_from,
    store_block,
    store_square,
    sum_steps,
    unit_rows,
)
from fla_cp.kernels.triton.device.bundles import (
    Formed,
    Rows,
    beta,
    gate,
    local_paths,
    rows,
    rule_options,
    shape,
)
from fla_cp.kernels.triton.device.channelwise_decay import (
    before,
    blocks_of_16,
    is_steep,
    load_steps,
)
from fla_cp.kernels.triton.device.decay_sums import (
    AFTER,
    FIRST,
    MIDDLE,
    PAIR,
    UP_TO,
    sums,
    widest_level,
)
from fla_cp.kernels.triton.device.gates import load_beta
from fla_cp.kernels.triton.device.inverse import needs_nearest, unit_lower_inverse
from fla_cp.kernels.triton.device.opaque import opaque
from fla_cp.kernels.triton.generations import choose, kernels_of
from fla_cp.kernels.triton.launch import cdiv, launch
from fla_cp.kernels.triton.operands import Chunks, own, tables
from fla_cp.kernels.triton.tile_table import TUNING, Tuning
from fla_cp.partition.packing import Packing
from fla_cp.rule import DeltaRule


@triton.jit
def intra_kernel(q, k, p, gate, beta, sums, out, chunks, scale, S: tl.constexpr, R: tl.constexpr):
    """q, k, p: `Rows`, p None where k reads the state; out: `Formed`; chunks: `ChunkTable`. Where
    the rule removes nothing (GLA) neither k_decayed nor T is written."""
    i_c, i_hv = tl.program_id(0).to(tl.int64), tl.program_id(1).to(tl.int64)
    i_h = i_hv // S.G
    o_i = tl.arange(0, S.BT)
    n_rows = tl.load(chunks.rows + i_c)
    m_i = o_i < n_rows
    start = tl.load(chunks.start + i_c).to(tl.int64)
    q = rows_from(q, start, i_h)
    k = rows_from(k, start, i_h)
    if S.REMOVAL == "p":
        p = rows_from(p, start, i_h)
    i_ch = i_c * S.HV + i_hv
    operand = out.k_decayed.dtype.element_ty
    if R.BY_CHUNK:
        steep = is_steep(out.anchors + i_ch * (S.BT // 16) * S.K, S, R)
        tl.store(out.steep + i_ch, steep.to(tl.int32))
        if not steep:
            return

    b_beta = load_beta(beta, start, i_hv, o_i, m_i, R.BETA_SIGMOID)
    q_scale = tl.zeros_like(b_beta) + scale
    k_scale = tl.zeros_like(b_beta) + 1.0
    BK: tl.constexpr = 2 * S.BK if S.REMOVAL == "p" else S.BK  # 16 tiles of 16 channels would spill
    diagonal, qq, kk = row_products(q, k, o_i, m_i, S.K, BK, R.NORM)
    if R.NORM:
        q_scale *= tl.rsqrt(qq + EPS)
        k_scale *= tl.rsqrt(kk + EPS)
    diagonal *= q_scale * k_scale  # stored until the end, to free registers
    p_diagonal = out.Aqk + (i_ch * (S.TERMS * S.BT) + o_i) * S.BT + o_i
    tl.store(p_diagonal, diagonal.to(operand))
    if S.TERMS > 1:
        tl.store(p_diagonal + S.BT * S.BT, rounded_off(diagonal, operand))
    row = out.rows + i_ch * planes.CHANNELWISE_PLANES * S.BT + o_i
    tl.store(row, b_beta)
    tl.store(row + planes.Q_SCALE * S.BT, q_scale)
    tl.store(row + planes.K_SCALE * S.BT, k_scale)

    b_qk = tl.zeros([S.BT, S.BT], tl.float32)
    b_kk = tl.zeros([S.BT, S.BT], tl.float32)
    b_16 = tl.zeros([S.BT // 16, 16, 16], tl.float32)
    if R.SAFE:
        e_upto = load_sums(sums, UP_TO, o_i)
        e_after = load_sums(sums, AFTER, o_i)
        e_middle = load_sums(sums, MIDDLE, o_i)
        if S.BT > 32:
            e_first = load_sums(sums, FIRST, o_i)
    for i_k in tl.range((S.K + S.BK - 1) // S.BK, num_stages=S.NS):
        o_k = i_k * S.BK + tl.arange(0, S.BK)
        b_g = load_steps(gate, start, i_hv, o_i, m_i, o_k, S, R)
        steps = parts(b_g, operand)
        b_q = load_rows(q, o_i, m_i, o_k, S.K).to(tl.float32) * q_scale[:, None]
        b_k = load_rows(k, o_i, m_i, o_k, S.K).to(tl.float32) * k_scale[:, None]
        d = apply_sums(e_upto if R.SAFE else load_sums(sums, UP_TO, o_i), steps, S.PRECISION)
        # Form the addresses again, so that none stays in registers from tile to tile.
        r, c = opaque(o_i, n_rows + i_k, S.BT, 1000), opaque(o_k, n_rows + i_k, S.BT, 1000)
        ch = opaque(i_ch, n_rows + i_k, S.BT, 1000)
        last = tl.broadcast_to(c[None, :], [S.BT, S.BK])
        if R.SAFE:
            place = (ch * (S.BT // 16) + r // 16)[:, None] * S.K + last
            at = (r % 16 == 15)[:, None] & (c < S.K)[None, :]
            tl.store(out.anchors + place, d, mask=at)
        e = decay_exp(d, R.EXP2)
        store_block(out.qg + ch * S.BT * S.K, b_q * e, r, c, S.BT, S.K)
        if S.REMOVAL == "k":
            store_block(out.k_decayed + ch * S.BT * S.K, b_k * e, r, c, S.BT, S.K)
        if S.REMOVAL == "p":
            b_p = load_rows(p, o_i, m_i, o_k, S.K).to(tl.float32)
            f = decay_exp(before(d, steps), R.EXP2)
            store_block(out.k_decayed + ch * S.BT * S.K, b_p * f, r, c, S.BT, S.K)
        at = (r == S.BT - 1)[:, None] & (c < S.K)[None, :]
        tl.store(out.decay + ch * S.K + last, e, mask=at)
        d = apply_sums(e_after if R.SAFE else load_sums(sums, AFTER, o_i), steps, S.PRECISION)
        e = decay_exp(d, R.EXP2)
        store_block(out.kg + ch * S.BT * S.K, b_k * e, r, c, S.BT, S.K)
        if R.SAFE:
            d = apply_sums(e_middle, steps, S.PRECISION)
            col = b_k * decay_exp(-d, R.EXP2)
            f = decay_exp(d, R.EXP2)
            b_kf = (b_k * f).to(operand)
            if S.REMOVAL == "p":
                b_kf = (b_p * decay_exp(before(d, steps), R.EXP2)).to(operand)
            if S.REMOVAL != "none":
                near = tl.permute(blocks_of_16(col.to(operand)), (0, 2, 1))
                b_16 = dot(blocks_of_16(b_kf), near, S.PRECISION, acc=b_16)
            half = col if S.BT <= 32 else tl.where((o_i >= 32)[:, None], col, 0.0)
            half = tl.trans(half.to(operand))
            b_qk = dot((b_q * f).to(operand), half, S.PRECISION, acc=b_qk)
            if S.REMOVAL != "none":
                b_kk = dot(b_kf, half, S.PRECISION, acc=b_kk)
            if S.BT > 32:
                half = tl.trans(tl.where((o_i < 32)[:, None], col, 0.0).to(operand))
                d = apply_sums(e_first, steps, S.PRECISION)
                f = decay_exp(d, R.EXP2)
                b_qk = dot((b_q * f).to(operand), half, S.PRECISION, acc=b_qk)
                if S.REMOVAL == "k":
                    b_kk = dot((b_k * f).to(operand), half, S.PRECISION, acc=b_kk)
                if S.REMOVAL == "p":
                    f = decay_exp(before(d, steps), R.EXP2)
                    b_kk = dot((b_p * f).to(operand), half, S.PRECISION, acc=b_kk)
        else:
            for level in tl.range(widest_level(S.BT), 6, disable_licm=True):
                if S.REMOVAL == "p":  # all inputs are loaded again, to free registers
                    r = opaque(o_i, n_rows + level, S.BT, 2000)
                    m_r = r < n_rows
                    tl.debug_barrier()
                    b_q = load_rows(q, r, m_r, o_k, S.K).to(tl.float32) * scale
                    b_k = load_rows(k, r, m_r, o_k, S.K).to(tl.float32)
                d = sum_steps(sums, PAIR + level, o_i, steps, S.PRECISION)
                f = decay_exp(d, R.EXP2)
                b_kf = (b_k * f).to(operand)
                mask = pair_mask(o_i, 5 - level)
                b_qf = (b_q * f).to(operand)
                b_qk += tl.where(mask, dot(b_qf, tl.trans(b_kf), S.PRECISION), 0.0)
                if S.REMOVAL == "k":
                    b_kk += tl.where(mask, dot(b_kf, tl.trans(b_kf), S.PRECISION), 0.0)
                if S.REMOVAL == "p":  # at most zero in second blocks, whose rows are not masked
                    f = decay_exp(tl.minimum(before(d, steps), 0.0), R.EXP2)
                    tl.debug_barrier()  # nothing is loaded earlier
                    b_p = load_rows(p, r, m_r, o_k, S.K).to(tl.float32)
                    b_pf = (b_p * f).to(operand)
                    b_kk += tl.where(mask, dot(b_pf, tl.trans(b_kf), S.PRECISION), 0.0)
    tl.debug_barrier()
    i_ch = opaque(i_ch, n_rows, S.BT, 1)
    if R.SAFE:
        o_i = opaque(o_i, n_rows, S.BT, 1)
    b_beta = tl.load(out.rows + i_ch * planes.CHANNELWISE_PLANES * S.BT + o_i)
    p_diagonal = out.Aqk + (i_ch * (S.TERMS * S.BT) + o_i) * S.BT + o_i
    diagonal = tl.load(p_diagonal).to(tl.float32)
    if S.TERMS > 1:
        diagonal += tl.load(p_diagonal + S.BT * S.BT).to(tl.float32)
    below = o_i[:, None] > o_i[None, :]
    b_qk = tl.where(below, b_qk, 0.0)
    b_qk = tl.where(o_i[:, None] == o_i[None, :], diagonal[:, None], b_qk)
    store_square(out.Aqk, i_ch, b_qk, o_i, S.TERMS)
    if S.REMOVAL != "none":
        b_kk = tl.where(below, b_kk, 0.0) * b_beta[:, None]
        if R.SAFE:
            b_16 *= tl.reshape(b_beta, [S.BT // 16, 16])[:, :, None]
        else:
            same = (o_i // 16)[:, None] == (o_i // 16)[None, :]
            b_16 = tl.reshape(tl.where(same, b_kk, 0.0), [S.BT // 16, 16, S.BT // 16, 16])
            b_16 = tl.sum(b_16, axis=2)
        NEAREST: tl.constexpr = needs_nearest(S.TERMS, operand)
        b_T = unit_lower_inverse(b_kk, b_16, S.BT, NEAREST, S.PRECISION)
        store_square(out.T, i_ch, b_T, o_i, S.TERMS)


@triton.jit
def gated_kernel(q, k, p, gate, sums, out, chunks, S: tl.constexpr, R: tl.constexpr):
    """Recomputes qg, k_decayed and kg from the rows and anchors that `intra_kernel` wrote. A
    program has a (chunk, key tile) and a head."""
    tiles: tl.constexpr = (S.K + S.BK - 1) // S.BK
    i_c, i_hv = (tl.program_id(0) // tiles).to(tl.int64), tl.program_id(1).to(tl.int64)
    i_h = i_hv // S.G
    o_i = tl.arange(0, S.BT)
    o_k = tl.program_id(0) % tiles * S.BK + tl.arange(0, S.BK)
    m_i = o_i < tl.load(chunks.rows + i_c)
    start = tl.load(chunks.start + i_c).to(tl.int64)
    i_ch = i_c * S.HV + i_hv
    row = out.rows + i_ch * planes.CHANNELWISE_PLANES * S.BT + o_i
    b_g = load_steps(gate, start, i_hv, o_i, m_i, o_k, S, R)
    b_q = load_rows(rows_from(q, start, i_h), o_i, m_i, o_k, S.K).to(tl.float32)
    b_k = load_rows(rows_from(k, start, i_h), o_i, m_i, o_k, S.K).to(tl.float32)
    b_q *= tl.load(row + planes.Q_SCALE * S.BT)[:, None]
    b_k *= tl.load(row + planes.K_SCALE * S.BT)[:, None]
    steps = parts(b_g, out.kg.dtype.element_ty)
    d = sum_steps(sums, UP_TO, o_i, steps, S.PRECISION)
    e = decay_exp(d, R.EXP2)
    store_block(out.qg + i_ch * S.BT * S.K, b_q * e, o_i, o_k, S.BT, S.K)
    if S.REMOVAL == "k":
        store_block(out.k_decayed + i_ch * S.BT * S.K, b_k * e, o_i, o_k, S.BT, S.K)
    if S.REMOVAL == "p":
        b_p = load_rows(rows_from(p, start, i_h), o_i, m_i, o_k, S.K).to(tl.float32)
        b_p *= decay_exp(before(d, steps), R.EXP2)
        store_block(out.k_decayed + i_ch * S.BT * S.K, b_p, o_i, o_k, S.BT, S.K)
    if R.SAFE:
        end = out.anchors + ((i_ch + 1) * (S.BT // 16) - 1) * S.K + o_k
        d = tl.load(end, mask=o_k < S.K, other=0.0)[None, :] - d
    else:
        d = sum_steps(sums, AFTER, o_i, steps, S.PRECISION)
    store_block(out.kg + i_ch * S.BT * S.K, b_k * decay_exp(d, R.EXP2), o_i, o_k, S.BT, S.K)


def qkp(x: Inputs) -> tuple[Rows, Rows, Rows | None]:
    """q, k and p, None without p, as kernels take them."""
    return rows(x.q), rows(x.k), None if x.p is None else rows(x.p)


def intra_channelwise(packing: Packing, x: Inputs, c: Chunks) -> Callable[[int, int], None]:
    """With one decay a channel: returns a call (first, stop) that fills the chunks of c from
    `first` to before `stop`, and allocates nothing."""
    rule, (NC, HV, K), V, dtype = c.rule, c.decay.shape, x.v.shape[2], x.q.dtype
    H, C = x.q.shape[1], packing.chunk
    shape_of = functools.partial(shape, rule, dtype, H, HV, K, V, chunk=C)
    given = *qkp(x), gate(rule, x), beta(rule, x), sums(dtype, x.q.device, C)
    paths = local_paths(rule, dtype)  # the last one reads what the first one wrote
    folder = choose(packing, c, scans=False)
    if folder != "triton" and not kernels_of(folder).intra_channelwise.takes(x, c, paths):
        folder = "triton"
    tiles = [c.tuning.tile("intra" + p + own(rule), K, V, dtype, 0, folder) for p, _ in paths]
    all_chunks = tables(packing, x.q.device)

    def form(first: int, stop: int) -> None:
        table, part = all_chunks, c
        if stop - first < NC:
            table, part = table.between(first, stop), c.between(first, stop)
        for (_, R), t in zip(paths, tiles, strict=True):
            if t.folder != "triton":
                kernels = kernels_of(t.folder)
                stage = kernels.intra_channelwise if R.SAFE else kernels.intra_channelwise_steep
                stage.intra_channel(table, x, part, t, R)
                continue
            compiled = {"S": shape_of(t), "R": R, "num_warps": t.warps, "maxnreg": t.registers}
            rest = part.formed(), table.chunks, rule.scale
            launch(intra_kernel, (stop - first, HV), *given, *rest, **compiled)

    return form


def empty_gated(rule: DeltaRule, NC: int, chunk: int, x: Inputs) -> tuple[Tensor, Tensor, Tensor]:
    """Memory for qg, k_decayed and kg."""
    shape = (NC, x.v.shape[1], chunk, x.q.shape[2])
    k_decayed = (0,) if rule.removal == "none" else shape
    return x.q.new_empty(shape), x.q.new_empty(k_decayed), x.q.new_empty(shape)


def gated_operands(
    rule: DeltaRule,
    packing: Packing,
    x: Inputs,
    row_numbers: Tensor,
    anchors: Tensor,
    tuning: Tuning = TUNING,
) -> tuple[Tensor, Tensor, Tensor]:
    """Recomputes qg, k_decayed and kg of the forward, with one decay a channel. row_numbers:
    `Chunks.rows`."""
    x = Inputs(*(None if t is None else unit_rows(t) for t in x))  # type: ignore[arg-type]
    table = tables(packing, x.q.device)
    NC, (H, K), (HV, V), dtype = len(table.chunk_start), x.q.shape[1:], x.v.shape[1:], x.q.dtype
    t, C = tuning.tile("gated", K, V, dtype), packing.chunk
    gated = empty_gated(rule, NC, C, x)
    if NC:
        S, R = shape(rule, dtype, H, HV, K, V, t, C), rule_options(rule, dtype)
        out = Formed(None, None, None, row_numbers, anchors, None, *gated)
        given = *qkp(x), gate(rule, x), sums(dtype, x.q.device, C), out, table.chunks
        launch(gated_kernel, (NC * cdiv(K, t.BK), HV), *given, S, R, num_warps=t.warps)
    return gated
