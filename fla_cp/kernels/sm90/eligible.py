"""Which calls the Gluon kernels of this folder support, and for which they are faster."""

import torch
from torch import Tensor

from fla_cp.kernels.triton.operands import Chunks
from fla_cp.kernels.triton.tile_table import Tuning
from fla_cp.partition.packing import Packing
from fla_cp.rule import CHUNK

try:  # Gluon is experimental: a Triton may lack it, or names of it
    from triton.experimental.gluon.language.nvidia.hopper import (
        async_copy,
        fence_async_shared,
        mbarrier,
        mma_v2,
        tma,
        warpgroup_mma,
        warpgroup_mma_wait,
    )
    from triton.experimental.gluon.nvidia.hopper import TensorDescriptor
except ImportError:
    GLUON = False
else:
    GLUON = True
    del async_copy, fence_async_shared, mbarrier, mma_v2, tma, warpgroup_mma, warpgroup_mma_wait
    del TensorDescriptor

if GLUON:  # outside of the try, so that an error in these files is not taken for a missing Gluon
    from fla_cp.kernels.sm90 import (
        intra_channelwise,
        intra_channelwise_bwd,
        intra_channelwise_bwd_any,
        intra_channelwise_bwd_scores,
        intra_channelwise_steep,
        intra_headwise,
        intra_headwise_bwd,
        scan,
        scan_bwd,
        scan_gated,
        step_run,
    )

__all__ = [
    "FOLDER",
    "GLUON",
    "fits",
    "intra_channelwise",
    "intra_channelwise_bwd",
    "intra_channelwise_bwd_any",
    "intra_channelwise_bwd_scores",
    "intra_channelwise_steep",
    "intra_headwise",
    "intra_headwise_bwd",
    "pays",
    "possible",
    "scan",
    "scan_bwd",
    "scan_gated",
    "step_run",
    "supports",
]

FOLDER = "sm90"

# Coordinates of the TMA are int32 too: times the K = 128 rows of a state, below 2**31.
MAX_CHUNK_HEADS = 2**24
"""The kernels number pairs of a chunk and a head in int32; there must be fewer than this."""


def possible(tuning: Tuning, dtype: torch.dtype) -> bool:
    """Whether this Triton has Gluon, the GPU is an sm_90, and the operands are bf16; or whether the
    tuning decides it."""
    if tuning.gluon is not None:
        return tuning.gluon
    return GLUON and tuning.on_sm90() and dtype == torch.bfloat16


def supports(c: Chunks, *rows: Tensor) -> bool:
    """Whether the kernels can compute the chunks, and read `rows` [T, HV, V] or [T, H, K].

    They can if this Triton has Gluon, the GPU is an sm_90, the operands are bf16, K = V = 128,
    chunks have 64 tokens, and the TMA can read every tensor: rows are dense and aligned to 16
    bytes, and strides are multiples of 8 elements."""
    runs = c.tokens == CHUNK and possible(c.tuning, c.v.dtype)
    return runs and (c.tuning.gluon is not None or fits(c, *rows))


def fits(c: Chunks, *rows: Tensor) -> bool:
    """What `supports` asks of shapes and memory."""
    NC, HV, K = c.decay.shape
    read = (*rows, *((c.qg, c.k_decayed, c.kg) if c.of_heads else ()))
    return (
        K == c.v.shape[2] == 128
        and NC * HV < MAX_CHUNK_HEADS
        and all(
            x.stride(-1) == 1
            and x.data_ptr() % 16 == 0
            and all(n > 0 and n % 8 == 0 for n in x.stride()[:2])
            for x in read
        )
    )


def pays(packing: Packing, c: Chunks, scans: bool = True) -> bool:
    """Whether there is enough work. It is decided for the rank that has most chunks, so that all
    ranks run the same kernels. scans: whether they are scans, which have few programs for few
    chunks and heads; with one decay a head the local stages gain more than scans lose."""
    if c.tuning.gluon is not None:
        return c.tuning.gluon
    size = packing.largest.chunks * c.decay.shape[1]
    least = c.tuning.min_chunk_heads
    if c.rule.per_head or not scans:
        least = min(least, c.tuning.min_local_chunk_heads)
    return least < size < MAX_CHUNK_HEADS
