"""Symmetric: an exchange through memory that GPUs of one host share."""

import functools

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
        """Copies the peers' maps and folds them. A rank's memory has first the offsets of all its
        slots, and then their transitions."""
        J, HV, K, V = maps.offset.shape
        S, M, slots = HV * K * V, HV * K * K, links.slots_per_rank
        rank = dist.get_rank(self.group)
        transitions, offsets = links.cached((_read, rank, J), lambda: _read(links, rank, J))
        # The memory always has room for transitions, even if none is sent. Otherwise a later
        # batch would need memory of another size, and all hosts would wait while it is made.
        memory = peer_memory.peer_memory(self.group, slots * (S + M), maps.offset.dtype)
        got = maps.offset.new_empty(len(offsets) * S + len(transitions) * M)

        def put(mine: Tensor) -> None:
            mine[: J * S].view(J, HV, K, V).copy_(maps.offset)
            if links.any_through and maps.transition is not None:
                mine[slots * S :][: J * M].view(J, HV, K, K).copy_(maps.transition)

        def take(parts: tuple[Tensor, ...]) -> None:
            found = [parts[row // slots].narrow(0, row % slots * S, S) for row in offsets]
            for row in transitions:
                found.append(parts[row // slots].narrow(0, slots * S + row % slots * M, M))
            if len(found) == 1:  # torch would copy a single tensor with the driver, not a kernel
                found = list(found[0].chunk(2))
            if found:
                torch.cat(found, out=got)

        arrived = memory.exchange(put, take)
        yield None
        arrived()
        B = got[: len(offsets) * S].view(-1, HV, K, V) if offsets else None
        M_ = got[len(offsets) * S :].view(-1, HV, K, K) if transitions else None
        out = torch.empty_like(maps.offset, memory_format=torch.contiguous_format)
        yield fold(links, _entering_read(rank, J), M_, B, None, out, transposed=False)


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


def _read(links: Links, rank: int, rows: int) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """The rows of the transitions and of the offsets that the fold of `entering_table` reads."""
    if links.fixed:  # those that any packing may need
        before = links.owner[: links.owner.index(rank)]
        return before[1:], before
    table = entering_table(rank, rows)(links)
    transitions, offsets = (tuple(sorted({*x} - {-1})) for x in (table.transition, table.offset))
    return transitions, offsets


@functools.cache
def _entering_read(rank: int, rows: int) -> Steps:
    """The steps of `entering_table`, for maps of which only the rows of `_read` are there."""

    def steps(links: Links) -> FoldTable:
        table = entering_table(rank, rows)(links)
        transition, offset = (
            {row: n for n, row in enumerate((-1, *read), -1)} for read in _read(links, rank, rows)
        )
        return table._replace(
            transition=tuple(transition[row] for row in table.transition),
            offset=tuple(offset[row] for row in table.offset),
        )

    return steps
