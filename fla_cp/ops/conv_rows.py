"""Finds the tokens before each token of a convolution: in this rank's ranges, on other ranks, or in
the states from which sequences start."""

from functools import lru_cache, partial
from typing import NamedTuple, Self

import torch
from torch import Tensor

from fla_cp import remat
from fla_cp.comm import run_overlap
from fla_cp.context import FLACPContext
from fla_cp.kernels import Backend, resolve
from fla_cp.kernels.rehearsal import announced, on_meta
from fla_cp.kernels.torch.conv import ConvInputs, ConvRows
from fla_cp.partition.token_ranges import Ranges


class Place(NamedTuple):
    """How a convolution runs: where each token's predecessors are, on which backend, and under
    which context."""

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
    """The rows under a context, which keeps them for CUDA graphs that were captured under it."""
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
    """Announces the convolution and its backward to a backend that compiles kernels, so that it can
    compile both at once (kernels/rehearsal.py)."""
    announce = backend.compiles and with_backward
    return announced(partial(_rehearse, backend, c) if announce else None)


def _rehearse(backend: Backend, c: ConvInputs) -> None:
    """Runs both directions on tensors without memory (`fla_cp.kernels.rehearsal`)."""
    where = c.where._replace(reach=on_meta(c.where.reach), kept={})
    bias = None if c.bias is None else on_meta(c.bias)
    c = ConvInputs(on_meta(c.x), on_meta(c.halo), where, on_meta(c.weight), bias, c.silu)
    backend.conv_bwd(c, backend.conv(c))


def exchanged_halo(x: Tensor, context: FLACPContext) -> Tensor:
    """The tokens before each range, [ranges * width, D]. They are exchanged or, in the second run
    of a `remat.selective_checkpoint`, taken from the first run."""
    assert context.halo is not None
    call = ("causal_conv1d", tuple(x.shape), x.dtype)
    kept = remat.kept(call)
    if kept is None:
        halo = context.halo.gather(x, context.group).flatten(0, 1)
        remat.keep(call, (halo,))
        return halo
    if context.group is not None:
        # The work that was handed over runs where `gather` runs it, because the checkpoint
        # compares the order of saved tensors.
        run_overlap(lambda: None)
    assert kept[0] is not None
    return kept[0]
