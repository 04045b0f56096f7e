"""How finely a card cuts its sequences: a rule on the host, from lengths and from the card's size.

A scan goes through the chunks of a segment one after another, and a segment is a few programs:
heads times value tiles. Few heads and long sequences leave most of the card idle. Cut into
segments, all of them run at once, but each must be summarised first (its offset, and its transition
where a state passes through), and the maps folded. Times below are in steps of one chunk.

    time(scan of some segments) = max(longest, SHARED * programs * chunks / slots)

Forward: offsets, transitions and the scan; backward: offsets in reverse (transitions are the
forward's), states again, the scan in reverse. What crosses ranks is summarised cut or not. The cut
with the least time is taken if it saves a MARGIN.
"""

from __future__ import annotations

from collections.abc import Iterable

from .packing import Packing
from .rule import CHUNK

SHARED = 1.25
"""A step takes this much longer where programs share a multiprocessor."""

FOLD = 4.0
"""Steps that folding in one segment takes: two products [K, K] x [K, V] after one another."""

EXTRA = 20.0
"""Steps that the additional launches of a cut take, forward and backward."""

MARGIN = 0.85
"""A cut must promise at most this share of the uncut time."""

SMALLEST = 8
"""Chunks below which a segment is not cut: its maps would weigh more than its tokens."""


def chunks_of(packing: Packing, which: Iterable[int]) -> list[int]:
    return [-(-(packing.segments[i].stop - packing.segments[i].start) // CHUNK) for i in which]


def scan_time(chunks: list[int], programs: int, slots: int) -> float:
    """Of one scan over segments with so many chunks, each `programs` programs."""
    return max(max(chunks, default=0), SHARED * programs * sum(chunks) / slots)


def predicted(packing: Packing, value: int, key: int, slots: int) -> float:
    """Steps of a forward and backward. value, key: programs of a segment for its state and for its
    transition."""
    everything = chunks_of(packing, range(len(packing.segments)))
    feeding, carried = (chunks_of(packing, s) for s in (packing.feeding, packing.carried))
    middle = chunks_of(packing, packing.middle)
    folds = max((len(c) for c in packing.chains), default=0)
    return (
        3 * scan_time(everything, value, slots)
        + scan_time(feeding, value, slots)
        + scan_time(middle, key, slots)
        + scan_time(carried, value, slots)
        + 2 * FOLD * folds
        + (EXTRA if folds > 1 else 0.0)
    )


def split(packing: Packing, value: int, key: int, slots: int) -> Packing:
    """`packing`, or the same tokens in shorter segments where that promises to be faster."""

    def best() -> Packing:
        longest = max(chunks_of(packing, range(len(packing.segments))), default=0)
        chosen, least = packing, MARGIN * predicted(packing, value, key, slots)
        size = SMALLEST
        while size < longest:
            cut = packing.cut(size)
            time = predicted(cut, value, key, slots)
            if time < least:
                chosen, least = cut, time
            size *= 2
        return chosen

    if packing.segments and slots > value:
        return packing.cached(("split", value, key, slots), best)
    return packing
