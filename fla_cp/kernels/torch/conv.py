"""Depthwise causal convolution over packed tokens, in plain torch, and its adjoint.

    y[t] = act(bias + sum_s weight[:, W-1-s] x[t-s])        s = 0 .. W-1, within t's sequence

The tokens may lie in several ranges, each of which follows a halo of W-1 tokens from elsewhere.
The matrix `x_ext` holds all rows, those of each range after its halo.
"""

from typing import NamedTuple, Self

import torch
from torch import Tensor

from fla_cp.partition.device_tables import to_device
from fla_cp.rule import accumulator


class ConvRows(NamedTuple):
    """Where the tokens before each token are.

    reach [T], int32: how many tokens of its sequence are before each token. lengths: those of the
    ranges, in order. width: how many halo rows each range has, W - 1 or 0. rows [T], halo
    [ranges * width]: the row of each token, and of each halo row, in x_ext. kept: further tables of
    a backend.
    """

    reach: Tensor
    lengths: tuple[int, ...]
    width: int
    rows: Tensor
    halo: Tensor
    kept: dict[int, Tensor]

    @classmethod
    def build(
        cls, reach: Tensor, lengths: tuple[int, ...], width: int, device: torch.device
    ) -> Self:
        """reach: on the host, or ready for use on a device."""
        count, total = len(lengths), sum(lengths)
        ranges = torch.repeat_interleave(torch.tensor(lengths, dtype=torch.int64, device="cpu"))
        is_halo = torch.ones(total + count * width, dtype=torch.bool, device="cpu")
        rows = torch.arange(total, device="cpu") + (ranges + 1) * width
        is_halo[rows] = False
        rows, halo = (to_device(t, torch.int64, device) for t in (rows, is_halo.nonzero()[:, 0]))
        if reach.device.type == "cpu":
            reach = to_device(reach, torch.int32, device)
        return cls(reach, lengths, width, rows, halo, {})


class ConvInputs(NamedTuple):
    """The inputs of a convolution. x [T, D]. halo [ranges * width, D]: the tokens before each
    range.
    where: the places of the tokens before each token. weight [D, W]. bias [D] or None. silu:
    whether SiLU follows."""

    x: Tensor
    halo: Tensor
    where: ConvRows
    weight: Tensor
    bias: Tensor | None
    silu: bool


def _extend(x: Tensor, halo: Tensor, where: ConvRows) -> Tensor:
    if not len(halo):
        return x
    x_ext = x.new_empty(len(x) + len(halo), x.shape[1])
    x_ext[where.rows], x_ext[where.halo] = x, halo
    return x_ext


def _tap(x_ext: Tensor, where: ConvRows, shift: int) -> Tensor:
    """x[t - shift] for every token, zero where that row belongs to another sequence."""
    if shift == 0:
        return x_ext[where.rows]
    taken = x_ext[(where.rows - shift).clamp(min=0)]
    return taken.masked_fill((where.reach < shift)[:, None], 0)


def conv(c: ConvInputs) -> Tensor:
    """y [T, D] in x's dtype."""
    y = _linear(_extend(c.x, c.halo, c.where), c.where, c.weight, c.bias)
    return (torch.nn.functional.silu(y) if c.silu else y).to(c.x.dtype)


def _linear(x_ext: Tensor, where: ConvRows, weight: Tensor, bias: Tensor | None) -> Tensor:
    dtype = accumulator(x_ext.dtype)
    W = weight.shape[1]
    w = weight.to(dtype)
    y = _tap(x_ext, where, 0).to(dtype) * w[:, W - 1]
    for shift in range(1, W):
        y += _tap(x_ext, where, shift) * w[:, W - 1 - shift]
    return y if bias is None else y + bias.to(dtype)


def conv_bwd(c: ConvInputs, dy: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor | None]:
    """dx [T, D], dhalo, dweight [D, W], dbias [D], in the accumulator's dtype."""
    x, halo, where, weight, bias, silu = c
    dtype = accumulator(x.dtype)
    W = weight.shape[1]
    x_ext, dy = _extend(x, halo, where), dy.to(dtype)
    if silu:
        y = _linear(x_ext, where, weight, bias)
        s = torch.sigmoid(y)
        dy = dy * s * (1 + y * (1 - s))
    dx_ext = x_ext.new_zeros(x_ext.shape, dtype=dtype)
    dweight = torch.empty_like(weight, dtype=dtype)
    for shift in range(W):
        dweight[:, W - 1 - shift] = (dy * _tap(x_ext, where, shift)).sum(0)
        d = dy * weight[:, W - 1 - shift].to(dtype)
        if shift:
            d = d.masked_fill((where.reach < shift)[:, None], 0)
        dx_ext.index_add_(0, (where.rows - shift).clamp(min=0), d)
    dx, dhalo = (dx_ext[where.rows], dx_ext[where.halo]) if len(halo) else (dx_ext, halo)
    return dx, dhalo, dweight, None if bias is None else dy.sum(0)
