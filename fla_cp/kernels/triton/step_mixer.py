"""Convolution, recurrence and gated norm of a decoding step of few sequences in one kernel.

A program has one head of one sequence, and holds its whole state in registers, since the norm needs
all values of a head. State and parameters are loaded before the program waits for the kernel ahead,
which forms q, k and v (early.py). The output does not wait for the new state:
q (S + k u^T) = q S + (q k) u^T.

q, k, v and decay of a head are the rows of one [4, BN] tile up to the end of their activations, so
that each thread has few channels. Triton computes a vector that has fewer elements than there are
threads again in each layout in which it is used, from its loads on: for channels of keys as rows of
a state, a thread would have 16 instead of two.
"""

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from fla_cp.kernels.torch.decoding import StepMixer
from fla_cp.kernels.triton.conv import MAX_TAPS, load_taps
from fla_cp.kernels.triton.decoding import Window, convolved, load_past, store_window
from fla_cp.kernels.triton.device.blocks import EPS, decay_exp, load_block, store_block, unit_rows
from fla_cp.kernels.triton.device.bundles import Beta, Gate, Rows, constants, rule_options, state
from fla_cp.kernels.triton.device.gates import LOG2E, gate_value, sigmoid
from fla_cp.kernels.triton.early import allow_next, launch_early, starts_early, wait_for_last
from fla_cp.kernels.triton.recurrent import load_row
from fla_cp.kernels.triton.tile_table import power_of_two

MAX_ROWS = 4
"""The most sequences. With 64, one kernel takes longer than three (docs/log.md)."""

MAX_STATE = 128 * 128
"""The most elements of a state that a program holds, 64 for each of 256 threads."""


@constants
class MixerShape(NamedTuple):
    """Heads H, channels K and V, taps W. BK, BV, BN: powers of two, BN for both K and V. HEAD: one
    decay a head. REMOVES: k reads from the state what is removed. SILU: the activation of the gate
    is SiLU, otherwise sigmoid. EARLY: see early.py."""

    H: int
    K: int
    V: int
    W: int
    BK: int
    BV: int
    BN: int
    HEAD: bool
    REMOVES: bool
    SILU: bool
    EARLY: bool


@triton.jit
def load_decay(p, i_h, o_n, m_g, S: tl.constexpr):
    """A head's number in fp32, or a tile with one for each channel."""
    if S.HEAD:
        return tl.load(p + i_h).to(tl.float32)
    else:
        return tl.load(p + i_h * S.K + o_n, mask=m_g, other=0.0).to(tl.float32)


@triton.jit
def row_of(x, i: tl.constexpr, N: tl.constexpr):
    """[N]: the first N columns of row i of x [4, BN]."""
    BN: tl.constexpr = x.shape[1]
    m_n = (tl.arange(0, 4)[:, None] == i) & (tl.arange(0, BN)[None, :] < N)
    b_x = tl.sum(tl.where(m_n, x, 0.0), axis=0)
    if BN > N:
        b_x = tl.sum(tl.reshape(b_x, [BN // N, N]), axis=0)  # all but the first are zero
    return b_x


@triton.jit
def step_mixer_kernel(
    x, cache, taps, bias, state, decay, gate, beta, norm, eps, o, scale, S: tl.constexpr,
    R: tl.constexpr,
):  # fmt: skip
    """x: `Rows` [B, D]; cache: `Window`; taps [D, W]; bias [D] or None; state: `State`, dense in
    its last two dims; decay: `Gate`; gate: `Rows` [B, H * V]; beta: `Beta`; norm [V]; o [B, H * V].
    """
    allow_next(S.EARLY)
    i_h, i_n = tl.program_id(0), tl.program_id(1).to(tl.int64)
    o_k, o_v = tl.arange(0, S.BK), tl.arange(0, S.BV)
    row, o_n = tl.arange(0, 4)[:, None], tl.arange(0, S.BN)[None, :]
    # The head's channels among those of the convolution; row 3 is the decay's.
    o_c = tl.where(row < 2, (row * S.H + i_h) * S.K, 2 * S.H * S.K + i_h * S.V) + o_n
    m_c = ((row < 2) & (o_n < S.K)) | ((row == 2) & (o_n < S.V))
    m_g = (row == 3) & (o_n < S.K)

    p_c = cache.ptr + i_n * cache.n + o_c.to(tl.int64) * cache.d
    past = load_past(p_c, cache.w, m_c, S.W)
    b_taps, b_bias = load_taps(taps, o_c, m_c, S.W), 0.0
    if bias is not None:
        b_bias = tl.load(bias + o_c, mask=m_c, other=0.0).to(tl.float32)
    p_S = state.ptr + i_n * state.n + i_h * state.h
    b_S = load_block(p_S, o_k, o_v, S.K, S.V)
    b_norm = load_row(norm, o_v, S.V, True)
    rate, b_shift, b_beta = 1.0, 0.0, 1.0
    if decay.A_log is not None:
        rate = tl.exp(tl.load(decay.A_log + i_h).to(tl.float32))
    if decay.dt_bias is not None:
        b_shift = load_decay(decay.dt_bias, i_h, o_n, m_g, S)

    wait_for_last(S.EARLY)
    b_x = tl.load(x.ptr + i_n * x.row + o_c, mask=m_c, other=0.0)
    b_g = load_decay(decay.g + i_n * decay.row, i_h, o_n, m_g, S)
    b_a = load_row(gate.ptr + i_n * gate.row + i_h * S.V, o_v, S.V, True)
    if beta.ptr is not None:
        b_beta = tl.load(beta.ptr + i_n * beta.row + i_h).to(tl.float32)
    if R.BETA_SIGMOID:
        b_beta = beta.factor * sigmoid(b_beta)

    b_y = convolved(b_x, past, b_taps, b_bias)
    b_y *= sigmoid(b_y)
    store_window(p_c, cache.w, b_x, past, m_c, S.W)
    if R.NORM:
        b_y *= tl.where(row < 2, tl.rsqrt(tl.sum(b_y * b_y, axis=1) + EPS)[:, None], 1.0)
    b_g = gate_value(b_g + b_shift, rate, decay.bound, R.GATE)
    if R.EXP2:
        b_g *= LOG2E
    b_g = decay_exp(b_g, R.EXP2)
    if not S.HEAD:
        b_g = row_of(b_g, 3, S.BK)[:, None]

    b_q, b_k, b_u = row_of(b_y, 0, S.BK), row_of(b_y, 1, S.BK), row_of(b_y, 2, S.BV)
    b_S *= b_g
    if S.REMOVES:
        b_u -= tl.sum(b_k[:, None] * b_S, axis=0)
    b_u *= b_beta
    b_o = scale * (tl.sum(b_q[:, None] * b_S, axis=0) + tl.sum(b_q * b_k, axis=0) * b_u)
    b_o *= tl.rsqrt(tl.sum(b_o * b_o, axis=0) / S.V + eps) * b_norm * sigmoid(b_a)
    if S.SILU:
        b_o *= b_a
    p_o = o + (i_n * S.H + i_h) * S.V + o_v
    tl.store(p_o, b_o.to(o.dtype.element_ty), mask=o_v < S.V)
    store_block(p_S, b_S + b_k[:, None] * b_u[None, :], o_k, o_v, S.K, S.V)


def fits(m: StepMixer) -> bool:
    """Whether the kernel takes these sizes, dtypes and layouts."""
    B, HV, K, V = m.state.shape
    parameters = m.taps, m.bias, m.A_log, m.dt_bias, m.norm
    return (
        B <= MAX_ROWS
        and m.key_heads == HV
        and power_of_two(K) * power_of_two(V) <= MAX_STATE
        and m.window.shape[2] <= MAX_TAPS
        and m.rule.removal != "p"
        and not m.rule.state_v_first
        and m.state.dtype == torch.float32
        and m.state.stride()[2:] == (V, 1)
        and all(t is None or t.is_contiguous() for t in parameters)
    )


def step_mixer(m: StepMixer) -> Tensor:
    """As in kernels/backend.py, for what `fits`."""
    rule, (qkv, decay, gate) = m.rule, map(unit_rows, (m.qkv, m.decay, m.gate))
    B, H, K, V = m.state.shape
    BK, BV, early = power_of_two(K), power_of_two(V), starts_early(qkv)
    choices = rule.per_head, rule.removal == "k", m.activation == "silu", early
    beta = None if m.beta is None else unit_rows(m.beta)
    o = torch.empty(B, H * V, dtype=qkv.dtype, device=qkv.device)
    launch_early(
        step_mixer_kernel,
        (H, B),
        Rows(qkv, qkv.stride(0), 0),
        Window(m.window, *m.window.stride()),
        m.taps,
        m.bias,
        state(m.state),
        Gate(decay, decay.stride(0), 0, m.A_log, m.dt_bias, rule.lower_bound or 0.0),
        Rows(gate, gate.stride(0), 0),
        Beta(beta, 0 if beta is None else beta.stride(0), rule.beta_factor or 1.0),
        m.norm,
        m.eps,
        o,
        rule.scale,
        MixerShape(H, K, V, m.window.shape[2], BK, BV, max(BK, BV), *choices),
        rule_options(rule, qkv.dtype),
        early=early,
        num_warps=max(1, BK * BV // 2048),
    )
    for cache in (m.window, m.state):
        if not cache.is_inference():
            torch.autograd.graph.increment_version(cache)
    return o
