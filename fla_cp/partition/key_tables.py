"""All tables of one rank for attention under one sharding. Each is made when it is first read."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import Self

from fla_cp.partition.device_tables import Tabled
from fla_cp.partition.fixed_lengths import FixedLengths
from fla_cp.partition.head_order import HeadOrder
from fla_cp.partition.key_crossings import Crossings
from fla_cp.partition.key_rows import KeyRows
from fla_cp.partition.ring_steps import RingSteps
from fla_cp.partition.token_ranges import Ranges


@dataclass(frozen=True)
class KeyTables(Tabled):
    """The tables of `rank`.

    offsets: those of the batch's sequences. token_ranges: those of all ranks. lengths: given under
    a context of fixed shape. The offsets are then those of a single sequence, because the exchange
    must not depend on the packing.
    """

    offsets: tuple[int, ...]
    token_ranges: tuple[Ranges, ...]
    rank: int
    lengths: FixedLengths | None = None

    @classmethod
    def fixed(
        cls, offsets: tuple[int, ...], token_ranges: tuple[Ranges, ...], rank: int, most: int
    ) -> Self:
        """The tables for every packing of at most `most` sequences. offsets: those of the first
        packing."""
        (tokens,) = token_ranges[rank]
        lengths = FixedLengths(offsets, tokens, most)
        return cls((0, offsets[-1]), token_ranges, rank, lengths)

    @property
    def ranks(self) -> int:
        return len(self.token_ranges)

    @cached_property
    def rows(self) -> KeyRows:
        return KeyRows.build(self.offsets, self.token_ranges, self.rank, self.lengths)

    @cached_property
    def crossings(self) -> Crossings:
        return Crossings.build(self.offsets, self.token_ranges)

    @cached_property
    def ring(self) -> RingSteps:
        return RingSteps.build(self.offsets, self.token_ranges, self.rank, self.crossings)

    @cached_property
    def order(self) -> HeadOrder:
        return HeadOrder.build(self.offsets, self.token_ranges, self.rank)
