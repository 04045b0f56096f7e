"""The KDA layer: shapes, dtypes, and that ranks share its gradients."""

import pytest
import torch
import torch.nn.functional as F

from fla_cp import build_cp_context
from fla_cp.nn import GatedRMSNorm, KDACore, KimiDeltaAttention, ShortConvolution
from fla_cp.reference import recurrence
from tests.closeness import assert_exact

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
    """The layer as the report writes it, from torch's functions and the token recurrence."""
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
    assert torch.equal(a[:, :50], b[:, :50])
    assert not torch.allclose(a[:, 50:], b[:, 50:])


def test_gate_starts_where_the_report_puts_it():
    core = KDACore(64, 16)
    assert core.A_log.exp().min() >= 1
    assert core.A_log.exp().max() <= 16
    step = torch.nn.functional.softplus(core.dt_bias)
    assert step.min() >= 0.99e-3
    assert step.max() <= 0.101


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


def test_convolution_with_a_bias():
    conv = ShortConvolution(6, 3, bias=True).double()
    assert torch.equal(conv.bias, torch.zeros_like(conv.bias))
    torch.nn.init.normal_(conv.bias)
    x = torch.randn(1, 9, 6, dtype=torch.float64)
    padded = torch.nn.functional.pad(x.mT, (2, 0))
    exact = torch.nn.functional.conv1d(padded, conv.weight[:, None], conv.bias, groups=6).mT
    assert_exact("y", conv(x).detach(), torch.nn.functional.silu(exact).detach())


def test_reset_draws_everything_again():
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
