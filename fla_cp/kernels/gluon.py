"""Whether the kernels in Gluon are there, and which calls take them."""

from __future__ import annotations

import functools

import torch
from torch import Tensor

from . import tuning
from .chunks import Chunks

__all__ = ["hopper", "hopper_bwd", "hopper_intra", "multiprocessors", "takes"]

try:
    from . import hopper, hopper_bwd, hopper_intra
except (ImportError, AttributeError):  # Gluon is experimental: a Triton that has it otherwise
    hopper = hopper_bwd = hopper_intra = None  # type: ignore[assignment]


def takes(c: Chunks, *rows: Tensor) -> bool:
    """Whether they can; rows [T, HV, V] or [T, H, K] are what is read besides."""
    return bool(hopper) and tuning.architecture() == 90 and hopper.fits(c, *rows)


@functools.lru_cache
def multiprocessors(device: torch.device) -> int:
    """0 without a GPU."""
    if device.type != "cuda":
        return 0
    return torch.cuda.get_device_properties(device).multi_processor_count
