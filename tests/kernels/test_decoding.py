"""The kernels of a decoding step, interpreted on CPU, and its torch stages, against fp64."""

import pytest
import torch
import torch.nn.functional as F

from fla_cp.kernels import TORCH, resolve
from fla_cp.kernels.torch.decoding import StepMixer, StepProduct
from fla_cp.rule import DeltaRule
from tests.support.closeness import assert_exact, assert_within_budget

pytest.importorskip("triton")  # interpreted: conftest.py

from fla_cp.kernels.triton import step_dot
from fla_cp.kernels.triton.launch import redirected

F16, F32, F64, BF16 = torch.float16, torch.float32, torch.float64, torch.bfloat16


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


@pytest.mark.parametrize("B", [1, 3, 7, 65])
@pytest.mark.parametrize("dtype", [F16, F32, BF16], ids=str)
@pytest.mark.parametrize("name", PRODUCTS)
def test_products(name, dtype, B):
    """Up to 4 sequences one kernel, up to 64 one that has products of fp16, otherwise a product
    between kernels."""
    exact = exact_product(drawn_product(name, B, dtype))
    plain = TORCH.step_product(drawn_product(name, B, dtype))
    p = drawn_product(name, B, dtype)
    found = resolve("triton", p.x.device, dtype).step_product(p)
    assert found.dtype == dtype
    if p.onto is not None:
        assert found is p.onto
    for actual, e, b in zip(found, exact, plain, strict=True):
        assert_within_budget("y", actual, e, b, factor=4.0)


@pytest.mark.parametrize("splits", [1, 2, 3])
@pytest.mark.parametrize("name", ["plain", "several inputs with a bias", "added"])
def test_products_of_split_columns(name, splits, monkeypatch):
    """Programs of the same rows add up, and leave zeros for the next call; several inputs are not
    split."""
    monkeypatch.setattr(step_dot, "MAX_SPLITS", splits)
    monkeypatch.setattr(step_dot, "COLUMNS", 16)
    counts = torch.zeros(3, dtype=torch.int32)
    seen = []
    with redirected(
        lambda kernel, grid, *given, **named: seen.append(grid) or kernel[grid](*given)
    ):
        for _ in range(2):
            p = drawn_product(name, 7, F16)._replace(come=counts)
            exact, plain = exact_product(p), TORCH.step_product(drawn_product(name, 7, F16))
            found = resolve("triton", p.x.device, F16).step_product(p)
            assert not counts.any()
            for actual, e, b in zip(found, exact, plain, strict=True):
                assert_within_budget("y", actual, e, b, factor=4.0)
    inputs = PRODUCTS[name][0]
    assert seen == [(1, splits if inputs == 1 else 1, inputs)] * 2


@pytest.mark.parametrize("name", PRODUCTS)
def test_torch_products_are_exact(name):
    p = drawn_product(name, 3, F64)
    exact = exact_product(p)
    assert_exact("y", TORCH.step_product(p), exact)


@pytest.mark.parametrize("impl, dtype, kept", [
    ("torch", F64, F64), ("triton", F32, F32), ("triton", BF16, BF16), ("triton", BF16, F32),
    ("triton", F32, BF16),
], ids=str)  # fmt: skip
@pytest.mark.parametrize("W", [1, 2, 4, 9])
@pytest.mark.parametrize("silu", [True, False])
def test_convolution_of_a_token(impl, dtype, kept, W, silu):
    """Channels of several programs; x is part of a wider tensor, and the cache is transposed; nine
    taps are more than the kernel has."""
    N, D = 3, 150
    x, bias = draw(N, D + 8, seed=1).to(dtype)[:, :D], draw(D, seed=2).to(dtype)
    weight = draw(D, W, seed=3).to(dtype)
    cache = draw(N, W, D, seed=4).to(kept).mT
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


MIXERS = {
    "KDA": {"low": True},
    "KDA, gate and decay given": {"rule": {"gate": "sigmoid", "lower_bound": -5.0}},
    "KDA, K != V": {"V": 16, "rule": {"beta_factor": 2.0}},
    "GDN, two value heads": {"G": 2, "rule": {"per_head": True}, "activation": "silu"},
    "GLA": {"beta": False, "bias": True, "rule": {"removal": "none", "beta_factor": None}},
    "simple GLA": {
        "beta": False,
        "rule": {"removal": "none", "beta_factor": None, "per_head": True},
    },
    "no kernel: taps": {"W": 9},
}


def drawn_mixer(name, B, dtype):
    """Inputs are parts of wider tensors, and the window is transposed."""
    of = {"G": 1, "V": 32, "W": 4, "low": False, "beta": True, "bias": False} | MIXERS[name]
    H, K, V, W = 3, 24 if of["V"] == 16 else 32, of["V"], of["W"]
    HV, C = H * of["G"], 20
    rule = {"gate": "softplus", "qk_l2norm": True, "beta_factor": 1.0} | of.get("rule", {})
    D, width = 2 * H * K + HV * V, HV if rule.get("per_head") else HV * K
    low = None
    if of["low"]:
        inner, second = draw(B, 2 * C + 8, seed=1)[:, : 2 * C], draw(2, HV * K, C, seed=2) / C**0.5
        bias = draw(2 * HV * K, seed=3)
        low = StepProduct(inner.to(dtype), second.to(dtype), bias=bias.to(dtype))
    kept = F64 if dtype == F64 else F32
    return StepMixer(
        rule=DeltaRule(K**-0.5, **rule),
        qkv=draw(B, D + 8, seed=4).to(dtype)[:, :D],
        window=draw(B, W, D, seed=5).to(dtype).mT,
        taps=draw(D, W, seed=6).to(dtype),
        bias=draw(D, seed=7).to(dtype) if of["bias"] else None,
        state=draw(B, HV, K, V, seed=8).to(kept),
        decay=None if low else draw(B, width + 8, seed=9).to(dtype)[:, :width],
        gate=None if low else draw(B, HV * V + 8, seed=10).to(dtype)[:, : HV * V],
        low=low,
        beta=draw(B, HV + 8, seed=11).to(dtype)[:, :HV] if of["beta"] else None,
        A_log=draw(HV, seed=12).to(kept) / 4,
        dt_bias=draw(width, seed=13).to(kept) - 1,
        norm=draw(V, seed=14).to(dtype),
        eps=1e-5,
        activation=of.get("activation", "sigmoid"),
    )


@pytest.mark.parametrize("B", [1, 5])
@pytest.mark.parametrize("dtype", [F32, BF16], ids=str)
@pytest.mark.parametrize("name", MIXERS)
def test_mixers(name, dtype, B):
    """One kernel for all stages up to four sequences, with the low-rank product in half precision;
    then another for the product. The torch backend in fp64 is checked against a layer's call in
    tests/train/test_decoding.py."""
    if B == 5 and dtype == BF16 and not MIXERS[name].get("low"):
        pytest.skip("like one sequence")
    exact = drawn_mixer(name, B, dtype)
    exact = StepMixer(*(
        StepProduct(*(doubled(t) for t in x)) if isinstance(x, StepProduct) else doubled(x)
        for x in exact
    ))  # fmt: skip
    plain, m = drawn_mixer(name, B, dtype), drawn_mixer(name, B, dtype)
    found, kernels = {}, []

    def run(kernel, grid, *given, **named):
        kernels.append(kernel.__name__)
        kernel[grid](*given)

    for which, backend in (("exact", TORCH), ("plain", TORCH), ("m", None)):
        each = {"exact": exact, "plain": plain, "m": m}[which]
        with redirected(run):
            backend = backend or resolve("triton", each.qkv.device, dtype)
            found[which] = backend.step_mixer(each)
    assert found["m"].dtype == dtype
    for n, (actual, e, b) in enumerate(
        zip(*(found[k] for k in ("m", "exact", "plain")), strict=True)
    ):
        assert_within_budget(f"o {n}", actual, e, b, factor=4.0)
    assert_within_budget("state", m.state, exact.state, plain.state, factor=4.0)
    torch.testing.assert_close(m.window, plain.window, atol=0, rtol=torch.finfo(dtype).eps)
    whole = ["step_mixer_kernel"]
    if name.startswith("no kernel"):
        whole = ["recurrent_kernel", "gated_norm_kernel"]
    elif m.low is not None and (B == 5 or dtype == F32):
        whole = ["step_product_kernel"] * (B <= 4) + whole
    assert kernels == whole


def doubled(x):
    return x.double() if isinstance(x, torch.Tensor) else x
