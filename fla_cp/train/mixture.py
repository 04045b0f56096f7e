"""Packs of several sources, mixed in fixed shares.

`A:0.7,B:0.3` takes 7 of 10 packs from A and 3 from B. All packs have `seq_len` tokens, so these are
shares of tokens, not of documents. Weights are decimals, so there is a smallest number of packs, a
*round*, that has every share exactly; the sources of a round's packs are in random order. Each
source is read in the order that it has alone, epoch after epoch, so a small source with a large
weight begins its second epoch while others are in their first.

The order is a function of (seed, weights) and of the orders of the sources, and any step of it is
computed directly.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from fractions import Fraction
from itertools import pairwise
from math import gcd, lcm
from typing import cast

import numpy as np
from torch.utils.data import ConcatDataset, Dataset

from fla_cp.train.data import Batch, PackList, Packs, StepSampler

PLAIN, WITH_PATH = ("stdlib", "synthetic"), ("text", "memmap", "hf", "needle")
LONGEST_ROUND = 10_000

_BORDER = re.compile(rf",(?=(?:{'|'.join(WITH_PATH)}):|(?:{'|'.join(PLAIN)})(?::|,|$))")
_WEIGHT = re.compile(r":(\d+(?:\.\d*)?|\.\d+)$", re.ASCII)


def parse_mixture(spec: str) -> list[tuple[str, Fraction]]:
    """The sources that `--data` names, and their weights.

    A spec is one source or several, separated by commas. A comma separates only if a source follows
    it: `stdlib`, `synthetic`, or `text:`, `memmap:`, `hf:` or `needle:`; any other one is part of a
    path. In a mixture each source ends in `:WEIGHT`, a positive decimal, and what stands before the
    last colon may contain colons. A single source has no weight, so its path may end in any way.
    Raises ValueError if a weight is missing or not positive, or if the weights need a round of more
    than LONGEST_ROUND packs.
    """
    parts = _BORDER.split(spec)
    if len(parts) == 1:
        return [(spec, Fraction(1))]
    mixed = []
    for part in parts:
        match = _WEIGHT.search(part)
        if match is None or not Fraction(match[1]):
            raise ValueError(
                "each source of a mixture must end in :WEIGHT, a positive decimal, such as "
                f"text:A:0.7,hf:B:0.3, got {part!r}"
            )
        mixed.append((part[: match.start()], Fraction(match[1])))
    if sum(counts := round_counts([weight for _, weight in mixed])) > LONGEST_ROUND:
        raise ValueError(
            f"the weights of a mixture must have a round of at most {LONGEST_ROUND} packs, got "
            f"{sum(counts)} for {':'.join(map(str, counts))}; round the weights"
        )
    return mixed


def changed_sources(spec: str, change: Callable[[str], str]) -> str:
    """The spec with each source changed, and with its weights as they are written.

    spec: one that `parse_mixture` takes.
    """
    parts = _BORDER.split(spec)
    if len(parts) == 1:
        return change(spec)
    matches = [_WEIGHT.search(part) for part in parts]
    cuts = [len(part) if m is None else m.start() for part, m in zip(parts, matches, strict=True)]
    return ",".join(change(part[:at]) + part[at:] for part, at in zip(parts, cuts, strict=True))


def round_counts(weights: Sequence[Fraction]) -> list[int]:
    """The packs of each source in the shortest round that has every share exactly."""
    scale = lcm(*(weight.denominator for weight in weights))
    whole = [int(weight * scale) for weight in weights]
    return [count // gcd(*whole) for count in whole]


class MixedSampler(StepSampler):
    """Pack indices of a mixture: index * number of sources + source.

    orders: a sampler for each source; only its method `packs` is used. counts: how many packs of
    each source a round has.
    """

    def __init__(
        self,
        orders: Sequence[StepSampler],
        counts: Sequence[int],
        global_batch_size: int,
        seed: int,
        start_step: int = 0,
        first_pack: int | None = None,
    ) -> None:
        super().__init__(global_batch_size, seed, start_step, first_pack)
        self.orders, self.counts = orders, counts
        self._slots = np.repeat(np.arange(len(counts), dtype=np.int64), counts)

    def packs(self, start: int, stop: int) -> list[int]:
        size, parts = len(self._slots), len(self.counts)
        first, before = divmod(start, size)
        rounds = [self._round(i) for i in range(first, -(-stop // size))]
        sources = np.concatenate([np.empty(0, dtype=np.int64), *rounds])
        skipped, sources = np.split(sources[: stop - first * size], [before])
        indices = np.empty(len(sources), dtype=np.int64)
        for source, (order, count) in enumerate(zip(self.orders, self.counts, strict=True)):
            begin = first * count + int((skipped == source).sum())
            own = sources == source
            found = order.packs(begin, begin + int(own.sum()))
            indices[own] = np.array(found, dtype=np.int64) * parts + source
        return indices.tolist()

    def _round(self, number: int) -> np.ndarray:
        """The source of each pack of a round."""
        return np.random.default_rng([self.seed, number]).permutation(self._slots)


class MixedPacks(Packs):
    """The packs of several data sets, in the shares of `weights`.

    names: what to call the data sets in an error. Raises ValueError if their vocabularies differ.
    """

    def __init__(
        self, parts: Sequence[Packs], weights: Sequence[Fraction], names: Sequence[str]
    ) -> None:
        for (name, part), (other, following) in pairwise(zip(names, parts, strict=True)):
            if part.vocab_size != following.vocab_size:
                raise ValueError(
                    "all sources of a mixture must have one vocabulary, got "
                    f"{part.vocab_size} tokens for {name!r}, {following.vocab_size} for {other!r}"
                )
        self.parts, self.counts = list(parts), round_counts(weights)
        self.vocab_size = parts[0].vocab_size
        self.notes = tuple(note for part in parts for note in part.notes)
        self.extent = " + ".join(str(part.extent) for part in parts)

    def sampler(
        self, global_batch_size: int, seed: int, start_step: int = 0, first_pack: int | None = None
    ) -> StepSampler:
        orders = [part.sampler(global_batch_size, seed) for part in self.parts]
        return MixedSampler(orders, self.counts, global_batch_size, seed, start_step, first_pack)

    def head(self, count: int) -> PackList:
        """At most `count` packs in the shares of the weights, with at least one of each source.
        With more sources than `count`, there is one pack of each."""
        total = sum(self.counts)
        shares = [max(1, round(count * own / total)) for own in self.counts]
        while sum(shares) > max(count, len(shares)):  # shares were rounded up
            shares[shares.index(max(shares))] -= 1
        heads = [part.head(share) for part, share in zip(self.parts, shares, strict=True)]
        return ConcatDataset(cast(list[Dataset[Batch]], heads))

    def __getitem__(self, index: int) -> Batch:
        return self.parts[index % len(self.parts)][index // len(self.parts)]
