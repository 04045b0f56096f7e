"""The GPU's clock inside CUDA graphs.

An event that a graph records takes an H200 4.4 us, and its time takes the host 3.5 us to read. A
small kernel in a graph takes about 1 us, and sums up times on the GPU. The clock is %globaltimer,
which counts ns. It may advance only every microsecond, so that each time may be wrong by as much.
"""

import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra.cuda import globaltimer

from fla_cp.comm.timing import GraphClock
from fla_cp.kernels.triton.launch import launch


@triton.jit
def clock_kernel(now):
    """Writes the time to now, int64 in ns."""
    tl.store(now, globaltimer())


@triton.jit
def add_wait_kernel(sums, began, begin):
    """Adds the times from begin and from began until now to sums [2], int64 in ns. Another stream
    may add to them at the same time."""
    earlier, earliest = tl.load(begin), tl.load(began)  # before a store: one latency for both
    now = globaltimer()
    tl.atomic_add(sums, now - earlier, sem="relaxed")
    tl.atomic_add(sums + 1, now - earliest, sem="relaxed")


def write_time(now: Tensor) -> None:
    """Writes the time at which the current stream gets there to now, one int64 in ns."""
    launch(clock_kernel, (1,), now, num_warps=1)


def add_wait(sums: Tensor, began: Tensor, begin: Tensor) -> None:
    """Adds a wait that ends when the current stream gets there to sums [2], int64 in ns: its time
    since begin, and since began. Both are from `write_time`."""
    launch(add_wait_kernel, (1,), sums, began, begin, num_warps=1)


CLOCK = GraphClock(write_time, add_wait)
