"""Gate activation inside kernels: value and derivative. One function a gate."""

import triton
import triton.language as tl


@triton.jit
def sigmoid(x):
    return 1.0 / (1.0 + tl.exp(-x))


@triton.jit
def softplus(x):
    """log(1 + exp(x)), exact for every x: no linear shortcut."""
    return tl.maximum(x, 0.0) + tl.log(1.0 + tl.exp(-tl.abs(x)))


@triton.jit
def given(raw, rate, bound):
    return raw


@triton.jit
def given_slope(raw, rate, bound):
    return raw * 0.0 + 1.0


@triton.jit
def softplus_gate(raw, rate, bound):
    return -rate * softplus(raw)


@triton.jit
def softplus_slope(raw, rate, bound):
    return -rate * sigmoid(raw)


@triton.jit
def sigmoid_gate(raw, rate, bound):
    return bound * sigmoid(rate * raw)


@triton.jit
def sigmoid_slope(raw, rate, bound):
    z = rate * raw
    return bound * rate * sigmoid(z) * sigmoid(-z)


GATES = {
    "given": (given, given_slope),
    "softplus": (softplus_gate, softplus_slope),
    "sigmoid": (sigmoid_gate, sigmoid_slope),
}
"""(value, d value / d raw); d value / d A_log is g for softplus, raw * slope for sigmoid."""
