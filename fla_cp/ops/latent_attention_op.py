"""Latent attention under torch.compile: one op a direction, with the exchange and the expansion
inside.

The latents that come to a rank have a length of their own in every packing, so that no graph could
save them or what is expanded from them. The forward's op therefore takes the matrix that expands
them, and the backward's lets the latents come and expands them again.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from fla_cp.comm.keys_values.gathered import bring, give_back
from fla_cp.context import context_of
from fla_cp.kernels.torch import attention as kernels
from fla_cp.ops.attention_plan import key_tables, owned
from fla_cp.partition.key_rows import KeyRows
from fla_cp.rule import accumulator


class Expanded(NamedTuple):
    """k [N, H, K] and v [N, H, V]: a head's k has channels from the latent, and then the shared
    ones."""

    k: Tensor
    v: Tensor

    @classmethod
    def of(cls, each: Tensor, shared: Tensor, v_channels: int) -> Expanded:
        """each [N, H, n]: what the heads' projections give. shared [N, p]: for all heads."""
        k, v = each.split([each.shape[2] - v_channels, v_channels], -1)
        return cls(torch.cat([k, shared[:, None].expand(-1, each.shape[1], -1)], -1), v)


_ARGUMENTS = (
    "Tensor q, Tensor latent, Tensor shared, Tensor weight, float scale, Tensor context, "
    "Tensor sizes, SymInt rows"
)


class _Call:
    """Expanded keys and values of all tokens that the rank's queries attend to, which come from the
    ranks that have them. q [T, H, K], latent [T, R], shared [T, p], weight [H * n, R]."""

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
    ) -> None:
        self.rows, self.group = _place(len(q), number, rows)
        self.q, self.weight, self.scale = q, weight, scale
        self.widths = [latent.shape[1], shared.shape[1]]
        wire = bring(torch.cat([latent, shared], 1), self.rows, self.group)
        self.latent, shared = wire.split(self.widths, 1)
        each = (self.latent @ weight.T).unflatten(1, (q.shape[1], -1))
        self.own = q.shape[2] - self.widths[1]
        self.keys = Expanded.of(each, shared, each.shape[2] - self.own)

    def gradients(self, do: Tensor, o: Tensor, lse: Tensor) -> list[Tensor]:
        """Of q, latent, shared and weight."""
        k, v = self.keys
        given = do, self.q, k, v, o, lse, self.rows.lengths, self.scale
        dq, dk, dv = kernels.attend_bwd(*given)
        each = torch.cat([dk[..., : self.own], dv], -1).flatten(1)
        shared = dk[..., self.own :].sum(1)
        wire = torch.cat([each @ self.weight, shared], 1)
        latent, shared = give_back(wire, self.rows, self.group).split(self.widths, 1)
        return owned(dq, latent, shared, each.T @ self.latent)


def _place(tokens: int, number: Tensor, rows: int) -> tuple[KeyRows, dist.ProcessGroup | None]:
    """Which keys a call of so many local tokens reads, and the ranks that have them."""
    context = context_of(number)
    if context is not None:
        context.check_alive()
        context.check_local_tokens(tokens)
    tables = key_tables(rows, tokens // rows, None, context)
    return tables.rows, None if context is None else context.group


def _run(*given: Any) -> tuple[Tensor, Tensor]:
    call = _Call(*given)
    o, lse = kernels.attend(call.q, *call.keys, call.rows.lengths, call.scale)
    return o.contiguous(), lse.contiguous()


def _run_backward(do: Tensor, o: Tensor, lse: Tensor, *given: Any) -> list[Tensor]:
    return _Call(*given).gradients(do, o, lse)


latent_op: Any = torch.library.custom_op(
    "fla_cp::latent_attention", _run, mutates_args=(), schema=f"({_ARGUMENTS}) -> (Tensor, Tensor)"
)
"""This rank's o [T, H, V] and lse [H, T]."""

_backward_op: Any = torch.library.custom_op(
    "fla_cp::latent_attention_backward",
    _run_backward,
    mutates_args=(),
    schema=f"(Tensor do, Tensor o, Tensor lse, {_ARGUMENTS}) -> Tensor[]",
)


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
        return (None,) * 8
    *inputs, number, sizes, o, lse = ctx.saved_tensors
    scale, rows = ctx.rest
    return *_backward_op(do, o, lse, *inputs, scale, number, sizes, rows), *[None] * 4


latent_op.register_autograd(_gradients, setup_context=_setup)


@torch.library.custom_op("fla_cp::token_positions", mutates_args=())
def positions_op(like: Tensor, context: Tensor, sizes: Tensor, rows: int) -> Tensor:
    """[T] int64: how many tokens of its sequence come before each of like's tokens [T, ..]."""
    where, _ = _place(len(like), context, rows)
    return where.lengths.positions(like.device).clone()


@positions_op.register_fake
def _(like: Tensor, context: Tensor, sizes: Tensor, rows: int) -> Tensor:
    return like.new_empty(like.shape[0], dtype=torch.int64)
