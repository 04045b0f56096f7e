"""The gated norm of a layer's output, as a differentiable function of a backend's stages for the
forward and the backward."""

from functools import partial
from typing import Any

import torch
from torch import Tensor

from fla_cp.kernels import Backend
from fla_cp.kernels.rehearsal import announced, on_meta
from fla_cp.once_differentiable import once_differentiable


def gated_norm(
    backend: Backend, x: Tensor, gate: Tensor, weight: Tensor, eps: float, activation: str
) -> Tensor:
    """x / rms(x) * weight * activation(gate), see `Backend.gated_norm`; x and gate [.., H, V]."""
    y: Tensor = _GatedNorm.apply(backend, x, gate, weight, eps, activation)
    return y


def norm_announced(backend: Backend, *given: Any, with_backward: bool) -> announced:
    """Announces the norm and its backward to a backend that compiles kernels, so that it can
    compile both at once (kernels/rehearsal.py)."""
    announce = backend.compiles and with_backward
    return announced(partial(_rehearse, backend, *given) if announce else None)


def _rehearse(
    backend: Backend, x: Tensor, gate: Tensor, weight: Tensor, eps: float, activation: str
) -> None:
    given = on_meta(x), on_meta(gate), on_meta(weight), eps, activation
    backend.gated_norm_bwd(*given, backend.gated_norm(*given))


class _GatedNorm(torch.autograd.Function):
    """(backend, x, gate, weight, eps, activation) -> y"""

    @staticmethod
    def forward(ctx: Any, backend: Backend, *given: Any) -> Tensor:
        ctx.save_for_backward(*given[:3])
        ctx.backend, ctx.options = backend, given[3:]
        with norm_announced(backend, *given, with_backward=any(ctx.needs_input_grad)):
            return backend.gated_norm(*given)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor | None, ...]:
        grads = ctx.backend.gated_norm_bwd(*ctx.saved_tensors, *ctx.options, dy)
        return None, *grads, None, None
