"""Causal softmax attention over packed sequences: one interface for PyTorch's kernels.

On CUDA, bf16 and fp16 with up to 256 channels a head run PyTorch's flash attention for sequences of
different lengths: FlashAttention-2, or the version that `torch.nn.attention` was told to activate.
Everything else runs the same sums in torch operations, a block of queries at a time.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from fla_cp.partition.key_rows import Lengths
from fla_cp.rule import accumulator

BLOCK = 512
"""Queries whose scores exist at once, where torch operations compute."""

MAX_CHANNELS = 256
"""The most channels of a head that flash attention takes."""


class Attended(NamedTuple):
    """o [Tq, H, V] in q's dtype; lse [H, Tq], the log of the sum of exponentials of each query's
    scores, fp32 (fp64 for fp64); state: what the kernel's backward wants besides."""

    o: Tensor
    lse: Tensor
    state: tuple[Tensor, ...] = ()


def flash_runs(q: Tensor, v: Tensor) -> bool:
    """Whether flash attention computes these queries and values."""
    return (
        q.is_cuda
        and q.dtype in (torch.bfloat16, torch.float16)
        and max(q.shape[-1], v.shape[-1]) <= MAX_CHANNELS
    )


def attend(q: Tensor, k: Tensor, v: Tensor, lengths: Lengths, scale: float) -> Attended:
    """q [Tq, H, K], k [Tk, HK, K], v [Tk, HK, V]; H is a multiple of HK. Query h reads key head
    h // (H / HK). Every sequence of queries has keys."""
    return (_flash if flash_runs(q, v) else _torch)(q, k, v, lengths, scale)


def attend_bwd(
    do: Tensor, q: Tensor, k: Tensor, v: Tensor, found: Attended, lengths: Lengths, scale: float
) -> tuple[Tensor, Tensor, Tensor]:
    """The gradients of q, k and v, in their dtypes. found: o and lse over all keys that the queries
    attend to. k and v may be some of these."""
    backward = _flash_bwd if flash_runs(q, v) else _torch_bwd
    return backward(do, q, k, v, found, lengths, scale)


def _widened(x: Tensor, channels: int) -> Tensor:
    return x if x.shape[-1] == channels else F.pad(x, (0, channels - x.shape[-1]))


def _flash_channels(q: Tensor, v: Tensor) -> int:
    """Flash attention wants as many channels in v as in q, a multiple of 8."""
    return -(-max(q.shape[-1], v.shape[-1]) // 8) * 8


def _flash(q: Tensor, k: Tensor, v: Tensor, lengths: Lengths, scale: float) -> Attended:
    D, V = _flash_channels(q, v), v.shape[-1]
    o, lse, seed, unused, _ = torch.ops.aten._flash_attention_forward(
        *(_widened(x, D) for x in (q, k, v)),
        *lengths.offsets(q.device),
        *lengths.longest,
        0.0,
        lengths.causal,
        False,
        scale=scale,
    )
    return Attended(o[..., :V], lse, (seed, unused))


def _flash_bwd(
    do: Tensor, q: Tensor, k: Tensor, v: Tensor, found: Attended, lengths: Lengths, scale: float
) -> tuple[Tensor, Tensor, Tensor]:
    D, V = _flash_channels(q, v), v.shape[-1]
    dq, dk, dv = torch.ops.aten._flash_attention_backward(
        *(_widened(x, D) for x in (do, q, k, v, found.o)),
        found.lse,
        *lengths.offsets(q.device),
        *lengths.longest,
        0.0,
        lengths.causal,
        *found.state,
        scale=scale,
    )
    return dq[..., : q.shape[-1]], dk[..., : q.shape[-1]], dv[..., :V]


class _Block(NamedTuple):
    """Rows of some queries, rows of their keys, and how many keys the first query may not read."""

    queries: slice
    keys: slice
    hidden: int


def _blocks(lengths: Lengths) -> Iterator[_Block]:
    """Blocks of queries with the keys that they attend to. In a causal block, query i reads all of
    its keys but the last `hidden` - i."""
    first_query = first_key = 0
    for n, m in zip(lengths.queries, lengths.keys, strict=True):
        for lo in range(0, n, BLOCK):
            hi = min(lo + BLOCK, n)
            seen = m - (n - hi) if lengths.causal else m
            hidden = hi - lo - 1 if lengths.causal else 0
            queries = slice(first_query + lo, first_query + hi)
            yield _Block(queries, slice(first_key, first_key + seen), hidden)
        first_query += n
        first_key += m


def _scores(q: Tensor, k: Tensor, block: _Block, scale: float) -> Tensor:
    """[HK, G, n, m], -inf where a query must not read."""
    scores = torch.einsum("nhgd,mhd->hgnm", q, k) * scale
    if block.hidden:
        n, m = scores.shape[-2:]
        later = torch.ones(n, n, dtype=torch.bool, device=q.device).triu(1)
        scores[..., m - n :].masked_fill_(later, -math.inf)
    return scores


def _grouped(x: Tensor, heads: int) -> Tensor:
    """[T, H, D] -> [T, HK, G, D] in the accumulator's dtype."""
    return x.to(accumulator(x.dtype)).unflatten(1, (heads, -1))


def _torch(q: Tensor, k: Tensor, v: Tensor, lengths: Lengths, scale: float) -> Attended:
    dtype, heads = accumulator(q.dtype), k.shape[1]
    grouped, keys, values = _grouped(q, heads), k.to(dtype), v.to(dtype)
    o = q.new_empty(*q.shape[:2], v.shape[-1])
    lse = q.new_empty(q.shape[1], len(q), dtype=dtype)
    for block in _blocks(lengths):
        scores = _scores(grouped[block.queries], keys[block.keys], block, scale)
        log = scores.logsumexp(-1, keepdim=True)
        out = torch.einsum("hgnm,mhv->nhgv", (scores - log).exp(), values[block.keys])
        o[block.queries] = out.flatten(1, 2).to(o.dtype)
        lse[:, block.queries] = log.squeeze(-1).flatten(0, 1)
    return Attended(o, lse)


def _torch_bwd(
    do: Tensor, q: Tensor, k: Tensor, v: Tensor, found: Attended, lengths: Lengths, scale: float
) -> tuple[Tensor, Tensor, Tensor]:
    dtype, heads = accumulator(q.dtype), k.shape[1]
    grouped, keys, values = _grouped(q, heads), k.to(dtype), v.to(dtype)
    given, out = _grouped(do, heads), _grouped(found.o, heads)
    dq, dk, dv = torch.empty_like(q), torch.zeros_like(keys), torch.zeros_like(values)
    for block in _blocks(lengths):
        rows, cols = block.queries, block.keys
        log = found.lse[:, rows].unflatten(0, (heads, -1))[..., None]
        p = (_scores(grouped[rows], keys[cols], block, scale) - log).exp()
        dv[cols] += torch.einsum("hgnm,nhgv->mhv", p, given[rows])
        dp = torch.einsum("nhgv,mhv->hgnm", given[rows], values[cols])
        inner = torch.einsum("nhgv,nhgv->hgn", given[rows], out[rows])
        ds = p * (dp - inner[..., None]) * scale
        dq[rows] = torch.einsum("hgnm,mhd->nhgd", ds, keys[cols]).flatten(1, 2).to(dq.dtype)
        dk[cols] += torch.einsum("hgnm,nhgd->mhd", ds, grouped[rows])
    return dq, dk.to(k.dtype), dv.to(v.dtype)
