"""Gated delta product: n steps of the delta rule a token, after one decay.

    S = a_t S_{t-1};   n times: S += b_j k_j (v_j - S^T k_j)^T;   o_t = scale * S^T q_t

It is the gated delta rule over n rows a token, of which the first decays and the last is read.

Source: DeltaProduct, arXiv 2502.10297.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from ..context import FLACPContext
from ..validate import check_context, check_householder
from .gdn import chunk_gated_delta_rule, fused_recurrent_gated_delta_rule, gdn_gate
from .member import refuse


def chunk_gated_delta_product(
    q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor, num_householder: int, **options: Any
) -> tuple[Tensor, ...]:
    """Over whole sequences, in chunks, differentiable in every floating input.

    q [B, T, H, K], g [B, T, HV] and o have a row a token; k, v, beta have num_householder rows,
    in order: [B, T*n, ..]. cu_seqlens and cp_context count tokens. Everything else as in
    `chunk_gated_delta_rule`, without return_intermediate_states.
    """
    refuse("chunk_gated_delta_product", options, "return_intermediate_states")
    n = num_householder
    q, g, options = _rows(q, k, v, g, beta, n, options)
    o, final = chunk_gated_delta_rule(q, k, v, g, beta, **options)
    return o[:, n - 1 :: n], final


def cp_chunk_gated_delta_product(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor,
    beta: Tensor,
    num_householder: int,
    cp_context: FLACPContext,
    **options: Any,
) -> tuple[Tensor, ...]:
    """`chunk_gated_delta_product` of this rank's tokens under a context."""
    check_context(cp_context)
    options["cp_context"] = cp_context
    return chunk_gated_delta_product(q, k, v, g, beta, num_householder, **options)


def fused_recurrent_gated_delta_product(
    q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor, num_householder: int, **options: Any
) -> tuple[Tensor, Tensor | None]:
    """`chunk_gated_delta_product` token by token, without gradients; see `fused_recurrent_kda`."""
    n = num_householder
    q, g, options = _rows(q, k, v, g, beta, n, options)
    o, final = fused_recurrent_gated_delta_rule(q, k, v, g, beta, **options)
    return o[:, n - 1 :: n], final


def _rows(
    q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor, n: int, options: dict[str, Any]
) -> tuple[Tensor, Tensor, dict[str, Any]]:
    """q, g and options for n rows a token: g in the first row, q in the last, zeros elsewhere."""
    options = dict(options)
    check_householder(q, k, v, g, beta, n)
    if options.pop("use_gate_in_kernel", False):  # rows without a decay have no raw projection
        rates = options.pop("A_log", None), options.pop("dt_bias", None)
        g = gdn_gate(g, *rates, impl=options.get("impl", "auto"))
    if n > 1:
        zeros = g.new_zeros(*g.shape[:2], n - 1, *g.shape[2:])
        g = torch.cat((g[:, :, None], zeros), 2).flatten(1, 2)
        zeros = q.new_zeros(*q.shape[:2], n - 1, *q.shape[2:])
        q = torch.cat((zeros, q[:, :, None]), 2).flatten(1, 2)
        for name in ("cu_seqlens", "cu_seqlens_cpu"):
            if options.get(name) is not None:
                options[name] = n * options[name]
        if options.get("cp_context") is not None:
            options["cp_context"] = options["cp_context"].repeated(n)
    return q, g, options
