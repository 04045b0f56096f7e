"""Arguments that callers of other libraries pass.

These are other shapes of the gate's parameters, states in half precision, and a safe gate that is
given; also the dtype of returned states.
"""

import dataclasses

import pytest
import torch

import fla_cp
from fla_cp import build_cp_context, chunk_kda, fused_recurrent_kda, gdn_gate, kda_gate
from tests.support.cases import INSIDE, PACKED, Case, options
from tests.support.ranks import run_threads
from tests.support.sweeps import crossed

IMPLS = ["torch", "triton"]
HALVES = [torch.bfloat16, torch.float16]
H, HV, K, V = 1, 2, 16, 16
CASE = Case("taken", T=66, H=H, HV=HV, K=K, V=V, options=options(**INSIDE))
GIVEN = Case("given", T=66, H=H, HV=HV, K=K, V=V, decay=0.1)

pytestmark = [
    pytest.mark.filterwarnings("ignore:.*should not be instantiated:DeprecationWarning"),
    # products of pairs that are masked away later may overflow; numpy warns of it
    pytest.mark.filterwarnings("ignore:overflow encountered:RuntimeWarning"),
    pytest.mark.filterwarnings("ignore:invalid value encountered:RuntimeWarning"),
]


@pytest.fixture(autouse=True)
def interpreted(monkeypatch):
    pytest.importorskip("triton")
    monkeypatch.setenv("TRITON_INTERPRET", "1")


def run(x, op=chunk_kda, **more):
    """Outputs and then gradients, by name."""
    leaves = {n: t.detach().clone().requires_grad_() for n, t in x.items()}
    packed = [leaves[n] for n in PACKED]
    rest = {n: t for n, t in leaves.items() if n not in PACKED}
    o, final = op(*packed, **rest, **CASE.keywords, **more, output_final_state=True)
    grads = torch.autograd.grad(o.sin().sum() + final.cos().sum(), list(leaves.values()))
    return o.detach(), final.detach(), dict(zip(leaves, grads, strict=True))


def assert_alike(found, exact, size=1e-6):
    """Asserts equality up to a rounding of the sums."""
    error = (found - exact).abs().max()
    assert found.dtype == exact.dtype
    assert error <= size * exact.abs().max().clamp(min=1e-3), error


A_SHAPES = [(1, 1, HV, 1), (HV, 1), (1, HV)]


@pytest.mark.parametrize("impl", IMPLS)
def test_shapes_of_the_gates_parameters(impl):
    """Gradients have the shape of the argument."""
    x = CASE.inputs(dtype=torch.float32)
    exact = run(x, impl=impl)
    for A_shape, b_shape in zip(A_SHAPES, [(HV, K), (1, HV, K), (1, HV * K)], strict=True):
        given = {**x, "A_log": x["A_log"].view(A_shape), "dt_bias": x["dt_bias"].view(b_shape)}
        o, final, grads = run(given, impl=impl)
        assert_alike(o, exact[0])
        assert_alike(final, exact[1])
        for name, grad in grads.items():
            assert grad.shape == given[name].shape, name
            assert_alike(grad.view_as(exact[2][name]), exact[2][name])
        if impl == "triton":  # one shape is enough for the slow interpreter
            break


@pytest.mark.parametrize("impl", IMPLS)
def test_those_shapes_in_the_gates_alone_and_token_by_token(impl):
    x = CASE.inputs(dtype=torch.float32)
    A_log, dt_bias = x["A_log"].view(1, 1, HV, 1), x["dt_bias"].view(HV, K)
    exact = kda_gate(x["g"], x["A_log"], x["dt_bias"], impl=impl)
    leaves = [t.clone().requires_grad_() for t in (A_log, dt_bias)]
    found = kda_gate(x["g"], *leaves, impl=impl)
    assert_alike(found.detach(), exact)
    grads = torch.autograd.grad(found.sum(), leaves)
    assert [g.shape for g in grads] == [t.shape for t in leaves]
    of_heads = gdn_gate(x["beta"], x["A_log"], x["A_log"], impl=impl)
    assert_alike(gdn_gate(x["beta"], A_log, A_log, impl=impl), of_heads)
    packed = [x[n][:, :3] for n in PACKED]
    rest = {**CASE.keywords, "impl": impl}
    exact = fused_recurrent_kda(*packed, A_log=x["A_log"], dt_bias=x["dt_bias"], **rest)[0]
    assert_alike(fused_recurrent_kda(*packed, A_log=A_log, dt_bias=dt_bias, **rest)[0], exact)


def test_a_bias_in_two_dims_is_read_by_heads_and_channels():
    """[HV, K] also if HV = K, and with strides that are not those of one line."""
    case = dataclasses.replace(CASE, T=5, HV=K)
    x = case.inputs(dtype=torch.float32)
    packed = [x[n] for n in PACKED]
    exact = chunk_kda(*packed, A_log=x["A_log"], dt_bias=x["dt_bias"], **case.keywords)[0]
    strided = x["dt_bias"].view(K, K).mT.contiguous().mT
    found = chunk_kda(*packed, A_log=x["A_log"], dt_bias=strided, **case.keywords)[0]
    assert_alike(found, exact)
    other = chunk_kda(*packed, A_log=x["A_log"], dt_bias=strided.mT, **case.keywords)[0]
    assert not torch.allclose(other, exact)


def test_shapes_of_the_gates_parameters_in_the_family():
    for name in ("gated_delta_rule", "simple_gla", "comba", "gated_delta_product"):
        x = Case("family", T=4, H=H, HV=HV, K=4, V=4, states=False).inputs(dtype=torch.float32)
        g, beta = x["g"][..., 0], x["beta"]
        packed = [x["q"], x["k"], x["v"], *([x["k"]] if name == "comba" else []), g]
        packed += [] if "gla" in name else [beta]
        packed += [1] if "product" in name else []
        rates = torch.randn(2, HV)
        for form in ("chunk", "fused_recurrent"):
            op = getattr(fla_cp, f"{form}_{name}")
            both = [
                op(*packed, A_log=a, dt_bias=b, use_gate_in_kernel=True)[0]
                for a, b in (rates, rates.view(2, 1, 1, HV, 1))
            ]
            assert_alike(both[1], both[0])


@pytest.mark.parametrize("dtype, impl", crossed(HALVES, IMPLS))
def test_states_in_half_precision(impl, dtype):
    """Results are as if the caller had widened the states, with a gradient in their dtype."""
    x = CASE.inputs(dtype=torch.float32)
    half = x["initial_state"].to(dtype)
    exact = run({**x, "initial_state": half.float()}, impl=impl)
    o, final, grads = run({**x, "initial_state": half}, impl=impl)
    assert_alike(o, exact[0])
    assert_alike(final, exact[1])
    for name, grad in grads.items():
        if name == "initial_state":
            assert grad.dtype == dtype
            assert_alike(grad, exact[2][name].to(dtype), size=2 * torch.finfo(dtype).eps)
        else:
            assert_alike(grad, exact[2][name])


@pytest.mark.parametrize("impl", IMPLS)
def test_states_in_half_precision_token_by_token(impl):
    x = GIVEN.inputs(dtype=torch.bfloat16)
    packed = [x[n][:, :3] for n in PACKED]
    half = x["initial_state"].bfloat16()
    call = {"impl": impl, "output_final_state": True}
    exact = fused_recurrent_kda(*packed, initial_state=half.float(), **call)
    kept = half.clone()
    found = fused_recurrent_kda(*packed, initial_state=half, **call)
    for a, b in zip(found, exact, strict=True):
        assert_alike(a, b)
    assert torch.equal(half, kept)
    with pytest.raises(ValueError, match=r"initial_state of torch.float32, got torch.bfloat16"):
        fused_recurrent_kda(*packed, initial_state=half, inplace_final_state=True, impl=impl)


def test_a_narrower_state_with_fp64_inputs():
    x = GIVEN.inputs()
    packed, S = [x[n] for n in PACKED], x["initial_state"].float()
    exact = chunk_kda(*packed, initial_state=S.double(), output_final_state=True)
    found = chunk_kda(*packed, initial_state=S, output_final_state=True)
    for a, b in zip(found, exact, strict=True):
        assert_alike(a, b, size=1e-12)


def sharded(group, rank, compiled):
    x = CASE.inputs(dtype=torch.float32)
    context = build_cp_context(torch.tensor([0, CASE.T]), group)
    local = {n: context.shard(t) if n in PACKED else t for n, t in x.items()}
    results = []
    for S in (x["initial_state"].bfloat16().float(), x["initial_state"].bfloat16()):
        leaves = {n: t.detach().clone().requires_grad_() for n, t in local.items()}
        leaves["initial_state"] = S.clone().requires_grad_()

        def f(leaves):
            rest = {n: t for n, t in leaves.items() if n not in PACKED}
            return chunk_kda(
                *(leaves[n] for n in PACKED),
                **rest,
                **CASE.keywords,
                cp_context=context,
                output_final_state=True,
                return_intermediate_states=True,
            )

        call = torch.compile(f, fullgraph=True, backend="aot_eager") if compiled else f
        o, final, h = call(leaves)
        grads = torch.autograd.grad(o.sin().sum() + final.cos().sum(), list(leaves.values()))
        results.append((o.detach(), final.detach(), h, *grads))
    for a, b in zip(*results, strict=True):
        assert_alike(b.float(), a.float(), size=2**-7 if b.dtype == torch.bfloat16 else 1e-6)
    assert results[1][-1].dtype == torch.bfloat16
    return results[1][-1]


def test_states_in_half_precision_under_a_context():
    """The gradient is the same on all ranks, and in the state's dtype."""
    grads = run_threads(sharded, 2, False)
    assert torch.equal(grads[0], grads[1])


def test_states_in_half_precision_under_compile():
    torch._dynamo.reset()
    sharded(None, 0, True)


@pytest.mark.parametrize("impl", IMPLS)
def test_a_given_safe_gate_has_the_lowest_bound(impl):
    x = GIVEN.inputs(dtype=torch.float32)
    packed, S = [x[n] for n in PACKED], x["initial_state"]
    call = {"initial_state": S, "impl": impl, "safe_gate": True}
    found = chunk_kda(*packed, **call)[0]
    assert torch.equal(found, chunk_kda(*packed, **call, lower_bound=-5.0)[0])


def test_a_safe_gate_inside_still_needs_its_bound():
    """There the bound is not a promise, but part of the gate."""
    x = CASE.inputs(dtype=torch.float32)
    rest = {n: t for n, t in x.items() if n not in PACKED}
    with pytest.raises(ValueError, match=r"safe_gate needs lower_bound in \[-5, 0\), got None"):
        chunk_kda(*(x[n] for n in PACKED), **rest, **CASE.keywords, safe_gate=True)


def states(dtype, x=None, **more):
    x = GIVEN.inputs(dtype=dtype) if x is None else x
    call = {"initial_state": x["initial_state"], "output_final_state": True}
    return chunk_kda(*(x[n] for n in PACKED), **call, return_intermediate_states=True, **more)


@pytest.mark.parametrize("impl", IMPLS)
@pytest.mark.parametrize("kept", [False, True], ids=["", "kept"])
@pytest.mark.parametrize("v_first", [False, True], ids=["KV", "VK"])
def test_intermediate_states_have_the_inputs_dtype(impl, kept, v_first):
    """final_state is fp32."""
    o, final, h = states(torch.bfloat16, impl=impl, disable_recompute=kept, state_v_first=v_first)
    assert (o.dtype, final.dtype, h.dtype) == (torch.bfloat16, torch.float32, torch.bfloat16)
    exact = states(torch.float32, impl=impl, disable_recompute=kept, state_v_first=v_first)[2]
    assert exact.dtype == torch.float32
    assert h.shape == exact.shape == (1, 2, HV, K, V)
    if impl == "torch":  # Triton's interpreter has no right products of half precision
        assert (h.float() - exact).abs().max() <= 2**-5 * exact.abs().max()


def test_intermediate_states_of_fp64_and_fp16():
    assert states(torch.float64)[2].dtype == torch.float64
    assert states(torch.float16)[2].dtype == torch.float16


@pytest.mark.parametrize("kept", [False, True], ids=["", "kept"])
def test_intermediate_states_under_compile(kept):
    """The fake op has the operator's dtype, with one rank and with several."""
    torch._dynamo.reset()
    context = build_cp_context(torch.tensor([0, GIVEN.T]), None)
    x = GIVEN.inputs(dtype=torch.bfloat16)
    for more in ({}, {"cp_context": context}):

        def f(x, more=more):
            return states(torch.bfloat16, x, disable_recompute=kept, **more)[2] + 0

        found = torch.compile(f, fullgraph=True, backend="aot_eager")(x)
        assert found.dtype == torch.bfloat16
        assert torch.equal(found, f(x))
