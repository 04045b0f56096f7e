"""The token mixer of a block, by name."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from torch import nn

from fla_cp import nn as layers
from fla_cp.train.config import ModelConfig
from fla_cp.train.pattern import SOFTMAX, parse_stretch

if TYPE_CHECKING:
    from fla_cp.train.model import Shape

CONV_SIZE = 4

LATENT_NORM_EPS = 1e-6
"""The eps of the norm of latents, as in DeepSeek-V3 and Kimi Linear. Other norms may differ."""

MIXERS = {
    "kda": layers.KimiDeltaAttention,
    "gdn": layers.GatedDeltaNet,
    "comba": layers.Comba,
    "gdp": layers.GatedDeltaProduct,
    "gla": layers.GatedLinearAttention,
    "simple_gla": layers.SimpleGatedLinearAttention,
    "attention": layers.Attention,
    "mla": layers.MultiHeadLatentAttention,
}


def make_mixer(name: str, config: ModelConfig, shape: Shape, layer_idx: int) -> nn.Module:
    """The mixer `name`. attention is that of Qwen3-Next, and mla that of Kimi Linear, or with
    config.mla_rope that of DeepSeek-V3; their sizes follow from the heads and head_dim."""
    kind: type[nn.Module] = MIXERS[name]
    if name not in SOFTMAX:
        options: dict[str, Any] = {"conv_size": CONV_SIZE, "impl": config.impl}
        options["norm_eps"] = shape.norm_eps
        if name == "kda":
            options["gate_lower_bound"] = config.gate_lower_bound
            options["gate_bias"] = config.gate_bias is not False
        options["num_v_heads"] = shape.num_heads * shape.value_heads
        sizes = shape.hidden_size, shape.num_heads, shape.head_dim
        return kind(*sizes, layer_idx=layer_idx, **options)
    scaling = None
    if config.rope_scaling is not None:
        factor, original = parse_stretch(config.rope_scaling)
        assert original is not None, "with_recipe sets it"
        scaling = layers.YaRN(factor, original)
    options = {"rope_theta": shape.rope_theta, "rope_scaling": scaling, "layer_idx": layer_idx}
    if name == "attention":
        return kind(
            shape.hidden_size,
            shape.num_heads,
            shape.num_kv_heads,
            shape.attention_head_dim,
            qk_norm=True,
            output_gate=True,
            rotary_dim=max(2, shape.attention_head_dim // 8 * 2),
            norm_eps=shape.norm_eps,
            **options,
        )
    if not config.mla_rope:
        options |= {"rope_theta": None, "rope_scaling": None}
    return kind(
        shape.hidden_size,
        shape.num_heads,
        kv_lora_rank=4 * shape.head_dim,
        qk_nope_head_dim=shape.head_dim,
        qk_rope_head_dim=max(2, shape.head_dim // 4 * 2),
        v_head_dim=shape.head_dim,
        norm_eps=LATENT_NORM_EPS,
        **options,
    )
