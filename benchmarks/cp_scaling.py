"""KDA over several GPUs: strong and weak scaling, of the operator and of one layer.

    python -m benchmarks.cp_scaling [--ranks 1,2,4] [--tokens 32768,131072] [--local 8192,32768]
        [--schemes auto,heads] [--peer fla] [--out FILE.json] [--trace TRACE.json]

Every number of ranks runs in processes of its own over NCCL (gloo on a machine without GPUs, at a
small size). Strong: `--tokens` in all; weak: `--local` a rank. Times are medians over steps of the
slowest rank; "exposed" is the time in which a stream waits for an exchange (`measure_exchange`);
efficiency is the time of one rank on a rank's share of the tokens over that of R ranks. "host" is
the time until a forward, or a forward and a backward, returns with its exchanges while nothing is
queued; beside it stands what the programs that a call replays hold (benchmarks/host.py).
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from benchmarks import host, units
from benchmarks.ops import environment
from benchmarks.shapes import Shape

HIDDEN = 4096
REPEATS, WARM = 3, 3
STEPS, SPAN_MS = (5, 20), 200.0
"""Least and most steps that are timed together, and about how long they should take: the host's
start and the ranks' are in it once."""
HOST_TOKENS = 32768
"""The most tokens of a rank with which the host's work is looked at. It does not grow with them,
but memory would: the programs' own stays taken meanwhile."""
TRACED = 5
"""Steps of a trace."""


def on_cuda() -> bool:
    return torch.cuda.is_available()


def synchronize() -> None:
    if on_cuda():
        torch.cuda.synchronize()


class Runs(NamedTuple):
    """A forward, and a forward with its backward."""

    forward: Callable[[], object]
    both: Callable[[], object]

    @classmethod
    def of(cls, run: Callable[[], Tensor], leaves: list[Tensor], dy: Tensor) -> Runs:
        return cls(run, lambda: torch.autograd.grad(run(), leaves, dy))


def local_inputs(shape: Shape, tokens: int, device: str) -> tuple[list[Tensor], dict[str, Tensor]]:
    dtype = torch.bfloat16 if on_cuda() else torch.float32

    def draw(*size: int, dtype: torch.dtype = dtype) -> Tensor:
        return torch.randn(*size, device=device).to(dtype).requires_grad_()

    H, HV, K, V = shape.H, shape.HV, shape.K, shape.V
    sizes = ((H, K), (H, K), (HV, V), (HV, K), (HV,))
    rates = {"A_log": draw(HV, dtype=torch.float32), "dt_bias": draw(HV * K, dtype=torch.float32)}
    return [draw(1, tokens, *s) for s in sizes], rates


def operator(shape: Shape, context: Any, device: str) -> Runs:
    from fla_cp import cp_chunk_kda

    packed, rates = local_inputs(shape, context.local_tokens, device)
    leaves = [*packed, *rates.values()]
    do = torch.randn_like(packed[2])

    def run() -> Tensor:
        return cp_chunk_kda(*packed, context, **rates, **shape.options)[0]

    return Runs.of(run, leaves, do)


def fla_operator(shape: Shape, cu: Tensor, group: Any, device: str) -> Runs:
    try:
        from fla.ops.cp import build_cp_context
        from fla.ops.kda import chunk_kda
    except ImportError as error:
        raise SystemExit(f"--peer fla needs fla-core 0.6.0 ({error})") from error
    context = build_cp_context(cu, group=group)
    packed, rates = local_inputs(shape, shape.T // dist.get_world_size(group), device)
    leaves = [*packed, *rates.values()]
    do = torch.randn_like(packed[2])

    def run() -> Tensor:
        return chunk_kda(
            *packed, **rates, **shape.options, cp_context=context, cu_seqlens=context.cu_seqlens
        )[0]

    return Runs.of(run, leaves, do)


def layer(shape: Shape, context: Any, device: str) -> Runs:
    from fla_cp.nn import KimiDeltaAttention

    hidden = HIDDEN if on_cuda() else 32
    dtype = torch.bfloat16 if on_cuda() else torch.float32
    module = KimiDeltaAttention(hidden, shape.H, shape.K, num_v_heads=shape.HV).to(device, dtype)
    module.core.float()  # as in the trainer; with rates in bf16, even one rank calls each module
    x = torch.randn(1, context.local_tokens, hidden, device=device, dtype=dtype).requires_grad_()
    dy = torch.randn_like(x)
    leaves = [x, *module.parameters()]
    return Runs.of(lambda: module(x, cp_context=context), leaves, dy)


def measure(step: Callable[[], object], group: Any) -> dict[str, float]:
    """Medians on the slowest rank: ms of a step and of the exchange that it waits for; peak GiB."""
    from fla_cp.comm import measure_exchange

    for _ in range(WARM):
        step()
    synchronize()
    started = time.perf_counter()
    step()
    synchronize()
    device = "cuda" if on_cuda() else "cpu"
    alone = torch.tensor(1e3 * (time.perf_counter() - started), device=device)
    dist.all_reduce(alone, dist.ReduceOp.MAX, group=group)  # the same number of steps on all ranks
    steps = min(max(STEPS[0], int(SPAN_MS / alone.item())), STEPS[1])
    if on_cuda():
        torch.cuda.reset_peak_memory_stats()
    times, waits = [], []
    for _ in range(REPEATS):  # the host runs ahead of the device, as in training
        dist.barrier(group)
        synchronize()
        started = time.perf_counter()
        for _ in range(steps):
            step()
        synchronize()
        times.append(1e3 * (time.perf_counter() - started) / steps)
        with measure_exchange() as timer:
            for _ in range(steps):
                step()
            synchronize()
            waits.append(timer.elapsed_ms() / steps)
    peak = torch.cuda.max_memory_allocated() / 2**30 if on_cuda() else 0.0
    worst = torch.tensor([statistics.median(times), statistics.median(waits), peak], device=device)
    dist.all_reduce(worst, dist.ReduceOp.MAX, group=group)
    ms, exposed, peak = worst.tolist()
    return {"ms": round(ms, 3), "exposed_ms": round(exposed, 3), "peak_gib": round(peak, 2)}


_MEASURED = {"": host.host_milliseconds, "steady_": host.steady_milliseconds}
"""Prefixes of names in a row, and what measures the host's time."""


def measure_host(runs: Runs, group: Any) -> dict[str, dict[str, Any]]:
    """For each direction, `host_ms` of the slowest rank, the same with the backward on the calling
    thread, both also for calls that follow each other, and what rank 0 says of its programs. All
    ranks call this together, since the calls exchange."""
    device, found = "cuda" if on_cuda() else "cpu", {}

    def of_slowest(measured: Callable, run: Callable[[], object]) -> float | None:
        mine = measured(run, device)
        if mine is None:
            return None
        slowest = torch.tensor(mine, device=device)
        dist.all_reduce(slowest, dist.ReduceOp.MAX, group=group)
        return round(slowest.item(), 3)

    for direction, run in runs._asdict().items():
        found[direction] = {}
        for name, measured in _MEASURED.items():
            found[direction][f"{name}host_ms"] = of_slowest(measured, run)
            if device == "cuda":
                with torch.autograd.set_multithreading_enabled(False):
                    found[direction][f"{name}one_thread_host_ms"] = of_slowest(measured, run)
        found[direction] |= host.facts(run, device)
    return found


def sent_bytes(shape: Shape, R: int, scheme: str) -> int:
    """Bytes that the busiest rank receives in a forward and a backward, for one document over all
    ranks.

    These are the bytes of the table in docs/design.md.
    """
    S, M = (4 * shape.HV * shape.K * n for n in (shape.V, shape.K))
    through = R > 2
    distances = [1 << n for n in range(max(R - 2, 0).bit_length())]  # the last but one receives
    with_map = sum(R - 2 - d >= d for d in distances)
    per_direction = {
        "all_gather": (R - 1) * (S + M * through),
        "ring": S if R > 1 else 0,
        "heads": (R - 1) * (S + M * through) // min(R, shape.HV) + (R - 1) * S // R,
        "scan": (len(distances) + (R > 1)) * S + with_map * M,
        "symmetric": (R - 1) * S + max(R - 2, 0) * M,
    }
    return 2 * per_direction[scheme]


HOST = 8
"""GPUs of a host."""

LATENCY_US, GB_S = (40.0, 50.0), (350.0, 45.0)
"""Of one collective or hop, and received by a GPU: within a host (measured on 4 H200s: 44 us empty,
66 us with 4 MiB a rank) and, assumed, between hosts (400 Gbit/s a GPU)."""

PEERS_US, PEERS_GB_S = 20.0, 300.0
"""Symmetric memory within a host, predicted: to put maps, a barrier (10 us), the start of reads; a
read of 8 MiB took 27 us. In a graph, with the fold, 2 and 4 ranks took 30 and 64."""

MESSAGE_US = 1.5
"""Of each further message of an all-to-all, assumed."""


def modelled_us(shape: Shape, R: int, scheme: str) -> float:
    """Microseconds of one exchange, for one direction of one layer."""
    if scheme == "symmetric":
        return PEERS_US + sent_bytes(shape, R, scheme) / 2 / PEERS_GB_S / 1e3
    far = int(R > HOST)
    rounds = {"all_gather": 1, "ring": R - 1, "heads": 2, "scan": max(R - 2, 0).bit_length() + 1}
    time = rounds[scheme] * LATENCY_US[far] + sent_bytes(shape, R, scheme) / 2 / GB_S[far] / 1e3
    if scheme == "ring":  # every hop carries the state
        time += (R - 2) * sent_bytes(shape, R, scheme) / 2 / GB_S[far] / 1e3
    if scheme == "heads":
        time += 2 * (R - 1) * MESSAGE_US
    return time


def model_table() -> str:
    schemes = ("all_gather", "ring", "scan", "heads", "symmetric")
    lines = [f"| ranks | {' | '.join(schemes)} |", "|---" * 6 + "|"]
    shape = Shape("model", 0)
    for R in (2, 4, 8, 16, 32, 64, 128, 256):
        found = {s: f"{modelled_us(shape, R, s):.0f}" for s in schemes}
        cells = (found[s] if s != "symmetric" or R <= HOST else "-" for s in schemes)
        lines.append(f"| {R} | {' | '.join(cells)} |")
    return "\n".join(lines)


def taken(context: Any) -> str:
    """The scheme that "auto" chooses here."""
    from fla_cp.comm import SymmetricOrGather, exchange, peer_memory

    if isinstance(context.exchange, SymmetricOrGather):
        return "all_gather" if peer_memory.why_not(context.group) else "symmetric"
    names = {scheme: name for name, scheme in exchange.SCHEMES.items()}
    return names.get(type(context.exchange), "all_gather")


def cases(args: argparse.Namespace, R: int) -> Iterator[tuple[str, int]]:
    for T in args.tokens:
        yield "strong", T
    for T in args.local:
        yield "weak", T * R


def work(rank: int, R: int, args: argparse.Namespace, folder: str) -> None:
    from fla_cp import build_cp_context

    if on_cuda():
        torch.cuda.set_device(rank)
    device = f"cuda:{rank}" if on_cuda() else "cpu"
    torch.set_num_threads(max(1, (os.cpu_count() or 1) // R))
    dist.init_process_group(
        "nccl" if on_cuda() else "gloo",
        init_method=f"file://{folder}/store{R}",
        rank=rank,
        world_size=R,
        **({"device_id": torch.device(device)} if on_cuda() else {}),
    )
    group, rows = dist.group.WORLD, []

    def keep(row: dict) -> None:
        rows.append(row)
        if rank == 0:
            print(json.dumps(row), flush=True)
            Path(folder, f"rows{R}.json").write_text(json.dumps(rows))

    for kind, T in cases(args, R):
        shape = Shape(f"{kind}-{T}", T, *args.heads, *args.dims)
        cu = torch.tensor([0, T])
        for scheme in args.schemes:
            context = build_cp_context(
                cu.to(device), group, conv1d_kernel_size=4, cu_seqlens_cpu=cu, exchange=scheme
            )
            for what, make in (("operator", operator), ("layer", layer)):
                try:
                    runs = make(shape, context, device)
                    found = measure(runs.both, group)
                    if context.local_tokens <= HOST_TOKENS:
                        found |= measure_host(runs, group)
                except torch.OutOfMemoryError:
                    found = {"error": "out of memory"}
                    runs = None
                row = {"op": what, "kind": kind, "T": T, "ranks": R, "scheme": scheme}
                used = taken(context) if scheme == "auto" else scheme
                keep({**row, **found, "used": used, "bytes": sent_bytes(shape, R, used)})
                if args.trace and runs is not None:
                    trace(runs.both, Path(args.trace).with_suffix(f".{what}.{R}.{T}.{rank}.json"))
                del runs
            if R == 1:
                break  # nothing is exchanged
        if args.peer and args.peer_tokens == T and R > 1:
            both = fla_operator(shape, cu.to(device), group, device).both
            keep({"op": "fla operator", "kind": kind, "T": T, "ranks": R, **measure(both, group)})
    dist.destroy_process_group()


def trace(step: Callable[[], object], path: Path) -> None:
    """A profiler trace of consecutive steps, for chrome://tracing, Perfetto or benchmarks.timeline.

    On a GPU it has no operators of the host, since recording them would delay the host.
    """
    from torch.profiler import ProfilerActivity, profile

    kind = ProfilerActivity.CUDA if on_cuda() else ProfilerActivity.CPU
    with profile(activities=[kind]) as recorded:
        recorded.add_metadata_json("steps", str(TRACED))
        for _ in range(TRACED):
            step()
        synchronize()
    recorded.export_chrome_trace(str(path))


def with_efficiency(rows: list[dict]) -> list[dict]:
    """Adds the efficiency to each row: one rank's time for T / R tokens over this time."""
    one = {(r["op"], r["T"]): r["ms"] for r in rows if r["ranks"] == 1 and "ms" in r}
    for row in rows:
        alone = one.get((row["op"], row["T"] // row["ranks"]))
        if alone is None and (row["op"], row["T"]) in one:  # not measured: a share of the whole
            alone = one[row["op"], row["T"]] / row["ranks"]
        if alone is not None and "ms" in row:
            row["efficiency"] = round(alone / row["ms"], 3)
    return rows


def table(rows: list[dict]) -> str:
    names = (
        "op",
        "kind",
        "T",
        "ranks",
        "scheme",
        "used",
        "ms",
        "efficiency",
        "exposed_ms",
        "peak_gib",
    )
    shown = {
        "host ms": "host_ms",
        "host ms on one thread": "one_thread_host_ms",
        "host ms in a row": "steady_host_ms",
        "in a row on one thread": "steady_one_thread_host_ms",
    }
    head = [*names, *shown]
    lines = [" | ".join(head), " | ".join("---" for _ in head)]
    for r in rows:
        times = [
            " / ".join(str(r[d][name]) for d in Runs._fields if r.get(d, {}).get(name))
            for name in shown.values()
        ]
        lines.append(" | ".join([*(str(r.get(n, "")) for n in names), *times]))
    return "\n".join(f"| {line} |" for line in lines)


def plot(rows: list[dict], out: Path) -> None:
    """Time by number of ranks, with the ideal time, for each number of tokens."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt
    from matplotlib.ticker import NullLocator

    figure, axes = plt.subplots(1, 2, figsize=(11, 4))
    for axis, op in zip(axes, ("operator", "layer"), strict=True):
        of = [r for r in rows if r["op"] == op and r["kind"] == "strong" and "ms" in r]
        of = [r for r in of if r["scheme"] == of[0]["scheme"]]
        for n, T in enumerate(sorted({r["T"] for r in of})):
            points = sorted((r["ranks"], r["ms"]) for r in of if r["T"] == T)
            ranks = [p[0] for p in points]
            axis.plot(*zip(*points, strict=True), "o-", color=f"C{n}", label=f"T = {T}")
            ideal = [points[0][1] * ranks[0] / R for R in ranks]
            axis.plot(ranks, ideal, ":", color=f"C{n}")
        axis.set(xscale="log", yscale="log", xlabel="GPUs", title=op)
        sizes = sorted({r["ranks"] for r in of})
        axis.set_xticks(sizes, [str(n) for n in sizes])
        axis.xaxis.set_minor_locator(NullLocator())
        axis.set_ylabel("forward + backward, ms (dotted: ideal)")
        axis.legend()
    figure.tight_layout()
    figure.savefig(out, dpi=110)


def numbers(text: str) -> list[int]:
    return [int(n) for n in text.split(",") if n]


def main() -> None:
    import tempfile

    import torch.multiprocessing as multiprocessing

    gpus = torch.cuda.device_count()
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.cp_scaling", description=__doc__, allow_abbrev=False
    )
    ranks = ",".join(str(n) for n in (1, 2, 4, 8) if n <= max(gpus, 1)) if gpus else "1,2"
    parser.add_argument("--ranks", type=numbers, default=numbers(ranks))
    sizes = "32768,131072,524288,1048576" if gpus else "512"
    parser.add_argument("--tokens", type=numbers, default=numbers(sizes), help="in all (strong)")
    local = "8192,32768" if gpus else "256"
    parser.add_argument("--local", type=numbers, default=numbers(local), help="a rank (weak)")
    parser.add_argument("--heads", type=numbers, default=[32, 32] if gpus else [2, 2], help="H,HV")
    parser.add_argument("--dims", type=numbers, default=[128, 128] if gpus else [8, 8], help="K,V")
    parser.add_argument("--schemes", type=lambda s: s.split(","), default=["auto"])
    parser.add_argument("--peer", choices=("fla",))
    parser.add_argument("--peer-tokens", type=int, default=131072)
    parser.add_argument("--trace", help="write profiler traces of all ranks' steps here")
    parser.add_argument("--model", action="store_true", help="print modelled exchanges and exit")
    parser.add_argument("--out", type=Path)
    args = parser.parse_args()
    if args.model:
        print(model_table())
        return
    rows: list[dict] = []
    if gpus:
        import fla_cp.kernels.triton.backend  # noqa: F401, chooses the ptxas that the result names
    for R in args.ranks:
        with tempfile.TemporaryDirectory() as folder:
            multiprocessing.spawn(work, (R, args, folder), nprocs=R)
            rows += json.loads(Path(folder, f"rows{R}.json").read_text())
        if args.out:
            rows = with_efficiency(rows)
            found = {**environment(), "unit": units.STEPS, "rows": rows}
            args.out.write_text(json.dumps(found, indent=1) + "\n")
    print(table(with_efficiency(rows)))
    if args.out:
        plot(rows, args.out.with_suffix(".png"))


if __name__ == "__main__":
    main()
