"""How many keys cross between ranks, and what each rank would hold: the figures that choose an
exchange. All ranks compute the same ones from the tables that all have."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

from fla_cp.partition.key_rows import count, pieces
from fla_cp.partition.token_ranges import Ranges


@dataclass(frozen=True)
class Crossings:
    """tokens: of each rank. pairs: how many tokens the second rank of a pair needs from the first;
    a pair that needs none is left out. gathered: how many keys each rank has once those of its
    pieces lie piece by piece (`KeyRows.lengths`)."""

    tokens: tuple[int, ...]
    pairs: dict[tuple[int, int], int]
    gathered: tuple[int, ...]

    @classmethod
    def build(cls, offsets: Sequence[int], token_ranges: Sequence[Ranges]) -> Crossings:
        own = [pieces(offsets, ranges) for ranges in token_ranges]
        ends: dict[int, dict[int, int]] = defaultdict(dict)  # of each rank's tokens in a sequence
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
        """How many tokens each rank sends; one that several ranks need counts for each of them."""
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
