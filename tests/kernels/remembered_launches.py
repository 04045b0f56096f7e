"""Remembered launches run what Triton would run, with the same arguments.

A driver records the launches in place of a GPU. test_launch.py runs this file in a process of its
own.
"""

from contextlib import contextmanager
from types import SimpleNamespace

import pytest
import torch

pytest.importorskip("triton")
import triton
import triton.language as tl
from triton.runtime import driver

from fla_cp.kernels.sm90 import tma
from fla_cp.kernels.triton import launch as launches
from fla_cp.kernels.triton.device.bundles import Rows, rows
from fla_cp.kernels.triton.launch import launch
from tests.support.driver import Sm90Driver


@triton.jit
def twice(x):
    return x * 2


@triton.jit
def thrice(x):
    return x * 3


@triton.jit
def kernel(x, y, n, scale, pair, B: tl.constexpr, F: tl.constexpr, WHAT: tl.constexpr):
    i = tl.arange(0, B) * n + pair[0] + pair[1]
    a = F(tl.load(x + i)).to(tl.float32) * scale
    if WHAT == "sum":
        a += 1
    if y is not None:
        tl.store(y + i, a)
    tl.store(x + i, a.to(x.dtype.element_ty))


class Recorder(Sm90Driver):
    """Replaces the CUDA driver and its launcher, and records launches."""

    def __init__(self):
        self.device, self.runs = 0, []
        recorder = self

        class Launcher:
            def __init__(self, src, metadata):
                self.hash = metadata.hash

            def __call__(self, x, y, z, stream, function, *args):
                launched = self.hash, (x, y, z), stream, function
                recorder.runs.append((launched, args[-recorder.count :]))

        class Utils:
            def load_binary(self, name, kernel, shared, device):
                return 1, 2 + device, 32, 0, 1024

            def get_device_properties(self, device):
                return {"max_shared_mem": 232448}

        self.launcher_cls, self.utils, self.count = Launcher, Utils(), 0

    def get_current_device(self):
        return self.device

    def get_current_stream(self, device=None):
        return 7 + self.device


@pytest.fixture(scope="module")
def recorder():
    active = driver._active
    found = Recorder()
    driver.set_active(found)
    yield found
    driver._active = active
    launches._known.clear()


@contextmanager
def as_triton():
    launches.runner = lambda kernel, grid, *given, **named: kernel[grid](*given, **named)
    try:
        yield
    finally:
        launches.runner = None


def same(recorder, kernel, grid, *given, **named):
    """Launches three times, the last time as Triton does, and asserts that all runs are equal.

    The second launch must not look up the kernel.
    """
    recorder.runs.clear()
    recorder.count = len(kernel.arg_names)
    launch(kernel, grid, *given, **named)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(launches.JITFunction, "run", None)
        launch(kernel, grid, *given, **named)
    with as_triton():
        launch(kernel, grid, *given, **named)
    first, second, plain = recorder.runs
    for run in (first, second):
        assert run[0] == plain[0]
        assert all(a is b or a == b for a, b in zip(run[1], plain[1], strict=True))
    return second[0][0]


VALUES = {
    "x": [torch.zeros(64), torch.zeros(65)[1:], torch.zeros(64, dtype=torch.bfloat16)],
    "y": [None, torch.zeros(64), torch.nn.Parameter(torch.zeros(65))[1:]],
    "n": [0, 1, 2, 16, 17, -16, 2**33, 2**33 + 1],
    "scale": [1.0, 0.5, 1, 2, 16],
    "pair": [(1, 2), (16, 1), (1, 16), (2**40, 3)],
    "B": [16, 32],
    "F": [twice, thrice],
    "WHAT": ["sum", "none"],
}


@pytest.mark.parametrize("given", [0, 3])
def test_any_arguments_run_what_triton_runs(recorder, given):
    """Each value of an argument is combined with the same other values, so that only it differs."""
    hashes = set()
    for base in (0, -1):
        usual = {name: values[base] for name, values in VALUES.items()}
        for name, values in VALUES.items():
            for value in values:
                named = usual | {name: value}
                first = [named.pop(n) for n in list(VALUES)[:given]]
                hashes.add(same(recorder, kernel, (3, 2), *first, **named, num_warps=4))
    assert len(hashes) > 20


def test_names_in_another_order_and_options_are_told_apart(recorder):
    x = torch.zeros(64)
    fixed = {"x": x, "y": None, "pair": (2, 3), "B": 16, "F": twice, "WHAT": "sum"}
    a = same(recorder, kernel, (1,), **fixed, n=1, scale=2, num_warps=4)
    b = same(recorder, kernel, (1,), **fixed, scale=1, n=2, num_warps=4)
    c = same(recorder, kernel, (1,), **fixed, n=1, scale=2, num_warps=8)
    assert len({a, b, c}) == 3


def test_a_device_has_its_own(recorder):
    named = {"x": torch.zeros(64), "y": None, "n": 1, "scale": 0.5, "pair": (1, 1), "B": 16}
    named |= {"F": twice, "WHAT": "sum"}
    for recorder.device in (0, 1):
        same(recorder, kernel, (1,), **named)
        assert {launched[2] for launched, _ in recorder.runs} == {7 + recorder.device}
    recorder.device = 0


def test_a_launcher_is_called_as_triton_calls_it(recorder):
    """It takes what `launcher` returns, and the kernel's arguments."""
    given = torch.zeros(64), None, 3, 0.5, (2, 3), 16, twice, "sum"
    recorder.runs.clear()
    recorder.count = len(kernel.arg_names)
    run, fixed = launches.launcher(launch(kernel, (3, 2, 1), *given))
    run(3, 2, 1, 7 + recorder.device, *fixed, *given)
    launch(kernel, (3, 2, 1), *given)
    first, *again = [(launched, [id(x) for x in args]) for launched, args in recorder.runs]
    assert again == [first, first]


def test_many_are_forgotten(recorder, monkeypatch):
    monkeypatch.setattr(launches, "MAX_REMEMBERED", 3)
    launches._known.clear()
    named = {"x": torch.zeros(64), "y": None, "scale": 0.5, "pair": (1, 1), "B": 16}
    for n in range(8):
        same(recorder, kernel, (1,), **named, n=n, F=twice, WHAT="sum")
        assert len(launches._known) <= 3


def test_a_descriptor_is_told_by_what_is_compiled_of_it():
    x = torch.zeros(64, 2, 128, dtype=torch.bfloat16)
    a, b = (tma.describe(t, 64, 64) for t in (x, x[:32]))
    others = tma.describe(x, 64, 128), tma.describe(x.float(), 64, 64)
    assert key_of(a) == key_of(b)
    assert len({key_of(t) for t in (a, *others)}) == 3


META = {"swizzle": 3, "elem_size": 2, "elem_type": 8, "block_size": [1, 1, 64], "fp4_padded": False}
"""What Triton says of a compiled kernel's descriptor."""


class Encoded:
    """Stands for the part of Triton's driver that encodes descriptors, and keeps what it was given.
    Its name differs between Triton 3.6 and 3.7."""

    def __init__(self):
        self.given = []

    def __getattr__(self, name):
        assert name.startswith("fill_tma_descriptor"), name

        def encode(*given):
            self.given.append(given)
            return given

        return encode


def test_descriptors_of_new_addresses_are_what_triton_makes(recorder, monkeypatch):
    """Descriptors that differ in their memory alone are made once for each address."""
    monkeypatch.setattr(recorder, "utils", utils := Encoded())
    x, y = (torch.zeros(64, 2, 128, dtype=torch.bfloat16) for _ in range(2))
    maps = [launches.tensor_maps(tma.describe(t, 1, 64), META) for t in (x, y)]
    assert maps[0] is maps[1]
    for other in (tma.describe(x[:32], 1, 64), tma.describe(x, 1, 128)):
        assert launches.tensor_maps(other, META) is not maps[0]
    assert launches.tensor_maps(tma.describe(x, 1, 64), {**META, "swizzle": 2}) is not maps[0]
    for t in (x, y, x, y):
        made = maps[0](t.data_ptr())
        assert made == launches.make_tensordesc_arg(tma.describe(t, 1, 64), META)
    assert len(utils.given) == 4 + 2


def test_programs_share_the_descriptors_that_they_make():
    """Two launches of which only the tensor differs, as programs record them."""
    compiled = SimpleNamespace(run=print)
    x, y = (torch.zeros(64, 2, 128, dtype=torch.bfloat16) for _ in range(2))
    found = [launches.without_descriptors(compiled, (3, tma.describe(t, 1, 64)))[1] for t in (x, y)]
    (n, a), (_, b) = found
    assert n == 3 and a.base is x and b.base is y
    assert a.make is b.make


def test_descriptors_of_too_many_addresses_are_made_again(recorder, monkeypatch):
    monkeypatch.setattr(recorder, "utils", Encoded())
    monkeypatch.setattr(launches, "MAX_TENSOR_MAPS", 3)
    maps = launches.TensorMaps(tma.describe(torch.zeros(64, 2, 128), 1, 64), META)
    for address in range(0, 160, 16):
        assert maps(address)[0][0] == address
        assert len(maps.found) <= 3


def test_descriptors_that_the_launcher_encodes_have_their_address():
    """As in Triton's own launcher of descriptors, which takes them as they are."""
    described = tma.describe(torch.zeros(64, 2, 128), 1, 64)
    found = launches.tensor_maps(described, None)(4096)
    assert type(found) is type(described) and found.base.data_ptr() == 4096
    assert found.shape == described.shape and found.block_shape == described.block_shape


def key_of(*values):
    parts = []
    launches.specialization_key(parts, values)
    return tuple(parts)


def test_what_is_compiled_apart_has_another_key():
    x = torch.zeros(64)
    given = [x, x[1:], x.bfloat16(), 0, 1, 1.0, None, "sum", (1, 2), (1, 2, 3), ((1,), 2), twice]
    given += [rows(x.view(4, 4, 4)), Rows(None, 0, 0), Rows(x, 4, 0)]
    keys = [key_of(*values) for values in (*([v] for v in given), [1, 2], [x, x])]
    assert len(set(keys)) == len(keys)


def test_a_descriptor_says_what_tritons_own_says():
    """Our descriptors are made without a check, so this makes Triton's own, which checks."""
    wide = torch.zeros(64, 2, 3, 128, dtype=torch.bfloat16)[:, :, 1]
    for x in (wide, wide.contiguous(), torch.zeros(3, 2, 7, 64), torch.zeros(5, 1, 128)):
        ours = tma.describe(x, 1, 64)
        checked = tma.TensorDescriptor(
            ours.base, ours.shape, ours.strides, ours.block_shape, ours.layout, ours.padding
        )
        for name, value in vars(checked).items():
            assert getattr(ours, name) is value or getattr(ours, name) == value
        reach = sum((n - 1) * s for n, s in zip(ours.shape, ours.strides, strict=True))
        assert reach == sum((n - 1) * s for n, s in zip(x.shape, x.stride(), strict=True))
