"""Gate activation inside kernels: value and derivatives."""

import triton
import triton.language as tl

LOG2E = tl.constexpr(1.4426950408889634)
SMALLEST_BETA = tl.constexpr(2.0**-60)
"""See `away_from_zero`."""


@triton.jit
def sigmoid(x):
    """1 / (1 + exp(-x)). A squared rsqrt is one instruction; a division would be eight."""
    root = tl.rsqrt(1.0 + tl.exp2(x * -LOG2E))
    return root * root


@triton.jit
def softplus(x):
    """log(1 + exp(x)), exact for every x: no linear shortcut."""
    return tl.maximum(x, 0.0) + tl.log2(1.0 + tl.exp2(tl.abs(x) * -LOG2E)) / LOG2E


@triton.jit
def gate_value(raw, rate, bound, GATE: tl.constexpr):
    """The log decay: raw itself ("given"), -rate softplus(raw), or bound sigmoid(rate raw)."""
    if GATE == "softplus":
        return -rate * softplus(raw)
    elif GATE == "sigmoid":
        return bound * sigmoid(rate * raw)
    else:
        return raw


@triton.jit
def gate_slope(raw, rate, bound, GATE: tl.constexpr):
    """d value / d raw."""
    if GATE == "softplus":
        return -rate * sigmoid(raw)
    elif GATE == "sigmoid":
        s = sigmoid(rate * raw)
        return bound * rate * s * (1.0 - s)
    else:
        return raw * 0.0 + 1.0


@triton.jit
def rate_slope(raw, rate, bound, d, d_raw, GATE: tl.constexpr):
    """d A_log, element by element, from the gradients of the value (d) and of raw."""
    if GATE == "sigmoid":
        return d_raw * raw
    else:
        return d * gate_value(raw, rate, bound, GATE)


@triton.jit
def load_beta(beta, start, i_hv, o_i, m_i, SIGMOID: tl.constexpr):
    """Beta of a chunk's rows [BT] after its sigmoid, zero beyond the chunk."""
    b_beta = tl.where(m_i, 1.0, 0.0)
    if beta.ptr is not None:
        at = beta.ptr + (i_hv + start * beta.row)
        b_beta = tl.load(at + o_i * beta.row, mask=m_i, other=0.0).to(tl.float32)
    if SIGMOID:
        b_beta = tl.where(m_i, beta.factor * sigmoid(b_beta), 0.0)
    return b_beta


@triton.jit
def away_from_zero(b_beta, m_i):
    """Betas of rows m_i at least 2^-60 away from zero: no result can tell it from zero, but a
    gradient may be divided by it."""
    return tl.where(m_i & (tl.abs(b_beta) < SMALLEST_BETA), SMALLEST_BETA, b_beta)
