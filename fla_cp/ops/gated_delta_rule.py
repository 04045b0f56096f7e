"""Gated delta rule (Gated DeltaNet): the delta rule with one decay per value head.

    S_t = a_t S_{t-1} + b_t k_t (v_t - a_t S_{t-1}^T k_t)^T          a_t = exp(g_t)

Source: Gated Delta Networks, arXiv 2412.06464.
"""

from typing import Unpack

from torch import Tensor

from fla_cp.arguments import check_tensors
from fla_cp.context import FLACPContext
from fla_cp.kernels import resolve
from fla_cp.ops.checks import check_context, check_head_gate
from fla_cp.ops.family import GATED_DELTA_RULE, chunk, log_decay
from fla_cp.ops.options import ChunkOptions, CPChunkOptions, RecurrentOptions, Tensors
from fla_cp.ops.recurrent import recurrent
from fla_cp.rule import DeltaRule


def chunk_gated_delta_rule(
    q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor, **options: Unpack[ChunkOptions]
) -> tuple[Tensor, ...]:
    """The gated delta rule over whole sequences, in chunks, differentiable in every floating input.

    g: [B, T, HV], the natural-log decay, <= 0. With use_gate_in_kernel it is the raw projection,
        and the decay is -exp(A_log) softplus(g + dt_bias), with A_log and dt_bias [HV], fp32.
    Everything else is as in `chunk_kda`, without safe_gate and lower_bound.
    """
    return chunk(GATED_DELTA_RULE, Tensors(q, k, v, g, beta), options)


def cp_chunk_gated_delta_rule(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor,
    beta: Tensor,
    cp_context: FLACPContext,
    **options: Unpack[CPChunkOptions],
) -> tuple[Tensor, ...]:
    """`chunk_gated_delta_rule` of this rank's tokens under a context."""
    check_context(cp_context)
    return chunk_gated_delta_rule(q, k, v, g, beta, cp_context=cp_context, **options)


def fused_recurrent_gated_delta_rule(
    q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor, **options: Unpack[RecurrentOptions]
) -> tuple[Tensor, Tensor | None]:
    """`chunk_gated_delta_rule` token by token; see `fused_recurrent_kda`."""
    return recurrent(GATED_DELTA_RULE, Tensors(q, k, v, g, beta), options)


def gdn_gate(
    g: Tensor, A_log: Tensor, dt_bias: Tensor | None = None, *, impl: str = "auto"
) -> Tensor:
    """The gate alone: the log decay -exp(A_log) softplus(g + dt_bias) of a raw projection
    g [.., HV], natural log, fp32 (fp64). A_log [HV] and dt_bias [HV], fp32. Differentiable."""
    check_tensors(("g", "A_log", "dt_bias"), (g, A_log, dt_bias), 2)
    check_head_gate(g, A_log, dt_bias)
    rule = DeltaRule(scale=1.0, gate="softplus", per_head=True)
    return log_decay(resolve(impl, g.device, g.dtype), rule, g, A_log, dt_bias)
