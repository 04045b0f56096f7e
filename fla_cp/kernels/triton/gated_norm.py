"""RMSNorm of a layer's output times its activated gate (kernels/torch/gated_norm.py), and its
adjoint, one pass each.

A row is one head of one token. A program takes the rows of one tile, and in the backward of several
tiles in turn. The backward forms the statistics again, so that nothing is saved but the inputs, and
each of its programs leaves its share of the weight's gradient in `partial`.
"""

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from fla_cp.kernels.triton.device.blocks import divides
from fla_cp.kernels.triton.device.bundles import Rows, constants
from fla_cp.kernels.triton.device.gates import sigmoid
from fla_cp.kernels.triton.launch import cdiv, launch
from fla_cp.kernels.triton.tile_table import power_of_two

ELEMENTS = 2048
"""Elements of a [BR, BV] tile."""

PROGRAM_ROWS = 256
"""About how many rows a program of the backward takes. It writes one row of partial sums."""


@constants
class NormShape(NamedTuple):
    """Heads, channels V, the tile [BR, BV], how many tiles a program of the backward takes in turn,
    and whether the gate's activation is SiLU, otherwise sigmoid."""

    H: int
    V: int
    BR: int
    BV: int
    STEPS: int
    SILU: bool


@triton.jit
def load_heads(x, o_r, m_rv, o_v, S: tl.constexpr):
    """Rows o_r of x, counted over tokens and heads, in fp32."""
    o_t, o_h = (o_r // S.H).to(tl.int64), o_r % S.H
    p = x.ptr + (o_t * x.row + o_h * x.head)[:, None] + o_v[None, :]
    return tl.load(p, mask=m_rv, other=0.0).to(tl.float32)


@triton.jit
def tile_rows(i, n, o_v, S: tl.constexpr):
    """The rows of tile i, and which elements exist."""
    o_r = i * S.BR + tl.arange(0, S.BR)
    m_rv = (o_r < n)[:, None]
    if not divides(S.BV, S.V):
        m_rv = m_rv & (o_v < S.V)[None, :]
    return o_r, m_rv


@triton.jit
def load_weight(weight, o_v, V: tl.constexpr):
    """[1, BV], in fp32."""
    return tl.load(weight + o_v, mask=o_v < V, other=0.0).to(tl.float32)[None, :]


@triton.jit
def unit(b_x, eps, V: tl.constexpr):
    """1 / rms of each row, and the rows divided by it."""
    b_r = tl.rsqrt(tl.sum(b_x * b_x, axis=1) / V + eps)[:, None]
    return b_r, b_x * b_r


@triton.jit
def gated_norm_kernel(x, gate, weight, y, n, eps, S: tl.constexpr):
    """x, gate: `Rows` [T, H, V]; weight [V]; y [T, H, V]; n: T * H."""
    o_v = tl.arange(0, S.BV)
    o_r, m_rv = tile_rows(tl.program_id(0), n, o_v, S)
    _, b_n = unit(load_heads(x, o_r, m_rv, o_v, S), eps, S.V)
    b_g = load_heads(gate, o_r, m_rv, o_v, S)
    b_a = sigmoid(b_g)
    if S.SILU:
        b_a *= b_g
    b_y = b_n * load_weight(weight, o_v, S.V) * b_a
    p = y + (o_r.to(tl.int64) * S.V)[:, None] + o_v[None, :]
    tl.store(p, b_y.to(y.dtype.element_ty), mask=m_rv)


@triton.jit
def gated_norm_bwd_kernel(x, gate, weight, dy, dx, dgate, partial, n, eps, S: tl.constexpr):
    """x, gate, dy: `Rows` [T, H, V]; dx, dgate [T, H, V]; partial [programs, V], fp32."""
    i_p, o_v = tl.program_id(0), tl.arange(0, S.BV)
    b_w = load_weight(weight, o_v, S.V)
    b_dw = tl.zeros([S.BR, S.BV], tl.float32)
    for step in range(S.STEPS):
        o_r, m_rv = tile_rows(i_p * S.STEPS + step, n, o_v, S)
        b_r, b_n = unit(load_heads(x, o_r, m_rv, o_v, S), eps, S.V)
        b_g = load_heads(gate, o_r, m_rv, o_v, S)
        b_dy = load_heads(dy, o_r, m_rv, o_v, S)
        b_s = sigmoid(b_g)
        if S.SILU:
            b_a, b_slope = b_g * b_s, b_s * (1.0 + b_g * (1.0 - b_s))
        else:
            b_a, b_slope = b_s, b_s * (1.0 - b_s)
        b_dn = b_dy * b_a
        b_dw += tl.where(m_rv, b_dn * b_n, 0.0)  # with eps = 0, rows that do not exist are NaN
        b_dn *= b_w
        b_dx = b_r * (b_dn - b_n * (tl.sum(b_dn * b_n, axis=1) / S.V)[:, None])
        o = (o_r.to(tl.int64) * S.V)[:, None] + o_v[None, :]
        tl.store(dx + o, b_dx.to(dx.dtype.element_ty), mask=m_rv)
        b_dg = b_dy * b_n * b_w * b_slope
        tl.store(dgate + o, b_dg.to(dgate.dtype.element_ty), mask=m_rv)
    p = partial + i_p.to(tl.int64) * S.V + o_v
    tl.store(p, tl.sum(b_dw, axis=0), mask=o_v < S.V)


def _heads(x: Tensor, S: NormShape) -> Rows:
    """x [.., H, V] as [T, H, V]."""
    x = x.reshape(-1, S.H, S.V)
    x = x if x.stride(-1) == 1 else x.contiguous()
    return Rows(x, x.stride(0), x.stride(1))


def _shape(x: Tensor, activation: str) -> NormShape:
    H, V = x.shape[-2:] if x.ndim > 1 else (1, len(x))
    BV = power_of_two(V)
    BR = max(1, ELEMENTS // BV)
    return NormShape(H, V, BR, BV, max(1, PROGRAM_ROWS // BR), activation == "silu")


def gated_norm(x: Tensor, gate: Tensor, weight: Tensor, eps: float, activation: str) -> Tensor:
    S = _shape(x, activation)
    y = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    n = y.numel() // S.V
    if n:
        given = _heads(x, S), _heads(gate, S), weight.contiguous(), y, n, eps, S
        launch(gated_norm_kernel, (cdiv(n, S.BR),), *given, num_warps=4)
    return y


def gated_norm_bwd(
    x: Tensor, gate: Tensor, weight: Tensor, eps: float, activation: str, dy: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    S = _shape(x, activation)
    dx, dgate = (torch.empty(t.shape, dtype=t.dtype, device=t.device) for t in (x, gate))
    n = dx.numel() // S.V
    programs = cdiv(n, S.BR * S.STEPS)
    sums = torch.empty(programs, S.V, dtype=torch.float32, device=x.device)
    if n:
        given = (
            _heads(x, S),
            _heads(gate, S),
            weight.contiguous(),
            _heads(dy, S),
            dx,
            dgate,
            sums,
            n,
            eps,
            S,
        )
        launch(gated_norm_bwd_kernel, (programs,), *given, num_warps=4)
    return dx, dgate, sums.sum(0).to(weight.dtype)
