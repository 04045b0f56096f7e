"""The time that a step spends waiting for other ranks, measured at each wait."""

import time
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass

import torch

Moment = torch.cuda.Event | float
"""A point of the current stream of a CUDA device, or a time of the host in seconds."""


def moment(device: torch.device) -> Moment:
    """The present moment."""
    if device.type != "cuda":
        return time.perf_counter()
    event = torch.cuda.Event(enable_timing=True)
    event.record()
    return event


def milliseconds(begin: Moment, end: Moment) -> float:
    """From one moment to a later one of the same kind; on CUDA this waits for the later one."""
    if isinstance(begin, float) or isinstance(end, float):
        assert isinstance(begin, float) and isinstance(end, float)
        return 1e3 * (end - begin)
    end.synchronize()
    return begin.elapsed_time(end)


class ExchangeTimer:
    """Sums the times of waits: host time on CPU, stream time between two events on CUDA.

    It also sums how long exchanges were under way, from when their messages left to the end of the
    wait. Work that ran in the meantime is part of that time. The wait itself is the part of an
    exchange that other work does not hide.
    """

    def __init__(self) -> None:
        self._waits: list[tuple[Moment, Moment]] = []
        self._spans: list[tuple[Moment, Moment]] = []

    def elapsed_ms(self) -> float:
        """Milliseconds of waiting so far; on CUDA this waits for the recorded events."""
        return sum(milliseconds(*wait) for wait in self._waits)

    def under_way_ms(self) -> float:
        """Milliseconds for which exchanges were under way so far, measured in the same way."""
        return sum(milliseconds(*span) for span in self._spans)

    @contextmanager
    def interval(self, device: torch.device, began: Moment | None = None) -> Iterator[None]:
        """Measures the block, which waits. began: when the messages left for which it waits."""
        begin = moment(device)
        yield
        end = moment(device)
        self._waits.append((begin, end))
        self._spans.append((begin if began is None else began, end))


@dataclass
class Waits:
    """The exchanges for which this process has waited. A thread that watches for long waits reads
    it.

    count: how many there were so far. now: what the present exchange moves; "" if there is none. On
    CUDA only the stream waits. The host is then rarely inside an exchange, and `count` is the
    number of waits that it has queued.
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


def named(what: str) -> AbstractContextManager[object]:
    """Names a block in the trace of a profiler, if one records. torch's own context takes 30 us or
    more even if none does."""
    recorded = torch.autograd._profiler_enabled()  # type: ignore[attr-defined]
    return torch.profiler.record_function(f"fla_cp.{what}") if recorded else nullcontext()


def exchange_begins(device: torch.device) -> Moment | None:
    """The moment at which messages leave, for `exchange_wait`; None if nothing is measured."""
    return None if _timer is None else moment(device)


@contextmanager
def exchange_wait(
    device: torch.device, what: str = "exchange of states", began: Moment | None = None
) -> Iterator[None]:
    """Records a wait for other ranks in `measure_exchange`, the profiler's trace and `waits`.
    began: from `exchange_begins`."""
    waits.count += 1
    waits.now = what  # it stays after an error, and then says where the error was
    with named(what):
        if _timer is None:
            yield
        else:
            with _timer.interval(device, began):
                yield
    waits.now = ""


@contextmanager
def unmeasured() -> Iterator[None]:
    """Measures no wait in the block, in which a CUDA graph is captured: the events of a graph have
    no times."""
    global _timer
    before, _timer = _timer, None
    try:
        yield
    finally:
        _timer = before
