"""An operator forward and forward + backward, beside a peer's in the same run: time of the device
and of the host, and what the host does (`benchmarks.host`).

    python -m benchmarks.ops [--op kda] [--shapes target,t8k] [--peer fla] [--stages] [--out FILE]

On a machine without a GPU only the shape "cpu" runs, on the torch stages. Where documents are so
short that chunks may have 16 or 32 tokens, a second row has the other choice. Peers: FLA (fla-core
0.6.0), which tunes itself for minutes on its first call, and for the gated delta rule FlashQLA.
Their kernels are compiled before ours are imported, so that the assembler we choose does not touch
them.
"""

from __future__ import annotations

import argparse
import gc
import json
import statistics
import subprocess
import time
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from datetime import date
from pathlib import Path

import torch
from torch import Tensor

from benchmarks import host, units
from benchmarks.host import host_milliseconds, on_one_core, steady_milliseconds
from benchmarks.members import MEMBERS, Member, draws, io_bytes, options, peer, products
from benchmarks.shapes import MOST_DIM, SHAPES, Shape

CHECKED_TOKENS = 32768
"""Longest shape whose results are compared with the peer's."""

COPY_TB_S, MATMUL_TFLOP_S = 4.25, 700.0
"""Measured ceilings of an H200: device copy (read + write) and bf16 matmul."""

CHAIN = 4
"""Calls with one backward. A backward alone also pays for waking autograd's thread."""

Call = Callable[..., tuple]


def runner(
    op: Call, member: Member, shape: Shape, device: str, decay: str = "drawn", **more: object
) -> dict[str, Callable]:
    """The forward, forward with backward, and `CHAIN` forwards with one backward for all, as in a
    model; each returns a tuple of its tensors. decay: as `draws` takes it. more: of the operator.
    """
    x, do = draws(member, shape, device, decay)
    keywords = options(member, shape) | more
    if shape.cu_seqlens is not None:
        host = torch.tensor(shape.cu_seqlens)
        keywords |= {"cu_seqlens": host.to(device), "cu_seqlens_cpu": host}

    def forward() -> tuple[Tensor, ...]:
        return (op(**x, **keywords)[0],)

    def both() -> tuple[Tensor, ...]:
        (o,) = forward()
        return (o, *torch.autograd.grad(o, list(x.values()), do))

    def chain() -> tuple[Tensor, ...]:
        leaves = [{n: t.detach().requires_grad_() for n, t in x.items()} for _ in range(CHAIN)]
        outputs = [op(**each, **keywords)[0] for each in leaves]
        every = [t for each in leaves for t in each.values()]
        return torch.autograd.grad(outputs, every, [do] * CHAIN)

    return {"forward": forward, "both": both, "chain": chain}


SPAN_MS, LEAST_CALLS, CACHE_BYTES, CLOCK_KHZ = 100.0, 5, 1 << 28, 2_000_000
"""About how long timed calls take in all, and the fewest; what empties the L2 cache; cycles of a
millisecond's sleep."""


def milliseconds(f: Callable, device: str) -> float:
    """Median time of a call.

    On a GPU it is the device's time, with an empty L2 cache: each call is queued behind a sleep
    that lasts longer than the host needs for the call. If a call itself waits for the device (a
    peer's does), it is timed together with its host time once the sleeps have become long.
    """
    times: list[float] = []
    if device != "cuda":
        for _ in range(3):
            started = time.perf_counter()
            f()
            times.append(1e3 * (time.perf_counter() - started))
        return statistics.median(times)
    host_ms = host_milliseconds(f, device, calls=5)
    assert host_ms is not None
    cache = torch.empty(CACHE_BYTES, dtype=torch.int8, device=device)
    sleep_ms = 2 * host_ms + 0.2
    longest_ms = 16 * sleep_ms
    while len(times) < LEAST_CALLS or (sum(times) < SPAN_MS and len(times) < 100):
        events = [torch.cuda.Event(enable_timing=True) for _ in range(2)]
        cache.zero_()
        torch.cuda._sleep(int(sleep_ms * CLOCK_KHZ))
        events[0].record()
        f()
        late = events[0].query()  # the sleep ended before everything was queued
        events[1].record()
        torch.cuda.synchronize()
        if late and sleep_ms < longest_ms:
            sleep_ms *= 2
        else:
            times.append(events[0].elapsed_time(events[1]))
    return statistics.median(times)


def bandwidth(device: str) -> dict[str, float]:
    """GB/s of a device copy, whose bytes are read and written, and of a sum, which only reads."""
    size = 2**31 if device == "cuda" else 2**24
    there = torch.ones(size // 4, dtype=torch.float32, device=device)
    here = torch.empty_like(there)
    copied = milliseconds(lambda: here.copy_(there), device)
    read = milliseconds(there.sum, device)
    return {"copy": 2 * size / copied / 1e6, "read": size / read / 1e6}


def peak_gib(f: Callable, device: str) -> float | None:
    """Largest memory allocated while f runs, including its inputs."""
    if device != "cuda":
        return None
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    f()
    torch.cuda.synchronize()
    return torch.cuda.max_memory_allocated() / 2**30


def first_call(f: Callable, device: str) -> float:
    started = time.perf_counter()
    f()
    if device == "cuda":
        torch.cuda.synchronize()
    return time.perf_counter() - started


def compare(ours: tuple[Tensor, ...], theirs: tuple[Tensor, ...]) -> float:
    """Largest relative difference, in norms, over o and the gradients."""
    return max(
        ((a.float() - b.float()).norm() / b.float().norm()).item()
        for a, b in zip(ours, theirs, strict=True)
    )


def measure(
    who: str,
    op: Call,
    member: Member,
    shape: Shape,
    device: str,
    directions: tuple[str, ...] = ("forward", "both"),
    **more: object,
) -> tuple[dict, tuple]:
    """A row of the table, and the results of the last direction."""
    gc.collect()
    before = torch.cuda.memory_allocated() / 2**30 if device == "cuda" else 0.0
    run = runner(op, member, shape, device, **more)
    whole = run[directions[-1]]
    row: dict = {"op": who, "shape": shape.name}
    row["first_call_s"] = round(first_call(whole, device), 2)
    result = whole()  # warm
    work = zip(io_bytes(member, shape), products(member, shape), strict=True)
    for what, (size, flops) in zip(directions, work, strict=False):
        f = run[what]
        ms = milliseconds(f, device)
        floor = max(size / COPY_TB_S, flops / MATMUL_TFLOP_S) / 1e9
        row[what] = {
            "ms": round(ms, 3),
            "host_ms": host_milliseconds(f, device),
            "steady_host_ms": steady_milliseconds(f, device),
            "tb_s": round(size / ms / 1e9, 3),
            "tflop_s": round(flops / ms / 1e9, 1),
            "share_of_floor": float(f"{floor / ms:.3g}"),
        }
        if device == "cuda":
            with on_one_core():
                row[what]["steady_one_core_host_ms"] = steady_milliseconds(f, device)
        if what == "both" and device == "cuda":
            chained = host_milliseconds(run["chain"], device)
            row[what]["chained_host_ms"] = chained and round(chained / CHAIN, 3)
            with torch.autograd.set_multithreading_enabled(False):
                row[what]["one_thread_host_ms"] = host_milliseconds(f, device)
                row[what]["steady_one_thread_host_ms"] = steady_milliseconds(f, device)
    del result
    peak = peak_gib(whole, device)
    row["peak_gib"] = None if peak is None else round(peak - before, 2)
    for what in directions if who == "fla_cp" else ():  # after the peak, since it keeps tensors
        row[what] |= host.facts(run[what], device)
        mine = row[what]["host_ms"]
        for kind in ("bare", "bare_autograd"):
            if (bare := row[what].get(f"{kind}_ms")) and mine:
                row[what][f"host_over_{kind}"] = round(mine / bare, 2)
        mine, bare = (row[what].get(f"steady_{n}_ms") for n in ("host", "bare_autograd"))
        if mine and bare:
            row[what]["steady_host_over_bare_autograd"] = round(mine / bare, 2)
    print(f"{who} {shape.name}: {row}", flush=True)
    return row, whole()


def compiled_together(device: str) -> AbstractContextManager[None]:
    """Triton's autotuner compiles a kernel's configurations side by side in the block."""
    if device != "cuda":
        return nullcontext()
    from benchmarks.peer_tuning import compiled_side_by_side  # needs Triton

    return compiled_side_by_side()


def stage_times(member: Member, shape: Shape) -> dict[str, float]:
    """ms of each stage of the Triton backend in a call of this shape, without packing.

    The two scans of the backward are timed as they run, concurrently if they fit.
    """
    from benchmarks.tune import stages

    path = "_head" if member.per_head else "" if shape.safe else "_any"
    run = stages(shape.K, shape.V, torch.bfloat16, shape.T, shape.HV, path=path)
    left = ("begin", "scan_states", "scan_bwd", "beside_summary", "gated_and_scans")
    run = {n: f for n, f in run.items() if n not in left and not n.endswith("_ends")}
    return {name: round(milliseconds(f, "cuda"), 3) for name, f in run.items()}


def environment() -> dict[str, object]:
    root = Path(__file__).resolve().parent.parent
    commit = subprocess.run(
        ["git", "describe", "--always", "--dirty"], cwd=root, capture_output=True, text=True
    ).stdout.strip()
    facts: dict[str, object] = {
        "date": date.today().isoformat(),
        "torch": torch.__version__,
        "commit": commit or None,
        "unit": units.OPS.format(chain=CHAIN),
    }
    if torch.cuda.is_available():
        import triton

        from tests.gpu import kernel_hashes

        facts |= {
            "gpu": torch.cuda.get_device_name(),
            "triton": triton.__version__,
            "ptxas": triton.knobs.nvidia.ptxas.version,
            "kernels": kernel_hashes(),
        }
    return facts


def table(rows: list[dict]) -> str:
    counts = [name.replace("_", " ") for name in host.COUNTS]
    head = ["shape", "op", "forward ms", "forward + backward ms", "host ms", "bare ms"]
    head += [
        "host / bare",
        "bare ms in autograd",
        "host / that",
        "host ms in a chain",
        "host ms on one thread",
        "host ms in a row",
        "in a row on one thread",
        "in a row on one core",
        "bare ms in autograd in a row",
        "in a row / that",
        *counts,
    ]
    head += ["peak GiB", "first call s", "vs peer"]
    lines = [head, ["---"] * len(head)]
    for r in rows:
        found = [r[what] for what in ("forward", "both") if what in r]

        def pair(name: str, form: str = "", found: list[dict] = found) -> str:
            values = [x.get(name) for x in found]
            return "" if None in values else " / ".join(format(x, form) for x in values)

        line = [r["shape"], r["op"], format(found[0]["ms"], ".3f")]
        line += ["" if len(found) == 1 else format(found[1]["ms"], ".3f")]
        line += [pair("host_ms", ".2f"), pair("bare_ms", ".3f"), pair("host_over_bare", ".2f")]
        for name in ("bare_autograd_ms", "host_over_bare_autograd"):
            x = found[-1].get(name)
            line += ["" if x is None else format(x, ".2f")]
        for name in ("chained_host_ms", "one_thread_host_ms"):
            ms = found[-1].get(name)
            line += ["" if ms is None else format(ms, ".2f")]
        line += [pair("steady_host_ms", ".2f")]
        x = found[-1].get("steady_one_thread_host_ms")
        line += ["" if x is None else format(x, ".2f")]
        line += [pair("steady_one_core_host_ms", ".2f")]
        for name in ("steady_bare_autograd_ms", "steady_host_over_bare_autograd"):
            x = found[-1].get(name)
            line += ["" if x is None else format(x, ".2f")]
        line += [pair(name) for name in host.COUNTS]
        line += ["" if r["peak_gib"] is None else f"{r['peak_gib']:.2f}", str(r["first_call_s"])]
        line += [" / ".join(f"{x:.2f}x" for x in r.get("ratio", []))]
        lines.append(line)
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def main() -> None:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.ops", description=__doc__, allow_abbrev=False
    )
    device = "cuda" if torch.cuda.is_available() else "cpu"
    usual = (n for n, s in SHAPES.items() if n != "cpu" and s.K <= MOST_DIM)
    default = "cpu" if device == "cpu" else ",".join(usual)
    parser.add_argument("--shapes", default=default, help=f"of {', '.join(SHAPES)}")
    parser.add_argument("--op", choices=MEMBERS, default="kda")
    parser.add_argument("--peer", choices=("fla", "flashqla"))
    parser.add_argument("--peer-shapes", help="default: those of --shapes")
    parser.add_argument(
        "--forward-only", action="store_true", help="for a peer that refuses its backward"
    )
    parser.add_argument("--stages", action="store_true", help="time each stage, too (KDA, GDN)")
    parser.add_argument("--out", type=Path)
    args = parser.parse_args()
    member = MEMBERS[args.op]
    directions = ("forward",) if args.forward_only else ("forward", "both")
    if args.shapes == default and args.op != "kda":
        args.shapes = ",".join(n for n in default.split(",") if not n.startswith("target-"))
    shapes = [SHAPES[name] for name in args.shapes.split(",")]

    rows: list[dict] = []
    theirs: dict[str, tuple[Tensor, ...]] = {}

    def keep(row: dict) -> None:
        rows.append(row)
        if args.out:  # after each row, since a run may be stopped
            found = {**environment(), "operator": args.op, "rows": rows}
            args.out.write_text(json.dumps(found, indent=1) + "\n")

    beside = [SHAPES[name] for name in (args.peer_shapes or args.shapes).split(",")]
    for shape in beside if args.peer else ():
        op = peer(member, args.peer)
        with compiled_together(device):
            row, result = measure(args.peer, op, member, shape, device, directions)
        if shape.T <= CHECKED_TOKENS:  # on the host, so as not to count in peak memory
            theirs[shape.name] = tuple(t.cpu() for t in result)
        del result
        keep(row)

    import fla_cp
    from fla_cp.kernels import resolve, using

    for shape in shapes:
        op = getattr(fla_cp, member.ours)
        row, result = measure("fla_cp", op, member, shape, device, directions)
        other = next((r for r in rows if r["shape"] == shape.name), None)
        if other is not None:
            row["ratio"] = [round(other[w]["ms"] / row[w]["ms"], 3) for w in directions]
        if shape.name in theirs:
            # o and gradients of two bf16 implementations differ by roundings
            pair = (tuple(t.cpu() for t in result), theirs.pop(shape.name))
            row["difference"] = round(compare(*pair), 5)
        del result
        if args.stages and args.op in ("kda", "gdn") and shape.H == shape.HV:
            row["stages"] = stage_times(member, shape)
        keep(row)
        backend = resolve("auto", torch.device(device), torch.bfloat16)
        if shape.longest <= 32:
            short = backend.chunk_for(shape.longest, torch.bfloat16) <= 32
            backend = replace(backend, short_chunks=() if short else (16, 32))
            chunk = backend.chunk_for(shape.longest, torch.bfloat16)
            with using(backend):
                who = f"fla_cp, chunks of {chunk}"
                keep(measure(who, op, member, shape, device, directions)[0])
    print(table(rows))
    apart = [r["shape"] for r in rows if r.get("difference", 0) > 2e-2]
    if apart:
        raise SystemExit(f"differ from {args.peer} by more than 2%: {', '.join(apart)}")


if __name__ == "__main__":
    main()
