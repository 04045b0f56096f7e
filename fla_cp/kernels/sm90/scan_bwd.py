"""The reverse scan in Gluon for Hopper; scan.py has its sister and what both share."""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    tma,
    warpgroup_mma,
    warpgroup_mma_wait,
)

from fla_cp.kernels.sm90.scan import copy_chunks, places_of, rounded_off, term
from fla_cp.kernels.sm90.tma import barrier


@gluon.jit
def scan_chunks_back(
    places,
    ready,
    free,
    y,
    dh,
    dS_end,
    dS0,
    leaving,
    start,
    stop,
    first,
    n,
    i_n,
    i_h,
    i_v,
    end_n,
    end_h,
    end_k,
    end_v,
    dS0_k,
    dS0_v,
    OWN: gl.constexpr,
    REMOVES: gl.constexpr,
    HEAD: gl.constexpr,
    HV: gl.constexpr,
    K: gl.constexpr,
    V: gl.constexpr,
    BT: gl.constexpr,
    BV: gl.constexpr,
    TERMS: gl.constexpr,
    NS: gl.constexpr,
):
    s_qg, s_kin, s_kg, s_do, s_T, s_A, s_rows, s_decay = places
    FACTORS: gl.constexpr = 4 if HEAD else 1
    WRITES: gl.constexpr = (dh is not None) or (y is not None)
    LATER: gl.constexpr = HEAD and TERMS > 1  # for registers
    half: gl.constexpr = s_kg.dtype
    W: gl.constexpr = BV // 16
    acc: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [W, 1], [16, BT, 16])
    state: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [W, 1], [16, K, 16])
    left: gl.constexpr = gl.DotOperandLayout(0, acc, 2)
    left_of_state: gl.constexpr = gl.DotOperandLayout(0, state, 2)
    if dh is not None:
        s_h = gl.allocate_shared_memory(half, [K, BV], dh.layout)
    if y is not None:
        s_y = gl.allocate_shared_memory(half, [BT, BV], y.layout)

    o_v = (i_v * BV + gl.arange(0, BV, gl.SliceLayout(1, state)))[:, None]
    o_k = gl.arange(0, K, gl.SliceLayout(0, state))[None, :]
    b_dS = gl.full([BV, K], 0.0, gl.float32, state)
    if dS_end is not None:  # noqa: SIM102  # known when compiled
        if leaving >= 0:
            at = dS_end + leaving.to(gl.int64) * end_n + i_h.to(gl.int64) * end_h
            b_dS += gl.load(at + o_v * end_v + o_k * end_k)
    zero = gl.full([BV, BT], 0.0, gl.float32, acc)
    for c in range(n):
        s = c % NS
        i_c = n - 1 - c
        i_ch = (first + i_c) * HV + i_h
        b_dSb = b_dS.to(half)
        a_S = gl.convert_layout(b_dSb, left)
        mbarrier.wait(ready.index(s), (c // NS) & 1)
        b_dS = b_dS * s_decay.index(s).load(state)  # first: see `walk_chunks`
        if not LATER:
            b_beta = s_rows.index(s * FACTORS).load(acc)
        s_o = s_do.index(s).permute((1, 0))
        s_k = s_kg.index(s).permute((1, 0))
        if HEAD:
            m = gl.arange(0, BT, gl.SliceLayout(0, acc)) < stop - start - i_c * BT
            f_q = gl.where(m[None, :], s_rows.index(s * FACTORS + 1).load(acc), 0.0)
            f_k = s_rows.index(s * FACTORS + 3).load(acc)
            if not LATER:
                b_beta = b_beta * s_rows.index(s * FACTORS + 2).load(acc)
            b_do = (s_o.load(acc).to(gl.float32) * f_q).to(half)
            a_o = gl.convert_layout(b_do, left_of_state)
            b_y = warpgroup_mma(a_S, s_k, zero, use_acc=False, is_async=True)
            s_a = term(s_A.index(s), 0, TERMS, BT)
            b_x = warpgroup_mma(s_o, s_a, zero, use_acc=False, is_async=True)
            if TERMS > 1:
                s_a = term(s_A.index(s), 1, TERMS, BT)
                b_x = warpgroup_mma(s_o, s_a, b_x, is_async=True)
            b_dS = warpgroup_mma(a_o, s_qg.index(s), b_dS, is_async=True)
            b_y, b_x, a_S = warpgroup_mma_wait(1, deps=(b_y, b_x, a_S))
            b_y = b_y * f_k + b_x
        else:
            s_a = term(s_A.index(s), 0, TERMS, BT)
            b_y = warpgroup_mma(s_o, s_a, zero, use_acc=False, is_async=True)
            if TERMS > 1:
                s_a = term(s_A.index(s), 1, TERMS, BT)
                b_y = warpgroup_mma(s_o, s_a, b_y, is_async=True)
            b_y = warpgroup_mma(a_S, s_k, b_y, is_async=True)
            b_dS = warpgroup_mma(s_o, s_qg.index(s), b_dS, is_async=True)
            b_y, a_S = warpgroup_mma_wait(1, deps=(b_y, a_S))
        if REMOVES:
            a_y = gl.convert_layout(b_y.to(half), left)
            s_t = term(s_T.index(s), 0, TERMS, BT)
            if TERMS > 1:
                a_low = gl.convert_layout(rounded_off(b_y, half), left)
                b_y = warpgroup_mma(a_low, s_t, zero, use_acc=False, is_async=True)
                b_y = warpgroup_mma(a_y, s_t, b_y, is_async=True)
                s_t = term(s_T.index(s), 1, TERMS, BT)
                b_y = warpgroup_mma(a_y, s_t, b_y, is_async=True)
                b_y, b_dS, a_y, a_low = warpgroup_mma_wait(0, deps=(b_y, b_dS, a_y, a_low))
                if LATER:
                    b_beta = s_rows.index(s * FACTORS).load(acc)
                    b_beta = b_beta * s_rows.index(s * FACTORS + 2).load(acc)
            else:
                b_y = warpgroup_mma(a_y, s_t, zero, use_acc=False, is_async=True)
                b_y, b_dS, a_y = warpgroup_mma_wait(0, deps=(b_y, b_dS, a_y))
            a_x = gl.convert_layout((-b_y * b_beta).to(half), left_of_state)
            s_r = s_kg.index(s)
            if OWN:
                s_r = s_kin.index(s)
            b_dS = warpgroup_mma(a_x, s_r, b_dS, is_async=True)
        if WRITES:
            tma.store_wait(0)
            barrier()
        if dh is not None:
            s_h.permute((1, 0)).store(b_dSb)
        if y is not None:
            s_y.permute((1, 0)).store(b_y.to(half))
        if REMOVES:
            b_dS, a_x = warpgroup_mma_wait(0, deps=(b_dS, a_x))
        else:
            b_dS = warpgroup_mma_wait(0, deps=(b_dS,))
        mbarrier.arrive(free.index(s), count=1)
        if WRITES:
            fence_async_shared()
            barrier()
        if dh is not None:
            tma.async_copy_shared_to_global(dh, [i_ch * K, i_v * BV], s_h)
        if y is not None:
            tma.async_copy_shared_to_global(y, [i_ch * BT, i_v * BV], s_y)
    tma.store_wait(0)
    if dS0 is not None:
        to = dS0 + (i_n.to(gl.int64) * HV + i_h) * K * V
        gl.store(to + o_v * dS0_v + o_k * dS0_k, b_dS)


@gluon.jit
def scan_bwd_hopper_kernel(
    qg,
    k_decayed,
    kg,
    do,
    T,
    Aqk,
    rows,
    decay,
    q_h,
    r_h,
    k_h,
    do_h,
    y,
    dh,
    dS_end,
    dS0,
    segments,
    seg_start,
    seg_stop,
    seg_chunk,
    seg_exit,
    end_n,
    end_h,
    end_k,
    end_v,
    dS0_k,
    dS0_v,
    HV: gl.constexpr,
    G: gl.constexpr,
    K: gl.constexpr,
    V: gl.constexpr,
    BT: gl.constexpr,
    BV: gl.constexpr,
    HEAD: gl.constexpr,
    REMOVAL: gl.constexpr,
    TERMS: gl.constexpr,
    NS: gl.constexpr,
):
    """`scan_bwd_kernel`, of what `described` says."""
    REMOVES: gl.constexpr = REMOVAL != "none"
    OWN: gl.constexpr = REMOVES and ((not HEAD) or REMOVAL == "p")
    i_v, i_n = gl.program_id(0) % (V // BV), gl.program_id(0) // (V // BV)
    i_h = gl.program_id(1)
    i_s = gl.load(segments + i_n).to(gl.int32)
    start, stop = gl.load(seg_start + i_s), gl.load(seg_stop + i_s)
    first = gl.load(seg_chunk + i_s)
    leaving = -1
    if dS_end is not None:
        leaving = gl.load(seg_exit + i_s).to(gl.int32)
    n = (stop - start + BT - 1) // BT
    operands = (qg, k_decayed, kg, do, T, Aqk, rows, decay)
    heads = (q_h, r_h, k_h, do_h)
    places, ready, free = places_of(operands, True, OWN, REMOVES, HEAD, K, BT, BV, TERMS, NS)
    # fmt: off
    gl.warp_specialize([
        (scan_chunks_back, (
            places, ready, free, y, dh, dS_end, dS0, leaving, start, stop, first, n, i_n, i_h, i_v,
            end_n, end_h, end_k, end_v, dS0_k, dS0_v, OWN, REMOVES, HEAD, HV, K, V, BT, BV, TERMS,
            NS,
        )),
        (copy_chunks, (
            operands, places, ready, free, heads, start, first, n, i_h, i_v,
            True, OWN, REMOVES, HEAD, True, HV, G, K, BT, BV, TERMS, NS,
        )),
    ], [1], [40])
