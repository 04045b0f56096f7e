"""Softmax attention in parts, most of which cuDNN computes, against fp64 and flash attention."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple
from unittest.mock import patch

import torch
from torch import Tensor

from fla_cp.kernels.torch import attention, cudnn_attention
from fla_cp.partition.key_rows import Lengths
from tests.gpu import checks
from tests.gpu.cases import BF16, FP16


class Heads(NamedTuple):
    """H query heads and HK key heads, K and V channels."""

    H: int
    HK: int
    K: int
    V: int


HEADS = (
    Heads(4, 2, 128, 128),
    Heads(4, 1, 256, 256),
    Heads(2, 2, 192, 128),
    Heads(4, 4, 64, 64),
    Heads(2, 1, 96, 96),
)

LENGTHS = {
    "one sequence": Lengths((4096,), (4096,)),
    "an odd length": Lengths((5001,), (5001,)),
    "keys before": Lengths((2048,), (8192,)),
    "odd lengths": Lengths((2500,), (9007,)),
    "long and short": Lengths((30, 2100, 1, 700, 4096, 5001), (30, 7000, 1, 900, 4096, 5001)),
    "all keys": Lengths((2048, 2600), (4096, 3001), False),
}

MOST = 1.5
"""The largest error, as a multiple of that of flash attention alone."""


def errors(found: tuple[Tensor, ...], exact: tuple[Tensor, ...]) -> dict[str, float]:
    """Relative errors of o and the gradients, and the largest error of the logarithms."""
    names = ("o", "lse", "dq", "dk", "dv")
    pairs = {n: (a.double(), b) for n, a, b in zip(names, found, exact, strict=True)}
    a, b = pairs.pop("lse")
    error = {name: ((a - b).norm() / b.norm()).item() for name, (a, b) in pairs.items()}
    return error | {"lse": (a - b).abs().max().item()}


def both(
    x: tuple[Tensor, ...],
    lengths: Lengths,
    scale: float,
    forward: Callable[..., attention.Attended] = attention.attend,
    backward: Callable[..., tuple[Tensor, ...]] = attention.attend_bwd,
) -> tuple[Tensor, ...]:
    q, k, v, do = x
    found = forward(q, k, v, lengths, scale)
    if backward is attention.attend_bwd:
        return *found, *backward(do, q, k, v, *found, lengths, scale)
    return *found, *backward(do, q, k, v, found, lengths, scale)


def check_attention() -> checks.Rows:
    """o, the logarithms of sums and all gradients. cuDNN must be called, and refuse nothing."""
    rows = []
    for heads in HEADS:
        for name, lengths in LENGTHS.items():
            for dtype in (BF16, FP16) if heads is HEADS[0] else (BF16,):
                rows.append(check_one(heads, name, lengths, dtype))
    return rows


def check_one(heads: Heads, name: str, lengths: Lengths, dtype: torch.dtype) -> dict:
    H, HK, K, V = heads
    gen = torch.Generator().manual_seed(0)
    n, m = sum(lengths.queries), sum(lengths.keys)
    sizes = ((n, H, K), (m, HK, K), (m, HK, V), (n, H, V))
    x = tuple(torch.randn(s, generator=gen).to(checks.DEVICE, dtype) for s in sizes)
    wide, scale = tuple(t.double() for t in x), K**-0.5
    exact = both(wide, lengths, scale, attention._torch, attention._torch_bwd)
    flash = errors(both(x, lengths, scale, attention._flash, attention._flash_bwd), exact)
    kernels = {d: getattr(cudnn_attention, d) for d in ("forward", "backward")}
    with (
        patch.object(cudnn_attention, "forward", side_effect=kernels["forward"]) as forward,
        patch.object(cudnn_attention, "backward", side_effect=kernels["backward"]) as backward,
    ):
        found = errors(both(x, lengths, scale), exact)
    limits = {key: MOST * error for key, error in flash.items()} | {"lse": 1e-4}
    worst = max(found, key=lambda key: found[key] / limits[key])
    use = found[worst] / limits[worst]
    row = {"case": f"attention {name} {tuple(heads)}", "dtype": str(dtype).removeprefix("torch.")}
    calls = min(forward.call_count, backward.call_count)
    ok = use <= 1 and calls > 0 and not cudnn_attention._refused
    return row | {"K": K, "V": V, "use": use, "worst": worst, "cudnn_calls": calls, "ok": ok}
