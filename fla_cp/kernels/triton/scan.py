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

import functools
from collections.abc import Callable
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from fla_cp.comm.carry import States
from fla_cp.kernels.sm90 import eligible
from fla_cp.kernels.triton import tile_table
from fla_cp.kernels.triton.device.blocks import (
    dot,
    load_block,
    load_rows,
    rounded_off,
    store_block,
    store_rows,
)
from fla_cp.kernels.triton.device.opaque import opaque_by, reload
from fla_cp.kernels.triton.device.planes import (
    CHANNELWISE_PLANES,
    HEADWISE_PLANES,
    K_FACTOR,
    Q_FACTOR,
    R_FACTOR,
)
from fla_cp.kernels.triton.device.states import load_operand, load_state, store_state
from fla_cp.kernels.triton.launch import cdiv, launch
from fla_cp.kernels.triton.operands import Chunks, tables
from fla_cp.partition.device_tables import Build, Columns
from fla_cp.partition.packing import Packing
from fla_cp.rule import CHUNK


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
    PLANES: tl.constexpr = HEADWISE_PLANES if HEAD else CHANNELWISE_PLANES
    SQUARE: tl.constexpr = TERMS * BT * BT
    LEAN: tl.constexpr = AGAIN or NS == 1 or BV > 64
    for c in tl.range(0, tl.cdiv(stop - start, BT), num_stages=NS, disable_licm=LEAN):
        if AGAIN:
            start, first = reload(seg_start + i_s), reload(seg_chunk + i_s)
        o_r = opaque_by(o_i, start) if AGAIN and HEAD else o_i
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
                o_q = opaque_by(o_i, reload(seg_start + i_s)) if HEAD and SLICES > 2 else o_r
                b_qg = load_operand(qg, i_ch, i_h, t, q_t, q_h, o_q, o_s, m_r, K, G, HEAD)
                b_o = dot(b_qg, b_Sb[s], PRECISION, acc=b_o)
        if AGAIN:
            t = reload(seg_start + i_s) + c * BT
            b_v = load_rows(v + t * v_t, o_r, v_t, m_r & value, o_v, V)
        if REMOVAL == "none":
            b_vn = b_v.to(operand)
        else:
            if HEAD:
                b_r *= tl.load(row + R_FACTOR * BT)[:, None]
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
                b_o *= tl.load(row + Q_FACTOR * BT)[:, None]
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
                b_vn = (b_vn.to(tl.float32) * tl.load(row + K_FACTOR * BT)[:, None]).to(operand)
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


@functools.cache
def _chosen(*names: str) -> Build:
    """Some of a packing's segments, by the names of its properties."""
    return lambda packing: (sum((getattr(packing, name) for name in names), ()),)


@functools.cache
def _places(name: str) -> Build:
    """For each segment its place among those of one property, -1 where it is none."""

    def columns(packing: Packing) -> Columns:
        place = {i: e for e, i in enumerate(getattr(packing, name))}
        return ([place.get(i, -1) for i in packing.everything],)

    return columns


def _entries(
    packing: Packing, states: States | None, name: str, device: torch.device
) -> Tensor | None:
    """Row of `states` for each segment, -1 where it has none; in a frame they are of `name`."""
    if states is None:
        return None
    if packing.frame is not None:
        return packing.table(_places(name), torch.int64, device)[0]
    row = {i: e for e, i in enumerate(states.segments)}
    return packing.index([row.get(i, -1) for i in packing.everything], device)


def launch_scan(
    packing: Packing,
    c: Chunks,
    S0: States | None,
    which: str,
    *,
    o: Tensor | None = None,
    h: Tensor | None = None,
    v_new: Tensor | None = None,
    S_end: Tensor | None = None,
    transition: Tensor | None = None,
    concurrent: bool = False,
) -> Callable[[], None]:
    """Returns a call that launches it and allocates nothing: another stream may run it. which:
    segments, a property of the packing; transition: of `Packing.middle`. beside: the reverse scan
    runs meanwhile."""
    middle = () if transition is None else packing.middle
    segments, names = getattr(packing, which), (which, "middle") if middle else (which,)
    table = tables(packing, c.v.device)
    (HV, K), V = c.decay.shape[1:], c.v.shape[2]
    stage = "scan" if o is not None else "scan_ends" if h is None else "scan_states"
    if concurrent:
        stage += "_concurrent"
    if o is not None and h is not None:
        stage += "_kept"
    t = scan_tile(stage, packing, c, count_chains(packing, which), (h, v_new), c.v)
    if not segments:
        return lambda: None
    programs = cdiv(V, t.BV) * len(segments) + cdiv(K, t.BV) * len(middle)
    arguments: dict[str, Any] = {
        "S0": None if S0 is None else S0.value,
        "S_end": S_end,
        "transition": transition,
        "segments": packing.table(_chosen(*names), torch.int64, c.v.device)[0],
        "seg_start": table.seg_start,
        "seg_stop": table.seg_stop,
        "seg_chunk": table.seg_chunk,
        "seg_entry": _entries(packing, S0, "carried", c.v.device),
        **state_strides("S0", None if S0 is None else S0.value),
        **state_strides("end", S_end, inner=True),
        "states": len(segments),
        **tile_constexprs(t, K, V),
    }
    if t.hopper:
        kernel = eligible.sm90_scan.scan_hopper_kernel
        arguments |= eligible.sm90_scan.described(c, t.BV, v=c.v, o=o, h=h, v_new=v_new)
        arguments |= {"v_h": c.v.stride(1), "o_rows": o}
    else:
        kernel = scan_kernel
        arguments |= {"v": c.v, "v_t": c.v.stride(0), "v_h": c.v.stride(1)} | c.scan_operands()
        arguments |= {
            "o": o,
            "h": h,
            "v_new": v_new,
            **state_strides("h", h, inner=True),
            "BK": t.BK,
        }
    return functools.partial(launch, kernel, (programs, HV), **arguments)


def count_chains(packing: Packing, which: str) -> int:
    """Segments of a scan on the rank that has most, and of the transitions that a summary forms
    besides."""
    counts = packing.largest
    return int(getattr(counts, which)) + (counts.middle if which == "feeding" else 0)


def scan_tile(
    stage: str,
    packing: Packing,
    c: Chunks,
    segments: int,
    dense: tuple[Tensor | None, ...],
    rows: Tensor,
) -> tile_table.Tile:
    """The tile of a scan that reads `rows` [T, HV, V] and writes `dense`, which kernels of sm90/
    need contiguous. segments: of the rank that has most, so that all ranks take the same tile."""
    written = all(x is None or x.is_contiguous() for x in dense)
    supports = written and eligible.supports(c, rows)
    whether = supports and eligible.pays(packing, c)
    chains = segments * c.decay.shape[1]
    if c.of_heads and not whether:
        # With one decay a head, tiles of all of V spill.
        chains = min(chains, tile_table.FULL_V_MIN_CHAINS - 1)
    t = c.tuning.tile(stage, c.decay.shape[2], c.v.shape[2], c.Aqk.dtype, chains, whether)
    if t.hopper and not supports:
        raise ValueError(f"{t} of {stage} takes bf16 and K = V = 128 only, and aligned tensors")
    return t if c.terms == 1 else tile_table.in_two_terms(stage, t)


def tile_constexprs(t: tile_table.Tile, K: int, V: int) -> dict[str, int]:
    return {"K": K, "V": V, "BT": CHUNK, "BV": t.BV, "NS": t.stages, "num_warps": t.warps}


def state_strides(name: str, x: Tensor | None, *, inner: bool = False) -> dict[str, int]:
    """Of states [.., HV, K, V], by argument; inner: of K and V only."""
    axes = "kv" if inner else "nhkv"
    strides = (0,) * len(axes) if x is None else x.stride()[-len(axes) :]
    return {f"{name}_{axis}": s for axis, s in zip(axes, strides, strict=True)}


def empty_states(
    c: Chunks,
    count: int,
    *,
    square: bool = False,
    outside: bool = False,
    dtype: torch.dtype = torch.float32,
) -> Tensor:
    """[count, HV, K, V], or with square [.., K, K]; outside: in the caller's layout in memory."""
    HV, K = c.decay.shape[1:]
    V = K if square else c.v.shape[2]
    v_first = outside and c.rule.state_v_first
    shape = (V, K) if v_first else (K, V)
    x = torch.empty(count, HV, *shape, dtype=dtype, device=c.v.device)
    return x.mT if v_first else x


def chunk_buffers(packing: Packing, c: Chunks) -> tuple[Tensor, Tensor]:
    (NC, HV, K), V = c.decay.shape, c.v.shape[2]
    buffers = c.v.new_empty(NC, HV, K, V), c.v.new_empty(NC, HV, CHUNK, V)
    if packing.frame is not None:  # no scan writes chunks of no tokens, but `intra_bwd` reads them
        for x in buffers:
            x[cdiv(packing.tokens, CHUNK) :].zero_()
    return buffers
