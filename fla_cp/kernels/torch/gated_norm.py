"""RMSNorm of a layer's output times its activated gate, in plain torch, and its adjoint."""

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor

from fla_cp.rule import accumulator

ACTIVATIONS: dict[str, Callable[[Tensor], Tensor]] = {"sigmoid": torch.sigmoid, "silu": F.silu}


def gated_norm(x: Tensor, gate: Tensor, weight: Tensor, eps: float, activation: str) -> Tensor:
    """x / rms(x) * weight * activation(gate) over the last dim, in x's dtype; differentiable.

    x, gate: [.., V]. weight: [V]. activation: a name in ACTIVATIONS. The statistics are in fp32
    (fp64 for fp64).
    """
    normed = F.rms_norm(x, weight.shape, weight.to(x.dtype), eps)
    return normed * ACTIVATIONS[activation](gate)


def gated_norm_bwd(
    x: Tensor, gate: Tensor, weight: Tensor, eps: float, activation: str, dy: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """dx, dgate and dweight, in the dtypes of their inputs; computed in fp32 (fp64 for fp64)."""
    dtype = accumulator(x.dtype)
    rows, g, d, w = (t.to(dtype) for t in (x, gate, dy, weight))
    scale = torch.rsqrt(rows.square().mean(-1, keepdim=True) + eps)
    normed, s = rows * scale, torch.sigmoid(g)
    value, slope = (g * s, s * (1 + g * (1 - s))) if activation == "silu" else (s, s * (1 - s))
    dnormed = d * value
    dweight = (dnormed * normed).flatten(0, -2).sum(0)
    dnormed = dnormed * w
    dx = scale * (dnormed - normed * (dnormed * normed).mean(-1, keepdim=True))
    return dx.to(x.dtype), (d * normed * w * slope).to(gate.dtype), dweight.to(weight.dtype)
