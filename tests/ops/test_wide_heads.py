"""GLA and simple GLA with K and V up to 512, whose heads are split."""

import dataclasses

import pytest
import torch

import fla_cp
from fla_cp import build_cp_context
from fla_cp.ops.options import Tensors
from fla_cp.ops.wide_heads import Blocks
from tests.support.closeness import assert_exact, assert_within_budget
from tests.support.members import BY_NAME, Call, collect, draw, operator, oracle, run
from tests.support.ranks import run_threads

CALLS = {
    "keys": Call(T=66, H=1, HV=2, K=300, V=5),
    "values": Call(T=66, H=2, HV=2, K=3, V=512),
    "both-packed": Call(T=12, H=1, HV=2, K=257, V=259, cu=(0, 1, 9, 9, 12)),
    "inside": Call(T=12, B=2, K=260, V=6, inside=True),
    "no-states": Call(T=9, H=1, HV=1, K=512, V=300, states=False),
}


@pytest.fixture(params=["gla", "simple_gla"])
def member(request):
    return BY_NAME[request.param]


@pytest.mark.parametrize("form", ["chunk", "fused_recurrent"])
@pytest.mark.parametrize("call", CALLS.values(), ids=list(CALLS))
def test_equals_the_recurrence(member, call, form):
    actual = run(member, call, form=form)
    exact = oracle(member, call)
    for name, value in actual.items():
        assert_exact(name, value, exact[name])


@pytest.mark.wide
def test_kernels_err_like_the_torch_stages(member, monkeypatch):
    pytest.importorskip("triton")
    monkeypatch.setenv("TRITON_INTERPRET", "1")
    call, dtype = Call(T=20, H=1, HV=1, K=257, V=6), torch.float32
    exact, plain = oracle(member, call, dtype), run(member, call, dtype)
    for name, value in run(member, call, dtype, impl="triton").items():
        assert_within_budget(name, value, exact[name], plain[name], factor=4.0)


def test_sums_over_blocks_are_as_good_as_one_product(member):
    """Each block's output is rounded to bf16 before the sum."""
    call = Call(T=20, H=1, HV=1, K=512, V=6)
    exact = oracle(member, call, torch.bfloat16)
    half = dataclasses.replace(call, K=256)
    narrow, of_narrow = run(member, half, torch.bfloat16), oracle(member, half, torch.bfloat16)
    found = run(member, call, torch.bfloat16)

    def error(a, b):
        return float((a.double() - b).norm() / b.norm())

    for name, value in found.items():
        assert value.dtype == narrow[name].dtype
        assert error(value, exact[name]) <= 2 * error(narrow[name], of_narrow[name]), name


@pytest.mark.parametrize("form", ["chunk", "fused_recurrent"])
def test_states_of_the_other_layout_and_in_between(member, form):
    call = dataclasses.replace(CALLS["both-packed"], T=140, K=258, V=5, cu=(0, 70, 140))
    x, keywords, _ = draw(member, call)
    keywords["cu_seqlens"] = torch.tensor(call.cu)
    if form == "chunk":
        keywords["return_intermediate_states"] = True
    plain = operator(member, form, x, **keywords)
    turned = {**x, "initial_state": x["initial_state"].mT.contiguous()}
    found = operator(member, form, turned, **keywords, state_v_first=True)
    assert torch.equal(found[0], plain[0])
    for a, b in zip(found[1:], plain[1:], strict=True):
        assert a.is_contiguous() and torch.equal(a.mT, b)
    if form == "chunk":
        _, end = operator(member, form, {n: t[:, :64] if n != "initial_state" else t[:1]
                                         for n, t in x.items()})  # fmt: skip
        assert_exact("h", plain[2][:, 1], end)


def test_states_in_place(member):
    x, keywords, _ = draw(member, CALLS["values"])
    expected = operator(member, "fused_recurrent", x, **keywords)
    memory = x["initial_state"].clone()
    given = {**x, "initial_state": memory}
    o, final = operator(member, "fused_recurrent", given, **keywords, inplace_final_state=True)
    assert final is memory and torch.equal(o, expected[0]) and torch.equal(final, expected[1])
    pool = {"inplace_final_state": True, "ssm_state_indices": torch.tensor([0])}
    with pytest.raises(ValueError, match="ssm_state_indices must be None for K or V above 256"):
        operator(member, "fused_recurrent", given, **keywords, **pool)
    grads = {**given, "q": given["q"].clone().requires_grad_()}
    with pytest.raises(ValueError, match="inplace_final_state"):
        operator(member, "fused_recurrent", grads, **keywords, inplace_final_state=True)


def test_ranks_equal_one_device(member):
    call = Call(T=40, H=1, HV=2, K=257, V=3, cu=(0, 7, 40))
    x, keywords, weights = draw(member, call)
    exact = oracle(member, call)
    tokens = {n for n in member.arguments if n in x}

    def on_rank(group, rank):
        context = build_cp_context(torch.tensor(call.cu), group)

        def f(leaves):
            local = {n: context.shard(t) if n in tokens else t for n, t in leaves.items()}
            o, final = operator(member, "chunk", local, **keywords, cp_context=context)
            return context.unshard(o), final

        return collect(f, x, weights)

    for found in run_threads(on_rank, 2):
        for name in ("o", "final_state"):
            assert_exact(name, found[name], exact[name])


def test_a_compiled_call_equals_an_eager_one(member):
    x, keywords, weights = draw(member, Call(T=5, H=1, HV=2, K=300, V=5))

    def f(leaves):
        return operator(member, "chunk", leaves, **keywords)

    torch._dynamo.reset()
    compiled = torch.compile(f, fullgraph=True, backend="aot_eager")
    expected = collect(f, x, weights)
    for name, value in collect(compiled, x, weights).items():
        assert_exact(name, value, expected[name])


def test_heads_are_split_and_joined():
    x = Tensors(torch.randn(1, 3, 2, 300), *[torch.randn(1, 3, 2, 300)], torch.randn(1, 3, 6, 600),
                torch.randn(1, 3, 6, 300))  # fmt: skip
    b = Blocks.of(x)
    assert (b.keys, b.values, b.BK, b.BV) == (2, 3, 150, 200)
    S = torch.randn(4, 6, 300, 600)
    assert torch.equal(b.states(b.of_states(S)), S)
    assert torch.equal(b.output(b.of_values(x.v)), 2 * x.v)
    narrow = b.of_states(S).unflatten(1, b.heads)
    assert torch.equal(narrow[3, 1, 0, 2, 1], S[3, 5, :150, 200:400])


@pytest.mark.parametrize("name, K, V, message", [
    ("gla", 513, 8, "K must be from 1 to 512, got K=513"),
    ("simple_gla", 8, 600, "V must be from 1 to 512, got V=600"),
    ("kda", 257, 8, "K must be from 1 to 256, got K=257"),
    ("gla", 300, 8, "k must have shape"),
])  # fmt: skip
def test_sizes_that_are_refused(name, K, V, message):
    x, _, _ = draw(BY_NAME[name], Call(T=3, K=K, V=V, states=False))
    if message.startswith("k"):
        x["k"] = x["k"][..., :-1]
    with pytest.raises(ValueError, match=message):
        getattr(fla_cp, f"chunk_{name}")(**x)
