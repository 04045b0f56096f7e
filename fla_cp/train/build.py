"""The model that --model names: our own decoder, or one of transformers."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from fla_cp.train.config import ModelConfig
from fla_cp.train.distributed import Ranks
from fla_cp.train.model import Decoder, build_sharded

if TYPE_CHECKING:
    from fla_cp.train.stock import StockModel


def build_language_model(
    config: ModelConfig,
    vocab_size: int,
    seed: int | None,
    ranks: Ranks,
    dtype: torch.dtype,
    *,
    compiled: bool = True,
) -> Decoder | StockModel:
    """The model, of which this rank allocates only its own shard, on its device.

    Arguments are those of `build_sharded`; `compiled` does not concern a model of transformers.
    Raises UserError if the weights of hf:DIR do not fit.
    """
    if config.folder is None:
        return build_sharded(config, vocab_size, seed, ranks, dtype, compiled=compiled)
    from fla_cp.train.stock import build_stock

    return build_stock(config, seed, ranks, dtype)
