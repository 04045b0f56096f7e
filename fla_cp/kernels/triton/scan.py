"""States along the chunks of each segment, forward and in reverse; o is formed on the way.

Operands come from intra.py, chunk by chunk and already gated, so that the serial chain is three
products a chunk: kin S, T r, kg^T v_new (reverse: kg dS, T^T dv, kin^T x). With one decay a head
(HEAD) a gated operand is the input times a number a row, so q, k and p are read as given and their
factors (head.py) multiply what the products give or take.

The state is a tuple of slices of BK keys: one in half precision. In fp32, where a product is three
that hold their left operand in registers, a slice of each operand is loaded at a time, and AGAIN
wherever it is used. Each of those products starts from zero: sums over slices are rounded adds.

LLVM hoists addresses and descriptors of products out of the loop over chunks, some 60 registers:
LEAN kernels, which would spill or lose half of their warps for it, keep them in the loop.
"""

import triton
import triton.language as tl

from fla_cp.kernels.triton.device.blocks import (
    dot,
    load_block,
    load_rows,
    rounded_off,
    store_block,
    store_rows,
)


@triton.jit
def load_state(ptr, o_k, o_v, s_k, s_v, K: tl.constexpr, V: tl.constexpr):
    """[BK, BV] of the state at ptr, [K, V] by strides: of either layout outside."""
    m = (o_k < K)[:, None] & (o_v < V)[None, :]
    return tl.load(ptr + o_k[:, None] * s_k + o_v[None, :] * s_v, mask=m, other=0.0)


@triton.jit
def store_state(ptr, x, o_k, o_v, s_k, s_v, K: tl.constexpr, V: tl.constexpr):
    m = (o_k < K)[:, None] & (o_v < V)[None, :]
    tl.store(ptr + o_k[:, None] * s_k + o_v[None, :] * s_v, x.to(ptr.dtype.element_ty), mask=m)


@triton.jit
def load_operand(
    ptr, i_ch, i_h, t, x_t, x_h, o_i, o_k, m_r, K: tl.constexpr, G: tl.constexpr, HEAD: tl.constexpr
):
    """[BT, BK] of a chunk: of the input [T, H, K] with HEAD, else of [NC, HV, C, K]."""
    BT: tl.constexpr = o_i.shape[0]
    if HEAD:
        return load_rows(ptr + (i_h // G) * x_h + t * x_t, o_i, x_t, m_r, o_k, K)
    else:
        return load_block(ptr + i_ch * BT * K, o_i, o_k, BT, K)


@triton.jit
def times(a, x, FLIP: tl.constexpr, PRECISION: tl.constexpr, acc=None):
    """a @ x; with FLIP x^T -> (a @ x)^T, so that x stays in registers and is stored nowhere."""
    if FLIP:
        return dot(x, tl.trans(a), PRECISION, acc=acc)
    else:
        return dot(a, x, PRECISION, acc=acc)


@triton.jit
def of_rows(x, FLIP: tl.constexpr):
    """A number for each row of a product of `times`."""
    if FLIP:
        return x[None, :]
    else:
        return x[:, None]


@triton.jit
def flipped(x, FLIP: tl.constexpr):
    if FLIP:
        return tl.trans(x)
    else:
        return x


@triton.jit
def reload(ptr):
    """A number loaded behind a barrier: to the compiler another one, so that addresses made of it,
    and what is loaded from them, are not those from before, kept in registers until here."""
    tl.debug_barrier()
    return tl.load(ptr).to(tl.int64)


@triton.jit
def opaque(i, n):
    """i, since n >= 0, in a form that the compiler cannot tell to be i: with n from `anew`, what is
    formed of i (a row's address) is formed where it is used, not kept in registers."""
    return i + tl.minimum(n, 0).to(i.dtype)


@triton.jit(do_not_specialize=["states"])
def scan_kernel(
    qg,
    k_decayed,
    kg,
    v,
    rows,
    T,
    Aqk,
    decay,
    o,
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
    q_t,
    q_h,
    r_t,
    r_h,
    k_t,
    k_h,
    v_t,
    v_h,
    S0_n,
    S0_h,
    S0_k,
    S0_v,
    end_k,
    end_v,
    h_k,
    h_v,
    states,
    HV: tl.constexpr,
    G: tl.constexpr,
    K: tl.constexpr,
    V: tl.constexpr,
    BT: tl.constexpr,
    BK: tl.constexpr,
    BV: tl.constexpr,
    HEAD: tl.constexpr,
    REMOVAL: tl.constexpr,
    TERMS: tl.constexpr,
    PRECISION: tl.constexpr,
    NS: tl.constexpr,
):
    """o, h, v_new, S_end: each written unless None. S0: [E, HV, K, V], row seg_entry[s] (-1: zero).
    Strides of rows (_n), heads, K and V; S_end and h are dense in whole states.

    The first `states` of `segments` are for these. With `transition`, only S_end is written
    besides: the segments after them start from the identity [K, K] with v = 0 and so end in their
    transition. All fit on the card at once, where two launches would each leave half idle.
    """
    tiles: tl.constexpr = (V + BV - 1) // BV
    i_v, i_n = tl.program_id(0) % tiles, tl.program_id(0) // tiles
    value = True
    if transition is not None:
        value = tl.program_id(0) < tiles * states
        columns: tl.constexpr = (K + BV - 1) // BV
        if not value:
            i_n = (tl.program_id(0) - tiles * states) // columns
            i_v = (tl.program_id(0) - tiles * states) % columns
            i_n += states
    i_n, i_h = i_n.to(tl.int64), tl.program_id(1).to(tl.int64)
    i_s = tl.load(segments + i_n).to(tl.int64)
    o_k = tl.arange(0, BK)
    o_v = i_v * BV + tl.arange(0, BV)
    o_i = tl.arange(0, BT)
    v += i_h * v_h
    start, stop = tl.load(seg_start + i_s).to(tl.int64), tl.load(seg_stop + i_s).to(tl.int64)
    first = tl.load(seg_chunk + i_s).to(tl.int64)
    SLICES: tl.constexpr = (K + BK - 1) // BK
    b_S: tl.tuple = ()
    for s in tl.static_range(SLICES):
        o_s = s * BK + o_k
        b_s = tl.zeros([BK, BV], tl.float32)
        if transition is not None:
            b_s = tl.where((o_s[:, None] == o_v[None, :]) & (not value), 1.0, 0.0)
        if S0 is not None:
            entry = tl.load(seg_entry + i_s).to(tl.int64)
            if value & (entry >= 0):
                b_s += load_state(S0 + entry * S0_n + i_h * S0_h, o_s, o_v, S0_k, S0_v, K, V)
        b_S += (b_s,)
    operand = T.dtype.element_ty
    AGAIN: tl.constexpr = operand == tl.float32
    tl.static_assert(AGAIN or SLICES == 1, "half precision loads operands whole")
    KIN_IS_KG: tl.constexpr = HEAD and REMOVAL != "p" and not AGAIN
    PLANES: tl.constexpr = 9 if HEAD else 3
    SQUARE: tl.constexpr = TERMS * BT * BT
    LEAN: tl.constexpr = AGAIN or NS == 1 or BV > 64
    for c in tl.range(0, tl.cdiv(stop - start, BT), num_stages=NS, disable_licm=LEAN):
        if AGAIN:
            start, first = reload(seg_start + i_s), reload(seg_chunk + i_s)
        o_r = opaque(o_i, start) if AGAIN and HEAD else o_i
        i_ch = (first + c) * HV + i_h
        t = start + c * BT
        m_r = o_i < stop - t
        row = rows + i_ch * PLANES * BT + o_i
        b_Sb: tl.tuple = ()
        for s in tl.static_range(SLICES):
            b_Sb += (b_S[s].to(operand),)
            if h is not None:
                store_state(h + i_ch * K * V, b_Sb[s], s * BK + o_k, o_v, h_k, h_v, K, V)
        if not AGAIN:
            b_kg = load_operand(kg, i_ch, i_h, t, k_t, k_h, o_r, o_k, m_r, K, G, HEAD)
            b_v = load_rows(v + t * v_t, o_r, v_t, m_r & value, o_v, V)
        b_r: tl.tensor = None
        b_o: tl.tensor = None
        for s in tl.static_range(SLICES):
            o_s = s * BK + o_k
            if REMOVAL != "none":
                if KIN_IS_KG:
                    b_kin = b_kg
                else:
                    b_kin = load_operand(
                        k_decayed, i_ch, i_h, t, r_t, r_h, o_r, o_s, m_r, K, G, HEAD
                    )
                b_r = dot(b_kin, b_Sb[s], PRECISION, acc=b_r)
            if AGAIN and o is not None:
                # beside more slices, addresses of two operands would spill
                o_q = opaque(o_i, reload(seg_start + i_s)) if HEAD and SLICES > 2 else o_r
                b_qg = load_operand(qg, i_ch, i_h, t, q_t, q_h, o_q, o_s, m_r, K, G, HEAD)
                b_o = dot(b_qg, b_Sb[s], PRECISION, acc=b_o)
        if AGAIN:
            t = reload(seg_start + i_s) + c * BT
            b_v = load_rows(v + t * v_t, o_r, v_t, m_r & value, o_v, V)
        if REMOVAL == "none":
            b_vn = b_v.to(operand)
        else:
            if HEAD:
                b_r *= tl.load(row + 5 * BT)[:, None]
            b_r = ((b_v.to(tl.float32) - b_r) * tl.load(row)[:, None]).to(operand)
            b_T = load_block(T + i_ch * SQUARE, o_r, o_i, BT, BT)
            b_vf = dot(b_T, b_r, PRECISION)
            if TERMS > 1:
                b_T = load_block(T + i_ch * SQUARE + BT * BT, o_r, o_i, BT, BT)
                b_vf = dot(b_T, b_r, PRECISION, acc=b_vf)
            b_vn = b_vf.to(operand)
        if v_new is not None:
            store_block(v_new + i_ch * BT * V, b_vn, o_i, o_v, BT, V)
        if o is not None:
            if not AGAIN:
                b_qg = load_operand(qg, i_ch, i_h, t, q_t, q_h, o_r, o_k, m_r, K, G, HEAD)
                b_o = dot(b_qg, b_Sb[0], PRECISION)
            if HEAD:
                b_o *= tl.load(row + 4 * BT)[:, None]
            b_A = load_block(Aqk + i_ch * SQUARE, o_r, o_i, BT, BT)
            b_o = dot(b_A, b_vn, PRECISION, acc=b_o)
            if TERMS > 1:
                if REMOVAL != "none":
                    b_o = dot(b_A, rounded_off(b_vf, operand), PRECISION, acc=b_o)
                b_A = load_block(Aqk + i_ch * SQUARE + BT * BT, o_r, o_i, BT, BT)
                b_o = dot(b_A, b_vn, PRECISION, acc=b_o)
            store_rows(o + (t * HV + i_h) * V, b_o, o_r, HV * V, m_r, o_v, V)
        b_next: tl.tuple = ()
        for s in tl.static_range(SLICES):
            o_s = s * BK + o_k
            b_d = tl.load(decay + i_ch * K + o_s, mask=o_s < K, other=0.0)
            if AGAIN:
                b_kg = load_operand(kg, i_ch, i_h, t, k_t, k_h, o_r, o_s, m_r, K, G, HEAD)
            if HEAD and s == 0:
                b_vn = (b_vn.to(tl.float32) * tl.load(row + 6 * BT)[:, None]).to(operand)
            b_next += (dot(tl.trans(b_kg), b_vn, PRECISION, acc=b_S[s] * b_d[:, None]),)
        b_S = b_next
    for s in tl.static_range(SLICES):
        o_s = s * BK + o_k
        if value:
            if S_end is not None:
                to = S_end + (i_n * HV + i_h) * K * V
                store_state(to, b_S[s], o_s, o_v, end_k, end_v, K, V)
        elif transition is not None:
            to = transition + ((i_n - states) * HV + i_h) * K * K
            store_block(to, b_S[s], o_s, o_v, K, K)


@triton.jit
def scan_bwd_kernel(
    qg,
    k_decayed,
    kg,
    do,
    rows,
    T,
    Aqk,
    decay,
    y,
    dh,
    dS_end,
    dS0,
    segments,
    seg_start,
    seg_stop,
    seg_chunk,
    seg_exit,
    q_t,
    q_h,
    r_t,
    r_h,
    k_t,
    k_h,
    do_t,
    do_h,
    end_n,
    end_h,
    end_k,
    end_v,
    dS0_k,
    dS0_v,
    HV: tl.constexpr,
    G: tl.constexpr,
    K: tl.constexpr,
    V: tl.constexpr,
    BT: tl.constexpr,
    BK: tl.constexpr,
    BV: tl.constexpr,
    HEAD: tl.constexpr,
    REMOVAL: tl.constexpr,
    TERMS: tl.constexpr,
    PRECISION: tl.constexpr,
    FLIP: tl.constexpr,
    NS: tl.constexpr,
):
    """dh: state gradient at each chunk's end. y = T^T dv_new, so that dv = beta y. Each of y, dh
    and dS0 is written unless None. Strides as in `scan_kernel`: end_* are dS_end's."""
    tiles: tl.constexpr = (V + BV - 1) // BV
    i_v, i_h = tl.program_id(0) % tiles, tl.program_id(1).to(tl.int64)
    i_n = (tl.program_id(0) // tiles).to(tl.int64)
    i_s = tl.load(segments + i_n).to(tl.int64)
    o_k = tl.arange(0, BK)
    o_v = i_v * BV + tl.arange(0, BV)
    o_i = tl.arange(0, BT)
    do += i_h * do_h
    start, stop = tl.load(seg_start + i_s).to(tl.int64), tl.load(seg_stop + i_s).to(tl.int64)
    first = tl.load(seg_chunk + i_s).to(tl.int64)
    SLICES: tl.constexpr = (K + BK - 1) // BK
    b_dS: tl.tuple = ()
    for s in tl.static_range(SLICES):
        b_s = flipped(tl.zeros([BK, BV], tl.float32), FLIP)
        if dS_end is not None:
            leaving = tl.load(seg_exit + i_s).to(tl.int64)
            if leaving >= 0:
                end = dS_end + leaving * end_n + i_h * end_h
                b_s += flipped(load_state(end, s * BK + o_k, o_v, end_k, end_v, K, V), FLIP)
        b_dS += (b_s,)
    operand = T.dtype.element_ty
    AGAIN: tl.constexpr = operand == tl.float32
    tl.static_assert(AGAIN or SLICES == 1, "half precision loads operands whole")
    KIN_IS_KG: tl.constexpr = HEAD and REMOVAL != "p" and not AGAIN
    PLANES: tl.constexpr = 9 if HEAD else 3
    SQUARE: tl.constexpr = TERMS * BT * BT
    LEAN: tl.constexpr = AGAIN or NS == 1 or (HEAD and NS == 2)
    n = tl.cdiv(stop - start, BT)
    for c in tl.range(0, n, num_stages=NS, disable_licm=LEAN):
        if AGAIN:
            start, first = reload(seg_start + i_s), reload(seg_chunk + i_s)
        o_r = opaque(o_i, start) if AGAIN and HEAD else o_i
        i_c = n - 1 - c
        i_ch = (first + i_c) * HV + i_h
        t = start + i_c * BT
        m_r = o_i < stop - t
        row = rows + i_ch * PLANES * BT + o_i
        b_do = flipped(load_rows(do + t * do_t, o_r, do_t, m_r, o_v, V).to(operand), FLIP)
        b_dSb: tl.tuple = ()
        for s in tl.static_range(SLICES):
            b_dSb += (b_dS[s].to(operand),)
            if dh is not None:
                store_block(dh + i_ch * K * V, flipped(b_dSb[s], FLIP), s * BK + o_k, o_v, K, V)
        b_A = load_block(Aqk + i_ch * SQUARE, o_r, o_i, BT, BT)
        if not AGAIN:
            b_kg = load_operand(kg, i_ch, i_h, t, k_t, k_h, o_r, o_k, m_r, K, G, HEAD)
        b_y: tl.tensor = None
        if not HEAD:
            b_y = times(tl.trans(b_A), b_do, FLIP, PRECISION)
        for s in tl.static_range(SLICES):
            if AGAIN:
                o_s = s * BK + o_k
                b_kg = load_operand(kg, i_ch, i_h, t, k_t, k_h, o_r, o_s, m_r, K, G, HEAD)
            b_y = times(b_kg, b_dSb[s], FLIP, PRECISION, acc=b_y)
        if HEAD:
            b_y *= of_rows(tl.load(row + 6 * BT), FLIP)
            if AGAIN:
                b_A = load_block(Aqk + i_ch * SQUARE, o_r, o_i, BT, BT)
            b_y = times(tl.trans(b_A), b_do, FLIP, PRECISION, acc=b_y)
        if TERMS > 1:
            b_A = load_block(Aqk + i_ch * SQUARE + BT * BT, o_r, o_i, BT, BT)
            b_y = times(tl.trans(b_A), b_do, FLIP, PRECISION, acc=b_y)
        if REMOVAL != "none":
            b_T = load_block(T + i_ch * SQUARE, o_r, o_i, BT, BT)
            b_x = b_y
            b_y = times(tl.trans(b_T), b_x.to(operand), FLIP, PRECISION)
            if TERMS > 1:
                b_y = times(tl.trans(b_T), rounded_off(b_x, operand), FLIP, PRECISION, acc=b_y)
                b_T = load_block(T + i_ch * SQUARE + BT * BT, o_r, o_i, BT, BT)
                b_y = times(tl.trans(b_T), b_x.to(operand), FLIP, PRECISION, acc=b_y)
        if y is not None:
            b_yb = flipped(b_y.to(operand), FLIP)
            store_block(y + i_ch * BT * V, b_yb, o_i, o_v, BT, V)
        if AGAIN:
            t = reload(seg_start + i_s) + i_c * BT
            b_do = flipped(load_rows(do + t * do_t, o_r, do_t, m_r, o_v, V).to(operand), FLIP)
        b_next: tl.tuple = ()
        for s in tl.static_range(SLICES):
            o_s = s * BK + o_k
            b_d = of_rows(tl.load(decay + i_ch * K + o_s, mask=o_s < K, other=0.0), FLIP)
            b_qg = load_operand(qg, i_ch, i_h, t, q_t, q_h, o_r, o_s, m_r, K, G, HEAD)
            if HEAD and s == 0:
                b_do = (b_do.to(tl.float32) * of_rows(tl.load(row + 4 * BT), FLIP)).to(operand)
            b_next += (times(tl.trans(b_qg), b_do, FLIP, PRECISION, acc=b_dS[s] * b_d),)
        b_dS = b_next
        if REMOVAL != "none":
            b_x = -b_y * of_rows(tl.load(row), FLIP)
            if HEAD:
                b_x *= of_rows(tl.load(row + 5 * BT), FLIP)
            b_next = ()
            for s in tl.static_range(SLICES):
                o_s = s * BK + o_k
                if KIN_IS_KG:
                    b_kin = b_kg
                else:
                    b_kin = load_operand(
                        k_decayed, i_ch, i_h, t, r_t, r_h, o_r, o_s, m_r, K, G, HEAD
                    )
                b_next += (times(tl.trans(b_kin), b_x.to(operand), FLIP, PRECISION, acc=b_dS[s]),)
            b_dS = b_next
    if dS0 is not None:
        for s in tl.static_range(SLICES):
            to = dS0 + (i_n * HV + i_h) * K * V
            b_s = flipped(b_dS[s], FLIP)
            store_state(to, b_s, s * BK + o_k, o_v, dS0_k, dS0_v, K, V)
