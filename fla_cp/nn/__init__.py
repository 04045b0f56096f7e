"""Layers."""

from .kda import KDACore, KimiDeltaAttention
from .modules import GatedRMSNorm, RMSNorm, ShortConvolution

__all__ = ["GatedRMSNorm", "KDACore", "KimiDeltaAttention", "RMSNorm", "ShortConvolution"]
