"""Products of a decoding step with more sequences than decoding.py computes without tensor cores.

The time is that of reading the weight, of which a program has a few rows, or some columns of these.
Tokens are the rows of the product, since RMSNorm multiplies them while they are registers; its
root divides the sums at the end, as in decoding.py. Where rows are too few for all SMs, columns are
split over programs: each writes its sums, and the one that comes last adds them up in their order.
"""

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from fla_cp.kernels.torch.decoding import StepProduct
from fla_cp.kernels.triton.device.bundles import constants
from fla_cp.kernels.triton.device.gates import sigmoid
from fla_cp.kernels.triton.early import (
    SECTOR,
    allow_next,
    fetch,
    launch_early,
    starts_early,
    wait_for_last,
)
from fla_cp.kernels.triton.launch import INTERPRETED, cdiv
from fla_cp.kernels.triton.tile_table import power_of_two

MAX_ROWS = 64
"""The most sequences. 0: all products of several sequences are calls of cuBLAS."""

ROWS, COLUMNS = 64, 64
"""Rows and columns of a tile of the weight."""

STAGES = 5
"""Tiles of a program that are on their way or in use: 16 KB each of tokens and weight, 24 KB with
SwiGLU."""

PROGRAMS = 128
"""About how many programs a product should have: one for each SM of an H100 or H200."""

MAX_SPLITS = 4
"""The most programs for the columns of a row. Their sums are written and read once more."""

FETCHED = 512
"""Bytes of each row, a power of two, that a program fetches into the L2 cache while the kernel
ahead ends. 0: none."""


class Shared(NamedTuple):
    """Memory by which programs of the same rows add up: sums [splits, B, R] fp32, and how many of
    them have come [R / BR] int32, zero before and after a call; None if columns are not split."""

    sums: Tensor | None
    come: Tensor | None


@constants
class DotShape(NamedTuple):
    """Rows and columns of a weight (R is half of its rows with SWIGLU), the tiles BB of sequences,
    BR and BC, PART columns of a program (a multiple of BC), whether the gate of SwiGLU is
    multiplied in, and whether y is added to. FETCH, EARLY: see FETCHED, and early.py."""

    R: int
    C: int
    BB: int
    BR: int
    BC: int
    PART: int
    FETCH: int
    SWIGLU: bool
    ONTO: bool
    EARLY: bool


@triton.jit
def fetch_rows(weight, i_r, i_s, S: tl.constexpr):
    """Brings the first columns of a program's rows into the L2 cache."""
    o_r = tl.minimum(i_r * S.BR + tl.arange(0, S.BR), S.R - 1).to(tl.int64)
    o = tl.arange(0, S.FETCH // SECTOR) * SECTOR
    p = (weight + o_r * S.C + i_s * S.PART).to(tl.pointer_type(tl.int8))
    fetch(p[:, None] + o[None, :])


@triton.jit
def load_tile(p, o_r, o_c, row, n, C: tl.constexpr):
    """[BN, BC]: rows below n and columns below C, zero outside."""
    m = (o_r < n)[:, None] & (o_c < C)[None, :]
    return tl.load(p + o_r.to(tl.int64)[:, None] * row + o_c[None, :], mask=m, other=0.0)


@triton.jit
def finished(b_y, b_u, b_squares, bias, y, o_b, o_r, B, y_row, eps, NORM, S: tl.constexpr):
    """Stores the sums [BB, BR] with what stands behind the product."""
    m = (o_b < B)[:, None] & (o_r < S.R)[None, :]
    if NORM:
        factor = tl.rsqrt(b_squares / S.C + eps)[:, None]
        b_y *= factor
        b_u *= factor
    if bias is not None:
        b_y += tl.load(bias + o_r, mask=o_r < S.R, other=0.0).to(tl.float32)[None, :]
    if S.SWIGLU:
        b_y = b_y * sigmoid(b_y) * b_u
    p = y + o_b.to(tl.int64)[:, None] * y_row + o_r[None, :]
    if S.ONTO:
        b_y += tl.load(p, mask=m, other=0.0).to(tl.float32)
    tl.store(p, b_y.to(y.dtype.element_ty), mask=m)


@triton.jit
def step_dot_kernel(x, norm, weight, bias, y, shared, B, x_row, y_row, eps, S: tl.constexpr):
    """x [B, G * C] and y [B, G * R] with their strides of rows; norm [C] or None; weight [G, R, C],
    or [1, 2 R, C] with SWIGLU; bias [G * R] or None; shared: `Shared`. A program has BR rows of one
    input, and PART columns of them."""
    allow_next(S.EARLY)
    i_r, i_s, i_g = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    o_b, o_r = tl.arange(0, S.BB), i_r * S.BR + tl.arange(0, S.BR)
    weight += i_g.to(tl.int64) * S.R * S.C
    x += i_g * S.C
    y += i_g * S.R
    if bias is not None:
        bias += i_g * S.R
    up = weight + S.R * S.C
    if S.EARLY and S.FETCH > 0:
        fetch_rows(weight, i_r, i_s, S)
        if S.SWIGLU:
            fetch_rows(up, i_r, i_s, S)
    wait_for_last(S.EARLY)
    b_y = tl.zeros([S.BB, S.BR], tl.float32)
    b_u = tl.zeros([S.BB, S.BR], tl.float32)
    squares = tl.zeros([S.BB, S.BC], tl.float32)
    for c in range(i_s * S.PART, tl.minimum(i_s * S.PART + S.PART, S.C), S.BC):
        o_c = c + tl.arange(0, S.BC)
        b_x = load_tile(x, o_b, o_c, x_row, B, S.C)
        b_w = load_tile(weight, o_r, o_c, S.C, S.R, S.C)
        if norm is not None:
            b_n = tl.load(norm + o_c, mask=o_c < S.C, other=0.0).to(tl.float32)
            b_f = b_x.to(tl.float32)
            squares += b_f * b_f
            b_x = (b_f * b_n[None, :]).to(b_x.dtype)
        b_y = tl.dot(b_x, tl.trans(b_w), b_y)
        if S.SWIGLU:
            b_u = tl.dot(b_x, tl.trans(load_tile(up, o_r, o_c, S.C, S.R, S.C)), b_u)
    b_squares = tl.sum(squares, axis=1)
    last = True
    if shared.sums is not None:
        # [splits, BB, R], of which a program of each split writes BR columns
        p = shared.sums + (i_s * S.BB + o_b)[:, None] * S.R + o_r[None, :]
        tl.store(p, b_y, mask=(o_r < S.R)[None, :])
        tl.debug_barrier()
        splits: tl.constexpr = (S.C + S.PART - 1) // S.PART
        last = tl.atomic_add(shared.come + i_r, 1, sem="acq_rel") == splits - 1
        if last:
            b_y = tl.zeros([S.BB, S.BR], tl.float32)
            for s in tl.static_range(splits):
                p = shared.sums + (s * S.BB + o_b)[:, None] * S.R + o_r[None, :]
                b_y += tl.load(p, mask=(o_r < S.R)[None, :], other=0.0, cache_modifier=".cg")
            tl.store(shared.come + i_r, 0)
    if last:
        HAS_NORM: tl.constexpr = norm is not None
        finished(b_y, b_u, b_squares, bias, y, o_b, o_r, B, y_row, eps, HAS_NORM, S)


def takes(p: StepProduct) -> bool:
    """Whether the kernel takes a product of several sequences: in half precision, with rows that
    start at multiples of 16 bytes."""
    if INTERPRETED and p.x.dtype == torch.bfloat16:  # the interpreter multiplies their bits
        return False
    aligned = p.weight.shape[2] % 8 == 0 and p.x.stride(0) % 8 == 0 and p.x.data_ptr() % 16 == 0
    return len(p.x) <= MAX_ROWS and p.weight.dtype.itemsize == 2 and aligned


def step_dot(p: StepProduct) -> Tensor:
    """As in kernels/torch/decoding.py, for what `takes`; x has unit stride in its last dim."""
    B, (G, R, C) = len(p.x), p.weight.shape
    R = R // 2 if p.swiglu else R
    y = p.onto
    if y is None:
        y = torch.empty(B, G * R, dtype=p.x.dtype, device=p.x.device)
    BB, tiles, part, shared = power_of_two(B), cdiv(R, ROWS), C, Shared(None, None)
    splits = min(MAX_SPLITS, PROGRAMS // tiles)
    plain = G == 1 and p.norm is None and not p.swiglu
    if plain and p.come is not None and splits > 1:
        assert len(p.come) >= tiles
        part = COLUMNS * cdiv(cdiv(C, COLUMNS), splits)
        shape = cdiv(C, part), BB, R
        shared = Shared(torch.empty(shape, dtype=torch.float32, device=y.device), p.come)
    early = starts_early(p.x)
    fetched = FETCHED if part * p.weight.element_size() >= FETCHED else 0
    S = DotShape(R, C, BB, ROWS, COLUMNS, part, fetched, p.swiglu, p.onto is not None, early)
    grid, strides = (tiles, cdiv(C, part), G), (p.x.stride(0), y.stride(0))
    given = p.x, p.norm, p.weight, p.bias, y, shared, B, *strides, p.eps, S
    launch_early(step_dot_kernel, grid, *given, early=early, num_warps=4, num_stages=STAGES)
    return y
