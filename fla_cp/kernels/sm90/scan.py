"""The scans for Hopper's tensor cores, in Gluon.

What they compute is said in scan.py, and the results are the same up to rounding. eligible.py says
which calls they support.

The state is held transposed, [BV, K], so that it and all that the serial chain makes of it are left
operands in registers. Right operands come from shared memory, where a warp of its own copies them
NS chunks ahead. Products are asynchronous: those off the chain run beside it.
"""

from __future__ import annotations

from typing import Any

from torch import Tensor
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    tma,
    warpgroup_mma,
    warpgroup_mma_wait,
)

from fla_cp.kernels.sm90.tma import barrier, describe
from fla_cp.kernels.triton.operands import Chunks
from fla_cp.rule import CHUNK


def described(c: Chunks, BV: int, **others: Tensor | None) -> dict[str, Any]:
    """The arguments that are made of the chunks, and of what else is read or written, by name:
    tensors [T, HV, V] and blocks of a chunk [NC, HV, rows, V]."""
    K = c.decay.shape[2]
    square = describe(c.Aqk, c.terms * CHUNK, CHUNK)
    found: dict[str, Any] = {
        "Aqk": square,
        "T": describe(c.T, c.terms * CHUNK, CHUNK) if c.T.numel() else square,
        "rows": describe(c.rows, 1, CHUNK),
        "decay": describe(c.decay.unsqueeze(1), 1, K),
        "TERMS": c.terms,
        **c.constexprs(),
    }
    for name, x in (("qg", c.qg), ("k_decayed", c.k_decayed), ("kg", c.kg)):
        found[name] = describe(x, CHUNK, K) if x.numel() else square
    for name, x in (("q_h", c.qg), ("r_h", c.k_decayed), ("k_h", c.kg)):
        found[name] = x.stride(1) if c.of_heads else 0
    for name, other in others.items():
        if other is not None:
            other = describe(other, CHUNK if other.dim() == 3 else other.shape[2], BV)
        found[name] = other
    return found


@gluon.constexpr_function
def bytes_of(K, BT, BV, OUT, OWN, REMOVES, FACTORS, TERMS):
    """Of all that is copied for a chunk."""
    squares = (REMOVES + OUT) * TERMS * BT
    return 2 * BT * ((1 + OWN + OUT) * K + BV + squares) + 4 * (FACTORS * BT + K)


@gluon.jit
def term(square, n: gl.constexpr, TERMS: gl.constexpr, BT: gl.constexpr):
    """The first or second [BT, BT] of the TERMS of T or Aqk in shared memory."""
    if TERMS == 1:
        return square
    else:
        return square.slice(n * BT, BT, 0)


@gluon.jit
def rounded_off(x, half: gl.constexpr):
    """What x loses as `half`: the second of its two terms."""
    return (x - x.to(half).to(gl.float32)).to(half)


@gluon.jit
def copy_chunks(
    operands,
    places,
    ready,
    free,
    heads,
    start,
    first,
    n,
    i_h,
    i_v,
    OUT: gl.constexpr,
    OWN: gl.constexpr,
    REMOVES: gl.constexpr,
    HEAD: gl.constexpr,
    REVERSE: gl.constexpr,
    HV: gl.constexpr,
    G: gl.constexpr,
    K: gl.constexpr,
    BT: gl.constexpr,
    BV: gl.constexpr,
    TERMS: gl.constexpr,
    NS: gl.constexpr,
):
    """A warp's work: each chunk's operands to their places as soon as these are free."""
    qg, k_decayed, kg, v, T, Aqk, rows, decay = operands
    s_qg, s_kin, s_kg, s_v, s_T, s_A, s_rows, s_decay = places
    q_h, r_h, k_h, v_h = heads
    PLANES: gl.constexpr = 9 if HEAD else 3
    FACTORS: gl.constexpr = 4 if HEAD else 1
    for c in range(n):
        s = c % NS
        i_c = c
        if REVERSE:
            i_c = n - 1 - c
        t = start + i_c * BT
        i_ch = (first + i_c) * HV + i_h
        bar = ready.index(s)
        mbarrier.wait(free.index(s), (c // NS + 1) & 1)
        mbarrier.expect(bar, bytes_of(K, BT, BV, OUT, OWN, REMOVES, FACTORS, TERMS))
        if HEAD:
            at_q, at_r = [t, (i_h // G) * q_h], [t, (i_h // G) * r_h]
            at_k = [t, (i_h // G) * k_h]
        else:
            at_q, at_r, at_k = [i_ch * BT, 0], [i_ch * BT, 0], [i_ch * BT, 0]
        tma.async_copy_global_to_shared(decay, [i_ch, 0], bar, s_decay.index(s))
        if OWN:
            tma.async_copy_global_to_shared(k_decayed, at_r, bar, s_kin.index(s))
        tma.async_copy_global_to_shared(kg, at_k, bar, s_kg.index(s))
        tma.async_copy_global_to_shared(v, [t, i_h * v_h + i_v * BV], bar, s_v.index(s))
        to = s_rows.index(s * FACTORS)
        tma.async_copy_global_to_shared(rows, [i_ch * PLANES, 0], bar, to)
        if HEAD:
            for f in gl.static_range(3):  # planes 4 to 6: of q, r, k
                to = s_rows.index(s * FACTORS + 1 + f)
                tma.async_copy_global_to_shared(rows, [i_ch * PLANES + 4 + f, 0], bar, to)
        if REMOVES:
            tma.async_copy_global_to_shared(T, [i_ch * (TERMS * BT), 0], bar, s_T.index(s))
        if OUT:
            tma.async_copy_global_to_shared(qg, at_q, bar, s_qg.index(s))
            tma.async_copy_global_to_shared(Aqk, [i_ch * (TERMS * BT), 0], bar, s_A.index(s))


@gluon.jit
def places_of(
    operands,
    OUT: gl.constexpr,
    OWN: gl.constexpr,
    REMOVES: gl.constexpr,
    HEAD: gl.constexpr,
    K: gl.constexpr,
    BT: gl.constexpr,
    BV: gl.constexpr,
    TERMS: gl.constexpr,
    NS: gl.constexpr,
):
    """Shared memory for NS chunks' operands, and for each two barriers: filled, and free again."""
    qg, k_decayed, kg, v, T, Aqk, rows, decay = operands
    half: gl.constexpr = kg.dtype
    FACTORS: gl.constexpr = 4 if HEAD else 1
    places = (
        gl.allocate_shared_memory(half, [NS if OUT else 1, BT, K if OUT else BT], qg.layout),
        gl.allocate_shared_memory(half, [NS if OWN else 1, BT, K if OWN else BT], k_decayed.layout),
        gl.allocate_shared_memory(half, [NS, BT, K], kg.layout),
        gl.allocate_shared_memory(half, [NS, BT, BV], v.layout),
        gl.allocate_shared_memory(half, [NS if REMOVES else 1, TERMS * BT, BT], T.layout),
        gl.allocate_shared_memory(half, [NS if OUT else 1, TERMS * BT, BT], Aqk.layout),
        gl.allocate_shared_memory(gl.float32, [NS * FACTORS, 1, BT], rows.layout),
        gl.allocate_shared_memory(gl.float32, [NS, 1, K], decay.layout),
    )
    ready = gl.allocate_shared_memory(gl.int64, [NS, 1], mbarrier.MBarrierLayout())
    free = gl.allocate_shared_memory(gl.int64, [NS, 1], mbarrier.MBarrierLayout())
    for i in gl.static_range(NS):
        mbarrier.init(ready.index(i), count=1)
        mbarrier.init(free.index(i), count=1)
    return places, ready, free


@gluon.jit
def scan_chunks(
    places,
    ready,
    free,
    o,
    o_rows,
    h,
    v_new,
    S0,
    S_end,
    transition,
    entry,
    start,
    stop,
    first,
    n,
    i_n,
    i_h,
    i_v,
    value,
    states,
    S0_n,
    S0_h,
    S0_k,
    S0_v,
    end_k,
    end_v,
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
    s_qg, s_kin, s_kg, s_v, s_T, s_A, s_rows, s_decay = places
    OUT: gl.constexpr = o is not None
    FACTORS: gl.constexpr = 4 if HEAD else 1
    half: gl.constexpr = s_kg.dtype
    W: gl.constexpr = BV // 16
    acc: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [W, 1], [16, BT, 16])
    state: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [W, 1], [16, K, 16])
    left: gl.constexpr = gl.DotOperandLayout(0, acc, 2)
    left_of_state: gl.constexpr = gl.DotOperandLayout(0, state, 2)
    flat: gl.constexpr = gl.BlockedLayout([1, 8], [4, 8], [W, 1], [1, 0])
    if OUT:
        s_o = gl.allocate_shared_memory(half, [BT, BV], o.layout)
    if h is not None:
        s_h = gl.allocate_shared_memory(half, [K, BV], h.layout)
    if v_new is not None:
        s_n = gl.allocate_shared_memory(half, [BT, BV], v_new.layout)

    o_v = (i_v * BV + gl.arange(0, BV, gl.SliceLayout(1, state)))[:, None]
    o_k = gl.arange(0, K, gl.SliceLayout(0, state))[None, :]
    b_S = gl.full([BV, K], 0.0, gl.float32, state)
    if transition is not None:
        b_S = gl.where((o_v == o_k) & (not value), 1.0, 0.0)
    if S0 is not None:  # noqa: SIM102  # known when compiled
        if value & (entry >= 0):
            at = S0 + entry.to(gl.int64) * S0_n + i_h.to(gl.int64) * S0_h
            b_S += gl.load(at + o_v * S0_v + o_k * S0_k)
    zero = gl.full([BV, BT], 0.0, gl.float32, acc)
    for c in range(n):
        s = c % NS
        i_ch = (first + c) * HV + i_h
        t = start + c * BT
        b_Sb = b_S.to(half)
        a_S = gl.convert_layout(b_Sb, left)
        mbarrier.wait(ready.index(s), (c // NS) & 1)
        # what products left in registers is not touched while others are in flight: the assembler
        # would wait for all of them; and loads from shared memory come first, not behind products
        b_S = b_S * s_decay.index(s).load(state)
        b_v = s_v.index(s).permute((1, 0)).load(acc)
        b_beta = s_rows.index(s * FACTORS).load(acc)
        s_r = s_kg.index(s)
        if OWN:
            s_r = s_kin.index(s)
        if REMOVES:
            b_r = warpgroup_mma(a_S, s_r.permute((1, 0)), zero, use_acc=False, is_async=True)
        if OUT:
            s_q = s_qg.index(s).permute((1, 0))
            b_o = warpgroup_mma(a_S, s_q, zero, use_acc=False, is_async=True)
        b_v = b_v.to(gl.float32)
        if transition is not None:
            b_v = gl.where(value, b_v, 0.0)
        if h is not None:
            tma.store_wait(0)
            barrier()
            s_h.permute((1, 0)).store(b_Sb)
        if REMOVES:
            b_v = b_v * b_beta
            if HEAD:
                b_beta = b_beta * s_rows.index(s * FACTORS + 2).load(acc)
            if OUT:
                b_r, a_S = warpgroup_mma_wait(1, deps=(b_r, a_S))
            else:
                b_r, a_S = warpgroup_mma_wait(0, deps=(b_r, a_S))
            a_r = gl.convert_layout((b_v - b_r * b_beta).to(half), left)
            s_t = term(s_T.index(s), 0, TERMS, BT).permute((1, 0))
            b_n = warpgroup_mma(a_r, s_t, zero, use_acc=False, is_async=True)
            if TERMS > 1:
                s_t = term(s_T.index(s), 1, TERMS, BT).permute((1, 0))
                b_n = warpgroup_mma(a_r, s_t, b_n, is_async=True)
            if OUT:
                b_n, b_o, a_r = warpgroup_mma_wait(0, deps=(b_n, b_o, a_r))
            else:
                b_n, a_r = warpgroup_mma_wait(0, deps=(b_n, a_r))
            if TERMS > 1 and OUT:
                a_low = gl.convert_layout(rounded_off(b_n, half), left)
            b_n = b_n.to(half)
        else:
            m = gl.arange(0, BT, gl.SliceLayout(0, acc)) < stop - t
            b_n = gl.where(m[None, :], b_v, 0.0).to(half)
        b_w = b_n
        if HEAD:
            b_w = (b_n.to(gl.float32) * s_rows.index(s * FACTORS + 3).load(acc)).to(half)
        a_w = gl.convert_layout(b_w, left_of_state)
        if OUT:
            if not REMOVES:
                b_o, a_S = warpgroup_mma_wait(0, deps=(b_o, a_S))
            if HEAD:
                b_o = b_o * s_rows.index(s * FACTORS + 1).load(acc)
        b_S = warpgroup_mma(a_w, s_kg.index(s), b_S, is_async=True)
        if OUT:
            a_n = gl.convert_layout(b_n, left)
            s_a = term(s_A.index(s), 0, TERMS, BT).permute((1, 0))
            b_o = warpgroup_mma(a_n, s_a, b_o, is_async=True)
            if TERMS > 1:
                if REMOVES:
                    b_o = warpgroup_mma(a_low, s_a, b_o, is_async=True)
                s_a = term(s_A.index(s), 1, TERMS, BT).permute((1, 0))
                b_o = warpgroup_mma(a_n, s_a, b_o, is_async=True)
        if v_new is not None:
            if h is None:
                tma.store_wait(0)
                barrier()
            s_n.permute((1, 0)).store(b_n)
        if OUT and REMOVES and TERMS > 1:
            deps = (b_S, b_o, a_w, a_n, a_low)
            b_S, b_o, a_w, a_n, a_low = warpgroup_mma_wait(0, deps=deps)
        elif OUT:
            b_S, b_o, a_w, a_n = warpgroup_mma_wait(0, deps=(b_S, b_o, a_w, a_n))
        else:
            b_S, a_w = warpgroup_mma_wait(0, deps=(b_S, a_w))
        mbarrier.arrive(free.index(s), count=1)
        if OUT:
            if (h is None) and (v_new is None):
                tma.store_wait(0)
                barrier()
            s_o.permute((1, 0)).store(b_o.to(half))
        if OUT or (h is not None) or (v_new is not None):
            fence_async_shared()
            barrier()
        if OUT:
            if t + BT <= stop:
                tma.async_copy_shared_to_global(o, [t, i_h * V + i_v * BV], s_o)
            else:  # rows of another sequence follow
                r = t + gl.arange(0, BT, gl.SliceLayout(1, flat))
                v = i_v * BV + gl.arange(0, BV, gl.SliceLayout(0, flat))
                to = o_rows + (r.to(gl.int64) * HV + i_h)[:, None] * V + v[None, :]
                gl.store(to, s_o.load(flat), mask=(r < stop)[:, None])
        if h is not None:
            tma.async_copy_shared_to_global(h, [i_ch * K, i_v * BV], s_h)
        if v_new is not None:
            tma.async_copy_shared_to_global(v_new, [i_ch * BT, i_v * BV], s_n)
    tma.store_wait(0)
    if value:
        if S_end is not None:
            to = S_end + (i_n.to(gl.int64) * HV + i_h) * K * V
            gl.store(to + o_v * end_v + o_k * end_k, b_S)
    elif transition is not None:
        to = transition + ((i_n - states).to(gl.int64) * HV + i_h) * K * K
        gl.store(to + o_k * K + o_v, b_S)


@gluon.jit(do_not_specialize=["states"])
def scan_hopper_kernel(
    qg,
    k_decayed,
    kg,
    v,
    T,
    Aqk,
    rows,
    decay,
    q_h,
    r_h,
    k_h,
    v_h,
    o,
    o_rows,
    h,
    v_new,
    S0,
    S_end,
    transition,
    segments,
    seg_start,
    seg_stop,
    seg_chunk,
    seg_entry,
    S0_n,
    S0_h,
    S0_k,
    S0_v,
    end_k,
    end_v,
    states,
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
    """`scan_kernel`, of what `described` says; o_rows: o as a pointer. h and v_new are dense."""
    OUT: gl.constexpr = o is not None
    REMOVES: gl.constexpr = REMOVAL != "none"
    OWN: gl.constexpr = REMOVES and ((not HEAD) or REMOVAL == "p")
    tiles: gl.constexpr = V // BV
    i_v, i_n = gl.program_id(0) % tiles, gl.program_id(0) // tiles
    value = gl.program_id(0) >= 0
    if transition is not None:
        value = gl.program_id(0) < tiles * states
        columns: gl.constexpr = K // BV
        if not value:
            i_n = (gl.program_id(0) - tiles * states) // columns
            i_v = (gl.program_id(0) - tiles * states) % columns
            i_n += states
    i_h = gl.program_id(1)
    i_s = gl.load(segments + i_n).to(gl.int32)
    start, stop = gl.load(seg_start + i_s), gl.load(seg_stop + i_s)
    first = gl.load(seg_chunk + i_s)
    entry = -1
    if S0 is not None:
        entry = gl.load(seg_entry + i_s).to(gl.int32)
    n = (stop - start + BT - 1) // BT
    operands = (qg, k_decayed, kg, v, T, Aqk, rows, decay)
    heads = (q_h, r_h, k_h, v_h)
    places, ready, free = places_of(operands, OUT, OWN, REMOVES, HEAD, K, BT, BV, TERMS, NS)
    # fmt: off
    gl.warp_specialize([
        (scan_chunks, (
            places, ready, free, o, o_rows, h, v_new, S0, S_end, transition,
            entry, start, stop, first, n, i_n, i_h, i_v, value, states,
            S0_n, S0_h, S0_k, S0_v, end_k, end_v, OWN, REMOVES, HEAD, HV, K, V, BT, BV, TERMS, NS,
        )),
        (copy_chunks, (
            operands, places, ready, free, heads, start, first, n, i_h, i_v,
            OUT, OWN, REMOVES, HEAD, False, HV, G, K, BT, BV, TERMS, NS,
        )),
    ], [1], [40])
    # fmt: on

    # fmt: on
