"""Packings of whole sequences that share frames, made with little work of the host.

In training almost every batch has a new packing, so the host's work for one is paid in every step.
A call that replays a program needs the frame and the device tables of its packing, but not the list
of segments. That list is therefore made only if something asks for it.
"""

from __future__ import annotations

from functools import cached_property
from itertools import pairwise

from fla_cp.partition.packing import Frame, Packing, Segment
from fla_cp.rule import CHUNK


class WholeSequences(Packing):
    """The packing of all tokens on one rank alone, filled up to the rounded sizes of a frame.

    It has the segments, the frame and the tables of `Packing.build(offsets, frame=...)` with the
    frame of `Frame.around`.
    given: the offsets [N+1], which the caller has checked. counts: how many chunks each sequence
    has. chunks: how many all have. longest: how many the longest has.
    """

    given: tuple[int, ...]
    counts: list[int]
    chunks: int
    longest: int

    def __init__(self, offsets: tuple[int, ...], chunk: int = CHUNK) -> None:
        counts = [(b - a + chunk - 1) // chunk for a, b in pairwise(offsets)]
        chunks, parts = sum(counts), len(counts) - counts.count(0)
        # A frozen dataclass does not allow to set its attributes, and this is also faster.
        self.__dict__.update(
            tokens=offsets[-1],
            sequences=len(counts),
            ranges=1,
            frame=Frame.around(parts, chunks, chunk),
            loads=(),
            chunk=chunk,
            given=offsets,
            counts=counts,
            chunks=chunks,
            longest=max(counts),
            _cache={},  # as in `Tabled`, whose cached properties take a lock in Python 3.11
            _on_devices={},
        )

    @cached_property
    def _listed(self) -> Packing:
        return Packing.build(self.given, frame=self.frame, chunk=self.chunk)

    @property
    def segments(self) -> tuple[Segment, ...]:
        return self._listed.segments

    @property
    def empty(self) -> tuple[int, ...]:
        return self._listed.empty

    def spans(self) -> tuple[list[int], list[int], list[int]]:
        chunks = self.counts
        if 0 in chunks:  # sequences without tokens are no segments
            chunks = [n for n in chunks if n]
        spare = self.count - len(chunks)
        edges = [*dict.fromkeys(self.given), *[self.tokens] * spare]
        return edges[:-1], edges[1:], chunks + [0] * spare
