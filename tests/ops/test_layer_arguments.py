"""Arguments of layers that would have no effect, or that no layer can use, are refused at once."""

import math
import re
from functools import partial

import pytest

from fla_cp import nn as layers
from fla_cp.nn.modules import GatedRMSNorm, RMSNorm
from fla_cp.nn.routing import Router

WITHOUT = "must be None in a layer without positions (rope_theta=None), got"
LAYERS = {
    "attention": partial(layers.Attention, 24, 2, head_dim=8),
    "mla": partial(layers.MultiHeadLatentAttention, 24, 2),
    "kda": partial(layers.KimiDeltaAttention, 24, 2, 8),
    "gdn": partial(layers.GatedDeltaNet, 24, 2, 8),
    "gdp": partial(layers.GatedDeltaProduct, 24, 2, 8),
}


@pytest.mark.parametrize("kind, name, value, shown", [
    ("attention", "rope_scaling", layers.YaRN(4, 128), "YaRN"),
    ("attention", "rope_scaling", "yarn", "'yarn'"),
    ("attention", "rotary_dim", 999, "999"),
    ("attention", "rotary_dim", 8, "8"),
    ("mla", "rope_scaling", layers.YaRN(4, 128), "YaRN"),
    ("mla", "rope_scaling", "yarn", "'yarn'"),
])  # fmt: skip
def test_options_of_positions_need_positions(kind, name, value, shown):
    with pytest.raises(ValueError, match=f"^{re.escape(f'{name} {WITHOUT} {shown}')}$"):
        LAYERS[kind](rope_theta=None, **{name: value})
    assert LAYERS[kind](rope_theta=None).rotary is None


@pytest.mark.parametrize("kind", LAYERS)
@pytest.mark.parametrize("value", [-1.0, "x", math.nan, math.inf, None, True])
def test_eps_of_norms_is_a_number_from_0(kind, value):
    rule = f"must be a finite number from 0, got {re.escape(repr(value))}$"
    with pytest.raises(ValueError, match=f"^norm_eps {rule}"):
        LAYERS[kind](norm_eps=value)
    for norm in (RMSNorm, GatedRMSNorm):
        with pytest.raises(ValueError, match=f"^eps {rule}"):
            norm(8, value)
        assert norm(8, 0).eps == 0


@pytest.mark.parametrize("value", [math.nan, math.inf, "2", 0.0, -1.0, None])
def test_a_scale_of_routing_is_a_number_above_0(value):
    message = f"^scale must be a finite number above 0, got {re.escape(repr(value))}$"
    for make in (partial(layers.Experts, 16, 8, 6, 2), partial(Router, 16, 6, 2)):
        with pytest.raises(ValueError, match=message):
            make(scale=value)
        make(scale=2)
