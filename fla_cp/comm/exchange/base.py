"""What all exchanges share: the maps of slots, how they are packed for sending, and their fold."""

import functools
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from fla_cp.comm.affine import Fold, FoldStep, FoldTable, Steps, fold
from fla_cp.comm.overlap import run_overlap
from fla_cp.comm.timing import exchange_begins, exchange_wait, named
from fla_cp.partition.slots import Links
from fla_cp.tape import step


class SlotMaps(NamedTuple):
    """The maps of this rank's J slots: transition [J, HV, K, K] (or None) and offset
    [J, HV, K, V]. wire: the tensor that `pack` would form of them, if they are slices of one."""

    transition: Tensor | None
    offset: Tensor
    wire: Tensor | None = None


Rounds = Iterator[Tensor | None]
"""An exchange as a generator. It yields None each time that messages have left and it has to wait.
At last it yields the states [J, HV, K, V] that enter this rank's slots, which are zero if nothing
enters."""


class Sent:
    """An exchange whose first messages have left.

    wait: makes the current stream wait until the messages of all ranks have arrived. For a scheme
    that is written as `Exchange.rounds`, it returns the states that enter; otherwise None, and
    `Pending` forms the states.
    """

    def __init__(self, wait: Callable[[], Tensor | None], device: torch.device):
        self.wait, self.device, self.began = wait, device, exchange_begins(device)


def arrive(sent: Sent | None, overlap: bool) -> Tensor | None:
    """Returns what `sent.wait` returns, or None if nothing was sent. overlap: first runs the work
    that was handed over (overlap.py)."""

    def wait() -> Tensor | None:
        if sent is None:
            return None
        with exchange_wait(sent.device, began=sent.began):
            return sent.wait()

    return run_overlap(wait) if overlap else wait()


class Pending:
    """The result of an exchange under way. finish: forms the states that enter this rank's slots
    from what `sent.wait` returned. sends: tensors that the exchange reads until then, so that they
    must not be freed before."""

    def __init__(
        self, sent: Sent, finish: Callable[[Tensor | None], Tensor], sends: object = None
    ) -> None:
        self._held: list[Any] = [sent, finish, sends]

    def wait(self, overlap: bool = False) -> Tensor:
        """The states [J, HV, K, V] that enter this rank's slots, which are zero if nothing enters.
        It may be called only once, and holds no tensor afterwards."""
        sent, finish, sends = self._held
        self._held.clear()
        found = finish(step(arrive, sent, overlap))
        del sends
        return found


@dataclass(frozen=True)
class Exchange:
    """A scheme of exchange. `start` returns at once, so that work which needs no state can run
    before the caller waits for the result.

    A subclass implements `rounds` as a generator: the code before the first yield runs in `start`,
    the rest in the wait. A replayed call runs both parts again in Python. A scheme that launches
    the same kernels for all plans with one `PlanKey` may override `start` instead, and make only
    its messages a `step` (tape.py); a program then replays the kernel launches. fold: the
    backend's, for schemes that fold gathered maps.
    """

    group: dist.ProcessGroup | None = None

    def start(self, maps: SlotMaps, links: Links, fold: Fold = fold) -> Pending:
        return Pending(step(_begin, self, maps, links, fold), entered)

    def rounds(self, maps: SlotMaps, links: Links, fold: Fold) -> Rounds:
        raise NotImplementedError


def _begin(exchange: Exchange, maps: SlotMaps, links: Links, fold: Fold) -> Sent:
    return begin(exchange.rounds(maps, links, fold), maps.offset.device)


def begin(rounds: Rounds, device: torch.device) -> Sent:
    """Runs an exchange until its first messages have left. The wait of the result runs the rest,
    and returns the states that enter."""
    with named("start of exchange of states"):
        next(rounds)

    def wait() -> Tensor | None:
        *_, entering = rounds
        return entering

    return Sent(wait, device)


def entered(entering: Tensor | None) -> Tensor:
    """`finish` of a `Pending` whose wait already returns the states."""
    assert entering is not None
    return entering


class Local(Exchange):
    """One rank holds all slots, so nothing is sent."""

    def rounds(self, maps: SlotMaps, links: Links, fold: Fold) -> Rounds:
        yield None
        yield fold_slots(maps, links, 0, maps.offset, fold)


@dataclass(frozen=True)
class Unsent(Exchange):
    """Sends nothing and returns states without values, for a rehearsal (`fla_cp.pipeline`). It
    folds tensors of the size of all ranks' maps, as if these had been gathered. rank: this one."""

    rank: int = 0

    def rounds(self, maps: SlotMaps, links: Links, fold: Fold) -> Rounds:
        wire = pack(maps, links)
        yield None
        wires = wire.new_empty(max(links.owner) + 1, *wire.shape)
        yield fold_wires(wires, links, self.rank, maps.offset, fold)


class GroupExchange(Exchange):
    """A scheme among the ranks of a group."""

    group: dist.ProcessGroup


@functools.cache
def entering_table(rank: int, rows: int) -> Steps:
    """The steps that fold the maps of all ranks into the states [rows, HV, K, V] that enter the
    `rows` ranges of `rank`.

    The maps are in rank order, `slots_per_rank` rows for each rank. Each chain follows one state
    from slot to slot, up to the last of this rank's slots that it enters. Chains of one step store
    zero in the ranges that no state enters. The table has the same size for all links with equally
    many slots, so that recorded programs fit all of them: `rows` chains, some of which may have no
    steps, and behind the last chain's steps some that belong to none. With fixed links, a rank's
    only chain has equally many steps in every packing.

    Example: ranks 0, 1, 1, 0 own the slots of one sequence (zigzag). Their maps are in the rows 0,
    2, 3, 1, and the first slot of each rank is its range 0. Rank 0 has two chains:

        transition   offset   store
            -1          0      -1     the sequence begins in the first slot: only its offset leaves
             2          2      -1     through the second slot
             3          3       1     through the third slot, into the fourth, which is range 1
            -1         -1       0     nothing enters range 0

    One more step of -1 follows, because tables for 4 slots and 2 ranges have 4 - 1 + 2 steps.
    """

    def steps(links: Links) -> FoldTable:
        chains = _chains_into(rank, links)
        stored = {step.store for chain in chains for step in chain}
        chains += [[FoldStep(store=row)] for row in range(rows) if row not in stored]
        chains += [[]] * (rows - len(chains))
        if links.fixed:  # each rank has one slot, so there is one chain
            (chain,) = chains
            slots_before = links.owner.index(rank)
            chains = [[FoldStep()] * (max(1, slots_before) - len(chain)) + chain]
        # At most one step for each slot that feeds another, and one for each row of zeros.
        return FoldTable.of([(-1, -1, chain) for chain in chains], links.count - 1 + rows)

    return steps


def _chains_into(rank: int, links: Links) -> list[list[FoldStep]]:
    """For each state that enters slots of `rank`: the steps up to the last slot that it enters."""
    chains: list[list[FoldStep]] = []
    for s, passes in enumerate(links.through):
        if not links.feeds(s):
            continue
        if not passes:  # the state that leaves this slot also begins in it
            chains.append([])
        offset = links.owner[s] * links.slots_per_rank + links.row[s]
        transition = offset if passes else -1
        store = links.row[s + 1] if links.owner[s + 1] == rank else -1
        chains[-1].append(FoldStep(transition, offset, store))
    for chain in chains:
        while chain and chain[-1].store < 0:
            chain.pop()
    return [chain for chain in chains if chain]


def fold_slots(maps: SlotMaps, links: Links, rank: int, like: Tensor, fold: Fold) -> Tensor:
    """The states that enter the ranges of `rank`, [J, HV, K, V] like `like`. maps: those of all
    ranks, see `entering_table`."""
    out = torch.empty_like(like, memory_format=torch.contiguous_format)
    steps = entering_table(rank, len(like))
    return fold(links, steps, maps.transition, maps.offset, None, out, transposed=False)


def fold_wires(wires: Tensor, links: Links, rank: int, like: Tensor, fold: Fold = fold) -> Tensor:
    """As `fold_slots`, from the wires of all ranks: what `pack` returned on each,
    [R, slots_per_rank, ..]."""
    return fold_slots(unpack(wires.flatten(0, 1), like.shape[-1]), links, rank, like, fold)


def wire_shape(links: Links, HV: int, K: int, V: int) -> tuple[int, int, int, int]:
    """The shape of what `pack` returns."""
    return links.slots_per_rank, HV, K, V + K * links.any_through


def pack(maps: SlotMaps, links: Links) -> Tensor:
    """The maps as one tensor that this rank sends, its wire: each offset with its transition next
    to it, [slots_per_rank, HV, K, V+K], or [.., V] if no transition is needed. Rows beyond the
    rank's ranges are zero."""
    if maps.wire is not None:
        return maps.wire
    transition, offset = maps.transition if links.any_through else None, maps.offset
    J, HV, K, V = offset.shape
    if transition is None and not links.any_through and links.slots_per_rank == J:
        return offset
    if transition is not None and links.slots_per_rank == J:
        return torch.cat([offset, transition], -1)
    wire = offset.new_zeros(wire_shape(links, HV, K, V))
    wire[:J, ..., :V] = offset
    if transition is not None:
        wire[:J, ..., V:] = transition
    return wire


def unpack(wire: Tensor, V: int) -> SlotMaps:
    """The maps in a wire [.., K, V+K], or [.., K, V] without transitions."""
    return SlotMaps(wire[..., V:] if wire.shape[-1] > V else None, wire[..., :V])
