"""The operators computed token by token, `fused_recurrent_*`, for decoding and short sequences."""

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from fla_cp.autograd import token_rows
from fla_cp.kernels import resolve
from fla_cp.kernels.torch.intra import Inputs
from fla_cp.kernels.torch.recurrent import Pool, Sequences
from fla_cp.once_differentiable import once_differentiable
from fla_cp.ops.checks import (
    check_in_place,
    check_inputs,
    check_no_gradient,
    check_pool,
    check_sequences,
)
from fla_cp.ops.family import (
    OF_OPTIONS,
    Member,
    accumulated,
    checked_rule,
    chunk,
    options_of,
    spread,
)
from fla_cp.ops.options import CHUNK_ONLY, RECURRENT_ONLY, TENSORS, Options, Tensors
from fla_cp.ops.recurrent_op import traced_recurrent
from fla_cp.ops.wide_heads import in_narrow_heads, width_of_steps
from fla_cp.rule import DeltaRule, accumulator


def recurrent(
    member: Member, x: Tensors, options: Mapping[str, Any], rows: int = 1
) -> tuple[Tensor, Tensor | None]:
    """One call token by token; see `fused_recurrent_kda`. rows: as in `chunk`."""
    operator = f"fused_recurrent_{member.name}"
    o = options_of(operator, (*member.without, *CHUNK_ONLY), options)
    rule = checked_rule(member, x, o)
    B, T = x.q.shape[:2]
    check_sequences(T, B, o.cu_seqlens, None, o.cu_seqlens_cpu)
    N = B if o.cu_seqlens is None else len(o.cu_seqlens) - 1
    check_pool(o, N, T if o.cu_seqlens is None else 0, x.q.device)
    states = N
    if o.ssm_state_indices is not None and o.initial_state is not None:
        states = max(1, len(o.initial_state))
    check_inputs(x, member.names, o, rule, sequences=states, rows=rows)
    values: tuple[Any, ...] = o
    given: tuple[Tensor | None, ...] = (*x, *values[TENSORS])
    if o.inplace_final_state:
        check_in_place("initial_state", o.initial_state, accumulator(x.q.dtype))
        check_no_gradient("inplace_final_state=True", (*member.names, *OF_OPTIONS), given)
    width = width_of_steps(member.removal, x)
    if width is not None:
        out, final = in_narrow_heads(
            x, options, o, rule.state_v_first, lambda *y: recurrent(member, *y), width
        )
        return out, final
    if torch.is_grad_enabled() and any(t is not None and t.requires_grad for t in given):
        if torch.compiler.is_compiling():
            return _in_chunks(member, x, options, rows)
        out, final = _Recurrent.apply(member, rule, dict(options), rows, N, *given)
        return out, final
    return _run(rule, x, o, rows, N)


def _run(
    rule: DeltaRule, x: Tensors, o: Options, rows: int, N: int
) -> tuple[Tensor, Tensor | None]:
    """The recurrence of a call whose arguments were checked: o and the final states. N: how many
    sequences there are."""
    q, (B, T, _, K), (HV, V) = x.q, x.q.shape, x.v.shape[2:]
    backend = resolve(o.impl, q.device, q.dtype)
    rates, cu, cu_cpu = (o.A_log, o.dt_bias), o.cu_seqlens, o.cu_seqlens_cpu
    if rows > 1:
        x = spread(backend, rule, x, rates, rows)
        rule, rates, T = rule._replace(gate="given"), (None, None), T * rows
        cu, cu_cpu = (None if t is None else rows * t for t in (cu, cu_cpu))
    first, final = accumulated(o.initial_state, q), None
    if o.inplace_final_state:
        final = first
    elif o.output_final_state:
        shape = (N, HV, V, K) if rule.state_v_first else (N, HV, K, V)
        final = torch.empty(shape, dtype=accumulator(q.dtype), device=q.device)
    inputs = token_rows(Inputs(x.q, x.k, x.v, x.g, x.beta, *rates, x.p))
    pool = None
    if o.ssm_state_indices is not None:
        places = o.ssm_state_indices
        pool = Pool(places.reshape(N, -1), o.num_accepted_tokens, places.ndim == 2, rows)
    sequences = Sequences(N, cu, cu_cpu, pool)
    if torch.compiler.is_compiling():
        out = traced_recurrent(rule, o.impl, inputs, first, final, sequences)
    else:
        out = backend.recurrent(rule, inputs, first, final, sequences)
    out = out.view(B, T, HV, V)
    return out if rows == 1 else out[:, rows - 1 :: rows], final


def _in_chunks(
    member: Member, x: Tensors, options: Mapping[str, Any], rows: int
) -> tuple[Tensor, Tensor | None]:
    """The same call in chunks. It has precision "high", because nearly parallel keys cost the
    recurrence no accuracy, and must not cost its gradients any."""
    shared = {n: v for n, v in options.items() if n not in RECURRENT_ONLY}
    out, final = chunk(member, x, {**shared, "precision": "high"}, rows)
    return out, final


class _Recurrent(torch.autograd.Function):
    """The recurrence as the forward. The backward runs the same call in chunks and takes its
    gradients: both compute the same function, and chunks need not keep a state for each token."""

    @staticmethod
    def forward(
        ctx: Any,
        member: Member,
        rule: DeltaRule,
        options: dict[str, Any],
        rows: int,
        N: int,
        *given: Any,
    ) -> tuple[Tensor, Tensor | None]:
        x, o = Tensors(*given[: len(Tensors._fields)]), Options(**options)
        out, final = _run(rule, x, o, rows, N)
        ctx.save_for_backward(*given)
        ctx.call = member, rows, {n: v for n, v in options.items() if n not in OF_OPTIONS}
        ctx.set_materialize_grads(False)
        # Detached, because autograd does not let the caller change a Function's view in place.
        return out.detach(), final

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor | None) -> tuple[Tensor | None, ...]:
        member, rows, options = ctx.call
        saved = ctx.saved_tensors  # read once, as torch.utils.checkpoint wants it
        wanted = ctx.needs_input_grad[-len(saved) :]
        leaves: list[Any] = [
            t if t is None else t.detach().requires_grad_(need)
            for t, need in zip(saved, wanted, strict=True)
        ]
        n = len(Tensors._fields)
        named = dict(zip(OF_OPTIONS, leaves[n:], strict=True))
        with torch.enable_grad():
            outs = _in_chunks(member, Tensors(*leaves[:n]), {**options, **named}, rows)
        roots: list[Any] = []
        flowing: list[Any] = []
        for out, grad in zip(outs, grads, strict=True):
            if grad is not None:
                roots.append(out)
                flowing.append(grad)
        found: list[Any] = [None] * len(leaves)
        if roots:
            places = [i for i, need in enumerate(wanted) if need]
            inputs: list[Any] = [leaves[i] for i in places]
            for i, grad in zip(
                places, torch.autograd.grad(roots, inputs, flowing, allow_unused=True), strict=True
            ):
                found[i] = grad
        return (*[None] * 5, *found)
