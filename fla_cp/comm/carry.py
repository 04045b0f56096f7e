"""Carries states across segments and ranks: the fold of affine maps, with one exchange.

A run of tokens maps the state that enters it to the state that leaves it,

    S_out = transition @ S_in + offset

(docs/design.md, "Affine maps"). `carry` turns the maps of this rank's segments into the state that
enters each of them. `carry(reverse=True)` is its adjoint: it turns the adjoint maps into the
gradient of the state that leaves each segment.
"""

import functools
from collections.abc import Callable
from itertools import pairwise
from typing import NamedTuple

import torch
from torch import Tensor

from fla_cp.comm import Exchange, Links, SlotMaps
from fla_cp.comm.affine import Fold, FoldTable, Steps, fold
from fla_cp.comm.exchange.base import arrive, unpack, wire_shape
from fla_cp.partition.packing import Packing
from fla_cp.tape import step


class AffineMap(NamedTuple):
    """The affine maps of segments, fp32 (fp64), in token order. A field is None if there are no
    such segments.

    transition [M, HV, K, K]: of the segments of `Packing.middle`.
    offset [F, HV, K, V]: of the segments that hand a state on. These are `Packing.feeding`, or in
        reverse `Packing.carried`.
    The first segment of a sequence (in reverse the last) needs no transition, because its offset
    contains the state from which it starts.
    """

    transition: Tensor | None
    offset: Tensor | None


class States(NamedTuple):
    """States of some of a rank's segments: which segments, and their states [E, HV, K, V]."""

    segments: tuple[int, ...]
    value: Tensor


def join(*states: States | None) -> States | None:
    """All given states in one `States`; None if there are none."""
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
) -> Callable[..., States]:
    """Starts the exchange, and returns a function that waits for it. The function returns the
    states that enter the segments of `packing.carried` (in reverse: the gradients of the states
    that leave those of `packing.feeding`). With overlap=True it first runs the work that was handed
    over (overlap.py).

    links: the slot table of the forward direction, also in reverse. For the other arguments see
        `SegmentMaps`.
    Collectives: one exchange if any sequence of the global batch crosses from one slot to the next,
        otherwise none.
    Source: docs/design.md "Affine maps".
    """
    if reverse:
        links = links.mirrored()
    segments = SegmentMaps(maps, packing, shape, like, reverse, fold)
    pending = exchange.start(segments.outgoing(links), links, fold) if links.any else None

    def wait(overlap: bool = False) -> States:
        if pending is not None:
            return segments.entering(pending.wait(overlap))
        if overlap:
            step(arrive, None, True)
        return segments.entering(None)

    return wait


class SegmentMaps(NamedTuple):
    """The maps of a rank's segments, to be folded from the first segment on (reverse: from the
    last).

    maps: in reverse, the transitions are still those of the forward, not yet transposed. shape:
    (HV, K, V). like: a tensor of the states' dtype and device. fold: the backend's.
    """

    maps: AffineMap
    packing: Packing
    shape: tuple[int, int, int]
    like: Tensor
    reverse: bool = False
    fold: Fold = fold

    def outgoing(self, links: Links) -> SlotMaps:
        """The maps of this rank's ranges, which the exchange sends. links: the slot table of this
        direction."""
        HV, K, V = self.shape
        packing, (transition, offset) = self.packing, self.maps
        if packing.single and offset is not None:
            if transition is not None and self.reverse:
                transition = transition.mT
            return SlotMaps(transition, offset)
        leaving = sum((s.entry if self.reverse else s.exit) >= 0 for s in packing.segments)
        new = self.like.new_empty if leaving == links.slots_per_rank else self.like.new_zeros
        wire = self._fold("outgoing", None, new(wire_shape(links, HV, K, V)))
        return unpack(wire[: packing.ranges], V)._replace(wire=wire)

    def entering(self, states: Tensor | None) -> States:
        """The states that enter the segments of `Packing.carried`, from the states that enter this
        rank's ranges. In reverse: the gradients at the ends of the segments of `Packing.feeding`,
        from those at the ends of the ranges."""
        sinks = self.packing.feeding if self.reverse else self.packing.carried
        if self.packing.single and sinks:
            assert states is not None
            return States(sinks, states)
        HV, K, V = self.shape
        value = self.like.new_empty(len(sinks), HV, K, V)
        return States(sinks, self._fold("entering", states, value) if sinks else value)

    def _fold(self, table: str, start: Tensor | None, out: Tensor) -> Tensor:
        packing, (M, B), reverse = self.packing, self.maps, self.reverse
        return self.fold(packing, _steps(table, reverse), M, B, start, out, transposed=reverse)


@functools.cache
def _steps(table: str, reverse: bool) -> Steps:
    """The steps in one of a packing's `_fold_tables`, by its name."""

    def steps(packing: Packing) -> FoldTable:
        tables = packing.cached((_fold_tables, reverse), lambda: _fold_tables(packing, reverse))
        return tables[table]

    return steps


def _fold_tables(packing: Packing, reverse: bool) -> dict[str, FoldTable]:
    """The two folds of a rank in one direction. "outgoing" forms the maps of its ranges, "entering"
    the states that enter its segments."""
    sources = packing.carried if reverse else packing.feeding
    sinks = packing.feeding if reverse else packing.carried
    offset = {i: row for row, i in enumerate(sources)}
    transition = {i: row for row, i in enumerate(packing.middle)}
    sink = {i: row for row, i in enumerate(sinks)}
    outgoing, entering = [], []
    for chain in packing.chains:
        chain = chain[::-1] if reverse else chain
        first, last = packing.segments[chain[0]], packing.segments[chain[-1]]
        into, out = (first.exit, last.entry) if reverse else (first.entry, last.exit)
        entry = sink[chain[0]] if into >= 0 else -1
        steps = [(transition.get(i, -1), offset[i], sink[j]) for i, j in pairwise(chain)]
        if entry >= 0 or steps:
            entering.append((into, entry, steps))
        if out >= 0:
            steps = [(transition.get(i, -1), offset[i], -1) for i in chain]
            outgoing.append((-1, -1, [*steps[:-1], (*steps[-1][:2], out)]))
    return {"outgoing": FoldTable.of(outgoing), "entering": FoldTable.of(entering)}
