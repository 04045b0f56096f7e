"""How finely a card cuts its sequences: a rule on the host, from lengths and from the card's size.

A scan goes through the chunks of a segment one after another, and a segment is a few programs:
heads times tiles of columns. Few heads and long sequences leave most of the card idle. Cut into
segments, all of them run at once, but each must be summarised first (its offset, and its transition
where a state passes through), and the maps folded.

    time(a scan of some segments) = max(step * longest, shared * programs * chunks / processors)

in microseconds: `step` a chunk when nothing else runs, `shared` a chunk of one program on a full
multiprocessor. Forward: offsets and transitions in one launch, then the scan; backward: offsets in
reverse (transitions are the forward's), states again, the scan in reverse. Where the card has room
the states run beside another of these: the scan and the exchange before it, or, where nothing is
exchanged, the offsets. What crosses ranks is summarised cut or not. The cut with the least time is
taken if it saves a MARGIN. Where it does not for both directions, and no state crosses ranks, the
forward may be cut alone.

Ranks of one batch are cut at one length, chosen from what all of them hold. Where states cross
ranks, all wait in each exchange for the slowest: of each step that rank counts that takes longest.
Where none do, the rank that takes longest in all.
"""

from __future__ import annotations

from typing import NamedTuple

from fla_cp.partition.packing import Packing
from fla_cp.partition.workload import Counts, Workload

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

BOTH, CONCURRENT = 1.90, 1.50
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


class Steps(NamedTuple):
    """Microseconds of a rank. fold: in one direction, with the launches that it needs."""

    summary: float
    scan: float
    fold: float
    summary_bwd: float = 0.0
    states: float = 0.0
    scan_bwd: float = 0.0

    def sum(self) -> float:
        forward = self.summary + self.scan + self.fold
        scans = self.summary_bwd + self.states + self.scan_bwd
        return forward + scans + self.fold if scans else forward


def predicted(
    loads: tuple[Workload, ...],
    most: int,
    value: int,
    key: int,
    processors: int,
    backward: bool = True,
) -> float:
    """Microseconds of a forward and, with it, a backward, of all ranks' loads in segments of at
    most so many chunks. value, key: programs of a segment for its state and for its transition."""
    cut = [load.cut(most) for load in loads]
    counts = Counts.largest(load.counts for load in cut)
    crosses = any(load.counts.carried for load in loads)

    def steps(whole: Workload, load: Workload) -> Steps:
        of = load.amounts

        def time(cost: Cost, which: str, through: int = 0) -> float:
            programs = value * getattr(counts, which) + through * counts.middle
            work = value * of[which].chunks + through * of["middle"].chunks
            shared = cost.many if programs >= MANY else cost.shared
            return max(cost.step * of[which].longest, shared * work / processors)

        folds, longest = whole.folds(most), of["everything"].longest
        forward = Steps(
            summary=time(SUMMARY, "feeding", key),
            scan=time(SCAN, "everything"),
            fold=FOLD * folds + (EXTRA if folds > 1 else 0.0),
        )
        if not backward:
            return forward
        states, scan_bwd = time(STATES, "everything"), time(SCAN_BWD, "everything")
        summary = time(SUMMARY_BWD, "carried")
        if value * counts.everything > processors:
            return forward._replace(summary_bwd=summary, states=states, scan_bwd=scan_bwd)
        if crosses:
            return forward._replace(summary_bwd=summary, scan_bwd=BOTH * longest)
        if counts.carried:  # two scans at once, in programs twice as wide
            both = CONCURRENT * longest if of["carried"].segments else states
            return forward._replace(summary_bwd=both, scan_bwd=scan_bwd)
        return forward._replace(scan_bwd=BOTH * longest)

    ranks = [steps(*both) for both in zip(loads, cut, strict=True)]
    if crosses:
        return Steps(*map(max, zip(*ranks, strict=True))).sum()
    return max(rank.sum() for rank in ranks)


def split(
    packing: Packing, value: int, key: int, processors: int, backward: bool = True
) -> Packing:
    """`packing`, or the same tokens in shorter segments where that promises to be faster: on all
    ranks, or on none. In a frame they stay whole."""

    def best() -> Packing:
        loads = packing.on_ranks
        longest = max(load.amounts["everything"].longest for load in loads)
        shape = value, key, processors, backward
        chosen, least = longest, MARGIN * predicted(loads, longest, *shape)
        most = SMALLEST
        while most < longest:
            time = predicted(loads, most, *shape)
            if time < least:
                chosen, least = most, time
            most *= 2
        return packing if chosen == longest else packing.cut(chosen)

    if processors and packing.frame is None:
        return packing.cached(("split", value, key, processors, backward), best)
    return packing
