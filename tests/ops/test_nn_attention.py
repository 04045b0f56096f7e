"""Attention layers: against the formula written out, sharded in every way, and what travels."""

import math
import re
import threading
from functools import partial
from itertools import pairwise
from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist

from fla_cp import build_cp_context, zigzag_token_ranges
from fla_cp.comm import collectives, keys_values
from fla_cp.comm.keys_values.latents import Expanded
from fla_cp.nn import Attention, MultiHeadLatentAttention, YaRN
from fla_cp.nn.rotary import Rotary
from fla_cp.partition.key_rows import Lengths
from fla_cp.remat import selective_checkpoint
from tests.support.closeness import assert_exact
from tests.support.ranks import run_threads

T, OFFSETS = 150, (0, 37, 40, 40, 101, 150)
RANGES = {
    "contiguous": lambda R: None,
    "zigzag": lambda R: zigzag_token_ranges(T, R),
    "uneven": lambda R: [[(120, 150), (0, 20)], [], [(60, 120)], [(20, 60)]],
}
LATENT = {"kv_lora_rank": 10, "qk_nope_head_dim": 8, "qk_rope_head_dim": 6, "v_head_dim": 5}
LAYERS = {
    "plain": lambda: Attention(24, 4, 2, 8, rope_theta=None),
    "rotary": lambda: Attention(24, 3, head_dim=8),
    "gated": lambda: Attention(
        24, 4, 1, 8, qk_norm=True, output_gate=True, rotary_dim=4, rope_scaling=YaRN(4, 64)
    ),
    "latent": lambda: MultiHeadLatentAttention(24, 3, rope_theta=None, **LATENT),
    "latent rotary": lambda: MultiHeadLatentAttention(
        24, 3, q_lora_rank=7, rope_scaling=YaRN(4, 64), **LATENT
    ),
}
every = pytest.mark.parametrize("name", LAYERS)


def made(name, dtype=torch.float64):
    """The layer with norms that are not 1."""
    torch.manual_seed(0)
    layer = LAYERS[name]()
    for parameter in layer.parameters():
        if parameter.ndim == 1:
            torch.nn.init.uniform_(parameter, 0.5, 2.0)
    return layer.to(dtype)


def drawn():
    torch.manual_seed(1)
    return torch.randn(2, 1, T, 24, dtype=torch.float64)


def rotated(x, theta, dim, yarn=False):
    """x [n, H, D] at positions 0 to n - 1, pair by pair."""
    x, out = x.clone(), x.clone()
    for i in range(dim // 2):
        speed = theta ** (-2 * i / dim)
        if yarn:  # of 64 tokens to 4 times as many
            low, high = (
                dim * math.log(64 / (turns * 2 * math.pi)) / (2 * math.log(theta))
                for turns in (32, 1)
            )
            low, high = max(math.floor(low), 0), min(math.ceil(high), dim - 1)
            share = min(max((i - low) / (high - low), 0), 1)
            speed = speed / 4 * share + speed * (1 - share)
        angle = torch.arange(len(x), dtype=torch.float64)[:, None] * speed
        a, b = x[..., i], x[..., i + dim // 2]
        out[..., i] = a * angle.cos() - b * angle.sin()
        out[..., i + dim // 2] = b * angle.cos() + a * angle.sin()
    return out


def rms(x, norm):
    return x / (x.square().mean(-1, keepdim=True) + 1e-5).sqrt() * norm.weight


def softmax(q, k, v, scale):
    """o [n, H, V] of one sequence."""
    k, v = (y.repeat_interleave(q.shape[1] // y.shape[1], 1) for y in (k, v))
    scores = torch.einsum("nhd,mhd->hnm", q, k) * scale
    hidden = torch.ones(scores.shape[1:], dtype=torch.bool).triu(1)
    return torch.einsum("hnm,mhv->nhv", scores.masked_fill(hidden, -math.inf).softmax(-1), v)


def plain_grouped(name, m, x):
    """One sequence [n, hidden] -> [n, hidden]."""
    q, k, v = ((x @ p.weight.T).unflatten(-1, (-1, 8)) for p in (m.q_proj, m.k_proj, m.v_proj))
    if name == "rotary":
        q, k = rotated(q, 1e4, 8), rotated(k, 1e4, 8)
    if name == "gated":
        sharp = 0.1 * math.log(4) + 1
        q, k = rotated(rms(q, m.q_norm), 1e4, 4, True), rotated(rms(k, m.k_norm), 1e4, 4, True)
        q, k = (torch.cat([sharp * y[..., :4], y[..., 4:]], -1) for y in (q, k))
    o = softmax(q, k, v, 8**-0.5).flatten(1)
    if name == "gated":
        o = o / (1 + (-(x @ m.g_proj.weight.T)).exp())
    return o @ m.o_proj.weight.T


def plain_latent(name, m, x):
    scale, q = 14**-0.5, None
    if name == "latent":
        q = x @ m.q_proj.weight.T
    else:
        down, norm, up = m.q_proj
        q = rms(x @ down.weight.T, norm) @ up.weight.T
        scale *= (0.1 * math.log(4) + 1) ** 2
    q = q.unflatten(-1, (3, 14))
    down = x @ m.kv_down.weight.T
    each = (rms(down[:, :10], m.kv_norm) @ m.kv_up.weight.T).unflatten(-1, (3, 13))
    shared = down[:, None, 10:]
    if name != "latent":
        q = torch.cat([q[..., :8], rotated(q[..., 8:], 1e4, 6, True)], -1)
        shared = rotated(shared, 1e4, 6, True)
    k = torch.cat([each[..., :8], shared.expand(-1, 3, -1)], -1)
    return softmax(q, k, each[..., 8:], scale).flatten(1) @ m.o_proj.weight.T


def plain(name, layer, x):
    formula = plain_latent if name.startswith("latent") else plain_grouped
    return torch.cat([formula(name, layer, x[0, lo:hi]) for lo, hi in pairwise(OFFSETS)])[None]


def results(layer, call, x, dy):
    """y, and the gradients of x and the parameters."""
    x = x.detach().requires_grad_()
    y = call(x)
    return [y.detach(), *torch.autograd.grad(y, [x, *layer.parameters()], dy)]


@every
def test_packed_sequences(name):
    layer, (x, dy) = made(name), drawn()
    cu_seqlens = torch.tensor(OFFSETS)
    found = results(layer, lambda x: layer(x, cu_seqlens=cu_seqlens), x, dy)
    wanted = results(layer, lambda x: plain(name, layer, x), x, dy)
    for a, b in zip(found, wanted, strict=True):
        assert_exact(name, a, b)


@every
def test_offsets_on_the_host_spare_reading_those_of_the_device(name):
    layer, (x, dy) = made(name), drawn()
    packed = torch.tensor(OFFSETS)
    unreadable = {"cu_seqlens": packed.to("meta"), "cu_seqlens_cpu": packed}
    found = results(layer, lambda x: layer(x, **unreadable), x, dy)
    wanted = results(layer, lambda x: layer(x, cu_seqlens=packed), x, dy)
    assert all(a.equal(b) for a, b in zip(found, wanted, strict=True))
    with pytest.raises(ValueError, match="cu_seqlens_cpu must equal cu_seqlens"):
        layer(x, cu_seqlens=packed, cu_seqlens_cpu=torch.tensor([0, 1, 2, 3, 4, 150]))
    with pytest.raises(ValueError, match="copy of cu_seqlens, which is missing"):
        layer(x, cu_seqlens_cpu=packed)


@every
def test_rows_are_sequences_of_their_own(name):
    layer, (x, _) = made(name), drawn()
    packed = layer(x, cu_seqlens=torch.tensor([0, 50, 100, 150]))
    assert_exact(name, layer(x.view(3, 50, 24)).flatten(0, 1)[None].detach(), packed.detach())


def sharded(group, rank, layer, x, dy, layout):
    ranges = RANGES[layout](group.size())
    context = build_cp_context(torch.tensor(OFFSETS), group, token_ranges=ranges)
    y, dx, *grads = results(
        layer, lambda x: layer(x, cp_context=context), context.shard(x), context.shard(dy)
    )
    for grad in grads:
        dist.all_reduce(grad, group=group)
    return [context.unshard(y), context.unshard(dx), *grads]


@pytest.mark.parametrize("layout", RANGES)
@every
def test_ranks_equal_one(name, layout):
    layer, (x, dy) = made(name), drawn()
    wanted = results(layer, lambda x: plain(name, layer, x), x, dy)
    for found in run_threads(sharded, 4, layer, x, dy, layout):
        for a, b in zip(found, wanted, strict=True):
            assert_exact(name, a, b)


@pytest.fixture
def in_a_ring(monkeypatch):
    """No keys and values fit on a rank; returns how many tokens were expanded at once."""
    monkeypatch.setattr(keys_values, "MAX_GATHERED", 0)
    expanded, original = [], Expanded.of

    def of(each, shared, v_channels):
        expanded.append(len(each))
        return original(each, shared, v_channels)

    monkeypatch.setattr(Expanded, "of", of)
    return expanded


@pytest.mark.parametrize("layout", RANGES)
@pytest.mark.parametrize("name", ["latent", "latent rotary"])
def test_latents_in_a_ring_equal_one_rank(name, layout, in_a_ring):
    layer, (x, dy) = made(name), drawn()
    wanted = results(layer, lambda x: plain(name, layer, x), x, dy)
    for found in run_threads(sharded, 4, layer, x, dy, layout):
        for a, b in zip(found, wanted, strict=True):
            assert_exact(name, a, b)
    tokens = [sum(hi - lo for lo, hi in r) for r in RANGES[layout](4) or [[(0, 38)]]]
    assert len(in_a_ring) > 4 and max(in_a_ring) <= max(tokens)


def second_document(group, rank, layer, batches):
    """The output of the second document in each batch."""
    context = build_cp_context(
        torch.tensor([0, 61, T]), group, token_ranges=zigzag_token_ranges(T, group.size())
    )
    outputs = (context.unshard(layer(context.shard(x), cp_context=context)) for x in batches)
    return [y.detach()[:, 61:] for y in outputs]


@pytest.mark.bits
@every
def test_a_document_does_not_see_the_one_before(name):
    layer, (x, other) = made(name, torch.float32), drawn().float()
    changed = torch.cat([other[:, :61], x[:, 61:]], 1)
    for a, b in run_threads(second_document, 4, layer, [x, changed]):
        assert torch.equal(a, b)


def trained_step(group, rank, layer, x, dy):
    context = build_cp_context(torch.tensor([0, T]), group)
    layer(context.shard(x), cp_context=context).backward(context.shard(dy))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float64])
@pytest.mark.parametrize(
    "name, numbers", [("plain", 2 * 2 * 8), ("latent", 10 + 6), ("latent rotary", 10 + 6)]
)
def test_what_travels(name, numbers, dtype, monkeypatch):
    """Two ranks of 75 tokens share a document: the second gets those of the first, and the first
    gets their gradients back. Latent attention sends latents and shared keys alone."""
    original, received = collectives.all_to_all, []

    def all_to_all(rows, send, receive, group):
        others = sum(receive) - receive[dist.get_rank(group)]
        received.append(others * rows.shape[1] * rows.itemsize)
        return original(rows, send, receive, group)

    monkeypatch.setattr(collectives, "all_to_all", all_to_all)
    layer, (x, dy) = made(name, dtype), drawn().to(dtype)
    run_threads(trained_step, 2, layer, x, dy)
    message = 75 * numbers * dtype.itemsize
    assert sorted(received) == [0, 0, message, message]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float64])
def test_what_travels_in_a_ring_of_latents(dtype, monkeypatch, in_a_ring):
    """As above, and the second rank gets the latents of the first once more in the backward."""
    original, received = collectives.all_to_all, []

    def all_to_all(rows, send, receive, group):
        received.append(sum(receive) * rows.shape[1] * rows.itemsize)
        return original(rows, send, receive, group)

    monkeypatch.setattr(collectives, "all_to_all", all_to_all)
    layer, (x, dy) = made("latent", dtype), drawn().to(dtype)
    run_threads(trained_step, 2, layer, x, dy)
    message = 75 * (10 + 6) * dtype.itemsize
    assert sorted(received) == [0, 0, 0, message, message, message]
    assert set(in_a_ring) == {0, 75}


def recomputed_step(group, rank, layer, x, dy):
    context = build_cp_context(torch.tensor(OFFSETS), group)
    local = context.shard(x).detach().requires_grad_()
    found = []
    for run in (layer, partial(selective_checkpoint, layer)):
        y = run(local, cp_context=context)
        found.append(
            [y.detach(), *torch.autograd.grad(y, [local, *layer.parameters()], context.shard(dy))]
        )
    return found


def test_a_checkpoint_keeps_what_a_ring_of_latents_gave(in_a_ring):
    layer, (x, dy) = made("latent rotary"), drawn()
    for plainly, again in run_threads(recomputed_step, 2, layer, x, dy):
        for a, b in zip(plainly, again, strict=True):
            assert_exact("step", b, a)
    # Own tokens and those of the other rank, forward and backward, on 2 ranks, in both runs: the
    # recomputation expands none.
    assert len(in_a_ring) == 2 * 2 * 2 * 2


def events_of_forward(group, rank, layer, x, own):
    own[threading.get_ident()] = events = []
    context = build_cp_context(torch.tensor([0, T]), group)
    layer(context.shard(x), cp_context=context)
    return events


@pytest.mark.parametrize(
    "name, late",
    [("gated", ["q_proj", "g_proj"]), ("plain", ["q_proj"]), ("latent rotary", ["q_proj"])],
)
def test_what_does_not_need_the_keys_runs_during_their_exchange(name, late, monkeypatch):
    layer, (x, _) = made(name), drawn()
    original, own = collectives.all_to_all, {}

    def note(event):
        own[threading.get_ident()].append(event)

    def all_to_all(*args):
        out, work = original(*args)
        note("start")
        return out, SimpleNamespace(wait=lambda: (note("wait"), work.wait()))

    monkeypatch.setattr(collectives, "all_to_all", all_to_all)
    for part in late:
        layer.get_submodule(part).register_forward_hook(lambda *_, part=part: note(part))
    for events in run_threads(events_of_forward, 2, layer, x, own):
        assert events == ["start", *late, "wait"]


@every
def test_half_precision(name):
    """Each of the layer's products rounds to eight bits, under autocast as with bf16 weights."""
    layer, (x, _) = made(name, torch.float32), drawn().float()
    exact = layer(x).detach()
    with torch.autocast("cpu", torch.bfloat16):
        y = layer(x)
    y.float().sum().backward()
    assert {p.grad.dtype for p in layer.parameters()} == {torch.float32}
    for found in (y, made(name, torch.bfloat16)(x.bfloat16())):
        assert found.dtype == torch.bfloat16
        assert (found - exact).norm() <= 12 * 2**-8 * exact.norm()


@every
def test_reset_redraws_everything(name):
    layer = made(name)
    before = {n: p.clone() for n, p in layer.named_parameters()}
    layer.reset_parameters()
    for n, p in layer.named_parameters():
        assert not torch.equal(p, before[n]), n
        assert "norm" not in n or p.eq(1).all(), n


@every
def test_tables_made_in_inference_serve_a_backward(name):
    layer, (x, dy) = made(name), drawn()
    context = build_cp_context(torch.tensor(OFFSETS), None)
    with torch.inference_mode():
        y = layer(x, cp_context=context)
    again = layer(x, cp_context=context)
    again.backward(dy)
    assert torch.equal(y, again)


@pytest.mark.parametrize(
    "make, message",
    [
        (lambda: Attention(24, 4, 3, 8), "num_heads=4, num_kv_heads=3"),
        (lambda: Attention(24, 0), "num_heads must be an integer from 1, got 0"),
        (lambda: Attention(24, 2, head_dim=7), "rotary_dim must be even, got 7"),
        (lambda: Attention(24, 2, 2, 8, rotary_dim=10), "at most head_dim=8, got 10"),
        (lambda: Attention(24, 2, qk_norm="yes"), "qk_norm must be True or False, got 'yes'"),
        (lambda: Attention(24, 2, rope_theta=1), "rope_theta must be a finite number above 1"),
        (lambda: Attention(24, 2, rope_scaling=4.0), "rope_scaling must be a YaRN or None, got"),
        (lambda: YaRN(0.5, 64), "factor must be a finite number from 1, got 0.5"),
        (lambda: YaRN(2, 64.0), "original_length must be an integer from 1, got 64.0"),
        (lambda: YaRN(2, 64, beta_slow=40), "beta_fast must be a finite number from 40, got 32.0"),
        (
            lambda: MultiHeadLatentAttention(24, 2, qk_rope_head_dim=0),
            "qk_rope_head_dim must be an integer from 1, got 0",
        ),
        (
            lambda: MultiHeadLatentAttention(24, 2, q_lora_rank=0),
            "q_lora_rank must be an integer from 1, got 0",
        ),
    ],
)
def test_bad_sizes(make, message):
    with pytest.raises(ValueError, match=re.escape(message)):
        make()


@every
def test_bad_calls(name):
    layer, (x, _) = made(name), drawn()
    context = build_cp_context(torch.tensor([0, 100]), None)
    with pytest.raises(ValueError, match="local_tokens=100, got T=150"):
        layer(x, cp_context=context)
    with pytest.raises(ValueError, match="cu_seqlens must not be passed beside cp_context"):
        layer(x[:, :100], cu_seqlens=torch.tensor([0, 100]), cp_context=context)
    with pytest.raises(ValueError, match="hidden_size=24"):
        layer(x[..., 1:])


def test_angles_are_right_far_from_the_beginning():
    """The last token of a long document, in fp32: to one rounding of cos and sin."""
    n = 1_000_003
    lengths = Lengths(queries=(2,), keys=(n,))
    cos, sin = Rotary(4, 5e6).tables(lengths, torch.zeros(1, dtype=torch.float32))
    for i, speed in enumerate((1.0, 5e6**-0.5)):
        for row, position in enumerate((n - 2, n - 1)):
            assert cos[row, i].item() == pytest.approx(math.cos(position * speed), abs=1e-7)
            assert sin[row, i].item() == pytest.approx(math.sin(position * speed), abs=1e-7)


@pytest.mark.parametrize("factor, length", [(4.0, 4096), (40.0, 131072), (1.0, 2048)])
@pytest.mark.parametrize("dim, base", [(64, 1e4), (128, 1e7), (16, 5e5)])
def test_yarn_as_in_transformers(dim, base, factor, length):
    pytest.importorskip("transformers")
    from transformers import LlamaConfig
    from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

    rope = {"rope_type": "yarn", "rope_theta": base, "factor": factor}
    rope["original_max_position_embeddings"] = length
    config = LlamaConfig(head_dim=dim, max_position_embeddings=length, rope_parameters=rope)
    wanted, magnitude = ROPE_INIT_FUNCTIONS["yarn"](config)
    found = Rotary(dim, base, YaRN(factor, length))
    torch.testing.assert_close(found.frequencies().float(), wanted, rtol=1e-5, atol=0)
    assert found.magnitude == pytest.approx(magnitude)


def rotary_tables(rotary, n):
    """transformers' tables [1, n, dim] of one sequence."""
    angles = torch.arange(n, dtype=torch.float64)[:, None] * rotary.frequencies()
    return tuple(torch.cat([t, t], -1)[None] for t in (angles.cos(), angles.sin()))


def causal_mask(n):
    return torch.full((1, 1, n, n), -math.inf, dtype=torch.float64).triu(1)


def test_attention_is_that_of_qwen3_next():
    pytest.importorskip("transformers")
    from transformers.models.qwen3_next import modeling_qwen3_next as theirs

    config = theirs.Qwen3NextConfig(
        hidden_size=24, num_attention_heads=4, num_key_value_heads=2, head_dim=8, rms_norm_eps=1e-5
    )
    config._attn_implementation = "eager"
    stock = theirs.Qwen3NextAttention(config, 0).double().eval()
    torch.nn.init.normal_(stock.q_norm.weight)
    layer = Attention(24, 4, 2, 8, qk_norm=True, output_gate=True, rotary_dim=2).double()
    q, g = stock.q_proj.weight.data.view(4, 2, 8, 24).unbind(1)  # head by head
    layer.q_proj.weight.data.copy_(q.flatten(0, 1))
    layer.g_proj.weight.data.copy_(g.flatten(0, 1))
    for name in ("k_proj", "v_proj", "o_proj"):
        layer.get_submodule(name).weight.data.copy_(stock.get_submodule(name).weight.data)
    for name in ("q_norm", "k_norm"):
        layer.get_submodule(name).weight.data.copy_(1 + stock.get_submodule(name).weight.data)
    x, n = drawn()[0][:, :50], 50
    wanted = stock(x, rotary_tables(layer.rotary, n), causal_mask(n))[0]
    # its norms compute in fp32
    torch.testing.assert_close(layer(x), wanted, rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("rank", [None, 7])
def test_latent_attention_is_that_of_deepseek_v3(rank):
    pytest.importorskip("transformers")
    from transformers.models.deepseek_v3 import modeling_deepseek_v3 as theirs

    rope = {"rope_type": "yarn", "rope_theta": 1e4, "factor": 4.0, "mscale": 1.0}
    rope |= {"mscale_all_dim": 1.0, "original_max_position_embeddings": 64}
    config = theirs.DeepseekV3Config(
        hidden_size=24,
        num_attention_heads=3,
        num_key_value_heads=3,
        q_lora_rank=rank,
        rope_interleave=False,
        rope_parameters=rope,
        **LATENT,
    )
    config._attn_implementation = "eager"
    stock = theirs.DeepseekV3Attention(config, 0).double().eval()
    layer = MultiHeadLatentAttention(
        24, 3, q_lora_rank=rank, rope_scaling=YaRN(4, 64), norm_eps=1e-6, **LATENT
    ).double()
    names = {"kv_down": "kv_a_proj_with_mqa", "kv_norm": "kv_a_layernorm", "kv_up": "kv_b_proj"}
    names |= {"o_proj": "o_proj"}
    names |= (
        {"q_proj": "q_proj"}
        if rank is None
        else {"q_proj.0": "q_a_proj", "q_proj.1": "q_a_layernorm", "q_proj.2": "q_b_proj"}
    )
    for ours, other in names.items():
        layer.get_submodule(ours).weight.data.copy_(stock.get_submodule(other).weight.data)
    x, n = drawn()[0][:, :50], 50
    wanted = stock(x, rotary_tables(layer.rotary, n), causal_mask(n))[0]
    torch.testing.assert_close(layer(x), wanted, rtol=1e-4, atol=1e-6)
