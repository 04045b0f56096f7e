"""The warps of the headwise backward beside those that form products: they copy operands in and
gradients out, and form sums."""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import mbarrier, tma

from fla_cp.kernels.sm90.tma import barrier
from fla_cp.kernels.triton.device.planes import HEADWISE_PLANES

# Where each plane of `Chunks.rows` (device/planes.py) is put in shared memory. BETA is the first.
SLOT_Q_SCALE = gl.constexpr(1)
SLOT_K_SCALE = gl.constexpr(2)
SLOT_K_FACTOR = gl.constexpr(3)
SLOT_GC = gl.constexpr(4)
SLOT_R_SCALE = gl.constexpr(5)
SLOT_GC_BEFORE = gl.constexpr(6)

# The numbers of barriers: one of each says that its tiles are there, another that their places are
# free again.
BAR_H = gl.constexpr(0)
"""The planes and h."""
BAR_DH = gl.constexpr(1)
BAR_V = gl.constexpr(2)
BAR_K = gl.constexpr(3)
"""q, k and p; where they were, the gradients of a key head are left for the storing warps."""
BAR_STAGE = gl.constexpr(4)
"""The first stage of do, v_new and dv; one more for each further stage."""


@gluon.constexpr_function
def planes_of(S):
    """How many planes of rows are copied."""
    return 7 if S.REMOVAL == "p" else 5


@gluon.jit
def tiles_of(places, stage, slot):
    """The tiles of the operands. do, v_new and dv have one for each stage of the pipeline, the
    others have a single one. slot: 0, see `form_items`."""
    s_do, s_vn, s_dv, s_v, s_h, s_dh, s_q, s_k, s_p, _rows, _w, _sums = places
    return (
        s_do.index(stage),
        s_vn.index(stage),
        s_dv.index(stage),
        s_v.index(slot),
        s_h.index(slot),
        s_dh.index(slot),
        s_q.index(slot),
        s_k.index(slot),
        s_p.index(slot),
    )


@gluon.jit
def copy_items(tensors, places, ready, free, more, items, programs, S: gl.constexpr):
    """What one warp does: it copies the operands of each chunk and head to their places, each as
    soon as its place is free."""
    do, v_new, dv, v, h, dh, q, k, p, rows = tensors
    _do, _vn, _dv, s_v, s_h, s_dh, s_q, s_k, s_p = tiles_of(places, 0, 0)
    s_rows = places[9]
    do_h, v_h, q_h, k_h, p_h = more.heads
    OWN: gl.constexpr = S.REMOVAL == "p"
    REMOVES: gl.constexpr = S.REMOVAL != "none"
    PLANES: gl.constexpr = planes_of(S)
    of_values: gl.constexpr = 2 * S.BT * S.V
    heads, visits = 0, 0
    H: gl.constexpr = S.HV // S.G
    for item in range(gl.program_id(0), items, programs):
        i_c, i_h = item // H, item % H
        t = gl.load(more.chunks.start + i_c)
        for i_g in range(S.G):
            i_hv = i_h * S.G + i_g
            i_ch = i_c * S.HV + i_hv
            past = (visits + 1) & 1
            stage = visits % S.NS
            mbarrier.wait(free.index(BAR_STAGE + stage), (visits // S.NS + 1) & 1)
            bar = ready.index(BAR_STAGE + stage)
            mbarrier.expect(bar, (3 if REMOVES else 2) * of_values)
            tma.async_copy_global_to_shared(do, [t, i_hv * do_h], bar, places[0].index(stage))
            tma.async_copy_global_to_shared(v_new, [i_ch * S.BT, 0], bar, places[1].index(stage))
            if REMOVES:
                at = [t, i_hv * S.V]
                tma.async_copy_global_to_shared(dv, at, bar, places[2].index(stage))
                mbarrier.wait(free.index(BAR_V), past)
                bar = ready.index(BAR_V)
                mbarrier.expect(bar, of_values)
                tma.async_copy_global_to_shared(v, [t, i_hv * v_h], bar, s_v)
            mbarrier.wait(free.index(BAR_H), past)
            bar = ready.index(BAR_H)
            mbarrier.expect(bar, 2 * S.K * S.V + 4 * PLANES * S.BT)
            for i_p in gl.static_range(PLANES):
                plane = i_p if i_p < 3 else (3 + i_p if i_p < 5 else 3 + 5 * (i_p - 5))
                at = [i_ch * HEADWISE_PLANES + plane, 0]
                tma.async_copy_global_to_shared(rows, at, bar, s_rows.index(i_p))
            tma.async_copy_global_to_shared(h, [i_ch * S.K, 0], bar, s_h)
            mbarrier.wait(free.index(BAR_DH), past)
            bar = ready.index(BAR_DH)
            mbarrier.expect(bar, 2 * S.K * S.V)
            tma.async_copy_global_to_shared(dh, [i_ch * S.K, 0], bar, s_dh)
            if i_g == 0:
                mbarrier.wait(free.index(BAR_K), (heads + 1) & 1)
                bar = ready.index(BAR_K)
                mbarrier.expect(bar, 2 * S.BT * S.K * (3 if OWN else 2))
                tma.async_copy_global_to_shared(q, [t, i_h * q_h], bar, s_q)
                tma.async_copy_global_to_shared(k, [t, i_h * k_h], bar, s_k)
                if OWN:
                    tma.async_copy_global_to_shared(p, [t, i_h * p_h], bar, s_p)
            visits += 1
        heads += 1  # noqa: SIM113  # Gluon has no enumerate


@gluon.jit
def sum_values(places, ready, free, more, visits, n, t, i_hv, varied, S: gl.constexpr):
    """Stores v's share of dbeta, v dv / beta summed over channels, for a chunk and a value head.
    varied: less than BT + G, see `form_items`."""
    flat: gl.constexpr = gl.BlockedLayout([1, 8], [4, 8], [gl.num_warps(), 1], [1, 0])
    line: gl.constexpr = gl.BlockedLayout([1], [32], [gl.num_warps()], [0])
    HALF: gl.constexpr = S.V // 2
    ROWS: gl.constexpr = 8
    stage, zero = visits % S.NS, varied // (S.BT + S.G)
    _do, _vn, s_dv, s_v, _h, _dh, _q, _k, _p = tiles_of(places, zero + stage, zero)
    s_sums = places[11]
    mbarrier.wait(ready.index(BAR_STAGE + stage), (visits // S.NS) & 1)
    mbarrier.wait(ready.index(BAR_H), visits & 1)
    mbarrier.wait(ready.index(BAR_V), visits & 1)
    for part in gl.static_range(S.BT // ROWS):
        if part * ROWS < n:  # a branch, so that not all loads start together
            x = gl.full([ROWS, HALF], 0.0, gl.float32, flat)
            for side in gl.static_range(2):
                at = s_v.slice(part * ROWS, ROWS).slice(side * HALF, HALF, 1)
                b_v = at.load(flat).to(gl.float32)
                at = s_dv.slice(part * ROWS, ROWS).slice(side * HALF, HALF, 1)
                x += b_v * at.load(flat).to(gl.float32)
            s_sums.slice(part * ROWS, ROWS).store(gl.sum(x, 1))
    barrier()
    i = gl.arange(0, S.BT, line)
    to = more.shares + (t + zero + i).to(gl.int64) * S.HV + i_hv
    beta = places[9].index(zero).reshape([S.BT]).load(line)
    gl.store(to, s_sums.load(line) / beta, mask=i < n)
    mbarrier.arrive(free.index(BAR_V), count=1)
    mbarrier.arrive(free.index(BAR_H), count=1)
    mbarrier.arrive(free.index(BAR_STAGE + stage), count=1)


@gluon.jit
def store_rows(x, x_rows, block, t, n, i_h, H: gl.constexpr, D: gl.constexpr, BT: gl.constexpr):
    """Stores the first n rows of a block of x [T, H, D]; x_rows: x as a pointer."""
    varied = n + i_h % 2
    if n == BT:
        tma.async_copy_shared_to_global(x, [t, i_h * D], block)
    else:  # rows of another sequence follow
        flat: gl.constexpr = gl.BlockedLayout([1, 8], [2, 16], [gl.num_warps(), 1], [1, 0])
        o_d = gl.arange(0, D, gl.SliceLayout(0, flat))
        for part in gl.static_range(BT // 8):  # each forms its addresses anew (device/opaque.py)
            if part * 8 < n:  # a branch, so that the loads of all parts do not start together
                i = part * 8 + varied // (BT + 2 + part) + gl.arange(0, 8, gl.SliceLayout(1, flat))
                to = x_rows + ((t + i).to(gl.int64) * H + i_h)[:, None] * D + o_d[None, :]
                gl.store(to, block.slice(part * 8, 8).load(flat), mask=(i < n)[:, None])


@gluon.jit
def sum_and_store_items(tensors, places, ready, free, done, more, items, programs, S: gl.constexpr):
    """What two warps do: they call `sum_values`, store dq, dk and dp from the places of q, k and p,
    and then declare these free."""
    dq, dk, dp = tensors
    _do, _vn, _dv, _v, _h, _dh, s_q, s_k, s_p = tiles_of(places, 0, 0)
    heads, visits = 0, 0
    H: gl.constexpr = S.HV // S.G
    for item in range(gl.program_id(0), items, programs):
        i_c, i_h = item // H, item % H
        t, n = gl.load(more.chunks.start + i_c), gl.load(more.chunks.rows + i_c)
        for i_g in range(S.G):
            i_hv = i_h * S.G + i_g
            if S.REMOVAL != "none":
                sum_values(places, ready, free, more, visits, n, t, i_hv, n + i_g, S)
            visits += 1
        mbarrier.wait(done.index(0), heads & 1)
        store_rows(dq, more.dq_rows, s_q, t, n, i_h, H, S.K, S.BT)
        store_rows(dk, more.dk_rows, s_k, t, n, i_h, H, S.K, S.BT)
        if S.REMOVAL == "p":
            store_rows(dp, more.dp_rows, s_p, t, n, i_h, H, S.K, S.BT)
        tma.store_wait(0)
        mbarrier.arrive(free.index(BAR_K), count=1)
        heads += 1  # noqa: SIM113  # Gluon has no enumerate
