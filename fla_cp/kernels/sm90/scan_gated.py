"""The scans of a backward on raw q, k and g, with one decay a channel, in Gluon.

The scans read q, k and g where those of scan.py and scan_bwd.py read qg, kg and k_decayed, which
are as large. So no kernel has to form these again before, and they take no memory of the GPU. A
second group of warps forms them from a chunk's raw tiles, in the same places of shared memory,
while the first one computes an earlier chunk:

1. As soon as the computing warps have finished with a chunk, they start the copies to its places:
   the raw tiles of the chunk NS later, and all else (values or their gradients, T, Aqk, beta and
   the decays), which needs no second step, of the chunk before that.
2. The gating warps wait for the raw tiles. A thread has 8 rows of two channels. Each element is
   written by the thread that has read it.
3. The computing warps, whose code is that of the other scans, wait for both.

Decays are products of single tokens' decays, from the chunk's start and to its end. So nothing
cancels, whatever the gate, and an element takes one exponential more than its gate does.
"""

from typing import Any

from torch import Tensor
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared, mbarrier

from fla_cp.kernels.sm90.intra_channelwise import log_decay
from fla_cp.kernels.sm90.results import places_of_results
from fla_cp.kernels.sm90.scan import (
    ScanMore,
    at_segment,
    described,
    head_strides,
    removes,
    scan_chunks,
)
from fla_cp.kernels.sm90.scan_bwd import ScanBwdMore, scan_chunks_back
from fla_cp.kernels.sm90.tma import barrier
from fla_cp.kernels.sm90.upcast import upcast
from fla_cp.kernels.torch.intra import Inputs
from fla_cp.kernels.triton.device.bundles import Segments, terms
from fla_cp.kernels.triton.device.gates import LOG2E
from fla_cp.kernels.triton.operands import Chunks, ScanOutputs
from fla_cp.kernels.triton.tile_table import IN_SCANS, Tile
from fla_cp.rule import DeltaRule

GATING_WARPS = gl.constexpr(16)
"""How many warps form the gated operands. They set the pace, and wait for results of their own
instructions most of the time, so that it is many of them."""
GATING_REGISTERS = gl.constexpr(72)
"""Registers of a thread of those."""
PARTS = gl.constexpr(8)
"""Parts of a chunk's rows, each of which has warps of its own."""
ROWS = gl.constexpr(8)
"""Rows of a part, all of which a thread has."""


@gluon.jit
def raw_places(operands, OUT: gl.constexpr, S: gl.constexpr):
    """Shared memory: for what `copy_chunks` of scan.py copies, where the first three are for q, g
    and k, and then for qg, k_decayed and kg; for the scales of q and k. Three barriers say that raw
    tiles are there, that gated ones are, and that all else is there."""
    q, g, k, v, T, Aqk, rows, decay = operands
    REMOVES: gl.constexpr = removes(S)
    REST: gl.constexpr = S.NS - 1
    half: gl.constexpr = k.dtype
    places = (
        gl.allocate_shared_memory(half, [S.NS if OUT else 1, S.BT, S.K if OUT else S.BT], q.layout),
        gl.allocate_shared_memory(half, [S.NS, S.BT, S.K], g.layout),
        gl.allocate_shared_memory(half, [S.NS, S.BT, S.K], k.layout),
        gl.allocate_shared_memory(half, [REST, S.BT, S.BV], v.layout),
        gl.allocate_shared_memory(half, [REST if REMOVES else 1, S.BT, S.BT], T.layout),
        gl.allocate_shared_memory(half, [REST if OUT else 1, S.BT, S.BT], Aqk.layout),
        gl.allocate_shared_memory(gl.float32, [REST, 1, S.BT], rows.layout),
        gl.allocate_shared_memory(gl.float32, [REST, 1, S.K], decay.layout),
    )
    scales = gl.allocate_shared_memory(gl.float32, [2 * S.NS, 1, S.BT], rows.layout)
    raw = gl.allocate_shared_memory(gl.int64, [S.NS, 1], mbarrier.MBarrierLayout())
    ready = gl.allocate_shared_memory(gl.int64, [S.NS, 1], mbarrier.MBarrierLayout())
    rest = gl.allocate_shared_memory(gl.int64, [REST, 1], mbarrier.MBarrierLayout())
    for i in gl.static_range(S.NS):
        mbarrier.init(raw.index(i), count=1)
        mbarrier.init(ready.index(i), count=1)
    for i in gl.static_range(REST):
        mbarrier.init(rest.index(i), count=1)
    return places, scales, (raw, ready, rest)


@gluon.jit
def load_parts(place, tall: gl.constexpr, parts: gl.constexpr):
    """A tile [64, N] of shared memory as [PARTS, ROWS, N] in fp32."""
    x = gl.reshape(place.load(tall), [PARTS, ROWS, place.shape[1]])
    return upcast(gl.convert_layout(x, parts))


@gluon.jit
def store_parts(x, place, tall: gl.constexpr):
    """Stores x [PARTS, ROWS, N] as a tile [64, N] of shared memory."""
    x = gl.reshape(x.to(place.dtype), [PARTS * ROWS, x.shape[2]])
    place.store(gl.convert_layout(x, tall))


@gluon.jit
def over_part(s_ends, w: gl.constexpr, ends: gl.constexpr):
    """Row w of s_ends [PARTS, K]: [1, K]."""
    x = s_ends.slice(w, 1).load(ends)
    return gl.convert_layout(gl.reshape(x, [x.shape[1]]), gl.SliceLayout(0, ends))[None, :]


@gluon.jit
def split_rows(x, ends: gl.constexpr):
    """x [PARTS, ROWS, N] as ROWS rows [PARTS, N], in their order."""
    x = gl.permute(gl.reshape(x, [PARTS, 2, 2, 2, x.shape[2]]), [0, 4, 3, 2, 1])
    parts = (x,)
    for _ in gl.static_range(3):
        halves: gl.tuple = ()
        for n in gl.static_range(len(parts)):
            halves = halves + gl.split(parts[n])
        parts = halves
    rows: gl.tuple = ()
    for n in gl.static_range(ROWS):
        rows = rows + (gl.convert_layout(parts[n], ends),)
    return rows


@gluon.jit
def join_rows(rows, layout: gl.constexpr):
    """[PARTS, ROWS, N] of what `split_rows` gives."""
    parts = rows
    for _ in gl.static_range(3):
        wholes: gl.tuple = ()
        for n in gl.static_range(len(parts) // 2):
            wholes = wholes + (gl.join(parts[2 * n], parts[2 * n + 1]),)
        parts = wholes
    x = gl.permute(parts[0], [0, 4, 3, 2, 1])
    return gl.convert_layout(gl.reshape(x, [PARTS, ROWS, x.shape[4]]), layout)


@gluon.jit
def product_of(rows):
    """Of all rows."""
    for _ in gl.static_range(3):
        pairs: gl.tuple = ()
        for n in gl.static_range(len(rows) // 2):
            pairs = pairs + (rows[2 * n] * rows[2 * n + 1],)
        rows = pairs
    return rows[0]


@gluon.jit
def decay_of_token(g, bias, rate, bound, GATE: gl.constexpr):
    """2^`log_decay` of g + bias. A bounded gate is 2^(-1 / (a + a u)) with a = -1 / (bound log2 e)
    and u = exp(-rate (g + bias)), so that a sum and a product are one instruction twice."""
    if GATE == "sigmoid":
        a, n = -1.0 / (bound * LOG2E), rate * -LOG2E
        root = gl.rsqrt(gl.exp2(g * n + bias * n) * a + a)
        return gl.exp2(root * root * -1.0)
    else:
        return gl.exp2(log_decay(g + bias, rate, bound, GATE))


@gluon.jit
def decays(x, s_ends, w, layout: gl.constexpr):
    """From the decays of single tokens x [PARTS, ROWS, K]: those from the chunk's start to each
    token, with its own, and from each token, without its own, to the chunk's end. s_ends [PARTS,
    K]: where warps exchange the decays of whole parts w [PARTS, 1]."""
    ends: gl.constexpr = gl.SliceLayout(1, layout)
    rows = split_rows(x, ends)
    s_ends.store(product_of(rows))
    barrier()
    before = rows[0] * 0.0 + 1.0
    after = before
    for n in gl.static_range(PARTS - 1):
        before = before * gl.where(w > n, over_part(s_ends, n, ends), 1.0)
        late = over_part(s_ends, PARTS - 1 - n, ends)
        after = after * gl.where(w < PARTS - 1 - n, late, 1.0)
    up_to: gl.tuple = ()
    to_end: gl.tuple = ()
    for n in gl.static_range(ROWS):
        before = before * rows[n]
        up_to = up_to + (before,)
        to_end = (after,) + to_end
        after = after * rows[ROWS - 1 - n]
    return join_rows(up_to, layout), join_rows(to_end, layout)


@gluon.jit
def scale_of(s_scale, inside, layout: gl.constexpr):
    """The factors of rows [PARTS, ROWS, 1], zero where they are not inside of the sequence."""
    plain: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [1, 0])
    x = s_scale._reinterpret(gl.float32, [PARTS, ROWS], plain).load(gl.SliceLayout(2, layout))
    return gl.where(inside, x, 0.0)[:, :, None]


@gluon.jit
def gate_chunks(
    places,
    s_scales,
    s_ends,
    barriers,
    gate,
    at,
    OUT: gl.constexpr,
    REVERSE: gl.constexpr,
    S: gl.constexpr,
    GATE: gl.constexpr,
):
    """What the gating warps do: qg, k_decayed and kg in the places of q, g and k. s_ends
    [PARTS, K]: see `decays`."""
    s_q, s_g, s_k, _, _, _, _, _ = places
    raw, ready, _ = barriers
    W: gl.constexpr = GATING_WARPS // PARTS
    tall: gl.constexpr = gl.BlockedLayout([ROWS, 2], [1, 32], [PARTS, W], [1, 0])
    parts: gl.constexpr = gl.BlockedLayout([1, ROWS, 2], [1, 1, 32], [PARTS, 1, W], [2, 1, 0])
    ends: gl.constexpr = gl.SliceLayout(1, parts)
    w = gl.arange(0, PARTS, gl.SliceLayout(1, ends))[:, None]
    k = gl.arange(0, S.K, gl.SliceLayout(0, ends))
    r = gl.arange(0, ROWS, gl.SliceLayout(0, gl.SliceLayout(2, parts)))[None, :]
    first = gl.arange(0, PARTS, gl.SliceLayout(1, gl.SliceLayout(2, parts)))[:, None] * ROWS
    none = at.i_h // S.HV  # 0 in a form that the compiler cannot tell to be 0
    rate = 1.0
    bias = gl.full([S.K], 0.0, gl.float32, gl.SliceLayout(0, ends))
    if gate.dt_bias is not None:
        bias = gl.load(gate.dt_bias + at.i_h * S.K + k).to(gl.float32)
    bias = bias[None, :][:, None, :]
    if gate.A_log is not None:
        rate = gl.exp(gl.load(gate.A_log + at.i_h).to(gl.float32))
    for c in range(at.n):
        s = c % S.NS
        n_rows = at.stop - at.start - c * S.BT
        if REVERSE:
            n_rows = at.stop - at.start - (at.n - 1 - c) * S.BT
        mbarrier.wait(raw.index(s), (c // S.NS) & 1)
        x = load_parts(s_g.index(s), tall, parts)
        x = decay_of_token(x, bias, rate, gate.bound, GATE)
        inside = r < n_rows - first  # compared anew where it is used, so that no register holds it
        x = gl.where(inside[:, :, None], x, 1.0)
        e, f = decays(x, s_ends, w, parts)
        b_k = load_parts(s_k.index(s), tall, parts)
        inside = r < n_rows + none - first
        b_k *= scale_of(s_scales.index(2 * s + 1), inside, parts)
        if S.REMOVAL != "none":
            store_parts(b_k * e, s_g.index(s), tall)
        store_parts(b_k * f, s_k.index(s), tall)
        if OUT:
            b_q = load_parts(s_q.index(s), tall, parts)
            inside = r < n_rows + 2 * none - first
            b_q *= scale_of(s_scales.index(2 * s), inside, parts)
            store_parts(b_q * e, s_q.index(s), tall)
        fence_async_shared()
        barrier()
        mbarrier.arrive(ready.index(s), count=1)


@gluon.jit
def ends_place(S: gl.constexpr):
    """Shared memory for `s_ends` of `decays`."""
    plain: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [1, 0])
    return gl.allocate_shared_memory(gl.float32, [PARTS, S.K], plain)


@gluon.jit(do_not_specialize=["states"])
def scan_gated_sm90_kernel(
    qg,
    k_decayed,
    kg,
    v,
    T,
    Aqk,
    rows,
    decay,
    o,
    h,
    v_new,
    S0,
    S_end,
    more,
    gate,
    states,
    S: gl.constexpr,
    GATE: gl.constexpr,
):
    """`scan_sm90_kernel` where no o and no transition is wanted. qg, k_decayed and kg describe q, g
    and k; gate: `Gate`, of the kind GATE."""
    i_v, i_n = gl.program_id(0) % (S.V // S.BV), gl.program_id(0) // (S.V // S.BV)
    value = gl.program_id(0) >= 0  # always: the columns are those of a state, not of a transition
    at, i_s = at_segment(more.segments, i_n, gl.program_id(1), i_v, S)
    entry = -1
    if S0.ptr is not None:
        entry = gl.load(more.segments.state + i_s).to(gl.int32)
    operands = (qg, k_decayed, kg, v, T, Aqk, rows, decay)
    places, scales, barriers = raw_places(operands, False, S)
    _, ready, rest = barriers
    s_ends = ends_place(S)
    results = ((o, h, v_new), places_of_results(o, h, v_new, ready, S), (ready, ready))
    copies = (operands, places, scales, barriers, more.heads, at)
    # fmt: off
    gl.warp_specialize([
        (scan_chunks, (
            places, (ready, None, rest), results, S0, S_end, more, at, entry, value, states, copies,
            S,
        )),
        (gate_chunks, (places, scales, s_ends, barriers, gate, at, False, False, S, GATE)),
    ], [GATING_WARPS], [GATING_REGISTERS])
    # fmt: on


@gluon.jit
def scan_bwd_gated_sm90_kernel(
    qg,
    k_decayed,
    kg,
    do,
    T,
    Aqk,
    rows,
    decay,
    y,
    dh,
    dv,
    dS_end,
    dS0,
    more,
    gate,
    S: gl.constexpr,
    GATE: gl.constexpr,
):
    """`scan_bwd_sm90_kernel`; qg, k_decayed and kg describe q, g and k; gate: `Gate`, of the
    kind GATE."""
    i_v, i_n = gl.program_id(0) % (S.V // S.BV), gl.program_id(0) // (S.V // S.BV)
    at, i_s = at_segment(more.segments, i_n, gl.program_id(1), i_v, S)
    leaving = -1
    if dS_end.ptr is not None:
        leaving = gl.load(more.segments.state + i_s).to(gl.int32)
    operands = (qg, k_decayed, kg, do, T, Aqk, rows, decay)
    places, scales, barriers = raw_places(operands, True, S)
    _, ready, rest = barriers
    s_ends = ends_place(S)
    results = ((dv, dh, y), places_of_results(dv, dh, y, ready, S), (ready, ready))
    copies = (operands, places, scales, barriers, more.heads, at)
    # fmt: off
    gl.warp_specialize([
        (scan_chunks_back, (
            places, (ready, None, rest), results, dS_end, dS0, more, at, leaving, copies, S,
        )),
        (gate_chunks, (places, scales, s_ends, barriers, gate, at, True, True, S, GATE)),
    ], [GATING_WARPS], [GATING_REGISTERS])
    # fmt: on


def why_not(rule: DeltaRule, x: Inputs) -> str:
    """Why the scans cannot gate q, g and k of such inputs, wherever these are in memory; "" if they
    can."""
    if x.q.shape[2] != 128 or x.v.shape[2] != 128:
        return "K and V must be 128"
    if rule.per_head or rule.removal == "p":
        return "the rule has one decay a head, or removes along p"
    if terms(rule, x.v.dtype) > 1:
        return "T and Aqk in two terms leave too little shared memory"
    if not rule.use_exp2:
        return "they compute in powers of two"
    if not all(t.dtype == x.v.dtype for t in (x.q, x.g, x.k)):
        return "q, k, g and v must have the same dtype"
    return ""


def tile_of(stage: str) -> Tile:
    """The tile of a scan that gates its operands. The reverse one has no place for more stages."""
    return IN_SCANS._replace(stages=3 if stage.startswith("scan_bwd") else 4)


def scan_arguments(
    c: Chunks, t: Tile, segments: Segments, out: ScanOutputs
) -> tuple[Any, dict[str, Any]]:
    """The kernel, and the arguments that the kernels of other folders do not have."""
    assert out.o is None and out.transition is None
    arguments = described(c, t.BV, v=c.v, o=None, h=out.h, v_new=out.v_new)
    arguments["more"] = ScanMore(head_strides(c, c.v), None, None, segments)
    return scan_gated_sm90_kernel, arguments | gating(c)


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
    return scan_bwd_gated_sm90_kernel, arguments | gating(c)


def gating(c: Chunks) -> dict[str, Any]:
    """How raw g becomes log decays."""
    assert c.gating is not None
    gate = c.gating.gate._replace(g=None, row=0, head=0)
    return {"gate": gate, "GATE": c.rule.gate}
