"""DeltaRule: the options of one operator call, fixed while it runs."""

import math
from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor

CHUNK = 64
"""Tokens in a chunk (BT), unless the call asks for fewer or chooses fewer."""

CHUNK_SIZES = (16, 32, CHUNK)
"""How many tokens a chunk may have."""

NORM_EPS = 1e-6
"""Added to the sum of squares of a q or k row before its square root."""


class DeltaRule(NamedTuple):
    """Options of one call, the same in its forward and backward.

    scale: factor on o.
    gate: "given" (g is the log decay), "softplus" or "sigmoid"; `chunk_kda` has the formulas.
    lower_bound: smallest log decay of a step, natural log; None if the gate has no bound.
    safe_gate: the caller promises g >= lower_bound. One reference row then serves half a chunk.
    qk_l2norm: q and k are first divided by their L2 norm.
    beta_factor: None if beta is used as given, else beta = beta_factor * sigmoid(beta).
    use_exp2: cumulative gates are in log2 units (otherwise natural log).
    state_v_first: the caller's states are [V, K] (`transpose_state_layout`), otherwise [K, V].
    keep_intermediates: the backward reads the forward's intermediates instead of recomputing them.
    per_head: one decay for each value head, g [.., HV], instead of one for each key channel.
    removal: what is read from the state and removed before v is added. "k": read with k after the
        decay (delta rule). "p": read with p before the decay (Comba). "none": nothing (GLA).
    precise: in half precision, kernels hold T, Aqk, and what these multiply inside a chunk as two
        terms each, because their rounding errors are the largest (docs/design.md, "Two terms").
    chunk_size: how many tokens of a chunk the caller asked for; None lets the call choose.
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
    chunk_size: int | None = None

    @property
    def chunk(self) -> int:
        """Tokens in a chunk where the lengths of sequences do not count: under a context and in
        compiled graphs."""
        return self.chunk_size or CHUNK

    @property
    def gate_unit(self) -> float:
        """The factor that takes g from natural-log units to the unit of gc."""
        return 1.0 / math.log(2.0) if self.use_exp2 else 1.0

    @property
    def exp(self) -> Callable[[Tensor], Tensor]:
        """Turns a difference of gc into a decay factor."""
        return torch.exp2 if self.use_exp2 else torch.exp


def accumulator(dtype: torch.dtype) -> torch.dtype:
    """The dtype in which products of `dtype` are summed: fp64 for fp64, else fp32."""
    return torch.float64 if dtype == torch.float64 else torch.float32
