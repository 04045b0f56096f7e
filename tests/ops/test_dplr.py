"""DPLR and RWKV-7: a member that has two rows a token, and names of its own for its arguments."""

import math

import pytest
import torch

import fla_cp
from fla_cp.reference import recurrence
from tests.support.closeness import assert_exact
from tests.support.members import BY_NAME, Call, collect, draw, operator, oracle, run

DPLR = BY_NAME["dplr_delta_rule"]
SAFE = (("safe_gate", True),)
CALLS = {
    **{f"{n} tokens": Call(T=n) for n in (31, 32, 33, 63, 64, 65)},
    "safe": Call(T=70, decay=4.0, options=SAFE),
    "no decay": Call(T=70, decay=0.0),
    "documents": Call(T=100, cu=(0, 0, 31, 63, 64, 100, 100)),
}


def of_rwkv7(x):
    names = {"q": "r", "gk": "w"}
    return {names.get(n, n): t for n, t in x.items()}


@pytest.mark.parametrize("call", CALLS)
def test_equals_the_recurrence(call):
    found = run(DPLR, CALLS[call])
    for name, exact in oracle(DPLR, CALLS[call]).items():
        assert_exact(name, found[name], exact)


def test_a_reads_before_the_decay():
    """If it read after the decay, this would be the delta rule of KDA for a = -k and b = beta k."""
    x, _, _ = draw(DPLR, Call(T=20, decay=1.0))
    beta = torch.full((1, 20, 4), 0.7, dtype=torch.float64)
    x["a"], x["b"] = -x["k"], 0.7 * x["k"]
    decayed = {**x, "v": x["v"] * beta[..., None]}  # KDA multiplies v by beta, DPLR does not
    before, _ = operator(DPLR, "chunk", decayed)
    del x["a"], x["b"]
    after, _ = operator(BY_NAME["kda"], "chunk", {"g": x.pop("gk"), **x, "beta": beta})
    assert (before - after).abs().max() > 0.1 * after.abs().max()


def test_without_decay_it_can_be_the_delta_rule():
    x, _, _ = draw(DPLR, Call(T=70, decay=0.0))
    beta = torch.rand(1, 70, 4, dtype=torch.float64)[:, :, ::2].repeat_interleave(2, 2)
    x["a"], x["b"] = -x["k"], beta[:, :, ::2, None] * x["k"]
    found, _ = operator(DPLR, "chunk", {**x, "v": x["v"] * beta[..., None]})
    del x["a"], x["b"]
    exact, _ = operator(BY_NAME["kda"], "chunk", {"g": x.pop("gk"), **x, "beta": beta})
    assert_exact("o", found, exact)


@pytest.mark.parametrize("form", ["chunk", "fused_recurrent"])
def test_rwkv7_is_dplr_with_a_scale_of_one(form):
    x, _, weights = draw(DPLR, Call(T=20))

    def dplr(leaves):
        return operator(DPLR, form, leaves, scale=1.0)

    def rwkv7(leaves):
        return getattr(fla_cp, f"{form}_rwkv7")(**of_rwkv7(leaves), output_final_state=True)

    exact = collect(dplr, x, weights)
    for name, value in collect(rwkv7, x, weights).items():
        assert_exact(name, value, exact[name])


def test_the_gate_of_rwkv7_inside():
    """w = -exp(-1/2) sigmoid(raw), which is also a safe gate."""
    x, _, weights = draw(DPLR, Call(T=70))
    x["gk"] = torch.randn(x["gk"].shape, dtype=torch.float64)

    def plain(leaves):
        decay = -math.exp(-0.5) * leaves["gk"].sigmoid()
        return recurrence(**{n: t for n, t in leaves.items() if n != "gk"}, g=decay, scale=1.0)

    exact = collect(plain, x, weights)
    bound = {"use_gate_in_kernel": True, "lower_bound": -math.exp(-0.5)}
    for more in ({}, {"safe_gate": True}):
        found = collect(
            lambda y, m=more: fla_cp.chunk_rwkv7(
                **of_rwkv7(y), output_final_state=True, **bound, **m
            ),
            x,
            weights,
        )
        for name, value in found.items():
            assert_exact(name, value, exact[name])


@pytest.mark.parametrize("changes, message", [
    ({"gk": torch.zeros(1, 3, 4)}, r"^gk must have 4 dimensions"),
    ({"gk": torch.zeros(1, 3, 2, 8)}, r"^gk must have shape \[B, T, HV, K\] = \(1, 3, 4, 8\)"),
    ({"a": torch.zeros(1, 3, 4, 8)}, r"^a must have shape \[B, T, H, K\] like q = \(1, 3, 2, 8\)"),
    ({"b": torch.zeros(1, 6, 2, 8)}, r"^b must have shape \[B, T, H, K\] like q = \(1, 3, 2, 8\)"),
    ({"k": torch.zeros(1, 6, 2, 8)}, r"^k must have shape \[B, T, H, K\] like q"),
    ({"v": torch.zeros(1, 6, 4, 6)}, r"^v must have shape \[B, T, HV, V\] = \(1, 3, 4, 6\)"),
    ({"b": torch.zeros(1, 3, 2, 8)}, r"^b must have q's dtype torch.float64"),
    ({"a": torch.zeros(1, 3, 2, 8, dtype=torch.float64, device="meta")}, r"^a must be on q's dev"),
])  # fmt: skip
def test_bad_inputs_are_called_by_the_caller_s_names(changes, message):
    x, _, _ = draw(DPLR, Call(T=3, states=False))
    for form in ("chunk", "fused_recurrent"):
        with pytest.raises(ValueError, match=message):
            operator(DPLR, form, x | changes)


def test_bad_inputs_of_rwkv7():
    x = of_rwkv7(draw(DPLR, Call(T=3, states=False))[0])
    for changes, message in (
        ({"w": torch.zeros(1, 3, 4)}, "^w must have 4 dimensions"),
        ({"k": torch.zeros(1, 4, 2, 8)}, r"^k must have shape \[B, T, H, K\] like r"),
        ({"b": x["b"].float()}, "^b must have r's dtype torch.float64, got torch.float32"),
    ):
        with pytest.raises(ValueError, match=message):
            fla_cp.chunk_rwkv7(**(x | changes))
    x["w"].requires_grad_()
    state = torch.zeros(1, 4, 8, 6, dtype=torch.float64)
    with pytest.raises(ValueError, match="got w with requires_grad=True"):
        fla_cp.fused_recurrent_rwkv7(**x, initial_state=state, inplace_final_state=True)


@pytest.mark.parametrize(
    "refused", ["use_qk_l2norm_in_kernel", "allow_neg_eigval", "return_intermediate_states"]
)
def test_keywords_that_it_lacks(refused):
    x, _, _ = draw(DPLR, Call(T=3))
    message = rf"chunk_dplr_delta_rule\(\) got an unexpected keyword argument '{refused}'"
    with pytest.raises(TypeError, match=message):
        operator(DPLR, "chunk", x, **{refused: True})


def test_decoding_goes_on_from_a_state():
    """Chunks, then single tokens with the state in place."""
    call = Call(T=40)
    exact = oracle(DPLR, call)
    x, _, _ = draw(DPLR, call)
    state = x.pop("initial_state")
    with torch.no_grad():
        _, S = operator(DPLR, "chunk", {n: t[:, :35] for n, t in x.items()}, initial_state=state)
        for t in range(35, 40):
            one = {n: y[:, t : t + 1] for n, y in x.items()}
            o, S = operator(DPLR, "fused_recurrent", one, initial_state=S, inplace_final_state=True)
    assert_exact("o", o, exact["o"][:, -1:])
    assert_exact("final_state", S, exact["final_state"])
