"""Operators over many GPUs against one: `torchrun --nproc-per-node 4 -m tests.nccl`.

Random packings, contiguous, zig-zag and shuffled ranges, every exchange, groups of 2 to all ranks:
o, states, every gradient and the convolution on every rank. NCCL where each rank has a GPU (fp64 on
the torch stages, fp32 on the kernels), else gloo (fp64 only).
"""

from __future__ import annotations

import os
import random
from itertools import pairwise

import torch
import torch.distributed as dist

from fla_cp import build_cp_context, causal_conv1d, zigzag_token_ranges
from tests.cases import Case
from tests.running import run, run_sharded

PACKINGS = 24
SCHEMES = ("all_gather", "ring", "scan", "heads")
BUDGET = {torch.float64: 1e-9, torch.float32: 1e-4}


def token_ranges(kind: int, T: int, R: int, rng: random.Random) -> list | None:
    if kind == 0:
        return None
    if kind == 1:
        return zigzag_token_ranges(T, R)
    edges = [0, *sorted(rng.choices(range(T + 1), k=2 * R - 1)), T]
    pieces = list(pairwise(edges))
    rng.shuffle(pieces)
    return [pieces[r::R] for r in range(R)]


def relative(actual: torch.Tensor, exact: torch.Tensor) -> float:
    if not actual.numel():
        return 0.0
    return ((actual - exact).abs().max() / exact.abs().max().clamp(min=1e-3)).item()


def worst_error(
    group: dist.ProcessGroup, device: str, trial: int, dtype: torch.dtype, impl: str
) -> float:
    """Largest relative error of this rank on one packing."""
    rng, R = random.Random(trial), dist.get_world_size(group)
    T = rng.choice([5, 64, 130, 300, R])
    cu = (0, *sorted(rng.choices(range(T + 1), k=rng.choice([0, 1, 3]))), T)
    case = Case("random", T=T, H=2, HV=4, K=16, V=16, decay=0.1, cu_seqlens=cu)
    context = build_cp_context(
        torch.tensor(cu, device=device),
        group,
        token_ranges=token_ranges(trial % 3, T, R, rng),
        exchange=SCHEMES[trial // 3 % len(SCHEMES)],
        conv1d_kernel_size=4,
        check=True,
    )
    whole = run(case, device=device)
    mine = run_sharded(case, context, dtype, impl, device)
    errors = [relative(mine[n], t if "state" in n else context.shard(t)) for n, t in whole.items()]
    x, dy = torch.randn(2, 1, T, 7, generator=torch.Generator().manual_seed(trial)).to(device)
    weight = torch.linspace(-1, 1, 28, device=device).view(7, 4)
    leaf, local = x.requires_grad_(), context.shard(x.detach()).requires_grad_()
    y = causal_conv1d(leaf, weight, None, "silu", torch.tensor(cu, device=device))
    y_local = causal_conv1d(local, weight, None, "silu", cp_context=context)
    dx = torch.autograd.grad(y, leaf, dy)[0]
    dx_local = torch.autograd.grad(y_local, local, context.shard(dy))[0]
    conv = max(relative(y_local, context.shard(y)), relative(dx_local, context.shard(dx)))
    assert conv <= 1e-5, f"convolution of packing {trial}: {conv:.1e}"
    return max(errors)


def main() -> None:
    rank, local = int(os.environ["RANK"]), int(os.environ["LOCAL_RANK"])
    cuda = torch.cuda.device_count() >= int(os.environ["LOCAL_WORLD_SIZE"])
    device = f"cuda:{local}" if cuda else "cpu"
    if cuda:
        torch.cuda.set_device(local)
        dist.init_process_group("nccl", device_id=torch.device(device))
    else:
        dist.init_process_group("gloo")
    sizes = range(2, dist.get_world_size() + 1)
    groups = {R: dist.new_group(list(range(R))) for R in sizes}
    kinds = [(torch.float64, "torch"), (torch.float32, "triton")][: 2 if cuda else 1]
    for dtype, impl in kinds:
        for R, group in groups.items():
            mine = 0.0
            if rank < R:
                for trial in range(PACKINGS):
                    mine = max(mine, worst_error(group, device, trial, dtype, impl))
            worst = torch.tensor([mine], dtype=torch.float64, device=device)
            dist.all_reduce(worst, op=dist.ReduceOp.MAX)
            if rank == 0:
                print(
                    f"{impl} {R} ranks, {PACKINGS} packings: worst {worst.item():.1e}", flush=True
                )
            assert worst.item() <= BUDGET[dtype]
    groups.clear()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
