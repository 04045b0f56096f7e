"""Operators of fla_cp.compat, called in FLA's order, against the recurrence in fp64."""

import re
import warnings
from itertools import pairwise

import pytest
import torch

from fla_cp import compat
from fla_cp.kernels.torch.backend import TorchBackend
from fla_cp.reference import recurrence
from tests.support.closeness import assert_exact, assert_within_budget
from tests.support.fla_record import RECORD, by_position
from tests.support.members import BY_NAME, CALLS, F64, Call, collect, draw, oracle

CHUNK = {
    "chunk_kda": "kda",
    "chunk_gated_delta_rule": "gated_delta_rule",
    "chunk_gated_delta_product": "gated_delta_product2",
    "chunk_comba": "comba",
    "chunk_dplr_delta_rule": "dplr_delta_rule",
    "chunk_gla": "gla",
    "chunk_simple_gla": "simple_gla",
}
RECURRENT = {
    "fused_recurrent_kda": "kda",
    "fused_recurrent_gated_delta_rule": "gated_delta_rule",
    "fused_recurrent_comba": "comba",
    "fused_recurrent_dplr_delta_rule": "dplr_delta_rule",
    "fused_recurrent_gla": "gla",
    "fused_recurrent_simple_gla": "simple_gla",
}
RULES = ("chunk_delta_rule", "fused_recurrent_delta_rule")
MEMBER = CHUNK | RECURRENT
INSIDE = ("chunk_kda", "chunk_gated_delta_rule", "fused_recurrent_kda")
INSIDE += ("fused_recurrent_gated_delta_rule",)
SMALL = Call(T=9, HV=2)


def call(name, leaves, member, **keywords):
    """A call by position, of tensors under the names that our operators give them."""
    values = dict(leaves)
    if name == "fused_recurrent_gla":
        values["gk"] = values.pop("g")
    if "product" in name:
        values["num_householder"] = member.steps
    if "output_final_state" not in keywords:
        keywords["output_final_state"] = True
    return by_position(name, **values, **keywords)


def packing(shape):
    return {} if shape.cu is None else {"cu_seqlens": torch.tensor(shape.cu)}


def of(name, shape=SMALL, dtype=F64):
    """The member, inputs and keywords of one call."""
    member = BY_NAME[MEMBER[name]]
    x, keywords, _ = draw(member, shape, dtype)
    return member, x, keywords


@pytest.mark.parametrize("shape", ["plain", "packed", "rows"])
@pytest.mark.parametrize("name", MEMBER)
def test_equals_the_recurrence(name, shape):
    member, shape = BY_NAME[MEMBER[name]], CALLS[shape]
    x, keywords, weights = draw(member, shape)
    exact = oracle(member, shape)

    def f(leaves):
        return call(name, leaves, member, **keywords, **packing(shape))

    for key, value in collect(f, x, weights).items():  # forms in chunks: autograd records it
        assert_exact(key, value, exact[key])
    with torch.no_grad():
        o, final = f(x)
    assert_exact("o", o, exact["o"])
    assert_exact("final_state", final, exact["final_state"])


@pytest.mark.parametrize("name", INSIDE)
def test_norm_gate_and_sigmoid_inside(name):
    member = BY_NAME[MEMBER[name]]
    x, keywords, weights = draw(member, CALLS["inside"])
    exact = oracle(member, CALLS["inside"])
    found = collect(lambda leaves: call(name, leaves, member, **keywords), x, weights)
    for key, value in found.items():
        assert_exact(key, value, exact[key])


@pytest.mark.parametrize("name", [n for n in INSIDE if BY_NAME[MEMBER[n]].beta])
def test_a_sigmoid_inside_alone_leaves_betas_between_0_and_1(name):
    """`allow_neg_eigval` doubles them."""
    member, x, keywords = of(name, Call(T=70))
    raw = torch.linspace(-3, 3, x["beta"].numel(), dtype=x["beta"].dtype).view_as(x["beta"])
    exact = call(name, x | {"beta": raw.sigmoid()}, member, **keywords)
    given = keywords | {"use_beta_sigmoid_in_kernel": True}
    for key, mine, theirs in zip(
        ("o", "final_state"), call(name, x | {"beta": raw}, member, **given), exact, strict=True
    ):
        assert_exact(key, mine, theirs)
    o, _ = call(name, x | {"beta": raw}, member, **given, allow_neg_eigval=True)
    assert (o - exact[0]).norm() > 1e-2 * exact[0].norm()


@pytest.mark.parametrize("name", RULES)
def test_the_delta_rule_has_no_decay(name):
    shape = CALLS["packed"]
    x, keywords, weights = draw(BY_NAME["gated_delta_rule"], shape)
    zeros = torch.zeros_like(x.pop("g"))
    exact = collect(lambda t: recurrence(**t, g=zeros, cu_seqlens=list(shape.cu)), x, weights)
    more = {"output_final_state": True, **packing(shape)}
    found = collect(lambda t: by_position(name, **t, **keywords, **more), x, weights)
    for key, value in found.items():
        assert_exact(key, value, exact[key])
    with torch.no_grad():
        assert_exact("o", by_position(name, **x, **more)[0], exact["o"])


@pytest.mark.parametrize("name", [*MEMBER, *RULES])
def test_without_a_final_state_none_is_returned(name):
    shape = Call(T=5, HV=2, states=False)
    x, _, _ = draw(BY_NAME[MEMBER.get(name, "gated_delta_rule")], shape)
    if name in RULES:
        del x["g"]
        assert by_position(name, **x)[1] is None
        return
    o, final = call(name, x, BY_NAME[MEMBER[name]], output_final_state=False)
    assert o.shape == (1, 5, 2, 6)
    assert final is None


def test_intermediate_states_are_a_third_result():
    _, x, _ = of("chunk_kda", Call(T=70))
    o, final, h = by_position("chunk_kda", **x, return_intermediate_states=True)
    assert o.shape == (1, 70, 4, 6)
    assert final is None
    assert_exact("h", h[:, 0], x["initial_state"])
    assert h.shape == (1, 2, 4, 8, 6)


LENGTHS = (0, 1, 33, 33, 65, 161, 225)
"""Sequences of 1, 32, 0, 32, 96 and 64 tokens."""


@pytest.mark.parametrize("v_first", [False, True], ids=["KV", "VK"])
@pytest.mark.parametrize(
    "shape",
    [
        Call(T=225, cu=LENGTHS, HV=4),
        Call(T=225, cu=LENGTHS, inside=True),
        Call(T=97, B=3, decay=1e-3),
        Call(T=32),
    ],
    ids=["packed", "inside", "rows", "short"],
)
def test_intermediate_states_of_chunks_of_32(shape, v_first):
    """The states before tokens 0, 32, 64, .. of each sequence, by the recurrence up to there."""
    member, x, keywords = of("chunk_kda", shape)
    expected = []
    for n, (start, stop) in enumerate(pairwise(shape.offsets())):
        row = {
            k: t[start // shape.T if shape.cu is None else 0] for k, t in x.items() if t.ndim > 2
        }
        begin = start if shape.cu is not None else 0
        state = x["initial_state"][n : n + 1]
        rates = {k: x[k] for k in ("A_log", "dt_bias") if k in x}
        for tokens in range(0, stop - start, 32):
            part = {k: row[k][None, begin : begin + tokens] for k in member.arguments}
            before = state
            if tokens:
                before = recurrence(**part, **rates, initial_state=state, **keywords)[1]
            expected.append(before[0])
    exact = torch.stack(expected).unflatten(0, (shape.B, -1))
    if v_first:
        exact, x["initial_state"] = exact.mT, x["initial_state"].mT.contiguous()
    more = {"return_intermediate_states": True, "state_v_first": v_first, **keywords}
    o, final, h = call("chunk_kda", x, member, chunk_size=32, **more, **packing(shape))
    assert_exact("h", h, exact)
    others = call("chunk_kda", x, member, **more, **packing(shape))
    assert_exact("o", o, others[0])
    assert_exact("final_state", final, others[1])


def test_intermediate_states_of_chunks_of_32_have_no_gradient():
    member, x, _ = of("chunk_kda", Call(T=70), torch.bfloat16)
    leaves = {n: t.requires_grad_() for n, t in x.items()}
    keywords = {"chunk_size": 32, "return_intermediate_states": True}
    o, _, h = call("chunk_kda", leaves, member, **keywords)
    assert o.requires_grad and not h.requires_grad
    assert h.dtype == torch.bfloat16 and h.shape == (1, 3, 4, 8, 6)


@pytest.mark.parametrize("name", ["chunk_simple_gla", "fused_recurrent_simple_gla"])
def test_g_gamma_is_a_decay_for_every_token(name):
    member, x, _ = of(name)
    gamma = torch.tensor([-0.5, -0.01], dtype=F64)
    x["g"] = gamma.expand_as(x["g"])
    weights = draw(member, SMALL)[2]
    exact = collect(lambda t: recurrence(**t, removal=False), x, weights)
    x["g_gamma"], expected = gamma, exact.pop("dg").sum((0, 1))
    del x["g"]
    found = collect(lambda t: call(name, t, member), x, weights)
    assert_exact("dg_gamma", found.pop("dg_gamma"), expected)
    for key, value in found.items():
        assert_exact(key, value, exact[key])
    with pytest.raises(ValueError, match="g_gamma must be None beside g"):
        call(name, {**x, "g": torch.zeros(1, 9, 2, dtype=F64)}, member)
    with pytest.raises(ValueError, match=r"g_gamma must have shape \[HV\] = \(2,\), got \(3,\)"):
        call(name, {**x, "g_gamma": torch.zeros(3)}, member)


ABSENT = [
    ("chunk_simple_gla", "g", torch.zeros_like),
    ("fused_recurrent_simple_gla", "g", torch.zeros_like),
    ("fused_recurrent_gla", "g", torch.zeros_like),
    ("fused_recurrent_gated_delta_rule", "g", torch.zeros_like),
    ("chunk_gated_delta_product", "g", torch.zeros_like),
    ("chunk_comba", "beta", torch.ones_like),
    ("fused_recurrent_comba", "beta", torch.ones_like),
    ("fused_recurrent_gated_delta_rule", "beta", torch.ones_like),
]


@pytest.mark.parametrize("name, argument, instead", ABSENT)
def test_what_none_stands_for(name, argument, instead):
    member, x, _ = of(name)
    x[argument] = instead(x[argument])
    o, final = call(name, x, member)
    named = "gk" if name == "fused_recurrent_gla" else argument
    values = {k: t for k, t in x.items() if k != argument}
    if named == "gk":
        found = by_position(name, **values, output_final_state=True)
    else:
        found = call(name, {**values, argument: None}, member)
    assert_exact("o", found[0], o)
    assert_exact("final_state", found[1], final)


@pytest.mark.parametrize("name", ["chunk_comba", "fused_recurrent_comba"])
def test_k_reads_the_state_without_p(name):
    member, x, _ = of(name)
    expected = call(name, {**x, "p": x["k"]}, member)
    assert_exact("o", call(name, {**x, "p": None}, member)[0], expected[0])


def test_decays_of_key_channels_in_the_recurrent_gated_delta_rule():
    name = "fused_recurrent_gated_delta_rule"
    x, _, _ = draw(BY_NAME["kda"], SMALL)
    gk, half = x.pop("g"), torch.full((1, 9, 2), -0.25, dtype=F64)
    for g in (None, half):
        whole = gk if g is None else gk + g[..., None]
        exact = recurrence(**x, g=whole)
        found = by_position(name, **x, g=g, gk=gk, output_final_state=True)
        assert_exact("o", found[0], exact[0])
        assert_exact("final_state", found[1], exact[1])


def test_other_names():
    assert compat.chunk_gdn is compat.chunk_gated_delta_rule
    assert compat.fused_recurrent_gdn is compat.fused_recurrent_gated_delta_rule
    assert compat.l2_norm is compat.l2norm


RENAMED = [
    name
    for name in MEMBER
    if RECORD[name]["more"]
    and any(arg == "state_v_first" for arg, *_ in RECORD[name]["arguments"])
    and name != "chunk_simple_gla"
]


@pytest.mark.parametrize("name", RENAMED)
def test_the_former_name_of_state_v_first_warns(name):
    member, x, _ = of(name)
    x["initial_state"] = x["initial_state"].mT.contiguous()
    expected = call(name, x, member, state_v_first=True)
    with pytest.warns(DeprecationWarning, match="renamed it to state_v_first") as caught:
        found = call(name, x, member, transpose_state_layout=True)
    assert caught[0].filename.endswith("fla_record.py"), "not where the operator is called"
    assert_exact("o", found[0], expected[0])
    assert_exact("final_state", found[1], expected[1])
    assert found[1].shape == (1, 2, 6, 8)
    with pytest.raises(ValueError, match="former name of state_v_first"):
        call(name, x, member, state_v_first=True, transpose_state_layout=True)


@pytest.mark.parametrize("name", [n for n in (*MEMBER, *RULES) if RECORD[n]["more"]])
def test_keywords_that_fla_does_not_have_are_refused(name):
    x, _, _ = draw(BY_NAME[MEMBER.get(name, "gated_delta_rule")], SMALL)
    if name in RULES:
        del x["g"]
    if name == "fused_recurrent_gla":
        x["gk"] = x.pop("g")
    for keyword in ("head_first", "use_qk_norm"):
        with pytest.raises(TypeError, match=f"unexpected keyword argument '{keyword}'"):
            by_position(name, **x, **{keyword: False})


OF_RWKV7 = {"q": "r", "gk": "w"}
"""What RWKV-7 calls what DPLR calls otherwise."""


@pytest.mark.parametrize("name", ["chunk_rwkv7", "fused_recurrent_rwkv7"])
def test_rwkv7_is_dplr_by_other_names(name):
    """The scale is 1 by default in chunks, and K**-0.5 in the recurrent form, which returns the
    final state unless told otherwise."""
    member, x, _ = of("chunk_dplr_delta_rule")
    scale = 1.0 if name == "chunk_rwkv7" else None
    exact = call("chunk_dplr_delta_rule", x, member, scale=scale)
    wanted = {"output_final_state": True} if name == "chunk_rwkv7" else {}
    found = by_position(name, **{OF_RWKV7.get(n, n): t for n, t in x.items()}, **wanted)
    assert_exact("o", found[0], exact[0])
    assert_exact("final_state", found[1], exact[1])


@pytest.mark.parametrize("reverse", [False, True])
def test_rwkv7_with_a_removal_key_and_its_rate(reverse):
    member, x, _ = of("fused_recurrent_dplr_delta_rule")
    kk, rate = -x["a"], x["b"].sigmoid()
    more = {"scale": 1.0, "reverse": reverse}
    exact = call("fused_recurrent_dplr_delta_rule", {**x, "b": kk * rate}, member, **more)
    del x["b"]
    given = {OF_RWKV7.get(n, n): t for n, t in x.items()} | {"kk": kk, "a": rate}
    name = "fused_mul_recurrent_rwkv7"
    found = by_position(name, **given, reverse=reverse, output_final_state=True)
    assert_exact("o", found[0], exact[0])
    assert_exact("final_state", found[1], exact[1])
    with pytest.raises(ValueError, match=r"a must have kk's shape \(1, 9, 2, 8\).*got \(1, 9, 8\)"):
        by_position(name, **{**given, "a": rate[:, :, 0]})
    with pytest.raises(ValueError, match=r"a must have kk's .*dtype torch.float64.*torch.float32"):
        by_position(name, **{**given, "a": rate.float()})
    with pytest.raises(ValueError, match="kk must be a tensor, got None"):
        by_position(name, **{**given, "kk": None})


@pytest.mark.parametrize("name", ["chunk_dplr_delta_rule", "chunk_rwkv7"])
def test_bounds_of_a_decay(name):
    """A bound from -5 on allows what safe_gate allows, one below it says nothing."""
    _, x, _ = of("chunk_dplr_delta_rule")
    if name == "chunk_rwkv7":
        x = {OF_RWKV7.get(n, n): t for n, t in x.items()}
    plain, _ = by_position(name, **x)
    bounds = {"lower_bound": -5.0}, {"lower_bound": -9.0}, {"safe_gate": True}
    for more in (*bounds, {"chunk_size": 16}, {"chunk_size": 64}):
        assert_exact("o", by_position(name, **x, **more)[0], plain)
    refused = {"lower_bound": -9.0, "safe_gate": True}
    with pytest.raises(ValueError, match=r"safe_gate needs lower_bound in \[-5, 0\), got -9.0"):
        by_position(name, **x, **refused)
    with pytest.raises(ValueError, match="chunk_size must be 16, 32, 64 or None, got 128"):
        by_position(name, **x, chunk_size=128)


SIZES = {
    "chunk_kda": (32, 64),
    "chunk_gated_delta_rule": (16, 32, 64),
    "chunk_delta_rule": (16, 32, 64),
    "chunk_simple_gla": (16, 32, 64, 128, 256, None),
    "chunk_dplr_delta_rule": (16, 32, 64, None),
    "chunk_rwkv7": (16, 32, 64, None),
}
"""The values of chunk_size that FLA has."""
CHOSEN = {128: 16, 256: 16, None: 16}
"""For these, as without any, the call has the chunks that suit its 9 tokens."""
ROWS = {16: 32, 32: 64, 64: 64, None: 32}
"""DPLR and RWKV-7 have two rows a token, and at most 64 rows in a chunk."""


@pytest.mark.parametrize("name", SIZES)
def test_calls_have_the_chunks_that_are_asked_for(name, monkeypatch):
    formed, form = [], TorchBackend.prepare_chunks

    def noted(self, spec, *rest):
        formed.append(spec.packing.chunk)
        return form(self, spec, *rest)

    monkeypatch.setattr(TorchBackend, "prepare_chunks", noted)
    alike = {"chunk_delta_rule": "chunk_gated_delta_rule", "chunk_rwkv7": "chunk_dplr_delta_rule"}
    member, x, _ = of(alike.get(name, name))
    if name == "chunk_delta_rule":
        del x["g"]
    elif name == "chunk_rwkv7":
        x = {OF_RWKV7.get(n, n): t for n, t in x.items()}
    for given in ({}, *({"chunk_size": size} for size in SIZES[name])):
        formed.clear()
        by_position(name, **x, **given)
        size = given.get("chunk_size")
        assert formed == [ROWS[size] if member.dplr else CHOSEN.get(size, size)], given


def test_chunk_sizes():
    member, x, _ = of("chunk_kda")
    with pytest.raises(ValueError, match="chunk_size must be 32 or 64, got 16"):
        call("chunk_kda", x, member, chunk_size=16)
    member, x, _ = of("chunk_gated_delta_rule")
    with pytest.raises(ValueError, match="chunk_size must be 16, 32 or 64, got 48"):
        call("chunk_gated_delta_rule", x, member, chunk_size=48)


@pytest.mark.parametrize("name", INSIDE)
def test_parameters_of_the_gate_may_be_narrow_or_unused(name):
    """FLA reads them in fp32, and without use_gate_in_kernel not at all."""
    member = BY_NAME[MEMBER[name]]
    x, keywords, _ = draw(member, CALLS["inside"], torch.float32)
    narrow = {n: x[n].bfloat16() for n in ("A_log", "dt_bias")}
    rounded = {n: t.float() for n, t in narrow.items()}
    o, _ = call(name, x | narrow, member, **keywords)
    expected, _ = call(name, x | rounded, member, **keywords)
    assert_within_budget("o", o, expected.double(), expected)
    given = draw(member, SMALL)[0]
    with_them = call(name, given | {"A_log": given["v"], "dt_bias": None}, member)
    assert_exact("o", with_them[0], call(name, given, member)[0])


@pytest.mark.parametrize("name", INSIDE)
def test_the_gate_is_a_flag(name):
    _, x, _ = of(name)
    with pytest.raises(ValueError, match="use_gate_in_kernel must be True or False, got 'no'"):
        by_position(name, **x, use_gate_in_kernel="no")


def test_q_and_v_are_checked_where_a_decay_is_made_of_them():
    _, x, _ = of("chunk_simple_gla")
    del x["g"]
    with pytest.raises(ValueError, match="q must be a tensor, got None"):
        by_position("chunk_simple_gla", **{**x, "q": None})
    with pytest.raises(ValueError, match=r"v must have 4 dimensions, got shape \(9,\)"):
        by_position("chunk_simple_gla", **{**x, "v": torch.zeros(9)})


@pytest.mark.parametrize(
    "name, decay",
    [
        ("fused_recurrent_kda", "g"),
        ("fused_recurrent_gated_delta_rule", "g"),
        ("fused_recurrent_gated_delta_rule", "gk"),
    ],
)
def test_recurrences_take_q_k_and_v_of_several_dtypes(name, decay):
    """As in FLA, which reads each in fp32 and writes o in v's dtype."""
    _, x, keywords = of(name, dtype=torch.float32)
    if decay == "gk":
        x["gk"] = x.pop("g")[..., None].expand(*x["v"].shape[:3], x["k"].shape[-1])
    x = {n: t.detach() for n, t in x.items()}
    x |= {n: x[n].half() for n in ("v", "beta", decay)}
    x = {n: t.requires_grad_() for n, t in x.items()}

    def f(leaves):
        return by_position(name, **leaves, **keywords, output_final_state=True)

    o, final = f(x)
    wide, wide_final = f({n: t.float() for n, t in x.items()})
    assert o.dtype == torch.float16
    assert final.dtype == torch.float32
    assert torch.equal(o, wide.half()) and torch.equal(final, wide_final)
    (grad,) = torch.autograd.grad(o.float().sum(), x["v"])
    (expected,) = torch.autograd.grad(wide.sum(), x["v"])
    assert grad.dtype == torch.float16 and torch.equal(grad, expected)


def test_the_recurrence_for_serving_takes_several_dtypes():
    _, x, _ = of("fused_recurrent_kda", dtype=torch.float32)
    x = {n: t.detach() for n, t in x.items()} | {"v": x["v"].detach().half()}
    wide = x | {"v": x["v"].float()}
    results = [
        by_position("fused_recurrent_kda_fwd", **given, inplace_final_state=False)[0]
        for given in (x, wide, x | {"out": torch.empty_like(x["v"])})
    ]
    assert [o.dtype for o in results] == [torch.float16, torch.float32, torch.float16]
    assert torch.equal(results[0], results[1].half()) and torch.equal(results[0], results[2])


@pytest.mark.parametrize("name", ["fused_recurrent_gla", "fused_recurrent_gated_delta_rule"])
def test_errors_call_decays_of_channels_gk(name):
    _, x, _ = of("fused_recurrent_kda" if name.endswith("rule") else name)
    g, shape = x.pop("g"), (1, 9, 2, 8)
    with pytest.raises(ValueError, match=r"gk must have 4 dimensions, got shape \(9,\)"):
        by_position(name, **x, gk=torch.zeros(9, dtype=F64))
    with pytest.raises(ValueError, match=re.escape(f"gk must have shape [B, T, HV, K] = {shape}")):
        by_position(name, **x, gk=g[..., :1])
    with pytest.raises(ValueError, match="gk must be a tensor, got 'none'"):
        by_position(name, **x, gk="none")


@pytest.mark.parametrize(
    "name", ["fused_recurrent_gla", "fused_recurrent_simple_gla", "fused_recurrent_dplr_delta_rule"]
)
def test_tokens_are_checked_before_they_are_put_in_reverse_order(name):
    member, x, _ = of(name)
    decay = {"fused_recurrent_gla": "gk", "fused_recurrent_simple_gla": "g"}.get(name, "gk")
    ours = "g" if name != "fused_recurrent_dplr_delta_rule" else "gk"
    for wrong in (x[ours][0, 0, 0], x[ours][:, :5]):
        message = f"{decay} must be [B, T, ..] with q's B and T, (1, 9), got shape"
        with pytest.raises(ValueError, match=re.escape(message)):
            call(name, {**x, ours: wrong}, member, reverse=True)


def test_both_decays_of_the_recurrent_gated_delta_rule_are_checked():
    _, x, _ = of("fused_recurrent_kda")
    gk, name = x.pop("g"), "fused_recurrent_gated_delta_rule"
    with pytest.raises(ValueError, match="g must be a tensor, got 'none'"):
        by_position(name, **x, g="none", gk=gk)
    with pytest.raises(ValueError, match=r"g must have shape \[B, T, HV\] = .* got \(1, 1, 1\)"):
        by_position(name, **x, g=gk[:1, :1, :1, 0], gk=gk)


def test_a_beta_in_the_place_of_gk_is_recognised():
    """In chunks, beta is the fifth argument; token by token, gk is."""
    _, x, _ = of("fused_recurrent_gated_delta_rule")
    q, k, v, g, beta = (x[n].detach() for n in ("q", "k", "v", "g", "beta"))
    f, decay = compat.fused_recurrent_gated_delta_rule, torch.zeros(1, 9, 2, 8, dtype=F64)
    with pytest.raises(ValueError, match=r"^gk must .* \(1, 9, 2\), .*: pass beta by name"):
        f(q, k, v, g, beta)
    for wrong, beside in ((beta, beta), (beta, None), (decay[:, :4], None), (decay[..., :4], beta)):
        with pytest.raises(ValueError, match=f"^gk must have .*{re.escape(str((*wrong.shape,)))}"):
            f(q, k, v, g, wrong, beta=beside)
    for wrong in (decay, beta[:, :4]):
        with pytest.raises(ValueError, match=f"^beta must .*{re.escape(str((*wrong.shape,)))}$"):
            f(q, k, v, g, decay, beta=wrong)
    o, _ = f(q, k, v, g, decay, beta=beta)
    assert_exact("o", o, f(q, k, v, g, beta=beta)[0])


@pytest.mark.parametrize("name", [*CHUNK, "chunk_delta_rule", "chunk_rwkv7"])
def test_fewer_tokens_than_heads_give_a_warning(name):
    """Tensors [B, H, T, K] have such shapes. Offsets and contexts know the number of tokens."""
    of_name = {"chunk_delta_rule": "kda", "chunk_rwkv7": "dplr_delta_rule"}
    member = BY_NAME[of_name.get(name) or CHUNK[name]]

    def run(T, **where):
        x, keywords, _ = draw(member, Call(T=T, H=6, HV=6, states=False), F64)
        x = {n: t.detach() for n, t in x.items()}
        if name == "chunk_delta_rule":
            return compat.chunk_delta_rule(x["q"], x["k"], x["v"], x["beta"], **where)
        if name == "chunk_rwkv7":
            return by_position(name, **{OF_RWKV7.get(n, n): t for n, t in x.items()}, **where)
        return call(name, x, member, **keywords, **where)

    first = "r" if name == "chunk_rwkv7" else "q"
    with pytest.warns(UserWarning, match=f"^{first} has fewer tokens than heads, T=5 and H=6: "):
        run(5)
    for T in (1, 6):
        run(T)
    offsets = torch.tensor([0, 5])
    run(5, cu_seqlens=offsets)
    run(5, cp_context=compat.build_cp_context(offsets, None))


def test_no_warning_in_an_ordinary_call():
    member, x, _ = of("chunk_gated_delta_rule")
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        call("chunk_gated_delta_rule", x, member, state_v_first=False)


@pytest.mark.parametrize("offsets", [None, (0, 4, 4, 9), (0, 7)], ids=str)
@pytest.mark.parametrize(
    "name", ["fused_recurrent_gla", "fused_recurrent_simple_gla", "fused_recurrent_dplr_delta_rule"]
)
def test_from_the_last_token_to_the_first(name, offsets):
    """Gradients included; tokens behind the last sequence stay in place."""
    member, x, _ = of(name)
    T = x["q"].shape[1]
    rows = [(0, T)] if offsets is None else [*pairwise(offsets)]
    if offsets is not None:
        x = {n: t[:1] for n, t in x.items() if n in member.arguments}
        x = {n: t[:, : offsets[-1]] for n, t in x.items()}
    order = [t for a, b in rows for t in range(b - 1, a - 1, -1)]
    leaves = {n: t.detach().requires_grad_() for n, t in x.items() if n in member.arguments}
    given = {} if offsets is None else {"cu_seqlens": torch.tensor(offsets)}

    def run(reverse):
        turned = leaves if reverse else {n: t[:, order] for n, t in leaves.items()}
        o, final = call(name, turned, member, **given, reverse=reverse, scale=0.5)
        o = o if reverse else o[:, order]
        weights = torch.arange(o.numel(), dtype=F64).view_as(o).cos()
        loss = (o * weights).sum() + final.square().sum()
        return o, final, *torch.autograd.grad(loss, [*leaves.values()])

    for a, b in zip(run(True), run(False), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-12, atol=1e-12)


def test_reverse_is_true_or_false():
    member, x, keywords = of("fused_recurrent_gla")
    with pytest.raises(ValueError, match="reverse must be True or False, got 1"):
        call("fused_recurrent_gla", x, member, **keywords, reverse=1)
    given = {"cu_seqlens": torch.tensor([0, 99]), "reverse": True}
    with pytest.raises(ValueError, match="cu_seqlens must end at"):
        call("fused_recurrent_gla", {n: t[:1] for n, t in x.items()}, member, **given)


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors:UserWarning")
@pytest.mark.parametrize("layout", [torch.strided, torch.jagged])
def test_nested_tensors_are_refused(layout):
    x = torch.nested.nested_tensor([torch.zeros(T, 2, 8) for T in (3, 5)], layout=layout)
    with pytest.raises(ValueError, match=r"^q must be a dense tensor, got a nested tensor$"):
        compat.chunk_kda(x, x, x, x, x)
