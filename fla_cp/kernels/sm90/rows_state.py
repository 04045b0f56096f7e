"""The recurrence of a decoding step of up to 64 sequences, with the gated norm behind it.

It takes the time in which states are read. Each SM has a few programs, which stay until all heads
are done: a program has every P-th head of all sequences. It copies tiles of states to shared
memory, several ahead of their use, and the first ones before the kernel ahead has ended
(triton/early.py), so that memory is busy while the convolution runs.

The output does not wait for the new state: q (S + k u^T) = q S + (q k) u^T. So a state need not be
written in each step, see rows_deferred.py. With n updates k_j u_j^T that are not in memory yet, and
a the decay since the state S was written, k reads k (a S) + sum (k k_j) u_j from it. A head writes
its state in one of ROUND steps, and only its k and u in the others.
"""

from typing import NamedTuple

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared, mbarrier, tma

from fla_cp.kernels.sm90.rows_deferred import load_updates, store_update, turn_of, updates_layout
from fla_cp.kernels.sm90.rows_product import allow_next, over, wait_for_last
from fla_cp.kernels.sm90.step_layouts import VECTOR, columns_of_warps, of_each_warp
from fla_cp.kernels.sm90.step_mix import add_three, add_two, decay_of
from fla_cp.kernels.sm90.step_words import sigmoid
from fla_cp.kernels.sm90.tma import barrier
from fla_cp.kernels.triton.device.blocks import EPS
from fla_cp.kernels.triton.device.bundles import constants


@constants
class StateShape(NamedTuple):
    """What the kernel is compiled for.

    B: sequences. H heads of q and k, HV of v, with channels K and V. BK, BV: a tile of a state, all
    of K and some columns. P: programs. ROUND: steps in which a head writes its state once, a power of
    two. SLOTS: places for tiles in shared memory. PACE: tiles that
    are on their way, beside one, before the kernel ahead has ended. WARPS: warps of a program.
    KIND: the function of the decay, as `DeltaRule.gate`. HEAD: one decay a head. REMOVES: k reads
    from the state what is removed. SIGMOID: beta is given before its sigmoid. SILU: the activation
    of the gate is SiLU, otherwise sigmoid. EARLY: see triton/early.py.
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


class Head(NamedTuple):
    """What a head reads besides its state: q and k [BK], raw; g and shift, whose sum is the raw
    decay, [BK] or one number, and its rate; v and gate [V]; beta, or rate if there is none."""

    q: gl.tensor
    k: gl.tensor
    g: gl.tensor
    shift: gl.tensor
    rate: gl.tensor
    v: gl.tensor
    gate: gl.tensor
    beta: gl.tensor


@gluon.jit
def copy_state(states, places, ready, i_p, step, S: gl.constexpr):
    """Starts the copy of a program's tile number `step` to the place that it takes its turn in."""
    TILES: gl.constexpr = over(S.V, S.BV)
    head, slot = i_p + step // TILES * S.P, step % S.SLOTS
    mbarrier.expect(ready.index(slot), states.block_type.nbytes)
    at = [head * S.K, step % TILES * S.BV]
    tma.async_copy_global_to_shared(states, at, ready.index(slot), places.index(slot))


@gluon.jit
def load_head(x, decay, gate, beta, head, S: gl.constexpr):
    """What is read of a head, counted through all sequences."""
    o_k = gl.arange(0, S.BK, of_each_warp(S.BK, S.WARPS))
    o_v = gl.arange(0, S.V, of_each_warp(S.V, S.WARPS))
    i_n, i_h = head // S.HV, head % S.HV
    p_x = x.ptr + i_n * x.row
    p_q = p_x + i_h // (S.HV // S.H) * S.K + o_k
    p_g, p_shift = decay.g + i_n * decay.row, decay.dt_bias
    q, k = (
        gl.load(p_q, mask=o_k < S.K, other=0.0),
        gl.load(p_q + S.H * S.K, mask=o_k < S.K, other=0.0),
    )
    if S.HEAD:
        g, shift = gl.load(p_g + i_h), gl.load(p_shift + i_h)
    else:
        at = i_h * S.K + o_k
        g = gl.load(p_g + at, mask=o_k < S.K, other=0.0)
        shift = gl.load(p_shift + at, mask=o_k < S.K, other=0.0)
    rate = gl.load(decay.A_log + i_h)
    v = gl.load(p_x + 2 * S.H * S.K + i_h * S.V + o_v)
    a = gl.load(gate.ptr + i_n * gate.row + i_h * S.V + o_v)
    b = rate
    if beta.ptr is not None:
        b = gl.load(beta.ptr + i_n * beta.row + i_h)
    return Head(q, k, g, shift, rate, v, a, b)


@gluon.jit
def rows_state_kernel(
    states, state, x, decay, gate, beta, late, norm, o, scale, eps, S: gl.constexpr
):
    """states: a TMA descriptor of tiles [BK, BV] of state [B, HV, K, V], fp32, dense, which is
    updated in place, with late: `Updates`. x: `Rows` [B, D], q, k and v behind the convolution;
    decay: `Gate`; gate: `Rows` [B, HV * V]; beta: `Beta`; norm [V]; o [B, HV * V]."""
    allow_next(S.EARLY)
    L: gl.constexpr = columns_of_warps(S.BV, 4, S.WARPS)
    OF_K: gl.constexpr = gl.SliceLayout(1, L)
    OF_V: gl.constexpr = gl.SliceLayout(0, L)
    ALL_V: gl.constexpr = of_each_warp(S.V, S.WARPS)
    LK: gl.constexpr = updates_layout(S.BK, S)
    LV: gl.constexpr = updates_layout(S.V, S)
    TILES: gl.constexpr = over(S.V, S.BV)
    LAST: gl.constexpr = S.ROUND - 1
    i_p = gl.program_id(0)
    n = (S.B * S.HV - i_p + S.P - 1) // S.P

    places = gl.allocate_shared_memory(gl.float32, [S.SLOTS, S.BK, S.BV], states.layout)
    # q, k and the decay, of four places, which have to be a power of two; v, the output, q with
    # the updates, and the new update
    of_keys = gl.allocate_shared_memory(gl.float32, [4 * S.BK], VECTOR)
    of_values = gl.allocate_shared_memory(gl.float32, [4 * S.V], VECTOR)
    late_keys = gl.allocate_shared_memory(gl.float32, [S.ROUND * S.BK], VECTOR)
    late_values = gl.allocate_shared_memory(gl.float32, [S.ROUND * S.V], VECTOR)
    ready = gl.allocate_shared_memory(gl.int64, [S.SLOTS, 1], mbarrier.MBarrierLayout())
    for first in gl.static_range(S.SLOTS):
        mbarrier.init(ready.index(first), count=1)
    fence_async_shared()
    barrier()
    for first in gl.static_range(S.SLOTS):
        if first < n * TILES:
            copy_state(states, places, ready, i_p, first, S)
            if first >= S.PACE:
                mbarrier.wait(ready.index(first - S.PACE), 0)

    o_k, o_c = gl.arange(0, S.BK, OF_K), gl.arange(0, S.BV, OF_V)
    o_v = gl.arange(0, S.V, ALL_V)
    b_norm = gl.load(norm + o_v).to(gl.float32)
    steps = gl.load(late.steps) - 1
    late_k, late_u = load_updates(late, i_p, steps, S)
    wait_for_last(S.EARLY)
    now = load_head(x, decay, gate, beta, i_p, S)
    o_e = gl.arange(0, S.ROUND, gl.SliceLayout(1, LK))
    for i in range(n):
        head = i_p + i * S.P
        turn, held = turn_of(head, steps, S)
        # Loads of the next head are under way while this one is computed.
        following = gl.where(i + 1 < n, head + S.P, head)
        coming = load_head(x, decay, gate, beta, following, S)
        coming_k, coming_u = load_updates(late, following, steps, S)
        q, k = now.q.to(gl.float32), now.k.to(gl.float32)
        qq, kk, qk = gl.reduce((q * q, k * k, q * k), 0, add_three)
        q_size, k_size = scale * gl.rsqrt(qq + EPS), gl.rsqrt(kk + EPS)
        alpha = decay_of(now.g.to(gl.float32) + now.shift, gl.exp(now.rate), decay.bound, S.KIND)
        of_keys.slice(0, S.BK).store(q * q_size)
        of_keys.slice(S.BK, S.BK).store(k * k_size)
        b_keys = gl.where(((o_e == LAST) & (held == 0))[:, None], 1.0, late_k)
        if S.HEAD:
            b_keys *= alpha
        else:
            of_keys.slice(2 * S.BK, S.BK).store(alpha)
            b_keys *= of_keys.slice(2 * S.BK, S.BK).load(gl.SliceLayout(0, LK))[None, :]
        late_keys.store(gl.reshape(b_keys, [S.ROUND * S.BK]))
        q_all = of_keys.slice(0, S.BK).load(gl.SliceLayout(0, LK))
        k_all = of_keys.slice(S.BK, S.BK).load(gl.SliceLayout(0, LK))
        q_late, k_late = gl.reduce((b_keys * q_all[None, :], b_keys * k_all[None, :]), 1, add_two)
        q_late = gl.convert_layout(q_late, gl.SliceLayout(1, LV))[:, None] * late_u
        k_late = gl.convert_layout(k_late, gl.SliceLayout(1, LV))[:, None] * late_u
        q_late, k_late = gl.reduce((q_late, k_late), 0, add_two)
        b_v = now.v.to(gl.float32)
        if S.REMOVES:
            b_v -= gl.convert_layout(k_late, ALL_V)
        of_values.slice(0, S.V).store(b_v)
        of_values.slice(2 * S.V, S.V).store(q_late)
        if turn == LAST:
            late_values.store(gl.reshape(late_u, [S.ROUND * S.V]))
        factor = 1.0
        if beta.ptr is not None:
            factor = now.beta.to(gl.float32)
            if S.SIGMOID:
                factor = beta.factor * sigmoid(factor)
        for tile in gl.static_range(TILES):
            step = i * TILES + tile
            slot = step % S.SLOTS
            b_q, b_k = of_keys.slice(0, S.BK).load(OF_K), of_keys.slice(S.BK, S.BK).load(OF_K)
            b_u = of_values.slice(tile * S.BV, S.BV).load(OF_V)
            b_o = of_values.slice(2 * S.V + tile * S.BV, S.BV).load(OF_V)
            mbarrier.wait(ready.index(slot), (step // S.SLOTS) & 1)
            b_S = places.index(slot).load(L)
            barrier()
            if step + S.SLOTS < n * TILES:
                copy_state(states, places, ready, i_p, step + S.SLOTS, S)
            if S.BK != S.K:
                b_S = gl.where((o_k < S.K)[:, None], b_S, 0.0)  # beyond it is the next head
            b_S *= late_keys.slice(LAST * S.BK, S.BK).load(OF_K)[:, None]
            of_q, of_k = gl.reduce((b_q[:, None] * b_S, b_k[:, None] * b_S), 0, add_two)
            if S.REMOVES:
                b_u -= of_k
            b_u *= factor
            b_o += of_q + (q_size * k_size * qk) * b_u
            of_values.slice(S.V + tile * S.BV, S.BV).store(b_o)
            of_values.slice(3 * S.V + tile * S.BV, S.BV).store(b_u)
            if turn == LAST:
                b_S += b_k[:, None] * b_u[None, :]
                for e in gl.static_range(LAST):
                    l_k = late_keys.slice(e * S.BK, S.BK).load(OF_K)
                    l_u = late_values.slice(e * S.V + tile * S.BV, S.BV).load(OF_V)
                    b_S += l_k[:, None] * l_u[None, :]
                p = state + head * (S.K * S.V) + tile * S.BV
                p = (p + o_k * S.V)[:, None] + o_c[None, :]
                if S.BK == S.K:
                    gl.store(p, b_S)
                else:
                    gl.store(p, b_S, mask=(o_k < S.K)[:, None])
        if turn < LAST:
            b_new = of_values.slice(3 * S.V, S.V).load(ALL_V)
            store_update(late, head, held, b_keys, k_all, b_new, o_v, S)
        b_o = of_values.slice(S.V, S.V).load(ALL_V)
        b_a = now.gate.to(gl.float32)
        b_o *= gl.rsqrt(gl.sum(b_o * b_o, 0) / S.V + eps) * b_norm * sigmoid(b_a)
        if S.SILU:
            b_o *= b_a
        gl.store(o + head * S.V + o_v, b_o.to(gl.bfloat16))
        now = coming
        late_k, late_u = coming_k, coming_u
