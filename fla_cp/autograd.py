"""The autograd.Function of eager calls: what the forward saves for the backward."""

from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from fla_cp.kernels.torch.intra import Inputs
from fla_cp.pipeline import Plan, Saved, backward, forward


def without_autocast(device_type: str) -> AbstractContextManager[Any]:
    """Turns autocast off if it is on. Entering the context without need would take 10 us."""
    if torch.is_autocast_enabled(device_type):
        return torch.autocast(device_type, enabled=False)
    return nullcontext()


class DeltaRuleFunction(torch.autograd.Function):
    """(plan, want_final, want_h, *Inputs, initial) -> o, final or None, h or None.

    Tensors are packed as in `Inputs`. States are [.., V, K] with the rule's state_v_first. Under a
    context, the gradient of initial is equal on all ranks, and A_log and dt_bias get this rank's
    share of their gradients, like any weight.
    """

    @staticmethod
    def forward(
        ctx: Any, plan: Plan, want_final: bool, want_h: bool, *tensors: Tensor | None
    ) -> tuple[Tensor, Tensor | None, Tensor | None]:
        x, initial = Inputs(*tensors[:-1]), tensors[-1]  # type: ignore[arg-type]
        with without_autocast(x.q.device.type):
            result = forward(plan, x, initial, want_final=want_final, want_h=want_h)
        ctx.plan, ctx.inputs, ctx.kept = plan, len(x), len(result.saved.kept)
        o = result.o if plan.backend.reads_output else None
        ctx.save_for_backward(*x, initial, o, *result.saved.kept, *result.saved[1:])
        ctx.set_materialize_grads(False)
        if result.h is not None:
            ctx.mark_non_differentiable(result.h)
        return result.o, result.final, result.h

    @staticmethod
    @once_differentiable
    def backward(
        ctx: Any, do: Tensor | None, dfinal: Tensor | None, _dh: Tensor | None
    ) -> tuple[Tensor | None, ...]:
        tensors = ctx.saved_tensors
        x, (initial, o, *rest) = Inputs(*tensors[: ctx.inputs]), tensors[ctx.inputs :]
        saved = Saved(tuple(rest[: ctx.kept]), *rest[ctx.kept :])
        do = torch.zeros_like(x.v) if do is None else do
        want = initial is not None and ctx.needs_input_grad[-1]
        with without_autocast(x.q.device.type):
            given = ctx.plan, x, initial, saved, o, do, dfinal
            grads, dinitial = backward(*given, want_dinitial=want)
        return (None, None, None, *grads, dinitial)
