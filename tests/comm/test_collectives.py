"""Which device a group's tensors travel from, by what carries them."""

import pytest
import torch
import torch.distributed as dist
from torch._C._distributed_c10d import FakeProcessGroup, ProcessGroup

from fla_cp.comm import collectives, peer_memory

CPU, GPU = torch.device("cpu"), torch.device("cuda", 3)


def group_over(*kinds):
    """A group of two ranks without a name, which carries tensors of these kinds of devices."""
    group = ProcessGroup(dist.HashStore(), 0, 2)
    for kind in kinds:
        transport = FakeProcessGroup._create_internal(0, 2, FakeProcessGroup.Options())
        group._register_backend(torch.device(kind), ProcessGroup.BackendType.CUSTOM, transport)
    return group


@pytest.mark.parametrize(
    "kinds, device, wire",
    [
        (("cuda",), CPU, GPU),
        (("cuda",), GPU, GPU),
        (("cpu", "cuda"), CPU, CPU),
        (("cpu", "cuda"), GPU, GPU),
        (("cpu",), CPU, CPU),
    ],
)
def test_numbers_travel_from_a_device_that_the_group_carries(monkeypatch, kinds, device, wire):
    """A group that was made without naming "nccl" has to be asked for its devices."""
    monkeypatch.setattr("torch.cuda.current_device", lambda: GPU.index)
    assert collectives.wire_device(group_over(*kinds), device) == wire


def test_transport_is_that_of_the_device():
    group = group_over("cuda")
    assert collectives.transport(group, "cuda") == "fake"
    assert collectives.transport(group, "cpu") == ""


def test_symmetric_memory_names_what_carries_the_groups_tensors():
    for kinds in (("cuda",), ("cpu",), ("cpu", "cuda")):
        group = group_over(*kinds)
        assert peer_memory.known(group)
        assert peer_memory.why_not(group) == "it needs a group over nccl, this one is over fake"
