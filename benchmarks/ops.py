"""KDA forward and forward + backward, beside FLA's in the same run.

    python -m benchmarks.ops [--shapes target,t8k] [--peer fla] [--stages] [--out FILE.json]

On a machine without a GPU only the shape "cpu" runs, on the torch stages. FLA (fla-core 0.6.0)
tunes itself for about five minutes on its first call; its kernels are compiled before ours are
imported, so that the assembler we choose does not touch them.
"""

from __future__ import annotations

import argparse
import gc
import json
import statistics
import subprocess
import time
from collections.abc import Callable
from datetime import date
from pathlib import Path

import torch
from torch import Tensor

from .shapes import SHAPES, Shape

CHECKED_TOKENS = 32768
"""Longest shape whose results are compared with the peer's."""

COPY_TB_S, MATMUL_TFLOP_S = 4.25, 700.0
"""Measured ceilings of an H200: device copy (read + write) and bf16 matmul."""

Call = Callable[..., tuple]


def inputs(shape: Shape, device: str) -> tuple[list[Tensor], dict[str, Tensor], Tensor]:
    """q, k, v, g, beta; A_log and dt_bias; do. Seeded."""
    gen = torch.Generator(device).manual_seed(0)

    def draw(*size: int, dtype: torch.dtype = torch.bfloat16) -> Tensor:
        return torch.randn(*size, generator=gen, device=device, dtype=dtype).requires_grad_()

    T, H, HV, K, V = shape.T, shape.H, shape.HV, shape.K, shape.V
    packed = [draw(1, T, H, K), draw(1, T, H, K), draw(1, T, HV, V), draw(1, T, HV, K)]
    packed.append(draw(1, T, HV))
    rates = {
        "A_log": draw(HV, dtype=torch.float32),
        "dt_bias": draw(HV * K, dtype=torch.float32),
    }
    return packed, rates, draw(1, T, HV, V).detach()


def runner(op: Call, shape: Shape, device: str, **more: object) -> tuple[Callable, Callable]:
    """(forward, forward and backward), each returning its tensors."""
    packed, rates, do = inputs(shape, device)
    cu = None
    if shape.cu_seqlens is not None:
        host = torch.tensor(shape.cu_seqlens)
        cu, more["cu_seqlens_cpu"] = host.to(device), host
    leaves = [*packed, *rates.values()]

    def forward() -> Tensor:
        return op(*packed, **rates, **shape.options, cu_seqlens=cu, **more)[0]

    def both() -> tuple[Tensor, ...]:
        o = forward()
        return (o, *torch.autograd.grad(o, leaves, do))

    return forward, both


def milliseconds(f: Callable, device: str) -> float:
    if device == "cuda":
        import triton

        return triton.testing.do_bench(f, warmup=25, rep=100, return_mode="median")
    times = []
    for _ in range(3):
        started = time.perf_counter()
        f()
        times.append(1e3 * (time.perf_counter() - started))
    return statistics.median(times)


def peak_gib(f: Callable, device: str) -> float | None:
    """Most memory allocated while f runs, its inputs included."""
    if device != "cuda":
        return None
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    f()
    torch.cuda.synchronize()
    return torch.cuda.max_memory_allocated() / 2**30


def first_call(forward_and_backward: Callable, device: str) -> float:
    started = time.perf_counter()
    forward_and_backward()
    if device == "cuda":
        torch.cuda.synchronize()
    return time.perf_counter() - started


def compare(ours: tuple[Tensor, ...], theirs: tuple[Tensor, ...]) -> float:
    """Largest relative difference (norms) over o and the gradients."""
    return max(
        ((a.float() - b.float()).norm() / b.float().norm()).item()
        for a, b in zip(ours, theirs, strict=True)
    )


def measure(who: str, op: Call, shape: Shape, device: str, **more: object) -> tuple[dict, tuple]:
    gc.collect()
    before = torch.cuda.memory_allocated() / 2**30 if device == "cuda" else 0.0
    forward, both = runner(op, shape, device, **more)
    row: dict = {"op": who, "shape": shape.name, "first_call_s": round(first_call(both, device), 2)}
    result = both()  # warm
    for what, f, size, flops in (
        ("forward", forward, shape.bytes_forward, shape.flops_forward),
        ("both", both, shape.bytes_both, shape.flops_both),
    ):
        ms = milliseconds(f, device)
        floor = max(size / COPY_TB_S, flops / MATMUL_TFLOP_S) / 1e9
        row[what] = {
            "ms": round(ms, 3),
            "tb_s": round(size / ms / 1e9, 3),
            "tflop_s": round(flops / ms / 1e9, 1),
            "share_of_floor": float(f"{floor / ms:.3g}"),
        }
    del result
    peak = peak_gib(both, device)
    row["peak_gib"] = None if peak is None else round(peak - before, 2)
    print(f"{who} {shape.name}: {row}", flush=True)
    return row, both()


def stage_times(shape: Shape) -> dict[str, float]:
    """ms of each stage of the Triton backend at the shape's size, without packing."""
    from fla_cp.kernels.measure import stages

    run = stages(shape.K, shape.V, torch.bfloat16, shape.T, shape.HV, safe=shape.safe)
    return {name: round(milliseconds(f, "cuda"), 3) for name, f in run.items()}


def environment() -> dict[str, object]:
    root = Path(__file__).resolve().parent.parent
    commit = subprocess.run(
        ["git", "rev-parse", "--short", "HEAD"], cwd=root, capture_output=True, text=True
    ).stdout.strip()
    facts: dict[str, object] = {
        "date": date.today().isoformat(),
        "torch": torch.__version__,
        "commit": commit or None,
        "unit": "ms, median of do_bench; peak_gib includes the inputs",
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
    lines = [
        "| shape | op | forward ms | forward + backward ms | peak GiB | first call s | vs FLA |",
        "|---|---|---|---|---|---|---|",
    ]
    for r in rows:
        peak = "" if r["peak_gib"] is None else f"{r['peak_gib']:.2f}"
        ratio = " / ".join(f"{x:.2f}x" for x in r.get("ratio", []))
        lines.append(
            f"| {r['shape']} | {r['op']} | {r['forward']['ms']:.3f} | {r['both']['ms']:.3f} "
            f"| {peak} | {r['first_call_s']} | {ratio} |"
        )
    return "\n".join(lines)


def peer() -> Call:
    try:
        from fla.ops.kda import chunk_kda
    except ImportError as error:
        raise SystemExit(f"--peer fla needs fla-core 0.6.0 ({error})") from error
    return chunk_kda


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.ops", description=__doc__)
    device = "cuda" if torch.cuda.is_available() else "cpu"
    default = "cpu" if device == "cpu" else ",".join(n for n in SHAPES if n != "cpu")
    parser.add_argument("--shapes", default=default, help=f"of {', '.join(SHAPES)}")
    parser.add_argument("--peer", choices=("fla",))
    parser.add_argument("--peer-shapes", help="default: those of --shapes")
    parser.add_argument("--stages", action="store_true", help="time each stage, too")
    parser.add_argument("--out", type=Path)
    args = parser.parse_args()
    shapes = [SHAPES[name] for name in args.shapes.split(",")]

    rows: list[dict] = []
    theirs: dict[str, tuple[Tensor, ...]] = {}

    def keep(row: dict) -> None:
        rows.append(row)
        if args.out:  # after each row: a run may be stopped
            args.out.write_text(json.dumps({**environment(), "rows": rows}, indent=1) + "\n")

    beside = [SHAPES[name] for name in (args.peer_shapes or args.shapes).split(",")]
    for shape in beside if args.peer else ():
        row, result = measure("fla", peer(), shape, device)
        if shape.T <= CHECKED_TOKENS:  # kept on the host, out of the way of the peak memory
            theirs[shape.name] = tuple(t.cpu() for t in result)
        del result
        keep(row)

    from fla_cp import chunk_kda

    for shape in shapes:
        row, result = measure("fla_cp", chunk_kda, shape, device)
        other = next((r for r in rows if r["shape"] == shape.name), None)
        if other is not None:
            row["ratio"] = [round(other[w]["ms"] / row[w]["ms"], 3) for w in ("forward", "both")]
        if shape.name in theirs:
            # o and gradients of two bf16 implementations: apart by their roundings
            pair = (tuple(t.cpu() for t in result), theirs.pop(shape.name))
            row["difference"] = round(compare(*pair), 5)
        del result
        if args.stages:
            row["stages"] = stage_times(shape)
        keep(row)
    print(table(rows))
    apart = [r["shape"] for r in rows if r.get("difference", 0) > 2e-2]
    if apart:
        raise SystemExit(f"differ from FLA by more than 2%: {', '.join(apart)}")


if __name__ == "__main__":
    main()
