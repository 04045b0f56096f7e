"""Inputs for which o is a small difference of large terms.

Kernels must err as rounding their operands predicts, with precision="high" several times less, and
a kernel that loses more must be over the budget.
"""

import pytest
import torch

pytest.importorskip("triton")  # interpreted: conftest.py

from fla_cp import chunk_gated_delta_rule, chunk_kda, fused_recurrent_kda
from fla_cp.kernels.torch.intra import Inputs, Spec
from fla_cp.kernels.triton import backend, intra
from fla_cp.kernels.triton.device import bundles
from fla_cp.kernels.triton.tile_table import TUNING
from fla_cp.partition.packing import Packing
from fla_cp.rule import DeltaRule
from tests.support.cases import named
from tests.support.gluon_interpreter import interpreted
from tests.support.members import BY_NAME as MEMBERS
from tests.support.members import Call, collect, draw, operator
from tests.support.rounded import (
    LINEAR,
    NAMES,
    Rounding,
    inputs,
    over_budget,
    relative,
    results,
    rounded,
    rounded_dplr,
)
from tests.support.running import run
from tests.support.tuned import tune

HALF = torch.bfloat16


def drawn(T, K, per_head, dtype=HALF):
    """The case, its inputs in dtype and in fp64, keywords, do, and a zero gradient of the final
    state.
    """
    case = named("cancelling", T=T, K=K, V=K, states=False)
    x, keywords = inputs(case, per_head, "cpu", dtype)
    do = torch.randn(1, T, 2, K, generator=torch.Generator().manual_seed(2)).to(dtype)
    return case, x, {n: t.double() for n, t in x.items()}, keywords, do, torch.zeros(1, 2, K, K)


@pytest.mark.parametrize("per_head", [False, True])
def test_without_rounding_it_is_the_operator(per_head):
    case, _, wide, keywords, do, dS = drawn(128, 16, per_head)
    op = chunk_gated_delta_rule if per_head else chunk_kda
    exact = results(op, wide, do, keywords | {"impl": "torch"})
    found = relative(rounded(case, wide, Rounding(None), (do, dS)), exact)
    assert found.keys() == exact.keys()
    assert max(found.values()) < 1e-12


def test_without_rounding_it_is_dplr():
    member, call = MEMBERS["dplr_delta_rule"], Call(T=70, decay=0.5)
    wide, _, weights = draw(member, call)
    exact = collect(lambda x: operator(member, "chunk", x), wide, weights)
    found = relative(rounded_dplr(wide, *weights, Rounding(None)), exact)
    assert found.keys() == exact.keys()
    assert max(found.values()) < 1e-12


def test_such_inputs_make_o_a_small_difference():
    """In bf16, o errs by several times its own rounding, and two terms remove most of that. A
    kernel that loses one bit of an operand is over the budget.
    """
    case, _, wide, keywords, do, dS = drawn(128, 64, False)
    exact = results(chunk_kda, wide, do, keywords | {"impl": "torch"})

    def errors(**more):
        return relative(rounded(case, wide, Rounding(HALF, **more), (do, dS)), exact)

    default, high = errors(), errors(precise=True)
    assert 8e-3 < default["o"] < 16e-3 and 8e-3 < default["dv"] < 16e-3
    assert high["o"] < 0.4 * default["o"] and high["dv"] < 0.4 * default["dv"]
    for precise, operand in ((False, "v_new of o"), (True, "kg")):
        worse = rounded(case, wide, Rounding(HALF, precise, coarse=operand), (do, dS))
        right = rounded(case, wide, Rounding(HALF, precise), (do, dS))
        assert over_budget(worse, exact, right), operand
        assert not over_budget(right, exact, right)


@pytest.mark.parametrize("precision", ["default", "high"])
@pytest.mark.parametrize("in_gluon", [True, False])
def test_kernels_with_a_decay_a_head_err_as_rounding_says(precision, in_gluon, monkeypatch):
    """In our interpreter in bf16, and in Triton's, whose bf16 is wrong, in fp16."""
    monkeypatch.setenv("TRITON_INTERPRET", "1")
    tune(monkeypatch, gluon=in_gluon)
    dtype = HALF if in_gluon else torch.float16
    case, x, wide, keywords, do, dS = drawn(128, 128 if in_gluon else 32, True, dtype)
    exact = results(chunk_gated_delta_rule, wide, do, keywords | {"impl": "torch"})
    with interpreted() as launched:
        more = {"impl": "triton", "precision": precision}
        found = results(chunk_gated_delta_rule, x, do, keywords | more)
    assert ("scan_sm90_kernel" in launched) == in_gluon
    right = rounded(case, wide, Rounding(dtype, precision == "high", True), (do, dS))
    if in_gluon or precision == "default":  # fp16 rounds no more than the products of T, in TF32
        assert not over_budget(found, exact, right, LINEAR)
    coarse = relative(rounded(case, wide, Rounding(dtype, False, True), (do, dS)), exact)
    for name in ("o", "dv") if precision == "high" else ():
        assert relative(found, exact)[name] < (0.5 if in_gluon else 0.75) * coarse[name]


@pytest.mark.wide
@pytest.mark.parametrize("in_gluon", [True, False])
def test_kernels_with_a_decay_a_channel_in_two_terms(in_gluon, monkeypatch, request):
    """In fp32, the only dtype in which the interpreter sums their gates. There the second terms are
    zero, and only T changes, whose products round to TF32.
    """
    monkeypatch.setenv("TRITON_INTERPRET", "1")
    tune(monkeypatch, gluon=in_gluon)
    monkeypatch.setattr(bundles, "TWO_TERMS_BYTES", 4)
    bundles.shape.cache_clear()
    request.addfinalizer(bundles.shape.cache_clear)
    _, x, _, keywords, do, _ = drawn(65, 64 if in_gluon else 32, False, torch.float32)
    keywords["impl"] = "triton"
    for inside in ({},) if in_gluon else ({}, {"safe_gate": False}):
        with interpreted():
            plain = results(chunk_kda, x, do, keywords | inside)
            found = results(chunk_kda, x, do, keywords | inside | {"precision": "high"})
        errors = relative(found, plain)
        assert errors["o"] > 1e-8 and max(errors[n] for n in NAMES) < 2e-3, errors


@pytest.mark.parametrize("size, chunks", [(None, 2), (16, 5), (32, 3)])
@pytest.mark.parametrize("precise", [False, True])
@pytest.mark.parametrize("per_head", [False, True])
def test_kept_shapes_are_those_of_the_kernels(precise, per_head, size, chunks):
    """torch.compile needs them: T and Aqk have a second term, except in fp32."""
    rule = DeltaRule(scale=1.0, per_head=per_head, precise=precise, chunk_size=size)
    g = torch.zeros(70, 2) if per_head else torch.zeros(70, 2, 16)
    for dtype in (HALF, torch.float32):
        q, k, v = torch.zeros(3, 70, 2, 16, dtype=dtype)
        x = Inputs(q, k, v, g, torch.zeros(70, 2), None, None)
        spec = Spec(rule, Packing.build((0, 70), chunk=rule.chunk))
        _, c = intra.empty_chunks(*spec, x, TUNING)
        kept = [(tuple(t.shape), t.dtype) for t in backend.TRITON.keep(spec, c, None, None)]
        assert kept == backend.TRITON.kept_shapes(rule, dtype, chunks, 2, 16, 16)
        assert c.T.shape[2] == rule.chunk * (2 if precise and dtype == HALF else 1)


@pytest.mark.parametrize("value", ["fast", "", None, True, 2, ["high"]])
@pytest.mark.parametrize("op", [chunk_kda, chunk_gated_delta_rule])
def test_other_precisions_are_refused(op, value):
    case = named("cancelling", T=3, states=False)
    x, keywords = inputs(case, op is not chunk_kda, "cpu")
    with pytest.raises(ValueError, match="precision must be 'default' or 'high', got") as caught:
        op(**x, **keywords, precision=value)
    assert ("list" if value == ["high"] else repr(value)) in str(caught.value)


def test_where_precision_changes_nothing():
    """The torch stages round no operand, and the token-by-token operators have no such keyword."""
    case = named("cancelling", T=70)
    plain = run(case, torch.float32)
    for name, value in run(case, torch.float32, precision="high").items():
        assert torch.equal(value, plain[name]), name
    x, keywords = inputs(case, False, "cpu")
    del keywords["safe_gate"]
    with pytest.raises(TypeError, match="precision"):
        fused_recurrent_kda(**x, **keywords, precision="high")
