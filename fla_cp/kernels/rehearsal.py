"""The call that is running, for backends that compile its kernels before they launch the first.

An operator announces how its call can be rehearsed: run on tensors without memory. A backend whose
first launch has to compile rehearses the call, so that it learns of the other kernels in time and
compiles all of them side by side (`fla_cp.kernels.triton.compiling`)."""

from __future__ import annotations

import threading
from collections.abc import Callable

import torch
from torch import Tensor


class _Current(threading.local):
    call: Callable[[], object] | None = None


_current = _Current()


class announced:
    """In the block, `call` rehearses what this thread runs; None: nothing does."""

    __slots__ = ("before", "call")

    def __init__(self, call: Callable[[], object] | None) -> None:
        self.call = call

    def __enter__(self) -> None:
        self.before, _current.call = _current.call, self.call

    def __exit__(self, *error: object) -> None:
        _current.call = self.before


def take() -> Callable[[], object] | None:
    """The call that this thread announced, once: after that there is none until the next one."""
    call, _current.call = _current.call, None
    return call


def on_meta(x: Tensor) -> Tensor:
    """A tensor on the device "meta", which has no memory, with the shape, strides and dtype of x
    and as well aligned to 16 bytes."""
    offset = x.data_ptr() % 16 // x.element_size()
    reach = sum((n - 1) * s for n, s in zip(x.shape, x.stride(), strict=True)) + 1
    memory = torch.empty(offset + max(reach, 1), dtype=x.dtype, device="meta")
    return memory.as_strided(x.shape, x.stride(), offset)
