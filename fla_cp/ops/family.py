"""What the operators of the family share: a member is two facts, and every call goes through here.
Long because each form lists the keywords, which it checks before it uses them.

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

from fla_cp import custom_op, custom_op_cp
from fla_cp.arguments import (
    check_choice,
    check_flags,
    check_lower_bound,
    check_scale,
    check_state_layout,
    check_tensors,
)
from fla_cp.autograd import DeltaRuleFunction
from fla_cp.context import FLACPContext, Handle, compare_ranks
from fla_cp.kernels import Backend, resolve
from fla_cp.kernels.torch.intra import Inputs
from fla_cp.kernels.torch.recurrent import Sequences
from fla_cp.ops.checks import (
    SAFE_GATE_BOUND,
    check_fixed_call,
    check_forward_only,
    check_in_place,
    check_inputs,
    check_ndims,
    check_sequences,
)
from fla_cp.partition.checks import check_offsets
from fla_cp.partition.packing import Packing
from fla_cp.rule import DeltaRule, accumulator


class Member(NamedTuple):
    """per_head: one decay a head, g [B, T, HV]. removal: "k", "p" or "none", see `DeltaRule`."""

    per_head: bool
    removal: str


KDA = Member(False, "k")
GATED_DELTA_RULE = Member(True, "k")
COMBA = Member(True, "p")
GLA = Member(False, "none")
SIMPLE_GLA = Member(True, "none")


_TENSORS = (
    "q",
    "k",
    "v",
    "g",
    "beta",
    "p",
    "A_log",
    "dt_bias",
    "initial_state",
    "cu_seqlens",
    "cu_seqlens_cpu",
)
_REQUIRED = {"none": 4, "k": 5, "p": 6}
"""How many of `_TENSORS` must be given, by what is removed from the state."""

_FLAGS = (
    "output_final_state",
    "use_qk_l2norm_in_kernel",
    "use_gate_in_kernel",
    "use_beta_sigmoid_in_kernel",
    "allow_neg_eigval",
    "use_exp2",
)
_CHUNK_FLAGS = (*_FLAGS, "safe_gate", "disable_recompute", "return_intermediate_states")
_RECURRENT_FLAGS = (*_FLAGS, "inplace_final_state")


def chunk(
    member: Member,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor,
    beta: Tensor | None,
    p: Tensor | None = None,
    rows: int = 1,
    /,
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
    transpose_state_layout: bool | None = None,
    state_v_first: bool | None = None,
    cu_seqlens: Tensor | None = None,
    cu_seqlens_cpu: Tensor | None = None,
    cp_context: FLACPContext | None = None,
    precision: str = "default",
    impl: str = "auto",
) -> tuple[Tensor, ...]:
    """One call over whole sequences, in chunks; see `chunk_kda` for the keywords. rows: of k, v and
    beta for each token, see product.py."""
    given = (q, k, v, g, beta, p, A_log, dt_bias, initial_state, cu_seqlens, cu_seqlens_cpu)
    check_tensors(_TENSORS, given, _REQUIRED[member.removal])
    check_flags(
        _CHUNK_FLAGS,
        (
            output_final_state,
            use_qk_l2norm_in_kernel,
            use_gate_in_kernel,
            use_beta_sigmoid_in_kernel,
            allow_neg_eigval,
            use_exp2,
            safe_gate,
            disable_recompute,
            return_intermediate_states,
        ),
    )
    v_first = check_state_layout(transpose_state_layout, state_v_first)
    scale, lower_bound = check_scale(scale), check_lower_bound(lower_bound)
    if safe_gate and lower_bound is None and not use_gate_in_kernel:
        lower_bound = SAFE_GATE_BOUND
    check_choice("precision", precision, ("default", "high"))
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
        packing = (
            cp_context.packing if cp_context else _packing(q, cu_seqlens, cu_seqlens_cpu, rows)
        )
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
        rows=rows,
    )
    backend = resolve(impl, q.device, q.dtype)
    (B, T, _, K), (HV, V) = q.shape, v.shape[2:]
    if rows > 1:
        if cp_context is not None:
            cp_context = cp_context.repeated(rows)
            packing = cp_context.packing
        q, g = _spread(backend, q, g, (A_log, dt_bias) if use_gate_in_kernel else None, rows)
        A_log, dt_bias, use_gate_in_kernel, T = None, None, False, T * rows
    if cp_context is not None and not torch.compiler.is_compiling():  # else the op does
        compare_ranks(cp_context, *member, (HV, K, V), q.dtype, initial_state, output_final_state)
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
    tensors = (*x, _accumulated(initial_state, q))
    final: Any
    if packing is None and cp_context is not None and cp_context.world_size > 1:
        o, final, h = custom_op_cp.sharded_delta_rule(
            cp_context, rule, impl, tensors, output_final_state, return_intermediate_states
        )
        final = final if output_final_state else None
    elif packing is None:
        fixed = custom_op.constants(rule, impl, cp_context, B, T)
        found = custom_op.delta_rule(
            *tensors, *fixed, output_final_state, return_intermediate_states
        )
        o, h = found[0], found[2]
        final = found[1] if output_final_state else None
    else:
        plan = custom_op.make_plan(DeltaRule(*rule), packing, cp_context, backend, x)
        o, final, h = DeltaRuleFunction.apply(
            plan, output_final_state, return_intermediate_states, *tensors
        )
    o = o.view(B, T, HV, V)
    if rows > 1:
        o = o[:, rows - 1 :: rows]
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
    rows: int = 1,
    /,
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
    transpose_state_layout: bool | None = None,
    state_v_first: bool | None = None,
    cu_seqlens: Tensor | None = None,
    cu_seqlens_cpu: Tensor | None = None,
    impl: str = "auto",
) -> tuple[Tensor, Tensor | None]:
    """One call token by token, forward only; see `fused_recurrent_kda`. name: of its operator,
    fused_recurrent_<name>. rows: as in `chunk`."""
    given = (q, k, v, g, beta, p, A_log, dt_bias, initial_state, cu_seqlens, cu_seqlens_cpu)
    check_tensors(_TENSORS, given, _REQUIRED[member.removal])
    check_flags(
        _RECURRENT_FLAGS,
        (
            output_final_state,
            use_qk_l2norm_in_kernel,
            use_gate_in_kernel,
            use_beta_sigmoid_in_kernel,
            allow_neg_eigval,
            use_exp2,
            inplace_final_state,
        ),
    )
    v_first = check_state_layout(transpose_state_layout, state_v_first)
    scale, lower_bound = check_scale(scale), check_lower_bound(lower_bound)
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
        rows=rows,
    )
    backend = resolve(impl, q.device, q.dtype)
    check_forward_only(f"fused_recurrent_{name}", f"chunk_{name}", _TENSORS, given)
    if inplace_final_state:
        check_in_place("initial_state", initial_state, accumulator(q.dtype))
    if rows > 1:
        q, g = _spread(backend, q, g, (A_log, dt_bias) if use_gate_in_kernel else None, rows)
        A_log, dt_bias, use_gate_in_kernel, T = None, None, False, T * rows
        cu_seqlens, cu_seqlens_cpu = (
            None if cu is None else rows * cu for cu in (cu_seqlens, cu_seqlens_cpu)
        )
    x = _token_rows(q, k, v, g, beta, A_log, dt_bias, p)
    first = _accumulated(initial_state, q)
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
        final = first
    elif output_final_state:
        shape = (N, HV, V, K) if v_first else (N, HV, K, V)
        final = torch.empty(shape, dtype=accumulator(q.dtype), device=q.device)
    sequences = Sequences(N, cu_seqlens, cu_seqlens_cpu)
    o = backend.recurrent(rule, x, first, final, sequences).view(B, T, HV, V)
    return o if rows == 1 else o[:, rows - 1 :: rows], final


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


def head_gate(backend: Backend, g: Tensor, A_log: Tensor | None, dt_bias: Tensor | None) -> Tensor:
    """Log decay [.., HV] of raw projections [.., HV], fp32 (fp64)."""
    rule = DeltaRule(scale=1.0, gate="softplus", per_head=True)
    log_decay: Tensor = backend.gate(rule, g[..., None], one_dim(A_log), one_dim(dt_bias))[..., 0]
    return log_decay


def _spread(
    backend: Backend,
    q: Tensor,
    g: Tensor,
    rates: tuple[Tensor | None, Tensor | None] | None,
    rows: int,
) -> tuple[Tensor, Tensor]:
    """q and g with `rows` rows a token: g in the first, q in the last, zeros elsewhere. rates:
    A_log and dt_bias of a raw g, which is activated here, since rows without a decay have no raw
    projection."""
    if rates is not None:
        g = head_gate(backend, g, *rates)
    zeros = g.new_zeros(*g.shape[:2], rows - 1, *g.shape[2:])
    g = torch.cat((g[:, :, None], zeros), 2).flatten(1, 2)
    zeros = q.new_zeros(*q.shape[:2], rows - 1, *q.shape[2:])
    return torch.cat((zeros, q[:, :, None]), 2).flatten(1, 2), g


def _accumulated(state: Tensor | None, q: Tensor) -> Tensor | None:
    """A state that was given in a narrower dtype, in the one that the operator computes with."""
    dtype = accumulator(q.dtype)
    return state if state is None or state.dtype == dtype else state.to(dtype)


def one_dim(x: Tensor | None) -> Tensor | None:
    """A_log or dt_bias in one dim, in which the stages read them."""
    return x if x is None or x.ndim == 1 else x.flatten()


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
        one_dim(A_log),
        one_dim(dt_bias),
        None if p is None else rows(p),
    )


def _packing(
    q: Tensor, cu_seqlens: Tensor | None, cu_seqlens_cpu: Tensor | None, rows: int
) -> Packing:
    if cu_seqlens is None:
        B, T = q.shape[0], q.shape[1] * rows
        return custom_op.packing_of(tuple(range(0, B * T + 1, T)))
    offsets = tuple((cu_seqlens if cu_seqlens_cpu is None else cu_seqlens_cpu).tolist())
    check_offsets("cu_seqlens", offsets, q.shape[1])
    return custom_op.packing_of(offsets if rows == 1 else tuple(rows * i for i in offsets))
