"""Which calls the Gluon kernels take, and their results in an interpreter of our own.

tests/aot compiles the kernels, and tests/gpu runs them.
"""

from contextlib import nullcontext
from itertools import pairwise

import pytest
import torch

pytest.importorskip("triton")

from fla_cp.kernels.sm90 import eligible
from fla_cp.kernels.triton import tile_table
from fla_cp.kernels.triton.generations import choose
from fla_cp.kernels.triton.operands import Chunks
from fla_cp.kernels.triton.scan import scan_tile
from fla_cp.kernels.triton.tile_table import TUNING, Tuning
from fla_cp.partition.packing import Packing
from fla_cp.partition.workload import Workload
from fla_cp.rule import DeltaRule
from tests.support.closeness import assert_within_budget
from tests.support.sweeps import crossed
from tests.support.tuned import tune

BF16 = torch.bfloat16


def chunks(NC=3, HV=2, K=128, V=128, dtype=BF16, heads=False, **given):
    """Operands of this number of chunks. heads: value heads, with one decay a head."""
    tokens = 64 * NC
    k = (tokens, HV, K) if heads else (NC, HV, 64, K)
    x = {n: torch.empty(k, dtype=dtype) for n in ("qg", "k_decayed", "kg")}
    x |= {n: torch.empty(NC, HV, 64, 64, dtype=dtype) for n in ("T", "Aqk")}
    x |= {"decay": torch.empty(NC, HV, K), "rows": torch.empty(NC, HV, 9 if heads else 3, 64)}
    x |= {n: torch.empty(0) for n in ("anchors", "steep")}
    x |= {"v": torch.empty(tokens, HV, V, dtype=dtype)}
    return Chunks(**x | given, rule=DeltaRule(scale=1.0, per_head=heads))


@pytest.mark.parametrize("heads", [False, True])
def test_bf16_at_128_is_taken(heads):
    c = chunks(heads=heads)
    assert eligible.fits(c, c.v)
    wide = torch.empty(192, 2, 3 * 128, dtype=BF16)  # q, k and v side by side
    assert eligible.fits(c, wide[..., 128:256])


OTHERS = [{"K": 64}, {"V": 64}, {"K": 256, "V": 256}, {"dtype": torch.float16}]


@pytest.mark.parametrize("shape", [*OTHERS, {"dtype": torch.float32}], ids=str)
def test_other_shapes_and_dtypes_are_refused(shape):
    c = chunks(**shape)
    on_sm90 = Tuning(architecture=90)
    assert not (eligible.possible(on_sm90, c.v.dtype) and eligible.fits(c, c.v))


@pytest.mark.parametrize("rows", [
    torch.empty(192, 2, 129, dtype=BF16)[..., 1:],  # 2 bytes off
    torch.empty(192, 2, 132, dtype=BF16)[..., :128],  # rows of 264 bytes
    torch.empty(192, 1, 128, dtype=BF16).expand(-1, 2, -1),
    torch.empty(192, 2, 256, dtype=BF16)[..., ::2],
], ids=["address", "stride", "no stride", "columns"])  # fmt: skip
def test_operands_that_tma_cannot_read_are_refused(rows):
    assert not eligible.fits(chunks(), rows)
    assert not eligible.fits(chunks(heads=True, qg=rows), chunks().v)


def test_rows_not_aligned_to_32_bytes_are_refused():
    from fla_cp.kernels.sm90 import intra_headwise as sm90_intra
    from fla_cp.kernels.torch.intra import Inputs

    def rows(width):
        return torch.empty(192, 2, width, dtype=BF16)[..., :128]

    rest = (torch.empty(192, 2, 128), torch.empty(192, 2), None, None, None)
    assert sm90_intra.reads(Inputs(rows(128), rows(144), *rest))
    assert not sm90_intra.reads(Inputs(rows(128), rows(136), *rest))
    assert not sm90_intra.reads(Inputs(rows(136), rows(128), *rest))
    assert not sm90_intra.reads(Inputs(rows(128), rows(128), *rest, rows(136)))


def tile(c, dense=(), packing=None):
    """The tile for a scan of one segment."""
    packing = packing or Packing.build((0, len(c.v)))
    return scan_tile("scan", packing, c, 1, dense, c.v)


def test_small_calls_keep_the_other_kernels():
    c = chunks()
    assert tile(c).folder == "triton"
    c = c._replace(tuning=Tuning(min_chunk_heads=0))
    assert tile(c).folder == "sm90"
    states = torch.empty(3, 2, 128, 128).mT
    assert tile(c, (states,)).folder == "triton"
    c = c._replace(tuning=Tuning(min_chunk_heads=0, architecture=100))
    assert tile(c).folder == "triton"


FEW = TUNING.min_chunk_heads // 2
"""Chunks of two heads for which the kernels do not pay off yet."""


@pytest.mark.parametrize("most, supports", [(FEW, False), (FEW + 1, True), (2**23, False)])
def test_the_rank_with_most_chunks_decides(most, supports):
    """Whether a call is too small or too large is decided for all ranks together."""
    cu = (0, 192, 192 + 64 * most)
    loads = tuple(Workload.of(cu, [own]) for own in pairwise(cu))
    packing = Packing.build(cu, [(0, 192)], loads=loads)
    assert (tile(chunks(), packing=packing).folder == "sm90") == supports


def test_a_tile_that_does_not_fit_is_refused():
    tuning = Tuning(forced=(("scan", tile_table.NARROW),))
    with pytest.raises(ValueError, match="K = V = 128"):
        tile(chunks(K=64)._replace(tuning=tuning))


def test_a_tile_of_triton_can_be_forced_where_sm90_would_run():
    forced = (("scan", tile_table.Tile(128, 32, 4, 3)),)
    c = chunks()._replace(tuning=Tuning(min_chunk_heads=0))
    assert tile(c).folder == "sm90"
    c = c._replace(tuning=Tuning(min_chunk_heads=0, forced=forced))
    assert tile(c) == forced[0][1]


def test_every_stage_has_a_tile_for_any_number_of_chains():
    for stage in tile_table.SM90_TILES:
        for chains in (0, 1, 127, 128, 10000):
            assert TUNING.tile(stage, 128, 128, BF16, chains, "sm90").folder == "sm90"
            assert TUNING.tile(stage, 128, 128, BF16, chains).folder == "triton"


def test_references_of_quarters_are_for_the_first_of_two_kernels_alone():
    """A safe gate has one kernel and does without them. A forced tile is for both calls."""
    stages = "intra_bwd", "intra_bwd_by_chunk"

    def chosen(tuning):
        return [tuning.tile(stage, 128, 128, BF16, 0, "sm90") for stage in stages]

    assert chosen(TUNING) == [tile_table.TALL_BWD, tile_table.QUARTERS_BWD]
    triton = TUNING.tile("intra_bwd", 128, 128, BF16)
    assert TUNING.tile("intra_bwd_by_chunk", 128, 128, BF16) == triton
    assert chosen(Tuning(forced=(("intra_bwd", triton),))) == [triton, triton]


MEMBERS = [("gated_delta_rule", 1), ("gla", 1), ("comba", 1), ("kda", 1), ("simple_gla", 1)]
MEMBERS += [("gated_delta_rule", 2), ("comba", 2), ("simple_gla", 2)]  # no groups
MEMBERS += [("dplr_delta_rule", 1)]


@pytest.mark.filterwarnings("ignore:overflow encountered:RuntimeWarning")
@pytest.mark.filterwarnings("ignore:invalid value encountered:RuntimeWarning")
@pytest.mark.parametrize("which, cut", crossed(MEMBERS, [True, False], fast=1), ids=str)
def test_kernels_err_like_the_torch_stages(which, cut, monkeypatch):
    """Every scan of a member in fp32, for three documents with states, in gluon_interpreter.py;
    also cut in segments of one chunk, with summaries and transitions. Scans that gate their
    operands are in test_sm90_gated.py.
    """
    from benchmarks.tune import GATED_BEFORE, cut_into
    from tests.support.gluon_interpreter import interpreted
    from tests.support.members import BY_NAME, Call, collect, draw, operator

    monkeypatch.setenv("TRITON_INTERPRET", "1")
    tune(monkeypatch, gluon=True, forced=(("gated", GATED_BEFORE),))
    key, H = which
    member = BY_NAME[key]
    call = Call(T=150, H=H, HV=2, K=128, V=128, inside=True)
    x, keywords, weights = draw(member, call)

    def run(x, impl):
        return collect(lambda y: operator(member, "chunk", y, **keywords, impl=impl), x, weights)

    exact = run({n: t.double() for n, t in x.items()}, "torch")
    x = {n: t.float() for n, t in x.items()}
    plain = run(x, "torch")
    with interpreted() as launched, cut_into(1) if cut else nullcontext():
        found = run(x, "triton")
    kernels = {"scan_sm90_kernel", "scan_bwd_sm90_kernel"}
    if key in ("gated_delta_rule", "comba", "simple_gla"):
        kernels.add("intra_head_sm90_kernel")
    if key in ("gated_delta_rule", "simple_gla") or (key, H) == ("comba", 2):
        kernels.add("head_bwd_sm90_kernel")
    assert kernels <= set(launched)
    for name, value in found.items():
        if name in ("dA_log", "ddt_bias"):  # sums over tokens: their terms round, not the result
            error = (value.double() - exact[name]).abs().max()
            dg = exact["dgk" if member.dplr else "dg"]
            assert error <= 256 * torch.finfo(value.dtype).eps * dg.abs().sum(), name
        else:
            assert_within_budget(name, value, exact[name], plain[name], factor=4.0)


@pytest.mark.parametrize("size", [1e3, 1e6, 1e8])
@pytest.mark.parametrize("in_gluon", [True, False])
def test_a_gate_that_resets_the_state_costs_no_digits(size, in_gluon, monkeypatch):
    """A large sum of decays must not round the decays of other tokens, nor k's norm."""
    import fla_cp
    from tests.support.gluon_interpreter import interpreted

    monkeypatch.setenv("TRITON_INTERPRET", "1")
    tune(monkeypatch, gluon=in_gluon)
    torch.manual_seed(0)
    dtype = torch.float32 if in_gluon else torch.float16  # with fp32, other kernels form these sums
    q, k, v = torch.randn(3, 1, 128, 1, 128)
    g, beta = -0.05 * torch.ones(1, 128, 1), torch.rand(1, 128, 1)
    g[:, [5, 70]] = -size

    def run(dtype, **options):
        x = (t.to(dtype) for t in (q, k, v))
        gates = g.to(torch.promote_types(dtype, torch.float32)), beta.to(dtype)
        return fla_cp.chunk_gated_delta_rule(*x, *gates, use_qk_l2norm_in_kernel=True, **options)[0]

    exact = run(torch.float64, impl="torch")
    with interpreted():
        found = run(dtype, impl="triton").double()
    limit = 1e-3 if dtype == torch.float16 else 1e-4
    assert (found - exact).norm() <= limit * exact.norm()


@pytest.mark.parametrize("H", [1, 2])
def test_a_beta_of_zero_has_a_gradient(H, monkeypatch):
    """The local backward reads dv = beta y, not y, and divides by beta for the gradient of beta."""
    import fla_cp
    from tests.support.gluon_interpreter import interpreted

    monkeypatch.setenv("TRITON_INTERPRET", "1")
    tune(monkeypatch, gluon=True)
    torch.manual_seed(0)
    q, k = torch.randn(2, 1, 70, H, 128)
    v, g, beta = torch.randn(1, 70, 2, 128), -torch.rand(1, 70, 2), torch.rand(1, 70, 2)
    beta[:, ::3] = 0.0

    def run(dtype, impl):
        x = [t.to(dtype).requires_grad_() for t in (q, k, v, g, beta)]
        o, _ = fla_cp.chunk_gated_delta_rule(*x, use_qk_l2norm_in_kernel=True, impl=impl)
        return torch.autograd.grad(o.square().sum(), x)

    exact = run(torch.float64, "torch")
    with interpreted() as launched:
        found = run(torch.float32, "triton")
    assert "head_bwd_sm90_kernel" in launched
    for a, b in zip(found, exact, strict=True):
        assert (a - b).norm() <= 1e-4 * b.norm()


@pytest.mark.parametrize("most, local", [(2**30, 2**30), (0, 0), (2**30, 0), (0, 2**30)])
def test_only_channelwise_scans_have_the_larger_threshold(most, local):
    """For all other kernels the smaller one counts."""
    tuning = Tuning(min_chunk_heads=most, min_local_chunk_heads=local)
    c, of_heads = (chunks(heads=n)._replace(tuning=tuning) for n in (False, True))
    packing = Packing.build((0, len(c.v)))
    either = "sm90" if 0 in (most, local) else "triton"
    assert choose(packing, c, c.v) == ("sm90" if most == 0 else "triton")
    assert choose(packing, c, scans=False) == choose(packing, of_heads, c.v) == either


@pytest.mark.parametrize("per_head", [True, False])
def test_segments_without_tokens_end(per_head, monkeypatch):
    """As in frames that several packings share: their scans do not wait for chunks, and what they
    leave out does not change the others."""
    from benchmarks.tune import now
    from fla_cp.kernels.torch.intra import Inputs, Spec
    from fla_cp.partition.packing import Frame
    from tests.support.gluon_interpreter import interpreted

    monkeypatch.setenv("TRITON_INTERPRET", "1")
    tune(monkeypatch, gluon=True)
    torch.manual_seed(0)
    T, offsets, backend = 150, (0, 70, 150), now()
    q, k = (torch.nn.functional.normalize(torch.randn(T, 2, 128), dim=-1) for _ in "qk")
    g = -torch.rand(T, 2) if per_head else -torch.rand(T, 2, 128)
    x = Inputs(q, k, torch.randn(T, 2, 128), g, torch.rand(T, 2), None, None)
    rule = DeltaRule(scale=1.0, per_head=per_head, safe_gate=not per_head, removal="k")

    def outputs(packing):
        spec = Spec(rule, packing)
        chunks, _ = backend.prepare_chunks(spec, x, None)
        return backend.scan_output(spec, chunks, None, want_states=False, want_end=False)[0]

    frame = Frame.around(2, 4)
    framed = Packing.build(offsets, frame=frame)
    assert any(s.start == s.stop for s in framed.segments)
    with interpreted() as launched:
        found = outputs(framed)
        assert torch.equal(found, outputs(Packing.build(offsets)))
    assert "scan_sm90_kernel" in launched
