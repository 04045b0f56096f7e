"""The channelwise local stage in Gluon, interpreted, against its definition in fp64.

tests/aot compiles the kernel, and tests/gpu runs it.
"""

import pytest
import torch

pytest.importorskip("triton")

from fla_cp.kernels.sm90 import (
    eligible,
    intra_channelwise,
    intra_channelwise_bwd,
    intra_channelwise_steep,
)
from fla_cp.kernels.torch.intra import Inputs
from fla_cp.kernels.triton.device import bundles
from fla_cp.kernels.triton.intra import empty_chunks, intra, intra_in_two
from fla_cp.kernels.triton.operands import Chunks, tables
from fla_cp.kernels.triton.tile_table import QUARTERS_BWD, STEEP, TALL, TALL_BWD, Tuning
from fla_cp.partition.packing import Packing
from fla_cp.rule import DeltaRule
from tests.support.channelwise import (
    ANY,
    CASES,
    OFFSETS,
    Case,
    K,
    defined,
    drawn,
    fp32_as_bf16,
    gradients,
)
from tests.support.closeness import assert_within_budget
from tests.support.gluon_interpreter import interpreted
from tests.support.tuned import tuned

FORCED = Tuning(forced=(("intra", TALL),))
STEEP_FORCED = Tuning(forced=(("intra", TALL), ("intra_any", STEEP)))


STEEP_CASES = ANY | {
    "jumps": Case("given", None, raw=-0.01, jump=-700.0, safe=False),
    "jumps of single powers": Case("given", None, raw=-0.01, jump=-20.0, safe=False, HV=4),
    "sigmoid": Case("sigmoid", -40.0, safe=False, norm=False, rates=(-1.0, 1.0)),
    "odd lengths": Case(
        "softplus", None, safe=False, rates=(2.0, 3.0), offsets=(0, 1, 64, 129, 192), H=1
    ),
}
"""Cases for the second kernel of the forward."""


def formed(c: Chunks) -> dict[str, torch.Tensor]:
    found = {n: getattr(c, n) for n in ("Aqk", "T", "decay", "anchors", "qg", "k_decayed", "kg")}
    for n in ("Aqk", "T"):
        terms = found[n].shape[-2] // 64 if found[n].numel() else 1
        found[n] = found[n].unflatten(-2, (terms, 64)).sum(-3) if terms > 1 else found[n]
    return found | {"beta": c.rows[:, :, 0]}


@pytest.fixture(autouse=True)
def in_fp32(monkeypatch):
    yield from fp32_as_bf16(monkeypatch)


@pytest.mark.filterwarnings("ignore:.*encountered in:RuntimeWarning")  # what is written again
@pytest.mark.parametrize("name", [*CASES, *ANY])
def test_the_stage_forms_what_is_defined(name):
    case = (CASES | ANY)[name]
    rule, x = drawn(case)
    packing = Packing.build(OFFSETS)
    with interpreted() as launched:
        c = intra(rule, packing, x, FORCED)
    found = formed(c)
    assert set(launched) == {"intra_sm90_kernel"}
    if not case.safe:
        steep = c.steep.bool()
        assert not steep.any() if "none" in name.split() else steep.any() and not steep.all()
    for part, exact in defined(rule, x).items():
        if case.removal == "none" and part in ("T", "k_decayed"):
            assert found[part].numel() == 0
            continue
        # A sum of up to 461 powers of two errs by 2^-15 of itself, and so does a decay.
        error = (found[part].double() - exact).abs().max()
        assert error <= 6e-5 * exact.abs().max() + 1e-30, (part, error)  # fp32 underflows


@pytest.mark.filterwarnings("ignore:.*encountered in:RuntimeWarning")  # what is written again
@pytest.mark.parametrize("name", STEEP_CASES)
def test_steep_chunks_are_formed_as_defined(name):
    """By the kernel that only a forced tile takes."""
    case = STEEP_CASES[name]
    rule, x = drawn(case)
    with interpreted() as launched:
        c = intra(rule, Packing.build(case.offsets), x, STEEP_FORCED)
    assert set(launched) == {"intra_sm90_kernel", "steep_sm90_kernel"}
    steep, found = c.steep.bool(), formed(c)
    exact = defined(rule, x, case.offsets)
    whole = torch.cat([torch.zeros_like(exact["anchors"][:, :, :1]), exact["anchors"]], 2)
    assert torch.equal(steep, (whole.diff(dim=2).abs() > 100).any(-1).any(-1))
    assert steep.any() != ("none" in name.split())
    for part, wanted in exact.items():
        if case.removal == "none" and part in ("T", "k_decayed"):
            assert found[part].numel() == 0
            continue
        error = (found[part].double() - wanted).abs().max()
        assert error <= 6e-5 * wanted.abs().max() + 1e-30, (part, error)


@pytest.mark.parametrize("name", ["drawn decays", "any gate", "no removal"])
def test_chunks_formed_in_two_launches_are_those_of_one(name):
    rule, x = drawn((CASES | ANY)[name])
    packing = Packing.build(OFFSETS)
    with interpreted() as launched:
        whole = intra(rule, packing, x, STEEP_FORCED)
        count = len(launched)
        c, rest = intra_in_two(rule, packing, x, 2, STEEP_FORCED)
        for part in (c.Aqk, c.qg, c.rows):
            part[2:] = 7.0  # the first launch does not touch the others
        rest()
    assert len(launched) == 2 * count and len(whole.decay) > 2
    for part, a in formed(whole).items():
        assert torch.equal(a, formed(c)[part]), part
    assert torch.equal(whole.steep, c.steep)


def test_a_gate_whose_copies_are_not_aligned_takes_other_kernels():
    rule, x = drawn(CASES["drawn decays"])
    c = empty_chunks(rule, Packing.build(OFFSETS), x, FORCED)[1]
    R = bundles.rule_options(rule, torch.float32)
    assert not intra_channelwise.why_not(x, c, R)
    wide = torch.zeros(*x.g.shape[:2], x.g.shape[2] + 1, dtype=x.g.dtype)
    shifted = x._replace(g=wide[..., 1:])
    assert "of g do not prove" in intra_channelwise.why_not(shifted, c, R)
    other = shifted._replace(g=shifted.g.double())  # read number by number
    assert not intra_channelwise.why_not(other, c, R)


def test_all_chunks_are_left_to_the_kernel_of_steep_chunks():
    """Where it runs alone, it writes what belongs to the chunks that it marks, and nothing else."""
    rule, x = drawn(ANY["any gate"])
    with interpreted():
        c = intra(rule, Packing.build(OFFSETS), x, STEEP_FORCED)
        packing = Packing.build(OFFSETS)
        x, alone = empty_chunks(rule, packing, x, STEEP_FORCED)
        parts = "T", "Aqk", "qg", "k_decayed", "kg", "rows"
        for part in parts:
            getattr(alone, part).fill_(7.0)
        alone = alone._replace(anchors=c.anchors)
        R = bundles.rule_options(rule, torch.float32)
        table = tables(packing, x.q.device)
        intra_channelwise_steep.intra_channel(table, x, alone, STEEP, R)
    steep = c.steep.bool()
    assert torch.equal(alone.steep, c.steep) and steep.any() and not steep.all()
    for part in parts:
        assert torch.equal(getattr(alone, part)[steep], getattr(c, part)[steep]), part
        assert (getattr(alone, part)[~steep] == 7.0).all(), part


FAST = ("drawn decays", "two groups", "no removal", "two terms", "any gate, given")
FAST += ("any gate, no removal",)
BACKWARD = [
    pytest.param(n, marks=() if n in FAST else pytest.mark.wide)
    for n in (*CASES, *ANY)
    if n != "softplus"  # which a safe gate of a call is not
]
SHORT = (0, 21, 70)  # Triton's interpreter takes seconds for a chunk and head of the second kernel


@pytest.mark.filterwarnings("ignore:.*encountered in:RuntimeWarning")
@pytest.mark.parametrize("name", BACKWARD)
def test_gradients_err_like_those_of_the_torch_stages(name):
    case = CASES[name] if name in CASES else ANY[name]._replace(offsets=SHORT)
    exact = gradients(case, torch.float64, "torch")
    plain = gradients(case, torch.float32, "torch")
    forced = (("intra", TALL), ("intra_bwd", TALL_BWD))
    with interpreted() as launched, tuned(forced=forced):
        found = gradients(case, torch.float32, "triton")
    backward = "safe_bwd_sm90_kernel" if case.safe else "safe_bwd_any_sm90_kernel"
    assert {"intra_sm90_kernel", backward} <= set(launched)
    for part, value in found.items():
        if exact[part].abs().max() < 1e-20:  # a gate at its bound, whose slope underflows
            assert value.abs().max() < 1e-20, part
            continue
        # Rows and columns refer to a middle that is up to 116 powers of two away, and errors of
        # exponents grow with them.
        assert_within_budget(part, value, exact[part], plain[part], factor=4.0, shift=2e-5)


@pytest.mark.parametrize(
    "changed, reason",
    [
        ({"K": 64}, "K must be 128, got 64"),
        ({"removal": "p"}, "removes along p"),
        ({"use_exp2": False}, "powers of two"),
        ({"rows": 136}, "aligned"),
    ],
    ids=str,
)
def test_what_the_kernel_cannot_form_is_refused(changed, reason):
    rule, x = drawn(Case())
    x = x._replace(q=torch.zeros(150, 2, changed.get("rows", K))[..., : changed.get("K", K)])
    x = x._replace(k=x.q, g=x.g[..., : x.q.shape[2]], dt_bias=None)
    x = x._replace(p=x.k) if "removal" in changed else x
    rule = rule._replace(**{n: y for n, y in changed.items() if n in rule._fields})
    tuning = Tuning(forced=(("intra", TALL), ("intra_own", TALL)))
    with interpreted(), pytest.raises(ValueError, match=reason):
        intra(rule, Packing.build(OFFSETS), x, tuning)


def test_steep_chunks_of_a_safe_gate_are_refused():
    rule, x = drawn(Case())
    x, c = empty_chunks(rule, Packing.build(OFFSETS), x, STEEP_FORCED)
    R = bundles.rule_options(rule, torch.float32)
    with pytest.raises(ValueError, match="leaves out"):
        intra_channelwise_steep.intra_channel(
            tables(Packing.build(OFFSETS), x.q.device), x, c, STEEP, R
        )


def test_a_backward_tile_that_the_kernel_lacks_is_refused():
    forced = (("intra", TALL), ("intra_bwd", TALL_BWD._replace(BK=32)))
    with (
        interpreted(),
        tuned(forced=forced),
        pytest.raises(ValueError, match="BK must be 64, got 32"),
    ):
        gradients(Case(), torch.float32, "triton")


@pytest.mark.filterwarnings("ignore:.*encountered in:RuntimeWarning")  # the forward's, unread
@pytest.mark.parametrize("reads_dv", [False, True])
@pytest.mark.parametrize(
    "tile, strongest", [(TALL_BWD, 0.3), (QUARTERS_BWD, 0.3), (QUARTERS_BWD, 12.0)], ids=str
)
def test_what_pairs_of_tokens_add_to_the_decays_cancels(monkeypatch, tile, strongest, reads_dv):
    """A pair adds to the gradient of gc at its row what it subtracts at its column, so without
    states nothing is left for the first token's decay, however operands are rounded to bf16. And
    gradients err by this rounding alone, however strong decays are. With dv in the place of y,
    scores are those of rows of k without beta."""
    monkeypatch.setattr(bundles, "SAFE_DTYPES", (torch.bfloat16,))
    torch.manual_seed(0)
    rule = DeltaRule(scale=1.0, gate="given", lower_bound=None, safe_gate=True, qk_l2norm=False)
    q, k, do = torch.randn(3, 64, 1, K).bfloat16()
    g = -strongest * torch.rand(64, 1, K)
    x = Inputs(q, k, torch.zeros(64, 1, K).bfloat16(), g, torch.rand(64, 1), None, None, None)
    packing = Packing.build((0, 64))
    empty = lambda *shape: torch.zeros(1, 1, *shape, dtype=torch.bfloat16)  # noqa: E731
    scores = torch.randn(1, 1, 2, 64, 64).tril(-1).bfloat16()
    like = {n: torch.zeros_like(t) for n, t in (("dq", q), ("dk", k), ("dg", g))}
    rest = {
        "dv": torch.zeros_like(x.v),
        "shares": torch.zeros(3, 64, 1),
        "scores": scores,
        "row_grads": torch.zeros(1, 1, 3, 64),
    }
    out = bundles.Grads(*(None,) * len(bundles.Grads._fields))._replace(**like, **rest)
    with interpreted():
        c = intra(rule, packing, x, FORCED)
        read = bundles.Saved(
            *map(bundles.rows, (q, k, k, x.v, do)),
            o=None,
            h=empty(K, K),
            dh=empty(K, K),
            v_new=empty(64, K),
            y=None if reads_dv else empty(64, K),
            rows=c.rows,
            decay=c.decay,
            anchors=c.anchors,
            steep=None,
        )
        R = bundles.rule_options(rule, torch.bfloat16)
        table = tables(packing, q.device)
        intra_channelwise_bwd.safe_bwd(table, x, c, read, out, tile, R)
    assert out.dg[0].abs().max() <= 1e-4 * out.dg.abs().max()
    rows, keys, log_decay = (t[:, 0].double().requires_grad_() for t in (q, k, g))
    between = log_decay.cumsum(0)[:, None] - log_decay.cumsum(0)
    below = torch.ones(64, 64, dtype=torch.bool).tril()
    weight = between.masked_fill(~below[..., None], 0).exp()
    of_q = (rows[:, None] * keys * weight).sum(-1)
    of_k = (keys[:, None] * keys * weight).sum(-1)
    if not reads_dv:
        of_k = of_k * c.rows[0, 0, 0].double()[:, None]
    total = (scores[0, 0, 0] * of_q).sum() + (scores[0, 0, 1] * of_k).sum()
    exact = torch.autograd.grad(total, (rows, keys, log_decay))
    for name, wanted in zip(("dq", "dk", "dg"), exact, strict=True):
        error = (getattr(out, name)[:, 0].double() - wanted).square().mean().sqrt()
        assert error <= 4e-3 * wanted.square().mean().sqrt(), name


def test_a_call_takes_the_kernel_by_itself():
    rule, x = drawn(Case())
    with interpreted() as launched:
        intra(rule, Packing.build(OFFSETS), x, Tuning(gluon=True))
    assert set(launched) == {"intra_sm90_kernel"}


TAKEN = {
    "safe": {},
    "any gate": {"safe_gate": False, "gate": "softplus", "lower_bound": None},
    "given": {"gate": "given", "lower_bound": None},
    "no removal": {"removal": "none", "beta_factor": None},
    "no removal, any gate": {"removal": "none", "beta_factor": None, "safe_gate": False},
    "two terms": {"precise": True},
    "two terms, any gate": {"precise": True, "safe_gate": False},
}
REFUSED = {
    "p reads the state": {"removal": "p", "qk_l2norm": False},
    "natural exponentials": {"use_exp2": False},
    "natural exponentials, any gate": {"use_exp2": False, "safe_gate": False},
}


@pytest.mark.parametrize("name", [*TAKEN, *REFUSED])
@pytest.mark.parametrize("change", ["", "K", "V", "row"])
def test_what_calls_take_by_themselves(name, change):
    """Both directions decide alike, but for V, which only the backward depends on."""
    rule, x = drawn(Case(HV=4))
    rule = rule._replace(**(TAKEN | REFUSED)[name])
    x = x._replace(p=x.k if rule.removal == "p" else None, dt_bias=None)
    k = {"K": 64}.get(change, K)
    x = x._replace(q=x.q[..., :k].contiguous(), k=x.k[..., :k].contiguous(), g=x.g[..., :k])
    if change == "row":  # of 4 * (K + 2) bytes
        x = x._replace(q=torch.zeros(*x.q.shape[:2], k + 2)[..., :k])
    if change == "V":
        x = x._replace(v=x.v[..., :64].contiguous())
    x, c = empty_chunks(rule, Packing.build(OFFSETS), x, Tuning())
    paths = bundles.local_paths(rule, torch.float32)
    do = bundles.rows(x.v)
    taken = name in TAKEN and change in ("", "V")
    assert intra_channelwise.takes(x, c, paths) == taken
    assert intra_channelwise_bwd.takes(x, c, do, paths) == (taken and change != "V")


@pytest.mark.filterwarnings("ignore:.*encountered in:RuntimeWarning")
def test_a_call_of_any_gate_takes_the_kernels_by_itself(monkeypatch):
    """The backward, too; with enough chunks and heads for kernels without descriptors."""
    monkeypatch.setattr(eligible, "supports", lambda c, *rows: True)
    case = ANY["any gate, given"]._replace(offsets=(0, 33), H=1)
    names = {f"{name}_sm90_kernel" for name in ("intra", "steep", "mark", "scores_bwd")}
    names.add("safe_bwd_any_sm90_kernel")
    for least, kernels in ((2, set()), (1, names)):
        with interpreted() as launched, tuned(min_chunk_heads=2**30, min_local_chunk_heads=least):
            gradients(case, torch.float32, "triton")
        assert set(launched) == kernels
