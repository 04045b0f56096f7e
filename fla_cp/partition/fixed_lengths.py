"""Lengths of queries and keys under a context of fixed shape: one object serves every packing.

A rank with tokens [lo, hi) of the batch always gets the keys of the tokens [0, hi), as if the batch
were one document. The keys before the document that has token lo count as a sequence of their own,
which has no queries. Sequences without tokens fill the list. Example: there are documents of 3, 4
and 5 tokens, the rank has [5, 12), and a packing has at most 4 documents. The lengths of queries
are (0, 2, 5, 0, 0), and those of keys are (3, 4, 5, 0, 0).
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from fla_cp.partition.device_tables import Columns
from fla_cp.partition.key_rows import Lengths, offsets_of, pieces, positions_of


class FixedLengths(Lengths):
    """The `Lengths` of the packing that was filled in last. Tensors on devices keep their shapes
    and addresses.

    offsets: those of the packing's sequences. tokens: this rank's [lo, hi). most: the largest
    number of sequences in a packing. room: how many sequences the list has.
    """

    changes = True

    def __init__(self, offsets: Sequence[int], tokens: tuple[int, int], most: int) -> None:
        (lo, hi) = tokens
        self._set("tokens", tokens)
        self._set("room", 1 + min(most, hi - lo))
        self._set("causal", True)
        self._put(offsets)

    tokens: tuple[int, int]
    room: int

    def fill(self, offsets: Sequence[int]) -> None:
        """Overwrites the lengths with those of another packing, also on devices. The host does not
        wait."""
        self._put(offsets)
        self.take_tables(self)

    def _put(self, offsets: Sequence[int]) -> None:
        own = pieces(offsets, [self.tokens])
        none = [0] * (self.room - 1 - len(own))
        keys = [own[0].begin, *(p.hi - p.begin for p in own), *none]
        self._set("queries", (0, *(p.hi - p.lo for p in own), *none))
        self._set("keys", tuple(keys))

    def _set(self, name: str, value: object) -> None:
        object.__setattr__(self, name, value)

    __eq__ = object.__eq__
    __hash__ = object.__hash__

    @property
    def longest(self) -> tuple[int, int]:
        """The largest length of queries and of keys in any packing."""
        lo, hi = self.tokens
        return hi - lo, hi

    def offsets(self, device: torch.device) -> tuple[Tensor, Tensor]:
        queries, keys = self.table(_offsets, torch.int32, device)
        return queries, keys

    def positions(self, device: torch.device) -> Tensor:
        (found,) = self.table(_positions, torch.int64, device)
        return found

    def unread(self, device: torch.device) -> Tensor:
        (found,) = self.table(_unread, torch.bool, device)
        return found


def _offsets(lengths: FixedLengths) -> Columns:
    return offsets_of(lengths.queries), offsets_of(lengths.keys)


def _positions(lengths: FixedLengths) -> Columns:
    return (positions_of(lengths),)


def _unread(lengths: FixedLengths) -> Columns:
    _, hi = lengths.tokens
    return (torch.arange(hi, device="cpu") < lengths.keys[0],)
