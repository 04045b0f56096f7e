"""The recurrence of a layer in the kernel of step_layers.py, with decay, gate and gated norm.

SPLIT programs share a head. Each has V / SPLIT columns of the head's state in registers, and forms
all decays of the head itself, since these need no results of other programs.
"""

from typing import NamedTuple

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from fla_cp.kernels.sm90.step_layouts import flat, fours, held, of_each_warp, pairs_of_a_thread
from fla_cp.kernels.sm90.step_products import pairs_of_rows, products, wanted
from fla_cp.kernels.sm90.step_words import (
    SEGMENT,
    arrived,
    halves,
    marked,
    packed,
    pairs,
    place,
    sigmoid,
)
from fla_cp.kernels.triton.device.blocks import EPS
from fla_cp.kernels.triton.device.gates import LOG2E


class Own(NamedTuple):
    """What a program reads of a layer that no other program writes.

    state: [K, V / SPLIT] fp32. rate: A_log of the head. shift: dt_bias, [K], or one number
    with one decay a head. decay: [K, RANK / 2], gate: [V / SPLIT, RANK / 2], rows of low-rank
    weights in words of two numbers. bias: [V / SPLIT], of the gate. norm: [V / SPLIT], the weight
    of the gated norm. Where a layer has no such tensor, the member repeats another one.
    """

    state: gl.tensor
    rate: gl.tensor
    shift: gl.tensor
    decay: gl.tensor
    gate: gl.tensor
    bias: gl.tensor
    norm: gl.tensor


@gluon.jit
def decay_of(raw, rate, bound, KIND: gl.constexpr):
    """The decay for a raw log decay, see `gate_value`."""
    if KIND == "softplus":
        log2 = gl.maximum(raw, 0.0) * LOG2E + gl.log2(1.0 + gl.exp2(gl.abs(raw) * -LOG2E))
        return gl.exp2(-rate * log2)
    else:
        return gl.exp2(bound * LOG2E * sigmoid(rate * raw))


@gluon.jit
def add_two(a, b, x, y):
    return a + x, b + y


@gluon.jit
def add_three(a, b, c, x, y, z):
    return a + x, b + y, c + z


@gluon.jit
def one_of(values, START: gl.constexpr, odd, S: gl.constexpr):
    """The number at START, or the one behind it."""
    i = gl.arange(0, 2, flat(2, S.WARPS))
    x = values.slice(START, 2).load(flat(2, S.WARPS))
    return gl.sum(gl.where(i == odd, x, 0.0), 0)


@gluon.jit
def load_inputs(words, i_h, part, epoch, values, inputs, S: gl.constexpr):
    """Waits for what a program reads of the projections, and leaves it in shared memory: as numbers
    in `values` [16 * SEGMENT], and as words of two in `inputs` [8 * SEGMENT], a segment each for q,
    k, decay, gate, v and beta."""
    VS: gl.constexpr = S.V // S.SPLIT
    column = i_h * S.V + part * VS
    i = gl.arange(0, 8 * SEGMENT, flat(2, S.WARPS))
    kind, j = i // SEGMENT, i % SEGMENT
    at, size = (i_h * S.K // 2) + 0 * i, gl.where(kind < 2, S.K // 2, 0)
    at = gl.where(kind == 1, at + S.H * S.K // 2, at)
    if S.HEAD:
        at = gl.where(kind == 2, (S.DECAY + i_h) // 2, at)
        size = gl.where(kind == 2, 1, size)
    else:
        at = gl.where(kind == 2, S.DECAY // 2, at)
        size = gl.where(kind == 2, S.RANK // 2, size)
    if S.LOW_GATE:
        at = gl.where(kind == 3, S.GATE // 2, at)
        size = gl.where(kind == 3, S.RANK // 2, size)
    else:
        at = gl.where(kind == 3, (S.GATE + column) // 2, at)
        size = gl.where(kind == 3, VS // 2, size)
    at = gl.where(kind == 4, (2 * S.H * S.K + column) // 2, at)
    size = gl.where(kind == 4, VS // 2, size)
    if S.BETA >= 0:
        at = gl.where(kind == 5, (S.BETA + i_h) // 2, at)
        size = gl.where(kind == 5, 1, size)
    last = gl.maximum(size - 1, 0)
    p = words.projected + at + gl.minimum(j, last)
    found = arrived(p, epoch, held(8 * SEGMENT, S.WARPS), False)
    inputs.store(found.to(gl.int32))
    x_0, x_1 = halves(found)
    values.store(gl.reshape(gl.join(x_0, x_1), [16 * SEGMENT]))


@gluon.constexpr_function
def rank_layout(S):
    """Rows of a matrix of low rank, words of two numbers."""
    return fours(min(4, S.RANK // 8), S.WARPS)


@gluon.jit
def low_rank(rows, inputs, START: gl.constexpr, S: gl.constexpr):
    """The products of `rows` [R, RANK / 2] with the RANK / 2 words at START of inputs, [R]."""
    L: gl.constexpr = fours(2, S.WARPS)
    r = inputs.slice(START, S.RANK // 2).load(gl.SliceLayout(0, rank_layout(S)))
    if S.RANK == 16:
        acc = products(gl.full([rows.shape[0], 8], 0.0, gl.float32, L), rows, r, L)
    else:
        w_0, w_1 = pairs_of_rows(rows)
        r_0, r_1 = pairs(r)
        acc = gl.full([rows.shape[0], S.RANK // 4], 0.0, gl.float32, L)
        acc = products(products(acc, w_0, r_0, L), w_1, r_1, L)
    return gl.convert_layout(gl.sum(wanted(acc, L), 1), gl.SliceLayout(1, rank_layout(S)))


@gluon.jit
def state_of(at, i_p, S: gl.constexpr):
    """Pointers to this program's part of a head's state, [K, V / SPLIT]."""
    L: gl.constexpr = pairs_of_a_thread(S.V // S.SPLIT, 4, S.WARPS)
    i_h, part = i_p // S.SPLIT, i_p % S.SPLIT
    o_k = gl.arange(0, S.K, gl.SliceLayout(1, L))
    o_v = gl.arange(0, S.V // S.SPLIT, gl.SliceLayout(0, L))
    start = i_h * (S.K * S.V) + part * (S.V // S.SPLIT)
    return (place(at.state, gl.float32) + start + o_k * S.V)[:, None] + o_v[None, :]


@gluon.jit
def load_own(at, i_p, S: gl.constexpr):
    """What program i_p reads of a layer besides projections."""
    VS: gl.constexpr = S.V // S.SPLIT
    L: gl.constexpr = pairs_of_a_thread(VS, 4, S.WARPS)
    LR: gl.constexpr = rank_layout(S)
    i_h, part = i_p // S.SPLIT, i_p % S.SPLIT
    column = i_h * S.V + part * VS
    o_v = gl.arange(0, VS, gl.SliceLayout(0, L))
    o_r = gl.arange(0, S.RANK // 2, gl.SliceLayout(0, LR))
    b_S = gl.load(state_of(at, i_p, S))
    rate = gl.load(place(at.A_log, gl.float32) + i_h)
    shift = place(at.dt_bias, gl.float32)
    if S.HEAD:
        b_shift = gl.load(shift + i_h)
        decay = b_shift
    else:
        row = i_h * S.K + gl.arange(0, S.K, gl.SliceLayout(1, LR))
        b_shift = gl.load(shift + row)
        p = (place(at.decay, gl.int32) + row * (S.RANK // 2))[:, None] + o_r[None, :]
        decay = gl.load(p)
    norm = gl.load(place(at.o_norm, gl.bfloat16) + part * VS + o_v)
    gate, bias = norm, norm
    if S.LOW_GATE:
        row = column + gl.arange(0, VS, gl.SliceLayout(1, LR))
        p = (place(at.gate, gl.int32) + row * (S.RANK // 2))[:, None] + o_r[None, :]
        gate = gl.load(p)
    if S.BIAS:
        p = place(at.gate_bias, gl.bfloat16) + column + o_v
        bias = gl.load(p)
    return Own(b_S, rate, b_shift, decay, gate, bias, norm)


@gluon.jit
def mix(at, epoch, words, i_p, values, inputs, scale, bound, factor, S: gl.constexpr):
    """The recurrence of a head of the layer at `at`, for some columns of its state.

    The output is multiplied by the gated norm's weight and by the gate's activation. The sum of its
    squares is stored behind it, so that the next phase can divide by the rms of whole heads. The
    output does not wait for the new state: q (S + k u^T) = q S + (q k) u^T."""
    VS: gl.constexpr = S.V // S.SPLIT
    L: gl.constexpr = pairs_of_a_thread(VS, 4, S.WARPS)
    EACH: gl.constexpr = of_each_warp(S.K, S.WARPS)
    i_h, part = i_p // S.SPLIT, i_p % S.SPLIT
    own = load_own(at, i_p, S)  # these loads are under way while projections are awaited
    load_inputs(words, i_h, part, epoch, values, inputs, S)
    b_S, rate = own.state, gl.exp2(own.rate * LOG2E)
    if S.HEAD:
        raw = one_of(values, 4 * SEGMENT, (S.DECAY + i_h) % 2, S) + own.shift
        b_S *= decay_of(raw, rate, bound, S.KIND)
    else:
        raw = low_rank(own.decay, inputs, 2 * SEGMENT, S) + own.shift
        decay = decay_of(raw, rate, bound, S.KIND)
        b_S *= gl.convert_layout(decay, gl.SliceLayout(1, L))[:, None]
    b_q = values.slice(0, S.K).load(gl.SliceLayout(1, L))
    b_k = values.slice(2 * SEGMENT, S.K).load(gl.SliceLayout(1, L))
    b_u = values.slice(8 * SEGMENT, VS).load(gl.SliceLayout(0, L))
    e_q, e_k = values.slice(0, S.K).load(EACH), values.slice(2 * SEGMENT, S.K).load(EACH)
    qq, kk, qk = gl.reduce((e_q * e_q, e_k * e_k, e_q * e_k), 0, add_three)
    of_q, of_k = gl.reduce((b_q[:, None] * b_S, b_k[:, None] * b_S), 0, add_two)
    q_size, k_size = gl.rsqrt(qq + EPS), gl.rsqrt(kk + EPS)
    if S.REMOVES:
        b_u -= k_size * of_k
    if S.BETA >= 0:
        b_u *= factor * sigmoid(one_of(values, 10 * SEGMENT, (S.BETA + i_h) % 2, S))
    b_o = (scale * q_size) * (of_q + (k_size * qk) * b_u)
    squares = gl.sum(b_o * b_o, 0)
    if S.LOW_GATE:
        b_a = low_rank(own.gate, inputs, 3 * SEGMENT, S)
        b_a = gl.convert_layout(b_a, gl.SliceLayout(0, L))
        if S.BIAS:
            b_a += own.bias.to(gl.float32)
    else:
        b_a = values.slice(6 * SEGMENT, VS).load(gl.SliceLayout(0, L))
    b_o *= own.norm.to(gl.float32) * sigmoid(b_a)
    if S.SILU:
        b_o *= b_a
    o_0, o_1 = pairs(b_o)
    first, _ = pairs(i_h * S.V + part * VS + gl.arange(0, VS, gl.SliceLayout(0, L)))
    gl.store(words.mixed + first // 2, marked(packed(o_0, o_1), epoch))
    bits = gl.cast(squares, gl.int32, bitcast=True)
    gl.store(words.mixed + S.H * S.V // 2 + i_p, marked(bits, epoch))
    gl.store(state_of(at, i_p, S), b_S + (k_size * b_k)[:, None] * b_u[None, :])
