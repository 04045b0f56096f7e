"""torch.compile(fullgraph=True) of operators and layers, and the ops that it sees."""

import pytest
import torch
from torch._dynamo.utils import counters

from fla_cp import build_cp_context, causal_conv1d, chunk_kda, library
from fla_cp.backend import TORCH
from fla_cp.nn import KimiDeltaAttention
from fla_cp.ops import conv
from fla_cp.rule import DeltaRule
from tests.cases import INSIDE, PACKED, Case, options

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
    x = {n: t.requires_grad_() for n, t in case.inputs(dtype=torch.float32).items()}
    if v_first:
        x["initial_state"] = x["initial_state"].detach().mT.contiguous().requires_grad_()
    f = call(case, state_v_first=v_first, return_intermediate_states=True)
    both = []
    for run in (f, compiled(f)):
        o, final, h = run(x)
        grads = torch.autograd.grad(o.sin().sum() + final.cos().sum(), list(x.values()))
        both.append((o, final, h, *grads))
    for a, b in zip(*both, strict=True):
        assert torch.equal(a, b)


def test_one_graph_serves_every_packing():
    """Compiled anew for the second shape, and then no more: sizes and context are data."""
    layer = KimiDeltaAttention(16, 2, 8, num_v_heads=4)
    run = compiled(layer)
    gen = torch.Generator().manual_seed(0)
    for n, (T, documents) in enumerate([(100, 1), (131, 4), (90, 2), (300, 7), (65, 1), (257, 3)]):
        inner = torch.randperm(T - 1, generator=gen)[: documents - 1].sort().values + 1
        cu = torch.tensor([0, *inner.tolist(), T])
        context = build_cp_context(cu, None, conv1d_kernel_size=4)
        x = torch.randn(1, T, 16, generator=gen)
        results = []
        for f in (layer, run):
            y = f(x, cp_context=context)
            results.append((y, *torch.autograd.grad(y.sum(), list(layer.parameters()))))
        for a, b in zip(*results, strict=True):
            assert torch.equal(a, b)
        graphs = counters["stats"]["unique_graphs"]
        assert graphs <= min(n + 1, 3), f"{graphs} graphs after packing {n}"


def test_rows_without_context_compile_too():
    layer = KimiDeltaAttention(16, 2, 8)
    run = compiled(layer)
    for B, T in ((2, 70), (2, 90), (3, 64)):
        x = torch.randn(B, T, 16)
        assert torch.equal(layer(x), run(x))


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
    rates = [draw(HV).requires_grad_(), draw(HV * K).requires_grad_()]
    state = draw(2, HV, K, V).requires_grad_() if initial else None
    rule = DeltaRule(scale=0.5, gate="softplus", qk_l2norm=True, keep_intermediates=keep)
    fields = tuple(getattr(rule, n) for n in rule.__dataclass_fields__)
    fixed = library.constants(fields, "torch", None, 2, T // 2)
    args = (*inputs, *rates, state, *fixed, True, True)
    torch.library.opcheck(library.delta_rule, args)
    o, final, _, *saved = library.delta_rule(*(args))
    assert len(fields) == library._RULE_FIELDS
    plain = [t.detach() for t in (*inputs, *rates)]
    first = None if state is None else state.detach()
    saved = [t.detach() for t in saved]
    backward = (o.detach(), final.detach(), *plain, first, *fixed, o.detach(), saved, initial)
    torch.library.opcheck(library.delta_rule_backward, backward)


@pytest.mark.parametrize("bias", [False, True])
def test_opcheck_conv(bias):
    x, weight = torch.randn(20, 3, requires_grad=True), torch.randn(3, 4, requires_grad=True)
    b = torch.randn(3, requires_grad=True) if bias else None
    context = build_cp_context(torch.tensor([0, 5, 20]), None, conv1d_kernel_size=4)
    torch.library.opcheck(conv.conv_op, (x, weight, b, True, "torch", *context.handle, 1))
    y, halo = conv.conv_op(x, weight, b, True, "torch", *context.handle, 1)
    plain = [None if t is None else t.detach() for t in (y, x, halo, weight, b)]
    torch.library.opcheck(conv.conv_backward_op, (*plain, True, "torch", *context.handle, 1))


@pytest.mark.parametrize("keep", [False, True])
def test_kept_shapes_are_those_of_the_stages(keep):
    rule = DeltaRule(scale=1.0, keep_intermediates=keep)
    x = [torch.randn(70, 2, 4), torch.randn(70, 2, 4), torch.randn(70, 2, 6)]
    x += [-torch.rand(70, 2, 4), torch.rand(70, 2), None, None, None]
    fields = tuple(getattr(rule, n) for n in rule.__dataclass_fields__)
    fixed = library.constants(fields, "torch", None, 1, 70)
    kept = library.delta_rule(*x, *fixed, False, False)[5:]
    shapes = TORCH.kept_shapes(keep, torch.float32, 2, 2, 4, 6)
    assert [(tuple(t.shape), t.dtype) for t in kept] == shapes


def sharded(group, rank, cu, T):
    torch.manual_seed(0)
    layer = KimiDeltaAttention(16, 2, 8)
    whole = torch.randn(1, T, 16)
    context = build_cp_context(torch.tensor(cu), group, conv1d_kernel_size=4)
    x = context.shard(whole)
    results = []
    for f in (layer, compiled(layer)):
        y = f(x, cp_context=context)
        results.append((y, *torch.autograd.grad(y.sum(), list(layer.parameters()))))
    for a, b in zip(*results, strict=True):
        assert torch.equal(a, b)
    alone = layer(whole, cp_context=build_cp_context(torch.tensor(cu), None, conv1d_kernel_size=4))
    assert (results[1][0] - context.shard(alone)).abs().max() < 1e-5


def test_ranks(gloo_pool):
    gloo_pool.run(sharded, [0, 90, 200], 200, world_size=2, timeout=200)
