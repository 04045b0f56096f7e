"""Keys and values come to the queries: each rank gets the tokens that its queries attend to.

One all-to-all sends them, and another returns their gradients. For a token of n numbers, a rank
receives n * itemsize bytes, unless the token is its own or belongs to a sequence in which the rank
has no later token.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from fla_cp.comm import collectives
from fla_cp.comm.overlap import run_overlap
from fla_cp.comm.timing import exchange_wait
from fla_cp.partition.key_rows import KeyRows
from fla_cp.rule import accumulator


def gather(x: Tensor, rows: KeyRows, group: dist.ProcessGroup | None) -> Tensor:
    """x [T, n] of this rank's tokens -> the same of all tokens that its queries attend to,
    [sum(rows.lengths.keys), n], piece by piece. A collective, if `rows.crosses`. Differentiable: a
    token's gradient is the sum over all ranks and pieces that got it, formed in fp32 (fp64) and in
    a fixed order."""
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
        ctx.rows, ctx.group = rows, group
        arrived = x
        if rows.crosses:
            leaving = x[torch.cat(rows.sent(x.device))]
            arrived = _exchange(leaving, rows.send_counts, rows.receive, group)
        taken = rows.taken(x.device)
        return arrived if taken is None else arrived[taken]

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:
        rows, device = ctx.rows, grad.device
        taken = rows.taken(device)
        if taken is not None:
            runs = [run for round_ in rows.rounds for run in round_]
            places = [taken[lo:hi] for lo, hi in runs]
            grad = _summed([grad[lo:hi] for lo, hi in runs], places, sum(rows.receive))
        if rows.crosses:
            back = _exchange(grad.contiguous(), rows.receive, rows.send_counts, ctx.group)
            grad = _summed(back.split(rows.send_counts), rows.sent(device), rows.tokens)
        return grad, None, None


def _summed(parts: Sequence[Tensor], places: Sequence[Tensor], rows: int) -> Tensor:
    """The sum [rows, n] of parts, in their dtype, formed in fp32 (fp64). places: the rows of each
    part, which names none twice, so that the order of the sums is fixed."""
    like = parts[0]
    total = like.new_zeros(rows, like.shape[1], dtype=accumulator(like.dtype))
    for part, place in zip(parts, places, strict=True):
        total.index_add_(0, place, part.to(total.dtype))
    return total.to(like.dtype)


def _exchange(
    x: Tensor, send: tuple[int, ...], receive: tuple[int, ...], group: dist.ProcessGroup | None
) -> Tensor:
    assert group is not None, "tokens cross between ranks"
    out, work = collectives.all_to_all(x, list(send), list(receive), group)

    def wait() -> Tensor:
        with exchange_wait(x.device, "exchange of keys and values"):
            work.wait()
        return out

    return run_overlap(wait)
