"""Kernels, with a folder for each backend, and the choice of a call's backend."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Literal

from torch import compiler, cuda, float64, version
from torch import device as Device
from torch import dtype as Dtype

from fla_cp.arguments import check_choice
from fla_cp.comm import GraphClock
from fla_cp.kernels.backend import Backend
from fla_cp.kernels.torch.backend import TORCH

__all__ = [
    "FAST_WIDTH",
    "TORCH",
    "Backend",
    "Impl",
    "fast_width",
    "graph_clock",
    "resolve",
    "using",
]

# `import torch` here would be hidden by the folder of that name beside this file.
Impl = Literal["auto", "torch", "triton"]

FAST_WIDTH = 128
"""K and V for which there are kernels for a generation of GPUs (triton/generations.py)."""

_replaced: dict[str, Backend] = {}


@contextmanager
def using(backend: Backend) -> Iterator[None]:
    """Inside, `backend` replaces the one of its name, in all threads: for tests and measurements,
    which run public calls on a variant of a backend, with other tiles for example."""
    before = _replaced.get(backend.name)
    _replaced[backend.name] = backend
    try:
        yield
    finally:
        if before is None:
            del _replaced[backend.name]
        else:
            _replaced[backend.name] = before


def resolve(impl: str, device: Device, dtype: Dtype) -> Backend:
    """The backend for `impl`; "auto" takes the fastest that this version has for the device and
    dtype: Triton on CUDA, but torch for fp64, which only torch computes.

    Raises ValueError for an unknown name, and for a backend that is not installed or cannot run the
    input: an explicit choice is never replaced by another. Kernels start on the current GPU, so
    that tensors of another one are refused, too.
    """
    check_choice("impl", impl, ("auto", "torch", "triton"))
    if impl == "auto":
        impl = "triton" if device.type == "cuda" and dtype != float64 else "torch"
    if impl in _replaced:
        return _replaced[impl]
    if impl == "torch":
        return TORCH
    if dtype == float64:
        raise ValueError(f"impl='triton' computes bf16, fp16 and fp32, got {dtype}")
    if device.type != "cuda" and os.environ.get("TRITON_INTERPRET") != "1":
        raise ValueError(f"impl='triton' runs on CUDA devices, got {device}; pass impl='torch'")
    if device.type == "cuda" and not compiler.is_compiling():
        check_current(device)
    try:
        from fla_cp.kernels.triton.backend import TRITON
    except ImportError as error:
        raise ValueError(
            f"impl='triton' on {device} needs Triton >= 3.6 ({error}); pass impl='torch' for the "
            "slow PyTorch stages"
        ) from error
    return TRITON


def check_current(device: Device) -> None:
    """Raises ValueError if `device` is not the current GPU."""
    index: int | None = device.index  # None stands for the current GPU
    if index is None or not cuda.is_initialized():
        return
    current = cuda.current_device()
    if current != index:
        raise ValueError(
            f"impl='triton' runs on the current GPU, cuda:{current}, got tensors on {device}; call "
            f"torch.cuda.set_device({index}) in this process, or put the call into `with "
            f"torch.cuda.device({index}):`"
        )


def graph_clock(device: Device) -> GraphClock | None:
    """What reads the clock of a GPU inside CUDA graphs; None where that needs Triton, and Triton is
    missing or does not compile for the GPU: AMD's, and NVIDIA's before Ampere."""
    if device.type != "cuda" or version.hip or cuda.get_device_capability(device) < (8, 0):
        return None
    try:
        from fla_cp.kernels.triton.clock import CLOCK
    except ImportError:
        return None
    return CLOCK


def fast_width(backend: Backend, dtype: Dtype) -> int | None:
    """K and V for which the stages with one decay a head are so fast that it pays to split wider
    heads, where that is possible (ops/wide_heads.py); None if there are none."""
    if not backend.compiles:
        return None
    from fla_cp.kernels.triton.backend import TritonBackend
    from fla_cp.kernels.triton.generations import GENERATIONS

    assert isinstance(backend, TritonBackend)
    return FAST_WIDTH if any(g.possible(backend.tuning, dtype) for g in GENERATIONS) else None
