"""Convolution, recurrence and gated norm of a decoding step in one kernel (kernels/backend.py).

A program has one sequence and one head of q and k, with its value heads in turn. It holds a whole
state in registers, since the norm needs all values of a head. State and weights are loaded before
the program waits for the kernel ahead, which forms q, k and v. What o reads is summed while it is
formed: q (S + k u^T) = q S + (q k) u^T, so that the new state is only written.
"""

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from fla_cp.kernels.torch.decoding import StepMixer
from fla_cp.kernels.triton.conv import MAX_TAPS, load_bias, load_taps, weighted
from fla_cp.kernels.triton.device.blocks import (
    EPS,
    decay_exp,
    load_block,
    store_block,
    unit_rows,
)
from fla_cp.kernels.triton.device.bundles import Rows, constants, rule_options
from fla_cp.kernels.triton.device.gates import LOG2E, gate_value, sigmoid
from fla_cp.kernels.triton.early import allow_next, launch_early, starts_early, wait_for_last
from fla_cp.kernels.triton.recurrent import load_gates, load_row
from fla_cp.kernels.triton.tile_table import power_of_two

ENABLED = True
"""Whether one kernel computes the three stages. `python -m benchmarks.decode` measures a step
without it, too."""

MAX_STATE = 128 * 128
"""The most elements of a state that a program holds, 64 for each of 256 threads."""

MAX_MATRIX = 128 * 128
"""The most elements of a head's low-rank matrices, of which a program holds two in 16 bits."""

LOW_RANK_ROWS = 4
"""The most sequences for which the kernel also computes the low-rank product: each program reads
its weights, for each sequence again."""


class Window(NamedTuple):
    """The last tokens [N, D, W] of sequences, and their strides."""

    ptr: Tensor
    n: int
    d: int
    w: int


class LowRank(NamedTuple):
    """The product that gives gate and decay: x [B, 2, C] with its stride of rows, weight
    [2, HV * K, C], bias [2 * HV * K] or None; x None: there is none."""

    x: Tensor | None
    row: int
    weight: Tensor | None
    bias: Tensor | None


@constants
class MixerShape(NamedTuple):
    """H: heads of q and k. G: value heads for each. K, V, W: channels and taps. C: columns of a
    low-rank matrix. BK, BV, BC: powers of two. HEAD: one decay a head. REMOVES: whether k reads
    from the state what is removed. SILU: the gate's activation is SiLU, otherwise sigmoid. EARLY:
    see early.py."""

    H: int
    G: int
    K: int
    V: int
    W: int
    C: int
    BK: int
    BV: int
    BC: int
    HEAD: bool
    REMOVES: bool
    SILU: bool
    EARLY: bool


@triton.jit
def load_past(p, step, m_c, W: tl.constexpr):
    """The W - 1 tokens before the one that comes, nearest first, in the cache's dtype."""
    window = ()
    for s in tl.static_range(1, W):
        window = window + (tl.load(p + (W - s) * step, mask=m_c, other=0.0),)
    return window


@triton.jit
def read_as(window, dtype: tl.constexpr):
    """The tokens rounded to dtype, in fp32."""
    seen = ()
    for s in tl.static_range(len(window)):
        seen = seen + (window[s].to(dtype).to(tl.float32),)
    return seen


@triton.jit
def store_window(p, step, window, b_x, m_c, W: tl.constexpr):
    """Writes the window moved by one, with b_x as the last token. Other threads may have read the
    same elements: they must have done so before."""
    for s in tl.static_range(1, W):
        tl.store(p + (W - 1 - s) * step, window[s - 1], mask=m_c)
    tl.store(p + (W - 1) * step, b_x.to(p.dtype.element_ty), mask=m_c)


@triton.jit
def load_channels(cache, weight, bias, i_n, o_c, m_c, W: tl.constexpr):
    """Where the windows of channels are, what they hold, the taps and the bias."""
    p = cache.ptr + i_n * cache.n + o_c.to(tl.int64) * cache.d
    taps, b_bias = load_taps(weight, o_c, m_c, W), load_bias(bias, o_c, m_c)
    return p, load_past(p, cache.w, m_c, W), taps, b_bias


@triton.jit
def convolved(channels, b_x):
    """The convolution with SiLU at the token b_x, in fp32."""
    _, window, taps, b_bias = channels
    b_y = weighted(taps, (b_x.to(tl.float32),) + read_as(window, b_x.dtype), b_bias)
    return b_y * sigmoid(b_y)


@triton.jit
def load_matrix(weight, row, o_r, o_c, N: tl.constexpr, C: tl.constexpr):
    """[BN, BC]: N rows of a low-rank matrix, zero outside."""
    m_rc = (o_r < N)[:, None] & (o_c < C)[None, :]
    return tl.load(weight + (row + o_r)[:, None] * C + o_c[None, :], mask=m_rc, other=0.0)


@triton.jit
def load_head(state, n, h, cache, taps, bias, low, dt_bias, A_log, i_n, i_h, S: tl.constexpr):
    """What a value head needs that no kernel writes since the step began: its state, the windows of
    v, the low-rank matrices of gate and decay, the bias of the raw decay, and A_log."""
    o_k, o_v, o_c = tl.arange(0, S.BK), tl.arange(0, S.BV), tl.arange(0, S.BC)
    b_S = load_block(state + i_n * n + i_h * h, o_k, o_v, S.K, S.V)
    channel = 2 * S.H * S.K + i_h * S.V
    channels = load_channels(cache, taps, bias, i_n, channel + o_v, o_v < S.V, S.W)
    matrices, b_bias, b_A = (), 0.0, 0.0
    if low.x is not None:
        rows = S.H * S.G * S.V
        gates = load_matrix(low.weight, i_h * S.V, o_v, o_c, S.V, S.C)
        matrices = (gates, load_matrix(low.weight, rows + i_h * S.K, o_k, o_c, S.K, S.C))
    if dt_bias is not None:
        b_bias = load_gates(dt_bias + i_h * (1 if S.HEAD else S.K), o_k, S.K, True, S.HEAD)
    if A_log is not None:
        b_A = tl.load(A_log + i_h).to(tl.float32)
    return b_S, channels, matrices, b_bias, b_A


@triton.jit
def load_inputs(x, gate, decay, low, beta, i_n, i_h, S: tl.constexpr):
    """What the kernels ahead form for a value head: v, raw gate and decay, and beta. With `low`
    gate and decay are the inputs of their products, [BC]."""
    o_k, o_v, o_c = tl.arange(0, S.BK), tl.arange(0, S.BV), tl.arange(0, S.BC)
    p = x.ptr + i_n * x.row + 2 * S.H * S.K + i_h * S.V
    b_v, b_beta = tl.load(p + o_v, mask=o_v < S.V, other=0.0), 1.0
    if beta.ptr is not None:
        b_beta = tl.load(beta.ptr + i_n * beta.row + i_h).to(tl.float32)
    if low.x is not None:
        b_a = load_row(low.x + i_n * low.row, o_c, S.C, True)
        b_g = load_row(low.x + i_n * low.row + S.C, o_c, S.C, True)
    else:
        b_a = load_row(gate.ptr + i_n * gate.row + i_h * S.V, o_v, S.V, True)
        p = decay.ptr + i_n * decay.row + i_h * (1 if S.HEAD else S.K)
        b_g = load_gates(p, o_k, S.K, True, S.HEAD)
    return b_v, b_a, b_g, b_beta


@triton.jit
def applied(matrix, b_x, bias, row, o_r, N: tl.constexpr):
    """[BN]: rows of a low-rank matrix, which are loaded, times b_x [BC], with their bias."""
    b_y = tl.sum(matrix.to(tl.float32) * b_x[None, :], axis=1)
    if bias is not None:
        b_y += tl.load(bias + row + o_r, mask=o_r < N, other=0.0).to(tl.float32)
    return b_y


@triton.jit
def unit_of(b_x, NORM: tl.constexpr):
    """b_x divided by its length with NORM, otherwise as it is."""
    if NORM:
        b_x *= tl.rsqrt(tl.sum(b_x * b_x, axis=0) + EPS)
    return b_x


@triton.jit
def step_mixer_kernel(
    x,
    cache,
    taps,
    bias,
    state,
    n,
    h,
    decay,
    gate,
    low,
    beta,
    A_log,
    dt_bias,
    bound,
    beta_factor,
    norm,
    eps,
    o,
    scale,
    S: tl.constexpr,
    R: tl.constexpr,
):
    """x: `Rows` [B, D]; cache: `Window`; taps [D, W]; bias [D] or None; state [B, HV, K, V] with
    its first two strides; decay, gate: `Rows`, absent with `low`; low: `LowRank`; beta: `Rows` (ptr
    None: 1); A_log, dt_bias: fp32 or None; norm [V]; o [B, HV * V]."""
    allow_next(S.EARLY)
    i_g, i_n = tl.program_id(0), tl.program_id(1).to(tl.int64)
    o_k, o_v = tl.arange(0, S.BK), tl.arange(0, S.BV)
    m_k, m_v = o_k < S.K, o_v < S.V
    c_q, c_k = i_g * S.K + o_k, (S.H + i_g) * S.K + o_k
    of_q = load_channels(cache, taps, bias, i_n, c_q, m_k, S.W)
    of_k = load_channels(cache, taps, bias, i_n, c_k, m_k, S.W)
    b_norm = load_row(norm, o_v, S.V, True)
    i_h = i_g * S.G
    head = load_head(state, n, h, cache, taps, bias, low, dt_bias, A_log, i_n, i_h, S)
    wait_for_last(S.EARLY)
    x_q = tl.load(x.ptr + i_n * x.row + c_q, mask=m_k, other=0.0)
    x_k = tl.load(x.ptr + i_n * x.row + c_k, mask=m_k, other=0.0)
    inputs = load_inputs(x, gate, decay, low, beta, i_n, i_h, S)
    b_q = unit_of(convolved(of_q, x_q), R.NORM)
    b_k = unit_of(convolved(of_k, x_k), R.NORM)
    b_qk = tl.sum(b_q * b_k, axis=0)
    for j in tl.static_range(S.G):
        i_h = i_g * S.G + j
        if j > 0:
            head = load_head(state, n, h, cache, taps, bias, low, dt_bias, A_log, i_n, i_h, S)
            inputs = load_inputs(x, gate, decay, low, beta, i_n, i_h, S)
        b_S, of_v, matrices, b_bias, b_A = head
        x_v, b_a, b_g, b_beta = inputs
        if low.x is not None:
            row = S.H * S.G * S.V + i_h * S.K
            b_a = applied(matrices[0], b_a, low.bias, i_h * S.V, o_v, S.V)
            b_g = applied(matrices[1], b_g, low.bias, row, o_k, S.K)
        if R.BETA_SIGMOID:
            b_beta = beta_factor * sigmoid(b_beta)
        rate = 1.0
        if A_log is not None:
            rate = tl.exp(b_A)
        b_g = gate_value(b_g + b_bias, rate, bound, R.GATE)
        if R.EXP2:
            b_g *= LOG2E
        b_S *= decay_exp(b_g, R.EXP2)[:, None]
        b_u = convolved(of_v, x_v)
        if S.REMOVES:
            b_u -= tl.sum(b_k[:, None] * b_S, axis=0)
        b_u *= b_beta
        b_o = scale * (tl.sum(b_q[:, None] * b_S, axis=0) + b_qk * b_u)
        b_o *= tl.rsqrt(tl.sum(b_o * b_o, axis=0) / S.V + eps) * b_norm
        b_o *= sigmoid(b_a)
        if S.SILU:
            b_o *= b_a
        p = o + (i_n * S.H * S.G + i_h) * S.V + o_v
        tl.store(p, b_o.to(o.dtype.element_ty), mask=m_v)
        b_S += b_k[:, None] * b_u[None, :]
        store_block(state + i_n * n + i_h * h, b_S, o_k, o_v, S.K, S.V)
        tl.debug_barrier()  # all threads have read the windows
        store_window(of_v[0], cache.w, of_v[1], x_v, m_v, S.W)
    store_window(of_q[0], cache.w, of_q[1], x_q, m_k, S.W)
    store_window(of_k[0], cache.w, of_k[1], x_k, m_k, S.W)


def fits(m: StepMixer) -> bool:
    """Whether the kernel takes these sizes, dtypes and layouts."""
    (K, V), (rule, state) = m.state.shape[2:], (m.rule, m.state)
    return (
        ENABLED
        and power_of_two(K) * power_of_two(V) <= MAX_STATE
        and m.window.shape[2] <= MAX_TAPS
        and rule.removal != "p"
        and not rule.state_v_first
        and state.dtype == torch.float32
        and state.stride()[2:] == (V, 1)
    )


def takes_low_rank(m: StepMixer) -> bool:
    """Whether the kernel also computes the product `low`."""
    if m.low is None or len(m.qkv) > LOW_RANK_ROWS:
        return False
    K, (_, _, C) = m.state.shape[2], m.low.weight.shape
    return power_of_two(K) * power_of_two(C) <= MAX_MATRIX and m.low.weight.dtype.itemsize == 2


def step_mixer(m: StepMixer) -> Tensor:
    """As in kernels/backend.py, for what `fits`; with `low` for what `takes_low_rank`."""
    rule, state, qkv = m.rule, m.state, unit_rows(m.qkv)
    B, HV, K, V = state.shape
    H, W = m.key_heads, m.window.shape[2]
    C, low = 0, LowRank(None, 0, None, None)
    if m.low is not None:
        C, inner = m.low.weight.shape[2], unit_rows(m.low.x)
        low = LowRank(inner, inner.stride(0), m.low.weight, m.low.bias)
    early, BC = starts_early(qkv), power_of_two(max(1, C))
    tiles, choices = (power_of_two(K), power_of_two(V), BC), (rule.per_head, rule.removal == "k")
    S = MixerShape(H, HV // H, K, V, W, C, *tiles, *choices, m.activation == "silu", early)
    o = torch.empty(B, HV * V, dtype=qkv.dtype, device=qkv.device)
    launch_early(
        step_mixer_kernel,
        (H, B),
        Rows(qkv, qkv.stride(0), 0),
        Window(m.window, *m.window.stride()),
        m.taps.contiguous(),
        m.bias,
        state,
        state.stride(0),
        state.stride(1),
        _rows(m.decay),
        _rows(m.gate),
        low,
        _rows(m.beta),
        *(None if x is None else x.contiguous() for x in (m.A_log, m.dt_bias)),
        rule.lower_bound or 0.0,
        rule.beta_factor or 1.0,
        m.norm.contiguous(),
        m.eps,
        o,
        rule.scale,
        S,
        rule_options(rule, qkv.dtype),
        early=early,
        num_warps=max(1, S.BK * S.BV // 2048),
    )
    for cache in (m.window, state):
        if not cache.is_inference():
            torch.autograd.graph.increment_version(cache)
    return o


def _rows(x: Tensor | None) -> Rows:
    """x [B, N], with unit stride in N."""
    x = x if x is None else unit_rows(x)
    return Rows(x, 0 if x is None else x.stride(0), 0)
