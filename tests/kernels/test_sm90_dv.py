"""Which calls with one decay a channel have dv in the place of y, and their gradients.

The Gluon kernels are interpreted. tests/aot compiles them, and tests/gpu runs them.
"""

import pytest
import torch

pytest.importorskip("triton")

import fla_cp
from benchmarks.tune import GATED_BEFORE
from fla_cp.kernels.sm90 import intra_channelwise_bwd_scores, scan_bwd
from fla_cp.kernels.triton import intra, scan_gated
from fla_cp.kernels.triton.backend import TritonBackend
from fla_cp.kernels.triton.operands import ScanGrads
from fla_cp.kernels.triton.tile_table import IN_SCANS, STEEP, TALL, TALL_BWD, Tile, Tuning
from fla_cp.partition.packing import Packing
from tests.support.channelwise import CASES, OFFSETS, Case, drawn, fp32_as_bf16, gradients
from tests.support.closeness import assert_within_budget
from tests.support.gluon_interpreter import interpreted
from tests.support.tuned import tuned

LOCAL = (("intra", TALL), ("intra_any", STEEP), ("intra_bwd", TALL_BWD))
IN_TRITON = Tile(32, 0, 4, 1)
FORCED = {
    "gated in the scans": (("gated", IN_SCANS), *LOCAL),
    "gated before": (("gated", GATED_BEFORE), *LOCAL),
    "chunks in Triton": (("gated", IN_SCANS), ("intra", IN_TRITON), ("intra_bwd", TALL_BWD)),
}


@pytest.fixture(autouse=True)
def in_fp32(monkeypatch):
    yield from fp32_as_bf16(monkeypatch)


@pytest.fixture
def left(monkeypatch) -> list[ScanGrads]:
    """What reverse scans leave."""
    found, run = [], TritonBackend.intra_bwd

    def noted(self, spec, x, chunks, states, dscan):
        found.append(dscan)
        return run(self, spec, x, chunks, states, dscan)

    monkeypatch.setattr(TritonBackend, "intra_bwd", noted)
    return found


@pytest.mark.filterwarnings("ignore:.*encountered in:RuntimeWarning")
@pytest.mark.parametrize("name", ["a group", "two terms", "no removal", "parallel keys"])
def test_gradients_of_other_scans_err_like_those_of_the_torch_stages(name, left):
    """Where the operands are gated before the scans; test_sm90_gated.py has the others."""
    exact = gradients(CASES[name], torch.float64, "torch")
    plain = gradients(CASES[name], torch.float32, "torch")
    with interpreted() as launched, tuned(gluon=True, forced=FORCED["gated before"]):
        found = gradients(CASES[name], torch.float32, "triton")
    assert {"scan_bwd_sm90_kernel", "safe_bwd_sm90_kernel"} <= set(launched)
    assert [x.y for x in left] == [None] and torch.equal(left[0].dv, found["dv"][0])
    for part, value in found.items():
        assert_within_budget(part, value, exact[part], plain[part], factor=4.0, shift=2e-5)


@pytest.mark.filterwarnings("ignore:.*encountered in:RuntimeWarning")
@pytest.mark.parametrize("sigmoid", [False, True])
@pytest.mark.parametrize("name", FORCED)
def test_a_beta_of_zero_has_a_gradient(name, sigmoid, left):
    """dv = beta y would be zero, and the gradient of beta is divided by it. Only the forward of
    sm90/ keeps betas away from zero."""
    torch.manual_seed(0)
    q, k, v = torch.randn(3, 1, 100, 1, 128)
    g, beta = -torch.rand(1, 100, 1, 128), torch.rand(1, 100, 1)
    beta[:, ::3] = -200.0 if sigmoid else 0.0
    beta[:, 1::9] = -30.0 if sigmoid else 1e-12
    options = {"safe_gate": True, "use_qk_l2norm_in_kernel": True}
    options |= {"use_beta_sigmoid_in_kernel": sigmoid, "cu_seqlens": torch.tensor([0, 30, 100])}

    def run(dtype, impl):
        x = [t.to(dtype).requires_grad_() for t in (q, k, v, g, beta)]
        o, _ = fla_cp.chunk_kda(*x, **options, impl=impl)
        return torch.autograd.grad((o * o.detach()).sum(), x)

    exact = run(torch.float64, "torch")
    with interpreted() as launched, tuned(gluon=True, forced=FORCED[name]):
        found = run(torch.float32, "triton")
    in_gluon = name != "chunks in Triton"
    assert ("intra_sm90_kernel" in launched) == in_gluon
    assert [x.y is None for x in left] == [in_gluon] and "safe_bwd_sm90_kernel" in launched
    for part, a, b in zip(("dq", "dk", "dv", "dg", "dbeta"), found, exact, strict=True):
        assert (a - b).norm() <= 1e-4 * b.norm(), part
    if not sigmoid:  # whose slope is zero there
        error = found[-1][:, ::3] - exact[-1][:, ::3]
        assert error.norm() <= 1e-4 * exact[-1][:, ::3].norm()


def test_what_rounding_to_bf16_loses():
    """It is formed without a conversion. Of two numbers that are as near, either may be taken."""
    torch.manual_seed(0)
    x = torch.randn(100000) * torch.randn(100000).mul(8).exp()
    with interpreted():
        found = scan_bwd.lost(x, torch.bfloat16)
    assert torch.equal(found.abs(), (x - x.bfloat16().float()).abs())
    assert torch.equal((x - found).bfloat16().float(), x - found)


Y = {
    "chunks in Triton": (Case(), {"forced": FORCED["chunks in Triton"]}),
    "any gate": (Case(safe=False), {}),
    "scans in Triton": (Case(), {"gluon": None, "min_chunk_heads": 2**30}),
    "reverse scan in Triton": (
        Case(),
        {"forced": (("gated", GATED_BEFORE), ("scan_bwd", Tile(128, 32, 4, 3)))},
    ),
    "scores in Triton": (Case(), {"forced": (("scores_bwd", Tile(0, 64, 4, 1)),)}),
    "local backward in Triton": (Case(), {"forced": (("intra_bwd", Tile(32, 64, 4, 3)),)}),
    "natural exponentials": (Case(), {}),
    "what a kernel refuses": (Case(), {}),
}
"""Calls of which a kernel reads y, or no scan writes dv."""


@pytest.mark.parametrize("name", ["safe", "gated in the scans", "gated before", *Y])
def test_dv_takes_the_place_of_y_only_if_all_kernels_read_it(name, monkeypatch):
    case, changes = Y.get(name, (Case(), {"forced": FORCED.get(name, ())}))
    rule, x = drawn(case)
    if name == "natural exponentials":
        rule = rule._replace(use_exp2=False)
    if name == "what a kernel refuses":
        monkeypatch.setattr(intra_channelwise_bwd_scores, "why_not", lambda *_: "a reason")
    monkeypatch.setattr("fla_cp.kernels.sm90.eligible.possible", lambda *_: True)
    tuning = Tuning(**{"gluon": True, "min_local_chunk_heads": 0} | changes)
    packing = Packing.build(OFFSETS)
    _, c = intra.empty_chunks(rule, packing, x, tuning)
    c = scan_gated.on_inputs(packing, x, c) or c
    c = c._replace(o=x.v)
    assert intra.reads_dv(packing, x, c, x.v, False) == (name not in Y)
