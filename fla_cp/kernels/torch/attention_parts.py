"""Divides softmax attention into parts, so that cuDNN's kernels compute nearly all of it.

cuDNN takes one sequence at a time: either as many causal queries as keys, or queries that attend
to all keys, and it makes a new plan for each pair of lengths. A long sequence of n queries and m
keys is therefore divided:

    keys:             0 .. M     M .. m - n    the queries' own
    queries 0 .. N    cuDNN      flash         cuDNN, causal
    queries N .. n    flash, over all their keys

N is n, rounded down to lengths of which there are few (`rounded`). M is the sum of a few powers of
two, each of which is a call of its own (`powers`); without a mask it comes from m. Where ranks
have ranges of equal power-of-two lengths, N and M are n and m - n. One call of flash attention
computes the last queries of all sequences, and short sequences whole. Results over different keys
are merged by the logarithms of their sums.
"""

from __future__ import annotations

from collections.abc import Callable
from itertools import accumulate
from typing import NamedTuple

import torch
from torch import Tensor

from fla_cp.kernels.torch.attended import Attended
from fla_cp.partition.key_rows import Lengths, joined
from fla_cp.partition.rows import Rows
from fla_cp.rule import accumulator

LEAST = 1024
"""The fewest queries, and the fewest keys before them, that cuDNN computes."""

PAIRS = 2**23
"""The fewest pairs of a query and a key in a sequence of which cuDNN computes a part: 4096 causal
queries have as many. With fewer, the calls cost the host more time than they save the GPU."""

DIGITS, DIGITS_BEHIND = 6, 4
"""Binary digits that `rounded` keeps: for a sequence without keys before its queries, and for one
with such keys, for which there are pairs of lengths to plan."""

POWERS = 4
"""The most calls of cuDNN for the keys before the queries."""

ROWS = 4096
"""How many queries have their results merged at a time, in fp32."""


class Part(NamedTuple):
    """keys: some of the rows of keys that the queries attend to. lengths: those of the queries and
    of these keys. dense: whether cuDNN computes it."""

    keys: slice
    lengths: Lengths
    dense: bool


class Block(NamedTuple):
    """Some rows of queries, and the parts whose results are merged for them. Together, the parts
    cover all keys that these queries attend to. adds: whether the gradients of these keys already
    hold the share of later queries."""

    queries: slice
    parts: tuple[Part, ...]
    adds: bool


class Division(NamedTuple):
    """rest: the queries that flash attention computes over all of their keys. lengths: theirs; None
    if there are none. blocks: the other queries."""

    rest: Rows
    lengths: Lengths | None
    blocks: tuple[Block, ...]


Forward = Callable[[Tensor, Tensor, Tensor, Lengths, bool], Attended]
"""Given q, k, v and lengths of a part, and whether it is dense."""

Backward = Callable[
    [Tensor, Tensor, Tensor, Tensor, Attended, Lengths, bool], tuple[Tensor, Tensor, Tensor]
]
"""Given do, q, k and v of a part, o and lse of its queries over all keys, and as `Forward`."""


def rounded(n: int, digits: int) -> int:
    """n, rounded down to so many binary digits; 0 if it is less than LEAST."""
    shift = max(n.bit_length() - digits, 0)
    return 0 if n < LEAST else n >> shift << shift


def powers(n: int) -> list[int]:
    """At most POWERS powers of two from LEAST on, the largest first, whose sum is near n and not
    above it."""
    found: list[int] = []
    while n >= LEAST and len(found) < POWERS:
        found.append(1 << n.bit_length() - 1)
        n -= found[-1]
    return found


def divided(lengths: Lengths) -> Division | None:
    """The parts of these sequences; None if flash attention computes everything, if the lengths may
    change, or if a sequence has no queries."""
    return None if lengths.changes else lengths.cached("division", lambda: _divided(lengths))


def _divided(lengths: Lengths) -> Division | None:
    if 0 in lengths.queries or lengths.longest[0] < LEAST:
        return None
    q, k = (accumulate(x, initial=0) for x in (lengths.queries, lengths.keys))
    starts = zip(lengths.queries, lengths.keys, q, k, strict=False)
    blocks, runs, left = [], [], []
    for n, m, query, key in starts:
        parts = _parts(n, m, key, lengths.causal)
        N = parts[0].lengths.queries[0] if parts else 0
        left.append(n - N)
        if n > N:
            runs.append((query + N, query + n))
        if parts:
            blocks.append(Block(slice(query, query + N), parts, adds=n > N))
    rest = Lengths(tuple(left), lengths.keys, lengths.causal) if runs else None
    return Division(Rows(joined(runs)), rest, tuple(blocks)) if blocks else None


def _parts(n: int, m: int, start: int, causal: bool) -> tuple[Part, ...]:
    """The parts of one sequence of n queries and m keys, whose keys begin at the row `start`; none
    if it stays whole."""
    before = m - n if causal else m
    N, calls = rounded(n, DIGITS_BEHIND if before else DIGITS), powers(before)
    if not N or N * sum(calls) + causal * N * N // 2 < PAIRS:
        return ()
    parts, middle, own = [], start, start + before
    for M in calls:
        parts.append(Part(slice(middle, middle + M), Lengths((N,), (M,), False), True))
        middle += M
    if middle < own:
        parts.append(Part(slice(middle, own), Lengths((N,), (own - middle,), False), False))
    if causal:
        parts.append(Part(slice(own, own + N), Lengths((N,), (N,)), True))
    return tuple(parts)


def attend(q: Tensor, k: Tensor, v: Tensor, division: Division, run: Forward) -> Attended:
    """q [Tq, H, K], k [Tk, HK, K], v [Tk, HK, V]. run: computes a part."""
    rest, lengths, blocks = division
    if lengths is None and len(blocks) == 1:
        return _attend_block(q, k, v, blocks[0], run)
    o = q.new_empty(*q.shape[:2], v.shape[-1])
    lse = q.new_empty(q.shape[:2], dtype=accumulator(q.dtype))
    if lengths is not None:
        found = run(rest.of(q), k, v, lengths, False)
        rest.put(o, found.o)
        rest.put(lse, found.lse.T)
    for block in blocks:
        found = _attend_block(q[block.queries], k, v, block, run)
        o[block.queries], lse[block.queries] = found.o, found.lse.T
    return Attended(o, lse.T.contiguous())


def _attend_block(q: Tensor, k: Tensor, v: Tensor, block: Block, run: Forward) -> Attended:
    return _merged([run(q, k[p.keys], v[p.keys], p.lengths, p.dense) for p in block.parts])


def _merged(found: list[Attended]) -> Attended:
    """The softmax over the keys of all parts, from those over the keys of each."""
    if len(found) == 1:
        return found[0]
    logs = torch.stack([x.lse for x in found])
    lse = logs.logsumexp(0)
    shares = (logs - lse).exp().transpose(1, 2)[..., None]  # [parts, T, H, 1]
    o = torch.empty_like(found[0].o)
    for lo in range(0, len(o), ROWS):
        rows = slice(lo, lo + ROWS)
        total = found[0].o[rows] * shares[0, rows]
        for x, share in zip(found[1:], shares[1:], strict=True):
            total.addcmul_(x.o[rows], share[rows])
        o[rows] = total
    return Attended(o, lse)


def attend_bwd(
    do: Tensor, q: Tensor, k: Tensor, v: Tensor, found: Attended, division: Division, run: Backward
) -> tuple[Tensor, Tensor, Tensor]:
    """The gradients of q, k and v. run: those of a part."""
    rest, lengths, blocks = division
    if lengths is None and len(blocks) == len(blocks[0].parts) == 1:
        return run(do, q, k, v, found, blocks[0].parts[0].lengths, True)
    dq = torch.empty_like(q)
    if lengths is None:
        dk, dv = torch.empty_like(k), torch.empty_like(v)
    else:  # garbage for keys that none of these queries reads; the blocks overwrite it
        mine = Attended(rest.of(found.o), rest.of(found.lse.T).T)
        grads = run(rest.of(do), rest.of(q), k, v, mine, lengths, False)
        rest.put(dq, grads[0])
        dk, dv = (x.contiguous() for x in grads[1:])
    for rows, parts, adds in blocks:
        mine = Attended(found.o[rows], found.lse[:, rows])
        # Sums of three and more parts, each rounded to bf16, would have twice the error of one.
        single = len(parts) == 1
        total = dq[rows] if single else q.new_zeros(dq[rows].shape, dtype=accumulator(q.dtype))
        for part in parts:
            given = do[rows], q[rows], k[part.keys], v[part.keys], mine
            dq_part, dk_part, dv_part = run(*given, part.lengths, part.dense)
            _put(total, dq_part, not single)
            _put(dk[part.keys], dk_part, adds)
            _put(dv[part.keys], dv_part, adds)
        if not single:
            dq[rows] = total
    return dq, dk, dv


def _put(total: Tensor, x: Tensor, adds: bool) -> None:
    if adds:
        total += x
    else:
        total.copy_(x)
