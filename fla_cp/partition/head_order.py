"""The order of a batch's tokens when every rank has all of them, for some heads."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise

from fla_cp.partition.key_rows import Lengths, count, joined
from fla_cp.partition.ring_steps import Rows
from fla_cp.partition.token_ranges import Ranges


@dataclass(frozen=True)
class HeadOrder:
    """How to sort the tokens of all ranks into the order of the batch, and back.

    tokens: how many each rank has. arrived: the rows of the batch's tokens, in order, in a tensor
    that has the ranks' tokens side by side. leaving: the reverse, the rows of the ranks' tokens in
    a tensor that has the batch in order. lengths: those of the batch's sequences.
    """

    rank: int
    tokens: tuple[int, ...]
    arrived: Rows
    leaving: Rows
    lengths: Lengths

    @classmethod
    def build(cls, offsets: Sequence[int], token_ranges: Sequence[Ranges], rank: int) -> HeadOrder:
        ranges = [one for own in token_ranges for one in own]
        bases = accumulate((hi - lo for lo, hi in ranges), initial=0)
        placed = sorted((lo, hi, at) for (lo, hi), at in zip(ranges, bases, strict=False))
        lengths = tuple(hi - lo for lo, hi in pairwise(offsets) if hi > lo)
        return cls(
            rank=rank,
            tokens=tuple(map(count, token_ranges)),
            arrived=Rows(joined((at, at + hi - lo) for lo, hi, at in placed)),
            leaving=Rows(joined(ranges)),
            lengths=Lengths(lengths, lengths),
        )
