"""How many keys cross between ranks, and how many each rank would hold. These figures decide which
exchange is used. All ranks compute the same figures, from tables that all of them have."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

from fla_cp.partition.key_rows import count, pieces
from fla_cp.partition.token_ranges import Ranges


@dataclass(frozen=True)
class Crossings:
    """The figures of all ranks.

    tokens: how many each rank has. pairs: how many tokens the second rank of a pair needs from the
    first; a pair that needs none is left out. gathered: how many keys each rank has when the keys
    of its pieces lie piece by piece (`KeyRows.lengths`).
    """

    tokens: tuple[int, ...]
    pairs: dict[tuple[int, int], int]
    gathered: tuple[int, ...]

    @classmethod
    def build(cls, offsets: Sequence[int], token_ranges: Sequence[Ranges]) -> Crossings:
        own = [pieces(offsets, ranges) for ranges in token_ranges]
        ends: dict[int, dict[int, int]] = defaultdict(dict)  # by sequence and rank: its last token
        for rank, found in enumerate(own):
            for p in found:
                ends[p.begin][rank] = max(p.hi, ends[p.begin].get(rank, 0))
        pairs: dict[tuple[int, int], int] = defaultdict(int)
        for rank, found in enumerate(own):
            for p in found:
                for other, end in ends[p.begin].items():
                    if other != rank and end > p.lo:
                        pairs[rank, other] += min(p.hi, end) - p.lo
        return cls(
            tokens=tuple(map(count, token_ranges)),
            pairs=dict(pairs),
            gathered=tuple(sum(p.hi - p.begin for p in found) for found in own),
        )

    @cached_property
    def sent(self) -> tuple[int, ...]:
        """How many tokens each rank sends. A token that several ranks need counts for each of
        them."""
        return self._totals(0)

    @cached_property
    def received(self) -> tuple[int, ...]:
        """How many tokens each rank receives."""
        return self._totals(1)

    def _totals(self, end: int) -> tuple[int, ...]:
        totals = [0] * len(self.tokens)
        for pair, n in self.pairs.items():
            totals[pair[end]] += n
        return tuple(totals)
