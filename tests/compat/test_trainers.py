"""Layers that call FLA as two trainers do, which build on its context parallelism, with
fla_cp.compat in place of fla: on 2 and 4 ranks they equal one process.

The calls, not the code, are those of prime-rl, pull request 2080 (Gated DeltaNet of Qwen3.5), and
of NeMo Automodel, pull request 3243 (KDA of Kimi Linear). Each layer builds its context by itself,
from the offsets of the whole batch, and holds an equal contiguous share of the tokens.
"""

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from fla_cp.compat import (
    FusedRMSNormGated,
    ShortConvolution,
    build_cp_context,
    causal_conv1d,
    chunk_gated_delta_rule,
    chunk_kda,
    fused_kda_gate,
    fused_recurrent_kda,
)
from tests.support.closeness import assert_exact

F64 = torch.float64
HIDDEN, H, HV, K, V, W = 10, 2, 4, 6, 5, 4
T = 148
DOCUMENTS = [(0, T), (0, 37, 38, 90, 147, T)]


class GatedDeltaNet(nn.Module):
    """One convolution over q, k and v, whose weights are those of nn.Conv1d; the gate outside of
    the operator; heads of q and k repeated."""

    def __init__(self, group=None, world_size=1):
        super().__init__()
        self.group, self.world_size = group, world_size
        self.sizes = [H * K, H * K, HV * V]
        channels = sum(self.sizes)
        self.qkv = nn.Linear(HIDDEN, channels, bias=False)
        self.conv1d = nn.Conv1d(channels, channels, W, groups=channels, padding=W - 1, bias=False)
        self.a, self.b = (nn.Linear(HIDDEN, HV, bias=False) for _ in range(2))
        self.A_log, self.dt_bias = nn.Parameter(torch.randn(HV)), nn.Parameter(torch.randn(HV))
        self.z, self.out = nn.Linear(HIDDEN, HV * V), nn.Linear(HV * V, HIDDEN)
        self.norm = FusedRMSNormGated(V, eps=1e-6)

    def forward(self, x, cu_seqlens):
        """x: [1, T_local, HIDDEN]. cu_seqlens: of the whole batch, or None for one document."""
        B, T, _ = x.shape
        context = None
        if self.group is not None:
            if cu_seqlens is None:
                cu_seqlens = torch.tensor([0, T * self.world_size], dtype=torch.int32)
            context = build_cp_context(
                cu_seqlens=cu_seqlens, group=self.group, conv1d_kernel_size=W
            )
        channels_first = self.qkv(x).mT.contiguous()  # as nn.Conv1d would take them
        qkv, _ = causal_conv1d(
            x=channels_first.transpose(1, 2),
            weight=self.conv1d.weight.squeeze(1),
            bias=self.conv1d.bias,
            activation="silu",
            cu_seqlens=cu_seqlens,
            cp_context=context,
        )
        q, k, v = (
            t.reshape(B, T, -1, size)
            for t, size in zip(qkv.split(self.sizes, -1), (K, K, V), strict=True)
        )
        q, k = (t.repeat_interleave(HV // H, dim=2) for t in (q, k))
        beta = self.b(x).sigmoid()
        g = -self.A_log.exp() * F.softplus(self.a(x) + self.dt_bias)
        if context is None:
            more = {"initial_state": None, "output_final_state": False, "cu_seqlens": cu_seqlens}
        else:
            more = {"cu_seqlens": context.cu_seqlens, "cp_context": context}
        o, _ = chunk_gated_delta_rule(q, k, v, g=g, beta=beta, use_qk_l2norm_in_kernel=True, **more)
        o = self.norm(o.reshape(-1, V), self.z(x).reshape(-1, V))
        return self.out(o.reshape(B, T, -1))


class KimiDeltaAttention(nn.Module):
    """Three short convolutions with a cache argument, FLA's gate and gated norm, a context for each
    row of the batch with offsets on the host, and the recurrent form for short inputs."""

    def __init__(self, group=None, world_size=1):
        super().__init__()
        self.group = group
        self.q, self.k, self.v, self.f = (nn.Linear(HIDDEN, H * K, bias=False) for _ in range(4))
        conv = {"kernel_size": W, "activation": "silu", "dtype": F64}
        self.convs = nn.ModuleList(ShortConvolution(hidden_size=H * K, **conv) for _ in "qkv")
        self.A_log, self.dt_bias = (nn.Parameter(torch.randn(s)) for s in ((1, 1, H, 1), H * K))
        self.b, self.gate = nn.Linear(HIDDEN, H, bias=False), nn.Linear(HIDDEN, H * K)
        self.norm = FusedRMSNormGated(K, eps=1e-5, activation="sigmoid", dtype=F64)
        self.out = nn.Linear(H * K, HIDDEN, bias=False)

    def forward(self, x, cu_seqlens):
        """x: [B, T_local, HIDDEN]. cu_seqlens: of each row of the whole batch."""
        rows = []
        for n in range(len(x)):
            cu = torch.tensor([0, x.shape[1]]) if cu_seqlens is None else cu_seqlens
            if self.group is None:
                rows.append(self.row(x[n : n + 1], cu_seqlens=cu))
                continue
            if cu_seqlens is None:
                cu = cu * self.group.size()
            context = build_cp_context(
                cu_seqlens=cu, group=self.group, conv1d_kernel_size=W, cu_seqlens_cpu=cu.cpu()
            )
            rows.append(self.row(x[n : n + 1], cp_context=context))
        return torch.cat(rows)

    def row(self, x, *, cu_seqlens=None, cp_context=None):
        kernel = {} if cp_context is None else {"cp_context": cp_context}
        more = {"cache": None, "output_final_state": False, "cu_seqlens": cu_seqlens, **kernel}
        pairs = zip(self.convs, (self.q, self.k, self.v), strict=True)
        q, k, v = (conv(x=proj(x), **more)[0].unflatten(-1, (H, K)) for conv, proj in pairs)
        raw, wide = self.f(x).unflatten(-1, (H, K)), torch.promote_types(x.dtype, torch.float32)
        g = fused_kda_gate(raw, self.A_log, dt_bias=self.dt_bias, output_dtype=wide)
        short = cp_context is None and x.shape[1] <= 64
        o, final = (fused_recurrent_kda if short else chunk_kda)(
            q=q,
            k=k,
            v=v,
            g=g,
            beta=self.b(x).to(wide).sigmoid(),
            initial_state=None,
            output_final_state=cp_context is None,
            use_qk_l2norm_in_kernel=True,
            cu_seqlens=cu_seqlens,
            **kernel,
        )
        assert (final is None) == (cp_context is not None)
        o = self.norm(o, self.gate(x).unflatten(-1, (H, K)))
        return self.out(o.flatten(2))


LAYERS = {"prime-rl": GatedDeltaNet, "nemo-automodel": KimiDeltaAttention}


def step(name, documents, batch, group=None, rank=0, world_size=1):
    """y and the gradient of x of this rank's tokens, and the gradients of the weights."""
    torch.manual_seed(0)
    layer = LAYERS[name](group, world_size).to(F64)
    x, dy = torch.randn(2, batch, T, HIDDEN, dtype=F64)
    share = slice(rank * T // world_size, (rank + 1) * T // world_size)
    mine = x[:, share].clone().requires_grad_()
    cu = None if len(documents) == 2 else torch.tensor(documents)
    y = layer(mine, cu)
    y.backward(dy[:, share])
    weights = {n: p.grad for n, p in layer.named_parameters()}
    return y.detach(), mine.grad, weights


def on_a_rank(group, rank, *given):
    return step(*given, group, rank, group.size())


@pytest.mark.parametrize("documents", DOCUMENTS, ids=["one", "packed"])
@pytest.mark.parametrize("ranks", [2, 4])
@pytest.mark.parametrize("name", LAYERS)
def test_ranks_equal_one_process(gloo_pool, name, ranks, documents):
    batch = 2 if name == "nemo-automodel" else 1
    y, dx, weights = step(name, documents, batch)
    found = gloo_pool.run(on_a_rank, name, documents, batch, world_size=ranks)
    assert_exact("y", torch.cat([f[0] for f in found], 1), y)
    assert_exact("dx", torch.cat([f[1] for f in found], 1), dx)
    for n, grad in weights.items():
        assert_exact(f"d{n}", sum(f[2][n] for f in found), grad)


@pytest.mark.parametrize("name", LAYERS)
def test_documents_and_ranks_matter(name):
    """Without these the comparison above would compare nothing."""
    batch = 2 if name == "nemo-automodel" else 1
    (one, *_), (packed, *_) = (step(name, documents, batch) for documents in DOCUMENTS)
    assert (one - packed)[:, 38:].abs().max() > 1e-6
    torch.testing.assert_close(one[:, :37], packed[:, :37])


def test_short_rows_have_gradients_too():
    torch.manual_seed(0)
    layer = KimiDeltaAttention().to(F64)
    x = torch.randn(1, 20, HIDDEN, dtype=F64, requires_grad=True)
    y = layer(x, None)
    y.square().sum().backward()
    with torch.no_grad():
        assert_exact("y", y, layer(x, None))
    assert all(p.grad is not None and p.grad.abs().sum() > 0 for p in layer.parameters())


@pytest.mark.parametrize("name", LAYERS)
def test_half_precision_beside_gates_in_fp32(name):
    """Six roundings, as tests/support/closeness.py counts them, where a wrong call costs all."""
    torch.manual_seed(0)
    layer = LAYERS[name]().bfloat16()
    x, dy = torch.randn(2, 1, T, HIDDEN).bfloat16()
    for parameter in (layer.A_log, layer.dt_bias):
        parameter.data = parameter.data.float()
    results = []
    for wide in (False, True):
        if wide:
            layer, x, dy = layer.double(), x.double(), dy.double()
        leaf = x.detach().requires_grad_()
        y = layer(leaf, torch.tensor(DOCUMENTS[1]))
        results.append((y.detach(), *torch.autograd.grad(y, leaf, dy)))
    for found, exact in zip(*results, strict=True):
        assert found.dtype == torch.bfloat16
        error = (found.double() - exact).square().mean().sqrt()
        assert error <= 6 * torch.finfo(torch.bfloat16).eps * exact.square().mean().sqrt()
