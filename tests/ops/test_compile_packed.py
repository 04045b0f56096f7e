"""torch.compile without fullgraph=True of calls that no graph can hold: they run eagerly, and the
functions that they call may not leave out their offsets or states."""

import pytest
import torch

import fla_cp
from fla_cp import build_cp_context, nn
from tests.support.closeness import assert_exact

# Dynamo warns of much when it begins a graph in the middle of a call.
pytestmark = pytest.mark.filterwarnings("ignore")

T, H, K = 40, 2, 8
F64 = torch.float64
CU = torch.tensor([0, 13, T])
ON_HOST = {"cu_seqlens": CU, "cu_seqlens_cpu": CU}
FINAL = {"output_final_state": True}


def attention(x, **given):
    q = x.unflatten(-1, (H, K))
    return (fla_cp.causal_attention(q, q, q, **given),)


def conv(x, **given):
    weight = torch.linspace(-1, 1, 4 * H * K, dtype=F64).view(H * K, 4)
    found = fla_cp.causal_conv1d(x, weight, **given)
    return found if isinstance(found, tuple) else (found,)


def conv_after(x, **given):
    states = torch.linspace(-1, 1, 2 * 4 * H * K, dtype=F64).view(2, H * K, 4)
    return conv(x, initial_state=states, **FINAL, **given)


def recurrence(op, x, **given):
    q, beta = x.unflatten(-1, (H, K)), x[..., :H].sigmoid()
    return op(q, q, q, -q.square(), beta, use_qk_l2norm_in_kernel=True, **FINAL, **given)


CALLS = {
    "attention": (attention, {"cu_seqlens": CU}),
    "attention, offsets on the host": (attention, ON_HOST),
    "convolution": (conv, {"cu_seqlens": CU}),
    "convolution with a final state": (conv, {"cu_seqlens": CU, **FINAL}),
    "convolution after states": (conv_after, ON_HOST),
    "convolution with a final state under a context": (conv, {"cp_context": 4, **FINAL}),
    "convolution after states under a context": (conv_after, {"cp_context": 4}),
    "chunks": (lambda x, **more: recurrence(fla_cp.chunk_kda, x, **more), {"cu_seqlens": CU}),
    "steps": (
        lambda x, **more: recurrence(fla_cp.fused_recurrent_kda, x, **more),
        {"cu_seqlens": CU},
    ),
}


@pytest.mark.parametrize("name", CALLS)
def test_packed_calls_equal_eager_ones(name):
    call, given = CALLS[name]
    if "cp_context" in given:
        context = build_cp_context(CU, None, conv1d_kernel_size=given["cp_context"])
        given = {**given, "cp_context": context}

    def results(f):
        x = torch.randn(1, T, H * K, generator=torch.Generator().manual_seed(0), dtype=F64)
        found = [y for y in f(x.requires_grad_()) if y is not None]
        return [*found, *torch.autograd.grad(sum(y.square().sum() for y in found), x)]

    def run(x):
        return call(x, **given)

    torch._dynamo.reset()
    found, expected = results(torch.compile(run, backend="aot_eager")), results(run)
    for i, (a, b) in enumerate(zip(found, expected, strict=True)):
        assert_exact(f"result {i}", a, b)


@pytest.mark.parametrize("kind", ["kda", "attention", "latent"])
def test_packed_layers_equal_eager_ones(kind):
    layer = {
        "kda": lambda: nn.KimiDeltaAttention(32, 2, 16),
        "attention": lambda: nn.Attention(32, 2, head_dim=16),
        "latent": lambda: nn.MultiHeadLatentAttention(32, 2),
    }[kind]().double()
    x = torch.randn(1, T, 32, dtype=F64)
    torch._dynamo.reset()
    found = torch.compile(layer, backend="aot_eager")(x, cu_seqlens=CU)
    assert_exact("y", found, layer(x, cu_seqlens=CU))
