"""Starts the ranks; holds their device mesh, the collectives of a step, and the use of FSDP2.

The mesh has the axes (dp_replicate, dp_shard, cp). cp is innermost, so that a cp group lies on one
host where possible. A second mesh over the same ranks in the same order, (dp_replicate, fsdp),
joins dp_shard and cp into the one axis over which FSDP2 shards parameters.
"""

from __future__ import annotations

import datetime
import logging
import os
import shlex
import socket
import sys
import uuid
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard

from fla_cp.integrations.rates import shard_without_hooks
from fla_cp.nn import Router
from fla_cp.train import loopback, parent, restart
from fla_cp.train.config import ParallelConfig, UserError
from fla_cp.train.ending import say
from fla_cp.train.exit_codes import DIVERGED, FAILED, HUNG, MISTAKE
from fla_cp.train.language_model import LanguageModel, blocks_of
from fla_cp.train.meeting import meet
from fla_cp.train.progress import mark, waiting
from fla_cp.train.started import for_torchrun
from fla_cp.train.watch import watched

TRAIN = Path(__file__).resolve().with_name("main.py")
# Longer than any wait, since ranks also wait for rank 0 in --check-parity and while it plots.
# fla_cp/train/watch.py, which knows such phases, ends a hung run; the timeout of a collective
# cannot tell them from a hang.
HOST_TIMEOUT = datetime.timedelta(hours=2)

T = TypeVar("T")


def local_ranks() -> int:
    """Ranks on this host."""
    return int(os.environ.get("LOCAL_WORLD_SIZE", "1"))


def choose_device(wanted: str, ranks: int) -> str:
    """cpu or cuda for `ranks` ranks of this host. Raises UserError if cuda has too few GPUs."""
    gpus = torch.cuda.device_count() if torch.cuda.is_available() else 0
    if wanted == "cuda" and gpus < ranks:
        counts = f"{ranks} rank{'s' * (ranks != 1)}, {gpus} GPU{'s' * (gpus != 1)}"
        raise UserError(f"--device cuda needs a GPU per local rank: {counts}")
    if wanted == "auto":
        return "cuda" if gpus >= ranks else "cpu"
    return wanted


def launch(config: ParallelConfig, argv: Sequence[str]) -> int | None:
    """Starts the local ranks if this process has to; returns None if this process is a rank.

    Otherwise returns the exit code of the ranks that it started. Raises UserError if a launcher has
    started another number of ranks than cp * dp_shard * dp_replicate.
    """
    needed, started = config.world_size, int(os.environ.get("WORLD_SIZE", "1"))
    alone = "RANK" not in os.environ
    if started == needed and not (config.max_restarts and alone):
        return None
    if started > 1:
        raise UserError(_mismatch(config, started, argv))
    choose_device(config.device, needed)
    count = f"{needed} rank{'s' * (needed > 1)}"
    say(f"started as 1 process: launching {count} on this host ({config_product(config)})")
    return restart.repeat(lambda: _run_elastic(needed, argv), config.max_restarts)


def config_product(config: ParallelConfig) -> str:
    return f"cp {config.cp} x dp-shard {config.dp_shard} x dp-replicate {config.dp_replicate}"


def _mismatch(config: ParallelConfig, started: int, argv: Sequence[str]) -> str:
    needed, times = config.world_size, started // config.world_size
    counts = f"{needed} rank{'s' * (needed > 1)}, but {started} were started"
    if started == needed * times:
        return (
            f"{config_product(config)} needs {counts}; to use them all, give "
            f"--cp {config.cp * times} (together they share a sequence) or "
            f"--dp-shard {config.dp_shard * times} (each takes its own packs)"
        )
    hosts = int(os.environ.get("GROUP_WORLD_SIZE", "1"))
    spread = hosts > 1 and needed % hosts == 0
    nodes = f"--nnodes {hosts} " if spread else ""
    target = for_torchrun("fla-cp-train")
    command = f"torchrun {nodes}--nproc-per-node {needed // hosts if spread else needed} {target}"
    return f"{config_product(config)} needs {counts}; run:\n  {command} {shlex.join(argv)}".rstrip()


def _run_elastic(ranks: int, argv: Sequence[str]) -> int:
    from torch.distributed.elastic.multiprocessing.api import SignalException
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
    from torch.distributed.launcher.api import LaunchConfig, elastic_launch

    from fla_cp.train.torchrun import first_failure  # torch's launcher takes time to import

    # Variables that an outer launcher set for its own ranks would mislead ours.
    stale = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "ROLE_RANK", "ROLE_WORLD_SIZE")
    for name in list(os.environ):
        if name in stale or name.startswith(("MASTER_", "TORCHELASTIC_", "GROUP_", "ROLE_")):
            del os.environ[name]
    os.environ["OMP_NUM_THREADS"] = str(threads_per_rank(ranks))
    os.environ[parent.LAUNCHER] = str(os.getpid())
    loopback.register()
    # A failing rank prints its own traceback; the agent's table of ranks would add nothing.
    logging.getLogger("torch.distributed.elastic").setLevel(logging.CRITICAL)
    launcher = LaunchConfig(
        min_nodes=1,
        max_nodes=1,
        nproc_per_node=ranks,
        run_id=uuid.uuid4().hex,
        rdzv_backend=loopback.BACKEND,
        max_restarts=0,
        monitor_interval=0.2,
    )
    try:
        elastic_launch(launcher, sys.executable)(str(TRAIN), *argv)
    except ChildFailedError as error:
        rank, failure = first_failure(error)
        # a rank with one of these codes has printed the reason
        if failure.exitcode not in (FAILED, MISTAKE, DIVERGED, HUNG):
            print(f"rank {rank} ended with exit code {failure.exitcode}", file=sys.stderr)
        return failure.exitcode if failure.exitcode > 0 else 1
    except SignalException as error:
        return 128 + error.sigval
    return 0


def threads_per_rank(ranks: int) -> int:
    return max(1, len(os.sched_getaffinity(0)) // ranks)


@dataclass(frozen=True)
class Ranks:
    """The place of this process among the ranks, and the collectives that a step needs.

    mesh: axes (dp_replicate, dp_shard, cp). fsdp_mesh: (dp_replicate, fsdp), or (fsdp,) without
    replicas. cp_group: None if cp is 1. host_group: all ranks, for tensors on the CPU, so that
    agreeing on a number never waits for the GPU. reshard: as in `ParallelConfig`. at_end: called
    before the groups end, for what holds on to their messages.
    """

    rank: int
    world_size: int
    device: torch.device
    mesh: DeviceMesh
    fsdp_mesh: DeviceMesh
    cp_group: dist.ProcessGroup | None
    host_group: dist.ProcessGroup | None
    cp: int
    dp_rank: int
    dp: int
    dp_replicate: int
    reshard: str = "auto"
    at_end: list[Callable[[], None]] = field(default_factory=list, compare=False)

    def sum(self, values: Tensor) -> Tensor:
        """Element-wise sum over all ranks, in place, on the device."""
        if self.world_size > 1:
            on_gpu = self.device.type == "cuda"
            with waiting("sum (all-reduce over all ranks)", until_mark=on_gpu):
                dist.all_reduce(values)
        return values

    def host_gather(self, values: Sequence[int]) -> Tensor:
        """The values of all ranks, int64 [world, len(values)]."""
        mine = torch.tensor([list(values)], dtype=torch.int64, device="cpu")
        if self.world_size == 1:
            return mine
        rows = [torch.empty_like(mine) for _ in range(self.world_size)]
        with waiting("host_gather (all-gather over all ranks)"):
            dist.all_gather(rows, mine, group=self.host_group)
        return torch.cat(rows)

    def host_max(self, values: Sequence[float]) -> list[float]:
        """Element-wise maximum over all ranks."""
        mine = torch.tensor(list(values), dtype=torch.float64, device="cpu")
        if self.world_size > 1:
            with waiting("host_max (all-reduce over all ranks)"):
                dist.all_reduce(mine, dist.ReduceOp.MAX, group=self.host_group)
        return mine.tolist()

    def host_rows(self, values: Sequence[float]) -> list[list[float]]:
        """The values of each rank, float64, in the order of ranks."""
        mine = torch.tensor(list(values), dtype=torch.float64, device="cpu")
        rows = [mine]
        if self.world_size > 1:
            rows = [torch.empty_like(mine) for _ in range(self.world_size)]
            with waiting("host_rows (all-gather over all ranks)"):
                dist.all_gather(rows, mine, group=self.host_group)
        found: list[list[float]] = torch.stack(rows).tolist()
        return found

    def barrier(self) -> None:
        """Waits for all ranks, on the host."""
        if self.world_size > 1:
            with waiting("barrier of all ranks"):
                dist.barrier(group=self.host_group)

    def decide(self, decision: Callable[[], T]) -> T:
        """Calls `decision` on rank 0 alone and returns its result on all ranks. Collective.

        A UserError that it raises is raised on all ranks, with its class. Results and errors are
        pickled.
        """
        box: list[Any] = [None, None]
        if self.rank == 0:
            try:
                box[0] = decision()
            except UserError as error:
                box[1] = error
        if self.world_size > 1:
            with waiting("broadcast from rank 0"):
                dist.broadcast_object_list(box, src=0, group=self.host_group)
        value, refusal = box
        if refusal is not None:
            raise refusal
        return value

    def gather(self, value: str) -> list[str]:
        """The values of all ranks, in their order."""
        values = [value] * self.world_size
        if self.world_size > 1:
            with waiting("gather (all-gather over all ranks)"):
                dist.all_gather_object(values, value, group=self.host_group)
        return values

    def first_problem(self, problem: str) -> str:
        """The problem of the lowest rank that has one, on all ranks; "" if none has. Collective."""
        return next((text for text in self.gather(problem) if text), "")

    def alone(self) -> Ranks:
        """This device as a world of one rank. Collective: every rank must call it."""
        kind = self.device.type
        own = init_device_mesh(kind, (self.world_size, 1), mesh_dim_names=("rank", "fsdp"))["fsdp"]
        return Ranks(
            rank=0,
            world_size=1,
            device=self.device,
            mesh=own,
            fsdp_mesh=own,
            cp_group=None,
            host_group=None,
            cp=1,
            dp_rank=0,
            dp=1,
            dp_replicate=1,
            reshard="never",
        )


def check_ranks(cp: int, command: str, argv: Sequence[str]) -> None:
    """Raises UserError unless that many ranks were started. command: the installed one. argv: its
    arguments."""
    started = int(os.environ.get("WORLD_SIZE", "1"))
    if cp != started:
        raise UserError(
            f"--cp must be the number of ranks that were started, {started}, got {cp}; run "
            f"torchrun --nproc-per-node {cp} {for_torchrun(command)} {shlex.join(argv)}"
        )


@contextmanager
def joined(config: ParallelConfig) -> Iterator[Ranks]:
    """The ranks of this run. The process group exists until the end of the block."""
    kind = choose_device(config.device, local_ranks())
    rank, world = int(os.environ.get("RANK", "0")), int(os.environ.get("WORLD_SIZE", "1"))
    local = int(os.environ.get("LOCAL_RANK", "0"))
    device = torch.device(kind, local) if kind == "cuda" else torch.device("cpu")
    if kind == "cuda":
        torch.cuda.set_device(device)
    else:
        os.environ["OMP_NUM_THREADS"] = str(threads_per_rank(local_ranks()))
        torch.set_num_threads(threads_per_rank(local_ranks()))
    if world == local_ranks():
        loopback.stay_local()
    mark("start", step=0, first=True)
    # A single process meets nobody, so it needs neither an address nor a port.
    store = dist.HashStore() if world == 1 else meet(rank, world, config.rendezvous_seconds)
    limits = (config.notice_seconds, config.timeout_seconds)
    with watched(store, rank, world, *limits) as watch:
        dist.init_process_group(
            "nccl" if kind == "cuda" else "gloo",
            device_id=device if kind == "cuda" else None,
            timeout=HOST_TIMEOUT,
            store=dist.PrefixStore("group", store),
            rank=rank,
            world_size=world,
        )
        del store
        try:
            ranks = _with_groups(config, rank, world, device)
            yield ranks
            for end in ranks.at_end:
                end()
        except UserError:
            dist.destroy_process_group()  # all ranks raise the same UserError
            raise
        except BaseException as error:
            if watch is not None:
                watch.settle(error)
            # Over gloo, this makes the other ranks fail at once; over NCCL it could wait for them.
            if kind == "cpu":
                dist.destroy_process_group()
            raise
        if watch is not None:
            watch.close()
        dist.destroy_process_group()


def _with_groups(config: ParallelConfig, rank: int, world: int, device: torch.device) -> Ranks:
    kind = device.type
    sizes = (config.dp_replicate, config.dp_shard, config.cp)
    mesh = init_device_mesh(kind, sizes, mesh_dim_names=("dp_replicate", "dp_shard", "cp"))
    fsdp_mesh = init_device_mesh(
        kind,
        (config.dp_replicate, config.dp_shard * config.cp),
        mesh_dim_names=("dp_replicate", "fsdp"),
    )
    _lengthen(mesh, fsdp_mesh)
    return Ranks(
        rank=rank,
        world_size=world,
        device=device,
        mesh=mesh,
        fsdp_mesh=fsdp_mesh if config.dp_replicate > 1 else fsdp_mesh["fsdp"],
        cp_group=mesh.get_group("cp") if config.cp > 1 else None,
        host_group=dist.new_group(backend="gloo", timeout=HOST_TIMEOUT)
        if kind == "cuda"
        else dist.group.WORLD,
        cp=config.cp,
        dp_rank=rank // config.cp,
        dp=config.dp,
        dp_replicate=config.dp_replicate,
        reshard=config.reshard,
    )


def _lengthen(*meshes: DeviceMesh) -> None:
    """Sets HOST_TIMEOUT for the groups of the meshes; init_device_mesh takes none (torch 2.13).

    The default, 10 minutes over NCCL and 30 over gloo, counts from the start of a collective. A
    first step that compiles for longer on one rank would end the run.
    """
    for mesh in meshes:
        for group in mesh.get_all_groups():
            dist.distributed_c10d._set_pg_timeout(HOST_TIMEOUT, group)


def compute_dtype(name: str, device: torch.device) -> torch.dtype:
    """The dtype that --dtype asks for on this device."""
    if name == "auto":
        name = "bfloat16" if device.type == "cuda" else "float32"
    return getattr(torch, name)


KEPT_BYTES = 2**30
"""Gathered parameters of all blocks that take at most so many bytes stay until the backward, with
--parallel.reshard auto."""


def frees_after_forward(reshard: str, shards: int, size: int) -> bool:
    """Whether gathered parameters are freed after a block's forward. reshard: as in
    `ParallelConfig`. shards: ranks that share them. size: bytes of all, in the compute dtype."""
    return shards > 1 and size > KEPT_BYTES if reshard == "auto" else reshard == "always"


def shard_model(model: nn.Module, ranks: Ranks, dtype: torch.dtype) -> nn.Module:
    """Applies FSDP2 to the model in place, with one group for each block and one for the rest.

    model: a LanguageModel, or any model with `blocks`, with float32 parameters, on the meta device
    or with the same values on every rank (float64 for dtype float64, which only the reference of
    the parity check uses). The parameters stay float32 and are cast to `dtype` for compute. Those
    of `exact_parts` are not cast: of recurrent mixers' cores, since decay rates lose their meaning
    in bfloat16, and of routers, whose scores decide. They are small, and one group holds those of
    all blocks, which `gathered` gathers for a whole forward. Experts are sharded with their block,
    by expert. Gradients are sums over ranks, not means, in float32: the loss is already divided by
    the global number of targets.
    """
    widest = torch.promote_types(dtype, torch.float32)
    policy = MixedPrecisionPolicy(param_dtype=dtype, reduce_dtype=widest)
    exact = MixedPrecisionPolicy(param_dtype=torch.float32, cast_forward_inputs=False)
    # `gathered` takes the place of the hooks.
    if dtype != widest and isinstance(model, LanguageModel) and (parts := model.exact_parts()):
        shard_without_hooks(parts, ranks.fsdp_mesh, exact)
    shards = ranks.fsdp_mesh.size() // ranks.dp_replicate
    size = dtype.itemsize * sum(p.numel() for b in blocks_of(model) for p in b.parameters())
    frees = frees_after_forward(ranks.reshard, shards, size)
    for block in blocks_of(model):
        fully_shard(block, mesh=ranks.fsdp_mesh, mp_policy=policy, reshard_after_forward=frees)
    fully_shard(model, mesh=ranks.fsdp_mesh, mp_policy=policy)
    if ranks.fsdp_mesh.size() == 1:
        return model  # one rank sums nothing, but FSDP would divide all gradients by the factor
    for module in model.modules():
        if isinstance(module, FSDPModule):
            # Without the second call a factor of 1 asks for a pre-multiplied sum; gloo has none.
            module.set_gradient_divide_factor(1.0)
            module.set_force_sum_reduction_for_comms(True)
    return model


def exact_parts(blocks: Iterable[nn.Module]) -> list[nn.Module]:
    """The parts of blocks that stay float32: cores of recurrent mixers, and routers."""
    blocks = list(blocks)
    mixers = (block.get_submodule("mixer") for block in blocks)
    cores = [mixer.get_submodule("core") for mixer in mixers if hasattr(mixer, "core")]
    parts = (part for block in blocks for part in block.modules())
    return cores + [part for part in parts if isinstance(part, Router)]


@contextmanager
def gathered(cores: Sequence[nn.Module]) -> Iterator[None]:
    """Gathers the parameters of all cores, which are one group, for a forward and its backward."""
    group = cores[0] if cores and isinstance(cores[0], FSDPModule) else None
    if group is not None:
        group.unshard()
    yield
    if group is not None and not torch.is_grad_enabled():  # else the end of the backward does it
        group.reshard()


def describe(ranks: Ranks, dtype: torch.dtype) -> str:
    """One line about the ranks: their number, hardware, mesh and dtype."""
    if ranks.device.type == "cuda":
        what = f"{torch.cuda.get_device_name(ranks.device)}, NCCL"
    else:
        what = f"CPU, gloo, {torch.get_num_threads()} threads a rank"
    shape = dict(zip(ranks.mesh.mesh_dim_names or (), ranks.mesh.shape, strict=True))
    axes = " x ".join(f"{name} {size}" for name, size in shape.items())
    hosts = max(1, ranks.world_size // local_ranks())
    where = socket.gethostname() if hosts == 1 else f"{hosts} hosts"
    precision = str(dtype).removeprefix("torch.")
    count = f"{ranks.world_size} rank{'s' * (ranks.world_size > 1)}"
    return f"{count} on {where} ({what}), mesh {axes}, compute in {precision}"
