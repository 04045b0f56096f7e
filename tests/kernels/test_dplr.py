"""The Triton kernels with a decay a channel in which p reads the state, in Triton's interpreter.

Only DPLR and RWKV-7 have it. As in test_kernels.py, fp32 takes the paths of bf16 too, and inputs
are fp32.
"""

import dataclasses
import math

import pytest
import torch

pytest.importorskip("triton")  # interpreted: conftest.py

import fla_cp
from benchmarks.tune import cut_into
from fla_cp.comm.carry import States
from fla_cp.kernels import TORCH
from fla_cp.kernels.torch.intra import Inputs, Spec
from fla_cp.kernels.torch.intra import intra as intra_in_torch
from fla_cp.kernels.triton import launch as launches
from fla_cp.kernels.triton.backend import TRITON
from fla_cp.kernels.triton.device import bundles
from fla_cp.kernels.triton.intra import intra
from fla_cp.kernels.triton.intra_channelwise import gated_operands
from fla_cp.ops.family import spread
from fla_cp.ops.options import Tensors
from fla_cp.partition.packing import Packing
from fla_cp.reference import recurrence
from fla_cp.rule import DeltaRule
from tests.support.closeness import assert_within_budget
from tests.support.members import BY_NAME, Call, collect, draw, operator, oracle, run
from tests.support.sweeps import crossed

# products of pairs that are masked away later may overflow; numpy warns of it
pytestmark = [
    pytest.mark.filterwarnings(f"ignore:{what}:RuntimeWarning")
    for what in ("overflow encountered", "invalid value encountered")
]

DPLR = BY_NAME["dplr_delta_rule"]
SMALL = Call(T=35, H=1, HV=2, K=16, V=16)
SAFE = (("safe_gate", True),)
CALLS = {
    "one token": dataclasses.replace(SMALL, T=1),
    "33 tokens": dataclasses.replace(SMALL, T=33, states=False),
    "packed": dataclasses.replace(SMALL, T=100, cu=(0, 0, 1, 33, 100)),
    "two key tiles": dataclasses.replace(SMALL, K=40, V=24, HV=3),
    "slow": dataclasses.replace(SMALL, decay=1e-3),
    "none": dataclasses.replace(SMALL, decay=0.0),
    "strong": dataclasses.replace(SMALL, decay=40.0),
    "safe": dataclasses.replace(SMALL, decay=2.0, options=SAFE),
    "exp": dataclasses.replace(SMALL, options=(("use_exp2", False), ("scale", 0.5))),
    "safe exp": dataclasses.replace(SMALL, options=(("use_exp2", False), *SAFE)),
    "kept": dataclasses.replace(SMALL, options=(("disable_recompute", True),)),
    "inside": dataclasses.replace(SMALL, inside=True),
}


@pytest.fixture(autouse=True)
def interpreted(monkeypatch):
    """Lets kernels run on CPU tensors, in this module only, and fp32 take the path of bf16."""
    monkeypatch.setenv("TRITON_INTERPRET", "1")
    take_both_paths(monkeypatch, torch.float32, torch.bfloat16)
    yield
    forget_paths()


def take_both_paths(monkeypatch, *dtypes):
    """Lets these dtypes take the path of a safe gate."""
    monkeypatch.setattr(bundles, "SAFE_DTYPES", dtypes)
    forget_paths()


def forget_paths():
    for remembered in (bundles.rule_options, bundles.local_paths):
        remembered.cache_clear()


def compare(actual, exact, plain, safe=False):
    """Against the torch stages. A safe path takes decays from differences of sums in fp32, of at
    most 64 * 5 / ln 2."""
    for name, value in actual.items():
        if name in ("dA_log", "ddt_bias"):  # sums over tokens: their terms round, not the result
            error = (value.double() - exact[name]).abs().max()
            assert error <= 64 * torch.finfo(value.dtype).eps * exact["dgk"].abs().sum(), name
        else:
            shift = 462 * 2**-24 if safe else 0.0
            assert_within_budget(name, value, exact[name], plain[name], factor=4.0, shift=shift)


@pytest.mark.parametrize("call, both", crossed(CALLS, [True, False]))
def test_kernels_err_like_the_torch_stages(call, both, monkeypatch):
    if not both:
        take_both_paths(monkeypatch)
    call = CALLS[call]
    exact, plain = oracle(DPLR, call, torch.float32), run(DPLR, call, torch.float32)
    found = run(DPLR, call, torch.float32, "triton")
    compare(found, exact, plain, both and SAFE[0] in call.options)


def test_nearly_parallel_keys():
    """b takes away nearly all of what a reads, and all keys are nearly one."""
    x, keywords, weights = draw(DPLR, dataclasses.replace(SMALL, decay=1e-2))
    for name in ("k", "a"):
        x[name] = torch.nn.functional.normalize(x["k"][:, :1] + 0.03 * x[name], dim=-1)
    x["b"] = -0.98 * x["a"]
    single = {n: t.float() for n, t in x.items()}
    wide = {n: t.double() for n, t in single.items()}
    exact, plain, found = (
        collect(lambda y, i=impl: operator(DPLR, "chunk", y, **keywords, impl=i), given, weights)
        for impl, given in (("torch", wide), ("torch", single), ("triton", single))
    )
    compare(found, exact, plain)


def test_each_chunk_takes_the_path_that_its_decays_allow():
    """A token has two rows, of which one decays: 16 rows are 8 tokens."""
    call = dataclasses.replace(SMALL, T=96, K=24)
    bound = 100 * math.log(2)
    x, _, weights = draw(DPLR, call, torch.float32)
    g = x["gk"].fill_(-0.1)
    g[0, :32, 0] = -0.99 * bound / 8
    g[0, 32:64, 1] = -1.01 * bound / 8
    g[0, 32 + 10, 0, 7] = -bound  # one channel of one token
    g[0, 90, 1, 23] = -4 * bound

    def by(impl, dtype):
        given = {n: t.to(dtype) for n, t in x.items()}
        return collect(lambda y: operator(DPLR, "chunk", y, impl=impl), given, weights)

    compare(by("triton", torch.float32), by("torch", torch.float64), by("torch", torch.float32))
    chunks = intra(*as_rows(x))
    assert chunks.steep.tolist() == [[0, 0], [1, 1], [0, 1]]


def as_rows(x, **rule):
    """The rule, packing and inputs of the stages, of a call in fp32."""
    rule = DeltaRule(scale=0.3, removal="p", **rule)
    x = Tensors(*(x[n] for n in ("q", "k", "v", "gk")), None, x["a"], x["b"])
    x = spread(TORCH, rule, x, (None, None), 2)
    inputs = Inputs(x.q[0], x.k[0], x.v[0], x.g[0], None, None, None, x.p[0])
    return rule, Packing.build((0, len(inputs.q))), inputs


@pytest.mark.parametrize("safe", [False, True])
def test_stages_of_any_rows(safe):
    """Not only of those of DPLR: every row reads, writes and decays, and has a beta."""
    T, H, HV, K, V = 130, 1, 2, 24, 16
    gen = torch.Generator().manual_seed(0)

    def randn(*shape):
        return torch.randn(*shape, generator=gen)

    q, k, p = randn(3, T, H, K)
    k, p = (torch.nn.functional.normalize(t, dim=-1) for t in (k, p))
    g, beta = -randn(T, HV, K).abs(), randn(T, HV).sigmoid()
    x = Inputs(q, k, randn(T, HV, V), g, beta, None, None, p)
    bound = {"safe_gate": True, "lower_bound": -5.0} if safe else {}
    spec = Spec(DeltaRule(scale=0.3, removal="p", **bound), Packing.build((0, 70, 70, T)))
    do, dS = randn(T, HV, V), randn(len(spec.packing.segments), HV, K, V)

    def both_ways(backend, x, dtype):
        x = Inputs(*(None if t is None else t.to(dtype) for t in x))
        chunks, _ = backend.prepare_chunks(spec, x, None)
        chunks = backend.scores(spec, chunks)
        o, h, v_new, S_end = backend.scan_output(
            spec, chunks, None, want_states=True, want_end=True
        )
        kept = backend.keep(spec, chunks, h, v_new)
        chunks, _ = backend.restore(spec, x, kept, o)
        dout = backend.output_bwd(spec, chunks, do.to(dtype))
        states = backend.scan(spec, chunks, None)()
        dS_end = States(spec.packing.ending, dS.to(dtype))
        dscan, _ = backend.scan_bwd(spec, x, dout, dS_end, want_start=False, concurrent=False)
        grads = backend.intra_bwd(spec, x, chunks, states, dscan)
        named = {f"d{n}": t for n, t in zip(grads._fields, grads, strict=True) if t is not None}
        return {"o": o, "S_end": S_end} | named

    exact = both_ways(TORCH, x, torch.float64)
    assert exact.keys() == {"o", "S_end", "dq", "dk", "dv", "dg", "dbeta", "dp"}
    compare(both_ways(TRITON, x, torch.float32), exact, both_ways(TORCH, x, torch.float32), safe)


@pytest.mark.parametrize("bound", [{}, {"safe_gate": True, "lower_bound": -5.0}])
def test_recomputed_gated_operands_are_the_forwards(bound):
    x, _, _ = draw(DPLR, dataclasses.replace(SMALL, K=24), torch.float32)
    rule, packing, inputs = as_rows(x, **bound)
    c = intra(rule, packing, inputs)
    again = gated_operands(rule, packing, inputs, c.rows, c.anchors)
    exact = intra_in_torch(Spec(rule, packing), inputs)
    decayed = exact.p * torch.exp2(torch.nn.functional.pad(exact.gc[..., :-1, :], (0, 0, 1, 0)))
    for found, kept in zip(again, (c.qg, c.k_decayed, c.kg), strict=True):
        assert (found - kept).abs().max() <= 3e-5 * kept.abs().max()
    assert (c.k_decayed - decayed).abs().max() <= 3e-5 * decayed.abs().max()


@pytest.mark.parametrize("g", [-300.0, -1e6, -1e30])
def test_a_token_that_forgets_everything(g):
    """Its own decay must not show in what p of the next token reads."""
    x, _, weights = draw(DPLR, SMALL, torch.float32)
    x["gk"] = 0.01 * x["gk"]
    x["gk"][:, 5] = g
    x["gk"][:, 20, :, 3] = g
    wide = {n: t.double() for n, t in x.items()}
    exact = collect(  # in chunks even fp64 loses its digits beside 1e30
        lambda y: recurrence(**{"g" if n == "gk" else n: t for n, t in y.items()}), wide, weights
    )
    found = collect(lambda y: operator(DPLR, "chunk", y, impl="triton"), x, weights)
    for name, value in found.items():
        assert value.isfinite().all()
        assert (value - exact[name]).abs().max() <= 2e-5 * exact[name].abs().max(), name


def test_scans_are_those_of_kda(monkeypatch):
    """They read p only as k_decayed, so no kernel of theirs is compiled for it."""
    seen = []

    def watch(kernel, grid, *given, **named):
        seen.extend(t for t in (*given, *named.values()) if isinstance(t, bundles.Shape))
        kernel[grid](*given, **named)

    monkeypatch.setattr(launches, "runner", watch)
    run(DPLR, SMALL, torch.float32, "triton")
    by_kernel = {s.REMOVAL for s in seen if s.BV}
    assert {s.REMOVAL for s in seen} == {"k", "p"} and "k" in by_kernel


def test_norms_of_p_are_refused():
    """No operator has them with a decay a channel."""
    x, _, _ = draw(DPLR, dataclasses.replace(SMALL, T=3), torch.float32)
    rule, packing, inputs = as_rows(x, qk_l2norm=True)
    with pytest.raises(ValueError, match="removal='p' with a decay a channel for given q, k and p"):
        TRITON.prepare_chunks(Spec(rule, packing), inputs, None)


def test_rwkv7_in_segments_with_a_safe_gate():
    """With the gate inside, as its layers call it."""
    x, _, weights = draw(DPLR, dataclasses.replace(SMALL, T=100), torch.float32)
    x = {{"q": "r", "gk": "w"}.get(n, n): t for n, t in x.items()}
    bound = {"use_gate_in_kernel": True, "safe_gate": True, "lower_bound": -math.exp(-0.5)}

    def by(impl, dtype):
        given = {n: t.to(dtype) for n, t in x.items()}
        return collect(
            lambda y: fla_cp.chunk_rwkv7(**y, **bound, output_final_state=True, impl=impl),
            given,
            weights,
        )

    with cut_into(1):
        found = by("triton", torch.float32)
    exact, plain = by("torch", torch.float64), by("torch", torch.float32)
    compare(found, exact, plain, safe=True)
