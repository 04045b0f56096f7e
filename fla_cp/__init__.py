"""Context parallelism for linear attention: long sequences over many GPUs, exchanging states."""

from fla_cp.context import FLACPContext, build_cp_context
from fla_cp.ops import (
    causal_conv1d,
    chunk_comba,
    chunk_gated_delta_product,
    chunk_gated_delta_rule,
    chunk_gla,
    chunk_kda,
    chunk_simple_gla,
    cp_chunk_comba,
    cp_chunk_gated_delta_product,
    cp_chunk_gated_delta_rule,
    cp_chunk_gla,
    cp_chunk_kda,
    cp_chunk_simple_gla,
    fused_recurrent_comba,
    fused_recurrent_gated_delta_product,
    fused_recurrent_gated_delta_rule,
    fused_recurrent_gla,
    fused_recurrent_kda,
    fused_recurrent_simple_gla,
    gdn_gate,
    kda_gate,
)
from fla_cp.partition.token_ranges import contiguous_token_ranges, zigzag_token_ranges

__version__ = "0.1.0"

__all__ = [
    "FLACPContext",
    "build_cp_context",
    "causal_conv1d",
    "chunk_comba",
    "chunk_gated_delta_product",
    "chunk_gated_delta_rule",
    "chunk_gla",
    "chunk_kda",
    "chunk_simple_gla",
    "contiguous_token_ranges",
    "cp_chunk_comba",
    "cp_chunk_gated_delta_product",
    "cp_chunk_gated_delta_rule",
    "cp_chunk_gla",
    "cp_chunk_kda",
    "cp_chunk_simple_gla",
    "fused_recurrent_comba",
    "fused_recurrent_gated_delta_product",
    "fused_recurrent_gated_delta_rule",
    "fused_recurrent_gla",
    "fused_recurrent_kda",
    "fused_recurrent_simple_gla",
    "gdn_gate",
    "kda_gate",
    "zigzag_token_ranges",
]
