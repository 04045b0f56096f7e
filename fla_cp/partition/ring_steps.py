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
from itertools import groupby, zip_longest
from typing import NamedTuple

from fla_cp.partition.key_crossings import Crossings
from fla_cp.partition.key_rows import Lengths, Run, common_runs, joined, needed, pieces
from fla_cp.partition.rows import Rows as Rows
from fla_cp.partition.token_ranges import Ranges


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


class _Reading(NamedTuple):
    """Queries of one sequence, and the keys that they read. queries: runs of this rank's tokens.
    keys: runs of the tokens that arrived, or of the rank's own."""

    queries: Sequence[Run]
    keys: Sequence[Run]


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
        mine: dict[int, list[Run]] = defaultdict(list)
        at, own_pieces = 0, pieces(offsets, token_ranges[rank])
        for p in own_pieces:
            mine[p.begin].append(Run(p.lo, p.hi, at))
            at += p.hi - p.lo
        for runs in mine.values():
            runs.sort()
        wanted = needed(own_pieces)
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
                    send=_rows(leaving),
                    receive=_tokens(arriving),
                    parts=_parts(offsets, mine, arriving),
                )
            )
        own = [_Reading(queries=runs, keys=runs) for runs in mine.values()]
        return cls(_part(own, causal=True), tuple(steps))


def _rows(runs: Iterable[Run]) -> Rows:
    return Rows(joined((run.at, run.at + run.hi - run.lo) for run in runs))


def _tokens(runs: Iterable[Run]) -> int:
    return sum(run.hi - run.lo for run in runs)


def _arrived(runs: Sequence[Run]) -> list[Run]:
    """The same runs, with their rows in the buffer that arrives."""
    found, at = [], 0
    for run in runs:
        found.append(run._replace(at=at))
        at += run.hi - run.lo
    return found


def _parts(
    offsets: Sequence[int], mine: dict[int, list[Run]], arriving: Sequence[Run]
) -> tuple[Part, ...]:
    """The parts of a step. mine: the rank's own runs of each sequence, by the token at which the
    sequence begins. arriving: the runs that the other rank sends.

    Part i has the i-th of the `_readings` of each sequence, so that it has no key twice.
    """
    arriving_of: dict[int, list[Run]] = defaultdict(list)
    for run in sorted(arriving):
        arriving_of[offsets[bisect_right(offsets, run.lo) - 1]].append(run)
    readings = [_readings(mine[begin], runs) for begin, runs in arriving_of.items()]
    return tuple(
        _part([reading for reading in parallel if reading], causal=False)
        for parallel in zip_longest(*readings)
    )


def _readings(own: Sequence[Run], arriving: Sequence[Run]) -> list[_Reading]:
    """What this rank's runs of one sequence read of the runs that arrive. Both are in the order of
    the sequence.

    A run reads all those that come before it. Runs that read the same ones are one reading, and
    those that read none are in no reading. Example: this rank has tokens [0, 4), [8, 12), [12, 16)
    and [20, 24) of a sequence, and [4, 8) and [16, 20) arrive. The readings are

        queries [8, 12), [12, 16)    keys [4, 8)
        queries [20, 24)             keys [4, 8), [16, 20)
    """
    starts = [run.lo for run in arriving]
    readings = []
    for before, queries in groupby(own, lambda run: bisect_left(starts, run.lo)):
        if before:
            readings.append(_Reading(list(queries), arriving[:before]))
    return readings


def _part(readings: Sequence[_Reading], causal: bool) -> Part:
    """One call of the attention kernel, with a sequence for each reading."""
    lengths = Lengths(
        queries=tuple(_tokens(reading.queries) for reading in readings),
        keys=tuple(_tokens(reading.keys) for reading in readings),
        causal=causal,
    )
    return Part(
        queries=_rows(run for reading in readings for run in reading.queries),
        keys=_rows(run for reading in readings for run in reading.keys),
        lengths=lengths,
    )
