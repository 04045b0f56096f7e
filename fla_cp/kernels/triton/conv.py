"""Depthwise causal convolution (kernels/torch/conv.py) and its adjoint, one pass each.

A program is one warp. It processes the tokens of one tile in order, for 128 channels, and keeps the
W - 1 tokens before the present one in registers, so that each row of x is read once. R rows are
loaded before any of them is used. A tile lies within one token range, so that the tokens before it
are all in x or all in the halo. The backward keeps the gradients of W - 1 rows in the same way,
because later tokens still add to them. Each program leaves its share of the gradients of weight and
bias in `partial`.
"""

from functools import lru_cache
from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from fla_cp.kernels.torch import conv as torch_stage
from fla_cp.kernels.torch.conv import ConvInputs
from fla_cp.kernels.triton.device.blocks import divides, unit_rows
from fla_cp.kernels.triton.device.bundles import Rows, constants
from fla_cp.kernels.triton.device.gates import sigmoid
from fla_cp.kernels.triton.launch import cdiv, launch
from fla_cp.partition.device_tables import to_device

MAX_TAPS = 8
"""The largest W whose rows fit into registers. The torch stage computes wider convolutions."""

ROWS = 8
"""Rows loaded at once."""

CHANNELS = 128
"""Channels of a program, four for each thread. With eight the backward spills at 255 registers."""


@constants
class ConvShape(NamedTuple):
    """Channels, taps, rows loaded at once, channels of a program, and whether SiLU follows."""

    D: int
    W: int
    R: int
    BC: int
    SILU: bool


@triton.jit
def tile_of(tiles, n, S: tl.constexpr):
    """This program's tile: its number, start and stop, the end of its range, and its first halo row
    or -1. Then the program's channels, and which of them exist."""
    blocks: tl.constexpr = (S.D + S.BC - 1) // S.BC
    i_t = tl.program_id(0) // blocks
    o_c = tl.program_id(0) % blocks * S.BC + tl.arange(0, S.BC)
    if divides(S.BC, S.D):
        m_c = tl.full([S.BC], True, tl.int1)
    else:
        m_c = o_c < S.D
    tiles += i_t
    start, stop = tl.load(tiles), tl.load(tiles + n)
    end, row = tl.load(tiles + 2 * n), tl.load(tiles + 3 * n)
    return i_t.to(tl.int64), start, stop, end, row, o_c, m_c


@triton.jit
def load_taps(weight, o_c, m_c, W: tl.constexpr):
    """The weights by distance, the token's own first."""
    taps = ()
    for s in tl.static_range(W):
        taps = taps + (tl.load(weight + o_c * W + (W - 1 - s), mask=m_c, other=0.0).to(tl.float32),)
    return taps


@triton.jit
def load_window(x, halo, start, row, o_c, m_c, S: tl.constexpr):
    """The W - 1 tokens before `start`, nearest first; zero if there are none."""
    m = start > 0
    if halo is not None:
        m = m | (row >= 0)
    window = ()
    for s in tl.static_range(1, S.W):
        p = x.ptr + (start - s).to(tl.int64) * x.row
        if halo is not None:
            p = tl.where(row >= 0, halo + (row + S.W - 1 - s).to(tl.int64) * S.D, p)
        window = window + (tl.load(p + o_c, mask=m_c & m, other=0.0).to(tl.float32),)
    return window


@triton.jit
def load_next(x, t, stop, o_c, m_c, R: tl.constexpr):
    """R rows from t on, zero from `stop` on."""
    rows = ()
    for r in tl.static_range(R):
        p = x.ptr + (t + r).to(tl.int64) * x.row + o_c
        rows = rows + (tl.load(p, mask=m_c & (t + r < stop), other=0.0),)
    return rows


@triton.jit
def load_reach(reach, t, stop, R: tl.constexpr):
    found = ()
    for r in tl.static_range(R):
        found = found + (tl.load(reach + t + r, mask=t + r < stop, other=0),)
    return found


@triton.jit
def within(window, b_x, reach):
    """The tokens that the convolution reads at b_x: b_x, then those before it, zero for tokens of
    other sequences."""
    seen = (b_x,)
    for s in tl.static_range(len(window)):
        seen = seen + (tl.where(reach > s, window[s], 0.0),)
    return seen


@triton.jit
def weighted(taps, seen, b_bias):
    acc = b_bias
    for s in tl.static_range(len(taps)):
        acc += taps[s] * seen[s]
    return acc


@triton.jit
def load_bias(bias, o_c, m_c):
    if bias is not None:
        return tl.load(bias + o_c, mask=m_c, other=0.0).to(tl.float32)
    else:
        return tl.zeros([o_c.shape[0]], tl.float32)


@triton.jit(do_not_specialize=["n"])
def conv_kernel(x, halo, weight, bias, y, tiles, reach, n, S: tl.constexpr):
    """x: `Rows`, [T, D]; y [T, D], halo [*, D], weight [D, W], bias [D]; int32 tiles [4, n],
    reach [T]."""
    _, start, stop, _end, row, o_c, m_c = tile_of(tiles, n, S)
    taps = load_taps(weight, o_c, m_c, S.W)
    b_bias = load_bias(bias, o_c, m_c)
    window = load_window(x, halo, start, row, o_c, m_c, S)
    for i in range(tl.cdiv(stop - start, S.R)):
        t = start + i * S.R
        rows = load_next(x, t, stop, o_c, m_c, S.R)
        reaches = load_reach(reach, t, stop, S.R)
        for r in tl.static_range(S.R):
            b_x = rows[r].to(tl.float32)
            b_y = weighted(taps, within(window, b_x, reaches[r]), b_bias)
            window = ((b_x,) + window)[: S.W - 1]
            if S.SILU:
                b_y *= sigmoid(b_y)
            p = y + (t + r).to(tl.int64) * S.D + o_c
            tl.store(p, b_y.to(y.dtype.element_ty), mask=m_c & (t + r < stop))


@triton.jit(do_not_specialize=["n"])
def conv_bwd_kernel(
    x, halo, weight, bias, dy, dx, dhalo, partial, tiles, reach, n, S: tl.constexpr
):
    """x, dy: `Rows`; dx [T, D]; dhalo [*, D], fp32; partial [n, W, D], fp32 (W + 1 with a bias), in
    the order of the weights."""
    i_t, start, stop, end, row, o_c, m_c = tile_of(tiles, n, S)
    taps = load_taps(weight, o_c, m_c, S.W)
    b_bias = load_bias(bias, o_c, m_c)
    window = load_window(x, halo, start, row, o_c, m_c, S)
    zero = tl.zeros([S.BC], tl.float32)
    dtaps, pending = (zero,), ()  # pending: gradients so far of the rows before t, nearest first
    for _ in tl.static_range(1, S.W):
        dtaps, pending = dtaps + (zero,), pending + (zero,)
    dbias = zero
    for i in range(tl.cdiv(stop - start + S.W - 1, S.R)):
        t = start + i * S.R
        rows = load_next(x, t, end, o_c, m_c, S.R)
        drows = load_next(dy, t, end, o_c, m_c, S.R)
        reaches = load_reach(reach, t, end, S.R)
        for r in tl.static_range(S.R):
            b_x, b_dz = rows[r].to(tl.float32), drows[r].to(tl.float32)
            seen = within(window, b_x, reaches[r])
            window = ((b_x,) + window)[: S.W - 1]
            if S.SILU:
                b_z = weighted(taps, seen, b_bias)
                b_s = sigmoid(b_z)
                b_dz *= b_s + b_z * b_s * (1.0 - b_s)
            mine = tl.where(t + r < stop, b_dz, 0.0)
            dbias += mine
            sums, grads = (dtaps[0] + mine * b_x,), (taps[0] * b_dz,)
            for s in tl.static_range(1, S.W):
                sums = sums + (dtaps[s] + mine * seen[s],)
                b_d = tl.where(reaches[r] >= s, b_dz, 0.0)
                grads = grads + (pending[s - 1] + taps[s] * b_d,)
            dtaps = sums
            pending = grads[: S.W - 1]
            b_dx = grads[S.W - 1]
            o_t = t + r - (S.W - 1)
            p = dx + o_t.to(tl.int64) * S.D + o_c
            tl.store(p, b_dx.to(dx.dtype.element_ty), mask=m_c & (o_t >= start) & (o_t < stop))
            if halo is not None:
                p = dhalo + (row + t + r - start).to(tl.int64) * S.D + o_c
                tl.store(p, b_dx, mask=m_c & (o_t < start) & (row >= 0))
    partial += i_t * (S.W + (bias is not None)) * S.D + o_c
    for s in tl.static_range(S.W):
        tl.store(partial + (S.W - 1 - s) * S.D, dtaps[s], mask=m_c)
    if bias is not None:
        tl.store(partial + S.W * S.D, dbias, mask=m_c)


@lru_cache(maxsize=32)
def _tiles(lengths: tuple[int, ...], width: int, size: int, device: torch.device) -> Tensor:
    """Start and stop of each tile, the end of its range, its first halo row or -1: int32 [4, n]."""
    columns: list[tuple[int, int, int, int]] = []
    base = 0
    for r, length in enumerate(lengths):
        for at in range(0, length, size):
            first = r * width if width and at == 0 else -1
            stop = min(at + size, length)
            columns.append((base + at, base + stop, base + length, first))
        base += length
    table = torch.tensor(columns, dtype=torch.int32, device="cpu").view(-1, 4)
    return to_device(table.T.contiguous(), torch.int32, device)


def _prepared(c: ConvInputs) -> tuple[Tensor, int, tuple, ConvShape]:
    """The table of tiles, the number of programs, x to bias as the kernels take them, and S.

    Tiles are as long as 4096 programs allow, because each tile reads W - 1 rows of its neighbour
    and writes a row of partial sums."""
    x, halo, where, weight, bias, silu = c
    T, D = x.shape
    blocks = cdiv(D, CHANNELS)
    size = 16
    while size < 128 and 2 * size * 4096 <= T * blocks:
        size *= 2
    if size not in where.kept:
        where.kept[size] = _tiles(where.lengths, where.width, size, x.device)
    tiles = where.kept[size]
    S = ConvShape(D, weight.shape[1], ROWS, CHANNELS, silu)
    given = Rows(x, x.stride(0), 0), halo if len(halo) else None, weight.contiguous(), bias
    return tiles, tiles.shape[1] * blocks, given, S


def conv(c: ConvInputs) -> Tensor:
    if c.weight.shape[1] > MAX_TAPS:
        return torch_stage.conv(c)
    c = c._replace(x=unit_rows(c.x))
    y = torch.empty(c.x.shape, dtype=c.x.dtype, device=c.x.device)
    tiles, programs, given, S = _prepared(c)
    if programs:
        rest = y, tiles, c.where.reach, tiles.shape[1], S
        launch(conv_kernel, (programs,), *given, *rest, num_warps=1)
    return y


def conv_bwd(c: ConvInputs, dy: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor | None]:
    D, W = c.weight.shape
    if W > MAX_TAPS:
        return torch_stage.conv_bwd(c, dy)
    c, dy = c._replace(x=unit_rows(c.x)), unit_rows(dy)
    x, halo, where, _, bias, _ = c
    tiles, programs, given, S = _prepared(c)
    n = tiles.shape[1]
    dx = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    zeros = torch.zeros if len(halo) else torch.empty
    dhalo = zeros(halo.shape, dtype=torch.float32, device=x.device)
    partial = torch.empty(n, W + (bias is not None), D, dtype=torch.float32, device=x.device)
    if programs:
        grads = Rows(dy, dy.stride(0), 0), dx, dhalo, partial
        rest = *grads, tiles, where.reach, n, S
        launch(conv_bwd_kernel, (programs,), *given, *rest, num_warps=1)
    sums = partial.sum(0)
    dweight = torch.empty(D, W, dtype=c.weight.dtype, device=x.device).copy_(sums[:W].T)
    return dx, dhalo, dweight, None if bias is None else sums[W]
