"""Comba: a tensor p instead of k reads from the state what is removed, and reads before the decay.

    S_t = a_t S_{t-1} + b_t k_t (v_t - S_{t-1}^T p_t)^T          a_t = exp(g_t)

Reading after the decay, a_t S_{t-1}^T p_t, would be another recurrence: with p = k, that of the
gated delta rule.

Source: Comba, arXiv 2506.02475.
"""

from typing import Unpack

from torch import Tensor

from fla_cp.context import FLACPContext
from fla_cp.ops.checks import check_context
from fla_cp.ops.family import COMBA, chunk
from fla_cp.ops.options import ChunkOptions, CPChunkOptions, RecurrentOptions, Tensors
from fla_cp.ops.recurrent import recurrent


def chunk_comba(
    q: Tensor, k: Tensor, v: Tensor, p: Tensor, g: Tensor, beta: Tensor, **o: Unpack[ChunkOptions]
) -> tuple[Tensor, ...]:
    """Comba over whole sequences, in chunks, differentiable in every floating input.

    p: [B, T, H, K], reads the state; use_qk_l2norm_in_kernel normalises it, too.
    Everything else is as in `chunk_gated_delta_rule`.
    """
    return chunk(COMBA, Tensors(q, k, v, g, beta, p), o)


def cp_chunk_comba(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    p: Tensor,
    g: Tensor,
    beta: Tensor,
    cp_context: FLACPContext,
    **options: Unpack[CPChunkOptions],
) -> tuple[Tensor, ...]:
    """`chunk_comba` of this rank's tokens under a context."""
    check_context(cp_context)
    return chunk_comba(q, k, v, p, g, beta, cp_context=cp_context, **options)


def fused_recurrent_comba(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    p: Tensor,
    g: Tensor,
    beta: Tensor,
    **o: Unpack[RecurrentOptions],
) -> tuple[Tensor, Tensor | None]:
    """`chunk_comba` token by token; see `fused_recurrent_kda`."""
    return recurrent(COMBA, Tensors(q, k, v, g, beta, p), o)
