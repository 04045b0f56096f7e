"""Tile choices: one row a stage, looked up by shape and dtype; nothing is tuned at run time."""

from __future__ import annotations

from typing import NamedTuple

import torch
import os; E=os.environ


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
        return Tile(int(E.get('IBK',32)), 0, 4, int(E.get('INS',1)), int(E.get('IR',168)) or None)
    if stage == "intra_bwd":
        return Tile(int(E.get('BBK',64)), int(E.get('BBV',64)), 4, int(E.get('BNS',1)), int(E.get('BR',0)) or None)
    if wide:
        return Tile(k, min(v, 16 if k > 128 else 32), 4, 1)
    return Tile(k, min(v, 32), 4, 3 if k <= 128 else 1)
