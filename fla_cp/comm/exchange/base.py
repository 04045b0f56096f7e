"""What every exchange shares: the maps of slots, how they are packed to be sent, and their fold."""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple, Protocol

import torch
import torch.distributed as dist
from torch import Tensor

from fla_cp.comm.affine import Fold, FoldTable, Steps, fold
from fla_cp.comm.timing import exchange_wait
from fla_cp.partition.slots import Links

_Chain = list[tuple[int, int, int]]


class SlotMaps(NamedTuple):
    """Maps of this rank's slots: transition [J, HV, K, K] (or None) and offset [J, HV, K, V]. wire:
    what `pack` would make of them, if they are its slices."""

    transition: Tensor | None
    offset: Tensor
    wire: Tensor | None = None


class Pending(Protocol):
    """An exchange under way."""

    def wait(self) -> Tensor:
        """States [J, HV, K, V] entering this rank's slots, zero where nothing enters."""
        ...


class Exchange(Protocol):
    """A scheme. `start` returns at once; work that needs no state may run before `wait`. walk: the
    backend's, for schemes that fold gathered maps."""

    @property
    def group(self) -> dist.ProcessGroup | None: ...

    def start(self, maps: SlotMaps, links: Links, fold: Fold = fold) -> Pending: ...


class Waiting:
    """A `Pending` whose remaining work is a function, timed as exposed exchange."""

    def __init__(self, finish: Callable[[], Tensor], device: torch.device):
        self._finish, self._device = finish, device

    def wait(self) -> Tensor:
        with exchange_wait(self._device):
            return self._finish()


@functools.cache
def entering_table(rank: int, rows: int) -> Steps:
    """The walk through all maps that gives the states entering the `rows` ranges of `rank`: all of
    them, zero where nothing enters. A map's row is its rank's times slots_per_rank plus its own."""

    def steps(links: Links) -> FoldTable:
        found: list[_Chain] = []
        chain: _Chain = []  # since the last slot that nothing passes through
        used, zero = 0, set(range(rows))  # steps up to the last slot here; ranges not entered
        for s in range(links.count):
            if links.owner[s] == rank and links.continues[s]:
                chain[-1] = (*chain[-1][:2], links.row[s])
                used = len(chain)
                zero.discard(links.row[s])
            if not links.through[s]:
                found, chain, used = found + [chain[:used]] * (used > 0), [], 0
            if links.feeds(s):
                row = links.owner[s] * links.slots_per_rank + links.row[s]
                chain.append((row if links.through[s] else -1, row, -1))
        found += [chain[:used]] * (used > 0)
        found += [[(-1, -1, row)] for row in sorted(zero)]
        if links.fixed:  # as many steps as slots before this one, one at least: zeros first
            least = max(1, links.owner.index(rank))
            found = [[(-1, -1, -1)] * (least - len(found[0])) + found[0]]
        return FoldTable.of([(-1, -1, chain) for chain in found])

    return steps


def fold_slots(maps: SlotMaps, links: Links, rank: int, like: Tensor, fold: Fold) -> Tensor:
    """States entering the ranges of `rank`, like [J, HV, K, V], from the maps of all."""
    out = torch.empty_like(like, memory_format=torch.contiguous_format)
    steps = entering_table(rank, len(like))
    return fold(links, steps, maps.transition, maps.offset, None, out, transposed=False)


@dataclass(frozen=True)
class Local:
    """One rank holds all slots; nothing is sent."""

    group: dist.ProcessGroup | None = None

    def start(self, maps: SlotMaps, links: Links, fold: Fold = fold) -> Pending:
        def finish() -> Tensor:
            return fold_slots(maps, links, 0, maps.offset, fold)

        return Waiting(finish, maps.offset.device)


def fold_wires(wires: Tensor, links: Links, rank: int, like: Tensor, fold: Fold = fold) -> Tensor:
    """States entering the slots of `rank`, like [J, HV, K, V], from the wires of all ranks (`pack`)
    [R, slots_per_rank, ..]."""
    maps = unpacked(wires.flatten(0, 1), links, like.shape[-1])
    return fold_slots(maps, links, rank, like, fold)


def unpacked(wire: Tensor, links: Links, V: int) -> SlotMaps:
    """The maps of some rows of a wire."""
    return SlotMaps(wire[..., V:] if links.any_through else None, wire[..., :V])


def wire_shape(links: Links, HV: int, K: int, V: int) -> tuple[int, int, int, int]:
    """What `pack` returns is of this shape."""
    return links.slots_per_rank, HV, K, V + K * links.any_through


def pack(maps: SlotMaps, links: Links) -> Tensor:
    """This rank's wire [slots_per_rank, HV, K, V+K], +K only where any transition is needed."""
    if maps.wire is not None:
        return maps.wire
    J, HV, K, V = maps.offset.shape
    sent = (maps.offset, maps.transition) if links.any_through else (maps.offset,)
    parts = [x for x in sent if x is not None]
    if links.slots_per_rank == J and len(parts) == len(sent):
        return torch.cat(parts, -1)
    wire = maps.offset.new_zeros(wire_shape(links, HV, K, V))
    wire[:J, ..., :V] = maps.offset
    if links.any_through and maps.transition is not None:
        wire[:J, ..., V:] = maps.transition
    return wire
