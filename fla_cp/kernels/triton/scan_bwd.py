"""The reverse scan: the gradients of the states, chunk by chunk. States are held as in scan.py."""

from typing import Any

import triton
import triton.language as tl
from torch import Tensor

from fla_cp.comm.carry import States
from fla_cp.kernels.triton.device import planes
from fla_cp.kernels.triton.device.blocks import (
    load_block,
    load_rows,
    rounded_off,
    rows_from,
    store_block,
)
from fla_cp.kernels.triton.device.bundles import Segments, rows, state
from fla_cp.kernels.triton.device.opaque import opaque_by, reload
from fla_cp.kernels.triton.device.states import (
    flipped,
    load_operand,
    load_state,
    row_factors,
    store_state,
    times,
)
from fla_cp.kernels.triton.generations import kernels_of
from fla_cp.kernels.triton.launch import cdiv, launch
from fla_cp.kernels.triton.operands import Chunks
from fla_cp.kernels.triton.scan import count_chains, scan_tile, segments_of
from fla_cp.kernels.triton.tile_table import Tile
from fla_cp.partition.packing import Packing


@triton.jit
def scan_bwd_kernel(x, do, y, dh, dS_end, dS0, segments, S: tl.constexpr, FLIP: tl.constexpr):
    """x: `Operands`; do: `Rows`; dS_end and dS0: `State`; segments: `Segments`. dh: the gradient of
    the state at each chunk's end. y = T^T dv_new, so that dv = beta y. Each of y, dh and dS0 is
    written unless it is None. FLIP: the state is held transposed (`times`)."""
    tiles: tl.constexpr = (S.V + S.BV - 1) // S.BV
    i_v, i_h = tl.program_id(0) % tiles, tl.program_id(1).to(tl.int64)
    i_n = (tl.program_id(0) // tiles).to(tl.int64)
    i_s = tl.load(segments.order + i_n).to(tl.int64)
    o_k = tl.arange(0, S.BK)
    o_v = i_v * S.BV + tl.arange(0, S.BV)
    o_i = tl.arange(0, S.BT)
    do = rows_from(do, 0, i_h)
    start = tl.load(segments.start + i_s).to(tl.int64)
    stop = tl.load(segments.stop + i_s).to(tl.int64)
    first = tl.load(segments.chunk + i_s).to(tl.int64)
    SLICES: tl.constexpr = (S.K + S.BK - 1) // S.BK
    b_dS: tl.tuple = ()
    for s in tl.static_range(SLICES):
        b_s = flipped(tl.zeros([S.BK, S.BV], tl.float32), FLIP)
        if dS_end.ptr is not None:
            leaving = tl.load(segments.state + i_s).to(tl.int64)
            if leaving >= 0:
                end = dS_end.ptr + leaving * dS_end.n + i_h * dS_end.h
                b_s += flipped(load_state(dS_end, end, s * S.BK + o_k, o_v, S), FLIP)
        b_dS += (b_s,)
    operand = x.T.dtype.element_ty
    RELOAD: tl.constexpr = operand == tl.float32
    tl.static_assert(RELOAD or SLICES == 1, "half precision loads operands whole")
    SHARES_KG: tl.constexpr = S.HEAD and S.REMOVAL != "p" and not RELOAD
    PLANES: tl.constexpr = planes.HEADWISE_PLANES if S.HEAD else planes.CHANNELWISE_PLANES
    SQUARE: tl.constexpr = S.TERMS * S.BT * S.BT
    LEAN: tl.constexpr = RELOAD or S.NS == 1 or (S.HEAD and S.NS == 2)
    n = tl.cdiv(stop - start, S.BT)
    for c in tl.range(0, n, num_stages=S.NS, disable_licm=LEAN):
        if RELOAD:
            start, first = reload(segments.start + i_s), reload(segments.chunk + i_s)
        o_r = opaque_by(o_i, start) if RELOAD and S.HEAD else o_i
        i_c = n - 1 - c
        i_ch = (first + i_c) * S.HV + i_h
        t = start + i_c * S.BT
        m_r = o_i < stop - t
        row = x.rows + i_ch * PLANES * S.BT + o_i
        b_do = flipped(load_rows(rows_from(do, t, 0), o_r, m_r, o_v, S.V).to(operand), FLIP)
        b_dSb: tl.tuple = ()
        for s in tl.static_range(SLICES):
            b_dSb += (b_dS[s].to(operand),)
            if dh is not None:
                store_block(
                    dh + i_ch * S.K * S.V, flipped(b_dSb[s], FLIP), s * S.BK + o_k, o_v, S.K, S.V
                )
        b_A = load_block(x.Aqk + i_ch * SQUARE, o_r, o_i, S.BT, S.BT)
        if not RELOAD:
            b_kg = load_operand(x.kg, i_ch, i_h, t, o_r, o_k, m_r, S)
        b_y: tl.tensor = None
        if not S.HEAD:
            b_y = times(tl.trans(b_A), b_do, FLIP, S.PRECISION)
        for s in tl.static_range(SLICES):
            if RELOAD:
                o_s = s * S.BK + o_k
                b_kg = load_operand(x.kg, i_ch, i_h, t, o_r, o_s, m_r, S)
            b_y = times(b_kg, b_dSb[s], FLIP, S.PRECISION, acc=b_y)
        if S.HEAD:
            b_y *= row_factors(tl.load(row + planes.K_FACTOR * S.BT), FLIP)
            if RELOAD:
                b_A = load_block(x.Aqk + i_ch * SQUARE, o_r, o_i, S.BT, S.BT)
            b_y = times(tl.trans(b_A), b_do, FLIP, S.PRECISION, acc=b_y)
        if S.TERMS > 1:
            b_A = load_block(x.Aqk + i_ch * SQUARE + S.BT * S.BT, o_r, o_i, S.BT, S.BT)
            b_y = times(tl.trans(b_A), b_do, FLIP, S.PRECISION, acc=b_y)
        if S.REMOVAL != "none":
            b_T = load_block(x.T + i_ch * SQUARE, o_r, o_i, S.BT, S.BT)
            b_x = b_y
            b_y = times(tl.trans(b_T), b_x.to(operand), FLIP, S.PRECISION)
            if S.TERMS > 1:
                b_y = times(tl.trans(b_T), rounded_off(b_x, operand), FLIP, S.PRECISION, acc=b_y)
                b_T = load_block(x.T + i_ch * SQUARE + S.BT * S.BT, o_r, o_i, S.BT, S.BT)
                b_y = times(tl.trans(b_T), b_x.to(operand), FLIP, S.PRECISION, acc=b_y)
        if y is not None:
            b_yb = flipped(b_y.to(operand), FLIP)
            store_block(y + i_ch * S.BT * S.V, b_yb, o_i, o_v, S.BT, S.V)
        if RELOAD:
            t = reload(segments.start + i_s) + i_c * S.BT
            b_do = flipped(load_rows(rows_from(do, t, 0), o_r, m_r, o_v, S.V).to(operand), FLIP)
        b_next: tl.tuple = ()
        for s in tl.static_range(SLICES):
            o_s = s * S.BK + o_k
            b_d = row_factors(tl.load(x.decay + i_ch * S.K + o_s, mask=o_s < S.K, other=0.0), FLIP)
            b_qg = load_operand(x.qg, i_ch, i_h, t, o_r, o_s, m_r, S)
            if S.HEAD and s == 0:
                b_do = (
                    b_do.to(tl.float32) * row_factors(tl.load(row + planes.Q_FACTOR * S.BT), FLIP)
                ).to(operand)
            b_next += (times(tl.trans(b_qg), b_do, FLIP, S.PRECISION, acc=b_dS[s] * b_d),)
        b_dS = b_next
        if S.REMOVAL != "none":
            b_x = -b_y * row_factors(tl.load(row), FLIP)
            if S.HEAD:
                b_x *= row_factors(tl.load(row + planes.R_FACTOR * S.BT), FLIP)
            b_next = ()
            for s in tl.static_range(SLICES):
                o_s = s * S.BK + o_k
                if SHARES_KG:
                    b_kd = b_kg
                else:
                    b_kd = load_operand(x.k_decayed, i_ch, i_h, t, o_r, o_s, m_r, S)
                b_next += (times(tl.trans(b_kd), b_x.to(operand), FLIP, S.PRECISION, acc=b_dS[s]),)
            b_dS = b_next
    if dS0.ptr is not None:
        for s in tl.static_range(SLICES):
            to = dS0.ptr + (i_n * S.HV + i_h) * S.K * S.V
            b_s = flipped(b_dS[s], FLIP)
            store_state(dS0, to, b_s, s * S.BK + o_k, o_v, S)


def scan_bwd_tile(
    packing: Packing,
    c: Chunks,
    do: Tensor,
    which: str,
    dense: tuple[Tensor | None, ...],
    *,
    ends: bool,
    concurrent: bool,
) -> Tile:
    """The tile of a reverse scan. ends: it writes the gradients of states at its start only."""
    stage = "scan_bwd_ends" if ends else "scan_bwd"
    if concurrent:
        stage += "_concurrent"
    return scan_tile(stage, packing, c, count_chains(packing, which), dense, do)


def launch_scan_bwd(
    packing: Packing,
    c: Chunks,
    do: Tensor,
    dS_end: States | None,
    which: str,
    *,
    y: Tensor | None = None,
    dh: Tensor | None = None,
    dv: Tensor | None = None,
    dS0: Tensor | None = None,
    concurrent: bool = False,
) -> None:
    """Fills what is given of y, dv, dh and dS0. Only the kernels of a generation's folder can write
    dv (`reads_dv` in intra.py)."""
    segments = getattr(packing, which)
    HV, V = c.v.shape[1:]
    t = scan_bwd_tile(packing, c, do, which, (dh, y), ends=dh is None, concurrent=concurrent)
    if not segments:
        return
    run = segments_of(packing, (which,), dS_end, "feeding", c.v.device)
    take = scan_bwd_arguments
    if t.folder != "triton":
        sister = kernels_of(t.folder)
        take = (sister.scan_bwd if c.gating is None else sister.scan_gated).scan_bwd_arguments
    kernel, arguments = take(c, t, run, do, y=y, dh=dh, **({} if dv is None else {"dv": dv}))
    arguments |= {"dS_end": state(None if dS_end is None else dS_end.value), "dS0": state(dS0)}
    arguments |= {"S": c.shape(t), "num_warps": t.warps}
    launch(kernel, (cdiv(V, t.BV) * len(segments), HV), **arguments)


def scan_bwd_arguments(
    c: Chunks, t: Tile, segments: Segments, do: Tensor, *, y: Tensor | None, dh: Tensor | None
) -> tuple[Any, dict[str, Any]]:
    """The kernel of this folder, and its arguments beside those of every reverse scan."""
    arguments = {"x": c.scan_operands(), "do": rows(do), "y": y, "dh": dh, "segments": segments}
    return scan_bwd_kernel, arguments | {"FLIP": t.BV >= 64 and not c.of_heads}
