"""Shapes that the benchmarks run, by name."""

from __future__ import annotations

import random
from dataclasses import dataclass
from itertools import pairwise

LOWER_BOUND = -5.0
"""The smallest log decay of a token with a safe gate."""


@dataclass(frozen=True)
class Shape:
    """One call with B = 1 in bf16.

    cu_seqlens: offsets of packed documents, or None. KDA has norm, gate and beta's sigmoid inside.
    safe: a gate bounded by LOWER_BOUND instead of the softplus gate.
    """

    name: str
    T: int
    H: int = 32
    HV: int = 32
    K: int = 128
    V: int = 128
    cu_seqlens: tuple[int, ...] | None = None
    safe: bool = True
    disable_recompute: bool = False

    @property
    def longest(self) -> int:
        """Tokens of the longest document."""
        offsets = self.cu_seqlens or (0, self.T)
        return max(b - a for a, b in pairwise(offsets))

    @property
    def options(self) -> dict[str, object]:
        bound = {"safe_gate": True, "lower_bound": LOWER_BOUND} if self.safe else {}
        return {
            "use_qk_l2norm_in_kernel": True,
            "use_gate_in_kernel": True,
            "use_beta_sigmoid_in_kernel": True,
            "disable_recompute": self.disable_recompute,
            **bound,
        }


def documents(total: int, seed: int = 0) -> tuple[int, ...]:
    """Offsets of documents with log-uniform lengths from 1 to an eighth of `total`."""
    draw, offsets = random.Random(seed), [0]
    while offsets[-1] < total:
        length = int(2 ** draw.uniform(0, (total // 8).bit_length() - 1))
        offsets.append(min(total, offsets[-1] + length))
    return tuple(offsets)


MOST_DIM = 256
"""The widest heads that all operators take; GLA and simple GLA take wider ones."""

SHAPES = {
    s.name: s
    for s in (
        Shape("target", 32768),
        Shape("target-kept", 32768, disable_recompute=True),
        Shape("target-any", 32768, safe=False),
        Shape("t8k", 8192),
        Shape("t8k-h8", 8192, H=8, HV=8),
        Shape("t2k", 2048),
        Shape("t2k-h8", 2048, H=8, HV=8),
        Shape("t131k", 131072),
        Shape("h8", 32768, H=8, HV=8),
        Shape("h4", 131072, H=4, HV=4),
        Shape("grouped", 32768, H=16),
        Shape("packed16k", 16384, cu_seqlens=documents(16384)),
        Shape("packed64", 16384, cu_seqlens=documents(16384, seed=32)),
        Shape("short16", 32768, cu_seqlens=tuple(range(0, 32769, 16))),
        Shape("short32", 32768, cu_seqlens=tuple(range(0, 32769, 32))),
        Shape("wide", 8192, H=8, HV=8, K=512, V=512),
        Shape("k256", 16384, H=8, HV=8, K=256, V=256),
        Shape("k256v512", 16384, H=4, HV=4, K=256, V=512),
        Shape("cpu", 256, H=2, HV=2, K=16, V=16),
    )
}
