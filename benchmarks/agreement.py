"""What it costs that ranks compare their tables: microseconds of the host for a context.

    torchrun --nproc-per-node 4 -m benchmarks.agreement [--sequences 64] [--out FILE]

Over NCCL where CUDA is there, else over gloo. Each row builds a context and calls a convolution
under it that exchanges nothing else (documents end where ranks do), with check=False, None and
True; the first WATCHED calls over the group, which all wait, are gone before. `device` is the time
until the device has done it, too. Shared by all rows: the median of --repeats, rank 0's clock.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path

import torch
import torch.distributed as dist

from fla_cp import FLACPContext, build_cp_context, causal_conv1d
from fla_cp.comm.agreement import WATCHED

TOKENS, CHANNELS, WIDTH = 4096, 8, 4


def microseconds(
    f: Callable[[], object], group: dist.ProcessGroup, repeats: int, cuda: bool
) -> dict[str, float]:
    """Median time on the host for f, and median time until the device has finished it."""
    host, device = [], []
    for _ in range(repeats):
        dist.barrier(group)
        if cuda:
            torch.cuda.synchronize()
        start = time.perf_counter()
        f()
        host.append(1e6 * (time.perf_counter() - start))
        if cuda:
            torch.cuda.synchronize()
        device.append(1e6 * (time.perf_counter() - start))
    return {"host": statistics.median(host), "device": statistics.median(device)}


def measure(
    group: dist.ProcessGroup, device: torch.device, sequences: int, repeats: int
) -> dict[str, dict[str, float]]:
    """Microseconds of each row on this rank."""
    cuda, ranks = device.type == "cuda", dist.get_world_size(group)
    offsets = torch.arange(0, ranks * TOKENS + 1, TOKENS // sequences, dtype=torch.int32)
    x = torch.randn(1, TOKENS, CHANNELS, device=device)
    weight = torch.randn(CHANNELS, WIDTH, device=device)
    there, most = offsets.to(device), len(offsets) - 1

    def build(check: bool | None, **options: int) -> FLACPContext:
        return build_cp_context(there, group, cu_seqlens_cpu=offsets, check=check, **options)

    def used(check: bool | None) -> None:
        convolve(build(check, conv1d_kernel_size=WIDTH))

    def convolve(context: FLACPContext) -> None:
        causal_conv1d(x, weight, cp_context=context)

    for _ in range(WATCHED):
        used(None)
    kept = build(None, conv1d_kernel_size=WIDTH)
    compared, plain = (build(check, max_sequences=most) for check in (None, False))
    rows: dict[str, Callable[[], object]] = {
        **{f"build, check={c}": partial(build, c) for c in (False, None, True)},
        **{f"build and call, check={c}": partial(used, c) for c in (False, None, True)},
        "call under a context that was compared": lambda: convolve(kept),
        "update": lambda: compared.update(there, offsets),
        "update, check=False": lambda: plain.update(there, offsets),
    }
    return {name: microseconds(f, group, repeats, cuda) for name, f in rows.items()}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0], allow_abbrev=False)
    parser.add_argument("--sequences", type=int, default=64, help="documents a rank")
    parser.add_argument("--repeats", type=int, default=200)
    parser.add_argument("--out", type=Path)
    args = parser.parse_args()
    cuda = torch.cuda.is_available()
    device = torch.device("cuda", int(os.environ["LOCAL_RANK"])) if cuda else torch.device("cpu")
    if cuda:
        torch.cuda.set_device(device)
    else:
        torch.set_num_threads(1)
    dist.init_process_group("nccl" if cuda else "gloo")
    group = dist.group.WORLD
    assert group is not None
    found, ranks = measure(group, device, args.sequences, args.repeats), dist.get_world_size()
    if dist.get_rank() == 0:
        where = torch.cuda.get_device_name() if cuda else "CPU"
        print(f"{ranks} ranks, {where}, torch {torch.__version__}, {args.sequences} documents each")
        for name, times in found.items():
            print(f"{name:40} {times['host']:9.1f} us host {times['device']:9.1f} us device")
        if args.out:
            args.out.write_text(
                json.dumps({"ranks": ranks, "device": where, "us": found}, indent=1)
            )
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
