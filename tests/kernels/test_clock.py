"""The kernels that read a GPU's clock, interpreted with the host's, and where they are found."""

import sys
import time

import pytest
import torch

pytest.importorskip("triton")  # interpreted: conftest.py
from fla_cp.kernels import graph_clock
from fla_cp.kernels.triton import clock
from tests.support.clocks import hosttimer


@pytest.fixture
def times(monkeypatch):
    monkeypatch.setenv("TRITON_INTERPRET", "1")
    monkeypatch.setattr(clock, "globaltimer", hosttimer)


def test_waits_are_summed_up_in_ns(times):
    sums, now = torch.zeros(2, dtype=torch.int64), torch.zeros(2, dtype=torch.int64)
    for n in (1, 2):
        before = time.perf_counter_ns()
        clock.write_time(now[:1])
        clock.write_time(now[1:])
        assert before <= now[0] < now[1] <= time.perf_counter_ns()
        time.sleep(0.01)
        earlier = n * 7_000_000  # exchanges that were under way before
        clock.add_wait(sums, now[:1] - earlier, now[:1])
        assert sums[1] - sums[0] == n * (n + 1) // 2 * 7_000_000
        assert n * 1e7 <= sums[0]
    assert now[0] - before + sums[0] < 10 * (time.perf_counter_ns() - before)


GPU = torch.device("cuda", 0)


@pytest.mark.parametrize("device, hip, capability, missing, found", [
    (GPU, None, (9, 0), False, True),
    (GPU, None, (8, 0), False, True),
    (GPU, None, (7, 5), False, False),
    (GPU, "7.1", (9, 4), False, False),
    (GPU, None, (9, 0), True, False),
    (torch.device("cpu"), None, (9, 0), False, False),
])  # fmt: skip
def test_which_devices_have_a_clock(monkeypatch, device, hip, capability, missing, found):
    """missing: Triton is not installed."""
    monkeypatch.setattr(torch.version, "hip", hip)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: capability)
    if missing:
        monkeypatch.setitem(sys.modules, "fla_cp.kernels.triton.clock", None)
    assert graph_clock(device) is (clock.CLOCK if found else None)
