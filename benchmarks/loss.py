"""The trainer's loss, forward and backward, beside other ways to compute it, as JSON.

    python -m benchmarks.loss [--tokens 65536] [--hidden 1024] [--vocabulary 32000] [--out FILE]

"checkpointed" is what the trainer did before: chunks of 2^25 float32 logits, which the backward
computes a second time. "whole" keeps all logits. "linear_cross_entropy" is torch's own chunked
form, from torch 2.13 on. Loss and gradients of each way are compared with fp64 before it is timed.
Without a GPU the sizes are small and memory is not measured.
"""

from __future__ import annotations

import argparse
import json
import os
from collections.abc import Callable
from pathlib import Path
from unittest import mock

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.profiler import ProfilerActivity, profile
from torch.utils.checkpoint import checkpoint

from benchmarks.ops import environment, host_milliseconds, milliseconds, peak_gib
from fla_cp.train.loss import COMPILE, chunked_cross_entropy

CHECKPOINTED_LOGITS = 2**25
BUDGET = 2.0
"""Largest error of a way, in units of the error of "whole" plus one rounding."""

Way = Callable[[Tensor, Tensor, Tensor], Tensor]


def whole(x: Tensor, weight: Tensor, labels: Tensor) -> Tensor:
    return F.cross_entropy(F.linear(x, weight).float(), labels, reduction="sum")


def checkpointed(x: Tensor, weight: Tensor, labels: Tensor) -> Tensor:
    rows = max(1, CHECKPOINTED_LOGITS // len(weight))
    parts = [
        checkpoint(whole, a, weight, b, use_reentrant=False, preserve_rng_state=False)
        for a, b in zip(x.split(rows), labels.split(rows), strict=True)
    ]
    return torch.stack(parts).sum()


def not_compiled(x: Tensor, weight: Tensor, labels: Tensor) -> Tensor:
    with mock.patch.dict(os.environ, {COMPILE: "0"}):
        return chunked_cross_entropy(x, weight, labels)


def of_torch(x: Tensor, weight: Tensor, labels: Tensor) -> Tensor:
    options = torch.nn.LinearCrossEntropyOptions()  # type: ignore[attr-defined]
    return F.linear_cross_entropy(  # type: ignore[attr-defined]
        x, weight, labels, reduction="sum", options=options
    )


def ways() -> dict[str, Way]:
    found: dict[str, Way] = {
        "whole": whole,
        "checkpointed": checkpointed,
        "chunked": chunked_cross_entropy,
        "chunked, not compiled": not_compiled,
    }
    if hasattr(F, "linear_cross_entropy"):
        found["linear_cross_entropy"] = of_torch
    return found


def results(way: Way, x: Tensor, weight: Tensor, labels: Tensor) -> dict[str, Tensor]:
    """Mean loss and its gradients."""
    loss = way(x, weight, labels) / len(labels)
    dx, dweight = torch.autograd.grad(loss, (x, weight))
    return {"loss": loss.detach(), "dx": dx, "dweight": dweight}


def launches(f: Callable[[], object]) -> int | None:
    """Kernels and copies that one call starts."""
    if not torch.cuda.is_available():
        return None
    with profile(activities=[ProfilerActivity.CUDA]) as seen:
        f()
        torch.cuda.synchronize()
    return sum(event.device_type == torch.autograd.DeviceType.CUDA for event in seen.events())


def main(argv: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0], allow_abbrev=False)
    parser.add_argument("--tokens", type=int, default=65536)
    parser.add_argument("--hidden", type=int, default=1024)
    parser.add_argument("--vocabulary", type=int, default=32000)
    parser.add_argument("--out", type=Path)
    args = parser.parse_args(argv)
    cuda = torch.cuda.is_available()
    device, dtype = ("cuda", torch.bfloat16) if cuda else ("cpu", torch.float32)
    tokens, hidden, vocabulary = args.tokens, args.hidden, args.vocabulary
    if not cuda:
        tokens, hidden, vocabulary = min(tokens, 500), min(hidden, 64), min(vocabulary, 1000)
    gen = torch.Generator().manual_seed(0)
    x = torch.randn(tokens, hidden, generator=gen).to(device, dtype).requires_grad_()
    weight = (torch.randn(vocabulary, hidden, generator=gen) / hidden**0.5).to(device, dtype)
    weight.requires_grad_()
    labels = torch.randint(vocabulary, (tokens,), generator=gen).to(device)

    exact_leaves = [t.detach().double().requires_grad_() for t in (x, weight)]
    exact = results(not_compiled, *exact_leaves, labels)
    del exact_leaves
    rows, allowed = [], {}
    for name, way in ways().items():

        def step(way: Way = way) -> dict[str, Tensor]:
            return results(way, x, weight, labels)

        errors = {
            key: ((value - exact[key]).norm() / exact[key].norm()).item()
            for key, value in step().items()
        }
        if not allowed:
            unit = torch.finfo(dtype).eps
            allowed = {key: BUDGET * (error + unit) for key, error in errors.items()}
        wrong = [key for key, error in errors.items() if not error <= allowed[key]]
        if wrong:
            raise SystemExit(f"{name}: errors {errors} exceed {allowed} in {wrong}")
        row: dict[str, object] = {"way": name, "ms": milliseconds(step, device)}
        row |= {"host_ms": host_milliseconds(step, device, calls=5), "launches": launches(step)}
        row |= {"peak_gib": peak_gib(step, device), "errors": errors}
        rows.append(row)
        cells = (f"{key} {row[key]}" for key in ("ms", "host_ms", "launches", "peak_gib"))
        print(f"{name:24} {'  '.join(cells)}", flush=True)
    sizes = {"tokens": tokens, "hidden": hidden, "vocabulary": vocabulary, "dtype": str(dtype)}
    report = {**environment(), **sizes, "rows": rows}
    if args.out is not None:
        args.out.write_text(json.dumps(report, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
