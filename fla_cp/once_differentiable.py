"""Gradients that have no gradient of their own, and say so.

torch's decorator of this name refuses a second derivative only if the gradient that a backward was
given requires one. The gradient of a plain sum is a constant, so a penalty on the gradients of an
operator would silently have no effect.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.autograd import function


class _NoSecond(torch.autograd.Function):
    """Returns its tensors, which cannot be differentiated."""

    @staticmethod
    def forward(ctx: Any, *grads: Tensor | None) -> tuple[Tensor | None, ...]:
        return tuple(None if g is None else g.view_as(g) for g in grads)

    @staticmethod
    def backward(ctx: Any, *_: Tensor | None) -> Any:
        raise RuntimeError(
            "fla_cp has no second derivatives: a gradient that passed through its operators, "
            "layers or losses cannot be differentiated again (create_graph=True)"
        )


def once_differentiable(backward: Callable[..., Any]) -> Callable[..., Any]:
    """For the `backward` of an autograd.Function whose gradients cannot be differentiated: who does
    so nevertheless gets a RuntimeError."""
    plain = function.once_differentiable(backward)

    @functools.wraps(backward)
    def run(ctx: Any, *grads: Tensor | None) -> Any:
        if not torch.is_grad_enabled():  # no second derivative is asked for
            return backward(ctx, *grads)
        found = plain(ctx, *grads)
        if torch.compiler.is_compiling():
            return found
        several = isinstance(found, tuple)
        tensors = found if several else (found,)
        once = (g if g is None else g.detach().requires_grad_() for g in tensors)
        refused = _NoSecond.apply(*once)
        return refused if several else refused[0]

    return run
