"""Short causal convolution, which mixes neighbouring tokens before a linear-attention operator."""

from collections.abc import Sequence
from typing import Any, overload

import torch
from torch import Tensor

from fla_cp.arguments import check_flags, check_tensors
from fla_cp.comm import Agreement
from fla_cp.context import FLACPContext
from fla_cp.kernels import resolve
from fla_cp.kernels.torch.conv import ConvInputs
from fla_cp.once_differentiable import once_differentiable
from fla_cp.ops.checks import (
    check_conv1d,
    check_conv1d_context,
    check_conv1d_parameters,
    check_conv1d_state,
    check_fixed_call,
    check_forward_only,
    check_no_offsets_compiled,
    check_residual,
    check_sequences,
)
from fla_cp.ops.conv_op import traced_conv, traced_conv_after
from fla_cp.ops.conv_rows import Place, conv_announced, exchanged_halo
from fla_cp.ops.conv_states import Tables, conv_with_states
from fla_cp.partition.checks import check_offsets

Heads = tuple[tuple[int, int], ...]
"""Parts of the channels. Each is given by its number of heads and the channels of a head."""


@overload
def causal_conv1d(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    activation: str | None = None,
    cu_seqlens: Tensor | None = None,
    cp_context: FLACPContext | None = None,
    *,
    residual: Tensor | None = None,
    initial_state: Tensor | None = None,
    output_final_state: None = None,
    cu_seqlens_cpu: Tensor | None = None,
    impl: str = "auto",
) -> Tensor: ...


@overload
def causal_conv1d(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    activation: str | None = None,
    cu_seqlens: Tensor | None = None,
    cp_context: FLACPContext | None = None,
    *,
    residual: Tensor | None = None,
    initial_state: Tensor | None = None,
    output_final_state: bool,
    cu_seqlens_cpu: Tensor | None = None,
    impl: str = "auto",
) -> tuple[Tensor, Tensor | None]: ...


def causal_conv1d(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    activation: str | None = None,
    cu_seqlens: Tensor | None = None,
    cp_context: FLACPContext | None = None,
    *,
    residual: Tensor | None = None,
    initial_state: Tensor | None = None,
    output_final_state: bool | None = None,
    cu_seqlens_cpu: Tensor | None = None,
    impl: str = "auto",
) -> Tensor | tuple[Tensor, Tensor | None]:
    """Depthwise causal convolution, y[t] = act(bias + sum_s weight[:, W-1-s] * x[t-s]) + r[t].

    x: [B, T, D], bf16, fp16, fp32 or fp64; under a context the rank's local tokens
        [1, T_local, D].
    weight: [D, W] and bias: [D], x's dtype. activation: None or "silu" ("swish").
    cu_seqlens: [N+1] offsets of packed sequences (B = 1); nothing crosses from one to the next.
    cp_context: built with conv1d_kernel_size=W. The W-1 tokens before each of the rank's ranges
        come from as many earlier ranks as necessary, and their gradients go back.
    residual: r, added after the activation; shape and dtype of x.
    initial_state: [N, D, W], the last W tokens before each sequence, the newest in the last column;
        bf16, fp16 or fp32 (fp64 with x of fp64), read in x's dtype. N is B, or the number of
        sequences of cu_seqlens. Under a context there is a state for each sequence of the whole
        batch, with equal values on all ranks.
    output_final_state: if given, y is returned together with the final states (True), or with None
        (False).
    cu_seqlens_cpu: the values of cu_seqlens on the host; saves a device synchronisation.
    impl: "auto" (by device), "torch" or "triton".
    Returns y like x, or with output_final_state, as in FLA, (y, final_state).
    final_state [N, D, W] has x's dtype and holds the last W tokens of each sequence. If a sequence
    is shorter than W, the end of its initial state comes before them, or zeros without one. Under a
    context it is equal on all ranks. So is the gradient of initial_state, provided that the
    gradient of final_state is.
    Sums are formed in fp32 (fp64 for fp64). y is rounded to x's dtype before residual is added.
    Differentiable in x, weight, bias, residual and initial_state.
    Raises ValueError for arguments that do not fit, and for states under a context with
    max_sequences, or under both a context and torch.compile.
    """
    given = x, weight, bias, activation, cu_seqlens, cp_context
    if residual is initial_state is output_final_state is None:
        (y,) = _parts(*given, heads=None, impl=impl, cu_seqlens_cpu=cu_seqlens_cpu)
        return y.view(x.shape)
    more = residual, initial_state, output_final_state, cu_seqlens_cpu
    N = _check_whole(*given, *more)
    final = None
    if initial_state is None and not output_final_state:
        (y,) = _parts(*given, heads=None, impl=impl, cu_seqlens_cpu=cu_seqlens_cpu)
        y = y.view(x.shape)
    else:
        y, final = _with_states(*given, initial_state, output_final_state, cu_seqlens_cpu, impl, N)
    if residual is not None:
        y = y + residual
    return y if output_final_state is None else (y, final)


def _check_whole(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    activation: str | None,
    cu_seqlens: Tensor | None,
    cp_context: FLACPContext | None,
    residual: Tensor | None,
    initial_state: Tensor | None,
    output_final_state: bool | None,
    cu_seqlens_cpu: Tensor | None,
) -> int:
    """The number of sequences of a call with a residual or states, after all checks."""
    names = ("x", "weight", "bias", "cu_seqlens", "residual", "initial_state", "cu_seqlens_cpu")
    values = x, weight, bias, cu_seqlens, residual, initial_state, cu_seqlens_cpu
    check_tensors(names, values, 2)
    if output_final_state is not None:
        check_flags(("output_final_state",), (output_final_state,))
    check_conv1d(x, weight, bias, activation)
    B, T, D = x.shape
    check_sequences(T, B, cu_seqlens, cp_context, cu_seqlens_cpu)
    N = B if cu_seqlens is None else len(cu_seqlens) - 1
    if cp_context is not None:
        check_conv1d_context(weight.shape[1], cp_context)
        states = {"initial_state": initial_state, "output_final_state": output_final_state}
        check_fixed_call(cp_context, **states)
        N = len(cp_context.global_cu_seqlens) - 1
        if initial_state is not None or output_final_state:
            _check_states_not_compiled(cp_context)
    if residual is not None:
        check_residual(residual, x)
    if initial_state is not None:
        check_conv1d_state("initial_state", initial_state, (N, D, weight.shape[1]), x)
    return N


def _check_states_not_compiled(cp_context: FLACPContext | None) -> None:
    """Raises ValueError for states under a context and torch.compile. For why `_with_states` needs
    it, too, see `check_no_offsets_compiled`."""
    if cp_context is not None and torch.compiler.is_compiling():
        raise ValueError(
            "initial_state and output_final_state of causal_conv1d must be left out under a "
            "cp_context and torch.compile: call it outside of the compiled function"
        )


def _with_states(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    activation: str | None,
    cu_seqlens: Tensor | None,
    cp_context: FLACPContext | None,
    initial_state: Tensor | None,
    output_final_state: bool | None,
    cu_seqlens_cpu: Tensor | None,
    impl: str,
    sequences: int,
) -> tuple[Tensor, Tensor | None]:
    """y [B, T, D] and the final states or None. The caller has checked the arguments."""
    B, T, D = x.shape
    state = None if initial_state is None else initial_state.to(x.dtype)
    check_no_offsets_compiled(cu_seqlens)
    _check_states_not_compiled(cp_context)
    if torch.compiler.is_compiling():
        y = traced_conv_after(x, weight, bias, activation, state, impl)
        if not output_final_state:
            return y, None
        before = x.new_zeros(B, weight.shape[1], D) if state is None else state.mT
        return y, torch.cat((before, x), 1)[:, -weight.shape[1] :].mT.contiguous()
    if cp_context is not None:
        offsets = cp_context.global_cu_seqlens
    else:
        offsets = _host_offsets(x, cu_seqlens, cu_seqlens_cpu)
    flat, wanted = x.reshape(B * T, D), bool(output_final_state)
    flags = {"initial": state is not None, "final": wanted}
    tables = Tables.of(impl, flat, weight, cp_context, offsets, **flags)
    if cp_context is not None:
        states = {**Agreement.of_initial(initial_state), "output_final_state": wanted}
        cp_context.before("causal_conv1d", D=D, W=weight.shape[1], dtype=x.dtype, **states)
    y, final = conv_with_states(flat, weight, bias, activation is not None, state, tables)
    return y.view(x.shape), final


def causal_conv1d_update(
    x: Tensor,
    cache: Tensor,
    residual: Tensor | None = None,
    weight: Tensor | None = None,
    bias: Tensor | None = None,
    activation: str | None = None,
    *,
    impl: str = "auto",
) -> tuple[Tensor, Tensor]:
    """One decoding step of `causal_conv1d`: one more token of each of N sequences, forward only.

    x: [N, D], [N, 1, D] or [1, N, D], bf16, fp16, fp32 or fp64.
    cache: [N, D, W], a final state of `causal_conv1d`; bf16, fp16 or fp32 (fp64 with x of fp64). It
        is updated in place: its columns move by one to the left, and the token becomes the last.
    residual: shape and dtype of x. weight: [D, W] and bias: [D], x's dtype. Other arguments are
    those of `causal_conv1d`. The order of the arguments is FLA's.
    Returns (y, cache): y like x, and the same cache.
    Raises ValueError for arguments that do not fit, and for an argument that requires a
    gradient while gradients are recorded.
    """
    names = ("x", "weight", "cache", "residual", "bias")
    values = x, weight, cache, residual, bias
    check_tensors(names, values, 3)
    assert weight is not None
    if x.ndim not in (2, 3) or (x.ndim == 3 and 1 not in x.shape[:2]):
        raise ValueError(f"x must be [N, D], [N, 1, D] or [1, N, D], got shape {tuple(x.shape)}")
    D = x.shape[-1]
    N = x.shape[:-1].numel()
    check_conv1d_parameters(x, weight, bias, activation)
    if N < 1:
        raise ValueError(f"x must hold a token of at least one sequence, got {tuple(x.shape)}")
    check_conv1d_state("cache", cache, (N, D, weight.shape[1]), x)
    if any(s == 0 and n > 1 for s, n in zip(cache.stride(), cache.shape, strict=True)):
        raise ValueError(f"cache must not overlap itself, got strides {cache.stride()}")
    if residual is not None:
        check_residual(residual, x)
    check_forward_only("causal_conv1d_update", "causal_conv1d", names, values)
    rows, silu = x.reshape(N, D), activation is not None
    if torch.compiler.is_compiling():
        state = cache.to(x.dtype)
        y = traced_conv_after(rows[:, None], weight, bias, activation, state, impl)
        cache.copy_(torch.cat((cache[:, :, 1:], rows[:, :, None].to(cache.dtype)), 2))
    else:
        y = resolve(impl, x.device, x.dtype).conv_update(rows, cache, weight, bias, silu)
    y = y.reshape(x.shape)
    return y if residual is None else y + residual, cache


def conv1d_heads(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    activation: str | None,
    cu_seqlens: Tensor | None,
    cp_context: FLACPContext | None,
    heads: Heads,
    *,
    impl: str = "auto",
) -> tuple[Tensor, ...]:
    """The result of `causal_conv1d`, divided into parts [B, T, H, K], one for each (H, K) of heads.

    The parts are views of one tensor and must not be changed in place.
    """
    return _parts(x, weight, bias, activation, cu_seqlens, cp_context, heads=heads, impl=impl)


def conv1d_parts(
    xs: Sequence[Tensor],
    weight: Tensor,
    bias: Tensor | None,
    activation: str | None,
    cu_seqlens: Tensor | None,
    cp_context: FLACPContext | None,
    heads: Heads,
    *,
    impl: str = "auto",
) -> tuple[Tensor, ...]:
    """`conv1d_heads` of a tensor whose channels are those of xs side by side. xs: [B, T, H * K] for
    each (H, K) of heads.

    Under torch.compile the xs are not joined: each has a convolution of its own, and one exchange
    serves all.
    """
    if not torch.compiler.is_compiling():
        x = torch.cat(list(xs), -1)
        return conv1d_heads(x, weight, bias, activation, cu_seqlens, cp_context, heads, impl=impl)
    sizes = [x.shape[2] for x in xs]
    weights = weight.split(sizes)
    biases = [None] * len(xs) if bias is None else bias.split(sizes)
    for given in zip(xs, weights, biases, strict=True):
        check_conv1d(*given, activation)
    B, T, _ = xs[0].shape
    check_sequences(T, B, cu_seqlens, cp_context)
    if cp_context is not None:
        check_conv1d_context(weight.shape[1], cp_context)
        check_fixed_call(cp_context)
    parts = traced_conv(
        [x.flatten(0, 1) for x in xs], weights, biases, activation, cp_context, impl, B
    )
    return tuple(y.view(B, T, *each) for y, each in zip(parts, heads, strict=True))


def _parts(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    activation: str | None,
    cu_seqlens: Tensor | None,
    cp_context: FLACPContext | None,
    *,
    heads: Heads | None,
    impl: str,
    cu_seqlens_cpu: Tensor | None = None,
) -> tuple[Tensor, ...]:
    """What `conv1d_heads` returns, or (y [B * T, D],) if heads is None."""
    names = ("x", "weight", "bias", "cu_seqlens", "cu_seqlens_cpu")
    check_tensors(names, (x, weight, bias, cu_seqlens, cu_seqlens_cpu), 2)
    check_conv1d(x, weight, bias, activation)
    check_sequences(x.shape[1], x.shape[0], cu_seqlens, cp_context, cu_seqlens_cpu)
    if cp_context is not None:
        check_conv1d_context(weight.shape[1], cp_context)
        check_fixed_call(cp_context)
    B, T, D = x.shape
    flat, silu = x.reshape(B * T, D), activation is not None
    if torch.compiler.is_compiling():
        (y,) = traced_conv([flat], [weight], [bias], activation, cp_context, impl, B)
        return (y,) if heads is None else head_views(y, B, heads)
    offsets = None
    if cu_seqlens is not None:
        offsets = _host_offsets(x, cu_seqlens, cu_seqlens_cpu)
    place = Place.of(impl, flat, weight, cp_context, B, offsets)
    if cp_context is not None:
        states = {**Agreement.of_initial(None), "output_final_state": False}
        cp_context.before("causal_conv1d", D=D, W=weight.shape[1], dtype=x.dtype, **states)
    found: tuple[Tensor, ...] = _CausalConv1d.apply(flat, weight, bias, silu, place, B, heads)
    return found


def _host_offsets(
    x: Tensor, cu_seqlens: Tensor | None, cu_seqlens_cpu: Tensor | None
) -> tuple[int, ...]:
    """The offsets of the sequences in x [B, T, D], checked."""
    B, T, _ = x.shape
    if cu_seqlens is None:
        return tuple(range(0, B * T + 1, T))
    offsets = tuple((cu_seqlens if cu_seqlens_cpu is None else cu_seqlens_cpu).tolist())
    check_offsets("cu_seqlens", offsets, T)
    return offsets


def head_views(y: Tensor, rows: int, heads: Heads) -> tuple[Tensor, ...]:
    """y [B * T, D] as [B, T, H, K] for each (H, K) of heads; rows: B."""
    parts, T = y.split([H * K for H, K in heads], 1), len(y) // rows
    return tuple(p.view(rows, T, *each) for p, each in zip(parts, heads, strict=True))


class _CausalConv1d(torch.autograd.Function):
    """(x [B * T, D], weight, bias, silu, place, B, heads) -> what `_parts` returns."""

    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        silu: bool,
        place: Place,
        rows: int,
        heads: Heads | None,
    ) -> tuple[Tensor, ...]:
        context = place.context
        halo = x.new_empty(0, x.shape[1])
        if place.where.width and context is not None and context.halo is not None:
            halo = exchanged_halo(x, context)
        fixed = context is not None and context.max_sequences is not None
        # `reach` is saved so that autograd notices if `update` has changed it.
        reach = place.where.reach if fixed else None
        ctx.save_for_backward(x, halo, weight, bias, reach)
        ctx.silu, ctx.place, ctx.in_parts = silu, place, heads is not None
        inputs = ConvInputs(x, halo, place.where, weight, bias, silu)
        with conv_announced(place.backend, inputs, with_backward=any(ctx.needs_input_grad)):
            y = place.backend.conv(inputs)
        return (y,) if heads is None else head_views(y, rows, heads)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor) -> tuple[Any, ...]:
        (x, halo, weight, bias, _), place = ctx.saved_tensors, ctx.place
        dy = torch.cat([d.flatten(0, 1).flatten(1) for d in grads], 1) if ctx.in_parts else grads[0]
        inputs = ConvInputs(x, halo, place.where, weight, bias, ctx.silu)
        dx, dhalo, dweight, dbias = place.backend.conv_bwd(inputs, dy)
        context = place.context
        if place.where.width and context is not None and context.halo is not None:
            context.halo.scatter_add(dx, dhalo, context.group)
        dbias = None if bias is None else dbias.to(bias.dtype)
        return dx.to(x.dtype), dweight.to(weight.dtype), dbias, None, None, None, None
