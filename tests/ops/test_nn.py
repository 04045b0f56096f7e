"""The layers: equations, dtypes, short inputs, and the gradients of parameters over ranks."""

import copy
import re

import pytest
import torch
import torch.nn.functional as F
from torch.nn.utils import prune

import fla_cp.kernels
from fla_cp import build_cp_context
from fla_cp.kernels.torch.backend import TorchBackend
from fla_cp.nn import (
    Attention,
    Comba,
    Experts,
    GatedDeltaNet,
    GatedDeltaProduct,
    GatedLinearAttention,
    GatedRMSNorm,
    KDACore,
    KimiDeltaAttention,
    MultiHeadLatentAttention,
    ShortConvolution,
    SimpleGatedLinearAttention,
    SwiGLU,
)
from fla_cp.reference import recurrence
from tests.support.closeness import assert_exact

CU = (0, 30, 90, 150)


def layer(**options):
    torch.manual_seed(0)
    return KimiDeltaAttention(24, 2, 8, conv_size=4, **options).double()


def test_shapes_and_parameters():
    mixer = layer(num_v_heads=4, head_v_dim=6)
    x = torch.randn(2, 70, 24, dtype=torch.float64)
    assert mixer(x).shape == x.shape
    assert mixer.core.A_log.shape == (4,)
    assert mixer.core.dt_bias.shape == (4 * 8,)
    owners = {n.rsplit(".", 1)[0] for n, _ in mixer.named_parameters() if "core" in n}
    assert owners == {"core"}


def plain(mixer, x, factor, bound):
    """The layer as the report defines it, from torch's functions and the token recurrence."""
    W, H, HV, K, V = 4, mixer.num_heads, mixer.num_v_heads, mixer.head_dim, mixer.head_v_dim
    qkv = torch.cat([x @ p.weight.T for p in (mixer.q_proj, mixer.k_proj, mixer.v_proj)], -1)
    weight = mixer.qkv_conv.weight[:, None]
    mixed = F.conv1d(F.pad(qkv.mT, (W - 1, 0)), weight, groups=len(weight)).mT
    q, k, v = F.silu(mixed).split([H * K, H * K, HV * V], -1)
    q, k = (t.unflatten(-1, (H, K)) for t in (q, k))
    raw = mixer.f_proj(x).unflatten(-1, (HV, K)) + mixer.core.dt_bias.view(HV, K)
    rate = mixer.core.A_log.exp()[:, None]
    g = -rate * F.softplus(raw) if bound is None else bound * torch.sigmoid(rate * raw)
    beta = factor * torch.sigmoid(x @ mixer.b_proj.weight.T)
    o, _ = recurrence(q, k, v.unflatten(-1, (HV, V)), g, beta, use_qk_l2norm_in_kernel=True)
    o = o / (o.square().mean(-1, keepdim=True) + 1e-5).sqrt() * mixer.o_norm.weight
    return mixer.o_proj((o * torch.sigmoid(mixer.g_proj(x).unflatten(-1, (HV, V)))).flatten(-2))


@pytest.mark.parametrize("bound", [None, -5.0])
@pytest.mark.parametrize("factor", [1, 2])
def test_equals_the_report(factor, bound):
    mixer = layer(num_v_heads=4, head_v_dim=6, allow_neg_eigval=factor == 2, gate_lower_bound=bound)
    torch.nn.init.normal_(mixer.o_norm.weight)
    x = torch.randn(2, 70, 24, dtype=torch.float64)
    with torch.no_grad():
        assert_exact("y", mixer(x), plain(mixer, x, factor, bound))


def test_no_gate_bias_is_a_bias_of_zero():
    with_bias, without = layer(), layer(gate_bias=False)
    assert set(dict(with_bias.named_parameters())) - set(dict(without.named_parameters())) == {
        "g_proj.1.bias"
    }
    torch.nn.init.zeros_(with_bias.g_proj[1].bias)
    without.load_state_dict(with_bias.state_dict(), strict=False)
    x = torch.randn(2, 70, 24, dtype=torch.float64)
    with torch.no_grad():
        assert_exact("y", without(x), with_bias(x))
    with pytest.raises(ValueError, match="gate_bias must be"):
        layer(gate_bias=1)


def test_rows_equal_packed_sequences():
    mixer = layer()
    x = torch.randn(2, 70, 24, dtype=torch.float64)
    packed = mixer(x.view(1, 140, 24), cu_seqlens=torch.tensor([0, 70, 140]))
    assert_exact("y", mixer(x).view(1, 140, 24).detach(), packed.detach())


def test_causal():
    mixer = layer(gate_lower_bound=-5.0)
    x = torch.randn(1, 100, 24, dtype=torch.float64)
    changed = x.clone()
    changed[:, 50:] += 1
    a, b = mixer(x), mixer(changed)
    assert_exact("y before the change", b[:, :50], a[:, :50])
    assert not torch.allclose(a[:, 50:], b[:, 50:])


def test_gate_starts_where_the_report_puts_it():
    core = KDACore(64, 16)
    assert core.A_log.exp().min() >= 1
    assert core.A_log.exp().max() <= 16
    step = torch.nn.functional.softplus(core.dt_bias)
    assert step.min() >= 0.99e-3
    assert step.max() <= 0.101


def test_a_core_keeps_what_it_was_given():
    core = KDACore(64, 16, gate_lower_bound=-5.0, allow_neg_eigval=True, impl="torch")
    assert (core.num_v_heads, core.head_dim, core.gate_lower_bound) == (64, 16, -5.0)
    assert core.allow_neg_eigval
    assert core.impl == "torch"
    layer = KimiDeltaAttention(24, 2, 8, num_v_heads=4, allow_neg_eigval=True, impl="torch").core
    assert (layer.num_v_heads, layer.head_dim, layer.allow_neg_eigval) == (4, 8, True)


def test_bf16_model_keeps_fp32_gate_parameters():
    mixer = KimiDeltaAttention(24, 2, 8).bfloat16()
    mixer.core.float()
    y = mixer(torch.randn(1, 70, 24).bfloat16())
    y.float().sum().backward()
    assert y.dtype == torch.bfloat16
    assert mixer.core.A_log.grad.dtype == torch.float32


def test_autocast_runs_in_bf16_with_fp32_weights():
    mixer = layer(num_v_heads=4).float()
    x = torch.randn(1, 70, 24, requires_grad=True)
    with torch.autocast("cpu", torch.bfloat16):
        y = mixer(x)
    exact = mixer(x)
    assert y.dtype == torch.bfloat16
    # each of the layer's dozen products rounds to eight bits
    assert (y - exact).norm() <= 12 * 2**-8 * exact.norm()
    y.float().sum().backward()
    assert {p.grad.dtype for p in mixer.parameters()} == {torch.float32}


FP32_LAYERS = {
    "kda": lambda: KimiDeltaAttention(32, 2, 16),
    "gdn": lambda: GatedDeltaNet(32, 2, 16),
    "comba": lambda: Comba(32, 2, 16),
    "product": lambda: GatedDeltaProduct(32, 2, 16),
    "attention": lambda: Attention(32, 2, head_dim=16),
    "latent": lambda: MultiHeadLatentAttention(32, 2),
    "swiglu": lambda: SwiGLU(32, 16),
}


@pytest.mark.parametrize("name", FP32_LAYERS)
def test_another_dtype_than_that_of_the_weights_is_named(name):
    x, made = torch.randn(1, 20, 32), FP32_LAYERS[name]()
    narrow, fp64, whole = x.bfloat16(), x.double(), x.long()
    rule = "^x must have the dtype of the layer's weights, torch."
    to = r": pass x.to\(torch."
    with pytest.raises(
        ValueError,
        match=rf"{rule}float32, got torch.bfloat16{to}float32\), or convert the layer with "
        r"layer.to\(torch.bfloat16\), or call it under torch.autocast\('cpu', torch.bfloat16\)$",
    ):
        made(narrow)
    with pytest.raises(ValueError, match=rf"{rule}float32, got torch.float64{to}.*float64\)$"):
        made(fp64)
    with pytest.raises(ValueError, match=rf"{rule}float32, got torch.int64{to}float32\)$"):
        made(whole)
    with torch.autocast("cpu", torch.bfloat16):
        for given in (x, narrow):
            assert made(given).dtype == torch.bfloat16
        for given in (fp64, whole):
            with pytest.raises(ValueError, match=f"{rule}float32, got {given.dtype}"):
                made(given)
    assert made.to(torch.bfloat16)(narrow).dtype == torch.bfloat16
    with pytest.raises(ValueError, match=rf"{rule}bfloat16, got torch.float32{to}.*'cpu', .*bfloa"):
        made(x)


def linear_names(made):
    return [name for name, module in made.named_modules() if type(module) is torch.nn.Linear]


HALF_CAST = {
    **FP32_LAYERS,
    "gla": lambda: GatedLinearAttention(32, 2, 16),
    "attention": lambda: Attention(32, 2, head_dim=16, output_gate=True),
    "latent": lambda: MultiHeadLatentAttention(32, 2, q_lora_rank=8),
    "experts": lambda: Experts(32, 8, 4, 2, shared_experts=1, shared_gate=True),
}


@pytest.mark.parametrize("name", HALF_CAST)
@pytest.mark.parametrize("grad", [True, False])
def test_a_layer_whose_weights_have_two_dtypes_names_one(name, grad):
    """As after a cast of a part of a model. Which module it is decides, not which is called first.
    Autocast converts all of them."""
    x = torch.randn(1, 20, 32)
    for part in linear_names(HALF_CAST[name]()):
        made = HALF_CAST[name]()
        made.get_submodule(part).to(torch.bfloat16)
        *_, own = (word for word in part.split(".") if not word.isdigit())
        message = (
            f"{own} must have the dtype of its input, torch.float32, got torch.bfloat16: convert "
            "the layer with layer.to(torch.float32), or call it under torch.autocast('cpu', "
            "torch.bfloat16)"
        )
        with torch.set_grad_enabled(grad):
            with pytest.raises(ValueError, match=f"^{re.escape(message)}$"):
                made(x)
            with torch.autocast("cpu", torch.bfloat16):
                made(x)


MISFITS = {
    "cu_seqlens": (10, {"cu_seqlens": torch.tensor([0, 5])}, "cu_seqlens must end at T=10, got 5"),
    "tokens": (10, {"cp_context": 4}, "context.local_tokens=12, got T=10"),
    "width": (12, {"cp_context": 3}, "built with conv1d_kernel_size=3, but weight has W=4"),
    "both": (12, {"cp_context": 4, "cu_seqlens": torch.tensor([0, 12])}, "beside cp_context"),
}


@pytest.mark.parametrize("name", ["kda", "gdn", "comba", "product"])
@pytest.mark.parametrize("misfit", MISFITS)
def test_a_batch_that_does_not_fit_is_refused_before_any_projection(name, misfit):
    """Under FSDP, a projection is a collective in which ranks that were refused would be missing.
    A context has 12 tokens and is built for convolutions of the given width."""
    made, (T, given, message) = FP32_LAYERS[name](), MISFITS[misfit]
    width = given.get("cp_context")
    if width is not None:
        context = build_cp_context(torch.tensor([0, 12]), None, conv1d_kernel_size=width)
        given = {**given, "cp_context": context}
    ran = []
    for linear in [m for m in made.modules() if type(m) is torch.nn.Linear]:
        linear.register_forward_hook(lambda *_: ran.append(1))
    with pytest.raises(ValueError, match=re.escape(message)):
        made(torch.randn(1, T, 32), **given)
    assert not ran


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors:UserWarning")
@pytest.mark.parametrize("name", [name for name in FP32_LAYERS if name != "swiglu"])
@pytest.mark.parametrize("layout", [torch.strided, torch.jagged, torch.sparse_coo])
def test_tensors_that_are_not_dense(name, layout):
    rows = [torch.randn(T, 32) for T in (3, 5)]
    if layout is torch.sparse_coo:
        x, kind = torch.stack([rows[0]]).to_sparse(), "layout torch.sparse_coo"
    else:
        x, kind = torch.nested.nested_tensor(rows, layout=layout), "a nested tensor"
    with pytest.raises(ValueError, match=f"^x must be a dense tensor, got {kind}$"):
        FP32_LAYERS[name]()(x)


@pytest.mark.parametrize("name", FP32_LAYERS)
def test_modules_that_convert_x_are_not_judged_by_their_weights(name):
    """As FSDP does in its hooks, and adapters do in their class."""
    made, x = FP32_LAYERS[name](), torch.randn(1, 20, 32)
    expected = made(x.bfloat16().float())
    for linear in [m for m in made.modules() if type(m) is torch.nn.Linear]:
        linear.register_forward_pre_hook(lambda module, args: (args[0].float(),))
    torch.testing.assert_close(made(x.bfloat16()), expected, rtol=2e-2, atol=2e-2)


@pytest.mark.parametrize("name", FP32_LAYERS)
def test_weights_that_hooks_compute(name):
    """Such a weight is no parameter of its module."""
    made, x = FP32_LAYERS[name](), torch.randn(1, 20, 32)
    plain = copy.deepcopy(made)
    for part, linear in [(n, m) for n, m in made.named_modules() if type(m) is torch.nn.Linear]:
        prune.l1_unstructured(linear, "weight", 0.5)
        plain.get_submodule(part).weight.data.copy_(linear.weight)
    for mode in (True, False):
        y = made.train(mode)(x)
        torch.testing.assert_close(y, plain.train(mode)(x), rtol=1e-4, atol=1e-5)
    with torch.no_grad():
        torch.testing.assert_close(made(x), plain(x), rtol=1e-4, atol=1e-5)


def test_convolution_with_a_bias():
    conv = ShortConvolution(6, 3, bias=True).double()
    assert torch.equal(conv.bias, torch.zeros_like(conv.bias))
    torch.nn.init.normal_(conv.bias)
    x = torch.randn(1, 9, 6, dtype=torch.float64)
    padded = torch.nn.functional.pad(x.mT, (2, 0))
    exact = torch.nn.functional.conv1d(padded, conv.weight[:, None], conv.bias, groups=6).mT
    assert_exact("y", conv(x).detach(), torch.nn.functional.silu(exact).detach())


def test_reset_redraws_everything():
    mixer = layer()
    before = {n: p.clone() for n, p in mixer.named_parameters()}
    torch.manual_seed(1)
    mixer.reset_parameters()
    same = {n for n, p in mixer.named_parameters() if torch.equal(p, before[n])}
    assert same == {"o_norm.weight"}


def test_gated_norm():
    norm = GatedRMSNorm(8, 0.0).double()
    x, gate = torch.randn(2, 3, 8, dtype=torch.float64)
    exact = x / x.square().mean(-1, keepdim=True).sqrt() * torch.sigmoid(gate)
    assert_exact("y", norm(x, gate).detach(), exact)


def test_gated_norm_of_wrong_shapes():
    norm, x = GatedRMSNorm(8), torch.randn(2, 8)
    with pytest.raises(ValueError, match=r"^x must be \[.., 8\], got shape \(2, 4\)$"):
        norm(x[:, :4], x[:, :4])
    with pytest.raises(ValueError, match=r"^gate must have as many .* x \(2, 8\), got \(2, 4\)$"):
        norm(x, x[:, :4])


@pytest.mark.parametrize("heads", [(2, 1), (2, 3)])
def test_value_heads_must_be_a_multiple(heads):
    with pytest.raises(ValueError, match=f"num_v_heads={heads[1]}, num_heads={heads[0]}"):
        KimiDeltaAttention(24, heads[0], 8, num_v_heads=heads[1])


def sharded(group, rank):
    mixer = layer(num_v_heads=4)
    torch.manual_seed(1)
    x, dy = torch.randn(2, 1, 150, 24, dtype=torch.float64)
    whole = mixer(x.requires_grad_(), cu_seqlens=torch.tensor(CU))
    exact = torch.autograd.grad(whole, [x, *mixer.parameters()], dy)
    context = build_cp_context(torch.tensor(CU), group, conv1d_kernel_size=4)
    local = context.shard(x).detach().requires_grad_()
    y = mixer(local, cp_context=context)
    assert_exact("y", y.detach(), context.shard(whole).detach())
    grads = torch.autograd.grad(y, [local, *mixer.parameters()], context.shard(dy))
    assert_exact("dx", grads[0], context.shard(exact[0]))
    return grads[1:], exact[1:]


def test_ranks_share_the_parameters_gradients(gloo_pool):
    results = gloo_pool.run(sharded, world_size=3)
    for i, exact in enumerate(results[0][1]):
        assert_exact("parameter", sum(grads[i] for grads, _ in results), exact)


LAYERS = [Comba, GatedDeltaNet, GatedDeltaProduct, GatedLinearAttention, SimpleGatedLinearAttention]
EVERY = [KimiDeltaAttention, *LAYERS]


def reference_operator(mixer, q, k, v, g, beta):
    """The layer's core by the token recurrence."""
    core, p = mixer.core, None
    rates = {"A_log": core.A_log, "dt_bias": core.dt_bias, "use_gate_in_kernel": True}
    inside = {"use_qk_l2norm_in_kernel": True, "use_beta_sigmoid_in_kernel": True}
    if isinstance(mixer, Comba):
        q, k = (x / (x.square().sum(-1, keepdim=True) + 1e-6).sqrt() for x in (q, k))
        p = torch.sigmoid(core.b_logit)[:, None] * k
        q, inside["use_qk_l2norm_in_kernel"] = q - core.d[:, None] * k, False
    rows = getattr(mixer, "rows", 1)
    return recurrence(
        q, k, v, g, beta, p, **rates, **inside, num_householder=rows, removal=beta is not None
    )[0]


@pytest.mark.parametrize("kind", LAYERS, ids=lambda kind: kind.__name__)
def test_layer_equals_its_equations(kind):
    mixer = kind(24, 2, 8, num_v_heads=4, head_v_dim=6).double()
    torch.nn.init.normal_(mixer.o_norm.weight)
    H, HV, K, V, n = 2, 4, 8, 6, mixer.rows
    x = torch.randn(2, 70, 24, dtype=torch.float64)
    qkv = torch.cat([mixer.q_proj(x), mixer.k_proj(x), mixer.v_proj(x)], -1)
    padded = torch.nn.functional.pad(qkv.mT, (3, 0))
    weight = mixer.qkv_conv.weight[:, None]
    qkv = torch.nn.functional.conv1d(padded, weight, groups=len(weight)).mT
    qkv = torch.nn.functional.silu(qkv)
    q, k, v = qkv.split([H * K, n * H * K, n * HV * V], -1)
    k, v = k.reshape(2, 70 * n, H, K), v.reshape(2, 70 * n, HV, V)
    g = mixer.a_proj(x).unflatten(-1, (HV, -1))
    g = g[..., 0] if mixer.per_head else g
    beta = mixer.b_proj(x).reshape(2, 70 * n, HV) if mixer.has_beta else None
    o = reference_operator(mixer, q.unflatten(-1, (H, K)), k, v, g, beta)
    o = o / (o.square().mean(-1, keepdim=True) + 1e-5).sqrt() * mixer.o_norm.weight
    o = o * torch.nn.functional.silu(mixer.g_proj(x)).unflatten(-1, (HV, V))
    assert_exact("y", mixer(x).detach(), mixer.o_proj(o.flatten(-2)).detach())


@pytest.mark.parametrize("kind", EVERY, ids=lambda kind: kind.__name__)
def test_short_inputs_are_evaluated_token_by_token(kind, monkeypatch):
    mixer = kind(24, 2, 8, num_v_heads=4).double()
    x = torch.randn(2, 64, 24, dtype=torch.float64)
    chunked = mixer(x).detach()
    calls = []
    run = TorchBackend.recurrent
    counting = {"recurrent": lambda self, *args: calls.append(1) or run(*args)}
    backend = type("Counting", (TorchBackend,), counting)()
    monkeypatch.setitem(fla_cp.kernels._replaced, "torch", backend)
    mixer.eval()
    mixer(x)  # with gradients: chunked
    assert not calls
    with torch.no_grad():
        assert_exact("y", mixer(x), chunked)
        assert len(calls) == 1
        packed = mixer(x[:, :60].reshape(1, -1, 24)[:, :60], cu_seqlens=torch.tensor([0, 20, 60]))
        assert len(calls) == 2
        mixer(torch.cat([x, x], 1))  # longer than 64
        assert len(calls) == 2
    assert packed.shape == (1, 60, 24)


@pytest.mark.parametrize("kind", EVERY, ids=lambda kind: kind.__name__)
@pytest.mark.parametrize("heads", [1, 3])
def test_value_heads_are_a_multiple_of_heads(kind, heads):
    with pytest.raises(ValueError, match=f"num_v_heads={heads}, num_heads=2"):
        kind(24, 2, 8, num_v_heads=heads)


WITHOUT_REMOVAL = GatedLinearAttention, SimpleGatedLinearAttention


@pytest.mark.parametrize("kind", EVERY, ids=lambda kind: kind.__name__)
def test_channels_that_the_operator_does_not_take_are_refused_at_once(kind):
    """And the most channels that it does take run, so that the limit is the operator's own."""
    most = 512 if kind in WITHOUT_REMOVAL else 256
    rule = f"must be an integer from 1 to {most}, got"
    for bad in (most + 1, 0, 8.0):
        with pytest.raises(ValueError, match=f"^head_dim {rule} {bad}$"):
            kind(8, 1, bad)
        with pytest.raises(ValueError, match=f"^head_v_dim {rule} {bad}$"):
            kind(8, 1, 4, head_v_dim=bad)
    x = torch.randn(1, 3, 8)
    kind(8, 1, most)(x).sum().backward()
    with torch.no_grad():
        kind(8, 1, most).eval()(x)


def test_sizes_of_a_core():
    with pytest.raises(ValueError, match=r"^head_dim must be an integer from 1 to 256, got 300$"):
        KDACore(2, 300)
    with pytest.raises(ValueError, match=r"^num_v_heads must be an integer from 1, got 0$"):
        KDACore(0, 16)


def whole_and_sharded(group, rank, index):
    torch.manual_seed(0)
    mixer = EVERY[index](24, 2, 8, num_v_heads=4).double()
    x = torch.randn(1, 130, 24, dtype=torch.float64)
    cu = torch.tensor([0, 2, 100, 130])
    alone = build_cp_context(cu, None, conv1d_kernel_size=4)
    context = build_cp_context(cu, group, conv1d_kernel_size=4)
    found = []
    for c in (alone, context):
        y = mixer(c.shard(x), cp_context=c)
        grads = torch.autograd.grad(y.square().sum(), list(mixer.parameters()))
        for g in grads if c is context else ():
            torch.distributed.all_reduce(g, group=group)
        found.append((context.shard(y) if c is alone else y, *grads))
    for a, b in zip(*found, strict=True):
        assert_exact("layer", b.detach(), a.detach())


@pytest.mark.parametrize("index", range(len(EVERY)), ids=[k.__name__ for k in EVERY])
def test_layers_over_ranks(gloo_pool, index):
    gloo_pool.run(whole_and_sharded, index, world_size=3)


@pytest.mark.parametrize("kind", EVERY, ids=lambda kind: kind.__name__)
def test_a_layer_cast_to_bf16_still_runs(kind):
    """A_log and dt_bias are then bf16, although the operators need fp32."""
    layer = kind(32, 2, 16).to(torch.bfloat16)
    assert all(p.dtype == torch.bfloat16 for p in layer.parameters())
    x = torch.randn(1, 70, 32, dtype=torch.bfloat16)
    layer(x).float().square().sum().backward()
    for name, p in layer.named_parameters():
        assert p.grad.dtype == torch.bfloat16 and p.grad.isfinite().all(), name
    assert any(p.grad.abs().max() > 0 for n, p in layer.named_parameters() if "A_log" in n)
