"""The reverse scan: gradients of the states, chunk by chunk."""

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from fla_cp.comm.carry import States
from fla_cp.kernels.sm90 import eligible
from fla_cp.kernels.triton.device.blocks import load_block, load_rows, rounded_off, store_block
from fla_cp.kernels.triton.device.opaque import opaque_by, reload
from fla_cp.kernels.triton.device.planes import (
    CHANNELWISE_PLANES,
    HEADWISE_PLANES,
    K_FACTOR,
    Q_FACTOR,
    R_FACTOR,
)
from fla_cp.kernels.triton.device.states import (
    flipped,
    load_operand,
    load_state,
    of_rows,
    store_state,
    times,
)
from fla_cp.kernels.triton.launch import cdiv, launch
from fla_cp.kernels.triton.operands import Chunks, tables
from fla_cp.kernels.triton.scan import (
    _chosen,
    _entries,
    count_chains,
    scan_tile,
    state_strides,
    tile_constexprs,
)
from fla_cp.partition.packing import Packing


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
    PLANES: tl.constexpr = HEADWISE_PLANES if HEAD else CHANNELWISE_PLANES
    SQUARE: tl.constexpr = TERMS * BT * BT
    LEAN: tl.constexpr = AGAIN or NS == 1 or (HEAD and NS == 2)
    n = tl.cdiv(stop - start, BT)
    for c in tl.range(0, n, num_stages=NS, disable_licm=LEAN):
        if AGAIN:
            start, first = reload(seg_start + i_s), reload(seg_chunk + i_s)
        o_r = opaque_by(o_i, start) if AGAIN and HEAD else o_i
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
            b_y *= of_rows(tl.load(row + K_FACTOR * BT), FLIP)
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
                b_do = (b_do.to(tl.float32) * of_rows(tl.load(row + Q_FACTOR * BT), FLIP)).to(
                    operand
                )
            b_next += (times(tl.trans(b_qg), b_do, FLIP, PRECISION, acc=b_dS[s] * b_d),)
        b_dS = b_next
        if REMOVAL != "none":
            b_x = -b_y * of_rows(tl.load(row), FLIP)
            if HEAD:
                b_x *= of_rows(tl.load(row + R_FACTOR * BT), FLIP)
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


def launch_scan_bwd(
    packing: Packing,
    c: Chunks,
    do: Tensor,
    dS_end: States | None,
    which: str,
    *,
    y: Tensor | None = None,
    dh: Tensor | None = None,
    dS0: Tensor | None = None,
    concurrent: bool = False,
) -> None:
    segments = getattr(packing, which)
    table = tables(packing, c.v.device)
    (HV, K), V = c.decay.shape[1:], c.v.shape[2]
    stage = "scan_bwd_ends" if dh is None else "scan_bwd"
    if concurrent:
        stage += "_concurrent"
    t = scan_tile(stage, packing, c, count_chains(packing, which), (dh, y), do)
    if not segments:
        return
    arguments: dict[str, Any] = {
        "dS_end": None if dS_end is None else dS_end.value,
        "dS0": dS0,
        "segments": packing.table(_chosen(which), torch.int64, c.v.device)[0],
        "seg_start": table.seg_start,
        "seg_stop": table.seg_stop,
        "seg_chunk": table.seg_chunk,
        "seg_exit": _entries(packing, dS_end, "feeding", c.v.device),
        **state_strides("end", None if dS_end is None else dS_end.value),
        **state_strides("dS0", dS0, inner=True),
        **tile_constexprs(t, K, V),
    }
    if t.hopper:
        kernel = eligible.sm90_scan_bwd.scan_bwd_hopper_kernel
        arguments |= eligible.sm90_scan.described(c, t.BV, do=do, y=y, dh=dh)
        arguments["do_h"] = do.stride(1)
    else:
        kernel = scan_bwd_kernel
        arguments |= {"do": do, "do_t": do.stride(0), "do_h": do.stride(1)} | c.scan_operands()
        arguments |= {"y": y, "dh": dh, "BK": t.BK, "FLIP": t.BV >= 64 and not c.of_heads}
    launch(kernel, (cdiv(V, t.BV) * len(segments), HV), **arguments)
