"""Gradients local to a chunk with a decay a channel and a safe gate for Hopper's tensor cores, in
Gluon.

What is computed is said in safe_bwd.py and intra_bwd.py, how it is laid out in hopper_bwd.py: one
program does it all for a chunk and a head. Scores between the halves of a chunk are kept apart from
those within them: theirs are the products that a power of two a channel multiplies afterwards.

The tiles of q, k and g are memory for what is made of them: the two bf16 parts of the log decays, the
factors of the scores, the parts of the gradient of gc, and at last dq, dk and dg.
"""

from __future__ import annotations

from typing import Any

from torch import Tensor
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language import NVMMASharedLayout
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    tma,
    warpgroup_mma,
    warpgroup_mma_wait,
)

from ..rule import CHUNK, DeltaRule
from ..stages.intra import Inputs
from .chunks import Chunks, ScanGrads, Tables
from .hopper import _describe, barrier
from .hopper_bwd import decayed, row_of, store_rows
from .launch import launch

LOG2E: gl.constexpr = gl.constexpr(1.4426950408889634)


@gluon.jit
def copy_items(
    tensors,
    places,
    ready,
    free,
    chunk_start,
    items,
    strides,
    HV: gl.constexpr,
    K: gl.constexpr,
    V: gl.constexpr,
    BT: gl.constexpr,
):
    """A warp's work: what is read of each chunk and head, to its place as soon as this is free."""
    do, v_new, y, v, h, dh, q, k, g, rows, anchors = tensors
    s_do, s_vn, s_y, s_v, s_h, s_dh, s_q, s_k, s_g, s_rows, s_anchors, _w, _ones, _dl = places
    do_h, v_h, q_h, k_h, g_h = strides
    of_values: gl.constexpr = 2 * BT * V
    visits = 0
    for item in range(gl.program_id(0), items, gl.num_programs(0)):
        i_c, i_h = item // HV, item % HV
        t = gl.load(chunk_start + i_c)
        past = (visits + 1) & 1
        mbarrier.wait(free.index(0), past)
        bar = ready.index(0)
        mbarrier.expect(bar, 2 * of_values)
        tma.async_copy_global_to_shared(do, [t, i_h * do_h], bar, s_do.index(0))
        tma.async_copy_global_to_shared(v_new, [item * BT, 0], bar, s_vn.index(0))
        bar = ready.index(1)
        mbarrier.expect(bar, 2 * of_values + 12 * BT)
        for i_p in gl.static_range(3):
            tma.async_copy_global_to_shared(rows, [item * 3 + i_p, 0], bar, s_rows.index(i_p))
        tma.async_copy_global_to_shared(y, [item * BT, 0], bar, s_y.index(0))
        mbarrier.wait(free.index(1), past)
        tma.async_copy_global_to_shared(v, [t, i_h * v_h], bar, s_v.index(0))
        bar = ready.index(2)
        mbarrier.expect(bar, 2 * K * V)
        tma.async_copy_global_to_shared(h, [item * K, 0], bar, s_h.index(0))
        bar = ready.index(3)
        mbarrier.expect(bar, 2 * K * V)
        tma.async_copy_global_to_shared(dh, [item * K, 0], bar, s_dh.index(0))
        mbarrier.wait(free.index(2), past)
        bar = ready.index(4)
        mbarrier.expect(bar, 6 * BT * K + 12 * K)
        for i_p in gl.static_range(3):
            to = s_anchors.index(i_p)
            tma.async_copy_global_to_shared(anchors, [item * 3 + i_p, 0], bar, to)
        tma.async_copy_global_to_shared(g, [t, i_h * g_h], bar, s_g.index(0))
        tma.async_copy_global_to_shared(k, [t, i_h * k_h], bar, s_k.index(0))
        tma.async_copy_global_to_shared(q, [t, i_h * q_h], bar, s_q.index(0))
        visits += 1


@gluon.jit
def store_items(
    tensors,
    pointers,
    places,
    free,
    done,
    chunk_start,
    chunk_rows,
    items,
    HV: gl.constexpr,
    K: gl.constexpr,
    V: gl.constexpr,
    BT: gl.constexpr,
):
    """Two warps' work: dv from the place of v, dq, dk and dg from those of q, k and g."""
    dq, dk, dg, dv = tensors
    dq_rows, dk_rows, dg_rows, dv_rows = pointers
    _do, _vn, _y, s_v, _h, _dh, s_q, s_k, s_g, _rows, _anchors, _w, _ones, _dl = places
    visits = 0
    for item in range(gl.program_id(0), items, gl.num_programs(0)):
        i_c, i_h = item // HV, item % HV
        t, n = gl.load(chunk_start + i_c), gl.load(chunk_rows + i_c)
        mbarrier.wait(done.index(0), visits & 1)
        store_rows(dv, dv_rows, s_v.index(0), t, n, i_h, HV, V, BT)
        tma.store_wait(0)
        mbarrier.arrive(free.index(1), count=1)
        mbarrier.wait(done.index(1), visits & 1)
        store_rows(dq, dq_rows, s_q.index(0), t, n, i_h, HV, K, BT)
        store_rows(dk, dk_rows, s_k.index(0), t, n, i_h, HV, K, BT)
        store_rows(dg, dg_rows, s_g.index(0), t, n, i_h, HV, K, BT)
        tma.store_wait(0)
        mbarrier.arrive(free.index(2), count=1)
        visits += 1


@gluon.jit
def sigmoid(x):
    """See gate.py."""
    root = gl.rsqrt(1.0 + gl.exp2(x * -LOG2E))
    return root * root


@gluon.jit
def whole(s_anchors, which, UNIT: gl.constexpr, layout: gl.constexpr):
    """An anchor [1, K] in whole powers of two."""
    return gl.floor(s_anchors.index(which).load(layout) / UNIT + 0.5)


@gluon.jit
def anchors_of(s_anchors, zero, first, UNIT: gl.constexpr, layout: gl.constexpr):
    """Of each row that of its half [BT, K]."""
    n0 = whole(s_anchors, zero, UNIT, layout)
    return gl.where(first, n0, whole(s_anchors, zero + 1, UNIT, layout))


@gluon.jit
def shifted(x, s_anchors, zero, UNIT: gl.constexpr, layout: gl.constexpr):
    """x * 2^n, n = n1 - n0 from 0 down to -240: by two factors, as 2^n may underflow."""
    n = whole(s_anchors, zero + 1, UNIT, layout) - whole(s_anchors, zero, UNIT, layout)
    return x * gl.exp2(gl.maximum(n, -120.0)) * gl.exp2(gl.minimum(n + 120.0, 0.0))


@gluon.jit
def raw_gate(b_g, A_log, dt_bias, i_h, o_k, K: gl.constexpr):
    """raw = g + dt_bias [BT, K] and rate = exp(A_log)."""
    raw = b_g.to(gl.float32)
    rate = 1.0
    if dt_bias is not None:
        raw = raw + gl.load(dt_bias + i_h * K + o_k).to(gl.float32)[None, :]
    if A_log is not None:
        rate = gl.exp(gl.load(A_log + i_h).to(gl.float32))
    return raw, rate


@gluon.jit
def form_items(
    places,
    ready,
    free,
    done,
    chunk_start,
    chunk_rows,
    items,
    ones,
    A_log,
    dt_bias,
    dbeta,
    dA_log,
    ddt_bias,
    tokens,
    scale,
    bound,
    GATE: gl.constexpr,
    NORM: gl.constexpr,
    REMOVES: gl.constexpr,
    EXP2: gl.constexpr,
    HV: gl.constexpr,
    K: gl.constexpr,
    V: gl.constexpr,
    BT: gl.constexpr,
):
    half: gl.constexpr = places[7].dtype
    square: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 2], [16, BT // 2, 16])
    wide: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 2], [16, K // 2, 16])
    flat: gl.constexpr = gl.BlockedLayout([1, 8], [4, 8], [8, 1], [1, 0])
    UNIT: gl.constexpr = 1.0 if EXP2 else 1.0 / LOG2E
    S: gl.constexpr = BT // 2
    i = gl.arange(0, BT, gl.SliceLayout(1, square))[:, None]
    j = gl.arange(0, BT, gl.SliceLayout(0, square))[None, :]
    r = gl.arange(0, BT, gl.SliceLayout(1, wide))
    o_k = gl.arange(0, K, gl.SliceLayout(0, wide))
    none = gl.full([BT, BT], 0.0, gl.float32, square)
    nothing = gl.full([BT, K], 0.0, gl.float32, wide)
    places[12].index(0).store(gl.load(ones + i * BT + j))
    fence_async_shared()
    barrier()
    visits = 0
    for item in range(gl.program_id(0), items, gl.num_programs(0)):
        i_c, i_h = item // HV, item % HV
        n, t = gl.load(chunk_rows + i_c), gl.load(chunk_start + i_c)
        parity = visits & 1
        # 0 in a form that the compiler cannot tell to be 0: see hopper_bwd.py
        slot = n // (BT + 1)
        s_do, s_vn, s_y = places[0].index(slot), places[1].index(slot), places[2].index(slot)
        s_v, s_h, s_dh = places[3].index(slot), places[4].index(slot), places[5].index(slot)
        s_rows = places[9]
        s_w = places[11]
        s_hT = s_h.permute((1, 0))

        # products with v_new, states and their gradients, and dv meanwhile
        mbarrier.wait(ready.index(0), parity)
        b_ds = warpgroup_mma(s_do, s_vn.permute((1, 0)), none, use_acc=False, is_async=True)
        mbarrier.wait(ready.index(1), parity)
        b_da = b_ds
        if REMOVES:
            b_da = warpgroup_mma(s_y, s_vn.permute((1, 0)), none, use_acc=False, is_async=True)
        beta = row_of(s_rows, slot, wide)
        f_q = row_of(s_rows, slot + 1, wide)
        f_k = row_of(s_rows, slot + 2, wide)
        b_y = s_y.load(wide).to(gl.float32)
        at = dbeta + (t + r).to(gl.int64) * HV + i_h
        gl.store(at, gl.sum(s_v.load(wide).to(gl.float32) * b_y, 1), mask=r < n)
        s_v.store((b_y * beta).to(half))
        fence_async_shared()
        barrier()
        mbarrier.arrive(done.index(0), count=1)
        mbarrier.wait(ready.index(2), parity)
        b_dq = warpgroup_mma(s_do, s_hT, nothing, use_acc=False, is_async=True)
        b_dr = b_dq
        if REMOVES:
            b_dr = warpgroup_mma(s_y, s_hT, nothing, use_acc=False, is_async=True)

        # the scores' gradients: within the halves of the chunk, and between them
        within = (i > j) & (i < n) & (i // S == j // S)
        between = (i >= S) & (i < n) & (j < S)
        if REMOVES:
            b_ds, b_da = warpgroup_mma_wait(2, deps=(b_ds, b_da))
            s_w.index(slot + 2).store(gl.where(within, -b_da, 0.0).to(half))
            s_w.index(slot + 3).store(gl.where(between, -b_da, 0.0).to(half))
        else:
            b_ds = warpgroup_mma_wait(1, deps=(b_ds,))
        s_w.index(slot).store(gl.where(within, b_ds, 0.0).to(half))
        s_w.index(slot + 1).store(gl.where(between, b_ds, 0.0).to(half))
        diagonal = gl.sum(gl.where(i == j, b_ds, 0.0), 1)
        diagonal = gl.convert_layout(diagonal, gl.SliceLayout(1, wide))[:, None]

        mbarrier.wait(ready.index(3), parity)
        s_dhT = s_dh.permute((1, 0))
        b_dc = warpgroup_mma(s_vn, s_dhT, nothing, use_acc=False, is_async=True)
        b_l = gl.full([K, V // 2], 0.0, gl.float32, flat)
        for part in gl.static_range(2):
            b_h = s_h.slice(part * (V // 2), V // 2, 1).load(flat).to(gl.float32)
            b_l += b_h * s_dh.slice(part * (V // 2), V // 2, 1).load(flat).to(gl.float32)
        places[13].index(slot).store(gl.convert_layout(gl.sum(b_l, 1), gl.SliceLayout(0, wide))[None, :])
        if REMOVES:
            b_dq, b_dr, b_dc = warpgroup_mma_wait(0, deps=(b_dq, b_dr, b_dc))
        else:
            b_dq, b_dc = warpgroup_mma_wait(0, deps=(b_dq, b_dc))
        mbarrier.arrive(free.index(0), count=1)

        # gc, by products with 0/1 matrices
        again = n // (BT + 2)
        s_q, s_k, s_g = places[6].index(again), places[7].index(again), places[8].index(again)
        s_ones = places[12].index(again)
        mbarrier.wait(ready.index(4), parity)
        b_graw, b_qraw, b_kraw = s_g.load(wide), s_q.load(wide), s_k.load(wide)
        raw, rate = raw_gate(b_graw, A_log, dt_bias, i_h, o_k, K)
        b_g = raw
        if GATE == "sigmoid":
            b_g = bound * sigmoid(rate * raw)
        m = (r < n)[:, None]
        b_g = gl.where(m, b_g, 0.0)
        if EXP2:
            b_g = b_g * LOG2E
        high = b_g.to(half)
        s_g.store(high)
        s_q.store((b_g - high.to(gl.float32)).to(half))
        fence_async_shared()
        barrier()
        d = warpgroup_mma(s_ones, s_g, nothing, use_acc=False, is_async=True)
        d = warpgroup_mma(s_ones, s_q, d, is_async=True)
        first = (r < S)[:, None]
        anchor = anchors_of(places[10], again, first, UNIT, wide)
        d = warpgroup_mma_wait(0, deps=(d,))
        d = d - anchor * UNIT
        barrier()  # the parts have been read

        # the scores' factors
        f = decayed(d, EXP2)
        b_k = gl.where(m, b_kraw.to(gl.float32), 0.0) * f_k
        s_k.store((b_k * decayed(-d, EXP2)).to(half))
        s_q.store((gl.where(m, b_qraw.to(gl.float32), 0.0) * f_q * f).to(half))
        if REMOVES:
            s_g.store((beta * (b_k * f)).to(half))
        fence_async_shared()
        barrier()

        # row factor q; anchors and more are loaded again for each factor, not kept in registers
        b_dq = b_dq * gl.exp2(anchors_of(places[10], n // (BT + 3), first, UNIT, wide))
        b_p = warpgroup_mma(s_w.index(slot + 1), s_k, nothing, use_acc=False, is_async=True)
        b_dq = warpgroup_mma(s_w.index(slot), s_k, b_dq, is_async=True)
        b_p, b_dq = warpgroup_mma_wait(0, deps=(b_p, b_dq))
        b_dq += shifted(b_p, places[10], n // (BT + 4), UNIT, wide)
        b_dgc = s_q.load(wide).to(gl.float32) * b_dq
        b_k = b_kraw.to(gl.float32) * f_k
        b_q = b_qraw.to(gl.float32) * f_q
        b_dq = b_dq * decayed(d + n // (BT + 4), EXP2) + diagonal * b_k
        if NORM:
            b_dq -= b_q * (gl.sum(b_q * b_dq, 1)[:, None] * (1.0 / (scale * scale)))
        b_dqs = (b_dq * f_q).to(half)
        b_dk = diagonal * b_q

        # row factor beta k
        if REMOVES:
            b_dr = b_dr * -gl.exp2(anchors_of(places[10], n // (BT + 5), first, UNIT, wide))
            b_p = warpgroup_mma(s_w.index(slot + 3), s_k, nothing, use_acc=False, is_async=True)
            b_dr = warpgroup_mma(s_w.index(slot + 2), s_k, b_dr, is_async=True)
            b_p, b_dr = warpgroup_mma_wait(0, deps=(b_p, b_dr))
            b_dr += shifted(b_p, places[10], n // (BT + 6), UNIT, wide)
            b_dgc += s_g.load(wide).to(gl.float32) * b_dr
            b_dr = b_dr * decayed(d + n // (BT + 6), EXP2)
            at = dbeta + (tokens + t + r).to(gl.int64) * HV + i_h
            gl.store(at, gl.sum(b_kraw.to(gl.float32) * f_k * b_dr, 1), mask=r < n)
            b_dk += b_dr * beta

        # column factor k
        z = n // (BT + 7)
        end = places[10].index(z + 2).load(wide)
        anchor = anchors_of(places[10], z, first, UNIT, wide)
        b_dc = b_dc * decayed(end - anchor * UNIT, EXP2)
        b_dl = gl.sum(s_k.load(wide).to(gl.float32) * b_dc, 0)[None, :]
        b_dl += places[13].index(z).load(wide) * decayed(end, EXP2)
        places[13].index(z).store(b_dl)
        s_wT = s_w.index(slot).permute((1, 0))
        s_vT = s_w.index(slot + 1).permute((1, 0))
        b_p = warpgroup_mma(s_vT, s_q, nothing, use_acc=False, is_async=True)
        b_dc = warpgroup_mma(s_wT, s_q, b_dc, is_async=True)
        if REMOVES:
            s_wT = s_w.index(slot + 2).permute((1, 0))
            s_vT = s_w.index(slot + 3).permute((1, 0))
            b_p = warpgroup_mma(s_vT, s_g, b_p, is_async=True)
            b_dc = warpgroup_mma(s_wT, s_g, b_dc, is_async=True)
        b_p, b_dc = warpgroup_mma_wait(0, deps=(b_p, b_dc))
        b_dc += shifted(b_p, places[10], n // (BT + 8), UNIT, wide)
        b_dgc -= s_k.load(wide).to(gl.float32) * b_dc
        b_dl = places[13].index(n // (BT + 8)).load(wide)
        b_dgc = gl.where(m, b_dgc, 0.0) + gl.where((r == BT - 1)[:, None], b_dl, 0.0)
        high = b_dgc.to(half)
        barrier()  # the factors have been read
        s_g.store(high)
        s_q.store((b_dgc - high.to(gl.float32)).to(half))
        fence_async_shared()
        barrier()
        b_dg = warpgroup_mma(s_ones.permute((1, 0)), s_g, nothing, use_acc=False, is_async=True)
        b_dg = warpgroup_mma(s_ones.permute((1, 0)), s_q, b_dg, is_async=True)
        b_dk += b_dc * decayed(n // (BT + 8) - d, EXP2)
        b_k = b_kraw.to(gl.float32) * f_k
        if NORM:
            b_dk -= b_k * gl.sum(b_k * b_dk, 1)[:, None]
        s_k.store((b_dk * f_k).to(half))
        b_dg = warpgroup_mma_wait(0, deps=(b_dg,))
        barrier()  # the parts have been read
        s_q.store(b_dqs)

        # of the gate
        b_dg = gl.where(m, b_dg, 0.0)
        raw, rate = raw_gate(b_graw, A_log, dt_bias, i_h + n // (BT + 9), o_k, K)
        b_draw = b_dg
        if GATE == "sigmoid":
            s = sigmoid(rate * raw)
            b_draw = b_dg * (bound * rate) * (s * (1.0 - s))
        s_g.store(b_draw.to(half))
        fence_async_shared()
        barrier()
        mbarrier.arrive(done.index(1), count=1)
        if dA_log is not None:
            gl.store(dA_log + item, gl.sum(gl.sum(gl.where(m, b_draw * raw, 0.0), 1), 0))
        if ddt_bias is not None:
            gl.store(ddt_bias + item.to(gl.int64) * K + o_k, gl.sum(b_draw, 0))
        visits += 1


@gluon.jit(do_not_specialize=["items", "tokens"])
def safe_bwd_hopper_kernel(
    do,
    v_new,
    y,
    v,
    h,
    dh,
    q,
    k,
    g,
    rows,
    anchors,
    dq,
    dk,
    dg,
    dv,
    dq_rows,
    dk_rows,
    dg_rows,
    dv_rows,
    ones,
    A_log,
    dt_bias,
    dbeta,
    dA_log,
    ddt_bias,
    chunk_start,
    chunk_rows,
    do_h,
    v_h,
    q_h,
    k_h,
    g_h,
    items,
    tokens,
    scale,
    bound,
    GATE: gl.constexpr,
    NORM: gl.constexpr,
    REMOVES: gl.constexpr,
    EXP2: gl.constexpr,
    HV: gl.constexpr,
    K: gl.constexpr,
    V: gl.constexpr,
    BT: gl.constexpr,
):
    """dq, dk, dg [T, HV, K], dv [T, HV, V], dbeta [2, T, HV], fp32, before the sigmoid's slope: v's
    share and the other; dA_log [NC, HV] and ddt_bias [NC, HV, K], fp32: partial sums. ones: the 0/1
    matrix UP_TO of sums.py."""
    half: gl.constexpr = k.dtype
    scores: gl.constexpr = NVMMASharedLayout(128, 16, 2)
    places = (
        gl.allocate_shared_memory(half, [1, BT, V], do.layout),
        gl.allocate_shared_memory(half, [1, BT, V], v_new.layout),
        gl.allocate_shared_memory(half, [1, BT, V], y.layout),
        gl.allocate_shared_memory(half, [1, BT, V], v.layout),
        gl.allocate_shared_memory(half, [1, K, V], h.layout),
        gl.allocate_shared_memory(half, [1, K, V], dh.layout),
        gl.allocate_shared_memory(half, [1, BT, K], q.layout),
        gl.allocate_shared_memory(half, [1, BT, K], k.layout),
        gl.allocate_shared_memory(half, [1, BT, K], g.layout),
        gl.allocate_shared_memory(gl.float32, [3, 1, BT], rows.layout),
        gl.allocate_shared_memory(gl.float32, [3, 1, K], anchors.layout),
        gl.allocate_shared_memory(half, [4 if REMOVES else 2, BT, BT], scores),
        gl.allocate_shared_memory(half, [1, BT, BT], scores),
        gl.allocate_shared_memory(gl.float32, [1, 1, K], anchors.layout),
    )
    ready = gl.allocate_shared_memory(gl.int64, [5, 1], mbarrier.MBarrierLayout())
    free = gl.allocate_shared_memory(gl.int64, [3, 1], mbarrier.MBarrierLayout())
    done = gl.allocate_shared_memory(gl.int64, [2, 1], mbarrier.MBarrierLayout())
    for n in gl.static_range(5):
        mbarrier.init(ready.index(n), count=1)
    for n in gl.static_range(3):
        mbarrier.init(free.index(n), count=1)
    for n in gl.static_range(2):
        mbarrier.init(done.index(n), count=1)
    # fmt: off
    gl.warp_specialize([
        (form_items, (
            places, ready, free, done, chunk_start, chunk_rows, items, ones, A_log, dt_bias, dbeta,
            dA_log, ddt_bias, tokens, scale, bound, GATE, NORM, REMOVES, EXP2, HV, K, V, BT,
        )),
        (copy_items, (
            (do, v_new, y, v, h, dh, q, k, g, rows, anchors), places, ready, free, chunk_start,
            items, (do_h, v_h, q_h, k_h, g_h), HV, K, V, BT,
        )),
        (store_items, (
            (dq, dk, dg, dv), (dq_rows, dk_rows, dg_rows, dv_rows), places, free, done,
            chunk_start, chunk_rows, items, HV, K, V, BT,
        )),
    ], [1, 2], [40, 40])
    # fmt: on


def safe_bwd(
    rule: DeltaRule,
    table: Tables,
    x: Inputs,
    c: Chunks,
    h: Tensor,
    v_new: Tensor,
    grads: ScanGrads,
    ones: Tensor,
    out: dict[str, Any],
    programs: int,
) -> None:
    """out: dq, dk, dg, dv, dbeta, dA_log, ddt_bias. programs: at most so many, one a
    multiprocessor."""
    NC, (HV, V), K = len(table.chunk_start), x.v.shape[1:], x.q.shape[2]

    def rows_of(t: Tensor) -> Any:
        return _describe(t, CHUNK, t.shape[-1])

    def states_of(t: Tensor) -> Any:
        return _describe(t, t.shape[-2], t.shape[-1])

    launch(
        safe_bwd_hopper_kernel,
        (min(programs, NC * HV),),
        do=rows_of(grads.do),
        v_new=rows_of(v_new),
        y=rows_of(grads.y),
        v=rows_of(x.v),
        h=states_of(h),
        dh=states_of(grads.dh),
        q=rows_of(x.q),
        k=rows_of(x.k),
        g=rows_of(x.g),
        rows=_describe(c.rows, 1, CHUNK),
        anchors=_describe(c.anchors, 1, K),
        **{name: rows_of(out[name]) for name in ("dq", "dk", "dg", "dv")},
        **{f"{name}_rows": out[name] for name in ("dq", "dk", "dg", "dv")},
        ones=ones,
        A_log=x.A_log,
        dt_bias=x.dt_bias,
        dbeta=out["dbeta"],
        dA_log=out["dA_log"],
        ddt_bias=out["ddt_bias"],
        chunk_start=table.chunk_start,
        chunk_rows=table.chunk_rows,
        do_h=grads.do.stride(1),
        v_h=x.v.stride(1),
        q_h=x.q.stride(1),
        k_h=x.k.stride(1),
        g_h=x.g.stride(1),
        items=NC * HV,
        tokens=len(x.q),
        scale=rule.scale,
        bound=rule.lower_bound or 0.0,
        GATE=rule.gate,
        NORM=rule.qk_l2norm,
        REMOVES=rule.removal != "none",
        EXP2=rule.use_exp2,
        HV=HV,
        K=K,
        V=V,
        BT=CHUNK,
        num_warps=8,
    )
