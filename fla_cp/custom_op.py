"""The operator as two torch.library ops, `fla_cp::delta_rule` and its backward: what torch.compile
puts into its graph. Eager calls take `DeltaRuleFunction`, which runs the same pipeline.

What is not a tensor is an argument of its own: the fields of `DeltaRule`, the batch's rows; a
context comes as its `Handle`. Where an output may be missing, an empty tensor
stands for it. With several ranks: library_sharded.py.
"""

from __future__ import annotations

from functools import lru_cache
from typing import Any

import torch
from torch import Tensor

from fla_cp.comm import Links, Local
from fla_cp.context import FLACPContext, context_of
from fla_cp.handle import Handle, Sizes
from fla_cp.kernels import Backend, resolve
from fla_cp.kernels.torch.intra import Inputs, Spec
from fla_cp.partition.packing import Packing
from fla_cp.pipeline import Plan, Saved, backward, forward
from fla_cp.rule import CHUNK, DeltaRule, accumulator

_INPUTS = (
    "Tensor q, Tensor k, Tensor v, Tensor g, Tensor? beta, Tensor? A_log, Tensor? dt_bias, "
    "Tensor? p, Tensor? initial"
)
_CONSTANTS = (
    "float scale, str gate, float? lower_bound, bool safe_gate, bool qk_l2norm, "
    "float? beta_factor, bool use_exp2, bool state_v_first, bool keep_intermediates, "
    "bool per_head, str removal, bool precise, str impl, Tensor context, Tensor sizes, SymInt rows"
)
_RULE_FIELDS = 12
_X = len(Inputs._fields)

ONE_SLOT = Links(owner=(0,), row=(0,), continues=(False,), through=(False,), slots_per_rank=1)


@lru_cache(maxsize=16)
def packing_of(offsets: tuple[int, ...]) -> Packing:
    return Packing.build(offsets)


def make_plan(
    rule: DeltaRule,
    packing: Packing,
    context: FLACPContext | None,
    backend: Backend,
    x: Inputs | None = None,
) -> Plan:
    """x: for the backend to cut sequences into segments for its shape; else they stay whole."""
    links, ahead = context.links if context else ONE_SLOT, packing
    if x is not None:
        (HV, V), K = x.v.shape[1:], x.q.shape[-1]
        shape = (HV, K, V, x.q.device)
        whole, packing = packing, backend.segment(packing, *shape, True)
        ahead = packing
        if packing is whole and not links.any:
            ahead = backend.segment(packing, *shape, False)
    exchange = context.exchange if context else Local()
    return Plan(Spec(rule, packing), links, exchange, backend, ahead)


def constants(rule_fields: tuple, impl: str, context: FLACPContext | None, B: int, T: int) -> tuple:
    """The ops' arguments after the inputs. rule_fields: those of `DeltaRule`, in order."""
    if context is not None:
        return (*rule_fields, impl, *context.handle, 1)
    chunks = B * ((T + CHUNK - 1) // CHUNK)
    return (*rule_fields, impl, *Handle.make(-1, Sizes(chunks, sequences=B)), B)


def _plan(x: Inputs, args: tuple) -> Plan:
    rule = DeltaRule(*args[:_RULE_FIELDS])
    impl, number, _sizes, rows = args[_RULE_FIELDS:]
    context, tokens = context_of(number), len(x.q)
    if context is None:
        packing = packing_of(tuple(range(0, tokens + 1, tokens // rows)))
    else:
        packing = context.packing
        context.check_local_tokens(tokens)
    return make_plan(rule, packing, context, resolve(impl, x.q.device, x.q.dtype))


def _given(x: Tensor | None, like: Tensor) -> Tensor:
    return like.new_empty(0) if x is None else x


def _run(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor,
    beta: Tensor | None,
    A_log: Tensor | None,
    dt_bias: Tensor | None,
    p: Tensor | None,
    initial: Tensor | None,
    *args: Any,
) -> list[Tensor]:
    """[o, final, h, carried, transition, *kept]."""
    want_final, want_h = args[-2:]
    x = Inputs(q, k, v, g, beta, A_log, dt_bias, p)
    result = forward(_plan(x, args[:-2]), x, initial, want_final=want_final, want_h=want_h)
    saved = result.saved
    h = result.h.clone() if result.h is not None else None  # may be one of `kept`
    missing = (_given(t, q) for t in (result.final, h))
    kept = (_given(t, q).contiguous() for t in saved.kept)  # as the fake op says
    K = q.shape[-1]
    transition = saved.transition
    if transition is None:
        transition = saved.carried.new_empty(0, v.shape[1], K, K)
    return [result.o, *missing, saved.carried, transition, *kept]


def _run_fake(q: Tensor, k: Tensor, v: Tensor, *rest: Any) -> list[Tensor]:
    *fields, impl, _number, sizes, _rows, want_final, want_h = rest[_X - 2 :]
    rule = DeltaRule(*fields)
    size = Handle.read(sizes)
    backend = resolve(impl, q.device, q.dtype)
    HV, K, V = v.shape[1], q.shape[-1], v.shape[-1]
    wide = accumulator(q.dtype)
    kept = backend.kept_shapes(rule, q.dtype, size.chunks, HV, K, V)

    def states(n: int, *shape: int, dtype: torch.dtype = wide) -> Tensor:
        return q.new_empty(n, HV, *shape, dtype=dtype)

    def none() -> Tensor:
        return q.new_empty(0)

    outside = (V, K) if rule.state_v_first else (K, V)

    return [
        torch.empty(v.shape, dtype=v.dtype, device=v.device),
        states(size.sequences, *outside) if want_final else none(),
        states(size.chunks, *outside, dtype=q.dtype) if want_h else none(),
        states(size.carried, K, V),
        states(size.middle, K, K),
        *(q.new_empty(shape, dtype=dtype) for shape, dtype in kept),
    ]


def _run_backward(
    do: Tensor,
    dfinal: Tensor | None,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor,
    beta: Tensor | None,
    A_log: Tensor | None,
    dt_bias: Tensor | None,
    p: Tensor | None,
    initial: Tensor | None,
    *args: Any,
) -> list[Tensor]:
    """Gradients of the inputs and of `initial`."""
    o, saved, want_dinitial = args[-3:]
    x = Inputs(q, k, v, g, beta, A_log, dt_bias, p)
    carried, transition, *kept = saved
    grads, dinitial = backward(
        _plan(x, args[:-3]),
        x,
        initial,
        Saved(tuple(kept), carried, transition if len(transition) else None),
        o,
        do,
        dfinal,
        want_dinitial=want_dinitial,
    )
    return [_given(t, q) for t in (*grads, dinitial)]


def _run_backward_fake(do: Tensor, dfinal: Tensor | None, *rest: Any) -> list[Tensor]:
    inputs, initial, want = rest[:_X], rest[_X], rest[-1]
    like = (*inputs, initial if want else None)
    return [
        do.new_empty(0) if t is None else torch.empty(t.shape, dtype=t.dtype, device=t.device)
        for t in like
    ]


delta_rule = torch.library.custom_op(
    "fla_cp::delta_rule",
    _run,
    mutates_args=(),
    schema=f"({_INPUTS}, {_CONSTANTS}, bool want_final, bool want_h) -> Tensor[]",
)
delta_rule.register_fake(_run_fake)

delta_rule_backward = torch.library.custom_op(
    "fla_cp::delta_rule_backward",
    _run_backward,
    mutates_args=(),
    schema=(
        f"(Tensor do, Tensor? dfinal, {_INPUTS}, {_CONSTANTS}, Tensor o, Tensor[] saved, "
        "bool want_dinitial) -> Tensor[]"
    ),
)
delta_rule_backward.register_fake(_run_backward_fake)


def _setup(ctx: Any, inputs: tuple, output: list[Tensor]) -> None:
    ctx.constants = inputs[_X + 1 : -2]
    ctx.save_for_backward(*inputs[: _X + 1], output[0], *output[3:])
    ctx.set_materialize_grads(False)


def _backward(ctx: Any, grads: list[Tensor | None]) -> tuple[Tensor | None, ...]:
    inputs, (o, *saved) = ctx.saved_tensors[: _X + 1], ctx.saved_tensors[_X + 1 :]
    do, dfinal = grads[:2]
    want = inputs[_X] is not None and ctx.needs_input_grad[_X]
    found = delta_rule_backward(
        torch.zeros_like(o) if do is None else do, dfinal, *inputs, *ctx.constants, o, saved, want
    )
    given = [*inputs[:_X], inputs[_X] if want else None]
    grads_in = (None if t is None else d for t, d in zip(given, found, strict=True))
    return (*grads_in, *[None] * (len(ctx.constants) + 2))


torch.library.register_autograd("fla_cp::delta_rule", _backward, setup_context=_setup)
