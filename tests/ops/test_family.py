"""Every member of the family: operators, gradients, states, ranks, decoding."""

import dataclasses
from itertools import pairwise

import pytest
import torch

import fla_cp
from fla_cp import build_cp_context, custom_op, gdn_gate, zigzag_token_ranges
from tests.support.closeness import assert_exact, assert_within_budget
from tests.support.members import BY_NAME, CALLS, Call, collect, draw, operator, oracle, run
from tests.support.sweeps import crossed

F64 = torch.float64


@pytest.fixture(params=BY_NAME)
def member(request):
    return BY_NAME[request.param]


@pytest.mark.parametrize("call", CALLS.values(), ids=list(CALLS))
def test_equals_the_recurrence(member, call):
    actual = run(member, call)
    for name, exact in oracle(member, call).items():
        assert_exact(name, actual[name], exact)


@pytest.mark.parametrize("cu", [(0, 1, 1, 9), (0, 16, 17), (0, 17, 19), (0, 32), (0, 33)], ids=str)
def test_short_sequences_take_short_chunks(member, cu, monkeypatch):
    """On the torch backend; gradients, final states and the states of chunks do not change."""
    rows = 2 if member.dplr else member.steps
    longest = rows * max(b - a for a, b in pairwise(cu))
    chunk = min(size for size in (16, 32, 64) if longest <= size or size == 64)
    chunks, build = set(), custom_op.packing_of

    def noted(*given):
        chunks.add(build(*given).chunk)
        return build(*given)

    monkeypatch.setattr(custom_op, "packing_of", noted)
    call = Call(T=cu[-1], cu=cu, options=(("scale", 0.7),))
    actual = run(member, call)
    assert chunks == {chunk}
    for name, exact in oracle(member, call).items():
        assert_exact(name, actual[name], exact)


@pytest.mark.parametrize("call", [CALLS["packed"], CALLS["inside"]], ids=["packed", "inside"])
def test_token_by_token(member, call):
    short = dataclasses.replace(call, T=20, cu=call.cu and (0, 1, 8, 8, 20))
    exact = oracle(member, short)
    for name, value in run(member, short, form="fused_recurrent").items():
        assert_exact(name, value, exact[name])


@pytest.mark.parametrize("call", [CALLS["packed"], CALLS["inside"]], ids=["packed", "inside"])
def test_gradients_token_by_token(member, call):
    short = dataclasses.replace(call, T=20, cu=call.cu and (0, 1, 8, 8, 20))
    x, keywords, weights = draw(member, short)
    keywords["cu_seqlens"] = None if short.cu is None else torch.tensor(short.cu)
    found = collect(lambda y: operator(member, "fused_recurrent", y, **keywords), x, weights)
    for name, exact in oracle(member, short).items():
        assert_exact(name, found[name], exact)


@pytest.mark.parametrize("key", BY_NAME)
def test_gradients_token_by_token_of_nearly_parallel_keys(key):
    """In fp32 they err as little as those of the chunks with precision "high"."""
    member, call = BY_NAME[key], dataclasses.replace(CALLS["slow"], T=64)
    x, keywords, weights = draw(member, call)
    for name in ("k", "a"):
        if name in x:
            x[name] = torch.nn.functional.normalize(x[name][:, :1] + 0.03 * x[name], dim=-1)
    if member.dplr:
        x["b"] = -0.9 * x["a"]
    exact = collect(lambda y: operator(member, "chunk", y, **keywords), x, weights)
    x, weights = {n: t.float() for n, t in x.items()}, [w.float() for w in weights]
    high = {**keywords, "precision": "high"}
    plain = collect(lambda y: operator(member, "chunk", y, **high), x, weights)
    found = collect(lambda y: operator(member, "fused_recurrent", y, **keywords), x, weights)
    for name in found:
        assert_within_budget(name, found[name], exact[name], plain[name])


def test_half_precision_and_layouts(member):
    """bf16 inputs give bf16 outputs and fp32 states; states [V, K] are the transposed ones."""
    x, keywords, _ = draw(member, CALLS["inside"], torch.bfloat16)
    for name in ("A_log", "dt_bias", "initial_state"):
        x[name] = x[name].float()
    exact = operator(member, "chunk", {n: t.double() for n, t in x.items()}, **keywords)
    o, final = operator(member, "chunk", x, **keywords)
    assert (o.dtype, final.dtype) == (torch.bfloat16, torch.float32)
    x["initial_state"] = x["initial_state"].mT.contiguous()
    o2, final2 = operator(member, "chunk", x, **keywords, transpose_state_layout=True)
    assert_within_budget("o", o2, exact[0], o)
    assert_within_budget("final_state", final2.mT, exact[1], final)


def on_ranks(group, rank, key, ranges, exchange):
    member, call = BY_NAME[key], CALLS["packed"] if exchange == "ring" else CALLS["inside"]
    call = dataclasses.replace(call, T=200, B=1)
    exact = run(member, call)
    x, keywords, weights = draw(member, call)
    context = build_cp_context(
        torch.tensor(call.offsets()), group, token_ranges=ranges, exchange=exchange
    )
    rows = context.repeated(member.steps)
    tokens = dict.fromkeys(("q", "g", "gk", "a", "b"), context)
    tokens |= dict.fromkeys(("k", "v", "p", "beta"), rows)
    local = {n: tokens[n].shard(t) if n in tokens else t for n, t in x.items()}

    def f(leaves):
        return operator(member, "chunk", leaves, **keywords, cp_context=context)

    mine = collect(f, local, (context.shard(weights[0]), weights[1]))
    for name, value in mine.items():
        if name in ("dA_log", "ddt_bias"):
            torch.distributed.all_reduce(value, group=group)
        pick = tokens.get(name[1:]) or (context if name == "o" else None)
        assert_exact(name, value, exact[name] if pick is None else pick.shard(exact[name]))


@pytest.mark.parametrize("exchange", ["all_gather", "ring"])
@pytest.mark.parametrize("ranges", [None, zigzag_token_ranges(200, 3)], ids=["plain", "zigzag"])
@pytest.mark.parametrize("key", BY_NAME)
def test_ranks(gloo_pool, key, ranges, exchange):
    gloo_pool.run(on_ranks, key, ranges, exchange, world_size=3)


SMALL = Call(T=66, H=1, HV=2, K=16, V=16, inside=True)
ON_KERNELS_CALLS = {
    "inside": SMALL,
    "given": dataclasses.replace(SMALL, inside=False),
    "exp": dataclasses.replace(SMALL, options=(("use_exp2", False), ("scale", 0.5))),
    "kept": dataclasses.replace(SMALL, options=(("disable_recompute", True),)),
    "packed": dataclasses.replace(SMALL, T=130, cu=(0, 0, 1, 64, 130)),
    "two key tiles": dataclasses.replace(SMALL, K=40, V=24, HV=1),
    "groups of three": dataclasses.replace(SMALL, K=40, V=24, HV=3),
    "slow": dataclasses.replace(SMALL, inside=False, decay=1e-3),
    "strong": dataclasses.replace(SMALL, inside=False, decay=40.0),
    "one token": dataclasses.replace(SMALL, T=1),
}


@pytest.mark.filterwarnings("ignore:overflow encountered:RuntimeWarning")
@pytest.mark.parametrize("call, key", crossed(
    ON_KERNELS_CALLS,
    ["gated_delta_rule", "gated_delta_product2", "comba", "gla", "simple_gla", "dplr_delta_rule"],
))  # fmt: skip
def test_kernels(key, call, monkeypatch):
    pytest.importorskip("triton")
    monkeypatch.setenv("TRITON_INTERPRET", "1")
    member, call = BY_NAME[key], ON_KERNELS_CALLS[call]
    exact, plain = oracle(member, call, torch.float32), run(member, call, torch.float32)
    for name, value in run(member, call, torch.float32, "triton").items():
        if name in ("dA_log", "ddt_bias"):  # sums over tokens: their terms round, not the result
            error = (value.double() - exact[name]).abs().max()
            # softplus / sigmoid, the weight of dg in dA_log, is up to three here
            dg = exact["dgk" if member.dplr else "dg"]
            assert error <= 64 * torch.finfo(value.dtype).eps * dg.abs().sum(), name
        else:
            assert_within_budget(name, value, exact[name], plain[name], factor=6.0)


@pytest.mark.parametrize("key", BY_NAME)
def test_kernels_token_by_token(key, monkeypatch):
    pytest.importorskip("triton")
    monkeypatch.setenv("TRITON_INTERPRET", "1")
    member, short = BY_NAME[key], dataclasses.replace(SMALL, T=5)
    exact = oracle(member, short, torch.float32)
    plain = run(member, short, torch.float32, form="fused_recurrent")
    for name, value in run(member, short, torch.float32, "triton", "fused_recurrent").items():
        assert_within_budget(name, value, exact[name], plain[name], factor=6.0)


@pytest.mark.parametrize("key", [
    pytest.param(key, marks=[pytest.mark.wide] * ("product" in key and member.steps != 2))
    for key, member in BY_NAME.items()
])  # fmt: skip
def test_kernels_gradients_token_by_token(key, monkeypatch):
    pytest.importorskip("triton")
    monkeypatch.setenv("TRITON_INTERPRET", "1")
    member, short = BY_NAME[key], dataclasses.replace(SMALL, T=5)
    x, keywords, weights = draw(member, short, torch.float32)
    exact = oracle(member, short, torch.float32)
    by_impl = [
        collect(
            lambda y, i=i: operator(member, "fused_recurrent", y, **keywords, impl=i), x, weights
        )
        for i in ("torch", "triton")
    ]
    for name, value in by_impl[1].items():
        assert_within_budget(name, value, exact[name], by_impl[0][name], factor=6.0)


@pytest.mark.parametrize("key", ["kda", pytest.param("gated_delta_rule", marks=pytest.mark.wide)])
def test_kernels_take_states_of_either_layout_through_segments(key, monkeypatch):
    """Initial and final states and their gradients, for a sequence in three segments. The gradient
    of the final state is an expanded tensor.
    """
    pytest.importorskip("triton")
    monkeypatch.setenv("TRITON_INTERPRET", "1")
    from benchmarks.tune import cut_into

    member, call = BY_NAME[key], dataclasses.replace(SMALL, T=150)
    x, keywords, _ = draw(member, call, torch.float32)
    found = []
    for impl, v_first in (("torch", False), ("triton", False), ("triton", True)):
        leaves = {n: t.double() if impl == "torch" else t.clone() for n, t in x.items()}
        if v_first:
            leaves["initial_state"] = leaves["initial_state"].mT.contiguous()
        leaves = {n: t.requires_grad_() for n, t in leaves.items()}
        more = {"impl": impl, "transpose_state_layout": v_first}
        with cut_into(1):
            o, final = operator(member, "chunk", leaves, **keywords, **more)
            grads = torch.autograd.grad(o.sum() + final.sum(), list(leaves.values()))
        named = dict(zip(leaves, grads, strict=True)) | {"final": final}
        if v_first:
            named = named | {n: named[n].mT for n in ("final", "initial_state")}
        found.append(named | {"o": o})
    exact, plain, flipped = found
    for name, value in flipped.items():
        assert_within_budget(name, value, exact[name], plain[name])


def test_comba_reads_before_the_decay():
    """If it read after the decay, it would equal the gated delta rule for p = k."""
    call = Call(T=20, decay=1.0)
    x, _, _ = draw(BY_NAME["comba"], call)
    x["p"] = x["k"]
    before, _ = operator(BY_NAME["comba"], "chunk", x)
    del x["p"]
    after, _ = operator(BY_NAME["gated_delta_rule"], "chunk", x)
    assert (before - after).abs().max() > 0.1 * after.abs().max()


def test_gate_of_a_head():
    g, A_log, dt_bias = (
        torch.randn(*s, dtype=F64).requires_grad_() for s in ((2, 7, 3), (3,), (3,))
    )
    exact = -A_log.exp() * torch.log1p((g + dt_bias).exp())
    actual = gdn_gate(g, A_log, dt_bias)
    assert_exact("gate", actual, exact)
    pairs = (torch.autograd.grad(t.sin().sum(), (g, A_log, dt_bias)) for t in (actual, exact))
    for a, b in zip(*pairs, strict=True):
        assert_exact("gradient", a, b)


@pytest.mark.parametrize("key, refused", [
    ("gated_delta_rule", "safe_gate"), ("comba", "lower_bound"), ("gla", "allow_neg_eigval"),
    ("simple_gla", "safe_gate"), ("gated_delta_product2", "return_intermediate_states"),
])  # fmt: skip
def test_keywords_that_a_member_lacks(key, refused):
    member = BY_NAME[key]
    x, _, _ = draw(member, Call(T=3))
    with pytest.raises(
        TypeError, match=rf"chunk_{member.name}\(\) got an unexpected .*'{refused}'"
    ):
        operator(member, "chunk", x, **{refused: True})


def test_rows_of_the_product():
    member = BY_NAME["gated_delta_product2"]
    x, _, _ = draw(member, Call(T=4))
    x["k"] = x["k"][:, 1:]
    with pytest.raises(ValueError, match=r"k must have 2 rows for each of q's 4 tokens, .* got"):
        operator(member, "chunk", x)
    with pytest.raises(ValueError, match="num_householder must be an integer from 1, got 0"):
        fla_cp.chunk_gated_delta_product(*(x[n] for n in member.arguments), 0)


@pytest.mark.parametrize("changes, message", [
    ({"g": torch.zeros(1, 3, 4, 8)}, r"g must have 3 dimensions"),
    ({"g": torch.zeros(1, 3, 2, dtype=F64)}, r"g must have shape \[B, T, HV\] = \(1, 3, 4\)"),
    ({"p": torch.zeros(1, 3, 4, 8, dtype=F64)}, r"p must have shape \[B, T, H, K\] like q"),
    ({"p": torch.zeros(1, 3, 2, 8)}, r"p must have q's dtype torch.float64"),
    ({"dt_bias": torch.zeros(8)}, r"dt_bias is read only with use_gate_in_kernel=True"),
])  # fmt: skip
def test_bad_inputs(changes, message):
    x, _, _ = draw(BY_NAME["comba"], Call(T=3, states=False))
    with pytest.raises(ValueError, match=message):
        operator(BY_NAME["comba"], "chunk", x | changes)


@pytest.mark.parametrize("keep", [False, True])
@pytest.mark.parametrize("key", BY_NAME)
def test_compiled(key, keep):
    """One graph equals eager, and the shapes of kept tensors are those of the fake op."""
    torch._dynamo.reset()
    member = BY_NAME[key]
    call = Call(T=70, inside=True, options=(("disable_recompute", keep),))
    x, keywords, weights = draw(member, call)

    def f(leaves):
        return operator(member, "chunk", leaves, **keywords, impl="torch")

    compiled = torch.compile(f, fullgraph=True, backend="aot_eager")
    eager, graph = collect(f, x, weights), collect(compiled, x, weights)
    for name, value in eager.items():
        assert_exact(name, graph[name], value)


@pytest.mark.bits
@pytest.mark.parametrize("key", ["kda", "gated_delta_rule"])
def test_compiled_on_kernels(key, monkeypatch):
    """The traced call uses the chosen backend."""
    pytest.importorskip("triton")
    monkeypatch.setenv("TRITON_INTERPRET", "1")
    torch._dynamo.reset()
    member = BY_NAME[key]
    x, keywords, _ = draw(member, Call(T=20, H=1, HV=1, K=16, V=16, inside=True), torch.float32)

    def f(leaves):
        return operator(member, "chunk", leaves, **keywords, impl="triton")

    for a, b in zip(f(x), torch.compile(f, fullgraph=True, backend="aot_eager")(x), strict=True):
        assert torch.equal(a, b)


def test_kernels_forget_without_losing_what_follows(monkeypatch):
    """After a token that forgets everything, running sums are large and their differences small."""
    pytest.importorskip("triton")
    monkeypatch.setenv("TRITON_INTERPRET", "1")
    member, call = BY_NAME["gated_delta_rule"], dataclasses.replace(SMALL, T=64, inside=False)
    x, keywords, _ = draw(member, call, torch.float32)
    x["g"] = x["g"] * 0.01
    x["g"][:, 0] = -3000.0
    exact, _ = operator(member, "chunk", {n: t.double() for n, t in x.items()}, **keywords)
    actual, _ = operator(member, "chunk", x, **keywords, impl="triton")
    assert (actual - exact).abs().max() <= 5e-6 * exact.abs().max()
