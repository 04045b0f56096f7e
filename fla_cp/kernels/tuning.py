"""Tile choices: one row a stage, looked up by shape and dtype; nothing is tuned at run time."""

from __future__ import annotations

from typing import NamedTuple

import torch


class Tile(NamedTuple):
    """BK, BV: key and value tile. warps, stages: of the compiled kernel. registers: most that a
    thread may have, or None."""

    BK: int
    BV: int
    warps: int
    stages: int
    registers: int | None = None


def power_of_two(n: int, least: int = 16) -> int:
    """The smallest power of two that holds n, at least `least` (the smallest dot)."""
    size = least
    while size < n:
        size *= 2
    return size


def tile(stage: str, K: int, V: int, dtype: torch.dtype) -> Tile:
    """The tile of a stage: "intra", "scan", "scan_bwd" or "intra_bwd"."""
    wide = dtype == torch.float32
    k, v = power_of_two(K), power_of_two(V, 32)
    if stage == "intra":
        return Tile(32, 0, 4, 1, 168)
    if stage == "intra_bwd":
        return Tile(64, 64, 4, 1)
    if wide:
        return Tile(k, min(v, 16 if k > 128 else 32), 4, 1)
    return Tile(k, min(v, 32), 4, 3 if k <= 128 else 1)
