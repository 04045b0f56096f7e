"""Memory that the ranks of one host can read from each other: torch's symmetric memory.

It is optional, and `why_not` finds out whether a group can have it. Reads are plain loads through
the peers' addresses. Multicast is not used, and no global setting is changed.
"""

import hashlib
import socket
from collections.abc import Callable
from pathlib import Path
from typing import Any
from weakref import WeakKeyDictionary

import torch
import torch.distributed as dist
from torch import Tensor

from fla_cp.comm import collectives

CAPTURED = 2
"""The part that captured exchanges write. Others write parts 0 and 1 in turn."""


class PeerMemory:
    """Three parts of `count` elements on each rank's GPU, which all ranks of the group read.

    The constructor is a collective in which the host waits. Eager exchanges run on a stream of
    their own and write two parts in turn. All ranks have then read a part before it is written
    again: exchange n+2 writes the part of n after the barrier of n+1, which each peer enters after
    its reads of n. A replayed CUDA graph always writes the part of its capture. Captured exchanges
    therefore have a third part, with a second barrier before it is written. An exchange under way
    is waited for before a graph is replayed.
    """

    def __init__(self, group: dist.ProcessGroup, count: int, dtype: torch.dtype):
        from torch._C._distributed_c10d import _SymmetricMemory

        self.device = torch.device("cuda", torch.cuda.current_device())
        with torch.inference_mode(False):  # the memory outlives a call
            self._mine = _allocate(count, dtype, self.device)
            self._handle = _SymmetricMemory.rendezvous(self._mine, group.group_name)
            ranks = range(dist.get_world_size(group))
            parts = [self._handle.get_buffer(r, (3, count), dtype).unbind() for r in ranks]
        self._parts = list(zip(*parts, strict=True))
        self._stream = torch.cuda.Stream(self.device, priority=-1)
        self._turn = 0

    def exchange(
        self, put: Callable[[Tensor], object], take: Callable[[tuple[Tensor, ...]], object]
    ) -> Callable[[], None]:
        """Starts put(this rank's part) and, when all ranks have done so, take(the parts of all).

        Both may only launch work and must not allocate. The call that is returned makes the current
        stream wait for them. Until then the caller must keep the tensors that they use.
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


def _allocate(count: int, dtype: torch.dtype, device: torch.device) -> Tensor:
    """Memory of its own. Tensors of symm_mem.empty may share memory, and then share its signals."""
    from torch._C._distributed_c10d import _SymmetricMemory

    return _SymmetricMemory.empty_strided_p2p((3, count), (count, 1), dtype, device)


_Memories = dict[tuple[int, torch.dtype], PeerMemory]
_MADE: WeakKeyDictionary[dist.ProcessGroup, _Memories] = WeakKeyDictionary()
_REASONS: WeakKeyDictionary[dist.ProcessGroup, str] = WeakKeyDictionary()


def peer_memory(group: dist.ProcessGroup, count: int, dtype: torch.dtype) -> PeerMemory:
    """The group's memory for `count` elements, made at the first call, by all ranks at once.

    Raises RuntimeError if it would have to be made while a CUDA graph is captured.
    """
    made = _MADE.setdefault(group, {})
    if (count, dtype) not in made:
        if torch.cuda.is_current_stream_capturing():
            raise RuntimeError("run the same call once before it is captured in a CUDA graph")
        made[count, dtype] = PeerMemory(group, count, dtype)
    return made[count, dtype]


def known(group: dist.ProcessGroup) -> bool:
    """Whether `why_not` answers without a collective."""
    return group in _REASONS or dist.get_backend(group) != "nccl"


def why_not(group: dist.ProcessGroup) -> str:
    """Why the ranks of `group` cannot read each other's memory; "" if they can. All get the same.

    The first call for a group is a collective, which tries it.
    """
    if dist.get_backend(group) != "nccl":
        return f"it needs a group over nccl, this one is over {dist.get_backend(group)}"
    if group not in _REASONS:
        _REASONS[group] = _look(group) or _try(group)
    return _REASONS[group]


_LACKS = ("", "this torch has no symmetric memory", "TORCH_SYMMMEM chose another kind of memory")


def _lack(device: torch.device) -> int:
    """Which of `_LACKS` applies to this process."""
    try:
        from torch._C._distributed_c10d import _SymmetricMemory

        backend = _SymmetricMemory.get_backend(device)
    except (ImportError, AttributeError):
        return 1
    # NVSHMEM frees its memory in a collective, and NCCL's memory may have no addresses.
    return 2 * (backend != "CUDA")


def _look(group: dist.ProcessGroup) -> str:
    """A reason in the ranks' settings, hosts or GPUs; "" if there is none."""
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
    boot = Path("/proc/sys/kernel/random/boot_id")
    name = socket.gethostname() + (boot.read_text() if boot.exists() else "")
    return int.from_bytes(hashlib.sha256(name.encode()).digest()[:7], "big")


def _try(group: dist.ProcessGroup) -> str:
    """A reason found by a trial, in which each rank reads from all ranks; "" if there is none."""
    world_size, device = dist.get_world_size(group), torch.cuda.current_device()
    # Each rank allocates alone first. If one rank failed later, the others would wait for it.
    alone, why = _made(lambda: _allocate(64, torch.int64, torch.device("cuda", device)), group)
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
