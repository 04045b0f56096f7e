"""The layers, built from the operators of `fla_cp.ops`."""

from fla_cp.nn.attention import Attention
from fla_cp.nn.cache import AttentionCache, RecurrentCache
from fla_cp.nn.experts import Experts
from fla_cp.nn.kda import KDACore, KimiDeltaAttention
from fla_cp.nn.latent_attention import MultiHeadLatentAttention
from fla_cp.nn.linear_attention import (
    Comba,
    GatedDeltaNet,
    GatedDeltaProduct,
    GatedLinearAttention,
    SimpleGatedLinearAttention,
)
from fla_cp.nn.modules import GatedRMSNorm, RMSNorm, ShortConvolution, SwiGLU
from fla_cp.nn.rotary import YaRN
from fla_cp.nn.routing import Router, RoutingStatistics, load_balancing_loss

__all__ = [
    "Attention",
    "AttentionCache",
    "Comba",
    "Experts",
    "GatedDeltaNet",
    "GatedDeltaProduct",
    "GatedLinearAttention",
    "GatedRMSNorm",
    "KDACore",
    "KimiDeltaAttention",
    "MultiHeadLatentAttention",
    "RMSNorm",
    "RecurrentCache",
    "Router",
    "RoutingStatistics",
    "ShortConvolution",
    "SimpleGatedLinearAttention",
    "SwiGLU",
    "YaRN",
    "load_balancing_loss",
]
