"""The names of flash-linear-attention (FLA) 0.6.0, with its order of arguments and its defaults.

`from fla_cp.compat import ..` takes the place of imports from fla.ops and fla.modules. Names and
signatures are FLA's, computation is this package's. docs/coming-from-fla.md says which arguments
are accepted and ignored, which are refused, and what is allowed beyond FLA.
"""

from fla_cp.compat.chunk import (
    chunk_comba,
    chunk_delta_rule,
    chunk_dplr_delta_rule,
    chunk_gated_delta_product,
    chunk_gated_delta_rule,
    chunk_gdn,
    chunk_gla,
    chunk_kda,
    chunk_rwkv7,
    chunk_simple_gla,
)
from fla_cp.compat.context import build_cp_context
from fla_cp.compat.modules import (
    FusedRMSNormGated,
    ShortConvolution,
    causal_conv1d,
    causal_conv1d_update,
    fused_gdn_gate,
    fused_kda_gate,
    l2_norm,
    l2norm,
)
from fla_cp.compat.recurrent import (
    fused_mul_recurrent_rwkv7,
    fused_recurrent_comba,
    fused_recurrent_delta_rule,
    fused_recurrent_dplr_delta_rule,
    fused_recurrent_gated_delta_rule,
    fused_recurrent_gdn,
    fused_recurrent_gla,
    fused_recurrent_kda,
    fused_recurrent_kda_fwd,
    fused_recurrent_rwkv7,
    fused_recurrent_simple_gla,
)
from fla_cp.context import FLACPContext

__all__ = [
    "FLACPContext",
    "FusedRMSNormGated",
    "ShortConvolution",
    "build_cp_context",
    "causal_conv1d",
    "causal_conv1d_update",
    "chunk_comba",
    "chunk_delta_rule",
    "chunk_dplr_delta_rule",
    "chunk_gated_delta_product",
    "chunk_gated_delta_rule",
    "chunk_gdn",
    "chunk_gla",
    "chunk_kda",
    "chunk_rwkv7",
    "chunk_simple_gla",
    "fused_gdn_gate",
    "fused_kda_gate",
    "fused_mul_recurrent_rwkv7",
    "fused_recurrent_comba",
    "fused_recurrent_delta_rule",
    "fused_recurrent_dplr_delta_rule",
    "fused_recurrent_gated_delta_rule",
    "fused_recurrent_gdn",
    "fused_recurrent_gla",
    "fused_recurrent_kda",
    "fused_recurrent_kda_fwd",
    "fused_recurrent_rwkv7",
    "fused_recurrent_simple_gla",
    "l2_norm",
    "l2norm",
]
