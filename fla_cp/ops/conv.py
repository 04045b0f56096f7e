"""Short causal convolution, the tokens' mixer in front of every linear-attention layer."""

from __future__ import annotations

from functools import lru_cache
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from ..context import FLACPContext
from ..stages.conv import ConvRows, conv, conv_bwd
from ..validate import check_conv1d, check_conv1d_context, check_offsets, check_sequences


def causal_conv1d(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    activation: str | None = None,
    cu_seqlens: Tensor | None = None,
    cp_context: FLACPContext | None = None,
) -> Tensor:
    """Depthwise causal convolution, y[t] = act(bias + sum_s weight[:, W-1-s] * x[t-s]).

    x: [B, T, D], bf16, fp16, fp32 or fp64; under a context the rank's local tokens
        [1, T_local, D].
    weight: [D, W] and bias: [D], x's dtype. activation: None or "silu" ("swish").
    cu_seqlens: [N+1] offsets of packed sequences (B = 1); nothing crosses from one to the next.
    cp_context: built with conv1d_kernel_size=W; the W-1 tokens before the rank's ranges come
        from as many earlier ranks as it takes, and their gradients go back.
    Returns y like x. Sums in fp32 (fp64 for fp64). Raises ValueError as in validate.py.
    """
    check_conv1d(x, weight, bias, activation)
    check_sequences(x.shape[1], x.shape[0], cu_seqlens, cp_context)
    if cp_context is not None:
        check_conv1d_context(weight.shape[1], cp_context)
    B, T, D = x.shape
    if cp_context is not None:
        where, width = _context_rows(cp_context, weight.shape[1] - 1, x.device), weight.shape[1] - 1
    else:
        offsets = tuple(range(0, B * T + 1, T))
        if cu_seqlens is not None:
            offsets = tuple(cu_seqlens.tolist())
            check_offsets("cu_seqlens", offsets, T)
        where, width = _sequence_rows(offsets, x.device), 0
    y: Tensor = _CausalConv1d.apply(
        x.reshape(B * T, D), weight, bias, activation is not None, where, cp_context, width
    )
    return y.view(B, T, D)


@lru_cache(maxsize=16)
def _sequence_rows(offsets: tuple[int, ...], device: torch.device) -> ConvRows:
    at = torch.arange(offsets[-1])
    start = torch.tensor(offsets[:-1])
    lengths = torch.tensor(offsets).diff()
    reach = at - torch.repeat_interleave(start, lengths)
    return ConvRows(at.to(device), reach.to(device))


def _context_rows(context: FLACPContext, width: int, device: torch.device) -> ConvRows:
    return _ranges_rows(
        context.global_cu_seqlens, context.token_ranges[context.rank], width, device
    )


@lru_cache(maxsize=16)
def _ranges_rows(
    cu_seqlens: tuple[int, ...],
    ranges: tuple[tuple[int, int], ...],
    width: int,
    device: torch.device,
) -> ConvRows:
    """Each range behind `width` halo rows."""
    token = torch.cat([torch.arange(lo, hi) for lo, hi in ranges] or [torch.arange(0)])
    lengths = torch.tensor([hi - lo for lo, hi in ranges], dtype=torch.int64)
    halos = torch.repeat_interleave(torch.arange(1, len(ranges) + 1), lengths)
    cu = torch.tensor(cu_seqlens)
    start = cu[torch.searchsorted(cu, token, right=True) - 1]
    rows = torch.arange(len(token)) + halos * width
    return ConvRows(rows.to(device), (token - start).to(device))


def _extend(x: Tensor, halo: Tensor, ranges: tuple[tuple[int, int], ...]) -> Tensor:
    pieces = [x[:0]]
    for h, part in zip(halo, x.split([hi - lo for lo, hi in ranges]), strict=True):
        pieces += [h, part]
    return torch.cat(pieces)


class _CausalConv1d(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        silu: bool,
        where: ConvRows,
        context: FLACPContext | None,
        width: int,
    ) -> Tensor:
        if width and context is not None and context.halo is not None:
            halo = context.halo.gather(x, context.group)
            x = _extend(x, halo, context.token_ranges[context.rank])
        ctx.save_for_backward(x, weight, bias)
        ctx.silu, ctx.where, ctx.context, ctx.width = silu, where, context, width
        return conv(x, where, weight, bias, silu)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dy: Tensor) -> tuple[Any, ...]:
        x_ext, weight, bias = ctx.saved_tensors
        dx_ext, dweight, dbias = conv_bwd(x_ext, ctx.where, weight, bias, ctx.silu, dy)
        if ctx.width and ctx.context is not None:
            context, dhalo, at = ctx.context, [dx_ext[:0]], 0
            for lo, hi in context.token_ranges[context.rank]:
                dhalo.append(dx_ext[at : at + ctx.width])
                at += ctx.width + hi - lo
            dx = dx_ext[ctx.where.rows]
            context.halo.scatter_add(dx, torch.cat(dhalo), context.group)
        else:
            dx = dx_ext
        return (
            dx.to(x_ext.dtype),
            dweight.to(weight.dtype),
            None if dbias is None or bias is None else dbias.to(bias.dtype),
            None,
            None,
            None,
            None,
        )
