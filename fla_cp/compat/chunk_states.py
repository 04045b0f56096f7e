"""The states between the chunks of a call, for callers whose chunks are shorter than ours."""

from collections.abc import Iterator
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor

from fla_cp import ops
from fla_cp.context import FLACPContext
from fla_cp.rule import CHUNK

HALF = CHUNK // 2


@torch.no_grad()
def every_half_chunk(
    tokens: tuple[Tensor, ...],
    h: Tensor,
    options: dict[str, Any],
    cu_seqlens: Tensor | None,
    cu_seqlens_cpu: Tensor | None,
    cp_context: FLACPContext | None,
) -> Tensor:
    """The states of `chunk_kda` at the start of every 32 tokens, [B, NC, HV, ., .], from those at
    the start of every 64, h.

    tokens: q, k, v, g and beta. options: those that decide how the state changes. The first half of
    each chunk runs once more, from its state in h, as a sequence of its own. That takes about as
    long as another forward. Chunks of up to 32 tokens have no second half, and none is added.
    """
    B, T = tokens[0].shape[:2]
    lengths = list(_lengths(_runs(B, T, cu_seqlens, cu_seqlens_cpu, cp_context)))
    halved = [i for i, (_, length) in enumerate(lengths) if length > HALF]
    if not halved:
        return h
    device, every = h.device, h.flatten(0, 1)
    start = torch.tensor([lengths[i][0] for i in halved], device=device)
    rows = start[:, None] + torch.arange(HALF, device=device)
    which = torch.tensor(halved, device=device)
    first = [t.flatten(0, 1)[rows] for t in tokens]
    _, middle = ops.chunk_kda(
        *first, initial_state=every[which], output_final_state=True, **options
    )
    assert middle is not None
    found = every.new_empty(len(every) + len(halved), *every.shape[1:])
    # A chunk's state moves up by the halves of the chunks before it; its own half comes next.
    before = torch.zeros(len(every), dtype=torch.int64, device=device)
    before[which] = 1
    place = torch.arange(len(every), device=device) + before.cumsum(0) - before
    found[place] = every
    found[place[which] + 1] = middle.to(h.dtype)
    return found.unflatten(0, (B, -1))


def _runs(
    B: int,
    T: int,
    cu_seqlens: Tensor | None,
    cu_seqlens_cpu: Tensor | None,
    cp_context: FLACPContext | None,
) -> Iterator[tuple[int, int]]:
    """First and last offset of each run of tokens that is divided into chunks."""
    if cp_context is not None:
        return ((s.start, s.stop) for s in cp_context.packing.segments)
    if cu_seqlens is None:
        return pairwise(range(0, B * T + 1, T))
    return pairwise((cu_seqlens if cu_seqlens_cpu is None else cu_seqlens_cpu).tolist())


def _lengths(runs: Iterator[tuple[int, int]]) -> Iterator[tuple[int, int]]:
    """The first token of each chunk of 64, and the number of its tokens."""
    for start, stop in runs:
        for token in range(start, stop, CHUNK):
            yield token, min(CHUNK, stop - token)
