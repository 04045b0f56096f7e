"""The states along the chunks of each segment, and o on the way.

The local stage has written the operands chunk by chunk and already gated, so that the serial chain
is three products a chunk: k_decayed S, T r and kg^T v_new (in reverse: kg dS, T^T dv, k_decayed^T
x). With one decay a head a gated operand is the input times one number a row. The scans then read
q, k and p as given, and the factors in `Chunks.rows` multiply what the products give or take.

The state is a tuple of slices of BK keys, one slice in half precision. A product of fp32 operands
is three products that hold their left operand in registers. There a slice of each operand is loaded
at a time, and loaded again wherever it is used (RELOAD). Each of those products starts from zero:
sums over slices are rounded additions.

LLVM hoists addresses and descriptors of products out of the loop over chunks, about 60 registers.
LEAN kernels, which would spill or lose half of their warps, keep them in the loop."""

import functools
from collections.abc import Callable
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from fla_cp.comm.carry import States
from fla_cp.kernels.triton import tile_table
from fla_cp.kernels.triton.clear import clear
from fla_cp.kernels.triton.device import planes
from fla_cp.kernels.triton.device.blocks import (
    dot,
    load_block,
    load_rows,
    rounded_off,
    rows_from,
    store_block,
    store_rows,
)
from fla_cp.kernels.triton.device.bundles import Segments, rows, state
from fla_cp.kernels.triton.device.opaque import opaque_by, reload
from fla_cp.kernels.triton.device.states import load_operand, load_state, store_state
from fla_cp.kernels.triton.generations import choose, kernels_of
from fla_cp.kernels.triton.launch import cdiv, launch
from fla_cp.kernels.triton.operands import Chunks, ScanOutputs, tables
from fla_cp.partition.device_tables import Build, Columns
from fla_cp.partition.packing import Packing


@triton.jit(do_not_specialize=["states"])
def scan_kernel(x, v, o, h, v_new, S0, S_end, transition, segments, states, S: tl.constexpr):
    """x: `Operands`; v: `Rows`; segments: `Segments`; h, S0 and S_end: `State`. Each of o, h, v_new
    and S_end is written unless it is None. h and S_end are dense in whole states.

    The first `states` programs of segments form states. With `transition` these write S_end alone,
    and the segments after them start from the identity [K, K] with v = 0, so that they end in their
    transition. One launch holds both because two would each leave half of the GPU idle.
    """
    tiles: tl.constexpr = (S.V + S.BV - 1) // S.BV
    i_v, i_n = tl.program_id(0) % tiles, tl.program_id(0) // tiles
    value = True
    if transition is not None:
        value = tl.program_id(0) < tiles * states
        columns: tl.constexpr = (S.K + S.BV - 1) // S.BV
        if not value:
            i_n = (tl.program_id(0) - tiles * states) // columns
            i_v = (tl.program_id(0) - tiles * states) % columns
            i_n += states
    i_n, i_h = i_n.to(tl.int64), tl.program_id(1).to(tl.int64)
    i_s = tl.load(segments.order + i_n).to(tl.int64)
    o_k = tl.arange(0, S.BK)
    o_v = i_v * S.BV + tl.arange(0, S.BV)
    o_i = tl.arange(0, S.BT)
    v = rows_from(v, 0, i_h)
    start = tl.load(segments.start + i_s).to(tl.int64)
    stop = tl.load(segments.stop + i_s).to(tl.int64)
    first = tl.load(segments.chunk + i_s).to(tl.int64)
    SLICES: tl.constexpr = (S.K + S.BK - 1) // S.BK
    b_S: tl.tuple = ()
    for s in tl.static_range(SLICES):
        o_s = s * S.BK + o_k
        b_s = tl.zeros([S.BK, S.BV], tl.float32)
        if transition is not None:
            b_s = tl.where((o_s[:, None] == o_v[None, :]) & (not value), 1.0, 0.0)
        if S0.ptr is not None:
            entry = tl.load(segments.state + i_s).to(tl.int64)
            if value & (entry >= 0):
                b_s += load_state(S0, S0.ptr + entry * S0.n + i_h * S0.h, o_s, o_v, S)
        b_S += (b_s,)
    operand = x.T.dtype.element_ty
    RELOAD: tl.constexpr = operand == tl.float32
    tl.static_assert(RELOAD or SLICES == 1, "half precision loads operands whole")
    SHARES_KG: tl.constexpr = S.HEAD and S.REMOVAL != "p" and not RELOAD
    PLANES: tl.constexpr = planes.HEADWISE_PLANES if S.HEAD else planes.CHANNELWISE_PLANES
    SQUARE: tl.constexpr = S.TERMS * S.BT * S.BT
    LEAN: tl.constexpr = RELOAD or S.NS == 1 or S.BV > 64
    for c in tl.range(0, tl.cdiv(stop - start, S.BT), num_stages=S.NS, disable_licm=LEAN):
        if RELOAD:
            start, first = reload(segments.start + i_s), reload(segments.chunk + i_s)
        o_r = opaque_by(o_i, start) if RELOAD and S.HEAD else o_i
        i_ch = (first + c) * S.HV + i_h
        t = start + c * S.BT
        m_r = o_i < stop - t
        row = x.rows + i_ch * PLANES * S.BT + o_i
        b_Sb: tl.tuple = ()
        for s in tl.static_range(SLICES):
            b_Sb += (b_S[s].to(operand),)
            if h.ptr is not None:
                store_state(h, h.ptr + i_ch * S.K * S.V, b_Sb[s], s * S.BK + o_k, o_v, S)
        if not RELOAD:
            b_kg = load_operand(x.kg, i_ch, i_h, t, o_r, o_k, m_r, S)
            b_v = load_rows(rows_from(v, t, 0), o_r, m_r & value, o_v, S.V)
        b_r: tl.tensor = None
        b_o: tl.tensor = None
        for s in tl.static_range(SLICES):
            o_s = s * S.BK + o_k
            if S.REMOVAL != "none":
                if SHARES_KG:
                    b_kd = b_kg
                else:
                    b_kd = load_operand(x.k_decayed, i_ch, i_h, t, o_r, o_s, m_r, S)
                b_r = dot(b_kd, b_Sb[s], S.PRECISION, acc=b_r)
            if RELOAD and o is not None:
                # with more slices, the addresses of two operands would spill
                o_q = opaque_by(o_i, reload(segments.start + i_s)) if S.HEAD and SLICES > 2 else o_r
                b_qg = load_operand(x.qg, i_ch, i_h, t, o_q, o_s, m_r, S)
                b_o = dot(b_qg, b_Sb[s], S.PRECISION, acc=b_o)
        if RELOAD:
            t = reload(segments.start + i_s) + c * S.BT
            b_v = load_rows(rows_from(v, t, 0), o_r, m_r & value, o_v, S.V)
        if S.REMOVAL == "none":
            b_vn = b_v.to(operand)
        else:
            if S.HEAD:
                b_r *= tl.load(row + planes.R_FACTOR * S.BT)[:, None]
            b_r = ((b_v.to(tl.float32) - b_r) * tl.load(row)[:, None]).to(operand)
            b_T = load_block(x.T + i_ch * SQUARE, o_r, o_i, S.BT, S.BT)
            b_vf = dot(b_T, b_r, S.PRECISION)
            if S.TERMS > 1:
                b_T = load_block(x.T + i_ch * SQUARE + S.BT * S.BT, o_r, o_i, S.BT, S.BT)
                b_vf = dot(b_T, b_r, S.PRECISION, acc=b_vf)
            b_vn = b_vf.to(operand)
        if v_new is not None:
            store_block(v_new + i_ch * S.BT * S.V, b_vn, o_i, o_v, S.BT, S.V)
        if o is not None:
            if not RELOAD:
                b_qg = load_operand(x.qg, i_ch, i_h, t, o_r, o_k, m_r, S)
                b_o = dot(b_qg, b_Sb[0], S.PRECISION)
            if S.HEAD:
                b_o *= tl.load(row + planes.Q_FACTOR * S.BT)[:, None]
            b_A = load_block(x.Aqk + i_ch * SQUARE, o_r, o_i, S.BT, S.BT)
            b_o = dot(b_A, b_vn, S.PRECISION, acc=b_o)
            if S.TERMS > 1:
                if S.REMOVAL != "none":
                    b_o = dot(b_A, rounded_off(b_vf, operand), S.PRECISION, acc=b_o)
                b_A = load_block(x.Aqk + i_ch * SQUARE + S.BT * S.BT, o_r, o_i, S.BT, S.BT)
                b_o = dot(b_A, b_vn, S.PRECISION, acc=b_o)
            store_rows(o + (t * S.HV + i_h) * S.V, b_o, o_r, S.HV * S.V, m_r, o_v, S.V)
        b_next: tl.tuple = ()
        for s in tl.static_range(SLICES):
            o_s = s * S.BK + o_k
            b_d = tl.load(x.decay + i_ch * S.K + o_s, mask=o_s < S.K, other=0.0)
            if RELOAD:
                b_kg = load_operand(x.kg, i_ch, i_h, t, o_r, o_s, m_r, S)
            if S.HEAD and s == 0:
                b_vn = (b_vn.to(tl.float32) * tl.load(row + planes.K_FACTOR * S.BT)[:, None]).to(
                    operand
                )
            b_next += (dot(tl.trans(b_kg), b_vn, S.PRECISION, acc=b_S[s] * b_d[:, None]),)
        b_S = b_next
    for s in tl.static_range(SLICES):
        o_s = s * S.BK + o_k
        if value:
            if S_end.ptr is not None:
                to = S_end.ptr + (i_n * S.HV + i_h) * S.K * S.V
                store_state(S_end, to, b_S[s], o_s, o_v, S)
        elif transition is not None:
            to = transition + ((i_n - states) * S.HV + i_h) * S.K * S.K
            store_block(to, b_S[s], o_s, o_v, S.K, S.K)


@functools.cache
def _chosen(*names: str) -> Build:
    """The segments that some properties of a packing name."""
    if names == ("everything",):
        return lambda packing: (range(packing.count),)
    return lambda packing: (sum((getattr(packing, name) for name in names), ()),)


@functools.cache
def _places(name: str) -> Build:
    """For each segment its place among those that a property names, -1 if it is not among them."""

    def columns(packing: Packing) -> Columns:
        place = {i: e for e, i in enumerate(getattr(packing, name))}
        return ([place.get(i, -1) for i in packing.everything],)

    return columns


def segments_of(
    packing: Packing, names: tuple[str, ...], states: States | None, name: str, device: torch.device
) -> Segments:
    """The segments of some properties of the packing, and for each segment its row of `states`; in
    a frame the rows are those of the property `name`."""
    order = packing.table(_chosen(*names), torch.int64, device)[0]
    table, row = tables(packing, device), None
    if states is not None and packing.frame is not None:
        row = packing.table(_places(name), torch.int64, device)[0]
    elif states is not None:
        place = {i: e for e, i in enumerate(states.segments)}
        row = packing.index([place.get(i, -1) for i in packing.everything], device)
    return Segments(order, table.seg_start, table.seg_stop, table.seg_chunk, row)


def launch_scan(
    packing: Packing,
    c: Chunks,
    S0: States | None,
    which: str,
    out: ScanOutputs,
    concurrent: bool = False,
) -> Callable[[], None]:
    """Returns a call that launches the scan and allocates nothing, so that another stream may run
    it. which: the packing's property that names the segments. concurrent: the reverse scan runs at
    the same time."""
    o, h, v_new, S_end, transition = out
    middle = () if transition is None else packing.middle
    segments, names = getattr(packing, which), (which, "middle") if middle else (which,)
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
    run = segments_of(packing, names, S0, "carried", c.v.device)
    take = scan_arguments
    if t.folder != "triton":
        sister = kernels_of(t.folder)
        take = (sister.scan if c.gating is None else sister.scan_gated).scan_arguments
    kernel, arguments = take(c, t, run, out)
    arguments |= {"S0": state(None if S0 is None else S0.value), "S_end": state(S_end)}
    arguments |= {"states": len(segments), "S": c.shape(t), "num_warps": t.warps}
    return functools.partial(launch, kernel, (programs, HV), **arguments)


def scan_arguments(
    c: Chunks, t: tile_table.Tile, segments: Segments, out: ScanOutputs
) -> tuple[Any, dict[str, Any]]:
    """The kernel of this folder, and the arguments that those of other folders do not have."""
    read = {"x": c.scan_operands(), "v": rows(c.v), "segments": segments}
    written = {"o": out.o, "h": state(out.h), "v_new": out.v_new, "transition": out.transition}
    return scan_kernel, read | written


def count_chains(packing: Packing, which: str) -> int:
    """The segments of a scan on the rank that has most, plus the transitions that a summary forms
    with them."""
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
    """The tile of a scan that reads `rows` [T, HV, V] and writes `dense`, which kernels for one
    generation of GPUs need contiguous. segments: of the rank that has most, so that all ranks take
    the same tile."""
    written = all(x is None or x.is_contiguous() for x in dense)
    if c.gating is not None:
        return kernels_of(c.gating.folder).scan_gated.tile_of(stage)
    folder = choose(packing, c, rows) if written else "triton"
    chains = segments * c.decay.shape[1]
    if c.of_heads and folder == "triton":
        # With one decay a head, tiles of all of V spill.
        chains = min(chains, tile_table.FULL_V_MIN_CHAINS - 1)
    named = stage
    if stage in ("scan", "scan_bwd") and c.of_heads and folder != "triton":
        named += "_head_own" if c.rule.removal == "p" else "_head"
    t = c.tuning.tile(named, c.decay.shape[2], c.v.shape[2], c.Aqk.dtype, chains, folder)
    forced = t.folder not in ("triton", folder)
    if forced and not (written and kernels_of(t.folder).supports(c, rows)):
        raise ValueError(f"{t} of {stage} takes bf16 and K = V = 128 only, and aligned tensors")
    t = tile_table.in_chunks_of(c.tokens, stage, t, c.terms)
    return t if c.terms == 1 else tile_table.in_two_terms(stage, t)


def empty_states(
    c: Chunks,
    count: int,
    *,
    square: bool = False,
    outside: bool = False,
    dtype: torch.dtype = torch.float32,
) -> Tensor:
    """[count, HV, K, V], or [count, HV, K, K] with square. outside: in memory laid out as the
    caller's states."""
    HV, K = c.decay.shape[1:]
    V = K if square else c.v.shape[2]
    v_first = outside and c.rule.state_v_first
    shape = (V, K) if v_first else (K, V)
    x = torch.empty(count, HV, *shape, dtype=dtype, device=c.v.device)
    return x.mT if v_first else x


def chunk_buffers(packing: Packing, c: Chunks) -> tuple[Tensor, Tensor]:
    """Memory for states [NC, HV, K, V] and values [NC, HV, C, V] of chunks."""
    (NC, HV, K), V = c.decay.shape, c.v.shape[2]
    buffers = c.v.new_empty(NC, HV, K, V), c.v.new_empty(NC, HV, packing.chunk, V)
    if packing.frame is not None:
        clear(*buffers, packing.frame.filled)
    return buffers


def state_buffer(packing: Packing, c: Chunks) -> Tensor:
    """Memory for the states [NC, HV, K, V] alone; see `chunk_buffers`."""
    (NC, HV, K), V = c.decay.shape, c.v.shape[2]
    buffer = c.v.new_empty(NC, HV, K, V)
    if packing.frame is not None:
        clear(buffer, buffer[NC:], packing.frame.filled)
    return buffer
