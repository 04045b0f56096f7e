"""Comba: what is removed is read with a tensor of its own, before the decay.

    S_t = a_t S_{t-1} + b_t k_t (v_t - S_{t-1}^T p_t)^T          a_t = exp(g_t)

An implementation that reads after the decay, a_t S_{t-1}^T p_t, computes something else: with
p = k that is the gated delta rule.

Source: Comba, arXiv 2506.02475.
"""

from __future__ import annotations

from typing import Any

from torch import Tensor

from fla_cp.context import FLACPContext
from fla_cp.ops.checks import check_context
from fla_cp.ops.family import COMBA, chunk, chunk_options, recurrent, recurrent_options


def chunk_comba(
    q: Tensor, k: Tensor, v: Tensor, p: Tensor, g: Tensor, beta: Tensor, **options: Any
) -> tuple[Tensor, ...]:
    """Over whole sequences, in chunks, differentiable in every floating input.

    p: [B, T, H, K], what reads the state; use_qk_l2norm_in_kernel normalises it too.
    Everything else as in `chunk_gated_delta_rule`.
    """
    o = chunk_options("chunk_comba", options, "safe_gate", "lower_bound")
    return chunk(COMBA, q, k, v, g, beta, p, o)


def cp_chunk_comba(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    p: Tensor,
    g: Tensor,
    beta: Tensor,
    cp_context: FLACPContext,
    **options: Any,
) -> tuple[Tensor, ...]:
    """`chunk_comba` of this rank's tokens under a context."""
    check_context(cp_context)
    return chunk_comba(q, k, v, p, g, beta, cp_context=cp_context, **options)


def fused_recurrent_comba(
    q: Tensor, k: Tensor, v: Tensor, p: Tensor, g: Tensor, beta: Tensor, **options: Any
) -> tuple[Tensor, Tensor | None]:
    """`chunk_comba` token by token, without gradients; see `fused_recurrent_kda`."""
    o = recurrent_options("fused_recurrent_comba", options, "lower_bound")
    return recurrent(COMBA, "comba", q, k, v, g, beta, p, o)
