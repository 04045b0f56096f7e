"""The Gluon backward with a reference for each quarter of a chunk, interpreted, against fp64.

Without it, decays of more than 2^100 over 16 rows are left to another kernel; with it, those of
more than 2^200 are.
"""

import pytest
import torch

pytest.importorskip("triton")

from fla_cp.kernels.sm90 import intra_channelwise_bwd_any
from fla_cp.kernels.triton.device import bundles
from fla_cp.kernels.triton.intra import intra
from fla_cp.kernels.triton.tile_table import QUARTERS_BWD, STEEP, TALL, TALL_BWD, Tuning
from fla_cp.partition.packing import Packing
from tests.support.channelwise import ANY, CASES, Case, defined, drawn, fp32_as_bf16, gradients
from tests.support.closeness import assert_within_budget
from tests.support.gluon_interpreter import interpreted
from tests.support.tuned import tuned

FORWARD = (("intra", TALL), ("intra_any", STEEP))
ODD = (0, 1, 64, 129, 192)
STRONG = {
    "between the limits": Case("given", None, raw=-6.5, safe=False, offsets=(0, 40, 110), H=1),
    "between, groups": Case("given", None, raw=-6.5, safe=False, offsets=(0, 70), H=2, HV=4),
    "jumps": Case("given", None, raw=-0.01, jump=-34.0, safe=False, offsets=ODD, H=1),
    "no removal": Case("given", None, raw=-6.5, removal="none", safe=False, offsets=(0, 100)),
    "no norms": Case("given", None, raw=-6.5, norm=False, safe=False, offsets=(0, 100)),
    "softplus": Case(
        "softplus", None, safe=False, rates=(-3.0, 0.7, 2.2), offsets=(0, 30), H=1, HV=3
    ),
    "sigmoid": Case("sigmoid", -12.0, safe=False, rates=(0.0, 1.0), offsets=(0, 70)),
}
"""Decays that only references of quarters serve, but for the steepest of "softplus"."""
MIXED = {"any gate": ANY["any gate"], "given": ANY["any gate, given"]}


@pytest.fixture(autouse=True)
def in_fp32(monkeypatch):
    yield from fp32_as_bf16(monkeypatch)


def marks_and_exact(case: Case) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """The forward's marks, the backward's, and the largest decay over a quarter by fp64, of each
    chunk and head."""
    rule, x = drawn(case)
    with interpreted():
        c = intra(rule, Packing.build(case.offsets), x, Tuning(forced=FORWARD))
        read = bundles.Saved(*(None,) * len(bundles.Saved._fields))._replace(steep=c.steep)
        assert intra_channelwise_bwd_any.marked(read, c, TALL_BWD).steep is c.steep
        marks = intra_channelwise_bwd_any.marked(read, c, QUARTERS_BWD).steep
    anchors = defined(rule, x, case.offsets)["anchors"]
    whole = torch.cat([torch.zeros_like(anchors[:, :, :1]), anchors], 2)
    return c.steep, marks, whole.diff(dim=2).abs().amax((-1, -2))


@pytest.mark.filterwarnings("ignore:.*encountered in:RuntimeWarning")
@pytest.mark.parametrize("name", [*STRONG, *MIXED])
def test_chunks_are_marked_that_decay_by_more_than_twice_as_many_powers(name):
    steep, marks, largest = marks_and_exact((STRONG | MIXED)[name])
    assert torch.equal(steep.bool(), largest > 100) and torch.equal(marks.bool(), largest > 200)
    assert marks.dtype == torch.int32 and (steep > marks).any()
    if name in ("any gate", "softplus"):  # all kernels have some
        assert marks.any() and not steep.all()


@pytest.mark.filterwarnings("ignore:.*encountered in:RuntimeWarning")
@pytest.mark.parametrize(
    "name",
    [
        pytest.param(n, marks=() if n in ("jumps", "softplus") else pytest.mark.wide)
        for n in (*STRONG, "drawn decays", "two groups", "strongest decays", "parallel keys")
    ],
)
def test_gradients_err_like_those_of_the_torch_stages(name):
    case = (CASES | STRONG)[name]
    exact = gradients(case, torch.float64, "torch")
    plain = gradients(case, torch.float32, "torch")
    with interpreted() as launched, tuned(forced=(*FORWARD, ("intra_bwd", QUARTERS_BWD))):
        found = gradients(case, torch.float32, "triton")
    kernels = {"safe_bwd_sm90_kernel"} if case.safe else {"safe_bwd_any_sm90_kernel"}
    kernels |= set() if case.safe else {"mark_sm90_kernel"}
    assert kernels <= set(launched)
    for part, value in found.items():
        if exact[part].abs().max() < 1e-20:  # a gate at its bound, whose slope underflows
            assert value.abs().max() < 1e-20, part
            continue
        assert_within_budget(part, value, exact[part], plain[part], factor=4.0, shift=2e-5)
