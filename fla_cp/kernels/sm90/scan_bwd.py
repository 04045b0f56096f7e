"""The reverse scan for the tensor cores of sm_90, in Gluon. scan.py has what both scans share."""

from typing import Any, NamedTuple

from torch import Tensor
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    mbarrier,
    tma,
    warpgroup_mma,
    warpgroup_mma_wait,
)

from fla_cp.kernels.sm90.raw_copies import copy_first, copy_next
from fla_cp.kernels.sm90.results import (
    flags_of_results,
    hand_over,
    has_results,
    places_of_results,
    wait_until_drained,
)
from fla_cp.kernels.sm90.scan import (
    at_segment,
    copy_chunks,
    described,
    head_strides,
    places_of,
    reads_own,
    removes,
    rounded_off,
    store_rest,
    term,
)
from fla_cp.kernels.sm90.tma import barrier
from fla_cp.kernels.triton.device.bundles import Segments
from fla_cp.kernels.triton.operands import Chunks
from fla_cp.kernels.triton.tile_table import Tile


class ScanBwdMore(NamedTuple):
    """Like `ScanMore`. heads: the strides of heads of qg, k_decayed, kg and do. o_rows: dv."""

    heads: tuple[int, int, int, int]
    o_rows: Any
    segments: Segments


@gluon.jit
def lost(x, half: gl.constexpr):
    """What rounding x to `half` loses. The result is wrong by up to half a unit of bf16, no more
    than the rounding itself, for the few x, one in 100000, that lie less than a part of 2^-16 below
    a power of two. |x| must be less than 2^111."""
    if half == gl.bfloat16:
        # The product is rounded at the eighth binary digit of x, where bf16 rounds x. To convert x
        # and back would take a slow instruction (F2F) for each number.
        c = x * 65537.0
        return gl.fma(x, 65537.0, -c)
    else:
        return x - x.to(half).to(gl.float32)


@gluon.jit
def scan_chunks_back(
    places, barriers, results, dS_end, dS0, more, at, leaving, copies, S: gl.constexpr
):
    """What the computing warps do. leaving: the segment's row in dS_end, or -1. barriers,
    copies: as in `scan_chunks`."""
    ready, free, rest = barriers
    s_qg, s_k_decayed, s_kg, s_do, s_T, s_A, s_rows, s_decay = places
    OWN: gl.constexpr = reads_own(S)
    REMOVES: gl.constexpr = removes(S)
    FACTORS: gl.constexpr = 4 if S.HEAD else 1
    dv, dh, y = results[0]
    s_dv, s_h, s_y = results[1]
    REST: gl.constexpr = s_do.shape[0]
    half: gl.constexpr = s_kg.dtype
    W: gl.constexpr = S.BV // 16
    acc: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [W, 1], [16, S.BT, 16])
    state: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [W, 1], [16, S.K, 16])
    left: gl.constexpr = gl.DotOperandLayout(0, acc, 2)
    left_of_state: gl.constexpr = gl.DotOperandLayout(0, state, 2)
    flat: gl.constexpr = gl.BlockedLayout([1, 8], [4, 8], [W, 1], [1, 0])

    o_v = (at.i_v * S.BV + gl.arange(0, S.BV, gl.SliceLayout(1, state)))[:, None]
    o_k = gl.arange(0, S.K, gl.SliceLayout(0, state))[None, :]
    b_dS = gl.full([S.BV, S.K], 0.0, gl.float32, state)
    if dS_end.ptr is not None:  # noqa: SIM102  # known when compiled
        if leaving >= 0:
            end = dS_end
            p = end.ptr + leaving.to(gl.int64) * end.n + at.i_h.to(gl.int64) * end.h
            b_dS += gl.load(p + o_v * end.v + o_k * end.k)
    zero = gl.full([S.BV, S.BT], 0.0, gl.float32, acc)
    if copies is not None:
        copy_first(copies, True, True, S)
    for c in range(at.n):
        s, r = c % S.NS, c % REST
        i_c = at.n - 1 - c
        b_dSb = b_dS.to(half)
        a_S = gl.convert_layout(b_dSb, left)
        mbarrier.wait(ready.index(s), (c // S.NS) & 1)
        if rest is not None:
            mbarrier.wait(rest.index(r), (c // REST) & 1)
        s_o = s_do.index(r).permute((1, 0))
        s_k = s_kg.index(s).permute((1, 0))
        s_a = term(s_A.index(r), 0, S.TERMS, S.BT)
        b_x = warpgroup_mma(s_o, s_a, zero, use_acc=False, is_async=True)
        if S.TERMS > 1:
            s_a = term(s_A.index(r), 1, S.TERMS, S.BT)
            b_x = warpgroup_mma(s_o, s_a, b_x, is_async=True)
        if S.HEAD:
            b_y = warpgroup_mma(a_S, s_k, zero, use_acc=False, is_async=True)
            # What does not need these products is done while they run.
            m = gl.arange(0, S.BT, gl.SliceLayout(0, acc)) < at.stop - at.start - i_c * S.BT
            f_q = gl.where(m[None, :], s_rows.index(r * FACTORS + 1).load(acc), 0.0)
            a_o = gl.convert_layout((s_o.load(acc).to(gl.float32) * f_q).to(half), left_of_state)
            if W > 4:  # fewer registers
                b_y, b_x, a_S, a_o = warpgroup_mma_wait(0, deps=(b_y, b_x, a_S, a_o))
                f_k = s_rows.index(r * FACTORS + 3).load(acc)
            else:
                f_k = s_rows.index(r * FACTORS + 3).load(acc)
                b_y, b_x, a_S, a_o, f_k = warpgroup_mma_wait(0, deps=(b_y, b_x, a_S, a_o, f_k))
            b_y = b_y * f_k + b_x
        else:
            b_y = warpgroup_mma(a_S, s_k, b_x, is_async=True)
            b_y, a_S = warpgroup_mma_wait(0, deps=(b_y, a_S))
        if REMOVES:
            a_y = gl.convert_layout(b_y.to(half), left)
            s_t = term(s_T.index(r), 0, S.TERMS, S.BT)
            if S.TERMS > 1:
                a_low = gl.convert_layout(rounded_off(b_y, half), left)
                b_y = warpgroup_mma(a_low, s_t, zero, use_acc=False, is_async=True)
                b_y = warpgroup_mma(a_y, s_t, b_y, is_async=True)
                s_t = term(s_T.index(r), 1, S.TERMS, S.BT)
                b_y = warpgroup_mma(a_y, s_t, b_y, is_async=True)
            # What a_y loses by rounding is added: T's diagonal is 1.
            elif S.HEAD:
                b_y = warpgroup_mma(a_y, s_t, b_y - b_y.to(half).to(gl.float32), is_async=True)
            elif dv is not None:
                b_y = warpgroup_mma(a_y, s_t, lost(b_y, half), is_async=True)
            else:
                b_y = warpgroup_mma(a_y, s_t, zero, use_acc=False, is_async=True)
        b_dS = b_dS * s_decay.index(r).load(state)
        if S.HEAD:
            b_dS = warpgroup_mma(a_o, s_qg.index(s), b_dS, is_async=True)
        else:
            b_dS = warpgroup_mma(s_o, s_qg.index(s), b_dS, is_async=True)
        if REMOVES:
            b_beta = s_rows.index(r * FACTORS).load(acc)
            if S.HEAD:
                b_beta = b_beta * s_rows.index(r * FACTORS + 2).load(acc)
            b_beta = -b_beta
            if S.TERMS > 1:
                b_y, a_y, a_low, b_beta = warpgroup_mma_wait(1, deps=(b_y, a_y, a_low, b_beta))
            else:
                b_y, a_y, b_beta = warpgroup_mma_wait(1, deps=(b_y, a_y, b_beta))
            a_x = gl.convert_layout((b_y * b_beta).to(half), left_of_state)
            s_r = s_kg.index(s)
            if OWN:
                s_r = s_k_decayed.index(s)
            b_dS = warpgroup_mma(a_x, s_r, b_dS, is_async=True)
        if has_results(results):
            wait_until_drained(c, results, copies)
        if dh is not None:
            s_h.permute((1, 0)).store(b_dSb)
        if y is not None:
            s_y.permute((1, 0)).store(b_y.to(half))
        if dv is not None:
            if REMOVES and S.HEAD:
                b_y = b_y * s_rows.index(r * FACTORS).load(acc)
            elif REMOVES:
                b_y = b_y * b_beta * -1.0
            s_dv.permute((1, 0)).store(b_y.to(half))
        if REMOVES and S.HEAD:
            b_dS, a_x, a_o = warpgroup_mma_wait(0, deps=(b_dS, a_x, a_o))
        elif REMOVES:
            b_dS, a_x = warpgroup_mma_wait(0, deps=(b_dS, a_x))
        elif S.HEAD:
            b_dS, a_o = warpgroup_mma_wait(0, deps=(b_dS, a_o))
        else:
            b_dS = warpgroup_mma_wait(0, deps=(b_dS,))
        if copies is None:
            mbarrier.arrive(free.index(s), count=1)
        else:
            barrier()
            copy_next(c, copies, True, True, S)
        if has_results(results):
            hand_over(c, results, copies, at, True, S)
        if dv is not None:
            store_rest(i_c, s_dv, more, at, flat, S)
    if copies is not None:
        tma.store_wait(0)
    if dS0.ptr is not None:
        to = dS0.ptr + (at.i_n.to(gl.int64) * S.HV + at.i_h) * S.K * S.V
        gl.store(to + o_v * dS0.v + o_k * dS0.k, b_dS)


@gluon.jit
def scan_bwd_sm90_kernel(
    qg, k_decayed, kg, do, T, Aqk, rows, decay, y, dh, dv, dS_end, dS0, more, S: gl.constexpr
):
    """`scan_bwd_kernel` with what `described` gives; more: `ScanBwdMore`."""
    i_v, i_n = gl.program_id(0) % (S.V // S.BV), gl.program_id(0) // (S.V // S.BV)
    at, i_s = at_segment(more.segments, i_n, gl.program_id(1), i_v, S)
    leaving = -1
    if dS_end.ptr is not None:
        leaving = gl.load(more.segments.state + i_s).to(gl.int32)
    operands = (qg, k_decayed, kg, do, T, Aqk, rows, decay)
    places, ready, free = places_of(operands, True, S)
    flags = (ready, ready)  # in place of nothing
    if (dh is not None) or (y is not None) or (dv is not None):
        flags = flags_of_results()
    results = ((dv, dh, y), places_of_results(dv, dh, y, ready, S), flags)
    # fmt: off
    gl.warp_specialize([
        (scan_chunks_back, (
            places, (ready, free, None), results, dS_end, dS0, more, at, leaving, None, S,
        )),
        (copy_chunks, (operands, places, (ready, free), results, more.heads, at, True, True, S)),
    ], [1], [40])
    # fmt: on


def scan_bwd_arguments(
    c: Chunks,
    t: Tile,
    segments: Segments,
    do: Tensor,
    *,
    y: Tensor | None,
    dh: Tensor | None,
    dv: Tensor | None = None,
) -> tuple[Any, dict[str, Any]]:
    """The kernel, and the arguments that the kernels of other folders do not have."""
    arguments = described(c, t.BV, do=do, y=y, dh=dh, dv=dv)
    arguments["more"] = ScanBwdMore(head_strides(c, do), dv, segments)
    return scan_bwd_sm90_kernel, arguments
