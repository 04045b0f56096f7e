"""The operators: attention, linear attention and the short convolution."""

from fla_cp.ops.attention import causal_attention
from fla_cp.ops.comba import chunk_comba, cp_chunk_comba, fused_recurrent_comba
from fla_cp.ops.dplr import (
    chunk_dplr_delta_rule,
    chunk_rwkv7,
    cp_chunk_dplr_delta_rule,
    cp_chunk_rwkv7,
    fused_recurrent_dplr_delta_rule,
    fused_recurrent_rwkv7,
)
from fla_cp.ops.gated_delta_product import (
    chunk_gated_delta_product,
    cp_chunk_gated_delta_product,
    fused_recurrent_gated_delta_product,
)
from fla_cp.ops.gated_delta_rule import (
    chunk_gated_delta_rule,
    cp_chunk_gated_delta_rule,
    fused_recurrent_gated_delta_rule,
    gdn_gate,
)
from fla_cp.ops.gla import (
    chunk_gla,
    chunk_simple_gla,
    cp_chunk_gla,
    cp_chunk_simple_gla,
    fused_recurrent_gla,
    fused_recurrent_simple_gla,
)
from fla_cp.ops.kda import chunk_kda, cp_chunk_kda, fused_recurrent_kda, kda_gate
from fla_cp.ops.short_conv import causal_conv1d, causal_conv1d_update

__all__ = [
    "causal_attention",
    "causal_conv1d",
    "causal_conv1d_update",
    "chunk_comba",
    "chunk_dplr_delta_rule",
    "chunk_gated_delta_product",
    "chunk_gated_delta_rule",
    "chunk_gla",
    "chunk_kda",
    "chunk_rwkv7",
    "chunk_simple_gla",
    "cp_chunk_comba",
    "cp_chunk_dplr_delta_rule",
    "cp_chunk_gated_delta_product",
    "cp_chunk_gated_delta_rule",
    "cp_chunk_gla",
    "cp_chunk_kda",
    "cp_chunk_rwkv7",
    "cp_chunk_simple_gla",
    "fused_recurrent_comba",
    "fused_recurrent_dplr_delta_rule",
    "fused_recurrent_gated_delta_product",
    "fused_recurrent_gated_delta_rule",
    "fused_recurrent_gla",
    "fused_recurrent_kda",
    "fused_recurrent_rwkv7",
    "fused_recurrent_simple_gla",
    "gdn_gate",
    "kda_gate",
]
