"""Calls of the channelwise local stage: their inputs, and the results in fp64."""

from collections.abc import Iterator
from itertools import pairwise
from typing import NamedTuple

import pytest
import torch

import fla_cp
from fla_cp.kernels.torch.intra import Inputs
from fla_cp.kernels.triton.device import bundles
from fla_cp.rule import DeltaRule

K = 128
OFFSETS = 0, 40, 150


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


def fp32_as_bf16(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """For a fixture: fp32 takes the path of a safe gate. The interpreter's errors are then those of
    the kernel."""
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
