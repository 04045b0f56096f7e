"""Replays a CUDA graph on one GPU that waits for another stream, which is late by another time at
each replay, and fails unless the waits are measured. tests/multi_gpu/test_graphs.py starts it:

    python -m tests.support.graph_replays
"""

import torch

from fla_cp.comm import captured_exchange, measure_exchange
from fla_cp.comm.timing import exchange_begins, exchange_wait
from fla_cp.kernels import graph_clock

SLOP_MS = 0.5


def main():
    here, other = torch.device("cuda"), torch.cuda.Stream()
    arrived, graph = torch.cuda.Event(external=True), torch.cuda.CUDAGraph()
    arrived.record()
    with captured_exchange(graph_clock(here), here) as waits, torch.cuda.graph(graph):
        began = exchange_begins(here)
        torch.cuda._sleep(2_000_000)  # about 1 ms, in which the exchange is under way
        with exchange_wait(here, began=began):
            arrived.wait()

    def replay(million_cycles):
        """Replays once, and returns for how long the other stream was late, in ms."""
        torch.cuda.synchronize()
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        with torch.cuda.stream(other):
            begin.record()
            torch.cuda._sleep(million_cycles * 10**6)
            arrived.record()
            end.record()
        with waits.replayed():
            graph.replay()
        torch.cuda.synchronize()
        return begin.elapsed_time(end)

    for steps in ((0,), (40,), (10,), (0, 20, 10)):
        with measure_exchange() as timer:
            late = list(map(replay, steps))
        found, whole = timer.elapsed_ms(), timer.under_way_ms()
        print(f"late by {late} ms: waited {found} of {whole} ms", flush=True)
        work = [min(ms, 3.0) for ms in late]  # at most 3 ms of a delay pass during the sleep
        assert sum(late) - sum(work) - SLOP_MS <= found <= sum(late) + SLOP_MS
        assert found + 0.5 * len(steps) <= whole <= found + 4 * len(steps)
    print("replays add their times")


if __name__ == "__main__":
    main()
