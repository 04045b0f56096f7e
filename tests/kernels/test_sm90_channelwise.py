"""The channelwise local stage in Gluon, interpreted, against its definition in fp64.

tests/aot compiles the kernel, and tests/gpu runs it.
"""

from itertools import pairwise
from typing import NamedTuple

import pytest
import torch

pytest.importorskip("triton")

import fla_cp
from fla_cp.kernels.sm90 import (
    eligible,
    intra_channelwise,
    intra_channelwise_bwd,
    intra_channelwise_steep,
)
from fla_cp.kernels.torch.intra import Inputs
from fla_cp.kernels.triton.device import bundles
from fla_cp.kernels.triton.intra import empty_chunks, intra
from fla_cp.kernels.triton.operands import Chunks, ScanGrads, saved, tables
from fla_cp.kernels.triton.tile_table import QUARTERS_BWD, STEEP, TALL, TALL_BWD, Tuning
from fla_cp.partition.packing import Packing
from fla_cp.rule import DeltaRule
from tests.support.closeness import assert_within_budget
from tests.support.gluon_interpreter import interpreted
from tests.support.tuned import tuned

K = 128
OFFSETS = 0, 40, 150
FORCED = Tuning(forced=(("intra", TALL),))
STEEP_FORCED = Tuning(forced=(("intra", TALL), ("intra_any", STEEP)))


class Case(NamedTuple):
    """gate, bound: the rule's gate. raw: the mean of its projections, a large one for decays that
    are as strong as the bound allows. H, HV: heads of q and k, and of v. safe: whether the rule
    promises a safe gate. rates: A_log of the heads. parallel: whether keys are nearly parallel.
    offsets: of the documents. jump: what every fifth log decay is besides, if it is given."""

    gate: str = "sigmoid"
    bound: float | None = -5.0
    raw: float = 0.0
    removal: str = "k"
    norm: bool = True
    H: int = 2
    HV: int = 2
    precise: bool = False
    safe: bool = True
    rates: tuple[float, ...] = ()
    parallel: bool = False
    offsets: tuple[int, ...] = OFFSETS
    jump: float = 0.0


CASES = {
    "drawn decays": Case(),
    "strongest decays": Case(raw=30.0),
    "no decays": Case(raw=-30.0),
    "softplus": Case("softplus", None, -1.0),
    "given": Case("given", None, -0.5),
    "no removal": Case(removal="none"),
    "no norms": Case(norm=False),
    "a group": Case(H=1),
    "two groups": Case(HV=4),
    "two terms": Case(precise=True),
    "parallel keys": Case(raw=-3.0, parallel=True),
}
ANY = {
    "any gate": Case("softplus", None, HV=4, safe=False, rates=(-3.0, 0.5, 1.5, 3.0)),
    "any gate, given": Case("given", None, raw=-3.6, safe=False),
    "any gate, no removal": Case("softplus", None, removal="none", safe=False, rates=(0.0, 3.0)),
    "any gate, two terms": Case("softplus", None, precise=True, safe=False, rates=(0.0, 3.0)),
    "any gate, none steep": Case("softplus", None, raw=-4.0, safe=False, parallel=True),
}
"""Of the first one, a head of each chunk at least takes each path."""
STEEP_CASES = ANY | {
    "jumps": Case("given", None, raw=-0.01, jump=-700.0, safe=False),
    "jumps of single powers": Case("given", None, raw=-0.01, jump=-20.0, safe=False, HV=4),
    "sigmoid": Case("sigmoid", -40.0, safe=False, norm=False, rates=(-1.0, 1.0)),
    "odd lengths": Case(
        "softplus", None, safe=False, rates=(2.0, 3.0), offsets=(0, 1, 64, 129, 192), H=1
    ),
}
"""Cases for the second kernel of the forward."""


@pytest.fixture(autouse=True)
def in_fp32(monkeypatch):
    """fp32 takes the path of a safe gate: the interpreter's errors are then those of the kernel."""
    monkeypatch.setenv("TRITON_INTERPRET", "1")
    monkeypatch.setattr(bundles, "SAFE_DTYPES", (torch.float32,))
    monkeypatch.setattr(bundles, "TWO_TERMS_BYTES", 4)
    caches = bundles.rule_options, bundles.local_paths, bundles.shape
    for cached in caches:
        cached.cache_clear()
    yield
    for cached in caches:
        cached.cache_clear()


def drawn(case: Case) -> tuple[DeltaRule, Inputs]:
    torch.manual_seed(0)
    T, HV, given = case.offsets[-1], case.HV, case.gate == "given"
    q, k = torch.randn(2, T, case.H, K)
    k = k / 30 + 1 if case.parallel else k
    g = case.raw + torch.randn(T, HV, K) * (0.01 if case.jump else 1.0)
    g[::5] += case.jump
    removes = case.removal == "k"
    rule = DeltaRule(
        scale=K**-0.5,
        gate=case.gate,
        lower_bound=case.bound,
        safe_gate=case.safe,
        qk_l2norm=case.norm,
        beta_factor=1.0 if removes else None,
        removal=case.removal,
        precise=case.precise,
    )
    q, k = (q, k) if case.norm else (q / 10, k / 10)
    A_log = torch.tensor(case.rates) if case.rates else torch.rand(HV)
    rates = (None, None) if given else (A_log, torch.randn(HV * K))
    beta = torch.randn(T, HV) if removes else None
    return rule, Inputs(q, k, torch.randn(T, HV, K), -g.abs() if given else g, beta, *rates, None)


def bounds(offsets: tuple[int, ...]) -> list[tuple[int, int]]:
    """The first token of each chunk, and the token after its last."""
    return [
        (a, min(a + 64, end)) for begin, end in pairwise(offsets) for a in range(begin, end, 64)
    ]


def chunk(x: torch.Tensor) -> torch.Tensor:
    """x [n, H, D] as [H, 64, D], zero beyond its rows."""
    return torch.nn.functional.pad(x.transpose(0, 1), (0, 0, 0, 64 - len(x)))


def defined(
    rule: DeltaRule, x: Inputs, offsets: tuple[int, ...] = OFFSETS
) -> dict[str, torch.Tensor]:
    """What the stage forms, by its definition, in fp64; [chunks, heads, ..]."""
    x = Inputs(*(None if t is None else t.double() for t in x))
    log_decay = x.g
    if rule.gate != "given":
        raw, rate = x.g + x.dt_bias.view(-1, K), x.A_log.exp()[:, None]
        softplus = torch.nn.functional.softplus(raw)
        sigmoid = (rate * raw).sigmoid()
        log_decay = -rate * softplus if rule.gate == "softplus" else rule.lower_bound * sigmoid
    q, k = (t.repeat_interleave(x.v.shape[1] // t.shape[1], 1) for t in (x.q, x.k))
    if rule.qk_l2norm:
        q, k = (t * (t.square().sum(-1, keepdim=True) + 1e-6).rsqrt() for t in (q, k))
    beta = torch.ones_like(q[..., 0]) if x.beta is None else x.beta.sigmoid()
    given = (q * rule.scale, k, log_decay, beta[..., None])
    chunks = [[chunk(t[a:b]) for t in given] for a, b in bounds(offsets)]
    q, k, log_decay, beta = (torch.stack(t) for t in zip(*chunks, strict=True))
    beta = beta[..., 0]
    gc = log_decay.cumsum(-2)
    below = torch.ones(64, 64, dtype=torch.bool).tril()
    weight = (gc[..., :, None, :] - gc[..., None, :, :]).masked_fill(~below[..., None], 0).exp()
    scores = lambda rows: (rows[..., :, None, :] * k[..., None, :, :] * weight).sum(-1)  # noqa: E731
    Akk = beta[..., None] * scores(k).tril(-1)
    return {
        "Aqk": scores(q).tril(),
        "T": torch.linalg.inv(torch.eye(64) + Akk),
        "decay": gc[..., -1, :].exp(),
        "anchors": gc[..., 15::16, :] / torch.log(torch.tensor(2.0, dtype=torch.float64)),
        "qg": q * gc.exp(),
        "k_decayed": k * gc.exp(),
        "kg": k * (gc[..., -1:, :] - gc).exp(),
        "beta": beta,
    }


def formed(c: Chunks) -> dict[str, torch.Tensor]:
    found = {n: getattr(c, n) for n in ("Aqk", "T", "decay", "anchors", "qg", "k_decayed", "kg")}
    for n in ("Aqk", "T"):
        terms = found[n].shape[-2] // 64 if found[n].numel() else 1
        found[n] = found[n].unflatten(-2, (terms, 64)).sum(-3) if terms > 1 else found[n]
    return found | {"beta": c.rows[:, :, 0]}


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


def test_all_chunks_are_left_to_the_kernel_of_steep_chunks():
    """Where it runs alone, it writes what belongs to the chunks that it marks, and nothing else."""
    rule, x = drawn(ANY["any gate"])
    with interpreted():
        c = intra(rule, Packing.build(OFFSETS), x, STEEP_FORCED)
        table, x, alone = empty_chunks(rule, Packing.build(OFFSETS), x, STEEP_FORCED)
        parts = "T", "Aqk", "qg", "k_decayed", "kg", "rows"
        for part in parts:
            getattr(alone, part).fill_(7.0)
        alone = alone._replace(anchors=c.anchors)
        R = bundles.rule_options(rule, torch.float32)
        intra_channelwise_steep.intra_channel(table, x, alone, STEEP, R)
    steep = c.steep.bool()
    assert torch.equal(alone.steep, c.steep) and steep.any() and not steep.all()
    for part in parts:
        assert torch.equal(getattr(alone, part)[steep], getattr(c, part)[steep]), part
        assert (getattr(alone, part)[~steep] == 7.0).all(), part


def gradients(case: Case, dtype: torch.dtype, impl: str) -> dict[str, torch.Tensor]:
    """o and the gradients of a public call on what `drawn` gives."""
    rule, x = drawn(case)
    names = ("q", "k", "v", "g", "beta", "A_log", "dt_bias")
    given = {n: t for n, t in zip(names, x, strict=False) if t is not None}
    given = {
        n: (t if t.ndim == 1 else t[None]).to(dtype).requires_grad_() for n, t in given.items()
    }
    options = {"lower_bound": case.bound} if case.gate == "sigmoid" else {}
    options |= {"safe_gate": case.safe}
    if case.removal == "k":
        options |= {"use_beta_sigmoid_in_kernel": True}
    operator = fla_cp.chunk_kda if case.removal == "k" else fla_cp.chunk_gla
    o = operator(
        **given,
        **options,
        scale=rule.scale,
        use_gate_in_kernel=case.gate != "given",
        use_qk_l2norm_in_kernel=case.norm,
        cu_seqlens=torch.tensor(case.offsets),
        precision="high" if case.precise else "default",
        impl=impl,
    )[0]
    do = torch.sin(torch.arange(o.numel(), dtype=torch.float64)).view(o.shape).to(dtype)
    found = torch.autograd.grad(o, list(given.values()), do)
    return {"o": o.detach()} | {f"d{n}": d for n, d in zip(given, found, strict=True)}


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
    _, x, c = empty_chunks(rule, Packing.build(OFFSETS), x, STEEP_FORCED)
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
@pytest.mark.parametrize(
    "tile, strongest", [(TALL_BWD, 0.3), (QUARTERS_BWD, 0.3), (QUARTERS_BWD, 14.0)], ids=str
)
def test_what_pairs_of_tokens_add_to_the_decays_cancels(monkeypatch, tile, strongest):
    """A pair adds to the gradient of gc at its row what it subtracts at its column, so without
    states nothing is left for the first token's decay, however operands are rounded to bf16."""
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
            y=empty(64, K),
            rows=c.rows,
            decay=c.decay,
            anchors=c.anchors,
            steep=None,
        )
        R = bundles.rule_options(rule, torch.bfloat16)
        table = tables(packing, q.device)
        intra_channelwise_bwd.safe_bwd(table, x, c, read, out, tile, R)
    assert out.dg[0].abs().max() <= 1e-4 * out.dg.abs().max()


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
    _, x, c = empty_chunks(rule, Packing.build(OFFSETS), x, Tuning())
    paths = bundles.local_paths(rule, torch.float32)
    read = saved(x, c, (x.v, x.v), ScanGrads(x.v, x.v, x.v))
    taken = name in TAKEN and change in ("", "V")
    assert intra_channelwise.takes(x, c, paths) == taken
    assert intra_channelwise_bwd.takes(x, c, read, paths) == (taken and change != "V")


@pytest.mark.filterwarnings("ignore:.*encountered in:RuntimeWarning")
def test_a_call_of_any_gate_takes_the_kernels_by_itself(monkeypatch):
    """The backward, too; with enough chunks and heads for kernels without descriptors."""
    monkeypatch.setattr(eligible, "supports", lambda c, *rows: True)
    case = ANY["any gate, given"]._replace(offsets=(0, 33), H=1)
    for least, kernels in ((2, set()), (1, {"intra_sm90_kernel", "safe_bwd_any_sm90_kernel"})):
        with interpreted() as launched, tuned(min_chunk_heads=2**30, min_local_chunk_heads=least):
            gradients(case, torch.float32, "triton")
        assert set(launched) == kernels
