"""Packs of documents that are tokenised while the training runs.

The documents are in shards (shards.py). A process that reads packs makes a shard when it first
needs it; with `--workers`, these are the processes that read ahead. While a shard is read, a thread
makes the next one.

How many packs a shard has is known only after it was tokenised. The order of packs therefore goes
by shards: each epoch takes the shards in a random order, and the packs of a shard in a random
order. The order is a function of (seed, seq_len) and of the documents. Here the index of a pack is
its position in this order, so a checkpoint has to hold only how many packs were read. A process
that starts in the middle counts the packs of the earlier shards, and tokenises those again that
have been deleted. Tokens at the end of a shard that do not fill a pack are left out.
"""

from __future__ import annotations

import threading
from bisect import bisect_right
from collections import OrderedDict
from contextlib import suppress
from typing import Any

import numpy as np
from torch.utils.data import Subset

from fla_cp.train.data import Batch, PackedDataset, PackList, Packs, StepSampler
from fla_cp.train.shards import Shards
from fla_cp.train.waiting_bars import shown

SHARD_BYTES = 1 << 22
"""About how many bytes of text a shard has, if packs are short."""

PACKS_A_SHARD = 32
"""Packs that a shard should have at least, so that few tokens are left out at its end."""

BYTES_A_TOKEN = 4
"""An estimate, from which the size of shards is chosen."""

OPEN_SHARDS = 8
"""The most shards that a process keeps open."""


def shard_bytes(seq_len: int) -> int:
    """The text of a shard for packs of `seq_len` tokens, in bytes."""
    return max(SHARD_BYTES, PACKS_A_SHARD * BYTES_A_TOKEN * seq_len)


class InOrder(StepSampler):
    """Steps take the packs in the order of their indices."""

    def packs(self, start: int, stop: int) -> list[int]:
        return list(range(start, stop))


class TokenisedPacks(Packs):
    """Packs of the documents of `shards`, without end: index i is the i-th pack of the order.

    ahead: make the next shard while one is read. name: what to call the data in an error.
    Raises ValueError if `seq_len` < 1 or the documents do not fill one pack.
    """

    def __init__(
        self,
        shards: Shards,
        seq_len: int,
        seed: int,
        *,
        ahead: bool = True,
        name: str = "the data set",
        notes: tuple[str, ...] = (),
    ) -> None:
        if seq_len < 1:
            raise ValueError(f"seq_len must be at least 1, got {seq_len}")
        self.shards, self.seq_len, self.seed = shards, seq_len, seed
        self.ahead, self.name, self.notes = ahead, name, notes
        self.vocab_size = shards.tokenizer.vocab_size
        self.extent = f"{len(shards.documents)} documents of {shards.documents.size} bytes"
        self._forget()
        self._place(0)

    def _forget(self) -> None:
        self._counts: dict[int, int] = {}  # packs of each shard that has been needed
        self._epoch = -1
        self._order: list[int] = []  # shards of the epoch
        self._ends: list[int] = []  # packs of the epoch up to the end of each of its first shards
        self._opened: OrderedDict[int, PackedDataset] = OrderedDict()
        self._thread: threading.Thread | None = None

    def __getstate__(self) -> dict[str, Any]:
        kept = ("shards", "seq_len", "seed", "ahead", "name", "notes", "vocab_size", "extent")
        return {name: self.__dict__[name] for name in kept}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        self._forget()

    def sampler(
        self, global_batch_size: int, seed: int, start_step: int = 0, first_pack: int | None = None
    ) -> StepSampler:
        return InOrder(global_batch_size, seed, start_step, first_pack)

    def head(self, count: int) -> PackList:
        if self._find(0, count - 1) is None:
            count = self._ends[-1]
        return Subset(self, range(count))

    def __getitem__(self, index: int) -> Batch:
        epoch, shard, place = self._place(index)
        order = np.random.default_rng([self.seed, epoch, shard]).permutation(self._counts[shard])
        if self.ahead:
            self._make_next(shard)
        return self._packs(shard)[int(order[place])]

    def _place(self, index: int) -> tuple[int, int, int]:
        """Epoch and shard of a pack, and its place among the packs of the shard in that epoch."""
        epoch, offset = 0, index
        if len(self._counts) == len(self.shards):
            epoch, offset = divmod(index, self._total())
        found = self._find(epoch, offset)
        if found is None:  # now all shards have been counted
            epoch, offset = divmod(index, self._total())
            found = self._find(epoch, offset)
        assert found is not None
        return epoch, *found

    def _total(self) -> int:
        """Packs of an epoch, once all shards have been counted."""
        total = sum(self._counts.values())
        if not total:
            tokens = sum(self.shards.tokens(shard) for shard in range(len(self.shards)))
            raise ValueError(
                f"{self.name} has {tokens} tokens, fewer than one pack of seq_len={self.seq_len}: "
                "give more data or a shorter seq_len"
            )
        return total

    def _find(self, epoch: int, offset: int) -> tuple[int, int] | None:
        """The shard that holds a pack of an epoch, and the place there; None if it has fewer."""
        if epoch != self._epoch:
            order = np.random.default_rng([self.seed, epoch]).permutation(len(self.shards))
            self._epoch, self._order, self._ends = epoch, order.tolist(), []
        if not self._ends or self._ends[-1] <= offset:
            with shown("tokenising", unit="shards") as update:
                while not self._ends or self._ends[-1] <= offset:
                    if len(self._ends) == len(self._order):
                        return None
                    self._count(self._order[len(self._ends)])
                    update()
        at = bisect_right(self._ends, offset)
        return self._order[at], offset - (self._ends[at - 1] if at else 0)

    def _count(self, shard: int) -> None:
        """Takes up the next shard of the epoch; it is tokenised if need be."""
        if shard not in self._counts:
            self._counts[shard] = self.shards.tokens(shard) // self.seq_len
        self._ends.append((self._ends[-1] if self._ends else 0) + self._counts[shard])

    def _packs(self, shard: int) -> PackedDataset:
        """The packs of a shard; the last few shards stay open."""
        if shard in self._opened:
            self._opened.move_to_end(shard)
        else:
            self._opened[shard] = PackedDataset(self.shards.source(shard), self.seq_len)
            if len(self._opened) > OPEN_SHARDS:
                self._opened.popitem(last=False)
        return self._opened[shard]

    def _make_next(self, shard: int) -> None:
        """Starts to make the shard after this one, unless it exists or another is being made."""
        at = self._order.index(shard) + 1
        if self._thread is not None and self._thread.is_alive():
            return
        if at < len(self._order) and not self.shards.exists(self._order[at]):
            self._thread = threading.Thread(target=self._make, args=(self._order[at],), daemon=True)
            self._thread.start()

    def _make(self, shard: int) -> None:
        with suppress(ValueError, OSError):  # who reads the shard tries again, and raises it
            self.shards.make(shard)
