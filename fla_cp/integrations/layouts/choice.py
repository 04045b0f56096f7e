"""Which published model has a decoder's mixers."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

from torch import nn

from fla_cp.integrations.layouts import kimi_linear, qwen3_next
from fla_cp.integrations.layouts.table import Layout
from fla_cp.nn import Attention, GatedDeltaNet, KimiDeltaAttention, MultiHeadLatentAttention


class _Model(NamedTuple):
    name: str
    mixers: tuple[type[nn.Module], ...]
    layout: Callable[[Any], Layout]


_MODELS = (
    _Model(
        kimi_linear.MODEL, (KimiDeltaAttention, MultiHeadLatentAttention), kimi_linear.kimi_linear
    ),
    _Model(qwen3_next.MODEL, (GatedDeltaNet, Attention), qwen3_next.qwen3_next),
)


def layout_of(decoder: Any) -> Layout:
    """The layout of the published model whose mixers the decoder has.

    decoder: a `fla_cp.train.model.Decoder` or alike, on any device, the meta device included.
    Raises ValueError for mixers that no published model has together, and for what the model cannot
    express, with the block and the reason.
    """
    kinds: dict[type[nn.Module], int] = {}
    for i, block in enumerate(decoder.blocks):
        kinds.setdefault(type(block.mixer), i)
    for model in _MODELS:
        if set(kinds) <= set(model.mixers):
            return model.layout(decoder)
    known = "; ".join(
        f"{model.name} has {' and '.join(kind.__name__ for kind in model.mixers)}"
        for model in _MODELS
    )
    got = " and ".join(f"{kind.__name__} (block {i})" for kind, i in kinds.items())
    raise ValueError(f"no published layout has the mixers of this model, {got}: {known}")
