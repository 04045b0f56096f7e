"""All torch.distributed communication of the package."""

from typing import Any, Protocol

import torch
import torch.distributed as dist
from torch import Tensor


class Waitable(Protocol):
    def wait(self) -> object: ...


def all_gather(x: Tensor, group: dist.ProcessGroup) -> tuple[Tensor, Waitable]:
    """The x of all ranks, [R, *x.shape], and the work to wait for before it is read."""
    out = x.new_empty(dist.get_world_size(group), *x.shape)
    # torch 2.13 renames the call and warns about the old name
    gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
    work = gather(out.view(-1), x.contiguous().view(-1), group=group, async_op=True)
    return out, work


gather_numbers = all_gather
"""The all-gather of agreement.py, with a name of its own so that tests can tell it apart."""


def all_reduce(x: Tensor, group: dist.ProcessGroup) -> Tensor:
    """Sum of x over the ranks, in place."""
    dist.all_reduce(x, group=group)
    return x


def all_to_all(
    rows: Tensor, send: list[int], receive: list[int], group: dist.ProcessGroup
) -> tuple[Tensor, Waitable]:
    """Sends rows [sum(send), D] to the ranks by count; returns [sum(receive), D] in rank order.

    The rows travel as bytes, so that every dtype works with every transport.
    """
    wire = rows.contiguous().view(torch.uint8)
    out = wire.new_empty(sum(receive), wire.shape[1])
    work = dist.all_to_all_single(out, wire, receive, send, group=group, async_op=True)
    return out.view(rows.dtype), work


def send_and_receive(
    sends: list[tuple[Tensor, int]], receives: list[tuple[Tensor, int]], group: dist.ProcessGroup
) -> list[dist.Work]:
    """Starts to exchange (tensor, rank of the group) messages; returns the works to wait for."""
    ops = [dist.P2POp(dist.isend, x, group=group, group_peer=peer) for x, peer in sends]
    ops += [dist.P2POp(dist.irecv, x, group=group, group_peer=peer) for x, peer in receives]
    # NCCL warns about messages outside a batch, so a single message is a batch too.
    return dist.batch_isend_irecv(ops) if ops else []


def transport(group: dist.ProcessGroup, kind: str) -> str:
    """What carries the group's tensors on devices of this kind ("cpu", "cuda"): "nccl", "gloo" or
    another name of torch's; "" if nothing does.

    A group that was made without a name, or with one for each kind of device, has no name of its
    own that would tell.
    """
    if kind not in {device.type for device in group._device_types}:
        return ""
    name: str = group._get_backend(torch.device(kind)).name()
    return name


def wire_device(group: dist.ProcessGroup, device: torch.device) -> torch.device:
    """`device` if the group carries tensors from it, otherwise the current GPU if from that."""
    if not transport(group, device.type) and transport(group, "cuda"):
        return torch.device("cuda", torch.cuda.current_device())
    return device


# The collectives that torch.compile traces: the compiler decides when to wait for them.


def traced_all_gather(x: Tensor, world_size: int, group_name: str) -> Tensor:
    """[R, *x.shape] from all ranks."""
    ops = torch.ops._c10d_functional
    out = ops.all_gather_into_tensor(x.contiguous(), world_size, group_name)
    return ops.wait_tensor(out).view(world_size, *x.shape)


def traced_all_reduce(x: Tensor, group_name: str) -> Tensor:
    ops = torch.ops._c10d_functional
    return ops.wait_tensor(ops.all_reduce(x, "sum", group_name))


class _GatherRows(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, world_size: int, group_name: str) -> Tensor:
        ctx.group = world_size, group_name
        return traced_all_gather(x, world_size, group_name).flatten(0, 1)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:
        ops, (world_size, group_name) = torch.ops._c10d_functional, ctx.group
        mine = ops.reduce_scatter_tensor(grad.contiguous(), "sum", world_size, group_name)
        return ops.wait_tensor(mine), None, None


def all_gather_rows(x: Tensor, world_size: int, group_name: str) -> Tensor:
    """The x [n, D] of all ranks, as [R * n, D]. In the backward, each rank gets the gradients of
    its rows, summed over ranks."""
    rows: Tensor = _GatherRows.apply(x, world_size, group_name)
    return rows
