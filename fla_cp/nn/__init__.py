"""Layers."""

from fla_cp.nn.kda import KDACore, KimiDeltaAttention
from fla_cp.nn.linear_attention import (
    Comba,
    GatedDeltaNet,
    GatedDeltaProduct,
    GatedLinearAttention,
    SimpleGatedLinearAttention,
)
from fla_cp.nn.modules import GatedRMSNorm, RMSNorm, ShortConvolution

__all__ = [
    "Comba",
    "GatedDeltaNet",
    "GatedDeltaProduct",
    "GatedLinearAttention",
    "GatedRMSNorm",
    "KDACore",
    "KimiDeltaAttention",
    "RMSNorm",
    "ShortConvolution",
    "SimpleGatedLinearAttention",
]
