"""cuDNN's softmax attention, as PyTorch comes with it, for the queries and keys of one sequence.

On a Hopper GPU it takes about half of FlashAttention-2's time. Its form for sequences of different
lengths is many times slower, and for each pair of lengths cuDNN makes a plan, which takes the host
0.05 to 0.1 s in each direction. `fla_cp.kernels.torch.attention_parts` says what it is given.
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
"""The compute capability of the GPUs on which it was measured."""

LARGEST = 2**31
"""Queries or keys with this many elements in all query heads, or more, stay with flash attention:
cuDNN was not tried with them."""

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
        and max(len(x) * q.shape[1] * max(q.shape[2], v.shape[2]) for x in (q, k)) < LARGEST
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
    said = str(error).lower()
    fault = "cuda error" in said or "execution_failed" in said or "cudnn" not in said
    if fault or isinstance(error, torch.OutOfMemoryError):
        raise error
    kind, line = _kind(q, k, v), str(error).splitlines()[0]
    _refused.add(kind)
    lengths = len(q), len(k)
    text = "flash attention computes heads that cuDNN refuses, %s with lengths %s: %s"
    _log.warning(text, kind, lengths, line)


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
    unread = torch.empty((), dtype=torch.int64, device=q.device)  # dropout's state
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
    """[T, H, D] -> [1, H, T, D] of contiguous rows, a view if x has them and begins where a kernel
    can load 16 bytes at once. PyTorch keeps plans without the strides of do and o, on which they
    depend, so that others would be read as if they had those of the first call."""
    rows = x.contiguous() if x.storage_offset() % 8 == 0 else x.clone()
    return rows.contiguous().transpose(0, 1)[None]
