"""The inputs and tiles that are checked on a GPU."""

from __future__ import annotations

from collections.abc import Iterator

import torch

from benchmarks import tune
from fla_cp.kernels.triton.tile_table import Tile
from tests.support.cases import INSIDE, Case, options

SAFE = {"safe_gate": True, "lower_bound": -5.0}
BF16, FP16, FP32 = torch.bfloat16, torch.float16, torch.float32

SIZES = ((16, 16), (64, 64), (96, 64), (128, 128), (192, 128), (256, 256))
LENGTHS = (1, 63, 64, 65, 1000, 8192)


def cases(K: int, V: int) -> Iterator[tuple[str, Case, torch.dtype]]:
    """Cases of `chunk_kda` for one size: name, case, dtype."""
    inside, safe = options(**INSIDE), options(**INSIDE, **SAFE)
    shape = {"H": 2, "HV": 2, "K": K, "V": V}
    grouped = {**shape, "HV": 4}
    cu = (0, 1, 65, 65, 700, 1000)
    for T in LENGTHS:
        yield f"safe T={T}", Case("safe", T=T, **shape, options=safe), BF16
        yield f"any T={T}", Case("any", T=T, **shape, options=inside), BF16
        yield f"any fp32 T={T}", Case("any", T=T, **shape, options=inside), FP32
    yield "safe fp32", Case("safe", T=300, **shape, options=safe), FP32
    yield "safe fp16", Case("safe", T=300, **shape, options=safe), FP16
    yield "grouped packed", Case("p", T=1000, **grouped, cu_seqlens=cu, options=safe), BF16
    yield "grouped packed any", Case("p", T=1000, **grouped, cu_seqlens=cu, options=inside), BF16
    yield "grouped packed fp32", Case("p", T=1000, **grouped, cu_seqlens=cu, options=inside), FP32
    yield "given slow", Case("g", T=1000, **shape, decay=1e-3), BF16
    yield "given strong", Case("g", T=300, **shape, decay=40.0), BF16
    yield "given mixed", Case("g", T=300, **shape, decay=3.5), BF16  # of both paths' chunks
    yield "given safe", Case("g", T=300, **shape, decay=5.0, options=options(**SAFE)), BF16
    yield "none", Case("g", T=300, **shape, decay=0.0), BF16
    yield "rows", Case("r", T=130, B=3, **shape, options=safe), BF16
    keep = options(**INSIDE, **SAFE, disable_recompute=True)
    yield "kept", Case("k", T=300, **shape, options=keep), BF16
    more = options(**INSIDE, **SAFE, allow_neg_eigval=True, scale=0.5)
    yield "neg eigval", Case("n", T=300, **shape, options=more), BF16
    high = {"precision": "high"}
    for T in (1, 65, 1000):
        yield (
            f"safe high T={T}",
            Case("h", T=T, **shape, options=options(**INSIDE, **SAFE, **high)),
            BF16,
        )
    yield "any high fp16", Case("h", T=300, **shape, options=options(**INSIDE, **high)), FP16
    keep = options(**INSIDE, disable_recompute=True, **high)
    yield "any high kept", Case("h", T=1000, **grouped, cu_seqlens=cu, options=keep), BF16
    yield "exp", Case("e", T=300, **shape, options=options(**INSIDE, use_exp2=False)), BF16


def tiles(K: int, V: int) -> Iterator[tuple[str, str, Tile]]:
    """(name, stage, tile) of every candidate of every stage."""
    for stage in tune.STAGES:
        for tile in tune.candidates(stage, K, V):
            yield f"{stage} {tuple(tile)}", stage, tile


def recurrent_cases(K: int, V: int) -> Iterator[tuple[str, Case, torch.dtype, bool]]:
    """Cases of `fused_recurrent_kda`: name, case, dtype, whether states are [V, K]."""
    shape = {"H": 2, "HV": 4, "K": K, "V": V, "options": options(**INSIDE)}
    bounded = options(**INSIDE, lower_bound=-5.0, use_exp2=False, allow_neg_eigval=True)
    for layout, v_first in (("KV", False), ("VK", True)):
        for T in (1, 5, 64):
            yield f"recurrent {layout} T={T}", Case("r", B=3, T=T, **shape), BF16, v_first
        cu = (0, 1, 1, 7, 30)
        yield f"recurrent {layout} packed", Case("p", T=30, cu_seqlens=cu, **shape), BF16, v_first
        yield f"recurrent {layout} fp32", Case("f", B=3, T=5, **shape), FP32, v_first
        yield f"recurrent {layout} fp16", Case("f", B=3, T=5, **shape), FP16, v_first
        plain = {**shape, "options": bounded}
        yield f"recurrent {layout} bounded", Case("b", B=3, T=5, **plain), BF16, v_first
        given = {**shape, "options": ()}
        yield f"recurrent {layout} given", Case("g", B=3, T=5, **given), BF16, v_first
