"""Whether the kernels in Gluon are there, and which calls take them."""

from __future__ import annotations

import functools

import torch
from torch import Tensor

from fla_cp.kernels.triton import tile_table
from fla_cp.kernels.triton.operands import Chunks

__all__ = ["sm90_intra", "sm90_intra_bwd", "sm90_scan", "sm_count", "supports"]

try:
    from fla_cp.kernels.sm90 import (
        intra_headwise as sm90_intra,
    )
    from fla_cp.kernels.sm90 import (
        intra_headwise_bwd as sm90_intra_bwd,
    )
    from fla_cp.kernels.sm90 import (
        scan as sm90_scan,
    )
except (ImportError, AttributeError):  # Gluon is experimental: a Triton that has it otherwise
    sm90_scan = sm90_intra_bwd = sm90_intra = None  # type: ignore[assignment]


def supports(c: Chunks, *rows: Tensor) -> bool:
    """Whether they can; rows [T, HV, V] or [T, H, K] are what is read besides."""
    return bool(sm90_scan) and tile_table.architecture() == 90 and sm90_scan.fits(c, *rows)


@functools.lru_cache
def sm_count(device: torch.device) -> int:
    """0 without a GPU."""
    if device.type != "cuda":
        return 0
    return torch.cuda.get_device_properties(device).multi_processor_count
