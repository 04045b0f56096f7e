"""A folder's model on the meta device, and its weights."""

from __future__ import annotations

import os
from typing import Any

import torch
from torch import nn

from fla_cp.integrations.safetensors_folder import TensorFolder, check_copies
from fla_cp.integrations.stock_folder import UNTIE
from fla_cp.integrations.stock_layout import Layout, layout_of, published_shapes


def open_stock(folder: str | os.PathLike[str]) -> Any:
    """The causal language model that the folder's config.json describes, with its own modules, on
    the meta device and in float32. No code of the folder runs.

    Raises ValueError if transformers refuses the configuration, or for a head with a bias.
    """
    from transformers import AutoConfig, AutoModelForCausalLM

    try:
        config = AutoConfig.from_pretrained(
            str(folder), local_files_only=True, trust_remote_code=False
        )
        with torch.device("meta"):
            stock = AutoModelForCausalLM.from_config(
                config, dtype=torch.float32, trust_remote_code=False
            )
    except Exception as error:  # transformers raises all kinds
        reason = str(error).strip().partition("\n")[0]
        raise ValueError(f"{folder}/config.json: {type(error).__name__}: {reason}") from error
    head: Any = stock.lm_head
    if not isinstance(head, nn.Linear) or getattr(head, "bias", None) is not None:
        raise ValueError(f"lm_head must be a linear layer without a bias, got {head}")
    return stock


def weights_of(stock: Any, folder: str | os.PathLike[str]) -> tuple[TensorFolder, Layout]:
    """The folder's tensors, and where those of the modules stand among them.

    stock: what `open_stock` returns, before anything changes its modules. Raises ValueError for
    weights that are missing, quantised, damaged or of another model, and for a head that differs
    from the embedding that it is tied to, which `check_copies` compares.
    """
    stored = TensorFolder(folder)
    for name, tensor in stored.tensors.items():
        if not tensor.dtype.is_floating_point or tensor.dtype.itemsize < 2:
            kind = str(tensor.dtype).removeprefix("torch.")
            raise ValueError(f"{name} must not be quantised, got {kind}")
    shapes = {name: tensor.shape for name, tensor in stored.tensors.items()}
    layout = layout_of(stock, shapes)
    check_copies(stored, layout.copies, UNTIE)
    stored.close()
    return stored, layout


def written_layout(stock: Any) -> Layout:
    """The layout that transformers would write for a model, whose folder need not have weights."""
    return layout_of(stock, published_shapes(stock))
