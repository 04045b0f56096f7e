"""Training data: token sources, packs of fixed length, and the order in which steps read them.

A *source* is one long stream of tokens that is cut into documents. A *pack* is `seq_len`
consecutive tokens of the stream: a long document continues in the next pack, and a pack can hold
many documents. `cu_seqlens` says where they begin. Labels are shifted here, inside each document
and before anything is sharded. A rank that owns the last token before a shard boundary therefore
also has its target.

All data are a function of (spec, seq_len, split, seed) and of the files. Every rank that builds the
same data set therefore reads the same tokens, which ranks check with `batch_hash`.

sources.py builds the data set that `--data` names; loader.py turns packs into the micro-batches of
a rank.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any, Protocol

import numpy as np
import torch
from einops import rearrange
from torch import Tensor
from torch.utils.data import Dataset, Sampler, Subset

Batch = dict[str, Tensor]

IGNORE = -100  # cross_entropy's own ignore_index


class TokenSource(Protocol):
    """A stream of `len(source)` tokens in `[0, vocab_size)`, cut into documents."""

    vocab_size: int

    def __len__(self) -> int: ...

    def read(self, start: int, stop: int) -> np.ndarray:
        """Tokens `[start, stop)` of the stream as int64."""

    def starts(self, start: int, stop: int) -> np.ndarray:
        """Positions p with `start < p <= stop` at which a document begins, ascending, distinct."""

    def counted(self, start: int, stop: int) -> np.ndarray | None:
        """Which of the tokens `[start, stop)` count as targets, bool; None if all of them do."""


class ArraySource:
    """A source in memory: tokens [N] of any integer type, document offsets int64 [D+1]."""

    def __init__(self, tokens: np.ndarray, offsets: np.ndarray, vocab_size: int):
        self.tokens = tokens
        self.offsets = offsets
        self.vocab_size = vocab_size

    def __getstate__(self) -> dict[str, Any]:
        """Moves the arrays into shared memory, which a worker process maps instead of copying."""
        if not hasattr(self, "_shared"):
            self._shared = [_shared_copy(array) for array in (self.tokens, self.offsets)]
            self._view()
        return {"_shared": self._shared, "vocab_size": self.vocab_size}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        self._view()

    def _view(self) -> None:
        self.tokens, self.offsets = (x.numpy().view(dtype) for x, dtype in self._shared)

    def __len__(self) -> int:
        return len(self.tokens)

    def read(self, start: int, stop: int) -> np.ndarray:
        return self.tokens[start:stop].astype(np.int64)

    def starts(self, start: int, stop: int) -> np.ndarray:
        first, last = np.searchsorted(self.offsets, [start, stop], side="right")
        return np.unique(self.offsets[first:last])

    def counted(self, start: int, stop: int) -> np.ndarray | None:
        return None


def _shared_copy(array: np.ndarray) -> tuple[Tensor, np.dtype]:
    """The bytes of an array [N] in shared memory, as uint8, and the array's dtype."""
    array = np.ascontiguousarray(array)
    shared = torch.empty(array.nbytes, dtype=torch.uint8, device="cpu")
    try:
        shared.share_memory_()
    except RuntimeError as error:
        raise RuntimeError(
            f"--data.workers: {array.nbytes} bytes of tokens must fit into shared memory "
            "(/dev/shm), where the workers read them; take --data.workers 0 or --data memmap:PATH"
        ) from error
    shared.numpy()[:] = array.view(np.uint8)
    return shared, array.dtype


class PackList(Protocol):
    """A list of packs."""

    def __len__(self) -> int: ...

    def __getitem__(self, index: int, /) -> Batch: ...


class Packs(Dataset[Batch]):
    """A data set of packs of `seq_len` tokens, and the order in which a training reads them.

    `packs[i]` is a dict of CPU tensors: tokens int64 [T]; labels int64 [T], the next token of the
    same document, or -100 where there is none in this split or where it does not count as a target;
    cu_seqlens int32 [n+1] from 0 to T, without empty documents. notes: lines for the user about how
    the data were read. extent: how much data there is, the same on all ranks.
    """

    vocab_size: int
    notes: tuple[str, ...]
    extent: int | str

    def sampler(
        self, global_batch_size: int, seed: int, start_step: int = 0, first_pack: int | None = None
    ) -> StepSampler:
        """The indices of the packs of each step, from `start_step` on. first_pack: the position of
        its first pack in the order; None: the position after `start_step` batches of this size."""
        raise NotImplementedError

    def head(self, count: int) -> PackList:
        """At most `count` packs, always the same ones, for an evaluation."""
        raise NotImplementedError


class PackedDataset(Packs):
    """Packs of `seq_len` tokens from `[first, stop)` of a source.

    Tokens at the end of the stream that do not fill a pack are left out.
    Raises ValueError if `seq_len` < 1 or the stream does not fill one pack.
    """

    def __init__(
        self,
        source: TokenSource,
        seq_len: int,
        *,
        first: int = 0,
        stop: int | None = None,
        name: str = "",
        notes: Sequence[str] = (),
    ):
        if seq_len < 1:
            raise ValueError(f"seq_len must be at least 1, got {seq_len}")
        self.source = source
        self.seq_len = seq_len
        self.first = first
        self.stop = len(source) if stop is None else stop
        self.vocab_size = source.vocab_size
        self.notes = tuple(notes)
        if self.stop - self.first < seq_len:
            raise ValueError(
                f"{name or 'the data set'} has {self.stop - self.first} tokens, fewer than one "
                f"pack of seq_len={seq_len}: give more data or a shorter seq_len"
            )

        self.extent = len(self)

    def __len__(self) -> int:
        return (self.stop - self.first) // self.seq_len

    def sampler(
        self, global_batch_size: int, seed: int, start_step: int = 0, first_pack: int | None = None
    ) -> StepSampler:
        return StepBatchSampler(len(self), global_batch_size, seed, start_step, first_pack)

    def head(self, count: int) -> PackList:
        return Subset(self, range(min(count, len(self))))

    def __getitem__(self, index: int) -> Batch:
        if not -len(self) <= index < len(self):
            raise IndexError(f"pack {index} of {len(self)}")
        T = self.seq_len
        start = self.first + (index % len(self)) * T
        block = self.source.read(start, min(start + T + 1, self.stop))
        begins = self.source.starts(start, start + T) - start
        tokens, labels = block[:T], np.full(T, IGNORE, dtype=np.int64)
        labels[: len(block) - 1] = block[1:]
        counted = self.source.counted(start + 1, start + len(block))
        if counted is not None:
            labels[: len(block) - 1][~counted] = IGNORE
        labels[begins - 1] = IGNORE
        cu_seqlens = np.concatenate([[0], begins[begins < T], [T]]).astype(np.int32)
        return {
            "tokens": torch.from_numpy(np.ascontiguousarray(tokens)),
            "labels": torch.from_numpy(labels),
            "cu_seqlens": torch.from_numpy(cu_seqlens),
        }


class StepSampler(Sampler[list[int]]):
    """An infinite sampler of batches: `global_batch_size` pack indices a step. step: the one that
    comes next.

    Each step takes the next `global_batch_size` positions of an endless order of packs; for
    `first_pack`, with which `start_step` begins, see `Packs.sampler`. `packs` computes this order
    directly at any position, so a checkpoint has to hold only the step and the position.
    Raises ValueError if `global_batch_size` is below 1, or seed or step below 0.
    """

    def __init__(
        self, global_batch_size: int, seed: int, start_step: int = 0, first_pack: int | None = None
    ):
        if global_batch_size < 1:
            raise ValueError(f"global_batch_size must be at least 1, got {global_batch_size}")
        if seed < 0 or start_step < 0:
            raise ValueError(f"seed and start_step must be >= 0, got {seed} and {start_step}")
        self.global_batch_size = global_batch_size
        self.seed = seed
        self.step = start_step
        self.shift = 0 if first_pack is None else first_pack - start_step * global_batch_size

    def packs(self, start: int, stop: int) -> list[int]:
        """Pack indices at the positions `[start, stop)` of the order."""
        raise NotImplementedError

    def __iter__(self) -> Iterator[list[int]]:
        while True:
            batch = self.batch(self.step)
            self.step += 1
            yield batch

    def batch(self, step: int) -> list[int]:
        """Pack indices of one step. They do not depend on earlier calls."""
        begin = step * self.global_batch_size + self.shift
        return self.packs(begin, begin + self.global_batch_size)

    def state_dict(self) -> dict[str, int]:
        return {"step": self.step}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.step = state["step"]


class StepBatchSampler(StepSampler):
    """All of `num_packs` packs in each epoch, in an order that differs from epoch to epoch.

    The orders depend only on (seed, num_packs). Steps continue across the ends of epochs, so a
    batch may be larger than an epoch.
    Raises ValueError as `StepSampler` does, and if `num_packs` is below 1.
    """

    def __init__(
        self,
        num_packs: int,
        global_batch_size: int,
        seed: int,
        start_step: int = 0,
        first_pack: int | None = None,
    ):
        if num_packs < 1:
            raise ValueError(f"num_packs must be at least 1, got {num_packs}")
        super().__init__(global_batch_size, seed, start_step, first_pack)
        self.num_packs = num_packs
        self._epoch = -1
        self._order = np.empty(0, dtype=np.int64)

    def packs(self, start: int, stop: int) -> list[int]:
        indices: list[int] = []
        while start < stop:
            epoch, offset = divmod(start, self.num_packs)
            taken = self._order_of(epoch)[offset : offset + stop - start]
            indices.extend(taken.tolist())
            start += len(taken)
        return indices

    def _order_of(self, epoch: int) -> np.ndarray:
        if epoch != self._epoch:
            self._order = np.random.default_rng([self.seed, epoch]).permutation(self.num_packs)
            self._epoch = epoch
        return self._order


def collate(packs: Sequence[Batch]) -> Batch:
    """n packs of T tokens folded into one row of N documents.

    Returns tokens and labels [1, n*T] and cu_seqlens int32 [N+1].
    """
    n, T = len(packs), len(packs[0]["tokens"])
    if n * T > np.iinfo(np.int32).max:
        raise ValueError(f"a batch must fit int32 offsets, got {n * T} tokens")
    ends = [pack["cu_seqlens"][1:] + i * T for i, pack in enumerate(packs)]
    return {
        "tokens": rearrange([pack["tokens"] for pack in packs], "n T -> 1 (n T)"),
        "labels": rearrange([pack["labels"] for pack in packs], "n T -> 1 (n T)"),
        "cu_seqlens": torch.cat([torch.zeros(1, dtype=torch.int32, device="cpu"), *ends]),
    }


def batch_hash(batch: Batch) -> int:
    """A hash in [0, 2^63) of a collated CPU batch. Ranks with the same batch get the same hash.

    Each value is mixed with its position before the sum, so that moving a token changes the hash.
    """
    tokens, labels = (rearrange(batch[key].numpy(), "1 T -> T") for key in ("tokens", "labels"))
    # A label is -100 or a token, so a label and a token fit into one 64-bit word.
    mixed = labels << 32
    mixed += tokens
    total = _positional_sum(mixed)
    total = (total * 31 + _positional_sum(batch["cu_seqlens"].numpy().astype(np.int64))) % 2**64
    return total >> 1


def _positional_sum(values: np.ndarray) -> int:
    """The sum of mixed (value, position) pairs mod 2^64. Overwrites `values`, which are int64."""
    words = values.view(np.uint64)
    words += np.arange(1, len(words) + 1, dtype=np.uint64) * np.uint64(0x9E3779B97F4A7C15)
    words ^= words >> np.uint64(29)
    words *= np.uint64(0xBF58476D1CE4E5B9)
    words ^= words >> np.uint64(32)
    words *= np.uint64(0x94D049BB133111EB)
    return int(words.sum(dtype=np.uint64))
