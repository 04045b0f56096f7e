"""fused_recurrent_kda: each backend against the fp64 recurrence, and as a decoder uses it."""

import functools
import os

import pytest
import torch
from torch.utils.checkpoint import checkpoint

import fla_cp
from fla_cp import chunk_kda, fused_recurrent_kda
from fla_cp.ops.family import chunk
from tests.support.cases import BY_NAME, INSIDE, PACKED, Case, named, options
from tests.support.closeness import assert_exact, assert_within_budget
from tests.support.running import oracle, run_recurrent
from tests.support.sweeps import crossed

IMPLS = ["torch", "triton"]
SMALL = [
    named("one-token"),
    named("65-tokens", T=20),
    named("rows", T=9),
    named("no-states", T=10),
    Case("packed", T=30, cu_seqlens=(0, 1, 12, 12, 30)),
    named("all-empty-but-one"),
    named("grouped-heads", T=10),
    named("odd-dims", T=10),
    named("strong-decay", T=10),
    named("no-decay", T=10),
    *(named(n, T=10) for n in BY_NAME if n.startswith(("inside", "beta", "exp"))),
    Case("inside-packed", T=30, HV=4, cu_seqlens=(0, 7, 30), options=options(**INSIDE)),
    Case("two-value-tiles", T=5, H=1, HV=1, K=130, V=40, options=options(**INSIDE)),
]


def label(x):
    return x.name if isinstance(x, Case) else "VK" if x else "KV"


@pytest.fixture(autouse=True)
def interpreted(monkeypatch):
    pytest.importorskip("triton")
    monkeypatch.setenv("TRITON_INTERPRET", "1")


@pytest.mark.parametrize("case", SMALL, ids=lambda c: c.name)
@pytest.mark.parametrize("v_first", [False, True], ids=["KV", "VK"])
def test_equals_the_recurrence(case, v_first):
    exact = oracle(case)
    for name, value in run_recurrent(case, v_first=v_first).items():
        assert_exact(name, value, exact[name])


@pytest.mark.parametrize("case, v_first", crossed(SMALL, [True, False]), ids=label)
def test_kernel_errs_like_the_torch_stage(case, v_first):
    rounded = {n: t.double() for n, t in case.inputs(dtype=torch.float32).items()}
    exact = oracle(case, rounded)
    plain = run_recurrent(case, torch.float32, v_first=v_first)
    for name, value in run_recurrent(case, torch.float32, "triton", v_first=v_first).items():
        assert_within_budget(name, value, exact[name], plain[name], factor=4.0)


def inputs(case, dtype=torch.float32):
    x = case.inputs(dtype=dtype)
    return [x.pop(n) for n in PACKED], x


@pytest.mark.parametrize("impl, v_first", crossed(IMPLS, [False, True]))
def test_decoding_goes_on_where_a_prefix_ended(impl, v_first):
    """chunk_kda reads a prefix; then tokens follow one by one, in place, in slots of a larger
    cache.
    """
    case = named("inside-grouped", B=3, T=70, states=False)
    (*packed,), rates = inputs(case)
    more = {**rates, **case.keywords, "state_v_first": v_first}
    whole, end = chunk_kda(*packed, **more, output_final_state=True)
    first = [t[:, :66] for t in packed]
    _, state = chunk_kda(*first, **more, output_final_state=True)
    cache = torch.full((5, *state.shape[1:]), 7.0)
    slots = cache[1:4]
    slots.copy_(state)
    for t in range(66, 70):
        token = [x[:, t : t + 1] for x in packed]
        o, final = fused_recurrent_kda(
            *token, **more, initial_state=slots, inplace_final_state=True, impl=impl
        )
        assert final is slots
        assert (o - whole[:, t : t + 1]).abs().max() <= 1e-5 * whole.abs().max()
    assert (slots - end).abs().max() <= 1e-5 * end.abs().max()
    assert (cache[[0, 4]] == 7.0).all()


@pytest.mark.bits
@pytest.mark.parametrize("impl", IMPLS)
def test_a_sequence_without_tokens_passes_its_state_on(impl):
    case = Case("empty", T=5, cu_seqlens=(0, 3, 3, 5))
    packed, rest = inputs(case)
    S = rest["initial_state"]
    kept = S.clone()
    call = {"cu_seqlens": torch.tensor(case.cu_seqlens), "initial_state": S, "impl": impl}
    _, final = fused_recurrent_kda(*packed, **call, output_final_state=True)
    assert torch.equal(final[1], kept[1])
    assert torch.equal(S, kept)  # not in place
    _, same = fused_recurrent_kda(*packed, **call, inplace_final_state=True)
    assert same is S
    assert torch.equal(S, final)


@pytest.mark.parametrize("impl", IMPLS)
def test_inputs_may_be_views(impl):
    """Views of a wider projection, as in a layer, and of a state with other strides."""
    case = Case("views", T=6, B=2, K=16, V=16)
    packed, rest = inputs(case)
    S = rest["initial_state"]
    plain = fused_recurrent_kda(*packed, initial_state=S, output_final_state=True, impl=impl)
    wide = [torch.cat((x, x), -1)[..., : x.shape[-1]] for x in packed]
    strided = S.mT.contiguous().mT
    views = fused_recurrent_kda(*wide, initial_state=strided, output_final_state=True, impl=impl)
    for a, b in zip(plain, views, strict=True):
        assert (a - b).abs().max() <= 1e-6 * a.abs().max()


@pytest.mark.bits
def test_offsets_beyond_the_tokens_are_cut_by_the_kernel(monkeypatch):
    """On a device the host does not read them; on the CPU they are checked first."""
    packed, _ = inputs(Case("far", T=6, states=False))
    call = {"output_final_state": True, "impl": "triton"}
    cut = fused_recurrent_kda(*packed, cu_seqlens=torch.tensor([0, 4, 6]), **call)
    far = {"cu_seqlens": torch.tensor([0, 4, 99])}
    with pytest.raises(ValueError, match="cu_seqlens must end at T=6, got 99"):
        fused_recurrent_kda(*packed, **far, **call)
    monkeypatch.setattr("fla_cp.ops.recurrent.check_sequences", lambda *args: None)
    for a, b in zip(cut, fused_recurrent_kda(*packed, **far, **call), strict=True):
        assert torch.equal(a, b)


@pytest.mark.parametrize("impl", IMPLS)
def test_states_in_place_have_no_gradients(impl):
    packed, rest = inputs(Case("grad", T=3))
    packed[2].requires_grad_()
    with pytest.raises(ValueError, match="inplace_final_state=True, got v with requires_grad"):
        fused_recurrent_kda(*packed, **rest, inplace_final_state=True, impl=impl)
    with torch.no_grad():
        fused_recurrent_kda(*packed, **rest, inplace_final_state=True, impl=impl)
    with torch.inference_mode():
        state = torch.zeros(1, 2, 8, 6)
        _, final = fused_recurrent_kda(
            *packed, initial_state=state, inplace_final_state=True, impl=impl
        )
    assert final is state
    assert final.any()


def test_gradients_of_some_inputs_or_of_one_output():
    """What needs no gradient gets none, and an output that nobody reads adds nothing."""
    packed, rest = inputs(Case("some", T=5), torch.float64)
    packed[2].requires_grad_()
    keywords = {**rest, "output_final_state": True}
    for i in (0, 1):
        found = fused_recurrent_kda(*packed, **keywords)[i].square().sum()
        wanted = chunk_kda(*packed, **keywords)[i].square().sum()
        (a,), (b,) = (torch.autograd.grad(loss, [packed[2]]) for loss in (found, wanted))
        assert_exact("dv", a, b)
        assert packed[0].grad is None


def test_results_may_be_changed_in_place():
    """As those of the operators in chunks, for example by an output gate."""
    both = []
    for operator in (fused_recurrent_kda, chunk_kda):
        packed, rest = inputs(Case("gated", T=5), torch.float64)
        packed[2].requires_grad_()
        o, final = operator(*packed, **rest, output_final_state=True)
        o *= 3
        final *= 3
        both.append(torch.autograd.grad(o.square().sum() + final.sum(), [packed[2]])[0])
    assert_exact("dv", *both)


def test_gradients_take_two_terms(monkeypatch):
    """Nearly parallel keys cost the recurrence no digits, so they must not cost gradients any."""
    precisions = []

    def noted(member, x, options, rows):
        precisions.append(options["precision"])
        return chunk(member, x, options, rows)

    monkeypatch.setattr("fla_cp.ops.recurrent.chunk", noted)
    packed, _ = inputs(Case("terms", T=3, states=False))
    packed[2].requires_grad_()
    fused_recurrent_kda(*packed)[0].sum().backward()
    assert precisions == ["high"]


def test_gradients_of_a_compiled_call():
    packed, _ = inputs(Case("compiled", T=3, states=False))
    packed[2].requires_grad_()
    found, wanted = (
        torch.autograd.grad(f(*packed)[0].square().sum(), [packed[2]])[0]
        for f in (
            torch.compile(fused_recurrent_kda, backend="eager", fullgraph=True),
            fused_recurrent_kda,
        )
    )
    assert (found - wanted).abs().max() <= 1e-5 * wanted.abs().max()


@pytest.mark.parametrize("host", [True, False])
def test_a_compiled_call_of_packed_sequences(host):
    """Reading the offsets breaks the graph."""
    torch._dynamo.reset()
    (q, k, v, g, beta), _ = inputs(Case("packed", T=7))
    cu = torch.tensor([0, 3, 7])
    more = {"cu_seqlens": cu, "cu_seqlens_cpu": cu if host else None, "output_final_state": True}
    compiled = torch.compile(fused_recurrent_kda, backend="eager")
    expected, found = (f(q, k, v, g, beta, **more) for f in (fused_recurrent_kda, compiled))
    assert torch.equal(expected[0], found[0]) and torch.equal(expected[1], found[1])


STATES = {
    "none": {},
    "final": {"output_final_state": True},
    "in place": {"inplace_final_state": True},
    "pool": {"inplace_final_state": True, "ssm_state_indices": torch.tensor([1, -1])},
    "drafts": {
        "inplace_final_state": True,
        "ssm_state_indices": torch.tensor([[1, 2, 3], [5, 4, 0]]),
        "num_accepted_tokens": torch.tensor([2, 1]),
    },
}


@pytest.mark.parametrize("impl, states", crossed(IMPLS, STATES))
def test_a_compiled_call_without_gradients(impl, states):
    """It is one op in the graph, which may write states in place."""
    torch._dynamo.reset()
    packed, rest = inputs(Case("compiled", T=3, B=2))
    options, both = {**STATES[states], "impl": impl}, []
    pool = (
        rest["initial_state"] if states in ("none", "final", "in place") else torch.rand(6, 2, 8, 6)
    )
    for run in (
        fused_recurrent_kda,
        torch.compile(fused_recurrent_kda, backend="aot_eager", fullgraph=True),
    ):
        S = pool.clone()
        o, final = run(*packed, initial_state=S, **options)
        both.append((o, S, S if final is None else final))
    for a, b in zip(*both, strict=True):
        assert_exact(states, a, b)


def test_states_that_cannot_be_overwritten():
    packed, rest = inputs(Case("places", T=3, B=2))
    S = rest["initial_state"]
    with pytest.raises(ValueError, match="inplace_final_state needs initial_state, got None"):
        fused_recurrent_kda(*packed, inplace_final_state=True)
    for bad in (S[:1].expand_as(S), S.mT.contiguous().mT):
        with pytest.raises(ValueError, match="dense in its last two dims and without overlap"):
            fused_recurrent_kda(*packed, initial_state=bad, inplace_final_state=True)


def test_needs_the_interpreter_or_a_gpu(monkeypatch):
    monkeypatch.delitem(os.environ, "TRITON_INTERPRET")
    packed, _ = inputs(Case("cpu", T=3, states=False))
    with pytest.raises(ValueError, match="impl='triton' runs on CUDA devices, got cpu"):
        fused_recurrent_kda(*packed, impl="triton")


FULL = 7.0
"""What is in a pool's states that no sequence has."""


def pooled(case, places, accepted=None, *, impl, v_first=False, first=None, tokens=slice(None)):
    """o and the pool [9, ..] after a call on some tokens. first: the pool before, else the case's
    initial states in column 0 of places, beside others."""
    (*packed,), rates = inputs(case)
    state = rates.pop("initial_state")
    index = torch.tensor(places, dtype=torch.int32)
    pool = torch.full((9, *state.shape[1:]), FULL)
    if first is not None:
        pool = first.clone()
    else:
        for n, row in enumerate(index.view(len(state), -1)[:, 0].tolist()):
            if row >= 0:
                pool[row] = state[n]
    memory = pool.mT.contiguous() if v_first else pool.clone()
    cu = None if case.cu_seqlens is None else torch.tensor(case.cu_seqlens)
    o, final = fused_recurrent_kda(
        *(x[:, tokens] for x in packed),
        **rates,
        **case.keywords,
        initial_state=memory,
        inplace_final_state=True,
        state_v_first=v_first,
        cu_seqlens=cu,
        ssm_state_indices=index,
        num_accepted_tokens=None if accepted is None else torch.tensor(accepted),
        impl=impl,
    )
    assert final is memory
    return o, (final.mT if v_first else final), pool


def alone(case, tokens=slice(None), state=None, impl="torch", v_first=False):
    """o and the final states of a call without a pool."""
    (*packed,), rates = inputs(case)
    given = rates.pop("initial_state")
    state = given if state is None else state
    more = {"initial_state": state.mT.contiguous() if v_first else state, "state_v_first": v_first}
    cu = None if case.cu_seqlens is None else torch.tensor(case.cu_seqlens)
    packed = [x[:, tokens] for x in packed]
    more |= {**rates, **case.keywords, "cu_seqlens": cu, "output_final_state": True}
    o, final = fused_recurrent_kda(*packed, **more, impl=impl)
    return o, (final.mT if v_first else final)


POOLED = [
    Case("rows", B=3, T=5, HV=4, options=options(**INSIDE)),
    Case("packed", T=13, cu_seqlens=(0, 4, 4, 13), options=options(**INSIDE)),
]


@pytest.mark.bits
@pytest.mark.parametrize("case", POOLED, ids=lambda c: c.name)
@pytest.mark.parametrize("impl, v_first", crossed(IMPLS, [False, True]))
def test_states_in_a_pool(case, impl, v_first):
    """The same bits as with states in order, and no other state of the pool changes."""
    o, final, _ = pooled(case, [6, 0, 3], impl=impl, v_first=v_first)
    expected, states = alone(case, impl=impl, v_first=v_first)
    assert torch.equal(o, expected)
    assert torch.equal(final[[6, 0, 3]], states)
    assert (final[[1, 2, 4, 5, 7, 8]] == FULL).all()


@pytest.mark.bits
@pytest.mark.parametrize("case", POOLED, ids=lambda c: c.name)
@pytest.mark.parametrize("impl", IMPLS)
def test_a_sequence_without_a_state(case, impl):
    """It starts from zeros, and its final state goes nowhere. State 0 has a number that is not
    one, which must not reach it."""
    state = case.inputs(dtype=torch.float32)["initial_state"]
    first = torch.full((9, *state.shape[1:]), FULL)
    first[0] = torch.nan
    first[[5, 2]] = state[[0, 2]]
    o, final, _ = pooled(case, [5, -1, 2], impl=impl, first=first)
    state = state.clone()
    state[1] = 0.0
    expected, states = alone(case, state=state, impl=impl)
    assert torch.equal(o, expected)
    assert torch.equal(final[[5, 2]], states[[0, 2]])
    assert final[0].isnan().all() and (final[[1, 3, 4, 6, 7, 8]] == FULL).all()


@pytest.mark.bits
@pytest.mark.parametrize("impl, v_first", crossed(IMPLS, [False, True]))
def test_draft_tokens_leave_a_state_each(impl, v_first):
    """Three draft tokens, of which sequences accept different numbers. The next call goes on from
    the accepted ones, as if the others had never been there."""
    case = Case("drafts", B=3, T=5, HV=4, options=options(**INSIDE))
    places = [[6, 1, 2], [0, 8, -1], [3, 4, 5]]
    _, states, _ = pooled(case, places, impl=impl, v_first=v_first, tokens=slice(0, 3))
    for t in range(3):
        _, expected = alone(case, slice(0, t + 1), impl=impl, v_first=v_first)
        for n in range(3):
            if places[n][t] >= 0:
                assert torch.equal(states[places[n][t]], expected[n])
    assert (states[7] == FULL).all()
    accepted = [3, 1, 2]
    last = {"impl": impl, "v_first": v_first, "first": states, "tokens": slice(3, 5)}
    o, _, _ = pooled(case, places, accepted, **last)
    chosen = torch.stack([states[places[n][a - 1]] for n, a in enumerate(accepted)])
    expected, _ = alone(case, slice(3, 5), chosen, impl, v_first)
    assert torch.equal(o, expected)


def test_draft_tokens_of_packed_sequences():
    """A sequence has fewer tokens than columns, and one none at all."""
    case = POOLED[1]
    places = [[6, 1, 2, 4, *range(9, 14)], [0, *range(14, 22)], [3, 5, 7, 8, *range(22, 27)]]
    pool = torch.full((27, *case.inputs()["initial_state"].shape[1:]), FULL)
    state = case.inputs(dtype=torch.float32)["initial_state"]
    pool[[6, 0, 3]] = state
    results = [pooled(case, places, impl=impl, first=pool)[:2] for impl in IMPLS]
    expected, states = alone(case)
    for o, final in results:
        torch.testing.assert_close(o, expected, rtol=1e-5, atol=1e-5)
        for row, place in ((0, 4), (2, 26), (1, 0)):
            torch.testing.assert_close(final[place], states[row], rtol=1e-5, atol=1e-5)
        assert (final[9:22] == FULL).all()


@pytest.mark.bits
def test_indices_beyond_a_pool_are_none_to_the_kernel():
    case = POOLED[0]
    state = case.inputs(dtype=torch.float32)["initial_state"]
    first = torch.full((9, *state.shape[1:]), FULL)
    beyond, none = (
        pooled(case, [6, other, 3], impl="triton", first=first)[:2] for other in (9, -1)
    )
    for a, b in zip(beyond, none, strict=True):
        assert torch.equal(a, b)
    assert (beyond[1][[0, 1, 2, 4, 5, 7, 8]] == FULL).all()


@pytest.mark.bits
@pytest.mark.parametrize("impl, name", crossed(IMPLS, [
    "gated_delta_rule", "comba", "gla", "simple_gla", "gated_delta_product", "dplr_delta_rule",
    "rwkv7",
]))  # fmt: skip
def test_pools_of_other_members(impl, name):
    torch.manual_seed(0)
    draw = functools.partial(torch.randn, dtype=torch.float32)
    N, T, H, K, V = 2, 3, 2, 8, 6
    rows = 2 if name == "gated_delta_product" else 1
    x = {"q": draw(N, T, H, K), "k": draw(N, T * rows, H, K), "v": draw(N, T * rows, H, V)}
    x["k"] = torch.nn.functional.normalize(x["k"], dim=-1)
    if name == "comba":
        x["p"] = 0.5 * x["k"]
    removes_another_key = name in ("dplr_delta_rule", "rwkv7")
    per_channel = name == "gla" or removes_another_key
    x["g"] = -draw(N, T, H, K).abs() if per_channel else -draw(N, T, H).abs()
    if removes_another_key:
        x["a"] = torch.nn.functional.normalize(draw(N, T, H, K), dim=-1)
        x["b"] = -0.7 * x["a"]
        x["w" if name == "rwkv7" else "gk"] = x.pop("g")
        if name == "rwkv7":
            x["r"] = x.pop("q")
    elif "gla" not in name:
        x["beta"] = draw(N, T * rows, H).sigmoid()
    if rows > 1:
        x["num_householder"] = rows
    call = functools.partial(getattr(fla_cp, f"fused_recurrent_{name}"), **x, impl=impl)
    state = draw(N, H, K, V)
    expected, states = call(initial_state=state, output_final_state=True)
    pool = torch.full((4, H, K, V), FULL)
    pool[[3, 1]] = state
    index = torch.tensor([3, 1])
    o, final = call(initial_state=pool, inplace_final_state=True, ssm_state_indices=index)
    assert torch.equal(o, expected) and torch.equal(final[[3, 1]], states)


@pytest.mark.parametrize("places, accepted, match", [
    ([6, 9, 3], None, "less than the 9 states of initial_state, got 9"),
    ([6, 3, 3], None, "name each state once, got 3 twice"),
    ([[6], [0], [3]], None, "a column for each of 5 tokens"),
    ([6, 0], None, r"\[N\] or \[N, S\] for N=3"),
    ([6.0, 0.0, 3.0], None, "int32 or int64"),
    ([6, 0, 3], [1, 1, 1], "num_accepted_tokens must be"),
    (None, [1, 1, 1], "num_accepted_tokens needs ssm_state_indices"),
    ([[6, 1, 2, 4, 5], [0, -1, -1, -1, -1], [3, -1, -1, -1, -1]], [1, 6, 1], "from 1 to 5"),
    ([[6, 1, 2, 4, 5], [0, -1, -1, -1, -1], [3, -1, -1, -1, -1]], [1, 1], r"\[N=3\]"),
])  # fmt: skip
def test_pools_that_are_not_right(places, accepted, match):
    case = POOLED[0]
    (*packed,), rates = inputs(case)
    rates["initial_state"] = torch.zeros(9, *rates["initial_state"].shape[1:])
    given = {
        "ssm_state_indices": None if places is None else torch.tensor(places),
        "num_accepted_tokens": None if accepted is None else torch.tensor(accepted),
    }
    more = {**rates, **case.keywords, **given, "impl": "torch"}
    with pytest.raises(ValueError, match=match):
        fused_recurrent_kda(*packed, **more, inplace_final_state=True)
    if match.startswith("less"):
        with pytest.raises(ValueError, match="needs inplace_final_state=True"):
            fused_recurrent_kda(*packed, **more)
        with pytest.raises(ValueError, match="inplace_final_state needs initial_state"):
            fused_recurrent_kda(
                *packed, **{**more, "initial_state": None}, inplace_final_state=True
            )
        with pytest.raises(TypeError, match="ssm_state_indices"):
            chunk_kda(*packed, ssm_state_indices=given["ssm_state_indices"])


@pytest.mark.parametrize("reentrant", [True, False])
def test_a_checkpoint_repeats_the_recurrence(reentrant):
    def gradients(call):
        gen = torch.Generator().manual_seed(0)
        x = torch.randn(1, 9, 2, 8, generator=gen, dtype=torch.float64).requires_grad_()
        call(x).square().sum().backward()
        return x.grad

    def run(x):
        return fused_recurrent_kda(x, x, x, -x.square(), x[..., 0].sigmoid(), impl="torch")[0]

    found = gradients(lambda x: checkpoint(run, x, use_reentrant=reentrant))
    assert_exact("dx", found, gradients(run))
