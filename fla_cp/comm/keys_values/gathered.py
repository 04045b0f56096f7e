"""Gathered: each rank gets the keys and values to which its queries attend.

One all-to-all sends them, and another returns their gradients. A rank receives n * itemsize bytes
for each token of n numbers, unless the token is its own or belongs to a sequence in which the rank
has no later token.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from fla_cp import remat
from fla_cp.comm.keys_values.base import WHAT, Kernels, KeysValues, Traffic
from fla_cp.comm.overlap import Arriving, exchanged, run_overlap
from fla_cp.once_differentiable import once_differentiable
from fla_cp.partition.key_rows import KeyRows
from fla_cp.rule import accumulator


class Gathered(KeysValues):
    """Each rank gets the keys and values to which its queries attend, and then computes alone."""

    def traffic(self) -> list[Traffic]:
        tokens = zip(self.tables.crossings.sent, self.tables.crossings.received, strict=True)
        each = ((sent + received) * self.sizes.key_bytes for sent, received in tokens)
        return [Traffic(n, n) for n in each]

    def memory(self) -> int:
        return max(self.tables.crossings.gathered) * self.sizes.held_bytes

    def attention(
        self,
        queries: Callable[[], Tensor],
        k: Tensor,
        v: Tensor,
        group: dist.ProcessGroup | None,
        scale: float,
        kernels: Kernels,
    ) -> Tensor:
        rows = self.tables.rows
        k, v = gather_all((k, v), rows, group)
        return kernels.attention_over(queries(), k, v, rows.lengths, scale)


def gather_all(
    xs: Sequence[Tensor], rows: KeyRows, group: dist.ProcessGroup | None
) -> list[Tensor]:
    """`gather` of several tensors [T, ..] of one dtype, in a single exchange."""
    flat = [x.flatten(1) for x in xs]
    if rows.crosses:
        sizes = [x.shape[1] for x in flat]
        found = list(gather(torch.cat(flat, 1), rows, group).split(sizes, 1))
    else:
        found = [gather(x, rows, group) for x in flat]
    return [y.unflatten(1, x.shape[1:]) for x, y in zip(xs, found, strict=True)]


def gather(x: Tensor, rows: KeyRows, group: dist.ProcessGroup | None) -> Tensor:
    """The rows of all tokens to which this rank's queries attend, [sum(rows.lengths.keys), n],
    piece by piece, from the rows x [T, n] of each rank's own tokens. A collective, if
    `rows.crosses`. Differentiable: a token's gradient is the sum over all ranks and pieces that got
    it, formed in fp32 (fp64) and in a fixed order."""
    if not rows.crosses:
        if group is not None:
            run_overlap(lambda: None)
        if rows.take is None:
            return x
    found: Tensor = _Gather.apply(x, rows, group)
    return found


class _Gather(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, rows: KeyRows, group: dist.ProcessGroup | None) -> Tensor:
        """The rows that arrive or, in the recomputation of a `remat.selective_checkpoint`, those
        that arrived in the first run."""
        ctx.rows, ctx.group = rows, group
        if not rows.crosses:
            return bring(x, rows, group)
        call = ("keys and values", tuple(x.shape), x.dtype)
        kept = remat.kept(call)
        if kept is None:
            arrived = _arrived(x, rows, group)
            remat.keep(call, (arrived,))
            return _taken(arrived, rows)
        # The work that was handed over runs where the exchange ran it, because the checkpoint
        # compares the order of saved tensors.
        run_overlap(lambda: None)
        assert kept[0] is not None
        return _taken(kept[0], rows)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:
        return give_back(grad, ctx.rows, ctx.group), None, None


def send(x: Tensor, rows: KeyRows, group: dist.ProcessGroup | None) -> Arriving | None:
    """Starts the exchange of `bring`. None if no rank needs another's rows."""
    if not rows.crosses or group is None:
        return None
    return Arriving(_leaving(x, rows), rows.send_counts, rows.receive, group, WHAT)


def brought(sent: Arriving, rows: KeyRows) -> Tensor:
    """The result of `bring`, whose exchange `send` has started."""
    return _taken(run_overlap(sent.wait), rows)


def bring(x: Tensor, rows: KeyRows, group: dist.ProcessGroup | None) -> Tensor:
    """`gather` without autograd."""
    return _taken(_arrived(x, rows, group) if rows.crosses else x, rows)


def _leaving(x: Tensor, rows: KeyRows) -> Tensor:
    return x[torch.cat(rows.sent(x.device))]


def _arrived(x: Tensor, rows: KeyRows, group: dist.ProcessGroup | None) -> Tensor:
    return exchanged(_leaving(x, rows), rows.send_counts, rows.receive, group, WHAT)


def _taken(arrived: Tensor, rows: KeyRows) -> Tensor:
    taken = rows.taken(arrived.device)
    return arrived if taken is None else arrived[taken]


def give_back(grad: Tensor, rows: KeyRows, group: dist.ProcessGroup | None) -> Tensor:
    """The adjoint of `bring`."""
    taken = rows.taken(grad.device)
    if taken is not None:
        runs = [run for round_ in rows.rounds for run in round_]
        places = [taken[lo:hi] for lo, hi in runs]
        grad = _summed([grad[lo:hi] for lo, hi in runs], places, grad, sum(rows.receive))
    if rows.crosses:
        back = exchanged(grad.contiguous(), rows.receive, rows.send_counts, group, WHAT)
        grad = _summed(back.split(rows.send_counts), rows.sent(grad.device), grad, rows.tokens)
    return grad


def _summed(parts: Sequence[Tensor], places: Sequence[Tensor], like: Tensor, rows: int) -> Tensor:
    """The sum [rows, n] of parts, in the dtype of `like`, formed in fp32 (fp64). places: the rows
    to which each part is added. No part has a row twice, so the order of the sums is fixed."""
    total = like.new_zeros(rows, like.shape[1], dtype=accumulator(like.dtype))
    for part, place in zip(parts, places, strict=True):
        total.index_add_(0, place, part.to(total.dtype))
    return total.to(like.dtype)
