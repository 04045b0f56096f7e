"""What the operators of the family share: a member is two facts, and every call goes through here.

S_t = Diag(a_t) S_{t-1} + b_t k_t (v_t - r_t)^T          o_t = scale * S_t^T q_t

member                     a_t             r_t
KDA                        a key channel   S^T k_t, after the decay
gated delta rule           a head          S^T k_t, after the decay
Comba                      a head          S_{t-1}^T p_t, before the decay
GLA, simple GLA            channel, head   0, and b_t = 1
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor

from .. import library, library_sharded
from ..autograd import DeltaRuleFunction
from ..backend import resolve
from ..context import FLACPContext, Handle
from ..packing import Packing
from ..rule import DeltaRule, accumulator
from ..stages.intra import Inputs
from ..stages.recurrent import Sequences
from ..validate import (
    check_fixed_call,
    check_forward_only,
    check_in_place,
    check_inputs,
    check_ndims,
    check_offsets,
    check_precision,
    check_sequences,
)


class Member(NamedTuple):
    """per_head: one decay a head, g [B, T, HV]. removal: "k", "p" or "none", see `DeltaRule`."""

    per_head: bool
    removal: str


KDA = Member(False, "k")
GATED_DELTA_RULE = Member(True, "k")
COMBA = Member(True, "p")
GLA = Member(False, "none")
SIMPLE_GLA = Member(True, "none")


def chunk(
    member: Member,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor,
    beta: Tensor | None,
    p: Tensor | None = None,
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
    precision: str = "default",
    impl: str = "auto",
) -> tuple[Tensor, ...]:
    """One call over whole sequences, in chunks; see `chunk_kda` for the keywords."""
    v_first = transpose_state_layout or state_v_first
    check_precision(precision)
    check_ndims(q, k, v, g, beta, p, per_head=member.per_head)
    check_sequences(q.shape[1], q.shape[0], cu_seqlens, cp_context, cu_seqlens_cpu)
    check_fixed_call(
        cp_context,
        initial_state=initial_state,
        output_final_state=output_final_state,
        return_intermediate_states=return_intermediate_states,
    )
    if torch.compiler.is_compiling():  # the op looks the packing up when it runs
        packing, sequences = None, q.shape[0]
        if cp_context is not None:
            sequences = Handle.read(cp_context.handle.sizes).sequences
    else:
        packing = cp_context.packing if cp_context else _packing(q, cu_seqlens, cu_seqlens_cpu)
        sequences = packing.sequences
    check_inputs(
        q,
        k,
        v,
        g,
        beta,
        p,
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
        per_head=member.per_head,
    )
    backend = resolve(impl, q.device, q.dtype)
    (B, T, _, K), (HV, V) = q.shape, v.shape[2:]
    rule = _rule_fields(
        member,
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
        precise=precision == "high",
    )
    x = _token_rows(q, k, v, g, beta, A_log, dt_bias, p)
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
        plan = library.make_plan(DeltaRule(*rule), packing, cp_context, backend, x)
        o, final, h = DeltaRuleFunction.apply(
            plan, output_final_state, return_intermediate_states, *tensors
        )
    o = o.view(B, T, HV, V)
    if not return_intermediate_states:
        return o, final
    return o, final, h.unflatten(0, (B, -1))


def recurrent(
    member: Member,
    name: str,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor,
    beta: Tensor | None,
    p: Tensor | None = None,
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
    """One call token by token, forward only; see `fused_recurrent_kda`. name: of its operator,
    fused_recurrent_<name>."""
    v_first = transpose_state_layout or state_v_first
    check_ndims(q, k, v, g, beta, p, per_head=member.per_head)
    (B, T, _, K), (HV, V) = q.shape, v.shape[2:]
    check_sequences(T, B, cu_seqlens, None, cu_seqlens_cpu)
    N = B if cu_seqlens is None else len(cu_seqlens) - 1
    check_inputs(
        q,
        k,
        v,
        g,
        beta,
        p,
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
        per_head=member.per_head,
    )
    backend = resolve(impl, q.device, q.dtype)
    x = _token_rows(q, k, v, g, beta, A_log, dt_bias, p)
    check_forward_only(
        f"fused_recurrent_{name}", f"chunk_{name}", **x._asdict(), initial_state=initial_state
    )
    if inplace_final_state:
        check_in_place("initial_state", initial_state)
    rule = DeltaRule(
        *_rule_fields(
            member,
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


def refuse(operator: str, options: dict[str, Any], *names: str) -> None:
    """TypeError for keywords that the member has not."""
    for name in names:
        if name in options:
            raise TypeError(f"{operator}() got an unexpected keyword argument {name!r}")


def _rule_fields(
    member: Member,
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
    precise: bool = False,
) -> tuple[Any, ...]:
    """The fields of `DeltaRule`, in order."""
    return (
        K**-0.5 if scale is None else scale,
        gate_of(use_gate_in_kernel, lower_bound),
        lower_bound,
        safe_gate,
        use_qk_l2norm_in_kernel,
        (2.0 if allow_neg_eigval else 1.0) if use_beta_sigmoid_in_kernel else None,
        use_exp2,
        state_v_first,
        keep_intermediates,
        *member,
        precise,
    )


def gate_of(in_kernel: bool, lower_bound: float | None) -> str:
    """A row of `stages.gate.GATES`."""
    if not in_kernel:
        return "given"
    return "softplus" if lower_bound is None else "sigmoid"


def _token_rows(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor,
    beta: Tensor | None,
    A_log: Tensor | None,
    dt_bias: Tensor | None,
    p: Tensor | None,
) -> Inputs:
    """The inputs with their first two dims, B and T, folded into one."""

    def rows(x: Tensor) -> Tensor:
        return x.reshape(-1, *x.shape[2:])

    return Inputs(
        rows(q),
        rows(k),
        rows(v),
        rows(g),
        None if beta is None else rows(beta),
        A_log,
        dt_bias,
        None if p is None else rows(p),
    )


def _packing(q: Tensor, cu_seqlens: Tensor | None, cu_seqlens_cpu: Tensor | None) -> Packing:
    if cu_seqlens is None:
        B, T = q.shape[:2]
        return library.packing_of(tuple(range(0, B * T + 1, T)))
    offsets = tuple((cu_seqlens if cu_seqlens_cpu is None else cu_seqlens_cpu).tolist())
    check_offsets("cu_seqlens", offsets, q.shape[1])
    return library.packing_of(offsets)
