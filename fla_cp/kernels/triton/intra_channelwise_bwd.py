"""The gradients of everything local to a chunk with one decay a channel, from what the scans left.

With y = T^T dv_new (scan.py), the inverse needs no products of its own: dv = beta y and
dAkk = -tril(y v_new^T), next to dAqk = tril(do v_new^T).

1. `scores_bwd_kernel`, a program per (chunk, head), forms dAqk, dAkk, dv, v's share of dbeta, and
   two sums over whole rows for the backward of the norms: q dq = do o, since o is linear in q; and
   k dk = y (2 v_new - beta v), since k enters as k_i v_new_i^T and as a row of (I + Akk) v_new =
   beta (v - k_decayed S).
2. `intra_bwd_kernel`, a program per (chunk, head, key tile), forms the gradients of the scores' row
   and column factors level by level, as intra_channelwise.py forms the scores (with a safe gate:
   intra_channelwise_bwd_safe.py). gc occurs as exp(+gc_i) in row factors and as exp(-gc_j) in
   column factors, so its gradient is elementwise: row * drow - col * dcol. The rows of a level are
   second blocks of pairs and its columns first blocks, so each row of the chunk is one or the
   other, and mirrored scores give both gradients in one product. Levels 2 to 5 are products of four
   blocks of 16, each within a warp.
   The gradient of g is the sum of the gradient of gc from a row to the chunk's end. A pair (i, j)
   adds to it between j and i and must cancel before j, so row and col are the factors that the
   products saw, rounded alike. (With q and k in fp32 instead, dg was off by 1.9% and ddt_bias by 5
   to 9%: docs/log.md.)

The gradients of the scores go through memory (two [C, C] tiles a chunk), because Triton 3.4 to
3.7.0 miscompiles on Hopper a product whose operand is another product's transposed result.

If kernels of a generation's folder do all of this (`all_read_dv`), the reverse scan writes dv,
which stands for y: beta multiplies a row of y wherever it multiplies that row of k. Then 1. forms
-tril(dv v_new^T), the gradient of the scores of rows k instead of beta k, and k dk = dv (2 v_new /
beta - v). In 2. the row factor is k. All shares of dbeta are shares of beta dbeta, which is divided
by beta at the end, so that no beta may be zero (`away_from_zero`). With any gate 2. has a second
kernel, which is here and reads y."""

import functools

import torch
import triton
import triton.language as tl
from torch import Tensor

from fla_cp.kernels.backend import ChunkStates
from fla_cp.kernels.torch.intra import Inputs
from fla_cp.kernels.triton.device import planes
from fla_cp.kernels.triton.device.blocks import (
    apply_sums,
    decay_exp,
    load_rows,
    parts,
    store_rows,
    sum_steps,
)
from fla_cp.kernels.triton.device.bundles import (
    Grads,
    RuleOptions,
    gate,
    local_paths,
    rows,
    rule_options,
    shape,
)
from fla_cp.kernels.triton.device.channelwise_decay import before, blocks_of_16, load_steps
from fla_cp.kernels.triton.device.channelwise_grads import (
    as_rows,
    level_grads,
    load_scaled,
    open_chunk,
    state_products,
    store_gate_grads,
)
from fla_cp.kernels.triton.device.decay_sums import AFTER, PAIR, UP_TO, sums, widest_level
from fla_cp.kernels.triton.device.opaque import opaque
from fla_cp.kernels.triton.generations import choose, kernels_of
from fla_cp.kernels.triton.intra_channelwise_bwd_safe import safe_bwd_kernel
from fla_cp.kernels.triton.intra_channelwise_bwd_scores import beta_bwd, scores_bwd_kernel
from fla_cp.kernels.triton.launch import cdiv, launch
from fla_cp.kernels.triton.operands import (
    DENSE,
    Chunks,
    ScanGrads,
    after_local,
    empty_shares,
    own,
    saved,
    tables,
)
from fla_cp.kernels.triton.rate_grads import rate_grads
from fla_cp.kernels.triton.scan_bwd import scan_bwd_tile
from fla_cp.kernels.triton.tile_table import Tile, in_chunks_of
from fla_cp.partition.packing import Packing


@triton.jit
def intra_bwd_kernel(
    x, gate, sums, out, chunks, tokens, scale, S: tl.constexpr, R: tl.constexpr, FIRST: tl.constexpr
):
    """x: `Saved`; gate: `Gate`; out: `Grads`; chunks: `ChunkTable`. Where the rule removes
    nothing (GLA) k has no row factor; where p reads the state (DPLR), p has it.

    FIRST: how many key tiles the kernel of the other chunks has if that differs, else 0. It then
    has parts of dA_log of its own, and this kernel sets to zero, for those chunks, the parts of
    dbeta and dA_log that the other one does not write."""
    tiles: tl.constexpr = (S.K + S.BK - 1) // S.BK
    i_k = tl.program_id(0) % tiles  # fastest, so that the tiles of a chunk share what they load
    i_c, i_hv = (tl.program_id(0) // tiles).to(tl.int64), tl.program_id(1).to(tl.int64)
    here = open_chunk(x, out, chunks, i_c, i_hv, S, planes.CHANNELWISE_PLANES)
    i = tl.arange(0, S.BT)
    m_i = i < here.n_rows
    if R.BY_CHUNK and tl.load(x.steep + here.i_ch) == 0:
        if FIRST > 0:
            if out.dA_log is not None:
                tl.store(out.dA_log + (i_c * tiles + i_k) * S.HV + i_hv, 0.0)
            if S.REMOVAL != "none":
                share = out.shares + (i_k + 1).to(tl.int64) * tokens * S.HV
                to = share + (here.start + i) * S.HV + i_hv
                tl.store(to, tl.zeros([S.BT], tl.float32), mask=m_i & (i_k >= FIRST))
        return
    operand = x.v_new.dtype.element_ty
    REMOVES: tl.constexpr = S.REMOVAL != "none"
    OWN: tl.constexpr = S.REMOVAL == "p"
    LEAN: tl.constexpr = REMOVES and operand == tl.float32
    SHIFT: tl.constexpr = OWN and not LEAN
    o_k = i_k * S.BK + tl.arange(0, S.BK)

    b_g = load_steps(gate, here.start, i_hv, i, m_i, o_k, S, R)
    b_dq, b_dr, b_dc, b_dl = state_products(here, i, m_i, o_k, S, True)
    steps = parts(b_g, operand)
    b_k = load_scaled(here.k, here.rows, planes.K_SCALE, i, m_i, o_k, S.K)
    b_q = load_scaled(here.q, here.rows, planes.Q_SCALE, i, m_i, o_k, S.K)
    b_p = b_k
    if OWN:
        b_p = load_rows(here.p, i, m_i, o_k, S.K).to(tl.float32)
    b_beta = tl.load(here.rows + i)[:, None]
    d = sum_steps(sums, UP_TO, i, steps, S.PRECISION)
    e = decay_exp(d, R.EXP2)
    b_dq *= e
    if OWN:
        e = decay_exp(before(d, steps), R.EXP2)
    b_dr *= -e
    b_dc *= decay_exp(sum_steps(sums, AFTER, i, steps, S.PRECISION), R.EXP2)
    b_dl *= tl.load(x.decay + here.i_ch * S.K + o_k, mask=o_k < S.K, other=0.0)
    b_dl += tl.sum(b_k * b_dc, axis=0)
    b_dgc = b_q * b_dq - b_k * b_dc
    if REMOVES:
        b_dgc += b_beta * (b_p * b_dr)
    b_dgc += tl.where((i == S.BT - 1)[:, None], b_dl[None, :], 0.0)  # frees b_dl

    # row factors q and beta k or beta p, column factor k; first the levels within blocks of 16
    x_q, x_k, x_beta = blocks_of_16(b_q), blocks_of_16(b_k), blocks_of_16(b_beta)
    x_p = x_k
    x_grads = blocks_of_16(b_dq), blocks_of_16(b_dr), blocks_of_16(b_dc), blocks_of_16(b_dgc)
    if OWN:
        x_p = blocks_of_16(b_p)
    if SHIFT:
        x_grads = x_grads + (blocks_of_16(b_beta * (b_p * b_dr)),)  # type: ignore[assignment]
    x_steps = parts(blocks_of_16(b_g), operand)
    j = tl.arange(0, 16)
    # For registers in fp32, q, k and beta are loaded again at each level. The compiler cannot tell
    # that the loops run, so that it keeps nothing of what they form for what follows them.
    blocks_end, levels_end = 6, 2
    if LEAN:
        blocks_end = opaque(6, here.n_rows, S.BT, 1000)
        levels_end = opaque(2, here.n_rows, S.BT, 2000)
    for level in tl.range(2, blocks_end, num_stages=1, disable_licm=True):
        n = 5 - level
        r = opaque(j, here.n_rows + level, S.BT, 1000)
        at = (r[:, None] * S.BT + r[None, :])[None]
        at += tl.arange(0, S.BT // 16)[:, None, None] * (16 * S.BT + 16)
        E = tl.load(sums + (PAIR + level) * S.BT * S.BT + at)
        x_d = apply_sums(E, x_steps, S.PRECISION)
        f = decay_exp(x_d, R.EXP2)
        f_p = f
        if OWN:
            f_p = decay_exp(tl.minimum(before(x_d, x_steps), 0.0), R.EXP2)
        if LEAN:
            o = opaque(i, here.n_rows + level, S.BT, 1000)
            m_o = o < here.n_rows
            x_q = blocks_of_16(load_scaled(here.q, here.rows, planes.Q_SCALE, o, m_o, o_k, S.K))
            x_k = blocks_of_16(load_scaled(here.k, here.rows, planes.K_SCALE, o, m_o, o_k, S.K))
            x_p = x_k
            if OWN:
                x_p = blocks_of_16(load_rows(here.p, o, m_o, o_k, S.K).to(tl.float32))
            x_beta = blocks_of_16(tl.load(here.rows + o)[:, None])
        x_grads = level_grads(
            x_grads,
            f,
            f_p,
            (x_q, x_k, x_beta, x_p),
            here.scores,
            at,
            ((r[:, None] ^ r[None, :]) >> n == 1)[None],
            ((r >> n) & 1 == 1)[None, :, None],
            here.n_rows,
            S,
        )
    grads = as_rows(x_grads[0]), as_rows(x_grads[1]), as_rows(x_grads[2]), as_rows(x_grads[3])
    if SHIFT:
        grads = grads + (as_rows(x_grads[4]),)  # type: ignore[assignment, misc]
    for top in tl.range(widest_level(S.BT), levels_end, num_stages=1, disable_licm=True):
        o = opaque(i, here.n_rows + top, S.BT, 1000)
        inner, outer = o // 32 + top * (o // 16 - o // 32), o // 32 * top
        d = sum_steps(sums, PAIR + top, o, steps, S.PRECISION)
        f = decay_exp(d, R.EXP2)
        f_p = f
        if OWN:
            f_p = decay_exp(tl.minimum(before(d, steps), 0.0), R.EXP2)
        if LEAN:
            b_q = load_scaled(here.q, here.rows, planes.Q_SCALE, o, o < here.n_rows, o_k, S.K)
            b_k = load_scaled(here.k, here.rows, planes.K_SCALE, o, o < here.n_rows, o_k, S.K)
            b_p = b_k
            if OWN:
                b_p = load_rows(here.p, o, o < here.n_rows, o_k, S.K).to(tl.float32)
            b_beta = tl.load(here.rows + o)[:, None]
        grads = level_grads(
            grads,
            f,
            f_p,
            (b_q, b_k, b_beta, b_p),
            here.scores,
            o[:, None] * S.BT + o[None, :],
            (outer[:, None] == outer[None, :]) & (inner[:, None] != inner[None, :]),
            (inner % 2 == 1)[:, None],
            here.n_rows,
            S,
        )
    b_dq, b_dr, b_dc, b_dgc = grads[0], grads[1], grads[2], grads[3]
    b_shift = None
    if SHIFT:
        b_shift = grads[4]  # type: ignore[misc]
    tl.debug_barrier()
    if OWN:  # for registers, not even these numbers are kept through the loops
        pid = opaque(tl.program_id(0), here.n_rows, S.BT, 3)
        i_k, i_c = pid % tiles, (pid // tiles).to(tl.int64)
        i_hv = opaque(tl.program_id(1), here.n_rows, S.BT, 3).to(tl.int64)
    q, k, n_rows = here.q, here.k, tl.load(chunks.rows + i_c)
    i, i_k = opaque(i, n_rows, S.BT, 1), opaque(i_k, n_rows, S.BT, 1)
    i_c, i_hv = opaque(i_c, n_rows, S.BT, 1), opaque(i_hv, n_rows, S.BT, 1)
    here = open_chunk(x, out, chunks, i_c, i_hv, S, planes.CHANNELWISE_PLANES)
    m_i = i < here.n_rows
    o_k = i_k * S.BK + tl.arange(0, S.BK)
    if LEAN:
        b_q = load_scaled(q, here.rows, planes.Q_SCALE, i, m_i, o_k, S.K)
        b_k = load_scaled(k, here.rows, planes.K_SCALE, i, m_i, o_k, S.K)
        b_p = b_k
        b_beta = tl.load(here.rows + i)[:, None]
    # after b_dgc: the diagonal's row and column cancel in it
    diagonal = tl.load(here.row_grads + i)[:, None]
    b_dq += diagonal * b_k
    b_dc += diagonal * b_q
    if R.NORM:
        b_dq -= b_q * (tl.load(here.row_grads + planes.Q_DQ * S.BT + i) / (scale * scale))[:, None]
    at = (here.start * S.HV + i_hv) * S.K
    b_dq *= tl.load(here.rows + planes.Q_SCALE * S.BT + i)[:, None]
    store_rows(out.dq + at, b_dq, i, S.HV * S.K, m_i, o_k, S.K)
    if REMOVES:
        if OWN:
            b_p = load_rows(here.p, i, m_i, o_k, S.K).to(tl.float32)
        share = out.shares + (i_k + 1).to(tl.int64) * tokens * S.HV + here.start * S.HV + i_hv
        tl.store(share + i * S.HV, tl.sum(b_p * b_dr, axis=1), mask=m_i)
        if OWN:
            store_rows(out.dp + at, b_dr * b_beta, i, S.HV * S.K, m_i, o_k, S.K)
            if LEAN:  # nothing was rounded, so it need not be summed level by level
                b_shift = b_beta * (b_p * b_dr)
        else:
            b_dc += b_dr * b_beta
    if R.NORM:
        b_dc -= b_k * tl.load(here.row_grads + planes.K_DK * S.BT + i)[:, None]
    b_dc *= tl.load(here.rows + planes.K_SCALE * S.BT + i)[:, None]
    store_rows(out.dk + at, b_dc, i, S.HV * S.K, m_i, o_k, S.K)
    store_gate_grads(b_dgc, b_shift, x, gate, sums, out, chunks, i_c, i_hv, i_k, S, R, 2)


def folder_of(packing: Packing, x: Inputs, c: Chunks, do: Tensor) -> str:
    """The folder of the kernels that this backward takes by itself, and then the forward, too."""
    folder, options = choose(packing, c, scans=False), local_paths(c.rule, x.q.dtype)
    if folder == "triton":
        return folder
    takes = kernels_of(folder).intra_channelwise_bwd.takes(x, c, rows(do), options)
    return folder if takes else "triton"


def tiles_of(
    packing: Packing, x: Inputs, c: Chunks, do: Tensor
) -> tuple[tuple[Tile, RuleOptions], list[tuple[Tile, RuleOptions]]]:
    """The tile and the options of the kernel of the scores' gradients, and those of the kernels
    behind it."""
    rule, K, V, dtype = c.rule, x.q.shape[2], x.v.shape[2], x.q.dtype
    options, folder = local_paths(rule, dtype), folder_of(packing, x, c, do)
    first_of_two = "_by_chunk" if len(options) == 2 else ""
    stages = ["intra_bwd" + (path or first_of_two) + own(rule) for path, _ in options]
    paths = [
        (in_chunks_of(c.tokens, stage, c.tuning.tile(stage, K, V, dtype, 0, folder)), R)
        for stage, (_, R) in zip(stages, options, strict=True)
    ]
    R = rule_options(rule, dtype)
    if folder != "triton":
        kernels = kernels_of(folder).intra_channelwise_bwd_scores
        folder = "triton" if kernels.why_not(x, c, rows(do), R) else folder
    return (c.tuning.tile("scores_bwd", K, V, dtype, 0, folder), R), paths


def all_read_dv(packing: Packing, x: Inputs, c: Chunks, do: Tensor, concurrent: bool) -> bool:
    """Whether all kernels of this backward are in a generation's folder, and so are the reverse
    scan, which then writes dv, and the forward's kernel, which keeps betas away from zero.
    concurrent: as for `launch_scan_bwd`.

    x is as given here. The backward copies inputs without unit stride, which no kernel refuses."""
    scan = scan_bwd_tile(packing, c, do, "everything", (), ends=False, concurrent=concurrent)
    if scan.folder == "triton":
        return False
    (scores, _), paths = tiles_of(packing, x, c, do)
    sizes = x.q.shape[2], x.v.shape[2], x.q.dtype
    forward = c.tuning.tile("intra", *sizes, 0, folder_of(packing, x, c, do))
    return all(t.folder == scan.folder for t in (forward, scores, *(t for t, _ in paths)))


def intra_channelwise_bwd(
    packing: Packing, x: Inputs, c: Chunks, states: ChunkStates, grads: ScanGrads
) -> Inputs:
    """The gradients of the inputs, with one decay a channel."""
    rule, table, dtype = c.rule, tables(packing, x.q.device), x.q.dtype
    (NC, HV, K), (tokens, H), V = c.decay.shape, x.q.shape[:2], x.v.shape[2]
    read = saved(x, c, states, grads)
    (ts, R_scores), paths = tiles_of(packing, x, c, grads.do)
    # Parts of dbeta and dA_log are those of key tiles, so Triton's kernels have the same. With a
    # first kernel of another folder there are parts of dA_log for both.
    first, last = paths[0][0], paths[-1][0]
    two = first.folder != last.folder
    BK = min(first.BK, last.BK) if two else first.BK
    tiles, C = cdiv(K, BK), packing.chunk
    shape_of = functools.partial(shape, rule, dtype, H, HV, K, V, chunk=C)
    single = functools.partial(torch.empty, dtype=torch.float32, device=x.q.device)
    per_head = [x.q, x.k, *([] if x.p is None else [x.p])]
    wide = None if HV == H else torch.float32
    dq, dk, *dp = (t.new_empty(tokens, HV, K, dtype=wide) for t in per_head)
    out = Grads(
        dq=dq,
        dk=dk,
        dp=dp[0] if dp else None,
        dv=torch.empty_like(x.v, memory_format=DENSE) if grads.dv is None else grads.dv,
        dg=torch.empty_like(x.g, memory_format=DENSE),
        dbeta=None,
        dA_log=None if x.A_log is None else single(NC * (tiles + two * (K // first.BK)), HV),
        ddt_bias=None if x.dt_bias is None else single(NC, HV, K),
        shares=empty_shares(1 + tiles, x),
        scores=x.q.new_empty(NC, HV, 2, C, C),
        row_grads=single(NC, HV, 3, C),
        dgc=None,
        shift=None,
    )
    if NC:
        where = table.chunks
        if two:
            read = kernels_of(first.folder).intra_channelwise_bwd_any.marked(read, c, first)
        if ts.folder != "triton":
            kernels = kernels_of(ts.folder)
            kernels.intra_channelwise_bwd_scores.scores_bwd(table, x, c, read, out, ts, R_scores)
        else:
            S = shape(after_local(rule), dtype, H, HV, K, V, ts, C)
            compiled = {"S": S, "R": R_scores, "num_warps": ts.warps}
            launch(scores_bwd_kernel, (NC, HV), read, out, where, **compiled)
        rest = where, out.shares.shape[1], rule.scale
        to = out  # of Triton's kernels
        for t, R in paths:
            if t.folder != "triton":
                kernels, local = kernels_of(t.folder), (table, x, c, read, out, t, R)
                if two:
                    to = kernels.intra_channelwise_bwd_any.safe_bwd(*local)
                else:
                    kernels.intra_channelwise_bwd.safe_bwd(*local)
                continue
            compiled = {"S": shape_of(t._replace(BK=BK)), "R": R, "num_warps": t.warps}
            if not R.SAFE:
                compiled["FIRST"] = K // first.BK if two else 0
            kernel = safe_bwd_kernel if R.SAFE else intra_bwd_kernel
            given = read, gate(rule, x), sums(dtype, x.q.device, C), to, *rest
            launch(kernel, (NC * tiles, HV), *given, **compiled, maxnreg=t.registers)
    if HV > H:
        dq, dk, *dp = (d.unflatten(1, (H, HV // H)).sum(2).to(dtype) for d in (dq, dk, *dp))
    dbeta = None
    if x.beta is not None:
        dbeta = beta_bwd(rule, x.beta, out.shares, times_beta=grads.dv is not None)
    dA_log, ddt_bias = rate_grads(out.dA_log, x.A_log, out.ddt_bias, x.dt_bias)
    return Inputs(dq, dk, out.dv, out.dg, dbeta, dA_log, ddt_bias, *dp)
