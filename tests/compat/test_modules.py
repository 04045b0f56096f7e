"""Convolution, norms and gates of fla_cp.compat, against plain torch."""

from itertools import pairwise

import pytest
import torch
import torch.nn.functional as F

from fla_cp import compat, gdn_gate, kda_gate
from tests.support.closeness import assert_exact, assert_within_budget
from tests.support.fla_record import by_position
from tests.support.ranks import run_threads

D, W, T = 6, 4, 12
F64 = torch.float64
CU = (0, 5, 6, 12)


def draw(*shape, seed=0):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=F64)


def leaves():
    """x, weight, bias, residual, initial_state."""
    shapes = (1, T, D), (D, W), (D,), (1, T, D), (3, D, W)
    return [draw(*s, seed=i).requires_grad_() for i, s in enumerate(shapes)]


def plain(x, weight, bias, residual, state, activation="silu"):
    """y, and the final states, of the documents of CU."""
    y, final = [], []
    for n, (lo, hi) in enumerate(pairwise(CU)):
        tokens = torch.cat((state[n], x[0, lo:hi].mT), 1)
        y.append(F.conv1d(tokens[:, 1:], weight[:, None], bias, groups=D).mT)
        final.append(tokens[:, -W:])
    y = torch.cat(y)[None]
    return (F.silu(y) if activation else y) + residual, torch.stack(final)


@pytest.mark.parametrize("activation", ["silu", "swish", None])
def test_the_convolution_by_position(activation):
    given = leaves()
    where = {"cu_seqlens": torch.tensor(CU), "cu_seqlens_cpu": torch.tensor(CU)}
    x, weight, bias, residual, state = given
    y, final = compat.causal_conv1d(
        x, weight, bias, residual, state, True, activation, "cuda", *where.values()
    )
    exact = plain(*given, activation)
    for name, a, b in zip(("y", "final_state"), (y, final), exact, strict=True):
        assert_exact(name, a.detach(), b.detach())
    grads = draw(*y.shape, seed=7), draw(*final.shape, seed=8)
    pairs = [torch.autograd.grad(out, given, grads) for out in ((y, final), exact)]
    for name, a, b in zip(("x", "weight", "bias", "residual", "state"), *pairs, strict=True):
        assert_exact(name, a, b)


def test_no_final_state_is_none():
    x, weight, *_ = leaves()
    assert compat.causal_conv1d(x, weight)[1] is None
    assert compat.causal_conv1d(x, weight, residual=x, output_final_state=None)[1] is None


def test_tokens_in_heads():
    x, weight, bias, residual, _ = (t.detach() for t in leaves())
    flat, _ = compat.causal_conv1d(x, weight, bias, residual)
    heads = (t.view(1, T, 2, 3) for t in (x, residual))
    y, _ = compat.causal_conv1d(next(heads), weight, bias, next(heads))
    assert_exact("y", y, flat.view(1, T, 2, 3))
    cache = draw(1, D, W, seed=9)
    step = compat.causal_conv1d_update(x[:, :1].view(1, 1, 2, 3), cache.clone(), weight=weight)[0]
    exact, _ = compat.causal_conv1d(x[:, :1], weight, initial_state=cache)
    assert_exact("step", step, exact.view(1, 1, 2, 3))


def test_weights_of_another_dtype():
    x, weight, bias, *_ = (t.detach().float() for t in leaves())
    half = x.bfloat16()
    y, _ = compat.causal_conv1d(half, weight, bias)
    expected, _ = compat.causal_conv1d(half, weight.bfloat16(), bias.bfloat16())
    assert y.dtype == torch.bfloat16
    exact, _ = compat.causal_conv1d(half.float(), weight, bias)
    assert_within_budget("y", y, exact.double(), expected)


REFUSED = [
    ({"backend": "nki"}, "backend must be 'triton', 'cuda' or 'mix', got 'nki'"),
    ({"seq_idx": torch.zeros(1, T)}, "seq_idx must be None, got Tensor: pass cu_seqlens"),
    ({"weight": None}, "weight must be a tensor, got None"),
]


@pytest.mark.parametrize("keywords, message", REFUSED)
def test_what_the_convolution_refuses(keywords, message):
    x, weight, *_ = leaves()
    with pytest.raises(ValueError, match=message):
        compat.causal_conv1d(**({"x": x, "weight": weight} | keywords))
    with pytest.raises(TypeError, match="unexpected keyword argument 'padding'"):
        compat.causal_conv1d(x, weight, padding=3)


def layer(**options):
    torch.manual_seed(0)
    return compat.ShortConvolution(D, W, dtype=F64, **options)


@pytest.mark.parametrize("bias, activation", [(False, "silu"), (True, None)])
def test_the_layer_has_the_weights_of_fla(bias, activation):
    conv = layer(bias=bias, activation=activation)
    assert isinstance(conv, torch.nn.Conv1d)
    assert {n: tuple(p.shape) for n, p in conv.state_dict().items()} == (
        {"weight": (D, 1, W)} | ({"bias": (D,)} if bias else {})
    )
    assert conv.state_size == D * W
    x = draw(2, T, D)
    y, final = conv(x)
    exact = F.conv1d(F.pad(x.mT, (W - 1, 0)), conv.weight, conv.bias, groups=D).mT
    assert_exact("y", y.detach(), (F.silu(exact) if activation else exact).detach())
    assert final is None


def test_the_layer_masks_tokens_and_leaves_x():
    x, mask = draw(2, T, D), torch.ones(2, T)
    mask[1, :3] = 0
    before = x.clone()
    conv = layer()
    y, _ = conv(x, None, mask)
    assert_exact("y", y.detach(), conv(x * mask[..., None])[0].detach())
    assert_exact("x", x, before)
    with pytest.raises(ValueError, match="mask must be None beside cu_seqlens"):
        conv(x[:1], mask=mask[:1], cu_seqlens=torch.tensor([0, T]))


@torch.no_grad()
@pytest.mark.parametrize("packed", [False, True])
def test_prefill_then_steps_in_place(packed):
    conv, x = layer(bias=True), draw(3, T, D)
    whole, _ = conv(x)
    _, cache = conv(x[:, : T - 2], output_final_state=True)
    for t in (T - 2, T - 1):
        if packed:
            cu = torch.arange(4)
            y, same = conv(x[None, :, t], None, None, cache, True, cu)
            y = y[0]
        else:
            y, same = conv(x[:, t : t + 1], cache=cache, output_final_state=True)
            y = y[:, 0]
        assert same is cache
        assert_exact("y", y, whole[:, t])
    assert_exact("cache", cache, x[:, -W:].mT)
    y, none = conv.step(x[:, :1], None, None)
    assert none is None
    assert_exact("first", y, whole[:, :1])


def test_a_cache_is_not_changed_while_gradients_are_recorded():
    conv, x, cache = layer(), draw(3, 1, D), draw(3, D, W, seed=1)
    before = cache.clone()
    y, final = conv(x, cache=cache, output_final_state=True)
    y.sum().backward()
    assert conv.weight.grad.abs().sum() > 0
    assert_exact("cache", cache, before)
    assert_exact("final", final, torch.cat((before[..., 1:], x.mT), 2))


def test_the_layer_under_a_context():
    conv, x, cache = layer(), draw(1, T, D), draw(3, D, W, seed=1)
    whole, final = conv(x, cache=cache, output_final_state=True, cu_seqlens=torch.tensor(CU))

    def f(group, rank):
        context = compat.build_cp_context(torch.tensor(CU), group, W)
        mine = context.shard(x)
        given = {"cu_seqlens": context.cu_seqlens, "cp_context": context}
        y, state = conv(mine, cache=cache, output_final_state=True, **given)
        return context.shard(whole) - y, state

    for error, state in run_threads(f, 3):
        assert_exact("y", error.detach(), torch.zeros_like(error))
        assert_exact("final_state", state.detach(), final.detach())


def test_what_the_layer_refuses():
    with pytest.raises(ValueError, match="activation must be None, 'silu' or 'swish', got 'relu'"):
        layer(activation="relu")
    with pytest.raises(ValueError, match="backend must be 'triton' or 'cuda', got 'mix'"):
        layer(backend="mix")
    with pytest.raises(TypeError, match="unexpected keyword argument 'stride'"):
        layer(stride=2)
    with pytest.warns(DeprecationWarning, match="use_fast_conv1d is deprecated"):
        layer(use_fast_conv1d=True)


@pytest.mark.parametrize("activation", ["swish", "silu", "sigmoid"])
def test_the_gated_norm(activation):
    norm = compat.FusedRMSNormGated(D, True, 1e-5, activation, None, F64)
    with torch.no_grad():
        norm.weight.copy_(draw(D, seed=3))
    x, g = draw(2, T, D), draw(2, T, D, seed=1)
    act = torch.sigmoid if activation == "sigmoid" else F.silu
    exact = F.rms_norm(x, (D,), norm.weight, 1e-5) * act(g)
    assert_exact("y", norm(x, g).detach(), exact.detach())
    assert [*norm.state_dict()] == ["weight"]
    assert norm.weight.dtype == F64
    norm.reset_parameters()
    assert_exact("weight", norm.weight.detach(), torch.ones(D, dtype=F64))
    with pytest.raises(ValueError, match="residual must be None, got Tensor: add it to x"):
        norm(x, g, x)
    with pytest.raises(ValueError, match="prenorm must be False, got True"):
        norm(x, g, prenorm=True)


def test_what_the_gated_norm_refuses():
    with pytest.raises(ValueError, match="elementwise_affine must be True, got False"):
        compat.FusedRMSNormGated(D, elementwise_affine=False)
    with pytest.raises(ValueError, match="activation must be 'swish', 'silu' or 'sigmoid'"):
        compat.FusedRMSNormGated(D, activation="gelu")


def test_the_l2_norm():
    x = draw(3, 5, D).requires_grad_()
    y = compat.l2norm(x, 0.5)
    exact = x / (x.square().sum(-1, keepdim=True) + 0.5).sqrt()
    assert_exact("y", y.detach(), exact.detach())
    half = x.detach().bfloat16()
    assert compat.l2norm(half).dtype == torch.bfloat16
    wide = compat.l2norm(half, 1e-6, torch.float32)
    assert wide.dtype == torch.float32
    assert_within_budget(
        "wide", wide, F.normalize(half.double(), dim=-1), F.normalize(half.float(), dim=-1)
    )
    y.sum().backward()
    assert x.grad is not None


def test_the_gates():
    HV, K = 3, 4
    g, A_log, dt_bias = draw(1, T, HV, K), draw(HV, seed=1), draw(HV * K, seed=2)
    as_kimi = A_log.view(1, 1, HV, 1)
    found = by_position("fused_kda_gate", g=g, A_log=as_kimi, dt_bias=dt_bias, output_dtype=F64)
    assert_exact("kda", found, kda_gate(g, A_log, dt_bias))
    bounded = compat.fused_kda_gate(g, None, dt_bias, -5.0)
    assert bounded.dtype == torch.float32
    exact = kda_gate(g, None, dt_bias, lower_bound=-5.0)
    assert_within_budget("bounded", bounded, exact, exact.float())
    head = compat.fused_gdn_gate(g[..., 0], A_log, dt_bias[:HV], F64)
    assert_exact("gdn", head, gdn_gate(g[..., 0], A_log, dt_bias[:HV]))
    narrow = compat.fused_gdn_gate(g[..., 0].bfloat16(), A_log.bfloat16())
    assert narrow.dtype == torch.float32


@pytest.mark.parametrize("bad", [None, 1.5], ids=str)
def test_what_norm_and_gate_refuse(bad):
    with pytest.raises(ValueError, match=f"x must be a tensor, got {bad}"):
        compat.l2norm(bad)
    with pytest.raises(ValueError, match=f"A_log must be a tensor, got {bad}"):
        compat.fused_gdn_gate(draw(1, T, 2), bad)


CALLS = {
    "x": ({"x": None}, "x must be a tensor, got None"),
    "channels": ({"x": torch.zeros(2, T, 3)}, r"x must be \[B, T, 5\], got shape \(2, 12, 3\)"),
    "mask": ({"mask": 1}, "mask must be a tensor, got 1"),
    "tokens of mask": (
        {"mask": torch.ones(2, T - 1)},
        r"mask must be \[B, T\] = \(2, 12\) on x's device cpu, got \(2, 11\) on cpu",
    ),
    "device of mask": ({"mask": torch.ones(2, T, device="meta")}, "got .* on meta"),
    "cache": ({"cache": 1}, "cache must be a tensor, got 1"),
    "rows of cache": (
        {"cache": torch.zeros(1, 5, 4)},
        r"cache must have shape \[N, D, W\] = \(2, 5, 4\), got \(1, 5, 4\)",
    ),
    "flag": ({"output_final_state": "no"}, "output_final_state must be True or False, got 'no'"),
}


@pytest.mark.parametrize("given, message", CALLS.values(), ids=CALLS)
def test_what_a_call_of_the_layer_refuses(given, message):
    conv = compat.ShortConvolution(5, 4)
    with pytest.raises(ValueError, match=message):
        conv(**{"x": torch.zeros(2, T, 5), **given})


def test_sizes_of_modules_are_counts():
    for sizes, message in (((0, 4), "hidden_size must be"), ((5, 0), "kernel_size must be")):
        with pytest.raises(ValueError, match=message):
            compat.ShortConvolution(*sizes)
    with pytest.raises(ValueError, match="hidden_size must be"):
        compat.FusedRMSNormGated("8")
    with pytest.raises(ValueError, match="x must be a tensor, got None"):
        compat.ShortConvolution(5, 4).step(None, None, None)


def test_shapes_of_the_gated_norm():
    norm = compat.FusedRMSNormGated(D)
    with pytest.raises(ValueError, match="x must be a tensor, got None"):
        norm(None, torch.zeros(2, D))
    with pytest.raises(ValueError, match=rf"x must be \[.., {D}\], got shape \(2, 1\)"):
        norm(torch.zeros(2, 1), torch.zeros(2, 1))
    with pytest.raises(ValueError, match="g must have x's shape"):
        norm(torch.zeros(2, D), torch.zeros(3, D))
