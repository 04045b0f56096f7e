"""Kimi Delta Attention: the delta rule with a decay per key channel.

    S_t = Diag(exp(g_t)) S_{t-1} + beta_t k_t (v_t - k_t^T Diag(exp(g_t)) S_{t-1})
    o_t = scale * S_t^T q_t

Source: Kimi Linear report, arXiv 2510.26692.
"""

from __future__ import annotations

from typing import Any, Unpack

from torch import Tensor

from fla_cp.arguments import check_lower_bound, check_tensors
from fla_cp.context import FLACPContext
from fla_cp.kernels import resolve
from fla_cp.ops.checks import check_context, check_gate_only
from fla_cp.ops.family import KDA, chunk, gate_of, one_dim, recurrent
from fla_cp.ops.options import ChunkOptions, RecurrentOptions, Tensors
from fla_cp.rule import DeltaRule


def chunk_kda(
    q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor, **options: Unpack[ChunkOptions]
) -> tuple[Tensor, ...]:
    """KDA over whole sequences, in chunks, differentiable in every floating input.

    q, k: [B, T, H, K]. v: [B, T, HV, V], HV a multiple of H; bf16, fp16, fp32, or fp64 (torch).
    g: [B, T, HV, K], natural-log decay <= 0; with use_gate_in_kernel the raw projection, and
        g = -exp(A_log) softplus(g + dt_bias), or with lower_bound
        g = lower_bound * sigmoid(exp(A_log) (g + dt_bias)). q's dtype or fp32.
    beta: [B, T, HV]; with use_beta_sigmoid_in_kernel before its sigmoid (times two with
        allow_neg_eigval). q's dtype or fp32.
    A_log: [HV], dt_bias: [HV*K] or [HV, K], fp32 or None; further dims of size 1, as in [1, 1, HV,
        1], do no harm. Gradients have the shape that was given.
    scale: factor on o, default K**-0.5. A tensor without dims is read on the host, which waits for
        its device; one that requires a gradient is refused.
    initial_state: [N, HV, K, V], fp32 (fp64 for fp64), or narrower, which is widened first;
        [N, HV, V, K] with transpose_state_layout (or its synonym state_v_first; both at once are
        refused). N = B, or the sequences of cu_seqlens, or those of the context's global batch.
    use_qk_l2norm_in_kernel: q and k divided by sqrt(sum of squares + 1e-6) first.
    safe_gate: promises g >= lower_bound, in [-5, 0), for each step; lower_bound may be left out
        (-5) where g is given, but not with use_gate_in_kernel, whose gate it changes.
    disable_recompute: keeps forward intermediates: faster backward, more memory, same result.
    use_exp2: decays through exp2 (False: exp); equal within rounding.
    cu_seqlens: int32 or int64 [N+1] offsets of packed sequences, B = 1. cu_seqlens_cpu: the same
        on the host, spares a synchronisation.
    cp_context: the tensors are this rank's tokens [1, T_local, ..]; see build_cp_context.
    precision: "default" or "high". In bf16 and fp16 the kernels then hold in two terms what rounds
        most where o is a small difference, as with keys that are nearly parallel: o, dv and dbeta
        err several times less there, for more time and memory (docs/design.md, "Two terms"). In
        fp32, fp64 and with impl="torch" both are the same.
    impl: "auto" (by device), "torch" or "triton".

    Returns (o [B, T, HV, V] in v's dtype, final_state [N, HV, K, V] in fp32 (fp64) or None), and
    with return_intermediate_states also the state at the start of each chunk of 64 tokens,
    [B, NC, HV, K, V], in v's dtype whatever the impl, without gradient.
    Under a context initial_state, final_state and their gradients are equal on all ranks;
    gradients of A_log and dt_bias are this rank's share, to be summed like any weight's.
    Raises ValueError as listed in arguments.py and ops/checks.py.
    """
    return chunk(KDA, Tensors(q, k, v, g, beta), options)


def cp_chunk_kda(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor,
    beta: Tensor,
    cp_context: FLACPContext,
    **options: Any,
) -> tuple[Tensor, ...]:
    """`chunk_kda` of this rank's tokens under a context, with the same keywords."""
    check_context(cp_context)
    return chunk_kda(q, k, v, g, beta, cp_context=cp_context, **options)


def fused_recurrent_kda(
    q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor, **options: Unpack[RecurrentOptions]
) -> tuple[Tensor, Tensor | None]:
    """`chunk_kda` one token after another, without gradients; for inputs of up to 64 tokens.

    q, k, v, g, beta and all keywords that `chunk_kda` has too: as there.
    inplace_final_state: the final states are written to initial_state's own memory, and that
        tensor is returned. It must be fp32 (fp64 for fp64), dense in its last two dims, without
        overlap.
    cu_seqlens: on the device, impl="triton" does not read its values on the host, so that
        nothing waits for the device: without cu_seqlens_cpu they are not checked, and tokens that
        belong to no sequence have undefined outputs. impl="torch" reads and checks them.
    A sequence without tokens passes its state on. On impl="triton" a call may be captured in a
    CUDA graph, once the same call has compiled its kernel.

    Returns (o [B, T, HV, V] in v's dtype, final_state [N, HV, K, V] in fp32 (fp64) or None).
    Raises ValueError as listed in arguments.py and ops/checks.py, and if an input requires a
    gradient, unless gradients are off.
    """
    return recurrent(KDA, Tensors(q, k, v, g, beta), options)


def kda_gate(
    g: Tensor,
    A_log: Tensor | None = None,
    dt_bias: Tensor | None = None,
    *,
    lower_bound: float | None = None,
    impl: str = "auto",
) -> Tensor:
    """The gate alone: raw projection g [.., HV, K] -> log decay, natural log, fp32 (fp64).

    -exp(A_log) softplus(g + dt_bias), or lower_bound * sigmoid(exp(A_log) (g + dt_bias)) with a
    lower_bound. g: bf16, fp16, fp32 or fp64. A_log, dt_bias and impl: as in `chunk_kda`.
    Differentiable.
    """
    check_tensors(("g", "A_log", "dt_bias"), (g, A_log, dt_bias), 1)
    lower_bound = check_lower_bound(lower_bound)
    check_gate_only(g, A_log, dt_bias, lower_bound)
    backend = resolve(impl, g.device, g.dtype)
    rule = DeltaRule(scale=1.0, gate=gate_of(True, lower_bound), lower_bound=lower_bound)
    return backend.gate(rule, g, one_dim(A_log), one_dim(dt_bias))
