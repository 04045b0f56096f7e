"""Latent attention under torch.compile: one op a direction, with the exchange and the expansion
inside, and one op that starts the forward's exchange earlier (`fla_cp.ops.sent_ahead`).

Each packing brings another number of latents to a rank, so a graph can save neither them nor what
is expanded from them. The ops therefore take the matrix that expands them, and the backward
exchanges and expands the latents again.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from fla_cp.comm.keys_values import LatentSizes
from fla_cp.comm.keys_values.gathered import bring, brought, give_back
from fla_cp.comm.keys_values.latents import LatentWire
from fla_cp.comm.keys_values.ring import ring, ring_bwd
from fla_cp.kernels.torch import attention as kernels
from fla_cp.ops.attention_plan import latent_scheme, owned, placed, ring_call, send
from fla_cp.ops.sent_ahead import Sent, fake_ticket, taken, ticket_for
from fla_cp.rule import accumulator

_ARGUMENTS = (
    "Tensor q, Tensor latent, Tensor shared, Tensor weight, float scale, Tensor context, "
    "Tensor sizes, SymInt rows"
)


class _Call:
    """A call, from the arguments that both directions share. q [T, H, K], latent [T, R], shared
    [T, p], weight [H * n, R]. ring: None if latents are gathered. first: the first exchange, if it
    was started before."""

    def __init__(
        self,
        q: Tensor,
        latent: Tensor,
        shared: Tensor,
        weight: Tensor,
        scale: float,
        number: Tensor,
        sizes: Tensor,
        rows: int,
        ticket: Tensor | None = None,
    ) -> None:
        tables, context = placed(len(q), number, rows)
        self.rows, self.group = tables.rows, None if context is None else context.group
        self.q, self.scale = q, scale
        self.wire = LatentWire(q, latent, shared, weight)
        sent = taken(ticket)
        if sent is None:
            sent = Sent(latent_scheme(self.wire.sizes, q.dtype, tables, context), None)
        self.ring, self.first = ring_call(sent.scheme, scale, context), sent.first

    def run(self) -> tuple[Tensor, Tensor]:
        """o and lse."""
        if self.ring is not None:
            return ring(self.q, self.wire, self.ring, self.first)
        if self.first is not None:
            rows = brought(self.first, self.rows)
        else:
            rows = bring(self.wire.rows, self.rows, self.group)
        return kernels.attend(self.q, *self.wire.split(rows), self.rows.lengths, self.scale)

    def gradients(self, do: Tensor, o: Tensor, lse: Tensor) -> list[Tensor]:
        """The gradients of q, latent, shared and weight."""
        if self.ring is not None:
            dq, total = ring_bwd(do, self.q, self.wire, o, lse, self.ring)
        else:
            rows = bring(self.wire.rows, self.rows, self.group)
            given = do, self.q, *self.wire.split(rows), o, lse, self.rows.lengths, self.scale
            dq, *grads = kernels.attend_bwd(*given)
            total = give_back(self.wire.joined(rows, *grads), self.rows, self.group)
        return owned(dq, *self.wire.parts(total), self.wire.weight_gradient())


def _send(
    latent: Tensor, shared: Tensor, heads: list[int], number: Tensor, sizes: Tensor, rows: int
) -> Tensor:
    tables, context = placed(len(latent), number, rows)
    wire = torch.cat([latent, shared], 1)
    H, K, V = heads
    widths = LatentSizes(H, K, V, wire.shape[1], wire.element_size())
    scheme = latent_scheme(widths, wire.dtype, tables, context)
    group = None if context is None else context.group
    return ticket_for(Sent(scheme, send(scheme, wire, group)))


def _run(*given: Any) -> tuple[Tensor, Tensor]:
    o, lse = _Call(*given).run()
    return o.contiguous(), lse.contiguous()


def _run_backward(do: Tensor, o: Tensor, lse: Tensor, *given: Any) -> list[Tensor]:
    return _Call(*given).gradients(do, o, lse)


send_latents_op: Any = torch.library.custom_op(
    "fla_cp::send_latents",
    _send,
    mutates_args=(),
    schema=(
        "(Tensor latent, Tensor shared, int[] heads, Tensor context, Tensor sizes, SymInt rows) "
        "-> Tensor"
    ),
)
"""Starts to exchange latent [T, R] and shared [T, p] of this rank. Returns the ticket for
`latent_op`. heads: H, K and V of the attention."""

latent_op: Any = torch.library.custom_op(
    "fla_cp::latent_attention",
    _run,
    mutates_args=(),
    schema=f"({_ARGUMENTS}, Tensor? ticket) -> (Tensor, Tensor)",
)
"""This rank's o [T, H, V] and lse [H, T]. ticket: from `send_latents_op`, or None."""

_backward_op: Any = torch.library.custom_op(
    "fla_cp::latent_attention_backward",
    _run_backward,
    mutates_args=(),
    schema=f"(Tensor do, Tensor o, Tensor lse, {_ARGUMENTS}) -> Tensor[]",
)


@send_latents_op.register_fake
def _(latent: Tensor, *rest: Any) -> Tensor:
    return fake_ticket(latent)


@latent_op.register_fake
def _(q: Tensor, latent: Tensor, shared: Tensor, weight: Tensor, *rest: Any) -> Any:
    T, H, K = q.shape
    V = weight.shape[0] // H - (K - shared.shape[1])
    return q.new_empty(T, H, V), q.new_empty(H, T, dtype=accumulator(q.dtype))


@_backward_op.register_fake
def _(do: Tensor, o: Tensor, lse: Tensor, *given: Any) -> list[Tensor]:
    return [x.new_empty(x.shape) for x in given[:4]]


def _setup(ctx: Any, inputs: tuple, output: tuple[Tensor, Tensor]) -> None:
    ctx.save_for_backward(*inputs[:4], *inputs[5:7], *output)
    ctx.rest = inputs[4], inputs[7]
    ctx.mark_non_differentiable(output[1])
    ctx.set_materialize_grads(False)


def _gradients(ctx: Any, do: Tensor | None, _dlse: Tensor | None) -> tuple[Tensor | None, ...]:
    if do is None:
        return (None,) * 9
    *inputs, number, sizes, o, lse = ctx.saved_tensors
    scale, rows = ctx.rest
    return *_backward_op(do, o, lse, *inputs, scale, number, sizes, rows), *[None] * 5


latent_op.register_autograd(_gradients, setup_context=_setup)


@torch.library.custom_op("fla_cp::token_positions", mutates_args=())
def positions_op(like: Tensor, context: Tensor, sizes: Tensor, rows: int) -> Tensor:
    """How many tokens of its sequence come before each token of `like` [T, ..], as [T] int64."""
    tables, _ = placed(len(like), context, rows)
    return tables.rows.lengths.positions(like.device).clone()


@positions_op.register_fake
def _(like: Tensor, context: Tensor, sizes: Tensor, rows: int) -> Tensor:
    return like.new_empty(like.shape[0], dtype=torch.int64)
