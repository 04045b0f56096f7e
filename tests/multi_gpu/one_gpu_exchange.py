"""The exchange between neighbours on one GPU: its flags really wait, and every result is compared.

    python -m tests.multi_gpu.one_gpu_exchange [--sweep | --processes 2 | --alone]

Ranks are streams of one process, and the memory of all of them is on this GPU, so nothing crosses a
link. A result must equal that of the fold kernel up to rounding; how many differ in a bit is
printed. The times are those of the kernels and their flags without a link. --sweep: times with
other tiles, too. --processes: ranks are processes that share the GPU, with torch's symmetric
memory; the GPU switches between them, so this is not timed. --alone: a rank whose peer never comes
must end with an error, here after 0.2 s.
"""

from __future__ import annotations

import argparse
import os
import random
import statistics
import sys
import tempfile
import threading
import time
from collections.abc import Callable

os.environ.setdefault("CUDA_DEVICE_MAX_CONNECTIONS", "32")  # a queue for each stream
os.environ.setdefault("TORCH_SYMM_MEM_ALLOW_OVERLAPPING_DEVICES", "1")
os.environ.setdefault("TORCH_SYMM_MEM_DISABLE_MULTICAST", "1")

import torch
import torch.distributed as dist
import torch.multiprocessing as multiprocessing
import triton.language as tl

import fla_cp.kernels.triton.backend  # noqa: F401, chooses ptxas
from fla_cp.comm import Links, SlotMaps, Symmetric
from fla_cp.comm.exchange.base import fold_slots
from fla_cp.comm.exchange.symmetric import crossing
from fla_cp.kernels.triton import exchange
from tests.support.closeness import assert_within_budget
from tests.support.one_memory import Neighbours, drawn, entering, in_line

SECONDS = 240
"""After so long the program ends with an error, since a kernel may wait in vain."""

SCALES = [2.0**n for n in range(-5, 6)]
"""Of offsets. Powers of two give exactly scaled results."""


def end_late() -> None:
    def end() -> None:
        print(f"error: not done after {SECONDS} s: kernels wait in vain", flush=True)
        os._exit(1)

    timer = threading.Timer(SECONDS, end)
    timer.daemon = True
    timer.start()


def folded(links: Links, maps: list[SlotMaps]) -> list[torch.Tensor]:
    """The states that enter the ranks, by the fold kernel, as after an all-gather."""
    every = SlotMaps(
        torch.cat([m.transition for m in maps if m.transition is not None]),
        torch.cat([m.offset for m in maps]),
    )
    found = [fold_slots(every, links, r, maps[r].offset, exchange.fold) for r in range(len(maps))]
    exact, plain = (entering(links, maps, dtype) for dtype in (torch.float64, torch.float32))
    for rank, (x, want, usual) in enumerate(zip(found, exact, plain, strict=True)):
        assert_within_budget(f"fold, rank {rank}", x, want, usual)
    return found


def unequal(found: torch.Tensor, want: torch.Tensor, where: str) -> int:
    """Whether a result has other bits; fails if it differs by more than rounding."""
    error, largest = (found - want).abs().max(), want.abs().max()
    assert error <= 2.0**-18 * largest, f"{where}: differs by {error:.1e}, largest {largest:.1e}"
    return int(not torch.equal(found, want))


def loaded() -> None:
    """Runs torch's kernels once. CUDA loads a kernel at its first launch, and may wait for all that
    run; these may be waiting for what the host launches next."""
    x = torch.zeros(2, 100, device="cuda")
    torch.cuda._sleep(10)
    x[0].copy_(x[1])
    x.fill_(torch.nan)
    torch.cuda.synchronize()


def compiled(ranks: Neighbours, links: Links, maps: list[SlotMaps]) -> None:
    """Runs all kernels once, one after the other: nothing is compiled while others wait."""
    for way in (links, links.mirrored()):
        for rank in way.owner:
            ranks.run(rank, way, maps[rank], torch.empty_like(maps[rank].offset))
    torch.cuda.synchronize()


def many(R: int, shape: tuple[int, int, int], cuts: tuple[int, ...], count: int = 200) -> None:
    """Exchanges in random directions, on ranks that sleep now and then and run ahead."""
    device, rng = torch.device("cuda"), random.Random(R)
    links = in_line(R, *cuts)
    ways = links, links.mirrored()
    maps = drawn(R, *shape, device)
    exact = [folded(way, maps) for way in ways]
    given = [[m._replace(offset=m.offset * x) for m in maps] for x in SCALES]
    ranks = Neighbours(R, *shape, device)
    compiled(ranks, links, maps)
    turns = [(rng.randrange(2), rng.randrange(len(SCALES))) for _ in range(count)]
    out = torch.full((count, R, 1, *shape), torch.nan, device=device)
    streams = [torch.cuda.Stream() for _ in range(R)]
    torch.cuda.synchronize()
    todo = [r for r in range(R) for _ in range(count)]
    rng.shuffle(todo)  # so that the host is ahead with some ranks
    done = [0] * R
    for rank in todo:
        n = done[rank]
        done[rank] += 1
        way, scale = turns[n]
        with torch.cuda.stream(streams[rank]):
            if rng.random() < 0.3:
                torch.cuda._sleep(rng.randrange(200_000))
            ranks.run(rank, ways[way], given[scale][rank], out[n, rank])
    torch.cuda.synchronize()
    other = sum(
        unequal(out[n, rank], exact[way][rank] * SCALES[scale], f"exchange {n}, rank {rank}")
        for n, (way, scale) in enumerate(turns)
        for rank in range(R)
    )
    what = f"{count} exchanges of {R} ranks, HV, K, V = {shape}, cuts {cuts}"
    print(f"{what}: right, {other} results with other bits", flush=True)


def replays(R: int, shape: tuple[int, int, int]) -> None:
    """Graphs of three exchanges, replayed, with others between the replays."""
    device, links = torch.device("cuda"), in_line(R)
    ways = links, links.mirrored()
    maps = drawn(R, *shape, device)
    exact = [folded(way, maps) for way in ways]
    ranks = Neighbours(R, *shape, device)
    compiled(ranks, links, maps)
    out = torch.full((50, 4, R, 1, *shape), torch.nan, device=device)
    now = [[torch.empty_like(m.offset) for _ in range(3)] for m in maps]
    streams, graphs = [torch.cuda.Stream() for _ in range(R)], []
    for rank in range(R):
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            for i, x in enumerate(now[rank]):
                ranks.run(rank, ways[i % 2], maps[rank], x)
        graphs.append(graph)
    torch.cuda.synchronize()
    for n in range(len(out)):
        for rank in reversed(range(R)):
            with torch.cuda.stream(streams[rank]):
                graphs[rank].replay()
                for i, x in enumerate(now[rank]):
                    out[n, i, rank].copy_(x)
                    x.fill_(torch.nan)
                ranks.run(rank, ways[n % 2], maps[rank], out[n, 3, rank])
    torch.cuda.synchronize()
    other = sum(
        unequal(out[n, i, r], exact[n % 2 if i == 3 else i % 2][r], f"replay {n}, {i}, rank {r}")
        for n in range(len(out))
        for i in range(4)
        for r in range(R)
    )
    what = f"{len(out)} replays of {R} ranks, with exchanges between them"
    print(f"{what}: right, {other} results with other bits", flush=True)


def median_us(f: Callable[[], object], count: int = 20) -> float:
    times = []
    for _ in range(count):
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        begin.record()
        f()
        end.record()
        torch.cuda.synchronize()
        times.append(1e3 * begin.elapsed_time(end))
    return statistics.median(times)


REPEATS = 20
TILE = "ROWS", "COLUMNS", "WARPS", "APART"


def times(R: int, shape: tuple[int, int, int]) -> str:
    """Microseconds of one exchange of ranks that start together, in a graph of REPEATS of them, and
    the host's for one launch."""
    device, links = torch.device("cuda"), in_line(R)
    maps, ranks = drawn(R, *shape, device), Neighbours(R, *shape, device)
    out = [torch.empty_like(m.offset) for m in maps]
    compiled(ranks, links, maps)
    streams = [torch.cuda.Stream() for _ in range(R)]

    def together(run: Callable[[int], object]) -> float:
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            main = torch.cuda.current_stream()
            for _ in range(REPEATS):
                for rank, stream in enumerate(streams):
                    stream.wait_stream(main)
                    with torch.cuda.stream(stream):
                        run(rank)
                for stream in streams:
                    main.wait_stream(stream)
        graph.replay()
        return median_us(graph.replay) / REPEATS

    took = together(lambda rank: ranks.run(rank, links, maps[rank], out[rank]))
    empty = together(lambda rank: out[rank][:1, :1, :1, :1].zero_())
    ranks = Neighbours(R, *shape, device)
    torch.cuda.synchronize()
    # alone and in the direction of the states, nobody waits
    (first,) = links.table(crossing(0), torch.int32, device)
    begin = time.perf_counter()
    for _ in range(2):
        mail = ranks.boxes[False][0]
        exchange.pass_on(maps[0].transition, maps[0].offset, first, mail, out[0])
    host = (time.perf_counter() - begin) / 2
    torch.cuda.synchronize()
    return (
        f"{R} ranks, HV, K, V = {shape}: {took:.1f} us an exchange; as many empty kernels "
        f"{empty:.1f} us; {1e6 * host:.1f} us of the host a launch"
    )


def alone() -> int:
    """Runs the second rank without the first."""
    exchange.LIMIT_NS = tl.constexpr(200 * 10**6)
    maps, ranks = drawn(2, 2, 128, 64, "cuda"), Neighbours(2, 2, 128, 64, "cuda")
    torch.cuda.synchronize()
    begin = time.perf_counter()
    try:
        ranks.run(1, in_line(2), maps[1], torch.empty_like(maps[1].offset))
        torch.cuda.synchronize()
    except RuntimeError as failed:
        took, what = time.perf_counter() - begin, str(failed).splitlines()[0]
        print(f"a rank alone failed after {took:.1f} s, as it should: {what}", flush=True)
        os._exit(0)  # the context is lost
    print("error: a rank alone did not fail")
    return 1


def process(rank: int, R: int, store: str) -> None:
    """One rank of `--processes`: many exchanges through torch's symmetric memory."""
    end_late()
    torch.cuda.set_device(0)
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=R)
    group, shape, rng = dist.group.WORLD, (8, 128, 64), random.Random(rank)
    assert group is not None
    links = in_line(R)
    ways = links, links.mirrored()
    maps = drawn(R, *shape, "cuda")
    exact = [folded(way, maps)[rank] for way in ways]
    found = []
    for n in range(200):
        if rng.random() < 0.3:
            torch.cuda._sleep(rng.randrange(200_000))
        scale = SCALES[n % len(SCALES)]
        mine = maps[rank]._replace(offset=maps[rank].offset * scale)
        found.append(Symmetric(group).start(mine, ways[n % 2], exchange.fold).wait())
    torch.cuda.synchronize()
    other = sum(
        unequal(x, exact[n % 2] * SCALES[n % len(SCALES)], f"rank {rank}, exchange {n}")
        for n, x in enumerate(found)
    )
    print(f"rank {rank} of {R} processes: {len(found)} right, {other} with other bits", flush=True)
    dist.barrier()
    dist.destroy_process_group()


def main() -> int:
    parser = argparse.ArgumentParser(
        prog="python -m tests.multi_gpu.one_gpu_exchange", allow_abbrev=False
    )
    parser.add_argument("--sweep", action="store_true", help="times with other tiles, too")
    parser.add_argument("--processes", type=int, default=0, help="ranks are so many processes")
    parser.add_argument("--alone", action="store_true", help="one rank, whose peer never comes")
    args = parser.parse_args()
    if not torch.cuda.is_available():
        print("error: this program needs a GPU, torch sees none")
        return 2
    if args.processes:
        with tempfile.TemporaryDirectory() as folder:
            given = (args.processes, f"{folder}/store")
            multiprocessing.spawn(process, given, nprocs=args.processes)
        return 0
    end_late()
    if args.alone:
        return alone()
    loaded()
    for R, cuts in ((2, ()), (4, ()), (4, (15,)), (4, (20,)), (3, (13, 17))):
        many(R, (16, 128, 128), cuts)
    for shape in ((2, 16, 16), (3, 24, 40), (4, 96, 64), (4, 256, 256), (40, 64, 128)):
        many(3, shape, (), count=60)
    for R in (2, 4):
        replays(R, (16, 128, 64))
    tiles = [tuple(getattr(exchange, name) for name in TILE)]
    if args.sweep:
        tiles += [(64, 32, 4, 3), (64, 16, 4, 2), (128, 32, 8, 2), (128, 16, 8, 2), (64, 64, 4, 2)]
    for tile in tiles:
        for name, value in zip(TILE, tile, strict=True):
            setattr(exchange, name, value)
        print(", ".join(f"{name} {value}" for name, value in zip(TILE, tile, strict=True)))
        for R, HV in ((2, 32), (3, 16), (4, 16), (4, 32)):
            print(times(R, (HV, 128, 128)), flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
