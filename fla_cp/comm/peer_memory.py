"""Memory that the ranks of one host share: torch's symmetric memory.

It is optional, and `why_not` finds out whether a group can have it. Ranks read and write it by
plain loads and stores at the peers' addresses. Multicast is not used, and no global setting is
changed.

An exchange uses it in one of two ways. With `PeerMemory`, each rank writes its own part and, after
a barrier, reads the parts of others. With `Mailboxes`, each rank writes into the memory of its
neighbours, and a kernel waits for what it needs.
"""

from __future__ import annotations

import hashlib
import socket
from collections.abc import Callable
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any, NamedTuple
from weakref import WeakKeyDictionary

import torch
import torch.distributed as dist
from torch import Tensor

from fla_cp.comm import collectives

CAPTURED = 2
"""The part that exchanges in a CUDA graph write. Eager ones write parts 0 and 1 in turn."""


class PeerMemory:
    """Three parts of `count` elements on each rank's GPU, which all ranks of the group read.

    The constructor is a collective in which the host waits. Eager exchanges run on a stream of
    their own and write two parts in turn, so that all ranks have read a part before it is written
    again: exchange n+2 writes the part of exchange n after the barrier of n+1, which each peer
    enters after its reads of n. A replayed CUDA graph, however, always writes the part that it was
    captured with. Captured exchanges therefore have a third part, with a second barrier before it
    is written. The caller waits for an exchange under way before it replays a graph.
    """

    def __init__(self, group: dist.ProcessGroup, count: int, dtype: torch.dtype):
        self.device = torch.device("cuda", torch.cuda.current_device())
        with torch.inference_mode(False):  # the memory outlives a call
            self._mine = _allocate((3, count), dtype, self.device)
            self._handle, every = _shared(self._mine, group)
        self._parts = list(zip(*(x.unbind() for x in every), strict=True))
        self._stream = _stream(group, self.device)
        self._turn = 0

    def exchange(
        self, put: Callable[[Tensor], object], take: Callable[[tuple[Tensor, ...]], object]
    ) -> Callable[[], None]:
        """Starts put(this rank's part) and, when all ranks have done so, take(the parts of all).

        `put` and `take` may only launch work and must not allocate. The function that is returned
        makes the current stream wait for them. Until then the caller must keep the tensors that
        they use.
        """
        captured = torch.cuda.is_current_stream_capturing()
        turn = CAPTURED if captured else self._turn
        self._turn ^= not captured
        self._stream.wait_stream(torch.cuda.current_stream(self.device))
        with torch.cuda.stream(self._stream):
            if captured:
                self._handle.barrier(channel=0)
            put(self._mine[turn])
            self._handle.barrier(channel=0)
            take(self._parts[turn])
            done = self._stream.record_event()
        return lambda: torch.cuda.current_stream(self.device).wait_event(done)


class Mailbox(NamedTuple):
    """What one rank's kernel reads and writes in an exchange between neighbours. "Previous" and
    "next" are meant in the direction of the states: in a backward, the next rank is rank - 1.

    number: int32 [tiles], how many exchanges this rank has made. No other rank sees it.
    inbox: fp32 [2 * size], room for two states. The previous rank writes it.
    arrived: int32 [tiles], the number of the last state in the inbox. The previous rank sets it.
    read: int32 [tiles], the number of the last exchange that the next rank has finished. The next
        rank sets it.
    next_inbox, next_arrived: the inbox and `arrived` of the next rank.
    previous_read: the `read` of the previous rank.
    On the first rank inbox, arrived and previous_read are None; on the last one read, next_inbox
    and next_arrived are.
    """

    number: Tensor
    inbox: Tensor | None
    arrived: Tensor | None
    previous_read: Tensor | None
    read: Tensor | None
    next_inbox: Tensor | None
    next_arrived: Tensor | None


class Room(NamedTuple):
    """The size of a mailbox: room for two states of `size` fp32 elements, and flags for tiles."""

    size: int
    tiles: int

    @property
    def flags(self) -> int:
        """The length of an array of flags. It is rounded up, so that each array begins at a
        multiple of 128 bytes."""
        return -(-self.tiles // 32) * 32

    @property
    def elements(self) -> int:
        """How many elements of 4 bytes each rank needs for the mailboxes of both directions."""
        return 2 * (2 * self.size + 2 * self.flags)


def mailbox(
    memory: list[Tensor], number: Tensor, rank: int, room: Room, *, reverse: bool
) -> Mailbox:
    """The mailbox of a rank. reverse: for states that pass from rank + 1 to rank.

    memory: the shared memory of each rank, fp32 [room.elements], zero at first. Each direction has
    one half of it. number: int32 [room.tiles], zero at first.
    """
    half = room.elements // 2

    def parts(r: int) -> tuple[Tensor, Tensor, Tensor] | tuple[None, None, None]:
        if not 0 <= r < len(memory):
            return None, None, None
        inbox, flags = memory[r][reverse * half :][:half].split((2 * room.size, 2 * room.flags))
        arrived, read = flags.view(torch.int32).chunk(2)
        return inbox, arrived, read

    ahead = -1 if reverse else 1
    (inbox, arrived, read), (_, _, previous_read) = parts(rank), parts(rank - ahead)
    next_inbox, next_arrived, _ = parts(rank + ahead)
    if previous_read is None:
        inbox = arrived = None
    if next_inbox is None:
        read = None
    return Mailbox(number, inbox, arrived, previous_read, read, next_inbox, next_arrived)


class Side:
    """The stream on which a group's exchanges run, beside the current one."""

    def __init__(self, stream: torch.cuda.Stream):
        self._stream = stream

    @property
    def main(self) -> int:
        """The address of the current stream."""
        return torch.cuda.current_stream(self._stream.device).cuda_stream

    @property
    def cuda_stream(self) -> int:
        """The address of this stream."""
        return self._stream.cuda_stream

    def open(self) -> None:
        """Makes this stream wait for all that is queued on the current stream now."""
        self._stream.wait_stream(torch.cuda.current_stream(self._stream.device))

    def launches(self) -> AbstractContextManager[object]:
        """A block whose launches are on this stream."""
        return torch.cuda.stream(self._stream)

    def wait(self) -> None:
        """Makes the current stream wait for all that is queued on this stream now, also for later
        exchanges of the group."""
        torch.cuda.current_stream(self._stream.device).wait_stream(self._stream)


class Mailboxes:
    """The mailboxes of one rank, for states that pass from rank to rank in either direction.

    The constructor is a collective in which the host waits. Exchanges run on the group's stream,
    one after the other, and are counted in device memory, so that captured and eager exchanges can
    use the same mailboxes. The caller waits for an exchange under way before it replays a graph.
    """

    def __init__(self, group: dist.ProcessGroup, room: Room):
        self.device = torch.device("cuda", torch.cuda.current_device())
        rank = dist.get_rank(group)
        with torch.inference_mode(False):  # the memory outlives a call
            mine = _allocate((room.elements,), torch.float32, self.device).zero_()
            numbers = torch.zeros(2, room.tiles, dtype=torch.int32, device=self.device)
            # The memory must be zero before a peer writes it, which can be from `_shared` on.
            torch.cuda.synchronize(self.device)
            self._handle, every = _shared(mine, group)
            self._boxes = [
                mailbox(every, numbers[reverse], rank, room, reverse=bool(reverse))
                for reverse in (0, 1)
            ]
        self._mine, self._side = mine, Side(_stream(group, self.device))

    def open(self, *, reverse: bool) -> tuple[Mailbox, Side]:
        """Starts an exchange in which all ranks take part. Returns this rank's mailbox, and the
        stream on which the caller launches this rank's kernel. That stream waits for what is queued
        on the current one. The caller must not allocate on it, and must keep the tensors that the
        kernel uses until the current stream has waited for it."""
        self._side.open()
        return self._boxes[reverse], self._side


def _allocate(shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> Tensor:
    """An allocation of its own. Tensors of symm_mem.empty may share one, and then share the signals
    with which barriers are made."""
    from torch._C._distributed_c10d import _SymmetricMemory

    strides = torch.empty(shape, dtype=dtype, device="meta").stride()
    return _SymmetricMemory.empty_strided_p2p(shape, strides, dtype, device)


def _shared(mine: Tensor, group: dist.ProcessGroup) -> tuple[Any, list[Tensor]]:
    """Makes memory of `_allocate` known to all ranks. Returns torch's handle of it, and the tensors
    of all ranks."""
    from torch._C._distributed_c10d import _SymmetricMemory

    handle = _SymmetricMemory.rendezvous(mine, group.group_name)
    ranks = range(dist.get_world_size(group))
    return handle, [handle.get_buffer(r, mine.shape, mine.dtype) for r in ranks]


_STREAMS: WeakKeyDictionary[dist.ProcessGroup, torch.cuda.Stream] = WeakKeyDictionary()


def _stream(group: dist.ProcessGroup, device: torch.device) -> torch.cuda.Stream:
    """The one stream of all exchanges of a group, so that all ranks run them in the same order."""
    if group not in _STREAMS:
        _STREAMS[group] = torch.cuda.Stream(device, priority=-1)
    return _STREAMS[group]


_Memories = dict[tuple[int, torch.dtype], PeerMemory]
_MADE: WeakKeyDictionary[dist.ProcessGroup, _Memories] = WeakKeyDictionary()
_BOXES: WeakKeyDictionary[dist.ProcessGroup, dict[Room, Mailboxes]] = WeakKeyDictionary()
_REASONS: WeakKeyDictionary[dist.ProcessGroup, str] = WeakKeyDictionary()


def peer_memory(group: dist.ProcessGroup, count: int, dtype: torch.dtype) -> PeerMemory:
    """The group's memory for `count` elements. All ranks make it together, at the first call.

    Raises RuntimeError if it would have to be made while a CUDA graph is captured.
    """
    made = _MADE.setdefault(group, {})
    if (count, dtype) not in made:
        _not_captured()
        made[count, dtype] = PeerMemory(group, count, dtype)
    return made[count, dtype]


def mailboxes(group: dist.ProcessGroup, room: Room) -> Mailboxes:
    """The group's mailboxes of this size. All ranks make them together, at the first call.

    Raises RuntimeError if they would have to be made while a CUDA graph is captured.
    """
    made = _BOXES.setdefault(group, {})
    if room not in made:
        _not_captured()
        made[room] = Mailboxes(group, room)
    return made[room]


def _not_captured() -> None:
    if torch.cuda.is_current_stream_capturing():
        raise RuntimeError("run the same call once before it is captured in a CUDA graph")


def known(group: dist.ProcessGroup) -> bool:
    """Whether `why_not` answers without a collective."""
    return group in _REASONS or collectives.transport(group, "cuda") != "nccl"


def why_not(group: dist.ProcessGroup) -> str:
    """Why the ranks of `group` cannot read each other's memory; "" if they can. All ranks get the
    same answer.

    The first call for a group is a collective, which tries to do it.
    """
    if group not in _REASONS:
        over = collectives.transport(group, "cuda") or collectives.transport(group, "cpu")
        if over != "nccl":
            return f"it needs a group over nccl, this one is over {over}"
        _REASONS[group] = _look(group) or _try(group)
    return _REASONS[group]


_LACKS = ("", "this torch has no symmetric memory", "TORCH_SYMMMEM chose another kind of memory")


def _lack(device: torch.device) -> int:
    """The index of the reason in `_LACKS` that applies to this process."""
    try:
        from torch._C._distributed_c10d import _SymmetricMemory

        backend = _SymmetricMemory.get_backend(device)
    except (ImportError, AttributeError):
        return 1
    # NVSHMEM frees its memory in a collective, and NCCL's memory may have no addresses.
    return 2 * (backend != "CUDA")


def _look(group: dist.ProcessGroup) -> str:
    """Why the ranks' settings, hosts or GPUs do not allow it; "" if they do."""
    device = torch.device("cuda", torch.cuda.current_device())
    said = torch.tensor([_lack(device), _host(), device.index], device=device)
    gathered, work = collectives.all_gather(said, group)
    work.wait()
    lacks, hosts, gpus = gathered.T.tolist()
    if any(lacks):
        return _LACKS[max(lacks)]
    if len(set(hosts)) > 1:
        return "its ranks are on several hosts"
    if len(set(gpus)) < len(gpus):
        return "its ranks do not see GPUs of different numbers"
    return ""


def _host() -> int:
    """A number that is the same for all processes of a host, and differs between hosts."""
    boot = Path("/proc/sys/kernel/random/boot_id")
    name = socket.gethostname() + (boot.read_text() if boot.exists() else "")
    return int.from_bytes(hashlib.sha256(name.encode()).digest()[:7], "big")


def _try(group: dist.ProcessGroup) -> str:
    """Why a trial failed, in which each rank reads from all ranks; "" if it succeeded."""
    world_size, device = dist.get_world_size(group), torch.cuda.current_device()
    # Each rank allocates alone first. If one rank failed later, the others would wait for it.
    alone, why = _made(lambda: _allocate((3, 64), torch.int64, torch.device("cuda", device)), group)
    if alone is not None:
        memory, why = _made(lambda: PeerMemory(group, 64, torch.int64), group)
    if why:
        return "symmetric memory cannot be set up on its GPUs" + why
    mine = torch.full((64,), dist.get_rank(group), dtype=torch.int64, device=device)
    seen = mine.new_empty(world_size, 64)
    memory.exchange(lambda part: part.copy_(mine), lambda parts: torch.stack(parts, out=seen))()
    wrong = seen.T.tolist() != [[*range(world_size)]] * 64
    return "its GPUs do not read what their peers wrote" * _any(wrong, group)


def _made(make: Callable[[], Any], group: dist.ProcessGroup) -> tuple[Any, str]:
    """What `make` returns and "", or None and a reason if it fails on any rank."""
    made, why = None, " of other ranks"
    try:
        made = make()
    except Exception as failed:  # whatever it is, this memory is optional
        why = f" ({failed})"
    return (None, why) if _any(made is None, group) else (made, "")


def _any(here: bool, group: dist.ProcessGroup) -> bool:
    """Whether `here` is true on any rank."""
    flag = torch.tensor([int(here)], device=torch.cuda.current_device())
    return bool(collectives.all_reduce(flag, group).item())
