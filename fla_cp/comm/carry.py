"""The one place that joins segments on a card and ranks: affine maps and their fold.

A run of tokens maps the state that enters it to the state that leaves it,

    S_out = transition @ S_in + offset

(design.md, "Affine maps"). `carry` turns the maps of this card's segments into the state that
enters each of them, with one exchange between ranks; `carry(reverse=True)` is its adjoint.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from itertools import pairwise
from typing import NamedTuple

import torch
from torch import Tensor

from fla_cp.comm import Exchange, Links, SlotMaps
from fla_cp.comm.affine import Fold, FoldTable, Steps, fold
from fla_cp.comm.exchange.base import unpacked, wire_shape
from fla_cp.partition.packing import Packing


class AffineMap(NamedTuple):
    """transition [M, HV, K, K] of `Packing.middle` and offset of the segments that hand a state
    on, fp32 (fp64), in token order: `Packing.feeding` [F, HV, K, V] forward, `Packing.carried`
    in reverse. A segment at the end of its sequence's run needs no transition: its offset
    already contains the state it starts from. None where there is no such segment."""

    transition: Tensor | None
    offset: Tensor | None


class States(NamedTuple):
    """States of some of a card's segments: which, and value [E, HV, K, V]."""

    segments: tuple[int, ...]
    value: Tensor


def join(*states: States | None) -> States | None:
    """The given states as one list; None if there are none."""
    given = [s for s in states if s is not None and s.segments]
    if len(given) < 2:
        return given[0] if given else None
    return States(sum((s.segments for s in given), ()), torch.cat([s.value for s in given]))


def carry(
    maps: AffineMap,
    packing: Packing,
    links: Links,
    exchange: Exchange,
    shape: tuple[int, int, int],
    like: Tensor,
    *,
    reverse: bool = False,
    fold: Fold = fold,
) -> Callable[[], States]:
    """Starts the exchange; the returned function waits and gives the state entering each segment
    of `packing.carried` that is not seeded (reverse: dS leaving each of `packing.feeding`).

    maps: see `AffineMap`; in reverse the transition is still the forward one. links: the slot
    table, of the forward direction. shape: (HV, K, V). like: gives dtype and device. walk: the
    backend's.
    Collectives: one exchange if any sequence of the global batch crosses a slot, else none.
    Source: docs/design.md "Affine maps".
    """
    if reverse:
        links = links.mirrored()
    local = _Fold(maps, packing, shape, like, reverse, fold)
    pending = None
    if links.any:
        pending = exchange.start(local.outgoing(links), links, fold)

    def finish() -> States:
        entering = None if pending is None else pending.wait()
        return local.entering(entering)

    return finish


def outgoing(
    maps: AffineMap,
    packing: Packing,
    shape: tuple[int, int, int],
    like: Tensor,
    links: Links,
    *,
    reverse: bool = False,
    fold: Fold = fold,
) -> SlotMaps:
    """This card's map of each owned range, as `carry` would send it; links: of the direction."""
    return _Fold(maps, packing, shape, like, reverse, fold).outgoing(links)


def entering(
    maps: AffineMap,
    packing: Packing,
    shape: tuple[int, int, int],
    like: Tensor,
    states: Tensor | None,
    *,
    reverse: bool = False,
    fold: Fold = fold,
) -> States:
    """What `carry` gives at last, from the states that enter the owned ranges."""
    return _Fold(maps, packing, shape, like, reverse, fold).entering(states)


class _FoldTables(NamedTuple):
    """The walks of one card and direction: those that give the maps of its ranges, and those that
    give each segment's entering state."""

    outgoing: FoldTable
    entering: FoldTable

    @classmethod
    def of(cls, packing: Packing, reverse: bool) -> _FoldTables:
        sources = packing.carried if reverse else packing.feeding
        sinks = packing.feeding if reverse else packing.carried
        offset = {i: row for row, i in enumerate(sources)}
        transition = {i: row for row, i in enumerate(packing.middle)}
        sink = {i: row for row, i in enumerate(sinks)}
        outgoing, entering = [], []
        for chain in packing.chains:
            chain = chain[::-1] if reverse else chain
            first, last = packing.segments[chain[0]], packing.segments[chain[-1]]
            into, out = first.entry, last.exit
            if reverse:
                into, out = first.exit, last.entry
            entry = sink[chain[0]] if into >= 0 else -1
            steps = [(transition.get(i, -1), offset[i], sink[j]) for i, j in pairwise(chain)]
            if entry >= 0 or steps:
                entering.append((into, entry, steps))
            if out < 0:
                continue
            steps = [(transition.get(i, -1), offset[i], -1) for i in chain]
            outgoing.append((-1, -1, [*steps[:-1], (*steps[-1][:2], out)]))
        return cls(FoldTable.of(outgoing), FoldTable.of(entering))


@functools.cache
def _on_card(name: str, reverse: bool) -> Steps:
    """One of a packing's `_Walks`."""

    def steps(packing: Packing) -> FoldTable:
        walks = packing.cached((_FoldTables, reverse), lambda: _FoldTables.of(packing, reverse))
        found: FoldTable = getattr(walks, name)
        return found

    return steps


class _Fold:
    """The chains of one card, walked from the first segment (reverse: from the last)."""

    def __init__(
        self,
        maps: AffineMap,
        packing: Packing,
        shape: tuple[int, int, int],
        like: Tensor,
        reverse: bool,
        fold: Fold,
    ):
        self.maps, self.packing, self.reverse = maps, packing, reverse
        self.shape, self.like, self.fold = shape, like, fold
        self.sinks = packing.feeding if reverse else packing.carried

    def outgoing(self, links: Links) -> SlotMaps:
        """This card's map of each owned range, for the exchange."""
        HV, K, V = self.shape
        packing, maps = self.packing, self.maps
        if packing.single and maps.offset is not None:
            transition = maps.transition
            if transition is not None and self.reverse:
                transition = transition.mT
            return SlotMaps(transition, maps.offset)
        leaving = sum((s.entry if self.reverse else s.exit) >= 0 for s in packing.segments)
        new = self.like.new_empty if leaving == links.slots_per_rank else self.like.new_zeros
        wire = new(wire_shape(links, HV, K, V))
        self.fold(
            packing,
            _on_card("outgoing", self.reverse),
            maps.transition,
            maps.offset,
            None,
            wire,
            transposed=self.reverse,
        )
        return unpacked(wire[: packing.ranges], links, V)._replace(wire=wire)

    def entering(self, states: Tensor | None) -> States:
        """The state entering every sink, given those entering the owned ranges."""
        HV, K, V = self.shape
        if self.packing.single and self.sinks:
            assert states is not None
            return States(self.sinks, states)
        value = self.like.new_empty(len(self.sinks), HV, K, V)
        self.fold(
            self.packing,
            _on_card("entering", self.reverse),
            self.maps.transition,
            self.maps.offset,
            states,
            value,
            transposed=self.reverse,
        )
        return States(self.sinks, value)
