"""Ring: keys and values come from one rank after the other, and a running softmax adds the results.

In each step a rank reads the keys and values of one other rank, while those of the next rank are
under way. The backward goes round a second time with the final o and log-sum-exp, and returns to
each rank the gradients of its keys and values.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property
from typing import Any, NamedTuple, Protocol

import torch
import torch.distributed as dist
from torch import Tensor

from fla_cp import remat
from fla_cp.comm.keys_values.base import WHAT, Kernels, KeysValues, Traffic
from fla_cp.comm.overlap import Arriving, run_overlap
from fla_cp.once_differentiable import once_differentiable
from fla_cp.partition.ring_steps import Part, RingSteps, Rows, Step
from fla_cp.rule import accumulator


class Ring(KeysValues):
    """Sends the same rows as `Gathered`, but in up to R-1 steps, and again in the backward."""

    def traffic(self) -> list[Traffic]:
        tokens = zip(self.tables.crossings.sent, self.tables.crossings.received, strict=True)
        row = self.sizes.key_bytes
        return [Traffic((2 * s + r) * row, (2 * r + s) * row) for s, r in tokens]

    def memory(self) -> int:
        row = self.sizes.key_bytes + self.sizes.held_bytes
        return max(self.tables.crossings.pairs.values(), default=0) * row

    def attention(
        self,
        queries: Callable[[], Tensor],
        k: Tensor,
        v: Tensor,
        group: dist.ProcessGroup | None,
        scale: float,
        kernels: Kernels,
    ) -> Tensor:
        assert group is not None, "a ring needs several ranks"
        o: Tensor = _Ring.apply(queries(), k, v, RingCall(self.tables.ring, group, scale, kernels))
        return o


class RingCall(NamedTuple):
    """The arguments of both directions, besides tensors."""

    ring: RingSteps
    group: dist.ProcessGroup
    scale: float
    kernels: Kernels


class _Ring(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, q: Tensor, k: Tensor, v: Tensor, call: RingCall) -> Tensor:
        shapes = tuple(q.shape), tuple(v.shape), q.dtype
        name = ("ring", *shapes, call.scale)
        kept = remat.kept(name)
        if kept is None:
            o, lse = ring(q, Wire(k, v), call)
            remat.keep(name, (o, lse))
        else:
            # The work that was handed over runs where the exchange ran it, because the checkpoint
            # compares the order of saved tensors.
            run_overlap(lambda: None)
            o, lse = (x for x in kept if x is not None)
        ctx.save_for_backward(q, k, v, o, lse)
        ctx.call = call
        return o

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, do: Tensor) -> tuple[Tensor | None, ...]:
        q, k, v, o, lse = ctx.saved_tensors
        wire = Wire(k, v)
        dq, total = ring_bwd(do, q, wire, o, lse, ctx.call)
        return dq, *wire.split(total), None


class Travelling(Protocol):
    """The rows that a rank sends of its tokens, and how keys and values are formed from rows."""

    @property
    def rows(self) -> Tensor:
        """[T, n] of this rank's tokens."""

    @property
    def v_channels(self) -> int: ...

    def own(self) -> tuple[Tensor, Tensor]:
        """Keys [T, HK, K] and values [T, HK, V] of this rank's tokens."""

    def split(self, rows: Tensor) -> tuple[Tensor, Tensor]:
        """The keys and values that are formed from rows of any rank."""

    def joined(self, rows: Tensor, dk: Tensor, dv: Tensor) -> Tensor:
        """The gradient of rows, from those of their keys and values."""


@dataclass(frozen=True, eq=False)
class Wire:
    """Keys and values of this rank's tokens, k [T, HK, K] and v [T, HK, V]."""

    k: Tensor
    v: Tensor

    @cached_property
    def rows(self) -> Tensor:
        """Keys and values side by side, [T, HK * (K + V)]."""
        return torch.cat((self.k.flatten(1), self.v.flatten(1)), 1)

    @property
    def v_channels(self) -> int:
        return self.v.shape[2]

    def own(self) -> tuple[Tensor, Tensor]:
        return self.k, self.v

    def joined(self, rows: Tensor, dk: Tensor, dv: Tensor) -> Tensor:
        return torch.cat((dk.flatten(1), dv.flatten(1)), 1)

    def split(self, rows: Tensor) -> tuple[Tensor, Tensor]:
        """The keys and values in rows of any rank."""
        shapes = self.k.shape[1:], self.v.shape[1:]
        k, v = rows.split([shape.numel() for shape in shapes], 1)
        return k.unflatten(1, shapes[0]), v.unflatten(1, shapes[1])


def _only(R: int, rank: int, n: int) -> list[int]:
    """Row counts by rank: n for one rank, 0 for the others."""
    return [n * (r == rank) for r in range(R)]


def forward_step(wire: Tensor, step: Step, group: dist.ProcessGroup) -> Arriving:
    """Starts to exchange the rows of a step. Every rank issues one all-to-all, in which it sends to
    at most one rank."""
    R, out = dist.get_world_size(group), step.send.of(wire)
    send, receive = _only(R, step.to, len(out)), _only(R, step.source, step.receive)
    return Arriving(out, send, receive, group, WHAT)


def ring(
    q: Tensor, wire: Travelling, call: RingCall, first: Arriving | None = None
) -> tuple[Tensor, Tensor]:
    """o [T, H, V] in q's dtype and lse [H, T]. Sums are formed in fp32 (fp64). first: the exchange
    of the first step, if it was started before."""
    steps = call.ring.steps
    dtype = accumulator(q.dtype)
    o = q.new_empty(len(q), q.shape[1], wire.v_channels, dtype=dtype)
    lse = q.new_empty(len(q), q.shape[1], dtype=dtype)
    if first is None:
        first = forward_step(wire.rows, steps[0], call.group)

    def own() -> Tensor:
        part = call.ring.own
        found = _attend(q, *wire.own(), part, call)
        part.queries.put(o, found[0])
        part.queries.put(lse, found[1])
        return first.wait()

    rows = run_overlap(own)
    for step, then in zip(steps, (*steps[1:], None), strict=True):
        arriving = None if then is None else forward_step(wire.rows, then, call.group)
        theirs = wire.split(rows)
        for part in step.parts:
            _merge(o, lse, part.queries, *_attend(q, *theirs, part, call))
        del theirs
        if arriving is not None:
            rows = arriving.wait()
    return o.to(q.dtype), lse.T.contiguous()


def _attend(q: Tensor, k: Tensor, v: Tensor, part: Part, call: RingCall) -> tuple[Tensor, Tensor]:
    """o [Tq, H, V] in q's dtype and lse [Tq, H] of a part's queries over its keys."""
    given = part.queries.of(q), part.keys.of(k), part.keys.of(v)
    found = call.kernels.attend(*given, part.lengths, call.scale)
    return found.o, found.lse.T


def _merge(o: Tensor, lse: Tensor, rows: Rows, o_new: Tensor, lse_new: Tensor) -> None:
    """Merges the softmax over further keys, o_new and lse_new, into the running o and lse of these
    rows."""
    before = rows.of(lse)
    after = torch.logaddexp(before, lse_new)
    old, new = ((x - after).exp()[..., None] for x in (before, lse_new))
    rows.put(o, rows.of(o) * old + o_new * new)
    rows.put(lse, after)


def ring_bwd(
    do: Tensor, q: Tensor, wire: Travelling, o: Tensor, lse: Tensor, call: RingCall
) -> tuple[Tensor, Tensor]:
    """The gradients of q and of the wire's rows, in their dtypes. Sums over ranks are formed in
    fp32 (fp64), in a fixed order. The gradients that travel have the dtype of the rows."""
    steps, group = call.ring.steps, call.group
    dq = torch.zeros_like(q, dtype=accumulator(q.dtype))
    total = torch.zeros_like(wire.rows, dtype=dq.dtype)
    arriving = forward_step(wire.rows, steps[0], group)

    def backward(part: Part, keys: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """Adds the gradient of the part's queries to dq. Returns the gradient of the part's rows of
        `keys`."""
        rows = part.queries
        dq_part, dk, dv = call.kernels.attend_bwd(
            rows.of(do), rows.of(q), part.keys.of(k), part.keys.of(v),
            rows.of(o), rows.of(lse.T).T, part.lengths, call.scale,
        )  # fmt: skip
        rows.add(dq, dq_part)
        return wire.joined(part.keys.of(keys), dk, dv)

    own = call.ring.own
    own.keys.add(total, backward(own, wire.rows, *wire.own()))
    returning: list[tuple[Arriving, Rows]] = []
    for step, then in zip(steps, (*steps[1:], None), strict=True):
        rows = arriving.wait()
        if then is not None:
            arriving = forward_step(wire.rows, then, group)
        grads = torch.zeros_like(rows, dtype=dq.dtype)
        theirs = wire.split(rows)
        for part in step.parts:
            part.keys.add(grads, backward(part, rows, *theirs))
        del theirs, rows
        _finish(total, returning)
        returning.append((_return_step(grads.to(wire.rows.dtype), step, group), step.send))
    _finish(total, returning)
    return dq.to(q.dtype), total.to(wire.rows.dtype)


def _return_step(grads: Tensor, step: Step, group: dist.ProcessGroup) -> Arriving:
    """Starts to send the gradients of the rows that `forward_step` brought back to their rank."""
    R = dist.get_world_size(group)
    send, receive = _only(R, step.source, step.receive), _only(R, step.to, step.send.count)
    return Arriving(grads, send, receive, group, WHAT)


def _finish(total: Tensor, returning: list[tuple[Arriving, Rows]]) -> None:
    """Waits for the gradients that are under way and adds them to `total`."""
    for arriving, rows in returning:
        rows.add(total, arriving.wait())
    returning.clear()
