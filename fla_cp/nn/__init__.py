"""Layers."""

from .family import (
    Comba,
    GatedDeltaNet,
    GatedDeltaProduct,
    GatedLinearAttention,
    SimpleGatedLinearAttention,
)
from .kda import KDACore, KimiDeltaAttention
from .modules import GatedRMSNorm, RMSNorm, ShortConvolution

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
