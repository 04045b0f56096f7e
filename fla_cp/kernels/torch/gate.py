"""Elementwise preparation of the inputs, token by token, and its adjoint: gate, norm, beta.

A gate is an entry of `GATES`: its value and its derivatives. `raw` is g_raw + dt_bias and `rate`
is exp(A_log), both broadcast to [.., HV, K].
"""

from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor

from fla_cp.rule import NORM_EPS, DeltaRule


class Gate(NamedTuple):
    """value(raw, rate, bound) -> g; slopes(raw, rate, bound, g) -> (dg/draw, dg/dA_log)."""

    value: Callable[[Tensor, Tensor, float], Tensor]
    slopes: Callable[[Tensor, Tensor, float, Tensor], tuple[Tensor, Tensor]]


def _softplus(raw: Tensor, rate: Tensor, bound: float) -> Tensor:
    # logaddexp is exact for every argument; F.softplus is linear above 20
    return -rate * torch.logaddexp(raw, raw.new_zeros(()))


def _softplus_slopes(raw: Tensor, rate: Tensor, bound: float, g: Tensor) -> tuple[Tensor, Tensor]:
    return -rate * torch.sigmoid(raw), g


def _sigmoid(raw: Tensor, rate: Tensor, bound: float) -> Tensor:
    return bound * torch.sigmoid(rate * raw)


def _sigmoid_slopes(raw: Tensor, rate: Tensor, bound: float, g: Tensor) -> tuple[Tensor, Tensor]:
    z = rate * raw
    slope = g * torch.sigmoid(-z)
    return slope * rate, slope * z


GATES = {"softplus": Gate(_softplus, _softplus_slopes), "sigmoid": Gate(_sigmoid, _sigmoid_slopes)}


def _raw_and_rate(g: Tensor, A_log: Tensor | None, dt_bias: Tensor | None) -> tuple[Tensor, Tensor]:
    HV, K = g.shape[-2:]
    raw = g if dt_bias is None else g + dt_bias.to(g.dtype).view(HV, K)
    if A_log is None:
        return raw, raw.new_ones(())
    return raw, A_log.to(g.dtype).exp().view(HV, 1)


def activate(rule: DeltaRule, g: Tensor, A_log: Tensor | None, dt_bias: Tensor | None) -> Tensor:
    """The log decay of each token, natural log, <= 0.

    g: [.., HV, K] in the accumulator's dtype. With the gate "given" it is returned as it is,
    otherwise it is the raw projection. A_log [HV] and dt_bias [HV*K] or None.
    Source: Kimi Linear report, arXiv 2510.26692, and Mamba-2's softplus gate.
    """
    if rule.gate == "given":
        return g
    raw, rate = _raw_and_rate(g, A_log, dt_bias)
    return GATES[rule.gate].value(raw, rate, rule.lower_bound or 0.0)


def activate_bwd(
    rule: DeltaRule, g_raw: Tensor, A_log: Tensor | None, dt_bias: Tensor | None, dg: Tensor
) -> tuple[Tensor, Tensor | None, Tensor | None]:
    """Gradients of `activate`: dg_raw [T, HV, K], dA_log [HV], ddt_bias [HV*K]."""
    if rule.gate == "given":
        return dg, None, None
    raw, rate = _raw_and_rate(g_raw, A_log, dt_bias)
    gate, bound = GATES[rule.gate], rule.lower_bound or 0.0
    to_raw, to_log = gate.slopes(raw, rate, bound, gate.value(raw, rate, bound))
    draw = dg * to_raw
    dA_log = None if A_log is None else (dg * to_log).sum((0, 2))
    return draw, dA_log, None if dt_bias is None else draw.sum(0).flatten()


def l2norm(x: Tensor) -> tuple[Tensor, Tensor]:
    """x / sqrt(sum x^2 + 1e-6) over the last dim, and the factor 1/sqrt(...) [.., 1]."""
    rstd = torch.rsqrt(x.square().sum(-1, keepdim=True) + NORM_EPS)
    return x * rstd, rstd


def l2norm_bwd(y: Tensor, rstd: Tensor, dy: Tensor) -> Tensor:
    """Gradient of the input of `l2norm` from its two results."""
    return rstd * (dy - y * (y * dy).sum(-1, keepdim=True))


def activate_beta(rule: DeltaRule, beta: Tensor) -> Tensor:
    """beta_factor * sigmoid(beta), or beta as it is without a factor."""
    return beta if rule.beta_factor is None else rule.beta_factor * torch.sigmoid(beta)


def activate_beta_bwd(rule: DeltaRule, activated: Tensor, dbeta: Tensor) -> Tensor:
    """Gradient of the input of `activate_beta`; activated: its result."""
    if rule.beta_factor is None:
        return dbeta
    return dbeta * activated * (1 - activated / rule.beta_factor)
