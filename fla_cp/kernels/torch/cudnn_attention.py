"""cuDNN's softmax attention, as PyTorch comes with it, for the queries and keys of one sequence.

On a Hopper GPU it takes about half of FlashAttention-2's time. It has no form for sequences of
different lengths that would be as fast, and for each pair of lengths cuDNN plans once, which takes
the host 0.1 s. `fla_cp.kernels.torch.attention_parts` says which lengths it is given.
"""

from __future__ import annotations

import functools
import logging
from typing import Any

import torch
from torch import Tensor
from torch.nn import attention

from fla_cp.kernels.torch.attended import Attended

CAPABILITY = (9, 0)
"""The GPUs on which it has been measured."""

LARGEST = 2**31
"""Tensors with this many elements stay with flash attention: cuDNN was not tried with them."""

_log = logging.getLogger(__name__)
_refused: set[tuple[Any, ...]] = set()


def runs(q: Tensor, k: Tensor, v: Tensor) -> bool:
    """Whether cuDNN computes the attention of q [.., H, K], k [.., HK, K] and v [.., HK, V], which
    flash attention could compute, too.

    It does not if `torch.backends.cuda.enable_cudnn_sdp(False)` was called, if another flash
    attention was activated, or if algorithms must be deterministic.
    """
    active = getattr(attention, "current_flash_attention_impl", lambda: None)
    return (
        q.is_cuda
        and torch.backends.cuda.cudnn_sdp_enabled()
        and _capability(q.device) == CAPABILITY
        and q.shape[-1] % 8 == v.shape[-1] % 8 == 0
        and max(x.numel() for x in (q, k, v)) < LARGEST
        and not torch.are_deterministic_algorithms_enabled()
        and active() is None
    )


@functools.cache
def _capability(device: torch.device) -> tuple[int, int]:
    return torch.cuda.get_device_capability(device)


def _kind(q: Tensor, k: Tensor, v: Tensor) -> tuple[Any, ...]:
    return q.dtype, q.shape[1], k.shape[1], q.shape[2], v.shape[2]


def _refuse(q: Tensor, k: Tensor, v: Tensor, error: RuntimeError) -> None:
    """Notes that cuDNN has no kernel for such heads, so that it is not asked again. Raises `error`
    if it says something else."""
    if isinstance(error, torch.OutOfMemoryError) or "cudnn" not in str(error).lower():
        raise error
    kind, said = _kind(q, k, v), str(error).splitlines()[0]
    _refused.add(kind)
    _log.warning("flash attention computes heads that cuDNN refuses, %s: %s", kind, said)


def forward(q: Tensor, k: Tensor, v: Tensor, causal: bool, scale: float) -> Attended | None:
    """q [n, H, K], k [m, HK, K], v [m, HK, V]. causal: query i attends to the keys up to i, and n
    equals m; otherwise queries attend to all keys. None if cuDNN has no kernel for such heads."""
    if _kind(q, k, v) in _refused:
        return None
    try:
        o, lse, *_ = torch.ops.aten._scaled_dot_product_cudnn_attention(
            *map(_heads_first, (q, k, v)), None, True, 0.0, causal, scale=scale
        )
    except RuntimeError as error:
        _refuse(q, k, v, error)
        return None
    return Attended(o[0].transpose(0, 1), lse.reshape(q.shape[1], len(q)))


def backward(
    do: Tensor, q: Tensor, k: Tensor, v: Tensor, found: Attended, causal: bool, scale: float
) -> tuple[Tensor, Tensor, Tensor] | None:
    """The gradients of q, k and v through these keys. found: over all keys of the queries. None if
    cuDNN has no kernel for such heads."""
    if _kind(q, k, v) in _refused:
        return None
    unread = torch.empty((), dtype=torch.int64, device=q.device)  # the state of a dropout
    try:
        grads = torch.ops.aten._scaled_dot_product_cudnn_attention_backward(
            *map(_heads_first, (do, q, k, v, found.o)),
            found.lse.contiguous()[None, ..., None],
            unread,
            unread,
            None,
            None,
            None,
            len(q),
            len(k),
            0.0,
            causal,
            scale=scale,
        )
    except RuntimeError as error:
        _refuse(q, k, v, error)
        return None
    dq, dk, dv = (x[0].transpose(0, 1) for x in grads)
    return dq, dk, dv


def _heads_first(x: Tensor) -> Tensor:
    """[T, H, D] -> [1, H, T, D], a view; rows are copied if a kernel cannot load 16 bytes of
    them at once."""
    if x.stride(-1) != 1 or any(n % 8 for n in (x.storage_offset(), *x.stride()[:-1])):
        x = x.clone(memory_format=torch.contiguous_format)
    return x.transpose(0, 1)[None]
