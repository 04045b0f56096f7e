"""Softmax attention on N ranks equals one rank, and both equal fp64, with every exchange."""

import pytest
import torch

from fla_cp import build_cp_context, causal_attention
from fla_cp.comm.keys_values import SCHEMES
from tests.support.ranks_against_one import RANGES, assert_close, device_of
from tests.support.sweeps import crossed

T = 520
PACKINGS = {"one document": (0, T), "odd places": (0, 1, 77, 77, 300, 519, T)}
HEADS = {"gqa": (16, 2, 64, 64), "mla": (8, 8, 96, 64)}
"""H, HK, K and V. 8 ranks divide the query heads."""


def results(x, do, **more):
    leaves = [t.detach().requires_grad_() for t in x]
    o = causal_attention(*leaves, **more)
    return o.detach(), *torch.autograd.grad(o, leaves, do)


def compare(group, rank, packing, heads, ranges, exchange):
    device, offsets, (H, HK, K, V) = device_of(group), PACKINGS[packing], HEADS[heads]
    cu = torch.tensor(offsets, device=device)
    context = build_cp_context(cu, group, token_ranges=RANGES[ranges](T, group.size()), check=True)
    gen = torch.Generator().manual_seed(0)
    drawn = [torch.randn(1, T, *s, generator=gen) for s in ((H, K), (HK, K), (HK, V), (H, V))]
    dtypes = [torch.float64]
    if device.type == "cuda":
        dtypes += [torch.float32, torch.bfloat16]  # bf16 runs flash attention
    for dtype in dtypes:
        *x, do = (t.to(device, dtype) for t in drawn)
        exact = results([t.double() for t in x], do.double(), cu_seqlens=cu)
        one = results(x, do, cu_seqlens=cu)
        local = [context.shard(t) for t in x]
        found = results(local, context.shard(do), cp_context=context, exchange=exchange)
        for name, a, b, c in zip(("o", "dq", "dk", "dv"), found, exact, one, strict=True):
            what = f"{name} in {dtype} on rank {rank}"
            assert_close(what, a, context.shard(b), context.shard(c))


@pytest.mark.parametrize(
    "exchange, ranges, heads, packing", crossed(SCHEMES, RANGES, HEADS, PACKINGS)
)
def test_ranks_equal_one(run, packing, heads, ranges, exchange):
    run(compare, packing, heads, ranges, exchange)
