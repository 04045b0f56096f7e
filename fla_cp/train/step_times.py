"""Where the time of a step goes on each rank, measured without a wait of the host for the device.

On CUDA, times are those between two events of the stream; CUDA graphs sum up the times of their
waits themselves. All are read after the step's single wait for the device, when they are there.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import NamedTuple

import torch

from fla_cp.comm import ExchangeTimer
from fla_cp.comm.timing import Moment, milliseconds, moment


class RankTimes(NamedTuple):
    """Milliseconds of a step on one rank, and its memory in bytes.

    exchange: the waits for states, tokens and keys of other ranks. under_way: the time from when
    these left to the end of the wait. waiting: all waits for other ranks, `exchange` included;
    those of FSDP's collectives are not measured. host: the host's time from the beginning until
    forward, backward and the sums over ranks were issued. device: the time of the same work on the
    GPU's stream; NaN on the CPU.
    """

    exchange: float
    under_way: float
    waiting: float
    host: float
    device: float
    memory: float


class StepTimes:
    """The times of one step on this rank, which begins now."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.waits = ExchangeTimer()
        self.began, self.begin = time.perf_counter(), moment(device)
        self.end: Moment | None = None
        self.host_ms = 0.0

    @contextmanager
    def waiting(self, *, on_host: bool = False) -> Iterator[None]:
        """Measures the block, a collective of all ranks on the device or on the host."""
        device = torch.device("cpu") if on_host else self.device
        with self.waits.interval(device):
            yield

    def issued(self) -> None:
        """Notes that forward, backward and sums have been issued."""
        self.host_ms = 1e3 * (time.perf_counter() - self.began)
        self.end = moment(self.device)

    def read(self, exchanges: ExchangeTimer, memory: float) -> RankTimes:
        """The times of the step. Call it after the wait for the sums. exchanges: the step's timer
        of exchanges. memory: in bytes."""
        assert self.end is not None, "`issued` comes first"
        exchange = exchanges.elapsed_ms()
        on_gpu = self.device.type == "cuda"
        return RankTimes(
            exchange=exchange,
            under_way=exchanges.under_way_ms(),
            waiting=exchange + self.waits.elapsed_ms(),
            host=self.host_ms,
            device=milliseconds(self.begin, self.end) if on_gpu else float("nan"),
            memory=memory,
        )


def slowest(ranks: Sequence[RankTimes]) -> tuple[int, float]:
    """The rank that waited least, and how much longer the others waited on average, in ms."""
    waits = [rank.waiting for rank in ranks]
    first = min(range(len(waits)), key=waits.__getitem__)
    others = waits[:first] + waits[first + 1 :]
    return first, statistics.fmean(others) - waits[first]
