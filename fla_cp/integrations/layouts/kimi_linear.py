"""Kimi Linear: blocks of KDA and of latent attention without positions (`kimi_linear`).

The published files have three convolutions of [D, 1, W] where the decoder has one, A_log as
[1, 1, H, 1], and each expert's matrices by themselves as w1 (gate), w3 (up) and w2 (down).
Source: moonshotai/Kimi-Linear-48B-A3B-Instruct, as transformers 5.23 reads and writes its files.
"""

from __future__ import annotations

from typing import Any

from torch import nn

from fla_cp.integrations.layouts.decoder import (
    add_decoder,
    add_experts,
    add_swiglu,
    check_experts,
    common_config,
    dense_blocks,
    experts_of,
    mixers_of,
    need,
    norm_eps,
    tied_head,
)
from fla_cp.integrations.layouts.table import Layout, Run, Table
from fla_cp.nn import Experts, KimiDeltaAttention, MultiHeadLatentAttention

MODEL = "Kimi Linear"
LATENT_EPS = 1e-6
"""Of the norm of the latents, which the published configuration does not set."""

_KDA = {
    "q_proj": "q_proj.weight",
    "k_proj": "k_proj.weight",
    "v_proj": "v_proj.weight",
    "f_a_proj": "f_proj.0.weight",
    "f_b_proj": "f_proj.1.weight",
    "b_proj": "b_proj.weight",
    "g_a_proj": "g_proj.0.weight",
    "g_b_proj": "g_proj.1.weight",
    "o_norm": "o_norm.weight",
    "o_proj": "o_proj.weight",
}
_MLA = {
    "q_proj": "q_proj.weight",
    "kv_a_proj_with_mqa": "kv_down.weight",
    "kv_a_layernorm": "kv_norm.weight",
    "kv_b_proj": "kv_up.weight",
    "o_proj": "o_proj.weight",
}
"""Published module -> our parameter."""


def kimi_linear(decoder: Any) -> Layout:
    """The layout of a decoder of KimiDeltaAttention and MultiHeadLatentAttention.

    Raises ValueError, with the block and the reason, for what Kimi Linear cannot express.
    """
    table = Table("kimi_linear", decoder)
    config = _config(decoder)
    add_decoder(table, decoder, _add_mixer, _add_moe)
    return Layout(
        "kimi_linear",
        config,
        table.own,
        table.tensors(),
        "model_max_length",
        tied_head(decoder),
        writes_copies=True,  # transformers does not tie this model
        renamed=_renamed(config),
    )


def _add_mixer(table: Table, block: str, own: str, mixer: nn.Module) -> None:
    name = f"{block}.self_attn"
    if isinstance(mixer, KimiDeltaAttention):
        _add_kda(table, name, own, mixer)
        return
    for part, parameter in _MLA.items():
        table.whole(f"{name}.{part}.weight", f"{own}.{parameter}")


def _add_kda(table: Table, name: str, own: str, layer: KimiDeltaAttention) -> None:
    for part, parameter in _KDA.items():
        table.whole(f"{name}.{part}.weight", f"{own}.{parameter}")
    _, width = table.own[f"{own}.qkv_conv.weight"]
    D = layer.num_heads * layer.head_dim
    for i, part in enumerate("qkv"):
        run = Run(f"{own}.qkv_conv.weight", i * D, D)
        table.add(f"{name}.{part}_conv1d.weight", run, shape=(D, 1, width))
    table.whole(f"{name}.A_log", f"{own}.core.A_log", (1, 1, layer.num_heads, 1))
    table.whole(f"{name}.dt_bias", f"{own}.core.dt_bias")


def _add_moe(table: Table, block: str, own: str) -> None:
    name = f"{block}.block_sparse_moe"
    table.whole(f"{name}.gate.weight", f"{own}.router.weight")
    table.whole(f"{name}.gate.e_score_correction_bias", f"{own}.router.correction_bias")
    add_experts(table, f"{name}.experts", f"{own}.experts", "w1", "w3", "w2")
    add_swiglu(table, f"{name}.shared_experts", f"{own}.shared")


def _renamed(config: dict[str, Any]) -> dict[str, str]:
    """transformers 5.23 writes SwiGLU under the name of experts, if there are any: it undoes a
    renaming of both."""
    layers = [f"model.layers.{i}" for i in range(config["first_k_dense_replace"])]
    parts = [f"{part}_proj.weight" for part in ("gate", "up", "down")]
    return {f"{x}.block_sparse_moe.{p}": f"{x}.mlp.{p}" for x in layers for p in parts}


def _config(decoder: Any) -> dict[str, Any]:
    kda = mixers_of(decoder, KimiDeltaAttention)
    mla = mixers_of(decoder, MultiHeadLatentAttention)
    experts = experts_of(decoder)
    for i, delta in kda.items():
        _check_kda(delta, f"the KimiDeltaAttention of block {i}")
    for i, latent in mla.items():
        _check_mla(latent, f"the MultiHeadLatentAttention of block {i}")
    for i, layer in experts.items():
        _check_moe(layer, f"the experts of block {i}")
    heads = next(block.mixer.num_heads for block in decoder.blocks)
    eps = norm_eps(decoder, MODEL, *(latent.kv_norm for latent in mla.values()))
    found = common_config(decoder, eps) | {
        "architectures": ["KimiLinearForCausalLM"],
        "model_type": "kimi_linear",
        "num_attention_heads": heads,
        "num_key_value_heads": heads,
        "linear_attn_config": {
            "kda_layers": [i + 1 for i in kda],
            "full_attn_layers": [i + 1 for i in mla],
        },
        "first_k_dense_replace": dense_blocks(decoder, MODEL),
        "tie_word_embeddings": False,
    }
    if kda:
        delta = next(iter(kda.values()))
        found["linear_attn_config"] |= {
            "num_heads": delta.num_heads,
            "head_dim": delta.head_dim,
            "short_conv_kernel_size": delta.qkv_conv.kernel_size,
        }
    if mla:
        latent = next(iter(mla.values()))
        found |= {
            "mla_use_nope": True,
            "q_lora_rank": None,
            "kv_lora_rank": latent.kv_lora_rank,
            "qk_nope_head_dim": latent.qk_nope_head_dim,
            "qk_rope_head_dim": latent.qk_rope_head_dim,
            "v_head_dim": latent.v_head_dim,
        }
    return found | (_moe_config(next(iter(experts.values()))) if experts else {})


def _moe_config(layer: Experts) -> dict[str, Any]:
    router, inner = layer.router, layer.experts.down.shape[2]
    assert layer.shared is not None
    return {
        "num_experts": router.num_experts,
        "num_experts_per_token": router.experts_per_token,
        "num_shared_experts": layer.shared.gate.out_features // inner,
        "moe_intermediate_size": inner,
        "moe_layer_freq": 1,
        "moe_renormalize": router.normalize,
        "moe_router_activation_func": "sigmoid",
        "routed_scaling_factor": router.scale,
        "use_grouped_topk": True,
        "num_expert_group": router.num_groups,
        "topk_group": router.top_groups,
    }


def _check_kda(layer: KimiDeltaAttention, where: str) -> None:
    heads = layer.num_heads, layer.head_dim
    values = layer.num_v_heads, layer.head_v_dim
    need(values == heads, MODEL, where, "have value heads like its key heads", values)
    bound = layer.core.options(True)["lower_bound"]
    need(bound is None, MODEL, where, "have no gate_lower_bound (--model.gate-lower-bound)", bound)
    need(not layer.allow_neg_eigval, MODEL, where, "have beta below 1", "allow_neg_eigval")
    up = layer.g_proj.get_submodule("1")
    rule = "have no bias in its output gate (--model.gate-bias False)"
    need(getattr(up, "bias", None) is None, MODEL, where, rule, "one, for which there is no tensor")


def _check_mla(layer: MultiHeadLatentAttention, where: str) -> None:
    rule = "have no rotary positions (without --model.mla-rope)"
    need(layer.rotary is None, MODEL, where, rule, layer.rotary)
    plain = isinstance(layer.q_proj, nn.Linear)
    need(plain, MODEL, where, "have a plain projection of q", "one of low rank")
    eps = layer.kv_norm.eps
    need(eps == LATENT_EPS, MODEL, where, f"have eps={LATENT_EPS} in its norm of latents", eps)


def _check_moe(layer: Experts, where: str) -> None:
    check_experts(layer, MODEL, "sigmoid", where)
    router = layer.router
    each = router.num_experts // router.num_groups
    need(each >= 2, MODEL, where, "be two or more in a group", each)
