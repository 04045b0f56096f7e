"""Affine maps of runs of tokens: their products, and the fold of a state through chains of maps.

Products are never formed in TF32, whatever torch's settings allow elsewhere: a state passes through
as many products as its sequence has segments, and their errors add up.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any, NamedTuple, Self

import torch
from torch import Tensor

from fla_cp.partition.device_tables import Tabled


def _reduced(x: Tensor) -> bool:
    """Whether torch would form a product of x in less than its own precision.

    `torch.get_float32_matmul_precision` cannot be asked. It raises an error if TF32 was allowed by
    `torch.backends.cuda.matmul.fp32_precision`, which knows what either setting allows.
    """
    if not x.is_cuda or x.dtype != torch.float32:
        return False
    return torch.backends.cuda.matmul.fp32_precision == "tf32"


def product(then: Tensor, first: Tensor) -> Tensor:
    """then @ first: transitions [.., K, K] of two runs of tokens, one after the other."""
    if _reduced(then):
        return (then.double() @ first.double()).to(then.dtype)
    return then @ first


def leave(transition: Tensor | None, offset: Tensor, state: Tensor | None) -> Tensor:
    """The state after a run of tokens: transition @ state + offset, [.., K, V].

    It is just the offset if there is no transition, or if no state enters.
    """
    if transition is None or state is None:
        return offset
    return offset + product(transition, state)


class FoldStep(NamedTuple):
    """A step of a fold, which takes the state through one map. transition, offset: the map's rows
    (-1: zero). store: the row of the result that receives the state after the step (-1: none)."""

    transition: int = -1
    offset: int = -1
    store: int = -1


class FoldTable(NamedTuple):
    """C chains of maps. All numbers are host ints that name rows of tensors; -1 means none.

    first [C+1]: the index of each chain's first step, and the number of the chains' steps.
    start [C]: the row of the state that enters each chain (-1: it is zero).
    entry [C]: the row of the result that receives this state.
    transition, offset, store: the fields of each step's `FoldStep`. Steps behind those of the last
        chain belong to none.
    """

    first: tuple[int, ...]
    start: tuple[int, ...]
    entry: tuple[int, ...]
    transition: tuple[int, ...]
    offset: tuple[int, ...]
    store: tuple[int, ...]

    @classmethod
    def of(
        cls, chains: Sequence[tuple[int, int, Sequence[tuple[int, int, int]]]], size: int = 0
    ) -> Self:
        """From the (start, entry, steps) of each chain. A step is a `FoldStep` or a tuple of its
        fields. size: the least number of steps, including those that belong to no chain."""
        first: list[int] = [0]
        steps: list[tuple[int, int, int]] = []
        for _, _, own in chains:
            steps += own
            first.append(len(steps))
        steps += [FoldStep()] * (size - len(steps))
        columns = tuple(zip(*steps, strict=True)) or ((), (), ())
        starts, entries = tuple(c[0] for c in chains), tuple(c[1] for c in chains)
        return cls(tuple(first), starts, entries, *columns)

    def __call__(self, owner: Tabled) -> Self:
        """Returns the table itself, so that it can stand for `Steps` that are the same for every
        owner."""
        return self


Fold = Callable[..., Tensor]
"""A backend's `fold`; the function `fold` below has its arguments."""


@dataclass(frozen=True)
class PeerFold:
    """A fold whose backend can also pass states from rank to rank through the memory of GPUs, in
    one kernel (`fla_cp.comm.peer_memory.Mailboxes`).

    room(HV, K, V): the number of elements of one state in a mailbox, and the number of tiles, each
        of which has flags of its own.
    pass_on(transition, offset, crossing, mail, out): launches this rank's part of the exchange;
        `fla_cp.kernels.triton.exchange.pass_on` describes the arguments.
    """

    fold: Fold
    room: Callable[[int, int, int], tuple[int, int]]
    pass_on: Callable[..., None]

    def __call__(self, *given: Any, **named: Any) -> Tensor:
        return self.fold(*given, **named)


Steps = Callable[[Any], FoldTable]
"""Returns the steps of a fold for the object that keeps its tables. Like `device_tables.Build`, the
function is also the key under which that object keeps them."""


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
    """Folds chains of maps, in PyTorch. Writes the rows of `out` that `steps` names, and returns
    `out`.

    owner: the packing or links for which `steps` returns its table.
    transition [*, HV, K, K]: its transpose is used if `transposed`. offset, start [*, HV, K, V].
        transition and offset may be slices of one tensor, next to each other in its last dim.
    out: [E, HV, K, V]. If no state enters, it may be [E, HV, K, V+K], and then also receives, next
        to each state, the transition of the steps up to it.
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
    """x[row], or None if there is no x or the row is -1."""
    return None if x is None or row < 0 else x[row]


def _times(M: Tensor | None, x: Tensor | None) -> Tensor | None:
    return None if M is None or x is None else product(M, x)
