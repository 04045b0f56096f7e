"""One operator call as a sequence of stages, on one GPU or many. The backward mirrors the forward.

    gate, intra -> summarize -> [exchange] -> scan -> output

`summarize` forms the affine map of each segment, the exchange gives each segment the state that
enters it, and `scan` and `output` run the segments from these states. Without context parallelism,
and if no sequence is cut into segments, nothing is summarized or sent.
"""

from __future__ import annotations

import functools
import weakref
from collections.abc import Callable, Hashable
from functools import cached_property
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from fla_cp.comm import Exchange, Links, collectives
from fla_cp.comm.carry import AffineMap, States, carry, join
from fla_cp.comm.exchange.base import Unsent
from fla_cp.kernels.backend import Backend, ChunkStates, Kept
from fla_cp.kernels.rehearsal import announced, on_meta
from fla_cp.kernels.torch.intra import Inputs, Spec
from fla_cp.partition.packing import Frame, Packing
from fla_cp.rule import DeltaRule, accumulator
from fla_cp.tape import step


class PlanKey:
    """Tells which plans do the same work. If two calls of one kind have plans with equal keys, one
    recorded program serves both (replay.py). The hash is computed once, since every call needs it.
    """

    def __init__(self, *parts: Hashable) -> None:
        self._parts = parts

    @classmethod
    def of(cls, packing: Packing, links: Links, exchange: Exchange) -> PlanKey:
        """The key of a plan. For a packing with a frame, sizes decide, who owns which slot, and
        whether anything is sent, with or without transitions. Without a frame, the whole packing
        and the links decide. A key does not keep the group alive."""
        where = packing.tokens, packing.ranges
        if packing.frame is not None:
            return cls.framed(*where, packing.frame, links, exchange)
        exact = packing.sequences, packing.segments, packing.empty, packing.loads, packing.chunk
        return cls(*where, cls._scheme(exchange), *exact, links)

    @classmethod
    def framed(
        cls, tokens: int, ranges: int, frame: Frame, links: Links, exchange: Exchange
    ) -> PlanKey:
        """The key of all packings that have this frame and that many tokens and ranges on the
        rank."""
        where, sent = (tokens, ranges, cls._scheme(exchange), frame), (links.any, links.any_through)
        return cls(*where, links.owner, links.row, links.slots_per_rank, links.fixed, *sent)

    @staticmethod
    def _scheme(exchange: Exchange) -> Hashable:
        group: Any = exchange.group
        return type(exchange), None if group is None else weakref.ref(group)

    @cached_property
    def _hash(self) -> int:
        return hash(self._parts)

    def __hash__(self) -> int:
        return self._hash

    def __eq__(self, other: object) -> bool:
        return self is other or (isinstance(other, PlanKey) and self._parts == other._parts)


class Plan(NamedTuple):
    """What one operator call does: the computation and its tokens (spec), the kernels (backend),
    and the other ranks that take part (links, exchange).

    ahead: the packing of the forward. If no state crosses ranks, the forward may cut sequences
        that the backward leaves whole. None: it is the packing of the backward.
    key: see `PlanKey`.
    """

    spec: Spec
    links: Links
    exchange: Exchange
    backend: Backend
    ahead: Packing | None = None
    key: PlanKey | None = None

    @property
    def rule(self) -> DeltaRule:
        return self.spec.rule

    @property
    def packing(self) -> Packing:
        return self.spec.packing

    @property
    def objects(self) -> dict[str, object]:
        """The parts of a plan that a recorded program looks up again in each call, by the Python
        expressions with which it finds them."""
        found: dict[str, object] = {
            "plan.packing": self.packing,
            "plan.links": self.links,
            "plan.links.mirrored()": self.links.mirrored(),
            "plan.exchange": self.exchange,
        }
        if self.exchange.group is not None:
            found["plan.exchange.group"] = self.exchange.group
        return found if self.ahead is None else {"plan.ahead": self.ahead, **found}


class Saved(NamedTuple):
    """What a backward needs besides the inputs. kept: the backend's own tensors. carried: the
    states that enter the segments of `Packing.carried`. transition: the transitions of the
    segments' maps. Transposed, they are the transitions of the adjoint maps."""

    kept: Kept
    carried: Tensor
    transition: Tensor | None


class Result(NamedTuple):
    """What a forward returns.

    o: [T, HV, V] in v's dtype. final: the states after each sequence, [N, HV, K, V], fp32 (fp64 for
    fp64 inputs). h: the states at the start of each chunk, in token order, [NC, HV, K, V] in v's
    dtype. final and h are None unless wanted, and [.., V, K] with the rule's state_v_first.
    """

    o: Tensor
    final: Tensor | None
    h: Tensor | None
    saved: Saved


def _from_sequences(spec: Spec, segments: tuple[int, ...], states: Tensor | None) -> States | None:
    """The states [E, HV, K, V] of these segments, each copied from its sequence's row of the
    caller's states [N, ..]. None if the caller gave none."""
    if states is None:
        return None
    rule, packing = spec
    rows = packing.index([packing.segments[i].sequence for i in segments], states.device)
    value = states[rows]
    return States(segments, value.mT if rule.state_v_first else value)


def _to_sequences(
    plan: Plan, segments: tuple[int, ...], states: Tensor, empty: Tensor | None
) -> Tensor:
    """The states of these segments as rows of their sequences: [N, ..] in the caller's layout,
    equal on all ranks. states [S, HV, K, V]: those of all segments of this GPU. empty [N, ..]: has
    the rows of sequences without tokens."""
    (rule, packing), group, device = plan.spec, plan.exchange.group, states.device
    if rule.state_v_first:
        states = states.mT
    out = states.new_zeros(packing.sequences, *states.shape[1:])
    rows = packing.index([packing.segments[i].sequence for i in segments], device)
    out[rows] = states[packing.index(segments, device)]
    if empty is not None and packing.empty:
        rows = packing.index(packing.empty, device)
        out[rows] = empty[rows].to(out.dtype)
    # Every row is nonzero on one rank only, so the sum copies it to all ranks.
    return out if group is None else step(_sum_over_ranks, out, plan.exchange)


def _sum_over_ranks(x: Tensor, exchange: Exchange) -> Tensor:
    assert exchange.group is not None
    return collectives.all_reduce(x, exchange.group)


def prepare_chunks(plan: Plan, x: Inputs, initial: Tensor | None) -> tuple[Any, AffineMap]:
    """Computes what is local to each chunk, and the maps of this GPU's segments. Neither needs a
    state from another segment."""
    seeds = _from_sequences(plan.spec, plan.spec.packing.beginning, initial)
    return plan.backend.prepare_chunks(plan.spec, x, seeds)


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
    """Runs each segment from the state that enters it. initial: the states of segments that begin
    a sequence. carried: those of the segments of `Packing.carried`."""
    spec, run = plan.spec, plan.backend
    rule, packing = spec
    S0 = join(_from_sequences(spec, packing.beginning, initial), carried)
    states = want_h or rule.keep_intermediates
    o, h, v_new, S_end = run.scan_output(spec, chunks, S0, want_states=states, want_end=want_final)
    final = None
    if want_final:
        assert S_end is not None
        final = _to_sequences(plan, packing.ending, S_end, initial)
    saved = Saved(run.keep(spec, chunks, h, v_new), carried.value, maps.transition)
    if not want_h or h is None:
        return Result(o.to(x.v.dtype), final, None, saved)
    h = run.in_token_order(spec, h).to(x.v.dtype)
    h = h.mT.contiguous() if rule.state_v_first else h
    return Result(o.to(x.v.dtype), final, h, saved)


def forward(
    plan: Plan, x: Inputs, initial: Tensor | None, *, want_final: bool, want_h: bool
) -> Result:
    """The forward of one call. x: the inputs of this rank's T tokens. initial: [N, HV, K, V]
    ([V, K] with the rule's state_v_first) in the accumulator's dtype, or None."""
    rule, packing = plan.spec
    wanted = {"want_final": want_final, "want_h": want_h}
    if plan.ahead not in (None, packing):
        # The backward's packing is not cut, so its segments have neither states nor transitions.
        alone = plan._replace(spec=Spec(rule, plan.ahead), ahead=None)
        result = forward(alone, x, initial, **wanted)
        return result._replace(saved=Saved(result.saved.kept, result.saved.carried[:0], None))
    chunks, maps = prepare_chunks(plan, x, initial)
    wait = carry_maps(plan, x, maps)
    chunks = plan.backend.scores(plan.spec, chunks)
    carried = wait(overlap=plan.exchange.group is not None)
    return run_segments(plan, x, initial, chunks, maps, carried, **wanted)


def carry_maps(
    plan: Plan, x: Inputs, maps: AffineMap, *, reverse: bool = False
) -> Callable[..., States]:
    """Starts to carry states across segments and ranks. Returns a function that waits for the
    states that enter the segments; see `fla_cp.comm.carry.carry`."""
    shape, fold = (x.v.shape[1], x.q.shape[-1], x.v.shape[-1]), plan.backend.fold
    like = x.v.new_empty(0, dtype=accumulator(x.v.dtype))
    packing, links, exchange = plan.spec.packing, plan.links, plan.exchange
    return carry(maps, packing, links, exchange, shape, like, reverse=reverse, fold=fold)


class StatesAgain:
    """The states h and values v_new of the forward's chunks, in a backward. They are recomputed,
    beside other work where the backend can, unless the forward has kept them.

    scan: starts to recompute them and returns a function that waits for them. kept: what the
    forward kept.
    """

    def __init__(
        self, scan: Callable[[], Callable[[], ChunkStates]], kept: ChunkStates | None = None
    ) -> None:
        self._scan, self._kept = scan, kept
        self._wait: Callable[[], ChunkStates] | None = None

    def start(self) -> None:
        """Starts to recompute them, if this has not begun."""
        if self._kept is None and self._wait is None:
            self._wait = self._scan()

    def wait(self) -> ChunkStates:
        """h and v_new, after `start`."""
        if self._kept is not None:
            return self._kept
        assert self._wait is not None, "`start` comes first"
        return self._wait()


class Recomputed(NamedTuple):
    """What a backward recomputes: the chunks, the gradients at the outputs, and the states."""

    chunks: Any
    dout: Any
    states: StatesAgain


def states_again(
    plan: Plan, initial: Tensor | None, saved: Saved, chunks: Any, kept: ChunkStates | None = None
) -> StatesAgain:
    """The states of a backward, which start from those that enter the segments."""
    spec, packing = plan.spec, plan.spec.packing

    def scan() -> Callable[[], ChunkStates]:
        first = _from_sequences(spec, packing.beginning, initial)
        S0 = join(first, States(packing.carried, saved.carried))
        return plan.backend.scan(spec, chunks, S0)

    return StatesAgain(scan, kept)


def recompute(
    plan: Plan, x: Inputs, initial: Tensor | None, saved: Saved, o: Tensor | None, do: Tensor
) -> Recomputed:
    """Recomputes what the forward did not keep. o [T, HV, V]: the forward's output, for a backend
    that reads it; otherwise None."""
    chunks, kept = plan.backend.restore(plan.spec, x, saved.kept, o)
    states = states_again(plan, initial, saved, chunks, kept)
    return Recomputed(chunks, plan.backend.output_bwd(plan.spec, chunks, do), states)


def adjoint_maps(
    plan: Plan, saved: Saved, values: Recomputed, dfinal: Tensor | None, *, concurrent: bool = False
) -> AffineMap:
    """The adjoint maps of this GPU's segments. Their transitions are still those of the forward;
    the fold transposes them. concurrent: the forward's states are recomputed at the same time."""
    seeds = _from_sequences(plan.spec, plan.spec.packing.ending, dfinal)
    offset = plan.backend.summarize_bwd(plan.spec, values.dout, seeds, concurrent=concurrent)
    return AffineMap(saved.transition, offset)


def run_segments_backward(
    plan: Plan,
    x: Inputs,
    values: Recomputed,
    wait: Callable[[], States],
    dfinal: Tensor | None,
    *,
    want_dinitial: bool,
    concurrent: bool = True,
) -> tuple[Inputs, Tensor | None]:
    """The gradients of the inputs and, with want_dinitial, of the initial states.

    wait: waits for the gradients of the states that leave the segments of `Packing.feeding`. The
    forward's states do not depend on these gradients, so they are recomputed during the wait and,
    with `concurrent`, also during the reverse scan.
    """
    spec, run = plan.spec, plan.backend
    chunks, dout, states = values
    states.start()
    dS_end = join(_from_sequences(spec, spec.packing.ending, dfinal), wait())
    wanted = {"want_start": want_dinitial, "concurrent": concurrent}
    dscan, dS0 = run.scan_bwd(spec, x, dout, dS_end, **wanted)
    grads = run.intra_bwd(spec, x, chunks, states.wait(), dscan)
    if not want_dinitial:
        return grads, None
    assert dS0 is not None
    return grads, _to_sequences(plan, spec.packing.beginning, dS0, dfinal)


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
    """The gradients of the inputs and, with want_dinitial, of the initial states.

    do [T, HV, V]: the gradient of o. dfinal: that of the final states, or None. Like the states
    themselves, dfinal and the gradient of the initial states are equal on all ranks. o: see
    `recompute`.
    """
    recomputed = recompute(plan, x, initial, saved, o, do)
    # The states are recomputed during the summary or, if an exchange follows, during the exchange
    # and the reverse scan.
    early = not plan.links.any and plan.backend.runs_concurrently(plan.spec, recomputed.chunks)
    if early:
        recomputed.states.start()
    maps = adjoint_maps(plan, saved, recomputed, dfinal, concurrent=early)
    wait = carry_maps(plan, x, maps, reverse=True)
    # States that were recomputed during a summary are nearly done when the reverse scan starts.
    concurrent = not (early and plan.spec.packing.largest.carried)
    return run_segments_backward(
        plan, x, recomputed, wait, dfinal, want_dinitial=want_dinitial, concurrent=concurrent
    )


def announcement(
    plan: Plan,
    x: Inputs,
    initial: Tensor | None,
    *,
    want_final: bool = False,
    want_h: bool = False,
    with_backward: bool,
    want_dinitial: bool = False,
) -> announced:
    """Announces this call, and with `with_backward` its backward too, to a backend that compiles
    kernels. The backend can then compile all of them side by side (kernels/rehearsal.py)."""
    if not plan.backend.compiles:
        return announced(None)
    wanted = want_final, want_h, want_dinitial
    return announced(functools.partial(_rehearse, plan, x, initial, wanted, with_backward))


def _rehearse(
    plan: Plan,
    x: Inputs,
    initial: Tensor | None,
    wanted: tuple[bool, bool, bool],
    with_backward: bool,
) -> None:
    """Runs a call on tensors without memory, and sends nothing."""
    group, want_final = plan.exchange.group, wanted[0]
    exchange = Unsent(rank=0 if group is None else dist.get_rank(group))
    backend = plan.backend.rehearsing(x.q.device)
    plan = plan._replace(backend=backend, exchange=exchange)
    x = Inputs(*(None if t is None else on_meta(t) for t in x))  # type: ignore[arg-type]
    initial = None if initial is None else on_meta(initial)
    _run_both(plan, x, initial, wanted, with_backward)
    if group is None and initial is None and not want_final:
        _run_both(*_of_other_length(plan, x), None, wanted, with_backward)


OTHER_LENGTHS = 8192, 65536
"""Two lengths in tokens: with many heads, a sequence of the first is left whole, and one of the
second is cut into segments."""


def _of_other_length(plan: Plan, x: Inputs) -> tuple[Plan, Inputs]:
    """A call of the same kind on one sequence: a long one, which is cut into segments, if the plan
    cuts none, and otherwise a shorter one. Rehearsing it finds the kernels that a later call of
    another length would have to compile. x: tensors without memory."""
    cut = bool(plan.packing.carried) or (plan.ahead is not None and bool(plan.ahead.carried))
    (HV, V), K, tokens = x.v.shape[1:], x.q.shape[-1], OTHER_LENGTHS[not cut]
    whole, shape = Packing.build((0, tokens)), (HV, K, V, x.q.device)
    packing = plan.backend.segment(whole, *shape, True)
    ahead = plan.backend.segment(whole, *shape, False) if packing is whole else packing
    plan = plan._replace(spec=Spec(plan.rule, packing), ahead=ahead)
    q, k, v, g, beta, A_log, dt_bias, p = (
        t if t is None or t.ndim == 1 else t.new_empty(tokens, *t.shape[1:]) for t in x
    )
    assert q is not None and k is not None and v is not None and g is not None
    return plan, Inputs(q, k, v, g, beta, A_log, dt_bias, p)


def _run_both(
    plan: Plan,
    x: Inputs,
    initial: Tensor | None,
    wanted: tuple[bool, bool, bool],
    with_backward: bool,
) -> None:
    """Runs a forward and, with `with_backward`, its backward."""
    want_final, want_h, want_dinitial = wanted
    with torch.no_grad():
        found = forward(plan, x, initial, want_final=want_final, want_h=want_h)
        if with_backward:
            o = found.o if plan.backend.reads_output else None
            given = plan, x, initial, found.saved, o, torch.empty_like(found.o), None
            backward(*given, want_dinitial=want_dinitial)
