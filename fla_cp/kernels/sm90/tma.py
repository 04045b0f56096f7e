"""Tensor descriptors for the TMA (tensor memory accelerator), and the barrier of a block."""

from __future__ import annotations

import functools
from typing import NamedTuple

import torch
from torch import Tensor
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language import NVMMASharedLayout
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

barrier = gl.barrier if hasattr(gl, "barrier") else gl.thread_barrier


class Kind(NamedTuple):
    """The facts of a descriptor that kernels are compiled for."""

    dtype: torch.dtype
    block: tuple[int, int]
    layout: NVMMASharedLayout


@functools.cache
def _kind(dtype: torch.dtype, rows: int, columns: int) -> Kind:
    single = dtype == torch.float32
    layout = NVMMASharedLayout(0 if single else 128, 32 if single else 16, 2)
    return Kind(dtype, (rows, columns), layout)


class Described(TensorDescriptor):
    """A descriptor that skips Triton's checks, which take longer than a small kernel. `fits` in
    eligible.py has checked the same."""

    def __init__(self, base: Tensor, shape: list[int], row: int, kind: Kind):
        self.base, self.shape, self.strides = base, shape, [row, 1]
        self.kind, self.block_shape, self.layout = kind, list(kind.block), kind.layout


def describe(x: Tensor, rows: int, columns: int) -> Described:
    """The descriptor of x as a matrix that is read in blocks of [rows, columns]. x [T, H, N]
    becomes [T, columns of all heads], a dense x [.., N] becomes [all rows, N]."""
    kind, N = _kind(x.dtype, rows, columns), x.shape[-1]
    if x.dim() != 3:
        return Described(x, [x.numel() // N, N], N, kind)
    row, head, _ = x.stride()
    return Described(x, [x.shape[0], (x.shape[1] - 1) * head + N], row, kind)
