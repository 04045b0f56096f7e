"""What the operators of the family share. A member is two facts, and every call takes one way
through here: options -> checks -> plan -> run.

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
from fla_cp.context import compare_ranks
from fla_cp.handle import Handle
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
from fla_cp.ops.options import FLAGS, TENSORS, Options
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

_TENSORS = ("q", "k", "v", "g", "beta", "p")
_REQUIRED = {"none": 4, "k": 5, "p": 6}
"""How many of `_TENSORS` must be given, by what is removed from the state."""

_NAMES = (*_TENSORS, *tuple(Options._fields)[TENSORS])
_FLAGS = tuple(Options._fields)[FLAGS]

_CHUNK_ONLY = (
    "safe_gate",
    "disable_recompute",
    "return_intermediate_states",
    "cp_context",
    "precision",
)
_RECURRENT_ONLY = ("inplace_final_state",)


def chunk_options(operator: str, options: dict[str, Any], *without: str) -> Options:
    """The options of an operator over whole sequences; TypeError for keywords that it has not."""
    return _options(operator, options, (*without, *_RECURRENT_ONLY))


def recurrent_options(operator: str, options: dict[str, Any], *without: str) -> Options:
    """The options of an operator token by token."""
    return _options(operator, options, (*without, *_CHUNK_ONLY))


def _options(operator: str, options: dict[str, Any], without: tuple[str, ...]) -> Options:
    for name in options:
        if name in without or name not in Options._fields:
            raise TypeError(f"{operator}() got an unexpected keyword argument {name!r}")
    return Options(**options)


def chunk(
    member: Member,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor,
    beta: Tensor | None,
    p: Tensor | None,
    options: Options,
    rows: int = 1,
) -> tuple[Tensor, ...]:
    """One call over whole sequences, in chunks; see `chunk_kda`. rows: of k, v and beta for each
    token, see gated_delta_product.py."""
    tensors, o = (q, k, v, g, beta, p), options
    rule = _checked(member, tensors, o)
    context = o.cp_context
    check_choice("precision", o.precision, ("default", "high"))
    check_sequences(q.shape[1], q.shape[0], o.cu_seqlens, context, o.cu_seqlens_cpu)
    check_fixed_call(
        context,
        initial_state=o.initial_state,
        output_final_state=o.output_final_state,
        return_intermediate_states=o.return_intermediate_states,
    )
    packing = None
    if torch.compiler.is_compiling():  # the op looks the packing up when it runs
        sequences = q.shape[0]
        if context is not None:
            sequences = Handle.read(context.handle.sizes).sequences
    else:
        packing = context.packing if context else _packing(q, o.cu_seqlens, o.cu_seqlens_cpu, rows)
        sequences = packing.sequences
    check_inputs(*tensors, o, rule, sequences=sequences, rows=rows)
    backend = resolve(o.impl, q.device, q.dtype)
    (B, T, _, K), (HV, V) = q.shape, v.shape[2:]
    rates = o.A_log, o.dt_bias
    if rows > 1:
        if context is not None:
            context = context.repeated(rows)
            packing = context.packing
        q, g = _spread(backend, q, g, rates if o.use_gate_in_kernel else None, rows)
        rule, rates, T = rule._replace(gate="given"), (None, None), T * rows
    if context is not None and not torch.compiler.is_compiling():  # else the op does
        shape = HV, K, V
        compare_ranks(context, *member, shape, q.dtype, o.initial_state, o.output_final_state)
    x = _token_rows(q, k, v, g, beta, *rates, p)
    given = (*x, _accumulated(o.initial_state, q))
    wanted = o.output_final_state, o.return_intermediate_states
    final: Any
    if packing is None and context is not None and context.world_size > 1:
        out, final, h = custom_op_cp.sharded_delta_rule(context, rule, o.impl, given, *wanted)
        final = final if o.output_final_state else None
    elif packing is None:
        fixed = custom_op.constants(rule, o.impl, context, B, T)
        found = custom_op.delta_rule(*given, *fixed, *wanted)
        out, h = found[0], found[2]
        final = found[1] if o.output_final_state else None
    else:
        plan = custom_op.make_plan(rule, packing, context, backend, x)
        out, final, h = DeltaRuleFunction.apply(plan, *wanted, *given)
    out = out.view(B, T, HV, V)
    if rows > 1:
        out = out[:, rows - 1 :: rows]
    if not o.return_intermediate_states:
        return out, final
    return out, final, h.unflatten(0, (B, -1))


def recurrent(
    member: Member,
    name: str,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor,
    beta: Tensor | None,
    p: Tensor | None,
    options: Options,
    rows: int = 1,
) -> tuple[Tensor, Tensor | None]:
    """One call token by token, forward only; see `fused_recurrent_kda`. name: of its operator,
    fused_recurrent_<name>. rows: as in `chunk`."""
    tensors, o = (q, k, v, g, beta, p), options
    rule = _checked(member, tensors, o)
    (B, T, _, K), (HV, V) = q.shape, v.shape[2:]
    check_sequences(T, B, o.cu_seqlens, None, o.cu_seqlens_cpu)
    N = B if o.cu_seqlens is None else len(o.cu_seqlens) - 1
    check_inputs(*tensors, o, rule, sequences=N, rows=rows)
    backend = resolve(o.impl, q.device, q.dtype)
    values: tuple[Any, ...] = o
    given = (*tensors, *values[TENSORS])
    check_forward_only(f"fused_recurrent_{name}", f"chunk_{name}", _NAMES, given)
    if o.inplace_final_state:
        check_in_place("initial_state", o.initial_state, accumulator(q.dtype))
    rates, offsets = (o.A_log, o.dt_bias), (o.cu_seqlens, o.cu_seqlens_cpu)
    if rows > 1:
        q, g = _spread(backend, q, g, rates if o.use_gate_in_kernel else None, rows)
        rule, rates, T = rule._replace(gate="given"), (None, None), T * rows
        offsets = tuple(None if cu is None else rows * cu for cu in offsets)  # type: ignore[assignment]
    x = _token_rows(q, k, v, g, beta, *rates, p)
    first, final = _accumulated(o.initial_state, q), None
    if o.inplace_final_state:
        final = first
    elif o.output_final_state:
        shape = (N, HV, V, K) if rule.state_v_first else (N, HV, K, V)
        final = torch.empty(shape, dtype=accumulator(q.dtype), device=q.device)
    out = backend.recurrent(rule, x, first, final, Sequences(N, *offsets))
    out = out.view(B, T, HV, V)
    return out if rows == 1 else out[:, rows - 1 :: rows], final


def _checked(member: Member, tensors: tuple[Tensor | None, ...], o: Options) -> DeltaRule:
    """Checks what kind of thing each argument is, and how many dims tensors have."""
    values: tuple[Any, ...] = o
    check_tensors(_NAMES, (*tensors, *values[TENSORS]), _REQUIRED[member.removal])
    check_flags(_FLAGS, values[FLAGS])
    v_first = check_state_layout(o.transpose_state_layout, o.state_v_first)
    scale, lower_bound = check_scale(o.scale), check_lower_bound(o.lower_bound)
    if o.safe_gate and lower_bound is None and not o.use_gate_in_kernel:
        lower_bound = SAFE_GATE_BOUND
    check_ndims(*tensors, per_head=member.per_head)  # type: ignore[arg-type]
    q = tensors[0]
    assert q is not None
    return DeltaRule(
        scale=q.shape[-1] ** -0.5 if scale is None else scale,
        gate=gate_of(o.use_gate_in_kernel, lower_bound),
        lower_bound=lower_bound,
        safe_gate=o.safe_gate,
        qk_l2norm=o.use_qk_l2norm_in_kernel,
        beta_factor=(1.0 + o.allow_neg_eigval) if o.use_beta_sigmoid_in_kernel else None,
        use_exp2=o.use_exp2,
        state_v_first=v_first,
        keep_intermediates=o.disable_recompute,
        per_head=member.per_head,
        removal=member.removal,
        precise=o.precision == "high",
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
