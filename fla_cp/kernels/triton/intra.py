"""Memory for the chunks, and which file forms them."""

import functools
from collections.abc import Callable

import torch
from torch import Tensor

from fla_cp.kernels.backend import ChunkStates
from fla_cp.kernels.torch.intra import Inputs
from fla_cp.kernels.triton.device.blocks import unit_rows
from fla_cp.kernels.triton.device.bundles import anchored, by_chunk, terms
from fla_cp.kernels.triton.intra_channelwise import empty_gated, intra_channelwise
from fla_cp.kernels.triton.intra_channelwise_bwd import all_read_dv, intra_channelwise_bwd
from fla_cp.kernels.triton.intra_headwise import intra_headwise
from fla_cp.kernels.triton.intra_headwise_bwd import by_one_kernel, intra_headwise_bwd
from fla_cp.kernels.triton.operands import Chunks, ScanGrads, planes, tables
from fla_cp.kernels.triton.tile_table import TUNING, Tuning
from fla_cp.partition.packing import Packing
from fla_cp.rule import DeltaRule


def intra(rule: DeltaRule, packing: Packing, x: Inputs, tuning: Tuning = TUNING) -> Chunks:
    """Forms the chunks of all tokens."""
    return intra_in_two(rule, packing, x, None, tuning)[0]


def intra_in_two(
    rule: DeltaRule, packing: Packing, x: Inputs, first: int | None, tuning: Tuning = TUNING
) -> tuple[Chunks, Callable[[], None]]:
    """Forms the first chunks, or all if `first` is None, and returns all chunks and a call that
    forms the others. The call allocates nothing, so that it may run on another stream."""
    x, c = empty_chunks(rule, packing, x, tuning)
    NC = len(c.decay)
    if not NC:
        return c, lambda: None
    form = (intra_headwise if rule.per_head else intra_channelwise)(packing, x, c)
    first = NC if first is None else first
    form(0, first)
    return c, functools.partial(form, first, NC)


def empty_chunks(
    rule: DeltaRule, packing: Packing, x: Inputs, tuning: Tuning
) -> tuple[Inputs, Chunks]:
    """The inputs as kernels take them, and memory for the chunks."""
    x = Inputs(*(None if t is None else unit_rows(t) for t in x))  # type: ignore[arg-type]
    NC, K, HV = len(tables(packing, x.q.device).chunk_start), x.q.shape[2], x.v.shape[1]
    C = packing.chunk
    if rule.per_head:
        qg, k_decayed, kg = x.q, x.k if x.p is None else x.p, x.k
    else:
        qg, k_decayed, kg = empty_gated(rule, NC, C, x)
    square = (NC, HV, terms(rule, x.q.dtype) * C, C)
    T, Aqk = x.q.new_empty((0,) if rule.removal == "none" else square), x.q.new_empty(square)
    decay = x.q.new_empty(NC, HV, K, dtype=torch.float32)
    rows = x.q.new_empty(NC, HV, planes(rule), C, dtype=torch.float32)
    anchors = decay.new_empty((NC, HV, C // 16, K) if anchored(rule, x.q.dtype) else (0,))
    flags = (NC, HV) if by_chunk(rule, x.q.dtype) else (0,)
    formed = T, Aqk, decay, rows, anchors, rows.new_empty(flags, dtype=torch.int32)
    chunks = Chunks(*formed, qg, k_decayed, kg, x.v, rule, tuning=tuning)
    return x, chunks


def reads_dv(packing: Packing, x: Inputs, c: Chunks, do: Tensor, concurrent: bool) -> bool:
    """Whether the local backward reads dv = beta y, which the reverse scan then writes, and not y.
    concurrent: as for `launch_scan_bwd`."""
    if c.rule.per_head:
        return by_one_kernel(packing, c, do, concurrent)
    return all_read_dv(packing, x, c, do, concurrent)


def intra_bwd(
    packing: Packing, x: Inputs, c: Chunks, states: ChunkStates, grads: ScanGrads
) -> Inputs:
    """Gradients of the inputs, from those that the reverse scan leaves at the chunks."""
    x = Inputs(*(None if t is None else unit_rows(t) for t in x))  # type: ignore[arg-type]
    grads = grads._replace(do=unit_rows(grads.do))
    run = intra_headwise_bwd if c.rule.per_head else intra_channelwise_bwd
    return run(packing, x, c, states, grads)
