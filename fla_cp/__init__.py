"""Context parallelism for linear attention: long sequences over many GPUs, exchanging states."""

from .context import (
    FLACPContext,
    build_cp_context,
    contiguous_token_ranges,
    zigzag_token_ranges,
)
from .ops import causal_conv1d, chunk_kda, cp_chunk_kda, fused_recurrent_kda, kda_gate

__version__ = "0.1.0"

__all__ = [
    "FLACPContext",
    "build_cp_context",
    "causal_conv1d",
    "chunk_kda",
    "contiguous_token_ranges",
    "cp_chunk_kda",
    "fused_recurrent_kda",
    "kda_gate",
    "zigzag_token_ranges",
]
