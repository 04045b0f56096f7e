"""Which keys the queries of a rank attend to, and which rank has them.

A rank's tokens are divided into pieces: a piece is the part of a range that lies in one sequence.
The queries of a piece attend to the keys of its sequence, from the sequence's first token to the
piece's last. A rank therefore needs the keys of its sequences up to its own last token in each, and
no others. Everything here is computed on the host, from tables that all ranks have.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import accumulate
from typing import ClassVar, NamedTuple

import torch
from torch import Tensor

from fla_cp.partition.device_tables import Tabled, to_device
from fla_cp.partition.token_ranges import Ranges

Runs = tuple[tuple[int, int], ...]
"""Rows of a tensor, given as runs [start, stop)."""


class Piece(NamedTuple):
    """Tokens [lo, hi) of the batch, which lie in the sequence that starts at `begin`."""

    begin: int
    lo: int
    hi: int


def pieces(offsets: Sequence[int], ranges: Iterable[tuple[int, int]]) -> list[Piece]:
    """The pieces of a rank's ranges, in local order. offsets: those of the batch's sequences."""
    found = []
    for lo, hi in ranges:
        while lo < hi:
            i = bisect_right(offsets, lo)  # the first offset beyond lo; empty sequences have none
            stop = min(hi, offsets[i])
            found.append(Piece(offsets[i - 1], lo, stop))
            lo = stop
    return found


def needed(own: Sequence[Piece]) -> list[tuple[int, int]]:
    """The tokens of the batch to whose keys these pieces attend, as runs [start, stop) in order."""
    ends: dict[int, int] = {}
    for piece in own:
        ends[piece.begin] = max(piece.hi, ends.get(piece.begin, 0))
    return sorted(ends.items())


class Run(NamedTuple):
    """Tokens [lo, hi) of the batch, whose rows in some tensor begin at `at`."""

    lo: int
    hi: int
    at: int


def common_runs(wanted: Sequence[tuple[int, int]], ranges: Ranges) -> list[Run]:
    """The part of `wanted` that a rank with these ranges has. Rows are its local tokens."""
    bases = accumulate((hi - lo for lo, hi in ranges), initial=0)
    starts = [lo for lo, _ in wanted]
    found = []
    for (lo, hi), base in zip(ranges, bases, strict=False):
        for a, b in wanted[max(0, bisect_right(starts, lo) - 1) :]:
            if a >= hi:
                break
            start, stop = max(a, lo), min(b, hi)
            if start < stop:
                found.append(Run(start, stop, base + start - lo))
    return found


def _rows(runs: Sequence[Run], lo: int, hi: int) -> list[tuple[int, int]]:
    """The rows of the tokens [lo, hi). runs: where all tokens are, ordered by token."""
    found = []
    for run in runs[max(0, bisect_right(runs, lo, key=lambda r: r.lo) - 1) :]:
        if run.lo >= hi:
            break
        start, stop = max(lo, run.lo), min(hi, run.hi)
        if start < stop:
            row = run.at + start - run.lo
            found.append((row, row + stop - start))
    return found


def joined(runs: Iterable[tuple[int, int]]) -> Runs:
    """The same rows in as few runs as possible."""
    found: list[tuple[int, int]] = []
    for lo, hi in runs:
        if found and found[-1][1] == lo:
            found[-1] = found[-1][0], hi
        else:
            found.append((lo, hi))
    return tuple(found)


def count(runs: Iterable[tuple[int, int]]) -> int:
    """How many rows these runs have in total."""
    return sum(hi - lo for lo, hi in runs)


def indices(runs: Runs, device: torch.device) -> Tensor:
    """The rows of these runs as an int64 tensor."""
    parts = [torch.arange(lo, hi, device="cpu") for lo, hi in runs]
    rows = torch.cat(parts) if parts else torch.empty(0, dtype=torch.int64, device="cpu")
    return to_device(rows, torch.int64, device)


@dataclass(frozen=True)
class Lengths(Tabled):
    """Lengths of sequences of queries and of keys, each side by side in memory. The i-th sequence
    of queries attends to the i-th sequence of keys.

    causal: whether both end with the same token. Otherwise all keys come before the queries.
    changes: whether the lengths of another packing may be filled in, see `FixedLengths`.
    """

    queries: tuple[int, ...]
    keys: tuple[int, ...]
    causal: bool = True
    changes: ClassVar[bool] = False

    @property
    def longest(self) -> tuple[int, int]:
        """The largest length of queries, and of keys."""
        return max(self.queries, default=0), max(self.keys, default=0)

    def offsets(self, device: torch.device) -> tuple[Tensor, Tensor]:
        """The offsets of the queries' and of the keys' sequences, each [N+1] int32."""

        def build() -> tuple[Tensor, Tensor]:
            queries, keys = (offsets_of(lengths) for lengths in (self.queries, self.keys))
            return to_device(queries, torch.int32, device), to_device(keys, torch.int32, device)

        return self.cached(device, build)

    def positions(self, device: torch.device) -> Tensor:
        """[sum(queries)] int64: how many tokens of its sequence come before each query."""
        return self.cached(
            ("positions", device), lambda: to_device(positions_of(self), torch.int64, device)
        )

    def unread(self, device: torch.device) -> Tensor | None:
        """Which keys no query reads, [sum(keys)] bool; None if every packing reads all keys."""
        return None


def offsets_of(lengths: Sequence[int]) -> tuple[int, ...]:
    """The offsets of sequences of these lengths: 0, and then where each sequence ends."""
    return tuple(accumulate(lengths, initial=0))


def positions_of(lengths: Lengths) -> Tensor:
    """`Lengths.positions` on the host."""
    both = zip(lengths.queries, lengths.keys, strict=True)
    parts = [torch.arange(m - n, m, device="cpu") for n, m in both]
    return torch.cat(parts) if parts else torch.empty(0, dtype=torch.int64, device="cpu")


@dataclass(frozen=True)
class KeyRows(Tabled):
    """How the keys of a rank's pieces come to the rank.

    tokens: how many this rank has.
    send: for each rank, this rank included, the local tokens that it gets.
    receive: how many tokens come from each rank. In rank order they are the rows of the buffer
        that arrives.
    take: the rows of the buffer that make up the keys of all pieces, piece by piece. None if these
        are all rows in order.
    rounds: which of the taken keys to add at a time in the backward, as runs [start, stop). A row
        of the buffer may be taken more than once, but only once in each round.
    lengths: those of the pieces and of their keys.
    crosses: whether any rank needs another's tokens; otherwise all ranks skip the exchange.
    """

    tokens: int
    send: tuple[Runs, ...]
    receive: tuple[int, ...]
    take: Runs | None
    rounds: tuple[Runs, ...]
    lengths: Lengths
    crosses: bool

    @classmethod
    def build(
        cls,
        offsets: Sequence[int],
        token_ranges: Sequence[Ranges],
        rank: int,
        lengths: Lengths | None = None,
    ) -> KeyRows:
        """The rows of `rank`. lengths: used in place of the lengths of its pieces, if given."""
        mine = pieces(offsets, token_ranges[rank])
        wanted = [needed(pieces(offsets, ranges)) for ranges in token_ranges]
        crosses = any(count(x) > count(own) for x, own in zip(wanted, token_ranges, strict=True))
        send = tuple(
            joined((r.at, r.at + r.hi - r.lo) for r in common_runs(want, token_ranges[rank]))
            for want in wanted
        )
        arrived, at, receive = [], 0, []
        for ranges in token_ranges:
            runs = common_runs(wanted[rank], ranges)
            for run in runs:
                arrived.append(Run(run.lo, run.hi, at))
                at += run.hi - run.lo
            receive.append(sum(run.hi - run.lo for run in runs))
        arrived.sort()
        taken = joined(rows for p in mine for rows in _rows(arrived, p.begin, p.hi))
        whole = taken == joined([(0, at)] if at else [])
        if lengths is None:
            lengths = Lengths(tuple(p.hi - p.lo for p in mine), tuple(p.hi - p.begin for p in mine))
        rounds = () if whole else _rounds(mine)
        return cls(
            tokens=count(token_ranges[rank]),
            send=send,
            receive=tuple(receive),
            take=None if whole else taken,
            rounds=rounds,
            lengths=lengths,
            crosses=crosses,
        )

    @cached_property
    def send_counts(self) -> tuple[int, ...]:
        return tuple(map(count, self.send))

    def sent(self, device: torch.device) -> tuple[Tensor, ...]:
        """For each rank, the local tokens that it gets, as an int64 tensor."""
        return self.cached(
            ("send", device), lambda: tuple(indices(runs, device) for runs in self.send)
        )

    def taken(self, device: torch.device) -> Tensor | None:
        """`take` as an int64 tensor."""
        if self.take is None:
            return None
        runs = self.take
        return self.cached(("take", device), lambda: indices(runs, device))


def _rounds(mine: Sequence[Piece]) -> tuple[Runs, ...]:
    """The taken keys of the pieces in as few rounds as possible. Each round has the keys of a
    sequence at most once."""
    found: list[list[tuple[int, int]]] = []
    seen: dict[int, int] = {}
    at = 0
    for piece in mine:
        n = seen.get(piece.begin, 0)
        seen[piece.begin] = n + 1
        if n == len(found):
            found.append([])
        length = piece.hi - piece.begin
        found[n].append((at, at + length))
        at += length
    return tuple(map(joined, found))
