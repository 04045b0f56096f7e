"""Workload: how much a rank holds, in counts. Every rank knows the workloads of all ranks, so that
all of them make the same choices.

A part is what a range holds of one sequence (packing.py). Even thousands of short documents are
parts of only a few kinds. A kind is the number of chunks, and whether the part has the sequence's
first token, and its last. Example: sequences of 100 and 60 tokens are divided after token 80. The
first rank has a part of 2 chunks that begins its sequence. The second rank has a part of 1 chunk
that ends its sequence, and one of 1 chunk that does both.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import pairwise
from typing import NamedTuple

from fla_cp.rule import CHUNK


class Part(NamedTuple):
    """The kind of a part or of a segment. begins, ends: whether it has the sequence's first token,
    and its last."""

    chunks: int
    begins: bool
    ends: bool


class Amount(NamedTuple):
    """How many segments there are, how many chunks they have together, and how many chunks the
    longest has."""

    segments: int
    chunks: int
    longest: int


class Counts(NamedTuple):
    """How many segments are in `Packing.everything`, `feeding`, `carried` and `middle`, and how
    many chunks there are."""

    everything: int
    feeding: int
    carried: int
    middle: int
    chunks: int

    @classmethod
    def largest(cls, counts: Iterable[Counts]) -> Counts:
        """The largest count in each field."""
        return cls(*map(max, zip(*counts, strict=True)))


def pieces(chunks: int, most: int) -> tuple[int, int]:
    """How a part of so many chunks is cut into segments of equal length, of at most `most` chunks:
    how many segments there are, and how many chunks each has. The last may have fewer."""
    length = _ceil(chunks, _ceil(chunks, most))
    return _ceil(chunks, length), length


def _ceil(a: int, b: int) -> int:
    return -(-a // b)


@dataclass(frozen=True)
class Workload:
    """How many parts of each kind a rank holds, or segments if the parts are cut. Parts without
    tokens do not count."""

    kinds: tuple[tuple[Part, int], ...]

    @classmethod
    def of(
        cls, cu_seqlens: Sequence[int], ranges: Iterable[tuple[int, int]], chunk: int = CHUNK
    ) -> Workload:
        """The workload of a rank with these global token ranges. chunk: tokens in a chunk."""
        kinds: Counter[Part] = Counter()
        for lo, hi in ranges:
            bounds = cu_seqlens[bisect_left(cu_seqlens, lo) : bisect_right(cu_seqlens, hi)]
            if not bounds:
                kinds[Part(_ceil(hi - lo, chunk), False, False)] += 1
                continue
            kinds[Part(_ceil(bounds[0] - lo, chunk), False, True)] += 1
            kinds[Part(_ceil(hi - bounds[-1], chunk), True, False)] += 1
            lengths = Counter([(b - a + chunk - 1) // chunk for a, b in pairwise(bounds)])
            for chunks, n in lengths.items():
                kinds[Part(chunks, True, True)] += n
        return cls._of(kinds)

    @classmethod
    def _of(cls, kinds: Counter[Part]) -> Workload:
        return cls(tuple((part, n) for part, n in kinds.items() if n and part.chunks))

    @classmethod
    def of_parts(cls, parts: Iterable[Part]) -> Workload:
        return cls._of(Counter(parts))

    def cut(self, most: int) -> Workload:
        """The workload of the packing after `Packing.cut(most)`."""
        kinds: Counter[Part] = Counter()
        for part, n in self.kinds:
            if part.chunks <= most:
                kinds[part] += n
                continue
            count, length = pieces(part.chunks, most)
            kinds[Part(length, part.begins, False)] += n
            kinds[Part(length, False, False)] += n * (count - 2)
            kinds[Part(part.chunks - (count - 1) * length, False, part.ends)] += n
        return self._of(kinds)

    def added(self, most: int) -> int:
        """How many segments `Packing.cut(most)` adds."""
        return sum(n * (pieces(part.chunks, most)[0] - 1) for part, n in self.kinds)

    def folds(self, most: int) -> int:
        """The largest number of segments that are folded one after another after
        `Packing.cut(most)`."""
        crossing_or_cut = (
            pieces(chunks, most)[0]
            for (chunks, begins, ends), _ in self.kinds
            if chunks > most or not (begins and ends)
        )
        return max(crossing_or_cut, default=0)

    @cached_property
    def amounts(self) -> dict[str, Amount]:
        """The amounts in `Packing.everything`, `feeding`, `carried` and `middle`, by name."""

        def of(entered: bool, left: bool) -> Amount:
            some = [
                (chunks, n)
                for (chunks, begins, ends), n in self.kinds
                if not ((entered and begins) or (left and ends))
            ]
            return Amount(
                segments=sum(n for _, n in some),
                chunks=sum(chunks * n for chunks, n in some),
                longest=max((chunks for chunks, _ in some), default=0),
            )

        return {
            "everything": of(False, False),
            "feeding": of(False, True),
            "carried": of(True, False),
            "middle": of(True, True),
        }

    @property
    def counts(self) -> Counts:
        segments = {name: amount.segments for name, amount in self.amounts.items()}
        return Counts(**segments, chunks=self.amounts["everything"].chunks)
