"""Folds chains of affine maps: one program per chain, head and value tile.

A step reads one transition and one offset. If no state enters, the first step needs no product. The
state is in memory that only its program uses, because registers cannot hold its K rows next to a
transition. It alternates between two places, with a barrier between the writes of one step and the
reads of the next. A product is formed as three TF32 products, whose rounding stays below 2^-20 of
the terms, as good as fp32 here. If the product of the transitions is wanted as well, it is K more
columns of the state, which start as the first step's transition."""

import functools
from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from fla_cp.comm.affine import Steps
from fla_cp.kernels.triton.device.blocks import dot
from fla_cp.kernels.triton.device.bundles import constants
from fla_cp.kernels.triton.launch import cdiv, launch
from fla_cp.kernels.triton.tile_table import power_of_two, sm_count
from fla_cp.partition.device_tables import Build, Columns, Tabled

NARROW = 16
"""Columns of a value tile if each such tile has a multiprocessor to itself: steps take 24 us
instead of 32 (H200, 8 steps of 8 heads, K = V = 128). Otherwise a tile has 32."""

SM90_PROCESSORS = 132
"""Multiprocessors where there is no GPU to ask: those of an H100 or H200."""


@triton.jit
def load_tile(ptr, row, o_r, o_c, R: tl.constexpr, C: tl.constexpr, STRIDE: tl.constexpr):
    """[BR, BC] of matrix `row` [R, C] of ptr, whose rows are STRIDE apart, zero beyond its edges
    and for row < 0."""
    p = ptr + row * R * STRIDE + o_r[:, None] * STRIDE + o_c[None, :]
    m_r, m_c = (o_r >= 0) & (o_r < R), (o_c >= 0) & (o_c < C)
    return tl.load(p, mask=(row >= 0) & m_r[:, None] & m_c[None, :], other=0.0)


@triton.jit
def load_transition(M, row, o_r, o_c, S: tl.constexpr):
    """A tile of matrix `row` [K, K] of M, or of its transpose."""
    if S.TRANSPOSED:
        return tl.trans(load_tile(M, row, o_c, o_r, S.K, S.K, S.M_ROW))
    else:
        return load_tile(M, row, o_r, o_c, S.K, S.K, S.M_ROW)


@triton.jit
def store_tile(ptr, x, row, o_r, o_c, R: tl.constexpr, C: tl.constexpr):
    p = ptr + row * R * C + o_r[:, None] * C + o_c[None, :]
    tl.store(p, x, mask=(row >= 0) & (o_r < R)[:, None] & (o_c < C)[None, :])


@triton.jit
def of_head(row, i_h, HV: tl.constexpr):
    """Row of a head's matrix in [*, HV, ., .]; -1 stays below zero."""
    return row.to(tl.int64) * HV + tl.where(row < 0, 0, i_h)


@constants
class FoldShape(NamedTuple):
    """W: columns of out, V or V + K. BR, BK: rows and columns of a transition's tile. M_ROW, B_ROW:
    the distance between rows of a matrix of M and of B."""

    HV: int
    K: int
    V: int
    W: int
    BR: int
    BK: int
    BV: int
    M_ROW: int
    B_ROW: int
    TRANSPOSED: bool


@triton.jit(do_not_specialize=["n"])
def fold_kernel(M, B, start, out, places, first, starts, entries, steps, n, S: tl.constexpr):
    """See `fla_cp.comm.affine.fold`. places [2, C, HV, K, W]: memory for the state. steps: int32
    [3, n], rows of M, B and out, -1 for none."""
    tiles: tl.constexpr = (S.W + S.BV - 1) // S.BV
    i_c, i_h = (tl.program_id(0) // tiles).to(tl.int64), tl.program_id(1).to(tl.int64)
    chains = (tl.num_programs(0) // tiles).to(tl.int64)
    o_b, o_v = tl.arange(0, S.BK), tl.program_id(0) % tiles * S.BV + tl.arange(0, S.BV)
    here = i_c * S.HV + i_h
    entry = of_head(tl.load(entries + i_c), i_h, S.HV)
    for r in range(tl.cdiv(S.K, S.BK)):
        o_r = r * S.BK + o_b
        if start is None:
            b_S = tl.zeros([S.BK, S.BV], tl.float32)
        else:
            b_S = load_tile(
                start, of_head(tl.load(starts + i_c), i_h, S.HV), o_r, o_v, S.K, S.V, S.V
            )
            store_tile(places, b_S, here, o_r, o_v, S.K, S.W)
        store_tile(out, b_S, entry, o_r, o_v, S.K, S.W)
    lo = tl.load(first + i_c)
    for j in range(tl.load(first + i_c + 1) - lo):
        i_m = of_head(tl.load(steps + lo + j), i_h, S.HV)
        i_b = of_head(tl.load(steps + n + lo + j), i_h, S.HV)
        i_o = of_head(tl.load(steps + 2 * n + lo + j), i_h, S.HV)
        i_t = tl.where(j == 0, i_m, -1)
        if start is None:  # then the state is zero
            i_m = tl.where(j == 0, -1, i_m)
        before, after = here + j % 2 * chains * S.HV, here + (j + 1) % 2 * chains * S.HV
        for r in tl.range(tl.cdiv(S.K, S.BR), disable_licm=True):
            o_r = r * S.BR + tl.arange(0, S.BR)
            acc = tl.zeros([S.BR, S.BV], tl.float32)
            if B is not None:
                acc = load_tile(B, i_b, o_r, o_v, S.K, S.V, S.B_ROW)
            if M is not None and S.W > S.V:
                acc += load_transition(M, i_t, o_r, o_v - S.V, S)
            if r == 0:
                tl.debug_barrier()
            if M is not None:
                enters = i_m >= 0
                if enters:
                    for c in tl.static_range((S.K + S.BK - 1) // S.BK):
                        b_M = load_transition(M, i_m, o_r, c * S.BK + o_b, S)
                        b_S = load_tile(places, before, c * S.BK + o_b, o_v, S.K, S.W, S.W)
                        acc = dot(b_M, b_S, "tf32x3", acc=acc)
            store_tile(places, acc, after, o_r, o_v, S.K, S.W)
            store_tile(out, acc, i_o, o_r, o_v, S.K, S.W)


@functools.cache
def _columns(steps: Steps) -> Build:
    def columns(owner: Tabled) -> Columns:
        w = steps(owner)
        return w.first, w.start, w.entry, (*w.transition, *w.offset, *w.store)

    return columns


def _rows(x: Tensor | None) -> tuple[Tensor | None, int]:
    """x [*, HV, K, C], or a copy, with all rows at the same distance; and that distance."""
    if x is None:
        return None, 0
    _, heads, rows, _ = x.shape
    apart = x.stride(2)
    if x.stride() != (heads * rows * apart, rows * apart, apart, 1):
        x, apart = x.contiguous(), x.shape[3]
    return x, apart


def fold(
    owner: Tabled,
    steps: Steps,
    transition: Tensor | None,
    offset: Tensor | None,
    start: Tensor | None,
    out: Tensor,
    *,
    transposed: bool,
) -> Tensor:
    first, starts, entries, rows = owner.table(_columns(steps), torch.int32, out.device)
    chains = len(starts)
    if not chains or not out.numel():
        return out
    HV, K, W = out.shape[1:]
    V = W if offset is None else offset.shape[-1]
    BR, BV = min(128, power_of_two(K)), min(32, power_of_two(W))
    if chains * HV * cdiv(W, NARROW) <= (sm_count(out.device) or SM90_PROCESSORS):
        BV = NARROW
    places = out.new_empty(2, chains, HV, K, W)
    transition, M_row = _rows(transition)
    offset, B_row = _rows(offset)
    S = FoldShape(HV, K, V, W, BR, min(64, BR), BV, M_row, B_row, transposed)
    given = transition, offset, start, out, places, first, starts, entries, rows, len(rows) // 3
    compiled = {"num_warps": max(4, BR // 16), "num_stages": 1}
    launch(fold_kernel, (chains * cdiv(W, BV), HV), *given, S, **compiled)
    return out
