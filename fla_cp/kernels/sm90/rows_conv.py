"""The convolution of a decoding step of up to 64 sequences, and the second products of low ranks
beside it.

Both follow the first product of a layer and take less time than the launch of a kernel, so they are
one. Its programs are few and large, because the programs of the recurrence, which start early, need
the room that many small ones would take on an SM.
"""

from typing import NamedTuple

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from fla_cp.kernels.sm90.rows_product import allow_next, multiply, over, wait_for_last
from fla_cp.kernels.sm90.step_words import bits_of, nth, sigmoid
from fla_cp.kernels.triton.device.bundles import constants

TAPS = gl.constexpr(4)
"""Taps of the convolution: a channel's window is a word of 64 bits."""


@constants
class ConvShape(NamedTuple):
    """B sequences, D channels, and a program's tile of both. EARLY: see triton/early.py."""

    B: int
    D: int
    ROWS: int
    COLUMNS: int
    EARLY: bool


@gluon.jit
def convolve(x, row, window, taps, bias, y, i_p, S: gl.constexpr):
    """A tile of the convolution with SiLU; moves its windows by one token."""
    L: gl.constexpr = gl.BlockedLayout([1, 4], [1, 32], [4, 1], [1, 0])
    blocks: gl.constexpr = over(S.D, S.COLUMNS)
    o_r = i_p // blocks * S.ROWS + gl.arange(0, S.ROWS, gl.SliceLayout(1, L))
    o_c = i_p % blocks * S.COLUMNS + gl.arange(0, S.COLUMNS, gl.SliceLayout(0, L))
    m_c = o_c < S.D
    inside = (o_r < S.B)[:, None] & m_c[None, :]
    at = (o_r * S.D)[:, None] + o_c[None, :]
    words = gl.load(window + at, mask=inside, other=0)
    weights = gl.load(taps + o_c, mask=m_c, other=0)
    acc = gl.full([S.ROWS, S.COLUMNS], 0.0, gl.float32, L)
    if bias is not None:
        acc += gl.load(bias + o_c, mask=m_c, other=0.0).to(gl.float32)[None, :]
    wait_for_last(S.EARLY)
    b_x = gl.load(x + (o_r * row)[:, None] + o_c[None, :], mask=inside, other=0.0)
    words = ((words >> 16) & 0xFFFFFFFFFFFF) | (bits_of(b_x) << 32)
    gl.store(window + at, words, mask=inside)
    for n in gl.static_range(TAPS):
        acc += nth(weights, n)[None, :] * nth(words, n)
    gl.store(y + at, (acc * sigmoid(acc)).to(gl.bfloat16), mask=inside)


@gluon.jit
def rows_conv_kernel(
    x, row, window, taps, bias, y, tokens, w, z, z_bias, S: gl.constexpr, P: gl.constexpr
):
    """x [B, D] with its stride of rows; window [B, D] and taps [D], words of four numbers in bf16,
    the oldest in the lowest bits; bias [D] or None; y [B, D]. tokens, w, z, z_bias and P: a product
    of rows_product.py, whose programs come first; P None: none."""
    allow_next(S.EARLY)
    products: gl.constexpr = 0 if P is None else P.GROUPS * over(P.N, P.TILE)
    i_p = gl.program_id(0)
    if P is not None:
        if i_p < products:
            multiply(tokens, w, z, z_bias, i_p, 0, P)
        else:
            convolve(x, row, window, taps, bias, y, i_p - products, S)
    else:
        convolve(x, row, window, taps, bias, y, i_p, S)
