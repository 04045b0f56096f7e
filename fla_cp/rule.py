"""DeltaRule: the facts of one operator call that do not change while it runs."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor

CHUNK = 64
"""Tokens in a chunk (BT)."""

NORM_EPS = 1e-6
"""Added to the sum of squares of a q or k row before its square root."""


class DeltaRule(NamedTuple):
    """Options of one call, fixed for its forward and backward.

    scale: factor on o.
    gate: a row of `stages.gate.GATES`: "given" (g is the log decay), "softplus", "sigmoid".
    lower_bound: smallest log decay per step, natural log; None if the gate has no bound.
    safe_gate: the caller promises g >= lower_bound, so one middle row may serve as reference.
    qk_l2norm: q and k are divided by their length first.
    beta_factor: None if beta is given as it is, else beta = beta_factor * sigmoid(beta).
    use_exp2: gates are cumulated in log2 units (else natural log).
    state_v_first: states are [V, K] outside (`transpose_state_layout`), else [K, V].
    keep_intermediates: backward reads w, u, h, v_new instead of forming them again.
    per_head: one decay per value head, g [.., HV], instead of one per key channel.
    removal: what is read from the state before v is added: "k" after the decay (delta rule), "p"
        with a tensor of its own before the decay (Comba), "none" (gated linear attention).
    precise: kernels in half precision hold in two terms what rounds most (docs/design.md, "Two
        terms"): T, Aqk, and what these multiply inside a chunk.
    """

    scale: float
    gate: str = "given"
    lower_bound: float | None = None
    safe_gate: bool = False
    qk_l2norm: bool = False
    beta_factor: float | None = None
    use_exp2: bool = True
    state_v_first: bool = False
    keep_intermediates: bool = False
    per_head: bool = False
    removal: str = "k"
    precise: bool = False

    @property
    def gate_unit(self) -> float:
        """What one natural-log unit of g is worth in the unit of gc."""
        return 1.0 / math.log(2.0) if self.use_exp2 else 1.0

    @property
    def exp(self) -> Callable[[Tensor], Tensor]:
        """Turns a difference of gc into a decay factor."""
        return torch.exp2 if self.use_exp2 else torch.exp


def accumulator(dtype: torch.dtype) -> torch.dtype:
    """The dtype in which products of `dtype` are summed: fp64 for fp64, else fp32."""
    return torch.float64 if dtype == torch.float64 else torch.float32
