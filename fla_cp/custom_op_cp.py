"""The operator under a context of several ranks, for torch.compile: two ops a direction, with the
exchange between them in the graph, where a compiler sees it and can move other work beside it.

    begin -> wire -> all_gather -> finish          forward
    begin_backward -> wire -> all_gather -> finish_backward

The exchange is always the all-gather: its shapes are known. Final states (and the gradient of the
initial ones) are each rank's own rows until the graph's all_reduce adds them.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from fla_cp.comm.carry import AffineMap, States, entering, outgoing
from fla_cp.comm.collectives import traced_all_gather, traced_all_reduce
from fla_cp.comm.exchange.base import Local, fold_wires, pack
from fla_cp.context import FLACPContext, compare_ranks, context_of
from fla_cp.custom_op import _CONSTANTS, _INPUTS, _RULE_FIELDS, _X
from fla_cp.handle import Handle
from fla_cp.kernels import resolve
from fla_cp.kernels.torch.intra import Inputs, Spec
from fla_cp.partition.packing import Packing
from fla_cp.pipeline import (
    Plan,
    Recomputed,
    Saved,
    adjoint_maps,
    prepare_chunks,
    recompute,
    recompute_states,
    run_segments,
    run_segments_backward,
)
from fla_cp.rule import DeltaRule, accumulator

_FIXED = _RULE_FIELDS + 4
"""Arguments of `_CONSTANTS`."""

_B = 2 + _X + 1
"""Where these begin in a backward, after do, dfinal, the inputs and `initial`."""


def _plan(x: Inputs, args: tuple) -> Plan:
    impl, number = args[_RULE_FIELDS : _RULE_FIELDS + 2]
    context = context_of(number)
    assert context is not None
    context.check_local_tokens(len(x.q))
    return Plan(
        spec=Spec(DeltaRule(*args[:_RULE_FIELDS]), context.packing),
        links=context.links,
        exchange=Local(),
        backend=resolve(impl, x.q.device, x.q.dtype),
    )


def _folding(
    plan: Plan, x: Inputs, maps: AffineMap
) -> tuple[AffineMap, Packing, tuple[int, int, int], Tensor]:
    """The first arguments of `outgoing` and `entering`."""
    shape = x.v.shape[1], x.q.shape[-1], x.v.shape[-1]
    return maps, plan.packing, shape, x.v.new_empty(0, dtype=accumulator(x.v.dtype))


def _wire(plan: Plan, x: Inputs, maps: AffineMap, *, reverse: bool = False) -> Tensor:
    links = plan.links.mirrored() if reverse else plan.links
    mine = outgoing(*_folding(plan, x, maps), links, reverse=reverse, fold=plan.backend.fold)
    return pack(mine, links)


def _entering(
    plan: Plan, x: Inputs, args: tuple, maps: AffineMap, wires: Tensor, *, reverse: bool = False
) -> States:
    """States from the wires of all ranks."""
    context = context_of(args[_RULE_FIELDS + 1])
    assert context is not None
    folding = _folding(plan, x, maps)
    states = None
    if plan.links.any:
        links = plan.links.mirrored() if reverse else plan.links
        states = folding[-1].new_empty(plan.packing.ranges, *folding[2])
        states = fold_wires(wires, links, context.rank, states, plan.backend.fold)
    return entering(*folding, states, reverse=reverse, fold=plan.backend.fold)


def _or_empty(x: Tensor | None, like: Tensor) -> Tensor:
    return like.new_empty(0) if x is None else x


def _rows(x: Tensor | None, like: Tensor, *shape: int) -> Tensor:
    """x, or no row of the shape in the accumulator's dtype."""
    return like.new_empty(0, *shape, dtype=accumulator(like.dtype)) if x is None else x


def _given(x: Tensor) -> Tensor | None:
    return x if len(x) else None


def _chunks(plan: Plan, x: Inputs, tensors: list[Tensor], o: Tensor | None) -> Any:
    """Chunks from what `_tensors` gave."""
    keeping = plan.spec._replace(rule=plan.rule._replace(keep_intermediates=True))
    return plan.backend.restore(keeping, x, (*tensors, None, None), o)[0]


def _tensors(plan: Plan, chunks: Any) -> list[Tensor]:
    keeping = plan.spec._replace(rule=plan.rule._replace(keep_intermediates=True))
    kept = plan.backend.keep(keeping, chunks, None, None)[:-2]
    return [t.contiguous() for t in kept if t is not None]


def _without(places: tuple[int, ...], tensors: list[Tensor]) -> list[Tensor]:
    return [t for i, t in enumerate(tensors) if i not in places]


def _begin(*args: Any) -> list[Tensor]:
    """[wire, offset, transition, *chunks]."""
    x, initial, fixed = Inputs(*args[:_X]), args[_X], args[_X + 1 :]
    plan = _plan(x, fixed)
    context = context_of(fixed[_RULE_FIELDS + 1])
    assert context is not None
    context.check_alive()
    (HV, V), K, rule = x.v.shape[1:], x.q.shape[-1], plan.rule
    compare_ranks(context, rule.per_head, rule.removal, (HV, K, V), x.q.dtype, initial)
    chunks, maps = prepare_chunks(plan, x, initial)
    wire = _wire(plan, x, maps)
    chunks = plan.backend.scores(plan.spec, chunks)
    offset, transition = _rows(maps.offset, x.q, HV, K, V), _rows(maps.transition, x.q, HV, K, K)
    return [wire, offset, transition, *_tensors(plan, chunks)]


def _fake(x: tuple, fixed: tuple) -> tuple[Any, ...]:
    """Handle's sizes, a maker of fp32 tensors per head, those of chunks, of h and v_new."""
    q, v = x[0], x[2]
    rule, impl = DeltaRule(*fixed[:_RULE_FIELDS]), fixed[_RULE_FIELDS]
    keeping, sizes = rule._replace(keep_intermediates=True), Handle.read(fixed[-2])
    HV, K, V = v.shape[1], q.shape[-1], v.shape[-1]
    shapes = resolve(impl, q.device, q.dtype).kept_shapes(keeping, q.dtype, sizes.chunks, HV, K, V)
    made = [q.new_empty(shape, dtype=dtype) for shape, dtype in shapes]

    def states(n: int, *shape: int) -> Tensor:
        return q.new_empty(n, HV, *shape, dtype=accumulator(q.dtype))

    return sizes, states, made[:-2], made[-2:], (K, V), rule.keep_intermediates


def _begin_fake(*args: Any) -> list[Tensor]:
    sizes, states, chunks, _, (K, V), _ = _fake(args[:_X], args[_X + 1 :])
    wire = states(sizes.slots, K, V + K * sizes.through)
    return [wire, states(sizes.feeding, K, V), states(sizes.middle, K, K), *chunks]


def _finish(*args: Any) -> list[Tensor]:
    """[o, final, h, carried, *(h, v_new where they are kept)]; final: this rank's own rows."""
    x, initial, fixed = Inputs(*args[:_X]), args[_X], args[_X + 1 : _X + 1 + _FIXED]
    wires, offset, transition, tensors, want_final, want_h = args[_X + 1 + _FIXED :]
    plan = _plan(x, fixed)
    maps = AffineMap(_given(transition), _given(offset))
    chunks = _chunks(plan, x, tensors, None)
    carried = _entering(plan, x, fixed, maps, wires)
    found = run_segments(
        plan, x, initial, chunks, maps, carried, want_final=want_final, want_h=want_h
    )
    kept = found.saved.kept[-2:] if plan.rule.keep_intermediates else ()
    h = found.h.clone() if found.h is not None else None  # may be one of `kept`
    final = _or_empty(found.final, x.q)
    return [
        found.o,
        final,
        _or_empty(h, x.q),
        carried.value,
        *(t.contiguous() for t in kept if t is not None),
    ]


def _finish_fake(*args: Any) -> list[Tensor]:
    fixed = args[_X + 1 : _X + 1 + _FIXED]
    *_, want_final, want_h = args
    sizes, states, _, kept, (K, V), keep = _fake(args[:_X], fixed)
    q, v = args[0], args[2]
    outside = (V, K) if DeltaRule(*fixed[:_RULE_FIELDS]).state_v_first else (K, V)
    return [
        torch.empty(v.shape, dtype=v.dtype, device=v.device),
        states(sizes.sequences, *outside) if want_final else q.new_empty(0),
        states(sizes.chunks, *outside).to(v.dtype) if want_h else q.new_empty(0),
        states(sizes.carried, K, V),
        *(kept if keep else ()),
    ]


def _saved(tensors: list[Tensor]) -> Saved:
    carried, transition, *kept = tensors
    return Saved(tuple(kept), carried, _given(transition))


def _begin_backward(*args: Any) -> list[Tensor]:
    """[wire, offset, *chunks without those always kept]; no chunks where all are kept."""
    do, dfinal, x, initial = args[0], args[1], Inputs(*args[2 : 2 + _X]), args[2 + _X]
    fixed = args[_B : _B + _FIXED]
    o, tensors = args[_B + _FIXED :]
    plan, saved = _plan(x, fixed), _saved(tensors)
    recomputed = recompute(plan, x, initial, saved, o, do)
    maps = adjoint_maps(plan, saved, recomputed, dfinal)
    wire = _wire(plan, x, maps, reverse=True)
    offset = _rows(maps.offset, x.q, x.v.shape[1], x.q.shape[-1], x.v.shape[-1])
    if plan.rule.keep_intermediates:
        return [wire, offset]
    kept = plan.backend.always_kept(plan.rule)
    return [wire, offset, *_without(kept, _tensors(plan, recomputed.chunks))]


def _begin_backward_fake(*args: Any) -> list[Tensor]:
    sizes, states, chunks, _, (K, V), keep = _fake(args[2 : 2 + _X], args[_B : _B + _FIXED])
    wire = states(sizes.slots, K, V + K * sizes.through)
    rule, impl = DeltaRule(*args[_B : _B + _RULE_FIELDS]), args[_B + _RULE_FIELDS]
    kept = resolve(impl, args[2].device, args[2].dtype).always_kept(rule)
    return [wire, states(sizes.carried, K, V), *(() if keep else _without(kept, chunks))]


def _finish_backward(*args: Any) -> list[Tensor]:
    """Gradients of the inputs and of `initial`: its own rows."""
    do, dfinal, x, initial = args[0], args[1], Inputs(*args[2 : 2 + _X]), args[2 + _X]
    fixed = args[_B : _B + _FIXED]
    o, tensors, wires, offset, chunks, want_dinitial = args[_B + _FIXED :]
    plan, saved = _plan(x, fixed), _saved(tensors)
    if plan.rule.keep_intermediates:
        recomputed = recompute(plan, x, initial, saved, o, do)
    else:
        for at, t in sorted(zip(plan.backend.always_kept(plan.rule), saved.kept, strict=True)):
            chunks.insert(at, t)
        formed = _chunks(plan, x, chunks, o)
        dout = plan.backend.output_bwd(plan.spec, formed, do)
        recomputed = Recomputed(formed, dout, recompute_states(plan, initial, saved, formed))
    maps = AffineMap(saved.transition, _given(offset))

    def wait() -> States:
        return _entering(plan, x, fixed, maps, wires, reverse=True)

    grads, dinitial = run_segments_backward(
        plan, x, recomputed, wait, dfinal, want_dinitial=want_dinitial
    )
    return [_or_empty(t, x.q) for t in (*grads, dinitial)]


def _finish_backward_fake(*args: Any) -> list[Tensor]:
    inputs, initial, want = args[2 : 2 + _X], args[2 + _X], args[-1]
    return [
        args[0].new_empty(0) if t is None else torch.empty(t.shape, dtype=t.dtype, device=t.device)
        for t in (*inputs, initial if want else None)
    ]


def _op(name: str, run: Any, fake: Any, before: str, after: str) -> Any:
    op = torch.library.custom_op(
        f"fla_cp::{name}",
        run,
        mutates_args=(),
        schema=f"({before}{_INPUTS}, {_CONSTANTS}{after}) -> Tensor[]",
    )
    op.register_fake(fake)
    return op


_GRADS = "Tensor do, Tensor? dfinal, "
begin_op = _op("delta_rule_begin", _begin, _begin_fake, "", "")
finish_op = _op(
    "delta_rule_finish",
    _finish,
    _finish_fake,
    "",
    ", Tensor wires, Tensor offset, Tensor transition, Tensor[] chunks, bool want_final, "
    "bool want_h",
)
begin_backward_op = _op(
    "delta_rule_begin_backward",
    _begin_backward,
    _begin_backward_fake,
    _GRADS,
    ", Tensor o, Tensor[] saved",
)
finish_backward_op = _op(
    "delta_rule_finish_backward",
    _finish_backward,
    _finish_backward_fake,
    _GRADS,
    ", Tensor o, Tensor[] saved, Tensor wires, Tensor offset, Tensor[] chunks, bool want_dinitial",
)


class ShardedDeltaRule(torch.autograd.Function):
    """(.., *Inputs, initial) -> o, final, h: empty where not wanted. crosses: a state is exchanged
    at all. always_kept: which of the chunks' tensors are. rule: the fields of `DeltaRule`
    and impl. number, sizes: the context's `Handle`."""

    @staticmethod
    def forward(
        ctx: Any,
        world_size: int,
        group_name: str,
        crosses: bool,
        want_final: bool,
        want_h: bool,
        always_kept: tuple[int, ...],
        rule: tuple,
        number: Tensor,
        sizes: Tensor,
        *tensors: Tensor | None,
    ) -> tuple[Tensor, Tensor, Tensor]:
        fixed = (*rule, number, sizes, 1)
        wire, offset, transition, *chunks = begin_op(*tensors, *fixed)
        wires = traced_all_gather(wire, world_size, group_name) if crosses else wire[None]
        o, final, h, carried, *kept = finish_op(
            *tensors, *fixed, wires, offset, transition, chunks, want_final, want_h
        )
        if want_final:
            final = traced_all_reduce(final, group_name)
        if not kept:
            chunks = [chunks[i] for i in always_kept]
        ctx.save_for_backward(*tensors, number, sizes, o, carried, transition, *chunks, *kept)
        ctx.rule, ctx.group_name, ctx.crosses = rule, group_name, crosses
        ctx.world_size, ctx.want_final = world_size, want_final
        ctx.mark_non_differentiable(h)
        return o, final, h

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, do: Tensor, dfinal: Tensor, _dh: Tensor) -> tuple[Any, ...]:
        saved = ctx.saved_tensors
        tensors, (number, sizes, o, *saved) = saved[: _X + 1], saved[_X + 1 :]
        fixed = (*ctx.rule, number, sizes, 1)
        grads = (do, dfinal if ctx.want_final else None)
        wire, offset, *chunks = begin_backward_op(*grads, *tensors, *fixed, o, saved)
        wires = wire[None]
        if ctx.crosses:
            wires = traced_all_gather(wire, ctx.world_size, ctx.group_name)
        want = tensors[_X] is not None and ctx.needs_input_grad[-1]
        *grads_in, dinitial = finish_backward_op(
            *grads, *tensors, *fixed, o, saved, wires, offset, chunks, want
        )
        dinitial = traced_all_reduce(dinitial, ctx.group_name) if want else None
        named = zip(tensors[:_X], grads_in, strict=True)
        return (*[None] * 9, *(None if t is None else d for t, d in named), dinitial)


def sharded_delta_rule(
    context: FLACPContext,
    rule_fields: tuple,
    impl: str,
    tensors: tuple[Tensor | None, ...],
    want_final: bool,
    want_h: bool,
) -> tuple[Tensor, Tensor, Tensor]:
    q = tensors[0]
    assert q is not None
    always_kept = resolve(impl, q.device, q.dtype).always_kept(DeltaRule(*rule_fields))
    found: tuple[Tensor, Tensor, Tensor] = ShardedDeltaRule.apply(
        context.world_size,
        context.group_name,
        context.crosses,
        want_final,
        want_h,
        always_kept,
        (*rule_fields, impl),
        *context.handle,
        *tensors,
    )
    return found
