"""All torch.distributed communication of the package."""

from typing import Any, Protocol

import torch
import torch.distributed as dist
from torch import Tensor


class Waitable(Protocol):
    def wait(self) -> object: ...


def all_gather(x: Tensor, group: dist.ProcessGroup) -> tuple[Tensor, Waitable]:
    """The x of all ranks, [R, *x.shape], and the work to wait for before the result is read."""
    out = x.new_empty(dist.get_world_size(group), *x.shape)
    # torch 2.13 renames the call and warns about the old name
    gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
    work = gather(out.view(-1), x.contiguous().view(-1), group=group, async_op=True)
    return out, work


gather_numbers = all_gather
"""The all-gather of agreement.py. It has its own name so that tests can tell it apart."""


def all_reduce(x: Tensor, group: dist.ProcessGroup) -> Tensor:
    """Sum of x over the ranks, in place."""
    dist.all_reduce(x, group=group)
    return x


def all_to_all(
    rows: Tensor, send: list[int], receive: list[int], group: dist.ProcessGroup
) -> tuple[Tensor, Waitable]:
    """Sends the first send[0] of rows [sum(send), D] to rank 0, the next send[1] to rank 1, and so
    on. Returns the rows that arrive, [sum(receive), D] in rank order, and the work to wait for.

    The rows travel as bytes, so that every dtype works with every transport.
    """
    wire = rows.contiguous().view(torch.uint8)
    out = wire.new_empty(sum(receive), wire.shape[1])
    work = dist.all_to_all_single(out, wire, receive, send, group=group, async_op=True)
    return out.view(rows.dtype), work


def send_and_receive(
    sends: list[tuple[Tensor, int]], receives: list[tuple[Tensor, int]], group: dist.ProcessGroup
) -> list[dist.Work]:
    """Starts to exchange messages with single ranks, each given as (tensor, rank in the group).
    Returns the works to wait for."""
    ops = [dist.P2POp(dist.isend, x, group=group, group_peer=peer) for x, peer in sends]
    ops += [dist.P2POp(dist.irecv, x, group=group, group_peer=peer) for x, peer in receives]
    # NCCL warns about messages outside a batch, so a single message is a batch too.
    return dist.batch_isend_irecv(ops) if ops else []


def transport(group: dist.ProcessGroup, kind: str) -> str:
    """The name of the backend with which the group sends tensors from devices of this kind ("cpu",
    "cuda"): "nccl", "gloo" or another of torch's names. "" if it can send none from there.

    The group's own name does not tell, if it was made without a backend or with one for each kind
    of device.
    """
    if kind not in {device.type for device in group._device_types}:
        return ""
    name: str = group._get_backend(torch.device(kind)).name()
    return name


def wire_device(group: dist.ProcessGroup, device: torch.device) -> torch.device:
    """The device from which tensors are sent: `device`, unless the group sends none from there but
    sends from GPUs; then the current GPU."""
    if not transport(group, device.type) and transport(group, "cuda"):
        return torch.device("cuda", torch.cuda.current_device())
    return device


# Collectives for torch.compile, which traces them and decides when to wait.


def traced_all_gather(x: Tensor, world_size: int, group_name: str) -> Tensor:
    """The x of all ranks, [R, *x.shape]."""
    ops = torch.ops._c10d_functional
    out = ops.all_gather_into_tensor(x.contiguous(), world_size, group_name)
    return ops.wait_tensor(out).view(world_size, *x.shape)


def traced_all_reduce(x: Tensor, group_name: str) -> Tensor:
    """The sum of x over the ranks."""
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
    """The x [n, D] of all ranks as [R * n, D]. Differentiable: each rank gets the gradients of its
    own rows, summed over all ranks."""
    rows: Tensor = _GatherRows.apply(x, world_size, group_name)
    return rows
