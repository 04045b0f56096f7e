"""Whether a folder of a published model is that of a decoder, before any weight is read."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch

from fla_cp.integrations.layouts.table import Layout
from fla_cp.integrations.safetensors_folder import TensorFolder

NEUTRAL = (
    *("bos_token_id", "eos_token_id", "pad_token_id", "max_position_embeddings", "use_cache"),
    *("initializer_range", "attention_dropout", "output_router_logits", "router_aux_loss_coef"),
    *("pretraining_tp", "tie_word_embeddings", "intermediate_size", "moe_intermediate_size"),
    "shared_expert_intermediate_size",
)
"""Options that do not change the model, or only the shapes of tensors, which are compared too."""

_OF_LAYERS = {
    "linear_attention": ("linear_",),
    "full_attention": (
        *("num_attention_heads", "num_key_value_heads", "head_dim", "attention_bias"),
        *("q_lora_rank", "kv_lora_rank", "qk_nope_head_dim", "qk_rope_head_dim", "v_head_dim"),
        "rope_parameters",
    ),
}
"""Beginnings of names of options that say something of these layers alone."""

_OF_EXPERTS = (
    *("num_experts", "num_local_experts", "num_experts_per_tok", "n_shared_experts"),
    *("norm_topk_prob", "routed_scaling_factor", "n_group", "topk_group"),
    *("mlp_only_layers", "decoder_sparse_step"),
)

POSITIONS = ("rope_parameters",)
"""Options that may differ on purpose, to train on longer sequences."""

FLOATS = (torch.float64, torch.float32, torch.float16, torch.bfloat16)


def check_folder(
    layout: Layout, folder: TensorFolder, model: str = "this run's model"
) -> list[str]:
    """Compares a folder with a decoder's layout; returns notes on what differs on purpose.

    model: what to call the decoder in an error.

    Raises ValueError, with the name of the option or tensor, for a quantised model, a model with a
    vision tower, another architecture, an option that makes another model, and tensors that are
    missing, too many, of another shape or without floating-point numbers.
    """
    config = read_config(folder.path)
    if config.get("model_type") != layout.model_type:
        raise ValueError(
            f"{folder.path} must be a model of type {layout.model_type}, which has the mixers of "
            f"this run's --model.pattern, got {config.get('model_type')!r}"
        )
    notes = compare_options(layout, folder.path, config)
    _compare_names(layout, folder, model)
    for name, stored in folder.tensors.items():
        published = layout.tensors.get(layout.copies.get(name, name))
        if published is None:
            continue
        if stored.shape != published.shape:
            raise ValueError(
                f"{name} in {folder.path} must have the shape {published.shape} of {model}, "
                f"got {stored.shape}"
            )
        if stored.dtype not in FLOATS:
            raise ValueError(
                f"{name} in {folder.path} must have a floating dtype of 16 bits or more, got "
                f"{stored.dtype}: quantised weights are not read"
            )
    ignored = [name for name in folder.tensors if name.startswith(layout.ignored)]
    if ignored:
        notes.append(f"{len(ignored)} tensors such as {ignored[0]} have no place and are not read")
    return notes


def read_config(folder: Path) -> dict[str, Any]:
    """The contents of a folder's config.json. Raises ValueError for one that cannot be read, of a
    quantised model, or of one with a vision tower."""
    try:
        config = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise ValueError(f"{folder} must have a config.json of a model: {error}") from None
    if not isinstance(config, dict):
        raise ValueError(f"config.json in {folder} must be an object, got {config!r:.40}")
    for name in ("quantization_config", "compression_config"):
        if config.get(name):
            raise ValueError(f"{folder} must not be quantised, got {name} {config[name]!r:.80}")
    for name in ("vision_config", "audio_config"):
        if config.get(name):
            kind = name.removesuffix("_config")
            raise ValueError(f"{folder} must be a text model, but it has a {kind} tower ({name})")
    return config


def compare_options(
    layout: Layout, path: Path, config: dict[str, Any], why: str = ", as this run's options say"
) -> list[str]:
    """Compares config.json with a layout's options, both as transformers understands them, with its
    defaults; returns notes as `check_folder`. why: why an option must be the layout's, for errors.
    Raises ValueError for an option that differs."""
    from transformers import CONFIG_MAPPING

    kind = CONFIG_MAPPING[layout.model_type]
    ours = kind.from_dict(dict(layout.config))
    try:
        theirs = kind.from_dict(config)
    except Exception as error:  # transformers and the libraries below raise all kinds
        reason = str(error).strip().partition("\n")[0]
        raise ValueError(f"config.json in {path} is refused by transformers: {reason}") from None
    notes, unused = [], _of_absent_parts(ours, theirs)
    for name in kind.__annotations__:
        found, wanted = getattr(theirs, name), getattr(ours, name)
        if name in NEUTRAL or name.startswith(unused) or found == wanted:
            continue
        if name not in POSITIONS:
            raise ValueError(
                f"{name} in config.json of {path} must be {wanted!r}{why}, got {found!r}"
            )
        notes.append(f"rotary positions differ: {name} is {wanted}, in {path} {found}")
    return notes


def has_experts(config: Any) -> bool:
    """Whether a block has experts. config: of transformers."""
    kinds = getattr(config, "mlp_layer_types", None)
    if kinds is not None:
        return "sparse" in kinds
    step, layers = max(1, config.decoder_sparse_step), range(config.num_hidden_layers)
    chosen = [i for i in layers if i not in config.mlp_only_layers and (i + 1) % step == 0]
    return config.num_experts > 0 and bool(chosen)


def _of_absent_parts(*configs: Any) -> tuple[str, ...]:
    """Beginnings of names of options that say something of parts that no model has."""
    layers = {kind for config in configs for kind in config.layer_types}
    found = [name for kind, names in _OF_LAYERS.items() if kind not in layers for name in names]
    if not any(map(has_experts, configs)):
        found += _OF_EXPERTS
    return tuple(found)


def _compare_names(layout: Layout, folder: TensorFolder, model: str) -> None:
    wanted = set(layout.tensors)
    optional = set(layout.copies)
    found = {name for name in folder.tensors if not name.startswith(layout.ignored)}
    for what, names in (("lacks", wanted - found), ("has", found - wanted - optional)):
        if names:
            first = ", ".join(sorted(names)[:3]) + (", .." if len(names) > 3 else "")
            end = "" if what == "lacks" else f", for which {model} has no place"
            raise ValueError(f"{folder.path} {what} {first} ({len(names)} in all){end}")
