"""The kernels of a decoding step, interpreted on CPU, and its torch stages, against fp64."""

import pytest
import torch
import torch.nn.functional as F

from fla_cp.kernels import TORCH, resolve
from fla_cp.kernels.torch.decoding import StepMixer, StepProduct
from fla_cp.rule import DeltaRule
from tests.support.closeness import assert_exact, assert_within_budget

pytest.importorskip("triton")  # interpreted: conftest.py

from fla_cp.kernels.triton.launch import redirected

F32, F64, BF16 = torch.float32, torch.float64, torch.bfloat16


@pytest.fixture(autouse=True)
def interpreted(monkeypatch):
    monkeypatch.setenv("TRITON_INTERPRET", "1")


def draw(*shape, seed):
    gen = torch.Generator().manual_seed(seed)
    return torch.randn(*shape, generator=gen, dtype=F64)


PRODUCTS = {
    "plain": (1, 40, 48, {}),
    "normed": (1, 37, 2100, {"norm": True}),
    "several inputs with a bias": (2, 40, 24, {"bias": True}),
    "SwiGLU": (1, 2 * 19, 48, {"norm": True, "swiglu": True}),
    "added": (1, 40, 48, {"onto": True}),
    "SwiGLU, added": (1, 2 * 40, 48, {"swiglu": True, "onto": True}),
}


def drawn_product(name, B, dtype):
    """Rows of x are part of a wider tensor; inputs of different sizes."""
    G, R, C, parts = PRODUCTS[name]
    wide = draw(B, G * C + 16, seed=1) * torch.logspace(-1, 1, B, dtype=F64)[:, None]
    width = R // 2 if "swiglu" in parts else G * R
    drawn = {
        "norm": draw(C, seed=2).to(dtype),
        "bias": draw(G * R, seed=3).to(dtype),
        "onto": draw(B, width, seed=4).to(dtype),
        "swiglu": True,
    }
    return StepProduct(
        wide.to(dtype)[:, : G * C],
        (draw(G, R, C, seed=5) / C**0.5).to(dtype),
        eps=1e-2,
        **{name: drawn[name] for name in parts},
    )


def exact_product(p):
    p = StepProduct(*(t.double() if isinstance(t, torch.Tensor) else t for t in p))
    G, _, C = p.weight.shape
    x = p.x
    if p.norm is not None:
        x = x / (x.square().mean(-1, keepdim=True) + p.eps).sqrt() * p.norm
    y = torch.cat([x[:, g * C : (g + 1) * C] @ p.weight[g].T for g in range(G)], 1)
    y = y if p.bias is None else y + p.bias
    if p.swiglu:
        gate, up = y.chunk(2, 1)
        y = gate * torch.sigmoid(gate) * up
    return y if p.onto is None else p.onto + y


@pytest.mark.parametrize("B", [1, 3, 7])
@pytest.mark.parametrize("dtype", [F32, BF16], ids=str)
@pytest.mark.parametrize("name", PRODUCTS)
def test_products(name, dtype, B):
    """Up to 4 sequences one kernel, otherwise a product between kernels."""
    exact = exact_product(drawn_product(name, B, dtype))
    plain = TORCH.step_product(drawn_product(name, B, dtype))
    p = drawn_product(name, B, dtype)
    found = resolve("triton", p.x.device, dtype).step_product(p)
    assert found.dtype == dtype
    if p.onto is not None:
        assert found is p.onto
    for actual, e, b in zip(found, exact, plain, strict=True):
        assert_within_budget("y", actual, e, b, factor=4.0)


@pytest.mark.parametrize("name", PRODUCTS)
def test_torch_products_are_exact(name):
    p = drawn_product(name, 3, F64)
    exact = exact_product(p)
    assert_exact("y", TORCH.step_product(p), exact)


@pytest.mark.parametrize("impl, dtype, kept", [
    ("torch", F64, F64), ("triton", F32, F32), ("triton", BF16, BF16), ("triton", BF16, F32),
    ("triton", F32, BF16),
], ids=str)  # fmt: skip
@pytest.mark.parametrize("W", [1, 2, 3, 4, 9])
@pytest.mark.parametrize("silu, dense", [(True, False), (False, True)])
def test_convolution_of_a_token(impl, dtype, kept, W, silu, dense):
    """Channels of several programs; x is part of a wider tensor, and the cache is transposed or
    dense; nine taps are more than the kernel has."""
    N, D = 3, 150
    x, bias = draw(N, D + 8, seed=1).to(dtype)[:, :D], draw(D, seed=2).to(dtype)
    weight = draw(D, W, seed=3).to(dtype)
    cache = draw(N, W, D, seed=4).to(kept).mT
    cache = cache.contiguous() if dense else cache
    window = torch.cat([cache[:, :, 1:].to(dtype), x[:, :, None]], 2)
    after = torch.cat([cache[:, :, 1:], x[:, :, None].to(kept)], 2)
    exact = (window.double() * weight.double()).sum(2) + bias.double()
    exact = F.silu(exact) if silu else exact
    y = resolve(impl, x.device, dtype).conv_update(x, cache, weight, bias, silu)
    assert y.dtype == dtype
    assert torch.equal(cache[:, :, :-1], after[:, :, :-1])
    # the interpreter cuts digits off where a GPU rounds
    torch.testing.assert_close(cache, after, atol=0, rtol=torch.finfo(kept).eps)
    if dtype == F64:
        assert_exact("y", y, exact)
    else:
        assert_within_budget("y", y, exact, exact.to(dtype), factor=4.0)


ROWS = {
    "drawn": lambda x: x,
    "several of the largest": lambda x: x.round(),
    "zeros of both signs": lambda x: torch.where(x > 0, -0.0, torch.where(x > -1, 0.0, x)),
    "infinite": lambda x: torch.where(x > 2, torch.inf, x),
    "nothing but -inf": lambda x: torch.full_like(x, -torch.inf),
    "not a number": lambda x: torch.where(x.abs() > 2, -torch.nan, torch.inf),
    "below zero": lambda x: -x.abs() - 1,
}


@pytest.mark.parametrize("dtype", [F32, BF16, torch.float16], ids=str)
@pytest.mark.parametrize("N", [1, 70, 8192, 20001])
@pytest.mark.parametrize("name", ROWS)
def test_the_largest_of_a_row(name, N, dtype):
    """Up to three blocks of numbers; rows are part of a wider tensor. Of equal ones, the first."""
    x = ROWS[name](draw(3, N + 5, seed=N)).to(dtype)[:, :N]
    found = resolve("triton", x.device, dtype).argmax(x)
    assert found.dtype == torch.int64
    for row, index in zip(x.double(), found.tolist(), strict=True):
        wanted = row.isnan() if row.isnan().any() else row == row.max()
        assert index == wanted.nonzero()[0].item()


@pytest.mark.parametrize("rows, length, kernels", [(2, 90, 1), (2, 101, 0), (4, 101, 1), (0, 9, 0)])
def test_which_rows_take_the_kernel_of_the_largest(rows, length, kernels, monkeypatch):
    """Long rows do if there are many of them; torch reads a few long ones with several programs."""
    from fla_cp.kernels.triton import argmax

    monkeypatch.setattr(argmax, "LONG", 100)
    monkeypatch.setattr(argmax, "MANY", 4)
    names, x = [], draw(rows, length, seed=1).to(BF16)

    def run(kernel, grid, *given, **named):
        names.append(kernel.__name__)
        kernel[grid](*given)

    with redirected(run):
        found = argmax.argmax(x)
    assert names == ["argmax_kernel"] * kernels
    assert torch.equal(found, x.argmax(1))


MIXERS = {
    "KDA": {},
    "KDA, sigmoid, K > V": {"V": 16, "rule": {"gate": "sigmoid", "lower_bound": -5.0}},
    "KDA, K < V": {"V": 72, "rule": {"beta_factor": 2.0}},
    "GDN": {"rule": {"per_head": True}, "activation": "silu"},
    "GLA": {"bias": True, "rule": {"removal": "none", "beta_factor": None}},
    "simple GLA": {"rule": {"removal": "none", "beta_factor": None, "per_head": True}},
    "stages: taps": {"W": 9},
    "stages: value heads": {"G": 2},
    "stages: sequences": {"B": 5},
}


def drawn_mixer(name, dtype):
    """Inputs are parts of wider tensors, and the window is transposed."""
    of = {"B": 2, "G": 1, "V": 24, "W": 4, "bias": False} | MIXERS[name]
    B, H, K, V, W = of["B"], 3, 24, of["V"], of["W"]
    HV = H * of["G"]
    rule = {"gate": "softplus", "qk_l2norm": True, "beta_factor": 1.0} | of.get("rule", {})
    D, width = 2 * H * K + HV * V, HV if rule.get("per_head") else HV * K
    kept = F64 if dtype == F64 else F32
    return StepMixer(
        rule=DeltaRule(K**-0.5, **rule),
        qkv=draw(B, D + 8, seed=4).to(dtype)[:, :D],
        window=draw(B, W, D, seed=5).to(dtype).mT,
        taps=draw(D, W, seed=6).to(dtype),
        bias=draw(D, seed=7).to(dtype) if of["bias"] else None,
        state=draw(B, HV, K, V, seed=8).to(kept),
        decay=draw(B, width + 8, seed=9).to(dtype)[:, :width],
        gate=draw(B, HV * V + 8, seed=10).to(dtype)[:, : HV * V],
        beta=draw(B, HV + 8, seed=11).to(dtype)[:, :HV] if rule["beta_factor"] else None,
        A_log=draw(HV, seed=12).to(kept) / 4,
        dt_bias=draw(width, seed=13).to(kept) - 1,
        norm=draw(V, seed=14).to(dtype),
        eps=1e-5,
        activation=of.get("activation", "sigmoid"),
    )


@pytest.mark.parametrize("dtype", [F32, BF16], ids=str)
@pytest.mark.parametrize("name", MIXERS)
def test_mixers(name, dtype):
    """One kernel, or three where it does not take the sizes. The torch backend in fp64 is checked
    against a layer's call in tests/train/test_decoding.py."""
    plain, m = drawn_mixer(name, dtype), drawn_mixer(name, dtype)
    exact = StepMixer(*(t.double() if isinstance(t, torch.Tensor) else t for t in m))
    kernels = []

    def run(kernel, grid, *given, **named):
        kernels.append(kernel.__name__.removesuffix("_kernel"))
        kernel[grid](*given)

    with redirected(run):
        o = resolve("triton", m.qkv.device, dtype).step_mixer(m)
    assert o.dtype == dtype
    assert_within_budget("o", o, TORCH.step_mixer(exact), TORCH.step_mixer(plain), factor=4.0)
    assert_within_budget("state", m.state, exact.state, plain.state, factor=4.0)
    torch.testing.assert_close(m.window, plain.window, atol=0, rtol=torch.finfo(dtype).eps)
    stages = ["conv_update"] * (name != "stages: taps") + ["recurrent", "gated_norm"]
    assert kernels == (stages if name.startswith("stages") else ["step_mixer"])
