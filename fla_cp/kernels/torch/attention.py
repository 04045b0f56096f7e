"""Causal softmax attention over packed sequences: one interface for PyTorch's kernels.

On CUDA, bf16 and fp16 with up to 256 channels a head run cuDNN's attention where it is faster
(`cudnn_attention`, `attention_parts`), and else PyTorch's flash attention for sequences of
different lengths: FlashAttention-2, or the version that `torch.nn.attention` was told to activate.
Everything else runs the same sums in torch operations, a block of queries at a time.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from functools import partial
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from fla_cp import remat
from fla_cp.kernels.torch import attention_parts, cudnn_attention
from fla_cp.kernels.torch.attended import Attended as Attended
from fla_cp.kernels.torch.attention_parts import Division
from fla_cp.once_differentiable import once_differentiable
from fla_cp.partition.key_rows import Lengths
from fla_cp.replay import without_autocast
from fla_cp.rule import accumulator

BLOCK = 512
"""Queries whose scores exist at once, where torch operations compute."""

MAX_CHANNELS = 256
"""The most channels of a head that flash attention takes."""


def flash_runs(q: Tensor, v: Tensor) -> bool:
    """Whether flash attention computes these queries and values. It refuses to compute none."""
    return (
        q.is_cuda
        and len(q) > 0
        and q.dtype in (torch.bfloat16, torch.float16)
        and max(q.shape[-1], v.shape[-1]) <= MAX_CHANNELS
    )


def attend(q: Tensor, k: Tensor, v: Tensor, lengths: Lengths, scale: float) -> Attended:
    """q [Tq, H, K], k [Tk, HK, K], v [Tk, HK, V]; H is a multiple of HK. Query h reads key head
    h // (H / HK). Every sequence that has queries has keys. Autocast does not reach inside."""
    with without_autocast(q.device.type):
        if not flash_runs(q, v):
            return _torch(q, k, v, lengths, scale)
        division = _division(q, k, v, lengths)
        if division is None:
            return _flash(q, k, v, lengths, scale)
        return attention_parts.attend(q, k, v, division, partial(_part, scale=scale))


def attend_bwd(
    do: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    o: Tensor,
    lse: Tensor,
    lengths: Lengths,
    scale: float,
) -> tuple[Tensor, Tensor, Tensor]:
    """The gradients of q, k and v, in their dtypes. o, lse: over all keys that the queries attend
    to. k and v may be some of these."""
    found = Attended(o, lse)
    with without_autocast(q.device.type):
        if not flash_runs(q, v):
            return _torch_bwd(do, q, k, v, found, lengths, scale)
        division = _division(q, k, v, lengths)
        if division is None:
            return _flash_bwd(do, q, k, v, found, lengths, scale)
        run = partial(_part_bwd, scale=scale)
        return attention_parts.attend_bwd(do, q, k, v, found, division, run)


def _division(q: Tensor, k: Tensor, v: Tensor, lengths: Lengths) -> Division | None:
    """The parts of this attention; None if cuDNN computes nothing of it."""
    return attention_parts.divided(lengths) if cudnn_attention.runs(q, k, v) else None


def _part(
    q: Tensor, k: Tensor, v: Tensor, lengths: Lengths, dense: bool, *, scale: float
) -> Attended:
    found = cudnn_attention.forward(q, k, v, lengths.causal, scale) if dense else None
    return found or _flash(q, k, v, lengths, scale)


def _part_bwd(
    do: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    found: Attended,
    lengths: Lengths,
    dense: bool,
    *,
    scale: float,
) -> tuple[Tensor, Tensor, Tensor]:
    grads = None
    if dense:
        grads = cudnn_attention.backward(do, q, k, v, found, lengths.causal, scale)
    return grads or _flash_bwd(do, q, k, v, found, lengths, scale)


def attention_over(
    q: Tensor, k: Tensor, v: Tensor, lengths: Lengths, scale: float | None
) -> Tensor:
    """q [Tq, H, K], k [Tk, HK, K], v [Tk, HK, V] of sequences side by side -> o [Tq, H, V]."""
    factor = q.shape[-1] ** -0.5 if scale is None else scale
    o: Tensor = _Attention.apply(q, k, v, lengths, factor)
    return o


class _Attention(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, q: Tensor, k: Tensor, v: Tensor, lengths: Lengths, scale: float
    ) -> Tensor:
        call = ("attention", tuple(q.shape), tuple(v.shape), q.dtype, scale)
        kept = remat.kept(call)
        if kept is None:
            kept = attend(q, k, v, lengths, scale)
            remat.keep(call, kept)
        o, lse = kept
        assert o is not None
        ctx.save_for_backward(q, k, v, o, lse)
        ctx.lengths, ctx.scale = lengths, scale
        return o

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, do: Tensor) -> tuple[Tensor | None, ...]:
        q, k, v, o, lse = ctx.saved_tensors
        return *attend_bwd(do, q, k, v, o, lse, ctx.lengths, ctx.scale), None, None


def _widened(x: Tensor, channels: int) -> Tensor:
    """x with as many channels, and with its rows where the kernel can load 16 bytes at once."""
    if x.shape[-1] != channels:
        return F.pad(x, (0, channels - x.shape[-1]))
    aligned = not any(n % 8 for n in (x.storage_offset(), *x.stride()[:-1]))
    return x if aligned and x.stride(-1) == 1 else x.clone(memory_format=torch.contiguous_format)


def _flash_channels(q: Tensor, v: Tensor) -> int:
    """Flash attention wants as many channels in v as in q, a multiple of 8."""
    return -(-max(q.shape[-1], v.shape[-1]) // 8) * 8


def _flash(q: Tensor, k: Tensor, v: Tensor, lengths: Lengths, scale: float) -> Attended:
    D, V = _flash_channels(q, v), v.shape[-1]
    longest, longest_keys = lengths.longest
    o, lse, *_ = torch.ops.aten._flash_attention_forward(
        *(_widened(x, D) for x in (q, k, v)),
        *lengths.offsets(q.device),
        # a bound; with 1 the kernel would take its path for decoding, which moves heads into rows
        max(longest, 2),
        longest_keys,
        0.0,
        lengths.causal,
        False,
        scale=scale,
    )
    return Attended(o[..., :V], lse)


def _flash_bwd(
    do: Tensor, q: Tensor, k: Tensor, v: Tensor, found: Attended, lengths: Lengths, scale: float
) -> tuple[Tensor, Tensor, Tensor]:
    D, V = _flash_channels(q, v), v.shape[-1]
    unread = torch.empty(2, dtype=torch.uint64, device=q.device)  # the state of a dropout
    dq, dk, dv = torch.ops.aten._flash_attention_backward(
        *(_widened(x, D) for x in (do, q, k, v, found.o)),
        found.lse.contiguous(),  # the kernel reads no strides of it
        *lengths.offsets(q.device),
        *lengths.longest,
        0.0,
        lengths.causal,
        unread,
        unread,
        scale=scale,
    )
    dk, dv = dk[..., : k.shape[-1]], dv[..., :V]
    idle = lengths.unread(q.device)
    if idle is not None:  # no kernel says that it writes the gradients of these keys
        dk, dv = (d.masked_fill(idle[:, None, None], 0.0) for d in (dk, dv))
    return dq[..., : q.shape[-1]], dk, dv


class _Block(NamedTuple):
    """Rows of some queries, rows of their keys, and how many keys the first query may not read."""

    queries: slice
    keys: slice
    hidden: int


def _blocks(lengths: Lengths, device: torch.device) -> Iterator[_Block]:
    """Blocks of queries with the keys that they attend to. In a causal block, query i reads all of
    its keys but the last `hidden` - i.

    Raises RuntimeError while a CUDA graph is captured for several packings, whose blocks differ.
    """
    if lengths.changes and device.type == "cuda" and torch.cuda.is_current_stream_capturing():
        raise RuntimeError(
            "under a context with max_sequences only flash attention can be captured in a CUDA "
            f"graph, in bf16 or fp16 with at most {MAX_CHANNELS} channels a head"
        )
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
    for block in _blocks(lengths, q.device):
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
    for block in _blocks(lengths, q.device):
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
