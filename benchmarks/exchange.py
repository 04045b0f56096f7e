"""Microseconds of one exchange of states and of its parts, by scheme, eager and in a CUDA graph.

    python -m benchmarks.exchange RANKS [--out FILE.json]

One document over as many GPUs of this host, 32 heads, K = V = 128: each rank's median of 60. Every
call is launched from Python between two events, so that launches are part of the eager figures.
"symmetric" passes the state from rank to rank, "symmetric, reads" reads the peers' maps.
"""

from __future__ import annotations

import argparse
import json
import statistics
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing as multiprocessing

from benchmarks import units
from benchmarks.ops import environment

HV, K, V = 32, 128, 128


def microseconds(f: Callable[[], object], count: int = 60) -> float:
    for _ in range(5):
        f()
    torch.cuda.synchronize()
    dist.barrier()
    torch.cuda.synchronize()
    marks = []
    for _ in range(count):
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        begin.record()
        f()
        end.record()
        marks.append((begin, end))
    torch.cuda.synchronize()
    return round(1e3 * statistics.median(a.elapsed_time(b) for a, b in marks), 1)


def measure(rank: int, R: int) -> dict[str, Any]:
    import fla_cp.kernels.triton.backend  # noqa: F401, chooses ptxas
    from fla_cp.comm import SlotMaps, collectives, exchange, peer_memory
    from fla_cp.comm.affine import Fold
    from fla_cp.comm.exchange.base import fold_wires, pack
    from fla_cp.kernels.triton.exchange import fold
    from fla_cp.partition.slots import link_slots

    group = dist.group.WORLD
    links = link_slots((0, R * 10), tuple(((10 * r, 10 * r + 10),) for r in range(R)))
    maps = SlotMaps(
        torch.randn(1, HV, K, K, device="cuda") / K**0.5, torch.randn(1, HV, K, V, device="cuda")
    )
    wire = pack(maps, links)
    wires = wire.new_empty(R, *wire.shape).normal_() / K**0.5
    found: dict[str, Any] = {
        "ranks": R,
        "rank": rank,
        "pack": microseconds(lambda: pack(maps, links)),
        "fold": microseconds(lambda: fold_wires(wires, links, rank, maps.offset, fold)),
        "all_gather alone": microseconds(lambda: collectives.all_gather(wire, group)[1].wait()),
    }
    schemes: dict[str, tuple[exchange.Exchange, Fold]]
    schemes = {"all_gather": (exchange.AllGather(group), fold)}
    if reason := peer_memory.why_not(group):
        found["no symmetric"] = reason
    else:  # with the backend's fold in one kernel; with another it reads the peers' maps
        schemes["symmetric"] = exchange.Symmetric(group), fold
        schemes["symmetric, reads"] = exchange.Symmetric(group), fold.fold
    states = {}
    for name, (scheme, by) in schemes.items():

        def call(scheme: exchange.Exchange = scheme, by: Fold = by) -> torch.Tensor:
            return scheme.start(maps, links, by).wait()

        found[name] = microseconds(call)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            call()
        found[f"{name}, graph"] = microseconds(graph.replay)
        states[name] = call()
    found["equal"] = all(torch.equal(x, states["all_gather"]) for x in states.values())
    return found


def work(rank: int, R: int, store: str, out: Path | None) -> None:
    torch.cuda.set_device(rank)
    device = torch.device("cuda", rank)
    dist.init_process_group(
        "nccl", init_method=f"file://{store}", rank=rank, world_size=R, device_id=device
    )
    rows: list[Any] = [None] * R
    dist.all_gather_object(rows, measure(rank, R))
    if rank == 0:
        print("\n".join(map(str, rows)))
        if out is not None:
            result = environment() | {"unit": units.EXCHANGE, "rows": rows}
            out.write_text(json.dumps(result, indent=1) + "\n")
    dist.destroy_process_group()


def main() -> None:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.exchange", description=__doc__, allow_abbrev=False
    )
    parser.add_argument("ranks", type=int)
    parser.add_argument("--out", type=Path)
    args = parser.parse_args()
    if args.ranks > torch.cuda.device_count():
        raise SystemExit(f"{args.ranks} ranks need as many GPUs, got {torch.cuda.device_count()}")
    with tempfile.TemporaryDirectory() as folder:
        call = (args.ranks, f"{folder}/store", args.out)
        multiprocessing.spawn(work, call, nprocs=args.ranks)


if __name__ == "__main__":
    main()
