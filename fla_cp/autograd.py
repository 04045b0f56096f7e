"""The autograd.Function of eager calls. It saves what the backward needs, and lets recorded
programs replay both directions (replay.py)."""

from typing import Any, NamedTuple

import torch
from torch import Tensor

from fla_cp import remat
from fla_cp.comm import run_overlap
from fla_cp.kernels.backend import Kept
from fla_cp.kernels.torch.intra import Inputs, Spec
from fla_cp.once_differentiable import once_differentiable
from fla_cp.pipeline import Plan, Saved, announcement, backward, forward
from fla_cp.program import Flat
from fla_cp.replay import Replayed, access_of_all


class Kind(NamedTuple):
    """A kind of call: its outputs besides o, and the recorded programs of each direction."""

    want_final: bool
    want_h: bool
    forward: Replayed
    backward: Replayed


def token_rows(x: Inputs) -> Inputs:
    """The inputs as the stages read them: [B*T, ..] instead of [B, T, ..], and A_log and dt_bias
    with one dim."""
    rates = x.A_log, x.dt_bias
    q, k, v, g, beta, p = (
        None if t is None else t.reshape(-1, *t.shape[2:])
        for t in (x.q, x.k, x.v, x.g, x.beta, x.p)
    )
    assert q is not None and k is not None and v is not None and g is not None
    A_log, dt_bias = (t if t is None or t.ndim == 1 else t.flatten() for t in rates)
    return Inputs(q, k, v, g, beta, A_log, dt_bias, p)


class DeltaRuleFunction(torch.autograd.Function):
    """(kind, plan, *Inputs, initial) -> o [B, T, HV, V], final or None, h or None.

    Inputs are [B, T, ..], as the caller has them. States are [.., V, K] with the rule's
    state_v_first. Under a context, the gradient of initial is equal on all ranks. The gradients of
    A_log and dt_bias are this rank's share, like those of any weight.
    """

    @staticmethod
    def forward(
        ctx: Any, kind: Kind, plan: Plan, *tensors: Tensor | None
    ) -> tuple[Tensor, Tensor | None, Tensor | None]:
        # A forward inside a backward recomputes a checkpointed call. The call's own backward
        # follows at once and would otherwise recompute the intermediates a second time.
        keeps = remat.in_backward() and not remat.active() and any(ctx.needs_input_grad)
        keeps = keeps and not plan.rule.keep_intermediates
        o, final, h, *saved = _kept_or_run(kind, plan, tensors, keeps, ctx.needs_input_grad)
        assert o is not None
        note = o.new_empty(0)
        if keeps:
            saved[2:] = _noted(note, plan, saved[2:])
        ctx.kind, ctx.plan, ctx.inputs = kind, plan, len(tensors) - 1
        ctx.save_for_backward(note, *tensors, o if plan.backend.reads_output else None, *saved)
        ctx.set_materialize_grads(False)
        if h is not None:
            ctx.mark_non_differentiable(h)
        return o, final, h

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, do: Tensor | None, dfinal: Tensor | None, _dh: Tensor | None) -> Flat:
        kind, plan, n = ctx.kind, ctx.plan, ctx.inputs
        note, *tensors = ctx.saved_tensors
        given = Inputs(*tensors[:n])
        intermediates = _intermediates(note)
        if intermediates is not None:
            plan, tensors[n + 4 :] = _keeping(plan), intermediates
        do = torch.zeros_like(given.v) if do is None else do
        want = tensors[n] is not None and ctx.needs_input_grad[-1]
        inputs = (*tensors, do, dfinal)

        def run() -> Flat:
            x, (initial, o, carried, transition, *kept) = token_rows(given), tensors[n:]
            o = None if o is None else o.flatten(0, 1)
            saved, dout = Saved(tuple(kept), carried, transition), do.flatten(0, 1)
            announced = announcement(plan, x, initial, with_backward=True, want_dinitial=want)
            with announced:
                grads, dinitial = backward(
                    plan, x, initial, saved, o, dout, dfinal, want_dinitial=want
                )
            both = zip(grads, given, strict=True)
            shaped = (None if d is None or t is None else d.view(t.shape) for d, t in both)
            return *shaped, dinitial

        kept = intermediates is not None
        # Hooks, such as those that offload, may return saved tensors with other strides.
        own = kept, want, *access_of_all(inputs)
        return (None, None, *kind.backward(plan, own, inputs, run))


def _kept_or_run(
    kind: Kind, plan: Plan, tensors: Flat, keeps: bool, needs: tuple[bool, ...]
) -> Flat:
    """o [B, T, HV, V], final, h, carried, transition and what the backend keeps. They are computed
    or, in the second run of a `remat.selective_checkpoint`, taken from the first run. keeps:
    whether to keep all intermediates. needs: which inputs of the Function need a gradient."""
    if not remat.active():
        return _run(kind, plan, tensors, keeps, needs)
    q, v = tensors[0], tensors[2]
    assert q is not None and v is not None
    shapes, initial = (tuple(q.shape), tuple(v.shape), q.dtype), tensors[-1] is not None
    call = ("operator", *shapes, plan.rule, initial, kind.want_final, kind.want_h)
    found = remat.kept(call)
    if found is None:
        found = _run(kind, plan, tensors, keeps, needs)
        remat.keep(call, found)
    elif plan.exchange.group is not None:
        # The work that was handed over runs where the first run did it, because the checkpoint
        # compares the order of saved tensors.
        run_overlap(lambda: None)
    return found


def _run(kind: Kind, plan: Plan, tensors: Flat, keeps: bool, needs: tuple[bool, ...]) -> Flat:
    """The forward, or a program that replays it. Arguments and results: see `_kept_or_run`."""
    given, initial = Inputs(*tensors[:-1]), tensors[-1]  # type: ignore[arg-type]
    plan = _keeping(plan) if keeps else plan

    def run() -> Flat:
        x = token_rows(given)
        wanted = {"want_final": kind.want_final, "want_h": kind.want_h}
        later = {"with_backward": any(needs), "want_dinitial": needs[-1]}
        announced = announcement(plan, x, initial, **wanted, **later)
        with announced:
            o, final, h, (kept, *rest) = forward(plan, x, initial, **wanted)
        # Detached, because autograd does not let the caller change a Function's view in place.
        return o.view(given.v.shape).detach(), final, h, *rest, *kept

    return kind.forward(plan, keeps, tensors, run)


# A non-reentrant checkpoint gives the tensors that the recomputation saves to the node of the first
# forward, so both must save equally many tensors of the same shapes. The intermediates therefore
# travel as an attribute on the storage of an empty tensor, the note, which is always saved. They
# live as long as the note. Hooks that copy saved tensors lose them; the backward then recomputes
# them.


def _keeping(plan: Plan) -> Plan:
    """The plan with all intermediates kept."""
    rule = plan.rule._replace(keep_intermediates=True)
    return plan._replace(spec=Spec(rule, plan.packing))


def _noted(note: Tensor, plan: Plan, kept: list[Tensor | None]) -> list[Tensor | None]:
    """Puts all of `kept` on the note. Returns the part of `kept` that a plan without intermediates
    keeps, in the order in which it keeps them."""
    note.untyped_storage().intermediates = tuple(kept)  # type: ignore[attr-defined]
    return [kept[i] for i in plan.backend.always_kept(plan.rule)]


def _intermediates(note: Tensor) -> Kept | None:
    """What `_noted` put on the note, if it is still there."""
    return getattr(note.untyped_storage(), "intermediates", None)
