"""The scan for the tensor cores of sm_90, in Gluon.

triton/scan.py explains what is computed; the results are equal up to rounding. eligible.py decides
which calls are supported.

The state is held transposed, [BV, K]. It and everything that the serial chain forms from it are
then left operands of products, which may stay in registers. Right operands are in shared memory: a
warp of its own copies them there, NS chunks ahead. Products are asynchronous, so that those that
are not on the chain run at the same time as it.
"""

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
    store_results,
    wait_until_drained,
)
from fla_cp.kernels.sm90.tma import barrier, describe
from fla_cp.kernels.triton.device.bundles import Segments
from fla_cp.kernels.triton.device.planes import CHANNELWISE_PLANES, HEADWISE_PLANES, Q_FACTOR
from fla_cp.kernels.triton.operands import Chunks, ScanOutputs
from fla_cp.kernels.triton.tile_table import Tile
from fla_cp.rule import CHUNK


class ScanMore(NamedTuple):
    """What the scan takes besides TMA descriptors, which Triton accepts only as single arguments.
    heads: the strides of heads of qg, k_decayed, kg and v. o_rows: o as a pointer."""

    heads: tuple[int, int, int, int]
    o_rows: Any
    transition: Any
    segments: Segments


class At(NamedTuple):
    """Where a program works.

    start, stop: the first token of its segment and the one after the last. first, n: the segment's
    first chunk, and how many it has. i_n: the segment's place among those that run. i_h, i_v: the
    head and the value tile.
    """

    start: Any
    stop: Any
    first: Any
    n: Any
    i_n: Any
    i_h: Any
    i_v: Any


def head_strides(c: Chunks, v: Tensor) -> tuple[int, int, int, int]:
    """`ScanMore.heads`."""
    gated = (x.stride(1) if c.of_heads else 0 for x in (c.qg, c.k_decayed, c.kg))
    return (*gated, v.stride(1))  # type: ignore[return-value]


def scan_arguments(
    c: Chunks, t: Tile, segments: Segments, out: ScanOutputs
) -> tuple[Any, dict[str, Any]]:
    """The kernel, and the arguments that the kernels of other folders do not have."""
    arguments = described(c, t.BV, v=c.v, o=out.o, h=out.h, v_new=out.v_new)
    arguments["more"] = ScanMore(head_strides(c, c.v), out.o, out.transition, segments)
    return scan_sm90_kernel, arguments


def described(c: Chunks, BV: int, **others: Tensor | None) -> dict[str, Any]:
    """TMA descriptors by name: of the chunks, and of `others`, which are tensors [T, HV, V] or
    blocks of chunks [NC, HV, rows, V]."""
    K = c.decay.shape[2]
    square = describe(c.Aqk, c.terms * CHUNK, CHUNK)
    found: dict[str, Any] = {
        "Aqk": square,
        "T": describe(c.T, c.terms * CHUNK, CHUNK) if c.T.numel() else square,
        "rows": describe(c.rows, 1, CHUNK),
        "decay": describe(c.decay.unsqueeze(1), 1, K),
    }
    for name, x in (("qg", c.qg), ("k_decayed", c.k_decayed), ("kg", c.kg)):
        found[name] = describe(x, CHUNK, K) if x.numel() else square
    for name, other in others.items():
        if other is not None:
            other = describe(other, CHUNK if other.dim() == 3 else other.shape[2], BV)
        found[name] = other
    return found


@gluon.constexpr_function
def removes(S):
    """Whether the rule removes something from the state before it writes."""
    return S.REMOVAL != "none"


@gluon.constexpr_function
def reads_own(S):
    """Whether the rows that read the state are another tensor than kg."""
    return S.REMOVAL != "none" and (not S.HEAD or S.REMOVAL == "p")


@gluon.constexpr_function
def bytes_of(S, OUT, OWN, REMOVES):
    """How many bytes are copied for a chunk."""
    squares = (REMOVES + OUT) * S.TERMS * S.BT
    rows = 4 if S.HEAD else 1
    return 2 * S.BT * ((1 + OWN + OUT) * S.K + S.BV + squares) + 4 * (rows * S.BT + S.K)


@gluon.jit
def term(square, n: gl.constexpr, TERMS: gl.constexpr, BT: gl.constexpr):
    """Term n [BT, BT] of the TERMS terms of T or Aqk, in shared memory."""
    if TERMS == 1:
        return square
    else:
        return square.slice(n * BT, BT, 0)


@gluon.jit
def rounded_off(x, half: gl.constexpr):
    """What rounding x to `half` loses: the second of its two terms."""
    return (x - x.to(half).to(gl.float32)).to(half)


@gluon.jit
def copy_chunks(
    operands,
    places,
    barriers,
    results,
    heads,
    at,
    OUT: gl.constexpr,
    REVERSE: gl.constexpr,
    S: gl.constexpr,
):
    """What one warp does. It copies the operands of each chunk to shared memory as soon as their
    places are free, and the results from there as soon as they are written."""
    for c in range(at.n + S.NS):
        if c < at.n:
            copy_chunk(c, operands, places, barriers, heads, at, OUT, REVERSE, S)
        if has_results(results):  # noqa: SIM102  # known when compiled
            if c >= S.NS:
                written, drained = results[2]
                mbarrier.wait(written.index(0), (c - S.NS) & 1)
                store_results(c - S.NS, results, at, REVERSE, S)
                tma.store_wait(0)
                mbarrier.arrive(drained.index(0), count=1)


@gluon.jit
def copy_chunk(
    c,
    operands,
    places,
    barriers,
    heads,
    at,
    OUT: gl.constexpr,
    REVERSE: gl.constexpr,
    S: gl.constexpr,
):
    """Copies the operands of a chunk to shared memory once their places are free."""
    qg, k_decayed, kg, v, T, Aqk, rows, decay = operands
    s_qg, s_k_decayed, s_kg, s_v, s_T, s_A, s_rows, s_decay = places
    ready, free = barriers
    q_h, r_h, k_h, v_h = heads
    OWN: gl.constexpr = reads_own(S)
    REMOVES: gl.constexpr = removes(S)
    PLANES: gl.constexpr = HEADWISE_PLANES if S.HEAD else CHANNELWISE_PLANES
    FACTORS: gl.constexpr = 4 if S.HEAD else 1
    s = c % S.NS
    i_c = c
    if REVERSE:
        i_c = at.n - 1 - c
    t = at.start + i_c * S.BT
    i_ch = (at.first + i_c) * S.HV + at.i_h
    bar = ready.index(s)
    mbarrier.wait(free.index(s), (c // S.NS + 1) & 1)
    mbarrier.expect(bar, bytes_of(S, OUT, OWN, REMOVES))
    if S.HEAD:
        at_q, at_r = [t, (at.i_h // S.G) * q_h], [t, (at.i_h // S.G) * r_h]
        at_k = [t, (at.i_h // S.G) * k_h]
    else:
        at_q, at_r, at_k = [i_ch * S.BT, 0], [i_ch * S.BT, 0], [i_ch * S.BT, 0]
    tma.async_copy_global_to_shared(decay, [i_ch, 0], bar, s_decay.index(s))
    if OWN:
        tma.async_copy_global_to_shared(k_decayed, at_r, bar, s_k_decayed.index(s))
    tma.async_copy_global_to_shared(kg, at_k, bar, s_kg.index(s))
    tma.async_copy_global_to_shared(v, [t, at.i_h * v_h + at.i_v * S.BV], bar, s_v.index(s))
    to = s_rows.index(s * FACTORS)
    tma.async_copy_global_to_shared(rows, [i_ch * PLANES, 0], bar, to)
    if S.HEAD:
        for f in gl.static_range(3):  # of q, of r, of k
            to = s_rows.index(s * FACTORS + 1 + f)
            tma.async_copy_global_to_shared(rows, [i_ch * PLANES + Q_FACTOR + f, 0], bar, to)
    if REMOVES:
        tma.async_copy_global_to_shared(T, [i_ch * (S.TERMS * S.BT), 0], bar, s_T.index(s))
    if OUT:
        tma.async_copy_global_to_shared(qg, at_q, bar, s_qg.index(s))
        tma.async_copy_global_to_shared(Aqk, [i_ch * (S.TERMS * S.BT), 0], bar, s_A.index(s))


@gluon.jit
def places_of(operands, OUT: gl.constexpr, S: gl.constexpr):
    """Shared memory for the operands of NS chunks, and two barriers for each of the NS places: one
    says that it is filled, the other that it is free."""
    qg, k_decayed, kg, v, T, Aqk, rows, decay = operands
    OWN: gl.constexpr = reads_own(S)
    REMOVES: gl.constexpr = removes(S)
    half: gl.constexpr = kg.dtype
    FACTORS: gl.constexpr = 4 if S.HEAD else 1
    places = (
        gl.allocate_shared_memory(
            half, [S.NS if OUT else 1, S.BT, S.K if OUT else S.BT], qg.layout
        ),
        gl.allocate_shared_memory(
            half, [S.NS if OWN else 1, S.BT, S.K if OWN else S.BT], k_decayed.layout
        ),
        gl.allocate_shared_memory(half, [S.NS, S.BT, S.K], kg.layout),
        gl.allocate_shared_memory(half, [S.NS, S.BT, S.BV], v.layout),
        gl.allocate_shared_memory(half, [S.NS if REMOVES else 1, S.TERMS * S.BT, S.BT], T.layout),
        gl.allocate_shared_memory(half, [S.NS if OUT else 1, S.TERMS * S.BT, S.BT], Aqk.layout),
        gl.allocate_shared_memory(gl.float32, [S.NS * FACTORS, 1, S.BT], rows.layout),
        gl.allocate_shared_memory(gl.float32, [S.NS, 1, S.K], decay.layout),
    )
    ready = gl.allocate_shared_memory(gl.int64, [S.NS, 1], mbarrier.MBarrierLayout())
    free = gl.allocate_shared_memory(gl.int64, [S.NS, 1], mbarrier.MBarrierLayout())
    for i in gl.static_range(S.NS):
        mbarrier.init(ready.index(i), count=1)
        mbarrier.init(free.index(i), count=1)
    return places, ready, free


@gluon.jit
def store_rest(c, s_o, more, at, flat: gl.constexpr, S: gl.constexpr):
    """Stores the outputs of a segment's last chunk if it has fewer than BT tokens: rows of another
    sequence may follow, so that the copy of a whole tile would overwrite them."""
    t = at.start + c * S.BT
    if t + S.BT > at.stop:
        i = t + gl.arange(0, S.BT, gl.SliceLayout(1, flat))
        v = at.i_v * S.BV + gl.arange(0, S.BV, gl.SliceLayout(0, flat))
        to = more.o_rows + (i.to(gl.int64) * S.HV + at.i_h)[:, None] * S.V + v[None, :]
        gl.store(to, s_o.load(flat), mask=(i < at.stop)[:, None])
        barrier()  # in a reverse scan other chunks follow


@gluon.jit
def scan_chunks(
    places, barriers, results, S0, S_end, more, at, entry, value, states, copies, S: gl.constexpr
):
    """What the computing warps do. entry: the segment's row in S0, or -1. value: whether the
    program computes states, not a transition. states: how many programs do.

    barriers: `ready` and `free` of `places_of`. If v, T, Aqk, beta and the decays have places of
    their own, as in scan_gated.py, a third one says that those are filled; otherwise it is None.
    copies: None if another warp copies operands, otherwise what `copy_first` takes.

    Each product of the chain waits for the one before it, so only what it needs is formed between
    them. All else is formed while a product runs. Its result is given to the wait behind that
    product, since otherwise the compiler would form it later. The state's registers are not touched
    between the first product of a chunk and the wait for it, because ptxas would then wait for all
    products."""
    ready, free, rest = barriers
    s_qg, s_k_decayed, s_kg, s_v, s_T, s_A, s_rows, s_decay = places
    OWN: gl.constexpr = reads_own(S)
    REMOVES: gl.constexpr = removes(S)
    o, h, v_new = results[0]
    s_o, s_h, s_n = results[1]
    OUT: gl.constexpr = o is not None
    FACTORS: gl.constexpr = 4 if S.HEAD else 1
    REST: gl.constexpr = s_v.shape[0]
    half: gl.constexpr = s_kg.dtype
    W: gl.constexpr = S.BV // 16
    acc: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [W, 1], [16, S.BT, 16])
    state: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [W, 1], [16, S.K, 16])
    left: gl.constexpr = gl.DotOperandLayout(0, acc, 2)
    left_of_state: gl.constexpr = gl.DotOperandLayout(0, state, 2)
    flat: gl.constexpr = gl.BlockedLayout([1, 8], [4, 8], [W, 1], [1, 0])

    o_v = (at.i_v * S.BV + gl.arange(0, S.BV, gl.SliceLayout(1, state)))[:, None]
    o_k = gl.arange(0, S.K, gl.SliceLayout(0, state))[None, :]
    b_S = gl.full([S.BV, S.K], 0.0, gl.float32, state)
    if more.transition is not None:
        b_S = gl.where((o_v == o_k) & (not value), 1.0, 0.0)
    if S0.ptr is not None:  # noqa: SIM102  # known when compiled
        if value & (entry >= 0):
            p = S0.ptr + entry.to(gl.int64) * S0.n + at.i_h.to(gl.int64) * S0.h
            b_S += gl.load(p + o_v * S0.v + o_k * S0.k)
    zero = gl.full([S.BV, S.BT], 0.0, gl.float32, acc)
    # Whether o is stored while the next chunk's first product runs.
    LATER: gl.constexpr = OUT and (h is None) and (v_new is None)
    b_late = zero.to(half)
    if copies is not None:
        copy_first(copies, False, False, S)
    for c in range(at.n):
        s, r = c % S.NS, c % REST
        t = at.start + c * S.BT
        b_Sb = b_S.to(half)
        a_S = gl.convert_layout(b_Sb, left)
        mbarrier.wait(ready.index(s), (c // S.NS) & 1)
        if rest is not None:
            mbarrier.wait(rest.index(r), (c // REST) & 1)
        s_r = s_kg.index(s)
        if OWN:
            s_r = s_k_decayed.index(s)
        if REMOVES:
            b_r = warpgroup_mma(a_S, s_r.permute((1, 0)), zero, use_acc=False, is_async=True)
        else:
            b_S = b_S * s_decay.index(r).load(state)
        if OUT and not REMOVES:
            s_q = s_qg.index(s).permute((1, 0))
            b_o = warpgroup_mma(a_S, s_q, zero, use_acc=False, is_async=True)
        # What does not need this product is done while it runs.
        if LATER:  # noqa: SIM102  # known when compiled
            if c > 0:
                wait_until_drained(c - 1, results, copies)
                s_o.permute((1, 0)).store(b_late)
                hand_over(c - 1, results, copies, at, False, S)
        b_v = s_v.index(r).permute((1, 0)).load(acc).to(gl.float32)
        if more.transition is not None:
            b_v = gl.where(value, b_v, 0.0)
        if REMOVES:
            b_beta = s_rows.index(r * FACTORS).load(acc)
            b_v = b_v * b_beta
            if S.HEAD:
                b_beta = b_beta * s_rows.index(r * FACTORS + 2).load(acc)
            b_beta = -b_beta
            b_r, a_S, b_v, b_beta = warpgroup_mma_wait(0, deps=(b_r, a_S, b_v, b_beta))
            a_r = gl.convert_layout((b_v + b_r * b_beta).to(half), left)
            s_t = term(s_T.index(r), 0, S.TERMS, S.BT).permute((1, 0))
            b_n = warpgroup_mma(a_r, s_t, zero, use_acc=False, is_async=True)
            if S.TERMS > 1:
                s_t = term(s_T.index(r), 1, S.TERMS, S.BT).permute((1, 0))
                b_n = warpgroup_mma(a_r, s_t, b_n, is_async=True)
            if OUT:
                s_q = s_qg.index(s).permute((1, 0))
                b_o = warpgroup_mma(a_S, s_q, zero, use_acc=False, is_async=True)
            b_S = b_S * s_decay.index(r).load(state)
            if OUT:
                b_n, a_r, b_S = warpgroup_mma_wait(1, deps=(b_n, a_r, b_S))
            else:
                b_n, a_r, b_S = warpgroup_mma_wait(0, deps=(b_n, a_r, b_S))
            if S.TERMS > 1 and OUT:
                a_low = gl.convert_layout(rounded_off(b_n, half), left)
        else:
            m = gl.arange(0, S.BT, gl.SliceLayout(0, acc)) < at.stop - t
            b_n = gl.where(m[None, :], b_v, 0.0)
        b_w = b_n
        b_n = b_n.to(half)
        if S.HEAD:
            b_w = b_w * s_rows.index(r * FACTORS + 3).load(acc)
        a_w = gl.convert_layout(b_w.to(half), left_of_state)
        b_S = warpgroup_mma(a_w, s_kg.index(s), b_S, is_async=True)
        if OUT:
            b_o, a_S = warpgroup_mma_wait(1, deps=(b_o, a_S))
            if S.HEAD:
                b_o = b_o * s_rows.index(r * FACTORS + 1).load(acc)
            a_n = gl.convert_layout(b_n, left)
            s_a = term(s_A.index(r), 0, S.TERMS, S.BT).permute((1, 0))
            b_o = warpgroup_mma(a_n, s_a, b_o, is_async=True)
            if S.TERMS > 1:
                if REMOVES:
                    b_o = warpgroup_mma(a_low, s_a, b_o, is_async=True)
                s_a = term(s_A.index(r), 1, S.TERMS, S.BT).permute((1, 0))
                b_o = warpgroup_mma(a_n, s_a, b_o, is_async=True)
        if (h is not None) or (v_new is not None):
            wait_until_drained(c, results, copies)
        if h is not None:
            s_h.permute((1, 0)).store(b_Sb)
        if v_new is not None:
            s_n.permute((1, 0)).store(b_n)
        if OUT and REMOVES and S.TERMS > 1:
            deps = (b_S, b_o, a_w, a_n, a_low)
            b_S, b_o, a_w, a_n, a_low = warpgroup_mma_wait(0, deps=deps)
        elif OUT:
            b_S, b_o, a_w, a_n = warpgroup_mma_wait(0, deps=(b_S, b_o, a_w, a_n))
        else:
            b_S, a_w = warpgroup_mma_wait(0, deps=(b_S, a_w))
        if copies is None:
            mbarrier.arrive(free.index(s), count=1)
        else:
            barrier()
            copy_next(c, copies, False, False, S)
        if LATER:
            b_late = b_o.to(half)
        else:
            if OUT:
                s_o.permute((1, 0)).store(b_o.to(half))
            if has_results(results):
                hand_over(c, results, copies, at, False, S)
            if OUT:
                store_rest(c, s_o, more, at, flat, S)
    if LATER:  # noqa: SIM102  # known when compiled
        if at.n > 0:
            wait_until_drained(at.n - 1, results, copies)
            s_o.permute((1, 0)).store(b_late)
            hand_over(at.n - 1, results, copies, at, False, S)
            store_rest(at.n - 1, s_o, more, at, flat, S)
    if copies is not None:
        tma.store_wait(0)
    if value:
        if S_end.ptr is not None:
            to = S_end.ptr + (at.i_n.to(gl.int64) * S.HV + at.i_h) * S.K * S.V
            gl.store(to + o_v * S_end.v + o_k * S_end.k, b_S)
    elif more.transition is not None:
        to = more.transition + ((at.i_n - states).to(gl.int64) * S.HV + at.i_h) * S.K * S.K
        gl.store(to + o_k * S.K + o_v, b_S)


@gluon.jit
def at_segment(segments, i_n, i_h, i_v, S: gl.constexpr):
    """`At` of a program, and the number of its segment."""
    i_s = gl.load(segments.order + i_n).to(gl.int32)
    start, stop = gl.load(segments.start + i_s), gl.load(segments.stop + i_s)
    n = (stop - start + S.BT - 1) // S.BT
    return At(start, stop, gl.load(segments.chunk + i_s), n, i_n, i_h, i_v), i_s


@gluon.jit(do_not_specialize=["states"])
def scan_sm90_kernel(
    qg, k_decayed, kg, v, T, Aqk, rows, decay, o, h, v_new, S0, S_end, more, states, S: gl.constexpr
):
    """`scan_kernel` with what `described` gives; more: `ScanMore`. h and v_new are dense."""
    tiles: gl.constexpr = S.V // S.BV
    i_v, i_n = gl.program_id(0) % tiles, gl.program_id(0) // tiles
    value = gl.program_id(0) >= 0
    if more.transition is not None:
        value = gl.program_id(0) < tiles * states
        columns: gl.constexpr = S.K // S.BV
        if not value:
            i_n = (gl.program_id(0) - tiles * states) // columns
            i_v = (gl.program_id(0) - tiles * states) % columns
            i_n += states
    at, i_s = at_segment(more.segments, i_n, gl.program_id(1), i_v, S)
    entry = -1
    if S0.ptr is not None:
        entry = gl.load(more.segments.state + i_s).to(gl.int32)
    operands = (qg, k_decayed, kg, v, T, Aqk, rows, decay)
    OUT: gl.constexpr = o is not None
    places, ready, free = places_of(operands, OUT, S)
    flags = (ready, ready)  # in place of nothing
    if OUT or (h is not None) or (v_new is not None):
        flags = flags_of_results()
    results = ((o, h, v_new), places_of_results(o, h, v_new, ready, S), flags)
    # fmt: off
    gl.warp_specialize([
        (scan_chunks, (
            places, (ready, free, None), results, S0, S_end, more, at, entry, value, states, None,
            S,
        )),
        (copy_chunks, (operands, places, (ready, free), results, more.heads, at, OUT, False, S)),
    ], [1], [40])
    # fmt: on
