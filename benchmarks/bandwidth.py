"""Operators bound by memory, beside a copy of as many bytes: decoding, convolution, the gate alone.

    python -m benchmarks.bandwidth [--peer fla] [--out FILE.json]

Each row has the bytes that must move once and the time that a device copy takes for them in the
same run; "over copy" is the ratio. On a machine without a GPU one small row runs on torch stages.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor

from benchmarks.ops import environment, milliseconds

INSIDE = {
    "use_qk_l2norm_in_kernel": True,
    "use_gate_in_kernel": True,
    "use_beta_sigmoid_in_kernel": True,
}


class Row(NamedTuple):
    """name; bytes that must be read and written once; our call; the peer's, or None."""

    name: str
    size: int
    ours: Callable[[], object]
    theirs: Callable[[], object] | None


def nbytes(*tensors: Tensor) -> int:
    return sum(t.nbytes for t in tensors)


def decoding(device: str, peer: bool, B: int, HV: int, K: int, V: int) -> Iterator[Row]:
    """One token for each of B sequences, states overwritten, in both layouts."""
    from fla_cp import fused_recurrent_kda

    def draw(*shape: int) -> Tensor:
        return torch.randn(*shape, device=device, dtype=torch.bfloat16)

    x = [draw(B, 1, HV, K), draw(B, 1, HV, K), draw(B, 1, HV, V), draw(B, 1, HV, K), draw(B, 1, HV)]
    rates = {n: torch.zeros(s, device=device) for n, s in (("A_log", HV), ("dt_bias", HV * K))}
    for v_first in (False, True):
        S = torch.zeros(B, HV, *((V, K) if v_first else (K, V)), device=device)
        more = {**rates, **INSIDE, "initial_state": S, "state_v_first": v_first}

        def ours(more: dict = more) -> object:
            return fused_recurrent_kda(*x, **more, inplace_final_state=True)

        theirs = None
        if peer:
            from fla.ops.kda.fused_recurrent import fused_recurrent_kda_fwd

            def theirs(more: dict = more) -> object:
                return fused_recurrent_kda_fwd(*x, **more, inplace_final_state=True)

        layout = "[V, K]" if v_first else "[K, V]"
        yield Row(f"decode B={B} HV={HV} {layout}", 2 * S.nbytes, ours, theirs)


def convolution(device: str, peer: bool, T: int, D: int) -> Iterator[Row]:
    from fla_cp import causal_conv1d

    x, weight = (
        torch.randn(*s, device=device, dtype=torch.bfloat16).requires_grad_()
        for s in ((1, T, D), (D, 4))
    )
    dy = torch.randn_like(x).detach()
    calls: list[tuple] = []
    for op in (causal_conv1d, _fla("fla.modules.causal_conv1d", "causal_conv1d") if peer else None):
        if op is None:
            calls.append((None, None))
            continue

        def forward(op: Callable = op) -> Tensor:
            y = op(x, weight, activation="silu")
            return y[0] if isinstance(y, tuple) else y

        def both(forward: Callable = forward) -> object:
            return torch.autograd.grad(forward(), (x, weight), dy)

        calls.append((forward, both))
    (forward, both), (forward2, both2) = calls
    yield Row(f"convolution T={T} D={D}", 2 * x.nbytes, forward, forward2)
    yield Row(f"convolution T={T} D={D}, with backward", 5 * x.nbytes, both, both2)


def gate(device: str, peer: bool, T: int, H: int, K: int) -> Iterator[Row]:
    from fla_cp import kda_gate

    g = torch.randn(T, H, K, device=device, dtype=torch.bfloat16).requires_grad_()
    A_log, dt_bias = (torch.zeros(n, device=device, requires_grad=True) for n in (H, H * K))
    dout = torch.randn(T, H, K, device=device)
    theirs = _fla("fla.ops.kda.gate", "fused_kda_gate") if peer else None

    def with_backward(op: Callable) -> Callable[[], object]:
        return lambda: torch.autograd.grad(op(g, A_log, dt_bias), (g, A_log, dt_bias), dout)

    size = nbytes(g, g, g, dout, dout)  # forward: g in, log decay out; backward: both in, dg out
    yield Row(
        f"gate T={T} H={H}, with backward",
        size,
        with_backward(kda_gate),
        with_backward(theirs) if theirs else None,
    )


def _fla(module: str, name: str) -> Callable:
    import importlib

    try:
        return getattr(importlib.import_module(module), name)
    except ImportError as error:
        raise SystemExit(f"--peer fla needs fla-core 0.6.0 ({error})") from error


def rows(device: str, peer: bool) -> Iterator[Row]:
    if device == "cpu":
        yield from decoding(device, peer, 2, 2, 16, 16)
        return
    for B in (256, 32):
        yield from decoding(device, peer, B, 32, 128, 128)
    yield from convolution(device, peer, 32768, 12288)
    yield from gate(device, peer, 32768, 32, 128)


def measure(row: Row, device: str) -> dict:
    row.ours()
    there = torch.empty(row.size // 2, dtype=torch.uint8, device=device)
    here = torch.empty_like(there)
    ms, copy = milliseconds(row.ours, device), milliseconds(lambda: here.copy_(there), device)
    found = {
        "op": row.name,
        "ms": round(ms, 4),
        "bytes": row.size,
        "copy_ms": round(copy, 4),
        "over_copy": round(ms / copy, 3),
    }
    if row.theirs is not None:
        found["fla_ms"] = round(milliseconds(row.theirs, device), 4)
        found["vs_fla"] = round(found["fla_ms"] / ms, 3)
    return found


def main() -> None:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.bandwidth", description=__doc__, allow_abbrev=False
    )
    parser.add_argument("--peer", choices=("fla",))
    parser.add_argument("--out", type=Path)
    args = parser.parse_args()
    device = "cuda" if torch.cuda.is_available() else "cpu"
    done = []
    print("| operator | ms | over copy | FLA ms | vs FLA |\n|---|---|---|---|---|")
    for row in rows(device, args.peer is not None):
        r = measure(row, device)
        done.append(r)
        peer = f"{r['fla_ms']} | {r['vs_fla']}x" if "fla_ms" in r else "| "
        print(f"| {r['op']} | {r['ms']} | {r['over_copy']}x | {peer} |", flush=True)
        if args.out:
            args.out.write_text(json.dumps({**environment(), "rows": done}, indent=1) + "\n")


if __name__ == "__main__":
    main()
