"""How long the host takes for a layer, and what it does meanwhile.

    python -m benchmarks.layer_host [--layers kda,gdn] [--tokens 8192] [--out FILE]

Counted in one eager forward, or forward and backward: nodes of the autograd graph, calls of torch's
operators (aten) and kernels that are launched. On a machine without a GPU a driver stands in for it
that launches nothing (tests/support/driver.py). The layer is then small, products are left out, and
`host_ms` has no device's time in it: it compares two versions of the package on one processor.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.profiler import ProfilerActivity, profile

from benchmarks import units

LAYERS = {"kda": ("KimiDeltaAttention", {"gate_lower_bound": -5.0}), "gdn": ("GatedDeltaNet", {})}

SIZES = {"cuda": {"hidden_size": 2304, "num_heads": 18}, "cpu": {"hidden_size": 16, "num_heads": 1}}
"""Of the layers, whose heads have 128 channels."""

WARM_CALLS, TIMED_CALLS = 6, 100

_VIEWS = "alias as_strided detach expand flatten narrow reshape _reshape_alias select slice split "
_VIEWS += "split_with_sizes squeeze t to transpose unflatten unsqueeze view _unsafe_view "
_EMPTY = "empty empty_like empty_strided new_empty resolve_conj resolve_neg"
WITHOUT_KERNEL = {f"aten::{name}" for name in (_VIEWS + _EMPTY).split()}
"""Operators that make or view memory. A call of another one, that calls none, is a kernel."""

_LAUNCHES = ("cudaLaunchKernel", "cuLaunchKernel", "cudaMemsetAsync", "cudaMemcpyAsync")

UNIT = units.LAYER_HOST


@contextmanager
def _without_products() -> Iterator[None]:
    """In the block, products on the CPU only allocate their results."""
    library = torch.library.Library("aten", "IMPL")

    def product(a: Tensor, b: Tensor) -> Tensor:
        return a.new_empty(a.shape[0], b.shape[1])

    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)  # that they are replaced
        library.impl("mm", product, "CPU")
        library.impl("addmm", lambda c, a, b, *, beta=1, alpha=1: product(a, b), "CPU")
        library.impl("addmm_", lambda c, a, b, *, beta=1, alpha=1: c, "CPU")
    try:
        yield
    finally:
        library._destroy()


@contextmanager
def machine() -> Iterator[tuple[str, Callable[[], int]]]:
    """A device for layers, and a count of the launches of Triton kernels so far, on the CPU."""
    if torch.cuda.is_available():
        yield "cuda", lambda: 0
        return
    from tests.support.driver import idle

    with idle() as driver, _without_products():
        yield "cpu", lambda: len(driver.launches)


def built(name: str, device: str, **options: Any) -> nn.Module:
    """A layer in bf16, the parameters of its gate in fp32."""
    import fla_cp.nn

    kind, own = LAYERS[name]
    layer = getattr(fla_cp.nn, kind)(**SIZES[device], **own, **options).to(device, torch.bfloat16)
    layer.core.float()
    return layer


def nodes(y: Tensor) -> int:
    """How many nodes the graph of y has, without those that accumulate gradients."""
    seen, left = set(), [y.grad_fn]
    while left:
        node = left.pop()
        if node is not None and node not in seen and "AccumulateGrad" not in node.name():
            seen.add(node)
            left += [source for source, _ in node.next_functions]
    return len(seen)


def counted(call: Callable[[], object], launches: Callable[[], int]) -> dict[str, int]:
    """How many aten operators and kernels a call has."""
    before, found = launches(), [ProfilerActivity.CPU]
    if torch.cuda.is_available():
        found.append(ProfilerActivity.CUDA)
    with profile(activities=found) as profiled:
        call()
        if torch.cuda.is_available():
            torch.cuda.synchronize()
    events = profiled.events()
    aten = [e for e in events if e.name.startswith("aten::")]
    kernels = launches() - before
    if torch.cuda.is_available():
        kernels = sum(e.name.startswith(_LAUNCHES) for e in events)
    else:
        inner = (all(c.name in WITHOUT_KERNEL for c in e.cpu_children) for e in aten)
        kernels += sum(e.name not in WITHOUT_KERNEL and i for e, i in zip(aten, inner, strict=True))
    return {"aten": len(aten), "kernels": kernels}


def milliseconds(call: Callable[[], object], device: str) -> float:
    times = []
    for _ in range(TIMED_CALLS):
        if device == "cuda":
            torch.cuda.synchronize()
        started = time.perf_counter()
        call()
        times.append(1e3 * (time.perf_counter() - started))
    return round(statistics.median(times), 3)


def measure(name: str, T: int, device: str, launches: Callable[[], int]) -> dict[str, Any]:
    """A row: host_ms, aten and kernels of a forward and of both directions, and nodes."""
    layer = built(name, device)
    width = SIZES[device]["hidden_size"]
    x = torch.randn(1, T, width, dtype=torch.bfloat16, device=device).requires_grad_()
    dy, leaves = torch.ones_like(x), [x, *layer.parameters()]

    def both() -> None:
        torch.autograd.backward(layer(x), dy)
        for leaf in leaves:
            leaf.grad = None

    row: dict[str, Any] = {"layer": name, "T": T, "nodes": nodes(layer(x))}
    for direction, call in (("forward", lambda: layer(x)), ("both", both)):
        for _ in range(WARM_CALLS):
            call()
        row[direction] = {"host_ms": milliseconds(call, device), **counted(call, launches)}
    return row


def main(argv: list[str] | None = None) -> None:
    from benchmarks.ops import environment

    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.layer_host", description=__doc__, allow_abbrev=False
    )
    parser.add_argument("--layers", default="kda,gdn", help=f"of {', '.join(LAYERS)}")
    parser.add_argument("--tokens", type=int, help="default: 8192, and 2 without a GPU")
    parser.add_argument("--out", type=Path)
    args = parser.parse_args(argv)
    rows: list[dict[str, Any]] = []
    with machine() as (device, launches):
        for name in args.layers.split(","):
            T = args.tokens or (8192 if device == "cuda" else 2)
            rows.append(measure(name, T, device, launches))
            print(rows[-1], flush=True)
    if args.out:
        found = {**environment(), "benchmark": "layer_host", "unit": UNIT, "rows": rows}
        args.out.write_text(json.dumps(found, indent=1) + "\n")


if __name__ == "__main__":
    main()
