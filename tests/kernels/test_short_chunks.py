"""The Triton kernels with chunks of 16 and 32 tokens, in Triton's interpreter.

As in test_kernels.py, fp32 takes the paths of bf16 too, and inputs are fp32. It also takes short
chunks for short sequences, which only half precision does otherwise.
"""

import dataclasses

import pytest
import torch

pytest.importorskip("triton")  # interpreted: conftest.py

from fla_cp.kernels import Backend, using
from fla_cp.kernels.torch.intra import Inputs
from fla_cp.kernels.triton import operands
from fla_cp.kernels.triton.backend import TRITON, TritonBackend
from fla_cp.kernels.triton.device import bundles
from fla_cp.kernels.triton.device.decay_sums import sums
from fla_cp.kernels.triton.generations import choose
from fla_cp.kernels.triton.intra import empty_chunks
from fla_cp.kernels.triton.tile_table import Tuning
from fla_cp.partition.packing import Packing
from fla_cp.rule import DeltaRule
from tests.support.closeness import assert_within_budget
from tests.support.members import BY_NAME, Call, oracle, run
from tests.support.sweeps import crossed

# products of pairs that are masked away later may overflow; numpy warns of it
pytestmark = [
    pytest.mark.filterwarnings(f"ignore:{what}:RuntimeWarning")
    for what in ("overflow encountered", "invalid value encountered")
]

OFFSETS = {16: (0, 0, 1, 16, 32, 45, 52, 60), 32: (0, 17, 17, 49, 50, 81, 97)}
SMALL = Call(H=1, HV=2, K=24, V=16)
SAFE = (("safe_gate", True), ("lower_bound", -5.0))
CALLS = {
    "given": SMALL,
    "inside": dataclasses.replace(SMALL, inside=True),
    "strong": dataclasses.replace(SMALL, decay=40.0),
    "exp, kept": dataclasses.replace(
        SMALL, inside=True, options=(("use_exp2", False), ("disable_recompute", True))
    ),
}
SAFE_CALLS = {
    "safe": dataclasses.replace(SMALL, inside=True, options=SAFE),
    "safe, given": dataclasses.replace(SMALL, decay=2.0, options=SAFE),
}
CHANNELWISE, HEADWISE = (
    ("kda", "gla", "dplr_delta_rule"),
    ("gated_delta_rule", "comba", "simple_gla"),
)


@pytest.fixture(autouse=True)
def interpreted(monkeypatch):
    """Lets kernels run on CPU tensors, in this module only, and fp32 take the path of bf16."""
    monkeypatch.setenv("TRITON_INTERPRET", "1")
    monkeypatch.setattr(bundles, "SAFE_DTYPES", (torch.float32, torch.bfloat16))
    monkeypatch.setattr(TritonBackend, "chunk_for", Backend.chunk_for)
    remembered = bundles.rule_options, bundles.local_paths
    for cache in remembered:
        cache.cache_clear()
    with using(dataclasses.replace(TRITON, short_chunks=(16, 32))):
        yield
    for cache in remembered:
        cache.cache_clear()


@pytest.fixture
def formed(monkeypatch):
    """The lengths of the chunks whose tables were made."""
    found, columns = set(), operands.columns

    def noted(packing):
        found.add(packing.chunk)
        return columns(packing)

    monkeypatch.setattr(operands, "columns", noted)
    return found


def compare(call, actual, exact, plain):
    """As in test_kernels.py, against the torch stages, which have chunks of the same length."""
    shift = 231 * 2**-24 if dict(call.options).get("safe_gate") else 0.0
    dg = exact["dgk" if "dgk" in exact else "dg"]
    for name, value in actual.items():
        if name in ("dA_log", "ddt_bias"):  # sums over tokens: their terms round, not the result
            error = (value.double() - exact[name]).abs().max()
            assert error <= 32 * torch.finfo(value.dtype).eps * dg.abs().sum(), name
        else:
            assert_within_budget(name, value, exact[name], plain[name], factor=5.0, shift=shift)


def check(name, call, chunk, formed):
    member, cu = BY_NAME[name], OFFSETS[chunk]
    if member.dplr:  # two rows a token
        cu = tuple(n // 2 for n in cu)
    call = dataclasses.replace(call, T=cu[-1], cu=cu)
    exact, plain = oracle(member, call, torch.float32), run(member, call, torch.float32)
    compare(call, run(member, call, torch.float32, "triton"), exact, plain)
    assert formed == {chunk}


@pytest.mark.parametrize("name, call, chunk", crossed(CHANNELWISE, CALLS | SAFE_CALLS, OFFSETS))
def test_one_decay_a_channel(name, call, chunk, formed):
    check(name, (CALLS | SAFE_CALLS)[call], chunk, formed)


@pytest.mark.parametrize("name, call, chunk", crossed(HEADWISE, CALLS, OFFSETS))
def test_one_decay_a_head(name, call, chunk, formed):
    check(name, CALLS[call], chunk, formed)


class Cut(TritonBackend):
    """Cuts every two chunks, so that segments of short chunks are summarized and folded."""

    def segment(self, packing, *rest):
        return packing.cut(2)


ASKED = {
    **{name: CALLS[name] for name in ("given", "inside", "exp, kept")},
    "safe": SAFE_CALLS["safe"],
    "high": dataclasses.replace(SMALL, inside=True, options=(("precision", "high"),)),
}


@pytest.mark.parametrize(
    "name, call, chunk, cut",
    crossed(CHANNELWISE + HEADWISE, ASKED, OFFSETS, ("whole", "cut"), fast=8),
)
def test_long_sequences_have_the_chunks_that_are_asked_for(name, call, chunk, cut, formed):
    """Sequences of one chunk, and two of three; if those of 16 tokens are cut, of five and six."""
    member, cu = BY_NAME[name], (0, 1, 1, 75, 171)
    if (chunk, cut) == (16, "whole"):
        cu = (0, 1, 1, 38, 86)
    if member.dplr:  # two rows a token
        cu = tuple(-(-n // 2) for n in cu)
    call = dataclasses.replace(ASKED[call], T=cu[-1], cu=cu)
    if member.per_head:  # only a decay of channels may have a bound
        call = dataclasses.replace(call, options=tuple(o for o in call.options if o not in SAFE))
    exact = oracle(member, call, torch.float32)
    plain = run(member, call, torch.float32, chunk_size=chunk)
    with using(Cut() if cut == "cut" else TRITON):
        found = run(member, call, torch.float32, "triton", chunk_size=chunk)
    compare(call, found, exact, plain)
    assert formed == {chunk}


def test_only_16_tokens_have_short_chunks_by_themselves(monkeypatch):
    monkeypatch.undo()  # `chunk_for` as it is
    half = (torch.bfloat16, torch.float16)
    assert {TRITON.chunk_for(n, dtype) for n in (1, 16) for dtype in half} == {16}
    assert {TRITON.chunk_for(n, dtype) for n in (17, 32, 64, 99) for dtype in half} == {64}
    assert TRITON.chunk_for(16, torch.float32) == 64


def test_chunks_of_64_where_short_ones_are_not_wanted(formed):
    call = dataclasses.replace(SMALL, T=16, cu=(0, 9, 16))
    found = run(BY_NAME["kda"], call, torch.float32, "triton")
    with using(dataclasses.replace(TRITON, short_chunks=())):
        whole = run(BY_NAME["kda"], call, torch.float32, "triton")
    assert formed == {16, 64}
    for name, value in found.items():
        assert (value - whole[name]).abs().max() <= 1e-5 * whole[name].abs().max(), name


@pytest.mark.parametrize("chunk, folder", [(16, "triton"), (32, "triton"), (64, "sm90")])
def test_hopper_kernels_take_chunks_of_64_only(chunk, folder):
    x = [torch.zeros(32, 1, 128) for _ in "qkvg"]
    packing = Packing.build((0, 16, 32), chunk=chunk)
    tuning = Tuning(gluon=True)
    _, c = empty_chunks(DeltaRule(1.0), packing, Inputs(*x, x[0][..., 0], None, None), tuning)
    assert c.tokens == chunk and choose(packing, c) == folder


@pytest.mark.parametrize("chunk", [16, 32])
def test_sums_are_those_of_the_first_rows_of_64(chunk):
    device = torch.device("cpu")
    whole = sums(torch.float32, device, 64)
    assert torch.equal(sums(torch.float32, device, chunk), whole[:, :chunk, :chunk])
