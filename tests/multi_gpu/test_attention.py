"""Softmax attention on N ranks equals one rank, and both equal fp64, with every exchange."""

import copy
from unittest.mock import patch

import pytest
import torch

from fla_cp import build_cp_context, causal_attention
from fla_cp.comm import keys_values
from fla_cp.comm.keys_values import SCHEMES
from fla_cp.kernels.torch import cudnn_attention
from fla_cp.nn import MultiHeadLatentAttention
from tests.support.attention_kernels import kernels_on_cpu, short_parts
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


def compare(group, rank, packing, heads, ranges, exchange, only=None):
    """only: the dtypes; None: all of this device."""
    device, offsets, (H, HK, K, V) = device_of(group), PACKINGS[packing], HEADS[heads]
    cu = torch.tensor(offsets, device=device)
    context = build_cp_context(cu, group, token_ranges=RANGES[ranges](T, group.size()), check=True)
    gen = torch.Generator().manual_seed(0)
    drawn = [torch.randn(1, T, *s, generator=gen) for s in ((H, K), (HK, K), (HK, V), (H, V))]
    dtypes = [torch.float64, torch.bfloat16]  # on a GPU bf16 runs flash attention
    if device.type == "cuda":
        dtypes.append(torch.float32)
    for dtype in only or dtypes:
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


def compare_parts(group, rank, ranges, exchange):
    """Attention in parts, as for long documents: by cuDNN on GPUs, and by stand-ins on CPUs."""
    given = group, rank, "odd places", "gqa", ranges, exchange
    with short_parts(32):
        if device_of(group).type == "cpu":
            with kernels_on_cpu() as kernels:
                compare(*given, only=[torch.float64])
            assert kernels.cudnn
            return
        forward = cudnn_attention.forward
        with patch.object(cudnn_attention, "forward", side_effect=forward) as called:
            compare(*given, only=[torch.bfloat16])
        hopper = torch.cuda.get_device_capability() == cudnn_attention.CAPABILITY
        assert called.called == hopper and not cudnn_attention._refused


@pytest.mark.parametrize("exchange, ranges", crossed(SCHEMES, RANGES))
def test_parts_on_ranks_equal_one(run, ranges, exchange):
    run(compare_parts, ranges, exchange)


def trained(layer, x, dy, **more):
    """y, and the gradients of x and the parameters."""
    x = x.detach().requires_grad_()
    y = layer(x, **more)
    return y.detach(), *torch.autograd.grad(y, [x, *layer.parameters()], dy)


def compare_latents(group, rank, packing, ranges, most):
    device, offsets = device_of(group), PACKINGS[packing]
    cu = torch.tensor(offsets, device=device)
    context = build_cp_context(cu, group, token_ranges=RANGES[ranges](T, group.size()), check=True)
    torch.manual_seed(0)
    layer = MultiHeadLatentAttention(64, 4)
    drawn = torch.randn(2, 1, T, 64)
    dtypes = [torch.float64, torch.bfloat16]
    if device.type == "cuda":
        dtypes.append(torch.float32)
    for dtype in dtypes:
        rounded = copy.deepcopy(layer).to(device, dtype)
        x, dy = drawn.to(device, dtype)
        exact = trained(copy.deepcopy(rounded).double(), x.double(), dy.double(), cu_seqlens=cu)
        one = trained(rounded, x, dy, cu_seqlens=cu)
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(keys_values, "MAX_GATHERED", most)
            y, dx, *grads = trained(
                rounded, context.shard(x), context.shard(dy), cp_context=context
            )
        for grad in grads:
            torch.distributed.all_reduce(grad, group=group)
        found = [context.unshard(y), context.unshard(dx), *grads]
        for i, (a, b, c) in enumerate(zip(found, exact, one, strict=True)):
            assert_close(f"result {i} in {dtype} on rank {rank}", a, b, c)


@pytest.mark.parametrize("packing, ranges, most", crossed(PACKINGS, RANGES, (0, 1 << 40)))
def test_latents_on_ranks_equal_one(run, packing, ranges, most):
    """Gathered, and in a ring, in which no more than one rank's are expanded at once."""
    run(compare_latents, packing, ranges, most)
