"""The recurrence of a decoding step of several sequences with the gate of the norm behind it, and
the sums of products that several programs share, with the norm behind those.

A program of the recurrence has some values of one head of one sequence. It loads its part of the
state before it waits for the kernel ahead (early.py). Its output does not wait for the new state:
q (S + k u^T) = q S + (q k) u^T.

The gated norm needs the root of all values of a head, which other programs have. Therefore the
output is written without it, together with the sums of its squares, and the product that follows
divides by the roots (sm90/rows_product.py).
"""

from typing import NamedTuple

import triton
import triton.language as tl

from fla_cp.kernels.triton.device.blocks import EPS, decay_exp, load_block, store_block
from fla_cp.kernels.triton.device.bundles import constants
from fla_cp.kernels.triton.device.gates import LOG2E, gate_value, sigmoid
from fla_cp.kernels.triton.early import allow_next, wait_for_last
from fla_cp.kernels.triton.recurrent import load_gates, load_row


@constants
class StateShape(NamedTuple):
    """H heads of q and k, HV of v, channels K and V, and the tile [BK, BV] of a state. HEAD: one
    decay a head. REMOVES: k reads from the state what is removed. SILU: the activation of the gate
    is SiLU, otherwise sigmoid. EARLY: see early.py."""

    H: int
    HV: int
    K: int
    V: int
    BK: int
    BV: int
    HEAD: bool
    REMOVES: bool
    SILU: bool
    EARLY: bool


@triton.jit
def rows_state_kernel(
    x, state, decay, gate, beta, norm, o, squares, scale, S: tl.constexpr, R: tl.constexpr
):
    """x: `Rows` [B, D], q, k and v behind the convolution; state: `State`, dense in its last two
    dims; decay: `Gate`; gate: `Rows` [B, HV * V]; beta: `Beta`; norm [V]; o [B, HV * V]; squares
    [B, HV, tiles], fp32."""
    allow_next(S.EARLY)
    tiles: tl.constexpr = (S.V + S.BV - 1) // S.BV
    i_v, i_h = tl.program_id(0) % tiles, tl.program_id(1)
    i_n = (tl.program_id(0) // tiles).to(tl.int64)
    i_g = i_h // (S.HV // S.H)
    o_k, o_v = tl.arange(0, S.BK), i_v * S.BV + tl.arange(0, S.BV)

    p_S = state.ptr + i_n * state.n + i_h * state.h
    b_S = load_block(p_S, o_k, o_v, S.K, S.V)
    b_norm = load_row(norm, o_v, S.V, True)
    rate, b_shift, b_beta = 1.0, 0.0, 1.0
    if decay.A_log is not None:
        rate = tl.exp(tl.load(decay.A_log + i_h).to(tl.float32))
    if decay.dt_bias is not None:
        b_shift = load_gates(decay.dt_bias + i_h * (1 if S.HEAD else S.K), o_k, S.K, True, S.HEAD)

    wait_for_last(S.EARLY)
    p_x = x.ptr + i_n * x.row
    b_q = load_row(p_x + i_g * S.K, o_k, S.K, True)
    b_k = load_row(p_x + (S.H + i_g) * S.K, o_k, S.K, True)
    b_u = load_row(p_x + 2 * S.H * S.K + i_h * S.V, o_v, S.V, True)
    p_g = decay.g + i_n * decay.row + i_h * (1 if S.HEAD else S.K)
    b_g = load_gates(p_g, o_k, S.K, True, S.HEAD).to(tl.float32)
    b_a = load_row(gate.ptr + i_n * gate.row + i_h * S.V, o_v, S.V, True)
    if beta.ptr is not None:
        b_beta = tl.load(beta.ptr + i_n * beta.row + i_h).to(tl.float32)
    if R.BETA_SIGMOID:
        b_beta = beta.factor * sigmoid(b_beta)
    if R.NORM:
        b_q *= tl.rsqrt(tl.sum(b_q * b_q, axis=0) + EPS)
        b_k *= tl.rsqrt(tl.sum(b_k * b_k, axis=0) + EPS)
    b_g = gate_value(b_g + b_shift, rate, decay.bound, R.GATE)
    if R.EXP2:
        b_g *= LOG2E
    b_S *= decay_exp(b_g, R.EXP2)[:, None]
    if S.REMOVES:
        b_u -= tl.sum(b_k[:, None] * b_S, axis=0)
    b_u *= b_beta
    b_o = scale * (tl.sum(b_q[:, None] * b_S, axis=0) + tl.sum(b_q * b_k, axis=0) * b_u)
    store_block(p_S, b_S + b_k[:, None] * b_u[None, :], o_k, o_v, S.K, S.V)
    tl.store(squares + (i_n * S.HV + i_h) * tiles + i_v, tl.sum(b_o * b_o, axis=0))
    b_o *= b_norm * sigmoid(b_a)
    if S.SILU:
        b_o *= b_a
    tl.store(o + (i_n * S.HV + i_h) * S.V + o_v, b_o.to(o.dtype.element_ty), mask=o_v < S.V)


@triton.jit
def rows_sum_kernel(
    parts, x, norm, y, eps, C: tl.constexpr, BC: tl.constexpr, SPLIT: tl.constexpr,
    EARLY: tl.constexpr,
):  # fmt: skip
    """x [B, C] += the sum of parts [SPLIT, 64, C], fp32, if there are any. y [B, C] = x / rms(x) *
    norm [C], unless y is None. A program has one row."""
    allow_next(EARLY)
    i_b, o_c = tl.program_id(0).to(tl.int64), tl.arange(0, BC)
    m_c = o_c < C
    b_w = 0.0
    if y is not None:
        b_w = tl.load(norm + o_c, mask=m_c, other=0.0).to(tl.float32)
    wait_for_last(EARLY)
    b_x = tl.load(x + i_b * C + o_c, mask=m_c, other=0.0)
    if SPLIT:
        b_s = b_x.to(tl.float32)
        for n in tl.static_range(SPLIT):
            b_s += tl.load(parts + (n * 64 + i_b) * C + o_c, mask=m_c, other=0.0)
        b_x = b_s.to(x.dtype.element_ty)
        tl.store(x + i_b * C + o_c, b_x, mask=m_c)
    if y is not None:
        b_y = b_x.to(tl.float32)
        b_y *= tl.rsqrt(tl.sum(b_y * b_y, axis=0) / C + eps) * b_w
        tl.store(y + i_b * C + o_c, b_y.to(y.dtype.element_ty), mask=m_c)
