"""Operators token by token, for decoding and short prefixes: forward only."""

from __future__ import annotations

import torch
from torch import Tensor

from ..backend import resolve
from ..rule import DeltaRule, accumulator
from ..stages.recurrent import Sequences
from ..validate import (
    check_forward_only,
    check_in_place,
    check_kda,
    check_ndims,
    check_sequences,
)
from .kda import rule_fields, token_rows


def fused_recurrent_kda(
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
    inplace_final_state: bool = False,
    use_qk_l2norm_in_kernel: bool = False,
    use_gate_in_kernel: bool = False,
    use_beta_sigmoid_in_kernel: bool = False,
    allow_neg_eigval: bool = False,
    lower_bound: float | None = None,
    use_exp2: bool = True,
    transpose_state_layout: bool = False,
    state_v_first: bool = False,
    cu_seqlens: Tensor | None = None,
    cu_seqlens_cpu: Tensor | None = None,
    impl: str = "auto",
) -> tuple[Tensor, Tensor | None]:
    """`chunk_kda` one token after another, without gradients; for inputs of up to 64 tokens.

    q, k, v, g, beta and all keywords that `chunk_kda` has too: as there.
    inplace_final_state: the final states are written to initial_state's own memory, and that
        tensor is returned. It must be dense in its last two dims, without overlap.
    cu_seqlens: on the device, impl="triton" does not read its values on the host, so that
        nothing waits for the device: without cu_seqlens_cpu they are not checked, and tokens that
        belong to no sequence have undefined outputs. impl="torch" reads and checks them.
    A sequence without tokens passes its state on. On impl="triton" a call may be captured in a
    CUDA graph, once the same call has compiled its kernel.

    Returns (o [B, T, HV, V] in v's dtype, final_state like initial_state or None).
    Raises ValueError as listed in validate.py, and if an input requires a gradient, unless
    gradients are off.
    """
    v_first = transpose_state_layout or state_v_first
    check_ndims(q, k, v, g, beta)
    (B, T, _, K), (HV, V) = q.shape, v.shape[2:]
    check_sequences(T, B, cu_seqlens, None, cu_seqlens_cpu)
    N = B if cu_seqlens is None else len(cu_seqlens) - 1
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
        safe_gate=False,
        lower_bound=lower_bound,
        state_v_first=v_first,
        sequences=N,
    )
    x = token_rows(q, k, v, g, beta, A_log, dt_bias)
    check_forward_only(
        "fused_recurrent_kda", "chunk_kda", **x._asdict(), initial_state=initial_state
    )
    if inplace_final_state:
        check_in_place("initial_state", initial_state)
    backend = resolve(impl, q.device, q.dtype)
    rule = DeltaRule(
        *rule_fields(
            K,
            scale=scale,
            use_gate_in_kernel=use_gate_in_kernel,
            lower_bound=lower_bound,
            use_qk_l2norm_in_kernel=use_qk_l2norm_in_kernel,
            use_beta_sigmoid_in_kernel=use_beta_sigmoid_in_kernel,
            allow_neg_eigval=allow_neg_eigval,
            use_exp2=use_exp2,
            state_v_first=v_first,
        )
    )
    final = None
    if inplace_final_state:
        final = initial_state
    elif output_final_state:
        shape = (N, HV, V, K) if v_first else (N, HV, K, V)
        final = torch.empty(shape, dtype=accumulator(q.dtype), device=q.device)
    sequences = Sequences(N, cu_seqlens, cu_seqlens_cpu)
    o = backend.recurrent(rule, x, initial_state, final, sequences)
    return o.view(B, T, HV, V), final
