"""Kernels of a decoding step (kernels/torch/decoding.py), bound by the weights that they read.

At few sequences, a product is a kernel of its own: a program reads some rows of the weight, and
multiplies them by the token, which it reads itself. RMSNorm costs it nothing: the sum of squares is
formed beside the product, which is divided by the root at the end. At more sequences cuBLAS reads
each weight once for all of them, and what stands around the products are kernels. Layers of kinds
that sm90/rows_run.py takes come here only for convolutions with other than four taps.
"""

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from fla_cp.kernels.torch import decoding as torch_stage
from fla_cp.kernels.torch.decoding import StepProduct
from fla_cp.kernels.triton.conv import MAX_TAPS, load_bias, load_taps
from fla_cp.kernels.triton.device.blocks import divides, unit_rows
from fla_cp.kernels.triton.device.bundles import constants
from fla_cp.kernels.triton.device.gates import sigmoid
from fla_cp.kernels.triton.early import allow_next, launch_early, starts_early, wait_for_last
from fla_cp.kernels.triton.launch import cdiv, launch
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

CHANNELS = 128
"""Channels of a program of the convolution, and columns of one of the SwiGLU."""


@constants
class ProductShape(NamedTuple):
    """Rows and columns of a weight (R is half of its rows with SWIGLU), the tile [BR, BC], whether
    the gate of SwiGLU is multiplied in, and whether y is added to. EARLY: see early.py."""

    R: int
    C: int
    BR: int
    BC: int
    SWIGLU: bool
    ONTO: bool
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
def step_product_kernel(x, norm, weight, bias, y, x_row, y_row, eps, S: tl.constexpr):
    """x [B, G * C] and y [B, G * R] with their strides of rows; norm [C] or None; weight [G, R, C],
    or [1, 2 R, C] with SWIGLU; bias [G * R] or None. A program has one sequence, BR rows of y and
    one input; sequences follow one another, so that they share the weight in the L2 cache."""
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


class Window(NamedTuple):
    """The last tokens [N, D, W] of sequences, and their strides."""

    ptr: Tensor
    n: int
    d: int
    w: int


@constants
class UpdateShape(NamedTuple):
    """Channels, taps, channels of a program, whether a window and the taps of a channel are words
    of 64 bits, and whether SiLU follows. EARLY: see early.py."""

    D: int
    W: int
    BC: int
    WORDS: bool
    SILU: bool
    EARLY: bool


@triton.jit
def load_past(p, step, m_c, W: tl.constexpr):
    """The W - 1 tokens before the one that comes, nearest first, in the cache's dtype."""
    past = ()
    for s in tl.static_range(1, W):
        past = past + (tl.load(p + (W - s) * step, mask=m_c, other=0.0),)
    return past


@triton.jit
def store_window(p, step, b_x, past, m_c, W: tl.constexpr):
    """Writes windows moved by one token, b_x, once all threads have read them."""
    tl.debug_barrier()
    for s in tl.static_range(1, W):
        tl.store(p + (W - 1 - s) * step, past[s - 1], mask=m_c)
    tl.store(p + (W - 1) * step, b_x.to(p.dtype.element_ty), mask=m_c)


@triton.jit
def load_words(p, o_c, m_c):
    """Words of four numbers of 16 bits at p, of which loads of single numbers would take one."""
    return tl.load(p.to(tl.pointer_type(tl.uint64)) + o_c, mask=m_c, other=0)


@triton.jit
def numbers(words, n: tl.constexpr, dtype: tl.constexpr):
    """The last n numbers of words, the very last one first."""
    found = ()
    for s in tl.static_range(n):
        found = found + ((words >> (48 - 16 * s)).to(tl.uint16).to(dtype, bitcast=True),)
    return found


@triton.jit
def convolved(b_x, past, taps, b_bias):
    """The convolution at the token b_x, in fp32."""
    seen = (b_x.to(tl.float32),)
    for s in tl.static_range(len(past)):
        seen = seen + (past[s].to(b_x.dtype).to(tl.float32),)
    for s in tl.static_range(len(seen)):
        b_bias += taps[s].to(tl.float32) * seen[s]
    return b_bias


@triton.jit
def conv_update_kernel(x, x_row, cache, weight, bias, y, S: tl.constexpr):
    """x [N, D] with its stride of rows; cache: `Window`; weight [D, W], bias [D] or None; y
    [N, D]."""
    allow_next(S.EARLY)
    i_n = tl.program_id(1).to(tl.int64)
    o_c = tl.program_id(0) * S.BC + tl.arange(0, S.BC)
    m_c = o_c < S.D
    b_bias = load_bias(bias, o_c, m_c)
    p = cache.ptr + i_n * cache.n
    p_x = x + i_n * x_row + o_c
    dtype: tl.constexpr = cache.ptr.dtype.element_ty
    if S.WORDS:
        words = load_words(p, o_c, m_c)
        past = numbers(words, 3, dtype)
        taps = numbers(load_words(weight, o_c, m_c), 4, weight.dtype.element_ty)
        wait_for_last(S.EARLY)
        b_x = tl.load(p_x, mask=m_c, other=0.0)
        newest = b_x.to(dtype).to(tl.uint16, bitcast=True).to(tl.uint64)
        p = p.to(tl.pointer_type(tl.uint64)) + o_c
        tl.store(p, (words >> 16) | (newest << 48), mask=m_c)
    else:
        taps = load_taps(weight, o_c, m_c, S.W)
        p += o_c.to(tl.int64) * cache.d
        past = load_past(p, cache.w, m_c, S.W)
        wait_for_last(S.EARLY)
        b_x = tl.load(p_x, mask=m_c, other=0.0)
        store_window(p, cache.w, b_x, past, m_c, S.W)
    b_y = convolved(b_x, past, taps, b_bias)
    if S.SILU:
        b_y *= sigmoid(b_y)
    tl.store(y + i_n * S.D + o_c, b_y.to(y.dtype.element_ty), mask=m_c)


def step_product(p: StepProduct) -> Tensor:
    """As in kernels/torch/decoding.py; with few sequences in one kernel, whose parts are rounded
    once, at the end."""
    p = p._replace(x=unit_rows(p.x))
    if len(p.x) <= FUSED_ROWS:
        return _fused(p)
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
    S = ProductShape(R, C, BR, BC, p.swiglu, p.onto is not None, early)
    strides = p.x.stride(0), y.stride(0)
    given = p.x, p.norm, p.weight, p.bias, y, *strides, p.eps, S
    launch_early(step_product_kernel, (B, cdiv(R, BR), G), *given, early=early, num_warps=8)
    return y


def conv_update(
    x: Tensor,
    cache: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    silu: bool,
    early: bool = False,
    y: Tensor | None = None,
) -> Tensor:
    """As in kernels/torch/decoding.py. early: see early.py; no kernel of the step has written the
    cache before. y: [N, D], dense, takes the result."""
    (N, D), W = x.shape, weight.shape[1]
    if W > MAX_TAPS:
        return torch_stage.conv_update(x, cache, weight, bias, silu)
    x = unit_rows(x)
    if y is None:
        y = torch.empty(N, D, dtype=x.dtype, device=x.device)
    weight = weight.contiguous()
    words = W == 4 and cache.dtype.itemsize == weight.dtype.itemsize == 2
    words = words and cache.stride(0) % 4 == 0 and cache.stride()[1:] == (4, 1)
    words = words and cache.data_ptr() % 8 == weight.data_ptr() % 8 == 0
    S = UpdateShape(D, W, CHANNELS, words, silu, early)
    given = x, x.stride(0), Window(cache, *cache.stride()), weight, bias, y, S
    grid = cdiv(D, CHANNELS), N
    launch_early(conv_update_kernel, grid, *given, early=early, num_warps=1)
    if not cache.is_inference():
        torch.autograd.graph.increment_version(cache)
    return y
