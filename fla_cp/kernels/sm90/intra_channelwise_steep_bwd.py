"""The backward of everything local to a chunk whose decays are too strong for the path of a safe
gate, for sm_90, in Gluon.

`intra_bwd_kernel` in triton/intra_channelwise_bwd.py explains what is computed; the results are
equal up to rounding. A program has a slab of 64 channels of a chunk and a head. A thread has 16
rows of two channels, a quarter of the chunk in a warp, and decays are products of the decays of
single tokens, as in intra_channelwise_steep.py. At each level, rows in second blocks and columns in
first blocks are stored as operands, and the products with the mirrored gradients of the scores come
back the same way.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language import NVMMASharedLayout
from triton.experimental.gluon.language.nvidia.hopper import (
    async_copy,
    fence_async_shared,
    mma_v2,
    warpgroup_mma,
    warpgroup_mma_wait,
)

from fla_cp.kernels.sm90.intra_channelwise import (
    SLAB,
    copy_slab,
    load_raw,
    load_tall,
    of_quarters,
    plus,
    quarter_sum,
    store_tall,
)
from fla_cp.kernels.sm90.intra_channelwise_bwd import slopes, why_not_bwd
from fla_cp.kernels.sm90.intra_channelwise_steep import (
    doubled,
    halves,
    joined,
    load_decays,
    load_scaled,
    quarters_of,
)
from fla_cp.kernels.sm90.tma import barrier
from fla_cp.kernels.torch.intra import Inputs
from fla_cp.kernels.triton.device.blocks import rows_from
from fla_cp.kernels.triton.device.bundles import Grads, RuleOptions, Saved, gate, shape
from fla_cp.kernels.triton.device.planes import (
    CHANNELWISE_PLANES,
    DIAGONAL,
    GRAD_PLANES,
    K_DK,
    K_SCALE,
    Q_DQ,
    Q_SCALE,
)
from fla_cp.kernels.triton.launch import launch
from fla_cp.kernels.triton.operands import Chunks, Tables
from fla_cp.kernels.triton.tile_table import Tile


@gluon.jit
def level_mask(layout: gl.constexpr, N: gl.constexpr, n: gl.constexpr):
    """The pairs of rows, of N [.., N, N], that are in the two blocks of a pair of blocks of 2^n."""
    if N == 16:
        i = gl.arange(0, N, gl.SliceLayout(0, gl.SliceLayout(2, layout)))[None, :][:, :, None]
        j = gl.arange(0, N, gl.SliceLayout(0, gl.SliceLayout(1, layout)))[None, :][:, None, :]
    else:
        i = gl.arange(0, N, gl.SliceLayout(1, layout))[:, None]
        j = gl.arange(0, N, gl.SliceLayout(0, layout))[None, :]
    return ((i ^ j) >> n) == 1


@gluon.jit
def load_diagonal(ptr):
    """The blocks of 16 on the diagonal of a tile [64, 64] as left operands [4, 16, 16]."""
    small: gl.constexpr = gl.NVMMADistributedLayout([2, 0], [4, 1, 1], [1, 16, 8])
    left: gl.constexpr = gl.DotOperandLayout(0, small, 2)
    w = gl.arange(0, 4, gl.SliceLayout(1, gl.SliceLayout(2, left)))[:, None][:, :, None]
    i = gl.arange(0, 16, gl.SliceLayout(0, gl.SliceLayout(2, left)))[None, :][:, :, None]
    j = gl.arange(0, 16, gl.SliceLayout(0, gl.SliceLayout(1, left)))[None, :][:, None, :]
    return gl.load(ptr + (w * (16 * 64 + 16) + i * 64 + j))


@gluon.jit
def small_products(d_q, d_k, places, n: gl.constexpr, REMOVES: gl.constexpr):
    """The products within quarters of a level's scores and its operands, [4, 16, SLAB] each. The
    second is zero where the rule removes nothing."""
    small: gl.constexpr = gl.NVMMADistributedLayout([2, 0], [4, 1, 1], [1, 16, 8])
    left: gl.constexpr = gl.DotOperandLayout(0, small, 2)
    right: gl.constexpr = gl.DotOperandLayout(1, small, 2)
    deep: gl.constexpr = gl.SwizzledSharedLayout(8, 1, 8, [2, 1, 0])
    s_x, s_r = places
    half: gl.constexpr = s_x.dtype
    zero = gl.full([4, 16, SLAB], 0.0, gl.float32, small)
    mask = level_mask(left, 16, n)
    barrier()
    b = s_x.index(0)._reinterpret(half, [4, 16, SLAB], deep).load(right)
    r = mma_v2(gl.where(mask, d_q, 0.0).to(half), b, zero)
    s_r.index(0).store(gl.reshape(r, [64, SLAB]))
    if REMOVES:
        b = s_x.index(1)._reinterpret(half, [4, 16, SLAB], deep).load(right)
        r = mma_v2(gl.where(mask, d_k, 0.0).to(half), b, zero)
        s_r.index(1).store(gl.reshape(r, [64, SLAB]))
    barrier()


@gluon.jit
def large_products(s_s, places, n: gl.constexpr, REMOVES: gl.constexpr):
    """`small_products` of a level between quarters."""
    acc: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, SLAB, 16])
    left: gl.constexpr = gl.DotOperandLayout(0, acc, 2)
    s_x, s_r = places
    half: gl.constexpr = s_x.dtype
    zero = gl.full([64, SLAB], 0.0, gl.float32, acc)
    mask = level_mask(left, 64, n)
    fence_async_shared()
    barrier()
    for m in gl.static_range(2 if REMOVES else 1):
        a = gl.where(mask, s_s.index(m).load(left), 0.0).to(half)
        r = warpgroup_mma(a, s_x.index(m), zero, use_acc=False, is_async=True)
        s_r.index(m).store(warpgroup_mma_wait(0, deps=(r,)))
    barrier()


@gluon.jit
def rows_factor(s_rows, plane: gl.constexpr):
    """A plane of the chunk's rows [4, 16, 1]."""
    return s_rows.index(plane).load(gl.SliceLayout(2, quarters_of(16)))[:, :, None]


@gluon.jit
def steep_bwd_sm90_kernel(x, gate, out, chunks, tokens, scale, S: gl.constexpr, R: gl.constexpr):
    """`intra_bwd_kernel` for key tiles of 64 channels and the chunks that are marked in x.steep.
    tokens: the rows of out.shares."""
    tiles: gl.constexpr = S.K // SLAB
    i_k = gl.program_id(0) % tiles
    i_c, i_hv = (gl.program_id(0) // tiles).to(gl.int64), gl.program_id(1).to(gl.int64)
    i_h, i_ch = i_hv // S.G, i_c * S.HV + i_hv
    if gl.load(x.steep + i_ch) == 0:
        return
    n_rows = gl.load(chunks.rows + i_c)
    start = gl.load(chunks.start + i_c).to(gl.int64)
    half: gl.constexpr = x.v_new.dtype.element_ty
    REMOVES: gl.constexpr = S.REMOVAL != "none"
    wide: gl.constexpr = NVMMASharedLayout(128, 16, 2)
    single: gl.constexpr = NVMMASharedLayout(128, 32, 2)
    plain: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [1, 0])
    line: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [0])
    acc: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, SLAB, 16])
    tall: gl.constexpr = gl.BlockedLayout([16, 2], [1, 32], [4, 1], [1, 0])
    quarters: gl.constexpr = quarters_of(16)
    ends: gl.constexpr = gl.SliceLayout(1, quarters)
    column: gl.constexpr = gl.SliceLayout(0, ends)

    s_x = gl.allocate_shared_memory(half, [2, S.BT, SLAB], wide)  # q, k
    s_s = gl.allocate_shared_memory(half, [2, S.BT, SLAB], wide)  # gradients of the scores
    s_h = gl.allocate_shared_memory(half, [2, SLAB, S.V], wide)  # h, dh
    s_v = gl.allocate_shared_memory(half, [3, S.BT, S.V], wide)  # do, y, v_new
    s_rows = gl.allocate_shared_memory(gl.float32, [3, 4, 16], plain)
    s_ends = gl.allocate_shared_memory(gl.float32, [4, SLAB], plain)
    s_dl = gl.allocate_shared_memory(gl.float32, [SLAB], line)
    q, k = rows_from(x.q, start, i_h), rows_from(x.k, start, i_h)
    do = rows_from(x.do, start, i_hv)
    states, values = (i_ch * S.K + i_k * SLAB) * S.V, i_ch * (S.BT * S.V)
    copy_slab(x.h + states, S.V, SLAB, s_h.index(0), S.BT, S.V)
    copy_slab(do.ptr, do.row, n_rows, s_v.index(0), S.BT, S.V)
    if REMOVES:
        copy_slab(x.y + values, S.V, S.BT, s_v.index(1), S.BT, S.V)
    copy_slab(x.dh + states, S.V, SLAB, s_h.index(1), S.BT, S.V)
    copy_slab(x.v_new + values, S.V, S.BT, s_v.index(2), S.BT, S.V)
    copy_slab(q.ptr + i_k * SLAB, q.row, n_rows, s_x.index(0), S.BT, SLAB)
    copy_slab(k.ptr + i_k * SLAB, k.row, n_rows, s_x.index(1), S.BT, SLAB)
    scores = out.scores + i_ch * (2 * S.BT * S.BT)
    copy_slab(scores, S.BT, S.BT, s_s.index(0), S.BT, SLAB)
    if REMOVES:
        copy_slab(scores + S.BT * S.BT, S.BT, S.BT, s_s.index(1), S.BT, SLAB)
    async_copy.commit_group()

    i_r = gl.arange(0, S.BT, gl.BlockedLayout([1], [32], [4], [0]))
    at = x.rows + i_ch * (CHANNELWISE_PLANES * S.BT) + i_r
    for plane in gl.static_range(3):
        value = gl.load(at + plane * S.BT)
        s_rows.index(plane)._reinterpret(gl.float32, [S.BT], line).store(value)
    w = gl.arange(0, 4, gl.SliceLayout(1, ends))[:, None]
    c = gl.arange(0, SLAB, column)
    r = gl.arange(0, 16, gl.SliceLayout(0, gl.SliceLayout(2, quarters)))[None, :][:, :, None]
    i = gl.arange(0, 4, gl.SliceLayout(1, gl.SliceLayout(2, quarters)))[:, None][:, :, None]
    i = i * 16 + r
    a = load_decays(gate, start, i_hv, i_k, i, c, n_rows, S, R.GATE)
    ones = gl.full([4, 16, SLAB], 1.0, gl.float32, quarters)
    e = a, ones, a
    e = doubled(e, 1)
    e = doubled(e, 2)
    e = doubled(e, 4)
    e = doubled(e, 8)
    upto, after, whole = e
    s_ends.store(gl.convert_layout(gl.reshape(whole, [4, SLAB]), ends))

    # What the states add.
    zero = gl.full([S.BT, SLAB], 0.0, gl.float32, acc)
    i_a = gl.arange(0, S.BT, gl.SliceLayout(1, acc))
    c_a = gl.arange(0, SLAB, gl.SliceLayout(0, acc))
    async_copy.wait_group(0)
    fence_async_shared()
    barrier()
    h_dh = warpgroup_mma(
        s_h.index(0), s_h.index(1).permute((1, 0)), zero, use_acc=False, is_async=True
    )
    h_dh = warpgroup_mma_wait(0, deps=(h_dh,))
    s_dl.store(gl.sum(gl.where(i_a[:, None] == c_a[None, :], h_dh, 0.0), 1))  # of each channel
    b_dq = warpgroup_mma(
        s_v.index(0), s_h.index(0).permute((1, 0)), zero, use_acc=False, is_async=True
    )
    b_dr = b_dq
    if REMOVES:
        b_dr = warpgroup_mma(
            s_v.index(1), s_h.index(0).permute((1, 0)), zero, use_acc=False, is_async=True
        )
    b_dc = warpgroup_mma(
        s_v.index(2), s_h.index(1).permute((1, 0)), zero, use_acc=False, is_async=True
    )
    if REMOVES:
        b_dq, b_dr, b_dc = warpgroup_mma_wait(0, deps=(b_dq, b_dr, b_dc))
    else:
        b_dq, b_dc = warpgroup_mma_wait(0, deps=(b_dq, b_dc))
    barrier()  # the tiles of states and values are free
    s_f = s_v._reinterpret(gl.float32, [3, S.BT, SLAB], single)
    s_f.index(0).store(b_dq)
    if REMOVES:
        s_f.index(1).store(b_dr)
    s_f.index(2).store(b_dc)
    barrier()
    e_0, e_1 = quarter_sum(s_ends, 0, ends), quarter_sum(s_ends, 1, ends)
    e_2, e_3 = quarter_sum(s_ends, 2, ends), quarter_sum(s_ends, 3, ends)
    one = e_0 * 0.0 + 1.0
    from_start = of_quarters(w, one, e_0, e_0 * e_1, e_0 * e_1 * e_2)[:, None, :]
    to_end = of_quarters(w, e_1 * e_2 * e_3, e_2 * e_3, e_3, one)[:, None, :]
    to_middle = of_quarters(w, e_1, one, one, e_2)[:, None, :]
    dl = s_dl.load(column) * (e_0 * e_1 * e_2 * e_3)
    b_k = load_scaled(s_x.index(1), s_rows.index(K_SCALE))
    dc = load_tall(s_f.index(2), tall, quarters) * (after * to_end)
    dgc = b_k * dc
    s_ends.store(gl.sum(dgc, 1))
    barrier()
    dl += quarter_sum(s_ends, 0, ends) + quarter_sum(s_ends, 1, ends)
    dl += quarter_sum(s_ends, 2, ends) + quarter_sum(s_ends, 3, ends)
    dq = load_tall(s_f.index(0), tall, quarters) * (upto * from_start)
    dgc = load_scaled(s_x.index(0), s_rows.index(Q_SCALE)) * dq - dgc
    dr = dq
    if REMOVES:
        dr = load_tall(s_f.index(1), tall, quarters) * (upto * from_start) * -1.0
        dgc += rows_factor(s_rows, 0) * (b_k * dr)
    barrier()

    # What the scores add, between quarters and then within them.
    s_o = s_v.index(0)._reinterpret(half, [2, S.BT, SLAB], wide)
    s_r = s_h._reinterpret(gl.float32, [2, S.BT, SLAB], single)
    places = s_o, s_r
    w_3 = w[:, None, :]
    for n in gl.static_range(4, 6):
        second = (w_3 >> (n - 4)) % 2 == 1
        f = gl.where(second, upto, after)
        if n == 5:
            f *= to_middle
        b_k = load_scaled(s_x.index(1), s_rows.index(K_SCALE))
        b_q = load_scaled(s_x.index(0), s_rows.index(Q_SCALE))
        x_q = (gl.where(second, b_q, b_k) * f).to(half)
        store_tall(x_q, s_o.index(0), tall)
        x_k = x_q
        if REMOVES:
            x_k = (gl.where(second, rows_factor(s_rows, 0), 1.0) * (b_k * f)).to(half)
            store_tall(x_k, s_o.index(1), tall)
        large_products(s_s, places, n, REMOVES)
        b_r = load_tall(s_r.index(0), tall, quarters)
        f_row = gl.where(second, f, 0.0)
        dq += f_row * b_r
        t = x_q.to(gl.float32) * b_r
        if REMOVES:
            b_c = load_tall(s_r.index(1), tall, quarters)
            dr += f_row * b_c
            t += x_k.to(gl.float32) * b_c
            b_r += b_c
        dc += (f - f_row) * b_r
        dgc += gl.where(second, t, -t)
    d_q = load_diagonal(scores)
    d_k = d_q
    if REMOVES:
        d_k = load_diagonal(scores + S.BT * S.BT)
    e = a, ones, a
    for n in gl.static_range(4):
        N: gl.constexpr = 1 << n
        upto, after, _ = e
        _, f_b = halves(upto, N)
        f_a, _ = halves(after, N)
        k_a, k_b = halves(load_scaled(s_x.index(1), s_rows.index(K_SCALE)), N)
        _, q_b = halves(load_scaled(s_x.index(0), s_rows.index(Q_SCALE)), N)
        x_a, x_b = (k_a * f_a).to(half), (q_b * f_b).to(half)
        store_tall(joined(x_a, x_b, N), s_o.index(0), tall)
        y_b = x_b
        if REMOVES:
            _, beta_b = halves(rows_factor(s_rows, 0) * ones, N)
            y_b = (beta_b * (k_b * f_b)).to(half)
            store_tall(joined(x_a, y_b, N), s_o.index(1), tall)
        small_products(d_q, d_k, places, n, REMOVES)
        r_a, r_b = halves(load_tall(s_r.index(0), tall, quarters), N)
        dq_a, dq_b = halves(dq, N)
        dc_a, dc_b = halves(dc, N)
        g_a, g_b = halves(dgc, N)
        dq = joined(dq_a, dq_b + f_b * r_b, N)
        g_b += x_b.to(gl.float32) * r_b
        if REMOVES:
            y_a, c_b = halves(load_tall(s_r.index(1), tall, quarters), N)
            dr_a, dr_b = halves(dr, N)
            dr = joined(dr_a, dr_b + f_b * c_b, N)
            g_b += y_b.to(gl.float32) * c_b
            r_a += y_a
        dc = joined(dc_a + f_a * r_a, dc_b, N)
        dgc = joined(g_a - x_a.to(gl.float32) * r_a, g_b, N)
        if n < 3:
            e = doubled(e, N)

    # Gradients of q and k.
    here = out.row_grads + i_ch * (GRAD_PLANES * S.BT) + i
    to = (start * S.HV + i_hv) * S.K + i_k * SLAB
    row: gl.constexpr = S.HV * S.K
    place = to + (i * row + c[None, :][:, None, :])
    b_k = load_scaled(s_x.index(1), s_rows.index(K_SCALE))
    b_q = load_scaled(s_x.index(0), s_rows.index(Q_SCALE))
    diagonal = gl.load(here + DIAGONAL * S.BT)
    dq += diagonal * b_k
    dc += diagonal * b_q
    if R.NORM:
        dq -= gl.load(here + Q_DQ * S.BT) / (scale * scale) * b_q
        dc -= gl.load(here + K_DK * S.BT) * b_k
    dq *= rows_factor(s_rows, Q_SCALE)
    gl.store(out.dq + place, dq.to(out.dq.dtype.element_ty), mask=i < n_rows)
    if REMOVES:
        share = out.shares + ((i_k + 1).to(gl.int64) * tokens + start) * S.HV + i_hv
        i_s = gl.arange(0, 4, gl.SliceLayout(1, gl.SliceLayout(2, quarters)))[:, None] * 16
        i_s += gl.arange(0, 16, gl.SliceLayout(0, gl.SliceLayout(2, quarters)))[None, :]
        gl.store(share + i_s * S.HV, gl.sum(b_k * dr, 2), mask=i_s < n_rows)
        dc += dr * rows_factor(s_rows, 0)
    dc *= rows_factor(s_rows, K_SCALE)
    gl.store(out.dk + place, dc.to(out.dk.dtype.element_ty), mask=i < n_rows)

    # The gradient of the gate: sums over the rows from each one on.
    before = gl.associative_scan(dgc, 1, plus)
    whole = gl.sum(gl.where(r == 15, before, 0.0), 1)
    barrier()
    s_ends.store(whole)
    barrier()
    t_3 = quarter_sum(s_ends, 3, ends) + dl
    t_2 = quarter_sum(s_ends, 2, ends) + t_3
    t_1 = quarter_sum(s_ends, 1, ends) + t_2
    d = dgc + (whole + of_quarters(w, t_1, t_2, t_3, dl))[:, None, :] - before
    d = gl.where(i < n_rows, d, 0.0)
    raw, rate = load_raw(gate, start, i_hv, i_k, i, c, n_rows, S)
    d_raw, d_rate = slopes(raw, rate, gate.bound, d, R.GATE)
    gl.store(out.dg + place, d_raw.to(out.dg.dtype.element_ty), mask=i < n_rows)
    if out.dA_log is not None:
        total = gl.sum(gl.sum(gl.sum(d_rate, 1), 0), 0)
        gl.store(out.dA_log + (i_c * tiles + i_k) * S.HV + i_hv, total)
    if out.ddt_bias is not None:
        bias = out.ddt_bias + i_ch * S.K + i_k * SLAB + c
        gl.store(bias, gl.sum(gl.sum(d_raw, 1), 0))


def steep_bwd(
    table: Tables, x: Inputs, c: Chunks, read: Saved, out: Grads, t: Tile, R: RuleOptions
) -> None:
    """Launches the kernel. read, out: as `intra_bwd_kernel` takes them, out with parts for key tiles
    of 64 channels. Raises ValueError for chunks that the kernel does not support."""
    (NC, HV, K), H, V, rule = c.decay.shape, x.q.shape[1], x.v.shape[2], c.rule
    reason = why_not_bwd(x, c, read, R._replace(SAFE=True))
    if not R.BY_CHUNK:
        reason = "it serves what the path of a safe gate leaves out"
    elif t.BK != 64:
        reason = f"BK must be 64, got {t.BK}"
    if reason:
        raise ValueError(f"the tile {t} of stage intra_bwd_any cannot be used: {reason}")
    S = shape(rule, x.q.dtype, H, HV, K, V, t)
    compiled = {"S": S, "R": R, "num_warps": t.warps, "maxnreg": t.registers}
    given = read, gate(rule, x), out, table.chunks, out.shares.shape[1], rule.scale
    launch(steep_bwd_sm90_kernel, (NC * (K // t.BK), HV), *given, **compiled)
