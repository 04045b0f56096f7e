"""Products of affine maps, the numbers that travel between segments and ranks.

They are never formed in TF32, whatever `torch.set_float32_matmul_precision` allows elsewhere: a
state passes through as many of them as a sequence has segments.
"""

from __future__ import annotations

import torch
from torch import Tensor


def _reduced(x: Tensor) -> bool:
    """Whether a product of x would be formed in less than its own precision."""
    return (
        x.is_cuda
        and x.dtype == torch.float32
        and (torch.get_float32_matmul_precision() != "highest")
    )


def product(then: Tensor, first: Tensor) -> Tensor:
    """then @ first: transitions [.., K, K] of two runs of tokens, one after the other."""
    if _reduced(then):
        return (then.double() @ first.double()).to(then.dtype)
    return then @ first


def leave(transition: Tensor | None, offset: Tensor, state: Tensor | None) -> Tensor:
    """transition @ state + offset, [.., K, V]: the state after a run of tokens.

    Without a transition, or without a state that enters, the offset.
    """
    if transition is None or state is None:
        return offset
    return offset + product(transition, state)
