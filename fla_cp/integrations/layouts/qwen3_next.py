"""Qwen3-Next: blocks of Gated DeltaNet and of gated attention (`qwen3_next`).

The published files have one matrix for q, k, v and z (our output gate), with the rows of a key head
and its value heads together, likewise one for b and a (beta and decay), and one for the attention's
q and gate, head by head. Norms multiply by 1 + weight, but for those of Gated DeltaNet's output.
Source: Qwen/Qwen3-Next-80B-A3B-Instruct, as transformers 5.23 reads and writes its files.
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
    is_tied,
    mixers_of,
    need,
    norm_eps,
    tied_head,
)
from fla_cp.integrations.layouts.table import Layout, Run, Table
from fla_cp.nn import Attention, Experts, GatedDeltaNet
from fla_cp.nn.rotary import YaRN

MODEL = "Qwen3-Next"
LENGTH = "max_position_embeddings"


def qwen3_next(decoder: Any) -> Layout:
    """The layout of a decoder of GatedDeltaNet and Attention.

    Raises ValueError, with the block and the reason, for what Qwen3-Next cannot express.
    """
    table = Table("qwen3_next", decoder)
    config = _config(decoder)
    add_decoder(table, decoder, _add_mixer, _add_moe, minus=1.0)
    copies = tied_head(decoder)
    # Layers that predict further tokens, which transformers does not load either.
    return Layout(
        "qwen3_next", config, table.own, table.tensors(), LENGTH, copies, ignored=("mtp.",)
    )


def _add_mixer(table: Table, block: str, own: str, mixer: nn.Module) -> None:
    if isinstance(mixer, GatedDeltaNet):
        _add_gdn(table, f"{block}.linear_attn", own, mixer)
    else:
        assert isinstance(mixer, Attention)
        _add_attention(table, f"{block}.self_attn", own, mixer)


def _add_gdn(table: Table, name: str, own: str, layer: GatedDeltaNet) -> None:
    H, K = layer.num_heads, layer.head_dim
    each = layer.num_v_heads // H  # value heads of a key head
    V = each * layer.head_v_dim
    hidden, width = layer.hidden_size, layer.qkv_conv.weight.shape[1]

    def by_head(**rows: int) -> list[Run]:
        return [Run(f"{own}.{part}.weight", h * n, n) for h in range(H) for part, n in rows.items()]

    qkvz = by_head(q_proj=K, k_proj=K, v_proj=V, g_proj=V)
    table.add(f"{name}.in_proj_qkvz.weight", *qkvz, shape=(2 * H * (K + V), hidden))
    ba = by_head(b_proj=each, a_proj=each)
    table.add(f"{name}.in_proj_ba.weight", *ba, shape=(2 * H * each, hidden))
    D = H * (2 * K + V)
    table.whole(f"{name}.conv1d.weight", f"{own}.qkv_conv.weight", (D, 1, width))
    table.whole(f"{name}.A_log", f"{own}.core.A_log")
    table.whole(f"{name}.dt_bias", f"{own}.core.dt_bias")
    table.whole(f"{name}.norm.weight", f"{own}.o_norm.weight")
    table.whole(f"{name}.out_proj.weight", f"{own}.o_proj.weight")


def _add_attention(table: Table, name: str, own: str, layer: Attention) -> None:
    H, K = layer.num_heads, layer.head_dim
    parts = "q_proj", "g_proj"
    runs = [Run(f"{own}.{part}.weight", h * K, K) for h in range(H) for part in parts]
    table.add(f"{name}.q_proj.weight", *runs, shape=(2 * H * K, layer.hidden_size))
    for part in ("k_proj", "v_proj", "o_proj"):
        table.whole(f"{name}.{part}.weight", f"{own}.{part}.weight")
    for part in ("q_norm", "k_norm"):
        table.whole(f"{name}.{part}.weight", f"{own}.{part}.weight", minus=1.0)


def _add_moe(table: Table, block: str, own: str) -> None:
    name = f"{block}.mlp"
    table.whole(f"{name}.gate.weight", f"{own}.router.weight")
    add_experts(table, f"{name}.experts", f"{own}.experts", "gate_proj", "up_proj", "down_proj")
    add_swiglu(table, f"{name}.shared_expert", f"{own}.shared")
    table.whole(f"{name}.shared_expert_gate.weight", f"{own}.shared_gate.weight")


def _config(decoder: Any) -> dict[str, Any]:
    gdn, attention = mixers_of(decoder, GatedDeltaNet), mixers_of(decoder, Attention)
    experts = experts_of(decoder)
    for i, delta in gdn.items():
        where = f"the GatedDeltaNet of block {i}"
        need(not delta.allow_neg_eigval, MODEL, where, "have beta below 1", "allow_neg_eigval")
    for i, layer in attention.items():
        _check_attention(layer, f"the Attention of block {i}")
    for i, mixture in experts.items():
        _check_moe(mixture, f"the experts of block {i}")
    first = dense_blocks(decoder, MODEL)
    kinds = {True: "linear_attention", False: "full_attention"}
    found = common_config(decoder, norm_eps(decoder, MODEL)) | {
        "architectures": ["Qwen3NextForCausalLM"],
        "model_type": "qwen3_next",
        "layer_types": [kinds[i in gdn] for i in range(len(decoder.blocks))],
        "attention_bias": False,
        "decoder_sparse_step": 1,
        "mlp_only_layers": list(range(first)),
        "num_experts": 0,
        "tie_word_embeddings": is_tied(decoder),
    }
    if gdn:
        delta = next(iter(gdn.values()))
        found |= {
            "linear_num_key_heads": delta.num_heads,
            "linear_num_value_heads": delta.num_v_heads,
            "linear_key_head_dim": delta.head_dim,
            "linear_value_head_dim": delta.head_v_dim,
            "linear_conv_kernel_dim": delta.qkv_conv.kernel_size,
        }
    if attention:
        found |= _attention_config(next(iter(attention.values())))
    return found | (_moe_config(next(iter(experts.values()))) if experts else {})


def _attention_config(layer: Attention) -> dict[str, Any]:
    assert layer.rotary is not None
    yarn = layer.rotary.scaling
    length = {} if yarn is None else {LENGTH: round(yarn.factor * yarn.original_length)}
    return length | {
        "num_attention_heads": layer.num_heads,
        "num_key_value_heads": layer.num_kv_heads,
        "head_dim": layer.head_dim,
        "partial_rotary_factor": _rotary_factor(layer.rotary.dim, layer.head_dim),
        "rope_theta": layer.rotary.base,
        "rope_scaling": None if yarn is None else _rope_scaling(yarn),
    }


def _rotary_factor(rotated: int, channels: int) -> float:
    """The share of a head's channels of which transformers makes int(channels * share)."""
    share = rotated / channels
    return share if int(channels * share) == rotated else (rotated + 0.5) / channels


def _rope_scaling(yarn: YaRN) -> dict[str, Any]:
    return {
        "rope_type": "yarn",
        "factor": yarn.factor,
        "original_max_position_embeddings": yarn.original_length,
        "beta_fast": yarn.beta_fast,
        "beta_slow": yarn.beta_slow,
    }


def _moe_config(layer: Experts) -> dict[str, Any]:
    router = layer.router
    assert layer.shared is not None
    return {
        "num_experts": router.num_experts,
        "num_experts_per_tok": router.experts_per_token,
        "norm_topk_prob": router.normalize,
        "moe_intermediate_size": layer.experts.down.shape[2],
        "shared_expert_intermediate_size": layer.shared.gate.out_features,
    }


def _check_attention(layer: Attention, where: str) -> None:
    need(layer.q_norm is not None, MODEL, where, "have norms of q and k (qk_norm)", "none")
    need(layer.g_proj is not None, MODEL, where, "have an output_gate", "none")
    need(layer.rotary is not None, MODEL, where, "have rotary positions", "none")


def _check_moe(layer: Experts, where: str) -> None:
    check_experts(layer, MODEL, "softmax", where)
    need(layer.shared_gate is not None, MODEL, where, "have a shared_gate", "none")
    router = layer.router
    need(router.scale == 1.0, MODEL, where, "have --model.routing-scale 1", router.scale)
    free = router.top_groups == router.num_groups
    need(free, MODEL, where, "all be open to a token", f"top_groups={router.top_groups}")
