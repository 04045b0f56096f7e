"""Kernels of a decoding step (kernels/torch/decoding.py), bound by the weights that they read.

At few sequences, a product is a kernel of its own: a program reads some rows of the weight, and
multiplies them by the token, which it reads itself. RMSNorm costs it nothing: the sum of squares is
formed beside the product, which is divided by the root at the end. At more sequences step_dot.py
computes the same on tensor cores in half precision. In fp32, and at many sequences, products are
calls of cuBLAS, and what stands around them are kernels.
"""

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from fla_cp.kernels.torch import decoding as torch_stage
from fla_cp.kernels.torch.decoding import StepProduct
from fla_cp.kernels.triton import step_dot
from fla_cp.kernels.triton.conv import MAX_TAPS, load_bias, load_taps, weighted
from fla_cp.kernels.triton.device.blocks import divides, unit_rows
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
from fla_cp.kernels.triton.launch import cdiv, launch
from fla_cp.kernels.triton.step_mixer import Window, load_past, read_as, store_window
from fla_cp.kernels.triton.tile_table import power_of_two

FUSED_ROWS = 4
"""The most sequences for which a product is one kernel. Programs of the same rows of a weight run
side by side, so that the weight comes from memory once, but from the L2 cache for each sequence."""

COLUMNS = 2048
"""The most columns of a weight that a program reads at once, so that it waits for memory once."""

ELEMENTS = 8192
"""Elements of a [BR, BC] tile: 32 for each of 256 threads, 4 loads of 16 bytes in bf16."""

ROW_BYTES = 96 * 1024
"""The most bytes of a weight that a program holds in registers, 96 for each of 256 threads."""

AHEAD = 16 * 1024
"""Bytes, a power of two, that a program brings into the L2 cache of the weight that a later kernel
reads, while it waits for the kernel ahead. 0: none. Of the 1.3B model's output product, which
waits for the recurrence, 512 programs fetch 8.4 MB of gate and up."""

CHANNELS = 128
"""Channels of a program of the convolution, and columns of one of the SwiGLU."""


@constants
class ProductShape(NamedTuple):
    """Rows and columns of a weight (R is half of its rows with SWIGLU), the tile [BR, BC], whether
    the gate of SwiGLU is multiplied in, whether y is added to, and whether the kernel may start
    before the one ahead of it has ended."""

    R: int
    C: int
    BR: int
    BC: int
    SWIGLU: bool
    ONTO: bool
    AHEAD: int
    EARLY: bool


@triton.jit
def load_weights(weight, o_r, o_c, S: tl.constexpr):
    """[BR, BC], zero outside."""
    p = weight + o_r.to(tl.int64)[:, None] * S.C + o_c[None, :]
    if divides(S.BC, S.C) and divides(S.BR, S.R):
        return tl.load(p)
    else:
        m_rc = (o_r < S.R)[:, None] & (o_c < S.C)[None, :]
        return tl.load(p, mask=m_rc, other=0.0)


@triton.jit
def load_all(weight, o_r, S: tl.constexpr):
    """The tiles of the first columns and of those that follow."""
    tiles = ()
    for c in tl.static_range(0, S.C, S.BC):
        tiles = tiles + (load_weights(weight, o_r, c + tl.arange(0, S.BC), S),)
    return tiles


@triton.jit
def fetch_share(ahead, size, AHEAD: tl.constexpr):
    """Fetches this program's share of `ahead`, of `size` bytes, if it has the first sequence."""
    i = tl.program_id(1) + tl.program_id(2) * tl.num_programs(1)
    at = i.to(tl.int64) * AHEAD
    if (tl.program_id(0) == 0) & (at + AHEAD <= size):
        fetch(ahead.to(tl.pointer_type(tl.int8)) + at + tl.arange(0, AHEAD // SECTOR) * SECTOR)


@triton.jit
def step_product_kernel(x, norm, weight, bias, y, ahead, x_row, y_row, size, eps, S: tl.constexpr):
    """x [B, G * C] and y [B, G * R] with their strides of rows; norm [C] or None; weight [G, R, C],
    or [1, 2 R, C] with SWIGLU; bias [G * R] or None; ahead: a weight of `size` bytes. A program has
    one sequence, BR rows of y and one input; sequences follow one another, so that they share the
    weight in the L2 cache."""
    allow_next(S.EARLY)
    i_b, i_g = tl.program_id(0).to(tl.int64), tl.program_id(2).to(tl.int64)
    o_r = tl.program_id(1) * S.BR + tl.arange(0, S.BR)
    x += i_b * x_row + i_g * S.C
    y += i_b * y_row + i_g * S.R
    weight += i_g * S.R * S.C
    # Weights are loaded at once, and before the tokens, which the kernel ahead may still write.
    tiles, up_tiles = load_all(weight, o_r, S), ()
    if S.SWIGLU:
        up_tiles = load_all(weight + S.R * S.C, o_r, S)
    if S.AHEAD > 0:
        fetch_share(ahead, size, S.AHEAD)
    wait_for_last(S.EARLY)
    b_y = tl.zeros([S.BR, S.BC], tl.float32)
    b_u = tl.zeros([S.BR, S.BC], tl.float32)
    squares = tl.zeros([S.BC], tl.float32)
    for c in tl.static_range(0, S.C, S.BC):
        o_c = c + tl.arange(0, S.BC)
        b_x = tl.load(x + o_c, mask=o_c < S.C, other=0.0).to(tl.float32)
        if norm is not None:
            squares += b_x * b_x
            b_x *= tl.load(norm + o_c, mask=o_c < S.C, other=0.0).to(tl.float32)
        b_y += tiles[c // S.BC].to(tl.float32) * b_x[None, :]
        if S.SWIGLU:
            b_u += up_tiles[c // S.BC].to(tl.float32) * b_x[None, :]
    factor = 1.0
    if norm is not None:
        factor = tl.rsqrt(tl.sum(squares, axis=0) / S.C + eps)
    b_r = tl.sum(b_y, axis=1) * factor
    m_r = o_r < S.R
    if bias is not None:
        b_r += tl.load(bias + i_g * S.R + o_r, mask=m_r, other=0.0).to(tl.float32)
    if S.SWIGLU:
        b_r = b_r * sigmoid(b_r) * (tl.sum(b_u, axis=1) * factor)
    if S.ONTO:
        b_r += tl.load(y + o_r, mask=m_r, other=0.0).to(tl.float32)
    tl.store(y + o_r, b_r.to(y.dtype.element_ty), mask=m_r)


@triton.jit
def norm_kernel(x, norm, y, x_row, eps, C: tl.constexpr, BC: tl.constexpr):
    """y [B, C] = x / rms(x) * norm for x [B, C] with its stride of rows; a program has one row."""
    i_b = tl.program_id(0).to(tl.int64)
    o_c = tl.arange(0, BC)
    b_x = tl.load(x + i_b * x_row + o_c, mask=o_c < C, other=0.0).to(tl.float32)
    b_w = tl.load(norm + o_c, mask=o_c < C, other=0.0).to(tl.float32)
    b_y = b_x * tl.rsqrt(tl.sum(b_x * b_x, axis=0) / C + eps) * b_w
    tl.store(y + i_b * C + o_c, b_y.to(y.dtype.element_ty), mask=o_c < C)


@triton.jit
def swiglu_kernel(x, y, F: tl.constexpr, BC: tl.constexpr):
    """y [B, F] = silu(gate) * up, of x [B, 2 F], whose first half is the gate."""
    i_b = tl.program_id(1).to(tl.int64)
    o_c = tl.program_id(0) * BC + tl.arange(0, BC)
    p = x + i_b * 2 * F + o_c
    b_g = tl.load(p, mask=o_c < F, other=0.0).to(tl.float32)
    b_u = tl.load(p + F, mask=o_c < F, other=0.0).to(tl.float32)
    b_y = b_g * sigmoid(b_g) * b_u
    tl.store(y + i_b * F + o_c, b_y.to(y.dtype.element_ty), mask=o_c < F)


@constants
class UpdateShape(NamedTuple):
    """Channels, taps, channels of a program, and whether SiLU follows."""

    D: int
    W: int
    BC: int
    SILU: bool


@triton.jit
def conv_update_kernel(x, x_row, cache, weight, bias, y, S: tl.constexpr):
    """x [N, D] with its stride of rows; cache: `Window`; weight [D, W], bias [D] or None; y
    [N, D]."""
    i_n = tl.program_id(1).to(tl.int64)
    o_c = tl.program_id(0) * S.BC + tl.arange(0, S.BC)
    m_c = o_c < S.D
    taps = load_taps(weight, o_c, m_c, S.W)
    b_bias = load_bias(bias, o_c, m_c)
    b_x = tl.load(x + i_n * x_row + o_c, mask=m_c, other=0.0)
    p = cache.ptr + i_n * cache.n + o_c.to(tl.int64) * cache.d
    window = load_past(p, cache.w, m_c, S.W)
    # A column is written to where another thread may still have to read the one before it.
    tl.debug_barrier()
    store_window(p, cache.w, window, b_x, m_c, S.W)
    seen = (b_x.to(tl.float32),) + read_as(window, b_x.dtype)
    b_y = weighted(taps, seen, b_bias)
    if S.SILU:
        b_y *= sigmoid(b_y)
    tl.store(y + i_n * S.D + o_c, b_y.to(y.dtype.element_ty), mask=m_c)


def step_product(p: StepProduct) -> Tensor:
    """As in kernels/torch/decoding.py; with few sequences in one kernel, whose parts are rounded
    once, at the end."""
    p = p._replace(x=unit_rows(p.x))
    if len(p.x) <= FUSED_ROWS:
        return _fused(p)
    if step_dot.takes(p):
        return step_dot.step_dot(p)
    x = p.x if p.norm is None else _normed(p.x, p.norm, p.eps)
    if not p.swiglu:
        return torch_stage.plain_product(p, x)
    both = torch_stage.plain_product(p._replace(onto=None), x)
    y = torch.empty(len(both), both.shape[1] // 2, dtype=both.dtype, device=both.device)
    F = y.shape[1]
    launch(swiglu_kernel, (cdiv(F, CHANNELS), len(y)), both, y, F, CHANNELS, num_warps=1)
    return y if p.onto is None else p.onto.add_(y)


def _normed(x: Tensor, norm: Tensor, eps: float) -> Tensor:
    B, C = x.shape
    y = torch.empty(B, C, dtype=x.dtype, device=x.device)
    given = x, norm, y, x.stride(0), eps, C, power_of_two(C)
    launch(norm_kernel, (B,), *given, num_warps=8)
    return y


def _fused(p: StepProduct) -> Tensor:
    B, (G, R, C) = len(p.x), p.weight.shape
    R = R // 2 if p.swiglu else R
    BC, BR = min(COLUMNS, power_of_two(C)), power_of_two(R)
    # With SwiGLU, a program reads the rows of the gate and those that it multiplies.
    rows = 2 if p.swiglu else 1
    size = rows * cdiv(C, BC) * BC * p.weight.element_size()
    while BR > 1 and (rows * BR * BC > ELEMENTS or BR * size > ROW_BYTES):
        BR //= 2
    y = p.onto
    if y is None:
        y = torch.empty(B, G * R, dtype=p.x.dtype, device=p.x.device)
    early = starts_early(p.x)
    size, ahead = 0, 0
    if early and p.ahead is not None:
        size, ahead = p.ahead.nbytes, AHEAD
    S = ProductShape(R, C, BR, BC, p.swiglu, p.onto is not None, ahead, early)
    sizes = p.x.stride(0), y.stride(0), size
    given = p.x, p.norm, p.weight, p.bias, y, p.ahead if ahead else None, *sizes, p.eps, S
    grid = B, cdiv(R, BR), G
    launch_early(step_product_kernel, grid, *given, early=early, num_warps=8)
    return y


def conv_update(
    x: Tensor, cache: Tensor, weight: Tensor, bias: Tensor | None, silu: bool
) -> Tensor:
    (N, D), W = x.shape, weight.shape[1]
    if W > MAX_TAPS:
        return torch_stage.conv_update(x, cache, weight, bias, silu)
    x = unit_rows(x)
    y = torch.empty(N, D, dtype=x.dtype, device=x.device)
    S = UpdateShape(D, W, CHANNELS, silu)
    given = x, x.stride(0), Window(cache, *cache.stride()), weight.contiguous(), bias, y, S
    launch(conv_update_kernel, (cdiv(D, CHANNELS), N), *given, num_warps=1)
    if not cache.is_inference():
        torch.autograd.graph.increment_version(cache)
    return y
