"""The gate alone: raw projection -> log decay, and its adjoint, one pass each.

A program takes the tokens of one tile and one head. Backward, it leaves its share of the gradients
of A_log and dt_bias, which are then summed.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from fla_cp.kernels.triton.device.blocks import load_rows, store_rows, unit_rows
from fla_cp.kernels.triton.device.gates import GATES
from fla_cp.kernels.triton.launch import cdiv, launch
from fla_cp.kernels.triton.tile_table import power_of_two
from fla_cp.rule import DeltaRule

ELEMENTS = 4096
"""Of a [BT, BK] tile."""

TOKENS = 256
"""Least tokens of a program of the backward: what a row of partial sums stands for."""


@triton.jit
def load_head(A_log, dt_bias, i_h, o_k, K: tl.constexpr):
    """exp(A_log), 1 without; dt_bias [1, BK], 0 without."""
    rate, b_bias = 1.0, 0.0
    if A_log is not None:
        rate = tl.exp(tl.load(A_log + i_h).to(tl.float32))
    if dt_bias is not None:
        p = dt_bias + i_h * K + o_k
        b_bias = tl.load(p, mask=o_k < K, other=0.0).to(tl.float32)[None, :]
    return rate, b_bias


@triton.jit
def gate_kernel(
    g,
    A_log,
    dt_bias,
    out,
    T,
    g_t,
    g_h,
    bound,
    H: tl.constexpr,
    K: tl.constexpr,
    BT: tl.constexpr,
    BK: tl.constexpr,
    GATE: tl.constexpr,
):
    """out [T, H, K], fp32; g [T, H, K], A_log [H], dt_bias [H*K]."""
    i_h = (tl.program_id(0) % H).to(tl.int64)
    o_t = (tl.program_id(0) // H).to(tl.int64) * BT + tl.arange(0, BT)
    o_k, m_t = tl.arange(0, BK), o_t < T
    rate, b_bias = load_head(A_log, dt_bias, i_h, o_k, K)
    raw = load_rows(g + i_h * g_h, o_t, g_t, m_t, o_k, K).to(tl.float32) + b_bias
    store_rows(out + i_h * K, GATE(raw, rate, bound), o_t, H * K, m_t, o_k, K)


@triton.jit
def gate_bwd_kernel(
    g,
    A_log,
    dt_bias,
    dout,
    dg,
    dA_log,
    ddt_bias,
    T,
    g_t,
    g_h,
    bound,
    H: tl.constexpr,
    K: tl.constexpr,
    BT: tl.constexpr,
    BK: tl.constexpr,
    STEPS: tl.constexpr,
    GATE: tl.constexpr,
    SLOPE: tl.constexpr,
    RATE_SCALES_RAW: tl.constexpr,
):
    """dg [T, H, K]; a program's shares dA_log [*, H] and ddt_bias [*, H, K], fp32, None without."""
    i_h = (tl.program_id(0) % H).to(tl.int64)
    i_t = (tl.program_id(0) // H).to(tl.int64)
    o_k = tl.arange(0, BK)
    rate, b_bias = load_head(A_log, dt_bias, i_h, o_k, K)
    b_rate, b_raw = tl.zeros([BT, BK], tl.float32), tl.zeros([BT, BK], tl.float32)
    for step in range(STEPS):
        o_t = (i_t * STEPS + step) * BT + tl.arange(0, BT)
        m_t = o_t < T
        raw = load_rows(g + i_h * g_h, o_t, g_t, m_t, o_k, K).to(tl.float32) + b_bias
        b_d = load_rows(dout + i_h * K, o_t, H * K, m_t, o_k, K)
        slope = SLOPE(raw, rate, bound)
        b_draw = b_d * slope
        store_rows(dg + i_h * K, b_draw, o_t, H * K, m_t, o_k, K)
        if dt_bias is not None:
            b_raw += b_draw
        if A_log is not None:
            if RATE_SCALES_RAW:  # d value / d A_log = raw d value / d raw
                b_rate += b_draw * raw
            else:
                b_rate += b_d * GATE(raw, rate, bound)
    if A_log is not None:
        tl.store(dA_log + i_t * H + i_h, tl.sum(tl.sum(b_rate, axis=1), axis=0))
    if dt_bias is not None:
        p = ddt_bias + (i_t * H + i_h) * K + o_k
        tl.store(p, tl.sum(b_raw, axis=0), mask=o_k < K)


def _tile(K: int) -> dict[str, int]:
    BK = power_of_two(K)
    return {"K": K, "BK": BK, "BT": max(1, ELEMENTS // BK), "num_warps": 4}


def _gate_name(lower_bound: float | None) -> str:
    return "softplus" if lower_bound is None else "sigmoid"


def _run(
    g: Tensor, A_log: Tensor | None, dt_bias: Tensor | None, lower_bound: float | None
) -> Tensor:
    g = unit_rows(g)
    T, H, K = g.shape
    out = torch.empty(T, H, K, dtype=torch.float32, device=g.device)
    tile = _tile(K)
    if out.numel():
        launch(
            gate_kernel,
            (cdiv(T, tile["BT"]) * H,),
            g,
            None if A_log is None else A_log.contiguous(),
            None if dt_bias is None else dt_bias.contiguous(),
            out,
            T,
            *g.stride()[:2],
            lower_bound or 0.0,
            H=H,
            GATE=GATES[_gate_name(lower_bound)][0],
            **tile,
        )
    return out


def _run_backward(
    dout: Tensor, g: Tensor, A_log: Tensor | None, dt_bias: Tensor | None, lower_bound: float | None
) -> list[Tensor]:
    """dg, dA_log, ddt_bias, an empty tensor for what is missing."""
    g = unit_rows(g)
    T, H, K = g.shape
    tile = _tile(K)
    steps = max(1, TOKENS // tile["BT"])
    n = cdiv(T, tile["BT"] * steps)
    dg = torch.empty(T, H, K, dtype=g.dtype, device=g.device)
    dA_log, ddt_bias = (
        torch.empty(n, H, *s, dtype=torch.float32, device=g.device) for s in ((), (K,))
    )
    name = _gate_name(lower_bound)
    if dg.numel():
        launch(
            gate_bwd_kernel,
            (n * H,),
            g,
            None if A_log is None else A_log.contiguous(),
            None if dt_bias is None else dt_bias.contiguous(),
            dout.contiguous(),
            dg,
            dA_log,
            ddt_bias,
            T,
            *g.stride()[:2],
            lower_bound or 0.0,
            H=H,
            STEPS=steps,
            GATE=GATES[name][0],
            SLOPE=GATES[name][1],
            RATE_SCALES_RAW=name == "sigmoid",
            **tile,
        )
    sums = (
        g.new_empty(0) if x is None else part.sum(0).view(x.shape).to(x.dtype)
        for part, x in ((dA_log, A_log), (ddt_bias, dt_bias))
    )
    return [dg, *sums]


# As torch.library ops, so that torch.compile need not look inside.

_ARGUMENTS = "Tensor g, Tensor? A_log, Tensor? dt_bias, float? lower_bound"
gate_op = torch.library.custom_op(
    "fla_cp::kda_gate", _run, mutates_args=(), schema=f"({_ARGUMENTS}) -> Tensor"
)
gate_backward_op = torch.library.custom_op(
    "fla_cp::kda_gate_backward",
    _run_backward,
    mutates_args=(),
    schema=f"(Tensor dout, {_ARGUMENTS}) -> Tensor[]",
)


@gate_op.register_fake
def _fake(g: Tensor, *rest: Any) -> Tensor:
    return torch.empty(g.shape, dtype=torch.float32, device=g.device)


@gate_backward_op.register_fake
def _backward_fake(dout: Tensor, *rest: Any) -> list[Tensor]:
    return [
        dout.new_empty(0) if t is None else torch.empty(t.shape, dtype=t.dtype, device=t.device)
        for t in rest[:3]
    ]


def _setup(ctx: Any, inputs: tuple, output: Tensor) -> None:
    *tensors, ctx.lower_bound = inputs
    ctx.save_for_backward(*tensors)


def _backward(ctx: Any, dout: Tensor) -> tuple[Tensor | None, ...]:
    grads = gate_backward_op(dout, *ctx.saved_tensors, ctx.lower_bound)
    given = zip(grads, ctx.saved_tensors, strict=True)
    return (*(None if t is None else d for d, t in given), None)


torch.library.register_autograd("fla_cp::kda_gate", _backward, setup_context=_setup)


def gate(rule: DeltaRule, g: Tensor, A_log: Tensor | None, dt_bias: Tensor | None) -> Tensor:
    flat = g.reshape(-1, *g.shape[-2:])
    return gate_op(flat, A_log, dt_bias, rule.lower_bound).view(g.shape)
