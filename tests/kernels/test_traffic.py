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
    with (
        interpreted() as launched,
        tuned(gluon=True, forced=tuple(TILES.items())),
        redirected(run),
    ):
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
