"""The attributes of a sharding under the names that FLA's FLACPContext has for them."""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from typing import NamedTuple, Self

import torch.distributed as dist
from torch import Tensor

from fla_cp.partition.token_ranges import Ranges


class Neighbours(NamedTuple):
    """How far the first and the last sequence of a rank's one range reach beyond it.

    tokens_before: tokens of the first sequence on earlier ranks. ranks_before: the earlier ranks
    that hold them. ranks_after: the later ranks that hold tokens of the last sequence.
    """

    tokens_before: int
    ranks_before: int
    ranks_after: int

    @staticmethod
    def of(offsets: tuple[int, ...], token_ranges: tuple[Ranges, ...], rank: int) -> Neighbours:
        """The neighbours of a rank that has one range of at least one token, in a contiguous
        division."""
        ((lo, hi),) = token_ranges[rank]
        start = offsets[bisect_right(offsets, lo) - 1]
        stop = offsets[bisect_left(offsets, hi)]
        others = [(r, a, b) for r, own in enumerate(token_ranges) for a, b in own if a < b]
        before = sum(r < rank and b > start for r, _, b in others)
        return Neighbours(lo - start, before, sum(r > rank and a < stop for r, a, _ in others))


class FLANames:
    """Attributes of FLA's FLACPContext, except those that have the same name in ours.

    FLA's numbers about neighbours assume that each rank has one range. They are None if a rank has
    more ranges, as with zig-zag, or if this rank holds no token.
    """

    group: dist.ProcessGroup | None
    rank: int
    cu_seqlens: Tensor
    global_cu_seqlens: tuple[int, ...]
    token_ranges: tuple[Ranges, ...]

    @property
    def num_seqs(self) -> int:
        """How many pieces of sequences this rank has."""
        return len(self.cu_seqlens) - 1

    @property
    def is_cp_enabled(self) -> bool:
        return self.group is not None

    @property
    def pre_num_conv_tokens(self) -> int | None:
        """Tokens of the first sequence of this rank that earlier ranks hold."""
        found = self._neighbours()
        return None if found is None else found.tokens_before

    @property
    def pre_num_ranks(self) -> int | None:
        """Earlier ranks that hold tokens of the first sequence of this rank."""
        found = self._neighbours()
        return None if found is None else found.ranks_before

    @property
    def post_num_ranks(self) -> int | None:
        """Later ranks that hold tokens of the last sequence of this rank."""
        found = self._neighbours()
        return None if found is None else found.ranks_after

    @property
    def is_first_rank(self) -> bool | None:
        """Whether the first sequence of this rank begins on it."""
        found = self._neighbours()
        return None if found is None else found.ranks_before == 0

    @property
    def is_last_rank(self) -> bool | None:
        """Whether the last sequence of this rank ends on it."""
        found = self._neighbours()
        return None if found is None else found.ranks_after == 0

    def copy_for_backward(self) -> Self:
        """The context itself, because no call changes it."""
        return self

    def _neighbours(self) -> Neighbours | None:
        held = [edge for own in self.token_ranges for edge in own if edge[0] < edge[1]]
        mine = self.token_ranges[self.rank]
        if held != sorted(held) or any(len(own) > 1 for own in self.token_ranges):
            return None
        if not mine or mine[0][0] == mine[0][1]:
            return None
        return Neighbours.of(self.global_cu_seqlens, self.token_ranges, self.rank)
