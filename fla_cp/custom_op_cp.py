"""The operator under a context of several ranks, for torch.compile. Each direction is two ops, with
the exchange between them in the graph, where the compiler can overlap it with other work.

    begin -> wire -> all_gather -> finish          forward
    begin_backward -> wire -> all_gather -> finish_backward

The exchange is always the all-gather, because its shapes are known. Each rank forms its own rows of
the final states and leaves the others zero, and an all_reduce in the graph adds the ranks' tensors.
The gradient of the initial states is formed in the same way.
"""

from collections.abc import Callable
from functools import cached_property
from typing import Any, NamedTuple

import torch
from torch import Tensor

from fla_cp import pipeline
from fla_cp.comm.carry import AffineMap, SegmentMaps, States
from fla_cp.comm.collectives import traced_all_gather, traced_all_reduce
from fla_cp.comm.exchange.base import Local, fold_wires, pack
from fla_cp.context import FLACPContext, compare_ranks
from fla_cp.custom_op import GRADS, TENSORS, Call, fake_gradients, first, op, saved_from
from fla_cp.kernels import resolve
from fla_cp.once_differentiable import once_differentiable
from fla_cp.pipeline import Plan, Recomputed, Saved, announcement
from fla_cp.rule import DeltaRule


class ShardedCall(Call):
    """A call on one of several ranks. Its exchange is part of the graph, not of the plan."""

    @cached_property
    def plan(self) -> Plan:
        return super().plan._replace(exchange=Local())

    def replayed(
        self, op: str, run: Callable[[], list[Tensor]], own: tuple[Tensor | None, ...], *flags: bool
    ) -> list[Tensor]:
        """As for any call. Each op announces the whole call to a backend that compiles kernels, so
        that the first op of a direction that has something to compile compiles side by side what
        the other one needs, too."""
        given = self.x, self.initial

        def announced() -> list[Tensor]:
            assert self.context is not None
            plan = self.plan._replace(exchange=self.context.exchange)
            with announcement(plan, *given, with_backward=op.endswith("backward")):
                return run()

        return super().replayed(op, announced, own, *flags)

    @property
    def keeping(self) -> DeltaRule:
        """The rule with which a backend keeps all tensors of the chunks."""
        return self.rule._replace(keep_intermediates=True)

    def segments(self, maps: AffineMap, reverse: bool) -> SegmentMaps:
        like = self.new_states(0)
        return SegmentMaps(maps, self.plan.packing, self.shape, like, reverse, self.backend.fold)

    def wire(self, maps: AffineMap, *, reverse: bool = False) -> Tensor:
        """The maps of this rank's ranges as one tensor, which it sends: see `pack`."""
        links = self.plan.links.mirrored() if reverse else self.plan.links
        return pack(self.segments(maps, reverse).outgoing(links), links)

    def entering(self, maps: AffineMap, wires: Tensor, *, reverse: bool = False) -> States:
        """The states that enter this rank's segments, from the wires of all ranks."""
        plan, states = self.plan, None
        if plan.links.any:
            assert self.context is not None
            links = plan.links.mirrored() if reverse else plan.links
            like = self.new_states(plan.packing.ranges, *self.shape[1:])
            states = fold_wires(wires, links, self.context.rank, like, plan.backend.fold)
        return self.segments(maps, reverse).entering(states)

    def fake_wire(self) -> Tensor:
        (_, K, V), sizes = self.shape, self.sizes
        return self.new_states(sizes.slots, K, V + K * sizes.through)

    def chunk_tensors(self, chunks: Any) -> list[Tensor]:
        """The chunks as tensors that an op can return. Those of h and v_new are left out."""
        spec = self.plan.spec._replace(rule=self.keeping)
        return self.kept(self.backend.keep(spec, chunks, None, None)[:-2])

    def chunks_from(self, tensors: list[Tensor], o: Tensor | None) -> Any:
        """The chunks again, from their `chunk_tensors`."""
        spec, kept = self.plan.spec._replace(rule=self.keeping), (*tensors, None, None)
        return self.backend.restore(spec, self.x, kept, o)[0]

    @property
    def sends_chunks(self) -> bool:
        """Whether the backward's first op returns chunks for its second one."""
        return not (self.rule.keep_intermediates or self.backend.restores_inputs(self.rule, self.x))

    def received(self, sent: list[Tensor], saved: Saved, o: Tensor) -> Any:
        """The chunks in the backward's second op. sent: the chunk tensors that the first op
        returned."""
        plan, tensors = self.plan, list[Any](sent)
        if not self.sends_chunks:
            return plan.backend.restore(plan.spec, self.x, saved.kept, o)[0]
        always = plan.backend.always_kept(plan.rule)
        for at, t in sorted(zip(always, saved.kept, strict=True)):
            tensors.insert(at, t)
        return self.chunks_from(tensors, o)

    def without_always_kept(self, tensors: list[Tensor]) -> list[Tensor]:
        """The chunk tensors that the forward does not keep anyway."""
        always = self.backend.always_kept(self.rule)
        return [t for i, t in enumerate(tensors) if i not in always]


@op("delta_rule_begin")
def begin_op(*args: Any) -> list[Tensor]:
    """[wire, offset, transition, *chunks]."""
    call, _ = ShardedCall.parse(args)
    plan, context, rule = call.plan, call.context, call.rule
    assert context is not None
    context.check_alive()
    compare_ranks(context, rule, call.shape, call.x.q.dtype, call.initial)

    def run() -> list[Tensor]:
        chunks, maps = pipeline.prepare_chunks(plan, call.x, call.initial)
        wire = call.wire(maps)
        chunks = plan.backend.scores(plan.spec, chunks)
        (_, K, V), sizes = call.shape, call.sizes
        offset = call.padded(maps.offset, sizes.feeding, V)
        transition = call.padded(maps.transition, sizes.middle, K)
        return [wire, offset, transition, *call.chunk_tensors(chunks)]

    return call.replayed("begin", run, ())


@begin_op.register_fake
def _begin_fake(*args: Any) -> list[Tensor]:
    call, _ = ShardedCall.parse(args)
    (_, K, V), sizes = call.shape, call.sizes
    offset, transition = call.reserved(sizes.feeding, V), call.reserved(sizes.middle, K)
    return [call.fake_wire(), offset, transition, *call.fake_kept(call.keeping)[:-2]]


_MAPS = ", Tensor wires, Tensor offset, Tensor transition, Tensor[] chunks"


@op("delta_rule_finish", after=f"{_MAPS}, bool want_final, bool want_h")
def finish_op(*args: Any) -> list[Tensor]:
    """[o, final, h, carried], and h and v_new if the rule keeps intermediates. final has only this
    rank's own rows; the others are zero."""
    call, (wires, offset, transition, tensors, want_final, want_h) = ShardedCall.parse(args)
    packing = call.plan.packing
    maps = AffineMap(first(transition, packing.middle), first(offset, packing.feeding))

    def run() -> list[Tensor]:
        chunks, carried = call.chunks_from(tensors, None), call.entering(maps, wires)
        given = call.plan, call.x, call.initial, chunks, maps, carried
        found = pipeline.run_segments(*given, want_final=want_final, want_h=want_h)
        kept = found.saved.kept[-2:] if call.rule.keep_intermediates else ()
        return [*call.results(found), *call.kept(kept)]

    return call.replayed("finish", run, (wires, offset, transition, *tensors), want_final, want_h)


@finish_op.register_fake
def _finish_fake(*args: Any) -> list[Tensor]:
    call, (*_, want_final, want_h) = ShardedCall.parse(args)
    kept = call.fake_kept(call.rule)[-2:] if call.rule.keep_intermediates else ()
    return [*call.fake_results(want_final, want_h), *kept]


@op("delta_rule_begin_backward", before=GRADS, after=", Tensor o, Tensor[] saved")
def begin_backward_op(do: Tensor, dfinal: Tensor | None, *args: Any) -> list[Tensor]:
    """[wire, offset], and the chunk tensors that are not always kept if `sends_chunks`."""
    call, (o, tensors) = ShardedCall.parse(args)
    saved = saved_from(call.plan, tensors)

    def run() -> list[Tensor]:
        recomputed = pipeline.recompute(call.plan, call.x, call.initial, saved, o, do)
        maps = pipeline.adjoint_maps(call.plan, saved, recomputed, dfinal)
        offset = call.padded(maps.offset, call.sizes.carried, call.shape[2])
        found = [call.wire(maps, reverse=True), offset]
        if not call.sends_chunks:
            return found
        return found + call.without_always_kept(call.chunk_tensors(recomputed.chunks))

    return call.replayed("begin backward", run, (do, dfinal, o, *tensors))


@begin_backward_op.register_fake
def _begin_backward_fake(do: Tensor, dfinal: Tensor | None, *args: Any) -> list[Tensor]:
    call, _ = ShardedCall.parse(args)
    found = [call.fake_wire(), call.reserved(call.sizes.carried, call.shape[2])]
    if not call.sends_chunks:
        return found
    return found + call.without_always_kept(call.fake_kept(call.keeping)[:-2])


_CHUNKS = ", Tensor o, Tensor[] saved, Tensor wires, Tensor offset, Tensor[] chunks"


@op("delta_rule_finish_backward", before=GRADS, after=f"{_CHUNKS}, bool want_dinitial")
def finish_backward_op(do: Tensor, dfinal: Tensor | None, *args: Any) -> list[Tensor]:
    """The gradients of the inputs, and of `initial`. The latter has only this rank's own rows; the
    others are zero."""
    call, (o, tensors, wires, offset, chunks, want_dinitial) = ShardedCall.parse(args)
    plan, saved = call.plan, saved_from(call.plan, tensors)
    maps = AffineMap(saved.transition, first(offset, plan.packing.carried))

    def wait() -> States:
        return call.entering(maps, wires, reverse=True)

    def run() -> list[Tensor]:
        if call.rule.keep_intermediates:
            recomputed = pipeline.recompute(plan, call.x, call.initial, saved, o, do)
        else:
            formed = call.received(chunks, saved, o)
            dout = plan.backend.output_bwd(plan.spec, formed, do)
            states = pipeline.states_again(plan, call.initial, saved, formed)
            recomputed = Recomputed(formed, dout, states)
        given = plan, call.x, recomputed, wait, dfinal
        grads, dinitial = pipeline.run_segments_backward(*given, want_dinitial=want_dinitial)
        return [call.or_empty(t) for t in (*grads, dinitial)]

    own = do, dfinal, o, *tensors, wires, offset, *chunks
    return call.replayed("finish backward", run, own, want_dinitial)


finish_backward_op.register_fake(fake_gradients)


class Static(NamedTuple):
    """What is constant in a graph. crosses: whether any state is exchanged. wanted: whether the
    final states are wanted, and whether those of the chunks are. always_kept: the indices of the
    chunk tensors that the backend always keeps. rule: the fields of `DeltaRule`, and impl."""

    world_size: int
    group_name: str
    crosses: bool
    wanted: tuple[bool, bool]
    always_kept: tuple[int, ...]
    rule: tuple

    def gathered(self, wire: Tensor) -> Tensor:
        """The wires of all ranks, or this rank's alone if no state is exchanged."""
        if not self.crosses:
            return wire[None]
        return traced_all_gather(wire, self.world_size, self.group_name)


class ShardedDeltaRule(torch.autograd.Function):
    """(static, number and sizes of the context's `Handle`, *Inputs, initial) -> o, final, h. An
    output that is not wanted is empty."""

    @staticmethod
    def forward(
        ctx: Any, static: Static, number: Tensor, sizes: Tensor, *tensors: Tensor | None
    ) -> tuple[Tensor, Tensor, Tensor]:
        shared = (*tensors, *static.rule, number, sizes, 1)
        wire, offset, transition, *chunks = begin_op(*shared)
        wires = static.gathered(wire)
        own = wires, offset, transition, chunks, *static.wanted
        o, final, h, carried, *kept = finish_op(*shared, *own)
        if static.wanted[0]:
            final = traced_all_reduce(final, static.group_name)
        if not kept:
            chunks = [chunks[i] for i in static.always_kept]
        ctx.save_for_backward(*tensors, number, sizes, o, carried, transition, *chunks, *kept)
        ctx.static = static
        ctx.mark_non_differentiable(h)
        return o, final, h

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, do: Tensor, dfinal: Tensor, _dh: Tensor) -> tuple[Any, ...]:
        static, saved = ctx.static, ctx.saved_tensors
        tensors, (number, sizes, o, *saved) = saved[:TENSORS], saved[TENSORS:]
        grads = (do, dfinal if static.wanted[0] else None)
        shared = (*grads, *tensors, *static.rule, number, sizes, 1, o, saved)
        wire, offset, *chunks = begin_backward_op(*shared)
        want = tensors[-1] is not None and ctx.needs_input_grad[-1]
        wires = static.gathered(wire)
        *grads_in, dinitial = finish_backward_op(*shared, wires, offset, chunks, want)
        dinitial = traced_all_reduce(dinitial, static.group_name) if want else None
        named = zip(tensors[:-1], grads_in, strict=True)
        return (None, None, None, *(None if t is None else d for t, d in named), dinitial)


def sharded_delta_rule(
    context: FLACPContext, rule: DeltaRule, impl: str, tensors: tuple, *wanted: Any
) -> tuple[Tensor, Tensor, Tensor]:
    """o, final and h of a call under a context, in a graph that is being compiled. tensors:
    (*Inputs, initial). wanted: the two flags of `Static`."""
    q = tensors[0]
    always_kept = resolve(impl, q.device, q.dtype).always_kept(rule)
    where = context.world_size, context.group_name, context.crosses
    static = Static(*where, wanted, always_kept, (*rule, impl))
    found: tuple[Tensor, Tensor, Tensor] = ShardedDeltaRule.apply(static, *context.handle, *tensors)
    return found
