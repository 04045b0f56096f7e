"""The time that a step spends waiting for other ranks, measured at each wait."""

import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass

import torch
from torch import Tensor

from fla_cp.tape import paused

Moment = torch.cuda.Event | float | Tensor
"""A point of the current stream of a CUDA device, or a time of the host in seconds. In a CUDA
graph, the memory to which each replay writes its time, see `GraphTimer`."""


def moment(device: torch.device) -> torch.cuda.Event | float:
    """The present moment, outside CUDA graphs."""
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
    assert isinstance(begin, torch.cuda.Event) and isinstance(end, torch.cuda.Event)
    end.synchronize()
    return begin.elapsed_time(end)


@dataclass(frozen=True)
class GraphClock:
    """What reads a GPU's clock on its current stream, also in a CUDA graph. Times are int64, in ns.

    write: writes the time to its argument, one number. add: called with sums [2], began and begin,
    adds the times since begin and since began to the two sums.
    """

    write: Callable[[Tensor], None]
    add: Callable[[Tensor, Tensor, Tensor], None]


class GraphTimer:
    """Sums the times of the waits of a CUDA graph that is being captured, on its GPU. Each replay
    adds its own. A wait adds two or three small kernels to the graph. Events, recorded anew at each
    replay, would take several times as long.

    sums: int64 [2], in ns: the times of the waits, and for how long exchanges were under way.
    """

    def __init__(self, clock: GraphClock, device: torch.device) -> None:
        self.clock = clock
        self.sums = torch.zeros(2, dtype=torch.int64, device=device)
        self._moments: list[Tensor] = []  # keeps memory to which replays write
        with self.interval(device):
            pass  # compiles and loads the kernels, which a capture may not do

    def moment(self, device: torch.device) -> Tensor:
        """Where each replay writes the time at which it is here."""
        with paused():  # the program of a recorded call (tape.py) must not write there
            now = self.sums.new_empty(1)
            self.clock.write(now)
        self._moments.append(now)
        return now

    @contextmanager
    def interval(self, device: torch.device, began: Moment | None = None) -> Iterator[None]:
        """Measures the block as `ExchangeTimer.interval` does."""
        begin = self.moment(device)
        yield
        with paused():
            self.clock.add(self.sums, began if isinstance(began, Tensor) else begin, begin)

    def fetch(self) -> "FetchedSums":
        """Queues a copy of the sums to the host."""
        host = torch.empty_like(self.sums, device="cpu", pin_memory=self.sums.is_cuda)
        return FetchedSums(host.copy_(self.sums, non_blocking=True), moment(self.sums.device))


@dataclass(frozen=True)
class FetchedSums:
    """Sums [2] of a `GraphTimer`, int64 in ns, that are being copied to the host. copied: when they
    are there."""

    sums: Tensor
    copied: torch.cuda.Event | float

    def read_ms(self) -> tuple[float, float]:
        """Both sums, in ms. The host waits for the copy."""
        if isinstance(self.copied, torch.cuda.Event):
            self.copied.synchronize()
        waits, spans = self.sums.tolist()
        return 1e-6 * waits, 1e-6 * spans


class ExchangeTimer:
    """Sums the times of waits: host time on CPU, stream time between two events on CUDA.

    It also sums how long exchanges were under way, from when their messages left to the end of the
    wait. Work that ran in the meantime is part of that time. The wait itself is the part of an
    exchange that other work does not hide.
    """

    def __init__(self) -> None:
        self._waits: list[tuple[Moment, Moment]] = []
        self._spans: list[tuple[Moment, Moment]] = []
        self._replayed: dict[GraphTimer, FetchedSums] = {}

    def elapsed_ms(self) -> float:
        """Milliseconds of waiting so far; on CUDA this waits for the recorded events."""
        replayed = sum(sums.read_ms()[0] for sums in self._replayed.values())
        return replayed + sum(milliseconds(*wait) for wait in self._waits)

    def under_way_ms(self) -> float:
        """Milliseconds for which exchanges were under way so far, measured in the same way."""
        replayed = sum(sums.read_ms()[1] for sums in self._replayed.values())
        return replayed + sum(milliseconds(*span) for span in self._spans)

    @contextmanager
    def replay(self, graph: GraphTimer) -> Iterator[None]:
        """Adds the waits of a graph that is replayed in the block. graph: the timer of its capture.
        Its sums begin anew with its first replay for this timer, and are copied after each."""
        if graph not in self._replayed:
            graph.sums.zero_()
        yield
        self._replayed[graph] = graph.fetch()

    def moment(self, device: torch.device) -> Moment:
        """The present moment, of the kind that this timer needs."""
        return moment(device)

    @contextmanager
    def interval(self, device: torch.device, began: Moment | None = None) -> Iterator[None]:
        """Measures the block, which waits. began: when the messages left for which it waits."""
        begin = self.moment(device)
        yield
        end = self.moment(device)
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

_timer: ExchangeTimer | GraphTimer | None = None


@contextmanager
def measure_exchange() -> Iterator[ExchangeTimer]:
    """Measures every wait for a state or halo exchange of this process inside the block.

    The timer is a global of the module, not a context variable: the backward on CUDA runs in
    threads of autograd, which inherit no context.
    """
    global _timer
    timer = ExchangeTimer()
    before, _timer = _timer, timer
    try:
        yield timer
    finally:
        _timer = before


def named(what: str) -> AbstractContextManager[object]:
    """Names a block in the trace of a profiler, if one records. torch's own context takes 30 us or
    more even if none does."""
    recorded = torch.autograd._profiler_enabled()  # type: ignore[attr-defined]
    return torch.profiler.record_function(f"fla_cp.{what}") if recorded else nullcontext()


def exchange_begins(device: torch.device) -> Moment | None:
    """The moment at which messages leave, for `exchange_wait`; None if nothing is measured."""
    return None if _timer is None else _timer.moment(device)


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


@dataclass
class GraphWaits:
    """The waits of a CUDA graph. count: how many it contains. timer: that of its capture; None if
    they are not measured."""

    timer: GraphTimer | None = None
    count: int = 0

    @contextmanager
    def replayed(self) -> Iterator[None]:
        """Counts a replay of the graph, in the block, in `waits` and in `measure_exchange`."""
        waits.count += self.count
        if self.timer is None or not isinstance(_timer, ExchangeTimer):
            yield
        else:
            with _timer.replay(self.timer):
                yield


@contextmanager
def captured_exchange(clock: GraphClock | None, device: torch.device) -> Iterator[GraphWaits]:
    """Collects the waits of the block, in which a CUDA graph is captured: nothing waits there, but
    each replay of the graph will. Enter it before the capture begins. clock: that of the device;
    None measures nothing."""
    global _timer
    timer = None if clock is None else GraphTimer(clock, device)
    found, count = GraphWaits(timer), waits.count
    before, _timer = _timer, timer
    try:
        yield found
    finally:
        _timer = before
        found.count, waits.count = waits.count - count, count
