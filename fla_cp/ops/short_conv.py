"""Short causal convolution, which mixes neighbouring tokens before a linear-attention operator."""

from collections.abc import Sequence
from functools import lru_cache, partial
from typing import Any, NamedTuple, Self

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.function import once_differentiable

from fla_cp import remat
from fla_cp.arguments import check_tensors
from fla_cp.comm import run_overlap
from fla_cp.comm.collectives import all_gather_rows
from fla_cp.context import FLACPContext, context_of
from fla_cp.handle import Handle, Sizes
from fla_cp.kernels import Backend, resolve
from fla_cp.kernels.differentiable_op import differentiable_op
from fla_cp.kernels.rehearsal import announced, on_meta
from fla_cp.kernels.torch.conv import ConvInputs, ConvRows
from fla_cp.ops.checks import check_conv1d, check_conv1d_context, check_fixed_call, check_sequences
from fla_cp.partition.checks import check_offsets
from fla_cp.partition.token_ranges import Ranges

Heads = tuple[tuple[int, int], ...]
"""Parts of the channels: for each the number of heads, and the channels of a head."""


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
    Returns y like x. Sums in fp32 (fp64 for fp64).
    Raises ValueError as in arguments.py and ops/checks.py.
    """
    given = x, weight, bias, activation, cu_seqlens, cp_context
    (y,) = _parts(*given, heads=None, impl=impl)
    return y.view(x.shape)


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
    """The result of `causal_conv1d` in parts, [B, T, H, K] for each (H, K) of heads.

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
    """`conv1d_heads` of the channels of xs side by side, [B, T, H * K] for each (H, K) of heads.

    A traced call runs a convolution for each of xs, with one exchange for all, and copies none.
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
    parts = _traced([x.flatten(0, 1) for x in xs], weights, biases, activation, cp_context, impl, B)
    return tuple(y.view(B, T, *each) for y, each in zip(parts, heads, strict=True))


def _traced(
    xs: Sequence[Tensor],
    weights: Sequence[Tensor],
    biases: Sequence[Tensor | None],
    activation: str | None,
    cp_context: FLACPContext | None,
    impl: str,
    rows: int,
) -> list[Tensor]:
    """y of each x [B * T, D], of some of the channels. rows: B."""
    handle = Handle.make(-1, Sizes(0)) if cp_context is None else cp_context.handle
    halos = _compiled_halos(xs, weights[0].shape[1] - 1, cp_context)
    rest = activation is not None, impl, *handle, rows
    return [conv_op(*given, *rest) for given in zip(xs, halos, weights, biases, strict=True)]


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
) -> tuple[Tensor, ...]:
    """What `conv1d_heads` returns, or y [B * T, D] without heads."""
    names = ("x", "weight", "bias", "cu_seqlens")
    check_tensors(names, (x, weight, bias, cu_seqlens), 2)
    check_conv1d(x, weight, bias, activation)
    check_sequences(x.shape[1], x.shape[0], cu_seqlens, cp_context)
    if cp_context is not None:
        check_conv1d_context(weight.shape[1], cp_context)
        check_fixed_call(cp_context)
    B, T, D = x.shape
    flat, silu = x.reshape(B * T, D), activation is not None
    if torch.compiler.is_compiling():
        (y,) = _traced([flat], [weight], [bias], activation, cp_context, impl, B)
        return (y,) if heads is None else _views(y, B, heads)
    offsets = None
    if cu_seqlens is not None:
        offsets = tuple(cu_seqlens.tolist())
        check_offsets("cu_seqlens", offsets, T)
    place = Place.of(impl, flat, weight, cp_context, B, offsets)
    if cp_context is not None:
        cp_context.before("causal_conv1d", D=D, W=weight.shape[1], dtype=x.dtype)
    found: tuple[Tensor, ...] = _CausalConv1d.apply(flat, weight, bias, silu, place, B, heads)
    return found


def _views(y: Tensor, rows: int, heads: Heads) -> tuple[Tensor, ...]:
    """y [B * T, D] as [B, T, H, K] for each (H, K) of heads; rows: B."""
    parts, T = y.split([H * K for H, K in heads], 1), len(y) // rows
    return tuple(p.view(rows, T, *each) for p, each in zip(parts, heads, strict=True))


class Place(NamedTuple):
    """Where each token's predecessors are, and the backend that computes."""

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
    ) -> Self:
        backend = resolve(impl, x.device, x.dtype)
        if context is not None:
            return cls(backend, _context_rows(context, weight.shape[1] - 1, x.device), context)
        if offsets is None:
            offsets = tuple(range(0, len(x) + 1, len(x) // rows))
        return cls(backend, _sequence_rows(offsets, x.device), None)


@lru_cache(maxsize=16)
def _sequence_rows(offsets: tuple[int, ...], device: torch.device) -> ConvRows:
    at = torch.arange(offsets[-1], device="cpu")
    bounds = torch.tensor(offsets, device="cpu")
    start, lengths = bounds[:-1], bounds.diff()
    reach = at - torch.repeat_interleave(start, lengths)
    return ConvRows.build(reach, offsets[-1:], 0, device)


def _context_rows(context: FLACPContext, width: int, device: torch.device) -> ConvRows:
    """The context keeps them, for graphs that were captured under it."""
    ranges = context.token_ranges[context.rank]

    def build() -> ConvRows:
        if context.max_sequences is None:
            return _ranges_rows(context.global_cu_seqlens, ranges, width, device)
        (reach,) = context.table(_context_reach, torch.int32, device)
        return ConvRows.build(reach, _lengths(ranges), width, device)

    return context.cached((ConvRows, width, device), build)


def _context_reach(context: FLACPContext) -> tuple[Tensor]:
    return (_reach(context.global_cu_seqlens, context.token_ranges[context.rank]),)


def _reach(cu_seqlens: tuple[int, ...], ranges: Ranges) -> Tensor:
    """`ConvRows.reach` of the tokens in `ranges`."""
    cu = torch.tensor(cu_seqlens, device="cpu")
    token = torch.cat([torch.arange(lo, hi, device="cpu") for lo, hi in ranges or [(0, 0)]])
    return token - cu[torch.searchsorted(cu, token, right=True) - 1]


def _lengths(ranges: Ranges) -> tuple[int, ...]:
    return tuple(hi - lo for lo, hi in ranges)


@lru_cache(maxsize=16)
def _ranges_rows(
    cu_seqlens: tuple[int, ...], ranges: Ranges, width: int, device: torch.device
) -> ConvRows:
    return ConvRows.build(_reach(cu_seqlens, ranges), _lengths(ranges), width, device)


def conv_announced(backend: Backend, c: ConvInputs, *, with_backward: bool) -> announced:
    """Announces the stage, and its backward, to backends that compile."""
    announce = backend.compiles and with_backward
    return announced(partial(_rehearse, backend, c) if announce else None)


def _rehearse(backend: Backend, c: ConvInputs) -> None:
    """Runs both directions on tensors without memory (`fla_cp.kernels.rehearsal`)."""
    where = c.where._replace(reach=on_meta(c.where.reach), kept={})
    bias = None if c.bias is None else on_meta(c.bias)
    c = ConvInputs(on_meta(c.x), on_meta(c.halo), where, on_meta(c.weight), bias, c.silu)
    backend.conv_bwd(c, backend.conv(c))


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
            halo = _halo(x, context)
        fixed = context is not None and context.max_sequences is not None
        # Saved so that autograd notices if `update` has changed it.
        reach = place.where.reach if fixed else None
        ctx.save_for_backward(x, halo, weight, bias, reach)
        ctx.silu, ctx.place, ctx.in_parts = silu, place, heads is not None
        inputs = ConvInputs(x, halo, place.where, weight, bias, silu)
        with conv_announced(place.backend, inputs, with_backward=any(ctx.needs_input_grad)):
            y = place.backend.conv(inputs)
        return (y,) if heads is None else _views(y, rows, heads)

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


def _halo(x: Tensor, context: FLACPContext) -> Tensor:
    """The tokens before each range, [ranges * width, D]: exchanged, or under
    `remat.selective_checkpoint` those that the first run has received."""
    assert context.halo is not None
    call = ("causal_conv1d", tuple(x.shape), x.dtype)
    kept = remat.kept(call)
    if kept is None:
        halo = context.halo.gather(x, context.group).flatten(0, 1)
        remat.keep(call, (halo,))
        return halo
    if context.group is not None:
        run_overlap(lambda: None)  # where `gather` runs it: torch compares what is saved
    assert kept[0] is not None
    return kept[0]


# For torch.compile (see custom_op.py): an op that takes the halo, and an all-gather in the graph
# that forms it. The shapes do not depend on which rank needs which tokens.


def _compiled_halos(
    xs: Sequence[Tensor], width: int, context: FLACPContext | None
) -> Sequence[Tensor]:
    """For each x [B * T, D], [ranges * width, D] as `Halo.gather` gives it; differentiable."""
    if width == 0 or context is None or context.halo is None:
        return [x.new_empty(0, x.shape[1]) for x in xs]
    sizes = Handle.read(context.handle.sizes)
    if not context.halo.needed:
        return [x.new_zeros(sizes.ranges * width, x.shape[1]) for x in xs]
    channels = [x.shape[1] for x in xs]
    rows, take = halo_tables(xs[0], *context.handle, width, sum(channels))
    sent = torch.cat([x.index_select(0, rows) for x in xs], 1)
    wires = F.pad(sent, (0, 0, 0, sizes.padded - sizes.sent))
    if context.world_size > 1:
        wires = all_gather_rows(wires, context.world_size, context.group_name)
    halo: Tensor = received_halo(F.pad(wires, (0, 0, 0, 1)).index_select(0, take))
    return [part.contiguous() for part in halo.split(channels, 1)]


@torch.library.custom_op("fla_cp::received_halo", mutates_args=())
def received_halo(halo: Tensor) -> Tensor:
    """A copy of the halo, which `remat.selective_checkpoint` keeps in a compiled graph."""
    return halo.clone()


received_halo.register_fake(torch.empty_like)
received_halo.register_autograd(lambda ctx, grad: grad)


def _halo_tables(
    x: Tensor, context: Tensor, sizes: Tensor, width: int, channels: int
) -> tuple[Tensor, Tensor]:
    found = context_of(context)
    assert found is not None and found.halo is not None
    found.check_alive()
    found.before("causal_conv1d", D=channels, W=width + 1, dtype=x.dtype)
    rows, take = found.halo.gather_tables(x.device)
    return rows.clone(), take.clone()


halo_tables = torch.library.custom_op(
    "fla_cp::halo_tables",
    _halo_tables,
    mutates_args=(),
    schema="(Tensor x, Tensor context, Tensor sizes, int width, int channels) -> (Tensor, Tensor)",
)


@halo_tables.register_fake
def _halo_tables_fake(
    x: Tensor, context: Tensor, sizes: Tensor, width: int, channels: int
) -> tuple[Tensor, Tensor]:
    size = Handle.read(sizes)
    return (
        x.new_empty(size.sent, dtype=torch.int64),
        x.new_empty(size.ranges * width, dtype=torch.int64),
    )


def _inputs(
    x: Tensor,
    halo: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    silu: bool,
    impl: str,
    context: Tensor,
    sizes: Tensor,
    rows: int,
) -> tuple[Backend, ConvInputs]:
    """The backend and the inputs, from the arguments that both ops share."""
    place = Place.of(impl, x, weight, context_of(context), rows)
    return place.backend, ConvInputs(x, halo, place.where, weight, bias, silu)


def _conv_run(*args: Any) -> Tensor:
    backend, inputs = _inputs(*args)
    return backend.conv(inputs)


def _conv_backward_run(dy: Tensor, *args: Any) -> list[Tensor]:
    backend, c = _inputs(*args)
    given = zip(backend.conv_bwd(c, dy), (c.x, c.halo, c.weight, c.bias), strict=True)
    return [c.x.new_empty(0) if t is None or d is None else _fresh(d, t) for d, t in given]


def _fresh(d: Tensor, like: Tensor) -> Tensor:
    """d in the dtype of `like`, and never `like` itself, which an op may not return."""
    return d.clone() if d is like else d.to(like.dtype)


conv_op = differentiable_op(
    "causal_conv1d",
    "Tensor x, Tensor halo, Tensor weight, Tensor? bias, bool silu, str impl, Tensor context, "
    "Tensor sizes, SymInt rows",
    _conv_run,
    _conv_backward_run,
    tensors=4,
)
