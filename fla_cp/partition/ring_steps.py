"""The steps of a ring of keys and values: which rows a rank sends, receives and reads in each.

In step t a rank receives from the rank t places before it and sends to the one t places after it.
The ranges of different ranks are disjoint, so a run of another rank's tokens lies wholly before or
wholly after each of this rank's pieces. Therefore no query needs a mask in these steps. A rank's
own tokens of one sequence, in the order of the sequence, attend to each other causally.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from fla_cp.partition.device_tables import Tabled
from fla_cp.partition.key_crossings import Crossings
from fla_cp.partition.key_rows import (
    Lengths,
    Run,
    Runs,
    common_runs,
    count,
    indices,
    joined,
    needed,
    pieces,
)
from fla_cp.partition.token_ranges import Ranges


@dataclass(frozen=True)
class Rows(Tabled):
    """Some rows of a tensor. No row occurs twice."""

    runs: Runs

    @property
    def count(self) -> int:
        return count(self.runs)

    def of(self, x: Tensor) -> Tensor:
        """These rows of x. They are a view if they are one run."""
        return x[self._place(x.device)]

    def put(self, x: Tensor, rows: Tensor) -> None:
        """Writes `rows` into these rows of x, in x's dtype."""
        x[self._place(x.device)] = rows.to(x.dtype)

    def add(self, x: Tensor, rows: Tensor) -> None:
        """Adds `rows` to these rows of x, in x's dtype."""
        place = self._place(x.device)
        if isinstance(place, slice):
            x[place] += rows
        else:
            x.index_add_(0, place, rows.to(x.dtype))

    def _place(self, device: torch.device) -> slice | Tensor:
        if len(self.runs) <= 1:
            return slice(*self.runs[0]) if self.runs else slice(0)
        return self.cached(device, lambda: indices(self.runs, device))


class Part(NamedTuple):
    """One call of the attention kernel: sequences of queries, and for each the keys that all of its
    queries read. queries: rows of the rank's own tokens. keys: rows of the tokens that arrived, or
    of the rank's own."""

    queries: Rows
    keys: Rows
    lengths: Lengths


class Step(NamedTuple):
    """One step. to, source: the rank that gets tokens from this rank, and the rank that sends it
    tokens. send: the local tokens that leave. receive: how many tokens arrive. parts: what is
    computed. No part has a key twice, and no query is in two parts."""

    to: int
    source: int
    send: Rows
    receive: int
    parts: tuple[Part, ...]


class _Own(NamedTuple):
    """Tokens [lo, hi) of the batch, in one sequence, which begin at local row `at`."""

    lo: int
    hi: int
    at: int


@dataclass(frozen=True)
class RingSteps:
    """What a rank computes. own: its own tokens among themselves. steps: those with other ranks.
    Steps in which no rank needs any token are left out, so that all ranks have the same steps."""

    own: Part
    steps: tuple[Step, ...]

    @classmethod
    def build(
        cls, offsets: Sequence[int], token_ranges: Sequence[Ranges], rank: int, crossings: Crossings
    ) -> RingSteps:
        R = len(token_ranges)
        mine: dict[int, list[_Own]] = defaultdict(list)
        at = 0
        for p in pieces(offsets, token_ranges[rank]):
            mine[p.begin].append(_Own(p.lo, p.hi, at))
            at += p.hi - p.lo
        for own in mine.values():
            own.sort()
        wanted = needed(pieces(offsets, token_ranges[rank]))
        steps = []
        for t in sorted({(receiver - sender) % R for sender, receiver in crossings.pairs}):
            to, source = (rank + t) % R, (rank - t) % R
            theirs = needed(pieces(offsets, token_ranges[to]))
            leaving = common_runs(theirs, token_ranges[rank])
            arriving = _arrived(common_runs(wanted, token_ranges[source]))
            steps.append(
                Step(
                    to=to,
                    source=source,
                    send=_rows((r.at, r.at + r.hi - r.lo) for r in leaving),
                    receive=sum(r.hi - r.lo for r in arriving),
                    parts=_parts(offsets, mine, arriving),
                )
            )
        return cls(_own_part(mine), tuple(steps))


def _rows(runs: Iterable[tuple[int, int]]) -> Rows:
    return Rows(joined(runs))


def _own_part(mine: dict[int, list[_Own]]) -> Part:
    """All tokens of the rank, one sequence after another. mine: its pieces of each sequence."""
    rows = _rows((p.at, p.at + p.hi - p.lo) for own in mine.values() for p in own)
    lengths = tuple(sum(p.hi - p.lo for p in own) for own in mine.values())
    return Part(rows, rows, Lengths(lengths, lengths))


def _arrived(runs: Sequence[Run]) -> list[Run]:
    """The same runs, with their rows in the buffer that arrives."""
    found, at = [], 0
    for run in runs:
        found.append(run._replace(at=at))
        at += run.hi - run.lo
    return found


def _parts(
    offsets: Sequence[int], mine: dict[int, list[_Own]], arriving: Sequence[Run]
) -> tuple[Part, ...]:
    """The parts of a step. arriving: the runs that the other rank sends. The pieces of a sequence
    that read the same runs are one sequence of queries. Those that read different runs are in
    different parts, so that no part has a key twice."""
    theirs: dict[int, list[Run]] = defaultdict(list)
    for run in sorted(arriving):
        theirs[offsets[bisect_right(offsets, run.lo) - 1]].append(run)
    parts: list[tuple[list, list, list, list]] = []
    for begin, runs in theirs.items():
        starts = [run.lo for run in runs]
        readers: dict[int, list[_Own]] = defaultdict(list)  # pieces by the number of runs before
        for piece in mine[begin]:
            readers[bisect_left(starts, piece.lo)].append(piece)
        read = [(runs[:n], queries) for n, queries in readers.items() if n]
        for i, (keys, queries) in enumerate(read):
            if i == len(parts):
                parts.append(([], [], [], []))
            query_rows, key_rows, query_lengths, key_lengths = parts[i]
            query_rows += [(p.at, p.at + p.hi - p.lo) for p in queries]
            key_rows += [(r.at, r.at + r.hi - r.lo) for r in keys]
            query_lengths.append(sum(p.hi - p.lo for p in queries))
            key_lengths.append(sum(r.hi - r.lo for r in keys))
    return tuple(
        Part(_rows(q), _rows(k), Lengths(tuple(n), tuple(m), causal=False)) for q, k, n, m in parts
    )
