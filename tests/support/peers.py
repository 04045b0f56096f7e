"""Peer memory for ranks that are threads, in place of GPUs that read each other's memory."""

import threading
from contextlib import contextmanager

import torch
import torch.distributed as dist

from fla_cp.comm import peer_memory as peers


class ThreadMemory:
    """Like `PeerMemory`, with tensors that the threads of a group share. `exchange` waits for all.

    Elements that no rank wrote in this exchange are NaN. read: bytes that each thread took from
    others, by thread number.
    """

    def __init__(self, group, count, dtype, shared, read):
        self.group, self.rank, self.read, self.turn = group, dist.get_rank(group), read, 0
        self.all = shared
        self.all[self.rank] = torch.full((2, count), torch.nan, dtype=dtype)

    def exchange(self, put, take):
        turn, self.turn = self.turn, 1 - self.turn
        put(self.all[self.rank][turn].fill_(torch.nan))
        dist.barrier(group=self.group)
        take(tuple(Part(self, r, self.all[r][turn]) for r in range(len(self.all))))
        return lambda: None


class ThreadMailboxes:
    """Like `Mailboxes`, with tensors that the threads of a group share. The ranks' kernels run one
    after the other, in the direction of the states, because an interpreted kernel cannot wait.

    Elements of an inbox that no rank wrote are NaN.
    """

    def __init__(self, group, room, shared):
        self.group, self.rank, self.memory = group, dist.get_rank(group), shared
        self.room = room
        mine = torch.zeros(room.elements)
        for half in mine.chunk(2):
            half[: 2 * room.size] = torch.nan
        shared[self.rank] = mine
        self.numbers = torch.zeros(2, room.tiles, dtype=torch.int32)

    def open(self, *, reverse):
        dist.barrier(group=self.group)
        every = [self.memory[r] for r in range(self.group.size())]
        mail = peers.mailbox(
            every, self.numbers[int(reverse)], self.rank, self.room, reverse=reverse
        )
        return mail, ThreadSide(self.group, self.rank, reverse)


class ThreadSide:
    """Like `Side`: runs a rank's launches in its turn."""

    def __init__(self, group, rank, reverse):
        self.group = group
        self.before = group.size() - 1 - rank if reverse else rank

    @contextmanager
    def launches(self):
        for _ in range(self.before):
            dist.barrier(group=self.group)
        yield
        for _ in range(self.group.size() - self.before):
            dist.barrier(group=self.group)

    def wait(self):
        pass


class Part:
    """One rank's part, as another rank sees it."""

    def __init__(self, memory, rank, held):
        self.memory, self.rank, self.held = memory, rank, held

    def narrow(self, dim, start, length):
        found = self.held.narrow(dim, start, length)
        if self.rank != self.memory.rank:
            here = threading.get_ident()
            self.memory.read[here] = self.memory.read.get(here, 0) + found.nbytes
        return found


def of_threads(patch) -> dict[int, int]:
    """Gives threads peer memory, by a pytest MonkeyPatch; returns the bytes that each has read."""
    shared: dict = {}
    made: dict = {}
    read: dict[int, int] = {}

    def peer_memory(group, count, dtype):
        key = (group.size(), count, dtype)
        mine = (threading.get_ident(), *key)
        if mine not in made:
            tensors = shared.setdefault(key, {})
            made[mine] = ThreadMemory(group, count, dtype, tensors, read)
        return made[mine]

    def mailboxes(group, room):
        key = (group.size(), room)
        mine = (threading.get_ident(), *key)
        if mine not in made:
            made[mine] = ThreadMailboxes(group, room, shared.setdefault(key, {}))
        return made[mine]

    patch.setattr(peers, "peer_memory", peer_memory)
    patch.setattr(peers, "mailboxes", mailboxes)
    patch.setattr(peers, "why_not", lambda group: "")
    return read
