"""GLA and simple GLA with K and V up to 512, whose heads are split."""

import dataclasses
from types import SimpleNamespace

import pytest
import torch

import fla_cp
from fla_cp import build_cp_context
from fla_cp.nn import GatedDeltaNet
from fla_cp.ops import wide_heads
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


def assert_ranks_equal_one_device(member, K, V):
    call = Call(T=40, H=1, HV=2, K=K, V=V, cu=(0, 7, 40))
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


def assert_compiled_equals_eager(member, K, V):
    x, keywords, weights = draw(member, Call(T=5, H=1, HV=2, K=K, V=V))

    def f(leaves):
        return operator(member, "chunk", leaves, **keywords)

    torch._dynamo.reset()
    compiled = torch.compile(f, fullgraph=True, backend="aot_eager")
    expected = collect(f, x, weights)
    for name, value in collect(compiled, x, weights).items():
        assert_exact(name, value, expected[name])


def test_ranks_equal_one_device(member):
    assert_ranks_equal_one_device(member, K=257, V=3)


def test_a_compiled_call_equals_an_eager_one(member):
    assert_compiled_equals_eager(member, K=300, V=5)


def test_heads_are_split_and_joined():
    x = Tensors(torch.randn(1, 3, 2, 300), *[torch.randn(1, 3, 2, 300)], torch.randn(1, 3, 6, 600),
                torch.randn(1, 3, 6, 300))  # fmt: skip
    b = Blocks.of(x, 256)
    assert (b.keys, b.values, b.BK, b.BV) == (2, 3, 150, 200)
    S = torch.randn(4, 6, 300, 600)
    assert torch.equal(b.states(b.of_states(S)), S)
    assert torch.equal(b.output(b.of_values(x.v)), 2 * x.v)
    narrow = b.of_states(S).unflatten(1, b.heads)
    assert torch.equal(narrow[3, 1, 0, 2, 1], S[3, 5, :150, 200:400])


FAST_CALLS = {
    "both-packed": Call(T=140, H=1, HV=2, K=8, V=12, cu=(0, 70, 70, 139, 140)),
    "keys-rows": Call(T=70, B=2, H=2, HV=2, K=8, V=4),
    "values": Call(T=12, H=2, HV=4, K=4, V=8, inside=True),
    "no-states": Call(T=66, H=2, HV=2, K=12, V=4, states=False),
    "values-packed": Call(T=140, H=1, HV=2, K=4, V=12, cu=(0, 70, 70, 139, 140)),
}
SPLIT = [("simple_gla", name) for name in FAST_CALLS]
SPLIT += [("gated_delta_rule", name) for name in FAST_CALLS if name.startswith("values")]


@pytest.fixture
def widths(monkeypatch):
    """A backend that is fastest with 4 channels. The widths into which heads were split."""
    found, split = [], Blocks.of
    monkeypatch.setattr(wide_heads, "FAST_WIDTH", 4)
    monkeypatch.setattr(wide_heads, "WORTH", 0)
    monkeypatch.setattr(wide_heads, "_fast_width", lambda *_: 4)
    monkeypatch.setattr(Blocks, "of", lambda x, width: found.append(width) or split(x, width))
    return found


@pytest.mark.parametrize("name, call", SPLIT)
def test_heads_of_the_fastest_width_equal_the_recurrence(name, call, widths):
    member, call = BY_NAME[name], FAST_CALLS[call]
    actual, exact = run(member, call), oracle(member, call)
    assert widths == [4]
    for name, value in actual.items():
        assert_exact(name, value, exact[name])


ENDS = pytest.mark.parametrize("name, K", [("simple_gla", 8), ("gated_delta_rule", 4)])


@ENDS
def test_ranks_with_heads_of_the_fastest_width_equal_one_device(name, K, widths):
    assert_ranks_equal_one_device(BY_NAME[name], K=K, V=8)
    assert widths == [4, 4]


@ENDS
def test_a_compiled_call_with_heads_of_the_fastest_width_equals_an_eager_one(name, K, widths):
    assert_compiled_equals_eager(BY_NAME[name], K=K, V=8)
    assert set(widths) == {4}


def test_a_layer_with_heads_of_the_fastest_width(widths, monkeypatch):
    torch.manual_seed(0)
    layer = GatedDeltaNet(16, num_heads=2, head_dim=4, head_v_dim=8).double()
    x = torch.randn(1, 70, 16, dtype=torch.float64)

    def results():
        y = layer(x)
        return y, *torch.autograd.grad(y.square().sum(), list(layer.parameters()))

    split = results()
    assert widths == [4]
    monkeypatch.setattr(wide_heads, "WORTH", 2**30)
    for found, expected in zip(split, results(), strict=True):
        torch.testing.assert_close(found, expected)
    assert widths == [4]


def wide(K, V, T=2**15, HV=4, dtype=torch.bfloat16):
    q, v = (torch.empty(1, T, h, n, dtype=dtype, device="meta") for h, n in ((2, K), (HV, V)))
    return Tensors(q, q, v, v[..., 0], None)


@pytest.mark.parametrize("options, x, width, removing", [
    ({}, wide(256, 256), 128, None),
    ({}, wide(128, 256), 128, 128),
    ({}, wide(64, 256), None, None),
    ({"chunk_size": 64}, wide(128, 256), 128, 128),
    ({"chunk_size": 32}, wide(128, 256), None, None),  # kernels of short chunks are not faster
    ({"chunk_size": 32}, wide(128, 512), 256, None),
    ({}, wide(128, 128), None, None),
    ({}, wide(128, 192), None, None),  # blocks would have to be filled up
    ({}, wide(192, 512), 256, None),
    ({}, wide(128, 256, T=2**14), None, None),  # too few tokens
    ({"cp_context": SimpleNamespace(world_size=2)}, wide(128, 256, T=2), 128, 128),
    ({"cp_context": SimpleNamespace(world_size=1)}, wide(128, 256, T=2), None, None),
    ({}, wide(256, 512, T=2), 128, None),
    ({}, wide(128, 256, dtype=torch.float32), None, None),
    ({}, wide(256, 512, dtype=torch.float32), 256, None),
    ({"impl": "none"}, wide(128, 256), None, None),
    ({}, wide(256, 640), None, None),
])  # fmt: skip
def test_which_heads_are_split(options, x, width, removing, monkeypatch):
    """removing: the width with the gated delta rule instead of simple GLA."""
    backend = pytest.importorskip("fla_cp.kernels.triton.backend").TRITON
    on_h200 = dataclasses.replace(backend.tuning, architecture=90)
    backend = dataclasses.replace(backend, tuning=on_h200)
    monkeypatch.setitem(fla_cp.kernels._replaced, "torch", backend)
    found = [wide_heads.width_of_chunks(rule, True, x, options) for rule in ("none", "k", "p")]
    assert found == [width, removing, None]
    per_channel = [wide_heads.width_of_chunks(rule, False, x, options) for rule in ("none", "k")]
    assert per_channel == [256 if max(x.q.shape[-1], x.v.shape[-1]) == 512 else None, None]


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
