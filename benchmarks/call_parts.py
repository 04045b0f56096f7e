"""Where the host's time in a replayed operator call goes.

    python -m benchmarks.call_parts [--op kda,gdn] [--shapes t2k,t8k] [--out FILE]

Each part is timed by itself, with nothing queued on the device: the call as it is, its two programs
without autograd, the same programs with launches left out, the launches alone, and an autograd
Function with the same tensors that computes nothing. "on one thread" means that the backward runs
on the calling thread, without a hand-over to autograd's own.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from benchmarks.host import _LAUNCH, Bare, Replay, host_milliseconds, replays
from benchmarks.members import MEMBERS, draws, options
from benchmarks.shapes import SHAPES, Shape

CALLS = 100


class Nothing(torch.autograd.Function):
    """Takes the tensors of an operator call and gives outputs and gradients that are there."""

    @staticmethod
    def forward(ctx: Any, o: Tensor, grads: tuple[Tensor, ...], *x: Tensor) -> Tensor:
        ctx.grads = grads
        ctx.save_for_backward(*x)
        return o.detach()

    @staticmethod
    def backward(ctx: Any, _do: Tensor) -> tuple[Tensor | None, ...]:
        ctx.saved_tensors  # noqa: B018
        return (None, None, *ctx.grads)


def without_launches(replay: Replay) -> Callable[[], object]:
    """The program of a replay, with launches that do nothing."""
    program = replay.program
    names = dict(program.run.__globals__)
    for name in set(_LAUNCH.findall(program.source)):
        names[name] = lambda *_: None
    exec(program.source, names)
    return lambda: names["run"](replay.plan, replay.inputs, replay.stream)


def measure(name: str, shape: Shape, device: str) -> dict[str, Any]:
    """A row: ms of each part, medians of CALLS calls."""
    import fla_cp

    member = MEMBERS[name]
    x, do = draws(member, shape, device)
    keywords, op, leaves = options(member, shape), getattr(fla_cp, member.ours), list(x.values())

    def forward() -> Tensor:
        return op(**x, **keywords)[0]

    def both() -> tuple[Tensor, ...]:
        return torch.autograd.grad(forward(), leaves, do)

    found, why = replays(both)
    if len(found) != 2:
        raise SystemExit(f"{name}: both directions must be replayed, got {len(found)}: {why}")
    o, grads = forward().detach(), both()

    def nothing() -> tuple[Tensor, ...]:
        return torch.autograd.grad(Nothing.apply(o, grads, *leaves), leaves, do)

    def milliseconds(f: Callable[[], object]) -> float | None:
        for _ in range(3):
            f()
        return host_milliseconds(f, device, CALLS)

    parts: dict[str, Callable[[], object]] = {"forward": forward, "both": both, "nothing": nothing}
    for replay, direction in zip(found, ("forward", "backward"), strict=True):
        run = replay.program.run
        parts[f"{direction} program"] = lambda r=replay, f=run: f(r.plan, r.inputs, r.stream)
        parts[f"{direction} program, no launches"] = without_launches(replay)
        parts[f"{direction} launches"] = Bare([replay])
    small, size = torch.zeros(8, device=device), (16, 16)
    parts["one torch op"] = lambda: small.add_(1.0)
    parts["one allocation"] = lambda: torch.empty_strided(size, (16, 1), device=device)
    row: dict[str, Any] = {"op": name, "shape": shape.name}
    row |= {part: milliseconds(f) for part, f in parts.items()}
    with torch.autograd.set_multithreading_enabled(False):
        row["both, on one thread"] = milliseconds(both)
        row["nothing, on one thread"] = milliseconds(nothing)
    with torch.no_grad():
        row["forward, no_grad"] = milliseconds(forward)
    return row


def main() -> None:
    from benchmarks.ops import environment

    if not torch.cuda.is_available():
        raise SystemExit("benchmarks.call_parts needs a GPU")
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.call_parts", description=__doc__, allow_abbrev=False
    )
    parser.add_argument("--op", default="kda,gdn-layer", help=f"of {', '.join(MEMBERS)}")
    parser.add_argument("--shapes", default="t2k,t8k", help=f"t2k, or of {', '.join(SHAPES)}")
    parser.add_argument("--out", type=Path)
    args = parser.parse_args()
    shapes = {**SHAPES, "t2k": Shape("t2k", 2048)}
    rows = []
    for name in args.op.split(","):
        for shape in args.shapes.split(","):
            rows.append(measure(name, shapes[shape], "cuda"))
            print(rows[-1], flush=True)
    if args.out:
        args.out.write_text(json.dumps({**environment(), "rows": rows}, indent=1) + "\n")


if __name__ == "__main__":
    main()
