"""Layers with a cache: prefill in chunks and steps equal the layer over the whole sequence."""

import re

import pytest
import torch
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

from fla_cp import build_cp_context
from fla_cp import nn as layers
from fla_cp.nn.cache import AttentionCache, RecurrentCache
from tests.support.closeness import assert_exact
from tests.support.fake_group import one_of
from tests.support.ranks import run_threads

HIDDEN, TOKENS = 24, 81
SIZES = HIDDEN, 2, 8
MAKE = {
    "kda": lambda: layers.KimiDeltaAttention(*SIZES, num_v_heads=4, head_v_dim=6),
    "gdn": lambda: layers.GatedDeltaNet(*SIZES, num_v_heads=4, head_v_dim=6),
    "comba": lambda: layers.Comba(*SIZES),
    "gdp": lambda: layers.GatedDeltaProduct(*SIZES),
    "gla": lambda: layers.GatedLinearAttention(*SIZES),
    "simple_gla": lambda: layers.SimpleGatedLinearAttention(*SIZES),
    "attention": lambda: layers.Attention(
        HIDDEN, 4, 2, 8, qk_norm=True, output_gate=True, rotary_dim=4
    ),
    "mla": lambda: latent(rope_theta=500.0, rope_scaling=layers.YaRN(4, 16), q_lora_rank=5),
    "mla-nope": lambda: latent(rope_theta=None),
}


def latent(**options):
    sizes = {"kv_lora_rank": 12, "qk_nope_head_dim": 6, "qk_rope_head_dim": 4, "v_head_dim": 5}
    return layers.MultiHeadLatentAttention(HIDDEN, 3, **sizes, **options)


def made(kind):
    torch.manual_seed(0)
    layer = MAKE[kind]().to(torch.float64)
    return layer, torch.randn(2, TOKENS, HIDDEN, dtype=torch.float64)


@pytest.mark.parametrize("kind", MAKE)
@pytest.mark.parametrize("cuts", [(1, 2, 68, 1, 9), (65, 1, 1, 14)])
@torch.no_grad()
def test_chunks_and_steps_equal_the_whole(kind, cuts):
    layer, x = made(kind)
    cache = layer.make_cache(2, TOKENS)
    y = torch.cat([layer(part, cache=cache) for part in x.split(list(cuts), 1)], 1)
    assert_exact("y", y, layer(x))


@pytest.mark.parametrize("kind", MAKE)
@torch.no_grad()
def test_rows_of_unequal_length_go_on_together(kind):
    layer, x = made(kind)
    caches = []
    for row, length in zip(x, (5, 70), strict=True):
        cache = layer.make_cache(1, TOKENS)
        layer(row[None, :length], cache=cache)
        caches.append(cache)
    cache = type(caches[0]).joined(caches)
    for step in range(6):
        now = torch.stack([x[0, 5 + step], x[1, 70 + step]])[:, None]
        y, whole = layer(now, cache=cache), layer(x)
        assert_exact("y", y[:, 0], torch.stack([whole[0, 5 + step], whole[1, 70 + step]]))


@pytest.mark.parametrize("kind", MAKE)
def test_ranks_share_the_tokens_of_a_call(kind):
    """Two calls with uneven shares, of which the second reads the first's cache; then a step, for
    which each rank has all tokens in its cache."""
    layer, x = made(kind)
    x = x[:1]
    whole = layer(x).detach()
    cuts = [[(0, 41), (41, 42), (42, 70)], [(70, 73), (73, 77), (77, 80)]]

    @torch.no_grad()
    def on_rank(group, rank):
        cache, found = layer.make_cache(1, TOKENS), []
        for ranges in cuts:
            begin, end = ranges[0][0], ranges[-1][1]
            context = build_cp_context(
                torch.tensor([0, end - begin]),
                group,
                conv1d_kernel_size=4,
                token_ranges=[[(a - begin, b - begin)] for a, b in ranges],
            )
            y = layer(context.shard(x[:, begin:end]), cp_context=context, cache=cache)
            found.append(context.unshard(y))
        found.append(layer(x[:, 80:], cache=cache))
        return torch.cat(found, 1)

    for y in run_threads(on_rank, 3):
        assert_exact("y", y, whole)


@pytest.mark.parametrize("kind", ["kda", "attention", "mla"])
@torch.no_grad()
def test_a_layer_that_fsdp_casts_updates_the_cache_of_the_caller(kind):
    """FSDP2 with mixed precision copies dataclasses among the arguments and casts their tensors."""
    layer, x = made(kind)
    expected = layer(x)
    cache = layer.make_cache(2, TOKENS)
    with one_of(1, 0):
        mesh = init_device_mesh("cpu", (1,))
        policy = MixedPrecisionPolicy(param_dtype=torch.float64)
        fully_shard(layer, mesh=mesh, mp_policy=policy)
        y = torch.cat([layer(part, cache=cache) for part in x.split([5, 1, TOKENS - 6], 1)], 1)
    assert_exact("y", y, expected)


def test_a_cache_is_of_one_sequence():
    layer, x = made("kda")
    context = build_cp_context(torch.tensor([0, 5, 9]), None, conv1d_kernel_size=4)
    message = "cp_context must have one sequence beside a cache, got 2"
    with torch.no_grad(), pytest.raises(ValueError, match=message):
        layer(x[:1, :9], cp_context=context, cache=layer.make_cache(1, 9))


@pytest.mark.parametrize("kind", ["kda", "attention", "mla"])
def test_calls_that_cannot_use_a_cache_are_refused(kind):
    layer, x = made(kind)
    cache = layer.make_cache(2, TOKENS)
    with pytest.raises(ValueError, match="while gradients are recorded"):
        layer(x, cache=cache)
    with torch.no_grad():
        with pytest.raises(ValueError, match="cache must be None with cu_seqlens"):
            layer(x[:1], cu_seqlens=torch.tensor([0, TOKENS]), cache=cache)
        layer(x[:, :3], cache=cache)
        with pytest.raises(ValueError, match="cache must have the 1 rows of x, got 2"):
            layer(x[:1, :3], cache=cache)
        other = made("attention" if kind == "kda" else "kda")[0].make_cache(2, TOKENS)
        message = f"cache must be {type(cache).__name__}, .* got {type(other).__name__}"
        with pytest.raises(ValueError, match=message):
            layer(x[:, :3], cache=other)


@pytest.mark.parametrize("kind", MAKE)
def test_a_cache_has_rows_and_room(kind):
    layer, _ = made(kind)
    for bad in (0, -1, 2.0, True, None):
        with pytest.raises(ValueError, match=f"^rows must be an integer from 1, got {bad}$"):
            layer.make_cache(bad, 20)
        with pytest.raises(ValueError, match=f"^capacity must be an integer from 1, got {bad}$"):
            layer.make_cache(2, bad)


@pytest.mark.parametrize("kind", ["attention", "mla"])
@torch.no_grad()
def test_a_cache_and_its_fixed_one_go_on_in_turn(kind):
    """Each sees the tokens that the other has read, also in joined caches and in errors."""
    layer, x = made(kind)
    cache, whole = layer.make_cache(2, TOKENS), layer(x)
    fixed = cache.fixed()
    taken = [fixed, cache, fixed, fixed, cache, cache]
    parts = [layer(part, cache=c) for part, c in zip(x.split(9, 1), taken, strict=False)]
    assert_exact("y", torch.cat(parts, 1), whole[:, :54])
    layer(x[:, 54:60], cache=fixed)
    joined = AttentionCache.joined([cache, fixed])
    assert joined.written == 60 and not joined.shared
    y = layer(torch.cat([x, x])[:, 60:], cache=joined)
    assert_exact("y", y, torch.cat([whole, whole])[:, 60:])
    with pytest.raises(ValueError, match="cache must have room for 82 tokens, got a capacity of"):
        layer(x[:, :22], cache=cache)


class Quantised(torch.nn.Module):
    """A projection to zeros whose weight is a method, as in torch.ao, or a tensor of integers."""

    def __init__(self, size, weight):
        super().__init__()
        self.size, self.weight = size, weight

    def forward(self, x):
        return x.new_zeros(*x.shape[:-1], self.size)


@pytest.mark.parametrize("kind, name", [("attention", "k_proj"), ("mla", "kv_down")])
@pytest.mark.parametrize("weight", [lambda: None, torch.ones(2, 2, dtype=torch.int8)])
def test_a_cache_of_a_quantised_layer(kind, name, weight):
    """It has the dtype of another parameter, or fp32 if there is none."""
    layer, x = made(kind)
    layer, x = layer.bfloat16(), x.bfloat16()
    setattr(layer, name, Quantised(len(getattr(layer, name).weight), weight))
    cache = layer.make_cache(2, TOKENS)
    assert (cache.keys.dtype, cache.values.dtype) == (torch.bfloat16, torch.bfloat16)
    with torch.no_grad():
        layer(x, cache=cache)
    for module in layer.modules():
        module._parameters.clear()
    assert layer.make_cache(2, TOKENS).keys.dtype == torch.float32


@torch.no_grad()
def test_a_full_cache_and_an_empty_one_are_named():
    layer, x = made("attention")
    cache = layer.make_cache(2, 4)
    layer(x[:, :3], cache=cache)
    message = "cache must have room for 5 tokens, got a capacity of 4"
    with pytest.raises(ValueError, match=re.escape(message)):
        layer(x[:, :2], cache=cache)
    assert isinstance(cache, AttentionCache)
    assert cache.lengths.tolist() == [3, 3]
    with pytest.raises(ValueError, match="must each have seen a token"):
        RecurrentCache.joined([RecurrentCache(), RecurrentCache()])
