"""The GPU's clock, as CUDA graphs read it, against events of the stream."""

from __future__ import annotations

import time

import torch
from torch import Tensor

from fla_cp.comm.timing import milliseconds, moment
from fla_cp.kernels.triton import clock
from tests.gpu import checks

WAITS_MS = (0.0, 0.5, 4.0)
CYCLES_A_MS = 1_900_000
"""Of a GPU, about."""
MOST_OFF_US = 40.0
"""How much longer the time between events may be: the kernels between them take about 10 us."""
REPLAYS = 3


def check_clock() -> checks.Rows:
    """Waits take as long as between the events around them, and each replay adds its own."""
    sums = torch.zeros(2, dtype=torch.int64, device=checks.DEVICE)
    wait(sums, 0.0)  # compiles
    rows = []
    for ms in WAITS_MS:
        sums.zero_()
        idle(5.0)  # meanwhile the host queues what follows
        before = moment(sums.device)
        began, begin = wait(sums, ms)
        off_us = 1e3 * milliseconds(before, moment(sums.device)) - 1e-3 * sums[1].item()
        rows.append(row(f"clock, {ms} ms", -1 <= off_us <= MOST_OFF_US, off_us=off_us))
        # what the wait is shorter by is known exactly
        wrong = (sums[1] - sums[0] - (begin - began)).item()
        rows.append(row(f"clock, parts of {ms} ms", wrong == 0, wrong_ns=wrong))
    if sums.is_cuda:
        rows.append(replayed(sums))
    return rows


def replayed(sums: Tensor) -> dict:
    """Sums over replays of a graph with a wait."""
    graph, earlier = torch.cuda.CUDAGraph(), 0
    with torch.cuda.graph(graph):
        began, begin = wait(sums, 1.0)
    sums.zero_()
    for _ in range(REPLAYS):
        graph.replay()
        earlier += int((begin - began).item())
    waits, spans = sums.tolist()
    wrong = spans - waits - earlier
    ok = wrong == 0 and 0.5 < 1e-6 * waits / REPLAYS < 4
    return row(f"clock, {REPLAYS} replays", ok, wrong_ns=wrong, waits_ns=waits)


def wait(sums: Tensor, ms: float) -> tuple[Tensor, Tensor]:
    """Adds a wait of about that many ms to the sums. Returns when the exchange and the wait began,
    one int64 each, in ns."""
    began, begin = sums.new_empty(1), sums.new_empty(1)
    clock.write_time(began)
    clock.write_time(begin)
    idle(ms)
    clock.add_wait(sums, began, begin)
    return began, begin


def idle(ms: float) -> None:
    if checks.DEVICE == "cuda":
        torch.cuda._sleep(int(ms * CYCLES_A_MS))
    else:
        time.sleep(1e-3 * ms)


def row(case: str, ok: bool, **found: float) -> dict:
    return {"case": case, "dtype": "int64", "ok": ok} | found
