"""chunk_kda on one device against the token recurrence: every option, output and gradient."""

import pytest
import torch

from fla_cp import chunk_kda, kda_gate
from fla_cp.reference import recurrence
from tests.support.cases import CASES, INSIDE, PACKED, Case, named, options
from tests.support.closeness import assert_exact, assert_within_budget
from tests.support.running import oracle, run, weights


@pytest.mark.parametrize("case", CASES, ids=lambda c: c.name)
def test_equals_the_recurrence_in_fp64(case):
    exact, actual = oracle(case), run(case)
    assert exact.keys() == actual.keys()
    for name, value in exact.items():
        assert_exact(name, actual[name], value)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("name", ["inside-grouped", "inside-safe", "packed"])
def test_low_precision_errs_like_its_inputs_rounding(name, dtype):
    """The baseline is the recurrence in fp32, rounded to dtype. In fp32 itself the chunk form may
    err more, since the gate's gradient is a difference of sums.
    """
    case = named(name)
    rounded = {n: t.double() for n, t in case.inputs(dtype=dtype).items()}
    exact = oracle(case, rounded)
    plain = oracle(case, {n: t.float() for n, t in rounded.items()})
    actual = run(case, dtype)
    for n, value in actual.items():
        expected = torch.float32 if n in ("final_state", "dA_log", "ddt_bias") else dtype
        if n == "dinitial_state":
            expected = torch.float32
        assert value.dtype == expected, n
        if n in ("dA_log", "ddt_bias"):  # sums over tokens: their terms round, not the result
            error = (value.double() - exact[n]).abs().max()
            assert error <= 32 * torch.finfo(torch.float32).eps * exact["dg"].abs().sum(), n
        else:
            factor = 10.0 if value.dtype == torch.float32 else 3.0
            assert_within_budget(n, value, exact[n], plain[n].to(value.dtype), factor)


def test_layouts_are_transposes_of_each_other():
    case = named("grouped-heads")
    x = case.inputs()
    rest = {"output_final_state": True, "impl": "torch"}
    packed = [x[n] for n in PACKED]
    o, final, h = chunk_kda(
        *packed, initial_state=x["initial_state"], return_intermediate_states=True, **rest
    )
    flipped = x["initial_state"].transpose(-1, -2).contiguous().requires_grad_()
    for keyword in ("transpose_state_layout", "state_v_first"):
        flags = {keyword: True, "return_intermediate_states": True}
        o2, final2, h2 = chunk_kda(*packed, initial_state=flipped, **rest, **flags)
        assert_exact("h", h2.mT, h)
        assert_exact("o", o2, o)
        assert_exact("final_state", final2.mT, final)
    (gradient,) = torch.autograd.grad(final2.square().sum(), flipped)
    leaf = x["initial_state"].clone().requires_grad_()
    final = chunk_kda(*packed, initial_state=leaf, **rest)[1]
    assert_exact("dS", gradient, torch.autograd.grad(final.square().sum(), leaf)[0].mT)


def saved_bytes(**keywords):
    """Bytes that the operator saves for its backward."""
    saved = []
    hooks = torch.autograd.graph.saved_tensors_hooks(
        lambda t: saved.append(t.nbytes) or t, lambda t: t
    )
    leaves = [t.requires_grad_() for t in Case("x", T=200, states=False).inputs().values()]
    with hooks:
        chunk_kda(*leaves, **keywords)
    return sum(saved)


def test_keeping_intermediates_changes_no_result():
    case = named("inside", T=200)
    kept = run(case, disable_recompute=True)
    for name, value in run(case).items():
        assert_exact(name, kept[name], value)
    states = 4 * 2 * 8 * 6 * 8  # chunks, heads, K, V, bytes of fp64
    assert saved_bytes(disable_recompute=True) > saved_bytes() + states


def test_exp_and_exp2_are_what_is_used(monkeypatch):
    monkeypatch.setattr(torch, "exp2", lambda x: pytest.fail("exp2 ran"))
    run(named("no-states"), use_exp2=False)
    with pytest.raises(pytest.fail.Exception):
        run(named("no-states"))


def test_intermediate_states_are_those_at_chunk_starts():
    case = Case("states", T=150, B=2, H=1, HV=2)
    x = case.inputs()
    o, _, h = chunk_kda(
        *[x[n].requires_grad_() for n in PACKED],
        initial_state=x["initial_state"],
        return_intermediate_states=True,
        impl="torch",
    )
    assert h.shape == (2, 3, 2, case.K, case.V)
    assert o.requires_grad
    assert not h.requires_grad
    for chunk, stop in ((0, 0), (1, 64), (2, 128)):
        cut = [x[n][:, :stop] for n in PACKED]
        exact = x["initial_state"]
        if stop:
            exact = recurrence(*cut, initial_state=exact)[1]
        assert_exact(f"chunk {chunk}", h[:, chunk], exact)


def test_intermediate_states_of_packed_sequences_stand_in_token_order():
    case = named("packed")
    x = case.inputs()
    _, _, h = chunk_kda(
        *[x[n] for n in PACKED],
        initial_state=x["initial_state"],
        cu_seqlens=torch.tensor(case.cu_seqlens),
        return_intermediate_states=True,
        impl="torch",
    )
    # sequences of 1, 63, 0, 66 and 70 tokens: the first chunk of each, then the second of two
    first = [0, 1, 2, 4]
    assert h.shape[1] == 6
    for chunk, sequence in zip(first, (0, 1, 3, 4), strict=True):
        assert torch.equal(h[0, chunk], x["initial_state"][sequence])


def test_gradients_flow_from_either_output_alone():
    case = named("inside")
    x = {n: t.requires_grad_() for n, t in case.inputs().items()}
    rest = {n: t for n, t in x.items() if n not in PACKED}
    both = chunk_kda(
        *[x[n] for n in PACKED], **rest, **case.keywords, output_final_state=True, impl="torch"
    )
    parts = [
        torch.autograd.grad(out.sum(), x.values(), retain_graph=True, allow_unused=True)
        for out in both
    ]
    whole = torch.autograd.grad(both[0].sum() + both[1].sum(), x.values())
    for name, a, b, total in zip(x, *parts, whole, strict=True):
        a, b = (torch.zeros_like(total) if t is None else t for t in (a, b))
        assert_exact(name, a + b, total)


@pytest.mark.wide
def test_gradcheck():
    case = Case("tiny", T=5, H=1, HV=2, K=3, V=2, options=options(**INSIDE))
    x = {n: t.requires_grad_() for n, t in case.inputs().items()}

    def call(*values):
        given = dict(zip(x, values, strict=True))
        rest = {n: t for n, t in given.items() if n not in PACKED}
        return chunk_kda(
            *[given[n] for n in PACKED], **rest, **case.keywords, output_final_state=True
        )

    assert torch.autograd.gradcheck(call, tuple(x.values()))


@pytest.mark.parametrize(
    "g, safe", [(0.0, False), (-5.0, False), (-80.0, False), (0.0, True), (-5.0, True)]
)
def test_extreme_gates_stay_finite_in_fp32(g, safe):
    case = Case("extreme", T=130, states=False)
    x = case.inputs(dtype=torch.float32)
    x["g"] = torch.full_like(x["g"], g)
    leaves = [x[n].requires_grad_() for n in PACKED]
    bound = {"safe_gate": True, "lower_bound": -5.0} if safe else {}
    o, final = chunk_kda(*leaves, output_final_state=True, impl="torch", **bound)
    for value in (o, final, *torch.autograd.grad(o.sum() + final.sum(), leaves)):
        assert value.isfinite().all()


@pytest.mark.parametrize("decay, error", [(-100.0, 2e-5), (-1e4, 2e-3)])
def test_a_token_that_forgets_everything(decay, error):
    """The docstring says what such decays cost the later tokens of their chunk."""
    x = Case("reset", T=64, decay=0.1, states=False).inputs()
    x["g"][:, 10] = decay
    narrow = [x[n].float().requires_grad_() for n in PACKED]
    exact = [x[n].requires_grad_() for n in PACKED]
    both = (narrow, chunk_kda(*narrow)[0]), (exact, recurrence(*exact)[0])
    found, wanted = ((o, *torch.autograd.grad(o.sum(), leaves)) for leaves, o in both)
    for a, b in zip(found, wanted, strict=True):
        assert (a - b).abs().max() <= error * b.abs().max()


@pytest.mark.parametrize("leaf", [*PACKED, "A_log", "dt_bias", "initial_state"])
def test_one_input_alone_may_require_a_gradient(leaf):
    case = named("inside", T=70)
    x = case.inputs()
    exact = run(case)[f"d{leaf}"]
    x[leaf].requires_grad_()
    rest = {n: t for n, t in x.items() if n not in PACKED}
    outputs = chunk_kda(*[x[n] for n in PACKED], **rest, **case.keywords, output_final_state=True)
    weighted = sum((y * w).sum() for y, w in zip(outputs, weights(case), strict=True))
    assert_exact(f"d{leaf}", torch.autograd.grad(weighted, x[leaf])[0], exact)


@pytest.mark.bits
@pytest.mark.parametrize("kept", [False, True])
def test_backward_runs_twice(kept):
    case = named("packed", options=options(disable_recompute=kept))
    leaves = [t.requires_grad_() for t in case.inputs().values()]
    o = chunk_kda(
        *leaves[:5],
        initial_state=leaves[5],
        cu_seqlens=torch.tensor(case.cu_seqlens),
        disable_recompute=kept,
    )[0]
    first = torch.autograd.grad(o.sum(), leaves, retain_graph=True)
    for a, b in zip(first, torch.autograd.grad(o.sum(), leaves), strict=True):
        assert torch.equal(a, b)


def test_a_sequence_full_of_nan_stays_alone():
    case = named("packed", states=False)
    x, clean = case.inputs(), case.inputs()
    bad = slice(64, 130)  # the fourth of (0, 1, 64, 64, 130, 200)
    for t in x.values():
        t[:, bad] = float("nan")
    results = []
    for y in (x, clean):
        leaves = [y[n].requires_grad_() for n in PACKED]
        out = chunk_kda(*leaves, cu_seqlens=torch.tensor(case.cu_seqlens), output_final_state=True)
        results.append((*out, *torch.autograd.grad(out[0].sum() + out[1].sum(), leaves)))
    for i, (a, b) in enumerate(zip(*results, strict=True)):
        if i == 1:
            assert_exact("final_state", a[[0, 1, 2, 4]], b[[0, 1, 2, 4]])
            assert a[3].isnan().all()
        else:
            assert_exact(f"result {i} before", a[:, :64], b[:, :64])
            assert_exact(f"result {i} after", a[:, 130:], b[:, 130:])
            assert a[:, bad].isnan().any()


def test_no_token_at_all():
    x = {n: t[:, :0] if n in PACKED else t for n, t in named("packed").inputs().items()}
    leaves = {n: t.requires_grad_() for n, t in x.items()}
    o, final, h = chunk_kda(
        *[leaves[n] for n in PACKED],
        initial_state=leaves["initial_state"],
        cu_seqlens=torch.tensor([0] * 6),
        output_final_state=True,
        return_intermediate_states=True,
    )
    assert o.shape == (1, 0, 2, 6)
    assert h.shape == (1, 0, 2, 8, 6)
    assert torch.equal(final, leaves["initial_state"])
    grads = torch.autograd.grad(final.sum() + o.sum(), list(leaves.values()))
    assert all(g.shape == t.shape for g, t in zip(grads, leaves.values(), strict=True))
    assert (grads[-1] == 1).all()


@pytest.mark.bits
def test_host_offsets_and_int32_change_nothing():
    case = named("packed")
    x, cu = case.inputs(), torch.tensor(case.cu_seqlens)
    packed = [x[n] for n in PACKED]
    exact = chunk_kda(*packed, cu_seqlens=cu)[0]
    assert torch.equal(chunk_kda(*packed, cu_seqlens=cu.int())[0], exact)
    assert torch.equal(chunk_kda(*packed, cu_seqlens=cu, cu_seqlens_cpu=cu.int())[0], exact)
    unreadable = cu.to("meta")  # like a device's tensor: reading it would wait for the device
    assert torch.equal(chunk_kda(*packed, cu_seqlens=unreadable, cu_seqlens_cpu=cu)[0], exact)


@pytest.mark.bits
def test_fp32_gate_and_beta_with_bf16_inputs_keep_their_precision():
    case = named("inside", T=70)
    x = case.inputs(dtype=torch.bfloat16)
    given = {n: x[n].float() if n in ("g", "beta") else x[n] for n in PACKED}
    rest = {n: t for n, t in x.items() if n not in PACKED}
    leaves = [t.requires_grad_() for t in given.values()]
    o = chunk_kda(*leaves, **rest, **case.keywords)[0]
    assert torch.equal(o, chunk_kda(*[x[n] for n in PACKED], **rest, **case.keywords)[0])
    grads = torch.autograd.grad(o.float().sum(), leaves)
    assert [g.dtype for g in grads] == [t.dtype for t in leaves]


def test_strided_and_expanded_inputs():
    case = named("grouped-heads")
    x = case.inputs()
    wide = torch.cat([x["q"], x["k"]], -1)
    q, k = wide.split(case.K, -1)
    beta = x["beta"][:, :, :1].expand_as(x["beta"])
    a = chunk_kda(q, k, x["v"], x["g"], beta, impl="torch")[0]
    b = chunk_kda(x["q"], x["k"], x["v"], x["g"], beta.contiguous(), impl="torch")[0]
    assert_exact("o", a, b)


@pytest.mark.bits
def test_autocast_does_not_reach_inside():
    case = named("inside")
    x = case.inputs(dtype=torch.float32)
    leaves = [x[n].clone().requires_grad_() for n in PACKED]
    rest = {n: t for n, t in x.items() if n not in PACKED}
    plain = chunk_kda(*[x[n] for n in PACKED], **rest, **case.keywords)[0]
    with torch.autocast("cpu", torch.bfloat16):
        cast = chunk_kda(*[x[n] for n in PACKED], **rest, **case.keywords)[0]
        assert torch.equal(plain, cast)
        whole = chunk_kda(*leaves, **rest, **case.keywords)[0]
        (inside,) = torch.autograd.grad(whole.sum(), leaves[0])
    whole = chunk_kda(*leaves, **rest, **case.keywords)[0]
    (outside,) = torch.autograd.grad(whole.sum(), leaves[0])
    assert torch.equal(inside, outside)


@pytest.mark.bits
def test_inference_mode():
    x = named("one-chunk", T=77).inputs()  # a length that no other test has made tables for
    packed = [x[n] for n in PACKED]
    with torch.inference_mode():
        o, final = chunk_kda(*packed, output_final_state=True)
    assert o.isfinite().all()
    assert final.shape == (1, 2, 8, 6)
    leaves = [t.requires_grad_() for t in packed]  # training uses the tables made above, too
    again = chunk_kda(*leaves)[0]
    assert torch.equal(o, again)
    again.sum().backward()


def test_gate_alone():
    case = named("inside", T=20)
    x = case.inputs()
    g, A_log, dt_bias = (x[n].requires_grad_() for n in ("g", "A_log", "dt_bias"))
    exact = -A_log.exp()[:, None] * torch.log1p((g + dt_bias.view(2, -1)).exp())
    actual = kda_gate(g, A_log, dt_bias)
    assert_exact("g", actual, exact)
    for a, b in zip(
        torch.autograd.grad(actual.sum(), (g, A_log, dt_bias)),
        torch.autograd.grad(exact.sum(), (g, A_log, dt_bias)),
        strict=True,
    ):
        assert_exact("gradient", a, b)
    bounded = kda_gate(g, None, dt_bias, lower_bound=-3.0)
    assert_exact("bounded", bounded, -3.0 * torch.sigmoid(g + dt_bias.view(2, -1)))


def test_softplus_is_exact_far_out():
    g = torch.tensor([[25.0]], dtype=torch.float64)
    exact = -(25.0 + torch.log1p(torch.exp(torch.tensor(-25.0, dtype=torch.float64))))
    found = kda_gate(g, torch.zeros(1, dtype=torch.float64))
    assert (found - exact).abs().item() <= 2 * torch.finfo(torch.float64).eps * 25.0
