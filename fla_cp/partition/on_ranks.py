"""The packing of a rank and the slot table of all ranks, from the batch's offsets and ranges."""

from __future__ import annotations

from fla_cp.partition.packing import Frame, Packing
from fla_cp.partition.slots import Links, link_slots
from fla_cp.partition.token_ranges import Ranges
from fla_cp.partition.workload import Counts, Workload


def padded(offsets: tuple[int, ...], frame: Frame | None) -> tuple[int, ...]:
    """The offsets with empty sequences added at the end, up to the frame's number of sequences."""
    if frame is None:
        return offsets
    return offsets + offsets[-1:] * (frame.sequences + 1 - len(offsets))


def layout(
    offsets: tuple[int, ...], ranges: tuple[Ranges, ...], rank: int, frame: Frame | None
) -> tuple[Packing, Links]:
    """The packing of `rank` and the slot table. frame: that of a context with max_sequences."""
    offsets = padded(offsets, frame)
    loads = () if frame else tuple(Workload.of(offsets, own) for own in ranges)
    first = rank == 0
    packing = Packing.build(offsets, ranges[rank], counts_empty=first, frame=frame, loads=loads)
    return packing, link_slots(offsets, ranges, fixed=frame is not None)


def fixed_frame(max_sequences: int, ranges: tuple[Ranges, ...], rank: int) -> Frame:
    """The frame of a context with max_sequences, whose ranks have one range each."""
    frames = [
        Frame.of(max_sequences, hi - lo, enters=r > 0, leaves=r + 1 < len(ranges))
        for r, ((lo, hi),) in enumerate(ranges)
    ]
    return frames[rank]._replace(largest=Counts.largest(frame.counts for frame in frames))


def framed(
    packing: Packing, offsets: tuple[int, ...], ranges: tuple[Ranges, ...], rank: int
) -> Packing | None:
    """The packing filled up to rounded sizes, so that calls on similar packings share programs.

    packing: that of `layout` without a frame. None for a single document, because calls on single
    documents share programs anyway, and None unless each rank has exactly one range, with tokens.
    """
    if len(offsets) == 2 or any(len(r) != 1 or r[0][0] == r[0][1] for r in ranges):
        return None
    frame = Frame.around_ranks([load.counts for load in packing.loads], rank)
    return Packing.build(offsets, ranges[rank], frame=frame)
