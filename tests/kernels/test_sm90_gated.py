"""The Gluon scans that gate q, k and g themselves, interpreted, against fp64.

tests/aot compiles the kernels, and tests/gpu runs them.
"""

from contextlib import nullcontext
from dataclasses import replace

import pytest
import torch

pytest.importorskip("triton")

import fla_cp
from fla_cp import build_cp_context, custom_op_cp
from fla_cp.kernels import resolve
from fla_cp.kernels.torch.intra import Spec
from fla_cp.kernels.triton import backend as stages
from fla_cp.kernels.triton import scan_gated
from fla_cp.kernels.triton.intra import empty_chunks, intra
from fla_cp.kernels.triton.tile_table import IN_SCANS, STEEP, TALL, TALL_BWD, Tuning
from fla_cp.partition.packing import Packing
from tests.support.channelwise import ANY, CASES, Case, drawn, fp32_as_bf16, gradients
from tests.support.closeness import assert_within_budget
from tests.support.gluon_interpreter import interpreted
from tests.support.tuned import tuned, variant

LOCAL = (("intra", TALL), ("intra_any", STEEP), ("intra_bwd", TALL_BWD))
FORCED = (("gated", IN_SCANS), *LOCAL)
GATED = {"scan_gated_sm90_kernel", "scan_bwd_gated_sm90_kernel"}
EIGHT_CHUNKS = Case(offsets=(0, 450, 480), H=1, HV=1)
MORE = {
    "every place again": EIGHT_CHUNKS,
    "single rows": Case(offsets=(0, 1, 64, 129, 192), H=1),
    "bounded": Case("sigmoid", -12.0, safe=False, rates=(0.0, 1.0), offsets=(0, 21, 70)),
    "weak, given": Case("given", None, raw=-0.5, safe=False, norm=False, offsets=(0, 21, 70)),
}
TAKEN = {n: c for n, c in (CASES | ANY | MORE).items() if not c.precise and n != "softplus"}
"""With any gate, Triton's interpreter takes seconds for each steep chunk of the local backward."""
FAST = ("drawn decays", "strongest decays", "no removal", "two groups", *MORE)


@pytest.fixture
def in_fp32(monkeypatch):
    yield from fp32_as_bf16(monkeypatch)


@pytest.fixture
def no_pass(monkeypatch):
    """Nothing may form the gated operands of a backward."""
    monkeypatch.setattr(stages, "gated_operands", None)


@pytest.mark.usefixtures("in_fp32", "no_pass")
@pytest.mark.filterwarnings("ignore:.*encountered in:RuntimeWarning")
@pytest.mark.parametrize(
    "name", [pytest.param(n, marks=() if n in FAST else pytest.mark.wide) for n in TAKEN]
)
def test_gradients_err_like_those_of_the_torch_stages(name):
    case = TAKEN[name]
    exact = gradients(case, torch.float64, "torch")
    plain = gradients(case, torch.float32, "torch")
    with interpreted() as launched, tuned(gluon=True, forced=FORCED):
        found = gradients(case, torch.float32, "triton")
    assert set(launched) >= GATED and "scan_bwd_sm90_kernel" not in launched
    for part, value in found.items():
        if exact[part].abs().max() < 1e-20:  # a gate at its bound, whose slope underflows
            assert value.abs().max() < 1e-20, part
            continue
        error, terms = (value.double() - exact[part]).abs().max(), exact["dg"].abs().sum()
        if part == "dA_log" and error <= 4 * torch.finfo(value.dtype).eps * terms:
            continue  # a sum over all tokens, which cancels: its terms round
        assert_within_budget(part, value, exact[part], plain[part], factor=4.0, shift=2e-5)


@pytest.mark.usefixtures("in_fp32", "no_pass")
@pytest.mark.parametrize("cut", [True, False])
def test_states_and_summaries(cut):
    """A call with states, also cut in segments of one chunk, whose summaries gate as well."""
    from benchmarks.tune import cut_into
    from tests.support.members import BY_NAME, Call, collect, draw, operator

    member = BY_NAME["kda"]
    options = (("safe_gate", True), ("lower_bound", -5.0))
    x, keywords, weights = draw(member, Call(T=150, HV=2, K=128, V=128, inside=True))
    keywords |= dict(options)

    def run(x, impl):
        return collect(lambda y: operator(member, "chunk", y, **keywords, impl=impl), x, weights)

    exact = run({n: t.double() for n, t in x.items()}, "torch")
    x = {n: t.float() for n, t in x.items()}
    plain = run(x, "torch")
    segments = cut_into(1) if cut else nullcontext()
    with interpreted() as launched, tuned(gluon=True, forced=FORCED), segments:
        found = run(x, "triton")
    assert set(launched) >= GATED
    states, back = (launched.count(n) for n in sorted(GATED, reverse=True))  # programs
    assert (back > states) == cut
    for name, value in found.items():
        assert_within_budget(name, value, exact[name], plain[name], factor=4.0, shift=2e-5)


def scanned(case: Case, *, again: bool, change=None) -> dict[str, torch.Tensor]:
    """What both scans of a backward write, in bf16. again: on q, k and g; otherwise on what the
    forward formed of them."""
    rule, x = drawn(case)
    x = x._replace(**{n: getattr(x, n).bfloat16() for n in ("q", "k", "v", "g", "beta")})
    if change is not None:
        change(x)
    backend = variant(gluon=True, forced=FORCED)
    spec = Spec(rule, Packing.build(case.offsets))
    do = torch.sin(torch.arange(x.v.numel())).view(x.v.shape).bfloat16()
    with interpreted():
        c = intra(rule, spec.packing, x, backend.tuning)
        if again:
            c, _ = backend.restore(spec, x, backend.keep(spec, c, None, None), None)
        c = c._replace(o=do)  # not read here
        h, v_new = replace(backend, one_stream=True).scan(spec, c, None)()
        dscan, dS0 = backend.scan_bwd(
            spec, x, backend.output_bwd(spec, c, do), None, want_start=True, concurrent=False
        )
    assert dscan.y is None
    return {"h": h, "v_new": v_new, "dv": dscan.dv, "dh": dscan.dh, "dS0": dS0}


def test_bf16_operands_are_those_of_the_forward(monkeypatch):
    """Up to what one rounding of a few of them changes."""
    monkeypatch.setenv("TRITON_INTERPRET", "1")
    case = Case(offsets=(0, 100, 230), H=1)
    usual, found = scanned(case, again=False), scanned(case, again=True)
    for name, value in usual.items():
        error = (found[name].double() - value.double()).norm() / value.double().norm()
        assert error <= 2e-3, (name, float(error))


def test_rows_of_another_sequence_change_nothing(monkeypatch):
    """Whatever they are, if they are finite."""
    monkeypatch.setenv("TRITON_INTERPRET", "1")
    case = Case(offsets=(0, 100, 130), H=1)

    def strange(x):
        for t in (x.q, x.k, x.g):
            t[100:] = 3e38

    usual, found = scanned(case, again=True), scanned(case, again=True, change=strange)
    for name, value in usual.items():
        rows = {"dS0": 1, "dv": 100}.get(name, 2)  # of the first sequence, which has 2 chunks
        assert torch.equal(found[name][:rows], value[:rows]), name


def raw_chunks(case: Case, tuning: Tuning, **changed):
    """`scan_gated.on_inputs` of a drawn call in bf16, with other inputs or another rule."""
    rule, x = drawn(case)
    x = x._replace(**{n: getattr(x, n).bfloat16() for n in ("q", "k", "v", "g")})
    rule = rule._replace(**{n: t for n, t in changed.items() if n in rule._fields})
    x = x._replace(**{n: t for n, t in changed.items() if n in x._fields})
    packing = Packing.build(case.offsets)
    x, c = empty_chunks(rule, packing, x, tuning)
    return scan_gated.on_inputs(packing, x, c)


SM90 = Tuning(min_chunk_heads=0, architecture=90)
TILE = replace(SM90, forced=FORCED)


def test_calls_that_are_large_enough_take_them():
    c = raw_chunks(Case(), SM90)
    assert c.gating.folder == "sm90" and c.qg.shape == c.kg.shape == c.k_decayed.shape
    assert raw_chunks(Case(), replace(SM90, min_chunk_heads=100)) is None


def test_a_tile_of_triton_may_be_forced():
    tile = SM90.tile("gated", 128, 128, torch.bfloat16)
    assert tile.folder == "triton"
    assert raw_chunks(Case(), replace(SM90, forced=(("gated", tile),))) is None


@pytest.mark.usefixtures("in_fp32", "no_pass")
@pytest.mark.filterwarnings("ignore:.*encountered in:RuntimeWarning")
def test_both_ops_of_a_compiled_backward():
    """On one rank whose two ranges hand states to each other. The first op returns no chunks, since
    its q, k and g would be the inputs themselves, which no op may return."""
    rule, x = drawn(Case())
    tokens = len(x.q)
    context = build_cp_context(
        torch.tensor([0, 20, tokens]), None, token_ranges=[[(90, tokens), (0, 90)]]
    )
    do = torch.sin(torch.arange(x.v.numel())).view(x.v.shape)

    def gradients(dtype, impl):
        rows = [None if t is None else t.to(dtype) for t in (*x, None)]
        shared = (*rows, *rule, impl, *context.handle, 1)
        wire, offset, transition, *chunks = custom_op_cp.begin_op(*shared)
        own = wire[None], offset, transition, chunks, False, False
        o, _, _, carried, *_ = custom_op_cp.finish_op(*shared, *own)
        chunks = [chunks[i] for i in resolve(impl, o.device, dtype).always_kept(rule)]
        given = do.to(dtype), None, *shared, o, [carried, transition, *chunks]
        wire, offset, *chunks = custom_op_cp.begin_backward_op(*given)
        assert bool(chunks) == (impl == "torch")
        return custom_op_cp.finish_backward_op(*given, wire[None], offset, chunks, False)

    exact, plain = gradients(torch.float64, "torch"), gradients(torch.float32, "torch")
    with interpreted() as launched, tuned(gluon=True, forced=FORCED):
        found = gradients(torch.float32, "triton")
    assert set(launched) >= GATED
    for i, value in enumerate(found):
        if value.numel():
            named = f"gradient {i}", value, exact[i], plain[i]
            assert_within_budget(*named, factor=4.0, shift=2e-5)


@pytest.mark.parametrize("changed, reason", [
    ({"g": torch.zeros(150, 2, 128)}, "same dtype"),
    ({"precise": True}, "two terms"),
    ({"use_exp2": False}, "powers of two"),
    ({"v": torch.zeros(150, 2, 64, dtype=torch.bfloat16)}, "must be 128"),
    ({"k": torch.zeros(150, 2, 132, dtype=torch.bfloat16)[..., :128]}, "the TMA"),
], ids=["fp32 gate", "two terms", "exp", "V", "strides"])  # fmt: skip
def test_other_calls_are_refused(changed, reason):
    with pytest.raises(ValueError, match=reason):
        raw_chunks(Case(), TILE, **changed)


def test_gradients_that_the_tma_cannot_read_are_copied():
    c = raw_chunks(Case(), TILE)
    do = torch.ones(1, 1, 1, dtype=torch.bfloat16).expand(150, 2, 128)
    copy = scan_gated.readable(c, do)
    assert copy.is_contiguous() and torch.equal(copy, do)
    assert scan_gated.readable(c, copy) is copy
    assert scan_gated.readable(c._replace(gating=None), do) is do


def test_dv_is_not_rounded_before_beta(monkeypatch):
    """With decays that leave T little more than its diagonal, y is what its product's operand is,
    and dv would err by 2.9e-3 if that was rounded first."""
    monkeypatch.setenv("TRITON_INTERPRET", "1")
    x = drawn(Case(raw=30.0, offsets=(0, 128), H=1, HV=1))[1]
    given = [t[None].bfloat16() for t in x[:5]]

    def dv(dtype, impl):
        y = [t.to(dtype).requires_grad_() for t in given]
        rates = (t.to(torch.promote_types(dtype, torch.float32)) for t in x[5:7])
        gates = dict(zip(("A_log", "dt_bias"), rates, strict=True))
        options = {"lower_bound": -5.0, "safe_gate": True, "use_gate_in_kernel": True}
        options |= {"use_qk_l2norm_in_kernel": True, "use_beta_sigmoid_in_kernel": True}
        o, _ = fla_cp.chunk_kda(*y, **gates, **options, impl=impl)
        do = torch.sin(torch.arange(o.numel())).view(o.shape).bfloat16()
        return torch.autograd.grad(o, y[2], do.to(dtype))[0]

    exact = dv(torch.float64, "torch")
    with interpreted() as launched, tuned(gluon=True, forced=FORCED):
        found = dv(torch.bfloat16, "triton")
    assert "scan_bwd_gated_sm90_kernel" in launched
    assert (found.double() - exact).norm() <= 2.6e-3 * exact.norm()
