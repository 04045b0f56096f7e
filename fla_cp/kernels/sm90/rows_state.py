"""The recurrence of a decoding step of up to 64 sequences, with the gated norm behind it.

It takes the time in which states are read. Each SM has a few programs, which stay until all heads
are done: a program has every P-th head of all sequences. One warp copies tiles of states to shared
memory, ahead of their use, and the first ones before the kernel ahead has ended
(triton/early.py), so that memory is busy while the convolution runs.

The output does not wait for the new state: q (S + k u^T) = q S + (q k) u^T. A state is not written
in each step, either (rows_deferred.py). With a decay of a since S was written, and updates
k_j u_j^T since then, q reads (a q) S + the sum of (q k_j) u_j. So all that a state is multiplied
by is two vectors, and what the updates add to the results takes no tile of a state.

Everything but these products is done for several heads at once, one in each warp: their norms,
decays and updates, and the gated norm.
"""

from typing import NamedTuple

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared, mbarrier, tma

from fla_cp.kernels.sm90.rows_deferred import load_updates, rows_of, turn_of, updates_layout
from fla_cp.kernels.sm90.rows_product import allow_next, over, wait_for_last
from fla_cp.kernels.sm90.step_layouts import VECTOR, columns_of_warps
from fla_cp.kernels.sm90.step_mix import add_three, add_two, decay_of
from fla_cp.kernels.sm90.step_words import sigmoid
from fla_cp.kernels.sm90.tma import barrier
from fla_cp.kernels.triton.device.blocks import EPS
from fla_cp.kernels.triton.device.bundles import constants


@constants
class StateShape(NamedTuple):
    """What the kernel is compiled for.

    B: sequences. H heads of q and k, HV of v, with channels K and V. BK, BV: a tile of a state, all
    of K and some columns. P: programs. ROUND: steps in which a head writes its state once, a power
    of two. SLOTS: places for tiles in shared memory. PACE: how many tiles may be on their way,
    beside the newest, while the first ones are copied. WARPS: warps of a program, beside the one
    that copies. KIND: the function of the decay, as `DeltaRule.gate`. HEAD: one decay a head.
    REMOVES: k reads from the state what is removed. SIGMOID: beta is given before its sigmoid.
    SILU: the activation of the gate is SiLU, otherwise sigmoid. EARLY: see triton/early.py.
    """

    B: int
    H: int
    HV: int
    K: int
    V: int
    BK: int
    BV: int
    P: int
    ROUND: int
    SLOTS: int
    PACE: int
    WARPS: int
    KIND: str
    HEAD: bool
    REMOVES: bool
    SIGMOID: bool
    SILU: bool
    EARLY: bool


class Heads(NamedTuple):
    """What heads, one of each warp, read besides their states: q and k [WARPS, BK], raw; g and
    shift, whose sum is the raw decay, [WARPS, BK] or [WARPS], and its rate [WARPS]; v and gate
    [WARPS, V]; beta [WARPS], or rate if there is none."""

    q: gl.tensor
    k: gl.tensor
    g: gl.tensor
    shift: gl.tensor
    rate: gl.tensor
    v: gl.tensor
    gate: gl.tensor
    beta: gl.tensor


@gluon.jit
def copy_states(states, places, ready, free, i_p, n, S: gl.constexpr):
    """Copies the states of n heads, tile by tile, to places that take turns."""
    TILES: gl.constexpr = over(S.V, S.BV)
    for step in range(n * TILES):
        slot, lap = step % S.SLOTS, step // S.SLOTS
        if lap > 0:
            mbarrier.wait(free.index(slot), (lap - 1) & 1)
        elif step > S.PACE:
            mbarrier.wait(ready.index((step - 1 - S.PACE) % S.SLOTS), 0)
        bar = ready.index(slot)
        mbarrier.expect(bar, states.block_type.nbytes)
        at = [(i_p + step // TILES * S.P) * S.K, step % TILES * S.BV]
        tma.async_copy_global_to_shared(states, at, bar, places.index(slot))


@gluon.constexpr_function
def heads_layout(columns, S):
    """A row [columns] of a head in each warp."""
    return gl.BlockedLayout([1, max(1, columns // 32)], [1, 32], [S.WARPS, 1], [1, 0])


@gluon.jit
def heads_of(first, n, i_p, L: gl.constexpr, S: gl.constexpr):
    """The heads of a program from its number `first` on, one for each warp, counted through all
    sequences. Numbers beyond the last head give the last head."""
    return i_p + gl.minimum(first + gl.arange(0, S.WARPS, L), n - 1) * S.P


@gluon.jit
def exist(first, n, L: gl.constexpr, S: gl.constexpr):
    """Which of these heads exist."""
    return first + gl.arange(0, S.WARPS, L) < n


@gluon.jit
def load_heads(x, decay, gate, beta, head_k, head_v, S: gl.constexpr):
    """What is read of heads, which are given in the layouts of rows of K and of V."""
    o_k = gl.arange(0, S.BK, gl.SliceLayout(0, heads_layout(S.BK, S)))[None, :]
    o_v = gl.arange(0, S.V, gl.SliceLayout(0, heads_layout(S.V, S)))[None, :]
    m_k = o_k < S.K
    i_n, i_h = head_k // S.HV, head_k % S.HV
    p_q = x.ptr + (i_n * x.row + i_h // (S.HV // S.H) * S.K)[:, None] + o_k
    q = gl.load(p_q, mask=m_k, other=0.0)
    k = gl.load(p_q + S.H * S.K, mask=m_k, other=0.0)
    p_g, p_shift = decay.g + i_n * decay.row, decay.dt_bias + 0 * i_n
    if S.HEAD:
        g, shift = gl.load(p_g + i_h), gl.load(p_shift + i_h)
    else:
        at = i_h[:, None] * S.K + o_k
        g = gl.load(p_g[:, None] + at, mask=m_k, other=0.0)
        shift = gl.load(p_shift[:, None] + at, mask=m_k, other=0.0)
    rate = gl.load(decay.A_log + i_h)
    b = rate
    if beta.ptr is not None:
        b = gl.load(beta.ptr + i_n * beta.row + i_h)
    i_n, i_h = head_v // S.HV, head_v % S.HV
    v = gl.load(x.ptr + (i_n * x.row + 2 * S.H * S.K + i_h * S.V)[:, None] + o_v)
    a = gl.load(gate.ptr + (i_n * gate.row + i_h * S.V)[:, None] + o_v)
    return Heads(q, k, g, shift, rate, v, a, b)


@gluon.jit
def normalised(now, decay, beta, scale, S: gl.constexpr):
    """q and k of heads [WARPS, BK], normalised and with q times the scale; their products [WARPS];
    decays [WARPS, BK] and factors beta [WARPS]."""
    q, k = now.q.to(gl.float32), now.k.to(gl.float32)
    qq, kk, qk = gl.reduce((q * q, k * k, q * k), 1, add_three)
    q_size, k_size = scale * gl.rsqrt(qq + EPS), gl.rsqrt(kk + EPS)
    raw = now.g.to(gl.float32) + now.shift
    if S.HEAD:
        a = decay_of(raw, gl.exp(now.rate), decay.bound, S.KIND)[:, None] + 0.0 * k
    else:
        a = decay_of(raw, gl.exp(now.rate)[:, None], decay.bound, S.KIND)
    factor = gl.full([S.WARPS], 1.0, gl.float32, gl.SliceLayout(1, heads_layout(S.BK, S)))
    if beta.ptr is not None:
        factor = now.beta.to(gl.float32)
        if S.SIGMOID:
            factor = beta.factor * sigmoid(factor)
    return q * q_size[:, None], k * k_size[:, None], qk * q_size * k_size, a, factor


@gluon.jit
def write_state(b_S, b_u, each, own, head, tile, state, S: gl.constexpr):
    """Writes a tile of the state of a head, number `own` of those in shared memory: its decay, the
    updates so far and the new one, whose u is b_u."""
    L: gl.constexpr = columns_of_warps(S.BV, 4, S.WARPS)
    OF_K: gl.constexpr = gl.SliceLayout(1, L)
    OF_V: gl.constexpr = gl.SliceLayout(0, L)
    each_k, each_a, late_k, late_u = each
    b_k = each_k.index(own).load(OF_K)
    b_S = each_a.index(own).load(OF_K)[:, None] * b_S + b_k[:, None] * b_u[None, :]
    for e in gl.static_range(S.ROUND - 1):
        b_k = late_k.index(own * S.ROUND + e).load(OF_K)
        b_u = late_u.index(own * S.ROUND + e).slice(tile * S.BV, S.BV).load(OF_V)
        b_S += b_k[:, None] * b_u[None, :]
    o_k, o_c = gl.arange(0, S.BK, OF_K), gl.arange(0, S.BV, OF_V)
    p = state + head * (S.K * S.V) + tile * S.BV
    p = (p + o_k * S.V)[:, None] + o_c[None, :]
    if S.BK == S.K:
        gl.store(p, b_S)
    else:
        gl.store(p, b_S, mask=(o_k < S.K)[:, None])


@gluon.jit
def run_heads(
    places, ready, free, i_p, n, state, x, decay, gate, beta, late, norm, o, scale, eps,
    S: gl.constexpr,
):  # fmt: skip
    """The recurrence of n heads, whose states are copied to `places`."""
    L: gl.constexpr = columns_of_warps(S.BV, 4, S.WARPS)
    OF_K: gl.constexpr = gl.SliceLayout(1, L)
    OF_V: gl.constexpr = gl.SliceLayout(0, L)
    LK: gl.constexpr = heads_layout(S.BK, S)
    LV: gl.constexpr = heads_layout(S.V, S)
    UK: gl.constexpr = updates_layout(S.BK, S)
    UV: gl.constexpr = updates_layout(S.V, S)
    ROWS: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [1, 0])
    TILES: gl.constexpr = over(S.V, S.BV)
    LAST: gl.constexpr = S.ROUND - 1
    # of each head: what the state is multiplied by for the output and for beta k, k itself, and the
    # decay; beta v, which becomes u, and the output
    rows_q = gl.allocate_shared_memory(gl.float32, [S.WARPS, S.BK], ROWS)
    rows_r = gl.allocate_shared_memory(gl.float32, [S.WARPS, S.BK], ROWS)
    rows_k = gl.allocate_shared_memory(gl.float32, [S.WARPS, S.BK], ROWS)
    rows_a = gl.allocate_shared_memory(gl.float32, [S.WARPS, S.BK], ROWS)
    rows_u = gl.allocate_shared_memory(gl.float32, [S.WARPS, S.V], ROWS)
    rows_o = gl.allocate_shared_memory(gl.float32, [S.WARPS, S.V], ROWS)
    # and its updates
    UPDATES: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [2, 1, 0])
    rows_late_k = gl.allocate_shared_memory(gl.float32, [S.WARPS, S.ROUND, S.BK], UPDATES)
    rows_late_u = gl.allocate_shared_memory(gl.float32, [S.WARPS, S.ROUND, S.V], UPDATES)
    each_late_k = rows_late_k._reinterpret(gl.float32, [S.WARPS * S.ROUND, S.BK], VECTOR)
    each_late_u = rows_late_u._reinterpret(gl.float32, [S.WARPS * S.ROUND, S.V], VECTOR)
    each_q = rows_q._reinterpret(gl.float32, [S.WARPS, S.BK], VECTOR)
    each_r = rows_r._reinterpret(gl.float32, [S.WARPS, S.BK], VECTOR)
    each_k = rows_k._reinterpret(gl.float32, [S.WARPS, S.BK], VECTOR)
    each_a = rows_a._reinterpret(gl.float32, [S.WARPS, S.BK], VECTOR)
    each_u = rows_u._reinterpret(gl.float32, [S.WARPS, S.V], VECTOR)
    each_o = rows_o._reinterpret(gl.float32, [S.WARPS, S.V], VECTOR)
    o_k = gl.arange(0, S.BK, OF_K)
    o_v = gl.arange(0, S.V, gl.SliceLayout(0, LV))[None, :]
    b_norm = gl.load(norm + o_v).to(gl.float32)
    steps = gl.load(late.steps)
    of_k = heads_of(0, n, i_p, gl.SliceLayout(1, gl.SliceLayout(2, UK)), S)
    of_v = heads_of(0, n, i_p, gl.SliceLayout(1, gl.SliceLayout(2, UV)), S)
    late_k, late_u = load_updates(late, of_k, of_v, steps, S)
    wait_for_last(S.EARLY)
    for group in range((n + S.WARPS - 1) // S.WARPS):
        begin = group * S.WARPS
        head_k = heads_of(begin, n, i_p, gl.SliceLayout(1, LK), S)
        head_v = heads_of(begin, n, i_p, gl.SliceLayout(1, LV), S)
        there = exist(begin, n, gl.SliceLayout(1, LV), S)
        now = load_heads(x, decay, gate, beta, head_k, head_v, S)
        q, k, qk, alpha, factor = normalised(now, decay, beta, scale, S)

        # The updates so far, decayed to the present, and what q and k read from them.
        there_k = exist(begin, n, gl.SliceLayout(1, gl.SliceLayout(2, UK)), S)
        turn, held = turn_of(of_k, steps, S)
        p, o_e = rows_of(late.k, of_k, S.BK, S)
        none = (o_e == LAST) & (held == 0)[:, None]
        alpha = gl.convert_layout(alpha, gl.SliceLayout(1, UK))[:, None, :]
        late_k = gl.where(none[:, :, None], 1.0, late_k) * alpha
        b_q = gl.convert_layout(q, gl.SliceLayout(1, UK))[:, None, :]
        b_k = gl.convert_layout(k, gl.SliceLayout(1, UK))[:, None, :]
        q_u, k_u = gl.reduce((late_k * b_q, late_k * b_k), 2, add_two)
        q_u = gl.convert_layout(q_u, gl.SliceLayout(2, UV))[:, :, None] * late_u
        k_u = gl.convert_layout(k_u, gl.SliceLayout(2, UV))[:, :, None] * late_u
        q_u, k_u = gl.reduce((q_u, k_u), 1, add_two)
        q_u, k_u = gl.convert_layout(q_u, LV), gl.convert_layout(k_u, LV)
        b_a = gl.sum(gl.where((o_e == LAST)[:, :, None], late_k, 0.0), 1)
        b_a = gl.convert_layout(b_a, LK)
        kept = (o_e <= held[:, None]) | (o_e == LAST)
        kept &= (there_k & (turn < LAST))[:, None]
        now_k = gl.where((o_e == held[:, None])[:, :, None], b_k, late_k)
        gl.store(p, now_k, mask=kept[:, :, None])

        rows_late_k.store(late_k)
        rows_late_u.store(late_u)
        rows_q.store(q * b_a)
        rows_r.store(k * b_a * factor[:, None])
        rows_k.store(k)
        rows_a.store(b_a)
        b_v = now.v.to(gl.float32)
        if S.REMOVES:
            b_v -= k_u
        rows_u.store(b_v * gl.convert_layout(factor, gl.SliceLayout(1, LV))[:, None])
        for own in range(gl.minimum(n - begin, S.WARPS)):
            head = i_p + (begin + own) * S.P
            own_turn, _ = turn_of(head, steps, S)
            for tile in gl.static_range(TILES):
                step = (begin + own) * TILES + tile
                slot = step % S.SLOTS
                t_q, t_r = each_q.index(own).load(OF_K), each_r.index(own).load(OF_K)
                t_u = each_u.index(own).slice(tile * S.BV, S.BV).load(OF_V)
                mbarrier.wait(ready.index(slot), (step // S.SLOTS) & 1)
                b_S = places.index(slot).load(L)
                barrier()
                mbarrier.arrive(free.index(slot), count=1)
                if S.BK != S.K:
                    b_S = gl.where((o_k < S.K)[:, None], b_S, 0.0)  # beyond it is the next head
                t_o, t_w = gl.reduce((t_q[:, None] * b_S, t_r[:, None] * b_S), 0, add_two)
                if S.REMOVES:
                    t_u -= t_w
                each_o.index(own).slice(tile * S.BV, S.BV).store(t_o)
                each_u.index(own).slice(tile * S.BV, S.BV).store(t_u)
                if own_turn == LAST:
                    each = each_k, each_a, each_late_k, each_late_u
                    write_state(b_S, t_u, each, own, head, tile, state, S)

        b_u, b_o = rows_u.load(LV), rows_o.load(LV)
        turn, held = turn_of(head_v, steps, S)
        p = late.u + ((head_v * S.ROUND + held) * S.V)[:, None] + o_v
        gl.store(p, b_u, mask=(there & (turn < LAST))[:, None])
        b_o += q_u + gl.convert_layout(qk, gl.SliceLayout(1, LV))[:, None] * b_u
        b_g = now.gate.to(gl.float32)
        b_o *= gl.rsqrt(gl.sum(b_o * b_o, 1) / S.V + eps)[:, None] * b_norm * sigmoid(b_g)
        if S.SILU:
            b_o *= b_g
        gl.store(o + (head_v * S.V)[:, None] + o_v, b_o.to(gl.bfloat16), mask=there[:, None])
        of_k = heads_of(begin + S.WARPS, n, i_p, gl.SliceLayout(1, gl.SliceLayout(2, UK)), S)
        of_v = heads_of(begin + S.WARPS, n, i_p, gl.SliceLayout(1, gl.SliceLayout(2, UV)), S)
        late_k, late_u = load_updates(late, of_k, of_v, steps, S)


@gluon.jit
def rows_state_kernel(
    states, state, x, decay, gate, beta, late, norm, o, scale, eps, S: gl.constexpr
):
    """states: a TMA descriptor of tiles [BK, BV] of state [B, HV, K, V], fp32, dense, which is
    updated in place, with late: `Updates`. x: `Rows` [B, D], q, k and v behind the convolution;
    decay: `Gate`; gate: `Rows` [B, HV * V]; beta: `Beta`; norm [V]; o [B, HV * V]."""
    allow_next(S.EARLY)
    i_p = gl.program_id(0)
    n = (S.B * S.HV - i_p + S.P - 1) // S.P
    places = gl.allocate_shared_memory(gl.float32, [S.SLOTS, S.BK, S.BV], states.layout)
    ready = gl.allocate_shared_memory(gl.int64, [S.SLOTS, 1], mbarrier.MBarrierLayout())
    free = gl.allocate_shared_memory(gl.int64, [S.SLOTS, 1], mbarrier.MBarrierLayout())
    for slot in gl.static_range(S.SLOTS):
        mbarrier.init(ready.index(slot), count=1)
        mbarrier.init(free.index(slot), count=1)
    fence_async_shared()
    barrier()
    # fmt: off
    gl.warp_specialize([
        (run_heads, (
            places, ready, free, i_p, n, state, x, decay, gate, beta, late, norm, o, scale, eps, S,
        )),
        (copy_states, (states, places, ready, free, i_p, n, S)),
    ], [1], [40])
    # fmt: on
