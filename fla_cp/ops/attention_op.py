"""Softmax attention under torch.compile: one op a direction, with the exchange inside, and one op
that starts the forward's exchange earlier (`fla_cp.ops.sent_ahead`).

Each packing brings another number of keys to a rank, so a graph cannot save them, and the backward
exchanges them again. Only `Gathered` and `Ring` run here, because `ByHeads` would have to exchange
the results again, too.
"""

from __future__ import annotations

from typing import Any, NamedTuple, Self

import torch
import torch.distributed as dist
from torch import Tensor

from fla_cp.comm.keys_values import RINGS, KeysValues, Sizes
from fla_cp.comm.keys_values.gathered import bring, brought, give_back
from fla_cp.comm.keys_values.ring import RingCall, Wire, ring, ring_bwd
from fla_cp.comm.overlap import Arriving
from fla_cp.context import FLACPContext
from fla_cp.kernels.torch import attention as kernels
from fla_cp.ops.attention_plan import agreed_scheme, owned, placed, ring_call, send
from fla_cp.ops.sent_ahead import Sent, fake_ticket, taken, ticket_for
from fla_cp.partition.key_rows import KeyRows
from fla_cp.partition.key_tables import KeyTables
from fla_cp.rule import accumulator

_ARGUMENTS = (
    "Tensor q, Tensor k, Tensor v, float scale, str exchange, Tensor context, Tensor sizes, "
    "SymInt rows"
)


def _scheme(
    exchange: str, sizes: Sizes, like: Tensor, tables: KeyTables, context: FLACPContext | None
) -> KeysValues:
    wanted = exchange if exchange in RINGS else "auto"
    return agreed_scheme(wanted, tables, sizes, like.dtype, context, RINGS)


class _Call(NamedTuple):
    """What follows from the arguments that both directions share. ring: None if keys and values are
    gathered. first: the first exchange, if it was started before."""

    rows: KeyRows
    group: dist.ProcessGroup | None
    scale: float
    ring: RingCall | None
    first: Arriving | None

    @classmethod
    def of(
        cls,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        scale: float,
        exchange: str,
        number: Tensor,
        sizes: Tensor,
        rows: int,
        ticket: Tensor | None = None,
    ) -> Self:
        tables, context = placed(len(q), number, rows)
        sent = taken(ticket)
        if sent is None:
            heads = Sizes(q.shape[1], k.shape[1], q.shape[2], v.shape[2], q.element_size())
            sent = Sent(_scheme(exchange, heads, q, tables, context), None)
        group = None if context is None else context.group
        return cls(tables.rows, group, scale, ring_call(sent.scheme, scale, context), sent.first)

    def keys(self, wire: Wire) -> tuple[Tensor, Tensor]:
        if self.first is not None:
            return wire.split(brought(self.first, self.rows))
        return wire.split(bring(wire.rows, self.rows, self.group))


def _send(
    k: Tensor, v: Tensor, query_heads: int, exchange: str, number: Tensor, sizes: Tensor, rows: int
) -> Tensor:
    tables, context = placed(len(k), number, rows)
    heads = Sizes(query_heads, k.shape[1], k.shape[2], v.shape[2], k.element_size())
    scheme = _scheme(exchange, heads, k, tables, context)
    group = None if context is None else context.group
    return ticket_for(Sent(scheme, send(scheme, Wire(k, v).rows, group)))


def _run(q: Tensor, k: Tensor, v: Tensor, *rest: Any) -> tuple[Tensor, Tensor]:
    call = _Call.of(q, k, v, *rest)
    if call.ring is not None:
        return ring(q, Wire(k, v), call.ring, call.first)
    keys, values = call.keys(Wire(k, v))
    o, lse = kernels.attend(q, keys, values, call.rows.lengths, call.scale)
    return o.contiguous(), lse.contiguous()


def _run_backward(do: Tensor, o: Tensor, lse: Tensor, *given: Any) -> list[Tensor]:
    (q, k, v), call = given[:3], _Call.of(*given)
    wire = Wire(k, v)
    if call.ring is not None:
        dq, total = ring_bwd(do, q, wire, o, lse, call.ring)
        return owned(dq, *wire.split(total))
    keys, values = call.keys(wire)
    dq, dk, dv = kernels.attend_bwd(do, q, keys, values, o, lse, call.rows.lengths, call.scale)
    grads = torch.cat((dk.flatten(1), dv.flatten(1)), 1)
    return owned(dq, *wire.split(give_back(grads, call.rows, call.group)))


send_keys_op: Any = torch.library.custom_op(
    "fla_cp::send_keys",
    _send,
    mutates_args=(),
    schema=(
        "(Tensor k, Tensor v, int query_heads, str exchange, Tensor context, Tensor sizes, "
        "SymInt rows) -> Tensor"
    ),
)
"""Starts to exchange k [T, HK, K] and v [T, HK, V] of this rank. Returns the ticket for
`attention_op`."""

attention_op: Any = torch.library.custom_op(
    "fla_cp::causal_attention",
    _run,
    mutates_args=(),
    schema=f"({_ARGUMENTS}, Tensor? ticket) -> (Tensor, Tensor)",
)
"""o [T, H, V] and lse [H, T], from q [T, H, K], k [T, HK, K] and v [T, HK, V] of this rank. ticket:
from `send_keys_op`, or None."""

_backward_op: Any = torch.library.custom_op(
    "fla_cp::causal_attention_backward",
    _run_backward,
    mutates_args=(),
    schema=f"(Tensor do, Tensor o, Tensor lse, {_ARGUMENTS}) -> Tensor[]",
)


@send_keys_op.register_fake
def _(k: Tensor, *rest: Any) -> Tensor:
    return fake_ticket(k)


@attention_op.register_fake
def _(q: Tensor, k: Tensor, v: Tensor, *rest: Any) -> tuple[Tensor, Tensor]:
    T, H, _ = q.shape
    return q.new_empty(T, H, v.shape[2]), q.new_empty(H, T, dtype=accumulator(q.dtype))


@_backward_op.register_fake
def _(do: Tensor, o: Tensor, lse: Tensor, *given: Any) -> list[Tensor]:
    return [x.new_empty(x.shape) for x in given[:3]]


def _setup(ctx: Any, inputs: tuple, output: tuple[Tensor, Tensor]) -> None:
    ctx.save_for_backward(*inputs[:3], *inputs[5:7], *output)
    ctx.rest = inputs[3], inputs[4], inputs[7]
    ctx.mark_non_differentiable(output[1])
    ctx.set_materialize_grads(False)


def _gradients(ctx: Any, do: Tensor | None, _dlse: Tensor | None) -> tuple[Tensor | None, ...]:
    if do is None:
        return (None,) * 9
    q, k, v, number, sizes, o, lse = ctx.saved_tensors
    scale, exchange, rows = ctx.rest
    shared = q, k, v, scale, exchange, number, sizes, rows
    return *_backward_op(do, o, lse, *shared), *[None] * 6


attention_op.register_autograd(_gradients, setup_context=_setup)
