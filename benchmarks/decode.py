"""A decoding step beside the bytes that it must move, in a CUDA graph and without one, as JSON.

    python -m benchmarks.decode [--size 1.3B] [--batches 1,64] [--out FILE]

The floor is the time in which the device, at the bandwidth measured in the same run, reads weights
once, and reads and writes states once (`fla_cp.train.decoding.step_bytes`); "over_reads" is the
step's time over that of the reads alone. Weights are random, in
bf16 but for what stays fp32 in it. Before anything is timed, greedy tokens of the graph, of the
step without it and of the model's calls with a cache are compared, in fp32 and in bf16; tokens may
differ only where two logits are nearly equal. Without a GPU the size is tiny, in fp32, and there is
no graph.
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path
from typing import Any
from unittest import mock

import torch
from torch import Tensor
from torch.profiler import ProfilerActivity, profile

from benchmarks import units
from benchmarks.ops import bandwidth, environment, milliseconds
from fla_cp.nn.cache import LayerCache
from fla_cp.train.decoding import EAGER_CALLS, DecodeStep, Decoding, in_dtype, step_bytes, why_eager
from fla_cp.train.generate import Sampling, make_caches, next_logits
from fla_cp.train.model import Decoder, build_model
from fla_cp.train.parse import parse

UNIT = units.DECODE
VOCABULARY = 32000
PROMPT, ROOM = 64, 1024
"""Tokens in the caches before the first step, and how many more fit."""

CHECKED, LOOP = 24, 50
"""Tokens of each row that are compared, and steps that are timed by the wall clock."""

NEAR = {torch.float32: 1e-4, torch.bfloat16: 5e-2}
"""Gaps of two logits, as shares of the largest, under which either token may be chosen."""

GOALS = {1: 1.5, 64: 1.3}
"""The step's time over its floor that is the goal, by batch (CONTRIBUTING.md, "Decoding steps")."""


def prefilled(model: Decoder, rows: int) -> tuple[list[LayerCache], Tensor]:
    """Caches of one prompt for each row, and the logits behind them."""
    device = model.embedding.weight.device
    generator = torch.Generator().manual_seed(rows)
    tokens = torch.randint(len(model.embedding.weight), (rows, PROMPT), generator=generator)
    caches = make_caches(model, rows, PROMPT + ROOM)
    return caches, next_logits(model, tokens.to(device), caches)


def decoding(model: Decoder, rows: int, captured: bool) -> tuple[Decoding, list[LayerCache]]:
    """Greedy decoding behind a prompt."""
    caches, logits = prefilled(model, rows)
    step = DecodeStep(model, caches, rows)
    found = Decoding(step, Sampling().choose, in_graph=True, captured=captured)
    found.take(logits)
    return found, caches


def tokens_of(found: Decoding, count: int) -> list[list[int]]:
    """The next tokens of all rows, step by step."""
    steps = [found.read()()]
    for _ in range(count - 1):
        found.advance()
        steps.append(found.read()())
    return steps


def check(model: Decoder, rows: int, captured: bool) -> int:
    """How many tokens, of those that were compared, are the other one of a near tie. Raises
    SystemExit where tokens of the graph, of the step without it and of the model's calls differ
    otherwise."""
    chosen = tokens_of(decoding(model, rows, captured)[0], CHECKED)
    ties = near_ties(model, chosen)
    if captured:
        eager = tokens_of(decoding(model, rows, False)[0], CHECKED)
        ties += near_ties(model, eager)
        if chosen != eager and not ties:
            raise SystemExit(f"B = {rows}: the graph and the step without it give other tokens")
    return ties


def near_ties(model: Decoder, chosen: list[list[int]]) -> int:
    """How many of the tokens, which are given step by step, are not those of the model's calls with
    a cache over the tokens before them, but have nearly the same logit. Raises SystemExit for
    others."""
    rows = len(chosen[0])
    caches, logits = prefilled(model, rows)
    ties, device, limit = 0, logits.device, NEAR[logits.dtype]
    for n, row in enumerate(chosen):
        tokens = torch.tensor(row, device=device)
        if n:
            logits = next_logits(model, torch.tensor(chosen[n - 1], device=device)[:, None], caches)
        best = logits.max(-1).values
        gap = (best - logits.gather(1, tokens[:, None])[:, 0]) / logits.abs().max(-1).values
        if (gap > limit).any():
            raise SystemExit(
                f"B = {rows}, {logits.dtype}: token {n} of the step is not that of the model's "
                f"call, whose logit is larger by {gap.max().item():.2e}"
            )
        ties += int((gap > 0).sum())
    return ties


def loop_milliseconds(found: Decoding) -> float:
    """Wall-clock time of a step while the host reads each token, one step behind."""
    for _ in range(EAGER_CALLS + 2):
        found.advance()
    found.read()()
    started = time.perf_counter()
    for _ in range(LOOP):
        newest = found.read()
        found.advance()
        newest()
    found.read()()
    return 1e3 * (time.perf_counter() - started) / LOOP


def kernels(f: Callable[[], object]) -> list[dict[str, Any]]:
    """What one call runs on the device: names, how often, and microseconds in all, longest first;
    empty without a GPU."""
    if not torch.cuda.is_available():
        return []
    with profile(activities=[ProfilerActivity.CUDA]) as seen:
        f()
        torch.cuda.synchronize()
    found: dict[str, list[float]] = {}
    for event in seen.events():
        if event.device_type == torch.autograd.DeviceType.CUDA:
            found.setdefault(event.name[:100], []).append(event.device_time_total)
    rows = [{"name": n, "count": len(us), "us": round(sum(us), 1)} for n, us in found.items()]
    return sorted(rows, key=lambda row: -row["us"])


VARIANTS: dict[str, dict[str, object]] = {
    "kernels": {},
    "separate": {"triton.decoding.FUSED_ROWS": 0},
    "stages": {"triton.step_mixer.MAX_ROWS": 0},
    "late": {"triton.early.EARLY": False},
}
"""Steps whose layers are several kernels, with other values of constants of fla_cp/kernels: as they
are, products are calls of cuBLAS; the convolution, the recurrence and the gated norm are kernels of
their own; no kernel starts early. For more sequences than FUSED_ROWS, only "kernels" is measured.
"""


def variant_milliseconds(model: Decoder, rows: int, name: str) -> float | None:
    """The step in a graph as a variant; None for batches for which it means nothing. Raises
    SystemExit if its tokens are wrong."""
    from fla_cp.kernels.triton.decoding import FUSED_ROWS

    if rows > FUSED_ROWS and name != "kernels":
        return None
    off = {"sm90.step_run.ENABLED": False, "sm90.rows_run.ENABLED": False}
    constants = off | VARIANTS[name]
    with ExitStack() as changed:
        for constant, value in constants.items():
            changed.enter_context(mock.patch(f"fla_cp.kernels.{constant}", value))
        near_ties(model, tokens_of(decoding(model, rows, True)[0], CHECKED))
        found, _ = decoding(model, rows, True)
        loop_milliseconds(found)
        return milliseconds(found.advance, "cuda")


def measure(model: Decoder, rows: int, rate: float) -> dict[str, Any]:
    """A row of the result. rate: bytes in a ms."""
    device = model.embedding.weight.device.type
    captured = why_eager(model) is None
    found, caches = decoding(model, rows, captured)
    size = step_bytes(model, caches, rows)
    row: dict[str, Any] = {"batch": rows, "gb": size / 1e9, "floor_ms": size / rate}
    row["loop_ms"] = loop_milliseconds(found)
    ms = milliseconds(found.advance, device)
    row |= {"graph_ms": ms if captured else None, "over_floor": ms / row["floor_ms"]}
    row["over_reads"] = ms * rate / step_bytes(model, caches, rows, written=False)
    row["tokens_per_second"] = 1e3 * rows / row["loop_ms"]
    row["kernels"] = kernels(found.advance)
    row["launches"] = sum(kernel["count"] for kernel in row["kernels"]) or None
    row["eager_loop_ms"] = loop_milliseconds(decoding(model, rows, False)[0])
    for name in VARIANTS:
        row[f"{name}_ms"] = variant_milliseconds(model, rows, name) if captured else None
    return row


def main(argv: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.decode", description=__doc__, allow_abbrev=False
    )
    parser.add_argument("--size", default="1.3B", choices=["tiny", "340M", "1.3B"])
    parser.add_argument("--pattern", default="kda", help="the mixers, as --model.pattern has them")
    parser.add_argument("--batches", type=lambda s: list(map(int, s.split(","))), default=[1, 64])
    parser.add_argument("--out", type=Path)
    args = parser.parse_args(argv)
    if min(args.batches) < 1:
        parser.error(f"--batches must be from 1, got {min(args.batches)}")
    cuda = torch.cuda.is_available()
    device, size = ("cuda", args.size) if cuda else ("cpu", "tiny")
    config = parse(["--model", size, "--model.pattern", args.pattern]).model
    model = build_model(config, VOCABULARY if cuda else 1000, 0).to(device).eval()
    ties = {"float32": [check(model, rows, why_eager(model) is None) for rows in args.batches]}
    if cuda:
        model = in_dtype(model, torch.bfloat16)
        ties["bfloat16"] = [check(model, rows, why_eager(model) is None) for rows in args.batches]
    print(f"greedy tokens agree; near ties by batch: {ties}", flush=True)
    gb_s = bandwidth(device)
    report = {**environment(), "unit": UNIT, "benchmark": "decode", "size": size}
    report |= {"pattern": args.pattern, "dtype": str(model.embedding.weight.dtype)}
    report |= {"gb_s": gb_s, "near_ties": ties, "rows": []}
    print(f"copy {gb_s['copy']:.0f} GB/s, read {gb_s['read']:.0f} GB/s", flush=True)
    for rows in args.batches:
        row = measure(model, rows, 1e6 * max(gb_s.values()))
        report["rows"].append(row)
        cells = (f"{name} {x:.4g}" for name, x in row.items() if isinstance(x, (int, float)))
        goal = GOALS.get(rows) if size == "1.3B" else None
        met = "" if goal is None else f"; goal {goal}x, {row['over_floor'] / goal:.2f} of it"
        print("  ".join(cells) + met, flush=True)
        for kernel in row["kernels"][:15]:
            print(f"    {kernel['us']:9.1f} us  {kernel['count']:4} x {kernel['name'][:80]}")
        if args.out is not None:
            args.out.write_text(json.dumps(report, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
