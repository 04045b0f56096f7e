"""Public operators."""

from .conv import causal_conv1d
from .kda import chunk_kda, cp_chunk_kda, fused_recurrent_kda, kda_gate

__all__ = ["causal_conv1d", "chunk_kda", "cp_chunk_kda", "fused_recurrent_kda", "kda_gate"]
