"""A local folder with a causal language model of transformers: reads and checks its config.json.
Nothing here imports transformers, so that mistakes are found at once."""

from __future__ import annotations

import json
import os
import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from fla_cp.integrations.safetensors_folder import INDEX, PICKLED, SINGLE, check_is_folder

STOCK_TYPES = ("kimi_linear", "qwen3_next", "qwen3_5_text", "qwen3_5_moe_text", "olmo_hybrid")
"""The `model_type` of folders that can be trained: those that `parallelize` knows."""

TOKENIZER_PATTERNS = (
    *("tokenizer*", "vocab.*", "merges.txt", "special_tokens_map.json", "added_tokens.json"),
    *("*.model", "*.tiktoken", "chat_template*", "*chat_templates/*.jinja"),
)
"""Files of a tokenizer. Kimi Linear has its vocabulary in tiktoken.model."""
UNTIE = "if the head is its own, set tie_word_embeddings in config.json to false"
"""Advice about a folder whose config.json ties the head to the embedding, although the folder has a
head that differs; see `check_copies`."""
_TOKENIZERS = ("tokenizer.json", "tokenizer_config.json", "tokenizer.model", "vocab.json")
_OTHER_MODALITIES = ("vision_config", "audio_config", "visual", "vision_tower")
_NEUTRAL = (
    *("architectures", "auto_map", "dtype", "torch_dtype", "transformers_version"),
    *("_name_or_path", "use_cache", "max_position_embeddings"),
    *("output_router_logits", "router_aux_loss_coef"),
)
"""Keys of config.json that do not change what the weights mean."""

ROPE_RULE = (
    "of a type whose frequencies are the same in every call, such as default, linear, yarn or "
    "llama3: each rank would choose others from the positions of its own tokens"
)


def varying_rope_type(value: Any) -> str | None:
    """The type of rotary positions in `value` whose frequencies depend on the tokens of a call;
    None if there is none.

    value: a type, or the entry of a configuration that has the type. Such an entry may have one
    entry for each type of layer.
    """
    if isinstance(value, Mapping):
        return next(filter(None, map(varying_rope_type, value.values())), None)
    varies = isinstance(value, str) and ("dynamic" in value or value == "longrope")
    return value if varies else None


def read_config_json(folder: str | os.PathLike[str]) -> dict[str, Any]:
    """The contents of the folder's config.json, which describes a model that can be trained.

    Raises ValueError, with the key and its value, for a folder without config.json, for a model
    that `parallelize` does not know, for quantised weights, towers of other modalities, dropout,
    soft caps, attention windows, and rotary positions whose frequencies depend on the call.
    """
    path = Path(folder) / "config.json"
    check_is_folder(folder)
    try:
        config = json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise ValueError(f"{path} cannot be read: {error.strerror}") from None
    except ValueError as error:
        raise ValueError(f"{path} must be JSON: {error}") from None
    if not isinstance(config, dict):
        raise ValueError(f"{path} must hold an object, got {type(config).__name__}")
    for name in _OTHER_MODALITIES:
        if config.get(name) is not None:
            raise ValueError(
                f"{path} must describe a text model, but it has {name}: vision and audio towers "
                "are not trained; save the text model alone, by "
                "AutoModelForCausalLM.from_pretrained(folder).save_pretrained(text_folder)"
            )
    for name in ("quantization_config", "compression_config"):
        if config.get(name) is not None:
            method = config[name].get("quant_method") if isinstance(config[name], dict) else None
            raise ValueError(
                f"{path} must describe weights that are not quantised, but it has {name}"
                + (f" ({method})" if method else "")
            )
    kind = config.get("model_type")
    if kind not in STOCK_TYPES:
        raise ValueError(f"{path} must have a model_type of {', '.join(STOCK_TYPES)}, got {kind!r}")
    for name, value, rule in _refused(config):
        raise ValueError(f"{path} must have {name} {rule}, got {value!r}")
    return config


def _refused(config: Mapping[str, Any]) -> Iterator[tuple[str, Any, str]]:
    """Keys with values that cannot be trained under a context: (key, value, rule)."""
    for name, value in config.items():
        if name in ("rope_parameters", "rope_scaling") and varying_rope_type(value) is not None:
            yield name, value, ROPE_RULE
        if "dropout" in name and value:
            yield name, value, "0"
        if re.search(r"soft_?cap", name) and value is not None:
            yield name, value, "left out"
        if (
            name == "sliding_window"
            and value is not None
            and config.get("use_sliding_window", True)
        ):
            yield name, value, "left out"


def has_weights(folder: str | os.PathLike[str]) -> bool:
    """Whether the folder has weights, in any format."""
    path = Path(folder)
    known = any((path / name).is_file() for name in (SINGLE, INDEX))
    return known or any(next(path.glob(kind), None) is not None for kind in PICKLED)


def has_tokenizer(folder: str | os.PathLike[str]) -> bool:
    """Whether the folder has a tokenizer."""
    return any((Path(folder) / name).is_file() for name in _TOKENIZERS)


def folder_facts(folder: str | os.PathLike[str]) -> dict[str, Any]:
    """The keys and values of config.json on which the meaning of the weights depends."""
    config = read_config_json(folder)
    return {name: value for name, value in config.items() if name not in _NEUTRAL}
