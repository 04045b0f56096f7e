"""The one place that joins segments on a card and ranks: affine maps and their fold.

A run of tokens maps the state that enters it to the state that leaves it,

    S_out = transition @ S_in + offset

(design.md, "Affine maps"). `carry` turns the maps of this card's segments into the state that
enters each of them, with one exchange between ranks; `carry(reverse=True)` is its adjoint.
"""

from __future__ import annotations

from collections.abc import Callable
from itertools import pairwise
from typing import NamedTuple

import torch
from torch import Tensor

from .affine import leave, product
from .comm import Exchange, Links, SlotMaps
from .packing import Packing


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
) -> Callable[[], States]:
    """Starts the exchange; the returned function waits and gives the state entering each segment
    of `packing.carried` that is not seeded (reverse: dS leaving each of `packing.feeding`).

    maps: see `AffineMap`; in reverse the transition is still the forward one. links: the slot
    table, of the forward direction. shape: (HV, K, V). like: gives dtype and device.
    Collectives: one exchange if any sequence of the global batch crosses a slot, else none.
    Source: docs/design.md "Affine maps".
    """
    if reverse:
        links = links.mirrored()
    fold = _Fold(maps, packing, shape, like, reverse)
    pending = None
    if links.any:
        pending = exchange.start(fold.outgoing(), links)

    def finish() -> States:
        entering = None if pending is None else pending.wait()
        return fold.entering(entering)

    return finish


def outgoing(
    maps: AffineMap,
    packing: Packing,
    shape: tuple[int, int, int],
    like: Tensor,
    *,
    reverse: bool = False,
) -> SlotMaps:
    """This card's map of each owned range, as `carry` would send it."""
    return _Fold(maps, packing, shape, like, reverse).outgoing()


class _Fold:
    """The chains of one card, walked from the first segment (reverse: from the last)."""

    def __init__(
        self,
        maps: AffineMap,
        packing: Packing,
        shape: tuple[int, int, int],
        like: Tensor,
        reverse: bool,
    ):
        self.maps, self.packing, self.reverse = maps, packing, reverse
        self.shape, self.like = shape, like
        self.chains = [c[::-1] if reverse else c for c in packing.chains]
        self.sources = packing.carried if reverse else packing.feeding
        self.sinks = packing.feeding if reverse else packing.carried
        self.offset_row = {i: row for row, i in enumerate(self.sources)}
        self.transition_row = {i: row for row, i in enumerate(packing.middle)}

    def _into(self, chain: tuple[int, ...]) -> int:
        """Owned range through which the chain receives a state, or -1."""
        s = self.packing.segments[chain[0]]
        return s.exit if self.reverse else s.entry

    def _out(self, chain: tuple[int, ...]) -> int:
        s = self.packing.segments[chain[-1]]
        return s.entry if self.reverse else s.exit

    def _transition(self, i: int) -> Tensor | None:
        if i not in self.transition_row:
            return None
        assert self.maps.transition is not None
        M = self.maps.transition[self.transition_row[i]]
        return M.transpose(-1, -2) if self.reverse else M

    def _step(self, i: int, state: Tensor | None) -> Tensor:
        """The state after segment i."""
        assert self.maps.offset is not None
        offset = self.maps.offset[self.offset_row[i]]
        M = self._transition(i)
        return leave(M, offset, state)

    def outgoing(self) -> SlotMaps:
        """This card's map of each owned range, for the exchange."""
        HV, K, V = self.shape
        ranges = self.packing.ranges
        offset = self.like.new_zeros(ranges, HV, K, V)
        transition = self.like.new_zeros(ranges, HV, K, K) if self.packing.middle else None
        for chain in self.chains:
            out = self._out(chain)
            if out < 0:
                continue
            state: Tensor | None = None
            for i in chain:
                state = self._step(i, state)
            assert state is not None
            offset[out] = state
            if self._into(chain) >= 0 and transition is not None:
                through = self._transition(chain[0])
                for i in chain[1:]:
                    M = self._transition(i)
                    assert M is not None and through is not None
                    through = product(M, through)
                assert through is not None
                transition[out] = through
        return SlotMaps(transition, offset)

    def entering(self, states: Tensor | None) -> States:
        """The state entering every sink, given those entering the owned ranges."""
        found: dict[int, Tensor] = {}
        for chain in self.chains:
            into = self._into(chain)
            state: Tensor | None = None
            if into >= 0:
                assert states is not None
                state = states[into]
                found[chain[0]] = state
            for i, successor in pairwise(chain):
                state = self._step(i, state)
                found[successor] = state
        HV, K, V = self.shape
        value = (
            torch.stack([found[i] for i in self.sinks])
            if self.sinks
            else self.like.new_zeros(0, HV, K, V)
        )
        return States(self.sinks, value)
