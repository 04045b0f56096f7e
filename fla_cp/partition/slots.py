"""Slots: the token ranges of all ranks, in the order of their tokens, and how they are linked."""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from dataclasses import dataclass
from functools import cached_property

from fla_cp.partition.device_tables import Tabled
from fla_cp.partition.token_ranges import Ranges


@dataclass(frozen=True)
class Links(Tabled):
    """The slot table: which rank owns each slot, and which slots are linked. It is equal on all
    ranks.

    owner, row: the rank of each slot, and the slot's index among that rank's ranges. continues:
    whether a sequence goes on from slot s-1 into slot s. through: whether one sequence enters,
    fills and leaves slot s. slots_per_rank: the largest number of ranges that a rank owns. fixed:
    each rank has one slot, and what is exchanged must not depend on the packing.
    """

    owner: tuple[int, ...]
    row: tuple[int, ...]
    continues: tuple[bool, ...]
    through: tuple[bool, ...]
    slots_per_rank: int
    fixed: bool = False

    @property
    def count(self) -> int:
        return len(self.owner)

    @cached_property
    def any(self) -> bool:
        """Whether any sequence crosses from one slot to the next."""
        return any(self.continues) or (self.fixed and self.count > 1)

    @cached_property
    def any_through(self) -> bool:
        """Whether any slot needs a transition."""
        return any(self.through) or (self.fixed and self.count > 2)

    def feeds(self, s: int) -> bool:
        """Whether slot s hands its state to slot s+1."""
        return s + 1 < self.count and self.continues[s + 1]

    def slots_of(self, rank: int) -> list[int]:
        return [s for s, r in enumerate(self.owner) if r == rank]

    def mirrored(self) -> Links:
        """The table in reverse order, for gradients, which go from later slots to earlier ones."""
        return self._mirror

    @cached_property
    def _mirror(self) -> Links:
        return Links(
            owner=self.owner[::-1],
            row=self.row[::-1],
            continues=(False, *self.continues[:0:-1]),
            through=self.through[::-1],
            slots_per_rank=self.slots_per_rank,
            fixed=self.fixed,
        )


def link_slots(
    cu_seqlens: tuple[int, ...], token_ranges: tuple[Ranges, ...], *, fixed: bool = False
) -> Links:
    """The slot table of these ranges. Slots are the ranges with tokens, in token order."""
    slots = sorted(
        (lo, hi, r, row)
        for r, ranges in enumerate(token_ranges)
        for row, (lo, hi) in enumerate(ranges)
        if hi > lo
    )
    bounds = set(cu_seqlens)
    inner = sorted(bounds)
    continues = [lo not in bounds for lo, *_ in slots]
    feeds = [hi not in bounds for _, hi, *_ in slots]
    uncut = [not _any_between(inner, lo, hi) for lo, hi, *_ in slots]
    return Links(
        owner=tuple(r for *_, r, _ in slots),
        row=tuple(row for *_, row in slots),
        continues=tuple(continues),
        through=tuple(a and b and c for a, b, c in zip(continues, feeds, uncut, strict=True)),
        slots_per_rank=max(len(ranges) for ranges in token_ranges),
        fixed=fixed,
    )


def _any_between(sorted_values: list[int], lo: int, hi: int) -> bool:
    return bisect_right(sorted_values, lo) < bisect_left(sorted_values, hi)
