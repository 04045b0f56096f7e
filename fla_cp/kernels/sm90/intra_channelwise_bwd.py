"""The backward of everything local to a chunk on the path of a safe gate, for sm_90, in Gluon.

triton/intra_channelwise_bwd_safe.py explains what is computed; the results are equal up to
rounding. A program has a slab of 64 channels of a chunk and a head. Gates and sums along tokens are
formed where a thread has 16 rows of two channels, so that sums are additions in its registers. All
else is formed where products leave their results. In between, the sums of decays go one way through
shared memory, and their gradient goes back.

Decays are relative to the middle of their half, as in the forward, but rounded to a whole power of
two. Pairs of a row in the second half and a column in the first have another factor a channel: it
multiplies the columns before the products for rows, and the results of the products for columns.
Since it is a power of two, rounded columns stay the same numbers, and what a pair adds to the
gradient of gc at its row cancels at its column.

If x.y is None, dv = beta y stands for y. Then that and the scores' gradients contain beta, the row
factor is k instead of beta k, and this kernel's shares of dbeta are shares of beta dbeta.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language import NVMMASharedLayout
from triton.experimental.gluon.language.nvidia.hopper import (
    async_copy,
    fence_async_shared,
    warpgroup_mma,
    warpgroup_mma_wait,
)

from fla_cp.kernels.sm90.intra_channelwise import (
    SLAB,
    aligned,
    copy_slab,
    load_g,
    log_decay,
    of_quarters,
    plus,
    quarter_sum,
    raw_and_rate,
    sigmoid,
    why_not,
)
from fla_cp.kernels.sm90.intra_channelwise import takes as taken
from fla_cp.kernels.sm90.intra_channelwise_bwd_quarters import (
    by_quarter,
    of_own,
    of_step,
    quarter_products,
    references,
    store_references,
    times,
)
from fla_cp.kernels.sm90.intra_channelwise_bwd_scores import y_rows
from fla_cp.kernels.sm90.prefetch import prefetch_tile, program_ahead, rows_of_chunk
from fla_cp.kernels.sm90.programs import chunk_and_head
from fla_cp.kernels.sm90.tma import barrier
from fla_cp.kernels.sm90.upcast import upcast
from fla_cp.kernels.torch.intra import Inputs
from fla_cp.kernels.triton.device.blocks import gate_rows, rows_from
from fla_cp.kernels.triton.device.bundles import Grads, Rows, RuleOptions, Saved, gate, shape
from fla_cp.kernels.triton.device.channelwise_decay import ANCHORS
from fla_cp.kernels.triton.device.gates import LOG2E
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

TO_END, UP_TO = gl.constexpr(1), gl.constexpr(2)
NEAR, FAR = gl.constexpr(3), gl.constexpr(4)
"""The numbers of the tables that `half_factors` gives: decays to the chunk's end, decays up to the
middle, and the two factors of decays between the middles."""

AHEAD = gl.constexpr(66)
"""How many programs later the one starts whose inputs are prefetched: a quarter of those that an
H200 runs at the same time. With 132 the kernel is as fast, with 33 or 200 it takes 2% longer."""


@gluon.jit
def slopes(raw, rate, bound, dg, GATE: gl.constexpr):
    """From the gradient of the log decay: those of raw and, element by element, of A_log."""
    if GATE == "softplus":
        d_raw = -rate * sigmoid(1.0, raw) * dg
        return d_raw, log_decay(raw, rate, bound, GATE) / LOG2E * dg
    elif GATE == "sigmoid":
        s = sigmoid(rate, raw)
        d_raw = (bound * rate) * s * (1.0 - s) * dg
        return d_raw, d_raw * raw
    else:
        return dg, dg


@gluon.jit
def whole_power(n):
    return gl.floor(n + 0.5)


@gluon.jit
def half_factors(anchors, w, c, S: gl.constexpr):
    """For each quarter w [4, 1] and channel c, [4, SLAB] each: by how much the middle of its half
    exceeds the whole number next to it; the decay from that number to the chunk's end; the decay up
    to that number; and two factors of the decay between the numbers of both halves, which are 1 in
    the second half."""
    a_0, a_1 = gl.load(anchors + c), gl.load(anchors + 2 * S.K + c)
    end = gl.load(anchors + 3 * S.K + c)[None, :]
    early, a = w < 2, gl.where(w < 2, a_0[None, :], a_1[None, :])
    n_0, n_1 = whole_power(a_0), whole_power(a_1)
    n = gl.where(early, n_0[None, :], n_1[None, :])
    across = gl.where(early, (n_1 - n_0)[None, :], 0.0)
    near, far = gl.exp2(gl.maximum(across, -120.0)), gl.exp2(gl.minimum(across + 120.0, 0.0))
    return a - n, gl.exp2(end - n), gl.exp2(n), near, far


@gluon.jit
def of_half(s_factors, kind: gl.constexpr):
    """A table of `half_factors` [4, SLAB], as `times` takes it."""
    return s_factors.index(kind).load(gl.SliceLayout(1, by_quarter()))


@gluon.jit
def across_halves(x, s_factors):
    """x [64, SLAB], in the first half of the rows times the decay between the middles of both."""
    return times(times(x, of_half(s_factors, NEAR)), of_half(s_factors, FAR))


@gluon.jit
def store_slab(x, place, to, row, n_rows, acc: gl.constexpr, flat: gl.constexpr):
    """Stores the first n_rows rows of x [64, 64], which are `row` elements apart. Results in half
    precision go by way of shared memory."""
    SHORT: gl.constexpr = to.dtype.element_ty == place.dtype
    layout: gl.constexpr = flat if SHORT else acc
    if SHORT:
        place.store(x.to(place.dtype))
        barrier()
        x = place.load(layout)
    i = gl.arange(0, 64, gl.SliceLayout(1, layout))[:, None]
    j = gl.arange(0, 64, gl.SliceLayout(0, layout))[None, :]
    gl.store(to + (i * row + j), x, mask=i < n_rows)


@gluon.jit
def prefetch_inputs(x, gate, out, chunks, place, i_k, S: gl.constexpr):
    """Prefetches what a program of another chunk and head (`place`) reads: the tiles of its slab,
    and half of those that the programs of both slabs read."""
    i_c, i_hv = place
    i_ch = i_c * S.HV + i_hv
    start, last = rows_of_chunk(chunks, i_c)
    half: gl.constexpr = x.v_new.dtype.element_ty
    G_SIZE: gl.constexpr = 2 if gate.g.dtype.element_ty == half else 4
    shift = i_k * SLAB
    states, values = (i_ch * S.K + shift) * S.V, i_ch * (S.BT * S.V) + shift
    prefetch_tile(Rows(x.h + states, S.V, 0), SLAB - 1, S.V, 2)
    prefetch_tile(Rows(x.dh + states, S.V, 0), SLAB - 1, S.V, 2)
    do = rows_from(x.do, start, i_hv)
    prefetch_tile(Rows(do.ptr + shift, do.row, 0), last, SLAB, 2)
    prefetch_tile(Rows(x.v_new + values, S.V, 0), S.BT - 1, SLAB, 2)
    scores = out.scores + i_ch * (2 * S.BT * S.BT)
    if S.REMOVAL != "none":
        y, y_row, y_n = y_rows(x, out, start, i_ch, i_hv, last + 1, S)
        prefetch_tile(Rows(y + shift, y_row, 0), y_n - 1, SLAB, 2)
        scores += i_k * (S.BT * S.BT)
    prefetch_tile(Rows(scores, S.BT, 0), S.BT - 1, SLAB, 2)
    q, k = rows_from(x.q, start, i_hv // S.G), rows_from(x.k, start, i_hv // S.G)
    prefetch_tile(Rows(q.ptr + shift, q.row, 0), last, SLAB, 2)
    prefetch_tile(Rows(k.ptr + shift, k.row, 0), last, SLAB, 2)
    g = gate_rows(gate, start, i_hv)
    prefetch_tile(Rows(g.ptr + shift, g.row, 0), last, SLAB, G_SIZE)


@gluon.jit
def safe_bwd_sm90_kernel(x, gate, out, chunks, tokens, scale, S: gl.constexpr, R: gl.constexpr):
    """`safe_bwd_kernel` for key tiles of 64 channels. tokens: the rows of out.shares."""
    tiles: gl.constexpr = S.K // SLAB
    i_k = gl.program_id(0) % tiles
    i_ch = (gl.program_id(0) // tiles).to(gl.int64)
    i_c, i_hv = chunk_and_head(gl.program_id(0) // tiles, S.HV)
    i_h = i_hv // S.G
    n_rows = gl.load(chunks.rows + i_c)
    start = gl.load(chunks.start + i_c).to(gl.int64)
    half: gl.constexpr = x.v_new.dtype.element_ty
    REMOVES: gl.constexpr = S.REMOVAL != "none"
    QUARTERS: gl.constexpr = S.NS > 1
    wide: gl.constexpr = NVMMASharedLayout(128, 16, 2)
    # Without conflicts of banks in `acc` and in `tall`
    single: gl.constexpr = gl.SwizzledSharedLayout(8, 1, 8, [1, 0])
    plain: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [1, 0])
    flat: gl.constexpr = gl.BlockedLayout([1, 8], [4, 8], [4, 1], [1, 0])
    acc: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, SLAB, 16])
    tall: gl.constexpr = gl.BlockedLayout([16, 2], [1, 32], [4, 1], [1, 0])
    quarters: gl.constexpr = gl.BlockedLayout([1, 16, 2], [1, 1, 32], [4, 1, 1], [2, 1, 0])
    ends: gl.constexpr = gl.SliceLayout(1, quarters)

    s_x = gl.allocate_shared_memory(half, [2, S.BT, SLAB], wide)  # q, k
    s_sums = gl.allocate_shared_memory(gl.float32, [S.BT, SLAB], single)  # of decays
    s_h = gl.allocate_shared_memory(half, [2, SLAB, S.V], wide)  # h, dh
    s_v = gl.allocate_shared_memory(half, [3, S.BT, S.V], wide)  # do, y, v_new
    q, k = rows_from(x.q, start, i_h), rows_from(x.k, start, i_h)
    do = rows_from(x.do, start, i_hv)
    states, values = (i_ch * S.K + i_k * SLAB) * S.V, i_ch * (S.BT * S.V)
    copy_slab(x.h + states, S.V, SLAB, s_h.index(0), S.BT, S.V)
    copy_slab(do.ptr, do.row, n_rows, s_v.index(0), S.BT, S.V)
    if REMOVES:
        y, y_row, y_n = y_rows(x, out, start, i_ch, i_hv, n_rows, S)
        copy_slab(y, y_row, y_n, s_v.index(1), S.BT, S.V)
    copy_slab(x.dh + states, S.V, SLAB, s_h.index(1), S.BT, S.V)
    copy_slab(x.v_new + values, S.V, S.BT, s_v.index(2), S.BT, S.V)
    async_copy.commit_group()
    copy_slab(q.ptr + i_k * SLAB, q.row, n_rows, s_x.index(0), S.BT, SLAB)
    copy_slab(k.ptr + i_k * SLAB, k.row, n_rows, s_x.index(1), S.BT, SLAB)
    async_copy.commit_group()

    # Sums of decays from the middle of the half, where a thread has a quarter's rows.
    w = gl.arange(0, 4, gl.SliceLayout(1, ends))[:, None]
    c_e = gl.arange(0, SLAB, gl.SliceLayout(0, ends))
    r = gl.arange(0, 16, gl.SliceLayout(0, gl.SliceLayout(2, quarters)))[None, :][:, :, None]
    i_q = gl.arange(0, 4, gl.SliceLayout(1, gl.SliceLayout(2, quarters)))[:, None][:, :, None]
    i_q = i_q * 16 + r
    g = load_g(gate, start, i_hv, i_k, i_q, c_e, n_rows)
    raw, rate = raw_and_rate(g, gate, i_hv, i_k, c_e, S)
    steps = gl.where(i_q < n_rows, log_decay(raw, rate, gate.bound, R.GATE), 0.0)
    l = gl.associative_scan(steps, 1, plus)  # noqa: E741
    whole = gl.sum(gl.where(r == 15, l, 0.0), 1)
    at_slab = x.anchors + (i_ch * ANCHORS * S.K + i_k * SLAB)
    if QUARTERS:
        middle, _, _ = references(at_slab, w, c_e, S)
    else:
        excess, to_end, up_to, near, far = half_factors(at_slab, w, c_e, S)
        middle = gl.where(w % 2 == 0, whole, 0.0) - excess
    l -= middle[:, None, :]  # noqa: E741
    # They are stored here, so that the compiler forms them while the tiles are on their way. The
    # gradients of the scores, which have no place until then, are copied later.
    s_sums.store(gl.convert_layout(gl.reshape(l, [S.BT, SLAB]), tall))

    # What the states add, relative to the middle of each half. Vectors of channels are loaded again
    # in each part, and barriers keep the parts apart: registers hold no more.
    i = gl.arange(0, S.BT, gl.SliceLayout(1, acc))
    c = gl.arange(0, SLAB, gl.SliceLayout(0, acc))
    none = n_rows // (S.BT + 1)  # 0 in a form that the compiler cannot tell to be 0
    first = (i < S.BT // 2)[:, None]
    anchors = x.anchors + i_ch * (ANCHORS * S.K) + i_k * SLAB
    zero = gl.full([S.BT, SLAB], 0.0, gl.float32, acc)
    async_copy.wait_group(1)
    fence_async_shared()
    barrier()
    h_dh = warpgroup_mma(
        s_h.index(0), s_h.index(1).permute((1, 0)), zero, use_acc=False, is_async=True
    )
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
    h_dh = warpgroup_mma_wait(3 if REMOVES else 2, deps=(h_dh,))
    h_dh = gl.sum(gl.where(i[:, None] == c[None, :], h_dh, 0.0), 1)  # of each channel
    if REMOVES:
        b_dq, b_dr, b_dc = warpgroup_mma_wait(0, deps=(b_dq, b_dr, b_dc))
    else:
        b_dq, b_dc = warpgroup_mma_wait(0, deps=(b_dq, b_dc))
    async_copy.wait_group(0)
    barrier()  # the tiles of states and values are free, and all others are there
    later = chunk_and_head(program_ahead(AHEAD) // tiles, S.HV)
    prefetch_inputs(x, gate, out, chunks, later, i_k, S)
    s_s = s_v.index(0)._reinterpret(half, [2, S.BT, SLAB], wide)  # gradients of the scores
    scores = out.scores + i_ch * (2 * S.BT * S.BT)
    copy_slab(scores, S.BT, S.BT, s_s.index(0), S.BT, SLAB)
    if REMOVES:
        copy_slab(scores + S.BT * S.BT, S.BT, S.BT, s_s.index(1), S.BT, SLAB)
    async_copy.commit_group()
    s_f = s_h._reinterpret(half, [4, S.BT, SLAB], wide)  # near, far, rows of q, of beta k
    s_o = s_v.index(2)._reinterpret(half, [2, S.BT, SLAB], wide)
    s_table = s_f.index(1)  # of references; there are no far columns then
    s_dl = s_o.index(1)._reinterpret(gl.float32, [2, SLAB], gl.SwizzledSharedLayout(1, 1, 1, [0]))
    s_factors = s_o.index(1)._reinterpret(gl.float32, [5, 4, SLAB], plain)  # s_dl is the first
    s_dl.index(0).store(h_dh)
    if QUARTERS:
        _, to_end, step = references(anchors, w, c_e + none, S)
        store_references(s_table, to_end, step)
        barrier()
        b_dc = times(b_dc, of_own(s_table, gl.SliceLayout(1, by_quarter())))
        e = of_step(s_table, 3, gl.SliceLayout(0, acc))[None, :]  # up to the first reference
        b_dq *= e
        if REMOVES:
            b_dr *= -e
    else:
        s_factors.index(TO_END).store(to_end)
        s_factors.index(UP_TO).store(up_to)
        s_factors.index(NEAR).store(near)
        s_factors.index(FAR).store(far)
        barrier()
        b_dc = times(b_dc, of_half(s_factors, TO_END))
        e = of_half(s_factors, UP_TO)
        b_dq = times(b_dq, e)
        if REMOVES:
            b_dr = times(b_dr, -e)

    # The factors of columns and rows.
    at = x.rows + i_ch * (CHANNELWISE_PLANES * S.BT) + i
    l_a = s_sums.load(acc)
    col = upcast(s_x.index(1).load(acc)) * gl.exp2(-l_a)
    col *= gl.load(at + K_SCALE * S.BT)[:, None]
    s_f.index(0).store(col.to(half))
    if not QUARTERS:
        s_f.index(1).store(across_halves(col, s_factors).to(half))
    barrier()
    # The columns' gradients count once more at the chunk's last row, rounded like here.
    s_dl.index(1).store(gl.sum(upcast(s_f.index(0).load(acc)) * b_dc, 0))
    f = gl.exp2(s_sums.load(acc))
    b_x = upcast(s_x.index(0).load(acc)) * f
    s_f.index(2).store((b_x * gl.load(at + Q_SCALE * S.BT)[:, None]).to(half))
    if REMOVES:
        b_x = upcast(s_x.index(1).load(acc)) * f
        r_scale = gl.load(at + K_SCALE * S.BT)
        if x.y is not None:
            r_scale *= gl.load(at)
        s_f.index(3).store((b_x * r_scale[:, None]).to(half))
    async_copy.wait_group(0)
    fence_async_shared()
    barrier()

    if QUARTERS:
        sums = b_dq, b_dr, b_dc
        b_dq, b_dr, b_dc = quarter_products(sums, s_s, s_f, s_table, REMOVES)
    else:
        # What the scores add: to columns, of rows in both halves, and to rows, of each half.
        late_s, late_x = s_s.index(0).slice(32, 32), s_f.index(2).slice(32, 32)
        early_s, early_x = s_s.index(0).slice(0, 32), s_f.index(2).slice(0, 32)
        late = warpgroup_mma(late_s.permute((1, 0)), late_x, zero, use_acc=False, is_async=True)
        b_dc = warpgroup_mma(early_s.permute((1, 0)), early_x, b_dc, is_async=True)
        if REMOVES:
            late_s, late_x = s_s.index(1).slice(32, 32), s_f.index(3).slice(32, 32)
            early_s, early_x = s_s.index(1).slice(0, 32), s_f.index(3).slice(0, 32)
            late = warpgroup_mma(late_s.permute((1, 0)), late_x, late, is_async=True)
            b_dc = warpgroup_mma(early_s.permute((1, 0)), early_x, b_dc, is_async=True)
        near_q = warpgroup_mma(s_s.index(0), s_f.index(0), b_dq, is_async=True)
        far_q = warpgroup_mma(s_s.index(0), s_f.index(1), b_dq, is_async=True)
        late, b_dc = warpgroup_mma_wait(2, deps=(late, b_dc))
        b_dc += across_halves(late, s_factors)
        near_r, far_r = near_q, far_q
        if REMOVES:
            near_r = warpgroup_mma(s_s.index(1), s_f.index(0), b_dr, is_async=True)
            far_r = warpgroup_mma(s_s.index(1), s_f.index(1), b_dr, is_async=True)
            near_q, far_q = warpgroup_mma_wait(2, deps=(near_q, far_q))
            b_dq = gl.where(first, near_q, far_q)
            near_r, far_r = warpgroup_mma_wait(0, deps=(near_r, far_r))
            b_dr = gl.where(first, near_r, far_r)
        else:
            near_q, far_q = warpgroup_mma_wait(0, deps=(near_q, far_q))
            b_dq = gl.where(first, near_q, far_q)
    barrier()

    # Gradients of gc, q and k. All is read and numbered again, to free registers; so is n_rows, for
    # another form of 0.
    i_c, _ = chunk_and_head(gl.program_id(0) // tiles, S.HV)
    n_rows = gl.load(chunks.rows + i_c)
    fresh = n_rows // (S.BT + 1)
    i, i_k = i + fresh, (gl.program_id(0) + fresh) % tiles
    program = (gl.program_id(0) + fresh) // tiles
    i_c, i_hv = chunk_and_head(program, S.HV)
    start, i_ch = gl.load(chunks.start + i_c).to(gl.int64), program.to(gl.int64)
    at = x.rows + i_ch * (CHANNELWISE_PLANES * S.BT) + i
    here = out.row_grads + i_ch * (GRAD_PLANES * S.BT) + i
    b_dgc = upcast(s_f.index(2).load(acc)) * b_dq
    b_dgc -= upcast(s_f.index(0).load(acc)) * b_dc
    if REMOVES:
        b_dgc += upcast(s_f.index(3).load(acc)) * b_dr
    s_dgc = s_v.index(1)._reinterpret(gl.float32, [S.BT, SLAB], single)
    s_dgc.store(b_dgc)
    barrier()
    l_a = s_sums.load(acc)
    f = gl.exp2(l_a)
    b_dq *= f
    b_dc *= gl.exp2(-l_a)
    q_scale, k_scale = gl.load(at + Q_SCALE * S.BT), gl.load(at + K_SCALE * S.BT)
    diagonal = gl.load(here + DIAGONAL * S.BT)
    b_k = upcast(s_x.index(1).load(acc))
    if not QUARTERS:
        b_dq += (diagonal * k_scale)[:, None] * b_k
    if REMOVES:
        b_dr *= f
        share = out.shares + ((i_k + 1).to(gl.int64) * tokens + start) * S.HV + i_hv
        gl.store(share + i * S.HV, k_scale * gl.sum(b_k * b_dr, 1), mask=i < n_rows)
        if x.y is not None:
            b_dr *= gl.load(at)[:, None]
        b_dc += b_dr
    barrier()
    b_q = upcast(s_x.index(0).load(acc))
    b_dc += (diagonal * q_scale)[:, None] * b_q
    if QUARTERS:  # for registers
        b_k = upcast(s_x.index(1).load(acc))
        b_dq += (diagonal * k_scale)[:, None] * b_k
    if R.NORM:
        b_dq -= (gl.load(here + Q_DQ * S.BT) / (scale * scale) * q_scale)[:, None] * b_q
        b_dc -= (gl.load(here + K_DK * S.BT) * k_scale)[:, None] * b_k
    to = (start * S.HV + i_hv) * S.K + i_k * SLAB
    row: gl.constexpr = S.HV * S.K
    store_slab(b_dq * q_scale[:, None], s_o.index(0), out.dq + to, row, n_rows, acc, flat)
    barrier()
    store_slab(b_dc * k_scale[:, None], s_o.index(0), out.dk + to, row, n_rows, acc, flat)

    # The gradient of the gate: sums over the rows from each one on.
    d = gl.convert_layout(gl.reshape(s_dgc.load(tall), [4, 16, SLAB]), quarters)
    column: gl.constexpr = gl.SliceLayout(0, ends)
    end = gl.load(x.anchors + (i_ch * ANCHORS + 3) * S.K + i_k * SLAB + c_e)
    at_end = s_dl.index(0).load(column) * gl.exp2(end)
    at_end += s_dl.index(1).load(column)
    d += gl.where(i_q == S.BT - 1, at_end[None, :][:, None, :], 0.0)
    before = gl.associative_scan(d, 1, plus)
    whole = gl.sum(gl.where(r == 15, before, 0.0), 1)
    again = i_q + fresh
    g = load_g(gate, start, i_hv, i_k, again, c_e, n_rows)  # arrives meanwhile
    raw, rate = raw_and_rate(g, gate, i_hv, i_k, c_e, S)
    s_ends = s_sums._reinterpret(gl.float32, [4, SLAB], plain)
    s_ends.store(whole)
    barrier()
    t_3 = quarter_sum(s_ends, 3, ends)
    t_2 = quarter_sum(s_ends, 2, ends) + t_3
    t_1 = quarter_sum(s_ends, 1, ends) + t_2
    d += (whole + of_quarters(w, t_1, t_2, t_3, t_3 * 0.0))[:, None, :] - before
    d = gl.where(again < n_rows, d, 0.0)
    d_raw, d_rate = slopes(raw, rate, gate.bound, d, R.GATE)
    place = again * row + c_e[None, :][:, None, :]
    gl.store(out.dg + to + place, d_raw.to(out.dg.dtype.element_ty), mask=again < n_rows)
    if out.dA_log is not None:
        total = gl.sum(gl.sum(gl.sum(d_rate, 1), 1), 0)
        gl.store(out.dA_log + (i_c * tiles + i_k) * S.HV + i_hv, total)
    if out.ddt_bias is not None:
        bias = out.ddt_bias + i_ch * S.K + i_k * SLAB + c_e
        gl.store(bias, gl.sum(gl.sum(d_raw, 1), 0))


def why_not_bwd(x: Inputs, c: Chunks, do: Rows, R: RuleOptions) -> str:
    """Why the kernel does not support these chunks; "" if it does."""
    if x.v.shape[2] != 128:
        return f"V must be 128, got {x.v.shape[2]}"
    if do.ptr.dtype != x.v.dtype or not aligned(do):
        return "do has another dtype than v, or copies of 16 bytes are not aligned"
    return why_not(x, c, R)


def takes(x: Inputs, c: Chunks, do: Rows, paths: tuple[tuple[str, RuleOptions], ...]) -> bool:
    """Whether a call takes the kernel by itself, as `intra_channelwise.takes` says."""
    return taken(x, c, paths) and not why_not_bwd(x, c, do, paths[0][1])


def safe_bwd(
    table: Tables, x: Inputs, c: Chunks, read: Saved, out: Grads, t: Tile, R: RuleOptions
) -> None:
    """Launches the kernel. read, out: as `safe_bwd_kernel` takes them. Raises ValueError for chunks
    that the kernel does not support."""
    (NC, HV, K), H, V, rule = c.decay.shape, x.q.shape[1], x.v.shape[2], c.rule
    reason = why_not_bwd(x, c, read.do, R)
    if t.BK != 64:
        reason = f"BK must be 64, got {t.BK}"
    if reason:
        raise ValueError(f"the tile {t} of stage intra_bwd cannot be used: {reason}")
    S = shape(rule, x.q.dtype, H, HV, K, V, t)
    compiled = {"S": S, "R": R, "num_warps": t.warps, "maxnreg": t.registers}
    given = read, gate(rule, x), out, table.chunks, out.shares.shape[1], rule.scale
    launch(safe_bwd_sm90_kernel, (NC * HV * (K // t.BK),), *given, **compiled)
