"""The time that a step spends waiting for other ranks, measured at each wait."""

import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import torch


class ExchangeTimer:
    """Sums waits: host time on CPU, stream time between two events on CUDA."""

    def __init__(self) -> None:
        self._host_ms = 0.0
        self._events: list[tuple[torch.cuda.Event, torch.cuda.Event]] = []

    def elapsed_ms(self) -> float:
        """Milliseconds so far; on CUDA this waits for the recorded events."""
        device_ms = 0.0
        for begin, end in self._events:
            end.synchronize()
            device_ms += begin.elapsed_time(end)
        return self._host_ms + device_ms

    @contextmanager
    def interval(self, device: torch.device) -> Iterator[None]:
        if device.type == "cuda":
            begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            begin.record()
            yield
            end.record()
            self._events.append((begin, end))
        else:
            start = time.perf_counter()
            yield
            self._host_ms += 1e3 * (time.perf_counter() - start)


@dataclass
class Waits:
    """The exchanges that this process has waited for. Another thread reads it.

    count: how many so far. now: what the present exchange moves; "" if there is none. On CUDA only
    the stream waits, so that the host is rarely inside an exchange, and `count` is the number that
    it has queued.
    """

    count: int = 0
    now: str = ""


waits = Waits()

_timer: ExchangeTimer | None = None


@contextmanager
def measure_exchange() -> Iterator[ExchangeTimer]:
    """Measures every wait for a state or halo exchange of this process inside the block.

    The timer is a global of the module, not a context variable: the backward on CUDA runs in
    threads of autograd, which inherit no context.
    """
    global _timer
    before, _timer = _timer, ExchangeTimer()
    try:
        yield _timer
    finally:
        _timer = before


@contextmanager
def exchange_wait(device: torch.device, what: str = "exchange of states") -> Iterator[None]:
    """Records a wait for other ranks in `measure_exchange`, the profiler's trace and `waits`."""
    waits.count += 1
    waits.now = what  # it stays after an error, and then says where the error was
    with torch.profiler.record_function("fla_cp.exchange"):
        if _timer is None:
            yield
        else:
            with _timer.interval(device):
                yield
    waits.now = ""


@contextmanager
def unmeasured() -> Iterator[None]:
    """In the block no wait is measured: a CUDA graph is captured, whose events have no times."""
    global _timer
    before, _timer = _timer, None
    try:
        yield
    finally:
        _timer = before
