"""The operator as a sequence of stages: forward and its mirror image, on one card or many.

    gate, intra -> summarize -> [exchange] -> scan -> output
          summarise each segment -> state entering each -> run each

Without context parallelism and without cut segments nothing is summarised and nothing sent.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import torch.distributed as dist
from torch import Tensor

from .backend import Backend
from .comm import Exchange, Links, collectives
from .packing import Packing
from .rule import DeltaRule, accumulator
from .stages.intra import Inputs
from .state import AffineMap, States, carry, join


@dataclass(frozen=True)
class Plan:
    """One operator call: what it computes (rule), on which tokens, with whom."""

    rule: DeltaRule
    packing: Packing
    links: Links
    exchange: Exchange
    backend: Backend

    @property
    def group(self) -> dist.ProcessGroup | None:
        return self.exchange.group


class Saved(NamedTuple):
    """What a backward needs beside the inputs: `kept` is the backend's; the state entering each
    of `Packing.carried`; the segments' transitions (the adjoint's, transposed)."""

    kept: tuple[Tensor | None, ...]
    carried: Tensor
    transition: Tensor | None


class Result(NamedTuple):
    """o [T, HV, V]; final states [N, HV, K, V] and the states at the start of each chunk, in token
    order, [NC, HV, K, V]: None unless wanted."""

    o: Tensor
    final: Tensor | None
    h: Tensor | None
    saved: Saved


def _shape(x: Inputs) -> tuple[int, int, int]:
    return x.v.shape[1], x.q.shape[-1], x.v.shape[-1]


def _of_sequences(packing: Packing, segments: tuple[int, ...], states: Tensor) -> States:
    """Rows of a per-sequence tensor [N, ...] for some segments."""
    rows = packing.index([packing.segments[i].sequence for i in segments], states.device)
    return States(segments, states[rows])


def _per_sequence(
    plan: Plan, segments: tuple[int, ...], states: Tensor, empty: Tensor | None
) -> Tensor:
    """[N, HV, K, V], equal on all ranks, from this card's segments; `empty` gives the rows of
    sequences without tokens."""
    packing, device = plan.packing, states.device
    out = states.new_zeros(packing.sequences, *states.shape[1:])
    rows = packing.index([packing.segments[i].sequence for i in segments], device)
    out[rows] = states[packing.index(segments, device)]
    if empty is not None and packing.empty:
        rows = packing.index(packing.empty, device)
        out[rows] = empty[rows].to(out.dtype)
    # every row has one owner, so that the sum copies it to all
    return out if plan.group is None else collectives.all_reduce(out, plan.group)


def forward(
    plan: Plan, x: Inputs, initial: Tensor | None, *, want_final: bool, want_h: bool
) -> Result:
    """One operator call. initial: [N, HV, K, V] in the accumulator's dtype, or None."""
    rule, packing, run = plan.rule, plan.packing, plan.backend
    like = x.v.new_empty(0, dtype=accumulator(x.v.dtype))
    seeds = None if initial is None else _of_sequences(packing, packing.beginning, initial)

    chunks = run.intra(rule, packing, x)
    maps = run.summarize(packing, chunks, seeds)
    wait = carry(maps, packing, plan.links, plan.exchange, _shape(x), like)
    chunks = run.scores(rule, packing, chunks)
    carried = wait()

    o, h, v_new, S_end = run.scan_output(
        rule,
        packing,
        chunks,
        join(seeds, carried),
        want_states=want_h or rule.keep_intermediates,
        want_end=want_final,
    )
    final = _per_sequence(plan, packing.ending, S_end, initial) if want_final else None
    saved = Saved(run.keep(rule, chunks, h, v_new), carried.value, maps.transition)
    h = run.in_token_order(packing, h) if want_h else None
    return Result(o.to(x.v.dtype), final, h, saved)


def backward(
    plan: Plan,
    x: Inputs,
    initial: Tensor | None,
    saved: Saved,
    o: Tensor | None,
    do: Tensor,
    dfinal: Tensor | None,
    *,
    want_dinitial: bool,
) -> tuple[Inputs, Tensor | None]:
    """Gradients of the inputs and of the initial states. dfinal: [N, HV, K, V], equal on all
    ranks, as is the gradient returned. o: as the forward gave it, for a backend that reads it."""
    rule, packing, run = plan.rule, plan.packing, plan.backend
    like = x.v.new_empty(0, dtype=accumulator(x.v.dtype))
    seeds = None if dfinal is None else _of_sequences(packing, packing.ending, dfinal)

    chunks, h, v_new = run.restore(rule, packing, x, saved.kept, o)
    dout = run.output_bwd(rule, packing, chunks, do)
    maps = AffineMap(saved.transition, run.summarize_bwd(packing, chunks, dout, seeds))
    wait = carry(maps, packing, plan.links, plan.exchange, _shape(x), like, reverse=True)
    if h is None:
        first = None if initial is None else _of_sequences(packing, packing.beginning, initial)
        S0 = join(first, States(packing.carried, saved.carried))
        h, v_new, _ = run.scan(packing, chunks, S0)
    dS_end = join(seeds, wait())
    dscan, dS0 = run.scan_bwd(packing, chunks, dout, dS_end, want_start=want_dinitial)
    grads = run.intra_bwd(rule, packing, x, chunks, h, v_new, dscan)
    dinitial = _per_sequence(plan, packing.beginning, dS0, dfinal) if want_dinitial else None
    return grads, dinitial
