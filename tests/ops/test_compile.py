"""torch.compile(fullgraph=True) of operators and layers, and the ops in the graph."""

from functools import partial

import pytest
import torch
from functorch.compile import make_boxed_func
from torch._dynamo.backends.common import aot_autograd
from torch._dynamo.utils import counters

from fla_cp import (
    build_cp_context,
    causal_attention,
    causal_conv1d,
    chunk_kda,
    contiguous_token_ranges,
    custom_op,
    custom_op_cp,
    nn,
    zigzag_token_ranges,
)
from fla_cp.kernels import TORCH, using
from fla_cp.kernels.torch.backend import TorchBackend
from fla_cp.ops import conv_op
from fla_cp.ops.attention_op import attention_op
from fla_cp.rule import DeltaRule
from tests.support.cases import INSIDE, PACKED, Case, options
from tests.support.closeness import assert_exact
from tests.support.sweeps import crossed

# Dynamo makes an instance of each autograd.Function that it traces (torch 2.13)
pytestmark = pytest.mark.filterwarnings("ignore:.*should not be instantiated:DeprecationWarning")

CASES = [
    Case("plain", T=70, K=8, V=16),
    Case("inside", T=70, K=8, V=16, HV=4, options=options(**INSIDE)),
    Case("kept", T=65, B=2, K=8, V=16, options=options(**INSIDE, disable_recompute=True)),
]


@pytest.fixture(autouse=True)
def fresh():
    torch._dynamo.reset()
    counters.clear()


def compiled(f):
    return torch.compile(f, fullgraph=True, backend="aot_eager")


def call(case, **more):
    def f(x):
        o, *states = chunk_kda(
            *(x[n] for n in PACKED),
            A_log=x.get("A_log"),
            dt_bias=x.get("dt_bias"),
            initial_state=x["initial_state"],
            output_final_state=True,
            **case.keywords,
            **more,
        )
        return (o, *states)

    return f


@pytest.mark.parametrize("v_first", [False, True])
@pytest.mark.parametrize("case", CASES, ids=lambda c: c.name)
def test_compiled_operator_equals_eager(case, v_first):
    x = {n: t.requires_grad_() for n, t in case.inputs().items()}
    if v_first:
        x["initial_state"] = x["initial_state"].detach().mT.contiguous().requires_grad_()
    f = call(case, state_v_first=v_first, return_intermediate_states=True)
    both = []
    for run in (f, compiled(f)):
        o, final, h = run(x)
        assert not h.requires_grad  # no gradient comes from it
        grads = torch.autograd.grad(o.sin().sum() + final.cos().sum(), list(x.values()))
        both.append((o, final, h, *grads))
    for i, (a, b) in enumerate(zip(*both, strict=True)):
        assert_exact(f"result {i}", b, a)


def test_compiled_calls_have_the_chunks_that_are_asked_for():
    """Without a context, and under one of two ranges, which hand a state on."""
    case = Case("asked", T=131, K=8, V=16, options=options(**INSIDE))
    x = {n: t.requires_grad_() for n, t in case.inputs().items()}
    context = build_cp_context(torch.tensor([0, 131]), None, token_ranges=[[(0, 70), (70, 131)]])
    for where in ({}, {"cp_context": context}):
        lengths = (70, 61) if where else (131,)
        run = compiled(lambda x, n, where=where: call(case, chunk_size=n, **where, **H)(x))
        for size in (64, 16, None, 32):
            both = []
            for f in (call(case, **where), lambda x, size=size, run=run: run(x, size)):
                o, final, *h = f(x)
                loss = o.sin().sum() + final.cos().sum()
                both.append((o, final, *torch.autograd.grad(loss, list(x.values()))))
            assert h[0].shape[1] == sum(-(-n // (size or 64)) for n in lengths)
            for i, (a, b) in enumerate(zip(*both, strict=True)):
                assert_exact(f"result {i}", b, a)


H = {"return_intermediate_states": True}


class Cut(TorchBackend):
    """A backend that cuts every two chunks, as far as a graph has memory for it."""

    def segment(self, packing, HV, K, V, device, backward, extra=None):
        cut = packing.cut(2)
        added = len(cut.segments) - len(packing.segments)
        assert extra is None or 0 < added <= extra
        return cut

    def extra_segments(self, HV, V, device):
        return 5


@pytest.mark.parametrize("keep", [False, True])
def test_compiled_calls_are_cut_into_segments(keep):
    case = Case("cut", T=600, K=8, V=16, options=options(**INSIDE, disable_recompute=keep))
    x = {n: t.requires_grad_() for n, t in case.inputs().items()}
    f, both = call(case, return_intermediate_states=True), []
    for run, backend in ((f, TORCH), (f, Cut()), (compiled(f), Cut())):
        with using(backend):
            o, final, h = run(x)
            loss = o.sin().sum() + final.cos().sum()
            both.append((o, final, h, *torch.autograd.grad(loss, list(x.values()))))
    for i, (whole, eager, found) in enumerate(zip(*both, strict=True)):
        assert_exact(f"result {i}", eager, whole)
        assert_exact(f"result {i}", found, whole)


@pytest.mark.wide
def test_one_graph_serves_every_packing():
    """It is compiled a second time for the second T only: sizes and context are data. A packing of
    one chunk or one token would have a graph of its own, as torch.compile assumes of a size of 1.
    """
    layer = nn.KimiDeltaAttention(16, 2, 8, num_v_heads=4).double()
    run = compiled(layer)
    gen = torch.Generator().manual_seed(0)
    for n, (T, documents) in enumerate([(100, 1), (131, 4), (90, 2), (300, 7), (65, 1), (257, 3)]):
        inner = torch.randperm(T - 1, generator=gen)[: documents - 1].sort().values + 1
        cu = torch.tensor([0, *inner.tolist(), T])
        context = build_cp_context(cu, None, conv1d_kernel_size=4)
        x = torch.randn(1, T, 16, generator=gen, dtype=torch.float64)
        results = []
        for f in (layer, run):
            y = f(x, cp_context=context)
            results.append((y, *torch.autograd.grad(y.sum(), list(layer.parameters()))))
        for i, (a, b) in enumerate(zip(*results, strict=True)):
            assert_exact(f"result {i} of packing {n}", b, a)
        graphs = counters["stats"]["unique_graphs"]
        assert graphs == min(n + 1, 2), f"{graphs} graphs after packing {n}"


T_FIXED = 600
FIXED_PACKINGS = [
    (0, T_FIXED),  # passes through a rank
    (0, 40, T_FIXED),
    (0, 250, 310, 420, T_FIXED),
    (0, *range(7, T_FIXED, 50), T_FIXED),
    (0, 299, T_FIXED),  # one token of a document is on the rank before
    (0, 1, T_FIXED - 1, T_FIXED),
    (0, 150, 300, 450, T_FIXED),  # no document is on two ranks
    (0, *range(10, T_FIXED, 10), T_FIXED),
]


def compiled_layer(group, rank, name, zigzag):
    """How many graphs there are after each packing; each is right."""
    torch._dynamo.reset()
    counters.clear()
    torch.manual_seed(0)
    layer, graphs = getattr(nn, name)(16, 2, 8, num_v_heads=4).double(), []
    run, gen = compiled(layer), torch.Generator().manual_seed(0)
    cut = zigzag_token_ranges if zigzag else contiguous_token_ranges
    for n, cu in enumerate(FIXED_PACKINGS):
        ranges = cut(T_FIXED, group.size())
        given = {"token_ranges": ranges, "conv1d_kernel_size": 4}
        context = build_cp_context(torch.tensor(cu), group, **given)
        if name == "GatedDeltaProduct":
            context.repeated(2)
        x = context.shard(torch.randn(1, T_FIXED, 16, generator=gen, dtype=torch.float64))
        results = []
        for f in (layer, run):
            y = f(x, cp_context=context)
            results.append((y, *torch.autograd.grad(y.sum(), list(layer.parameters()))))
        for i, (a, b) in enumerate(zip(*results, strict=True)):
            assert_exact(f"result {i} of packing {n}", b, a)
        graphs.append(counters["stats"]["unique_graphs"])
    return graphs


@pytest.mark.parametrize(
    "name, zigzag",
    [
        ("GatedDeltaNet", False),
        pytest.param("GatedDeltaNet", True, marks=pytest.mark.wide),
        pytest.param("KimiDeltaAttention", True, marks=pytest.mark.wide),
        pytest.param("GatedDeltaProduct", False, marks=pytest.mark.wide),
    ],
)
def test_layers_over_ranks_have_two_graphs_at_most(gloo_pool, name, zigzag):
    """One for packings of which a document is on two ranks, and one without an exchange. With one
    for each size that changes, torch.compile would refuse the ninth and end the run."""
    for graphs in gloo_pool.run(compiled_layer, name, zigzag, world_size=2):
        assert graphs == [1] * 6 + [2] * 2


def test_rows_of_a_context_are_made_before_a_graph():
    """A graph cannot make them, and the error says who does."""
    layer = nn.GatedDeltaProduct(16, 2, 8).double()
    run = compiled(layer)
    for cu in ((0, 5, 60, 131), (0, 100, 131), (0, 9, 131)):
        context = build_cp_context(torch.tensor(cu), None, conv1d_kernel_size=4)
        x = torch.randn(1, cu[-1], 16, dtype=torch.float64)
        with pytest.raises(Exception, match=r"2 householder steps .* cp_context\.repeated\(2\)"):
            run(x, cp_context=context)
        context.repeated(2)
        assert_exact("y", run(x, cp_context=context), layer(x, cp_context=context))


def test_a_size_that_changes_late_needs_no_graph():
    """After one change of T alone, every other size may change."""
    layer = nn.GatedDeltaNet(16, 2, 8).double()
    run = compiled(layer)
    for cu in ((0, 5, 60, 131), (0, 128, 256), (0, 100), (0, 2, 4, 6, 500)):
        context = build_cp_context(torch.tensor(cu), None, conv1d_kernel_size=4)
        x = torch.randn(1, cu[-1], 16, dtype=torch.float64)
        assert_exact("y", run(x, cp_context=context), layer(x, cp_context=context))
    assert counters["stats"]["unique_graphs"] == 2


@pytest.mark.wide
def test_rows_without_context_compile_too():
    layer = nn.KimiDeltaAttention(16, 2, 8).double()
    run = compiled(layer)
    for B, T in ((2, 70), (2, 90), (3, 64)):
        x = torch.randn(B, T, 16, dtype=torch.float64)
        assert_exact("y", run(x), layer(x))


def attention_step(q, k, v, cp_context=None, exchange="auto"):
    return causal_attention(q.sin(), k, v, cp_context=cp_context, exchange=exchange).cos()


def attention_graphs(contexts, exchange="auto"):
    """Compares compiled attention with eager; returns how many graphs there are."""
    gen, run = torch.Generator().manual_seed(0), compiled(attention_step)
    for n, context in enumerate(contexts):
        drawn = [
            context.shard(torch.randn(1, context.total_tokens, *s, generator=gen).double())
            for s in ((4, 8), (2, 8), (2, 6))
        ]
        results = []
        for f in (attention_step, run):
            leaves = [x.detach().requires_grad_() for x in drawn]
            o = f(*leaves, cp_context=context, exchange=exchange)
            results.append((o.detach(), *torch.autograd.grad(o.square().sum(), leaves)))
        for i, (a, b) in enumerate(zip(*results, strict=True)):
            assert_exact(f"result {i} of packing {n}", b, a)
    return counters["stats"]["unique_graphs"]


PACKINGS = [(0, 100), (0, 5, 60, 131), (0, 20, 90), (0, 301)]


def test_attention_has_two_graphs_at_most():
    contexts = [build_cp_context(torch.tensor(cu), None) for cu in PACKINGS]
    assert attention_graphs(contexts) <= 2


def compiled_attention(group, rank, exchange):
    torch._dynamo.reset()
    counters.clear()
    contexts = [
        build_cp_context(
            torch.tensor(cu), group, token_ranges=zigzag_token_ranges(cu[-1], group.size())
        )
        for cu in PACKINGS
    ]
    return attention_graphs(contexts, exchange)


@pytest.mark.parametrize("exchange", crossed(["by_heads", "ring", "gathered", "auto"], fast=2))
def test_attention_over_ranks_has_two_graphs_at_most(gloo_pool, exchange):
    assert max(gloo_pool.run(compiled_attention, exchange, world_size=2)) <= 2


def test_rows_of_attention_compile_too():
    run = compiled(attention_step)
    for B, T in ((2, 70), (3, 50)):
        q, k, v = (torch.randn(B, T, h, 8, dtype=torch.float64) for h in (4, 2, 2))
        assert_exact("o", run(q, k, v), attention_step(q, k, v))


@pytest.mark.parametrize("heads", [(4, 2), (3, 3)])
def test_opcheck_of_attention(heads):
    context = build_cp_context(torch.tensor([0, 20, 70]), None)
    q, k, v = (
        torch.randn(70, h, n).requires_grad_()
        for h, n in zip((*heads, heads[1]), (8, 8, 6), strict=True)
    )
    torch.library.opcheck(attention_op, (q, k, v, 0.5, "auto", *context.handle, 1, None))


def test_cu_seqlens_under_compile_names_the_way_out():
    x = torch.randn(1, 10, 4)
    f = compiled(lambda x, cu: causal_conv1d(x, torch.randn(4, 2), cu_seqlens=cu))
    with pytest.raises(Exception, match="build_cp_context"):
        f(x, torch.tensor([0, 4, 10]))


def test_wrong_local_length_is_caught_at_run_time():
    context = build_cp_context(torch.tensor([0, 70]), None)
    case = Case("short", T=64, K=8, V=8, states=False)
    packed = [case.inputs(dtype=torch.float32)[n] for n in PACKED]
    with pytest.raises(ValueError, match="local_tokens=70, got T=64"):
        compiled(lambda *x: chunk_kda(*x, cp_context=context)[0])(*packed)


@pytest.mark.parametrize("keep", [False, True])
@pytest.mark.parametrize("initial", [False, True])
def test_opcheck(keep, initial):
    T, H, HV, K, V = 70, 1, 2, 4, 6
    draw = torch.randn
    packed = [draw(T, H, K), draw(T, H, K), draw(T, HV, V), -draw(T, HV, K).abs(), draw(T, HV)]
    inputs = [t.requires_grad_() for t in packed]
    rates = [draw(HV).requires_grad_(), draw(HV * K).requires_grad_(), None]
    state = draw(2, HV, K, V).requires_grad_() if initial else None
    rule = DeltaRule(scale=0.5, gate="softplus", qk_l2norm=True, keep_intermediates=keep)
    fields = tuple(rule)
    fixed = custom_op.constants(fields, "torch", None, 2, T // 2)
    args = (*inputs, *rates, state, *fixed, True, True)
    torch.library.opcheck(custom_op.delta_rule, args)
    o, final, _, *saved = custom_op.delta_rule(*(args))
    plain = [None if t is None else t.detach() for t in (*inputs, *rates)]
    first = None if state is None else state.detach()
    saved = [t.detach() for t in saved]
    backward = (o.detach(), final.detach(), *plain, first, *fixed, o.detach(), saved, initial)
    torch.library.opcheck(custom_op.delta_rule_backward, backward)


@pytest.mark.parametrize("keep, initial, size", crossed([False, True], [False, True], [None, 16]))
def test_opcheck_of_the_halves(keep, initial, size):
    """The ops for several ranks, on one rank whose two ranges hand states to each other."""
    T, H, HV, K, V = 90, 1, 2, 4, 6
    draw = partial(torch.randn, dtype=torch.float64)
    ranges = [[(50, 90), (0, 50)]]
    context = build_cp_context(torch.tensor([0, 20, 90]), None, token_ranges=ranges)
    packed = [draw(T, H, K), draw(T, H, K), draw(T, HV, V), -draw(T, HV, K).abs(), draw(T, HV)]
    inputs = [*packed, draw(HV), draw(HV * K), None, draw(2, HV, K, V) if initial else None]
    rule = DeltaRule(scale=0.5, gate="softplus", qk_l2norm=True, keep_intermediates=keep)
    fields = tuple(rule._replace(chunk_size=size))
    fixed = (*fields, "torch", *context.handle, 1)
    check, ops = torch.library.opcheck, custom_op_cp
    check(ops.begin_op, (*inputs, *fixed))
    wire, offset, transition, *chunks = ops.begin_op(*inputs, *fixed)
    args = (*inputs, *fixed, wire[None], offset, transition, chunks, True, True)
    check(ops.finish_op, args)
    o, final, _, carried, *kept = ops.finish_op(*args)
    whole = custom_op.delta_rule(*inputs, *fixed, True, True)
    assert_exact("o", o, whole[0])
    assert_exact("final_state", final, whole[1])
    saved = [
        carried,
        transition,
        *(chunks if keep else (chunks[i] for i in TORCH.always_kept(rule))),
        *kept,
    ]
    grads = (o, final)
    check(ops.begin_backward_op, (*grads, *inputs, *fixed, o, saved))
    wire, offset, *chunks = ops.begin_backward_op(*grads, *inputs, *fixed, o, saved)
    args = (*grads, *inputs, *fixed, o, saved, wire[None], offset, chunks, initial)
    check(ops.finish_backward_op, args)
    exact = custom_op.delta_rule_backward(*grads, *inputs, *fixed, o, whole[3:], initial)
    for i, (a, b) in enumerate(zip(ops.finish_backward_op(*args), exact, strict=True)):
        assert_exact(f"gradient {i}", a, b)


@pytest.mark.parametrize("bias", [False, True])
def test_opcheck_conv(bias):
    x, weight = torch.randn(20, 3, requires_grad=True), torch.randn(3, 4, requires_grad=True)
    b = torch.randn(3, requires_grad=True) if bias else None
    context = build_cp_context(torch.tensor([0, 5, 20]), None, conv1d_kernel_size=4)
    halo = torch.randn(3, 3, requires_grad=True)
    args = (True, "torch", *context.handle, 1)
    torch.library.opcheck(conv_op.conv_op, (x, halo, weight, b, *args))
    y = conv_op.conv_op(x, halo, weight, b, *args)
    plain = [None if t is None else t.detach() for t in (y, x, halo, weight, b)]
    torch.library.opcheck(torch.ops.fla_cp.causal_conv1d_backward, (*plain, *args))


def test_compiled_layer_decodes():
    """Without gradients a layer computes short inputs token by token."""
    layer, x = nn.KimiDeltaAttention(16, 2, 8).eval(), torch.randn(2, 7, 16)
    with torch.no_grad():
        whole, cache = layer(x), layer.make_cache(2, 7)
        torch.testing.assert_close(compiled(layer)(x), whole)
        step = compiled(lambda x, cache: layer(x, cache=cache))
        parts = [step(part, cache) for part in x.split([4, 1, 1, 1], 1)]
    torch.testing.assert_close(torch.cat(parts, 1), whole)


@pytest.mark.parametrize("size, chunks", [(None, 2), (16, 5), (32, 3), (64, 2)])
@pytest.mark.parametrize("keep", [False, True])
def test_kept_shapes_are_those_of_the_stages(keep, size, chunks):
    rule = DeltaRule(scale=1.0, keep_intermediates=keep, chunk_size=size)
    x = [torch.randn(70, 2, 4), torch.randn(70, 2, 4), torch.randn(70, 2, 6)]
    x += [-torch.rand(70, 2, 4), torch.rand(70, 2), None, None, None, None]
    fields = tuple(rule)
    fixed = custom_op.constants(fields, "torch", None, 1, 70)
    kept = custom_op.delta_rule(*x, *fixed, False, False)[5:]
    shapes = TORCH.kept_shapes(rule, torch.float32, chunks, 2, 4, 6)
    assert [(tuple(t.shape), t.dtype) for t in kept] == shapes


def sharded(group, rank, cu, T, ranges=None, keeps=(False,)):
    """A compiled layer and operator with states, against eager and against one rank. keeps: whether
    the operator recomputes in its backward or not; it is called with each of them."""
    torch._dynamo.reset()  # the ranks' processes have run other tests
    torch.manual_seed(0)
    layer = nn.KimiDeltaAttention(16, 2, 8)
    whole = torch.randn(1, T, 16)
    context = build_cp_context(torch.tensor(cu), group, conv1d_kernel_size=4, token_ranges=ranges)
    x = context.shard(whole).requires_grad_()
    graphs = []

    def inspect(graph, _):
        graphs.append(graph)
        return make_boxed_func(graph.forward)

    both = aot_autograd(fw_compiler=inspect, bw_compiler=inspect)
    results = []
    for f in (layer, torch.compile(layer, fullgraph=True, backend=both)):
        y = f(x, cp_context=context)
        results.append((y, *torch.autograd.grad(y.square().sum(), [x, *layer.parameters()])))
    for a, b in zip(*results, strict=True):
        assert (a - b).abs().max() <= 1e-5 * a.abs().max().clamp(min=1e-3) if a.numel() else True
    alone = layer(whole, cp_context=build_cp_context(torch.tensor(cu), None, conv1d_kernel_size=4))
    difference = (results[1][0] - context.shard(alone)).abs()
    assert not difference.numel() or difference.max() < 1e-5
    names = [str(n.target) for g in graphs for n in g.graph.nodes if n.op == "call_function"]
    for keep in keeps:
        more = options(**INSIDE, disable_recompute=keep)
        case = Case("sharded", T=T, K=8, V=16, cu_seqlens=tuple(cu), options=more)
        inputs = case.inputs(dtype=torch.float32)
        inputs = {n: context.shard(t) if n in PACKED else t for n, t in inputs.items()}
        leaves = {n: t.detach().requires_grad_() for n, t in inputs.items()}
        f = call(case, cp_context=context, return_intermediate_states=True)
        found = []
        for run in (f, compiled(f)):
            o, final, h = run(leaves)
            loss = o.sin().sum() + final.cos().sum()
            found.append((o, final, h, *torch.autograd.grad(loss, list(leaves.values()))))
        for a, b in zip(*found, strict=True):
            if a.numel():
                assert (a - b).abs().max() <= 1e-5 * a.abs().max().clamp(min=1e-3), keep
    return names


CROSSING = {
    "one rank without": ([0, 7, 7, 200, 201], [[(100, 201)], [], [(0, 100)]]),
    "zigzag": ([0, 250], zigzag_token_ranges(250, 3)),
    "plain": ([0, 90, 200], None),
}


@pytest.mark.wide
@pytest.mark.parametrize("where", CROSSING)
def test_ranks_exchange_in_the_graph(gloo_pool, where):
    cu, ranges = CROSSING[where]
    size = 2 if ranges is None else 3
    for names in gloo_pool.run(sharded, cu, cu[-1], ranges, (False, True), world_size=size):
        # forward: states and rows of the convolution; backward: states and gradients of the rows
        assert sum("all_gather_into_tensor" in n for n in names) == 3, names
        assert sum("reduce_scatter_tensor" in n for n in names) == 1


def sharded_cut(group, rank):
    with using(Cut()):
        sharded(group, rank, [0, 1000], 1000)


def test_ranks_cut_in_the_graph(gloo_pool):
    gloo_pool.run(sharded_cut, world_size=2)


@pytest.mark.wide
def test_no_collective_in_the_graph_where_nothing_crosses(gloo_pool):
    for names in gloo_pool.run(sharded, [0, 100, 200], 200, world_size=2):
        assert not any("c10d" in n for n in names)
