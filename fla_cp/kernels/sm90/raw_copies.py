"""Copies of the operands of scans on raw q, k and g (scan_gated.py) to shared memory."""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import mbarrier, tma

from fla_cp.kernels.triton.device.planes import CHANNELWISE_PLANES, Q_SCALE


@gluon.constexpr_function
def raw_bytes(S, OUT):
    """How many bytes of raw tiles and of scales are copied for a chunk."""
    return 2 * S.BT * (2 + OUT) * S.K + 4 * 2 * S.BT


@gluon.constexpr_function
def rest_bytes(S, OUT, REMOVES):
    """How many bytes are copied for a chunk besides."""
    return 2 * S.BT * (S.BV + (REMOVES + OUT) * S.BT) + 4 * (S.BT + S.K)


@gluon.jit
def copy_raw_chunk(
    c,
    operands,
    places,
    s_scales,
    barriers,
    heads,
    at,
    OUT: gl.constexpr,
    REVERSE: gl.constexpr,
    S: gl.constexpr,
):
    """Copies the raw tiles of chunk c, and what else there is of the chunk before. Both go to
    places of chunk c - NS, which must be free."""
    q, g, k, v, T, Aqk, rows, decay = operands
    s_q, s_g, s_k, s_v, s_T, s_A, s_rows, s_decay = places
    raw, _, rest = barriers
    q_h, g_h, k_h, v_h = heads
    REMOVES: gl.constexpr = S.REMOVAL != "none"
    REST: gl.constexpr = S.NS - 1
    PLANES: gl.constexpr = CHANNELWISE_PLANES
    i_h = at.i_h // S.G
    if c < at.n:
        s = c % S.NS
        i_c = c
        if REVERSE:
            i_c = at.n - 1 - c
        t = at.start + i_c * S.BT
        i_ch = (at.first + i_c) * S.HV + at.i_h
        bar = raw.index(s)
        mbarrier.expect(bar, raw_bytes(S, OUT))
        tma.async_copy_global_to_shared(g, [t, at.i_h * g_h], bar, s_g.index(s))
        tma.async_copy_global_to_shared(k, [t, i_h * k_h], bar, s_k.index(s))
        if OUT:
            tma.async_copy_global_to_shared(q, [t, i_h * q_h], bar, s_q.index(s))
        for f in gl.static_range(2):  # of q, of k
            to = s_scales.index(2 * s + f)
            tma.async_copy_global_to_shared(rows, [i_ch * PLANES + Q_SCALE + f, 0], bar, to)
    if (c > 0) & (c <= at.n):
        e = c - 1
        s = e % REST
        i_c = e
        if REVERSE:
            i_c = at.n - 1 - e
        t = at.start + i_c * S.BT
        i_ch = (at.first + i_c) * S.HV + at.i_h
        bar = rest.index(s)
        mbarrier.expect(bar, rest_bytes(S, OUT, REMOVES))
        tma.async_copy_global_to_shared(decay, [i_ch, 0], bar, s_decay.index(s))
        tma.async_copy_global_to_shared(v, [t, at.i_h * v_h + at.i_v * S.BV], bar, s_v.index(s))
        tma.async_copy_global_to_shared(rows, [i_ch * PLANES, 0], bar, s_rows.index(s))
        if REMOVES:
            tma.async_copy_global_to_shared(T, [i_ch * S.BT, 0], bar, s_T.index(s))
        if OUT:
            tma.async_copy_global_to_shared(Aqk, [i_ch * S.BT, 0], bar, s_A.index(s))


@gluon.jit
def copy_first(copies, OUT: gl.constexpr, REVERSE: gl.constexpr, S: gl.constexpr):
    """Copies what there are places for. copies: the arguments of `copy_raw_chunk`."""
    operands, places, s_scales, barriers, heads, at = copies
    for c in range(S.NS):
        copy_raw_chunk(c, operands, places, s_scales, barriers, heads, at, OUT, REVERSE, S)


@gluon.jit
def copy_next(c, copies, OUT: gl.constexpr, REVERSE: gl.constexpr, S: gl.constexpr):
    """Copies what goes to the places of chunk c."""
    operands, places, s_scales, barriers, heads, at = copies
    copy_raw_chunk(c + S.NS, operands, places, s_scales, barriers, heads, at, OUT, REVERSE, S)
