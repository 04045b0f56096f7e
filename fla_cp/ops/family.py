"""What the operators of the family share. A member is a few facts, and every call goes one way
through here: options -> checks -> plan -> run.

S_t = Diag(a_t) S_{t-1} + b_t k_t (v_t - r_t)^T          o_t = scale * S_t^T q_t

member                     a_t             r_t
KDA                        a key channel   S^T k_t, after the decay
gated delta rule           a head          S^T k_t, after the decay
Comba                      a head          S_{t-1}^T p_t, before the decay
GLA, simple GLA            channel, head   0, and b_t = 1
"""

from collections.abc import Mapping
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
from fla_cp.ops.options import CHUNK_ONLY, FLAGS, RECURRENT_ONLY, TENSORS, Options, Tensors
from fla_cp.partition.checks import check_offsets
from fla_cp.partition.packing import Packing
from fla_cp.rule import DeltaRule, accumulator


class Member(NamedTuple):
    """name: of its operators, chunk_<name> and fused_recurrent_<name>. per_head: one decay a head,
    g [B, T, HV]. removal: "k", "p" or "none", see `DeltaRule`. without: keywords that it has not.
    """

    name: str
    per_head: bool
    removal: str
    without: tuple[str, ...] = ()


_BOUND = ("safe_gate", "lower_bound")
_OF_BETA = ("use_beta_sigmoid_in_kernel", "allow_neg_eigval")

KDA = Member("kda", False, "k")
GATED_DELTA_RULE = Member("gated_delta_rule", True, "k", _BOUND)
GATED_DELTA_PRODUCT = Member(
    "gated_delta_product", True, "k", (*_BOUND, "return_intermediate_states")
)
COMBA = Member("comba", True, "p", _BOUND)
GLA = Member("gla", False, "none", _OF_BETA)
SIMPLE_GLA = Member("simple_gla", True, "none", (*_OF_BETA, *_BOUND))

_REQUIRED = {"none": 4, "k": 5, "p": 6}
"""How many of `Tensors` must be given, by what is removed from the state."""

_NAMES = (*Tensors._fields, *tuple(Options._fields)[TENSORS])
_FLAGS = tuple(Options._fields)[FLAGS]


def _options(operator: str, without: tuple[str, ...], options: Mapping[str, Any]) -> Options:
    """The options of a call. Raises TypeError for keywords that the operator does not have."""
    for name in options:
        if name in without or name not in Options._fields:
            raise TypeError(f"{operator}() got an unexpected keyword argument {name!r}")
    return Options(**options)


def chunk(
    member: Member, x: Tensors, options: Mapping[str, Any], rows: int = 1
) -> tuple[Tensor, ...]:
    """One call over whole sequences, in chunks; see `chunk_kda`. rows: how many rows of k, v and
    beta each token has, see gated_delta_product.py."""
    o = _options(f"chunk_{member.name}", (*member.without, *RECURRENT_ONLY), options)
    rule = _checked(member, x, o)
    context = o.cp_context
    check_choice("precision", o.precision, ("default", "high"))
    check_sequences(x.q.shape[1], x.q.shape[0], o.cu_seqlens, context, o.cu_seqlens_cpu)
    check_fixed_call(
        context,
        initial_state=o.initial_state,
        output_final_state=o.output_final_state,
        return_intermediate_states=o.return_intermediate_states,
    )
    packing = None
    if torch.compiler.is_compiling():  # the op looks the packing up when it runs
        sequences = x.q.shape[0]
        if context is not None:
            sequences = Handle.read(context.handle.sizes).sequences
    else:
        packing = context.packing if context else _packing(x.q, o, rows)
        sequences = packing.sequences
    check_inputs(x, o, rule, sequences=sequences, rows=rows)
    backend = resolve(o.impl, x.q.device, x.q.dtype)
    (B, T, _, K), (HV, V) = x.q.shape, x.v.shape[2:]
    rates = o.A_log, o.dt_bias
    if rows > 1:
        if context is not None:
            context = context.repeated(rows)
            packing = context.packing
        x = _spread(backend, x, rates if o.use_gate_in_kernel else None, rows)
        rule, rates, T = rule._replace(gate="given"), (None, None), T * rows
    if context is not None and not torch.compiler.is_compiling():  # else the op does
        shape, wanted = (HV, K, V), o.output_final_state
        compare_ranks(context, rule, shape, x.q.dtype, o.initial_state, wanted)
    inputs = _token_rows(x, *rates)
    given = (*inputs, _accumulated(o.initial_state, x.q))
    outputs = o.output_final_state, o.return_intermediate_states
    final: Any
    if packing is None and context is not None and context.world_size > 1:
        out, final, h = custom_op_cp.sharded_delta_rule(context, rule, o.impl, given, *outputs)
        final = final if o.output_final_state else None
    elif packing is None:
        fixed = custom_op.constants(rule, o.impl, context, B, T)
        found = custom_op.delta_rule(*given, *fixed, *outputs)
        out, h = found[0], found[2]
        final = found[1] if o.output_final_state else None
    else:
        plan = custom_op.make_plan(rule, packing, context, backend, inputs)
        out, final, h = DeltaRuleFunction.apply(plan, *outputs, *given)
    out = out.view(B, T, HV, V)
    if rows > 1:
        out = out[:, rows - 1 :: rows]
    if not o.return_intermediate_states:
        return out, final
    return out, final, h.unflatten(0, (B, -1))


def recurrent(
    member: Member, x: Tensors, options: Mapping[str, Any], rows: int = 1
) -> tuple[Tensor, Tensor | None]:
    """One call token by token, forward only; see `fused_recurrent_kda`. rows: as in `chunk`."""
    operator = f"fused_recurrent_{member.name}"
    o = _options(operator, (*member.without, *CHUNK_ONLY), options)
    rule = _checked(member, x, o)
    q, (B, T, _, K), (HV, V) = x.q, x.q.shape, x.v.shape[2:]
    check_sequences(T, B, o.cu_seqlens, None, o.cu_seqlens_cpu)
    N = B if o.cu_seqlens is None else len(o.cu_seqlens) - 1
    check_inputs(x, o, rule, sequences=N, rows=rows)
    backend = resolve(o.impl, q.device, q.dtype)
    values: tuple[Any, ...] = o
    check_forward_only(operator, f"chunk_{member.name}", _NAMES, (*x, *values[TENSORS]))
    if o.inplace_final_state:
        check_in_place("initial_state", o.initial_state, accumulator(q.dtype))
    rates, cu, cu_cpu = (o.A_log, o.dt_bias), o.cu_seqlens, o.cu_seqlens_cpu
    if rows > 1:
        x = _spread(backend, x, rates if o.use_gate_in_kernel else None, rows)
        rule, rates, T = rule._replace(gate="given"), (None, None), T * rows
        cu, cu_cpu = (None if t is None else rows * t for t in (cu, cu_cpu))
    first, final = _accumulated(o.initial_state, q), None
    if o.inplace_final_state:
        final = first
    elif o.output_final_state:
        shape = (N, HV, V, K) if rule.state_v_first else (N, HV, K, V)
        final = torch.empty(shape, dtype=accumulator(q.dtype), device=q.device)
    out = backend.recurrent(rule, _token_rows(x, *rates), first, final, Sequences(N, cu, cu_cpu))
    out = out.view(B, T, HV, V)
    return out if rows == 1 else out[:, rows - 1 :: rows], final


def _checked(member: Member, x: Tensors, o: Options) -> DeltaRule:
    """The rule of a call, after checks of the kind of each argument and the dims of tensors."""
    values: tuple[Any, ...] = o
    check_tensors(_NAMES, (*x, *values[TENSORS]), _REQUIRED[member.removal])
    check_flags(_FLAGS, values[FLAGS])
    v_first = check_state_layout(o.transpose_state_layout, o.state_v_first)
    scale, lower_bound = check_scale(o.scale), check_lower_bound(o.lower_bound)
    if o.safe_gate and lower_bound is None and not o.use_gate_in_kernel:
        lower_bound = SAFE_GATE_BOUND
    check_ndims(x, per_head=member.per_head)
    return DeltaRule(
        scale=x.q.shape[-1] ** -0.5 if scale is None else scale,
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
    """The gate of a `DeltaRule`."""
    if not in_kernel:
        return "given"
    return "softplus" if lower_bound is None else "sigmoid"


def head_gate(backend: Backend, g: Tensor, A_log: Tensor | None, dt_bias: Tensor | None) -> Tensor:
    """Log decay [.., HV] of raw projections [.., HV], fp32 (fp64)."""
    rule = DeltaRule(scale=1.0, gate="softplus", per_head=True)
    log_decay: Tensor = backend.gate(rule, g[..., None], one_dim(A_log), one_dim(dt_bias))[..., 0]
    return log_decay


def _spread(
    backend: Backend, x: Tensors, rates: tuple[Tensor | None, Tensor | None] | None, rows: int
) -> Tensors:
    """x with `rows` rows of q and g for each token: g is in the first, q in the last, and the
    others
    are zero. rates: A_log and dt_bias if g is raw. It is then activated here, since a row without a
    decay has no raw projection."""
    q, g = x.q, x.g
    if rates is not None:
        g = head_gate(backend, g, *rates)
    zeros = g.new_zeros(*g.shape[:2], rows - 1, *g.shape[2:])
    g = torch.cat((g[:, :, None], zeros), 2).flatten(1, 2)
    zeros = q.new_zeros(*q.shape[:2], rows - 1, *q.shape[2:])
    return x._replace(q=torch.cat((zeros, q[:, :, None]), 2).flatten(1, 2), g=g)


def _accumulated(state: Tensor | None, q: Tensor) -> Tensor | None:
    """The state in the dtype that the operator computes with, if it was given in a narrower one."""
    dtype = accumulator(q.dtype)
    return state if state is None or state.dtype == dtype else state.to(dtype)


def one_dim(x: Tensor | None) -> Tensor | None:
    """A_log or dt_bias in one dim, in which the stages read them."""
    return x if x is None or x.ndim == 1 else x.flatten()


def _token_rows(x: Tensors, A_log: Tensor | None, dt_bias: Tensor | None) -> Inputs:
    """The inputs with their first two dims, B and T, folded into one."""
    q, k, v, g, beta, p = (None if t is None else t.reshape(-1, *t.shape[2:]) for t in x)
    assert q is not None and k is not None and v is not None and g is not None
    return Inputs(q, k, v, g, beta, one_dim(A_log), one_dim(dt_bias), p)


def _packing(q: Tensor, o: Options, rows: int) -> Packing:
    """The packing of a call without a context."""
    if o.cu_seqlens is None:
        B, T = q.shape[0], q.shape[1] * rows
        return custom_op.packing_of(tuple(range(0, B * T + 1, T)))
    offsets = tuple((o.cu_seqlens if o.cu_seqlens_cpu is None else o.cu_seqlens_cpu).tolist())
    check_offsets("cu_seqlens", offsets, q.shape[1])
    return custom_op.packing_of(offsets if rows == 1 else tuple(rows * i for i in offsets))
