"""The bytes that benchmarks/traffic.py counts for a call of KDA, and the times of its stages."""

import pytest
import torch

pytest.importorskip("triton")

import fla_cp
from benchmarks import traffic
from benchmarks.members import MEMBERS, draws, options
from benchmarks.shapes import Shape
from benchmarks.traffic import Span
from fla_cp.kernels.triton.launch import redirected
from fla_cp.kernels.triton.tile_table import IN_SCANS, SCORES_BWD, TALL, TALL_BWD
from tests.support import gluon_interpreter
from tests.support.channelwise import fp32_as_bf16
from tests.support.gluon_interpreter import Described, Pointers, interpreted
from tests.support.tuned import tuned

TILES = {"intra": TALL, "intra_bwd": TALL_BWD, "scores_bwd": SCORES_BWD, "gated": IN_SCANS}
TARGET = Shape("target", 32768)


@pytest.fixture
def in_fp32(monkeypatch):
    yield from fp32_as_bf16(monkeypatch)


@pytest.mark.usefixtures("in_fp32")
@pytest.mark.filterwarnings("ignore:.*encountered in:RuntimeWarning")
@pytest.mark.parametrize("kept", [False, True])
def test_kernels_touch_what_is_counted(kept, monkeypatch):
    """Interpreted, each kernel reads and writes the tensors that count, and no others."""
    shape = Shape("small", 128, H=1, HV=1, disable_recompute=kept)
    launches, touched = [], set()

    def note(base):
        touched.add(traffic.place(base))

    def watched(kind, name, base_of):
        original = getattr(kind, name)

        def call(self, *given):
            note(base_of(self))
            return original(self, *given)

        monkeypatch.setattr(kind, name, call)

    watched(Pointers, "memory", lambda p: p.base)
    watched(Described, "_window", lambda x: x.base)
    names = {}
    for module in gluon_kernels():
        names |= {n: k.arg_names for n, k in vars(module).items() if n.endswith("sm90_kernel")}

    def run(kernel, grid, *given, **named):
        touched.clear()
        kernel[grid](*given, **named)
        if isinstance(kernel, gluon_interpreter.Launcher):
            name = launched[-1]
            values = dict(zip(names[name], given, strict=False)) | named
            tensors = dict(p for n, x in values.items() for p in traffic.tensors_in(n, x))
            launches.append((traffic.Launch("", name, tensors), set(touched)))

    x, do = draws(MEMBERS["kda"], shape, "cpu")
    x = {n: t.detach().float().requires_grad_() for n, t in x.items()}
    with interpreted() as launched, tuned(gluon=True, forced=tuple(TILES.items())), redirected(run):
        o, _ = fla_cp.chunk_kda(**x, **options(MEMBERS["kda"], shape), impl="triton")
        torch.autograd.grad(o, list(x.values()), do.float())
    scans = {"scan_bwd_sm90_kernel"}
    if not kept:
        scans = {"scan_gated_sm90_kernel", "scan_bwd_gated_sm90_kernel"}
    local = {"intra_sm90_kernel", "scores_bwd_sm90_kernel", "safe_bwd_sm90_kernel"}
    assert {launch.kernel for launch, _ in launches} == scans | local | {"scan_sm90_kernel"}
    for launch, found in launches:
        counted = {traffic.place(t): name for name, t in launch.touched().items()}
        missed = found - set(counted)
        given = {traffic.place(t): name for name, t in launch.tensors.items()}
        assert not missed, (launch.kernel, [given[p] for p in missed])
        more = [name for place, name in counted.items() if place not in found]
        assert not more, (launch.kernel, more)


def gluon_kernels():
    import importlib
    import pkgutil

    import fla_cp.kernels.sm90 as folder

    for found in pkgutil.iter_modules(folder.__path__):
        yield importlib.import_module(f"{folder.__name__}.{found.name}")


@pytest.mark.parametrize("sms", [0, 132])
def test_bytes_of_a_call(sms):
    """At the target shape, by hand: in units of one [T, H, 128] in half precision. With 132
    multiprocessors the sequence is cut in two, and its local stage and scans have two launches."""
    unit, T = 2 * TARGET.T * TARGET.HV * 128, TARGET.T
    square, single = unit / 2, unit / 64 / 128 * 2  # [64, 64] of a chunk; fp32 of each row
    decay, beta = 2 * unit / 64, 2 * T * TARGET.HV
    rows, states, shares = 3 * single * 64, 2 * unit, 3 * 64 * single
    anchors, parts = 4 * decay, 4 * 2 * TARGET.HV * T / 64
    with tuned(gluon=True, sms=sms):
        launches = traffic.rehearsed(TARGET)
        found = {row["stage"]: row for row in traffic.floors(launches, 4000.0)}
    formed = 2 * square + decay + rows
    expected = {
        # q, k, g; T, Aqk, decay, rows, anchors, qg, k_decayed, kg
        "local forward": 3 * unit + beta + formed + anchors + 3 * unit,
        # v, o, qg, k_decayed, kg
        "summary and scan": 5 * unit + formed,
        # g, k, v, h, v_new without Aqk, and q, g, k, do, dv, dh
        "states again and reverse scan": 9 * unit + 2 * states + 2 * formed - square,
        # do, dv, v_new, v, o; dAqk and dAkk
        "scores' gradients": 5 * unit + 2 * square + 2 * rows + shares,
        # q, k, g, do, dv, v_new, dq, dk, dg; h and dh
        "local backward": 9 * unit + 2 * states + 2 * square + 2 * rows + shares + anchors
        + decay + parts,
        "sums of gradients": shares + 2 * beta + parts + decay,
    }  # fmt: skip
    assert list(found) == list(expected)
    for stage, size in expected.items():
        row = found[stage]
        assert row["gb"] == pytest.approx(size / 1e9, rel=1e-2 if sms else 1e-3), stage
        assert row["floor_ms"] == pytest.approx(row["gb"] / 4, rel=1e-6)
    assert sum(len(row["kernels"]) for row in found.values()) == len(launches)
    assert len(found["local forward"]["kernels"]) == (2 if sms else 1)


def test_an_unknown_kernel_has_no_bytes():
    launch = traffic.Launch("forward", "new_kernel", {"x": torch.empty(4, device="meta")})
    assert launch.stage == "other kernels"
    with pytest.raises(KeyError, match="new_kernel"):
        traffic.moved_by([launch])


def test_two_names_of_the_same_elements_count_once():
    x = torch.empty(8, 4, device="meta")
    tensors = {"a": x, "b": x.view(32), "c": x[:4], "d": x[4:], "e": x[:0]}
    launch = traffic.Launch("backward", "beta_bwd_kernel", tensors)
    assert list(launch.touched()) == ["a", "c", "d"]
    assert traffic.moved_by([launch, launch]) == 2 * 4 * 32


def test_time_of_a_stage_is_that_in_which_any_of_its_kernels_runs():
    names = "intra_sm90_kernel", "scan_sm90_kernel"
    launches = [traffic.Launch("forward", name, {}) for name in names]
    both = "scan_gated_sm90_kernel", "scan_bwd_gated_sm90_kernel", "scan_sm90_kernel"
    launches += [traffic.Launch("backward", name, {}) for name in both]
    at = [(0, 1000), (1100, 1600), (2000, 5000), (2500, 4000), (4500, 6500)]
    spans = [Span(x.kernel, *span) for x, span in zip(launches, at, strict=True)]
    expected = {"local forward": 1.0, "summary and scan": 0.5}
    found = traffic.by_stage(launches, spans)
    assert found == expected | {"states again and reverse scan": 4.5}
    with pytest.raises(ValueError, match="its rehearsal"):
        traffic.by_stage(launches, spans[:-1])
