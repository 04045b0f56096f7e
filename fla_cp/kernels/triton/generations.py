"""Kernels for one generation of GPUs: which stages run them instead of the Triton kernels here.

A stage runs the kernels of the first of GENERATIONS that supports the call and pays off. Otherwise
it runs the Triton kernels of this folder, which support every call. Kernels for Blackwell would be
a folder sm100/ next to sm90/, an entry here, and tiles in `tile_table.GENERATION_TILES`.
"""

from __future__ import annotations

from typing import Any, Protocol

import torch
from torch import Tensor

from fla_cp.kernels.sm90 import eligible as sm90
from fla_cp.kernels.triton.operands import Chunks
from fla_cp.kernels.triton.tile_table import Tuning
from fla_cp.partition.packing import Packing


class Generation(Protocol):
    """A folder of kernels: its name, the calls that it supports, and a module for each of its
    stages, with the names of this folder."""

    FOLDER: str
    scan: Any
    scan_bwd: Any
    scan_gated: Any
    intra_channelwise: Any
    intra_channelwise_bwd: Any
    intra_channelwise_bwd_any: Any
    intra_channelwise_bwd_scores: Any
    intra_channelwise_steep: Any
    intra_headwise: Any
    intra_headwise_bwd: Any
    step_run: Any

    def possible(self, tuning: Tuning, dtype: torch.dtype) -> bool:
        """Whether the kernels run at all here, on operands in dtype."""

    def supports(self, c: Chunks, *rows: Tensor) -> bool:
        """Whether the kernels compute the chunks and read `rows` [T, H, K] or [T, HV, V]."""

    def pays(self, packing: Packing, c: Chunks, scans: bool = True) -> bool:
        """Whether the call is large enough. All ranks decide alike. scans: whether the kernels are
        scans."""


GENERATIONS: tuple[Generation, ...] = (sm90,)


def choose(packing: Packing, c: Chunks, *rows: Tensor, scans: bool = True) -> str:
    """The folder of the kernels that run a stage. rows, scans: see `Generation`."""
    for generation in GENERATIONS:
        if generation.supports(c, *rows) and generation.pays(packing, c, scans):
            return generation.FOLDER
    return "triton"


def kernels_of(folder: str) -> Generation:
    """The generation whose kernels are in a folder."""
    return next(g for g in GENERATIONS if folder == g.FOLDER)
