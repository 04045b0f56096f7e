"""The host's clock where a GPU's would be read inside CUDA graphs."""

import time

from fla_cp.comm import GraphClock


def add_wait(sums, began, begin):
    now = time.perf_counter_ns()
    sums[0] += now - begin.item()
    sums[1] += now - began.item()


HOST = GraphClock(lambda now: now.fill_(time.perf_counter_ns()), add_wait)
"""For tensors of the CPU."""


def hosttimer():
    """For Triton's interpreter, which has no `globaltimer`."""
    import triton.language as tl

    return tl.full((), time.perf_counter_ns(), tl.int64)
