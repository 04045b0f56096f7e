"""The halo of a causal convolution: the last W-1 tokens before each of a rank's ranges.

A range may be shorter than the convolution, so a halo can come from several earlier ranks. Which
rank sends which token is computed on the host, from the global table. One all-to-all sends the
tokens, and another returns their gradients. In each direction a rank receives at most
(W-1)*D*itemsize bytes for each of its ranges.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import NamedTuple, Self

import torch
import torch.distributed as dist
from torch import Tensor

from fla_cp.comm.overlap import exchanged, run_overlap
from fla_cp.partition.device_tables import Tabled, to_device

WHAT = "a convolution's halo"
Ranges = Sequence[Sequence[tuple[int, int]]]


class Gathered(NamedTuple):
    """The same traffic as one all-gather, for compiled graphs: its shapes are the same for every
    packing.

    rows: the local tokens that this rank sends, each once, filled up with token 0. padded: how many
    rows each rank sends, which is enough for every packing. take: for each row of the halo, its
    index among the rows of all ranks, or R * padded if no token belongs there.
    """

    rows: tuple[int, ...]
    padded: int
    take: tuple[int, ...]


class _Message(NamedTuple):
    """One token that a rank sends. token: its local index on the sender. place: its row in the
    receiver's halo."""

    sender: int
    token: int
    receiver: int
    place: int


@dataclass(frozen=True)
class Halo(Tabled):
    """The tokens that one rank sends and receives.

    width: W-1, the number of tokens before each range. ranges: how many ranges this rank owns.
    send: the local token of each row that is sent, ordered by receiving rank. send_counts,
    receive_counts: how many rows go to each rank, and come from it. place: where each received row
    belongs in the halo [ranges * width]. needed: whether any rank receives anything; otherwise all
    ranks skip the collective. gathered: the same traffic as an all-gather.
    """

    width: int
    ranges: int
    send: tuple[int, ...]
    send_counts: tuple[int, ...]
    receive_counts: tuple[int, ...]
    place: tuple[int, ...]
    needed: bool
    gathered: Gathered

    @classmethod
    def build(cls, cu_seqlens: Sequence[int], token_ranges: Ranges, rank: int, width: int) -> Self:
        messages = _messages(cu_seqlens, token_ranges, width)
        R, ranges = len(token_ranges), len(token_ranges[rank])
        out = sorted((m for m in messages if m.sender == rank), key=lambda m: m[2:])
        into = sorted((m for m in messages if m.receiver == rank), key=lambda m: (m[0], m[3]))
        sent = [sorted({m.token for m in messages if m.sender == r}) for r in range(R)]
        # Other ranks read at most the last `width` tokens of each range.
        padded = width * max(map(len, token_ranges))
        empty = all(lo == hi for lo, hi in token_ranges[rank])
        fill = [] if empty else [0] * (padded - len(sent[rank]))
        take = [R * padded] * (ranges * width)
        for m in into:
            take[m.place] = m.sender * padded + sent[m.sender].index(m.token)
        return cls(
            width=width,
            ranges=ranges,
            send=tuple(m.token for m in out),
            send_counts=tuple(sum(m.receiver == r for m in out) for r in range(R)),
            receive_counts=tuple(sum(m.sender == r for m in into) for r in range(R)),
            place=tuple(m.place for m in into),
            needed=bool(messages),
            gathered=Gathered((*sent[rank], *fill), padded, tuple(take)),
        )

    def gather(self, x: Tensor, group: dist.ProcessGroup | None) -> Tensor:
        """The tokens before each range, [ranges, width, D], from x [T, D] of all ranks.

        Row width-1 is the token just before the range. Tokens of other sequences are not fetched,
        because the convolution does not read them; their rows are zero.
        """
        halo = x.new_zeros(self.ranges * self.width, x.shape[-1])
        if self.needed:
            rows = x[self._index(self.send, x.device)]
            got = exchanged(rows, self.send_counts, self.receive_counts, group, WHAT)
            halo[self._index(self.place, x.device)] = got
        elif group is not None:
            run_overlap(lambda: None)
        return halo.view(self.ranges, self.width, x.shape[-1])

    def scatter_add(self, dx: Tensor, dhalo: Tensor, group: dist.ProcessGroup | None) -> None:
        """Sends the gradients of the halo [ranges*width, D] to the ranks that own the tokens, where
        they are added to dx [T, D]. Sums are formed in dhalo's dtype."""
        if self.needed:
            rows = dhalo[self._index(self.place, dx.device)]
            got = exchanged(rows, self.receive_counts, self.send_counts, group, WHAT)
            owned = tuple(sorted(set(self.send)))
            row = {t: i for i, t in enumerate(owned)}
            into = self._index(owned, dx.device)
            sums = dx[into].to(got.dtype)
            sums.index_add_(0, self._index(tuple(row[t] for t in self.send), dx.device), got)
            dx[into] = sums.to(dx.dtype)

    def gather_tables(self, device: torch.device) -> tuple[Tensor, Tensor]:
        """rows and take of `Gathered`, int64."""
        return self._index(self.gathered.rows, device), self._index(self.gathered.take, device)

    def _index(self, rows: tuple[int, ...], device: torch.device) -> Tensor:
        return self.cached((rows, device), lambda: to_device(rows, torch.int64, device))


def _messages(cu_seqlens: Sequence[int], token_ranges: Ranges, width: int) -> list[_Message]:
    """The messages between all ranks."""
    owned = []  # of each range: start, rank, index among the rank's ranges, local index of start
    for r, ranges in enumerate(token_ranges):
        bases = accumulate((hi - lo for lo, hi in ranges), initial=0)
        for row, ((lo, hi), base) in enumerate(zip(ranges, bases, strict=False)):
            if hi > lo:
                owned.append((lo, r, row, base))
    owned.sort()
    messages = []
    first = 0  # the sequence of the range's first token
    for i, (lo, r, row, _) in enumerate(owned):
        while cu_seqlens[first + 1] <= lo:
            first += 1
        j = i
        for t in range(lo - 1, max(cu_seqlens[first], lo - width) - 1, -1):
            while owned[j][0] > t:
                j -= 1
            start, sender, _, base = owned[j]
            messages.append(_Message(sender, base + t - start, r, (row + 1) * width - (lo - t)))
    return messages
