"""The gate alone: raw projection -> log decay, and its adjoint, one pass each.

A program takes the tokens of one tile and one head. In the backward it also writes its share of the
gradients of A_log and dt_bias, which are then summed.
"""

from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from fla_cp.kernels.differentiable_op import differentiable_op
from fla_cp.kernels.triton.device.blocks import gate_rows, load_rows, store_rows, unit_rows
from fla_cp.kernels.triton.device.bundles import Gate, Rows, constants
from fla_cp.kernels.triton.device.gates import gate_slope, gate_value, rate_slope
from fla_cp.kernels.triton.launch import cdiv, launch
from fla_cp.kernels.triton.tile_table import power_of_two
from fla_cp.rule import DeltaRule

ELEMENTS = 4096
"""Elements of a [BT, BK] tile."""

TOKENS = 256
"""The fewest tokens of a program of the backward, which writes one row of partial sums."""


@triton.jit
def load_head(gate, i_h, o_k, K: tl.constexpr):
    """exp(A_log), or 1 without A_log, and dt_bias [1, BK], or 0 without it."""
    rate, b_bias = 1.0, 0.0
    if gate.A_log is not None:
        rate = tl.exp(tl.load(gate.A_log + i_h).to(tl.float32))
    if gate.dt_bias is not None:
        p = gate.dt_bias + i_h * K + o_k
        b_bias = tl.load(p, mask=o_k < K, other=0.0).to(tl.float32)[None, :]
    return rate, b_bias


@triton.jit
def gate_kernel(gate, out, T, H: tl.constexpr, GATE: tl.constexpr, S: tl.constexpr):
    """out [T, H, K], fp32; gate: `Gate`; S: `GateTile`."""
    i_h = (tl.program_id(0) % H).to(tl.int64)
    o_t = (tl.program_id(0) // H).to(tl.int64) * S.BT + tl.arange(0, S.BT)
    o_k, m_t = tl.arange(0, S.BK), o_t < T
    rate, b_bias = load_head(gate, i_h, o_k, S.K)
    raw = load_rows(gate_rows(gate, 0, i_h), o_t, m_t, o_k, S.K).to(tl.float32) + b_bias
    value = gate_value(raw, rate, gate.bound, GATE)
    store_rows(out + i_h * S.K, value, o_t, H * S.K, m_t, o_k, S.K)


@triton.jit
def gate_bwd_kernel(
    gate, dout, dg, dA_log, ddt_bias, T, H: tl.constexpr, GATE: tl.constexpr, S: tl.constexpr
):
    """dg [T, H, K], and each program's shares of dA_log [*, H] and ddt_bias [*, H, K], fp32, which
    are written only if the gate has A_log and dt_bias."""
    i_h = (tl.program_id(0) % H).to(tl.int64)
    i_t = (tl.program_id(0) // H).to(tl.int64)
    o_k = tl.arange(0, S.BK)
    rate, b_bias = load_head(gate, i_h, o_k, S.K)
    g, d = gate_rows(gate, 0, i_h), Rows(dout + i_h * S.K, H * S.K, 0)
    b_rate, b_raw = tl.zeros([S.BT, S.BK], tl.float32), tl.zeros([S.BT, S.BK], tl.float32)
    for step in range(S.STEPS):
        o_t = (i_t * S.STEPS + step) * S.BT + tl.arange(0, S.BT)
        m_t = o_t < T
        raw = load_rows(g, o_t, m_t, o_k, S.K).to(tl.float32) + b_bias
        b_d = load_rows(d, o_t, m_t, o_k, S.K)
        b_draw = b_d * gate_slope(raw, rate, gate.bound, GATE)
        store_rows(dg + i_h * S.K, b_draw, o_t, H * S.K, m_t, o_k, S.K)
        if gate.dt_bias is not None:
            b_raw += b_draw
        if gate.A_log is not None:
            b_rate += rate_slope(raw, rate, gate.bound, b_d, b_draw, GATE)
    if gate.A_log is not None:
        tl.store(dA_log + i_t * H + i_h, tl.sum(tl.sum(b_rate, axis=1), axis=0))
    if gate.dt_bias is not None:
        p = ddt_bias + (i_t * H + i_h) * S.K + o_k
        tl.store(p, tl.sum(b_raw, axis=0), mask=o_k < S.K)


@constants
class GateTile(NamedTuple):
    """K, the tile [BT, BK], and how many tiles a program of the backward takes in turn."""

    K: int
    BT: int
    BK: int
    STEPS: int


def _tile(K: int) -> GateTile:
    BK = power_of_two(K)
    BT = max(1, ELEMENTS // BK)
    return GateTile(K, BT, BK, max(1, TOKENS // BT))


def _prepared(
    g: Tensor, A_log: Tensor | None, dt_bias: Tensor | None, lower_bound: float | None
) -> tuple[Gate, dict[str, Any]]:
    """The kernels' arguments."""
    A_log, dt_bias = (None if x is None else x.contiguous() for x in (A_log, dt_bias))
    g = unit_rows(g)
    _, H, K = g.shape
    name = "softplus" if lower_bound is None else "sigmoid"
    options = {"H": H, "GATE": name, "S": _tile(K), "num_warps": 4}
    return Gate(g, g.stride(0), g.stride(1), A_log, dt_bias, lower_bound or 0.0), options


def _run(
    g: Tensor, A_log: Tensor | None, dt_bias: Tensor | None, lower_bound: float | None
) -> Tensor:
    gate, options = _prepared(g, A_log, dt_bias, lower_bound)
    out = torch.empty(g.shape, dtype=torch.float32, device=g.device)
    if out.numel():
        T, H, _ = g.shape
        launch(gate_kernel, (cdiv(T, options["S"].BT) * H,), gate, out, T, **options)
    return out


def _run_backward(
    dout: Tensor, g: Tensor, A_log: Tensor | None, dt_bias: Tensor | None, lower_bound: float | None
) -> list[Tensor]:
    """dg, dA_log, ddt_bias, an empty tensor for what is missing."""
    gate, options = _prepared(g, A_log, dt_bias, lower_bound)
    T, H, K = g.shape
    n = cdiv(T, options["S"].BT * options["S"].STEPS)
    dg = torch.empty(T, H, K, dtype=g.dtype, device=g.device)
    dA_log, ddt_bias = (
        torch.empty(n, H, *s, dtype=torch.float32, device=g.device) for s in ((), (K,))
    )
    if dg.numel():
        given = dout.contiguous(), dg, dA_log, ddt_bias, T
        launch(gate_bwd_kernel, (n * H,), gate, *given, **options)
    sums = (
        g.new_empty(0) if x is None else part.sum(0).view(x.shape).to(x.dtype)
        for part, x in ((dA_log, A_log), (ddt_bias, dt_bias))
    )
    return [dg, *sums]


gate_op = differentiable_op(
    "kda_gate",
    "Tensor g, Tensor? A_log, Tensor? dt_bias, float? lower_bound",
    _run,
    _run_backward,
    tensors=3,
    dtype=torch.float32,
)
"""The gate as an op, which torch.compile does not trace."""


def gate(rule: DeltaRule, g: Tensor, A_log: Tensor | None, dt_bias: Tensor | None) -> Tensor:
    flat = g.reshape(-1, *g.shape[-2:])
    return gate_op(flat, A_log, dt_bias, rule.lower_bound).view(g.shape)
