"""torch.library ops with one output and a backward, for stages that are operators of their own."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor


def differentiable_op(
    name: str,
    arguments: str,
    run: Callable[..., Tensor],
    run_backward: Callable[..., list[Tensor]],
    tensors: int,
    dtype: torch.dtype | None = None,
) -> Any:
    """Makes the ops `fla_cp::<name>` and `fla_cp::<name>_backward`, and returns the first.

    arguments: their schema; the first `tensors` arguments have gradients. run(*arguments) returns a
    tensor with the shape of the first argument and with `dtype` (default: that argument's).
    run_backward(grad, *arguments) returns new tensors, the gradients of those arguments, in their
    shapes and dtypes: an empty one for an argument that is None.
    """
    op, backward = (
        torch.library.custom_op(f"fla_cp::{name}{end}", f, mutates_args=(), schema=schema)
        for end, f, schema in (
            ("", run, f"({arguments}) -> Tensor"),
            ("_backward", run_backward, f"(Tensor grad, {arguments}) -> Tensor[]"),
        )
    )

    @op.register_fake
    def _(x: Tensor, *rest: Any) -> Tensor:
        return torch.empty(x.shape, dtype=dtype or x.dtype, device=x.device)

    @backward.register_fake
    def _(grad: Tensor, *given: Any) -> list[Tensor]:
        return [
            grad.new_empty(0) if t is None else torch.empty(t.shape, dtype=t.dtype, device=t.device)
            for t in given[:tensors]
        ]

    def setup(ctx: Any, inputs: tuple, output: Tensor) -> None:
        ctx.save_for_backward(*inputs[:tensors])
        ctx.rest = inputs[tensors:]

    def gradients(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        saved = ctx.saved_tensors
        found = zip(backward(grad, *saved, *ctx.rest), saved, strict=True)
        return (*(None if t is None else d for d, t in found), *[None] * len(ctx.rest))

    op.register_autograd(gradients, setup_context=setup)
    return op
