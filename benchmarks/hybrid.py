"""A stack of hybrid layers, three recurrent and one of attention, over several ranks.

    python -m benchmarks.hybrid [--ranks 1,2,4] [--tokens 32768,131072] [--out FILE.json]
        [--patterns 'kda*3,mla;gdn*3,attention'] [--layouts zigzag] [--together 5]

A step is the forward and backward of the trainer's blocks, uncompiled, on one document over all
ranks, with contiguous ranges and with zig-zag ones; parameters are whole on every rank, and their
gradients are not summed. Every number of ranks runs in processes of its own over NCCL (gloo on a
machine without GPUs, at a small size). Times are medians of the slowest rank. "ratio" is one rank's
time for the same tokens over this one. "busy" is a rank's time without its waits for others, and
"balance" that of the slowest rank over the mean. Before anything is timed, the result and the
gradient of a short document are compared with one rank's.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import tempfile
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from benchmarks import units
from benchmarks.attention import LAYOUTS, STEPS, numbers, rank_times
from benchmarks.ops import environment
from fla_cp import FLACPContext, build_cp_context, zigzag_token_ranges
from fla_cp.train.config import ModelConfig
from fla_cp.train.mixers import CONV_SIZE
from fla_cp.train.model import build_model
from fla_cp.train.pattern import parse_pattern

PATTERNS = "kda*3,mla;gdn*3,attention"

CHECKED = 300
"""Tokens of the document whose results are compared."""

INPUT = 1e-3
"""Standard deviation of the input."""

MAX_ERROR = {torch.float32: 1e-4, torch.bfloat16: 5e-2}
"""Largest relative error with which times are printed: of four blocks in this dtype."""

Row = dict[str, Any]


def on_cuda() -> bool:
    return torch.cuda.is_available()


def blocks_of(pattern: str, device: str) -> nn.ModuleList:
    """One repetition of the pattern, with the weights of one seed on every rank."""
    mixers = parse_pattern(pattern)
    sizes = {"hidden_size": 2048, "num_heads": 16, "head_dim": 128}
    if not on_cuda():
        sizes = {"hidden_size": 32, "num_heads": 2, "head_dim": 16}
    config = ModelConfig(layers=len(mixers), pattern=pattern, **sizes)
    return build_model(config, 8, 0).blocks.to(device, dtype_of())


def dtype_of() -> torch.dtype:
    return torch.bfloat16 if on_cuda() else torch.float32


def context_of(T: int, layout: str, group: Any, device: str) -> FLACPContext:
    """Of one document. group: None for one rank."""
    offsets = torch.tensor([0, T])
    zigzag = layout == "zigzag" and group is not None
    return build_cp_context(
        offsets.to(device),
        group,
        conv1d_kernel_size=CONV_SIZE,
        cu_seqlens_cpu=offsets,
        token_ranges=zigzag_token_ranges(T, dist.get_world_size(group)) if zigzag else None,
    )


def drawn(T: int, device: str) -> list[Tensor]:
    """The input of the first block and the gradient of the result of the last, of all ranks.

    The input is small beside what fresh blocks add to it. Else it would hide their errors.
    """
    gen = torch.Generator(device).manual_seed(0)
    hidden = 2048 if on_cuda() else 32
    x, dy = (torch.randn(1, T, hidden, device=device, generator=gen) for _ in range(2))
    return [t.to(dtype_of()) for t in (x * INPUT, dy)]


def step_of(
    blocks: nn.ModuleList, context: FLACPContext, whole: list[Tensor]
) -> Callable[[], list[Tensor]]:
    """Forward and backward on this rank's tokens: gives the result, and the gradients of the input
    and of all parameters."""
    x, dy = (context.shard(t) for t in whole)
    x.requires_grad_()
    leaves = [x, *blocks.parameters()]

    def step() -> list[Tensor]:
        y = x
        for block in blocks:
            y, _ = block(y, context)
        return [y.detach(), *torch.autograd.grad(y, leaves, dy)]

    return step


def check(blocks: nn.ModuleList, layout: str, group: Any, device: str) -> None:
    """Raises SystemExit if result or gradient of the input differ from those of one rank."""
    whole = drawn(CHECKED, device)
    alone = step_of(blocks, context_of(CHECKED, layout, None, device), whole)()[:2]
    context = context_of(CHECKED, layout, group, device)
    found = step_of(blocks, context, whole)()[:2]
    for name, a, b in zip(("result", "gradient"), found, alone, strict=True):
        wanted = context.shard(b).float()
        error = ((a.float() - wanted).norm() / wanted.norm()).item()
        if not error <= MAX_ERROR[a.dtype]:
            raise SystemExit(f"the {name} differs from one rank's by {error:.1e}, {layout} ranges")


def measured(
    group: Any,
    device: str,
    tokens: list[int],
    patterns: list[str],
    layouts: Sequence[str] = LAYOUTS,
    together: int = STEPS,
) -> Iterator[Row]:
    """Rows of this number of ranks, the same on all. together: how many steps are timed as one."""
    R = dist.get_world_size(group)
    for pattern in patterns:
        blocks = blocks_of(pattern, device)
        for layout in LAYOUTS[:1] if R == 1 else layouts:  # one rank has all tokens in either
            check(blocks, layout, group, device)
            for T in tokens:
                yield {"pattern": pattern, "T": T, "ranks": R, "layout": layout} | times(
                    step_of(blocks, context_of(T, layout, group, device), drawn(T, device)),
                    T,
                    group,
                    device,
                    together,
                )


def times(
    step: Callable[[], object], T: int, group: Any, device: str, together: int = STEPS
) -> Row:
    """What a step takes, and the balance of the ranks. One rank may have too little memory."""
    if device != "cpu":
        torch.cuda.reset_peak_memory_stats()
    try:
        ms, wait = rank_times(step, device, together)
    except torch.OutOfMemoryError:  # with ranks of unequal work, the others would wait for it
        if dist.get_world_size(group) > 1:
            raise
        return {"error": "out of memory"}
    peak = 0.0 if device == "cpu" else torch.cuda.max_memory_allocated() / 2**30
    mine = torch.tensor([ms, ms - wait, peak], device=device)
    every = [torch.empty_like(mine) for _ in range(dist.get_world_size(group))]
    dist.all_gather(every, mine, group=group)
    slowest, busy, peaks = torch.stack(every).T.tolist()
    return {
        "ms": round(max(slowest), 3),
        "tokens_s": round(1e3 * T / max(slowest)),
        "busy_ms": round(max(busy), 3),
        "balance": round(max(busy) / statistics.mean(busy), 3),
        "peak_gib": round(max(peaks), 2),
    }


def with_ratios(rows: list[Row]) -> list[Row]:
    """Each row with one rank's time over its own, where both are known."""
    one = {(r["pattern"], r["T"]): r["ms"] for r in rows if r["ranks"] == 1 and "ms" in r}
    for row in rows:
        alone = one.get((row["pattern"], row["T"]))
        if alone is not None and "ms" in row:
            row["ratio"] = round(alone / row["ms"], 3)
    return rows


def work(rank: int, R: int, args: argparse.Namespace, folder: str) -> None:
    device = f"cuda:{rank}" if on_cuda() else "cpu"
    if on_cuda():
        torch.cuda.set_device(rank)
    torch.set_num_threads(max(1, (os.cpu_count() or 1) // R))
    dist.init_process_group(
        "nccl" if on_cuda() else "gloo",
        init_method=f"file://{folder}/store{R}",
        rank=rank,
        world_size=R,
        **({"device_id": torch.device(device)} if on_cuda() else {}),
    )
    rows = []
    given = args.tokens, args.patterns, args.layouts, args.together
    for row in measured(dist.group.WORLD, device, *given):
        rows.append(row)
        if rank == 0:
            print(json.dumps(row), flush=True)
            Path(folder, f"rows{R}.json").write_text(json.dumps(rows))
    dist.destroy_process_group()


def main() -> None:
    import torch.multiprocessing as multiprocessing

    gpus = torch.cuda.device_count()
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.hybrid", description=__doc__, allow_abbrev=False
    )
    ranks = [n for n in (1, 2, 4, 8) if n <= gpus] if gpus else [1, 2]
    parser.add_argument("--ranks", type=numbers, default=ranks)
    parser.add_argument("--tokens", type=numbers, default=[32768, 131072] if gpus else [512])
    parser.add_argument("--patterns", type=lambda s: s.split(";"), default=PATTERNS.split(";"))
    parser.add_argument("--layouts", type=lambda s: s.split(","), default=list(LAYOUTS))
    parser.add_argument("--together", type=int, default=STEPS, help="steps that are timed as one")
    parser.add_argument("--out", type=Path)
    args = parser.parse_args()
    rows: list[Row] = []
    for R in args.ranks:
        with tempfile.TemporaryDirectory() as folder:
            multiprocessing.spawn(work, (R, args, folder), nprocs=R)
            rows += json.loads(Path(folder, f"rows{R}.json").read_text())
        if args.out:
            found = {**environment(), "benchmark": "hybrid", "unit": units.HYBRID}
            found |= {"layouts": ",".join(args.layouts), "together": args.together}
            found["rows"] = with_ratios(rows)
            args.out.write_text(json.dumps(found, indent=1) + "\n")
    for row in with_ratios(rows):
        print(json.dumps(row), flush=True)


if __name__ == "__main__":
    main()
