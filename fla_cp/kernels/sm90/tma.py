"""Descriptions of tensors for the tensor memory accelerator (TMA), and its barriers."""

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
    """What kernels are compiled for of a descriptor."""

    dtype: torch.dtype
    block: tuple[int, int]
    layout: NVMMASharedLayout


@functools.cache
def _kind(dtype: torch.dtype, rows: int, columns: int) -> Kind:
    single = dtype == torch.float32
    layout = NVMMASharedLayout(0 if single else 128, 32 if single else 16, 2)
    return Kind(dtype, (rows, columns), layout)


class Described(TensorDescriptor):
    """A descriptor without the checks of Triton's, which take longer than a small kernel: `fits`
    has made them."""

    def __init__(self, base: Tensor, shape: list[int], row: int, kind: Kind):
        self.base, self.shape, self.strides = base, shape, [row, 1]
        self.kind, self.block_shape, self.layout = kind, list(kind.block), kind.layout


def describe(x: Tensor, rows: int, columns: int) -> Described:
    """Of x in two dims, in blocks: [T, H, N] as [T, columns of all heads], a dense x [.., N] as
    [rows, N]."""
    kind, N = _kind(x.dtype, rows, columns), x.shape[-1]
    if x.dim() != 3:
        return Described(x, [x.numel() // N, N], N, kind)
    row, head, _ = x.stride()
    return Described(x, [x.shape[0], (x.shape[1] - 1) * head + N], row, kind)
