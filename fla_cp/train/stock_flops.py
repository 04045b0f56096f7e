"""What flops.py counts of a model of transformers."""

from __future__ import annotations

from typing import Any

from torch import nn

from fla_cp.train.flops import Layer, Recurrence, Routed, Softmax, linears
from fla_cp.train.language_model import LanguageModel
from fla_cp.train.stock import StockModel


def described(model: LanguageModel) -> tuple[nn.Linear, list[Layer]]:
    """The head and the blocks of a model of transformers. Raises ValueError for another model."""
    if not isinstance(model, StockModel):
        raise ValueError(f"there is no formula for the model {type(model).__name__}")
    return model.stock.lm_head, [_layer(block, model) for block in model.block_list()]


def _layer(block: Any, model: StockModel) -> Layer:
    mixer = block.linear_attn if hasattr(block, "linear_attn") else block.self_attn
    routed = []
    for router in (part for part in block.mlp.modules() if part in model.routers):
        E, hidden, ffn = block.mlp.experts.down_proj.shape
        routed.append(Routed(E, router.top_k, hidden, ffn))
    return Layer(linears(mixer), linears(block.mlp), routed, _mixer(mixer))


def _mixer(mixer: Any) -> Recurrence | Softmax:
    kind = type(mixer).__name__
    if kind.endswith("GatedDeltaNet"):
        return Recurrence(mixer.num_v_heads, mixer.head_k_dim, mixer.head_v_dim)
    if kind == "KimiLinearDeltaAttention":
        return Recurrence(mixer.num_heads, mixer.head_dim, mixer.head_dim, per_head=False)
    heads = mixer.config.num_attention_heads
    if kind == "KimiLinearAttention":
        return Softmax(heads, mixer.qk_head_dim, mixer.v_head_dim)
    if kind.endswith("Attention"):
        return Softmax(heads, mixer.head_dim, mixer.head_dim)
    raise ValueError(f"there is no formula for the mixer {kind}")
