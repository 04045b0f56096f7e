"""Symmetric: an exchange through memory that GPUs of one host share."""

import functools
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from fla_cp.comm import peer_memory
from fla_cp.comm.affine import Fold, FoldTable, PeerFold, Steps, fold
from fla_cp.comm.exchange.all_gather import AllGather
from fla_cp.comm.exchange.base import (
    GroupExchange,
    Pending,
    Rounds,
    Sent,
    SlotMaps,
    begin,
    entered,
    entering_table,
)
from fla_cp.comm.timing import named
from fla_cp.partition.device_tables import Build, Columns
from fla_cp.partition.slots import Links
from fla_cp.tape import closed, opened, paused, step


class Symmetric(GroupExchange):
    """An exchange in one of two ways (peer_memory.py).

    If each rank has one slot, in the order of the ranks, and the backend has a kernel for it, the
    state itself passes from rank to rank: each rank applies its own map to the state that arrives
    and writes the result into the next rank's memory.

    Otherwise every rank puts its maps where its peers can read them, and copies the peers' maps
    that its own fold needs into local memory, while other work may run. The fold does not read them
    in place, because it reads a transition once for every tile of values.
    """

    def start(self, maps: SlotMaps, links: Links, fold: Fold = fold) -> Pending:
        ranks = tuple(range(dist.get_world_size(self.group)))
        in_line = links.slots_per_rank == 1 and links.owner in (ranks, ranks[::-1])
        if isinstance(fold, PeerFold) and in_line and maps.offset.dtype == torch.float32:
            return self._pass_on(maps, links, fold)
        return Pending(step(_read_peers, self.group, maps, links, fold), entered)

    def _pass_on(self, maps: SlotMaps, links: Links, fold: PeerFold) -> Pending:
        """Passes the state from rank to rank, in one kernel on the group's stream."""
        _, HV, K, V = maps.offset.shape
        (table,) = links.table(crossing(dist.get_rank(self.group)), torch.int32, maps.offset.device)
        transition = maps.transition if links.any_through else None
        out = torch.empty_like(maps.offset, memory_format=torch.contiguous_format)
        room, reverse = peer_memory.Room(*fold.room(HV, K, V)), links.owner[0] != 0
        mail, side, sent = step(_open, self.group, room, reverse, maps.offset.device)
        opened(side)
        with side.launches():
            fold.pass_on(transition, maps.offset, table, mail, out)

        def finish(_: object) -> Tensor:
            closed(side)
            return out

        return Pending(sent, finish, sends=maps)

    def rounds(self, maps: SlotMaps, links: Links, fold: Fold) -> Rounds:
        """Copies the maps that this rank's fold reads from the peers' memory, and folds them."""
        J, HV, K, V = maps.offset.shape
        rank, layout = dist.get_rank(self.group), _Layout(links.slots_per_rank, HV, K, V)
        read = links.cached((_read, rank, J), lambda: _read(links, rank, J))
        memory = peer_memory.peer_memory(self.group, layout.size, maps.offset.dtype)
        spans = links.cached((_Layout.spans, layout, rank, J), lambda: layout.spans(read))
        copied = maps.offset.new_empty(sum(span.size for span in spans))

        def put(mine: Tensor) -> None:
            layout.offsets(mine, J).copy_(maps.offset)
            if links.any_through and maps.transition is not None:
                layout.transitions(mine, J).copy_(maps.transition)

        def take(memories: tuple[Tensor, ...]) -> None:
            _concatenate([memories[r].narrow(0, begin, n) for r, begin, n in spans], copied)

        arrived = memory.exchange(put, take)
        yield None
        arrived()
        offsets = copied[: len(read.offsets) * layout.offset].view(-1, HV, K, V)
        transitions = copied[offsets.numel() :].view(-1, HV, K, K)
        out = torch.empty_like(maps.offset, memory_format=torch.contiguous_format)
        yield fold(
            links,
            _steps_over_read(rank, J),
            transitions if read.transitions else None,
            offsets if read.offsets else None,
            None,
            out,
            transposed=False,
        )


class _Read(NamedTuple):
    """The rows that a fold reads, in ascending order unless the links are fixed."""

    transitions: tuple[int, ...]
    offsets: tuple[int, ...]


class _Span(NamedTuple):
    """Elements [begin, begin + size) of the memory of a rank."""

    rank: int
    begin: int
    size: int


class _Layout(NamedTuple):
    """Where a rank's maps are in its memory, all elements in one dim: first the offsets
    [slots, HV, K, V] of its slots, and then their transitions [slots, HV, K, K].

    There is always room for transitions, even if none is sent. Otherwise a later batch would need
    memory of another size, and all hosts would wait while it is made.

    A row counts through the slots of all ranks: row r is slot r % slots of rank r // slots.
    Example with 2 slots a rank, HV = 1, K = 2 and V = 3: a rank's memory has 20 elements, and row 3
    is the second slot of rank 1. Its offset is in elements 6 to 11, its transition in 16 to 19.
    """

    slots: int
    HV: int
    K: int
    V: int

    @property
    def offset(self) -> int:
        """The elements of a slot's offset."""
        return self.HV * self.K * self.V

    @property
    def transition(self) -> int:
        """The elements of a slot's transition."""
        return self.HV * self.K * self.K

    @property
    def size(self) -> int:
        """The elements of a rank's memory."""
        return self.slots * (self.offset + self.transition)

    def offsets(self, memory: Tensor, J: int) -> Tensor:
        """The offsets [J, HV, K, V] of a rank's first J slots, in place."""
        return memory[: J * self.offset].view(J, self.HV, self.K, self.V)

    def transitions(self, memory: Tensor, J: int) -> Tensor:
        """The transitions [J, HV, K, K] of a rank's first J slots, in place."""
        begin = self.slots * self.offset
        return memory[begin : begin + J * self.transition].view(J, self.HV, self.K, self.K)

    def spans(self, read: _Read) -> list[_Span]:
        """Where the offsets of the rows in `read` are, and then their transitions."""
        offsets = (divmod(row, self.slots) for row in read.offsets)
        transitions = (divmod(row, self.slots) for row in read.transitions)
        begin, size = self.slots * self.offset, self.transition
        return [
            *(_Span(rank, slot * self.offset, self.offset) for rank, slot in offsets),
            *(_Span(rank, begin + slot * size, size) for rank, slot in transitions),
        ]


def _concatenate(parts: list[Tensor], out: Tensor) -> None:
    """Writes the parts into `out`, one after another, in one kernel."""
    if len(parts) == 1:  # torch would copy a single tensor with the driver, not a kernel
        parts = list(parts[0].chunk(2))
    if parts:
        torch.cat(parts, out=out)


def _read_peers(group: dist.ProcessGroup, maps: SlotMaps, links: Links, fold: Fold) -> Sent:
    # A program finds the group through its plan, and must not keep an exchange alive.
    return begin(Symmetric(group).rounds(maps, links, fold), maps.offset.device)


def _open(
    group: dist.ProcessGroup, room: peer_memory.Room, reverse: bool, device: torch.device
) -> tuple[peer_memory.Mailbox, peer_memory.Side, Sent]:
    with named("start of exchange of states"):
        mail, side = peer_memory.mailboxes(group, room).open(reverse=reverse)

    def wait() -> None:
        side.wait()

    return mail, side, Sent(wait, device)


class SymmetricOrGather(GroupExchange):
    """Symmetric if the group can have it, otherwise AllGather.

    The first exchange finds out, with a collective, because all ranks start it together, whereas
    contexts may be built on other threads. If a CUDA graph captures the first exchange, that one is
    AllGather.
    """

    def start(self, maps: SlotMaps, links: Links, fold: Fold = fold) -> Pending:
        with paused():  # to find out takes a collective, which no program repeats
            known = peer_memory.known(self.group) or not torch.cuda.is_current_stream_capturing()
            able = known and not peer_memory.why_not(self.group)
        scheme = Symmetric(self.group) if able else AllGather(self.group)
        return scheme.start(maps, links, fold)


@functools.cache
def crossing(rank: int) -> Build:
    """The table of a rank with one slot: whether a state enters the slot, leaves it, and passes
    through it."""

    def columns(links: Links) -> Columns:
        s = links.owner.index(rank)
        return [(int(links.continues[s]), int(links.feeds(s)), int(links.through[s]))]

    return columns


def _read(links: Links, rank: int, rows: int) -> _Read:
    """The rows of all ranks' maps that the fold of `entering_table` reads."""
    if links.fixed:  # those that any packing may need; a rank has one row, whose number is its own
        before = links.owner[: links.owner.index(rank)]
        return _Read(transitions=before[1:], offsets=before)
    table = entering_table(rank, rows)(links)
    return _Read(*(tuple(sorted({*x} - {-1})) for x in (table.transition, table.offset)))


@functools.cache
def _steps_over_read(rank: int, rows: int) -> Steps:
    """The steps of `entering_table`, for tensors that have only the rows of `_read`.

    Example: if the offsets of rows 0, 2 and 3 are read, they are rows 0, 1 and 2 here, and the
    column offset = (0, 2, 3, -1) becomes (0, 1, 2, -1).
    """

    def steps(links: Links) -> FoldTable:
        table, read = entering_table(rank, rows)(links), _read(links, rank, rows)
        return table._replace(
            transition=_renumbered(table.transition, read.transitions),
            offset=_renumbered(table.offset, read.offsets),
        )

    return steps


def _renumbered(column: tuple[int, ...], read: tuple[int, ...]) -> tuple[int, ...]:
    """A column whose rows are replaced by their positions in `read`; -1 stays."""
    position = {row: n for n, row in enumerate(read)}
    return tuple(-1 if row < 0 else position[row] for row in column)
