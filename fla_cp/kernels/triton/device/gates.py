"""Gate activation inside kernels: value and derivative. One function a gate."""

import triton
import triton.language as tl

LOG2E = tl.constexpr(1.4426950408889634)


@triton.jit
def sigmoid(x):
    """1 / (1 + exp(-x)); a squared rsqrt is one instruction where a division is eight."""
    root = tl.rsqrt(1.0 + tl.exp2(x * -LOG2E))
    return root * root


@triton.jit
def softplus(x):
    """log(1 + exp(x)), exact for every x: no linear shortcut."""
    return tl.maximum(x, 0.0) + tl.log2(1.0 + tl.exp2(tl.abs(x) * -LOG2E)) / LOG2E


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
    s = sigmoid(rate * raw)
    return bound * rate * s * (1.0 - s)


GATES = {
    "given": (given, given_slope),
    "softplus": (softplus_gate, softplus_slope),
    "sigmoid": (sigmoid_gate, sigmoid_slope),
}
"""(value, d value / d raw); d value / d A_log is g for softplus, raw * slope for sigmoid."""
