"""What activation checkpoints and offload cost: time and memory of a decoder's blocks, as JSON.

    python -m benchmarks.remat [--size 340M] [--layers 4] [--tokens 32768] [--out FILE]

One row for each `--remat` and `--offload` of the trainer. "full, not kept" is full as it would be
if the recomputed operator did not keep its intermediates. Gradients are compared with those of none
before anything is timed. `kept_gib`: between forward and backward, beyond weights and input.
Without a GPU only the size tiny runs, and memory is not measured.
"""

from __future__ import annotations

import argparse
import json
from contextlib import nullcontext
from pathlib import Path
from typing import Any
from unittest import mock

import torch
from torch import Tensor

from benchmarks import units
from benchmarks.ops import environment, host_milliseconds, milliseconds, peak_gib
from fla_cp import FLACPContext, build_cp_context, remat
from fla_cp.train.model import Decoder, build_model
from fla_cp.train.parse import parse

MODES = {
    "none": "--remat none",
    "selective": "--remat selective",
    "full": "--remat full",
    "full, not kept": "--remat full",
    "none, offload": "--remat none --offload",
    "selective, offload": "--remat selective --offload",
    "full, offload": "--remat full --offload",
}
UNIT = units.REMAT
BUDGET = 2e-2
"""Largest relative L2 difference of a gradient in bf16."""


def blocks(model: Decoder, x: Tensor, context: FLACPContext) -> Tensor:
    for block in model.blocks:
        x, _ = model.run_block(block, x, context)
    return x


def relative(a: Tensor, b: Tensor) -> float:
    return ((a - b).norm() / b.norm()).item()


def measure(mode: str, flags: list[str], x: Tensor, context: FLACPContext, want: Any) -> Any:
    """The row of a mode, and its gradients. want: those of none."""
    device = x.device.type
    config = parse([*flags, *MODES[mode].split()]).model
    model = build_model(config, 64, 0).to(device)
    for name, parameter in model.named_parameters():
        if device == "cuda" and not name.endswith(("A_log", "dt_bias")):
            parameter.data = parameter.data.bfloat16()
    leaves = [x, *model.blocks.parameters()]
    do = torch.randn(x.shape, generator=torch.Generator().manual_seed(1)).to(x)

    def step() -> tuple[Tensor, ...]:
        return torch.autograd.grad(blocks(model, x, context), leaves, do)

    keeps = mock.patch.object(remat, "in_backward", return_value=False)
    with keeps if mode == "full, not kept" else nullcontext():
        grads = [g.double().cpu() for g in step()]
        errors = [relative(a, b) for a, b in zip(grads, want or grads, strict=True)]
        if not max(errors) <= BUDGET:
            raise SystemExit(f"{mode}: a gradient differs from that of none by {max(errors):.2e}")
        row = {"mode": mode, "max_difference": max(errors), "ms": milliseconds(step, device)}
        row |= {"host_ms": host_milliseconds(step, device, calls=5), "peak_gib": None}
        row |= {"peak_gib": peak_gib(step, device), "kept_gib": None}
        if device == "cuda":
            torch.cuda.synchronize()
            before = torch.cuda.memory_allocated()
            y = blocks(model, x, context)
            torch.cuda.synchronize()
            row["kept_gib"] = (torch.cuda.memory_allocated() - before) / 2**30
            del y
    return row, grads


def main(argv: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0], allow_abbrev=False)
    parser.add_argument("--size", default="340M", choices=["tiny", "340M", "1.3B"])
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument("--tokens", type=int, default=32768)
    parser.add_argument("--gate-lower-bound", default="-5", help="none: any gate")
    parser.add_argument("--out", type=Path)
    args = parser.parse_args(argv)
    cuda = torch.cuda.is_available()
    size = args.size if cuda else "tiny"
    tokens = args.tokens if cuda else min(args.tokens, 256)
    flags = ["--model", size, "--model.layers", str(args.layers)]
    if args.gate_lower_bound != "none":
        flags += ["--model.gate-lower-bound", args.gate_lower_bound]
    context = build_cp_context(torch.tensor([0, tokens]), None, conv1d_kernel_size=4)
    width = build_model(parse(flags).model, 64, 0).shape.hidden_size
    x = torch.randn(1, tokens, width, generator=torch.Generator().manual_seed(0))
    x = x.to("cuda", torch.bfloat16) if cuda else x
    x.requires_grad_()
    rows, want = [], None
    for mode in MODES:
        row, grads = measure(mode, flags, x, context, want)
        want = want or grads
        rows.append(row)
        cells = (f"{name} {value:.4g}" for name, value in row.items() if isinstance(value, float))
        print(f"{mode:20} {'  '.join(cells)}", flush=True)
    report = {**environment(), "unit": UNIT, "benchmark": "remat", "size": size, "tokens": tokens}
    report |= {"layers": args.layers, "gate_lower_bound": args.gate_lower_bound, "rows": rows}
    if args.out is not None:
        args.out.write_text(json.dumps(report, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
