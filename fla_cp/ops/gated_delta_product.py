"""Gated delta product: n steps of the delta rule for each token, after one decay.

    S = a_t S_{t-1};   n times: S += b_j k_j (v_j - S^T k_j)^T;   o_t = scale * S^T q_t

It is the gated delta rule over n rows per token. The first row decays the state, and the state is
read after the last row.

Source: DeltaProduct, arXiv 2502.10297.
"""

from typing import Unpack

from torch import Tensor

from fla_cp.arguments import check_count
from fla_cp.context import FLACPContext
from fla_cp.ops.checks import check_context
from fla_cp.ops.family import GATED_DELTA_PRODUCT, chunk
from fla_cp.ops.options import ChunkOptions, CPChunkOptions, RecurrentOptions, Tensors
from fla_cp.ops.recurrent import recurrent


def chunk_gated_delta_product(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor,
    beta: Tensor,
    num_householder: int,
    **options: Unpack[ChunkOptions],
) -> tuple[Tensor, ...]:
    """The gated delta product over whole sequences, in chunks, differentiable in every floating
    input.

    q [B, T, H, K], g [B, T, HV] and o have one row a token. k, v and beta have n = num_householder
    rows a token, in order: [B, T*n, ..]. cu_seqlens and cp_context count tokens, chunk_size rows.
    Everything else is as in `chunk_gated_delta_rule`, without return_intermediate_states.
    """
    n = check_count("num_householder", num_householder)
    return chunk(GATED_DELTA_PRODUCT, Tensors(q, k, v, g, beta), options, n)


def cp_chunk_gated_delta_product(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor,
    beta: Tensor,
    num_householder: int,
    cp_context: FLACPContext,
    **options: Unpack[CPChunkOptions],
) -> tuple[Tensor, ...]:
    """`chunk_gated_delta_product` of this rank's tokens under a context."""
    check_context(cp_context)
    tensors = q, k, v, g, beta, num_householder
    return chunk_gated_delta_product(*tensors, cp_context=cp_context, **options)


def fused_recurrent_gated_delta_product(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor,
    beta: Tensor,
    num_householder: int,
    **options: Unpack[RecurrentOptions],
) -> tuple[Tensor, Tensor | None]:
    """`chunk_gated_delta_product` token by token; see `fused_recurrent_kda`. ssm_state_indices and
    num_accepted_tokens count tokens: a draft token has one state, the one after its last row."""
    n = check_count("num_householder", num_householder)
    return recurrent(GATED_DELTA_PRODUCT, Tensors(q, k, v, g, beta), options, n)
