"""Decays of a chunk with one decay a head: sums of log decays and their factors."""

import triton
import triton.language as tl

from fla_cp.kernels.triton.device.blocks import decay_exp
from fla_cp.kernels.triton.device.gates import LOG2E, gate_value


@triton.jit
def load_head_gate(gate, start, i_h, o_i, m_i, GATE: tl.constexpr, EXP2: tl.constexpr):
    """raw = g + dt_bias [BT], rate = exp(A_log), and the log decay in the unit of gc, zero beyond
    the chunk.

    The log decay is cut at -256. Below that its exponential is zero whatever it multiplies, and
    larger numbers would cost the sums their digits. For several heads i_h and o_i broadcast to [BT,
    heads]."""
    at = gate.g + (i_h * gate.head + start * gate.row)
    raw = tl.load(at + o_i * gate.row, mask=m_i, other=0.0).to(tl.float32)
    rate = 1.0
    if gate.dt_bias is not None:
        raw += tl.load(gate.dt_bias + i_h).to(tl.float32)
    if gate.A_log is not None:
        rate = tl.exp(tl.load(gate.A_log + i_h).to(tl.float32))
    b_g = tl.where(m_i, gate_value(raw, rate, gate.bound, GATE), 0.0)
    if EXP2:
        b_g *= LOG2E
    return raw, rate, tl.maximum(b_g, -256.0)


@triton.jit
def running_sums(g, operand: tl.constexpr, BEFORE: tl.constexpr = False):
    """Sums of the log decays up to each row, with it or, if BEFORE, without it, as a tuple of
    addends [BT].

    For fp32 there are two addends, so that a difference of two sums does not cancel: sums of
    multiples of 1/1024, which fp32 adds without rounding, and sums of the remainders."""
    if operand == tl.float32:
        high = tl.floor(g * 1024.0) / 1024.0
        low = g - high
        if BEFORE:
            return (tl.cumsum(high, axis=0) - high, tl.cumsum(low, axis=0) - low)
        return (tl.cumsum(high, axis=0), tl.cumsum(low, axis=0))
    else:
        s = tl.cumsum(g, axis=0)
        if BEFORE:
            s -= g
        return (s,)


@triton.jit
def total_of(sums):
    s = sums[0]
    for n in tl.static_range(1, len(sums)):
        s += sums[n]
    return s


@triton.jit
def decay_of(sums, EXP2: tl.constexpr):
    """exp(sums) [BT]."""
    return decay_exp(total_of(sums), EXP2)


@triton.jit
def last_of(x, i):
    """The last element of x. A separate sum would round otherwise than the running one."""
    return tl.sum(tl.where(i == i.shape[0] - 1, x, 0.0), axis=0)


@triton.jit
def decay_to_end(sums, i, EXP2: tl.constexpr):
    """exp(last - sums) [BT]."""
    s = last_of(sums[0], i) - sums[0]
    for n in tl.static_range(1, len(sums)):
        s += last_of(sums[n], i) - sums[n]
    return decay_exp(s, EXP2)


@triton.jit
def decays(row, col, i, EXP2: tl.constexpr):
    """exp(row_i - col_j) [BT, BT] for i > j, zero elsewhere."""
    keep = i[:, None] > i[None, :]
    x = row[0][:, None] - col[0][None, :]
    for n in tl.static_range(1, len(row)):
        x += row[n][:, None] - col[n][None, :]
    return tl.where(keep, decay_exp(tl.where(keep, x, 0.0), EXP2), 0.0)
