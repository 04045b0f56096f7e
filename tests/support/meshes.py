"""The trainer's ranks and meshes in a pool of processes, without a launcher."""

import functools

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh

from fla_cp.train.distributed import Ranks
from fla_cp.train.parse import parse


@functools.cache
def ranks_of(flags, rank):
    """The `Ranks` that `joined` would give for these flags, on the pool's existing process group.

    flags: --cp, --dp-shard and --dp-replicate, of which the product is the size of the whole pool.
    They are made once for each process of the pool.
    """
    p = parse(flags.split()).parallel
    sizes = (p.dp_replicate, p.dp_shard, p.cp)
    mesh = init_device_mesh("cpu", sizes, mesh_dim_names=("dp_replicate", "dp_shard", "cp"))
    names = ("dp_replicate", "fsdp")
    fsdp = init_device_mesh("cpu", (p.dp_replicate, p.dp_shard * p.cp), mesh_dim_names=names)
    return Ranks(
        rank=rank,
        world_size=p.world_size,
        device=torch.device("cpu"),
        mesh=mesh,
        fsdp_mesh=fsdp if p.dp_replicate > 1 else fsdp["fsdp"],
        cp_group=mesh.get_group("cp"),
        host_group=dist.group.WORLD,
        cp=p.cp,
        dp_rank=rank // p.cp,
        dp=p.dp,
        dp_replicate=p.dp_replicate,
    )


def ranks_over(mesh, rank, group=None):
    """The `Ranks` of a split without context parallelism whose FSDP mesh is `mesh`. group: for
    collectives on the host."""
    world = mesh.size()
    return Ranks(
        rank=rank,
        world_size=world,
        device=torch.device("cpu"),
        mesh=mesh,
        fsdp_mesh=mesh,
        cp_group=None,
        host_group=group,
        cp=1,
        dp_rank=rank,
        dp=world,
        dp_replicate=1,
    )


def shard_ranks(world, rank, group=None):
    """`ranks_over` a mesh of its own over all ranks of a world."""
    return ranks_over(init_device_mesh("cpu", (world,), mesh_dim_names=("fsdp",)), rank, group)
