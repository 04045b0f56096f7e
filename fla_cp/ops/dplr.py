"""DPLR (diagonal plus low rank) and RWKV-7: a reads from the state, and what it reads is added
along another key, b.

    S_t = (Diag(exp(gk_t)) + b_t a_t^T) S_{t-1} + k_t v_t^T          o_t = scale * S_t^T q_t

a reads the state before the decay. This is Comba's rule over two rows per token, with one decay per
key channel. The first row has key b, reads with p = -a and decays the state; its value is zero. The
second row has key k and value v, and neither reads nor decays; its output is that of the token. A
chunk of 64 rows therefore holds 32 tokens. Scans, states and exchanges are the same as in other
members.

Source: RWKV-7, arXiv 2503.14456.
"""

from typing import Unpack

from torch import Tensor

from fla_cp.context import FLACPContext
from fla_cp.ops.checks import check_context
from fla_cp.ops.family import DPLR, RWKV7, chunk
from fla_cp.ops.options import ChunkOptions, CPChunkOptions, RecurrentOptions, Tensors
from fla_cp.ops.recurrent import recurrent

ROWS = 2
"""How many rows a token has."""


def chunk_dplr_delta_rule(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    a: Tensor,
    b: Tensor,
    gk: Tensor,
    **options: Unpack[ChunkOptions],
) -> tuple[Tensor, ...]:
    """DPLR over whole sequences, in chunks, differentiable in every floating input.

    q, k, a, b: [B, T, H, K]. v: [B, T, HV, V], HV a multiple of H. gk: [B, T, HV, K], the
    natural-log decay, <= 0, or with use_gate_in_kernel the raw projection. a reads the state before
    the decay, and what it reads is added along key b. For a delta rule, a = -k and b = beta k.
    Everything else is as in `chunk_kda`, without use_qk_l2norm_in_kernel, the options of beta and
    return_intermediate_states. chunk_size counts rows, of which a token has two.
    """
    return chunk(DPLR, Tensors(q, k, v, gk, None, a, b), options, ROWS)


def cp_chunk_dplr_delta_rule(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    a: Tensor,
    b: Tensor,
    gk: Tensor,
    cp_context: FLACPContext,
    **options: Unpack[CPChunkOptions],
) -> tuple[Tensor, ...]:
    """`chunk_dplr_delta_rule` of this rank's tokens under a context."""
    check_context(cp_context)
    return chunk_dplr_delta_rule(q, k, v, a, b, gk, cp_context=cp_context, **options)


def fused_recurrent_dplr_delta_rule(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    a: Tensor,
    b: Tensor,
    gk: Tensor,
    **options: Unpack[RecurrentOptions],
) -> tuple[Tensor, Tensor | None]:
    """`chunk_dplr_delta_rule` token by token; see `fused_recurrent_kda`."""
    return recurrent(DPLR, Tensors(q, k, v, gk, None, a, b), options, ROWS)


def chunk_rwkv7(
    r: Tensor,
    w: Tensor,
    k: Tensor,
    v: Tensor,
    a: Tensor,
    b: Tensor,
    **options: Unpack[ChunkOptions],
) -> tuple[Tensor, ...]:
    """`chunk_dplr_delta_rule` under RWKV-7's names. scale is 1 by default; None is K**-0.5.

    r: receptance, the query. w: the log decay gk. In the notation of the paper, a is minus the
    removal key, and b is the removal key times the in-context learning rate. The paper's decay,
    -exp(-1/2) sigmoid(w), is use_gate_in_kernel=True with lower_bound=-math.exp(-0.5). It also
    allows safe_gate=True.
    """
    options.setdefault("scale", 1.0)
    return chunk(RWKV7, Tensors(r, k, v, w, None, a, b), options, ROWS)


def cp_chunk_rwkv7(
    r: Tensor,
    w: Tensor,
    k: Tensor,
    v: Tensor,
    a: Tensor,
    b: Tensor,
    cp_context: FLACPContext,
    **options: Unpack[CPChunkOptions],
) -> tuple[Tensor, ...]:
    """`chunk_rwkv7` of this rank's tokens under a context."""
    check_context(cp_context)
    return chunk_rwkv7(r, w, k, v, a, b, cp_context=cp_context, **options)


def fused_recurrent_rwkv7(
    r: Tensor,
    w: Tensor,
    k: Tensor,
    v: Tensor,
    a: Tensor,
    b: Tensor,
    **options: Unpack[RecurrentOptions],
) -> tuple[Tensor, Tensor | None]:
    """`chunk_rwkv7` token by token; see `fused_recurrent_dplr_delta_rule`."""
    options.setdefault("scale", 1.0)
    return recurrent(RWKV7, Tensors(r, k, v, w, None, a, b), options, ROWS)
