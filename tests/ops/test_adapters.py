"""A projection with an adapter, hooks or a bias is called in every path of a layer."""

import pytest
import torch

from fla_cp import build_cp_context
from fla_cp.comm import keys_values
from fla_cp.nn import MultiHeadLatentAttention
from tests.support.adapters import CHANGES
from tests.support.closeness import assert_exact
from tests.support.ranks import run_threads

T, HIDDEN = 50, 24
SIZES = {"kv_lora_rank": 12, "qk_nope_head_dim": 6, "qk_rope_head_dim": 4, "v_head_dim": 5}
changed = pytest.mark.parametrize("change", CHANGES)


def latent(change):
    """A layer of latent attention with a changed kv_up, x, and the result of the plain call, which
    differs from that of the unchanged layer."""
    torch.manual_seed(0)
    layer = MultiHeadLatentAttention(HIDDEN, 3, **SIZES).double()
    x = torch.randn(1, T, HIDDEN, dtype=torch.float64)
    before = layer(x).detach()
    CHANGES[change](layer, "kv_up")
    y = layer(x).detach()
    assert (y - before).norm() > 0.1 * before.norm()
    return layer, x, y


@changed
@pytest.mark.parametrize("fixed", [False, True])
@torch.no_grad()
def test_a_cache_keeps_what_kv_up_expands(change, fixed):
    """In prefill and in steps, also with a cache for graphs, which reads places that are empty."""
    layer, x, expected = latent(change)
    cache = layer.make_cache(1, T + 3)
    cache = cache.fixed() if fixed else cache
    parts = [layer(part, cache=cache) for part in x.split([20, 1, 28, 1], 1)]
    assert_exact("y", torch.cat(parts, 1), expected)


@changed
@pytest.mark.filterwarnings("ignore:.*should not be instantiated:DeprecationWarning")
@pytest.mark.filterwarnings("ignore:`torch.jit.script_method` is deprecated:DeprecationWarning")
def test_a_compiled_layer_calls_kv_up(change):
    """Also in the gradients."""
    torch._dynamo.reset()
    layer, x, expected = latent(change)
    context = build_cp_context(torch.tensor([0, T]), None)
    found = []
    for f in (layer, torch.compile(layer, fullgraph=True, backend="aot_eager")):
        y = f(x, cp_context=context)
        grads = torch.autograd.grad(y.square().sum(), list(layer.parameters()))
        assert_exact("y", y.detach(), expected)
        found.append(grads)
    for a, b in zip(*found, strict=True):
        assert_exact("gradient", b, a)


@changed
def test_ranks_call_kv_up_where_latents_would_go_round_in_a_ring(change, monkeypatch):
    monkeypatch.setattr(keys_values, "MAX_GATHERED", 0)
    layer, x, expected = latent(change)

    def on_rank(group, rank):
        context = build_cp_context(torch.tensor([0, T]), group)
        return context.unshard(layer(context.shard(x), cp_context=context)).detach()

    for y in run_threads(on_rank, 2):
        assert_exact("y", y, expected)


def compiled_on_ranks(group, rank, change):
    torch._dynamo.reset()
    layer, x, expected = latent(change)
    context = build_cp_context(torch.tensor([0, T]), group)
    run = torch.compile(layer, fullgraph=True, backend="aot_eager")
    assert_exact("y", context.unshard(run(context.shard(x), cp_context=context)).detach(), expected)


def test_a_compiled_layer_over_ranks_calls_kv_up(gloo_pool):
    gloo_pool.run(compiled_on_ranks, "adapted", world_size=2)
