"""How finely a card cuts its sequences: a rule on the host, from lengths and from the card's size.

A scan goes through the chunks of a segment one after another, and a segment is a few programs:
heads times tiles of columns. Few heads and long sequences leave most of the card idle. Cut into
segments, all of them run at once, but each must be summarised first (its offset, and its transition
where a state passes through), and the maps folded.

    time(a scan of some segments) = max(step * longest, shared * programs * chunks / processors)

in microseconds: `step` a chunk when nothing else runs, `shared` a chunk of one program on a full
multiprocessor. Forward: offsets and transitions in one launch, then the scan; backward: offsets in
reverse (transitions are the forward's), states again, the scan in reverse, the last two at once
where the card has room. What crosses ranks is
summarised cut or not. The cut with the least time is taken if it saves a MARGIN. Where it does not
for both directions, and no state crosses ranks, the forward may be cut alone. Where states cross
ranks, all wait in each exchange for the slowest: a rank at an end, which has a summary less to make
and would alone do without a cut, cuts as one that a state passes through.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace
from typing import NamedTuple

from .packing import Packing
from .rule import CHUNK

COLUMNS = 32
"""Of the state, that a program of the costs below has."""


class Cost(NamedTuple):
    """step, shared; many: shared where a launch has at least MANY programs, which are then joined
    to wider ones that read less."""

    step: float
    shared: float
    many: float


MANY = 512

SCAN, STATES, SUMMARY = Cost(1.39, 0.78, 0.80), Cost(1.15, 0.92, 0.95), Cost(0.80, 0.41, 0.34)
SCAN_BWD, SUMMARY_BWD = Cost(1.48, 1.07, 1.10), Cost(0.88, 0.64, 0.64)
"""Of the scan, the states again, offsets and transitions, the scan in reverse and its offsets; on
an H200, K = V = 128, bf16 (docs/log.md). Other shapes change all of them alike."""

BOTH, BESIDE = 1.90, 1.50
"""A step of the states again beside the scan in reverse, and beside its offsets, where all of their
programs fit on the card at once."""

FOLD = 5.0
"""Folding in one segment: two products [K, K] x [K, V] after one another."""

EXTRA = 60.0
"""The additional launches of a cut, in one direction, from Python."""

MARGIN = 0.95
"""A cut must promise at most this share of the uncut time."""

SMALLEST = 8
"""Chunks below which a segment is not cut: its maps would weigh more than its tokens."""


def chunks_of(packing: Packing, which: Iterable[int]) -> list[int]:
    return [-(-(packing.segments[i].stop - packing.segments[i].start) // CHUNK) for i in which]


def predicted(
    packing: Packing, value: int, key: int, processors: int, backward: bool = True
) -> float:
    """Microseconds of a forward and, with it, a backward. value, key: programs of a segment for its
    state and for its transition."""
    everything, feeding, carried, middle = (
        chunks_of(packing, s)
        for s in (range(len(packing.segments)), packing.feeding, packing.carried, packing.middle)
    )

    def time(cost: Cost, chunks: list[int], through: list[int] = []) -> float:  # noqa: B006
        shared = cost.many if value * len(chunks) + key * len(through) >= MANY else cost.shared
        work = value * sum(chunks) + key * sum(through)
        return max(cost.step * max(chunks, default=0), shared * work / processors)

    folds = max((len(c) for c in packing.chains), default=0)
    cut = FOLD * folds + (EXTRA if folds > 1 else 0.0)
    total = time(SUMMARY, feeding, middle) + time(SCAN, everything) + cut
    if not backward:
        return total
    if value * len(everything) > processors:
        scans = time(SUMMARY_BWD, carried) + time(STATES, everything) + time(SCAN_BWD, everything)
    elif carried:  # two scans at once, in programs twice as wide
        scans = BESIDE * max(everything) + time(SCAN_BWD, everything)
    else:
        scans = BOTH * max(everything, default=0)
    return total + scans + cut


def passed_through(packing: Packing) -> Packing:
    """As if a state entered it and another left it."""
    segments = list(packing.segments)
    segments[0] = segments[0]._replace(begins=False, entry=max(segments[0].entry, 0))
    segments[-1] = segments[-1]._replace(ends=False, exit=max(segments[-1].exit, 0))
    return replace(packing, segments=tuple(segments))


def split(
    packing: Packing,
    value: int,
    key: int,
    processors: int,
    backward: bool = True,
    crossed: bool = False,
) -> Packing:
    """`packing`, or the same tokens in shorter segments where that promises to be faster. In a
    frame they stay whole. crossed: whether states cross ranks."""

    def best() -> Packing:
        judged = passed_through(packing) if crossed else packing
        longest = max(chunks_of(packing, range(len(packing.segments))), default=0)
        chosen, least = longest, MARGIN * predicted(judged, value, key, processors, backward)
        size = SMALLEST
        while size < longest:
            time = predicted(judged.cut(size), value, key, processors, backward)
            if time < least:
                chosen, least = size, time
            size *= 2
        return packing if chosen == longest else packing.cut(chosen)

    if packing.segments and processors and packing.frame is None:
        return packing.cached(("split", value, key, processors, backward, crossed), best)
    return packing
