"""The gradients of the channelwise scores in Gluon, interpreted, against fp64.

tests/aot compiles the kernel, and tests/gpu runs it.
"""

from typing import Any

import pytest
import torch

pytest.importorskip("triton")

from fla_cp.kernels.sm90 import intra_channelwise_bwd_scores
from fla_cp.kernels.torch.intra import Inputs
from fla_cp.kernels.triton.device import bundles
from fla_cp.kernels.triton.operands import Chunks, tables
from fla_cp.kernels.triton.tile_table import SCORES_BWD, TALL, TALL_BWD
from fla_cp.partition.packing import Packing
from fla_cp.rule import DeltaRule
from tests.support.channelwise import ANY, CASES, bounds, chunk, fp32_as_bf16, gradients
from tests.support.closeness import assert_within_budget
from tests.support.gluon_interpreter import interpreted
from tests.support.tuned import tuned

OFFSETS = 0, 1, 65, 129, 150
HV, V = 3, 128
SAFE = {"safe_gate": True}
RULES = {
    "safe": SAFE,
    "any gate": {},
    "no norms": SAFE | {"qk_l2norm": False},
    "no removal": SAFE | {"removal": "none"},
    "no removal, any gate": {"removal": "none"},
    "no removal, no norms": SAFE | {"removal": "none", "qk_l2norm": False},
    "two terms": SAFE | {"precise": True},
}


@pytest.fixture(autouse=True)
def in_fp32(monkeypatch):
    yield from fp32_as_bf16(monkeypatch)


def drawn(rule: DeltaRule) -> dict[str, Any]:
    """What the kernel reads, by name of `Saved`. In do, v and o the rows after a chunk's end belong
    to the next document."""
    torch.manual_seed(0)
    T, NC = OFFSETS[-1], len(bounds(OFFSETS))
    wide = torch.randn(T, HV, V + 16)
    new, y = torch.randn(2, NC, HV, 64, V)
    rows = torch.rand(NC, HV, 3, 64)
    rows[:, :, 0, ::9] = 2.0**-60
    for n, (a, b) in enumerate(bounds(OFFSETS)):
        new[n, :, b - a :] = y[n, :, b - a :] = rows[n, :, 0, b - a :] = 0.0
    return {
        "do": torch.randn(T, HV, V),
        "v": wide[..., :V],
        "o": torch.randn(T, HV, V) if rule.qk_l2norm else None,
        "v_new": new,
        "y": y,
        "rows": rows,
        "steep": None if rule.safe_gate else torch.randint(0, 2, (NC, HV), dtype=torch.int32),
    }


def by_token(x: torch.Tensor) -> torch.Tensor:
    """Rows of chunks [NC, HV, 64, ..] as rows of tokens [T, HV, ..]."""
    return torch.cat([x[n, :, : b - a].transpose(0, 1) for n, (a, b) in enumerate(bounds(OFFSETS))])


def launched_on(
    rule: DeltaRule, given: dict[str, Any], dv: torch.Tensor | None = None
) -> dict[str, torch.Tensor]:
    """What the kernel writes, by name of `Grads`; NaN where it writes nothing. dv: what it reads
    instead of y."""
    T, NC, nan = OFFSETS[-1], len(given["y"]), float("nan")
    packing = Packing.build(OFFSETS)
    written = {
        "dv": torch.full((T, HV, V), nan) if dv is None else dv.clone(),
        "shares": torch.full((1, T, HV), nan),
        "scores": torch.full((NC, HV, 2, 64, 64), nan),
        "row_grads": torch.full((NC, HV, 3, 64), nan),
    }
    in_rows = {n: bundles.rows(given[n]) for n in ("do", "v")}
    none: tuple = (None,) * len(bundles.Saved._fields)
    read = bundles.Saved(*none)._replace(**given | in_rows)
    if dv is not None:
        read = read._replace(y=None)
    out = bundles.Grads(*(None,) * len(bundles.Grads._fields))._replace(**written)
    inputs = Inputs(*(None,) * len(Inputs._fields))._replace(q=given["do"], v=given["v"])
    nothing: Any = (None,) * 10
    c = Chunks(*nothing, rule)._replace(decay=torch.empty(NC, HV, 128), o=given["o"])
    R = bundles.rule_options(rule, torch.float32)
    with interpreted() as launched:
        where = tables(packing, torch.device("cpu"))
        intra_channelwise_bwd_scores.scores_bwd(where, inputs, c, read, out, SCORES_BWD, R)
    assert set(launched) == {"scores_bwd_sm90_kernel"}
    return written


@pytest.mark.parametrize("reads_dv", [False, True])
@pytest.mark.parametrize("name", RULES)
def test_the_kernel_writes_what_is_defined(name, reads_dv):
    """Also if it reads dv, which it then does not write: with beta in what it forms for rows."""
    changes: dict[str, Any] = {"qk_l2norm": True, "gate": "softplus", **RULES[name]}
    rule = DeltaRule(scale=0.1, **changes)
    given = drawn(rule)
    values = by_token(given["y"] * given["rows"][:, :, 0, :, None])
    found = launched_on(rule, given, values if reads_dv else None)
    assert not reads_dv or torch.equal(found["dv"], values)
    x = {n: t.double() for n, t in given.items() if t is not None}
    chunks = {n: [chunk(x[n][a:b]) for a, b in bounds(OFFSETS)] for n in ("do", "v", "o") if n in x}
    do, v = torch.stack(chunks["do"]), torch.stack(chunks["v"])
    beta, y, new = x["rows"][:, :, 0], x["y"], x["v_new"]
    dbeta = (v * y).sum(-1)
    k_dk = 2 * (new * y).sum(-1) - beta * dbeta
    factor = beta if reads_dv else torch.ones_like(beta)
    both = torch.stack((do @ new.mT, -factor[..., None] * (y @ new.mT)), 2)
    exact = both.tril(-1)
    if not rule.safe_gate:
        exact = exact + exact.mT * x["steep"][:, :, None, None, None]
    kinds = 1 if rule.removal == "none" else 2
    pairs = {"scores": (found["scores"][:, :, :kinds], exact[:, :, :kinds])}
    assert kinds == 2 or found["scores"][:, :, 1].isnan().all()
    planes = found["row_grads"].unbind(2)
    pairs["diagonal"] = planes[0], both[:, :, 0].diagonal(dim1=-2, dim2=-1)
    if rule.qk_l2norm:
        pairs["q dq"] = planes[1], (do * torch.stack(chunks["o"])).sum(-1)
        pairs["k dk"] = planes[2], k_dk
    else:
        assert found["row_grads"][:, :, 1:].isnan().all()
    pairs["dv"] = found["dv"], by_token(y * beta[..., None])
    pairs["shares"] = found["shares"][0], by_token(factor * dbeta)
    for part, (value, wanted) in pairs.items():
        error = (value.double() - wanted).abs().max()
        assert error <= 2e-6 * wanted.abs().max(), (part, error)


@pytest.mark.filterwarnings("ignore:.*encountered in:RuntimeWarning")
@pytest.mark.parametrize("name", ["two groups", "any gate, given"])
def test_gradients_of_a_call_err_like_those_of_the_torch_stages(name):
    case = (CASES | ANY)[name]._replace(offsets=(0, 21, 70))
    forced = (("intra", TALL), ("intra_bwd", TALL_BWD), ("scores_bwd", SCORES_BWD))
    with interpreted() as launched, tuned(forced=forced):
        found = gradients(case, torch.float32, "triton")
    assert "scores_bwd_sm90_kernel" in launched
    exact = gradients(case, torch.float64, "torch")
    plain = gradients(case, torch.float32, "torch")
    for part, value in found.items():
        assert_within_budget(part, value, exact[part], plain[part], factor=4.0, shift=2e-5)


@pytest.mark.parametrize("change", ["V", "dtype", "row"])
def test_what_the_kernel_does_not_support_is_refused(change):
    rule = DeltaRule(scale=0.1, qk_l2norm=True, **SAFE)
    given = drawn(rule)
    T = OFFSETS[-1]
    changed, reason = {
        "V": ({"v": given["v"][..., :64]}, "V must be 128, got 64"),
        "dtype": ({"o": given["o"].double()}, "the dtype of v"),
        "row": ({"do": torch.zeros(T, HV, V + 2)[..., :V]}, "aligned"),
    }[change]
    with pytest.raises(ValueError, match=reason):
        launched_on(rule, given | changed)


@pytest.mark.filterwarnings("ignore:.*encountered in:RuntimeWarning")
@pytest.mark.parametrize("aligned", [True, False])
def test_calls_that_it_supports_take_it_by_themselves(aligned, monkeypatch):
    """Triton's kernel forms the scores' gradients where the copies would not be aligned."""
    reason = "" if aligned else "not aligned"
    monkeypatch.setattr(intra_channelwise_bwd_scores, "why_not", lambda *_: reason)
    with interpreted() as launched, tuned(gluon=True):
        gradients(CASES["a group"]._replace(offsets=(0, 21)), torch.float32, "triton")
    assert ("scores_bwd_sm90_kernel" in launched) == aligned
