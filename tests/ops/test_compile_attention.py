"""torch.compile(fullgraph=True) of attention layers: one graph for a first packing and one for all
others, with the results of the eager layer."""

import pytest
import torch
from torch._dynamo.utils import counters

from fla_cp import build_cp_context, zigzag_token_ranges
from fla_cp.comm import keys_values
from fla_cp.comm.timing import waits
from fla_cp.nn import Attention, MultiHeadLatentAttention, YaRN
from fla_cp.ops import sent_ahead
from fla_cp.ops.latent_attention_op import latent_op, positions_op
from tests.support.closeness import assert_exact
from tests.support.sweeps import crossed

# Dynamo makes an instance of each autograd.Function that it traces (torch 2.13)
pytestmark = [
    pytest.mark.filterwarnings("ignore:.*should not be instantiated:DeprecationWarning"),
    pytest.mark.filterwarnings("ignore:`torch.jit.script_method` is deprecated:DeprecationWarning"),
]

SIZES = {"kv_lora_rank": 6, "qk_nope_head_dim": 8, "qk_rope_head_dim": 4, "v_head_dim": 5}
LAYERS = {
    "latent": lambda: MultiHeadLatentAttention(16, 3, rope_theta=None, **SIZES),
    "latent rotary": lambda: MultiHeadLatentAttention(
        16, 2, q_lora_rank=7, rope_scaling=YaRN(4, 64), **SIZES
    ),
    "grouped rotary": lambda: Attention(
        16, 4, 2, 8, qk_norm=True, output_gate=True, rotary_dim=4, rope_scaling=YaRN(4, 64)
    ),
}
PACKINGS = [(0, 100), (0, 5, 60, 131), (0, 20, 90), (0, 301)]


def graphs_of(name, group):
    """Compares the compiled layer with the eager one; returns how many graphs there are."""
    torch._dynamo.reset()
    counters.clear()
    torch.manual_seed(0)
    layer = LAYERS[name]().double()
    run = torch.compile(layer, fullgraph=True, backend="aot_eager")
    R = 1 if group is None else group.size()
    for n, offsets in enumerate(PACKINGS):
        ranges = zigzag_token_ranges(offsets[-1], R)
        context = build_cp_context(torch.tensor(offsets), group, token_ranges=ranges)
        x, dy = (
            context.shard(torch.randn(1, offsets[-1], 16, dtype=torch.float64)) for _ in range(2)
        )
        results = []
        for f in (layer, run):
            leaf = x.detach().requires_grad_()
            y = f(leaf, cp_context=context)
            grads = torch.autograd.grad(y, [leaf, *layer.parameters()], dy)
            results.append((y.detach(), *grads))
        for i, (a, b) in enumerate(zip(*results, strict=True)):
            assert_exact(f"result {i} of packing {n}", b, a)
    return counters["stats"]["unique_graphs"]


@pytest.mark.parametrize("name", crossed(["latent rotary", "grouped rotary", "latent"], fast=2))
def test_layers_have_two_graphs_at_most(name):
    assert graphs_of(name, None) <= 2


def on_ranks(group, rank, name):
    return graphs_of(name, group)


@pytest.mark.parametrize("name", crossed(["latent", "latent rotary", "grouped rotary"], fast=1))
def test_layers_over_ranks_have_two_graphs_at_most(gloo_pool, name):
    assert max(gloo_pool.run(on_ranks, name, world_size=2)) <= 2


def in_a_ring(group, rank, name):
    """The same where no keys and values fit on a rank."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(keys_values, "MAX_GATHERED", 0)
        return graphs_of(name, group)


@pytest.mark.parametrize("name", crossed(["latent rotary", "latent"], fast=1))
def test_a_ring_of_latents_has_two_graphs_at_most(gloo_pool, name):
    assert max(gloo_pool.run(in_a_ring, name, world_size=2)) <= 2


def between_sending_and_reading(group, rank, name, backend, in_a_ring):
    """Names of the matrix products that a compiled forward runs while its keys are under way, and
    how many exchanges it waits for."""
    torch._dynamo.reset()
    torch.manual_seed(0)
    layer = LAYERS[name]()
    context = build_cp_context(torch.tensor([0, 5, 60, 131]), group)
    x = context.shard(torch.randn(1, 131, 16))
    with pytest.MonkeyPatch.context() as patch:
        if in_a_ring:
            patch.setattr(keys_values, "MAX_GATHERED", 0)
        run = torch.compile(layer, fullgraph=True, backend=backend)
        expected = layer(x, cp_context=context)
        found = [run(x, cp_context=context)]
        before = waits.count
        with torch.profiler.profile() as profile:
            found.append(run(x, cp_context=context))
    for y in found:
        assert (y - expected).norm() <= 1e-6 * expected.norm()
    assert not sent_ahead._sent
    names = [e.name for e in sorted(profile.events(), key=lambda e: e.time_range.start)]
    sent = next(i for i, n in enumerate(names) if n.startswith("fla_cp::send_"))
    read = next(i for i, n in enumerate(names) if n.endswith("_attention"))
    return names[sent:read].count("aten::mm"), waits.count - before


@pytest.mark.parametrize(
    "name, backend, in_a_ring, products",
    [
        ("grouped rotary", "aot_eager", False, 2),  # of q, and of the gate
        ("latent", "aot_eager", True, 1),
        pytest.param("grouped rotary", "inductor", False, 2, marks=pytest.mark.wide),
    ],
)
def test_work_runs_beside_the_exchange(gloo_pool, name, backend, in_a_ring, products):
    given = name, backend, in_a_ring
    for found, count in gloo_pool.run(between_sending_and_reading, *given, world_size=2):
        assert found == products
        assert count == 1


def test_what_was_sent_is_taken_once():
    sent = sent_ahead.Sent(None, None)
    ticket = sent_ahead.ticket_for(sent)
    assert sent_ahead.taken(ticket) is sent
    assert sent_ahead.taken(ticket) is None
    assert sent_ahead.taken(None) is None


def test_what_nothing_takes_is_forgotten(monkeypatch):
    monkeypatch.setattr(sent_ahead, "MOST", 2)
    waited = []

    class Exchange:
        def wait(self):
            waited.append(self)

    exchanges = [Exchange() for _ in range(3)]
    tickets = [sent_ahead.ticket_for(sent_ahead.Sent(None, x)) for x in exchanges]
    assert waited == exchanges[:1]
    assert [sent_ahead.taken(t) is None for t in tickets] == [True, False, False]


@pytest.mark.parametrize("name", crossed(["latent rotary", "grouped rotary"], fast=1))
def test_rows_compile_too(name):
    torch._dynamo.reset()
    layer = LAYERS[name]().double()
    run = torch.compile(layer, fullgraph=True, backend="aot_eager")
    for B, T in ((2, 70), (3, 50)):
        x = torch.randn(B, T, 16, dtype=torch.float64)
        assert_exact("y", run(x).detach(), layer(x).detach())


@pytest.mark.parametrize("name", LAYERS)
def test_one_token_compiles_too(name):
    """Its gradients are contiguous where those of more tokens are copied out of a joint tensor."""
    torch._dynamo.reset()
    torch.manual_seed(0)
    layer = LAYERS[name]().double()
    run, x = torch.compile(layer, fullgraph=True, backend="aot_eager"), torch.randn(1, 1, 16)
    found = []
    for f in (layer, run):
        leaf = x.double().requires_grad_()
        y = f(leaf)
        found.append([y.detach(), *torch.autograd.grad(y.sum(), [leaf, *layer.parameters()])])
    for a, b in zip(*found, strict=True):
        assert_exact(name, b, a)


def test_autocast_compiles_too():
    torch._dynamo.reset()
    layer, x = LAYERS["latent rotary"](), torch.randn(1, 70, 16)
    context = build_cp_context(torch.tensor([0, 30, 70]), None)
    found = []
    for f in (layer, torch.compile(layer, fullgraph=True, backend="aot_eager")):
        with torch.autocast("cpu", torch.bfloat16):
            y = f(x, cp_context=context)
        y.float().sum().backward()
        found.append((y.detach(), layer.kv_up.weight.grad))
        layer.zero_grad()
    (y, dw), (y_compiled, dw_compiled) = found
    assert y_compiled.dtype == torch.bfloat16 and dw_compiled.dtype == torch.float32
    assert (y_compiled - y).norm() <= 2**-7 * y.norm()
    assert (dw_compiled - dw).norm() <= 2**-6 * dw.norm()


def test_a_context_of_fixed_shape_is_refused():
    torch._dynamo.reset()
    layer = LAYERS["latent"]()
    context = build_cp_context(torch.tensor([0, 70]), None, max_sequences=2)
    with pytest.raises(Exception, match="cannot be used under torch"):
        torch.compile(layer, fullgraph=True, backend="eager")(
            torch.randn(1, 70, 16), cp_context=context
        )


def test_opcheck():
    context = build_cp_context(torch.tensor([0, 20, 70]), None)
    shapes = [(70, 2, 12), (70, 6), (70, 4), (2 * 13, 6)]
    inputs = [torch.randn(shape).requires_grad_() for shape in shapes]
    torch.library.opcheck(latent_op, (*inputs, 0.5, *context.handle, 1, None))
    torch.library.opcheck(positions_op, (inputs[0].detach(), *context.handle, 1))
    assert positions_op(inputs[0].detach(), *context.handle, 1).tolist() == [*range(20), *range(50)]
