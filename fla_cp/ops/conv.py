"""Short causal convolution, the tokens' mixer in front of every linear-attention layer."""

from __future__ import annotations

from functools import lru_cache
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from ..backend import Backend, resolve
from ..context import FLACPContext, Handle, context_of
from ..stages.conv import ConvRows
from ..validate import (
    check_conv1d,
    check_conv1d_context,
    check_offsets,
    check_sequences,
)


def causal_conv1d(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    activation: str | None = None,
    cu_seqlens: Tensor | None = None,
    cp_context: FLACPContext | None = None,
    *,
    impl: str = "auto",
) -> Tensor:
    """Depthwise causal convolution, y[t] = act(bias + sum_s weight[:, W-1-s] * x[t-s]).

    x: [B, T, D], bf16, fp16, fp32 or fp64; under a context the rank's local tokens
        [1, T_local, D].
    weight: [D, W] and bias: [D], x's dtype. activation: None or "silu" ("swish").
    cu_seqlens: [N+1] offsets of packed sequences (B = 1); nothing crosses from one to the next.
    cp_context: built with conv1d_kernel_size=W; the W-1 tokens before the rank's ranges come
        from as many earlier ranks as it takes, and their gradients go back.
    impl: "auto" (by device), "torch" or "triton".
    Returns y like x. Sums in fp32 (fp64 for fp64). Raises ValueError as in validate.py.
    """
    check_conv1d(x, weight, bias, activation)
    check_sequences(x.shape[1], x.shape[0], cu_seqlens, cp_context)
    if cp_context is not None:
        check_conv1d_context(weight.shape[1], cp_context)
    B, T, D = x.shape
    flat, silu = x.reshape(B * T, D), activation is not None
    if torch.compiler.is_compiling():
        handle = Handle.make(-1, 0, 0, 0, B, 0) if cp_context is None else cp_context.handle
        y = conv_op(flat, weight, bias, silu, impl, *handle, B)[0]
    else:
        offsets = None
        if cu_seqlens is not None:
            offsets = tuple(cu_seqlens.tolist())
            check_offsets("cu_seqlens", offsets, T)
        place = _Place.of(impl, flat, weight, cp_context, B, offsets)
        y = _CausalConv1d.apply(flat, weight, bias, silu, place)
    return y.view(B, T, D)


class _Place(NamedTuple):
    """Where each token's predecessors are, and what computes."""

    backend: Backend
    where: ConvRows
    context: FLACPContext | None

    @classmethod
    def of(
        cls,
        impl: str,
        x: Tensor,
        weight: Tensor,
        context: FLACPContext | None,
        rows: int,
        offsets: tuple[int, ...] | None = None,
    ) -> _Place:
        backend = resolve(impl, x.device, x.dtype)
        if context is not None:
            return cls(backend, _context_rows(context, weight.shape[1] - 1, x.device), context)
        if offsets is None:
            offsets = tuple(range(0, len(x) + 1, len(x) // rows))
        return cls(backend, _sequence_rows(offsets, x.device), None)


@lru_cache(maxsize=16)
def _sequence_rows(offsets: tuple[int, ...], device: torch.device) -> ConvRows:
    at = torch.arange(offsets[-1])
    start = torch.tensor(offsets[:-1])
    lengths = torch.tensor(offsets).diff()
    reach = at - torch.repeat_interleave(start, lengths)
    return ConvRows.build(reach, offsets[-1:], 0, device)


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
    token = torch.cat([torch.arange(lo, hi) for lo, hi in ranges] or [torch.arange(0)])
    cu = torch.tensor(cu_seqlens)
    start = cu[torch.searchsorted(cu, token, right=True) - 1]
    lengths = tuple(hi - lo for lo, hi in ranges)
    return ConvRows.build(token - start, lengths, width, device)


def _forward(
    x: Tensor, weight: Tensor, bias: Tensor | None, silu: bool, place: _Place
) -> tuple[Tensor, Tensor]:
    """y, and the halo [ranges * width, D] that it took."""
    context = place.context
    if place.where.width and context is not None and context.halo is not None:
        halo = context.halo.gather(x, context.group).flatten(0, 1)
    else:
        halo = x.new_empty(0, x.shape[1])
    return place.backend.conv(x, halo, place.where, weight, bias, silu), halo


def _backward(
    dy: Tensor,
    x: Tensor,
    halo: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    silu: bool,
    place: _Place,
) -> tuple[Tensor, Tensor, Tensor | None]:
    """dx, dweight, dbias in their inputs' dtypes; the halo's gradient goes back to its ranks."""
    found = place.backend.conv_bwd(x, halo, place.where, weight, bias, silu, dy)
    dx, dhalo, dweight, dbias = found
    context = place.context
    if place.where.width and context is not None and context.halo is not None:
        context.halo.scatter_add(dx, dhalo, context.group)
    dbias = None if bias is None else dbias.to(bias.dtype)
    return dx.to(x.dtype), dweight.to(weight.dtype), dbias


class _CausalConv1d(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None, silu: bool, place: _Place
    ) -> Tensor:
        y, halo = _forward(x, weight, bias, silu, place)
        ctx.save_for_backward(x, halo, weight, bias)
        ctx.silu, ctx.place = silu, place
        return y

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dy: Tensor) -> tuple[Any, ...]:
        x, halo, weight, bias = ctx.saved_tensors
        return (*_backward(dy, x, halo, weight, bias, ctx.silu, ctx.place), None, None)


# The same two functions as ops for torch.compile (see library.py).


def _conv_run(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    silu: bool,
    impl: str,
    context: Tensor,
    sizes: Tensor,
    rows: int,
) -> list[Tensor]:
    """y and the halo."""
    place = _Place.of(impl, x, weight, context_of(context), rows)
    return list(_forward(x, weight, bias, silu, place))


def _conv_fake(x: Tensor, weight: Tensor, *rest: Any) -> list[Tensor]:
    halo = Handle.read(rest[-2])[-1] * (weight.shape[1] - 1)
    return [
        torch.empty(x.shape, dtype=x.dtype, device=x.device),
        x.new_empty(halo, x.shape[1]),
    ]


def _conv_backward_run(
    dy: Tensor,
    x: Tensor,
    halo: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    silu: bool,
    impl: str,
    context: Tensor,
    sizes: Tensor,
    rows: int,
) -> list[Tensor]:
    place = _Place.of(impl, x, weight, context_of(context), rows)
    dx, dweight, dbias = _backward(dy, x, halo, weight, bias, silu, place)
    return [dx, dweight, x.new_empty(0) if dbias is None else dbias]


def _conv_backward_fake(
    dy: Tensor, x: Tensor, halo: Tensor, weight: Tensor, bias: Tensor | None, *rest: Any
) -> list[Tensor]:
    return [
        x.new_empty(0) if t is None else torch.empty(t.shape, dtype=t.dtype, device=t.device)
        for t in (x, weight, bias)
    ]


_COMMON = (
    "Tensor weight, Tensor? bias, bool silu, str impl, Tensor context, Tensor sizes, SymInt rows"
)
conv_op = torch.library.custom_op(
    "fla_cp::causal_conv1d",
    _conv_run,
    mutates_args=(),
    schema=f"(Tensor x, {_COMMON}) -> Tensor[]",
)
conv_op.register_fake(_conv_fake)
conv_backward_op = torch.library.custom_op(
    "fla_cp::causal_conv1d_backward",
    _conv_backward_run,
    mutates_args=(),
    schema=f"(Tensor dy, Tensor x, Tensor halo, {_COMMON}) -> Tensor[]",
)
conv_backward_op.register_fake(_conv_backward_fake)


def _conv_setup(ctx: Any, inputs: tuple, output: list[Tensor]) -> None:
    x, weight, bias, *ctx.fixed = inputs
    ctx.save_for_backward(x, output[1], weight, bias)


def _conv_autograd(ctx: Any, grads: list[Tensor]) -> tuple[Any, ...]:
    dx, dweight, dbias = conv_backward_op(grads[0], *ctx.saved_tensors, *ctx.fixed)
    return (dx, dweight, None if ctx.saved_tensors[3] is None else dbias, *[None] * 5)


torch.library.register_autograd("fla_cp::causal_conv1d", _conv_autograd, setup_context=_conv_setup)
