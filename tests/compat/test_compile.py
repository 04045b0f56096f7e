"""Functions of fla_cp.compat under torch.compile(fullgraph=True). FLA's break the graph."""

import pytest
import torch

from fla_cp import compat
from tests.support.closeness import assert_exact

# Dynamo makes an instance of each autograd.Function that it traces (torch 2.13)
pytestmark = pytest.mark.filterwarnings("ignore:.*should not be instantiated:DeprecationWarning")

T, H, K = 70, 2, 8


def test_a_layer_of_many_calls():
    torch._dynamo.reset()
    torch.manual_seed(0)
    context = compat.build_cp_context(torch.tensor([0, 30, T]), None, 4)
    conv = compat.ShortConvolution(H * K, 4, dtype=torch.float64)
    norm = compat.FusedRMSNormGated(K, dtype=torch.float64)

    def f(x, A_log, cp_context):
        k, _ = conv(x, cp_context=cp_context)
        k, raw = k.unflatten(-1, (H, K)), x.unflatten(-1, (H, K))
        g = compat.fused_kda_gate(raw, A_log, output_dtype=torch.float64)
        k, beta = compat.l2norm(k), x[..., :H].sigmoid()
        where = {"cp_context": cp_context, "chunk_size": 32}
        o, _ = compat.chunk_kda(k, k, raw, g, beta, **where)
        again, _ = compat.chunk_simple_gla(k, k, o, g_gamma=-A_log.exp(), **where)
        return norm(again, raw)

    def run(f):
        x = torch.randn(1, T, H * K, dtype=torch.float64, requires_grad=True)
        A_log = torch.zeros(H, dtype=torch.float64, requires_grad=True)
        y = f(x, A_log, context)
        return y.detach(), *torch.autograd.grad(y.square().sum(), (x, A_log))

    results = []
    for each in (f, torch.compile(f, fullgraph=True, backend="aot_eager")):
        torch.manual_seed(1)
        results.append(run(each))
    for name, expected, found in zip(("y", "dx", "dA_log"), *results, strict=True):
        assert_exact(name, found, expected)
