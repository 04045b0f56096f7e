"""The packing of a rank and the slot table of all ranks, from the batch's offsets and ranges."""

from __future__ import annotations

from functools import lru_cache, partial

from fla_cp.partition.packing import Frame, Packing
from fla_cp.partition.slots import Links, link_slots
from fla_cp.partition.token_ranges import Ranges
from fla_cp.partition.workload import Counts, Workload
from fla_cp.rule import CHUNK


def padded(offsets: tuple[int, ...], max_sequences: int | None) -> tuple[int, ...]:
    """The offsets, with empty sequences added at the end if there is a number of sequences that
    they are to have."""
    if max_sequences is None:
        return offsets
    return offsets + offsets[-1:] * (max_sequences + 1 - len(offsets))


def packing_on(
    offsets: tuple[int, ...],
    ranges: tuple[Ranges, ...],
    rank: int,
    max_sequences: int | None,
    chunk: int = CHUNK,
) -> Packing:
    """The packing of `rank`. max_sequences: of a context of fixed shape; the packing then has a
    frame. chunk: how many tokens a chunk has."""
    build, first = partial(Packing.build, chunk=chunk), rank == 0
    if max_sequences is None:
        loads = tuple(Workload.of(offsets, own, chunk) for own in ranges)
        return build(offsets, ranges[rank], counts_empty=first, loads=loads)
    frame = _fixed_frame(max_sequences, ranges, rank, chunk)
    return build(padded(offsets, max_sequences), ranges[rank], counts_empty=first, frame=frame)


def layout(
    offsets: tuple[int, ...], ranges: tuple[Ranges, ...], rank: int, max_sequences: int | None
) -> tuple[Packing, Links]:
    """The packing of `rank`, in chunks of 64 tokens, and the slot table."""
    links = link_slots(padded(offsets, max_sequences), ranges, fixed=max_sequences is not None)
    return packing_on(offsets, ranges, rank, max_sequences), links


@lru_cache(maxsize=256)
def _fixed_frame(max_sequences: int, ranges: tuple[Ranges, ...], rank: int, chunk: int) -> Frame:
    """The frame of a context with max_sequences, whose ranks have one range each."""
    frames = [
        Frame.of(max_sequences, hi - lo, chunk, enters=r > 0, leaves=r + 1 < len(ranges))
        for r, ((lo, hi),) in enumerate(ranges)
    ]
    return frames[rank]._replace(largest=Counts.largest(frame.counts for frame in frames))


def framed(
    packing: Packing, offsets: tuple[int, ...], ranges: tuple[Ranges, ...], rank: int
) -> Packing | None:
    """The packing filled up to rounded sizes, so that calls on similar packings share programs.

    packing: that of `packing_on`. None if it has a frame, for a single document, because calls on
    single documents share programs anyway, and if a rank has no ranges, or one without tokens.
    """
    if packing.frame is not None or len(offsets) == 2:
        return None
    if any(not own or any(lo == hi for lo, hi in own) for own in ranges):
        return None
    chunk = packing.chunk
    frame = Frame.around_ranks([load.counts for load in packing.loads], rank, chunk)
    return Packing.build(offsets, ranges[rank], frame=frame, chunk=chunk)
