"""All tables of one rank for attention under one sharding, each made when it is first read."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

from fla_cp.partition.device_tables import Tabled
from fla_cp.partition.head_order import HeadOrder
from fla_cp.partition.key_crossings import Crossings
from fla_cp.partition.key_rows import KeyRows
from fla_cp.partition.ring_steps import RingSteps
from fla_cp.partition.token_ranges import Ranges


@dataclass(frozen=True)
class KeyTables(Tabled):
    """offsets: those of the batch's sequences. token_ranges: of all ranks."""

    offsets: tuple[int, ...]
    token_ranges: tuple[Ranges, ...]
    rank: int

    @property
    def ranks(self) -> int:
        return len(self.token_ranges)

    @cached_property
    def rows(self) -> KeyRows:
        return KeyRows.build(self.offsets, self.token_ranges, self.rank)

    @cached_property
    def crossings(self) -> Crossings:
        return Crossings.build(self.offsets, self.token_ranges)

    @cached_property
    def ring(self) -> RingSteps:
        return RingSteps.build(self.offsets, self.token_ranges, self.rank, self.crossings)

    @cached_property
    def order(self) -> HeadOrder:
        return HeadOrder.build(self.offsets, self.token_ranges, self.rank)
