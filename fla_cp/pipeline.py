"""The operator as a sequence of stages: forward and its mirror image, on one card or many.

    gate, intra -> summarize -> [exchange] -> scan -> output
          summarise each segment -> state entering each -> run each

Without context parallelism and without cut segments nothing is summarised and nothing sent.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch.distributed as dist
from torch import Tensor

from fla_cp.comm import Exchange, Links, collectives, run_overlap
from fla_cp.comm.carry import AffineMap, States, carry, join
from fla_cp.kernels.backend import Backend
from fla_cp.kernels.torch.intra import Inputs
from fla_cp.partition.packing import Packing
from fla_cp.rule import DeltaRule, accumulator


class Plan(NamedTuple):
    """One operator call: what it computes (rule), on which tokens, with whom. ahead: `packing`, or,
    where nothing crosses ranks, one cut finer, for the forward alone."""

    rule: DeltaRule
    packing: Packing
    links: Links
    exchange: Exchange
    backend: Backend
    ahead: Packing | None = None

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
    """o [T, HV, V]; final states [N, HV, K, V], fp32 (fp64), and the states at the start of each
    chunk, in token order, [NC, HV, K, V], in v's dtype: None unless wanted. Both are
    [.., V, K] with the rule's state_v_first."""

    o: Tensor
    final: Tensor | None
    h: Tensor | None
    saved: Saved


def _shape(x: Inputs) -> tuple[int, int, int]:
    return x.v.shape[1], x.q.shape[-1], x.v.shape[-1]


def _of_sequences(plan: Plan, segments: tuple[int, ...], states: Tensor | None) -> States | None:
    """For some segments, the rows of a per-sequence tensor in the caller's layout, seen as
    [E, HV, K, V]."""
    if states is None:
        return None
    packing = plan.packing
    rows = packing.index([packing.segments[i].sequence for i in segments], states.device)
    value = states[rows]
    return States(segments, value.mT if plan.rule.state_v_first else value)


def _per_sequence(
    plan: Plan, segments: tuple[int, ...], states: Tensor, empty: Tensor | None
) -> Tensor:
    """[N, ..] in the caller's layout, equal on all ranks, from states [E, HV, K, V] of this card's
    segments; `empty` [N, ..] gives the rows of sequences without tokens."""
    packing, device = plan.packing, states.device
    if plan.rule.state_v_first:
        states = states.mT
    out = states.new_zeros(packing.sequences, *states.shape[1:])
    rows = packing.index([packing.segments[i].sequence for i in segments], device)
    out[rows] = states[packing.index(segments, device)]
    if empty is not None and packing.empty:
        rows = packing.index(packing.empty, device)
        out[rows] = empty[rows].to(out.dtype)
    # every row has one owner, so that the sum copies it to all
    return out if plan.group is None else collectives.all_reduce(out, plan.group)


def prepare_chunks(plan: Plan, x: Inputs, initial: Tensor | None) -> tuple[Any, AffineMap]:
    """The chunks and the maps of this card's segments: what needs no state."""
    seeds = _of_sequences(plan, plan.packing.beginning, initial)
    found: tuple[Any, AffineMap] = plan.backend.prepare_chunks(plan.rule, plan.packing, x, seeds)
    return found


def run_segments(
    plan: Plan,
    x: Inputs,
    initial: Tensor | None,
    chunks: Any,
    maps: AffineMap,
    carried: States,
    *,
    want_final: bool,
    want_h: bool,
) -> Result:
    """carried: the states that enter `Packing.carried`."""
    rule, packing, run = plan.rule, plan.packing, plan.backend
    seeds = _of_sequences(plan, packing.beginning, initial)
    o, h, v_new, S_end = run.scan_output(
        rule,
        packing,
        chunks,
        join(seeds, carried),
        want_states=want_h or rule.keep_intermediates,
        want_end=want_final,
    )
    final = None
    if want_final:
        assert S_end is not None
        final = _per_sequence(plan, packing.ending, S_end, initial)
    saved = Saved(run.keep(rule, chunks, h, v_new), carried.value, maps.transition)
    if not want_h or h is None:
        return Result(o.to(x.v.dtype), final, None, saved)
    h = run.in_token_order(packing, h).to(x.v.dtype)
    h = h.mT.contiguous() if rule.state_v_first else h
    return Result(o.to(x.v.dtype), final, h, saved)


def forward(
    plan: Plan, x: Inputs, initial: Tensor | None, *, want_final: bool, want_h: bool
) -> Result:
    """One operator call. initial: [N, HV, K, V] ([V, K] with the rule's state_v_first) in the
    accumulator's dtype, or None."""
    if plan.ahead not in (None, plan.packing):
        alone = plan._replace(packing=plan.ahead, ahead=None)
        result = forward(alone, x, initial, want_final=want_final, want_h=want_h)
        return result._replace(saved=Saved(result.saved.kept, result.saved.carried[:0], None))
    chunks, maps = prepare_chunks(plan, x, initial)
    wait = carry_maps(plan, x, maps)
    chunks = plan.backend.scores(plan.rule, plan.packing, chunks)
    carried = wait() if plan.group is None else run_overlap(wait)
    return run_segments(
        plan, x, initial, chunks, maps, carried, want_final=want_final, want_h=want_h
    )


def carry_maps(
    plan: Plan, x: Inputs, maps: AffineMap, *, reverse: bool = False
) -> Callable[[], States]:
    """Starts the exchange; see `state.carry`."""
    like = x.v.new_empty(0, dtype=accumulator(x.v.dtype))
    return carry(
        maps,
        plan.packing,
        plan.links,
        plan.exchange,
        _shape(x),
        like,
        reverse=reverse,
        fold=plan.backend.fold,
    )


class Recomputed(NamedTuple):
    """What a backward forms again: the chunks, the gradients at the outputs, and a call that starts
    to form h and v_new and returns one that gives them."""

    chunks: Any
    dout: Any
    states: Callable[[], Callable[[], tuple[Tensor, Tensor]]]


def recompute_states(
    plan: Plan, initial: Tensor | None, saved: Saved, chunks: Any
) -> Callable[[], Callable[[], tuple[Tensor, Tensor]]]:
    """The forward's scan once more, when it is asked for."""
    packing = plan.packing

    def start() -> Callable[[], tuple[Tensor, Tensor]]:
        first = _of_sequences(plan, packing.beginning, initial)
        S0 = join(first, States(packing.carried, saved.carried))
        started: Callable[[], tuple[Tensor, Tensor]] = plan.backend.scan(packing, chunks, S0)
        return started

    return start


def recompute(
    plan: Plan, x: Inputs, initial: Tensor | None, saved: Saved, o: Tensor | None, do: Tensor
) -> Recomputed:
    chunks, h, v_new = plan.backend.restore(plan.rule, plan.packing, x, saved.kept, o)
    states = recompute_states(plan, initial, saved, chunks)
    if h is not None and v_new is not None:
        kept = h, v_new
        states = lambda: lambda: kept  # noqa: E731
    dout = plan.backend.output_bwd(plan.rule, plan.packing, chunks, do)
    return Recomputed(chunks, dout, states)


def adjoint_maps(
    plan: Plan,
    saved: Saved,
    recomputed: Recomputed,
    dfinal: Tensor | None,
    *,
    concurrent: bool = False,
) -> AffineMap:
    """Of this card's segments, in reverse; transitions are the forward's. together: the forward's
    states are formed meanwhile."""
    seeds = _of_sequences(plan, plan.packing.ending, dfinal)
    chunks, dout = recomputed.chunks, recomputed.dout
    offset = plan.backend.summarize_bwd(plan.packing, chunks, dout, seeds, concurrent=concurrent)
    return AffineMap(saved.transition, offset)


def run_segments_backward(
    plan: Plan,
    x: Inputs,
    recomputed: Recomputed,
    wait: Callable[[], States],
    dfinal: Tensor | None,
    *,
    want_dinitial: bool,
    concurrent: bool = True,
) -> tuple[Inputs, Tensor | None]:
    """wait: gives the gradients that leave `Packing.feeding`. The forward's states, which need
    none of them, are formed meanwhile. together: and while the reverse scan runs."""
    packing, run = plan.packing, plan.backend
    states = recomputed.states()
    seeds = _of_sequences(plan, packing.ending, dfinal)
    dS_end = join(seeds, wait())
    wanted = {"want_start": want_dinitial, "concurrent": concurrent}
    dscan, dS0 = run.scan_bwd(packing, recomputed.chunks, recomputed.dout, dS_end, **wanted)
    grads = run.intra_bwd(plan.rule, packing, x, recomputed.chunks, *states(), dscan)
    dinitial = None
    if want_dinitial:
        assert dS0 is not None
        dinitial = _per_sequence(plan, packing.beginning, dS0, dfinal)
    return grads, dinitial


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
    """Gradients of the inputs and of the initial states. dfinal: like the final states, equal on
    all ranks, as is the gradient returned. o: as the forward gave it, for a backend that reads
    it."""
    recomputed = recompute(plan, x, initial, saved, o, do)
    # beside the summary; but where an exchange follows, beside that and the reverse scan
    early = not plan.links.any and plan.backend.runs_concurrently(plan.packing, recomputed.chunks)
    if early:
        started = recomputed.states()
        recomputed = recomputed._replace(states=lambda: started)
    maps = adjoint_maps(plan, saved, recomputed, dfinal, concurrent=early)
    wait = carry_maps(plan, x, maps, reverse=True)
    # else the forward's scan is nearly done when the reverse one starts
    concurrent = not (early and plan.packing.largest.carried)
    grads = run_segments_backward(
        plan, x, recomputed, wait, dfinal, want_dinitial=want_dinitial, concurrent=concurrent
    )
    return grads
