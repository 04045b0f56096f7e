"""Loads a folder of a published model, whose config.json has the options, as a decoder of fla_cp.

decoder, layout, folder = open_published(path)      # on the meta device; no weight is read
model = load_published(path, torch.device("cpu"))
"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch

from fla_cp.integrations.layouts import Layout, layout_of
from fla_cp.integrations.layouts.match import (
    check_folder,
    compare_options,
    has_experts,
    read_config,
)
from fla_cp.integrations.safetensors_folder import TensorFolder
from fla_cp.integrations.stock_folder import UNTIE
from fla_cp.train.config import ModelConfig, UserError
from fla_cp.train.distributed import Ranks
from fla_cp.train.init_from import read_into
from fla_cp.train.mixers import CONV_SIZE
from fla_cp.train.model import Decoder, Shape
from fla_cp.train.weights import allocate, give_memory, on_meta

_Options = tuple[ModelConfig, Shape]


def is_published(path: Path) -> bool:
    """Whether the path is a folder of a published model, and not of a run."""
    return (path / "config.json").is_file()


def open_published(path: Path) -> tuple[Decoder, Layout, TensorFolder]:
    """The decoder that the folder's config.json describes, on the meta device, and its tensors.

    Raises UserError, with the name of the option or tensor, for a model that our decoder cannot
    express, and for a folder that is not whole; see `check_folder`.
    """
    try:
        config = read_config(path)
    except (ValueError, OSError) as error:
        raise UserError(f"HF_DIR {path}: {error}") from None
    try:
        decoder, layout = _described(path, config)
    except ValueError as error:
        raise UserError(
            f"HF_DIR {path}: {error}; transformers itself generates with its models: "
            f"AutoModelForCausalLM.from_pretrained({str(path)!r}).generate(..)"
        ) from None
    try:
        folder = TensorFolder(path, layout.renamed)
        check_folder(layout, folder, "the model in config.json")
    except (ValueError, OSError) as error:
        raise UserError(f"HF_DIR {path}: {error}") from None
    return decoder, layout, folder


def why_not_read(model: Mapping[str, Any]) -> str:
    """Why our decoder cannot have a model of transformers; "" if it can.

    model: the section "model" of a checkpoint's record, which has what config.json says.
    """
    own = {field.name for field in dataclasses.fields(ModelConfig)}
    config = {name: value for name, value in model.items() if value is not None or name not in own}
    try:
        _described(Path("OUT"), config)
    except ValueError as error:
        return str(error)
    return ""


def _described(path: Path, config: dict[str, Any]) -> tuple[Decoder, Layout]:
    """The decoder of a config.json, on the meta device. path: of its folder, for errors."""
    understood = _understood(path, config)
    model, shape = READERS[understood.model_type](understood)
    with on_meta():
        decoder = Decoder(model, understood.vocab_size, shape)
    layout = layout_of(decoder)
    compare_options(layout, path, config, " for fla_cp's decoder")
    _check_positions(understood, _understood(path, layout.config))
    return decoder, layout


def load_published(path: Path, device: torch.device) -> Decoder:
    """The model of the folder in float32, for evaluation.

    Raises UserError as `open_published`, for weights that cannot be read, and for a head that
    differs from the embedding that it is tied to.
    """
    model, layout, folder = open_published(path)
    give_memory(model, torch.device("cpu"))
    if problem := _filling(model, layout, folder):
        raise UserError(problem)
    return model.to(device).eval()


def load_published_shards(path: Path, ranks: Ranks, dtype: torch.dtype) -> Decoder:
    """The same model, of which each rank holds its shard only. Raises UserError, on all ranks, as
    `load_published`. Collective."""
    model, layout, folder = open_published(path)
    allocate(model, ranks, dtype)
    if problem := ranks.first_problem(_filling(model, layout, folder)):
        raise UserError(problem)
    model.eval()
    return model


def end_tokens(path: Path) -> list[int]:
    """The tokens that end a text: those of generation_config.json, else of config.json."""
    for name in ("generation_config.json", "config.json"):
        if not (path / name).is_file():
            continue
        found = read_config(path) if name == "config.json" else _json(path / name)
        ends = found.get("eos_token_id")
        if ends is not None:
            return [int(end) for end in (ends if isinstance(ends, list) else [ends])]
    return []


def _json(path: Path) -> dict[str, Any]:
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise UserError(f"HF_DIR: {path} must be JSON: {error}") from None
    return found if isinstance(found, dict) else {}


def _filling(model: Decoder, layout: Layout, folder: TensorFolder) -> str:
    """Reads this rank's weights; returns why it cannot, or ""."""
    try:
        read_into(model, layout, folder, UNTIE)
    except (ValueError, OSError) as error:
        return f"HF_DIR {folder.path}: {error}"
    finally:
        folder.close()
    return ""


def _understood(path: Path, config: Mapping[str, Any]) -> Any:
    """config.json as transformers understands it, with its defaults."""
    from transformers import CONFIG_MAPPING

    kind = str(config.get("model_type"))
    if kind not in READERS:
        known = " or ".join(READERS)
        raise ValueError(f"model_type in config.json of {path} must be {known}, got {kind!r}")
    try:
        return CONFIG_MAPPING[kind].from_dict(dict(config))
    except Exception as error:  # transformers and the libraries below raise all kinds
        reason = str(error).strip().partition("\n")[0]
        raise ValueError(f"config.json in {path} is refused by transformers: {reason}") from None


def _check_positions(theirs: Any, ours: Any) -> None:
    """Raises ValueError if rotary positions differ. `check_folder` allows that, for training."""

    def rope(config: Any) -> dict[str, Any]:
        found = getattr(config, "rope_parameters", None) or {}
        defaults = {"beta_fast": 32.0, "beta_slow": 1.0} if found.get("rope_type") == "yarn" else {}
        return defaults | {name: value for name, value in found.items() if value is not None}

    if "full_attention" in theirs.layer_types and rope(theirs) != rope(ours):
        raise ValueError(
            f"rope_parameters in config.json must be {rope(ours)} for fla_cp's decoder, got "
            f"{rope(theirs)}"
        )


def _need(config: Any, name: str, wanted: object, rule: str = "") -> None:
    """Raises ValueError unless an option has the value that our decoder derives from others."""
    found = getattr(config, name)
    if found != wanted:
        raise ValueError(
            f"{name} in config.json must be {rule or wanted} for fla_cp's decoder, got {found!r}"
        )


def _pattern(config: Any, mixers: Mapping[str, str]) -> str:
    for kind in config.layer_types:
        if kind not in mixers:
            raise ValueError(
                f"layer_types in config.json must have {' and '.join(mixers)} only, got {kind!r}"
            )
    return ",".join(mixers[kind] for kind in config.layer_types)


def _ffn_ratio(config: Any, dense: bool) -> float:
    """The ratio that makes a SwiGLU of the model's inner width, if any block has one."""
    width = config.intermediate_size
    if dense and width % 64:
        _need(config, "intermediate_size", None, "a multiple of 64")
    return width / config.hidden_size


def _common(config: Any) -> dict[str, Any]:
    _need(config, "linear_conv_kernel_dim", CONV_SIZE)
    return {
        "layers": config.num_hidden_layers,
        "hidden_size": config.hidden_size,
        "norm_eps": config.rms_norm_eps,
    }


def _kimi_linear(config: Any) -> _Options:
    pattern = _pattern(config, {"linear_attention": "kda", "full_attention": "mla"})
    width = "linear_head_dim" if "kda" in pattern else "qk_nope_head_dim"
    heads, channels = config.num_attention_heads, getattr(config, width)
    if "kda" in pattern:
        heads = config.linear_num_heads
    if "mla" in pattern:
        _need(config, "num_attention_heads", heads, f"linear_num_heads, {heads}")
        for name in ("qk_nope_head_dim", "v_head_dim"):
            _need(config, name, channels, f"{width}, {channels}")
        _need(config, "qk_rope_head_dim", max(2, channels // 4 * 2), f"half of {width}")
        _need(config, "kv_lora_rank", 4 * channels, f"4 * {width}, {4 * channels}")
    kinds = list(config.mlp_layer_types)
    dense = kinds.index("sparse") if "sparse" in kinds else len(kinds)
    shape = Shape(
        **_common(config),
        num_heads=heads,
        head_dim=channels,
        tie_embeddings=False,
        ffn_ratio=_ffn_ratio(config, dense > 0),
        experts=config.num_experts if dense < len(kinds) else None,
        experts_per_token=config.num_experts_per_token,
        shared_experts=config.num_shared_experts,
        expert_size=config.moe_intermediate_size,
        routing_scale=config.routed_scaling_factor,
        routing="sigmoid",
        dense_layers=dense,
    )
    return ModelConfig(pattern=pattern, gate_bias=False, tie_embeddings=False), shape


def _qwen3_next(config: Any) -> _Options:
    pattern = _pattern(config, {"linear_attention": "gdn", "full_attention": "attention"})
    mixers = pattern.split(",")
    linear, full = "gdn" in mixers, "attention" in mixers
    heads, channels = config.linear_num_key_heads, config.linear_key_head_dim
    if not linear:
        heads, channels = config.num_attention_heads, config.head_dim
    else:
        _need(config, "linear_value_head_dim", channels, f"linear_key_head_dim, {channels}")
        values = config.linear_num_value_heads
        if values % heads:
            rule = f"a multiple of linear_num_key_heads, {heads}"
            _need(config, "linear_num_value_heads", None, rule)
    value_heads = config.linear_num_value_heads // heads if linear else 1
    width, queries, scaling, base = 1, 1, None, 10000.0
    if full:
        _need(config, "num_attention_heads", heads, f"linear_num_key_heads, {heads}")
        if config.head_dim % channels:
            rule = f"a multiple of linear_key_head_dim, {channels}"
            _need(config, "head_dim", None, rule)
        width = config.head_dim // channels
        queries = heads // config.num_key_value_heads
        base, scaling = _rotary(config)
    moe = has_experts(config)
    dense = len(config.mlp_only_layers) if moe else config.num_hidden_layers
    shared = config.shared_expert_intermediate_size
    if moe and shared % config.moe_intermediate_size:
        rule = "a multiple of moe_intermediate_size"
        _need(config, "shared_expert_intermediate_size", None, rule)
    shape = Shape(
        **_common(config),
        num_heads=heads,
        head_dim=channels,
        tie_embeddings=config.tie_word_embeddings,
        value_heads=value_heads,
        attention_width=width,
        queries_per_key=queries,
        ffn_ratio=_ffn_ratio(config, dense > 0),
        rope_theta=base,
        experts=config.num_experts if moe else None,
        experts_per_token=config.num_experts_per_tok,
        shared_experts=shared // config.moe_intermediate_size if moe else 0,
        expert_size=config.moe_intermediate_size,
        dense_layers=dense if moe else 0,
    )
    return ModelConfig(pattern=pattern, rope_scaling=scaling), shape


def _rotary(config: Any) -> tuple[float, str | None]:
    """The base of the rotary positions, and YaRN's factor and length as --model.rope-scaling."""
    rope = config.rope_parameters
    kind = rope.get("rope_type", "default")
    rotated = int(config.head_dim * rope.get("partial_rotary_factor", 1.0))
    wanted = max(2, config.head_dim // 8 * 2)
    if kind not in ("default", "yarn") or rotated != wanted:
        raise ValueError(
            "rope_parameters in config.json must be of type default or yarn and rotate "
            f"{wanted} of {config.head_dim} channels, got {rope!r}"
        )
    if kind == "default":
        return rope["rope_theta"], None
    factor, original = rope["factor"], rope.get("original_max_position_embeddings")
    if original is None:
        raise ValueError(
            "rope_parameters in config.json must have original_max_position_embeddings, "
            f"got {rope!r}"
        )
    return rope["rope_theta"], f"yarn:{factor}:{original}"


READERS: Mapping[str, Callable[[Any], _Options]] = {
    "kimi_linear": _kimi_linear,
    "qwen3_next": _qwen3_next,
}
"""The functions that read a config.json, by its model_type."""
