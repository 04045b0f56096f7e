"""Builds the model that --model names, sharded: our own decoder, or a model of transformers."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from fla_cp.train.config import ModelConfig
from fla_cp.train.distributed import Ranks
from fla_cp.train.model import Decoder, compile_blocks
from fla_cp.train.weights import allocate, initialise, on_meta

if TYPE_CHECKING:
    from fla_cp.train.stock import StockModel


def build_sharded(
    config: ModelConfig,
    vocab_size: int,
    seed: int | None,
    ranks: Ranks,
    dtype: torch.dtype,
    *,
    compiled: bool = True,
) -> Decoder | StockModel:
    """The model. This rank allocates only its own shard, on its device.

    seed: seed of the weights; None leaves them zero, for a checkpoint to fill. dtype: see
    `allocate`. compiled: whether compile="auto" may compile the blocks. vocab_size and compiled
    are ignored for a model of transformers.
    Raises UserError if the weights of hf:DIR do not fit.
    """
    if config.folder is not None:
        from fla_cp.train.stock import build_stock

        return build_stock(config, seed, ranks, dtype)
    with on_meta():
        model = Decoder(config, vocab_size)
    allocate(model, ranks, dtype)
    # Around a compiled block, a selective checkpoint would run the operators a second time.
    auto = compiled and ranks.device.type == "cuda" and config.remat != "selective"
    if config.compile == "on" or (config.compile == "auto" and auto):
        compile_blocks(model)
    if seed is not None:
        initialise(model, seed)
    return model
