"""Kimi Delta Attention: the delta rule with a decay per key channel.

    S_t = Diag(exp(g_t)) S_{t-1} + beta_t k_t (v_t - k_t^T Diag(exp(g_t)) S_{t-1})
    o_t = scale * S_t^T q_t

Source: Kimi Linear report, arXiv 2510.26692.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from .. import library, library_sharded
from ..autograd import DeltaRuleFunction
from ..backend import resolve
from ..context import FLACPContext, Handle
from ..packing import Packing
from ..rule import DeltaRule
from ..stages.intra import Inputs
from ..validate import (
    check_context,
    check_gate_only,
    check_kda,
    check_ndims,
    check_offsets,
    check_sequences,
)


def chunk_kda(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor,
    beta: Tensor,
    *,
    A_log: Tensor | None = None,
    dt_bias: Tensor | None = None,
    scale: float | None = None,
    initial_state: Tensor | None = None,
    output_final_state: bool = False,
    use_qk_l2norm_in_kernel: bool = False,
    use_gate_in_kernel: bool = False,
    use_beta_sigmoid_in_kernel: bool = False,
    allow_neg_eigval: bool = False,
    safe_gate: bool = False,
    lower_bound: float | None = None,
    disable_recompute: bool = False,
    return_intermediate_states: bool = False,
    use_exp2: bool = True,
    transpose_state_layout: bool = False,
    state_v_first: bool = False,
    cu_seqlens: Tensor | None = None,
    cu_seqlens_cpu: Tensor | None = None,
    cp_context: FLACPContext | None = None,
    impl: str = "auto",
) -> tuple[Tensor, ...]:
    """KDA over whole sequences, in chunks, differentiable in every floating input.

    q, k: [B, T, H, K]. v: [B, T, HV, V], HV a multiple of H; bf16, fp16, fp32, or fp64 (torch).
    g: [B, T, HV, K], natural-log decay <= 0; with use_gate_in_kernel the raw projection, and
        g = -exp(A_log) softplus(g + dt_bias), or with lower_bound
        g = lower_bound * sigmoid(exp(A_log) (g + dt_bias)). q's dtype or fp32.
    beta: [B, T, HV]; with use_beta_sigmoid_in_kernel before its sigmoid (times two with
        allow_neg_eigval). q's dtype or fp32.
    A_log: [HV], dt_bias: [HV*K], fp32 or None. scale: factor on o, default K**-0.5.
    initial_state: [N, HV, K, V], fp32 (fp64 for fp64); [N, HV, V, K] with
        transpose_state_layout (or its synonym state_v_first). N = B, or the sequences of
        cu_seqlens, or those of the context's global batch.
    use_qk_l2norm_in_kernel: q and k divided by sqrt(sum of squares + 1e-6) first.
    safe_gate: promises g >= lower_bound, in [-5, 0), for each step.
    disable_recompute: keeps forward intermediates: faster backward, more memory, same result.
    use_exp2: decays through exp2 (False: exp); equal within rounding.
    cu_seqlens: int32 or int64 [N+1] offsets of packed sequences, B = 1. cu_seqlens_cpu: the same
        on the host, spares a synchronisation.
    cp_context: the tensors are this rank's tokens [1, T_local, ..]; see build_cp_context.
    impl: "auto" (by device), "torch" or "triton".

    Returns (o [B, T, HV, V] in v's dtype, final_state like initial_state or None), and with
    return_intermediate_states also the state at the start of each chunk of 64 tokens,
    [B, NC, HV, K, V], without gradient.
    Under a context initial_state, final_state and their gradients are equal on all ranks;
    gradients of A_log and dt_bias are this rank's share, to be summed like any weight's.
    Raises ValueError as listed in validate.py.
    """
    v_first = transpose_state_layout or state_v_first
    check_ndims(q, k, v, g, beta)
    check_sequences(q.shape[1], q.shape[0], cu_seqlens, cp_context, cu_seqlens_cpu)
    if torch.compiler.is_compiling():  # the op looks the packing up when it runs
        packing, sequences = None, q.shape[0]
        if cp_context is not None:
            sequences = Handle.read(cp_context.handle.sizes).sequences
    else:
        packing = cp_context.packing if cp_context else _packing(q, cu_seqlens, cu_seqlens_cpu)
        sequences = packing.sequences
    check_kda(
        q,
        k,
        v,
        g,
        beta,
        A_log=A_log,
        dt_bias=dt_bias,
        initial_state=initial_state,
        use_gate_in_kernel=use_gate_in_kernel,
        use_beta_sigmoid_in_kernel=use_beta_sigmoid_in_kernel,
        allow_neg_eigval=allow_neg_eigval,
        safe_gate=safe_gate,
        lower_bound=lower_bound,
        state_v_first=v_first,
        sequences=sequences,
    )
    (B, T, _, K), (HV, V) = q.shape, v.shape[2:]
    rule = rule_fields(
        K,
        scale=scale,
        use_gate_in_kernel=use_gate_in_kernel,
        lower_bound=lower_bound,
        safe_gate=safe_gate,
        use_qk_l2norm_in_kernel=use_qk_l2norm_in_kernel,
        use_beta_sigmoid_in_kernel=use_beta_sigmoid_in_kernel,
        allow_neg_eigval=allow_neg_eigval,
        use_exp2=use_exp2,
        state_v_first=v_first,
        keep_intermediates=disable_recompute,
    )
    if initial_state is not None and v_first:
        initial_state = initial_state.transpose(-1, -2)
    x = token_rows(q, k, v, g, beta, A_log, dt_bias)
    tensors = (*x, initial_state)
    final: Any
    if packing is None and cp_context is not None and cp_context.world_size > 1:
        o, final, h = library_sharded.sharded_delta_rule(
            cp_context, rule, impl, tensors, output_final_state, return_intermediate_states
        )
        final = final if output_final_state else None
    elif packing is None:
        fixed = library.constants(rule, impl, cp_context, B, T)
        found = library.delta_rule(*tensors, *fixed, output_final_state, return_intermediate_states)
        o, h = found[0], found[2]
        final = found[1] if output_final_state else None
    else:
        backend = resolve(impl, q.device, q.dtype)
        plan = library.make_plan(DeltaRule(*rule), packing, cp_context, backend, x)
        o, final, h = DeltaRuleFunction.apply(
            plan, output_final_state, return_intermediate_states, *tensors
        )
    o = o.view(B, T, HV, V)
    if final is not None and v_first:
        final = final.transpose(-1, -2).contiguous()
    if not return_intermediate_states:
        return o, final
    h = h.transpose(-1, -2).contiguous() if v_first else h
    return o, final, h.unflatten(0, (B, -1))


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
    lower_bound. A_log [HV] and dt_bias [HV*K], fp32 or None. Differentiable. impl: as in
    `chunk_kda`.
    """
    check_gate_only(g, A_log, dt_bias, lower_bound)
    rule = DeltaRule(scale=1.0, gate=_gate(True, lower_bound), lower_bound=lower_bound)
    return resolve(impl, g.device, g.dtype).gate(rule, g, A_log, dt_bias)


def rule_fields(
    K: int,
    *,
    scale: float | None,
    use_gate_in_kernel: bool,
    lower_bound: float | None,
    use_qk_l2norm_in_kernel: bool,
    use_beta_sigmoid_in_kernel: bool,
    allow_neg_eigval: bool,
    use_exp2: bool,
    state_v_first: bool,
    safe_gate: bool = False,
    keep_intermediates: bool = False,
) -> tuple[Any, ...]:
    """The fields of `DeltaRule`, in order, from the keywords of an operator."""
    return (
        K**-0.5 if scale is None else scale,
        _gate(use_gate_in_kernel, lower_bound),
        lower_bound,
        safe_gate,
        use_qk_l2norm_in_kernel,
        (2.0 if allow_neg_eigval else 1.0) if use_beta_sigmoid_in_kernel else None,
        use_exp2,
        state_v_first,
        keep_intermediates,
    )


def token_rows(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor,
    beta: Tensor,
    A_log: Tensor | None,
    dt_bias: Tensor | None,
) -> Inputs:
    """The inputs with their first two dims, B and T, folded into one."""
    packed = (x.reshape(-1, *x.shape[2:]) for x in (q, k, v, g, beta))
    return Inputs._make((*packed, A_log, dt_bias))


def _gate(in_kernel: bool, lower_bound: float | None) -> str:
    if not in_kernel:
        return "given"
    return "softplus" if lower_bound is None else "sigmoid"


def _packing(q: Tensor, cu_seqlens: Tensor | None, cu_seqlens_cpu: Tensor | None) -> Packing:
    if cu_seqlens is None:
        B, T = q.shape[:2]
        return library.packing_of(tuple(range(0, B * T + 1, T)))
    offsets = tuple((cu_seqlens if cu_seqlens_cpu is None else cu_seqlens_cpu).tolist())
    check_offsets("cu_seqlens", offsets, q.shape[1])
    return library.packing_of(offsets)
