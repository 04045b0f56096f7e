"""The kernels of the convolution and of the gate alone, interpreted on CPU, against fp64."""

import pytest
import torch

from fla_cp import build_cp_context, causal_conv1d, kda_gate, zigzag_token_ranges
from tests.support.closeness import assert_within_budget
from tests.support.sweeps import crossed

pytest.importorskip("triton")  # interpreted: conftest.py

F32, F64 = torch.float32, torch.float64


@pytest.fixture(autouse=True)
def interpreted(monkeypatch):
    monkeypatch.setenv("TRITON_INTERPRET", "1")


def draw(*shape, seed):
    gen = torch.Generator().manual_seed(seed)
    return torch.randn(*shape, generator=gen, dtype=F64).to(F32)


def results(call, leaves, dy, dtype, **options):
    """Output and gradients of a call in `dtype`, None for what is missing."""
    leaves = [None if x is None else x.to(dtype).requires_grad_() for x in leaves]
    y = call(*leaves, **options)
    given = [x for x in leaves if x is not None]
    return [y.detach(), *torch.autograd.grad(y, given, dy.to(y.dtype))]


def compare(call, leaves, dy, **options):
    runs = [
        results(call, leaves, dy, dtype, impl=impl, **options)
        for dtype, impl in ((F32, "triton"), (F64, "torch"), (F32, "torch"))
    ]
    for i, (actual, exact, plain) in enumerate(zip(*runs, strict=True)):
        if i < 2:  # y and dx
            assert_within_budget(f"result {i}", actual, exact, plain, factor=4.0)
        else:  # sums over tokens of terms of both signs: the terms round, not the result
            error, terms = (actual - exact).abs().max(), dy.numel() * dy.abs().mean()
            assert error <= 2 * torch.finfo(F32).eps * terms, f"result {i}: {error}"


@pytest.mark.parametrize("W, how, cu", crossed(
    [1, 2, 4, 8, 9], [("silu", True), (None, False)], [(0, 1, 3, 3, 40), (0, 40), (0, 2)]
), ids=str)  # fmt: skip
def test_convolution(W, how, cu):
    activation, bias = how
    T, D = cu[-1], 130  # channels over one block, tokens over several tiles
    leaves = draw(1, T, D, seed=1), draw(D, W, seed=2), draw(D, seed=3) if bias else None
    options = {"activation": activation, "cu_seqlens": torch.tensor(cu)}
    compare(causal_conv1d, leaves, draw(1, T, D, seed=4), **options)


def test_convolution_of_rows_and_views():
    wide = draw(3, 20, 50, seed=1)
    weight, dy = draw(24, 4, seed=2), draw(3, 20, 24, seed=3)
    y, dx, dweight = results(
        lambda x, w, **o: causal_conv1d(x[..., 10:34], w, **o), (wide, weight), dy, F32,
        impl="triton",
    )  # fmt: skip
    cut = wide[..., 10:34].contiguous()
    exact = results(causal_conv1d, (cut, weight), dy, F64, impl="torch")
    plain = results(causal_conv1d, (cut, weight), dy, F32, impl="triton")
    found = y, dx[..., 10:34], dweight
    for name, *values in zip(("y", "dx", "dweight"), found, exact, plain, strict=True):
        assert_within_budget(name, *values)


def test_convolution_dtypes():
    x, weight = draw(1, 30, 8, seed=1).bfloat16(), draw(8, 4, seed=2).bfloat16()
    y = causal_conv1d(x, weight, impl="triton")
    exact = causal_conv1d(x.double(), weight.double())
    assert y.dtype == torch.bfloat16
    assert (y - exact).abs().max() <= 2**-8 * exact.abs().max()


def sharded(group, rank, ranges):
    cu, T, D, W = (0, 2, 3, 3, 30, 41), 41, 6, 4
    x, weight, bias, dy = (
        draw(*s, seed=i) for i, s in enumerate(((1, T, D), (D, W), (D,), (1, T, D)))
    )
    context = build_cp_context(torch.tensor(cu), group, conv1d_kernel_size=W, token_ranges=ranges)
    call = {"activation": "silu"}
    whole = results(causal_conv1d, (x, weight, bias), dy, F64, cu_seqlens=torch.tensor(cu), **call)
    local = results(
        causal_conv1d,
        (context.shard(x), weight, bias),
        context.shard(dy),
        F32,
        cp_context=context,
        impl="triton",
        **call,
    )
    for a, b in zip(local[:2], whole[:2], strict=True):
        b = context.shard(b)
        assert (a - b).abs().max() <= 1e-5 * b.abs().max() if a.numel() else b.numel() == 0
    return [t.double() for t in local[2:]], whole[2:]


@pytest.mark.parametrize(
    "ranges",
    [None, zigzag_token_ranges(41, 3), [[(40, 41), (2, 4)], [(0, 2), (4, 40)], []]],
    ids=["plain", "zigzag", "one rank without"],
)
def test_convolution_over_ranks(gloo_pool, ranges):
    found = gloo_pool.run(sharded, ranges, world_size=3)
    for i, exact in enumerate(found[0][1]):
        total = sum(mine[i] for mine, _ in found)
        assert (total - exact).abs().max() <= 1e-5 * exact.abs().max()


@pytest.mark.parametrize(
    "bound, rates",
    [(None, "both"), (None, "A_log"), (-5.0, "both"), (-5.0, "A_log"), (-5.0, "dt_bias")],
)
def test_gate(bound, rates):
    H, K, T = 2, 24, 300  # two programs of the backward
    g, dout = draw(T, H, K, seed=1) * 8, draw(T, H, K, seed=2)
    A_log = draw(H, seed=3) if rates != "dt_bias" else None
    dt_bias = draw(H * K, seed=4) if rates != "A_log" else None
    compare(kda_gate, (g, A_log, dt_bias), dout, lower_bound=bound)


def test_gate_of_any_rank_and_of_bf16():
    g, A_log = draw(2, 3, 5, 2, 8, seed=1).bfloat16().requires_grad_(), draw(2, seed=2)
    out = kda_gate(g, A_log, impl="triton")
    exact = kda_gate(g.double(), A_log.double())
    assert out.dtype == F32
    assert out.shape == g.shape
    assert (out - exact).abs().max() <= 1e-6 * exact.abs().max()
    (dg,) = torch.autograd.grad(out.sum(), g)
    (exact_dg,) = torch.autograd.grad(exact.sum(), g)
    assert dg.dtype == torch.bfloat16
    assert (dg.double() - exact_dg).abs().max() <= 2**-7 * exact_dg.abs().max()
