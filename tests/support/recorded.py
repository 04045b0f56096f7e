"""Calls to record: kernels are stood in for by functions that read and write memory by its address,
so that a program can be compared with the call that it was recorded from."""

import ctypes
from functools import partial
from types import SimpleNamespace

import torch

from fla_cp.program import Program
from fla_cp.replay import Replayed
from fla_cp.tape import active

N = 8


def floats(address):
    return (ctypes.c_float * N).from_address(address)


def kernel(x, y, z, stream, function, metadata, launch, enter, leave, out, operands, factor):
    """out = factor * sum(operands) + their number; the operands are a nested tuple of addresses."""
    assert (x, y, z) == (2, 3, 1)
    assert (function, metadata, launch, enter, leave) == ("function", "metadata", None, None, None)
    values = [list(floats(address)) for address in operands]
    to = floats(out)
    for i in range(N):
        to[i] = factor * sum(v[i] for v in values) + len(values)


FIXED = "function", "metadata", None, None, None


def launch(out, *operands, factor=1.0, stream=0):
    """A launch of the kernel, noted on the tape if there is one."""
    addresses = tuple(x.data_ptr() for x in operands)
    kernel(2, 3, 1, stream, *FIXED, out.data_ptr(), addresses, factor)
    if active() is not None:
        active().add_launch((kernel, FIXED), (2, 3), (out, operands, factor), stream)


class Stand:
    """A backend whose calls are replayed."""

    def replay_stream(self, device):
        return 0

    def replay_constants(self, first):
        return ()


def plan_of(**objects):
    packing = objects.get("packing", SimpleNamespace(frame=None))
    named = {f"plan.{name}": x for name, x in objects.items()}
    rest = {"key": 1, "backend": Stand(), "objects": named}
    return SimpleNamespace(**{**rest, **objects, "packing": packing})


def ready(**objects):
    """A plan, and a direction with its calls."""
    return plan_of(**objects), Replayed()


def compared(call, *shapes, times=5, plan=None):
    """Runs `call` repeatedly through a `Replayed`, each time on other tensors, and compares every
    result with the call's own. Returns the program."""
    plan, replayed = plan or plan_of(), Replayed()
    for n in range(times):
        torch.manual_seed(n)
        inputs = [torch.randn(shape) for shape in shapes]
        junk = [torch.full((1000,), float("nan")) for _ in range(n)]  # other addresses
        found = replayed(plan, None, inputs, partial(call, *inputs))
        expected = call(*inputs)
        assert len(found) == len(expected)
        for a, b in zip(found, expected, strict=True):
            assert (a is None) == (b is None)
            if a is not None:
                assert a.shape == b.shape and a.stride() == b.stride()
                assert torch.equal(a, b)
        del junk
    (known,) = replayed.known.values()
    assert isinstance(known, Program), known
    return known
