"""Decides how finely sequences are cut into segments, with a model of the time.

A scan processes the chunks of a segment one after another, in a few programs: one for each head and
tile of columns. With few heads and long sequences, most of the GPU is idle. If a sequence is cut
into segments, they run at the same time. But each segment must first be summarized (its offset, and
its transition if a state passes through it), and the maps must be folded. The model is

    time(a scan of some segments) = max(step * longest, shared * programs * chunks / SMs)

in microseconds. `step` is the time of a chunk when nothing else runs, and `shared` the time of one
program's chunk on a full SM. The forward forms offsets and transitions in one launch, and then
scans. The backward forms the adjoint offsets (the transitions are the forward's), recomputes the
states, and scans in reverse. If the GPU has room, the states are recomputed at the same time as the
exchange and the reverse scan or, if nothing is exchanged, at the same time as the adjoint offsets.
Segments from which a state goes to another rank are summarized in any case.

The cut with the least time is taken if that is below MARGIN of the uncut time. On a single rank
with several packed sequences it must also save NEW_PACKING. If no cut pays for both directions
together, and no state crosses ranks, the forward alone may be cut.

All ranks of a batch cut at the same length, which is chosen from the workloads of all. If states
cross ranks, every rank waits in each exchange for the slowest, so each step counts with the rank
for which it takes longest. If no state crosses ranks, the rank that takes longest in total counts.
"""

from bisect import bisect_left
from functools import lru_cache
from typing import NamedTuple

from fla_cp.partition.packing import Packing
from fla_cp.partition.workload import Counts, Workload

COLUMNS = 32
"""How many columns of the state a program has in the costs below."""


class Cost(NamedTuple):
    """The cost of one kind of scan. step, shared: see above. many: `shared` of a launch with at
    least MANY programs, whose tiles are wider, so that they read less."""

    step: float
    shared: float
    many: float


MANY = 512

SCAN, STATES, SUMMARY = Cost(1.39, 0.78, 0.80), Cost(1.15, 0.92, 0.95), Cost(0.80, 0.41, 0.34)
SCAN_BWD, SUMMARY_BWD = Cost(1.48, 1.07, 1.10), Cost(0.88, 0.64, 0.64)
"""The costs of the scan, of recomputing states, of offsets and transitions, of the reverse scan and
of its offsets. Measured on an H200 with K = V = 128 in bf16 (docs/log.md). Other shapes change all
of them by the same factor."""

BOTH, CONCURRENT = 1.90, 1.50
"""`step` of two scans at the same time, if all programs of both fit on the GPU at once. BOTH: the
states are recomputed during the reverse scan. CONCURRENT: during the scan for its offsets."""

FOLD = 5.0
"""The time to fold in one segment: two products [K, K] x [K, V], one after the other."""

EXTRA = 60.0
"""The host time of the additional launches of a cut, in one direction."""

NEW_PACKING = 300.0
"""The host time that a cut must save in addition, where several sequences are packed on a single
rank. Packings without cuts share recorded programs (fla_cp/partition/packing.py, `Frame`), so a new
one costs the host little. One that is cut needs programs of its own."""

MARGIN = 0.95
"""A cut is made if its predicted time is at most this share of the uncut time."""

SMALLEST = 8
"""The fewest chunks in a segment. The maps of shorter ones would cost more than their tokens."""


class Steps(NamedTuple):
    """The microseconds that a rank takes for each step. fold: in one direction, with launches."""

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
    """The predicted microseconds of a forward, and with `backward` of a backward, too, if the loads
    of all ranks are cut into segments of at most `most` chunks. value, key: how many programs form
    the state of a segment, and its transition. processors: the SMs of the GPU."""
    cut = [load.cut(most) for load in loads]
    counts = Counts.largest(load.counts for load in cut)
    crosses = any(load.counts.carried for load in loads)
    ranks = []
    for whole, load in zip(loads, cut, strict=True):
        steps = _forward_steps(load, whole.folds(most), counts, value, key, processors)
        if backward:
            steps = _with_backward(steps, load, counts, crosses, value, processors)
        ranks.append(steps)
    if crosses:
        return Steps(*map(max, zip(*ranks, strict=True))).sum()
    return max(rank.sum() for rank in ranks)


def _scan_time(cost: Cost, programs: int, work: int, longest: int, processors: int) -> float:
    """The microseconds of a scan on a rank. programs: on the rank that has most of them, because
    all ranks take tiles alike. work: how many chunks this rank's programs process in total.
    longest: how many chunks its longest segment has."""
    shared = cost.many if programs >= MANY else cost.shared
    return max(cost.step * longest, shared * work / processors)


def _forward_steps(
    load: Workload, folds: int, counts: Counts, value: int, key: int, processors: int
) -> Steps:
    """The steps of a rank's forward. load: of the rank, cut. folds: how many segments are folded
    one after another. counts: the largest of all ranks' cut workloads.

    Example: 4 heads with K = V = 128 have value = key = 16 programs. One sequence of 512 chunks is
    cut into 8 segments of 64. 7 of them are summarized in 16 * 7 programs for the offsets, and 6
    also in 16 * 6 programs for the transitions. On 132 SMs, the scan is bound by its longest
    segment: 1.39 * 64 = 89 us, whereas its work would take 0.78 * 16 * 512 / 132 = 48 us.
    """
    everything, feeding, middle = (load.amounts[n] for n in ("everything", "feeding", "middle"))
    summary = _scan_time(
        SUMMARY,
        value * counts.feeding + key * counts.middle,
        value * feeding.chunks + key * middle.chunks,
        feeding.longest,
        processors,
    )
    programs, work = value * counts.everything, value * everything.chunks
    scan = _scan_time(SCAN, programs, work, everything.longest, processors)
    return Steps(summary, scan, fold=FOLD * folds + (EXTRA if folds > 1 else 0.0))


def _with_backward(
    forward: Steps, load: Workload, counts: Counts, crosses: bool, value: int, processors: int
) -> Steps:
    """The steps of a rank's forward and backward. crosses: whether any state crosses ranks. For the
    other arguments see `_forward_steps`."""
    everything, carried = load.amounts["everything"], load.amounts["carried"]
    programs, work = value * counts.everything, value * everything.chunks
    longest = everything.longest
    states = _scan_time(STATES, programs, work, longest, processors)
    scan = _scan_time(SCAN_BWD, programs, work, longest, processors)
    summary = _scan_time(
        SUMMARY_BWD, value * counts.carried, value * carried.chunks, carried.longest, processors
    )
    if programs > processors:  # no room for two scans at the same time
        return forward._replace(summary_bwd=summary, states=states, scan_bwd=scan)
    if crosses or not counts.carried:  # states are recomputed during the reverse scan
        return forward._replace(summary_bwd=summary, scan_bwd=BOTH * longest)
    # The states are recomputed during the scan for adjoint offsets, in programs twice as wide.
    together = CONCURRENT * longest if carried.segments else states
    return forward._replace(summary_bwd=together, scan_bwd=scan)


@lru_cache(maxsize=4096)
def longest_whole(chunks: int, value: int, processors: int) -> int:
    """The most chunks that the longest segment may have for which `split` certainly cuts no
    packing of `chunks` chunks, so that it need not be tried. The packing has several sequences and
    no context. It is certain if even a cut that left nothing but the work of the scans and its own
    launches would take longer than no cut."""
    if not processors:
        return chunks

    def may_be_cut(longest: int) -> bool:
        return not _cut_never_pays(longest, chunks, value, processors)

    return SMALLEST + bisect_left(range(SMALLEST + 1, chunks + 1), True, key=may_be_cut)


def _cut_never_pays(longest: int, chunks: int, value: int, processors: int) -> bool:
    """Whether no cut pays for a `longest` above SMALLEST. If so, none pays for a smaller `longest`,
    because only the time of the uncut scans grows with `longest`."""

    def work(cost: Cost) -> float:
        return min(cost.shared, cost.many) * value * chunks / processors

    def uncut(cost: Cost) -> float:
        return max(cost.step * longest, max(cost.shared, cost.many) * value * chunks / processors)

    launches = EXTRA + 2 * FOLD
    forward, least = MARGIN * uncut(SCAN), work(SCAN) + launches + NEW_PACKING
    # In the backward, the states are recomputed before the reverse scan or at the same time.
    one_by_one = MARGIN * (uncut(STATES) + uncut(SCAN_BWD)), work(STATES) + work(SCAN_BWD)
    at_once = MARGIN * BOTH * longest, work(SCAN_BWD)
    return forward <= least and all(
        forward + backward <= least + bound + launches for backward, bound in (one_by_one, at_once)
    )


def split(
    packing: Packing,
    value: int,
    key: int,
    processors: int,
    backward: bool = True,
    extra: int | None = None,
) -> Packing:
    """The packing, or the same tokens in shorter segments if that is predicted to be faster. All
    ranks decide alike. A packing with a frame is not cut. value, key, processors, backward: see
    `predicted`. extra: the most segments that the cut may add on a rank; None: any number."""

    def best() -> Packing:
        loads = packing.on_ranks
        longest = max(load.amounts["everything"].longest for load in loads)
        shape = value, key, processors, backward
        chosen, least = longest, MARGIN * predicted(loads, longest, *shape)
        if packing.sequences > 1 and not packing.loads:
            least -= NEW_PACKING
        most = SMALLEST
        while most < longest:
            if extra is None or max(load.added(most) for load in loads) <= extra:
                time = predicted(loads, most, *shape)
                if time < least:
                    chosen, least = most, time
            most *= 2
        return packing if chosen == longest else packing.cut(chosen)

    if processors and packing.frame is None:
        return packing.cached(("split", value, key, processors, backward, extra), best)
    return packing
