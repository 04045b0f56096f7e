"""Writes weights of a stock model as a folder in the published layout, one tensor at a time."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from fla_cp.integrations.safetensors_folder import SHARD_BYTES, new_folder, write_tensors
from fla_cp.integrations.stock_folder import TOKENIZER_PATTERNS, has_weights, read_config_json
from fla_cp.integrations.stock_layout import Layout
from fla_cp.integrations.stock_model import open_stock, weights_of, written_layout

ALWAYS_FP32 = ("A_log", "dt_bias", "e_score_correction_bias")
"""Endings of the names of tensors that stay float32, because bfloat16 is too coarse for them."""

_ALSO = ("generation_config.json",)


def export_stock(
    folder: str | os.PathLike[str],
    out: Path,
    whole: Callable[[str], Tensor],
    *,
    dtype: torch.dtype = torch.float32,
    shard_bytes: int = SHARD_BYTES,
) -> str:
    """Writes a trained model of the folder's kind to `out`; returns its `model_type`.

    folder: the folder that the training started from. config.json, the tokenizer and the names of
    the published tensors are taken from it; if it has no weights, the names are transformers' own.
    whole: (name of a parameter or buffer of the model) -> all of it, on the CPU. It is called once
    for each. dtype: of the weights; decays and biases of routers stay float32. shard_bytes: see
    `write_tensors`. At any time, the tensors of one file and one parameter are held, for example
    the experts of a layer.
    Raises ValueError for a folder that is gone or that `read_config_json` or `weights_of` refuses,
    and for an `out` that has files.
    """
    config = read_config_json(folder)
    stock = open_stock(folder)
    layout = weights_of(stock, folder)[1] if has_weights(folder) else written_layout(stock)
    with new_folder(out) as partial:
        _write_config(config, type(stock).__name__, dtype, partial)
        for pattern in (*_ALSO, *TOKENIZER_PATTERNS):
            for file in filter(Path.is_file, Path(folder).glob(pattern)):
                copy = partial / file.relative_to(folder)
                copy.parent.mkdir(exist_ok=True)
                shutil.copyfile(file, copy)
        write_tensors(partial, _published(layout, whole, dtype), shard_bytes)
    return str(config["model_type"])


def _write_config(config: dict[str, Any], kind: str, dtype: torch.dtype, folder: Path) -> None:
    """Writes config.json of the source, without references to code."""
    left = {name: x for name, x in config.items() if name not in ("auto_map", "torch_dtype")}
    own = {"architectures": [kind], "dtype": str(dtype).removeprefix("torch.")}
    text = json.dumps(left | own, indent=2, sort_keys=True) + "\n"
    (folder / "config.json").write_text(text, encoding="utf-8")


def _published(
    layout: Layout, whole: Callable[[str], Tensor], dtype: torch.dtype
) -> Iterator[tuple[str, Tensor]]:
    for target in layout.targets:
        exact = target.name.endswith(ALWAYS_FP32)
        for name, x in target.published(whole(target.name)):
            yield name, x if exact else x.to(dtype)
