"""FLA's operators in chunks: its names, its order of arguments and its defaults.

Each returns (o, final_state), with None in place of a final state that was not asked for. Where
FLA's function has no cp_context, it is a keyword here.
"""

from typing import Any

from torch import Tensor

from fla_cp import ops
from fla_cp.compat.arguments import (
    bounded,
    check_layout,
    chunk_size,
    gate,
    head_decay,
    no_decay,
    nothing_left,
    ones_or,
    places,
    refuse,
    state_layout,
)
from fla_cp.context import FLACPContext


def chunk_kda(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor,
    beta: Tensor,
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
    state_v_first: bool = False,
    cu_seqlens: Tensor | None = None,
    cu_seqlens_cpu: Tensor | None = None,
    cp_context: FLACPContext | None = None,
    use_graph: bool = False,
    max_num_seqs: int | None = None,
    **kwargs: Any,
) -> tuple[Tensor, ...]:
    """`fla_cp.chunk_kda`. kwargs: A_log, dt_bias, chunk_size 32 or 64, transpose_state_layout.

    Returns (o, final_state), and with return_intermediate_states also the states at the start of
    every chunk_size tokens, or of every 64.
    """
    check_layout(q, cu_seqlens, cp_context)
    del max_num_seqs  # FLA reads it with use_graph only
    refuse("use_graph", use_graph, False, "see docs/cuda_graphs.md for calls in CUDA graphs")
    v_first = state_layout(state_v_first, kwargs)
    size = chunk_size(kwargs, (32, 64))
    raw = gate(use_gate_in_kernel, kwargs.pop("A_log", None), kwargs.pop("dt_bias", None))
    nothing_left("chunk_kda", kwargs)
    return ops.chunk_kda(
        q,
        k,
        v,
        g,
        beta,
        scale=scale,
        initial_state=initial_state,
        output_final_state=output_final_state,
        use_qk_l2norm_in_kernel=use_qk_l2norm_in_kernel,
        use_beta_sigmoid_in_kernel=use_beta_sigmoid_in_kernel,
        allow_neg_eigval=allow_neg_eigval,
        safe_gate=safe_gate,
        lower_bound=lower_bound,
        disable_recompute=disable_recompute,
        return_intermediate_states=return_intermediate_states,
        state_v_first=v_first,
        **raw,
        chunk_size=size,
        **places(cu_seqlens, cu_seqlens_cpu, cp_context),
    )


def chunk_gated_delta_rule(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor,
    beta: Tensor,
    scale: float | None = None,
    initial_state: Tensor | None = None,
    output_final_state: bool = False,
    use_qk_l2norm_in_kernel: bool = False,
    use_beta_sigmoid_in_kernel: bool = False,
    allow_neg_eigval: bool = False,
    state_v_first: bool = False,
    cu_seqlens: Tensor | None = None,
    cu_seqlens_cpu: Tensor | None = None,
    chunk_indices: Tensor | None = None,
    cp_context: FLACPContext | None = None,
    **kwargs: Any,
) -> tuple[Tensor, ...]:
    """`fla_cp.chunk_gated_delta_rule`.

    kwargs: use_gate_in_kernel, A_log, dt_bias, chunk_size 16, 32 or 64, transpose_state_layout.
    """
    check_layout(q, cu_seqlens, cp_context)
    del chunk_indices
    v_first = state_layout(state_v_first, kwargs)
    size = chunk_size(kwargs, (16, 32, 64))
    rates = kwargs.pop("A_log", None), kwargs.pop("dt_bias", None)
    raw = gate(kwargs.pop("use_gate_in_kernel", False), *rates)
    nothing_left("chunk_gated_delta_rule", kwargs)
    return ops.chunk_gated_delta_rule(
        q,
        k,
        v,
        g,
        beta,
        scale=scale,
        initial_state=initial_state,
        output_final_state=output_final_state,
        use_qk_l2norm_in_kernel=use_qk_l2norm_in_kernel,
        use_beta_sigmoid_in_kernel=use_beta_sigmoid_in_kernel,
        allow_neg_eigval=allow_neg_eigval,
        state_v_first=v_first,
        **raw,
        chunk_size=size,
        **places(cu_seqlens, cu_seqlens_cpu, cp_context),
    )


chunk_gdn = chunk_gated_delta_rule


def chunk_delta_rule(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    beta: Tensor,
    scale: float | None = None,
    initial_state: Tensor | None = None,
    output_final_state: bool = False,
    use_qk_l2norm_in_kernel: bool = False,
    cu_seqlens: Tensor | None = None,
    cu_seqlens_cpu: Tensor | None = None,
    *,
    cp_context: FLACPContext | None = None,
    **kwargs: Any,
) -> tuple[Tensor, ...]:
    """`fla_cp.chunk_gated_delta_rule` without decay. kwargs: chunk_size 16, 32 or 64."""
    check_layout(q, cu_seqlens, cp_context)
    size = chunk_size(kwargs, (16, 32, 64))
    nothing_left("chunk_delta_rule", kwargs)
    return ops.chunk_gated_delta_rule(
        q,
        k,
        v,
        no_decay(q, v),
        beta,
        scale=scale,
        initial_state=initial_state,
        output_final_state=output_final_state,
        use_qk_l2norm_in_kernel=use_qk_l2norm_in_kernel,
        chunk_size=size,
        **places(cu_seqlens, cu_seqlens_cpu, cp_context),
    )


def chunk_gated_delta_product(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor | None,
    beta: Tensor,
    num_householder: int,
    scale: float | None = None,
    initial_state: Tensor | None = None,
    output_final_state: bool = False,
    use_qk_l2norm_in_kernel: bool = False,
    cu_seqlens: Tensor | None = None,
    cu_seqlens_cpu: Tensor | None = None,
    cp_context: FLACPContext | None = None,
) -> tuple[Tensor, ...]:
    """`fla_cp.chunk_gated_delta_product`. g=None: no decay."""
    check_layout(q, cu_seqlens, cp_context)
    return ops.chunk_gated_delta_product(
        q,
        k,
        v,
        no_decay(q, v) if g is None else g,
        beta,
        num_householder,
        scale=scale,
        initial_state=initial_state,
        output_final_state=output_final_state,
        use_qk_l2norm_in_kernel=use_qk_l2norm_in_kernel,
        **places(cu_seqlens, cu_seqlens_cpu, cp_context),
    )


def chunk_comba(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    p: Tensor | None,
    g: Tensor,
    beta: Tensor | None = None,
    scale: float | None = None,
    initial_state: Tensor | None = None,
    output_final_state: bool = False,
    use_qk_l2norm_in_kernel: bool = False,
    cu_seqlens: Tensor | None = None,
    cu_seqlens_cpu: Tensor | None = None,
    *,
    cp_context: FLACPContext | None = None,
) -> tuple[Tensor, ...]:
    """`fla_cp.chunk_comba`. p=None: k reads the state. beta=None: ones."""
    check_layout(q, cu_seqlens, cp_context)
    return ops.chunk_comba(
        q,
        k,
        v,
        k if p is None else p,
        g,
        ones_or(beta, v),
        scale=scale,
        initial_state=initial_state,
        output_final_state=output_final_state,
        use_qk_l2norm_in_kernel=use_qk_l2norm_in_kernel,
        **places(cu_seqlens, cu_seqlens_cpu, cp_context),
    )


def chunk_gla(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor,
    scale: float | None = None,
    initial_state: Tensor | None = None,
    output_final_state: bool = False,
    state_v_first: bool = False,
    cu_seqlens: Tensor | None = None,
    cu_seqlens_cpu: Tensor | None = None,
    *,
    cp_context: FLACPContext | None = None,
) -> tuple[Tensor, ...]:
    """`fla_cp.chunk_gla`."""
    check_layout(q, cu_seqlens, cp_context)
    return ops.chunk_gla(
        q,
        k,
        v,
        g,
        scale=scale,
        initial_state=initial_state,
        output_final_state=output_final_state,
        state_v_first=state_v_first,
        **places(cu_seqlens, cu_seqlens_cpu, cp_context),
    )


def chunk_simple_gla(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor | None = None,
    g_gamma: Tensor | None = None,
    scale: float | None = None,
    initial_state: Tensor | None = None,
    output_final_state: bool = False,
    state_v_first: bool = False,
    cu_seqlens: Tensor | None = None,
    cu_seqlens_cpu: Tensor | None = None,
    *,
    cp_context: FLACPContext | None = None,
    **kwargs: Any,
) -> tuple[Tensor, ...]:
    """`fla_cp.chunk_simple_gla`. g_gamma: [HV], the log decay at every token.

    kwargs: chunk_size 16, 32, 64, 128, 256 or None. The call chooses for the last three.
    """
    check_layout(q, cu_seqlens, cp_context)
    size = chunk_size(kwargs, (16, 32, 64, 128, 256, None))
    nothing_left("chunk_simple_gla", kwargs)
    return ops.chunk_simple_gla(
        q,
        k,
        v,
        head_decay(q, v, g, g_gamma),
        scale=scale,
        initial_state=initial_state,
        output_final_state=output_final_state,
        state_v_first=state_v_first,
        chunk_size=size,
        **places(cu_seqlens, cu_seqlens_cpu, cp_context),
    )


def chunk_dplr_delta_rule(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    a: Tensor,
    b: Tensor,
    gk: Tensor,
    scale: float | None = None,
    initial_state: Tensor | None = None,
    output_final_state: bool = False,
    cu_seqlens: Tensor | None = None,
    cu_seqlens_cpu: Tensor | None = None,
    safe_gate: bool = False,
    chunk_size: int | None = None,
    disable_recompute: bool = False,
    cp_context: FLACPContext | None = None,
    lower_bound: float | None = None,
    **kwargs: Any,
) -> tuple[Tensor, ...]:
    """`fla_cp.chunk_dplr_delta_rule`. chunk_size: 16, 32, 64 or None, in tokens. 64 gives chunks of
    32 tokens, which are the longest. A lower_bound of at least -5 allows what safe_gate allows, as
    in FLA."""
    check_layout(q, cu_seqlens, cp_context)
    nothing_left("chunk_dplr_delta_rule", kwargs)
    return ops.chunk_dplr_delta_rule(
        q,
        k,
        v,
        a,
        b,
        gk,
        scale=scale,
        initial_state=initial_state,
        output_final_state=output_final_state,
        disable_recompute=disable_recompute,
        **bounded(safe_gate, lower_bound, chunk_size),
        **places(cu_seqlens, cu_seqlens_cpu, cp_context),
    )


def chunk_rwkv7(
    r: Tensor,
    w: Tensor,
    k: Tensor,
    v: Tensor,
    a: Tensor,
    b: Tensor,
    scale: float = 1.0,
    initial_state: Tensor | None = None,
    output_final_state: bool = False,
    cu_seqlens: Tensor | None = None,
    cu_seqlens_cpu: Tensor | None = None,
    safe_gate: bool = False,
    chunk_size: int | None = None,
    disable_recompute: bool = False,
    cp_context: FLACPContext | None = None,
    lower_bound: float | None = None,
) -> tuple[Tensor, ...]:
    """`fla_cp.chunk_rwkv7`. chunk_size and lower_bound: as in `chunk_dplr_delta_rule`."""
    check_layout(r, cu_seqlens, cp_context, "r")
    return ops.chunk_rwkv7(
        r,
        w,
        k,
        v,
        a,
        b,
        scale=scale,
        initial_state=initial_state,
        output_final_state=output_final_state,
        disable_recompute=disable_recompute,
        **bounded(safe_gate, lower_bound, chunk_size),
        **places(cu_seqlens, cu_seqlens_cpu, cp_context),
    )
