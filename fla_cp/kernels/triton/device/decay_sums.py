"""Which log decays a row adds up, as constant 0/1 matrices E: exponents are products E @ g.

A difference of two cumulative sums would cancel; a sum of the steps between two rows does not."""

from __future__ import annotations

import functools

import torch
import triton
import triton.language as tl
from torch import Tensor

UP_TO = tl.constexpr(0)
"""Steps from the chunk's start up to row i, with it: gc_i."""
AFTER = tl.constexpr(1)
"""Steps after row i up to the chunk's end: gc_C - gc_i."""
FROM_HERE = tl.constexpr(2)
"""Steps from row i, with it, up to the chunk's end; turns the gradient of gc into that of g."""
FIRST = tl.constexpr(3)
"""gc_i - gc_m, m the middle row (15) of the chunk's first half: rows against its columns."""
MIDDLE = tl.constexpr(4)
"""gc_i - gc_m, m the middle row (15 or 47) of row i's own half."""
PAIR = tl.constexpr(5)
"""PAIR + n: between row i and the last row r of the first block of its pair of S-blocks,
S = 32 >> n. Second blocks: gc_i - gc_r; first blocks: gc_r - gc_i. Never positive."""

LEVELS = 6


@triton.constexpr_function
def widest_level(BT):
    """The level of `PAIR` whose blocks are the two halves of a chunk of BT tokens."""
    return LEVELS - BT.bit_length() + 1


@functools.cache
def sums(dtype: torch.dtype, device: torch.device, chunk: int) -> Tensor:
    """[5 + LEVELS, C, C] of -1, 0 and 1, indexed by the names above; bf16, or fp32 for fp32. C is
    `chunk`. A chunk of 32 is the first half of one of 64 and lacks its widest level, and so on."""
    row = torch.arange(chunk, device="cpu")
    i, j = row[:, None], row[None]

    def since(m: Tensor) -> Tensor:
        return ((j > m) & (j <= i)).int() - ((j <= m) & (j > i)).int()

    tables = [i >= j, i < j, i <= j, since(torch.full_like(i, 15)), since(i // 32 * 32 + 15)]
    for n in range(LEVELS):
        S = 32 >> n
        second = i // S % 2 == 1
        tables.append((i // S == j // S) & ((i >= j) == second))
    kept = torch.float32 if dtype == torch.float32 else torch.bfloat16
    return torch.stack([t.to(kept) for t in tables]).to(device)
