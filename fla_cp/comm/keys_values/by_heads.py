"""ByHeads: each rank gets the whole batch for its share of the heads.

One all-to-all exchanges queries, keys and values, and another returns the results. In the backward
the same two run in reverse. All ranks have equal work, whichever tokens they own.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from fla_cp import remat
from fla_cp.comm.keys_values.base import WHAT, Kernels, KeysValues, Sizes, Traffic
from fla_cp.comm.overlap import exchanged, run_overlap
from fla_cp.once_differentiable import once_differentiable
from fla_cp.partition.head_order import HeadOrder


class ByHeads(KeysValues):
    """Rank r computes the query heads from r H / R to (r+1) H / R. A key head that several ranks
    read is sent to each of them."""

    sizes: Sizes

    def refusal(self) -> str | None:
        H, HK, R = self.sizes.H, self.sizes.HK, self.tables.ranks
        if H % R or (HK % R and R % HK):
            return (
                "needs query heads that are a multiple of the ranks, and key heads that are a "
                f"multiple or a divisor of them, got H = {H}, HK = {HK} on {R} ranks"
            )
        return None

    def traffic(self) -> list[Traffic]:
        H, _, K, V, itemsize = self.sizes
        R, tokens = self.tables.ranks, self.tables.crossings.tokens
        key_heads = max(self.sizes.HK, R) // R
        row = (H // R + key_heads) * (K + V) * itemsize
        each = [((R - 1) * n + sum(tokens) - n) * row for n in tokens]
        return [Traffic(n, n) for n in each]

    def memory(self) -> int:
        key_heads = max(self.sizes.HK, self.tables.ranks) // self.tables.ranks
        tokens = sum(self.tables.crossings.tokens)
        return tokens * key_heads * (self.sizes.K + self.sizes.V) * self.sizes.itemsize

    def attention(
        self,
        queries: Callable[[], Tensor],
        k: Tensor,
        v: Tensor,
        group: dist.ProcessGroup | None,
        scale: float,
        kernels: Kernels,
    ) -> Tensor:
        R, order, q = self.tables.ranks, self.tables.order, queries()
        shares = [_shares(x, R) for x in (q, k, v)]
        sizes = [x.shape[2:].numel() for x in shares]
        wire = torch.cat([x.flatten(2) for x in shares], 2).transpose(0, 1)
        rows = _Moved.apply(wire.flatten(0, 1), order, group, True).split(sizes, 1)
        qs, ks, vs = (x.unflatten(1, s.shape[2:]) for x, s in zip(rows, shares, strict=True))
        o = kernels.attention_over(qs, ks, vs, order.lengths, scale)
        back: Tensor = _Moved.apply(o.flatten(1), order, group, False)
        return back.view(R, len(q), q.shape[1] // R, v.shape[2]).transpose(0, 1).flatten(1, 2)


def _shares(x: Tensor, R: int) -> Tensor:
    """x [T, heads, n] as [T, R, heads of a rank, n]. If there are fewer heads than ranks, each is
    repeated for the ranks that read it."""
    if x.shape[1] < R:
        x = x.repeat_interleave(R // x.shape[1], 1)
    return x.unflatten(1, (R, -1))


class _Moved(torch.autograd.Function):
    """The differentiable exchange. With to_heads, x [R * T, n] has what each rank gets of this
    rank's T tokens, and the result is the tokens of the batch in order, [sum(order.tokens), n].
    Otherwise it is the reverse."""

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, order: HeadOrder, group: dist.ProcessGroup | None, to_heads: bool
    ) -> Tensor:
        ctx.order, ctx.group, ctx.to_heads = order, group, to_heads
        call = ("by heads", tuple(x.shape), x.dtype, to_heads)
        kept = remat.kept(call)
        if kept is None:
            found = _moved(x, order, group, to_heads)
            remat.keep(call, (found,))
            return found
        # The work that was handed over runs where the exchange ran it, because the checkpoint
        # compares the order of saved tensors.
        run_overlap(lambda: None)
        assert kept[0] is not None
        return kept[0]

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None, None]:
        return _moved(grad, ctx.order, ctx.group, not ctx.to_heads), None, None, None


def _moved(x: Tensor, order: HeadOrder, group: dist.ProcessGroup | None, to_heads: bool) -> Tensor:
    mine = [order.tokens[order.rank]] * len(order.tokens)
    if to_heads:
        return order.arrived.of(exchanged(x, mine, order.tokens, group, WHAT))
    return exchanged(order.leaving.of(x), order.tokens, mine, group, WHAT)
