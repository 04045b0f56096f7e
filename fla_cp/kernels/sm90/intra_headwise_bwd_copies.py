"""The warps of the headwise backward that copy operands in and gradients out."""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import mbarrier, tma

from fla_cp.kernels.triton.device.planes import HEADWISE_PLANES

# Where each plane of `Chunks.rows` (device/planes.py) is put in shared memory. BETA is the first.
SLOT_Q_SCALE = gl.constexpr(1)
SLOT_K_SCALE = gl.constexpr(2)
SLOT_K_FACTOR = gl.constexpr(3)
SLOT_GC = gl.constexpr(4)
SLOT_R_SCALE = gl.constexpr(5)
SLOT_GC_BEFORE = gl.constexpr(6)


@gluon.jit
def tiles_of(places, stage, slot):
    """The tiles of the operands. do and v_new have one for each stage of the pipeline, the others
    have a single one. slot: 0, see `form_items`."""
    s_do, s_vn, s_y, s_v, s_h, s_dh, s_q, s_k, s_p, _rows, _w, _rb = places
    return (
        s_do.index(stage),
        s_vn.index(stage),
        s_y.index(slot),
        s_v.index(slot),
        s_h.index(slot),
        s_dh.index(slot),
        s_q.index(slot),
        s_k.index(slot),
        s_p.index(slot),
    )


@gluon.jit
def copy_items(tensors, places, ready, free, more, items, S: gl.constexpr):
    """What one warp does: it copies the operands of each chunk and head to their places, each as
    soon as its place is free."""
    do, v_new, y, v, h, dh, q, k, p, rows = tensors
    _do, _vn, s_y, s_v, s_h, s_dh, s_q, s_k, s_p = tiles_of(places, 0, 0)
    s_rows = places[9]
    do_h, v_h, q_h, k_h, p_h = more.heads
    OWN: gl.constexpr = S.REMOVAL == "p"
    of_values: gl.constexpr = 2 * S.BT * S.V
    heads, visits = 0, 0
    H: gl.constexpr = S.HV // S.G
    for item in range(gl.program_id(0), items, gl.num_programs(0)):
        i_c, i_h = item // H, item % H
        t = gl.load(more.chunks.start + i_c)
        for i_g in range(S.G):
            i_hv = i_h * S.G + i_g
            i_ch = i_c * S.HV + i_hv
            past = (visits + 1) & 1
            stage = visits % S.NS
            mbarrier.wait(free.index(4 + stage), (visits // S.NS + 1) & 1)
            bar = ready.index(4 + stage)
            mbarrier.expect(bar, 2 * of_values)
            tma.async_copy_global_to_shared(do, [t, i_hv * do_h], bar, places[0].index(stage))
            tma.async_copy_global_to_shared(v_new, [i_ch * S.BT, 0], bar, places[1].index(stage))
            mbarrier.wait(free.index(0), past)
            bar = ready.index(0)
            mbarrier.expect(bar, 2 * of_values + 4 * (7 if OWN else 5) * S.BT)
            for i_p in gl.static_range(7 if OWN else 5):
                plane = i_p if i_p < 3 else (3 + i_p if i_p < 5 else 3 + 5 * (i_p - 5))
                at = [i_ch * HEADWISE_PLANES + plane, 0]
                tma.async_copy_global_to_shared(rows, at, bar, s_rows.index(i_p))
            tma.async_copy_global_to_shared(y, [i_ch * S.BT, 0], bar, s_y)
            mbarrier.wait(free.index(2), past)
            tma.async_copy_global_to_shared(v, [t, i_hv * v_h], bar, s_v)
            bar = ready.index(1)
            mbarrier.expect(bar, 2 * S.K * S.V)
            tma.async_copy_global_to_shared(h, [i_ch * S.K, 0], bar, s_h)
            mbarrier.wait(free.index(1), past)
            bar = ready.index(2)
            mbarrier.expect(bar, 2 * S.K * S.V)
            tma.async_copy_global_to_shared(dh, [i_ch * S.K, 0], bar, s_dh)
            if i_g == 0:
                mbarrier.wait(free.index(3), (heads + 1) & 1)
                bar = ready.index(3)
                mbarrier.expect(bar, 2 * S.BT * S.K * (3 if OWN else 2))
                tma.async_copy_global_to_shared(q, [t, i_h * q_h], bar, s_q)
                tma.async_copy_global_to_shared(k, [t, i_h * k_h], bar, s_k)
                if OWN:
                    tma.async_copy_global_to_shared(p, [t, i_h * p_h], bar, s_p)
            visits += 1
        heads += 1  # noqa: SIM113  # Gluon has no enumerate


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
def store_items(tensors, places, free, done, more, items, S: gl.constexpr):
    """What the storing warps do: they store dv from v's place and dq, dk, dp from those of q, k and
    p, and then declare these free."""
    dq, dk, dp, dv = tensors
    _do, _vn, _y, s_v, _h, _dh, s_q, s_k, s_p = tiles_of(places, 0, 0)
    heads, visits = 0, 0
    H: gl.constexpr = S.HV // S.G
    for item in range(gl.program_id(0), items, gl.num_programs(0)):
        i_c, i_h = item // H, item % H
        t, n = gl.load(more.chunks.start + i_c), gl.load(more.chunks.rows + i_c)
        for i_g in range(S.G):
            mbarrier.wait(done.index(0), visits & 1)
            store_rows(dv, more.dv_rows, s_v, t, n, i_h * S.G + i_g, S.HV, S.V, S.BT)
            tma.store_wait(0)
            mbarrier.arrive(free.index(2), count=1)
            visits += 1
        mbarrier.wait(done.index(1), heads & 1)
        store_rows(dq, more.dq_rows, s_q, t, n, i_h, H, S.K, S.BT)
        store_rows(dk, more.dk_rows, s_k, t, n, i_h, H, S.K, S.BT)
        if S.REMOVAL == "p":
            store_rows(dp, more.dp_rows, s_p, t, n, i_h, H, S.K, S.BT)
        tma.store_wait(0)
        mbarrier.arrive(free.index(3), count=1)
        heads += 1  # noqa: SIM113  # Gluon has no enumerate
