"""Convolution, recurrence and gated norm of a decoding step in one kernel (kernels/backend.py).

A program has one sequence and one head of q and k, with its value heads in turn. It holds a whole
state in registers, since the norm needs all values of a head. State and weights are loaded before
the program waits for the kernel ahead, which forms q, k and v. The output does not wait for the new
state: q (S + k u^T) = q S + (q k) u^T.

Channels of q, k, v and decay are the rows of one [4, BN] tile up to the end of their activations,
so that each thread has few of them. Triton computes a vector that has fewer elements than there are
threads again in each layout in which it is used, from its loads on: for channels of keys as rows of
a state, a thread would have 16 instead of one.
"""

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from fla_cp.kernels.torch.decoding import StepMixer
from fla_cp.kernels.triton.conv import MAX_TAPS, load_taps, weighted
from fla_cp.kernels.triton.device.blocks import EPS, decay_exp, load_block, store_block, unit_rows
from fla_cp.kernels.triton.device.bundles import Rows, constants, rule_options
from fla_cp.kernels.triton.device.gates import LOG2E, gate_value, sigmoid
from fla_cp.kernels.triton.early import allow_next, launch_early, starts_early, wait_for_last
from fla_cp.kernels.triton.recurrent import load_row
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


REGISTERS = 128
"""The most registers of a thread, so that an SM holds two programs of 256 threads, of which one
loads its state while the other one computes. More are needed for a low-rank product, and for
several value heads, of which the compiler loads the next one early."""


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
    low-rank matrix. BK, BV, BN, BC: powers of two, BN for
    K and V. HEAD: one decay a head. REMOVES: whether k reads
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
    BN: int
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
def channels_of(i_g, i_h, first: tl.constexpr, S: tl.constexpr):
    """[4, BN]: channels of q, k and v of a head, and which exist; those of q and k only with
    `first`. The last row is that of decays."""
    row, o_n = tl.arange(0, 4)[:, None], tl.arange(0, S.BN)[None, :]
    o_c = tl.where(row < 2, (row * S.H + i_g) * S.K, 2 * S.H * S.K + i_h * S.V) + o_n
    m_c = (row == 2) & (o_n < S.V)
    if first:
        m_c |= (row < 2) & (o_n < S.K)
    return o_c, m_c


@triton.jit
def load_channels(cache, weight, bias, i_n, o_c, m_c, W: tl.constexpr):
    """Where the windows of channels are, what they hold, the taps and the bias."""
    p = cache.ptr + i_n * cache.n + o_c.to(tl.int64) * cache.d
    b_bias = 0.0
    if bias is not None:
        b_bias = tl.load(bias + o_c, mask=m_c, other=0.0).to(tl.float32)
    return p, load_past(p, cache.w, m_c, W), load_taps(weight, o_c, m_c, W), b_bias


@triton.jit
def convolved(channels, b_x):
    """The convolution with SiLU at the token b_x, in fp32."""
    _, window, taps, b_bias = channels
    b_y = weighted(taps, (b_x.to(tl.float32),) + read_as(window, b_x.dtype), b_bias)
    return b_y * sigmoid(b_y)


@triton.jit
def row_of(x, i: tl.constexpr, N: tl.constexpr):
    """[N]: the first N columns of row i of x [4, BN]."""
    b_x = tl.sum(tl.where(tl.arange(0, 4)[:, None] == i, x, 0.0), axis=0)
    if x.shape[1] > N:
        b_x = tl.sum(tl.reshape(b_x, [x.shape[1] // N, N]), axis=0)  # others are zero
    return b_x


@triton.jit
def load_decay(p, i_h, S: tl.constexpr):
    """[BK] in fp32, or the number of a head."""
    if S.HEAD:
        return tl.load(p + i_h).to(tl.float32)
    else:
        return load_row(p + i_h * S.K, tl.arange(0, S.BK), S.K, True)


@triton.jit
def load_matrix(weight, row, o_r, o_c, N: tl.constexpr, C: tl.constexpr):
    """[BN, BC]: N rows of a low-rank matrix, zero outside."""
    m_rc = (o_r < N)[:, None] & (o_c < C)[None, :]
    return tl.load(weight + (row + o_r)[:, None] * C + o_c[None, :], mask=m_rc, other=0.0)


@triton.jit
def load_head(state, n, h, low, dt_bias, A_log, i_n, i_h, S: tl.constexpr):
    """What a value head needs that no kernel writes since the step began, beside its channels: its
    state, the low-rank matrices of gate and decay, the bias of the raw decay, and A_log."""
    o_k, o_v, o_c = tl.arange(0, S.BK), tl.arange(0, S.BV), tl.arange(0, S.BC)
    b_S = load_block(state + i_n * n + i_h * h, o_k, o_v, S.K, S.V)
    matrices, b_bias, b_A = (), 0.0, 0.0
    if low.x is not None:
        rows = S.H * S.G * S.V
        gates = load_matrix(low.weight, i_h * S.V, o_v, o_c, S.V, S.C)
        matrices = (gates, load_matrix(low.weight, rows + i_h * S.K, o_k, o_c, S.K, S.C))
    if dt_bias is not None:
        b_bias = load_decay(dt_bias, i_h, S)
    if A_log is not None:
        b_A = tl.load(A_log + i_h).to(tl.float32)
    return b_S, matrices, b_bias, b_A


@triton.jit
def load_inputs(gate, decay, low, beta, i_n, i_h, S: tl.constexpr):
    """What the kernels ahead form for a value head beside its channels: raw gate and decay, and
    beta. With `low` gate and decay are the inputs of their products, [BC]."""
    o_v, o_c, b_beta = tl.arange(0, S.BV), tl.arange(0, S.BC), 1.0
    if beta.ptr is not None:
        b_beta = tl.load(beta.ptr + i_n * beta.row + i_h).to(tl.float32)
    if low.x is not None:
        b_a = load_row(low.x + i_n * low.row, o_c, S.C, True)
        b_g = load_row(low.x + i_n * low.row + S.C, o_c, S.C, True)
    else:
        b_a = load_row(gate.ptr + i_n * gate.row + i_h * S.V, o_v, S.V, True)
        b_g = load_decay(decay.ptr + i_n * decay.row, i_h, S)
    return b_a, b_g, b_beta


@triton.jit
def applied(matrix, b_x, bias, row, o_r, N: tl.constexpr):
    """[BN]: rows of a low-rank matrix, which are loaded, times b_x [BC], with their bias."""
    b_y = tl.sum(matrix.to(tl.float32) * b_x[None, :], axis=1)
    if bias is not None:
        b_y += tl.load(bias + row + o_r, mask=o_r < N, other=0.0).to(tl.float32)
    return b_y


@triton.jit
def decay_of(b_g, bound, b_A, R: tl.constexpr, HAS_RATE: tl.constexpr):
    """The factors by which a state decays, from raw decays."""
    rate = 1.0
    if HAS_RATE:
        rate = tl.exp(b_A)
    b_g = gate_value(b_g, rate, bound, R.GATE)
    if R.EXP2:
        b_g *= LOG2E
    return decay_exp(b_g, R.EXP2)


@triton.jit
def with_decay(b_y, b_g, S: tl.constexpr):
    """[4, BN]: b_y with b_g [BK] as its last row."""
    if S.BK < S.BN:
        b_g = tl.reshape(tl.broadcast_to(b_g[None, :], [S.BN // S.BK, S.BK]), [S.BN])
    return tl.where(tl.arange(0, 4)[:, None] == 3, b_g[None, :], b_y)


@triton.jit
def unit_rows_of(b_y):
    """[4, BN]: the rows of q and k divided by their lengths."""
    row = tl.arange(0, 4)
    factor = tl.where(row < 2, tl.rsqrt(tl.sum(b_y * b_y, axis=1) + EPS), 1.0)
    return b_y * factor[:, None]


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
    o_k, o_v, row = tl.arange(0, S.BK), tl.arange(0, S.BV), tl.arange(0, 4)[:, None]
    b_norm = load_row(norm, o_v, S.V, True)
    b_q = tl.zeros([S.BK], tl.float32)
    b_k, b_qk = b_q, 0.0
    for j in tl.static_range(S.G):
        i_h = i_g * S.G + j
        o_c, m_c = channels_of(i_g, i_h, j == 0, S)
        channels = load_channels(cache, taps, bias, i_n, o_c, m_c, S.W)
        b_S, matrices, b_bias, b_A = load_head(state, n, h, low, dt_bias, A_log, i_n, i_h, S)
        if j == 0:
            wait_for_last(S.EARLY)
        b_x = tl.load(x.ptr + i_n * x.row + o_c, mask=m_c, other=0.0)
        b_a, b_g, b_beta = load_inputs(gate, decay, low, beta, i_n, i_h, S)
        if low.x is not None:
            b_a = applied(matrices[0], b_a, low.bias, i_h * S.V, o_v, S.V)
            at = S.H * S.G * S.V + i_h * S.K
            b_g = applied(matrices[1], b_g, low.bias, at, o_k, S.K)
        if R.BETA_SIGMOID:
            b_beta = beta_factor * sigmoid(b_beta)
        b_y = convolved(channels, b_x)
        tl.debug_barrier()  # all threads have read the windows
        store_window(channels[0], cache.w, channels[1], b_x, m_c, S.W)
        if R.NORM and j == 0:
            b_y = unit_rows_of(b_y)
        b_g += b_bias
        if S.HEAD:
            b_decay = decay_of(b_g, bound, b_A, R, A_log is not None)
        else:
            b_y = with_decay(b_y, b_g, S)
            b_y = tl.where(row == 3, decay_of(b_y, bound, b_A, R, A_log is not None), b_y)
            b_decay = row_of(b_y, 3, S.BK)[:, None]
        if j == 0:
            b_q, b_k = row_of(b_y, 0, S.BK), row_of(b_y, 1, S.BK)
            b_qk = tl.sum(b_q * b_k, axis=0)
        b_S *= b_decay
        b_u = row_of(b_y, 2, S.BV)
        if S.REMOVES:
            b_u -= tl.sum(b_k[:, None] * b_S, axis=0)
        b_u *= b_beta
        b_o = scale * (tl.sum(b_q[:, None] * b_S, axis=0) + b_qk * b_u)
        b_o *= tl.rsqrt(tl.sum(b_o * b_o, axis=0) / S.V + eps) * b_norm
        b_o *= sigmoid(b_a)
        if S.SILU:
            b_o *= b_a
        p = o + (i_n * S.H * S.G + i_h) * S.V + o_v
        tl.store(p, b_o.to(o.dtype.element_ty), mask=o_v < S.V)
        b_S += b_k[:, None] * b_u[None, :]
        store_block(state + i_n * n + i_h * h, b_S, o_k, o_v, S.K, S.V)


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
    tiles = power_of_two(K), power_of_two(V), power_of_two(max(K, V)), BC
    choices = rule.per_head, rule.removal == "k", m.activation == "silu", early
    S = MixerShape(H, HV // H, K, V, W, C, *tiles, *choices)
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
        **{"maxnreg": REGISTERS} if low.x is None and S.G == 1 else {},
    )
    for cache in (m.window, state):
        if not cache.is_inference():
            torch.autograd.graph.increment_version(cache)
    return o


def _rows(x: Tensor | None) -> Rows:
    """x [B, N], with unit stride in N."""
    x = x if x is None else unit_rows(x)
    return Rows(x, 0 if x is None else x.stride(0), 0)
