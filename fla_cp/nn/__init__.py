"""Layers."""

from fla_cp.nn.attention import Attention
from fla_cp.nn.kda import KDACore, KimiDeltaAttention
from fla_cp.nn.latent_attention import MultiHeadLatentAttention
from fla_cp.nn.linear_attention import (
    Comba,
    GatedDeltaNet,
    GatedDeltaProduct,
    GatedLinearAttention,
    SimpleGatedLinearAttention,
)
from fla_cp.nn.modules import GatedRMSNorm, RMSNorm, ShortConvolution
from fla_cp.nn.rotary import YaRN

__all__ = [
    "Attention",
    "Comba",
    "GatedDeltaNet",
    "GatedDeltaProduct",
    "GatedLinearAttention",
    "GatedRMSNorm",
    "KDACore",
    "KimiDeltaAttention",
    "MultiHeadLatentAttention",
    "RMSNorm",
    "ShortConvolution",
    "SimpleGatedLinearAttention",
    "YaRN",
]
