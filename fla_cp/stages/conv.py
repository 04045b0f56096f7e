"""Depthwise causal convolution over packed tokens, in plain torch, and its adjoint.

    y[t] = act(bias + sum_s weight[:, W-1-s] x[t-s])        s = 0 .. W-1, within t's sequence

Tokens stand in rows of `x_ext`, where each range is preceded by its halo; `rows` says where.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from ..rule import accumulator


class ConvRows(NamedTuple):
    """rows [T]: row of each token in x_ext. reach [T]: tokens of its sequence before it."""

    rows: Tensor
    reach: Tensor


def _tap(x_ext: Tensor, where: ConvRows, shift: int) -> Tensor:
    """x[t - shift] for every token, zero where that is another sequence's."""
    if shift == 0:
        return x_ext[where.rows]
    taken = x_ext[(where.rows - shift).clamp(min=0)]
    return taken.masked_fill((where.reach < shift)[:, None], 0)


def conv(x_ext: Tensor, where: ConvRows, weight: Tensor, bias: Tensor | None, silu: bool) -> Tensor:
    """y [T, D] in x's dtype; x_ext [*, D], weight [D, W], bias [D] or None."""
    y = _linear(x_ext, where, weight, bias)
    return (torch.nn.functional.silu(y) if silu else y).to(x_ext.dtype)


def _linear(x_ext: Tensor, where: ConvRows, weight: Tensor, bias: Tensor | None) -> Tensor:
    dtype = accumulator(x_ext.dtype)
    W = weight.shape[1]
    w = weight.to(dtype)
    y = _tap(x_ext, where, 0).to(dtype) * w[:, W - 1]
    for shift in range(1, W):
        y += _tap(x_ext, where, shift) * w[:, W - 1 - shift]
    return y if bias is None else y + bias.to(dtype)


def conv_bwd(
    x_ext: Tensor,
    where: ConvRows,
    weight: Tensor,
    bias: Tensor | None,
    silu: bool,
    dy: Tensor,
) -> tuple[Tensor, Tensor, Tensor | None]:
    """dx_ext [*, D] (halo rows included), dweight [D, W] and dbias [D], in the accumulator's
    dtype."""
    dtype = accumulator(x_ext.dtype)
    W = weight.shape[1]
    dy = dy.to(dtype)
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
    return dx_ext, dweight, None if bias is None else dy.sum(0)
