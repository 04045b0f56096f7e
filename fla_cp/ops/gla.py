"""Gated linear attention: nothing is removed from the state. GLA has one decay per key channel,
simple GLA one per head.

    S_t = Diag(a_t) S_{t-1} + k_t v_t^T          a_t = exp(g_t)

Sources: GLA, arXiv 2312.06635; simple GLA is Mamba-2's recurrence, arXiv 2405.21060.
"""

from typing import Unpack

from torch import Tensor

from fla_cp.context import FLACPContext
from fla_cp.ops.checks import check_context
from fla_cp.ops.family import GLA, SIMPLE_GLA, chunk
from fla_cp.ops.options import ChunkOptions, CPChunkOptions, RecurrentOptions, Tensors
from fla_cp.ops.recurrent import recurrent


def chunk_gla(
    q: Tensor, k: Tensor, v: Tensor, g: Tensor, **options: Unpack[ChunkOptions]
) -> tuple[Tensor, ...]:
    """GLA over whole sequences, in chunks, differentiable in every floating input.

    g: [B, T, HV, K]. K and V are at most 512. Everything else is as in `chunk_kda`, without beta
    and its keywords. Heads of more than 256 channels are computed as several heads (wide_heads.py);
    for them, states in a pool (`fused_recurrent_kda`) are refused.
    """
    return chunk(GLA, Tensors(q, k, v, g), options)


def cp_chunk_gla(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor,
    cp_context: FLACPContext,
    **options: Unpack[CPChunkOptions],
) -> tuple[Tensor, ...]:
    """`chunk_gla` of this rank's tokens under a context."""
    check_context(cp_context)
    return chunk_gla(q, k, v, g, cp_context=cp_context, **options)


def fused_recurrent_gla(
    q: Tensor, k: Tensor, v: Tensor, g: Tensor, **options: Unpack[RecurrentOptions]
) -> tuple[Tensor, Tensor | None]:
    """`chunk_gla` token by token; see `fused_recurrent_kda`."""
    return recurrent(GLA, Tensors(q, k, v, g), options)


def chunk_simple_gla(
    q: Tensor, k: Tensor, v: Tensor, g: Tensor, **options: Unpack[ChunkOptions]
) -> tuple[Tensor, ...]:
    """`chunk_gla` with one decay a head: g [B, T, HV].

    If the decay of a head is the same for all tokens, g is `decay.expand(B, T, HV)`.
    `fla_cp.compat` takes such a decay as `g_gamma`, as FLA does, and `reverse` in its
    `fused_recurrent_simple_gla`.
    """
    return chunk(SIMPLE_GLA, Tensors(q, k, v, g), options)


def cp_chunk_simple_gla(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor,
    cp_context: FLACPContext,
    **options: Unpack[CPChunkOptions],
) -> tuple[Tensor, ...]:
    """`chunk_simple_gla` of this rank's tokens under a context."""
    check_context(cp_context)
    return chunk_simple_gla(q, k, v, g, cp_context=cp_context, **options)


def fused_recurrent_simple_gla(
    q: Tensor, k: Tensor, v: Tensor, g: Tensor, **options: Unpack[RecurrentOptions]
) -> tuple[Tensor, Tensor | None]:
    """`chunk_simple_gla` token by token; see `fused_recurrent_kda`."""
    return recurrent(SIMPLE_GLA, Tensors(q, k, v, g), options)
