"""Affine maps of runs of tokens: their products, and the fold of a state through chains of them.

Products are never formed in TF32, whatever `torch.set_float32_matmul_precision` allows elsewhere: a
state passes through as many of them as a sequence has segments.
"""

from __future__ import annotations

from collections.abc import Callable
from itertools import pairwise
from typing import Any, NamedTuple

import torch
from torch import Tensor

from fla_cp.partition.device_tables import Tabled


def _reduced(x: Tensor) -> bool:
    """Whether a product of x would be formed in less than its own precision."""
    allowed = torch.get_float32_matmul_precision() != "highest"
    return x.is_cuda and x.dtype == torch.float32 and allowed


def product(then: Tensor, first: Tensor) -> Tensor:
    """then @ first: transitions [.., K, K] of two runs of tokens, one after the other."""
    if _reduced(then):
        return (then.double() @ first.double()).to(then.dtype)
    return then @ first


def leave(transition: Tensor | None, offset: Tensor, state: Tensor | None) -> Tensor:
    """transition @ state + offset, [.., K, V]: the state after a run of tokens.

    Without a transition, or without a state that enters, the offset.
    """
    if transition is None or state is None:
        return offset
    return offset + product(transition, state)


class FoldTable(NamedTuple):
    """Chains of maps as rows of tensors, host ints; -1 for none.

    first [C+1]: where each chain's steps begin. start, entry [C]: row of the state that enters the
    chain (-1: zero), and row of the result that receives it. transition, offset, store: of each
    step, which takes the state through a map: its rows (-1: zero), and row of the result that
    receives what leaves.
    """

    first: tuple[int, ...]
    start: tuple[int, ...]
    entry: tuple[int, ...]
    transition: tuple[int, ...]
    offset: tuple[int, ...]
    store: tuple[int, ...]

    @classmethod
    def of(cls, chains: list[tuple[int, int, list[tuple[int, int, int]]]]) -> FoldTable:
        """(start, entry, steps of (transition, offset, store)) of each chain."""
        first, steps = [0], []
        for _, _, own in chains:
            steps += own
            first.append(len(steps))
        columns = tuple(zip(*steps, strict=True)) or ((), (), ())
        starts, entries = tuple(c[0] for c in chains), tuple(c[1] for c in chains)
        return cls(tuple(first), starts, entries, *columns)

    def __call__(self, owner: Tabled) -> FoldTable:
        """Itself, whatever the owner."""
        return self


Fold = Callable[..., Tensor]
"""A backend's `fold`."""

Steps = Callable[[Any], FoldTable]
"""Gives the steps of a fold from the object that keeps its tables. It also names the table there,
as `device_tables.Build` does."""


def fold(
    owner: Tabled,
    steps: Steps,
    transition: Tensor | None,
    offset: Tensor | None,
    start: Tensor | None,
    out: Tensor,
    *,
    transposed: bool,
) -> Tensor:
    """out [E, HV, K, V], whose rows named in `steps` are written: the torch stage.

    owner: the packing or the links that `steps` is called with. transition [*, HV, K, K] (used as
    its transpose with `transposed`), offset and start [*, HV, K, V]; the first two may be slices of
    one tensor, side by side in its last dim. Where no state enters, out may be [E, HV, K, V+K]: it
    then receives, next to each state, the transition of the steps up to it.
    """
    rows = owner.cached(steps, lambda: steps(owner))
    width = out.shape[-1]
    V = width if offset is None else offset.shape[-1]
    for n, (lo, hi) in enumerate(pairwise(rows.first)):
        state, through = row_of(start, rows.start[n]), None
        if rows.entry[n] >= 0:
            out[rows.entry[n]] = 0 if state is None else state
        for i in range(lo, hi):
            M, B = row_of(transition, rows.transition[i]), row_of(offset, rows.offset[i])
            if M is not None and transposed:
                M = M.mT
            state = _times(M, state) if B is None else leave(M, B, state)
            if i == lo:
                through = M
            elif width > V:
                through = _times(M, through)
            if rows.store[i] >= 0:
                out[rows.store[i]][..., :V] = 0 if state is None else state
                if width > V:
                    out[rows.store[i]][..., V:] = 0 if through is None else through
    return out


def row_of(x: Tensor | None, row: int) -> Tensor | None:
    """x[row]; None without x and for -1."""
    return None if x is None or row < 0 else x[row]


def _times(M: Tensor | None, x: Tensor | None) -> Tensor | None:
    return None if M is None or x is None else product(M, x)
