"""Convolution of sequences that start from a state, or leave one.

A state [N, D, W] holds the last W tokens of each of N sequences, the newest in its last column. The
convolution reads them as halo rows, like the tokens before a range. For that, each range is cut
into pieces where sequences begin. The halo of a piece has tokens of other ranks, rows of a state,
or both. Example, W = 4, sequence n starts at token 9, and a range at token 10:

    halo of the range     7 -> state[n, :, 2]    8 -> state[n, :, 3]    9 -> from its rank

The state that a sequence leaves has its last W tokens, and the end of its initial state if the
sequence is shorter.
"""

import functools
import sys
from collections.abc import Callable
from typing import Any, NamedTuple, Self

import torch
from torch import Tensor

from fla_cp import remat
from fla_cp.comm import collectives
from fla_cp.context import FLACPContext
from fla_cp.kernels import resolve
from fla_cp.kernels.torch.conv import ConvInputs, ConvRows
from fla_cp.once_differentiable import once_differentiable
from fla_cp.ops.conv_rows import Place, conv_announced, exchanged_halo
from fla_cp.partition.device_tables import to_device
from fla_cp.partition.token_ranges import Ranges
from fla_cp.rule import accumulator


class Pieces(NamedTuple):
    """The pieces of a rank's ranges, and their halo.

    where: the rows of the pieces. take [pieces * width], int64: the source of each halo row, as its
    row in the exchanged halo followed by the states as rows [N * W].
    """

    where: ConvRows
    take: Tensor

    @classmethod
    def build(
        cls,
        offsets: tuple[int, ...],
        ranges: Ranges,
        width: int,
        exchanged: int,
        device: torch.device,
    ) -> Self:
        """exchanged: how many rows the exchanged halo has: `width` for each range, or 0."""
        cu = torch.tensor(offsets, dtype=torch.int64, device="cpu")
        starts, lengths, of_range = [], [], []
        for r, (lo, hi) in enumerate(ranges):
            inside = cu[torch.searchsorted(cu, lo, right=True) : torch.searchsorted(cu, hi)]
            edges = [lo, *inside.unique().tolist()]
            starts += edges
            lengths += [b - a for a, b in zip(edges, [*edges[1:], hi], strict=True)]
            of_range += [r] * len(edges)
        start = torch.tensor(starts, dtype=torch.int64, device="cpu")[:, None]
        # An empty range at the end belongs to no sequence. Its halo is not read.
        n = (torch.searchsorted(cu, start, right=True) - 1).clamp(max=len(offsets) - 2)
        column = torch.arange(width, device="cpu")
        before = cu[n] - (start - width + column)  # how far the token is before its sequence
        state = exchanged + n * (width + 1) + (width + 1 - before.clamp(1, width))
        sent = torch.tensor(of_range, dtype=torch.int64, device="cpu")[:, None] * width + column
        take = torch.where(before > 0, state, sent if exchanged else 0)
        # The halo holds every token before a piece, so all tokens reach all that they read.
        reach = torch.full((sum(lengths),), width, dtype=torch.int32, device="cpu")
        where = ConvRows.build(reach, tuple(lengths), width, device)
        return cls(where, to_device(take.flatten(), torch.int64, device))


class FinalRows(NamedTuple):
    """Where the rows of the final states come from, as int64 tensors. Rows `own` of the rank's
    tokens become the rows `put` of the final states. Rows `left` of the initial states become the
    rows `kept`. total: how many rows the final states have, N * W."""

    own: Tensor
    put: Tensor
    left: Tensor
    kept: Tensor
    total: int

    @classmethod
    def build(cls, offsets: tuple[int, ...], ranges: Ranges, W: int, device: torch.device) -> Self:
        cu = torch.tensor(offsets, dtype=torch.int64, device="cpu")
        n = torch.arange(len(offsets) - 1, device="cpu")[:, None]
        token = cu[1:, None] - W + torch.arange(W, device="cpu")
        missing = cu[:-1, None] - token  # how far before the sequence's first token
        local, base = torch.full_like(token, -1), 0
        for lo, hi in ranges:
            held = (missing <= 0) & (token >= lo) & (token < hi)
            local = torch.where(held, base + token - lo, local)
            base += hi - lo
        row = torch.arange(token.numel(), device="cpu").view(token.shape)
        mine, old = local >= 0, missing > 0
        tables = local[mine], row[mine], (n * W + W - missing)[old], row[old]
        own, put, left, kept = (to_device(t, torch.int64, device) for t in tables)
        return cls(own, put, left, kept, token.numel())


_pieces = functools.lru_cache(maxsize=16)(Pieces.build)
_final_rows = functools.lru_cache(maxsize=16)(FinalRows.build)


class Tables(NamedTuple):
    """The tables of a convolution with states. place: the backend and the rows. take:
    `Pieces.take`; None if no state is read. final: None if no final states are wanted."""

    place: Place
    take: Tensor | None
    final: FinalRows | None

    @classmethod
    def of(
        cls,
        impl: str,
        x: Tensor,
        weight: Tensor,
        context: FLACPContext | None,
        offsets: tuple[int, ...],
        *,
        initial: bool,
        final: bool,
    ) -> Self:
        """The tables for x [T, D]. offsets: those of all sequences; under a context, of the whole
        batch. initial: whether sequences start from states. final: whether final states are
        wanted."""
        W, device, take, rows = weight.shape[1], x.device, None, None
        ranges: Ranges = ((0, len(x)),)
        exchanged = 0
        if context is not None:
            ranges = context.token_ranges[context.rank]
            exchanged = len(ranges) * (W - 1)
        if not (initial and W > 1):
            place = Place.of(impl, x, weight, context, 1, None if context else offsets)
        else:
            given = offsets, ranges, W - 1, exchanged, device
            if context is None:
                pieces = _pieces(*given)
            else:  # the context keeps them, for graphs that were captured under it
                pieces = context.cached((Pieces, W, device), lambda: Pieces.build(*given))
            place, take = Place(resolve(impl, device, x.dtype), pieces.where, context), pieces.take
        if final:
            parts = offsets, ranges, W, device
            if context is None:
                rows = _final_rows(*parts)
            else:
                rows = context.cached((FinalRows, W, device), lambda: FinalRows.build(*parts))
        return cls(place, take, rows)


def conv_with_states(
    x: Tensor, weight: Tensor, bias: Tensor | None, silu: bool, state: Tensor | None, tables: Tables
) -> tuple[Tensor, Tensor | None]:
    """y [T, D], and the final states [N, D, W] if the tables have them, both in x's dtype.

    x [T, D]. state [N, D, W], x's dtype. Differentiable. Under a context, the final states and the
    gradient of `state` are equal on all ranks, provided that the gradient of the final states is.

    No graph computes states of packed sequences or under a context, so torch.compile must not trace
    it. Only programs that compile have imported Dynamo.
    """
    run = _untraced() if "torch._dynamo" in sys.modules else _ConvWithStates.apply
    found: tuple[Tensor, Tensor | None] = run(x, weight, bias, state, silu, tables)
    return found


@functools.cache
def _untraced() -> Callable[..., tuple[Tensor, Tensor | None]]:
    run: Callable[..., tuple[Tensor, Tensor | None]]
    run = torch.compiler.disable(lambda *given: _ConvWithStates.apply(*given))
    return run


class _ConvWithStates(torch.autograd.Function):
    """(x, weight, bias, state, silu, tables) -> what `conv_with_states` returns."""

    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        state: Tensor | None,
        silu: bool,
        tables: Tables,
    ) -> tuple[Tensor, Tensor | None]:
        place, take, rows = tables
        context = place.context
        halo = x.new_empty(0, x.shape[1])
        if place.where.width and context is not None and context.halo is not None:
            halo = exchanged_halo(x, context)
        ctx.exchanged = len(halo)
        states = None if state is None else _as_rows(state)
        if take is not None:
            assert states is not None
            halo = torch.cat((halo, states)).index_select(0, take)
        ctx.save_for_backward(x, halo, weight, bias)
        ctx.silu, ctx.tables = silu, tables
        ctx.state = None if state is None else (state.shape, state.dtype)
        ctx.set_materialize_grads(False)
        inputs = ConvInputs(x, halo, place.where, weight, bias, silu)
        with conv_announced(place.backend, inputs, with_backward=any(ctx.needs_input_grad)):
            y = place.backend.conv(inputs)
        if rows is None:
            return y, None
        final = _last_tokens(x, rows, context)
        if states is not None:
            final.index_copy_(0, rows.kept, states.index_select(0, rows.left))
        final = final.view(-1, weight.shape[1], x.shape[1]).mT.contiguous()
        # Detached, because autograd does not let the caller change a Function's view in place.
        return y, final.detach()

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dy: Tensor | None, dfinal: Tensor | None) -> tuple[Any, ...]:
        (x, halo, weight, bias), (place, take, rows) = ctx.saved_tensors, ctx.tables
        context = place.context
        dy = torch.zeros_like(x) if dy is None else dy
        inputs = ConvInputs(x, halo, place.where, weight, bias, ctx.silu)
        dx, dhalo, dweight, dbias = place.backend.conv_bwd(inputs, dy)
        dstates = None
        if take is not None:
            N, _, W = ctx.state[0]
            joint = dhalo.new_zeros(ctx.exchanged + N * W, dhalo.shape[1])
            joint.index_add_(0, take, dhalo)
            dhalo, dstates = joint[: ctx.exchanged], joint[ctx.exchanged :]
        if place.where.width and context is not None and context.halo is not None:
            context.halo.scatter_add(dx, dhalo, context.group)
        dfinals = None if dfinal is None else _as_rows(dfinal)
        if dfinals is not None:
            dx.index_add_(0, rows.own, dfinals.index_select(0, rows.put).to(dx.dtype))
        dstate = None
        if ctx.needs_input_grad[3]:
            dstate = _state_gradient(ctx.state, dstates, dfinals, rows, x, context)
        dbias = None if bias is None else dbias.to(bias.dtype)
        return dx.to(x.dtype), dweight.to(weight.dtype), dbias, dstate, None, None


def _as_rows(state: Tensor) -> Tensor:
    """[N, D, W] -> [N * W, D]."""
    return state.mT.reshape(-1, state.shape[1])


def _last_tokens(x: Tensor, rows: FinalRows, context: FLACPContext | None) -> Tensor:
    """The final states as rows [N * W, D], as far as they consist of tokens of x, of all ranks.
    Rows before the first token of a sequence are zero. In the second run of a
    `remat.selective_checkpoint` they are taken from the first run."""
    call = ("causal_conv1d final_state", tuple(x.shape), x.dtype)
    shared = context is not None and context.group is not None
    kept = remat.kept(call) if shared else None
    if kept is not None and kept[0] is not None:
        return kept[0].clone()
    final = x.new_zeros(rows.total, x.shape[1])
    final.index_copy_(0, rows.put, x.index_select(0, rows.own))
    if shared:  # every row is nonzero on one rank only, so the sum copies it to all ranks
        final = _sum_over_ranks(final, context).to(x.dtype)
        if remat.active():  # a copy, because the caller writes rows of the initial states into it
            remat.keep(call, (final.clone(),))
    return final


def _sum_over_ranks(x: Tensor, context: FLACPContext | None) -> Tensor:
    """The sum over the context's ranks, in the dtype in which x is accumulated."""
    if context is None or context.group is None:
        return x
    return collectives.all_reduce(x.to(accumulator(x.dtype)), context.group)


def _state_gradient(
    state: tuple[torch.Size, torch.dtype],
    dstates: Tensor | None,
    dfinals: Tensor | None,
    rows: FinalRows | None,
    x: Tensor,
    context: FLACPContext | None,
) -> Tensor:
    """The gradient of the initial states. dstates: this rank's part of it, from the tokens that
    read them. dfinals: the gradient of the final states, equal on all ranks. rows: see
    `FinalRows`."""
    (N, D, W), dtype = state
    if dstates is None:
        dstates = torch.zeros(N * W, D, dtype=accumulator(x.dtype), device=x.device)
    else:
        dstates = _sum_over_ranks(dstates, context)
    if dfinals is not None:
        assert rows is not None
        dstates.index_add_(0, rows.left, dfinals.index_select(0, rows.kept).to(dstates.dtype))
    return dstates.view(N, W, D).mT.to(dtype)
