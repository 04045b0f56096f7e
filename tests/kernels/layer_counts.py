"""What a layer's call does on the host has no more parts than this.

A driver whose launches do nothing stands in for a GPU; the kernels are compiled for an H200.
test_launch.py runs this file in a process of its own.
"""

import pytest
import torch

pytest.importorskip("triton")

import fla_cp.nn
from benchmarks import layer_host
from fla_cp.nn import one_call

MOST = {
    "kda": {"nodes": 1, "forward": (36, 9), "both": (170, 37), "launches": (4, 9), "ops": (5, 21)},
    "gdn": {"nodes": 1, "forward": (25, 8), "both": (124, 27), "launches": (5, 8), "ops": (3, 14)},
}
"""Nodes of the graph; calls of aten and kernels of a forward, and of both directions; what the
program of each direction launches and what it calls of torch. The two tokens are a chunk of 16."""


@pytest.fixture(scope="module")
def machine():
    with layer_host.machine() as found:
        yield found


@pytest.mark.parametrize("name", MOST)
def test_a_call_has_no_more_than_this(machine, name):
    one_call._known.clear()
    most, row = MOST[name], layer_host.measure(name, 2, *machine)
    assert row["nodes"] <= most["nodes"]
    for direction in ("forward", "both"):
        counts = row[direction]["aten"], row[direction]["kernels"]
        assert all(n <= limit for n, limit in zip(counts, most[direction], strict=True)), counts
        assert row[direction]["host_ms"] > 0
    (known,) = one_call._known.values()
    for i, direction in enumerate((known.kind.forward, known.kind.backward)):
        ((_, program),) = direction.known.items()
        assert program.launches <= most["launches"][i], program.source
        assert program.ops <= most["ops"][i], program.source
        assert program.steps == 0


def test_module_by_module_a_call_has_no_more_than_this(machine):
    """A hook on one module keeps the others' calls apart, but the operator's is still replayed."""
    device, launches = machine
    layer = layer_host.built("kda", device)
    layer.o_norm.register_forward_hook(lambda *_: None)
    x = torch.zeros(1, 2, 16, dtype=torch.bfloat16).requires_grad_()
    for _ in range(4):
        layer(x).sum().backward()
    assert layer_host.nodes(layer(x)) <= 21
    counts = layer_host.counted(lambda: layer(x), launches)
    assert counts["aten"] <= 90 and counts["kernels"] <= 11, counts


def test_what_is_counted(machine):
    """The counts above are not blind."""
    device, launches = machine
    x = torch.zeros(4, 4).requires_grad_()
    y = torch.sigmoid(torch.mm(x.t(), x) * x)
    assert layer_host.nodes(y) == 4
    counts = layer_host.counted(lambda: torch.sigmoid(torch.mm(x.t(), x) * x), launches)
    assert counts["kernels"] == 3 and counts["aten"] >= 5
    assert layer_host.built("gdn", device).core.A_log.dtype == torch.float32
    assert isinstance(layer_host.built("kda", device), fla_cp.nn.KimiDeltaAttention)
